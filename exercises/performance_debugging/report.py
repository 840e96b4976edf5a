"""Write the results of a replay: summary.json, summary.md and report.html."""

import textwrap
from pathlib import Path

import jinja2

from benchmarks.pages.replays import NOTES, sizes, table_of
from exercises.performance_debugging.cards import MARKS, card
from measure import drawing
from measure.command_line import replacing
from measure.results import write_json

WIDTH = 100  # of a terminal
LAPTOP = (
    "Measured on this CPU: stage 1 in plain PyTorch at the model's full width, the others with a tiny model, in "
    "Triton's interpreter where Triton is installed. Its times say nothing about the kernels on a GPU."
)
SHORT = {  # {figure: its name in a terminal, which has room for those that tell the stages apart}
    "first loss": "first loss",
    "speed, samples/s": "samples/s",
    "speed / previous": "x previous",
    "speed / baseline": "x baseline",
    "step, median, ms": "step, ms",
    "phases / step": "phases",
    "weights with a gradient": "gradient",
}


def wrapped(text, indent=""):
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def setting(summary):
    """Return a line with the device, the versions, the date and the sizes."""
    environment, config = summary["environment"], summary["config"]
    triton = f", Triton {environment['triton']}" if environment["triton"] else ""
    return (
        f"{environment['device']}, PyTorch {environment['torch']}{triton}, {summary['date'][:10]}; batch "
        f"{sizes(summary)}, hidden {config['hidden_dim']}, {config['num_layers']} layers; {config['num_steps']} steps"
    )


def tables(summary):
    """Return [(heading, text, DataFrame with a column for each run)] of all figures, those of recordings last."""
    found = [("This replay", LAPTOP if summary["laptop"] else "", table_of(summary))]
    for replay in summary["recorded"]:
        text = f"Recorded in {replay['file']}, and not measured here: {setting(replay)}."
        found.append((f"Recorded: {sizes(replay)}", text, table_of(replay)))
    return found


def texts(summary):
    """Return {file name: text} of the report and its short form, from the templates beside this file."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=jinja2.select_autoescape(["html.jinja"]),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    context = {
        "summary": summary,
        "setting": setting(summary),
        "cards": [card(summary, stage["stage"]) for stage in summary["stages"]],
        "marks": MARKS,
        "colors": drawing.css(),
        "tables": tables(summary),
        "notes": NOTES,
    }
    names = "summary.md", "report.html"
    return {name: environment.get_template(f"{name}.jinja").render(context) for name in names}


def console(summary):
    """Return the main figures and the observations for a terminal."""
    lines = [wrapped(setting(summary))]
    for heading, text, table in tables(summary):
        lines += ["", wrapped(f"{heading}. {text}"), "", table.T.filter(SHORT).rename(columns=SHORT).to_string()]
    for seen in summary["observations"]:
        source = "" if seen["source"] == "measured" else f", {seen['source']}"
        lines += ["", f"stage {seen['stage']}: {MARKS[seen['shown']]}{source}", wrapped(seen["text"], "    ")]
    return "\n".join(lines)


def write(summary, folder):
    """Write the three files into folder. Without any measured run there is only summary.json."""
    write_json(folder / "summary.json", summary)
    if summary["environment"]:
        for name, text in texts(summary).items():
            with replacing(folder / name) as scratch:
                scratch.write_text(text)
