#!/usr/bin/env bash
# MI300 (gfx942) multiplies the FP8 of its own, e4m3fnuz. tl.dot of the usual e4m3 compiles there too, without a word,
# as a product of fp16 behind thousands of instructions that convert; MI350 (gfx950) has it the other way round.
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
def product(x, w, y, K):
    row, inner = tl.arange(0, 64), tl.arange(0, 64)
    total = tl.zeros((64, 64), tl.float32)
    for start in range(0, K, 64):
        left = tl.load(x + row[:, None] * K + (start + inner)[None, :])
        right = tl.load(w + row[None, :] * K + (start + inner)[:, None])
        total = tl.dot(left, right, total)
    tl.store(y + row[:, None] * 64 + row[None, :], total)


def compiled(arch, dtype):
    """Return the matrix instructions and the number of instructions of vector units."""
    types = dict(x=f"*{dtype}", w=f"*{dtype}", y="*fp32", K="i32")
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(4)}
    code = triton.compile(ASTSource(product, types, {}, attributes), target=GPUTarget("hip", arch, 64)).asm["amdgcn"]
    return sorted(set(re.findall(r"v_mfma_\w+", code))), len(re.findall(r"^\tv_(?!mfma)", code, flags=re.M))


KINDS = [(arch, dtype) for arch in ("gfx942", "gfx950") for dtype in ("fp8e4nv", "fp8e4b8")]  # OCP's and AMD's own
found = {kind: compiled(*kind) for kind in KINDS}
fp16 = {kind: others for kind, (names, others) in found.items() if all(name.endswith("f16") for name in names)}

as_stated = list(fp16) == [KINDS[0], KINDS[3]] and min(fp16.values()) > 1000
print("triton", triton.__version__)
print("expected:", "an instruction of FP8, or an error")
print("seen:    ", f"(matrix instructions, others): {found}")
print("as stated" if as_stated else "changed")
sys.exit(not as_stated)
END
venv/bin/python -W ignore check.py
