"""Instructions that machine.py executes in Python, beside their definition."""

import math

import pytest
import torch

from offline.emulator import CHIPS
from tests.offline.selection import EMULATED, FAMILY, needs_fp8, only_emulated
from tiny_llama import fp8

if EMULATED:
    from tinygrad.renderer.amd import decode_inst
    from tinygrad.renderer.amd.dsl import s, v

    from offline.emulator.machine import EXEC, FP16_OVFL, IN_PYTHON, Wave, scalars_of
    from tests.offline.emulated.one_wave import LANES, ins

pytestmark = [only_emulated, needs_fp8]
FORMATS = fp8.FNUZ if EMULATED == "gfx942" else fp8.OCP
CONVERSIONS = {  # {name of the instruction: what it rounds to}
    "v_cvt_pk_fp8_f32": FORMATS.forward, "v_cvt_pk_bf8_f32": FORMATS.gradient,
    "v_cvt_scalef32_pk_fp8_f32": FORMATS.forward, "v_cvt_scalef32_pk_bf8_f32": FORMATS.gradient,
}  # fmt: skip
if FAMILY == "rdna":
    CONVERSIONS = {name: dtype for name, dtype in CONVERSIONS.items() if "scalef32" not in name}


@pytest.fixture
def wave():
    wave = Wave(EMULATED)
    wave.scalar[:] = scalars_of(LANES)
    return wave


def execute(wave, name, *operands, **fields):
    """Executes an instruction, from its machine code."""
    inst = decode_inst(getattr(ins, name)(*operands, **fields).to_bytes().ljust(16, b"\0"), CHIPS[EMULATED].isa)
    IN_PYTHON[inst.op.name](inst)(wave)


def saturate(wave, on):
    execute(wave, "s_setreg_imm32_b32", s[0], FP16_OVFL, int(on))


def convert(wave, name, first, second, **fields):
    """Rounds first and second (LANES,) into v2, whose bytes (LANES, 4) it returns."""
    wave.vector[0], wave.vector[1] = (numbers.view(torch.int32).numpy() for numbers in (first, second))
    execute(wave, name, v[2], v[0], v[1], *[1.0] * ("scalef32" in name), **fields)
    return torch.from_numpy(wave.vector[2].view("uint8").reshape(LANES, 4).copy())


@pytest.mark.parametrize("saturates", [False, True])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_rounds_as_torch_does(name, saturates, wave):
    """At each value, half-way to the next, beside that, and at the ends of fp32."""
    dtype, largest = CONVERSIONS[name], torch.finfo(CONVERSIONS[name]).max
    values = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    values = values[values.isfinite()]
    values = torch.cat((values, 2 * values[-1:] - values[-2:-1]))
    middles = (values[1:] + values[:-1]) / 2
    beside = [torch.nextafter(middles, torch.tensor(to)) for to in (0.0, math.inf)]
    others = torch.tensor([2.0**-149, 2.0**-126, 1e-9, 7e4, 3e38, math.inf, math.nan])
    numbers = torch.cat((values, middles, *beside, others))
    numbers = torch.cat((numbers, -numbers, torch.zeros(-2 * len(numbers) % LANES)))
    saturate(wave, saturates)
    results = [convert(wave, name, chunk, chunk.flip(0)) for chunk in numbers.split(LANES)]
    assert all(torch.equal(bytes_[:, 0], bytes_[:, 1].flip(0)) for bytes_ in results)
    ours = torch.cat([bytes_[:, 0] for bytes_ in results]).view(dtype).double()
    expected = (numbers.clamp(-largest, largest) if saturates else numbers).to(dtype).double()
    if dtype == torch.float8_e4m3fn and not saturates:
        expected[numbers.abs() > 464] = math.nan  # the middle between the largest and NaN; torch may saturate
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
    if dtype in fp8.OCP:  # the others have neither -0 nor a sign of NaN
        assert torch.equal(ours.signbit(), numbers.signbit())


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_writes_one_half_of_the_active_lanes(name, half, wave):
    wave.vector[2] = 0x0D0C0B0A
    wave.scalar[EXEC : EXEC + 2] = 0x0000FFFF, 0xFF000000
    one = torch.ones(LANES)
    result = convert(wave, name, one, -one, opsel=8 * half)
    expected = torch.tensor([10, 11, 12, 13], dtype=torch.uint8).repeat(LANES, 1)
    active = [lane for lane in (*range(16), *range(56, 64)) if lane < LANES]
    expected[active, 2 * half : 2 * half + 2] = torch.tensor([1.0, -1.0]).to(CONVERSIONS[name]).view(torch.uint8)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_of_a_scalar_register_and_a_constant(name, wave):
    wave.scalar[5] = torch.tensor(-1.5).view(torch.int32).item() & 0xFFFFFFFF
    execute(wave, name, v[2], s[5], 4.0, *[1.0] * ("scalef32" in name))
    bytes_ = torch.from_numpy(wave.vector[2].view("uint8").reshape(LANES, 4)[:, :2].copy())
    assert (bytes_.view(CONVERSIONS[name]).float() == torch.tensor([-1.5, 4.0])).all()


@pytest.fixture
def every_third_lane_off(wave):
    """Which lanes are active: v1 has 100 and the number of each lane, v2 has 7."""
    active = [lane % 3 > 0 for lane in range(LANES)]
    for half in range(2):
        wave.scalar[EXEC + half] = sum(on << lane for lane, on in enumerate(active[32 * half : 32 * half + 32]))
    wave.vector[1], wave.vector[2] = range(100, 100 + LANES), 7
    return active


def assert_read(wave, active, read):
    """v2 has v1 of other lanes: 0 of those that are not active, which get nothing."""
    values = [100 + lane if active[lane] else 0 for lane in range(LANES)]
    assert wave.vector[2].tolist() == [values[read(lane)] if active[lane] else 7 for lane in range(LANES)]


@pytest.mark.parametrize("offsets, read", [
    ((0x1F, 0x40), lambda lane: lane ^ 16), ((0x1F, 0x04), lambda lane: lane ^ 1),
    ((0x10, 0x00), lambda lane: lane & 48), ((0xFF, 0x00), lambda lane: lane | 7),
    ((0b00_01_10_11, 0x80), lambda lane: lane ^ 3),
])  # fmt: skip
def test_a_swizzle_reads_from_other_lanes(wave, every_third_lane_off, offsets, read):
    execute(wave, "ds_swizzle_b32", vdst=v[2], addr=v[1], offset0=offsets[0], offset1=offsets[1])
    assert_read(wave, every_third_lane_off, read)


@pytest.mark.parametrize("beyond", [0, 4 * 64, 3])
def test_a_permutation_heeds_six_bits_of_its_address(wave, every_third_lane_off, beyond):
    """Triton gives the number of the thread in the workgroup."""
    wave.vector[0] = [4 * (lane ^ 32) + beyond for lane in range(LANES)]
    execute(wave, "ds_bpermute_b32", vdst=v[2], addr=v[0], data0=v[1], offset0=8)
    assert_read(wave, every_third_lane_off, lambda lane: ((lane ^ 32) + 2) % LANES)
