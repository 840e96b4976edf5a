"""Reads the rocpd databases of rocprofv3 since ROCm 7, through their views, and the CSV of `rocpd summary`."""

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
DISPATCHES = 'SELECT name, start, "end" FROM kernels'
RANGES = """SELECT name, extdata, start, "end" FROM regions WHERE category LIKE '{}%'"""
CATEGORIES = {"markers": "MARKER", "calls": "HIP"}  # prefixes of the categories of regions
COUNTERS = "SELECT kernel_name, counter_name, value, start FROM counters_collection"


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
    chunks = query(path, COUNTERS, ["Name", "Counter", "Value", "Start"])
    return (chunk.astype({"Value": float, "Start": "int64"}) for chunk in chunks)


def query(path, sql, columns):
    """Yields the rows of a query as tables of these columns, CHUNK_ROWS rows at a time, at least one."""
    address = f"{path.resolve().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
        ((size,),) = connection.execute("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size")
        if path.stat().st_size < size:
            raise Unreadable(f"{path} is cut off: {path.stat().st_size} of {size} bytes; profile again")
        cursor = connection.execute(sql)
        while rows := cursor.fetchmany(files.CHUNK_ROWS):
            yield pd.DataFrame(rows, columns=columns)
        yield pd.DataFrame([], columns=columns)
