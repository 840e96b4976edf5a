"""The programs of profiling/ start as modules anywhere, and end in one line or none."""

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from profiling import hotspots
from profiling.command_line import Failure, NothingRecorded, exit_code_of

ROOT = Path(hotspots.__file__).resolve().parents[1]
WAITS = """
import sys, time
from profiling.command_line import exit_code_of
def run():
    print("ready", flush=True)
    time.sleep(60)
sys.exit(exit_code_of(run, "program"))
"""
WRITES = """
import sys
from profiling.command_line import exit_code_of
def run():
    for number in range(100_000):
        print("line", number)
    return 0
sys.exit(exit_code_of(run, "program"))
"""


def start(*words, **options):
    """A Python of its own that finds the project, in another folder."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) | options
    return subprocess.Popen([sys.executable, *words], env=environment, **pipes)


@pytest.mark.parametrize(
    "error, code", [(Failure("x is 3: give 4"), 2), (NothingRecorded("x is empty"), 1), (PermissionError("x"), 2)]
)
def test_what_ends_a_program_is_told_in_one_line(error, code, capsys):
    def run():
        raise error

    assert exit_code_of(run, "program") == code
    assert capsys.readouterr().err == f"program: error: {error}\n"
    assert exit_code_of(lambda: 7, "program") == 7


def test_an_error_of_our_own_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        exit_code_of(lambda: 1 // 0, "program")


def test_control_c(tmp_path):
    process = start("-c", WAITS, cwd=tmp_path)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "") and process.returncode == 130


def test_a_closed_pipe(tmp_path):
    process = start("-c", WRITES, cwd=tmp_path)
    assert process.stdout.readline() == "line 0\n"
    process.stdout.close()
    assert process.wait(timeout=30) == 141 and process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk(tmp_path):
    with open("/dev/full", "w") as full:
        process = start("-c", WRITES, cwd=tmp_path, stdout=full)
        _, error = process.communicate(timeout=30)
    assert process.returncode == 2 and error.count("\n") == 1 and "No space left" in error


def test_a_table_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    trace = tmp_path / "k_kernel_trace.csv"
    trace.write_text("Kernel_Name,Start_Timestamp,End_Timestamp\nk,1,2\n")
    assert hotspots.main([str(trace), "--csv", str(tmp_path / "absent" / "table.csv")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_program_under_the_host_profile_is_on_its_own(tmp_path):
    """It has its arguments, its folder on the path, and its exit code, as if it had been started itself."""
    (tmp_path / "beside.py").write_text("WORD = 'found'\n")
    (tmp_path / "program.py").write_text("import sys, beside\nprint(beside.WORD, *sys.argv[1:])\nsys.exit(5)\n")
    words = ["-m", "profiling.host_profile", "out.pstats", str(tmp_path / "program.py"), "--flag", "1"]
    (tmp_path / "elsewhere").mkdir()
    process = start(*words, cwd=tmp_path / "elsewhere")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 5 and "found --flag 1\n" in out and "tottime" in out
    assert (tmp_path / "elsewhere" / "out.pstats").stat().st_size


@pytest.mark.parametrize("name", ["__init__.py", "command_line.py", "doctor.py"])
def test_an_old_python_understands_what_tells_that_it_is_old(name):
    ast.parse((ROOT / "profiling" / name).read_text(), feature_version=(3, 7))
