"""Write the tables of kernels and of FP8's products.

Each section shows the newest result of a device as it was recorded, with all rows that it has.
"""

import functools

import pandas as pd

from benchmarks.kernels import APART
from benchmarks.pages.long_table import (
    in_brackets,
    markdown,
    newest,
    not_timed,
    of_each_device,
    or_error,
    paragraphs,
    provenance,
    texts,
    us_and_rate,
)
from measure.tables import number

OURS = "triton"
KERNELS = "kernels", "cases {case} contenders {row}"


@of_each_device(*KERNELS)
def kernels_section(rows):
    """Show ours beside the fastest peer of each case, which is bold if it is faster."""
    rows = newest(rows[~rows["group"].isin(APART)], "group")
    copy_rate = rows["rate"][rows["group"] == "copy"].max()
    rows = rows[rows["group"] != "copy"]
    if rows.empty:
        return ""
    # Columns are joined by their index, the case: where one of both is missing, its cells stay empty.
    timed = rows[rows["error"].isna()].set_index("case")
    ours = timed[timed["row"] == OURS]
    peers = timed[timed["row"] != OURS].sort_values("us")
    peers = peers[~peers.index.duplicated()]
    theirs = {
        "fastest peer, us": texts(peers["us"], number) + " (" + peers["row"] + ")",
        "its time / ours": texts(peers["us"] / ours["us"], "{:.2f}".format),
    }
    rates = " (" + texts(ours["rate"], number) + " " + ours["unit"] + ")"
    table = {"ours, us (rate)": texts(ours["us"], number) + rates, **theirs}
    table = pd.DataFrame(table, index=rows["case"].unique())
    faster = table["its time / ours"].astype(float) < 1  # as it is printed
    table.loc[faster, list(theirs)] = "**" + table.loc[faster, list(theirs)] + "**"
    return paragraphs(
        f"**{rows['device'].iloc[0]}**, {rows['dtype'].iloc[0]}",
        markdown(table.reset_index(names="kernel")),
        not_timed(rows, "group"),
        f"A copy reads and writes {number(copy_rate)} TB/s." if copy_rate > 0 else "",
        provenance(rows),
    )


def of_group(rows, group):
    """Return the rows of one device's newest result of a group, and the newest rate of a copy, NaN without one."""
    rows = newest(rows, "group")
    return rows[rows["group"] == group], rows["rate"][rows["group"] == "copy"].max()


@of_each_device(*KERNELS)
def layer_norm_section(rows):
    """Show our time of each pass with its share of a copy's rate, and how many times as long others take."""
    rows, copy_rate = of_group(rows, "layer-norm")
    timed = rows[rows["error"].isna()]
    if rows.empty:
        return ""
    is_ours = timed["row"] == OURS
    # Our time beside every row of the same case.
    ours = timed.assign(us=timed["us"].where(is_ours)).groupby("case")["us"].transform("first")
    us = texts(timed["us"], number) + in_brackets(timed["rate"] / copy_rate)
    passes = timed["case"].str.split(", ", n=1).str  # LayerNorm backward, float32, 12,288 x 768
    columns = {
        "": passes[1],
        "text": us.where(is_ours, texts(timed["us"] / ours, "{:.2f}".format)),
        "column": passes[0] + (", x " + timed["row"]).mask(is_ours, ", us"),
    }
    table = timed.assign(**columns).pivot_table("text", "", "column", aggfunc="first", sort=False)
    ceiling = f"Percentages are of {number(copy_rate)} TB/s, reading and writing." if copy_rate > 0 else ""
    return paragraphs(markdown(table.reset_index()), not_timed(rows, "case"), ceiling, provenance(rows))


def median_and_range(us):
    return f"{number(us.median())} ({number(us.min())} – {number(us.max())})"


def rounds_section(rows, group, reference):
    """Show the times of each contender in all rounds of a result, and the reference's median as a part of theirs."""
    rows, _ = of_group(rows, group)
    if rows.empty:
        return ""
    us = rows.groupby(["case", "row"], sort=False)["us"].agg([median_and_range, "median"])
    references = us["median"].xs(reference, level="row")
    text = us["median_and_range"] + ", " + texts(us["median"].rdiv(references, level="case"), "{:.2f}".format)
    name = "ours" if reference == OURS else reference
    table = text.unstack("case", sort=False).reset_index(names=f"us (range), {name} / its")
    return paragraphs(markdown(table), not_timed(rows, "case"), provenance(rows))


heads_128 = functools.partial(rounds_section, group="heads-128", reference=OURS)
heads_128_section = of_each_device(*KERNELS)(heads_128)
swiglu_product = functools.partial(rounds_section, group="swiglu-product", reference=OURS)
swiglu_product_section = of_each_device(*KERNELS)(swiglu_product)
# The same of variants of the kernels, which were measured once.
hopper_steps_section = of_each_device("hopper_steps", KERNELS[1])(heads_128)
product_steps = functools.partial(rounds_section, group="product-steps", reference="library")
product_steps_section = of_each_device("product_steps", KERNELS[1])(product_steps)


PLAIN = "plain PyTorch (products: bf16)"
# A row that is not named here gets a column of its own.
COLUMN = {"triton": "--fp8", "fp8": "--fp8", "torch": PLAIN, "bf16": PLAIN, "compile": "torch.compile"}


@of_each_device(*KERNELS)
def fp8_layer_section(rows):
    """Show each part of a layer, in FP8 and as others compute it, with its share of the roofline."""
    rows, copy_rate = of_group(rows, "fp8-layer")
    if rows.empty:
        return ""
    # The rate that the roofline allows: a copy's, or the datasheet's.
    peaks = [dict(zip(("fp8", "bf16"), peaks, strict=True)) for peaks in rows["peaks"]]
    ceilings = [own.get(row, copy_rate) for own, row in zip(peaks, rows["row"], strict=True)]
    rates = us_and_rate(rows) + in_brackets(rows["rate"] / pd.Series(ceilings, rows.index, dtype=float))
    of_bytes = (rows["amount"] / 1e6).map(number) + " MB"
    of_products = (rows["amount"] / 1e12).map(number) + " TFLOP"
    work = of_bytes.where(rows["unit"] == "TB/s", of_products)
    rows = rows.assign(text=or_error(rows, rates), work=work, column=rows["row"].replace(COLUMN))
    table = rows.pivot_table("text", ["case", "work"], "column", aggfunc="first", sort=False)
    table = table.reset_index().rename(columns={"case": "of one layer"})
    return paragraphs(markdown(table), provenance(rows))
