"""What the checks of all exercises share.

A comparison that fails goes through the usual mistakes: pairs of what a mistake would have given, computed in higher
precision, and words that name it. The first that gives what the participant's code gave is told, else a general hint.
Mistakes are iterables, usually generators, so that they cost nothing where the result is right.
"""

import contextlib
import math
from unittest import mock

import torch

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
    """Compares numbers, or tuples of them. mistakes: pairs (number or tuple, words)."""
    if got != wanted:
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
    expect(got.shape == wanted.shape, f"{name} has the shape {tuple(got.shape)}, expected {tuple(wanted.shape)}")
    bad = differs(got, wanted, tolerance)
    if not bad.any():
        if behind is not None:
            expect_untouched(name, behind)
        return
    if unstored.all():
        raise NothingStored(
            f"nothing is stored in {name}: is there a tl.store, and does its mask let anything through?"
        )
    for candidate, words in mistakes:
        candidate = candidate.detach().double().cpu()
        if differs(candidate, wanted, tolerance).any() and not differs(got, candidate, tolerance).any():
            hint = words
            break
    else:
        if behind is not None:
            expect_untouched(name, behind)
    where = tuple(bad.nonzero()[0].tolist())
    value, good = got[where].item(), wanted[where].item()
    described = "never stored" if unstored[where] else f"{value:.5g}"
    if math.isnan(value) and not unstored[where]:
        described = "NaN, of a computation (0 / 0, inf - inf, the root of a negative number)"
    kind = NothingStored if got.isnan().all() else Wrong
    count = f"{int(bad.sum())} of {bad.numel()} elements of {name} are wrong"
    raise kind(f"{count}: at {where} it is {described}, expected {good:.5g}; {hint}")


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


# ----------------------------------------------------------------------------------------------------------------------
# Kernels

POISON = 12288.0  # exact in fp16 and bf16


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


@contextlib.contextmanager
def poisoned_masks(poison=POISON):
    """Of a masked load without `other`, the interpreter hands out poison for what is left out, not zeros.

    It is undefined: on a GPU it is what the register held before.
    """
    if ON_GPU:
        yield
        return
    import numpy as np
    from triton.runtime import interpreter

    load = interpreter.InterpreterBuilder.create_masked_load

    def create_masked_load(self, ptrs, mask, other, *rest):
        element = ptrs.get_element_ty()
        if other is None and element.is_floating():
            dtype = interpreter._get_np_dtype(element)
            bits = torch.tensor(poison, dtype=torch.bfloat16).view(torch.int16).item()
            value = bits if element.is_bf16() else poison  # the interpreter holds bf16 as its bits
            other = interpreter.TensorHandle(np.full(ptrs.data.shape, value, dtype), element)
        return load(self, ptrs, mask, other, *rest)

    with mock.patch.object(interpreter.InterpreterBuilder, "create_masked_load", create_masked_load):
        yield


@contextlib.contextmanager
def counted_launches(*kernels):
    """[launches] of each kernel within the block, in their order, once it is over."""
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(mock.patch.object(kernel, "run", wraps=kernel.run)) for kernel in kernels]
        counts = []
        yield counts
        counts += [run.call_count for run in runs]
