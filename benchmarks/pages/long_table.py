"""Read results into one long table: a line for each row that was measured, with the fields of all that it lies in.

long_table() is a pandas DataFrame. Every table of the pages is a selection or a pivot of one, which markdown() writes,
above the provenance() of its rows.
"""

import collections
import functools

import pandas as pd

from measure.results import RESULTS, read_result
from measure.tables import NOT_MEASURED, cell, markdown_table, number, percent

OF_FILE = "file", "result", "device", "source", "commit"  # the first columns of every long table


def rows_below(node, way):
    """Yield each row at the end of a way of keys, with the fields of what it lies in; its own fields win.

    A name in braces stands for every key, or for every item of a list, and becomes a field with the key. What has an
    error in the place of rows is yielded itself.
    """
    if not way:
        # {"ms": {"median": 1.0}} becomes the column "ms median".
        # Of an error, the first sentence.
        row = node | {"error": cell(node["error"]).split(". ")[0] if node.get("error") else None}
        for name, part in node.items():
            if isinstance(part, dict):
                row |= {f"{name} {key}": value for key, value in part.items()}
        yield row
    elif way[0].startswith("{"):
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            for row in rows_below(child, way[1:]):
                yield {way[0].strip("{}"): key} | row
    elif isinstance(node, dict) and way[0] in node:
        for row in rows_below(node[way[0]], way[1:]):
            yield node | row
    elif isinstance(node, dict) and node.get("error"):
        yield from rows_below(node, [])


def source_of(result):
    """Return (the device, the host and the software of a result, the commit at which it was measured)."""
    environment = result["environment"]
    named = {"host": result.get("host"), "PyTorch": environment["torch"], "Triton": environment["triton"]}
    described = [environment["device"], *(f"{name} {value}" for name, value in named.items() if value)]
    commit = (environment.get("commit") or "").replace("-dirty", " with changes")
    return ", ".join(described), f" at commit {commit}" if commit else ""


def long_table(folder, benchmark, way=""):
    """Return the long table of a benchmark's results: by device, and of each device the newest first.

    The device with the most results is the first one, or else that with the oldest. What shows one device only shows
    this one, whatever results others send.

    The columns are those of OF_FILE, the fields of the recorded results of the benchmark, and the fields that only the
    results in this folder have, in the order of the rows. So a column is there also if the folder has no result, or if
    all that was measured has failed.
    """
    # A run of the script itself has its date in its name only.
    results = [(path.name, read_result(path)) for path in folder.glob(f"{benchmark}_*.json")]
    results.sort(key=lambda item: (item[1].get("date", ""), item[0]))
    devices = collections.Counter(result["environment"]["device"] for _, result in results)
    # most_common() keeps the order of the oldest results of as many.
    order = [device for device, _ in devices.most_common()]
    results = sorted(reversed(results), key=lambda item: order.index(item[1]["environment"]["device"]))
    lines = []
    for name, result in results:
        own = name, result, result["environment"]["device"], *source_of(result)
        lines += [row | dict(zip(OF_FILE, own, strict=True)) for row in rows_below(result, way.split())]
    # The tiny model of some benchmarks only shows that they run.
    rows = pd.DataFrame(line for line in lines if line.get("size") != "tiny")
    recorded = () if folder == RESULTS else long_table(RESULTS, benchmark, way)
    return rows.reindex(columns=list(dict.fromkeys([*OF_FILE, *recorded, *rows])))


def first_device(rows):
    """Return the rows of the first device."""
    # isin() and head(), as a table of no rows has no first device.
    return rows[rows["device"].isin(rows["device"].head(1))]


def newest(rows, *keys):
    """Return, for each combination of keys, the rows of the newest result that has it."""
    # Rows are in the order of long_table(), so the first file of a group is the newest.
    return rows[rows["file"] == rows.groupby(list(keys))["file"].transform("first")]


def of_each_device(benchmark, *ways):
    """Make a function of one device's long tables, one for each way, a function of a folder.

    The function returns a text, and of a folder the texts of all its devices.
    """

    def decorate(section):
        @functools.wraps(section)
        def sections(folder):
            tables = [long_table(folder, benchmark, way) for way in ways]
            devices = tables[0]["device"].unique()
            texts = (section(*(table[table["device"] == device] for table in tables)) for device in devices)
            return "\n\n".join(filter(None, texts)) or NOT_MEASURED

        return sections

    return decorate


# ----------------------------------------------------------------------------------------------------------------------
# Columns of texts


def texts(values, form):
    """Return a column of numbers as texts, also where it is empty or all is missing; what is missing stays so."""
    return values.map(form, na_action="ignore").astype(object)


def whole(value):
    """Format a number without decimals."""
    return number(value, digits=1)


def tenths(share):
    """Format a part of one as a percentage with one decimal; empty if it is missing."""
    return "" if pd.isna(share) else f"{100 * share:.1f}"


def in_brackets(shares):
    """Return texts of parts of one to follow another text; empty where there is none."""
    return texts(shares, lambda share: f" ({percent(share)})").fillna("")


def us_and_rate(rows):
    """Return texts of the time and the rate of each row."""
    return texts(rows["us"], number) + " us, " + texts(rows["rate"], number) + " " + rows["unit"]


def or_error(rows, shown):
    """Return what is shown of rows, and in its place the error where a row has one."""
    return rows["error"].fillna(shown)


# ----------------------------------------------------------------------------------------------------------------------
# Markdown


def markdown(table):
    """Return a DataFrame of texts as a table."""
    return markdown_table(list(table), table.fillna("").values.tolist())


def paragraphs(*texts):
    """Join those texts that are not empty."""
    return "\n\n".join(filter(None, texts))


def not_timed(rows, place):
    """Return a sentence with the errors of rows, each with its place, a column; empty without any."""
    failed = rows[rows["error"].notna()]
    names = failed["row"].fillna("everything") + " of " + failed[place]
    reasons = (names + ", " + failed["error"].str.rstrip(".")).unique()
    return f"Not timed: {'; '.join(reasons)}." if len(reasons) else ""


def provenance(rows):
    """Return the line below a table: device and software, once, and the files of its results with their commits.

    The name of a file has its date, and the file has the command and the versions of all libraries.
    """
    files = rows.drop_duplicates("file")
    measured = "[" + files["file"] + "](benchmarks/results/" + files["file"] + ")" + files["commit"]
    alike = measured.groupby(files["source"], sort=False).agg(", ".join)
    return "; ".join(alike.index + ": " + alike)
