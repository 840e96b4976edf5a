"""List the kernels of a step that rocprof-compute has counted, sorted by their time.

    python -m profilers.rocprof_compute_kernels workloads/NAME/GPU [--top N]

Each line has the number for rocprof-compute analyze -k, a tab, and a heading for the kernel. The program reads a file
that rocprof-compute analyze -p workloads/NAME/GPU --list-stats writes. Exit codes: 0 done, 1 the kernels are missing,
2 the request cannot be met.
"""

import sys
from pathlib import Path

import pandas as pd

if not __package__:
    print("run it from the root as python -m profilers.rocprof_compute_kernels", file=sys.stderr)
    sys.exit(2)

from measure.command_line import NothingRecorded, Parser, positive, program
from profilers.kernel_names import operation_of, short_name
from profilers.readers.files import reported

TABLE = "pmc_kernel_top.csv"  # the printed table cuts or wraps names, differently in each release


def read_kernels(folder):
    """Return a table of Name, Count and Time, the longest first. Its index is the number; Time has any unit."""
    path = Path(folder, TABLE)
    if not path.exists():
        raise NothingRecorded(f"{path} does not exist: rocprof-compute analyze -p {folder} --list-stats writes it")
    with reported(path):
        table = pd.read_csv(path, keep_default_na=False, encoding_errors="replace")  # a kernel may be called nan
        columns = ["Kernel_Name", "Count", *(name for name in table if name.startswith("Sum("))]
        if len(columns) < 3 or not set(columns) <= set(table):
            raise NothingRecorded(f"{path} has no columns Kernel_Name, Count and Sum(): {list(table)}")
        return table[columns].set_axis(["Name", "Count", "Time"], axis=1).astype({"Count": int, "Time": float})


@program("rocprof_compute_kernels")
def main(argv):
    parser = Parser("rocprof_compute_kernels", __doc__)
    parser.add_argument("folder", metavar="workloads/NAME/GPU")
    parser.add_argument("--top", type=positive, default=5, metavar="N", help="how many kernels (default: 5)")
    options = parser.parse_args(argv)
    kernels = read_kernels(options.folder)
    kernels = kernels[kernels["Name"].map(operation_of) != "random numbers"]  # these initialize the weights
    if kernels.empty:
        raise NothingRecorded(f"{Path(options.folder, TABLE)} names no kernel of a step")
    shares = kernels["Time"] / (kernels["Time"].sum() or 1)
    for number, name, count, _ in kernels.head(options.top).itertuples(name=None):
        dispatches = f"{count} dispatch" if count == 1 else f"{count} dispatches"
        print(f"{number}\t{short_name(name)}: {shares[number]:.1%} of the time of the kernels, {dispatches}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
