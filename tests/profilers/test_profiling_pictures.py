"""The pictures of the reports: what is drawn, and that an operation has one colour in all of them."""

import itertools
import math

import pytest
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D

from profilers import plot
from profilers.kernel_names import COLORS, OPERATIONS, OTHER
from profilers.readers import statistics_of
from profilers.readers.files import intervals
from tests.fakes import records
from tests.fakes.machine import ALONE
from tests.fakes.records import Record, Run

GEMM, NORM, NORM_BACKWARD = "Cijk_Ailk_Bljk_BBS_MT256x128x64", "rmsnorm_kernel", "rmsnorm_backward_kernel"


def test_every_operation_has_a_colour_of_its_own():
    assert set(COLORS) == {*OPERATIONS.values(), OTHER}
    for one, other in itertools.combinations(COLORS, 2):
        assert math.dist(to_rgb(COLORS[one]), to_rgb(COLORS[other])) > 0.1, (one, other)


def legend_of(legend):
    """{label: colour} of a legend."""
    colors = [h.get_color() if isinstance(h, Line2D) else h.get_facecolor() for h in legend.legend_handles]
    return {text.get_text(): to_rgb(color) for text, color in zip(legend.get_texts(), colors, strict=True)}


def colors_of(*names):
    return {name: to_rgb(COLORS[name]) for name in names}


def bars_of(axes):
    """[(row, left, width), ...] of what is drawn in a timeline, from left to right."""
    names = [label.get_text() for label in axes.get_yticklabels()]
    bars = [(names[round(bar.get_y() + 0.4)], bar.get_x(), bar.get_width()) for bar in axes.patches]
    return [(row, round(left, 6), round(width, 6)) for row, left, width in sorted(bars, key=lambda bar: bar[1:])]


@pytest.mark.parametrize("name", ["trace.json", "host_7.1700000000.pt.trace.json"])
def test_a_trace_is_drawn_by_the_name_that_pytorch_gives_it(tmp_path, capsys, name):
    """Other JSON is that of the kernels alone."""
    (tmp_path / name).write_text(records.chrome_trace(("kernel", GEMM, 5, 3)))
    assert plot.main([str(tmp_path / name)]) == 0 and (tmp_path / "kernels.png").exists()
    (tmp_path / name).rename(tmp_path / "profile.json")
    assert plot.main([str(tmp_path / "profile.json")]) == 2


def test_bars_of_the_kernels_that_take_the_most_time():
    """Two calls of 3 ms in two steps, and one of 2 ms: 75 and 25 %."""
    kernels = [(GEMM, 0, 3e6), (NORM, 0, 2e6), (GEMM, 0, 3e6)]
    (axes,) = plot.draw_kernels(statistics_of(intervals(kernels)), 2, "").axes
    assert [bar.get_width() for bar in axes.patches] == [1.0, 3.0] and axes.get_xlabel() == "ms a step"
    assert [text.get_text() for text in axes.texts] == ["25.0 %  RMSNorm", "75.0 %  matrix product"]
    assert [to_rgb(bar.get_facecolor()) for bar in axes.patches] == [*colors_of("RMSNorm", "matrix product").values()]
    many = intervals([(f"k{number}", 0, number + 1) for number in range(20)])
    assert len(plot.draw_kernels(statistics_of(many), 0, "").axes[0].patches) == plot.TOP


def write_step(folder, at=0, steps=(("step", 0, 1000),), collective=r"AllGather$\x$"):  # dollars are no formula
    """A recording of a step, in us, 10 ms after the last one's beginning."""
    kernels = [
        ("warm", -900, -100),
        (GEMM, 100, 400),
        (NORM_BACKWARD, 500, 520),
        (f"ncclDevKernel_{collective}", 600, 700),
    ]
    ranges = [
        *steps,
        ("forward", 0, 50),
        ("optimizer", 970, 1000),
        ("layers.0 forward", 50, 300),
        ("step", 2000, 9000),
    ]
    parts = [[Record(n, 10**7 + 1000 * (at + a), 10**7 + 1000 * (at + b)) for n, a, b in p] for p in (kernels, ranges)]
    records.write_rocpd(folder / "a.db", Run(*parts))


def test_a_timeline_of_two_processes(tmp_path, capsys):
    """By the clock of the first, the collectives apart; of the host, that of the first alone."""
    write_step(tmp_path / "rank_0", steps=[("step", 0, 1000), ("step", 1500, 1600)])  # the median of three
    write_step(tmp_path / "rank_1", at=100, collective="ReduceScatter_Sum")
    figure = plot.pictures_of(tmp_path)["timeline.png"]
    (axes,), (legend,) = figure.axes, figure.legends
    names = ("RMSNorm backward", "matrix product", "all-gather", "reduce-scatter")
    assert legend_of(legend) == colors_of(*names)
    own, others = "kernels of device 0", "kernels of device 1"
    assert bars_of(axes) == [
        ("phases (host)", 0, 0.05), ("layers (host)", 0.05, 0.25), (own, 0.1, 0.3), (others, 0.2, 0.3),
        (own, 0.5, 0.02), (others, 0.6, 0.02), ("collectives of device 0", 0.6, 0.1),
        ("collectives of device 1", 0.7, 0.1), ("phases (host)", 0.97, 0.03),
    ]  # fmt: skip
    assert [text.get_text() for text in axes.texts] == ["forward", ""]  # the other is too short for its name
    assert plot.main([str(tmp_path), "--output", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_what_a_cpu_runs_is_not_called_a_kernel_of_a_device(tmp_path):
    events = [("cpu_op", "aten::mm", 10, 20), ("user_annotation", "step", 0, 50), ("user_annotation", "forward", 0, 40)]
    (tmp_path / "trace.json").write_text(records.chrome_trace(*events))
    drawn = plot.pictures_of(tmp_path)
    (axes,) = drawn["timeline.png"].axes
    assert [label for label, *_ in bars_of(axes)] == ["phases (host)", "operators of process 0"]
    assert drawn["kernels.png"].axes[0].get_title().endswith(": the operators that take the most time")


@pytest.mark.parametrize("ranges", [[], [("step", 0, 1000), ("steps", 0, 1000)]])
def test_no_timeline_of_what_is_not_one_step(tmp_path, capsys, ranges):
    """The host's step ends before its kernels run."""
    ranges = [Record(*r) for r in ranges]
    records.write_rocpd(tmp_path / "a.db", Run([Record(NORM, 100, 200)], ranges))
    assert plot.main([str(tmp_path)]) == 0
    assert (tmp_path / "kernels.png").exists() and not (tmp_path / "timeline.png").exists()
    assert "No timeline: it needs a recording whose ranges hold" in capsys.readouterr().out


@pytest.mark.parametrize("arch", ["gfx942", "cpu"])
def test_the_roofline(arch):
    """16 MFLOP on 8 MB in 4 us and 1 GFLOP on 1 MB in 10 us, below 4 TB/s and 600 TFLOP/s."""
    figure = plot.draw_roofline(ALONE | {"environment": {"device": "GPU", "arch": arch}})
    (axes,), (legend,) = figure.axes, figure.legends
    roof, *points = axes.lines
    assert [tuple(point.get_xydata()[0]) for point in points] == [pytest.approx(p) for p in ((2, 4), (1000, 100))]
    assert roof.get_xydata().tolist() == [[2, 8], [150, 600], [1000, 600]]
    shown = legend_of(legend)
    assert shown.pop("4000 GB/s, 600 TFLOP/s") == (0, 0, 0) and shown == colors_of("RMSNorm", "attention")
    assert ("interpreted" in axes.get_title()) == (arch == "cpu")
