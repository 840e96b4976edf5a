"""The Gluon kernel for Hopper, compiled without a GPU: it fits, spills nothing, and keeps two products under way."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_llama_v3 as llama
from offline.architectures import CHIPS
from tests import ROOT

PROGRAM = """
import json, sys, torch, triton
from offline.compiler import Driver
from tiny_llama import attention_hopper as hopper
from tiny_llama.hopper import make_descriptor
triton.runtime.driver.set_active(Driver("sm_90"))
shapes = (16, hopper.HALF), (4, hopper.BLOCK), (4, hopper.BLOCK), (16, hopper.HALF)
packed = 2048 * 3072, 3072, 128, 1
descs = [
    make_descriptor(0, torch.bfloat16, (4, 2048, heads, 128), packed, (1, rows.value, 1, 128)) for heads, rows in shapes
]
compiled = hopper.flash_attention_hopper_kernel.warmup(
    *descs, torch.empty(4, 16, 2048, device="meta"), 16, 4, 64, 2048, 0.1275, num_warps=4, grid=(132,)
)
open(sys.argv[1], "wb").write(compiled.asm["cubin"])
print(json.dumps([compiled.metadata.shared, compiled.metadata.num_warps]))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return (bytes of shared memory, warps, resources, machine code)."""
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    cubin = tmp_path_factory.mktemp("cubin") / "kernel.cubin"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM, cubin], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    tool = Path(llama.triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    texts = [
        subprocess.run([tool, flag, cubin], capture_output=True, text=True, check=True).stdout
        for flag in ("-res-usage", "-sass")
    ]
    return *json.loads(done.stdout.splitlines()[-1]), *texts


def test_it_fits_into_a_multiprocessor_and_spills_nothing(compiled):
    shared, warps, resources, _ = compiled
    assert shared <= CHIPS["sm_90"].shared_limit
    assert warps == 12  # two consumers of four, and the producer's one with three that idle
    registers, stack, local = (int(re.search(rf"\b{name}:(\d+)", resources)[1]) for name in ("REG", "STACK", "LOCAL"))
    assert registers * 32 * warps <= 2**16 and stack == local == 0


def test_the_softmax_runs_while_the_second_product_does(compiled):
    """Between the wait for the scores and the wait for all, a thread has the exponentials of half a row of 128."""
    code = re.findall(r"WARPGROUP\.DEPBAR\S* \S+ (0x[01])|(MUFU\.EX2)|(HGMMA)", compiled[3])
    waits, exponentials, products = [], 0, 0
    for wait, exponential, product in code:
        exponentials, products = exponentials + bool(exponential), products + bool(product)
        if wait:
            waits.append((wait, exponentials, products))
            exponentials = products = 0
    under_way = [now for before, now in zip(waits, waits[1:], strict=False) if before[0] == "0x1"]
    # A step and a tile's first step, in both consumers. Of the first, the diagonal, one consumer needs half.
    assert len(under_way) == 4 and all(found[0] == "0x0" and found[1] >= 32 for found in under_way)
    assert sorted(found[1] for found in under_way)[1] >= 60
    # Sixteen instructions, eight for each product, are issued before the first wait; the compiler adds no others.
    assert sum(wait == "0x1" and products == 16 for wait, _, products in waits) == 4
