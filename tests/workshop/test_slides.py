"""The slides: few, with a note each, and all stages and exercises."""

import re
from pathlib import Path

import pytest
from matplotlib.text import Text

import tiny_llama_v3 as llama
from benchmarks.pages import pictures, publish, traces
from measure.results import RESULTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "slides.md"
SLIDES = re.split(r"^---\n", PAGE.read_text(), flags=re.M)[2:]


def test_a_recorded_step_below_a_question_shows_no_title_and_no_legend():
    asking = [slide for slide in SLIDES if re.search(r"\?\n\n!.*trace_", slide)]
    assert asking and all(re.search("_class: (question|host) ", slide) for slide in asking)


WIDTH, HEIGHT, LOW = 1140, 530, 450  # of a picture on a slide of 1280 x 720, by the style of the page
SEEN_IN_PART = [f"{name}.png" for name in traces.PICTURES]  # what does not fit is cut off
SMALLEST = 18  # pixels, which the last row of a room can read


def pictures_of(ending):
    """Return {path: (width, height) of its room} of the pictures on slides."""
    found = {}
    for slide in SLIDES:
        room = WIDTH, LOW if "_class: low " in slide else HEIGHT
        found |= dict.fromkeys(re.findall(rf"\]\((.*?\.{ending})\)", slide), room)
    return {(PAGE.parent / path).resolve(): room for path, room in found.items()}


def test_the_style_has_the_sizes_that_are_checked_here():
    style = PAGE.read_text().split("---")[1]
    assert f"img {{ display: block; width: {WIDTH}px; height: {HEIGHT}px; object-fit: contain; }}" in style
    assert f"section.low img {{ height: {LOW}px; }}" in style


@pytest.mark.parametrize("path, room", pictures_of("svg").items())
def test_the_text_of_a_drawing_can_be_read_from_the_last_row(path, room):
    text = path.read_text()
    size = re.search(r'viewBox="0 0 (\d+) (\d+)"', text).groups()
    scale = min(most / int(own) for most, own in zip(room, size, strict=True))
    sizes = [int(points) for points in re.findall(r"font-size: (\d+)px", text)]
    assert sizes and scale * min(sizes) >= SMALLEST


def test_the_text_of_a_drawn_result_can_be_read_from_the_last_row(monkeypatch):
    for module in (pictures, traces):
        monkeypatch.setattr(module, "save_png", lambda figure, path, dpi: drawn.append((figure, dpi)))
    names = [path.name for path in pictures_of("png") if path.name in publish.PICTURES]
    assert len(names) == 4
    for name in names:
        drawn = []
        publish.PICTURES[name](RESULTS, None)
        ((figure, dpi),) = drawn
        width, height = figure.get_size_inches() * dpi
        scale = WIDTH / width if name in SEEN_IN_PART else min(WIDTH / width, LOW / height)
        texts = [text for text in figure.findobj(Text) if text.get_text()]
        assert len(texts) > 5 and scale * dpi / 72 * min(text.get_fontsize() for text in texts) >= SMALLEST


def test_they_have_a_note_each_and_each_stage_and_each_exercise_has_one():
    assert len(SLIDES) <= 30 and all("<!-- " in slide.replace("<!-- _class", "") for slide in SLIDES)
    titles = re.findall(r"^# (\w+ \d)", PAGE.read_text(), flags=re.M)
    stages = [f"Stage {number}" for number in llama.STAGES]
    # In the order of the workshop; stages 5 and 8 have a second slide, with another title.
    assert list(dict.fromkeys(titles)) == ["Exercise 1", *stages, "Exercise 2", "Exercise 3"]


def test_a_slide_of_an_exercise_has_all_its_parts():
    for name in ("exercise1_triton_basics", "exercise2_swiglu_optimization", "exercise3_flash_attention"):
        page = (PAGE.parents[1] / "exercises" / f"{name}.md").read_text()
        (slide,) = (slide for slide in SLIDES if f"# Exercise {name[8]}:" in slide)
        assert re.findall(r"^- \*\*([A-E])\*\*", slide, re.M) == re.findall(r"^## Part ([A-E])", page, re.M)
