"""The pictures of the reports: what is drawn, and that an operation has one colour in all of them."""

import colorsys
import itertools
import math

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D

from exercises.performance_debugging import pictures
from profilers import plot
from profilers.kernel_names import COLORS, OPERATIONS, OTHER
from profilers.readers.files import intervals
from profilers.readers.kernel_statistics import merge, statistics_of

GEMM, NORM, NORM_BACKWARD = "Cijk_Ailk_Bljk_BBS_MT256x128x64", "rmsnorm_kernel", "rmsnorm_backward_kernel"


def test_every_operation_has_a_colour_of_its_own():
    assert set(COLORS) == {*OPERATIONS.values(), OTHER}
    for one, other in itertools.combinations(COLORS, 2):
        assert math.dist(to_rgb(COLORS[one]), to_rgb(COLORS[other])) > 0.1, (one, other)


def test_a_backward_pass_is_the_lighter_of_its_pair():
    backward = [name for name in COLORS if name.endswith(" backward")]
    assert len(backward) >= 6
    for name in backward:
        light, dark = (colorsys.rgb_to_hls(*to_rgb(COLORS[n])) for n in (name, name.removesuffix(" backward")))
        apart = abs(light[0] - dark[0])  # round the circle of hues
        assert light[1] > dark[1] and min(apart, 1 - apart) < 0.05, name


def table_of(**calls):
    rows = [(name, start, start + 10) for name, count in calls.items() for start in range(count)]
    return merge([statistics_of(intervals(rows))])


def legend_of(legend):
    """{label: colour} of a legend."""
    colors = [h.get_color() if isinstance(h, Line2D) else h.get_facecolor() for h in legend.legend_handles]
    return {text.get_text(): to_rgb(color) for text, color in zip(legend.get_texts(), colors, strict=True)}


def bars_of(figure):
    """{operation: colour} of the bars of kernels, which end in their operations' names."""
    (axes,) = figure.axes
    labels = [text.get_text().split(" %  ")[1] for text in axes.texts]
    return {label: to_rgb(bar.get_facecolor()) for label, bar in zip(labels, axes.patches, strict=True)}


def test_a_kernel_keeps_its_colour_beside_others():
    one = bars_of(plot.draw_kernels(table_of(**{GEMM: 5, NORM: 2}), 0, ""))
    other = bars_of(plot.draw_kernels(table_of(**{NORM: 9, NORM_BACKWARD: 8, "adamw_kernel": 7, GEMM: 1}), 0, ""))
    assert one == {name: other[name] for name in ("matrix product", "RMSNorm")}
    assert other == {name: to_rgb(COLORS[name]) for name in other} and len(other) == 4


def test_the_timeline_and_the_roofline_have_the_same_colours():
    step = intervals([("step", 0, 100)])
    kernels = intervals([(NORM_BACKWARD, 0, 50), (GEMM, 60, 90), ("unheard_of", 95, 99)])
    names = ("RMSNorm backward", "matrix product", OTHER)
    (legend,) = plot.draw_steps([(kernels, step)], "").legends
    shown = legend_of(legend)
    assert shown == {name: to_rgb(COLORS[name]) for name in names}
    points = [{"name": name, "flop": 10, "bytes": 10, "triton": {"ms": 1.0}} for name in ("RMSNorm", "attention")]
    result = {
        "ceilings": {"GB/s": 1, "TFLOP/s": 1}, "kernels": points, "environment": {"device": "GPU", "arch": "gfx942"},
    }  # fmt: skip
    (axes,) = plot.draw_roofline(result).axes
    shown = legend_of(axes.get_legend())
    assert shown == {name: to_rgb(COLORS[name]) for name in ("RMSNorm", "attention")}
    assert "interpreted" not in axes.get_title()
    result["environment"]["arch"] = "cpu"
    assert "interpreted: no ceiling limits them" in plot.draw_roofline(result).axes[0].get_title()


def test_the_roofline_s_text_is_clear_of_its_lines():
    points = [{"name": "RMSNorm", "flop": flop, "bytes": 10, "triton": {"ms": 1.0}} for flop in (10, 5000)]
    result = {"ceilings": {"GB/s": 4277, "TFLOP/s": 680}, "environment": {"device": "GPU", "arch": "gfx942"}}
    figure = plot.draw_roofline(result | {"kernels": points})
    figure.draw_without_rendering()
    (axes,) = figure.axes
    left, ridge, right = axes.lines[0].get_transform().transform(axes.lines[0].get_xydata())
    ceiling = [*np.linspace(left, ridge, 100), *np.linspace(ridge, right, 100)]
    assert len(axes.texts) == 2
    for text in axes.texts:
        box = text.get_window_extent().padded(2)
        assert not any(box.contains(x, y) for x, y in ceiling)


def test_the_replay_adds_up_the_kernels_of_an_operation():
    shares = {GEMM: 0.3, "cutlass_gemm": 0.2, NORM: 0.5}
    kernels = [{"name": name, "share": share} for name, share in shares.items()]
    assert pictures.operation_shares(kernels) == {"matrix product": pytest.approx(0.5), "RMSNorm": 0.5}
