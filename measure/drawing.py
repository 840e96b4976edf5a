"""Pictures with Matplotlib: one style, as PNG, or as SVG that follows the reader's choice of dark or light.

Draw within style(), with the colours of COLORS, into what new_figure() or sheet() makes. Nothing that matters is told
by colour alone: fillings also differ by their hatch, lines by marker and dashes.
"""

import functools
import html
import io
import re
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import Patch, Rectangle  # noqa: E402

from measure.command_line import replacing  # noqa: E402

# On white, and on black. INK keeps a contrast of 7 to the ground, the others 4.5, so that they can be text.
# The hues are after Okabe and Ito: the colour-blind can tell them apart. Tints stand behind text.
COLORS = {
    "ink": ("#1a1d21", "#e8eaed"),
    "muted": ("#57606a", "#a6b0ba"),
    "line": ("#b8c0c8", "#4a525b"),
    "ground": ("#ffffff", "#15181c"),
    "blue": ("#0072b2", "#5ab4e8"),
    "red": ("#c8440b", "#ff8f5a"),
    "green": ("#00825e", "#3fc79c"),
    "violet": ("#8a4f9e", "#cf9fe0"),
    "tint-blue": ("#b6d8ff", "#1f4f85"),
    "tint-orange": ("#ffd08a", "#7a5210"),
    "tint-green": ("#aae3b4", "#1f6131"),
    "tint-violet": ("#e2c5ff", "#5b3a86"),
}
INK, MUTED, LINE, GROUND, BLUE, RED, GREEN, VIOLET, *TINTS = (light for light, dark in COLORS.values())
VARIABLES = {light: f"var(--{name})" for name, (light, dark) in COLORS.items()}

WIDTH = 340  # of a picture, in the unit of its text: as wide as a phone's screen, where it is shown in CSS pixels
SHEET_WIDTH = 480
TEXT = 11
STYLE = {
    "font.size": TEXT,
    "font.sans-serif": ["DejaVu Sans"],
    "text.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": LINE,
    "axes.facecolor": GROUND,
    "axes.labelcolor": MUTED,
    "axes.labelsize": TEXT,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "figure.facecolor": GROUND,
    "hatch.color": GROUND,
    "hatch.linewidth": 1.2,
    "legend.fontsize": TEXT,
    "legend.frameon": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "svg.fonttype": "none",  # text stays text
}
style = functools.partial(plt.rc_context, STYLE)  # a context, and a decorator


class Filling(NamedTuple):
    """How an area looks: by its colour, and without it by its hatch."""

    color: str
    hatch: str = ""


class Bar(NamedTuple):
    """A line of bars(): what stands above it, and its parts, [(length, Filling)], from the left."""

    label: str
    parts: list
    outline: float | None = None  # the length of a frame around it


def new_figure(height):
    """Return an empty figure of WIDTH, in the unit of its text."""
    figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, layout="constrained")
    figure.get_layout_engine().set(w_pad=2 / 72, h_pad=2 / 72)
    return figure


def bars(axes, rows, height=0.5):
    """Draw a horizontal bar for each Bar, the first on top. Labels stand above the bars, where none collide."""
    for y, row in enumerate(rows):
        left = 0.0
        for length, filling in row.parts:
            axes.barh(
                y, length, height, left, color=filling.color, hatch=filling.hatch, edgecolor=GROUND, linewidth=0.5
            )
            left += length
        if row.outline is not None:
            axes.barh(y, row.outline, height, fill=False, edgecolor=INK, linewidth=1)
        axes.annotate(row.label, (0, y - height / 2), (0, 3), textcoords="offset points", va="bottom")
    axes.set(xlim=(0, None), ylim=(len(rows) - 1 + height / 2 + 0.1, -height / 2 - 0.55), yticks=[])
    axes.spines["left"].set_visible(False)


def bars_height(rows, rest):
    """Return the height of a figure of so many bars() with an axis below them."""
    return 38 * rows + rest


def legend_below(figure, fillings, columns=3):
    """Say below the figure what the fillings stand for: {name: Filling}."""
    handles = [
        Patch(facecolor=f.color, hatch=f.hatch, edgecolor=GROUND, linewidth=0.5, label=name)
        for name, f in fillings.items()
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, handlelength=1.6, columnspacing=1.2)


# ----------------------------------------------------------------------------------------------------------------------
# Sheets: boxes and words at places in pixels, as the pictures of the exercises have them


class Sheet:
    """A picture of boxes, lines and words below a title. Its unit is a CSS pixel, and y points downwards."""

    def __init__(self, title):
        self.title = title
        with style():
            self.axes = Figure(dpi=72).add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        self.text(12, 26, title)

    def text(self, x, y, words, align="left", color=INK, size=16):
        """Write words from this place on, or as they are aligned to it, and further lines below."""
        for line, part in enumerate(str(words).split("\n")):
            self.axes.text(x, y + 22 * line, part, ha=align, color=color, size=size, parse_math=False)

    def box(self, x, y, width, height, color=None):
        """Draw a box; without a colour it is dashed and empty."""
        line = "-" if color else (0, (3, 3))
        look = dict(facecolor=color or "none", edgecolor=LINE, linestyle=line, clip_on=False)
        self.axes.add_patch(Rectangle((x, y), width, height, **look))

    def svg(self, height):
        """Return the picture as a file of its own, which is so high."""
        self.axes.set(xlim=(0, SHEET_WIDTH), ylim=(height, 0))
        self.axes.figure.set_size_inches(SHEET_WIDTH / 72, height / 72)
        with style():
            return svg_file(self.axes.figure, self.title)


# ----------------------------------------------------------------------------------------------------------------------
# Writing


def save_png(figure, path, dpi=110):
    """Write the picture with its light colours, whole or not at all, and close it."""
    with replacing(path) as picture:
        figure.savefig(picture, dpi=dpi, facecolor="white", metadata={"Software": None})
    plt.close(figure)


def save_svg(figure, path, title, description):
    """Write the picture with its light and its dark colours, whole or not at all."""
    with replacing(path) as picture:
        picture.write_text(svg_file(figure, title, description) + "\n", encoding="utf-8")


def css():
    """Return the variables of a page with SVG: the light colours, and on a dark screen the dark ones."""
    light, dark = ("; ".join(f"--{name}: {pair[i]}" for name, pair in COLORS.items()) for i in (0, 1))
    return f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"


def svg(figure, name, title, description=""):
    """Return the picture as an element of a page that has css(). No other of the page has this name."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with plt.rc_context({"svg.hashsalt": name}):  # ids differ from picture to picture, not from run to run
        figure.savefig(file, format="svg", metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :].replace("'DejaVu Sans'", "system-ui").replace('pt"', '"', 2)
    # Comments repeat the words, nothing refers to numbered ids, and hundredths of a pixel are enough.
    text = re.sub(r'<!--.*?-->\s*| id="[\w.]+_\d+"| transform="rotate\(-0 .*?"|(?<=\n) +', "", text)
    text = re.sub(r'(?<= d=")[^"]+', lambda path: " ".join(re.sub(r"(\.\d\d)\d+", r"\1", path[0]).split()), text)
    text = re.sub("#[0-9a-f]{6}", lambda color: VARIABLES[color[0]], text)
    words = f'<title id="{name}-title">{html.escape(title)}</title>\n'
    words += f'<desc id="{name}-text">{html.escape(description)}</desc>'
    return text.replace(">", f' role="img" aria-labelledby="{name}-title {name}-text">\n{words}', 1)


def svg_file(figure, title, description=""):
    """Return the picture as a file of its own."""
    text = svg(figure, "picture", title, description)
    return text.replace("<defs>", f"<defs>\n<style>{css()}</style>", 1)
