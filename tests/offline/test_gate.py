"""Every kernel compiled for GPUs that are not here: the check passes, and it sees what is bad."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

import tiny_llama_v3 as llama
from offline import compiler, compilers, gate, recorded
from offline.architectures import CHIPS, occupancy
from tests import ROOT
from tiny_llama import fp8

pytestmark = [pytest.mark.triton, pytest.mark.timeout(1200)]  # seconds: a slow machine compiles for minutes

OLD_TRITON = "3.3.1"


def run_report(*arguments, before="", path="", **variables):
    """Runs offline.pages after some statements, in a process of its own."""
    program = f"import sys\nimport tiny_llama_v3 as llama\nfrom offline import pages\n{before}\n"
    program += "if __name__ == '__main__':\n    sys.exit(pages.main())"
    env = os.environ | variables | {"PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])}
    command = [sys.executable, "-c", program, *arguments, "--processes", "2"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)


# --- the gate


# `make test-all` compiles every case on every architecture: a quarter of an hour on a slow machine. This is the script
# at two sizes on each, and on some also heads of 128, FP8, the mistakes and the kernels of nanogpt_triton.
MORE_ON = "gfx942", "gfx1100", "sm_75", "sm_90"
SIZES, MORE = ("small", "medium"), ("heads-128", "layer-norm", "gelu", "fp8", "mistakes")


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The rows of a check. A cache in the user's home keeps what is compiled."""
    rows = []
    for options in (
        ["--precisions", "bf16", "--cases", *SIZES],
        ["--architectures", *MORE_ON, "--cases", *SIZES, *MORE],
    ):
        file = tmp_path_factory.mktemp("compile") / "kernels.json"
        done = run_report("--check", "--json", str(file), *options)
        assert done.returncode == 0, done.stdout + done.stderr
        rows += json.loads(file.read_text())["rows"]
    return rows


def test_every_kernel_is_launched_in_some_case():
    """Which `--check` says of all architectures, once it has compiled them."""
    jobs = recorded.jobs_for(["gfx942", "sm_90"], dict.fromkeys(recorded.CASES, ["bf16"]))
    functions = recorded.find_kernels(recorded.kernel_modules())
    assert list(gate.missing_kernels(functions, (job.launch for job in jobs))) == []
    assert set(gate.WORK) > set(functions)  # one has a name for each of its parts


@pytest.mark.slow
def test_the_kernels_of_the_script_pass_on_every_architecture(checked):
    for arch in CHIPS:
        rows = [row for row in checked if row["arch"] == arch]
        precisions = set(recorded.PRECISIONS) if arch in MORE_ON else {"bf16"}
        precisions -= set() if llama.tf32_available(recorded.gpu_of(arch)) else {"tf32"}
        assert {row["precision"] for row in rows} == precisions & set(recorded.SUPPORTED[arch])
        missing = set() if fp8.formats_of(arch) else {"fp8_quantize_kernel"}
        if arch == "sm_75":  # the mistakes are compiled in bf16
            missing.add("swiglu_kernel")
        if arch not in MORE_ON:
            missing = {
                kernel for kernel in gate.WORK if kernel.startswith(("layer_norm", "gelu", "fp8", "swiglu_kernel"))
            }
        assert {row["kernel"] for row in rows} == set(gate.WORK) - missing


@pytest.mark.slow
def test_products_use_the_matrix_instructions_of_their_type(checked):
    named = {
        "bf16": r"mma.*bf16|mfma.*bf16|tcgen05.mma.*f16", "tf32": r"mfma.*xf32|mma.*tf32", "fp32": r"mfma.*x\d+_?f32"
    }  # fmt: skip
    products = [row for row in checked if row["has_dot"]]
    assert {row["kernel"] for row in products} >= {
        "flash_attention_kernel", "flash_attention_backward_kernel",
        "flash_attention_backward_dq_kernel", "flash_attention_backward_dkdv_kernel",
    }  # fmt: skip
    for row in products:
        matrix = [name for name in row["instructions"] if compiler.is_matrix(name)]
        if row["arch"].startswith("gfx9") or row["precision"] != "fp32":
            assert matrix and all(re.search(named[row["precision"]], name) for name in matrix), (row["arch"], matrix)


@pytest.mark.slow
def test_arguments_are_those_of_a_launch(checked):
    """Without the alignment of its pointers and strides a kernel loads element by element."""
    attention = [row for row in checked if row["kernel"] == "flash_attention_kernel" and row["case"] == "medium"]
    assert {row["arch"] for row in attention} == set(CHIPS) and all(row["wide_share"] > 0.9 for row in attention)
    strided = [row for row in checked if row["kernel"] == "flash_attention_kernel" and row["case"] == "mistakes"]
    assert all(row["wide_share"] < 0.9 for row in strided if row["arch"].startswith("gfx"))


@pytest.mark.slow
def test_occupancy_is_the_compilers(checked):
    """LLVM says how many waves the registers allow; a program without shared memory has no other limit."""
    compared = 0
    for row in checked:
        if row["compiler_occupancy"]:
            used = row["registers"], 0, 1, row["scalar_registers"], row["options"].get("waves_per_eu")
            waves = occupancy(row["arch"], *used)["warps"] // 4
            assert waves == row["compiler_occupancy"], (row["kernel"], row["arch"], row["registers"])
            compared += 1
    assert compared > 100


@pytest.mark.slow
def test_a_spoiled_tile_is_named():
    spoil = "llama.attention_tile = lambda kernel, *a, tile=llama.attention_tile: "
    spoil += "llama.AttentionTile(256, 128, 4, 1) if kernel == 'forward' else tile(kernel, *a)"
    options = ["--architectures", "gfx942", "--cases", "heads-128", "--precisions", "bf16"]
    done = run_report("--check", *options, before=spoil)
    assert done.returncode == 1, done.stdout + done.stderr
    told = r"flash_attention_kernel for gfx942 .*: \d+ vector registers spilled, limit 0"
    assert re.search(told, done.stdout), done.stdout


@pytest.fixture(scope="session")
def old_triton():
    """A folder with the oldest Triton that is supported: what ROCm 6.4's PyTorch brings."""
    if not os.environ.get("TEST_OLD_TRITON"):
        pytest.skip(f"TEST_OLD_TRITON=1 downloads Triton {OLD_TRITON} (150 MB)")
    try:
        return compilers.install(OLD_TRITON)
    except llama.UsageError as error:
        pytest.skip(str(error))


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


# --- the check's rules, one by one


GOOD = {
    "kernel": "a_kernel", "arch": "gfx942", "case": "small", "precision": "bf16", "tile": "64 m", "warps": 4,
    "shared_bytes": 65536, "vector_spills": 0, "scalar_spills": 0, "scratch_bytes": 0, "registers": 256,
    "has_dot": True, "head": 64, "matrix_instructions": 1, "wide_loads_expected": True, "wide_share": 1.0,
}  # fmt: skip
BAD = {
    "shared memory": (dict(shared_bytes=65537), "65537 bytes of shared memory, limit 65536"),
    "shared memory of a program": (
        dict(shared_bytes=232449, arch="sm_90"),
        "232449 bytes of shared memory, limit 232448",
    ),
    "threads": (dict(warps=32), "32 warps are 2048 threads, limit 1024"),
    "spills": (dict(vector_spills=1), "1 vector registers spilled, limit 0"),
    "scalar spills": (dict(scalar_spills=2), "2 scalar registers spilled, limit 1"),
    "scratch": (dict(scratch_bytes=4), "4 bytes of scratch a thread, limit 0"),
    "accumulation registers": (dict(has_dot=False, registers=257), "257 registers, limit 256"),
    "no matrix instruction": (dict(matrix_instructions=0), "no matrix instruction"),
    "no matrix instruction in fp32": (dict(matrix_instructions=0, precision="fp32"), "no matrix instruction"),
    "no matrix instruction in TF32": (
        dict(matrix_instructions=0, precision="tf32", arch="sm_80"),
        "no matrix instruction",
    ),
    "narrow loads": (dict(wide_share=0.25), "25% of its bytes in loads of 8 bytes or more, at least 50% needed"),
    "no code": (dict(error="OutOfMemory: x"), "does not compile: OutOfMemory: x"),
}


def test_good_row_passes():
    assert gate.violations(GOOD) == []
    assert gate.violations(GOOD | dict(arch="gfx950", shared_bytes=163840)) == []
    without = dict(warps=32, precision="fp32", matrix_instructions=0)
    assert (
        gate.violations(GOOD | without | dict(arch="sm_90"))
        == gate.violations(GOOD | without | dict(arch="gfx1201"))
        == []
    )


@pytest.mark.parametrize("change, message", BAD.values(), ids=BAD.keys())
def test_bad_row_names_kernel_architecture_figure_and_limit(change, message):
    (line,) = gate.violations(GOOD | change)
    arch, precision = ((GOOD | change)[name] for name in ("arch", "precision"))
    assert line.startswith(f"a_kernel for {arch} (small, {precision}, 64 m): ") and message in line


@pytest.mark.parametrize("change, limit", [
    (dict(), None), (dict(head=64), 0), (dict(head=None), 0), (dict(scratch_bytes=421), 420), (dict(arch="gfx1201"), 0),
    (dict(kernel="flash_attention_kernel"), 0), (dict(precision="tf32"), 0),
])  # fmt: skip
def test_radeons_spill_at_wide_heads_alone_and_no_more_than_now(change, limit):
    row = dict(arch="gfx1100", kernel="flash_attention_backward_dq_kernel", head=128, vector_spills=102)
    lines = gate.violations(GOOD | row | dict(scratch_bytes=420) | change)
    assert [line for line in lines if f"bytes of scratch a thread, limit {limit}" in line] == lines[-1:]
    assert bool(lines) == (limit is not None)


def test_new_kernel_without_an_entry_is_named():
    class Kernel:
        pass

    lines = list(gate.missing_kernels({"new_kernel": Kernel}, []))
    assert len(lines) == 2 and all(line.startswith("new_kernel: ") for line in lines)
    assert "CASES" in lines[0] and "WORK" in lines[1]


def test_wide_share_counts_bytes():
    assert compiler.wide_share({16: 3, 2: 8}) == 48 / 64
    assert compiler.wide_share({}) is None


@pytest.mark.parametrize("name", ["v_wmma_f32_16x16x16_bf16", "v_mfma_f32_16x16x4_f32", "tcgen05.mma.cta_group::1"])
def test_matrix_instructions_are_known(name):
    assert compiler.is_matrix(name) and not compiler.is_matrix(f"x{name}")


@pytest.mark.parametrize("name, access", [
    ("global_load_dwordx4", ("load", 16)), ("buffer_load_ushort", ("load", 2)), ("flat_store_byte", ("store", 1)),
    ("buffer_load_b128", ("load", 16)), ("global_load_u16", ("load", 2)), ("buffer_load_d16_b16", ("load", 2)),
    ("global_load_d16_hi_u8", ("load", 1)), ("buffer_store_b96", ("store", 12)),
    ("global_store_short_d16_hi", ("store", 2)),
    ("ds_load_b128", None), ("scratch_load_b32", None), ("s_buffer_load_b32", None), ("global_inv", None),
])  # fmt: skip
def test_loads_of_amd_have_the_names_of_both_instruction_sets(name, access):
    assert compiler.memory_access(name) == access


def test_only_loads_of_amd_count_for_their_width():
    fields = ("vgpr_count", "sgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    lines = ["  global_load_ushort v7, v[8:9], off", *2 * ["  buffer_store_dwordx4 v[2:5], v1, s[0:3], 0 offen"]]
    text = "\n".join([*lines, *(f"    .{name}: 8" for name in fields), "; Occupancy: 3"])
    read = compiler.read_amdgcn({"amdgcn": text})
    assert read["instructions"] == {"load 16": 1, "store 128": 2} and read["wide_share"] == 0


def test_loads_of_nvidia_are_counted_by_their_bytes(monkeypatch):
    usage = SimpleNamespace(stdout="REG:10 STACK:4 SHARED:0 LOCAL:8")
    monkeypatch.setattr(compiler.subprocess, "run", lambda *_, **__: usage)
    ptx = "@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];\nld.global.b16 { %rs1 }, [ %rd2 + 0 ];\n"
    ptx += "st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };\n"
    ptx += "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, 0x10;"
    read = compiler.read_cubin({"cubin": b"", "ptx": ptx})
    assert read["instructions"] == {"load 128": 1, "load 16": 1, "store 128": 1, "async load 128": 1}
    assert read["wide_share"] == 32 / 34 and (read["registers"], read["scratch_bytes"]) == (10, 12)


def test_work_is_that_of_the_formulas():
    kernels = recorded.find_kernels(recorded.kernel_modules())
    config = llama.Config(**recorded.CASES["medium"].sizes, use_amp=True)
    work = {}
    for launch in recorded.record_step(config, "sm_90"):
        work[launch.kernel] = gate.WORK[launch.kernel](launch.arguments(kernels[launch.function]))
    tokens, hidden, layers = config.tokens_per_step, config.hidden_dim, config.num_layers
    product = config.seq_len * tokens * hidden  # of (seq, seq, head_dim), half of it masked, over all heads
    assert work["flash_attention_kernel"][1] == 2 * product
    assert work["flash_attention_backward_dq_kernel"][1] == 3 * product
    # The last norm launched in a forward pass adds: it reads two tensors and writes two.
    assert work["rmsnorm_kernel"][0] == 4 * tokens * hidden * 2 + hidden * 2 + tokens * 4
    assert work["swiglu_activation_kernel"][0] == 3 * tokens * config.ffn_dim * 2
    weights = layers * (hidden * (3 * hidden + 3 * config.ffn_dim) + 2 * hidden) + hidden * (config.vocab_size + 1)
    assert work["adamw_kernel"][0] == pytest.approx(26 * weights, rel=1e-3)
