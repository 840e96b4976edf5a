"""The hardware: the datasheet's peak of a device and what counts against it, the driver, and the GPU's state."""

import contextlib
import dataclasses
import os
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tiny_llama_v3 as llama
from measure.work import SIZES
from tests.core.tiny import TINY
from tiny_llama import hardware, notes, profiler

GPU = llama.Device("cuda", "Some GPU", "sm_90", 132, 32)
STATE = ("power_w", "clock_mhz", "temperature_c", "utilization_percent")


# --- peaks: the datasheet's figure of this very device, in the precision in force


def device(name, units, arch="sm_90"):
    return llama.Device("cuda", name, arch, units, 32)


PEAKS = """
# units, TFLOP/s in bf16, tf32 and fp32; the names that torch reports
256 2516.6 -      157.3 AMD Instinct MI355X
304 1307.4 653.7  163.4 AMD Instinct MI325X; AMD Instinct MI300X; AMD Instinct MI300X VF
228 980.6  490.3  122.6 AMD Instinct MI300A
110 191.5  -      47.9  AMD Instinct MI250X; AMD Instinct MI250X / MI250
104 181.0  -      45.3  AMD Instinct MI250X / MI250; AMD Instinct MI250X/MI250; AMD Instinct MI250; AMD Instinct MI210
152 2500.0 1250.0 80.0  NVIDIA GB200
148 2250.0 1100.0 75.0  NVIDIA B200
132 989.4  494.7  66.9  NVIDIA H200; NVIDIA H100 80GB HBM3
132 835.5  417.5  60.0  NVIDIA H200 NVL; NVIDIA H100 NVL
114 756.0  378.0  51.2  NVIDIA H100 PCIe
108 312.0  156.0  19.5  NVIDIA A100-SXM4-40GB; NVIDIA A100-SXM4-80GB; A100-PCIE-40GB; NVIDIA A100 80GB PCIe
142 362.05 183.0  91.6  NVIDIA L40S
80  70.0   35.0   31.5  NVIDIA A10G
128 165.2  82.6   82.6  NVIDIA GeForce RTX 4090
# look-alikes: slices, partitions, laptops and siblings
132 - - - NVIDIA GH200 480GB; NVIDIA H800; NVIDIA H100 64GB HBM2; NVIDIA H100 80GB HBM3 MIG 7g.80gb
16  - - - NVIDIA H100 80GB HBM3 MIG 1g.10gb
114 - - - NVIDIA H100 80GB HBM3; NVIDIA GeForce RTX 4090 D; NVIDIA GeForce RTX 4090
76  - - - NVIDIA GeForce RTX 4090 Laptop GPU
124 - - - NVIDIA A100-SXM-64GB
108 - - - GRID A100-10C
304 - - - AMD Radeon Graphics
38  - - - AMD Instinct MI300X
2   - - - x86_64
"""


@pytest.mark.parametrize("line", [line for line in PEAKS.strip().splitlines() if line[0] != "#"])
def test_a_device_has_the_peak_of_its_datasheet_and_a_look_alike_has_none(line):
    units, *expected, names = line.split(maxsplit=4)
    expected = [None if peak == "-" else float(peak) for peak in expected]
    for name in names.split("; "):
        some = device(name, int(units))
        assert [hardware.peak_tflops(some, precision) for precision in ("bf16", "tf32", "fp32")] == expected, name


def notes_of(config, device, implementation="triton"):
    step = SimpleNamespace(config=config, device=device, implementation=implementation, processes=1)
    return notes.inert_flags(step)


@pytest.mark.parametrize("arch, in_force, expected", [
    ("gfx942", True, "tf32"), ("gfx942", False, "fp32"), ("sm_80", True, "tf32"), ("sm_80", False, "fp32"),
    ("sm_75", True, "fp32"), ("gfx90a", True, "fp32"), ("cpu", True, "fp32"),
])  # fmt: skip
def test_the_precision_is_the_one_in_force(monkeypatch, arch, in_force, expected):
    """Whatever the library was told: on ROCm it needs a variable of the environment, which the note names."""
    torch.set_float32_matmul_precision("high")
    monkeypatch.setattr(torch._C, "_get_cublas_allow_tf32", lambda: in_force)
    config, some = llama.Config(matmul_precision="high"), device("AMD Instinct MI300X", 304, arch)
    assert llama.precision_name(config, some) == expected
    assert llama.dot_precision(some) == {"tf32": "tf32", "fp32": "ieee"}[expected]
    lines = notes_of(config, some)
    assert [line.startswith("--matmul-precision high") for line in lines] == [True] * (expected == "fp32")
    assert arch != "gfx942" or ("HIPBLASLT_ALLOW_TF32=1" in "".join(lines)) != in_force


@pytest.mark.parametrize("size, implementation, pays", [
    ("small", "triton", False), ("medium", "triton", True), ("small", "torch", True),
])  # fmt: skip
def test_fp8_says_where_it_does_not_pay(size, implementation, pays):
    lines = notes_of(llama.Config(**SIZES[size], fp8=True), device("NVIDIA H200", 132), implementation)
    assert any(line.startswith("--fp8") for line in lines) != pays


def test_model_tflops_are_what_torch_counts_without_the_masked_half_of_attention():
    config = dataclasses.replace(TINY, num_layers=3, untied_head=True)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        tokens = torch.zeros(config.batch_size, config.seq_len, dtype=torch.long)
        llama.TinyLlamaTriton(config, llama.OPERATIONS["torch"])(tokens, tokens).backward()
    # Half of the 2 products of attention, of 2 FLOP each, three times with backward: torch computes it as well.
    masked = 6 * config.num_layers * config.hidden_dim * config.seq_len * config.tokens_per_step
    assert hardware.model_tflops(config) * 1e12 == pytest.approx(counter.get_total_flops() - masked)


# --- what does not fit


@pytest.mark.parametrize("changes, kind, n_bytes", [
    # 2 layers of 1024 * (2 * 1024 + 2 * 512 + 3 * 4096) weights and 1000 * 1024 of the head, in 4 bytes.
    (dict(hidden_dim=1024, num_layers=2), "cpu", 4 * (2 * 1024 * 15360 + 1000 * 1024)),
    # 2^20 tokens of 1024 numbers in 4 bytes on a CPU, or 2^30 of 8 bytes each.
    (dict(hidden_dim=1024, num_layers=1, batch_size=2**12), "cpu", 2**32),
    (dict(hidden_dim=16, num_layers=1, num_heads=2, batch_size=2**22), "cuda", 2**33),
])  # fmt: skip
def test_what_the_host_cannot_hold_is_refused_before_it_is_built(monkeypatch, changes, kind, n_bytes):
    for memory, outcome in ((n_bytes, contextlib.nullcontext()), (n_bytes - 1, pytest.raises(MemoryError))):
        monkeypatch.setattr(hardware, "host_memory_bytes", lambda memory=memory: memory)
        with outcome:
            hardware.require_host_memory(llama.Config(**changes), SimpleNamespace(type=kind))


# --- the GPU's state and driver


@pytest.mark.parametrize("power, clock, told", [
    (lambda: 412, lambda: 2100, [412, 2100, 45, 0]), (lambda: 0, Mock(side_effect=ImportError), [None, None, 45, 0]),
])  # fmt: skip
def test_what_amdsmi_tells(monkeypatch, power, clock, told):
    """For "N/A" PyTorch says 0."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    functions = dict(power_draw=power, clock_rate=clock, temperature=lambda: 45, utilization=lambda: 0)
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    assert list(hardware.gpu_state(GPU).values()) == told


@pytest.mark.parametrize("command, told", [
    ('[ "$1" = --id=GPU-0a-0b ] && echo "95.29, 345, 38, 7"', [95.29, 345, 38, 7]),
    ('echo "[N/A], 345, 38, [N/A]"', [None, 345, 38, None]), ("echo No devices were found; exit 6", [None] * 4),
])  # fmt: skip
def test_what_nvidia_smi_tells(monkeypatch, tmp_path, capfd, command, told):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {1: SimpleNamespace(uuid="0a-0b")}.get)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{command}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert hardware.gpu_state(GPU) == dict(zip(STATE, told, strict=True))
    assert hardware.output_of("no such program") is None
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("hip, module", [("6.4", "amdgpu"), (None, "nvidia")])
def test_the_driver_is_that_of_the_kernel_s_module(monkeypatch, tmp_path, hip, module):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(hardware, "Path", lambda *parts: tmp_path.joinpath(*parts[1:]))
    assert hardware.driver_version(GPU) is None  # part of the kernel, without a version of its own
    (tmp_path / module).mkdir()
    (tmp_path / module / "version").write_text("6.12.12\n")
    cpu = llama.get_device("cpu")
    assert hardware.driver_version(GPU) == "6.12.12" and hardware.driver_version(cpu) is None
    assert hardware.gpu_state(cpu) == dict.fromkeys(STATE)


def test_the_gpu_is_asked_before_the_warm_up_and_after_the_measured_steps(monkeypatch, run):
    """Never while something is timed: the order of what is called, and what is printed and written of it."""
    calls = []

    def noted(module, name, replacement=None):
        called = replacement or getattr(module, name)
        monkeypatch.setattr(module, name, lambda *arguments: calls.append(name) or called(*arguments))

    noted(hardware, "gpu_state", lambda device: dict.fromkeys(STATE, 10.0 * len(calls)))
    noted(llama, "warm_up")
    noted(llama, "train")
    noted(profiler, "count_kernels")
    done = run()
    assert calls == ["gpu_state", "warm_up", "train", "gpu_state", "count_kernels"]
    assert "\nGPU after the last step: 40 W, 40 MHz, 40 degrees C\n" in done.out


def test_the_share_of_the_peak_is_that_of_the_median_step(run, monkeypatch):
    monkeypatch.setattr(hardware, "peak_tflops", lambda device, precision: 1e-6 if precision == "fp32" else None)
    done = run()
    summary = done.result["summary"]
    tflops = hardware.model_tflops(llama.Config(**done.result["config"])) / summary["batch_ms"]["p50"] * 1e3
    assert summary["tflops_per_second"] == pytest.approx(tflops) and summary["mfu"] == pytest.approx(tflops / 1e-6)
    assert f" TFLOP/s, {100 * summary['mfu']:.1f} % of the fp32 peak\n" in done.out
