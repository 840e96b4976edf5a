#!/usr/bin/env bash
# Triton's interpreter converts what lies outside e4m3, up to 448, to another number: 1000 to 256 and NaN to 384. A
# compiled kernel saturates at 448 and keeps NaN.
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
    tl.store(y + i, tl.load(x + i).to(tl.float8e4nv))


x = torch.tensor([1000.0, torch.nan, 448.0, 1.5])
y = torch.empty(4, dtype=torch.float8_e4m3fn)
convert[(1,)](x, y, 4)
interpreted = y.float().tolist()

as_stated = interpreted == [256, 384, 448, 1.5]
print("torch", torch.__version__, "triton", triton.__version__)
print("expected:", "1000, NaN, 448 and 1.5 become 448, NaN, 448 and 1.5")
print("seen:    ", interpreted)
print("as stated" if as_stated else "changed")
sys.exit(not as_stated)
END
venv/bin/python -W ignore check.py
