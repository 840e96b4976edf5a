#!/usr/bin/env bash
# On Hopper, tl.dot of FP8 leaves the sum in the tensor cores, which keep fewer bits than fp32, for up to 2^30
# elements: no addition in fp32 is compiled unless max_num_imprecise_acc asks for it. torch._scaled_mm does the
# opposite unless use_fast_accum is given.
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
def product(x, w, y, K, LIMIT: tl.constexpr):
    row, inner = tl.arange(0, 128), tl.arange(0, 64)
    total = tl.zeros((128, 128), tl.float32)
    for start in range(0, K, 64):
        left = tl.load(x + row[:, None] * K + (start + inner)[None, :])
        right = tl.load(w + row[None, :] * K + (start + inner)[:, None])
        total = tl.dot(left, right, total, max_num_imprecise_acc=LIMIT)
    tl.store(y + row[:, None] * 128 + row[None, :], total)


def compiled(limit):
    """Return the products of the tensor cores and the additions in fp32 of a step, and the attribute."""
    types = dict(x="*fp8e4nv", w="*fp8e4nv", y="*fp32", K="i32", LIMIT="constexpr")
    source = ASTSource(product, types, {(4,): limit}, {(i,): [["tt.divisibility", 16]] for i in range(4)})
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    ptx = kernel.asm["ptx"]
    attribute = re.findall(r"maxNumImpreciseAcc = (\d+)", kernel.asm["ttgir"])
    return ptx.count("wgmma.mma_async"), len(re.findall(r"\badd(?:\.\w+)*\.f32", ptx)), attribute


found = {limit: compiled(limit) for limit in (None, 64, 32)}

as_stated = found[None][1] == 0 < found[64][1] < found[32][1] and found[None][2] == [str(2**30)]
print("triton", triton.__version__)
print("expected:", "sums leave the tensor cores from time to time, as in torch._scaled_mm")
print("seen:    ", f"{{limit: (products, additions in fp32, attribute)}} = {found}")
print("as stated" if as_stated else "changed")
sys.exit(not as_stated)
END
venv/bin/python -W ignore check.py
