#!/usr/bin/env python3
"""Train a tiny LLaMA on Triton kernels written here, forward and backward, and report what a step costs.

Train, on whatever device there is:

    python tiny_llama_v3.py --batch-size 8 --seq-len 128 --num-steps 20
    python tiny_llama_v3.py --use-amp --graph          bf16, the step captured in CUDA/HIP graphs
    python tiny_llama_v3.py --data markov              data that can be learnt, and the loss it cannot go below

Compare: the same model, weights and data on plain PyTorch, and with PyTorch's own fused attention:

    python tiny_llama_v3.py --impl torch
    python tiny_llama_v3.py --impl sdpa --compile

Verify: loss and every gradient against PyTorch in higher precision, before anything is timed:

    python tiny_llama_v3.py --check --num-steps 1

Scale: one process a GPU, data parallel, each with its own batch and its share of the optimizer's state:

    torchrun --standalone --nproc_per_node=4 tiny_llama_v3.py --use-amp --graph

Replay a mistake (the table BUGS below), and see what gives it away:

    python tiny_llama_v3.py --list-stages
    python tiny_llama_v3.py --stage 4 --profile profiles/stage4

Each run prints one line a step, a summary, and the path of a JSON file that holds all of it; of several processes, the
first one does.
Exit codes: 0 done, 1 a check failed or the run diverged (a loss or gradient norm is not finite), 2 the request cannot
be met or a file not be written (one line says why), 130 interrupted by Ctrl-C or SIGTERM (the steps done are saved),
141 the reader of the output has left.
"""

import argparse
import collections
import contextlib
import csv
import dataclasses
import errno
import functools
import gc
import itertools
import json
import math
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS, Windows, a CPU-only PyTorch: the kernels stay plain functions that nothing calls
    triton = None
    tl = SimpleNamespace(constexpr=float)
jit = triton.jit if triton else lambda kernel: kernel
try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4
    TensorDescriptor = None

# ----------------------------------------------------------------------------------------------------------------------
# The mistakes that a flag brings back. Each is a few lines, marked "BUG" where it lives; none is active by default.


class Bug(NamedTuple):
    """A mistake of the published workshop, or one that is easily made."""

    stages: tuple  # the stages it is part of
    effect: str  # what it brings back
    sign: str  # what gives it away


BUGS = {
    "no_init": Bug(
        (1,), "PyTorch's default initialisation under a tied head",
        "the first loss is about the hidden size instead of ln(vocab)",
    ),
    "noncontiguous_kv": Bug(
        (1, 2), "K and V reach the attention kernel with a badly strided head dimension",
        "attention kernels several times slower at the same result, more so at a longer sequence",
    ),
    "unsynced_timing": Bug(
        (1, 2, 3), "host clocks without a device sync",
        "the phases sum to a fraction of the step",
    ),
    "triton_matmul_swiglu": Bug(
        (1, 2, 3, 4), "one program per output element, each reducing over the hidden dimension",
        "the SwiGLU kernel takes most of the device time",
    ),
    "severed_autograd": Bug(
        (6,), "kernels called outside autograd",
        "backward is almost free, and only the tied embedding receives a gradient",
    ),
    "no_warmup": Bug(
        (7,), "the first steps, kernel compilation included, are averaged in",
        "the mean step is far above the median",
    ),
}  # fmt: skip

STAGES = {
    1: "broken loss",
    2: "slow performance",
    3: "fake timing",
    4: "slow kernels",
    5: "optimized",
    6: "severed autograd",
    7: "cold start",
    8: "one graph launch instead of hundreds of kernel launches",
}


def stage_flags(stage):
    """The fields of Config that a stage sets: {field: value}."""
    flags = {name: True for name, bug in BUGS.items() if stage in bug.stages}
    return flags | ({"graph": True} if stage == 8 else {})


# ----------------------------------------------------------------------------------------------------------------------
# Configuration: one frozen dataclass; the command line is generated from its fields.


class UsageError(Exception):
    """The request cannot be met; the message names the flag, the values and the remedy."""


LARGEST = 2**31 - 1  # kernels and their grids count in 32 bits
LEAST = dict(
    hidden_dim=1, num_layers=1, num_heads=1, num_kv_heads=1, ffn_dim=1, vocab_size=2, batch_size=1, seq_len=1,
    num_steps=1, warmup_steps=0, comm_timeout=1,
)  # fmt: skip


def option(default, help, **metadata):
    """A field of Config; metadata are argparse's, and the "group" that begins with it."""
    return dataclasses.field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True)
class Config:
    """What a run does. UsageError if it contradicts itself; --help shows these texts, in these groups."""

    hidden_dim: int = option(512, "width of the residual stream", group="model")
    num_layers: int = option(8, "transformer blocks")
    num_heads: int = option(8, "query heads; each has hidden-dim / num-heads dimensions")
    num_kv_heads: int | None = option(None, "key/value heads (grouped-query attention); default: half of --num-heads")
    ffn_dim: int | None = option(None, "width of the feed-forward layer; default: 4 x hidden-dim")
    vocab_size: int = option(1000, "distinct tokens")

    batch_size: int = option(8, "sequences a step, of each process", group="training")
    seq_len: int = option(256, "tokens a sequence")
    num_steps: int = option(50, "training steps that are measured")
    warmup_steps: int = option(3, "steps before the measured ones; weights and optimizer are restored after them")
    learning_rate: float = option(3e-4, "AdamW's learning rate, constant")
    use_amp: bool = option(False, "compute in bf16, with fp32 master weights and optimizer state")
    data: str = option(
        "random", "fresh random tokens, or a Markov chain whose entropy is known", choices=("random", "markov")
    )
    seed: int = option(42, "of weights and data")

    impl: str = option(
        "triton", "our kernels; plain PyTorch; PyTorch with its fused attention",
        choices=("triton", "torch", "sdpa"), group="implementation",
    )  # fmt: skip
    device: str = option("auto", "where to run (cuda is also the name of an AMD GPU)", choices=("auto", "cuda", "cpu"))
    compile: bool = option(False, "torch.compile the model")
    graph: bool = option(False, "capture the step in CUDA/HIP graphs and replay them")
    matmul_precision: str = option(
        "highest", "fp32 matmuls in full fp32 or in TF32, library and kernels alike", choices=("highest", "high")
    )
    deterministic: bool = option(False, "ask PyTorch for deterministic algorithms (our kernels always are)")

    shard: str | None = option(
        None, "what torchrun's processes share: the optimizer's state (--impl triton does by default), or weights and "
        "gradients too (FSDP2, for --impl torch and sdpa, which by default share nothing)",
        choices=("optimizer", "full"), group="several processes",
    )  # fmt: skip
    comm_timeout: int = option(120, "how long processes wait for each other", metavar="SECONDS")

    timing: str = option(
        "phases", "events around each phase and a sync a step; or one sync at the end",
        choices=("phases", "step"), group="measuring",
    )  # fmt: skip
    check: bool = option(
        False, "first compare loss and gradients with PyTorch in higher precision; stop if they differ"
    )
    profile: str | None = option(
        None, "write a Perfetto trace, a kernel table and, of a GPU, a memory snapshot into this folder", metavar="DIR"
    )
    output_dir: str = option("triton_profiles", "where the JSON of the run goes", metavar="DIR")

    stage: int | None = option(
        None, "set the flags of a stage of the workshop (see --list-stages)",
        choices=tuple(STAGES), group="mistakes, brought back",
    )  # fmt: skip
    no_init: bool = option(False, BUGS["no_init"].effect)
    noncontiguous_kv: bool = option(False, BUGS["noncontiguous_kv"].effect)
    unsynced_timing: bool = option(False, BUGS["unsynced_timing"].effect)
    triton_matmul_swiglu: bool = option(False, BUGS["triton_matmul_swiglu"].effect)
    severed_autograd: bool = option(False, BUGS["severed_autograd"].effect)
    no_warmup: bool = option(False, BUGS["no_warmup"].effect)

    def __post_init__(self):
        set_field = functools.partial(object.__setattr__, self)  # the dataclass is frozen for everyone else
        if self.num_kv_heads is None:
            set_field("num_kv_heads", self.num_heads // (2 if self.num_heads % 2 == 0 else 1))
        if self.ffn_dim is None:
            set_field("ffn_dim", 4 * self.hidden_dim)
        if self.stage is not None and self.stage not in STAGES:
            raise UsageError(f"--stage {self.stage} does not exist: choose one of {', '.join(map(str, STAGES))}")
        for name, value in stage_flags(self.stage).items():
            set_field(name, value)
        if self.no_warmup:  # BUG no_warmup: nothing runs before the clock starts
            set_field("warmup_steps", 0)
        self._validate()

    def _validate(self):
        ranges = {name: (least, LARGEST) for name, least in LEAST.items()} | {"seed": (0, 2**32 - 1)}
        for name, (least, most) in ranges.items():
            if not least <= getattr(self, name) <= most:
                raise UsageError(f"{flag_of(name)} {getattr(self, name)} is out of range: give {least} to {most}")
        fp32 = torch.finfo(torch.float32)  # the optimizer's
        if not fp32.tiny <= self.learning_rate <= fp32.max:
            raise UsageError(f"--learning-rate {self.learning_rate} is no positive fp32 number: give one such as 3e-4")
        if self.hidden_dim % self.num_heads:
            raise UsageError(
                f"--hidden-dim {self.hidden_dim} is not divisible by --num-heads {self.num_heads}: "
                f"try --hidden-dim {math.ceil(self.hidden_dim / (2 * self.num_heads)) * 2 * self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"--num-heads {self.num_heads} is not divisible by --num-kv-heads {self.num_kv_heads}: "
                f"try --num-kv-heads {math.gcd(self.num_heads, self.num_kv_heads)}"
            )
        if self.head_dim % 2 or self.head_dim > 128:
            raise UsageError(
                f"--hidden-dim {self.hidden_dim} / --num-heads {self.num_heads} gives {self.head_dim} dimensions a "
                "head: rotary embedding needs an even number, the attention kernel at most 128; change one of the two"
            )
        if self.vocab_size < MARKOV_SUCCESSORS and self.data == "markov":
            raise UsageError(
                f"--vocab-size {self.vocab_size} is too small for --data markov: give {MARKOV_SUCCESSORS} or more"
            )

    @property
    def head_dim(self):
        """Dimensions of a head."""
        return self.hidden_dim // self.num_heads

    @property
    def tokens_per_step(self):
        """Tokens of a batch."""
        return self.batch_size * self.seq_len

    @property
    def bugs(self):
        """The names of the mistakes that are asked for."""
        return [name for name in BUGS if getattr(self, name)]


def flag_of(field_name):
    """num_steps -> --num-steps"""
    return "--" + field_name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """argparse, but the description is shown as it is, and a wrong command line is a UsageError."""

    def __init__(self, prog, description):
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, formatter_class=layout, allow_abbrev=False)

    def error(self, message):
        raise UsageError(f"{message} (--help lists the flags)")


def parse_config(argv, program):
    """Config from the command line; a program called v3_stage3_anything.py means --stage 3."""
    parser = Parser(Path(program).name, __doc__)
    for field in dataclasses.fields(Config):
        kwargs = dict(field.metadata)
        if "group" in kwargs:
            group = parser.add_argument_group(kwargs.pop("group"))
        shown_default = "" if field.default in (None, False) else f" (default: {field.default})"
        kwargs["help"] = kwargs["help"].replace("%", "%%") + shown_default
        if field.type is bool:
            group.add_argument(flag_of(field.name), action="store_true", **kwargs)
        else:
            kind = {int | None: int, str | None: str}.get(field.type, field.type)
            group.add_argument(flag_of(field.name), type=kind, default=field.default, **kwargs)
    group.add_argument("--list-stages", action="store_true", help="print the stages and their signs, and exit")
    args = vars(parser.parse_args(argv))
    if args.pop("list_stages"):
        print_stages()
        parser.exit()
    link = re.match(r"v3_stage(\d+)_", Path(program).name)
    if link:
        if args["stage"] not in (None, int(link[1])):
            raise UsageError(f"--stage {args['stage']} contradicts the name {Path(program).name}: drop one of the two")
        args["stage"] = int(link[1])
    return Config(**args)


def print_stages():
    """What --list-stages shows."""
    for stage, title in STAGES.items():
        print(f"stage {stage}: {title}")
        for name in stage_flags(stage):
            bug = BUGS.get(name)
            print(f"    {flag_of(name)}" + (f"\n        {bug.effect}\n        sign: {bug.sign}" if bug else ""))


# ----------------------------------------------------------------------------------------------------------------------
# The device: what it is, what it can reach, and how kernels are launched on it. Every vendor branch is in this section.

LOG2_E = tl.constexpr(math.log2(math.e))

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own variable: kernels run on the CPU, in Python


@dataclass(frozen=True)
class Device:
    """What launch configurations and reports depend on."""

    type: str  # "cuda" (NVIDIA and AMD alike) or "cpu"
    name: str
    arch: str  # "sm_90", "gfx942", ... or "cpu"
    num_sms: int  # multiprocessors, or compute units
    warp_size: int

    @property
    def family(self):
        """What has the same tiles."""
        if self.arch.startswith("gfx"):
            return "amd"
        return "interpreter" if self.type == "cpu" else "hopper" if self.arch == "sm_90" else "nvidia"

    @property
    def lacks_bf16_rounding(self):
        """Whether it takes several instructions to round fp32 to bf16."""
        return self.arch in ("gfx90a", "gfx942")


@functools.cache
def get_device(type):
    """The current Device of type "cuda" or "cpu"."""
    if type == "cpu":
        return Device("cpu", platform.processor() or platform.machine(), "cpu", num_sms=2, warp_size=32)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    # The capability is (9, 4) on an MI300 as well: ask torch for the vendor, never the number.
    is_amd = torch.version.hip is not None
    arch = properties.gcnArchName.split(":")[0] if is_amd else f"sm_{properties.major}{properties.minor}"
    return Device("cuda", properties.name, arch, properties.multi_processor_count, getattr(properties, "warp_size", 32))


def driver_version(device):
    """The version of the GPU's kernel module, or None: there is no GPU, or the module is the kernel's own."""
    path = Path("/sys/module", "amdgpu" if torch.version.hip else "nvidia", "version")
    return path.read_text().strip() if device.type == "cuda" and path.exists() else None


def ask(question):
    """What a library or tool of the driver answers; None where it is missing or fails, in whatever way."""
    try:
        return question()
    except Exception:
        return None


def gpu_state(device):
    """{"power_w", "clock_mhz", "temperature_c", "utilization_percent"} of the GPU now, None for what nobody tells."""
    answers = [None] * 4
    if device.type == "cuda" and torch.version.hip:  # through amdsmi, whose 0 W or MHz mean that it does not know
        power, clock = ask(torch.cuda.power_draw) or None, ask(torch.cuda.clock_rate) or None
        answers = [power, clock, ask(torch.cuda.temperature), ask(torch.cuda.utilization)]
    elif device.type == "cuda":  # torch.cuda would need a package that few have
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        fields = "--query-gpu=power.draw,clocks.sm,temperature.gpu,utilization.gpu"
        command = ["nvidia-smi", f"--id=GPU-{uuid}", fields, "--format=csv,noheader,nounits"]
        run = functools.partial(subprocess.run, command, capture_output=True, text=True, check=True, timeout=10)
        text = ask(lambda: run().stdout) or ",,,"
        answers = [ask(functools.partial(float, answer)) for answer in text.split(",")]
    return dict(zip(("power_w", "clock_mhz", "temperature_c", "utilization_percent"), answers, strict=True))


def select_device(requested, local_rank=0):
    """The Device of --device, of several the one of this process; UsageError if there is no such one."""
    if requested == "cuda" and not torch.cuda.is_available():
        build = torch.version.hip or torch.version.cuda
        reason = f"PyTorch {torch.__version__} sees none" if build else f"PyTorch {torch.__version__} is a CPU build"
        raise UsageError(f"--device cuda: there is no GPU here ({reason}): use --device cpu, or install a GPU build")
    if requested == "cpu" or not torch.cuda.is_available():
        return get_device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"there are {torch.cuda.device_count()} GPUs here, and this is process {local_rank + 1} of this node: "
            "lower --nproc_per_node of torchrun, or give --device cpu"
        )
    torch.cuda.set_device(local_rank)
    return get_device("cuda")


def triton_obstacle(device, use_amp=False):
    """Why Triton kernels cannot run here, in words, or None if they can."""
    if triton is None:
        return "Triton is not installed"
    if device.type == "cpu" and not INTERPRETED:
        return "there is no GPU (TRITON_INTERPRET=1 interprets the kernels)"
    if device.type == "cpu" and use_amp:
        return "Triton's interpreter multiplies bf16 matrices wrongly"
    return None


# Peaks of the datasheets, dense and accumulating in fp32, in TFLOP/s of one device as PyTorch shows it (one of the two
# dies of an MI250X). The key is a pattern of the whole name after the vendor's, the number that of the device's compute
# units or multiprocessors: a laptop's GPU, a partition or a slice has the name, but not the number. Who is not listed
# gets no MFU rather than a wrong one.
PEAK_TFLOPS = {
    "MI355X": (256, {"bf16": 2516.6, "fp32": 157.3}),
    "MI350X": (256, {"bf16": 2306.9, "fp32": 144.2}),
    "MI325X": (304, {"bf16": 1307.4, "tf32": 653.7, "fp32": 163.4}),
    "MI300X": (304, {"bf16": 1307.4, "tf32": 653.7, "fp32": 163.4}),
    "MI300A": (228, {"bf16": 980.6, "tf32": 490.3, "fp32": 122.6}),
    "MI250X( ?/ ?MI250)?": (110, {"bf16": 191.5, "fp32": 47.9}),
    "(MI250X ?/ ?)?MI250": (104, {"bf16": 181.0, "fp32": 45.3}),
    "MI210": (104, {"bf16": 181.0, "fp32": 45.3}),
    "GB200": (152, {"bf16": 2500.0, "tf32": 1250.0, "fp32": 80.0}),
    "B200": (148, {"bf16": 2250.0, "tf32": 1100.0, "fp32": 75.0}),
    "H200": (132, {"bf16": 989.4, "tf32": 494.7, "fp32": 66.9}),
    "H200 NVL": (132, {"bf16": 835.5, "tf32": 417.5, "fp32": 60.0}),
    "H100 80GB HBM3": (132, {"bf16": 989.4, "tf32": 494.7, "fp32": 66.9}),
    "H100 NVL": (132, {"bf16": 835.5, "tf32": 417.5, "fp32": 60.0}),
    "H100 PCIe": (114, {"bf16": 756.0, "tf32": 378.0, "fp32": 51.2}),
    "A100(-(SXM4|PCIE)-[48]0GB| 80GB PCIe)?": (108, {"bf16": 312.0, "tf32": 156.0, "fp32": 19.5}),
    "L40S": (142, {"bf16": 362.05, "tf32": 183.0, "fp32": 91.6}),
    "A10G": (80, {"bf16": 70.0, "tf32": 35.0, "fp32": 31.5}),
    "GeForce RTX 4090": (128, {"bf16": 165.2, "tf32": 82.6, "fp32": 82.6}),
}


def peak_tflops(device, precision):
    """TFLOP/s of the datasheet in "bf16", "tf32" or "fp32"; None for a device that is not listed."""
    for name, (units, peaks) in PEAK_TFLOPS.items():
        if device.num_sms == units and re.fullmatch(f"(NVIDIA |AMD Instinct )?({name})( VF)?", device.name):
            return peaks.get(precision)
    return None


def precision_name(config, device):
    """What matrix products are computed in, with the library's settings as they are now."""
    if config.use_amp:
        return "bf16"
    return "tf32" if dot_precision(device) == "tf32" else "fp32"


def tf32_available(device):
    """Whether matrix units take fp32 operands rounded to TF32."""
    return device.arch == "gfx942" or device.arch.startswith("sm_") and int(device.arch[3:]) >= 80


def dot_precision(device):
    """tl.dot's input_precision for fp32 operands: what the library does in its own matmuls.

    That is asked, not what the library was told: on AMD it keeps to fp32 unless HIPBLASLT_ALLOW_TF32=1.
    """
    return "tf32" if tf32_available(device) and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def cdiv(a, b):
    """ceil(a / b) of integers."""
    return -(-a // b)


def next_power_of_2(n):
    """The smallest power of two from n on."""
    return 1 << (n - 1).bit_length()


# Tiles. Of num_warps * warp_size threads there may be 1024 at most, and an AMD wave has 64: half the warps there. The
# operands of a product must fit in shared memory: 64 KiB on gfx90a and gfx942, 227 on sm_90, 99 on NVIDIA's smallest.
# "Measured" is the fastest of those that were tried on an H200; "compiled" is chosen by the registers, spills and
# occupancy that the compiler reports (docs/compiled_kernels.md), where there was no GPU to measure on, on AMD by the
# cycles of the loops as well (docs/attention_tiles.md).


class NormTile(NamedTuple):
    """Rows and columns of a tile, warps of a program, and programs."""

    rows: int
    cols: int
    warps: int
    programs: int


class AttentionTile(NamedTuple):
    """As the kernels call it."""

    BLOCK_M: int  # queries
    BLOCK_N: int  # keys
    num_warps: int
    num_stages: int
    options: dict = {}  # what else the compiler is told


PASSES = ("forward", "dq", "dkdv", "fused")
# (architecture or family, operands of tl.dot, dimensions of a head up to): a tile for each of PASSES; the first row
# that fits counts.
ATTENTION_TILES = {
    # Compiled: 16 rows of a product for each wave where registers allow it; with more than 256 of them a wave is alone.
    ("amd", "half", 32): ((128, 32, 4, 1), (64, 32, 4, 1), (32, 64, 4, 1), (32, 64, 4, 1)),
    ("gfx950", "half", 64): ((128, 128, 4, 1), (128, 32, 4, 1), (32, 128, 4, 1), (32, 64, 4, 1)),
    ("amd", "half", 64): ((128, 64, 4, 1), (128, 32, 4, 1), (32, 128, 4, 1), (32, 64, 4, 1)),
    ("gfx950", "half", 128): ((128, 64, 4, 1), (128, 32, 4, 1), (32, 64, 4, 1), (32, 32, 4, 1)),
    ("amd", "half", 128): ((128, 32, 4, 1), (128, 32, 4, 1), (32, 64, 4, 1), (32, 32, 4, 1)),
    ("amd", "any", 64): ((64, 32, 4, 1), (64, 32, 4, 1), (16, 64, 4, 1), (32, 32, 4, 1)),
    ("amd", "any", 128): ((64, 16, 4, 1), (64, 16, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1)),
    # Measured. 64 rows are one wgmma instruction; the fused pass is too short for its loads to fill a pipeline.
    ("hopper", "half", 64): ((64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 1)),
    ("hopper", "half", 128): ((64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 3), (64, 64, 4, 1)),
    # Measured. TF32's instructions want 64 rows; full fp32 has none, and half the rows took 0.7 of the time.
    ("hopper", "tf32", 64): ((64, 32, 4, 1),) * 4,
    ("hopper", "ieee", 64): ((32, 32, 4, 1), (32, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
    ("hopper", "any", 128): ((32, 32, 4, 1),) * 4,
    # Compiled for sm_80: 8 warps share the rows of what would otherwise spill.
    ("nvidia", "half", 64): ((64, 64, 4, 2), (64, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 1)),
    ("nvidia", "half", 128): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 64, 8, 1)),
    ("nvidia", "any", 128): ((32, 32, 8, 1),) * 4,
    ("interpreter", "any", 128): ((32, 32, 4, 1),) * 4,
}  # fmt: skip
# (family, bytes of an element, dimensions of a head): where pass "dq" leaves its loads to the copy engine and becomes
# "described dq". Queries that come so stay in registers, which leaves shared memory for a third stage. Measured: 0.74
# (8192 tokens) to 0.87 (2048) of the time.
DESCRIBED_TILES = {("hopper", 2, 128): (64, 64, 4, 3)}
# Elements that a program works on at a time, measured in bf16 beside half and twice as many.
NORM_ELEMENTS = {
    "forward": 4096,  # 2048 to 8192 are within 2 %
    "backward": 8192,  # half takes 1.3 times as long, twice 2.6 times
}
COLUMN_SUM_TILE = (128, 16, 8)  # rows, columns, warps; 32 or 64 columns leave too few programs: 1.2 times as long
ROPE_BLOCK = 1024  # within 1 % of the fastest; 2048 takes 1.2 times as long for 1,024 tokens
SWIGLU_BLOCK = 1024  # 512 takes 1.1 to 1.2 times as long, 2048 as long, 4096 1.5 times for 1,024 tokens
NAIVE_SWIGLU_BLOCK = 128  # part of the mistake
CROSS_ENTROPY_BLOCK = 8192  # columns; a quarter takes 1.2 times as long
CROSS_ENTROPY_PER_THREAD = 16  # 32 take 1.05 times as long, 8 1.6 times
SCALE_BLOCK = 4096  # hardly ever at work: the factor is 1
EMBEDDING_TILE = (1024, 1024)  # tokens looked at together, columns; a quarter of the columns takes twice as long
ADAMW_BLOCK = 1024  # 256 to 4096 are within 3 %
GROUP_BYTES = 2**28  # of gradients of activations that are kept for the weight gradients of several layers
BUCKET_ELEMENTS = 256_000_000  # of a message between processes; a quarter takes a large step 0.5 % longer on two H200


@functools.cache
def norm_tile(n_rows, n_cols, backward, device_type, block_size=None):
    """Tiles of NORM_ELEMENTS, smaller where they would leave multiprocessors idle.

    The backward pass has two programs a multiprocessor, which walk over the rows.
    """
    device = get_device(device_type)
    cols = block_size or next_power_of_2(n_cols)
    fill = next_power_of_2(cdiv(n_rows, device.num_sms))
    rows = max(1, min(NORM_ELEMENTS["backward" if backward else "forward"] // cols, fill))
    warps = 4 if cols <= 4096 else min(cols // 1024, 16)
    if backward:
        warps = 4 if cols <= 8192 else min(cols // 2048, 16)
        if device.family == "nvidia":
            warps = min(2 * warps, 16)  # as many threads as on an AMD GPU: with half of them registers spill
    elif device.family == "amd":
        warps //= 2
    programs = min(cdiv(n_rows, rows), 2 * device.num_sms) if backward else cdiv(n_rows, rows)
    return NormTile(rows, cols, warps, programs)


@functools.cache
def attention_tile(pass_name, itemsize, block_d, precision, device_type):
    """Tile of one of PASSES, or "described dq", for elements of itemsize bytes, heads of block_d dimensions.

    precision is tl.dot's input_precision for fp32.
    """
    device = get_device(device_type)
    if pass_name == "described dq":
        return AttentionTile(*DESCRIBED_TILES[device.family, itemsize, block_d])
    operands = "half" if itemsize == 2 else precision
    # Matrix instructions of 32 x 32 would have the four waves compute parts of small tiles twice.
    options = {"matrix_instr_nonkdim": 16} if device.family == "amd" else {}
    for (row_device, row_operands, widest_head), tiles in ATTENTION_TILES.items():
        fits = row_operands in (operands, "any") and block_d <= widest_head
        if fits and row_device in (device.arch, device.family):
            return AttentionTile(*tiles[PASSES.index(pass_name)], options)
    raise ValueError(f"there is no attention tile for heads of {block_d} dimensions: 128 is the most")


@functools.cache
def cross_entropy_tile(n_cols, device_type):
    """(columns, warps) of the cross-entropy kernel for rows of n_cols."""
    most = CROSS_ENTROPY_BLOCK if n_cols <= 65536 else 2 * CROSS_ENTROPY_BLOCK
    cols = min(next_power_of_2(n_cols), most)
    warps = max(4, cols // (32 * CROSS_ENTROPY_PER_THREAD))
    return cols, warps // 2 if get_device(device_type).family == "amd" else warps


# ----------------------------------------------------------------------------------------------------------------------
# Several processes, one a device, as torchrun starts them. All that they say to each other goes through
# torch.distributed: weights and gradients over NCCL (RCCL on ROCm) or, on a CPU, gloo; what is to be agreed on, outside
# of what is timed, over gloo between the hosts.

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # the environment of its processes
STOP_SECONDS = 5  # how long a process that is told to stop waits for the others to do the same
VOTES_UNDER_WAY = 3  # steps until a request to stop is heeded by all
# Renamed in PyTorch 2.13; a PyTorch without torch.distributed has neither.
reduce_scatter = getattr(dist, "reduce_scatter_single", getattr(dist, "reduce_scatter_tensor", None))
all_gather = getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))


class World:
    """This process among those that train together; as it is made, the only one."""

    def __init__(self, rank=0, size=1, local_rank=0, store=None):
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self.store = store  # torchrun's, for a word of those that fail
        self.backend = None  # of weights and gradients: "nccl" or "gloo"
        self.control = None  # the group of what is said between the hosts
        self.timeout = 0  # seconds
        self.stop_requested = None  # when, by Ctrl-C or SIGTERM
        self.votes = collections.deque()
        self.waited_ms = 0.0  # of the host, for weights and gradients on a CPU

    def join(self, config, device):
        """Meets the others. UsageError if they cannot be met, or were given other flags."""
        if self.size == 1:
            return
        self.backend, self.timeout = "nccl" if device.type == "cuda" else "gloo", config.comm_timeout
        seconds, options = config.comm_timeout, {}
        if device.type == "cuda":
            # NCCL's kernels go first: everybody waits for them, and they leave most units free.
            options["pg_options"] = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options["device_id"] = torch.device("cuda", self.local_rank)
            seconds += 10  # its watchdog tells less, and comes after wait_for()
        try:
            dist.init_process_group(
                self.backend, store=self.store, rank=self.rank, world_size=self.size,
                timeout=timedelta(seconds=seconds), **options,
            )  # fmt: skip
            self.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.comm_timeout))
        except (RuntimeError, ValueError) as error:
            reason = f"over {self.backend}: {str(error).splitlines()[0]}"
            raise UsageError(f"the {self.size} processes do not find each other {reason}") from error
        first, *others = map(dataclasses.asdict, self.gather(config))
        for rank, flags in enumerate(others, 1):
            differing = [name for name in flags if flags[name] != first[name]]
            if differing:
                values = ", ".join(f"{flag_of(name)} {flags[name]} and not {first[name]}" for name in differing)
                raise UsageError(f"rank {rank} was given {values} as rank 0: start all with the same flags")

    def leave(self):
        """Ends what join() began, when all have done the same work."""
        if self.size > 1:
            self.gather(None)  # torchrun ends all when one ends: rank 0 must have written
            gc.collect()  # a communicator outlives the graphs that have captured it, or waits for their end
            dist.destroy_process_group()

    def abandon(self, exit_code):
        """Of several processes ends this one at once: to tear down, or free a graph that runs, waits for the others."""
        if self.size > 1:
            ask(sys.stdout.flush)
            os._exit(exit_code)
        return exit_code

    def gather(self, value):
        """[the value of each process], on all of them."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def mean(self, values):
        """The mean over the processes of a list of numbers, added in the order of their ranks."""
        return [statistics.fmean(column) for column in zip(*self.gather(values), strict=True)]

    def rows(self, batch_size):
        """Which rows of the batch of all processes are this one's, of batch_size."""
        return slice(self.rank * batch_size, (self.rank + 1) * batch_size)

    def wait(self, work):
        """Waits for a collective: on a GPU the stream does, on a CPU the host."""
        start = time.perf_counter()
        work.wait()
        self.waited_ms += (time.perf_counter() - start) * 1e3

    def wait_for(self, event):
        """Waits for an event of the GPU. UsageError if it does not come: what is captured, NCCL does not watch over."""
        start = time.monotonic()
        while not event.query():
            limit = self.timeout if self.stop_requested is None else min(self.timeout, STOP_SECONDS)
            if time.monotonic() - max(start, self.stop_requested or 0) > limit:
                raise UsageError(f"the GPU has waited {limit} s for another process: it has ended or does not answer")
            time.sleep(1e-5)

    def request_stop(self, number, frame):
        """A signal's handler. A second one ends at once, unless it is torchrun's, which repeats the first."""
        if self.stop_requested is not None and time.monotonic() - self.stop_requested > 2:
            self.abandon(130)
        self.stop_requested = self.stop_requested or time.monotonic()

    def all_stop(self):
        """Whether all stop before this step; asked before each, answered by a reduction that began some steps ago."""
        if self.size == 1:
            return False
        vote = torch.tensor(float(self.stop_requested is not None))
        self.votes.append((vote, dist.all_reduce(vote, group=self.control, async_op=True)))
        if len(self.votes) <= VOTES_UNDER_WAY:
            return False
        vote, work = self.votes.popleft()
        work.wait()
        return vote.item() > 0

    def stop_together(self):
        """Ctrl-C and SIGTERM reach processes in different steps: from now on they only ask for all to stop."""
        if self.size > 1:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.request_stop)


ALONE = World()
JOB = SimpleNamespace(world=ALONE)  # main() puts torchrun's here


def launched():
    """The World that torchrun's variables tell of, not joined yet. UsageError if they are incomplete."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return ALONE
    remedy = "start the processes with torchrun, or unset WORLD_SIZE for a single one"
    missing = [name for name in TORCHRUN if name not in os.environ]
    if missing:
        raise UsageError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']} in the environment without {missing[0]}: {remedy}")
    try:
        rank, local_rank, size = (int(os.environ[name]) for name in TORCHRUN[:3])
        store, rank, size = next(dist.rendezvous("env://", rank, size))
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"torchrun's environment leads nowhere ({str(error).splitlines()[0]}): {remedy}") from error
    if rank:
        sys.stdout = open(os.devnull, "w")
    return World(rank, size, local_rank, store)


# ----------------------------------------------------------------------------------------------------------------------
# Kernels. For each operation: forward kernel, backward kernel, launchers, autograd.Function, and the plain PyTorch
# reference that --impl torch and the tests use. Arithmetic is in fp32, results are rounded once, on the store. No float
# atomics and no locks: a gradient that many programs add to goes through partial sums and one reduction in a fixed
# order, so that it is bitwise the same in every run. A kernel's docstring gives the shapes of what its pointers point
# to; its types, unless stated, are those of the tensors, fp32, bf16 or fp16.

COMPILED = {}  # what launch() has compiled
COMPILED_LIMIT = 4096  # then it is emptied: Triton still has what it compiled
DIRECT_LAUNCH = SimpleNamespace(works=None)  # not tried yet


def launch(kernel, grid, tensors, scalars, constants, num_warps=4, num_stages=2, **options):
    """kernel[grid](*tensors, *scalars, **constants), at a fraction of the time on the host.

    Triton inspects every argument at every call: 20 to 60 us for kernels that run for 5. What a compiled kernel depends
    on is known here: scalars (tuples of them too), constants, types and alignment of the tensors, the order of the
    kernel's parameters. So a second launch does only what Triton does last. That is no public call: it is the same in
    Triton 3.3 to 3.9, and is tried before it is used.
    """
    pointers = [None if t is None else t.data_ptr() for t in tensors]  # as numbers: the driver need not look them up
    device, types = tensors[0].get_device(), [None if t is None else t.dtype for t in tensors]
    alignments = [p and p & 15 for p in pointers]
    # Triton's own hash of a kernel is slow.
    key = (
        id(kernel), device, scalars, *types, *alignments, *constants.values(), num_warps, num_stages, *options.values()
    )  # fmt: skip
    compiled = COMPILED.get(key)
    if compiled is None:
        options |= dict(num_warps=num_warps, num_stages=num_stages)
        compiled = recorded(kernel[grid], *tensors, *scalars, **constants, **options)
        remember(key, compiled)
        return
    driver = triton.runtime.driver.active
    recorded(
        compiled.run, *grid, *(1,) * (3 - len(grid)), driver.get_current_stream(driver.get_current_device()),
        compiled.function, compiled.packed_metadata, None, None, None,  # no launch hooks
        *pointers, *scalars, *constants.values(), needs=(compiled, tensors),
    )  # fmt: skip


def remember(key, compiled):
    """Keeps a compiled kernel for direct launches, if they work; None, of an interpreted kernel, is not kept."""
    if len(COMPILED) >= COMPILED_LIMIT:
        COMPILED.clear()
    if compiled is not None and DIRECT_LAUNCH.works is None:
        DIRECT_LAUNCH.works = True  # for the trial itself
        DIRECT_LAUNCH.works = try_direct_launch()
    COMPILED[key] = compiled if DIRECT_LAUNCH.works else None


def try_direct_launch():
    """Whether a second launch does the same as the first one, Triton's own. If not, that one is used for all."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return None  # not now: to compare would spoil the capture
    x = torch.ones(2, 8, device="cuda")
    factor = torch.full((), 3.0, device="cuda")
    try:
        for _ in range(2):
            launch(scale_kernel, (2,), (x, factor), (x.stride(), x.shape[1]), dict(BLOCK_SIZE=8))
        works = bool((x == 9.0).all())
    except (AttributeError, TypeError, RuntimeError, ValueError):
        works = False
    if not works:
        COMPILED.clear()
        print(f"Note: Triton {triton.__version__} launches kernels in a new way: each launch takes the host longer")
    return works


class Tapes:
    """What functions have launched, repeated on the same memory at a third of the time on the host.

    A CUDA graph takes none, but is captured for good: these follow the shapes, and leave Python between the functions.
    Only what goes through recorded() is repeated.
    """

    calls = None  # where recorded() puts what it is given, if it shall

    def __init__(self):
        self.key, self.tapes, self.user = None, {}, None

    def borrow(self, key):
        """A token to keep until the tapes may be used again, or None: a key is new, or somebody has them."""
        if self.user is not None and self.user() is not None:
            return None
        is_new, self.key = self.key != key, key
        if is_new:  # the first time compiles
            self.tapes = {}
            return None
        token = set()
        self.user = weakref.ref(token)
        return token

    def run(self, function, *inputs):
        """function(*inputs), in memory that the next run overwrites. Functions are told apart by their names."""
        name = function.func.__name__
        if name not in self.tapes:
            inputs, Tapes.calls = [tensor.clone() for tensor in inputs], []
            try:
                outputs = function(*inputs)
                self.tapes[name] = inputs, Tapes.calls, outputs
            finally:
                Tapes.calls = None
            return outputs
        places, calls, outputs = self.tapes[name]
        for place, tensor in zip(places, inputs, strict=True):
            place.copy_(tensor)
        for call, _ in calls:
            call()
        return outputs


def recorded(function, *args, needs=None, **kwargs):
    """function(*args, **kwargs), for Tapes to repeat. needs: what else must stay alive for that."""
    if Tapes.calls is not None:
        Tapes.calls.append((functools.partial(function, *args, **kwargs), needs))
    return function(*args, **kwargs)


def product(a, b, out=None):
    """a (rows, K) @ b (K, N) by the library, at out if given."""
    if Tapes.calls is not None and out is None:
        out = a.new_empty(a.shape[0], b.shape[1])
    return recorded(torch.mm, a, b, out=out)


def gradient_target(parameter):
    """(where a kernel puts the gradient of this parameter, whether it adds to what is there).

    The place is the optimizer's buffer, main_grad: after zero_grad() the first backward pass overwrites it, further
    ones add to it. Without such a buffer, or where .grad came by another way, it is a new tensor, which autograd adds
    to .grad.
    """
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        grad = parameter.grad
        if grad is None or grad is main_grad:
            return main_grad, grad is main_grad
    return parameter.new_empty(parameter.shape), False


def set_main_grad(parameter, gradient):
    """What a backward() returns for a parameter: the gradient, or None if it lies in main_grad, which becomes .grad."""
    if gradient is not getattr(parameter, "main_grad", None):
        return gradient
    parameter.grad = gradient
    return None


def new_stack(like, count, *shape, dtype=None):
    """count tensors of a shape beside each other, for stacked(); [None] for one, which may lie anywhere."""
    return list(like.new_empty(count, *shape, dtype=dtype).unbind()) if count > 1 else [None]


def stacked(tensors):
    """Tensors of one shape that lie evenly apart in one storage as one view (n, *shape); None if they do not."""
    first, places = tensors[0], [t.data_ptr() for t in tensors]
    step, storage = places[1] - places[0], first.untyped_storage()
    if step <= 0 or places != list(range(places[0], places[-1] + 1, step)):
        return None
    if places[-1] + first.nbytes > storage.data_ptr() + storage.nbytes():
        return None
    return first.as_strided((len(tensors), *first.shape), (step // first.element_size(), *first.stride()))


def parameter_gradients(compute, parameters, *inputs):
    """[the gradient as set_main_grad returns it] of parameters of one shape, from lists of as many inputs.

    compute(place, accumulate, *inputs) makes that of one, or all at once, each tensor with one more dimension in front:
    where they lie evenly apart. What is too small to fill a device alone is faster so.
    """
    places, accumulate = zip(*map(gradient_target, parameters), strict=True)
    at_once = [None]
    if len(parameters) > 1 and len(set(accumulate)) == 1:
        at_once = list(map(stacked, (places, *inputs)))
    if any(tensor is None for tensor in at_once):
        for arguments in zip(places, accumulate, *inputs, strict=True):
            compute(*arguments)
    else:
        compute(at_once[0], accumulate[0], *at_once[1:])
    return list(map(set_main_grad, parameters, places))


def weight_gradient(place, accumulate, out_grad, x):
    """place (N, K) (+)= out_grad (rows, N)^T @ x (rows, K), for parameter_gradients()."""
    if place.dim() == 3:
        torch.baddbmm(place, out_grad.mT, x, beta=int(accumulate), out=place)
    elif accumulate:
        place.addmm_(out_grad.t(), x)
    else:
        torch.mm(out_grad.t(), x, out=place)


def begin_backward(ctx, overwrites=False):
    """Refuses what our backward() would get wrong: a second derivative, a second run where it overwrites its inputs."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{ctx.name()} has no second derivative: call backward() without create_graph=True")
    if overwrites:
        if getattr(ctx, "is_spent", False):
            raise RuntimeError(f"{ctx.name()} overwrites what forward saved: it can run only once")
        ctx.is_spent = True


def apply(function, bugs, *inputs):
    """function.apply(*inputs), with a history for autograd."""
    if "severed_autograd" in bugs:  # BUG severed_autograd: without one, as from a kernel that no Function wraps
        with torch.no_grad():
            return function.apply(*inputs)
    return function.apply(*inputs)


# Kernels take the strides of activations, but read parameters and tables as they lie in memory.

KERNEL_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


def not_contiguous(**tensors):
    """The ValueError about the first that is strided."""
    name, tensor = next((name, tensor) for name, tensor in tensors.items() if not tensor.is_contiguous())
    return ValueError(
        f"{name} of shape {tuple(tensor.shape)} has the strides {tensor.stride()}, and the kernel reads it as "
        f"contiguous: give {name}.contiguous()"
    )


def require_dtype(name, tensor):
    """TypeError if the kernels do not take its type."""
    if tensor.dtype not in KERNEL_DTYPES:
        raise TypeError(f"{name} is {tensor.dtype}, and the kernels compute in fp32: give fp32, bf16 or fp16")


def require_shape(name, tensor, shape):
    """ValueError if it has another shape, TypeError if it has another type than the kernels take."""
    if tensor.shape != torch.Size(shape):
        raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, and {tuple(shape)} is needed")
    require_dtype(name, tensor)


def as_rows(x):
    """x (..., cols) as (rows, cols), copied only if its last dimension is strided or its rows are not evenly spaced."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


# --- linear: the library's matmul; the Function exists to put the weight's gradient where the optimizer reads it


class LinearFunction(torch.autograd.Function):
    """See triton_linear."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, y_grad):
        begin_backward(ctx)
        x, weight = ctx.saved_tensors
        y_grad = y_grad.reshape(-1, weight.shape[0])
        x_grad = (y_grad @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        x_rows = x.reshape(-1, weight.shape[1])
        return x_grad, *parameter_gradients(weight_gradient, [weight], [y_grad], [x_rows])


def triton_linear(x, weight):
    """x (..., K) @ weight (N, K)^T -> (..., N), in their type; errors are PyTorch's."""
    return LinearFunction.apply(x, weight)


# --- RMSNorm, with the addition to the residual stream before it fused in (Zhang and Sennrich, arXiv:1910.07467)


@jit
def rmsnorm_kernel(
    x_ptr, branch_ptr, weight_ptr, residual_ptr, y_ptr, rstd_ptr, stride_x_row, stride_branch_row, n_rows, eps,
    N_COLS: tl.constexpr, HAS_BRANCH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """residual = x + branch;  y = residual * rstd * weight,  rstd = 1 / sqrt(mean(residual^2) + eps).

    x, branch, residual, y (n_rows, N_COLS), weight (N_COLS,), rstd (n_rows,) in fp32.  Grid: (blocks of rows,).
    One program takes BLOCK_ROWS rows, BLOCK_SIZE columns at a time. A row longer than BLOCK_SIZE is read twice.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = rows < n_rows
    square_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    x = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], tl.float32)
    for start in range(0, N_COLS, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        mask = row_mask[:, None] & (cols < N_COLS)[None, :]
        x = tl.load(x_ptr + rows[:, None] * stride_x_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_BRANCH:
            branch = tl.load(branch_ptr + rows[:, None] * stride_branch_row + cols[None, :], mask=mask, other=0.0)
            residual = (x + branch.to(tl.float32)).to(residual_ptr.dtype.element_ty)
            tl.store(residual_ptr + rows[:, None] * N_COLS + cols[None, :], residual, mask=mask)
            x = residual.to(tl.float32)  # normalise what is stored: the backward pass will read that
        square_sum += tl.sum(x * x, axis=1)
    rstd = 1.0 / tl.sqrt(square_sum / N_COLS + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + rows, rstd, mask=row_mask)
    for start in range(0, N_COLS, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        mask = row_mask[:, None] & (cols < N_COLS)[None, :]
        if BLOCK_SIZE < N_COLS:  # otherwise the row is still in registers
            if HAS_BRANCH:
                x = tl.load(residual_ptr + rows[:, None] * N_COLS + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            else:
                x = tl.load(x_ptr + rows[:, None] * stride_x_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + cols, mask=cols < N_COLS, other=0.0).to(tl.float32)
        y = x * rstd[:, None] * weight[None, :]
        tl.store(y_ptr + rows[:, None] * N_COLS + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def rmsnorm_backward_kernel(
    y_grad_ptr, residual_grad_ptr, x_ptr, weight_ptr, rstd_ptr, x_grad_ptr, partial_ptr,
    stride_y_grad_row, stride_residual_grad_row, stride_x_row, n_rows,
    N_COLS: tl.constexpr, HAS_RESIDUAL_GRAD: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """With n = x * rstd and g = y_grad * weight:  x_grad = (g - n * mean(n * g)) * rstd + residual_grad.

    All (n_rows, N_COLS) but weight (N_COLS,), rstd (n_rows,) and partial (programs, N_COLS), the latter two in fp32.
    Each program walks over row tiles, num_programs apart, and leaves its sum of y_grad * n in its row of partial.
    """
    cols = tl.arange(0, BLOCK_SIZE)
    col_mask = cols < N_COLS
    weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
    weight_grad = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_ROWS), tl.num_programs(0)):
        rows = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        row_mask = rows < n_rows
        mask = row_mask[:, None] & col_mask[None, :]
        y_grad_ptrs = y_grad_ptr + rows[:, None] * stride_y_grad_row + cols[None, :]
        x = tl.load(x_ptr + rows[:, None] * stride_x_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        y_grad = tl.load(y_grad_ptrs, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)
        normalized = x * rstd[:, None]
        weight_grad += y_grad * normalized
        scaled_grad = y_grad * weight[None, :]
        mean = tl.sum(normalized * scaled_grad, axis=1) / N_COLS
        x_grad = (scaled_grad - normalized * mean[:, None]) * rstd[:, None]
        if HAS_RESIDUAL_GRAD:
            residual_grad_ptrs = residual_grad_ptr + rows[:, None] * stride_residual_grad_row + cols[None, :]
            x_grad += tl.load(residual_grad_ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(x_grad_ptr + rows[:, None] * N_COLS + cols[None, :], x_grad.to(x_grad_ptr.dtype.element_ty), mask=mask)
    tl.store(partial_ptr + tl.program_id(0) * N_COLS + cols, tl.sum(weight_grad, axis=0), mask=col_mask)


@jit
def column_sum_kernel(
    partial_ptr, sum_ptr, stride_sum, n_rows, n_cols,
    ACCUMULATE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """sum[n, c] (+)= partial[n, 0, c] + partial[n, 1, c] + ..., in an order that does not depend on timing.

    partial (sums, n_rows, n_cols) in fp32, sum (sums, n_cols).  Grid: (blocks of columns, sums).
    """
    partial_ptr += tl.program_id(1) * n_rows * n_cols
    sum_ptr += tl.program_id(1).to(tl.int64) * stride_sum
    cols = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for start in range(0, n_rows, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        total += tl.load(partial_ptr + rows[:, None] * n_cols + cols[None, :], mask=mask, other=0.0)
    sums = tl.sum(total, axis=0)
    if ACCUMULATE:
        sums += tl.load(sum_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    tl.store(sum_ptr + cols, sums.to(sum_ptr.dtype.element_ty), mask=cols < n_cols)


class RMSNormSaved(NamedTuple):
    """What the backward pass needs of the forward pass."""

    residual: torch.Tensor  # (rows, cols): what was normalised
    weight: torch.Tensor
    rstd: torch.Tensor  # (rows,) in fp32


def rmsnorm_forward(x, branch, weight, eps, block_size=None, y=None):
    """x, branch (rows, cols) with contiguous rows, weight (cols,) -> residual, y (rows, cols) and rstd (rows,) in fp32.

    Without branch the residual is x itself. block_size: columns at a time; by default the whole row. y: its place.
    """
    if not weight.is_contiguous():
        raise not_contiguous(weight=weight)
    n_rows, n_cols = x.shape
    tile = norm_tile(n_rows, n_cols, False, x.device.type, block_size)
    y = x.new_empty(n_rows, n_cols) if y is None else y  # given x.shape, thrice as slow
    rstd = x.new_empty(n_rows, dtype=torch.float32)
    has_branch = branch is not None
    residual = x.new_empty(n_rows, n_cols) if has_branch else x
    launch(
        rmsnorm_kernel, (tile.programs,), (x, branch if has_branch else x, weight, residual, y, rstd),
        (x.stride(0), branch.stride(0) if has_branch else 0, n_rows, eps),
        dict(N_COLS=n_cols, HAS_BRANCH=has_branch, BLOCK_ROWS=tile.rows, BLOCK_SIZE=tile.cols), num_warps=tile.warps,
    )  # fmt: skip
    return residual, y, rstd


def rmsnorm_input_gradient(y_grad, residual_grad, x, weight, rstd, x_grad=None, partial=None):
    """y_grad, residual_grad (or None), x = forward's residual, (rows, cols) with contiguous rows; rstd is forward's.

    Returns the gradient of x, residual_grad added in, and partial sums of that of weight, (programs, cols) in fp32;
    both at the places given, or in new tensors.
    """
    n_rows, n_cols = x.shape
    tile = norm_tile(n_rows, n_cols, True, x.device.type)
    x_grad = x.new_empty(n_rows, n_cols) if x_grad is None else x_grad
    partial = x.new_empty(tile.programs, n_cols, dtype=torch.float32) if partial is None else partial
    has_residual_grad = residual_grad is not None
    residual_grad = residual_grad if has_residual_grad else y_grad
    launch(
        rmsnorm_backward_kernel, (tile.programs,), (y_grad, residual_grad, x, weight, rstd, x_grad, partial),
        (y_grad.stride(0), residual_grad.stride(0), x.stride(0), n_rows),
        dict(N_COLS=n_cols, HAS_RESIDUAL_GRAD=has_residual_grad, BLOCK_ROWS=tile.rows, BLOCK_SIZE=tile.cols),
        num_warps=tile.warps,
    )  # fmt: skip
    return x_grad, partial


def rmsnorm_weight_gradient(place, accumulate, partial):
    """place (cols,) (+)= the sum of partial (programs, cols), for parameter_gradients()."""
    programs, n_cols = partial.shape[-2:]
    block_rows, block_cols, num_warps = COLUMN_SUM_TILE
    launch(
        column_sum_kernel, (cdiv(n_cols, block_cols), place.numel() // n_cols), (partial, place),
        (place.stride(0), programs, n_cols),
        dict(ACCUMULATE=accumulate, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols), num_warps=num_warps,
    )  # fmt: skip


def rmsnorm_backward(y_grad, residual_grad, x, weight, rstd):
    """The gradients of x and of weight, the latter as set_main_grad returns it: both of the above."""
    x_grad, partial = rmsnorm_input_gradient(y_grad, residual_grad, x, weight, rstd)
    return x_grad, *parameter_gradients(rmsnorm_weight_gradient, [weight], [partial])


class RMSNormFunction(torch.autograd.Function):
    """See triton_rmsnorm."""

    @staticmethod
    def forward(ctx, x, branch, weight, eps):
        ctx.has_branch = branch is not None
        residual, y, rstd = rmsnorm_forward(as_rows(x), as_rows(branch) if ctx.has_branch else None, weight, eps)
        ctx.save_for_backward(*RMSNormSaved(residual, weight, rstd))
        ctx.set_materialize_grads(False)  # an output that is not used, as the last norm's residual: None, not zeros
        return y.view_as(x), residual.view_as(x) if ctx.has_branch else x

    @staticmethod
    def backward(ctx, y_grad, residual_grad):
        begin_backward(ctx)
        if y_grad is None:  # only the residual was used
            return residual_grad, residual_grad if ctx.has_branch else None, None, None
        residual_rows = None if residual_grad is None else as_rows(residual_grad)
        x_grad, weight_grad = rmsnorm_backward(as_rows(y_grad), residual_rows, *ctx.saved_tensors)
        x_grad = x_grad.view_as(y_grad)
        # residual = x + branch: both receive the same gradient; eps receives none.
        return x_grad, x_grad if ctx.has_branch else None, weight_grad, None


def triton_rmsnorm(x, branch, weight, eps, bugs=()):
    """(y, residual) with residual = x + branch (or x, if branch is None) and y its RMSNorm, both shaped (..., cols).

    x and branch (..., cols), weight (cols,) contiguous, in fp32, bf16 or fp16; anything else raises ValueError or
    TypeError.
    """
    require_shape("x", x, x.shape)
    require_shape("weight", weight, x.shape[-1:])
    if branch is not None:
        require_shape("branch", branch, x.shape)
    return apply(RMSNormFunction, bugs, x, branch, weight, eps)


def torch_rmsnorm(x, branch, weight, eps):
    """As triton_rmsnorm, in PyTorch's operators."""
    residual = x if branch is None else x + branch
    y = residual * torch.rsqrt(residual.pow(2).mean(-1, keepdim=True) + eps) * weight
    return y, residual


# --- causal attention with grouped queries and rotary embedding (Dao, FlashAttention-2, arXiv:2307.08691)
#
# Tensors are (batch, seq, heads, head_dim), of any strides, which come as tuples. Names of the literature: q, k, v, o;
# m_i and l_i the running maximum and sum of a row's softmax; lse its log-sum-exp, in base 2 and of the scaled scores; p
# the probabilities, s_grad the gradient of the scores; delta = rowsum(o * o_grad). A tile's rows are BLOCK_M queries or
# BLOCK_N keys, its columns the BLOCK_D >= HEAD_DIM dimensions of a head. GROUP_SIZE query heads share one of k and v.


@jit
def program_index(AXIS: tl.constexpr, INT64: tl.constexpr):
    """tl.program_id, in 64 bits where offsets need them: so is every head and position that is derived from it."""
    index = tl.program_id(AXIS)
    if INT64:
        index = index.to(tl.int64)
    return index


@jit
def head_ptr(ptr, strides, batch, head, HEAD_ALIGNMENT: tl.constexpr):
    """Where the (seq, head_dim) matrix of one head begins; batch is in 64 bits."""
    batch_offset, head_offset = batch * strides[0], head * strides[2]
    if HEAD_ALIGNMENT > 1:
        head_offset = tl.multiple_of(head_offset, HEAD_ALIGNMENT)
    return ptr + (batch_offset + head_offset)


@jit
def head_columns(HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """(offset, mask) of a tile's columns: each rotary half of the head is padded to a power of two by itself."""
    cols = tl.arange(0, BLOCK_D)
    offsets = cols
    if HEAD_DIM != BLOCK_D:
        offsets = cols % (BLOCK_D // 2) + (cols // (BLOCK_D // 2)) * (HEAD_DIM // 2)
    return offsets, cols % (BLOCK_D // 2) < HEAD_DIM // 2


@jit
def load_tile(ptr, strides, rows, n_rows, EVEN: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """(rows, BLOCK_D) of the head at ptr; rows from n_rows on (if EVEN there are none) and padding columns are zero."""
    cols, col_mask = head_columns(HEAD_DIM, BLOCK_D)
    ptrs = ptr + rows[:, None] * strides[1] + cols.to(rows.dtype)[None, :] * strides[3]
    if not EVEN:
        tile = tl.load(ptrs, mask=(rows < n_rows)[:, None] & col_mask[None, :], other=0.0)
    elif HEAD_DIM != BLOCK_D:
        tile = tl.load(ptrs, mask=col_mask[None, :], other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@jit
def load_described(descriptor, batch, start, head, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """(ROWS, HEAD_DIM) from position start of a head on, zero beyond the end, fetched by the copy engine."""
    place = [batch.to(tl.int32), start.to(tl.int32), head.to(tl.int32), 0]
    return descriptor.load(place).reshape(ROWS, HEAD_DIM)


@jit
def store_tile(ptr, strides, tile, rows, n_rows, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The inverse of load_tile, rounding to the type that ptr points to."""
    cols, col_mask = head_columns(HEAD_DIM, BLOCK_D)
    ptrs = ptr + rows[:, None] * strides[1] + cols.to(rows.dtype)[None, :] * strides[3]
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=(rows < n_rows)[:, None] & col_mask[None, :])


@jit
def rotate_back(x, cos_ptr, sin_ptr, rows, n_rows, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The inverse of rope_kernel on x (ROWS, BLOCK_D), for the gradients of q and k before they are stored."""
    HALF: tl.constexpr = BLOCK_D // 2
    cols = tl.arange(0, HALF)
    mask = (rows < n_rows)[:, None] & (cols < HEAD_DIM // 2)[None, :]
    offsets = rows[:, None] * (HEAD_DIM // 2) + cols[None, :]
    cos = tl.load(cos_ptr + offsets, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + offsets, mask=mask, other=0.0)
    first, second = x.reshape(ROWS, 2, HALF).permute(0, 2, 1).split()  # (ROWS, HALF) each
    rotated = tl.join(first * cos + second * sin, second * cos - first * sin)
    return rotated.permute(0, 2, 1).reshape(ROWS, BLOCK_D)


@jit
def round_to_bf16(x):
    """x in fp32 as bf16, for AMD's GPUs before gfx950, which have no instruction for it.

    The compiler's own way takes five for a number, and with them a tile takes longer than its products. One addition to
    the bits, whose upper half is bf16, differs from it in ties alone: they go away from zero. What is no number remains
    so: if the hardware made it, or it was read in bf16, its lower bits are zero.
    """
    bits = x.to(tl.uint32, bitcast=True) + 0x8000
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@jit
def attend(
    acc, m_i, l_i, q, k_ptr, v_ptr, k_strides, v_strides, rows, begin, end, seq_len, qk_scale,
    ON_DIAGONAL: tl.constexpr, EVEN: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, ROUND_BY_HAND: tl.constexpr,
):  # fmt: skip
    """Online softmax of q (BLOCK_M, BLOCK_D) over the keys begin..end: a new maximum rescales what was summed before.

    acc (BLOCK_M, BLOCK_D), m_i and l_i (BLOCK_M,), in fp32, come in and go out.
    """
    for start in range(begin, end, BLOCK_N):
        keys = (start + tl.arange(0, BLOCK_N)).to(rows.dtype)
        k = load_tile(k_ptr, k_strides, keys, seq_len, EVEN or not ON_DIAGONAL, HEAD_DIM, BLOCK_D)
        # (BLOCK_M, BLOCK_D) x (BLOCK_D, BLOCK_N) -> (BLOCK_M, BLOCK_N)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if ON_DIAGONAL:
            qk = tl.where(keys[None, :] <= rows[:, None], qk, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(qk, axis=1) * qk_scale)
        p = tl.exp2(qk * qk_scale - m_new[:, None])
        rescale = tl.exp2(m_i - m_new)
        l_i = l_i * rescale + tl.sum(p, axis=1)
        v = load_tile(v_ptr, v_strides, keys, seq_len, EVEN or not ON_DIAGONAL, HEAD_DIM, BLOCK_D)
        rounded = (round_to_bf16(p) if ROUND_BY_HAND else p).to(v.dtype)
        # (BLOCK_M, BLOCK_N) x (BLOCK_N, BLOCK_D) -> (BLOCK_M, BLOCK_D)
        acc = tl.dot(rounded, v, acc * rescale[:, None], input_precision=PRECISION)
        m_i = m_new
    return acc, m_i, l_i


@jit
def flash_attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, q_strides, k_strides, v_strides, o_strides, num_heads, seq_len, qk_scale,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HEAD_ALIGNMENT: tl.constexpr, INT64: tl.constexpr, PRECISION: tl.constexpr,
    ROUND_BY_HAND: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """o = softmax(q k^T * scale) v under the causal mask.  EVEN: seq_len is a multiple of both blocks.

    q, o (batch, seq_len, num_heads, HEAD_DIM), k, v (batch, seq_len, num_heads / GROUP_SIZE, HEAD_DIM),
    lse (batch, num_heads, seq_len) in fp32; qk_scale = scale * log2(e), as exp2 is one instruction and exp is not.
    Grid: (batch * num_heads, blocks of queries).
    """
    batch_head = program_index(0, INT64)
    batch = (batch_head // num_heads).to(tl.int64)
    head = batch_head % num_heads
    block = tl.num_programs(1) - 1 - program_index(1, INT64)  # the last queries have the most keys: they start first
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    k_ptr = head_ptr(k_ptr, k_strides, batch, head // GROUP_SIZE, HEAD_ALIGNMENT)
    v_ptr = head_ptr(v_ptr, v_strides, batch, head // GROUP_SIZE, HEAD_ALIGNMENT)
    q = load_tile(
        head_ptr(q_ptr, q_strides, batch, head, HEAD_ALIGNMENT), q_strides, rows, seq_len, EVEN, HEAD_DIM, BLOCK_D
    )
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    diagonal = block * BLOCK_M // BLOCK_N * BLOCK_N  # keys before it are visible to every query of the block
    acc, m_i, l_i = attend(
        acc, m_i, l_i, q, k_ptr, v_ptr, k_strides, v_strides, rows,
        diagonal, tl.minimum((block + 1) * BLOCK_M, seq_len), seq_len, qk_scale,
        True, EVEN, HEAD_DIM, BLOCK_D, BLOCK_N, PRECISION, ROUND_BY_HAND,
    )  # fmt: skip
    acc, m_i, l_i = attend(
        acc, m_i, l_i, q, k_ptr, v_ptr, k_strides, v_strides, rows, 0, diagonal, seq_len, qk_scale,
        False, EVEN, HEAD_DIM, BLOCK_D, BLOCK_N, PRECISION, ROUND_BY_HAND,
    )  # fmt: skip
    o_ptr = head_ptr(o_ptr, o_strides, batch, head, HEAD_ALIGNMENT)
    store_tile(o_ptr, o_strides, acc / l_i[:, None], rows, seq_len, HEAD_DIM, BLOCK_D)
    tl.store(lse_ptr + (batch * num_heads + head) * seq_len + rows, m_i + tl.log2(l_i), mask=rows < seq_len)


@jit
def attend_backward_keys(
    q_grad, q, o_grad, lse, delta, k_ptr, v_ptr, k_strides, v_strides, batch, head_kv, rows, begin, end, seq_len,
    qk_scale, ON_DIAGONAL: tl.constexpr, EVEN: tl.constexpr, DESCRIBED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, ROUND_BY_HAND: tl.constexpr,
):  # fmt: skip
    """Adds to q_grad (BLOCK_M, BLOCK_D), in fp32 and not yet scaled, what the keys begin..end contribute."""
    for start in range(begin, end, BLOCK_N):
        keys = (start + tl.arange(0, BLOCK_N)).to(rows.dtype)
        if DESCRIBED:
            k = load_described(k_ptr, batch, start, head_kv, BLOCK_N, BLOCK_D)
            v = load_described(v_ptr, batch, start, head_kv, BLOCK_N, BLOCK_D)
        else:
            k = load_tile(k_ptr, k_strides, keys, seq_len, EVEN or not ON_DIAGONAL, HEAD_DIM, BLOCK_D)
            v = load_tile(v_ptr, v_strides, keys, seq_len, EVEN or not ON_DIAGONAL, HEAD_DIM, BLOCK_D)
        # both (BLOCK_M, BLOCK_D) x (BLOCK_D, BLOCK_N) -> (BLOCK_M, BLOCK_N)
        p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * qk_scale - lse[:, None])
        if ON_DIAGONAL:
            p = tl.where(keys[None, :] <= rows[:, None], p, 0.0)
        s_grad = p * (tl.dot(o_grad, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        # (BLOCK_M, BLOCK_N) x (BLOCK_N, BLOCK_D) -> (BLOCK_M, BLOCK_D)
        rounded = (round_to_bf16(s_grad) if ROUND_BY_HAND else s_grad).to(k.dtype)
        q_grad = tl.dot(rounded, k, q_grad, input_precision=PRECISION)
    return q_grad


@jit
def query_gradient(
    q_ptr, k_ptr, v_ptr, o_ptr, o_grad_ptr, lse_ptr, delta_ptr, q_grad_ptr, cos_ptr, sin_ptr,
    q_strides, k_strides, v_strides, o_strides, o_grad_strides, q_grad_strides,
    batch_head, block, num_heads, seq_len, scale, qk_scale,
    EVEN: tl.constexpr, STORE_DELTA: tl.constexpr, DESCRIBED: tl.constexpr, GROUP_SIZE: tl.constexpr,
    ROTARY: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr, ROUND_BY_HAND: tl.constexpr,
):  # fmt: skip
    """q_grad = s_grad k * scale of one block of queries, s_grad = p * (o_grad v^T - delta)."""
    batch = (batch_head // num_heads).to(tl.int64)
    head = batch_head % num_heads
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row_offsets = (batch * num_heads + head) * seq_len + rows
    head_kv = head // GROUP_SIZE
    if DESCRIBED:
        q = load_described(q_ptr, batch, block * BLOCK_M, head, BLOCK_M, BLOCK_D)
        o_grad = load_described(o_grad_ptr, batch, block * BLOCK_M, head, BLOCK_M, BLOCK_D)
    else:
        q_ptr = head_ptr(q_ptr, q_strides, batch, head, HEAD_ALIGNMENT)
        k_ptr = head_ptr(k_ptr, k_strides, batch, head_kv, HEAD_ALIGNMENT)
        v_ptr = head_ptr(v_ptr, v_strides, batch, head_kv, HEAD_ALIGNMENT)
        o_grad_ptr = head_ptr(o_grad_ptr, o_grad_strides, batch, head, HEAD_ALIGNMENT)
        q = load_tile(q_ptr, q_strides, rows, seq_len, EVEN, HEAD_DIM, BLOCK_D)
        o_grad = load_tile(o_grad_ptr, o_grad_strides, rows, seq_len, EVEN, HEAD_DIM, BLOCK_D)
    o_ptr = head_ptr(o_ptr, o_strides, batch, head, HEAD_ALIGNMENT)
    o = load_tile(o_ptr, o_strides, rows, seq_len, EVEN, HEAD_DIM, BLOCK_D)
    delta = tl.sum(o.to(tl.float32) * o_grad.to(tl.float32), axis=1)
    if STORE_DELTA:
        tl.store(delta_ptr + row_offsets, delta, mask=rows < seq_len)
    lse = tl.load(lse_ptr + row_offsets, mask=rows < seq_len, other=float("inf"))
    q_grad = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    diagonal = block * BLOCK_M // BLOCK_N * BLOCK_N
    q_grad = attend_backward_keys(
        q_grad, q, o_grad, lse, delta, k_ptr, v_ptr, k_strides, v_strides, batch, head_kv, rows,
        diagonal, tl.minimum((block + 1) * BLOCK_M, seq_len), seq_len, qk_scale,
        True, EVEN, DESCRIBED, HEAD_DIM, BLOCK_D, BLOCK_N, PRECISION, ROUND_BY_HAND,
    )  # fmt: skip
    q_grad = attend_backward_keys(
        q_grad, q, o_grad, lse, delta, k_ptr, v_ptr, k_strides, v_strides, batch, head_kv, rows,
        0, diagonal, seq_len, qk_scale,
        False, EVEN, DESCRIBED, HEAD_DIM, BLOCK_D, BLOCK_N, PRECISION, ROUND_BY_HAND,
    )  # fmt: skip
    q_grad *= scale
    if ROTARY:
        q_grad = rotate_back(q_grad, cos_ptr, sin_ptr, rows, seq_len, BLOCK_M, HEAD_DIM, BLOCK_D)
    q_grad_ptr = head_ptr(q_grad_ptr, q_grad_strides, batch, head, HEAD_ALIGNMENT)
    store_tile(q_grad_ptr, q_grad_strides, q_grad, rows, seq_len, HEAD_DIM, BLOCK_D)


@jit
def attend_backward_queries(
    k_grad, v_grad, k, v, q_ptr, o_ptr, o_grad_ptr, lse_ptr, delta_ptr, q_strides, o_strides, o_grad_strides,
    keys, begin, end, seq_len, qk_scale,
    ON_DIAGONAL: tl.constexpr, EVEN: tl.constexpr, LOAD_DELTA: tl.constexpr, INT64_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
    ROUND_BY_HAND: tl.constexpr,
):  # fmt: skip
    """Adds to k_grad and v_grad (BLOCK_N, BLOCK_D), in fp32, what the queries begin..end contribute.

    The tiles of scores are transposed: p^T and s_grad^T go into the next product straight from registers.
    """
    for start in range(begin, end, BLOCK_M):
        rows = (start + tl.arange(0, BLOCK_M)).to(keys.dtype)
        tile_rows = rows
        if INT64_ROWS:
            tile_rows = rows.to(tl.int64)
        q = load_tile(q_ptr, q_strides, tile_rows, seq_len, EVEN, HEAD_DIM, BLOCK_D)
        o_grad = load_tile(o_grad_ptr, o_grad_strides, tile_rows, seq_len, EVEN, HEAD_DIM, BLOCK_D)
        if EVEN:
            lse = tl.load(lse_ptr + rows)
        else:
            lse = tl.load(lse_ptr + rows, mask=rows < seq_len, other=float("inf"))  # p is zero in rows beyond the end
        if not LOAD_DELTA:
            o = load_tile(o_ptr, o_strides, rows, seq_len, EVEN, HEAD_DIM, BLOCK_D)
            delta = tl.sum(o.to(tl.float32) * o_grad.to(tl.float32), axis=1)
        elif EVEN:
            delta = tl.load(delta_ptr + rows)
        else:
            delta = tl.load(delta_ptr + rows, mask=rows < seq_len, other=0.0)
        # both (BLOCK_N, BLOCK_D) x (BLOCK_D, BLOCK_M) -> (BLOCK_N, BLOCK_M)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if q.dtype != tl.float32:  # right behind the first: both are under way when p is wanted
            p_grad = tl.dot(v, tl.trans(o_grad), input_precision=PRECISION)
        p = tl.exp2(s * qk_scale - lse[None, :])
        if ON_DIAGONAL:
            p = tl.where(keys[:, None] <= rows[None, :], p, 0.0)
        # (BLOCK_N, BLOCK_M) x (BLOCK_M, BLOCK_D) -> (BLOCK_N, BLOCK_D)
        rounded = (round_to_bf16(p) if ROUND_BY_HAND else p).to(o_grad.dtype)
        v_grad = tl.dot(rounded, o_grad, v_grad, input_precision=PRECISION)
        if q.dtype == tl.float32:  # not before: two tiles of scores at once would spill registers
            p_grad = tl.dot(v, tl.trans(o_grad), input_precision=PRECISION)
        s_grad = p * (p_grad - delta[None, :])
        rounded = (round_to_bf16(s_grad) if ROUND_BY_HAND else s_grad).to(q.dtype)
        k_grad = tl.dot(rounded, q, k_grad, input_precision=PRECISION)
    return k_grad, v_grad


@jit
def key_value_gradient(
    q_ptr, k_ptr, v_ptr, o_ptr, o_grad_ptr, lse_ptr, delta_ptr, k_grad_ptr, v_grad_ptr, cos_ptr, sin_ptr,
    q_strides, k_strides, v_strides, o_strides, o_grad_strides, k_grad_strides, v_grad_strides,
    batch_head, block, num_kv_heads, seq_len, scale, qk_scale,
    EVEN: tl.constexpr, LOAD_DELTA: tl.constexpr, INT64_ROWS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    ROTARY: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr, ROUND_BY_HAND: tl.constexpr,
):  # fmt: skip
    """v_grad = p^T o_grad and k_grad = s_grad^T q * scale of one block of keys, summed over the heads that share it."""
    batch = (batch_head // num_kv_heads).to(tl.int64)
    head_kv = batch_head % num_kv_heads
    keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k_ptr = head_ptr(k_ptr, k_strides, batch, head_kv, HEAD_ALIGNMENT)
    v_ptr = head_ptr(v_ptr, v_strides, batch, head_kv, HEAD_ALIGNMENT)
    k = load_tile(k_ptr, k_strides, keys, seq_len, EVEN, HEAD_DIM, BLOCK_D)
    v = load_tile(v_ptr, v_strides, keys, seq_len, EVEN, HEAD_DIM, BLOCK_D)
    k_grad = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    v_grad = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    begin = block * BLOCK_N // BLOCK_M * BLOCK_M  # queries before it see none of these keys
    end = tl.minimum(tl.cdiv((block + 1) * BLOCK_N, BLOCK_M) * BLOCK_M, seq_len)  # queries after it see them all
    for head in range(head_kv * GROUP_SIZE, (head_kv + 1) * GROUP_SIZE):
        head = tl.cast(head, head_kv.dtype)
        if HEAD_ALIGNMENT > 1:
            q_head_ptr = head_ptr(q_ptr, q_strides, batch, head, HEAD_ALIGNMENT)
            o_head_ptr = head_ptr(o_ptr, o_strides, batch, head, HEAD_ALIGNMENT)
            o_grad_head_ptr = head_ptr(o_grad_ptr, o_grad_strides, batch, head, HEAD_ALIGNMENT)
        else:
            q_head_ptr = q_ptr + batch * q_strides[0] + head * q_strides[2]  # the first sum is made once
            o_head_ptr = o_ptr + batch * o_strides[0] + head * o_strides[2]
            o_grad_head_ptr = o_grad_ptr + batch * o_grad_strides[0] + head * o_grad_strides[2]
        row_offset = (batch * num_kv_heads * GROUP_SIZE + head) * seq_len
        k_grad, v_grad = attend_backward_queries(
            k_grad, v_grad, k, v, q_head_ptr, o_head_ptr, o_grad_head_ptr, lse_ptr + row_offset, delta_ptr + row_offset,
            q_strides, o_strides, o_grad_strides, keys, begin, end, seq_len, qk_scale,
            True, EVEN, LOAD_DELTA, INT64_ROWS, HEAD_DIM, BLOCK_D, BLOCK_M, PRECISION, ROUND_BY_HAND,
        )  # fmt: skip
        k_grad, v_grad = attend_backward_queries(
            k_grad, v_grad, k, v, q_head_ptr, o_head_ptr, o_grad_head_ptr, lse_ptr + row_offset, delta_ptr + row_offset,
            q_strides, o_strides, o_grad_strides, keys, end, seq_len, seq_len, qk_scale,
            False, EVEN, LOAD_DELTA, INT64_ROWS, HEAD_DIM, BLOCK_D, BLOCK_M, PRECISION, ROUND_BY_HAND,
        )  # fmt: skip
    k_grad *= scale
    if ROTARY:
        k_grad = rotate_back(k_grad, cos_ptr, sin_ptr, keys, seq_len, BLOCK_N, HEAD_DIM, BLOCK_D)
    k_grad_ptr = head_ptr(k_grad_ptr, k_grad_strides, batch, head_kv, HEAD_ALIGNMENT)
    v_grad_ptr = head_ptr(v_grad_ptr, v_grad_strides, batch, head_kv, HEAD_ALIGNMENT)
    store_tile(k_grad_ptr, k_grad_strides, k_grad, keys, seq_len, HEAD_DIM, BLOCK_D)
    store_tile(v_grad_ptr, v_grad_strides, v_grad, keys, seq_len, HEAD_DIM, BLOCK_D)


@jit
def flash_attention_backward_dq_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, o_grad_ptr, lse_ptr, delta_ptr, q_grad_ptr, cos_ptr, sin_ptr,
    q_strides, k_strides, v_strides, o_strides, o_grad_strides, q_grad_strides, num_kv_heads, seq_len, scale, qk_scale,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HEAD_ALIGNMENT: tl.constexpr, INT64: tl.constexpr, PRECISION: tl.constexpr,
    ROUND_BY_HAND: tl.constexpr, EVEN: tl.constexpr, ROTARY: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """q_grad = s_grad k * scale, and delta for the kernel below.  EVEN as above.

    q, o, o_grad, q_grad (batch, seq_len, heads, HEAD_DIM), k, v (batch, seq_len, num_kv_heads, HEAD_DIM); in fp32
    forward's lse and delta (batch, heads, seq_len) and, read if ROTARY, cos, sin (seq_len, HEAD_DIM / 2). DESCRIBED: q,
    k, v and o_grad are descriptors of them, in blocks of (1, BLOCK_M or BLOCK_N, 1, HEAD_DIM).
    Grid: (batch * num_heads, blocks of queries), those with the most keys first.
    """
    query_gradient(
        q_ptr, k_ptr, v_ptr, o_ptr, o_grad_ptr, lse_ptr, delta_ptr, q_grad_ptr, cos_ptr, sin_ptr,
        q_strides, k_strides, v_strides, o_strides, o_grad_strides, q_grad_strides,
        program_index(0, INT64), tl.num_programs(1) - 1 - program_index(1, INT64), num_kv_heads * GROUP_SIZE,
        seq_len, scale, qk_scale, EVEN, True, DESCRIBED, GROUP_SIZE, ROTARY, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N,
        HEAD_ALIGNMENT, PRECISION, ROUND_BY_HAND,
    )  # fmt: skip


@jit
def flash_attention_backward_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, o_grad_ptr, lse_ptr, delta_ptr, k_grad_ptr, v_grad_ptr, cos_ptr, sin_ptr,
    q_strides, k_strides, v_strides, o_strides, o_grad_strides, k_grad_strides, v_grad_strides,
    num_kv_heads, seq_len, scale, qk_scale,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HEAD_ALIGNMENT: tl.constexpr, INT64: tl.constexpr, PRECISION: tl.constexpr,
    ROUND_BY_HAND: tl.constexpr, EVEN: tl.constexpr, ROTARY: tl.constexpr, Q_STRIDE: tl.constexpr,
    O_GRAD_STRIDE: tl.constexpr, INT64_ROWS: tl.constexpr,
):  # fmt: skip
    """k_grad = s_grad^T q * scale, v_grad = p^T o_grad.  EVEN as above.

    k_grad, v_grad (batch, seq_len, num_kv_heads, HEAD_DIM); q, k, v, o, o_grad, lse, delta, cos, sin as above.
    This kernel has no register to spare. So the strides from query to query are constants as well: the addresses of a
    tile are then one address plus constants. With INT64_ROWS the compiler may say so: sums of 32 bits might overflow.
    Grid: (batch * num_kv_heads, blocks of keys); the first keys have the most queries.
    """
    q_strides = (q_strides[0], Q_STRIDE, q_strides[2], q_strides[3])
    o_grad_strides = (o_grad_strides[0], O_GRAD_STRIDE, o_grad_strides[2], o_grad_strides[3])
    key_value_gradient(
        q_ptr, k_ptr, v_ptr, o_ptr, o_grad_ptr, lse_ptr, delta_ptr, k_grad_ptr, v_grad_ptr, cos_ptr, sin_ptr,
        q_strides, k_strides, v_strides, o_strides, o_grad_strides, k_grad_strides, v_grad_strides,
        program_index(0, INT64), program_index(1, INT64), num_kv_heads, seq_len, scale, qk_scale,
        EVEN, True, INT64_ROWS, GROUP_SIZE, ROTARY, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, HEAD_ALIGNMENT, PRECISION,
        ROUND_BY_HAND,
    )  # fmt: skip


@jit
def flash_attention_backward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, o_grad_ptr, lse_ptr, q_grad_ptr, k_grad_ptr, v_grad_ptr, cos_ptr, sin_ptr,
    q_strides, k_strides, v_strides, o_strides, o_grad_strides, q_grad_strides, k_grad_strides, v_grad_strides,
    batch_kv_heads, num_kv_heads, seq_len, scale, qk_scale,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HEAD_ALIGNMENT: tl.constexpr, INT64: tl.constexpr, PRECISION: tl.constexpr,
    ROUND_BY_HAND: tl.constexpr, EVEN: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Both of the above side by side in one launch, for sequences too short to fill the device; delta is made twice.

    q, k, v, o, o_grad, lse, cos, sin, q_grad, k_grad, v_grad as above.
    Grid: batch * num_kv_heads * (blocks of keys + GROUP_SIZE * blocks of queries).
    """
    pid = program_index(0, INT64)
    key_programs = batch_kv_heads * tl.cdiv(seq_len, BLOCK_N)
    if pid < key_programs:
        key_value_gradient(
            q_ptr, k_ptr, v_ptr, o_ptr, o_grad_ptr, lse_ptr, lse_ptr, k_grad_ptr, v_grad_ptr, cos_ptr, sin_ptr,
            q_strides, k_strides, v_strides, o_strides, o_grad_strides, k_grad_strides, v_grad_strides,
            pid % batch_kv_heads, pid // batch_kv_heads, num_kv_heads, seq_len, scale, qk_scale,
            EVEN, False, False, GROUP_SIZE, ROTARY, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, HEAD_ALIGNMENT, PRECISION,
            ROUND_BY_HAND,
        )  # fmt: skip
    else:
        pid -= key_programs
        batch_heads = batch_kv_heads * GROUP_SIZE
        query_gradient(
            q_ptr, k_ptr, v_ptr, o_ptr, o_grad_ptr, lse_ptr, lse_ptr, q_grad_ptr, cos_ptr, sin_ptr,
            q_strides, k_strides, v_strides, o_strides, o_grad_strides, q_grad_strides,
            pid % batch_heads, tl.cdiv(seq_len, BLOCK_M) - 1 - pid // batch_heads, num_kv_heads * GROUP_SIZE,
            seq_len, scale, qk_scale, EVEN, False, False, GROUP_SIZE, ROTARY, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N,
            HEAD_ALIGNMENT, PRECISION, ROUND_BY_HAND,
        )  # fmt: skip


@jit
def rope_kernel(
    x_ptr, cos_ptr, sin_ptr, stride_token, n_tokens, seq_len,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Rotary embedding in place: (first, second) = (first * cos - second * sin, second * cos + first * sin).

    x (n_tokens, heads * HEAD_DIM), a head being [first | second]; cos, sin (seq_len, HEAD_DIM / 2) in fp32.
    Grid: (blocks of tokens, heads).
    """
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    cols = tl.arange(0, BLOCK_D // 2)
    mask = (tokens < n_tokens)[:, None] & (cols < HEAD_DIM // 2)[None, :]
    angles = (tokens % seq_len)[:, None] * (HEAD_DIM // 2) + cols[None, :]
    cos = tl.load(cos_ptr + angles, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + angles, mask=mask, other=0.0)
    first_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * stride_token + tl.program_id(1) * HEAD_DIM + cols[None, :]
    second_ptrs = first_ptrs + HEAD_DIM // 2
    first = tl.load(first_ptrs, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(second_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(first_ptrs, (first * cos - second * sin).to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(second_ptrs, (second * cos + first * sin).to(x_ptr.dtype.element_ty), mask=mask)


FUSED_BACKWARD_SEQ_LEN = 128  # up to it the backward pass is one kernel: a second launch costs more than it saves


@functools.lru_cache(maxsize=256)
def attention_constants(pass_name, shape, num_kv_heads, strides, dtype, precision, device_type):
    """(AttentionTile, {constant of the kernel: value}) of a pass; shape is q's, strides are those of all tensors."""
    _, seq_len, num_heads, head_dim = shape
    block_d = max(16, next_power_of_2(head_dim))  # tl.dot takes no fewer than 16
    tile = attention_tile(pass_name, dtype.itemsize, block_d, precision, device_type)
    # Offsets within a sequence that exceed 32 bits.
    needs_int64 = any(s[1] * seq_len + s[2] * num_heads + s[3] * head_dim >= 2**31 for s in strides)
    # Of a stride the compiler sees whether it is a multiple of 16, and nothing between: heads of 40 would be loaded
    # element by element, each with a mask of its own, were it not told of the 8. 1: there is nothing to tell.
    alignment = math.gcd(16, *(s[2] for s in strides))
    constants = dict(
        GROUP_SIZE=num_heads // num_kv_heads, HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_M=tile.BLOCK_M,
        BLOCK_N=tile.BLOCK_N, HEAD_ALIGNMENT=1 if alignment == 16 else alignment, INT64=needs_int64,
        PRECISION=precision, ROUND_BY_HAND=dtype == torch.bfloat16 and get_device(device_type).lacks_bf16_rounding,
        EVEN=seq_len % max(tile.BLOCK_M, tile.BLOCK_N) == 0,
    )  # fmt: skip
    return tile, constants


def tensor_descriptors(q, k, v, o_grad):
    """TensorDescriptors of these (batch, seq, heads, head_dim) for the copy engine, in blocks of one head's positions.

    None where they gain nothing, and where the engine cannot address them: it wants addresses and strides that are
    multiples of 16 bytes, dimensions in the order of memory, and Triton 3.4.
    """
    head_dim, size = q.shape[3], q.element_size()
    tile = DESCRIBED_TILES.get((get_device(q.device.type).family, size, head_dim))
    if tile is None or TensorDescriptor is None:
        return None
    for x in (q, k, v, o_grad):
        *outer, last = x.stride()
        ordered = last == 1 and outer == sorted(outer, reverse=True)
        if not ordered or x.data_ptr() % 16 or any(stride == 0 or stride * size % 16 for stride in outer):
            return None
    block_m, block_n, *_ = tile
    rows = ((q, block_m), (k, block_n), (v, block_n), (o_grad, block_m))
    return [TensorDescriptor(x, [*x.shape], [*x.stride()], [1, block, 1, head_dim]) for x, block in rows]


def launch_described(kernel, grid, tensors, scalars, constants, **options):
    """As launch(), with descriptors among the tensors, which Triton writes anew at each launch."""
    recorded(kernel[grid], *tensors, *scalars, **constants, **options)


def launch_attention(kernel, pass_name, grid, tensors, strides, scalars, q, num_kv_heads, **constants):
    """Launches an attention kernel with the tile of a pass; grid(tile) are its programs."""
    precision = dot_precision(get_device(q.device.type)) if q.dtype == torch.float32 else "ieee"
    shape = q.shape
    tile, usual = attention_constants(pass_name, shape, num_kv_heads, strides, q.dtype, precision, q.device.type)
    (launch_described if pass_name == "described dq" else launch)(
        kernel, grid(tile), tensors, (*strides, *scalars), usual | constants,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **tile.options,
    )  # fmt: skip


def flash_attention_forward(q, k, v, o=None):
    """Causal attention of q (batch, seq, heads, head_dim) on k, v (batch, seq, kv_heads, head_dim), of any strides.

    Returns o, shaped as q and contiguous, at o if given, and lse (batch, heads, seq) in fp32.
    """
    batch, seq_len, num_heads, head_dim = q.shape
    o = q.new_empty(batch, seq_len, num_heads, head_dim) if o is None else o.view(q.shape)
    lse = q.new_empty(batch, num_heads, seq_len, dtype=torch.float32)
    qk_scale = head_dim**-0.5 * math.log2(math.e)
    launch_attention(
        flash_attention_kernel, "forward", lambda tile: (batch * num_heads, cdiv(seq_len, tile.BLOCK_M)),
        (q, k, v, o, lse), (q.stride(), k.stride(), v.stride(), o.stride()), (num_heads, seq_len, qk_scale),
        q, k.shape[2],
    )  # fmt: skip
    return o, lse


def flash_attention_backward(o_grad, q, k, v, o, lse, q_grad, k_grad, v_grad, cos=None, sin=None):
    """Fills q_grad, k_grad, v_grad, shaped as q, k, v (batch, seq, heads or kv_heads, head_dim) and of any strides.

    o_grad and o are shaped as q, lse (batch, heads, seq) is forward's. With cos and sin (seq, head_dim / 2), in fp32
    and contiguous, q and k are taken to be rotated by them, and their gradients are rotated back.
    """
    batch, seq_len, num_heads, head_dim = q.shape
    num_kv_heads, scale = k.shape[2], head_dim**-0.5
    if cos is not None:
        if not (cos.is_contiguous() and sin.is_contiguous()):
            raise not_contiguous(cos=cos, sin=sin)
    inputs = (q, k, v, o, o_grad, lse)
    strides = (q.stride(), k.stride(), v.stride(), o.stride(), o_grad.stride())
    scalars = (num_kv_heads, seq_len, scale, scale * math.log2(math.e))
    shared = dict(q=q, num_kv_heads=num_kv_heads, ROTARY=cos is not None)
    if seq_len <= FUSED_BACKWARD_SEQ_LEN:
        launch_attention(
            flash_attention_backward_kernel, "fused",
            lambda t: (batch * (num_kv_heads * cdiv(seq_len, t.BLOCK_N) + num_heads * cdiv(seq_len, t.BLOCK_M)),),
            (*inputs, q_grad, k_grad, v_grad, cos, sin),
            (*strides, q_grad.stride(), k_grad.stride(), v_grad.stride()),
            (batch * num_kv_heads, *scalars), **shared,
        )  # fmt: skip
        return
    delta = lse.new_empty(lse.shape)
    descriptors = tensor_descriptors(q, k, v, o_grad)
    loaded_q, loaded_k, loaded_v, loaded_o_grad = descriptors or (q, k, v, o_grad)
    launch_attention(
        flash_attention_backward_dq_kernel, "described dq" if descriptors else "dq",
        lambda t: (batch * num_heads, cdiv(seq_len, t.BLOCK_M)),
        (loaded_q, loaded_k, loaded_v, o, loaded_o_grad, lse, delta, q_grad, cos, sin), (*strides, q_grad.stride()),
        scalars, **shared, DESCRIBED=descriptors is not None,
    )  # fmt: skip
    launch_attention(
        flash_attention_backward_dkdv_kernel, "dkdv", lambda t: (batch * num_kv_heads, cdiv(seq_len, t.BLOCK_N)),
        (*inputs, delta, k_grad, v_grad, cos, sin), (*strides, k_grad.stride(), v_grad.stride()),
        scalars, **shared, Q_STRIDE=q.stride(1), O_GRAD_STRIDE=o_grad.stride(1),
        INT64_ROWS=get_device(q.device.type).family != "amd",  # its loads add offsets of 32 bits by themselves
    )  # fmt: skip


def rope_(qkv, num_rotated_heads, head_dim, cos, sin):
    """Rotates the first heads of qkv (batch, seq, width) in place by cos, sin (seq, head_dim / 2), all contiguous."""
    batch, seq_len, width = qkv.shape
    if not (qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()):
        raise not_contiguous(qkv=qkv, cos=cos, sin=sin)
    block_d = next_power_of_2(head_dim)
    block_tokens = max(1, ROPE_BLOCK // block_d)
    launch(
        rope_kernel, (cdiv(batch * seq_len, block_tokens), num_rotated_heads), (qkv, cos, sin),
        (width, batch * seq_len, seq_len), dict(HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_TOKENS=block_tokens),
    )  # fmt: skip


def split_heads(qkv, num_heads, num_kv_heads):
    """Views of (batch, seq, width): q (batch, seq, num_heads, head_dim) and k, v (batch, seq, kv_heads, head_dim)."""
    heads = qkv.view(*qkv.shape[:-1], num_heads + 2 * num_kv_heads, -1)
    return heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=2)


def badly_strided(x):
    """BUG noncontiguous_kv: the same (batch, seq, heads, head_dim), its head dimension in steps of batch * heads."""
    return x.permute(1, 3, 0, 2).contiguous().permute(2, 0, 3, 1)


class AttentionSaved(NamedTuple):
    """What the backward pass needs of the forward pass."""

    x: torch.Tensor  # (batch * seq, hidden)
    qkv_weight: torch.Tensor
    o_weight: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    q: torch.Tensor  # (batch, seq, heads, head_dim), rotated; k and v with kv_heads
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor  # as q
    lse: torch.Tensor  # (batch, heads, seq) in fp32


def attention_forward(x, seq_len, qkv_weight, o_weight, cos, sin, num_heads, num_kv_heads, bugs=(), o=None):
    """x (batch * seq_len, hidden) -> y (batch * seq_len, o_weight's rows) and AttentionSaved, whose o goes to o."""
    width = qkv_weight.shape[0]  # (heads + 2 kv_heads) * head_dim
    qkv = product(x, qkv_weight.t()).view(-1, seq_len, width)
    rope_(qkv, num_heads + num_kv_heads, width // (num_heads + 2 * num_kv_heads), cos, sin)
    q, k, v = split_heads(qkv, num_heads, num_kv_heads)
    if "noncontiguous_kv" in bugs:  # BUG noncontiguous_kv: right values, wrong layout
        k, v = badly_strided(k), badly_strided(v)
    o, lse = flash_attention_forward(q, k, v, o)
    y = product(o.view(x.shape[0], -1), o_weight.t())
    return y, AttentionSaved(x, qkv_weight, o_weight, cos, sin, q, k, v, o, lse)


def attention_input_gradient(y_grad, saved, qkv_grad=None):
    """y_grad (batch * seq, hidden) -> the gradients of x and of qkv = x @ qkv_weight^T, at qkv_grad if given."""
    _, qkv_weight, o_weight, cos, sin, q, k, v, o, lse = saved
    o_grad = product(y_grad, o_weight).view_as(o)
    qkv_grad = y_grad.new_empty(y_grad.shape[0], qkv_weight.shape[0]) if qkv_grad is None else qkv_grad
    q_grad, k_grad, v_grad = split_heads(qkv_grad.view(*o.shape[:2], -1), q.shape[2], k.shape[2])
    flash_attention_backward(o_grad, q, k, v, o, lse, q_grad, k_grad, v_grad, cos, sin)
    return product(qkv_grad, qkv_weight), qkv_grad


def attention_weight_gradients(layers, y_grads, qkv_grads):
    """Those of qkv_weight and of o_weight, as parameter_gradients() has them; layers is a list of AttentionSaved."""
    products = functools.partial(parameter_gradients, weight_gradient)
    return (
        products([layer.qkv_weight for layer in layers], qkv_grads, [layer.x for layer in layers]),
        products([layer.o_weight for layer in layers], y_grads, [layer.o.view(len(layer.x), -1) for layer in layers]),
    )


class AttentionFunction(torch.autograd.Function):
    """See triton_attention."""

    @staticmethod
    def forward(ctx, x, qkv_weight, o_weight, cos, sin, num_heads, num_kv_heads, bugs):
        weights = qkv_weight, o_weight
        y, saved = attention_forward(as_rows(x), x.shape[1], *weights, cos, sin, num_heads, num_kv_heads, bugs)
        ctx.save_for_backward(*saved)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, y_grad):
        begin_backward(ctx)
        y_grad_rows, saved = as_rows(y_grad), AttentionSaved(*ctx.saved_tensors)
        x_grad, qkv_grad = attention_input_gradient(y_grad_rows, saved)
        (qkv_weight_grad,), (o_weight_grad,) = attention_weight_gradients([saved], [y_grad_rows], [qkv_grad])
        # Tables, sizes and bugs are not learnt.
        return x_grad.view(*y_grad.shape[:-1], -1), qkv_weight_grad, o_weight_grad, *[None] * 5


def triton_attention(x, qkv_weight, o_weight, cos, sin, num_heads, num_kv_heads, bugs=()):
    """Causal attention with rotary embedding, its projections included: x (batch, seq, hidden) -> the same shape.

    qkv_weight ((heads + 2 kv_heads) * head_dim, hidden), o_weight (hidden, heads * head_dim), all of one type of fp32,
    bf16 or fp16; cos and sin (seq, head_dim / 2) in fp32. Other shapes and types raise ValueError or TypeError.
    """
    batch, seq_len, hidden = x.shape
    if seq_len != cos.shape[0]:
        raise ValueError(f"x has {seq_len} positions, the rotary tables have {cos.shape[0]}: slice the tables")
    require_shape("x", x, x.shape)
    require_shape("sin", sin, cos.shape)
    require_shape("qkv_weight", qkv_weight, ((num_heads + 2 * num_kv_heads) * 2 * cos.shape[1], hidden))
    require_shape("o_weight", o_weight, (o_weight.shape[0], num_heads * 2 * cos.shape[1]))
    return apply(AttentionFunction, bugs, x, qkv_weight, o_weight, cos, sin, num_heads, num_kv_heads, bugs)


def rope_tables(seq_len, head_dim, device):
    """cos, sin (seq_len, head_dim / 2) of the angles position * 10000^(-2i / head_dim), in fp32."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64, device=device), frequencies)
    return angles.cos().float(), angles.sin().float()


def torch_rope(x, cos, sin):
    """x (batch, seq, heads, head_dim): dimension i of the first half turns with dimension i of the second."""
    cos, sin = cos.to(x.dtype)[:, None, :], sin.to(x.dtype)[:, None, :]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def torch_attention(x, qkv_weight, o_weight, cos, sin, num_heads, num_kv_heads):
    """The same with K and V repeated for each query head and the (seq, seq) score matrix in memory."""
    q, k, v = split_heads(F.linear(x, qkv_weight), num_heads, num_kv_heads)
    q, k = torch_rope(q, cos, sin), torch_rope(k, cos, sin)
    k, v = (t.repeat_interleave(num_heads // num_kv_heads, dim=2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (batch, heads, seq, head_dim)
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    probabilities = F.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
    return F.linear((probabilities @ v).transpose(1, 2).flatten(2), o_weight)


def sdpa_attention(x, qkv_weight, o_weight, cos, sin, num_heads, num_kv_heads):
    """As triton_attention, by PyTorch's fused operator."""
    q, k, v = split_heads(F.linear(x, qkv_weight), num_heads, num_kv_heads)
    q, k, v = (t.transpose(1, 2) for t in (torch_rope(q, cos, sin), torch_rope(k, cos, sin), v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=num_heads != num_kv_heads)
    return F.linear(o.transpose(1, 2).flatten(2), o_weight)


# --- SwiGLU: (silu(x w_gate) * (x w_up)) w_down (Shazeer, arXiv:2002.05202). The library multiplies the matrices, one
# kernel does the rest.


@jit
def swiglu_activation_kernel(gate_up_ptr, hidden_ptr, n_cols, BLOCK_SIZE: tl.constexpr):
    """hidden = silu(gate) * up.

    gate_up (rows, 2 n_cols) = [gate | up], hidden (rows, n_cols).  Grid: (rows * blocks of columns,).
    """
    blocks = tl.cdiv(n_cols, BLOCK_SIZE)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    gate = tl.load(gate_up_ptr + row * 2 * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * n_cols + n_cols + cols, mask=mask, other=0.0).to(tl.float32)
    hidden = gate * tl.sigmoid(gate) * up
    tl.store(hidden_ptr + row * n_cols + cols, hidden.to(hidden_ptr.dtype.element_ty), mask=mask)


@jit
def swiglu_activation_backward_kernel(hidden_grad_ptr, gate_up_ptr, n_cols, BLOCK_SIZE: tl.constexpr):
    """gate_up (rows, 2 n_cols) = [gate_grad | up_grad], in place; hidden_grad (rows, n_cols).  Grid: as forward."""
    blocks = tl.cdiv(n_cols, BLOCK_SIZE)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    gate_ptrs = gate_up_ptr + row * 2 * n_cols + cols
    up_ptrs = gate_ptrs + n_cols
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptrs, mask=mask, other=0.0).to(tl.float32)
    hidden_grad = tl.load(hidden_grad_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    gate_grad = hidden_grad * up * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(gate_ptrs, gate_grad.to(gate_up_ptr.dtype.element_ty), mask=mask)
    tl.store(up_ptrs, (hidden_grad * silu).to(gate_up_ptr.dtype.element_ty), mask=mask)


@jit
def swiglu_kernel(x_ptr, weight_ptr, gate_up_ptr, hidden_ptr, K, n_cols, BLOCK_SIZE: tl.constexpr):
    """BUG triton_matmul_swiglu: one element of hidden a program, two dot products of length K by hand.

    x (rows, K), weight (2 n_cols, K) = [w_gate | w_up], gate_up (rows, 2 n_cols), hidden (rows, n_cols).
    Grid: (rows * n_cols,).
    """
    row = (tl.program_id(0) // n_cols).to(tl.int64)
    col = (tl.program_id(0) % n_cols).to(tl.int64)
    gate = 0.0
    up = 0.0
    for start in range(0, K, BLOCK_SIZE):
        inner = start + tl.arange(0, BLOCK_SIZE)
        mask = inner < K
        x = tl.load(x_ptr + row * K + inner, mask=mask, other=0.0).to(tl.float32)
        gate += tl.sum(x * tl.load(weight_ptr + col * K + inner, mask=mask, other=0.0).to(tl.float32))
        up += tl.sum(x * tl.load(weight_ptr + (n_cols + col) * K + inner, mask=mask, other=0.0).to(tl.float32))
    tl.store(gate_up_ptr + row * 2 * n_cols + col, gate.to(gate_up_ptr.dtype.element_ty))
    tl.store(gate_up_ptr + row * 2 * n_cols + n_cols + col, up.to(gate_up_ptr.dtype.element_ty))
    tl.store(hidden_ptr + row * n_cols + col, (gate * tl.sigmoid(gate) * up).to(hidden_ptr.dtype.element_ty))


class SwiGLUSaved(NamedTuple):
    """What the backward pass needs of the forward pass."""

    x: torch.Tensor  # (rows, hidden)
    gate_up_weight: torch.Tensor
    down_weight: torch.Tensor
    gate_up: torch.Tensor  # (rows, 2 ffn)
    hidden: torch.Tensor  # (rows, ffn)


def swiglu_activation(gate_up, hidden=None):
    """gate_up (rows, 2 n), contiguous -> silu(gate) * up (rows, n), at hidden if given"""
    if not gate_up.is_contiguous():
        raise not_contiguous(gate_up=gate_up)
    n_rows, n_cols = gate_up.shape[0], gate_up.shape[1] // 2
    hidden = gate_up.new_empty(n_rows, n_cols) if hidden is None else hidden
    grid = (n_rows * cdiv(n_cols, SWIGLU_BLOCK),)
    launch(swiglu_activation_kernel, grid, (gate_up, hidden), (n_cols,), dict(BLOCK_SIZE=SWIGLU_BLOCK))
    return hidden


def swiglu_activation_backward_(hidden_grad, gate_up):
    """Overwrites gate_up (rows, 2 n) by its gradient; hidden_grad (rows, n); both contiguous."""
    if not (hidden_grad.is_contiguous() and gate_up.is_contiguous()):
        raise not_contiguous(hidden_grad=hidden_grad, gate_up=gate_up)
    n_rows, n_cols = hidden_grad.shape
    grid = (n_rows * cdiv(n_cols, SWIGLU_BLOCK),)
    launch(swiglu_activation_backward_kernel, grid, (hidden_grad, gate_up), (n_cols,), dict(BLOCK_SIZE=SWIGLU_BLOCK))


def swiglu_naive_matmul(x, gate_up_weight):
    """x (rows, hidden), gate_up_weight (2 n, hidden) -> gate_up (rows, 2 n) and silu(gate) * up (rows, n)"""
    if not (x.is_contiguous() and gate_up_weight.is_contiguous()):
        raise not_contiguous(x=x, gate_up_weight=gate_up_weight)
    n_rows, n_cols = x.shape[0], gate_up_weight.shape[0] // 2
    gate_up, hidden = x.new_empty(n_rows, 2 * n_cols), x.new_empty(n_rows, n_cols)
    tensors = (x, gate_up_weight, gate_up, hidden)
    launch(swiglu_kernel, (n_rows * n_cols,), tensors, (x.shape[1], n_cols), dict(BLOCK_SIZE=NAIVE_SWIGLU_BLOCK))
    return gate_up, hidden


def swiglu_forward(x, gate_up_weight, down_weight, bugs=(), gate_up=None, hidden=None):
    """x (rows, hidden) -> y (rows, hidden) and SwiGLUSaved, whose gate_up and hidden go where they are given."""
    if "triton_matmul_swiglu" in bugs:  # BUG triton_matmul_swiglu: right values, by hand what the library does well
        gate_up, hidden = swiglu_naive_matmul(x, gate_up_weight)
    else:
        gate_up = product(x, gate_up_weight.t(), gate_up)
        hidden = swiglu_activation(gate_up, hidden)
    return product(hidden, down_weight.t()), SwiGLUSaved(x, gate_up_weight, down_weight, gate_up, hidden)


def swiglu_input_gradient(y_grad, saved):
    """y_grad (rows, hidden) -> the gradient of x; saved.gate_up is overwritten by its own."""
    swiglu_activation_backward_(product(y_grad, saved.down_weight), saved.gate_up)
    return product(saved.gate_up, saved.gate_up_weight)


def swiglu_weight_gradients(layers, y_grads):
    """Thereafter those of gate_up_weight and of down_weight, as above; layers is a list of SwiGLUSaved."""
    products = functools.partial(parameter_gradients, weight_gradient)
    gate_up_grads = [layer.gate_up for layer in layers]
    return (
        products([layer.gate_up_weight for layer in layers], gate_up_grads, [layer.x for layer in layers]),
        products([layer.down_weight for layer in layers], y_grads, [layer.hidden for layer in layers]),
    )


class SwiGLUFunction(torch.autograd.Function):
    """See triton_swiglu."""

    @staticmethod
    def forward(ctx, x, gate_up_weight, down_weight, bugs):
        y, saved = swiglu_forward(x.reshape(-1, x.shape[-1]).contiguous(), gate_up_weight, down_weight, bugs)
        ctx.save_for_backward(*saved)
        return y.view_as(x)

    @staticmethod
    def backward(ctx, y_grad):
        begin_backward(ctx, overwrites=True)
        y_grad_rows, saved = as_rows(y_grad), SwiGLUSaved(*ctx.saved_tensors)
        x_grad = swiglu_input_gradient(y_grad_rows, saved)
        (gate_up_weight_grad,), (down_weight_grad,) = swiglu_weight_gradients([saved], [y_grad_rows])
        return x_grad.view_as(y_grad), gate_up_weight_grad, down_weight_grad, None


def triton_swiglu(x, gate_up_weight, down_weight, bugs=()):
    """x (..., hidden), gate_up_weight (2 ffn, hidden), down_weight (hidden, ffn) -> (..., hidden)

    All of one type of fp32, bf16 or fp16. Other shapes and types raise ValueError or TypeError.
    """
    require_shape("x", x, x.shape)
    require_shape("gate_up_weight", gate_up_weight, (2 * down_weight.shape[1], x.shape[-1]))
    require_shape("down_weight", down_weight, (x.shape[-1], down_weight.shape[1]))
    return SwiGLUFunction.apply(x, gate_up_weight, down_weight, bugs)


def torch_swiglu(x, gate_up_weight, down_weight):
    """As triton_swiglu, in PyTorch's operators."""
    gate, up = F.linear(x, gate_up_weight).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down_weight)


# --- transformer blocks: the pieces above, of one layer or of several, in one Function. Autograd spends 30 to 40 us on
# the host for each Function and direction, more than most kernels of a small model run; and the weight gradients of a
# kind are one product for all these layers, those of the norms one reduction.


class BlockSaved(NamedTuple):
    """What the backward pass of a layer needs of the forward pass."""

    norm1: RMSNormSaved
    attention: AttentionSaved
    norm2: RMSNormSaved
    swiglu: SwiGLUSaved


def blocks_forward(layers, seq_len, tables, sizes, bugs, layer_range, residual, y=None):
    """residual and y (batch * seq_len, hidden), layers a list of six weights each -> the same pair and [BlockSaved]."""
    saved, (_, _, o, _, gate_up, down) = [], layers[0]
    # What the weights of a kind multiply lies side by side; gate_up too, which will be overwritten by its gradient.
    widths = residual.shape[1], o.shape[1], residual.shape[1], gate_up.shape[0], down.shape[1]
    stacks = [new_stack(residual, len(layers), len(residual), width) for width in widths]
    for index, (norm1, qkv, o, norm2, gate_up, down) in enumerate(layers):
        x1, attended, x2, *activations = (stack[index] for stack in stacks)
        with layer_range(index, "forward"):
            residual1, x, rstd1 = rmsnorm_forward(residual, y, norm1, sizes.eps, y=x1)
            y, attention = attention_forward(x, seq_len, qkv, o, *tables, *sizes.heads, bugs, attended)
            residual, x, rstd2 = rmsnorm_forward(residual1, y, norm2, sizes.eps, y=x2)
            y, swiglu = swiglu_forward(x, gate_up, down, bugs, *activations)
        norms = RMSNormSaved(residual1, norm1, rstd1), RMSNormSaved(residual, norm2, rstd2)
        saved.append(BlockSaved(norms[0], attention, norms[1], swiglu))
    return residual, y, saved


def blocks_input_gradient(layers, layer_range, grad, y_grad):
    """Gradients of residual and y, layers is [BlockSaved] -> that of both inputs, and what those of the weights take.

    These are lists of the norms' partial sums and of the gradients of attention's qkv and y, and of SwiGLU's y.
    """
    count, (rows, hidden) = len(layers), y_grad.shape
    qkv_width, programs = len(layers[0].attention.qkv_weight), norm_tile(rows, hidden, True, grad.device.type).programs
    y_grads, branch_grads, qkv_grads = (new_stack(grad, count, rows, width) for width in (hidden, hidden, qkv_width))
    partials1, partials2 = (new_stack(grad, count, programs, hidden, dtype=torch.float32) for _ in range(2))
    y_grads[-1] = y_grad if count == 1 else recorded(y_grads[-1].copy_, y_grad)
    for index, (norm1, attention, norm2, swiglu) in reversed(list(enumerate(layers))):
        with layer_range(index, "backward"):
            x_grad = swiglu_input_gradient(y_grads[index], swiglu)
            branch_grads[index], partials2[index] = rmsnorm_input_gradient(
                x_grad, grad, *norm2, branch_grads[index], partials2[index]
            )
            x_grad, qkv_grads[index] = attention_input_gradient(branch_grads[index], attention, qkv_grads[index])
            grad, partials1[index] = rmsnorm_input_gradient(
                x_grad, branch_grads[index], *norm1, y_grads[index - 1] if index else None, partials1[index]
            )
    return grad, partials1, partials2, qkv_grads, branch_grads, y_grads


def blocks_weight_gradients(layers, partials1, partials2, qkv_grads, branch_grads, y_grads):
    """[the gradients of norm1, qkv, o, norm2, gate_up, down as set_main_grad returns them] of [BlockSaved]."""
    norms1, attentions, norms2, swiglus = zip(*layers, strict=True)
    return zip(
        parameter_gradients(rmsnorm_weight_gradient, [norm.weight for norm in norms1], partials1),
        *attention_weight_gradients(attentions, branch_grads, qkv_grads),
        parameter_gradients(rmsnorm_weight_gradient, [norm.weight for norm in norms2], partials2),
        *swiglu_weight_gradients(swiglus, y_grads),
        strict=True,
    )


class BlockFunction(torch.autograd.Function):
    """See triton_blocks. TransformerBlock.forward tells the same story with a Function for each operation."""

    @staticmethod
    def forward(ctx, residual, branch, tables, sizes, bugs, layer_range, tapes, hidden_weights, *weights):
        shape, ctx.has_branch, ctx.layer_range = residual.shape, branch is not None, layer_range
        ctx.hides_weights, ctx.weights = not weights, weights or hidden_weights
        weights = ctx.weights
        layers = [weights[start : start + 6] for start in range(0, len(weights), 6)]
        forward = functools.partial(blocks_forward, layers, shape[1], tables, sizes, bugs, layer_range)
        inputs = [as_rows(tensor) for tensor in (residual, branch) if tensor is not None]
        ctx.tapes, ctx.token = tapes, None
        if tapes:
            stream = torch.cuda.current_stream() if residual.is_cuda else None
            pointers = [tensor.data_ptr() for tensor in (*weights, *tables)]
            ctx.token = tapes.borrow((shape, ctx.has_branch, residual.dtype, stream, *pointers))
        if ctx.token is None:
            residual, y, layers = forward(*inputs)
            ctx.save_for_backward(*(tensor for layer in layers for part in layer for tensor in part))
        else:
            residual, y, ctx.layers = tapes.run(forward, *inputs)
        return residual.view(shape), y.view(shape)

    @staticmethod
    def backward(ctx, residual_grad, y_grad):
        begin_backward(ctx, overwrites=True)
        # Read once: each reading would recompute them under torch.utils.checkpoint.
        layers = regroup(ctx.saved_tensors) if ctx.token is None else ctx.layers
        backward = functools.partial(blocks_input_gradient, layers, ctx.layer_range)
        inputs = as_rows(residual_grad), as_rows(y_grad)
        grad, *gradients = backward(*inputs) if ctx.token is None else ctx.tapes.run(backward, *inputs)
        weight_grads = list(itertools.chain(*blocks_weight_gradients(layers, *gradients)))
        ctx.token = ctx.layers = None
        if ctx.hides_weights:
            for weight, gradient in zip(ctx.weights, weight_grads, strict=True):
                if gradient is not None:  # as autograd would
                    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
            weight_grads = ()
        grad = grad.view(y_grad.shape)
        return grad, grad if ctx.has_branch else None, *[None] * 6, *weight_grads


def regroup(tensors):
    """[BlockSaved] of all their tensors in a row."""
    parts = BlockSaved.__annotations__.values()
    count, tensors = len(tensors) // sum(len(part._fields) for part in parts), iter(tensors)
    return [BlockSaved(*(part(*itertools.islice(tensors, len(part._fields))) for part in parts)) for _ in range(count)]


class BlockSizes(NamedTuple):
    """What all layers have in common."""

    eps: float
    heads: tuple  # of queries, of keys and values


def no_range(index, direction):
    """The range of a layer for which nobody has asked."""
    return contextlib.nullcontext()


def triton_blocks(residual, branch, layers, cos, sin, sizes, bugs=(), layer_range=no_range, tapes=None):
    """TransformerBlock.forward of consecutive layers in one Function; of each its norm1, qkv, o, norm2, gate_up, down.

    residual and branch (or None) (batch, seq, hidden) -> the same pair, these layers on; types and errors as of the
    parts. layer_range(index, "forward" or "backward") is a context around the launches of a layer. With Tapes, for
    these layers alone, the launches are repeated, without ranges.
    """
    require_dtype("residual", residual)
    weights, hidden_weights = tuple(itertools.chain(*layers)), ()
    # Weights whose gradients go to the optimizer's buffer are hidden from autograd: each costs it 4 us.
    if residual.requires_grad and all(hasattr(weight, "main_grad") for weight in weights):
        weights, hidden_weights = (), weights
    tapes = None if bugs or weights else tapes
    return BlockFunction.apply(
        residual, branch, (cos, sin), sizes, bugs, layer_range, tapes, hidden_weights, *weights
    )  # fmt: skip


# --- cross-entropy: loss and gradient in one pass over the logits


@jit
def cross_entropy_kernel(
    logits_ptr, targets_ptr, loss_ptr, stride_row, gradient_scale, N_COLS: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """loss = logsumexp(logits) - logits[target]; logits = (softmax(logits) - onehot(target)) * gradient_scale.

    logits (rows, N_COLS), targets (rows,) of integers, loss (rows,) in fp32.  Grid: (rows,).
    A row that fits in BLOCK_SIZE is read once and stays in registers; a longer one is read again, its end first, which
    is still in the cache. A target outside 0..N_COLS-1 gives a NaN loss and a NaN gradient.
    """
    LANES: tl.constexpr = 8  # neighbours that share a running maximum: one rescaling for 8 exponentials
    row_ptr = logits_ptr + tl.program_id(0).to(tl.int64) * stride_row
    scale = tl.cast(gradient_scale, tl.float32)
    target = tl.load(targets_ptr + tl.program_id(0))
    in_range = (target >= 0) & (target < N_COLS)
    scale = tl.where(in_range, scale, float("nan"))
    target_logit = tl.load(row_ptr + target, mask=in_range, other=float("nan")).to(tl.float32)
    if BLOCK_SIZE >= N_COLS:
        cols = tl.arange(0, BLOCK_SIZE)
        logits = tl.load(row_ptr + cols, mask=cols < N_COLS, other=float("-inf")).to(tl.float32)
        maximum = tl.max(logits, axis=0)
        exponentials = tl.exp2((logits - maximum) * LOG2_E)
        total = tl.sum(exponentials, axis=0)
        gradient = (exponentials / total - tl.where(cols == target, 1.0, 0.0)) * scale  # in fp32: p - 1 cancels in bf16
        tl.store(row_ptr + cols, gradient.to(logits_ptr.dtype.element_ty), mask=cols < N_COLS)
    else:
        maxima = tl.full([BLOCK_SIZE // LANES], float("-inf"), tl.float32)
        totals = tl.zeros([BLOCK_SIZE // LANES], tl.float32)
        for start in range(0, N_COLS, BLOCK_SIZE):
            cols = start + tl.arange(0, BLOCK_SIZE)
            logits = tl.load(row_ptr + cols, mask=cols < N_COLS, other=float("-inf")).to(tl.float32)
            logits = logits.reshape(BLOCK_SIZE // LANES, LANES)
            new_maxima = tl.maximum(maxima, tl.max(logits, axis=1))
            shift = tl.where(new_maxima == float("-inf"), 0.0, new_maxima)
            exponentials = tl.exp2((logits - shift[:, None]) * LOG2_E)
            totals = totals * tl.exp2((maxima - shift) * LOG2_E) + tl.sum(exponentials, axis=1)
            maxima = new_maxima
        maximum = tl.max(maxima, axis=0)
        total = tl.sum(totals * tl.exp2((maxima - maximum) * LOG2_E), axis=0)
        inverse_total = 1.0 / total
        LAST_START: tl.constexpr = (N_COLS - 1) // BLOCK_SIZE * BLOCK_SIZE
        for start in range(0, N_COLS, BLOCK_SIZE):
            cols = LAST_START - start + tl.arange(0, BLOCK_SIZE)
            mask = cols < N_COLS
            # Nobody reads these again soon: they shall not push out what this loop has yet to read.
            logits = tl.load(row_ptr + cols, mask=mask, other=float("-inf"), eviction_policy="evict_first")
            # exp(logits - log_sum) would be shorter, and take over the rounding of a large log_sum.
            probabilities = tl.exp2((logits.to(tl.float32) - maximum) * LOG2_E) * inverse_total
            gradient = (probabilities - tl.where(cols == target, 1.0, 0.0)) * scale
            gradient = gradient.to(logits_ptr.dtype.element_ty)
            tl.store(row_ptr + cols, gradient, mask=mask, eviction_policy="evict_first")
    tl.store(loss_ptr + tl.program_id(0), maximum - target_logit + tl.log2(total) / LOG2_E)


@jit
def scale_kernel(x_ptr, factor_ptr, x_strides, n_cols, BLOCK_SIZE: tl.constexpr):
    """x *= factor, decided on the device: the usual factor 1 costs no traffic, and the host need not know it.

    x (rows, n_cols), contiguous rows, factor () in fp32.  Grid: (rows * blocks of columns,).
    """
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        blocks = tl.cdiv(n_cols, BLOCK_SIZE)
        cols = tl.program_id(0) % blocks * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        ptrs = x_ptr + (tl.program_id(0) // blocks).to(tl.int64) * x_strides[0] + cols
        x = tl.load(ptrs, mask=cols < n_cols, other=0.0).to(tl.float32)
        tl.store(ptrs, (x * factor).to(x_ptr.dtype.element_ty), mask=cols < n_cols)


def cross_entropy_(logits, targets, gradient_scale):
    """Losses (rows,) in fp32 of logits (rows, n), contiguous rows apart from each other, and targets (rows,).

    The logits are overwritten by their gradient.
    """
    if not targets.is_contiguous():
        raise not_contiguous(targets=targets)
    n_rows, n_cols = logits.shape
    losses = logits.new_empty(n_rows, dtype=torch.float32)
    block_size, warps = cross_entropy_tile(n_cols, logits.device.type)
    launch(
        cross_entropy_kernel, (n_rows,), (logits, targets, losses), (logits.stride(0), gradient_scale),
        dict(N_COLS=n_cols, BLOCK_SIZE=block_size), num_warps=warps,
    )  # fmt: skip
    return losses


class CrossEntropyFunction(torch.autograd.Function):
    """See triton_cross_entropy."""

    @staticmethod
    def forward(ctx, logits, targets):
        rows = as_rows(logits)
        if rows.stride(0) < rows.shape[1]:  # expanded rows lie on each other: one's gradient would be another's logits
            rows = rows.contiguous()
        losses = cross_entropy_(rows, targets.reshape(-1).contiguous(), 1.0 / max(1, rows.shape[0]))
        if not rows.is_inference():
            torch.autograd.graph.increment_version(rows)  # whoever saved the logits for a backward pass is told
        ctx.save_for_backward(rows.detach())
        ctx.shape = logits.shape
        return losses.mean()

    @staticmethod
    def backward(ctx, loss_grad):
        begin_backward(ctx, overwrites=True)
        (logits_grad,) = ctx.saved_tensors
        n_rows, n_cols = logits_grad.shape
        block_size = min(next_power_of_2(n_cols), SCALE_BLOCK)
        launch(
            scale_kernel, (n_rows * cdiv(n_cols, block_size),), (logits_grad, loss_grad),
            (logits_grad.stride(), n_cols), dict(BLOCK_SIZE=block_size),
        )  # fmt: skip
        return logits_grad.view(ctx.shape), None  # targets are integers


def triton_cross_entropy(logits, targets):
    """Mean cross-entropy, in fp32, of logits (..., n) and integer targets (...).

    The logits, in fp32, bf16 or fp16, are overwritten by their gradient, so they may not be a leaf that requires one.
    A target outside 0..n-1 gives a NaN; other shapes and types raise ValueError or TypeError.
    """
    require_shape("logits", logits, (*targets.shape, logits.shape[-1]))
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise TypeError(f"targets are {targets.dtype}: give the numbers of tokens as integers")
    if logits.is_leaf and logits.requires_grad:
        raise ValueError("logits is a leaf that requires a gradient, and would be overwritten: give logits.clone()")
    return CrossEntropyFunction.apply(logits, targets)


def torch_cross_entropy(logits, targets):
    """As triton_cross_entropy, in PyTorch's operators; the logits are kept."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


# --- embedding: the library's lookup; the kernel adds the gradient to that of the tied head, without atomics


@jit
def embedding_backward_kernel(
    tokens_ptr, out_grad_ptr, weight_grad_ptr, n_tokens, n_cols, BLOCK_TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """weight_grad[v] += out_grad[t] for all tokens t equal to v, in their order.

    tokens (n_tokens,) of integers, out_grad (n_tokens, n_cols), weight_grad (vocabulary, n_cols).
    Grid: (vocabulary, blocks of columns).
    """
    cols = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    weight_grad_ptrs = weight_grad_ptr + tl.program_id(0).to(tl.int64) * n_cols + cols
    total = tl.load(weight_grad_ptrs, mask=mask, other=0.0).to(tl.float32)
    for start in range(0, n_tokens, BLOCK_TOKENS):
        positions = start + tl.arange(0, BLOCK_TOKENS)
        matches = tl.load(tokens_ptr + positions, mask=positions < n_tokens, other=-1) == tl.program_id(0)
        position = tl.min(tl.where(matches, positions, n_tokens), axis=0)
        while position < n_tokens:
            out_grad_ptrs = out_grad_ptr + tl.cast(position, tl.int64) * n_cols + cols
            total += tl.load(out_grad_ptrs, mask=mask, other=0.0).to(tl.float32)
            position = tl.min(tl.where(matches & (positions > position), positions, n_tokens), axis=0)
    tl.store(weight_grad_ptrs, total.to(weight_grad_ptr.dtype.element_ty), mask=mask)


class EmbeddingFunction(torch.autograd.Function):
    """See triton_embedding."""

    @staticmethod
    def forward(ctx, tokens, weight):
        ctx.save_for_backward(tokens, weight)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, out_grad):
        begin_backward(ctx)
        tokens, weight = ctx.saved_tensors
        n_cols = weight.shape[1]
        weight_grad, accumulate = gradient_target(weight)  # the tied head's gradient may be there already
        if not accumulate:
            weight_grad.zero_()
        block_tokens, block_size = EMBEDDING_TILE[0], min(next_power_of_2(n_cols), EMBEDDING_TILE[1])
        launch(
            embedding_backward_kernel, (weight.shape[0], cdiv(n_cols, block_size)),
            (tokens, out_grad.contiguous(), weight_grad), (tokens.numel(), n_cols),
            dict(BLOCK_TOKENS=block_tokens, BLOCK_SIZE=block_size),
        )  # fmt: skip
        return None, set_main_grad(weight, weight_grad)


def triton_embedding(tokens, weight):
    """weight (vocab, cols) at tokens (...) of any integers in 0..vocab-1 -> (..., cols)

    The weight in fp32, bf16 or fp16, else TypeError; a token out of range is PyTorch's to tell.
    """
    require_shape("weight", weight, weight.shape)
    return EmbeddingFunction.apply(tokens.contiguous(), weight)


# --- AdamW over flat buffers (Loshchilov and Hutter, arXiv:1711.05101), one launch for all parameters


@jit
def adamw_kernel(
    param_ptr, remainder_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, lr_ptr, beta_powers_ptr, n_elements,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, WEIGHT_DECAY: tl.constexpr,
    GRADIENT_SCALE: tl.constexpr, SPLIT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """torch.optim.AdamW's update with GRADIENT_SCALE * grad. With SPLIT a weight is two int16 halves (see split_fp32).

    param, remainder, grad, exp_avg, exp_avg_sq (n_elements,): param in fp32 or, with SPLIT, like remainder in int16,
    the moments in fp32; lr () in fp32, beta_powers (2,) in fp64.  Grid: (blocks of elements,).
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    lr = tl.load(lr_ptr)
    # The powers are kept in fp64 on the device: 1 - beta2^step cancels in fp32, and a captured graph has no host step.
    bias_correction1 = (1.0 - tl.load(beta_powers_ptr)).to(tl.float32)
    bias_correction2 = (1.0 - tl.load(beta_powers_ptr + 1)).to(tl.float32)
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if GRADIENT_SCALE != 1.0:
        grad *= GRADIENT_SCALE
    exp_avg = tl.load(exp_avg_ptr + offsets, mask=mask, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + offsets, mask=mask, other=0.0)
    weights = tl.load(param_ptr + offsets, mask=mask, other=0)
    if SPLIT:
        remainder = tl.load(remainder_ptr + offsets, mask=mask, other=0).to(tl.int32)
        weights = ((weights.to(tl.int32) << 16) + remainder).to(tl.float32, bitcast=True)
    exp_avg += (grad - exp_avg) * (1.0 - BETA1)
    exp_avg_sq = exp_avg_sq * BETA2 + grad * grad * (1.0 - BETA2)
    denominator = tl.sqrt(exp_avg_sq) / tl.sqrt(bias_correction2) + EPS
    weights = weights * (1.0 - lr * WEIGHT_DECAY) - lr / bias_correction1 * exp_avg / denominator
    tl.store(exp_avg_ptr + offsets, exp_avg, mask=mask)
    tl.store(exp_avg_sq_ptr + offsets, exp_avg_sq, mask=mask)
    if SPLIT:
        bits = weights.to(tl.int32, bitcast=True)
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)  # any NaN: rounded up, some would be zeros
        rounded = (bits + 0x8000) >> 16
        tl.store(param_ptr + offsets, rounded.to(tl.int16), mask=mask)
        tl.store(remainder_ptr + offsets, (bits - (rounded << 16)).to(tl.int16), mask=mask)
    else:
        tl.store(param_ptr + offsets, weights, mask=mask)


def split_fp32(weights):
    """fp32 weights -> (bf16, int16): the weights rounded to bf16, and the 16 bits that lost. join_fp32 is exact.

    bf16 is the upper half of an fp32 number. The model computes with it, the optimizer adds the lower half: a master
    weight and its copy in low precision take 4 bytes together instead of 6. Halfway cases are rounded away from zero,
    else the lower half would not fit 16 bits. A NaN is one in both, though not with the same payload.
    """
    bits = weights.view(torch.int32).masked_fill(weights.isnan(), 0x7FC00000)
    rounded = (bits + 0x8000) >> 16
    return rounded.to(torch.int16).view(torch.bfloat16), (bits - (rounded << 16)).to(torch.int16)


def join_fp32(rounded, remainder):
    """The inverse of split_fp32: bf16 and int16 -> fp32, of one shape."""
    return ((rounded.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


class Bucket:
    """Consecutive parameters whose gradients and weights travel together.

    Its parts of the optimizer's flat buffers: all_weights and all_grads (elements,); and of this process own_weights,
    own_grads, remainder, exp_avg and exp_avg_sq (elements / processes,). At own and at kept they lie in the buffers.
    """

    def __init__(self, parameters, first_layer=None):
        self.parameters = parameters
        self.first_layer = first_layer  # the first to need the weights, and the last to have gradients
        self.is_reduced = False  # or on the way to it: since zero_grad()
        self.reduction = self.gathering = None  # under way


def count_weights(parameters):
    """The number of elements of all of them."""
    return sum(p.numel() for p in parameters)


def make_buckets(model, world):
    """[Bucket] of all parameters in their order. The embedding, which is also the head, goes with the first layer.

    Nothing is left to hide the first layer's messages behind, so those are short. Each further bucket may be as large
    as all before it together, up to BUCKET_ELEMENTS; a layer that is larger goes by itself.
    """
    if world.size == 1:
        return [Bucket(list(model.parameters()))]
    first, *layers = model.layers
    buckets, limit = [Bucket([*model.embed_tokens.parameters(), *first.parameters()])], 0
    for layer in layers:
        parameters = list(layer.parameters())
        if not limit or count_weights(buckets[-1].parameters + parameters) > min(limit, BUCKET_ELEMENTS):
            limit += count_weights(buckets[-1].parameters)
            buckets.append(Bucket([], layer))
        buckets[-1].parameters += parameters
    buckets[-1].parameters += model.norm.parameters()
    return buckets


class FlatAdamW:
    """AdamW whose parameters, gradients and moments are each one flat buffer.

    The parameters of the model become views of the flat buffer, in bf16 if low_precision (the fp32 weights are then
    split between param and remainder). So do their gradients: our kernels write into main_grad, and add to it in
    further backward passes before zero_grad(); what autograd leaves in .grad is copied there by step(). Learning rate
    and step count live on the device, for captured steps.

    Of several processes each has moments and remainder of its own slices of the buckets, and updates these weights
    (ZeRO stage 1: Rajbhandari et al., arXiv:1910.02054). Gradients are added up and scattered while the backward pass
    runs, weights gathered while the next forward pass does; both in the model's precision.
    """

    ALIGNMENT = 64  # elements; matmuls want their operands on 16-byte boundaries

    def __init__(self, model, lr, low_precision=False, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, world=ALONE):
        self.world = world
        self.parameters = list(model.parameters())
        self.buckets, self.ahead = make_buckets(model, world), None
        self.constants = dict(BETA1=betas[0], BETA2=betas[1], EPS=eps, WEIGHT_DECAY=weight_decay)
        self.constants |= dict(GRADIENT_SCALE=1 / world.size, SPLIT=low_precision, BLOCK_SIZE=ADAMW_BLOCK)
        device = self.parameters[0].device
        n_elements = self._place()
        zeros = functools.partial(torch.zeros, n_elements // world.size, device=device)
        self.param = torch.zeros(n_elements, dtype=torch.bfloat16 if low_precision else torch.float32, device=device)
        self.remainder = zeros(dtype=torch.int16) if low_precision else None
        self.grad = torch.zeros_like(self.param)
        self.exp_avg, self.exp_avg_sq = zeros(dtype=torch.float32), zeros(dtype=torch.float32)
        self.lr = torch.tensor(lr, dtype=torch.float32, device=device)
        self.betas = torch.tensor(betas, dtype=torch.float64, device=device)
        self.beta_powers = torch.ones_like(self.betas)
        initial = [p.detach().float() for p in self.parameters]
        for p, param_view, buffer in zip(self.parameters, self._views(self.param), self._views(self.grad), strict=True):
            p.data, p.main_grad = param_view, buffer
        for bucket in self.buckets:
            bucket.all_weights, bucket.all_grads = self.param[bucket.all], self.grad[bucket.all]
            bucket.own_weights, bucket.own_grads = self.param[bucket.own], self.grad[bucket.own]
            bucket.remainder = self.remainder[bucket.kept] if low_precision else None
            bucket.exp_avg, bucket.exp_avg_sq = self.exp_avg[bucket.kept], self.exp_avg_sq[bucket.kept]
        self.reset(initial)

    def _place(self):
        """Gives parameters and buckets their places in the flat buffers. Returns the length of these."""
        self.starts, position = [], 0
        for bucket in self.buckets:
            start = position
            for p in bucket.parameters:
                self.starts.append(position)
                position += cdiv(p.numel(), self.ALIGNMENT) * self.ALIGNMENT
            length = cdiv(position - start, self.ALIGNMENT * self.world.size) * self.ALIGNMENT  # of a process
            position = start + length * self.world.size
            bucket.all = slice(start, position)
            bucket.own = slice(start + self.world.rank * length, start + (self.world.rank + 1) * length)
            bucket.kept = slice(start // self.world.size, start // self.world.size + length)
        return position

    def _views(self, flat):
        for p, start in zip(self.parameters, self.starts, strict=True):
            yield flat[start : start + p.numel()].view(p.shape)

    @torch.no_grad()
    def reset(self, weights):
        """Start over from these weights (a list of fp32 tensors)."""
        flat = torch.zeros_like(self.param, dtype=torch.float32)
        torch._foreach_copy_(list(self._views(flat)), weights)
        if self.remainder is None:
            self.param.copy_(flat)
        else:
            param, remainder = split_fp32(flat)
            self.param.copy_(param)
            for bucket in self.buckets:
                bucket.remainder.copy_(remainder[bucket.own])
        for state in (self.grad, self.exp_avg, self.exp_avg_sq):
            state.zero_()
        self.beta_powers.fill_(1.0)

    def weights(self):
        """The fp32 weights, a list of tensors in the order of model.parameters(); all processes must ask."""
        self.gather_weights(self.buckets)
        for bucket in self.buckets:
            self.wait_for_weights(bucket)
        if self.remainder is None:
            return list(self._views(self.param))
        remainder = self.remainder
        if self.world.size > 1:
            remainder = torch.empty_like(self.param)  # called bf16: int16 is no type of a message
            for bucket in self.buckets:
                all_gather(remainder[bucket.all], bucket.remainder.view(remainder.dtype))
        return list(self._views(join_fp32(self.param, remainder.view(torch.int16))))

    def zero_grad(self):
        """The next backward pass overwrites the gradients."""
        for p in self.parameters:
            p.grad = None
        for bucket in self.buckets:
            bucket.is_reduced = False

    def gather_weights(self, buckets):
        """Asks for what the other processes have updated of these."""
        if self.world.size > 1:
            for bucket in buckets:
                bucket.gathering = all_gather(bucket.all_weights, bucket.own_weights, async_op=True)

    def wait_for_weights(self, bucket):
        """Until those of a bucket are there."""
        if bucket.gathering:
            self.world.wait(bucket.gathering)
            bucket.gathering = None

    def reduce_gradients(self, bucket):
        """The gradients of a bucket, all computed, into the flat buffer; with several processes on their way.

        A parameter without a gradient is taken to have zeros.
        """
        for p in bucket.parameters:
            if p.grad is None:
                p.main_grad.zero_()
            elif p.grad is not p.main_grad:  # from autograd, not from our kernels
                p.main_grad.copy_(p.grad)
        if self.world.size > 1:
            if bucket.is_reduced:
                raise RuntimeError("a second backward pass would add to reduced gradients: call zero_grad() before it")
            bucket.is_reduced = True
            bucket.reduction = reduce_scatter(bucket.own_grads, bucket.all_grads, async_op=True)

    @torch.no_grad()
    def finish_reduction(self):
        """At the end of the backward pass: what was not reduced on the way is, and all of it waited for."""
        for bucket in reversed(self.buckets):
            if not bucket.is_reduced:
                self.reduce_gradients(bucket)
        for bucket in reversed(self.buckets):
            if bucket.reduction:
                self.world.wait(bucket.reduction)
                bucket.reduction = None

    @torch.no_grad()
    def gather_gradients(self):
        """After step(): the mean gradients of all processes into .grad, for who wants to look at them."""
        if self.world.size > 1:
            for bucket in self.buckets:
                bucket.own_grads.mul_(self.constants["GRADIENT_SCALE"])
                all_gather(bucket.all_grads, bucket.own_grads)
            for p in self.parameters:
                p.grad = None if p.grad is None else p.main_grad

    def begin_forward(self):
        """Asks for weights, of all buckets or with overlap() of the next ones, and waits for the first bucket's."""
        self.gather_weights(self.buckets[: self.ahead])
        self.wait_for_weights(self.buckets[0])

    def overlap(self):
        """From now on buckets travel beside the computation, by hooks on the first layer of each.

        One is asked for while the one before is in use. All at once would keep the host from issuing the first layer,
        and multiprocessors from kernels that want every one of them.
        """
        self.ahead = 2
        for index, bucket in enumerate(self.buckets):
            if bucket.first_layer is not None:
                bucket.first_layer.register_forward_pre_hook(functools.partial(self._before_layer, index))

    def _before_layer(self, index, layer, inputs):
        bucket, following = self.buckets[index], index + self.ahead - 1
        self.wait_for_weights(bucket)
        self.gather_weights(self.buckets[following : following + 1])
        if inputs[0].requires_grad:  # its gradient comes after those of the layer's weights
            inputs[0].register_hook(lambda grad: self.reduce_gradients(bucket))

    @torch.no_grad()
    def step(self):
        """Updates the weights, each process its own."""
        self.finish_reduction()
        self.beta_powers.mul_(self.betas)
        for bucket in self.buckets:
            weights = bucket.own_weights if self.remainder is None else bucket.own_weights.view(torch.int16)
            state = bucket.remainder, bucket.own_grads, bucket.exp_avg, bucket.exp_avg_sq
            tensors, n_elements = (weights, *state, self.lr, self.beta_powers), weights.numel()
            launch(adamw_kernel, (cdiv(n_elements, ADAMW_BLOCK),), tensors, (n_elements,), self.constants)


def whole(tensor):
    """All of a tensor that --shard full has distributed; all processes must ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shard_like(parameter, weight):
    """The whole weight (a tensor), distributed as its parameter is."""
    if not hasattr(parameter, "full_tensor"):
        return weight
    from torch.distributed.tensor import distribute_tensor  # as in parallelize()

    return distribute_tensor(weight, parameter.device_mesh, parameter.placements)


class TorchAdamW(torch.optim.AdamW):
    """torch's fused AdamW with the same hyperparameters, for --impl torch and sdpa."""

    def __init__(self, model, lr):
        self.parameters = list(model.parameters())
        device = self.parameters[0].device
        on_gpu = device.type == "cuda"
        lr = torch.tensor(lr, device=device) if on_gpu else lr
        super().__init__(self.parameters, lr=lr, weight_decay=0.01, fused=True, capturable=on_gpu)

    @torch.no_grad()
    def reset(self, weights):
        """As FlatAdamW's."""
        for p, weight in zip(self.parameters, weights, strict=True):
            p.copy_(shard_like(p, weight))
        for state in self.state.values():
            for value in state.values():
                value.zero_()


# ----------------------------------------------------------------------------------------------------------------------
# Model: modules hold parameters and call the operations of one implementation.


class Operations(NamedTuple):
    """What a model is made of, in one implementation."""

    embedding: Callable
    rmsnorm: Callable
    linear: Callable
    attention: Callable
    swiglu: Callable
    cross_entropy: Callable
    blocks: Callable | None = None  # whole TransformerBlocks, where there is something faster than their parts


def sdpa_rmsnorm(x, branch, weight, eps):
    """As triton_rmsnorm, by PyTorch's fused operator."""
    residual = x if branch is None else x + branch
    return F.rms_norm(residual, weight.shape, weight, eps), residual


OPERATIONS = {
    "triton": Operations(
        triton_embedding, triton_rmsnorm, triton_linear, triton_attention, triton_swiglu, triton_cross_entropy,
        triton_blocks,
    ),
    "torch": Operations(F.embedding, torch_rmsnorm, F.linear, torch_attention, torch_swiglu, torch_cross_entropy),
    "sdpa": Operations(F.embedding, sdpa_rmsnorm, F.linear, sdpa_attention, torch_swiglu, torch_cross_entropy),
}  # fmt: skip


OPERATION_BUGS = {
    "rmsnorm": ("severed_autograd",),
    "attention": ("noncontiguous_kv", "severed_autograd"),
    "swiglu": ("triton_matmul_swiglu",),
    "blocks": ("noncontiguous_kv", "triton_matmul_swiglu"),
}


def with_bugs(operations, bugs):
    """Our operations with these of BUGS; where they are asked for is marked BUG."""
    for name, known in OPERATION_BUGS.items():
        active = tuple(bug for bug in known if bug in bugs)
        if active:
            operations = operations._replace(**{name: functools.partial(getattr(operations, name), bugs=active)})
    return operations._replace(blocks=None) if "severed_autograd" in bugs else operations


def select_operations(config, device):
    """(name, Operations): what runs here for config.impl, the mistakes asked for included."""
    if config.impl != "triton" or triton_obstacle(device, config.use_amp):
        name = "torch" if config.impl == "triton" else config.impl
        return name, OPERATIONS[name]
    operations = OPERATIONS["triton"]
    if config.compile:  # kernels are opaque to the compiler, and write gradients where it does not look
        operations = Operations(*map(torch.compiler.disable, operations))
    return "triton", with_bugs(operations, config.bugs)


def default_operations():
    """For a module that is built by itself: Triton's where Triton runs."""
    device = get_device("cuda" if torch.cuda.is_available() else "cpu")
    return OPERATIONS["torch" if triton_obstacle(device) else "triton"]


class TritonRMSNorm(nn.Module):
    """RMSNorm over the last dimension, dim."""

    def __init__(self, dim, eps=1e-5, operations=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.operations = operations or default_operations()

    def forward(self, x):
        """x (..., dim) -> the same shape"""
        return self.add_norm(x, None)[0]

    def add_norm(self, residual, branch):
        """(norm(residual + branch), residual + branch) in one kernel; branch may be None."""
        return self.operations.rmsnorm(residual, branch, self.weight, self.eps)


class TritonAttention(nn.Module):
    """Causal self-attention with grouped queries; q, k and v come out of one matmul."""

    def __init__(self, config, operations=None):
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        qkv_dim = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv_proj = nn.Linear(config.hidden_dim, qkv_dim, bias=False)
        self.o_proj = nn.Linear(config.hidden_dim, config.hidden_dim, bias=False)
        self.operations = operations or default_operations()

    def forward(self, x, cos, sin):
        """x (batch, seq, hidden), cos and sin (seq, head_dim / 2) -> (batch, seq, hidden)"""
        weights = self.qkv_proj.weight, self.o_proj.weight
        return self.operations.attention(x, *weights, cos, sin, self.num_heads, self.num_kv_heads)


class TritonSwiGLU(nn.Module):
    """The feed-forward layer; gate and up come out of one matmul."""

    def __init__(self, config, operations=None):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_dim, 2 * config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.hidden_dim, bias=False)
        self.operations = operations or default_operations()

    def forward(self, x):
        """x (batch, seq, hidden) -> the same shape"""
        return self.operations.swiglu(x, self.gate_up_proj.weight, self.down_proj.weight)


class TransformerBlock(nn.Module):
    """Attention and feed-forward layer, each after a norm and each added to the residual stream."""

    def __init__(self, config, operations=None):
        super().__init__()
        self.attention_norm = TritonRMSNorm(config.hidden_dim, operations=operations)
        self.attention = TritonAttention(config, operations)
        self.ffn_norm = TritonRMSNorm(config.hidden_dim, operations=operations)
        self.feed_forward = TritonSwiGLU(config, operations)
        self.operations = self.attention.operations
        self.sizes = BlockSizes(self.attention_norm.eps, (config.num_heads, config.num_kv_heads))

    def weights(self):
        """In the order of triton_blocks, past nn.Module's lookup of attributes: 0.6 instead of 3.3 us on the host."""
        parts = self._modules
        attention, feed_forward = parts["attention"]._modules, parts["feed_forward"]._modules
        modules = (
            parts["attention_norm"], attention["qkv_proj"], attention["o_proj"],
            parts["ffn_norm"], feed_forward["gate_up_proj"], feed_forward["down_proj"],
        )  # fmt: skip
        return [module._parameters["weight"] for module in modules]

    def forward(self, residual, branch, cos, sin):
        """The residual stream and what the block before adds to it (None at first) -> the same pair, one block on.

        Both (batch, seq, hidden). The addition is left to the next norm, whose kernel reads the residual anyway.
        """
        if self.operations.blocks:  # the same in one autograd.Function
            return self.operations.blocks(residual, branch, [self.weights()], cos, sin, self.sizes)
        y, residual = self.attention_norm.add_norm(residual, branch)
        y, residual = self.ffn_norm.add_norm(residual, self.attention(y, cos, sin))
        return residual, self.feed_forward(y)


class TinyLlamaTriton(nn.Module):
    """LLaMA with a head tied to the embedding; operations choose the implementation (see OPERATIONS)."""

    def __init__(self, config, operations=None):
        super().__init__()
        self.operations = operations or default_operations()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.layers = nn.ModuleList(TransformerBlock(config, self.operations) for _ in range(config.num_layers))
        self.norm = TritonRMSNorm(config.hidden_dim, operations=self.operations)
        self.group_layers(1)
        self.named_range = contextlib.nullcontext  # show_layers() puts a real one here
        cos, sin = rope_tables(config.seq_len, config.head_dim, self.embed_tokens.weight.device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        if not config.no_init:  # BUG no_init: leaves the embedding at N(0, 1), and so the tied head
            self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """
        embed_tokens, qkv_proj, gate_up_proj    N(0, 0.02)
        o_proj, down_proj                       N(0, 0.02 / sqrt(2 * layers)): each adds to the residual stream
        norms                                   1
        """
        residual_std = 0.02 / math.sqrt(2 * len(self.layers))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=residual_std if is_residual else 0.02)

    def group_layers(self, size):
        """From now on so many layers at a time are one operation: their forward() and their hooks are not called."""
        self.groups = [(start, list(self.layers[start : start + size])) for start in range(0, len(self.layers), size)]
        self.tapes = None  # allow_tapes() puts some here

    def allow_tapes(self):
        """From now on launches are repeated from tapes, if all layers are one group: larger ones keep the GPU busy."""
        self.tapes = Tapes() if len(self.groups) == 1 < len(self.layers) else None

    def layer_range(self, start, index, direction):
        """The range of a layer of the group that begins at start."""
        return self.named_range(f"layers.{start + index} {direction}")

    def forward(self, tokens, targets=None):
        """tokens (batch, seq) -> logits (batch, seq, vocab), or the mean loss if targets (batch, seq) are given."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        residual, branch = self.operations.embedding(tokens, self.embed_tokens.weight), None
        for start, (layer, *others) in self.groups:
            if others:
                weights, ranges = [x.weights() for x in (layer, *others)], functools.partial(self.layer_range, start)
                tapes = self.tapes if self.named_range is contextlib.nullcontext else None
                residual, branch = self.operations.blocks(
                    residual, branch, weights, cos, sin, layer.sizes, layer_range=ranges, tapes=tapes
                )
            else:
                residual, branch = layer(residual, branch, cos, sin)
        y, _ = self.norm.add_norm(residual, branch)
        logits = self.operations.linear(y, self.embed_tokens.weight)
        return logits if targets is None else self.operations.cross_entropy(logits, targets)


# ----------------------------------------------------------------------------------------------------------------------
# Data: made on the CPU, so that every device sees the same. Several processes each make the batch of all and take their
# rows: N processes with batches of b see what one process with N * b does.

MARKOV_SUCCESSORS = 4
MARKOV_PROBABILITIES = (0.5, 0.25, 0.125, 0.125)


class RandomTokens:
    """Independent uniform tokens: nothing to learn, the loss stays at ln(vocab)."""

    def __init__(self, config, world=ALONE):
        self.rows = world.rows(config.batch_size)
        self.shape = (world.size * config.batch_size, config.seq_len + 1)
        self.vocab_size = config.vocab_size
        self.generator = torch.Generator().manual_seed(config.seed)
        self.entropy = math.log(config.vocab_size)  # nats a token

    def next_batch(self):
        """(tokens, targets), both (batch, seq): targets are the tokens one position on."""
        sequence = torch.randint(self.vocab_size, self.shape, generator=self.generator)[self.rows]
        return sequence[:, :-1], sequence[:, 1:]


class MarkovTokens:
    """A first-order Markov chain: each token has four successors, of probabilities 1/2, 1/4, 1/8 and 1/8.

    The chances of the successors are the same for each token, so the entropy of the next token is exactly that of these
    four numbers, 1.213 nats, and no model's loss can stay below it.
    """

    def __init__(self, config, world=ALONE):
        self.rng = np.random.default_rng(config.seed)
        order = self.rng.permutation(config.vocab_size)
        shifts = self.rng.choice(config.vocab_size, MARKOV_SUCCESSORS, replace=False)  # distinct successors, therefore
        self.successors = order[(np.arange(config.vocab_size)[:, None] + shifts) % config.vocab_size]
        self.rows = world.rows(config.batch_size)
        self.shape = (world.size * config.batch_size, config.seq_len + 1)
        self.entropy = -sum(p * math.log(p) for p in MARKOV_PROBABILITIES)

    def next_batch(self):
        """As RandomTokens."""
        batch_size, length = self.shape
        choices = self.rng.choice(MARKOV_SUCCESSORS, p=MARKOV_PROBABILITIES, size=(length, batch_size))[:, self.rows]
        sequence = np.empty(choices.shape, dtype=np.int64)
        sequence[0] = self.rng.integers(len(self.successors), size=batch_size)[self.rows]
        for position in range(1, length):
            sequence[position] = self.successors[sequence[position - 1], choices[position]]
        sequence = torch.from_numpy(sequence.T.copy())
        return sequence[:, :-1], sequence[:, 1:]


DATA = {"random": RandomTokens, "markov": MarkovTokens}

# ----------------------------------------------------------------------------------------------------------------------
# Training step: three phases on fixed buffers, called one by one or captured in graphs.


def parallelize(model, config, device, world):
    """What to call instead of a model of PyTorch's operators, so that the gradients are the mean of all processes.

    DistributedDataParallel, or the model itself after FSDP2's fully_shard with --shard full.
    """
    if config.shard != "full":
        # The compiler cuts its graphs at DistributedDataParallel's buckets only where these may change.
        return nn.parallel.DistributedDataParallel(
            model, device_ids=[world.local_rank] if device.type == "cuda" else None,
            gradient_as_bucket_view=True, static_graph=not config.compile,
        )  # fmt: skip
    from torch.distributed.device_mesh import init_device_mesh  # a second of imports that few need
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    low = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16) if config.use_amp else {}
    policy = MixedPrecisionPolicy(**low, cast_forward_inputs=False)
    shard = functools.partial(fully_shard, mesh=init_device_mesh(device.type, (world.size,)), mp_policy=policy)
    for layer in model.layers:
        shard(layer)
    return shard(model)


def layers_together(config):
    """How many layers wait for each other's weight gradients: all, or as many as the memory of GROUP_BYTES allows."""
    width = 2 * config.hidden_dim + (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer_bytes = config.tokens_per_step * width * (2 if config.use_amp else 4)
    groups = cdiv(config.num_layers, max(1, GROUP_BYTES // layer_bytes))
    return cdiv(config.num_layers, groups)


class TrainStep:
    """One training step of one model, on fixed buffers: forward(), backward(), optimizer_step(), or run() for all.

    With a world of several processes it is theirs together: on other batches, with the mean of their gradients.
    """

    def __init__(self, config, device, world=ALONE):
        torch.manual_seed(config.seed)
        self.config, self.device, self.world = config, device, world
        self.implementation, operations = select_operations(config, device)
        with torch.device(device.type):
            self.model = TinyLlamaTriton(config, operations)
            self.tokens = torch.zeros(config.batch_size, config.seq_len, dtype=torch.int64)
            self.targets = torch.zeros_like(self.tokens)
        self.initial_weights = [p.detach().cpu().clone() for p in self.model.parameters()]
        self.run_model = self.model
        if self.implementation == "triton":
            self.optimizer = FlatAdamW(self.model, config.learning_rate, config.use_amp, world=world)
            if not config.compile:  # hooks on layers are not the compiler's: nothing then is hidden
                self.optimizer.overlap()
                if world.size == 1 and operations.blocks:  # others wait for the gradients of each layer
                    self.model.group_layers(layers_together(config))
                    if not config.graph:  # which has no host
                        self.model.allow_tapes()
        else:
            if world.size > 1:
                self.run_model = parallelize(self.model, config, device, world)
            self.optimizer = TorchAdamW(self.model, config.learning_rate)
        if config.compile:
            self.run_model = torch.compile(self.run_model)
        self.is_sharded = self.implementation == "triton" and world.size > 1
        self.loss = None
        self.named_range = contextlib.nullcontext  # show_ranges() puts a real one here

    def load(self, tokens, targets):
        """Copies a batch, both (batch, seq), into the buffers of the step."""
        self.tokens.copy_(tokens)
        self.targets.copy_(targets)

    def autocast(self):
        """The context of the forward pass."""
        # Our kernels take bf16 weights as they are; the library needs autocast, whose cache a graph must not keep.
        needed = self.config.use_amp and self.implementation != "triton"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=needed, cache_enabled=not self.config.graph)

    def forward(self):
        """The loss, with its history, into self.loss; gradients are cleared first."""
        self.optimizer.zero_grad()
        if self.is_sharded:
            self.optimizer.begin_forward()
        with self.autocast():
            self.loss = self.run_model(self.tokens, self.targets)

    def backward(self):
        """Gradients of self.loss, and with several processes their sum."""
        with torch.autograd.set_multithreading_enabled(False):  # handing over to autograd's thread costs 0.5 ms a step
            self.loss.backward()
        if self.is_sharded:
            self.optimizer.finish_reduction()

    def optimizer_step(self):
        """New weights."""
        self.optimizer.step()

    def gather_gradients(self):
        """After a step: the gradients that it used into .grad, where they are not there yet."""
        if self.is_sharded:
            self.optimizer.gather_gradients()

    def run(self):
        """The whole step; nothing is synchronized."""
        self.forward()
        self.backward()
        self.optimizer_step()

    def restart(self):
        """Back to the initial weights and an empty optimizer."""
        self.optimizer.reset([w.to(self.tokens.device) for w in self.initial_weights])

    def capture(self, one_graph=False):
        """From now on the phases, or with one_graph run(), replay captured graphs; a step must have run before."""
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self.loss = None  # its autograd history belongs to the warm-up
        for name in ("run",) if one_graph else ("forward", "backward", "optimizer_step"):
            graph = torch.cuda.CUDAGraph()
            # NCCL's watchdog may ask for an event meanwhile, in its own thread.
            mode = "global" if self.world.size == 1 else "thread_local"
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
                getattr(self, name)()
            setattr(self, name, graph.replay)

    def show_ranges(self):
        """From now on, name the step, its phases and (unless compiled or captured) the layers to a profiler.

        With --timing step, kernels run on behind their "step"; the range "steps" lasts until the last one has ended.
        """
        if self.named_range is named_range:
            return
        self.named_range = named_range
        is_one_graph = "run" in vars(self)
        phases = {"forward": "forward", "backward": "backward", "optimizer": "optimizer_step"}
        for name, method in ({"graph": "run"} if is_one_graph else phases).items():
            setattr(self, method, named_range(name)(getattr(self, method)))
        if not self.config.compile:
            show_layers(self.model)


def synchronize(device, world=ALONE):
    """Waits for the GPU, if there is one."""
    if device.type == "cuda" and world.size > 1:
        event = torch.cuda.Event()
        event.record()
        world.wait_for(event)
    elif device.type == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def named_range(name):
    """A range in the traces of torch.profiler and of what is attached from outside (NVTX, or roctx on ROCm)."""
    on_gpu = torch.cuda.is_initialized()
    with torch.profiler.record_function(name):
        if on_gpu:
            torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            if on_gpu:
                torch.cuda.nvtx.range_pop()


def show_layers(model):
    """A range for each layer, forward and backward: its backward lies between the gradients of its output and input."""
    model.named_range = named_range  # of layers in groups
    current = contextlib.ExitStack()

    def enter(name):
        current.close()
        current.enter_context(named_range(name))

    def before(index, layer, inputs):
        enter(f"layers.{index} forward")
        if index == 0 and inputs[0].requires_grad:
            inputs[0].register_hook(lambda grad: current.close())

    def after(index, layer, inputs, outputs):
        current.close()
        if outputs[1].requires_grad:
            outputs[1].register_hook(lambda grad: enter(f"layers.{index} backward"))

    for index, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(functools.partial(before, index))
        layer.register_forward_hook(functools.partial(after, index))


def gradient_norm(model):
    """The 2-norm of all gradients together, a tensor on the device."""
    return whole(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


# ----------------------------------------------------------------------------------------------------------------------
# Verification: no number is worth printing before loss and gradients agree with PyTorch's.

CHECK_BATCH = 2  # sequences; the reference keeps every score matrix in memory
CHECK_ATOL = {"fp32": 1e-5, "tf32": 2e-3, "bf16": 1e-2}  # relative to the norm of the reference


class Verdict(NamedTuple):
    """The rule: an error may be twice that of plain PyTorch in the same precision, plus a tolerance."""

    errors: dict  # {name: distance from the reference, relative to its norm}; inf where there is no gradient
    allowed: dict

    @property
    def failed(self):
        """The names of what is beyond what is allowed; a NaN is too."""
        return [name for name, error in self.errors.items() if not error <= self.allowed[name]]

    @property
    def worst(self):
        """The name of what is furthest beyond what is allowed, or comes closest to it."""
        return max(self.failed or self.errors, key=lambda name: self.errors[name] / self.allowed[name])


def judge(errors, plain_errors, tolerance):
    """The Verdict on {name: error} beside those of plain PyTorch in the same precision."""
    return Verdict(errors, {name: 2 * error + tolerance for name, error in plain_errors.items()})


def relative_errors(results, exact, order=2):
    """{name: norm(result - exact) / norm(exact)} of {name: tensor}; inf for a result that is None.

    order is the norm's: 2 looks at all elements together, inf at the one that is furthest off.
    """
    norm = functools.partial(torch.linalg.vector_norm, ord=order)
    return {
        name: math.inf if results[name] is None else float(norm(results[name] - reference) / norm(reference))
        for name, reference in exact.items()
    }


def loss_and_gradients(config, device, batch, double=False, world=ALONE):
    """{"loss" or parameter: the loss or its gradient} of one forward and backward pass from the initial weights."""
    step = TrainStep(config, device, world)
    if double:
        step.model.double()
    step.load(*batch)
    step.forward()
    step.backward()
    step.gather_gradients()
    gradients = {name: None if p.grad is None else whole(p.grad) for name, p in step.model.named_parameters()}
    return {"loss": step.loss.detach().double(), **gradients}


def exact_loss_and_gradients(config, device, batch):
    """Those of --impl torch in fp64, or in full fp32 for a bf16 run."""
    torch.set_float32_matmul_precision("highest")
    plain = dataclasses.replace(config, impl="torch", shard=None, use_amp=False)
    exact = loss_and_gradients(plain, device, batch, double=not config.use_amp)
    torch.set_float32_matmul_precision(config.matmul_precision)
    return exact


def check_gradients(config, device, world=ALONE):
    """True if loss and gradients are as close to those in higher precision as the Verdict's rule demands.

    Each process checks its own, and then all the mean that they train with.
    """
    config = dataclasses.replace(config, batch_size=min(config.batch_size, CHECK_BATCH), compile=False, graph=False)
    plain = dataclasses.replace(config, impl="torch", shard=None)
    batch = DATA[config.data](config, world).next_batch()
    exact = exact_loss_and_gradients(config, device, batch)
    plain_errors = relative_errors(loss_and_gradients(plain, device, batch), exact)
    errors = relative_errors(loss_and_gradients(config, device, batch), exact)
    reference, tolerance = "fp32" if config.use_amp else "fp64", CHECK_ATOL[precision_name(config, device)]
    verdicts = world.gather(judge(errors, plain_errors, tolerance))
    failed = [rank for rank, verdict in enumerate(verdicts) if verdict.failed]
    for rank in failed or [0]:
        print_verdict(verdicts[rank], reference + (f", rank {rank}" if world.size > 1 else ""))
    if failed or world.size == 1:
        return not failed
    for tensor in exact.values():
        dist.all_reduce(tensor.div_(world.size))
    results = loss_and_gradients(config, device, batch, world=world)
    (results["loss"],) = world.mean([results["loss"].item()])
    verdict = judge(relative_errors(results, exact), plain_errors, tolerance)
    print_verdict(verdict, f"{reference}, the mean of {world.size} processes")
    return not verdict.failed


def print_verdict(verdict, reference):
    """Prints the outcome of a check, and what failed."""
    errors, allowed, failed, worst = *verdict, verdict.failed, verdict.worst
    print(
        f"Check against PyTorch in {reference}: "
        f"{f'FAILED in {len(failed)} of {len(errors)}' if failed else 'passed'} (loss and gradients of "
        f"{len(errors) - 1} parameters)"
    )
    print(f"    worst, {worst}: error {errors[worst]:.1e}, allowed {allowed[worst]:.1e}")
    for name in failed[:10]:
        reason = "no gradient" if errors[name] == math.inf else f"error {errors[name]:.1e}, allowed {allowed[name]:.1e}"
        print(f"    {name}: {reason}")


# ----------------------------------------------------------------------------------------------------------------------
# Measuring


class StepClock:
    """Phase times of one step in ms: by events on a GPU, by the host's clock on a CPU."""

    def __init__(self, device, unsynced):
        # BUG unsynced_timing: the host's clock on a GPU times the launches, not the work.
        self.uses_events = device.type == "cuda" and not unsynced
        self.marks = []

    def mark(self):
        """A point in time, the end of one phase and the beginning of the next."""
        if self.uses_events:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def intervals(self):
        """ms between the marks; the device must have been synchronized."""
        pairs = list(itertools.pairwise(self.marks))
        if self.uses_events:
            return [start.elapsed_time(end) for start, end in pairs]
        return [(end - start) * 1e3 for start, end in pairs]


@dataclass
class StepRecord:
    """What was measured of one step; times in ms."""

    loss: float
    batch_ms: float
    host_ms: float  # until the host had issued the whole step
    phase_ms: dict
    grad_norm: float | None


def divergence(records):
    """The first loss or gradient norm that is not finite, as {"step", "quantity", "value"}, or None."""
    for number, record in enumerate(records, 1):
        for quantity, value in (("loss", record.loss), ("gradient norm", record.grad_norm)):
            if value is not None and not math.isfinite(value):
                return {"step": number, "quantity": quantity, "value": str(value)}
    return None


def count_matrix_weights(config):
    """Weights of the model's matrices; the tied head counts once, and norms have less than a thousandth as many."""
    kv_width = config.num_kv_heads * config.head_dim
    layer = config.hidden_dim * (2 * config.hidden_dim + 2 * kv_width + 3 * config.ffn_dim)
    return config.num_layers * layer + config.vocab_size * config.hidden_dim


def model_tflops(config):
    """TFLOP of one step's matrix products: 6 a weight and token for forward and backward (PaLM, appendix B), attention.

    Of causal attention only the half that is not masked counts, which PaLM counts whole: what must be computed.
    """
    attention = 6 * config.num_layers * config.hidden_dim * config.seq_len  # 12 * hidden * seq, half of it masked
    return (6 * count_matrix_weights(config) + attention) * config.tokens_per_step / 1e12


def peak_memory_mib(device):
    """The highest memory in use since the last reset: the GPU's tensors, or on a CPU the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def host_memory_bytes():
    """The memory of this machine; infinity where the system does not tell (Windows)."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf


def require_host_memory(config, device):
    """MemoryError where one copy of the weights, or of a batch, is larger than the host.

    The system may promise more than it has, and end the process when it has filled that.
    """
    weights = 4 * count_matrix_weights(config)
    batch = config.tokens_per_step * (4 * config.hidden_dim if device.type == "cpu" else 8)  # an activation, or tokens
    if max(weights, batch) > host_memory_bytes():
        raise MemoryError


def without_gradient(model):
    """The names of the parameters that have no gradient, or one of nothing but zeros."""
    return [name for name, p in model.named_parameters() if p.grad is None or not bool(whole(p.grad).any())]


def gradient_share(model, missing):
    """(parameters with a gradient, all parameters), counted in weights; missing is without_gradient(model)."""
    received = (p for name, p in model.named_parameters() if name not in missing)
    return count_weights(received), count_weights(model.parameters())


def attached_profiler():
    """The environment variable by which another profiler has entered this process, or None."""
    names = (
        "ROCP_TOOL_LIBRARIES", "ROCPROFILER_REGISTER", "HSA_TOOLS_LIB",
        "NV_NSIGHT_INJECTION_PORT_BASE",  # ncu
        "NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH",
    )  # fmt: skip
    if "rocprof" in os.environ.get("LD_PRELOAD", ""):  # rocprofv3 and rocprof-sys
        return "LD_PRELOAD"
    return next((name for name in names if os.environ.get(name)), None)


def count_kernels(step, device):
    """{"kernels": ..., "launches": ...} of one more step, or a reason why they were not counted.

    Of several processes also "exposed_communication_ms": when only messages ran on the GPU.
    """
    if device.type == "cpu":
        return "there is no GPU"
    if attached_profiler():
        return f"another profiler is attached ({attached_profiler()})"
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    steps = 1 if step.world.size == 1 else 2  # the first one also waits for the other processes' profilers
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in range(steps):
            step.run()
        synchronize(device, step.world)
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [event for event in events if not event.name.startswith(("Memcpy", "Memset"))]
    calls = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CPU]
    is_launch = re.compile(r"(cuda|cu|hip)\w*(Launch)\w*(Kernel|ExC|Graph)?")
    counts = {
        "kernels": len(kernels) // steps,
        "launches": sum(bool(is_launch.match(name)) for name in calls) // steps,
    }
    if steps > 1:
        spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in kernels)
        spans = spans[len(spans) // steps :]
        work = [(start, end) for start, end, name in spans if not name.startswith("nccl")]  # RCCL's name as well
        counts["exposed_communication_ms"] = (covered(span[:2] for span in spans) - covered(work)) / 1e3
    return counts


def covered(spans):
    """How long something ran, of (start, end) in the order of their starts."""
    total, until = 0.0, -math.inf
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def write_kernel_table(file, durations):
    """{kernel: ns of each call} as CSV with the columns of rocprofv3's kernel_stats.csv."""
    total = sum(map(sum, durations.values()))
    writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC)
    writer.writerow(["Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage", "MinNs", "MaxNs", "StdDev"])
    for name, ns in sorted(durations.items(), key=lambda item: -sum(item[1])):
        mean, share = round(statistics.mean(ns), 6), round(100 * sum(ns) / total, 6)
        spread = round(statistics.stdev(ns), 6) if len(ns) > 1 else 0.0  # of a sample, as rocprofv3's
        writer.writerow([name, len(ns), round(sum(ns)), mean, share, round(min(ns)), round(max(ns)), spread])


def separate_layers(path):
    """Moves the layers' backward ranges to a row of their own. OSError if PyTorch has left no whole trace.

    Each begins in one of autograd's nodes and ends in another, and viewers drop slices of a row that do not nest.
    """
    try:
        trace = json.loads(path.read_text(), strict=False)
    except (FileNotFoundError, ValueError) as error:  # PyTorch raises nothing
        raise OSError(errno.EIO, "PyTorch could not write it") from error
    events = trace["traceEvents"]
    row = 1 + max(event["tid"] for event in events if isinstance(event.get("tid"), int))
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    layers = [event for event in ranges if re.fullmatch(r"layers\.\d+ backward", event["name"])]
    for event in layers:
        event["tid"] = row
    title = dict(ph="M", name="thread_name", tid=row, args={"name": "layers, backward"})
    events += [title | {"pid": event["pid"]} for event in layers[:1]]
    path.write_text(json.dumps(trace))


def record_memory(step, path, steps):
    """What the GPU's allocator does in a few more steps, of which recording slows each: a file for PyTorch's viewer."""
    torch.cuda.memory._record_memory_history(stacks="python")
    for _ in range(steps):
        step.run()
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


def write_profile(step, device, folder, steps=3):
    """trace.json for Perfetto, kernel_stats.csv with rocprofv3's columns, and of a GPU memory_snapshot.pickle."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    step.show_ranges()
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in range(steps):
            with named_range("step"):
                step.run()
                synchronize(device, step.world)
    durations = {}
    for event in profiler.events():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if device.type == "cuda" and on_device and not event.is_user_annotation:
            durations.setdefault(event.name, []).append(event.device_time_total * 1e3)
        elif device.type == "cpu" and event.name.startswith("aten::") and event.self_cpu_time_total > 0:
            durations.setdefault(event.name, []).append(event.self_cpu_time_total * 1e3)
    with scratch_beside(folder / "trace.json") as scratch:
        trace, table, memory = (scratch / name for name in ("trace.json", "kernel_stats.csv", "memory_snapshot.pickle"))
        profiler.export_chrome_trace(str(trace))
        separate_layers(trace)
        with open(table, "w", newline="") as file:
            write_kernel_table(file, durations)
        if device.type == "cuda":
            record_memory(step, memory, steps)
        for file in scratch.iterdir():
            os.replace(file, folder / file.name)
    print(
        f"Profile of {steps} more steps: {folder / 'trace.json'} (open in https://ui.perfetto.dev) "
        f"and {folder / 'kernel_stats.csv'}"
    )
    if device.type == "cuda":
        print(f"Memory of {steps} more: {folder / memory.name} (open in https://pytorch.org/memory_viz)")


# ----------------------------------------------------------------------------------------------------------------------
# Training


def progress_line(config, index, record):
    """Prints the line of a step."""
    fields = [
        f"step {index + 1:4d}/{config.num_steps}",
        f"loss {record.loss:.4f}",
        *([f"norm {record.grad_norm:.3f}"] if record.grad_norm is not None else []),
        f"{record.batch_ms:.2f} ms",
        f"{config.tokens_per_step / record.batch_ms * 1e3:,.0f} tok/s",
    ]
    print(" | ".join(fields), flush=True)


def train_in_phases(step, data, config, device, records, world=ALONE):
    """Appends a StepRecord a step; the device is synchronized once a step."""
    for index in range(config.num_steps):
        step.load(*data.next_batch())
        synchronize(device)
        clock = StepClock(device, config.unsynced_timing)
        with step.named_range("step"):
            clock.mark()
            start = time.perf_counter()
            # --------------- the training step begins: nothing but work and marks ---------------
            step.forward()
            clock.mark()
            step.backward()
            clock.mark()
            step.optimizer_step()
            clock.mark()
            host_ms = (time.perf_counter() - start) * 1e3
            synchronize(device, world)
            # --------------- the training step ends: what follows is diagnostics ---------------
            wall_ms = (time.perf_counter() - start) * 1e3
        phase_ms = dict(zip(("forward", "backward", "optimizer"), clock.intervals(), strict=True))
        batch_ms = wall_ms if config.unsynced_timing else sum(phase_ms.values())
        if world.size > 1:
            step.gather_gradients()
        loss, is_stopping = world.mean([step.loss.item(), world.stop_requested is not None])
        records.append(StepRecord(loss, batch_ms, host_ms, phase_ms, gradient_norm(step.model).item()))
        progress_line(config, index, records[-1])
        if divergence(records[-1:]):
            return
        if is_stopping:
            raise KeyboardInterrupt


def train_in_one_window(step, data, config, device, records, world=ALONE):
    """Appends the StepRecords at the end; the device is synchronized there only."""
    batches = [[t.to(step.tokens.device) for t in data.next_batch()] for _ in range(config.num_steps)]
    losses, host_ms, is_stopping = [], [], False
    clock = StepClock(device, config.unsynced_timing)
    synchronize(device, world)
    try:
        with contextlib.ExitStack() as window:
            window.enter_context(step.named_range("steps"))
            window.callback(wait_for_steps, clock, device, world)  # after Ctrl-C too: the steps done so far count
            clock.mark()
            for batch in batches:
                is_stopping = world.all_stop()
                if is_stopping:
                    break
                start = time.perf_counter()
                step.load(*batch)
                with step.named_range("step"):
                    step.run()
                losses.append(step.loss.detach().clone())
                host_ms.append((time.perf_counter() - start) * 1e3)
                clock.mark()
    except KeyboardInterrupt:
        if world.size == 1:
            record_window(step, config, losses, host_ms, clock, records)
        raise
    record_window(step, config, losses, host_ms, clock, records, world)
    if is_stopping:
        raise KeyboardInterrupt


def record_window(step, config, losses, host_ms, clock, records, world=ALONE):
    """The StepRecords of a window, or of its steps before the run diverged."""
    if world.size > 1:
        step.gather_gradients()
    done = zip(world.mean([loss.item() for loss in losses]), host_ms, clock.intervals(), strict=False)
    for index, (loss, host, batch_ms) in enumerate(done):
        last = index + 1 == config.num_steps  # whose gradients no later loss depends on
        norm = gradient_norm(step.model).item() if last else None
        records.append(StepRecord(loss, batch_ms, host, {}, norm))
        progress_line(config, index, records[-1])
        if divergence(records[-1:]):
            break


def wait_for_steps(clock, device, world):
    """Waits for all that were issued; of several processes for one after the other, to see when one does not come."""
    if world.size > 1 and clock.uses_events:
        for mark in clock.marks:
            world.wait_for(mark)
    synchronize(device, world)


def warm_up(step, config, device, world=ALONE):
    """Runs the warm-up steps, goes back to the initial weights, captures if asked to. Returns the seconds it took."""
    start = time.perf_counter()
    context = contextlib.nullcontext()
    if config.graph:  # what is captured must have been warmed up off the default stream
        context = torch.cuda.stream(torch.cuda.Stream())
    data = DATA[config.data](dataclasses.replace(config, seed=(config.seed + 1) % 2**32), world)
    with context:
        for index in range(config.warmup_steps):
            step.load(*data.next_batch())
            step.run()
            synchronize(device, world)
            print(f"warm-up {index + 1}/{config.warmup_steps} | {time.perf_counter() - start:.1f} s", flush=True)
    if config.warmup_steps:
        step.restart()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if config.graph:
        obstacle = capture_obstacle(world)
        if obstacle:
            print(f"Note: --graph is left out: messages cannot be captured here ({obstacle})")
            step.config = dataclasses.replace(config, graph=False)
        else:
            step.capture(one_graph=config.timing == "step")
    synchronize(device, world)
    return time.perf_counter() - start


def capture_obstacle(world):
    """Why messages between processes cannot be captured in a graph, in words, or None if they can."""
    if world.size == 1:
        return None
    sent, received = torch.zeros(1, device="cuda"), torch.zeros(world.size, device="cuda")
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            all_gather(received, sent, async_op=True).wait()
        reason = None
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    return next(filter(None, world.gather(reason)), None)


def train(step, data, config, device, records, world=ALONE):
    """Trains for num_steps steps, or until the run diverges, and appends a StepRecord for each."""
    in_turn = train_in_phases if config.timing == "phases" else train_in_one_window
    in_turn(step, data, config, device, records, world)


def summarize(step, data, config, device, records):
    """The measured figures of this process as a dict, printed by print_summary and written to the JSON."""
    batch = [record.batch_ms for record in records]
    mean_batch = statistics.fmean(batch)
    p20, p50, p80 = np.percentile(batch, [20, 50, 80]).tolist()
    missing = without_gradient(step.model)
    received, total = gradient_share(step.model, missing)
    peak = peak_tflops(device, precision_name(config, device))
    tflops_per_s = model_tflops(config) / (p50 / 1e3)
    return {
        "steps": len(records),
        "diverged": divergence(records),
        "final_loss": records[-1].loss,
        "first_loss": records[0].loss,
        "entropy": data.entropy,
        "samples_per_second": config.batch_size / mean_batch * 1e3,
        "tokens_per_second": config.tokens_per_step / mean_batch * 1e3,
        "batch_ms": {"mean": mean_batch, "p20": p20, "p50": p50, "p80": p80},
        "phase_ms": {name: statistics.fmean(r.phase_ms[name] for r in records) for name in records[0].phase_ms},
        "host_ms": statistics.median(record.host_ms for record in records),
        "peak_memory_mib": peak_memory_mib(device),
        "parameters": total,
        "parameters_with_gradient": received,
        "parameters_without_gradient": missing,
        "tflops_per_second": tflops_per_s,
        "mfu": tflops_per_s / peak if peak else None,
    }


def summarize_world(summary, step, world):
    """What several processes did together, from the summary of each."""
    exposed_ms = None
    if isinstance(summary["kernels"], dict):
        exposed_ms = summary["kernels"].pop("exposed_communication_ms")
    elif step.is_sharded and world.backend == "gloo":
        exposed_ms = world.waited_ms / summary["steps"]
    batch_ms = summary["batch_ms"]
    processes = world.gather(
        dict(
            rank=world.rank, host=platform.node(), batch_ms=batch_ms, exposed_communication_ms=exposed_ms,
            own_ms=None if exposed_ms is None else batch_ms["p50"] - exposed_ms,
            tokens_per_second=summary["tokens_per_second"], peak_memory_mib=summary["peak_memory_mib"],
        )
    )  # fmt: skip
    slowest = None
    if exposed_ms is not None:
        slowest, fastest = (choose(processes, key=lambda process: process["own_ms"]) for choose in (max, min))
        slowest = {"rank": slowest["rank"], "behind_ms": slowest["own_ms"] - fastest["own_ms"]}
        exposed_ms = max(process["exposed_communication_ms"] for process in processes)
    return {
        "size": world.size,
        "backend": world.backend,
        "tokens_per_second": world.size * min(process["tokens_per_second"] for process in processes),
        "exposed_communication_ms": exposed_ms,
        "slowest": slowest,
        "peak_memory_mib": max(process["peak_memory_mib"] or 0 for process in processes),
        "processes": processes,
    }


def print_world(summary):
    """Prints what summarize_world() found."""
    world = summary["world"]
    each = world["tokens_per_second"] / world["size"]
    print(f"Processes: {world['size']} over {world['backend']}; the figures above are those of rank 0")
    print(f"Throughput of all: {world['tokens_per_second']:,.0f} tokens/sec, {each:,.0f} a process")
    if world["slowest"]:
        print(f"Communication that was not hidden: {world['exposed_communication_ms']:.3f} ms a step")
        print("Slowest process: rank {rank}, {behind_ms:.3f} ms a step behind the fastest".format(**world["slowest"]))
    else:
        print("Communication that was not hidden: not measured")
    print(f"Peak memory of the fullest process: {world['peak_memory_mib']:.1f} MiB")


def print_summary(summary, config, device):
    """Prints what summarize() found, under labels that scripts read."""
    batch, phases = summary["batch_ms"], summary["phase_ms"]
    print()
    if summary["diverged"]:
        where = "Step {step}: the {quantity} is {value}".format(**summary["diverged"])
        print(f"{where}: the run diverged, no later step counts; try a lower --learning-rate, or see what --check says")
    floor = "the data's entropy" if config.data == "markov" else "ln(vocab): random tokens cannot be learnt"
    first = f"first {summary['first_loss']:.4f}; floor {summary['entropy']:.4f}, {floor}"
    print(f"Final loss: {summary['final_loss']:.4f} ({first})")
    print(f"Average training speed: {summary['samples_per_second']:.1f} samples/sec")
    print(f"Throughput: {summary['tokens_per_second']:,.0f} tokens/sec")
    percentiles = ", ".join(f"{name} {batch[name]:.3f}" for name in ("p20", "p50", "p80"))
    print(f"Average batch time: {batch['mean']:.3f} ms ({percentiles})")
    for name in ("forward", "backward", "optimizer"):
        time_ms = f"{phases[name]:.3f} ms" if name in phases else "not measured (--timing step)"
        print(f"Average {name} time: {time_ms}")
    if phases:
        together = sum(phases.values())
        print(f"Phases together: {together:.3f} ms, {100 * together / batch['mean']:.0f} % of the batch time")
    memory, whose = summary["peak_memory_mib"], " (whole process)" if device.type == "cpu" else ""
    print(f"Peak memory usage: {memory:.1f} MiB{whose}" if memory else "Peak memory usage: unknown")
    if device.type == "cuda":
        kernels = summary["kernels"]
        launch_bound = "launch-bound" if summary["host_ms"] > 0.8 * batch["p50"] else "not launch-bound"
        print(f"Host time to issue a step: {summary['host_ms']:.3f} ms of {batch['p50']:.3f} ms ({launch_bound})")
        counted = isinstance(kernels, dict)
        kernels = "{kernels} in {launches} launches".format(**kernels) if counted else f"not counted, {kernels}"
        print(f"Kernels a step: {kernels}")
    received, total = summary["parameters_with_gradient"], summary["parameters"]
    print(f"Parameters with a gradient: {received:,} of {total:,} ({100 * received / total:.1f} %)")
    mfu = f", {100 * summary['mfu']:.1f} % of the {precision_name(config, device)} peak" if summary["mfu"] else ""
    print(f"Model arithmetic: {summary['tflops_per_second']:.2f} TFLOP/s{mfu}")
    print(f"Compilation and warm-up: {summary['warmup_seconds']:.1f} s, not counted above")
    if None not in summary["gpu"]["busy"].values():
        state = "{power_w:.0f} W, {clock_mhz:.0f} MHz, {temperature_c:.0f} degrees C".format(**summary["gpu"]["busy"])
        print(f"GPU after the last step: {state}")
    if summary["world"]:
        print_world(summary)


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def environment(device):
    """What a result depends on besides the configuration."""
    git = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None  # not a checkout, or no git
    return dict(
        device=device.name, arch=device.arch, python=platform.python_version(), torch=torch.__version__,
        triton=getattr(triton, "__version__", None), cuda=torch.version.cuda, hip=torch.version.hip,
        driver=driver_version(device), numpy=np.__version__, commit=commit,
    )  # fmt: skip


def print_configuration(config, device, step):
    """Prints what runs where, read from the objects in use."""
    software = [f"PyTorch {torch.__version__}"]
    software += [f"HIP {torch.version.hip}"] if torch.version.hip else []
    software += [f"CUDA {torch.version.cuda}"] if torch.version.cuda else []
    software += [f"Triton {triton.__version__}" if triton else "no Triton"]
    parameters = count_weights(step.model.parameters())
    processes = f" on each of {step.world.size} processes" if step.world.size > 1 else ""
    print(f"Device: {device.name} ({device.arch}); {', '.join(software)}")
    print(
        f"Model: hidden {config.hidden_dim}, {config.num_layers} layers, {config.num_heads} heads "
        f"({config.num_kv_heads} of K and V), ffn {config.ffn_dim}, vocab {config.vocab_size}: "
        f"{parameters:,} parameters"
    )
    print(
        f"Training: batch {config.batch_size} x {config.seq_len} tokens{processes}, {config.num_steps} steps, "
        f"{precision_name(config, device)}, {config.data} data, seed {config.seed}"
    )
    reason = triton_obstacle(device, config.use_amp) if config.impl == "triton" else None
    print(f"Implementation: {step.implementation}" + (f" (not triton: {reason})" if reason else ""))
    for name, operation in used_operations(step.model).items():
        print(f"    {name:13} {operation_name(operation)}")
    shared = f", shared by {step.world.size} processes" if step.is_sharded else ""
    print(f"    {'optimizer':13} {type(step.optimizer).__name__}{shared}")
    for line in inert_flags(config, device, step.implementation, step.world):
        print(f"Note: {line}")
    if config.bugs:
        print("Mistakes brought back: " + ", ".join(flag_of(name) for name in config.bugs))
    print(flush=True)


def used_operations(model):
    """{name: operation} of what the model calls."""
    return {name: operation for name, operation in model.operations._asdict().items() if operation}


def operation_name(operation):
    """Such as triton_attention, or triton_attention with noncontiguous_kv."""
    if isinstance(operation, functools.partial):
        return f"{operation.func.__name__} with {', '.join(operation.keywords['bugs'])}"
    return operation.__name__


def inert_flags(config, device, implementation, world=ALONE):
    """A line for each flag that changes nothing here."""
    if config.shard and world.size == 1:
        yield f"--shard {config.shard} has no effect on one process: start several with torchrun"
    if implementation != "triton":
        for name in ("noncontiguous_kv", "triton_matmul_swiglu", "severed_autograd"):
            if getattr(config, name):
                yield f"{flag_of(name)} has no effect: it concerns the Triton kernels, not {implementation}"
    if config.unsynced_timing and device.type == "cpu":
        yield "--unsynced-timing has no effect on a CPU, where nothing runs behind the host's back"
    if config.unsynced_timing and config.timing == "step":
        yield "--unsynced-timing changes little with --timing step, which does not time phases"
    if config.matmul_precision == "high" and dot_precision(device) != "tf32":
        reason = "PyTorch for ROCm needs HIPBLASLT_ALLOW_TF32=1" if tf32_available(device) else "there is no TF32"
        yield f"--matmul-precision high has no effect on {device.arch}: {reason}"
    if config.compile and implementation == "triton":
        yield "--compile finds nothing to fuse: the operations are Triton kernels already"


@contextlib.contextmanager
def scratch_beside(path):
    """A temporary folder next to path: what is moved from there into place is whole. A full disk ends in one line."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".", suffix=".tmp") as scratch:
            yield Path(scratch)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}): free space or give another path") from error


def dump_json(folder, result):
    """The path of a new JSON file in folder. JSON has no NaN: it becomes null."""
    path = folder / "result.json"
    result = json.loads(json.dumps(result), parse_constant=lambda name: None)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def move_to_free(source, path):
    """Moves a file; FileExistsError if there is one at path already."""
    try:
        os.link(source, path)
    except OSError:  # it exists, or there are no hard links here: FAT, some network file systems
        path.touch(exist_ok=False)
        os.replace(source, path)


def write_new_json(folder, stem, result):
    """Writes stem.json, or stem_1.json and so on, over no other file, whole or not at all. Returns its path."""
    path = folder / f"{stem}.json"
    with scratch_beside(path) as scratch:
        source = dump_json(scratch, result)
        for number in itertools.count(1):
            try:
                move_to_free(source, path)
                return path
            except FileExistsError:
                path = folder / f"{stem}_{number}.json"


def writable_folder(flag, name):
    """The folder as a Path, proved writable before anything is computed, but not created before there is a result."""
    if not name:
        raise UsageError(f"{flag} '' names no folder: give one")
    try:
        folder = Path(os.path.abspath(name))
        existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        with tempfile.TemporaryDirectory(dir=existing, prefix=".", suffix=".tmp") as scratch:
            Path(scratch, folder.relative_to(existing)).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{flag} {name} cannot be written to ({error.strerror}): give another folder") from error
    return Path(name)


def validate_on_device(config, device, world=ALONE):
    """UsageError for what this device, or several of them, cannot do."""
    if world.size > 1:
        is_triton = select_operations(config, device)[0] == "triton"
        if config.shard == "full" and is_triton:
            raise UsageError("--shard full is for --impl torch and sdpa: --impl triton shards the optimizer's state")
        if config.shard == "optimizer" and not is_triton:
            raise UsageError("--shard optimizer is for --impl triton: leave it out, or give --shard full")
        if config.graph and not is_triton:
            raise UsageError("--graph with several processes is for --impl triton: drop --graph")
    if config.graph and device.type == "cpu":
        raise UsageError("--graph needs a GPU, and the device is a CPU: drop --graph (or --stage 8)")
    if config.graph and config.warmup_steps == 0:
        why = "--no-warmup" if config.no_warmup else "--warmup-steps 0"
        raise UsageError(f"--graph captures a step that has run before, and {why} forbids that: drop one of the two")
    if config.use_amp and device.arch == "sm_75":
        raise UsageError("--use-amp needs bf16, which sm_75 does not have: drop --use-amp")
    if INTERPRETED and device.type == "cuda" and config.impl == "triton":
        raise UsageError("TRITON_INTERPRET=1 runs the kernels on the CPU: unset it, or give --device cpu")


def train_and_report(config, world=ALONE):
    """What the configuration asks for, from the check to the profile. Returns the exit code."""
    device = select_device(config.device, world.local_rank)
    world.join(config, device)
    validate_on_device(config, device, world)
    output_folder = writable_folder("--output-dir", config.output_dir)
    profile_folder = writable_folder("--profile", config.profile) if config.profile is not None else None
    require_host_memory(config, device)
    torch.set_float32_matmul_precision(config.matmul_precision)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the library is loaded
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # our kernels write all that they allocate
    if config.check and not check_gradients(config, device, world):
        return 1
    gc.collect()  # the models of the check: their Functions and gradients refer to each other
    step = TrainStep(config, device, world)
    data = DATA[config.data](config, world)
    print_configuration(config, device, step)
    records, exit_code, idle = [], 0, gpu_state(device)
    try:
        warmup_seconds = warm_up(step, config, device, world)
        if attached_profiler():
            step.show_ranges()
        world.stop_together()
        train(step, data, config, device, records, world)
    except KeyboardInterrupt:
        exit_code = 130
        print(f"\nInterrupted after {len(records)} of {config.num_steps} steps.")
        if not records:
            return world.abandon(exit_code)
    gpu = {"idle": idle, "busy": gpu_state(device)}  # straight after the measured steps
    summary = summarize(step, data, config, device, records) | {"warmup_seconds": warmup_seconds, "gpu": gpu}
    if summary["diverged"]:
        exit_code = exit_code or 1
    summary["kernels"] = count_kernels(step, device) if exit_code == 0 else "the run ended early"
    summary["world"] = summarize_world(summary, step, world) if world.size > 1 else None
    print_summary(summary, config, device)
    result = {
        "implementation": step.implementation,
        "precision": precision_name(config, device),
        "operations": {name: operation_name(operation) for name, operation in used_operations(step.model).items()},
        "config": dataclasses.asdict(step.config),  # what ran: see warm_up()
        "environment": environment(device),
        "summary": summary,
        "steps": [dataclasses.asdict(record) for record in records],
    }
    if world.rank == 0:
        stem = f"tiny_llama_v3_{step.implementation}_{datetime.now():%Y%m%d_%H%M%S}"
        path = write_new_json(output_folder, stem, result)
        print(f"Results: {path}")
    if profile_folder and exit_code == 0:
        write_profile(step, device, profile_folder / f"rank_{world.rank}" if world.size > 1 else profile_folder)
    return exit_code


LOST_PEER = "Connection (closed|reset|refused)|Timed out waiting|Broken pipe|NCCL"  # what gloo and NCCL say


def remedy(error, config):
    """What the user can do about an error of PyTorch or Triton, in one line; None where the mistake is ours."""
    # On a CPU, PyTorch has no exception of its own for memory, nor for a tensor whose size takes more than 64 bits.
    memory = "out of memory|can't allocate memory|Storage size calculation overflowed"
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or re.search(memory, str(error)):
        sizes = ("batch_size", "seq_len", "num_layers", "hidden_dim", "ffn_dim", "vocab_size")
        lowerable = [name for name in sizes if getattr(config, name) > LEAST[name]]
        given = ", ".join(f"{flag_of(name)} {getattr(config, name)}" for name in lowerable)
        return f"out of memory with {given}: lower one of them"
    if isinstance(error, getattr(dist, "DistError", ())) or re.search(LOST_PEER, str(error)):
        return f"another process has ended, or does not answer ({str(error).splitlines()[0]})"
    if re.search(r"No working C\+\+ compiler|Failed to find C compiler", str(error)):
        return (
            "Triton and --compile need a C and a C++ compiler, and found none: install gcc and g++, or set CC and CXX"
        )
    return None


def run(config, world=ALONE):
    """The exit code of train_and_report(); what the user can remedy becomes a UsageError."""
    try:
        exit_code = train_and_report(config, world)
        world.leave()
        return exit_code
    except (RuntimeError, MemoryError) as error:
        message = remedy(error, config)
        if message is None:
            raise
        raise UsageError(message) from error


def exit_code_of(run, program):
    """run(), where what ends it from outside takes one line or none, and no traceback."""
    try:
        try:
            return run()
        finally:
            print(end="", flush=True)  # a closed pipe shows here, not in the interpreter's last flush
    except UsageError as error:
        complain(program, error)
        return JOB.world.abandon(2)
    except KeyboardInterrupt:
        return JOB.world.abandon(130)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where that last flush may go
        if error.errno == errno.EPIPE:
            return 141
        complain(program, error)
        return 2


def complain(program, error):
    """One line about what ends the program. Of several processes the first has it, not those that it takes along."""
    world = JOB.world
    if world.size > 1 and ask(lambda: world.store.add("complaints", 1)) not in (1, None):
        return
    who = f"rank {world.rank}: " if world.size > 1 else ""
    print(f"{program}: error: {who}{error}", file=sys.stderr, flush=True)


def main(argv=None, program=None):
    """The exit code of a command line."""
    argv, program = sys.argv[1:] if argv is None else argv, program or sys.argv[0]

    def run_command_line():
        JOB.world = launched()
        return run(parse_config(argv, program), JOB.world)

    return exit_code_of(run_command_line, Path(program).name)


def run_as_program():
    """main(), and what concerns the whole process: signals, and an end that waits for nobody."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        exit_code = main()
    except Exception:
        if JOB.world.size == 1:
            raise
        traceback.print_exc()
        JOB.world.abandon(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # there is nothing left to interrupt
    return exit_code


if __name__ == "__main__":
    sys.exit(run_as_program())
