"""What is known of the hardware: datasheet peaks, the driver, power, clock and temperature, energy, memory."""

import dataclasses
import gc
import math
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import tiny_llama_v3 as llama

# Peaks of the datasheets, dense and accumulating in fp32, in TFLOP/s of one device as PyTorch shows it (one of the two
# dies of an MI250X). A name is a pattern of the whole name after the vendor's. The multiprocessors or compute units (a
# Radeon's are counted in pairs) tell a device from a laptop's GPU, a partition or a slice of the same name. A device
# that is not listed has no MFU rather than a wrong one.
PRECISIONS = "fp8", "bf16", "tf32", "fp32"
PEAK_TFLOPS = {  # (name, units): of PRECISIONS, None where the datasheet has none
    ("MI355X", 256): (5033.2, 2516.6, None, 157.3),
    ("MI350X", 256): (4613.7, 2306.9, None, 144.2),
    ("MI325X|MI300X", 304): (2614.9, 1307.4, 653.7, 163.4),
    ("MI300A", 228): (1961.2, 980.6, 490.3, 122.6),
    ("MI250X( ?/ ?MI250)?", 110): (None, 191.5, None, 47.9),
    ("(MI250X ?/ ?)?MI250|MI210", 104): (None, 181.0, None, 45.3),
    ("Radeon RX 7900 XTX", 48): (None, 122.8, None, 61.4),
    ("Radeon RX 9070 XT", 32): (389.0, 194.6, None, 48.7),
    ("Radeon 8060S( Graphics)?", 20): (None, 59.4, None, 29.7),
    ("GB200", 152): (5000.0, 2500.0, 1250.0, 80.0),
    ("B300( SXM6 AC)?", 148): (4500.0, 2250.0, 1125.0, 75.0),
    ("B200", 148): (4500.0, 2250.0, 1100.0, 75.0),
    ("H200|H100 80GB HBM3|GH200 (480GB|144G HBM3e)", 132): (1978.9, 989.4, 494.7, 66.9),
    ("H200 NVL|H100 NVL", 132): (1671.0, 835.5, 417.5, 60.0),
    ("H100 PCIe", 114): (1513.0, 756.0, 378.0, 51.2),
    ("A100(-(SXM4|PCIE)-[48]0GB| 80GB PCIe)?", 108): (None, 312.0, 156.0, 19.5),
    ("L40S", 142): (733.0, 362.05, 183.0, 91.6),
    ("A10G", 80): (None, 70.0, 35.0, 31.5),
    ("A40", 84): (None, 149.7, 74.8, 37.4),
    ("L4", 58): (242.5, 121.0, 60.0, 30.3),
    ("(Tesla )?T4", 40): (None, None, None, 8.1),
    ("GeForce RTX 5090", 170): (419.0, 209.5, 104.8, 104.8),
    ("GeForce RTX 5080", 84): (225.1, 112.6, 56.3, 56.3),
    ("GeForce RTX 5070 Ti", 70): (175.8, 87.9, 43.9, 43.9),
    ("GeForce RTX 4090", 128): (330.3, 165.2, 82.6, 82.6),
    ("GeForce RTX 4080", 76): (194.9, 97.5, 48.7, 48.7),
    ("GeForce RTX 3090", 82): (None, 71.0, 35.6, 35.6),
    ("GeForce RTX 3080", 68): (None, 59.5, 29.8, 29.8),
    ("GeForce RTX 3070", 46): (None, 40.6, 20.3, 20.3),
}

# Drivers update a GPU's energy counter at intervals of up to 0.1 s: the energy of less than 1 s may be wrong by more
# than a tenth.
METERED_SECONDS = 1
# Devices without a counter of their own, by name: the dies of an MI250X, of which one reads the counter of both and the
# other one zero, and the slices of an NVIDIA GPU.
SHARED_COUNTER = r"MI250|\bMIG\b"


def peak_tflops(gpu, precision):
    """Return the datasheet's TFLOP/s of a Gpu in one of PRECISIONS, None if it does not list them."""
    for (name, units), peaks in PEAK_TFLOPS.items():
        if gpu.num_sms == units and re.fullmatch(f"(NVIDIA |AMD (Instinct )?)?({name})( VF)?", gpu.name):
            return peaks[PRECISIONS.index(precision)]


def count_matrix_weights(config):
    """Count the weights that are multiplied, with the head's. Norms have less than a thousandth as many."""
    kv_width = config.num_kv_heads * config.head_dim
    layer = config.hidden_dim * (2 * config.hidden_dim + 2 * kv_width + 3 * config.ffn_dim)
    return config.num_layers * layer + config.vocab_size * config.hidden_dim


def model_tflops(config):
    """Return the TFLOP of the products of a step, forward and backward (PaLM, arXiv:2204.02311, appendix B).

    Of causal attention only the half that is not masked counts, where PaLM counts all of it.
    """
    # For each token: 6 per weight, and 12 * hidden * seq per layer of attention, of which half is masked.
    attention = 6 * config.num_layers * config.hidden_dim * config.seq_len
    return (6 * count_matrix_weights(config) + attention) * config.tokens_per_step / 1e12


def tflops_and_peak(config, device):
    """Return the TFLOP of a training step, and the TFLOP/s that the datasheet promises, or None."""
    return model_tflops(config), peak_tflops(llama.get_gpu(device.type), llama.precision_name(config, device))


def driver_version(device):
    """Return the version of the GPU's kernel module, None without a GPU or for a module that came with the kernel."""
    path = Path("/sys/module", "amdgpu" if torch.version.hip else "nvidia", "version")
    return path.read_text().strip() if device.type == "cuda" and path.exists() else None


def or_none(query, *arguments):
    """Return query(*arguments), or None if it raises: a library or tool of the driver can be missing or fail."""
    try:
        return query(*arguments)
    except Exception:
        return None


def output_of(*command):
    """Return what a program prints, or None if it fails, is missing or does not end."""
    options = dict(capture_output=True, text=True, check=True, timeout=10)
    return or_none(lambda: subprocess.run(command, **options).stdout.strip())


def amd_state():
    """Return functions that return W, MHz, degrees C and percent of the current GPU of AMD, from amdsmi."""
    cuda = torch.cuda
    # PyTorch says 0 W and 0 MHz where amdsmi cannot read them.
    return lambda: cuda.power_draw() or None, lambda: cuda.clock_rate() or None, cuda.temperature, cuda.utilization


def nvml_gpu():
    """Return the module of NVML, from the package nvidia-ml-py, and its handle of the current GPU of NVIDIA.

    ImportError without the package.
    """
    import pynvml  # the name of its module

    pynvml.nvmlInit()
    # By its UUID, since the library counts the GPUs in another order than CUDA, and does not heed CUDA_VISIBLE_DEVICES.
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")


def nvidia_state():
    """Return what amd_state() does for NVIDIA, from NVML."""
    nvml, gpu = nvml_gpu()
    return (
        lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,  # of mW
        lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
        lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    )


def gpu_state(device):
    """Return {"power_w", "clock_mhz", "temperature_c", "utilization_percent"} of the GPU now, None where unknown."""
    queries = or_none(amd_state if torch.version.hip else nvidia_state) if device.type == "cuda" else None
    answers = map(or_none, queries) if queries else [None] * 4
    return dict(zip(("power_w", "clock_mhz", "temperature_c", "utilization_percent"), answers, strict=True))


def amd_energy():
    """Return a function that returns the joules that the current GPU of AMD has used so far, from amdsmi.

    None for a partition of a GPU, ImportError without amdsmi, which comes with ROCm.
    """
    import amdsmi  # PyTorch has imported it if it is there, with the one of two libamd_smi.so that fits

    gpu = torch.cuda._get_amdsmi_handler()  # by which PyTorch reads power, clock and temperature
    if or_none(amdsmi.amdsmi_get_gpu_compute_partition, gpu) in ("DPX", "TPX", "QPX", "CPX"):
        return None  # all partitions of a GPU share its counter

    def joules():
        count = amdsmi.amdsmi_get_energy_count(gpu)
        # ROCm 6.2 and older call the counter "power". A tick is so many microjoules.
        return count.get("energy_accumulator", count.get("power")) * count["counter_resolution"] / 1e6

    return joules


def nvidia_energy():
    """Return what amd_energy() does for NVIDIA, from NVML."""
    nvml, gpu = nvml_gpu()
    return lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3  # of mJ


def meter_energy(device):
    """Start to measure the energy of the current GPU. Return a function of a Config and of how many steps were done.

    It returns {"step_j", "token_j", "seconds"}: the joules per step and per token, of all the time since the start. It
    returns None where the GPU has no counter of its own, the time is less than METERED_SECONDS, or the run ended early:
    then steps used energy that are not in the number.
    """
    is_part = device.type == "cpu" or re.search(SHARED_COUNTER, llama.get_gpu(device.type).name)
    counter = None if is_part else or_none(amd_energy if torch.version.hip else nvidia_energy)
    before, start = or_none(counter), time.perf_counter()

    def energy(config, steps):
        used, seconds = or_none(lambda: counter() - before), time.perf_counter() - start
        # A counter that stands still, or goes back, counts nothing.
        if used is None or used <= 0 or seconds < METERED_SECONDS or steps < config.num_steps:
            return None
        return {"step_j": used / steps, "token_j": used / steps / config.tokens_per_step, "seconds": seconds}

    return energy


def environment(device):
    """Return what a result depends on besides the configuration, a dict."""
    folder, gpu = Path(llama.__file__).resolve().parent, llama.get_gpu(device.type)
    return dict(
        device=gpu.name,
        arch=gpu.arch,
        python=platform.python_version(),
        torch=torch.__version__,
        triton=getattr(llama.triton, "__version__", None),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        driver=driver_version(device),
        numpy=np.__version__,
        tiles=llama.own_tiles(device.type) or None,
        commit=output_of("git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=12"),
    )


def host_memory_bytes():
    """Return the memory of this machine, infinity where the system does not report it (Windows)."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf


def require_host_memory(config, device):
    """Raise MemoryError if one copy of the weights, or of a batch, is larger than the memory of this machine.

    The system may grant more than it has, and end the process when that is full.
    """
    weights = 4 * count_matrix_weights(config)
    # The tokens of a step, and on a CPU an activation of a micro-batch in fp32.
    tokens = 8 * config.tokens_per_step
    activation = 4 * config.hidden_dim * config.tokens_per_micro_batch if device.type == "cpu" else 0
    if max(weights, tokens, activation) > host_memory_bytes():
        raise MemoryError


class Memory(NamedTuple):
    """Bytes that training steps need on a GPU at least."""

    state: float  # whatever the batch is
    sequence: float  # for each sequence: what the forward pass keeps for the backward pass
    gradients: float = 0  # that need not be there together with what the sequences keep

    def total(self, batch_size):
        """Return the bytes of a step."""
        return self.state + max(self.gradients, batch_size * self.sequence)

    def largest_batch(self, memory):
        """Return how many sequences fit into so many bytes, 0 if not even the state does."""
        return int((memory - self.state) // self.sequence) if self.total(0) <= memory else 0


def memory_needed(config, device, processes=1):
    """Return the Memory of each of so many processes. It is a lower bound: tensors of a moment are not counted.

    Bytes of a weight, with our kernels: 2 for itself, 2 for its gradient and, divided by the processes, 2 for the lower
    half of its fp32 value and 8 for the moments (4 with --moments bf16); in fp32 4 + 4 and 8. With PyTorch 4 and 8, 4
    for the gradient, which comes when what the sequences keep goes, and 2 for what autocast makes of it; all divided
    with --shard full.

    Of each token a layer keeps, in the type of the run, the output of attention (hidden), gate and up (2 ffn), both
    residual streams (2 hidden), q, k and v, and without --recompute the outputs of both norms (2 hidden) and of SwiGLU
    (ffn); in fp32 lse (heads) and two rstd. With --fp8 also what its products take in FP8. Eager PyTorch keeps more:
    both norms' outputs (2 hidden), silu(gate) and its product with up (2 ffn), the residual streams in fp32 and, with
    --impl torch, the scores (heads x seq). To this come the logits and the last residual stream. What torch.compile
    keeps of it is its own choice: the tensors that ours keeps, at least.
    """
    implementation, _ = llama.select_operations(config, device)
    hidden, ffn, heads = config.hidden_dim, config.ffn_dim, config.num_heads
    size = 2 if config.use_amp else 4  # of an element in the type of the run
    weights = count_matrix_weights(config) + config.untied_head * config.vocab_size * hidden
    width = (heads + 2 * config.num_kv_heads) * config.head_dim
    kept = size * (3 * hidden + 2 * ffn + width) + 4 * (heads + 2)
    logits = size * config.vocab_size
    layers = config.num_layers
    if implementation == "triton":
        own = (8 if config.moments == "fp32" else 4) + 2 * config.use_amp
        state, gradients = weights * (2 * size + own / processes), 0
        if not (config.recompute or config.fp8):
            kept += size * (2 * hidden + ffn)
        if config.fp8:  # the inputs of the four products and, of all layers, the weights
            kept += 3 * hidden + ffn
            state += weights - config.vocab_size * hidden * (1 + config.untied_head)
        if config.severed_autograd:  # whose layers have no backward pass
            layers = 0
    else:
        shares = processes if config.shard == "full" else 1
        copy = 2 * (config.use_amp and not config.compile and shares == 1)
        state, gradients = weights * (12 + copy) / shares, weights * (4 - copy) / shares
        if not config.compile:
            kept += size * 2 * (hidden + ffn) + (4 - size) * 2 * hidden
            kept += (6 if config.use_amp else 4) * heads * config.seq_len * (implementation == "torch")
            logits = 8 * config.vocab_size  # in fp32, and their logarithms or their gradient
    return Memory(state, config.seq_len * (layers * kept + logits + size * hidden), gradients)


def fitting_batch(config, device, memory, processes=1):
    """Return the batch size that fits into so many bytes, 0 if not one sequence does.

    This is an estimate: what memory_needed() leaves out is about what a further layer would need, and compiled models
    need no more than eager ones.
    """
    larger = dataclasses.replace(config, num_layers=config.num_layers + 1, compile=False)
    more = memory_needed(larger, device, processes)
    return more.largest_batch(memory) or min(1, memory_needed(config, device, processes).largest_batch(memory))


def gpu_memory_bytes():
    """Return what this process can have of the GPU's memory: what is free, and what PyTorch has and does not use.

    Infinity where the driver does not tell.
    """
    gc.collect()  # models of earlier runs refer to each other
    told = or_none(torch.cuda.mem_get_info)
    if told is None:
        return math.inf
    free, total = told
    # Where CPU and GPU share the memory, the system gives it back when it is needed.
    is_shared = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "is_integrated", False)
    return total if is_shared else free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def require_gpu_memory(config, device):
    """Raise UsageError for a run that cannot fit into the memory of its GPU, with the batch that fits."""
    if device.type != "cuda":
        return
    dist = torch.distributed
    processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    needed, there = memory_needed(config, device, processes), gpu_memory_bytes()
    if needed.total(config.batch_size) <= there:
        return
    if batch_size := fitting_batch(config, device, there, processes):
        names, remedy = "batch_size seq_len num_layers hidden_dim", f"give --batch-size {batch_size}"
    elif needed.total(0) <= there:
        names, remedy = "batch_size seq_len vocab_size ffn_dim", "not one sequence fits: lower --seq-len"
    else:
        names, remedy = "num_layers hidden_dim ffn_dim vocab_size", "the weights do not fit with any batch: lower one"
    given = ", ".join(f"{llama.flag_of(name)} {getattr(config, name)}" for name in names.split())
    sizes = f"{needed.total(config.batch_size) / 2**30:.1f} GiB at least, and {there / 2**30:.1f} GiB are free"
    raise llama.UsageError(f"{given} need {sizes} on {llama.get_gpu(device.type).name}: {remedy}")


def is_out_of_memory(error):
    """Return whether an error says so. On a CPU PyTorch has no type for it, nor for a size that exceeds 64 bits."""
    words = "out of memory|can't allocate memory|Storage size calculation overflowed"
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or bool(re.search(words, str(error)))


def remedied(config, function, *arguments):
    """Return function(config, *arguments). Raise UsageError for an error of the libraries that the user can remedy."""
    try:
        return function(config, *arguments)
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            sizes = "batch_size accumulate seq_len num_layers hidden_dim ffn_dim vocab_size".split()
            given = ", ".join(f"{llama.flag_of(name)} {getattr(config, name)}" for name in sizes)
            raise llama.UsageError(f"out of memory with {given}: lower one of them") from error
        if re.search(r"No working C\+\+ compiler|Failed to find C compiler", str(error)):
            raise llama.UsageError(
                "Triton and --compile need a C and a C++ compiler, and found none: "
                "install gcc and g++, or set CC and CXX"
            ) from error
        raise
