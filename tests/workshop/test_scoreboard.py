"""The scoreboard says who is where, what most are stuck at and why, and leaves nothing out in silence."""

import json
import os
import re

import pytest

from exercises import progress_file, scoreboard

KERNEL, LINES = "rmsnorm_kernel", "memory_lines"
MASK = "1 of 256 elements of y are wrong: at (0, 3) it is 0.5, expected 1; is there a mask?"
SAME = "7 of 600 elements of y are wrong: at (1, 77) it is -2.5e-05, expected 3; is there a mask?"
OTHER = "not written yet, FILL ME IN (2 lines)"


def state(passed, attempts=1, message=None):
    return {"passed": passed, "attempts": attempts, "message": message}


def progress(participant, date="2030-01-02T03:04:05", **tasks):
    return {"participant": participant, "date": date, "exercises": {"exercise1": tasks}}


CLASS = {
    "ada": progress("ada", rmsnorm_kernel=state(True), memory_lines=state(True, 3)),
    "bob": progress("bob", rmsnorm_kernel=state(False, 4, MASK), memory_lines=state(False, 1, OTHER)),
    "cyd": progress("cyd", rmsnorm_kernel=state(False, 2, SAME), memory_lines=state(False, 0)),
    "dan": progress("dan", rmsnorm_kernel=state(False, 9, OTHER)),
}


@pytest.fixture
def board(tmp_path, capsys):
    """board(files, options) shows the class with more files, {name: content}, and returns what was printed."""

    def shown(files=(), *options, code=0):
        for name, content in {**CLASS, **dict(files)}.items():
            content = content if isinstance(content, str | bytes) else json.dumps(content)
            path = tmp_path / f"{name}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        assert scoreboard.main([str(tmp_path), *map(str, options)]) == code
        return capsys.readouterr()

    return shown


def test_the_table_has_a_mark_for_each_task_and_what_most_are_stuck_at_comes_first(board):
    table, stuck = board().out.split("Where they are stuck, most first:\n")
    header, *lines = table.splitlines()
    assert header.split() == ["participant", *(exercise for exercise, _ in progress_file.WAY)]
    exercise1 = {line.split()[0]: line.split()[3] for line in lines[:4]}
    assert exercise1 == {"ada": "+.+", "bob": "x.x", "cyd": "..x", "dan": "..x"}
    assert f"  exercise1: {LINES} (1 of 4); bytes_moved (0 of 4); {KERNEL} (1 of 4)" in lines
    assert [line.strip() for line in stuck.splitlines()] == [
        f"exercise1 {KERNEL}: bob, cyd, dan; median of attempts 4",
        f"2 of 3: {MASK}",  # bob's and cyd's differ in numbers only
        f"exercise1 {LINES}: bob; median of attempts 1",
        f"1 of 1: {OTHER}",
    ]


def test_the_newest_of_a_participant_s_files_counts(board):
    passed, failed = ({"rmsnorm_kernel": state(passes)} for passes in (True, False))
    files = {"0new": progress("bob", "2030-01-03", **passed), "zold": progress("bob", "2029-01-01", **failed)}
    text = board(files).out
    assert re.search("^bob .* [.][.][+] ", text, flags=re.M)
    assert "3 files of bob: the newest counts." in text and "files of ada" not in text
    text = board({f"{name}/mine": progress("root", **passed) for name in "ab"}).out  # in containers, whose user is root
    assert len(re.findall("^root .*/[ab]/mine[.]json[)] .* [.][.][+] ", text, flags=re.M)) == 2
    assert "files of root" not in text


def mode_of(path):
    return path.stat().st_mode & 0o777


def test_a_file_in_the_class_s_folder_stays_as_readable_as_the_first_check_made_it(tmp_path):
    """The trainer's page has the first check under a umask of 022, and closed homes have one of 077 later."""
    (home := tmp_path / "home").mkdir()
    (folder := tmp_path / "class").mkdir()
    (home / "progress.json").symlink_to(folder / "ada.json")
    before = os.umask(0o022)
    try:
        for attempt in range(1, 3):
            progress_file.Progress(home / "progress.json", "ada").record("exercise1", LINES, False, OTHER)
            os.umask(0o077)
            (written,) = folder.iterdir()
            assert written.name == "ada.json" and mode_of(written) == 0o644
            assert progress_file.read(written)["exercises"]["exercise1"][LINES]["attempts"] == attempt
        progress_file.Progress(folder / "bob.json", "bob").record("exercise1", LINES, False, OTHER)
        assert mode_of(folder / "bob.json") == 0o600
    finally:
        os.umask(before)
    assert (home / "progress.json").is_symlink()


BROKEN = [
    '{"participant": "eve", "exerc',
    "[1, 2]",
    b"\xff\xfe",
    "[" * 100_000,
    {"participant": "eve", "exercises": {"exercise1": {}}},
    json.dumps(progress("eve", memory_lines=state(True))) + " " * 2**20,
    {"participant": "eve", "date": "", "exercises": {"exercise1": {KERNEL: True}}},
    *(progress(name, memory_lines=state(True)) for name in ("x" * 101, 7, "eve\n")),
    *(progress("eve", memory_lines=one) for one in (state(1), state(True, "1"), state(True, message=["a"]))),
]


def test_broken_files_are_named_and_the_others_shown(board, tmp_path):
    files = {f"broken{number}": content for number, content in enumerate(BROKEN)}
    os.mkfifo(tmp_path / "fifo.json")
    captured = board(files, code=1)
    assert len(re.findall("^(ada|bob|cyd|dan) ", captured.out, flags=re.M)) == 4 and "eve" not in captured.out
    assert re.findall(r"^left out: \S+/(\w+)\.json: .", captured.err, flags=re.M) == sorted([*files, "fifo"])


def test_no_participant_writes_to_the_terminal_or_the_page(board, tmp_path):
    """Escape sequences in a file, or in its name, arrive as text, and so does HTML."""
    escape = "\x1b]52;c;cm0gLXJm\x07\x9b2J\u202e"
    evil = progress("<b>eve</b>", memory_lines=state(False, 1, f"{escape}<script>\ud800"))
    page = tmp_path / "board.html"
    shown = board({"evil": evil, escape: "{}"}, "--html", page, code=1)
    for text in (shown.out, shown.err):
        assert all(character.isprintable() or character == "\n" for character in text)
        assert "\\x1b]52;c;cm0gLXJm\\x07\\x9b2J\\u202e" in text
    text = page.read_text()
    assert "<b>eve" not in text and text.count("<script") == 1 and "&lt;script&gt;" in text
    assert "http" not in text and "left out" not in text


def test_the_page_has_a_letter_for_each_task_of_the_workshop_in_its_order(board, tmp_path):
    """Also for those that nobody has tried, and after them what only another version has."""
    old = progress("eve", old_task=state(True))
    page = tmp_path / "board.html"
    board({"eve": old}, "--html", page)
    text = page.read_text()
    tasks = [task for _, tasks in progress_file.WAY for task in tasks]
    assert re.findall('<th scope="col"[^>]*>(.*?)</th>', text) == [*tasks, "old_task"]
    rows = re.findall('<tr><th scope="row">(.*?)</th>(.*?)</tr>', text)
    marks = {who: re.findall("<td[^>]*>(.*?)</td>", row) for who, row in rows}
    assert {len(row) for row in marks.values()} == {len(tasks) + 1}
    kernel = tasks.index(KERNEL)
    assert [row[kernel] for row in marks.values()] == ["1", "P", "T", "T", "T", ""]
    assert set(marks["bob"]) == {"T", ""} and marks["eve"][-1] == "P"


def test_what_cannot_be_shown_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    for arguments in (["empty"], ["nowhere", "empty"]):
        assert scoreboard.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and arguments[0] in error


def test_the_class_is_shown_before_and_after_and_no_answer_is_given_away(board):
    def tests(name, **passed):
        states = {
            test: {f"T{right}": state(right, 1, "it is a race") for right in each} for test, each in passed.items()
        }
        return progress(name) | {"exercises": states}

    files = {
        "eve": tests("eve", before=[False, True], examination=[True]),
        "fay": tests("fay", before=[False], examination=[True]),
    }
    text = board(files).out
    assert (
        "\nbefore: 0.5 right on average, of 2 participants\nexamination: 1.0 right on average, of 2 participants\n"
        in text
    )
    assert "it is a race" not in text


def test_one_participant_is_singular(tmp_path, capsys):
    one, page = tmp_path / "eve.json", tmp_path / "board.html"
    one.write_text(json.dumps(progress("eve") | {"exercises": {"before": {"A": state(True, 1, None)}}}))
    assert scoreboard.main([str(one), "--html", str(page)]) == 0
    assert "\nbefore: 1.0 right on average, of 1 participant\n" in capsys.readouterr().out
    assert "not tried; 1 participant. The" in page.read_text()
