"""Other people's Triton kernels as cases for others.py, which calls the installed packages. Nothing of theirs is here.

A case is a function of the kernel and of torch.randn that returns (the kernel as a function of the inputs, the same in
plain PyTorch, the inputs). Every input is a tensor that gets a gradient if the case has a backward pass; what gets none
is a closure's. Sizes are odd where a kernel takes them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

EPS = 1e-5
TUTORIALS = "tutorials"  # the package of Triton's


class Case(NamedTuple):
    """A kernel with its inputs and its reference."""

    package: str  # of Python, or TUTORIALS
    name: str  # that of the package, a dot, and the kernel's
    place: str  # of the kernel: "package.module:name", or "tutorial.py:name"
    build: Callable  # of (kernel, randn), returns (kernel of the inputs, plain PyTorch of the inputs, inputs)
    dtype: torch.dtype
    has_backward: bool


def registry():
    """Return (a dict, the decorator that puts a Case into it by its name).

    A function may have several decorators, for kernels that compute the same.
    """
    cases = {}

    def case(place, dtype=torch.float32, has_backward=True):
        def register(build):
            module, _, kernel = place.partition(":")
            package = TUTORIALS if module.endswith(".py") else module.split(".")[0]
            name = f"{package}.{kernel.removesuffix('.apply')}"
            cases[name] = Case(package, name, place, build, dtype, has_backward)
            return build

        return register

    return cases, case


# ----------------------------------------------------------------------------------------------------------------------
# What several packages compute


def first(kernel, **options):
    """Return a kernel's first output alone."""
    return lambda *x: kernel(*x, **options)[0]


def targets(n, classes, ignored=False):
    """Return n classes, with the last one among them; ignored: the second is -100."""
    chosen = torch.arange(n) * 7919 % classes
    chosen[-1] = classes - 1
    if ignored:
        chosen[1] = -100
    return chosen


def rotated(x, cos, sin):
    """Rotate pairs of x, (..., dim), of one half each; cos and sin (..., dim / 2)."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def angles(randn, *shape):
    """Return the cosines and sines of random angles."""
    angle = randn(*shape)
    return angle.cos(), angle.sin()


def plain_rms_norm(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def plain_layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
