"""The counts of a kernel: its instructions by class, and its memory accesses."""

import collections
import dataclasses
import re
from typing import NamedTuple

from compiled.compiler import memory_access


def class_of(name):
    """The class under which the tables count an instruction."""
    if name.startswith("V_MFMA"):
        return "matrix"
    if memory_access(name.lower()):
        return "global memory"
    if name.startswith("DS_"):
        return "LDS"
    return "vector" if name.startswith("V_") else "scalar"


class LocalAccess(NamedTuple):
    """An access to LDS."""

    kind: str  # "read" or "write"
    width: int  # bytes a lane
    offsets: tuple  # in bytes, one for each of its addresses


def local_access(name, offset0, offset1):
    """The LocalAccess of an instruction with these 8-bit fields; None for others, such as a permutation."""
    parts = re.fullmatch(r"DS_(READ|WRITE)(2?)(ST64)?_[BUI](\d+)(?:_D16.*|_TR_B\d+)?", name)
    if not parts:
        return None
    kind, two, far, bits = parts.groups()
    width = int(bits) // 8
    scale = width * (64 if far else 1)
    offsets = (offset0 * scale, offset1 * scale) if two else (offset0 | offset1 << 8,)
    return LocalAccess(kind.lower(), width, offsets)


@dataclasses.dataclass
class Counts:
    """The counts of all launches of one kernel."""

    launches: int = 0
    instructions: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # by class
    # For "load" and "store": accesses with an active lane, the bytes that all lanes request, the cache lines that the
    # accesses touch, and the fewest lines that could hold these bytes.
    accesses: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    bytes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    lines: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    fewest_lines: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    local_accesses: int = 0  # to LDS
    local_conflicts: int = 0  # cycles
