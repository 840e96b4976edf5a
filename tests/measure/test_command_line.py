"""Programs end in one line or none, and refuse options that are out of range."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import tiny_llama_v3 as llama
from measure import command_line
from measure.command_line import NothingRecorded, Parser, UsageError, exit_code_of, positive, program, time_limit
from tests import ROOT

PROGRAM = """
import sys, time
from measure.command_line import exit_code_of
def run():
    for number in range(100_000):
        print("line", number)
        {then}
sys.exit(exit_code_of(run, "program"))
"""


@pytest.fixture
def start(tmp_path):
    """Start a program that writes many lines, in a Python of its own that finds the project from another folder."""

    def start(then="", stdout=subprocess.PIPE):
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(then=then)],
            stdout=stdout,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
            text=True,
        )

    return start


@pytest.mark.parametrize("error, code", [
    (UsageError("x is 3: give 4"), 2), (NothingRecorded("x is empty"), 1), (llama.UsageError("x is 5: give 6"), 2),
    (PermissionError("x"), 2),
])  # fmt: skip
def test_an_error_ends_a_program_in_one_line(error, code, capsys):
    assert exit_code_of(Mock(side_effect=error), "program") == code
    assert capsys.readouterr().err == f"program: error: {error}\n"


def test_an_error_of_our_own_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        exit_code_of(lambda: 1 // 0, "program")


def test_control_c_and_a_closed_pipe_end_a_program_without_a_word(start):
    with start(then="sys.stdout.flush()\n        time.sleep(60)") as interrupted, start() as unread:
        assert interrupted.stdout.readline() == unread.stdout.readline() == "line 0\n"
        interrupted.send_signal(signal.SIGINT)
        unread.stdout.close()
        assert (interrupted.wait(30), unread.wait(30)) == (130, 141)
        assert interrupted.stderr.read() == unread.stderr.read() == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("then", ["", "break"])
def test_a_full_disk(start, then):
    """Of many lines, or of one that is still to be written at the end."""
    with open("/dev/full", "w") as full, start(then, stdout=full) as process:
        error = process.stderr.read()
    assert process.returncode == 2 and error.count("\n") == 1 and "No space left" in error


def replace(path, text, **options):
    with command_line.replacing(path, **options) as file:
        file.write_text(text)
    return path.read_text()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "file.txt"
    replace(path, "one")
    path.chmod(0o640)
    with pytest.raises(UsageError, match="cannot be written .No space left"), command_line.replacing(path) as file:
        file.write_text("hal")
        raise OSError(28, "No space left on device")
    assert os.listdir(path.parent) == ["file.txt"] and path.read_text() == "one"
    assert replace(path, "two") == "two" and path.stat().st_mode & 0o777 == 0o640


def test_a_link_is_followed_only_if_a_person_named_it(tmp_path):
    path, link = tmp_path / "file.txt", tmp_path / "link"
    link.symlink_to(path)
    path.touch(0o600)
    assert replace(link, "one", follow=True) == path.read_text() == "one" and link.is_symlink()
    assert replace(link, "two") == "two" and path.read_text() == "one" and not link.is_symlink()
    assert link.stat().st_mode & 0o777 != 0o600
    replace(Path(os.devnull), "three", follow=True)
    assert Path(os.devnull).is_char_device()  # no file to be replaced
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe is no file"):
        replace(tmp_path / "pipe", "four")


def test_a_name_that_the_output_cannot_encode(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert exit_code_of(lambda: print("J\xfcrgen", os.fsdecode(b"\xff")), "program") is None
    assert sys.stdout.buffer.getvalue() == b"J\\xfcrgen \\udcff\n"


@pytest.mark.parametrize("kind, text, value", [
    (positive, "1", 1), (positive, "0", None), (positive, "x", None), (time_limit, "0.5", 0.5), (time_limit, "0", 0),
    (time_limit, "-1", None), (time_limit, "nan", None),
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


BY_PATH = {"as_main.py", "host_profile.py", "torch_profile.py"}  # and those of other folders
FOLDERS = ("benchmarks", "examples", "offline", "profilers")
PROGRAMS = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path.name not in BY_PATH]


def test_programs_started_by_their_path_name_the_module(python):
    paths = [path for path in PROGRAMS if "\nif __name__" in path.read_text()]
    assert len(paths) > 15
    for path in paths:
        done = subprocess.run([python, path], capture_output=True, text=True, cwd="/")
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        assert (done.returncode, done.stderr) == (2, f"run it from the root as python -m {module}\n")
