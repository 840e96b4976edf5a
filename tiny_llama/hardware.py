"""What is known of the hardware: datasheet peaks, the driver, power, clock and temperature, the memory of the host."""

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
# dies of an MI250X). A name is a pattern of the whole name after the vendor's. The compute units or multiprocessors
# tell a device from a laptop's GPU, a partition or a slice of the same name. A device that is not listed has no MFU
# rather than a wrong one.
PEAK_TFLOPS = """
name                                       units  fp8     bf16    tf32    fp32
MI355X                                     256    5033.2  2516.6  -       157.3
MI350X                                     256    4613.7  2306.9  -       144.2
MI325X|MI300X                              304    2614.9  1307.4  653.7   163.4
MI300A                                     228    1961.2  980.6   490.3   122.6
MI250X( ?/ ?MI250)?                        110    -       191.5   -       47.9
(MI250X ?/ ?)?MI250|MI210                  104    -       181.0   -       45.3
GB200                                      152    5000.0  2500.0  1250.0  80.0
B200                                       148    4500.0  2250.0  1100.0  75.0
H200|H100 80GB HBM3                        132    1978.9  989.4   494.7   66.9
H200 NVL|H100 NVL                          132    1671.0  835.5   417.5   60.0
H100 PCIe                                  114    1513.0  756.0   378.0   51.2
A100(-(SXM4|PCIE)-[48]0GB| 80GB PCIe)?     108    -       312.0   156.0   19.5
L40S                                       142    733.0   362.05  183.0   91.6
A10G                                       80     -       70.0    35.0    31.5
GeForce RTX 4090                           128    330.3   165.2   82.6    82.6
"""


def peak_tflops(device, precision):
    """Return the datasheet's TFLOP/s of a Device in "fp8", "bf16", "tf32" or "fp32", None if it does not list them."""
    (_, _, *precisions), *rows = (re.split("  +", line) for line in PEAK_TFLOPS.strip().splitlines())
    for name, units, *peaks in rows:
        if device.num_sms == int(units) and re.fullmatch(f"(NVIDIA |AMD Instinct )?({name})( VF)?", device.name):
            return or_none(float, dict(zip(precisions, peaks, strict=True))[precision])  # of "-" None
    return None


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
    return model_tflops(config), peak_tflops(device, llama.precision_name(config, device))


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


def gpu_state(device):
    """Return {"power_w", "clock_mhz", "temperature_c", "utilization_percent"} of the GPU now, None where unknown."""
    answers = [None] * 4
    if device.type == "cuda" and torch.version.hip:
        cuda = torch.cuda
        power, clock, *others = map(or_none, (cuda.power_draw, cuda.clock_rate, cuda.temperature, cuda.utilization))
        # PyTorch says 0 W and 0 MHz where amdsmi cannot read them.
        answers = [power or None, clock or None, *others]
    elif device.type == "cuda":
        # torch.cuda would need a package that is rarely installed.
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        fields = "--query-gpu=power.draw,clocks.sm,temperature.gpu,utilization.gpu"
        text = output_of("nvidia-smi", f"--id=GPU-{uuid}", fields, "--format=csv,noheader,nounits")
        answers = [or_none(float, answer) for answer in (text or ",,,").split(",")]
    return dict(zip(("power_w", "clock_mhz", "temperature_c", "utilization_percent"), answers, strict=True))


def environment(device):
    """Return what a result depends on besides the configuration, a dict."""
    folder = Path(llama.__file__).resolve().parent
    return dict(
        device=device.name,
        arch=device.arch,
        python=platform.python_version(),
        torch=torch.__version__,
        triton=getattr(llama.triton, "__version__", None),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        driver=driver_version(device),
        numpy=np.__version__,
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
    # A batch is an activation in fp32 on a CPU; on a GPU the host has its tokens only.
    batch = config.tokens_per_step * (4 * config.hidden_dim if device.type == "cpu" else 8)
    if max(weights, batch) > host_memory_bytes():
        raise MemoryError


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
            sizes = "batch_size seq_len num_layers hidden_dim ffn_dim vocab_size".split()
            given = ", ".join(f"{llama.flag_of(name)} {getattr(config, name)}" for name in sizes)
            raise llama.UsageError(f"out of memory with {given}: lower one of them") from error
        if re.search(r"No working C\+\+ compiler|Failed to find C compiler", str(error)):
            raise llama.UsageError(
                "Triton and --compile need a C and a C++ compiler, and found none: "
                "install gcc and g++, or set CC and CXX"
            ) from error
        raise
