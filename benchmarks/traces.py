"""Keep one step of a profiled run, and draw the kept steps with arrows to what there is to see in them.

    python -m benchmarks.traces          record a step of each of RECORDED on this GPU

A result, trace_<name>_<device>_<date>.json, is a Chrome trace of the kernels, the host's launch calls and the named
ranges of one step, which https://ui.perfetto.dev and the readers of profiling/ open. draw_*(folder, path) make the
pictures of docs/trainer.md; `python -m benchmarks.publish` calls them.

Exit codes: 0 done, 1 a run failed, 2 the request cannot be met.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import tiny_llama_v3 as llama
from measure.results import RESULTS, ROOT, ResultFile, header
from profiling.readers import chrome, read_ranges
from profiling.timeline import typical_step
from tiny_llama_v3 import exit_code_of

SIZES = ["--batch-size", "8", "--seq-len", "128", "--num-steps", "10"]
RECORDED = {  # what a result is called: the flags of its run
    "trace_stage4": ["--stage", "4"],
    "trace_stage5": ["--stage", "5", "--use-amp"],
    "trace_stage8": ["--stage", "8", "--use-amp"],
}
KEPT = (*chrome.ON_DEVICE, *(category for kind in chrome.CATEGORIES.values() for category in kind))
FIELDS = ("ph", "cat", "name", "pid", "tid")


def one_step(path):
    """The events of the typical step of a trace.json, ts and dur in us, ts since the step began."""
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
        result = header("traces", device, []) | {"benchmark": name, "command": " ".join(["python", *command])}
        result |= {"displayTimeUnit": "ms", "traceEvents": one_step(Path(scratch) / "trace.json")}
    file = ResultFile(folder, result)
    file.save(result)
    return file.path


def run(argv):
    parser = llama.Parser("traces.py", __doc__)
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


def main(argv=None):
    return exit_code_of(lambda: run(argv), "traces.py")


if __name__ == "__main__":
    sys.exit(main())
