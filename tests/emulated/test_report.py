"""The page of the counts is its JSON's."""

from importlib.util import find_spec

import pytest

from emulated import report
from measure.results import read_result


@pytest.mark.skipif(find_spec("test.mockgpu") is not None, reason="the emulator is on the path")
def test_without_the_emulator_the_remedy_is_named(capsys):
    assert report.main(["--", "--seq-len", "8"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "count with python -m emulated --count" in line


@pytest.mark.parametrize("arguments", [["--architectures", "sm_90"], ["--", "--seq-len", "x"]])
def test_bad_usage_is_one_line(arguments, capsys):
    assert report.main(arguments) == 2 and len(capsys.readouterr().err.splitlines()) == 1


@pytest.fixture(scope="module")
def result():
    return read_result(report.RESULT)


def test_the_page_is_of_the_recorded_counts(result):
    assert report.PAGE.read_text() == report.page(result)
