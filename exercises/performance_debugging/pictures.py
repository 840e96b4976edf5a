"""The pictures of a replay. Each draw_* takes the axes and the summary of comparison.py."""

import io
from collections import Counter

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

import tiny_llama_v3 as llama  # noqa: E402
from benchmarks.stages import device_of, setting  # noqa: E402
from measure.tables import number  # noqa: E402
from measure.work import kernel_work  # noqa: E402
from profiling.kernel_names import COLORS, operation_of  # noqa: E402

BASELINE_COLOUR = "0.6"
MARKERS = "os^vD<>pP*Xhd"


def colour(stage):
    return f"C{stage - 1}"


def measured(summary):
    return [stage for stage in summary["stages"] if "batch_ms" in stage]


def label(stage):
    return f"{stage['stage']} {stage['title']}"


def draw_loss(axes, summary):
    for stage in measured(summary):
        steps = range(1, len(stage["losses"]) + 1)
        axes.plot(steps, stage["losses"], color=colour(stage["stage"]), label=label(stage), marker=".")
    axes.axhline(summary["entropy"], color="0.3", linestyle=":", label=f"floor of the data, {summary['entropy']:.2f}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="step", ylabel="loss, nats a token", yscale="log", title="Loss")
    axes.legend(fontsize="small")


def draw_speed(axes, summary):
    bars = [(f"stage {stage['stage']}", stage, colour(stage["stage"])) for stage in measured(summary)]
    if summary["baseline"]:
        bars.insert(0, ("baseline", summary["baseline"], BASELINE_COLOUR))
    names, runs, colours = zip(*bars, strict=True)
    drawn = axes.barh(names, [run["samples_per_second"] for run in runs], color=colours)
    axes.bar_label(drawn, [f" {number(run['samples_per_second'])}" for run in runs], fontsize="small")
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel="speed, samples/s (all steps)", title="Speed")


def draw_phases(axes, summary):
    """The phases as stacked bars inside an outline as long as the step: what is missing was not timed."""
    stages = measured(summary)
    names = [f"stage {stage['stage']}" for stage in stages]
    left = [0.0] * len(stages)
    for phase, shade in (("forward", "C0"), ("backward", "C1"), ("optimizer", "C2")):
        widths = [stage["phase_ms"].get(phase, 0.0) for stage in stages]
        axes.barh(names, widths, left=left, color=shade, label=phase)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    steps = [stage["batch_ms"]["p50"] for stage in stages]
    axes.barh(names, steps, fill=False, edgecolor="black", label="the step")
    axes.invert_yaxis()
    axes.set(xlabel="time, ms (medians over the steps)", title="Phases, and the step around them")
    axes.legend(fontsize="small")


def operation_shares(kernels):
    """{operation: share of the time of all kernels}."""
    shares = Counter()
    for kernel in kernels:
        shares[operation_of(kernel["name"])] += kernel["share"]
    return shares


def draw_kernels(axes, summary):
    """The share of the device's time that the kernels of each operation take, the largest on the left."""
    stages = [stage for stage in measured(summary) if stage["kernels"]]
    shares = [operation_shares(stage["kernels"]) for stage in stages]
    rows = [f"stage {stage['stage']}" for stage in stages]
    left = [0.0] * len(stages)
    for name, _ in sum(shares, Counter()).most_common():
        widths = [100 * share[name] for share in shares]
        axes.barh(rows, widths, left=left, label=name, color=COLORS[name])
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    of_what = "the device's" if device_of(summary).type == "cuda" else "the operators'"
    axes.set(xlim=(0, 100), xlabel=f"share of {of_what} time, %", title="Kernels of each stage, by operation")
    axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(0, -0.17), ncols=3)


def kernel_points(summary):
    """(kernel, stage, FLOP per byte, FLOP per second) of each of our kernels in each profiled stage."""
    work = kernel_work(llama.Config(**summary["config"]))
    for stage in measured(summary):
        for kernel in stage["kernels"] or []:
            if kernel["name"] in work:
                amount = work[kernel["name"]]
                yield (
                    kernel["name"],
                    stage["stage"],
                    amount.flop / amount.bytes,
                    amount.flop / kernel["average_us"] * 1e6,
                )


def draw_roofline(axes, summary):
    """One symbol a kernel, one colour a stage. Below the slanted line memory limits, below the level one arithmetic."""
    ceilings = summary["ceilings"]
    points = list(kernel_points(summary))
    ridge = ceilings["flop_per_second"] / ceilings["bytes_per_second"]
    intensities = [x for _, _, x, _ in points] + [ridge]
    ends = min(0.1, *intensities) / 2, max(intensities) * 4
    line = [
        min(x * ceilings["bytes_per_second"], ceilings["flop_per_second"]) / 1e12 for x in (ends[0], ridge, ends[1])
    ]
    axes.plot((ends[0], ridge, ends[1]), line, color="black", label="reached by a copy and by the library's matmul")
    if ceilings["peak_tflops"]:
        axes.axhline(ceilings["peak_tflops"], color="black", linestyle=":", label="peak arithmetic of the datasheet")
    names = sorted({name for name, *_ in points})
    for name, stage, x, y in points:
        axes.plot(x, y / 1e12, MARKERS[names.index(name)], color=colour(stage), alpha=0.7)
    for name in names:
        axes.plot([], [], MARKERS[names.index(name)], color="0.4", label=name)
    for stage in sorted({stage for _, stage, *_ in points}):
        axes.plot([], [], "s", color=colour(stage), label=f"stage {stage}")
    if not points:
        axes.text(0.5, 0.4, "None of our kernels ran on a device here", transform=axes.transAxes, ha="center")
    axes.set(xscale="log", yscale="log", xlabel="arithmetic intensity, FLOP/byte", ylabel="TFLOP/s", title="Roofline")
    axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(0, -0.17), ncols=2)


def pictures(summary):
    """{name: (draw, alternative text)} of what the summary has the figures for."""
    chosen = {
        "loss": (draw_loss, "Loss at every step of every stage"),
        "speed": (draw_speed, "Samples a second of the baseline and of every stage"),
        "phases": (draw_phases, "Forward, backward and optimizer time of every stage beside the time of its step"),
    }
    if not measured(summary):
        return {}
    if any(stage["kernels"] for stage in measured(summary)):
        chosen["kernels"] = (draw_kernels, "Share of each operation's kernels in every stage")
    if summary["ceilings"]:
        chosen["roofline"] = (draw_roofline, "Our kernels under the device's ceilings of bandwidth and arithmetic")
    return chosen


def png(draw, summary):
    """The picture as the bytes of a PNG file."""
    figure, axes = plt.subplots(figsize=(7, 4))
    draw(axes, summary)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=130, bbox_inches="tight")
    plt.close(figure)
    return data.getvalue()


def write_overview(summary, path):
    """Loss, speed, phases and kernels in one PNG file."""
    chosen = [draw for name, (draw, _) in pictures(summary).items() if name != "roofline"]
    figure, grid = plt.subplots(2, 2, figsize=(14, 9), layout="constrained")
    for axes, draw in zip(grid.flat, chosen, strict=False):
        draw(axes, summary)
    for axes in grid.flat[len(chosen) :]:
        axes.set_axis_off()
    figure.suptitle(setting(summary))
    figure.savefig(path, dpi=110)
    plt.close(figure)
