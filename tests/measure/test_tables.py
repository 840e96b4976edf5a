"""Numbers and tables as the pages show them."""

import subprocess
import sys
from pathlib import Path

import pytest

from measure import tables


@pytest.mark.parametrize("text, shown", [
    (tables.number(None), ""), (tables.number(0), "0"), (tables.number(0.01234), "0.0123"), (tables.number(1), "1.00"),
    (tables.number(99.96), "100.0"), (tables.number(12345.6), "12,346"), (tables.percent(0.5), "50 %"),
    (tables.percent(0.016), "1.6 %"), (tables.times(1.25), "1.2 times"), (tables.times(1234), "1,234 times"),
    (tables.markdown_table(["", "ms"], [["a", tables.cell("1|2")]]), "|  | ms |\n| --- | ---: |\n| a | 1/2 |"),
    (tables.markdown_table(["a", "b"], [], right=[True, False]), "| a | b |\n| ---: | --- |"),
    ("\n".join(tables.text_table(["", "ms"], [["abc", "1"]])), "       ms\nabc     1"),
])  # fmt: skip
def test_numbers_and_tables(text, shown):
    assert text == shown


def test_tables_need_no_pytorch():
    program = "import sys; sys.modules['torch'] = None; import measure.tables"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).resolve().parents[2], check=True)
