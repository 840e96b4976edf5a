"""rocprofv3: the options of ROCm 6.4 to 10.1 that are used here, and what each of them leaves."""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import records
from tool import RELEASE, complain, finish

TRACES = ("runtime-trace", "kernel-trace", "marker-trace", "memory-copy-trace")
SLOTS = {"SQ": 8, "TCC": 4, "GRBM": 2}  # of a pass, in each block of the hardware
COUNTERS = {  # by the slots that each takes
    "SQ": "SQ_WAVES SQ_INSTS_VALU SQ_INSTS_LDS SQ_INSTS_SALU SQ_INSTS_VMEM_RD SQ_INSTS_VMEM_WR MfmaUtil "
    "SQ_INSTS_VALU_MFMA_MOPS_F8 SQ_INSTS_VALU_MFMA_MOPS_F6F4",
    "SQ SQ": "MeanOccupancyPerCU VALUUtilization", "SQ SQ SQ SQ": "MfmaFlops", "SQ GRBM": "VALUBusy",
    "GRBM": "GRBM_COUNT GRBM_GUI_ACTIVE", "TCC": "TCC_HIT_sum TCC_MISS_sum", "TCC TCC": "WRITE_SIZE",
    "TCC TCC TCC": "FETCH_SIZE", "GL2C": "L2CacheHit",
}  # fmt: skip
SLOTS_OF = {name: slots.split() for slots, names in COUNTERS.items() for name in names.split()}
F8, F6F4 = (f"SQ_INSTS_VALU_MFMA_MOPS_{kind}" for kind in ("F8", "F6F4"))
ABSENT = {
    "gfx908": {"MeanOccupancyPerCU", "MfmaUtil", "MfmaFlops", F8, F6F4}, "gfx90a": {F8, F6F4},
    "gfx942": {"L2CacheHit", F6F4}, "gfx950": {"L2CacheHit"},
}  # fmt: skip
OF_RADEON = "SQ_WAVES SQ_INSTS_VALU SQ_INSTS_LDS SQ_INSTS_SALU GRBM_COUNT GRBM_GUI_ACTIVE L2CacheHit MeanOccupancyPerCU"
ABSENT["gfx1100"] = SLOTS_OF.keys() - OF_RADEON.split()


def make_parser():
    has_rocpd = RELEASE >= (7, 0)
    parser = argparse.ArgumentParser(prog="rocprofv3", allow_abbrev=not has_rocpd)
    for name in (*TRACES, "stats", "kernel-rename", *["att", "selected-regions"] * has_rocpd):  # as new as rocpd
        parser.add_argument(f"--{name}", nargs="?", const=True)
    parser.set_defaults(profile_mpi_ranks=None, mpi_world_rank_variable=None)
    if RELEASE >= (10, 0):
        for name in ("--profile-mpi-ranks", "--mpi-world-rank-variable", "--mpi-world-size-variable"):
            parser.add_argument(name)
    if has_rocpd:
        parser.add_argument("--version", action="store_true")
        parser.add_argument("--rocm-root")
        parser.add_argument("--att-target-cu")
    parser.add_argument("-o", "--output-file")
    parser.add_argument("-d", "--output-directory")
    formats = ("csv", "json", "pftrace", "otf2", *["rocpd"] * has_rocpd)
    parser.add_argument("--output-format", nargs="+", choices=formats, type=str.lower)
    parser.add_argument("--pmc", nargs="*")
    parser.add_argument("--kernel-include-regex")
    return parser


def is_selected(options):
    """Whether this process is one of --profile-mpi-ranks; all are, where it does not find their number."""
    rank = os.environ.get(options.mpi_world_rank_variable or "SLURM_PROCID")
    return not (options.profile_mpi_ranks and rank) or rank in options.profile_mpi_ranks.split(",")


def counters_of(options):
    """Those that are counted: the tool warns of the others, and ends in the first dispatch if there are too many."""
    arch = os.environ.get("FAKE_ARCH", "gfx942")
    asked = [name.removesuffix(":device=0") for words in options.pmc or [] for name in words.split(",")]
    known = [name for name in asked if name in SLOTS_OF and name not in ABSENT.get(arch, ())]
    if known != asked:
        print(f"Unable to find all counters for agent 1 (gpu-0, {arch}) in {asked}. Found: {known}", file=sys.stderr)
    used = [block for name in known for block in SLOTS_OF[name]]
    if any(used.count(block) > slots for block, slots in SLOTS.items()):
        print("error 38 :: Request exceeds the capabilities of the hardware to collect", file=sys.stderr)
        sys.exit(134)
    return known


def write(options, traced, counters, program):
    """The files of one process; a domain without records has none."""
    run = records.make_run(int(os.environ.get("FAKE_STEPS", 3)), one_window="--timing step" in " ".join(program))
    prefix = options.output_file or f"{socket.gethostname()}/{os.getpid()}"
    prefix = str(Path(options.output_directory or ".") / prefix)
    bundle = "runtime-trace" in traced
    kernels = bundle or "kernel-trace" in traced
    markers = bundle or "marker-trace" in traced
    formats = options.output_format or (["rocpd"] if RELEASE >= (7, 0) else ["csv"])
    seen = run._replace(
        dispatches=run.dispatches if kernels or counters else [],
        ranges=run.ranges if markers else [],
        api_calls=run.api_calls if bundle else [],
        copies=run.copies if bundle or "memory-copy-trace" in traced else [],
    )
    if not any(seen):
        return
    if "csv" in formats:
        renamed = run.renamed().dispatches if options.kernel_rename else seen.dispatches
        write_csv(options, prefix, seen._replace(dispatches=renamed if kernels else []), counters, renamed)
    if "pftrace" in formats:
        path = Path(f"{prefix}_results.pftrace")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"a trace for Perfetto")
    if "rocpd" in formats:  # keeps the kernels' own names
        records.write_rocpd(Path(f"{prefix}_results.db"), seen, counters)


def write_csv(options, prefix, seen, counters, counted):
    records.write_agent_info(Path(f"{prefix}_agent_info.csv"))
    counted = [d for d in counted if re.search(options.kernel_include_regex or "", d.name)]
    if counters and counted:
        records.write_counters(Path(f"{prefix}_counter_collection.csv"), counted, counters)
    if seen.dispatches:
        records.write_kernel_trace(Path(f"{prefix}_kernel_trace.csv"), RELEASE, seen.dispatches)
    if seen.api_calls:
        records.write_api_trace(Path(f"{prefix}_hip_api_trace.csv"), "HIP_RUNTIME_API", seen.api_calls)
    if seen.ranges:
        records.write_markers(Path(f"{prefix}_marker_api_trace.csv"), RELEASE, seen.ranges)
    if options.stats:
        for name, part in zip(("kernel", "marker_api", "hip_api", "memory_copy"), seen, strict=True):
            records.write_stats(Path(f"{prefix}_{name}_stats.csv"), part)


def run_program(program):
    """Its status. The tool's library takes the signals before the program can: it ends without a word of its own."""
    environment = os.environ | {"ROCP_TOOL_LIBRARIES": "librocprofiler-sdk-tool.so"}
    process = subprocess.Popen(program, env=environment, start_new_session=True)
    taken = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: (taken.append(number), process.kill()))
    status = process.wait()
    return -taken[0] if taken else status


def main():
    cut = [*sys.argv, "--"].index("--")
    arguments, program = sys.argv[1:cut], sys.argv[cut + 1 :]
    options = make_parser().parse_args(arguments)
    if getattr(options, "version", False):
        print(f"version: 1.0.0\nrocm_version: {'.'.join(map(str, RELEASE))}.0")
        return
    if os.environ.get("FAKE_ROOT") != getattr(options, "rocm_root", None):
        sys.exit("Fatal error: --rocm-root is not the ROCm of this PyTorch")
    traced = {name for name in TRACES if getattr(options, name.replace("-", "_"), None)}
    if options.stats and not traced:
        sys.exit("Fatal error: No tracing options were provided")
    complain()
    counters = counters_of(options)
    status = run_program(program)
    if not os.environ.get("FAKE_NOTHING") and is_selected(options):
        write(options, traced, counters, program)
    finish(status)


main()
