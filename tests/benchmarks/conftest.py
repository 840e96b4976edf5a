"""A run of a benchmark on the CPU."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import harness


@pytest.fixture
def run(tmp_path):
    options = SimpleNamespace(output_dir=str(tmp_path), time_limit=100.0, windows=2)
    return harness.Run("test", [], options, torch.device("cpu"), cases=[])
