"""Programs end in one line or none, and refuse options that are out of range."""

import ast
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from measure import command_line
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


@pytest.mark.parametrize("error, code", [
    (Failure("x is 3: give 4"), 2), (NothingRecorded("x is empty"), 1), (UsageError("x is 5: give 6"), 2),
    (PermissionError("x"), 2),
])  # fmt: skip
def test_an_error_ends_a_program_in_one_line(error, code, capsys):
    assert exit_code_of(Mock(side_effect=error), "program") == code
    assert capsys.readouterr().err == f"program: error: {error}\n"


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


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path, link = tmp_path / "new" / "file.txt", tmp_path / "link"
    link.symlink_to(path)
    for text in ("one", "two"):
        with command_line.replacing(link, follow=True) as file:
            file.write_text(text)
        path.chmod(0o640)
    reason = r"file.txt cannot be written \(No space left on device\): free space or give another path$"
    with pytest.raises(Failure, match=reason), command_line.replacing(path) as file:
        file.write_text("hal")
        raise OSError(28, "No space left on device")
    assert [p.name for p in path.parent.iterdir()] == ["file.txt"] and path.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink() and link.read_text() == "two"
    with command_line.replacing(link) as file:
        file.write_text("three")
    assert not link.is_symlink() and (link.read_text(), path.read_text()) == ("three", "two")
    assert link.stat().st_mode & 0o777 != 0o640
    link.unlink()
    link.symlink_to(os.devnull)
    with command_line.replacing(link) as file:
        file.write_text("four")
    assert not link.is_symlink() and link.read_text() == "four"
    with command_line.replacing(Path(os.devnull), follow=True) as file:  # is no file to be replaced
        assert file == Path(os.devnull)


def test_a_name_that_the_output_cannot_encode(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert exit_code_of(lambda: print("J\xfcrgen", os.fsdecode(b"\xff")), "program") is None
    assert sys.stdout.buffer.getvalue() == b"J\\xfcrgen \\udcff\n"


@pytest.mark.parametrize("kind, text, value", [
    (positive, "7", 7), (positive, "1", 1), (positive, "0", None), (positive, "x", None), (time_limit, "0.5", 0.5),
    (time_limit, "0", 0.0), (time_limit, "-1", None), (time_limit, "nan", None),
])  # fmt: skip
def test_an_option_out_of_range_is_one_line(capsys, kind, text, value):
    @program("adder")
    def main(argv):
        parser = Parser("adder", "Adds.")
        parser.add_argument("--number", type=kind)
        return parser.parse_args(argv).number

    assert main([f"--number={text}"]) == (2 if value is None else value)
    error = capsys.readouterr().err
    assert (error.startswith("adder: error: argument --number: ") and error.count("\n") == 1) == (value is None)


@pytest.mark.parametrize("name", ["measure/__init__", "measure/command_line", "profilers/__init__", "profilers/doctor"])
def test_an_old_python_can_import_what_reports_it(name):
    ast.parse((ROOT / f"{name}.py").read_text(), feature_version=(3, 7))


def test_programs_started_by_their_path_name_the_module(python):
    """Except for those that are meant to be."""
    folders, by_path = ("benchmarks", "offline", "profilers"), {"host_profile.py"}
    programs = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path.name not in by_path]
    programs = [path for path in programs if "\nif __name__" in path.read_text()]
    for path in programs:
        done = subprocess.run([python, path], capture_output=True, text=True, cwd="/")
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        assert (done.returncode, done.stderr) == (2, f"run it from the root as python -m {module}\n")
    assert len(programs) > 15
