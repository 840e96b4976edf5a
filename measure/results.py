"""Results on disk: their header, writing and reading them, and why something has none."""

import contextlib
import functools
import json
import os
import re
import shlex
import tempfile
from datetime import datetime
from pathlib import Path

import tiny_llama_v3 as llama
from tiny_llama import hardware

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


class Unavailable(Exception):
    """Something cannot run here; the message says why."""


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
        "environment": hardware.environment(device),
    }


@contextlib.contextmanager
def scratch_beside(path):
    """A temporary folder beside path, whose files can be moved into place whole; UsageError if the disk is full."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".", suffix=".tmp") as scratch:
            yield Path(scratch)
    except OSError as error:
        reason = f"({error.strerror}): free space or give another path"
        raise llama.UsageError(f"{path} cannot be written {reason}") from error


def write_json(path, result):
    """Replaces the file, whole or not at all."""
    with scratch_beside(path) as scratch:
        os.replace(llama.write_new_json(scratch, "result", result), path)


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
            write_json(self.path, result)


class Record(dict):
    """An object of a result's JSON, which knows its file: a field that is missing is told with it."""

    def __init__(self, path, fields):
        super().__init__(fields)
        self.path = path

    def __missing__(self, field):
        raise llama.UsageError(f"{self.path} has no {field}: measure again, or take the file away")


def read_result(path):
    """The Record in a file; UsageError if it cannot be read or holds none."""
    try:
        result = json.loads(path.read_text(), object_hook=functools.partial(Record, path))
    except (OSError, ValueError) as error:
        raise llama.UsageError(f"{path} cannot be read ({error}): measure again, or take the file away") from error
    if not isinstance(result, Record):
        raise llama.UsageError(f"{path} is no result: take the file away")
    return result


def newest_first(folder, benchmark):
    """[(name, Record)] of a benchmark's results in a folder, the newest first."""
    results = [(path.name, read_result(path)) for path in folder.glob(f"{benchmark}_*.json")]
    # A run of the script itself has its date in its name only.
    return sorted(results, key=lambda item: (item[1].get("date", ""), item[0]), reverse=True)
