"""Write the tables of several GPUs: one process alone beside a process on each GPU of a host."""

import itertools

import pandas as pd

from benchmarks import scaling
from benchmarks.message_sums import TIMED
from benchmarks.pages.long_table import (
    markdown,
    newest,
    of_each_device,
    or_error,
    paragraphs,
    provenance,
    tenths,
    texts,
    whole,
)
from measure.tables import number

SCALING = "scaling", "sizes {size} {mode} rows {row}"
OURS = "triton graph"
PLACES = {name: number for number, name in enumerate([*scaling.SCALED, *scaling.ROWS])}  # of sizes and rows


def newest_scaling(rows):
    """Return each row from the newest result with times of its number of processes, size and mode: weak, strong.

    A row has one process alone, too, so it can be beside those of another run.
    """
    rows = rows[rows["size"] != "tiny"]
    # What --time-limit left out has no times, and does not replace an older result.
    times = rows.groupby(["file", "size", "mode"])["ms exchanging"].transform("count")
    return newest(rows[times > 0], "processes", "size", "mode", "row")


def scaling_text(gpus, rows):
    """Return the table of a number of processes; "strong" divides the batch of "weak"."""
    names = ["size", "row"]
    rows = rows.sort_values(names, key=lambda column: column.map(PLACES), kind="stable")
    weak = rows[rows["mode"] == "weak"]
    # In the order of the rows of "weak"; cells of what was not measured stay empty.
    strong = rows[rows["mode"] == "strong"].set_index(names).reindex(weak[names]).set_index(weak.index)
    labels = weak["size"] + ", " + weak["row"]

    def span(*columns):
        low, high = (texts(weak[name], number) for name in columns)
        return low + "–" + high

    spread = (" (" + span("ms p20", "ms p80") + ")").fillna("")
    table = pd.DataFrame({
        "": labels.mask(weak["row"] == OURS, "**" + labels + "**"),
        "1 GPU, ms": or_error(weak, weak["ms alone"].map(number)),
        f"{gpus} GPUs, ms (p20–p80)": weak["ms exchanging"].map(number) + spread,
        f"of {gpus} times one, %": weak["efficiency"].map(tenths),
        "waiting, ms": span("ms waiting least", "ms waiting most"),
        "memory of each, MiB": weak["peak_memory_mib"].map(whole),
        "batch divided, ms": strong["ms exchanging"].map(number),
        f"divided, of {gpus} times one, %": strong["efficiency"].map(tenths),
    })  # fmt: skip
    return paragraphs(markdown(table), provenance(rows))


@of_each_device(*SCALING)
def scaling_section(rows):
    """Show our step beside PyTorch's for each number of processes."""
    return paragraphs(*itertools.starmap(scaling_text, newest_scaling(rows).groupby("processes")))


@of_each_device("message_sums", "sums {number}")
def sums_section(rows):
    """Show the error and the bias of sums in each type of message, for each way to add and mean of the gradients."""
    rows = newest(rows, "how", "processes")
    if rows.empty:
        return ""
    shown = texts(rows["relative_error"], "{:.1e}".format) + " (" + texts(rows["relative_bias"], "{:+.1e}".format) + ")"
    names = {"how": "added by", "mean": "mean of the gradients"}
    columns = dict(processes=rows["processes"].map(whole), mean=rows["mean"].map("{:g}".format))
    rows = rows.assign(text=shown, message="messages in " + rows["message"], **columns).rename(columns=names)
    index = [names["how"], "processes", names["mean"]]
    table = rows.pivot_table("text", index, "message", aggfunc="first", sort=False).reset_index()
    times = [f"{number(ms)} ms in {name}" for name, ms in rows["result"].iloc[0]["ms"].items()]
    sentence = f"An all-reduce of {TIMED:,} elements took {' and '.join(times)}." if times else ""
    return paragraphs(markdown(table), sentence, provenance(rows))
