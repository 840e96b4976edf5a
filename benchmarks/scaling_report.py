"""What the pages show of several GPUs: the measured tables and their picture, the model on paper and its picture.

Each function takes a folder of results. `python -m benchmarks.publish` calls them all.
"""

import os

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

import tiny_llama_v3 as llama  # noqa: E402
from benchmarks import scaling_model as model  # noqa: E402
from benchmarks.front_page import BLUE, DARK, LIGHT, SIZES, STYLE  # noqa: E402
from measure.results import newest_first  # noqa: E402
from measure.tables import NOT_MEASURED, cell, markdown_table, number, percent, provenance, source  # noqa: E402

OURS = "triton graph"
COLORS = {OURS: BLUE, "triton": "#79b0f7", "DDP": DARK, "FSDP2": LIGHT}


def measured_sizes(folder):
    """{processes: {size: (name, result)}}: the newest measurement of each, without trials."""
    newest = {}
    for name, result in newest_first(folder, "scaling"):
        for size in SIZES:
            if "weak" in result["sizes"].get(size, {}):
                newest.setdefault(result["processes"], {}).setdefault(size, (name, result))
    return {processes: newest[processes] for processes in sorted(newest)}


def row_of(size, mode, name):
    """The row where it was measured, else None."""
    row = size.get(mode, {"rows": {}})["rows"].get(name)
    return row if row and not row["error"] else None


def row_cells(size, name):
    weak, strong = (row_of(size, mode, name) for mode in ("weak", "strong"))
    if weak is None:
        return [cell(size["weak"]["rows"][name]["error"]), *[""] * 6]
    ms = weak["ms"]
    figures = [number(ms["alone"]), number(ms["exchanging"]), f"{weak['tokens_per_second']:,.0f}"]
    memory = weak["peak_memory_mib"]
    divided = [number(strong["ms"]["exchanging"]), percent(strong["efficiency"])] if strong else ["", ""]
    return [*figures, percent(weak["efficiency"]), *divided, f"{memory:,.0f}" if memory else ""]


def percent(share):
    return f"{100 * share:.1f} %"
