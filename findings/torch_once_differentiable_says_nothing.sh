#!/usr/bin/env bash
# once_differentiable promises an error when a gradient is differentiated again. torch.autograd.grad(..., x) never
# raises it, and backward() not either where the incoming gradient is a constant, as behind sum(). Beside another term
# the second derivative is just missing.
# Exit codes: 0 it is as stated, 1 it has changed, 2 the packages could not be installed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
{ python3 -m venv venv && venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6; } || exit 2

cat >check.py <<'END'
import sys

import torch
from torch.autograd.function import once_differentiable


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def plain(y):
    return y.sum()


def squared(y):
    return (y**2).sum()


def second(loss, differentiate):
    """Return the derivative of (the gradient of the loss)^2 + x at 2, or that there was an error."""
    x = torch.tensor([2.0], requires_grad=True)
    (grad,) = torch.autograd.grad(loss(Cube.apply(x)), x, create_graph=True)
    try:
        return differentiate((grad**2 + x).sum(), x)
    except RuntimeError:
        return "error"


def by_grad(loss, x):
    return torch.autograd.grad(loss, x)[0].item()


def by_backward(loss, x):
    loss.backward()
    return x.grad.item()


WAYS = [(loss, way) for loss in (plain, squared) for way in (by_grad, by_backward)]
found = {(loss.__name__, way.__name__): second(loss, way) for loss, way in WAYS}

as_stated = list(found.values()) == [1, 1, 1, "error"]
print("torch", torch.__version__)
print("expected:", "an error from all four")
print("seen:    ", found)
print("as stated" if as_stated else "changed")
sys.exit(not as_stated)
END
venv/bin/python -W ignore check.py
