"""What the checks of all exercises share."""

import math

import torch

from exercises.checks import ON_GPU

DEVICE = "cuda" if ON_GPU else "cpu"


class Wrong(Exception):
    """What is wrong with a task, and where to look."""


def expect(condition, message):
    if not condition:
        raise Wrong(message)


def expect_number(name, got, wanted, hint):
    expect(got == wanted, f"{name} is {got!r}, expected {wanted!r}: {hint}")


def expect_close(name, got, wanted, tolerance, hint):
    """Compares tensors in fp64; the message names the first element that differs."""
    got, wanted = got.detach().double().cpu(), wanted.detach().double().cpu()
    expect(got.shape == wanted.shape, f"{name} has the shape {tuple(got.shape)}, expected {tuple(wanted.shape)}")
    bad = ~torch.isclose(got, wanted, rtol=tolerance, atol=tolerance)
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        value, good = got[where].item(), wanted[where].item()
        unstored = " (as it was before: is anything stored?)" if math.isnan(value) else ""
        raise Wrong(
            f"{int(bad.sum())} of {bad.numel()} elements of {name} are wrong: at {where} it is {value:.5g}{unstored}, "
            f"expected {good:.5g}; {hint}"
        )


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)


GUARD = 4096  # elements behind an output that a store without a mask may hit


def unwritten(*shape, dtype=torch.float32):
    """(a tensor full of NaN, the memory behind it)"""
    buffer = torch.full((math.prod(shape) + GUARD,), float("nan"), device=DEVICE, dtype=dtype)
    return buffer[:-GUARD].view(shape), buffer[-GUARD:]


def expect_untouched(name, behind):
    expect(bool(behind.isnan().all()), f"something was stored beyond the end of {name}: is there a mask?")


def expect_passed(check, exercise, message):
    """For a task that builds on another, whose check comes first."""
    try:
        check(exercise)
    except Exception as error:  # whatever the code under test does
        raise Wrong(message) from error
