"""Bounds and occupancies of the GPUs that kernels are compiled for."""

import pytest

from offline.architectures import bound, occupancy


def test_bound_is_the_longer_of_two():
    assert bound("sm_90", "bf16", True, 4.8e6, 1) == (1.0, "memory")
    time, by = bound("sm_90", "bf16", True, 1, 989.4e6)
    assert time == pytest.approx(1.0) and by == "compute"
    assert bound("gfx942", "bf16", False, 1, 163.4e6)[0] == pytest.approx(1.0)  # without matrix instructions


@pytest.mark.parametrize("used, warps, share, limit", [
    (("gfx942", 64, 0, 4), 32, 1.0, None), (("gfx942", 129, 0, 4), 12, 0.375, "registers"),
    (("gfx942", 64, 0, 1), 32, 1.0, None),  # as many programs of one wave
    (("gfx942", 64, 0, 4, 94), 32, 1.0, None), (("gfx942", 64, 0, 4, 95), 28, 0.875, "registers"),
    (("gfx942", 64, 2**15, 4), 8, 0.25, "shared memory"), (("sm_90", 128, 0, 4), 16, 0.25, "registers"),
    # Of 228 KiB, with the one that is reserved.
    (("sm_90", 32, 113 * 1024, 4), 8, 0.125, "shared memory"),
    (("sm_90", 32, 114 * 1024, 4), 4, 0.0625, "shared memory"),
])  # fmt: skip
def test_occupancy_names_its_limit(used, warps, share, limit):
    assert occupancy(*used) == {"warps": warps, "share": share, "limit": limit}
