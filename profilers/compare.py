"""Compare the kernels of two runs: which got faster or slower, appeared or vanished.

    python -m profilers.compare hotspots/hotspot_before hotspots/hotspot_after

The program reads the same files as profilers.hotspots. If both traces name their steps, it compares steps, otherwise
whole recordings. A kernel is slower or faster if its time differs by more than 5 % and by more than the noise. Times
are medians over the steps, and the noise is the sum of the two interquartile ranges, times 1 + 10 / steps because few
steps underestimate the spread. If single steps are not known, the times are means, and the standard deviation of the
calls takes the place of the range. Without either, as for a single call, a change of more than 5 % is unknown.

Exit codes: 0 done, 1 one of them holds no kernels, 2 a profile cannot be read.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

if not __package__:
    print("run it from the root as python -m profilers.compare", file=sys.stderr)
    sys.exit(2)

from measure.command_line import NothingRecorded, Parser, positive, program
from profilers.hotspots import show
from profilers.kernel_names import operation_of, short_name
from profilers.readers import Unreadable, read_dispatches, read_processes, step_windows, within

SAME = 0.05  # smaller changes of a kernel's time count as the same
FEWEST_STEPS = 3  # that have an interquartile range
NORMAL_IQR = 1.349  # the interquartile range of a normal distribution, in standard deviations

# A side of a comparison is a table with a row for each kernel: ms, calls and spread (the interquartile range of ms) of
# a step, and samples, the number of measurements behind the spread.


def of_steps(path):
    """The side of a recording of one process by medians over its steps; None if the steps are not known."""
    windows, steps = step_windows(path)
    if steps < FEWEST_STEPS or len(windows) < steps:
        return None
    try:
        dispatches = read_dispatches(path)
    except Unreadable:  # the recording has only a table of kernels
        return None
    dispatches["ns"] = dispatches["End"] - dispatches["Start"]
    steps = [within(dispatches, window).groupby("Name", observed=True)["ns"] for window in windows]
    ms = pd.DataFrame([step.sum() / 1e6 for step in steps]).fillna(0)
    calls = pd.DataFrame([step.count() for step in steps]).fillna(0)
    spread = ms.quantile(0.75) - ms.quantile(0.25)
    return pd.DataFrame({"ms": ms.median(), "calls": calls.mean(), "spread": spread, "samples": len(windows)})


def of_calls(table, steps):
    """The side of a table of readers.COLUMNS over so many steps, by means."""
    table = table.set_index("Name")
    calls = table["Calls"] / steps
    spread = NORMAL_IQR * table["StdDev"] / 1e6 * np.sqrt(calls)
    columns = {"ms": table["TotalDurationNs"] / 1e6 / steps, "calls": calls, "samples": table["Calls"]}
    return pd.DataFrame(columns | {"spread": spread.where(table["Calls"] > 1)})


def compare(before, after):
    """Returns a DataFrame with a row for each kernel of either side, the largest difference in time first.

    Columns: change (a word), ms before, calls before, ms after, calls after (of a step; NaN if a run lacks the kernel),
    ratio (after / before), ms noise (the least difference that counts; NaN if it was not measured).
    """
    both = before.add_suffix(" before").join(after.add_suffix(" after"), how="outer")
    samples = both[["samples before", "samples after"]].min(axis="columns")
    both["ms noise"] = (both["spread before"] + both["spread after"]) * (1 + 10 / samples)
    both["ratio"] = ratio = both["ms after"] / both["ms before"]
    difference = (both["ms after"].fillna(0) - both["ms before"].fillna(0)).abs()
    is_small = ratio.between(1 / (1 + SAME), 1 + SAME) | (difference <= both["ms noise"])
    change = np.select(
        [both["ms before"].isna(), both["ms after"].isna(), is_small, both["ms noise"].isna(), ratio > 1],
        ["appeared", "vanished", "same", "unknown", "slower"],
        "faster",
    )
    both.insert(0, "change", change)
    return both.loc[difference.sort_values(ascending=False, kind="stable").index]


def by_operation(compared):
    """Sums up the ms a step of each operation before and after, the largest change first."""
    sums = compared[["ms before", "ms after"]].fillna(0).groupby(operation_of).sum()
    sums["ratio"] = (sums["ms after"] / sums["ms before"]).replace(np.inf, np.nan)
    order = (sums["ms after"] - sums["ms before"]).abs().sort_values(ascending=False).index
    return sums.loc[order].rename_axis("operation").reset_index()[["ms before", "ms after", "ratio", "operation"]]


def parse(argv):
    parser = Parser("compare", __doc__)
    parser.add_argument("before", type=Path, help="folder or file")
    parser.add_argument("after", type=Path, help="folder or file")
    parser.add_argument("--top", type=positive, default=15, help="kernels to print (default: 15)")
    return parser.parse_args(argv)


def print_sums(compared, by_step, noise):
    sums = compared[["ms before", "ms after", "calls before", "calls after"]].sum()
    print("A step of each" if by_step else "The whole recordings, as one of them does not name its steps", end=": ")
    print(
        f"{sums['ms before']:.3f} ms in {sums['calls before']:.6g} calls, then {sums['ms after']:.3f} ms in "
        f"{sums['calls after']:.6g} calls ({sums['ms after'] / sums['ms before']:.2f} of the time)"
    )
    counts = compared["change"].value_counts()
    print("Kernels: " + ", ".join(f"{count} {change}" for change, count in counts.items()))
    print(f"Noise: {noise}; what differs by less, or by less than {100 * SAME:.0f} %, is called same\n")


def sides_of(paths):
    """Returns ((before, after), whether steps are compared, a description of the noise)."""
    recordings = [read_processes(path) for path in paths]
    for path, (table, *_) in zip(paths, recordings, strict=True):
        if table.empty:
            raise NothingRecorded(f"{path} holds no kernels: did the program use the GPU?")
    sides = [
        of_steps(path) if processes == 1 else None for path, (*_, processes) in zip(paths, recordings, strict=True)
    ]
    if all(side is not None for side in sides):
        steps = [side["samples"].iloc[0] for side in sides]
        noise = f"the interquartile ranges of a kernel's time in {steps[0]} and in {steps[1]} steps, added, times "
        return sides, True, f"{noise}1 + 10 / {min(steps)}"
    by_step = all(steps for _, steps, _ in recordings)
    sides = [of_calls(table, steps if by_step else 1) for table, steps, _ in recordings]
    return sides, by_step, "from the standard deviation of a kernel's calls, as single steps are not known"


@program("compare")
def main(argv):
    options = parse(argv)
    sides, by_step, noise = sides_of((options.before, options.after))
    compared = compare(*sides)
    print_sums(compared, by_step, noise)
    shown = compared.head(options.top).reset_index(names="kernel")
    shown["operation"], shown["kernel"] = shown["kernel"].map(operation_of), shown["kernel"].map(short_name)
    columns = "change,ms before,ms after,ms noise,ratio,calls before,calls after,operation,kernel".split(",")
    print(show(shown[columns]))
    print(f"\nBy operation:\n\n{show(by_operation(compared))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
