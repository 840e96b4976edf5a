#!/usr/bin/env bash
# Triton's option waves_per_eu for AMD is passed to LLVM as the least and the most waves on a SIMD. A kernel that
# needs few registers is given so many that no more waves fit: asking for 1 or 2 lowers the occupancy.
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
def double(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


def compiled(waves):
    """Return LLVM's attribute, the registers that the kernel uses, those that it is given, and the waves that fit."""
    source = ASTSource(double, dict(x="*fp32", y="*fp32", n="i32", BLOCK="constexpr"), {(3,): 1024})
    kernel = triton.compile(source, target=GPUTarget("hip", "gfx942", 64), options=dict(waves_per_eu=waves))
    attribute = re.findall(r'"amdgpu-waves-per-eu"="(.*?)"', kernel.asm["llir"])
    numbers = re.findall(r"; (?:NumVgprs|NumVGPRsForWavesPerEU|Occupancy): (\d+)", kernel.asm["amdgcn"])
    return attribute, [int(number) for number in numbers]


found = {waves: compiled(waves) for waves in (0, 1, 2, 4)}
waves_that_fit = [numbers[-1] for _, numbers in found.values()]

as_stated = waves_that_fit == [8, 1, 2, 4] and found[2][0] == ["2,2"]
print("triton", triton.__version__)
print("expected:", "waves_per_eu is at least so many waves: 9 registers leave room for 8")
print("seen:    ", f"{{option: (attribute, [registers used, given, waves])}} = {found}")
print("as stated" if as_stated else "changed")
sys.exit(not as_stated)
END
venv/bin/python -W ignore check.py
