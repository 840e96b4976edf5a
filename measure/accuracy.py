"""Whether a result may be timed: by the rule of tiny_llama_v3.py --check, whose arithmetic stands there.

An error is a distance from the same result in higher precision. It may be twice that of plain PyTorch in the same
precision, plus a tolerance. A result that is missing or not a number fails.
"""

import math

import torch

from measure.results import Unavailable
from tiny_llama_v3 import judge, relative_errors

# Beyond twice PyTorch's error, relative to the norm of the result, for a kernel alone: one whose rounding differs a
# little from PyTorch's passes, one that rounds once more does not.
KERNEL_TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-4, torch.bfloat16: 1e-3}


def promoted(tensors):
    """Copies in higher precision, fp64 for fp32 and fp32 for anything shorter; they require gradients as before."""
    precise = {torch.float32: torch.float64, torch.float16: torch.float32, torch.bfloat16: torch.float32}
    return [t.detach().to(precise.get(t.dtype, t.dtype)).requires_grad_(t.requires_grad) for t in tensors]


def compare(ours, plain, exact, tolerance, order=2):
    """The Verdict on our results beside plain PyTorch's, each {name: tensor}."""
    return judge(relative_errors(ours, exact, order), relative_errors(plain, exact, order), tolerance)


def require(ours, plain, exact, tolerance):
    """As compare(); ArithmeticError if the verdict is not good."""
    verdict = compare(ours, plain, exact, tolerance)
    if verdict.failed:
        error, allowed = verdict.errors[verdict.worst], verdict.allowed[verdict.worst]
        raise ArithmeticError(f"{verdict.worst} is wrong: error {error:.1e}, allowed {allowed:.1e}")
    return verdict


def require_finite(loss):
    """Arithmetic on NaN takes another time than that on numbers: a run that diverged has none to show."""
    if not math.isfinite(loss):
        raise Unavailable(f"the run diverged: the loss is {loss}")
