"""Bounds and occupancies of the GPUs that kernels are compiled for."""

import pytest

import tiny_llama_v3 as llama
from offline.architectures import bound, occupancy, wave_size
from offline.recorded import gpu_found


def test_bound_is_the_longer_of_two():
    assert bound("sm_90", "bf16", True, 4.8e6, 1) == (1.0, "memory")
    time, by = bound("sm_90", "bf16", True, 1, 989.4e6)
    assert time == pytest.approx(1.0) and by == "compute"
    assert bound("gfx1250", "bf16", True, 1, 1) == (None, None)  # of which no datasheet is known
    assert bound("gfx942", "bf16", False, 1, 163.4e6)[0] == pytest.approx(1.0)  # without matrix instructions


@pytest.mark.parametrize("used, warps, share, limit", [
    (("gfx942", 64, 0, 4), 32, 1.0, None), (("gfx942", 129, 0, 4), 12, 0.375, "registers"),
    (("gfx942", 64, 0, 1), 32, 1.0, None),  # as many programs of one wave
    (("gfx942", 64, 0, 4, 94), 32, 1.0, None), (("gfx942", 64, 0, 4, 95), 28, 0.875, "registers"),
    (("gfx942", 64, 2**15, 4), 8, 0.25, "shared memory"), (("sm_90", 128, 0, 4), 16, 0.25, "registers"),
    # Of 228 KiB, with the one that is reserved.
    (("sm_90", 32, 113 * 1024, 4), 8, 0.125, "shared memory"),
    (("sm_90", 32, 114 * 1024, 4), 4, 0.0625, "shared memory"),
    # Which sm_75 does not do, and has 32 warps at most.
    (("sm_75", 32, 64 * 1024, 8), 8, 0.25, "shared memory"), (("sm_75", 64, 0, 4), 32, 1.0, None),
    (("sm_89", 40, 0, 4), 48, 1.0, None),
    # A Radeon's registers come in steps of 24; it holds 64 waves.
    (("gfx1100", 96, 0, 8), 64, 1.0, None), (("gfx1100", 97, 0, 8), 48, 0.75, "registers"),
    (("gfx1201", 32, 64 * 1024, 8), 16, 0.25, "shared memory"), (("gfx1250", 224, 0, 8), 16, 0.25, "registers"),
])  # fmt: skip
def test_occupancy_names_its_limit(used, warps, share, limit):
    assert occupancy(*used) == {"warps": warps, "share": share, "limit": limit}


@pytest.mark.parametrize("arch, family, same_as", [
    ("gfx90a", "cdna", "gfx942"), ("gfx1250", "cdna", None), ("gfx1100", "rdna", "gfx1151"), ("gfx1201", "rdna", None),
    ("gfx1200", "rdna", "gfx1201"), ("sm_75", "nvidia", None), ("sm_86", "nvidia", "sm_120"),
    ("sm_103", "nvidia", "sm_100"), ("sm_90", "hopper", None),
])  # fmt: skip
def test_gpus_that_differ_have_tiles_of_their_own(arch, family, same_as):
    def tiles(arch):
        with gpu_found(llama.Gpu("meta", "a GPU", arch, 100, wave_size(arch)), own_tiles=lambda device_type: {}):
            return [llama.attention_tile(name, 2, 128, "ieee", "meta") for name in llama.PASSES]

    others = {"gfx942", "gfx1250", "gfx1100", "gfx1201", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100"} - {arch, same_as}
    assert llama.Gpu("cuda", "a GPU", arch, 100, 32).family == family
    assert same_as is None or tiles(arch) == tiles(same_as)
    assert all(tiles(arch) != tiles(other) for other in others)
