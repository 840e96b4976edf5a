"""Show the progress of a class: the tasks that each participant has passed, and frequent failures.

    python -m exercises.scoreboard class/                        every JSON file below a folder
    python -m exercises.scoreboard class/ --html board.html      also as a page, which a browser reloads
    watch -n 30 python -m exercises.scoreboard class/            repeat every 30 seconds, until Ctrl-C

The program reads the files of `exercises/check.py`: progress.json, one for each participant. It uses
the newest file of a participant, and names the files that it leaves out. Files of `root` and other names that everybody
has in a container count as different participants.

Exit codes: 0 done, 1 a file was left out, 2 there is nothing to show.
"""

import itertools
import sys
import time
from pathlib import Path

if not __package__:
    print("run it from the root as python -m exercises.scoreboard", file=sys.stderr)
    sys.exit(2)
import jinja2
import pandas
from tabulate import tabulate

from exercises import progress_file
from measure.command_line import Parser, UsageError, printable, program, replacing

PASSED, TRIED, UNTRIED = "+", "x", "."
NUMBER = r"-?\d+(\.\d+)?(e[+-]?\d+)?"
TASK = ["exercise", "task"]
STEPS = progress_file.steps_of(*(name for name, _ in progress_file.WAY))


def people(count):
    """Return a number of participants in words."""
    return f"{count} participant{'s' if count != 1 else ''}"


def rows_of(file):
    """Return a dict for each task in a progress file."""
    content = progress_file.read(file)
    who = content["participant"]
    if who.lower() in progress_file.NOBODY:
        who = f"{who} ({file})"
    own = {"who": who, "file": file, "date": content["date"]}
    found = content["exercises"].items()
    return [own | state | {"exercise": name, "task": task} for name, tasks in found for task, state in tasks.items()]


def stuck_at(states):
    """Return a dict for each task that some have tried and not passed, the one with the most participants first.

    Messages that differ only in numbers count as the same.
    """
    # What is said of a test would give its answers away.
    tried = states[(states.mark == TRIED) & ~states.exercise.isin(progress_file.TESTS)]
    messages = tried.message.fillna("no message")
    tried = tried.assign(message=messages, kind=messages.str.replace(NUMBER, "#", regex=True))
    found = []
    for task, here in tried.groupby(TASK):
        # The message that most of them see, in the words of the first of them.
        alike = here.message[here.kind == here.kind.mode()[0]]
        stuck = {"task": " ".join(task), "participants": list(here.who), "attempts": here.attempts.median()}
        found.append(stuck | {"message": alike.iloc[0], "count": len(alike)})
    return sorted(found, key=lambda stuck: -len(stuck["participants"]))


def board_of(paths):
    """Return what the terminal and the page show; UsageError if there is nothing."""
    files = [file for path in paths for file in (sorted(path.rglob("*.json")) if path.is_dir() else [path])]
    rows, left_out = [], []
    for file in files:
        try:
            rows += rows_of(file)
        except (OSError, ValueError, RecursionError) as error:  # the last two: not JSON, or nested too deep
            left_out.append(f"{file}: {error}")
    if not rows:
        given = "; ".join(map(str, [*paths, *left_out]))
        raise UsageError(f"no progress.json in {given}: have the class run exercises/check.py first")
    states = pandas.DataFrame(rows).sort_values(["who", "date"], kind="stable")
    states["mark"] = states.passed.map({True: PASSED, False: TRIED}).where(states.passed | states.attempts, UNTRIED)
    files = states.groupby("who").file
    several = files.nunique()
    states = states[states.file == files.transform("last")]
    marks = states.pivot(index="who", columns=TASK, values="mark").fillna(UNTRIED)
    # What a file has and the workshop does not comes last: it is of another version.
    steps = [*STEPS, *(step for step in marks if step not in STEPS)]
    marks = marks.reindex(columns=pandas.MultiIndex.from_tuples(steps, names=TASK), fill_value=UNTRIED)
    hint = "the newest counts. Several people? Each has to give a --name."
    return {
        "marks": marks,
        "averages": [
            f"{test}: {own.passed.sum() / own.who.nunique():.1f} right on average, of {people(own.who.nunique())}"
            for test, own in states[states.exercise.isin(progress_file.TESTS) & (states.mark != UNTRIED)].groupby(
                "exercise"
            )
        ],
        "stuck": stuck_at(states),
        "left_out": left_out,
        "several": [f"{count} files of {who}: {hint}" for who, count in several[several > 1].items()],
    }


# ----------------------------------------------------------------------------------------------------------------------
# Output


def sections_of(marks):
    """Yield (exercise, marks) of neighboring columns that belong to one exercise: the puzzles come in two sections."""
    begin = 0
    for exercise, steps in itertools.groupby(exercise for exercise, _ in marks):
        end = begin + len(list(steps))
        yield exercise, marks.iloc[:, begin:end]
        begin = end


def text_of(board):
    """Return the text for a terminal."""
    marks, sections = board["marks"], list(sections_of(board["marks"]))
    table = zip(marks.index, *(section.agg("".join, axis=1) for _, section in sections), strict=True)
    header = ["participant", *(exercise for exercise, _ in sections)]
    lines = [tabulate(table, headers=header, tablefmt="plain", disable_numparse=True)]
    lines += ["", f"{PASSED} passed   {TRIED} tried, not passed   {UNTRIED} not tried; tasks from left to right:"]
    for exercise, section in sections:
        counts = (section == PASSED).sum().droplevel("exercise").items()
        lines.append(f"  {exercise}: {'; '.join(f'{task} ({count} of {len(marks)})' for task, count in counts)}")
    lines += board["averages"] + board["several"]
    lines += ["", "Where they are stuck, most first:" if board["stuck"] else "Nobody is stuck."]
    for stuck in board["stuck"]:
        who = stuck["participants"]
        lines += [f"  {stuck['task']}: {', '.join(who)}; median of attempts {stuck['attempts']:g}"]
        lines += [f"    {stuck['count']} of {len(who)}: {stuck['message']}"]
    return "\n".join(lines)


def page_of(board):
    """Return the text of a page that needs no other file."""
    text = Path(__file__).with_suffix(".html.jinja").read_text(encoding="utf-8")
    template = jinja2.Template(text, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    marks = board["marks"]
    sections = [(exercise, len(section.columns)) for exercise, section in sections_of(marks)]
    return template.render(
        **board,
        sections=sections,
        begins={0, *itertools.accumulate(count for _, count in sections)},
        people=people(len(marks)),
        passed=(marks == PASSED).sum(),
        names={PASSED: "passed", TRIED: "tried", UNTRIED: "untried"},
        letters={PASSED: "P", TRIED: "T", UNTRIED: ""},
        now=time.strftime("%H:%M"),
    )


@program("scoreboard.py")
def main(argv):
    parser = Parser("scoreboard.py", __doc__)
    parser.add_argument("paths", type=Path, nargs="+", metavar="FILE_OR_FOLDER")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page")
    options = parser.parse_args(argv)
    board = board_of(options.paths)
    print(printable(text_of(board)))  # messages and file names may hold anything
    if options.html:
        with replacing(options.html, follow=True) as page:
            page.write_text(page_of(board), encoding="utf-8", errors="backslashreplace")
        print(f"Page: {options.html}")
    for line in board["left_out"]:
        print(printable(f"left out: {line}"), file=sys.stderr)
    return int(bool(board["left_out"]))


if __name__ == "__main__":
    sys.exit(main())
