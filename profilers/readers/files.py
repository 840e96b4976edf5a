"""What the readers share: errors about files, CSV files, and tables of intervals."""

import contextlib
import io

import numpy as np
import pandas as pd

from measure.command_line import UsageError

TEXT = {"encoding": "utf-8", "errors": "replace"}  # the profilers write the bytes of a name as they are


class Unreadable(UsageError):
    """A profile cannot be read; the message names the file, the problem and the remedy."""


@contextlib.contextmanager
def reported(path):
    """Turn what parsers raise, and what contents of another kind raise where they are used, into Unreadable."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise Unreadable(f"{path} is damaged or incomplete ({lines[0]}): profile again") from error


def read_csv(path, columns):
    """Read the columns {name in the file: new name} of a CSV file; all but a Name and a Counter are numbers."""
    # A number that is cut off is still one: without its newline the last line cannot be trusted.
    text = path.read_text(**TEXT)
    if not text.endswith("\n"):
        raise ValueError("its last line is cut off")
    words = {name: str for name, new in columns.items() if new in ("Name", "Counter")}
    table = pd.read_csv(io.StringIO(text), dtype=words, keep_default_na=False)  # a name may be "nan"
    if missing := columns.keys() - set(table):
        raise Unreadable(f"{path} has no column {min(missing)}: it is no such file of rocprofv3")
    if not np.isfinite(table[list(columns.keys() - words)].astype(float)).all(axis=None):
        raise ValueError("rows lack numbers")
    if len(table) and not isinstance(table.index, pd.RangeIndex):  # pandas takes the first field for an index
        raise ValueError("rows have too many fields")
    return table[list(columns)].rename(columns=columns)


def intervals(rows=()):
    """Return a table of Name, Start and End (integers, ns): of kernels on the device, or of ranges on the host."""
    table = pd.DataFrame(rows, columns=["Name", "Start", "End"])
    table["Name"] = table["Name"].map(str)
    return table.astype({"Name": object, "Start": "int64", "End": "int64"})


def within(rows, *windows):
    """Return the rows whose Start lies within one of the windows, (start, end) in ns."""
    inside = np.zeros(len(rows), dtype=bool)
    for window in windows:
        inside |= rows["Start"].between(*window).to_numpy()
    return rows[inside]
