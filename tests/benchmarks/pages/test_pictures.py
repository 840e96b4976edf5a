"""The pictures show what the results say."""

from pathlib import Path

import pytest

from benchmarks.pages import pictures

RESULTS = Path(__file__).parent / "results"


@pytest.fixture
def drawn(monkeypatch):
    """drawn(function): the panels of a picture."""
    figures = []
    monkeypatch.setattr(pictures, "save_png", lambda figure, path, dpi: figures.append(figure))

    def draw(function):
        function(RESULTS, None)
        return figures[-1].axes

    yield draw
    pictures.plt.close("all")


def lines_of(axes):
    """{label: (xs, ys)}"""
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


def test_the_front_page_s_picture(drawn):
    losses, steps = drawn(pictures.draw_front_page)
    lines = list(lines_of(losses).items())
    assert [y[-1] for _, (_, y) in lines] == [5.2, 1.4, 1.2] and "1.6 % of the weights" in lines[0][0]
    assert len({line.get_linestyle() for line in losses.lines}) == 3  # not told apart by their colour alone
    texts = [text.get_text() for text in steps.texts]
    assert texts == [  # plain PyTorch, the strongest peer, ours; small, medium
        "60.0 ms, 6.0 x", "90.0 ms, 3.0 x", "16.0 ms, 1.6 x", "40.0 ms, 1.3 x", "10.0 ms, 1.0 x", "30.0 ms, 1.0 x",
    ]  # fmt: skip


def test_the_pictures_of_fp8(drawn):
    (axes,) = drawn(pictures.draw_fp8_layer)
    rounding, products = (604e6 + 252e6) / 4e6, 3e12 / 2000e6  # us, at a copy's rate and at the datasheet's
    assert lines_of(axes)["what the roofline allows"][0] == [rounding + products, 3e12 / 1000e6]
    assert sum(bars[0].get_width() for bars in axes.containers) == 178 + 82 + 2700
    (axes,) = drawn(pictures.draw_fp8_learning)
    assert axes.get_title("left") == "large" and len(axes.lines) == 5  # without the run that diverged
    steps, losses = next(line.get_data() for line in axes.lines if line.get_label() == "fp8")
    assert (steps[0], steps[-1]) == (50 * 8 / 6e4, 60 * 8 / 6e4)  # from the first mean on, in minutes
    assert losses[-1] == pytest.approx(0.955)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["bf16", "fp8"]
