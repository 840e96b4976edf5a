"""Statistics of kernels: computed from single runs, or merged from several chunks, files or processes."""

import numpy as np
import pandas as pd

# As in rocprofv3. Times are in ns, Percentage is the share of all kernels' time (0 to 100), StdDev that of a sample.
COLUMNS = ["Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage", "MinNs", "MaxNs", "StdDev"]


def statistics_of(dispatches):
    """Computes a table of COLUMNS from Name, Start and End (ns)."""
    durations = (dispatches["End"] - dispatches["Start"]).groupby(dispatches["Name"].astype(object), sort=False)
    table = durations.agg(Calls="count", TotalDurationNs="sum", MinNs="min", MaxNs="max", StdDev="std")
    table["AverageNs"] = table["TotalDurationNs"] / table["Calls"]
    table["StdDev"] = table["StdDev"].fillna(0.0)  # of a single call
    return with_percentage(table.reset_index())


def merge(parts):
    """Merges the tables of COLUMNS of several parts of a run, the largest total first; empty without parts."""
    rows = pd.concat(parts or [pd.DataFrame(columns=COLUMNS)], ignore_index=True)
    table = rows.groupby("Name", sort=False).agg(
        Calls=("Calls", "sum"),
        TotalDurationNs=("TotalDurationNs", "sum"),
        MinNs=("MinNs", "min"),
        MaxNs=("MaxNs", "max"),
    )
    table["AverageNs"] = table["TotalDurationNs"] / table["Calls"]
    # Squared deviations from the common average: those within each part, and those of the parts' averages.
    squares = rows["StdDev"] ** 2 * (rows["Calls"] - 1)
    squares += rows["Calls"] * (rows["AverageNs"] - rows["Name"].map(table["AverageNs"]).astype(float)) ** 2
    table["StdDev"] = np.sqrt(squares.groupby(rows["Name"]).sum() / (table["Calls"] - 1).clip(lower=1))
    return with_percentage(table.reset_index())


def with_percentage(table):
    table["Percentage"] = 100 * table["TotalDurationNs"] / max(table["TotalDurationNs"].sum(), 1)
    return table.sort_values("TotalDurationNs", ascending=False, ignore_index=True, kind="stable")[COLUMNS]


def counter_sums(chunk):
    """Sums and counts of a table of Name, Counter and Value, for counter_means."""
    return chunk.groupby(["Name", "Counter"])["Value"].agg(["sum", "count"])


def counter_means(parts):
    """A table with a row for each kernel and a column for each counter, means of a run; empty without parts."""
    if not parts:
        return pd.DataFrame()
    sums = pd.concat(parts).groupby(level=[0, 1]).sum()
    return (sums["sum"] / sums["count"]).unstack("Counter")
