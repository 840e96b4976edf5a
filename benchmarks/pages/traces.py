"""Keep one step of a profiled run, and draw the kept steps with arrows to their signs.

    python -m benchmarks.pages.traces          record a step of each of RECORDED on this GPU

A result, trace_<name>_<device>_<date>.json, is a Chrome trace of the kernels, the host's launch calls and the named
ranges of one step, which https://ui.perfetto.dev and the readers of profilers/ open. draw(folder, path, name) makes a
picture of docs/trainer.md; `python -m benchmarks.pages.publish` calls it.

Exit codes: 0 done, 1 a run failed, 2 the request cannot be met.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

if not __package__:
    print("run it from the root as python -m benchmarks.pages.traces", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from benchmarks.pages.long_table import long_table
from measure.command_line import Parser, program
from measure.drawing import MUTED, RED, save_png, style
from measure.results import RESULTS, ROOT, ResultFile, header
from measure.tables import number, percent
from profilers.kernel_names import short_name
from profilers.plot import draw_bars, draw_operations, draw_ranges
from profilers.readers import read_dispatches, read_ranges, torch_trace
from profilers.timeline import LAUNCH, typical_step

SIZES = ["--batch-size", "8", "--seq-len", "128", "--num-steps", "10"]
RECORDED = {  # {name of a result: flags of its run}
    "trace_stage4": ["--stage", "4"],
    "trace_stage5": ["--stage", "5", "--use-amp"],
    "trace_stage8": ["--stage", "8", "--use-amp"],
}
KEPT = (*torch_trace.ON_DEVICE, *(category for kind in torch_trace.CATEGORIES.values() for category in kind))
FIELDS = ("ph", "cat", "name", "pid", "tid")


def one_step(path):
    """Return the events of the typical step of a trace.json; ts and dur are in us, ts since the step began."""
    start, end = (ns / 1e3 for ns in typical_step(read_ranges(path)))
    kept = []
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "M":  # the name of a process
            kept.append(event | {"ts": 0})
        # Of what ran inside the step only kernels, launch calls and named ranges.
        elif event.get("cat") in KEPT and start <= event["ts"] and event["ts"] + event["dur"] <= end:
            times = {"ts": round(event["ts"] - start, 3), "dur": round(event["dur"], 3)}
            kept.append({key: event[key] for key in FIELDS} | times)
    return kept


def record(name, flags, device, folder):
    """Run the script under its profiler and keep a step in the folder. Return the path of the result."""
    with tempfile.TemporaryDirectory() as scratch:
        command = ["tiny_llama_v3.py", *flags, *SIZES]
        own = ["--profile", scratch, "--output-dir", scratch]
        subprocess.run([sys.executable, *command, *own], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        run = {"benchmark": name, "command": "python -m benchmarks.pages.traces", "run": " ".join(["python", *command])}
        result = header(name, device, []) | run
        result |= {"displayTimeUnit": "ms", "traceEvents": one_step(Path(scratch) / "trace.json")}
    file = ResultFile(folder, result)
    file.save(result)
    return file.path


# ----------------------------------------------------------------------------------------------------------------------
# Pictures: three rows (phases and launch calls of the host, kernels of the device), and arrows to the signs

KERNELS, LAUNCHES, PHASES = range(3)  # the rows, from below


def read_step(path):
    """Return the kernels, the launch calls and the phases of a kept step: Name, Start, End in ns; begin, end in ms."""
    ranges, calls = read_ranges(path), read_ranges(path, "calls")
    launches = calls[calls["Name"].str.match(LAUNCH)]
    phases = ranges[ranges["Name"].isin(("forward", "backward", "optimizer"))]
    tables = read_dispatches(path), launches, phases
    return [table.assign(begin=table["Start"] / 1e6, end=table["End"] / 1e6) for table in tables]


def point(axes, text, x_ms, row, text_x, text_y):
    """Draw an arrow from a text, at text_x (0 to 1 of the width) and text_y (rows), to a time in a row."""
    axes.annotate(
        text,
        (x_ms, row + 0.4),
        (text_x, text_y),
        textcoords=axes.get_yaxis_transform(),
        color=RED,
        ha="center",
        va="center",
        arrowprops={"arrowstyle": "->", "color": RED, "linewidth": 1.5},
    )


def mark_stage4(kernels, launches, whole, part):
    """Mark that the host is ahead of the device, which is busy with one kernel."""
    issued, lasts = launches["end"].max(), kernels["end"] - kernels["begin"]
    longest = kernels.loc[lasts.idxmax()]
    same = kernels["Name"] == longest["Name"]
    share = percent(lasts[same].sum() / lasts.sum())
    name, at = short_name(longest["Name"]), longest[["begin", "end"]].mean()
    point(whole, "the host has issued everything:\nits clock stops here", issued, LAUNCHES, 0.5, 1.6)
    point(whole, "the device is done", kernels["end"].max(), KERNELS, 0.9, 1.6)
    point(whole, f"one kernel: {name}, {share} of all kernels' time", at, KERNELS, 0.35, -0.6)
    part.set_xlim(0, 1.1 * issued)
    # At which of the long kernels the device is when the host's clock stops.
    reached = (kernels["begin"][same] < issued).sum()
    part.set_title(f"The beginning: when all is launched, the device is at long kernel {reached} of {same.sum()}")


def median_gap(kernels):
    """Return the median time between two kernels, in us."""
    return (kernels["begin"] - kernels["end"].shift()).median() * 1e3


def mark_stage5(kernels, launches, whole, part):
    """Mark that the device waits for the host."""
    lasts = kernels["end"] - kernels["begin"]
    busy = percent(lasts.sum() / kernels["end"].max())
    # A quarter of all kernels is in the middle of the forward pass.
    shown = kernels[len(kernels) // 4 :].head(6)
    begin, end = shown["begin"].min(), shown["end"].max()
    between = (shown["end"].iloc[2] + shown["begin"].iloc[3]) / 2
    point(whole, f"a kernel runs for {busy} of the step", begin, KERNELS, 0.3, -0.6)
    gap, kernel = (number(us, 2) for us in (median_gap(kernels), lasts.median() * 1e3))
    point(part, f"a gap: {gap} us in the median, beside {kernel} us of a kernel", between, KERNELS, 0.5, -0.6)
    launch = launches[launches["begin"] < shown["begin"].iloc[3]].iloc[-1]
    point(part, "until the host gets to the next launch", launch["end"], LAUNCHES, 0.45, PHASES + 0.4)
    part.set_xlim(begin - 0.05, end + 0.05)
    part.set_title("Six kernels of the forward pass")


def mark_stage8(kernels, launches, whole, part):
    """Mark that neither waits: the kernels run back to back."""
    count = f"{len(launches)} launches for {len(kernels)} kernels"
    point(whole, count, launches["end"].max(), LAUNCHES, 0.6, LAUNCHES + 0.6)
    first = kernels["begin"].min()
    text = f"gaps of {number(median_gap(kernels), 2)} us in the median"
    point(part, text, kernels["end"][kernels["end"] > first + 0.05].min(), KERNELS, 0.5, -0.6)
    part.set_xlim(first, first + 0.1)
    part.set_title("A tenth of a millisecond: the kernels follow each other without the host")


PICTURES = {  # {result: (title, function that marks the sign)}
    "trace_stage4": ("Stage 4, fp32: the host runs ahead", mark_stage4),
    "trace_stage5": ("Stage 5, bf16: the device waits for the host", mark_stage5),
    "trace_stage8": ("Stage 8, bf16: one launch a phase", mark_stage8),
}


def draw(folder, path, name):
    """Draw a kept step: all of it, and a part."""
    results = long_table(folder, name)
    if results.empty:
        raise llama.UsageError(f"{folder} lacks {name}_*.json: python -m benchmarks.pages.traces records it on a GPU")
    kernels, launches, phases = read_step(folder / results["file"].iloc[0])
    title, mark = PICTURES[name]
    with style():
        figure, panels = plt.subplots(2, 1, figsize=(12, 6.4), layout="constrained")
        for axes in panels:
            draw_ranges(axes, 0, kernels["End"].max(), phases)
            for name in axes.texts:
                name.set_clip_on(True)  # where a part does not show its phase
            draw_bars(axes, 0, launches, LAUNCHES, color=MUTED)
            draw_operations(axes, 0, kernels, lambda operation: KERNELS)
            axes.set_yticks([0.4, 1.4, 2.4], ["device: kernels", "host: launch calls", "host: phases"])
            axes.set(xlabel="ms since the step began", ylim=(-0.9, 3))
        panels[0].set_xlim(0, 1.02 * kernels["end"].max())
        panels[0].set_title(f"{title} ({results['device'].iloc[0]}, recorded by torch.profiler)")
        mark(kernels, launches, *panels)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, ncols=6, fontsize=9, loc="outside lower center")
        save_png(figure, path, dpi=100)


# ----------------------------------------------------------------------------------------------------------------------
# Command line


@program("traces.py")
def main(argv):
    parser = Parser("traces.py", __doc__)
    parser.add_argument("--output-dir", type=Path, default=RESULTS, metavar="DIR", help="(default: benchmarks/results)")
    options = parser.parse_args(argv)
    device = llama.select_device("auto")
    if device.type != "cuda":
        raise llama.UsageError("there is no GPU: a trace of a CPU has no launches to show")
    folder = llama.writable_folder("--output-dir", str(options.output_dir))
    for name, flags in RECORDED.items():
        try:
            print(f"Trace: {record(name, flags, device, folder)}", flush=True)
        except subprocess.CalledProcessError as error:
            print(f"{' '.join(error.cmd[1:])} ended with {error.returncode}: run it by itself", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
