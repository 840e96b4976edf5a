"""An AMD GPU in software: Triton's driver for it, the machine that runs compiled kernels, and the fetching of tinygrad.

It imports nothing else of this project and runs any Triton kernel. machine.py and driver.py need tinygrad in sys.path:
see source.py.
"""

from typing import NamedTuple


class Chip(NamedTuple):
    """What the emulator distinguishes."""

    units: int  # compute units
    lds_bytes: int  # of a workgroup
    fp8_is_fnuz: bool  # otherwise the types of OCP
    flushes_16_bit: bool  # matrix instructions take subnormal numbers of 16 bits, and subnormal sums of them, as 0


CHIPS = {
    "gfx90a": Chip(110, 64 * 1024, fp8_is_fnuz=False, flushes_16_bit=True),
    "gfx942": Chip(304, 64 * 1024, fp8_is_fnuz=True, flushes_16_bit=False),
    "gfx950": Chip(256, 160 * 1024, fp8_is_fnuz=False, flushes_16_bit=False),
}
LANES = 64  # of a wave
MAX_THREADS = 1024  # of a workgroup


class Fault(RuntimeError):
    """A kernel made an invalid access; the message names the kernel, architecture, instruction and place."""
