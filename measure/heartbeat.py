"""A sign of life of what takes long. Needs nothing but Python."""

import sys
import threading
import time

INTERVAL_SECONDS = 60
WIDTH = 100  # of a terminal


class Heartbeat:
    """A context that prints a line a minute: for how long it has lasted, and what was said last."""

    def __init__(self, said=""):
        self.said = said  # may be set anew at any time
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.beat, daemon=True)

    def beat(self):
        """The thread's."""
        start = time.monotonic()
        while not self.over.wait(INTERVAL_SECONDS):
            line = f"    {(time.monotonic() - start) / 60:.0f} min: {self.said}"[:WIDTH]
            print(f"\r\033[K{line}" if sys.stdout.isatty() else line, flush=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exception):
        self.over.set()
        self.thread.join()
