"""Write the front page's table, and below it the releases, other shapes, and the size of the published speed-up."""

import pandas as pd

from benchmarks.pages.long_table import long_table, markdown, paragraphs, whole
from benchmarks.pages.replays import measured_stages, newest_replay
from benchmarks.pages.training_steps import (
    OURS,
    STEPS,
    WITH_OUR_OPTIMIZER,
    comparisons,
    complete_sizes,
    newest_of_sweep,
    strongest_peer,
)
from benchmarks.steps import ANCHOR
from measure.results import recorded_config
from measure.tables import NOT_MEASURED, number, percent
from measure.work import SWEEPS
from tiny_llama import hardware

IN_BF16 = "sdpa bf16 compile graph"
MISSING = "–"


def beside(form, ours, *others):
    """Return numbers as `**ours** / other / other`, with a dash for each that is missing."""
    shown = [MISSING if pd.isna(value) else form(value) for value in (ours, *others)]
    return " / ".join([f"**{shown[0]}**", *shown[1:]])


def savings(ratio, with_our_optimizer):
    """Return the parts of the ANCHOR's time that our kernels and our AdamW save; together they are 1 - ratio.

    ratio: ours to the anchor, with which the row between both, PyTorch's kernels with our AdamW, shares its kernels.
    with_our_optimizer: ours to that row. Ours took turns with each of the two.
    """
    if pd.isna(ratio) or pd.isna(with_our_optimizer):
        return MISSING
    between = ratio / with_our_optimizer
    return f"{percent(between - ratio)} + {percent(1 - between)}"


def front_row(size, rows):
    """Return the texts of a size: ours, the strongest peer, and PyTorch with weights and moments in bf16."""
    (peer,), config = strongest_peer(rows), rows["config"].iloc[0]
    named = rows.set_index("row").reindex([*{OURS, peer, IN_BF16, ANCHOR, WITH_OUR_OPTIMIZER}])
    ratios, ms, memory = (named[name] for name in ("ratio median", "ms median", "peak_memory_mib"))
    ratio = comparisons(rows)[OURS, peer]["time_ratio"]
    weights = hardware.count_matrix_weights(recorded_config(config)) / 1e6
    return {
        "**ours** / peer / PyTorch in bf16": f"**{size}**: {config['batch_size']} x {config['seq_len']:,} tokens, "
        f"{number(weights)} M weights",
        "ms a step": beside(number, named["ours"][peer], ms[peer], ms[IN_BF16]),
        "ours / its time": beside("{:.2f}".format, ratio, ratios[IN_BF16]),
        f"kernels + AdamW save of `{ANCHOR}`": savings(ratios[ANCHOR], ratios[WITH_OUR_OPTIMIZER]),
        "peak memory, MiB": beside(whole, memory[OURS], memory[peer], memory[IN_BF16]),
        "peer": f"`{peer}`",
    }


def measured_with(rows):
    """Return the device and the releases with which rows were measured."""
    names = "{device} with PyTorch {torch} and Triton {triton}"
    return "; ".join(dict.fromkeys(names.format_map(result["environment"]) for result in rows["result"]))


def shapes_sentence(rows):
    """Return the best, the worst and the median ratio of one device's sweep over shapes; empty without any."""
    pairs = newest_of_sweep(rows, "shapes").drop_duplicates("size").set_index("size")["comparisons"].str[0]
    ratios = pairs.dropna().str["time_ratio"].astype(float)
    if ratios.empty:
        return ""
    best, worst = (f"{ratios[size]:.2f} ({size})" for size in (ratios.idxmin(), ratios.idxmax()))
    count = f"{len(ratios)} of {len(SWEEPS['shapes'])}"
    return (
        f"At [shapes of other models](docs/measured.md#shapes-of-ten-models), {count} measured, ours takes {best} to "
        f"{worst} of the peer's time, {ratios.median():.2f} in the median."
    )


def published_sentence(replays):
    """Return how a correct step compares with plain PyTorch at the published size; empty without a replay of it."""
    replay = newest_replay(replays, 128, "fp32", 5, 6)
    if replay.empty:
        return ""
    plain, correct = replay["baseline"].iloc[0], measured_stages(replay["result"].iloc[0])[5]
    speed = plain["batch_ms"]["p50"] / correct["batch_ms"]["p50"]
    memory = correct["peak_memory_mib"] / plain["peak_memory_mib"]
    return (
        "At the size of the published 5.5x, 8 x 128 tokens in fp32 and launched kernel by kernel, our correct step is "
        f"{speed:.1f} times as fast as plain PyTorch and needs {memory:.2f} times its memory."
    )


def front_section(folder):
    """Show the complete sizes of the first device, and what was measured of it beside them."""
    sizes = complete_sizes(folder)
    if not sizes:
        return NOT_MEASURED
    rows = pd.concat(sizes.values())
    steps, replays = (
        table[table["device"] == rows["device"].iloc[0]]
        for table in (long_table(folder, *STEPS), long_table(folder, "stages"))
    )
    files = "[the other rows, files and commits](docs/measured.md#training-steps)"
    sentences = f"Measured on one {measured_with(rows)}: {files}.", shapes_sentence(steps), published_sentence(replays)
    table = pd.DataFrame([front_row(*item) for item in sizes.items()])
    return paragraphs(markdown(table), " ".join(filter(None, sentences)))
