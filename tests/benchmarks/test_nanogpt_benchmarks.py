"""The benchmark of nanogpt_triton's step: figures follow from windows, and wrong gradients get no time."""

import json

import pytest
import torch

from benchmarks import gpt, harness
from nanogpt_triton.kernels import triton_add_layer_norm

pytestmark = pytest.mark.triton
TINY = ["--tiny", "--windows", "2", "--steps", "1"]
NORMS = "torch", "triton", "triton, addition apart"


@pytest.fixture(autouse=True)
def small_gpt(monkeypatch):
    if not torch.cuda.is_available():  # the interpreter takes seconds for a step of the usual model
        config = gpt.GPTConfig(block_size=8, vocab_size=32, n_layer=1, n_head=2, n_embd=32, bias=False)
        monkeypatch.setitem(gpt.SIZES, "tiny", (2, config))


def test_rows_are_timed_after_the_gate(tmp_path, monkeypatch):
    monkeypatch.setattr(gpt.hardware, "peak_tflops", lambda device, precision: 2.0)
    monkeypatch.setattr(gpt.GPT, "flops_per_token", lambda model: 5e6)
    monkeypatch.setattr(gpt, "compile_apart", lambda model: lambda *batch: model(*batch))  # a function, as compiled
    monkeypatch.setattr(harness, "UNCOUNTED", 0)
    assert gpt.main([*TINY, "--output-dir", str(tmp_path)]) == 0
    result = json.loads(next(tmp_path.glob("gpt_*.json")).read_text())
    assert result["gate"]["error"] <= result["gate"]["allowed"]
    found = {name: (row.get("reference"), row["first_loss"]) for name, row in result["rows"].items()}
    loss = pytest.approx(found["torch"][1], rel=1e-4)
    alike = {end: {f"{name}{end}": (f"torch{end}", loss) for name in NORMS} for end in ("", " compile")}
    assert found == alike[""] | alike[" compile"] | {f"torch{end}": (None, loss) for end in alike}
    for row in result["rows"].values():
        assert row["tokens_per_second"] * row["ms"]["median"] / 1e3 == pytest.approx(2 * 8)
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * 5e6 / 2e12)


def test_wrong_gradients_stop_everything(tmp_path, monkeypatch):
    forward = gpt.GPT.forward

    def slanted(self, tokens, targets=None):
        logits, loss = forward(self, tokens, targets)
        return logits, loss * (1.1 if self.transformer.ln_f.add_layer_norm is triton_add_layer_norm else 1.0)

    monkeypatch.setattr(gpt.GPT, "forward", slanted)
    assert gpt.main([*TINY, "--output-dir", str(tmp_path)]) == 1 and not list(tmp_path.glob("*.json"))
