"""Writes the tables and pictures of several GPUs, from measurements.

Each function takes a folder of results; `python -m benchmarks.pages.publish` calls them all.
"""

import matplotlib.pyplot as plt

from benchmarks.pages.front_page import SIZES
from measure.drawing import BLUE, LINE, MUTED, save_png, style
from measure.results import newest_first, of_each_device, recorded_config
from measure.tables import cell, markdown_table, number, provenance

OURS = "triton graph"
PEERS = ("DDP", "FSDP2")
COLORS = {OURS: BLUE, "triton": "#79b0f7", "DDP": MUTED, "FSDP2": LINE}


def row_of(size, mode, name):
    """The row if it was timed, otherwise None."""
    row = size.get(mode, {"rows": {}})["rows"].get(name)
    return row if row and not row["error"] else None


def newest_sizes(folder, device=None):
    """{processes: {size: {mode: (name, result)}}}: the newest result of each with times, without tiny models."""
    newest = {}
    for name, result in newest_first(folder, "scaling", device):
        for size in SIZES:
            for mode in ("weak", "strong"):
                if any(row_of(result["sizes"].get(size, {}), mode, row) for row in COLORS):
                    modes = newest.setdefault(result["processes"], {}).setdefault(size, {})
                    modes.setdefault(mode, (name, result))
    return {
        processes: {size: sizes[size] for size in SIZES if "weak" in sizes.get(size, {})}
        for processes, sizes in sorted(newest.items())
    }


def part_of(size, modes, mode):
    """The entry of a size in the newest result of a mode; empty without one."""
    return modes[mode][1]["sizes"][size] if mode in modes else {}


def share(value):
    return f"{100 * value:.1f} %"


# ----------------------------------------------------------------------------------------------------------------------
# Tables


def row_cells(name, weak_size, strong_size):
    weak, strong = row_of(weak_size, "weak", name), row_of(strong_size, "strong", name)
    if weak is None:
        return [cell(weak_size["weak"]["rows"][name]["error"]), *[""] * 6]
    memory = weak["peak_memory_mib"]
    return [
        number(weak["ms"]["alone"]),
        number(weak["ms"]["exchanging"]),
        f"{weak['tokens_per_second']:,.0f}",
        share(weak["efficiency"]),
        f"{memory:,.0f}" if memory else "",
        number(strong["ms"]["exchanging"]) if strong else "",
        share(strong["efficiency"]) if strong else "",
    ]


def peer_line(name, size):
    """A text that compares ours with the fastest peer, by windows in turns."""
    peers = [peer for peer in PEERS if row_of(size, "weak", peer)]
    if not row_of(size, "weak", OURS) or not peers:
        return None
    fastest = min(peers, key=lambda peer: row_of(size, "weak", peer)["ms"]["exchanging"])
    theirs, eager = row_of(size, "weak", fastest), row_of(size, "weak", "triton")
    uncaptured = f" ({eager['tokens_per_second'] / theirs['tokens_per_second']:.2f} without)" if eager else ""
    return f"{name} {1 / theirs['ratio']:.2f} times{uncaptured} those of {fastest}"


def measured_table(processes, sizes):
    header = ["", "1 GPU, ms", f"{processes} GPUs, ms", "tokens/s", f"of {processes} times one", "memory of each, MiB"]
    header += ["batch divided, ms", f"of {processes} times one"]
    rows, lines, sources = [], [], {}
    for size_name, modes in sizes.items():
        weak, strong = (part_of(size_name, modes, mode) for mode in ("weak", "strong"))
        for name in weak["weak"]["rows"]:
            bold = "**" if name == OURS else ""
            rows.append([f"{bold}{size_name}, {name}{bold}", *row_cells(name, weak, strong)])
        lines.append(peer_line(size_name, weak))
        sources |= dict(modes[mode] for mode in ("weak", "strong") if mode in modes)
    lines = "; ".join(filter(None, lines))
    collectives = next(iter(sources.values()))["collectives"]
    links = (
        f"A reduce-scatter and an all-gather of 1 GiB, alone: {number(collectives['bandwidth'])} GB/s leave "
        f"each GPU; the shortest message takes {number(collectives['latency_us'])} us."
    )
    summary = f"Tokens a second of our step on {processes} GPUs with a captured graph: {lines}." if lines else ""
    sources = [provenance(*item) for item in sources.items()]
    return "\n\n".join(filter(None, [markdown_table(header, rows), summary, links, *sources]))


def gpt_table(name, result):
    rows = []
    for row_name, row in result["gpt2"]["rows"].items():
        if row["error"]:
            rows.append([row_name, cell(row["error"]), "", "", ""])
            continue
        figures = [f"{number(row['ms'][mode])} ms" for mode in ("alone", "exchanging")]
        rows.append([row_name, *figures, f"{row['tokens_per_second']:,.0f}", share(row["efficiency"])])
    gpus = result["processes"]
    header = ["nanogpt_triton", "1 GPU", f"{gpus} GPUs", "tokens/s", f"of {gpus} times one"]
    return f"{markdown_table(header, rows)}\n\n{provenance(name, result)}"


def newest_gpt(folder, device):
    """{processes: (name, result)}: the newest result of each with nanogpt_triton's step, without tiny models."""
    newest = {}
    for name, result in newest_first(folder, "scaling", device):
        if "rows" in result.get("gpt2", {}) and result["gpt2"]["size"] != "tiny":
            newest.setdefault(result["processes"], (name, result))
    return dict(sorted(newest.items()))


@of_each_device("scaling")
def scaling_section(folder, device):
    parts = [measured_table(*item) for item in newest_sizes(folder, device).items()]
    return "\n\n".join([*parts, *(gpt_table(*item) for item in newest_gpt(folder, device).values())])


# ----------------------------------------------------------------------------------------------------------------------
# Pictures


def on_gpus(axes, gpus):
    axes.set_xscale("log", base=2)
    axes.set_xticks(gpus, [f"{n:,}" for n in gpus])
    axes.minorticks_off()


def points_of(measured, size_name, row_name):
    """[(GPUs, tokens a second, efficiency)] of a row of newest_sizes(), one GPU first."""
    points = []
    for processes, sizes in measured.items():
        size = part_of(size_name, sizes.get(size_name, {}), "weak")
        row = row_of(size, "weak", row_name)
        if row and not points:
            tokens = recorded_config(size["config"]).tokens_per_step
            points.append((1, tokens / row["ms"]["alone"] * 1e3, 1.0))
        if row:
            points.append((processes, row["tokens_per_second"], row["efficiency"]))
    return points


def draw_measured(folder, path):
    """Draws tokens a second and efficiency of every row over the number of GPUs, if there is a result."""
    results = newest_sizes(folder)
    if not results:
        return
    with style():
        figure, axes = plt.subplots(2, len(SIZES), figsize=(12, 6), layout="constrained", sharex=True)
        for (above, below), size_name in zip(axes.T, SIZES, strict=True):
            for row_name, color in COLORS.items():
                points = points_of(results, size_name, row_name)
                if points:
                    gpus, tokens, efficiency = zip(*points, strict=True)
                    above.plot(gpus, [t / 1e3 for t in tokens], "o-", color=color, label=row_name)
                    below.plot(gpus, [100 * e for e in efficiency], "o-", color=color)
            above.set_title(size_name)
            above.set_ylim(bottom=0)
            below.set(xlabel="GPUs", ylim=(0, 110))
            on_gpus(below, [1, *results])
        axes[0, 0].set_ylabel("thousand tokens a second")
        axes[1, 0].set_ylabel("% of so many times one")
        lines = [pair for panel in axes[0] for pair in zip(*panel.get_legend_handles_labels(), strict=True)]
        entries = {label: line for line, label in lines}
        figure.legend(entries.values(), entries, frameon=False, labelcolor=MUTED, ncols=4, loc="outside lower center")
        measured = [result for sizes in results.values() for modes in sizes.values() for _, result in modes.values()]
        devices = dict.fromkeys(result["environment"]["device"] for result in measured)
        figure.suptitle(f"The batch of a process held constant, bf16, {', '.join(devices)}", color=MUTED)
        save_png(figure, path, dpi=100)
