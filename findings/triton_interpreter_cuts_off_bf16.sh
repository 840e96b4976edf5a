#!/usr/bin/env bash
# Triton's interpreter cuts the digits off when it converts fp32 to bf16, where a compiled kernel rounds to the
# nearest: errors are up to twice as large, and all go toward zero.
# Exit codes: 0 it is as stated, 1 it has changed, 2 the packages could not be installed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
{ python3 -m venv venv && venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 triton==3.9.0; } || exit 2

cat >check.py <<'END'
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton
import triton.language as tl


@triton.jit
def convert(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i).to(tl.bfloat16))


torch.manual_seed(0)
x = torch.rand(4096) + 1
x[0] = 1 + 2**-7 - 2**-12
interpreted = torch.empty(4096, dtype=torch.bfloat16)
convert[(1,)](x, interpreted, 4096)
nearest = x.to(torch.bfloat16)
first = interpreted[0].item(), nearest[0].item()
mean = (interpreted - x).mean().item(), (nearest - x).mean().item()

as_stated = first == (1, 1 + 2**-7) and mean[0] < -0.003 and abs(mean[1]) < 0.0003
print("torch", torch.__version__, "triton", triton.__version__)
print("expected:", "interpreted and nearest are equal")
print("seen:    ", f"1.00757: interpreted {first[0]}, nearest {first[1]}; mean error {mean[0]:.5f}, {mean[1]:.5f}")
print("as stated" if as_stated else "changed")
sys.exit(not as_stated)
END
venv/bin/python -W ignore check.py
