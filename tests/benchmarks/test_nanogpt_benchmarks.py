"""The benchmark of nanogpt_triton's step: figures follow from windows, and wrong gradients get no time."""

import importlib
import json
import re

import pytest
import torch

from benchmarks import gpt, harness
from nanogpt_triton import train

pytestmark = pytest.mark.triton
TINY = ["--tiny", "--windows", "2", "--steps", "1"]
# What the benchmark needs of a checkout, on our model.
NANOGPT = """
from nanogpt_triton.model import GPTConfig, GPT as Ours

class GPT(Ours):
    def __init__(self, config):
        super().__init__(config, "torch", "cpu", "torch", "torch")
"""


@pytest.fixture(autouse=True)
def small_gpt(monkeypatch):
    monkeypatch.setattr(gpt.hardware, "peak_tflops", lambda device, precision: 2.0)
    monkeypatch.setattr(gpt.GPT, "flops_per_token", lambda model: 5e6)
    monkeypatch.setattr(gpt, "compile_apart", lambda model: lambda *batch: model(*batch))  # a function, as compiled
    monkeypatch.setattr(gpt, "COMPARED_STEPS", 6)
    monkeypatch.setattr(harness, "UNCOUNTED", 0)
    if not torch.cuda.is_available():  # the interpreter takes seconds for a step of the usual model
        config = gpt.GPTConfig(block_size=8, vocab_size=32, n_layer=1, n_head=2, n_embd=32, bias=False)
        monkeypatch.setitem(gpt.SIZES, "tiny", (2, config))


def measured(folder, *arguments, code=0):
    assert gpt.main([*TINY, "--output-dir", str(folder), *arguments]) == code
    return json.loads(next(folder.glob("gpt_*.json")).read_text())


def test_rows_are_timed_after_the_gate(tmp_path):
    result, (batch_size, config) = measured(tmp_path), gpt.SIZES["tiny"]
    assert result["gate"]["error"] <= result["gate"]["allowed"] and "losses" not in result
    rows = result["rows"]
    assert [*rows] == [*gpt.ROWS] and len(rows) <= 10
    captured = [rows.pop(name) for name, row in gpt.ROWS.items() if row.graph and not torch.cuda.is_available()]
    assert all("needs a GPU" in row["error"] for row in captured)
    references = {name: row.get("reference") for name, row in rows.items()}
    assert references == dict.fromkeys(rows, "torch compile") | {"torch compile": None}
    loss = pytest.approx(rows["torch"]["first_loss"], rel=1e-4)
    for name, row in rows.items():
        assert row["error"] is None and row["first_loss"] == loss, name
        assert row["tokens_per_second"] * row["ms"]["median"] / 1e3 == pytest.approx(batch_size * config.block_size)
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * 5e6 / 2e12)


def test_nanogpt_itself_is_the_reference(tmp_path, monkeypatch):
    """Its losses are compared from the same weights and batches, while the learning rate rises."""
    rates, step = [], gpt.GPTAdamW.step
    monkeypatch.setattr(gpt.GPTAdamW, "step", lambda self: rates.append(self.param_groups[0]["lr"]) or step(self))
    (tmp_path / "model.py").write_text(NANOGPT)
    result = measured(tmp_path, "--nanogpt", str(tmp_path))
    losses = result["losses"]
    # A step that is not made shows: the losses of 6 batches.
    assert losses["error"] is None and len({*losses["ours"]}) == len({*losses["nanogpt"]}) == 6
    assert losses["largest_relative_difference"] < (1e-2 if torch.cuda.is_available() else 1e-6)
    differences = [abs(b - a) / a for a, b in zip(losses["nanogpt"], losses["ours"], strict=True)]
    assert losses["largest_relative_difference"] == max(differences)
    assert losses["mean_relative_difference"] == pytest.approx(sum(differences) / 6)
    assert rates[:6] == pytest.approx([6e-4 * number / 7 for number in range(1, 7)])
    rows = result["rows"]
    assert rows["nanoGPT compile"]["nanogpt"] and "reference" not in rows.pop("nanoGPT compile")
    assert {row["reference"] for row in rows.values() if not row["error"]} == {"nanoGPT compile"}


def test_a_captured_step_trains_as_an_eager_one(monkeypatch, device):
    """A fake graph calls again what would have been captured."""

    def replaying(work):
        result = work()
        return lambda: result.copy_(work()), result

    monkeypatch.setattr(train, "capture", replaying)
    batch_size, config = gpt.SIZES["tiny"]
    tokens = torch.randint(config.vocab_size, (batch_size, config.block_size), device=device)
    eager, captured = (gpt.Step(gpt.OURS, config, (tokens, tokens.roll(-1))) for _ in range(2))
    captured.capture()
    losses = [[step.run() or step.loss.item() for _ in range(3)] for step in (eager, captured)]
    assert losses[0] == losses[1] and len({*losses[0]}) == 3


@pytest.mark.parametrize("captured, compiled", [(3e-3, 1e-3), (1e-3, 3e-3)])
def test_the_gate_tells_the_worst_gradient_of_both(monkeypatch, captured, compiled):
    errors = {gpt.ROWS["triton"]: captured, gpt.ROWS["without graph"]: compiled}

    def gradients(config, row, batch, in_bf16):
        return {"good": torch.ones(1), "bad": torch.ones(1) + errors.get(row, 0.0)}

    monkeypatch.setattr(gpt, "gradients", gradients)
    worst = gpt.check(None, [torch.zeros(3, 4)] * 2)
    assert worst["name"] == "bad" and worst["error"] == pytest.approx(3e-3, rel=1e-3) and worst["allowed"] == 1e-2


def test_a_folder_without_nanogpt_is_named(tmp_path, capsys):
    assert gpt.main([*TINY, "--output-dir", str(tmp_path), "--nanogpt", str(tmp_path)]) == 2
    assert re.search(r"--nanogpt \S+ cannot be used \(FileNotFoundError.*model.py.*give a", capsys.readouterr().err)


def test_torch_compile_finds_the_module_of_nanogpt(tmp_path):
    (tmp_path / "model.py").write_text("def double(x):\n    return 2 * x\n")
    double = torch.compile(gpt.load_nanogpt(tmp_path).double, backend="eager")
    assert double(torch.ones(1)).item() == 2
    assert importlib.import_module("nanogpt_model").double(1) == 2


@pytest.mark.parametrize("is_compiled", [False, True])
def test_wrong_gradients_stop_everything(tmp_path, monkeypatch, is_compiled):
    """Those of the compiled model as well."""
    forward = gpt.GPT.forward

    def slanted(self, tokens, targets=None):
        logits, loss = forward(self, tokens, targets)
        return logits, loss * (1.1 if self.fused_loss else 1.0)

    if is_compiled:
        monkeypatch.setattr(gpt, "compile_apart", lambda model: lambda *batch: slanted(model, *batch))
    else:
        monkeypatch.setattr(gpt.GPT, "forward", slanted)
    assert gpt.main([*TINY, "--output-dir", str(tmp_path)]) == 1 and not list(tmp_path.glob("*.json"))
