"""What the pictures of the exercises are made of: functions that return SVG.

A picture is 480 wide, so that its letters can be read on a telephone, and has a background of its own, light or dark as
the reader's system is. A color is a program, a dashed cell one that the mask leaves out.
"""

import math
from xml.sax.saxutils import escape

WIDTH = 480
STYLE = """
svg { --back: #ffffff; --ink: #1f2328; --faint: #6e7781; --line: #afb8c1; --cell: #f3f5f7;
  --p0: #b6d8ff; --p1: #ffd08a; --p2: #aae3b4; --p3: #e2c5ff }
@media (prefers-color-scheme: dark) { svg { --back: #0d1117; --ink: #e6edf3; --faint: #9198a1; --line: #57606a;
  --cell: #21262d; --p0: #1f4f85; --p1: #7a5210; --p2: #1f6131; --p3: #5b3a86 } }
.back { fill: var(--back) } .cell { fill: var(--cell); stroke: var(--line) }
.p0, .p1, .p2, .p3 { stroke: var(--line) }
.p0 { fill: var(--p0) } .p1 { fill: var(--p1) } .p2 { fill: var(--p2) } .p3 { fill: var(--p3) }
.off { fill: none; stroke: var(--line); stroke-dasharray: 3 3 }
.mark { fill: none; stroke: var(--ink); stroke-width: 2.5 }
text { fill: var(--ink); font: 16px ui-sans-serif, system-ui, sans-serif } .middle { text-anchor: middle }
.faint { fill: var(--faint) } .small { font-size: 12px } .end { text-anchor: end }
line { stroke: var(--ink); stroke-width: 1.5 }
"""


def text(x, y, words, kind=""):
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(str(words))}</text>'


def box(x, y, width, height, kind):
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>'


def cell(x, y, size, kind, words=""):
    """A square with a number in it, which is faint where the cell is not there."""
    faint = " faint" if kind == "off" else ""
    return box(x + 1, y + 1, size - 2, size - 2, kind) + text(x + size / 2, y + size / 2 + 6, words, f"middle{faint}")


def row(x, y, size, kinds, words):
    return "".join(cell(x + size * i, y, size, *pair) for i, pair in enumerate(zip(kinds, words, strict=True)))


def labelled_rows(rows, size, left, top=44, gap=14):
    """[(label, kinds, words)] below each other."""
    parts = []
    for index, (label, kinds, words) in enumerate(rows):
        y = top + index * (size + gap)
        parts += [text(left - 10, y + size / 2 + 6, label, "end"), row(left, y, size, kinds, words)]
    return "".join(parts)


def picture(title, height, *parts):
    """An SVG document; the title stands in the picture, and is what a screen reader says."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n'
        + "\n".join([box(0, 0, WIDTH, height, "back"), text(12, 26, title), *parts])
        + "\n</svg>\n"
    )


def shown(value):
    """A number in a cell: three digits at most."""
    return "-inf" if value == -math.inf else f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:g}"
