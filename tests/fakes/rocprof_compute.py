"""rocprof-compute: profile and analyze of ROCm 6.4 (3.1) to 7.2 (3.4), 7.12 (3.5) to 10.2 (3.10)."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
from records import KERNELS
from tool import RELEASE, complain

PASSES = 3  # really 12 to 15
WEIGHTS_KERNEL = (
    "void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4, "
    "at::native::templates::cuda::normal_and_transform<float, float>(at::TensorIteratorBase&)>(long, PhiloxCudaState)"
)
SECTIONS = {
    "2": "System Speed-of-Light", "6": "Workgroup Manager", "7": "Wavefront", "12": "Local Data Share",
    "16": "Vector L1 Data Cache", "17": "L2 Cache",
}  # fmt: skip


def fail(message):
    sys.exit(f"ERROR {message}")


# --- options


def make_parser():
    parser = argparse.ArgumentParser(prog="rocprof-compute")
    modes = parser.add_subparsers(dest="mode", required=True)
    profile = modes.add_parser("profile", allow_abbrev=False)
    profile.add_argument("-n", "--name", required=True)
    profile.add_argument("--no-roof", action="store_true")
    profile.add_argument("--roof-only", *["--roofline"] * (RELEASE >= (10, 2)), action="store_true")
    profile.add_argument("-k", "--kernel", nargs="+", default=[])
    profile.add_argument("-b", "--block", nargs="+", default=[])
    profile.set_defaults(set=None)
    if RELEASE >= (7, 1):
        profile.add_argument("--set")
    if RELEASE >= (7, 12):
        profile.add_argument("--output-directory", help="default: workloads/NAME/%%gpumodel%% or, by MPI, /%%rank%%")
        rocm = os.environ.get("ROCM_PATH", "/opt/rocm")
        default = f"{rocm}/lib/rocprofiler-sdk/librocprofiler-sdk-tool.so"
        profile.add_argument("--rocprofiler-sdk-tool-path", dest="library", default=default)
    elif RELEASE >= (7, 0):
        default = "/opt/rocm/lib/librocprofiler-sdk.so"  # whatever ROCM_PATH says
        profile.add_argument("--rocprofiler-sdk-library-path", dest="library", default=default)
    analyze = modes.add_parser("analyze", allow_abbrev=False)
    analyze.add_argument("-p", "--path", required=True)
    analyze.add_argument("-b", "--block", nargs="+", default=[])
    analyze.add_argument("-k", "--kernel", nargs="+", type=int, default=[])
    analyze.add_argument("-d", "--dispatch", nargs="+", type=int, default=[])
    analyze.add_argument("--list-stats", action="store_true")
    profile.set_defaults(traced=[])
    analyze.set_defaults(operators=[])
    for name in [name for name, since in (("torch", (7, 12)), ("triton", (10, 0))) if RELEASE >= since]:
        profile.add_argument(f"--{name}-trace", dest="traced", action="append_const", const=name)
        analyze.add_argument(f"--list-{name}-operators", dest="operators", action="append_const", const=name)
    if RELEASE >= (7, 12):
        for mode in (profile, analyze):
            mode.add_argument("--experimental", action="store_true")
    return parser


# --- what it wants of the machine


def require_packages(mode):
    package = os.environ.get("FAKE_NO_PACKAGE")
    if package and (mode == "analyze" or RELEASE < (7, 13)):
        sys.exit(f"[ERROR] The '{package}' package was not found in the current execution environment.")


def require_counter_list(library):
    """A Python module of the ROCm that holds the library, looked for from there."""
    root = Path(library).parents[2 if RELEASE >= (7, 12) else 1]
    if not (root / "bin" / "rocprofv3_avail_module").is_dir():
        sys.exit("ModuleNotFoundError: No module named 'rocprofv3_avail_module'")


# --- profile


def profile(options, program):
    if options.traced and not options.experimental:
        fail("Torch trace is an experimental feature. Use --experimental to enable it.")
    if options.no_roof and options.roof_only:
        fail("--roof-only wants a roofline")
    if bool(options.block) + bool(options.set) + options.roof_only > 1 + (RELEASE >= (10, 2)):
        fail("--block, --set, and --roof-only are mutually exclusive options. Please use only one of them.")
    if RELEASE >= (7, 1):  # 7.0 counts with rocprofv3
        require_counter_list(options.library)
    # Without -- the first word is dropped, and the message is the same.
    if RELEASE < (7, 0) and not (program and os.path.isfile(program[0])):
        fail(f"Your command {' '.join(program[:1])} doesn't point to a executable. Please verify.")
    complain()
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") if RELEASE >= (7, 12) else None
    folder = Path("workloads", options.name, rank or "MI300X_A1")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sysinfo.csv").write_text("workload_name,gpu_arch\ntiny_llama,gfx942\n")
    words = " ".join(program).split()
    for _ in range(PASSES):
        if subprocess.run(words).returncode:
            fail("Profiling execution failed.")
    if os.environ.get("FAKE_NOTHING"):
        return
    warmup_steps = int((["3", *re.findall(r"--warmup-steps (\d+)", " ".join(words))])[-1])
    for number in range(PASSES if RELEASE >= (7, 13) else 1):
        name = f"results_pmc_perf_{number}.csv" if RELEASE >= (7, 13) else "pmc_perf.csv"
        write_counters(folder / (f"{name}.gz" if RELEASE >= (10, 1) else name), options.kernel, warmup_steps + 1)
    if not options.no_roof:
        (folder / "roofline.csv").write_text("device,HBMBw\n0,4000\n")


def write_counters(path, wanted, steps):
    launches = [(WEIGHTS_KERNEL, 2_000_000)] * 2
    for name, (count, ns) in KERNELS.items():
        launches += [(name, ns)] * count * steps
    table = pd.DataFrame(launches, columns=["Kernel_Name", "ns"])
    table = table[[not wanted or any(part in name for part in wanted) for name in table["Kernel_Name"]]]
    start = 1_000_000 * table.index
    table = table.assign(Dispatch_ID=table.index, Start_Timestamp=start, End_Timestamp=start + table["ns"])
    table.drop(columns="ns").to_csv(path, index=False)


# --- analyze


def analyze(options):
    folder = Path(options.path)
    if not (folder / "sysinfo.csv").exists():
        fail(f"Invalid directory {folder}\nPlease try again.")
    recorded = sorted([*folder.glob("pmc_perf.csv"), *folder.glob("results_*.csv*")])
    if not recorded:
        fail("[analysis] No profiling data found.")
    if options.operators and options.experimental:
        print("PyTorch Operator Call Tree:")
        return
    dispatches = pd.read_csv(recorded[0])
    if options.dispatch:
        dispatches = dispatches.iloc[[number - (RELEASE >= (10, 2)) for number in options.dispatch]]
    kernels = write_statistics(folder, dispatches)
    for number in options.kernel:
        if number >= len(kernels):
            fail(f"{number} is an invalid kernel id. Please enter an id between 0-{len(kernels) - 1}")
    if options.list_stats:
        print("Detected Kernels (sorted descending by duration)", *kernels, "Dispatch list", sep="\n")
        return
    print("0. Top Stats", *kernels[:10], sep="\n")
    for block in options.block or SECTIONS:
        if block.split(".")[0] not in SECTIONS:  # 6.x shows nothing then
            fail(f"{block} is not a metric id of --list-metrics")
        print("-" * 80, f"\n{block}. {SECTIONS[block.split('.')[0]]}")


def write_statistics(folder, dispatches):
    """As every analysis does; the position in the first file is what -k means. Returns its names."""
    times = dispatches["End_Timestamp"] - dispatches["Start_Timestamp"]
    table = times.groupby(dispatches["Kernel_Name"]).agg(["count", "sum", "mean"]).sort_values("sum", ascending=False)
    table.columns = ["Count", "Sum(ns)", "Mean(ns)"]
    table.to_csv(folder / "pmc_kernel_top.csv")
    return list(table.index)


def main():
    cut = [*sys.argv, "--"].index("--")
    arguments, program = sys.argv[1:cut], sys.argv[cut + 1 :]
    options = make_parser().parse_args(arguments)
    require_packages(options.mode)
    if options.mode == "profile":
        profile(options, program)
    else:
        analyze(options)


main()
