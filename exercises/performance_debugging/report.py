"""Write the results of a replay: summary.json, summary.md, stages.png and report.html."""

import math
import textwrap
from pathlib import Path

import jinja2
import pandas

from benchmarks.pages import replays
from exercises.performance_debugging import cards, pictures
from measure import drawing
from measure.command_line import replacing
from measure.results import write_json

WIDTH = 100  # of a terminal
ALONE = "Each mistake by itself beside stage 5, which has none: what it costs where the others do not hide it."
COUNTED = (
    "What two kernels ask memory for, counted in Triton's interpreter, with the mistake and without. A load is of 64 "
    "neighbours, as many as a wave of AMD's; a line has 128 bytes. None of it is a time, or depends on this machine."
)
LAPTOP = "Measured on this CPU, whatever GPU there is: stage 1 in plain PyTorch at the model's full width, the others "
SHORT = {  # {name of a figure: in a terminal, where only these stand}
    "first loss": "first loss",
    "speed, samples/s": "samples/s",
    "speed / previous": "x previous",
    "speed / baseline": "x baseline",
    "step, median, ms": "step, ms",
    "added by the mistake, ms": "added, ms",
    "speed / stage 5": "x stage 5",
    "phases / step, %": "phases, %",
    "weights with a gradient, %": "gradient, %",
}


def wrapped(text, indent=""):
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def tables(summary):
    """Yield (heading, text, DataFrame with a row for each run) of all figures, those of recordings last."""

    text = ""
    if summary["laptop"]:
        text = (
            "in Triton's interpreter, whose times are not the kernels'"
            if replays.is_interpreted(summary)
            else "as well"
        )
        text = f"{LAPTOP}with a tiny model {text}."
    yield "This replay", text, cards.frame_of(replays.comparison_table(summary))
    if summary["isolated"]:
        yield "Each mistake alone", ALONE, cards.frame_of(replays.isolated_table(summary))
    if summary["counted"]:
        header, rows = replays.counted_table(summary)
        yield "Counted", COUNTED, pandas.DataFrame.from_dict(dict(rows), orient="index", columns=header)
    for replay in summary["recorded"]:
        text = f"Recorded on {replays.source_of(replay)}, in {replay['file']}: not measured here."
        yield f"Recorded: {replays.sizes(replay)}", text, cards.frame_of(replays.comparison_table(replay))


def page(summary, shown):
    """Return the text of report.html, which needs no other file, no network and no script. shown: the cards."""
    # What this machine could not measure is drawn from the first recording that has it.
    whole = {}
    for name, function in pictures.WHOLE.items():
        whole[name] = cards.first_of(cards.picture_of, cards.sources(summary), function, name)
    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("report.html.jinja").render(
        summary=summary,
        setting=replays.setting(summary),
        cards=shown,
        whole=[each for each in whole.values() if each[0]],
        colors=drawing.css(),
        tables=list(tables(summary)),
        notes=replays.notes(summary),
    )


def markdown(summary):
    """Return the text of summary.md."""
    parts = ["# The stages, replayed", replays.setting(summary)]
    for heading, text, frame in tables(summary):
        parts += [f"## {heading}", text, frame.T.to_markdown(disable_numparse=True)]
    parts += ["\n".join(f"- {note}" for note in replays.notes(summary)), "## Key observations"]
    parts += ["\n".join(f"- **{title}** ({mark}): {text}" for title, mark, text in replays.observation_lines(summary))]
    parts += [f"Again: `{summary['command']}`"]
    return "\n\n".join(filter(None, parts)) + "\n"


def console(summary):
    """Return the main figures and the observations for a terminal."""
    lines = [wrapped(replays.setting(summary))]
    for heading, text, frame in tables(summary):
        # The report has every figure; a terminal has room for those that tell the stages apart.
        shown = frame if heading == "Counted" else frame.filter(SHORT).rename(columns=SHORT)
        lines += ["", wrapped(f"{heading}. {text}"), "", shown.to_string()]
    lines.append("")
    for title, mark, text in replays.observation_lines(summary):
        lines += [f"{title} ({mark})", wrapped(text, "    ")]
    return "\n".join(lines)


def draw_overview(shown, title, path, columns=4):
    """Draw pictures of the page side by side in one PNG file."""
    rows = math.ceil(len(shown) / columns)
    with drawing.style():
        height = max(picture["height"] for picture in shown) + 34
        figure = drawing.new_figure(rows * height + 30, columns * (drawing.WIDTH + 20))
        figure.suptitle(title)
        for part, picture in zip(figure.subfigures(rows, columns, squeeze=False).flat, shown, strict=False):
            part.suptitle(picture["title"], x=0.02, ha="left", fontsize=drawing.TEXT, wrap=True)
            picture["draw"](part)
        drawing.save_png(figure, path)


def write(summary, folder):
    """Write the four files into folder. Without any measured run there is only summary.json."""
    write_json(folder / "summary.json", summary)
    if summary["environment"] is None:
        return
    # Cards are made once, with their pictures; the page prints them, and the overview draws them again.
    shown = cards.cards(summary)
    drawn = [picture for card in shown for picture, _ in card["pictures"]]
    if drawn:
        draw_overview(drawn, replays.setting(summary), folder / "stages.png")
    for name, text in {"summary.md": markdown(summary), "report.html": page(summary, shown)}.items():
        with replacing(folder / name) as scratch:
            scratch.write_text(text)
