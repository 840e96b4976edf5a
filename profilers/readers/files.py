"""What the readers share: errors about files, CSV files in bounded memory, and tables of intervals."""

import contextlib
import csv
import itertools
import operator
import sqlite3
import zlib

import numpy as np
import pandas as pd

from measure.command_line import Failure

CHUNK_ROWS = 200_000  # rows of a trace that are in memory at a time
LONGEST_ROW = 2**17  # characters
TEXT = {"encoding": "utf-8", "errors": "replace"}  # the profilers write the bytes of a name as they are


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
    with reported(path), open(path, **TEXT) as file:
        return next(csv.reader(file))


def csv_chunks(path, columns, words=("Name",)):
    """Yields tables of the columns {name in the file: new name}, CHUNK_ROWS rows at a time, at least one.

    All columns except words must be numbers. Raises Unreadable if a column is missing or a line is damaged.
    """
    header = csv_header(path)
    missing = [name for name in columns if name not in header]
    if missing:
        raise Unreadable(f"{path} has no column {missing[0]}: it is not what its name says")
    free = header.index(next(name for name, new in columns.items() if new == "Name"))
    chosen = operator.itemgetter(*map(header.index, columns))
    with reported(path), open(path, newline="\n", **TEXT) as file:
        next(file)
        rows = map(chosen, csv_rows(file, free, len(header)))
        chunks = iter(lambda: list(itertools.islice(rows, CHUNK_ROWS)), [])
        for chunk in itertools.chain([next(chunks, [])], chunks):
            table = pd.DataFrame(chunk, columns=list(columns.values()), dtype=object)
            for name in table.columns.drop("Name"):
                cells = table[name].str.strip('"')
                table[name] = cells if name in words else pd.to_numeric(cells)
            yield require_numbers(table, path, words)


def csv_rows(lines, free, count):
    """Yields rows of count fields, of which the one with the number free is text and may have several lines."""
    record = ""
    for line in lines:
        record += line
        row = csv_row(record, free, count)
        if len(record) > LONGEST_ROW or record != line and csv_row(line, free, count):
            break
        if row:
            yield row
            record = ""
    if record:
        raise ValueError(f"no row of {count} fields: {record[:40]}")


def csv_row(text, free, count):
    """The fields of a row, or None if it is not whole.

    rocprofv3 writes a quotation mark in a name as it is. Therefore the other fields are taken off both ends of the row,
    and what is left is the name. If all marks in it are doubled, another program has escaped them.
    """
    *before, rest = text.rstrip("\r\n").split(",", free)
    name, *after = rest.rsplit(",", count - free - 1)
    is_quoted = len(name) > 1 and name[0] == name[-1] == '"'
    if len(before) + len(after) < count - 1 or not is_quoted and ('"' in name or "," in name):
        return None
    name = name[1:-1] if is_quoted else name
    return [*before, name if '"' in name.replace('""', "") else name.replace('""', '"'), *after]


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
