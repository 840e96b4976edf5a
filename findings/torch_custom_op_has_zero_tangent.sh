#!/usr/bin/env bash
# A custom operator with a registered backward formula, but none for forward mode, has a tangent of 0 in
# torch.func.jvp. An autograd.Function without jvp raises instead.
# Exit codes: 0 it is as stated, 1 it has changed, 2 the packages could not be installed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
{ python3 -m venv venv && venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6; } || exit 2

cat >check.py <<'END'
import sys

import torch


@torch.library.custom_op("findings::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


square.register_autograd(
    lambda ctx, grad: 2 * ctx.saved_tensors[0] * grad,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


x = torch.tensor([3.0])
leaf = x.clone().requires_grad_()
square(leaf).backward()
gradient = leaf.grad.item()
tangent = torch.func.jvp(square, (x,), (torch.ones(1),))[1].item()
try:
    torch.func.jvp(Square.apply, (x,), (torch.ones(1),))
    function = "returns a tangent"
except Exception as error:
    function = f"raises {type(error).__name__}"

as_stated = gradient == 6 and tangent == 0 and function.startswith("raises")
print("torch", torch.__version__)
print("expected:", "6 from both modes, or an error from forward mode")
print("seen:    ", f"reverse mode {gradient}, forward mode {tangent}; autograd.Function {function}")
print("as stated" if as_stated else "changed")
sys.exit(not as_stated)
END
venv/bin/python -W ignore check.py
