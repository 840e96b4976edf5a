"""What a run tells of the GPU beside its times: power, clock, temperature, driver; and where its memory went."""

import os
import pickle
import subprocess
from types import SimpleNamespace

import pytest
import torch

import tiny_llama_v3 as llama

GPU = llama.Device("cuda", "Some GPU", "sm_90", 132, 32)
UNKNOWN = dict.fromkeys(("power_w", "clock_mhz", "temperature_c", "utilization_percent"))
TINY = (
    "--hidden-dim 32 --num-layers 1 --num-heads 2 --vocab-size 37 --batch-size 1 --seq-len 16 --num-steps 2 "
    "--warmup-steps 1 --impl torch"
).split()


def raising(error):
    def ask(*args, **kwargs):
        raise error

    return ask


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
    assert llama.gpu_state(GPU) == known
    monkeypatch.setattr(torch.cuda, "power_draw", lambda: 0)  # "N/A", says PyTorch
    monkeypatch.setattr(torch.cuda, "clock_rate", raising(RuntimeError("AMDSMI_STATUS_NOT_SUPPORTED")))
    assert llama.gpu_state(GPU) == known | {"power_w": None, "clock_mhz": None}


def test_without_amdsmi_nothing_is_known_and_nothing_is_said(amd, monkeypatch, capfd):
    for name in ("power_draw", "clock_rate", "temperature", "utilization"):
        monkeypatch.setattr(torch.cuda, name, raising(ModuleNotFoundError("amdsmi does not seem to be installed")))
    assert llama.gpu_state(GPU) == UNKNOWN
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "command, told",
    [
        ('[ "$1" = --id=GPU-0a-0b ] && echo "95.29, 345, 38, 7"', [95.29, 345, 38, 7]),
        ('echo "[N/A], 345, 38, [N/A]"', [None, 345, 38, None]),
        ("echo No devices were found; exit 6", [None] * 4),
        ("echo Failed to initialize NVML >&2; exit 9", [None] * 4),
        ("kill -9 $$", [None] * 4),
    ],
)
def test_what_nvidia_smi_tells(nvidia, capfd, command, told):
    nvidia(command)
    assert llama.gpu_state(GPU) == dict(zip(UNKNOWN, told, strict=True))
    assert capfd.readouterr() == ("", "")


def test_without_nvidia_smi_nothing_is_known(nvidia, monkeypatch):
    monkeypatch.setattr(subprocess, "run", raising(FileNotFoundError("nvidia-smi")))
    assert llama.gpu_state(GPU) == UNKNOWN


@pytest.mark.parametrize("hip, module", [("6.4", "amdgpu"), (None, "nvidia")])
def test_the_driver_is_that_of_the_kernel_s_module(monkeypatch, tmp_path, hip, module):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(
        llama, "Path", lambda *parts: tmp_path.joinpath(*parts[1:]) if parts[0] == "/sys/module" else None
    )
    assert llama.driver_version(GPU) is None  # part of the kernel, without a version of its own
    (tmp_path / module).mkdir()
    (tmp_path / module / "version").write_text("6.12.12\n")
    assert llama.driver_version(GPU) == "6.12.12"
    assert llama.driver_version(llama.get_device("cpu")) is None


@pytest.mark.parametrize("timing", ["phases", "step"])
def test_the_gpu_is_asked_before_the_warm_up_and_after_the_measured_steps(monkeypatch, tmp_path, capsys, timing):
    """Never while something is timed: the order of what is called, and what is printed and written of it."""
    calls = []
    states = iter([{name: 10.0 for name in UNKNOWN}, {name: 20.0 for name in UNKNOWN}])
    monkeypatch.setattr(llama, "gpu_state", lambda device: calls.append("state") or next(states))
    for name in ("warm_up", "train", "count_kernels"):
        called = getattr(llama, name)
        monkeypatch.setattr(llama, name, lambda *args, name=name, called=called: calls.append(name) or called(*args))
    assert llama.main([*TINY, "--device", "cpu", "--timing", timing, "--output-dir", str(tmp_path)]) == 0
    assert calls == ["state", "warm_up", "train", "state", "count_kernels"]
    (path,) = tmp_path.glob("*.json")
    assert '"power_w": 10.0' in path.read_text() and '"power_w": 20.0' in path.read_text()
    assert "\nGPU after the last step: 20 W, 20 MHz, 20 degrees C\n" in capsys.readouterr().out


def test_a_cpu_claims_nothing_of_a_gpu(tmp_path, capsys):
    arguments = [*TINY, "--device", "cpu", "--output-dir", str(tmp_path), "--profile", str(tmp_path / "profile")]
    assert llama.main(arguments) == 0
    out = capsys.readouterr().out
    assert "GPU after" not in out and "Memory of" not in out and "memory_viz" not in out
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["kernel_stats.csv", "trace.json"]
    assert llama.gpu_state(llama.get_device("cpu")) == UNKNOWN


def test_memory_is_recorded_in_steps_of_its_own(monkeypatch, tmp_path):
    calls = []
    step = SimpleNamespace(run=lambda: calls.append("step"))
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda enabled="all", **kwargs: calls.append(enabled))
    monkeypatch.setattr(memory, "_dump_snapshot", calls.append)
    llama.record_memory(step, tmp_path / "memory_snapshot.pickle", 2)
    assert calls == ["all", "step", "step", str(tmp_path / "memory_snapshot.pickle"), None]


@pytest.mark.gpu
def test_a_profile_of_a_gpu_has_a_memory_snapshot(tmp_path, capsys):
    folder = tmp_path / "profile"
    assert llama.main([*TINY, "--device", "cuda", "--output-dir", str(tmp_path), "--profile", str(folder)]) == 0
    assert f"{folder / 'memory_snapshot.pickle'} (open in https://pytorch.org/memory_viz)" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == [
        "kernel_stats.csv",
        "memory_snapshot.pickle",
        "trace.json",
    ]
    snapshot = pickle.loads((folder / "memory_snapshot.pickle").read_bytes())
    assert snapshot["segments"] and any(event["action"] == "alloc" for event in sum(snapshot["device_traces"], []))


@pytest.mark.gpu
def test_this_gpu_tells_its_state():
    state = llama.gpu_state(llama.get_device("cuda"))
    assert all(value is None or value >= 0 for value in state.values()) and list(state) == list(UNKNOWN)
