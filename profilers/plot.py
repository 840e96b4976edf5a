"""Draw a profile: the top kernels, the timeline of one step, and the roofline.

    python -m profilers.plot hotspots/hotspot_20261121_120000      kernels.png and timeline.png into that folder
    python -m profilers.plot profile.json --output pictures        roofline.png, from run_triton_profiling.py --json

Exit codes: 0 done, 1 there is nothing to draw, 2 the profile cannot be read.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

if not __package__:
    print("run it from the root as python -m profilers.plot", file=sys.stderr)
    sys.exit(2)

from measure.command_line import Parser, program
from measure.drawing import plt, save_png
from measure.kernels_alone import rates_alone, read_kernels_alone
from profilers.hotspots import hotspots, read_some_kernels
from profilers.kernel_names import COLLECTIVES, COLORS, OTHER, operation_of
from profilers.readers import read_processes, within
from profilers.readers.files import reported
from profilers.timeline import typical_step
from tiny_llama.spans import OPERATOR

TOP = 12
PHASES = ["forward", "backward", "optimizer"]
style = plt.rc_context({
    "font.size": 8, "axes.titlesize": 12, "figure.constrained_layout.use": True,
    "text.parse_math": False,  # names of C++ hold dollars
})  # fmt: skip


def kind_of(names):
    """Return what the rows of a table with these names are: of a CPU's recording, PyTorch's operators."""
    return "operators" if names.str.match(OPERATOR).all() else "kernels"


@style
def draw_kernels(table, steps, title):
    """Draw the kernels of a table of readers.COLUMNS that take the most time as bars, coloured by operation."""
    spots = hotspots(table, steps).head(TOP)[::-1]
    figure, axes = plt.subplots(figsize=(10, 0.36 * len(spots) + 1.4))
    rows = range(len(spots))  # and not names, as two kernels may have the same shortened name
    bars = axes.barh(rows, spots["ms"], color=spots["operation"].map(COLORS), tick_label=spots["kernel"])
    axes.bar_label(bars, spots["share"].map("{:.1f} %  ".format) + spots["operation"], padding=3)
    axes.set(xlabel="ms a step" if steps else "ms of the whole run", title=title)
    axes.margins(x=0.6)  # room for the labels
    return figure


def draw_bars(axes, start, rows, level, color, edgecolor=None, label=None):
    """Draw rows of Name, Start and End (ns) as bars, in ms since start. Return the bars."""
    left, width = (rows["Start"] - start) / 1e6, (rows["End"] - rows["Start"]) / 1e6
    # Without an edge, bars that are thinner than a pixel would vanish.
    return axes.barh(level, width, left=left, color=color, edgecolor=edgecolor or color, label=label)


def draw_phases(axes, start, end, ranges, level, narrowest=0.04):
    """Draw the phases of a step, with the names of those that take more than this part of it."""
    phases = ranges[ranges["Name"].isin(PHASES)]
    bars = draw_bars(axes, start, phases, level, "0.85", edgecolor="0.4")
    fits = phases["End"] - phases["Start"] > narrowest * (end - start)
    axes.bar_label(bars, phases["Name"].where(fits, ""), label_type="center")


def draw_operations(axes, start, kernels):
    """Draw kernels as bars, in ms since start, coloured by operation, each at the level in its column row."""
    # The longest first, as in the table, so that the legend begins with what matters.
    operations = kernels["Name"].map(operation_of)
    totals = (kernels["End"] - kernels["Start"]).groupby(operations).sum().sort_values(ascending=False)
    for name in totals.index:
        part = kernels[operations == name]
        draw_bars(axes, start, part, part["row"], COLORS[name], label=name)


@style
def draw_steps(processes, title):
    """Draw a step: the kernels of each process, their collectives apart, and the host of the first process.

    processes: as read_processes returns them. The step is one of the first process; the others are shown at that time.
    """
    start, end = typical_step(processes[0].ranges)
    figure, axes = plt.subplots(figsize=(12, 2.5 + len(processes)))
    kernels = []
    for number, process in enumerate(processes):
        shown = within(process.dispatches, (start, end))
        are_collective = shown["Name"].map(operation_of).isin(COLLECTIVES)
        own = {"kernels": f"kernels of device {number}", "operators": f"operators of process {number}"}
        rows = {True: f"collectives of device {number}", False: own[kind_of(process.dispatches["Name"])]}
        kernels.append(shown.assign(row=are_collective.map(rows)))
    draw_operations(axes, start, pd.concat(kernels))
    ranges = within(processes[0].ranges, (start, end))
    layers = ranges[ranges["Name"].str.match(r"layers\.\d+ ")]
    draw_bars(axes, start, layers, "layers (host)", "0.7", edgecolor="0.4")
    draw_phases(axes, start, end, ranges, "phases (host)")
    axes.set(xlabel="ms since the step began", xlim=(0, None), title=title)
    figure.legend(ncols=5, loc="outside lower center")
    return figure


@style
def draw_roofline(result):
    """Draw arithmetic intensity and speed of the kernels under the measured ceilings of bandwidth and arithmetic.

    result: of read_kernels_alone.
    """
    ceilings, environment = result["ceilings"], result["environment"]
    bandwidth, arithmetic = ceilings["GB/s"], ceilings["TFLOP/s"]
    points = rates_alone(result).set_index("kernel")
    figure, axes = plt.subplots(figsize=(10, 5))
    intensity = np.sort([*points["FLOP a byte"], 1e3 * arithmetic / bandwidth])
    # At x FLOP a byte, memory feeds x * bandwidth FLOP a second; from the ridge on, the units limit.
    reachable = (intensity * bandwidth / 1e3).clip(max=arithmetic)
    axes.loglog(intensity, reachable, "k", label=f"{bandwidth:.4g} GB/s, {arithmetic:,.3g} TFLOP/s")
    for name, x, y in points[["FLOP a byte", "TFLOP/s"]].itertuples():
        axes.plot(x, y, "o", color=COLORS.get(name, COLORS[OTHER]), label=name)
    interpreted = ", kernels interpreted" if environment["arch"] == "cpu" else ""
    title = f"Roofline, ceilings measured: {environment['device']}{interpreted}"
    axes.set(xlabel="FLOP for each byte that must be moved", ylabel="TFLOP/s", title=title)
    figure.legend(loc="outside right upper")
    return figure


def pictures_of(path):
    """Return {file name: figure} of all pictures that a folder, a trace or a JSON has the data for."""
    if path.suffix == ".json" and not path.name.endswith("trace.json"):
        with reported(path):
            return {"roofline.png": draw_roofline(read_kernels_alone(path))}
    (table, steps, _), processes, name = read_some_kernels(path), read_processes(path), path.resolve().name
    title = f"{name}: the {kind_of(table['Name'])} that take the most time"
    pictures = {"kernels.png": draw_kernels(table, steps, title)}
    # With --timing step, a step's kernels may run after its range.
    if steps and not any((process.ranges["Name"] == "steps").any() for process in processes):
        pictures["timeline.png"] = draw_steps(processes, f"{name}: one step")
    return pictures


@program("plot")
def main(argv):
    parser = Parser("plot", __doc__)
    parser.add_argument("profiles", type=Path, nargs="+", metavar="profile", help="folder or file")
    parser.add_argument("--output", type=Path, metavar="DIR", help="of the pictures (default: beside the profile)")
    options = parser.parse_args(argv)
    for path in options.profiles:
        pictures = pictures_of(path)
        for name, figure in pictures.items():
            picture = (options.output or (path if path.is_dir() else path.parent)) / name
            save_png(figure, picture, dpi=120)
            print(f"Picture: {picture}")
        if list(pictures) == ["kernels.png"]:
            print("No timeline: it needs a recording whose ranges hold the kernels of each step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
