"""The hardware: the datasheet's peak of a device and what counts against it, the driver, and the GPU's state."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tiny_llama_v3 as llama
from benchmarks.steps import ROWS, is_fp8
from measure.results import recorded_config
from measure.work import SIZES
from nanogpt_triton.model import GPT, GPTConfig
from tests.core.tiny import TINY
from tiny_llama import hardware, notes, profiler

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
GPU = llama.Device("cuda", "Some GPU", "sm_90", 132, 32)
UNKNOWN = dict.fromkeys(("power_w", "clock_mhz", "temperature_c", "utilization_percent"))


# --- peaks: the datasheet's figure of this very device, in the precision in force


def device(name, units, arch="sm_90"):
    return llama.Device("cuda", name, arch, units, 32)


PEAKS = [  # bf16, tf32 and fp32, the number of units, and the names that torch reports
    ([2516.6, None, 157.3], 256, "AMD Instinct MI355X"),
    ([1307.4, 653.7, 163.4], 304, "AMD Instinct MI325X", "AMD Instinct MI300X", "AMD Instinct MI300X VF"),
    ([980.6, 490.3, 122.6], 228, "AMD Instinct MI300A"),
    ([191.5, None, 47.9], 110, "AMD Instinct MI250X", "AMD Instinct MI250X / MI250"),
    ([181.0, None, 45.3], 104, "AMD Instinct MI250X / MI250", "AMD Instinct MI250X/MI250", "AMD Instinct MI250"),
    ([181.0, None, 45.3], 104, "AMD Instinct MI210"), ([2500.0, 1250.0, 80.0], 152, "NVIDIA GB200"),
    ([2250.0, 1100.0, 75.0], 148, "NVIDIA B200"), ([989.4, 494.7, 66.9], 132, "NVIDIA H200", "NVIDIA H100 80GB HBM3"),
    ([835.5, 417.5, 60.0], 132, "NVIDIA H200 NVL", "NVIDIA H100 NVL"), ([756.0, 378.0, 51.2], 114, "NVIDIA H100 PCIe"),
    ([312.0, 156.0, 19.5], 108, "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"),
    ([312.0, 156.0, 19.5], 108, "A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"), ([362.05, 183.0, 91.6], 142, "NVIDIA L40S"),
    ([70.0, 35.0, 31.5], 80, "NVIDIA A10G"), ([165.2, 82.6, 82.6], 128, "NVIDIA GeForce RTX 4090"),
]  # fmt: skip
LOOK_ALIKES = [  # the MI300X with 38 units is a partition
    ("NVIDIA GH200 480GB", 132), ("NVIDIA H20", 78), ("NVIDIA H800", 132), ("NVIDIA H100 64GB HBM2", 132),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16), ("NVIDIA H100 80GB HBM3 MIG 7g.80gb", 132),
    ("NVIDIA H100 80GB HBM3", 114), ("NVIDIA GeForce RTX 4090 Laptop GPU", 76), ("NVIDIA GeForce RTX 4090 D", 114),
    ("NVIDIA GeForce RTX 4090", 114), ("NVIDIA A100-SXM-64GB", 124), ("GRID A100-10C", 108), ("NVIDIA A10", 72),
    ("NVIDIA L40", 142), ("AMD Instinct MI300X", 38), ("AMD Instinct MI308X", 80), ("AMD Radeon Graphics", 304),
    ("x86_64", 2),
]  # fmt: skip


def test_a_device_has_the_peak_of_its_datasheet_and_a_look_alike_has_none():
    known = {(name, units): peaks for peaks, units, *names in PEAKS for name in names}
    for key, peaks in (known | dict.fromkeys(LOOK_ALIKES, [None] * 3)).items():
        assert [hardware.peak_tflops(device(*key), name) for name in ("bf16", "tf32", "fp32")] == peaks, key


def test_the_peak_in_fp8_is_about_twice_that_of_bf16():
    """The datasheets round, or give a little more; older devices have no FP8."""
    for peaks, units, *names in PEAKS:
        peak = hardware.peak_tflops(device(names[0], units), "fp8")
        older = any(old in names[0] for old in ("MI2", "A100", "A10G"))
        assert peak is None if older else peak == pytest.approx(2 * peaks[0], rel=0.015), names[0]


@pytest.fixture
def library(monkeypatch):
    """A function that sets what the library does in its own matmuls, whatever it was told."""
    return lambda in_force: monkeypatch.setattr(torch._C, "_get_cublas_allow_tf32", lambda: in_force)


@pytest.mark.parametrize("arch, in_force, expected", [
    ("gfx942", True, "tf32"),
    ("gfx942", False, "fp32"),  # ROCm without HIPBLASLT_ALLOW_TF32
    ("sm_80", True, "tf32"), ("sm_80", False, "fp32"), ("sm_75", True, "fp32"), ("gfx90a", True, "fp32"),
    ("cpu", True, "fp32"),
])  # fmt: skip
def test_the_precision_is_the_one_in_force(library, arch, in_force, expected):
    torch.set_float32_matmul_precision("high")
    library(in_force)
    some = device("AMD Instinct MI300X", 304, arch)
    config = llama.Config(matmul_precision="high")
    assert llama.precision_name(config, some) == expected
    assert llama.dot_precision(some) == {"tf32": "tf32", "fp32": "ieee"}[expected]
    assert llama.precision_name(llama.Config(use_amp=True), some) == "bf16"
    step = SimpleNamespace(config=config, device=some, implementation="triton", processes=1)
    lines = notes.inert_flags(step)
    assert [("--matmul-precision high has no effect" in note) for note in lines] == [True] * (expected == "fp32")
    if arch.startswith("gfx"):
        assert ("HIPBLASLT_ALLOW_TF32=1" in "".join(lines)) == (arch == "gfx942" and not in_force)


@pytest.mark.parametrize("size, implementation, pays", [
    ("small", "triton", False), ("medium", "triton", True), ("large", "triton", True), ("small", "torch", True),
])  # fmt: skip
def test_fp8_says_where_it_does_not_pay(size, implementation, pays):
    config = llama.Config(**SIZES[size], fp8=True)
    step = SimpleNamespace(config=config, device=device("NVIDIA H200", 132), implementation=implementation, processes=1)
    assert any("--fp8 does not pay" in line for line in notes.inert_flags(step)) != pays


def test_the_library_is_asked_after_it_was_told(library):
    hopper = device("NVIDIA H200", 132)
    for told, precision in (("highest", "ieee"), ("high", "tf32"), ("highest", "ieee")):
        torch.set_float32_matmul_precision(told)
        assert llama.dot_precision(hopper) == precision


def test_flops_of_a_gpt_count_attention_without_its_masked_half():
    config = GPTConfig(block_size=16, vocab_size=32, n_layer=3, n_head=2, n_embd=8, bias=False)
    model = GPT(config, "torch")
    # A token and layer: 2 products of 2 * 8 * 16 FLOP, three times with backward, half of it masked.
    assert model.flops_per_token() == 6 * model.get_num_params() + 3 * (3 * 2 * 2 * 8 * 16 // 2)


def test_model_tflops_are_what_torch_counts_without_the_masked_half_of_attention():
    config = dataclasses.replace(TINY, num_layers=3, untied_head=True)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        tokens = torch.zeros(config.batch_size, config.seq_len, dtype=torch.long)
        llama.TinyLlamaTriton(config, llama.OPERATIONS["torch"])(tokens, tokens).backward()
    # Half of the 2 products of attention, of 2 FLOP each, three times with backward: torch computes it as well.
    masked = 6 * config.num_layers * config.hidden_dim * config.seq_len * config.tokens_per_step
    assert hardware.model_tflops(config) * 1e12 == pytest.approx(counter.get_total_flops() - masked)


def test_recorded_shares_of_the_peak_follow_from_the_times():
    """So that a change of the peaks or of what counts cannot leave the published tables behind."""
    for path in RESULTS.glob("gpt_*.json"):
        result = json.loads(path.read_text())
        flops = GPT(GPTConfig(**result["config"]), "torch", "meta").flops_per_token()
        peak = hardware.peak_tflops(device(result["environment"]["device"], 132), "bf16")
        for row in result["rows"].values():
            assert row["mfu"] == pytest.approx(row["tokens_per_second"] * flops / peak / 1e12)
    for path in RESULTS.glob("steps_*.json"):
        result = json.loads(path.read_text())
        for size in result["sizes"].values():
            some, flops = (
                device(result["environment"]["device"], 132),
                hardware.model_tflops(recorded_config(size["config"])),
            )
            for name, row in size["rows"].items():
                in_fp8 = name in ROWS and is_fp8(ROWS[name].implementation)
                peak = hardware.peak_tflops(some, "fp8" if in_fp8 else size["precision"])
                assert row["error"] or row["mfu"] == pytest.approx(flops / row["ms"]["median"] * 1e3 / peak)


# --- the GPU's state and driver


@pytest.fixture
def amd(monkeypatch):
    """PyTorch for ROCm, whose functions give what amdsmi does."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for name, value in dict(power_draw=412, clock_rate=2100, temperature=45, utilization=0).items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)


@pytest.fixture
def nvidia(monkeypatch, tmp_path):
    """PyTorch for CUDA, and an nvidia-smi that is the given shell command."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {1: SimpleNamespace(uuid="0a-0b")}.get)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def install(command):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return install


def test_what_amdsmi_tells(amd, monkeypatch):
    known = {"power_w": 412, "clock_mhz": 2100, "temperature_c": 45, "utilization_percent": 0}
    assert hardware.gpu_state(GPU) == known
    monkeypatch.setattr(torch.cuda, "power_draw", lambda: 0)  # "N/A", says PyTorch
    monkeypatch.setattr(torch.cuda, "clock_rate", Mock(side_effect=RuntimeError("AMDSMI_STATUS_NOT_SUPPORTED")))
    assert hardware.gpu_state(GPU) == known | {"power_w": None, "clock_mhz": None}


def test_without_amdsmi_nothing_is_known_and_nothing_is_said(amd, monkeypatch, capfd):
    missing = Mock(side_effect=ModuleNotFoundError("amdsmi does not seem to be installed"))
    for name in ("power_draw", "clock_rate", "temperature", "utilization"):
        monkeypatch.setattr(torch.cuda, name, missing)
    assert hardware.gpu_state(GPU) == UNKNOWN
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("command, told", [
    ('[ "$1" = --id=GPU-0a-0b ] && echo "95.29, 345, 38, 7"', [95.29, 345, 38, 7]),
    ('echo "[N/A], 345, 38, [N/A]"', [None, 345, 38, None]), ("echo No devices were found; exit 6", [None] * 4),
    ("echo Failed to initialize NVML >&2; exit 9", [None] * 4), ("kill -9 $$", [None] * 4),
])  # fmt: skip
def test_what_nvidia_smi_tells(nvidia, capfd, command, told):
    nvidia(command)
    assert hardware.gpu_state(GPU) == dict(zip(UNKNOWN, told, strict=True))
    assert capfd.readouterr() == ("", "")


def test_without_nvidia_smi_nothing_is_known(nvidia, monkeypatch):
    monkeypatch.setattr(subprocess, "run", Mock(side_effect=FileNotFoundError("nvidia-smi")))
    assert hardware.gpu_state(GPU) == UNKNOWN


@pytest.mark.parametrize("hip, module", [("6.4", "amdgpu"), (None, "nvidia")])
def test_the_driver_is_that_of_the_kernel_s_module(monkeypatch, tmp_path, hip, module):
    monkeypatch.setattr(torch.version, "hip", hip)
    found = {"/sys/module": tmp_path}.get
    monkeypatch.setattr(hardware, "Path", lambda folder, *parts: found(folder).joinpath(*parts))
    assert hardware.driver_version(GPU) is None  # part of the kernel, without a version of its own
    (tmp_path / module).mkdir()
    (tmp_path / module / "version").write_text("6.12.12\n")
    assert hardware.driver_version(GPU) == "6.12.12"
    assert hardware.driver_version(llama.get_device("cpu")) is None


@pytest.mark.parametrize("timing", ["phases", "step"])
def test_the_gpu_is_asked_before_the_warm_up_and_after_the_measured_steps(monkeypatch, run, timing):
    """Never while something is timed: the order of what is called, and what is printed and written of it."""
    calls = []
    states = iter([{name: 10.0 for name in UNKNOWN}, {name: 20.0 for name in UNKNOWN}])
    monkeypatch.setattr(hardware, "gpu_state", lambda device: calls.append("state") or next(states))
    for module, name in ((llama, "warm_up"), (llama, "train"), (profiler, "count_kernels")):
        called = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, name=name, called=called: calls.append(name) or called(*args))
    done = run("--timing", timing)
    assert calls == ["state", "warm_up", "train", "state", "count_kernels"]
    gpu = done.result["summary"]["gpu"]
    assert (gpu["idle"]["power_w"], gpu["busy"]["power_w"]) == (10.0, 20.0)
    assert "\nGPU after the last step: 20 W, 20 MHz, 20 degrees C\n" in done.out


def test_a_cpu_claims_nothing_of_a_gpu(run):
    done = run()
    assert "GPU after" not in done.out and " peak\n" not in done.out
    assert done.result["summary"]["gpu"] == {"idle": UNKNOWN, "busy": UNKNOWN}
    assert done.result["summary"]["mfu"] is None
    assert hardware.gpu_state(llama.get_device("cpu")) == UNKNOWN


@pytest.mark.gpu
def test_this_gpu_tells_its_state():
    state = hardware.gpu_state(llama.get_device("cuda"))
    assert all(value is None or value >= 0 for value in state.values()) and list(state) == list(UNKNOWN)


def test_the_share_of_the_peak_is_that_of_the_median_step(run, monkeypatch):
    monkeypatch.setattr(hardware, "peak_tflops", lambda device, precision: 1e-6 if precision == "fp32" else None)
    done = run()
    summary = done.result["summary"]
    tflops = hardware.model_tflops(llama.Config(**done.result["config"])) / summary["batch_ms"]["p50"] * 1e3
    assert summary["tflops_per_second"] == pytest.approx(tflops) and summary["mfu"] == pytest.approx(tflops / 1e-6)
    assert f" TFLOP/s, {100 * summary['mfu']:.1f} % of the fp32 peak\n" in done.out


@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"])
def test_a_cache_that_cannot_be_written_to_is_named(monkeypatch, tmp_path, name):
    folder = str(tmp_path / "a file" / "cache")
    (tmp_path / "a file").touch()
    monkeypatch.setenv(name, folder)
    with pytest.raises(llama.UsageError, match=rf"{name}=.*a file/cache cannot be written to: unset it"):
        hardware.remedied(llama.Config(), lambda config: os.makedirs(folder))
    with pytest.raises(FileExistsError):
        hardware.remedied(llama.Config(), lambda config: os.mkdir(tmp_path))
