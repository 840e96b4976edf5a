"""--time and --show: counts are exact, a wrong kernel gets no time, and what a kernel touches is told and drawn."""

import re

import numpy as np
import pytest
import torch

from exercises import check, own_kernels, touched
from exercises.checks import ON_GPU
from measure.drawing import Sheet
from measure.results import Unavailable

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(ON_GPU, reason="counts are those of the interpreter"),
]
EXERCISE_OF = {task: exercise for exercise in check.EXERCISES.values() for task in exercise.checks.TASKS}


def solution_of(task):
    return check.load(check.SOLUTIONS / EXERCISE_OF[task].file)


def counts_of(task):
    """The lines of the report as {name: its figures}."""
    lines = own_kernels.report(task, solution_of(task), solution_of(task))
    found = [re.split(r" {2,}", line) for line in lines[2:]]
    assert "counted in Triton's interpreter" in lines[0]
    return {name: [float(figure.replace(",", "").replace("–", "0")) for figure in figures] for name, *figures in found}


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
    reached = {"GB/s": 1.0, "TFLOP/s": 1000.0}
    monkeypatch.setattr(own_kernels, "ON_GPU", True)
    monkeypatch.setattr(own_kernels, "Bench", FakeBench)
    monkeypatch.setattr(own_kernels, "TURNS", 1)
    monkeypatch.setattr(own_kernels, "measure_ceilings", lambda bench, dtype: reached)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    return reached


@pytest.mark.parametrize("task", own_kernels.CASES)
def test_every_case_counts_at_least_what_must_move_and_every_tile_is_compared(task, timing, monkeypatch):
    lines = own_kernels.report(task, solution_of(task), solution_of(task))
    assert sum(line.startswith("yours") for line in lines) == len(own_kernels.CASES[task].sizes)
    monkeypatch.setattr(own_kernels, "ON_GPU", False)
    counts = counts_of(task)
    assert {"PyTorch eager", "solution", "bound"} <= counts.keys() and counts["bound"][1] == 1
    assert all(factor >= 0.99 for _, factor, *_ in counts.values())


def test_the_counts_are_exact():
    row = 4 * 200  # bytes; x twice, y and the weight
    counts = counts_of("rmsnorm_kernel")
    assert counts["yours, 64"][0] == 8 * 4 * row and counts["bound"][0] == 8 * 2 * row + row
    # PyTorch's four operators: 7 times x, once the weight, and what has one element a row
    assert counts["PyTorch eager"][0] == 7 * 8 * row + row + 4 * 8 * (1 + 2 + 2 + 1)
    counts = counts_of("multiply_tile")
    # each operand for two tiles, z once; in lines of 128 bytes, of which half a row of 64 elements has one
    assert counts["yours, 32 x 32"] == [4 * 64**2 * 5, 1.67, 4 * 64**2 * 5 / 128]
    # A wave has four rows of sixteen columns, of 64 bytes each, also where it stores; of four rows, nine tiles lie in
    # two lines.
    assert counts_of("transpose_kernel")["yours, 16 x 16"][2] == 2 * (100 * 7 + 25 * 9)
    # Of 48 queries a program of 16 has one, two or three tiles of keys and values; of two heads, which share them.
    counts = counts_of("attention_kernel")
    assert counts["yours, 16 x 16"][0] == 2 * 4 * 64 * (2 * 48 + 2 * (1 + 2 + 3) * 16)


def test_bytes_are_those_of_the_type_and_a_view_moves_none():
    x, kernel = torch.ones(100).half(), solution_of("masked_copy_kernel").masked_copy_kernel
    assert own_kernels.counted(lambda: kernel[(1,)](x, torch.empty_like(x), 100, BLOCK_SIZE=128))[0] == 2 * 2 * 100
    assert own_kernels.counted(lambda: x.view(10, 10).T[1:]) == (0, 0)
    assert own_kernels.counted(lambda: x.view(10, 10).T + 1) == (2 * 2 * 100, 0)


def test_the_operations_of_attention_are_those_of_the_pairs_that_count():
    tokens, heads, width = 6, 2, 4
    q, k, v = torch.zeros(tokens, heads, width), torch.zeros(tokens, 1, width), torch.zeros(tokens, 1, width)
    products, pairs = 2, tokens**2 / 2  # without those above the diagonal
    assert own_kernels.CASES["attention_kernel"].flop(q, k, v) == 2 * products * pairs * heads * width


def test_times_stand_beside_the_bound_and_what_cannot_run_is_left_out(timing, monkeypatch, capsys):
    def fails(*inputs):
        raise Unavailable("no compiler")

    def times():
        lines = own_kernels.report("rmsnorm_kernel", solution, solution)
        return {name: figures for name, *figures in (re.split(r" {2,}", line) for line in lines[2:])}

    solution = solution_of("rmsnorm_kernel")
    monkeypatch.setattr(torch, "compile", lambda function: fails)
    found = times()
    assert "torch.compile is left out: no compiler" in capsys.readouterr().out and "torch.compile" not in found
    # 8 rows of 200 elements in and out, and the weight: 13,600 bytes at 1 GB/s
    assert found["bound: memory"] == ["13.6", "1.00"] and found["yours, 64"] == ["500", "36.76"]
    timing["GB/s"], timing["TFLOP/s"] = 1e6, 1e-6
    assert own_kernels.bound_us(13_600, 3, torch.float32) == ("arithmetic", 3.0)
    task, (size, *_) = "rmsnorm_kernel", own_kernels.CASES["rmsnorm_kernel"].sizes
    yours, reference = (own_kernels.Launch(task, solution_of(task), size) for _ in range(2))
    with pytest.raises(AssertionError, match="not close"):  # nothing is stored
        own_kernels.timed({"yours": yours}, {"yours": lambda: None}, reference)


def show(task, tmp_path, old="", new=""):
    path = tmp_path / EXERCISE_OF[task].file
    path.write_text((check.SOLUTIONS / path.name).read_text().replace(old, new))
    return check.report(path, EXERCISE_OF[task], task, "show")


def test_what_each_program_touches_is_drawn(tmp_path):
    _, picture = show("grid_copy_kernel", tmp_path)
    colors = re.findall(r'style="fill: (?:var\(--tint-(\w+)|none; stroke-dash)', picture)
    assert colors == 2 * (4 * ["blue"] + 4 * ["orange"] + 2 * ["green"] + 2 * [""])
    cells = re.findall(r">(\d+)</text>", picture)[:20]  # of the load: offsets, and the lanes of those that exist
    assert cells == [str(number) for offset in range(10) for number in (offset, offset % 4)]
    _, picture = show("transpose_kernel", tmp_path)
    assert re.search(r'var\(--muted\)"[^>]*>12</text>', picture)  # between two rows


def test_rows_are_those_of_the_memory():
    """Of 3 columns in rows of 5, the last two are no elements, and the next row begins below the first element."""
    sheet, accesses = Sheet(""), [(0, np.array([0, 5, 6]), np.arange(3), np.array([], int))]
    touched.panel(sheet, 0, torch.zeros(2, 5)[:, :3], "", accesses)
    places = {text.get_text(): text.get_position() for text in sheet.axes.texts[::-1]}
    (x, y), (x_below, y_below) = places["0"], places["5"]
    assert x == x_below and y < y_below and places["6"][0] == places["1"][0] > x


def test_a_wrong_kernel_is_drawn_as_well_and_an_empty_one_said_to_be_empty(tmp_path):
    _, picture = show("masked_copy_kernel", tmp_path, "x_ptr + offsets, mask", "x_ptr + offsets + 1, mask")
    assert "reads x and OUTSIDE of it (!)" in picture and ">5!</text>" in picture and "writes y and" not in picture
    assert show("memory_lines", tmp_path) == (["it loads and stores nothing"], None)
