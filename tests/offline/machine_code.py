"""Kernels in Gluon, compiled for Hopper without a GPU, and what their machine code tells."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import tiny_llama_v3 as llama
from offline.architectures import CHIPS
from tests import ROOT

BEGIN = """
import json, sys, torch, triton
from offline.compiler import Driver
from tiny_llama.hopper import make_descriptor
triton.runtime.driver.set_active(Driver("sm_90"))
compiled = {}
"""
END = """
for name, kernel in compiled.items():
    open(f"{sys.argv[1]}/{name}.cubin", "wb").write(kernel.asm["cubin"])
print(json.dumps({name: (kernel.metadata.shared, kernel.metadata.num_warps) for name, kernel in compiled.items()}))
"""


class MachineCode(NamedTuple):
    """What a kernel needs, and its instructions."""

    shared: int  # bytes of shared memory
    warps: int
    registers: int  # of a thread, at its start
    stack: int  # bytes of a thread's spilled registers
    code: str

    def fits(self):
        """Return whether a program fits into a multiprocessor."""
        return self.shared <= CHIPS["sm_90"].program_kib * 1024 and self.registers * 32 * self.warps <= 2**16

    def waits(self):
        """Return (products still under way, products since the last wait, functions since the first of those) of waits.

        Waits are those for products. Functions are exponentials and reciprocals.
        """
        waits, functions, products = [], 0, 0
        pattern = r"WARPGROUP\.DEPBAR\S* \S+ 0x([0-9a-f]+)|(MUFU)|(HGMMA)"
        for wait, function, product in re.findall(pattern, self.code):
            functions = 0 if product and not products else functions + bool(function)
            products += bool(product)
            if wait:
                waits.append((int(wait, 16), products, functions))
                functions = products = 0
        return waits


def compile_kernels(program, folder):
    """Return {name: MachineCode} of the kernels that a program puts into {name: CompiledKernel}, called compiled."""
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BEGIN + program + END, folder]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: read_code(folder / f"{name}.cubin", *sizes) for name, sizes in found.items()}


def read_code(cubin, shared, warps):
    tool = Path(llama.triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    resources, code = (
        subprocess.run([tool, flag, cubin], capture_output=True, text=True, check=True).stdout
        for flag in ("-res-usage", "-sass")
    )
    registers, stack, local = (int(re.search(rf"\b{name}:(\d+)", resources)[1]) for name in ("REG", "STACK", "LOCAL"))
    assert local == 0
    return MachineCode(shared, warps, registers, stack, code)
