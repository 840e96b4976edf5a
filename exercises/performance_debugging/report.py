"""What a replay leaves to be read: summary.json, summary.md, stages.png and report.html."""

import base64
from pathlib import Path

import jinja2

from benchmarks import stages
from exercises.performance_debugging import comparison, pictures
from measure.results import write_json

TEMPLATE = "report.html.jinja"


def render(summary):
    """The text of report.html: one page that needs no other file and no network."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    images = [
        {"name": name, "alt": alt, "data": base64.b64encode(pictures.png(draw, summary)).decode()}
        for name, (draw, alt) in pictures.pictures(summary).items()
    ]
    labels, rows = stages.comparison_table(summary)
    return environment.get_template(TEMPLATE).render(
        summary=summary,
        setting=stages.setting(summary),
        labels=labels,
        rows=rows,
        notes=stages.notes(summary),
        observations=list(stages.observation_lines(summary)),
        images=images,
    )


def write(summary, folder):
    """Writes the four files into folder. Without any measured run there is only summary.json."""
    write_json(folder / "summary.json", summary)
    if summary["environment"] is None:
        return
    (folder / "summary.md").write_text(comparison.markdown(summary))
    pictures.write_overview(summary, folder / "stages.png")
    (folder / "report.html").write_text(render(summary))
