"""The loops of the attention kernels on AMD GPUs: what is counted, the model of its cycles, and the page."""

import json
import math

import pytest
import torch

import tiny_llama_v3 as llama
from compiled import tiles
from compiled.architectures import device_of
from tiny_llama import hardware

pytestmark = pytest.mark.skipif(llama.triton is None, reason="needs Triton")

# Two loops within a third one, the second with less to do beside its product.
ASSEMBLY = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
kernel:
	v_mov_b32_e32 v0, 0
.LBB0_1:                                ; =>This Loop Header: Depth=1
	v_mov_b32_e32 v1, 0
.LBB0_2:                                ;   Parent Loop BB0_1 Depth=1
                                        ; =>  This Inner Loop Header: Depth=2
	buffer_load_dwordx4 v[2:5], v1, s[0:3], 0 offen
	v_mfma_f32_16x16x16_bf16 v[6:9], v[2:3], v[4:5], 0
	v_exp_f32_e32 v6, v6
	v_cndmask_b32_e64 v6, v6, v7, vcc
	ds_read2_b64 v[2:5], v1 offset1:1
	s_cbranch_scc1 .LBB0_4
	s_branch .LBB0_2
.LBB0_4:
	s_barrier
.LBB0_5:
	v_mfma_f32_16x16x16_bf16 v[6:9], v[2:3], v[4:5], 0
	v_pk_mul_f32 v[6:7], v[6:7], v[8:9]
	ds_read_b128 v[2:5], v1
	ds_bpermute_b32 v2, v1, v3
	s_cbranch_scc1 .LBB0_5
	s_cbranch_vccnz .LBB0_1
	s_endpgm
"""


def test_inner_loops_are_those_without_another_in_them():
    first, second = tiles.inner_loops(ASSEMBLY)
    assert first["v_exp_f32_e32"] == 1 and first["v_mov_b32_e32"] == 0 and first["s_cbranch_scc1"] == 1
    assert second.total() == 5 and second["ds_bpermute_b32"] == 1


def test_the_main_loop_has_the_least_beside_its_products():
    assert tiles.main_loop(ASSEMBLY) == tiles.Loop(matrix=16, vector=4, lds=8 + 2)
    first, _ = tiles.inner_loops(ASSEMBLY)
    assert tiles.count_cycles(first, "gfx942") == tiles.Loop(matrix=16, vector=16 + 4, lds=8, buffer_loads=1)
    assert tiles.count_cycles(first, "gfx950").lds == 4


@pytest.mark.parametrize("name, cycles", [
    ("v_mfma_f32_16x16x16bf16_1k", {"gfx90a": 32}), ("v_mfma_f32_32x32x8_bf16", {"gfx942": 32, "gfx950": 32}),
    ("v_mfma_f32_16x16x32_bf16", {"gfx950": 16}), ("v_mfma_f32_16x16x8_xf32", {"gfx942": 16}),
    ("v_mfma_f32_16x16x4_f32", {"gfx90a": 32, "gfx942": 32, "gfx950": 32}),
])  # fmt: skip
def test_cycles_of_products(name, cycles):
    assert {arch: tiles.matrix_cycles(name, arch) for arch in cycles} == cycles


@pytest.mark.parametrize("arch", tiles.ARCHITECTURES)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_rates_are_the_peaks_of_the_datasheets(arch, precision):
    device = device_of(arch)
    rate = tiles.MATRIX_RATES[arch]["f32" if precision == "fp32" else precision]
    gigahertz = {"gfx90a": 1.7, "gfx942": 2.1, "gfx950": 2.4}[arch]
    peak = rate * tiles.SIMDS * device.num_sms * gigahertz / 1e3
    assert peak == pytest.approx(hardware.peak_tflops(device, precision), rel=0.03)


@pytest.mark.parametrize("name", ["v_mfma_f32_16x16x16_f16", "v_mfma_f64_16x16x4f64", "ds_add_rtn_u32"])
def test_unknown_cycles_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}: its .* not known"):
        tiles.count_cycles({name: 1}, "gfx942")


def test_waves_share_a_unit():
    loop = tiles.Loop(matrix=1000, vector=600, lds=50)
    # One wave on each SIMD: one after the other. A way through the loop of a program's 4 waves takes 1600 cycles.
    assert tiles.cycles_per_score(loop, 100, warps=4, resident=4) == 16
    # Two: the longer one counts. 2000 cycles for two programs.
    assert tiles.cycles_per_score(loop, 100, warps=4, resident=8) == 10
    # LDS serves the whole unit: 8 x 300 cycles for two programs.
    assert tiles.cycles_per_score(loop._replace(lds=300), 100, warps=4, resident=8) == 12


@pytest.mark.parametrize("arch", tiles.ARCHITECTURES)
def test_alternatives_differ_in_one_thing(arch):
    launches = tiles.launches_of(arch, 64, "dkdv")
    assert (tiles.ROUNDING in launches) == (arch != "gfx950")

    def settings(launch):
        return tiles.tile_of(launch)._asdict() | {"rounding": launch.named_constants["ROUND_BY_HAND"]}

    chosen = launches.pop("chosen")
    for what, launch in launches.items():
        changed = [name for name, value in settings(launch).items() if value != settings(chosen)[name]]
        assert len(changed) == 1 and launch.kernel == chosen.kernel, (what, changed)


AMD_TILES = {key: tiles for key, tiles in llama.ATTENTION_TILES.items() if key[0] in ("amd", "gfx950")}


@pytest.mark.parametrize("key", [
    pytest.param(key, marks=[pytest.mark.slow] * (key not in (("amd", "half", 64), ("amd", "any", 128))), id=str(key))
    for key in AMD_TILES
])  # fmt: skip
@pytest.mark.parametrize("seq_len", [100, 150])  # one backward kernel, and two; neither a multiple of a tile
def test_amd_tiles_compute_the_same(key, seq_len, device, monkeypatch, request):
    chosen = {name: llama.AttentionTile(*tile) for name, tile in zip(llama.PASSES, AMD_TILES[key], strict=True)}
    monkeypatch.setattr(llama, "attention_tile", lambda pass_name, *_: chosen[pass_name])
    llama.attention_constants.cache_clear()
    request.addfinalizer(llama.attention_constants.cache_clear)
    q, k, v, o_grad = (torch.randn(1, seq_len, heads, 16, device=device) for heads in (2, 1, 1, 2))
    o, lse = llama.flash_attention_forward(q, k, v)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    llama.flash_attention_backward(o_grad, q, k, v, o, lse, *grads)
    leaves = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    exact = torch.autograd.grad(expected, leaves, o_grad.double().transpose(1, 2))
    for ours, theirs in zip((o, *grads), (expected, *exact), strict=True):
        torch.testing.assert_close(ours.double(), theirs.transpose(1, 2), atol=1e-5, rtol=1e-5)


# --- the page


@pytest.fixture(scope="module")
def committed():
    return json.loads(tiles.RESULT.read_text())


def test_page_shows_the_result(committed):
    assert tiles.PAGE.read_text() == tiles.page(committed), "run `make kernel-report`"


def test_result_has_the_tiles_of_today(committed):
    chosen = [row for row in committed["rows"] if row["what"] == "chosen"]
    assert len(chosen) == len(tiles.ARCHITECTURES) * 2 * len(tiles.PASSES)
    for row in chosen:
        tile = tiles.tile_of(tiles.record_launch(row["arch"], row["head_dim"], row["pass"]))
        assert row["tile"] == [tile.BLOCK_M, tile.BLOCK_N], "run `make kernel-report`"


def test_result_says_what_is_concluded_from_it(committed):
    """In docs/kernels.md, and in the comments beside the tiles."""
    rows = {(row["arch"], row["head_dim"], row["pass"], row["what"]): row for row in committed["rows"]}
    for (*place, what), row in rows.items():
        chosen = rows[(*place, "chosen")]
        if row["cycles"]:
            assert row["cycles"] > 0.999 * row["bound"], (place, what)
        if what == "chosen":
            assert row["waves"] >= 2 * tiles.SIMDS and row["registers"] <= 256 and not row["spills"], place
        if what.startswith("waves_per_eu") or what == "2 stages":
            assert row["cycles"] > 0.97 * chosen["cycles"], (place, what)
        assert row["loop"]["buffer_loads"] and not row["loop"]["other_loads"], (place, what)
    for name in tiles.PASSES:
        by_hand, by_compiler = (rows["gfx942", 64, name, what] for what in ("chosen", tiles.ROUNDING))
        assert by_compiler["loop"]["vector"] > by_compiler["loop"]["matrix"], name
        assert by_compiler["cycles"] > 1.02 * by_hand["cycles"], name
    for arch in tiles.ARCHITECTURES:  # 32 keys are too few rows for four waves
        few, chosen = (rows[arch, 128, "dkdv", what] for what in ("32 keys", "chosen"))
        few, chosen = (row["loop"]["matrix"] / math.prod(row["tile"]) for row in (few, chosen))
        assert few > 1.4 * chosen, arch
    for name, smaller in (("dq", "64 queries"), ("dkdv", "64 keys")):  # LDS then counts more than the products
        row = rows["gfx942", 64, name, smaller]
        assert row["cycles"] > 1.2 * rows["gfx942", 64, name, "chosen"]["cycles"], name
        assert row["loop"]["lds"] * tiles.SIMDS > row["loop"]["matrix"], name
    for head_dim, fewer in ((64, "64 keys"), (128, "32 keys")):  # its forward pass waits for the vector units
        row = rows["gfx950", head_dim, "forward", fewer]
        assert row["cycles"] > 1.1 * rows["gfx950", head_dim, "forward", "chosen"]["cycles"], head_dim
        assert row["loop"]["vector"] > row["loop"]["matrix"], head_dim


@pytest.mark.slow
def test_asked_for_a_part_it_prints_and_writes_nothing(capsys, monkeypatch):
    monkeypatch.setattr(tiles, "alternatives", lambda tile: {"2 stages": tile._replace(num_stages=2)})
    before = tiles.RESULT.read_bytes(), tiles.PAGE.read_bytes()
    arguments = ["--architectures", "gfx942", "--heads", "64", "--passes", "forward", "--processes", "1"]
    assert tiles.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "**gfx942, heads of 64, forward** (bound: 125)"
    assert [line.split(" | ")[0].strip("| *") for line in lines[4:]] == ["chosen", tiles.ROUNDING, "2 stages"]
    assert before == (tiles.RESULT.read_bytes(), tiles.PAGE.read_bytes())


@pytest.mark.parametrize("arguments", [["--architectures", "sm_90"], ["--heads", "40"], ["--processes", "0"]])
def test_bad_usage_is_one_line(arguments, capsys):
    assert tiles.main(arguments) == 2 and len(capsys.readouterr().err.splitlines()) == 1
