"""What a participant has done, as a file: which tasks of the exercises pass, and after how many attempts.

    {"participant": name, "date": of the last check,
     "exercises": {exercise: {task: {"passed", "attempts", "passed_at", "message"}}}}

An attempt is a check of something that was written, up to the first that passes. message is why the task failed when it
was last checked, passed_at when it passed first, since it last failed. Dates are ISO's, in local time.
"""

import getpass
import json
import os
import sys
from datetime import datetime

import tiny_llama_v3 as llama
from measure.results import write_json

FIELDS = {"passed": (bool,), "attempts": (int,), "passed_at": (str, type(None)), "message": (str, type(None))}
BLANK = {"passed": False, "attempts": 0, "passed_at": None, "message": None}


def now():
    return datetime.now().isoformat(timespec="seconds")


def user_name():
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return "participant"


def is_progress(content):
    """Whether content, of a JSON file, has the form that this module writes."""
    if not (isinstance(content, dict) and isinstance(content.get("participant"), str)):
        return False
    exercises = content.get("exercises")
    if not (isinstance(content.get("date"), str) and isinstance(exercises, dict)):
        return False
    if not all(isinstance(tasks, dict) for tasks in exercises.values()):
        return False
    states = [state for tasks in exercises.values() for state in tasks.values()]
    return all(
        isinstance(state, dict) and all(type(state.get(name)) in kinds for name, kinds in FIELDS.items())
        for state in states
    )


def read(path):
    """The content of a progress file. FileNotFoundError, other OSErrors; ValueError if it is none."""
    content = json.loads(path.read_bytes())
    if not is_progress(content):
        raise ValueError("it has another form")
    return content


def put_aside(path, reason):
    """Renames a file that cannot be read, to a name that is free, and says so."""
    stamp = datetime.now().strftime("%Y%m%d_%H%M%S")
    names = (path.with_name(f"{path.name}.{stamp}{suffix}") for suffix in ("", *(f"_{n}" for n in range(2, 100))))
    for aside in names:
        try:
            aside.touch(exist_ok=False)  # reserves the name
            os.replace(path, aside)
        except FileExistsError:
            continue
        print(f"{path} is no progress file ({reason}): kept as {aside.name}, begun anew", file=sys.stderr)
        return


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
        except ValueError as error:
            put_aside(path, str(error).splitlines()[0])
        if name is not None:
            self.content["participant"] = name

    def state(self, exercise, task):
        return self.content["exercises"].get(exercise, {}).get(task, BLANK)

    def record(self, exercise, task, passed, message, begun=True):
        """Writes the file with what a check has found. begun: whether there was anything to check."""
        before, date = self.state(exercise, task), now()
        self.content["exercises"].setdefault(exercise, {})[task] = {
            "passed": passed,
            "attempts": before["attempts"] + (begun and not before["passed"]),
            "passed_at": (before["passed_at"] or date) if passed else None,
            "message": None if passed else message,
        }
        self.content["date"] = date
        write_json(self.path, self.content)
