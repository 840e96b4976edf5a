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
"""
END = """
open(sys.argv[1], "wb").write(compiled.asm["cubin"])
print(json.dumps([compiled.metadata.shared, compiled.metadata.num_warps]))
"""


class MachineCode(NamedTuple):
    """What a kernel needs, and its instructions."""

    shared: int  # bytes of shared memory
    warps: int
    registers: int  # of a thread, at its start
    local: int  # bytes of a thread's spilled registers
    code: str

    def fits(self):
        """Return whether a program fits into a multiprocessor."""
        return self.shared <= CHIPS["sm_90"].shared_limit and self.registers * 32 * self.warps <= 2**16


def machine_code(program, folder):
    """Return the MachineCode of the kernel that a program compiles, in a process of its own, as 'compiled'."""
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    cubin = folder / "kernel.cubin"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BEGIN + program + END, cubin]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    tool = Path(llama.triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    resources, code = (
        subprocess.run([tool, flag, cubin], capture_output=True, text=True, check=True).stdout
        for flag in ("-res-usage", "-sass")
    )
    registers, stack, local = (int(re.search(rf"\b{name}:(\d+)", resources)[1]) for name in ("REG", "STACK", "LOCAL"))
    return MachineCode(*json.loads(done.stdout.splitlines()[-1]), registers, stack + local, code)
