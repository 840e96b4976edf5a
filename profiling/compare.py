"""Compare the kernels of two runs: what got faster, slower, appeared, vanished.

    python -m profiling.compare hotspots/hotspot_before hotspots/hotspot_after

Reads what profiling.hotspots reads. Where both traces name their steps, a step is compared with a step, otherwise the
whole recordings. Exit codes: 0 done, 1 one of them holds no kernels, 2 a profile cannot be read.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from measure.options import positive
from profiling.command_line import NothingRecorded, Parser, exit_code_of
from profiling.hotspots import show
from profiling.kernel_names import operation_of, short_name
from profiling.readers import read_step_stats

SAME = 0.05  # a change of a kernel's time that is not worth a word


def compare(before, after, steps=(1, 1)):
    """A DataFrame with a row a kernel of either run, the largest difference in time first.

    before and after are tables of readers.COLUMNS, steps the number of steps that each covers. Columns: change (a
    word), ms before, calls before, ms after, calls after (a step; gaps where a run lacks the kernel), ratio (after to
    before).
    """
    sides = []
    for side, table, count in zip(("before", "after"), (before, after), steps, strict=True):
        sums = table.set_index("Name")
        columns = {f"ms {side}": sums["TotalDurationNs"] / 1e6 / count, f"calls {side}": sums["Calls"] / count}
        sides.append(pd.DataFrame(columns))
    both = sides[0].join(sides[1], how="outer")
    ratio = both["ms after"] / both["ms before"]
    change = np.select(
        [both["ms before"].isna(), both["ms after"].isna(), ratio > 1 + SAME, ratio < 1 / (1 + SAME)],
        ["appeared", "vanished", "slower", "faster"],
        "same",
    )
    both.insert(0, "change", change)
    both["ratio"] = ratio
    difference = (both["ms after"].fillna(0) - both["ms before"].fillna(0)).abs()
    return both.loc[difference.sort_values(ascending=False, kind="stable").index]


def by_operation(compared):
    """ms a step of each operation before and after, the largest change first."""
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


def print_sums(compared, by_step):
    sums = compared[["ms before", "ms after", "calls before", "calls after"]].sum()
    print("A step of each" if by_step else "The whole recordings, as one of them does not name its steps", end=": ")
    print(
        f"{sums['ms before']:.3f} ms in {sums['calls before']:.6g} calls, then {sums['ms after']:.3f} ms in "
        f"{sums['calls after']:.6g} calls ({sums['ms after'] / sums['ms before']:.2f} of the time)"
    )
    counts = compared["change"].value_counts()
    print("Kernels: " + ", ".join(f"{count} {change}" for change, count in counts.items()) + "\n")


def report(options):
    paths = options.before, options.after
    (before, steps_before), (after, steps_after) = map(read_step_stats, paths)
    for path, table in zip(paths, (before, after), strict=True):
        if table.empty:
            raise NothingRecorded(f"{path} holds no kernels: did the program use the GPU?")
    by_step = steps_before and steps_after
    compared = compare(before, after, (steps_before, steps_after) if by_step else (1, 1))
    print_sums(compared, by_step)
    shown = compared.head(options.top).reset_index(names="kernel")
    shown["operation"], shown["kernel"] = shown["kernel"].map(operation_of), shown["kernel"].map(short_name)
    columns = ["change", "ms before", "ms after", "ratio", "calls before", "calls after", "operation", "kernel"]
    print(show(shown[columns]))
    print(f"\nBy operation:\n\n{show(by_operation(compared))}")
    return 0


def main(argv=None):
    return exit_code_of(lambda: report(parse(argv)), "compare")


if __name__ == "__main__":
    sys.exit(main())
