"""The hardware: the datasheet's peak of a device and what counts against it, the driver, and the GPU's state."""

import contextlib
import dataclasses
import itertools
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tiny_llama_v3 as llama
from benchmarks.steps import Row
from measure.results import RESULTS, read_result, recorded_config
from measure.work import SHAPES, SIZES
from tests import ROOT
from tests.core.tiny import TINY, owner_of
from tiny_llama import distributed, hardware, notes, profiler

GPU = torch.device("cuda")
STATE = ("power_w", "clock_mhz", "temperature_c", "utilization_percent")


# --- peaks: the datasheet's figure of this very device, in the precision in force


def gpu(name, units, arch="sm_90"):
    return llama.Gpu("cuda", name, arch, units, 32)


@pytest.fixture(autouse=True)
def some_gpu(monkeypatch):
    """Have the GPU of this machine be Some GPU; some_gpu(arch) another one."""
    cpu = llama.get_gpu("cpu")

    def be(arch):
        found = {"cpu": cpu, "cuda": gpu("Some GPU", 132, arch)}
        monkeypatch.setattr(llama, "get_gpu", found.__getitem__)

    be("sm_90")
    return be


PEAKS = """
# units, TFLOP/s in fp8, bf16, tf32 and fp32; the names that torch reports
256 5033.2 2516.6 -      157.3 AMD Instinct MI355X
256 4613.7 2306.9 -      144.2 AMD Instinct MI350X
304 2614.9 1307.4 653.7  163.4 AMD Instinct MI325X; AMD Instinct MI300X; AMD Instinct MI300X VF
228 1961.2 980.6  490.3  122.6 AMD Instinct MI300A
110 -      191.5  -      47.9  AMD Instinct MI250X; AMD Instinct MI250X / MI250
104 -      181.0  -      45.3  AMD Instinct MI250X / MI250; AMD Instinct MI250X/MI250; AMD Instinct MI250
104 -      181.0  -      45.3  AMD Instinct MI210
48  -      122.8  -      61.4  AMD Radeon RX 7900 XTX; Radeon RX 7900 XTX
32  389.0  194.6  -      48.7  AMD Radeon RX 9070 XT
20  -      59.4   -      29.7  AMD Radeon 8060S; Radeon 8060S Graphics
152 5000.0 2500.0 1250.0 80.0  NVIDIA GB200
148 4500.0 2250.0 1125.0 75.0  NVIDIA B300 SXM6 AC
148 4500.0 2250.0 1100.0 75.0  NVIDIA B200
132 1978.9 989.4  494.7  66.9  NVIDIA H200; NVIDIA H100 80GB HBM3; NVIDIA GH200 480GB; NVIDIA GH200 144G HBM3e
132 1671.0 835.5  417.5  60.0  NVIDIA H200 NVL; NVIDIA H100 NVL
114 1513.0 756.0  378.0  51.2  NVIDIA H100 PCIe
108 -      312.0  156.0  19.5  NVIDIA A100-SXM4-40GB; NVIDIA A100-SXM4-80GB; A100-PCIE-40GB; NVIDIA A100 80GB PCIe
142 733.0  362.05 183.0  91.6  NVIDIA L40S
84  -      149.7  74.8   37.4  NVIDIA A40
80  -      70.0   35.0   31.5  NVIDIA A10G
58  242.5  121.0  60.0   30.3  NVIDIA L4
40  -      -      -      8.1   Tesla T4; NVIDIA T4
170 419.0  209.5  104.8  104.8 NVIDIA GeForce RTX 5090
84  225.1  112.6  56.3   56.3  NVIDIA GeForce RTX 5080
70  175.8  87.9   43.9   43.9  NVIDIA GeForce RTX 5070 Ti
128 330.3  165.2  82.6   82.6  NVIDIA GeForce RTX 4090
76  194.9  97.5   48.7   48.7  NVIDIA GeForce RTX 4080
82  -      71.0   35.6   35.6  NVIDIA GeForce RTX 3090
68  -      59.5   29.8   29.8  NVIDIA GeForce RTX 3080
46  -      40.6   20.3   20.3  NVIDIA GeForce RTX 3070
# look-alikes: slices, partitions, laptops and siblings
132 - - - - NVIDIA H800; NVIDIA H100 64GB HBM2; NVIDIA H100 80GB HBM3 MIG 7g.80gb
16  - - - - NVIDIA H100 80GB HBM3 MIG 1g.10gb
114 - - - - NVIDIA H100 80GB HBM3; NVIDIA GeForce RTX 4090 D; NVIDIA GeForce RTX 4090
76  - - - - NVIDIA GeForce RTX 4090 Laptop GPU
124 - - - - NVIDIA A100-SXM-64GB
108 - - - - GRID A100-10C
304 - - - - AMD Radeon Graphics
38  - - - - AMD Instinct MI300X
2   - - - - x86_64
48  - - - - AMD Radeon PRO W7900
96  - - - - AMD Radeon RX 7900 XTX
68  - - - - NVIDIA GeForce RTX 3080 Ti
84  - - - - NVIDIA A40-48Q
"""


@pytest.mark.parametrize("line", [line for line in PEAKS.strip().splitlines() if line[0] != "#"])
def test_a_device_has_the_peak_of_its_datasheet_and_a_look_alike_has_none(line):
    units, *expected, names = line.split(maxsplit=5)
    expected = [None if peak == "-" else float(peak) for peak in expected]
    for name in names.split("; "):
        some = gpu(name, int(units))
        assert [hardware.peak_tflops(some, precision) for precision in hardware.PRECISIONS] == expected, name


def test_peaks_keep_the_ratios_of_matrix_units():
    """One value that is half or twice the datasheet's stands out."""
    for device, (fp8, bf16, tf32, _) in hardware.PEAK_TFLOPS.items():
        assert fp8 is None or fp8 == pytest.approx(2 * bf16, rel=0.02), device
        assert tf32 is None or tf32 == pytest.approx(bf16 / 2, rel=0.03), device


def notes_of(config, implementation="triton", layers=None):
    step = SimpleNamespace(config=config, device=GPU, implementation=implementation, world=llama.OneProcess())
    step.model = SimpleNamespace(layers=layers)
    return notes.inert_flags(step)


@pytest.mark.parametrize("arch, in_force, expected", [
    ("gfx942", True, "tf32"), ("gfx942", False, "fp32"), ("sm_80", True, "tf32"), ("sm_80", False, "fp32"),
    ("sm_75", True, "fp32"), ("gfx90a", True, "fp32"), ("cpu", True, "fp32"),
])  # fmt: skip
def test_the_precision_is_the_one_in_force(monkeypatch, some_gpu, arch, in_force, expected):
    """Whatever the library was told: on ROCm it needs a variable of the environment, which the note names."""
    torch.set_float32_matmul_precision("high")
    monkeypatch.setattr(torch._C, "_get_cublas_allow_tf32", lambda: in_force)
    config = llama.Config(matmul_precision="high")
    some_gpu(arch)
    assert llama.precision_name(config, GPU) == expected
    assert llama.dot_precision(llama.get_gpu("cuda")) == {"tf32": "tf32", "fp32": "ieee"}[expected]
    lines = notes_of(config)
    assert [line.startswith("--matmul-precision high") for line in lines] == [True] * (expected == "fp32")
    assert arch != "gfx942" or ("HIPBLASLT_ALLOW_TF32=1" in "".join(lines)) != in_force


@pytest.mark.parametrize("size, implementation, pays", [
    ("small", "triton", False), ("medium", "triton", True), ("small", "torch", True),
])  # fmt: skip
def test_fp8_says_where_it_does_not_pay(size, implementation, pays):
    lines = notes_of(llama.Config(**SIZES[size], fp8=True), implementation)
    assert any(line.startswith("--fp8") for line in lines) != pays


@pytest.mark.parametrize("changes, arch, width", [
    (dict(hidden_dim=500, num_heads=5), "sm_90", 520), (dict(hidden_dim=12, num_heads=2), "sm_80", 16),
    (dict(hidden_dim=512), "sm_90", None), (dict(hidden_dim=12, num_heads=2), "gfx942", None),
    (dict(hidden_dim=12, num_heads=2, use_amp=False), "sm_90", None),
])  # fmt: skip
def test_a_slow_width_is_named_with_the_next_fast_one(some_gpu, changes, arch, width):
    """What is named divides into heads, and is not named itself."""
    config = llama.Config(**dict(use_amp=True) | changes)
    some_gpu(arch)
    lines = [line for line in notes_of(config) if line.startswith("--hidden-dim")]
    assert [line.split("time of ")[1].split(",")[0] for line in lines] == [str(width)] * (width is not None)
    if width:
        assert not notes_of(dataclasses.replace(config, hidden_dim=width))


@pytest.mark.parametrize("changes, arch, implementation, named", [
    (dict(num_heads=4), "gfx1100", "triton", True), (dict(num_heads=4), "gfx1151", "sdpa", False),
    (dict(num_heads=8), "gfx1100", "triton", False), (dict(num_heads=4), "gfx1201", "triton", False),
    (dict(num_heads=4, use_amp=False), "gfx1201", "triton", True), (dict(num_heads=4), "gfx942", "triton", False),
])  # fmt: skip
def test_heads_that_spill_on_a_radeon_are_named(some_gpu, changes, arch, implementation, named):
    some_gpu(arch)
    config = llama.Config(**dict(use_amp=True, hidden_dim=512) | changes)
    lines = [line for line in notes_of(config, implementation) if line.startswith("--num-heads 4")]
    assert len(lines) == named and all(arch in line and "heads of 128" in line for line in lines)


@pytest.mark.parametrize("changes, flag", [
    (dict(moments="bf16", impl="sdpa"), "--moments bf16"), (dict(recompute=True, fp8=True), "--recompute"),
    (dict(recompute=True, impl="torch"), "--recompute"),
])  # fmt: skip
def test_flags_that_save_no_memory_are_named(changes, flag):
    config = llama.Config(**SIZES["medium"], **changes)
    assert [line for line in notes_of(config, config.impl) if line.startswith(flag)]
    grouped = SimpleNamespace(groups=["some"])
    assert not [line for line in notes_of(config, layers=grouped) if line.startswith(flag)]


def test_model_tflops_are_what_torch_counts_without_the_masked_half_of_attention():
    config = dataclasses.replace(TINY, num_layers=3, untied_head=True)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        tokens = torch.zeros(config.batch_size, config.seq_len, dtype=torch.long)
        llama.TinyLlamaTriton(config, llama.OPERATIONS["torch"])(tokens, tokens).backward()
    # Half of the 2 products of attention, of 2 FLOP each, three times with backward: torch computes it as well.
    masked = 6 * config.num_layers * config.hidden_dim * config.seq_len * config.tokens_per_step
    expected = counter.get_total_flops() - masked
    assert hardware.model_tflops(config) * 1e12 == pytest.approx(expected)
    # A step has all of its micro-batches.
    assert hardware.model_tflops(dataclasses.replace(config, accumulate=3)) * 1e12 == pytest.approx(3 * expected)


# --- what does not fit


@pytest.mark.parametrize("changes, kind, n_bytes", [
    # 2 layers of 1024 * (2 * 1024 + 2 * 512 + 3 * 4096) weights and 1000 * 1024 of the head, in 4 bytes.
    (dict(hidden_dim=1024, num_layers=2), "cpu", 4 * (2 * 1024 * 15360 + 1000 * 1024)),
    # 2^20 tokens of 1024 numbers in 4 bytes on a CPU, or 2^30 of 8 bytes each.
    (dict(hidden_dim=1024, num_layers=1, batch_size=2**12), "cpu", 2**32),
    (dict(hidden_dim=16, num_layers=1, num_heads=2, batch_size=2**22), "cuda", 2**33),
    (dict(hidden_dim=16, num_layers=1, num_heads=2, batch_size=2**10, accumulate=2**12), "cpu", 2**33),
])  # fmt: skip
def test_what_the_host_cannot_hold_is_refused_before_it_is_built(monkeypatch, changes, kind, n_bytes):
    for memory, outcome in ((n_bytes, contextlib.nullcontext()), (n_bytes - 1, pytest.raises(MemoryError))):
        monkeypatch.setattr(hardware, "host_memory_bytes", lambda memory=memory: memory)
        with outcome:
            hardware.require_host_memory(llama.Config(**changes), SimpleNamespace(type=kind))


# Of two layers, 3 heads and one of keys and values of 8, ffn 40, vocabulary 100 and sequences of 10, by hand.
ODD = dict(hidden_dim=24, num_layers=2, num_heads=3, num_kv_heads=1, ffn_dim=40, vocab_size=100, seq_len=10)
LAYERS = 2 * 24 * (2 * 24 + 2 * 8 + 3 * 40)
ODD_WEIGHTS = LAYERS + 2400
KEPT = 3 * 24 + 2 * 40 + 5 * 8  # elements of a token: o and two residuals, gate and up, q, k and v
STORED = 2 * 24 + 40  # without --recompute: the outputs of both norms and of SwiGLU
EAGER, SCORES = 2 * 24 + 2 * 40, 3 * 10


@pytest.mark.parametrize("flags, processes, weight, token, more", [
    # Bytes of a weight without gradients that come later, of a token of both layers, of the rest of it, and of weights.
    (dict(use_amp=True), 1, 14, 2 * (KEPT + STORED) + 20, 0), (dict(), 1, 16, 4 * (KEPT + STORED) + 20, 0),
    (dict(use_amp=True, recompute=True), 4, 4 + 10 / 4, 2 * KEPT + 20, 0),
    (dict(use_amp=True, moments="bf16"), 1, 10, 2 * (KEPT + STORED) + 20, 0),
    (dict(shard="optimizer", recompute=True, moments="bf16"), 2, 8 + 4 / 2, 4 * KEPT + 20, 0),
    (dict(fp8=True), 1, 14, 2 * KEPT + 20 + 3 * 24 + 40, LAYERS),
    (dict(severed_autograd=True), 1, 16, 0, 0),
    (dict(untied_head=True, recompute=True), 1, 16, 4 * KEPT + 20, 16 * 2400),
    (dict(impl="sdpa"), 1, 12, 4 * (KEPT + EAGER) + 20, 0),
    (dict(impl="sdpa", use_amp=True), 8, 14, 2 * (KEPT + EAGER) + 2 * 48 + 20, 0),
    (dict(impl="sdpa", use_amp=True, compile=True), 1, 12, 2 * KEPT + 20, 0),
    (dict(impl="torch", use_amp=True, compile=True), 1, 12, 2 * KEPT + 20, 0),
    (dict(impl="torch"), 1, 12, 4 * (KEPT + EAGER + SCORES) + 20, 0),
    (dict(impl="torch", use_amp=True, shard="full"), 4, 12 / 4, 2 * (KEPT + EAGER) + 2 * 48 + 6 * SCORES + 20, 0),
])  # fmt: skip
def test_memory_by_hand(flags, processes, weight, token, more):
    config = llama.Config(**ODD, **flags)
    needed = hardware.memory_needed(config, GPU, processes)
    is_eager = config.impl != "triton" and not config.compile
    size = 2 if config.use_amp else 4
    assert needed.state == weight * ODD_WEIGHTS + more
    assert needed.sequence == 10 * (2 * token + 100 * (8 if is_eager else size) + size * 24)
    # With PyTorch all four numbers of a weight are there at the end of the backward pass.
    of_weights = 16 / (processes if config.shard == "full" else 1) if config.impl != "triton" else weight
    assert needed.total(0) == of_weights * ODD_WEIGHTS + more
    assert needed.total(1000) == needed.state + 1000 * needed.sequence


def kept_by_a_layer(config):
    """The bytes that a forward pass on the CPU keeps for its backward pass, of one layer more, without weights."""
    kept = []
    for layers in (1, 2):
        step = llama.TrainStep(dataclasses.replace(config, num_layers=layers), torch.device("cpu"))
        tensors = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t, found=tensors: found.setdefault(id(t), t), Mock()):
            step.forward()
        own = {p.untyped_storage().data_ptr() for p in (*step.model.parameters(), *step.model.buffers())}
        storages = [t.untyped_storage() for t in tensors.values() if any(n % config.seq_len == 0 for n in t.shape)]
        kept.append(sum({s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in own}.values()))
    return kept[1] - kept[0]


@pytest.mark.triton
@pytest.mark.parametrize("impl, use_amp", [("triton", False), ("sdpa", False), ("sdpa", True), ("torch", False)])
def test_no_layer_keeps_less_than_is_counted(impl, use_amp):
    sizes = ODD | dict(batch_size=2, seq_len=68, device="cpu")
    config = llama.Config(**sizes, impl=impl, use_amp=use_amp)
    cpu = torch.device("cpu")
    one, two = (hardware.memory_needed(dataclasses.replace(config, num_layers=n), cpu).sequence for n in (1, 2))
    assert 2 * (two - one) <= kept_by_a_layer(config) <= 1.6 * 2 * (two - one)


@pytest.mark.parametrize("use_amp", [True, False])
@pytest.mark.parametrize("processes", [1, 3])
def test_the_optimizer_has_as_many_bytes_as_are_counted(use_amp, processes):
    config = llama.Config(hidden_dim=64, num_layers=2, num_heads=4, vocab_size=999, use_amp=use_amp)
    model = llama.TinyLlamaTriton(config, llama.OPERATIONS["torch"])
    optimizer = llama.FlatAdamW(1e-3, use_amp)
    optimizer.own(model, share=(processes - 1, processes))
    flat = [t for t in vars(optimizer).values() if isinstance(t, torch.Tensor) and t.numel() > 1000]
    bytes_there = sum(t.nbytes for t in flat)
    assert hardware.memory_needed(config, GPU, processes).state == pytest.approx(bytes_there, rel=0.05)


def peak_bytes(call):
    """Return what a call allocates at most at a time on the CPU, and what it returns."""
    with torch.profiler.profile(profile_memory=True) as profiled:
        result = call()
    changes = [e.nbytes() for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(changes)), result


@pytest.mark.parametrize("use_amp", [True, False])
def test_no_more_is_needed_before_the_first_step(use_amp):
    """A model that could be trained could not be begun, if all its weights were there several times meanwhile."""
    config = llama.Config(hidden_dim=128, num_heads=4, num_layers=24, vocab_size=100, use_amp=use_amp)

    def build():
        model = llama.TinyLlamaTriton(config, llama.OPERATIONS["torch"])
        return owner_of(model, 1e-3, use_amp)

    state = hardware.memory_needed(config, GPU).state
    peak, optimizer = peak_bytes(build)
    assert state <= peak <= 1.1 * state
    weights = [torch.randn_like(p, dtype=torch.float32) for p in optimizer.parameters]
    peak, _ = peak_bytes(lambda: optimizer.reset(w.clone() for w in weights))
    assert peak <= 0.1 * state and all(map(torch.equal, optimizer.weights(), weights))


def recorded_peaks():
    """Each recorded row that the formula covers, as (label, config, MiB)."""
    for path in sorted(RESULTS.glob("steps_*.json")):
        for size, measured in read_result(path)["sizes"].items():
            for name, row in measured["rows"].items():
                kind = Row.named(name)
                impl, *fp8 = kind.implementation.split()
                if row.get("peak_memory_mib") and impl in ("triton", "torch", "sdpa") and fp8 in ([], ["fp8"]):
                    flags = dict(impl=impl, fp8=bool(fp8), compile=kind.compile, graph=kind.graph)
                    config = dataclasses.replace(recorded_config(measured["config"]), **flags)
                    yield f"{path.name}: {size}: {name}", config, row["peak_memory_mib"]


def test_what_was_measured_needed_no_less():
    """And not much more: compiled PyTorch keeps what it likes."""
    wrong, count = [], 0
    for label, config, mib in recorded_peaks():
        share = hardware.memory_needed(config, GPU).total(config.batch_size) / 2**20 / mib
        count += 1
        if not (0.3 if config.compile else 0.5) <= share <= 1:
            wrong.append((label, share))
    assert count > 40 and wrong == []


# Of a card PyTorch can have 95 %.
CARDS = {16: 0.95 * 16 * 2**30, 24: 0.95 * 24 * 2**30}


@pytest.mark.parametrize("name, batches", [
    ("small", (692, 1049, 1012, 1529)),
    ("medium", (51, 82, 79, 124)),
    ("large", (0, 3, 2, 7)),
    ("large-128", (1, 3, 3, 7)),
    ("SmolLM-135M", (22, 35, 31, 49)),
    ("SmolLM-360M", (10, 18, 16, 27)),
    ("Qwen2.5-0.5B", (6, 12, 11, 19)),
    ("TinyLlama-1.1B", (0, 5, 4, 12)),
    ("Llama-3.2-1B", (0, 3, 2, 9)),
    ("GPT-2 as a LLaMA", (27, 43, 37, 58)),
    ("heads of 80", (31, 50, 45, 71)),
    ("heads of 96", (39, 61, 54, 83)),
    ("1,023 tokens", (40, 62, 56, 86)),
    ("ffn 1,365", (75, 114, 96, 146)),
])  # fmt: skip
def test_which_size_fits_which_card(name, batches):
    """The page has them: without and with the flags that need less."""
    config = llama.Config(**(SIZES | SHAPES)[name], use_amp=True)
    less = dataclasses.replace(config, recompute=True, moments="bf16")
    runs = [(each, memory) for each in (config, less) for memory in CARDS.values()]
    assert tuple(hardware.fitting_batch(each, GPU, memory) for each, memory in runs) == batches
    for batch_size, (each, memory) in zip(batches, runs, strict=True):
        assert hardware.memory_needed(each, GPU).total(batch_size) <= memory or not batch_size
    weights = round(llama.count_weights(llama_on_meta(config).parameters()) / 1e6)
    shown = [str(batch_size) if batch_size else "-" for batch_size in (f"{weights:,}", *batches)]
    line = f"| {name} | {config.seq_len:,} | {' | '.join(shown)} |"
    assert line in (ROOT / "docs" / "usage.md").read_text()


def llama_on_meta(config):
    with torch.device("meta"):
        return llama.TinyLlamaTriton(dataclasses.replace(config, no_init=True), llama.OPERATIONS["torch"])


@pytest.fixture
def card(monkeypatch):
    """card(free, ...): the GPU has so many free bytes from now on."""

    def make(free, total=2**50, reserved=0, allocated=0, integrated=0, processes=None):
        for name, value in dict(
            mem_get_info=(free, total), memory_reserved=reserved, memory_allocated=allocated, current_device=0,
            get_device_properties=SimpleNamespace(is_integrated=integrated),
        ).items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: processes is not None)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: processes)

    return make


@pytest.mark.parametrize("memory", [
    dict(), dict(reserved=300, allocated=100), dict(integrated=1, total=0),
], ids=["free", "cached", "shared"])  # fmt: skip
def test_what_surely_does_not_fit_is_refused(card, memory):
    """And nothing else: neither what fits exactly, nor on a CPU."""
    config = llama.Config(**SIZES["large"], use_amp=True)
    needed = int(hardware.memory_needed(config, GPU).total(config.batch_size))
    for there, outcome in ((needed, contextlib.nullcontext()), (needed - 1, pytest.raises(llama.UsageError))):
        free = there - memory.get("reserved", 0) + memory.get("allocated", 0)
        card(**{"free": free, **memory, **({"total": there, "free": 0} if memory.get("integrated") else {})})
        with outcome:
            hardware.require_gpu_memory(config, GPU)
    card(0)
    hardware.require_gpu_memory(config, torch.device("cpu"))


def test_nothing_is_refused_where_the_driver_does_not_tell(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", Mock(side_effect=RuntimeError("not supported")))
    hardware.require_gpu_memory(llama.Config(**SIZES["large"] | dict(batch_size=2**20)), GPU)


def test_processes_share_the_state(card):
    config = llama.Config(**SIZES["large"], use_amp=True)
    card(16 * 2**30, processes=4)
    hardware.require_gpu_memory(config, GPU)  # alone it needs 20 GiB
    card(16 * 2**30)
    with pytest.raises(llama.UsageError, match="give --batch-size 1$"):
        hardware.require_gpu_memory(config, GPU)


@pytest.mark.parametrize("changes, gib, told", [
    (dict(recompute=True), 15.2, "--batch-size 4, --seq-len 2048, --num-layers 16, --hidden-dim 2048 need 19.7 GiB at "
     "least, and 15.2 GiB are free on Some GPU: give --batch-size 1"),
    (dict(seq_len=2**15), 15.2, "--seq-len 32768, .*: not one sequence fits: lower --seq-len"),
    (dict(), 8, "--num-layers 16, .*, and 8.0 GiB are free on Some GPU: the weights do not fit with any batch: lower"),
    (dict(impl="torch"), 40, "need .* at least, and 40.0 GiB are free on Some GPU: give --batch-size 1"),
    (dict(impl="sdpa", compile=True), 16, "give --batch-size 1"),
])  # fmt: skip
def test_a_refusal_names_flags_memory_and_remedy(card, changes, gib, told):
    config = llama.Config(**SIZES["large"] | changes, use_amp=True)
    card(int(gib * 2**30))
    with pytest.raises(llama.UsageError) as error:
        hardware.require_gpu_memory(config, GPU)
    assert re.search(told, str(error.value)) and "\n" not in str(error.value)
    given = re.search("give --batch-size ([0-9]+)", str(error.value))
    if given:  # what is named is accepted
        hardware.require_gpu_memory(dataclasses.replace(config, batch_size=int(given[1])), GPU)


@pytest.mark.parametrize("kind", [llama.OneProcess, distributed.World])
def test_the_refusal_comes_before_anything_is_made(card, monkeypatch, tmp_path, kind):
    config = llama.Config(**SIZES["large"], use_amp=True, output_dir=str(tmp_path / "new"))
    monkeypatch.setattr(kind, "find_device", lambda world, config: GPU)
    monkeypatch.setattr(hardware, "host_memory_bytes", lambda: 2**40)
    card(2**30)
    with pytest.raises(llama.UsageError, match="1.0 GiB are free"):
        llama.train_and_report(config, kind())
    assert not (tmp_path / "new").exists()


# --- the GPU's state and driver


@pytest.mark.parametrize("power, clock, told", [
    (lambda: 412, lambda: 2100, [412, 2100, 45, 0]), (lambda: 0, Mock(side_effect=ImportError), [None, None, 45, 0]),
    (lambda: 412, lambda: 0, [412, None, 45, 0]),
])  # fmt: skip
def test_what_amdsmi_tells(monkeypatch, power, clock, told):
    """For "N/A" PyTorch says 0."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    functions = dict(power_draw=power, clock_rate=clock, temperature=lambda: 45, utilization=lambda: 0)
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    assert list(hardware.gpu_state(GPU).values()) == told


class FakeNvml:
    """Stands for pynvml, of which it has names, constants and units: tells of one GPU, once the library is there."""

    NVML_CLOCK_GRAPHICS, NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 0, 1, 2, 0

    def __init__(self, uuid="GPU-0a-0b", power=95290, energy=()):
        self.uuid, self.power, self.is_ready, self.energy = uuid, power, False, iter(energy)

    def nvmlInit(self):
        self.is_ready = True

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert self.is_ready and uuid == self.uuid
        return "handle"

    def nvmlDeviceGetPowerUsage(self, handle):
        if self.power is None:
            raise RuntimeError("Not Supported")
        return {"handle": self.power}[handle]

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return {"handle": [345, 346, 2619]}[handle][kind]

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return {"handle": [38]}[handle][sensor]

    def nvmlDeviceGetUtilizationRates(self, handle):
        return {"handle": SimpleNamespace(gpu=7, memory=9)}[handle]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return {"handle": answer(self.energy)}[handle]


def answer(values):
    """Return the next of these values, or raise it if it is an error."""
    value = next(values)
    if isinstance(value, Exception):
        raise value
    return value


@pytest.mark.parametrize("library, told", [
    (FakeNvml(), [95.29, 346, 38, 7]), (FakeNvml(power=None), [None, 346, 38, 7]),
    (FakeNvml(uuid="GPU-1"), [None] * 4), (None, [None] * 4),
])  # fmt: skip
def test_what_nvml_tells(monkeypatch, capfd, library, told):
    """Of the current GPU; nothing where the library or the GPU is missing, and no number for what it does not know."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {1: SimpleNamespace(uuid="0a-0b")}.get)
    monkeypatch.setitem(sys.modules, "pynvml", library)  # importing None raises ImportError
    assert hardware.gpu_state(GPU) == dict(zip(STATE, told, strict=True))
    assert hardware.output_of("no such program") is None
    assert capfd.readouterr() == ("", "")


def test_the_fake_has_names_and_constants_of_nvml():
    pynvml = pytest.importorskip("pynvml")
    names = [name for name in dir(FakeNvml) if name.startswith(("nvml", "NVML"))]
    assert all(hasattr(pynvml, name) for name in names) and len(names) == 11
    assert all(getattr(pynvml, name) == getattr(FakeNvml, name) for name in names if name.startswith("NVML"))


class FakeAmdsmi:
    """Stands for amdsmi of ROCm; name is what its release calls the counter, a tick of which is 15.3 microjoules."""

    def __init__(self, ticks, name="energy_accumulator", partition=None):
        self.ticks, self.name, self.partition = iter(ticks), name, partition

    def amdsmi_get_energy_count(self, handle):
        return {"handle": {self.name: answer(self.ticks), "counter_resolution": 15.3, "timestamp": 1}}[handle]

    def amdsmi_get_gpu_compute_partition(self, handle):
        if self.partition is None:  # as of a GPU that cannot be divided
            raise RuntimeError("Feature not supported")
        return {"handle": self.partition}[handle]


@pytest.fixture
def metered(monkeypatch, some_gpu):
    """metered(library, ...): what an energy meter tells of 4 steps of 50 tokens that took so many seconds."""

    def metered(library, seconds=2.0, steps=4, name=None, device=GPU):
        is_amd, clock = isinstance(library, FakeAmdsmi), iter([10.0, 10.0 + seconds])
        monkeypatch.setattr(torch.version, "hip", "6.4" if is_amd else None)
        monkeypatch.setattr(torch.cuda, "_get_amdsmi_handler", lambda: "handle")
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", {1: SimpleNamespace(uuid="0a-0b")}.get)
        monkeypatch.setitem(sys.modules, "amdsmi" if is_amd else "pynvml", library)
        monkeypatch.setattr(hardware, "time", SimpleNamespace(perf_counter=clock.__next__))
        if name:
            monkeypatch.setattr(llama, "get_gpu", lambda kind: gpu(name, 110))
        return hardware.meter_energy(device)(llama.Config(batch_size=5, seq_len=10, num_steps=4), steps)

    return metered


@pytest.mark.parametrize("library, joules", [
    (FakeNvml(energy=[7_000, 607_000]), 600.0),
    (FakeAmdsmi([10**12, 10**12 + 10**7]), 153.0),
    (FakeAmdsmi([10**12, 10**12 + 10**7], name="power"), 153.0),
    (FakeAmdsmi([0, 10**7], partition="SPX"), 153.0),
], ids=["NVML", "amdsmi", "old amdsmi", "undivided"])  # fmt: skip
def test_the_energy_of_a_step_and_of_a_token(metered, library, joules):
    """From the counters' units, of which they differ in a thousand and in a release's name."""
    assert metered(library) == pytest.approx(dict(step_j=joules / 4, token_j=joules / 200, seconds=2.0))


@pytest.mark.parametrize("values, changes", [
    ([5000, 9000], dict(seconds=0.99)), ([5000, 9000], dict(steps=3)), ([5000, 9000], dict(device=torch.device("cpu"))),
    ([5000, 5000], {}), ([0, 0], {}), ([9000, 5000], {}), ([RuntimeError(), 9000], {}), ([5000, RuntimeError()], {}),
    ([5000, 9000], dict(name="AMD Instinct MI250X / MI250")), ([5000, 9000], dict(name="NVIDIA H200 MIG 1g.18gb")),
], ids=[
    "short", "ended early", "CPU", "stands still", "second die", "goes back", "unknown", "lost", "MI250X", "slice",
])  # fmt: skip
@pytest.mark.parametrize("kind", [lambda values: FakeNvml(energy=values), FakeAmdsmi], ids=["NVML", "amdsmi"])
def test_no_energy_is_told_that_was_not_measured(metered, kind, values, changes):
    assert metered(kind(values), **changes) is None


@pytest.mark.parametrize("library", [
    None, FakeNvml(uuid="GPU-1", energy=[5000, 9000]), FakeAmdsmi([5000, 9000], partition="CPX"),
    FakeAmdsmi(["N/A", "N/A"]), FakeAmdsmi([5000, 9000], name="energy"),
], ids=["no library", "no such GPU", "a partition", "not available", "another name"])  # fmt: skip
def test_no_energy_is_told_where_the_library_does_not_know_it(metered, library):
    assert metered(library) is None


@pytest.mark.parametrize("hip, module", [("6.4", "amdgpu"), (None, "nvidia")])
def test_the_driver_is_that_of_the_kernel_s_module(monkeypatch, tmp_path, hip, module):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(hardware, "Path", lambda *parts: Path(str(tmp_path) + str(Path(*parts))))
    folder = tmp_path / "sys" / "module" / module
    assert hardware.driver_version(GPU) is None
    folder.mkdir(parents=True)
    assert hardware.driver_version(GPU) is None  # part of the kernel, without a version of its own
    (folder / "version").write_text("6.12.12\n")
    cpu = torch.device("cpu")
    assert hardware.driver_version(GPU) == "6.12.12" and hardware.driver_version(cpu) is None
    assert hardware.gpu_state(cpu) == dict.fromkeys(STATE)


def test_the_gpu_is_asked_before_the_warm_up_and_after_the_measured_steps(monkeypatch, run):
    """Never while something is timed: the order of what is called, and what is printed and written of it."""
    calls = []

    def noted(module, name, replacement=None):
        called = replacement or getattr(module, name)
        monkeypatch.setattr(module, name, lambda *arguments: calls.append(name) or called(*arguments))

    noted(hardware, "gpu_state", lambda device: {name: 10.0 * len(calls) + n for n, name in enumerate(STATE)})

    def energy(config, steps):
        calls.append("energy")
        return {"step_j": 61.2, "token_j": 0.00512, "seconds": float(steps)}

    noted(hardware, "meter_energy", lambda device: energy)
    noted(llama, "warm_up")
    noted(llama, "train")
    noted(profiler, "count_kernels")
    done = run()
    assert calls == "gpu_state warm_up meter_energy train energy gpu_state count_kernels".split()
    assert "\nGPU after the last step: 60 W, 61 MHz, 62 degrees C\n" in done.out
    assert "\nEnergy of the GPU: 61.20 J a step, 5.120 mJ a token, over 2.0 s\n" in done.out
    told = done.result["summary"]["gpu"]
    assert [list(told[when].values()) for when in ("idle", "busy")] == [[10, 11, 12, 13], [60, 61, 62, 63]]
    assert done.result["summary"]["energy"] == {"step_j": 61.2, "token_j": 0.00512, "seconds": 2.0}


def test_a_run_without_a_counter_says_nothing_of_energy(run):
    done = run()
    assert done.result["summary"]["energy"] is None and "Energy" not in done.out


def test_the_share_of_the_peak_is_that_of_the_median_step(run, monkeypatch):
    monkeypatch.setattr(hardware, "peak_tflops", lambda device, precision: 1e-6 if precision == "fp32" else None)
    done = run()
    summary = done.result["summary"]
    tflops = hardware.model_tflops(llama.Config(**done.result["config"])) / summary["batch_ms"]["p50"] * 1e3
    assert summary["tflops_per_second"] == pytest.approx(tflops) and summary["mfu"] == pytest.approx(tflops / 1e-6)
    assert f" TFLOP/s, {100 * summary['mfu']:.1f} % of the fp32 peak\n" in done.out


def test_a_result_names_the_commit_and_says_if_the_code_is_another(tmp_path, monkeypatch):
    script = tmp_path / "tiny_llama_v3.py"
    script.write_text("committed\n")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.org")
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(llama, "__file__", str(script))
    commit = hardware.environment(torch.device("cpu"))["commit"]
    assert re.fullmatch("[0-9a-f]{12}", commit)
    script.write_text("changed\n")
    assert hardware.environment(torch.device("cpu"))["commit"] == f"{commit}-dirty"
