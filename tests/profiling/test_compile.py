"""Every kernel compiled for GPUs that are not here: the check passes, and it sees what is bad."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import tiny_llama_v3 as llama
from profiling import kernel_report as report

pytestmark = pytest.mark.skipif(llama.triton is None, reason="needs Triton")

ROOT = Path(__file__).resolve().parents[2]


OLD_TRITON = "3.3.1"


def run_report(*arguments, before="", path="", **variables):
    """kernel_report.py after some statements, in a process where Triton compiles instead of interpreting."""
    program = f"import sys\nfrom profiling import kernel_report\nllama = kernel_report.llama\n{before}\n"
    program += "if __name__ == '__main__':\n    sys.exit(kernel_report.main())"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    env["PYTHONPATH"] = os.pathsep.join([str(path), str(ROOT)])
    command = [sys.executable, "-c", program, *arguments, "--processes", "2"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)


# ----------------------------------------------------------------------------------------------------------------------
# The gate


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The rows of a check of everything. A cache in the user's home keeps what is compiled."""
    file = tmp_path_factory.mktemp("compile") / "kernels.json"
    done = run_report("--check", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())["rows"]


@pytest.mark.slow
def test_every_kernel_passes_on_every_architecture(checked):
    kernels = set(report.find_kernels(report.kernel_modules()))
    for arch in report.CHIPS:
        assert {row["kernel"] for row in checked if row["arch"] == arch} == kernels
        assert {row["precision"] for row in checked if row["arch"] == arch} >= {"bf16", "fp32"}


@pytest.mark.slow
def test_products_use_the_matrix_instructions_of_their_type(checked):
    named = {"bf16": r"mfma.*bf16|mma.*bf16", "tf32": r"mfma.*xf32|mma.*tf32", "fp32": r"mfma.*x\d+_?f32"}
    products = [row for row in checked if row["has_dot"]]
    assert {row["kernel"] for row in products} >= {
        "flash_attention_kernel", "flash_attention_backward_kernel",
        "flash_attention_backward_dq_kernel", "flash_attention_backward_dkdv_kernel",
    }  # fmt: skip
    for row in products:
        if row["arch"].startswith("gfx") or row["precision"] != "fp32":
            matrix = [name for name in row["instructions"] if "mma" in name or "mfma" in name]
            assert matrix and all(re.search(named[row["precision"]], name) for name in matrix), (row["arch"], matrix)


@pytest.mark.slow
def test_arguments_are_those_of_a_launch(checked):
    """Without the alignment of its pointers and strides a kernel loads element by element."""
    attention = [row for row in checked if row["kernel"] == "flash_attention_kernel" and row["case"] == "medium"]
    assert len(attention) >= 2 * len(report.CHIPS) and all(row["wide_share"] > 0.9 for row in attention)
    strided = [row for row in checked if row["kernel"] == "flash_attention_kernel" and row["case"] == "mistakes"]
    assert all(row["wide_share"] < 0.9 for row in strided if row["arch"].startswith("gfx"))


@pytest.mark.slow
def test_occupancy_is_the_compilers(checked):
    """LLVM says how many waves the registers allow; a program without shared memory has no other limit."""
    compared = 0
    for row in checked:
        if row["compiler_occupancy"]:
            waves = report.occupancy(row["arch"], row["registers"], 0, 1)["warps"] // 4
            assert waves == row["compiler_occupancy"], (row["kernel"], row["arch"], row["registers"])
            compared += 1
    assert compared > 100


SPOILED = {
    "too-large-a-tile": (
        "tile = llama.attention_tile\nllama.attention_tile = lambda kernel, *a: "
        "llama.AttentionTile(256, 128, 4, 1) if kernel == 'forward' else tile(kernel, *a)",
        r"flash_attention_kernel for gfx942 .*: \d+ vector registers spilled, limit 0",
    ),
    "too-many-warps": (
        "llama.norm_tile = lambda rows, *a: llama.NormTile(4, 1024, 32, rows // 4)",
        r"rmsnorm_kernel for gfx942 .*: 32 warps are 2048 threads, limit 1024",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("before, message", SPOILED.values(), ids=SPOILED.keys())
def test_spoiled_configuration_is_named(before, message):
    options = ["--architectures", "gfx942", "--cases", "heads-128", "--precisions", "bf16"]
    done = run_report("--check", *options, before=before)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(message, done.stdout), done.stdout


@pytest.fixture(scope="session")
def old_triton():
    """A folder with the oldest Triton that is supported: what ROCm 6.4's PyTorch brings."""
    if not os.environ.get("TEST_OLD_TRITON"):
        pytest.skip(f"TEST_OLD_TRITON=1 downloads Triton {OLD_TRITON} (150 MB)")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiny_llama"
    folder = cache / f"triton-{OLD_TRITON}-py{sys.version_info.major}{sys.version_info.minor}"
    if not folder.exists():
        partial = folder.with_suffix(f".{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(partial)]
        try:
            subprocess.run([*command, f"triton=={OLD_TRITON}"], check=True, capture_output=True, text=True, timeout=120)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"Triton {OLD_TRITON} cannot be installed: {(error.stderr or str(error)).strip()[-200:]}")
        partial.rename(folder)
    return folder


@pytest.mark.slow
def test_oldest_triton_compiles_too(old_triton, tmp_path):
    # Its wheel has no linker. What is checked is the assembly, so the object file may stay as it is.
    linker = tmp_path / "ld.lld"
    linker.write_text('#!/bin/sh\n[ "$1" = --version ] || cp "$4" "$6"\n')
    linker.chmod(0o755)
    file = tmp_path / "kernels.json"
    options = ["--architectures", "gfx90a", "gfx942", "--cases", "small", "medium", "--precisions", "bf16"]
    options += ["--json", str(file)]
    done = run_report("--check", *options, path=old_triton, TRITON_HIP_LLD_PATH=str(linker))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert result["triton"] == OLD_TRITON and len(result["rows"]) > 40


# ----------------------------------------------------------------------------------------------------------------------
# The check's rules, one by one


GOOD = {
    "kernel": "a_kernel", "arch": "gfx942", "case": "small", "precision": "bf16", "tile": "64 m", "warps": 4,
    "shared_bytes": 65536, "vector_spills": 0, "scalar_spills": 0, "scratch_bytes": 0, "registers": 256,
    "has_dot": True, "matrix_instructions": 1, "wide_loads_expected": True, "wide_share": 1.0,
}  # fmt: skip
BAD = {
    "shared memory": (dict(shared_bytes=65537), "65537 bytes of shared memory, limit 65536"),
    "threads": (dict(warps=32), "32 warps are 2048 threads, limit 1024"),
    "spills": (dict(vector_spills=1), "1 vector registers spilled, limit 0"),
    "scalar spills": (dict(scalar_spills=9), "9 scalar registers spilled, limit 8"),
    "scratch": (dict(scratch_bytes=4), "4 bytes of scratch a thread, limit 0"),
    "accumulation registers": (dict(has_dot=False, registers=257), "257 registers, limit 256"),
    "no matrix instruction": (dict(matrix_instructions=0), "no matrix instruction"),
    "narrow loads": (dict(wide_share=0.25), "25% of its bytes in loads of 8 bytes or more, at least 50% needed"),
    "no code": (dict(error="OutOfMemory: x"), "does not compile: OutOfMemory: x"),
}


def test_good_row_passes():
    assert report.violations(GOOD) == []
    assert report.violations(GOOD | dict(arch="gfx950", shared_bytes=163840)) == []
    assert report.violations(GOOD | dict(arch="sm_90", warps=32, precision="fp32", matrix_instructions=0)) == []


@pytest.mark.parametrize("change, message", BAD.values(), ids=BAD.keys())
def test_bad_row_names_kernel_architecture_figure_and_limit(change, message):
    (line,) = report.violations(GOOD | change)
    assert line.startswith("a_kernel for gfx942 (small, bf16, 64 m): ") and message in line


def test_new_kernel_without_an_entry_is_named():
    class Kernel:
        pass

    lines = list(report.missing_kernels({"new_kernel": Kernel}, []))
    assert len(lines) == 2 and all(line.startswith("new_kernel: ") for line in lines)
    assert "CASES" in lines[0] and "WORK" in lines[1]


def test_helpers_are_not_kernels():
    found = report.find_kernels([llama])
    assert "load_tile" not in found and "attend" not in found  # called by kernels
    assert len(found) > 12 and all(name.endswith("_kernel") for name in found)


def test_wide_share_counts_bytes():
    assert report.wide_share({16: 3, 2: 8}) == 48 / 64
    assert report.wide_share({}) is None


# ----------------------------------------------------------------------------------------------------------------------
# Launches and their work


@pytest.mark.parametrize("arch", ["gfx942", "sm_90"])
def test_recorded_launches_are_the_scripts(arch):
    case = report.CASES["medium"]
    config = llama.Config(**case.sizes, use_amp=True)
    launches = report.record_step(config, arch)
    calls = Counter(launch.kernel for launch in launches)
    layers = config.num_layers
    assert calls["flash_attention_kernel"] == calls["rope_kernel"] == calls["swiglu_activation_kernel"] == layers
    assert calls["rmsnorm_kernel"] == calls["rmsnorm_backward_kernel"] == 2 * layers + 1
    assert calls["adamw_kernel"] == calls["cross_entropy_kernel"] == 1
    options = {dict(x.options).get("matrix_instr_nonkdim") for x in launches if "attention" in x.kernel}
    assert options == ({16} if arch == "gfx942" else {None})
    assert llama.get_device("cpu").type == "cpu"  # nothing stays patched


def test_the_case_decides_about_tf32_not_this_machine_s_library(monkeypatch):
    monkeypatch.setattr(torch._C, "_get_cublas_allow_tf32", lambda: False)  # ROCm without HIPBLASLT_ALLOW_TF32
    before = torch.get_float32_matmul_precision()
    for precision, expected in (("tf32", "tf32"), ("fp32", "ieee")):
        config = llama.Config(**report.CASES["small"].sizes, **report.PRECISIONS[precision])
        launches = report.record_step(config, "sm_90")
        assert {dict(x.constants)["PRECISION"] for x in launches if "attention" in x.kernel} == {expected}
    assert torch.get_float32_matmul_precision() == before


def test_work_is_that_of_the_formulas():
    kernels = report.find_kernels(report.kernel_modules())
    config = llama.Config(**report.CASES["medium"].sizes, use_amp=True)
    work = {}
    for launch in report.record_step(config, "sm_90"):
        work[launch.kernel] = report.WORK[launch.kernel](launch.arguments(kernels[launch.kernel]))
    tokens, hidden, layers = config.tokens_per_step, config.hidden_dim, config.num_layers
    product = config.seq_len * tokens * hidden  # of (seq, seq, head_dim), half of it masked, over all heads
    assert work["flash_attention_kernel"][1] == 2 * product
    assert work["flash_attention_backward_dq_kernel"][1] == 3 * product
    # The last norm launched in a forward pass adds: it reads two tensors and writes two.
    assert work["rmsnorm_kernel"][0] == 4 * tokens * hidden * 2 + hidden * 2 + tokens * 4
    assert work["swiglu_activation_kernel"][0] == 3 * tokens * config.ffn_dim * 2
    weights = layers * (hidden * (3 * hidden + 3 * config.ffn_dim) + 2 * hidden) + hidden * (config.vocab_size + 1)
    assert work["adamw_kernel"][0] == pytest.approx(26 * weights, rel=1e-3)


def test_bound_is_the_longer_of_two():
    assert report.bound("sm_90", "bf16", True, 4.8e6, 1) == (1.0, "memory")
    time, by = report.bound("sm_90", "bf16", True, 1, 989.4e6)
    assert time == pytest.approx(1.0) and by == "compute"
    assert report.bound("gfx942", "bf16", False, 1, 163.4e6)[0] == pytest.approx(1.0)  # without matrix instructions


def test_occupancy_names_its_limit():
    assert report.occupancy("gfx942", 64, 0, 4) == {"warps": 32, "share": 1.0, "limit": None}
    assert report.occupancy("gfx942", 129, 0, 4) == {"warps": 12, "share": 0.375, "limit": "registers"}
    assert report.occupancy("gfx942", 64, 32 * 1024, 4) == {"warps": 8, "share": 0.25, "limit": "shared memory"}
    assert report.occupancy("sm_90", 128, 0, 4) == {"warps": 16, "share": 0.25, "limit": "registers"}
    assert report.occupancy("sm_90", 32, 113 * 1024, 4) == {"warps": 8, "share": 0.125, "limit": "shared memory"}


AMD_TILES = {key: tiles for key, tiles in llama.ATTENTION_TILES.items() if key[0] in ("amd", "gfx950")}


@pytest.mark.parametrize("tiles", AMD_TILES.values(), ids=map(str, AMD_TILES))
@pytest.mark.parametrize("seq_len", [100, 200])  # one backward kernel, and two; neither a multiple of a tile
def test_amd_tiles_compute_the_same(tiles, seq_len, device, monkeypatch, request):
    chosen = {name: llama.AttentionTile(*tile) for name, tile in zip(llama.PASSES, tiles, strict=True)}
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


# ----------------------------------------------------------------------------------------------------------------------
# The page and the command line


def committed():
    return json.loads(report.RESULT.read_text())


def test_page_shows_the_result():
    assert report.PAGE.read_text() == report.page(committed()), "run `make kernel-report`"


def test_result_has_the_launches_of_today():
    """The tiles that the dispatch chooses now, not those of some time ago."""
    selection = {name: case.reported for name, case in report.CASES.items() if case.reported}
    now = Counter(
        (job.arch, job.case, job.precision, job.launch.kernel, report.tile_of(job.launch), job.calls)
        for job in report.jobs_for(report.CHIPS, selection)
    )
    keys = ("arch", "case", "precision", "kernel", "tile", "calls")
    then = Counter(tuple(row[key] for key in keys) for row in committed()["rows"])
    assert now == then, "run `make kernel-report`"


def test_result_passes_the_check():
    assert [line for row in committed()["rows"] for line in report.violations(row)] == []


@pytest.mark.parametrize("arguments", [["--architectures", "gfx1"], ["--processes", "0"], ["--no-such-flag"]])
def test_bad_usage_is_one_line(arguments, capsys):
    assert report.main(arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
