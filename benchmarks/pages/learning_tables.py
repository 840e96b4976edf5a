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


def learning_row(runs, precision):
    """Return the texts of the runs of one size and data in bf16 and in a precision: means over the seeds of both."""
    pair = ["bf16", precision]
    done = runs[runs["error"].isna()].set_index(["seed", "precision"])
    bf16 = done["final_loss"].xs("bf16", level="precision")
    # A seed whose run diverged in one precision is left out of both.
    final = done["final_loss"].unstack().reindex(columns=pair).dropna()
    # The worse of both final losses, as both reach it.
    targets = final.max(axis="columns")
    done["seconds"] = [seconds_to(run, targets.get(run.name[0], np.inf)) for _, run in done.iterrows()]
    means = done.loc[final.index].groupby("precision")[["ms median", "seconds"]].mean().loc[pair]
    differences = 100 * (final[precision] / final["bf16"] - 1)
    each = ", ".join(map("{:+.2f}".format, differences))
    return {
        "final loss, bf16": number(final["bf16"].mean(), 4),
        "FP8": number(final[precision].mean(), 4),
        "difference (each seed)": f"{differences.mean():+.2f} % ({each})",
        "bf16 over the seeds": f"{100 * np.ptp(bf16) / bf16.mean():.2f} %" if len(bf16) > 1 else "not measured",
        "ms a step, bf16 / FP8": " / ".join(map(number, means["ms median"])),
        "s to a loss of both, bf16 / FP8": " / ".join(map(number, means["seconds"])),
        "ratio": f"{means['seconds'].iloc[0] / means['seconds'].iloc[1]:.2f}",
    }


@of_each_device(*RUNS)
def learning_section(rows):
    """Show a line for each size, data and precision, and the runs that failed."""
    rows = newest_runs(rows)
    lines, notes = [], []
    for (size, data), runs in rows.groupby(["size", "data"], sort=False):
        for precision in runs["precision"][runs["precision"] != "bf16"].unique():
            of_both = runs[runs["error"].isna()].groupby("seed")["precision"].agg(set)
            if any({"bf16", precision} <= of_seed for of_seed in of_both):
                lines.append({"": f"{size}, {data}, {precision}", **learning_row(runs, precision)})
        for run in runs[runs["error"].notna()].itertuples():
            notes.append(f"- {size} {data} seed {run.seed} {run.precision}: {run.error}")
    table = markdown(pd.DataFrame(lines)) if lines else ""
    return paragraphs(table, "\n".join(notes), provenance(rows))
