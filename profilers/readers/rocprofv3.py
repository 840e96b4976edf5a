"""Reads the CSV files of rocprofv3, with columns by name: ROCm 7 has more of them, in another order."""

from profilers.readers.files import csv_chunks, csv_header
from profilers.readers.kernel_statistics import COLUMNS

PATTERNS = {
    "kernels": ("*kernel_stats.csv",),
    "dispatches": ("*kernel_trace.csv",),
    "markers": ("*marker_api_trace.csv",),
    "calls": ("*hip_api_trace.csv",),
    "counters": ("*counter_collection.csv",),
}
RECORDS_WARM_UP = True
COLUMN_OF = {
    "kernels": "TotalDurationNs",
    "dispatches": "Kernel_Name",
    "markers": "Function",
    "calls": "Function",
    "counters": "Counter_Name",
}

KERNEL_TRACE = {"Kernel_Name": "Name", "Start_Timestamp": "Start", "End_Timestamp": "End"}
API_TRACE = {"Function": "Name", "Start_Timestamp": "Start", "End_Timestamp": "End"}
COUNTER_COLLECTION = {"Kernel_Name": "Name", "Counter_Name": "Counter", "Counter_Value": "Value"}
COUNTER_START = {"Start_Timestamp": "Start"}  # since ROCm 6.3


def recognizes(path, content):
    return path.suffix == ".csv" and COLUMN_OF[content] in csv_header(path)


def beside(path, content):
    """The files of a process have the same prefix, the name of -o or the process id."""
    for (pattern,) in PATTERNS.values():
        ending = pattern.lstrip("*")
        if path.name.endswith(ending):
            return path.with_name(path.name[: -len(ending)] + PATTERNS[content][0].lstrip("*"))
    return None


def kernel_tables(path):
    return (chunk[COLUMNS] for chunk in csv_chunks(path, {name: name for name in COLUMNS}))


def dispatches(path):
    return csv_chunks(path, KERNEL_TRACE)


def ranges(path, content):
    return csv_chunks(path, API_TRACE)


def counters(path):
    is_timed = COUNTER_START.keys() <= set(csv_header(path))
    return csv_chunks(path, COUNTER_COLLECTION | (COUNTER_START if is_timed else {}), words=("Name", "Counter"))
