"""Print the kernels that take the time of a training step.

    python -m profilers.hotspots hotspots/hotspot_20261121_120000

The program reads the folder of any profiling script, or a single file of rocprofv3 or torch.profiler, also compressed
by gzip. If the trace names the steps (by ranges called "step"), only they count, without compilation, warm-up and what
runs between two steps. For a folder of several processes the table shows the means over the steps of all.

Exit codes: 0 done, 1 no kernels were recorded, 2 the profile cannot be read.
"""

import sys
from pathlib import Path

import pandas as pd

if not __package__:
    print("run it from the root as python -m profilers.hotspots", file=sys.stderr)
    sys.exit(2)

from measure.command_line import NothingRecorded, Parser, positive, program, replacing
from measure.tables import show
from profilers.kernel_names import operation_of, short_name
from profilers.readers import read_kernels, read_peak_memory

PEAK_MEMORY = "Peak of allocated GPU memory: {:.3f} GiB, of the whole recording"


def hotspots(table, steps):
    """Converts a table of readers.COLUMNS to share (%), ms and calls a step, us each, operation and kernel (shortened).

    With 0 steps, an unknown number, ms and calls are those of the whole run.
    """
    per = max(steps, 1)
    return pd.DataFrame(
        {
            "share": table["Percentage"],
            "ms": table["TotalDurationNs"] / 1e6 / per,
            "calls": table["Calls"] / per,
            "us each": table["AverageNs"] / 1e3,
            "operation": table["Name"].map(operation_of),
            "kernel": table["Name"].map(short_name),
        }
    )


def by_operation(spots):
    """Sums up share (%), ms and calls of each operation, the largest first."""
    sums = spots.groupby("operation")[["share", "ms", "calls"]].sum()
    return sums.sort_values("ms", ascending=False).reset_index()[["share", "ms", "calls", "operation"]]


def scope_of(steps, processes):
    """Describes what a table of so many steps covers."""
    of_processes = f" of {processes} processes" if processes > 1 else ""
    if steps:
        return f"Kernels of {steps} steps{of_processes}, ms and calls a step"
    return f"Kernels of the whole run{of_processes}, warm-up included"


def marks_no_steps(program):
    """Describes a recording whose ranges name no steps; program is its name."""
    return f"{program} marks no steps: times are of the whole run"


def report_parser(name, description, *profiles):
    """Return the Parser of a report with the options that all have."""
    parser = Parser(name, description)
    for profile in profiles:
        parser.add_argument(profile, type=Path, help="folder or file")
    parser.add_argument("--top", type=positive, default=15, help="kernels to print (default: 15)")
    return parser


def read_some_kernels(path):
    """Return read_kernels(); raise NothingRecorded if there are none."""
    recorded = read_kernels(path)
    if recorded[0].empty:
        raise NothingRecorded(f"{path} holds no kernels: did the program use the GPU?")
    if not recorded[0]["TotalDurationNs"].any():
        raise NothingRecorded(f"{path} holds no kernels that took time: were times recorded?")
    return recorded


@program("hotspots")
def main(argv):
    parser = report_parser("hotspots", __doc__, "profile")
    parser.add_argument(
        "--csv",
        type=Path,
        metavar="PATH",
        help="also write all of them, with rocprofv3's columns; into a folder as kernels_of_the_steps.csv, or as "
        "kernels.csv if the steps are not known",
    )
    parser.add_argument("--program", metavar="NAME", help="of what was recorded, for a line that it marks no steps")
    options = parser.parse_args(argv)
    table, steps, processes = read_some_kernels(options.profile)
    if options.csv:
        name, in_folder = "kernels_of_the_steps.csv" if steps else "kernels.csv", options.csv.is_dir()
        with replacing(options.csv / name if in_folder else options.csv, follow=not in_folder) as path:
            table.to_csv(path, index=False)
    if options.program and not steps:
        print(f"\n{marks_no_steps(options.program)}")
    spots = hotspots(table, steps)
    sums = f"{spots['ms'].sum():.3f} ms in {spots['calls'].sum():.6g} calls of {len(spots)} kernels"
    print(f"\n{scope_of(steps, processes)}: {sums}\n")
    print(show(spots.head(options.top)))
    if len(spots) > options.top:
        rest = spots[options.top :]
        print(f"and {len(rest)} more kernels: {rest['share'].sum():.1f} %, {rest['ms'].sum():.3f} ms")
    print(f"\nBy operation:\n\n{show(by_operation(spots))}")
    if peak := read_peak_memory(options.profile):
        print(f"\n{PEAK_MEMORY.format(peak / 2**30)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
