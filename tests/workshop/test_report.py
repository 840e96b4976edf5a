"""report.html: cards and pictures carry the summary's own numbers."""

import html
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import tiny_llama_v3 as llama
from exercises.performance_debugging import pictures, report
from exercises.performance_debugging.evidence import NotMeasured, Replay
from measure import drawing
from tests.workshop.summaries import SIGNS, cpu_summary, gpu_summary, laptop_summary, taking

SCRIPT = Path(llama.__file__).read_text().splitlines()


@pytest.fixture(scope="module")
def whole():
    """A replay whose every stage shows its sign, and its page."""
    summary = gpu_summary(SIGNS)
    return summary, report.texts(summary)["report.html"]


# --- the pictures

SHOWN = {  # words that the picture itself must carry, and how long its bars are, from SIGNS
    3: (["stage 3: 21.0 ms (21.0 – 21.0), phases 30 %", "stage 4: 21.0 ms (21.0 – 21.0), phases 93 %"], [6.3, 19.5]),
    4: (["SwiGLU matrix product, naive: 80 %; stage 5: 0.0 %", "matrix product: 20 %; stage 5: 77 %"], [80, 20]),
    5: (["plain PyTorch: 10.0 ms (10.0 – 10.0), phases 50 %"], [5, 5, 5, 6.3, 19.5, 5, 0.2, 5, 5]),
    8: (["stage 5: 5.00 ms (5.00 – 5.00), phases 100 %"], [5, 5]),
}


@pytest.mark.parametrize("stage", SHOWN)
def test_a_picture_carries_the_numbers_of_the_summary(whole, stage):
    words, lengths = SHOWN[stage]
    chart = pictures.STAGES[stage](Replay(whole[0]))
    assert {*words} <= {row.label for row in chart.rows}
    assert [sum(length for length, _ in row.parts) for row in chart.rows] == pytest.approx(lengths, rel=1e-4)
    root = ElementTree.fromstring(pictures.draw(chart, "name"))
    assert {row.label for row in chart.rows} <= {text.text for text in root.findall(".//{*}text")}


def test_marks_and_outlines_are_in_their_places(whole):
    rows = {stage: function(Replay(whole[0])).rows for stage, function in pictures.STAGES.items()}
    assert [row.outline for row in rows[3] + rows[8]] == [21, 21, 5, 1.25]
    assert [row.mark for row in rows[4]] == pytest.approx([0, 76.9231])
    slow = gpu_summary({5: taking(4.0, 5.0, 6.0, 7.0, 8.0, 9.0)})
    assert pictures.STAGES[8](Replay(slow)).rows[0].label.startswith("stage 5: 6.50 ms (5.00 – 8.00)")


def test_the_parts_of_a_bar_follow_each_other():
    axes = drawing.new_figure(100).subplots()
    drawing.bars(axes, [drawing.Bar("a step", [(2.0, pictures.RIGHT), (3.0, pictures.WRONG), (4.0, pictures.RIGHT)])])
    assert [(part.get_x(), part.get_width()) for part in axes.patches] == [(0, 2), (2, 3), (5, 4)]


def test_the_words_of_a_picture_are_those_given():
    root = ElementTree.fromstring(drawing.svg(drawing.new_figure(100), "name", "a < b", "b & c"))
    assert [root.findtext(f"{{*}}{tag}") for tag in ("title", "desc")] == ["a < b", "b & c"]


@pytest.mark.parametrize("stage, lacking", [
    (3, "phases_share"), (4, "kernels"), (8, "phases_share"),
])  # fmt: skip
def test_without_its_figure_there_is_no_picture(stage, lacking):
    summary = gpu_summary({stage: {lacking: None}})
    with pytest.raises(NotMeasured):
        pictures.STAGES[stage](Replay(summary))
    assert report.card(summary, stage)["picture"] is None


# --- the cards


@pytest.mark.parametrize("flag", [name for name, bug in llama.BUGS.items() if bug.stages])
def test_an_excerpt_is_the_script_s_own_lines(flag):
    marks = [n for n, line in enumerate(SCRIPT, 1) if f"BUG {flag}:" in line]
    for (first, lines), mark in zip(report.excerpts(f"BUG {flag}:"), marks, strict=True):
        assert first <= mark < first + len(lines) > 1
        assert [*map(str.strip, SCRIPT[first - 1 : first - 1 + len(lines)])] == [*map(str.strip, lines)]
        compile("\n".join(lines), flag, "exec", flags=0x400)  # a whole statement, for ast alone


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_the_report_of_a_cpu_draws_nothing_that_a_cpu_cannot_show(implementation):
    summary = cpu_summary(implementation, SIGNS)
    assert not any(report.card(summary, stage)["picture"] for stage in llama.STAGES)


def test_a_laptop_s_cards_say_what_was_recorded_and_where():
    summary = laptop_summary(gpu_summary(precision="bf16"), gpu_summary(SIGNS))
    made = {stage: report.card(summary, stage) for stage in llama.STAGES}
    there = "recorded on NVIDIA H200, 2026-11-21, 8 x 128 tokens, fp32"  # the first that shows the sign
    places = [made[stage]["picture"][2] for stage in pictures.STAGES]
    assert places == [there, there, there.replace("fp32", "bf16"), there]
    best = [made[stage]["best"]["source"] for stage in llama.STAGES]
    assert best == ["measured", there, there, there, "measured", "measured", there, there]
    page = html.unescape(report.texts(summary)["report.html"])
    assert "recorded on a GPU says so" in page


# --- the page


def test_the_report_is_one_page_without_network_or_script_whose_structure_can_be_heard(whole):
    summary, page = whole
    links = re.sub(r'xmlns(:xlink)?="[^"]+"', "", page)
    assert not re.search(r"https?://|<script|@import|<img|url\((?!#)|src=|javascript:|<[^>]*\son\w+=", links)
    assert {seen["text"] in html.unescape(page) for seen in summary["observations"]} == {True}
    # Every picture has a name and a description, and whatever is referred to is there, once.
    ids = re.findall(r'\bid="([^"]+)"', page)
    used = re.findall(r"url\(#([^)]+)\)", page) + " ".join(re.findall(r'aria-labelledby="([^"]+)"', page)).split()
    assert len(ids) == len({*ids}) and {f"picture{n}-title" for n in pictures.STAGES} < {*used} <= {*ids}
    # Colours are variables, so that they follow the reader's screen; paper stays white.
    assert not re.search(r"#[0-9a-f]{6}\b", page.replace(drawing.css(), "")) and "DejaVu" not in page
    assert {*re.findall(r"@media (\w+) and \(prefers-color-scheme: dark\)", page)} == {"screen"}


def test_the_report_of_an_interrupted_replay_says_so(tmp_path):
    summary = gpu_summary(interrupted=True, stages=gpu_summary()["stages"][:1])
    report.write(summary, tmp_path)
    assert "was interrupted" in (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
