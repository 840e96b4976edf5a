"""Reads the CSV files of rocprofv3, with columns by name: ROCm 7 has more of them, in another order."""

from profilers.readers.files import csv_header, read_csv
from profilers.readers.kernel_statistics import COLUMNS

PATTERNS = {
    "kernels": "*kernel_stats.csv",
    "dispatches": "*kernel_trace.csv",
    "markers": "*marker_api_trace.csv",
    "calls": "*hip_api_trace.csv",
    "counters": "*counter_collection.csv",
}
RECORDS_WARM_UP = True
TIMES = {"Start_Timestamp": "Start", "End_Timestamp": "End"}
OWN_COLUMNS = {  # by which a file of any name is recognized
    "kernels": "TotalDurationNs",
    "dispatches": "Kernel_Name",
    "markers": "Function",
    "calls": "Function",
    "counters": "Counter_Name",
}


def recognizes(path, content):
    return path.suffix == ".csv" and OWN_COLUMNS[content] in csv_header(path)


def beside(path, content):
    """Return the file with other content of a process, with the same prefix: the name of -o or the process id."""
    for pattern in PATTERNS.values():
        if path.match(pattern):
            return path.with_name(path.name.removesuffix(pattern[1:]) + PATTERNS[content][1:])
    return None


def kernel_table(path):
    return read_csv(path, {name: name for name in COLUMNS})


def dispatches(path):
    return read_csv(path, {"Kernel_Name": "Name"} | TIMES)


def ranges(path, content):
    return read_csv(path, {"Function": "Name"} | TIMES)


def counters(path):
    columns = {"Kernel_Name": "Name", "Counter_Name": "Counter", "Counter_Value": "Value"}
    if TIMES.keys() <= set(csv_header(path)):  # since ROCm 6.3
        columns["Start_Timestamp"] = "Start"
    return read_csv(path, columns, words=("Name", "Counter"))
