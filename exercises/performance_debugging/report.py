"""Writes the results of a replay: summary.json, summary.md, stages.png and report.html."""

from pathlib import Path
from typing import NamedTuple

import jinja2

from benchmarks.pages import replays
from exercises.performance_debugging import pictures, report_cards
from exercises.performance_debugging.summary import ALONE, COUNTED, laptop_line, markdown, recorded_line
from measure import drawing
from measure.command_line import replacing
from measure.results import write_json

TEMPLATE = "report.html.jinja"


class FigureTable(NamedTuple):
    """A table of benchmarks.pages.replays with its heading."""

    heading: str
    text: str | None
    labels: list
    rows: list


def tables(summary):
    """Yields all figures as FigureTables: of this replay, each mistake alone, the counts, and recordings."""
    laptop = laptop_line(summary) if summary.get("laptop") else None
    yield FigureTable("This replay", laptop, *replays.comparison_table(summary))
    if summary.get("isolated"):
        yield FigureTable("Each mistake alone", ALONE, *replays.isolated_table(summary))
    if summary.get("counted"):
        yield FigureTable("Counted", COUNTED, *replays.counted_table(summary))
    for replay in summary.get("recorded", []):
        heading = f"Recorded: {replays.sizes(replay)}"
        yield FigureTable(heading, recorded_line(replay), *replays.comparison_table(replay))


def whole(summary):
    """Yields (name, (Picture, where it was recorded or None)) of the pictures of all stages together."""
    sources = [(replays.Replay(summary), None)]
    sources += [(replays.Replay(replay), report_cards.recorded_on(replay)) for replay in summary.get("recorded", [])]
    for name, function in pictures.WHOLE.items():
        drawn = ((report_cards.attempt(function, replay)[0], source) for replay, source in sources)
        found = next((each for each in drawn if each[0]), None)
        if found:
            yield name, found


def render(summary):
    """The text of report.html, a page that needs no other file, no network and no script."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(TEMPLATE).render(
        summary=summary,
        setting=replays.setting(summary),
        cards=report_cards.cards(summary),
        whole=dict(whole(summary)),
        svg=pictures.svg,
        colors=drawing.css(),
        tables=list(tables(summary)),
        notes=replays.notes(summary),
    )


def write_overview(summary, path):
    """Writes the pictures of all cards into one PNG file, if there are any."""
    chosen = [each.picture for card in report_cards.cards(summary) for each in card.evidence if each.picture]
    if chosen:
        pictures.write_overview(chosen, replays.setting(summary), path)


def write(summary, folder):
    """Writes the four files into folder. Without any measured run there is only summary.json."""
    write_json(folder / "summary.json", summary)
    if summary["environment"] is None:
        return
    write_overview(summary, folder / "stages.png")
    for name, text in {"summary.md": markdown(summary), "report.html": render(summary)}.items():
        with replacing(folder / name) as scratch:
            scratch.write_text(text)
