"""The first run on an AMD GPU: its parts against fakes, its archive, and the command lines of what has no fake."""

import re
import shlex
import signal
import subprocess
import tarfile

import pytest

import tiny_llama_v3 as llama
from benchmarks import kernels, steps
from exercises.performance_debugging import replay
from tests.fakes.machine import ROOT, executable, first_fast

SCRIPT = "site/first_run_on_amd.sh"
RECORDINGS = ["trace", "hotspots", "counters", "rocprof_compute", "rocprof_sys"]
PARTS = ["doctor", "tests", "same_bits", "check_fp32", "check_bf16", "stages", "kernels", "steps", *RECORDINGS]
# What needs PyTorch shows its environment, which recordings may hold. A time limit of minutes becomes one of a second.
FAKES = {
    "first": """#!/bin/sh
case "$*" in
*profilers.doctor*) part=doctor ;; *same_bits.py) part=bits ;; *" pytest "*) part=tests ;; *.replay*) part=stages ;;
*benchmarks.kernels*) part=kernels ;; *benchmarks.steps*) part=steps ;;
*) exec {python} "$@" ;;
esac
env
case $part in {behaviour} ;; esac
""",
    "timeout": """#!/bin/bash
[[ "$*" != *"kernels --output"* ]] || set -- -k 1 1 "${{@:4}}"
exec /usr/bin/timeout "$@"
""",
}


def without_pytorch(machine, behaviour="nothing)"):
    python = machine.env["PYTHON"]
    for name, text in FAKES.items():
        executable(machine.bin / name, text.format(behaviour=behaviour, python=python))
    machine.env["PYTHON"] = str(machine.bin / "first")
    return machine


@pytest.mark.parametrize("release, breaks", first_fast(("7.1", True), ("6.4", False)))
def test_each_part_has_a_log_and_a_row(machine, release, breaks):
    without_pytorch(machine.with_rocm(release), "kernels) sleep 50 ;; tests) exit 3" if breaks else "nothing)")
    expected = dict.fromkeys(PARTS, "passed")
    if breaks:
        (machine.folder / "rocm" / "bin" / "rocprofv3").unlink()
        expected |= dict.fromkeys(RECORDINGS[:3], "failed (2)") | {"tests": "failed (3)", "kernels": "timed out"}
    secrets = dict.fromkeys(("MY_TOKEN", "API_KEY", "HUB_TOKEN", "PASSWORD", "TOKEN", "LOGIN"), "secret")
    run = machine.start(SCRIPT, "--", "--hidden-dim", "64", **secrets)
    rows = re.findall(r"^(\w+) +(passed|failed \(\d+\)|timed out) +\d+ s  (/.*)$", run.out, re.M)
    assert {part: result for part, result, _ in rows} == expected and run.code == breaks, run.err
    folder, name = re.search(r"\nSend this file: (.*)/(first_run_[\w.-]+_\d{8}_\d{6})\.tar\.gz\n\Z", run.out).groups()
    assert folder == str(machine.work) and all(log == f"{folder}/{name}/{part}.log" for part, _, log in rows)
    with tarfile.open(f"{folder}/{name}.tar.gz") as tar:
        packed = {member.name.partition("/")[2]: tar.extractfile(member).read() for member in tar if member.isfile()}
    assert {*(f"{part}.log" for part in PARTS), "summary.txt"} <= set(packed)
    assert {f"{part}/log.txt" for part in RECORDINGS if expected[part] == "passed"} <= set(packed)
    assert b"--hidden-dim 64" in packed["hotspots.log"] and b"\nPATH=" in packed["steps.log"]
    assert not any(b"secret" in content for content in packed.values())


def test_what_the_doctor_knows_of_the_stack_stands_in_the_summary(machine):
    lines = ["WARN  stack      Triton 3.8 on gfx950: it is bad", f"{'':17}another tile"]
    said = " ".join(map(shlex.quote, ["OK    gpu        0", *lines, "OK    access     all"]))
    run = without_pytorch(machine.with_rocm("7.1"), f"doctor) printf '%s\\n' {said}").start(SCRIPT)
    (summary,) = machine.work.glob("first_run_*/summary.txt")
    for text in (run.out, summary.read_text()):
        assert "\n\n" + "\n".join(lines) + "\n\n" in text and "access" not in text


def test_a_dry_run_prints_commands_that_the_programs_accept(machine):
    others = dict.fromkeys(("NAME", "RESULT", "ROOT", "ARGUMENTS", "DRY_RUN"), "/of/somebody/else")
    options = ["--hidden-dim", "64", "--data", "a text of mine"]
    run = machine.start(SCRIPT, "--dry-run", "--", *options, **others)
    change, *commands = map(shlex.split, run.out.splitlines())
    assert run.code == 0 and change == ["cd", str(ROOT)] and len(commands) == len(PARTS)
    programs = {words[1 + (words[1] == "-m")]: words for words in commands if words[0] == machine.env["PYTHON"]}
    assert len(programs) == 5 and not list(machine.work.iterdir()) and (ROOT / programs["pytest"][-1]).is_file()
    assert kernels.parse(programs["benchmarks.kernels"][3:]) and replay.parse(programs[replay.__name__][3:])
    assert list(steps.sizes_of(steps.parse(programs["benchmarks.steps"][3:]), on_gpu=True)) == ["small", "medium"]
    config = llama.parse_config(programs["tiny_llama_v3.py"][2:], "")
    assert config.check and (config.hidden_dim, config.data) == (64, "a text of mine")
    assert [words[words.index("--") + 1 :] for words in commands if "--" in words] == 6 * [options]


@pytest.mark.parametrize("lacks, arguments, words", [
    ("kfd", [], "there is no AMD GPU, or no permission on .*/kfd"), ("torch", [], "is built for cpu.*docs/rocm.md"),
    ("nothing", ["--no-such"], "unknown option --no-such.*--help"),
])  # fmt: skip
def test_what_cannot_be_met_is_one_line(machine, lacks, arguments, words):
    machine.with_rocm("7.1")
    if lacks == "kfd":
        (machine.folder / "kfd").unlink()
    elif lacks == "torch":
        machine.with_torch()
    run = machine.start(SCRIPT, *arguments)
    assert run.code == 2 and run.err.count("\n") == 1 and re.search(words, run.err)
    assert run.out == "" and not list(machine.work.iterdir())


def test_ctrl_c_ends_the_part_and_the_others(interruptible_machine):
    machine = without_pytorch(interruptible_machine.with_rocm("7.1"), "doctor) exec sleep 50")
    process = subprocess.Popen([ROOT / SCRIPT], cwd=machine.work, env=machine.env, stdout=-1, stderr=-1, text=True)
    assert process.stdout.readline().startswith("--- doctor")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130 and "interrupted" in err and out == ""
