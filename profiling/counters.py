#!/usr/bin/env python3
"""Print what the hardware counted for each kernel, and what follows from it.

    python profiling/counters.py counters/counter_20261121_120000

Reads the counter files of rocprofv3 (CSV or rocpd databases, of several passes) and ncu's raw CSV. Values are means of
a kernel's runs. Rates take their time from the uncounted run beside them, as counting slows kernels down.

Exit codes: 0 done, 1 nothing was counted, 2 the profile cannot be read.
"""

import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from profiling.command_line import Parser, positive  # noqa: E402
from profiling.kernel_stats import (  # noqa: E402
    Unreadable,
    csv_chunks,
    operation_of,
    query,
    read_step_stats,
    reported,
    short_name,
)

COUNTER_COLLECTION = {"Kernel_Name": "Name", "Counter_Name": "Counter", "Counter_Value": "Value"}
COUNTERS_SQL = "SELECT kernel_name, counter_name, value FROM counters_collection"
KIB = 1024  # of FETCH_SIZE and WRITE_SIZE
MOST_COLUMNS = 20  # that are printed; ncu counts hundreds


def read_counters(path):
    """A DataFrame with a row a kernel and a column a counter, the mean of a run; empty if nothing was counted."""
    path = Path(path)
    if not path.exists():
        raise Unreadable(f"{path} does not exist")
    if path.is_file():
        return read_counter_file(path)
    for pattern in ("ncu_raw.csv", "*counter_collection.csv", "*counters_results.db"):
        found = sorted(path.rglob(pattern))
        if found:
            # The same counter in several files (processes, passes) is one measurement more, not another column.
            return pd.concat(map(read_counter_file, found)).groupby(level=0).mean()
    return pd.DataFrame()


def read_counter_file(path):
    if path.name.startswith("ncu"):
        return read_ncu(path)
    if path.suffix == ".db":
        chunks = (chunk.astype({"Value": float}) for chunk in query(path, COUNTERS_SQL, ["Name", "Counter", "Value"]))
    else:
        chunks = csv_chunks(path, COUNTER_COLLECTION, words=("Name", "Counter"))
    sums = pd.concat(chunk.groupby(["Name", "Counter"])["Value"].agg(["sum", "count"]) for chunk in chunks)
    sums = sums.groupby(level=[0, 1]).sum()
    return (sums["sum"] / sums["count"]).unstack("Counter")


def read_ncu(path):
    """ncu --csv --page raw: a line of names, a line of units, then a line a kernel run."""
    with reported(path):
        table = pd.read_csv(path, skiprows=[1], thousands=",")
    if "Kernel Name" not in table:
        raise Unreadable(f"{path} is no table of ncu --page raw --csv")
    metrics = [name for name in table if "__" in name and pd.api.types.is_numeric_dtype(table[name])]
    return table.groupby("Kernel Name")[metrics].mean().rename_axis("Name")


def first_of(counters, *names):
    """The first of these columns that was counted, or nothing but gaps."""
    return next((counters[name] for name in names if name in counters), pd.Series(float("nan"), counters.index))


def derive(counters, stats=None):
    """Comparable figures from either vendor's counters: a DataFrame with a row a kernel, gaps for what was not counted.

    stats, a table of kernel_stats.COLUMNS, gives the times; ncu brings its own. Columns: ns (a run), bytes (to and from
    the device's memory), GB/s, occupancy (waves or warps in flight, % of the most there can be), L2 hits (%), busy (%
    of the compute units' or multiprocessors' peak), flop (by the matrix units).
    """
    times = stats.set_index("Name")["AverageNs"].reindex(counters.index) if stats is not None else None
    ns = first_of(counters, "gpu__time_duration.sum") if times is None or times.isna().all() else times
    read = first_of(counters, "dram__bytes_read.sum").fillna(KIB * first_of(counters, "FETCH_SIZE", "FetchSize"))
    written = first_of(counters, "dram__bytes_write.sum").fillna(KIB * first_of(counters, "WRITE_SIZE", "WriteSize"))
    hits, misses = first_of(counters, "TCC_HIT_sum"), first_of(counters, "TCC_MISS_sum")
    return pd.DataFrame(
        {
            "ns": ns,
            "bytes": read + written,
            "GB/s": (read + written) / ns,
            "occupancy": first_of(counters, "sm__warps_active.avg.pct_of_peak_sustained_active", "OccupancyPercent"),
            "waves a CU": first_of(counters, "MeanOccupancyPerCU"),
            "L2 hits": first_of(counters, "lts__t_sector_hit_rate.pct", "L2CacheHit").fillna(
                100 * hits / (hits + misses)
            ),
            "compute": first_of(counters, "sm__throughput.avg.pct_of_peak_sustained_elapsed", "VALUBusy"),
            "memory": first_of(counters, "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"),
            "matrix": first_of(counters, "MfmaUtil"),
            "flop": first_of(counters, "MfmaFlops"),
        }
    )


def parse(argv):
    parser = Parser("counters.py", __doc__)
    parser.add_argument("profile", type=Path, help="folder or file")
    parser.add_argument("--top", type=positive, default=15, help="kernels to print (default: 15)")
    return parser.parse_args(argv)


def main(argv=None):
    options = parse(argv)
    try:
        counters = read_counters(options.profile)
        if counters.empty:
            print(f"counters.py: {options.profile} holds no counters: see its log.txt", file=sys.stderr)
            return 1
        stats = None
        if "gpu__time_duration.sum" not in counters:
            stats, _ = read_step_stats(options.profile)
    except Unreadable as error:
        print(f"counters.py: error: {error}", file=sys.stderr)
        return 2
    derived = derive(counters, stats)
    order = derived["ns"].sort_values(ascending=False).index[: options.top]
    shown = derived.loc[order].dropna(axis="columns", how="all")
    shown.insert(0, "us", shown.pop("ns") / 1e3)
    if "bytes" in shown:
        shown["MB"] = shown.pop("bytes") / 1e6
    shown["operation"] = [operation_of(name) for name in order]
    shown["kernel"] = [short_name(name, 44) for name in order]
    print(f"\nA run of each kernel, by hardware counters ({len(derived)} kernels; occupancy to memory in %):\n")
    print(shown.to_string(index=False, float_format=lambda value: f"{value:,.1f}", na_rep="-"))
    if len(counters.columns) > MOST_COLUMNS:
        print(f"\n{len(counters.columns)} counters in all: they are in {options.profile}.")
    else:
        print("\nAll that was counted, means of a run:\n")
        raw = counters.loc[order].rename(index=lambda name: short_name(name, 44)).rename_axis(None)
        print(raw.to_string(float_format=lambda value: f"{value:,.6g}", na_rep="-"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
