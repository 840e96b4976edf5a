"""Makes a card for each stage: the symptom, the picture that shows it, the lines of code, the fix, and its effect.

Every number is taken from a summary, and every line of code from the script. Missing measurements are named.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import tiny_llama_v3 as llama
from benchmarks.pages import replays
from benchmarks.pages.replays import OPTIMIZED, NotMeasured, Replay
from exercises.performance_debugging import bug_excerpts, pictures
from measure.tables import number, percent, times
from measure.timing import LEAST_TIMES, percentiles, ratio_of_medians
from profilers.kernel_names import operation_of, readable_name


class Lesson(NamedTuple):
    """The texts of a card, and the functions for its figures."""

    symptom: Callable  # a function of a Replay that returns a sentence
    fix: str
    changes: Callable  # a function of a Replay and two of its runs that yields Changes
    flag: str | None = None  # one of llama.BUGS
    code: object = None  # a function of the script, if there is no flag


class Change(NamedTuple):
    """A figure of two runs."""

    figure: str
    before: str
    after: str
    verdict: str = ""  # for times, by their spread


class Table(NamedTuple):
    """The Changes between two runs."""

    runs: tuple  # their names
    changes: list


class KernelRow(NamedTuple):
    """A row of the table of a stage's kernels."""

    role: str
    name: str  # readable
    full_name: str
    calls: int
    us: str  # of a call
    share: str


class Evidence(NamedTuple):
    """An observation and its picture."""

    mark: str  # of replays.MARKS
    source: str | None  # if not measured in this replay
    text: str
    picture: pictures.Picture | None
    no_picture: str | None  # the reason


class Card(NamedTuple):
    """The entry of a stage in the report."""

    number: int
    title: str
    mark: str  # of its best evidence
    mark_source: str | None
    symptom: str | None
    symptom_source: str | None  # of the symptom and the changes, if not measured in this replay
    evidence: list
    flag: str | None
    excerpts: list
    fix: str
    changes: Table | None
    alone: Table | None  # the mistake by itself compared with stage 5
    not_alone: str | None  # the reason if alone is missing
    kernels: list


# ----------------------------------------------------------------------------------------------------------------------
# Symptoms, as a participant notices them


def wrong_loss(replay):
    first, vocabulary = replay.stage(1)["first_loss"], pictures.config_of(replay, 1).vocab_size
    guessing = f"a model that knows nothing should begin at ln {vocabulary} = {number(math.log(vocabulary))}"
    return f"The first loss is {number(first) if first is not None else 'not a number'}, and {guessing}."


def slow_attention(replay):
    replay.kernels(2), replay.kernels(3)
    slow, correct = replay.stage(2)["attention_us"], replay.stage(3)["attention_us"]
    if not (slow and correct):
        raise NotMeasured(f"the profile has no {replays.ATTENTION_KERNEL}")
    return (
        f"The loss is right and the step tells nothing, but one call of the attention kernel takes {number(slow)} us "
        f"where the same work could take {number(correct)}."
    )


def fast_phases(replay):
    stage = replay.stage(3)
    if not stage["phases_share"]:
        raise NotMeasured("--timing step does not time phases")
    together, step = sum(stage["phase_ms"].values()), stage["batch_ms"]["p50"]
    return f"Forward, backward and optimizer take {number(together)} ms together, and the step takes {number(step)}."


def slow_forward(replay):
    forward, baseline = replay.stage(4)["phase_ms"].get("forward"), replay.summary["baseline"]
    if not forward:
        raise NotMeasured("--timing step does not time phases")
    text = f"Now that the times are true, forward takes {number(forward)} ms"
    return f"{text}, and plain PyTorch's {number(baseline['phase_ms']['forward'])}." if baseline else f"{text}."


def good_step(replay):
    replay.require_times()
    step, baseline = replay.stage(OPTIMIZED)["batch_ms"]["p50"], replay.summary["baseline"]
    text = f"A step takes {number(step)} ms"
    return f"{text}; plain PyTorch's took {number(baseline['batch_ms']['p50'])}." if baseline else f"{text}."


def missing_gradients(replay):
    stage = replay.stage(6)
    if stage["gradient_share"] == 1.0:
        return "None here: every weight receives a gradient."
    text = f"Only {percent(stage['gradient_share'])} of the weights receive a gradient"
    severed, correct = (replay.stage(n)["phase_ms"].get("backward") for n in (6, OPTIMIZED))
    if severed and correct and not replay.on_cpu():
        text += f", so backward takes {number(severed)} ms instead of {number(correct)}"
    return f"{text}. The first loss, {number(stage['first_loss'])}, does not show it."


def slow_average(replay):
    mean, median = (replay.stage(7)["batch_ms"][key] for key in ("mean", "p50"))
    return f"The average step takes {number(mean)} ms, and the run feels like {number(median)}."


def waiting_device(replay):
    stage = replay.stage(OPTIMIZED)
    return (
        f"In stage {OPTIMIZED} the host needs {number(stage['host_ms'])} ms of a step of "
        f"{number(stage['batch_ms']['p50'])} ms to launch its kernels."
    )


# ----------------------------------------------------------------------------------------------------------------------
# Changes


def with_spread(samples, unit="ms"):
    spread = percentiles(samples)
    return f"{number(spread['median'])} {unit} ({number(spread['p20'])} – {number(spread['p80'])})"


NO_DIFFERENCE = {"same": "no difference beyond the spread", "same work": "the same work: noise",
                 "too few steps": "too few steps to tell"}  # fmt: skip


def faster(factor):
    return f"{times(factor)} as fast" if factor >= 1 else f"{times(1 / factor)} as slow"


def time_change(figure, before, after, unit="ms", between=1.0):
    """A Change of two sets of times of different work; between: see measure.timing.ratio_of_medians."""
    ratio = ratio_of_medians(before, after, between)
    if min(len(before), len(after)) < LEAST_TIMES:
        verdict = NO_DIFFERENCE["too few steps"]
    else:
        verdict = faster(ratio.value) if ratio.differs else NO_DIFFERENCE["same"]
    return Change(figure, with_spread(before, unit), with_spread(after, unit), verdict)


def step_change(replay, before, after):
    """Yields the Change of the median step, except on a CPU."""
    if replay.on_cpu():
        return
    speed = replay.speed(after, before)
    verdict = NO_DIFFERENCE.get(speed["verdict"]) or faster(speed["value"])
    yield Change("step", with_spread(before["step_ms"]), with_spread(after["step_ms"]), verdict)


def phase_change(replay, phase, before, after):
    """Yields the Change of a phase, except on a CPU and for replays without the phases of each step."""
    steps = [run.get("phase_steps_ms", {}).get(phase) for run in (before, after)]
    if None not in steps and not replay.on_cpu():
        yield time_change(phase, *steps, between=replays.spread_of_processes(replay.summary))


def compared(figure, runs, text):
    """A Change of a figure that has no spread."""
    return Change(figure, *(text(run) for run in runs))


def loss_changes(replay, *runs):
    for name in ("first", "final"):
        yield compared(f"{name} loss", runs, lambda run, name=name: number(run[f"{name}_loss"]))
    yield from step_change(replay, *runs)


def attention_changes(replay, *runs):
    if all(run.get("attention_us") for run in runs):
        yield compared("attention kernel in the step, mean", runs, lambda run: f"{number(run['attention_us'])} us")
    rows = (replay.summary.get("attention_layouts") or {"lengths": []})["lengths"]
    for row in rows if "mistake" not in runs[0] else []:
        if row["seq_len"] in (replay.config.seq_len, rows[-1]["seq_len"]):
            figure = f"attention kernel alone, {row['seq_len']} tokens"
            yield time_change(figure, row["strided"], row["contiguous"], "us")
    yield from step_change(replay, *runs)


def timing_changes(replay, *runs):
    yield compared("phases / step", runs, lambda run: percent(run["phases_share"]) if run["phases_share"] else "")
    yield from step_change(replay, *runs)


def kernel_changes(replay, *runs):
    yield from phase_change(replay, "forward", *runs)
    yield from step_change(replay, *runs)


def baseline_changes(replay, *runs):
    yield from step_change(replay, *runs)
    yield compared("peak memory", runs, lambda run: f"{number(run['peak_memory_mib'])} MiB")


def gradient_changes(replay, *runs):
    yield compared("weights with a gradient", runs, lambda run: percent(run["gradient_share"]))
    yield from phase_change(replay, "backward", *runs)
    yield from step_change(replay, *runs)


def warmup_changes(replay, *runs):
    yield compared("first step", runs, lambda run: f"{number(run['step_ms'][0])} ms")
    yield compared("mean step", runs, lambda run: f"{number(run['batch_ms']['mean'])} ms")
    yield from step_change(replay, *runs)


def graph_changes(replay, *runs):
    yield compared("host time to issue a step", runs, lambda run: f"{number(run['host_ms'])} ms")
    yield from step_change(replay, *runs)


# ----------------------------------------------------------------------------------------------------------------------

LESSONS = {
    1: Lesson(wrong_loss, "init_weights draws every matrix from N(0, 0.02), and less for the layers that add to the "
              "residual stream. In a model with a tied head it counts twice: for what comes in and for what goes out.",
              loss_changes, "no_init"),
    2: Lesson(slow_attention, "Hand the kernel K and V whose last dimension has stride 1: here the views that "
              "split_heads makes. Ask for stride(), not for is_contiguous().", attention_changes, "noncontiguous_kv"),
    3: Lesson(fast_phases, "Events on the device around each phase, and one synchronization a step to read them. The "
              "flag changes no speed: it changes what you believe about it.", timing_changes, "unsynced_timing"),
    4: Lesson(slow_forward, "The library multiplies the matrices, a small kernel of ours does silu(gate) * up.",
              kernel_changes, "triton_matmul_swiglu"),
    5: Lesson(good_step, "Nothing left to mend by a flag. The comparison counts because the gradients agree (--check), "
              "and because plain PyTorch was measured in the same replay, on the same data, from the same weights.",
              baseline_changes),
    6: Lesson(missing_gradients, "An autograd.Function around every kernel, and a test of every gradient. Count the "
              "weights that receive one.", gradient_changes, "severed_autograd"),
    7: Lesson(slow_average, "Warm-up steps that are not measured, and the median beside the mean.", warmup_changes,
              "no_warmup"),
    8: Lesson(waiting_device, "No mistake but a remedy: the step is captured once and replayed with one launch "
              "a phase. It helps if the device waits for the host.", graph_changes, code=llama.TrainStep.capture),
}  # fmt: skip


def pair_of(replay, stage):
    """((name, run), (name, run)): with and without the mistake, or without and with the cure."""
    if stage == OPTIMIZED:
        if not replay.summary["baseline"]:
            raise NotMeasured("the baseline was not measured")
        return ("plain PyTorch", replay.summary["baseline"]), (f"stage {stage}", replay.stage(stage))
    with_it, without = (stage, stage + 1) if stage < OPTIMIZED else (stage, OPTIMIZED)
    if stage == 8:
        with_it, without = without, with_it
    return tuple((f"stage {number}", replay.stage(number)) for number in (with_it, without))


def table_of(replay, stage, pair):
    """The Table of the changes between the runs of a pair."""
    (first, before), (second, after) = pair
    return Table((first, second), list(LESSONS[stage].changes(replay, before, after)))


def changes_of(replay, stage):
    return table_of(replay, stage, pair_of(replay, stage))


def alone_of(replay, stage):
    """(the Table of the stage's mistake alone and stage 5, None), or (None, the reason or None)."""
    mistake = replays.own_mistake(stage)
    if mistake is None or set(llama.stage_flags(stage)) == {mistake}:
        return None, None  # the stage has only this mistake
    run = next((run for run in replay.summary.get("isolated", []) if run["mistake"] == mistake), {})
    if "batch_ms" not in run or OPTIMIZED not in replay.stages:
        return None, "Not recorded: run_all_stages.sh --isolate replays each mistake alone beside stage 5."
    pair = (f"{llama.flag_of(mistake)} alone", run), (f"stage {OPTIMIZED}", replay.stage(OPTIMIZED))
    return table_of(replay, stage, pair), None


TOP_KERNELS = 8


def kernel_rows(replay, stage):
    """Yields the KernelRows of the kernels that take the most time."""
    for kernel in (replay.stages.get(stage, {}).get("kernels") or [])[:TOP_KERNELS]:
        name = kernel["name"]
        us, share = number(kernel["average_us"]), percent(kernel["share"])
        yield KernelRow(operation_of(name), readable_name(name), name, kernel["calls"], us, share)


# ----------------------------------------------------------------------------------------------------------------------


def attempt(function, *arguments):
    """(the result of the function, None), or (None, why a figure is missing)."""
    try:
        return function(*arguments), None
    except NotMeasured as reason:
        return None, str(reason)


def recorded_on(replay):
    """A text with device, date and sizes of a replay."""
    return f"Recorded on {replay['environment']['device']}, {replay['date'][:10]} ({replays.sizes(replay)})"


def recorded_in(summary, stage):
    """The recorded Replays that have figures of a stage, in the order of their observations."""
    recorded = map(Replay, summary.get("recorded", []))
    return [replay for replay in recorded if stage in replay.stages]


def evidence_of(summary, stage, seen):
    """Yields (Evidence, its Replay or None) for each observation of a stage.

    The first recorded replay that shows the stage's sign has a picture, unless the measurement of this machine has one.
    """
    recorded = iter(recorded_in(summary, stage))
    is_drawn = False  # or the reason is given
    for observation in seen:
        mark, origin, text = replays.MARKS[observation["shown"]], observation["source"], observation["text"]
        if origin == "measured":
            replay, place = Replay(summary), None
            picture, reason = None, "a CPU does not show it"
            if observation["shown"] or not replay.on_cpu():
                picture, reason = attempt(pictures.STAGES[stage], replay)
            is_drawn = picture is not None
        elif origin == "counted":
            replay, place = None, "Counted in Triton's interpreter"
            picture, reason = attempt(pictures.COUNTED[stage], summary)
        else:
            replay = next(recorded)
            place, text = recorded_on(replay.summary), text.removeprefix(f"{replays.sizes(replay.summary)}: ")
            is_first = observation["shown"] or not any(other["shown"] for other in seen)
            picture, reason = attempt(pictures.STAGES[stage], replay) if is_first and not is_drawn else (None, None)
            is_drawn = is_drawn or is_first
        yield Evidence(mark, place, text, picture, reason), replay


def card(summary, stage, seen):
    """The Card of a stage from its observations of benchmarks.pages.replays.observations()."""
    lesson = LESSONS[stage]
    pairs = list(evidence_of(summary, stage, seen))
    evidence = [each for each, _ in pairs]
    # Figures of this machine come first, then recorded ones. On a CPU only evidence that shows the sign is used.
    usable = [
        (each, replay, attempt(lesson.symptom, replay)[0])
        for each, replay in pairs
        if replay and (each.mark == replays.MARKS[True] or each.mark != replays.MARKS[None] and not replay.on_cpu())
    ]
    usable.sort(key=lambda item: item[2] is None)  # evidence without a symptom comes last
    symptom = changes = alone = not_alone = None
    kernels, source_name = [], None
    if usable:
        chosen, replay, symptom = usable[0]
        source_name = chosen.source
        changes, _ = attempt(changes_of, replay, stage)
        alone, not_alone = alone_of(replay, stage)
        kernels = list(kernel_rows(replay, stage)) if stage in (4, OPTIMIZED) else []
    best = next((each for each in evidence if each.mark == replays.MARKS[True]), evidence[0])
    excerpts = [bug_excerpts.excerpt_of(lesson.code)] if lesson.code else []
    excerpts += bug_excerpts.excerpts(lesson.flag) if lesson.flag else []
    flag = llama.flag_of(lesson.flag) if lesson.flag else None
    return Card(stage, replays.short_title(stage), best.mark, best.source, symptom, source_name, evidence, flag,
                excerpts, lesson.fix, changes, alone, not_alone, kernels)  # fmt: skip


def cards(summary):
    grouped = {}
    for seen in replays.observations(summary):
        grouped.setdefault(seen["stage"], []).append(seen)
    return [card(summary, stage, seen) for stage, seen in grouped.items()]
