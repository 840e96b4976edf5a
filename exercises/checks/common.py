"""What the checks of all exercises share.

A comparison that fails goes through the usual mistakes: pairs of what a mistake would have given, computed in higher
precision, and words that name it. The first that gives what the participant's code gave is told, else a general hint.
Mistakes are iterables, usually generators, so that they cost nothing where the result is right.
"""

import builtins
import contextlib
import math
import os
import sys
from types import FunctionType, ModuleType
from unittest import mock

import numpy
import torch
from torch.overrides import TorchFunctionMode

import exercises.checks  # noqa: F401 (first: without a GPU it has Triton interpret)
import tiny_llama_v3 as llama
from exercises.checks import ON_GPU
from tiny_llama_v3 import tl

DEVICE = "cuda" if ON_GPU else "cpu"


class Wrong(Exception):
    """What is wrong with a task, and where to look."""


class NotYet(Wrong):
    """A task that cannot be judged before another one passes."""


class NothingStored(Wrong):
    """No element of a result is a number: as before a kernel is written."""


def expect(condition, message):
    if not condition:
        raise Wrong(message)


def expect_passed(check, exercise, message):
    """For a task that builds on another, whose check comes first."""
    try:
        check(exercise)
    except Exception as error:  # whatever the code under test does
        raise NotYet(message) from error


def expect_number(name, got, wanted, hint, mistakes=()):
    """Compares whole numbers, or tuples of them. mistakes: pairs (number or tuple, words)."""
    if got != wanted:
        if any(isinstance(number, float) and number % 1 for number in (got if isinstance(got, tuple) else [got])):
            hint = f"a count is a whole number: divide with //, which rounds down, not with /; {hint}"
        words = next((words for candidate, words in mistakes if candidate == got != wanted), hint)
        raise Wrong(f"{name} is {got!r}, expected {wanted!r}: {words}")


def differs(got, wanted, tolerance):
    """Which elements of two fp64 tensors are further apart than tolerance, relative and absolute; NaN is like NaN."""
    return ~torch.isclose(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


def expect_close(name, got, wanted, tolerance, hint, mistakes=(), behind=None):
    """Compares tensors in fp64; the message names the first element that differs.

    mistakes: pairs (tensor, words). behind: the memory behind got, as `unwritten` gave it, where nothing may be stored.
    """
    expect(isinstance(got, torch.Tensor), f"{name} is {got!r}, not a tensor: is it returned?")
    unstored = is_unwritten(got).cpu()
    got, wanted = got.detach().double().cpu(), wanted.detach().double().cpu()
    shapes = f"{tuple(got.shape)}, expected {tuple(wanted.shape)}"
    expect(got.shape == wanted.shape, f"{name} has the shape {shapes}; {hint}")
    bad = differs(got, wanted, tolerance)
    if not bad.any():
        if behind is not None:
            expect_untouched(name, behind)
        return
    if rounded_to_tf32 and not differs(got, wanted, 1e-2).any():
        raise Wrong(f"{name} has few right digits: tl.dot multiplies fp32 with 10 bits of mantissa (TF32) on NVIDIA "
                    'GPUs unless input_precision="ieee"')  # fmt: skip
    if unstored.all():
        raise NothingStored(
            f"nothing is stored in {name}: is there a tl.store, and does its mask let any lane through?"
        )
    for candidate, words in mistakes:
        candidate = candidate.detach().double().cpu()
        if differs(candidate, wanted, tolerance).any() and not differs(got, candidate, tolerance).any():
            hint = words
            break
    else:
        if behind is not None:
            expect_untouched(name, behind)
        hint = "; ".join(filter(None, (symptom_of(got, wanted, bad), hint)))
    where = tuple(bad.nonzero()[0].tolist())
    value, good = got[where].item(), wanted[where].item()
    digits = next((digits for digits in (5, 8, 12) if f"{value:.{digits}g}" != f"{good:.{digits}g}"), 17)
    described = "never stored" if unstored[where] else f"{value:.{digits}g}"
    if math.isnan(value) and not unstored[where]:
        described = "NaN, of a computation (0 / 0, inf - inf, the root of a negative number)"
    kind = NothingStored if got.isnan().all() else Wrong
    count = f"{int(bad.sum())} of {bad.numel()} elements of {name} {'is' if bad.sum() == 1 else 'are'} wrong"
    raise kind(f"{count}: at {where} it is {described}, expected {good:.{digits}g}; {hint}")


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
    """The indices of what is True, "0 to 3, 7"; with ... after the third range."""
    indices, parts = true.nonzero().flatten().tolist(), []
    for index in indices:
        if parts and parts[-1][1] == index - 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    told = [f"{first} to {last}" if last > first else str(first) for first, last in parts[:3]]
    return ", ".join(told) + ", ..." * (len(parts) > 3)


@contextlib.contextmanager
def unchanged(**inputs):
    """Wrong if the code within changes one of these tensors."""
    before = {name: tensor.detach().clone() for name, tensor in inputs.items()}
    yield
    for name, tensor in inputs.items():
        expect(torch.equal(tensor, before[name]), f"{name} is an input, and was changed in place (by +=, *=, a method "
               "whose name ends with _, or a store): make a new tensor instead")  # fmt: skip


def functions_of(namespace):
    """{name: (value, its code)} of what a module, or a class with what it inherits, lets other code use.

    These are functions, classes, modules and descriptors such as properties; only functions have a code, else None.
    """
    found = {}
    for each in reversed(namespace.__mro__) if isinstance(namespace, type) else [namespace]:
        found |= vars(each)
    return {
        name: (value, value.__code__ if isinstance(value, FunctionType) else None)
        for name, value in found.items()
        if callable(value) or hasattr(type(value), "__get__") or isinstance(value, ModuleType)
    }


PYTORCH = os.path.dirname(torch.__file__)


def of_pytorch(value):
    """Whether a function is PyTorch's own: some of its modules wrap torch.manual_seed when they are imported."""
    return isinstance(value, FunctionType) and value.__code__.co_filename.startswith(PYTORCH)


@contextlib.contextmanager
def judges_kept(*modules):
    """Wrong if the code within replaces what the checks and these modules compute and compare with; it is put back.

    This stops what a curious participant tries. Whoever is determined can deceive what runs in the same process.
    """
    ours = [module for name, module in sys.modules.items() if name.startswith("exercises.checks")]
    namespaces = (torch, torch.Tensor, torch.nn.functional, numpy, math, builtins, llama, *ours, *modules)
    before, replaced = [functions_of(namespace) for namespace in namespaces], []
    try:
        yield
    finally:
        for namespace, functions in zip(namespaces, before, strict=True):
            now = functions_of(namespace)
            for name, (function, code) in functions.items():
                present, its_code = now.get(name, (None, None))
                if (present is not function or its_code is not code) and not of_pytorch(present):
                    if code:
                        function.__code__ = code
                    setattr(namespace, name, function)
                    replaced.append(f"{namespace.__name__}.{name}")
    expect(not replaced, f"your code replaces {', '.join(replaced[:3])}, which the checks use: leave it as it is")


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Memory that shows what was stored

GUARD = 4096  # elements behind an output that a store without a mask may hit
# The bits of a NaN that no computation gives, so that an element that was never stored is told from 0 / 0.
UNWRITTEN = {
    torch.float16: (torch.int16, 0x7E5A),
    torch.bfloat16: (torch.int16, 0x7FDA),
    torch.float32: (torch.int32, 0x7FC5A5A5),
    torch.float64: (torch.int64, 0x7FF85A5A5A5A5A5A),
}


def unwritten(*shape, dtype=torch.float32):
    """(a tensor in which nothing is stored yet, the memory behind it)"""
    bits, pattern = UNWRITTEN[dtype]
    buffer = torch.full((math.prod(shape) + GUARD,), pattern, device=DEVICE, dtype=bits).view(dtype)
    return buffer[:-GUARD].view(shape), buffer[-GUARD:]


def is_unwritten(tensor):
    """Which elements are as `unwritten` left them."""
    if tensor.dtype not in UNWRITTEN:
        return torch.zeros(tensor.shape, dtype=torch.bool)
    bits, pattern = UNWRITTEN[tensor.dtype]
    return tensor.detach().contiguous().view(bits) == pattern


def expect_untouched(name, behind):
    expect(bool(is_unwritten(behind).all()), f"something was stored beyond the end of {name}: is there a mask?")


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


# ----------------------------------------------------------------------------------------------------------------------
# Kernels

POISON = 12288.0  # exact in fp16 and bf16
rounded_to_tf32 = []  # not empty if a product of the task that is checked was rounded as on an NVIDIA GPU


@llama.jit
def sum_kernel(x_ptr, sum_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    total = 0.0
    for start in range(0, n_elements, BLOCK_SIZE):
        total += tl.sum(tl.load(x_ptr + start + tl.arange(0, BLOCK_SIZE)), axis=0)
    tl.store(sum_ptr, total)


def interpreter_works():
    """Whether a kernel with a loop runs: with Triton 3.6 and numpy 2.4, say, the interpreter fails at it."""
    try:
        sum_kernel[(1,)](randn(32), randn(1), 32, BLOCK_SIZE=16)
    except Exception:
        return False
    return True


def has_scaled_products():
    """Whether the interpreter knows tl.dot_scaled, as from Triton 3.9 on."""
    if llama.triton is None:
        return False
    from triton.runtime.interpreter import InterpreterBuilder

    return hasattr(InterpreterBuilder, "create_dot_scaled")


@contextlib.contextmanager
def strict_interpreter(poison=POISON):
    """Has the interpreter refuse, or leave undefined, what a GPU does, and multiply bf16 as one does.

    fp32 is multiplied in TF32 unless input_precision says otherwise. Of a masked load without `other` it hands out
    poison for what is left out, not zeros: on a GPU it is what the register held before. The truth of a block (`and`,
    `or`, `not`, `if`) is an error, as it is to the compiler.
    """
    rounded_to_tf32.clear()
    if ON_GPU:
        yield
        return
    import numpy as np
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    load, dot, patch_tensor = builder.create_masked_load, builder.create_dot, interpreter._patch_lang_tensor

    def create_masked_load(self, ptrs, mask, other, *rest):
        element = ptrs.get_element_ty()
        if other is None and element.is_floating():
            dtype = interpreter._get_np_dtype(element)
            bits = torch.tensor(poison, dtype=torch.bfloat16).view(torch.int16).item()
            value = bits if element.is_bf16() else poison  # the interpreter holds bf16 as its bits
            other = interpreter.TensorHandle(np.full(ptrs.data.shape, value, dtype), element)
        return load(self, ptrs, mask, other, *rest)

    def create_dot(self, a, b, *rest):
        """The interpreter multiplies the bits of bf16 as integers, and fp32 always with all of its digits."""
        sides = [self.cast_impl(side, tl.float32) if side.dtype.scalar.is_bf16() else side for side in (a, b)]
        if a.dtype.scalar.is_fp32() and getattr(rest[1], "name", "") == "TF32":
            rounded_to_tf32.append(True)
            bits = [(side.data.view(np.int32) + 0x1000) & ~0x1FFF for side in sides]
            sides = [interpreter.TensorHandle(b.view(np.float32), tl.float32) for b in bits]
        return dot(self, *sides, *rest)

    def truth(block):
        one = block.handle.data.size == 1
        if not one and not sys._getframe(1).f_globals.get("__name__", "").startswith("triton."):
            raise ValueError("and, or, not and if take one True or False, not a block: combine masks by & and |, with "
                             "parentheses around each comparison")  # fmt: skip
        return not one or bool(block.handle.data)

    def patch_lang_tensor(tensor, *rest):
        patch_tensor(tensor, *rest)
        tensor.__bool__ = truth

    with (
        mock.patch.multiple(builder, create_masked_load=create_masked_load, create_dot=create_dot),
        mock.patch.object(interpreter, "_patch_lang_tensor", patch_lang_tensor),
    ):
        yield


@contextlib.contextmanager
def recorded_launches(kernel):
    """The calls of a kernel within the block, as those of unittest.mock: the arguments in order, then the grid."""
    with mock.patch.object(kernel, "run", wraps=kernel.run) as run:
        yield run.call_args_list
