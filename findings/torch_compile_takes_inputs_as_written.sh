#!/usr/bin/env bash
# torch.compile compiles a Triton kernel in order to see which tensors it writes. In PyTorch 2.11 this fails where the
# kernel converts an argument that is a float, as Liger-Kernel 0.8.5 does in RMSNorm and SwiGLU: it warns, and every
# tensor counts as written. In 2.12 and 2.13 the answer is right.
# Exit codes: 0 it is as stated, 1 it has changed, 2 the packages could not be installed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
{ python3 -m venv venv && venv/bin/pip install --quiet torch==2.11.0 triton==3.6.0 numpy==2.4.6; } || exit 2

cat >check.py <<'END'
import logging
import sys

import torch
import triton
import triton.language as tl
from torch._higher_order_ops.triton_kernel_wrap import identify_mutated_tensors
from triton.backends.compiler import GPUTarget


class Hopper:
    """A driver without a GPU, which is asked for what to compile."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@triton.jit
def scale(x, y, factor, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i) * factor)


@triton.jit
def convert_and_scale(x, y, factor, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i) * factor.to(tl.float32))


logging.disable(logging.WARNING)
triton.runtime.driver.set_active(Hopper())
arguments = dict(x=torch.ones(64), y=torch.ones(64), factor=0.5, BLOCK=64)
written = {kernel.fn.__name__: identify_mutated_tensors(kernel, arguments, {}) for kernel in (scale, convert_and_scale)}

as_stated = written == {"scale": ["y"], "convert_and_scale": ["x", "y"]}
print("torch", torch.__version__, "triton", triton.__version__)
print("expected:", "both kernels write y alone")
print("seen:    ", written)
print("as stated" if as_stated else "changed")
sys.exit(not as_stated)
END
venv/bin/python -W ignore check.py
