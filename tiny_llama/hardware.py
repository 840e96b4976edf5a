"""What is known of the hardware: datasheet peaks, the driver, power, clock and temperature, the memory of the host."""

import dataclasses
import functools
import math
import os
import platform
import re
import subprocess
from pathlib import Path

import numpy as np
import torch

import tiny_llama_v3 as llama

# Peaks of the datasheets, dense and accumulating in fp32, in TFLOP/s of one device as PyTorch shows it (one of the two
# dies of an MI250X). The key is a pattern of the whole name after the vendor's; the number is that of the compute units
# or multiprocessors, which tells a device from a laptop's GPU, a partition or a slice of the same name. A device
# that is not listed has no MFU rather than a wrong one.
PEAK_TFLOPS = {
    "MI355X": (256, {"fp8": 5033.2, "bf16": 2516.6, "fp32": 157.3}),
    "MI350X": (256, {"fp8": 4613.7, "bf16": 2306.9, "fp32": 144.2}),
    "MI325X": (304, {"fp8": 2614.9, "bf16": 1307.4, "tf32": 653.7, "fp32": 163.4}),
    "MI300X": (304, {"fp8": 2614.9, "bf16": 1307.4, "tf32": 653.7, "fp32": 163.4}),
    "MI300A": (228, {"fp8": 1961.2, "bf16": 980.6, "tf32": 490.3, "fp32": 122.6}),
    "MI250X( ?/ ?MI250)?": (110, {"bf16": 191.5, "fp32": 47.9}),
    "(MI250X ?/ ?)?MI250": (104, {"bf16": 181.0, "fp32": 45.3}),
    "MI210": (104, {"bf16": 181.0, "fp32": 45.3}),
    "GB200": (152, {"fp8": 5000.0, "bf16": 2500.0, "tf32": 1250.0, "fp32": 80.0}),
    "B200": (148, {"fp8": 4500.0, "bf16": 2250.0, "tf32": 1100.0, "fp32": 75.0}),
    "H200": (132, {"fp8": 1978.9, "bf16": 989.4, "tf32": 494.7, "fp32": 66.9}),
    "H200 NVL": (132, {"fp8": 1671.0, "bf16": 835.5, "tf32": 417.5, "fp32": 60.0}),
    "H100 80GB HBM3": (132, {"fp8": 1978.9, "bf16": 989.4, "tf32": 494.7, "fp32": 66.9}),
    "H100 NVL": (132, {"fp8": 1671.0, "bf16": 835.5, "tf32": 417.5, "fp32": 60.0}),
    "H100 PCIe": (114, {"fp8": 1513.0, "bf16": 756.0, "tf32": 378.0, "fp32": 51.2}),
    "A100(-(SXM4|PCIE)-[48]0GB| 80GB PCIe)?": (108, {"bf16": 312.0, "tf32": 156.0, "fp32": 19.5}),
    "L40S": (142, {"fp8": 733.0, "bf16": 362.05, "tf32": 183.0, "fp32": 91.6}),
    "A10G": (80, {"bf16": 70.0, "tf32": 35.0, "fp32": 31.5}),
    "GeForce RTX 4090": (128, {"fp8": 330.3, "bf16": 165.2, "tf32": 82.6, "fp32": 82.6}),
}


def peak_tflops(device, precision):
    """The datasheet's TFLOP/s of a Device in "fp8", "bf16", "tf32" or "fp32"; None if it does not list them."""
    for name, (units, peaks) in PEAK_TFLOPS.items():
        if device.num_sms == units and re.fullmatch(f"(NVIDIA |AMD Instinct )?({name})( VF)?", device.name):
            return peaks.get(precision)
    return None


def count_matrix_weights(config):
    """Weights of the matrices that are multiplied, with the head's; norms have less than a thousandth as many."""
    kv_width = config.num_kv_heads * config.head_dim
    layer = config.hidden_dim * (2 * config.hidden_dim + 2 * kv_width + 3 * config.ffn_dim)
    return config.num_layers * layer + config.vocab_size * config.hidden_dim


def model_tflops(config):
    """TFLOP of one step's matrix products: 6 a weight and token for forward and backward (PaLM, appendix B), attention.

    Of causal attention only the half that is not masked counts, where PaLM counts all of it.
    """
    attention = 6 * config.num_layers * config.hidden_dim * config.seq_len  # 12 * hidden * seq, half of it masked
    return (6 * count_matrix_weights(config) + attention) * config.tokens_per_step / 1e12


def tflops_and_peak(config, device):
    """TFLOP of a training step, and the TFLOP/s that the datasheet promises, or None."""
    return model_tflops(config), peak_tflops(device, llama.precision_name(config, device))


def driver_version(device):
    """The version of the GPU's kernel module. None if there is no GPU, or if the module came with the kernel."""
    path = Path("/sys/module", "amdgpu" if torch.version.hip else "nvidia", "version")
    return path.read_text().strip() if device.type == "cuda" and path.exists() else None


def or_none(query):
    """query(), or None if it raises: a library or tool of the driver can be missing or fail in any way."""
    try:
        return query()
    except Exception:
        return None


def gpu_state(device):
    """{"power_w", "clock_mhz", "temperature_c", "utilization_percent"} of the GPU now; None for what is not known."""
    answers = [None] * 4
    if device.type == "cuda" and torch.version.hip:  # through amdsmi, which reports 0 W or MHz for what it cannot read
        power, clock = or_none(torch.cuda.power_draw) or None, or_none(torch.cuda.clock_rate) or None
        answers = [power, clock, or_none(torch.cuda.temperature), or_none(torch.cuda.utilization)]
    elif device.type == "cuda":  # torch.cuda would need a package that is rarely installed
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        fields = "--query-gpu=power.draw,clocks.sm,temperature.gpu,utilization.gpu"
        command = ["nvidia-smi", f"--id=GPU-{uuid}", fields, "--format=csv,noheader,nounits"]
        query = functools.partial(subprocess.run, command, capture_output=True, text=True, check=True, timeout=10)
        text = or_none(lambda: query().stdout) or ",,,"
        answers = [or_none(functools.partial(float, answer)) for answer in text.split(",")]
    return dict(zip(("power_w", "clock_mhz", "temperature_c", "utilization_percent"), answers, strict=True))


def environment(device):
    """What a result depends on besides the configuration, a dict."""
    git = ["git", "-C", str(Path(llama.__file__).resolve().parent), "describe", "--always", "--dirty", "--abbrev=12"]
    return dict(
        device=device.name, arch=device.arch, python=platform.python_version(), torch=torch.__version__,
        triton=getattr(llama.triton, "__version__", None), cuda=torch.version.cuda, hip=torch.version.hip,
        driver=driver_version(device), numpy=np.__version__,
        commit=or_none(lambda: subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()),
    )  # fmt: skip


def host_memory_bytes():
    """The memory of this machine; infinity where the system does not report it (Windows)."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf


def require_host_memory(config, device):
    """Raise MemoryError if one copy of the weights, or of a batch, is larger than the memory of this machine.

    The system may grant more than it has, and end the process when that is full.
    """
    weights = 4 * count_matrix_weights(config)
    batch = config.tokens_per_step * (4 * config.hidden_dim if device.type == "cpu" else 8)  # an activation, or tokens
    if max(weights, batch) > host_memory_bytes():
        raise MemoryError


def is_out_of_memory(error):
    """Whether an error says so. On a CPU PyTorch has none of its own for that, nor for a size that exceeds 64 bits."""
    words = "out of memory|can't allocate memory|Storage size calculation overflowed"
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or bool(re.search(words, str(error)))


def remedied(config, function, *arguments):
    """function(config, *arguments), with a UsageError for an error of PyTorch or Triton that the user can remedy."""
    try:
        return function(config, *arguments)
    except (RuntimeError, MemoryError, OSError) as error:
        for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            folder = os.environ.get(name)
            if folder and folder in str(error):
                reason = f"{name}={folder} cannot be written to"
                raise llama.UsageError(f"{reason}: unset it, or name another folder") from error
        if is_out_of_memory(error):
            sizes = ("batch_size", "seq_len", "num_layers", "hidden_dim", "ffn_dim", "vocab_size")
            least = {field.name: field.metadata["least"] for field in dataclasses.fields(config)}
            lowerable = [name for name in sizes if getattr(config, name) > least[name]]
            given = ", ".join(f"{llama.flag_of(name)} {getattr(config, name)}" for name in lowerable)
            raise llama.UsageError(f"out of memory with {given}: lower one of them") from error
        if re.search(r"No working C\+\+ compiler|Failed to find C compiler", str(error)):
            reason = "Triton and --compile need a C and a C++ compiler, and found none"
            raise llama.UsageError(f"{reason}: install gcc and g++, or set CC and CXX") from error
        raise
