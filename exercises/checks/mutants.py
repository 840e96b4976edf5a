"""Name a mistake: the edits of the solution in exercises/mistakes/ are run on the same inputs, and compared."""

import functools
import itertools
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

from exercises.checks.common import Wrong, load

MISTAKES = Path(__file__).resolve().parents[1] / "mistakes"
# == task | words | lines of old text and lines of new text
ENTRY = re.compile(r"^== (\w+)|^([^-+=#\n].*)|((?:^-\d* .*\n)+)((?:^\+.*\n)+)", re.M)


class Mistake(NamedTuple):
    """A small edit of a solution, and the words that name it."""

    words: str
    old: str
    new: str
    times: int  # so often old text is there
    given: bool  # whether it is what the participant begins with


@functools.cache
def mistakes_of(solution):
    """Return {task: [Mistake]} of the exercise whose solution has this path."""
    found, words = {}, ""
    for task, said, *edit in ENTRY.findall((MISTAKES / f"{solution.stem}.txt").read_text()):
        if task:
            mistakes = found[task] = []
        elif said:
            words = said
        else:
            times = int(re.match(r"-(\d*)", edit[0])[1] or 1)
            old, new = (re.sub(r"^(-\d*|\+) ?", "", lines, flags=re.M)[:-1] for lines in edit)
            given = words.startswith("given: ")
            mistakes.append(Mistake(words.removeprefix("given: "), old, new, times, given))
    return found


def with_mistake(code, mistake, name):
    """Return the code of a solution with a mistake in the function of this name."""
    function = next(part for part in code.split("\n\n\n") if f"def {name}(" in part)
    bare = re.sub(r"^ *#.*\n", "", function, flags=re.M)  # comments may stand between the lines of an edit
    times = bare.count(mistake.old)
    if times != mistake.times:
        raise ValueError(
            f"a mistake of {name} edits {mistake.old!r}, which is there {times} times, not {mistake.times}"
        )
    return code.replace(function, bare.replace(mistake.old, mistake.new))


@functools.cache
def edited(mistake, name, solution):
    """Return the code of the file solution with a mistake in the function of this name."""
    return with_mistake(solution.read_text(), mistake, name)


@functools.cache  # the tests judge many mistakes on the same cases
def wrong_by(mistake, task, solution, case):
    """Return what is Wrong with a case by this mistake; None if nothing is, or if it raises another error."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / solution.name
        path.write_text(edited(mistake, task.check.__name__, solution))
        try:
            task.run(load(path), case)
        except Wrong as wrong:
            return wrong
        except Exception:
            return None


def explain(wrong, task, solution):
    """Return the first Mistake that fails in the same case and in the same way, or None.

    solution: the path of its file.
    """
    # First those that give the same digits: another rounding is another mistake.
    for share, mistake in itertools.product((0.02, 1), mistakes_of(solution)[task.check.__name__]):
        # The first case in which the mistake shows has to be the one in which the participant's code fails.
        for case in task.cases[: task.cases.index(wrong.case) + 1]:
            if other := wrong_by(mistake, task, solution, case):
                break
        if other and case == wrong.case and wrong.is_like(other, share):
            return mistake
    return None
