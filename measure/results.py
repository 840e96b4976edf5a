"""Results on disk: their header, writing and reading them, and why something has none."""

import contextlib
import functools
import importlib.metadata
import json
import re
import shlex
from datetime import datetime
from pathlib import Path

import tiny_llama_v3 as llama
from measure.command_line import printable_fields, replacing
from tiny_llama import hardware
from tiny_llama.files import open_input

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

TIMES = re.compile(r"(.+_)?ms|us")  # names of the fields that hold times, in the objects and lists below them too
# Differences, which have any sign. Those of times are of several processes, and null where they were not measured.
DIFFERENCES = "exposed_communication_ms", "own_ms", "behind_ms", "relative_bias"
NUMBERS = int, float
# Options of a benchmark that name a private folder, without effect on what is measured.
PRIVATE = r" ('--(output-dir|save)=[^']*'|--(output-dir|save)[ =]('[^']*'|\S+))"


class Unavailable(Exception):
    """Something cannot run here; the message says why."""


def import_library(name):
    """Return a module of a library that need not be there."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise Unavailable(f"{error.name} is not installed") from error


def describe(error):
    """Return an error in one line, for a report."""
    if isinstance(error, Unavailable):
        return str(error)
    first, *rest = str(error).strip().splitlines() or [""]
    text = f"{first} {rest[0].strip()}" if first.endswith(":") and rest else first
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def versions(*packages):
    """Return {distribution: version} of the packages that are installed."""
    distributions = importlib.metadata.packages_distributions()
    return {name: importlib.metadata.version(name) for package in packages for name in distributions.get(package, [])}


def header(benchmark, device, argv, part="benchmarks"):
    """Return the fields that every result begins with: the command, and the commit, device and versions.

    part: the folder of the program.
    """
    arguments = shlex.join(["python", "-m", f"{part}.{benchmark}", *argv])
    return {
        "benchmark": benchmark,
        "command": re.sub(PRIVATE, "", arguments),
        "date": datetime.now().isoformat(timespec="seconds"),
        "environment": hardware.environment(device),
    }


def write_json(path, result, follow=False):
    """Replace the file, whole or not at all; follow as for replacing()."""
    result = json.loads(json.dumps(result), parse_constant=lambda name: None)  # JSON has no NaN: it becomes null
    with replacing(path, follow) as file:
        file.write_text(json.dumps(result, indent=1) + "\n")


class ResultFile:
    """<benchmark>_<device>_<date>_<time>.json, written whole or not at all as often as there is more to save."""

    def __init__(self, folder, result):
        device = re.sub(r"[^a-z0-9]+", "-", result["environment"]["device"].lower()).strip("-") or "cpu"
        self.folder = folder
        self.stem = f"{result['benchmark']}_{device}_{datetime.now():%Y%m%d_%H%M%S}"
        self.path = None

    def save(self, result):
        # The first time under a name that no other result has, then over itself.
        if self.path is None:
            self.path = llama.write_new_json(self.folder, self.stem, result)
        else:
            write_json(self.path, result)


def is_figure(value):
    """Return whether a value is a finite number, and not negative."""
    return type(value) in NUMBERS and 0 <= value < 1e300  # a whole number of 300 digits is no float


def leaves_of(value, kinds):
    """Yield a value, or those within its objects and lists of these kinds, dict or list."""
    if isinstance(value, kinds):
        for part in value.values() if isinstance(value, dict) else value:
            yield from leaves_of(part, kinds)
    else:
        yield value


class Record(dict):
    """An object of a result's JSON, which knows its file: a field that is missing or wrong is told with it."""

    def __init__(self, path, fields):
        super().__init__(printable_fields(fields))
        self.path = path
        for name, value in self.items():
            if not self.can_hold(name, value):
                self.refuse(name, value)

    def can_hold(self, field, value):
        """Return whether a field can have a value."""
        if field in DIFFERENCES:
            return value is None or type(value) in NUMBERS and abs(value) < 1e300
        is_time = TIMES.fullmatch(field) and not (value is None and self.get("error"))  # what failed has no times
        if is_time:
            return all(is_figure(part) and part > 0 for part in leaves_of(value, (dict, list)))
        # Of other fields some hold words, or null for what was not measured. Their objects are Records themselves.
        return all(map(is_figure, (part for part in leaves_of(value, list) if type(part) in NUMBERS)))

    def refuse(self, field, value):
        """Raise UsageError for what a field holds."""
        raise llama.UsageError(f"{self.path} has {field}: {str(value)[:60]}, which cannot be: measure again")

    def __missing__(self, field):
        raise llama.UsageError(f"{self.path} has no {field}: measure again, or take the file away")


def read_result(path):
    """Return the Record in a file; UsageError if it cannot be read or holds none."""
    try:
        with open_input(path) as file:
            result = json.load(file, object_hook=functools.partial(Record, path))
    except FileNotFoundError as error:
        raise llama.UsageError(f"{path} is not there: name a result or a folder of results") from error
    except (OSError, ValueError, RecursionError) as error:
        raise llama.UsageError(f"{path} cannot be read ({error}): measure again, or take the file away") from error
    if not isinstance(result, Record):
        raise llama.UsageError(f"{path} is no result: take the file away")
    return result


def recorded_config(fields):
    """Return the llama.Config of a result, which may have fields that it no longer has."""
    return llama.Config(**{name: value for name, value in fields.items() if name in llama.Config.__dataclass_fields__})


@contextlib.contextmanager
def damage_reported(what):
    """Turn what results of other contents raise where they are used into UsageError; what: the name of the result."""
    try:
        yield
    except Exception as error:
        # Errors that name the file themselves stay as they are.
        if isinstance(error, OSError) or hasattr(error, "exit_code"):
            raise
        raise llama.UsageError(f"{what} is damaged ({error!r}): measure again") from error
