"""run_triton_profiling.py: what it prints, and that a wrong kernel does not pass. Times are never asserted."""

import contextlib
import errno
import functools
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import tiny_llama_v3 as llama

pytestmark = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")
if llama.triton is not None:
    import run_triton_profiling as program

SMALL = "--batch-size 1 --seq-len 16 --hidden-dim 16 --num-heads 2 --vocab-size 40".split()
NAMES = ["RMSNorm", "RMSNorm backward", "SwiGLU", "SwiGLU backward", "SwiGLU matrix product, naive"]
NAMES += ["attention", "attention backward", "cross-entropy"]


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


def test_output_begins_as_the_exercise_shows_it(whole_run):
    code, out, _, _ = whole_run
    expected = (
        r"=== Triton Kernel Performance Analysis ===\n\n1\. RMSNorm Kernel Profiling\n"
        r"  Triton RMSNorm: \d+\.\d{3} ms\n  PyTorch RMSNorm: \d+\.\d{3} ms\n"
        r"  Speedup: \d+\.\d{2}x\n  Max error: \d\.\d{2}e[+-]\d{2} "
    )
    assert code == 0 and re.match(expected, out)


def test_every_kernel_is_right_and_reported(whole_run, device):
    code, out, err, result = whole_run
    assert code == 0 and [case["name"] for case in result["kernels"]] == NAMES
    for case in result["kernels"]:
        assert 0 <= case["error"] <= case["allowed"] < (0.1 if result["dtype"] == "float32" else 1)
        for contender in ("triton", "torch"):
            assert case[contender]["ms"] > 0 and case[contender]["wall_ms"] > 0
        assert case["speedup"] == pytest.approx(case["torch"]["ms"] / case["triton"]["ms"])
        amount = case["bytes"] / 1e6 if case["unit"] == "GB/s" else case["flop"] / 1e9
        assert case["rate"] == pytest.approx(amount / case["triton"]["ms"])
        assert case["share"] == pytest.approx(case["rate"] / result["ceilings"][case["unit"]])
        assert f"  Triton {case['name']}: {case['triton']['ms']:.3f} ms\n" in out
    assert [row["block_size"] for row in result["block_sizes"]] == [64, 128, 256, 512, 1024]
    assert sum(row["usual"] for row in result["tiles"]) <= 1
    assert all(row["ms"] or row["error"] for row in result["tiles"])
    if device == "cpu":
        assert "times mean nothing" in err and "Times mean nothing" in out


def test_bytes_and_flop_of_a_call(whole_run):
    """By hand, for 16 tokens of 16 dimensions and two heads of 8 (one for keys and values), ffn 64, vocabulary 40."""
    _, _, _, result = whole_run
    size = {"bfloat16": 2, "float32": 4}[result["dtype"]]
    cases = {case["name"]: case for case in result["kernels"]}
    assert cases["RMSNorm"]["bytes"] == (2 * 16 * 16 + 16) * size + 16 * 4  # x, y; weight; rstd
    assert cases["SwiGLU"]["bytes"] == 3 * 16 * 64 * size
    assert cases["cross-entropy"]["bytes"] == 2 * 16 * 40 * size + 16 * (8 + 8)  # targets; losses and counts
    assert cases["attention"]["bytes"] == (2 * 16 * 16 + 2 * 16 * 8) * size + 2 * 16 * 4  # q, o; k, v; lse
    assert cases["attention"]["flop"] == 2 * (2 * 2 * 16 * 16 * 8) // 2  # two products of two heads, half of it masked
    rows = 16 if result["environment"]["arch"] != "cpu" else 2
    assert cases["SwiGLU matrix product, naive"]["flop"] == 2 * rows * 16 * 128 + 5 * rows * 64  # and the activation


def test_ceilings_by_hand(monkeypatch):
    times = iter([2000.0, 1000.0, 3000.0, 600.0, 500.0, 800.0])  # us; the best of three counts
    monkeypatch.setattr(program.Bench, "microseconds", lambda bench, calls: next(times))
    ceilings = program.measure_ceilings(program.Bench(llama.get_device("cpu")))
    assert ceilings["GB/s"] == pytest.approx(2 * 4 * 2**23 / 1e-3 / 1e9)
    assert ceilings["TFLOP/s"] == pytest.approx(2 * 1024**3 / 500e-6 / 1e12)


def test_a_wrong_kernel_is_found(run, monkeypatch):
    forward = llama.rmsnorm_forward

    def wrong(*args):
        residual, y, rstd = forward(*args)
        y[-1, -1] += 10
        return residual, y, rstd

    monkeypatch.setattr(llama, "rmsnorm_forward", wrong)
    code, out, err, result = run("--only", "rmsnorm", "--no-sweeps")
    assert code == 1 and out.count("WRONG") == 1 and "RMSNorm differs from PyTorch" in err
    assert result["kernels"][0]["error"] > result["kernels"][0]["allowed"]
    monkeypatch.setattr(llama, "rmsnorm_forward", lambda *args: tuple(x * float("nan") for x in forward(*args)))
    assert run("--only", "rmsnorm", "--no-sweeps")[0] == 1


@pytest.mark.parametrize("width, device_type, heads", [(4096, "cuda", 64), (1056, "cuda", 22), (60, "cpu", 5)])
def test_heads_of_another_width_are_even_and_not_wider(width, device_type, heads):
    assert program.heads_of(width, program.SIZES[device_type]) == heads


@pytest.mark.parametrize("width", [-3, 0])
def test_a_width_that_is_none_is_refused_where_heads_follow_from_it(width, capsys):
    assert program.main(["--hidden-dim", str(width)]) == 2
    assert f"--hidden-dim {width} is out of range" in capsys.readouterr().err


@pytest.mark.parametrize("flags, complaint", [
    (["--only", "fft"], "invalid choice"), (["--seq-len", "0"], "--seq-len 0 is out of range"),
    (["--hidden-dim", "33"], "--hidden-dim 33 is not divisible by --num-heads 2"),
    (["--seq-len", "1000000000"], "out of memory with --seq-len 1000000000, --hidden-dim 16, --vocab-size 40: "),
])  # fmt: skip
def test_bad_requests(run, flags, complaint):
    code, out, err, result = run(*flags)
    assert code == 2 and complaint in err and err.count("\n") == 1 and out == "" and result is None


@pytest.mark.parametrize("name", ["", ".", "x" * 300, "new/" + "x" * 300, "file/below"])
def test_file_that_cannot_be_written(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(program, "measure_ceilings", pytest.fail)  # before anything is measured
    assert program.main([*SMALL, "--json", name]) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and f"--json {name or repr(name)}" in err and out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_full_disk_keeps_the_figures_printed_and_the_older_file(run, tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "result.json").write_text('"an older one"')
    monkeypatch.setattr(Path, "write_text", fail)
    code, out, err, result = run("--only", "rmsnorm", "--no-sweeps")
    assert code == 2 and "Triton RMSNorm" in out and result == "an older one"
    assert "(No space left on device): free space or give another" in err.splitlines()[-1]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["result.json"]


@pytest.mark.gpu
def test_a_tile_too_large_is_reported_not_fatal(run):
    code, _, _, result = run("--only", "attention", "--hidden-dim", "256", "--num-heads", "2", "--seq-len", "256")
    assert code == 0 and any(row["usual"] for row in result["tiles"])
    rows = run("--only", "rmsnorm")[3]["block_sizes"]
    assert all(row["registers"] and (row["occupancy"] is None or 0 < row["occupancy"]["share"] <= 1) for row in rows)


@pytest.mark.parametrize("arch, registers, share", [
    ("sm_90", 64, 0.5),  # 32 of 64 warps: 65536 registers / (64 x 32)
    ("gfx942", 64, 1.0),  # 32 of 32 waves: 4 x 512 / 64
    ("sm_89", 64, None),  # nothing is known of it
    ("sm_90", None, None),  # interpreted
])  # fmt: skip
def test_the_sweep_shows_what_occupancy_registers_allow(arch, registers, share, capsys):
    compiled = SimpleNamespace(n_regs=registers, metadata=SimpleNamespace(shared=0))
    row = program.resources(arch, compiled, warps=4)
    assert row["registers"] == registers and (row["occupancy"] or {"share": None})["share"] == share
    program.print_sweep([{"block_size": 64, "rows": 8, "warps": 4, "ms": 0.5, "GB/s": 100.0, **row}])
    titles, figures = (line.split() for line in capsys.readouterr().out.splitlines())
    assert figures[titles.index("occupancy")] == ("-" if share is None else f"{share:.0%}")
