"""Compare the kernels of two runs: which got faster or slower, appeared or vanished.

    python -m profilers.compare hotspots/hotspot_before hotspots/hotspot_after

The program reads the same files as profilers.hotspots. If both traces name their steps, it compares steps, otherwise
whole recordings, of several processes their means. A kernel is slower or faster if its time differs by more than 5 %
and by more than the noise. Times are medians over the steps, and the noise is the sum of the two interquartile ranges,
each times 1 + 10 / steps because few steps underestimate the spread. If single steps are not known, the times are
means, and the noise is not known.

Exit codes: 0 done, 1 one of them holds no kernels, 2 a profile cannot be read.
"""

import sys

import numpy as np
import pandas as pd

if not __package__:
    print("run it from the root as python -m profilers.compare", file=sys.stderr)
    sys.exit(2)

from measure.command_line import program
from measure.tables import show
from profilers.hotspots import read_some_kernels, report_parser
from profilers.kernel_names import operation_of, short_name
from profilers.readers import read_processes, within

SAME = 0.05  # smaller changes of a kernel's time count as the same
FEWEST_STEPS = 3  # that have an interquartile range


def side_of(path):
    """Return (a side of a comparison, the number of its steps). Without steps, 0, it is of the whole recording.

    The side is a table with a row for each kernel: ms, calls and noise of a step, or NaN if that is not known.
    """
    table, steps, _ = read_some_kernels(path)
    table = table.set_index("Name") / max(steps, 1)
    side = pd.DataFrame({"ms": table["TotalDurationNs"] / 1e6, "calls": table["Calls"], "noise": np.nan})
    single = [within(process.dispatches, window) for process in read_processes(path) for window in process.windows]
    # A window may hold all steps of a run.
    if len(single) == steps and steps >= FEWEST_STEPS:
        # A kernel that does not run in a step took no time in it.
        ns = [(step["End"] - step["Start"]).groupby(step["Name"]).sum() for step in single]
        ms = pd.DataFrame(ns, columns=side.index).fillna(0) / 1e6
        side["ms"] = ms.median()
        side["noise"] = (ms.quantile(0.75) - ms.quantile(0.25)) * (1 + 10 / steps)
    return side, steps


def whole_side_of(path):
    """Return a side as side_of() does, of the whole recording of a process, or of its measured steps together."""
    table, _, processes = read_some_kernels(path)
    table = table.set_index("Name") / processes
    return pd.DataFrame({"ms": table["TotalDurationNs"] / 1e6, "calls": table["Calls"], "noise": np.nan})


def compare(before, after):
    """Return a table with a row for each kernel of either side, the largest difference in time first.

    Columns: change (a word), ms before, ms after (of a step; NaN if a run lacks the kernel), ms noise (the least
    difference that counts; NaN if it is not known), ratio (after / before), calls before, calls after, operation and
    kernel (shortened).
    """
    table = pd.DataFrame(
        {
            "change": "faster",
            "ms before": before["ms"],
            "ms after": after["ms"],
            "ms noise": before["noise"] + after["noise"],
            "ratio": after["ms"] / before["ms"],
            "calls before": before["calls"],
            "calls after": after["calls"],
        }
    )
    change = (table["ms after"].fillna(0) - table["ms before"].fillna(0)).abs()
    is_small = table["ratio"].between(1 / (1 + SAME), 1 + SAME) | (change <= table["ms noise"])
    # The last that holds decides: a change within the noise is none, whatever its sign.
    table.loc[table["ratio"] > 1, "change"] = "slower"
    table.loc[is_small, "change"] = "same"
    table.loc[table["ms before"].isna(), "change"] = "appeared"
    table.loc[table["ms after"].isna(), "change"] = "vanished"
    table["operation"], table["kernel"] = table.index.map(operation_of), table.index.map(short_name)
    return table.loc[change.sort_values(ascending=False, kind="stable").index]


def by_operation(compared):
    """Sum up the ms a step of each operation before and after, the largest change first."""
    sums = compared.groupby("operation")[["ms before", "ms after"]].sum()
    sums["ratio"] = (sums["ms after"] / sums["ms before"]).replace(np.inf, np.nan)
    order = (sums["ms after"] - sums["ms before"]).abs().sort_values(ascending=False).index
    return sums.loc[order].assign(operation=order)


@program("compare")
def main(argv):
    options = report_parser("compare", __doc__, "before", "after").parse_args(argv)
    (before, steps_before), (after, steps_after) = side_of(options.before), side_of(options.after)
    scope = "A step of each"
    if not (steps_before and steps_after):
        scope = "The whole recordings, as one of them does not name its steps"
        before, after = map(whole_side_of, (options.before, options.after))
    compared = compare(before, after)
    sums = compared.sum(numeric_only=True)
    # The median is 0 of a kernel that less than half of the steps have.
    ratio = f" ({sums['ms after'] / sums['ms before']:.2f} of the time)" if sums["ms before"] else ""
    print(
        f"{scope}: {sums['ms before']:.3f} ms in {sums['calls before']:.6g} calls, then {sums['ms after']:.3f} ms in "
        f"{sums['calls after']:.6g} calls{ratio}"
    )
    print("Kernels:", ", ".join(f"{count} {change}" for change, count in compared["change"].value_counts().items()))
    print(
        f"Noise: the interquartile ranges of a kernel's time in {steps_before} and in {steps_after} steps, added, or - "
        f"if single steps are not known; what differs by less, or by less than {100 * SAME:.0f} %, is called same\n"
    )
    print(show(compared.head(options.top)))
    print(f"\nBy operation:\n\n{show(by_operation(compared))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
