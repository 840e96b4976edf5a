"""The slides are made from the pages: each stage is there, every slide fits, no picture is missing."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import tiny_llama_v3 as llama
from exercises import slides

ROOT = Path(__file__).resolve().parents[2]


def slides_of(text):
    """{title: text} of a deck."""
    return {re.match("# (.*)", part)[1]: part for part in text.removeprefix(slides.STYLE).split("\n\n---\n\n")}


@pytest.fixture(scope="module")
def deck(tmp_path_factory):
    path = tmp_path_factory.mktemp("build") / "slides.md"
    assert slides.main(["--output", str(path)]) == 0
    return path


@pytest.fixture
def changed(monkeypatch):
    """changed(page, old, new): from now on the page reads otherwise."""
    pages, read = {}, slides.read

    def change(page, old, new):
        assert old in read(page)
        pages[page] = read(page).replace(old, new)

    monkeypatch.setattr(slides, "read", lambda page: pages.get(page) or read(page))
    return change


def refused(tmp_path, capsys):
    """The error of a deck that cannot be made: one line, and nothing is written."""
    assert slides.main(["--output", str(tmp_path / "slides.md")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and not list(tmp_path.iterdir())
    return error


def test_every_stage_has_its_sign_its_question_its_evidence_and_its_fix(deck):
    shown = slides_of(deck.read_text())
    for number in llama.STAGES:
        question, evidence, answer = (text for title, text in shown.items() if title.startswith(f"Stage {number}: "))
        mends = number not in (5, 8)  # which show what is right
        assert ("**Symptom.**" if mends else "**What to see.**") in question and "**Predict.**" in question
        assert "```sh\n" in evidence and ("**Fix.**" in answer) == mends
        assert len(answer.splitlines()) > 2


def test_commands_are_those_of_the_page(deck):
    commands = re.findall(r"```sh\n(.*?)```", deck.read_text(), flags=re.S)
    assert len(commands) == len(llama.STAGES)
    page = (ROOT / slides.STAGES).read_text()
    for block in commands:
        folded = [line for line in block.splitlines() if not line.startswith("#")]  # Marp makes a long comment smaller
        assert max(map(len, folded)) <= slides.CODE_COLUMNS
        assert re.sub(r" \\\n +", " ", block) in page, block


def test_every_exercise_and_picture_is_there(deck):
    text = deck.read_text()
    assert len(re.findall(r"^# Exercise \d", text, flags=re.M)) == len(slides.EXERCISES)
    pictures = re.findall(r"!\[.+?\]\((.*?)\)", text)
    trainer = (ROOT / slides.TRAINER).read_text()
    assert len(pictures) == trainer.count("![") == 3
    assert all((deck.parent / picture).resolve().is_file() for picture in pictures)
    assert "](" not in re.sub(r"!\[.*?\]\(.*?\)", "", text)  # no link that leads nowhere from build/


def test_every_slide_fits(deck):
    counted = {title: slides.lines_of(text) for title, text in slides_of(deck.read_text()).items()}
    assert len(counted) > 30 and max(counted.values()) <= slides.LINES and min(counted.values()) >= 1


def test_a_text_that_does_not_fit_is_refused_by_the_slide_s_name(changed, tmp_path, capsys):
    changed(slides.STAGES, "**Symptom.** The average is slow", f"**Symptom.** {'The average is slow. ' * 60}")
    assert "'Stage 7: cold start'" in refused(tmp_path, capsys)


@pytest.mark.parametrize("page, old, new", [
    (slides.STAGES, "**Predict.** Which kernel?", "Which kernel?"),
    (slides.STAGES, "## What the eight have in common", "## What they share"),
    (slides.TRAINER, "trace_stage5.png", "trace_of_stage5.png"),
    (slides.TRAINER, "trace_stage8.png", "../docs/nowhere/trace_stage8.png"),
], ids=["a question", "a heading", "a picture", "a picture elsewhere"])  # fmt: skip
def test_what_a_page_lacks_is_named(changed, tmp_path, capsys, page, old, new):
    changed(page, old, new)
    assert page in refused(tmp_path, capsys)


# --- make slides, in a folder of its own, with a python that does nothing


@pytest.fixture
def make(tmp_path):
    """make(npx) runs `make slides` with what npx does, or without one."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    commands, python = tmp_path / "bin", tmp_path / ".venv" / "bin" / "python"
    for path in (commands / "python3", python):
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\necho True\n")
        path.chmod(0o755)

    def run(npx):
        if npx:
            (commands / "npx").write_text(f"#!/bin/sh\n{npx}\n")
            (commands / "npx").chmod(0o755)
        command = [shutil.which("make"), "-o", ".venv/run.stamp", "slides"]
        return subprocess.run(command, cwd=tmp_path, env={"PATH": str(commands)}, capture_output=True, text=True)

    return run


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make")
def test_make_asks_marp_for_both_files_and_says_what_is_missing_without_node(make):
    done = make(None)
    assert done.returncode != 0 and "make slides: there is no npx: install node" in done.stderr
    done = make('echo "npx got $*"')
    called = re.findall("^npx got (.*)", done.stdout, flags=re.M)
    assert done.returncode == 0 and [call.split()[-1] for call in called] == ["build/slides.html", "build/slides.pdf"]
    assert all(re.search(r"@marp-team/marp-cli@\d+\.\d+\.\d+ ", call) for call in called)
