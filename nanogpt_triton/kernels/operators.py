"""What the operators of this folder share: how they are made, how they launch kernels, and when they cannot.

Autograd and torch.compile treat them as they treat PyTorch's own. torch.compile traces those of make_operator() down
to the kernels. Where there is nothing to trace, in Triton's interpreter and without Triton, they are opaque. PyTorch
looks for wrap_triton(kernel) in the text of an operator: what it has compiled is out of date if such a kernel changes.
"""

import functools
import warnings

import torch
from torch.autograd import forward_ad

from tiny_llama_v3 import INTERPRETED, KERNEL_DTYPES, launch_by_triton, triton

TRITON_AVAILABLE = triton is not None and (torch.cuda.is_available() or INTERPRETED)

OPAQUE = triton is None or INTERPRETED
make_operator = torch.library.custom_op if OPAQUE else torch.library.triton_op
wrap_triton = (lambda kernel: kernel) if OPAQUE else torch.library.wrap_triton


def launch(kernel, grid, tensors, scalars, constants, num_warps):
    """Launch on the tensors' device by Triton's own launcher, which torch.compile can see into."""
    with torch.cuda.device_of(tensors[0]):
        launch_by_triton(kernel, grid, tensors, scalars, constants, num_warps=num_warps, num_stages=2)


def obstacle(*tensors):
    """Return in words why no kernel can take these tensors, of which some may be None; None if kernels can."""
    x = tensors[0]
    if triton is None:
        return "Triton is not installed"
    if x.device.type != "cuda" and not INTERPRETED:
        return f"the tensors are on {x.device}"
    if any(t is not None and t.dtype not in KERNEL_DTYPES for t in tensors):
        return "the kernels compute in fp32, from fp32, bf16 or fp16"
    if forward_ad._current_level >= 0:  # of an operator without them, forward derivatives would be silently zero
        return "the kernels have no derivatives in forward mode"
    return None


def say_why(name, reason):
    """Warn, once for each reason, that PyTorch computes an operation; torch.compile's tracing cannot."""
    if not torch.compiler.is_compiling():
        say_once(f"{name} runs on PyTorch instead of Triton: {reason}")


@functools.cache
def say_once(message):
    warnings.warn(message, stacklevel=4)


def no_second_derivative(name, other):
    """Return what the backward pass of an operator's backward operator is: it raises RuntimeError."""

    def refuse(ctx, *_):
        raise RuntimeError(f"{name}'s kernels have no second derivative: use PyTorch's {other}")

    return refuse
