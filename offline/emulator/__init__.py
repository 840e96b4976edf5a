"""An AMD GPU in software: Triton's driver for it, the machine that runs compiled kernels, and the fetching of tinygrad.

It imports nothing else of this project and runs any Triton kernel. machine.py and driver.py need tinygrad in sys.path:
see source.py.
"""

from typing import NamedTuple


class Chip(NamedTuple):
    """What the emulator distinguishes."""

    units: int  # compute units
    lds_bytes: int  # of a workgroup
    fp8_is_fnuz: bool = False  # otherwise the types of OCP
    flushes_16_bit: bool = False  # matrix instructions take subnormal numbers of 16 bits, and such sums of them, as 0
    isa: str = "cdna"  # as in tinygrad, which distinguishes MI200, MI300 and MI350 only by their instructions

    @property
    def family(self):
        """Return the name of the file with its instructions."""
        return self.isa[:4]

    @property
    def lanes(self):
        """Return the lanes of a wave."""
        return 64 if self.isa == "cdna" else 32


CHIPS = {
    "gfx90a": Chip(110, 64 * 1024, flushes_16_bit=True),
    "gfx942": Chip(304, 64 * 1024, fp8_is_fnuz=True),
    "gfx950": Chip(256, 160 * 1024),
    "gfx1100": Chip(48, 64 * 1024, isa="rdna3"),  # pairs of compute units, as PyTorch counts them
    "gfx1201": Chip(32, 64 * 1024, isa="rdna4"),
}
MAX_THREADS = 1024  # of a workgroup


class Fault(RuntimeError):
    """A kernel made an invalid access; the message names the kernel, architecture, instruction and place."""
