"""Make a card for each stage: the symptom, the picture that shows it, the lines of code, the fix, and its effect.

Every number is taken from a summary, and every line of code from the script. Missing measurements are named.
"""

import ast
import functools
import inspect
import textwrap
from typing import NamedTuple

import pandas

import tiny_llama_v3 as llama
from benchmarks.pages import replays
from benchmarks.pages.replays import OPTIMIZED, NotMeasured, Replay
from exercises.performance_debugging import pictures
from measure import drawing
from measure.tables import number, percent, times
from measure.timing import LEAST_TIMES, ratio_of_medians
from profilers.kernel_names import operation_of, readable_name

INTERPRETER = "Counted in Triton's interpreter"
TOP_KERNELS = 8


class Lesson(NamedTuple):
    """The texts of a card, and the figures of the table that the fix changes."""

    symptom: str  # as a participant notices it
    fix: str
    figures: tuple = ()


LESSONS = {
    1: Lesson(
        "The first loss is in the hundreds, where a model that knows nothing should begin at ln(vocab).",
        "init_weights draws every matrix from N(0, 0.02), and less for the layers that add to the residual stream. In "
        "a model with a tied head it counts twice: for what comes in and for what goes out.",
        ("first loss", "final loss"),
    ),
    2: Lesson(
        "The loss is right and the step tells nothing, but one call of the attention kernel takes longer than its work "
        "explains.",
        "Hand the kernel K and V whose last dimension has stride 1: here the views that split_heads makes. Ask for "
        "stride(), not for is_contiguous().",
        ("attention kernel, us",),
    ),
    3: Lesson(
        "Forward, backward and optimizer look very fast, but add up to a fraction of the step.",
        "Events on the device around each phase, and one synchronization a step to read them. The flag changes no "
        "speed: it changes what you believe about it.",
        ("phases / step, %",),
    ),
    4: Lesson(
        "Now that the times are true, forward is slower than plain PyTorch's.",
        "The library multiplies the matrices, a small kernel of ours does silu(gate) * up.",
        ("forward, ms",),
    ),
    5: Lesson(
        "None: the first loss is ln(vocab), the phases add up, and every weight receives a gradient.",
        "Nothing left to mend by a flag. The comparison counts because the gradients agree (--check), and because "
        "plain PyTorch was measured in the same replay, on the same data, from the same weights.",
        ("peak memory, MiB",),
    ),
    6: Lesson(
        "The first loss shows nothing, but backward is many times faster than in stage 5.",
        "An autograd.Function around every kernel, and a test of every gradient. Count the weights that receive one.",
        ("weights with a gradient, %", "backward, ms"),
    ),
    7: Lesson(
        "The average step is slow, although the run feels fast.",
        "Warm-up steps that are not measured, and the median beside the mean.",
        ("mean / median",),
    ),
    8: Lesson(
        "In stage 5 the host needs about as long to launch the kernels of a step as the step takes.",
        "No mistake but a remedy: the step is captured once and replayed with one launch a phase. It helps if the "
        "device waits for the host.",
    ),
}
STEP = "step, median, ms"
TIMES = {  # {figure: its samples in a run}
    STEP: lambda run: run["step_ms"],
    "forward, ms": lambda run: run.get("phase_steps_ms", {}).get("forward", ()),
    "backward, ms": lambda run: run.get("phase_steps_ms", {}).get("backward", ()),
}

# ----------------------------------------------------------------------------------------------------------------------
# What changed


def verdict(before, after, between=1.0):
    """Say how two sets of times differ; between: see measure.timing.ratio_of_medians."""
    # Of three times each, all of one side are above the other's in one case of ten by chance.
    if min(map(len, (before, after))) < LEAST_TIMES:
        return "too few steps to tell"
    ratio = ratio_of_medians(before, after, between)
    if not ratio.differs:
        return "no difference beyond the spread"
    return f"{times(ratio.value)} as fast" if ratio.value >= 1 else f"{times(1 / ratio.value)} as slow"


def frame_of(table):
    """Return the DataFrame of a table of benchmarks.pages.replays, with a row for each run."""
    labels, rows = table
    return pandas.DataFrame(dict(rows), index=labels)


def changes(replay, stage, table, runs):
    """Return (labels, [(figure, before, after, verdict on times)]) of two runs, {label: run}, from their table."""
    # Two processes that did the same work differ as well: only what exceeds that is a difference.
    rows, between = [], replays.spread_of_processes(replay.summary)
    alike = len({replays.work_of(run) for run in runs.values()}) == 1
    for figure, shown in frame_of(table).loc[list(runs)].filter((*LESSONS[stage].figures, STEP)).items():
        difference = ""
        if figure in TIMES:
            # On a CPU all stages run the same operations, or the interpreter: its times tell nothing.
            if replay.on_cpu():
                continue
            difference = "the same work: noise" if alike else verdict(*map(TIMES[figure], runs.values()), between)
        rows.append((figure, *shown, difference))
    return list(runs), rows


def with_and_without(replay, stage):
    """Return the changes between a stage and the next one, or stage 5: with and without what it shows."""
    # Stages up to 4 differ from the next by one flag. Stage 8 is a remedy, so stage 5 is what it was before.
    runs, others = {}, {OPTIMIZED: (None, OPTIMIZED), 8: (OPTIMIZED, 8)}
    for n in others.get(stage, (stage, min(stage + 1, OPTIMIZED))):
        run = replay.stage(n) if n else replay.summary["baseline"]
        if not run:
            raise NotMeasured("the baseline was not measured")
        runs[replays.label_of(run) if n else "baseline"] = run
    return changes(replay, stage, replays.comparison_table(replay.summary), runs)


def alone(replay, stage):
    """Return the changes between the stage's mistake alone and stage 5."""
    mistake, optimized = replays.own_mistake(stage), replay.stage(OPTIMIZED)
    for run in replay.summary.get("isolated", []):
        if run["mistake"] == mistake and "batch_ms" in run:
            runs = {llama.flag_of(mistake): run, replays.label_of(optimized): optimized}
            return changes(replay, stage, replays.isolated_table(replay.summary), runs)
    raise NotMeasured("Not recorded: run_all_stages.sh --isolate replays each mistake alone beside stage 5")


def kernels(replay, stage):
    """Return the rows of the kernels that take the most time."""
    rows = []
    for kernel in (replay.stage(stage)["kernels"] or [])[:TOP_KERNELS]:
        name, us, share = kernel["name"], number(kernel["average_us"]), percent(kernel["share"])
        rows.append((operation_of(name), readable_name(name), name, kernel["calls"], us, share))
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# The lines of the script


# Parsing the script takes longer than all the rest of a card.
@functools.cache
def script():
    """Return the lines of the script, and its statements in their order."""
    text = inspect.getsource(llama)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    return text.splitlines(), sorted(nodes, key=lambda node: node.lineno)


def excerpts(mark):
    """Yield (the function, the number of the first line, lines) of what the lines with a mark stand before or in.

    That is the function of a docstring, and otherwise the next statement.
    """
    # A mark is a comment at the end of a line, a line of its own, or in a docstring.
    lines, nodes = script()
    for at, line in enumerate(lines, 1):
        if mark in line:
            scopes = [node for node in nodes if hasattr(node, "name") and node.lineno <= at <= node.end_lineno]
            node = scopes[-1] if '"""' in line else next(node for node in nodes if node.lineno >= at)
            first = min(at, node.lineno, *(each.lineno for each in getattr(node, "decorator_list", [])))
            text = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno]))
            yield ".".join(scope.name for scope in scopes), first, text.splitlines()


# ----------------------------------------------------------------------------------------------------------------------
# Cards


class Evidence(NamedTuple):
    """An observation, and the replay or the counts from which it follows."""

    mark: str  # of replays.MARKS
    text: str
    replay: Replay | None  # None of counts
    place: str | None  # where it was seen, if not in this replay


def sources(summary):
    """Return [(Replay, where it was recorded)] of a summary's own figures and of the recordings that it shows."""
    found = [(Replay(summary), None)]
    for replay in summary["recorded"]:
        device, date = replay["environment"]["device"], replay["date"][:10]
        found.append((Replay(replay), f"Recorded on {device}, {date} ({replays.sizes(replay)})"))
    return found


def evidence_of(summary, stage):
    """Yield the Evidence of a stage: measured, counted, and recorded."""
    # Observations name the device of a recording only; their order is that of the recordings.
    own, *recorded = sources(summary)
    recorded = (source for source in recorded if stage in source[0].stages)
    for seen in summary["observations"]:
        if seen["stage"] == stage:
            by_source = {"measured": own, "counted": (None, INTERPRETER)}
            source = by_source.get(seen["source"]) or next(recorded)
            text = seen["text"].removeprefix(f"{replays.sizes(source[0].summary)}: ") if source[0] else seen["text"]
            yield Evidence(replays.MARKS[seen["shown"]], text, *source)


def first_of(function, sources, *arguments):
    """Return (function(replay, ...), its place) of the first source that has the figures, else (None, the reason)."""
    reason = "a CPU does not show it"
    for replay, place in sources:
        try:
            return function(replay, *arguments), place
        except NotMeasured as error:
            reason = str(error)
    return None, reason


def picture_of(data, function, name):
    """Return a picture for the page, on which no other has its name, and the function that draws it again."""
    # A function knows the height of its picture only when it has drawn it.
    with drawing.style():
        figure = drawing.new_figure(100)
        picture = function(figure, data)
        figure.set_figheight(picture.height / figure.dpi)
        svg = drawing.svg(figure, name, picture.title, "; ".join(picture.words))
    return {"title": picture.title, "height": picture.height, "svg": svg, "draw": lambda part: function(part, data)}


def card(summary, stage):
    """Return the card of a stage, as report.html.jinja shows it."""
    lesson, flag = LESSONS[stage], replays.own_mistake(stage)
    evidence = list(evidence_of(summary, stage))
    shows = [each for each in evidence if each.mark == replays.MARKS[True]]
    # What shows the sign comes first. Of a CPU nothing else is used: its times tell nothing.
    others = [each for each in evidence if each not in shows and each.replay and not each.replay.on_cpu()]
    usable = [(each.replay, each.place) for each in shows + others if each.replay]
    picture, place = first_of(picture_of, usable, pictures.STAGES[stage], f"picture{stage}")
    shown = [(picture, place)] if picture else []
    if any(each.replay is None for each in evidence):
        shown.insert(0, (picture_of(summary, pictures.COUNTED[stage], f"counted{stage}"), INTERPRETER))
    changed, source = first_of(with_and_without, usable, stage)
    # Stage 8 has no mistake: its lines are those of the remedy.
    mark = f"BUG {flag}:" if flag else "def capture("
    return {
        "number": stage,
        "title": replays.short_title(stage),
        "best": (shows or evidence)[0],
        "symptom": lesson.symptom,
        "evidence": evidence,
        "pictures": shown,
        "no_picture": None if picture else place,
        "flag": flag and llama.flag_of(flag),
        "excerpts": list(excerpts(mark)) if stage != OPTIMIZED else [],
        "fix": lesson.fix,
        "changes": changed,
        "source": source if changed else None,
        "alone": first_of(alone, usable, stage) if flag and len(llama.stage_flags(stage)) > 1 else None,
        "kernels": first_of(kernels, usable, stage)[0] if stage in (4, OPTIMIZED) else None,
    }


def cards(summary):
    return [card(summary, stage["stage"]) for stage in summary["stages"]]
