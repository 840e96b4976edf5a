"""Tokens in a file, one after the other, as little-endian integers. This module needs only numpy."""

import numpy as np

from tiny_llama.files import read_part


class Tokens:
    """The tokens of an open file from start to stop. They are read when they are needed: all may not fit into memory.

    dtype: of the integers, such as np.dtype("<u2").
    """

    def __init__(self, file, dtype, start, stop):
        self.file, self.dtype, self.start, self.stop = file, dtype, start, stop

    def __len__(self):
        return self.stop - self.start

    def __getitem__(self, part):
        """Return a slice of the tokens as an array; OSError if the file has become shorter."""
        start, stop, _ = part.indices(len(self))
        size = self.dtype.itemsize
        return np.frombuffer(read_part(self.file, size * (self.start + start), size * (stop - start)), self.dtype)


class Windows:
    """All sequences of length tokens of Tokens, each one token on."""

    def __init__(self, tokens, length):
        self.tokens, self.length = tokens, length

    def __len__(self):
        return len(self.tokens) - self.length + 1

    def __getitem__(self, starts):
        """Return those that begin at starts, an array of integers: (len(starts), length)."""
        return np.stack([self.tokens[start : start + self.length] for start in starts.tolist()])
