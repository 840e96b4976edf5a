"""Make a card for each stage: the symptom, the picture that shows it, the lines of code, the fix, and its effect.

Every number is taken from a summary, and every line of code from the script.
"""

import ast
import contextlib
import inspect
import textwrap
from typing import NamedTuple

import tiny_llama_v3 as llama
from benchmarks.pages.replays import label_of, table_of
from exercises.performance_debugging import pictures
from exercises.performance_debugging.evidence import NotMeasured, sources
from exercises.performance_debugging.results import OPTIMIZED, short_title

MARKS = {True: "shows", False: "does not show", None: "not measured"}


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
        ("phases / step",),
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
        ("weights with a gradient", "backward, ms"),
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


# ----------------------------------------------------------------------------------------------------------------------
# What changed


def changes(replay, stage):
    """Return a DataFrame of the figures of two runs: with and without what the stage shows."""
    # Stages up to 4 differ from the next by one flag. Stage 8 is a remedy, so stage 5 is what it was before.
    before, after = {8: (OPTIMIZED, 8)}.get(stage, (stage, min(stage + 1, OPTIMIZED)))
    labels = [label_of(replay.stage(number)) for number in (before, after)]
    figures = [*LESSONS[stage].figures, "step, median, ms", "speed / previous"]
    if stage == OPTIMIZED:
        labels[0], figures[-1] = "baseline", "speed / baseline"
        if not replay.summary["baseline"]:
            raise NotMeasured("the baseline was not measured")
    table = table_of(replay.summary)[labels].filter(figures, axis="index")
    # The speed of the later stage is relative to the other run, that of the other one to a third.
    table.loc[table.index == figures[-1], labels[before > after]] = ""
    return table


# ----------------------------------------------------------------------------------------------------------------------
# The lines of the script


def excerpts(mark):
    """Yield (the number of the first line, lines) of what the lines with a mark stand before or in.

    That is the function of a docstring, and otherwise the next statement.
    """
    # A mark is a comment at the end of a line, a line of its own, or in a docstring.
    text = inspect.getsource(llama)
    lines, nodes = text.splitlines(), [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    nodes.sort(key=lambda node: node.lineno)
    for at, line in enumerate(lines, 1):
        if mark in line:
            around = [node for node in nodes if hasattr(node, "name") and node.lineno <= at <= node.end_lineno]
            node = around[-1] if '"""' in line else next(node for node in nodes if node.lineno >= at)
            first = min(at, node.lineno)
            yield first, textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno])).splitlines()


# ----------------------------------------------------------------------------------------------------------------------
# Cards


def card(summary, stage):
    """Return the card of a stage, as report.html.jinja shows it."""
    lesson, found = LESSONS[stage], {}
    seen = [each for each in summary["observations"] if each["stage"] == stage]
    # What shows the sign comes first. Of a CPU nothing else is used: its times tell nothing.
    shows = [each["source"] for each in seen if each["shown"]]
    replays = sources(summary)
    others = [source for source, replay in replays.items() if not replay.on_cpu and stage in replay.stages]
    for source in dict.fromkeys([*shows, *others]):
        for name, make in ("picture", pictures.STAGES[stage]), ("changes", lambda replay: changes(replay, stage)):
            if source in replays and name not in found:
                with contextlib.suppress(NotMeasured):
                    found[name] = make(replays[source]), source
    if "picture" in found:
        chart, source = found["picture"]
        found["picture"] = chart.title, pictures.draw(chart, f"picture{stage}"), source
    flag = next((name for name, bug in llama.BUGS.items() if stage in bug.stages[-1:]), None)
    # Stage 8 has no mistake: its lines are those of the remedy.
    mark = f"BUG {flag}:" if flag else "def capture("
    return found | {
        "number": stage,
        "title": short_title(stage),
        "best": max(seen, key=lambda each: (each["shown"] is not None, bool(each["shown"]))),
        "symptom": lesson.symptom,
        "evidence": seen,
        "flag": flag and llama.flag_of(flag),
        "excerpts": list(excerpts(mark)) if stage != OPTIMIZED else [],
        "fix": lesson.fix,
    }
