"""The GPUs that kernels are compiled for, one of each architecture, and their limits.

PyTorch shows each die of an MI250X as a GPU. The peaks of the matrix units are in tiny_llama_v3.py.
"""

import math
from typing import NamedTuple

import tiny_llama_v3 as llama
from tiny_llama import hardware


class Chip(NamedTuple):
    name: str
    units: int  # compute units or multiprocessors
    terabytes_per_second: float
    shared_limit: int  # bytes of shared memory (LDS) that one program may use
    shared_total: int  # bytes of shared memory in one unit


CHIPS = {
    "gfx90a": Chip("AMD Instinct MI250X", 110, 1.64, 64 * 1024, 64 * 1024),
    "gfx942": Chip("AMD Instinct MI300X", 304, 5.3, 64 * 1024, 64 * 1024),
    "gfx950": Chip("AMD Instinct MI355X", 256, 8.0, 160 * 1024, 160 * 1024),
    "sm_80": Chip("NVIDIA A100", 108, 2.04, 163 * 1024, 164 * 1024),
    "sm_90": Chip("NVIDIA H200", 132, 4.8, 227 * 1024, 228 * 1024),
}
MAX_THREADS = 1024  # of a program, on all architectures


def is_amd(arch):
    return arch.startswith("gfx")


def wave_size(arch):
    """Return the threads of a warp: 64 on AMD's gfx9, 32 on its Radeons and on NVIDIA."""
    return 64 if arch.startswith("gfx9") else 32


def gpu_of(arch):
    """Return the Gpu that tiny_llama_v3.py would find, with type "meta": its tensors have shapes but no memory."""
    chip = CHIPS[arch]
    return llama.Gpu("meta", chip.name, arch, chip.units, wave_size(arch))


def bound(arch, precision, has_dot, nbytes, operations):
    """Return (microseconds, "memory" or "compute"): the least time of a launch by the datasheet, and what limits it."""
    peak = hardware.peak_tflops(gpu_of(arch), precision if has_dot else "fp32")
    memory_us = nbytes / CHIPS[arch].terabytes_per_second / 1e6
    compute_us = operations / peak / 1e6
    return max(memory_us, compute_us), "memory" if memory_us >= compute_us else "compute"


def round_up(value, step):
    return -(-value // step) * step


def occupancy(arch, registers, shared_bytes, warps, scalar_registers=0):
    """Return {"warps": how many fit in one unit, "share" of the maximum, "limit": what prevents more}.

    A unit has four schedulers. On AMD each has 512 registers a lane, allocated in steps of 8, and 800 scalar ones, of
    which each wave takes 6 more than it names; it holds 8 waves. On NVIDIA each has 16384 registers, allocated in steps
    of 8 a thread, and holds 16 warps; the system reserves 1 KiB of shared memory for each program.
    """
    most = 32 if is_amd(arch) else 64
    if is_amd(arch):
        by_registers = 4 * min(8, 512 // round_up(max(registers, 1), 8), 800 // (scalar_registers + 6))
        most_programs = 16 if warps > 1 else 32
    else:
        by_registers = 4 * min(16, 16384 // (32 * round_up(max(registers, 1), 8)))
        shared_bytes += 1024
        most_programs = 32
    programs = {
        "registers": by_registers // warps,
        "shared memory": CHIPS[arch].shared_total // shared_bytes if shared_bytes else math.inf,
        "programs": min(most_programs, most // warps),
    }
    limit = min(reversed(programs), key=programs.get)
    resident = programs[limit] * warps
    return {"warps": resident, "share": resident / most, "limit": None if resident == most else limit}
