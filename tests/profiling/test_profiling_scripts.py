"""The shell scripts against fakes of the profilers of ROCm 6.4, 7.0 and 7.1, and for ncu."""

import itertools
import os
import re
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from profiling.readers import read_kernel_stats, read_step_stats
from tests.fakes.machine import FOLDERS, ROOT, Machine

RELEASES = ("6.4", "7.1")
SCRIPTS = tuple(FOLDERS)
ROCM_TOOL = {"get_rocprof_compute.sh": "rocprof-compute", "get_rocprof_sys.sh": "rocprof-sys"}

# ----------------------------------------------------------------------------------------------------------------------
# With ROCm


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_runs_with_rocm(machine, script, release):
    run = machine.with_rocm(release).run(script)
    assert run.code == 0 and run.err == ""
    tool = ROCM_TOOL.get(script, "rocprofv3")
    assert run.out.splitlines()[0] == f"Tool: {tool} of ROCm {release}"
    (result,) = machine.results()
    assert re.fullmatch(FOLDERS[script] + r"_\d{8}_\d{6}", result)
    assert f"\nResults: {machine.work / result}\n" in run.out
    log = (machine.work / result / "log.txt").read_text()
    assert "tiny llama: --batch-size 8 --seq-len 128 --num-steps" in log and "\n".join(log.splitlines()[:1]) in run.out


def one_file(machine, pattern):
    (path,) = machine.work.rglob(pattern)
    assert path.stat().st_size
    return path


@pytest.mark.parametrize("release", ("6.4", "7.0", "7.1"))
def test_hotspots_rank_the_kernels_of_the_steps(machine, release):
    run = machine.with_rocm(release).run("get_hotspots.sh")
    assert one_file(machine, "hotspots_kernel_stats.csv") and one_file(machine, "hotspots_kernel_trace.csv")
    assert re.search(r"^Kernels of 3 steps, ms and calls a step: [\d.]+ ms in 19 calls of 6 kernels$", run.out, re.M)
    ranked = re.findall(r"^ *([\d.]+) %  +[\d.]+ +(\d+) +[\d.]+  (.*?)  +(\S+)", run.out, re.M)
    shares = [float(share) for share, *_ in ranked]
    assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(100, abs=0.5)
    assert ranked[0][1:3] == ("6", "matrix product") and ranked[1][2:] == (
        "attention backward",
        "flash_attention_backward_kernel",
    )
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


@pytest.mark.parametrize("release", ("6.4", "7.0"))
def test_hardware_counters(machine, release):
    run = machine.with_rocm(release).run("get_counters.sh", "--pmc", "--output", "out")
    assert run.code == 0
    passes = [
        words[2 : words.index("--output-format")] for words in run.commands if words[:2] == ["rocprofv3", "--pmc"]
    ]
    assert len(passes) == 5 and not any({"FETCH_SIZE", "WRITE_SIZE"} <= set(names) for names in passes)
    assert len(list(machine.work.rglob("counters_counter_collection.csv"))) == 5
    *_, row = (line.split() for line in run.out.splitlines() if line.endswith(" rmsnorm_kernel"))
    assert {"75.0", "8.0", "RMSNorm"} <= set(row)  # three hits to one miss; waves a compute unit


def test_each_pmc_is_a_pass(machine):
    run = machine.with_rocm("7.0").run(
        "get_counters.sh", "--pmc", "SQ_WAVES,GRBM_COUNT", "--pmc", "FETCH_SIZE", "--output", "out"
    )
    assert run.code == 0
    passes = [words[2:4] for words in run.commands if words[:2] == ["rocprofv3", "--pmc"]]
    assert passes == [["SQ_WAVES", "GRBM_COUNT"], ["FETCH_SIZE", "--output-format"]]
    assert "SQ_WAVES" in run.out.split("All that was counted")[1]


def test_the_chip_decides_what_is_counted(machine):
    machine.with_rocm("7.0")
    (machine.bin / "rocminfo").write_text("#!/bin/sh\necho '  Name:  gfx1100'\n")
    (machine.bin / "rocminfo").chmod(0o755)
    run = machine.run("get_counters.sh", "--pmc", "--dry-run")
    assert run.code == 0 and "OccupancyPercent" in run.out and "TCC_HIT_sum" not in run.out and "Mfma" not in run.out


def test_two_rocm_installations_are_noticed(machine):
    machine.with_rocm("7.0")
    for hip, noticed in (("6.4.43482-0f2d60242", True), ("7.0.51831", False)):
        run = machine.with_torch(hip=hip).run("get_trace.sh", "--dry-run")
        assert ("two ROCm installations. PyTorch brings ROCm 6.4" in run.out) is noticed


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
        assert machine.run("get_counters.sh", "--dry-run").out.startswith(f"Tool: rocprofv3 of ROCm {expected}\n")
        shutil.rmtree(machine.folder / "rocm")


# ----------------------------------------------------------------------------------------------------------------------
# Without ROCm


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


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs root, to become nobody")
def test_no_permission_on_the_device():
    import tempfile

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        machine = Machine(Path(folder)).with_rocm("7.0")
        os.chmod(machine.folder / "kfd", 0o660)
        shutil.copytree(ROOT / "profiling", machine.folder / "profiling")
        shutil.copy(ROOT / "get_trace.sh", machine.folder)
        (machine.bin / "python").write_text("#!/bin/sh\n")  # the interpreter may be out of nobody's reach
        nobody = [
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            machine.folder / "get_trace.sh",
            "--dry-run",
        ]
        done = subprocess.run(nobody, cwd=folder, env=machine.env, capture_output=True, text=True)
        assert "rocprofv3 has no permission on" in done.stdout and "usermod -aG root" in done.stdout
        done = subprocess.run(
            [*nobody[:-1], "--tool", "rocprofv3"], cwd=folder, env=machine.env, capture_output=True, text=True
        )
        assert done.returncode == 2 and "has no permission" in done.stderr


def test_ncu_measures_one_step(machine):
    run = machine.with_nvidia().run("get_rocprof_compute.sh", "--output", "out")
    assert run.code == 0 and run.out.startswith("Tool: ncu, NVIDIA Nsight Compute (rocprof-compute is not installed")
    (command,) = [words for words in run.commands if words[0] == "ncu"]
    assert command[-4:] == ["--num-steps", "1", "--warmup-steps", "1"]
    assert (
        command[command.index("--nvtx-include") + 1] == "step/"
        and command[command.index("--clock-control") + 1] == "none"
    )
    attention, norm = (
        line.split() for line in run.out.splitlines() if line.endswith(("attention_kernel", "rmsnorm_kernel"))
    )
    assert (attention[0], norm[0]) == ("60.0", "9.0")
    assert "40.5" in norm and "RMSNorm" in norm


def test_ncu_counts(machine):
    run = machine.with_nvidia().run("get_counters.sh", "--pmc", "dram__bytes_read.sum", "--output", "out")
    assert run.code == 0
    (command,) = [words for words in run.commands if words[0] == "ncu"]
    assert command[command.index("--metrics") + 1] == "dram__bytes_read.sum,gpu__time_duration.sum"
    assert "Kernels of 3 steps" in run.out and "dram__bytes_read.sum" in run.out


@pytest.mark.parametrize(
    "complaint, reason",
    [
        (
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission",
            "lets only an administrator read GPU counters",
        ),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", "cannot reach the GPU's counters"),
        ("==WARNING== No kernels were profiled.", "saw no kernel within a range named step"),
    ],
)
@pytest.mark.parametrize("arguments", [["get_rocprof_compute.sh"], ["get_counters.sh", "--pmc"]])
def test_without_permission_for_counters(machine, complaint, reason, arguments):
    machine.with_nvidia()
    run = machine.run(*arguments, FAKE_COMPLAINT=complaint)
    assert run.code == 0 and f"Tool: torch.profiler from here on ({reason[:4]}" in run.out.replace(
        "the driver ", ""
    ).replace("ncu ", "")
    assert reason in run.out and "Kernels of 3 steps" in run.out
    run = machine.run(*arguments, "--tool", "ncu", "--output", "out", FAKE_COMPLAINT=complaint, FAKE_STATUS="9")
    assert run.code == 9 and reason in run.err and "out.failed" in machine.results()


@pytest.mark.parametrize("tool", ["rocprofv3", "ncu", "torch"])
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


def test_counters_need_a_tool_that_counts(machine):
    run = machine.run("get_counters.sh", "--pmc", "--tool", "torch")
    assert run.code == 2 and "rocprofv3 (AMD) or ncu (NVIDIA)" in run.err
    run = machine.run("get_counters.sh", "--tool", "ncu")
    assert run.code == 2 and "add --pmc" in run.err
    run = machine.run("get_counters.sh", "--pmc")
    assert run.code == 0 and "No hardware counters" in run.out and "Kernels of 3 steps" in run.out


# ----------------------------------------------------------------------------------------------------------------------
# Failures


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
    run = machine.with_rocm("7.0").run(script, "--output", "out", FAKE_COMPLAINT=complaint, FAKE_STATUS="134")
    assert run.code == 134 and "too many counters for one pass" in run.err and machine.results() == ["out.failed"]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("release", RELEASES)
def test_nothing_recorded_is_a_failure(machine, script, release):
    run = machine.with_rocm(release).run(script, "--output", "out", FAKE_NOTHING="1")
    assert run.code == 1 and "recorded nothing" in run.err and machine.results() == ["out.failed"]


def test_a_new_run_replaces_what_failed_under_its_name_only(machine):
    assert machine.run("get_trace.sh", "--output", "out", PROGRAM_STATUS="7").code == 7
    assert machine.run("get_trace.sh", "--output", "out").code == 0
    assert machine.results() == ["out"]
    before = sorted(machine.work.rglob("*"))
    run = machine.run("get_trace.sh", "--output", "out")
    assert run.code == 2 and "--output out exists" in run.err and sorted(machine.work.rglob("*")) == before


def test_an_unwritable_folder(machine):
    (machine.work / "file").touch()
    run = machine.run("get_trace.sh", "--output", "file/out")
    assert run.code == 2 and "cannot be written to" in run.err


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--frobnicate"], "unknown option --frobnicate"),
        (["--num-steps", "3"], "go after --"),
        (["--output"], "--output needs a value"),
        (["--stage", "--dry-run"], "--stage needs a value"),
        (["--stage", "four"], "--stage four is not a number"),
        (["--tool", "nsys"], "--tool nsys: choose one of"),
        (["--", "--use-amp", "--", "--kernel-rename"], 'no options of its own: leave out "--kernel-rename"'),
    ],
)
@pytest.mark.parametrize("script", SCRIPTS)
def test_bad_options(machine, script, arguments, complaint):
    run = machine.run(script, *arguments)
    assert run.code == 2 and run.err.count("\n") == 1 and complaint in run.err and run.out == ""
    assert machine.results() == []


def test_printed_paths_exist(machine):
    """The folder has its name from the beginning; a file in it says that it is not whole."""
    run = machine.run("get_trace.sh", "--output", "out")
    assert "incomplete" not in run.out and not (machine.work / "out" / "INCOMPLETE").exists()
    assert f"--profile {machine.work}/out\n" in run.out


@pytest.mark.parametrize("launcher", ["torchrun", "srun", "mpirun"])
def test_each_rank_has_a_folder_of_its_own(machine, launcher):
    rank, size = {
        "torchrun": ("RANK", "WORLD_SIZE"),
        "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    }[launcher]
    machine.with_rocm("7.0")
    for number in ("0", "1"):
        run = machine.run("get_hotspots.sh", "--output", "out", **{rank: number, size: "2"})
        assert run.code == 0 and f"Results: {machine.work}/out/rank_{number}\n" in run.out
    run = machine.run("get_hotspots.sh", **{rank: "0", size: "2"})
    assert run.code == 2 and "2 processes need one folder for all: name it by --output" in run.err
    assert machine.run("get_hotspots.sh", **{rank: "0", size: "1"}).code == 0


def test_no_python(machine):
    run = machine.run("get_trace.sh", PYTHON="/no/such/python")
    assert run.code == 2 and "PYTHON=/no/such/python" in run.err


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("rocm", [True, False])
def test_interrupt_ends_script_and_program(machine, number, code, rocm):
    if rocm:
        machine.with_rocm("7.0")
    env = machine.env | {"PROGRAM_SLEEP": "60"}
    process = subprocess.Popen(
        [ROOT / "get_trace.sh", "--output", "out"], cwd=machine.work, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    log = machine.work / "out" / "log.txt"
    deadline = time.monotonic() + 30
    while not (log.exists() and "tiny llama:" in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == code and "interrupted" in err
    assert ("Interrupted after 2 of 10 steps" in out) == (number == signal.SIGINT)
    assert machine.results() == ["out.failed"]
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(machine.work) not in running


# ----------------------------------------------------------------------------------------------------------------------
# Dry runs and help


@pytest.mark.parametrize(
    "script, release",
    [
        *itertools.product(SCRIPTS[:3], (*RELEASES, None)),
        *itertools.product(ROCM_TOOL, [None]),  # with ROCm in files of their own
        (SCRIPTS[-1], "6.4"),
    ],
)
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


@pytest.mark.parametrize("script", SCRIPTS)
def test_dry_run_of_a_tool_that_is_absent(machine, script):
    """The command lines of any release can be read anywhere."""
    tool = ROCM_TOOL.get(script, "rocprofv3")
    for release in ("6.4", "7.2"):
        run = machine.run(script, "--dry-run", "--tool", tool, ROCM_VERSION=release)
        assert run.code == 0 and run.out.startswith(f"Tool: {tool} of ROCm {release}\n")
        assert any(word in run.out for word in ("rocprofv3 -", "rocprof-compute profile", "rocprof-sys-sample -T"))


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
    for folder in ("profiling", "measure"):
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
