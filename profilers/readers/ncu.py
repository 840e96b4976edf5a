"""Counters of NVIDIA Nsight Compute: ncu --page raw --csv --print-units base."""

import io

import pandas as pd

from profilers.readers.files import read_text

PATTERNS = {"counters": "*ncu_raw.csv"}  # whole_ncu_raw.csv is of a whole run


def read(path, content):
    """Read lines of names and of units, and a line for each kernel run; names of metrics contain "__"."""
    # The second line holds the units, which are base units: bytes and ns.
    table = pd.read_csv(io.StringIO(read_text(path)), skiprows=[1], dtype=str, keep_default_na=False)
    rows = table.melt("Kernel Name", [name for name in table if "__" in name], "Counter", "Value")
    rows["Value"] = pd.to_numeric(rows["Value"].str.replace(",", ""), errors="coerce")  # some are words
    return rows.rename(columns={"Kernel Name": "Name"}).dropna()
