"""Record a training run, or any program, with a profiler: what get_trace.sh and the five others of the root do.

    python -m profilers.record get_trace.sh [OPTIONS]

Each script has a function here, which takes a Recording with the tool chosen, and whose docstring its --help shows,
with the options and the exit codes.
"""

import inspect
import os
import re
import shlex
import subprocess
import sys

if not __package__:
    print("run it from the root as python -m profilers.record", file=sys.stderr)
    sys.exit(2)

from measure.command_line import UsageError, exit_code_of, positive, program
from profilers.recording import ROOT, Recording, module_command, own_fault, parse, parser_of, suggestion
from profilers.rocm import architectures, core_of, python, rocm_path, root_of
from tiny_llama.launchers import this_process

# The counters of a run each. Each fits into a pass on gfx90a and gfx942. FETCH_SIZE and WRITE_SIZE do not fit together
# on gfx942, which also has no L2CacheHit: the reports compute the rate from hits and misses. Radeon cards have few of
# these, and theirs of the memory (FETCH_SIZE) are refused or zero on gfx1100.
PASSES = (
    "SQ_WAVES SQ_INSTS_VALU SQ_INSTS_VMEM_RD SQ_INSTS_VMEM_WR SQ_INSTS_LDS SQ_INSTS_SALU GRBM_COUNT GRBM_GUI_ACTIVE",
    "FETCH_SIZE",
    "WRITE_SIZE TCC_HIT_sum TCC_MISS_sum",
    "MeanOccupancyPerCU",
    "VALUUtilization VALUBusy MfmaUtil",
)
# Counters of the products that MfmaFlops leaves out. That of XF32 is known for gfx950 alone, whose units have no XF32.
# A pass has room for eight counters of their block, SQ, and MfmaFlops takes four.
LOW_PRECISION = {
    "gfx942": ["SQ_INSTS_VALU_MFMA_MOPS_F8"],
    "gfx950": ["SQ_INSTS_VALU_MFMA_MOPS_F8", "SQ_INSTS_VALU_MFMA_MOPS_F6F4"],
}
RADEON_PASSES = "SQ_WAVES SQ_INSTS_VALU SQ_INSTS_LDS SQ_INSTS_SALU GRBM_COUNT GRBM_GUI_ACTIVE", "L2CacheHit"
# The first is always counted: rates need it.
NCU_METRICS = """
gpu__time_duration.sum
sm__throughput.avg.pct_of_peak_sustained_elapsed
gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed
gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed
dram__bytes_read.sum
dram__bytes_write.sum
lts__t_sector_hit_rate.pct
sm__warps_active.avg.pct_of_peak_sustained_active
smsp__inst_executed.sum
launch__registers_per_thread
""".split()
FILTERS = {"--kernel-include-regex", "--kernel-exclude-regex", "--kernel-iteration-range"}
TRACED = "--kernel-trace", "--marker-trace"
NO_COUNTERS = "No hardware counters: they need rocprofv3 (AMD) or, for get_counters.sh --pmc, ncu (NVIDIA)."


def compare_with(recording):
    return suggestion("Compare with another run", "compare", recording.result, "OTHER")


# ----------------------------------------------------------------------------------------------------------------------
# get_trace.sh, get_hotspots.sh


def get_trace(recording):
    """Record the timeline of a training run, or of a --program, for Perfetto, in traces/trace_<time>/.

    It has kernels, copies, runtime calls, and the ranges that name steps, phases and layers. The same run gives the
    tables of its kernels and calls.
    """
    recording.start("traces/trace")
    recording.record_timeline("trace")
    recording.report_kernels()
    layer = "" if recording.options.program else ', for "layers.0" to find a layer'
    recording.finish(
        "Open the trace in https://ui.perfetto.dev (it stays on your machine): w and s zoom, a and d move.",
        f'Search for "step" to find the measured steps{layer}.',
        *recording.together,
    )


def get_hotspots(recording):
    """Rank the kernels of a training run, or of a --program, by their time, in hotspots/hotspot_<time>/."""
    recording.start("hotspots/hotspot")
    if recording.rocm:
        # CSV, as --stats writes nothing with ROCm 7's default, a database.
        recording.run_or_fail(recording.rocprofv3("hotspots", *TRACED, "--stats", "--output-format", "csv"))
        recording.require("*_kernel_stats.csv")
    else:
        recording.profile_by_torch()
    recording.report_kernels()
    recording.finish(compare_with(recording), suggestion("Draw it", "plot", recording.result), *recording.together)


# ----------------------------------------------------------------------------------------------------------------------
# Hardware counters. Those that cannot be read are missing from the result, and the rest is kept.


def passes_here(*more):
    """Return the counters of a run each that this machine's GPUs have; more: those of the matrix units."""
    return RADEON_PASSES if {name[:4] for name in architectures()} == {"gfx1"} else (*PASSES, *more)


def flop_here():
    """Return the counters of the FLOP of the matrix units that this machine's GPUs have, which fit into a run."""
    names = [name for architecture in architectures() for name in LOW_PRECISION.get(architecture, [])]
    return " ".join(dict.fromkeys(["MfmaFlops", *names]))


def count_by_rocprofv3(recording, passes):
    """Run the program for each pass, with the ranges that mark its steps. Return whether anything was counted."""
    counted = recording.dry
    for number, names in enumerate(map(str.split, passes), 1):
        folder = recording.result / f"pass_{number}"
        options = ["--pmc", *names, *TRACED, "--output-format", "csv"]
        if status := recording.run(recording.rocprofv3(f"pass_{number}/counters", *options)):
            recording.miss(f"{' '.join(names)}: {recording.explain(status)}")
            if folder.is_dir():
                folder.rename(f"{folder}.failed")
        # Unknown counters are dropped with a warning, and status 0. A name may end in :device=0.
        elif recording.recorded:
            text = "".join(path.read_text(errors="replace") for path in folder.rglob("*_counter_collection.csv"))
            if dropped := [name for name in names if f'"{name.partition(":")[0]}"' not in text]:
                filters = " and ".join(sorted(recording.asked & FILTERS))
                reason = f"no kernel passes {filters}" if filters else "rocprofv3 does not say why"
                recording.miss(f"{' '.join(dropped)}: {recording.complaint() or reason}")
            counted = counted or dropped != names
    return counted


def count_by_ncu(recording, metrics):
    """Record by ncu, which repeats each kernel for every group of counters. Return the exit status.

    It records one step of the training script, and of another program its ranges "step" or, without any, its whole run.
    """
    report, raw = recording.result / "ncu.ncu-rep", "ncu_raw.csv"
    steps, one_step = "--nvtx --nvtx-include step/".split(), "--num-steps 1 --warmup-steps 1".split()
    options = "--clock-control none --print-kernel-base demangled --metrics".split()
    options += [",".join(sorted({NCU_METRICS[0], *metrics}))]
    place = ["-f", "-o", str(report.with_suffix("")), *recording.tool_arguments]
    program = [*recording.program, *([] if recording.options.program else one_step)]
    status = recording.attempt("hardware counters", ["ncu", *steps, *options, *place, *program])
    if recording.options.program and not status and not report.exists():
        recording.note(f"Without NVTX ranges named step in {recording.name}, ncu counts in its whole run:")
        status, raw = recording.attempt("hardware counters", ["ncu", *options, *place, *program]), "whole_ncu_raw.csv"
    table = ["ncu", "--import", str(report), "--csv", "--page", "raw"]
    table += "--print-units base --print-kernel-base demangled".split()
    write = f"{shlex.join(table)} > {shlex.quote(str(recording.result))}/{raw}"
    return status or recording.attempt("the counters as a table", ["sh", "-c", write])


def get_counters(recording):
    """Record every kernel of a training run, or of a --program, in counters/counter_<time>/.

    With --pmc hardware counters are read too.
    """
    recording.start("counters/counter")
    result, counts = recording.result, recording.options.pmc is not None
    passes = [" ".join(names).replace(",", " ") for names in recording.options.pmc or () if names]
    if recording.rocm:
        # With --kernel-rename names in a database would not match those in the CSV files of the passes.
        has_database = "--kernel-rename" not in recording.asked and recording.rocm.knows("rocpd", (7, 0))
        kind, file = ("rocpd", "*_results.db") if has_database else ("csv", "*_kernel_trace.csv")
        recording.run_or_fail(recording.rocprofv3("kernels", *TRACED, "--output-format", kind))
        recording.require(file)
        counts = counts and count_by_rocprofv3(recording, passes or passes_here())
    else:
        recording.profile_by_torch()
        if recording.tool == "ncu":
            counts = not count_by_ncu(recording, " ".join(passes).split() or NCU_METRICS)
        elif counts:
            recording.note(NO_COUNTERS)
            counts = False
    failed = recording.report_kernels("--csv", result)
    if counts:
        recording.report("the table of the counters", "counters", result)
    table = "kernels_of_the_steps.csv, or kernels.csv beside it if the recording does not name its steps"
    lines = [] if failed else [f"The table as a file: {result}/{table}"]
    recording.finish(*lines, compare_with(recording), *recording.together)


# ----------------------------------------------------------------------------------------------------------------------
# get_rocprof_compute.sh


def get_rocprof_compute(recording):
    """Measure how well each kernel of a training step uses the GPU, in rocprof_compute/profile_<time>/.

    It shows the share of the peak (speed of light), occupancy, caches and memory; without rocprof-compute, times only.
    The tool repeats the program about ten times, so that a single step takes a few minutes; of a --program it counts
    the whole run, which should be as short. The options after a second -- are those of rocprof-compute profile, such as
    -k rmsnorm_kernel.
    """
    if recording.options.operators and not recording.rocm:
        raise UsageError(f"--operators needs rocprof-compute, and this run uses {recording.tool}")
    if recording.rocm:
        run_rocprof_compute(recording)
        return
    recording.start("rocprof_compute/profile")
    recording.profile_by_torch()
    recording.report_kernels()
    alone = shlex.join([python(), str(ROOT / "run_triton_profiling.py")])
    ours = [] if recording.options.program else [alone]
    recording.finish(
        "Times only: hardware counters need rocprof-compute on an AMD GPU, or get_counters.sh --pmc on an NVIDIA GPU.",
        *(f"Bandwidth and arithmetic of each Triton kernel, from what it must do: {command}" for command in ours),
    )


def run_rocprof_compute(recording):
    tool, asked = recording.rocm, recording.asked
    # The help tells where the files of a rank go.
    if this_process() and not tool.knows("%rank%", (7, 12)):
        raise UsageError(
            f"{tool.path} profiles one process at a time on a node, as all before ROCm 7.12: start this script without "
            "a launcher, or get_counters.sh --pmc with it"
        )
    traced = operators_of(tool) if recording.options.operators else []
    # The kernels of the warm-up are counted too. One step, which --graph needs, has the same kernels as a measured one.
    if not recording.options.program:
        recording.arguments = ["--warmup-steps", "1", *recording.arguments]
    recording.start("rocprof_compute/profile")
    workload = "tiny_llama"
    if recording.options.program:  # runs in this folder, where its arguments may name files
        workload, (interpreter, *words) = "program", recording.program
        recording.program = [interpreter, str(ROOT / "profilers" / "as_main.py"), os.getcwd(), *words]
    for word in recording.program:
        if re.search(r"""[\s;"']""", word):  # it joins the words by spaces and splits them again
            raise UsageError(f'rocprof-compute cannot pass on "{word}": no spaces, quotes or ;')
    # The root has a list of counters: up to 7.11 the tool looks for it in /opt/rocm, later in ROCM_PATH.
    root = str(core_of(tool.path) or root_of(tool.path) or rocm_path())
    os.environ["ROCM_PATH"] = root
    # --roofline is the name of ROCm 10.2 for --roof-only, but that it may stand beside other blocks.
    roofline = asked & {"--roof-only", "--roofline"}
    chosen = asked & {"-b", "--block", "--set", "--speed-of-light", "--memory-chart"}
    options = ["--no-roof"] * (not roofline)
    if tool.knows("--rocprofiler-sdk-library-path", (7, 0), until=(7, 12)):
        options += ["--rocprofiler-sdk-library-path", f"{root}/lib/librocprofiler-sdk.so"]
    options += [*(f"--{name}-trace" for name in traced), *["--experimental"] * bool(traced)]
    # The meaning of -p depends on the release; below the working directory all releases agree.
    own = [*options, *recording.tool_arguments, "--", *recording.program]
    recording.run_or_fail([*recording.launch, "profile", "-n", workload, *own], folder=recording.result)
    if traced and not recording.dry and "roctx" in (reason := recording.complaint() or ""):
        traced = recording.miss(f"the operators ({reason})")
    if roofline and not chosen:
        recording.require("roofline.csv")
        place = recording.recorded.parent if recording.recorded else recording.result
        chart = shlex.join([*recording.launch, "analyze", "-p", str(place), "-b", "4"])
        recording.finish(f"The roofline: empirRoof_* beside it or, since ROCm 7.13, {chart}")
        return
    # sysinfo.csv exists even if nothing was counted; results_* since 7.12, *.db where these are not written.
    recording.require("pmc_perf*.csv*", "results_*.csv*", "*.db")
    workloads = recording.result / "workloads"
    described = next(workloads.rglob("sysinfo.csv"), workloads / workload / "GPU_MODEL" / "sysinfo.csv")
    begin = 0 if recording.dry else recording.log.stat().st_size
    recording.complete()
    analyze = [*recording.launch, "analyze", "-p", str(described.parent)]
    # Whole sections, as single metrics are renumbered between releases; if a person chose, what was counted decides.
    analyze_kernels(recording, analyze, [] if chosen else "-b 2 6.2 16.1 17.1".split())
    if traced:
        recording.note("Operators and their kernels:")
        listed = [f"--list-{name}-operators" for name in traced]
        recording.attempt("an analysis", [*analyze, "--experimental", *listed])
    if not recording.dry:
        (recording.result / "analysis.txt").write_bytes(recording.log.read_bytes()[begin:])
    recording.finish(
        f"All of this as text: {recording.result}/analysis.txt",
        f"Everything that was measured: {shlex.join(analyze)}",
        "Sections, -b: 2 speed of light, 6.2 what limits occupancy, 12 LDS, 16 vector L1, 17 L2. "
        "Kernels, -k: --list-stats",
    )


def operators_of(tool):
    """Return to whose operators rocprof-compute can attribute counters: PyTorch's and, in newer releases, Triton's."""
    since = {"torch": (7, 12), "triton": (10, 0)}
    if traced := [name for name, first in since.items() if tool.knows(f"--{name}-trace", first)]:
        return traced
    lacks = f"--torch-trace, of ROCm 7.12 or newer; this one has none: {tool.path}"
    raise UsageError(f"--operators needs a rocprof-compute with {lacks}")


def analyze_kernels(recording, analyze, sections):
    """Analyze each kernel by itself: without -k, an analysis shows the average over all of them."""

    def succeeds(title, *options):
        recording.note(title)
        return not recording.attempt("an analysis", [*analyze, *options])

    if not succeeds("Kernels and dispatches:", "--list-stats"):
        return
    if recording.dry:
        title = f"For each of the first {recording.options.kernels} of these kernels, of which KERNEL is the number:"
        succeeds(title, *sections, "-k", "KERNEL")
        return
    command = module_command("rocprof_compute_kernels", analyze[-1], "--top", recording.options.kernels)
    listing = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if listing.returncode:
        reason = own_fault("profilers.rocprof_compute_kernels", listing.returncode, listing.stdout)
        recording.miss(f"each kernel by itself ({reason}); try again: {shlex.join(command)}")
        return
    for line in listing.stdout.splitlines():
        number, _, title = line.partition("\t")
        if not succeeds(title, *sections, "-k", number):
            return


# ----------------------------------------------------------------------------------------------------------------------
# get_rocprof_sys.sh


def get_rocprof_sys(recording):
    """Sample the call stacks of a training run, or of a --program, in rocprof_sys/profile_<time>/.

    The same run records the GPU's activity, clocks and power, and a second one the time of each Python function. The
    options after a second -- are those of rocprof-sys-sample, such as -f 1000 or -E rcclp.
    """
    recording.start("rocprof_sys/profile")
    profile = recording.result / "host_profile.pstats"
    if recording.rocm:
        command = rocprof_sys(recording)
        advice = "Open the trace in https://ui.perfetto.dev, the sampling_* and wall_clock* files in an editor."
    else:
        command = recording.by_torch()
        advice = "Open trace.json in https://ui.perfetto.dev"
    status = recording.attempt("the timeline", command)
    # It has no Python functions; a second run records these, whatever became of the first.
    command, who = module_command("host_profile", profile, *recording.program[1:]), f"{recording.name} in cProfile"
    failed = recording.attempt("the time of each Python function", command, who)
    if status and failed:
        recording.fail(status, recording.missing[0])
    if not status:
        recording.require("trace.json", "perfetto-trace*.p*", "*.db", "wall_clock*")
    if str(recording.recorded).endswith(".db"):
        advice = f"Make a trace for Perfetto of it: rocpd convert -i {recording.recorded} -f pftrace"
    functions = f"What called what on the host: {shlex.join([python(), '-m', 'pstats', str(profile)])}"
    recording.finish(*[advice] * (not status), *[functions] * (not failed))


def rocprof_sys(recording):
    """Return the command line: -run would not sample, and -P without -T would switch the trace off."""
    # From ROCm 10.1 on a trace for Perfetto has to be asked for by --output-format, which excludes -T and -P.
    formats = "--output-format proto text" if recording.rocm.knows("--output-format", (7, 14)) else "-T -P"
    formats = [] if "--output-format" in recording.asked else formats.split()
    # With the tool's signal handler Python would not receive Ctrl-C, and thousands of lines of memory maps would follow
    # the reason of a crash.
    name = "ROCPROFSYS_ENABLE_SIGNAL_HANDLER"
    options = ["-H", "-D", *formats, "-o", str(recording.result), *recording.tool_arguments]
    return ["env", f"{name}={os.environ.get(name) or 'OFF'}", *recording.launch, *options, "--", *recording.program]


# ----------------------------------------------------------------------------------------------------------------------
# run_rocprof_triton.sh


def run_rocprof_triton(recording):
    """Run the profiling session of Exercise 1: a timeline, memory traffic, counters and the inputs of a roofline.

    Its summary, rocprof_results/triton_analysis_summary.md, has launch overhead, bandwidth and utilisation. Without
    --output the recordings are written to rocprof_results/session_<time>/; older sessions are kept. With --program that
    program takes the place of the training run; the kernels that are measured alone stay those of tiny_llama_v3.py.
    """
    recording.start("rocprof_results/session")
    result = recording.result
    # The training run comes first: it refuses what is wrong with its options at once.
    run = f"the run of {recording.name}" if recording.options.program else "a training run"
    recording.note(f"--- 1. Basic: the timeline of {run}, then each kernel alone")
    recording.record_timeline("basic")
    alone = str(result / "kernels_alone.json")
    by_itself = "run_triton_profiling.py"
    recording.run_or_fail([python(), str(ROOT / by_itself), "--json", alone], who=by_itself)
    if recording.rocm:
        recording.note("--- 2. to 4. Memory traffic, counters, roofline inputs: a run for each group of counters")
        count_by_rocprofv3(recording, passes_here(flop_here()))
    else:
        recording.note(f"--- 2. to 4. {NO_COUNTERS}")
    recording.report("the pictures", "plot", result, alone)
    recording.report("the summary", "summary", result, "--tool", recording.tool, *recording.named)
    summary = result / "triton_analysis_summary.md"
    # A link to the newest; a file of that name is kept.
    newest = result.parent / summary.name
    if summary.exists() and not recording.options.output and (newest.is_symlink() or not newest.exists()):
        newest.unlink(missing_ok=True)
        newest.symlink_to(summary.relative_to(result.parent))
        summary = newest
    recording.finish(*[f"The summary: {summary}"] * summary.exists())


# ----------------------------------------------------------------------------------------------------------------------

SCRIPTS = {  # function, and tools in the order in which they are tried
    "get_trace.sh": (get_trace, "rocprofv3 torch"),
    "get_hotspots.sh": (get_hotspots, "rocprofv3 torch"),
    "get_counters.sh": (get_counters, "rocprofv3 ncu torch"),
    "get_rocprof_compute.sh": (get_rocprof_compute, "rocprof-compute torch"),
    "get_rocprof_sys.sh": (get_rocprof_sys, "rocprof-sys torch"),
    "run_rocprof_triton.sh": (run_rocprof_triton, "rocprofv3 torch"),
}


def record(script, argv):
    function, names = SCRIPTS[script]
    tools, steps = names.split(), 1 if function is get_rocprof_compute else 10  # of the program, which that one repeats
    parser = parser_of(script, inspect.getdoc(function), tools, steps)
    add = parser.add_argument
    if function is get_counters:
        add(
            "--pmc",
            nargs="*",
            action="append",
            metavar="NAME",
            help="count these, or without names a default choice; each --pmc is a run of its own",
        )
    elif function is get_rocprof_compute:
        kernels = "rocprof-compute: report on the N kernels that take the most time (default: 5)"
        add("--kernels", type=positive, default=5, metavar="N", help=kernels)
        operators = "rocprof-compute, experimental: what each operator of PyTorch, and launch of Triton, costs"
        add("--operators", action="store_true", help=operators)
    options = parse(parser, tools, argv)
    if function is get_counters and options.pmc is None:
        tools.remove("ncu")  # which only counts
    recording = Recording(tools, options, steps)
    try:
        function(recording)
    finally:
        recording.set_aside()  # does nothing once all is recorded
    return 0


@program("record")
def main(argv):
    script, *arguments = argv or [""]
    if script not in SCRIPTS:
        raise UsageError(f"{script!r} is none of {', '.join(SCRIPTS)}")
    return exit_code_of(lambda: record(script, arguments), script)


if __name__ == "__main__":
    # The script named the root to find this module; the profiled program is not to see it.
    os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH", "").removeprefix(str(ROOT)).lstrip(":")
    sys.exit(main(sys.argv[1:]))
