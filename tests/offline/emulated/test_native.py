"""Instructions of CDNA in cdna.c and overrides.py, one by one, beside their definition in numpy."""

import ctypes
import itertools
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.offline.emulated import one_wave
from tests.offline.emulated.one_wave import Code, Words, run, words_of, workgroup_of
from tests.offline.selection import EMULATED, needs_fp8, only_cdna
from tiny_llama import fp8

if EMULATED:
    from tinygrad.renderer.amd.dsl import s, v
    from tinygrad.runtime.autogen.amd.cdna import ins as cdna

    from offline import emulator
    from offline.emulator.machine import (
        EXEC,
        POISON,
        Fault,
        GuardedMemory,
        Machine,
        Program,
        TensorMemory,
    )

pytestmark = only_cdna
wave, LANES = one_wave.wave, 64
LANE = np.arange(64)
A, B, C, D = 8, 24, 40, 72  # the first registers of the operands


# ----------------------------------------------------------------------------------------------------------------------
# Matrix products


def codes(values, kind):
    """(random codes of a type, their values as float64)"""
    if kind in ("f16", "bf16", "f32", "xf32"):
        numbers = values.astype(np.float32)
        if kind == "f32":
            return words_of(numbers), numbers.astype(float)
        if kind == "f16":
            return numbers.astype(np.float16).view(np.uint16), numbers.astype(np.float16).astype(float)
        if kind == "xf32":  # which the chip rounds to 11 digits, to the nearest even
            numbers[:, ::3] = 1 + np.arange(1, 2 * numbers[:, ::3].size, 2).reshape(numbers[:, ::3].shape) / 2**11
            digits, exponents = np.frexp(numbers.astype(float))
            return words_of(numbers), np.ldexp(np.rint(digits * 2**11), exponents - 11)
        cut = words_of(numbers) & 0xFFFF0000
        return (cut >> 16).astype(np.uint16), cut.view(np.float32).astype(float)
    small = np.rint(values).clip(-3, 3)
    if kind == "i8":
        return small.astype(np.int8).view(np.uint8), small
    formats = fp8.FNUZ if emulator.CHIPS[EMULATED].fp8_is_fnuz else fp8.OCP
    eighths = torch.from_numpy(values).to({"fp8": formats.forward, "bf8": formats.gradient}[kind])
    return eighths.view(torch.uint8).numpy(), eighths.double().numpy()


def products():
    """(name, M, K, type of A, type of B) of each function in cdna.c that gfx942 or gfx950 has."""
    text = (Path(__file__).parents[3] / "offline/emulator/cdna.c").read_text()
    for name in re.findall(r"^MFMA\((\w+),", text, flags=re.M):
        m, k, kinds = re.fullmatch(r"[fi]32_(\d+)x\d+x(\d+)_(\w+)", name).groups()
        first, _, second = kinds.partition("_")
        yield name, int(m), int(k), first, second or first


def opcode(name):
    from tinygrad.runtime.autogen.amd.cdna.enum import VOP3POp

    return VOP3POp[f"V_MFMA_{name}".upper()].value


@pytest.mark.parametrize("held", ["vector", "accumulation", "constant"])
@pytest.mark.parametrize("name, m, k, a_kind, b_kind", list(products()))
def test_a_matrix_product(name, m, k, a_kind, b_kind, held, wave):
    """Each number has its own value, so that a wrong row, column, element of k or part of a register is seen."""
    if EMULATED == "gfx90a" and opcode(name) in (0x54, 0x55):
        pytest.skip("gfx90a multiplies bytes by this number of an instruction")
    random = np.random.default_rng(1)
    a_codes, a = codes(random.normal(size=(m, k)), a_kind)
    b_codes, b = codes(random.normal(size=(k, m)), b_kind)
    per_lane = m * k // 64
    vector, other = wave.vector, wave.accumulation
    to_a, to_b, to_d = (other, vector, other) if held == "accumulation" else (vector, other, vector)
    k_of = LANE[:, None] // m * per_lane + np.arange(per_lane)
    to_a[A : A + 16] = to_b[B : B + 16] = 0
    for first, registers, numbers in (
        (A, to_a, a_codes[LANE[:, None] % m, k_of]), (B, to_b, b_codes[k_of, LANE[:, None] % m]),
    ):  # fmt: skip
        words = words_of(numbers).reshape(64, -1)  # (lanes, registers)
        registers[first : first + words.shape[1]] = words.T
    i = np.arange(m * m // 64)
    row = (8 * (i // 4) + i % 4)[None] + 4 * (LANE // 32)[:, None] if m == 32 else i[None] + 4 * (LANE // 16)[:, None]
    is_whole = a_kind == "i8"
    c = np.rint(100 * random.normal(size=(m, m)))
    if held == "constant":
        c[:] = 2
    else:
        numbers = c[row, LANE[:, None] % m].astype(np.int32 if is_whole else np.float32)
        to_d[C : C + len(i)] = words_of(numbers.T)
    third = (130 if is_whole else 244) if held == "constant" else 256 + C  # the constants 2 and 2.0
    in_a, in_b, in_d = held == "accumulation", held != "accumulation", held == "accumulation"
    inst = Words(
        0xD3800000 | opcode(name) << 16 | in_d << 15 | D,
        (256 + A) | (256 + B) << 9 | third << 18 | in_a << 27 | in_b << 28,
    )
    wave.scalar[EXEC : EXEC + 2] = 0x0F0F0F0F  # which matrix instructions ignore
    run(wave, inst)
    result = to_d[D : D + len(i)].view(np.int32 if is_whole else np.float32)
    np.testing.assert_allclose(result.T, (a @ b + c)[row, LANE[:, None] % m], rtol=1e-5, atol=1e-5)


def test_a_number_that_is_none_stays_none(wave):
    """Also if it is what registers begin with, whose rounding to fewer digits would overflow to 0."""
    wave.vector[B : B + 2] = 0x3F800000
    word = 0xD3800000 | opcode("f32_32x32x4_xf32") << 16 | D
    run(wave, Words(word, (256 + A) | (256 + B) << 9 | 128 << 18))  # A is poisoned
    assert np.isnan(wave.vector[D : D + 16].view(np.float32)).all()


@pytest.mark.parametrize("field", [1 << 8, 1 << 11, 1 << 61])  # cbsz, abid, blgp: broadcasts and sign changes
def test_a_field_that_is_not_heeded_is_refused(field, wave):
    word = 0xD3800000 | opcode("f32_16x16x16_f16") << 16 | D | ((256 + A) | (256 + B) << 9 | 128 << 18) << 32 | field
    with pytest.raises(NotImplementedError, match="v_mfma_f32_16x16x16_f16.* is not emulated"):
        run(wave, Words(word & 0xFFFFFFFF, word >> 32))


def test_subnormal_halves(wave):
    """gfx90a takes them as 0, and what is too small in the result."""
    wave.vector[A : A + 2], wave.vector[B : B + 2] = 0x00010001, 0x3C003C00  # 2^-24 and 1
    run(wave, cdna.v_mfma_f32_16x16x16_f16(v[D : D + 3], v[A : A + 1], v[B : B + 1], 0))
    expected = 0 if EMULATED == "gfx90a" else 16 * 2.0**-24
    assert (wave.vector[D : D + 4].view(np.float32) == expected).all()


# ----------------------------------------------------------------------------------------------------------------------
# Numbers of 8 and of 4 bits become longer ones

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
CODES = 0x01020408 * LANE + 0x80C1F07E & 0xFFFFFFFF  # no two bytes of a lane are alike


def numbers_of(kind):
    """Return the numbers of all codes of a type, NaN among them."""
    if kind == "fp4":
        return np.concatenate([FP4, -FP4])
    formats = fp8.FNUZ if emulator.CHIPS[EMULATED].fp8_is_fnuz else fp8.OCP
    every = torch.arange(256, dtype=torch.uint8)
    return every.view({"fp8": formats.forward, "bf8": formats.gradient}[kind]).double().numpy()


@needs_fp8
@pytest.mark.parametrize("select", [None, "e64", 0, 1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("kind", ["fp8", "bf8"])
@pytest.mark.parametrize("count", [1, 2])
def test_numbers_of_8_bits(count, kind, select, wave):
    """Alone, in the long form, and with each byte, half or the whole that SDWA selects."""
    opcode = 84 + (kind == "bf8") + 2 * (count == 2)
    short = 0x7E000000 | D << 17 | opcode << 9
    wave.vector[A], wave.vector[D : D + 3] = CODES, 7
    wave.scalar[EXEC : EXEC + 2] = 0xFFFFFFFF, 0x0FFFFFFF
    if select is None:
        run(wave, Words(short | 256 + A))
    elif select == "e64":
        run(wave, Words(0xD0000000 | (opcode + 320) << 16 | D, 256 + A))
    else:
        run(wave, Words(short | 0xF9, A | 6 << 8 | select << 16))
    shift = {1: 8, 2: 16, 3: 24, 5: 16}.get(select, 0)
    for i in range(count):
        expected = numbers_of(kind)[(CODES >> shift + 8 * i) & 255]
        np.testing.assert_array_equal(wave.vector[D + i, :60].view(np.float32), expected[:60])
    assert (wave.vector[D + count] == 7).all() and (wave.vector[D, 60:] == 7).all()


SCALED = {
    (1, "f32", "fp8"): 571, (1, "f32", "bf8"): 572, (2, "f32", "fp8"): 569, (2, "f32", "bf8"): 570,
    (2, "f32", "fp4"): 575, (2, "f16", "fp8"): 584, (2, "f16", "bf8"): 585, (2, "f16", "fp4"): 592,
    (2, "bf16", "fp8"): 617, (2, "bf16", "bf8"): 618, (2, "bf16", "fp4"): 593,
}  # fmt: skip


@pytest.mark.skipif(EMULATED != "gfx950", reason="gfx950 alone has them")
@pytest.mark.parametrize("select", [0, 1, 2, 3])
@pytest.mark.parametrize("count, to, kind", SCALED)
def test_scaled_numbers(count, to, kind, select, wave):
    """The scale is a power of two, whatever the rest of its operand is; of 255 the result is NaN."""
    bits = 4 if kind == "fp4" else 8
    exponents = np.where(LANE == 9, 255, 120 + LANE % 16)
    wave.vector[A], wave.vector[B], wave.vector[D : D + 3] = CODES, exponents << 23 | 0x80000005, 7
    head = 0xD0000000 | SCALED[count, to, kind] << 16 | (select & 1) << 11 | (select >> 1) << 12 | D
    run(wave, Words(head, 256 + A | (256 + B) << 9))
    at = count * bits * (select if count * bits < 16 else select & 1)
    scale = np.where(exponents == 255, np.nan, 2.0 ** (exponents - 127))
    for i in range(count):
        expected = numbers_of(kind)[CODES >> at + bits * i & (1 << bits) - 1] * scale
        if to == "f32":
            actual = wave.vector[D + i].view(np.float32)
        else:
            halves = torch.from_numpy(wave.vector[D].view(np.int16).reshape(LANES, 2)[:, i].copy())
            dtype = torch.float16 if to == "f16" else torch.bfloat16
            actual, expected = (
                halves.view(dtype).double().numpy(),
                torch.from_numpy(expected).to(dtype).double().numpy(),
            )
        np.testing.assert_array_equal(actual, expected)
    assert (wave.vector[D + (count if to == "f32" else 1)] == 7).all()


@needs_fp8
@pytest.mark.parametrize("words", [
    (0x7E000000 | D << 17 | 86 << 9 | 0xFA, A | 0x140 << 8 | 0xFF << 24),  # DPP
    (0x7E000000 | D << 17 | 86 << 9 | 0xF9, A | 4 << 8 | 6 << 16),  # into a half
    (0x7E000000 | D << 17 | 86 << 9 | 0xFF, 0x3F800000),  # a literal
    (0xD1960000 | D | 1 << 11, 256 + A),  # the high half
])  # fmt: skip
def test_forms_that_are_not_known_are_refused(words, wave):
    with pytest.raises(NotImplementedError, match="v_cvt_pk_f32_fp8.* is not emulated"):
        run(wave, Words(*words))


# ----------------------------------------------------------------------------------------------------------------------
# Buffers

BASE, SIZE = 16, 4096  # the first scalar register of a buffer's descriptor, and its bytes


@pytest.fixture
def memory(wave):
    """Random bytes, which scalar registers 16 to 19 describe."""
    memory = GuardedMemory(SIZE)
    held = np.ctypeslib.as_array(ctypes.cast(memory.address, ctypes.POINTER(ctypes.c_uint8)), (SIZE,))
    held[:] = np.random.default_rng(2).integers(0, 256, SIZE)
    wave.scalar[BASE : BASE + 4] = memory.address & 0xFFFFFFFF, memory.address >> 32, SIZE - 64, 0x27000
    wave.scalar[30] = 64  # soffset
    wave.keep = memory
    return held


LOADS = {
    "ubyte": np.uint8, "sbyte": np.int8, "ushort": np.uint16, "sshort": np.int16, "ubyte_d16": np.uint8,
    "ubyte_d16_hi": np.uint8, "sbyte_d16": np.int8, "sbyte_d16_hi": np.int8, "short_d16": np.uint16,
    "short_d16_hi": np.uint16, "dword": "1u4", "dwordx2": "2u4", "dwordx3": "3u4", "dwordx4": "4u4",
}  # fmt: skip
OFFSET = 12  # of the instruction


def places(random):
    """Offsets of the lanes, of which every seventh is out of bounds."""
    offsets = random.permutation(LANES) * 32
    offsets[::7] = 0x80000000
    return offsets


def inst_of(name, width, **fields):
    data, address = v[D : D + width - 1] if width > 1 else v[D], v[A : A + 1] if fields.get("idxen") else v[A]
    name = f"buffer_{name}"
    return getattr(cdna, name)(data, address, s[BASE : BASE + 3], s[30], offen=1, offset=OFFSET, **fields)


@pytest.mark.parametrize("acc", [0, 1])
@pytest.mark.parametrize("name", LOADS)
def test_a_buffer_load(name, acc, wave, memory):
    registers = wave.accumulation if acc else wave.vector
    offsets = places(np.random.default_rng(3))
    wave.vector[A], registers[D : D + 4] = offsets, 0x0D0C0B0A
    wave.scalar[EXEC : EXEC + 2] = 0xFFFFFFF0, 0x7FFFFFFF
    dtype = np.dtype(LOADS[name])
    count, kind = (dtype.shape[0], np.uint32) if dtype.shape else (1, dtype)
    run(wave, inst_of(f"load_{name}", count, acc=acc))
    for lane, i in itertools.product(range(LANES), range(4)):
        before = expected = 0x0D0C0B0A
        if 4 <= lane < 63 and i < count:
            begin = 64 + OFFSET + int(offsets[lane])
            there = memory[begin : begin + count * np.dtype(kind).itemsize].view(kind) if lane % 7 else [0] * count
            read = int(there[i]) & 0xFFFFFFFF
            low, high = before & 0xFFFF0000 | read & 0xFFFF, before & 0xFFFF | read << 16 & 0xFFFF0000
            expected = high if name.endswith("hi") else low if name.endswith("d16") else read
        assert registers[D + i, lane] == expected, (lane, i)


@pytest.mark.parametrize("acc", [0, 1])
@pytest.mark.parametrize(
    "name", ["byte", "byte_d16_hi", "short", "short_d16_hi", "dword", "dwordx2", "dwordx3", "dwordx4"]
)
def test_a_buffer_store(name, acc, wave, memory):
    random = np.random.default_rng(4)
    registers, offsets = wave.accumulation if acc else wave.vector, places(random)
    data = random.integers(0, 2**32, (4, LANES))
    wave.vector[A], registers[D : D + 4] = offsets, data
    wave.scalar[EXEC : EXEC + 2] = 0xFFFFFFF0, 0x7FFFFFFF
    expected = memory.copy()
    words, width = int(name[-1]) if name[-1] in "234" else 1, {"byte": 1, "short": 2}.get(name.split("_")[0], 0)
    for lane in range(4, 63):
        if lane % 7:
            given = data[:words, lane].astype(np.uint32).view(np.uint8)
            given = given[2:] if name.endswith("hi") else given
            begin = 64 + OFFSET + offsets[lane]
            expected[begin : begin + (width or 4 * words)] = given[: width or 4 * words]
    run(wave, inst_of(f"store_{name}", words, acc=acc))
    assert (memory == expected).all()


def test_the_end_of_a_buffer(wave, memory):
    """Each word counts by itself, and what comes by the scalar offset too; a half must end within it."""
    wave.vector[A] = SIZE - 64 - 64 - OFFSET - 8  # the size, the scalar offset, that of the instruction, two words
    run(wave, inst_of("load_dwordx4", 4))
    assert (wave.vector[D : D + 2].T == memory[SIZE - 72 : SIZE - 64].view(np.uint32)).all()
    assert not wave.vector[D + 2 : D + 4].any()
    wave.vector[A] += 7
    run(wave, inst_of("load_ushort", 1))
    assert not wave.vector[D].any()
    memory[:], wave.vector[D : D + 4] = 0, 0xFFFFFFFF
    wave.vector[A] -= 7
    run(wave, inst_of("store_dwordx3", 3))
    assert memory.nonzero()[0].tolist() == [*range(SIZE - 72, SIZE - 64)]


def test_offsets_of_a_lane_are_added_in_32_bits(wave, memory):
    """A compiler splits an offset so that the register holds a negative number."""
    wave.vector[A] = 8 - OFFSET & 0xFFFFFFFF
    run(wave, inst_of("load_dword", 1))
    assert (wave.vector[D] == memory[72:76].view(np.uint32)).all()
    wave.vector[A] = -OFFSET - 8 & 0xFFFFFFFF
    wave.scalar[BASE + 2] = 64
    run(wave, inst_of("load_dword", 1))
    assert not wave.vector[D].any()


@pytest.mark.parametrize("name, fields", [("load_ushort", dict(lds=1)), ("load_dword", dict(idxen=1))])
def test_a_buffer_access_that_is_not_emulated_is_named(name, fields, wave, memory):
    with pytest.raises(NotImplementedError, match=f"buffer_{name}.* is not emulated"):
        run(wave, inst_of(name, 1, **fields))


def test_a_buffer_load_to_lds(wave, memory):
    """Lane l's goes to M0 + the instruction's offset + 4 l."""
    lds = GuardedMemory(1024)
    wave.vector[A], wave.scalar[124] = 32 * LANE[::-1], 256
    run(wave, inst_of("load_dword", 1, lds=1), lds=lds)
    there = np.frombuffer(ctypes.string_at(lds.address, 1024), np.uint8)
    for lane in range(LANES):
        begin = 64 + OFFSET + 32 * (63 - lane)
        at = 256 + OFFSET + 4 * lane
        assert (there[at : at + 4] == memory[begin : begin + 4]).all()
    assert (there[: 256 + OFFSET] == POISON).all() and (there[512 + OFFSET :] == POISON).all()


def words_read(memory, begins, name):
    """Return what loads of LOADS put into four registers of 0x0D0C0B0A, (4, LANES), from places in memory."""
    dtype = np.dtype(LOADS[name])
    count, kind = (dtype.shape[0], np.uint32) if dtype.shape else (1, dtype)
    registers = np.full((4, LANES), 0x0D0C0B0A, np.int64)
    for lane, i in itertools.product(range(LANES), range(count)):
        read = int(memory[begins[lane] :][: count * np.dtype(kind).itemsize].view(kind)[i]) & 0xFFFFFFFF
        low, high = 0x0D0C0000 | read & 0xFFFF, 0x0B0A | read << 16 & 0xFFFF0000
        registers[i, lane] = high if name.endswith("hi") else low if name.endswith("d16") else read
    return registers


def global_inst(name, scalar_base, acc, **fields):
    """A global access of the registers from D on, at the addresses from A on, by the offset -8."""
    inst = getattr(cdna, f"global_{name}")(addr=v[A], offset=-8 & 0x1FFF, saddr=s[BASE : BASE + 1], **fields)
    low, high = struct.unpack("<II", inst.to_bytes())
    return Words(low, high & ~0x7F0000 | (BASE if scalar_base else 0x7F) << 16 | acc << 23)


def any_places():
    """Return places in memory for all lanes, 16 bytes and an odd number from each other."""
    return 23 * np.random.default_rng(7).permutation(LANES) + 11


def point_at(wave, places, has_base):
    address = int(wave.scalar[BASE]) | int(wave.scalar[BASE + 1]) << 32
    at = 8 + places + (0 if has_base else address)
    wave.vector[A], wave.vector[A + 1] = at & 0xFFFFFFFF, at >> 32


@pytest.mark.parametrize("acc, has_base", [(0, True), (1, False)])
@pytest.mark.parametrize("name", LOADS)
def test_a_global_load(name, acc, has_base, wave, memory):
    """At odd addresses, which compilers make where an address is known to be no multiple of 4."""
    registers, places = wave.accumulation if acc else wave.vector, any_places()
    point_at(wave, places, has_base)
    registers[D : D + 4] = 0x0D0C0B0A
    wave.scalar[EXEC] = 0xFFFFFFF0
    width = int(name[-1]) if name[-1] in "234" else 1
    run(wave, global_inst(f"load_{name}", has_base, acc, vdst=v[D : D + width - 1] if width > 1 else v[D]))
    assert (registers[D : D + 4, 4:] == words_read(memory, places, name)[:, 4:]).all()
    assert (registers[D : D + 4, :4] == 0x0D0C0B0A).all()


STORES = ["byte", "byte_d16_hi", "short", "short_d16_hi", "dword", "dwordx2", "dwordx3", "dwordx4"]


def stored(memory, places, data, name):
    """Return memory after the lanes from 4 on have stored their registers, data (4, LANES), at places."""
    words, width = int(name[-1]) if name[-1] in "234" else 1, {"byte": 1, "short": 2}.get(name.split("_")[0], 0)
    expected = memory.copy()
    for lane in range(4, LANES):
        given = data[:words, lane].astype(np.uint32).view(np.uint8)[2 * name.endswith("hi") :]
        expected[places[lane] :][: width or 4 * words] = given[: width or 4 * words]
    return expected


@pytest.mark.parametrize("acc, has_base", [(0, True), (1, False)])
@pytest.mark.parametrize("name", STORES)
def test_a_global_store(name, acc, has_base, wave, memory):
    registers, places = wave.accumulation if acc else wave.vector, any_places()
    data = np.random.default_rng(8).integers(0, 2**32, (4, LANES))
    point_at(wave, places, has_base)
    registers[D : D + 4], wave.scalar[EXEC] = data, 0xFFFFFFF0
    expected = stored(memory, places, data, name)
    width = int(name[-1]) if name[-1] in "234" else 1
    run(wave, global_inst(f"store_{name}", has_base, acc, data=v[D : D + width - 1] if width > 1 else v[D]))
    assert (memory == expected).all()


def test_a_flat_access_has_no_scalar_base(wave, memory):
    """The field of the base is 0 there, which is no register."""
    point_at(wave, any_places(), has_base=False)
    wave.vector[A] -= 8
    wave.scalar[0:2] = 1 << 20, 0
    run(wave, Words(0xDC500000, A | D << 24))  # flat_load_dword
    assert (wave.vector[D] == words_read(memory, any_places(), "dword")[0]).all()


@pytest.mark.parametrize("words, opcode", [(1, 42), (3, 126), (4, 125)])
def test_a_global_load_to_lds(words, opcode, wave, memory):
    """Lane l's goes to M0 + the instruction's offset + its size times l."""
    lds, places = GuardedMemory(2048), any_places()
    point_at(wave, places, has_base=True)
    wave.scalar[124] = 256
    run(wave, Words(0xDC008000 | opcode << 18 | 0x1FF8, A | BASE << 16), lds=lds)
    there = np.frombuffer(ctypes.string_at(lds.address, 2048), np.uint8)
    for lane in range(LANES):
        at = 256 - 8 + 4 * words * lane
        assert (there[at : at + 4 * words] == memory[places[lane] :][: 4 * words]).all()
    assert (there[:248] == POISON).all() and (there[248 + 256 * words :] == POISON).all()


ATOMICS = {  # (old, given) -> new, of a type
    "swap": ("u4", lambda old, given: given), "add": ("u4", lambda old, given: old + given),
    "sub": ("u4", lambda old, given: old - given), "smin": ("i4", min), "smax": ("i4", max), "umin": ("u4", min),
    "umax": ("u4", max), "and": ("u4", lambda old, given: old & given), "or": ("u4", lambda old, given: old | given),
    "xor": ("u4", lambda old, given: old ^ given), "add_x2": ("u8", lambda old, given: old + given),
    "smin_x2": ("i8", min), "add_f32": ("f4", lambda old, given: old + given),
    "add_f64": ("f8", lambda old, given: old + given), "max_f64": ("f8", max),
    "cmpswap": ("u4", None), "pk_add_f16": ("2f2", None),
}  # fmt: skip


@pytest.mark.parametrize("returns", [0, 1])
@pytest.mark.parametrize("name", ATOMICS)
@np.errstate(over="ignore")
def test_a_buffer_atomic(name, returns, wave, memory):
    """Three lanes on one place, one after the other; others are out of bounds or inactive."""
    kind, new = ATOMICS[name]
    dtype, random = np.dtype(kind), np.random.default_rng(5)
    begin = 64 + OFFSET + 32
    one = np.dtype((dtype.base, dtype.shape or (1,)))
    given = (random.normal(size=(LANES, 2, *one.shape)) * 1000).astype(dtype.base)
    if dtype.kind in "ui" and not dtype.shape:
        given = random.integers(0, 2**31, given.shape).astype(dtype.base) * dtype.base.type(3)
    old = given[40, 0].copy()
    memory[begin : begin + one.itemsize] = old.view(np.uint8)
    if name == "cmpswap":
        given[5, 1], given[6, 1], given[9, 1] = old, old, given[5, 0]  # the second of them finds another value
    wave.vector[A] = np.where(LANE == 11, 0x80000000, 32)
    wave.scalar[EXEC : EXEC + 2] = 1 << 5 | 1 << 6 | 1 << 9 | 1 << 11, 0
    words = words_of(given.reshape(LANES, -1)).reshape(LANES, -1)
    wave.vector[D : D + words.shape[1]] = words.T
    before = wave.vector[D : D + 2].copy()
    width = one.itemsize // 4
    run(wave, inst_of(f"atomic_{name}", width * (1 + (name == "cmpswap")), sc0=returns))
    for lane in (5, 6, 9):
        returned = wave.vector[D : D + width, lane].copy().view(dtype.base)
        expected = old if returns else before[:width, lane].copy().view(dtype.base)
        assert (returned == expected).all()
        if name == "cmpswap":
            old = given[lane, 0] if old == given[lane, 1] else old
        elif name == "pk_add_f16":
            old = (old.astype(np.float32) + given[lane, 0].astype(np.float32)).astype(np.float16)
        else:
            old = np.array([new(old[0], given[lane, 0, 0])], dtype.base)
    assert (memory[begin : begin + one.itemsize].view(dtype.base) == old).all()
    assert (wave.vector[D, 11] == 0) == bool(returns)


def test_sums_of_halves_that_are_zero_or_small(wave, memory):
    begin = 64 + OFFSET + 32
    old, given = np.array([1, 2.0**-24], np.float16), np.array([-1, 2.0**-24], np.float16)
    memory[begin : begin + 4] = old.view(np.uint8)
    wave.vector[A], wave.vector[D] = 32, words_of(given)[0]
    wave.scalar[EXEC : EXEC + 2] = 1, 0
    run(wave, inst_of("atomic_pk_add_f16", 1))
    assert memory[begin : begin + 4].view(np.float16).tolist() == [0, 2.0**-23]


def test_sums_of_bf16_are_rounded_to_the_even_one(wave, memory):
    """1 + 2**-8 to 1, and 1 + 3 * 2**-8 to 1 + 2**-6."""
    begin = 64 + OFFSET + 32
    memory[begin : begin + 4] = np.array([0x3F80, 0x3F80], np.uint16).view(np.uint8)
    wave.vector[A], wave.vector[D] = 32, 0x3C403B80
    wave.scalar[EXEC : EXEC + 2] = 1, 0
    run(wave, inst_of("atomic_pk_add_bf16", 1))
    assert memory[begin : begin + 4].view(np.uint16).tolist() == [0x3F80, 0x3F82]


@pytest.mark.parametrize("has_base", [False, True])
@pytest.mark.parametrize("returns", [0, 1])
def test_a_global_atomic(returns, has_base, wave, memory):
    """By an address of 64 bits, or a scalar one and 32 bits; its offset has a sign. Inactive lanes have any address."""
    memory[256:264] = np.array([2**40 + 7], np.uint64).view(np.uint8)
    address = int(wave.scalar[BASE]) | int(wave.scalar[BASE + 1]) << 32
    at = 256 + 8 if has_base else address + 256 + 8
    wave.vector[A], wave.vector[A + 1] = at & 0xFFFFFFFF, at >> 32
    wave.vector[A : A + 2, 1::2] = 0x7F000000
    wave.vector[D], wave.vector[D + 1], wave.vector[B : B + 2] = 1, 2, 99
    wave.scalar[EXEC : EXEC + 2] = 0b101, 0
    fields = dict(data=v[D : D + 1], vdst=v[B : B + 1], offset=-8 & 0x1FFF, sc0=returns, saddr=s[BASE : BASE + 1])
    inst = cdna.global_atomic_add_x2(addr=v[A], **fields)
    low, high = np.frombuffer(inst.to_bytes(), np.uint32)
    run(wave, Words(low, high if has_base else high | 0x7F << 16))
    assert memory[256:264].view(np.uint64)[0] == 2**40 + 7 + 2 * (1 + 2**33)
    before = wave.vector[B : B + 2, [0, 2]].T.copy().view(np.uint64).ravel().tolist()
    assert before == ([2**40 + 7, 2**40 + 8 + 2**33] if returns else [99 * (1 + 2**32)] * 2)


# ----------------------------------------------------------------------------------------------------------------------
# LDS

LDS_NAMES = {  # of LOADS and STORES
    "ubyte": "u8", "sbyte": "i8", "ushort": "u16", "sshort": "i16", "short": "b16", "byte": "b8", "dword": "b32",
    "dwordx2": "b64", "dwordx3": "b96", "dwordx4": "b128",
}  # fmt: skip
ds = {"load": lambda name: f"ds_read_{name}", "store": lambda name: f"ds_write_{name}"}


@pytest.fixture
def lds(wave):
    """(LDS with random bytes, these bytes)"""
    lds = GuardedMemory(2048)
    held = np.ctypeslib.as_array(ctypes.cast(lds.address, ctypes.POINTER(ctypes.c_uint8)), (2048,))
    held[:] = np.random.default_rng(9).integers(0, 256, 2048)
    return lds, held


def lds_inst(kind, name, acc, **fields):
    plain, _, part = name.partition("_")
    plain = "ushort" if kind == "load" and plain == "short" else plain
    inst = getattr(cdna, "_".join(filter(None, [ds[kind](LDS_NAMES[plain]), part])))(addr=v[A], offset0=8, **fields)
    low, high = np.frombuffer(inst.to_bytes(), np.uint32)
    return Words(low | acc << 25, high)


@pytest.mark.parametrize("acc", [0, 1])
@pytest.mark.parametrize("name", LOADS)
def test_a_read_of_lds(name, acc, wave, lds):
    registers, places = wave.accumulation if acc else wave.vector, any_places()
    wave.vector[A], registers[D : D + 4], wave.scalar[EXEC] = places - 8, 0x0D0C0B0A, 0xFFFFFFF0
    width = int(name[-1]) if name[-1] in "234" else 1
    run(wave, lds_inst("load", name, acc, vdst=v[D : D + width - 1] if width > 1 else v[D]), lds=lds[0])
    assert (registers[D : D + 4, 4:] == words_read(lds[1], places, name)[:, 4:]).all()
    assert (registers[D : D + 4, :4] == 0x0D0C0B0A).all()


@pytest.mark.parametrize("acc", [0, 1])
@pytest.mark.parametrize("name", STORES)
def test_a_write_to_lds(name, acc, wave, lds):
    registers, places = wave.accumulation if acc else wave.vector, any_places()
    data = np.random.default_rng(10).integers(0, 2**32, (4, LANES))
    wave.vector[A], registers[D : D + 4], wave.scalar[EXEC] = places - 8, data, 0xFFFFFFF0
    expected = stored(lds[1], places, data, name)
    width = int(name[-1]) if name[-1] in "234" else 1
    run(wave, lds_inst("store", name, acc, data0=v[D : D + width - 1] if width > 1 else v[D]), lds=lds[0])
    assert (lds[1] == expected).all()


@pytest.mark.parametrize("acc", [0, 1])
@pytest.mark.parametrize("words, stride", [(1, 1), (2, 1), (1, 64), (2, 64)])
def test_pairs_of_lds(words, stride, acc, wave, lds):
    """Two places of each lane are exchanged: read as a pair, and written as a pair in the other order."""
    registers = wave.accumulation if acc else wave.vector
    places = 8 * words * np.random.default_rng(11).permutation(LANES)
    other = 4 * words * stride
    size = f"2{'st64' if stride > 1 else ''}_b{32 * words}"
    wave.vector[A], wave.scalar[EXEC] = places, 0xFFFFFFF0
    if stride > 1:
        wave.vector[A] = places % (4 * words * 64)  # so that the second place lies within LDS
        wave.scalar[EXEC : EXEC + 2] = 0xFFFFFFF0, 0
        wave.vector[A, :32] = 4 * words * np.random.default_rng(12).permutation(32)
        places = wave.vector[A].copy()
    before = lds[1].copy()
    read = getattr(cdna, f"ds_read{size}")(addr=v[A], vdst=v[D : D + 2 * words - 1], offset1=1)
    pair = [v[D + words : D + 2 * words - 1], v[D : D + words - 1]] if words > 1 else [v[D + 1], v[D]]
    write = getattr(cdna, f"ds_write{size}")(addr=v[A], data0=pair[0], data1=pair[1], offset1=1)
    for inst in (read, write):
        low, high = np.frombuffer(inst.to_bytes(), np.uint32)
        run(wave, Words(low | acc << 25, high), lds=lds[0])
    expected = before.copy()
    active = [lane for lane in range(LANES) if wave.scalar[EXEC + lane // 32] >> np.uint32(lane % 32) & 1]
    for lane in active:
        a, b = places[lane], places[lane] + other
        expected[a : a + 4 * words], expected[b : b + 4 * words] = (
            before[b : b + 4 * words], before[a : a + 4 * words],
        )  # fmt: skip
    assert (lds[1] == expected).all() and (expected != before).any()
    assert registers[D].view(np.uint32)[active[0]] == before[places[active[0]] :][:4].view(np.uint32)[0]


# ----------------------------------------------------------------------------------------------------------------------
# Lanes


@pytest.mark.parametrize("flushes", [0, 3])
def test_subnormal_numbers_as_mode_says(flushes, wave):
    """The value of the two bits for fp32: 0 flushes, 3 does not. The host's own arithmetic stays as it is."""
    wave.vector[A] = 1  # 2^-149
    set_mode = Words(0xBA000901, flushes)  # s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2)
    run(wave, set_mode, cdna.v_add_f32_e32(v[D], v[A], v[A]))
    assert (wave.vector[D] == (2 if flushes else 0)).all()
    assert (np.ones(9, np.uint32).view(np.float32) * np.float32(2)).view(np.uint32).tolist() == [2] * 9


def test_a_wave_begins_in_the_mode_of_its_kernel(wave):
    wave.fp8_saturates = wave.flushes_denormals = 1
    workgroup_of(wave, Program(Code([]), EMULATED)).start()
    assert (wave.fp8_saturates, wave.flushes_denormals) == (0, 0)


@pytest.mark.parametrize("rounding", [0, 1, 3])
def test_numbers_of_16_bits_are_rounded_to_the_nearest_alone(rounding, wave):
    set_mode = Words(0xBA000881, rounding)  # s_setreg_imm32_b32 hwreg(HW_REG_MODE, 2, 2)
    if rounding == 0:
        run(wave, set_mode)
        return
    with pytest.raises(NotImplementedError, match="s_setreg_imm32_b32.* is not emulated"):
        run(wave, set_mode)


def test_the_bytes_of_perm(wave):
    first, second = 0x8899AABB, 0x00FF7F80
    selectors = np.arange(256, dtype=np.uint32)[: 4 * LANES].reshape(LANES, 4)
    wave.vector[A], wave.vector[B] = first, second
    wave.vector[C] = words_of(selectors.astype(np.uint8)).ravel()
    run(wave, cdna.v_perm_b32_e64(v[D], v[A], v[B], v[C]))
    bytes_ = [*second.to_bytes(4, "little"), *first.to_bytes(4, "little")]
    signs = [255 * (bytes_[i] >> 7) for i in (1, 3, 5, 7)]
    table = np.array(bytes_ + signs + [0] + [255] * 243)
    assert (wave.vector[D].view(np.uint8).reshape(LANES, 4) == table[selectors]).all()


ROW = LANE // 16 * 16
DPP = {  # the control: the lane that each lane reads, -1 if there is none
    0x142: np.where(LANE > 15, ROW - 1, -1), 0x143: np.where(LANE > 31, 31, -1), 0x155: ROW + 5,
    0x111: np.where(LANE % 16 > 0, LANE - 1, -1), 0x101: np.where(LANE % 16 < 15, LANE + 1, -1),
    0x140: ROW + 15 - LANE % 16,
}  # fmt: skip


@pytest.mark.parametrize("zeros", [0, 1])
@pytest.mark.parametrize("row_mask", [15, 10])
@pytest.mark.parametrize("control", DPP)
def test_dpp(control, row_mask, zeros, wave):
    """The destination is the source, and lanes that read nothing keep what they have."""
    before = 1000 + LANE
    wave.vector[D] = before
    run(wave, Words(0x7E0002FA | D << 17, D | control << 8 | zeros << 19 | 15 << 24 | row_mask << 28))  # v_mov_b32_dpp
    source = DPP[control]
    read = np.where(source >= 0, 1000 + source, 0 if zeros else before)
    assert (wave.vector[D] == np.where(row_mask >> LANE // 16 & 1, read, before)).all()


@pytest.mark.parametrize("high", [0, 128])
def test_halves_of_high_registers(high, wave):
    """v128 and above are registers with 16 bits as well."""
    a, b, d = A + high, B + high, D + high
    numbers = np.linspace(-4, 4, LANES).astype(np.float16)
    wave.vector[a], wave.vector[b] = numbers.view(np.uint16), (numbers[::-1] * np.float16(0.5)).view(np.uint16)
    run(
        wave,
        cdna.v_add_f16_e32(v[d], v[a], v[b]),
        cdna.v_cvt_f32_f16_e32(v[d + 1], v[a]),
        cdna.v_cmp_lt_f16_e32(v[a], v[b]),
    )
    second = numbers[::-1] * np.float16(0.5)
    assert (wave.vector[d].astype(np.uint16).view(np.float16) == numbers + second).all()
    assert (wave.vector[d + 1].view(np.float32) == numbers).all()
    less = np.unpackbits(wave.scalar[106:108].view(np.uint8), bitorder="little").astype(bool)
    assert (less == (numbers < second)).all()


@pytest.mark.parametrize("inst", ["read", "write", "write_b16"])
def test_lanes_that_are_switched_off_do_not_touch_lds(inst, wave):
    lds = GuardedMemory(256)
    wave.vector[A] = np.where(LANE % 2, 0x7FFF0000, 4 * LANE)
    wave.vector[D], wave.scalar[EXEC : EXEC + 2] = 7, 0x55555555
    if inst == "read":
        run(wave, cdna.ds_read_b32(vdst=v[D], addr=v[A]), lds=lds)
        assert (wave.vector[D] == np.where(LANE % 2, 7, 0xFFFFFFFF)).all()
    else:
        run(
            wave,
            getattr(cdna, {"write": "ds_write_b32", "write_b16": "ds_write_b16"}[inst])(addr=v[A], data0=v[D]),
            lds=lds,
        )
        written = np.frombuffer(ctypes.string_at(lds.address, 256), np.uint32)
        assert (written[::2] & 0xFFFF == 7).all() and (written[1::2] == 0xFFFFFFFF).all()


def test_the_last_word_of_lds(wave):
    nbytes = emulator.CHIPS[EMULATED].lds_bytes
    lds = GuardedMemory(nbytes)
    wave.vector[A], wave.vector[D] = nbytes - 4 * LANES + 4 * LANE, LANE
    run(wave, cdna.ds_write_b32(addr=v[A], data0=v[D]), cdna.ds_read_b32(vdst=v[B], addr=v[A]), lds=lds)
    assert (wave.vector[B] == LANE).all()


@pytest.mark.parametrize("name, operands", [
    ("v_mfma_f32_32x32x4_2b_f16", (v[0:31], v[32:33], v[34:35], 0) if EMULATED else ()),
    ("v_mfma_f64_16x16x4_f64", (v[0:7], v[8:9], v[10:11], 0) if EMULATED else ()),
    ("buffer_load_format_x", (v[0], v[1], s[0:3], 0) if EMULATED else ()),
])  # fmt: skip
def test_what_is_not_emulated_is_named(name, operands, wave):
    with pytest.raises(NotImplementedError, match=f"{name}.* is not emulated"):
        run(wave, getattr(cdna, name)(*operands))


def test_a_transposed_read(wave):
    """Of 16 rows of 4 halves, one in each lane: lane l gets rows l // 4 + 4 n, of which it takes half l % 4."""
    lds = GuardedMemory(2048)
    halves = np.arange(LANES * 4, dtype=np.uint16)
    ctypes.memmove(lds.address + 16, halves.tobytes(), 512)
    wave.vector[A], wave.vector[D : D + 2] = 8 * LANE, 7
    wave.scalar[EXEC : EXEC + 2] = 0xFFFFFFFF, 0x0000FFFF
    wave.vector[A, 48:] = 0x7FFF0000  # lanes that are switched off
    run(wave, cdna.ds_read_b64_tr_b16(vdst=v[D : D + 1], addr=v[A], offset0=16), lds=lds)
    read = wave.vector[D : D + 2].T.copy().view(np.uint16)
    row = LANE[:, None] // 16 * 16 + LANE[:, None] % 16 // 4 + 4 * np.arange(4)
    assert (read[:48] == (4 * row + LANE[:, None] % 4)[:48]).all()
    assert (wave.vector[D : D + 2, 48:] == 7).all()


@pytest.mark.parametrize("first", range(6))
def test_forms_of_an_instruction_are_kinds_of_their_own(first, wave):
    """Whichever is known first: the operand may be a register, a constant, in a second word, or in another lane."""
    word = int.from_bytes(cdna.v_add_u32_e32(v[0], v[0], v[B]).to_bytes(), "little") & ~0x1FF
    wave.vector[A], wave.vector[B], wave.scalar[5] = 1000 + LANE, 7, 30
    forms = [  # the words, and what is added to 7
        ([256 + A], 1000 + LANE),
        ([5], 30),
        ([128 + 64], 64),
        ([0xFF, 123456789], 123456789),
        ([0xFA, A | 0x155 << 8 | 0xFF << 24], 1005 + ROW),  # DPP: row_newbcast:5
        ([0xF9, A | 6 << 8 | 4 << 16 | 6 << 24], 1000 + LANE),  # SDWA: the lower half
    ]
    order = [*range(first, 6), *range(first)]
    run(wave, *(Words(word | (D + i) << 17 | forms[i][0][0], *forms[i][0][1:]) for i in [*order, *order[::-1]]))
    for i, (_, added) in enumerate(forms):
        assert (wave.vector[D + i] == 7 + added).all()


# ----------------------------------------------------------------------------------------------------------------------
# Whole launches


@pytest.mark.parametrize("properties, before, after", [(8, 0, 0), (9, 4, 0), (0b11110, 4, 2), (0b11011, 6, 2)])
def test_where_the_address_of_the_arguments_stands(properties, before, after):
    """After what describes private memory (4 registers) and the packet and queue of the launch (2 each)."""
    code = Code([])
    code.properties = properties
    registers = code.user_registers(5 << 32 | 7)
    assert registers[before : before + 2] == [7, 5] and len(registers) == before + 2 + after


def launch(instructions, result, n_workgroups=1, lds_bytes=0, **options):
    """Launch instructions that find the address of the result, a tensor, in s[4:5], and their workgroup in s2."""
    load = cdna.s_load_dwordx2(sdata=s[4:5], sbase=s[0:1], imm=1, offset=0)
    code = Code([load, *instructions])
    memory = TensorMemory([("result", result)])
    arguments = struct.pack("<Q", memory.address_of(result))
    machine = Machine(EMULATED, 3, **options)
    machine.launch(Program(code, EMULATED), (n_workgroups, 1, 1), arguments, memory, 1, lds_bytes)


def store(register):
    return cdna.global_store_dword(addr=v[A], data=register, saddr=s[4:5])


@pytest.mark.parametrize("cause, instructions, n_workgroups", [
    ("registers or LDS that it has not written", lambda: [cdna.v_mov_b32_e32(v[A], 0), store(v[D])], 1),
    ("registers or LDS that it has not written",
     lambda: [cdna.v_mov_b32_e32(v[A], 0), cdna.ds_read_b32(vdst=v[D], addr=v[A]), store(v[D])], 1),
    ("the order of its workgroups and waves",
     lambda: [cdna.v_mov_b32_e32(v[A], 0), cdna.v_mov_b32_e32(v[D], s[2]), store(v[D])], 9),
])  # fmt: skip
def test_results_that_are_not_reliable_are_reported(cause, instructions, n_workgroups):
    result = torch.zeros(1, dtype=torch.int32)
    told = f"instructions on {EMULATED}: result, element 0, is .* or .*: it depends on {cause}"
    with pytest.raises(Fault, match=told):
        launch(instructions(), result, n_workgroups, lds_bytes=4, is_thorough=True)
    launch(instructions(), result, n_workgroups, lds_bytes=4)


@pytest.mark.parametrize("is_thorough", [False, True])
def test_a_result_is_added_to_once(is_thorough):
    """However often the launch runs."""
    result = torch.full((1,), 5, dtype=torch.int32)
    add = cdna.global_atomic_add(addr=v[A], data=v[D], saddr=s[4:5])
    one_lane = Words(0xBE800181 | EXEC << 16)  # s_mov_b64 exec, 1
    launch(
        [one_lane, cdna.v_mov_b32_e32(v[A], 0), cdna.v_mov_b32_e32(v[D], 2), add], result, 3, is_thorough=is_thorough
    )
    assert result.item() == 11


def test_a_store_beside_lds_of_any_workgroup_is_seen():
    """In the spare bytes before the guarded pages."""
    write = [cdna.v_mov_b32_e32(v[A], 4), cdna.v_mov_b32_e32(v[D], 7), cdna.ds_write_b32(addr=v[A], data0=v[D])]
    first = [cdna.s_cmp_lg_u32(s[2], 0), cdna.s_cbranch_scc1(4)]  # words to jump over, but for the first workgroup
    with pytest.raises(Fault, match="touches byte 4 of LDS, which has 4"):
        launch([*first, *write], torch.zeros(1), 4, lds_bytes=4)


def test_memory_that_overlaps_is_refused():
    whole = np.zeros(8, np.float32)
    parts = [(name, torch.from_numpy(part)) for name, part in (("x", whole[:6]), ("y", whole[4:]))]
    with pytest.raises(NotImplementedError, match="the memory of x and y overlaps"):
        TensorMemory(parts)
