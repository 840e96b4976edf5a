"""Show the progress of a class: the tasks that each participant has passed, frequent failures, the fastest kernels.

    python -m exercises.scoreboard class/                        every JSON file below a folder
    python -m exercises.scoreboard class/ --html board.html      also as a page
    python -m exercises.scoreboard class/ --watch 30             repeat every 30 seconds, until Ctrl-C

The program reads the files of `exercises/check.py`: progress.json, one for each participant. Times are those of
--time. It uses the newest file of a participant, and names the files that it leaves out.
Files of `root` and other names that everybody has in a container count as different participants.
Exit codes: 0 done, 1 a file was left out, 2 there is nothing to show.
"""

import argparse
import os
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

if not __package__:
    print("run it from the root as python -m exercises.scoreboard", file=sys.stderr)
    sys.exit(2)
import jinja2
import pandas
from tabulate import tabulate

from exercises import progress_file
from measure.command_line import Failure, Parser, printable, program, replacing

PASSED, TRIED, UNTRIED = "+", "x", "."
WIDTH = 100
CUT = 1000  # characters of a message
NUMBER = r"-?\d+(\.\d+)?(e[+-]?\d+)?"
TASK = ["exercise", "task"]


def read_all(paths):
    """Return [(participant, progress)] of files and all JSON below folders, the newest last, and what is left out."""
    files = [file for path in paths for file in (sorted(path.rglob("*.json")) if path.is_dir() else [path])]
    top = os.path.commonpath([path.absolute() if path.is_dir() else path.absolute().parent for path in paths])
    progress, left_out = [], []
    for file in files:
        try:
            content = progress_file.read(file)
        except (OSError, ValueError, RecursionError) as error:  # the last two: not JSON, or nested too deep
            left_out.append((file, str(error)))
            continue
        # Several participants may be called root: their files tell them apart.
        who = content["participant"]
        who += f" ({os.path.relpath(file, top)})" * (who.lower() in progress_file.NOBODY)
        progress.append((who, content))
    return sorted(progress, key=lambda own: str(own[1]["date"])), left_out


def mark_of(state):
    return PASSED if state["passed"] else TRIED if state["attempts"] else UNTRIED


def states_of(newest):
    """Return a DataFrame with a row for each participant and task; newest: {participant: progress}."""
    rows = []
    for who, content in sorted(newest.items()):
        for exercise, tasks in content["exercises"].items():
            for task, state in tasks.items():
                message = " ".join((state.get("message") or "no message")[:CUT].split())
                timed = state.get("us"), state.get("device") or "unknown device"
                rows.append((who, exercise, task, mark_of(state), state["attempts"], message, *timed))
    return pandas.DataFrame(rows, columns=["who", *TASK, "mark", "attempts", "message", "us", "device"])


def stuck_at(states):
    """Return a dict for each task that some have tried and not passed, the one with the most participants first.

    Messages that differ only in numbers count as the same.
    """
    tried = states[states.mark == TRIED]
    tried = tried.assign(kind=tried.message.str.replace(NUMBER, "#", regex=True))
    found = []
    for task, here in tried.groupby(TASK):
        # The message that most of them see, in the words of the first of them.
        alike = here[here.kind == here.kind.mode()[0]]
        found.append({"task": " ".join(task), "participants": list(here.who), "attempts": here.attempts.median(),
                      "message": alike.message.iloc[0], "count": len(alike)})  # fmt: skip
    return sorted(found, key=lambda stuck: -len(stuck["participants"]))


def fastest(states):
    """Return lines with the fastest kernel of each task on each device."""
    timed = states[(states.mark == PASSED) & (states.us.astype(float) > 0)]  # not NaN either
    best = timed.sort_values("us").drop_duplicates(["task", "device"]).sort_values(["task", "device"])
    return [f"{row.task}: {row.us:.1f} us, {row.who} ({row.device})" for row in best.itertuples()]


def board_of(paths):
    """Return what the terminal and the page show; Failure if there is nothing."""
    progress, left_out = read_all(paths)
    if not progress:
        named = "".join(f"; {path}: {why}" for path, why in left_out)
        given = ", ".join(map(str, paths))
        raise Failure(f"no progress.json in {given}{named}: have the class run exercises/check.py first")
    newest = dict(progress)
    states = states_of(newest)
    # Exercises by name, and tasks in the order in which they first appear, which is that of the page.
    order = states[TASK].drop_duplicates().sort_values("exercise", kind="stable")
    marks = states.pivot(index="who", columns=TASK, values="mark")
    several = Counter(who for who, _ in progress)
    return {
        "marks": marks.reindex(index=sorted(newest), columns=pandas.MultiIndex.from_frame(order)).fillna(UNTRIED),
        "stuck": stuck_at(states),
        "fastest": fastest(states),
        "left_out": left_out,
        "several": [f"{count} files of {who}: the newest counts. Several people? Each has to give a --name."
                    for who, count in several.items() if count > 1],
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Output


def text_of(board):
    """Return the text for a terminal."""
    marks = board["marks"]
    by_exercise = marks.T.groupby(level="exercise").agg("".join).T.rename_axis("participant")
    lines = tabulate(by_exercise, headers="keys", tablefmt="plain", disable_numparse=True).splitlines()
    lines += ["", f"{PASSED} passed   {TRIED} tried, not passed   {UNTRIED} not tried; tasks from left to right:"]
    passed = (marks == PASSED).sum()
    for exercise in by_exercise:
        counts = [f"{task} ({count} of {len(marks)})" for task, count in passed[exercise].items()]
        lines.append(f"  {exercise}: {'; '.join(counts)}")
    lines += board["several"]
    lines += ["", "Where they are stuck, most first:" if board["stuck"] else "Nobody is stuck."]
    for stuck in board["stuck"]:
        who = stuck["participants"]
        lines += [f"  {stuck['task']}: {', '.join(who)}; median of attempts {stuck['attempts']:g}"]
        lines += [f"    {stuck['count']} of {len(who)}: {stuck['message']}"]
    lines += ["", "The fastest kernels:", *(f"  {line}" for line in board["fastest"])] if board["fastest"] else []
    return "\n".join(map(wrapped, lines))


def wrapped(line):
    """Wrap a line to WIDTH columns, indenting the following lines by two more."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def page_of(board, refresh):
    """Return the text of a page that needs no other file; refresh: seconds after which a browser reloads it."""
    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    names = {PASSED: "passed", TRIED: "tried", UNTRIED: "untried"}
    passed = (board["marks"] == PASSED).sum()
    template = environment.get_template("scoreboard.html.jinja")
    return template.render(**board, passed=passed, names=names, refresh=refresh, now=time.strftime("%H:%M"))


def seconds(text):
    """The type of --watch."""
    if not 0 < float(text) <= 86400:
        raise argparse.ArgumentTypeError(f"{text} is no time: give seconds, more than 0 and at most 86400")
    return float(text)


def show(options):
    board = board_of(options.paths)
    print(printable(text_of(board)), flush=True)
    if options.html:
        with replacing(options.html, follow=True) as page:
            page.write_text(page_of(board, options.watch), encoding="utf-8", errors="backslashreplace")
        print(f"Page: {options.html}")
    for path, why in board["left_out"]:
        print(printable(f"left out: {path}: {why}"), file=sys.stderr)
    return int(bool(board["left_out"]))


@program("scoreboard.py")
def main(argv):
    parser = Parser("scoreboard.py", __doc__)
    parser.add_argument("paths", type=Path, nargs="+", metavar="FILE_OR_FOLDER")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page")
    parser.add_argument("--watch", type=seconds, metavar="SECONDS", help="repeat until Ctrl-C")
    options = parser.parse_args(argv)
    missing = [str(path) for path in options.paths if not path.exists()]
    if missing:
        raise Failure(f"{', '.join(missing)} does not exist: give the folder of the class's progress.json files")
    while options.watch:
        # Clears the terminal.
        print("\x1b[2J\x1b[H", end="")
        try:
            show(options)
        except Failure as nothing_yet:
            print(printable(nothing_yet), flush=True)
        time.sleep(options.watch)
    return show(options)


if __name__ == "__main__":
    sys.exit(main())
