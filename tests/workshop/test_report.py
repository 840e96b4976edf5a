"""report.html: cards and the picture carry the summary's own numbers."""

import html
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import tiny_llama_v3 as llama
from benchmarks.pages.replays import NOTES
from exercises.performance_debugging import evidence, report
from exercises.performance_debugging.evidence import Replay
from measure import drawing
from tests.workshop.summaries import SIGNS, cpu_summary, gpu_summary, laptop_summary, taking

SCRIPT = Path(llama.__file__).read_text().splitlines()


@pytest.fixture(scope="module")
def whole():
    """A replay whose every stage shows its sign, and its page."""
    summary = gpu_summary(SIGNS)
    return summary, report.texts(summary)["report.html"]


# --- the picture


def test_the_picture_carries_the_numbers_of_the_summary():
    slow = {2: taking(4.0, 5.0, 6.0, 7.0, 8.0, 9.0), 4: SIGNS[4] | {"phases_share": None, "phase_ms": {}}}
    bars = report.step_bars(Replay(gpu_summary(SIGNS | slow)))
    labels = [bar.label for bar in bars]
    assert labels[0] == "plain PyTorch: 10.0 ms (10.0 – 10.0), phases 100 %" and labels[4].endswith("21.0)")
    assert labels[2].startswith("stage 2: 6.50 ms (5.00 – 8.00)") and labels[3].endswith("phases 30 %")
    assert [bar.outline for bar in bars] == pytest.approx([10, 21, 6.5, 21, 21, 5, 5, 5.06, 1.25], rel=1e-3)
    lengths = [sum(length for length, _ in bar.parts) for bar in bars]
    assert lengths == pytest.approx([5, 5, 5, 6.3, 0, 5, 0.2, 5, 5], rel=1e-4)
    root = ElementTree.fromstring(report.picture_of(Replay(gpu_summary()), "name"))
    assert {"stage 5: 5.00 ms (5.00 – 5.00), phases 100 %"} <= {text.text for text in root.findall(".//{*}text")}


def test_the_parts_of_a_bar_follow_each_other():
    axes = drawing.new_figure(100).subplots()
    drawing.bars(axes, [drawing.Bar("a step", [(ms, report.PHASES["forward"]) for ms in (2.0, 3.0, 4.0)])])
    assert [(part.get_x(), part.get_width()) for part in axes.patches] == [(0, 2), (2, 3), (5, 4)]


# --- the cards


def test_every_stage_has_a_sign_and_a_lesson():
    assert set(evidence.SEE) == set(report.LESSONS) == set(llama.STAGES)


@pytest.mark.parametrize("text", [*map("BUG {}:".format, llama.BUGS), "def capture("])
def test_an_excerpt_is_the_script_s_own_lines_to_the_end_of_their_paragraph(text):
    marks = [n for n, line in enumerate(SCRIPT, 1) if text in line]
    for (first, lines), mark in zip(report.excerpts(text), marks, strict=True):
        end = first - 1 + len(lines)
        assert first == mark and 1 < len(lines) <= 20
        assert [*map(str.strip, SCRIPT[first - 1 : end])] == [*map(str.strip, lines)] and not SCRIPT[end].strip()


def test_a_laptop_s_report_says_what_was_recorded_and_where():
    summary = laptop_summary(gpu_summary(precision="bf16"), gpu_summary(SIGNS))
    there = "recorded on NVIDIA H200, 2026-11-21, 8 x 128 tokens, fp32"  # the first that shows the sign
    assert [seen["source"] for seen in summary["observations"]] == [
        "measured",
        there,
        there,
        there,
        "measured",
        "measured",
        there,
        there,
    ]
    page = html.unescape(report.texts(summary)["report.html"])
    assert "recorded on a GPU says so" in page
    # Nothing is drawn of a CPU's times.
    assert re.findall("<strong>(Recorded .*)</strong></figcaption>", page) == [
        f"R{there[1:]}".replace("fp32", precision) for precision in ("bf16", "fp32")
    ]


@pytest.mark.parametrize("summary", [
    gpu_summary(SIGNS), gpu_summary({7: taking(7.0) | {"host_ms": 6.9}}, baseline=None),
    gpu_summary({8: taking(1.0, 1.0, 1.0)}), cpu_summary("torch"), cpu_summary("triton", laptop=True),
    laptop_summary(gpu_summary(SIGNS)),
], ids=["gpu", "host", "too few", "torch", "alone", "laptop"])  # fmt: skip
def test_a_report_explains_what_it_has_and_nothing_else(summary):
    shown = report.texts(summary)
    table, _, rest = shown["summary.md"].partition("\n\n- ")
    cells = {cell.strip() for line in table.splitlines() for cell in line.split("|")}
    assert {name for name, note in NOTES.items() if note in rest} == cells & NOTES.keys() != set()
    assert {name for name, note in NOTES.items() if note in shown["report.html"]} == cells & NOTES.keys()
    page = html.unescape(shown["report.html"])
    assert ("recorded on a GPU says so" in page) == bool(summary.get("recorded"))
    assert ("Measured on this CPU, in Triton's interpreter" in page) == summary["laptop"]
    if summary["environment"]["arch"] == "cpu":
        (severed,) = (seen for seen in summary["observations"] if seen["stage"] == 6)
        assert " ms where " not in severed["text"] and "hundreds" not in page
        assert ("baseline" in page) == (summary["baseline"] is not None)


# --- the page


def test_what_a_machine_or_a_command_is_called_is_shown_as_it_is():
    summary = gpu_summary(
        command="./run_all_stages.sh <b>", environment=gpu_summary()["environment"] | {"device": "A & <i>B"}
    )
    shown = report.texts(summary)
    for text in (summary["command"], summary["environment"]["device"]):
        assert html.escape(text) in shown["report.html"] and text not in shown["report.html"]
        assert text in shown["summary.md"]


def test_the_report_is_one_page_without_network_or_script_whose_structure_can_be_heard(whole):
    summary, page = whole
    links = re.sub(r'xmlns(:xlink)?="[^"]+"', "", page)
    assert not re.search(r"https?://|<script|@import|<img|url\((?!#)|src=|javascript:|<[^>]*\son\w+=", links)
    assert {seen["text"] in html.unescape(page) for seen in summary["observations"]} == {True}
    # Every picture has a name and a description, and whatever is referred to is there, once.
    ids = re.findall(r'\bid="([^"]+)"', page)
    used = re.findall(r"url\(#([^)]+)\)", page) + " ".join(re.findall(r'aria-labelledby="([^"]+)"', page)).split()
    assert len(ids) == len({*ids}) and {"picture0-title"} < {*used} <= {*ids}
    # Colours are variables, so that they follow the reader's screen; paper stays white.
    assert not re.search(r"#[0-9a-f]{6}\b", page.replace(drawing.css(), "")) and "DejaVu" not in page
    assert {*re.findall(r"@media (\w+) and \(prefers-color-scheme: dark\)", page)} == {"screen"}


def test_the_report_of_an_interrupted_replay_says_so(tmp_path):
    summary = gpu_summary(interrupted=True, stages=gpu_summary()["stages"][:1])
    report.write(summary, tmp_path)
    assert "was interrupted" in (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
