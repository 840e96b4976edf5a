"""What makes the benchmarks fast enough to test."""

import pytest
import torch

from benchmarks import gpt


@pytest.fixture
def small_gpt(monkeypatch):
    if not torch.cuda.is_available():  # the interpreter takes seconds for a step of the usual model
        config = gpt.GPTConfig(block_size=8, vocab_size=32, n_layer=1, n_head=2, n_embd=32, bias=False)
        monkeypatch.setitem(gpt.SIZES, "tiny", (2, config))
