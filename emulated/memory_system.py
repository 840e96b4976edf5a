"""A model of cache lines and LDS banks: how many lines an access touches, and how many cycles it waits for banks.

The line sizes of the vector L1 cache are from the documentation of ROCm Compute Profiler, "Vector L1 cache". The banks
of LDS, and the groups of lanes that it serves, are from Composable Kernel's "Understanding AMD GPU LDS and Bank
Conflicts".
"""

import functools

import numpy as np

from compiled.architectures import wave_size

LANES = wave_size("gfx942")  # the same on all three
LINE_BYTES = {"gfx90a": 64, "gfx942": 128, "gfx950": 128}
LDS_BANKS = {"gfx90a": 32, "gfx942": 32, "gfx950": 64}
BANK_BYTES = 4
WORD_BITS = 32  # that the number of a word takes
# These lanes, and those 32 further on, are served together in a read of 16 bytes; otherwise lanes are in order.
WIDE_READ = ((0, 1, 2, 3, 20, 21, 22, 23), (4, 5, 6, 7, 16, 17, 18, 19), (8, 9, 10, 11, 28, 29, 30, 31),
             (12, 13, 14, 15, 24, 25, 26, 27))  # fmt: skip


def lines_touched(addresses, width, line_bytes):
    """(the number of cache lines that hold width bytes at each address, the fewest that could hold as many bytes)"""
    distinct = np.unique(addresses)
    lines = np.union1d(distinct // line_bytes, (distinct + width - 1) // line_bytes)
    return len(lines), -(-len(distinct) * width // line_bytes)


@functools.cache
def groups_of_lanes(width, kind, banks):
    """(lanes, the group of each lane): LDS serves the lanes of a group together."""
    if width == 16 and kind == "read" and banks == 32:
        half = np.array(WIDE_READ)
        groups = np.concatenate([half, half + LANES // 2])
    else:
        most = min(LANES, banks * BANK_BYTES // max(width, BANK_BYTES))
        groups = np.arange(LANES).reshape(-1, 1 << most.bit_length() - 1)  # 12 bytes are served like 16
    return groups.ravel(), np.repeat(np.arange(len(groups)), groups.shape[1])


def bank_conflicts(addresses, active, width, kind, banks):
    """The cycles beyond one for each group of lanes: a bank serves one word in a cycle.

    addresses (LANES,) in bytes; active (LANES,) of bools; kind: "read" or "write".
    """
    lanes, group = groups_of_lanes(width, kind, banks)
    taking_part = active[lanes]
    words = addresses[lanes[taking_part], None] // BANK_BYTES + np.arange(-(-width // BANK_BYTES))
    # A word that several lanes request is read once. Words of different groups do not conflict.
    asked = np.unique((words + (group[taking_part, None] << WORD_BITS)).ravel())
    cycles = np.bincount((asked >> WORD_BITS) * banks + asked % banks, minlength=(group[-1] + 1) * banks)
    return int(np.maximum(cycles.reshape(-1, banks).max(1) - 1, 0).sum())
