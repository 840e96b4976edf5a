#!/usr/bin/env bash
# torch.autocast computes softmax, norms, exponentials and sums in fp32 on CUDA, and in bf16 on a CPU: the lists of
# operators differ, so a loss that was checked on one is another on the other.
# Exit codes: 0 it is as stated, 1 it has changed, 2 the packages could not be installed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
{ python3 -m venv venv && venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6; } || exit 2

cat >check.py <<'END'
import sys

import torch

OPERATORS = "softmax.int log_softmax.int layer_norm rms_norm exp sum".split()


def listed(device):
    """Return whether autocast of a device has a rule for each operator."""
    key = f"Autocast{device}"
    return [torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key) for name in OPERATORS]


with torch.autocast("cpu", torch.bfloat16):
    scores = torch.randn(4, 8) @ torch.randn(8, 8)
    dtypes = scores.softmax(-1).dtype, scores.sum().dtype
cuda, cpu = listed("CUDA"), listed("CPU")

as_stated = all(cuda) and not any(cpu) and set(dtypes) == {torch.bfloat16}
print("torch", torch.__version__)
print("expected:", "the same operators are computed in fp32 on both devices")
print("seen:    ", f"{OPERATORS}: rules of CUDA {cuda}, of CPU {cpu}; softmax and sum on a CPU {dtypes}")
print("as stated" if as_stated else "changed")
sys.exit(not as_stated)
END
venv/bin/python -W ignore check.py
