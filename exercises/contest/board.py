"""The leaderboard: a page of the results in a folder, the least seconds first."""

import sys
import time
from pathlib import Path

import jinja2

from exercises.contest.judge import median_seconds
from exercises.contest.task import DIVISIONS
from measure.command_line import printable, replacing
from measure.results import damage_reported, read_result
from tiny_llama_v3 import UsageError

PAGE = "board.html"


def row_of(path):
    """Return what the page shows of a result; UsageError if the file holds none."""
    result = read_result(path)
    with damage_reported(path):
        seeds = result["seeds"]
        median = median_seconds(seeds)
        if result["median_seconds"] != median:
            raise UsageError(f"{path} has another median than its seeds: judge its entry again")
        joules = [seed["joules"] for seed in seeds]
        row = {
            "division": result["division"],
            "participant": str(result["participant"]),
            "median": median,
            "seconds": ", ".join("none" if seed["seconds"] is None else f"{seed['seconds']:.1f}" for seed in seeds),
            "losses": ", ".join("none" if seed["loss"] is None else f"{seed['loss']:.3f}" for seed in seeds),
            "joules": ", ".join(f"{j:.0f}" for j in joules) if joules and None not in joules else "",
            "reason": "" if median else next(str(seed["reason"]) for seed in seeds if seed["reason"]),
            "device": str(result["environment"]["device"]),
            "host": str(result["host"] or ""),
            "entry": str(result["entry"]["sha256"])[:8],
            "project": str(result["environment"]["commit"]),
            "date": str(result["date"])[:10],
        }
        if result["limits"] != DIVISIONS[row["division"]]._asdict():
            raise UsageError(f"{path} was judged with other limits than now: judge its entry again")
    return row


def board_of(folder):
    """Return {"divisions": {name: rows, the least seconds first}, "left_out"}; UsageError if there is nothing."""
    rows, left_out = [], []
    for path in sorted(folder.glob("*.json")):
        try:
            rows.append(row_of(path))
        except UsageError as error:
            left_out.append(str(error))
    if not rows:
        raise UsageError("; ".join([f"{folder} has no result: run an entry first", *left_out]))
    rows.sort(key=lambda row: (row["median"] is None, row["median"] or 0, row["participant"]))
    found = {name: [row for row in rows if row["division"] == name] for name in DIVISIONS}
    return {"divisions": {name: own for name, own in found.items() if own}, "left_out": left_out}


def write(folder):
    """Write the page of a folder, and return the exit code."""
    board = board_of(folder)
    source = Path(__file__).with_suffix(".html.jinja").read_text(encoding="utf-8")
    template = jinja2.Template(source, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    text = template.render(**board, limits=DIVISIONS, now=time.strftime("%Y-%m-%d %H:%M"))
    with replacing(folder / PAGE) as page:
        page.write_text(text, encoding="utf-8", errors="backslashreplace")
    print(f"Page: {folder / PAGE}")
    for line in board["left_out"]:
        print(printable(f"left out: {line}"), file=sys.stderr)
    return int(bool(board["left_out"]))
