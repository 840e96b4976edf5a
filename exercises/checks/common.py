"""What the checks of all exercises share: tasks, comparing, and memory that shows what was stored."""

import builtins
import contextlib
import importlib.util
import math
import re
import sys
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy
import torch
from torch.overrides import TorchFunctionMode

import exercises.checks  # noqa: F401 (first: without a GPU it has Triton interpret)
import tiny_llama_v3 as llama
from exercises.checks import DEVICE


class Wrong(Exception):
    """What is wrong with a result, and a hint where to look.

    got: the result in fp64, if it is a tensor. of: what it is of, so that only the same are compared. case: what the
    check was given beside the module, in a check.
    """

    case = None

    def __init__(self, fact, hint, of=None, got=None, tolerance=0.0):
        super().__init__(fact, hint)
        self.fact, self.hint, self.of, self.got, self.tolerance = fact, hint, of, got, tolerance

    def __str__(self):
        return f"{self.fact}: {self.hint}"

    def is_like(self, other):
        """Tell whether the other one is wrong in the same way: then one mistake explains both."""
        if self.got is None or other.got is None:
            return LINES.sub("", self.fact) == LINES.sub("", other.fact)
        same_kind = self.of == other.of and self.got.shape == other.got.shape
        return same_kind and not differs(self.got, other.got, self.tolerance).any()

    def is_empty(self):
        """Tell whether the result is that of a kernel which is not written yet: nothing, or zeros."""
        return self.got is not None and not (self.got.isfinite() & (self.got != 0)).any()


LINES = re.compile(r"\blines? [\d, and]+")  # of the participant's file: an edited solution has others


class NotYet(Exception):
    """A task that cannot be judged before another one passes."""


class Task(NamedTuple):
    """A task of an exercise: its name is that of the function which it asks for."""

    check: Callable  # check(module, *case) raises Wrong
    cases: tuple
    needs: tuple = ()  # the tasks that come first

    def __call__(self, module):
        """Check the function of a module in all cases; Wrong has the `case` that fails first."""
        for need in self.needs:
            try:
                need(module)
            except Exception as error:  # whatever the code under test does
                raise NotYet(f"not checked before {need.check.__name__} passes") from error
        for case in self.cases:
            try:
                self.run(module, case)
            except Wrong as wrong:
                wrong.case = case
                raise

    def run(self, module, case):
        """Check one case, always with the same inputs, so that a mistake in the solution gives the same result."""
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # from numpy, for unfinished kernels in the interpreter
            self.check(module, *case)


def task(*cases, needs=()):
    """Turn the check of a case into the Task of these cases."""
    return lambda check: Task(check, cases, needs)


def tasks_of(*tasks):
    return {each.check.__name__: each for each in tasks}


# ----------------------------------------------------------------------------------------------------------------------
# Comparing


def expect(condition, fact, hint):
    if not condition:
        raise Wrong(fact, hint)


def expect_number(name, got, wanted, hint):
    """Compare whole numbers."""
    if isinstance(got, float) and got % 1:
        hint = f"a count is a whole number: divide with //, which rounds down, not with /; {hint}"
    expect(got == wanted, f"{name} is {got!r}, expected {wanted!r}", hint)


def expect_several(got, *names):
    """Expect a tuple with an element for each of the names."""
    right = isinstance(got, tuple | list) and len(got) == len(names)
    expect(right, f"{str(got)[:200]} is returned", f"expected ({', '.join(names)})")


def differs(got, wanted, tolerance):
    """Tell which elements of fp64 tensors are further apart than tolerance, relative and absolute; NaN is like NaN."""
    return ~torch.isclose(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


def expect_close(result, wanted, tolerance, hint, name=None):
    """Compare tensors in fp64. The fact names the first element that differs, the hint begins with the symptom.

    name: of the result; one that launch() returned has a name.
    """
    name = name or result.label
    expect(isinstance(result, torch.Tensor), f"{name} is {result!r}, not a tensor", "is it returned?")
    unstored = is_unwritten(result).cpu()
    got, wanted = result.detach().double().cpu(), wanted.detach().double().cpu()
    shapes = f"{name} has the shape {tuple(got.shape)}, expected {tuple(wanted.shape)}"
    expect(got.shape == wanted.shape, shapes, hint)
    bad = differs(got, wanted, tolerance)
    if not bad.any():
        return
    where = tuple(bad.nonzero()[0].tolist())
    value, good = got[where].item(), wanted[where].item()
    digits = next((digits for digits in (5, 8, 12) if f"{value:.{digits}g}" != f"{good:.{digits}g}"), 17)
    described = f"{value:.{digits}g}"
    if unstored[where]:
        described = "never stored"
    elif math.isnan(value):
        described = "NaN, of a computation (0 / 0, inf - inf, the root of a negative number)"
    count = f"{int(bad.sum())} of {bad.numel()} elements of {name} {'is' if bad.sum() == 1 else 'are'} wrong"
    symptom, undefined = symptom_of(got, wanted, bad), getattr(result, "undefined", None)
    if undefined and not got.isfinite().all():
        symptom = (
            f"what the mask in line {undefined} leaves out may be anything, here infinity: give it a value, other="
        )
    if getattr(result, "rounded", False) and not differs(got, wanted, 1e-2).any():
        symptom = (
            "it has few right digits: tl.dot multiplies fp32 with 10 bits of mantissa (TF32) on NVIDIA GPUs unless "
            'input_precision="ieee"'
        )
    if unstored.all():
        symptom = f"nothing is stored in {name}: is there a tl.store, and does its mask let any lane through?"
    fact = f"{count}: at {where} it is {described}, expected {good:.{digits}g}"
    hint = "; ".join(filter(None, (symptom, hint)))
    raise Wrong(fact, hint, (name, bool(unstored.any()), bool(undefined)), got, tolerance)


def symptom_of(got, wanted, bad):
    """How got differs from wanted, both fp64, in words that hold whatever the cause is; "" where nothing stands out."""

    def same(one, other):
        return not differs(one, other, 1e-4).any()

    def steady(values, neutral, dim):
        """Whether values hardly vary along dim, as measured by how far they lie from neutral."""
        middle = values.median(dim=dim, keepdim=True).values
        return ((values - middle).abs() <= 0.02 * (middle - neutral).abs().max()).all()

    kind, error, ratio = "rows" if got.ndim > 1 else "elements", got - wanted, got / wanted
    off = error.abs().max() / wanted.abs().max()
    if got.isfinite().all():
        if not got.any():
            return "it is all zeros"
        if same(got, wanted.trunc()):
            return "the fractions are cut off: is something converted to integers?"
        if steady(ratio.flatten(), 1, 0):
            return f"every element is {ratio.median():.4g} times what is expected"
        if steady(error.flatten(), 0, 0):
            return f"every element is {error.median():+.4g} away from what is expected"
        if off > 0.01 and len(got) > 1 and same(got, got[:1].expand_as(got)):
            return f"all {kind} are the same: does every program take its own?"
        if got.ndim > 1 and steady(ratio, 1, -1):
            return "each row is off by a factor of its own: look at what is computed once for a row (a sum, a root)"
        if off < 0.01 and 0.1 < (error[bad] > 0).double().mean() < 0.9:
            precision = "fp32, where the inputs are fp64" if off < 1e-6 else "fp16 or bf16"
            return f"right but for the last digits: is something computed or stored in {precision}?"
        if any(same(got, wanted.flip(axis)) for axis in range(got.ndim)):
            return "the values are right, but in reverse order"
        if same(got.flatten().sort().values, wanted.flatten().sort().values):
            return "the values are right, but in another order: look at the offsets of loads and stores"
    right = ~bad.flatten(1).any(dim=1) if bad.ndim > 1 else ~bad
    return f"only these {kind} are right: {ranges(right)}" if right.double().mean() > 0.1 else ""


def ranges(true):
    """Return the indices of what is True, as "0 to 3, 7"; with ... after the third range."""
    indices = true.nonzero().flatten()
    parts = indices.tensor_split((indices.diff() > 1).nonzero().flatten() + 1)
    told = [f"{part[0]} to {part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts[:3]]
    return ", ".join(told) + ", ..." * (len(parts) > 3)


@contextlib.contextmanager
def unchanged(**inputs):
    """Raise Wrong if the code within changes one of these tensors."""
    before = {name: tensor.detach().clone() for name, tensor in inputs.items()}
    yield
    for name, tensor in inputs.items():
        expect(
            torch.equal(tensor, before[name]),
            f"{name} is an input, and was changed in place",
            "by +=, *=, a method whose name ends with _, or a store; make a new tensor instead",
        )


# ----------------------------------------------------------------------------------------------------------------------
# Memory that shows what was stored

GUARD = 4096  # elements behind a result that a store without a mask may hit on a GPU
# The bits of a NaN that no computation gives, so that an element that was never stored is told from 0 / 0.
UNWRITTEN = {
    torch.float16: (torch.int16, 0x7E5A),
    torch.bfloat16: (torch.int16, 0x7FDA),
    torch.float32: (torch.int32, 0x7FC5A5A5),
    torch.float64: (torch.int64, 0x7FF85A5A5A5A5A5A),
}


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def unwritten(*shape, dtype=torch.float32):
    """Return a tensor in which nothing is stored yet; its `behind` is the memory behind it."""
    bits, pattern = UNWRITTEN[dtype]
    buffer = torch.full((math.prod(shape) + GUARD,), pattern, device=DEVICE, dtype=bits).view(dtype)
    tensor = buffer[:-GUARD].view(shape)
    tensor.behind = buffer[-GUARD:]
    return tensor


def is_unwritten(tensor):
    """Tell which elements are as unwritten() left them."""
    if tensor.dtype not in UNWRITTEN:
        return torch.zeros(tensor.shape, dtype=torch.bool)
    bits, pattern = UNWRITTEN[tensor.dtype]
    return tensor.detach().contiguous().view(bits) == pattern


def expect_untouched(name, result):
    """Raise Wrong if something was stored in the memory behind a tensor of unwritten()."""
    touched = not is_unwritten(result.behind).all()
    expect(not touched, f"something was stored beyond the end of {name}", "is there a mask?")


# ----------------------------------------------------------------------------------------------------------------------
# Around the participant's code


def content_of(namespace):
    """Return {name: value} of what a module, or a class with what it inherits, lets other code use."""
    parts = reversed(namespace.__mro__) if isinstance(namespace, type) else [namespace]
    return {name: value for part in parts for name, value in vars(part).items()}


@contextlib.contextmanager
def judges_kept():
    """Raise Wrong if the code within replaces what the checks compute and compare with; it is put back.

    This stops what a curious participant tries. Whoever is determined can deceive what runs in the same process.
    """
    ours = [module for name, module in sys.modules.items() if name.startswith("exercises.")]
    namespaces = torch, torch.Tensor, torch.nn.functional, numpy, math, builtins, llama, *ours
    before, replaced = [content_of(namespace) for namespace in namespaces], []
    try:
        yield
    finally:
        for namespace, content in zip(namespaces, before, strict=True):
            now = content_of(namespace)
            for name, value in content.items():
                # PyTorch itself wraps torch.manual_seed when some of its modules are imported
                its_own = str(getattr(now.get(name), "__module__", "")).startswith("torch")
                if now.get(name) is not value and not its_own:
                    setattr(namespace, name, value)
                    replaced.append(f"{namespace.__name__}.{name}")
    expect(not replaced, f"your code replaces {', '.join(replaced[:3])}", "the checks use it: leave it as it is")


class CountBytes(TorchFunctionMode):
    """Bytes of the tensors that PyTorch's operators read and write, and the products of matrices; views cost nothing.

    smallest: the elements of a tensor from which on it counts.
    """

    def __init__(self, smallest=0):
        super().__init__()
        self.smallest, self.bytes, self.products = smallest, 0, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        operands = [t for t in (*args, *(kwargs or {}).values()) if isinstance(t, torch.Tensor)]
        if isinstance(result, torch.Tensor) and result.data_ptr() not in [t.data_ptr() for t in operands]:
            self.bytes += sum(t.nbytes for t in (*operands, result) if t.numel() >= self.smallest)
            if function in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
                self.products += result.numel() * operands[0].shape[-1]
        return result


def load(path):
    """Return the module in a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
