"""TINY_LLAMA_TILES: the tiles of a file are launched and told, and a file that is not right ends a run in one line."""

import json
import re
import subprocess
import sys

import pytest
import torch

import tiny_llama_v3 as llama
from measure.results import header
from offline import recorded
from tests import ROOT

TINY = "--hidden-dim 16 --num-layers 1 --num-heads 1 --seq-len 4 --num-steps 1 --impl torch --device cpu".split()
TILES = {"ieee 16 forward": [16, 32, 4, 1], "ieee 16 dq": [64, 16, 2, 3], "half 16 fused": [64, 64, 8, 2]}
on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the file is one for this processor")
CACHED = "own_tiles attention_tile attention_launch heads_per_program".split()


def content(**changes):
    """What a file for this processor holds; None takes a field away."""
    gpu = llama.get_gpu("cpu")
    fields = {"device": gpu.name, "arch": gpu.arch, "measured": "2030-01-02", "attention": TILES} | changes
    return {name: value for name, value in fields.items() if value is not None}


@pytest.fixture
def use(tmp_path, monkeypatch):
    """use(content) has the variable name a file with it, a text or an object of JSON; returns the path."""

    def clear():
        for name in CACHED:
            getattr(llama, name).cache_clear()

    def use(content):
        path = tmp_path / "own tiles.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        monkeypatch.setenv("TINY_LLAMA_TILES", str(path))
        clear()
        return path

    clear()
    yield use
    clear()


def in_use(*key):
    return {name: llama.attention_tile(name, *key, "cpu") for name in llama.PASSES}


def test_a_tile_of_the_file_takes_the_place_of_the_table_s_for_its_key_alone(use):
    keys = [(itemsize, head, precision) for itemsize in (2, 4) for head in (16, 32) for precision in ("ieee", "tf32")]
    before = {key: in_use(*key) for key in keys}
    use(content())
    expected = {key: dict(tiles) for key, tiles in before.items()}
    expected[4, 16, "ieee"] |= {
        "forward": llama.AttentionTile(16, 32, 4, 1, {}), "dq": llama.AttentionTile(64, 16, 2, 3, {})
    }  # fmt: skip
    for precision in ("ieee", "tf32"):  # of half, whatever fp32 is multiplied in
        expected[2, 16, precision]["fused"] = llama.AttentionTile(64, 64, 8, 2, {})
    assert {key: in_use(*key) for key in keys} == expected != before


def test_an_own_tile_has_the_compiler_s_options_of_its_card(use, monkeypatch):
    monkeypatch.setattr(llama, "get_gpu", lambda type: llama.Gpu(type, "AMD Instinct MI300X", "gfx942", 304, 64))
    use(content() | {"attention": {"half 64 dq": [64, 16, 2, 2]}})
    assert llama.attention_tile("dq", 2, 64, "ieee", "cuda") == ((64, 16, 2, 2, {"matrix_instr_nonkdim": 16}))
    of_table = llama.attention_tile("dkdv", 2, 64, "ieee", "cuda")
    assert of_table.options == {"matrix_instr_nonkdim": 16, "waves_per_eu": 2}


@pytest.mark.triton
@on_a_cpu
def test_a_run_launches_the_tiles_of_its_file_and_says_so(use, run, monkeypatch):
    launched, launch = [], llama.launch

    def noted(kernel, grid, tensors, scalars, constants, **options):
        if "C" in constants:
            C = constants["C"]
            launched.append((constants.get("PART", "forward"), C.BLOCK_M, C.BLOCK_N, *list(options.values())[:2]))
        launch(kernel, grid, tensors, scalars, constants, **options)

    monkeypatch.setattr(llama, "launch", noted)
    plain = run("--impl", "triton")
    assert {tile[1:] for tile in launched} == {(32, 32, 4, 1)}
    assert "Tiles of" not in plain.out and plain.result["environment"]["tiles"] is None

    launched.clear()
    path, tiles = use(content()), {"ieee 16 forward": [16, 64, 2, 3]}
    path.write_text(json.dumps(content(attention=tiles)))
    own = run("--impl", "triton")
    assert set(launched) == {("forward", 16, 64, 2, 3), ("fused", 32, 32, 4, 1)}
    assert f"\nTiles of {path}: ieee 16 forward [16, 64, 2, 3]\n" in own.out
    assert own.result["environment"]["tiles"] == tiles
    assert own.losses == pytest.approx(plain.losses, rel=1e-6)
    assert header("steps", torch.device("cpu"), [])["environment"]["tiles"] == tiles  # of a benchmark
    assert "Tiles of" not in run("--impl", "torch").out


@on_a_cpu
def test_a_program_of_the_benchmarks_says_so_too(use, tmp_path, capsys):
    from benchmarks import kernels

    path = use(content(attention={"ieee 16 dq": [16, 16, 1, 1]}))
    kernels.main(["--only", "copy", "--output-dir", str(tmp_path)])
    assert f"\nTiles of {path}: ieee 16 dq [16, 16, 1, 1]\n" in capsys.readouterr().out


@pytest.mark.triton
def test_what_is_compiled_for_other_gpus_has_the_table_s_tiles(use):
    config = llama.Config(**recorded.CASES["small"].sizes, use_amp=True)
    before = recorded.record_step(config, "gfx942")
    use(content(attention={"half 64 forward": [16, 16, 1, 1]}))
    assert recorded.record_step(config, "gfx942") == before


def attention(key, tile):
    return content(attention=TILES | {key: tile})


@pytest.mark.parametrize("wrong, told", [
    ("{", "cannot be read (no JSON: "), ("[]", "is no object of JSON"), ("[" * 100_000, "cannot be read (no JSON: "),
    (content(device="Another GPU"), ": device is Another GPU (cpu), and this is "),
    (content(arch="gfx942"), " (gfx942), and this is "),
    (content(device=None), ": device is null, and should be a text"),
    (content(measured=3), ": measured is 3, and should be a text"),
    (content(attention=[1]), ": attention is [1], and should be an object"),
    (content(norm={}), ": norm is unknown, give device, arch, measured, attention"),
    (attention("half forward", [16] * 4), ": attention: half forward is no key, give operands, head, pass"),
    (attention("amd 64 dq", [16] * 4), ": attention: amd 64 dq has the operands 'amd', give one of half, tf32, ieee"),
    (attention("half 48 dq", [16] * 4), ": attention: half 48 dq has the head '48', give one of 16, 32, 64, 128"),
    (attention("half 64 dk", [16] * 4), ": attention: half 64 dk has the pass 'dk', give one of forward, dq, dkdv"),
    (attention("half 64 dq", [16, 16, 4]), "half 64 dq is [16, 16, 4], give whole numbers for BLOCK_M, BLOCK_N, warps"),
    (attention("half 64 dq", [16, 16, 4, True]), "half 64 dq is [16, 16, 4, true], give whole numbers"),
    (attention("half 64 dq", [16, 16, 4, 1.0]), "half 64 dq is [16, 16, 4, 1.0], give whole numbers"),
    (attention("half 64 dq", "16"), 'half 64 dq is "16", give whole numbers'),
    (attention("half 64 dq", [16, 48, 4, 1]), ": attention: half 64 dq has BLOCK_N 48, give a power of two"),
    (attention("half 64 dq", [16, 16, 3, 1]), "half 64 dq has warps 3, give a power of two"),
    (attention("half 64 dq", [8, 16, 4, 1]), "half 64 dq has BLOCK_M 8, give 16 to 256"),
    (attention("half 64 dq", [16, 512, 4, 1]), "half 64 dq has BLOCK_N 512, give 16 to 256"),
    (attention("half 64 dq", [16, 16, 32, 1]), "half 64 dq has warps 32, give 1 to 16"),
    (attention("half 64 dq", [16, 16, 4, 0]), "half 64 dq has stages 0, give 1 to 8"),
])  # fmt: skip
def test_a_file_that_is_not_right_ends_a_run_before_it_begins(use, tmp_path, monkeypatch, capsys, wrong, told):
    monkeypatch.chdir(tmp_path)
    path = use(wrong)
    assert llama.main([*TINY, "--output-dir", "new"], "tiny_llama_v3.py") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and not (tmp_path / "new").exists()
    assert err.startswith(f"tiny_llama_v3.py: error: TINY_LLAMA_TILES={path}") and told in err
    assert "python -m benchmarks.tiles" in err and "unset TINY_LLAMA_TILES" in err


def test_a_file_that_is_missing_or_has_no_end(use, tmp_path, monkeypatch, capsys):
    for path, told in ((tmp_path / "none.json", "No such file"), ("/dev/zero", "not a regular file")):
        monkeypatch.setenv("TINY_LLAMA_TILES", str(path))
        llama.own_tiles.cache_clear()
        assert llama.main([*TINY, "--output-dir", str(tmp_path)], "tiny_llama_v3.py") == 2
        assert re.search(rf"TINY_LLAMA_TILES={path} cannot be read \({told}", capsys.readouterr().err)


def test_three_stages_are_no_power_of_two_and_right(use):
    use(attention("half 64 dq", [256, 16, 16, 3]))
    assert llama.own_tiles("cpu")["half 64 dq"] == [256, 16, 16, 3]


def test_the_script_alone_names_the_file_that_it_lacks(tmp_path):
    (tmp_path / "tiny_llama_v3.py").write_text((ROOT / "tiny_llama_v3.py").read_text())
    command = [sys.executable, "tiny_llama_v3.py", "--device", "cpu"]
    environment = {"PATH": "", "TINY_LLAMA_TILES": "tiles.json"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    expected = "TINY_LLAMA_TILES=tiles.json needs tiny_llama/tiles.py: copy tiny_llama/ beside the script"
    assert done.returncode == 2 and done.stderr == f"tiny_llama_v3.py: error: {expected}\n"
