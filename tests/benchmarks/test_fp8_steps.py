"""benchmarks.steps in FP8: torchao's recipes beside ours, and the rule that judges them."""

import dataclasses
import sys
import types

import pytest
import torch

import tiny_llama_v3 as llama
from benchmarks import steps
from measure.results import Unavailable
from tests.core.tiny import TINY
from tiny_llama import fp8

CONFIG = dataclasses.replace(TINY, seq_len=16, use_amp=True)


class Float8Linear(torch.nn.Linear):
    """What torchao makes of a module; wrong rounds badly."""

    wrong = False

    def forward(self, x):
        return fp8.emulated_linear(x, self.weight) * (4 if self.wrong else 1)


@pytest.fixture
def torchao(monkeypatch):
    """A stand-in for the library: the recipes that it was asked for."""
    recipes = []

    def convert_to_float8_training(model, config):
        recipes.append(config)
        for module in model.modules():
            if type(module) is torch.nn.Linear:
                module.__class__ = Float8Linear

    config = types.SimpleNamespace(from_recipe_name=lambda name: name)
    module = types.SimpleNamespace(Float8LinearConfig=config, convert_to_float8_training=convert_to_float8_training)
    monkeypatch.setitem(sys.modules, "torchao", types.SimpleNamespace(float8=module))
    monkeypatch.setitem(sys.modules, "torchao.float8", module)
    return recipes


@pytest.mark.parametrize("recipe", steps.TORCHAO_RECIPES)
def test_every_projection_is_torchao_s(torchao, recipe):
    (gate,) = steps.check([f"sdpa {recipe}"], CONFIG, llama.get_device("cpu")).values()
    assert gate["passed"] and torchao == [recipe]
    assert gate["relative_error"] > 0.05  # that of FP8, which bf16 would not be allowed


def test_a_wrong_one_is_not_timed(torchao, monkeypatch):
    monkeypatch.setattr(Float8Linear, "wrong", True)
    gates = steps.check(["sdpa", "sdpa tensorwise"], CONFIG, llama.get_device("cpu"))
    assert gates["sdpa"]["passed"] and not gates["sdpa tensorwise"]["passed"]


def test_what_is_missing_takes_one_line(monkeypatch):
    cpu = llama.get_device("cpu")
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(Unavailable, match="torchao.float8 is not installed|torchao is not installed"):
        steps.make_step(steps.Row("sdpa rowwise"), CONFIG, cpu)
    old = dataclasses.replace(cpu, arch="gfx90a")
    for row, config, device in (("triton fp8", CONFIG, old), ("sdpa rowwise", CONFIG, old)):
        with pytest.raises(Unavailable, match=r"FP8 is for bf16, and for a GPU that has it \(gfx90a\)"):
            steps.make_step(steps.Row(row), config, device)
    with pytest.raises(Unavailable, match="FP8 is for bf16"):
        steps.make_step(steps.Row("triton fp8"), dataclasses.replace(CONFIG, use_amp=False), cpu)
