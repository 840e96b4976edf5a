"""Counters of NVIDIA Nsight Compute: ncu --page raw --csv --print-units base."""

import pandas as pd

from profiling.readers.files import Unreadable, reported

PATTERNS = {"counters": ("ncu_raw.csv",)}
RECORDS_WARM_UP = False  # run_ncu counts within the range "step" alone


def recognizes(path, content):
    return path.name.startswith("ncu")


def beside(path, content):
    return None


def counters(path):
    """A line of names, a line of units, then a line a kernel run; metrics have two underscores in their names."""
    with reported(path):
        table = pd.read_csv(path, skiprows=[1], thousands=",")
    if "Kernel Name" not in table:
        raise Unreadable(f"{path} is no table of ncu --page raw --csv: profile again")
    metrics = [name for name in table if "__" in name and pd.api.types.is_numeric_dtype(table[name])]
    yield table.melt("Kernel Name", metrics, "Counter", "Value").rename(columns={"Kernel Name": "Name"})
