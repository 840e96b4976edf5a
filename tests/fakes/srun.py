"""srun of Slurm 23: the options that job.slurm uses. One task a node, and every node is this machine."""

import argparse
import math
import os
import signal
import subprocess
import sys
import time

KILL_WAIT = 30  # seconds, as Slurm's by default: an agent that waits for another one does not end by SIGTERM

parser = argparse.ArgumentParser(prog="srun", allow_abbrev=False)
parser.add_argument("--ntasks", type=int, required=True)
parser.add_argument("--ntasks-per-node", type=int, choices=(1,), required=True)
parser.add_argument("--kill-on-bad-exit", type=int, choices=(0, 1), default=0)
parser.add_argument("--cpu-bind", choices=("none", "cores", "sockets", "threads"), default="cores")
parser.add_argument("program", nargs=argparse.REMAINDER)
options = parser.parse_args()
if options.cpu_bind != "none":  # what is bound here stays on its core, and so do its processes
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
tasks = [
    subprocess.Popen(
        options.program,
        env=os.environ | dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID"), str(node)),
        start_new_session=True,
    )
    for node in range(options.ntasks)
]


def end_all(number, _=None):
    """Send a signal to all processes of the tasks that are there, as Slurm does."""
    for task in tasks:
        if task.poll() is None:
            os.killpg(task.pid, number)


signal.signal(signal.SIGTERM, end_all)
kill_at = math.inf
while None in [task.poll() for task in tasks]:
    if kill_at == math.inf and options.kill_on_bad_exit and any(task.returncode for task in tasks):
        end_all(signal.SIGTERM)
        kill_at = time.monotonic() + KILL_WAIT
    if time.monotonic() > kill_at:
        end_all(signal.SIGKILL)
    time.sleep(0.05)
sys.exit(max(abs(task.returncode) for task in tasks))
