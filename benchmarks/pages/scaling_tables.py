"""Write the tables of several GPUs: one process alone beside a process on each GPU of a host."""

import numpy as np
import pandas as pd

from benchmarks.pages.long_table import (
    markdown,
    newest,
    of_each_device,
    or_error,
    paragraphs,
    provenance,
    tenths,
    whole,
)
from measure.tables import number

SCALING = "scaling", "sizes {size} {mode} rows {row}"
OURS = "triton graph"


def newest_scaling(rows):
    """Return the rows of the newest result with times of each number of processes, size and mode: weak, strong."""
    rows = rows[rows["size"] != "tiny"]
    # What --time-limit left out has no times, and does not replace an older result.
    times = rows.groupby(["file", "size", "mode"])["ms exchanging"].transform("count")
    return newest(rows[times > 0], "processes", "size", "mode")


def comparison_of(size, weak):
    """Return a text that compares ours with the fastest peer of a size, by windows in turns; empty without peers."""
    rows = weak.set_index("row")
    peers = rows[rows["ratio"].notna() & ~rows.index.str.startswith("triton")]
    if peers.empty:
        return ""
    fastest = peers.sort_values("ms exchanging").iloc[0]
    # Ours without a captured graph, whose host time one sees with small models.
    eager = rows["tokens_per_second"].get("triton", np.nan) / fastest["tokens_per_second"]
    without = f" ({eager:.2f} without)" if eager > 0 else ""
    return f"{size} {1 / fastest['ratio']:.2f} times{without} those of {fastest.name}"


def scaling_text(gpus, rows):
    """Return the table and the sentences of a number of processes; "strong" divides the batch of "weak"."""
    names = ["size", "row"]
    weak = rows[rows["mode"] == "weak"]
    # In the order of the rows of "weak"; cells of what was not measured stay empty.
    strong = rows[rows["mode"] == "strong"].set_index(names).reindex(weak[names]).set_index(weak.index)
    labels = weak["size"] + ", " + weak["row"]
    table = pd.DataFrame({
        "": labels.mask(weak["row"] == OURS, "**" + labels + "**"),
        "1 GPU, ms": or_error(weak, weak["ms alone"].map(number)),
        f"{gpus} GPUs, ms": weak["ms exchanging"].map(number),
        "tokens/s": weak["tokens_per_second"].map(whole),
        f"of {gpus} times one": weak["efficiency"].map(tenths),
        "memory of each, MiB": weak["peak_memory_mib"].map(whole),
        "batch divided, ms": strong["ms exchanging"].map(number),
        f"divided, of {gpus} times one": strong["efficiency"].map(tenths),
    })  # fmt: skip
    compared = [comparison_of(*size) for size in weak.groupby("size", sort=False)]
    compared = "; ".join(filter(None, compared))
    return paragraphs(
        markdown(table),
        compared and f"Tokens a second of our step on {gpus} GPUs with a captured graph: {compared}.",
        provenance(pd.concat([weak, rows])),
    )


@of_each_device(*SCALING)
def scaling_section(rows):
    """Show our step beside PyTorch's for each number of processes."""
    steps = newest_scaling(rows).groupby("processes")
    return paragraphs(*(scaling_text(*part) for part in steps if "weak" in set(part[1]["mode"])))
