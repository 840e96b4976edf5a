"""rocprofv3: the options of ROCm 6.2 to 10.1, and what each of them leaves."""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import gpu_counters
import records
from tool import RELEASE, complain, finish

TRACES = {  # option: since release
    "runtime-trace": (6, 3), "sys-trace": (6, 2), "hip-trace": (6, 2), "marker-trace": (6, 2), "kernel-trace": (6, 2),
    "memory-copy-trace": (6, 2), "memory-allocation-trace": (6, 4), "scratch-memory-trace": (6, 2), "hsa-trace": (6, 2),
    "rccl-trace": (6, 2), "kokkos-trace": (6, 3), "rocdecode-trace": (6, 4), "rocjpeg-trace": (7, 0),
    "hip-runtime-trace": (6, 2), "hip-compiler-trace": (6, 2), "hsa-core-trace": (6, 2), "hsa-amd-trace": (6, 2),
    "hsa-image-trace": (6, 2), "hsa-finalizer-trace": (6, 2), "kfd-trace": (7, 13), "hip-graph-trace": (7, 13),
    "ompt-trace": (10, 0),
}  # fmt: skip
SHORT = {"runtime-trace": "-r", "sys-trace": "-s", "summary": "-S", "summary-per-domain": "-D"}
SHORT |= {"mangled-kernels": "-M", "truncate-kernels": "-T"}
SWITCHES = {
    "stats": (6, 2), "summary": (6, 3), "summary-per-domain": (6, 3), "mangled-kernels": (6, 2),
    "truncate-kernels": (6, 2), "kernel-rename": (6, 3), "output-config": (7, 0), "selected-regions": (7, 0),
    "group-by-queue": (7, 0), "disable-signal-handlers": (7, 0), "att": (7, 0), "spm": (7, 14),
}  # fmt: skip


def truth(value):
    if value.lower() in ("y", "yes", "t", "true", "on", "1"):
        return True
    if value.lower() in ("n", "no", "f", "false", "off", "0"):
        return False
    raise ArithmeticError(value)  # argparse would turn a ValueError into status 2


def make_parser():
    has_rocpd = RELEASE >= (7, 0)
    formats = ("csv", "json", "pftrace", "otf2", *(["rocpd"] if has_rocpd else []))
    parser = argparse.ArgumentParser(prog="rocprofv3", allow_abbrev=not has_rocpd)

    def add(*names, **kwargs):
        parser.add_argument(*names, **kwargs)

    for name, since in (TRACES | SWITCHES).items():
        if RELEASE >= since:
            short = [SHORT[name]] if name in SHORT else []
            add(*short, f"--{name}", nargs="?", const=True, type=truth, metavar="BOOL")
    if has_rocpd:
        add("-v", "--version", action="store_true")
        add("--minimum-output-data", type=int)
        add("-A", "--agent-index", choices=("absolute", "relative", "type-relative"))
        add("-p", "--pid", nargs="+")
        add("--rocm-root")
        for name in ("--att-target-cu", "--att-shader-engine-mask"):
            add(name)
        add("--att-library-path", nargs="+")
    if RELEASE >= (7, 2):
        add("--profile-mpi-ranks")
    add("-i", "--input")
    add("-o", "--output-file")
    add("-d", "--output-directory")
    add(*(["-f"] if has_rocpd else []), "--output-format", nargs="+", choices=formats, type=str.lower)
    levels = ("fatal", "error", "warning", "info", "trace", "env", *(["config"] if has_rocpd else []))
    add("--log-level", choices=levels, type=str.lower)
    if RELEASE >= (6, 3):
        add("--pmc", nargs="*")
        add("--summary-groups", nargs="+")
        add("--summary-output-file")
        add("-u", "--summary-units", choices=("sec", "msec", "usec", "nsec"))
    if RELEASE >= (6, 4):
        add("-E", "--extra-counters")
        add("-P" if has_rocpd else "-p", "--collection-period", nargs="+")
        add("--collection-period-unit", nargs=1, choices=("hour", "min", "sec", "msec", "usec", "nsec"))
    for name in ("--kernel-include-regex", "--kernel-exclude-regex"):
        add(name)
    add("--kernel-iteration-range", nargs="+")
    add("--perfetto-backend", nargs=1, choices=("inprocess", "system"))
    for name in ("--perfetto-buffer-size", "--perfetto-shmem-size-hint"):
        add(name, type=int)
    add("--perfetto-buffer-fill-policy", choices=("discard", "ring_buffer"))
    add("-L", "--list-avail" if RELEASE >= (6, 4) else "--list-metrics", nargs="?", const=True, type=truth)
    add("--preload", nargs="*")
    return parser


def counters_of(options):
    """Those that are counted: the tool warns of the others, and ends in the first dispatch if there are too many."""
    arch = os.environ.get("FAKE_ARCH", "gfx942")
    asked = [name for words in getattr(options, "pmc", None) or [] for name in words.split(",")]
    known = gpu_counters.available(asked, arch)
    if known != asked:
        warning = f"Unable to find all counters for agent 1 (gpu-0, {arch}) in [{', '.join(asked)}]"
        print(f"{warning}. Found: [{', '.join(known)}]", file=sys.stderr)
    if not gpu_counters.fits(known, arch):
        print("error 38 :: Request exceeds the capabilities of the hardware to collect", file=sys.stderr)
        sys.exit(134)
    return known


def write(options, traced, counters, program):
    """The files of one process; a domain without records has none."""
    run = records.make_run(int(os.environ.get("FAKE_STEPS", 3)), one_window="--timing step" in " ".join(program))
    prefix = options.output_file or f"{socket.gethostname()}/{os.getpid()}"
    prefix = str(Path(options.output_directory or ".") / prefix)
    bundle = "runtime-trace" in traced or "sys-trace" in traced
    kernels = bundle or "kernel-trace" in traced
    markers = (bundle or "marker-trace" in traced) and not os.environ.get("FAKE_NO_RANGES")
    formats = options.output_format or (["rocpd"] if RELEASE >= (7, 0) else ["csv"])
    if RELEASE >= (7, 13) and {"csv", "pftrace", "otf2"} & set(formats):
        print("Warning: csv, pftrace and otf2 are deprecated as formats of the recording", file=sys.stderr)
    if RELEASE < (6, 4) and "csv" in formats:
        records.write_agent_info(Path(f"{prefix}_agent_info.csv"))
    seen = run._replace(
        dispatches=run.dispatches if kernels or counters else [],
        ranges=run.ranges if markers else [],
        api_calls=run.api_calls if bundle or "hip-trace" in traced or "hip-runtime-trace" in traced else [],
        copies=run.copies if bundle or "memory-copy-trace" in traced else [],
    )
    if getattr(options, "selected_regions", None):  # the program calls roctxProfilerResume after the warm-up
        begin = min(r.start for r in run.ranges)
        seen = records.Run(*([r for r in part if r.start >= begin] for part in seen))
    if not any(seen):
        return
    if "csv" in formats:
        renamed = run.renamed().dispatches if getattr(options, "kernel_rename", None) else seen.dispatches
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
    try:
        options = make_parser().parse_args(arguments)
    except ArithmeticError as error:
        sys.exit(f"ValueError: invalid truth value {error} (type=str)")
    if getattr(options, "version", False):
        print(f"version: 1.0.0\nrocm_version: {'.'.join(map(str, RELEASE))}.0")
        return
    if getattr(options, "pid", None):
        sys.exit("Fatal error: The -p shorthand option for --collection-period is now an upper-case -P")
    if not program:
        sys.exit("Fatal error: No application provided")
    if getattr(options, "selected_regions", None) and options.collection_period:
        sys.exit("Fatal error: --selected-regions and --collection-period exclude each other")
    if getattr(options, "att", None) and RELEASE < (7, 13) and not options.att_library_path:
        sys.exit("Fatal error: librocprof-trace-decoder.so was not found: --att-library-path")
    if os.environ.get("FAKE_ROOT") != getattr(options, "rocm_root", None):
        sys.exit("Fatal error: --rocm-root is not the ROCm of this PyTorch")
    if ranks := getattr(options, "profile_mpi_ranks", None):
        spans = [[int(number) for number in part.split("-")] for part in ranks.split(",")]
        if not any(span[0] <= int(os.environ["RANK"]) <= span[-1] for span in spans):
            finish(subprocess.run(program).returncode)
    traced = {name for name in TRACES if getattr(options, name.replace("-", "_"), None)}
    if (options.stats or getattr(options, "summary", None)) and not traced and not (options.pmc and RELEASE >= (7, 0)):
        sys.exit("Fatal error: No tracing options were provided")
    complain()
    counters = counters_of(options)
    status = run_program(program)
    if not os.environ.get("FAKE_NOTHING"):
        write(options, traced, counters, program)
    finish(status)


main()
