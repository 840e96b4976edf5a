"""What a participant has done, as a file: which tasks of the exercises pass, and after how many attempts.

    {"participant": name, "date": of the last check,
     "exercises": {exercise: {task: {"passed", "attempts", "passed_at", "message", "us", "device"}}}}

An attempt is a check of something that was written, up to the first that passes. message is why the task failed when it
was last checked, passed_at when it passed first, since it last failed. us is the time that was measured last, on the
device; without one, neither is there. Dates are ISO's, in local time.
"""

import argparse
import getpass
import json
import os
import sys
from datetime import datetime

import tiny_llama_v3 as llama
from measure.results import write_json

LONGEST_NAME = 100
# As users in containers and on cloud machines are called: these names tell nobody from another.
NOBODY = ("root", "participant", "user", "ubuntu", "jovyan", "vscode", "codespace", "ec2-user", "admin")
BLANK = {"passed": False, "attempts": 0, "passed_at": None, "message": None}
FIELDS = {"passed": bool, "attempts": int, "passed_at": str, "message": str, "us": float, "device": str}


def now():
    return datetime.now().isoformat(timespec="seconds")


def user_name():
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return "participant"


def is_name(content):
    """Tell whether content, of a JSON file, can be shown in a table."""
    return isinstance(content, str) and content.isprintable() and 0 < len(content) <= LONGEST_NAME


def participant_name(text):
    """The type of the option --name."""
    if not is_name(text):
        raise argparse.ArgumentTypeError(f"{text[:20]!a} is no name: give 1 to {LONGEST_NAME} printable characters")
    return text


def is_state(state):
    """Tell whether a dict has the fields of a task; all but the first two may be null or missing."""
    # JSON's numbers may be of any size, and a hand-made file may hold anything.
    kinds = {name: type(state[name]) for name in FIELDS if state.get(name) is not None}
    return kinds == {name: FIELDS[name] for name in {"passed", "attempts"} | kinds.keys()} and state["attempts"] < 10**9


def read(path):
    """Return the content of a progress file. OSError if it cannot be read; ValueError, RecursionError if it is none."""
    content = json.loads(path.read_bytes())
    try:
        tasks = [(name, task) for name, tasks in content["exercises"].items() for task in tasks.items()]
        names = [content["participant"], *(name for exercise, (task, _) in tasks for name in (exercise, task))]
        fits = all(map(is_name, names)) and isinstance(content["date"], str) and all(is_state(s) for _, (_, s) in tasks)
    except (LookupError, TypeError, AttributeError):
        fits = False
    if not fits:
        raise ValueError("not a participant's progress")
    return content


class Progress:
    """A progress file, which need not exist yet. name: the participant's; default: who the file names, or the user."""

    def __init__(self, path, name=None):
        self.path = path
        self.content = {"participant": user_name(), "date": now(), "exercises": {}}
        try:
            self.content = read(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise llama.UsageError(f"--progress {path} cannot be read ({error.strerror}): give a file") from error
        except (ValueError, RecursionError) as error:
            # It may be a progress file that was damaged: a person can still save what it holds.
            aside = path.with_name(f"{path.name}.{datetime.now():%Y%m%d_%H%M%S_%f}")
            os.replace(path, aside)
            reason = str(error).splitlines()[0]
            print(f"{path} is no progress file ({reason}): kept as {aside.name}, begun anew", file=sys.stderr)
        if name is not None:
            self.content["participant"] = name

    def state(self, exercise, task):
        return self.content["exercises"].get(exercise, {}).get(task, BLANK)

    def record(self, exercise, task, passed, message, begun=True, **time):
        """Write the file with what a check has found. begun: whether there was anything to check."""
        before, date = self.state(exercise, task), now()
        # The blanks of a notebook that is opened anew do not take back what has passed.
        if before["passed"] and not begun:
            return
        time = time or {name: before[name] for name in ("us", "device") if name in before}
        self.content["exercises"].setdefault(exercise, {})[task] = {
            "passed": passed,
            "attempts": before["attempts"] + (begun and not before["passed"]),
            "passed_at": (before.get("passed_at") or date) if passed else None,
            "message": None if passed else message,
        } | time
        self.content["date"] = date
        write_json(self.path, self.content, follow=True)
