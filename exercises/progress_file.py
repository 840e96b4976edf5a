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

FIELDS = {"passed": (bool,), "attempts": (int,), "passed_at": (str, type(None)), "message": (str, type(None)),
          "us": (float, type(None)), "device": (str, type(None))}  # fmt: skip
LONGEST_NAME = 100
# As users in containers and on cloud machines are called: these names tell nobody from another.
NOBODY = ("root", "participant", "user", "ubuntu", "jovyan", "vscode", "codespace", "ec2-user", "admin")
BLANK = {"passed": False, "attempts": 0, "passed_at": None, "message": None}


def now():
    return datetime.now().isoformat(timespec="seconds")


def user_name():
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return "participant"


def is_name(content):
    """Whether content, of a JSON file, can be shown in a table."""
    return isinstance(content, str) and content.isprintable() and 0 < len(content) <= LONGEST_NAME


def participant_name(text):
    """The type of the option --name."""
    if not is_name(text):
        raise argparse.ArgumentTypeError(f"{text[:20]!a} is no name: give 1 to {LONGEST_NAME} printable characters")
    return text


def has_fields(content, kinds):
    """Whether content is a dict whose fields have one of their types; a field that is left out is None."""
    return isinstance(content, dict) and all(type(content.get(name)) in types for name, types in kinds.items())


def is_progress(content):
    """Whether content, of a JSON file, has the form that this module writes."""
    if not (has_fields(content, {"date": (str,), "exercises": (dict,)}) and is_name(content.get("participant"))):
        return False
    exercises = content["exercises"]
    if not all(is_name(name) and isinstance(tasks, dict) for name, tasks in exercises.items()):
        return False
    states = [pair for tasks in exercises.values() for pair in tasks.items()]
    return all(is_name(name) and has_fields(state, FIELDS) and 0 <= state["attempts"] < 10**9 for name, state in states)


def read(path):
    """The content of a progress file. FileNotFoundError, other OSErrors; ValueError, RecursionError if it is none."""
    content = json.loads(path.read_bytes())
    if not is_progress(content):
        raise ValueError("it has another form")
    return content


def put_aside(path, reason):
    """Renames a file that cannot be read, and says so."""
    aside = path.with_name(f"{path.name}.{datetime.now():%Y%m%d_%H%M%S_%f}")
    os.replace(path, aside)
    print(f"{path} is no progress file ({reason}): kept as {aside.name}, begun anew", file=sys.stderr)


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
            put_aside(path, str(error).splitlines()[0])
        if name is not None:
            self.content["participant"] = name

    def state(self, exercise, task):
        return self.content["exercises"].get(exercise, {}).get(task, BLANK)

    def record(self, exercise, task, passed, message, begun=True, **time):
        """Writes the file with what a check has found. begun: whether there was anything to check."""
        before, date = self.state(exercise, task), now()
        if before["passed"] and not begun:
            return  # the blanks of a notebook that is opened anew do not take back what has passed
        self.content["exercises"].setdefault(exercise, {})[task] = {
            "passed": passed,
            "attempts": before["attempts"] + (begun and not before["passed"]),
            "passed_at": (before["passed_at"] or date) if passed else None,
            "message": None if passed else message,
            **(time or {name: before[name] for name in ("us", "device") if name in before}),
        }
        self.content["date"] = date
        write_json(self.path, self.content, follow=True)
