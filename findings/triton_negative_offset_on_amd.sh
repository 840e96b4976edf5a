#!/usr/bin/env bash
# For tensors below 2 GiB, Triton on AMD replaces loads by buffer loads, whose 32-bit offset has no sign: an offset of
# -4 lies beyond the 2^31 - 2 bytes of the descriptor, for which AMD's manual promises 0 and no store. A pointer into
# a tensor's middle, read backwards, is loaded by a plain address on NVIDIA.
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
def backwards(last, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(last - i))


def loads(pointer_range):
    """Return the instructions that load, and the bytes of the descriptor."""
    attributes = {(0,): [["tt.pointer_range", 32]] if pointer_range else []}
    source = ASTSource(backwards, dict(last="*fp32", y="*fp32", BLOCK="constexpr"), {(2,): 256}, attributes)
    kernel = triton.compile(source, target=GPUTarget("hip", "gfx942", 64))
    size = re.findall(r"make\.buffer\.rsrc\.\w+\.\w+\(ptr addrspace\(1\) %0, i16 0, i64 (\d+)", kernel.asm["llir"])
    return re.findall(r"(?:buffer|global)_load_\w+", kernel.asm["amdgcn"]), size


small, large = loads(True), loads(False)  # Triton's launcher gives the attribute to tensors below 2 GiB

as_stated = small == (["buffer_load_dword"], [str(2**31 - 2)]) and large == (["global_load_dword"], [])
print("triton", triton.__version__)
print("expected:", "an offset that is never positive is no offset of a buffer load")
print("seen:    ", f"below 2 GiB {small}, above {large}")
print("as stated" if as_stated else "changed")
sys.exit(not as_stated)
END
venv/bin/python -W ignore check.py
