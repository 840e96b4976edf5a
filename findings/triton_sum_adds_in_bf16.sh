#!/usr/bin/env bash
# tl.sum of bf16 or fp16 adds in that type and rounds after each addition, while tl.max of the same values works in
# fp32. torch.sum adds in fp32 and rounds once.
# Exit codes: 0 it is as stated, 1 it has changed, 2 the packages could not be installed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export TRITON_CACHE_DIR=$folder
{ python3 -m venv venv && venv/bin/pip install --quiet triton==3.9.0; } || exit 2

cat >check.py <<'END'
import re
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def reduce(x, y, BLOCK: tl.constexpr):
    values = tl.load(x + tl.arange(0, BLOCK))
    tl.store(y, tl.sum(values))
    tl.store(y + 1, tl.max(values))


def compiled(dtype):
    """Return the types in which the sum and the maximum are computed."""
    source = ASTSource(reduce, dict(x=f"*{dtype}", y=f"*{dtype}", BLOCK="constexpr"), {(2,): 1024})
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    return re.findall(r"arith\.(addf|maxnumf) %\w+, %\w+ : (\w+)", kernel.asm["ttir"])


found = {dtype: compiled(dtype) for dtype in ("bf16", "fp16")}

as_stated = found == {name: [("addf", name.replace("fp", "f")), ("maxnumf", "f32")] for name in found}
print("triton", triton.__version__)
print("expected:", "both are computed in f32")
print("seen:    ", found)
print("as stated" if as_stated else "changed")
sys.exit(not as_stated)
END
venv/bin/python -W ignore check.py
