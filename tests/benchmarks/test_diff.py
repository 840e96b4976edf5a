"""The comparison of results: what differs beyond the noise is told, and what cannot be compared is refused."""

import json
import re

import pytest

import tiny_llama_v3 as llama
from benchmarks import diff

ENVIRONMENT = {"device": "Some GPU", "arch": "sm_90", "torch": "2.11.0", "commit": "a"}
STEPS = [10.0, 10.1, 10.2, 10.3, 10.4, 10.5]


def write(path, ms, phase=0.5, config=None, environment=None, **summary):
    """A result of tiny_llama_v3.py whose steps take these times."""
    shares = {"forward": phase, "backward": 1 - phase}
    times = [
        {"batch_ms": t, "host_ms": 1.0, "phase_ms": {name: t * share for name, share in shares.items()}} for t in ms
    ]
    figures = dict(diverged=None, phase_ms=shares, first_loss=6.9, final_loss=2.0, peak_memory_mib=100.0)
    figures |= dict(kernels={"kernels": 9, "launches": 3}) | summary
    result = dict(implementation="triton", precision="fp32", operations={}, summary=figures, steps=times)
    result["config"] = {"seed": 1, "output_dir": str(path)} | (config or {})
    result["environment"] = ENVIRONMENT | (environment or {})
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result))
    return path


@pytest.fixture
def compare(tmp_path, capsys):
    """A function of the runs of two sides, each the arguments of write(): (exit code, {figure: its words}, output)."""

    def compared(before, after, *flags):
        for side, runs in (("before", before), ("after", after)):
            for number, (ms, more) in enumerate(runs):
                write(tmp_path / side / f"{number}.json", ms, **more)
        code = diff.main([str(tmp_path / "before"), str(tmp_path / "after"), *flags])
        out, error = capsys.readouterr()
        return code, {line.split("  ")[0].strip(): line.split() for line in out.splitlines()}, out + error

    return compared


def test_changes_beyond_the_noise_are_told(compare):
    changes = dict(final_loss=2.5, first_loss=6.9 + 1e-9, environment={"commit": "b"})  # the last digits may differ
    after = [0.9 * t for t in STEPS], dict(phase=0.45) | changes
    code, found, out = compare([(STEPS, {})], [after])
    assert code == 0 and "commit: a / b\n" in out and "One run a side" in out and "held-out" not in out
    assert found["step, ms"][2:] == "10.2 (10.1 – 10.4) 9.23 (9.09 – 9.36) 0.900 faster (0.857 – 0.945)".split()
    assert [found[f"{phase}, ms"][-4] for phase in ("forward", "backward", "host")] == ["faster", "same", "same"]
    assert found["final loss"][2:] == ["2.00000", "2.50000", "1.25", "higher"]
    assert [found[name][-1] for name in ("first loss", "peak memory MiB", "kernels", "launches")] == ["same"] * 4


@pytest.mark.parametrize("before, after, cells", [
    # The median of 24 times is 10, as that of 20; the other run of a side takes 1.02 times as long. 10.1 / 10 / 1.02
    # and 10.1 / 10 * 1.02 are the bounds, whichever side differs, and without the other run the ratio alone.
    ([[10.0] * 20, [10.2] * 4], [[10.1] * 20], "1.01 same (0.990 – 1.03)"),
    ([[10.0] * 20], [[10.1] * 20, [10.302] * 4], "1.01 same (0.990 – 1.03)"),
    ([[10.0] * 20], [[10.1] * 20], "1.01 slower (1.01 – 1.01)"),
    ([[10.0] * 20, [10.0] * 4], [[9.9] * 20], "0.990 faster (0.990 – 0.990)"),
    ([[10.0] * 4], [[5.0] * 4], "0.500 faster (0.500 – 0.500)"),  # the fewest that can tell
    ([[1.0] * 3], [[5.0] * 3], "5.00 unknown: fewer than 4 times"),
])  # fmt: skip
def test_runs_of_one_side_that_differ_widen_the_bounds(compare, before, after, cells):
    sides = [[(times, dict(final_loss=9.5 + number)) for number, times in enumerate(runs)] for runs in (before, after)]
    code, found, out = compare(*sides)
    assert code == 0 and " ".join(found["step, ms"]).endswith(cells) and found["final loss"][-1] == "same"
    assert f"runs: {len(before)} / {len(after)}\n" in out
    assert ("9.50000 – 10.5000" in out) == (len(before + after) > 2) == ("One run a side" not in out)


@pytest.mark.parametrize("before, after, word", [
    ((2.0, 2.4), (2.1, 2.5), "same"), ((2.1, 2.5), (2.0, 2.4), "same"),  # the ranges overlap
    ((2.1, 2.5), (1.9, 2.0), "lower"), ((1.9, 2.0), (2.1, 2.5), "higher"),
])  # fmt: skip
def test_a_figure_differs_if_no_run_has_one_of_the_other_side(compare, before, after, word):
    _, found, _ = compare(*([(STEPS, dict(final_loss=loss)) for loss in side] for side in (before, after)))
    assert found["final loss"][-1] == word


@pytest.mark.parametrize("changes, words", [
    (dict(config={"seed": 2}), "differ in seed \\(1 / 2\\): give --anyway"),
    (dict(environment={"device": "Other GPU"}), "device \\(Some GPU / Other GPU\\)"),
    (dict(diverged={"step": 1}), "0.json: the run diverged"),
    (dict(kernels="not counted", config={"output_dir": "x", "check": True}), None),
])  # fmt: skip
def test_what_was_made_in_another_way_is_refused(compare, changes, words):
    sides = [(STEPS, {})], [(STEPS, changes)]
    code, _, out = compare(*sides)
    assert code == (2 if words else 0) and (words is None or re.search(words, out) and out.count("\n") == 1)
    if words and "diverged" not in words:
        code, _, out = compare(*sides, "--anyway")
        assert code == 0 and " / " in out


def test_times_of_the_interpreter_are_not_compared(compare):
    side = [(STEPS, dict(environment={"arch": "cpu"}))]
    code, found, _ = compare(side, side)
    assert code == 0 and "step, ms" not in found and "first loss" in found


def test_real_results(tmp_path, capsys):
    assert llama.main("--hidden-dim 16 --num-layers 1 --num-heads 2 --seq-len 8 --num-steps 4 --impl torch "
                      f"--device cpu --output-dir {tmp_path}".split()) == 0  # fmt: skip
    (run,) = tmp_path.glob("*.json")
    row = {"error": None, "windows_ms": [1.0] * 4, "peak_memory_mib": 9.0}
    size = {"config": {}, "rows": {"sdpa": row, "hf": {"error": "not there"}}}
    steps, gpt = tmp_path / "steps.json", tmp_path / "gpt.json"
    gpt.write_text('{"benchmark": "gpt"}')
    steps.write_text(json.dumps({"benchmark": "steps", "environment": ENVIRONMENT, "sizes": {"small": size}}))
    for path, figures in ((run, ["first loss", "step, ms"]), (steps, ["small: sdpa, MiB", "small: sdpa, ms"])):
        assert diff.main([str(path), str(path)]) == 0
        out = capsys.readouterr().out
        assert all(f"\n{figure} " in out for figure in figures) and "hf" not in out
    assert diff.main([str(steps), str(run), "--anyway"]) == 0
    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    for path in (gpt, tmp_path / "none.json", tmp_path / "empty"):
        assert diff.main([str(path), str(run)]) == 2 and str(path) in capsys.readouterr().err
