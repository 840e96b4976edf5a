"""rocprof-compute: profile and analyze of ROCm 6.4 (3.1), 7.0 (3.2) and 7.1 (3.3)."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tool import RELEASE, complain, finish

PASSES = 3  # really 12 to 15


def make_parser():
    parser = argparse.ArgumentParser(prog="rocprof-compute")
    modes = parser.add_subparsers(dest="mode", required=True)
    profile = modes.add_parser("profile")
    profile.add_argument("-n", "--name", required=True)
    for flag in ("--no-roof", "--roof-only", "--kernel-names", "--hip-trace"):
        profile.add_argument(flag, action="store_true")
    for names in (("-p", "--path"), ("--subpath",), ("-m", "--mem-level"), ("--join-type",), ("--device",)):
        profile.add_argument(*names)
    for names in (("-k", "--kernel"), ("-d", "--dispatch"), ("-b", "--block")):
        profile.add_argument(*names, nargs="+", default=[])
    profile.add_argument("--format-rocprof-output", choices=("csv", "json"))
    if RELEASE >= (7, 0):
        profile.add_argument("-R", "--roofline-data-type", nargs="+")
        profile.add_argument("--list-metrics", nargs="?", const="")
        profile.add_argument("--rocprofiler-sdk-library-path")
    analyze = modes.add_parser("analyze")
    analyze.add_argument("-p", "--path", required=True)
    analyze.add_argument("-b", "--block", nargs="+", default=[])
    for names in (("-k", "--kernel"), ("-d", "--dispatch")):
        analyze.add_argument(*names, nargs="+", type=int)
    norms = ("per_wave", "per_cycle", "per_second", "per_kernel")
    analyze.add_argument("-n", "--normal-unit", choices=norms)
    analyze.add_argument("-t", "--time-unit", choices=("s", "ms", "us", "ns"))
    analyze.add_argument("--list-stats", action="store_true")
    analyze.add_argument("--max-stat-num", type=int)
    if RELEASE < (7, 1):
        analyze.add_argument("-o", "--output")
        analyze.add_argument("--save-dfs")
    return parser


def profile(options, program):
    if options.no_roof and options.kernel_names or "/" in options.name:
        sys.exit("ERROR --kernel-names goes with --roof-only; a name has no /")
    # Without -- the first word is dropped, and the message is the same.
    if RELEASE < (7, 0) and not (program and os.path.isfile(program[0])):
        sys.exit(f"Your command {' '.join(program[:1])} doesn't point to a executable. Please verify.")
    if not program:
        sys.exit("Profiling command required. Pass application executable after -- at the end of options.")
    complain()
    folder = Path(options.path) if options.path else Path("workloads", options.name, "MI300X_A1")
    words = " ".join(program).split()
    for _ in range(PASSES):
        status = subprocess.run(words).returncode
        if status:
            finish(status)
    if not os.environ.get("STAND_IN_NOTHING"):
        folder.mkdir(parents=True)
        (folder / "sysinfo.csv").write_text("workload_name,gpu_arch\ntiny_llama,gfx942\n")
        (folder / "pmc_perf.csv").write_text("Dispatch_ID,Kernel_Name\n0,rmsnorm_kernel\n")


def main():
    arguments, program = sys.argv[1:], []
    if "--" in arguments:
        cut = arguments.index("--")
        arguments, program = arguments[:cut], arguments[cut + 1 :]
    options = make_parser().parse_args(arguments)
    if options.mode == "profile":
        profile(options, program)
    elif not Path(options.path, "sysinfo.csv").exists():
        sys.exit(f"ERROR invalid path {options.path}: it holds no sysinfo.csv")
    else:
        print(f"2. System Speed-of-Light\n(sections {' '.join(options.block)})")


main()
