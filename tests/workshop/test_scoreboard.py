"""The scoreboard says who is where, what most are stuck at and why, and leaves nothing out in silence."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from exercises import scoreboard

ROOT = Path(__file__).resolve().parents[2]
KERNEL, LINES = "rmsnorm_kernel", "memory_lines"
MASK = "1 of 256 elements of y are wrong: at (0, 3) it is 0.5, expected 1; is there a mask?"
SAME = "7 of 600 elements of y are wrong: at (1, 77) it is -2.5e-05, expected 3; is there a mask?"
OTHER = "not written yet, FILL ME IN (2 lines)"


def state(passed, attempts=1, message=None):
    at = "2030-01-02T03:04:05" if passed else None
    return {"passed": passed, "attempts": attempts, "passed_at": at, "message": message}


def progress(participant, date="2030-01-02T03:04:05", **tasks):
    return {"participant": participant, "date": date, "exercises": {"exercise1": tasks}}


CLASS = {
    "ada": progress("ada", rmsnorm_kernel=state(True), memory_lines=state(True, 3)),
    "bob": progress("bob", rmsnorm_kernel=state(False, 4, MASK), memory_lines=state(False, 1, OTHER)),
    "cyd": progress("cyd", rmsnorm_kernel=state(False, 2, SAME), memory_lines=state(False, 0)),
    "dan": progress("dan", rmsnorm_kernel=state(False, 6, OTHER)),
}


@pytest.fixture
def folder(tmp_path):
    for name, content in CLASS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "progress.json").write_text(json.dumps(content))
    return tmp_path


def output_of(capsys, *argv, code=0):
    assert scoreboard.main([str(word) for word in argv]) == code
    return capsys.readouterr()


def test_the_table_has_a_mark_for_each_participant_and_task(folder, capsys):
    lines = output_of(capsys, folder).out.splitlines()
    marks = {line.split()[0]: line.split()[1] for line in lines[1:5]}
    assert marks == {"ada": "++", "bob": "xx", "cyd": "x.", "dan": "x."}
    assert f"  exercise1: {KERNEL} (1 of 4); {LINES} (1 of 4)" in lines


def test_the_task_where_most_are_stuck_comes_first_with_the_message_that_most_see(folder, capsys):
    text = output_of(capsys, folder).out.split("Where they are stuck")[1]
    lines = [line.strip() for line in text.splitlines()[1:]]
    assert lines[0] == f"exercise1 {KERNEL}: bob, cyd, dan; median of attempts 4"
    assert lines[1] == f"2 of 3: {MASK}"  # bob's and cyd's differ in numbers only
    assert lines[2] == f"exercise1 {LINES}: bob; median of attempts 1"


def test_the_newest_of_a_participant_s_files_counts(folder, capsys):
    for name, date, passed in (("0new", "2030-01-03T00:00:00", True), ("zold", "2029-01-01T00:00:00", False)):
        (folder / f"{name}.json").write_text(json.dumps(progress("bob", date, rmsnorm_kernel=state(passed))))
    text = output_of(capsys, folder).out
    assert re.search("^bob +[+][.]", text, flags=re.M)
    assert "3 files of bob: the newest counts." in text and "files of ada" not in text
    for name in ("ada", "bob"):  # in containers, whose user is root
        (folder / name / "mine.json").write_text(json.dumps(progress("root", rmsnorm_kernel=state(True))))
    text = output_of(capsys, folder).out
    assert "root (ada/mine.json)  +" in text and "root (bob/mine.json)  +" in text and "files of root" not in text


def timed(us, device="Some GPU"):
    return state(True) | {"us": us, "device": device}


def test_the_fastest_kernel_on_each_device_is_named_with_its_owner(folder, capsys):
    assert "fastest" not in output_of(capsys, folder).out  # nothing was timed
    times = {"ada": timed(70.0), "bob": timed(60.0), "cyd": timed(800.0, "Laptop GPU"), "dan": timed(-1.0),
             "eve": timed(float("nan")), "fay": timed(1.0) | {"passed": False}}  # fmt: skip
    for name, own in times.items():
        (folder / f"{name}.json").write_text(json.dumps(progress(name, "2031-01-01T00:00:00", rmsnorm_kernel=own)))
    text = output_of(capsys, folder).out
    assert f"{KERNEL}: 60.0 us, bob (Some GPU)" in text and f"{KERNEL}: 800.0 us, cyd (Laptop GPU)" in text
    assert text.count(" us, ") == 2


def test_broken_files_are_named_and_the_others_shown(folder, capsys):
    broken = {
        "cut.json": '{"participant": "eve", "exerc', "foreign.json": "[1, 2]",
        "half.json": json.dumps({"participant": "eve", "exercises": {"exercise1": {KERNEL: True}}}),
        "bytes.json": b"\xff\xfe", "deep.json": "[" * 100_000,
    }  # fmt: skip
    wrong = [*map(progress, ("x " * 5_000_000, 7, "eve\n", "")), progress("eve", **{"x" * 101: state(True)}),
             progress("eve", memory_lines=state(False, 10**400)), progress("eve", memory_lines=timed("1")),
             progress("eve", memory_lines=timed(1.0, ["a", "GPU"]))]  # fmt: skip
    broken |= {f"wrong{number}.json": json.dumps(content) for number, content in enumerate(wrong)}
    for name, content in broken.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    captured = output_of(capsys, folder, code=1)
    assert len(re.findall("^(ada|bob|cyd|dan) ", captured.out, flags=re.M)) == 4 and "eve" not in captured.out
    named = [line for line in captured.err.splitlines() if line.startswith("left out: ")]
    assert len(named) == len(broken) and all(any(name in line for line in named) for name in broken)


def test_no_participant_writes_to_the_terminal(folder, capsys, monkeypatch):
    """Escape sequences in a file, or in its name, arrive as text."""
    escape = "\x1b]52;c;cm0gLXJm\x07\x9b2J\u202e"
    evil = progress("eve", rmsnorm_kernel=timed(1.0, escape), memory_lines=state(False, 1, escape))
    (folder / "evil.json").write_text(json.dumps(evil))
    (folder / f"{escape}.json").write_text("{}")
    shown = output_of(capsys, folder, code=1)
    (folder / "empty").mkdir()
    (folder / "empty" / f"{escape}.json").write_text("{}")
    refused = output_of(capsys, folder / "empty", code=2)
    monkeypatch.setattr(scoreboard.time, "sleep", Mock(side_effect=KeyboardInterrupt))
    watched = output_of(capsys, folder / "empty", "--watch", "1", code=130).out.removeprefix("\x1b[2J\x1b[H")
    for text in (shown.out, shown.err, refused.err, watched):
        assert all(character.isprintable() or character == "\n" for character in text)
        assert "\\x1b]52;c;cm0gLXJm\\x07\\x9b2J\\u202e" in text.replace("\n", "")


def test_lines_fit_a_terminal(folder, capsys):
    (folder / "long.json").write_text(json.dumps(progress("fay", bytes_moved=state(False, 1, "many words " * 30))))
    text = output_of(capsys, folder).out
    assert max(map(len, text.splitlines())) <= scoreboard.WIDTH and len(re.findall(r"many\s+words", text)) == 30


def test_the_page_says_the_same_and_no_participant_writes_html(folder, capsys, tmp_path, monkeypatch):
    page = tmp_path / "board.html"
    (folder / "evil.json").write_text(json.dumps(progress("<b>eve</b>", bytes_moved=state(False, 1, "<script>\ud800"))))
    output_of(capsys, folder, "--html", page)
    text = page.read_text()
    assert "<b>" not in text and "<script" not in text and "&lt;script&gt;" in text
    assert text.count('class="passed"') == 2 and text.count('class="tried"') == 5
    assert "http" not in text.replace("http-equiv", "") and "refresh" not in text
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    error = output_of(capsys, folder, "--html", page, code=2).err
    assert f"{page} cannot be written (No space left on device)" in error and error.count("\n") == 1
    assert page.read_text() == text and not list(folder.glob(".*"))


def test_the_locale_does_not_matter(tmp_path):
    content = json.dumps(progress("J\xfcrgen", memory_lines=state(True)), ensure_ascii=False)
    (tmp_path / "J\xfcrgen.json").write_text(content, encoding="utf-8")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "exercises.scoreboard", ".", "--html", "page.html"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | plain, capture_output=True, text=True)
    assert done.returncode == 0 and "J\\xfcrgen" in done.stdout, done.stderr
    assert "J\xfcrgen" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_watching_shows_what_has_changed(folder, capsys, monkeypatch):
    page = folder / "board.html"

    def passes_meanwhile(seconds):
        if (folder / "gil.json").exists():
            raise KeyboardInterrupt
        (folder / "gil.json").write_text(json.dumps(progress("gil", rmsnorm_kernel=state(True))))

    monkeypatch.setattr(scoreboard.time, "sleep", passes_meanwhile)
    text = output_of(capsys, folder, "--watch", "20", "--html", page, code=130).out
    assert len(re.findall("^gil ", text, flags=re.M)) == 1 and len(re.findall("^ada ", text, flags=re.M)) == 2
    assert '<meta http-equiv="refresh" content="20">' in page.read_text()


@pytest.mark.parametrize("argument", ["empty", "nowhere", *map("--watch={}".format, ("inf", "nan", "-1", "1e18"))])
def test_what_cannot_be_shown_is_one_line(tmp_path, monkeypatch, capsys, argument):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    error = output_of(capsys, argument, "empty", code=2).err
    assert error.count("\n") == 1 and argument.replace("=", ": ") in error
