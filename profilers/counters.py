"""Print the hardware counters of each kernel, and the figures that follow from them.

    python -m profilers.counters counters/counter_20261121_120000

The program reads the counter files of rocprofv3 (CSV or rocpd databases, of several passes) and the raw CSV of ncu.
Values are means over the runs of a kernel in the measured steps if every pass names them, otherwise in the whole run.
Rates use the times of the run without counters, as counting slows kernels down; without such a run, those of the first
pass.

Exit codes: 0 done, 1 nothing was counted, 2 the profile cannot be read.
"""

import sys

import pandas as pd

if not __package__:
    print("run it from the root as python -m profilers.counters", file=sys.stderr)
    sys.exit(2)

from measure.command_line import NothingRecorded, program
from profilers.hotspots import report_parser
from profilers.kernel_names import operation_of, short_name
from profilers.readers import others_in, read_step_counters, read_step_stats
from profilers.readers.files import note

KIB = 1024  # the unit of FETCH_SIZE and WRITE_SIZE
LOW_PRECISION = [f"SQ_INSTS_VALU_MFMA_MOPS_{kind}" for kind in ("F8", "XF32", "F6F4")]  # which MfmaFlops lacks
MOPS = 512  # the FLOP that these count as one


def first_of(counters, *names):
    """The first of these columns that was counted, or a column of NaN."""
    return next((counters[name] for name in names if name in counters), pd.Series(float("nan"), counters.index))


def flop_of(counters):
    """Return the FLOP of the matrix units, NaN where none was counted though they were busy, which a note tells."""
    counted = [counters[name] for name in LOW_PRECISION if name in counters]
    flop = first_of(counters, "MfmaFlops") + MOPS * sum(each.fillna(0) for each in counted)
    missing = flop.eq(0) & first_of(counters, "MfmaUtil").gt(0)
    if missing.any():
        names = ", ".join(short_name(name) for name in counters.index[missing])
        remedy = f"count those of {' '.join(LOW_PRECISION)} too that the GPU has"
        note(f"MfmaFlops has no FP8, XF32, FP6 or FP4, so the FLOP of {names} are not known: {remedy}")
    return flop.mask(missing)


def derive(counters, stats=None):
    """Derives comparable figures from the counters of either vendor: a DataFrame with a row for each kernel.

    stats: a table of readers.COLUMNS with the times; those of ncu are counters. The columns of a run are ns, bytes (to
    and from the device's memory), GB/s, occupancy (waves or warps in flight, % of the maximum), waves a CU, L2 hits
    (%), compute and memory (% of their peaks), matrix (% of the time that the matrix units are busy) and flop (see
    flop_of). A figure that was not counted is NaN.
    """
    times = stats.set_index("Name")["AverageNs"].reindex(counters.index) if stats is not None else None
    ns = first_of(counters, "gpu__time_duration.sum") if times is None or times.isna().all() else times
    read = first_of(counters, "dram__bytes_read.sum").fillna(KIB * first_of(counters, "FETCH_SIZE", "FetchSize"))
    written = first_of(counters, "dram__bytes_write.sum").fillna(KIB * first_of(counters, "WRITE_SIZE", "WriteSize"))
    hits, misses = first_of(counters, "TCC_HIT_sum"), first_of(counters, "TCC_MISS_sum")
    # Bytes in a nanosecond are GB/s.
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
            "flop": flop_of(counters),
        }
    )


@program("counters")
def main(argv):
    options = report_parser("counters", __doc__, "profile").parse_args(argv)
    counters, is_of_steps = read_step_counters(options.profile)
    if counters.empty:
        names, remedy = "*counter_collection.csv, *.db, *ncu_raw.csv", "record with ./get_counters.sh --pmc"
        raise NothingRecorded(
            f"{options.profile} holds no counters, in one of {names}: {remedy}{others_in(options.profile)}"
        )
    scope = "mean of the measured steps" if is_of_steps else "mean of the whole run, warm-up included"
    # Counting slows kernels down, so that their times are those of the run without; ncu counts the time itself.
    stats = None
    if "gpu__time_duration.sum" not in counters:
        stats, steps = read_step_stats(options.profile)
        if is_of_steps and not steps:
            scope += ", times of the whole run"
    derived = derive(counters, stats)
    order = derived["ns"].sort_values(ascending=False).index[: options.top]
    shown = derived.drop(columns="ns").loc[order].dropna(axis="columns", how="all")
    shown.insert(0, "us", derived["ns"] / 1e3)
    if "bytes" in shown:
        shown["MB"] = shown.pop("bytes") / 1e6
    shown["operation"] = [operation_of(name) for name in order]
    shown["kernel"] = [short_name(name, 44) for name in order]
    print(f"\nA run of each of {len(derived)} kernels, by hardware counters, {scope}; occupancy to memory in %:\n")
    print(shown.to_string(index=False, float_format=lambda value: f"{value:,.1f}", na_rep="-"))
    print("\nAll that was counted, means of a run:\n")
    raw = counters.loc[order].rename(index=lambda name: short_name(name, 44)).rename_axis(None)
    print(raw.to_string(float_format=lambda value: f"{value:,.6g}", na_rep="-"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
