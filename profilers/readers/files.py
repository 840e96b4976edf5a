"""What the readers share: errors about files, CSV files in bounded memory, and tables of intervals."""

import contextlib
import sqlite3
import zlib

import numpy as np
import pandas as pd

from measure.command_line import Failure

CHUNK_ROWS = 200_000  # rows of a trace that are in memory at a time


class Unreadable(Failure):
    """A profile cannot be read; the message names the file, the problem and the remedy."""


@contextlib.contextmanager
def reported(path):
    """Turns errors of the parsers, and what contents of another kind raise where they are used, into Unreadable."""
    contents = (AttributeError, LookupError, TypeError, ArithmeticError, RecursionError)
    try:
        yield
    except (ValueError, sqlite3.Error, zlib.error, EOFError, OSError, *contents) as error:  # pandas' are ValueErrors
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise Unreadable(f"{path} is damaged or incomplete ({lines[0]}): profile again") from error


def csv_header(path):
    """The columns of a CSV file. The profilers end every line, so that an unfinished last line was cut off."""
    with reported(path), open(path, "rb") as file:
        if file.seek(0, 2) == 0:
            raise Unreadable(f"{path} is empty: the program ended before the profiler wrote it")
        file.seek(-1, 2)
        if file.read() != b"\n":
            raise Unreadable(f"{path} is cut off in its last line: profile again")
        return list(pd.read_csv(path, nrows=0).columns)


def csv_chunks(path, columns, words=("Name",)):
    """Yields tables of the columns {name in the file: new name}, CHUNK_ROWS rows at a time, at least one.

    All columns except words must be numbers. Raises Unreadable if a column is missing or a line is damaged.
    """
    header = csv_header(path)
    missing = [name for name in columns if name not in header]
    if missing:
        raise Unreadable(f"{path} has no column {missing[0]}: it is not what its name says")
    text = {name: str for name, new in columns.items() if new in words}
    with reported(path), pd.read_csv(path, usecols=list(columns), dtype=text, chunksize=CHUNK_ROWS) as reader:
        for chunk in reader:
            yield require_numbers(chunk.fillna(dict.fromkeys(text, "")).rename(columns=columns), path, words)


def require_numbers(table, path, words):
    if "StdDev" in table:
        table.loc[table["Calls"] == 1, "StdDev"] = 0.0  # undefined for a single call in SQL
    numbers = table.drop(columns=list(words))
    is_numeric = all(pd.api.types.is_numeric_dtype(kind) for kind in numbers.dtypes)
    if len(table) and not (is_numeric and np.isfinite(numbers).all(axis=None)):
        raise Unreadable(f"{path} has rows without all their numbers: profile again")
    return table


def intervals(rows=()):
    """A table of Name, Start and End (integers, ns): of kernels on the device, or of ranges on the host."""
    table = pd.DataFrame(rows, columns=["Name", "Start", "End"])
    table["Name"] = table["Name"].map(str)
    return table.astype({"Name": object, "Start": "int64", "End": "int64"})


def within(rows, window):
    """The rows whose Start lies within (start, end), in ns."""
    return within_any(rows, [window])


def within_any(rows, windows):
    """The rows whose Start lies within one of the windows, [(start, end), ...] in ns."""
    inside = np.zeros(len(rows), dtype=bool)
    for window in windows:
        inside |= rows["Start"].between(*window).to_numpy()
    return rows[inside]
