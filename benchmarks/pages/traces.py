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
from profilers.plot import draw_bars, draw_operations
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
    """The events of the typical step of a trace.json; ts and dur are in us, ts since the step began."""
    start, end = (ns / 1e3 for ns in typical_step(read_ranges(path)))
    events = json.loads(path.read_text())["traceEvents"]
    inside = [e for e in events if e.get("cat") in KEPT and start <= e["ts"] and e["ts"] + e["dur"] <= end]
    processes = {event["pid"] for event in inside}
    names = [e | {"ts": 0} for e in events if e["ph"] == "M" and e["pid"] in processes]
    times = [{"ts": round(e["ts"] - start, 3), "dur": round(e["dur"], 3)} for e in inside]
    return names + [{key: e[key] for key in FIELDS} | time for e, time in zip(inside, times, strict=True)]


def record(name, flags, device, folder):
    """Runs the script under its profiler and keeps a step in folder. Returns the path of the result."""
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


class Step:
    """A kept step: tables of Name, Start and End, in ns since it began; durations and gaps in us."""

    def __init__(self, path):
        self.kernels, ranges, calls = read_dispatches(path), read_ranges(path), read_ranges(path, "calls")
        self.phases = ranges[ranges["Name"].isin(("forward", "backward", "optimizer"))]
        self.launches = calls[calls["Name"].str.match(LAUNCH)]
        self.kernel_us = (self.kernels["End"] - self.kernels["Start"]) / 1e3
        self.gap_us = (self.kernels["Start"] - self.kernels["End"].shift()).dropna() / 1e3
        self.longest = self.kernels.loc[self.kernel_us.idxmax()]


def draw_rows(axes, step):
    """Draws the three rows, in ms since the step began."""
    for (left, width), name in zip(
        draw_bars(axes, 0, step.phases, PHASES, color="0.85", edgecolor="0.4"), step.phases["Name"], strict=True
    ):
        if width > 0.06 * step.kernels["End"].max() / 1e6:  # otherwise the name does not fit
            axes.text(left + width / 2, PHASES + 0.4, name, ha="center", va="center", fontsize=10, clip_on=True)
    draw_bars(axes, 0, step.launches, LAUNCHES, color=MUTED)
    draw_operations(axes, 0, step.kernels, lambda operation: KERNELS)
    axes.set_yticks([0.4, 1.4, 2.4], ["device: kernels", "host: launch calls", "host: phases"])
    axes.set_xlabel("ms since the step began")


def point(axes, text, x_ms, row, text_x, text_y):
    """Draws an arrow from a text, at text_x (0 to 1 of the width) and text_y (rows), to a time in a row."""
    axes.annotate(
        text, (x_ms, row + 0.4), (text_x, text_y), xycoords="data", textcoords=axes.get_yaxis_transform(),
        color=RED, ha="center", va="center", arrowprops={"arrowstyle": "->", "color": RED, "linewidth": 1.5},
    )  # fmt: skip


def mark_stage4(step, whole, part):
    """Marks that the host is ahead of the device, which is busy with one kernel."""
    issued, done = step.launches["End"].max() / 1e6, step.kernels["End"].max() / 1e6
    name = step.longest["Name"]
    same = step.kernels["Name"] == name
    share = step.kernel_us[same].sum() / step.kernel_us.sum()
    begin = (step.longest["Start"] + step.longest["End"]) / 2e6
    point(whole, "the host has issued everything:\nits clock stops here", issued, LAUNCHES, 0.5, 1.6)
    point(whole, "the device is done", done, KERNELS, 0.9, 1.6)
    point(whole, f"one kernel: {short_name(name)}, {percent(share)} of all kernels' time", begin, KERNELS, 0.35, -0.6)
    part.set_xlim(0, 1.1 * issued)
    behind = f"{int((step.kernels['Start'][same] < 1e6 * issued).sum())} of {same.sum()}"
    part.set_title(f"The beginning: when all is launched, the device is at long kernel {behind}", fontsize=11)


def mark_stage5(step, whole, part):
    """Marks that the device waits for the host."""
    busy = step.kernel_us.sum() * 1e3 / step.kernels["End"].max()
    middle = len(step.kernels) // 4
    shown = step.kernels.iloc[middle : middle + 6]
    point(whole, f"a kernel runs for {percent(busy)} of the step", shown["Start"].iloc[0] / 1e6, KERNELS, 0.3, -0.6)
    part.set_xlim(shown["Start"].iloc[0] / 1e6 - 0.05, shown["End"].iloc[-1] / 1e6 + 0.05)
    begin, end = shown["End"].iloc[2] / 1e6, shown["Start"].iloc[3] / 1e6
    gap, kernel = step.gap_us.median(), step.kernel_us.median()
    text = f"a gap: {number(gap, 2)} us in the median, beside {number(kernel, 2)} us of a kernel"
    point(part, text, (begin + end) / 2, KERNELS, 0.5, -0.6)
    launch = step.launches[step.launches["Start"] < shown["Start"].iloc[3]].iloc[-1]
    middle_ms = (launch["Start"] + launch["End"]) / 2e6
    point(part, "until the host gets to the next launch", middle_ms, LAUNCHES, 0.45, PHASES + 0.4)
    part.set_title("Six kernels of the forward pass", fontsize=11)


def mark_stage8(step, whole, part):
    """Marks that neither waits: the kernels run back to back."""
    last = step.launches["End"].iloc[-1] / 1e6
    count = f"{len(step.launches)} launches for {len(step.kernels)} kernels"
    point(whole, count, last, LAUNCHES, 0.6, LAUNCHES + 0.6)
    first = step.kernels["Start"].iloc[0] / 1e6
    part.set_xlim(first, first + 0.1)
    ends = step.kernels["End"] / 1e6
    gap = ends[ends > first + 0.05].iloc[0]
    point(part, f"gaps of {number(step.gap_us.median(), 2)} us in the median", gap, KERNELS, 0.5, -0.6)
    part.set_title("A tenth of a millisecond: the kernels follow each other without the host", fontsize=11)


PICTURES = {  # {result: (title, function that marks the sign)}
    "trace_stage4": ("Stage 4, fp32: the host runs ahead", mark_stage4),
    "trace_stage5": ("Stage 5, bf16: the device waits for the host", mark_stage5),
    "trace_stage8": ("Stage 8, bf16: one launch a phase", mark_stage8),
}


def draw(folder, path, name):
    """Writes the picture of a kept step. UsageError if there is no result."""
    results = long_table(folder, name)
    if results.empty:
        raise llama.UsageError(f"{folder} lacks {name}_*.json: python -m benchmarks.pages.traces records it on a GPU")
    newest = results.iloc[0]
    title, mark = PICTURES[name]
    step = Step(folder / newest["file"])
    with style():
        figure, (whole, part) = plt.subplots(2, 1, figsize=(12, 6.4), layout="constrained")
        for axes in (whole, part):
            draw_rows(axes, step)
            axes.set_ylim(-0.9, 3)
        whole.set_xlim(0, 1.02 * step.kernels["End"].max() / 1e6)
        whole.set_title(f"{title} ({newest['device']}, recorded by torch.profiler)")
        mark(step, whole, part)
        handles, labels = whole.get_legend_handles_labels()
        figure.legend(handles, labels, ncols=6, fontsize=9, frameon=False, loc="outside lower center")
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
