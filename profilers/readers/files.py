"""What the readers share: errors about files, CSV files, and tables of intervals."""

import contextlib
import csv
import sqlite3
import zlib

import numpy as np
import pandas as pd

from measure.command_line import Failure

TEXT = {"encoding": "utf-8", "errors": "replace"}  # the profilers write the bytes of a name as they are


class Unreadable(Failure):
    """A profile cannot be read; the message names the file, the problem and the remedy."""


@contextlib.contextmanager
def reported(path):
    """Turn errors of the parsers, and what contents of another kind raise where they are used, into Unreadable."""
    contents = (AttributeError, LookupError, TypeError, ArithmeticError, RecursionError)
    try:
        yield
    except (ValueError, sqlite3.Error, zlib.error, EOFError, OSError, *contents) as error:  # pandas' are ValueErrors
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise Unreadable(f"{path} is damaged or incomplete ({lines[0]}): profile again") from error


def csv_header(path):
    with reported(path), open(path, **TEXT) as file:
        header = next(csv.reader(file), None)
    if header is None:
        raise Unreadable(f"{path} is empty: the program ended before the profiler wrote it")
    return header


def read_csv(path, columns, words=("Name",)):
    """Read the columns {name in the file: new name} of a CSV file; all but the words are numbers.

    rocprofv3 writes a quotation mark or a comma in a kernel's name as it is. As no other field has any, a line is
    taken apart from both of its ends. If all marks in a name are doubled, another program has escaped them.
    """
    header = csv_header(path)
    missing = [name for name in columns if name not in header]
    with reported(path):
        text = path.read_text(**TEXT)
    if missing:
        raise Unreadable(f"{path} has no column {missing[0]}: it is not what its name says")
    if text[-1] != "\n":  # the profilers end every line
        raise Unreadable(f"{path} is cut off in its last line: profile again")
    fields = {new: f'"?(?P<{new}>[^",]*)"?' for new in columns.values()}
    fields["Name"] = '(?:"(?P<Name>.*)"|(?P<Bare>[^",]*))'
    line = ",".join(fields[columns[name]] if name in columns else "[^,]*" for name in header)
    rows = pd.Series(text.split("\n")[1:-1], dtype=object)
    with reported(path):
        table = rows.str.extract(f"^{line}$")
        table["Name"] = table.pop("Name").fillna(table.pop("Bare"))
        if table["Name"].isna().any():
            raise ValueError(f"no row of {len(header)} fields: {rows[table['Name'].isna()].iloc[0][:40]}")
        escaped = ~table["Name"].str.replace('""', "").str.contains('"')
        table["Name"] = table["Name"].mask(escaped, table["Name"].str.replace('""', '"'))
        numbers = table.columns.drop(list(words))
        table[numbers] = table[numbers].apply(pd.to_numeric)
    if "StdDev" in table:
        table.loc[table["Calls"] == 1, "StdDev"] = 0.0  # undefined for a single call in SQL
    if not np.isfinite(table[numbers].astype(float)).all(axis=None):
        raise Unreadable(f"{path} has rows without all their numbers: profile again")
    return table[list(columns.values())]


def intervals(rows=()):
    """Return a table of Name, Start and End (integers, ns): of kernels on the device, or of ranges on the host."""
    table = pd.DataFrame(rows, columns=["Name", "Start", "End"])
    table["Name"] = table["Name"].map(str)
    return table.astype({"Name": object, "Start": "int64", "End": "int64"})


def within(rows, window):
    """Return the rows whose Start lies within (start, end), in ns."""
    return within_any(rows, [window])


def within_any(rows, windows):
    """Return the rows whose Start lies within one of the windows, [(start, end), ...] in ns."""
    inside = np.zeros(len(rows), dtype=bool)
    for window in windows:
        inside |= rows["Start"].between(*window).to_numpy()
    return rows[inside]
