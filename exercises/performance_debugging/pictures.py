"""Draw a picture of bars for the stages whose sentence does not say it all.

Each function of STAGES takes a Replay and returns a Chart, or raises NotMeasured with the reason why there is none.
"""

from collections import Counter
from functools import partial
from typing import NamedTuple

from exercises.performance_debugging.evidence import NotMeasured
from exercises.performance_debugging.results import OPTIMIZED
from measure import drawing
from measure.drawing import BLUE, GREEN, RED, Bar, Filling
from measure.tables import number, percent
from profilers.kernel_names import operation_of

WRONG, RIGHT = Filling(RED, "////"), Filling(BLUE)
PHASES = {"forward": RIGHT, "backward": WRONG, "optimizer": Filling(GREEN, "----")}


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


def phases_in_steps(replay, stage, shown):
    """Return a Chart of the phases inside their step for the runs of these numbers, 0 for plain PyTorch.

    What is left of a step was not timed: in stage 3 most of it, while stage 4 has the same kernels and the right clock.
    """
    if replay.on_cpu:
        raise NotMeasured("on a CPU times do not tell the stages apart")
    if replay.stage(stage)["phases_share"] is None:
        raise NotMeasured("--timing step does not time phases")
    runs, rows = {0: replay.summary["baseline"]} | replay.stages, []
    for n in shown:
        if run := runs.get(n):
            low, middle, high = (run["batch_ms"][key] for key in ("p20", "p50", "p80"))
            parts = [(ms, PHASES[phase]) for phase, ms in run["phase_ms"].items()]
            share = percent(sum(run["phase_ms"].values()) / middle)
            name = f"stage {n}" if n else "plain PyTorch"
            label = f"{name}: {number(middle)} ms ({number(low)} – {number(high)}), phases {share}"
            rows.append(Bar(label, parts, outline=middle))
    return Chart("The phases, inside the outline of the median step (and p20 – p80)", rows, "ms", PHASES)


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


STAGES = {
    3: partial(phases_in_steps, stage=3, shown=(3, 4)),
    4: kernel_shares,
    5: partial(phases_in_steps, stage=5, shown=range(9)),
    8: partial(phases_in_steps, stage=8, shown=(5, 8)),
}
