#!/usr/bin/env python3
"""Write the measured tables into README.md, from the newest results.

    python benchmarks/tables.py            rewrite what stands between the markers
    python benchmarks/tables.py --check    print what would change, and exit with 1 if anything would

The markers are <!-- begin: compare -->, <!-- end: compare -->, and the same with kernels. Of a comparison, each size
comes from the newest result that has it. Exit codes: 0 done, 1 README.md is out of date, 2 the request cannot be met.
"""

import argparse
import difflib
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_MEASURED = "_Not measured yet._"


def newest_first(folder, benchmark):
    """(name, result), the newest first."""
    results = [(path.name, json.loads(path.read_text())) for path in folder.glob(f"{benchmark}_*.json")]
    return sorted(results, key=lambda item: (item[1]["date"], item[0]), reverse=True)


def markdown_table(header, rows):
    """The first column to the left, the others to the right."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def significant(value):
    """Three significant digits, never an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.{2 if value < 10 else 1}f}" if value >= 1 else f"{value:.3f}"


def provenance(name, result):
    environment = result["environment"]
    versions = {"PyTorch": environment["torch"], "Triton": environment["triton"], **result.get("peers", {})}
    software = ", ".join(f"{library} {version}" for library, version in versions.items() if version)
    link = f"[{name}](benchmarks/results/{name})"
    return f"{environment['device']}, {software}, {result['date'][:10]}: `{result['command']}` ({link})"


def ratio_line(pair):
    relation = f"`{pair['ours']}` takes {pair['time_ratio']:.2f} of the time of `{pair['peer']}`"
    if pair["memory_ratio"]:
        relation += f" and {pair['memory_ratio']:.2f} of its peak memory"
    return f"{relation}."


def compare_table(size_name, size, name, result):
    config = size["config"]
    rows = []
    for row_name, row in size["rows"].items():
        bold = "**" if row_name in ("triton graph", size["strongest_peer"]) else ""
        label = f"{bold}{row_name}{bold}"
        if row["error"]:
            rows.append([label, row["error"].replace("|", "/"), "", "", "", ""])
            continue
        memory, mfu = row["peak_memory_mib"], row["mfu"]
        rows.append(
            [
                label,
                significant(row["ms"]["median"]),
                f"{significant(row['ms']['p20'])} – {significant(row['ms']['p80'])}",
                f"{row['tokens_per_second']:,.0f}",
                f"{100 * mfu:.1f} %" if mfu else "",
                f"{memory:,.0f}" if memory else "",
            ]
        )
    title = (
        f"**{size_name}**: {config['batch_size']} x {config['seq_len']} tokens, hidden {config['hidden_dim']}, "
        f"{config['num_layers']} layers, {config['num_heads']} heads, {size['precision']}"
    )
    table = markdown_table(["", "ms a step", "p20 – p80", "tokens/s", "of peak", "memory, MiB"], rows)
    ratios = " ".join(ratio_line(pair) for pair in size["comparisons"])
    return "\n\n".join(part for part in (title, table, ratios, provenance(name, result)) if part)


def compare_section(folder):
    newest = {}
    for name, result in newest_first(folder, "compare"):
        for size_name, size in result["sizes"].items():
            if "comparisons" in size:  # measured to its end
                newest.setdefault(size_name, (size_name, size, name, result))
    if len(newest) > 1:
        newest.pop("tiny", None)  # a trial
    order = ("small", "medium", "large", "tiny")
    return "\n\n".join(compare_table(*newest[size_name]) for size_name in order if size_name in newest) or NOT_MEASURED


def kernels_section(folder):
    results = newest_first(folder, "kernels")
    if not results:
        return NOT_MEASURED
    name, result = results[0]
    rows = []
    for case in result["cases"]:
        if case.get("error"):
            rows.append([case["case"], case["error"].replace("|", "/"), "", "", ""])
            continue
        contenders = {name: row for name, row in case["contenders"].items() if not row["error"]}
        ours = contenders.pop("triton", None)
        peer = min(contenders, key=lambda name: contenders[name]["us"], default=None)
        theirs = contenders.get(peer)
        rows.append(
            [
                case["case"],
                f"{significant(ours['us'])} us, {significant(ours['rate'])} {case['unit']}" if ours else "",
                f"{significant(theirs['us'])} us, {significant(theirs['rate'])} {case['unit']}" if theirs else "",
                peer or "",
                f"{theirs['us'] / ours['us']:.2f}" if ours and theirs else "",
            ]
        )
    table = markdown_table([result["dtype"], "ours", "fastest peer", "which", "its time / ours"], rows)
    return f"{table}\n\n{provenance(name, result)}"


SECTIONS = {"compare": compare_section, "kernels": kernels_section}


def rewrite(text, folder):
    """The text with every section between markers replaced."""
    for name, section in SECTIONS.items():
        begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        content = f"{begin}\n\n{section(folder)}\n\n{end}"
        text = pattern.sub(lambda _, content=content: content, text)
    return text


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if something would change")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="the file to rewrite")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="where the results lie")
    options = parser.parse_args(argv)
    try:
        text = options.readme.read_text()
    except OSError as error:
        print(f"tables.py: error: --readme {options.readme} cannot be read ({error.strerror})", file=sys.stderr)
        return 2
    wanted = rewrite(text, options.results)
    if not options.check:
        if wanted != text:
            options.readme.write_text(wanted)
        return 0
    names = (str(options.readme), "what the results say")
    sys.stdout.writelines(difflib.unified_diff(text.splitlines(True), wanted.splitlines(True), *names))
    return int(wanted != text)


if __name__ == "__main__":
    sys.exit(main())
