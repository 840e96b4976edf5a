"""What a participant has done, as a file: which tasks of the exercises pass, and after how many attempts.

    {"participant": name, "date": of the last check,
     "exercises": {exercise: {task: {"passed", "attempts", "message"}}}}

An attempt is a check of something that was written, up to the first that passes. message is why the task failed when it
was last checked. The date is ISO's, in local time.
"""

import argparse
import contextlib
import getpass
import json
import os
from datetime import datetime

import tiny_llama_v3 as llama
from measure.command_line import printable_fields
from measure.results import write_json
from tiny_llama.files import open_input

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None

# The tasks as README_WORKSHOP.md and the pages of the exercises go through them. They stand here and not beside their
# checks, so that the scoreboard runs without Triton.
PUZZLES = """copy_kernel masked_copy_kernel grid_copy_kernel outer_sum_kernel transpose_kernel row_sum_kernel
softmax_kernel row_max_kernel multiply_tile""".split()
LATE_PUZZLES = """grouped_matmul_kernel tuned_matmul_kernel scaled_matmul_kernel rope_kernel
rope_backward_kernel""".split()
EXERCISE1 = "memory_lines bytes_moved rmsnorm_kernel".split()
EXERCISE2 = """naive_bytes least_bytes matmul_flop silu_mul_kernel silu_mul_backward_kernel hybrid_swiglu
slope""".split()
EXERCISE3 = "fold attention_kernel key_blocks attention_gradients key_value_gradient_kernel".split()
EXAMINATION = """count_tokens_kernel spectral_linear penalize_repetition copy_bandwidth divide_columns_kernel
accumulate_gradients""".split()
WAY = [
    ("before", list("ABCDEF")),
    ("puzzles", PUZZLES),
    ("exercise1", EXERCISE1),
    ("exercise2", EXERCISE2),
    ("exercise3", EXERCISE3),
    ("puzzles", LATE_PUZZLES),
    ("patient", ["gradients", "loss", "clock"]),
    ("examination", EXAMINATION),
]
TESTS = "before", "examination"  # at the two ends of the workshop

LONGEST_NAME = 100
LARGEST = 2**20  # bytes of a file
# As users in containers and on cloud machines are called: these names tell nobody from another.
NOBODY = "root participant user ubuntu jovyan vscode codespace ec2-user admin".split()
BLANK = {"passed": False, "attempts": 0, "message": None}
KINDS = {"passed": bool, "attempts": int, "message": str | None}  # of the values of a state


def steps_of(*exercises):
    """Return (exercise, task) of all tasks of these exercises, in the order of the workshop."""
    return [(name, task) for name, tasks in WAY if name in exercises for task in tasks]


def now():
    return datetime.now().isoformat(timespec="seconds")


def is_name(text):
    """Tell whether a text can be shown in a table."""
    return text.isprintable() and 0 < len(text) <= LONGEST_NAME


def participant_name(text):
    """The type of the option --name."""
    if not is_name(text):
        raise argparse.ArgumentTypeError(f"{text[:20]!a} is no name: give 1 to {LONGEST_NAME} printable characters")
    return text


def read(path):
    """Return the content of a progress file. OSError if it cannot be read; ValueError, RecursionError if it is none."""
    with open_input(path, LARGEST) as file:
        content = json.load(file, object_hook=printable_fields)
    # A hand-made file may hold anything.
    try:
        states = [state for tasks in content["exercises"].values() for state in tasks.values()]
        kinds = [isinstance(state.get(name), kind) for state in states for name, kind in KINDS.items()]
        fits = is_name(content["participant"]) and isinstance(content["date"], str) and all(kinds)
    except (LookupError, TypeError, AttributeError):
        fits = False
    if not fits:
        raise ValueError("not a participant's progress")
    return content


@contextlib.contextmanager
def locked(path):
    """Keep other checks from writing this file meanwhile. Its folder has the lock, as the file itself is replaced."""
    with contextlib.ExitStack() as stack:
        # Windows opens no folder, and some network file systems lock none: there the file is read just before it is
        # written, without a lock.
        with contextlib.suppress(OSError):
            folder = os.open(os.path.dirname(os.path.realpath(path)), os.O_RDONLY)
            stack.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield


class Progress:
    """A progress file, which need not exist yet. name: the participant's; default: who the file names, or the user."""

    def __init__(self, path, name=None):
        self.path, self.name = path, name
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container whose user has no name
            user = "participant"
        self.content = {"participant": user, "date": now(), "exercises": {}}
        self.refresh()

    def refresh(self):
        """Take over what the file says; without a file, what is known stays."""
        try:
            self.content = read(self.path)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            reason = f"is no progress file ({error}): move it, and another is begun"
            raise llama.UsageError(f"--progress {self.path} {reason}") from error
        if self.name is not None:
            self.content["participant"] = self.name

    def state(self, exercise, task):
        return self.content["exercises"].get(exercise, {}).get(task, BLANK)

    def record(self, exercise, task, passed, message, begun=True):
        """Write the file with what a check has found. begun: whether there was anything to check."""
        with locked(self.path):
            self.refresh()  # another check may have written since
            before = self.state(exercise, task)
            # The blanks of a notebook that is opened anew do not take back what has passed.
            if before["passed"] and not begun:
                return
            self.content["exercises"].setdefault(exercise, {})[task] = {
                "passed": passed,
                "attempts": before["attempts"] + (begun and not before["passed"]),
                "message": None if passed else message,
            }
            self.content["date"] = now()
            write_json(self.path, self.content, follow=True)
