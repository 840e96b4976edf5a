"""Opening files that a person names, whatever they turn out to be. This module imports only the standard library."""

import errno
import os
import stat

NONBLOCKING = getattr(os, "O_NONBLOCK", 0)  # Windows has neither this nor FIFOs among its files


def open_input(path, mode="r", most_bytes=2**30, **options):
    """Open a regular file of at most so many bytes as open() does, UTF-8 unless binary; else raise OSError.

    A FIFO or a device may have no end, or wait for ever for its other side: it is opened without waiting, and refused.
    """
    if "b" not in mode:
        options.setdefault("encoding", "utf-8")
    file = open(path, mode, opener=lambda name, flags: os.open(name, flags | NONBLOCKING), **options)
    status = os.fstat(file.fileno())
    # What is wrong with it, as strerror of the OSError.
    if not stat.S_ISREG(status.st_mode):
        problem = errno.EINVAL, "not a regular file"
    elif status.st_size > most_bytes:
        problem = errno.EFBIG, f"larger than {most_bytes:,} bytes"
    else:
        return file
    file.close()
    raise OSError(*problem, os.fspath(path))
