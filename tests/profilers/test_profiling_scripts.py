"""The profiling scripts against fakes of the profilers of ROCm 6.4 to 10.1, and of ncu."""

import functools
import itertools
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from profilers.readers import read_dispatches
from profilers.rocm import EXECUTABLES, release_in
from tests.fakes.machine import FOLDERS, ROOT, executable, first_fast
from tests.profilers.conftest import GUIDE
from tiny_llama.launchers import LAUNCHERS

ALL_RELEASES = first_fast("10.0", "6.4", "7.0", "7.1", "7.14", "10.1")
SCRIPTS = tuple(FOLDERS)
OF_ROCPROFV3 = ("get_trace.sh", "get_hotspots.sh", "get_counters.sh", "run_rocprof_triton.sh")
TOOLS = dict.fromkeys(OF_ROCPROFV3, "rocprofv3")
TOOLS |= {"get_rocprof_compute.sh": "rocprof-compute", "get_rocprof_sys.sh": "rocprof-sys"}
FORMATS = "-H -D --output-format proto text"
OF_THE_STEPS = re.compile(r"^Kernels of 3 steps, ms and calls a step: [\d.]+ ms in 19 calls of 6 kernels$", re.M)
TYPED = [line for block in re.findall(r"```bash\n(.*?)```", GUIDE, re.S) for line in block.splitlines()]


def one_file(machine, pattern):
    (path,) = machine.work.rglob(pattern)
    assert path.stat().st_size
    return path


def run_for_a_second(run, *words, timeout=None, **keywords):
    return run(*words, timeout=timeout and 1, **keywords)


# --- with ROCm


@pytest.mark.parametrize("script", SCRIPTS)
def test_runs_with_rocm(machine, script):
    run = machine.with_rocm("10.0").run(script)
    assert run.code == 0 and run.err == ""
    assert run.out.startswith(f"Tool: {TOOLS[script]} of ROCm 10.0: {machine.folder}/rocm/bin/")
    assert run.out.splitlines()[0].endswith(", of the release of this PyTorch")
    (result,) = machine.results()
    assert re.fullmatch(FOLDERS[script] + r"_\d{8}_\d{6}_\d{6}", result)
    assert f"\nResults: {machine.work / result}\n" in run.out and not list(machine.work.rglob("INCOMPLETE"))
    log = (machine.work / result / "log.txt").read_text()
    assert log in run.out and "+ " in log and "tiny llama: --batch-size 8 --seq-len 128 --num-steps" in log


@pytest.mark.parametrize("script, release, files", [
    ("get_hotspots.sh", "7.1", "hotspots_kernel_stats.csv"), ("get_counters.sh", "6.4", "kernels_kernel_trace.csv"),
    ("get_counters.sh", "7.0", "kernels_results.db"),
    *(("get_trace.sh", release, "trace_results.pftrace trace_kernel_stats.csv") for release in ("6.4", "7.0")),
    *first_fast(("get_trace.sh", "10.1", "trace_results.db"), ("get_hotspots.sh", "6.4", "hotspots_kernel_stats.csv")),
])  # fmt: skip
def test_one_run_gives_the_files_of_the_release_and_the_table_of_its_steps(machine, script, release, files):
    run = machine.with_rocm(release).run(script, "--output", "out", "--", "--timing", "step")
    assert run.code == 0 and len([words for words in run.commands if words[0] == "rocprofv3"]) == 1
    assert all(one_file(machine, name) for name in files.split())
    assert bool(list(machine.work.rglob("*.db"))) == (release != "6.4" and "hotspots" not in script)
    assert OF_THE_STEPS.search(run.out)  # though its steps overlap with their kernels
    ranked = re.findall(r"^ *[\d.]+ %  +[\d.]+ +(\d+) +[\d.]+  (.*?)  +\S+", run.out, re.M)
    assert ranked[:2] == [("6", "matrix product"), ("2", "attention backward")]
    assert bool(list(machine.work.rglob("kernels_of_the_steps.csv"))) == ("counters" in script)


# --- counters


@pytest.mark.parametrize("release", ALL_RELEASES)
def test_hardware_counters(machine, release):
    """Each pass has the ranges of its own run: they tell the steps from the warm-up, whose kernels are slow."""
    run = machine.with_rocm(release).run("get_counters.sh", "--pmc", "--output", "out")
    assert run.code == 0 and "by hardware counters, mean of the measured steps;" in run.out
    assert len([words for words in run.commands if words[:2] == ["rocprofv3", "--pmc"]]) == 5
    counted = run.out.split("by hardware counters")[1]
    *_, row = (line.split() for line in counted.splitlines() if line.endswith(" rmsnorm_kernel"))
    assert {"75.0", "8.0", "RMSNorm"} <= set(row)  # three hits to one miss; waves a compute unit
    assert "triton_poi_autotuned" not in counted and "lpnorm" not in counted


def test_a_radeon_is_asked_for_what_it_has(machine):
    run = machine.with_rocm("7.0").with_gpu(110000).run("get_counters.sh", "--pmc", FAKE_ARCH="gfx1100")
    assert run.code == 0 and "by hardware counters" in run.out and "L2CacheHit" in run.out


@pytest.mark.parametrize("version, arch, more", [
    (90402, "gfx942", ["F8"]), (90500, "gfx950", ["F8", "F6F4"]), (90010, "gfx90a", []),
])  # fmt: skip
def test_flop_in_low_precision_are_counted_where_the_gpu_has_a_counter(machine, version, arch, more):
    """In the pass of MfmaFlops, which has room for them; one that the GPU lacks would be missing from the result."""
    names = [f"SQ_INSTS_VALU_MFMA_MOPS_{kind}" for kind in more]
    run = machine.with_rocm("7.0").with_gpu(version).run("run_rocprof_triton.sh", "--output", "out", FAKE_ARCH=arch)
    assert run.code == 0 and "\nMissing: " not in run.out
    *_, last = (words for words in run.commands if words[:2] == ["rocprofv3", "--pmc"])
    assert last[2 : last.index("--kernel-trace")] == ["MfmaFlops", *names]


def test_each_pmc_is_a_pass(machine):
    asked = "--pmc", "SQ_WAVES,GRBM_COUNT", "--pmc", "FETCH_SIZE", "--dry-run"
    run = machine.with_rocm("7.0").run("get_counters.sh", *asked)
    passes = [words[2:4] for words in run.commands if words[:2] == ["rocprofv3", "--pmc"]]
    assert passes == [["SQ_WAVES", "GRBM_COUNT"], ["FETCH_SIZE", "--kernel-trace"]]


TOO_MANY = "too many counters for one pass: name fewer, or several --pmc"
UNKNOWN = "this GPU, or this release, does not know them (rocprofv3 -L lists those that it does)"


@pytest.mark.parametrize("arch, asked, missing, counted", [  # five counters of L2, which has four
    ("gfx942", ["SQ_WAVES:device=0", "--pmc", "FETCH_SIZE", "WRITE_SIZE"], f"FETCH_SIZE WRITE_SIZE: {TOO_MANY}",
     "SQ_WAVES"),
    ("gfx942", ["NO_SUCH_COUNTER"], f"NO_SUCH_COUNTER: {UNKNOWN}", None),
    ("gfx942", ["SQ_WAVES", "--pmc", "NO_SUCH_COUNTER"], f"NO_SUCH_COUNTER: {UNKNOWN}", "SQ_WAVES"),
    ("gfx942", ["FETCH_SIZE", "TCC_HIT_sum", "TCC_MISS_sum"], f"FETCH_SIZE TCC_HIT_sum TCC_MISS_sum: {TOO_MANY}", None),
    ("gfx908", [], f"MeanOccupancyPerCU: {UNKNOWN}; MfmaUtil: {UNKNOWN}", "VALUBusy"),
    ("gfx942", ["SQ_WAVES", "--", "--", "--kernel-include-regex", "none"],
     "SQ_WAVES: no kernel passes --kernel-include-regex", None),
])  # fmt: skip
def test_what_cannot_be_counted_is_named_and_the_rest_stays(machine, arch, asked, missing, counted):
    machine.with_rocm("7.0")
    run = machine.run("get_counters.sh", "--output", "out", "--pmc", *asked, FAKE_ARCH=arch)
    told = f"error: the result lacks a part: {missing}; the log: {machine.work}/out/log.txt\n"
    assert run.code == 1 and run.err.endswith(told) and run.err.count("\n") == 1
    assert machine.results() == ["out"] and not (machine.work / "out" / "INCOMPLETE").exists()
    assert "Kernels of 3 steps" in run.out and one_file(machine, "kernels_of_the_steps.csv")
    table = run.out.partition("All that was counted")[2]
    assert (counted in table) if counted else table == ""


def test_a_pass_that_fails_is_left_out(machine):
    executable(machine.bin / "program", "#!/bin/sh\n[ ! -e once ] || exit 3\ntouch once\n")
    run = machine.with_rocm("7.0").run("get_counters.sh", "--pmc", "SQ_WAVES", "--output", "out")
    assert run.code == 1 and "SQ_WAVES: rocprofv3 or the program ended with status 3" in run.err
    assert "Kernels of 3 steps" in run.out and "by hardware counters" not in run.out


def failing(machine, name, text):
    """A Python of which a program of profilers/ ends with status 1 and these last words."""
    python = Path(machine.env["PYTHON"])
    works = python.rename(python.with_name("works"))
    executable(python, f'#!/bin/sh\n[ "$2" != {name} ] || {{ {text}; exit 1; }}\nexec {works} "$@"\n')


@pytest.mark.parametrize("script, name, part", [
    ("get_trace.sh", "hotspots", "the table of the kernels"), ("run_rocprof_triton.sh", "summary", "the summary"),
    ("get_counters.sh", "counters", "the table of the counters"),
    ("get_counters.sh", "hotspots", "the table of the kernels"),
    ("get_rocprof_compute.sh", "rocprof_compute_kernels", "each kernel by itself"),
])  # fmt: skip
@pytest.mark.parametrize("last_words, reason", [
    ("echo \"ModuleNotFoundError: No module named 'tabulate'\"", "ModuleNotFoundError: No module named 'tabulate'; "
     "install it: PYTHON -m pip install tabulate"),
    ("echo ValueError: no; echo Traceback:; echo \"KeyError: 'Name'\"; echo", "KeyError: 'Name'"),
    ("echo Killed", None),
])  # fmt: skip
def test_a_report_that_fails_costs_no_recording_and_blames_no_tool(machine, script, name, part, last_words, reason):
    failing(machine.with_rocm("7.0"), f"profilers.{name}", last_words)
    run = machine.run(script, *["--pmc", "SQ_WAVES"] * ("counters" in script), "--output", "out")
    said = f": {reason}".replace("PYTHON", machine.env["PYTHON"]) if reason else ""
    assert run.code == 1 and f"{part} (profilers.{name} ended with status 1{said}); try again: env PYTHON" in run.err
    assert machine.results() == ["out"] and not (machine.work / "out" / "INCOMPLETE").exists()
    promised = re.findall(r"^The (?:summary|table as a file): ([^,\n]+)", run.out, re.M)
    assert all(Path(path).exists() for path in promised)


def test_kernels_alone_are_no_tool_s(machine):
    failing(machine.with_rocm("7.0"), "--json", "echo 'run_triton_profiling.py: error: no Triton'")
    run = machine.run("run_rocprof_triton.sh", "--output", "out")
    name = "run_triton_profiling.py"
    assert run.code == 1 and f"sh: error: {name} ended with status 1: {name}: error: no Triton; the log" in run.err


# --- options of the profiler


@pytest.mark.parametrize("script", OF_ROCPROFV3)
def test_options_of_the_profiler_come_last(machine, script):
    own, theirs = ["--learning-rate", "1e-3"], ["--kernel-include-regex", "rms norm"]
    run = machine.with_rocm("7.0").run(script, "--dry-run", "--", *own, "--", *theirs)
    commands = [words for words in run.commands if words[0] == "rocprofv3"]
    assert run.code == 0 and len(commands) == (7 if script.startswith("run") else 1)
    for words in commands:
        cut = words.index("--")
        assert words[cut - 2 : cut] == theirs and words[-2:] == own


@pytest.mark.parametrize("release", first_fast("7.1", "6.4"))
def test_kernels_under_the_names_of_their_ranges(machine, release):
    """Which tells what a matrix product is for."""
    arguments = "--pmc", "SQ_WAVES", "--output", "out", "--", "--", "--kernel-rename=true"
    run = machine.with_rocm(release).run("get_counters.sh", *arguments)
    assert run.code == 0 and {"forward", "backward"} <= set(read_dispatches(machine.work / "out")["Name"])
    kernels, counted = run.out.split("by hardware counters")
    assert re.search(r"^Kernels of 3 steps.* in 19 calls of 2 kernels$", kernels, re.M)
    assert re.search(r"^ *[\d.]+ +other +backward$", counted, re.M)  # with a time: of the same name


def test_the_program_begins_the_recording_of_its_measured_steps(monkeypatch):
    """--selected-regions sets the variable, and the ranges are shown from the first measured step on."""
    profiler, calls = pytest.importorskip("tiny_llama.profiler"), []
    monkeypatch.setattr(profiler.ctypes, "CDLL", lambda name: SimpleNamespace(roctxProfilerResume=calls.append))
    for value in ("", "1"):
        monkeypatch.setenv("ROCPROF_SELECTED_REGIONS", value)
        profiler.show_ranges(SimpleNamespace(config=SimpleNamespace(compile=True), phases={}, named_range=None))
        assert len(calls) == len(value)


@pytest.mark.parametrize("script, option", [
    ("get_trace.sh", "--output-format csv"), ("get_hotspots.sh", "--output-format=json"), ("get_trace.sh", "-fcsv"),
    ("get_counters.sh", "-d=else"), ("run_rocprof_triton.sh", "--pmc FETCH_SIZE"), ("get_rocprof_sys.sh", "-T"),
])  # fmt: skip
def test_options_on_which_the_result_depends_are_the_script_s(machine, script, option):
    """Else what was recorded would not be found, and a good recording be called failed."""
    run = machine.with_rocm("10.0").run(script, "--output", "out", "--", "--", *option.split())
    name = re.match("--[a-z-]+|-.", option)[0]
    assert run.code == 2 and f"leave out {name} of {TOOLS[script]}: this script sets it" in run.err
    assert run.out == "" and machine.results() == []


# --- which tool


CHOICES = {
    "7.0.2": ("opt/rocm/core-10.0", "the first that was found"),  # as 10.0 is newer than 7.14
    "7.2.4": ("opt/rocm-7.2.4", "of the release of this PyTorch"),
}
GIVEN = ("opt/rocm-7.2.4", "named by --tool-path")


@pytest.mark.parametrize("hip, given, chosen, reason", [
    *((hip, "", *choice) for hip, choice in CHOICES.items()),
    *(("7.0.2", f"opt/rocm-7.2.4{part}", *GIVEN) for part in ("", "/bin", "/bin/rocprofv3")),
])  # fmt: skip
def test_a_path_that_is_given_decides_then_the_release_of_pytorch_then_the_newest(machine, hip, given, chosen, reason):
    for release, at in (("7.2", "opt/rocm-7.2.4"), ("7.14", "opt/rocm/core-7.14"), ("10.0", "opt/rocm/core-10.0")):
        machine.with_rocm(release, at)
    words = ["--tool-path", machine.folder / given] if given else []
    run = machine.with_torch(hip=hip).run("get_trace.sh", "--dry-run", *words)
    tool, release = f"{machine.folder}/{chosen}/bin/rocprofv3", "10.0" if "core" in chosen else "7.2"
    assert run.out.startswith(f"Tool: rocprofv3 of ROCm {release}: {tool}, {reason}\n") and run.commands[0][0] == tool
    assert ("two ROCm installations" in run.out) == (hip == "7.0.2")


@pytest.mark.parametrize("script", ["get_trace.sh", *first_fast("get_rocprof_sys.sh", *SCRIPTS[1:4])])
def test_a_wheel_that_brings_rocm_brings_the_profiler(machine, script):
    """That of the system would meet libraries of another release."""
    run = machine.with_rocm("7.2").with_wheel("10.0").run(script, "--output", "out", LD_LIBRARY_PATH="/else")
    site, tool = machine.folder / "site", TOOLS[script]
    package = site / ("_rocm_sdk_core" if tool == "rocprofv3" else "_rocm_profiler")
    assert run.code == 0 and run.out.startswith(f"Tool: {tool} of ROCm 10.0: {package}/bin/{tool}")
    assert run.out.splitlines()[0].endswith(", which comes with this PyTorch") and "two ROCm" not in run.out
    (words, *_) = (words for words in run.commands if any(word.startswith(f"{package}/bin/") for word in words))
    (libraries,) = (word for word in words if word.startswith("LD_LIBRARY_PATH="))
    assert libraries.startswith(f"LD_LIBRARY_PATH={package}/lib:") and libraries.endswith("/_rocm_sdk_core/lib:/else")
    shutil.rmtree(package / "bin")
    missing = machine.run(script, "--dry-run").out
    assert "If so, pip install 'rocm[profiler]', load the ROCm 10.0 module" in missing


@pytest.mark.parametrize("script", SCRIPTS)
def test_why_a_tool_cannot_be_used(machine, script):
    """One that was asked for is not replaced; without a wish torch.profiler takes its place, and says why first."""
    tool, torch_is = TOOLS[script], f"the PyTorch of {machine.env['PYTHON']} is built for"
    kfd = machine.folder / "kfd"

    def reasons():
        yield machine, "is not installed or not on PATH (module load rocm"
        machine.with_rocm("6.2")
        yield machine, "is of ROCm 6.2, and lacks options"
        shutil.rmtree(machine.folder / "rocm")
        yield machine.with_rocm("7.0").with_torch(cuda="12.8"), f"would record nothing: {torch_is} cuda 12.8"
        yield machine.with_torch(), f"would record nothing: {torch_is} cpu"
        kfd.unlink()
        yield machine, f"finds no AMD GPU: {kfd} does not exist (a container needs --device=/dev/kfd"

    for here, reason in reasons():
        run = here.run(script, "--tool", tool)
        assert run.code == 2 and run.out == "" and f"--tool {tool} cannot be used: it {reason}" in run.err
        first = here.run(script, "--dry-run").out.splitlines()[0]
        assert first.startswith(f"Tool: torch.profiler, through tiny_llama_v3.py --profile ({tool} {reason}")
    assert machine.results() == [] and machine.run(script, "--tool", "torch", "--dry-run").code == 0


@pytest.mark.parametrize("release", ["6.4", "7.0"])
def test_release_is_read_from_the_tool_without_a_version_file(machine, release):
    shutil.rmtree(machine.with_rocm(release).folder / "rocm" / ".info")
    assert machine.run("get_counters.sh", "--dry-run").out.startswith(f"Tool: rocprofv3 of ROCm {release}: ")


# --- without ROCm


@pytest.mark.parametrize("script", SCRIPTS)
def test_torch_profiler_takes_its_place(machine, script):
    run = machine.run(script, "--stage", "4")
    assert run.code == 0 and run.err == ""
    assert "--stage 4" in run.out and one_file(machine, "trace.json") and one_file(machine, "kernel_stats.csv")
    if script in ("get_hotspots.sh", "get_counters.sh", "get_rocprof_compute.sh"):
        assert "Kernels of 3 steps" in run.out
    assert (script == "get_rocprof_sys.sh") == bool(list(machine.work.rglob("host_profile.pstats")))


@pytest.mark.parametrize("asked, count", [([], 10), (["dram__bytes_read.sum"], 2)])
def test_ncu_counts_in_one_step(machine, asked, count):
    options = ["--kernel-name", "rmsnorm_kernel", "--launch-count", "3"]
    run = machine.with_nvidia().run("get_counters.sh", "--pmc", *asked, "--output", "out", "--", "--", *options)
    assert run.code == 0 and run.out.startswith("Tool: ncu, NVIDIA Nsight Compute (rocprofv3 is not installed")
    (command,) = [words for words in run.commands if words[0] == "ncu"]
    assert command[-4:] == ["--num-steps", "1", "--warmup-steps", "1"]
    line = shlex.join(command)
    assert " --nvtx-include step/ --clock-control none " in line and f" {shlex.join(options)} {machine.bin}" in line
    metrics = command[command.index("--metrics") + 1].split(",")
    assert len(metrics) == count and {"gpu__time_duration.sum", "dram__bytes_read.sum"} <= set(metrics)
    kernels, counted = run.out.split("by hardware counters")
    assert "Kernels of 3 steps" in kernels
    rows = [row.split() for row in counted.partition("All that")[0].splitlines() if row.endswith("_kernel")]
    assert [row[0] for row in rows] == ["60.0", "9.0"] and "RMSNorm" in rows[1]


def test_without_permission_for_counters(machine):
    """The kernels' times are there, and the missing part is named with the remedy."""
    complaint = dict(FAKE_COMPLAINT="==ERROR== ERR_NVGPUCTRPERM", FAKE_STATUS="9")
    run = machine.with_nvidia().run("get_counters.sh", "--pmc", **complaint)
    assert run.code == 1 and "hardware counters (the driver lets only an administrator read GPU" in run.err
    assert "Kernels of 3 steps" in run.out and not list(machine.work.rglob("ncu_raw.csv"))


def test_counters_need_a_tool_that_counts(machine):
    run = machine.run("get_counters.sh", "--pmc")
    assert run.code == 0 and "Kernels of 3 steps" in run.out and "No hardware counters" in run.out


# --- the session of the first exercise


@pytest.mark.parametrize("tool", ["rocprofv3", "torch"])
def test_session_of_the_first_exercise(machine, tool):
    if tool == "rocprofv3":
        machine.with_rocm("6.4")
    folder = machine.work / "rocprof_results"
    summary = folder / "triton_analysis_summary.md"
    folder.mkdir()
    (folder / "older.md").touch()
    summary.symlink_to("older.md")
    assert machine.run("run_rocprof_triton.sh").code == 0
    text = summary.read_text()
    (session,) = folder.glob("session_*/triton_analysis_summary.md")
    assert summary.is_symlink() and text == session.read_text() and len(list(session.parent.glob("*.png"))) == 3
    for heading in ("Kernel launch overhead", "Memory bandwidth", "GPU utilisation", "Roofline inputs"):
        assert f"\n## {heading}\n" in text
    assert "kernels a step, in 19 launches" in text or tool == "torch"
    assert ("from the bytes counted at the memory" in text) == (tool == "rocprofv3")
    assert ("Counted in the training run, matrix units alone" in text) == (tool == "rocprofv3")
    summary.unlink()  # a link to the newest; a person's file of that name is kept
    summary.write_text("mine")
    run = machine.run("run_rocprof_triton.sh")
    assert run.code == 0 and f"The summary: {folder}/session_" in run.out and summary.read_text() == "mine"


# --- failures


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_status_of_the_program_comes_back(machine, script):
    run = machine.with_rocm("7.0").run(script, "--output", "out", PROGRAM_STATUS="7")
    status = 1 if "compute" in script else 7  # rocprof-compute has its own
    assert run.code == status and run.err.count("\n") == 1 and f"ended with status {status}" in run.err
    assert f"; the log: {machine.work}/out.failed/log.txt" in run.err
    assert "tiny llama:" in (machine.work / "out.failed" / "log.txt").read_text()


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("env, status, told", [
    ({"FAKE_COMPLAINT": "Request exceeds the capabilities of the hardware to collect"}, 134, TOO_MANY),
    ({"FAKE_COMPLAINT": "tiny_llama_v3.py: error: no such thing"}, 134, "the program cannot do what its options ask"),
    ({"FAKE_NOTHING": "1"}, 1, "recorded nothing"),
])  # fmt: skip
def test_the_status_of_the_profiler_comes_back(machine, script, env, status, told):
    env |= {"FAKE_STATUS": "134", "HOST_PROFILE_STATUS": "1"}
    run = machine.with_rocm("7.0").run(script, "--output", "out", **env)
    assert run.code == status and told in run.err and machine.results() == ["out.failed"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_exists_is_never_deleted(machine, script):
    """Neither an earlier result, good or failed, nor what a person made under the name of a failed one."""
    failing = dict(PROGRAM_STATUS="7", HOST_PROFILE_STATUS="7")
    for name in ("out.failed", "out"):
        run = machine.run(script, "--output", "out", **failing)
        assert run.code == 7 and run.err.endswith(f"; the log: {machine.work}/{name}/log.txt\n")
        assert (machine.work / name / "INCOMPLETE").exists() == (name == "out")
    before = sorted(machine.work.rglob("*"))
    run = machine.run(script, "--output", "out")
    assert run.code == 2 and "/out exists and is not an empty folder" in run.err
    assert sorted(machine.work.rglob("*")) == before and machine.results() == ["out", "out.failed"]


def test_of_two_runs_that_want_a_folder_one_gets_it(machine, monkeypatch):
    def is_overtaken(folder, **_):
        os.makedirs(folder)
        (folder / "INCOMPLETE").touch()

    monkeypatch.setattr(Path, "mkdir", is_overtaken)
    run = machine.run("get_trace.sh", "--output", "out")
    assert run.code == 2 and "another run has just begun there" in run.err and run.commands == []


@pytest.mark.parametrize("text, code, told", [
    ("kill -9 $$", 137, "ended with status 137"),
    ('for last; do :; done; touch "$last/kernel_stats.csv"', 1, "recorded nothing"),  # an empty file is none
])  # fmt: skip
def test_a_program_that_is_killed_and_one_that_records_nothing(machine, text, code, told):
    executable(machine.bin / "program", f"#!/bin/sh\n{text}\n")
    run = machine.run("get_hotspots.sh", "--output", "out")
    assert run.code == code and told in run.err and machine.results() == ["out.failed"]


TWO_ROCMS = "two ROCm installations meet in one process, the profiler's and PyTorch's: use the profiler that comes with"


@pytest.mark.parametrize("said, arguments, env, told", [
    ("", [], {}, ["py may have used no GPU (profilers/doctor.sh tries one), or ended by os._exit(); the"]),
    ("Device: x86_64 (cpu); PyTorch 2.13", [], {}, ["PyTorch sees no GPU, and used the CPU: profilers/doctor.sh says"]),
    ("Device: x86_64 (cpu); PyTorch 2.13", ["--", "--device", "cpu"], {}, ["to use the CPU: leave out --device; "]),
    ("Device: AMD (gfx942)", ["--", "--profile", "x"], {}, ["has a profiler of its own: leave out --profile; "]),
    ("rocprofiler-register: hip registered more than once", [], {}, [TWO_ROCMS]),
    ("ROCPROFILER_REGISTER_LIBRARY is already set to /a.so", [], {}, [TWO_ROCMS]),
    ("ROCPROFILER_STATUS_ERROR_CONFIGURATION_LOCKED", ["--", "--", "--selected-regions"], {}, [
        TWO_ROCMS, "; --selected-regions may leave out the whole run: try without it"]),
    ("", [], {"HIP_VISIBLE_DEVICES": "-1", "ROCPROFILER_REGISTER_LIBRARY": "/a.so"}, [
        "HIP_VISIBLE_DEVICES=-1 hides every GPU: unset it; ROCPROFILER_REGISTER_LIBRARY=/a.so is loaded before"]),
    ("", [], {"ROCR_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "0"}, [": ROCR_VISIBLE_DEVICES= hides every GPU: u"]),
])  # fmt: skip
def test_why_nothing_was_recorded(machine, said, arguments, env, told):
    """The profiler and the program have both ended well."""
    env |= {"FAKE_NOTHING": "1", "FAKE_COMPLAINT": said, "FAKE_STATUS": "0"}
    run = machine.with_rocm("7.2").run("get_hotspots.sh", "--output", "out", *arguments, **env)
    assert run.code == 1 and machine.results() == ["out.failed"] and run.err.count("\n") == 1
    assert all(words in run.err for words in told) and "status 0" not in run.err


def test_a_mismatch_is_a_reason_for_nothing(machine):
    run = machine.with_rocm("7.2").with_torch_of("6.4").run("get_trace.sh", "--output", "out", FAKE_NOTHING="1")
    assert run.code == 1 and "left no *_results.pftrace: two ROCm installations. PyTorch brings ROCm 6.4" in run.err


@pytest.mark.parametrize("arguments, complaint", [
    (["--frobnicate"], "unknown option --frobnicate"), 
    (["--stage", "--dry-run"], "--stage: expected one argument"), (["--stage", "9"], "--stage: invalid choice: 9"),
    (["--tool", "nsys"], "--tool: invalid choice: 'nsys'"),
    (["--tool-path", "/no/such"], "--tool-path /no/such: there is no rocprof"),
    (["--tool-path", "/bin", "--tool", "torch"], "--tool-path names a profiler of ROCm, and --tool torch is none"),
    (["--", "--use-amp", "--", "--kernel-rename"], 'no options of its own: leave out "--kernel-rename"'),
])  # fmt: skip
@pytest.mark.parametrize("script", SCRIPTS)
def test_bad_options(machine, script, arguments, complaint):
    run = machine.run(script, *arguments)
    assert run.code == 2 and run.err.count("\n") == 1 and complaint in run.err and run.out == ""
    assert machine.results() == []


# --- several processes, signals


@pytest.mark.parametrize("rank, size", [item for item in LAUNCHERS.items() if item[1]])
def test_each_rank_has_a_folder_of_its_own(machine, rank, size):
    dry = "get_trace.sh", "--dry-run", "--output", "out"
    for values, folder in (("08", "010"), "rank_8"), (("0", "1"), "run"), (("0", "two"), "run"):
        # torchrun may start a single process within each task of Slurm.
        run = machine.run(*dry, **{"RANK": "0", "WORLD_SIZE": "1"} | {rank: values[0], size: values[1]})
        assert run.code == 0 and f"{machine.work}/out/{folder}" in run.out
    run = machine.run("get_hotspots.sh", **{rank: "0", size: "2"})
    told = f"{rank}=0: this is one of several processes, which need one folder for all: name it by --output"
    assert run.code == 2 and told in run.err


@pytest.mark.parametrize("rank", ["PALS_RANKID", "PMIX_RANK", "FLUX_TASK_RANK", "MV2_COMM_WORLD_RANK"])
def test_a_rank_without_a_count_has_a_folder_too(machine, rank):
    """Also the first: in out itself it would keep the others from their folders."""
    for number in "03":
        run = machine.run("get_trace.sh", "--dry-run", "--output", "out", **{rank: number})
        assert run.code == 0 and f"{machine.work}/out/rank_{number}" in run.out


def test_only_some_ranks_are_recorded(machine):
    """rocprofv3 does not know the variables of torchrun; a process that is left out runs as often as the others."""
    asked = "get_counters.sh", "--pmc", "SQ_WAVES", "--output", "out", "--", "--", "--profile-mpi-ranks=1,3-5"
    machine.with_rocm("10.0")
    for number in "01":
        run = machine.run(*asked, RANK=number, WORLD_SIZE="2")
        assert run.code == 0 and sum(words[0] == "rocprofv3" for words in run.commands) == 2
        assert " --mpi-world-rank-variable RANK --mpi-world-size-variable WORLD_SIZE " in run.out
        assert ("Kernels of 3 steps" in run.out) == ("leaves this process out" not in run.out) == (number == "1")
    run = machine.run("get_counters.sh", "--dry-run", *asked[3:], PALS_RANKID="3")  # whose count is of a node
    assert run.code == 0 and " --mpi-world-rank-variable PALS_RANKID -- " in run.out


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


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
@pytest.mark.parametrize("script", ["get_hotspots.sh", "get_rocprof_compute.sh"])
def test_what_interrupts_a_report_costs_no_recording(interruptible_machine, script, number, code):
    machine = interruptible_machine.with_rocm("7.0")
    if "compute" in script:  # which reports itself
        tool = machine.folder / "rocm" / "bin" / "rocprof-compute"
        waiting = f'[ $1 = profile ] || {{ echo reporting; exec sleep 60; }}\nexec {tool}.works "$@"'
        tool.rename(f"{tool}.works")
        executable(tool, f"#!/bin/sh\n{waiting}\n")
    else:
        failing(machine, "profilers.hotspots", "echo reporting; exec sleep 60")
    returned, _, err = machine.interrupt(script, number, until="reporting", PROGRAM_SLEEP="0")
    assert returned == code and machine.results() == ["out"] and not (machine.work / "out" / "INCOMPLETE").exists()
    assert code < 0 or ": error: interrupted; the recording is whole, and its report is made by " in err


@pytest.mark.parametrize("numbers", [(signal.SIGKILL,), (signal.SIGTERM, signal.SIGKILL)])
def test_no_profiler_outlives_a_script_that_is_killed(interruptible_machine, numbers):
    """Neither it nor what it has started, even where they ignore the signal that timeout -k sends first."""
    machine = interruptible_machine.with_rocm("7.0")
    profiler = "trap '' TERM; sleep 60 & echo tiny llama: $$ $!; wait"
    executable(machine.folder / "rocm" / "bin" / "rocprofv3", f"#!/bin/sh\n{profiler}\n")
    code, *_ = machine.interrupt("get_hotspots.sh", *numbers)
    assert code == -signal.SIGKILL and (machine.work / "out" / "INCOMPLETE").exists()
    (pids,) = re.findall(r"^tiny llama: (\d+ \d+)$", (machine.work / "out" / "log.txt").read_text(), re.M)
    command, deadline = ["ps", "-o", "stat=", "-p", pids], time.monotonic() + 10
    while re.search("^[^Z]", subprocess.run(command, capture_output=True, text=True).stdout, re.M):  # no zombie
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_after_a_command_signals_reach_the_script_again(machine):
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = [signal.getsignal(number) for number in numbers]
    assert machine.run("get_hotspots.sh").code == 0
    assert [signal.getsignal(number) for number in numbers] == before


# --- the scripts themselves


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_says_what_it_records(machine, script):
    run = machine.start(script, "--help")
    assert run.code == 0 and run.err == "" and run.out.startswith(f"usage: ./{script} [options] [-- ")
    assert "--tool NAME" in run.out and "--num-steps" in run.out
    assert os.stat(ROOT / script).st_mode & stat.S_IXUSR
    run = machine.start(script, "--dry-run", PYTHON="/no/such/python")
    assert run.code == 2 and f"{script}: error: there is no Python at PYTHON=/no/such/python" in run.err


def test_what_a_program_prints_arrives_as_it_is(machine):
    """Bytes that are no characters must not end the recording. The project's folder is in PYTHONPATH for reports."""
    text = r"echo found by $PYTHONPATH.; printf 'gr\303\266\303\237e \377\n'; exit 3"
    executable(machine.bin / "program", f"#!/bin/sh\n{text}\n")
    run = machine.start("get_trace.sh", "--output", "out")
    assert run.code == 3 and f"found by {machine.folder}/site.\ngröße \ufffd\n" in run.out
    assert "größe ".encode() + b"\xff\n" in (machine.work / "out.failed" / "log.txt").read_bytes()


@pytest.mark.parametrize("script, code, reason", [
    ("site/job.slurm", 2, "Slurm did not start it: sbatch site/job.slurm --graph"),
    ("site/setup_env.sh", 2, "is not an option"),
])  # fmt: skip
def test_scripts_that_cannot_do_what_was_asked(tmp_path, script, code, reason):
    copy = shutil.copy(ROOT / script, tmp_path)  # a mistake must not cost the .venv here
    words, env = ["bash", copy, "--graph"], {"PATH": os.defpath}
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1) and reason in done.stderr
    assert list(tmp_path.iterdir()) == [Path(copy)]


# --- dry runs


@pytest.mark.parametrize("script, release", [
    *itertools.product(SCRIPTS, [None]), ("get_counters.sh", "7.1"), ("run_rocprof_triton.sh", "10.0"),
    *first_fast(*itertools.product(SCRIPTS[:3], ["6.4"])),
])  # fmt: skip
def test_dry_run_prints_what_a_run_executes(machine, script, release):
    if release:
        machine.with_rocm(release)
    arguments = ["--output", "out", "--stage", "4", "--", "--seq-len", "64"]
    dry = machine.run(script, "--dry-run", *arguments)
    assert dry.code == 0 and not list(machine.work.iterdir())
    assert dry.commands == machine.run(script, *arguments).commands and len(dry.commands) >= 1
    program = next(words for words in dry.commands if any(word.endswith("tiny_llama_v3.py") for word in words))
    assert "--seq-len" in program and program[program.index("--stage") + 1] == "4"


@pytest.mark.parametrize("release, counters, library, system", [
    ("10.1", "rocpd", False, FORMATS), ("6.4", "csv", False, "-H -D -T -P"), ("7.14", "rocpd", False, FORMATS),
    ("7.0", "rocpd", True, "-H -D -T -P"), ("7.2", "rocpd", True, "-H -D -T -P"),
    ("7.12", "rocpd", False, "-H -D -T -P"),
])  # fmt: skip
def test_what_each_release_is_asked_for(machine, release, counters, library, system):
    """A dry run needs no tool: the release decides."""

    def line(script):
        run = machine.run(script, "--dry-run", "--tool", TOOLS[script], "--output", "out", ROCM_VERSION=release)
        tool = "rocprof-sys-sample" if "sys" in script else TOOLS[script]
        assert run.out.startswith(f"Tool: {TOOLS[script]} of ROCm {release}: {tool}, which is not installed here\n")
        return shlex.join(run.commands[0])

    assert f" --output-format {counters} -d " in line("get_counters.sh")
    assert (" --output-format csv pftrace rocpd -d " in line("get_trace.sh")) == (counters == "rocpd")
    assert ("--rocprofiler-sdk-library-path" in line("get_rocprof_compute.sh")) == library
    assert f"rocprof-sys-sample {system} " in line("get_rocprof_sys.sh")


@pytest.mark.parametrize("version", ["abc", "7", "5.0", "6.3.4"])
def test_a_release_that_no_dry_run_is_for(machine, version):
    """It counts only where a profiler that is not installed was asked for: modules set the variable as well."""
    run = machine.run("get_counters.sh", "--dry-run", "--tool", "rocprofv3", ROCM_VERSION=version)
    assert run.code == 2 and run.out == "" and run.err.count("\n") == 1
    assert f"error: ROCM_VERSION={version} is no release from 6.4 on: give one such as 10.0" in run.err
    assert machine.run("get_counters.sh", "--dry-run", ROCM_VERSION=version).code == 0


@pytest.mark.parametrize("script, told, build, given", [
    ("get_rocprof_compute.sh", "7.2", "7.12", "--rocprofiler-sdk-library-path"),
    ("get_rocprof_compute.sh", "7.12", "7.2", "--rocprofiler-sdk-library-path"),
    ("get_rocprof_sys.sh", "7.12", "7.14", "--output-format"),
    ("get_rocprof_sys.sh", "7.14", "7.12", "--output-format"),
    ("get_trace.sh", "6.4", "7.0", "rocpd"), ("get_trace.sh", "7.0", "6.4", "rocpd"),
    ("get_counters.sh", "6.4", "7.0", "rocpd"), ("get_counters.sh", "7.0", "6.4", "rocpd"),
])  # fmt: skip
def test_a_build_between_two_releases_is_asked_by_its_help(machine, script, told, build, given):
    """Once: rocprof-compute takes seconds. What it does not know would end it."""
    machine.with_rocm(build)
    (machine.folder / "rocm" / ".info" / "version").write_text(f"{told}.0-1\n")
    name = EXECUTABLES[TOOLS[script]]
    path = machine.folder / "rocm" / "bin" / name
    path.rename(path.with_name("real"))
    executable(path, f'#!/bin/sh\necho "$*" >> {machine.folder}/calls\nexec {path.with_name("real")} "$@"\n')
    run = machine.run(script, "--output", "out")
    calls = (machine.folder / "calls").read_text().splitlines()
    assert run.code == 0 and [call.endswith("--help") for call in calls].count(True) == 1
    before = "7.12" if "library" in given else "7.14" if given.startswith("--") else "7.0"
    is_new = release_in(build) >= release_in(before)
    assert any(f"{given} " in call for call in calls) == (is_new != ("library" in given))


@pytest.mark.parametrize("text, has_help", [
    ("echo no package; exit 1", False), ("sleep 60 & wait", False), ("echo Usage: rocprofv3", True),
])  # fmt: skip
def test_a_tool_without_help_is_taken_by_its_release(machine, text, has_help, monkeypatch):
    monkeypatch.setattr(subprocess, "run", functools.partial(run_for_a_second, subprocess.run))
    machine.with_rocm("7.1")
    executable(machine.folder / "rocm" / "bin" / "rocprofv3", f"#!/bin/sh\n{text}\n")
    run = machine.run("get_trace.sh", "--dry-run")
    assert f" --output-format csv pftrace {'' if has_help else 'rocpd '}-d " in run.out


# --- the guide


def test_what_is_typed_by_hand_is_reported_alike(machine):
    """The folders and names of the guide are those that the reports look for."""
    machine.with_rocm("7.14")
    lines = [line for line in TYPED if line.startswith("rocprofv3 ") or re.search(" (hot|count)$", line)]
    assert len(lines) == 8
    typed = "\n".join(lines).replace("python -m", f"{machine.env['PYTHON']} -m").replace(".venv/bin/python", "true")
    env = machine.env | {"PATH": f"{machine.folder}/rocm/bin:{machine.env['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-ec", typed], cwd=machine.work, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "mean of the measured steps; occupancy" in done.stdout, done.stderr
    assert OF_THE_STEPS.search(done.stdout)
    assert re.search(r"^ *[\d.]+ +[\d.]+ +[\d.]+ +matrix product +Cijk", done.stdout, re.M)  # us, GB/s, MB
