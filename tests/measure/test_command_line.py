"""Programs end in one line or none, and refuse options that are out of range."""

import argparse
import ast
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from measure.command_line import Failure, NothingRecorded, Parser, exit_code_of, positive, program, time_limit
from tiny_llama_v3 import UsageError

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys, time
from measure.command_line import exit_code_of
def run():
    for number in range(100_000):
        print("line", number)
        {then}
sys.exit(exit_code_of(run, "program"))
"""


def start(folder, then="", stdout=subprocess.PIPE):
    """A program that writes many lines, in a Python of its own that finds the project from another folder."""
    command, environment = [sys.executable, "-c", PROGRAM.format(then=then)], os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True)


ERRORS = [
    (Failure("x is 3: give 4"), 2), (NothingRecorded("x is empty"), 1), (UsageError("x is 5: give 6"), 2),
    (PermissionError("x"), 2),
]  # fmt: skip


@pytest.mark.parametrize("error, code", ERRORS)
def test_an_error_ends_a_program_in_one_line(error, code, capsys):
    assert exit_code_of(Mock(side_effect=error), "program") == code
    assert capsys.readouterr().err == f"program: error: {error}\n"
    assert exit_code_of(lambda: 7, "program") == 7


def test_an_error_of_our_own_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        exit_code_of(lambda: 1 // 0, "program")


def test_control_c(tmp_path):
    process = start(tmp_path, then="sys.stdout.flush()\n        time.sleep(60)")
    assert process.stdout.readline() == "line 0\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "") and process.returncode == 130


def test_a_closed_pipe(tmp_path):
    process = start(tmp_path)
    assert process.stdout.readline() == "line 0\n"
    process.stdout.close()
    assert process.wait(timeout=30) == 141 and process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk(tmp_path):
    with open("/dev/full", "w") as full:
        process = start(tmp_path, stdout=full)
        _, error = process.communicate(timeout=30)
    assert process.returncode == 2 and error.count("\n") == 1 and "No space left" in error


def test_a_wrong_command_line_is_one_line(capsys):
    @program("adder")
    def main(argv):
        parser = Parser("adder", "Adds.")
        parser.add_argument("number", type=positive)
        return parser.parse_args(argv).number

    assert main(["7"]) == 7
    assert main(["0"]) == 2
    message = "argument number: 0 is not positive: give 1 or more (--help lists the options)"
    assert capsys.readouterr().err == f"adder: error: {message}\n"


@pytest.mark.parametrize("kind, text", [(positive, "0"), (time_limit, "-1"), (time_limit, "nan")])
def test_options_out_of_range(kind, text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"{text} is not .*: give"):
        kind(text)


def test_options_in_range():
    assert positive("1") == 1 and time_limit("0") == 0.0


@pytest.mark.parametrize("name", ["measure/__init__", "measure/command_line", "profilers/__init__", "profilers/doctor"])
def test_an_old_python_can_import_what_reports_it(name):
    ast.parse((ROOT / f"{name}.py").read_text(), feature_version=(3, 7))
