"""The pictures show what the results say."""

import re
import shutil
from pathlib import Path

from benchmarks.pages import pictures, training_runs
from measure.tables import NOT_MEASURED

RESULTS = Path(__file__).parent / "results"


def begins_at_zero(axes):
    """Return whether both axes show how large a value is, and not only how it differs from others."""
    return axes.get_xlim()[0] == axes.get_ylim()[0] == 0


def test_the_front_page_s_picture(monkeypatch):
    figures = []
    monkeypatch.setattr(pictures, "save_png", lambda figure, path, dpi: figures.append(figure))
    pictures.draw_front_page(RESULTS, None)
    pictures.draw_learning(RESULTS, None)
    (losses, steps), (alone,) = (figure.axes for figure in figures)
    for axes in (losses, alone):
        assert [line.get_ydata()[-1] for line in axes.lines] == [5.2, 1.4, 1.2]
        assert "1.6 % of the weights" in axes.lines[0].get_label()
        assert len({line.get_linestyle() for line in axes.lines}) == 3  # not told apart by their colour alone
        assert begins_at_zero(axes)
    assert steps.get_xlim()[0] == 0
    assert [text.get_text() for text in steps.texts] == [  # plain PyTorch, the strongest peer, ours; small, medium
        "60.0 ms, 3.0 x", "out of memory", "21.0 ms, 1.1 x", "40.0 ms, 1.3 x", "19.7 ms, 1.0 x",
        "30.0 ms, 1.0 x",
    ]  # fmt: skip


def test_the_picture_of_a_training_run(tmp_path, monkeypatch):
    figures, save_svg = [], pictures.save_svg

    def save(figure, *others):
        figures.append(figure)
        save_svg(figure, *others)

    monkeypatch.setattr(pictures, "save_svg", save)
    pictures.draw_training(RESULTS, tmp_path / "training.svg")
    (axes,) = figures[0].axes
    ours, theirs = axes.lines
    assert [ours.get_label(), theirs.get_label()] == ["triton graph", "sdpa compile graph"]
    assert (list(ours.get_xdata()), list(ours.get_ydata())) == ([15, 30, 45, 60], [3.0, 2.0, 1.5, 1.4])
    assert (list(theirs.get_xdata()), list(theirs.get_ydata())) == ([20, 40], [3.01, 2.02])
    assert ours.get_linestyle() != theirs.get_linestyle()  # not told apart by their colour alone
    assert begins_at_zero(axes)
    text = (tmp_path / "training.svg").read_text()
    assert "prefers-color-scheme: dark" in text and not re.search(r"(fill|stroke): #", text)
    assert "triton graph: 1.40 at the end, sdpa compile graph: 2.02 at the end" in text


def test_without_a_whole_run_no_picture_is_drawn(tmp_path):
    for day in ("03", "04"):  # one that was interrupted, and a trial
        shutil.copy(RESULTS / f"training_some-gpu_203001{day}.json", tmp_path)
    pictures.draw_training(tmp_path, tmp_path / "training.svg")
    assert not (tmp_path / "training.svg").exists()
    assert training_runs.training_section(tmp_path) == NOT_MEASURED
