"""Draw a picture of bars for the stages whose sentence does not say it all.

Each function of STAGES takes a Replay and returns a Chart, or raises NotMeasured with the reason why there is none.
"""

from collections import Counter
from typing import NamedTuple

import tiny_llama_v3 as llama
from exercises.performance_debugging.evidence import NotMeasured, host_share
from exercises.performance_debugging.results import OPTIMIZED
from measure import drawing
from measure.drawing import BLUE, GREEN, RED, Bar, Filling
from measure.results import recorded_config
from measure.tables import number, percent
from profilers.kernel_names import operation_of

WRONG, RIGHT = Filling(RED, "////"), Filling(BLUE)
PHASES = {"forward": RIGHT, "backward": WRONG, "optimizer": Filling(GREEN, "----")}
MODULES = {"norm": "norms", "embed_tokens": "embedding", "attention.": "attention", "": "feed-forward"}


class Chart(NamedTuple):
    title: str
    rows: list  # of drawing.Bar
    axis: str  # its unit
    fillings: dict = {}  # {name: Filling} that a legend explains


def draw(chart, name):
    """Return the SVG of a Chart for a page on which no other has its name."""
    height = drawing.bars_height(len(chart.rows), 56 if chart.fillings else 34)
    with drawing.style():
        figure = drawing.new_figure(height)
        axes = figure.subplots()
        drawing.bars(axes, chart.rows)
        axes.set_xlabel(chart.axis)
        if chart.fillings:
            drawing.legend_below(figure, chart.fillings)
        return drawing.svg(figure, name, chart.title, "; ".join(row.label for row in chart.rows))


def in_step(name, run, parts):
    """Return a Bar of parts of a step, [(ms, Filling)], inside an outline of the length of the step."""
    together, step = sum(ms for ms, _ in parts), run["batch_ms"]["p50"]
    label = f"{name} {number(together)} of {number(step)} ms, {percent(together / step)}"
    return Bar(label, parts, outline=step)


def phases_of(run):
    return [(ms, PHASES[phase]) for phase, ms in run["phase_ms"].items()]


def phases_in_step(replay):
    """The phases inside their step; what is left was not timed. Stage 4 has the same kernels, and the right clock."""
    if replay.stage(3)["phases_share"] is None:
        raise NotMeasured("--timing step does not time phases")
    pair = ((n, replay.stages[n]) for n in (3, 4) if n in replay.stages)
    rows = [in_step(f"stage {n}: phases", run, phases_of(run)) for n, run in pair]
    return Chart("The phases, inside the outline of their step", rows, "ms", PHASES)


def operation_shares(kernels):
    """Return {operation: share of the time of all kernels}."""
    shares = Counter()
    for kernel in kernels:
        shares[operation_of(kernel["name"])] += kernel["share"]
    return shares


def kernel_shares(replay):
    """The share of the device's time of each operation's kernels, with and without the naive kernel."""
    # The diamonds show which operations take the time once the naive kernel is gone.
    after = operation_shares(replay.stages.get(OPTIMIZED, {}).get("kernels") or [])
    rows = []
    for name, share in operation_shares(replay.kernels(4)).most_common(6):
        label = f"{name}: {percent(share)}" + (f"; stage {OPTIMIZED}: {percent(after[name])}" if after else "")
        rows.append(Bar(label, [(100 * share, WRONG if "naive" in name else RIGHT)], mark=100 * after[name]))
    return Chart(f"Share of the device's time by operation: bars stage 4, diamonds stage {OPTIMIZED}", rows, "%")


def steps(replay):
    """The phases of a step of plain PyTorch and of every stage, inside its median."""
    replay.stage(OPTIMIZED)
    if replay.on_cpu:
        raise NotMeasured("on a CPU times do not tell the stages apart")
    runs = {"plain PyTorch": replay.summary["baseline"]} | {f"stage {n}": run for n, run in replay.stages.items()}
    rows = []
    for name, run in runs.items():
        if run:
            low, middle, high = (run["batch_ms"][key] for key in ("p20", "p50", "p80"))
            label = f"{name}: {number(middle)} ms ({number(low)} – {number(high)})"
            rows.append(Bar(label, phases_of(run), outline=middle))
    return Chart("The phases, inside the outline of the median step (and p20 – p80)", rows, "ms", PHASES)


def gradient_shares(config, without_gradient):
    """Return {module: (weights with a gradient, weights)} of a llama.Config and the names of weights without one."""
    # A model without memory: only the names and the sizes of its weights are needed.
    with llama.torch.device("meta"):
        model = llama.TinyLlamaTriton(config, llama.OPERATIONS["torch"])
    received, total = Counter(), Counter()
    for name, parameter in model.named_parameters():
        module = next(kind for part, kind in MODULES.items() if part in name)
        total[module] += parameter.numel()
        received[module] += parameter.numel() * (name not in without_gradient)
    return {module: (received[module], total[module]) for module in total}


def gradients_by_module(replay):
    """The share of each kind of weights that receives a gradient."""
    without = replay.stage(6)["without_gradient"]
    if without is None:
        raise NotMeasured("which weights receive a gradient was not recorded, only how many")
    rows = []
    for name, (received, total) in gradient_shares(recorded_config(replay.config(6)), without).items():
        rows.append(Bar(f"{name}: {received:,} of {total:,} weights", [(100 * received / total, RIGHT)], outline=100))
    return Chart("Weights with a gradient, by module", rows, "%")


def host_in_step(replay):
    """The time that the host needs to launch a step's kernels, inside the step."""
    rows = []
    for n in (OPTIMIZED, 8):
        run = replay.stage(n)
        rows.append(in_step(f"stage {n}: host", run, [(run["host_ms"], WRONG if host_share(run) > 0.8 else RIGHT)]))
    return Chart("The host's time to launch a step, inside the outline of the step", rows, "ms")


STAGES = {
    3: phases_in_step,
    4: kernel_shares,
    5: steps,
    6: gradients_by_module,
    8: host_in_step,
}
