"""benchmarks.training: both rows train the same, a curve has the means of equal parts, and what fails is told.

Each step takes 10 ms on a clock that nothing else moves, so the number of steps is known.
"""

import json
import math
import statistics
import sys

import pytest
import torch

import tiny_llama_v3 as llama
from benchmarks import training
from tests import ROOT

# On a GPU steps are captured and call no run(), and the clock is the device's.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="replaces the clock and the step of a CPU")

OURS, PEER = "triton", "sdpa"
TEXT = "def f(x):\n    return x\n\n" * 100
# Of the 60 steps of 0.6 s in parts of 7, PyTorch trains those that begin within 0.3 s.
SHORT = ["--tiny", "--seconds", "0.6", "--peer-seconds", "0.3"]
POINTS = [7, 14, 21, 28, 35, 42, 49, 56, 60]
SMALLER = training.MODELS["tiny"] | dict(hidden_dim=16, num_layers=1, num_heads=2, batch_size=1)


def run_training(folder, *flags, after_step=lambda step: None, change=lambda patch: None):
    """Return (exit code, the result, {implementation: [(rate, first tokens, loss) of each step]})."""
    now, steps = [0.0], {}
    run_step = llama.TrainStep.run

    def run(step):
        run_step(step)
        now[0] += 0.01
        own = steps.setdefault(step.config.impl, [])
        own.append((float(step.optimizer.lr), step.tokens[0].tolist(), step.loss.item()))
        after_step(step)

    folder.joinpath("text.py").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", lambda: now[0])
        patch.setattr(llama.TrainStep, "run", run)
        patch.setattr(training, "MOST_POINTS", 9)
        # Plain PyTorch in the place of our kernels, for which the interpreter takes seconds.
        patch.setattr(llama, "triton_obstacle", lambda *_: "this test has no kernels")
        change(patch)
        code = training.main([*SHORT, "--data", str(folder / "text.py"), "--output-dir", str(folder / "out"), *flags])
    (path,) = (folder / "out").glob("training_*.json")
    return code, json.loads(path.read_text()), steps


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run_training(tmp_path_factory.mktemp("whole"))


def test_the_number_of_steps_follows_from_the_time_of_a_few(whole):
    code, result, _ = whole
    assert code == 0 and result["num_steps"] == result["config"]["num_steps"] == 60
    assert result["timed_ms"] == pytest.approx(10) and {*result["rows"]} == {OURS, PEER}
    ours, peer = result["rows"].values()
    assert (ours["steps"], peer["steps"]) == (60, 35)
    for row in (ours, peer):
        assert row["error"] is None and row["ms"] == pytest.approx(10)
        assert row["tokens_per_second"] == pytest.approx(2 * 8 / 0.01)
    assert result["data"] == {"name": "text.py", "bytes": len(TEXT)}
    assert "--output-dir" not in result["command"] and str(ROOT) not in json.dumps(result["config"])


def test_a_point_of_a_curve_is_the_mean_of_a_part(whole):
    _, result, steps = whole
    for row, impl, points in ((OURS, "triton", POINTS), (PEER, "sdpa", POINTS[:5])):
        curve, losses = result["rows"][row]["curve"], [loss for _, _, loss in steps[impl]][-points[-1] :]
        assert curve["step"] == points and curve["seconds"] == pytest.approx([step / 100 for step in points])
        parts = [losses[begin:end] for begin, end in zip([0, *points], points, strict=False)]
        assert curve["loss"] == pytest.approx([statistics.fmean(part) for part in parts], abs=1e-5)
        assert result["rows"][row]["first_loss"] == losses[0]
        assert result["rows"][row]["final_loss"] == curve["loss"][-1] < curve["loss"][0]


def test_both_rows_have_the_same_batches_and_rates(whole):
    """A cosine after a warm-up, both of the steps of ours; what ran before the training has left nothing."""
    _, result, steps = whole
    ours, theirs = steps["triton"][-60:], steps["sdpa"][-35:]
    config = llama.Config(**training.TRAINING, num_steps=60)
    assert [rate for rate, _, _ in ours] == pytest.approx([config.learning_rate_of(n) for n in range(60)], rel=1e-6)
    assert [step[:2] for step in ours[:35]] == [step[:2] for step in theirs]
    assert len({tuple(tokens) for _, tokens, _ in theirs}) > 5
    apart = [abs(a[2] - b[2]) for a, b in zip(ours, theirs, strict=False)]
    difference = result["loss_difference"]
    assert difference["steps"] == difference["first_steps"] == 35
    assert difference["largest"] == pytest.approx(max(apart)) and max(apart) < 1e-5
    assert difference["mean"] == pytest.approx(statistics.fmean(apart))


def test_another_schedule_of_the_peer_shows_in_the_losses(tmp_path):
    follow = llama.TrainStep.follow_schedule

    def change(patch):
        def follow_another(step, number):
            follow(step, number)
            if step.config.impl == "sdpa":
                step.optimizer.lr = 1.1 * float(step.optimizer.lr)

        patch.setattr(llama.TrainStep, "follow_schedule", follow_another)

    _, result, _ = run_training(tmp_path, change=change)
    assert result["loss_difference"]["largest"] > 1e-3 and result["loss_difference"]["mean"] > 1e-4


def test_the_difference_of_losses():
    ours, theirs = [3.0, 2.0, 1.0] + [1.0] * 97 + [1.0] * 100, [3.0, 2.25, 0.5] + [1.0] * 97 + [2.0] * 25
    assert training.loss_difference(ours, theirs) == {
        "steps": 125, "mean": (0.25 + 0.5 + 25) / 125, "first_steps": 100, "largest": 0.5,
    }  # fmt: skip


# --- the saved model


def test_the_saved_model_is_the_trained_one_and_goes_on_with_held_out_text(whole, tmp_path):
    pytest.importorskip("transformers")
    _, result, _ = whole
    theirs = result["transformers"]
    assert 0 < theirs["logit_difference"] < 1e-5
    held_out = TEXT[len(TEXT) * 9 // 10 :]
    assert theirs["prompt"] == held_out[held_out.index("def ") :][:32]
    assert len(theirs["text"].encode(errors="replace")) >= 300 and 0 < result["rows"][OURS]["held_out_loss"] < 6


def test_other_weights_than_those_in_the_folder_are_told(tmp_path, capsys):
    pytest.importorskip("transformers")
    state_dict = llama.TrainStep.state_dict

    def change(patch):
        patch.setattr(llama.TrainStep, "state_dict", lambda step: {n: 1.1 * w for n, w in state_dict(step).items()})

    code, result, _ = run_training(tmp_path, "--seconds=0", change=change)
    assert code == 1 and result["transformers"]["logit_difference"] > training.LOGIT_TOLERANCE
    assert "of the largest: too much" in capsys.readouterr().out


def test_without_transformers_a_line_says_so(tmp_path, capsys):
    def change(patch):
        patch.setitem(sys.modules, "transformers", None)

    flags = "--peer-seconds=0", f"--save={tmp_path / 'model'}"
    code, result, _ = run_training(tmp_path, *flags, change=change)
    assert code == 0 and result["transformers"] is None and [*result["rows"]] == [OURS]
    assert "transformers is not installed" in capsys.readouterr().out
    saved = json.loads((tmp_path / "model/config.json").read_text())
    assert (saved["vocab_size"], saved["hidden_size"]) == (256, 32) and "--save" not in result["command"]


# --- what ends a run early


def at_step(number, impl, act):
    """Return a function that acts after step `number` of the training of an implementation."""
    count = [-9]  # four of the warm-up, a window after it, and four that are timed

    def after_step(step):
        if step.config.impl == impl:
            count[0] += 1
            if count[0] == number:
                act(step)

    return after_step


def interrupt(step):
    raise KeyboardInterrupt


@pytest.mark.parametrize("impl, points", [("triton", POINTS[:2]), ("sdpa", POINTS)])
def test_what_was_measured_until_ctrl_c_is_kept(tmp_path, capsys, impl, points):
    # PyTorch, of which nothing is timed before the training, stops four steps later, in the same part.
    code, result, _ = run_training(tmp_path, after_step=at_step(17, impl, interrupt))
    assert code == 130 and result["rows"][OURS]["curve"]["step"] == points
    assert "transformers" not in result  # by which the pages know that it is not complete
    if impl == "sdpa":
        assert result["rows"][PEER]["curve"]["step"] == POINTS[:2]
    assert "Results: " in capsys.readouterr().out


def test_a_run_that_diverges_keeps_its_finite_losses(tmp_path, capsys):
    def spoil(step):
        step.loss = torch.tensor(math.nan)

    code, result, _ = run_training(tmp_path, after_step=at_step(16, "triton", spoil))
    assert code == 1 and [*result["rows"]] == [OURS] and result["rows"][OURS]["curve"]["step"] == POINTS[:2]
    assert "diverged in the steps 15 to 21" in result["rows"][OURS]["error"]


@pytest.mark.parametrize("flags, reason", [
    (["--data", "random", "--tiny"], "--data random has no bytes to hold out: give a text"),
    (["--data", "{}/tokens.bin", "--tiny"], "tokens.bin has no bytes to hold out: give a text"),
    (["--data", "{}/nothing.txt", "--tiny"], "nothing.txt' cannot be read"),
    (["--data", "{}/text.txt"], "need a GPU, and the device is a CPU: use --tiny"),
    (["--data", "{}/text.txt", "--tiny", "--save", "{}"], "holds a model already: give another folder"),
    (["--data", "{}/text.txt", "--tiny", "--seconds", "inf"], "--seconds: inf has no end: give a number of seconds"),
    (["--tiny"], "--data"),
])  # fmt: skip
def test_what_cannot_be_trained_is_refused(tmp_path, capsys, flags, reason):
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "config.json").write_text("{}")
    out = tmp_path / "out"
    assert training.main([flag.format(tmp_path) for flag in flags] + ["--output-dir", str(out)]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1 and not list(out.glob("*"))


@pytest.mark.triton
def test_our_kernels_train_as_pytorch_does(tmp_path, monkeypatch):
    """In the interpreter."""
    monkeypatch.setitem(training.MODELS, "tiny", SMALLER)
    obstacle = llama.triton_obstacle

    def change(patch):
        patch.setattr(llama, "triton_obstacle", obstacle)

    code, result, _ = run_training(tmp_path, "--seconds=0.03", change=change)
    assert code == 0 and result["rows"][OURS]["implementation"] == "triton" and result["num_steps"] == 3
    assert result["loss_difference"]["steps"] == 3 and result["loss_difference"]["largest"] < 1e-5
