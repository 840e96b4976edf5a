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
    changes: Callable  # of a View: yields Changes
    flag: str | None = None  # one of llama.BUGS
    code: object = None  # a function of the script, where there is no flag


class Change(NamedTuple):
    """A figure with the mistake and without it."""

    figure: str
    before: str
    after: str
    verdict: str = ""  # of times: what their spread allows to say


class Card(NamedTuple):
    """What the report shows of a stage."""

    number: int
    title: str
    mark: str  # of stages.MARKS
    symptom: str | None
    seen: str  # the observation
    picture: pictures.Picture | None
    no_picture: str | None  # why
    flag: str | None
    excerpts: list
    fix: str
    compared: tuple  # what the two columns of changes are of
    changes: list
    alone: str | None  # what the mistake costs by itself, or that it was not measured
    kernels: list
    recorded: str | None = None  # where and when the figures were, if not in this replay


class KernelRow(NamedTuple):
    """A line of the table of a stage's kernels."""

    role: str
    name: str  # readable
    full_name: str
    calls: int
    us: str  # of a call
    share: str


# ----------------------------------------------------------------------------------------------------------------------
# Symptoms: as a participant meets them


def wrong_loss(view):
    first, vocabulary = view.stage(1)["first_loss"], view.config.vocab_size
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


def time_change(view, figure, before, after, unit="ms"):
    """A Change of two sets of times, which is called one only beyond their spread."""
    if view.triton_obstacle():
        verdict = "the same operations ran: noise"
    elif view.on_cpu():
        verdict = f"none: {stages.INTERPRETED}"
    elif min(len(before), len(after)) < LEAST_TIMES:
        verdict = "too few steps to tell"
    else:
        ratio = ratio_of_medians(before, after)
        slower = f"{times(1 / ratio.value)} as slow" if ratio.value < 1 else f"{times(ratio.value)} as fast"
        verdict = slower if ratio.differs else "no difference beyond the spread"
    return Change(figure, with_spread(before, unit), with_spread(after, unit), verdict)


def step_change(view, before, after):
    return time_change(view, "step", before["step_ms"], after["step_ms"])


def loss_changes(view):
    wrong, right = view.stage(1), view.stage(2)
    for name in ("first", "final"):
        yield Change(f"{name} loss", *(number(stage[f"{name}_loss"]) for stage in (wrong, right)))
    yield step_change(view, wrong, right)


def attention_changes(view):
    layouts = view.summary.get("attention_layouts") or {"lengths": []}
    for row in layouts["lengths"]:
        if row["seq_len"] in (view.config.seq_len, layouts["lengths"][-1]["seq_len"]):
            figure = f"attention kernel alone, {row['seq_len']} tokens"
            yield time_change(view, figure, row["strided"], row["contiguous"], "us")
    yield step_change(view, view.stage(2), view.stage(3))


def timing_changes(view):
    before, after = view.stage(3), view.stage(4)
    shares = [percent(stage["phases_share"]) if stage["phases_share"] else "" for stage in (before, after)]
    yield Change("phases / step", *shares)
    yield step_change(view, before, after)


def kernel_changes(view):
    before, after = view.stage(4), view.stage(OPTIMIZED)
    if "phase_steps_ms" in before and "phase_steps_ms" in after:
        yield time_change(view, "forward", *(stage["phase_steps_ms"]["forward"] for stage in (before, after)))
    yield step_change(view, before, after)


def baseline_changes(view):
    baseline, stage = view.summary["baseline"], view.stage(OPTIMIZED)
    if not baseline:
        raise Missing("the baseline was not measured")
    yield step_change(view, baseline, stage)
    yield Change("peak memory", *(f"{number(run['peak_memory_mib'])} MiB" for run in (baseline, stage)))


def gradient_changes(view):
    severed, correct = view.stage(6), view.stage(OPTIMIZED)
    yield Change("weights with a gradient", *(percent(stage["gradient_share"]) for stage in (severed, correct)))
    if severed.get("phase_steps_ms") and correct.get("phase_steps_ms"):
        yield time_change(view, "backward", *(stage["phase_steps_ms"]["backward"] for stage in (severed, correct)))
    yield step_change(view, severed, correct)


def warmup_changes(view):
    cold, warm = view.stage(7), view.stage(OPTIMIZED)
    yield Change("first step", *(f"{number(stage['step_ms'][0])} ms" for stage in (cold, warm)))
    yield Change("mean step", *(f"{number(stage['batch_ms']['mean'])} ms" for stage in (cold, warm)))
    yield step_change(view, cold, warm)


def graph_changes(view):
    eager, graph = view.stage(OPTIMIZED), view.stage(8)
    yield Change("host time to issue a step", *(f"{number(stage['host_ms'])} ms" for stage in (eager, graph)))
    yield step_change(view, eager, graph)


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


def columns_of(stage):
    """What the two columns of a card's changes are of: with the mistake, and without it."""
    if stage == OPTIMIZED:
        return "plain PyTorch", f"stage {stage}"
    if stage == 8:
        return f"stage {OPTIMIZED}", "stage 8"
    return f"stage {stage}", f"stage {stage + 1 if stage < OPTIMIZED else OPTIMIZED}"


TOP_KERNELS = 8


def kernel_rows(view, stage):
    """The kernels that take the most time, as KernelRows."""
    for kernel in (view.stages.get(stage, {}).get("kernels") or [])[:TOP_KERNELS]:
        name = kernel["name"]
        us, share = number(kernel["average_us"]), percent(kernel["share"])
        yield KernelRow(operation_of(name), readable_name(name), name, kernel["calls"], us, share)


def attempt(function, *arguments):
    """(what it returns, None), or (None, why a figure is missing)."""
    try:
        return function(*arguments), None
    except Missing as reason:
        return None, str(reason)


def card(view, seen):
    """The Card of the stage that an observation, as stages.observations() gives it, is about."""
    stage = seen["stage"]
    lesson = LESSONS[stage]
    symptom = picture = changes = None
    no_picture = "a CPU does not show it"
    if seen["shown"] or not view.on_cpu():  # else what could be told of it is noise
        symptom, _ = attempt(lesson.symptom, view)
        picture, no_picture = attempt(pictures.STAGES[stage], view)
        changes, _ = attempt(lambda: list(lesson.changes(view)))
    found = source.excerpts(lesson.flag) if lesson.flag else []
    return Card(
        number=stage,
        title=stages.short_title(stage),
        mark=stages.MARKS[seen["shown"]],
        symptom=symptom,
        seen=seen["text"],
        picture=picture,
        no_picture=no_picture and f"No picture: {no_picture}.",
        flag=llama.flag_of(lesson.flag) if lesson.flag else None,
        excerpts=[source.excerpt_of(lesson.code)] if lesson.code else list(found),
        fix=lesson.fix,
        compared=columns_of(stage),
        changes=changes or [],
        alone=None,
        kernels=list(kernel_rows(view, stage)) if stage in (4, OPTIMIZED) else [],
    )


def cards(summary):
    view = View(summary)
    return [card(view, seen) for seen in stages.observations(summary)]
