#!/usr/bin/env bash
# With num_stages=2, a loop over tiles keeps one pair of tiles in shared memory on sm_80 and gfx942, and two pairs on
# sm_90 and gfx950, which copy without registers. The same tile then takes twice the memory on a newer card.
# Exit codes: 0 it is as stated, 1 it has changed, 2 the packages could not be installed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export TRITON_CACHE_DIR=$folder
{ python3 -m venv venv && venv/bin/pip install --quiet triton==3.9.0; } || exit 2

cat >check.py <<'END'
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def product(x, w, y, K):
    row, inner = tl.arange(0, 128), tl.arange(0, 64)
    total = tl.zeros((128, 128), tl.float32)
    for start in range(0, K, 64):
        left = tl.load(x + row[:, None] * K + (start + inner)[None, :])
        right = tl.load(w + row[None, :] * K + (start + inner)[:, None])
        total = tl.dot(left, right, total)
    tl.store(y + row[:, None] * 128 + row[None, :], total)


TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
PAIR = 2 * 128 * 64 * 2  # bytes of a tile of x and one of w


def pairs(target, stages):
    """Return how many pairs of tiles fit into the shared memory that the kernel asks for."""
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(4)}
    source = ASTSource(product, dict(x="*bf16", w="*bf16", y="*fp32", K="i32"), {}, attributes)
    return triton.compile(source, target=target, options=dict(num_stages=stages)).metadata.shared // PAIR


found = {name: [pairs(target, stages) for stages in (2, 3, 4)] for name, target in TARGETS.items()}

as_stated = found == dict(sm_80=[1, 2, 3], sm_90=[2, 3, 4], gfx942=[1, 2, 3], gfx950=[2, 3, 4])
print("triton", triton.__version__)
print("expected:", "as many pairs of tiles on each card")
print("seen:    ", f"pairs with 2, 3 and 4 stages: {found}")
print("as stated" if as_stated else "changed")
sys.exit(not as_stated)
END
venv/bin/python -W ignore check.py
