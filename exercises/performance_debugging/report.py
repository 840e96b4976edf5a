"""What a replay leaves to be read: summary.json, summary.md, stages.png and report.html."""

import base64
from pathlib import Path

import jinja2

import tiny_llama_v3 as llama
from exercises.performance_debugging import comparison, pictures

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
    labels, rows = comparison.comparison_table(summary)
    return environment.get_template(TEMPLATE).render(
        summary=summary,
        setting=comparison.setting(summary),
        labels=labels,
        rows=rows,
        notes=comparison.NOTES,
        observations=list(comparison.observation_lines(summary)),
        images=images,
    )


def write(summary, folder):
    """Writes the four files into folder. Without any measured run there is only summary.json."""
    llama.write_json(folder / "summary.json", summary)
    if summary["environment"] is None:
        return
    (folder / "summary.md").write_text(comparison.markdown(summary))
    pictures.write_overview(summary, folder / "stages.png")
    (folder / "report.html").write_text(render(summary))
