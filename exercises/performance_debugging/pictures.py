"""Draws the pictures of a replay: one for the mistake of each stage, and those of all stages together.

Each function of STAGES and WHOLE takes a Replay of benchmarks.pages.replays and returns a Picture, whose labels and
description contain the figures, or raises NotMeasured with the reason why there is none.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

import tiny_llama_v3 as llama
from benchmarks.pages.replays import OPTIMIZED, NotMeasured, Replay
from exercises.performance_debugging.kernel_timeline import busy_share, spans_of
from measure import drawing
from measure.drawing import BLUE, GREEN, GROUND, INK, LINE, MUTED, RED, VIOLET, Bar, Filling
from measure.results import recorded_config
from measure.tables import number, percent, times
from measure.work import kernel_work
from profilers.kernel_names import operation_of

WRONG, RIGHT, REFERENCE = Filling(RED, "////"), Filling(BLUE), Filling(LINE)
PHASES = {"forward": Filling(BLUE), "backward": Filling(RED, "////"), "optimizer": Filling(GREEN, "----")}
MARKERS = "os^vDP*Xd<>p"


class Picture(NamedTuple):
    title: str
    description: str  # a text with the figures
    height: float  # in the unit of its text; the width is drawing.WIDTH
    draw: Callable  # a function of a Figure or a part of one


def config_of(replay, stage):
    """The llama.Config of a stage; in laptop mode stages differ."""
    return recorded_config(replay.stage(stage).get("config", replay.summary["config"]))


def step_bar(name, run, filling):
    """The Bar of the median step of a run, with its p20 and p80."""
    low, middle, high = (run["batch_ms"][key] for key in ("p20", "p50", "p80"))
    label = f"{name}: {number(middle)} ms ({number(low)} – {number(high)})"
    return Bar(label, [(middle, filling)], spread=(low, high))


def in_words(labels):
    return "; ".join(labels) + "."


def bar_picture(title, rows, fillings=None, axis=None, limit=None):
    """A Picture of drawing.bars with a legend of its fillings."""

    def draw(figure):
        axes = figure.subplots()
        drawing.bars(axes, rows)
        if limit:
            axes.set_xlim(0, limit)
        axes.set_xlabel(axis or "")
        if not axis:
            axes.set_xticks([])
            axes.spines["bottom"].set_visible(False)
        if fillings:
            drawing.legend_below(figure, fillings)

    height = drawing.bars_height(len(rows), rest=(34 if axis else 6) + (22 if fillings else 0))
    return Picture(title, in_words(row.label for row in rows), height, draw)


# ----------------------------------------------------------------------------------------------------------------------
# One for each stage


def first_loss(replay):
    """The first loss, its expected value, and the loss of the next stage, on a scale of their own."""
    first, config = replay.stage(1)["first_loss"], config_of(replay, 1)
    hidden, vocabulary = config.hidden_dim, config.vocab_size
    if first is None:
        raise NotMeasured("the first loss is not a number")
    rows = [
        ("first loss, stage 1", first, WRONG),
        ("hidden size", hidden, REFERENCE),
        (f"ln {vocabulary}, of guessing", math.log(vocabulary), REFERENCE),
    ]
    if 2 in replay.stages:
        rows.insert(2, ("first loss, stage 2", replay.stage(2)["first_loss"], RIGHT))
    bars = [Bar(f"{name}: {number(value)}", [(value, filling)]) for name, value, filling in rows]
    return bar_picture("The first loss, the hidden size, and the loss of guessing", bars)


LAYOUTS = {  # of attention_layouts.py: (label, colour, marker, dashes)
    "strided": ("badly strided", RED, "s", (0, (4, 2))),
    "contiguous": ("contiguous", BLUE, "o", "-"),
}


def attention_lengths(replay):
    """The time of the attention kernel over the length of the sequence, in both layouts of K and V."""
    replay.stage(2)
    layouts = replay.summary.get("attention_layouts")
    if not layouts:
        raise NotMeasured("the attention kernel's time over the length of the sequence was not recorded")
    rows = layouts["lengths"]
    lengths = [row["seq_len"] for row in rows]

    def draw(figure):
        axes = figure.subplots()
        for name, (label, color, marker, dashes) in LAYOUTS.items():
            low, middle, high = np.percentile([row[name] for row in rows], [20, 50, 80], axis=1)
            axes.errorbar(
                lengths, middle, yerr=(middle - low, high - middle), color=color, marker=marker, linestyle=dashes,
                markersize=5, capsize=2, label=label,
            )  # fmt: skip
            side = dict(ha="right", va="bottom") if name == "strided" else dict(ha="left", va="top")
            offset = (-3, 3) if name == "strided" else (3, -3)  # away from the other line
            for index in (0, -1):
                point = lengths[index], middle[index]
                axes.annotate(number(middle[index]), point, offset, textcoords="offset points", **side)
        axes.set(xscale="log", yscale="log", xlabel="tokens a sequence", ylabel=f"us a call, {layouts['precision']}")
        axes.set_xticks(lengths, [f"{n:,}" if n < 1000 else f"{n / 1000:.0f}k" for n in lengths], minor=False)
        axes.minorticks_off()
        drawing.plain_log(axes.yaxis)
        axes.margins(0.17, 0.12)
        axes.legend(loc="upper left")

    medians = ((row["seq_len"], *(statistics.median(row[name]) for name in LAYOUTS)) for row in rows)
    labels = [
        f"{n} tokens: {number(strided)} us badly strided, {number(even)} us contiguous, {times(strided / even)}"
        for n, strided, even in medians
    ]
    title = f"One call of the attention kernel in {layouts['precision']}, median and p20 to p80"
    return Picture(title, in_words(labels), 250, draw)


def phases_in_step(replay):
    """The phases as stacked bars inside an outline of the length of the step; the rest was not timed."""
    rows = []
    if replay.stage(3)["phases_share"] is None:
        raise NotMeasured("--timing step does not time phases")
    for stage in (replay.stage(3), replay.stages.get(4)):
        if stage and stage["phases_share"]:
            step = stage["batch_ms"]["p50"]
            together, share = number(sum(stage["phase_ms"].values())), percent(stage["phases_share"])
            label = f"stage {stage['stage']}: phases {together} of {number(step)} ms, {share}"
            rows.append(Bar(label, [(stage["phase_ms"][name], PHASES[name]) for name in PHASES], outline=step))
    return bar_picture("The phases, inside the outline of their step", rows, PHASES, "ms")


def operation_shares(kernels):
    """{operation: share of the time of all kernels}."""
    shares = Counter()
    for kernel in kernels:
        shares[operation_of(kernel["name"])] += kernel["share"]
    return shares


SHOWN_OPERATIONS = 6


def kernel_shares(replay):
    """The share of the device's time of each operation's kernels, with and without the naive kernel."""
    before = operation_shares(replay.kernels(4))
    after = operation_shares(replay.stages.get(OPTIMIZED, {}).get("kernels") or [])
    shown = [name for name, _ in before.most_common(SHOWN_OPERATIONS)]
    rows = []
    for name in shown:
        label = f"{name}: {percent(before[name])}"
        if after:
            label += f"; stage {OPTIMIZED}: {percent(after[name])}"
        rows.append(Bar(label, [(100 * before[name], WRONG if "naive" in name else RIGHT)], mark=100 * after[name]))
    title = f"Share of the device's time by operation: bars stage 4, diamonds stage {OPTIMIZED}"
    return bar_picture(title, rows, axis="%", limit=100)


def step_and_baseline(replay):
    """The phases of a step of stage 5 and of plain PyTorch, with their spread."""
    replay.require_times()
    rows = []
    for name, run in (("plain PyTorch", replay.summary["baseline"]), (f"stage {OPTIMIZED}", replay.stage(OPTIMIZED))):
        if not run:
            continue
        parts = [(run["phase_ms"][phase], PHASES[phase]) for phase in PHASES if phase in run["phase_ms"]]
        rows.append(step_bar(name, run, RIGHT)._replace(**{"parts": parts} if parts else {}))
    return bar_picture("A step by its phases: median, and p20 to p80", rows, PHASES, "ms")


def module_of(parameter):
    """The kind of weights to which a parameter of TinyLlamaTriton belongs, by its name."""
    kinds = {"norm": "norms", "embed_tokens": "embedding", "attention.": "attention"}
    return next((kind for part, kind in kinds.items() if part in parameter), "feed-forward")


def gradient_shares(config, without_gradient):
    """{module: (weights with a gradient, weights)} of this llama.Config and the names of parameters without one."""
    with llama.torch.device("meta"):
        model = llama.TinyLlamaTriton(config, llama.OPERATIONS["torch"])
    shares = {}
    for name, parameter in model.named_parameters():
        received, total = shares.get(module_of(name), (0, 0))
        own = parameter.numel()
        shares[module_of(name)] = received + own * (name not in without_gradient), total + own
    return shares


def gradients_by_module(replay):
    """The share of each kind of weights that receives a gradient."""
    stage = replay.stage(6)
    if stage.get("without_gradient") is None:
        raise NotMeasured("which weights receive a gradient was not recorded, only how many")
    shares = gradient_shares(config_of(replay, 6), stage["without_gradient"])
    rows = [
        Bar(f"{name}: {received:,} of {total:,} weights", [(100 * received / total, RIGHT)], outline=100)
        for name, (received, total) in shares.items()
    ]
    return bar_picture("Weights with a gradient, by module", rows, axis="%", limit=101)


def first_steps(replay):
    """The time of every step on a logarithmic scale, on which the first and the others can be read."""
    cold, warm = replay.stage(7)["step_ms"], replay.stages.get(OPTIMIZED, {}).get("step_ms")
    median = replay.stage(7)["batch_ms"]["p50"]

    def draw(figure):
        axes = figure.subplots()
        axes.plot(range(1, len(cold) + 1), cold, "s", color=RED, markersize=5, label="stage 7")
        if warm:
            axes.plot(range(1, len(warm) + 1), warm, "o", color=BLUE, markersize=3.5, label=f"stage {OPTIMIZED}")
        axes.set(yscale="log", xlabel="step", ylabel="ms")
        drawing.plain_log(axes.yaxis)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.margins(y=0.2)
        note = f"first step: {number(cold[0])} ms"
        axes.annotate(note, (1, cold[0]), (8, 0), textcoords="offset points", va="center")
        note = f"median: {number(median)} ms"
        axes.annotate(note, (len(cold), median), (0, 10), textcoords="offset points", ha="right")
        axes.legend(loc="center right")

    labels = [f"stage 7: first step {number(cold[0])} ms, median of all {len(cold)} {number(median)} ms"]
    if warm:
        labels.append(f"stage {OPTIMIZED}: first step {number(warm[0])} ms")
    return Picture("Time of every step, logarithmic", in_words(labels), 220, draw)


ZOOM, ZOOM_AT = 0.05, 0.4  # the share of the longer step that the lower half shows, and where it begins in each


def within(spans, begin, length):
    """The parts of the (start, length) inside a window, relative to its begin."""
    for start, duration in spans:
        left, right = max(start - begin, 0), min(start + duration - begin, length)
        if left < right:
            yield left, right - left


def draw_spans(axes, spans, unit, level, filling):
    """Draws bars of (start, length) in us as one outline, which takes a tenth of the space of single shapes."""
    spans = [(start / unit, length / unit) for start, length in spans]
    corners = [(x, y) for a, b in spans for x, y in ((a, 0), (a + b, 0), (a + b, 0.55), (a, 0.55), (a, 0))]
    codes = [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY] * len(spans)
    outline = Outline([(x, level + y) for x, y in corners], codes)
    axes.add_patch(PathPatch(outline, facecolor=filling.color, linewidth=0))


def gaps(replay):
    """The kernels of one recorded step of stages 5 and 8 on one axis of time; below, a part enlarged."""
    replay.stage(8)
    if not replay.summary.get("timelines"):
        raise NotMeasured("the kernels of a step were not recorded one by one")
    timelines = {n: replay.summary["timelines"][str(n)] for n in (OPTIMIZED, 8)}
    longest = max(timeline["step_us"] for timeline in timelines.values())
    fillings = {OPTIMIZED: Filling(RED), 8: Filling(BLUE)}
    labels = [
        f"stage {n}: {len(timeline['start_us'])} kernels, busy {percent(busy_share(timeline))} of "
        f"{number(timeline['step_us'] / 1e3)} ms"
        for n, timeline in timelines.items()
    ]
    unprofiled = [f"stage {n}: {number(replay.stage(n)['batch_ms']['p50'])} ms without the profiler" for n in timelines]

    def draw(figure):
        whole = (labels, longest, 0, 1e3, "ms, the whole step")
        part = (unprofiled, ZOOM * longest, ZOOM_AT, 1, f"us, a part of it from {percent(ZOOM_AT)} of each step on")
        for axes, (names, length, at, unit, xlabel) in zip(figure.subplots(2, 1), (whole, part), strict=True):
            for level, (n, timeline) in enumerate(timelines.items()):
                begin = at * timeline["step_us"]
                draw_spans(axes, within(spans_of(timeline), begin, length), unit, level, fillings[n])
                axes.annotate(names[level], (0, level), (0, 3), textcoords="offset points", va="bottom")
            axes.set(xlim=(0, length / unit), ylim=(1.7, -0.5), yticks=[], xlabel=xlabel)
            axes.spines["left"].set_visible(False)

    title = f"When the device ran a kernel in one step of stages {OPTIMIZED} and 8, under the profiler"
    return Picture(title, in_words([*labels, *unprofiled]), 300, draw)


def counted_lines(summary):
    """The cache lines that the attention kernel's loads touch in both layouts, and the fewest possible."""
    cases = {case["stage"]: case for case in (summary["counted"] or {"cases": []})["cases"]}
    if not {2, 3} <= cases.keys():
        raise NotMeasured("the cache lines of its loads were not counted")
    rows = [
        ("badly strided, stage 2", cases[2]["lines"]["128"], WRONG),
        ("contiguous, stage 3", cases[3]["lines"]["128"], RIGHT),
        ("the fewest that could hold them", cases[3]["fewest_lines"]["128"], REFERENCE),
    ]
    bars = [Bar(f"{name}: {lines:,} lines", [(lines, filling)]) for name, lines, filling in rows]
    return bar_picture("Cache lines of 128 bytes that the attention kernel's loads touch", bars)


def counted_bytes(summary):
    """How often the SwiGLU kernels load each byte."""
    cases = {case["stage"]: case for case in (summary["counted"] or {"cases": []})["cases"]}
    if not {4, OPTIMIZED} <= cases.keys():
        raise NotMeasured("the bytes that it asks for were not counted")
    rows = []
    for stage, filling in ((4, WRONG), (OPTIMIZED, RIGHT)):
        case = cases[stage]
        again = case["bytes"] / case["distinct_bytes"]
        rows.append(Bar(f"{case['kernel']}, stage {stage}: {times(again)}", [(again, filling)]))
    return bar_picture("How often the kernel asks for each byte", rows)


COUNTED = {2: counted_lines, 4: counted_bytes}  # functions of a summary
STAGES = {
    1: first_loss,
    2: attention_lengths,
    3: phases_in_step,
    4: kernel_shares,
    5: step_and_baseline,
    6: gradients_by_module,
    7: first_steps,
    8: gaps,
}


# ----------------------------------------------------------------------------------------------------------------------
# All stages together


def step_times(replay):
    """The median step of the baseline and of every stage, with its spread."""
    replay.require_times()
    runs = {"plain PyTorch": replay.summary["baseline"]} if replay.summary["baseline"] else {}
    runs |= {f"stage {n}": stage for n, stage in replay.stages.items()}
    fillings = {"plain PyTorch": REFERENCE, f"stage {OPTIMIZED}": RIGHT}
    rows = [step_bar(name, run, fillings.get(name, Filling(MUTED))) for name, run in runs.items()]
    return bar_picture("A step of every stage: median, and p20 to p80", rows, axis="ms")


def mistakes_alone(replay):
    """The median step of stage 5 with each mistake alone, with its spread."""
    replay.require_times()
    runs = [(llama.flag_of(run["mistake"]), run) for run in replay.summary.get("isolated", []) if "batch_ms" in run]
    if not runs or OPTIMIZED not in replay.stages:
        raise NotMeasured("each mistake alone was not recorded")
    rows = [step_bar(f"stage {OPTIMIZED}, none", replay.stage(OPTIMIZED), RIGHT)]
    rows += [step_bar(name, run, WRONG) for name, run in runs]
    return bar_picture("A step with each mistake alone: median, and p20 to p80", rows, axis="ms")


def losses(replay):
    """The loss over the steps; stages with the same losses share a line with all their names."""
    if any("config" in stage for stage in replay.stages.values()):
        raise NotMeasured("the stages differ in their sizes, and so in their floors")
    alike = {}
    for n, stage in replay.stages.items():
        alike.setdefault(tuple(stage["losses"]), []).append(str(n))
    curves = {f"stage {', '.join(stages)}": curve for curve, stages in alike.items()}
    colors, dashes = itertools.cycle((BLUE, RED, GREEN, VIOLET)), itertools.cycle(("-", "--", "-.", ":"))
    drawn = [loss for curve in alike for loss in curve if loss is not None]
    if not drawn:
        raise NotMeasured("no stage has a finite loss")
    highest, floor = max(drawn), replay.summary["entropy"]  # None of a file
    floor = floor if floor and floor <= min(drawn) else None  # a few random tokens may lie below it

    def draw(figure):
        axes = figure.subplots()
        for (label, curve), marker in zip(curves.items(), MARKERS, strict=False):
            steps = range(1, len(curve) + 1)
            style = dict(color=next(colors), linestyle=next(dashes), marker=marker, markersize=4)
            axes.plot(steps, [np.nan if x is None else x for x in curve], label=label, **style)
        if floor:
            label = f"floor of the data, {number(floor)}"
            axes.axhline(floor, color=INK, linewidth=1, linestyle=(0, (1, 2)), label=label)
        axes.set(xlabel="step", ylabel="loss, nats a token")
        if highest > 5 * (floor or np.log(256)):
            axes.set_yscale("log")
            drawing.plain_log(axes.yaxis)
        axes.xaxis.get_major_locator().set_params(integer=True)
        figure.legend(loc="outside lower left")

    labels = [f"{label}: {number(curve[0])} at first, {number(curve[-1])} at last" for label, curve in curves.items()]
    return Picture("Loss at every step", in_words(labels), 230 + 16 * len(curves), draw)


def kernel_points(summary):
    """(kernel, stage, FLOP per byte, FLOP per second) of each of our kernels in each profiled stage."""
    work = kernel_work(recorded_config(summary["config"]))
    for stage in Replay(summary).stages.values():
        for kernel in stage["kernels"] or []:
            if kernel["name"] in work:
                flop, moved = work[kernel["name"]].flop, work[kernel["name"]].bytes
                yield kernel["name"], stage["stage"], flop / moved, flop / kernel["average_us"] * 1e6


def roofline(replay):
    """A symbol for each kernel, a point for each stage, under the ceilings of memory and of arithmetic."""
    ceilings = replay.summary.get("ceilings")
    if not ceilings:
        raise NotMeasured("the ceilings of this device were not measured")
    shown = {}
    for name, stage, x, y in kernel_points(replay.summary):
        shown.setdefault(name, {})[stage] = (x, y / 1e12)
    if not shown:
        raise NotMeasured("none of our kernels ran on a device here")
    ceiling, slope = ceilings["flop_per_second"] / 1e12, ceilings["bytes_per_second"] / 1e12
    ridge = ceiling / slope
    xs = [x for stages in shown.values() for x, _ in stages.values()]
    ends = min(0.5 * ridge, *xs) / 3, max(2 * ridge, *xs) * 3

    def draw(figure):
        axes = figure.subplots()
        axes.plot((ends[0], ridge, ends[1]), (ends[0] * slope, ceiling, ceiling), color=INK, linewidth=1.2)
        if ceilings["peak_tflops"]:
            axes.axhline(ceilings["peak_tflops"], color=MUTED, linestyle=":", linewidth=1.2)
        for (name, stages), marker in zip(shown.items(), itertools.cycle(MARKERS)):
            bad = "naive" in operation_of(name)
            axes.plot(*zip(*stages.values(), strict=True), marker, color=RED if bad else BLUE, markersize=6,
                      markeredgecolor=GROUND, markeredgewidth=0.5, label=name)  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="arithmetic intensity, FLOP/byte", ylabel="TFLOP/s")
        for axis in (axes.xaxis, axes.yaxis):
            drawing.plain_log(axis)
        top = max(ceiling, ceilings["peak_tflops"] or 0)
        axes.set_ylim(top=top * 12)  # so that the labels stand above the lines
        note = f"{number(slope)} TB/s and {number(ceiling)} TFLOP/s reached"
        if ceilings["peak_tflops"]:
            note += f"\n{number(ceilings['peak_tflops'])} TFLOP/s by the datasheet (dotted)"
        axes.annotate(note, (0.02, 0.98), xycoords="axes fraction", va="top")
        figure.legend(loc="outside lower left", handletextpad=0.2)

    labels = [
        f"{name}: {number(y)} TFLOP/s at {number(x)} FLOP/byte in stage {stage}"
        for name, stages in shown.items()
        for stage, (x, y) in list(stages.items())[-1:]
    ]
    title = "Our kernels under the ceilings that a copy and the library's matrix product reach"
    return Picture(title, in_words(labels), 260 + 16 * len(shown), draw)


WHOLE = {"steps": step_times, "alone": mistakes_alone, "loss": losses, "roofline": roofline}


# ----------------------------------------------------------------------------------------------------------------------


def svg(picture, name):
    """The Picture as an element of the report; the name must be unique there."""
    with drawing.style():
        figure = drawing.new_figure(picture.height)
        picture.draw(figure)
        return drawing.svg(figure, name, picture.title, picture.description)


def write_overview(chosen, title, path, columns=4):
    """Draws the Pictures side by side in one PNG file."""
    rows = math.ceil(len(chosen) / columns)
    columns = min(columns, len(chosen))
    with drawing.style():
        height = max(picture.height for picture in chosen) + 34
        figure = drawing.new_figure(rows * height + 30, columns * (drawing.WIDTH + 20))
        figure.suptitle(title)
        grid = figure.subfigures(rows, columns, squeeze=False).flat
        for part, picture in zip(grid, chosen, strict=False):
            part.suptitle(picture.title, x=0.02, ha="left", fontsize=drawing.TEXT, wrap=True)
            picture.draw(part)
        drawing.save_png(figure, path)
