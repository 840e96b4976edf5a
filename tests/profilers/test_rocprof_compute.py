"""get_rocprof_compute.sh against a fake of rocprof-compute of ROCm 6.4 to 10.2."""

import csv
import os
import re
import shlex

import pytest

from profilers import rocprof_compute_kernels
from tests.fakes.machine import first_fast
from tests.profilers.conftest import GUIDE

RELEASES = first_fast("10.2", "6.4", "7.0", "7.1", "7.2", "7.12", "7.14", "10.0", "10.1")
BY_TIME = [  # rows of the table of kernels; row 0 drew the weights
    ("1", "Cijk_"), ("2", "flash_attention_backward_kernel"), ("3", "flash_attention_kernel"), ("4", "rmsnorm_kernel"),
    ("5", "swiglu_activation_kernel"),
]  # fmt: skip


def profile_of(run):
    (words,) = [words for words in run.commands if "profile" in words]
    return words


def analyses_of(run):
    return [words for words in run.commands if "analyze" in words]


def run_script(machine, *arguments, **env):
    return machine.run("get_rocprof_compute.sh", "--output", "out", *arguments, **env)


@pytest.mark.parametrize("release", RELEASES)
def test_each_kernel_is_analyzed_by_itself(machine, release):
    run = run_script(machine.with_rocm(release))
    assert run.code == 0 and run.err == ""
    workload = str(machine.work / "out" / "workloads" / "tiny_llama" / "MI300X_A1")
    listing, *analyses = analyses_of(run)
    assert listing[-3:] == ["-p", workload, "--list-stats"]
    sections = ["rocprof-compute", "analyze", "-p", workload, "-b", "2", "6.2", "16.1", "17.1"]
    assert analyses == [[*sections, "-k", number] for number, _ in BY_TIME]
    headings = re.findall(r"^(\S+): ([\d.]+)% of the time of the kernels, (\d+) dispatch(?:es)?$", run.out, re.M)
    for (name, _, count), (_, expected) in zip(headings, BY_TIME, strict=True):
        assert name.startswith(expected) and int(count) in (12, 8, 4)  # of two steps
    text = (machine.work / "out" / "analysis.txt").read_text()
    assert text in run.out and text.startswith("Kernels and dispatches:\n")
    assert text.count("System Speed-of-Light") == len(BY_TIME)
    assert f"Everything that was measured: rocprof-compute analyze -p {workload}\n" in run.out
    program = profile_of(run)[profile_of(run).index("--") + 1 :]
    assert os.path.isfile(program[0]) and program[program.index("--num-steps") + 1] == "1"
    assert program[program.index("--warmup-steps") + 1] == "1"  # not the default 3; with --graph not 0


# --- what the tool wants of the machine


@pytest.mark.parametrize("release", ["7.1", "7.12"])
def test_a_tool_of_another_rocm_than_rocm_path_says(machine, release):
    machine.with_rocm(release)
    (machine.folder / "rocm").rename(machine.folder / "rocm-new")
    machine.with_rocm("7.0")
    (machine.bin / "rocprof-compute").symlink_to(machine.folder / "rocm-new" / "bin" / "rocprof-compute")
    for path in (machine.folder / "rocm").rglob("rocprofv3_avail_module"):
        path.rmdir()
    run = run_script(machine.with_torch(hip="6.4.1"))
    assert run.code == 0 and run.out.startswith(f"Tool: rocprof-compute of ROCm {release}: {machine.bin}/")
    library = f"--rocprofiler-sdk-library-path {machine.folder}/rocm-new/lib/librocprofiler-sdk.so"
    assert (library in shlex.join(profile_of(run))) == (release == "7.1")


@pytest.mark.parametrize("rank, folder", [("OMPI_COMM_WORLD_RANK", "1"), ("RANK", "MI300X_A1")])
def test_a_rank_of_several_is_profiled_by_a_tool_that_tells_them_apart(machine, rank, folder):
    """It knows the variables of MPI, and not those of torchrun."""
    size = {"RANK": "WORLD_SIZE"}.get(rank, "OMPI_COMM_WORLD_SIZE")
    run = run_script(machine.with_rocm("7.12"), **{rank: "1", size: "2"})
    workload = machine.work / "out" / "rank_1" / "workloads" / "tiny_llama" / folder
    assert run.code == 0 and f"rocprof-compute analyze -p {workload}\n" in run.out and len(analyses_of(run)) == 6
    older = "--tool-path", machine.with_rocm("7.2", "opt/rocm").folder / "opt" / "rocm"
    refused = run_script(machine, *older, **{rank: "0", size: "2"})
    assert refused.code == 2 and "profiles one process at a time on a node, as all before ROCm 7.12" in refused.err


# --- options


@pytest.mark.parametrize("release, option", first_fast(("10.2", "--roofline"), ("6.4", "--roof-only")))
def test_the_roofline_alone(machine, release, option):
    run = run_script(machine.with_rocm(release), "--", "--", option)
    assert run.code == 0 and "--no-roof" not in profile_of(run) and analyses_of(run) == []
    assert f"7.13, rocprof-compute analyze -p {machine.work}/out/workloads/tiny_llama/MI300X_A1 -b 4\n" in run.out


@pytest.mark.parametrize("release, names", [("10.0", ["torch", "triton"]), ("7.12", ["torch"])])
def test_operators_to_which_the_tool_attributes_counters(machine, release, names):
    run = run_script(machine.with_rocm(release), "--operators")
    assert run.code == 0 and {f"--{name}-trace" for name in names} < set(profile_of(run))
    assert analyses_of(run)[-1][-len(names) :] == [f"--list-{name}-operators" for name in names]
    assert "Operator Call Tree" in (machine.work / "out" / "analysis.txt").read_text()


@pytest.mark.parametrize("release, complaint, status, left", [
    ("7.14", "ERROR Looked for roctx in: []\nROCTX not found. --torch-trace requires roctx", "1", "out.failed"),
    ("10.0", "WARNING ROCTX bindings not found in []; skipping torch instrumentation.", "0", "out"),
])  # fmt: skip
def test_operators_without_the_module_that_marks_them(machine, release, complaint, status, left):
    complaint = dict(FAKE_COMPLAINT=complaint, FAKE_STATUS=status)
    run = run_script(machine.with_rocm(release), "--operators", **complaint)
    assert run.code == 1 and machine.results() == [left] and run.err.count("\n") == 1
    assert "this ROCm has no roctx for this Python, which --operators needs: give PYTHON" in run.err
    assert (left == "out") == ("System Speed-of-Light" in run.out) and "Operator Call Tree" not in run.out


@pytest.mark.parametrize("release, chosen", [
    ("7.1", "--set=compute_thruput"), *first_fast(("10.2", "--roofline -b 2"), ("6.4", "-b SQ TCC"), ("7.0", "-b 2")),
])  # fmt: skip
def test_what_was_counted_is_what_is_analyzed(machine, release, chosen):
    run = run_script(machine.with_rocm(release), "--", "--", *chosen.split())
    assert run.code == 0 and chosen in shlex.join(profile_of(run))
    assert not any("-b" in words for words in analyses_of(run)) and len(analyses_of(run)) == 6


@pytest.mark.parametrize("arguments, env, told", [
    (["--operators"], {}, "--operators needs a rocprof-compute with"),
    (["--operators", "--tool", "torch"], {}, "--operators needs rocprof-compute, and this run uses torch"),
    ([], {"RANK": "0", "WORLD_SIZE": "4"}, "one process at a time on a node"),
    (["--", "--", "-d", "else"], {}, "leave out -d of rocprof-compute: this script sets it"),
    (["--", "--run-name", "of mine"], {}, 'rocprof-compute cannot pass on "of mine": no spaces, quotes or ;'),
])  # fmt: skip
def test_what_cannot_be_met_is_refused(machine, arguments, env, told):
    run = run_script(machine.with_rocm("7.0"), *arguments, **env)
    assert run.code == 2 and told in run.err


def test_paths_that_lead_elsewhere(machine):
    """The tool refuses a path with .. in it, and runs in the folder of the result."""
    machine.with_rocm("6.4")
    (machine.work / "bin").symlink_to(machine.bin)
    run = machine.start("get_rocprof_compute.sh", "--output", "../beside", PYTHON="bin/python")
    assert run.code == 0 and not any(".." in word for words in run.commands for word in words)
    assert str(machine.work / "bin" / "python") in run.commands[0]
    assert (machine.folder / "beside" / "analysis.txt").stat().st_size


# --- failures


@pytest.mark.parametrize("complaint, reason", [
    ("ERROR Cannot find a supported arch in rocminfo: gfx1100", "does not support this GPU"),
    ("RuntimeError: No HIP GPUs are available", "two ROCm installations"),
    ("[ERROR] The 'astunparse' package was not found", "requirements.txt"),
    ("[ERROR] The 'astunparse==1.6.2' distribution does not meet version requirements", "requirements.txt"),
])  # fmt: skip
def test_known_complaints_are_explained(machine, complaint, reason):
    run = run_script(machine.with_rocm("6.4"), FAKE_COMPLAINT=complaint)
    assert run.code == 1 and reason in run.err and machine.results() == ["out.failed"]


def test_an_analysis_that_fails_costs_no_counters(machine):
    """7.13 needs its Python packages for the analysis alone."""
    run = run_script(machine.with_rocm("7.13"), FAKE_NO_PACKAGE="pandas")
    assert run.code == 1 and machine.results() == ["out"] and list((machine.work / "out").rglob("results_*.csv"))
    (command,) = re.findall(r"try again: (rocprof-compute analyze -p \S+ --list-stats)", run.err)
    assert "requirements.txt" in run.err and [shlex.split(command)] == analyses_of(run)


# --- the table of kernels

HEADER = ["Kernel_Name", "Count", "Sum(ns)", "Mean(ns)", "Median(ns)", "Pct"]


def write_table(path, header, *rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def listed(folder, capsys, *arguments):
    assert rocprof_compute_kernels.main([str(folder), *arguments]) == 0
    return [line.split("\t") for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("unit", ["ns", "us"])
def test_numbers_are_rows_and_shares_those_of_the_step(tmp_path, capsys, unit):
    header = [column.replace("ns", unit) for column in HEADER]
    weights = "void at::native::distribution_nullary_kernel<float, PhiloxCudaState>(int, long)"
    kernels = ["f<4, 2>(int, float)", 1, 225, 1, 1, 1], ["nan", 2, 75, 1, 1, 1]
    write_table(tmp_path / "pmc_kernel_top.csv", header, [weights, 9, 700, 1, 1, 70], *kernels)
    first, second = listed(tmp_path, capsys)
    assert first == ["1", "f<4, 2>: 75.0% of the time of the kernels, 1 dispatch"]
    assert second == ["2", "nan: 25.0% of the time of the kernels, 2 dispatches"]
    assert listed(tmp_path, capsys, "--top", "1") == [first]


@pytest.mark.parametrize("header, rows, complaint", [
    (["Kernel", "Time"], [["f", 1]], "has no columns Kernel_Name, Count and Sum(): ['Kernel', 'Time']"),
    (HEADER, [], "names no kernel of a step"), (None, [], "does not exist: rocprof-compute analyze -p"),
    (HEADER, [["k", "many", "x", "x", "x", "x"]], "damaged or incomplete (invalid literal for int()"),
])  # fmt: skip
def test_a_table_that_says_nothing(tmp_path, capsys, header, rows, complaint):
    if header:
        write_table(tmp_path / "pmc_kernel_top.csv", header, *rows)
    assert rocprof_compute_kernels.main([str(tmp_path)]) == 1 + ("damaged" in complaint)
    err = capsys.readouterr().err
    assert complaint in err and err.count("\n") == 1


# --- the guide


@pytest.mark.parametrize("release", RELEASES)
def test_the_guide_is_right_for_each_release(machine, type_commands, release):
    machine.with_rocm(release)
    option = re.search(r"`profile` needs `(--\S+ \S+)`", GUIDE)[1] if release in ("7.1", "7.2") else ""
    title, added = "How well a kernel uses the GPU", f" {option}"
    commands = type_commands(title, edit=lambda line: re.sub("(?<=compute profile)", added, line))
    assert len(commands) == 7 and sum("compute profile" in command for command in commands) == 1
