"""Write the tables of training steps: of each model, of GPT-2, of sweeps over one size, of shapes, and of FP8."""

import statistics

import pandas as pd

from benchmarks.pages.long_table import (
    first_device,
    long_table,
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
from benchmarks.steps import comparison_table, is_fp8
from measure.results import recorded_config
from measure.tables import markdown_table, number
from measure.work import SWEEPS

STEPS = "steps", "sizes {size} rows {row}"
OURS = "triton graph"
IN_FP8 = "triton fp8 graph"
PLAIN = "torch graph"  # captured like ours, without the host's time, which differs most
EAGER = "torch", "sdpa compile"  # beside ours, which wait for the same host
WITH_OUR_OPTIMIZER = "sdpa flat compile graph"  # PyTorch's fused attention, with our optimizer


# ----------------------------------------------------------------------------------------------------------------------
# Which rows a table has


def timed(rows):
    """Return the rows of sizes that were measured to the end with at least one time, from small to large."""
    # A size is concluded by its comparisons: without them the benchmark was interrupted.
    ended = rows[rows["comparisons"].notna()]
    has_time = ended.groupby(["file", "size"])["ms median"].transform("count") > 0
    return ended[has_time].sort_values("tflop_per_step", kind="stable")


def is_complete(rows):
    """Return whether rows of one size and result have ours, the strongest peer, and plain PyTorch, if that fits."""
    does_not_fit = (rows["row"] == PLAIN) & rows["error"].str.startswith("OutOfMemoryError", na=False)
    names = rows["row"][rows["error"].isna() | does_not_fit]
    return {OURS, PLAIN, rows["strongest_peer"].iloc[0]} <= {*names}


def whole_size(rows):
    """Return the rows of a size's newest complete result, and those which only its other results have.

    What takes minutes to compile may be measured apart. Each row was timed in turns with ours of its own result.
    """
    # The time of ours in turns with each row, by which this is compared.
    rows = rows.assign(ours=rows["reference_windows_ms"].map(statistics.median, na_action="ignore"))
    # A newer result of some rows, as somebody measures who looks into one of them, does not replace a whole table.
    results = [result for _, result in rows.groupby("file", sort=False)]
    base = next(filter(is_complete, results), results[0])
    others = [result[result["error"].isna()] for result in results if same_model(result, base)]
    return pd.concat([base, *others]).drop_duplicates("row").sort_values("graph", kind="stable")


def same_model(rows, others):
    return recorded_config(rows["config"].iloc[0]) == recorded_config(others["config"].iloc[0])


def sizes_in_bf16(rows):
    """Yield (size, its rows) of one device's results without sweeps and FP8."""
    rows = timed(rows[rows["sweep"].isna() & ~rows["row"].map(is_fp8)])
    for size, of_size in rows.groupby("size", sort=False):
        yield size, whole_size(of_size)


def strongest_peer(rows):
    """Return the row of the strongest among the strongest peers of these rows' results; empty if there is none."""
    # Each result compares ours with the strongest of its own peers first. Times of different days are not compared.
    peers = rows[rows["row"] == rows["strongest_peer"]]
    ratios = peers["comparisons"].str[0].str["time_ratio"]
    return peers["row"][ratios.sort_values(ascending=False).index].head(1)


def without_slow_peers(rows):
    """Return ours, plain PyTorch, eager peers of ours, what has failed, and the five fastest of the others."""
    is_kept = rows["row"].str.startswith("triton") | rows["row"].isin([*EAGER, PLAIN]) | rows["error"].notna()
    others = rows[~is_kept].nsmallest(5, "ms median")
    return rows[is_kept | rows["row"].isin(others["row"])]


def comparisons(rows):
    """Return {(ours, peer): how they compare} of these rows' results, without peers that only seemed the strongest."""
    weaker = set(rows["strongest_peer"]) - set(strongest_peer(rows))
    found = {}
    for pairs in rows.drop_duplicates("file")["comparisons"]:
        for pair in pairs:
            if pair["peer"] not in weaker and not is_fp8(pair["ours"]):
                # The rows of the first result are those that are shown.
                found.setdefault((pair["ours"], pair["peer"]), pair)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Tables


def step_columns(rows):
    """Return the columns of texts that tables of whole steps share."""
    p20, p80 = (texts(rows[name], number) for name in ("ms p20", "ms p80"))
    ms = rows["ms median"].map(number) + " (" + p20 + "–" + p80 + ")"
    return {
        "ms a step (p20–p80)": or_error(rows, ms),
        "of peak, %": rows["mfu"].map(tenths),
        "memory, MiB": rows["peak_memory_mib"].map(whole),
    }


def comparison_line(pair):
    spread = " ({:.2f}–{:.2f})".format(*pair["spread"]) if pair["spread"] else ""
    memory = f" and {pair['memory_ratio']:.2f} of its peak memory" if pair["memory_ratio"] else ""
    return f"`{pair['ours']}` takes {pair['time_ratio']:.2f}{spread} of the time of `{pair['peer']}`{memory}."


@of_each_device(*STEPS)
def steps_section(rows):
    """Show ours and its strongest peers for each model, ours and the strongest one in bold."""
    parts = []
    for size, measured in sizes_in_bf16(rows):
        shown = without_slow_peers(measured)
        first = shown.iloc[0]
        config = first["config"]
        is_bold = shown["row"].isin([OURS, *strongest_peer(shown)])
        labels = shown["row"].mask(is_bold, "**" + shown["row"] + "**")
        # The closest comparison comes first.
        pairs = sorted(comparisons(shown).values(), key=lambda pair: -pair["time_ratio"])
        parts += [
            f"**{size}**, {first['device']}: {config['batch_size']} x {config['seq_len']} tokens, "
            f"hidden {config['hidden_dim']}, {config['num_layers']} layers, {config['num_heads']} heads, "
            f"{first['precision']}",
            markdown(pd.DataFrame({"": labels, **step_columns(shown), "measured": shown["date"].str[:10]})),
            " ".join(map(comparison_line, pairs)),
            provenance(shown),
        ]
    return paragraphs(*parts)


def gpt_run(rows):
    """Show the rows of one run of GPT-2's step, with the speed of each relative to PyTorch's or nanoGPT's own."""
    speed = texts(rows["ratio median"], "{:.3f} x `".format) + rows["reference"].astype(object) + "`"
    table = pd.DataFrame({"": rows["row"], **step_columns(rows), "speed": speed})
    losses = rows["result"].iloc[0].get("losses", {})
    text = ""
    if losses.get("error", "") is None:
        text = (
            "From the same weights and batches, the losses of {} steps differ from nanoGPT's by {:.1e} of them on "
            "average, and by {:.1e} at most."
        )
        differences = losses["mean_relative_difference"], losses["largest_relative_difference"]
        text = text.format(len(losses["ours"]), *differences)
    return paragraphs(markdown(table), text, provenance(rows))


@of_each_device("gpt", "rows {row}")
def gpt_section(rows):
    """Show the newest run of GPT-2's step, and the newest beside nanoGPT's own model."""
    rows = newest(rows.assign(beside=["losses" in result for result in rows["result"]]), "beside")
    return paragraphs(*(gpt_run(run) for _, run in rows.groupby("file", sort=False)))


def newest_of_sweep(rows, sweep):
    """Return the rows of each size's newest result with times, of one device's results."""
    # A sweep may be measured in parts, and a part again.
    return newest(timed(rows[rows["sweep"] == sweep]), "size")


@of_each_device(*STEPS)
def sweeps_section(rows):
    """Show a line for each size: the time of each row, and how ours compares with the strongest peer."""
    parts = []
    for sweep in ("length", "width", "vocab"):
        sizes = newest_of_sweep(rows, sweep)
        if sizes.empty:
            continue
        sizes = sizes.assign(text=or_error(sizes, sizes["ms median"].map(number)))
        table = sizes.pivot_table("text", "size", "row", aggfunc="first", sort=False)
        pairs = sizes.drop_duplicates("size").set_index("size")["comparisons"].str[0]
        for name, key in (("time, ours / strongest peer", "time_ratio"), ("memory", "memory_ratio")):
            table[name] = texts(pairs.str[key], "{:.2f}".format)
        table = table.reset_index(names=f"ms a step, {sweep} grows")
        parts += [markdown(table), provenance(sizes)]
    return paragraphs(*parts)


@of_each_device(*STEPS)
def shapes_section(rows):
    """Show how ours compares with the strongest peer at each shape, and the median of all."""
    rows = newest_of_sweep(rows, "shapes")
    if rows.empty:
        return ""
    results = rows.drop_duplicates("size").set_index("size")["result"]
    sizes = {name: result["sizes"][name] for name, result in results.items()}
    header, lines, median = comparison_table(sizes)
    for line, size in zip(lines, sizes.values(), strict=True):
        line[0] += " ({hidden_dim} x {num_layers}, {num_heads}/{num_kv_heads}, {ffn_dim}, {vocab_size})".format(
            **size["config"]
        )
    header[0] = "hidden x layers, heads / of K and V, ffn, vocabulary"
    missing = ", ".join(name for name in SWEEPS["shapes"] if name not in sizes)
    note = f" Not measured yet: {missing}." if missing else ""
    return paragraphs(markdown_table(header, lines), f"{median}.{note}", provenance(rows))


@of_each_device(*STEPS)
def micro_batches_section(rows):
    """Show the time of a micro-batch and the share of the peak, as more of them share an update of the weights."""
    rows = newest_of_sweep(rows, "micro-batches")
    if rows.empty:
        return ""
    micro_batch = rows["ms median"] / rows["config"].str["accumulate"]
    shown = micro_batch.map(number) + " (" + rows["mfu"].map(tenths) + " %)"
    table = rows.assign(text=or_error(rows, shown)).pivot_table("text", "size", "row", aggfunc="first", sort=False)
    table = table.reset_index(names="micro-batches: ms of one (of peak)")
    return paragraphs(markdown(table), provenance(rows))


@of_each_device("longest", "memory {memory} {row}")
def longest_section(rows):
    """Show the longest sequence of each row in each memory."""
    rows = newest(rows, "memory", "row")
    if rows.empty:
        return ""
    rows = rows.assign(memory=rows["memory"].astype(int)).sort_values(["memory", "tokens"], ascending=[True, False])
    texts_of_rows = or_error(rows, texts(rows["tokens"], "{:,.0f}".format))
    table = rows.assign(text=texts_of_rows, memory=rows["memory"].astype(str) + " GiB")
    table = table.pivot_table("text", "row", "memory", aggfunc="first", sort=False)
    table = table.reset_index(names=f"longest sequence of {rows['model'].iloc[0]}, tokens")
    return paragraphs(markdown(table), provenance(rows))


@of_each_device(*STEPS)
def fp8_speed_section(rows):
    """Show the time of ours in bf16 and of the rows in FP8 for each model, and divided by that of ours in FP8."""
    rows = rows[(rows["row"] == OURS) | rows["row"].map(is_fp8)]
    # Of each size the newest result in which ours was measured in FP8.
    ours = rows[(rows["row"] == IN_FP8) & rows["error"].isna()]
    rows = newest(rows.merge(ours[["file", "size"]]), "size").sort_values("tflop_per_step", kind="stable")
    ratios = rows["ms median"] / rows["size"].map(ours.drop_duplicates("size").set_index("size")["ms median"])
    if rows.empty:
        return ""
    shown = rows["ms median"].map(number) + " (" + texts(ratios, "{:.2f}".format) + ")"
    table = rows.assign(text=or_error(rows, shown)).pivot_table("text", "row", "size", aggfunc="first", sort=False)
    table = table.reset_index(names=f"ms a step (/ that of {IN_FP8})")
    return paragraphs(markdown(table), provenance(rows))


def complete_sizes(folder):
    """Return {size: rows} of the first device's complete sizes."""
    sizes = sizes_in_bf16(first_device(long_table(folder, *STEPS)))
    return {size: rows for size, rows in sizes if is_complete(rows)}
