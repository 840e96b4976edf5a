"""What a replay leaves to be read: summary.json, summary.md, stages.png and report.html."""

from pathlib import Path
from typing import NamedTuple

import jinja2

from benchmarks import stages
from exercises.performance_debugging import cards, comparison, pictures
from measure import drawing
from measure.results import write_json

TEMPLATE = "report.html.jinja"


class FigureTable(NamedTuple):
    """A table of benchmarks.stages under its heading."""

    heading: str
    text: str | None
    labels: list
    rows: list


def tables(summary):
    """All figures as FigureTables: this replay's, each mistake alone, what was counted, what was recorded elsewhere."""
    laptop = comparison.laptop_line(summary) if summary.get("laptop") else None
    yield FigureTable("This replay", laptop, *stages.comparison_table(summary))
    if summary.get("isolated"):
        yield FigureTable("Each mistake alone", comparison.ALONE, *stages.isolated_table(summary))
    if summary.get("counted"):
        yield FigureTable("Counted", comparison.COUNTED, *stages.counted_table(summary))
    for replay in summary.get("recorded", []):
        heading = f"Recorded: {stages.sizes(replay)}"
        yield FigureTable(heading, comparison.recorded_line(replay), *stages.comparison_table(replay))


def whole(summary):
    """{name: (Picture, where it was recorded or None)} of the pictures of all stages together."""
    views = [(stages.View(summary), None)]
    views += [(stages.View(replay), cards.recorded_on(replay)) for replay in summary.get("recorded", [])]
    for name, function in pictures.WHOLE.items():
        drawn = ((cards.attempt(function, view)[0], source) for view, source in views)
        found = next((each for each in drawn if each[0]), None)
        if found:
            yield name, found


def render(summary):
    """The text of report.html: one page that needs no other file, no network and no script."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(TEMPLATE).render(
        summary=summary,
        setting=stages.setting(summary),
        cards=cards.cards(summary),
        whole=dict(whole(summary)),
        svg=pictures.svg,
        colors=drawing.css(),
        tables=list(tables(summary)),
        notes=stages.notes(summary),
    )


def write_overview(summary, path):
    """The pictures of all cards in one PNG file; none if there are no pictures."""
    chosen = [each.picture for card in cards.cards(summary) for each in card.evidence if each.picture]
    if chosen:
        pictures.write_overview(chosen, stages.setting(summary), path)


def write(summary, folder):
    """Writes the four files into folder. Without any measured run there is only summary.json."""
    write_json(folder / "summary.json", summary)
    if summary["environment"] is None:
        return
    (folder / "summary.md").write_text(comparison.markdown(summary))
    write_overview(summary, folder / "stages.png")
    (folder / "report.html").write_text(render(summary))
