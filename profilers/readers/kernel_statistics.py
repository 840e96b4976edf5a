"""Statistics of kernels: computed from single runs, or merged from the tables of several processes."""

import numpy as np
import pandas as pd

# As in rocprofv3. Times are in ns, Percentage is the share of all kernels' time (0 to 100), StdDev that of a sample.
COLUMNS = ["Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage", "MinNs", "MaxNs", "StdDev"]


def statistics_of(dispatches):
    """Compute a table of COLUMNS from Name, Start and End (ns)."""
    durations = (dispatches["End"] - dispatches["Start"]).groupby(dispatches["Name"], sort=False)
    table = durations.agg(Calls="count", TotalDurationNs="sum", MinNs="min", MaxNs="max", StdDev="std")
    table["StdDev"] = table["StdDev"].fillna(0.0)  # of a single call
    return completed(table)


def merge(parts):
    """Merge the tables of COLUMNS of several parts of a run, the largest total first; empty without parts."""
    rows = pd.concat(parts or [pd.DataFrame(columns=COLUMNS)], ignore_index=True)
    kernels = rows.groupby("Name", sort=False)
    table = kernels[["Calls", "TotalDurationNs"]].sum()
    table["MinNs"], table["MaxNs"] = kernels["MinNs"].min(), kernels["MaxNs"].max()
    average = table["TotalDurationNs"] / table["Calls"]
    # Squared deviations from the common average: those within each part, and those of the parts' averages.
    squares = rows["StdDev"] ** 2 * (rows["Calls"] - 1)
    squares += rows["Calls"] * (rows["AverageNs"] - rows["Name"].map(average).astype(float)) ** 2
    freedom = (table["Calls"] - 1).clip(lower=1)
    table["StdDev"] = np.sqrt(squares.groupby(rows["Name"]).sum() / freedom)
    return completed(table)


def completed(table):
    table["AverageNs"] = table["TotalDurationNs"] / table["Calls"]
    table["Percentage"] = 100 * table["TotalDurationNs"] / max(table["TotalDurationNs"].sum(), 1)
    table = table.rename_axis("Name").reset_index()
    return table.sort_values("TotalDurationNs", ascending=False, ignore_index=True, kind="stable")[COLUMNS]
