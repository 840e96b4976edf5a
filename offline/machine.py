"""Emulate a compute unit: run the workgroups of a kernel one after the other, and their waves in random order.

Registers and local memory (LDS) start with all bits set: NaN, or the integer -1. Tensors and LDS lie between protected
pages. Not modelled are waits and hazards, caches, concurrent workgroups, and the rounding inside matrix instructions
and of exp, log and reciprocals.
"""

import collections
import contextlib
import ctypes
import functools
import itertools
import mmap
import os
import random
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from test.mockgpu.amd import emu
from tinygrad.helpers import diskcache_get, diskcache_put
from tinygrad.renderer.amd import decode_inst
from tinygrad.runtime.autogen.amd.cdna import ins as cdna

from offline.architectures import wave_size
from offline.code_object import LONGEST_INSTRUCTION

ISA = "cdna"  # as in tinygrad, which distinguishes MI200, MI300 and MI350 only by their instructions
LANES = wave_size("gfx942")  # the same on all three
REGISTERS = 256  # vector registers of a lane, and as many accumulation registers
TURNS = (1, 7, 40, 300)  # numbers of instructions that a wave executes before another wave is chosen
MOST_INSTRUCTIONS = 50_000_000  # of a wave; one that executes more is taken not to end
EXEC, PROGRAM_COUNTER, ONE = 126, 256, 242  # as tinygrad numbers the special registers; ONE is the constant 1.0
FP16_OVFL = 1 | 23 << 6  # the operand of s_setreg: one bit of MODE, which is register 1
TURN_IS_OVER, ENDED, AT_BARRIER, NOT_COMPILED, FAULT = range(5)  # as in wave.c
POISON = 0xFF


class Fault(RuntimeError):
    """A kernel made an invalid access; the message names the kernel, architecture, instruction and place."""


class Instruction(ctypes.Structure):
    """The struct of wave.c."""

    _fields_ = [
        ("function", ctypes.c_void_p), ("buffers", ctypes.c_uint8 * 6),
        ("is_barrier", ctypes.c_uint8),
    ]  # fmt: skip


@functools.cache
def wave_library():
    """Compile and loads wave.c."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "wave.so")
        command = [os.environ.get("CC", "clang"), "-O2", "-shared", "-fPIC", "-o", library]
        subprocess.run([*command, Path(__file__).with_name("wave.c")], check=True)
        loaded = ctypes.CDLL(str(library))
    loaded.last_fault.restype = ctypes.c_uint64
    return loaded


# ----------------------------------------------------------------------------------------------------------------------
# Memory

LIBC = ctypes.CDLL(None, use_errno=True)
PAGE = mmap.PAGESIZE
GUARD = 4 * 2**20  # bytes; pages that are never accessed take no memory
LARGEST_COPY = 2**30  # bytes; larger storages, which are sparse, are not copied


class GuardedMemory:
    """nbytes of poisoned memory between protected megabytes; it ends where the protected memory begins."""

    def __init__(self, nbytes):
        pages = -(-max(nbytes, 1) // PAGE) * PAGE
        self.memory = mmap.mmap(-1, pages + 2 * GUARD)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.nbytes, self.begin = nbytes, base + GUARD
        self.address = self.begin + pages - -(-nbytes // 16) * 16  # kernels rely on the alignment
        self.spare = [(self.begin, self.address - self.begin), (self.address + nbytes, -nbytes % 16)]
        self.poison()
        for guard in (base, self.begin + pages):
            LIBC.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(GUARD), 0)

    def poison(self):
        ctypes.memset(self.begin, POISON, self.address + -(-self.nbytes // 16) * 16 - self.begin)

    def is_overrun(self):
        """Tell whether the bytes between the memory and the protected pages were overwritten."""
        return any(ctypes.string_at(at, n) != bytes([POISON]) * n for at, n in self.spare)


class TensorMemory:
    """Guarded copies of the storages of {name: tensor or None}."""

    def __init__(self, tensors):
        self.storages = {}  # address: (names, GuardedMemory or None)
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            names, _ = self.storages.setdefault(storage.data_ptr(), ([], self.copy_of(storage)))
            names.append(name)

    @staticmethod
    def copy_of(storage):
        if storage.nbytes() > LARGEST_COPY:
            return None
        copy = GuardedMemory(storage.nbytes())
        ctypes.memmove(copy.address, storage.data_ptr(), storage.nbytes())
        return copy

    def address_of(self, tensor):
        storage = tensor.untyped_storage().data_ptr()
        copy = self.storages[storage][1]
        return tensor.data_ptr() - storage + (copy.address if copy else storage)

    def write_back(self):
        """Copies the results into the tensors. Returns the names of those with a store beside them."""
        overrun = []
        for storage, (names, copy) in self.storages.items():
            if copy:
                ctypes.memmove(storage, copy.address, copy.nbytes)
                overrun += names if copy.is_overrun() else []
        return overrun

    def place_of(self, address):
        """Describes an address by its distance from the nearest tensor."""
        places = [
            (distance, f"{distance} bytes {side} of {' and '.join(names)}")
            for names, copy in self.storages.values()
            if copy
            for side, distance in (
                ("after the end", address - copy.address - copy.nbytes),
                ("before the beginning", copy.address - address),
            )
            if distance >= 0
        ]
        return min(places)[1] if places else f"address {address:#x} of no tensor"


# ----------------------------------------------------------------------------------------------------------------------
# Waves


class Wave:
    """The registers of 64 lanes."""

    def __init__(self, arch):
        self.fp8_is_fnuz = arch == "gfx942"  # gfx950 has the types of OCP
        self.state = emu.WaveState(LANES, LANES)
        buffers = [self.state.sgpr_buf, self.state.vgpr_buf, None, None, None, self.state.accvgpr_buf]
        self.addresses = [buffer._buf.va_addr if buffer else 0 for buffer in buffers]
        self.buffers = (ctypes.c_uint64 * 6)(*self.addresses)  # in tinygrad's order; memory begins at 0
        self.scalar = np.frombuffer(self.state._sgpr_mv, np.uint32)
        self.vector = np.frombuffer(self.state._vgpr_mv, np.uint32).reshape(REGISTERS, LANES)
        self.constants = self.scalar.copy()  # EXEC among them, with all lanes active

    def start(self, index, entry, user_registers, lds_address):
        """Set the registers as the hardware does for wave number index of a workgroup."""
        self.scalar[:] = self.constants
        self.scalar[len(user_registers) : 104] = 0xFFFFFFFF
        self.scalar[: len(user_registers)] = user_registers
        self.program_counter = entry
        for registers in (self.addresses[1], self.addresses[5]):
            ctypes.memset(registers, POISON, 4 * REGISTERS * LANES)
        self.vector[0] = LANES * index + np.arange(LANES)
        self.buffers[3] = lds_address
        self.fp8_saturates = False  # MODE.FP16_OVFL

    @property
    def active(self):
        """EXEC as (LANES,) of bools."""
        return np.unpackbits(self.scalar[EXEC : EXEC + 2].view(np.uint8), bitorder="little").astype(bool)

    @property
    def program_counter(self):
        return int(self.scalar[PROGRAM_COUNTER]) | int(self.scalar[PROGRAM_COUNTER + 1]) << 32

    @program_counter.setter
    def program_counter(self, value):
        self.scalar[PROGRAM_COUNTER : PROGRAM_COUNTER + 2] = value & 0xFFFFFFFF, value >> 32


# Instructions that tinygrad does not translate, or not as the chips execute them: its conversions to FP8 have no fnuz
# types, no subnormal numbers and no MODE. Each function gets the wave and its LDS, as 16-bit words.


def swap_rows(inst, rows):
    """v_permlane16_swap, 32_swap: swaps the odd rows, of so many lanes, of vdst with the even rows of src0."""
    first, second = inst.vdst.offset % REGISTERS, inst.src0.offset % REGISTERS
    even = np.flatnonzero(np.arange(LANES) // rows % 2 == 0)

    def execute(wave, lds):
        v = wave.vector
        v[second, even], v[first, even + rows] = v[first, even + rows], v[second, even].copy()

    return execute


def read_transposed(inst):
    """ds_read_b64_tr_b16: in each 16 lanes, word n of lane l is word l % 4 at the address of lane l // 4 + 4 n."""
    word = int.from_bytes(inst.to_bytes(), "little")
    offset, uses_accumulation, address, destination = word & 0xFFFF, word >> 25 & 1, word >> 32 & 0xFF, word >> 56
    if uses_accumulation:
        raise NotImplementedError("ds_read_b64_tr_b16 into accumulation registers is not emulated")
    lanes = np.arange(LANES)[:, None]
    source = (lanes & ~15 | lanes >> 2 & 3) + 4 * np.arange(4)

    def execute(wave, lds):
        halves = wave.vector[address].astype(np.int64)[source] + offset
        read = lds[halves // 2 + (lanes & 3)].astype(np.uint32)
        wave.vector[destination : destination + 2] = read[:, 0] | read[:, 1] << 16, read[:, 2] | read[:, 3] << 16

    return execute


def set_mode(inst):
    """s_setreg_imm32_b32 of MODE.FP16_OVFL."""
    if inst.simm16 != FP16_OVFL:
        raise NotImplementedError(f"{inst!r} is not emulated")

    def execute(wave, lds):
        wave.fp8_saturates = bool(inst.literal)

    return execute


def fp8_codes(numbers, exponent_bits, is_fnuz, saturates):
    """Return the codes of fp32 numbers in FP8, rounded to the nearest even.

    What is too large, infinity too, becomes the largest number if saturates is set, otherwise infinity, or NaN in a
    type without infinities.
    """
    mantissa_bits, bias = 7 - exponent_bits, 2 ** (exponent_bits - 1) - 1 + is_fnuz
    largest = 0x7F if is_fnuz else {4: 0x7E, 5: 0x7B}[exponent_bits]
    magnitudes = np.clip(np.abs(numbers), 2.0**-20, 2.0**17)  # the former becomes 0, the latter is too large
    exponents = np.maximum(np.frexp(magnitudes)[1] - 1 + bias, 1)  # as stored, but 1 for subnormal numbers too
    codes = np.rint(np.ldexp(magnitudes, mantissa_bits + bias - exponents)) + (exponents - 1 << mantissa_bits)
    codes = np.minimum(codes, largest + (not saturates))  # in every type the next code is that of infinity or NaN
    codes = np.where(np.isnan(numbers), 0x80 if is_fnuz else 0x7F, codes).astype(np.uint16)
    has_sign = np.signbit(numbers) & ~(is_fnuz & (codes == 0))  # fnuz has no -0
    return codes | has_sign.astype(np.uint16) << 7


def round_to_fp8(inst, exponent_bits):
    """v_cvt_pk_fp8_f32, v_cvt_scalef32_pk_fp8_f32 with scale 1, and bf8: two numbers become one half of vdst."""
    sources, half = [inst.src0.offset, inst.src1.offset], inst.opsel >> 3
    is_scaled = "SCALEF32" in inst.op.name and inst.src2.offset != ONE
    if is_scaled or min(sources) < REGISTERS or inst.abs or inst.neg or inst.omod or inst.clmp:
        raise NotImplementedError(f"{inst!r} is not emulated")

    def execute(wave, lds):
        numbers = wave.vector[[source % REGISTERS for source in sources]].view(np.float32)
        low, high = fp8_codes(numbers, exponent_bits, wave.fp8_is_fnuz, wave.fp8_saturates)
        halves = wave.vector[inst.vdst.offset % REGISTERS].view(np.uint16)[half::2]
        halves[wave.active] = (low | high << 8)[wave.active]

    return execute


IN_PYTHON = {
    "V_PERMLANE16_SWAP_B32_E32": functools.partial(swap_rows, rows=16),
    "V_PERMLANE32_SWAP_B32_E32": functools.partial(swap_rows, rows=32),
    "DS_READ_B64_TR_B16": read_transposed,
    "S_SETREG_IMM32_B32": set_mode,
    "V_CVT_PK_FP8_F32": functools.partial(round_to_fp8, exponent_bits=4),
    "V_CVT_PK_BF8_F32": functools.partial(round_to_fp8, exponent_bits=5),
    "V_CVT_SCALEF32_PK_FP8_F32": functools.partial(round_to_fp8, exponent_bits=4),
    "V_CVT_SCALEF32_PK_BF8_F32": functools.partial(round_to_fp8, exponent_bits=5),
}


class CompiledInstruction(NamedTuple):
    """The interface of a compiled program that tinygrad's emulator uses."""

    key: bytes
    arg: object  # which buffers are its arguments
    elf: object

    def to_elf(self):
        return self.elf


def compile_cached(sink, renderer):
    """Caches tinygrad's to_program, which takes a tenth of a second for an instruction, for all processes."""
    key = sink.key.hex()
    parts = diskcache_get("emulated_instructions", key)
    if parts is None:
        compiled = to_program(sink, renderer)
        parts = diskcache_put("emulated_instructions", key, (compiled.arg, compiled.to_elf()))
    return CompiledInstruction(sink.key, *parts)


to_program, emu.to_program = emu.to_program, compile_cached
# Instructions that differ only in their operands share a runner: {(type, mask): {masked bits: runner}}.
RUNNERS = collections.defaultdict(dict)


def runner_of(inst, address):
    """Return (program, runtime) of the instruction at an address, as tinygrad compiles it."""
    bits = int.from_bytes(ctypes.string_at(address, inst.size()), "little")
    for (type_, mask), runners in RUNNERS.items():
        if type_ is type(inst) and bits & mask in runners:
            return runners[bits & mask]
    emu._decode_at(address, ISA)
    type_, masked, mask, _, runner = emu._canonical_runner_cache[-1]
    RUNNERS[type_, mask][masked] = runner
    return runner


class Program:
    """The instructions of a code object. Each is compiled when a wave first reaches it."""

    def __init__(self, code, arch):
        self.code, self.arch = code, arch
        self.instructions = (Instruction * (code.nbytes // 4 + 1))()
        self.decoded, self.in_python = {}, {}  # by address
        if arch == "gfx90a":
            self.rename_matrix_instructions()

    def holds(self, address):
        """Tell whether an address lies in the code of the program."""
        return 0 <= address - self.code.begin < self.code.nbytes

    def instruction_at(self, address):
        """Return the Instruction at an address."""
        return self.instructions[(address - self.code.begin) // 4]

    def decode(self, address):
        """tinygrad's Inst at an address."""
        if address not in self.decoded:
            self.decoded[address] = decode_inst(ctypes.string_at(address, LONGEST_INSTRUCTION), ISA)
        return self.decoded[address]

    def rename_matrix_instructions(self):
        """Gives v_mfma_f32_*bf16_1k of gfx90a the opcodes of v_mfma_f32_*_bf16 of gfx942, which do the same."""
        address = self.code.begin
        while address < self.code.begin + self.code.nbytes:
            word = ctypes.c_uint32.from_address(address)
            if word.value >> 23 == 0b110100111 and word.value >> 16 & 127 in (0x66, 0x67):
                word.value -= 6 << 16
            address += decode_inst(ctypes.string_at(address, LONGEST_INSTRUCTION), ISA).size()

    def compile(self, address):
        """Compile the instruction at an address."""
        inst = self.decode(address)
        entry = self.instruction_at(address)
        program, runtime = runner_of(inst, address)
        arguments = program.arg.globals
        entry.buffers[: len(arguments)] = arguments
        entry.is_barrier = isinstance(inst, cdna.SOPP) and inst.op in emu._BARRIER_OPS
        entry.function = runtime.addr


class Machine:
    """Run programs. seed: determines the order of workgroups and waves."""

    def __init__(self, arch, seed):
        self.arch, self.random = arch, random.Random(seed)
        self.waves = []

    def run(self, program, grid, arguments, memory, n_waves, lds_bytes):
        """Run every workgroup of a launch.

        grid: the three numbers of workgroups; arguments: of the kernel, as bytes; memory: a TensorMemory; lds_bytes:
        of the launch. Fault if the kernel accesses other memory or does not end.
        """
        code = program.code
        self.program, self.memory = program, memory
        self.lds = GuardedMemory(max(lds_bytes, code.lds_bytes))
        self.lds_halves = np.ctypeslib.as_array(
            ctypes.cast(self.lds.address, ctypes.POINTER(ctypes.c_uint16)), (max(1, self.lds.nbytes // 2),)
        )
        held = ctypes.create_string_buffer(arguments, len(arguments))
        user_registers = self.user_registers(code, ctypes.addressof(held), arguments)
        self.waves += [Wave(self.arch) for _ in range(len(self.waves), n_waves)]
        workgroups = list(itertools.product(*map(range, grid)))
        self.random.shuffle(workgroups)
        with emu._MXCSRContext() if code.flushes_denormals else contextlib.nullcontext():
            for workgroup in workgroups:
                self.run_workgroup(workgroup, self.waves[:n_waves], user_registers)
        overrun = memory.write_back()
        if overrun:
            raise Fault(f"{code.name} on {self.arch} stores beside {' and '.join(overrun)}")
        if self.lds.is_overrun():
            raise Fault(f"{code.name} on {self.arch} stores beside its {self.lds.nbytes} bytes of LDS")

    @staticmethod
    def user_registers(code, address, arguments):
        """Return the initial values of the first scalar registers, in the order of the descriptor."""
        registers = [0, 0, 0, 0] if code.takes_scratch_buffer else []
        registers += [address & 0xFFFFFFFF, address >> 32]
        registers += struct.unpack_from(f"<{code.preloaded_words}I", arguments, 4 * code.preload_offset)
        return registers + [0xFFFFFFFF] * (code.n_user_registers - len(registers))

    def run_workgroup(self, workgroup, waves, user_registers):
        code = self.program.code
        self.lds.poison()
        position = [n for axis, n in enumerate(workgroup) if code.rsrc2 >> 7 + axis & 1]
        for index, wave in enumerate(waves):
            wave.start(index, code.entry, user_registers + position, self.lds.address)
        running, waiting, left = list(waves), [], MOST_INSTRUCTIONS * len(waves)
        while running or waiting:
            if not running:  # all waves that have not ended wait at the barrier
                running, waiting = waiting, []
            wave, turn = self.random.choice(running), self.random.choice(TURNS)
            outcome = self.run_wave(wave, turn, workgroup)
            left -= turn
            if outcome in (ENDED, AT_BARRIER):
                running.remove(wave)
            if outcome == AT_BARRIER:
                waiting.append(wave)
            if left < 0:
                raise Fault(f"{self.where(wave, workgroup)} does not come to an end")

    def run_wave(self, wave, turn, workgroup):
        """Execute up to turn instructions. Returns why it stopped."""
        library, program = wave_library(), self.program
        while True:
            outcome = library.run_wave(
                program.instructions, ctypes.c_uint64(program.code.begin), ctypes.c_uint64(program.code.nbytes),
                wave.buffers, ctypes.c_void_p(wave.addresses[0] + 4 * PROGRAM_COUNTER), ctypes.c_long(turn),
            )  # fmt: skip
            if outcome == FAULT:
                place = self.memory.place_of(library.last_fault())
                raise Fault(f"{self.where(wave, workgroup)} touches {place}")
            if outcome != NOT_COMPILED:
                return outcome
            self.meet(wave, workgroup)

    def meet(self, wave, workgroup):
        """Compile the instruction that the wave has reached, or executes it in Python."""
        address, program = wave.program_counter, self.program
        if not program.holds(address):
            raise Fault(f"{self.where(wave, workgroup)} leaves its code")
        inst = program.decode(address)
        if inst.op.name not in IN_PYTHON:
            program.compile(address)
            return
        if address not in program.in_python:
            program.in_python[address] = IN_PYTHON[inst.op.name](inst)
        program.in_python[address](wave, self.lds_halves)
        wave.program_counter = address + inst.size()

    def where(self, wave, workgroup):
        address = wave.program_counter
        instruction = f", {self.program.decode(address)!r}" if self.program.holds(address) else ""
        place = f"workgroup {workgroup}, wave {self.waves.index(wave)}"
        return f"{self.program.code.name} on {self.arch}, {place}{instruction}"
