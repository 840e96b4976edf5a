"""What several tests of the script begin with."""

import dataclasses

import pytest
import torch

import tiny_llama_v3 as llama
from tests.core.tiny import TINY


@pytest.fixture
def make_step(device):
    """A TrainStep with its first batch loaded."""

    def make(config=TINY, **changes):
        config = dataclasses.replace(config, **changes)
        step = llama.TrainStep(config, torch.device(device))
        step.load(*next(step.world.batches(config)))
        return step

    return make
