"""Bounds and occupancies of the GPUs that kernels are compiled for."""

import itertools

import pytest

import tiny_llama_v3 as llama
from offline.architectures import CHIPS, bound, gpu_of, occupancy, wave_size
from offline.recorded import SUPPORTED, gpu_found
from tiny_llama import hardware


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
    (("gfx1100", 64, 0, 4, 106), 64, 1.0, None),  # each wave of a Radeon has its own 106
    (("gfx942", 64, 0, 4, 0, 2), 8, 0.25, "registers"), (("gfx942", 257, 0, 4, 0, 2), 4, 0.125, "registers"),
    (("gfx942", 64, 2**15, 4), 8, 0.25, "shared memory"), (("sm_90", 128, 0, 4), 16, 0.25, "registers"),
    # Of 228 KiB, with the one that is reserved.
    (("sm_90", 32, 113 * 1024, 4), 8, 0.125, "shared memory"),
    (("sm_90", 32, 114 * 1024, 4), 4, 0.0625, "shared memory"),
    # Which sm_75 does not do, and has 32 warps at most.
    (("sm_75", 32, 64 * 1024, 8), 8, 0.25, "shared memory"), (("sm_75", 64, 0, 4), 32, 1.0, None),
    (("sm_89", 40, 0, 4), 48, 1.0, None),
    # A Radeon's registers come in steps of 24; it holds 64 waves.
    (("gfx1100", 96, 0, 8), 64, 1.0, None), (("gfx1100", 97, 0, 8), 48, 0.75, "registers"),
    (("gfx1151", 97, 0, 8), 48, 0.75, "registers"), (("gfx1201", 97, 0, 8), 48, 0.75, "registers"),
    (("gfx1201", 32, 64 * 1024, 8), 16, 0.25, "shared memory"), (("gfx1250", 224, 0, 8), 16, 0.25, "registers"),
])  # fmt: skip
def test_occupancy_names_its_limit(used, warps, share, limit):
    assert occupancy(*used) == {"warps": warps, "share": share, "limit": limit}


@pytest.mark.parametrize("arch, family, same_as", [
    ("gfx90a", "cdna", "gfx942"), ("gfx950", "cdna", None), ("gfx1250", "cdna", None),
    ("gfx1100", "rdna", "gfx1151"), ("gfx1201", "rdna", None),
    ("gfx1200", "rdna", "gfx1201"), ("sm_75", "nvidia", None), ("sm_86", "nvidia", "sm_120"),
    ("sm_103", "nvidia", "sm_100"), ("sm_90", "hopper", None),
])  # fmt: skip
def test_gpus_that_differ_have_tiles_of_their_own(arch, family, same_as):
    def tiles(arch):
        with gpu_found(llama.Gpu("meta", "a GPU", arch, 100, wave_size(arch)), own_tiles=lambda device_type: {}):
            return [llama.attention_tile(name, 2, 128, "ieee", "meta") for name in llama.PASSES]

    others = {"gfx942", "gfx950", "gfx1250", "gfx1100", "gfx1201", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100"} - {
        arch,
        same_as,
    }
    assert llama.Gpu("cuda", "a GPU", arch, 100, 32).family == family
    assert same_as is None or tiles(arch) == tiles(same_as)
    assert all(tiles(arch) != tiles(other) for other in others)


def test_no_row_of_tiles_is_hidden_by_one_above_it():
    rows = list(llama.ATTENTION_TILES)
    for above, below in itertools.combinations(rows, 2):
        covers = above[1] in (below[1], "any") and above[2] >= below[2]
        is_family = not below[0].startswith(("gfx", "sm_"))
        family = below[0] if is_family else llama.Gpu("cuda", "a GPU", below[0], 100, 32).family
        assert not (covers and (below[0].startswith(above[0]) or family == above[0])), (above, below)


def test_a_pass_has_the_larger_block_of_what_it_keeps():
    """Queries, or for their gradients keys. Hopper's tiles are measured."""
    for (gpu, *_), (_, dq, dkdv, _) in llama.ATTENTION_TILES.items():
        assert gpu == "hopper" or (dq[0] >= dq[1] and dkdv[0] <= dkdv[1])


@pytest.mark.parametrize("arch, pass_name, head, waves", [
    ("gfx942", "dq", 128, 2), ("gfx942", "dkdv", 64, 2), ("gfx942", "dq", 64, None), ("gfx942", "fused", 128, None),
    ("gfx942", "dkdv", 32, None), ("gfx1100", "dq", 128, None), ("gfx1250", "dq", 128, None),
])  # fmt: skip
def test_two_waves_are_asked_for_where_no_more_fit(arch, pass_name, head, waves):
    with gpu_found(gpu_of(arch), own_tiles=lambda device_type: {}):
        options = llama.attention_tile(pass_name, 2, head, "ieee", "meta").options
    assert options.get("waves_per_eu") == waves and options["matrix_instr_nonkdim"] == 16


def test_the_precisions_of_gpus_that_lack_one():
    assert [arch for arch in CHIPS if not llama.has_bf16(gpu_of(arch))] == ["sm_75"]
    assert SUPPORTED["sm_75"] == ("fp32",) and set(SUPPORTED["sm_80"]) == {"bf16", "fp32", "tf32"}
    assert [arch for arch in CHIPS if llama.tf32_available(gpu_of(arch))] == [
        "gfx942", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"
    ]  # fmt: skip


def test_every_gpu_with_a_datasheet_has_its_peaks():
    """By its name and its number of units, as PyTorch gives them."""
    known = {arch for arch in CHIPS if hardware.peak_tflops(gpu_of(arch), "fp32")}
    assert CHIPS.keys() - known == {"gfx1250"}
