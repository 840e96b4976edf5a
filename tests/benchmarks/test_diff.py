"""The comparison of results: what differs beyond the noise is told, and what cannot be compared is refused."""

import json
import os
import re

import pytest

import tiny_llama_v3 as llama
from benchmarks import diff

ENVIRONMENT = {"device": "Some GPU", "arch": "sm_90", "torch": "2.11.0", "commit": "a"}
STEPS = [10.0, 10.1, 10.2, 10.3, 10.4, 10.5]


def run_of(ms=STEPS, forward=0.5, config=(), environment=(), **summary):
    """Return a result of tiny_llama_v3.py whose steps take these times."""
    shares = {"forward": forward, "backward": 1 - forward}
    figures = dict(diverged=None, phase_ms=shares, first_loss=6.9, final_loss=2.0, peak_memory_mib=100.0)
    return {
        "implementation": "triton",
        "precision": "fp32",
        "operations": {},
        "config": {"seed": 1} | dict(config),
        "environment": ENVIRONMENT | dict(environment),
        "summary": figures | dict(kernels={"kernels": 9, "launches": 3}) | summary,
        "steps": [
            {"batch_ms": t, "host_ms": 1.0, "phase_ms": {name: t * share for name, share in shares.items()}} for t in ms
        ],
    }


@pytest.fixture
def compare(tmp_path, capsys):
    """compare(results before, after, *flags): (exit code, {figure: its words}, output)."""

    def compared(*sides):
        *sides, flags = (*sides, []) if len(sides) == 2 else sides
        for side, runs in zip(("before", "after"), sides, strict=True):
            (tmp_path / side).mkdir(exist_ok=True)
            for number, run in enumerate(runs):
                (tmp_path / side / f"{number}.json").write_text(json.dumps(run))
        code = diff.main([str(tmp_path / "before"), str(tmp_path / "after"), *flags])
        out, error = capsys.readouterr()
        return code, {line.split("  ")[0].strip(): line.split() for line in out.splitlines()}, out + error

    return compared


def test_changes_beyond_the_noise_are_told(compare):
    after = run_of([0.9 * t for t in STEPS], 0.45, environment={"commit": "b"}, final_loss=2.5, first_loss=6.9 + 1e-9)
    code, found, out = compare([run_of()], [after])
    assert code == 0 and "commit: a / b\n" in out and "One run a side" in out and "held-out" not in out
    assert found["step, ms"][2:] == "10.2 (10.1 – 10.4) 9.23 (9.09 – 9.36) 0.900 faster (0.857 – 0.945)".split()
    assert [found[f"{phase}, ms"][-4] for phase in ("forward", "backward", "host")] == ["faster", "same", "same"]
    assert found["final loss"][2:] == ["2.00000", "2.50000", "1.25", "higher"]
    # Of the first loss the last digits may differ.
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
    code, found, out = compare(*([run_of(times) for times in runs] for runs in (before, after)))
    assert code == 0 and " ".join(found["step, ms"]).endswith(cells)
    assert f"runs: {len(before)} / {len(after)}\n" in out and ("One run a side" in out) == (len(before + after) == 2)


@pytest.mark.parametrize("before, after, cells", [
    ((2.0, 2.4), (2.1, 2.5), "2.00000 – 2.40000 2.10000 – 2.50000 1.05 same"),  # the ranges overlap
    ((2.1, 2.5), (2.0, 2.4), "same"), ((2.1, 2.5), (1.9, 2.0), "lower"), ((1.9, 2.0), (2.1, 2.5), "higher"),
])  # fmt: skip
def test_a_figure_differs_if_no_run_has_one_of_the_other_side(compare, before, after, cells):
    _, found, _ = compare(*([run_of(final_loss=loss) for loss in side] for side in (before, after)))
    assert " ".join(found["final loss"]).endswith(cells)


@pytest.mark.parametrize("changes, words", [
    (dict(config={"seed": 2}), "differ in seed \\(1 / 2\\): give --anyway"),
    (dict(environment={"device": "Other GPU"}), "device \\(Some GPU / Other GPU\\)"),
    (dict(diverged={"step": 1}), "0.json: the run diverged"),
])  # fmt: skip
def test_what_was_made_in_another_way_is_refused(compare, changes, words):
    sides = [run_of()], [run_of(**changes)]
    code, _, out = compare(*sides)
    assert code == 2 and re.search(words, out) and out.count("\n") == 1
    if "diverged" not in words:
        code, _, out = compare(*sides, ["--anyway"])
        assert code == 0 and " / " in out


@pytest.mark.parametrize("summary, told", [
    (dict(final_loss=[2.0]), "final loss: [2.0]"), (dict(peak_memory_mib="many"), "peak memory MiB: many"),
    (dict(kernels={"launches": -1}), "launches: -1"), (dict(phase_ms={"rest": 1.0}), "phase_ms.rest"),
])  # fmt: skip
def test_what_is_no_figure_is_named_with_its_file(compare, summary, told):
    code, _, out = compare([run_of()], [run_of(**summary)])
    assert code == 2 and out.count("\n") == 1 and "/after/0.json" in out and told in out


ROW = {"error": None, "windows_ms": [1.0] * 4, "peak_memory_mib": 9.0}
FAILED = {"error": "RuntimeError: illegal\n memory access", "windows_ms": [], "ms": None, "peak_memory_mib": None}


def steps_of(small, **sizes):
    """Return a result of benchmarks.steps with these rows of each size."""
    sizes = {name: {"config": {"seq_len": 128}, "rows": rows} for name, rows in {"small": small, **sizes}.items()}
    return {"benchmark": "steps", "environment": ENVIRONMENT, "sizes": sizes}


@pytest.mark.parametrize("before, after, told, code", [
    ([{"k": ROW}], [{"k": FAILED}], "before measured, after RuntimeError: illegal memory access", 1),
    ([{"k": ROW}], [{}], "before measured, after not measured", 1),
    ([{"k": ROW | {"windows_ms": []}}], [{"k": ROW}], "before no windows, after measured", 1),
    ([{"k": FAILED}], [{}], "before RuntimeError: illegal memory access, after not measured", 0),
    ([{"k": FAILED}], [{"k": {"error": "not there"}}],
     "before RuntimeError: illegal memory access, after not there", 0),
    ([{"k": FAILED}], [{"k": FAILED}], "RuntimeError: illegal memory access", 0),
    # Of several runs a side each has to have it.
    ([{"k": ROW}] * 2, [{"k": ROW}, {"k": FAILED}],
     "before measured, after measured / RuntimeError: illegal memory access", 1),
    # Memory is not known on a CPU: what is missing is no time.
    ([{"k": ROW}], [{"k": ROW | {"peak_memory_mib": None}}], "before measured, after not measured", 0),
    ([{"k": ROW | {"peak_memory_mib": None}}], [{"k": ROW | {"peak_memory_mib": None}}], None, 0),
])  # fmt: skip
@pytest.mark.parametrize("turned", [False, True])
def test_a_row_that_a_side_lacks_is_named(compare, before, after, told, code, turned):
    sides = [[steps_of(rows | {"ours": ROW}) for rows in side] for side in (before, after)]
    if turned:
        sides = sides[::-1]
        told = told and re.sub("before (.*), after (.*)", r"before \2, after \1", told)
    found, _, out = compare(*sides)
    assert found == code and "\nsmall: ours, ms " in out
    assert [line for line in out.splitlines() if "Not compared" in line] == (
        [f"Not compared: small: k: {told}"] if told else []
    )


def test_a_size_that_a_side_lacks_is_named_in_one_line(compare):
    both = {"a": ROW, "b": ROW}
    code, _, out = compare([steps_of(both, large=both)], [steps_of(both, medium=both)])
    assert code == 1 and "Not compared: large: a, large: b: before measured, after not measured\n" in out
    assert "Not compared: medium: a, medium: b: before not measured, after measured\n" in out


@pytest.mark.parametrize(
    "before, after", [({"a": ROW}, {"b": ROW}), ({}, {}), ({"a": FAILED}, {"a": ROW}), ({}, {"a": ROW})]
)
def test_results_without_a_common_figure_are_refused(compare, before, after):
    code, found, out = compare([steps_of(before)], [steps_of(after)])
    assert code == 2 and "diff: error: the results have no figure in common: " in out and "figure" not in found


@pytest.mark.parametrize("changes, code, told", [
    (dict(world={"size": 2}), 0, "\nprocesses: 1 / 2\n"), (dict(world={"size": 1}), 0, "\n\nfigure "),
    (dict(held_out_loss=1.5), 0, "Not compared: held out loss: before not measured, after measured"),
    (dict(kernels="there is no GPU"), 0, "Not compared: kernels, launches: before measured, after there is no GPU"),
    (dict(config={"num_steps": 9}), 2, "differ in num_steps (interrupted after 6 of 8 / interrupted after 6 of 9)"),
    (dict(config={"num_steps": 6}), 2, "differ in num_steps (interrupted after 6 of 8 / 6)"),
])  # fmt: skip
def test_what_a_run_lacks_or_did_otherwise_is_named(compare, changes, code, told):
    """Six of eight steps were done, and measured in the first run."""
    found, _, out = compare([run_of(config={"num_steps": 8})], [run_of(**{"config": {"num_steps": 8}} | changes)])
    assert found == code and told in out


def test_a_phase_that_one_side_did_not_time_is_named(compare):
    """With --timing step, and with --anyway, as the flags differ."""
    after = run_of()
    after["summary"]["phase_ms"] = {}
    code, _, out = compare([run_of()], [after])
    assert code == 1 and "Not compared: forward, backward: before measured, after not measured\n" in out


def test_without_an_environment_the_device_is_not_known(compare):
    """The script ran without its companions."""
    bare = run_of() | {"environment": None}
    code, _, out = compare([run_of()], [bare])
    assert code == 0 and "device: not known of 1 of the results\n" in out
    code, found, out = compare([bare], [run_of(config={"device": "cpu"}) | {"environment": None}], ["--anyway"])
    assert code == 1 and "after times of Triton's interpreter" in out and "step, ms" not in found


def test_what_has_no_effect_or_was_not_counted_is_not_compared(compare):
    other = run_of(kernels="not counted", config={"output_dir": "x", "check": True}, environment={"arch": "cpu"})
    code, found, _ = compare([run_of(environment={"arch": "cpu"})], [other])
    # Nor are the times of the interpreter.
    assert code == 0 and not {"kernels", "step, ms"} & found.keys() and "first loss" in found
    assert "Not compared: step, host, forward, backward: times of Triton's interpreter" in found
    assert "Not compared: kernels, launches: before measured, after not counted" in found


def test_real_results(tmp_path, capsys):
    sizes = "--hidden-dim 16 --num-layers 1 --num-heads 2 --seq-len 8 --num-steps 4 --impl torch --device cpu"
    assert llama.main([*sizes.split(), "--output-dir", str(tmp_path)]) == 0
    (run,) = tmp_path.glob("*.json")
    row = {"error": None, "windows_ms": [1.0] * 4, "peak_memory_mib": 9.0}
    size = {"config": {}, "rows": {"sdpa": row, "hf": {"error": "not there"}}}
    steps, gpt, empty = tmp_path / "steps.json", tmp_path / "gpt.json", tmp_path / "empty"
    empty.mkdir()
    gpt.write_text('{"benchmark": "gpt"}')
    steps.write_text(json.dumps({"benchmark": "steps", "environment": ENVIRONMENT, "sizes": {"small": size}}))
    for path, figures in ((run, ["first loss", "step, ms"]), (steps, ["small: sdpa, MiB", "small: sdpa, ms"])):
        assert diff.main([str(path), str(path)]) == 0
        out = capsys.readouterr().out
        assert all(f"\n{figure} " in out for figure in figures)
        assert out.count("Not compared: ") == 1 and (path == run or "\nNot compared: small: hf: not there\n" in out)
    os.mkfifo(tmp_path / "pipe.json")
    for path in (gpt, tmp_path / "none.json", empty, tmp_path / "pipe.json"):
        assert diff.main([str(path), str(run)]) == 2 and str(path) in capsys.readouterr().err
