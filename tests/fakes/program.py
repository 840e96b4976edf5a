"""In the place of tiny_llama_v3.py, run_triton_profiling.py and of what profiles in Python: what they leave, at once.

A program that is neither is run, without a profile.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import records

words = sys.argv[2:] if sys.argv[1] == "-m" else sys.argv[1:]
name, arguments = Path(words[0]).name, words[1:]
status = int(os.environ.get("PROGRAM_STATUS", 0))


def interrupted(*_):
    print("Interrupted after 2 of 10 steps.", flush=True)
    sys.exit(130)


signal.signal(signal.SIGINT, interrupted)
print("tiny llama:", *arguments, flush=True)  # now tests may interrupt it
time.sleep(float(os.environ.get("PROGRAM_SLEEP", 0)))
profiles = name in ("profilers.host_profile", "torch_profile.py")
if profiles and not arguments[1].endswith("/tiny_llama_v3.py"):
    status = subprocess.run([sys.executable, *arguments[1:]]).returncode
if name == "profilers.host_profile":
    Path(arguments[0]).write_bytes(b"pstats")
    sys.exit(int(os.environ.get("HOST_PROFILE_STATUS", status)))
if "--json" in arguments:
    Path(arguments[arguments.index("--json") + 1]).write_text(os.environ["PROGRAM_JSON"])
if "--profile" in arguments or name == "torch_profile.py":
    is_whole = name == "torch_profile.py"
    folder = Path(arguments[0] if is_whole else arguments[arguments.index("--profile") + 1])
    run = records.make_run(int(os.environ.get("FAKE_STEPS", 3)))
    if is_whole:
        run.ranges.append(records.Record("program", run.api_calls[0].start, run.dispatches[-1].end))
    else:
        run = run._replace(dispatches=run.in_steps())  # nothing else is profiled
    records.write_stats(folder / "kernel_stats.csv", run.dispatches)
    categories = {"dispatches": "kernel", "ranges": "user_annotation", "api_calls": "cuda_runtime"}
    rows = [
        (category, r.name, r.start / 1e3, r.duration / 1e3)
        for part, category in categories.items()
        for r in getattr(run, part)
    ]
    (folder / "trace.json").write_text(records.chrome_trace(*rows))
sys.exit(status)
