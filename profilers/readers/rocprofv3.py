"""Reads the CSV files of rocprofv3, with columns by name: ROCm 7 has more of them, in another order."""

from profilers.readers.files import read_csv

TIMES = {"Start_Timestamp": "Start", "End_Timestamp": "End"}
KERNELS = {"Kernel_Name": "Name"} | TIMES
RANGES = {"Function": "Name"} | TIMES
STATISTICS = {name: name for name in ("Name", "Calls", "TotalDurationNs", "Percentage", "MinNs", "MaxNs")}
COUNTERS = KERNELS | {"Counter_Name": "Counter", "Counter_Value": "Value"}
LABELS = {"Guid": "Guid", "Process_Id": "Pid", "Agent_Id": "Agent", "Queue_Id": "Queue", "Stream_Id": "Stream"}
FILES = {  # content: (pattern of the files, columns that are read)
    "dispatches": ("*kernel_trace.csv", KERNELS),
    "counted": ("*counter_collection.csv", KERNELS),  # a row for each counter
    "markers": ("*marker_api_trace.csv", RANGES),
    "calls": ("*hip_api_trace.csv", RANGES),
    "counters": ("*counter_collection.csv", COUNTERS),
    "statistics": ("*kernel_stats.csv", STATISTICS),
}
PATTERNS = {content: pattern for content, (pattern, _) in FILES.items()}


def read(path, content):
    table = read_csv(path, FILES[content][1], LABELS)
    return table.drop_duplicates() if content == "counted" else table
