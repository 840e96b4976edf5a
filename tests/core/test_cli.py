"""The command line: what a run prints and leaves behind, and what it says when it cannot do what was asked."""

import contextlib
import csv
import dataclasses
import errno
import functools
import itertools
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tiny_llama_v3 as llama
from tiny_llama import hardware, profiler

needs_triton = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")
IMPLEMENTATIONS = [pytest.param("triton", marks=needs_triton), "torch", "sdpa"]
SCRIPT = Path(llama.__file__).resolve()

TINY = (
    "--hidden-dim 32 --num-layers 2 --num-heads 4 --num-kv-heads 2 --ffn-dim 48 --vocab-size 37 --batch-size 2 "
    "--seq-len 17 --num-steps 3 --warmup-steps 1 --impl torch --device cpu"
).split()
TINIER = (  # a quarter of the time in Triton's interpreter
    "--hidden-dim 16 --num-layers 1 --num-heads 2 --num-kv-heads 1 --ffn-dim 16 --vocab-size 11 --batch-size 1 "
    "--seq-len 5"
).split()
LABELS = {  # of the summary: label, what follows it
    "Final loss": r"[\d.]+ ", "Average training speed": r"[\d.]+ samples/sec$", "Throughput": r"[\d,]+ tokens/sec$",
    "Average batch time": r"[\d.]+ ms \(p20 [\d.]+, p50 [\d.]+, p80 [\d.]+\)$", "Average forward time": r"[\d.]+ ms$",
    "Average backward time": r"[\d.]+ ms$", "Average optimizer time": r"[\d.]+ ms$", "Peak memory usage": r"[\d.]+ MiB",
    "Parameters with a gradient": r"[\d,]+ of [\d,]+ \([\d.]+ %\)$", "Model arithmetic": r"[\d.]+ TFLOP/s",
    "Compilation and warm-up": r"[\d.]+ s", "Results": r".+\.json$",
}  # fmt: skip


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch, tmp_path):
    """Runs start in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture
def cli(capsys):
    """Runs the tiny model; later flags win."""

    def run(*flags):
        capsys.readouterr()
        code = llama.main([*TINY, *map(str, flags)], "tiny_llama_v3.py")
        out, err = capsys.readouterr()
        path = re.search(r"^Results: (.*)$", out, re.M)
        losses = [float(loss) for loss in re.findall(r"^step .*? loss ([\d.]+)", out, re.M)]
        result = strict_json(path[1]) if path else None
        return SimpleNamespace(code=code, out=out, err=err, losses=losses, result=result)

    return run


@pytest.fixture
def after_call(monkeypatch):
    """after_call(number, name, act): act(step) follows that call of a method of TrainStep, warm-up included."""

    def arm(number, name, act):
        calls, method = itertools.count(1), getattr(llama.TrainStep, name)

        def replacement(step):
            method(step)
            if next(calls) == number:
                act(step)

        monkeypatch.setattr(llama.TrainStep, name, replacement)

    return arm


def strict_json(path):
    """A file's content; NaN and Infinity are no JSON."""
    return json.loads(Path(path).read_text(), parse_constant=pytest.fail)


def printed(out, label):
    (value,) = re.findall(rf"^{label}: ([\d.,]+)", out, re.M)
    return float(value.replace(",", ""))


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# --- a run


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_run_prints_and_writes_the_same(cli, tmp_path, device, impl):
    run = cli("--impl", impl, "--device", device, "--data", "markov", "--seed", 5, "--num-layers", 1)
    assert run.code == 0 and run.err == ""
    for label, pattern in LABELS.items():
        assert len(re.findall(rf"^{label}: {pattern}", run.out, re.M)) == 1, label
    assert run.out.count("warm-up 1/1") == 1 and len(run.losses) == 3
    assert f"Implementation: {impl}\n" in run.out

    (path,) = (tmp_path / "triton_profiles").iterdir()
    assert re.fullmatch(rf"tiny_llama_v3_{impl}_\d{{8}}_\d{{6}}\.json", path.name)
    result, summary = run.result, run.result["summary"]
    asked = dict(impl=impl, device=device, data="markov", seed=5, num_steps=3, batch_size=2, seq_len=17, ffn_dim=48)
    assert set(result["config"]) == {field.name for field in dataclasses.fields(llama.Config)}
    assert result["config"] == result["config"] | asked
    assert result["environment"]["torch"] == torch.__version__ and result["environment"]["arch"]
    assert set(result["environment"]) == {
        "device", "arch", "python", "torch", "triton", "cuda", "hip", "driver", "numpy", "commit"
    }  # fmt: skip
    for name, operation in result["operations"].items():
        assert re.search(rf"^ +{name} +{re.escape(operation)}$", run.out, re.M)

    steps = result["steps"]
    assert [round(step["loss"], 4) for step in steps] == run.losses
    assert all(step["grad_norm"] > 0 and step["host_ms"] > 0 for step in steps)
    for step in steps:
        assert list(step["phase_ms"]) == ["forward", "backward", "optimizer"]
        assert sum(step["phase_ms"].values()) == pytest.approx(step["batch_ms"])
    mean = statistics.fmean(step["batch_ms"] for step in steps)
    assert summary["batch_ms"]["mean"] == pytest.approx(mean)
    assert summary["batch_ms"]["p20"] <= summary["batch_ms"]["p50"] <= summary["batch_ms"]["p80"]
    assert summary["batch_ms"]["p50"] == pytest.approx(statistics.median(step["batch_ms"] for step in steps))
    assert summary["entropy"] == pytest.approx(1.75 * math.log(2))
    assert summary["first_loss"] == steps[0]["loss"] and summary["final_loss"] == steps[-1]["loss"]
    assert summary["host_ms"] == pytest.approx(statistics.median(step["host_ms"] for step in steps))
    tflops = hardware.model_tflops(llama.Config(**result["config"])) / (summary["batch_ms"]["p50"] / 1e3)
    assert summary["tflops_per_second"] == pytest.approx(tflops)
    parameters = printed(run.out, "Parameters with a gradient")
    assert summary["parameters"] == summary["parameters_with_gradient"] == parameters

    assert printed(run.out, "Average training speed") == pytest.approx(2e3 / mean, abs=0.051)
    assert printed(run.out, "Throughput") == pytest.approx(2 * 17e3 / mean, abs=0.51)
    assert printed(run.out, "Average batch time") == pytest.approx(mean, abs=0.00051)
    assert printed(run.out, "Final loss") == run.losses[-1]
    assert printed(run.out, "Peak memory usage") == pytest.approx(summary["peak_memory_mib"], abs=0.051)
    for phase in ("forward", "backward", "optimizer"):
        mean = statistics.fmean(step["phase_ms"][phase] for step in steps)
        assert printed(run.out, f"Average {phase} time") == pytest.approx(mean, abs=0.00051)


def test_timing_of_whole_steps(cli):
    run, phases = cli("--timing", "step"), cli("--timing", "phases")
    assert run.code == phases.code == 0 and len(run.losses) == 3
    assert run.out.count("not measured (--timing step)") == 3
    assert [step["phase_ms"] for step in run.result["steps"]] == [{}] * 3
    mean = statistics.fmean(step["batch_ms"] for step in run.result["steps"])
    assert printed(run.out, "Average batch time") == pytest.approx(mean, abs=0.00051)
    assert run.losses == phases.losses
    last_norm = phases.result["steps"][-1]["grad_norm"]
    assert [step["grad_norm"] for step in run.result["steps"]] == [None, None, last_norm]
    for each in (run, phases):
        assert each.result["summary"]["diverged"] is None and "diverged" not in each.out
        assert re.search(rf"^Final loss: .*floor {math.log(37):.4f}, ln\(vocab\)", each.out, re.M)


def test_profile(cli, tmp_path):
    assert cli("--profile", tmp_path / "a" / "profile").code == 0
    folder = tmp_path / "a" / "profile"
    assert files(folder) == ["kernel_stats.csv", "trace.json"]
    names = [event.get("name") for event in json.loads((folder / "trace.json").read_text())["traceEvents"]]
    assert [names.count(name) for name in ("step", "forward", "backward", "optimizer")] == [3, 3, 3, 3]

    header, *_ = (folder / "kernel_stats.csv").read_text().splitlines()
    assert header == '"Name","Calls","TotalDurationNs","AverageNs","Percentage","MinNs","MaxNs","StdDev"'
    with open(folder / "kernel_stats.csv", newline="") as file:
        rows = list(csv.DictReader(file, quoting=csv.QUOTE_NONNUMERIC))
    assert len(rows) > 5 and len({row["Name"] for row in rows}) == len(rows)
    assert sum(row["Percentage"] for row in rows) == pytest.approx(100, abs=1e-3)
    assert [row["TotalDurationNs"] for row in rows] == sorted((row["TotalDurationNs"] for row in rows), reverse=True)
    for row in rows:
        assert row["Calls"] * row["AverageNs"] == pytest.approx(row["TotalDurationNs"], abs=1)
        assert row["MinNs"] <= row["AverageNs"] + 0.5 and row["AverageNs"] <= row["MaxNs"] + 0.5
        assert row["StdDev"] <= row["MaxNs"] - row["MinNs"] + 1


def test_results_written_at_once_all_arrive(tmp_path, monkeypatch):
    monkeypatch.setattr(llama.os, "getpid", threading.get_ident)  # each thread is a process

    def save(number):
        return llama.write_new_json(tmp_path, "same_second", {"number": number})

    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(save, range(50)))
    assert [json.loads(path.read_text())["number"] for path in paths] == list(range(50))
    assert len(files(tmp_path)) == 50  # no temporary file is left


@pytest.mark.parametrize("lines", range(25))
def test_results_are_whole_after_an_interruption(tmp_path, lines):
    left = iter(range(lines))

    def trace(frame, event, argument):
        if event == "line" and next(left, None) is None:
            raise KeyboardInterrupt
        return trace if frame.f_code.co_filename == llama.__file__ else None

    with contextlib.suppress(KeyboardInterrupt):
        sys.settrace(trace)
        llama.write_new_json(tmp_path, "result", {})
    sys.settrace(None)
    assert [strict_json(path) for path in tmp_path.glob("*.json")] in ([], [{}])


@pytest.fixture
def full_disk(monkeypatch):
    """A context in which no file can grow beyond a size: another error than on a full disk, on the same way."""
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(hardware, "environment", lambda device: {})  # git would die and leave a lock on the repository

    @contextlib.contextmanager
    def limited(size):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    return limited


@pytest.mark.parametrize("size", [0, 1000])
def test_full_disk(cli, tmp_path, full_disk, size):
    with full_disk(size):
        run = cli()
    assert run.code == 2 and run.result is None and "Average batch time" in run.out  # the figures are not lost
    assert re.fullmatch(r".* error: triton_profiles cannot be written to \(File too large\): free .*\n", run.err)
    assert files(tmp_path) == ["triton_profiles"]


@pytest.mark.parametrize("error, code", [(OSError(errno.ENOSPC, "No space left"), 2), (KeyboardInterrupt(), 130)])
def test_a_profile_that_cannot_be_written(cli, monkeypatch, error, code):
    monkeypatch.setattr("pandas.DataFrame.to_csv", Mock(side_effect=error))
    run = cli("--profile", "profile")
    assert run.code == code and len(run.result["steps"]) == 3
    assert code != 2 or re.fullmatch(r".* error: profile cannot be written to \(No space left\): .*\n", run.err)


A_RUN, STAGES = ["--num-steps", "1000000"], ["--list-stages"]  # which are flushed only at the end


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("flags", [pytest.param(A_RUN, marks=pytest.mark.slow), STAGES], ids=["run", "stages"])
def test_full_disk_under_the_output(tmp_path, flags):
    with open("/dev/full", "w") as full:
        command = [sys.executable, SCRIPT, *TINY, *flags]
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 2 and re.fullmatch(r".* error: .*No space left on device\n", done.stderr)


@pytest.mark.parametrize("flags", [A_RUN, pytest.param(STAGES, marks=pytest.mark.slow)], ids=["run", "stages"])
def test_reader_of_the_output_leaves(tmp_path, flags):
    """As in `| head -1`."""
    read, write = os.pipe()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, SCRIPT, *TINY, *flags]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    if flags == A_RUN:
        os.read(read, 1)
    os.close(read)
    with process:
        try:
            _, err = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 141 and not err and not files(tmp_path)


def test_without_standard_streams(tmp_path):
    command = f"exec {shlex.join([sys.executable, str(SCRIPT), *TINY])} <&- >&- 2>&-"
    assert subprocess.run(command, shell=True, cwd=tmp_path, timeout=300).returncode == 0
    assert len(list((tmp_path / "triton_profiles").iterdir())) == 1


def test_one_seed_one_result(cli):
    losses = cli().losses
    assert len(set(losses)) == 3 and losses == cli().losses
    assert losses != cli("--seed", 2**32 - 1).losses  # the largest: warm-up takes other data, of no larger seed
    torch.use_deterministic_algorithms(False)
    assert losses == cli("--deterministic").losses
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_warm_up_leaves_no_trace(cli, impl):
    """Neither in the weights nor in the optimizer."""

    def run(*flags):
        steps = cli(*TINIER, "--impl", impl, "--learning-rate", 0.01, "--num-steps", 2, *flags).result["steps"]
        return [(step["loss"], step["grad_norm"]) for step in steps]

    assert run("--warmup-steps", 2) == run("--warmup-steps", 0)


# --- a run that diverges


def assert_diverged(run, step, quantity, value):
    summary, steps = run.result["summary"], run.result["steps"]
    assert run.code == 1 and run.err == ""
    assert summary["diverged"] == {"step": step, "quantity": quantity, "value": value}
    assert run.out.count(f"\nStep {step}: the {quantity} is {value}: the run diverged") == 1
    assert len(re.findall(r"^step ", run.out, re.M)) == len(steps) == summary["steps"] == step
    assert steps[-1]["loss" if quantity == "loss" else "grad_norm"] is None
    if quantity == "loss":
        assert re.search(rf"^step .* loss {value} ", run.out, re.M) and f"Final loss: {value}" in run.out
        assert summary["final_loss"] is None


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("timing, step, quantity", [("phases", 2, "gradient norm"), ("step", 3, "loss")])
def test_run_that_diverges(cli, impl, timing, step, quantity):
    """The second step's weights are huge: its loss is still finite, its gradients are not."""
    flags = [*TINIER, "--impl", impl, "--timing", timing, "--learning-rate", "1e30", "--num-steps", 4]
    run = cli(*flags, "--profile", "profile")
    assert_diverged(run, step, quantity, "nan")
    assert not files(Path("profile"))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("timing, bad, seen", [
    ("phases", 2, 2), ("phases", 3, 3), ("step", 2, 3), ("step", 3, 3),  # a window's norm is read at its end
])  # fmt: skip
def test_run_whose_gradient_is_not_finite(cli, after_call, timing, bad, seen, value):
    after_call(1 + bad, "backward", lambda step: step.model.norm.weight.grad[0].fill_(value))  # one step of warm-up
    run = cli("--timing", timing)
    if bad == seen:
        assert_diverged(run, bad, "gradient norm", str(value))
    else:
        assert_diverged(run, seen, "loss", "nan")


# --- requests that cannot be met


def assert_refused(run, *fragments, left=()):
    """With one line, and no file but those that were there."""
    assert run.code == 2 and not run.losses and files(Path()) == [*left]
    assert run.err.count("\n") == 1 and run.err.startswith("tiny_llama_v3.py: error: "), run.err
    for fragment in fragments:
        assert fragment in run.err


BAD_FLAGS = {  # each with what the message has
    "--hidden-dim 30": ["--hidden-dim 30", "--num-heads 4", "try"],
    "--num-heads 6 --hidden-dim 48 --num-kv-heads 4": ["--num-heads 6", "--num-kv-heads 4", "try --num-kv-heads 2"],
    "--hidden-dim 36": ["--hidden-dim 36", "--num-heads 4", " 9 ", "even", "change"],
    "--hidden-dim 520": ["--hidden-dim 520", "--num-heads 4", " 130 ", "128", "change"],
    "--learning-rate 0": ["--learning-rate 0.0 is", "1.1754943508222875e-38 to 3.4028234663852886e+38"],
    "--learning-rate -1": ["--learning-rate -1.0 is"], "--learning-rate nan": ["--learning-rate nan is"],
    "--learning-rate inf": ["--learning-rate inf is"],
    "--learning-rate 1e39": ["--learning-rate 1e+39 is"],  # infinite and 0 in fp32
    "--learning-rate 1e-50": ["--learning-rate 1e-50 is"],
    "--num-heads 2147483646 --num-kv-heads 4": ["--hidden-dim 32", "--num-heads 2147483646"],
    "--hidden-dim 2000000000 --num-heads 1000000000 --num-kv-heads 3": ["--num-heads 1000000000", "-kv-heads 3", "s 1"],
    "--batch-size x": ["--batch-size", "'x'", "--help"], "--batch-size 1.5": ["--batch-size", "'1.5'", "--help"],
    "--learning-rate x": ["--learning-rate", "'x'", "--help"], "--batch-size": ["--batch-size", "--help"],
    "--no-such-flag": ["--no-such-flag", "--help"], "--batch 4": ["--batch", "--help"],
    "--stage 9": ["--stage", "9", "1, 2"], "--impl jax": ["--impl", "jax", "triton"],
    "--device tpu": ["--device", "tpu", "cpu"],
    "--vocab-size 3 --data markov": ["--vocab-size 3", "--data markov", "4 or more"],
    "--graph": ["--graph", "GPU", "drop"], "--stage 8": ["--graph", "GPU", "--stage 8"],
}  # fmt: skip


@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_bad_flags(cli, flags):
    assert_refused(cli(*flags.split()), *BAD_FLAGS[flags])


@pytest.mark.parametrize("flag", [*(flag for flag in TINY if flag.startswith("--")), "--seed"])
def test_numbers_out_of_range(cli, flag):
    least = {"--impl": None, "--device": None, "--vocab-size": 2, "--warmup-steps": 0, "--seed": 0}.get(flag, 1)
    most = 2**32 - 1 if flag == "--seed" else 2**31 - 1
    for value in () if least is None else (least - 1, -3, most + 1, 2**63, 10**30):
        assert_refused(cli(flag, value), f"{flag} {value} ", f"{least} to {most}")


@pytest.mark.parametrize("flags", [
    "--batch-size 2147483647 --seq-len 2147483647", "--seq-len 2147483647", "--vocab-size 2000000000",
    "--vocab-size 2000000000 --hidden-dim 2000000000 --num-heads 100000000",
    "--hidden-dim 2000000000 --num-heads 100000000 --ffn-dim 2000000000", "--num-layers 2000000000",
])  # fmt: skip
def test_sizes_whose_product_is_too_large(cli, flags):
    before = llama.peak_memory_mib(llama.get_device("cpu"))
    run = cli(*flags.split(), "--num-kv-heads", 1)
    assert_refused(run, "out of memory", *re.findall(r"--\S+ 2\d+", flags), "lower one")
    assert llama.peak_memory_mib(llama.get_device("cpu")) < before + 2048  # refused before the memory is full


def test_what_is_larger_than_the_host_is_refused(cli, monkeypatch):
    """Whatever the system promises: a promise of memory is no memory."""
    monkeypatch.setattr(hardware, "host_memory_bytes", lambda: 8 * 1000 * 2**20)
    for flags in ("--num-layers 1000000", "--vocab-size 90000000", "--seq-len 700000000"):
        assert_refused(cli(*flags.split()), "out of memory", flags, "lower one")
    monkeypatch.setattr(hardware, "host_memory_bytes", lambda: 2**30)
    assert cli().code == 0


def test_cuda_without_a_gpu(cli, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(cli("--device", "cuda"), "--device cuda", torch.__version__, "--device cpu")
    assert_refused(cli("--device", "auto", "--graph"), "--graph", "GPU", "drop")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_peak_memory_is_in_mib():
    kib = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
    assert llama.peak_memory_mib(llama.get_device("cpu")) == pytest.approx(kib / 1024, rel=0.5)


@pytest.mark.parametrize("name", ["file", "file/below", "dangling", "dangling/below", "x" * 300, "n/" + "x" * 300, ""])
@pytest.mark.parametrize("flag", ["--output-dir", "--profile"])
def test_folder_that_cannot_be_written_to(cli, tmp_path, flag, name):
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "dangling").symlink_to("nowhere")
    shown = f"{flag} {name} cannot be written to" if name else f"{flag} '' names no folder"
    assert_refused(cli(flag, name), shown, "another folder" if name else "give one", left=["dangling", "file"])


def test_folder_is_not_created_before_there_is_a_result(tmp_path):
    assert llama.writable_folder("--output-dir", str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    assert not files(tmp_path)


def test_interpreter_on_a_gpu(monkeypatch):
    """It would multiply bf16 matrices wrongly there as well, and graphs could not be captured."""
    monkeypatch.setattr(llama, "INTERPRETED", True)
    gpu = llama.Device("cuda", "a GPU", "sm_90", num_sms=132, warp_size=32)
    with pytest.raises(llama.UsageError, match="TRITON_INTERPRET=1.*--device cpu"):
        llama.validate_on_device(llama.Config(), gpu)
    llama.validate_on_device(llama.Config(impl="sdpa"), gpu)


@pytest.mark.parametrize("where", ["__init__", "forward", "backward"])
@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB"), MemoryError(),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000000 bytes."),
], ids=["GPU", "Python", "CPU"])  # fmt: skip
def test_out_of_memory(cli, monkeypatch, where, error):
    monkeypatch.setattr(llama.TrainStep, where, Mock(side_effect=error))
    assert_refused(cli(), "out of memory", "--batch-size 2", "--seq-len 17", "--num-layers 2", "lower one")
    run = cli("--batch-size", 1, "--seq-len", 1, "--num-layers", 1, "--vocab-size", 2)
    assert_refused(run, "out of memory with --hidden-dim 32, --ffn-dim 48: lower")  # what can be


@pytest.mark.parametrize("message", [
    "InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')\n\nSet ...",
    "Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl.",
], ids=["PyTorch", "Triton"])  # fmt: skip
def test_no_compiler(cli, monkeypatch, message):
    monkeypatch.setattr(torch, "compile", lambda model: model)
    monkeypatch.setattr(llama.TrainStep, "backward", Mock(side_effect=RuntimeError(message)))
    assert_refused(cli("--compile"), "--compile", "install", "CXX")


@pytest.mark.slow
def test_compile_without_a_compiler(tmp_path):
    environment = {"PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    command = [sys.executable, SCRIPT, *TINY, "--compile"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and re.fullmatch(r".* error: .*compiler.*install.*\n", done.stderr)


def test_other_errors_are_not_hidden(cli, monkeypatch):
    monkeypatch.setattr(llama.TrainStep, "forward", Mock(side_effect=RuntimeError("a mistake in the program")))
    with pytest.raises(RuntimeError, match="a mistake in the program"):
        cli()


@settings(deadline=None, max_examples=400)
@given(hidden_dim=st.integers(-1, 300), num_heads=st.integers(-1, 12), num_kv_heads=st.none() | st.integers(-1, 12))
@example(hidden_dim=256, num_heads=2, num_kv_heads=None)  # the widest heads
def test_any_sizes_give_a_sound_config_or_a_usage_error(hidden_dim, num_heads, num_kv_heads):
    try:
        config = llama.Config(hidden_dim=hidden_dim, num_heads=num_heads, num_kv_heads=num_kv_heads)
    except llama.UsageError as error:
        uneven = min(hidden_dim, num_heads) < 1 or hidden_dim % (2 * num_heads) or hidden_dim > 128 * num_heads
        assert uneven or num_kv_heads is not None and (num_kv_heads < 1 or num_heads % num_kv_heads)
        sizes = {"--hidden-dim": hidden_dim, "--num-heads": num_heads, "--num-kv-heads": num_kv_heads}
        named = [flag for flag, value in sizes.items() if f"{flag} {value}" in str(error)]
        assert named, f"names no flag with the value given: {error}"
        remedy = re.search(r"try --hidden-dim (\d+)", str(error))
        if remedy and int(remedy[1]) <= 128 * num_heads:  # and what it recommends works
            llama.Config(hidden_dim=int(remedy[1]), num_heads=num_heads, num_kv_heads=1)
        return
    assert config.hidden_dim == config.num_heads * config.head_dim
    assert config.head_dim % 2 == 0 and 2 <= config.head_dim <= 128
    assert config.num_kv_heads >= 1 and config.num_heads % config.num_kv_heads == 0
    assert num_kv_heads in (None, config.num_kv_heads) and config.ffn_dim == 4 * hidden_dim


def test_every_flag_is_explained(capsys):
    with pytest.raises(SystemExit) as exit:
        llama.main(["--help"], "tiny_llama_v3.py")
    assert exit.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(llama.Config):
        assert re.search(rf"^  --{field.name.replace('_', '-')}\b", text, re.M)


# --- Ctrl-C


@pytest.mark.parametrize("timing", ["phases", "step"])
def test_interrupted_run_reports_the_steps_done(cli, after_call, timing):
    after_call(4, "forward", Mock(side_effect=KeyboardInterrupt))  # a warm-up and two steps before
    run = cli("--timing", timing, "--num-steps", 5, "--profile", "profile")
    assert run.code == 130 and "Interrupted after 2 of 5 steps" in run.out
    assert len(run.losses) == len(run.result["steps"]) == run.result["summary"]["steps"] == 2
    assert printed(run.out, "Final loss") == run.losses[-1] == round(run.result["summary"]["final_loss"], 4)
    assert not files(Path("profile"))


@pytest.mark.parametrize("number", [1, 2])
def test_run_interrupted_before_the_first_step_leaves_nothing(cli, tmp_path, after_call, number):
    after_call(number, "forward", Mock(side_effect=KeyboardInterrupt))
    run = cli()
    assert run.code == 130 and not run.err and not run.losses
    assert "Final loss" not in run.out and not list(tmp_path.rglob("*.json"))


def test_the_result_has_the_configuration_of_the_run(cli):
    """Not that of the check, whose batch is smaller."""
    batch_size = llama.CHECK_BATCH + 1
    run = cli(*TINIER, "--impl", "torch", "--check", "--batch-size", batch_size, "--num-steps", 1)
    assert run.result["config"]["batch_size"] == batch_size


def test_companions_are_found_beside_the_script(tmp_path):
    """Also where Python does not look into the script's folder."""
    environment = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": ""}
    command = [sys.executable, SCRIPT, "--list-stages"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and "stage 8:" in run.stdout, run.stderr


@pytest.mark.parametrize("where", "check_batch print_configuration summarize write_new_json write_profile".split())
def test_interrupted_elsewhere(cli, tmp_path, monkeypatch, where):
    interrupt = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(profiler if where == "write_profile" else llama, where, interrupt)
    run = cli("--check", "--impl", "sdpa", "--profile", "profile")
    assert run.code == 130 and run.err == ""
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".json"] * (where == "write_profile")
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.parametrize("signals", [
    [signal.SIGTERM], *(pytest.param([signal.SIGINT] * count, marks=pytest.mark.slow) for count in (1, 3)),
], ids=["SIGTERM", "SIGINT", "three SIGINT"])  # fmt: skip
def test_signals(tmp_path, signals):
    command = [sys.executable, SCRIPT, *TINY, "--num-steps", "1000000"]
    default_sigint = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also in a background job
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, cwd=tmp_path, **pipes, preexec_fn=default_sigint)
    with process:
        try:
            for line in process.stdout:
                if line.startswith("step    2/"):
                    break
            for number in signals:
                process.send_signal(number)
                time.sleep(0.02)
            out, err = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 130 and "Traceback" not in err
    results = [strict_json(path) for path in tmp_path.rglob("*") if path.is_file()]
    assert not list(tmp_path.rglob("*.tmp"))
    if len(signals) == 1:  # others may have ended the report of the steps done
        done = int(re.search(r"Interrupted after (\d+) of 1000000 steps", out)[1])
        assert done >= 2 and [len(result["steps"]) for result in results] == [done]
