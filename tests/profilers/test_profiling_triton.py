"""run_triton_profiling.py: what it prints, and that a wrong kernel does not pass. Times are never asserted."""

import contextlib
import functools
import io
import json
import re
from types import SimpleNamespace

import pytest
import torch

import tiny_llama_v3 as llama

pytestmark = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")
if llama.triton is not None:
    import run_triton_profiling as program

SMALL = "--batch-size 1 --seq-len 16 --hidden-dim 16 --num-heads 2 --vocab-size 40".split()


def run_in(folder, *flags):
    """(exit code, output, errors, result or None) of a run whose result is new/result.json in a folder."""
    path = folder / "new" / "result.json"
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = program.main([*SMALL, *flags, "--json", str(path)])
    return code, out.getvalue(), err.getvalue(), json.loads(path.read_text()) if path.exists() else None


@pytest.fixture
def run(tmp_path):
    return functools.partial(run_in, tmp_path)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    return run_in(tmp_path_factory.mktemp("whole"))


def test_every_kernel_is_right_and_reported_as_the_exercise_shows_it(whole_run, device):
    code, out, err, result = whole_run
    expected = (
        r"=== Triton Kernel Performance Analysis ===\n\n1\. RMSNorm Kernel Profiling\n"
        r"  Triton RMSNorm: \d+\.\d{3} ms\n  PyTorch RMSNorm: \d+\.\d{3} ms\n"
        r"  Speedup: \d+\.\d{2}x\n  Max error: \d\.\d{2}e[+-]\d{2} "
    )
    assert code == 0 and re.match(expected, out) and (device == "cuda" or "times mean nothing" in err)
    names = ["RMSNorm", "RMSNorm backward", "SwiGLU", "SwiGLU backward", "attention", "attention backward"]
    assert [case["name"] for case in result["kernels"]] == [*names, "cross-entropy"]
    for case in result["kernels"]:
        assert 0 <= case["error"] <= case["allowed"] < (0.1 if result["dtype"] == "float32" else 1)
        assert f"  Triton {case['name']}: {case['triton']['ms']:.3f} ms\n" in out
    assert [row["block_size"] for row in result["block_sizes"]] == [64, 128, 256, 512, 1024]
    size = {"float32": 4, "bfloat16": 2}[result["dtype"]]
    assert all(row["GB/s"] * row["ms"] == pytest.approx(2 * 16 * 16 * size / 1e6) for row in result["block_sizes"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted only where there is no GPU")
def test_a_rate_is_the_work_over_the_time_and_its_share_that_of_the_ceiling(monkeypatch, capsys):
    times = iter([2.0, 3.0, 2.0, 3.0])  # ms of ours and of PyTorch's
    monkeypatch.setattr(program, "figures", lambda bench, call: {"ms": next(times), "memory_mib": None})
    bench, config = program.Bench(torch.device("cpu")), llama.Config(seq_len=16)
    for unit, line in (
        ("TB/s", "  Bandwidth: 3 GB/s, 75 % of the 4 GB/s "),
        ("x", "  Arithmetic: 0.005 TFLOP/s, 1 % of"),
    ):
        (case, *_) = program.kernels.swiglu_cases(bench, 16, config.ffn_dim)
        case.unit, case.work = unit, program.kernels.work.Work(6e6, 1e7)
        program.profile(bench, case, {"GB/s": 4.0, "TFLOP/s": 0.5})
        out = capsys.readouterr().out
        assert line in out and "  Speedup: 1.50x\n" in out


def test_a_wrong_kernel_is_found(run, monkeypatch):
    forward = llama.rmsnorm_forward

    def wrong(*args):
        residual, y, rstd = forward(*args)
        y[-1, -1] += 10
        return residual, y, rstd

    monkeypatch.setattr(llama, "rmsnorm_forward", wrong)
    code, out, _, _ = run("--only", "rmsnorm")
    assert code == 1 and out.count("WRONG") == 1
    monkeypatch.setattr(llama, "rmsnorm_forward", lambda *args: tuple(x * float("nan") for x in forward(*args)))
    assert run("--only", "rmsnorm")[0] == 1


@pytest.mark.parametrize("width, heads", [("4096", 256), ("96", 6), ("8", 1)])
def test_heads_of_another_width_are_as_wide(width, heads):
    usual = program.SIZES["cpu"]
    assert program.parse(["--hidden-dim", width], usual).sizes == usual | {"hidden_dim": int(width), "num_heads": heads}


@pytest.mark.parametrize("flags, complaint", [
    (["--only", "fft"], "invalid choice"), (["--seq-len", "0"], "--seq-len 0 is out of range"),
    (["--hidden-dim", "-3"], "--hidden-dim -3 is out of range"),
    (["--hidden-dim", "33"], "--hidden-dim 33 is not divisible by --num-heads 2"),
    (["--seq-len", "1000000000"], "--seq-len 1000000000, --num-layers 1, --hidden-dim 16, "),
])  # fmt: skip
def test_bad_requests(run, flags, complaint):
    code, out, err, result = run(*flags)
    assert code == 2 and complaint in err and err.count("\n") == 1 and result is None
    assert out == "" or torch.cuda.is_available()  # whose memory ends while it measures


@pytest.mark.gpu
def test_the_sweep_has_registers_on_a_gpu(run):
    rows = run("--only", "rmsnorm")[3]["block_sizes"]
    assert all(row["registers"] and (row["occupancy"] is None or 0 < row["occupancy"] <= 1) for row in rows)


@pytest.mark.parametrize("arch, registers, share", [
    ("sm_90", 64, 0.5),  # 32 of 64 warps: 65536 registers / (64 x 32)
    ("gfx942", 64, 1.0),  # 32 of 32 waves: 4 x 512 / 64
    ("sm_70", 64, None),  # nothing is known of it
    ("sm_90", None, None),  # interpreted
])  # fmt: skip
def test_what_occupancy_registers_allow(arch, registers, share):
    compiled = SimpleNamespace(n_regs=registers, metadata=SimpleNamespace(shared=0))
    assert program.resources(arch, compiled, warps=4) == {"registers": registers, "occupancy": share}
