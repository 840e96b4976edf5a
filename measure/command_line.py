"""The command line of all programs except tiny_llama_v3.py, which runs without the rest of the project.

This module needs only the standard library: the readers of profiles run on login nodes that have pandas but no
PyTorch.
"""

import argparse
import contextlib
import errno
import functools
import os
import sys
from pathlib import Path

from tiny_llama.files import printable, replacing_files


class UsageError(Exception):
    """What tiny_llama_v3.UsageError is, for programs that run without PyTorch: what is wrong, and the remedy."""

    exit_code = 2


class NothingRecorded(UsageError):
    """A profile can be read but does not hold what was asked for."""

    exit_code = 1


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that shows the description as it is and raises UsageError for a wrong command line."""

    def __init__(self, prog, description):
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, formatter_class=layout, allow_abbrev=False)

    def error(self, message):
        raise UsageError(f"{message} (--help lists the options)")


def positive(text):
    """Convert the text of an option that takes a whole number from 1 on."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive: give 1 or more")
    return int(text)


positive.__name__ = "int"  # as argparse calls the type in its messages


def time_limit(text):
    """Convert the text of an option that takes a number of seconds, 0 or more."""
    if not float(text) >= 0:  # NaN included
        raise argparse.ArgumentTypeError(f"{text} is not a time: give a number of seconds")
    return float(text)


def printable_fields(fields):
    """Return an object of JSON with printable names and texts."""
    return {printable(name): printable(value) if isinstance(value, str) else value for name, value in fields.items()}


def require_file(path):
    """Raise UsageError for what is there but no file: reading a pipe or a terminal may never end.

    This is for what a library opens by its path; what we open ourselves goes through tiny_llama.files.open_input().
    """
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no file: give a file")


@contextlib.contextmanager
def replacing(path, follow=False):
    """Yield a Path beside a path. What is written there replaces the file, whole or not at all; else UsageError.

    A link is replaced itself, as somebody else could have put it where this program chose the name. follow: a person
    gave the name, so replace the file that a link leads to, and write directly to what is no file, such as /dev/stdout.
    """
    try:
        if not follow:
            require_file(path)  # a device is never replaced
        elif path.exists() and not path.is_file():
            yield path
            return
        target = Path(os.path.realpath(path) if follow else os.path.abspath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing_files(target.parent, [target.name]) as folder:
            yield folder / target.name
    except OSError as error:
        reason = f"({error.strerror or error}): free space or give another path"
        raise UsageError(f"{path} cannot be written {reason}") from error


def exit_code_of(run, program):
    """Return what run() returns. What ends it early is reported in one line or none, without a traceback.

    An exception with an exit_code and an OSError print their message; the exit code is that attribute, or 2. Ctrl-C
    ends with 130, and a closed pipe, as of `| head`, with 141.
    """
    with contextlib.suppress(AttributeError, OSError):  # where a StringIO, or another file, has taken its place
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that it cannot encode is printed with escapes
    try:
        try:
            return run()
        finally:
            print(end="", flush=True)  # so that a closed pipe is found here, not when the interpreter exits
    except KeyboardInterrupt:
        # 128 and the number of the signal, as shells have it.
        return 130
    except Exception as error:
        if not (isinstance(error, OSError) or hasattr(error, "exit_code")):
            raise
        if getattr(error, "errno", None) in (errno.EPIPE, errno.ENOSPC):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's last flush
        if isinstance(error, BrokenPipeError):
            return 141
        print(printable(f"{program}: error: {error}"), file=sys.stderr, flush=True)
        return getattr(error, "exit_code", 2)


def program(name):
    """Decorate main(argv) of a program, which then takes argv from the command line by default.

    It returns its exit code, as exit_code_of() does.
    """

    def decorate(run):
        @functools.wraps(run)
        def main(argv=None):
            return exit_code_of(lambda: run(sys.argv[1:] if argv is None else argv), name)

        return main

    return decorate
