"""Draw the pictures of a replay: one for the mistake of each stage, and those of all stages together.

Each function draws into a Figure, or a part of one, what it finds in a Replay of benchmarks.pages.replays; those of
COUNTED take a summary. It returns a Picture, or raises NotMeasured with the reason why there is none.
"""

import itertools
import math
from collections import Counter
from typing import NamedTuple

import numpy as np

import tiny_llama_v3 as llama
from benchmarks.pages.replays import OPTIMIZED, NotMeasured
from measure import drawing
from measure.drawing import BLUE, GREEN, INK, LINE, MUTED, RED, Bar, Filling
from measure.results import recorded_config
from measure.tables import number, percent, times
from measure.work import kernel_work
from profilers.kernel_names import operation_of
from tiny_llama.profiler import covered

WRONG, RIGHT, REFERENCE = Filling(RED, "////"), Filling(BLUE), Filling(LINE)
PHASES = {"forward": Filling(BLUE), "backward": Filling(RED, "////"), "optimizer": Filling(GREEN, "----")}
RIGHT_LINE = dict(color=BLUE, marker="o", linestyle="-")  # they differ without their colour too
WRONG_LINE = dict(color=RED, marker="s", linestyle="--")
MARKERS = "os^vDP*Xd<>p"
MODULES = {"norm": "norms", "embed_tokens": "embedding", "attention.": "attention", "": "feed-forward"}
ZOOM, ZOOM_AT = 0.05, 0.4  # the share of the longer step that is enlarged, and where it begins in each


class Picture(NamedTuple):
    title: str
    words: list  # texts with the figures that it shows
    height: float  # in the unit of its text; the width is drawing.WIDTH


def config_of(replay, stage):
    """Return the llama.Config of a stage; in laptop mode stages differ."""
    return recorded_config(replay.stage(stage).get("config", replay.summary["config"]))


# ----------------------------------------------------------------------------------------------------------------------
# Kinds of pictures


def bar_picture(figure, title, rows, fillings=None, axis=None):
    """Draw Bars, with an axis if it has a name, and say what the fillings stand for."""
    # Lengths that have no unit are compared with each other only: they need no axis.
    axes = figure.subplots()
    drawing.bars(axes, rows)
    if axis:
        axes.set_xlabel(axis)
    else:
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
    if fillings:
        drawing.legend_below(figure, fillings)
    height = drawing.bars_height(len(rows), rest=(34 if axis else 6) + (22 if fillings else 0))
    return Picture(title, [row.label for row in rows], height)


def values(figure, title, rows, shown):
    """Draw {name: (value, Filling)} as bars."""
    bars = [Bar(f"{name}: {shown(value)}", [(value, filling)]) for name, (value, filling) in rows.items()]
    return bar_picture(figure, title, bars)


def step_bars(figure, title, runs, fillings=None):
    """Draw the median step of {name: (run, Filling)} with its p20 and p80, or its phases if they have fillings."""
    rows = []
    for name, (run, filling) in runs.items():
        low, middle, high = (run["batch_ms"][key] for key in ("p20", "p50", "p80"))
        parts = [(ms, fillings[phase]) for phase, ms in run["phase_ms"].items()] if fillings else []
        label = f"{name}: {number(middle)} ms ({number(low)} – {number(high)})"
        rows.append(Bar(label, parts or [(middle, filling)], spread=(low, high)))
    return bar_picture(figure, f"{title}: median, and p20 to p80", rows, fillings, "ms")


def log_axes(figure, names, xlabel, ylabel):
    """Return axes with a logarithmic scale for x or y, or both, and plain numbers."""
    axes = figure.subplots()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    for name in names:
        axes.set(**{f"{name}scale": "log"})
        drawing.plain_log(getattr(axes, f"{name}axis"))
    return axes


def curve_picture(figure, title):
    """Return the Picture of curves whose labels say what they show."""
    labels = figure.axes[-1].get_legend_handles_labels()[1]
    figure.legend(loc="outside lower left", handletextpad=0.4)
    return Picture(title, labels, 200 + 17 * len(labels))


# ----------------------------------------------------------------------------------------------------------------------
# One for each stage


def first_loss(figure, replay):
    """The first loss, its expected value, and the loss of the next stage, on a scale of their own."""
    first, config = replay.stage(1)["first_loss"], config_of(replay, 1)
    if first is None:
        raise NotMeasured("the first loss is not a number")
    rows = {"first loss, stage 1": (first, WRONG), "hidden size": (config.hidden_dim, REFERENCE)}
    if 2 in replay.stages:
        rows["first loss, stage 2"] = replay.stage(2)["first_loss"], RIGHT
    rows[f"ln {config.vocab_size}, of guessing"] = math.log(config.vocab_size), REFERENCE
    return values(figure, "The first loss, the hidden size, and the loss of guessing", rows, number)


def attention_lengths(figure, replay):
    """The time of the attention kernel over the length of the sequence, in both layouts of K and V."""
    replay.stage(2)
    layouts = replay.summary.get("attention_layouts")
    if not layouts:
        raise NotMeasured("the attention kernel's time over the length of the sequence was not recorded")
    rows, precision = layouts["lengths"], layouts["precision"]
    lengths = [row["seq_len"] for row in rows]
    axes = log_axes(figure, "xy", "tokens a sequence", f"us a call, {precision}")
    for name, words, style in (("contiguous", "", RIGHT_LINE), ("strided", "badly ", WRONG_LINE)):
        # The same percentiles as of a step: the median, and what lies around it.
        low, middle, high = np.percentile([row[name] for row in rows], [20, 50, 80], axis=1)
        label = f"{words}{name}: {number(middle[0])} us at {lengths[0]} tokens, {number(middle[-1])} at {lengths[-1]}"
        axes.errorbar(lengths, middle, (middle - low, high - middle), capsize=2, markersize=5, label=label, **style)
    axes.set_xticks(lengths, lengths, minor=False)
    return curve_picture(figure, f"One call of the attention kernel in {precision}, median and p20 to p80")


def phases_in_step(figure, replay):
    """The phases as stacked bars inside an outline of the length of the step; the rest was not timed."""
    if replay.stage(3)["phases_share"] is None:
        raise NotMeasured("--timing step does not time phases")
    # What the outline has beyond the phases was not timed. Stage 4 has the same kernels, and the right clock.
    rows = []
    for stage in filter(None, map(replay.stages.get, (3, 4))):
        step, phases = stage["batch_ms"]["p50"], stage["phase_ms"]
        together = f"{number(sum(phases.values()))} of {number(step)} ms, {percent(stage['phases_share'])}"
        parts = [(phases[name], PHASES[name]) for name in PHASES]
        rows.append(Bar(f"stage {stage['stage']}: phases {together}", parts, outline=step))
    return bar_picture(figure, "The phases, inside the outline of their step", rows, PHASES, "ms")


def operation_shares(kernels):
    """Return {operation: share of the time of all kernels}."""
    shares = Counter()
    for kernel in kernels:
        shares[operation_of(kernel["name"])] += kernel["share"]
    return shares


def kernel_shares(figure, replay):
    """The share of the device's time of each operation's kernels, with and without the naive kernel."""
    # The diamonds show which operations take the time once the naive kernel is gone.
    after = operation_shares(replay.stages.get(OPTIMIZED, {}).get("kernels") or [])
    rows = []
    for name, share in operation_shares(replay.kernels(4)).most_common(6):
        label = f"{name}: {percent(share)}" + (f"; stage {OPTIMIZED}: {percent(after[name])}" if after else "")
        rows.append(Bar(label, [(100 * share, WRONG if "naive" in name else RIGHT)], mark=100 * after[name]))
    title = f"Share of the device's time by operation: bars stage 4, diamonds stage {OPTIMIZED}"
    return bar_picture(figure, title, rows, axis="%")


def step_and_baseline(figure, replay):
    """The phases of a step of stage 5 and of plain PyTorch, with their spread."""
    replay.require_times()
    runs = {"plain PyTorch": replay.summary["baseline"], f"stage {OPTIMIZED}": replay.stage(OPTIMIZED)}
    return step_bars(figure, "A step by its phases", {name: (run, RIGHT) for name, run in runs.items() if run}, PHASES)


def gradient_shares(config, without_gradient):
    """Return {module: (weights with a gradient, weights)} of a llama.Config and the names of weights without one."""
    # A model without memory: only the names and the sizes of its weights are needed.
    with llama.torch.device("meta"):
        model = llama.TinyLlamaTriton(config, llama.OPERATIONS["torch"])
    received, total = Counter(), Counter()
    for name, parameter in model.named_parameters():
        module = next(kind for part, kind in MODULES.items() if part in name)
        total[module] += parameter.numel()
        received[module] += parameter.numel() * (name not in without_gradient)
    return {module: (received[module], total[module]) for module in total}


def gradients_by_module(figure, replay):
    """The share of each kind of weights that receives a gradient."""
    without = replay.stage(6).get("without_gradient")
    if without is None:
        raise NotMeasured("which weights receive a gradient was not recorded, only how many")
    rows = []
    for name, (received, total) in gradient_shares(config_of(replay, 6), without).items():
        rows.append(Bar(f"{name}: {received:,} of {total:,} weights", [(100 * received / total, RIGHT)], outline=100))
    return bar_picture(figure, "Weights with a gradient, by module", rows, axis="%")


def first_steps(figure, replay):
    """The time of every step on a logarithmic scale, on which the first and the others can be read."""
    axes = log_axes(figure, "y", "step", "ms")
    for stage, style in ((replay.stage(7), WRONG_LINE), (replay.stages.get(OPTIMIZED), RIGHT_LINE)):
        if not stage:
            continue
        steps, median = stage["step_ms"], number(stage["batch_ms"]["p50"])
        label = f"stage {stage['stage']}: first step {number(steps[0])} ms, median {median} ms"
        axes.plot(range(1, len(steps) + 1), steps, label=label, markersize=4, **style | {"linestyle": ""})
    axes.xaxis.get_major_locator().set_params(integer=True)
    return curve_picture(figure, "Time of every step, logarithmic")


def gaps(figure, replay):
    """The kernels of one recorded step of stages 5 and 8 on one axis of time; below, a part enlarged."""
    replay.stage(8)
    if not replay.summary.get("timelines"):
        raise NotMeasured("the kernels of a step were not recorded one by one")
    whole, part = figure.subplots(2, 1)
    words, longest = [], 0
    for level, (n, color) in enumerate({OPTIMIZED: RED, 8: BLUE}.items()):
        timeline, without = replay.summary["timelines"][str(n)], replay.stage(n)["batch_ms"]["p50"]
        step_us, starts = timeline["step_us"], np.array(timeline["start_us"])
        spans = np.stack([starts, starts + timeline["length_us"]], axis=1)
        longest, busy = max(longest, step_us), covered(sorted(spans.tolist())) / step_us
        label = f"stage {n}: {len(starts)} kernels, busy {percent(busy)} of {number(step_us / 1e3)} ms"
        words += [label, f"stage {n}: {number(without)} ms without the profiler"]
        for axes, xs, label in (whole, spans / 1e3, words[-2]), (part, spans - ZOOM_AT * step_us, words[-1]):
            # One line with NaN between the kernels, where the pen is lifted, takes a tenth of the space of boxes.
            xs = np.pad(xs, ((0, 0), (0, 1)), constant_values=np.nan).ravel()
            axes.plot(xs, np.full(len(xs), level), color=color, linewidth=24, solid_capstyle="butt")
            axes.annotate(label, (0, level - 0.35), va="bottom")
    whole.set(xlim=(0, longest / 1e3), xlabel="ms, the whole step")
    part.set(xlim=(0, ZOOM * longest), xlabel=f"us, a part of it from {percent(ZOOM_AT)} of each step on")
    for axes in (whole, part):
        axes.set(ylim=(1.4, -0.8), yticks=[])
        axes.spines["left"].set_visible(False)
    title = f"When the device ran a kernel in one step of stages {OPTIMIZED} and 8, under the profiler"
    return Picture(title, words, 300)


def counted_cases(summary, *stages):
    """Return the counts of these stages."""
    cases = {case["stage"]: case for case in summary["counted"]["cases"]}
    return [cases[stage] for stage in stages]


def counted_lines(figure, summary):
    """The cache lines that the attention kernel's loads touch in both layouts, and the fewest possible."""
    bad, good = counted_cases(summary, 2, 3)
    rows = {
        "badly strided, stage 2": (bad["lines"]["128"], WRONG),
        "contiguous, stage 3": (good["lines"]["128"], RIGHT),
        "the fewest that could hold them": (good["fewest_lines"]["128"], REFERENCE),
    }
    title = "Cache lines of 128 bytes that the attention kernel's loads touch"
    return values(figure, title, rows, "{:,} lines".format)


def counted_bytes(figure, summary):
    """How often the SwiGLU kernels load each byte."""
    rows = {}
    for case, filling in zip(counted_cases(summary, 4, OPTIMIZED), (WRONG, RIGHT), strict=True):
        rows[f"{case['kernel']}, stage {case['stage']}"] = case["bytes"] / case["distinct_bytes"], filling
    return values(figure, "How often the kernel asks for each byte", rows, times)


COUNTED = {2: counted_lines, 4: counted_bytes}
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


def step_times(figure, replay):
    """The median step of the baseline and of every stage, with its spread."""
    replay.require_times()
    runs = {"plain PyTorch": (replay.summary["baseline"], REFERENCE)} if replay.summary["baseline"] else {}
    for n, stage in replay.stages.items():
        runs[f"stage {n}"] = stage, RIGHT if n == OPTIMIZED else Filling(MUTED)
    return step_bars(figure, "A step of every stage", runs)


def kernel_points(replay):
    """Return {kernel: {stage: (FLOP per byte, TFLOP per second)}} of our kernels in the profiles."""
    work, points = kernel_work(replay.config), {}
    for n, stage in replay.stages.items():
        for kernel in stage["kernels"] or []:
            # The bytes and operations of libraries' kernels are not known.
            own = work.get(kernel["name"])
            if own:
                rate = own.flop / kernel["average_us"] / 1e6
                points.setdefault(kernel["name"], {})[n] = own.flop / own.bytes, rate
    return points


def roofline(figure, replay):
    """A symbol for each kernel, a point for each stage, under the ceilings of memory and of arithmetic."""
    ceilings, points = replay.summary.get("ceilings"), kernel_points(replay)
    if not (ceilings and points):
        raise NotMeasured("the ceilings of this device were not measured, or none of our kernels ran on it")
    reached, slope = ceilings["flop_per_second"] / 1e12, ceilings["bytes_per_second"] / 1e12
    peak, ridge = ceilings["peak_tflops"], reached / slope
    axes = log_axes(figure, "xy", "arithmetic intensity, FLOP/byte", "TFLOP/s")
    for (name, stages), marker in zip(points.items(), itertools.cycle(MARKERS)):
        label = f"{name}: {number([*stages.values()][-1][1])} TFLOP/s"
        color = RED if "naive" in operation_of(name) else BLUE
        axes.plot(*zip(*stages.values(), strict=True), marker, color=color, label=label)
    # The roof rises with the bandwidth up to the ridge, from where on arithmetic is the limit.
    left, right = axes.get_xlim()
    corners = min(left, ridge / 6), ridge, max(right, ridge * 6)
    roof = f"reached: {number(slope)} TB/s, {number(reached)} TFLOP/s"
    axes.plot(corners, np.minimum(np.array(corners) * slope, reached), color=INK, linewidth=1.2, label=roof)
    if peak:
        axes.axhline(peak, color=MUTED, linestyle=":", label=f"by the datasheet: {number(peak)} TFLOP/s")
    return curve_picture(figure, "Our kernels under the ceilings that a copy and the library's matrix product reach")


WHOLE = {"steps": step_times, "roofline": roofline}
