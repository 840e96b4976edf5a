"""Counters of NVIDIA Nsight Compute: ncu --page raw --csv --print-units base."""

import pandas as pd

from profilers.readers.files import Unreadable

PATTERNS = {"counters": "ncu_raw.csv"}
RECORDS_WARM_UP = False  # ncu counts only within the range "step"


def recognizes(path, content):
    return path.name.startswith("ncu")


def beside(path, content):
    return None


def counters(path):
    """Read lines of names and of units, and a line for each kernel run; names of metrics contain "__"."""
    table = pd.read_csv(path, skiprows=[1], dtype=str, keep_default_na=False, encoding_errors="replace")
    if "Kernel Name" not in table:
        raise Unreadable(f"{path} is no table of ncu --page raw --csv: profile again")
    rows = table.melt("Kernel Name", [name for name in table if "__" in name], "Counter", "Value")
    rows["Value"] = pd.to_numeric(rows["Value"].str.replace(",", ""), errors="coerce")  # some are words
    return rows.rename(columns={"Kernel Name": "Name"}).dropna()
