"""launch() hands a compiled kernel what Triton's own launcher would, in the order of the Triton that is installed."""

import json
import os
import subprocess
import sys

import pytest

import tiny_llama_v3 as llama
from tests import ROOT

# Triton compiles for a GPU that is not here, and a launcher that only writes down what it is given takes the place of
# the driver's. Tensors are shown by their addresses.
PROGRAM = """
import json, torch, triton, tiny_llama_v3 as llama
from offline import compiler

given = []

class Launcher:
    def __init__(self, source, metadata):
        pass
    def __call__(self, *arguments):
        shown = (a.data_ptr() if torch.is_tensor(a) else a for a in arguments)
        given.append([a if isinstance(a, int | float | None) else repr(a)[:40] for a in shown])

class Driver(compiler.Driver):
    launcher_cls = Launcher
    def __init__(self):
        super().__init__("gfx942")
        self.utils = self
    def get_device_properties(self, device):
        return {"max_shared_mem": 65536}
    def load_binary(self, name, *rest):
        return name, "the loaded function", 0, 0, 1024
    def unload_module(self, module):
        pass

triton.runtime.driver.set_active(Driver())
llama.triton_obstacle = lambda *given: None
torch._C._cuda_getCurrentRawStream = lambda device: 0
x, partial, out = torch.zeros(3, 64), torch.zeros(2, 64), torch.zeros(64)
for _ in range(2):  # the first time by Triton, the second time by launch() itself
    constants = dict(ACCUMULATE=False, BLOCK_ROWS=16, BLOCK_COLS=64)
    llama.launch(llama.column_sum_kernel, (5, 3), (partial, out), (64, 2, 64), constants)
print(json.dumps(given))
"""


@pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")
def test_the_arguments_of_a_direct_launch_are_those_of_triton():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    by_triton, direct = json.loads(run.stdout)
    by_triton[6:9] = [None] * 3  # for the hooks of profilers, which launch() leaves out
    assert direct == by_triton
    assert direct[:3] == [5, 3, 1] and direct[-3:] == [False, 16, 64] and "the loaded function" in str(direct[4])
