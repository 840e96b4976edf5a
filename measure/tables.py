"""Numbers and tables as the pages show them. Needs nothing but Python."""

import math

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


def text_table(header, rows):
    """Yields lines with the first column aligned to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for first, *others in [header, *rows]:
        line = f"{first:{widths[0]}}" + "".join(f"  {c:>{w}}" for c, w in zip(others, widths[1:], strict=True))
        yield line.rstrip()


def cell(text):
    """Text as it can stand in a cell of a table."""
    return text.replace("|", "/")
