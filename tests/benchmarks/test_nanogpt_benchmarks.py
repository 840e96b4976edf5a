"""The benchmarks of nanogpt_triton: wrong results get no time."""

import json

import pytest

import tiny_llama_v3 as llama
from benchmarks import gpt

pytestmark = [
    pytest.mark.skipif(llama.triton is None, reason="Triton is not installed"),
    pytest.mark.usefixtures("small_gpt"),
]
ROWS = ["torch", "triton", "triton, addition apart"]


def newest(folder, benchmark):
    (path,) = folder.glob(f"{benchmark}_*.json")
    return json.loads(path.read_text())


def run_gpt(folder, *flags):
    return gpt.main(["--tiny", "--windows", "2", "--steps", "1", "--output-dir", str(folder), *flags])


def test_steps_are_timed_after_the_gate(tmp_path):
    assert run_gpt(tmp_path, "--rows", *ROWS) == 0
    result = newest(tmp_path, "gpt")
    assert result["gate"]["error"] <= result["gate"]["allowed"]
    rows = result["rows"]
    assert list(rows) == ROWS and all(row["error"] is None for row in rows.values())
    losses = [row["first_loss"] for row in rows.values()]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)
    assert [name for name, row in rows.items() if "speedup" in row] == ROWS[1:]


def test_wrong_gradients_stop_everything(tmp_path, monkeypatch):
    forward = gpt.GPT.forward

    def slanted(self, tokens, targets=None):
        logits, loss = forward(self, tokens, targets)
        return logits, loss * (1.1 if self.layer_norm == "triton" else 1.0)

    monkeypatch.setattr(gpt.GPT, "forward", slanted)
    assert run_gpt(tmp_path) == 1 and not list(tmp_path.glob("*.json"))
