"""The slides: few, with a note each, and all stages; `make slides`."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import tiny_llama_v3 as llama

ROOT = Path(__file__).resolve().parents[2]
SLIDES = re.split(r"^---\n", (ROOT / "docs" / "slides.md").read_text(), flags=re.M)[2:]


def test_they_have_a_note_each_and_each_stage_and_each_exercise_has_one():
    assert len(SLIDES) <= 30 and all("<!-- " in slide.replace("<!-- _class", "") for slide in SLIDES)
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
