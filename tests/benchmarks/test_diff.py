"""The comparison of results: what differs beyond the noise is told, and what cannot be compared is refused."""

import json
import re

import pytest

import tiny_llama_v3 as llama
from benchmarks import diff

ENVIRONMENT = {"device": "Some GPU", "arch": "sm_90", "torch": "2.11.0", "commit": "a"}


def write(path, ms, phase=0.5, config=None, environment=None, **summary):
    """A result of tiny_llama_v3.py whose steps take these times."""
    shares = {"forward": phase, "backward": 1 - phase}
    times = [
        {"batch_ms": t, "host_ms": 1.0, "phase_ms": {name: t * share for name, share in shares.items()}} for t in ms
    ]
    figures = dict(diverged=None, phase_ms=shares, first_loss=6.9, final_loss=2.0, peak_memory_mib=100.0)
    figures |= dict(kernels={"kernels": 9, "launches": 3}, parameters_with_gradient=500) | summary
    result = dict(implementation="triton", precision="fp32", operations={}, config={"seed": 1, "output_dir": str(path)})
    result |= dict(environment=ENVIRONMENT | (environment or {}), summary=figures, steps=times)
    result["config"] |= config or {}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result))
    return path


def rows(out):
    """{figure: the words of its row}"""
    return {line.split("  ")[0].strip(): line.split() for line in out.splitlines()}


STEPS = [10.0, 10.1, 10.2, 10.3, 10.4, 10.5]


def test_changes_beyond_the_noise_are_told(tmp_path, capsys):
    before = write(tmp_path / "a.json", STEPS)
    changes = dict(final_loss=2.5, first_loss=6.9 + 1e-9, environment={"commit": "b"})  # the last digits may differ
    after = write(tmp_path / "b.json", [0.9 * t for t in STEPS], 0.45, **changes)
    assert diff.main([str(before), str(after)]) == 0
    out = capsys.readouterr().out
    found = rows(out)
    assert found["step, ms"][2:] == "10.2 (10.1 – 10.4) 9.23 (9.09 – 9.36) 0.900 faster (0.857 – 0.945)".split()
    assert [found[f"{phase}, ms"][-4] for phase in ("forward", "backward", "host")] == ["faster", "same", "same"]
    assert found["final loss"][2:] == ["2.00000", "2.50000", "1.25", "higher"]
    assert [found[name][-1] for name in ("first loss", "peak memory MiB", "kernels", "launches")] == ["same"] * 4
    assert "commit: a / b\n" in out and "One run a side" in out and "held-out" not in out


@pytest.mark.parametrize("before, after, cells", [
    # The median of 24 times is 10, as that of 20; the other run of a side takes 1.02 times as long. 10.1 / 10 / 1.02
    # and 10.1 / 10 * 1.02 are the bounds, whichever side differs, and without the other run the ratio alone.
    ([[10.0] * 20, [10.2] * 4], [[10.1] * 20], "1.01 same (0.990 – 1.03)"),
    ([[10.0] * 20], [[10.1] * 20, [10.302] * 4], "1.01 same (0.990 – 1.03)"),
    ([[10.0] * 20], [[10.1] * 20], "1.01 slower (1.01 – 1.01)"),
    ([[10.0] * 20, [10.0] * 4], [[9.9] * 20], "0.990 faster (0.990 – 0.990)"),
    ([[10.0] * 4], [[5.0] * 4], "0.500 faster (0.500 – 0.500)"),  # the fewest that can tell
])  # fmt: skip
def test_runs_of_one_side_that_differ_widen_the_bounds(tmp_path, capsys, before, after, cells):
    for side, runs in (("before", before), ("after", after)):
        for number, times in enumerate(runs):
            write(tmp_path / side / f"{number}.json", times, final_loss=9.5 + number)
    assert diff.main([str(tmp_path / "before"), str(tmp_path / "after")]) == 0
    out = capsys.readouterr().out
    assert " ".join(rows(out)["step, ms"]).endswith(cells) and rows(out)["final loss"][-1] == "same"
    assert f"runs: {len(before)} / {len(after)}\n" in out
    assert ("9.50000 – 10.5000" in out) == (len(before + after) > 2)
    assert ("One run a side" in out) == (len(before + after) == 2)


def test_three_times_are_too_few(tmp_path, capsys):
    before, after = write(tmp_path / "a.json", [1.0] * 3), write(tmp_path / "b.json", [5.0] * 3)
    assert diff.main([str(before), str(after)]) == 0
    assert "5.00 unknown: fewer than 4 times" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("changes, words", [
    (dict(config={"seed": 2}), "differ in seed \\(1 / 2\\): give --anyway"),
    (dict(environment={"device": "Other GPU"}), "device \\(Some GPU / Other GPU\\)"),
    (dict(diverged={"step": 1}), "b.json: the run diverged"),
    (dict(kernels="not counted", config={"output_dir": "x", "check": True}), None),
])  # fmt: skip
def test_what_was_made_in_another_way_is_refused(tmp_path, capsys, changes, words):
    before, after = write(tmp_path / "a.json", STEPS), write(tmp_path / "b.json", STEPS, **changes)
    code = diff.main([str(before), str(after)])
    out, error = capsys.readouterr()
    assert code == (2 if words else 0) and (words is None or re.search(words, error)) and error.count("\n") == code // 2
    if words and "diverged" not in words:
        assert diff.main([str(before), str(after), "--anyway"]) == 0 and " / " in capsys.readouterr().out


def test_times_of_the_interpreter_are_not_compared(tmp_path, capsys):
    path = write(tmp_path / "a.json", STEPS, environment={"arch": "cpu"})
    assert diff.main([str(path), str(path)]) == 0 and "step, ms" not in capsys.readouterr().out


def test_real_results(tmp_path, capsys, monkeypatch):
    assert llama.main("--hidden-dim 16 --num-layers 1 --num-heads 2 --seq-len 8 --num-steps 4 --impl torch "
                      f"--device cpu --output-dir {tmp_path}".split()) == 0  # fmt: skip
    (run,) = tmp_path.glob("*.json")
    capsys.readouterr()
    assert diff.main([str(run), str(run)]) == 0
    assert {row[-1] for name, row in rows(capsys.readouterr().out).items() if "loss" in name} == {"same"}
    row = {"error": None, "windows_ms": [1.0] * 4, "peak_memory_mib": 9.0}
    size = {"config": {}, "rows": {"sdpa": row, "hf": {"error": "not there"}}}
    steps, gpt = tmp_path / "steps.json", tmp_path / "gpt.json"
    gpt.write_text('{"benchmark": "gpt"}')
    steps.write_text(json.dumps({"benchmark": "steps", "environment": ENVIRONMENT, "sizes": {"small": size}}))
    assert diff.main([str(steps), str(steps)]) == 0
    found = rows(capsys.readouterr().out)
    assert found["small: sdpa, MiB"][-1] == "same" and "small: sdpa, ms" in found and "hf" not in str(found)
    assert diff.main([str(steps), str(run), "--anyway"]) == 0
    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    for path in (gpt, tmp_path / "none.json", tmp_path / "empty"):
        assert diff.main([str(path), str(run)]) == 2 and str(path) in capsys.readouterr().err
