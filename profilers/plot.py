"""Draw a profile: the top kernels, the timeline of one step, and the roofline.

    python -m profilers.plot hotspots/hotspot_20261121_120000      kernels.png and timeline.png into that folder
    python -m profilers.plot profile.json --output pictures        roofline.png, from run_triton_profiling.py --json

Exit codes: 0 done, 1 there is nothing to draw, 2 the profile cannot be read.
"""

import os
import sys
from pathlib import Path

if not __package__:
    print("run it from the root as python -m profilers.plot", file=sys.stderr)
    sys.exit(2)

from measure.command_line import NothingRecorded, Parser, program
from measure.drawing import plt, save_png
from profilers.hotspots import hotspots
from profilers.kernel_names import COLLECTIVES, COLORS, OTHER, operation_of
from profilers.readers import Unreadable, read_processes, read_processes_apart, steps_of, within
from profilers.readers.files import reported
from profilers.readers.kernel_benchmark import read_kernel_benchmark
from profilers.timeline import typical_step

TOP = 12
PHASES = ("step", "forward", "backward", "optimizer")


def draw_kernels(table, steps, title):
    """Draws the kernels of a table of readers.COLUMNS that take the most time as bars, coloured by operation."""
    spots = hotspots(table, steps).head(TOP)[::-1]
    figure, axes = plt.subplots(figsize=(10, 0.36 * len(spots) + 1.4), layout="constrained")
    rows = range(len(spots))  # and not names, as two kernels may have the same shortened name
    bars = axes.barh(rows, spots["ms"], color=spots["operation"].map(COLORS), tick_label=spots["kernel"])
    labels = [f"{share:.1f} %  {name}" for share, name in zip(spots["share"], spots["operation"], strict=True)]
    axes.bar_label(bars, labels, padding=3, fontsize=8)
    axes.set_xlabel("ms a step" if steps else "ms of the whole run")
    axes.set_xlim(right=1.6 * spots["ms"].max())
    axes.tick_params(axis="y", labelsize=8)
    axes.set_title(title)
    return figure


def draw_bars(axes, start, rows, level, **style):
    """Draws rows of Name, Start and End (ns) as bars, in ms since start. Returns [(left, width)], in ms."""
    spans = [((a - start) / 1e6, (b - a) / 1e6) for a, b in zip(rows["Start"], rows["End"], strict=True)]
    axes.broken_barh(spans, (level, 0.8), **style)
    return spans


def draw_ranges(axes, start, end, ranges):
    """Draws the step above its phases, with their names, above its layers in two shades of grey."""
    for level, names in ((3, PHASES[:1]), (2, PHASES[1:])):
        rows = ranges[ranges["Name"].isin(names)]
        spans = draw_bars(axes, start, rows, level, color="0.85", edgecolor="0.4")
        for (left, width), name in zip(spans, rows["Name"], strict=True):
            if width > 0.04 * (end - start) / 1e6:  # otherwise the name does not fit
                axes.text(left + width / 2, level + 0.4, name, ha="center", va="center", fontsize=8)
    layers = ranges[ranges["Name"].str.match(r"layers\.\d+ ")]
    numbers = layers["Name"].str.extract(r"(\d+)")[0].astype(float)
    for parity, color in enumerate(("0.75", "0.6")):
        draw_bars(axes, start, layers[numbers % 2 == parity], 1, color=color)


def draw_operations(axes, start, kernels, level_of):
    """Draws kernels as bars, in ms since start, coloured by operation, at level_of(operation)."""
    operations = kernels["Name"].astype(str).map(operation_of)
    totals = (kernels["End"] - kernels["Start"]).groupby(operations).sum().sort_values(ascending=False)
    for name in totals.index:
        draw_bars(axes, start, kernels[operations == name], level_of(name), color=COLORS[name], label=name)


def draw_steps(processes, title):
    """Draw a step: of one process also its phases and layers, of several their collectives apart.

    processes: pairs of dispatches and ranges, tables of Name, Start and End (ns) by the same clock. The step is one of
    the first process; the others are shown at that time.
    """
    start, end = typical_step(processes[0][1])
    count = len(processes)
    size = 12, 3.6 if count == 1 else 1.2 + 1.1 * count
    figure, all_axes = plt.subplots(count, figsize=size, layout="constrained", sharex=True, squeeze=False)
    entries = {}
    for number, ((dispatches, ranges), axes) in enumerate(zip(processes, all_axes[:, 0], strict=True)):
        kernels = within(dispatches, (start, end))
        if count == 1:
            draw_ranges(axes, start, end, ranges[(ranges["Start"] >= start) & (ranges["End"] <= end)])
            draw_operations(axes, start, kernels, lambda operation: 0)
            rows = ["kernels", "layers", "phases (host)", "step"]
        else:
            draw_operations(axes, start, kernels, lambda operation: operation in COLLECTIVES)
            rows = ["kernels", "collectives"]
            axes.set_ylabel(f"process {number}")
        axes.set_yticks([0.4 + row for row in range(len(rows))], rows)
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    axes.set_xlabel("ms since the step began")
    figure.legend(entries.values(), entries, ncols=5, fontsize=7, loc="outside lower center")
    figure.suptitle(title)
    return figure


def draw_roofline(result):
    """Draw arithmetic intensity and speed of the kernels under the measured ceilings of bandwidth and arithmetic.

    result: of read_kernel_benchmark. Raises Unreadable if no kernel has bytes, arithmetic and time.
    """
    bandwidth, arithmetic = result["ceilings"]["GB/s"] / 1e3, result["ceilings"]["TFLOP/s"]
    ridge = arithmetic / bandwidth
    points = [k for k in result["kernels"] if k.get("flop") and k.get("bytes") and k["triton"]["ms"]]
    if not points:
        raise Unreadable("no kernel has both its bytes and its arithmetic recorded: there is no roofline to draw")
    figure, axes = plt.subplots(figsize=(10, 5), layout="constrained")
    intensity = [kernel["flop"] / kernel["bytes"] for kernel in points]
    left, right = min(*intensity, ridge) / 3, max(*intensity, ridge) * 3
    axes.loglog([left, ridge, right], [left * bandwidth, arithmetic, arithmetic], color="black")
    # Clear of the lines, by points of the page.
    clear = dict(textcoords="offset points", ha="right", va="bottom", fontsize=8)
    middle = (left * ridge) ** 0.5
    axes.annotate(f"{bandwidth * 1e3:.4g} GB/s", (middle, middle * bandwidth), (-6, 6), **clear)
    axes.annotate(f"{arithmetic:,.3g} TFLOP/s", (right, arithmetic), (0, 5), **clear)
    axes.margins(y=0.1)
    for x, kernel in zip(intensity, points, strict=True):
        color = COLORS.get(kernel["name"], COLORS[OTHER])
        axes.plot(x, kernel["flop"] / kernel["triton"]["ms"] / 1e9, "o", color=color, label=kernel["name"])
    axes.set_xlabel("FLOP for each byte that must be moved")
    axes.set_ylabel("TFLOP/s")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    environment = result["environment"]
    interpreted = ", kernels interpreted: no ceiling limits them" if environment["arch"] == "cpu" else ""
    axes.set_title(f"Roofline, ceilings measured: {environment['device']}{interpreted}")
    return figure


def shows_single_steps(ranges):
    """Whether a step's kernels run within its range; with --timing step they may run later."""
    return len(steps_of(ranges)) > 0 and not (ranges["Name"] == "steps").any()


def pictures_of(path, title):
    """{file name: figure} of all pictures that a folder, a trace or a JSON has the data for."""
    if path.suffix == ".json" and path.name != "trace.json":
        with reported(path):
            return {"roofline.png": draw_roofline(read_kernel_benchmark(path))}
    table, steps, number = read_processes(path)
    pictures = {}
    if len(table):
        pictures["kernels.png"] = draw_kernels(table, steps, f"{title}: the kernels that take the most time")
    processes = read_processes_apart(path)
    if len(processes) == number and all(shows_single_steps(ranges) for _, ranges in processes):
        of = f" of {number} processes" if number > 1 else ""
        pictures["timeline.png"] = draw_steps(processes, f"{title}: one step{of}")
    return pictures


def parse(argv):
    parser = Parser("plot", __doc__)
    parser.add_argument("profiles", type=Path, nargs="+", metavar="profile", help="folder or file")
    parser.add_argument("--output", type=Path, metavar="DIR", help="of the pictures (default: beside the profile)")
    parser.add_argument("--title", help="default: the name of the profile")
    return parser.parse_args(argv)


@program("plot")
def main(argv):
    options = parse(argv)
    for path in options.profiles:
        title = os.fsencode(options.title or path.resolve().name).decode(errors="replace")  # Matplotlib draws no other
        pictures = pictures_of(path, title)
        if not pictures:
            raise NothingRecorded(f"{path} holds no kernels: did the program use the GPU?")
        folder = options.output or (path if path.is_dir() else path.parent)
        for name, figure in pictures.items():
            save_png(figure, folder / name, dpi=120)
            print(f"Picture: {folder / name}")
        if "kernels.png" in pictures and "timeline.png" not in pictures:
            print("No timeline: it needs a recording whose ranges hold the kernels of each step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
