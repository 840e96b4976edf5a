"""Results on disk: their header, their files, and why something has none."""

import argparse
import math
import re
import shlex
from datetime import datetime
from pathlib import Path

import tiny_llama_v3 as llama

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


class Unavailable(Exception):
    """Something cannot run here; the message says why."""


def require_finite(loss):
    """Arithmetic on NaN takes another time than that on numbers: a run that diverged has none to show."""
    if not math.isfinite(loss):
        raise Unavailable(f"the run diverged: the loss is {loss}")


def describe(error):
    """One line for a report."""
    if isinstance(error, Unavailable):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def header(benchmark, device, argv):
    """The fields that every result begins with."""
    arguments = shlex.join(["python", "-m", f"benchmarks.{benchmark}", *argv])
    return {
        "benchmark": benchmark,
        "command": re.sub(r" --output-dir[ =]('[^']*'|\S+)", "", arguments),  # a private path, without effect
        "date": datetime.now().isoformat(timespec="seconds"),
        "environment": llama.environment(device),
    }


class ResultFile:
    """<benchmark>_<device>_<date>_<time>.json, written whole or not at all as often as there is more to save."""

    def __init__(self, folder, result):
        device = re.sub(r"[^a-z0-9]+", "-", result["environment"]["device"].lower()).strip("-") or "cpu"
        self.folder = folder
        self.stem = f"{result['benchmark']}_{device}_{datetime.now():%Y%m%d_%H%M%S}"
        self.path = None

    def save(self, result):
        if self.path is None:
            self.path = llama.write_new_json(self.folder, self.stem, result)
        else:
            llama.write_json(self.path, result)


def time_limit(text):
    """The type of --time-limit."""
    if not float(text) >= 0:  # NaN is none either
        raise argparse.ArgumentTypeError(f"{text} is not a time: give a number of seconds")
    return float(text)
