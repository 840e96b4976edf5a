"""The GPUs that kernels are compiled for, one of each architecture, and their limits.

PyTorch shows each die of an MI250X as a GPU. The peaks of the matrix units are in tiny_llama_v3.py.
"""

import math
from typing import NamedTuple

import tiny_llama_v3 as llama
from tiny_llama import hardware


class Chip(NamedTuple):
    """A GPU. Each of its units has four schedulers (AMD: SIMDs), with the registers of its warps."""

    name: str
    units: int  # as PyTorch counts them: compute units, pairs of these on a Radeon, or multiprocessors
    terabytes_per_second: float | None
    program_kib: int  # of shared memory (LDS) that one program may use
    unit_kib: int  # of shared memory in one unit
    warps: int  # that a scheduler holds at most
    programs: int  # that a unit holds at most
    registers: int = 512  # of a lane in one scheduler
    step: int = 8  # in which they are allocated


CHIPS = {
    "gfx90a": Chip("AMD Instinct MI250X", 110, 1.64, 64, 64, 8, 16),
    "gfx942": Chip("AMD Instinct MI300X", 304, 5.3, 64, 64, 8, 16),
    "gfx950": Chip("AMD Instinct MI355X", 256, 8.0, 160, 160, 8, 16),
    "gfx1250": Chip("AMD Instinct MI455X", 256, None, 320, 320, 16, 32, 1024, 16),  # units: as many as MI355X's
    "gfx1100": Chip("AMD Radeon RX 7900 XTX", 48, 0.96, 64, 128, 16, 32, 1536, 24),
    "gfx1151": Chip("AMD Radeon 8060S", 20, 0.256, 64, 128, 16, 32, 1536, 24),
    "gfx1201": Chip("AMD Radeon RX 9070 XT", 32, 0.64, 64, 128, 16, 32, 1536, 24),
    "sm_75": Chip("NVIDIA T4", 40, 0.32, 64, 64, 8, 16),
    "sm_80": Chip("NVIDIA A100", 108, 2.04, 163, 164, 16, 32),
    "sm_86": Chip("NVIDIA GeForce RTX 3090", 82, 0.936, 99, 100, 12, 16),
    "sm_89": Chip("NVIDIA GeForce RTX 4090", 128, 1.008, 99, 100, 12, 24),
    "sm_90": Chip("NVIDIA H200", 132, 4.8, 227, 228, 16, 32),
    "sm_100": Chip("NVIDIA B200", 148, 8.0, 227, 228, 16, 32),
    "sm_120": Chip("NVIDIA GeForce RTX 5090", 170, 1.792, 99, 100, 12, 24),
}
MAX_THREADS = 1024  # of a program, on all architectures


def is_amd(arch):
    return arch.startswith("gfx")


def wave_size(arch):
    """Return the threads of a warp: 64 on AMD's gfx9, 32 on its Radeons, on gfx1250 and on NVIDIA."""
    return 64 if arch.startswith("gfx9") else 32


def gpu_of(arch):
    """Return the Gpu that tiny_llama_v3.py would find, with type "meta": its tensors have shapes but no memory."""
    chip = CHIPS[arch]
    return llama.Gpu("meta", chip.name, arch, chip.units, wave_size(arch))


def bound(arch, precision, has_dot, nbytes, operations):
    """Return (microseconds, "memory" or "compute"): the least time of a launch by the datasheet, and what limits it.

    (None, None) where no datasheet has the peaks.
    """
    peak = hardware.peak_tflops(gpu_of(arch), precision if has_dot else "fp32")
    if peak is None:
        return None, None
    memory_us = nbytes / CHIPS[arch].terabytes_per_second / 1e6
    compute_us = operations / peak / 1e6
    return max(memory_us, compute_us), "memory" if memory_us >= compute_us else "compute"


def round_up(value, step):
    return -(-value // step) * step


def occupancy(arch, registers, shared_bytes, warps, scalar_registers=0, waves_per_eu=None):
    """Return {"warps": how many fit in one unit, "share" of the maximum, "limit": what prevents more}.

    waves_per_eu: Triton's option for AMD, with which the compiler asks for so many registers that no more fit.
    Each of AMD's gfx9 schedulers also has 800 scalar registers, of which each wave takes 6 more than it names. Programs
    of one wave need no barrier, of which AMD's units have half as many as room for programs. On NVIDIA the system
    reserves shared memory for each program: what a single one cannot have.
    """
    chip = CHIPS[arch]
    by_registers = min(waves_per_eu or chip.warps, chip.registers // round_up(max(registers, 1), chip.step))
    if arch.startswith("gfx9"):
        by_registers = min(by_registers, 800 // (scalar_registers + 6))
    most, most_programs = 4 * chip.warps, chip.programs
    if is_amd(arch):
        most_programs *= 1 if warps > 1 else 2
    else:
        shared_bytes += 1024 * (chip.unit_kib - chip.program_kib)
    programs = {
        "registers": 4 * by_registers // warps,
        "shared memory": chip.unit_kib * 1024 // shared_bytes if shared_bytes else math.inf,
        "programs": min(most_programs, most // warps),
    }
    limit = min(reversed(programs), key=programs.get)
    resident = programs[limit] * warps
    return {"warps": resident, "share": resident / most, "limit": None if resident == most else limit}
