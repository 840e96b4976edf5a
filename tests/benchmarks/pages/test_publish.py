"""What cannot be written into a page is told in one line, and nothing is changed."""

import shutil
from pathlib import Path

import pytest

from benchmarks.pages import publish

RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- begin: kernels -->", "<!-- end: kernels -->"
TEXT = f"# Title\n{BEGIN}\nold\n{END}\ntext\n<!-- begin: gpt --><!-- end: gpt -->\n"


@pytest.fixture
def page(tmp_path):
    """A page, its flags, and a result which may be damaged."""
    shutil.copy(RESULTS / "kernels_some-gpu_20300102.json", tmp_path / "kernels.json")
    shutil.copy(RESULTS / "kernels_some-gpu_20300102.json", tmp_path / "kernels_1.json")
    page = tmp_path / "page.md"
    page.write_text(TEXT)
    return page, ["--pages", str(page), "--results", str(tmp_path)]


def refused(capsys, flags, *pages):
    """The line of a refusal, which left the pages as they were and nothing beside them."""
    before = [(path, path.read_text()) for page in pages for path in sorted(page.parent.glob("*.*"))]
    assert publish.main(flags) == 2
    assert before == [(path, path.read_text()) for page in pages for path in sorted(page.parent.glob("*.*"))]
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("publish.py: error: ")
    return error


def test_a_table_is_replaced_and_a_change_is_noticed(page, capsys):
    page, flags = page
    assert publish.main([*flags, "--check"]) == 1 and page.read_text() == TEXT
    assert publish.main(flags) == 0 and publish.main([*flags, "--check"]) == 0
    text = page.read_text()
    assert text.startswith(f"# Title\n{BEGIN}") and "old" not in text and f"{END}\ntext\n" in text
    assert publish.NOT_MEASURED in text and "benchmarks/results/kernels_1.json)" in text
    page.write_text(text.replace("126 (torch)", "125 (torch)"))
    capsys.readouterr()
    assert publish.main([*flags, "--check"]) == 1 and "125 (torch)" in capsys.readouterr().out


def test_links_start_at_the_page(page, tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    inner = tmp_path / "docs" / "page.md"
    inner.parent.mkdir()
    inner.write_text(TEXT)
    assert publish.main([*page[1], "--pages", str(inner)]) == 0
    assert "](../benchmarks/results/kernels_1.json)" in inner.read_text()
    assert publish.main(page[1]) == 0 and "](benchmarks/results/kernels_1.json)" in page[0].read_text()


@pytest.mark.parametrize("damage", [
    lambda text: text[:-20], lambda text: text.replace('"environment"', '"nvironment"'),
    lambda text: text.replace('"us": 100.0', '"us": "fast"'),
])  # fmt: skip
def test_a_damaged_result_is_named(page, capsys, damage):
    page, flags = page
    path = page.with_name("kernels_1.json")
    path.write_text(damage(path.read_text()))
    error = refused(capsys, flags, page)
    assert (str(path) in error) != ("a result of kernels is damaged" in error)  # told once


def test_a_table_whose_result_is_gone_is_not_dropped_in_silence(page, capsys):
    page, flags = page
    page.with_name("kernels_1.json").unlink()
    assert "has a table of kernels, but there is no result of it" in refused(capsys, flags, page)
    page.with_name("kernels.json").unlink()
    assert "holds no results" in refused(capsys, [*flags, "--check"], page)


@pytest.mark.parametrize("text, reason", [
    ("", "needs"), (BEGIN, "needs"), (END, "needs"), (f"{END}\n{BEGIN}", "needs"),
    (f"{BEGIN} <!-- end: steps -->", "needs"), (f"{BEGIN} <!-- begin: steps --> {END} <!-- end: steps -->", "needs"),
    ("<!-- begin: kernel --> <!-- end: kernel -->", "markers of kernel: choose from steps"), (None, "No such file"),
])  # fmt: skip
def test_a_page_with_wrong_markers_is_named_and_no_other_is_written(page, capsys, text, reason):
    page, flags = page
    other = page.with_name("other.md")
    if text is not None:
        other.write_text(text)
    error = refused(capsys, [*flags, "--pages", str(page), str(other)], page)
    assert str(other) in error and reason in error
