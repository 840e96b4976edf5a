"""Writes the tables and pictures of docs/fp8.md: what FP8 saves and costs, how exact it is, whether it learns.

The functions of a folder of results are called by `python -m benchmarks.pages.publish`.
"""

from statistics import fmean

from benchmarks.fp8_learning import DATA, SMOOTHED, smoothed
from benchmarks.pages.front_page import SIZES, newest_sizes
from benchmarks.steps import ROWS, is_fp8
from measure import drawing
from measure.results import newest_first, of_each_device, of_newest
from measure.tables import cell, markdown_table, number, provenance

IN_FP8 = "triton fp8 graph"
SPEED_ROWS = [name for name, row in ROWS.items() if name == "triton graph" or is_fp8(row.implementation)]
STYLES = {"bf16": (drawing.BLUE, "-"), "fp8": (drawing.RED, "--"), "fp8-wide-margin": (drawing.VIOLET, ":")}
FILLINGS = [drawing.Filling(drawing.BLUE), *map(drawing.Filling, (drawing.RED, drawing.GREEN, drawing.VIOLET), "/x.")]
MISSING = "not measured"


def seconds_to(run, target):
    """The seconds until the smoothed loss is first at most target, at the run's median ms a step; None if never."""
    means = smoothed(run["losses"])
    first = len(run["losses"]) - len(means) + 1
    steps = (step for step, mean in enumerate(means, first) if mean <= target)
    return next((step * run["ms"]["median"] / 1e3 for step in steps), None)


def spread(losses):
    """The largest less the smallest, in % of their mean."""
    return 100 * (max(losses) - min(losses)) / fmean(losses)


def compare(pairs):
    """What pairs, {seed: (bf16's run, fp8's run)}, at least one and none that failed, say of FP8, a dict.

    "differences": {seed: fp8's final loss less bf16's, in % of it}; "difference": their mean.
    "unreached": the seeds with which fp8 does not reach bf16's final loss.
    "seconds": the mean time to it, [bf16, fp8], and "ratio", the first over the second; None if a seed is unreached.
    "ratio_both": the same ratio for the worse of each seed's two final losses, which both reach.
    """
    final = {seed: [run["final_loss"] for run in pair] for seed, pair in pairs.items()}
    to_bf16 = {seed: [seconds_to(run, final[seed][0]) for run in pair] for seed, pair in pairs.items()}
    to_both = [fmean(seconds_to(pair[i], max(final[seed])) for seed, pair in pairs.items()) for i in (0, 1)]
    differences = {seed: 100 * (ours / theirs - 1) for seed, (theirs, ours) in final.items()}
    unreached = [seed for seed, times in to_bf16.items() if None in times]
    seconds = None if unreached else [fmean(times) for times in zip(*to_bf16.values(), strict=True)]
    result = dict(differences=differences, difference=fmean(differences.values()), unreached=unreached, seconds=seconds)
    return result | dict(ratio=seconds and seconds[0] / seconds[1], ratio_both=to_both[0] / to_both[1])


def newest_runs(folder, device=None):
    """{(size, data): (name, result, its runs)} of the newest result that has both precisions, or else one of them."""
    results, newest = newest_first(folder, "fp8_learning", device), {}
    for key in ((size, data) for size in SIZES for data in DATA):
        found = [(*item, [r for r in item[1]["runs"] if (r["size"], r["data"]) == key]) for item in results]
        best = max(found, key=lambda item: len({run["precision"] for run in item[2]}), default=None)
        newest |= {key: best} if best and best[2] else {}
    return newest


def learning_row(runs, precision):
    """The cells of the runs of one size and data in bf16 and in a precision: means over the seeds that have both."""
    both = "bf16", precision
    done = {p: {run["seed"]: run for run in runs if run["precision"] == p and not run["error"]} for p in both}
    bf16, fp8 = done.values()
    pairs = {seed: (bf16[seed], fp8[seed]) for seed in bf16 if seed in fp8}
    shown = list(zip(*pairs.values(), strict=True)) or [list(found.values()) for found in done.values()]
    losses = [number(fmean(run["final_loss"] for run in runs), 4) if runs else MISSING for runs in shown]
    ms = [number(fmean(run["ms"]["median"] for run in runs)) if runs else MISSING for runs in shown]
    noise = f"{spread([run['final_loss'] for run in bf16.values()]):.2f} %" if len(bf16) > 1 else MISSING
    if not pairs:
        return [*losses, MISSING, noise, " / ".join(ms), MISSING, MISSING]
    found = compare(pairs)
    each = ", ".join(f"{difference:+.2f}" for difference in found["differences"].values())
    cells = [*losses, f"{found['difference']:+.2f} % ({each})", noise, " / ".join(ms)]
    if found["seconds"]:
        return [*cells, " / ".join(map(number, found["seconds"])), f"{found['ratio']:.2f}"]
    steps, seeds = len(shown[1][0]["losses"]), ", ".join(map(str, found["unreached"]))
    reached = f"{found['ratio_both']:.2f} to the worse of both final losses"
    return [*cells, f"not reached in {steps:,} steps (seed {seeds})", reached]


@of_each_device("fp8_learning")
def learning_section(folder, device):
    rows, notes, sources = [], [], {}
    for (size, data), (name, result, runs) in newest_runs(folder, device).items():
        found = {run["precision"] for run in runs}
        rows += [[f"{size}, {data}, {p}", *learning_row(runs, p)] for p in list(STYLES)[1:] if p == "fp8" or p in found]
        notes += [f"- {size} {data} seed {r['seed']} {r['precision']}: {r['error']}" for r in runs if r["error"]]
        notes += [f"- {label}: {MISSING}" for label in result["missing"] if label.startswith(f"{size} {data} ")]
        sources[name] = result
    header = ["", "final loss, bf16", "FP8", "difference (each seed)", "bf16 over the seeds", "ms a step, bf16 / FP8"]
    table = markdown_table([*header, "s to bf16's loss, bf16 / FP8", "ratio"], rows)
    parts = [table, "\n".join(notes), *(provenance(*item) for item in sources.items())]
    return "\n\n".join(filter(None, parts)) if rows else ""


@of_each_device("steps")
def speed_section(folder, device):
    newest, rows = newest_sizes(folder, lambda size: "ms" in size["rows"].get(IN_FP8, {}), SIZES, device), []
    for size, (_, result) in newest.items():
        found = result["sizes"][size]["rows"]
        for name in (name for name in SPEED_ROWS if name in found):
            ms = None if found[name]["error"] else found[name]["ms"]["median"]
            ratio = f"{ms / found[IN_FP8]['ms']['median']:.2f}" if ms else ""
            rows.append([f"{size}, {name}", number(ms) or cell(found[name]["error"]), ratio])
    table = markdown_table(["", "ms a step", f"its time / that of {IN_FP8}"], rows)
    sources = [provenance(*item) for item in dict(newest.values()).items()]
    return "\n\n".join([table, *sources]) if rows else ""


def contender_cell(contenders, name, unit, ceiling):
    """A time, a rate and its share of the ceiling, if there is one; empty without the contender."""
    found = contenders.get(name)
    if found is None or found["error"]:
        return cell(found["error"]) if found else ""
    share = f" ({found['rate'] / ceiling:.0%})" if ceiling else ""
    return f"{number(found['us'])} us, {number(found['rate'])} {unit}{share}"


WORK = {"TB/s": (1e6, "MB"), "TFLOP/s": (1e12, "TFLOP")}  # by the unit of its rate: how the work of a part is shown


@of_newest("fp8_layer")
def layer_section(name, result):
    """Of each part of a layer, ours and others beside the ceiling: of bytes a copy, of products the datasheet."""
    (copy, *parts), rows = result["parts"], []
    for part in parts:
        unit, contenders = part["unit"], part["contenders"]
        is_rounding = unit == copy["unit"]
        ceilings = [copy["contenders"]["torch"]["rate"]] * 2 if is_rounding else result["peaks"]
        names = ("triton", "torch") if is_rounding else ("fp8", "bf16")
        cells = [contender_cell(contenders, *own) for own in zip(names, (unit, unit), ceilings, strict=True)]
        scale, of_what = WORK[unit]
        work = f"{number(part['amount'] / scale)} {of_what}"
        rows.append([part["part"], work, *cells, contender_cell(contenders, "compile", unit, ceilings[0])])
    header = ["of one layer", "work", "--fp8", "plain PyTorch (products: bf16)", "torch.compile"]
    return f"{markdown_table(header, rows)}\n\n{provenance(name, result)}"


def draw_layer(folder, path):
    """Draws the times of the products of a layer in bf16, and in FP8 with rounding; a diamond marks the roofline."""
    results = newest_first(folder, "fp8_layer")
    if not results or None in results[0][1]["peaks"]:
        return
    (copy, *rounding, products), peaks = results[0][1]["parts"], results[0][1]["peaks"]
    fp8_floor, bf16_floor = (products["amount"] / peak / 1e6 for peak in peaks)
    fp8_floor += sum(part["amount"] for part in rounding) / copy["contenders"]["torch"]["rate"] / 1e6
    fillings = dict(zip((part["part"] for part in (products, *rounding)), FILLINGS, strict=True))
    parts = [(part["contenders"]["triton"]["us"], fillings[part["part"]]) for part in rounding]
    in_fp8, in_bf16 = ((products["contenders"][name]["us"], FILLINGS[0]) for name in ("fp8", "bf16"))
    with drawing.style():
        figure = drawing.new_figure(drawing.bars_height(2, rest=70), width=720)
        axes = figure.subplots()
        bars = [("bf16", [in_bf16], bf16_floor), ("FP8", [in_fp8, *parts], fp8_floor)]
        drawing.bars(axes, [drawing.Bar(label, own, mark=floor) for label, own, floor in bars])
        axes.set_xlabel("us a layer, forward and backward (diamond: what the roofline allows)")
        drawing.legend_below(figure, fillings, columns=4)
        drawing.save_png(figure, path)


@of_newest("fp8_recipes")
def recipes_section(name, result):
    """Of each recipe and size the error of the gradients, the median and the worst."""
    sizes = result["sizes"]
    rows = [
        [recipe, *("{median:.3f} ({worst:.3f})".format(**sizes[size][recipe]) for size in sizes)]
        for recipe in next(iter(sizes.values()))
    ]
    return f"{markdown_table(['', *sizes], rows)}\n\n{provenance(name, result)}"


def draw(folder, path):
    """Draws smoothed losses on text: over steps of the size with the most runs, over time of the largest size."""
    found = [runs for (_, data), (_, _, runs) in newest_runs(folder).items() if data == "text"]
    found = [[run for run in runs if not run["error"]] for runs in found]
    found = [runs for runs in found if runs]
    if not found:
        return
    most = max(reversed(found), key=lambda runs: (len({run["precision"] for run in runs}), len(runs)))
    with drawing.style():
        figure = drawing.new_figure(height=420, width=1200, unit=100)
        panels = zip(figure.subplots(1, 2), (most, found[-1]), ("step", "minutes of training"), strict=True)
        for axes, runs, label in panels:
            for run in runs:
                means, (color, dashes) = smoothed(run["losses"]), STYLES[run["precision"]]
                steps = range(len(run["losses"]) - len(means) + 1, len(run["losses"]) + 1)
                scale = 1 if label == "step" else run["ms"]["median"] / 6e4
                axes.plot([scale * n for n in steps], means, dashes, color=color, label=run["precision"])
            axes.set(xlabel=label, ylabel=f"loss, nats a byte (mean of {SMOOTHED} steps)", title=runs[0]["size"])
            axes.set_ylim(top=means[len(means) // 20])  # without the first steep fall
            lines = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
            axes.legend(lines.values(), lines)
        drawing.save_png(figure, path, dpi=100)
