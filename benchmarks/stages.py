"""What a replay of the workshop's stages shows, from its summary.json: observations and a table.

Every sentence follows from a figure. exercises/performance_debugging/ makes the summaries.
"""

import math
from typing import NamedTuple

import tiny_llama_v3 as llama
from measure.tables import markdown_table, number, percent, times

ATTENTION_KERNEL = "flash_attention_kernel"
NAIVE_SWIGLU, HYBRID_SWIGLU = "swiglu_kernel", "swiglu_activation_kernel"
OPTIMIZED = 5


def short_title(stage):
    return llama.STAGES[stage].split(" instead of ")[0]


def device_of(summary):
    """The llama.Device of a summary, without its sizes."""
    environment = summary["environment"]
    kind = "cpu" if environment["arch"] == "cpu" else "cuda"
    return llama.Device(kind, environment["device"], environment["arch"], num_sms=0, warp_size=0)


# ----------------------------------------------------------------------------------------------------------------------
# Figures


# ----------------------------------------------------------------------------------------------------------------------
# Observations: one a stage. Each returns whether its sign shows, with the figures, and if it does not, why.


class Missing(Exception):
    """A figure that was not measured; the message says which."""


def without_figures(stage):
    """Why a stage was not measured."""
    if stage["obstacle"]:
        return f"It cannot run here: {stage['obstacle']}"
    return (
        f"It failed: {stage['error'].splitlines()[0]}"
        if stage["error"]
        else "The replay was interrupted before it was done"
    )


class View:
    """The measured stages, asked for by number."""

    def __init__(self, summary):
        self.summary = summary
        self.config = llama.Config(**summary["config"])
        self.device = device_of(summary)
        self.stages = {stage["stage"]: stage for stage in summary["stages"] if "batch_ms" in stage}

    def stage(self, number):
        if number not in self.stages:
            raise Missing(f"stage {number} was not measured")
        return self.stages[number]

    def kernels(self, number):
        if not self.stage(number)["kernels"]:
            raise Missing(f"stage {number} was not profiled")
        return self.stage(number)["kernels"]

    def triton_obstacle(self):
        """Why plain PyTorch ran in place of our kernels, or None."""
        if any(stage["implementation"] == "triton" for stage in self.stages.values()):
            return None
        return llama.triton_obstacle(self.device, self.config.use_amp).split(" (")[0]

    def on_cpu(self):
        """There the times of two stages do not tell them apart."""
        return self.device.type == "cpu"

    def require_times(self):
        """Missing where times mean nothing."""
        if self.on_cpu() and not self.triton_obstacle():
            raise Missing(INTERPRETED)


INTERPRETED = "Triton's interpreter ran the kernels, and its times mean nothing"


def see_broken_loss(view):
    first, guessing, hidden = view.stage(1)["first_loss"], math.log(view.config.vocab_size), view.config.hidden_dim
    if first is None:
        return True, "The first loss is not a number."
    text = f"The first loss is {number(first)}, {times(first / guessing)} the ln {view.config.vocab_size} of guessing."
    if first > 2 * guessing:
        return True, f"{text} The hidden size is {hidden}."
    return False, f"{text} It grows with the hidden size, and {hidden} is too narrow to show it."


def see_slow_attention(view):
    if view.triton_obstacle():
        return False, f"Plain PyTorch's attention ran, which takes any layout: {view.triton_obstacle()}."
    if view.on_cpu():
        return False, f"{INTERPRETED}."
    view.kernels(2), view.kernels(3)
    slow, correct = view.stage(2)["attention_us"], view.stage(3)["attention_us"]
    if not (slow and correct):
        raise Missing(f"the profile has no {ATTENTION_KERNEL}")
    text = (
        f"{ATTENTION_KERNEL} takes {slow:,.1f} us, {times(slow / correct)} the {correct:,.1f} us of stage 3, for the "
        f"same result at {view.config.seq_len} tokens a sequence in {view.summary['precision']}."
    )
    longer = [] if view.config.seq_len >= 2048 else ["--seq-len 2048"]
    plainer = longer + ([] if view.config.use_amp else ["-- --use-amp"])
    if slow / correct < 5 and plainer:
        text += f" The slower loads weigh more in long sequences and beside short arithmetic: try {' '.join(plainer)}."
    return slow / correct >= 1.5, text


def see_fake_timing(view):
    stage = view.stage(3)
    share = stage["phases_share"]
    if share is None:
        raise Missing("--timing step does not time phases")
    text = f"Forward, backward and optimizer add up to {percent(share)} of the step."
    if view.on_cpu():
        return False, f"{text} A CPU does its work while the host's clock runs: it takes a device that runs behind."
    if share < 0.8:
        return True, f"{text} The rest is work that the device did after the host's clock was read."
    host = stage["host_ms"] / stage["batch_ms"]["p50"]
    return False, f"{text} The host is busy for {percent(host)} of the step: the device is never far behind it."


def see_slow_kernels(view):
    if view.triton_obstacle():
        return False, f"The naive kernel did not run, the library multiplied the matrices: {view.triton_obstacle()}."
    if view.on_cpu():
        return False, f"{INTERPRETED}."
    slower = view.stage(4)["batch_ms"]["p50"] / view.stage(OPTIMIZED)["batch_ms"]["p50"]
    text = f"The step takes {times(slower)} stage {OPTIMIZED}'s."
    kernels = view.stage(4)["kernels"]
    if kernels:
        first = kernels[0]
        text += f" {first['name']} is first in the kernel table with {percent(first['share'])} of the time."
        if first["name"] != NAIVE_SWIGLU:
            return False, f"{text} At these sizes it weighs more than the naive {NAIVE_SWIGLU}."
    return slower >= 1.2, text


def see_optimized(view):
    stage, baseline = view.stage(OPTIMIZED), view.summary["baseline"]
    share = stage["gradient_share"]
    text = f"{percent(share)} of the weights receive a gradient"
    if stage["phases_share"]:
        text += f", the phases add up to {percent(stage['phases_share'])} of the step"
    text += f", and the first loss is {number(stage['first_loss'])}."
    if baseline:
        text += f" The speed is {times(stage['samples_per_second'] / baseline['samples_per_second'])} the baseline's"
        obstacle = view.triton_obstacle()
        if obstacle:
            text += f": noise, as both are plain PyTorch ({obstacle})."
        else:
            text += f": {INTERPRETED}." if view.on_cpu() else ", measured in the same replay."
    if not view.on_cpu() and stage["host_ms"] > 0.8 * stage["batch_ms"]["p50"]:
        busy = percent(stage["host_ms"] / stage["batch_ms"]["p50"])
        text += f" What is left is the host: it needs {busy} of the step to launch the kernels."
    return share == 1.0, text


def see_severed_autograd(view):
    if view.triton_obstacle():
        return False, f"Autograd cannot be cut out of plain PyTorch's operations: {view.triton_obstacle()}."
    stage, correct = view.stage(6), view.stage(OPTIMIZED)
    text = f"{percent(stage['gradient_share'])} of the weights receive a gradient"
    if stage["phase_ms"] and correct["phase_ms"] and not view.on_cpu():
        cheaper = correct["phase_ms"]["backward"] / stage["phase_ms"]["backward"]
        text += f", and the backward pass is {times(cheaper)} cheaper than stage {OPTIMIZED}'s"
    return stage["gradient_share"] < 0.5, f"{text}; the first loss, {number(stage['first_loss'])}, does not tell."


def see_cold_start(view):
    stage = view.stage(7)
    skew = stage["mean_over_median"]
    text = f"The mean step is {times(skew)} the median; the first took {stage['step_ms'][0]:,.1f} ms."
    if view.on_cpu():
        return False, f"{text} No kernel is compiled on a CPU: what differs is the library's first calls, and noise."
    return skew >= 2, text


def see_graph(view):
    graph, eager = view.stage(8)["batch_ms"]["p50"], view.stage(OPTIMIZED)
    faster = eager["batch_ms"]["p50"] / graph
    text = f"The step is {times(faster)} as fast as stage {OPTIMIZED}'s."
    if faster >= 1.2:
        return True, text
    host = percent(eager["host_ms"] / eager["batch_ms"]["p50"])
    text += f" There is little to win: the host needs only {host} of stage {OPTIMIZED}'s step to issue it."
    return False, text if view.config.use_amp else f"{text} Shorter kernels leave more: try -- --use-amp."


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


def observations(summary):
    """[{"stage", "shown", "text"}]: shown is None where a figure is missing, and the text then says which."""
    seen = []
    for stage in summary["stages"]:
        try:
            if "batch_ms" not in stage:
                raise Missing(without_figures(stage))
            shown, text = SEE[stage["stage"]](View(summary))
            if stage["error"]:
                text += f" Beyond that it failed: {stage['error'].splitlines()[0]}."
        except Missing as reason:
            shown, text = None, f"{reason}."
        seen.append({"stage": stage["stage"], "shown": shown, "text": text})
    return seen


# ----------------------------------------------------------------------------------------------------------------------
# Tables


class Column(NamedTuple):
    title: str
    unit: str
    text: object  # of a stage's figures


def phase(name):
    return lambda stage: number(stage["phase_ms"].get(name))


def share(name):
    return lambda stage: f"{100 * stage[name]:.{0 if stage[name] >= 0.1 else 1}f}" if stage[name] is not None else ""


COLUMNS = (
    Column("first loss", "", lambda stage: number(stage["first_loss"])),
    Column("final loss", "", lambda stage: number(stage["final_loss"])),
    Column("speed", "samples/s", lambda stage: number(stage["samples_per_second"])),
    Column("speed / previous", "", lambda stage: number(stage.get("speed_over_previous"))),
    Column("speed / baseline", "", lambda stage: number(stage.get("speed_over_baseline"))),
    Column("step, median", "ms", lambda stage: number(stage["batch_ms"]["p50"])),
    Column("forward", "ms", phase("forward")),
    Column("backward", "ms", phase("backward")),
    Column("optimizer", "ms", phase("optimizer")),
    Column("phases / step", "%", share("phases_share")),
    Column("attention kernel", "us", lambda stage: number(stage.get("attention_us"))),
    Column("SwiGLU kernel", "us", lambda stage: number(stage.get("swiglu_us"))),
    Column("weights with a gradient", "%", share("gradient_share")),
    Column("mean / median", "", lambda stage: number(stage["mean_over_median"])),
    Column("peak memory", "MiB", lambda stage: number(stage["peak_memory_mib"])),
)
NOTES = (
    "speed / previous: against the stage before; from stage 6 on, against stage 5.",
    "attention kernel, SwiGLU kernel: one call of flash_attention_kernel, and of swiglu_kernel (stages 1 to 4, matrix "
    "product included) or swiglu_activation_kernel (from stage 5 on; the library multiplies).",
    "phases / step: forward, backward and optimizer added up, over the step around them; times are medians over the "
    "steps, the speed is that of all steps together.",
)


def notes(summary):
    """What the table of a replay needs to be read: NOTES, and what its times are worth."""
    view = View(summary)
    if not view.on_cpu():
        return NOTES
    same = f"plain PyTorch ran the same operations in every stage ({view.triton_obstacle()}): times differ by noise"
    return (*NOTES, f"{same if view.triton_obstacle() else INTERPRETED}.")


def comparison_table(summary):
    """(labels of the runs that have figures, [(figure, its value in each of them)]), all as text."""
    runs = {"baseline": summary["baseline"]} if summary["baseline"] else {}
    runs |= {f"{stage['stage']} {stage['title']}": stage for stage in summary["stages"] if "batch_ms" in stage}
    rows = []
    for column in COLUMNS:
        head = column.title + (f", {column.unit}" if column.unit else "")
        cells = [column.text(run) for run in runs.values()]
        if any(cells):
            rows.append((head, cells))
    return list(runs), rows


def comparison_markdown(summary):
    labels, rows = comparison_table(summary)
    return markdown_table(["", *labels], [[head, *cells] for head, cells in rows])


MARKS = {True: "shows", False: "does not show", None: "not measured"}


def observation_lines(summary):
    for seen in observations(summary):  # anew, so that an older replay is told in today's words
        yield f"stage {seen['stage']}, {short_title(seen['stage'])}", MARKS[seen["shown"]], seen["text"]


def setting(summary):
    """One line: on what, with which sizes."""
    config, environment = summary["config"], summary["environment"]
    versions = [f"PyTorch {environment['torch']}", f"Triton {environment['triton']}" if environment["triton"] else ""]
    return (
        f"{environment['device']}, {', '.join(filter(None, versions))}; batch {config['batch_size']} x "
        f"{config['seq_len']} tokens, hidden {config['hidden_dim']}, {config['num_layers']} layers, "
        f"{summary['precision']}; {config['num_steps']} steps; {summary['date'][:10]}"
    )
