"""Say whether the sign of each stage shows in a replay, in sentences that follow from the figures of a summary."""

import math

from benchmarks.pages.replays import measured_stages, sizes
from exercises.performance_debugging.results import ATTENTION_KERNEL, NAIVE_SWIGLU, OPTIMIZED
from measure.tables import number, percent, times
from measure.timing import LEAST_TIMES


class NotMeasured(Exception):
    """A figure was not measured; the message names it."""


class Replay:
    """The measured stages of a summary, by number."""

    def __init__(self, summary):
        self.summary = summary
        self.stages = measured_stages(summary)
        self.on_cpu = summary["environment"]["arch"] == "cpu"

    def stage(self, number):
        if number not in self.stages:
            raise NotMeasured(f"stage {number} was not measured")
        return self.stages[number]


def host_share(run):
    """Return the part of a step in which the host is busy."""
    return run["host_ms"] / run["batch_ms"]["p50"]


def speed_sentence(speed, difference, other):
    """Return the given sentence about the difference of two speeds, or one that says why there is none."""
    return {
        "differs": difference,
        "same": f"The step takes as long as {other}, within the measured spread.",
        "same work": f"The step does the same work as {other}: what differs in its time is noise.",
        "too few steps": f"Fewer than {LEAST_TIMES} steps cannot tell its time from that of {other}.",
    }[speed["verdict"]]


# ----------------------------------------------------------------------------------------------------------------------
# One function for each stage, of a Replay. It returns whether the sign shows, and a text with the figures.


def see_broken_loss(replay):
    first, config = replay.stage(1)["first_loss"], replay.summary["config"]
    # Guessing costs ln(vocabulary). A first loss far above it comes from weights that are too large.
    guessing = math.log(config["vocab_size"])
    if first is None:
        return True, "The first loss is not a number."
    text = f"The first loss is {number(first)}, {times(first / guessing)} the ln {config['vocab_size']} of guessing."
    return first > 2 * guessing, f"{text} The hidden size, with which it grows, is {config['hidden_dim']}."


def see_slow_attention(replay):
    slow, right = replay.stage(2)["attention_us"], replay.stage(3)["attention_us"]
    if not (slow and right):
        raise NotMeasured(f"no profile of stages 2 and 3 has {ATTENTION_KERNEL}")
    text = f"{ATTENTION_KERNEL} takes {number(slow)} us, {times(slow / right)} the {number(right)} us of stage 3"
    return slow / right >= 1.5, f"{text}, for the same result at {sizes(replay.summary)}."


def see_fake_timing(replay):
    stage = replay.stage(3)
    share = stage["phases_share"]
    if share is None:
        raise NotMeasured("--timing step does not time phases")
    text = f"Forward, backward and optimizer add up to {percent(share)} of the step."
    # Launches return at once: without synchronization, a clock around them times the host.
    if share < 0.8:
        return True, f"{text} The rest is work that the device did after the host's clock was read."
    host = percent(host_share(stage))
    return False, f"{text} The host is busy for {host} of the step: the device is never far behind it."


def see_slow_kernels(replay):
    # Stage 5 differs from it in this kernel only.
    kernels, faster = replay.stage(4)["kernels"], replay.stage(OPTIMIZED)["over_previous"]
    if not kernels:
        raise NotMeasured("stage 4 was not profiled")
    difference = f"The step takes {times(faster['value'])} stage {OPTIMIZED}'s."
    text = speed_sentence(faster, difference, f"stage {OPTIMIZED}'s")
    first = kernels[0]
    text += f" {first['name']} is first in the kernel table with {percent(first['share'])} of the time."
    shows = first["name"] == NAIVE_SWIGLU and faster["verdict"] == "differs" and faster["value"] >= 1.2
    return shows, text


def see_optimized(replay):
    # That all weights learn is what the published kernels lacked.
    stage = replay.stage(OPTIMIZED)
    text = f"{percent(stage['gradient_share'])} of the weights receive a gradient"
    if stage["phases_share"]:
        text += f", the phases add up to {percent(stage['phases_share'])} of the step"
    text += f", and the first loss is {number(stage['first_loss'])}."
    if faster := stage["over_baseline"]:
        difference = f"The speed is {times(faster['value'])} the baseline's, measured in the same replay."
        text += f" {speed_sentence(faster, difference, 'the baseline')}"
    return stage["gradient_share"] == 1.0, text


def see_severed_autograd(replay):
    stage = replay.stage(6)
    text = f"{percent(stage['gradient_share'])} of the weights receive a gradient"
    # Autograd does not run the kernels that it does not know backwards.
    took, right = (run["phase_ms"].get("backward") for run in (stage, replay.stage(OPTIMIZED)))
    if took and right and not replay.on_cpu:
        text += f", and the backward pass takes {number(took)} ms where stage {OPTIMIZED}'s takes {number(right)} ms"
    return stage["gradient_share"] < 0.5, f"{text}; the first loss, {number(stage['first_loss'])}, does not tell."


def see_cold_start(replay):
    # Compilation is in the first steps: it moves the mean, and not the median.
    stage = replay.stage(7)
    first = number(stage["step_ms"][0])
    text = f"The mean step is {times(stage['mean_over_median'])} the median; the first took {first} ms."
    return stage["mean_over_median"] >= 2, text


def see_graph(replay):
    eager, other = replay.stage(OPTIMIZED), f"stage {OPTIMIZED}'s"
    faster = replay.stage(8)["over_previous"]
    text = speed_sentence(faster, f"The step is {times(faster['value'])} as fast as {other}.", other)
    # A graph saves the host's time alone: where the device takes longer, there is nothing to win.
    host = f"The host needs {percent(host_share(eager))} of {other} step to launch the kernels."
    return faster["verdict"] == "differs" and faster["value"] >= 1.2, f"{text} {host}"


SEE = {
    1: see_broken_loss,
    2: see_slow_attention,
    3: see_fake_timing,
    4: see_slow_kernels,
    5: see_optimized,
    6: see_severed_autograd,
    7: see_cold_start,
    8: see_graph,
}


# ----------------------------------------------------------------------------------------------------------------------
# All together

IN_OUR_KERNELS, IN_TIMES = {2, 4, 6}, {2, 3, 4, 7, 8}  # the stages whose sign plain PyTorch, or a CPU, cannot show


def observe(replay, stage):
    """Return (whether the sign shows, text) of a stage; None if a figure is missing, which the text names."""
    number, error = stage["stage"], (stage["error"] or "").split("\n")[0]
    if stage["obstacle"]:
        return None, f"It cannot run here: {stage['obstacle']}."
    if "batch_ms" not in stage:
        return None, f"It failed: {error}." if error else "The replay was interrupted before it was done."
    if number in IN_OUR_KERNELS and stage["implementation"] == "torch":
        return False, "Plain PyTorch ran in the place of our kernels, which have the mistake."
    if number in IN_TIMES and replay.on_cpu:
        return False, "It shows in times, and those of a CPU or of Triton's interpreter do not tell the stages apart."
    try:
        shown, text = SEE[number](replay)
    except NotMeasured as reason:
        shown, text = None, f"{reason}."
    return shown, text + (f" Beyond that it failed: {error}." if error else "")


def sources(summary):
    """Return {source: Replay} of a summary's own figures and of the recordings that it shows."""
    found = {"measured": Replay(summary)}
    for recorded in summary["recorded"]:
        device, date = recorded["environment"]["device"], recorded["date"][:10]
        found[f"recorded on {device}, {date}, {sizes(recorded)}"] = Replay(recorded)
    return found


def observations(summary):
    """Return [{"stage", "source", "shown", "text"}], of the first source in which the sign of each stage shows."""
    found = []
    for stage in summary["stages"]:
        seen = []
        for source, replay in sources(summary).items():
            own = stage if source == "measured" else replay.stages.get(stage["stage"])
            if own:
                shown, text = observe(replay, own)
                seen.append({"stage": stage["stage"], "source": source, "shown": shown, "text": text})
        # Where it shows nowhere: a stage that was measured says more than one that was not.
        found.append(max(seen, key=lambda each: [None, False, True].index(each["shown"])))
    return found
