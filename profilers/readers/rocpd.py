"""Reads the rocpd databases of rocprofv3 since ROCm 7, through their views.

The schemas 3.0 and 4.1 have the same columns of kernels, regions and memory; their counters are in different views.
"""

import contextlib
import re
import sqlite3

import pandas as pd

from profilers.readers.files import OtherFormat, Unreadable, name_of, note_slowed

# The name of a range that the program opened is roctx's function, roctxThreadRangeA; its data have the program's name.
RANGES = """SELECT CASE WHEN json_valid(extdata) THEN ifnull(json_extract(extdata, '$.message'), name) ELSE name END
    AS Name, start AS Start, [end] AS [End]{labels} FROM regions WHERE category LIKE """
KERNELS = "SELECT name AS Name, start AS Start, [end] AS [End]{labels} FROM kernels"
QUERIES = {
    "dispatches": KERNELS,
    "counted": KERNELS,
    "markers": RANGES + "'MARKER%'",
    "calls": RANGES + "'HIP%'",
    "counters": "SELECT kernel_name AS Name, counter_name AS Counter, value AS Value, start AS Start"
    "{labels} FROM counters_collection",
    # An allocation, and a FREE, change what a process holds at an address; a FREE names no agent.
    "memory": """SELECT sum(held - before) OVER (PARTITION BY process ORDER BY start) AS Total FROM (
        SELECT *, lag(held, 1, 0) OVER (PARTITION BY process, address ORDER BY start) AS before FROM (
            SELECT start, address, CASE type WHEN 'FREE' THEN 0 ELSE size END AS held, ''{processes} AS process
            FROM memory_allocations WHERE level != 'SCRATCH' AND (agent_type = 'GPU' OR type = 'FREE')))""",
}
COUNTERS_OF_4 = """SELECT name AS Name, pmc_name AS Counter, sum(pmc_value) AS Value, start AS Start{labels}
    FROM kernel_pmc_events GROUP BY guid, id, pmc_name"""  # it has a row for each instance of a counter
PATTERNS = dict.fromkeys(QUERIES, "*.db")
LABELS = {"guid": "Guid", "pid": "Pid", "agent_id": "Agent", "queue_id": "Queue", "stream_id": "Stream"}


def read(path, content):
    if name_of(path) != path.name:
        raise Unreadable(f"{path} is compressed, and SQLite cannot read it so: gunzip it")
    views = set(query(path, "SELECT name FROM sqlite_master")["name"])
    if views and "kernels" not in views:
        raise OtherFormat(f"{path} is no database of rocprofv3, but perhaps of rocprof v1: record with rocprofv3")
    is_of_4 = "kernel_pmc_events" in views
    counted = "kernel_pmc_events" if is_of_4 else "counters_collection"
    if content == "dispatches" and counted in views and len(query(path, f"SELECT 1 FROM {counted} LIMIT 1")):
        note_slowed(path)
    return query(path, with_labels(path, COUNTERS_OF_4 if is_of_4 and content == "counters" else QUERIES[content]))


def with_labels(path, sql):
    """Return a query with those labels that the columns of its view know."""
    view = re.search(r"FROM (\w+)", sql)[1]
    known = set(query(path, f"SELECT name FROM pragma_table_info('{view}')")["name"])
    labels = "".join(f", ifnull({column}, '') AS {LABELS[column]}" for column in LABELS if column in known)
    processes = "".join(f" || '/' || ifnull({column}, '')" for column in ("guid", "pid") if column in known)
    return sql.replace("{labels}", labels).replace("{processes}", processes)


def query(path, sql):
    """Return the rows of a query as a table."""
    address = f"{path.resolve().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
        ((size,),) = connection.execute("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size")
        if path.stat().st_size < size:
            raise ValueError(f"cut off at {path.stat().st_size} of {size} bytes")
        connection.text_factory = lambda data: data.decode(errors="replace")
        try:
            return pd.read_sql(sql, connection)
        except pd.errors.DatabaseError as error:
            reason = f"is damaged, or has a schema of rocpd other than 3.0 and 4.1 ({error.__cause__})"
            raise Unreadable(f"{path} {reason}: profile again with --output-format csv") from error
