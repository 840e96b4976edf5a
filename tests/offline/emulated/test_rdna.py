"""Instructions of RDNA 3 and 4 in rdna.c and overrides.py, one by one, beside their definition in numpy."""

import ctypes
import itertools
import re

import numpy as np
import pytest
import torch

from tests.offline.emulated import one_wave
from tests.offline.emulated.one_wave import Code, Words, run, words_of
from tests.offline.selection import EMULATED, FAMILY, needs_fp8, only_rdna
from tiny_llama import fp8

if FAMILY == "rdna":
    from tinygrad.renderer.amd.dsl import EXEC_LO, NULL, s, ttmp, v

    from offline.emulator.machine import EXEC, Fault, GuardedMemory, Machine, Program, TensorMemory

    ins = one_wave.ins
    ADD = ins.s_add_u32 if EMULATED == "gfx1100" else ins.s_add_co_u32

pytestmark = only_rdna
wave, LANES, LANE = one_wave.wave, 32, np.arange(32)
IS_GFX11 = EMULATED == "gfx1100"
A, B, C, D = 8, 24, 40, 72  # the first registers of the operands
BASE, SIZE = 16, 4096  # the first scalar register of a buffer's descriptor, and its bytes


def range_of(registers, first, count):
    return registers[first : first + count - 1] if count > 1 else registers[first]


# ----------------------------------------------------------------------------------------------------------------------
# Matrix products


PRODUCTS = {  # the name: the types of A and B
    "f32_16x16x16_f16": ("f16", "f16"), "f32_16x16x16_bf16": ("bf16", "bf16"), "i32_16x16x16_iu8": ("i8", "u8"),
    "f32_16x16x16_fp8_fp8": ("fp8", "fp8"), "f32_16x16x16_fp8_bf8": ("fp8", "bf8"),
    "f32_16x16x16_bf8_fp8": ("bf8", "fp8"), "f32_16x16x16_bf8_bf8": ("bf8", "bf8"),
}  # fmt: skip
TORCH = {
    "f16": torch.float16, "bf16": torch.bfloat16, "fp8": fp8.OCP.forward, "bf8": fp8.OCP.gradient,
    "i8": torch.int8, "u8": torch.uint8,
}  # fmt: skip


def codes(values, kind):
    """(bytes of numbers of a type, their values as float64)"""
    values = torch.from_numpy(values)
    if kind in ("i8", "u8"):
        values = (100 * values).round().clamp(-128 if kind == "i8" else 0, 127 if kind == "i8" else 255)
    numbers = values.to(TORCH[kind])
    return numbers.contiguous().view(torch.uint8).numpy().reshape(*values.shape, -1), numbers.double().numpy()


@pytest.mark.parametrize("third", ["registers", 0, 2])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_matrix_product(name, third, wave):
    """Each number has its own value, so that a wrong row, column, element of k or part of a register is seen."""
    kinds = PRODUCTS[name]
    if IS_GFX11 and "8_" in name:
        pytest.skip("gfx1100 multiplies no FP8")
    random, is_whole = np.random.default_rng(1), name.startswith("i32")
    k_of = np.arange(16)[None].repeat(LANES, 0) if IS_GFX11 else 8 * (LANE[:, None] // 16) + np.arange(8)
    values = {}
    for first, kind in ((A, kinds[0]), (B, kinds[1])):
        bytes_, values[first] = codes(random.normal(size=(16, 16)), kind)
        words = words_of(bytes_[LANE[:, None] % 16, k_of].reshape(LANES, -1))
        wave.vector[first : first + words.shape[1]] = words.T
    i = np.arange(8)
    row = 2 * i[None] + LANE[:, None] // 16 if IS_GFX11 else i[None] + 8 * (LANE[:, None] // 16)
    c = np.rint(100 * random.normal(size=(16, 16))) if third == "registers" else np.full((16, 16), float(third))
    source = third if is_whole or third == 0 else 2.0
    if third == "registers":
        wave.vector[C : C + 8] = words_of(c[row, LANE[:, None] % 16].astype(np.int32 if is_whole else np.float32).T)
        source = v[C : C + 7]
    width = (4 if IS_GFX11 else 2) * (2 if kinds[0] in ("f16", "bf16") else 1)
    fields = dict(neg=1) if is_whole else {}  # the first operand has signs
    inst = getattr(ins, f"v_wmma_{name}")(v[D : D + 7], range_of(v, A, width), range_of(v, B, width), source, **fields)
    wave.scalar[EXEC] = 0x0F0F0F0F  # which matrix instructions ignore
    run(wave, inst)
    result = wave.vector[D : D + 8].view(np.int32 if is_whole else np.float32).T
    expected = values[A] @ values[B].T + c
    np.testing.assert_allclose(result, expected[row, LANE[:, None] % 16], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not IS_GFX11, reason="gfx1201 has no copies of the operands")
def test_halves_of_the_wave_that_do_not_agree_give_none(wave):
    wave.vector[A : A + 8] = wave.vector[B : B + 8] = 0x3C003C00
    wave.vector[A, 17] = 0x3C004000  # row 1 in the second half
    run(wave, ins.v_wmma_f32_16x16x16_f16(v[D : D + 7], v[A : A + 7], v[B : B + 7], 0))
    result = wave.vector[D : D + 8].view(np.float32).T
    row = 2 * np.arange(8)[None] + LANE[:, None] // 16
    assert (np.isnan(result) == (row == 1)).all() and (result[row != 1] == 16).all()


@pytest.mark.parametrize("fields", [dict(neg=1), dict(neg_hi=1), dict(clmp=1), dict(opsel=4)])
def test_a_field_that_is_not_heeded_is_refused(fields, wave):
    width = 8 if IS_GFX11 else 4
    operands = v[D : D + 7], range_of(v, A, width), range_of(v, B, width), v[C : C + 7]
    with pytest.raises(NotImplementedError, match="v_wmma_f32_16x16x16_f16.* is not emulated"):
        run(wave, ins.v_wmma_f32_16x16x16_f16(*operands, **fields))


# ----------------------------------------------------------------------------------------------------------------------
# Memory and LDS


@pytest.fixture
def memory(wave):
    """Random bytes, which scalar registers 16 to 19 describe."""
    memory = GuardedMemory(SIZE)
    held = np.ctypeslib.as_array(ctypes.cast(memory.address, ctypes.POINTER(ctypes.c_uint8)), (SIZE,))
    held[:] = np.random.default_rng(2).integers(0, 256, SIZE)
    wave.scalar[BASE : BASE + 4] = memory.address & 0xFFFFFFFF, memory.address >> 32, SIZE, 0x31027000
    wave.keep = memory
    return held


LOADS = {
    "u8": np.uint8, "i8": np.int8, "u16": np.uint16, "i16": np.int16, "d16_u8": np.uint8, "d16_hi_u8": np.uint8,
    "d16_i8": np.int8, "d16_hi_i8": np.int8, "d16_b16": np.uint16, "d16_hi_b16": np.uint16, "b32": "1u4",
    "b64": "2u4", "b96": "3u4", "b128": "4u4",
}  # fmt: skip
STORES = ["b8", "d16_hi_b8", "b16", "d16_hi_b16", "b32", "b64", "b96", "b128"]
BEFORE = 0x0D0C0B0A
KINDS = ["buffer", "global", "flat", "scratch", "ds"]
FAR = 8 if EMULATED == "gfx1100" else 100_000  # the offset of an instruction, which has 12, 13, 16 or 24 bits


def count_of(name):
    return max(1, int(re.search(r"\d+$", name)[0]) // 32)


def ds_name(kind, name):
    """Return the name of an access to LDS, whose parts stand in another order."""
    parts = re.fullmatch(r"(d16_)?(hi_)?(\w+)", name)
    number = parts[3].replace("b16", "u16") if kind == "load" and parts[1] else parts[3]
    return f"ds_{kind}_{number}" + ("_d16" if parts[1] else "") + ("_hi" if parts[2] else "")


def inst_of(where, kind, name, offset):
    """Return an access of the registers from D on, at what the registers from A on hold, plus an offset."""
    data = range_of(v, D, count_of(name))
    address = v[A : A + 1] if where == "flat" or where == "global" and not IS_GFX11 else v[A]
    if where == "ds":
        field = dict(vdst=data) if kind == "load" else dict(data0=data)
        return getattr(ins, ds_name(kind, name))(addr=address, offset0=offset, **field)
    function = getattr(ins, f"{where}_{kind}_{name}")
    if where == "buffer" and IS_GFX11:
        return function(data, address, s[BASE : BASE + 3], NULL, offen=1, offset=offset)
    if where == "buffer":
        return function(data, address, offen=1, rsrc=BASE, ioffset=offset)
    own = "data" if IS_GFX11 else "vsrc"
    field = {"vdst" if kind == "load" else own: data, "addr" if IS_GFX11 else "vaddr": address}
    field["offset" if IS_GFX11 else "ioffset"] = offset
    saddr = s[BASE : BASE + 1] if where == "global" else NULL
    return function(saddr=saddr, **field, **(dict(sve=1) if where == "scratch" else {}))


def prepare(wave, memory, where, offset):
    """Point the registers from A on at places that are no multiples of 4. Return (places, the bytes there, LDS)."""
    places = (23 if where != "ds" else 19) * np.random.default_rng(7).permutation(LANES) + 11
    wave.scalar[EXEC] = 0xFFFFFFF0
    if where == "scratch":  # of which each lane has its own part
        wave.take_scratch(64)
        wave.scalar[259], wave.buffers[4] = 64, wave.scratch.contents.address
        held = np.ctypeslib.as_array((ctypes.c_uint8 * (64 * LANES)).from_address(wave.buffers[4]))
        held[:] = memory[: len(held)]
        wave.vector[A] = 11 - offset & 0xFFFFFFFF
        return 64 * LANE + 11, held, None
    if where == "ds":
        lds = GuardedMemory(1024)
        lds.bytes[:] = memory[:1024]
        wave.vector[A] = places - offset
        return places, lds.bytes, lds
    address = int(wave.scalar[BASE]) | int(wave.scalar[BASE + 1]) << 32
    if where == "buffer":
        wave.scalar[BASE : BASE + 2] = address - offset & 0xFFFFFFFF, address - offset >> 32
        wave.scalar[BASE + 2] += offset
        wave.vector[A] = places
    elif where == "global":
        wave.scalar[BASE : BASE + 2] = address - offset & 0xFFFFFFFF, address - offset >> 32
        wave.vector[A] = places
    else:
        at = address + places.astype(np.int64) - offset
        wave.vector[A], wave.vector[A + 1] = at & 0xFFFFFFFF, at >> 32
    return places, memory, None


@pytest.mark.parametrize("where", KINDS)
@pytest.mark.parametrize("name", LOADS)
def test_a_load(name, where, wave, memory):
    """At odd addresses. A load of 16 bits or fewer may leave the other half of the register."""
    offset = {"ds": 8, "buffer": FAR, "global": FAR}.get(where, -8)
    places, there, lds = prepare(wave, memory, where, offset)
    wave.vector[D : D + 4] = BEFORE
    run(wave, inst_of(where, "load", name, offset), lds=lds)
    dtype = np.dtype(LOADS[name])
    count, kind = (dtype.shape[0], np.dtype(np.uint32)) if dtype.shape else (1, dtype)
    for lane, i in itertools.product(range(LANES), range(4)):
        expected = BEFORE
        if lane >= 4 and i < count:
            read = int(there[places[lane] :][: count * kind.itemsize].copy().view(kind)[i]) & 0xFFFFFFFF
            low, high = BEFORE & 0xFFFF0000 | read & 0xFFFF, BEFORE & 0xFFFF | read << 16 & 0xFFFF0000
            expected = high if "hi" in name else low if "d16" in name else read
        assert wave.vector[D + i, lane] == expected, (lane, i)


@pytest.mark.parametrize("where", KINDS)
@pytest.mark.parametrize("name", STORES)
def test_a_store(name, where, wave, memory):
    name = {"d16_hi_b8": "b8_d16_hi", "d16_hi_b16": "b16_d16_hi"}.get(name, name) if where == "ds" else name
    offset = {"ds": 8, "buffer": FAR, "global": FAR}.get(where, -8)
    places, there, lds = prepare(wave, memory, where, offset)
    data = np.random.default_rng(8).integers(0, 2**32, (4, LANES))
    wave.vector[D : D + 4] = data
    expected = there.copy()
    nbytes = int(re.search(r"b(\d+)", name)[1]) // 8
    for lane in range(4, LANES):
        given = data[:, lane].astype(np.uint32).view(np.uint8)[2 * ("hi" in name) :]
        expected[places[lane] :][:nbytes] = given[:nbytes]
    inst = inst_of(where, "store", name, offset) if where != "ds" else getattr(ins, f"ds_store_{name}")(
        addr=v[A], data0=range_of(v, D, max(1, nbytes // 4)), offset0=offset
    )  # fmt: skip
    run(wave, inst, lds=lds)
    assert (there == expected).all()


@pytest.mark.parametrize("name", ["load", "store"])
def test_the_end_of_a_buffer(name, wave, memory):
    """Each word counts by itself; what lies after the end reads as 0, and is not written."""
    wave.scalar[BASE + 2] = 64
    wave.vector[A], wave.vector[D : D + 4], wave.scalar[EXEC] = 56, 7, 1
    before = memory.copy()
    run(wave, inst_of("buffer", name, "b128", 0))
    if name == "load":
        assert wave.vector[D : D + 4, 0].tolist() == [*before[56:64].view(np.uint32), 0, 0]
    else:
        before[56:64].view(np.uint32)[:] = 7
        assert (memory == before).all()


def test_offsets_of_a_lane_are_added_in_32_bits(wave, memory):
    """A compiler splits an offset so that the register holds a negative number."""
    wave.vector[A] = 8 - FAR & 0xFFFFFFFF
    run(wave, inst_of("buffer", "load", "b32", FAR))
    assert (wave.vector[D] == memory[8:12].view(np.uint32)).all()


def test_a_buffer_with_an_index_is_named(wave, memory):
    fields = dict(offen=1, idxen=1)
    operands = (v[D], v[A : A + 1], s[BASE : BASE + 3], NULL) if IS_GFX11 else (v[D], v[A : A + 1])
    with pytest.raises(NotImplementedError, match="buffer_load_b32.* is not emulated"):
        run(wave, ins.buffer_load_b32(*operands, **fields))


@pytest.mark.parametrize("words, stride", [(1, 1), (2, 1), (1, 64), (2, 64)])
def test_pairs_of_lds(words, stride, wave):
    """Two places of each lane are exchanged: read as a pair, and written as a pair in the other order."""
    lds = GuardedMemory(2048)
    lds.bytes[:] = np.random.default_rng(9).integers(0, 256, 2048)
    before, other = lds.bytes.copy(), 4 * words * stride
    places = (8 if stride == 1 else 4) * words * np.random.default_rng(11).permutation(LANES)
    wave.vector[A], wave.scalar[EXEC] = places, 0xFFFFFFF0
    size = f"2addr{'_stride64' if stride > 1 else ''}_b{32 * words}"
    pair = range_of(v, D + words, words), range_of(v, D, words)
    run(
        wave,
        getattr(ins, f"ds_load_{size}")(addr=v[A], vdst=v[D : D + 2 * words - 1], offset1=1),
        getattr(ins, f"ds_store_{size}")(addr=v[A], data0=pair[0], data1=pair[1], offset1=1),
        lds=lds,
    )
    expected = before.copy()
    for place in places[4:]:
        first, second = slice(place, place + 4 * words), slice(place + other, place + other + 4 * words)
        expected[first], expected[second] = before[second], before[first]
    assert (lds.bytes == expected).all() and (expected != before).any()


ATOMICS = {  # (old, given) -> new, of a type
    "swap_b32": ("u4", lambda old, given: given), "add_u32": ("u4", lambda old, given: old + given),
    "sub_u64": ("u8", lambda old, given: old - given), "min_i32": ("i4", min), "max_i64": ("i8", max),
    "min_u32": ("u4", min), "max_u32": ("u4", max), "and_b32": ("u4", lambda old, given: old & given),
    "or_b64": ("u8", lambda old, given: old | given), "xor_b32": ("u4", lambda old, given: old ^ given),
    "add_f32": ("f4", lambda old, given: old + given), "cmpswap_b32": ("u4", None),
}  # fmt: skip


@pytest.mark.parametrize("where", ["buffer", "global"])
@pytest.mark.parametrize("returns", [0, 1])
@pytest.mark.parametrize("name", ATOMICS)
@np.errstate(over="ignore")
def test_an_atomic(name, returns, where, wave, memory):
    """Three lanes on one place, one after the other."""
    dtype, new = np.dtype(ATOMICS[name][0]), ATOMICS[name][1]
    random = np.random.default_rng(5)
    given = random.integers(0, 2**31, (LANES, 2)).astype(dtype) * dtype.type(3)
    old = given[20, 0].copy()
    if not new:
        given[5, 1], given[6, 1], given[9, 1] = old, old, given[5, 0]  # the second of them finds another value
    memory[32 : 32 + dtype.itemsize] = old.reshape(1).view(np.uint8)
    wave.vector[A], wave.scalar[EXEC] = 32, 1 << 5 | 1 << 6 | 1 << 9
    words = words_of(given).reshape(LANES, -1)
    wave.vector[D : D + words.shape[1]], wave.vector[B : B + 2] = words.T, 99
    width = dtype.itemsize // 4
    data = range_of(v, D, width * (1 + (not new)))
    fields = {("glc" if IS_GFX11 else "th"): returns}
    if where == "buffer":
        rest = dict(srsrc=s[BASE : BASE + 3], soffset=NULL) if IS_GFX11 else dict(rsrc=BASE)
        run(wave, getattr(ins, f"buffer_atomic_{name}")(data, v[A], offen=1, **rest, **fields))
    else:
        fields |= dict(data=data, addr=v[A]) if IS_GFX11 else dict(vsrc=data, vaddr=v[A : A + 1])
        fields |= dict(saddr=s[BASE : BASE + 1], vdst=range_of(v, B, width))
        run(wave, getattr(ins, f"global_atomic_{name}")(**fields))
    to = D if where == "buffer" else B
    for lane in (5, 6, 9):
        returned = wave.vector[to : to + width, lane].copy().view(dtype)[0]
        untouched = given[lane, 0] if where == "buffer" else np.full(width, 99, np.uint32).view(dtype)[0]
        assert returned == (old if returns else untouched)
        old = new(old, given[lane, 0]) if new else given[lane, 0] if old == given[lane, 1] else old
    assert memory[32 : 32 + dtype.itemsize].view(dtype)[0] == old


# ----------------------------------------------------------------------------------------------------------------------
# Lanes

ROW = LANE // 16 * 16
DPP = {  # the control: the lane that each lane reads, -1 if there is none
    0x155: ROW + 5, 0x161: LANE ^ 1, 0x168: LANE ^ 8, 0x16F: LANE ^ 15, 0xB1: LANE ^ 1,
    0x111: np.where(LANE % 16 > 0, LANE - 1, -1), 0x101: np.where(LANE % 16 < 15, LANE + 1, -1),
    0x140: ROW + 15 - LANE % 16,
}  # fmt: skip


@pytest.mark.parametrize("fetches", [0, 1])
@pytest.mark.parametrize("zeros", [0, 1])
@pytest.mark.parametrize("control", DPP)
def test_dpp(control, zeros, fetches, wave):
    """In place: no lane is written before it is read. Lanes that EXEC switches off are read if `fi` is set alone."""
    active = LANE % 5 != 2
    wave.vector[D], wave.scalar[EXEC] = 1000 + LANE, int((1 << LANE[active]).sum())
    word = 0x7E0002FA | D << 17
    run(wave, Words(word, D | control << 8 | fetches << 18 | zeros << 19 | 0xFF << 24))  # v_mov_b32_dpp
    source = DPP[control]
    exists = (source >= 0) & (active[source] | bool(fetches))
    read = np.where(exists, 1000 + source, 0 if zeros else 1000 + LANE)
    assert (wave.vector[D] == np.where(active, read, 1000 + LANE)).all()


def long_dpp(inst, source, control):
    """Return an instruction of 64 bits, the first operand of which comes from another lane or is 0."""
    low, high = np.frombuffer(inst.to_bytes(), np.uint32)
    return Words(low, int(high) & ~0x1FF | 250, source | control << 8 | 1 << 19 | 0xFF << 24)


@pytest.mark.parametrize("control", DPP)
def test_dpp_in_instructions_of_64_bits(control, wave):
    """A sum with a carry, in place; and a difference with the sign of the moved operand changed."""
    numbers = np.random.default_rng(4).integers(2**31, 2**32, LANES)
    wave.vector[D], wave.vector[B] = numbers, words_of(np.arange(LANES, dtype=np.float32))
    add = ins.v_add_co_u32(v[D], s[5], v[0], v[D])
    subtract = ins.v_sub_f32_e64(v[C], v[0], 1.0, neg=1)
    run(wave, long_dpp(add, D, control), long_dpp(subtract, B, control))
    source = DPP[control]
    moved = np.where(source >= 0, numbers[source], 0)
    assert (wave.vector[D] == (numbers + moved & 0xFFFFFFFF)).all()
    assert (int(wave.scalar[5]) >> LANE & 1 == numbers + moved >> 32).all()
    assert (f(wave.vector[C]) == -np.where(source >= 0, source, 0) - 1).all()


@pytest.mark.parametrize("select", ["literals", "registers", "constants"])
@pytest.mark.parametrize("name", ["v_permlane16_b32", "v_permlanex16_b32"])
def test_lanes_of_a_row(name, select, wave):
    """Lane n of a row gets that of the row, or of the other one, which four bits of two operands tell. In place."""
    wave.vector[D] = 1000 + LANE
    wave.scalar[5], wave.scalar[6] = 0x13579BDF, 0x76543210
    low, high = {"literals": (0x13579BDF,) * 2, "registers": (0x13579BDF, 0x76543210), "constants": (-5, 7)}[select]
    operands = (s[5], s[6]) if select == "registers" else (low, high)
    run(wave, getattr(ins, name)(v[D], v[D], *operands))
    selector = (high & 0xFFFFFFFF) << 32 | low & 0xFFFFFFFF
    which = np.array([selector >> 4 * i & 15 for i in range(16)])[LANE % 16]
    assert (wave.vector[D] == 1000 + which + (ROW if name == "v_permlane16_b32" else 16 - ROW)).all()


# ----------------------------------------------------------------------------------------------------------------------
# Arithmetic


@pytest.mark.parametrize("clamps", [0, 1])
@pytest.mark.parametrize("kind", ["u16", "i16"])
@pytest.mark.parametrize("operation", ["add", "sub"])
def test_packed_sums(operation, kind, clamps, wave):
    """Of the halves that the instruction selects: the low one of the second operand for both."""
    random, dtype = np.random.default_rng(3), np.dtype(kind.replace("u16", "u2").replace("i16", "i2"))
    a, b = random.integers(0, 2**16, (2, LANES, 2)).astype(np.uint16).view(dtype)
    wave.vector[A], wave.vector[B], wave.vector[D] = words_of(a).ravel(), words_of(b).ravel(), 7
    wave.scalar[EXEC] = 0xFFFFFFF0
    run(wave, getattr(ins, f"v_pk_{operation}_{kind}")(v[D], v[A], v[B], opsel_hi=1, clmp=clamps))
    first, second = a.astype(int), b[:, :1].astype(int)
    exact = first + second if operation == "add" else first - second
    limits = np.iinfo(dtype)
    expected = (exact.clip(limits.min, limits.max) if clamps else exact).astype(dtype)
    assert (wave.vector[D, 4:] == words_of(expected).ravel()[4:]).all() and (wave.vector[D, :4] == 7).all()


def test_a_packed_clamp_of_other_instructions_is_refused(wave):
    with pytest.raises(NotImplementedError, match="v_pk_mul_lo_u16.* is not emulated"):
        run(wave, ins.v_pk_mul_lo_u16(v[D], v[A], v[B], clmp=1))


def f(registers):
    return registers.view(np.float32)


DUAL = {
    "the second reads what the first writes": ("MUL_F32", "ADD_F32", 0, 1, 2, 0, 3, 5),
    "the first reads what the second writes": ("MUL_F32", "ADD_F32", 0, 1, 1, 2, 3, 5),
    "exchanged": ("MOV_B32", "MOV_B32", 0, 1, 1, 0, 3, 5),
    "a sum of its own": ("FMAC_F32", "SUB_F32", 0, 1, 2, 0, 3, 0),
    "by registers only the second operand": ("ADD_F32", "MUL_F32", 4, 7, 2, 3, 3, 4),
}


@pytest.mark.parametrize("case", DUAL.values(), ids=DUAL.keys())
def test_two_instructions_at_once(case, wave):
    """Both read before one writes."""
    opx, opy, x, y, x0, y0, x1, y1 = case
    wave.vector[:9] = words_of(np.random.default_rng(4).integers(1, 100, (9, LANES)).astype(np.float32))
    before = f(wave.vector[:9]).copy()
    wave.scalar[EXEC] = 0xFFFFFFF0
    ops = [getattr(ins.VOPDOp, f"V_DUAL_{name}") for name in (opx, opy)]
    run(wave, ins.VOPD(*ops, v[x], v[y], v[x0], v[y0], v[x1], v[y1]))
    results = {
        "MUL_F32": lambda old, a, b: a * b, "ADD_F32": lambda old, a, b: a + b, "SUB_F32": lambda old, a, b: a - b,
        "MOV_B32": lambda old, a, b: a, "FMAC_F32": lambda old, a, b: old + a * b,
    }  # fmt: skip
    expected = before.copy()
    for op, to, first, second in ((opx, x, x0, x1), (opy, y, y0, y1)):
        expected[to, 4:] = results[op](before[to], before[first], before[second])[4:]
    assert (f(wave.vector[:9]) == expected).all()


def test_registers_whose_numbers_are_those_of_no_operand(wave):
    wave.vector[233:240] = words_of(np.random.default_rng(4).integers(1, 100, (7, LANES)).astype(np.float32))
    sums = f(wave.vector[234]) + f(wave.vector[235]), f(wave.vector[236]) + f(wave.vector[237])
    op = ins.VOPDOp.V_DUAL_ADD_F32
    run(
        wave,
        ins.v_add_f32_e32(v[233], v[234], v[235]),
        ins.VOPD(op, op, v[238], v[239], v[236], v[234], v[237], v[235]),
    )
    assert (f(wave.vector[233]) == sums[0]).all() and (f(wave.vector[238]) == sums[1]).all()
    assert (wave.vector[239] == wave.vector[233]).all()


def test_a_literal_of_two_instructions_at_once(wave):
    wave.vector[2], wave.vector[3] = words_of(np.full((2, LANES), 3, np.float32))
    head = ins.VOPD(ins.VOPDOp.V_DUAL_FMAAK_F32, ins.VOPDOp.V_DUAL_MUL_F32, v[0], v[1], v[2], v[2], v[3], v[3])
    low, high = np.frombuffer(head.to_bytes(), np.uint32)
    run(wave, Words(low, int(high) & ~0x1FF | 255, words_of(np.float32([1.5]))[0]))  # x: 3 * 3 + 1.5; y: 1.5 * 3
    assert (f(wave.vector[0]) == 10.5).all() and (f(wave.vector[1]) == 4.5).all()


HALVES = [(to, a, b) for to in (0, 1) for a in (0, 1) for b in (0, 1)]  # low or high: of the result and two operands


def halves_of(random, count, is_float):
    """Return (registers (count, LANES) of random halves, the halves (count, LANES, 2))."""
    halves = random.normal(size=(count, LANES, 2)).astype(np.float16).view(np.uint16)
    if not is_float:
        halves = random.integers(0, 2**16, halves.shape).astype(np.uint16)
    return words_of(halves).reshape(count, LANES), halves


OF_HALVES = {  # the name: (whether the numbers are floats, the first and the second operand -> result)
    "v_add_f16": (True, lambda a, b: a + b), "v_mul_f16": (True, lambda a, b: a * b),
    "v_and_b16": (False, lambda a, b: a & b), "v_or_b16": (False, lambda a, b: a | b),
    "v_xor_b16": (False, lambda a, b: a ^ b), "v_lshlrev_b16": (False, lambda a, b: b << (a & 15)),
    "v_lshrrev_b16": (False, lambda a, b: b >> (a & 15)), "v_add_nc_u16": (False, lambda a, b: a + b),
    "v_mov_b16": (False, lambda a, b: a),
}  # fmt: skip


FORMS = [(name, "e64") for name in OF_HALVES] + [(name, "e32") for name in ("v_add_f16", "v_mul_f16", "v_mov_b16")]


@pytest.mark.parametrize("to, a, b", HALVES)
@pytest.mark.parametrize("name, form", FORMS)
def test_halves_of_registers(name, to, a, b, form, wave):
    """Instructions with 16 bits name the half of a register: the short form by 128, the long one by bits."""
    is_float, function = OF_HALVES[name]
    full = name if hasattr(ins, name) else f"{name}_{form}"  # what has one form has no suffix
    words, halves = halves_of(np.random.default_rng(6), 3, is_float)
    wave.vector[A], wave.vector[B], wave.vector[D] = words
    wave.scalar[EXEC] = 0xFFFFFFF0
    if form == "e32":
        registers = v[D + 128 * to], v[A + 128 * a], v[B + 128 * b]
        run(wave, getattr(ins, full)(*registers[: 2 if name == "v_mov_b16" else 3]))
    else:
        registers = (v[D], v[A], v[B])[: 2 if name == "v_mov_b16" else 3]
        run(wave, getattr(ins, full)(*registers, opsel=8 * to | 2 * b | a))
    first, second = (halves[i, :, half] for i, half in ((0, a), (1, b)))
    result = function(*(x.view(np.float16) if is_float else x for x in (first, second)))
    expected = halves[2].copy()
    expected[4:, to] = result.view(np.uint16)[4:]
    assert (wave.vector[D] == words_of(expected).ravel()).all()


@pytest.mark.parametrize("to, a, b", HALVES)
def test_a_choice_of_halves(to, a, b, wave):
    words, halves = halves_of(np.random.default_rng(6), 3, False)
    wave.vector[A], wave.vector[B], wave.vector[D] = words
    wave.scalar[5] = 0x5A3C96F0
    run(wave, ins.v_cndmask_b16(v[D], v[A], v[B], s[5], opsel=8 * to | 2 * b | a))
    expected = halves[2].copy()
    expected[:, to] = np.where(0x5A3C96F0 >> LANE & 1, halves[1, :, b], halves[0, :, a])
    assert (wave.vector[D] == words_of(expected).ravel()).all()


@pytest.mark.parametrize("half", [0, 1])
def test_conversions_of_halves(half, wave):
    """What is not written of a register stays."""
    words, halves = halves_of(np.random.default_rng(6), 1, True)
    numbers = np.random.default_rng(7).normal(size=LANES).astype(np.float32)
    wave.vector[A], wave.vector[B], wave.vector[D] = words[0], words_of(numbers), 0x0D0C0B0A
    run(wave, ins.v_cvt_f32_f16_e32(v[C], v[A + 128 * half]), ins.v_cvt_f16_f32_e32(v[D + 128 * half], v[B]))
    assert (f(wave.vector[C]) == halves[0, :, half].view(np.float16)).all()
    written = wave.vector[D].view(np.uint16).reshape(LANES, 2)
    assert (written[:, half].view(np.float16) == numbers.astype(np.float16)).all()
    assert (written[:, 1 - half] == (0x0D0C if half == 0 else 0x0B0A)).all()


@pytest.mark.parametrize("to, a, b", HALVES)
def test_mixed_products(to, a, b, wave):
    """Of a half, a half and fp32 from a register, into a half: v_fma_mixlo_f16 and v_fma_mixhi_f16."""
    words, halves = halves_of(np.random.default_rng(6), 3, True)
    numbers = np.random.default_rng(7).normal(size=LANES).astype(np.float32)
    wave.vector[A], wave.vector[B], wave.vector[D] = words
    wave.vector[C] = words_of(numbers)
    inst = ins.v_fma_mixhi_f16 if to else ins.v_fma_mixlo_f16
    run(wave, inst(v[D], v[A], v[B], v[C], opsel=2 * b | a, opsel_hi=3, opsel_hi2=0))
    first, second = (halves[i, :, half].view(np.float16).astype(np.float64) for i, half in ((0, a), (1, b)))
    expected = halves[2].copy()
    expected[:, to] = (first * second + numbers).astype(np.float32).astype(np.float16).view(np.uint16)
    assert (wave.vector[D] == words_of(expected).ravel()).all()


@pytest.mark.parametrize("name", ["add_nc", "sub_nc", "subrev_nc"])
@pytest.mark.parametrize("clamps", [0, 1])
def test_whole_sums(name, clamps, wave):
    a, b = np.random.default_rng(8).integers(0, 2**32, (2, LANES))
    wave.vector[A], wave.vector[B] = a, b
    run(wave, getattr(ins, f"v_{name}_u32_e64")(v[D], v[A], v[B], clmp=clamps))
    exact = {"add_nc": a + b, "sub_nc": a - b, "subrev_nc": b - a}[name]
    assert (wave.vector[D] == (exact.clip(0, 2**32 - 1) if clamps else exact & 0xFFFFFFFF)).all()


@pytest.mark.parametrize("flushes", [0, 3])
def test_subnormal_numbers_as_the_mode_says(flushes, wave):
    wave.vector[A] = 1  # 2^-149
    run(wave, ins.s_denorm_mode(flushes | 12), ins.v_add_f32_e32(v[D], v[A], v[A]))
    assert (wave.vector[D] == (2 if flushes else 0)).all()


def test_what_does_nothing(wave):
    names = ["buffer_gl0_inv", "buffer_gl1_inv"] if IS_GFX11 else ["global_inv", "global_wb", "global_wbinv"]
    names += [name for name in ("s_wait_loadcnt", "s_wait_dscnt", "s_waitcnt", "s_delay_alu") if hasattr(ins, name)]
    run(wave, ins.v_nop_e32(), *(getattr(ins, name)() for name in names), ins.v_mov_b32_e32(v[D], 5))
    assert (wave.vector[D] == 5).all()


CODES = 0x01020408 * LANE + 0x80C1F07E & 0xFFFFFFFF  # no two bytes of a lane are alike


@needs_fp8
@pytest.mark.parametrize("part", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["fp8", "bf8"])
@pytest.mark.parametrize("count", [1, 2])
def test_numbers_of_8_bits(count, kind, part, wave):
    """In the short form, and with each byte or half that the long one selects."""
    if count == 2 and part in (2, 3):
        return
    wave.vector[A], wave.vector[D : D + 3], wave.scalar[EXEC] = CODES, 7, 0x0FFFFFFF
    name = f"v_cvt_{'pk_' if count == 2 else ''}f32_{kind}"
    to = range_of(v, D, count)
    if part is None:
        run(wave, getattr(ins, f"{name}_e32")(to, v[A]))
    else:
        opsel = part if count == 2 else part >> 1 | (part & 1) << 1  # the bits of a byte are reversed
        run(wave, getattr(ins, f"{name}_e64")(to, v[A], opsel=opsel))
    shift = 8 * count * (part or 0)
    numbers = torch.arange(256, dtype=torch.uint8).view(TORCH[kind]).double().numpy()
    for i in range(count):
        np.testing.assert_array_equal(f(wave.vector[D + i])[:28], numbers[(CODES >> shift + 8 * i) & 255][:28])
    assert (wave.vector[D + count] == 7).all() and (wave.vector[D, 28:] == 7).all()


@pytest.mark.parametrize("inst", [
    lambda: Words(0x7E0002E9 | D << 17, A),  # v_mov_b32_dpp8
    lambda: Words(0xF0000000, 0, 0),  # an image
    lambda: ins.s_getreg_b32(s[0], 1),
    lambda: ins.s_round_mode(15),
])  # fmt: skip
def test_what_is_not_emulated_is_named(inst, wave):
    with pytest.raises(NotImplementedError, match=" is not emulated"):
        run(wave, inst())


# ----------------------------------------------------------------------------------------------------------------------
# Whole launches


def store():
    """Return the store of v[D] at the offset v[A] to the result, whose address is in s[20:21]."""
    fields = dict(addr=v[A], data=v[D]) if IS_GFX11 else dict(vaddr=v[A : A + 1], vsrc=v[D])
    return ins.global_store_b32(saddr=s[20:21], **fields)


def launch(instructions, result=None, grid=(1, 1, 1), n_waves=1, seed=3, scratch_bytes=0, **options):
    """Launch instructions, which find the address of the result in s[20:21]."""
    result = torch.zeros(1) if result is None else result
    memory = TensorMemory([("result", result)])
    code = Code([ins.s_load_b64(s[20:21], s[0:1]), *instructions])
    code.rsrc2, code.scratch_bytes = 7 << 7, scratch_bytes
    arguments = memory.address_of(result).to_bytes(8, "little")
    Machine(EMULATED, seed, **options).launch(Program(code, EMULATED), grid, arguments, memory, n_waves, 4)


def test_workgroups_and_waves_know_their_numbers():
    """Each of 2 x 3 x 2 workgroups of two waves stores its numbers at its own place."""
    result = torch.zeros(24, dtype=torch.int32)
    x, y, z, number, place = (s[n] for n in range(40, 45))
    if IS_GFX11:
        numbers = [ins.s_mov_b32(to, source) for to, source in ((x, s[2]), (y, s[3]), (z, s[4]))]
        numbers += [ins.v_readfirstlane_b32_e32(number, v[0]), ins.s_lshr_b32(number, number, 5)]
    else:
        numbers = [ins.s_mov_b32(x, ttmp[9]), ins.s_and_b32(y, ttmp[7], 0xFFFF), ins.s_lshr_b32(z, ttmp[7], 16)]
        numbers += [ins.s_bfe_u32(number, ttmp[8], 5 << 16 | 25)]
    launch([
        *numbers,
        ins.s_mul_i32(place, x, 3), ADD(place, place, y), ins.s_lshl_b32(place, place, 1), ADD(place, place, z),
        ins.s_lshl_b32(place, place, 1), ADD(place, place, number), ins.v_mov_b32_e32(v[D], place),
        ins.s_lshl_b32(place, place, 2), ins.v_mov_b32_e32(v[A], place), store(),
    ], result, (2, 3, 2), n_waves=2)  # fmt: skip
    assert result.tolist() == [*range(24)]


@pytest.mark.parametrize("offset", [-1, 64])
def test_private_memory_of_another_lane_is_a_fault(offset):
    own = inst_of("scratch", "store", "b32", 0)
    launch([ins.v_mov_b32_e32(v[A], 60), own], scratch_bytes=64)
    at = [ins.v_mov_b32_e32(v[A], offset), ins.s_mov_b32(EXEC_LO, 16), inst_of("scratch", "load", "u8", 0)]
    with pytest.raises(Fault, match=f"touches byte {64 * 4 + offset} of the wave's private memory, which has 2048"):
        launch(at, scratch_bytes=64)


def test_private_memory_that_was_not_written_is_told():
    """It holds something else in each of the runs that are compared."""
    read = [ins.v_mov_b32_e32(v[A], 0), inst_of("scratch", "load", "b32", 0)]
    with pytest.raises(Fault, match="it depends on registers or LDS that it has not written"):
        launch([*read, store()], scratch_bytes=64, is_thorough=True)


@pytest.mark.parametrize("waits, outcomes", [("after", {1}), ("nowhere", {0, 1}), ("before", {0, 1})])
def test_what_another_wave_stores_before_a_barrier(waits, outcomes):
    """Is read after it: unless there is none, or it is signalled before the store though waited for after it."""
    signal = [] if IS_GFX11 else [Words(0xBE804EC1)]  # s_barrier_signal -1
    wait = [ins.s_barrier() if IS_GFX11 else ins.s_barrier_wait(0xFFFF)]
    if IS_GFX11 and waits == "before":
        pytest.skip("gfx1100 signals and waits by one instruction")
    write = [ins.ds_store_b32(addr=v[A], data0=v[B])]
    if waits == "nowhere":
        signal, wait = [], []
    writes = [*signal, *write, *wait] if waits == "before" else [*write, *signal, *wait]
    reads = [*signal, *wait, ins.ds_load_b32(vdst=v[D], addr=v[A]), store()]
    words = sum(len(inst.to_bytes()) for inst in [*writes, ins.s_endpgm()]) // 4
    begin = [
        ins.v_readfirstlane_b32_e32(s[40], v[0]), ins.v_mov_b32_e32(v[A], 0), ins.v_mov_b32_e32(v[B], 1),
        ins.s_cmp_lg_u32(s[40], 0), ins.s_cbranch_scc1(words),
    ]  # fmt: skip
    seen = set()
    for seed in range(40):
        result = torch.zeros(1, dtype=torch.int32)
        launch([*begin, *writes, ins.s_endpgm(), *reads], result, n_waves=2, seed=seed)
        seen.add(max(result.item(), 0))  # LDS begins as -1
    assert seen == outcomes
