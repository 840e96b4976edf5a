"""The command line of the programs that run without PyTorch; the others have tiny_llama_v3.Parser and its exit codes.

The readers run on login nodes that have pandas alone, and the doctor where nothing is installed: no import of this file
may need more than Python itself. The doctor also names a Python that is too old, so the syntax is that of Python 3.7.
"""

import argparse
import errno
import os
import sys


class Failure(Exception):
    """Ends a program with one line, the message: what is wrong, with which values, and what to do about it."""

    exit_code = 2


class NothingRecorded(Failure):
    """A profile that can be read and does not hold what was asked for."""

    exit_code = 1


class Parser(argparse.ArgumentParser):
    """Ends a wrong command line with one line, where argparse prints the usage as well."""

    def __init__(self, prog, description):
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, formatter_class=layout, allow_abbrev=False)

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message} (--help lists the options)\n")


def exit_code_of(run, program):
    """run(), which returns an exit code; what ends it early takes one line or none, and no traceback.

    A Failure or a file that cannot be opened gives its message and 2 (or the exit code of the Failure), Ctrl-C 130, and
    a reader that has closed the pipe, as `| head` does, 141.
    """
    try:
        try:
            return run()
        finally:
            print(end="", flush=True)  # a closed pipe shows here, not in the interpreter's last flush
    except KeyboardInterrupt:
        return 130
    except (Failure, OSError) as error:
        if getattr(error, "errno", None) in (errno.EPIPE, errno.ENOSPC):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where that last flush may go
        if isinstance(error, BrokenPipeError):
            return 141
        print(f"{program}: error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 2)
