"""Reading files that a person names, whatever they turn out to be, and replacing files whole or not at all.

This module imports only the standard library.
"""

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from pathlib import Path


def open_input(path, most_bytes=2**30):
    """Open a regular file of at most so many bytes for reading, in binary mode; else raise OSError.

    A FIFO or a device may have no end, or wait for ever for its other side: it is opened without waiting, and refused.
    What is read as a whole has a limit, so that it fits into memory; math.inf is for what is read in parts.
    """
    # Windows has no such flag.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))
    status, problem = os.fstat(file.fileno()), "not a regular file"
    if stat.S_ISREG(status.st_mode):
        if status.st_size <= most_bytes:
            return file
        problem = f"{status.st_size:,} bytes, which are more than {most_bytes:,}"
    file.close()
    raise OSError(errno.EINVAL, problem, os.fspath(path))


def read_part(file, start, count):
    """Return count bytes of an open file from start on; OSError if it has become shorter.

    Not mapped: of a mapped file that becomes shorter, the system would end this process.
    """
    file.seek(start)
    part = file.read(count)
    if len(part) < count:
        raise OSError(errno.EIO, "it has become shorter while it was in use", file.name)
    return part


@contextlib.contextmanager
def replacing_files(folder, names):
    """Yield a hidden folder in a folder, a Path. What is written there under these names replaces files of the folder.

    They get their names one after the other, once all of them are on the disk: whatever fails before that leaves the
    folder as it was, and each file is always whole. A link is replaced itself.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".", suffix=".tmp") as hidden:
        yield Path(hidden)
        for path in filter(Path.is_file, Path(hidden).rglob("*")):
            with open(path, "r+b") as file:  # Windows writes only such a file to the disk
                os.fsync(file.fileno())
        for name in names:
            written, target = Path(hidden, name), Path(folder, name)
            if target.exists() and not target.is_symlink():
                shutil.copymode(target, written)
        for name in names:
            os.replace(Path(hidden, name), Path(folder, name))


def printable(text):
    """Return a text with escapes in the place of what a terminal obeys, or does not show; newlines stay."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in str(text))
