"""FP8 beside bf16: what follows from losses, and what a run records."""

import json
import math

import pytest
import torch

import tiny_llama_v3 as llama
from benchmarks import fp8_learning

TINY = ["--tiny", "--seeds", "1"]


def measure(folder, *flags):
    assert fp8_learning.main([*TINY, *flags, "--output-dir", str(folder)]) == 0
    (path,) = folder.glob("fp8_learning_*.json")
    return json.loads(path.read_text())


def test_the_smoothed_loss_is_the_mean_of_the_last_fifty():
    means = fp8_learning.smoothed([float(step) for step in range(1, 201)])
    assert len(means) == 151 and means[0] == 25.5 and means[-1] == 175.5  # of 1 to 50, and of 151 to 200
    assert fp8_learning.smoothed([1.0, 3.0]) == [2.0]
    broken = fp8_learning.smoothed([5.0] * 60 + [math.nan] + [4.0] * 60)
    assert math.isnan(broken[11]) and broken[10] == 5.0 and broken[-1] == 4.0


def test_both_precisions_train_on_the_same(tmp_path, monkeypatch):
    started = []
    original = llama.warm_up
    monkeypatch.setattr(llama, "warm_up", lambda step: started.append(step) or original(step))
    monkeypatch.setattr(fp8_learning, "SMOOTHED", 3)
    result = measure(tmp_path, "--num-steps", "12")
    runs = result["runs"]
    kinds = [(data, precision) for data in ("text", "markov") for precision in ("bf16", "fp8")]
    assert [(run["data"], run["precision"]) for run in runs] == kinds
    for theirs, ours, bf16, fp8 in zip(started[::2], started[1::2], runs[::2], runs[1::2], strict=True):
        assert all(map(torch.equal, ours.initial_weights, theirs.initial_weights))
        assert torch.equal(ours.tokens, theirs.tokens)  # of the last batch
        assert ours.config == fp8_learning.llama.dataclasses.replace(theirs.config, fp8=True) != theirs.config
        assert bf16["losses"][0] == pytest.approx(fp8["losses"][0], rel=1e-2) and bf16["losses"] != fp8["losses"]
    for run in runs:
        assert run["error"] is None and len(run["losses"]) == 12 and run["ms"]["median"] > 0
        assert run["final_loss"] == pytest.approx(sum(run["losses"][-3:]) / 3)


def test_the_large_model_learns_at_a_lower_rate():
    def rate(size):
        options = fp8_learning.parse([])
        return fp8_learning.config_of(options, False, "text", 1, size, "markov", "fp8").learning_rate

    assert list(map(rate, ("medium", "large"))) == [3e-4, 2e-4]


def test_the_text_is_the_library_without_its_tests(tmp_path, monkeypatch):
    for name in ("b.py", "a/z.py", "a/b.py", "a/b.txt", "test/c.py", "a/tests/d.py", "site-packages/e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name} ")
    monkeypatch.setattr(fp8_learning.sysconfig, "get_path", lambda name: str(tmp_path) if name == "stdlib" else None)
    monkeypatch.setattr(fp8_learning.Path, "rglob", lambda path, pattern: reversed(sorted(path.glob(f"**/{pattern}"))))
    assert fp8_learning.library_text() == b"a/b.py a/z.py b.py "


def test_a_run_that_fails_or_is_late_says_why(tmp_path, monkeypatch):
    def train(step, batches, records):
        raise torch.OutOfMemoryError("no room\nfor this")

    monkeypatch.setattr(llama, "train", train)
    monkeypatch.setattr(fp8_learning.Run, "is_late", lambda run: len(run.result["runs"]) > 0)
    result = measure(tmp_path, "--data", "markov", "--time-limit", "9")
    assert [run["error"] for run in result["runs"]] == [
        "OutOfMemoryError: no room", "not started within --time-limit 9"
    ]  # fmt: skip


def test_a_loss_that_is_not_finite_ends_the_run(run, monkeypatch):
    settings = dict(data="markov", use_amp=True, impl="torch", num_steps=9, timing="step")
    config = llama.Config(**fp8_learning.SIZES["tiny"], **settings)
    original, calls = llama.TrainStep.forward, []

    def forward(step):
        calls.append(step)
        original(step)
        if len(calls) >= config.warmup_steps + 4:
            step.loss = step.loss * math.inf

    monkeypatch.setattr(llama.TrainStep, "forward", forward)
    trained = fp8_learning.train(run, config)
    assert trained["error"] == "diverged: the loss of step 4 is inf" and len(trained["losses"]) == 4
    assert trained["final_loss"] is None


def test_a_device_without_fp8_is_refused(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(fp8_learning.fp8, "formats_of", lambda arch: None)
    assert fp8_learning.main([*TINY, "--output-dir", str(tmp_path / "new")]) == 2 and not (tmp_path / "new").exists()
    assert "FP8 needs a GPU that has it" in capsys.readouterr().err
