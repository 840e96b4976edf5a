"""Pictures with Matplotlib: one style, and SVG that takes its colours and its font from the page that it stands in.

A picture is drawn into a Figure or a part of one, with the colours of COLORS. As PNG it has the light ones. As inline
SVG its colours are the CSS variables of css(), so that it follows the reader's choice of dark or light, and its text is
text. Nothing that matters is told by colour alone: fillings also differ by their hatch, lines by marker and dashes.
"""

import io
import re
from typing import NamedTuple
from xml.etree import ElementTree

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: E402

from measure.command_line import replacing  # noqa: E402


class Color(NamedTuple):
    """A colour on white and on black; both keep a contrast of 3 to the ground, INK and MUTED one of 7 and of 4.5."""

    light: str
    dark: str


COLORS = {  # hues after Okabe and Ito, which the colour-blind can tell apart
    "ink": Color("#1a1d21", "#e8eaed"),
    "muted": Color("#57606a", "#a6b0ba"),
    "line": Color("#b8c0c8", "#4a525b"),
    "ground": Color("#ffffff", "#15181c"),
    "blue": Color("#0072b2", "#5ab4e8"),
    "red": Color("#c8440b", "#ff8f5a"),
    "green": Color("#00825e", "#3fc79c"),
    "violet": Color("#8a4f9e", "#cf9fe0"),
}
INK, MUTED, LINE, GROUND, BLUE, RED, GREEN, VIOLET = (color.light for color in COLORS.values())

WIDTH = 340  # of a picture, in the unit of its text: as wide as a phone's screen, where it is shown in CSS pixels
TEXT = 11
STYLE = {
    "font.size": TEXT,
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


class Filling(NamedTuple):
    """How an area looks: by its colour, and without it by its hatch."""

    color: str
    hatch: str = ""


class Bar(NamedTuple):
    """A line of bars(): what stands above it, and its parts, [(length, Filling)], from the left."""

    label: str
    parts: list
    spread: tuple | None = None  # (from, to), drawn as a whisker
    outline: float | None = None  # the length of a frame around it
    mark: float | None = None  # the place of a diamond


def new_figure(height, width=WIDTH, unit=72):
    """An empty figure, so many units to the inch: 72, and they are those of its text. Call it within style()."""
    figure = plt.figure(figsize=(width / unit, height / unit), dpi=unit, layout="constrained")
    figure.get_layout_engine().set(w_pad=2 / 72, h_pad=2 / 72)
    return figure


def style():
    """The context in which pictures are drawn and saved."""
    return plt.rc_context(STYLE)


def bars(axes, rows, height=0.5):
    """Horizontal bars from zero, a Bar each, the first on top. Labels stand above the bars, where none collide."""
    for y, row in enumerate(rows):
        left = 0.0
        for length, filling in row.parts:
            axes.barh(
                y, length, height, left, color=filling.color, hatch=filling.hatch, edgecolor=GROUND, linewidth=0.5
            )
            left += length
        if row.outline is not None:
            axes.barh(y, row.outline, height, fill=False, edgecolor=INK, linewidth=1)
        if row.spread is not None:
            middle = sum(row.spread) / 2
            axes.errorbar(middle, y, xerr=middle - row.spread[0], color=INK, capsize=3, linewidth=1.2)
        if row.mark is not None:
            axes.plot(row.mark, y, "D", color=INK, markeredgecolor=GROUND, markersize=6, clip_on=False, zorder=3)
        axes.annotate(row.label, (0, y - height / 2), (0, 3), textcoords="offset points", va="bottom")
    axes.set(xlim=(0, None), ylim=(len(rows) - 1 + height / 2 + 0.1, -height / 2 - 0.55), yticks=[])
    axes.spines["left"].set_visible(False)


def bars_height(rows, each=38, rest=40):
    """The height of a figure of so many bars() with an axis below them."""
    return each * rows + rest


def legend_below(figure, fillings, columns=3):
    """What the fillings stand for: {name: Filling}."""
    handles = [
        Patch(facecolor=f.color, hatch=f.hatch, edgecolor=GROUND, linewidth=0.5, label=name)
        for name, f in fillings.items()
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, handlelength=1.6, columnspacing=1.2)


def plain_log(axis):
    """A logarithmic axis with numbers instead of powers."""
    axis.set_major_locator(LogLocator(numticks=7))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


# ----------------------------------------------------------------------------------------------------------------------
# Writing


def save_png(figure, path, dpi=110):
    """Writes the picture, whole or not at all, and closes it."""
    with replacing(path) as picture:
        figure.savefig(picture, dpi=dpi, facecolor="white", metadata={"Software": None})
    plt.close(figure)


SVG = "http://www.w3.org/2000/svg"
XLINK = "{http://www.w3.org/1999/xlink}href"
VARIABLES = {color.light: f"var(--{name})" for name, color in COLORS.items()}


def css():
    """The variables of inline SVG, to stand in a page's style: light ones, and dark ones for who wants the dark."""
    light, dark = (
        "; ".join(f"--{name}: {getattr(color, shade)}" for name, color in COLORS.items()) for shade in ("light", "dark")
    )
    return f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"


def svg(figure, name, title, description):
    """The picture as an element of a page, and closes it. name: of the page's pictures, it alone has it."""
    file = io.BytesIO()
    with plt.rc_context({"svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    plt.close(figure)
    root = ElementTree.fromstring(file.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag == f"{{{SVG}}}metadata" or child.find(f"{{{SVG}}}style") is not None:
                parent.remove(child)
    used = {value.strip("url(#)") for e in root.iter() for value in referring(e)}
    for element in root.iter():
        inline(element, name, used)
    width, height = root.get("viewBox").split()[2:]
    root.attrib.pop("version", None)
    root.attrib |= {"width": width, "height": height, "role": "img", "aria-labelledby": f"{name}-title {name}-text"}
    for index, (tag, text) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(f"{{{SVG}}}{tag}", id=f"{name}-{'text' if index else 'title'}")
        element.text = text
        root.insert(index, element)
    ElementTree.register_namespace("", SVG)
    return ElementTree.tostring(root, encoding="unicode").replace(f' xmlns="{SVG}"', "", 1)


def referring(element):
    """The parts of an element's attributes that name the id of another, as url(#id) or #id."""
    for attribute, value in element.attrib.items():
        yield from re.findall(r"url\(#[^)]+\)", value)
        if attribute == XLINK:
            yield value


def inline(element, name, used):
    """Makes an element of Matplotlib's SVG one of a page with several: own ids, CSS's colours, the page's font."""
    own = element.attrib.pop("id", None)
    if own in used:
        element.set("id", f"{name}-{own}")
    if XLINK in element.attrib:
        element.set("href", f"#{name}-{element.attrib.pop(XLINK)[1:]}")
    for attribute, value in element.attrib.items():
        if attribute == "d":
            element.set("d", re.sub(r"(\.\d\d)\d+", r"\1", " ".join(value.split())))
        elif attribute in ("style", "fill", "stroke", "clip-path"):
            value = value.replace("url(#", f"url(#{name}-")
            value = re.sub(r"font: ([\d.]+px)[^;]*", r"font-size: \1", re.sub(r"font-family:[^;]*;? ?", "", value))
            element.set(attribute, re.sub(r"#[0-9a-f]{6}\b", variable, value))
    if element.tag == f"{{{SVG}}}text" and "fill:" not in element.get("style", ""):
        element.set("style", f"{element.get('style')}; fill: {VARIABLES[INK]}")
    for attribute in ("fill", "stroke"):  # an attribute cannot hold a variable everywhere
        if "var(" in element.get(attribute, ""):
            style = f"{element.get('style', '')}; {attribute}: {element.attrib.pop(attribute)}"
            element.set("style", style.strip("; "))


def variable(match):
    if match[0] not in VARIABLES:
        raise ValueError(f"{match[0]} is no colour of measure/drawing.py: draw with those of COLORS")
    return VARIABLES[match[0]]
