"""Count the bytes and cache lines that kernels load and store in Triton's interpreter.

Each access of a running kernel is observed: its addresses, and how many cache lines they lie in, for each 64 neighbours
of a tile, as a wave of an AMD GPU loads them together. No time is measured, and the machine does not matter.
"""

import collections

import numpy as np

from exercises.probe import Observer

LANES = 64  # of a wave of an AMD GPU
LINE_BYTES = 64, 128  # of the vector cache of MI200; of MI300 and NVIDIA
NOTHING = -1  # the address of a masked lane, and the line that it lies in
APART = 2**40  # bytes between tensors, more than the size of any


def figures(accesses):
    """Return {"bytes", "lines": {bytes of a line: how many}} of accesses.

    accesses: {bytes of an element: [addresses, a row for each wave]}
    """
    total, lines = 0, collections.Counter()
    for itemsize, parts in accesses.items():
        waves = np.concatenate(parts)
        total += int((waves != NOTHING).sum()) * itemsize
        for size in LINE_BYTES:
            # The different lines of each wave: sorted, those that differ from the one before.
            ordered = np.sort(waves // size, axis=1)
            is_new = np.diff(ordered, axis=1, prepend=NOTHING) != 0
            lines[size] += int((is_new & (ordered != NOTHING)).sum())
    return {"bytes": total, "lines": lines}


class Launches:
    """What all launches of one kernel do."""

    def __init__(self):
        self.loads, self.stores = collections.defaultdict(list), collections.defaultdict(list)
        self.products = 0  # pairs of numbers that tl.dot multiplies


class Counts(Observer):
    """Counts what kernels do."""

    def __init__(self):
        self.kernels = collections.defaultdict(Launches)

    def launch(self, kernel, tensors):
        self.kernel, self.storages = self.kernels[kernel], [tensor.untyped_storage() for tensor in tensors]

    def load(self, access):
        self.add(self.kernel.loads, access)

    def store(self, access):
        self.add(self.kernel.stores, access)

    def dot(self, product):
        a, b = product.sides
        self.kernel.products += a.data.size * b.data.shape[-1]

    def add(self, accesses, access):
        """Add the addresses of a tile of any shape; a wave has neighbours in the last dimension."""
        lanes = np.full(-(-access.mask.size // LANES) * LANES, NOTHING)
        for index, storage in enumerate(self.storages):
            # As a GPU's allocator places tensors: each begins at a cache line.
            offsets = (access.addresses - storage.data_ptr()).ravel()
            own = access.mask.ravel() & (0 <= offsets) & (offsets < storage.nbytes())
            lanes[: own.size][own] = offsets[own] + index * APART
        accesses[access.element_type.primitive_bitwidth // 8].append(lanes.reshape(-1, LANES))
