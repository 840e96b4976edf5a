"""Numbers and tables as pages and reports show them. Needs no PyTorch."""

import functools
import math

import pandas as pd
from tabulate import tabulate

NOT_MEASURED = "_Not measured yet._"


def number(value, digits=3):
    """Format with so many significant digits, thousands apart, never an exponent; empty for None and NaN."""
    if value is None or math.isnan(value):
        return ""
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{decimals}f}"


def percent(share):
    """Format a part of one in per cent."""
    return f"{100 * share:.{0 if share >= 0.1 else 1}f} %"


def times(factor):
    """Format how many times as large something is."""
    return f"{factor:,.0f} times" if factor >= 10 else f"{factor:.1f} times"


def markdown_table(header, rows, right=None):
    """Lines of text. right: for each column whether it is aligned there; default: all but the first are."""
    right = right or [False] + [True] * (len(header) - 1)
    lines = [header, ["---:" if at_right else "---" for at_right in right], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


plainly = functools.partial(tabulate, tablefmt="plain", disable_numparse=True)


def text_table(header, rows):
    """Return lines with the first column aligned to the left and the others to the right."""
    return plainly(rows, header, stralign="right", colalign=["left"]).splitlines()


def show(table):
    """Return a DataFrame as text, with numbers aligned to the right and words to the left."""
    forms = {"share": "{:5.1f} %", "calls": "{:.6g}", "us each": "{:.1f}", "ratio": "{:.2f}"}
    numeric = [pd.api.types.is_numeric_dtype(kind) for kind in table.dtypes]
    cells = {}
    for name, is_number in zip(table, numeric, strict=True):
        form = forms.get(name, "{:.3f}") if is_number else "{}"
        cells[name] = ["-" if pd.isna(value) else form.format(value) for value in table[name]]
    return plainly(cells, "keys", colalign=["right" if is_number else "left" for is_number in numeric])


def cell(text):
    """Text as it can stand in a cell of a table."""
    return text.replace("|", "/")
