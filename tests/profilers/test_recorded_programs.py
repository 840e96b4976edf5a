"""The profiling scripts with --program: any program in the place of the training script, against fakes."""

import json
import os
import re
import subprocess

import pytest

from tests.fakes.machine import FOLDERS, ROOT

SCRIPTS = tuple(FOLDERS)
WITH_TABLE = "get_trace.sh", "get_hotspots.sh", "get_counters.sh"
# It notes how it was called in the folder in which it runs.
PROGRAM = """import json, os, sys
with open("calls", "a") as file:
    print(json.dumps([sys.argv, os.environ.get("PYTHONPATH"), os.environ.get("OF_MINE")]), file=file)
sys.exit(int(os.environ.get("PROGRAM_STATUS", 0)))
"""
ARGUMENTS = ["config/train.py", "--text=two words", "it's", '"quoted"', "$HOME", "", "--help"]
NO_STEPS = "own.py marks no steps: times are of the whole run"


@pytest.fixture
def own(machine):
    """A Machine with a program in a folder of its own, given as programs/own.py."""
    (machine.work / "programs").mkdir()
    (machine.work / "programs" / "own.py").write_text(PROGRAM)
    return machine


def record(machine, script, *words, **env):
    return machine.run(script, "--output", "out", "--program", "programs/own.py", *words, **env)


def calls(machine):
    """Return [arguments, PYTHONPATH, OF_MINE] of each call of the program."""
    return [json.loads(line) for line in (machine.work / "calls").read_text().splitlines()]


# Runs of the program: get_rocprof_sys.sh has one for the functions of Python, whose PYTHONPATH names the project.
RUNS = {"get_rocprof_compute.sh": 3, "get_rocprof_sys.sh": 2, "run_rocprof_triton.sh": 7}


@pytest.mark.parametrize("rocm", [True, False])
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_program_runs_here_with_its_arguments_and_nothing_else(own, script, rocm):
    if rocm:
        own.with_rocm("10.0")
    # rocprof-compute joins the words, and splits them again.
    arguments = ARGUMENTS[:1] if rocm and "compute" in script else ARGUMENTS
    run = record(own, script, "--", *arguments, OF_MINE="set")
    assert run.code == 0 and run.err == "" and "tiny_llama" not in run.out.replace(*NOT_MINE)
    assert rocm or run.out.startswith("Tool: torch.profiler, around own.py (")
    path = os.path.abspath(own.work / "programs" / "own.py")
    expected = [[path, *arguments], own.env["PYTHONPATH"], "set"]
    called = calls(own)
    assert len(called) == (RUNS.get(script, 1) if rocm else 1 + ("sys" in script))
    if "sys" in script:
        of_functions = called.pop()
        assert of_functions[0] == expected[0]
    assert called == [expected] * len(called)
    assert not (own.work / "out" / "run").exists() and not (own.work / "out" / "INCOMPLETE").exists()


NOT_MINE = ("of `tiny_llama_v3.py` alone", "")  # kernels that run_rocprof_triton.sh measures by themselves


@pytest.mark.parametrize("rocm", [True, False])
@pytest.mark.parametrize("script", WITH_TABLE)
def test_steps_are_those_that_the_program_marks(own, script, rocm):
    """Though its whole run is recorded: the warm-up, with other and slower kernels, is in no step."""
    if rocm:
        own.with_rocm("7.0")
    run = record(own, script, FAKE_STEPS="4")
    assert run.code == 0 and "marks no steps" not in run.out
    assert re.search(r"^Kernels of 4 steps, ms and calls a step: [\d.]+ ms in 19 calls of 6 kernels$", run.out, re.M)


@pytest.mark.parametrize("rocm", [True, False])
@pytest.mark.parametrize("script", WITH_TABLE)
def test_without_steps_the_whole_run_counts(own, script, rocm):
    if rocm:
        own.with_rocm("7.0")
    run = record(own, script, FAKE_STEPS="0")
    assert run.code == 0 and run.out.count(f"\n{NO_STEPS}\n") == 1 and "a step:" not in run.out
    # The 19 kernels of the warm-up and its own one.
    assert re.search(r"^Kernels of the whole run, warm-up included: [\d.]+ ms in 20 calls of 7 kernels$", run.out, re.M)


@pytest.mark.parametrize("steps", ["0", "2"])
def test_the_session_has_figures_of_a_step_only_where_there_are_steps(own, steps):
    run = record(own.with_rocm("10.0"), "run_rocprof_triton.sh", FAKE_STEPS=steps)
    text = (own.work / "out" / "triton_analysis_summary.md").read_text()
    assert run.code == 0 and "the timeline of the run of own.py, then" in run.out
    for words in ("| ms a step | calls a step |", "Kernels of 2 steps", "us a step", "a captured graph replays"):
        assert (words in text) == (steps == "2")
    for words in (NO_STEPS, "Kernels of the whole run", "| ms | calls |", "The trace does not name its steps"):
        assert (words in text) == (steps == "0")
    assert "In the run of `own.py`, from the bytes counted" in text and "the training run" not in text
    assert text.count("Each Triton kernel of `tiny_llama_v3.py` alone") == 2  # bandwidth and roofline


@pytest.mark.parametrize("steps, scope", [("3", "measured steps"), ("0", "whole run, warm-up included")])
def test_ncu_counts_in_the_steps_or_in_the_whole_run(own, steps, scope):
    """A program without NVTX ranges is run again, without the filter that let nothing pass."""
    run = record(own.with_nvidia(), "get_counters.sh", "--pmc", "--", "its own", FAKE_STEPS=steps)
    assert run.code == 0 and f"by hardware counters, mean of the {scope};" in run.out
    commands = [words for words in run.commands if words[0] == "ncu" and "--import" not in words]
    assert ["--nvtx-include" in words for words in commands] == [True, False][: 1 + (steps == "0")]
    assert all(words[-1] == "its own" for words in commands) and len(calls(own)) == 1 + len(commands)
    assert ("Without NVTX ranges named step in own.py, ncu counts in its whole run:" in run.out) == (steps == "0")


def test_rocprof_compute_runs_the_program_where_its_files_are(own):
    """The tool itself is started in the folder of the result."""
    run = record(own.with_rocm("6.4"), "get_rocprof_compute.sh", "--", "--data=text.txt")
    (words,) = [words for words in run.commands if "profile" in words]
    program = words[words.index("--") + 1 :]
    assert program[1:3] == [str(ROOT / "profilers" / "as_main.py"), str(own.work)]
    assert f"rocprof-compute analyze -p {own.work}/out/workloads/program/MI300X_A1\n" in run.out


@pytest.mark.parametrize("script", ["get_hotspots.sh", "get_rocprof_compute.sh"])
def test_a_module_that_the_program_lacks_is_named(own, script):
    (own.work / "programs" / "own.py").write_text("import no_such_module")
    run = record(own.with_rocm("7.0"), script)
    told = f"no module no_such_module: if the program needs it, {own.env['PYTHON']} -m pip install no_such_module; if"
    assert run.code == 1 and told in run.err and own.results() == ["out.failed"]


@pytest.mark.parametrize("words, told", [
    (["--program", "no/such.py"], "--program no/such.py cannot be read (No such file or directory): give a file"),
    (["--program", "programs"], "--program programs cannot be read (Is a directory): give a file"),
    (["--program", "pipe"], "--program pipe cannot be read (not a regular file): give a file"),
    (["--program", "programs/own.py", "--stage", "4"], "--stage is of tiny_llama_v3.py, and --program names another"),
    (["--program", "programs/own.py", "--batch-size", "8"], "unknown option --batch-size: options of own.py go after"),
])  # fmt: skip
@pytest.mark.parametrize("script", SCRIPTS)
def test_what_cannot_be_met_is_refused_before_anything_is_made(own, script, words, told):
    os.mkfifo(own.work / "pipe")
    before = sorted(own.work.rglob("*"))
    run = own.run(script, "--output", "out", *words)
    assert run.code == 2 and run.out == "" and told in run.err and run.err.count("\n") == 1
    assert sorted(own.work.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="an administrator can read every file")
def test_a_program_that_may_not_be_read(own):
    (own.work / "programs" / "own.py").chmod(0)
    run = record(own, "get_trace.sh")
    assert run.code == 2 and "own.py cannot be read (Permission denied): give a file" in run.err


@pytest.mark.parametrize("rank, size", [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")])
@pytest.mark.parametrize("steps, told", [("3", "Kernels of 6 steps of 2 processes, .* in 19 calls"), ("0", NO_STEPS)])
def test_all_ranks_in_one_table(own, rank, size, steps, told):
    """torchrun or srun starts the script for each process, and the program finds their variables."""
    for number in "01":
        words = "--output", "my out", "--", "two words"
        run = record(own, "get_hotspots.sh", *words, FAKE_STEPS=steps, **{rank: number, size: "2"})
        assert run.code == 0 and f"Results: {own.work}/my out/rank_{number}\n" in run.out
    assert [arguments[1:] for arguments, *_ in calls(own)] == [["two words"]] * 2
    (command,) = re.findall(r"^All processes in one table: (.*)$", run.out, flags=re.M)
    done = subprocess.run(command, shell=True, cwd=own.folder, env=own.env, capture_output=True, text=True)
    assert re.search(told, done.stdout), done.stderr
