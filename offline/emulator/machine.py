"""Emulate a compute unit: run the workgroups of a kernel one after the other, and their waves in random order.

Registers, local memory (LDS) and private memory (scratch) start with all bits set: NaN, or the integer -1. Tensors, LDS
and scratch lie between protected pages. Not modelled are waits and hazards, caches, concurrent workgroups, and the
rounding inside matrix instructions and of exp, log and reciprocals.
"""

import collections
import ctypes
import functools
import hashlib
import itertools
import mmap
import random
import re
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from test.mockgpu.amd import emu
from tinygrad.helpers import diskcache_get, diskcache_put
from tinygrad.renderer.amd import decode_inst
from tinygrad.renderer.amd.dsl import AlignedSGPRField, SGPRField, SrcField, SSrcField, VDSTYField, VGPRField

from offline.emulator import CHIPS, MAX_THREADS, Fault, overrides
from offline.emulator.code_object import LONGEST_INSTRUCTION

overrides.apply()

REGISTERS = 256  # vector registers of a lane, and on CDNA as many accumulation registers
MOST_INSTRUCTIONS = 50_000_000  # of a wave; one that executes more is taken not to end
MOST_WAVES = MAX_THREADS // 32  # of a workgroup
# As tinygrad numbers the special registers; ONE is the constant 1.0.
EXEC, PROGRAM_COUNTER, ONE = 126, 256, 242
M0 = {"cdna": 124, "rdna": 125}
# Registers in which RDNA 4 has the workgroup (x; y and z) and, from bit 25 on, the number of the wave.
X, YZ, WAVE_NUMBER = 117, 115, 116
NO_OPERANDS = range(233, 240)  # a word with lanes follows (DPP8), or they are addresses that no register holds
ALL_WAVES = 193  # the operand -1 of a barrier
BARRIERS = {"S_BARRIER": 3, "S_BARRIER_SIGNAL": 1, "S_BARRIER_WAIT": 2}  # as in wave.c
S_NOP = 0xBF800000
# Operands of s_setreg: bits of MODE, which is register 1.
FP16_OVFL = 1 | 23 << 6
FP_DENORM = 1 | 4 << 6 | 1 << 11  # two bits, for fp32
FP_ROUND = 1 | 2 << 6 | 1 << 11  # two bits, for fp16 and fp64; 0 is to the nearest even
ENDED, NOT_COMPILED, FAULT, LANES_DISAGREE, DROPPED, ENDLESS, BESIDE_LDS, BESIDE_SCRATCH = range(8)  # as in wave.c
FAULTS = {
    FAULT: "touches",
    LANES_DISAGREE: "stores more than one value at",
    DROPPED: "has a negative offset, which is taken for a masked access, to",
}
SCRATCH_STRIDE = 259  # the scalar register with the bytes of a lane
POISON, OTHER_POISON = 0xFF, 0x5A
MOST_COHORTS = 8
ANY_ORDER = re.compile("CMPSWAP|_F16|_BF16|_F32|_F64")  # atomics after which bits may depend on the order
__tracebackhide__ = True  # pytest shows the line of the test, not ours


@functools.cache
def scalars_of(lanes):
    """Return the scalar registers of a wave, the inline constants and EXEC with all lanes active among them."""
    return np.array(emu.WaveState(lanes, lanes)._sgpr_mv, np.uint32)


@functools.cache
def library_of(file, **constants):
    """Compile a file beside this one, once for all processes, and load it."""
    source = Path(__file__).with_name(file)
    command = ["clang", "-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC"]
    command += [f"-D{name}={value}" for name, value in constants.items()]
    text = b"".join(path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h"))))
    key = hashlib.sha256(" ".join(command).encode() + text).hexdigest()
    with tempfile.NamedTemporaryFile(suffix=".so") as library:
        binary = diskcache_get("libraries", key)
        if binary is None:
            subprocess.run([*command, "-o", library.name, source, "-lm"], check=True)
            diskcache_put("libraries", key, Path(library.name).read_bytes())
        else:
            library.write(binary)
            library.flush()
        return ctypes.CDLL(library.name)


def wave_library():
    """Return the library of wave.c."""
    return library_of("wave.c", SCALARS=emu.SGPR_COUNT)


def instructions(arch):
    """Return the library of cdna.c or rdna.c for an architecture."""
    chip = CHIPS[arch]
    options = {"GFX": {"cdna": 9, "rdna3": 11, "rdna4": 12}[chip.isa], "LANES": chip.lanes, "M0": M0[chip.family]}
    options |= {"FP8_FNUZ": int(chip.fp8_is_fnuz), "FLUSHES_16_BIT": int(chip.flushes_16_bit)}
    return library_of(f"{chip.family}.c", **options)


def name_of(inst):
    """Return the name of an instruction; of two that RDNA executes at once, both names."""
    return emu._op_name(inst)


def function_of(arch, inst):
    """Return the address of an instruction's function in that library, None if it has none."""
    function = getattr(instructions(arch), name_of(inst).lower(), None)
    return function and ctypes.cast(function, ctypes.c_void_p).value


# ----------------------------------------------------------------------------------------------------------------------
# Memory

LIBC = ctypes.CDLL(None, use_errno=True)
PAGE = mmap.PAGESIZE
GUARD = 4 * 2**20  # bytes; pages that are never accessed take no memory
LARGEST_COPY = 2**30  # bytes; larger storages, which are sparse, are not copied


class Extent(ctypes.Structure):
    """The struct of instructions.h."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("first", "last", "begin", "end")]


def hold_to(arch, memories):
    """Have instructions access no other bytes of the pages of these GuardedMemorys. Returns what must stay."""
    extents = (Extent * len(memories))(*(memory.extent for memory in memories))
    instructions(arch).hold_to(extents, len(memories), wave_library().fault_at)
    return extents


class GuardedMemory(ctypes.Structure):
    """nbytes of poisoned memory between protected megabytes; it ends where the protected memory begins.

    The struct `memory` of wave.c.
    """

    _fields_ = [
        ("begin", ctypes.c_uint64), ("address", ctypes.c_uint64), ("nbytes", ctypes.c_uint64), ("byte", ctypes.c_uint8),
    ]  # fmt: skip

    def __init__(self, nbytes):
        pages = -(-max(nbytes, 1) // PAGE) * PAGE
        self.memory = mmap.mmap(-1, pages + 2 * GUARD)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        address = base + GUARD + pages - -(-nbytes // 16) * 16  # kernels rely on the alignment
        super().__init__(base + GUARD, address, nbytes)
        self.bytes = np.frombuffer(self.memory, np.uint8)[address - base :][:nbytes]
        wave_library().fill(ctypes.byref(self), ctypes.c_uint8(POISON))
        for guard in (base, base + GUARD + pages):
            LIBC.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(GUARD), 0)

    @property
    def extent(self):
        end = self.address + -(-self.nbytes // 16) * 16
        return Extent(self.address, self.address + self.nbytes, self.begin, end)


class TensorMemory:
    """Guarded copies of the storages of tensors: [(name, tensor)].

    NotImplementedError if two storages overlap: each would be copied by itself.
    """

    def __init__(self, tensors):
        self.storages = {}  # address: ([(name, tensor)], GuardedMemory or None)
        for name, tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.storages:
                self.storages[storage.data_ptr()] = [], self.copy_of(storage)
            self.storages[storage.data_ptr()][0].append((name, tensor))
        ends = sorted((t.untyped_storage().data_ptr(), t.untyped_storage().nbytes(), name) for name, t in tensors)
        for (begin, nbytes, name), (after, _, other) in itertools.pairwise(ends):
            if begin < after < begin + nbytes:
                raise NotImplementedError(f"the memory of {name} and {other} overlaps: make a copy of one")

    @staticmethod
    def copy_of(storage):
        if storage.nbytes() > LARGEST_COPY:
            return None
        copy = GuardedMemory(storage.nbytes())
        ctypes.memmove(copy.address, storage.data_ptr(), storage.nbytes())
        return copy

    @property
    def copies(self):
        return [copy for _, copy in self.storages.values() if copy]

    @property
    def is_copied(self):
        """Tell whether all are copies, which can be filled again."""
        return len(self.copies) == len(self.storages)

    def contents(self):
        """Return the bytes of each copy, as an array."""
        return [copy.bytes.copy() for copy in self.copies]

    def fill(self, contents):
        """Give the copies these bytes."""
        for copy, content in zip(self.copies, contents, strict=True):
            copy.bytes[:] = content

    def difference(self, results):
        """Describe the first element whose bits are not those in results, of contents(). None if there is none."""
        named = [tensors for tensors, copy in self.storages.values() if copy]
        for tensors, before, after in zip(named, results, self.contents(), strict=True):
            if differs := np.flatnonzero(before != after).tolist():
                (_, tensor), at = tensors[0], differs[0] // tensors[0][1].element_size()
                elements = [torch.from_numpy(content).view(tensor.dtype)[at].item() for content in (before, after)]
                names = " and ".join(name for name, _ in tensors)
                return f"{names}, element {at - tensor.storage_offset()}, is {elements[0]} or {elements[1]}"

    def address_of(self, tensor):
        storage = tensor.untyped_storage().data_ptr()
        copy = self.storages[storage][1]
        return tensor.data_ptr() - storage + (copy.address if copy else storage)

    def write_back(self):
        """Copy the results into the tensors."""
        for storage, (_, copy) in self.storages.items():
            if copy:
                ctypes.memmove(storage, copy.address, copy.nbytes)

    def place_of(self, address):
        """Describe an address by its place in the nearest tensor."""
        if address < PAGE:
            return f"address {address}: is a tensor None? Printing and failed assertions are not emulated"
        places = [
            (max(copy.address - address, address - copy.address - copy.nbytes), address - copy.address, copy, tensors)
            for tensors, copy in self.storages.values()
            if copy
        ]
        distance, byte, copy, tensors = min(places, default=(GUARD, *[None] * 3), key=lambda place: place[0])
        if distance >= GUARD:
            return f"address {address:#x} of no tensor"
        return f"byte {byte} of {' and '.join(name for name, _ in tensors)}, which has {copy.nbytes}"


# ----------------------------------------------------------------------------------------------------------------------
# Waves


class Instruction(ctypes.Structure):
    """The struct of wave.c."""

    _fields_ = [
        ("function", ctypes.c_void_p), ("buffers", ctypes.c_uint8 * 6),
        ("barrier", ctypes.c_uint8),
    ]  # fmt: skip


class Wave(ctypes.Structure):
    """The registers of all lanes, and the struct of wave.c."""

    # fp8_saturates, flushes_denormals: what MODE says of FP16_OVFL and FP_DENORM
    _fields_ = [
        ("buffers", ctypes.c_uint64 * 6), ("scratch", ctypes.POINTER(GuardedMemory)), ("fp8_saturates", ctypes.c_uint8),
        ("flushes_denormals", ctypes.c_uint8), ("signals", ctypes.c_uint32),
    ]  # fmt: skip

    def __init__(self, arch):
        self.chip = CHIPS[arch]
        n_vector = REGISTERS * self.chip.lanes
        words = np.frombuffer(mmap.mmap(-1, 4 * (2 * n_vector + emu.SGPR_COUNT)), np.uint32)
        self.vector, self.accumulation = words[: 2 * n_vector].reshape(2, REGISTERS, self.chip.lanes)
        if self.chip.family == "rdna":
            self.accumulation = self.vector
        self.scalar = words[2 * n_vector :]
        registers = (array.ctypes.data for array in (self.scalar, self.vector, self.accumulation))
        self.buffers[0], self.buffers[1], self.buffers[5] = registers  # in tinygrad's order; memory begins at 0

    def take_scratch(self, bytes_of_lane):
        """Have private memory for the lanes, one after the other."""
        nbytes = bytes_of_lane * self.chip.lanes
        if not self.scratch or self.scratch.contents.nbytes != nbytes:
            self.scratch = ctypes.pointer(GuardedMemory(nbytes))

    @property
    def active(self):
        """Return EXEC as (lanes,) of bools."""
        bits = np.unpackbits(self.scalar[EXEC : EXEC + 2].view(np.uint8), bitorder="little")
        return bits[: self.chip.lanes].astype(bool)

    @property
    def program_counter(self):
        return int(self.scalar[PROGRAM_COUNTER]) | int(self.scalar[PROGRAM_COUNTER + 1]) << 32

    @program_counter.setter
    def program_counter(self, value):
        self.scalar[PROGRAM_COUNTER : PROGRAM_COUNTER + 2] = value & 0xFFFFFFFF, value >> 32


# Waves and LDS are filled where a workgroup starts, so that launches may have them one after the other.
wave_of = functools.cache(lambda arch, index: Wave(arch))
lds_of = functools.lru_cache(8)(GuardedMemory)


def first_registers(chip, user_registers, entry, scratch_bytes, poison):
    """Return the scalar registers with which waves start; those that the hardware does not set have the poison."""
    scalar = scalars_of(chip.lanes).copy()
    scalar[:124] = scalar[M0[chip.family]] = poison * 0x01010101  # VCC among them
    scalar[: len(user_registers)] = user_registers
    scalar[PROGRAM_COUNTER : PROGRAM_COUNTER + 2] = entry & 0xFFFFFFFF, entry >> 32
    scalar[SCRATCH_STRIDE] = scratch_bytes
    return scalar


class Workgroup(ctypes.Structure):
    """The struct of wave.c. seed: of the order of waves; scalar: the registers with which they start."""

    _fields_ = [
        ("program", ctypes.c_void_p), ("begin", ctypes.c_uint64), ("nbytes", ctypes.c_uint64),
        ("scalar", ctypes.c_void_p), ("lds", ctypes.POINTER(GuardedMemory)),
        ("waves", ctypes.POINTER(Wave) * MOST_WAVES), ("n_waves", ctypes.c_int32), ("lanes", ctypes.c_int32),
        ("wave_number", ctypes.c_int32), ("current", ctypes.c_int32), ("turn", ctypes.c_int32),
        ("running", ctypes.c_uint64), ("waiting", ctypes.c_uint64),
        ("left", ctypes.c_int64), ("random", ctypes.c_uint64), ("fault", ctypes.c_uint64),
        ("poison", ctypes.c_uint8), ("flushes_denormals", ctypes.c_uint8),
    ]  # fmt: skip

    def __init__(self, program, waves, lds, scalar, seed, poison):
        code = program.code
        super().__init__(
            ctypes.addressof(program.instructions), code.begin, code.nbytes, scalar.ctypes.data, ctypes.pointer(lds),
            n_waves=len(waves), lanes=program.chip.lanes, random=seed, poison=poison,
            wave_number=WAVE_NUMBER if program.chip.isa == "rdna4" else -1, flushes_denormals=code.flushes_denormals,
        )  # fmt: skip
        self.waves[: len(waves)] = [ctypes.pointer(wave) for wave in waves]
        self.held = program, waves, lds, scalar  # for as long as there are pointers to them

    def start(self):
        """Set the registers of all waves as the hardware does."""
        self.left = MOST_INSTRUCTIONS * self.n_waves
        wave_library().start(ctypes.byref(self))

    def run(self):
        """Execute instructions until all waves have ended, or one cannot go on. Return why it stopped."""
        return wave_library().run(ctypes.byref(self))


# Instructions that tinygrad does not translate, or not as the chips execute them: its conversions to FP8 have no fnuz
# types, no subnormal numbers and no MODE. Each function gets the wave.


def swap_rows(inst, rows):
    """v_permlane16_swap, 32_swap: swaps the odd rows, of so many lanes, of vdst with the even rows of src0."""
    first, second = inst.vdst.offset % REGISTERS, inst.src0.offset % REGISTERS
    even = np.flatnonzero(np.arange(64) // rows % 2 == 0)

    def execute(wave):
        v = wave.vector
        v[second, even], v[first, even + rows] = v[first, even + rows], v[second, even].copy()

    return execute


def set_mode(inst):
    """s_setreg_imm32_b32 of MODE.FP16_OVFL, of MODE.FP_DENORM for fp32, or of the rounding that there is."""
    if inst.simm16 not in (FP16_OVFL, FP_DENORM) and (inst.simm16, inst.literal) != (FP_ROUND, 0):
        raise NotImplementedError(f"{inst!r} is not emulated")

    def execute(wave):
        if inst.simm16 == FP16_OVFL:
            wave.fp8_saturates = bool(inst.literal)
        elif inst.simm16 == FP_DENORM:
            wave.flushes_denormals = inst.literal & 3 != 3

    return execute


def set_denormals(inst):
    """s_denorm_mode of RDNA: two bits for fp32, two for fp16 and fp64."""

    def execute(wave):
        wave.flushes_denormals = inst.simm16 & 3 != 3

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
    if is_scaled or inst.abs or inst.neg or inst.omod or inst.clmp or hasattr(inst, "literal") or hasattr(inst, "dpp"):
        raise NotImplementedError(f"{inst!r} is not emulated")

    def held(wave, source):
        lanes = wave.chip.lanes
        return wave.vector[source - REGISTERS] if source >= REGISTERS else np.full(lanes, wave.scalar[source])

    def execute(wave):
        numbers = np.stack([held(wave, source) for source in sources]).view(np.float32)
        low, high = fp8_codes(numbers, exponent_bits, wave.chip.fp8_is_fnuz, wave.fp8_saturates)
        halves = wave.vector[inst.vdst.offset % REGISTERS].view(np.uint16)[half::2]
        halves[wave.active] = (low | high << 8)[wave.active]

    return execute


def reading_lanes(inst, register, find_lanes):
    """Copy a register from other lanes, by their numbers; one that is not active gives 0, and gets nothing."""
    destination, source = inst.vdst.offset % REGISTERS, register.offset % REGISTERS
    if getattr(inst, "acc", 0):
        raise NotImplementedError(f"{inst!r} is not emulated on accumulation registers")

    def execute(wave):
        values = np.where(wave.active, wave.vector[source], 0)[find_lanes(wave)]
        wave.vector[destination][wave.active] = values[wave.active]

    return execute


def permute(inst):
    """ds_bpermute_b32: reads from the lane at an address. tinygrad reads 0 where that is beyond the last."""
    address, offset = inst.addr.offset % REGISTERS, inst.offset1 << 8 | inst.offset0
    return reading_lanes(
        inst, inst.data0, lambda wave: (wave.vector[address] + np.uint32(offset)) // 4 % wave.chip.lanes
    )


def swizzle(inst):
    """ds_swizzle_b32: reads from a lane of the same 32, by and, or and xor with its number, or from one of four."""
    pattern, lane = inst.offset1 << 8 | inst.offset0, np.arange(64)
    if pattern >> 14 == 3:
        raise NotImplementedError(f"{inst!r} is not emulated: it rotates")
    if pattern >> 15:
        read = lane & ~3 | pattern >> 2 * (lane & 3) & 3
    else:
        read = lane & ~31 | (lane & pattern & 31 | pattern >> 5 & 31) ^ pattern >> 10 & 31
    return reading_lanes(inst, inst.addr, lambda wave: read[: wave.chip.lanes])


IN_PYTHON = {
    "DS_BPERMUTE_B32": permute,
    "DS_SWIZZLE_B32": swizzle,
    "V_PERMLANE16_SWAP_B32_E32": functools.partial(swap_rows, rows=16),
    "V_PERMLANE32_SWAP_B32_E32": functools.partial(swap_rows, rows=32),
    "S_SETREG_IMM32_B32": set_mode,
    "S_DENORM_MODE": set_denormals,
    "V_CVT_PK_FP8_F32": functools.partial(round_to_fp8, exponent_bits=4),
    "V_CVT_PK_BF8_F32": functools.partial(round_to_fp8, exponent_bits=5),
    "V_CVT_SCALEF32_PK_FP8_F32": functools.partial(round_to_fp8, exponent_bits=4),
    "V_CVT_SCALEF32_PK_BF8_F32": functools.partial(round_to_fp8, exponent_bits=5),
}


# What tinygrad executes otherwise than the chips, or not at all, unless it has a function: formatted buffers; random
# rounding; registers of the hardware. On CDNA matrix products of several blocks, sparse, scaled or in fp64; scaled
# rounding; comparisons that write EXEC. On RDNA matrix products of other types or sparse; barriers of some waves.
NOT_EMULATED = {
    "cdna": "V_MFMA_(?!.*_4X4X.*_(F32|BF16|I8)$)|V_SMFMAC_|V_CVT_SCALEF32_|V_CMPX_.*_E32",
    "rdna": "V_S?WMMA|V_DOT4_F32|.*V_DUAL_(MUL_DX9|DOT2)|S_BARRIER_(?!SIGNAL$|WAIT$)|S_(GET_BARRIER|ROUND)|DS_SWIZZLE",
}
EVERYWHERE = "T?BUFFER_|GLOBAL_|FLAT_|V_CVT_SR_|S_[GS]ETREG"
NOT_EMULATED = {family: re.compile(f"{names}|{EVERYWHERE}") for family, names in NOT_EMULATED.items()}
# Fields that must be 0: {what an instruction's name begins with: fields that tinygrad or its function does not heed}.
NOT_HEEDED = {
    "V_MFMA_(?!.*(XF32|F8F6F4))": ("cbsz", "abid", "blgp"),
    "V_MFMA_.*_4X4X": ("acc", "acc_cd"),
    "BUFFER_(LOAD|STORE|ATOMIC)": ("idxen", "tfe"),
    "BUFFER_LOAD_(?!DWORD(X[34])?$)": ("lds",),
    "DS_(?!READ|WRITE)": ("acc",),
    "DS_": ("gds",),
    "V_CVT_(PK_)?F32_[FB][PF]8": ("abs", "neg", "clmp", "src0_sext"),
    "V_CVT_SCALEF32_": ("abs", "neg", "clmp"),
    "V_(?!BITOP3|CMP)": ("omod",),
    "V_(PK(?!_(ADD|SUB)_[IU]16)|DOT|FMA_MIX|MAD_MIX|WMMA)": ("clmp",),
    "V_DIV_SCALE": ("neg",),
    "V_WMMA_": ("opsel", "neg_hi"),
    "V_WMMA_F": ("neg",),
}
NOT_HEEDED = {re.compile(pattern): fields for pattern, fields in NOT_HEEDED.items()}


def refuse_what_is_not_emulated(arch, inst, has_function):
    """Raise NotImplementedError for instructions that would be executed otherwise than by the chips."""
    name, kind, family = name_of(inst), type(inst).__name__, CHIPS[arch].family
    fields = [field for pattern, fields in NOT_HEEDED.items() if pattern.match(name) for field in fields]
    is_refused = any(emu._iattr(inst, field) for field in fields)
    is_refused |= not has_function and bool(NOT_EMULATED[family].match(name))
    is_refused |= "F8F6F4" in name and max(int(inst.cbsz), int(inst.blgp)) > 1  # FP6 and FP4
    is_refused |= "SDWA" in kind and any(
        emu._iattr(inst, field) for field in ("src0_neg", "src0_abs", "src1_neg", "src1_abs", "clmp", "omod")
    )
    # Functions of cdna.c and rdna.c do not know other forms.
    is_other_form = hasattr(inst, "dpp") or hasattr(inst, "literal") or emu._iattr(inst, "dst_sel", 6) != 6
    is_refused |= has_function is not None and is_other_form
    is_refused |= family == "cdna" and name.endswith("8_E64") and bool(inst.opsel)
    is_refused |= arch == "gfx90a" and "DOT2C_F32_BF16" in name  # its v_mac_f32
    # Of lanes without a source the carry, or the other half of a register, is not known.
    is_refused |= kind == "VOP3P_DPP16" or kind in ("VOP3_DPP16", "VOP3SD_DPP16") and not inst.bc
    operands = [field for _, field in inst._fields if type(field) in (SrcField, SSrcField)]
    is_refused |= any(inst._raw >> field.lo & field.mask in NO_OPERANDS for field in operands)
    is_refused |= name == "S_BARRIER_SIGNAL" and int(inst.ssrc0.offset) != ALL_WAVES
    if is_refused:
        raise NotImplementedError(f"{inst!r} is not emulated")


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
OVERRIDES = hashlib.sha256(Path(overrides.__file__).read_bytes()).hexdigest()


def stored_keys(type_):
    """Return {(mask, masked bits): key of the program} of the instructions of a type that were compiled until now.

    To find one there takes a hundredth of the time in which tinygrad builds what it compiles.
    """
    return diskcache_get("keys_of_instructions", f"{type_.__module__}.{type_.__name__} {OVERRIDES}") or {}


known_keys = functools.cache(stored_keys)


def runner_of(inst, address, isa):
    """Return (program, runtime, mask) of the instruction at an address, as tinygrad compiles it.

    mask: of the bits without which it would be another program.
    """
    type_ = type(inst)
    for (mask, masked), key in known_keys(type_).items():
        if inst._raw & mask == masked and (parts := diskcache_get("emulated_instructions", key.hex())):
            program = CompiledInstruction(key, *parts)
            return program, emu.get_runtime("CPU", program), mask
    (program, runtime), _ = emu._decode_at(address, isa)
    _, masked, mask, *_ = next(entry for entry in emu._canonical_runner_cache if entry[-1][1] is runtime)
    known_keys(type_)[mask, masked] = program.key
    of_type = f"{type_.__module__}.{type_.__name__} {OVERRIDES}"
    diskcache_put("keys_of_instructions", of_type, stored_keys(type_) | known_keys(type_))
    return program, runtime, mask


class Kind(NamedTuple):
    """What instructions have in common that differ only in operands."""

    instruction: Instruction
    nbytes: int
    name: str


NUMBERS = ("literal", "offset", "ioffset", "offset0", "offset1", "simm16", "rsrc")  # fields that may hold any


def bits_of_kind(inst):
    """Return a mask of the bits of an instruction that are no operands.

    It has what tells registers from constants, and the whole of the latter, which may announce a longer instruction.
    """
    mask = (1 << 8 * inst.size()) - 1
    for name, field in inst._fields:
        operand = inst._raw >> field.lo & field.mask
        if name in NUMBERS or isinstance(field, VGPRField | VDSTYField | SGPRField | AlignedSGPRField):
            mask &= ~(field.mask << field.lo)
        elif isinstance(field, SrcField) and not 128 <= operand < 256:
            mask &= ~((0xFF if operand >= 256 else 0x7F) << field.lo)
    return mask


@functools.cache
def kinds_of(arch):
    """Return the known kinds: {the highest bits of the first word: {mask: {masked bits: Kind}}}."""
    return collections.defaultdict(lambda: collections.defaultdict(dict))


class Program:
    """The instructions of a code object. Each is compiled when a wave first reaches it."""

    def __init__(self, code, arch):
        self.code, self.arch, self.chip, self.kinds = code, arch, CHIPS[arch], kinds_of(arch)
        self.instructions = (Instruction * (code.nbytes // 4 + 1))()
        self.decoded, self.in_python = {}, {}  # by address
        self.atomics = set()  # names of those that were found
        if arch == "gfx90a":
            self.translate_gfx90a()

    def holds(self, address):
        """Tell whether an address lies in the code of the program."""
        return 0 <= address - self.code.begin < self.code.nbytes

    def decode(self, address):
        """tinygrad's Inst at an address."""
        if address not in self.decoded:
            try:
                self.decoded[address] = decode_inst(ctypes.string_at(address, LONGEST_INSTRUCTION), self.chip.isa)
            except ValueError as error:  # of tinygrad, which does not know every format
                raise NotImplementedError(f"an instruction of {self.code.name} is not emulated: {error}") from error
        return self.decoded[address]

    def translate_gfx90a(self):
        """Give instructions of gfx90a the opcodes of gfx942 for the same.

        v_mfma_f32_*bf16_1k is v_mfma_f32_*_bf16; buffer_wbinvl1 and _vol, for caches, are s_nop. NotImplementedError
        for products of bytes, whose opcodes have another meaning there.
        """
        address = self.code.begin
        while address < self.code.begin + self.code.nbytes:
            word = ctypes.c_uint32.from_address(address)
            if word.value >> 23 == 0b110100111:
                if word.value >> 16 & 127 in (0x66, 0x67):
                    word.value -= 6 << 16
                elif word.value >> 16 & 127 in (0x54, 0x55):
                    raise NotImplementedError(f"{self.code.name} multiplies bytes, which gfx90a does not emulate")
            elif word.value >> 26 == 0b111000 and word.value >> 18 & 127 in (62, 63):
                word.value = ctypes.c_uint32.from_address(address + 4).value = S_NOP
            address += decode_inst(ctypes.string_at(address, LONGEST_INSTRUCTION), self.chip.isa).size()

    def compile(self, address):
        """Compile the instruction at an address, and find those after it whose kind is known by then."""
        kind = self.kind_at(address) or self.new_kind(address)
        while kind and self.holds(address):
            at = (address - self.code.begin) // 4
            if self.instructions[at].function:
                break
            self.instructions[at] = kind.instruction
            if "_ATOMIC_" in kind.name:
                self.atomics.add(kind.name)
            address += kind.nbytes
            kind = self.kind_at(address)

    def kind_at(self, address):
        """Return the kind of the instruction at an address, None if it is not known yet."""
        bits = int.from_bytes(ctypes.string_at(address, LONGEST_INSTRUCTION), "little")
        for mask, kinds in self.kinds[bits >> 26 & 63].items():
            if kind := kinds.get(bits & mask):
                return kind

    def new_kind(self, address):
        """Compile the instruction at an address. Returns its kind."""
        inst, mask = self.decode(address), bits_of_kind(self.decode(address))
        function = function_of(self.arch, inst)
        refuse_what_is_not_emulated(self.arch, inst, function)
        instruction = Instruction(function, tuple(range(6)))
        if not function:
            try:
                program, runtime, needed = runner_of(inst, address, self.chip.isa)
            except RuntimeError as error:  # of tinygrad, which does not know everything
                raise NotImplementedError(f"{inst!r} is not emulated: {error}") from error
            mask |= needed
            instruction.function, instruction.buffers[: len(program.arg.globals)] = runtime.addr, program.arg.globals
            instruction.barrier = BARRIERS.get(name_of(inst), 0)
        kind = Kind(instruction, inst.size(), name_of(inst))
        self.kinds[inst._raw >> 26 & 63][mask][inst._raw & mask] = kind
        return kind


class Machine:
    """Run programs.

    seed: determines the order of workgroups and waves. is_thorough: run each launch again, with other values where
    nothing was written, and in another order: the results must have the same bits.
    """

    def __init__(self, arch, seed, is_thorough=False):
        self.arch, self.random, self.is_thorough = arch, random.Random(seed), is_thorough
        self.n_launches = 0

    def launch(self, program, grid, arguments, memory, n_waves, lds_bytes):
        """Run a launch, and write its results into the tensors.

        grid: the three numbers of workgroups; arguments: of the kernel, as bytes; memory: a TensorMemory; lds_bytes:
        of the launch. Fault if the kernel accesses other memory, does not end, or is found not to be reliable.
        """
        self.n_launches += 1
        launch = program, grid, arguments, memory, n_waves, lds_bytes
        is_thorough = self.is_thorough and memory.is_copied
        order, before = self.random.getstate(), is_thorough and memory.contents()
        self.run(*launch)
        if is_thorough:
            results, next_order = memory.contents(), self.random.getstate()
            self.random.setstate(order)
            memory.fill(before)
            self.run(*launch, poison=OTHER_POISON)
            self.compare(program, memory, results, "registers or LDS that it has not written")
            self.random.setstate(next_order)
            if not any(map(ANY_ORDER.search, program.atomics)):
                memory.fill(before)
                self.run(*launch, n_cohorts=1 if program.atomics else MOST_COHORTS)
                self.compare(program, memory, results, "the order of its workgroups and waves")
        memory.write_back()

    def compare(self, program, memory, results, cause):
        """Compare with other results. Fault with the cause if one has other bits."""
        if difference := memory.difference(results):
            raise Fault(f"{program.code.name} on {self.arch}: {difference}: it depends on {cause}")

    def run(self, program, grid, arguments, memory, n_waves, lds_bytes, poison=POISON, n_cohorts=1):
        """Run every workgroup of a launch on the copies of the tensors.

        n_cohorts: none of so many sets of workgroups sees what the others store, as if all ran at the same time.
        """
        code = program.code
        self.program, self.memory = program, memory
        held = ctypes.create_string_buffer(arguments, len(arguments))
        user_registers = self.user_registers(code, ctypes.addressof(held), arguments)
        self.waves = [wave_of(self.arch, index) for index in range(n_waves)]
        for wave in self.waves:
            wave.take_scratch(code.scratch_bytes)
        scalar = first_registers(program.chip, user_registers, code.entry, code.scratch_bytes, poison)
        lds = lds_of(max(lds_bytes, code.lds_bytes))
        self.group = Workgroup(program, self.waves, lds, scalar, self.random.getrandbits(64), poison)
        workgroups = list(itertools.product(*map(range, grid)))
        self.random.shuffle(workgroups)
        self.extents = hold_to(self.arch, [*memory.copies, lds])
        cohorts = [workgroups[i::n_cohorts] for i in range(min(n_cohorts, len(workgroups)))]
        before = memory.contents() if len(cohorts) > 1 else []
        after = [content.copy() for content in before]
        for cohort in cohorts:
            memory.fill(before) if before else None
            for workgroup in cohort:
                if program.chip.isa == "rdna4":
                    scalar[X], scalar[YZ] = workgroup[0], workgroup[1] | workgroup[2] << 16
                else:
                    position = [n for axis, n in enumerate(workgroup) if code.rsrc2 >> 7 + axis & 1]
                    scalar[len(user_registers) : len(user_registers) + len(position)] = position
                self.group.start()
                self.run_workgroup(workgroup)
            for content, old, now in zip(after, before, memory.copies, strict=False):
                np.copyto(content, now.bytes, where=now.bytes != old)
        memory.fill(after) if before else None

    @staticmethod
    def user_registers(code, address, arguments):
        """Return the initial values of the first scalar registers, in the order of the descriptor."""
        registers = code.user_registers(address)
        registers += struct.unpack_from(f"<{code.preloaded_words}I", arguments, 4 * code.preload_offset)
        return registers + [0xFFFFFFFF] * (code.n_user_registers - len(registers))

    def run_workgroup(self, workgroup):
        """Execute a workgroup that has started. Fault if it does not end as it should."""
        while (outcome := self.group.run()) == NOT_COMPILED:
            self.meet(self.waves[self.group.current], workgroup)
        name = f"{self.program.code.name} on {self.arch}"
        if outcome in FAULTS:
            raise Fault(f"{self.where(workgroup)} {FAULTS[outcome]} {self.place_of(self.group.fault)}")
        if outcome == ENDLESS:
            raise Fault(f"{self.where(workgroup)} does not come to an end")
        if outcome == BESIDE_LDS:
            raise Fault(f"{name} stores beside its {self.group.lds.contents.nbytes} bytes of LDS")
        if outcome == BESIDE_SCRATCH:
            raise Fault(f"{name} stores beside its private memory")

    def place_of(self, address):
        """Describe an address by its place in LDS, private memory or a tensor."""
        lds = self.group.lds.contents
        if lds.begin <= address < lds.extent.end + GUARD:
            return f"byte {address - lds.address} of LDS, which has {lds.nbytes}"
        scratch = self.waves[self.group.current].scratch.contents
        if scratch.begin <= address < scratch.extent.end + GUARD:
            return f"byte {address - scratch.address} of the wave's private memory, which has {scratch.nbytes}"
        return self.memory.place_of(address)

    def meet(self, wave, workgroup):
        """Compile the instruction that the wave has reached, or execute it in Python."""
        address, program = wave.program_counter, self.program
        if not program.holds(address):
            raise Fault(f"{self.where(workgroup)} leaves its code")
        inst = program.decode(address)
        if name_of(inst) not in IN_PYTHON:
            program.compile(address)
            return
        if address not in program.in_python:
            program.in_python[address] = IN_PYTHON[name_of(inst)](inst)
        program.in_python[address](wave)
        wave.program_counter = address + inst.size()
        self.group.turn -= 1

    def where(self, workgroup):
        address = self.waves[self.group.current].program_counter
        code, place = self.program.code, f"workgroup {workgroup}, wave {self.group.current}"
        if not self.program.holds(address):
            return f"{code.name} on {self.arch}, {place}"
        line = f"{code.line_of(address)}: " if code.line_of(address) else ""
        return f"{line}{code.name} on {self.arch}, {place}, {self.program.decode(address)!r}"
