"""What the fakes share."""

import os
import signal
import sys

RELEASE = tuple(int(part) for part in os.environ.get("FAKE_ROCM", "7.0").split("."))
if libraries := os.environ.get("FAKE_LIBRARIES"):  # of a wheel, which another ROCm's would replace
    if os.environ.get("LD_LIBRARY_PATH", "").split(":")[0] != libraries:
        sys.exit(f"symbol lookup error: undefined symbol, as {libraries} does not come first in LD_LIBRARY_PATH")
signal.signal(signal.SIGINT, lambda *_: None)  # the program's to answer; the tools write their files after it


def complain():
    if complaint := os.environ.get("FAKE_COMPLAINT"):
        print(complaint, file=sys.stderr)
        if status := int(os.environ.get("FAKE_STATUS", 1)):
            sys.exit(status)


def finish(status):
    """The program's status as a shell sees it."""
    sys.exit(status if status >= 0 else 128 - status)
