"""Keep one step of a profiled run, and draw the kept steps.

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
from measure.drawing import MUTED, RED, TEXT, save_png, style
from measure.results import RESULTS, ROOT, ResultFile, header
from measure.tables import number, percent
from profilers.plot import draw_bars, draw_operations, draw_phases
from profilers.readers import read_dispatches, read_ranges, torch_trace
from profilers.timeline import LAUNCH, step_figures, typical_step

SIZES = ["--batch-size", "8", "--seq-len", "128", "--num-steps", "10"]
RECORDED = {  # {name of a result: flags of its run}
    "trace_stage4": ["--stage", "4"],
    "trace_stage5": ["--stage", "5", "--use-amp"],
    "trace_stage8": ["--stage", "8", "--use-amp"],
}
KEPT = {category for kind in torch_trace.CATEGORIES.values() for category in kind}
FIELDS = ("ph", "cat", "name", "pid", "tid")


def one_step(path):
    """Return the events of the typical step of a trace.json; ts and dur are in us, ts since the step began."""
    start, end = (ns / 1e3 for ns in typical_step(read_ranges(path)))
    kept = []
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "M":  # the name of a process
            kept.append(event | {"ts": 0})
        # Of what ran inside the step, but for rounding, only kernels, launch calls and named ranges.
        elif event.get("cat") in KEPT and max(start - event["ts"], event["ts"] + event["dur"] - end) < 0.01:
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
# Pictures: three rows (phases and launch calls of the host, kernels of the device), of all and of twelve kernels

KERNELS, LAUNCHES, PHASES = range(3)  # the rows, from below
PICTURES = {
    "trace_stage4": "Stage 4, fp32: the host runs ahead",
    "trace_stage5": "Stage 5, bf16: the device waits for the host",
    "trace_stage8": "Stage 8, bf16: one launch a phase",
}


def draw(folder, path, name):
    """Draw a kept step: all of it, and twelve kernels."""
    results = long_table(folder, name)
    if results.empty:
        raise llama.UsageError(f"{folder} lacks {name}_*.json: python -m benchmarks.pages.traces records it on a GPU")
    file = folder / results["file"].iloc[0]
    kernels, ranges, calls = read_dispatches(file), read_ranges(file), read_ranges(file, "calls")
    launches = calls[calls["Name"].str.match(LAUNCH)]
    end, issued = kernels["End"].max(), launches["End"].max()
    # A quarter of all kernels ends in the middle of the forward pass.
    twelve = kernels.iloc[len(kernels) // 4 :].head(12)
    figures = step_figures(file)
    share = percent(figures["kernel_us"] * 1e3 / end)
    title = (
        f"{PICTURES[name]} ({results['device'].iloc[0]})\n"
        f"{figures['launches']:.0f} launches until {number(issued / 1e6)} ms (the red line), {figures['kernels']:.0f} "
        f"kernels until\n{number(end / 1e6)} ms, which run for {share} of this time (torch.profiler)"
    )
    with style():
        # Small and with many dots an inch, so that a slide can be read from the last row.
        figure, panels = plt.subplots(2, 1, figsize=(8, 5.4), layout="constrained")
        for axes in panels:
            draw_phases(axes, 0, end, ranges, PHASES, narrowest=0.12)
            for text in axes.texts:
                text.set_clip_on(True)  # where a part does not show its phase
            draw_bars(axes, 0, launches, LAUNCHES, color=MUTED)
            draw_operations(axes, 0, kernels.assign(row=KERNELS))
            axes.axvline(issued / 1e6, color=RED)
            axes.set_yticks(range(3), ["device: kernels", "host: launch calls", "host: phases"])
            axes.set(xlabel="ms since the step began", ylim=(-0.6, 2.6))
        panels[0].set_xlim(0, 1.02 * end / 1e6)
        panels[1].set_xlim(twelve["Start"].min() / 1e6, twelve["End"].max() / 1e6)
        panels[0].set_title(title, fontsize=TEXT)
        panels[1].set_title("Twelve kernels that follow each other")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, ncols=4, handlelength=1, columnspacing=1, loc="outside lower center")
        save_png(figure, path, dpi=150)


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
