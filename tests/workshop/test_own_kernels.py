"""--time and --show: counts are exact, a wrong kernel gets no time, and what a kernel touches is told and drawn."""

import re
from xml.etree import ElementTree

import pytest
import torch

import tiny_llama_v3 as llama
from exercises import check, own_kernels, touched
from exercises.checks import ON_GPU
from measure.results import Unavailable

pytestmark = [
    pytest.mark.skipif(llama.triton is None, reason="Triton is not installed"),
    pytest.mark.skipif(ON_GPU, reason="counts are those of the interpreter"),
]
SOLUTIONS = {
    task: check.load(check.HERE / exercise.solution)
    for exercise in check.EXERCISES.values()
    for task in exercise.checks.TASKS
}


def rows_of(case, module):
    calls = {name: lambda yours=yours: yours(module) for name, yours in case.yours.items()}
    return {row.name: row for row in own_kernels.counted(case, calls | case.others)}


@pytest.mark.parametrize("task", own_kernels.CASES)
def test_every_case_counts_at_least_what_must_move_and_has_a_picture(task):
    lines, picture, us = own_kernels.report(task, SOLUTIONS[task], SOLUTIONS[task])
    found = [re.match(r"(\w.*?) {2,}([\d,]+) +(\d+\.\d\d)", line).groups() for line in lines[2:]]
    assert {"PyTorch eager", "ours", "bound"} <= {name for name, *_ in found} and us is None
    assert all(float(factor) >= 0.99 for *_, factor in found) and found[-1][2] == "1.00"
    root = ElementTree.fromstring(picture)
    assert len(re.findall(r"fill: var\(--tint", picture)) == len(found) - 1  # a bar for each but the bound
    rights = [float(right) for path in root.findall(".//{*}path") for right in path.get("d").split()[1::3]]
    assert 0 < max(rights) <= int(root.get("width"))


def test_the_counts_are_exact():
    rows = rows_of(own_kernels.CASES["rmsnorm_kernel"](), SOLUTIONS["rmsnorm_kernel"])
    row = 4 * 200  # bytes; x twice, y and the weight
    assert rows["yours, 64"].value == 8 * 4 * row and rows["bound"].value == 8 * 2 * row + row
    rows = rows_of(own_kernels.CASES["multiply_tile"](), SOLUTIONS["multiply_tile"])
    assert rows["yours, 32 x 32"].value == 4 * 64**2 * (2 + 2 + 1)  # each operand for two tiles, z once
    assert {row.others[1] for row in rows.values()} == {f"{64**3:,}"}
    x, weight = torch.randn(8, 200), torch.ones(200)
    with own_kernels.CountBytes() as eager:
        llama.torch_rmsnorm(x, None, weight, 1e-5)
    assert eager.bytes == 7 * 8 * row + row + 4 * 8 * (1 + 2 + 2 + 1)  # what a row or a column takes as well


def test_a_wrong_kernel_gets_no_time_and_a_task_without_a_kernel_is_refused(tmp_path, capsys, monkeypatch):
    code = (check.HERE / check.EXERCISES["exercise1"].solution).read_text()
    (tmp_path / "mine.py").write_text(code.replace("x * rstd * weight", "x * rstd"))
    options = ["--file", str(tmp_path / "mine.py"), "--progress", str(tmp_path / "p.json"), "--time"]
    options += ["--output-dir", str(tmp_path)]
    assert check.main(["exercise1", *options]) == 1
    assert "the weight is missing\n      no time: a wrong kernel is not timed\n" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.svg"))
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "rmsnorm_kernel_time.svg").symlink_to(tmp_path / "mine.py")
    assert check.main(["exercise1", *options]) == 0
    assert "yours, 64" in capsys.readouterr().out and "<svg" in (tmp_path / "rmsnorm_kernel_time.svg").read_text()
    assert (tmp_path / "mine.py").read_text() == code  # nothing was written through the link
    for arguments, told in ((["exercise1", "--task", "mem", "--time"], "cannot be used for mem: it is for rmsnorm"),
                            (["exercise1", "--show", "--debug"], "--show and --debug exclude"),
                            (["--time"], "--time needs an exercise")):  # fmt: skip
        assert check.main(arguments) == 2 and told in capsys.readouterr().err


class FakeBench:
    """A GPU whose clock shows 2 ms for plain PyTorch, 1 ms for ours, and 0.5 ms for anything else."""

    def __init__(self, device):
        self.device = device

    def flushed_ms(self, call):
        call()
        return getattr(call, "ms", 0.5)


def test_times_stand_beside_the_bound_and_what_cannot_run_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(own_kernels, "Bench", FakeBench)
    reached = {"bytes_per_second": 1e9, "flop_per_second": 1e15}
    monkeypatch.setattr(own_kernels.measured, "ceilings", lambda config, device: reached)
    case, module = own_kernels.CASES["rmsnorm_kernel"](), SOLUTIONS["rmsnorm_kernel"]

    def fails():
        raise Unavailable("no compiler")

    calls = {name: lambda yours=yours: yours(module) for name, yours in case.yours.items()} | {"compiled": fails}
    rows = {row.name: row for row in own_kernels.timed(case, calls)}
    assert "compiled is left out: no compiler" in capsys.readouterr().out and "compiled" not in rows
    assert rows["yours, 64"].value == 500.0 and rows["yours, 64"].others[0] == "0.0272"  # 13,600 bytes in GB/s
    assert rows["bound: memory"].value == pytest.approx(case.work.bytes / 1e9 * 1e6)
    reached["flop_per_second"] = 1e6
    assert "bound: arithmetic" in [row.name for row in own_kernels.timed(case, {})]
    with pytest.raises(ArithmeticError, match="wrong"):
        list(own_kernels.timed(case, {"yours, 64": lambda: [torch.zeros(8, 200)]}))


def test_a_time_is_remembered_for_the_scoreboard(tmp_path, monkeypatch):
    verdict = check.Verdict(True, report=(["a table"], None, 12.5))
    monkeypatch.setattr(check, "judge_everywhere", lambda *arguments: verdict)
    options = ["exercise1", "--time", "--progress", str(tmp_path / "p.json"), "--output-dir", str(tmp_path)]
    assert check.main(options) == 0
    state = check.Progress(tmp_path / "p.json").state("exercise1", "rmsnorm_kernel")
    assert state["us"] == 12.5 and state["device"]
    monkeypatch.setattr(check, "judge_everywhere", lambda *arguments: check.Verdict(True))
    assert check.main([*options, "--task", "rms"]) == 0
    assert check.Progress(tmp_path / "p.json").state("exercise1", "rmsnorm_kernel")["us"] == 12.5


@pytest.mark.parametrize("extra, reported, limit", [("time", "spawn time", 5), ("show", "forkserver show", 1)])
def test_on_a_gpu_the_compiled_kernel_is_timed_and_the_interpreted_one_drawn(extra, reported, limit, monkeypatch):
    def judge_apart(context, path, exercise, task, seconds, extra):
        limits.append(seconds)
        return check.Verdict(True, report=([f"{context.get_start_method()} {extra}"], None, None))

    limits = []
    monkeypatch.setattr(check, "judge_apart", judge_apart)
    monkeypatch.setattr(check.multiprocessing.forkserver, "ensure_running", lambda: None)
    monkeypatch.setattr(check, "ON_GPU", True)
    verdict = check.judge_everywhere(check.HERE, "exercise1", "rmsnorm_kernel", 1, extra)
    assert verdict.report[0] == [reported] and limits == [1, limit]


def show(task, edits=(), tmp_path=None):
    name, exercise = next((name, e) for name, e in check.EXERCISES.items() if task in e.checks.TASKS)
    code = (check.HERE / exercise.solution).read_text()
    for old, new in edits:
        assert old in code
        code = code.replace(old, new)
    path = tmp_path / exercise.file
    path.write_text(code)
    return check.report(path, name, task, "show")


def test_what_each_program_touches_is_told_and_drawn(tmp_path):
    lines, picture, _ = show("grid_copy_kernel", tmp_path=tmp_path)
    assert lines[0].endswith("reads x, 10:") and lines[4].endswith("writes y, 10:")
    assert lines[2:4] == ["  program 1: offsets 4-7 by lanes 0-3", "  program 2: offsets 8-9 by lanes 0-1; 2 masked"]
    colors = re.findall(r'style="fill: (?:var\(--tint-(\w+)|none; stroke-dash)', picture)
    assert colors == 2 * (4 * ["blue"] + 4 * ["orange"] + 2 * ["green"] + 2 * [""])
    lines, picture, _ = show("transpose_kernel", tmp_path=tmp_path)
    assert "  program 0, 1: offsets 4, 11 by lanes 0, 4; 6 masked" in lines  # of rows that are 7 apart
    assert re.search(r'var\(--muted\)"[^>]*>12</text>', picture)  # between two rows
    lines, picture, _ = show("rmsnorm_kernel", tmp_path=tmp_path)
    assert lines[0].endswith("reads x, 3 x 10:") and len([line for line in lines if "writes y" in line]) == 1


def test_a_wrong_kernel_is_drawn_as_well_and_an_empty_one_said_to_be_empty(tmp_path):
    edits = [("x_ptr + offsets, mask=mask", "x_ptr + offsets + 1, mask=mask")]
    lines, picture, _ = show("masked_copy_kernel", edits, tmp_path)
    assert "  program 0: offsets 1-5 by lanes 0-4; 3 masked; 1 OUTSIDE of x" in lines
    assert "and OUTSIDE of it" in picture
    assert show("memory_lines", tmp_path=tmp_path) == (["it loads and stores nothing"], None, None)
    assert touched.ranges([3, 1, 2, 7, 7, 9]) == "1-3, 7, 9"
    assert touched.ranges(range(0, 20, 2)) == "0, 2, 4, 6, 8, 10, ..."
