"""Cache lines and bank conflicts in cases that can be counted by hand."""

import numpy as np
import pytest

from emulated import memory_system
from emulated.memory_system import bank_conflicts, lines_touched

LANES = np.arange(memory_system.LANES)
ALL = np.ones(memory_system.LANES, bool)


@pytest.mark.parametrize(("stride", "width", "line_bytes", "lines"), [
    (4, 4, 128, 2), (4, 4, 64, 4), (16, 16, 128, 8),
    (128, 4, 128, 64),  # an element in each line
    (64, 4, 128, 32), (0, 4, 128, 1),
])  # fmt: skip
def test_lines(stride, width, line_bytes, lines):
    fewest = 1 if stride == 0 else -(-len(LANES) * width // line_bytes)
    assert lines_touched(LANES * stride, width, line_bytes) == (lines, fewest)


def test_an_access_across_the_end_of_a_line_touches_both():
    assert lines_touched(np.array([124]), 8, 128) == (2, 1)
    assert lines_touched(np.array([120]), 8, 128) == (1, 1)


def test_lanes_that_take_no_part_touch_nothing_and_make_no_conflicts():
    assert lines_touched(LANES[:0], 4, 128) == (0, 0)
    assert bank_conflicts(LANES * 128, ~ALL, 4, "read", 32) == 0
    assert bank_conflicts(LANES * 128, LANES < 2, 4, "read", 32) == 1


@pytest.mark.parametrize("banks", [32, 64])
@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("width", [1, 2, 4, 8, 12, 16])
def test_neighbours_and_one_word_for_all_have_no_conflicts(width, kind, banks):
    assert bank_conflicts(LANES * width, ALL, width, kind, banks) == 0
    assert bank_conflicts(LANES * 0, ALL, width, kind, banks) == 0


@pytest.mark.parametrize(("stride", "width", "banks", "conflicts"), [
    (128, 4, 32, 2 * 31),  # two groups of 32 lanes, all in one bank
    (256, 4, 64, 63),
    (128, 4, 64, 31),  # 64 lanes in two banks
    (8, 4, 32, 2 * 1),
    (132, 4, 32, 0),  # a row of 32 words and one of padding
    (128, 8, 32, 4 * 15), (128, 16, 32, 8 * 7),
])  # fmt: skip
def test_conflicts(stride, width, banks, conflicts):
    assert bank_conflicts(LANES * stride, ALL, width, "write", banks) == conflicts


def test_a_wide_read_is_served_in_its_own_order():
    # Lanes 20 to 23 are served together with 0 to 3 when they read, and with 16 to 19 when they write.
    addresses = LANES * 16
    addresses[16:24] = np.roll(addresses[16:24], 4)
    assert bank_conflicts(addresses, ALL, 16, "read", 32) == 2
    assert bank_conflicts(addresses, ALL, 16, "write", 32) == 0
