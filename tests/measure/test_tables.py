"""Numbers and tables as the pages show them."""

import subprocess
import sys
from pathlib import Path

import pytest

from measure import tables


@pytest.mark.parametrize("value, text", [
    (None, ""), (0, "0"), (0.01234, "0.0123"), (1.0, "1.00"), (99.96, "100.0"), (123.4, "123"), (12345.6, "12,346"),
])  # fmt: skip
def test_numbers_have_three_digits_and_no_exponent(value, text):
    assert tables.number(value) == text


def test_a_table_of_markdown():
    assert tables.markdown_table(["", "ms"], [["a", "1"]]) == "|  | ms |\n| --- | ---: |\n| a | 1 |"
    assert tables.markdown_table(["a", "b"], [], right=[True, False]).endswith("| ---: | --- |")
    assert tables.cell("a | b") == "a / b"


def test_shares_and_factors():
    assert [tables.percent(share) for share in (0.5, 0.016)] == ["50 %", "1.6 %"]
    assert [tables.times(factor) for factor in (1.25, 1234.0)] == ["1.2 times", "1,234 times"]


def test_tables_need_no_pytorch():
    program = "import sys; sys.modules['torch'] = None; import measure.tables"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).resolve().parents[2], check=True)
