#!/usr/bin/env bash
# Triton 3.6's interpreter runs sums and products with NumPy 2.4. Only a loop up to an argument of the kernel raises: its
# bound is an array of one element, which NumPy no longer turns into an integer. A bound that is a constexpr is none.
# Exit codes: 0 it is as stated, 1 it has changed, 2 the packages could not be installed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
{ python3 -m venv venv && venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 triton==3.6.0; } || exit 2

cat >check.py <<'END'
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
import numpy
import torch
import triton
import triton.language as tl


@triton.jit
def without_loop(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tile = tl.load(x + offsets)
    tl.store(y + tl.arange(0, BLOCK), tl.sum(tl.dot(tile, tile), 1))


@triton.jit
def up_to_an_argument(x, y, n, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        total += tl.load(x + start + tl.arange(0, BLOCK))
    tl.store(y + tl.arange(0, BLOCK), total)


@triton.jit
def up_to_a_constant(x, y, n: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        total += tl.load(x + start + tl.arange(0, BLOCK))
    tl.store(y + tl.arange(0, BLOCK), total)


def outcome(kernel):
    x, y = torch.ones(256), torch.zeros(16)
    try:
        kernel[(1,)](x, y, 256, 16)
    except Exception as error:
        return "raises" if "0-dimensional" in str(error) else "raises something else"
    return y[0].item()


seen = [outcome(kernel) for kernel in (without_loop, up_to_a_constant, up_to_an_argument)]

as_stated = seen == [256.0, 16.0, "raises"]
print("torch", torch.__version__, "triton", triton.__version__, "numpy", numpy.__version__)
print("expected:", "the sum of a product is 256, and both loops give 16")
print("seen:    ", seen)
print("as stated" if as_stated else "changed")
sys.exit(not as_stated)
END
venv/bin/python -W ignore check.py
