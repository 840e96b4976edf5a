#!/usr/bin/env bash
# tl.dot_scaled with the names of its formats as strings, as its documentation has them, raises in the interpreter of
# Triton 3.7: 'str' object has no attribute 'value'. The compiler of the same release takes it.
# Exit codes: 0 it is as stated, 1 it has changed, 2 the packages could not be installed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
{ python3 -m venv venv && venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 triton==3.7.1; } || exit 2

cat >check.py <<'END'
import os
import sys

interpreted = sys.argv[1] == "interpreted"
os.environ["TRITON_INTERPRET"] = "1" if interpreted else "0"
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget


@triton.jit
def multiply(x, x_scale, z):
    rows, inner, groups = tl.arange(0, 128), tl.arange(0, 64), tl.arange(0, 2)
    tile = tl.load(x + rows[:, None] * 64 + inner[None, :])
    scales = tl.load(x_scale + rows[:, None] * 2 + groups[None, :])
    product = tl.dot_scaled(tile, scales, "e4m3", tl.trans(tile), scales, "e4m3")
    tl.store(z + rows[:, None] * 128 + tl.arange(0, 128)[None, :], product)


def outcome():
    try:
        if interpreted:
            x, scale = torch.ones(128, 64).to(torch.float8_e4m3fn), torch.full((128, 2), 127, dtype=torch.uint8)
            z = torch.zeros(128, 128)
            multiply[(1,)](x, scale, z)
            return z[0, 0].item()
        signature = {"x": "*fp8e4nv", "x_scale": "*u8", "z": "*fp32"}
        source = triton.compiler.ASTSource(multiply, signature=signature)
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
        return "compiles"
    except Exception as error:
        return "raises" if "'str' object has no attribute 'value'" in str(error) else "raises something else"


seen = outcome()

as_stated = seen == ("raises" if interpreted else "compiles")
print("torch", torch.__version__, "triton", triton.__version__, sys.argv[1])
print("expected:", 64.0 if interpreted else "compiles")
print("seen:    ", seen)
print("as stated" if as_stated else "changed")
sys.exit(not as_stated)
END
venv/bin/python -W ignore check.py compiled
venv/bin/python -W ignore check.py interpreted
