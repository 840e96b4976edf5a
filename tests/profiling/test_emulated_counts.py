"""Cache lines, bank conflicts and instructions in cases that can be counted by hand; the page is its JSON's."""

import importlib.util

import numpy as np
import pytest

from measure.results import read_result
from profiling.emulator import counts

LANES = np.arange(counts.LANES)
ALL = np.ones(counts.LANES, bool)


@pytest.mark.parametrize(
    ("stride", "width", "line_bytes", "lines"),
    [
        (4, 4, 128, 2),
        (4, 4, 64, 4),
        (16, 16, 128, 8),
        (128, 4, 128, 64),  # an element in each line
        (64, 4, 128, 32),
        (0, 4, 128, 1),
    ],
)
def test_lines(stride, width, line_bytes, lines):
    fewest = 1 if stride == 0 else -(-len(LANES) * width // line_bytes)
    assert counts.lines_touched(LANES * stride, width, line_bytes) == (lines, fewest)


def test_an_access_across_the_end_of_a_line_touches_both():
    assert counts.lines_touched(np.array([124]), 8, 128) == (2, 1)
    assert counts.lines_touched(np.array([120]), 8, 128) == (1, 1)


def test_no_lane_touches_nothing():
    assert counts.lines_touched(LANES[:0], 4, 128) == (0, 0)
    assert counts.bank_conflicts(LANES * 128, ~ALL, 4, "read", 32) == 0


@pytest.mark.parametrize("banks", [32, 64])
@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("width", [1, 2, 4, 8, 12, 16])
def test_neighbours_and_one_word_for_all_have_no_conflicts(width, kind, banks):
    assert counts.bank_conflicts(LANES * width, ALL, width, kind, banks) == 0
    assert counts.bank_conflicts(LANES * 0, ALL, width, kind, banks) == 0


@pytest.mark.parametrize(
    ("stride", "width", "banks", "conflicts"),
    [
        (128, 4, 32, 2 * 31),  # two groups of 32 lanes, all in one bank
        (256, 4, 64, 63),
        (128, 4, 64, 31),  # 64 lanes in two banks
        (8, 4, 32, 2 * 1),
        (132, 4, 32, 0),  # a row of 32 words and one of padding
        (128, 8, 32, 4 * 15),
        (128, 16, 32, 8 * 7),
    ],
)
def test_conflicts(stride, width, banks, conflicts):
    assert counts.bank_conflicts(LANES * stride, ALL, width, "write", banks) == conflicts


def test_a_wide_read_is_served_in_its_own_order():
    # Lanes 20 to 23 are served together with 0 to 3 when they read, and with 16 to 19 when they write.
    addresses = LANES * 16
    addresses[16:24] = np.roll(addresses[16:24], 4)
    assert counts.bank_conflicts(addresses, ALL, 16, "read", 32) == 2
    assert counts.bank_conflicts(addresses, ALL, 16, "write", 32) == 0


def test_lanes_that_take_no_part_make_no_conflicts():
    assert counts.bank_conflicts(LANES * 128, LANES < 2, 4, "read", 32) == 1


@pytest.mark.parametrize(
    ("name", "offsets", "access"),
    [
        ("DS_READ_B128", (0x10, 0x01), ("read", 16, (0x110,))),
        ("DS_WRITE_B16_D16_HI", (2, 0), ("write", 2, (2,))),
        ("DS_READ2_B64", (1, 3), ("read", 8, (8, 24))),
        ("DS_WRITE2ST64_B32", (0, 2), ("write", 4, (0, 512))),
        ("DS_READ_U16", (0, 0), ("read", 2, (0,))),
        ("DS_READ_B64_TR_B16", (0, 0), ("read", 8, (0,))),
        ("DS_BPERMUTE_B32", (0, 0), None),
        ("DS_SWIZZLE_B32", (0, 0), None),
    ],
)
def test_accesses_to_lds(name, offsets, access):
    assert counts.local_access(name, *offsets) == access


@pytest.mark.parametrize(
    ("name", "class_"),
    [
        ("V_MFMA_F32_32X32X8_BF16", "matrix"),
        ("V_ADD_F32_E32", "vector"),
        ("GLOBAL_LOAD_DWORDX4", "global memory"),
        ("BUFFER_STORE_SHORT", "global memory"),
        ("BUFFER_LOAD_USHORT", "global memory"),
        ("DS_BPERMUTE_B32", "LDS"),
        ("S_LOAD_DWORDX2", "scalar"),
        ("S_BARRIER", "scalar"),
    ],
)
def test_classes(name, class_):
    assert counts.class_of(name) == class_


@pytest.mark.skipif(importlib.util.find_spec("test.mockgpu") is not None, reason="the emulator is on the path")
def test_without_the_emulator_the_remedy_is_told(capsys):
    assert counts.main(["--", "--seq-len", "8"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "count with python -m profiling.emulator --count" in line


@pytest.mark.parametrize(
    "arguments", [["--architectures", "sm_90"], ["--", "--seq-len", "x"], ["--", "--no-such-flag"]]
)
def test_bad_usage_is_one_line(arguments, capsys):
    assert counts.main(arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.fixture(scope="module")
def result():
    return read_result(counts.RESULT)


def test_the_page_is_of_the_recorded_counts(result):
    assert counts.PAGE.read_text() == counts.page(result)


def test_what_the_workshop_teaches(result):
    """Stage 2 asks for the bytes of stage 3, in many more lines; stage 4 multiplies without matrix instructions."""
    assert list(result["counts"]) == list(counts.LINE_BYTES)
    for arch in result["counts"]:
        bad, good = (
            counts.counts_of(result, arch, stage)["flash_attention_kernel"] for stage in ("stage 2", "stage 3")
        )
        assert bad.bytes == good.bytes and bad.lines["load"] > 10 * good.lines["load"]
        naive = counts.counts_of(result, arch, "stage 4")["swiglu_kernel"]
        activation = counts.counts_of(result, arch, "stage 5")["swiglu_activation_kernel"]
        assert naive.instructions["matrix"] == 0 and naive.bytes["load"] > 50 * activation.bytes["load"]
