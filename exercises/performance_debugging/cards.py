"""A card a stage: what a participant meets, the picture that shows it, the lines behind it, the fix, what it changed.

Every number comes from a summary, every line of code from the script. What was not measured says so.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import tiny_llama_v3 as llama
from benchmarks import stages
from benchmarks.stages import OPTIMIZED, Missing, View
from exercises.performance_debugging import pictures, source
from measure.tables import number, percent, times
from measure.timing import LEAST_TIMES, percentiles, ratio_of_medians
from profiling.kernel_names import operation_of, readable_name


class Lesson(NamedTuple):
    """What a card says beside the figures."""

    symptom: Callable  # of a View: a sentence with its numbers
    fix: str
    changes: Callable  # of a View and two of its runs: yields Changes
    flag: str | None = None  # one of llama.BUGS
    code: object = None  # a function of the script, where there is no flag


class Change(NamedTuple):
    """A figure of two runs."""

    figure: str
    before: str
    after: str
    verdict: str = ""  # of times: what their spread allows to say


class Table(NamedTuple):
    """The Changes between two runs."""

    runs: tuple  # their names
    changes: list


class KernelRow(NamedTuple):
    """A line of the table of a stage's kernels."""

    role: str
    name: str  # readable
    full_name: str
    calls: int
    us: str  # of a call
    share: str


class Evidence(NamedTuple):
    """An observation and what shows it."""

    mark: str  # of stages.MARKS
    source: str | None  # where it is from, if not measured in this replay
    text: str
    picture: pictures.Picture | None
    no_picture: str | None  # why


class Card(NamedTuple):
    """What the report shows of a stage."""

    number: int
    title: str
    mark: str  # of its best evidence
    mark_source: str | None
    symptom: str | None
    told_by: str | None  # where the symptom and the changes are from, if not measured in this replay
    evidence: list
    flag: str | None
    excerpts: list
    fix: str
    changes: Table | None
    alone: Table | None  # the mistake by itself beside stage 5
    not_alone: str | None  # why that is not known
    kernels: list


# ----------------------------------------------------------------------------------------------------------------------
# Symptoms: as a participant meets them


def wrong_loss(view):
    first, vocabulary = view.stage(1)["first_loss"], pictures.config_of(view, 1).vocab_size
    guessing = f"a model that knows nothing should begin at ln {vocabulary} = {number(math.log(vocabulary))}"
    return f"The first loss is {number(first) if first is not None else 'not a number'}, and {guessing}."


def slow_attention(view):
    view.kernels(2), view.kernels(3)
    slow, correct = view.stage(2)["attention_us"], view.stage(3)["attention_us"]
    if not (slow and correct):
        raise Missing(f"the profile has no {stages.ATTENTION_KERNEL}")
    return (
        f"The loss is right and the step tells nothing, but one call of the attention kernel takes {number(slow)} us "
        f"where the same work could take {number(correct)}."
    )


def fast_phases(view):
    stage = view.stage(3)
    if not stage["phases_share"]:
        raise Missing("--timing step does not time phases")
    together, step = sum(stage["phase_ms"].values()), stage["batch_ms"]["p50"]
    return f"Forward, backward and optimizer take {number(together)} ms together, and the step takes {number(step)}."


def slow_forward(view):
    forward, baseline = view.stage(4)["phase_ms"].get("forward"), view.summary["baseline"]
    if not forward:
        raise Missing("--timing step does not time phases")
    text = f"Now that the times are true, forward takes {number(forward)} ms"
    return f"{text}, and plain PyTorch's {number(baseline['phase_ms']['forward'])}." if baseline else f"{text}."


def good_step(view):
    view.require_times()
    step, baseline = view.stage(OPTIMIZED)["batch_ms"]["p50"], view.summary["baseline"]
    text = f"A step takes {number(step)} ms"
    return f"{text}; plain PyTorch's took {number(baseline['batch_ms']['p50'])}." if baseline else f"{text}."


def cheap_backward(view):
    severed, correct = (view.stage(n)["phase_ms"].get("backward") for n in (6, OPTIMIZED))
    loss = f"the first loss is {number(view.stage(6)['first_loss'])}, as it should be"
    if not (severed and correct) or view.on_cpu():
        return f"None: {loss}."
    return (
        f"None: {loss}, and backward, {number(correct)} ms in stage {OPTIMIZED}, takes {number(severed)} ms. "
        "That looks like success."
    )


def slow_average(view):
    mean, median = (view.stage(7)["batch_ms"][key] for key in ("mean", "p50"))
    return f"The average step takes {number(mean)} ms, and the run feels like {number(median)}."


def waiting_device(view):
    stage = view.stage(OPTIMIZED)
    return (
        f"In stage {OPTIMIZED} the host needs {number(stage['host_ms'])} ms of a step of "
        f"{number(stage['batch_ms']['p50'])} ms to launch its kernels."
    )


# ----------------------------------------------------------------------------------------------------------------------
# What changed


def with_spread(samples, unit="ms"):
    spread = percentiles(samples)
    return f"{number(spread['median'])} {unit} ({number(spread['p20'])} – {number(spread['p80'])})"


NO_DIFFERENCE = {
    "same": "no difference beyond the spread",
    "same work": "the same work: noise",
    "too few steps": "too few steps to tell",
}


def faster(factor):
    return f"{times(factor)} as fast" if factor >= 1 else f"{times(1 / factor)} as slow"


def time_change(figure, before, after, unit="ms", between=1.0):
    """A Change of two sets of times of different work; between as measure.timing.ratio_of_medians has it."""
    ratio = ratio_of_medians(before, after, between)
    if min(len(before), len(after)) < LEAST_TIMES:
        verdict = NO_DIFFERENCE["too few steps"]
    else:
        verdict = faster(ratio.value) if ratio.differs else NO_DIFFERENCE["same"]
    return Change(figure, with_spread(before, unit), with_spread(after, unit), verdict)


def step_change(view, before, after):
    """The Change of the median step; on a CPU there is none to tell."""
    if view.on_cpu():
        return
    speed = view.speed(after, before)
    verdict = NO_DIFFERENCE.get(speed["verdict"]) or faster(speed["value"])
    yield Change("step", with_spread(before["step_ms"]), with_spread(after["step_ms"]), verdict)


def phase_change(view, phase, before, after):
    """The Change of a phase; none on a CPU, and of a replay that kept no step's phases."""
    steps = [run.get("phase_steps_ms", {}).get(phase) for run in (before, after)]
    if None not in steps and not view.on_cpu():
        yield time_change(phase, *steps, between=stages.spread_of_processes(view.summary))


def compared(figure, runs, text):
    """A Change of a figure that has no spread."""
    return Change(figure, *(text(run) for run in runs))


def loss_changes(view, *runs):
    for name in ("first", "final"):
        yield compared(f"{name} loss", runs, lambda run, name=name: number(run[f"{name}_loss"]))
    yield from step_change(view, *runs)


def attention_changes(view, *runs):
    if all(run.get("attention_us") for run in runs):
        yield compared("attention kernel in the step, mean", runs, lambda run: f"{number(run['attention_us'])} us")
    rows = (view.summary.get("attention_layouts") or {"lengths": []})["lengths"]
    for row in rows if "mistake" not in runs[0] else []:
        if row["seq_len"] in (view.config.seq_len, rows[-1]["seq_len"]):
            figure = f"attention kernel alone, {row['seq_len']} tokens"
            yield time_change(figure, row["strided"], row["contiguous"], "us")
    yield from step_change(view, *runs)


def timing_changes(view, *runs):
    yield compared("phases / step", runs, lambda run: percent(run["phases_share"]) if run["phases_share"] else "")
    yield from step_change(view, *runs)


def kernel_changes(view, *runs):
    yield from phase_change(view, "forward", *runs)
    yield from step_change(view, *runs)


def baseline_changes(view, *runs):
    yield from step_change(view, *runs)
    yield compared("peak memory", runs, lambda run: f"{number(run['peak_memory_mib'])} MiB")


def gradient_changes(view, *runs):
    yield compared("weights with a gradient", runs, lambda run: percent(run["gradient_share"]))
    yield from phase_change(view, "backward", *runs)
    yield from step_change(view, *runs)


def warmup_changes(view, *runs):
    yield compared("first step", runs, lambda run: f"{number(run['step_ms'][0])} ms")
    yield compared("mean step", runs, lambda run: f"{number(run['batch_ms']['mean'])} ms")
    yield from step_change(view, *runs)


def graph_changes(view, *runs):
    yield compared("host time to issue a step", runs, lambda run: f"{number(run['host_ms'])} ms")
    yield from step_change(view, *runs)


# ----------------------------------------------------------------------------------------------------------------------

LESSONS = {
    1: Lesson(
        wrong_loss,
        "init_weights draws every matrix from N(0, 0.02), and less for the layers that add to the residual stream. In "
        "a model with a tied head it counts twice: for what comes in and for what goes out.",
        loss_changes, "no_init",
    ),
    2: Lesson(
        slow_attention,
        "Hand the kernel K and V whose last dimension has stride 1: here the views that split_heads makes. Ask for "
        "stride(), not for is_contiguous().",
        attention_changes, "noncontiguous_kv",
    ),
    3: Lesson(
        fast_phases,
        "Events on the device around each phase, and one synchronization a step to read them. The flag changes no "
        "speed: it changes what you believe about it.",
        timing_changes, "unsynced_timing",
    ),
    4: Lesson(
        slow_forward,
        "The library multiplies the matrices, a small kernel of ours does silu(gate) * up.",
        kernel_changes, "triton_matmul_swiglu",
    ),
    5: Lesson(
        good_step,
        "Nothing left to mend by a flag. The comparison counts because the gradients agree (--check), and because "
        "plain PyTorch was measured in the same replay, on the same data, from the same weights.",
        baseline_changes,
    ),
    6: Lesson(
        cheap_backward,
        "An autograd.Function around every kernel, and a test of every gradient. Count the weights that receive one.",
        gradient_changes, "severed_autograd",
    ),
    7: Lesson(
        slow_average,
        "Warm-up steps that are not measured, and the median beside the mean.",
        warmup_changes, "no_warmup",
    ),
    8: Lesson(
        waiting_device,
        "Not a mistake but a cure: the step is captured once and replayed with one launch a phase. It helps as far as "
        "the device waited for the host.",
        graph_changes, code=llama.TrainStep.capture,
    ),
}  # fmt: skip


def pair_of(view, stage):
    """((name, run), (name, run)): with the mistake and without it, or the other way round the cure."""
    if stage == OPTIMIZED:
        if not view.summary["baseline"]:
            raise Missing("the baseline was not measured")
        return ("plain PyTorch", view.summary["baseline"]), (f"stage {stage}", view.stage(stage))
    with_it, without = (stage, stage + 1) if stage < OPTIMIZED else (stage, OPTIMIZED)
    if stage == 8:
        with_it, without = without, with_it
    return tuple((f"stage {number}", view.stage(number)) for number in (with_it, without))


def table_of(view, stage, pair):
    """The Table of what changed between the runs of a pair."""
    (first, before), (second, after) = pair
    return Table((first, second), list(LESSONS[stage].changes(view, before, after)))


def changes_of(view, stage):
    return table_of(view, stage, pair_of(view, stage))


def alone_of(view, stage):
    """(the Table of the stage's mistake alone beside stage 5, None), or (None, why there is none to be shown)."""
    mistake = stages.own_mistake(stage)
    if mistake is None or set(llama.stage_flags(stage)) == {mistake}:
        return None, None  # the stage itself is it
    run = next((run for run in view.summary.get("isolated", []) if run["mistake"] == mistake), {})
    if "batch_ms" not in run or OPTIMIZED not in view.stages:
        return None, "Not recorded: run_all_stages.sh --isolate replays each mistake alone beside stage 5."
    pair = (f"{llama.flag_of(mistake)} alone", run), (f"stage {OPTIMIZED}", view.stage(OPTIMIZED))
    return table_of(view, stage, pair), None


TOP_KERNELS = 8


def kernel_rows(view, stage):
    """The kernels that take the most time, as KernelRows."""
    for kernel in (view.stages.get(stage, {}).get("kernels") or [])[:TOP_KERNELS]:
        name = kernel["name"]
        us, share = number(kernel["average_us"]), percent(kernel["share"])
        yield KernelRow(operation_of(name), readable_name(name), name, kernel["calls"], us, share)


# ----------------------------------------------------------------------------------------------------------------------


def attempt(function, *arguments):
    """(what it returns, None), or (None, why a figure is missing)."""
    try:
        return function(*arguments), None
    except Missing as reason:
        return None, str(reason)


def recorded_on(replay):
    """Where, when and at what sizes."""
    return f"Recorded on {replay['environment']['device']}, {replay['date'][:10]} ({stages.sizes(replay)})"


def recorded_in(summary, stage):
    """The Views of the recorded replays that have figures of a stage, in the order of their observations."""
    views = map(View, summary.get("recorded", []))
    return [view for view in views if stage in view.stages]


def evidence_of(summary, stage, seen):
    """(Evidence, the View that it is of or None) of each observation of a stage.

    Of the recorded replays the first is drawn, unless what was measured here is.
    """
    recorded = iter(recorded_in(summary, stage))
    is_told = False  # by a picture, or by a word why there is none
    for observation in seen:
        mark, origin, text = stages.MARKS[observation["shown"]], observation["source"], observation["text"]
        if origin == "measured":
            view, place = View(summary), None
            picture, reason = None, "a CPU does not show it"
            if observation["shown"] or not view.on_cpu():
                picture, reason = attempt(pictures.STAGES[stage], view)
            is_told = picture is not None
        elif origin == "counted":
            view, place = None, "Counted in Triton's interpreter"
            picture, reason = attempt(pictures.COUNTED[stage], summary)
        else:
            view = next(recorded)
            place, text = recorded_on(view.summary), text.removeprefix(f"{stages.sizes(view.summary)}: ")
            picture, reason = (None, None) if is_told else attempt(pictures.STAGES[stage], view)
            is_told = True
        yield Evidence(mark, place, text, picture, reason), view


def card(summary, stage, seen):
    """The Card of a stage and of its observations, as benchmarks.stages.observations() gives them."""
    lesson = LESSONS[stage]
    pairs = list(evidence_of(summary, stage, seen))
    evidence = [each for each, _ in pairs]
    # What shows tells the story: first this machine's figures, then recorded ones. On a CPU the rest would be noise.
    telling = [
        (each, view)
        for each, view in pairs
        if view and (each.mark == stages.MARKS[True] or each.mark != stages.MARKS[None] and not view.on_cpu())
    ]
    symptom = changes = alone = not_alone = None
    kernels, source_name = [], None
    told = [(each, view, attempt(lesson.symptom, view)[0]) for each, view in telling]
    told.sort(key=lambda each: each[2] is None)  # what has no symptom to tell comes last
    if told:
        teller, view, symptom = told[0]
        source_name = teller.source
        changes, _ = attempt(changes_of, view, stage)
        alone, not_alone = alone_of(view, stage)
        kernels = list(kernel_rows(view, stage)) if stage in (4, OPTIMIZED) else []
    best = next((each for each in evidence if each.mark == stages.MARKS[True]), evidence[0])
    excerpts = [source.excerpt_of(lesson.code)] if lesson.code else []
    return Card(
        number=stage,
        title=stages.short_title(stage),
        mark=best.mark,
        mark_source=best.source,
        symptom=symptom,
        told_by=source_name,
        evidence=evidence,
        flag=llama.flag_of(lesson.flag) if lesson.flag else None,
        excerpts=[*excerpts, *(source.excerpts(lesson.flag) if lesson.flag else [])],
        fix=lesson.fix,
        changes=changes,
        alone=alone,
        not_alone=not_alone,
        kernels=kernels,
    )


def cards(summary):
    grouped = {}
    for seen in stages.observations(summary):
        grouped.setdefault(seen["stage"], []).append(seen)
    return [card(summary, stage, seen) for stage, seen in grouped.items()]
