"""The slides: few, with a note each, and all stages and exercises."""

import re
from pathlib import Path

import tiny_llama_v3 as llama

PAGE = Path(__file__).resolve().parents[2] / "docs" / "slides.md"
SLIDES = re.split(r"^---\n", PAGE.read_text(), flags=re.M)[2:]


def test_a_recorded_step_below_a_question_shows_no_title_and_no_legend():
    asking = [slide for slide in SLIDES if re.search(r"\?\n\n!.*trace_", slide)]
    assert asking and all(re.search("_class: (question|host) ", slide) for slide in asking)


def test_they_have_a_note_each_and_each_stage_and_each_exercise_has_one():
    assert len(SLIDES) <= 30 and all("<!-- " in slide.replace("<!-- _class", "") for slide in SLIDES)
    titles = re.findall(r"^# (\w+ \d)", PAGE.read_text(), flags=re.M)
    assert {*titles} == {*map("Stage {}".format, llama.STAGES), "Exercise 1", "Exercise 2", "Exercise 3"}
