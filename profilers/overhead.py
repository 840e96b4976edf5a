"""Measure what profiling adds to a training step.

    python -m profilers.overhead                                     get_trace.sh and get_hotspots.sh
    python -m profilers.overhead --scripts get_trace.sh -- --use-amp
    python -m profilers.overhead --output-dir DIR                    also writes DIR/overhead.json

Each script runs tiny_llama_v3.py once, after a run without a profiler. The median recorded step is compared with the
median step of the run without a profiler. Exit codes: 0 done, 2 a run failed or its result cannot be read.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

if not __package__:
    print("run it from the root as python -m profilers.overhead", file=sys.stderr)
    sys.exit(2)

from measure.command_line import Failure, Parser, program
from measure.results import write_json
from profilers.readers import Unreadable, read_ranges, steps_of

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ["--batch-size", "8", "--seq-len", "128", "--num-steps", "20"]


def time_command(command):
    """(standard output, seconds) of a command; raises Failure with the end of its output if it fails."""
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHON": sys.executable})
    if done.returncode:
        last_words = (done.stderr or done.stdout)[-500:].strip()
        raise Failure(f"{Path(command[0]).name} ended with {done.returncode}: {last_words}")
    return done.stdout, time.perf_counter() - start


def result_of(folder):
    """Reads the JSON that tiny_llama_v3.py wrote into a folder."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise Unreadable(f"{folder} holds no JSON of tiny_llama_v3.py")
    return json.loads(paths[-1].read_text())


def measured_step_ms(folder):
    """The median step that the program itself measured."""
    return result_of(folder)["summary"]["batch_ms"]["p50"]


def recorded_step_ms(folder):
    """The median step while the profiler was recording: torch.profiler records steps after the measured ones."""
    if (folder / "trace.json").exists():
        steps = steps_of(read_ranges(folder / "trace.json"))
        return statistics.median((steps["End"] - steps["Start"]) / 1e6)
    return measured_step_ms(folder / "run")


def measure(scripts, arguments):
    """{"date", "environment", "plain": {"ms", "seconds"}, "scripts": {name: {"tool", "ms", "ratio", "seconds"}}}

    ms is of the median step, seconds of the whole run, and ratio is relative to the plain run.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = [*PROGRAM, "--output-dir", str(folder / "plain")]
        _, seconds = time_command([sys.executable, str(ROOT / "tiny_llama_v3.py"), *own, *arguments])
        result = {
            "date": datetime.now().isoformat(timespec="seconds"),
            "environment": result_of(folder / "plain")["environment"],
            "plain": {"ms": measured_step_ms(folder / "plain"), "seconds": seconds},
            "scripts": {},
        }
        for script in scripts:
            output = folder / script
            text, seconds = time_command([str(ROOT / script), "--output", str(output), "--", *PROGRAM, *arguments])
            ms = recorded_step_ms(output)
            result["scripts"][script] = {
                "tool": text.splitlines()[0].removeprefix("Tool: ").split(" (")[0],
                "ms": ms,
                "ratio": ms / result["plain"]["ms"],
                "seconds": seconds,
            }
    return result


def parse(argv):
    parser = Parser("overhead", __doc__)
    parser.add_argument("--scripts", nargs="+", default=["get_trace.sh", "get_hotspots.sh"], metavar="SCRIPT")
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="also write overhead.json here")
    parser.add_argument("arguments", nargs="*", metavar="-- OPTIONS", help="of tiny_llama_v3.py")
    return parser.parse_args(argv)


@program("overhead")
def main(argv):
    options = parse(argv)
    result = measure(options.scripts, options.arguments)
    plain = result["plain"]
    print(f"without a profiler: {plain['ms']:.3f} ms a step, the run {plain['seconds']:.1f} s")
    for script, row in result["scripts"].items():
        figures = f"{row['ms']:.3f} ms a step, {row['ratio']:.2f} times; the run {row['seconds']:.1f} s"
        print(f"{script}: {figures}; {row['tool']}")
    if options.output_dir:
        write_json(options.output_dir / "overhead.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
