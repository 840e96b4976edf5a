"""What "of peak" means: the datasheet's figure of this very device, in the precision in force, and what is counted."""

import json
from pathlib import Path

import pytest
import torch

import tiny_llama_v3 as llama
from nanogpt_triton.model import GPT, GPTConfig

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def device(name, units, arch="sm_90"):
    return llama.Device("cuda", name, arch, units, 32)


@pytest.mark.parametrize(
    "name, units, bf16, tf32, fp32",
    [
        ("AMD Instinct MI355X", 256, 2516.6, None, 157.3),
        ("AMD Instinct MI325X", 304, 1307.4, 653.7, 163.4),
        ("AMD Instinct MI300X", 304, 1307.4, 653.7, 163.4),
        ("AMD Instinct MI300X VF", 304, 1307.4, 653.7, 163.4),
        ("AMD Instinct MI300A", 228, 980.6, 490.3, 122.6),
        ("AMD Instinct MI250X", 110, 191.5, None, 47.9),
        ("AMD Instinct MI250X / MI250", 110, 191.5, None, 47.9),
        ("AMD Instinct MI250X / MI250", 104, 181.0, None, 45.3),
        ("AMD Instinct MI250X/MI250", 104, 181.0, None, 45.3),
        ("AMD Instinct MI250", 104, 181.0, None, 45.3),
        ("AMD Instinct MI210", 104, 181.0, None, 45.3),
        ("NVIDIA GB200", 152, 2500.0, 1250.0, 80.0),
        ("NVIDIA B200", 148, 2250.0, 1100.0, 75.0),
        ("NVIDIA H200", 132, 989.4, 494.7, 66.9),
        ("NVIDIA H200 NVL", 132, 835.5, 417.5, 60.0),
        ("NVIDIA H100 80GB HBM3", 132, 989.4, 494.7, 66.9),
        ("NVIDIA H100 NVL", 132, 835.5, 417.5, 60.0),
        ("NVIDIA H100 PCIe", 114, 756.0, 378.0, 51.2),
        ("NVIDIA A100-SXM4-40GB", 108, 312.0, 156.0, 19.5),
        ("NVIDIA A100-SXM4-80GB", 108, 312.0, 156.0, 19.5),
        ("A100-PCIE-40GB", 108, 312.0, 156.0, 19.5),
        ("NVIDIA A100 80GB PCIe", 108, 312.0, 156.0, 19.5),
        ("NVIDIA L40S", 142, 362.05, 183.0, 91.6),
        ("NVIDIA A10G", 80, 70.0, 35.0, 31.5),
        ("NVIDIA GeForce RTX 4090", 128, 165.2, 82.6, 82.6),
    ],
)
def test_peaks_by_the_names_that_torch_reports(name, units, bf16, tf32, fp32):
    found = [llama.peak_tflops(device(name, units), precision) for precision in ("bf16", "tf32", "fp32")]
    assert found == [bf16, tf32, fp32]


@pytest.mark.parametrize(
    "name, units",
    [
        ("NVIDIA GH200 480GB", 132),
        ("NVIDIA H20", 78),
        ("NVIDIA H800", 132),
        ("NVIDIA H100 64GB HBM2", 132),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16),
        ("NVIDIA H100 80GB HBM3 MIG 7g.80gb", 132),
        ("NVIDIA H100 80GB HBM3", 114),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 76),
        ("NVIDIA GeForce RTX 4090 D", 114),
        ("NVIDIA GeForce RTX 4090", 114),
        ("NVIDIA A100-SXM-64GB", 124),
        ("GRID A100-10C", 108),
        ("NVIDIA A10", 72),
        ("NVIDIA L40", 142),
        ("AMD Instinct MI300X", 38),  # a partition: CPX of the whole
        ("AMD Instinct MI308X", 80),
        ("AMD Radeon Graphics", 304),
        ("x86_64", 2),
    ],
)
def test_look_alikes_have_no_peak(name, units):
    assert [llama.peak_tflops(device(name, units), precision) for precision in ("bf16", "tf32", "fp32")] == [None] * 3


@pytest.fixture
def library(monkeypatch):
    """A function that sets what the library does in its own matmuls, whatever it was told."""
    before = torch.get_float32_matmul_precision()

    def set_tf32(in_force):
        monkeypatch.setattr(torch._C, "_get_cublas_allow_tf32", lambda: in_force)

    yield set_tf32
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    "arch, in_force, expected",
    [
        ("gfx942", True, "tf32"),
        ("gfx942", False, "fp32"),  # ROCm without HIPBLASLT_ALLOW_TF32
        ("sm_80", True, "tf32"),
        ("sm_80", False, "fp32"),
        ("sm_75", True, "fp32"),
        ("gfx90a", True, "fp32"),
        ("cpu", True, "fp32"),
    ],
)
def test_the_precision_is_the_one_in_force(library, arch, in_force, expected):
    torch.set_float32_matmul_precision("high")
    library(in_force)
    some = device("AMD Instinct MI300X", 304, arch)
    config = llama.Config(matmul_precision="high")
    assert llama.precision_name(config, some) == expected
    assert llama.dot_precision(some) == {"tf32": "tf32", "fp32": "ieee"}[expected]
    assert llama.precision_name(llama.Config(use_amp=True), some) == "bf16"
    notes = list(llama.inert_flags(config, some, "triton"))
    assert [("--matmul-precision high has no effect" in note) for note in notes] == [True] * (expected == "fp32")
    if arch.startswith("gfx"):
        assert ("HIPBLASLT_ALLOW_TF32=1" in "".join(notes)) == (arch == "gfx942" and not in_force)


def test_the_library_is_asked_after_it_was_told(library):
    hopper = device("NVIDIA H200", 132)
    for told, precision in (("highest", "ieee"), ("high", "tf32"), ("highest", "ieee")):
        torch.set_float32_matmul_precision(told)
        assert llama.dot_precision(hopper) == precision


def test_attention_counts_without_its_masked_half_in_both_models():
    config = GPTConfig(block_size=16, vocab_size=32, n_layer=3, n_head=2, n_embd=8, bias=False)
    model = GPT(config, "torch")
    # A token and layer: 2 products of 2 * 8 * 16 FLOP, three times with backward, half of it masked.
    assert model.flops_per_token() == 6 * model.num_parameters() + 3 * (3 * 2 * 2 * 8 * 16 // 2)
    own = llama.Config(hidden_dim=8, num_layers=3, num_heads=2, vocab_size=32, batch_size=1, seq_len=16)
    own_weights = llama.dataclasses.replace(own, seq_len=32)
    attention = 2 * llama.model_tflops(own) - llama.model_tflops(own_weights)  # grows with the square of the length
    assert -attention * 1e12 / 2 / 16 == pytest.approx(model.flops_per_token() - 6 * model.num_parameters())


def test_recorded_shares_of_the_peak_follow_from_the_times():
    """So that a change of the peaks or of what counts cannot leave the published tables behind."""
    for path in RESULTS.glob("gpt_*.json"):
        result = json.loads(path.read_text())
        flops = GPT(GPTConfig(**result["config"]), "torch", "meta").flops_per_token()
        peak = llama.peak_tflops(device(result["environment"]["device"], 132), "bf16")
        for row in result["rows"].values():
            assert row["mfu"] == pytest.approx(row["tokens_per_second"] * flops / peak / 1e12)
    for path in RESULTS.glob("steps_*.json"):
        result = json.loads(path.read_text())
        for size in result["sizes"].values():
            peak = llama.peak_tflops(device(result["environment"]["device"], 132), size["precision"])
            flops = llama.model_tflops(llama.Config(**size["config"]))
            for row in size["rows"].values():
                assert row["error"] or row["mfu"] == pytest.approx(flops / row["ms"]["median"] * 1e3 / peak)
