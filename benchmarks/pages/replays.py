"""Derive observations and tables from the summary.json of a replay of the workshop's stages.

Every sentence follows from a figure. exercises/performance_debugging/ writes the summaries.
"""

import math
from pathlib import Path

import tiny_llama_v3 as llama
from benchmarks.pages.long_table import first_device, long_table, newest, of_each_device, paragraphs, provenance
from measure.results import RESULTS, recorded_config
from measure.tables import markdown_table, number, percent, times
from measure.timing import LEAST_TIMES, ratio_of_medians, spread_of_medians

ATTENTION_KERNEL = "flash_attention_kernel"
NAIVE_SWIGLU, HYBRID_SWIGLU = "swiglu_kernel", "swiglu_activation_kernel"
OPTIMIZED = 5


def short_title(stage):
    return llama.STAGES[stage].split(" instead of ")[0]


def own_mistake(stage):
    """Return the name of the mistake that this stage is the last to have; None if there is none."""
    return next((name for name, bug in llama.BUGS.items() if stage in bug.stages[-1:]), None)


def predecessor(stage):
    """Return the stage to compare a stage with: up to the optimized one the stage before, then the optimized one."""
    return stage - 1 if stage <= OPTIMIZED else OPTIMIZED


def newest_of_settings(rows):
    """Return the newest replay of each length of sequence and precision, fp32 first, from one device's long table."""
    settings = {"seq_len": rows["config"].map(lambda config: config["seq_len"]), "low": rows["precision"] != "fp32"}
    return newest(rows.assign(**settings), "seq_len", "low").sort_values(["seq_len", "low"])


def newest_replays(folder):
    """Return [(name, summary)]: the newest replay in a folder of each setting, of the first device."""
    rows = long_table(folder, "stages")
    rows = newest_of_settings(first_device(rows)) if len(rows) else rows
    return list(zip(rows["file"], rows["result"], strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# Whether one run is faster than another. All comparisons of times use compare_speed().

CHANGES_WORK = {"graph", "noncontiguous_kv", "triton_matmul_swiglu", "severed_autograd"}


def work_of(run):
    """Return the work of a run's steps: equal for runs of the same operations at the same sizes."""
    # Other mistakes change numbers or clocks, and not which operations run.
    flags = {run["mistake"]} if "mistake" in run else set(llama.stage_flags(run.get("stage")))
    changing = CHANGES_WORK if run["implementation"] == "triton" else {"graph"}
    return run["implementation"], frozenset(flags & changing), str(run.get("config"))


def runs_of(summary):
    """Return all runs of a replay that have figures."""
    runs = [summary["baseline"], *summary["stages"], *summary.get("isolated", [])]
    return [run for run in runs if run and "batch_ms" in run]


def spread_of_processes(summary):
    """Return the largest ratio of the times of a step in two processes with the same work; 1 if there are none.

    Clocks, temperatures and other jobs differ more between processes than between steps.
    """
    # Runs of the same work differ by nothing but noise, so their ratio measures it.
    same_work = {}
    for run in runs_of(summary):
        if len(run["step_ms"]) >= LEAST_TIMES:
            same_work.setdefault(work_of(run), []).append(run["step_ms"])
    return max(map(spread_of_medians, same_work.values()), default=1.0)


def compare_speed(summary, run, other):
    """Return {"value", "low", "high", "verdict"}: the speed of a run relative to another one, by their median steps.

    The verdict is "differs" beyond the spread of steps and processes, else "same", "same work" or "too few steps".
    Return None if a run is missing, if the sizes differ, and if the interpreter ran the kernels.
    """
    both = [each for each in (run, other) if each and "batch_ms" in each]
    if len(both) < 2 or run.get("config") != other.get("config") or is_interpreted(summary):
        return None
    ratio = ratio_of_medians(other["step_ms"], run["step_ms"], spread_of_processes(summary))
    if work_of(run) == work_of(other):
        verdict = "same work"
    elif min(len(run["step_ms"]), len(other["step_ms"])) < LEAST_TIMES:
        verdict = "too few steps"
    else:
        verdict = "differs" if ratio.differs else "same"
    bounds = {"low": ratio.low, "high": ratio.high if math.isfinite(ratio.high) else None}
    return {"value": ratio.value, **bounds, "verdict": verdict}


def is_interpreted(summary):
    """Return whether Triton's interpreter ran our kernels, on a CPU."""
    on_cpu = summary["environment"] and summary["environment"]["arch"] == "cpu"
    return bool(on_cpu) and any(run["implementation"] == "triton" for run in runs_of(summary))


def is_recorded(summary):
    """Return whether the summary is a recording, which is shown beside the measurements of this machine."""
    return "file" in summary


def speed_sentence(comparison, difference, other):
    """Return the given sentence about the difference of two speeds, or one that says why there is none."""
    return {
        "differs": difference,
        "same": f"The step takes as long as {other}, within the measured spread.",
        "same work": f"The step does the same work as {other}: what differs in its time is noise.",
        "too few steps": f"Fewer than {LEAST_TIMES} steps cannot tell its time from that of {other}.",
    }[comparison["verdict"]]


# ----------------------------------------------------------------------------------------------------------------------
# Observations, one for each stage. Each returns whether its sign shows, and a text with the figures or the reason.


class NotMeasured(Exception):
    """A figure was not measured; the message names it."""


def without_figures(stage):
    """Return the reason why a stage was not measured."""
    if stage["obstacle"]:
        return f"It cannot run here: {stage['obstacle']}"
    if stage["error"]:
        return f"It failed: {stage['error'].splitlines()[0]}"
    return "The replay was interrupted before it was done"


class Replay:
    """The measured stages of a summary, by number."""

    def __init__(self, summary):
        self.summary = summary
        self.config = recorded_config(summary["config"])
        environment = summary["environment"]
        kind = "cpu" if environment["arch"] == "cpu" else "cuda"
        self.device = llama.Device(kind, environment["device"], environment["arch"], num_sms=0, warp_size=0)
        self.stages = {stage["stage"]: stage for stage in summary["stages"] if "batch_ms" in stage}

    def stage(self, number):
        if number not in self.stages:
            raise NotMeasured(f"stage {number} was not measured")
        return self.stages[number]

    def kernels(self, number):
        if not self.stage(number)["kernels"]:
            raise NotMeasured(f"stage {number} was not profiled")
        return self.stage(number)["kernels"]

    def triton_obstacle(self):
        """Return the reason why plain PyTorch ran instead of our kernels, or None."""
        if any(stage["implementation"] == "triton" for stage in self.stages.values()):
            return None
        return llama.triton_obstacle(self.device, self.config.use_amp).split(" (")[0]

    def on_cpu(self):
        """Return whether the replay ran on a CPU, where times do not distinguish the stages."""
        return self.device.type == "cpu"

    def require_times(self):
        """Raise NotMeasured if the times of the runs have no meaning."""
        if self.on_cpu():
            raise NotMeasured("on a CPU times do not tell the stages apart")

    def speed(self, run, other):
        return compare_speed(self.summary, run, other)


INTERPRETED = "Triton's interpreter ran the kernels, and its times mean nothing"


def without_our_kernels(replay, instead):
    """Return the reason why there are no times of our kernels: PyTorch or the interpreter ran; None on a GPU."""
    if replay.triton_obstacle():
        return f"{instead}: {replay.triton_obstacle()}."
    return f"{INTERPRETED}." if replay.on_cpu() else None


def see_broken_loss(replay):
    first, config = replay.stage(1)["first_loss"], replay.stage(1).get("config", replay.summary["config"])
    # Guessing costs ln(vocabulary). A first loss far above it comes from weights that are too large.
    guessing, hidden = math.log(config["vocab_size"]), config["hidden_dim"]
    if first is None:
        return True, "The first loss is not a number."
    text = f"The first loss is {number(first)}, {times(first / guessing)} the ln {config['vocab_size']} of guessing."
    if first > 2 * guessing:
        return True, f"{text} The hidden size is {hidden}."
    return False, f"{text} It grows with the hidden size, and {hidden} is too narrow to show it."


def see_slow_attention(replay):
    reason = without_our_kernels(replay, "Plain PyTorch's attention ran, which takes any layout")
    if reason:
        return False, reason
    # Tells which of both profiles is missing.
    replay.kernels(2), replay.kernels(3)
    slow, correct = replay.stage(2)["attention_us"], replay.stage(3)["attention_us"]
    if not (slow and correct):
        raise NotMeasured(f"the profile has no {ATTENTION_KERNEL}")
    text = (
        f"{ATTENTION_KERNEL} takes {slow:,.1f} us, {times(slow / correct)} the {correct:,.1f} us of stage 3, for the "
        f"same result at {replay.config.seq_len} tokens a sequence in {replay.summary['precision']}."
    )
    # In short sequences and in fp32 the kernel's arithmetic hides its loads.
    longer = [] if replay.config.seq_len >= 2048 else ["--seq-len 2048"]
    plainer = longer + ([] if replay.config.use_amp else ["-- --use-amp"])
    if slow / correct < 5 and plainer and not is_recorded(replay.summary):
        text += f" The slower loads weigh more in long sequences and beside short arithmetic: try {' '.join(plainer)}."
    return slow / correct >= 1.5, text


def host_share(run):
    """Return the part of a step in which the host is busy."""
    return run["host_ms"] / run["batch_ms"]["p50"]


def see_fake_timing(replay):
    stage = replay.stage(3)
    share = stage["phases_share"]
    if share is None:
        raise NotMeasured("--timing step does not time phases")
    text = f"Forward, backward and optimizer add up to {percent(share)} of the step."
    if replay.on_cpu():
        return False, f"{text} A CPU does its work while the host's clock runs: it takes a device that runs behind."
    # Launches return at once: without synchronization, a clock around them times the host.
    if share < 0.8:
        return True, f"{text} The rest is work that the device did after the host's clock was read."
    host = host_share(stage)
    return False, f"{text} The host is busy for {percent(host)} of the step: the device is never far behind it."


def see_slow_kernels(replay):
    reason = without_our_kernels(replay, "The naive kernel did not run, the library multiplied the matrices")
    if reason:
        return False, reason
    # Stage 5 differs from it in this kernel only.
    slower = replay.speed(replay.stage(OPTIMIZED), replay.stage(4))
    difference = f"The step takes {times(slower['value'])} stage {OPTIMIZED}'s."
    text = speed_sentence(slower, difference, f"stage {OPTIMIZED}'s")
    kernels = replay.stage(4)["kernels"]
    if kernels:
        first = kernels[0]
        text += f" {first['name']} is first in the kernel table with {percent(first['share'])} of the time."
        if first["name"] != NAIVE_SWIGLU:
            return False, f"{text} At these sizes it weighs more than the naive {NAIVE_SWIGLU}."
    return slower["verdict"] == "differs" and slower["value"] >= 1.2, text


def see_optimized(replay):
    stage, baseline = replay.stage(OPTIMIZED), replay.summary["baseline"]
    # That all weights learn is what the published kernels lacked.
    share = stage["gradient_share"]
    text = f"{percent(share)} of the weights receive a gradient"
    if stage["phases_share"]:
        text += f", the phases add up to {percent(stage['phases_share'])} of the step"
    text += f", and the first loss is {number(stage['first_loss'])}."
    faster = replay.speed(stage, baseline)
    if faster:
        difference = f"The speed is {times(faster['value'])} the baseline's, measured in the same replay."
        text += f" {speed_sentence(faster, difference, 'the baseline')}"
        if replay.triton_obstacle():
            text += f" Both are plain PyTorch: {replay.triton_obstacle()}."
    elif baseline:
        text += f" {INTERPRETED}."
    if not replay.on_cpu() and host_share(stage) > 0.8:
        busy = percent(host_share(stage))
        text += f" What is left is the host: it needs {busy} of the step to launch the kernels."
    return share == 1.0, text


def see_severed_autograd(replay):
    if replay.triton_obstacle():
        return False, f"Autograd cannot be cut out of plain PyTorch's operations: {replay.triton_obstacle()}."
    stage, correct = replay.stage(6), replay.stage(OPTIMIZED)
    text = f"{percent(stage['gradient_share'])} of the weights receive a gradient"
    # Autograd does not run the kernels that it does not know backwards.
    took = [run["phase_ms"].get("backward") for run in (stage, correct)]
    steps = [run.get("phase_steps_ms", {}).get("backward") for run in (stage, correct)]
    older = None in steps  # older replays do not have the phases of each step
    if None not in took and (older or ratio_of_medians(*steps, spread_of_processes(replay.summary)).differs):
        text += (
            f", and the backward pass takes {number(took[0])} ms where stage {OPTIMIZED}'s takes {number(took[1])} ms"
        )
        if replay.on_cpu():
            text += " in the interpreter, as kernels that autograd does not know are not run backwards"
    return stage["gradient_share"] < 0.5, f"{text}; the first loss, {number(stage['first_loss'])}, does not tell."


def see_cold_start(replay):
    stage = replay.stage(7)
    # Compilation is in the first steps: it moves the mean, and not the median.
    skew = stage["mean_over_median"]
    text = f"The mean step is {times(skew)} the median; the first took {stage['step_ms'][0]:,.1f} ms."
    if replay.on_cpu():
        return False, f"{text} No kernel is compiled on a CPU: what differs is the library's first calls, and noise."
    return skew >= 2, text


def see_graph(replay):
    eager = replay.stage(OPTIMIZED)
    faster = replay.speed(replay.stage(8), eager)
    other = f"stage {OPTIMIZED}'s"
    text = speed_sentence(faster, f"The step is {times(faster['value'])} as fast as {other}.", other)
    if faster["verdict"] == "differs" and faster["value"] >= 1.2:
        return True, text
    # A graph saves the host's time alone: where the device takes longer, there is nothing to win.
    host = host_share(eager)
    noisy = host > 0.8 and faster["verdict"] == "same"
    left = "its time varied by more than the graph saves" if noisy else "there is little to win"
    text += f" The host needs {percent(host)} of {other} step to launch the kernels: {left}."
    if not (replay.config.use_amp or is_recorded(replay.summary)):
        text += " Shorter kernels leave more: try -- --use-amp."
    return False, text


SEE = (
    see_broken_loss,
    see_slow_attention,
    see_fake_timing,
    see_slow_kernels,
    see_optimized,
    see_severed_autograd,
    see_cold_start,
    see_graph,
)  # of the stages from 1 on


def see_counted_layout(cases):
    bad, good = cases[2], cases[3]
    touched, least = (case["lines"]["128"] for case in (bad, good))
    text = (
        f"{ATTENTION_KERNEL} asks for {number(bad['bytes'] / 1e3)} KB with K and V badly strided and for "
        f"{number(good['bytes'] / 1e3)} KB without, for {'the same' if bad['same_result'] else 'another'} result. But "
        f"its loads touch {touched:,} cache lines of 128 bytes instead of {least:,}, {times(touched / least)} as many."
    )
    return touched > 1.5 * least, text


def see_counted_swiglu(cases):
    naive, hybrid = cases[4], cases[OPTIMIZED]
    again, once = (case["bytes"] / case["distinct_bytes"] for case in (naive, hybrid))
    text = (
        f"{naive['kernel']}, a program for each of {naive['programs']:,} elements, asks for "
        f"{number(naive['bytes'] / 1e3)} KB, and {number(naive['distinct_bytes'] / 1e3)} KB of them are distinct: each "
        f"byte {times(again)}. {hybrid['kernel']} asks for each byte {times(once)}."
    )
    return again > 2 * once, text


COUNTED = {2: see_counted_layout, 4: see_counted_swiglu}


def observe(summary, stage):
    """Return (whether the sign shows, text) of a stage's own figures."""
    try:
        if "batch_ms" not in stage:
            raise NotMeasured(without_figures(stage))
        shown, text = SEE[stage["stage"] - 1](Replay(summary))
    except NotMeasured as reason:
        return None, f"{reason}."
    return shown, text + (f" Beyond that it failed: {stage['error'].splitlines()[0]}." if stage["error"] else "")


def observations(summary):
    """Return [{"stage", "source", "shown", "text"}]; shown is None if a figure is missing, which the text names.

    In laptop mode a stage has one for each source: "measured", "counted", "recorded on" a device.
    """
    counted = {case["stage"]: case for case in (summary.get("counted") or {"cases": []})["cases"]}
    missing = "measured", None, "It cannot be measured here, and there is no recording of it."
    seen = []
    for stage in summary["stages"]:
        name, found = stage["stage"], []
        if stage.get("planned", True):
            found.append(("measured", *observe(summary, stage)))
        if name in COUNTED and name in counted:
            found.append(("counted", *COUNTED[name](counted)))
        for replay in summary.get("recorded", []):
            recorded = stage_of(replay, name)
            if recorded and "batch_ms" in recorded:
                shown, text = observe(replay, recorded)
                found.append((f"recorded on {replay['environment']['device']}", shown, f"{sizes(replay)}: {text}"))
        seen += [(name, *each) for each in found or [missing]]
    return [dict(zip(("stage", "source", "shown", "text"), values, strict=True)) for values in seen]


# ----------------------------------------------------------------------------------------------------------------------
# Tables


def figure(name):
    return lambda summary, run: number(run.get(name))


def phase(name):
    return lambda summary, run: number(run["phase_ms"].get(name))


def share(name):
    return lambda summary, run: "" if run[name] is None else percent(run[name]).removesuffix(" %")


def stage_of(summary, number):
    """Return the entry of a stage, or None."""
    return next((stage for stage in summary["stages"] if stage["stage"] == number), None)


def over_previous(summary, run):
    """Return compare_speed() of a stage with its predecessor; None for other runs."""
    return compare_speed(summary, run, stage_of(summary, predecessor(run["stage"]))) if "stage" in run else None


def over_baseline(summary, run):
    return compare_speed(summary, run, summary["baseline"]) if run is not summary["baseline"] else None


def over_optimized(summary, run):
    optimized = stage_of(summary, OPTIMIZED)
    return compare_speed(summary, run, optimized) if run is not optimized else None


def speed(relative):
    """Return a column of ratios of speeds where they differ, and of words of NOTES where they do not."""

    def text(summary, run):
        comparison = relative(summary, run) or {"verdict": None, "value": None}
        words = {None: "", "differs": number(comparison["value"]), "too few steps": "too few"}
        return words.get(comparison["verdict"], "same")

    return text


def added_step(summary, run):
    """Return the ms that a mistake alone adds to the step of stage 5, if the speed differs."""
    comparison = over_optimized(summary, run)
    if comparison is None or comparison["verdict"] != "differs":
        return ""
    return number(run["batch_ms"]["p50"] - stage_of(summary, OPTIMIZED)["batch_ms"]["p50"])


CLOCK = {  # {figure: its text from a summary and a run}; left out if the interpreter ran the kernels
    "speed, samples/s": figure("samples_per_second"),
    "speed / previous": speed(over_previous),
    "speed / baseline": speed(over_baseline),
    "added by the mistake, ms": added_step,
    "speed / stage 5": speed(over_optimized),
    "phases / step, %": share("phases_share"),
    "mean / median": figure("mean_over_median"),
}
FIGURES = CLOCK | {
    "first loss": figure("first_loss"),
    "final loss": figure("final_loss"),
    "step, median, ms": lambda summary, run: number(run["batch_ms"]["p50"]),
    "forward, ms": phase("forward"),
    "backward, ms": phase("backward"),
    "optimizer, ms": phase("optimizer"),
    "attention kernel, us": figure("attention_us"),
    "SwiGLU kernel, us": figure("swiglu_us"),
    "weights with a gradient, %": share("gradient_share"),
    "peak memory, MiB": figure("peak_memory_mib"),
}
COLUMNS = (
    "first loss", "final loss", "speed, samples/s", "speed / previous", "speed / baseline", "step, median, ms",
    "forward, ms", "backward, ms", "optimizer, ms", "phases / step, %", "attention kernel, us", "SwiGLU kernel, us",
    "weights with a gradient, %", "mean / median", "peak memory, MiB",
)  # fmt: skip
ALONE_COLUMNS = (
    "first loss", "step, median, ms", "added by the mistake, ms", "speed / stage 5", "phases / step, %",
    "attention kernel, us", "SwiGLU kernel, us", "weights with a gradient, %", "mean / median",
)  # fmt: skip
NOTES = (
    "speed / previous: against the stage before; from stage 6 on, against stage 5. It and speed / baseline are of the "
    "median steps, the speed is that of all steps together.",
    "same: the same operations ran, or the medians differ by no more than the measured spread, that of the steps (95 % "
    f"intervals of the median) and that of processes which did the same work; too few: fewer than {LEAST_TIMES} steps.",
    "attention kernel, SwiGLU kernel: one call of flash_attention_kernel, and of swiglu_kernel (stages 1 to 4, matrix "
    "product included) or swiglu_activation_kernel (from stage 5 on; the library multiplies).",
    "forward, backward, optimizer: of the median step. phases / step: the three added up, over the step around them, "
    "the median over the steps.",
)


def notes(summary):
    """Return the notes on the table of a replay: NOTES, and on a CPU the reason why times differ."""
    replay = Replay(summary)
    if not replay.on_cpu():
        return NOTES
    same = f"plain PyTorch ran the same operations in every stage ({replay.triton_obstacle()}): times differ by noise"
    return (*NOTES, f"{same if replay.triton_obstacle() else INTERPRETED}.")


def figures_table(summary, names, runs):
    """Return (labels, [(figure, its value in each run)]) of {label: run}, as text, without figures that no run has."""
    # A time of the interpreter says nothing about a GPU.
    names = [name for name in names if not (name in CLOCK and is_interpreted(summary))]
    rows = [(name, [FIGURES[name](summary, run) for run in runs.values()]) for name in names]
    return list(runs), [(name, cells) for name, cells in rows if any(cells)]


def label_of(stage):
    size = f", hidden {stage['config']['hidden_dim']}" if "config" in stage else ""
    return f"{stage['stage']} {stage['title']}{size}"


def comparison_table(summary):
    """Return (labels of the runs that have figures, [(figure, its value in each of them)]), all as text."""
    runs = {"baseline": summary["baseline"]} if summary["baseline"] else {}
    runs |= {label_of(stage): stage for stage in summary["stages"] if "batch_ms" in stage}
    return figures_table(summary, COLUMNS, runs)


def comparison_markdown(summary):
    labels, rows = comparison_table(summary)
    return markdown_table(["", *labels], [[head, *cells] for head, cells in rows])


def isolated_table(summary):
    """Return a table like comparison_table(), for stage 5 and each mistake alone."""
    runs = {f"{OPTIMIZED} {short_title(OPTIMIZED)}": stage_of(summary, OPTIMIZED) or {}}
    runs |= {llama.flag_of(run["mistake"]): run for run in summary["isolated"]}
    return figures_table(summary, ALONE_COLUMNS, {label: run for label, run in runs.items() if "batch_ms" in run})


def counted_table(summary):
    """Return ([figure], [(stage and kernel, its values)]) of the memory accesses that the interpreter counted."""
    head = ["loads", "KB asked for", "KB distinct", "lines", "fewest lines", "lines a load"]
    rows = []
    for case in summary["counted"]["cases"]:
        lines, fewest = case["lines"]["128"], case["fewest_lines"]["128"]
        kilobytes = [number(case[name] / 1e3) for name in ("bytes", "distinct_bytes")]
        cells = [f"{case['waves']:,}", *kilobytes, f"{lines:,}", f"{fewest:,}", number(lines / case["waves"])]
        rows.append((f"{case['stage']} {case['kernel']}", cells))
    return head, rows


MARKS = {True: "shows", False: "does not show", None: "not measured"}


def observation_lines(summary):
    """Yield (title, mark, text) of every observation; the mark names the source if it was not measured here."""
    for seen in observations(summary):  # computed again, so that older replays have the current texts
        mark = MARKS[seen["shown"]]
        mark = mark if seen["source"] == "measured" else f"{mark}, {seen['source']}"
        yield f"stage {seen['stage']}, {short_title(seen['stage'])}", mark, seen["text"]


def source_of(summary):
    """Return a text with device, versions and date."""
    environment = summary["environment"]
    versions = [f"PyTorch {environment['torch']}", f"Triton {environment['triton']}" if environment["triton"] else ""]
    return f"{environment['device']}, {', '.join(filter(None, versions))}, {summary['date'][:10]}"


def sizes(summary):
    return f"{summary['config']['batch_size']} x {summary['config']['seq_len']} tokens, {summary['precision']}"


def setting(summary):
    """Return a line with the source and the sizes."""
    config = summary["config"]
    return (
        f"{source_of(summary)}; batch {sizes(summary)}, hidden {config['hidden_dim']}, {config['num_layers']} layers; "
        f"{config['num_steps']} steps"
    )


@of_each_device("stages", "")
def stages_section(rows):
    """Show the newest replay of each setting: its table, its observations and its picture."""
    texts = []
    for name, replay in newest_of_settings(rows).groupby("file", sort=False):
        summary, picture = replay["result"].iloc[0], Path(name).with_suffix(".png")
        lines = [f"- {title} ({mark}): {text}" for title, mark, text in observation_lines(summary)]
        texts += [
            f"**{sizes(summary)}**, {summary['config']['num_steps']} steps",
            comparison_markdown(summary),
            "\n".join(lines),
            provenance(replay),
            f"![The picture of each stage](benchmarks/results/{picture})" if (RESULTS / picture).exists() else "",
        ]
    return paragraphs(*texts, "\n".join(f"- {note}" for note in NOTES))
