"""Write the newest results into the pages.

    python -m benchmarks.pages.publish            replace the text between markers, and draw the pictures
    python -m benchmarks.pages.publish --check    print what would change, and exit with 1 if anything would

The markers are <!-- begin: NAME --> and <!-- end: NAME -->, with the names of SECTIONS; a page may have any of them.
For steps and sweeps each size is taken from the newest result that has it, and for the stages each precision and length
of sequence. A result of the stages is the summary.json of run_all_stages.sh, kept as stages_<device>_<name>.json.

Exit codes: 0 done, 1 a page is out of date, 2 the request cannot be met.
"""

import contextlib
import difflib
import functools
import re
import sys
from pathlib import Path

if not __package__:
    print("run it from the root as python -m benchmarks.pages.publish", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from benchmarks.pages import fp8_tables, front_page, published_claims, replays, scaling_tables, traces
from benchmarks.steps import ROWS, SWEEP_ROWS, is_fp8
from measure import drawing
from measure.command_line import Parser, program, replacing
from measure.results import RESULTS, ROOT, damage_reported, of_each_device, of_newest
from measure.tables import NOT_MEASURED, cell, markdown_table, number, provenance, source
from measure.work import SIZES, SWEEPS

MARKER = re.compile(r"<!-- (begin|end): ([\w-]+) -->")
SECTION = re.compile(r"<!-- begin: ([\w-]+) -->(.*?)<!-- end: \1 -->", re.DOTALL)


def ratio_line(pair):
    spread = " ({:.2f} – {:.2f})".format(*pair["spread"]) if pair.get("spread") else ""
    relation = f"`{pair['ours']}` takes {pair['time_ratio']:.2f}{spread} of the time of `{pair['peer']}`"
    if pair["memory_ratio"]:
        relation += f" and {pair['memory_ratio']:.2f} of its peak memory"
    return f"{relation}."


def steps_table(folder, size_name, name, result):
    size, sources = front_page.with_other_rows(folder, size_name, name, result)
    config, rows = size["config"], []
    for row_name, row in size["rows"].items():
        if is_fp8(row_name):  # see fp8_tables
            continue
        bold = "**" if row_name in ("triton graph", size["strongest_peer"]) else ""
        label = f"{bold}{row_name}{bold}"
        if row["error"]:
            rows.append([label, cell(row["error"]), "", "", "", ""])
            continue
        memory, mfu = row["peak_memory_mib"], row["mfu"]
        rows.append(
            [
                label,
                number(row["ms"]["median"]),
                f"{number(row['ms']['p20'])} – {number(row['ms']['p80'])}",
                f"{row['tokens_per_second']:,.0f}",
                f"{100 * mfu:.1f} %" if mfu else "",
                f"{memory:,.0f}" if memory else "",
            ]
        )
    title = (
        f"**{size_name}**, {result['environment']['device']}: {config['batch_size']} x {config['seq_len']} tokens, "
        f"hidden {config['hidden_dim']}, {config['num_layers']} layers, {config['num_heads']} heads, "
        f"{size['precision']}"
    )
    table = markdown_table(["", "ms a step", "p20 – p80", "tokens/s", "of peak", "memory, MiB"], rows)
    ratios = " ".join(ratio_line(pair) for pair in size["comparisons"])
    missing = ", ".join(f"`{name}`" for name in ROWS if not (name in size["rows"] or is_fp8(name)))
    missing = missing and f"Not measured: {missing}."
    return "\n\n".join(filter(None, (title, table, ratios, missing, *(provenance(*item) for item in sources))))


def was_timed(size):
    """Whether a size was measured completely, and at least one row could run."""
    return "comparisons" in size and not all(row["error"] for row in size["rows"].values())


@of_each_device("steps")
def steps_section(folder, device):
    newest = front_page.newest_sizes(folder, was_timed, SIZES, device)
    complete = front_page.newest_sizes(folder, front_page.is_complete, SIZES, device)
    newest |= complete  # rather than a newer one of some rows
    if len(newest) > 1:
        newest.pop("tiny", None)  # a trial
    return "\n\n".join(steps_table(folder, size, *item) for size, item in newest.items())


def sweep_table(sweep, newest):
    """A table with a line for each size: the time of each row, and ours compared with the strongest peer."""
    sizes = {size: result["sizes"][size] for size, (_, result) in newest.items()}
    columns, lines = list(next(iter(sizes.values()))["rows"]), []
    for size_name, size in sizes.items():
        pair = size["comparisons"][0] if size["comparisons"] else {}
        rows = [size["rows"].get(column, {"error": "not measured"}) for column in columns]
        lines.append(
            [
                f"{size_name} x {size['config']['batch_size']}" if sweep == "length" else size_name,
                *(cell(row["error"]) if row["error"] else number(row["ms"]["median"]) for row in rows),
                *(f"{pair[key]:.2f}" if pair.get(key) else "" for key in ("time_ratio", "memory_ratio")),
            ]
        )
    table = markdown_table([f"ms a step, {sweep} grows", *columns, "time, ours / strongest peer", "memory"], lines)
    return "\n\n".join([table, *(provenance(*item) for item in dict(newest.values()).items())])


@of_each_device("steps")
def sweeps_section(folder, device):
    newest = {sweep: front_page.newest_sizes(folder, was_timed, sizes, device) for sweep, sizes in SWEEPS.items()}
    return "\n\n".join(sweep_table(sweep, sizes) for sweep, sizes in newest.items() if sizes)


GROWS = {"length": "seq_len", "width": "hidden_dim", "vocab": "vocab_size"}  # the field of Config
RATIO_TICKS = 0.8, 1, 1.2, 1.5, 2, 3, 4, 6, 10


def draw_sweeps(folder, path):
    """Draws how many times as long as ours the steps of the other rows take, over what grows, if it was measured."""
    newest = {sweep: front_page.newest_sizes(folder, was_timed, sizes) for sweep, sizes in SWEEPS.items()}
    newest = {sweep: sizes for sweep, sizes in newest.items() if len(sizes) > 1}
    if not newest:
        return
    with drawing.style():
        figure = drawing.new_figure(height=380, width=1200, unit=100)
        (columns,) = figure.subplots(1, len(newest), squeeze=False, sharey=True)
        for axes, (sweep, sizes) in zip(columns, newest.items(), strict=True):
            measured = [result["sizes"][size] for size, (_, result) in sizes.items()]
            colors = (drawing.RED, drawing.BLUE, drawing.GREEN, drawing.VIOLET)
            for row, color, marker in zip(SWEEP_ROWS, colors, "osD^", strict=True):
                both = [
                    size for size in measured if all("ms" in size["rows"].get(r, {}) for r in (row, SWEEP_ROWS[-1]))
                ]
                xs = [size["config"][GROWS[sweep]] for size in both]
                ours, theirs = ([size["rows"][r]["ms"]["median"] for size in both] for r in (SWEEP_ROWS[-1], row))
                ratios = [ms / own for own, ms in zip(ours, theirs, strict=True)]
                axes.plot(xs, ratios, color=color, marker=marker, label=row)
            axes.set(xscale="log", yscale="log", title=f"{sweep} grows", xlabel=GROWS[sweep])
            every = [size["config"][GROWS[sweep]] for size in measured]
            axes.set_xticks(every, [f"{value:,}" for value in every])
            axes.set_yticks(RATIO_TICKS, [f"{value:g}" for value in RATIO_TICKS])
            axes.minorticks_off()
        columns[0].set_ylabel("time of a step, ours = 1")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(SWEEP_ROWS))
        drawing.save_png(figure, path, dpi=100)


@of_newest("kernels")
def kernels_section(name, result):
    rows = []
    for case in result["cases"]:
        if case.get("error"):
            rows.append([case["case"], cell(case["error"]), "", "", ""])
            continue
        contenders = {name: row for name, row in case["contenders"].items() if not row["error"]}
        ours = contenders.pop("triton", None)
        peer = min(contenders, key=lambda name: contenders[name]["us"], default=None)
        theirs = contenders.get(peer)
        bold = "**" if ours and theirs and round(theirs["us"] / ours["us"], 2) < 1 else ""
        rows.append(
            [
                case["case"],
                f"{number(ours['us'])} us, {number(ours['rate'])} {case['unit']}" if ours else "",
                f"{bold}{number(theirs['us'])} us, {number(theirs['rate'])} {case['unit']}{bold}" if theirs else "",
                f"{bold}{peer}{bold}" if peer else "",
                f"{bold}{theirs['us'] / ours['us']:.2f}{bold}" if ours and theirs else "",
            ]
        )
    table = markdown_table(["kernel", "ours", "fastest peer", "which", "its time / ours"], rows)
    failed = [f"{name} of {case['group']}, {row['error'].rstrip('.')}" for case in result["cases"]
              for name, row in case.get("contenders", {}).items() if row["error"]]  # fmt: skip
    notes = f"\n\nNot timed: {cell('; '.join(dict.fromkeys(failed)))}." * bool(failed)
    return f"**{result['environment']['device']}**, {result['dtype']}\n\n{table}{notes}\n\n{provenance(name, result)}"


@of_each_device("stages")
def stages_section(folder, device):
    parts = []
    for name, result in replays.newest_replays(folder, device):
        lines = [f"- {title} ({mark}): {text}" for title, mark, text in replays.observation_lines(result)]
        parts += [
            f"**{replays.sizes(result)}**, {result['config']['num_steps']} steps",
            replays.comparison_markdown(result),
            "\n".join(lines),
            provenance(name, result),
        ]
        picture = Path(name).with_suffix(".png")
        if (folder / picture).exists():
            parts.append(f"![The picture of each stage](benchmarks/results/{picture})")
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in replays.NOTES)])


def ratio_to(ours, theirs):
    return f"{theirs['us'] / ours['us']:.2f}" if theirs and not theirs["error"] else ""


@of_newest("layer_norm")
def layer_norm_section(name, result):
    copy_rate = result["copy_rate"]
    rows = []
    for case in result["cases"]:
        label = f"{case['dtype']}, {case['case']}"
        if case["error"] or any(measured["triton"]["error"] for measured in case["passes"].values()):
            rows.append([label, case["error"] or "failed", *[""] * 6])
            continue
        row = [f"{case['dtype']}, {' x '.join(f'{n:,}' for n in case['shape'])}"]
        for pass_name in ("forward", "backward", "forward + backward"):
            measured = case["passes"][pass_name]
            ours = measured["triton"]
            if pass_name != "forward + backward":
                share = f", {100 * ours['rate'] / copy_rate:.0f} %" if copy_rate else ""
                row.append(f"{number(ours['us'])} us{share}")
            else:
                row.append(f"{number(ours['us'])} us")
            if pass_name != "backward":
                row += [ratio_to(ours, measured.get(peer)) for peer in ("torch", "compile")]
        rows.append(row)
    header = ["", "forward", "x torch", "x compile", "backward", "forward + backward", "x torch", "x compile"]
    ceiling = f"Percentages are of {number(copy_rate)} TB/s, reading and writing.\n\n" if copy_rate else ""
    return f"{markdown_table(header, rows)}\n\n{ceiling}{provenance(name, result)}"


@of_newest("gpt", lambda result: result["size"] != "tiny")
def gpt_section(name, result):
    rows = []
    for row_name, row in result["rows"].items():
        if row["error"] or "ms" not in row:
            rows.append([row_name, cell(row["error"] or "not measured"), *[""] * 5])
            continue
        ms, speedup = row["ms"], row.get("speedup")
        rows.append(
            [
                row_name,
                number(ms["median"]),
                f"{number(ms['p20'])} – {number(ms['p80'])}",
                f"{row['tokens_per_second']:,.0f}",
                f"{100 * row['mfu']:.1f} %" if row["mfu"] else "",
                f"{row['peak_memory_mib']:,.0f}" if row["peak_memory_mib"] else "",
                f"{speedup['median']:.3f} x `{speedup['peer']}`" if speedup else "",
            ]
        )
    header = ["", "ms a step", "p20 – p80", "tokens/s", "of peak", "memory, MiB", "speed"]
    return f"{markdown_table(header, rows)}\n\n{provenance(name, result)}"


@of_newest("overhead")
def overhead_section(name, result):
    rows = [["no profiler", "", number(result["plain"]["ms"]), "1"]]
    for script, row in result["scripts"].items():
        rows.append([f"`{script}`", row["tool"], number(row["ms"]), number(row["ratio"], 2)])
    table = markdown_table(["", "tool", "ms a step", "times a step without"], rows, [False, False, True, True])
    return f"{table}\n\n{source(name, result)}"


SECTIONS = {  # {marker: function of the folder of results that returns Markdown, with links from the top folder}
    "steps": steps_section,
    "sweeps": sweeps_section,
    "kernels": kernels_section,
    "stages": stages_section,
    "layer_norm": layer_norm_section,
    "gpt": gpt_section,
    "scaling": scaling_tables.scaling_section,
    "fp8-speed": fp8_tables.speed_section,
    "fp8-layer": fp8_tables.layer_section,
    "fp8-recipes": fp8_tables.recipes_section,
    "fp8-learning": fp8_tables.learning_section,
    "overhead": overhead_section,
    "front": front_page.front_section,
    "published": front_page.published_section,
    "claims": published_claims.claims_section,
}
PAGES = [ROOT / name for name in ("README.md", "README_WORKSHOP.md")]
PAGES += [ROOT / "docs" / f"{name}.md" for name in ("measured", "fp8")]
DRAWN = {  # {picture: function of the folder of results and the path that draws it}
    ROOT / "docs" / "front_page.png": front_page.draw,
    ROOT / "docs" / "sweeps.png": draw_sweeps,
    ROOT / "docs" / "learning.png": front_page.draw_learning,
    ROOT / "docs" / "fp8_layer.png": fp8_tables.draw_layer,
    ROOT / "docs" / "fp8_learning.png": fp8_tables.draw,
    ROOT / "docs" / "scaling_measured.png": scaling_tables.draw_measured,
    **{ROOT / "docs" / f"{name}.png": functools.partial(traces.draw, name=name) for name in traces.PICTURES},
}


def rewrite(page, contents):
    """(text, text with new content between the markers) of a page; contents: {marker: function that returns it}."""
    text = page.read_text(encoding="utf-8")
    markers = MARKER.findall(text)
    if not markers:
        raise llama.UsageError(
            f"{page} has no markers: put <!-- begin: NAME --> and <!-- end: NAME --> where a table goes"
        )
    if markers != [(side, name) for _, name in markers[::2] for side in ("begin", "end")]:
        raise llama.UsageError(f"{page} has a marker out of order: each begin must be followed by the end of its name")
    unknown = {name for _, name in markers} - contents.keys()
    if unknown:
        raise llama.UsageError(f"{page} has markers of {min(unknown)}: choose from {', '.join(contents)}")
    depth = len(page.resolve().relative_to(ROOT).parts) - 1 if page.resolve().is_relative_to(ROOT) else 0

    def replaced(match):
        name, old = match[1], match[2].strip()
        new = contents[name]().replace("](benchmarks/", f"]({'../' * depth}benchmarks/")
        if new == NOT_MEASURED and old not in ("", NOT_MEASURED):
            raise llama.UsageError(
                f"{page} has a table of {name}, and there is no result of it: bring its result back, or empty the table"
            )
        return f"<!-- begin: {name} -->\n\n{new}\n\n<!-- end: {name} -->"

    return text, SECTION.sub(replaced, text)


def write_all(texts):
    """Writes {path: text}, either all files or none."""
    with contextlib.ExitStack() as stack:
        for path, text in texts.items():
            stack.enter_context(replacing(path, follow=True)).write_text(text, encoding="utf-8")


def update(pages, contents, check):
    """Rewrites the pages that are out of date, or with check prints the difference. Returns whether there were any."""
    texts = {}
    for page in pages:
        try:
            text, wanted = rewrite(page, contents)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise llama.UsageError(f"{page} cannot be read ({reason}): name another page") from error
        if wanted != text:
            texts[page] = wanted
            if check:
                names = (str(page), "what the results say")
                sys.stdout.writelines(difflib.unified_diff(text.splitlines(True), wanted.splitlines(True), *names))
    if texts and not check:
        write_all(texts)
    return bool(texts)


def section_of(folder, name):
    """The Markdown of a section from the results in a folder."""
    with damage_reported(folder, name):
        return SECTIONS[name](folder)


@program("publish.py")
def main(argv):
    parser = Parser("publish.py", __doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if something would change")
    parser.add_argument("--pages", type=Path, nargs="+", metavar="FILE", help="what to rewrite (default: all pages)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="(default: benchmarks/results)")
    options = parser.parse_args(argv)
    if not any(options.results.glob("*.json")):
        raise llama.UsageError(f"--results {options.results} holds no results: give a folder that the benchmarks wrote")
    contents = {name: functools.partial(section_of, options.results, name) for name in SECTIONS}
    out_of_date = update(options.pages or PAGES, contents, options.check)
    if not (options.check or options.pages):
        for picture, draw in DRAWN.items():
            with damage_reported(options.results, picture.name):
                draw(options.results, picture)
    return int(options.check and out_of_date)


if __name__ == "__main__":
    sys.exit(main())
