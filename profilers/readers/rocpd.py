"""Reads the rocpd databases of rocprofv3 since ROCm 7, through their views, and the CSV of `rocpd summary`.

The schemas 3.0 and 4.1 have the same columns of kernels, regions and memory; their counters are in different views.
"""

import contextlib
import json
import sqlite3

import pandas as pd

from profilers.readers import files
from profilers.readers.files import Unreadable, csv_chunks, csv_header, intervals
from profilers.readers.kernel_statistics import COLUMNS

PATTERNS = {
    "kernels": ("*kernels_summary.csv",),
    "dispatches": ("*.db",),
    "markers": ("*.db",),
    "calls": ("*.db",),
    "counters": ("*.db",),
    "memory": ("*.db",),
}
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
DISPATCHES = "SELECT name, start, [end] FROM kernels"
RANGES = "SELECT name, extdata, start, [end] FROM regions WHERE category LIKE '{}%'"
CATEGORIES = {"markers": "MARKER", "calls": "HIP"}  # prefixes of the categories of regions
COUNTERS = {  # by view; the one of 4.1 has a row for each instance of a counter, the one of 3.0 has their sum
    "kernel_pmc_events": "SELECT name, pmc_name, sum(pmc_value), start FROM {} GROUP BY guid, id, pmc_name",
    "counters_collection": "SELECT kernel_name, counter_name, value, start FROM {}",
}
MEMORY = """SELECT type, address, size FROM memory_allocations
    WHERE level != 'SCRATCH' AND (agent_type = 'GPU' OR type = 'FREE') ORDER BY start"""  # a FREE names no agent


def recognizes(path, content):
    if content == "kernels":
        return path.suffix == ".csv" and "DURATION (nsec)" in csv_header(path)
    return path.suffix == ".db"


def beside(path, content):
    return path


def kernel_tables(path):
    return (chunk[COLUMNS] for chunk in csv_chunks(path, SUMMARY))


def dispatches(path):
    return map(intervals, query(path, DISPATCHES, ["Name", "Start", "End"]))


def ranges(path, content):
    for chunk in query(path, RANGES.format(CATEGORIES[content]), ["Name", "Data", "Start", "End"]):
        names = [label_of(name, data) for name, data in zip(chunk["Name"], chunk["Data"], strict=True)]
        yield intervals(chunk[["Name", "Start", "End"]].assign(Name=names))


def label_of(name, data):
    """The name that the program gave a range. The database has roctx's function, roctxThreadRangeA, as its name.

    JSON is parsed here, not in SQL: SQLite may lack its JSON functions, and invalid JSON must not end the query.
    """
    try:
        return json.loads(data).get("message") or name
    except (TypeError, ValueError, AttributeError):  # None, invalid JSON, or not an object
        return name


def counters(path):
    view = max(views_of(path) & COUNTERS.keys(), default="counters_collection")
    chunks = query(path, COUNTERS[view].format(view), ["Name", "Counter", "Value", "Start"])
    return (chunk.astype({"Name": str, "Value": float, "Start": "int64"}) for chunk in chunks)


def memory(path):
    """Of what HIP allocates on GPUs, which is what PyTorch reserves."""
    held, total = {}, 0
    for chunk in query(path, MEMORY, ["type", "address", "size"]) if "memory_allocations" in views_of(path) else ():
        for kind, address, size in chunk.itertuples(index=False):
            total -= held.pop(address, 0)
            if kind != "FREE":
                held[address] = size
                total += size
            yield total


def views_of(path):
    return {name for chunk in query(path, "SELECT name FROM sqlite_master", ["Name"]) for name in chunk["Name"]}


def query(path, sql, columns):
    """Yields the rows of a query as tables of these columns, CHUNK_ROWS rows at a time, at least one."""
    address = f"{path.resolve().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
        connection.text_factory = lambda data: data.decode(**files.TEXT)
        ((size,),) = connection.execute("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size")
        if path.stat().st_size < size:
            raise Unreadable(f"{path} is cut off: {path.stat().st_size} of {size} bytes; profile again")
        try:
            cursor = connection.execute(sql)
        except sqlite3.OperationalError as error:  # of a view or a column that another schema lacks
            versions = "SELECT value FROM rocpd_metadata WHERE tag = 'schema_version'"
            for (version,) in connection.execute(versions):
                reason = f"has rocpd's schema_version {version} ({error}), and 3.0 and 4.1 can be read"
                raise Unreadable(f"{path} {reason}: profile again with --output-format csv") from error
            raise
        while rows := cursor.fetchmany(files.CHUNK_ROWS):
            yield pd.DataFrame(rows, columns=columns)
        yield pd.DataFrame([], columns=columns)
