"""What the readers share: errors about files, JSON and CSV files, and tables whose figures can be."""

import contextlib
import functools
import io
import json
import re
import sys

import numpy as np
import pandas as pd

from measure.command_line import UsageError, printable, require_file

TEXT = {"encoding": "utf-8-sig", "errors": "replace"}  # the profilers write the bytes of a name as they are
WORDS = ["Name", "Counter", "Thread"]  # columns; all others are numbers
shown = functools.cache(printable)  # of a few names that fill long columns


class Unreadable(UsageError):
    """A profile cannot be read; the message names the file, the problem and the remedy."""


class OtherFormat(Unreadable):
    """A file is of another program than its name says."""


@contextlib.contextmanager
def reported(path):
    """Turn what parsers raise, and what contents of another kind raise where they are used, into Unreadable."""
    require_file(path)
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise Unreadable(f"{path} is damaged or incomplete ({lines[0]}): profile again") from error


@functools.cache  # a report reads a file several times
def note(text):
    print(printable(f"note: {text}"), file=sys.stderr)


@functools.lru_cache(maxsize=1)  # parsing may take seconds
def read_json(path):
    """Return the contents of a file of JSON, in which C++ may have written nan, inf, and tabs in names."""
    text = path.read_text(**TEXT)
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return json.loads(re.sub(r"(?<=: )-?(nan|inf)(?=[,}\s])", "NaN", text), strict=False)


def read_csv(path, columns):
    """Read the columns {name in the file: new name} of a CSV file."""
    # A number that is cut off is still one: without its newline the last line cannot be trusted.
    text = path.read_text(**TEXT)
    if not text.endswith("\n"):
        raise ValueError("its last line is cut off")
    table = pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False)  # a name may be "nan"
    if missing := columns.keys() - set(table):
        remedy = ", but of rocprof v1: record with rocprofv3" if "AverageNs" in text or "BeginNs" in text else ""
        raise Unreadable(f"{path} has no column {min(missing)}: it is no such file of rocprofv3{remedy}")
    if len(table) and not isinstance(table.index, pd.RangeIndex):  # pandas takes the first field for an index
        raise ValueError("rows have too many fields")
    return table[list(columns)].rename(columns=columns)


def usable(path, rows):
    """Return the rows whose figures can be, with names that a terminal only shows; a note counts the others."""
    numbers = {name: pd.to_numeric(rows[name], errors="coerce") for name in rows if name not in WORDS}
    figures = pd.DataFrame(numbers, rows.index)
    # NaN lies in no range. An unsigned duration of a kernel that ends before it starts is beyond 2^63.
    are_good = (figures.ge(0) & figures.lt(2.0**63)).all(axis="columns")
    are_good &= figures.get("Start", 0) <= figures.get("End", 2.0**63)
    if bad := (~are_good).sum():
        reason = f"{bad} of {len(rows)} rows have figures that cannot be, as where a kernel ends before it starts"
        if bad == len(rows):
            raise ValueError(reason)
        note(f"{path}: {reason}: left out")
    shares = figures.get("Percentage", pd.Series(100)).sum()
    if len(rows) and not 99 < shares < 101:
        note(f"{path}: its percentages add up to {shares:.1f}, not to 100: does it lack kernels?")
    # Numbers are converted again: beside NaN, large ones lost their last digits.
    columns = rows[are_good].items()
    return pd.DataFrame({name: c.map(shown) if name in WORDS else pd.to_numeric(c) for name, c in columns})


def intervals(rows=()):
    """Return a table of Name, Start and End (integers, ns): of kernels on the device, or of ranges on the host."""
    table = pd.DataFrame(rows, columns=["Name", "Start", "End"])
    return table.astype({"Start": "int64", "End": "int64"})


def within(rows, *windows):
    """Return the rows whose Start lies within one of the windows, (start, end) in ns."""
    inside = np.zeros(len(rows), dtype=bool)
    for window in windows:
        inside |= rows["Start"].between(*window).to_numpy()
    return rows[inside]
