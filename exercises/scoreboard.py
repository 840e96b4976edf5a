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
import json
import os
import re
import statistics
import sys
import textwrap
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

if not __package__:
    print("run it from the root as python -m exercises.scoreboard", file=sys.stderr)
    sys.exit(2)
import jinja2

from exercises.progress_file import NOBODY, is_progress
from measure.command_line import Failure, Parser, printable, program, replacing

PASSED, TRIED, UNTRIED = "+", "x", "."
WIDTH = 100
CUT = 1000  # characters of a message
NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")


@dataclass
class Stuck:
    """A task that some participants have tried and not passed."""

    task: str  # "exercise1 rmsnorm_kernel"
    participants: list
    attempts: float  # their median
    message: str  # the most frequent one
    count: int  # the number of participants with it, apart from numbers in it


def read_all(paths):
    """Reads files, and all JSON below folders: ({participant: [progress]}, [(path, why it is left out)]).

    The newest progress of a participant comes last.
    """
    files = [file for path in paths for file in (sorted(path.rglob("*.json")) if path.is_dir() else [path])]
    top = os.path.commonpath([path.absolute() if path.is_dir() else path.absolute().parent for path in paths])
    progress, left_out = {}, []
    for file in files:
        try:
            content = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError) as error:  # the last two: not JSON, or nested too deep
            left_out.append((file, str(error)))
            continue
        if is_progress(content):
            who = content["participant"]
            who += f" ({os.path.relpath(file, top)})" * (who.lower() in NOBODY)
            progress.setdefault(who, []).append(content)
        else:
            left_out.append((file, "not a participant's progress"))
    in_order = {who: sorted(files, key=lambda file: str(file.get("date"))) for who, files in sorted(progress.items())}
    return in_order, left_out


def tasks_of(progress):
    """{exercise: [task]} of all participants, exercises by name, tasks in the order in which they first appear."""
    found = {}
    for content in progress.values():
        for exercise, tasks in content["exercises"].items():
            found.setdefault(exercise, {}).update(dict.fromkeys(tasks))
    return {exercise: list(found[exercise]) for exercise in sorted(found)}


def mark_of(content, exercise, task):
    state = content["exercises"].get(exercise, {}).get(task)
    if not state or not (state["passed"] or state["attempts"]):
        return UNTRIED
    return PASSED if state["passed"] else TRIED


def stuck_at(progress):
    """[Stuck], the task with the most participants first. Messages that differ only in numbers count as the same."""
    found = []
    for exercise, tasks in tasks_of(progress).items():
        for task in tasks:
            here = {who: content["exercises"][exercise][task] for who, content in progress.items()
                    if mark_of(content, exercise, task) == TRIED}  # fmt: skip
            if here:
                messages = [" ".join((state.get("message") or "no message")[:CUT].split()) for state in here.values()]
                (kind, count), *_ = Counter(NUMBER.sub("#", message) for message in messages).most_common(1)
                message = next(message for message in messages if NUMBER.sub("#", message) == kind)
                attempts = statistics.median(state["attempts"] for state in here.values())
                found.append(Stuck(f"{exercise} {task}", list(here), attempts, message, count))
    return sorted(found, key=lambda stuck: len(stuck.participants), reverse=True)


def fastest(progress):
    """Lines with the fastest kernel of each task on each device."""
    best = {}
    for who, content in progress.items():
        for tasks in content["exercises"].values():
            for task, state in tasks.items():
                key, us = (task, state.get("device") or "unknown device"), state.get("us")
                if state["passed"] and us and us > 0 and (key not in best or us < best[key][0]):  # not NaN either
                    best[key] = us, who
    return [f"{task}: {us:.1f} us, {who} ({device})" for (task, device), (us, who) in sorted(best.items())]


# ----------------------------------------------------------------------------------------------------------------------
# Output


def summary_of(paths):
    """A dict with the contents of the table and the page; Failure if there is nothing to show."""
    files, left_out = read_all(paths)
    progress = {who: contents[-1] for who, contents in files.items()}
    if not progress:
        named = "".join(f"; {path}: {why}" for path, why in left_out)
        given = ", ".join(map(str, paths))
        raise Failure(f"no progress.json in {given}{named}: have the class run exercises/check.py first")
    tasks = tasks_of(progress)
    marks = {who: {exercise: "".join(mark_of(content, exercise, task) for task in names)
                   for exercise, names in tasks.items()} for who, content in progress.items()}  # fmt: skip
    passed = {f"{exercise} {task}": sum(marks[who][exercise][index] == PASSED for who in marks)
              for exercise, names in tasks.items() for index, task in enumerate(names)}  # fmt: skip
    return {"tasks": tasks, "marks": marks, "passed": passed, "stuck": stuck_at(progress),
            "fastest": fastest(progress), "left_out": left_out,
            "several": [f"{len(contents)} files of {who}: the newest counts. Several people? Each has to give a --name."
                        for who, contents in files.items() if len(contents) > 1]}  # fmt: skip


def text_of(board):
    """The lines for a terminal."""
    tasks, marks = board["tasks"], board["marks"]
    width = max(map(len, ("participant", *marks)))
    columns = {exercise: max(len(exercise), len(names)) for exercise, names in tasks.items()}
    lines = ["  ".join([f"{'participant':{width}}", *(f"{name:{size}}" for name, size in columns.items())])]
    for who, row in marks.items():
        lines.append("  ".join([f"{who:{width}}", *(f"{row[name]:{size}}" for name, size in columns.items())]))
    lines += ["", f"{PASSED} passed   {TRIED} tried, not passed   {UNTRIED} not tried; tasks from left to right:"]
    for exercise, names in tasks.items():
        counts = [f"{task} ({board['passed'][f'{exercise} {task}']} of {len(marks)})" for task in names]
        lines += [f"  {exercise}: {'; '.join(counts)}"]
    lines += board["several"]
    lines += ["", "Where they are stuck, most first:" if board["stuck"] else "Nobody is stuck."]
    for stuck in board["stuck"]:
        lines += [f"  {stuck.task}: {', '.join(stuck.participants)}; median of attempts {stuck.attempts:g}"]
        lines += [f"    {stuck.count} of {len(stuck.participants)}: {stuck.message}"]
    lines += ["", "The fastest kernels:", *(f"  {line}" for line in board["fastest"])] if board["fastest"] else []
    return "\n".join(wrapped.rstrip() for line in lines for wrapped in wrap(line))


def wrap(line):
    """Wraps a line to WIDTH columns, indenting the following lines by two more."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    how = dict(subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return textwrap.wrap(line, WIDTH, **how) or [line]


def page_of(board, refresh):
    """The text of a page that needs no other file; refresh: seconds after which a browser reloads it."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    names = {PASSED: "passed", TRIED: "tried", UNTRIED: "untried"}
    template = environment.get_template("scoreboard.html.jinja")
    return template.render(board=board, names=names, refresh=refresh, now=time.strftime("%H:%M"))


def seconds(text):
    if not 0 < float(text) <= 86400:
        raise argparse.ArgumentTypeError(f"{text} is no time: give seconds, more than 0 and at most 86400")
    return float(text)


def show(options):
    board = summary_of(options.paths)
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
        print("\x1b[2J\x1b[H", end="")  # clears the terminal
        try:
            show(options)
        except Failure as nothing_yet:
            print(printable(nothing_yet), flush=True)
        time.sleep(options.watch)
    return show(options)


if __name__ == "__main__":
    sys.exit(main())
