"""Reads the CSV files of rocprofv3, with columns by name: ROCm 7 has more of them, in another order."""

from functools import partial

from profilers.readers.files import read_csv

TIMES = {"Start_Timestamp": "Start", "End_Timestamp": "End"}
COUNTED = {"Kernel_Name": "Name", "Counter_Name": "Counter", "Counter_Value": "Value"}

statistics = partial(read_csv, columns={name: name for name in ("Name", "Calls", "TotalDurationNs", "MinNs", "MaxNs")})
ranges = partial(read_csv, columns={"Function": "Name"} | TIMES)
counters = partial(read_csv, columns=COUNTED | TIMES)


def dispatches(path):
    """Return the kernels of a trace, or of a file with a row for each counter."""
    return read_csv(path, {"Kernel_Name": "Name"} | TIMES).drop_duplicates()
