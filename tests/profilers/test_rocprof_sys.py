"""get_rocprof_sys.sh against a fake of rocprof-sys-sample of ROCm 6.4 to 10.1."""

import re
import signal

import pytest

from tests.fakes.machine import first_fast

RELEASES = first_fast("10.1", "6.4", "7.0", "7.1", "7.2", "7.14", "10.0")
TRACE = "perfetto-trace-*.p*"  # .proto, and .pftrace from 10.1 on


def run_script(machine, *arguments, **env):
    return machine.run("get_rocprof_sys.sh", "--output", "out", *arguments, **env)


def files(machine, pattern):
    return [path for path in machine.work.rglob(pattern) if path.stat().st_size]


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_records_all_that_it_can(machine, release):
    """Samples, a trace, clocks and power; and the functions of Python by a second run."""
    machine.with_rocm(release)
    arguments = ["--stage", "4", "--", "--seq-len", "64", "--", "-f", "1000"]
    dry, run = run_script(machine, "--dry-run", *arguments), run_script(machine, *arguments)
    assert run.code == 0 and run.err == "" and dry.commands == run.commands and len(run.commands) == 2
    for pattern in (TRACE, "sampling_percent*", "sampling_gpu_power*", "wall_clock*", "host_profile.pstats"):
        assert len(files(machine, pattern)) == 1
    assert f"-m pstats {machine.work}/out/host_profile.pstats" in run.out


@pytest.mark.parametrize("release", [None, "10.1"])
def test_a_second_run_that_fails_costs_no_trace(machine, release):
    if release:
        machine.with_rocm(release)
    run = run_script(machine, HOST_PROFILE_STATUS="3")
    assert run.code == 1 and machine.results() == ["out"]
    reason = "the time of each Python function (tiny_llama_v3.py in cProfile ended with status 3); try again: env"
    assert f"Missing: {reason}" in run.out and reason in run.err
    assert files(machine, TRACE if release else "trace.json") and "-m pstats" not in run.out


def test_a_format_that_is_asked_for_is_the_only_one(machine):
    run = run_script(machine.with_rocm("10.1"), "--", "--", "--output-format", "rocpd")
    assert run.code == 0 and files(machine, "rocpd-*.db") and not files(machine, TRACE)
    assert run.commands[0].count("--output-format") == 1
    assert re.search(r"^Make a trace for Perfetto of it: rocpd convert -i \S+/rocpd-10470.db ", run.out, re.M)


def test_the_host_is_profiled_whatever_becomes_of_the_trace(machine):
    run = run_script(machine.with_rocm("7.2"), FAKE_COMPLAINT="Unrecognized command line option '-x'")
    assert run.code == 1 and machine.results() == ["out"] and files(machine, "host_profile.pstats")
    assert "Missing: the timeline (rocprof-sys of this release has no such option" in run.out
    assert "ui.perfetto.dev" not in run.out and "-m pstats" in run.out


@pytest.mark.parametrize("setting, told", [({}, True), ({"ROCPROFSYS_ENABLE_SIGNAL_HANDLER": "ON"}, False)])
def test_control_c_reaches_the_program(interruptible_machine, setting, told):
    """Unless the tool is asked to handle signals itself: then it writes its trace in a crash, below memory maps."""
    machine = interruptible_machine.with_rocm("7.0")
    code, out, _ = machine.interrupt("get_rocprof_sys.sh", signal.SIGINT, **setting)
    assert code == 130 and machine.results() == ["out.failed"]
    assert ("Interrupted after 2 of 10 steps" in out) == told and ("### ERROR ###" in out) != told


@pytest.mark.parametrize("release", RELEASES)
def test_the_guide_is_right_for_each_release(machine, type_commands, release):
    machine.with_rocm(release)
    assert len(type_commands("The host")) == 2
    assert len(files(machine, TRACE)) == 2
