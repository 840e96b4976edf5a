"""What a replay leaves to be read: summary.json, summary.md, stages.png and report.html."""

from pathlib import Path

import jinja2

from benchmarks import stages
from exercises.performance_debugging import cards, comparison, pictures
from measure import drawing
from measure.results import write_json

TEMPLATE = "report.html.jinja"


def render(summary):
    """The text of report.html: one page that needs no other file, no network and no script."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    labels, rows = stages.comparison_table(summary)
    view = stages.View(summary)
    whole = {name: cards.attempt(function, view)[0] for name, function in pictures.WHOLE.items()}
    return environment.get_template(TEMPLATE).render(
        summary=summary,
        setting=stages.setting(summary),
        cards=cards.cards(summary),
        whole={name: picture for name, picture in whole.items() if picture},
        svg=pictures.svg,
        colors=drawing.css(),
        labels=labels,
        rows=rows,
        notes=stages.notes(summary),
    )


def write(summary, folder):
    """Writes the four files into folder. Without any measured run there is only summary.json."""
    write_json(folder / "summary.json", summary)
    if summary["environment"] is None:
        return
    (folder / "summary.md").write_text(comparison.markdown(summary))
    pictures.write_overview(summary, folder / "stages.png")
    (folder / "report.html").write_text(render(summary))
