"""The CSV files of rocprofv3. Columns are found by name: ROCm 7 has more of them than 6, and in another order."""

from profiling.readers.files import csv_chunks, csv_header
from profiling.readers.statistics import COLUMNS, counter_means

PATTERNS = {
    "kernels": ("*kernel_stats.csv",),
    "dispatches": ("*kernel_trace.csv",),
    "markers": ("*marker_api_trace.csv",),
    "calls": ("*hip_api_trace.csv",),
    "counters": ("*counter_collection.csv",),
}
RECORDS_WARM_UP = True

KERNEL_TRACE = {"Kernel_Name": "Name", "Start_Timestamp": "Start", "End_Timestamp": "End"}
API_TRACE = {"Function": "Name", "Start_Timestamp": "Start", "End_Timestamp": "End"}
COUNTER_COLLECTION = {"Kernel_Name": "Name", "Counter_Name": "Counter", "Counter_Value": "Value"}


def recognizes(path, content):
    if path.suffix != ".csv":
        return False
    if content == "kernels":
        return "TotalDurationNs" in csv_header(path)
    return content not in ("markers", "calls") or "Function" in csv_header(path)


def kernel_tables(path):
    return (chunk[COLUMNS] for chunk in csv_chunks(path, {name: name for name in COLUMNS}))


def dispatches(path):
    return csv_chunks(path, KERNEL_TRACE)


def ranges(path, content):
    return csv_chunks(path, API_TRACE)


def counters(path):
    return counter_means(csv_chunks(path, COUNTER_COLLECTION, words=("Name", "Counter")))
