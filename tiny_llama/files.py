"""Opening files that a person names, whatever they turn out to be. This module imports only the standard library."""

import errno
import os
import stat


def open_input(path, most_bytes=2**30):
    """Open a regular file of at most so many bytes for reading, in binary mode; else raise OSError.

    A FIFO or a device may have no end, or wait for ever for its other side: it is opened without waiting, and refused.
    """
    # Windows has no such flag.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))
    status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode) and status.st_size <= most_bytes:
        return file
    file.close()
    raise OSError(errno.EINVAL, f"not a regular file of at most {most_bytes:,} bytes", os.fspath(path))


def printable(text):
    """Return a text with escapes in the place of what a terminal obeys, or does not show; newlines stay."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in str(text))
