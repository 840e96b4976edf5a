"""The shell scripts against fakes of the profilers of ROCm 6.2 to 10.1, and of ncu."""

import itertools
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from profilers import rocm
from profilers.readers import read_dispatches, read_kernel_stats, read_step_stats
from tests.fakes.machine import FOLDERS, ROOT, as_numbers, first_fast

RELEASES = first_fast("10.0", "6.4")
ALL_RELEASES = first_fast("10.0", "6.3", "6.4", "7.0", "7.1", "7.2", "7.14", "10.1")
SCRIPTS = tuple(FOLDERS)
OF_ROCPROFV3 = ("get_trace.sh", "get_hotspots.sh", "get_counters.sh", "run_rocprof_triton.sh")
ROCM_TOOL = {"get_rocprof_compute.sh": "rocprof-compute", "get_rocprof_sys.sh": "rocprof-sys"}
FORMATS = "-H -D --output-format proto text"
STARTED_BY = (  # torchrun, srun, Open MPI and MPICH name these
    ("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)  # fmt: skip

# --- with ROCm


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_runs_with_rocm(machine, script, release):
    run = machine.with_rocm(release).run(script)
    assert run.code == 0 and run.err == ""
    tool = ROCM_TOOL.get(script, "rocprofv3")
    assert run.out.startswith(f"Tool: {tool} of ROCm {release}: {machine.folder}/rocm/bin/")
    (result,) = machine.results()
    assert re.fullmatch(FOLDERS[script] + r"_\d{8}_\d{6}", result)
    assert f"\nResults: {machine.work / result}\n" in run.out
    log = (machine.work / result / "log.txt").read_text()
    assert "tiny llama: --batch-size 8 --seq-len 128 --num-steps" in log and "\n".join(log.splitlines()[:1]) in run.out


def one_file(machine, pattern):
    (path,) = machine.work.rglob(pattern)
    assert path.stat().st_size
    return path


@pytest.mark.parametrize("release", first_fast("7.1", "6.4", "7.0"))
def test_hotspots_rank_the_kernels_of_the_steps(machine, release):
    run = machine.with_rocm(release).run("get_hotspots.sh")
    assert one_file(machine, "hotspots_kernel_stats.csv") and one_file(machine, "hotspots_kernel_trace.csv")
    assert re.search(r"^Kernels of 3 steps, ms and calls a step: [\d.]+ ms in 19 calls of 6 kernels$", run.out, re.M)
    ranked = re.findall(r"^ *([\d.]+) %  +[\d.]+ +(\d+) +[\d.]+  (.*?)  +(\S+)", run.out, re.M)
    shares = [float(share) for share, *_ in ranked]
    assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(100, abs=0.5)
    assert ranked[0][1:3] == ("6", "matrix product")
    assert ranked[1][2:] == ("attention backward", "flash_attention_backward_kernel")
    assert "triton_poi_autotuned" not in run.out  # warm-up


@pytest.mark.parametrize("release, pattern", [("6.4", "kernels_kernel_trace.csv"), ("7.0", "kernels_results.db")])
def test_counters_take_the_format_of_the_release(machine, release, pattern):
    run = machine.with_rocm(release).run("get_counters.sh", "--output", "out")
    assert run.code == 0 and one_file(machine, pattern)
    table = read_kernel_stats(one_file(machine, "kernels_of_the_steps.csv"))
    reference, steps = read_step_stats(machine.work / "out" / pattern if release == "7.0" else machine.work / "out")
    assert steps == 3 and list(table["Calls"]) == list(reference["Calls"])
    assert "hardware counters" not in run.out


def test_database_is_summarized_by_rocpd_where_it_works(machine):
    assert machine.with_rocm("7.1").run("get_counters.sh", "--output", "out").code == 0
    summary = read_kernel_stats(one_file(machine, "rocpd_kernels_summary.csv"))
    assert list(summary["Name"]) == list(read_kernel_stats(one_file(machine, "kernels_results.db"))["Name"])


def test_database_is_read_all_the_same_where_rocpd_fails(machine):
    machine.with_rocm("7.1")
    (machine.folder / "rocm" / "bin" / "rocpd").write_text("#!/bin/sh\necho ImportError >&2\nexit 1\n")
    run = machine.run("get_counters.sh", "--output", "out")
    assert run.code == 0 and "rocpd failed" in run.out and "Kernels of 3 steps" in run.out


@pytest.mark.parametrize("release", first_fast("7.0", "6.4"))
def test_hardware_counters(machine, release):
    run = machine.with_rocm(release).run("get_counters.sh", "--pmc", "--output", "out")
    assert run.code == 0
    counting = [words for words in run.commands if words[:2] == ["rocprofv3", "--pmc"]]
    passes = [words[2 : words.index("--output-format")] for words in counting]
    assert len(passes) == 5 and not any({"FETCH_SIZE", "WRITE_SIZE"} <= set(names) for names in passes)
    assert len(list(machine.work.rglob("counters_counter_collection.csv"))) == 5
    *_, row = (line.split() for line in run.out.splitlines() if line.endswith(" rmsnorm_kernel"))
    assert {"75.0", "8.0", "RMSNorm"} <= set(row)  # three hits to one miss; waves a compute unit


def test_each_pmc_is_a_pass(machine):
    asked = "--pmc", "SQ_WAVES,GRBM_COUNT", "--pmc", "FETCH_SIZE"
    run = machine.with_rocm("7.0").run("get_counters.sh", *asked, "--output", "out")
    assert run.code == 0
    passes = [words[2:4] for words in run.commands if words[:2] == ["rocprofv3", "--pmc"]]
    assert passes == [["SQ_WAVES", "GRBM_COUNT"], ["FETCH_SIZE", "--kernel-trace"]]
    assert "SQ_WAVES" in run.out.split("All that was counted")[1]


@pytest.mark.parametrize("release", ALL_RELEASES)
def test_counters_are_those_of_the_measured_steps(machine, release):
    """Each pass has the ranges of its own run: they tell the steps from the warm-up, whose kernels are slow."""
    run = machine.with_rocm(release).run("get_counters.sh", "--pmc", "FETCH_SIZE", "--output", "out")
    assert run.code == 0 and "by hardware counters, mean of the measured steps;" in run.out
    counted = run.out.split("by hardware counters")[1]
    assert "rmsnorm_kernel" in counted and "triton_poi_autotuned" not in counted and "lpnorm" not in counted


@pytest.mark.parametrize("release", RELEASES)
def test_a_pass_that_fails_leaves_what_was_recorded(machine, release):
    arguments = ["--pmc", "SQ_WAVES", "--pmc", "FETCH_SIZE", "WRITE_SIZE", "--output", "out"]
    run = machine.with_rocm(release).run("get_counters.sh", *arguments)  # five counters of L2, which has four
    missing = "FETCH_SIZE WRITE_SIZE: too many counters for one pass: name fewer, or several --pmc"
    assert run.code == 1 and f"\nMissing: {missing}\n" in run.out
    lacking = f"the result lacks a part: {missing}; the log: {machine.work}/out/log.txt"
    assert run.err == f"get_counters.sh: error: {lacking}\n"
    assert machine.results() == ["out"] and not (machine.work / "out" / "INCOMPLETE").exists()
    assert "Kernels of 3 steps" in run.out and "SQ_WAVES" in run.out.split("All that was counted")[1]
    shutil.rmtree(machine.work / "out")
    assert machine.run("get_counters.sh", *arguments, FAKE_ARCH="gfx90a").code == 0


@pytest.mark.parametrize(
    "arch, missing", first_fast(("gfx908", ["MeanOccupancyPerCU", "MfmaUtil"]), ("gfx1201", ["OccupancyPercent"]))
)
def test_counters_that_the_gpu_lacks_are_named(machine, arch, missing):
    machine.with_rocm("7.0")
    (machine.bin / "rocminfo").write_text(f"#!/bin/sh\necho '  Name:  {arch}'\n")
    (machine.bin / "rocminfo").chmod(0o755)
    run = machine.run("get_counters.sh", "--pmc", "--output", "out", FAKE_ARCH=arch)
    named = re.findall(r"^Missing: (.*): this GPU, or this release, does not know them", run.out, re.M)
    assert run.code == 1 and named == missing
    counted = run.out.split("All that was counted")[1]
    assert "FETCH_SIZE" in counted and "WRITE_SIZE" in counted and machine.results() == ["out"]
    assert ("VALUBusy" in counted) == (arch == "gfx908")  # of the pass that lost one of its counters


@pytest.mark.parametrize("names", first_fast(["NO_SUCH_COUNTER"], ["FETCH_SIZE", "TCC_HIT_sum", "TCC_MISS_sum"]))
def test_without_any_counter_the_kernels_stay(machine, names):
    run = machine.with_rocm("7.0").run("get_counters.sh", "--pmc", *names, "--output", "out")
    assert run.code == 1 and f"Missing: {' '.join(names)}: " in run.out and "hardware counters" not in run.out
    assert machine.results() == ["out"] and "Kernels of 3 steps" in run.out
    assert one_file(machine, "kernels_of_the_steps.csv")


@pytest.mark.parametrize("release", RELEASES)
def test_a_table_of_the_whole_run_is_not_called_one_of_the_steps(machine, release):
    """PyTorch's ranges may not reach the profiler."""
    run = machine.with_rocm(release).run("get_counters.sh", "--pmc", "SQ_WAVES", "--output", "out", FAKE_NO_RANGES="1")
    assert run.code == 1
    assert "the measured steps, which the recording does not name: kernels.csv is of the whole" in run.err
    assert "Kernels of the whole run, warm-up included" in run.out
    assert "by hardware counters, mean of the whole run, warm-up included;" in run.out
    assert not list(machine.work.rglob("kernels_of_the_steps.csv"))
    assert "triton_poi_autotuned_0" in set(read_kernel_stats(one_file(machine, "kernels.csv"))["Name"])
    assert f"The table as a file: {machine.work}/out/kernels.csv\n" in run.out


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("script", OF_ROCPROFV3[:3])
def test_steps_that_overlap_with_their_kernels_are_found(machine, script, release):
    run = machine.with_rocm(release).run(script, "--", "--timing", "step")
    assert run.code == 0 and re.search(r"^Kernels of 3 steps.* in 19 calls of 6 kernels$", run.out, re.M)


@pytest.mark.parametrize("release", ALL_RELEASES)
def test_one_run_gives_the_timeline_and_its_tables(machine, release):
    run = machine.with_rocm(release).run("get_trace.sh", "--output", "out")
    assert run.code == 0 and len([words for words in run.commands if words[0] == "rocprofv3"]) == 1
    assert one_file(machine, "trace_results.pftrace") and one_file(machine, "trace_kernel_stats.csv")
    assert one_file(machine, "trace_hip_api_stats.csv") and one_file(machine, "trace_domain_stats.csv")
    assert bool(list(machine.work.rglob("trace_results.db"))) == (as_numbers(release) >= (7, 0))
    assert re.search(r"^Kernels of 3 steps.* in 19 calls of 6 kernels$", run.out, re.M)


@pytest.mark.parametrize("script, recording", first_fast(
    ("get_hotspots.sh", "hotspots_kernel_stats.csv"), ("get_trace.sh", "trace_results.pftrace")
))  # fmt: skip
def test_a_recording_without_its_table_stays(machine, script, recording):
    """The report fails where pandas is missing, say."""
    failing = '#!/bin/sh\ncase $* in *profilers.hotspots*) exit 3;; esac\nexec /usr/bin/env "$@"\n'
    (machine.with_rocm("7.0").bin / "env").write_text(failing)
    (machine.bin / "env").chmod(0o755)
    run = machine.run(script, "--output", "out")
    assert run.code == 1 and "the table of the kernels: profilers.hotspots ended with status 3" in run.err
    assert machine.results() == ["out"] and one_file(machine, recording)


@pytest.mark.parametrize("script", OF_ROCPROFV3)
def test_options_of_the_profiler(machine, script):
    machine.with_rocm("7.0")
    own, theirs = ["--learning-rate", "1e-3"], ["--kernel-include-regex", "rms norm"]
    run = machine.run(script, "--dry-run", *(["--pmc"] if "counters" in script else []), "--", *own, "--", *theirs)
    lines = [words for words in run.commands if words[0] == "rocprofv3"]
    assert run.code == 0 and len(lines) == {"get_counters.sh": 6, "run_rocprof_triton.sh": 7}.get(script, 1)
    for words in lines:
        cut = words.index("--")
        assert words[cut - 2 : cut] == theirs and words[-2:] == own


def test_options_of_ncu(machine):
    options = ["--kernel-name", "rmsnorm_kernel", "--launch-count", "3"]
    run = machine.with_nvidia().run("get_counters.sh", "--pmc", "--output", "out", "--", "--", *options)
    (command,) = [words for words in run.commands if words[0] == "ncu"]
    assert run.code == 0 and " ".join(options) in " ".join(command).split("tiny_llama_v3.py")[0]


def test_counting_some_kernels_alone(machine):
    options = ["--pmc", "SQ_WAVES", "--output", "out", "--", "--", "--kernel-include-regex", "rmsnorm"]
    run = machine.with_rocm("6.4").run("get_counters.sh", *options)
    assert run.code == 0 and "A run of each of 1 kernels, by hardware counters" in run.out


@pytest.mark.parametrize("release", first_fast("7.1", "6.3"))
def test_kernels_under_the_names_of_their_ranges(machine, release):
    """Which tells what a matrix product is for."""
    machine.with_rocm(release)
    arguments = "--pmc", "SQ_WAVES", "--output", "out", "--", "--", "--kernel-rename"
    run = machine.run("get_counters.sh", *arguments)
    assert run.code == 0 and {"forward", "backward"} <= set(read_dispatches(machine.work / "out")["Name"])
    kernels, counted = run.out.split("by hardware counters")
    assert re.search(r"^Kernels of 3 steps.* in 19 calls of 2 kernels$", kernels, re.M)
    assert re.search(r"^ *[\d.]+ +other +backward$", counted, re.M)  # with a time: of the same name


def test_the_chip_decides_what_is_counted(machine):
    machine.with_rocm("7.0")
    (machine.bin / "rocminfo").write_text("#!/bin/sh\necho '  Name:  gfx1100'\n")
    (machine.bin / "rocminfo").chmod(0o755)
    run = machine.run("get_counters.sh", "--pmc", "--dry-run")
    assert run.code == 0 and "OccupancyPercent" in run.out and "TCC_HIT_sum" not in run.out and "Mfma" not in run.out


@pytest.mark.parametrize("at", first_fast("opt/rocm/core-10.0", "opt/rocm-10.0.0", "opt/rocm/core", "opt/rocm"))
def test_rocm_is_found_where_it_is_installed(machine, at):
    machine.with_rocm("10.0", at)
    del machine.env["ROCM_PATH"]
    run = machine.run("get_hotspots.sh", "--output", "out")
    tool = machine.folder / at / "bin" / "rocprofv3"
    assert run.code == 0 and run.commands[0][0] == str(tool)
    assert run.out.startswith(f"Tool: rocprofv3 of ROCm 10.0: {tool}, of the release of this PyTorch\n")


@pytest.mark.parametrize("hip, chosen, reason", first_fast(
    ("7.0.2", "opt/rocm/core-10.0", "the first that was found"),  # as 10.0 is newer than 7.14
    ("7.2.4", "opt/rocm-7.2.4", "of the release of this PyTorch"),
    ("6.4.1", "rocm", "of the release of this PyTorch"),
))  # fmt: skip
def test_the_release_of_pytorch_decides_and_then_the_newest(machine, hip, chosen, reason):
    for release, at in (("7.2", "opt/rocm-7.2.4"), ("7.14", "opt/rocm/core-7.14"), ("10.0", "opt/rocm/core-10.0")):
        machine.with_rocm(release, at)
    if chosen == "rocm":
        machine.with_rocm("6.4")
    run = machine.with_torch(hip=hip).run("get_trace.sh", "--dry-run")
    first = run.out.splitlines()[0]
    assert first.endswith(f": {machine.folder}/{chosen}/bin/rocprofv3, {reason}")
    assert ("two ROCm installations" in run.out) == (chosen == "opt/rocm/core-10.0")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_wheel_that_brings_rocm_brings_the_profiler(machine, script):
    """That of the system would meet libraries of another release."""
    machine.with_rocm("7.2").with_wheel("10.0")
    run = machine.run(script, "--output", "out", LD_LIBRARY_PATH="/else")
    site, tool = machine.folder / "site", ROCM_TOOL.get(script, "rocprofv3")
    package = site / ("_rocm_sdk_core" if tool == "rocprofv3" else "_rocm_profiler")
    assert run.code == 0 and run.out.startswith(f"Tool: {tool} of ROCm 10.0: {package}/bin/{tool}")
    assert run.out.splitlines()[0].endswith(", which comes with this PyTorch") and "two ROCm" not in run.out
    (words, *_) = (words for words in run.commands if any(word.startswith(f"{package}/bin/") for word in words))
    (libraries,) = (word for word in words if word.startswith("LD_LIBRARY_PATH="))
    assert libraries.startswith(f"LD_LIBRARY_PATH={package}/lib:") and libraries.endswith("/_rocm_sdk_core/lib:/else")
    shutil.rmtree(package / "bin")
    missing = machine.run(script, "--dry-run").out
    assert "If so, pip install 'rocm[profiler]', load the ROCm 10.0 module" in missing


@pytest.mark.parametrize("given", ["opt/rocm-6.4.1", *first_fast("opt/rocm-6.4.1/bin", "opt/rocm-6.4.1/bin/rocprofv3")])
def test_a_tool_chosen_by_its_path(machine, given):
    machine.with_rocm("6.4", "opt/rocm-6.4.1").with_rocm("10.0")
    run = machine.run("get_hotspots.sh", "--output", "out", "--tool-path", machine.folder / given)
    tool = machine.folder / "opt/rocm-6.4.1/bin/rocprofv3"
    assert run.code == 0 and run.commands[0][0] == str(tool)
    assert run.out.startswith(f"Tool: rocprofv3 of ROCm 6.4: {tool}, named by --tool-path\n")


@pytest.mark.parametrize("words, complaint", [
    (["--tool-path", "/no/such"], "--tool-path /no/such: there is no rocprofv3: give its file, or the folder"),
    (["--tool-path", "/bin", "--tool", "torch"], "--tool-path names a profiler of ROCm, and --tool torch is none"),
])  # fmt: skip
def test_a_tool_path_that_leads_nowhere(machine, words, complaint):
    run = machine.with_rocm("7.2").run("get_trace.sh", *words)
    assert run.code == 2 and complaint in run.err and run.err.count("\n") == 1 and machine.results() == []


def test_recording_the_measured_steps_alone(machine):
    run = machine.with_rocm("10.0").run("get_hotspots.sh", "--output", "out", "--", "--", "--selected-regions")
    assert run.code == 0 and "Kernels of 3 steps" in run.out
    assert "triton_poi_autotuned_0" not in set(read_dispatches(machine.work / "out")["Name"])


def test_the_program_begins_the_recording_of_its_measured_steps(monkeypatch):
    """--selected-regions sets the variable, and the ranges are shown from the first measured step on."""
    profiler, calls = pytest.importorskip("tiny_llama.profiler"), []
    monkeypatch.setattr(profiler.ctypes, "CDLL", lambda name: SimpleNamespace(roctxProfilerResume=calls.append))
    for value in ("", "1"):
        monkeypatch.setenv("ROCPROF_SELECTED_REGIONS", value)
        profiler.show_ranges(SimpleNamespace(config=SimpleNamespace(compile=True), phases={}))
        assert len(calls) == len(value)


@pytest.mark.parametrize("rank, recorded", [("1", True), ("2", False)])
def test_recording_some_of_the_processes(machine, rank, recorded):
    words = "--output", "out", "--", "--", "--profile-mpi-ranks", "0-1"
    run = machine.with_rocm("7.2").run("get_hotspots.sh", *words, RANK=rank, WORLD_SIZE="4")
    assert run.code == 0 and ("Kernels of 3 steps" in run.out) == recorded
    assert (f"No recording of process {rank}, as it is none of --profile-mpi-ranks" in run.out) != recorded


def test_an_option_that_this_release_lacks(machine):
    run = machine.with_rocm("7.1").run("get_hotspots.sh", "--output", "out", "--", "--", "--profile-mpi-ranks", "0")
    assert run.code == 2 and "rocprofv3 of this release has no such option: its own --help lists" in run.err


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_torch_for_something_else_is_named_before_the_run(machine, script):
    """An AMD GPU would sit idle, and its profiler record nothing."""
    tool = ROCM_TOOL.get(script, "rocprofv3")
    machine.with_rocm("7.0").with_torch(cuda="12.8")
    run = machine.run(script, "--tool", tool)
    assert run.code == 2 and machine.results() == []
    assert f"it would record nothing: the PyTorch of {machine.env['PYTHON']} is built for cuda 12.8" in run.err
    run = machine.with_torch().run(script)
    assert run.out.startswith(f"Tool: torch.profiler, through tiny_llama_v3.py --profile ({tool} would record nothing")
    assert "is built for cpu" in run.out.splitlines()[0]


@pytest.mark.parametrize("script", SCRIPTS)
def test_rocm_6_2_is_refused_by_name(machine, script):
    machine.with_rocm("6.2")
    tool = ROCM_TOOL.get(script, "rocprofv3")
    run = machine.run(script, "--tool", tool)
    assert run.code == 2 and f"--tool {tool} cannot be used: it is of ROCm 6.2" in run.err


def test_release_is_read_from_the_tool_without_a_version_file(machine):
    for release, expected in (("6.4", "6.4"), ("7.0", "7.0")):
        machine.with_rocm(release)
        shutil.rmtree(machine.folder / "rocm" / ".info")
        assert machine.run("get_counters.sh", "--dry-run").out.startswith(f"Tool: rocprofv3 of ROCm {expected}: ")
        shutil.rmtree(machine.folder / "rocm")


# --- without ROCm


@pytest.mark.parametrize("script", SCRIPTS)
def test_falls_back_to_torch_and_says_so_first(machine, script):
    run = machine.run(script, "--stage", "4")
    assert run.code == 0 and run.err == ""
    first = run.out.splitlines()[0]
    tool = ROCM_TOOL.get(script, "rocprofv3")
    assert first.startswith(f"Tool: torch.profiler, through tiny_llama_v3.py --profile ({tool} is not installed")
    assert "--stage 4" in run.out and one_file(machine, "trace.json") and one_file(machine, "kernel_stats.csv")
    if script in ("get_hotspots.sh", "get_counters.sh", "get_rocprof_compute.sh"):
        assert "Kernels of 3 steps" in run.out
    assert (script == "get_rocprof_sys.sh") == bool(list(machine.work.rglob("host_profile.pstats")))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_tool_asked_for_by_name_is_not_replaced(machine, script):
    tool = ROCM_TOOL.get(script, "rocprofv3")
    run = machine.run(script, "--tool", tool)
    assert run.code == 2 and run.out == "" and f"--tool {tool} cannot be used: it is not installed" in run.err
    assert machine.results() == []
    machine.with_rocm("7.0")
    (machine.folder / "kfd").unlink()
    run = machine.run(script, "--tool", tool)
    assert run.code == 2 and "finds no AMD GPU" in run.err and "--device=/dev/kfd" in run.err
    assert machine.run(script, "--tool", "torch", "--dry-run").out.startswith("Tool: torch.profiler")


def test_no_permission_on_the_device(machine, monkeypatch):
    machine.with_rocm("7.0")
    monkeypatch.setenv("KFD_DEVICE", machine.env["KFD_DEVICE"])
    monkeypatch.setattr(os, "access", lambda *_: False)
    told = rocm.obstacle_of(rocm.Tool("rocprofv3", "/opt/rocm/bin/rocprofv3", (7, 0), ""), "rocm 7.0")
    group = Path(machine.env["KFD_DEVICE"]).group()
    assert f"has no permission on {machine.folder}/kfd" in told and f"usermod -aG {group} $USER" in told


def test_ncu_measures_one_step(machine):
    run = machine.with_nvidia().run("get_rocprof_compute.sh", "--output", "out")
    assert run.code == 0 and run.out.startswith("Tool: ncu, NVIDIA Nsight Compute (rocprof-compute is not installed")
    (command,) = [words for words in run.commands if words[0] == "ncu"]
    assert command[-4:] == ["--num-steps", "1", "--warmup-steps", "1"]
    nvtx, clocks = (command[command.index(option) + 1] for option in ("--nvtx-include", "--clock-control"))
    assert (nvtx, clocks) == ("step/", "none")
    lines = (line.split() for line in run.out.splitlines() if line.endswith(("attention_kernel", "rmsnorm_kernel")))
    attention, norm = lines
    assert (attention[0], norm[0]) == ("60.0", "9.0")
    assert "40.5" in norm and "RMSNorm" in norm


def test_ncu_counts(machine):
    run = machine.with_nvidia().run("get_counters.sh", "--pmc", "dram__bytes_read.sum", "--output", "out")
    assert run.code == 0
    (command,) = [words for words in run.commands if words[0] == "ncu"]
    assert command[command.index("--metrics") + 1] == "dram__bytes_read.sum,gpu__time_duration.sum"
    assert "Kernels of 3 steps" in run.out and "dram__bytes_read.sum" in run.out


@pytest.mark.parametrize("complaint, reason", first_fast(
    ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "lets only an administrator read GPU counters"),
    ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", "cannot reach the GPU's counters"),
    ("==WARNING== No kernels were profiled.", "saw no kernel within a range named step"),
))  # fmt: skip
def test_without_permission_for_counters(machine, complaint, reason):
    machine.with_nvidia()
    run = machine.run("get_rocprof_compute.sh", FAKE_COMPLAINT=complaint)
    told = run.out.replace("the driver ", "").replace("ncu ", "")
    assert run.code == 0 and f"Tool: torch.profiler from here on ({reason[:4]}" in told
    assert reason in run.out and "Kernels of 3 steps" in run.out
    arguments = "--tool", "ncu", "--output", "out"
    run = machine.run("get_rocprof_compute.sh", *arguments, FAKE_COMPLAINT=complaint, FAKE_STATUS="9")
    assert run.code == 9 and reason in run.err and "out.failed" in machine.results()
    for tool in ("auto", "ncu"):  # the kernels were recorded before
        arguments = "--pmc", "--tool", tool, "--output", f"out_{tool}"
        run = machine.run("get_counters.sh", *arguments, FAKE_COMPLAINT=complaint, FAKE_STATUS="9")
        assert run.code == 1 and "Missing: hardware counters: " in run.out and reason in run.err
        assert "Kernels of 3 steps" in run.out and f"out_{tool}" in machine.results()


@pytest.mark.parametrize("tool", ["ncu", *first_fast("rocprofv3", "torch")])
def test_session_of_the_first_exercise(machine, tool):
    if tool == "rocprofv3":
        machine.with_rocm("6.4")
    elif tool == "ncu":
        machine.with_nvidia()
    assert machine.run("run_rocprof_triton.sh").code == 0
    if tool == "torch":
        assert machine.run("run_rocprof_triton.sh").code == 0 and len(machine.results()) == 2  # the older one is kept
    folder = machine.work / "rocprof_results"
    text = (folder / "triton_analysis_summary.md").read_text()
    assert text in [path.read_text() for path in folder.glob("session_*/triton_analysis_summary.md")]
    for heading in ("Kernel launch overhead", "Memory bandwidth", "GPU utilisation", "Roofline inputs"):
        assert f"\n## {heading}\n" in text
    assert "kernels a step, in 19 launches" in text or tool != "rocprofv3"
    assert ("from the bytes counted at the memory" in text) == (tool != "torch")
    assert ("Counted in the training run, matrix units alone" in text) == (tool == "rocprofv3")
    assert len(list(folder.glob("session_*/*.png"))) == 3 * len(machine.results())
    summary = folder / "triton_analysis_summary.md"
    assert summary.is_symlink()  # to the newest; a person's file of that name is kept
    summary.unlink()
    summary.write_text("mine")
    run = machine.run("run_rocprof_triton.sh")
    assert run.code == 0 and f"The summary: {folder}/session_" in run.out and summary.read_text() == "mine"


@pytest.mark.parametrize("vendor", first_fast("nvidia", "amd"))
def test_session_without_some_of_its_counters(machine, vendor):
    """What there is becomes a summary, in the place that it has otherwise."""
    machine.with_rocm("7.0") if vendor == "amd" else machine.with_nvidia()
    env = {"FAKE_ARCH": "gfx908"} if vendor == "amd" else {"FAKE_COMPLAINT": "==ERROR== ERR_NVGPUCTRPERM"}
    run = machine.run("run_rocprof_triton.sh", **env)
    assert run.code == 1 and "the result lacks a part" in run.err
    summary = machine.work / "rocprof_results" / "triton_analysis_summary.md"
    assert f"The summary: {summary}\n" in run.out
    assert ("from the bytes counted at the memory" in summary.read_text()) == (vendor == "amd")
    assert not any(result.endswith(".failed") for result in machine.results())


def test_counters_need_a_tool_that_counts(machine):
    run = machine.run("get_counters.sh", "--pmc", "--tool", "torch")
    assert run.code == 2 and "rocprofv3 (AMD) or ncu (NVIDIA)" in run.err
    run = machine.run("get_counters.sh", "--tool", "ncu")
    assert run.code == 2 and "add --pmc" in run.err
    run = machine.run("get_counters.sh", "--pmc")
    assert run.code == 0 and "No hardware counters" in run.out and "Kernels of 3 steps" in run.out


# --- failures


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("rocm", [True, False])
def test_the_status_of_the_program_comes_back(machine, script, rocm):
    if rocm:
        machine.with_rocm("7.0")
    run = machine.run(script, "--output", "out", PROGRAM_STATUS="7")
    status = 1 if rocm and script == "get_rocprof_compute.sh" else 7  # rocprof-compute has its own
    assert run.code == status and run.err.count("\n") == 2
    assert f"ended with status {status}; the log: {machine.work}/out.failed/log.txt" in run.err
    assert machine.results() == ["out.failed"]
    assert "tiny llama:" in (machine.work / "out.failed" / "log.txt").read_text()


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_status_of_the_profiler_comes_back(machine, script):
    complaint = "Request exceeds the capabilities of the hardware to collect"
    env = {"FAKE_COMPLAINT": complaint, "FAKE_STATUS": "134", "HOST_PROFILE_STATUS": "1"}
    run = machine.with_rocm("7.0").run(script, "--output", "out", **env)
    assert run.code == 134 and "too many counters for one pass" in run.err and machine.results() == ["out.failed"]
    run = machine.run(script, "--output", "other", **env | {"FAKE_COMPLAINT": "tiny_llama_v3.py: error: no such thing"})
    assert run.code == 134 and "the program cannot do what its options ask for" in run.err


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("release", RELEASES)
def test_nothing_recorded_is_a_failure(machine, script, release):
    run = machine.with_rocm(release).run(script, "--output", "out", FAKE_NOTHING="1", HOST_PROFILE_STATUS="1")
    assert run.code == 1 and "recorded nothing" in run.err and machine.results() == ["out.failed"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_exists_is_never_deleted(machine, script):
    """Neither what a person made under the name of a failed result, nor an earlier result, good or failed."""
    mine = machine.work / "out.failed" / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    (machine.work / "out_1.failed").symlink_to("nowhere")
    run, failed = machine.run(script, "--output", "out", PROGRAM_STATUS="7", HOST_PROFILE_STATUS="7"), "out_2.failed"
    assert run.code == 7 and f"{failed}/log.txt\n" in run.err and f"is in {machine.work}/{failed}\n" in run.err
    assert not (machine.work / failed / "INCOMPLETE").exists()
    assert machine.run(script, "--output", "out").code == 0
    assert machine.results() == ["out", "out.failed", "out_1.failed", "out_2.failed"] and mine.read_text() == "mine"
    before = sorted(machine.work.rglob("*"))
    run = machine.run(script, "--output", "out")
    assert run.code == 2 and "--output out exists" in run.err and sorted(machine.work.rglob("*")) == before


def test_of_two_runs_that_want_a_folder_one_gets_it(machine):
    pipes = dict(cwd=machine.work, env=machine.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    runs = [subprocess.Popen([ROOT / "get_trace.sh", "--output", "out"], **pipes) for _ in range(4)]
    errors = [run.communicate(timeout=60)[1] for run in runs]
    assert sorted(run.returncode for run in runs) == [0, 2, 2, 2] and machine.results() == ["out"]
    assert sum("--output" in error for error in errors) == 3


def test_a_failed_result_that_cannot_be_renamed_stays_incomplete(machine):
    name = "out" + "t" * 250
    run = machine.run("get_trace.sh", "--output", name, PROGRAM_STATUS="7")
    assert run.code == 7 and f"; the log: {machine.work}/{name}/log.txt\n" in run.err
    assert machine.results() == [name] and {"INCOMPLETE", "log.txt"} <= {*os.listdir(machine.work / name)}


@pytest.mark.parametrize("rank, size", first_fast(*STARTED_BY))
def test_variables_of_the_environment_are_numbers_and_never_code(machine, rank, size):
    code = f"BASH_VERSINFO[$(touch {machine.work}/executed)0]"
    wrong = [("0", code), (code, "2"), ("-1", "2"), ("0", "two"), ("0", "9" * 20)]
    for values in [{rank: number, size: count} for number, count in wrong]:
        run = machine.run("get_trace.sh", "--dry-run", "--output", "out", **values)
        named = f"{rank}={values[rank]} and {size}={values[size]} are not numbers: unset them"
        assert run.code == 2 and named in run.err and run.err.count("\n") == 1 and not list(machine.work.iterdir())
    for values, folder in (("08", "010"), "rank_8"), (("1", "08"), "rank_1"), (("0", "1"), "run"), (("0", ""), "run"):
        run = machine.run(
            "get_trace.sh", "--dry-run", "--output", "out", **dict(zip((rank, size), values, strict=True))
        )
        assert run.code == 0 and run.err == "" and f"{machine.work}/out/{folder}" in run.out  # 08 is no octal number
    run = machine.run("get_trace.sh", "--dry-run", "--tool", "rocprofv3", ROCM_VERSION="6.08")
    assert run.code == 0 and run.out.startswith("Tool: rocprofv3 of ROCm 6.8: ")


def test_an_unwritable_folder(machine):
    (machine.work / "file").touch()
    run = machine.run("get_trace.sh", "--output", "file/out")
    assert run.code == 2 and "cannot be written to" in run.err


@pytest.mark.parametrize("arguments, complaint", [
    (["--frobnicate"], "unknown option --frobnicate"), (["--num-steps", "3"], "go after --"),
    (["--output"], "--output: expected one argument"), (["--stage", "--dry-run"], "--stage: expected one argument"),
    (["--stage", "four"], "--stage: invalid int value: 'four'"), (["--stage", "9"], "there is no --stage 9"),
    (["--tool", "nsys"], "--tool nsys: choose one of"),
    (["--", "--use-amp", "--", "--kernel-rename"], 'no options of its own: leave out "--kernel-rename"'),
])  # fmt: skip
@pytest.mark.parametrize("script", SCRIPTS)
def test_bad_options(machine, script, arguments, complaint):
    run = machine.run(script, *arguments)
    assert run.code == 2 and run.err.count("\n") == 1 and complaint in run.err and run.out == ""
    assert machine.results() == []


def test_the_session_begins_with_the_program_which_refuses_wrong_options(machine):
    run = machine.run("run_rocprof_triton.sh", PROGRAM_STATUS="2")
    assert run.code == 2 and [Path(words[1]).name for words in run.commands] == ["tiny_llama_v3.py"]


def test_a_current_folder_that_was_deleted(machine):
    for script in ("get_trace.sh", "profilers/doctor.sh", "exercises/performance_debugging/run_all_stages.sh"):
        words = ["bash", "-c", f'rmdir "$PWD" && exec {ROOT}/{script}']
        machine.work.mkdir(exist_ok=True)
        done = subprocess.run(words, cwd=machine.work, env=machine.env, capture_output=True, text=True)
        reason = "the current folder was deleted: change to another one"
        assert done.returncode == 2 and done.stderr.endswith(f"{Path(script).name}: error: {reason}\n")


@pytest.mark.parametrize("script, code, reason", [
    ("job.slurm", 2, "Slurm did not start it: sbatch job.slurm --graph"), ("setup_env.sh", 1, "is not an option"),
])  # fmt: skip
def test_scripts_that_cannot_do_what_was_asked(tmp_path, script, code, reason):
    shutil.copy(ROOT / script, tmp_path)  # a mistake must not cost the .venv here
    words, env = ["bash", tmp_path / script, "--graph"], {"PATH": os.defpath}
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1) and reason in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [script]


def test_printed_paths_exist(machine):
    """The folder has its name from the beginning; a file in it says that it is not whole."""
    run = machine.run("get_trace.sh", "--output", "out")
    assert "incomplete" not in run.out and not (machine.work / "out" / "INCOMPLETE").exists()
    assert f"--profile {machine.work}/out\n" in run.out


@pytest.mark.parametrize("rank, size", first_fast(*STARTED_BY))
def test_each_rank_has_a_folder_of_its_own(machine, rank, size):
    machine.with_rocm("7.0")
    for number in ("0", "1"):
        run = machine.run("get_hotspots.sh", "--output", "out", **{rank: number, size: "2"})
        assert run.code == 0 and f"Results: {machine.work}/out/rank_{number}\n" in run.out
        (command,) = re.findall(r"^All 2 processes in one table: (.*)$", run.out, flags=re.M)
    done = subprocess.run(command, shell=True, cwd=machine.folder, env=machine.env, capture_output=True, text=True)
    told = r"^Kernels of 6 steps of 2 processes, .* in 19 calls of 6 kernels$"
    assert re.search(told, done.stdout, re.M), done.stderr
    run = machine.run("get_hotspots.sh", **{rank: "0", size: "2"})
    assert run.code == 2 and "2 processes need one folder for all: name it by --output" in run.err
    assert machine.run("get_hotspots.sh", **{rank: "0", size: "1"}).code == 0


def test_no_python(machine):
    run = machine.run("get_trace.sh", PYTHON="/no/such/python")
    assert run.code == 2 and "PYTHON=/no/such/python" in run.err


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("rocm", [True, False])
def test_interrupt_ends_script_and_program(interruptible_machine, number, code, rocm):
    machine = interruptible_machine
    if rocm:
        machine.with_rocm("7.0")
    returned, out, err = machine.interrupt("get_trace.sh", number)
    assert returned == code and "interrupted" in err
    # rocprofv3's library takes the signals before Python can.
    assert ("Interrupted after 2 of 10 steps" in out) == (number == signal.SIGINT and not rocm)
    assert machine.results() == ["out.failed"]
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(machine.work) not in running


# --- dry runs and help


@pytest.mark.parametrize("script, release", [
    *itertools.product(SCRIPTS, [None]),  # with ROCm the others are in files of their own
    *first_fast(("get_counters.sh", "7.1"), *itertools.product(OF_ROCPROFV3, ["6.4", "7.0"])),
])  # fmt: skip
def test_dry_run_prints_what_a_run_executes(machine, script, release):
    if release:
        machine.with_rocm(release)
    arguments = ["--output", "out", "--stage", "4", "--", "--seq-len", "64"]
    dry = machine.run(script, "--dry-run", *arguments)
    assert dry.code == 0 and machine.results() == [] and not list(machine.work.iterdir())
    wet = machine.run(script, *arguments)
    assert dry.commands == wet.commands and len(dry.commands) >= 1
    program = next(words for words in dry.commands if any(word.endswith("tiny_llama_v3.py") for word in words))
    assert program[-2:] == ["--seq-len", "64"] or "--profile" in program
    assert program[program.index("--stage") + 1] == "4"


def rocprofv3_of(machine, release, options):
    """The status of the fake of a release."""
    tool = machine.install(machine.folder / "tools" / release, "rocprofv3.py", FAKE_ROCM=release, FAKE_NOTHING="1")
    done = subprocess.run([tool, *options, "--", "true"], cwd=machine.work, capture_output=True, text=True)
    print(done.stderr)
    return done.returncode


@pytest.mark.parametrize("release", ALL_RELEASES)
@pytest.mark.parametrize("script", OF_ROCPROFV3)
def test_each_release_takes_its_command_lines(machine, script, release):
    count = ["--pmc"] if script == "get_counters.sh" else []
    run = machine.run(script, "--dry-run", "--tool", "rocprofv3", *count, ROCM_VERSION=release)
    assert run.out.startswith(f"Tool: rocprofv3 of ROCm {release}: rocprofv3, which is not installed here\n")
    lines = [words[1 : words.index("--")] for words in run.commands if words[0] == "rocprofv3"]
    assert lines and [rocprofv3_of(machine, release, options) for options in lines] == [0] * len(lines)


@pytest.mark.parametrize("release, counters, library, system", first_fast(
    ("10.1", "rocpd", False, FORMATS), ("6.4", "csv", False, "-H -D -T -P"), ("10.0", "rocpd", False, FORMATS),
    ("7.0", "rocpd", True, "-H -D -T -P"), ("7.1", "rocpd", True, "-H -D -T -P"), ("7.2", "rocpd", True, "-H -D -T -P"),
    ("7.14", "rocpd", False, FORMATS),
))  # fmt: skip
def test_what_each_release_is_asked_for(machine, release, counters, library, system):
    """A dry run without the tools prints what one with them does, which asks for their help."""
    tools = dict.fromkeys(("get_counters.sh", "get_trace.sh"), "rocprofv3") | ROCM_TOOL

    def printed():
        runs = {
            name: machine.run(name, "--dry-run", "--tool", tools[name], "--output", "out", ROCM_VERSION=release)
            for name in tools
        }
        return {name: [shlex.join(words) for words in run.commands] for name, run in runs.items()}

    absent = printed()
    machine.with_rocm(release)
    assert printed() == absent
    assert f" --output-format {counters} -d " in absent["get_counters.sh"][0]
    assert any(line.startswith("rocpd summary ") for line in absent["get_counters.sh"]) == (
        as_numbers(release) >= (7, 1)
    )
    assert (" --output-format csv pftrace rocpd -d " in absent["get_trace.sh"][0]) == (counters == "rocpd")
    assert ("--rocprofiler-sdk-library-path" in absent["get_rocprof_compute.sh"][0]) == library
    assert f"rocprof-sys-sample {system} " in absent["get_rocprof_sys.sh"][0]


GUIDE = (ROOT / "README_PROFILING.md").read_text()
TYPED = [line for block in re.findall(r"```bash\n(.*?)```", GUIDE, re.S) for line in block.splitlines()]


@pytest.mark.parametrize("release", ALL_RELEASES)
def test_each_release_takes_what_the_guide_has_typed_by_hand(machine, release):
    lines = [shlex.split(line) for line in TYPED if line.startswith("rocprofv3 ")]
    assert len(lines) > 4
    for words in lines:
        status = rocprofv3_of(machine, release, words[1 : words.index("--")])
        lacking = {"rocpd"} if as_numbers(release) < (7, 0) else set()
        lacking |= {"--att"} if as_numbers(release) < (7, 13) else set()  # without a decoder
        assert bool(status) == bool(lacking & set(words)), words


def test_scripts_take_the_options_of_the_profiler_that_the_guide_names(machine):
    scripts = "./get_counters", "./get_hotspots", "./get_trace"
    lines = [shlex.split(line) for line in TYPED if line.startswith(scripts)]
    assert len(lines) == 2 and all(words.count("--") == 2 for words in lines)
    for script, *options in lines:
        run = machine.run(script[2:], "--dry-run", "--tool", "rocprofv3", *options)
        assert run.code == 0
        for words in run.commands:
            assert words[0] != "rocprofv3" or rocprofv3_of(machine, "7.0", words[1 : words.index("--")]) == 0


def test_what_is_typed_by_hand_is_reported_alike(machine):
    """The folders and names of the guide are those that the reports look for."""
    machine.with_rocm("7.1")
    lines = [line for line in TYPED if re.search(" count([ /]|$)", line)]
    assert len(lines) == 4
    typed = "\n".join(lines).replace("python -m", f"{machine.env['PYTHON']} -m").replace(".venv/bin/python", "true")
    env = machine.env | {"PATH": f"{machine.folder}/rocm/bin:{machine.env['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-ec", typed], cwd=machine.work, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "mean of the measured steps; occupancy" in done.stdout, done.stderr
    assert re.search(r"^ *[\d.]+ +[\d.]+ +[\d.]+ +matrix product +Cijk", done.stdout, re.M)  # us, GB/s, MB


def test_rocm_6_2_lacks_what_is_used(machine):
    """Why it is refused."""
    for options in (["--runtime-trace"], ["--pmc", "SQ_WAVES"]):
        assert rocprofv3_of(machine, "6.2", options) == 2 and rocprofv3_of(machine, "6.3", options) == 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(machine, script):
    run = machine.run(script, "--help")
    assert run.code == 0 and run.err == "" and f"Usage: ./{script}" in run.out
    for option in ("--output DIR", "--stage N", "--tool NAME", "--dry-run", "-- OPTIONS"):
        assert option in run.out
    assert os.stat(ROOT / script).st_mode & stat.S_IXUSR


def test_a_project_in_a_folder_with_spaces(machine):
    """The reports start from wherever the script was started, and so do the command lines that it suggests."""
    project = machine.folder / "my projects" / "llama"
    for folder in ("profilers", "measure"):
        shutil.copytree(ROOT / folder, project / folder)
    shutil.copy(ROOT / "get_hotspots.sh", project)
    run = machine.with_rocm("7.0").run(project / "get_hotspots.sh", "--output", "out")
    assert run.code == 0 and "Kernels of 3 steps" in run.out
    (suggested,) = re.findall(r"^Compare with another run: (.*)$", run.out, flags=re.M)
    command = suggested.replace("OTHER", str(machine.work / "out"))
    done = subprocess.run(command, shell=True, cwd=machine.folder, env=machine.env, capture_output=True, text=True)
    assert done.returncode == 0 and "Kernels: 6 same" in done.stdout, done.stderr


def test_arguments_with_spaces_stay_whole(machine):
    run = machine.with_rocm("7.0").run("get_trace.sh", "--output", "my out", "--", "--learning-rate", "1 e")
    assert run.code == 0 and run.commands[0][-2:] == ["--learning-rate", "1 e"]
    assert (machine.work / "my out" / "trace_results.pftrace").exists()
