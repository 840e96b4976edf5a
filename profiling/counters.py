"""Print what the hardware counted for each kernel, and what follows from it.

    python -m profiling.counters counters/counter_20261121_120000

Reads the counter files of rocprofv3 (CSV or rocpd databases, of several passes) and ncu's raw CSV. Values are means of
a kernel's runs within the measured steps, if each pass names them, else within the whole run. Rates take their time
from the steps of the uncounted run beside them, as counting slows kernels down.

Exit codes: 0 done, 1 nothing was counted, 2 the profile cannot be read.
"""

import sys
from pathlib import Path

import pandas as pd

from measure.options import positive
from profiling.command_line import NothingRecorded, Parser, exit_code_of
from profiling.kernel_names import operation_of, short_name
from profiling.readers import read_step_counters, read_step_stats

KIB = 1024  # of FETCH_SIZE and WRITE_SIZE
MOST_COLUMNS = 20  # that are printed; ncu counts hundreds


def first_of(counters, *names):
    """The first of these columns that was counted, or nothing but gaps."""
    return next((counters[name] for name in names if name in counters), pd.Series(float("nan"), counters.index))


def derive(counters, stats=None):
    """Comparable figures from either vendor's counters: a DataFrame with a row a kernel, gaps for what was not counted.

    stats, a table of readers.COLUMNS, gives the times; ncu brings its own. Columns, of a run: ns, bytes (to and from
    the device's memory), GB/s, occupancy (waves or warps in flight, % of the most there can be), waves a CU, L2 hits
    (%), compute and memory (% of their peaks), matrix (% of the time that the matrix units are busy), flop (by those
    units).
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
    parser = Parser("counters", __doc__)
    parser.add_argument("profile", type=Path, help="folder or file")
    parser.add_argument("--top", type=positive, default=15, help="kernels to print (default: 15)")
    return parser.parse_args(argv)


def print_derived(derived, order, scope):
    shown = derived.loc[order].dropna(axis="columns", how="all")
    shown.insert(0, "us", shown.pop("ns") / 1e3)
    if "bytes" in shown:
        shown["MB"] = shown.pop("bytes") / 1e6
    shown["operation"] = [operation_of(name) for name in order]
    shown["kernel"] = [short_name(name, 44) for name in order]
    print(f"\nA run of each of {len(derived)} kernels, by hardware counters, {scope}; occupancy to memory in %:\n")
    print(shown.to_string(index=False, float_format=lambda value: f"{value:,.1f}", na_rep="-"))


def report(options):
    counters, is_of_steps = read_step_counters(options.profile)
    if counters.empty:
        raise NothingRecorded(f"{options.profile} holds no counters: see its log.txt")
    scope = "mean of the measured steps" if is_of_steps else "mean of the whole run, warm-up included"
    stats = None
    if "gpu__time_duration.sum" not in counters:
        stats, steps = read_step_stats(options.profile)
        if is_of_steps and not steps:
            scope += ", times of the whole run"
    derived = derive(counters, stats)
    order = derived["ns"].sort_values(ascending=False).index[: options.top]
    print_derived(derived, order, scope)
    if len(counters.columns) > MOST_COLUMNS:
        print(f"\n{len(counters.columns)} counters in all: they are in {options.profile}.")
    else:
        print("\nAll that was counted, means of a run:\n")
        raw = counters.loc[order].rename(index=lambda name: short_name(name, 44)).rename_axis(None)
        print(raw.to_string(float_format=lambda value: f"{value:,.6g}", na_rep="-"))
    return 0


def main(argv=None):
    return exit_code_of(lambda: report(parse(argv)), "counters")


if __name__ == "__main__":
    sys.exit(main())
