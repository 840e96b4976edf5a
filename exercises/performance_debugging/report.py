"""Write the results of a replay: summary.json, summary.md and report.html.

The report has a picture of the steps, and a card for each stage: the symptom, the figures that show it, the lines of
code, the fix. Every number is taken from the summary, and every line of code from the script.
"""

import inspect
import itertools
import textwrap
from pathlib import Path

import jinja2

import tiny_llama_v3 as llama
from benchmarks.pages.replays import measured_stages, notes_of, sizes, table_of
from exercises.performance_debugging.evidence import sources
from exercises.performance_debugging.results import OPTIMIZED, short_title
from measure import drawing
from measure.command_line import replacing
from measure.drawing import BLUE, GREEN, RED, Bar, Filling
from measure.results import write_json
from measure.tables import number, percent

MARKS = {True: "symptom seen", False: "does not show", None: "not measured"}
TITLE = "The phases, inside the outline of the median step (and p20 – p80)"
PHASES = {"forward": Filling(BLUE), "backward": Filling(RED, "////"), "optimizer": Filling(GREEN, "----")}


LESSONS = {  # {stage: (symptom, as a participant notices it; fix)}
    1: (
        "The first loss is about the hidden size, where a model that knows nothing should begin at ln(vocab).",
        "init_weights draws every matrix from N(0, 0.02), and less for the layers that add to the residual stream. In "
        "a model with a tied head it counts twice: for what comes in and for what goes out.",
    ),
    2: (
        "The loss is right and the step tells nothing, but one call of the attention kernel takes longer than its work "
        "explains.",
        "Hand the kernel K and V whose last dimension has stride 1: here the views that split_heads makes. Ask for "
        "stride(), not for is_contiguous().",
    ),
    3: (
        "Forward, backward and optimizer look very fast, but add up to a fraction of the step.",
        "Events on the device around each phase, and one synchronization a step to read them. The flag changes no "
        "speed: it changes what you believe about it.",
    ),
    4: (
        "Now that the times are true, forward is slower than plain PyTorch's.",
        "The library multiplies the matrices, a small kernel of ours does silu(gate) * up.",
    ),
    5: (
        "None: the first loss is ln(vocab), the phases add up, and every weight receives a gradient.",
        "Nothing left to mend by a flag. Compare the gradients with plain PyTorch's (--check) before you compare "
        "speeds, and compare those of one replay, on the same data, from the same weights.",
    ),
    6: (
        "The first loss shows nothing, but backward is many times faster than in stage 5.",
        "An autograd.Function around every kernel, and a test of every gradient. Count the weights that receive one.",
    ),
    7: (
        "The average step is slow, although the run feels fast.",
        "Warm-up steps that are not measured, and the median beside the mean.",
    ),
    8: (
        "In stage 5 the host needs about as long to launch the kernels of a step as the step takes.",
        "No mistake but a remedy: the step is captured once and replayed with one launch a phase. It helps if the "
        "device waits for the host.",
    ),
}


# ----------------------------------------------------------------------------------------------------------------------
# Cards


def excerpts(mark):
    """Yield (number, lines) of the script from each line with a mark on, down to the next empty line."""
    lines = inspect.getsource(llama).splitlines()
    for at, line in enumerate(lines, 1):
        if mark in line:
            block = itertools.takewhile(str.strip, lines[at - 1 :])
            yield at, textwrap.dedent("\n".join(block)).splitlines()


def card(seen):
    """Return the card of an observation, as report.html.jinja shows it."""
    stage = seen["stage"]
    symptom, fix = LESSONS[stage]
    flag = next((name for name, bug in llama.BUGS.items() if stage in bug.stages[-1:]), None)
    # Stage 8 has no mistake: its lines are those of the remedy.
    mark = f"BUG {flag}:" if flag else "def capture("
    return seen | {
        "title": short_title(stage),
        "symptom": symptom,
        "flag": flag and llama.flag_of(flag),
        "excerpts": list(excerpts(mark)) if stage != OPTIMIZED else [],
        "fix": fix,
    }


# ----------------------------------------------------------------------------------------------------------------------
# The picture


def step_bars(replay):
    """Return a Bar for plain PyTorch and for each stage: the phases inside the outline of the median step.

    What is left of a step was not timed.
    """
    rows = []
    for n, run in ({0: replay.summary["baseline"]} | replay.stages).items():
        if run:
            low, middle, high = (run["batch_ms"][key] for key in ("p20", "p50", "p80"))
            label = f"{f'stage {n}' if n else 'plain PyTorch'}: {number(middle)} ms ({number(low)} – {number(high)})"
            if run["phases_share"]:
                label += f", phases {percent(run['phases_share'])}"
            rows.append(Bar(label, [(ms, PHASES[phase]) for phase, ms in run["phase_ms"].items()], outline=middle))
    return rows


def picture_of(replay, name):
    """Return the SVG of the steps of a Replay, for a page on which no other has its name."""
    rows = step_bars(replay)
    with drawing.style():
        figure = drawing.new_figure(drawing.bars_height(len(rows), 56))
        axes = figure.subplots()
        drawing.bars(axes, rows)
        axes.set_xlabel("ms")
        drawing.legend_below(figure, PHASES)
        return drawing.svg(figure, name, TITLE, "; ".join(row.label for row in rows))


# ----------------------------------------------------------------------------------------------------------------------
# Files


def setting(summary):
    """Return a line with the device, the date and the sizes; the versions stand under the cards."""
    config = summary["config"]
    return (
        f"{summary['environment']['device']}, {summary['date'][:10]}; batch {sizes(summary)}, hidden "
        f"{config['hidden_dim']}, layers {config['num_layers']}, steps {config['num_steps']}"
    )


def laptop_note(summary):
    """Return what to know of the figures of a replay with --laptop, and nothing of another one."""
    if not summary["laptop"]:
        return ""
    kernels = any(stage["implementation"] == "triton" for stage in measured_stages(summary).values())
    where = "in Triton's interpreter" if kernels else "by plain PyTorch, as Triton is not installed"
    return f"Measured on this CPU, {where}. Its times say nothing about the kernels on a GPU."


def texts(summary):
    """Return {name: text} of the report and its short forms, from the templates beside this file."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=jinja2.select_autoescape(["html.jinja"]),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    table = table_of(summary)
    context = {
        "summary": summary,
        "setting": setting(summary),
        "cards": list(map(card, summary["observations"])),
        "marks": MARKS,
        # The times of a CPU tell nothing.
        "pictures": {
            source: picture_of(replay, f"picture{number}")
            for number, (source, replay) in enumerate(sources(summary).items())
            if not replay.on_cpu
        },
        "title": TITLE,
        "colors": drawing.css(),
        "laptop": laptop_note(summary),
        "table": table,
        "notes": notes_of(table),
    }
    names = "summary.md", "report.html", "console.txt"
    return {name: environment.get_template(f"{name}.jinja").render(context) for name in names}


def write(summary, folder):
    """Write the three files into folder, and return the statements for a terminal."""
    write_json(folder / "summary.json", summary)
    found = texts(summary)
    for name in ("summary.md", "report.html"):
        with replacing(folder / name) as scratch:
            scratch.write_text(found[name])
    return found["console.txt"]
