"""The slides: few, with few words, a note each, and all stages; `make slides`."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import tiny_llama_v3 as llama

ROOT = Path(__file__).resolve().parents[2]
FRONT, *SLIDES = re.split(r"^---\n", (ROOT / "docs" / "slides.md").read_text().removeprefix("---\n"), flags=re.M)


def visible(slide):
    return re.sub(r"<!--.*?-->", "", slide, flags=re.S).strip()


def test_they_are_few_and_each_has_a_title_a_note_and_few_words():
    assert "marp: true" in FRONT and 20 < len(SLIDES) <= 30
    for slide in SLIDES:
        shown = visible(slide)
        assert re.match(r"# \S", shown) and len(re.findall("^# ", slide, flags=re.M)) == 1, slide
        assert len(re.findall(r"<!-- (?!_class)(.*?) -->", slide, flags=re.S)) == 1, slide
        prose = re.sub(r"```.*?```|^!\[.*?\)$|^\|.*?\|$", "", shown, flags=re.M | re.S).splitlines()
        assert sum(map(bool, prose)) <= 7 and all(len(line.split()) <= 10 for line in prose), slide


def test_each_stage_and_each_exercise_has_one():
    titles = re.findall(r"^# (\w+ \d)", "\n".join(SLIDES), flags=re.M)
    wanted = [f"Stage {number}" for number in llama.STAGES] + [f"Exercise {number}" for number in (1, 2, 3)]
    assert sorted(titles) == sorted(wanted)


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make")
def test_make_asks_marp_for_both_files_and_says_what_is_missing_without_node(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)

    def run():
        command = [shutil.which("make"), "slides"]
        return subprocess.run(command, cwd=tmp_path, env={"PATH": str(tmp_path)}, capture_output=True, text=True)

    done = run()
    assert done.returncode != 0 and "make slides: there is no npx: install node" in done.stderr
    (tmp_path / "npx").write_text('#!/bin/sh\necho "npx got $*"\n')
    (tmp_path / "npx").chmod(0o755)
    done = run()
    called = re.findall(r"^npx got .*@marp-team/marp-cli@\d+\.\d+\.\d+ .* (\S+)$", done.stdout, flags=re.M)
    assert done.returncode == 0 and called == ["build/slides.html", "build/slides.pdf"]
