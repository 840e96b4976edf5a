"""Writes the table and the picture of the front page, and the table of the published speed-up.

Each function takes a folder of results. front_section(folder) and published_section(folder) return Markdown,
draw(folder, path) writes a picture. `python -m benchmarks.pages.publish` calls all three.
"""

from collections.abc import Callable
from typing import NamedTuple

import tiny_llama_v3 as llama
from benchmarks.steps import ROWS, conclude, is_fp8
from measure import drawing
from measure.drawing import BLUE, INK, LINE, MUTED, RED
from measure.results import newest_first, of_newest, recorded_config
from measure.tables import NOT_MEASURED, markdown_table, number, provenance, sources
from tiny_llama import hardware

SIZES = ("small", "medium", "large")
OURS = "triton graph"
PLAIN = "torch graph"  # plain PyTorch, captured like ours, without the host's time, which differs most
WITH_OUR_OPTIMIZER = "sdpa flat compile graph"  # PyTorch's fused attention, with our optimizer
CORRECT, SEVERED = 5, 6  # stages of the workshop


def is_complete(size):
    """Whether ours, the strongest peer and plain PyTorch were measured."""
    rows = size["rows"]
    needed = [OURS, PLAIN, size.get("strongest_peer")]
    return "comparisons" in size and all(name in rows and not rows[name]["error"] for name in needed)


def newest_sizes(folder, is_wanted=is_complete, sizes=SIZES, device=None):
    """{size: (name, result)}: for each of these sizes the newest measurement that is wanted, of newest_first()."""
    newest = {}
    for name, result in newest_first(folder, "steps", device):
        for size_name, size in result["sizes"].items():
            if is_wanted(size):
                newest.setdefault(size_name, (name, result))
    return {name: newest[name] for name in sizes if name in newest}


def with_other_rows(folder, size_name, name, result):
    """(the measurement of a size, [(name, result)]), with rows in bf16 of other results of this model and device.

    What takes minutes to compile may be measured apart. Each row was timed in turns with ours of its own result.
    """
    size, sources = result["sizes"][size_name], [(name, result)]
    rows = dict(size["rows"])
    for other in newest_first(folder, "steps", result["environment"]["device"]):
        theirs = other[1]["sizes"].get(size_name)
        if theirs and theirs["config"] == size["config"]:
            added = {n: row for n, row in theirs["rows"].items() if not (n in rows or row["error"] or is_fp8(n))}
            rows |= added
            sources += [other] * bool(added)
    if len(sources) > 1:
        size = size | {"rows": {n: rows[n] for n in ROWS if n in rows}}
        conclude(size)
    return size, sources


# ----------------------------------------------------------------------------------------------------------------------
# The table: our step and that of the strongest peer


def front_row(size_name, size):
    config = size["config"]
    ours, peer = size["rows"][OURS], size["rows"][size["strongest_peer"]]
    memory = ours["peak_memory_mib"], peer["peak_memory_mib"]
    pair = next(pair for pair in size["comparisons"] if pair["peer"] == size["strongest_peer"])
    tokens = f"{config['batch_size']} x {config['seq_len']:,} tokens"
    own_optimizer = size["rows"].get(WITH_OUR_OPTIMIZER, {}).get("ms")
    return [
        f"**{size_name}**: {tokens}, {number(hardware.count_matrix_weights(recorded_config(config)) / 1e6)} M weights",
        f"**{number(ours['ms']['median'])}** / {number(peer['ms']['median'])}",
        f"**{pair['time_ratio']:.2f}**",
        f"{ours['ms']['median'] / own_optimizer['median']:.2f}" if own_optimizer else "not measured",
        f"**{ours['tokens_per_second']:,.0f}** / {peer['tokens_per_second']:,.0f}",
        f"**{memory[0]:,.0f}** / {memory[1]:,.0f}" if all(memory) else "",
        f"`{size['strongest_peer']}`",
    ]


def front_section(folder):
    sizes = {name: with_other_rows(folder, name, *item) for name, item in newest_sizes(folder).items()}
    if not sizes:
        return NOT_MEASURED
    header = ["**ours** / strongest peer", "ms a step", "ratio", "with our AdamW", "tokens/s", "peak memory, MiB"]
    header.append("which peer")
    rows = [front_row(name, size) for name, (size, _) in sizes.items()]
    table = markdown_table(header, rows, [False, True, True, True, True, True, False])
    return f"{table}\n\n{sources(item for _, items in sizes.values() for item in items)}"


# ----------------------------------------------------------------------------------------------------------------------
# The published speed-up and ours


class Published(NamedTuple):
    """A figure that was published for 8 x 128 tokens in fp32 on an AMD MI325X."""

    label: str
    unit: str
    baseline: str | None  # PyTorch's, as printed
    kernels: str | None
    figure: Callable  # the same figure of a run of ours
    reason: str


def phase(name):
    return lambda run: run["phase_ms"][name]


PUBLISHED = (
    Published("forward", "ms", "10.8", "3.2", phase("forward"), "fewer and fused kernels: real"),
    Published("backward", "ms", "9.2", "0.3", phase("backward"), "not computed: the graph ends at the last norm"),
    Published(
        "optimizer",
        "ms",
        None,
        None,
        phase("optimizer"),
        "one tensor to update; ours also sets the missing gradients to zero, one by one",
    ),
    Published("whole step", "ms", "21.7", "3.9", lambda run: run["batch_ms"]["p50"], "all of the above"),
    Published("memory", "MiB", "522.3", "281.8", lambda run: run["peak_memory_mib"], "AdamW's state, never created"),
    Published("weights with a gradient", "%", "100", "1.6", lambda run: 100 * run["gradient_share"], "the cause of it"),
)


def change(before, after, unit):
    """Formats two numbers, or strings of numbers, as `10.8 → 3.2 ms, 3.4 x`."""
    shown = [value if isinstance(value, str) else number(value) for value in (before, after)]
    factor = float(before) / float(after)
    times = "" if unit == "%" else f", {factor:.0f} x" if factor >= 9.95 else f", {factor:.1f} x"
    return f"{shown[0]} → {shown[1]} {unit}{times}"


def has_what_was_published(replay):
    measured = {stage["stage"] for stage in replay["stages"] if "batch_ms" in stage}
    same_step = replay["precision"] == "fp32" and replay["config"]["seq_len"] == 128
    return same_step and replay["baseline"] and {SEVERED, CORRECT} <= measured


@of_newest("stages", has_what_was_published)
def published_section(name, replay):
    stages = {stage["stage"]: stage for stage in replay["stages"]}
    rows = []
    for line in PUBLISHED:
        baseline, severed, correct = map(line.figure, (replay["baseline"], stages[SEVERED], stages[CORRECT]))
        reported = change(line.baseline, line.kernels, line.unit) if line.baseline else ""
        ours = [change(baseline, run, line.unit) for run in (severed, correct)]
        rows.append([line.label, reported, *ours, line.reason])
    header = ["", "published (AMD MI325X)", "severed, stage 6", "correct, stage 5", "what the published gain is"]
    notes = (
        "PyTorch → kernels, 8 x 128 tokens, fp32. The published run's weights with a gradient were counted in its "
        "code. Its memory is what is allocated after a step; ours is the peak, and our AdamW keeps state for every "
        "weight in stage 6 as well, which saves activations only. The forward pass of stage 6 is slower than that of "
        "stage 5, because its layers are called one by one: a group of layers needs autograd."
    )
    return "\n\n".join(
        [markdown_table(header, rows, [False, True, True, True, False]), notes, provenance(name, replay)]
    )


# ----------------------------------------------------------------------------------------------------------------------
# The picture


def draw_losses(axes, correct, severed):
    """Draws the loss of a run that learns and of one that does not, on data that can be learnt."""
    summary, severed_summary = correct["summary"], severed["summary"]
    share = severed_summary["parameters_with_gradient"] / severed_summary["parameters"]
    labels = (
        (severed, RED, "--", f"kernels outside autograd, as published:\n{100 * share:.1f} % of the weights learn"),
        (correct, BLUE, "-", "the same kernels, with their gradients"),
    )
    steps, entropy = len(correct["steps"]), summary["entropy"]
    text_at = steps // 3
    for run, color, dashes, label in labels:
        losses = [step["loss"] for step in run["steps"]]
        axes.plot(range(1, steps + 1), losses, dashes, color=color, linewidth=2)
        axes.text(text_at, losses[text_at] + 0.25, label, color=color, va="bottom")
    axes.axhline(entropy, color=MUTED, linestyle=(0, (1, 2)), linewidth=1.2)
    axes.text(text_at, entropy - 0.15, f"entropy of the data, {entropy:.2f}", color=MUTED, va="top")
    axes.set(xlim=(0, steps), ylim=(0, 8), xlabel="step", ylabel="loss, nats a token")
    axes.set_title("Does it learn?")


def draw_steps(axes, sizes, device):
    """Draws the time of a step relative to ours, three bars for each of {size: measurement}."""
    for group, (name, size) in enumerate(sizes.items()):
        contenders = {"plain PyTorch": (PLAIN, LINE), "strongest peer": (size["strongest_peer"], MUTED)}
        contenders["ours"] = (OURS, BLUE)
        ours = size["rows"][OURS]["ms"]["median"]
        for position, (label, (row, color)) in enumerate(contenders.items(), 4 * group):
            ms = size["rows"][row]["ms"]["median"]
            axes.barh(position, ms / ours, color=color, height=0.9, label=label if group == 0 else None)
            times = "" if row == OURS else f",  {ms / ours:.1f} x"
            axes.text(ms / ours + 0.12, position, f"{number(ms)} ms{times}", va="center", color=INK, fontsize=10)
        tokens = f"{size['config']['batch_size']} x {size['config']['seq_len']}"
        axes.text(-0.2, 4 * group + 1, f"{name}\n{tokens} tokens", ha="right", va="center", color=INK)
    axes.invert_yaxis()
    axes.margins(x=0.17)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"time of a training step, ours = 1 ({size['precision']}, {device})")
    axes.set_title("How long does a step take?")
    beside_the_first_short_bars = dict(bbox_to_anchor=(1.0, 2.0), bbox_transform=axes.get_yaxis_transform())
    axes.legend(loc="center right", frameon=False, labelcolor=INK, **beside_the_first_short_bars)


def draw_learning(folder, path):
    """Draws the losses alone, for a slide, if there are results."""
    runs = [newest_first(folder, f"learning_{kind}") for kind in ("correct", "severed")]
    if all(runs):
        with drawing.style():
            figure = drawing.new_figure(height=450, width=900, unit=100)
            draw_losses(figure.subplots(), *(run[0][1] for run in runs))
            drawing.save_png(figure, path, dpi=130)


def draw(folder, path):
    """Writes the picture. UsageError if a result is missing."""
    newest = newest_sizes(folder)
    sizes = {name: with_other_rows(folder, name, *item)[0] for name, item in newest.items()}
    devices = dict.fromkeys(result["environment"]["device"] for _, result in newest.values())
    runs = [newest_first(folder, f"learning_{kind}") for kind in ("correct", "severed")]
    if not sizes or not all(runs):
        raise llama.UsageError(f"{folder} lacks steps_*.json, learning_correct_*.json or learning_severed_*.json")
    with drawing.style():
        figure = drawing.new_figure(height=420, width=1200, unit=100)
        left, right = figure.subplots(1, 2)
        figure.get_layout_engine().set(wspace=0.06)
        draw_losses(left, *(run[0][1] for run in runs))
        draw_steps(right, sizes, ", ".join(devices))
        drawing.save_png(figure, path, dpi=100)
