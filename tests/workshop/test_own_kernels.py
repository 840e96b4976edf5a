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
SOLUTION = check.SOLUTIONS / "exercise1_triton_basics.py"
SOLUTIONS = {
    task: check.load(check.SOLUTIONS / exercise.file)
    for exercise in check.EXERCISES.values()
    for task in exercise.checks.TASKS
}


def counts_of(task):
    """The lines of the report as {name: its figures}."""
    lines, picture, us = own_kernels.report(task, SOLUTIONS[task], SOLUTIONS[task])
    found = [re.split(r" {2,}", line) for line in lines[2:]]
    assert us is None and "counted in Triton's interpreter" in lines[0]
    return {name: [float(figure.replace(",", "")) for figure in figures] for name, *figures in found}, picture


def launches_of(task):
    case = own_kernels.CASES[task]
    launches = [own_kernels.Launch(case.task, SOLUTIONS[task], size) for size in case.sizes()]
    return case, {f"yours, {launch.tile}": launch for launch in launches}


class FakeBench:
    """A GPU whose clock shows 0.5 ms for whatever it runs."""

    def __init__(self, device):
        self.device = device

    def flushed_ms(self, call):
        call()
        return 0.5


@pytest.fixture
def timing(monkeypatch):
    """A GPU without a clock, and what it reaches."""
    reached = {"bytes_per_second": 1e9, "flop_per_second": 1e15}
    monkeypatch.setattr(own_kernels, "Bench", FakeBench)
    monkeypatch.setattr(own_kernels, "TURNS", 1)
    monkeypatch.setattr(own_kernels.measured, "ceilings", lambda config, device: reached)
    return reached


@pytest.mark.parametrize("task", own_kernels.CASES)
def test_every_case_counts_at_least_what_must_move_and_has_a_picture(task):
    counts, picture = counts_of(task)
    assert {"PyTorch eager", "ours", "bound"} <= counts.keys() and list(counts)[-1] == "bound"
    assert all(factor >= 0.99 for _, factor, *_ in counts.values()) and counts["bound"][1] == 1
    root = ElementTree.fromstring(picture)
    assert len(re.findall(r"fill: var\(--tint", picture)) == len(counts) - 1  # a bar for each but the bound
    rights = [float(right) for path in root.findall(".//{*}path") for right in path.get("d").split()[1::3]]
    assert 0 < max(rights) <= int(root.get("width"))


@pytest.mark.parametrize("task", own_kernels.CASES)
def test_every_tile_is_compared_on_the_same_inputs(task, timing):
    case, launches = launches_of(task)
    calls = {name: launch.call for name, launch in launches.items()}
    assert len(list(own_kernels.timed(case, launches, calls, own_kernels.Work(1, 1)))) == len(launches) + 1


def test_the_counts_are_exact():
    row = 4 * 200  # bytes; x twice, y and the weight
    counts, _ = counts_of("rmsnorm_kernel")
    assert counts["yours, 64"][0] == 8 * 4 * row and counts["bound"][0] == 8 * 2 * row + row
    counts, _ = counts_of("multiply_tile")
    # each operand for two tiles, z once; in lines of 128 bytes, of which half a row of 64 elements has one
    assert counts["yours, 32 x 32"] == [4 * 64**2 * 5, 1.67, 4 * 64**2 * 5 / 128, 64**3]
    assert counts["bound"] == [4 * 64**2 * 3, 1, 4 * 64**2 * 3 / 128, 64**3]
    counts, _ = counts_of("attention_kernel")
    pairs = 2 * 48 * 48 / 2  # of two heads, half of all; two products of 64
    assert counts["bound"][3] == pairs * 2 * 64 and counts["bound"][0] == 4 * 48 * 64 * (2 + 1 + 1 + 2)
    x, weight = torch.randn(8, 200), torch.ones(200)
    with own_kernels.CountBytes() as eager:
        llama.torch_rmsnorm(x, None, weight, 1e-5)
    assert eager.bytes == 7 * 8 * row + row + 4 * 8 * (1 + 2 + 2 + 1)  # what a row or a column takes as well


def test_a_wrong_kernel_gets_no_time_and_a_right_one_a_picture(tmp_path, capsys):
    code, mine, picture = SOLUTION.read_text(), tmp_path / "mine.py", tmp_path / "rmsnorm_kernel_time.svg"
    options = ["exercise1", "--file", str(mine), "--progress", str(tmp_path / "p.json"), "--time"]
    options += ["--output-dir", str(tmp_path)]
    mine.write_text(code.replace("x * rstd * weight", "x * rstd"))
    assert check.main(options) == 1 and not picture.exists()
    assert "the weight is missing\n      no time: a wrong kernel is not timed\n" in capsys.readouterr().out
    mine.write_text(code)
    picture.symlink_to(mine)  # through which nothing is written
    assert check.main(options) == 0 and "<svg" in picture.read_text() and mine.read_text() == code
    assert "yours, 64" in capsys.readouterr().out


def test_times_stand_beside_the_bound_and_what_cannot_run_is_left_out(timing, capsys):
    case, launches = launches_of("rmsnorm_kernel")
    launch, cost = launches["yours, 64"], own_kernels.Work(13_600, 6_400_000)

    def fails():
        raise Unavailable("no compiler")

    calls = {"yours, 64": launch.call, "compiled": fails}
    rows = {row.name: row for row in own_kernels.timed(case, launches, calls, cost)}
    assert "compiled is left out: no compiler" in capsys.readouterr().out and "compiled" not in rows
    assert rows["yours, 64"][1:] == (500.0, ("0.0272", "0.0128"))  # us, 13,600 bytes in GB/s, TFLOP/s
    assert rows["bound: memory"].value == pytest.approx(13.6)
    timing["flop_per_second"] = 1e6
    bound = list(own_kernels.timed(case, launches, {}, cost))[-1]
    assert bound.name == "bound: arithmetic" and bound.value == pytest.approx(6.4e6)
    with pytest.raises(ArithmeticError, match="wrong"):
        list(own_kernels.timed(case, launches, {"yours, 64": launch.results[0].zero_}, cost))


def test_a_time_is_remembered_for_the_scoreboard(tmp_path, monkeypatch):
    options = ["exercise1", "--time", "--progress", str(tmp_path / "p.json"), "--output-dir", str(tmp_path)]
    for us in (12.5, None):  # later another check without a time
        verdict = check.Verdict(True, report=(["a table"], None, us))
        monkeypatch.setattr(check, "judge_everywhere", lambda *arguments, verdict=verdict: verdict)
        assert check.main(options) == 0
        state = check.Progress(tmp_path / "p.json").state("exercise1", "rmsnorm_kernel")
        assert state["us"] == 12.5 and state["device"]


def show(task, tmp_path, old="", new=""):
    exercise = next(each for each in check.EXERCISES.values() if task in each.checks.TASKS)
    path = tmp_path / exercise.file
    path.write_text((check.SOLUTIONS / exercise.file).read_text().replace(old, new))
    return check.report(path, exercise, task, "show")


def test_what_each_program_touches_is_told_and_drawn(tmp_path):
    lines, picture, _ = show("grid_copy_kernel", tmp_path)
    assert lines[0].endswith("reads x, 10:") and lines[4].endswith("writes y, 10:")
    assert lines[2:4] == ["  program 1: offsets 4-7 by lanes 0-3", "  program 2: offsets 8-9 by lanes 0-1; 2 masked"]
    colors = re.findall(r'style="fill: (?:var\(--tint-(\w+)|none; stroke-dash)', picture)
    assert colors == 2 * (4 * ["blue"] + 4 * ["orange"] + 2 * ["green"] + 2 * [""])
    lines, picture, _ = show("transpose_kernel", tmp_path)
    assert "  program 0, 1: offsets 4, 11 by lanes 0, 4; 6 masked" in lines  # of rows that are 7 apart
    assert re.search(r'var\(--muted\)"[^>]*>12</text>', picture)  # between two rows
    lines, picture, _ = show("rmsnorm_kernel", tmp_path)
    assert lines[0].endswith("reads x, 3 x 10:") and len([line for line in lines if "writes y" in line]) == 1


def test_a_wrong_kernel_is_drawn_as_well_and_an_empty_one_said_to_be_empty(tmp_path):
    lines, picture, _ = show("masked_copy_kernel", tmp_path, "x_ptr + offsets, mask", "x_ptr + offsets + 1, mask")
    assert "  program 0: offsets 1-5 by lanes 0-4; 3 masked; 1 OUTSIDE of x" in lines
    assert "and OUTSIDE of it" in picture
    assert show("memory_lines", tmp_path) == (["it loads and stores nothing"], None, None)
    assert touched.ranges([3, 1, 2, 7, 7, 9]) == "1-3, 7, 9"
    assert touched.ranges(range(0, 20, 2)) == "0, 2, 4, 6, 8, 10, ..."
