"""Programs that tests run on a Hopper GPU, each in a process and within a limit: a wrong barrier hangs."""

import json
import subprocess
import sys

import pytest
import torch

import tiny_llama_v3 as llama
from tests import ROOT

IS_HOPPER = torch.cuda.is_available() and llama.get_gpu("cuda").arch == "sm_90"
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of sm_90")


def run(program):
    """Return what the last line that a program prints is in JSON."""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
