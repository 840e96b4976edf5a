"""The picture of the front page shows what the results say."""

from pathlib import Path

from benchmarks.pages import pictures

RESULTS = Path(__file__).parent / "results"


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
    assert [text.get_text() for text in steps.texts] == [  # plain PyTorch, the strongest peer, ours; small, medium
        "60.0 ms, 3.0 x", "does not fit into memory", "21.0 ms, 1.1 x", "40.0 ms, 1.3 x", "19.7 ms, 1.0 x",
        "30.0 ms, 1.0 x",
    ]  # fmt: skip
