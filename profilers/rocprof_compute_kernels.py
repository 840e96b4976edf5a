"""List the kernels of a step that rocprof-compute has counted, sorted by their time.

    python -m profilers.rocprof_compute_kernels workloads/NAME/GPU [--top N]

Each line has the number for rocprof-compute analyze -k, a tab, and a heading for the kernel. The program reads a file
that rocprof-compute analyze -p workloads/NAME/GPU --list-stats writes; without it, it ranks the recorded kernels as
rocprof-compute does. Exit codes: 0 done, 1 the kernels are missing, 2 the request cannot be met.
"""

import csv
import gzip
import sys
from pathlib import Path

if not __package__:
    print("run it from the root as python -m profilers.rocprof_compute_kernels", file=sys.stderr)
    sys.exit(2)

from measure.command_line import NothingRecorded, Parser, positive, program
from profilers.kernel_names import operation_of, short_name
from profilers.readers.files import TEXT, reported

TABLE = "pmc_kernel_top.csv"  # the printed table cuts or wraps names, differently in each release
RESULTS = "results_*.csv*"  # a row for each dispatch and counter, in a file for each pass
DISPATCH = "Kernel_Name", "Dispatch_ID", "Grid_Size", "Workgroup_Size", "LDS_Per_Workgroup"


def read_kernels(folder):
    """[(number, name, dispatches, time)], the longest first. The number is that of the row; the time has any unit."""
    path = Path(folder, TABLE)
    if not path.exists():
        if ranked := rank_kernels(Path(folder).glob(RESULTS)):
            return ranked
        raise NothingRecorded(f"{path} does not exist: rocprof-compute analyze -p {folder} --list-stats writes it")
    with reported(path), open(path, newline="", **TEXT) as file:
        reader = csv.DictReader(file)
        time = next((column for column in reader.fieldnames or () if column.startswith("Sum(")), None)
        if time is None or not {"Kernel_Name", "Count"} <= set(reader.fieldnames):
            raise NothingRecorded(f"{path} has no columns Kernel_Name, Count and Sum(): {reader.fieldnames}")
        return [(number, r["Kernel_Name"], int(r["Count"]), float(r[time])) for number, r in enumerate(reader)]


def rank_kernels(paths):
    """What read_kernels returns, of recorded results. The times of a dispatch are those of the first pass."""
    times, kernels = {}, {}
    for path in sorted(paths):
        with reported(path), (gzip.open if path.suffix == ".gz" else open)(path, "rt", newline="", **TEXT) as file:
            for row in csv.DictReader(file):
                time = int(row["End_Timestamp"]) - int(row["Start_Timestamp"])
                times.setdefault(tuple(map(row.get, DISPATCH)), time)
    for (name, *_), time in times.items():
        kernels.setdefault(name, []).append(time)
    ranked = sorted(kernels.items(), key=lambda kernel: -sum(kernel[1]))
    return [(number, name, len(each), sum(each)) for number, (name, each) in enumerate(ranked)]


def kernels_of_the_step(kernels):
    """Leaves out the kernels that initialize the weights: no step draws random numbers."""
    return [kernel for kernel in kernels if operation_of(kernel[1]) != "random numbers"]


def headings(kernels):
    total = sum(time for *_, time in kernels) or 1
    for number, name, count, time in kernels:
        times = "dispatch" if count == 1 else "dispatches"
        yield number, f"{short_name(name)}: {time / total:.1%} of the time of the kernels, {count} {times}"


def parse(argv):
    parser = Parser("rocprof_compute_kernels", __doc__)
    parser.add_argument("folder", metavar="workloads/NAME/GPU")
    parser.add_argument("--top", type=positive, default=5, metavar="N", help="how many kernels (default: 5)")
    return parser.parse_args(argv)


@program("rocprof_compute_kernels")
def main(argv):
    options = parse(argv)
    kernels = kernels_of_the_step(read_kernels(options.folder))
    if not kernels:
        raise NothingRecorded(f"{Path(options.folder, TABLE)} names no kernel of a step")
    for number, heading in list(headings(kernels))[: options.top]:
        print(number, heading, sep="\t")
    return 0


if __name__ == "__main__":
    sys.exit(main())
