"""Draw the pictures of the pages from results; those of traces are in traces.py.

Each function takes the folder of results and the path of the picture. It draws one device, and nothing without results.
"""

import contextlib

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from benchmarks.pages.long_table import first_device, long_table
from benchmarks.pages.training_runs import OURS, newest_run
from benchmarks.pages.training_steps import PLAIN, complete_sizes, strongest_peer
from measure.drawing import BLUE, LINE, MUTED, RED, save_png, save_svg, style
from measure.tables import number, percent


@contextlib.contextmanager
def picture(path, width, height, *panels):
    """Yield the panels of a picture of so many inches, and write it, 1200 dots wide."""
    with style():
        figure, axes = plt.subplots(*panels, figsize=(width, height), layout="constrained", squeeze=False)
        yield axes
        save_png(figure, path, dpi=1200 / width)


# ----------------------------------------------------------------------------------------------------------------------
# The front page


def learning_runs(folder):
    """Return the newest results of a run that learns and of one that does not; both or none."""
    tables = [first_device(long_table(folder, f"learning_{kind}")) for kind in ("correct", "severed")]
    return [table["result"].iloc[0] for table in tables] if all(map(len, tables)) else []


def draw_losses(axes, correct, severed):
    """Draw the loss of a run that learns and of one that does not, on data that can be learnt."""
    # The share of weights with a gradient is what tells both runs apart before they train.
    summary = severed["summary"]
    share = percent(summary["parameters_with_gradient"] / summary["parameters"])
    severed_label = f"kernels outside autograd, as published:\n{share} of the weights learn"
    looks = {
        severed_label: (severed, RED, "--"),
        "the same kernels, with their gradients": (correct, BLUE, "-"),
    }
    for label, (run, color, look) in looks.items():
        losses = [step["loss"] for step in run["steps"]]
        axes.plot(range(1, len(losses) + 1), losses, look, color=color, label=label)
    entropy = correct["summary"]["entropy"]
    axes.axhline(entropy, color=MUTED, linestyle=":", label=f"entropy of the data, {entropy:.2f}")
    axes.legend(loc="center right")
    axes.set(
        xlim=0,
        ylim=(0, 8),
        xlabel="step",
        ylabel="loss, nats a token",
        title="Does it learn?",
    )


def draw_steps(axes, sizes):
    """Draw the time of a step relative to ours, three bars for each of {size: rows}."""
    # Relative to ours, as sizes differ by a factor of a hundred.
    ms = pd.DataFrame()
    for size, rows in sizes.items():
        (peer,), config = strongest_peer(rows), rows["config"].iloc[0]
        named = rows.set_index("row")
        label = f"{size}\n{config['batch_size']} x {config['seq_len']} tokens"
        times = [*named["ms median"][[PLAIN, peer]], named["ours"][peer]]
        ms[label] = pd.Series(times, ["plain PyTorch", "strongest peer", "ours"])
    ratios = (ms / ms.loc["ours"]).T
    ratios.plot.barh(ax=axes, color=[LINE, MUTED, BLUE], width=0.8)
    for bars, (_, times) in zip(axes.containers, ms.iterrows(), strict=True):
        texts = [
            f"{number(time)} ms, {bar.get_width():.1f} x" if time > 0 else "out of memory"
            for bar, time in zip(bars, times, strict=True)
        ]
        axes.bar_label(bars, texts, padding=8)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    where = f"{rows['precision'].iloc[0]}, {rows['device'].iloc[0]}"
    axes.set(
        xlabel=f"time of a training step, ours = 1 ({where})",
        title="How long does a step take?",
    )


def draw_front_page(folder, path):
    runs, sizes = learning_runs(folder), complete_sizes(folder)
    if runs and sizes:
        with picture(path, 12, 4.2, 1, 2) as ((left, right),):
            draw_losses(left, *runs)
            draw_steps(right, sizes)


def draw_learning(folder, path):
    """Draw the losses alone, for a slide."""
    if runs := learning_runs(folder):
        with picture(path, 8, 3.4) as ((axes,),):
            draw_losses(axes, *runs)


# ----------------------------------------------------------------------------------------------------------------------
# A training run


def draw_training(folder, path):
    """Draw the loss over the seconds of the newest training run, ours and PyTorch's."""
    run = newest_run(folder)
    if run.empty:
        return
    rows = {name: row for name, row in run["result"].iloc[0]["rows"].items() if not row["error"]}
    with style():
        figure = Figure(figsize=(720 / 72, 320 / 72), dpi=72, layout="constrained")
        axes = figure.subplots()
        for name, row in rows.items():
            look = dict(color=BLUE) if name == OURS else dict(color=RED, linestyle="--")
            axes.plot(row["curve"]["seconds"], row["curve"]["loss"], label=name, **look)
        # The first losses are several times the last, and would leave the rest no room.
        axes.set(xlim=0, ylim=(0, 3 * rows[OURS]["final_loss"]), xlabel="seconds", ylabel="loss, nats a byte")
        axes.set_title("How fast does the loss fall?")
        axes.legend(loc="upper right")
        words = ", ".join(f"{name}: {row['final_loss']:.2f} at the end" for name, row in rows.items())
        save_svg(figure, path, "Loss over the seconds of training", words)
