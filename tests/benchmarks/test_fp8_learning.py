"""FP8 beside bf16: what follows from losses, what a run records, and what the page says of it."""

import json
import math

import pytest
import torch

import tiny_llama_v3 as llama
from benchmarks import fp8_learning


def run(losses, ms=10.0, **others):
    names = {"size": "large", "data": "text", "seed": 1, "precision": "bf16", "error": None}
    final = fp8_learning.smoothed(losses)[-1]
    return names | {"losses": losses, "ms": {"median": ms}, "final_loss": final, "seconds": 1.0, "tflop": 1.0} | others


def falling(final, steps=200):
    """Losses of a straight line, so that the mean of 50 is the loss 24.5 steps before; the last mean is final."""
    return [final + 0.01 * (steps - 24.5 - step) for step in range(1, steps + 1)]


def test_the_smoothed_loss_is_the_mean_of_the_last_fifty():
    means = fp8_learning.smoothed(falling(1.0))
    assert len(means) == 151 and means[-1] == pytest.approx(1.0) and means[-2] == pytest.approx(1.01)
    assert fp8_learning.smoothed([1.0, 3.0]) == [2.0]
    broken = fp8_learning.smoothed([5.0] * 60 + [math.nan] + [4.0] * 60)
    assert math.isnan(broken[11]) and broken[10] == 5.0 and broken[-1] == 4.0


# --- runs

TINY = ["--tiny", "--seeds", "1"]


def measure(folder, *flags):
    assert fp8_learning.main([*TINY, *flags, "--output-dir", str(folder)]) == 0
    (path,) = folder.glob("fp8_learning_*.json")
    return json.loads(path.read_text())


def test_both_precisions_train_on_the_same(tmp_path, monkeypatch):
    started = []
    original = llama.warm_up
    monkeypatch.setattr(llama, "warm_up", lambda step: started.append(step) or original(step))
    monkeypatch.setattr(fp8_learning, "SMOOTHED", 3)
    result = measure(tmp_path, "--num-steps", "12")
    assert [(r["data"], r["precision"]) for r in result["runs"]] == [
        (data, precision) for data in ("text", "markov") for precision in ("bf16", "fp8")
    ]
    for index, (bf16, fp8) in enumerate((result["runs"][:2], result["runs"][2:])):
        ours, theirs = started[2 * index + 1], started[2 * index]
        assert all(map(torch.equal, ours.initial_weights, theirs.initial_weights))
        assert torch.equal(ours.tokens, theirs.tokens)  # of the last batch
        assert fp8["config"] == bf16["config"] | {"fp8": True} and not bf16["config"]["fp8"]
        assert bf16["losses"][0] == pytest.approx(fp8["losses"][0], rel=1e-2) and bf16["losses"] != fp8["losses"]
    for found in result["runs"]:
        assert found["seconds"] > 0 and found["tflop"] > 0
        assert found["error"] is None and len(found["losses"]) == 12 == found["config"]["num_steps"]
        assert found["losses"] == [round(loss, 5) for loss in found["losses"]]
        assert found["final_loss"] == pytest.approx(sum(found["losses"][-3:]) / 3)
        assert set(found["ms"]) == {"p20", "median", "p80"} and found["ms"]["median"] > 0
        is_text = found["data"] == "text"
        assert (found["held_out_loss"] is not None) == is_text == (found["config"]["vocab_size"] == 256)
        assert found["config"]["data"] == found["data"] and found["config"]["learning_rate"] == 3e-4
    assert result["text"]["bytes"] > 2e6 and len(result["text"]["sha256"]) == 64 and result["missing"] == []


def test_the_text_is_the_library_without_its_tests(tmp_path, monkeypatch):
    for name in ("b.py", "a/z.py", "a/b.py", "a/b.txt", "test/c.py", "a/tests/d.py", "site-packages/e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name} ")
    monkeypatch.setattr(fp8_learning.sysconfig, "get_path", lambda name: str(tmp_path) if name == "stdlib" else None)
    monkeypatch.setattr(fp8_learning.Path, "rglob", lambda path, pattern: reversed(sorted(path.glob(f"**/{pattern}"))))
    assert fp8_learning.library_text() == b"a/b.py a/z.py b.py "


def test_a_text_of_one_s_own(tmp_path, capsys):
    (tmp_path / "text").write_bytes(b"abc " * 300)
    flags = ["--data", "text", "--precisions", "bf16", "--num-steps", "2", "--learning-rate", "0.001"]
    result = measure(tmp_path, *flags, "--text", str(tmp_path / "text"))
    assert result["text"]["bytes"] == 1200 and result["runs"][0]["config"]["learning_rate"] == 0.001
    assert fp8_learning.main([*TINY, "--text", str(tmp_path / "none")]) == 2
    assert "--text" in capsys.readouterr().err


@pytest.fixture
def trained(monkeypatch):
    """Stands in for training: the results of the runs, exceptions among them, and what was saved after each."""
    outcomes, saved = [], []

    def train(config, device):
        outcome = outcomes.pop(0) if outcomes else run([1.0])
        if isinstance(outcome, Exception):
            raise outcome
        return {name: outcome[name] for name in ("error", "losses", "final_loss")} | {"ms": {"median": 1.0}}

    class Run(fp8_learning.Run):
        def save(self):
            super().save()
            saved.append(len(json.loads(self.file.path.read_text())["runs"]))

    monkeypatch.setattr(fp8_learning, "train", train)
    monkeypatch.setattr(fp8_learning, "Run", Run)
    return outcomes, saved


def test_a_run_that_fails_says_why_and_all_are_saved_one_by_one(tmp_path, trained):
    outcomes, saved = trained
    outcomes += [run([1.0]), torch.OutOfMemoryError("no room\nfor this")]
    result = measure(tmp_path, "--data", "markov", "--seeds", "1", "2")
    assert saved == [1, 2, 3, 4, 4]
    assert [found["error"] for found in result["runs"]] == [None, "OutOfMemoryError: no room", None, None]


def test_a_loss_that_is_not_finite_ends_the_run(monkeypatch):
    config = llama.Config(**fp8_learning.SIZES["tiny"], data="markov", use_amp=True, impl="torch", num_steps=30)
    original, calls = llama.TrainStep.forward, []

    def forward(step):
        calls.append(step)
        original(step)
        if len(calls) >= config.warmup_steps + 4:
            step.loss = step.loss * math.inf

    monkeypatch.setattr(llama.TrainStep, "forward", forward)
    found = fp8_learning.train(config, llama.get_device("cpu"))
    assert found["error"] == "diverged: the loss of step 4 is inf" and len(found["losses"]) == 4
    assert found["final_loss"] is None and found["held_out_loss"] is None
    assert len(calls) == config.warmup_steps + fp8_learning.WINDOW_STEPS


def test_what_would_end_too_late_is_not_started(tmp_path, trained, monkeypatch, capsys):
    monkeypatch.setattr(fp8_learning, "expected_seconds", lambda runs, wanted: 50.0 * len(runs))
    result = measure(tmp_path, "--data", "markov", "--seeds", "1", "2", "--time-limit", "99")
    assert [(found["seed"], found["precision"]) for found in result["runs"]] == [(1, "bf16"), (1, "fp8")]
    assert result["missing"] == ["tiny markov seed 2 bf16", "tiny markov seed 2 fp8"]
    assert "tiny markov seed 2 fp8: left out by --time-limit 99" in capsys.readouterr().out


def test_the_time_of_a_run_is_that_of_the_runs_most_like_it():
    done = [
        {"size": "medium", "precision": "bf16", "seconds": 10, "tflop": 1, "error": None},
        {"size": "large", "precision": "bf16", "seconds": 60, "tflop": 10, "error": None},
        {"size": "large", "precision": "fp8", "seconds": 1, "tflop": 10, "error": "OutOfMemoryError"},
    ]
    for size, precision, expected in (("medium", "fp8", 100), ("large", "fp8", 60), ("small", "bf16", 100)):
        assert fp8_learning.expected_seconds(done, {"size": size, "precision": precision, "tflop": 10}) == expected
    assert fp8_learning.expected_seconds([], {"size": "large", "precision": "fp8", "tflop": 10}) == 0


def test_bad_requests_take_one_line(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(fp8_learning, "Run", lambda *args, **fields: pytest.fail("work before the refusal"))
    assert fp8_learning.main(["--sizes", "large"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--sizes large needs a GPU" in error and "--tiny" in error
    monkeypatch.setattr(fp8_learning.fp8, "formats_of", lambda arch: None)
    assert fp8_learning.main(TINY) == 2
    assert "--precisions fp8 needs a GPU with FP8" in capsys.readouterr().err
