#!/usr/bin/env python3
"""Compare the kernels of two runs: what got faster, slower, appeared, vanished.

    python profiling/compare.py hotspots/hotspot_before hotspots/hotspot_after

Reads what hotspots.py reads. Where both traces name their steps, a step is compared with a step, otherwise the whole
recordings. Exit codes: 0 done, 1 one of them holds no kernels, 2 a profile cannot be read.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from profiling.command_line import Parser, positive  # noqa: E402
from profiling.hotspots import show  # noqa: E402
from profiling.kernel_stats import Unreadable, operation_of, read_step_stats, short_name  # noqa: E402

SAME = 0.05  # a change of a kernel's time that is not worth a word


def compare(before, after, steps=(1, 1)):
    """A DataFrame with a row a kernel of either run: change, ms and calls a step of both, ratio; the largest first."""
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
    parser = Parser("compare.py", __doc__)
    parser.add_argument("before", type=Path, help="folder or file")
    parser.add_argument("after", type=Path, help="folder or file")
    parser.add_argument("--top", type=positive, default=15, help="kernels to print (default: 15)")
    return parser.parse_args(argv)


def main(argv=None):
    options = parse(argv)
    paths = options.before, options.after
    try:
        (before, steps_before), (after, steps_after) = map(read_step_stats, paths)
    except Unreadable as error:
        print(f"compare.py: error: {error}", file=sys.stderr)
        return 2
    for path, table in zip(paths, (before, after), strict=True):
        if table.empty:
            print(f"compare.py: {path} holds no kernels: did the program use the GPU?", file=sys.stderr)
            return 1
    by_step = steps_before and steps_after
    compared = compare(before, after, (steps_before, steps_after) if by_step else (1, 1))
    sums = compared[["ms before", "ms after", "calls before", "calls after"]].sum()
    print("A step of each" if by_step else "The whole recordings, as one of them does not name its steps", end=": ")
    print(
        f"{sums['ms before']:.3f} ms in {sums['calls before']:.6g} calls, then {sums['ms after']:.3f} ms in "
        f"{sums['calls after']:.6g} calls ({sums['ms after'] / sums['ms before']:.2f} of the time)"
    )
    counts = compared["change"].value_counts()
    print("Kernels: " + ", ".join(f"{count} {change}" for change, count in counts.items()) + "\n")
    shown = compared.head(options.top).reset_index(names="kernel")
    shown["operation"], shown["kernel"] = shown["kernel"].map(operation_of), shown["kernel"].map(short_name)
    columns = ["change", "ms before", "ms after", "ratio", "calls before", "calls after", "operation", "kernel"]
    print(show(shown[columns]))
    print(f"\nBy operation:\n\n{show(by_operation(compared))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
