"""The slides: few, with a note each, and all stages and exercises."""

import re
from pathlib import Path

import tiny_llama_v3 as llama

PAGE = Path(__file__).resolve().parents[2] / "docs" / "slides.md"
SLIDES = re.split(r"^---\n", PAGE.read_text(), flags=re.M)[2:]


def test_they_have_a_note_each_and_each_stage_and_each_exercise_has_one():
    assert len(SLIDES) <= 30 and all("<!-- " in slide.replace("<!-- _class", "") for slide in SLIDES)
    titles = re.findall(r"^# (\w+ \d)", "\n".join(SLIDES), flags=re.M)
    wanted = [f"Stage {number}" for number in llama.STAGES] + [f"Exercise {number}" for number in (1, 2, 3)]
    assert sorted(titles) == sorted(wanted)
