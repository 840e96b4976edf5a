"""Whole small models of odd sizes: loss, every gradient and steps of AdamW, by the rule of --check."""

import pytest
import torch

import tiny_llama_v3 as llama
from tests.core.tiny import TINY
from tests.offline.selection import only_emulated

pytestmark = only_emulated
SIZES = {
    "tiny": {},
    "odd": dict(hidden_dim=72, num_heads=3, num_kv_heads=1, ffn_dim=70, vocab_size=101, batch_size=3, seq_len=33),
    "two backward kernels": dict(hidden_dim=80, num_heads=2, num_kv_heads=1, batch_size=1, seq_len=131),
    "heads of 128": dict(hidden_dim=256, num_heads=2, num_kv_heads=2, num_layers=1, batch_size=1, seq_len=65),
    "mistakes": dict(noncontiguous_kv=True, triton_matmul_swiglu=True, num_layers=1),
}


@pytest.fixture(params=SIZES.values(), ids=SIZES.keys())
def sizes(request):
    return request.param


@pytest.fixture(params=["fp32", "bf16"])
def config(request, sizes):
    return llama.dataclasses.replace(TINY, **sizes, use_amp=request.param == "bf16")


def test_loss_and_gradients(config, capsys):
    assert llama.OneProcess().check(config, torch.device("cpu")), capsys.readouterr().out


def losses(config, double=False):
    """Of three steps on one batch, whose gradients all parameters take part in."""
    step = llama.TrainStep(config, torch.device("cpu"))
    if double:
        step.model.double()
    step.load(*next(step.world.batches(config)))
    result = []
    for _ in range(3):
        step.run()
        result.append(step.loss.item())
    return torch.tensor(result, dtype=torch.float64)


def test_steps(config):
    plain = llama.dataclasses.replace(config, impl="torch", learning_rate=1e-2)
    ours = llama.dataclasses.replace(config, learning_rate=1e-2)
    exact = losses(llama.dataclasses.replace(plain, use_amp=False), double=True)
    assert exact[2] < exact[0] - 0.1  # it learns the batch
    allowed = 2 * (losses(plain) - exact).abs().max() + (2e-2 if config.use_amp else 1e-5) * exact[0]
    assert (losses(ours) - exact).abs().max() <= allowed
