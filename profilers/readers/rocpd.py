"""Reads the rocpd databases of rocprofv3 since ROCm 7, through their views, and the CSV of `rocpd summary`.

The schemas 3.0 and 4.1 have the same columns of kernels, regions and memory; their counters are in different views.
"""

import contextlib
import json
import sqlite3

import pandas as pd

from profilers.readers.files import TEXT, Unreadable, csv_header, intervals, read_csv
from profilers.readers.kernel_statistics import COLUMNS

PATTERNS = dict.fromkeys(("dispatches", "markers", "calls", "counters", "memory"), "*.db")
PATTERNS["kernels"] = "*kernels_summary.csv"
RECORDS_WARM_UP = True

SUMMARY = {
    "Name": "Name",
    "Calls": "Calls",
    "DURATION (nsec)": "TotalDurationNs",
    "AVERAGE (nsec)": "AverageNs",
    "PERCENT (INC)": "Percentage",
    "MIN (nsec)": "MinNs",
    "MAX (nsec)": "MaxNs",
    "STD_DEV": "StdDev",
}
DISPATCHES = "SELECT name AS Name, start AS Start, [end] AS [End] FROM kernels"
RANGES = "SELECT name AS Name, start AS Start, [end] AS [End], extdata FROM regions WHERE category LIKE '{}%'"
CATEGORIES = {"markers": "MARKER", "calls": "HIP"}  # prefixes of the categories of regions
COUNTERS = {  # by view; the one of 4.1 has a row for each instance of a counter, the one of 3.0 has their sum
    "kernel_pmc_events": "SELECT name AS Name, pmc_name AS Counter, sum(pmc_value) AS Value, start AS Start "
    "FROM kernel_pmc_events GROUP BY guid, id, pmc_name",
    "counters_collection": "SELECT kernel_name AS Name, counter_name AS Counter, value AS Value, start AS Start "
    "FROM counters_collection",
}
MEMORY = """SELECT type, address, size FROM memory_allocations
    WHERE level != 'SCRATCH' AND (agent_type = 'GPU' OR type = 'FREE') ORDER BY start"""  # a FREE names no agent


def recognizes(path, content):
    if content == "kernels":
        return path.suffix == ".csv" and "DURATION (nsec)" in csv_header(path)
    return path.suffix == ".db"


def beside(path, content):
    return path


def kernel_table(path):
    return read_csv(path, SUMMARY)[COLUMNS]


def dispatches(path):
    return intervals(query(path, DISPATCHES))


def ranges(path, content):
    found = query(path, RANGES.format(CATEGORIES[content]))
    found["Name"] = [label_of(*row) for row in zip(found["Name"], found["extdata"], strict=True)]
    return intervals(found)


def label_of(name, data):
    """Return the name that the program gave a range. The database has roctx's function, roctxThreadRangeA, as its name.

    JSON is parsed here, not in SQL: SQLite may lack its JSON functions, and invalid JSON must not end the query.
    """
    try:
        return json.loads(data).get("message") or name
    except (TypeError, ValueError, AttributeError):  # None, invalid JSON, or not an object
        return name


def counters(path):
    view = max(views_of(path) & COUNTERS.keys(), default="counters_collection")
    return query(path, COUNTERS[view]).astype({"Name": str, "Value": float, "Start": "int64"})


def memory(path):
    """Return what HIP has allocated on GPUs after each change, which is what PyTorch reserves."""
    held, totals = {}, [0]
    if "memory_allocations" not in views_of(path):
        return totals
    for kind, address, size in query(path, MEMORY).itertuples(index=False):
        freed = held.pop(address, 0)
        if kind != "FREE":
            held[address] = size
        totals.append(totals[-1] - freed + held.get(address, 0))
    return totals


def views_of(path):
    return set(query(path, "SELECT name FROM sqlite_master")["name"])


def query(path, sql):
    """Return the rows of a query as a table."""
    address = f"{path.resolve().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
        connection.text_factory = lambda data: data.decode(**TEXT)
        ((size,),) = connection.execute("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size")
        if path.stat().st_size < size:
            raise Unreadable(f"{path} is cut off: {path.stat().st_size} of {size} bytes; profile again")
        try:
            return pd.read_sql(sql, connection)
        except pd.errors.DatabaseError as error:  # of a view or a column that another schema lacks
            versions = "SELECT value FROM rocpd_metadata WHERE tag = 'schema_version'"
            for (version,) in connection.execute(versions):
                if version.split(".")[0] in ("3", "4"):
                    break  # it is damaged
                reason = f"has rocpd's schema_version {version}, and 3.0 and 4.1 can be read"
                raise Unreadable(f"{path} {reason}: profile again with --output-format csv") from error
            raise
