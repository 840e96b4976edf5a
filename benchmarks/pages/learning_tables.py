"""Write the table that tells whether FP8 learns as well as bf16, from runs with the same weights and batches."""

import numpy as np
import pandas as pd

from benchmarks.fp8_learning import smoothed
from benchmarks.pages.long_table import markdown, newest, of_each_device, paragraphs, provenance
from measure.tables import number

RUNS = "fp8_learning", "runs {run}"


def newest_runs(rows):
    """Return the runs of each size and data from the newest result that has them in two precisions."""
    # A newer result of one precision says nothing about the other.
    precisions = rows.groupby(["file", "size", "data"])["precision"].transform("nunique")
    rows = newest(rows[precisions > 1], "size", "data")
    return rows.sort_values("tflop", kind="stable")


def seconds_to(run, target):
    """Return the seconds until the smoothed loss is first at most a target, at the median ms a step; NaN if never."""
    # The mean of so many losses: a single loss depends on its batch.
    means = np.array(smoothed(run["losses"]))
    reached = np.flatnonzero(means <= target)
    first = len(run["losses"]) - len(means) + 1  # the step of the first mean
    return (first + reached[0]) * run["ms median"] / 1e3 if len(reached) else np.nan


def compare(runs, precision):
    """Return {name: table} of the seeds that were trained in bf16 and in a precision, a line for each seed.

    "final": both final losses. "seconds": the times to bf16's final loss. "seconds to both": those to the worse of both
    final losses, which both reach.
    """
    pair = ["bf16", precision]
    done = runs[runs["error"].isna()].set_index(["seed", "precision"])
    # A seed whose run diverged in one precision is left out of both.
    final = done["final_loss"].unstack().reindex(columns=pair).dropna()

    def times_to(targets):
        times = [[seconds_to(done.loc[(seed, name)], target) for name in pair] for seed, target in targets.items()]
        return pd.DataFrame(times, targets.index, pair)

    return {
        "final": final,
        "seconds": times_to(final["bf16"]),
        "seconds to both": times_to(final.max(axis="columns")),
    }


def spread(losses):
    """Return the largest less the smallest, in % of their mean."""
    return 100 * (losses.max() - losses.min()) / losses.mean()


def beside(values):
    return " / ".join(map(number, values))


def learning_row(runs, precision, found):
    """Return the texts of the runs of one size and data, and of compare(): means over the seeds of both precisions."""
    final, seconds = found["final"], found["seconds"].mean(skipna=False)
    pairs = runs[runs["seed"].isin(final.index)].groupby("precision")
    bf16 = runs[(runs["precision"] == "bf16") & runs["error"].isna()]["final_loss"]
    differences = 100 * (final[precision] / final["bf16"] - 1)
    each = ", ".join(map("{:+.2f}".format, differences))
    texts = {
        "final loss, bf16": number(final["bf16"].mean(), 4),
        "FP8": number(final[precision].mean(), 4),
        "difference (each seed)": f"{differences.mean():+.2f} % ({each})",
        "bf16 over the seeds": f"{spread(bf16):.2f} %" if len(bf16) > 1 else "not measured",
        "ms a step, bf16 / FP8": beside(pairs["ms median"].mean()[final.columns]),
        "s to bf16's loss, bf16 / FP8": beside(seconds),
        "ratio": f"{seconds['bf16'] / seconds[precision]:.2f}",
    }
    # FP8 does not reach the loss of bf16 with every seed: a mean over those that do would flatter it.
    if np.isnan(seconds[precision]):
        unreached = found["seconds"].index[found["seconds"][precision].isna()]
        steps = len(runs["losses"].iloc[0])
        both = found["seconds to both"].mean()
        texts["s to bf16's loss, bf16 / FP8"] = (
            f"not reached in {steps:,} steps (seed {', '.join(map(str, unreached))})"
        )
        texts["ratio"] = f"{both['bf16'] / both[precision]:.2f} to the worse of both final losses"
    return texts


@of_each_device(*RUNS)
def learning_section(rows):
    """Show a line for each size, data and precision, and the runs that failed."""
    rows = newest_runs(rows)
    lines, notes = [], []
    for (size, data), runs in rows.groupby(["size", "data"], sort=False):
        for precision in runs["precision"][runs["precision"] != "bf16"].unique():
            found = compare(runs, precision)
            if len(found["final"]):
                row = learning_row(runs, precision, found)
                lines.append({"": f"{size}, {data}, {precision}", **row})
        for run in runs[runs["error"].notna()].itertuples():
            notes.append(f"- {size} {data} seed {run.seed} {run.precision}: {run.error}")
    table = markdown(pd.DataFrame(lines)) if lines else ""
    return paragraphs(table, "\n".join(notes), provenance(rows))
