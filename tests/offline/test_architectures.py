"""Bounds and occupancies of the GPUs that kernels are compiled for."""

import pytest

from offline.architectures import bound, occupancy


def test_bound_is_the_longer_of_two():
    assert bound("sm_90", "bf16", True, 4.8e6, 1) == (1.0, "memory")
    time, by = bound("sm_90", "bf16", True, 1, 989.4e6)
    assert time == pytest.approx(1.0) and by == "compute"
    assert bound("gfx942", "bf16", False, 1, 163.4e6)[0] == pytest.approx(1.0)  # without matrix instructions


def test_occupancy_names_its_limit():
    assert occupancy("gfx942", 64, 0, 4) == {"warps": 32, "share": 1.0, "limit": None}
    assert occupancy("gfx942", 129, 0, 4) == {"warps": 12, "share": 0.375, "limit": "registers"}
    assert occupancy("gfx942", 64, 0, 4, 94)["warps"] == 32
    assert occupancy("gfx942", 64, 0, 4, 95) == {"warps": 28, "share": 0.875, "limit": "registers"}
    assert occupancy("gfx942", 64, 32 * 1024, 4) == {"warps": 8, "share": 0.25, "limit": "shared memory"}
    assert occupancy("sm_90", 128, 0, 4) == {"warps": 16, "share": 0.25, "limit": "registers"}
    for kib, warps in ((113, 8), (114, 4)):  # of 228, with the one that is reserved
        assert occupancy("sm_90", 32, kib * 1024, 4) == {"warps": warps, "share": warps / 64, "limit": "shared memory"}
