"""What the stand-ins share."""

import os
import signal
import sys

RELEASE = tuple(int(part) for part in os.environ.get("STAND_IN_ROCM", "7.0").split("."))
signal.signal(signal.SIGINT, lambda *_: None)  # the program's to answer; the tools write their files after it


def complain():
    if complaint := os.environ.get("STAND_IN_COMPLAINT"):
        print(complaint, file=sys.stderr)
        sys.exit(int(os.environ.get("STAND_IN_STATUS", 1)))


def finish(status):
    """The program's status as a shell sees it."""
    sys.exit(status if status >= 0 else 128 - status)
