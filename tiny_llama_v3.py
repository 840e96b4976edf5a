#!/usr/bin/env python3
"""Train a tiny LLaMA on Triton kernels, forward and backward, and report what a training step costs.

    python tiny_llama_v3.py --batch-size 8 --seq-len 128 --num-steps 20
    python tiny_llama_v3.py --use-amp --graph          bf16, the step captured in CUDA/HIP graphs
    python tiny_llama_v3.py --data markov              data that can be learnt, and the lowest loss possible
    python tiny_llama_v3.py --data README_WORKSHOP.md  the bytes of a text, of which it then continues a passage
    python tiny_llama_v3.py --impl sdpa --compile      the same model, weights and data on PyTorch alone
    python tiny_llama_v3.py --check --num-steps 1      compare loss and gradients with PyTorch in higher precision
    python tiny_llama_v3.py --stage 4                  a mistake of the workshop (--list-stages lists them)
    torchrun --standalone --nproc_per_node=4 tiny_llama_v3.py --use-amp --graph

A run prints one line a step and a summary, and writes both to a JSON file whose path it prints last.
The file needs torch, triton and numpy, and runs without the rest of the project. The modules in tiny_llama/ add what
only some runs need: data to learn, several processes, FP8, profiles, peaks and sensors of GPUs, notes about flags.
Exit codes: 0 success; 1 a check failed, or the run diverged (a loss or gradient norm is not finite); 2 the request
cannot be met or a file cannot be written (one line gives the reason); 130 interrupted by Ctrl-C or SIGTERM (the steps
done so far are saved); 141 the reader of the output closed the pipe.
"""

import argparse
import collections
import contextlib
import dataclasses
import errno
import functools
import gc
import importlib
import itertools
import json
import math
import os
import platform
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

try:
    import numpy as np
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
except ModuleNotFoundError as error:
    reason = f"tiny_llama_v3 needs numpy and torch, and {error.name} is missing: run make, or pip install numpy torch"
    raise (SystemExit if __name__ == "__main__" else ModuleNotFoundError)(reason) from None

# Fused multiply-adds, which are the default up to Triton 3.9: without them kernels have 3 to 8 % more instructions.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
try:
    import triton
    import triton.language as tl
except ImportError:  # macOS, Windows, a CPU-only PyTorch: the kernels remain plain functions that nothing calls
    triton = None
    tl = type("tl", (), {"constexpr": float})
jit = triton.jit if triton else lambda kernel=None, **options: kernel or (lambda function: function)
try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4
    TensorDescriptor = None

__version__ = "3.0.0"
__all__ = (
    "Config FlatAdamW TinyLlamaTriton TrainStep TransformerBlock TritonAttention TritonRMSNorm TritonSwiGLU UsageError "
    "main triton_attention triton_cross_entropy triton_embedding triton_linear triton_rmsnorm triton_swiglu"
).split()


class UsageError(Exception):
    """The request cannot be met. The message names the flag, the values and the remedy."""

    exit_code = 2


def companion(name, needed_for=None):
    """Import tiny_llama/<name>.py. If it is missing, return None or raise UsageError about what it is needed for."""
    # It imports this script by its name. A program is called __main__, and would be loaded a second time.
    sys.modules.setdefault("tiny_llama_v3", sys.modules[__name__])
    try:
        return importlib.import_module(f"tiny_llama.{name}")
    except ModuleNotFoundError as error:
        if error.name not in ("tiny_llama", f"tiny_llama.{name}"):
            raise
        if needed_for is None:
            return None
        raise UsageError(f"{needed_for} needs tiny_llama/{name}.py: copy tiny_llama/ beside the script") from error


# ----------------------------------------------------------------------------------------------------------------------
# The mistakes that flags bring back. The code of each is a few lines marked BUG; none is active by default.

# A mistake of the published workshop, or one that is easily made: its stages, what it does, and how it shows.
Bug = collections.namedtuple("Bug", "stages effect sign")
BUGS = {
    "no_init": Bug((1,), "PyTorch's default initialization under a tied head",
        "the first loss is about the hidden size instead of ln(vocab)"),
    "noncontiguous_kv": Bug((1, 2), "K and V reach the attention kernel with a badly strided head dimension",
        "attention kernels slower at the same result, most in bf16 at a longer sequence"),
    "unsynced_timing": Bug((1, 2, 3), "host clocks without a device sync",
        "the phases sum to a fraction of the step"),
    "triton_matmul_swiglu": Bug((1, 2, 3, 4), "one program per output element, each reducing over the hidden dimension",
        "the SwiGLU kernel takes most of the device time"),
    "severed_autograd": Bug((6,), "kernels called outside autograd",
        "backward is almost free, and only the tied embedding receives a gradient"),
    "no_warmup": Bug((7,), "the first steps, kernel compilation included, are averaged in",
        "the mean step is far above the median"),
    "fp8_wide_margin": Bug((), "FP8 scales with a margin of 16,384 against overflow",
        "the loss falls as it should for some hundred steps, with gradients that are far off"),
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
    """Return the fields of Config that a stage sets, {field: value}."""
    flags = {name: True for name, bug in BUGS.items() if stage in bug.stages}
    return flags | ({"graph": True} if stage == 8 else {})


# ----------------------------------------------------------------------------------------------------------------------
# Configuration: a frozen dataclass, from whose fields the command line is generated

LARGEST, FP32 = 2**31 - 1, torch.finfo(torch.float32)  # kernels count in 32 bits, the optimizer computes in fp32
GROUPS = dict(hidden_dim="model", batch_size="training", impl="implementation", shard="several processes")
GROUPS |= dict(timing="measuring", stage="mistakes, brought back")  # the first fields of the groups of --help


def option(default, help, least=None, most=LARGEST, **keywords):
    """A field of Config. least and most bound a number; keywords are those of argparse's add_argument()."""
    return dataclasses.field(default=default, metadata=dict(help=help, least=least, most=most, keywords=keywords))


@dataclasses.dataclass(frozen=True)
class Config:
    """What a run does. Raises UsageError for values that are out of range or contradict each other."""

    hidden_dim: int = option(512, "width of the residual stream", 1)
    num_layers: int = option(8, "transformer blocks", 1)
    num_heads: int = option(8, "query heads; each has hidden-dim / num-heads dimensions", 1)
    num_kv_heads: int | None = option(None, "key/value heads (grouped queries); default: half of --num-heads", 1)
    ffn_dim: int | None = option(None, "width of the feed-forward layer; default: 4 x hidden-dim", 1)
    vocab_size: int | None = option(None, "distinct tokens; default: 1000, or the 256 bytes of a file", 2)
    rope_theta: float = option(10000.0, "base of the rotary embedding's frequencies", 1.0, FP32.max)
    norm_eps: float = option(1e-5, "added to the mean square in norms", FP32.tiny, FP32.max)
    untied_head: bool = option(False, "give the head weights of its own instead of the embedding's")

    batch_size: int = option(8, "sequences a step, of each process", 1)
    seq_len: int = option(256, "tokens a sequence", 1)
    num_steps: int = option(50, "training steps that are measured", 1)
    warmup_steps: int = option(3, "steps before the measured ones; weights and optimizer are restored after them", 0)
    learning_rate: float = option(3e-4, "AdamW's learning rate, constant", FP32.tiny, FP32.max)
    use_amp: bool = option(False, "compute in bf16, with fp32 master weights and optimizer state")
    fp8: bool = option(False, "as --use-amp, and multiply by the weights of the layers in FP8")
    data: str = option("random", "random tokens, a chain of known entropy, or a file", metavar="random|markov|FILE")
    seed: int = option(42, "of weights and data", 0, 2**32 - 1)

    impl: str = option("triton", "our kernels; plain PyTorch; its fused attention", choices=("triton", "torch", "sdpa"))
    device: str = option("auto", "where to run (cuda is also the name of an AMD GPU)", choices=("auto", "cuda", "cpu"))
    compile: bool = option(False, "torch.compile the model")
    graph: bool = option(False, "capture the step in CUDA/HIP graphs and replay them")
    matmul_precision: str = option("highest", "fp32 matmuls in full fp32 or in TF32", choices=("highest", "high"))
    deterministic: bool = option(False, "ask PyTorch for deterministic algorithms (our kernels always are)")

    shard: str | None = option(None, "what processes share: optimizer state, or all", choices=("optimizer", "full"))
    comm_timeout: int = option(120, "how long processes wait for each other", 1, metavar="SECONDS")

    timing: str = option("phases", "time each phase, with a sync a step; or sync once", choices=("phases", "step"))
    check: bool = option(False, "first compare loss and gradients with PyTorch in higher precision")
    profile: str | None = option(None, "folder for a trace, a kernel table and a GPU's memory snapshot", metavar="DIR")
    output_dir: str = option("triton_profiles", "folder for the JSON file of the run", metavar="DIR")

    stage: int | None = option(None, "set the flags of a stage of the workshop (--list-stages)", choices=tuple(STAGES))
    no_init: bool = option(False, BUGS["no_init"].effect)
    noncontiguous_kv: bool = option(False, BUGS["noncontiguous_kv"].effect)
    unsynced_timing: bool = option(False, BUGS["unsynced_timing"].effect)
    triton_matmul_swiglu: bool = option(False, BUGS["triton_matmul_swiglu"].effect)
    severed_autograd: bool = option(False, BUGS["severed_autograd"].effect)
    no_warmup: bool = option(False, BUGS["no_warmup"].effect)
    fp8_wide_margin: bool = option(False, BUGS["fp8_wide_margin"].effect)

    def __post_init__(self):
        set_field = functools.partial(object.__setattr__, self)  # the dataclass is frozen
        if self.num_kv_heads is None:
            set_field("num_kv_heads", self.num_heads // (2 if self.num_heads % 2 == 0 else 1))
        if self.ffn_dim is None:
            set_field("ffn_dim", 4 * self.hidden_dim)
        if self.vocab_size is None:
            set_field("vocab_size", 1000 if self.data in ("random", "markov") else 256)  # bytes
        if self.fp8:
            set_field("use_amp", True)
        if self.stage is not None and self.stage not in STAGES:
            raise UsageError(f"--stage {self.stage} does not exist: choose one of {', '.join(map(str, STAGES))}")
        for name, value in stage_flags(self.stage).items():
            set_field(name, value)
        if self.no_warmup:  # BUG no_warmup: nothing runs before the clock starts
            set_field("warmup_steps", 0)
        for field in dataclasses.fields(self):
            value, least, most = getattr(self, field.name), field.metadata["least"], field.metadata["most"]
            if least is not None and not least <= value <= most:
                raise UsageError(f"{flag_of(field.name)} {value} is out of range: give {least} to {most}")
        hidden, heads, kv_heads = self.hidden_dim, self.num_heads, self.num_kv_heads
        if hidden % heads:
            remedy = f"try --hidden-dim {math.ceil(hidden / (2 * heads)) * 2 * heads}"
            raise UsageError(f"--hidden-dim {hidden} is not divisible by --num-heads {heads}: {remedy}")
        if heads % kv_heads:
            remedy = f"try --num-kv-heads {math.gcd(heads, kv_heads)}"
            raise UsageError(f"--num-heads {heads} is not divisible by --num-kv-heads {kv_heads}: {remedy}")
        if self.head_dim % 2 or self.head_dim > 128:
            heads = f"--hidden-dim {hidden} / --num-heads {heads} gives {self.head_dim} dimensions a head"
            raise UsageError(f"{heads}: they must be even and at most 128; change one of the two")

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
        return tuple(name for name in BUGS if getattr(self, name))


def flag_of(field_name):
    """Convert num_steps to --num-steps."""
    return "--" + field_name.replace("_", "-")


def parse_config(argv, program):
    """Return the Config of a command line. A program called v3_stage3_anything.py implies --stage 3."""

    def refuse(message):  # where argparse would print the usage and exit
        raise UsageError(f"{message} (--help lists the options)")

    name, layout = Path(program).name, argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(name, description=__doc__, formatter_class=layout, allow_abbrev=False)
    parser.error = refuse
    for field in dataclasses.fields(Config):
        if field.name in GROUPS:
            group = parser.add_argument_group(GROUPS[field.name])
        kind = {int | None: int, str | None: str}.get(field.type, field.type)
        keywords = field.metadata["keywords"] | (dict(action="store_true") if kind is bool else dict(type=kind))
        shown_default = "" if field.default in (None, False) else f" (default: {field.default})"
        help = field.metadata["help"].replace("%", "%%") + shown_default
        group.add_argument(flag_of(field.name), default=field.default, help=help, **keywords)
    group.add_argument("--list-stages", action="store_true", help="print the stages and their signs, and exit")
    args = vars(parser.parse_args(argv))
    if args.pop("list_stages"):
        companion("notes", "--list-stages").list_stages()
        parser.exit()
    link = re.match(r"v3_stage(\d+)_", name)
    if link:
        if args["stage"] not in (None, int(link[1])):
            raise UsageError(f"--stage {args['stage']} contradicts the name {name}: drop one of the two")
        args["stage"] = int(link[1])
    return Config(**args)


# ----------------------------------------------------------------------------------------------------------------------
# The device, and how kernels are launched on it. Every difference between vendors is in this section.

LOG2_E = tl.constexpr(math.log2(math.e))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own variable: kernels run on the CPU, in Python


@dataclasses.dataclass(frozen=True)
class Device:
    """What launch configurations and reports depend on."""

    type: str  # "cuda" (NVIDIA and AMD alike) or "cpu"
    name: str
    arch: str  # "sm_90", "gfx942", ... or "cpu"
    num_sms: int  # multiprocessors, or compute units
    warp_size: int

    @property
    def family(self):
        """The devices that share the rows of ATTENTION_TILES."""
        if self.arch.startswith("gfx"):
            return "amd"
        return "interpreter" if self.type == "cpu" else "hopper" if self.arch == "sm_90" else "nvidia"


@functools.cache
def get_device(type):
    """Return the current Device of type "cuda" or "cpu"."""
    if type == "cpu":
        return Device("cpu", platform.processor() or platform.machine(), "cpu", num_sms=2, warp_size=32)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    # torch.version names the vendor. The capability does not: it is (9, 4) on an MI300.
    is_amd = torch.version.hip is not None
    arch = properties.gcnArchName.split(":")[0] if is_amd else f"sm_{properties.major}{properties.minor}"
    return Device("cuda", properties.name, arch, properties.multi_processor_count, getattr(properties, "warp_size", 32))


def select_device(requested):
    """Return the Device for --device; UsageError if there is none."""
    if requested == "cuda" and not torch.cuda.is_available():
        build = torch.version.hip or torch.version.cuda
        reason = f"PyTorch {torch.__version__} sees none" if build else f"PyTorch {torch.__version__} is a CPU build"
        raise UsageError(f"--device cuda: there is no GPU here ({reason}): use --device cpu, or install a GPU build")
    return get_device("cpu" if requested == "cpu" or not torch.cuda.is_available() else "cuda")


def triton_obstacle(device, use_amp=False):
    """Return the reason why Triton kernels cannot run on the device, or None."""
    if triton is None:
        return "Triton is not installed"
    if device.type == "cpu" and not INTERPRETED:
        return "there is no GPU (TRITON_INTERPRET=1 interprets the kernels)"
    if device.type == "cpu" and use_amp:
        return "Triton's interpreter multiplies bf16 matrices wrongly"
    return None


def precision_name(config, device):
    """Return the type in which matrices are multiplied, with the library's settings as they are now."""
    low = "fp8" if config.fp8 else "bf16"
    return low if config.use_amp else "tf32" if dot_precision(device) == "tf32" else "fp32"


def tf32_available(device):
    """Whether matrix units can round fp32 operands to TF32."""
    return device.arch == "gfx942" or device.arch.startswith("sm_") and int(device.arch[3:]) >= 80


def dot_precision(device):
    """Return tl.dot's input_precision for fp32 operands, the same as that of the library's matmuls."""
    try:  # to read it from the library, because on AMD it keeps to fp32 unless HIPBLASLT_ALLOW_TF32=1
        allowed = torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # PyTorch does not tell if it was set by the name that it has for this from 2.9 on
        allowed = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if allowed and tf32_available(device) else "ieee"


def cdiv(a, b):
    """ceil(a / b) of integers."""
    return -(-a // b)


def next_power_of_2(n):
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


# Tiles. A program has num_warps * warp_size threads, 1024 at most; an AMD wave has 64 threads, so it takes half as many
# warps. The operands of a product must fit in shared memory: 64 KiB on gfx90a and gfx942, 227 on sm_90.
# "Measured" tiles are the fastest of those tried on an H200. "Compiled" tiles, for devices that were not at hand, are
# chosen by the registers, spills and occupancy that the compiler reports (docs/compiled_kernels.md) and, on AMD, by the
# cycles of the loops as well (docs/kernels.md).
NormTile = collections.namedtuple("NormTile", "rows cols warps programs")
AttentionTile = collections.namedtuple("AttentionTile", "BLOCK_M BLOCK_N num_warps num_stages options", defaults=({},))
PASSES = ("forward", "dq", "dkdv", "fused")
# (architecture or family, operands of tl.dot, largest head dimension): a tile for each of PASSES; the first row counts.
ATTENTION_TILES = {
    # Compiled: 16 rows of a product for each wave where registers allow it. Above 256 registers one wave fills a SIMD.
    ("amd", "half", 32): ((128, 32, 4, 1), (64, 32, 4, 1), (32, 64, 4, 1), (32, 64, 4, 1)),
    ("gfx950", "half", 64): ((128, 128, 4, 1), (128, 32, 4, 1), (32, 128, 4, 1), (32, 64, 4, 1)),
    ("amd", "half", 64): ((128, 64, 4, 1), (128, 32, 4, 1), (32, 128, 4, 1), (32, 64, 4, 1)),
    ("gfx950", "half", 128): ((128, 64, 4, 1), (128, 32, 4, 1), (32, 64, 4, 1), (32, 32, 4, 1)),
    ("amd", "half", 128): ((128, 32, 4, 1), (128, 32, 4, 1), (32, 64, 4, 1), (32, 32, 4, 1)),
    ("amd", "any", 64): ((64, 32, 4, 1), (64, 32, 4, 1), (16, 64, 4, 1), (32, 32, 4, 1)),
    ("amd", "any", 128): ((64, 16, 4, 1), (64, 16, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1)),
    # Measured. One wgmma instruction takes 64 rows. The fused pass is too short for its loads to fill a pipeline.
    ("hopper", "half", 64): ((64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 1)),
    ("hopper", "half", 128): ((64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 3), (64, 64, 4, 1)),
    # Measured. TF32 instructions take 64 rows. Full fp32 has no such instructions: half the rows took 0.7 of the time.
    ("hopper", "tf32", 64): ((64, 32, 4, 1),) * 4,
    ("hopper", "ieee", 64): ((32, 32, 4, 1), (32, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
    ("hopper", "any", 128): ((32, 32, 4, 1),) * 4,
    # Compiled for sm_80: 8 warps share rows that would spill with 4.
    ("nvidia", "half", 64): ((64, 64, 4, 2), (64, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 1)),
    ("nvidia", "half", 128): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 64, 8, 1)),
    ("nvidia", "any", 128): ((32, 32, 8, 1),) * 4,
    ("interpreter", "any", 128): ((32, 32, 4, 1),) * 4,
}  # fmt: skip
# (family, bytes of an element, head dimension) for which "dq" loads by the copy engine, through tensor descriptors:
# queries stay in registers, and shared memory has room for a third stage. Measured: 0.74 to 0.87 of the time.
DESCRIBED_TILES = {("hopper", 2, 128): (64, 64, 4, 3)}
LACK_BF16_ROUNDING = ("gfx90a", "gfx942")  # see rounded_like()
FUSED_BACKWARD_SEQ_LEN = 128  # up to here the backward pass is one launch: a second one costs more than it saves
# Elements that a program processes at a time, measured in bf16 beside half and twice as many.
NORM_FORWARD_ELEMENTS = 4096  # 2048 to 8192 are within 2 %
NORM_BACKWARD_ELEMENTS = 8192  # half takes 1.3 times as long, twice 2.6 times
COLUMN_SUM_TILE = (128, 16, 8)  # rows, columns, warps; 32 or 64 columns leave too few programs: 1.2 times as long
ROPE_BLOCK = 1024  # within 1 % of the fastest; 2048 takes 1.2 times as long for 1,024 tokens
SWIGLU_BLOCK = 1024  # 512 takes 1.1 to 1.2 times as long, 2048 as long, 4096 1.5 times for 1,024 tokens
CROSS_ENTROPY_BLOCK = 8192  # columns; a quarter takes 1.2 times as long
CROSS_ENTROPY_PER_THREAD = 16  # 32 take 1.05 times as long, 8 1.6 times
SCALE_BLOCK = 4096  # the factor is almost always 1, and then nothing is read
EMBEDDING_TILE = (1024, 1024)  # tokens compared at a time, columns; a quarter of the columns takes twice as long
ADAMW_BLOCK = 1024  # 256 to 4096 are within 3 %
GROUP_BYTES = 2**27  # of gradients in a LayerGroup: all layers of small (0.90 of the time), 2 of medium, 1 of large


@functools.cache
def norm_tile(n_rows, n_cols, backward, device_type, block_size=None):
    """The NormTile of rows of n_cols, of fewer elements than NORM_..._ELEMENTS where SMs would be idle."""
    device, cols = get_device(device_type), block_size or next_power_of_2(n_cols)
    fill = next_power_of_2(cdiv(n_rows, device.num_sms))
    rows = max(1, min((NORM_BACKWARD_ELEMENTS if backward else NORM_FORWARD_ELEMENTS) // cols, fill))
    if backward:  # on NVIDIA as many threads as on an AMD GPU: with half of them registers spill
        warps = min(max(4, cols // 2048) * (2 if device.family == "nvidia" else 1), 16)
        return NormTile(rows, cols, warps, min(cdiv(n_rows, rows), 2 * device.num_sms))  # which walk over several tiles
    warps = min(max(4, cols // 1024), 16) // (2 if device.family == "amd" else 1)
    return NormTile(rows, cols, warps, cdiv(n_rows, rows))


@functools.cache
def attention_tile(pass_name, itemsize, block_d, precision, device_type):
    """The AttentionTile of one of PASSES or "described dq", for elements of itemsize bytes and heads of block_d."""
    device = get_device(device_type)
    if pass_name == "described dq":
        return AttentionTile(*DESCRIBED_TILES[device.family, itemsize, block_d])
    operands = "half" if itemsize == 2 else precision
    # With matrix instructions of 32 x 32, four waves would compute parts of small tiles twice.
    options = {"matrix_instr_nonkdim": 16} if device.family == "amd" else {}
    for (row_device, row_operands, widest_head), tiles in ATTENTION_TILES.items():
        fits = row_operands in (operands, "any") and block_d <= widest_head
        if fits and row_device in (device.arch, device.family):
            return AttentionTile(*tiles[PASSES.index(pass_name)], options)
    raise ValueError(f"there is no attention tile for heads of {block_d} dimensions: 128 is the most")


LAUNCH_LOCK = threading.Lock()  # Triton's interpreter has one state for all threads
COMPILED, COMPILED_LIMIT = {}, 4096  # what launch() has compiled; emptied at the limit, as Triton still has it


def launch(kernel, grid, tensors, scalars, constants, num_warps=4, num_stages=2, **options):
    """kernel[grid](*tensors, *scalars, **constants), in the order of its parameters, in less of the host's time.
    scalars may be tuples, and a constant a named tuple of constants. At every call Triton inspects every argument, for
    20 to 60 us, and kernels run for 5 us. Here it is known what a compiled kernel depends on: scalars and constants,
    the tensors' types and alignments, and on AMD GPUs whether offsets in them fit in 31 bits. So it is called directly.
    """
    pointers = [t.data_ptr() for t in tensors]  # given numbers, the driver looks nothing up
    large = [t.untyped_storage().nbytes() >> 31 > 0 for t in tensors] if torch.version.hip else []
    kinds = (*[t.dtype for t in tensors], *[p & 15 for p in pointers], *large, tensors[0].get_device())
    key = id(kernel), kinds, scalars, *constants.values(), num_warps, num_stages, *options.values()
    compiled = COMPILED.get(key)
    if compiled is not None:
        compiled[(*grid, *(1,) * (3 - len(grid)))](*pointers, *scalars, *constants.values())
        return
    if len(COMPILED) >= COMPILED_LIMIT:
        COMPILED.clear()
    options |= dict(num_warps=num_warps, num_stages=num_stages)
    COMPILED[key] = launch_by_triton(kernel, grid, tensors, scalars, constants, **options)


def launch_by_triton(kernel, grid, tensors, scalars, constants, **options):
    """As launch(), by Triton, which inspects the arguments. Returns the compiled kernel, None if it is interpreted."""
    device = tensors[-1].device  # the first ones may be descriptors
    obstacle = triton_obstacle(get_device(device.type))
    if obstacle:
        raise RuntimeError(f"the Triton kernels cannot run on {device}: {obstacle}")
    with LAUNCH_LOCK:
        return kernel[grid](*tensors, *scalars, **as_constants(constants), **options)


def as_constants(constants):
    """{name: value}, the fields of named tuples made constants of the compiler."""
    return {n: v._make(map(tl.constexpr, v)) if isinstance(v, tuple) else v for n, v in constants.items()}


# ----------------------------------------------------------------------------------------------------------------------
# Kernels. Each operation has a forward kernel, a backward kernel, launchers, an autograd.Function, a public function
# triton_*, and a reference in plain PyTorch that --impl torch and the tests use. Arithmetic is in fp32; results are
# rounded once, when they are stored. There are no float atomics and no locks: a gradient to which many programs add is
# first written as partial sums, and one reduction adds these in a fixed order, so it has the same bits in every run.
# A kernel's docstring gives the shapes of the tensors that its pointers point to. Activations may have strides,
# parameters and tables are contiguous. Floating-point tensors of a call have one type of fp32, bf16 and fp16 unless
# stated; triton_* raise ValueError for other shapes and TypeError for other types. A launcher writes an output to the
# tensor that is given for it, else to a new one.

KERNEL_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


def expect(name, tensor, shape=None):
    """Raise ValueError if the tensor has another shape, TypeError if the kernels do not take its type."""
    if shape is not None and tensor.shape != torch.Size(shape):
        raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, and {tuple(shape)} is needed")
    if tensor.dtype not in KERNEL_DTYPES:
        raise TypeError(f"{name} is {tensor.dtype}, and the kernels compute in fp32: give fp32, bf16 or fp16")
    kind = "cuda" if tensor.is_cuda else "cpu"
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype
    if autocast != tensor.dtype:
        raise TypeError(f"{name} is {tensor.dtype} and torch.autocast to {autocast} is on: call the kernels outside it")


def expect_contiguous(**tensors):
    """Raise ValueError if a tensor is strided that a kernel reads as contiguous."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            strides = f"{name} of shape {tuple(tensor.shape)} has the strides {tensor.stride()}"
            raise ValueError(f"{strides}, and the kernel reads it as contiguous: give {name}.contiguous()")


def as_rows(x):
    """x (..., cols) as (rows, cols), copied only if its columns are strided or its rows are not evenly spaced."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def begin_backward(ctx, grad=None, overwrites=False):
    """What forward saved. Refuses a second derivative and, if the backward pass overwrites its inputs, a second run."""
    if grad is not None:
        expect("the gradient", grad)
    if torch.is_grad_enabled():
        raise RuntimeError(f"{ctx.name()} has no second derivative: call backward() without create_graph=True")
    if overwrites and getattr(ctx, "is_spent", False):
        raise RuntimeError(f"{ctx.name()} overwrites what forward saved: it can run only once")
    ctx.is_spent = True
    return ctx.saved_tensors  # to be read once, because torch.utils.checkpoint computes them again at each reading


def destination(node):
    """Where the backward pass under way wants the gradient of a weight, whose node is in ctx.next_functions.
    None: nowhere, as of a frozen weight. The weight: in its main_grad, which becomes its .grad. "autograd": autograd
    gets a tensor, to call hooks, to add it to a .grad that is another one, or to return it from autograd.grad().
    """
    try:
        is_wanted = node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad() asks for it
        return "autograd"
    weight = getattr(node, "variable", None)  # a leaf, even where torch.utils.checkpoint has saved a copy of it
    main_grad = getattr(weight, "main_grad", None)
    if not is_wanted or weight is not None and not weight.requires_grad:  # frozen since the forward pass
        return None
    if main_grad is None or weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return "autograd"
    return weight if weight.grad is None or weight.grad is main_grad else "autograd"


def parameter_gradient(ctx, index, weight, compute, *inputs):
    """What backward() returns for a weight, number index of forward()'s tensors. compute(place, accumulate, *inputs)
    writes its gradient to place or, with accumulate, adds it: after zero_grad() the first pass writes, others add.
    """
    target = destination(ctx.next_functions[index][0])
    if target == "autograd":
        place = weight.new_empty(weight.shape)
        compute(place, False, *inputs)
        return place
    if target is not None:
        compute(target.main_grad, target.grad is not None, *inputs)
        target.grad = target.main_grad
    return None


def weight_gradient(place, accumulate, out_grad, x):
    """place (..., N, K) (+)= out_grad (..., rows, N)^T @ x (..., rows, K), for parameter_gradient()."""
    product = torch.baddbmm if place.dim() == 3 else torch.addmm
    product(place, out_grad.mT, x, beta=int(accumulate), out=place)


# --- linear: the library's matmul. The Function writes the weight's gradient to where the optimizer reads it.


class LinearFunction(torch.autograd.Function):
    """See triton_linear."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, y_grad):
        x, weight = begin_backward(ctx, y_grad)
        y_grad = y_grad.reshape(-1, weight.shape[0])
        x_grad = (y_grad @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        return x_grad, parameter_gradient(ctx, 1, weight, weight_gradient, y_grad, x.reshape(-1, weight.shape[1]))


def triton_linear(x, weight):
    """x (..., K) @ weight (N, K)^T -> (..., N), in their type; of other shapes PyTorch reports an error."""
    expect("x", x)
    return LinearFunction.apply(x, weight)


# --- RMSNorm, fused with the addition to the residual stream before it (Zhang and Sennrich, arXiv:1910.07467)


@jit
def rmsnorm_kernel(
    x_ptr, branch_ptr, weight_ptr, residual_ptr, y_ptr, rstd_ptr, stride_x_row, stride_branch_row, n_rows, eps,
    N_COLS: tl.constexpr, HAS_BRANCH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """residual = x + branch;  y = residual * rstd * weight,  rstd = 1 / sqrt(mean(residual^2) + eps).
    x, branch, residual, y (n_rows, N_COLS), weight (N_COLS,), rstd (n_rows,) in fp32.  Grid: (blocks of rows,).
    A program processes BLOCK_ROWS rows, BLOCK_SIZE columns at a time. It reads a row longer than BLOCK_SIZE twice.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = rows < n_rows
    square_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    x = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], tl.float32)
    for start in range(0, N_COLS, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        mask = row_mask[:, None] & (cols < N_COLS)[None, :]
        # (BLOCK_ROWS, BLOCK_SIZE)
        x = tl.load(x_ptr + rows[:, None] * stride_x_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_BRANCH:
            branch = tl.load(branch_ptr + rows[:, None] * stride_branch_row + cols[None, :], mask=mask, other=0.0)
            residual = (x + branch.to(tl.float32)).to(residual_ptr.dtype.element_ty)
            tl.store(residual_ptr + rows[:, None] * N_COLS + cols[None, :], residual, mask=mask)
            x = residual.to(tl.float32)  # normalize the rounded value, which the backward pass will read
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
    Each program walks over tiles of rows, num_programs apart, and writes its sum of y_grad * n to its row of partial.
    """
    cols = tl.arange(0, BLOCK_SIZE)
    col_mask = cols < N_COLS
    weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
    weight_grad = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_ROWS), tl.num_programs(0)):
        rows = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        row_mask = rows < n_rows
        mask = row_mask[:, None] & col_mask[None, :]
        # (BLOCK_ROWS, BLOCK_SIZE)
        x = tl.load(x_ptr + rows[:, None] * stride_x_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        y_grad_ptrs = y_grad_ptr + rows[:, None] * stride_y_grad_row + cols[None, :]
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
    sums = tl.sum(total, axis=0)  # (BLOCK_COLS,)
    if ACCUMULATE:
        sums += tl.load(sum_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    tl.store(sum_ptr + cols, sums.to(sum_ptr.dtype.element_ty), mask=cols < n_cols)


def rmsnorm_forward(x, branch, weight, eps, block_size=None, y=None):
    """x, branch (rows, cols) with contiguous rows, weight (cols,) -> residual, y (rows, cols) and rstd (rows,) in fp32.
    If branch is None, residual is x itself. The kernel takes block_size columns at a time, by default the whole row.
    """
    expect_contiguous(weight=weight)
    (n_rows, n_cols), has_branch = x.shape, branch is not None
    rows, cols, warps, programs = norm_tile(n_rows, n_cols, False, x.device.type, block_size)
    y = x.new_empty(n_rows, n_cols) if y is None else y  # new_empty(x.shape) takes three times as long
    rstd = x.new_empty(n_rows, dtype=torch.float32)
    residual = x.new_empty(n_rows, n_cols) if has_branch else x
    tensors = x, branch if has_branch else x, weight, residual, y, rstd
    scalars = x.stride(0), branch.stride(0) if has_branch else 0, n_rows, eps
    constants = dict(N_COLS=n_cols, HAS_BRANCH=has_branch, BLOCK_ROWS=rows, BLOCK_SIZE=cols)
    launch(rmsnorm_kernel, (programs,), tensors, scalars, constants, num_warps=warps)
    return residual, y, rstd


def rmsnorm_backward(y_grad, residual_grad, x, weight, rstd, x_grad=None, partial=None):
    """y_grad, residual_grad (or None), x = forward's residual, (rows, cols) with contiguous rows, forward's rstd ->
    x_grad, residual_grad included, and partial (programs, cols) in fp32, whose column sums are the weight's gradient.
    """
    n_rows, n_cols = x.shape
    rows, cols, warps, programs = norm_tile(n_rows, n_cols, True, x.device.type)
    x_grad = x.new_empty(n_rows, n_cols) if x_grad is None else x_grad
    partial = x.new_empty(programs, n_cols, dtype=torch.float32) if partial is None else partial
    constants = dict(N_COLS=n_cols, HAS_RESIDUAL_GRAD=residual_grad is not None, BLOCK_ROWS=rows, BLOCK_SIZE=cols)
    residual_grad = y_grad if residual_grad is None else residual_grad
    tensors = y_grad, residual_grad, x, weight, rstd, x_grad, partial
    scalars = y_grad.stride(0), residual_grad.stride(0), x.stride(0), n_rows
    launch(rmsnorm_backward_kernel, (programs,), tensors, scalars, constants, num_warps=warps)
    return x_grad, partial


def column_sums(place, accumulate, partial):
    """place (..., cols) (+)= the column sums of partial (..., rows, cols), for parameter_gradient()."""
    (n_rows, n_cols), (rows, cols, warps) = partial.shape[-2:], COLUMN_SUM_TILE
    grid, scalars = (cdiv(n_cols, cols), place.numel() // n_cols), (place.stride(0), n_rows, n_cols)
    constants = dict(ACCUMULATE=accumulate, BLOCK_ROWS=rows, BLOCK_COLS=cols)
    launch(column_sum_kernel, grid, (partial, place), scalars, constants, num_warps=warps)


class RMSNormFunction(torch.autograd.Function):
    """See triton_rmsnorm."""

    @staticmethod
    def forward(ctx, x, branch, weight, eps):
        ctx.has_branch = branch is not None
        residual, y, rstd = rmsnorm_forward(as_rows(x), as_rows(branch) if ctx.has_branch else None, weight, eps)
        ctx.save_for_backward(residual, weight, rstd)
        ctx.set_materialize_grads(False)  # an output that nothing uses, as the last norm's residual, gets None
        return y.view_as(x), residual.view_as(x) if ctx.has_branch else x

    @staticmethod
    def backward(ctx, y_grad, residual_grad):
        if y_grad is None:  # only the residual was used
            return residual_grad, residual_grad if ctx.has_branch else None, None, None
        residual, weight, rstd = begin_backward(ctx, y_grad)
        residual_rows = None if residual_grad is None else as_rows(residual_grad)
        x_grad, partial = rmsnorm_backward(as_rows(y_grad), residual_rows, residual, weight, rstd)
        x_grad = x_grad.view_as(y_grad)
        weight_grad = parameter_gradient(ctx, -1, weight, column_sums, partial)
        # residual = x + branch, so both have the same gradient. eps has none.
        return x_grad, x_grad if ctx.has_branch else None, weight_grad, None


def triton_rmsnorm(x, branch, weight, eps):
    """x, branch (..., cols) or None, weight (cols,) -> (y, residual): residual = x + branch or x, and y its RMSNorm."""
    expect("x", x)
    expect("weight", weight, x.shape[-1:])
    if branch is not None:
        expect("branch", branch, x.shape)
    return RMSNormFunction.apply(x, branch, weight, eps)


def torch_rmsnorm(x, branch, weight, eps):
    """As triton_rmsnorm, in PyTorch's operators."""
    residual = x if branch is None else x + branch
    return residual * torch.rsqrt(residual.pow(2).mean(-1, keepdim=True) + eps) * weight, residual


def sdpa_rmsnorm(x, branch, weight, eps):
    """As triton_rmsnorm, by PyTorch's fused operator."""
    residual = x if branch is None else x + branch
    return F.rms_norm(residual, weight.shape, weight, eps), residual


# --- causal attention with grouped queries and rotary embedding (Dao, FlashAttention-2, arXiv:2307.08691)
#
# Tensors are (batch, seq, heads, head_dim) with any strides. Names follow the literature: q, k, v, o; m_i and l_i the
# running maximum and sum of a row's softmax; lse its log-sum-exp, in base 2 and of the scaled scores; p the
# probabilities, s_grad the gradient of the scores; delta = rowsum(o * o_grad). GROUP_SIZE query heads share one head of
# k and v. A tile has BLOCK_M queries or BLOCK_N keys as rows and BLOCK_D >= HEAD_DIM dimensions of a head as columns.

# The strides (batch, seq, head, head_dim) of the tensors of an attention kernel; forward has the first four.
Strides = collections.namedtuple("Strides", "q k v o o_grad q_grad k_grad v_grad", defaults=(None,) * 4)


class AttentionConstants(NamedTuple):
    """What an attention kernel is compiled for. The kernels take it as one argument, C."""

    HEAD_DIM: int
    BLOCK_D: int  # the head dimension, padded to a power of two
    GROUP_SIZE: int  # query heads a key/value head
    BLOCK_M: int  # queries of a tile
    BLOCK_N: int  # keys of a tile
    EVEN: bool  # whether the sequence is a multiple of both blocks, so that no rows need a mask
    INT64: bool  # whether offsets within a sequence exceed 32 bits
    HEAD_ALIGNMENT: int  # a power of two that divides the strides from head to head; 1 leaves it to the compiler
    PRECISION: str  # tl.dot's input_precision
    ROUND_BY_HAND: bool  # see rounded_like()
    ROTARY: bool  # backward: whether to rotate the gradients of q and k back
    DESCRIBED: bool  # dq: whether q, k, v and o_grad are tensor descriptors
    Q_STRIDE: int  # dkdv: q's and o_grad's strides from query to query
    O_GRAD_STRIDE: int
    INT64_ROWS: bool  # dkdv: whether to compute the offsets of queries in 64 bits


@jit
def program_index(AXIS: tl.constexpr, C):
    """tl.program_id, in 64 bits if offsets need them. Heads and positions derived from it have its type."""
    return tl.program_id(AXIS).to(tl.int64) if C.INT64 else tl.program_id(AXIS)


@jit
def head_ptr(ptr, strides, batch, head, C):
    """Pointer to the (seq, head_dim) matrix of one head; batch is in 64 bits."""
    head_offset = head * strides[2]
    if C.HEAD_ALIGNMENT > 1:
        head_offset = tl.multiple_of(head_offset, C.HEAD_ALIGNMENT)
    return ptr + batch * strides[0] + head_offset


@jit
def head_columns(C):
    """(offsets, mask) of a tile's columns. Each of the two rotary halves of a head is padded to a power of two."""
    cols = tl.arange(0, C.BLOCK_D)
    offsets = cols
    if C.HEAD_DIM != C.BLOCK_D:
        offsets = cols % (C.BLOCK_D // 2) + (cols // (C.BLOCK_D // 2)) * (C.HEAD_DIM // 2)
    return offsets, cols % (C.BLOCK_D // 2) < C.HEAD_DIM // 2


@jit
def load_tile(ptr, strides, rows, n_rows, EVEN: tl.constexpr, C):
    """(rows, BLOCK_D) of the head at ptr, zero in padding columns and, unless EVEN, in rows from n_rows on."""
    cols, col_mask = head_columns(C)
    ptrs = ptr + rows[:, None] * strides[1] + cols.to(rows.dtype)[None, :] * strides[3]
    if not EVEN:
        tile = tl.load(ptrs, mask=(rows < n_rows)[:, None] & col_mask[None, :], other=0.0)
    elif C.HEAD_DIM != C.BLOCK_D:
        tile = tl.load(ptrs, mask=col_mask[None, :], other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@jit
def load_row_values(ptr, rows, n_rows, other, C):
    """One number for each of the rows, and other for rows from n_rows on."""
    return tl.load(ptr + rows) if C.EVEN else tl.load(ptr + rows, mask=rows < n_rows, other=other)


@jit
def load_described(descriptor, batch, start, head, ROWS: tl.constexpr, C):
    """(ROWS, HEAD_DIM) from position start of a head on, zero beyond the end, loaded by the copy engine."""
    place = [batch.to(tl.int32), start.to(tl.int32), head.to(tl.int32), 0]
    return descriptor.load(place).reshape(ROWS, C.HEAD_DIM)


@jit
def store_tile(ptr, strides, tile, rows, n_rows, C):
    """The inverse of load_tile. Rounds to the type that ptr points to."""
    cols, col_mask = head_columns(C)
    ptrs = ptr + rows[:, None] * strides[1] + cols.to(rows.dtype)[None, :] * strides[3]
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=(rows < n_rows)[:, None] & col_mask[None, :])


@jit
def rotate_back(x, cos_ptr, sin_ptr, rows, n_rows, ROWS: tl.constexpr, C):
    """The inverse of rope_kernel on x (ROWS, BLOCK_D), for the gradients of q and k before they are stored."""
    HALF: tl.constexpr = C.BLOCK_D // 2
    cols = tl.arange(0, HALF)
    mask = (rows < n_rows)[:, None] & (cols < C.HEAD_DIM // 2)[None, :]
    offsets = rows[:, None] * (C.HEAD_DIM // 2) + cols[None, :]
    cos = tl.load(cos_ptr + offsets, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + offsets, mask=mask, other=0.0)
    first, second = x.reshape(ROWS, 2, HALF).permute(0, 2, 1).split()  # (ROWS, HALF) each
    rotated = tl.join(first * cos + second * sin, second * cos - first * sin)
    return rotated.permute(0, 2, 1).reshape(ROWS, C.BLOCK_D)


@jit
def rounded_like(x, other, C):
    """x (in fp32) in the type of other, by which it will be multiplied.
    AMD GPUs before gfx950 have no instruction to round to bf16. The compiler emits five a number, and vector
    instructions then limit the loops on gfx942. ROUND_BY_HAND is one addition to the bits, whose upper half is bf16. It
    differs in ties only, which go away from 0. A NaN remains one if its lower bits are 0, as those of loaded bf16 are.
    """
    if C.ROUND_BY_HAND:
        bits = x.to(tl.uint32, bitcast=True) + 0x8000
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(other.dtype)


@jit
def flash_attention_kernel(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, strides, num_heads, seq_len, qk_scale, C):
    """o = softmax(q k^T * scale) v under the causal mask. A new maximum of a row rescales its sums so far.
    q, o (batch, seq_len, num_heads, HEAD_DIM), k, v (batch, seq_len, num_heads / GROUP_SIZE, HEAD_DIM),
    lse (batch, num_heads, seq_len) in fp32. qk_scale = scale * log2(e), because exp2 is one instruction and exp is not.
    Grid: (batch * num_heads, blocks of queries). The last queries, which have the most keys, start first.
    """
    batch_head, block = program_index(0, C), tl.num_programs(1) - 1 - program_index(1, C)
    batch, head = (batch_head // num_heads).to(tl.int64), batch_head % num_heads
    rows = block * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
    k_ptr = head_ptr(k_ptr, strides.k, batch, head // C.GROUP_SIZE, C)
    v_ptr = head_ptr(v_ptr, strides.v, batch, head // C.GROUP_SIZE, C)
    q = load_tile(head_ptr(q_ptr, strides.q, batch, head, C), strides.q, rows, seq_len, C.EVEN, C)  # (BLOCK_M, BLOCK_D)
    m_i = tl.full([C.BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([C.BLOCK_M], tl.float32)
    acc = tl.zeros([C.BLOCK_M, C.BLOCK_D], tl.float32)
    diagonal = block * C.BLOCK_M // C.BLOCK_N * C.BLOCK_N  # every query of the block sees the keys before it
    for part in tl.static_range(2):  # first the keys on the diagonal, under a mask, then those before it
        begin = diagonal if part == 0 else 0
        end = tl.minimum((block + 1) * C.BLOCK_M, seq_len) if part == 0 else diagonal
        for start in range(begin, end, C.BLOCK_N):
            keys = (start + tl.arange(0, C.BLOCK_N)).to(rows.dtype)
            k = load_tile(k_ptr, strides.k, keys, seq_len, C.EVEN or part == 1, C)
            # (BLOCK_M, BLOCK_D) x (BLOCK_D, BLOCK_N) -> (BLOCK_M, BLOCK_N)
            qk = tl.dot(q, tl.trans(k), input_precision=C.PRECISION)
            if part == 0:
                qk = tl.where(keys[None, :] <= rows[:, None], qk, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(qk, axis=1) * qk_scale)
            p = tl.exp2(qk * qk_scale - m_new[:, None])
            rescale = tl.exp2(m_i - m_new)
            l_i = l_i * rescale + tl.sum(p, axis=1)
            v = load_tile(v_ptr, strides.v, keys, seq_len, C.EVEN or part == 1, C)
            # (BLOCK_M, BLOCK_N) x (BLOCK_N, BLOCK_D) -> (BLOCK_M, BLOCK_D)
            acc = tl.dot(rounded_like(p, v, C), v, acc * rescale[:, None], input_precision=C.PRECISION)
            m_i = m_new
    store_tile(head_ptr(o_ptr, strides.o, batch, head, C), strides.o, acc / l_i[:, None], rows, seq_len, C)
    tl.store(lse_ptr + (batch * num_heads + head) * seq_len + rows, m_i + tl.log2(l_i), mask=rows < seq_len)


@jit
def query_gradient(
    q_ptr, k_ptr, v_ptr, o_ptr, o_grad_ptr, lse_ptr, delta_ptr, q_grad_ptr, cos_ptr, sin_ptr, strides,
    batch_head, block, num_heads, seq_len, scale, qk_scale, STORE_DELTA: tl.constexpr, C,
):  # fmt: skip
    """q_grad = s_grad k * scale of one block of queries, s_grad = p * (o_grad v^T - delta)."""
    batch, head = (batch_head // num_heads).to(tl.int64), batch_head % num_heads
    head_kv = head // C.GROUP_SIZE
    rows = block * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
    row_offsets = (batch * num_heads + head) * seq_len + rows
    if C.DESCRIBED:
        q = load_described(q_ptr, batch, block * C.BLOCK_M, head, C.BLOCK_M, C)
        o_grad = load_described(o_grad_ptr, batch, block * C.BLOCK_M, head, C.BLOCK_M, C)
    else:
        k_ptr = head_ptr(k_ptr, strides.k, batch, head_kv, C)
        v_ptr = head_ptr(v_ptr, strides.v, batch, head_kv, C)
        q = load_tile(head_ptr(q_ptr, strides.q, batch, head, C), strides.q, rows, seq_len, C.EVEN, C)
        o_grad_ptr = head_ptr(o_grad_ptr, strides.o_grad, batch, head, C)
        o_grad = load_tile(o_grad_ptr, strides.o_grad, rows, seq_len, C.EVEN, C)
    o = load_tile(head_ptr(o_ptr, strides.o, batch, head, C), strides.o, rows, seq_len, C.EVEN, C)
    delta = tl.sum(o.to(tl.float32) * o_grad.to(tl.float32), axis=1)
    if STORE_DELTA:
        tl.store(delta_ptr + row_offsets, delta, mask=rows < seq_len)
    lse = tl.load(lse_ptr + row_offsets, mask=rows < seq_len, other=float("inf"))
    q_grad = tl.zeros([C.BLOCK_M, C.BLOCK_D], tl.float32)
    diagonal = block * C.BLOCK_M // C.BLOCK_N * C.BLOCK_N
    for part in tl.static_range(2):  # the keys on the diagonal, then those before it
        begin = diagonal if part == 0 else 0
        end = tl.minimum((block + 1) * C.BLOCK_M, seq_len) if part == 0 else diagonal
        for start in range(begin, end, C.BLOCK_N):
            keys = (start + tl.arange(0, C.BLOCK_N)).to(rows.dtype)
            if C.DESCRIBED:
                k = load_described(k_ptr, batch, start, head_kv, C.BLOCK_N, C)
                v = load_described(v_ptr, batch, start, head_kv, C.BLOCK_N, C)
            else:
                k = load_tile(k_ptr, strides.k, keys, seq_len, C.EVEN or part == 1, C)
                v = load_tile(v_ptr, strides.v, keys, seq_len, C.EVEN or part == 1, C)
            # both (BLOCK_M, BLOCK_D) x (BLOCK_D, BLOCK_N) -> (BLOCK_M, BLOCK_N)
            p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=C.PRECISION) * qk_scale - lse[:, None])
            if part == 0:
                p = tl.where(keys[None, :] <= rows[:, None], p, 0.0)
            s_grad = p * (tl.dot(o_grad, tl.trans(v), input_precision=C.PRECISION) - delta[:, None])
            # (BLOCK_M, BLOCK_N) x (BLOCK_N, BLOCK_D) -> (BLOCK_M, BLOCK_D)
            q_grad = tl.dot(rounded_like(s_grad, k, C), k, q_grad, input_precision=C.PRECISION)
    q_grad *= scale
    if C.ROTARY:
        q_grad = rotate_back(q_grad, cos_ptr, sin_ptr, rows, seq_len, C.BLOCK_M, C)
    store_tile(head_ptr(q_grad_ptr, strides.q_grad, batch, head, C), strides.q_grad, q_grad, rows, seq_len, C)


@jit
def key_value_gradient(
    q_ptr, k_ptr, v_ptr, o_ptr, o_grad_ptr, lse_ptr, delta_ptr, k_grad_ptr, v_grad_ptr, cos_ptr, sin_ptr, strides,
    batch_head, block, num_kv_heads, seq_len, scale, qk_scale, LOAD_DELTA: tl.constexpr, C,
):  # fmt: skip
    """v_grad = p^T o_grad and k_grad = s_grad^T q * scale of one block of keys, summed over the heads that share it.
    The tiles of scores are transposed: p^T and s_grad^T enter the next product straight from registers. None are left
    for addresses: with the stride from query to query as a constant, those of a tile are one address plus constants, if
    the compiler knows that the sum does not overflow, which is why INT64_ROWS makes it one of 64 bits.
    """
    batch, head_kv = (batch_head // num_kv_heads).to(tl.int64), batch_head % num_kv_heads
    keys = block * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
    k = load_tile(head_ptr(k_ptr, strides.k, batch, head_kv, C), strides.k, keys, seq_len, C.EVEN, C)
    v = load_tile(head_ptr(v_ptr, strides.v, batch, head_kv, C), strides.v, keys, seq_len, C.EVEN, C)
    k_grad = tl.zeros([C.BLOCK_N, C.BLOCK_D], tl.float32)
    v_grad = tl.zeros([C.BLOCK_N, C.BLOCK_D], tl.float32)
    q_stride = C.Q_STRIDE if LOAD_DELTA else strides.q[1]
    o_grad_stride = C.O_GRAD_STRIDE if LOAD_DELTA else strides.o_grad[1]
    q_strides = (strides.q[0], q_stride, strides.q[2], strides.q[3])
    o_grad_strides = (strides.o_grad[0], o_grad_stride, strides.o_grad[2], strides.o_grad[3])
    begin = block * C.BLOCK_N // C.BLOCK_M * C.BLOCK_M  # queries before it see none of these keys
    end = tl.minimum(tl.cdiv((block + 1) * C.BLOCK_N, C.BLOCK_M) * C.BLOCK_M, seq_len)  # queries after it see them all
    for head in range(head_kv * C.GROUP_SIZE, (head_kv + 1) * C.GROUP_SIZE):
        head = tl.cast(head, head_kv.dtype)
        q_head_ptr = head_ptr(q_ptr, strides.q, batch, head, C)
        o_head_ptr = head_ptr(o_ptr, strides.o, batch, head, C)
        o_grad_head_ptr = head_ptr(o_grad_ptr, strides.o_grad, batch, head, C)
        row_offset = (batch * num_kv_heads * C.GROUP_SIZE + head) * seq_len
        for part in tl.static_range(2):  # the queries on the diagonal, then those after it
            for start in range(begin if part == 0 else end, end if part == 0 else seq_len, C.BLOCK_M):
                rows = (start + tl.arange(0, C.BLOCK_M)).to(keys.dtype)
                tile_rows = rows
                if C.INT64_ROWS:
                    tile_rows = rows.to(tl.int64)
                q = load_tile(q_head_ptr, q_strides, tile_rows, seq_len, C.EVEN, C)
                o_grad = load_tile(o_grad_head_ptr, o_grad_strides, tile_rows, seq_len, C.EVEN, C)
                lse = load_row_values(lse_ptr + row_offset, rows, seq_len, float("inf"), C)  # p is 0 beyond the end
                if LOAD_DELTA:
                    delta = load_row_values(delta_ptr + row_offset, rows, seq_len, 0.0, C)
                else:
                    o = load_tile(o_head_ptr, strides.o, rows, seq_len, C.EVEN, C)
                    delta = tl.sum(o.to(tl.float32) * o_grad.to(tl.float32), axis=1)
                # both (BLOCK_N, BLOCK_D) x (BLOCK_D, BLOCK_M) -> (BLOCK_N, BLOCK_M)
                s = tl.dot(k, tl.trans(q), input_precision=C.PRECISION)
                if q.dtype != tl.float32:  # right after the first product, so that both are under way when p is needed
                    p_grad = tl.dot(v, tl.trans(o_grad), input_precision=C.PRECISION)
                p = tl.exp2(s * qk_scale - lse[None, :])
                if part == 0:
                    p = tl.where(keys[:, None] <= rows[None, :], p, 0.0)
                # (BLOCK_N, BLOCK_M) x (BLOCK_M, BLOCK_D) -> (BLOCK_N, BLOCK_D)
                v_grad = tl.dot(rounded_like(p, o_grad, C), o_grad, v_grad, input_precision=C.PRECISION)
                if q.dtype == tl.float32:  # not earlier: two tiles of scores at a time would spill registers
                    p_grad = tl.dot(v, tl.trans(o_grad), input_precision=C.PRECISION)
                s_grad = p * (p_grad - delta[None, :])
                k_grad = tl.dot(rounded_like(s_grad, q, C), q, k_grad, input_precision=C.PRECISION)
    k_grad *= scale
    if C.ROTARY:
        k_grad = rotate_back(k_grad, cos_ptr, sin_ptr, keys, seq_len, C.BLOCK_N, C)
    store_tile(head_ptr(k_grad_ptr, strides.k_grad, batch, head_kv, C), strides.k_grad, k_grad, keys, seq_len, C)
    store_tile(head_ptr(v_grad_ptr, strides.v_grad, batch, head_kv, C), strides.v_grad, v_grad, keys, seq_len, C)


def backward_kernel_name(specialization):
    """The name under which profilers show flash_attention_backward_kernel: that of its PART."""
    part = specialization.constants["PART"]
    return "flash_attention_backward_kernel" if part == "fused" else f"flash_attention_backward_{part}_kernel"


@jit(repr=backward_kernel_name)
def flash_attention_backward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, o_grad_ptr, lse_ptr, delta_ptr, q_grad_ptr, k_grad_ptr, v_grad_ptr, cos_ptr, sin_ptr,
    strides, num_kv_heads, batch_kv_heads, seq_len, scale, qk_scale, C, PART: tl.constexpr,
):  # fmt: skip
    """The gradients of q, k and v. PART "dq" writes q_grad and delta, "dkdv" reads delta and writes k_grad and v_grad.
    "fused" does both side by side and computes delta twice, for sequences so short that one does not fill the device.
    q, o, o_grad, q_grad (batch, seq_len, heads, HEAD_DIM), k, v, k_grad, v_grad with num_kv_heads; in fp32 lse and
    delta (batch, heads, seq_len) and, if ROTARY, cos, sin (seq_len, HEAD_DIM / 2). If DESCRIBED, q, k, v and o_grad
    are descriptors of them, in blocks of (1, BLOCK_M or BLOCK_N, 1, HEAD_DIM).
    Grid: dq (batch * heads, blocks of queries), dkdv (batch_kv_heads = batch * num_kv_heads, blocks of keys), fused all
    of these on one axis. What takes longest starts first: the last queries, the first keys.
    """
    batch_head, block = program_index(0, C), program_index(1, C)
    key_programs = batch_kv_heads * tl.cdiv(seq_len, C.BLOCK_N)
    if PART == "dkdv" or (PART == "fused" and batch_head < key_programs):
        if PART == "fused":
            batch_head, block = batch_head % batch_kv_heads, batch_head // batch_kv_heads
        key_value_gradient(
            q_ptr, k_ptr, v_ptr, o_ptr, o_grad_ptr, lse_ptr, delta_ptr, k_grad_ptr, v_grad_ptr, cos_ptr, sin_ptr,
            strides, batch_head, block, num_kv_heads, seq_len, scale, qk_scale, PART == "dkdv", C,
        )  # fmt: skip
    else:
        if PART == "fused":
            batch_heads = batch_kv_heads * C.GROUP_SIZE
            program = batch_head - key_programs
            batch_head, block = program % batch_heads, program // batch_heads
        query_gradient(
            q_ptr, k_ptr, v_ptr, o_ptr, o_grad_ptr, lse_ptr, delta_ptr, q_grad_ptr, cos_ptr, sin_ptr, strides,
            batch_head, tl.cdiv(seq_len, C.BLOCK_M) - 1 - block, num_kv_heads * C.GROUP_SIZE, seq_len, scale, qk_scale,
            PART == "dq", C,
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
    cos = tl.load(cos_ptr + angles, mask=mask, other=0.0)  # (BLOCK_TOKENS, BLOCK_D / 2), as all of the following
    sin = tl.load(sin_ptr + angles, mask=mask, other=0.0)
    first_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * stride_token + tl.program_id(1) * HEAD_DIM + cols[None, :]
    second_ptrs = first_ptrs + HEAD_DIM // 2
    first = tl.load(first_ptrs, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(second_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(first_ptrs, (first * cos - second * sin).to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(second_ptrs, (second * cos + first * sin).to(x_ptr.dtype.element_ty), mask=mask)


@functools.lru_cache(maxsize=256)
def attention_constants(pass_name, shape, num_kv_heads, strides, dtype, precision, rotary, device_type):
    """(AttentionTile, AttentionConstants) of one of PASSES or "described dq"; shape is that of q."""
    (_, seq_len, num_heads, head_dim), device = shape, get_device(device_type)
    block_d = max(16, next_power_of_2(head_dim))  # tl.dot takes no fewer than 16
    tile = attention_tile(pass_name, dtype.itemsize, block_d, precision, device_type)
    used = [s for s in strides if s is not None]
    # The compiler only sees whether a stride is a multiple of 16. Heads of 40, not known to be multiples of 8, would be
    # loaded element by element, each with a mask of its own.
    alignment = math.gcd(16, *(s[2] for s in used))
    return tile, AttentionConstants(
        HEAD_DIM=head_dim, BLOCK_D=block_d, GROUP_SIZE=num_heads // num_kv_heads, BLOCK_M=tile.BLOCK_M,
        BLOCK_N=tile.BLOCK_N, EVEN=seq_len % max(tile.BLOCK_M, tile.BLOCK_N) == 0,
        INT64=any(s[1] * seq_len + s[2] * num_heads + s[3] * head_dim >= 2**31 for s in used),
        HEAD_ALIGNMENT=1 if alignment == 16 else alignment, PRECISION=precision,
        ROUND_BY_HAND=dtype == torch.bfloat16 and device.arch in LACK_BF16_ROUNDING, ROTARY=rotary,
        DESCRIBED=pass_name == "described dq", Q_STRIDE=strides.q[1], O_GRAD_STRIDE=(strides.o_grad or strides.q)[1],
        INT64_ROWS=pass_name == "dkdv" and device.family != "amd",  # AMD's loads add 32-bit offsets by themselves
    )  # fmt: skip


def launch_attention(kernel, pass_name, tensors, strides, scalars, q, num_kv_heads, rotary=False, **constants):
    """Launch an attention kernel with the tile and grid of a pass; q (batch, seq, heads, head_dim) gives the sizes."""
    (batch, seq_len, num_heads, _), device_type = q.shape, q.device.type
    precision = dot_precision(get_device(device_type)) if q.dtype == torch.float32 else "ieee"
    tile, C = attention_constants(pass_name, q.shape, num_kv_heads, strides, q.dtype, precision, rotary, device_type)
    by_queries = batch * num_heads, cdiv(seq_len, tile.BLOCK_M)
    by_keys = batch * num_kv_heads, cdiv(seq_len, tile.BLOCK_N)
    grids = {"dkdv": by_keys, "fused": (math.prod(by_queries) + math.prod(by_keys),)}
    (launch_by_triton if C.DESCRIBED else launch)(
        kernel, grids.get(pass_name, by_queries), tensors, (strides, *scalars), dict(C=C, **constants),
        num_warps=tile.num_warps, num_stages=tile.num_stages, **tile.options,
    )  # fmt: skip


def flash_attention_forward(q, k, v, o=None):
    """q (batch, seq, heads, head_dim), k, v (batch, seq, kv_heads, head_dim) -> o, as q, lse (batch, heads, seq)."""
    batch, seq_len, num_heads, head_dim = q.shape
    o = q.new_empty(batch, seq_len, num_heads, head_dim) if o is None else o.view(q.shape)
    lse = q.new_empty(batch, num_heads, seq_len, dtype=torch.float32)
    strides = Strides(q.stride(), k.stride(), v.stride(), o.stride())
    scalars = num_heads, seq_len, head_dim**-0.5 * math.log2(math.e)
    launch_attention(flash_attention_kernel, "forward", (q, k, v, o, lse), strides, scalars, q, k.shape[2])
    return o, lse


def tensor_descriptors(q, k, v, o_grad):
    """TensorDescriptors of these (batch, seq, heads, head_dim) for the copy engine, or None where they gain nothing.
    The engine needs addresses and strides of multiples of 16 bytes, dimensions in the order of memory, and Triton 3.4.
    """
    head_dim, size = q.shape[3], q.element_size()
    block_m, block_n, *_ = DESCRIBED_TILES.get((get_device(q.device.type).family, size, head_dim), (None, None))
    if block_m is None or TensorDescriptor is None:
        return None
    for x in (q, k, v, o_grad):
        *outer, last = x.stride()
        ordered = last == 1 and outer == sorted(outer, reverse=True)
        if not ordered or x.data_ptr() % 16 or any(stride == 0 or stride * size % 16 for stride in outer):
            return None
    rows = ((q, block_m), (k, block_n), (v, block_n), (o_grad, block_m))
    return [TensorDescriptor(x, [*x.shape], [*x.stride()], [1, block, 1, head_dim]) for x, block in rows]


def flash_attention_backward(o_grad, q, k, v, o, lse, q_grad, k_grad, v_grad, cos=None, sin=None):
    """Fill q_grad, k_grad, v_grad, shaped as q, k, v (batch, seq, heads or kv_heads, head_dim), with any strides.
    o_grad and o are shaped as q, lse (batch, heads, seq) is forward's. With cos and sin (seq, head_dim / 2), in fp32
    and contiguous, q and k must have been rotated by them, and their gradients are rotated back.
    """
    (batch, seq_len, _, head_dim), num_kv_heads = q.shape, k.shape[2]
    if cos is not None:
        expect_contiguous(cos=cos, sin=sin)
    is_short, scale = seq_len <= FUSED_BACKWARD_SEQ_LEN, head_dim**-0.5
    # lse takes the place of what a kernel does not read.
    delta, tables = lse if is_short else lse.new_empty(lse.shape), (lse, lse) if cos is None else (cos, sin)
    strides = Strides(*(t.stride() for t in (q, k, v, o, o_grad, q_grad, k_grad, v_grad)))
    scalars = num_kv_heads, batch * num_kv_heads, seq_len, scale, scale * math.log2(math.e)
    for part in ("fused",) if is_short else ("dq", "dkdv"):
        descriptors = tensor_descriptors(q, k, v, o_grad) if part == "dq" else None
        loaded_q, loaded_k, loaded_v, loaded_o_grad = descriptors or (q, k, v, o_grad)
        tensors = loaded_q, loaded_k, loaded_v, o, loaded_o_grad, lse, delta, q_grad, k_grad, v_grad, *tables
        launch_attention(
            flash_attention_backward_kernel, "described dq" if descriptors else part, tensors, strides, scalars, q,
            num_kv_heads, rotary=cos is not None, PART=part,
        )  # fmt: skip


def rope_(qkv, num_rotated_heads, head_dim, cos, sin):
    """Rotate the first heads of qkv (batch, seq, width) in place by cos, sin (seq, head_dim / 2), all contiguous."""
    batch, seq_len, width = qkv.shape
    expect_contiguous(qkv=qkv, cos=cos, sin=sin)
    block_d = next_power_of_2(head_dim)
    constants = dict(HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_TOKENS=max(1, ROPE_BLOCK // block_d))
    grid = cdiv(batch * seq_len, constants["BLOCK_TOKENS"]), num_rotated_heads
    launch(rope_kernel, grid, (qkv, cos, sin), (width, batch * seq_len, seq_len), constants)


def split_heads(qkv, num_heads, num_kv_heads):
    """Views of (batch, seq, width): q (batch, seq, num_heads, head_dim) and k, v (batch, seq, kv_heads, head_dim)."""
    heads = qkv.view(*qkv.shape[:-1], num_heads + 2 * num_kv_heads, -1)
    return heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=2)


def badly_strided(x):
    """BUG noncontiguous_kv: the same (batch, seq, heads, head_dim), with a stride of batch * heads in its last one."""
    return x.permute(1, 3, 0, 2).contiguous().permute(2, 0, 3, 1)


def attend(qkv, cos, sin, num_heads, num_kv_heads, bugs=(), o=None):
    """qkv (batch, seq, width), whose q and k are rotated in place -> q, k, v, o (batch, seq, heads, head_dim), lse."""
    width = qkv.shape[2]  # (heads + 2 kv_heads) * head_dim
    rope_(qkv, num_heads + num_kv_heads, width // (num_heads + 2 * num_kv_heads), cos, sin)
    q, k, v = split_heads(qkv, num_heads, num_kv_heads)
    if "noncontiguous_kv" in bugs:  # BUG noncontiguous_kv: right values, wrong layout
        k, v = badly_strided(k), badly_strided(v)
    return q, k, v, *flash_attention_forward(q, k, v, o)


def attend_backward(o_grad, cos, sin, q, k, v, o, lse, qkv_grad=None):
    """o_grad, as o -> the gradient of attend()'s qkv, (batch * seq, width); the others are what attend() returned."""
    batch, seq_len, num_heads, head_dim = o.shape
    if qkv_grad is None:
        qkv_grad = o.new_empty(batch * seq_len, (num_heads + 2 * k.shape[2]) * head_dim)
    q_grad, k_grad, v_grad = split_heads(qkv_grad.view(batch, seq_len, -1), num_heads, k.shape[2])
    flash_attention_backward(o_grad, q, k, v, o, lse, q_grad, k_grad, v_grad, cos, sin)
    return qkv_grad


def attention_forward(x, seq_len, qkv_weight, o_weight, cos, sin, num_heads, num_kv_heads, bugs=(), o=None):
    """x (batch * seq_len, hidden) -> y (batch * seq_len, o_weight's rows), and q, k, v, o and lse for backward."""
    qkv = torch.mm(x, qkv_weight.t()).view(-1, seq_len, len(qkv_weight))
    q, k, v, o, lse = attend(qkv, cos, sin, num_heads, num_kv_heads, bugs, o)
    return torch.mm(o.view(len(x), -1), o_weight.t()), q, k, v, o, lse


def attention_backward(y_grad, qkv_weight, o_weight, cos, sin, q, k, v, o, lse, qkv_grad=None):
    """y_grad (batch * seq, hidden) -> the gradients of x and of qkv = x @ qkv_weight^T."""
    o_grad = torch.mm(y_grad, o_weight).view_as(o)
    qkv_grad = attend_backward(o_grad, cos, sin, q, k, v, o, lse, qkv_grad)
    return torch.mm(qkv_grad, qkv_weight), qkv_grad


class AttentionFunction(torch.autograd.Function):
    """See triton_attention."""

    @staticmethod
    def forward(ctx, x, qkv_weight, o_weight, cos, sin, num_heads, num_kv_heads, bugs):
        inputs = qkv_weight, o_weight, cos, sin
        x_rows = as_rows(x)
        y, *activations = attention_forward(x_rows, x.shape[1], *inputs, num_heads, num_kv_heads, bugs)
        ctx.save_for_backward(x_rows, *inputs, *activations)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, y_grad):
        x, qkv_weight, o_weight, cos, sin, q, k, v, o, lse = begin_backward(ctx, y_grad)
        y_grad_rows = as_rows(y_grad)
        x_grad, qkv_grad = attention_backward(y_grad_rows, qkv_weight, o_weight, cos, sin, q, k, v, o, lse)
        qkv_weight_grad = parameter_gradient(ctx, 1, qkv_weight, weight_gradient, qkv_grad, x)
        o_weight_grad = parameter_gradient(ctx, 2, o_weight, weight_gradient, y_grad_rows, o.view(len(x), -1))
        # Tables, sizes and bugs have no gradient.
        return x_grad.view(*y_grad.shape[:-1], -1), qkv_weight_grad, o_weight_grad, *[None] * 5


def triton_attention(
    x, qkv_weight, o_weight, cos, sin, num_heads, num_kv_heads, bugs=(), function=AttentionFunction
):  # fmt: skip
    """Causal attention of x (batch, seq, hidden) -> the same shape, with rotary cos and sin (seq, head_dim / 2) in fp32
    and the projections qkv_weight ((heads + 2 kv_heads) * head_dim, hidden) and o_weight (hidden, heads * head_dim).
    """
    batch, seq_len, hidden = x.shape
    if seq_len != cos.shape[0]:
        raise ValueError(f"x has {seq_len} positions, the rotary tables have {cos.shape[0]}: slice the tables")
    expect("x", x)
    expect("sin", sin, cos.shape)
    expect("qkv_weight", qkv_weight, ((num_heads + 2 * num_kv_heads) * 2 * cos.shape[1], hidden))
    expect("o_weight", o_weight, (o_weight.shape[0], num_heads * 2 * cos.shape[1]))
    return function.apply(x, qkv_weight, o_weight, cos, sin, num_heads, num_kv_heads, bugs)


def rope_tables(seq_len, head_dim, device, theta=10000.0):
    """cos, sin (seq_len, head_dim / 2) of the angles position * theta^(-2i / head_dim), in fp32."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64, device=device), frequencies)
    return angles.cos().float(), angles.sin().float()


def torch_rope(x, cos, sin):
    """x (batch, seq, heads, head_dim): dimension i of the first half is rotated with dimension i of the second."""
    cos, sin = cos.to(x.dtype)[:, None, :], sin.to(x.dtype)[:, None, :]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def torch_attention(x, qkv_weight, o_weight, cos, sin, num_heads, num_kv_heads, linear=F.linear):
    """As triton_attention, with K and V repeated for each query head and the (seq, seq) score matrix in memory."""
    q, k, v = split_heads(linear(x, qkv_weight), num_heads, num_kv_heads)
    q, k = torch_rope(q, cos, sin), torch_rope(k, cos, sin)
    k, v = (t.repeat_interleave(num_heads // num_kv_heads, dim=2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (batch, heads, seq, head_dim)
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    probabilities = F.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
    return linear((probabilities @ v).transpose(1, 2).flatten(2), o_weight)


def sdpa_attention(x, qkv_weight, o_weight, cos, sin, num_heads, num_kv_heads, linear=F.linear):
    """As triton_attention, by PyTorch's fused operator."""
    q, k, v = split_heads(linear(x, qkv_weight), num_heads, num_kv_heads)
    q, k, v = (t.transpose(1, 2) for t in (torch_rope(q, cos, sin), torch_rope(k, cos, sin), v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=num_heads != num_kv_heads)
    return linear(o.transpose(1, 2).flatten(2), o_weight)


# --- SwiGLU: (silu(x w_gate) * (x w_up)) w_down (Shazeer, arXiv:2002.05202), between the library's matmuls


@jit
def swiglu_activation_kernel(gate_up_ptr, hidden_ptr, n_cols, BLOCK_SIZE: tl.constexpr):
    """hidden = silu(gate) * up.
    gate_up (rows, 2 n_cols) = [gate | up], hidden (rows, n_cols).  Grid: (rows * blocks of columns,).
    """
    blocks = tl.cdiv(n_cols, BLOCK_SIZE)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    gate = tl.load(gate_up_ptr + row * 2 * n_cols + cols, mask=mask, other=0.0).to(tl.float32)  # (BLOCK_SIZE,)
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
    gate_ptrs = gate_up_ptr + row * 2 * n_cols + cols  # (BLOCK_SIZE,)
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
    """BUG triton_matmul_swiglu: one element of hidden a program, two dot products by hand.  Grid: (rows * n_cols,).
    x (rows, K), weight (2 n_cols, K) = [w_gate | w_up], gate_up (rows, 2 n_cols), hidden (rows, n_cols).
    """
    row = (tl.program_id(0) // n_cols).to(tl.int64)
    col = (tl.program_id(0) % n_cols).to(tl.int64)
    gate = 0.0
    up = 0.0
    for start in range(0, K, BLOCK_SIZE):
        inner = start + tl.arange(0, BLOCK_SIZE)
        mask = inner < K
        x = tl.load(x_ptr + row * K + inner, mask=mask, other=0.0).to(tl.float32)  # (BLOCK_SIZE,)
        gate += tl.sum(x * tl.load(weight_ptr + col * K + inner, mask=mask, other=0.0).to(tl.float32))
        up += tl.sum(x * tl.load(weight_ptr + (n_cols + col) * K + inner, mask=mask, other=0.0).to(tl.float32))
    tl.store(gate_up_ptr + row * 2 * n_cols + col, gate.to(gate_up_ptr.dtype.element_ty))
    tl.store(gate_up_ptr + row * 2 * n_cols + n_cols + col, up.to(gate_up_ptr.dtype.element_ty))
    tl.store(hidden_ptr + row * n_cols + col, (gate * tl.sigmoid(gate) * up).to(hidden_ptr.dtype.element_ty))


def swiglu_activation(gate_up, hidden=None):
    """gate_up (rows, 2 n), contiguous -> silu(gate) * up (rows, n)"""
    expect_contiguous(gate_up=gate_up)
    n_rows, n_cols = gate_up.shape[0], gate_up.shape[1] // 2
    hidden = gate_up.new_empty(n_rows, n_cols) if hidden is None else hidden
    grid = (n_rows * cdiv(n_cols, SWIGLU_BLOCK),)
    launch(swiglu_activation_kernel, grid, (gate_up, hidden), (n_cols,), dict(BLOCK_SIZE=SWIGLU_BLOCK))
    return hidden


def swiglu_activation_backward_(hidden_grad, gate_up):
    """Overwrite gate_up (rows, 2 n) with its gradient; hidden_grad (rows, n); both contiguous."""
    expect_contiguous(hidden_grad=hidden_grad, gate_up=gate_up)
    n_rows, n_cols = hidden_grad.shape
    grid = (n_rows * cdiv(n_cols, SWIGLU_BLOCK),)
    launch(swiglu_activation_backward_kernel, grid, (hidden_grad, gate_up), (n_cols,), dict(BLOCK_SIZE=SWIGLU_BLOCK))


def swiglu_naive_matmul(x, gate_up_weight, gate_up=None, hidden=None):
    """x (rows, hidden), gate_up_weight (2 n, hidden) -> gate_up (rows, 2 n) and silu(gate) * up (rows, n)"""
    expect_contiguous(x=x, gate_up_weight=gate_up_weight)
    n_rows, n_cols = x.shape[0], gate_up_weight.shape[0] // 2
    gate_up = x.new_empty(n_rows, 2 * n_cols) if gate_up is None else gate_up
    hidden = x.new_empty(n_rows, n_cols) if hidden is None else hidden
    tensors = (x, gate_up_weight, gate_up, hidden)
    launch(swiglu_kernel, (n_rows * n_cols,), tensors, (x.shape[1], n_cols), dict(BLOCK_SIZE=128))
    return gate_up, hidden


def swiglu_forward(x, gate_up_weight, down_weight, bugs=(), gate_up=None, hidden=None):
    """x (rows, hidden) -> y (rows, hidden), and gate_up (rows, 2 ffn) and hidden (rows, ffn) for backward."""
    if "triton_matmul_swiglu" in bugs:  # BUG triton_matmul_swiglu: right values, multiplied without the library
        gate_up, hidden = swiglu_naive_matmul(x, gate_up_weight, gate_up, hidden)
    else:
        gate_up = torch.mm(x, gate_up_weight.t(), out=gate_up)
        hidden = swiglu_activation(gate_up, hidden)
    return torch.mm(hidden, down_weight.t()), gate_up, hidden


def swiglu_backward(y_grad, gate_up_weight, down_weight, gate_up):
    """y_grad (rows, hidden) -> the gradient of x. Overwrites gate_up (rows, 2 ffn) with its gradient."""
    swiglu_activation_backward_(torch.mm(y_grad, down_weight), gate_up)
    return torch.mm(gate_up, gate_up_weight)


class SwiGLUFunction(torch.autograd.Function):
    """See triton_swiglu."""

    @staticmethod
    def forward(ctx, x, gate_up_weight, down_weight, bugs):
        x_rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, gate_up, hidden = swiglu_forward(x_rows, gate_up_weight, down_weight, bugs)
        ctx.save_for_backward(x_rows, gate_up_weight, down_weight, gate_up, hidden)
        return y.view_as(x)

    @staticmethod
    def backward(ctx, y_grad):
        x, gate_up_weight, down_weight, gate_up, hidden = begin_backward(ctx, y_grad, overwrites=True)
        y_grad_rows = as_rows(y_grad)
        x_grad = swiglu_backward(y_grad_rows, gate_up_weight, down_weight, gate_up)
        gate_up_weight_grad = parameter_gradient(ctx, 1, gate_up_weight, weight_gradient, gate_up, x)
        down_weight_grad = parameter_gradient(ctx, 2, down_weight, weight_gradient, y_grad_rows, hidden)
        return x_grad.view_as(y_grad), gate_up_weight_grad, down_weight_grad, None


def triton_swiglu(x, gate_up_weight, down_weight, bugs=(), function=SwiGLUFunction):
    """x (..., hidden), gate_up_weight (2 ffn, hidden), down_weight (hidden, ffn) -> (..., hidden)"""
    expect("x", x)
    expect("gate_up_weight", gate_up_weight, (2 * down_weight.shape[1], x.shape[-1]))
    expect("down_weight", down_weight, (x.shape[-1], down_weight.shape[1]))
    return function.apply(x, gate_up_weight, down_weight, bugs)


def torch_swiglu(x, gate_up_weight, down_weight, linear=F.linear):
    """As triton_swiglu, in PyTorch's operators."""
    gate, up = linear(x, gate_up_weight).chunk(2, dim=-1)
    return linear(F.silu(gate) * up, down_weight)


# --- cross-entropy: loss and gradient in one pass over the logits


@jit
def cross_entropy_kernel(
    logits_ptr, targets_ptr, loss_ptr, stride_row, gradient_scale, ignore_index,
    N_COLS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """loss = logsumexp(logits) - logits[target]; logits = (softmax(logits) - onehot(target)) * gradient_scale.
    logits (rows, N_COLS), targets (rows,) of integers, loss (2, rows) in fp32: the losses, and 1 where a row counts. A
    row whose target is ignore_index does not: its loss and gradient are 0.  Grid: (rows,).
    A row that fits in BLOCK_SIZE is read once and stays in registers. A longer one is read again, from its end, which
    is still in the cache. Any other target outside 0..N_COLS-1 gives a NaN loss and a NaN gradient.
    """
    LANES: tl.constexpr = 8  # neighbors that share a running maximum: one rescaling for 8 exponentials
    row_ptr = logits_ptr + tl.program_id(0).to(tl.int64) * stride_row
    scale = tl.cast(gradient_scale, tl.float32)
    target = tl.load(targets_ptr + tl.program_id(0))
    in_range = (target >= 0) & (target < N_COLS)
    counts = target != ignore_index
    scale = tl.where(counts, tl.where(in_range, scale, float("nan")), 0.0)
    target_logit = tl.load(row_ptr + target, mask=in_range, other=float("nan")).to(tl.float32)
    if BLOCK_SIZE >= N_COLS:
        cols = tl.arange(0, BLOCK_SIZE)
        logits = tl.load(row_ptr + cols, mask=cols < N_COLS, other=float("-inf")).to(tl.float32)  # (BLOCK_SIZE,)
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
            # These are not read again soon, and must not evict what this loop has yet to read.
            logits = tl.load(row_ptr + cols, mask=mask, other=float("-inf"), eviction_policy="evict_first")
            # exp(logits - log_sum) would be shorter, but would inherit the rounding error of a large log_sum.
            probabilities = tl.exp2((logits.to(tl.float32) - maximum) * LOG2_E) * inverse_total
            gradient = (probabilities - tl.where(cols == target, 1.0, 0.0)) * scale
            gradient = gradient.to(logits_ptr.dtype.element_ty)
            tl.store(row_ptr + cols, gradient, mask=mask, eviction_policy="evict_first")
    loss = tl.where(counts, maximum - target_logit + tl.log2(total) / LOG2_E, 0.0)
    tl.store(loss_ptr + tl.program_id(0), loss)
    tl.store(loss_ptr + tl.num_programs(0) + tl.program_id(0), counts.to(tl.float32))


@jit
def scale_kernel(x_ptr, factor_ptr, counted_ptr, x_strides, n_rows, n_cols, BLOCK_SIZE: tl.constexpr):
    """x *= factor * n_rows / counted, without reading x if that is 1, as it usually is; the host need not know it.
    x (n_rows, n_cols), contiguous rows, factor and counted () in fp32.  Grid: (n_rows * blocks of columns,).
    """
    factor, counted = tl.load(factor_ptr), tl.load(counted_ptr)
    if counted != n_rows:
        factor *= n_rows / tl.maximum(counted, 1.0)  # if none counts, x is 0
    if factor != 1.0:
        blocks = tl.cdiv(n_cols, BLOCK_SIZE)
        cols = tl.program_id(0) % blocks * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        ptrs = x_ptr + (tl.program_id(0) // blocks).to(tl.int64) * x_strides[0] + cols
        x = tl.load(ptrs, mask=cols < n_cols, other=0.0).to(tl.float32)  # (BLOCK_SIZE,)
        tl.store(ptrs, (x * factor).to(x_ptr.dtype.element_ty), mask=cols < n_cols)


def cross_entropy_(logits, targets, gradient_scale, ignore_index=-100):
    """logits (rows, n), which become their gradient, targets (rows,) -> losses, and 1 where a row counts, (2, rows)"""
    expect_contiguous(targets=targets)
    n_rows, n_cols = logits.shape
    losses = logits.new_empty(2, n_rows, dtype=torch.float32)
    block_size = min(next_power_of_2(n_cols), CROSS_ENTROPY_BLOCK * (1 if n_cols <= 65536 else 2))
    warps = max(4, block_size // (32 * CROSS_ENTROPY_PER_THREAD))
    warps //= 2 if get_device(logits.device.type).family == "amd" else 1
    constants, scalars = dict(N_COLS=n_cols, BLOCK_SIZE=block_size), (logits.stride(0), gradient_scale, ignore_index)
    launch(cross_entropy_kernel, (n_rows,), (logits, targets, losses), scalars, constants, num_warps=warps)
    return losses


class CrossEntropyFunction(torch.autograd.Function):
    """See triton_cross_entropy."""

    @staticmethod
    def forward(ctx, logits, targets, ignore_index):
        rows = as_rows(logits)
        if rows.stride(0) < rows.shape[1]:  # rows of an expanded tensor overlap: one's gradient would overwrite another
            rows = rows.contiguous()
        losses = cross_entropy_(rows, targets.reshape(-1).contiguous(), 1.0 / max(1, len(rows)), ignore_index)
        if not rows.is_inference():
            torch.autograd.graph.increment_version(rows)  # lets autograd detect another use of the overwritten logits
        total, counted = losses.sum(1)
        ctx.save_for_backward(rows.detach(), counted)
        ctx.shape = logits.shape
        return total / counted

    @staticmethod
    def backward(ctx, loss_grad):
        logits_grad, counted = begin_backward(ctx, overwrites=True)
        expect("the gradient", logits_grad)
        n_rows, n_cols = logits_grad.shape
        block_size = min(next_power_of_2(n_cols), SCALE_BLOCK)
        grid, scalars = (n_rows * cdiv(n_cols, block_size),), (logits_grad.stride(), n_rows, n_cols)
        launch(scale_kernel, grid, (logits_grad, loss_grad, counted), scalars, dict(BLOCK_SIZE=block_size))
        return logits_grad.view(ctx.shape), None, None  # targets are integers


def triton_cross_entropy(logits, targets, ignore_index=-100):
    """Mean cross-entropy, in fp32, of logits (..., n) and integer targets (...) over the targets that are not ignored.
    NaN if none is left, as in PyTorch, and for any other target outside 0..n-1, where PyTorch reports an error. The
    logits are overwritten with their gradient, so they may not be a leaf that requires one (ValueError).
    """
    expect("logits", logits, (*targets.shape, logits.shape[-1]))
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise TypeError(f"targets are {targets.dtype}: give the numbers of tokens as integers")
    if logits.is_leaf and logits.requires_grad:
        raise ValueError("logits is a leaf that requires a gradient, and would be overwritten: give logits.clone()")
    return CrossEntropyFunction.apply(logits, targets, ignore_index)


def torch_cross_entropy(logits, targets, ignore_index=-100):
    """As triton_cross_entropy, in PyTorch's operators; the logits are kept."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=ignore_index)


# --- embedding: the library's lookup. The kernel adds the gradient to that of the tied head, without atomics.


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
    total = tl.load(weight_grad_ptrs, mask=mask, other=0.0).to(tl.float32)  # (BLOCK_SIZE,)
    for start in range(0, n_tokens, BLOCK_TOKENS):
        positions = start + tl.arange(0, BLOCK_TOKENS)
        matches = tl.load(tokens_ptr + positions, mask=positions < n_tokens, other=-1) == tl.program_id(0)
        position = tl.min(tl.where(matches, positions, n_tokens), axis=0)
        while position < n_tokens:
            out_grad_ptrs = out_grad_ptr + tl.cast(position, tl.int64) * n_cols + cols
            total += tl.load(out_grad_ptrs, mask=mask, other=0.0).to(tl.float32)
            position = tl.min(tl.where(matches & (positions > position), positions, n_tokens), axis=0)
    tl.store(weight_grad_ptrs, total.to(weight_grad_ptr.dtype.element_ty), mask=mask)


def embedding_gradient(place, accumulate, tokens, out_grad):
    """place (vocabulary, cols) (+)= the sums of out_grad (..., cols) over equal tokens, for parameter_gradient()."""
    if not accumulate:
        place.zero_()
    n_vocab, n_cols = place.shape
    block_tokens, block_size = EMBEDDING_TILE[0], min(next_power_of_2(n_cols), EMBEDDING_TILE[1])
    constants, grid = dict(BLOCK_TOKENS=block_tokens, BLOCK_SIZE=block_size), (n_vocab, cdiv(n_cols, block_size))
    launch(embedding_backward_kernel, grid, (tokens, out_grad, place), (tokens.numel(), n_cols), constants)


class EmbeddingFunction(torch.autograd.Function):
    """See triton_embedding."""

    @staticmethod
    def forward(ctx, tokens, weight):
        ctx.save_for_backward(tokens, weight)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, out_grad):
        tokens, weight = begin_backward(ctx, out_grad)
        # Adds to the gradient of the tied head if that is there already.
        return None, parameter_gradient(ctx, 1, weight, embedding_gradient, tokens, out_grad.contiguous())


def triton_embedding(tokens, weight):
    """weight (vocab, cols) at integer tokens (...) -> (..., cols). PyTorch reports a token that is out of range."""
    expect("weight", weight)
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
    # The powers are on the device, as a captured graph has no host to count steps, and in fp64: 1 - beta2^step cancels.
    bias_correction1 = (1.0 - tl.load(beta_powers_ptr)).to(tl.float32)
    bias_correction2 = (1.0 - tl.load(beta_powers_ptr + 1)).to(tl.float32)
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)  # (BLOCK_SIZE,), as all of the following
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
    step = lr / bias_correction1 * exp_avg / denominator
    if WEIGHT_DECAY != 0.0:  # as a product with 1 - lr * WEIGHT_DECAY it would lose most digits of a small lr
        step += lr * WEIGHT_DECAY * weights
    weights -= step
    tl.store(exp_avg_ptr + offsets, exp_avg, mask=mask)
    tl.store(exp_avg_sq_ptr + offsets, exp_avg_sq, mask=mask)
    if SPLIT:
        bits = weights.to(tl.int32, bitcast=True)
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)  # one NaN for all: some would round to zero
        rounded = (bits + 0x8000) >> 16
        tl.store(param_ptr + offsets, rounded.to(tl.int16), mask=mask)
        tl.store(remainder_ptr + offsets, (bits - (rounded << 16)).to(tl.int16), mask=mask)
    else:
        tl.store(param_ptr + offsets, weights, mask=mask)


def split_fp32(weights):
    """fp32 weights -> (bf16, int16): the weights rounded to bf16, and the 16 bits lost by it. join_fp32 is exact.
    bf16 is the upper half of an fp32 number. The model computes with it, and the optimizer adds the lower half: a
    master weight and its copy in low precision take 4 bytes together instead of 6. Ties are rounded away from zero,
    else the lower half would not fit into 16 bits. A NaN is one in both, but not with the same payload.
    """
    bits = weights.view(torch.int32).masked_fill(weights.isnan(), 0x7FC00000)
    rounded = (bits + 0x8000) >> 16
    return rounded.to(torch.int16).view(torch.bfloat16), (bits - (rounded << 16)).to(torch.int16)


def join_fp32(rounded, remainder):
    """The inverse of split_fp32: bf16 and int16 -> fp32, of one shape."""
    return ((rounded.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


class FlatAdamW:
    """AdamW whose parameters, gradients and moments are one flat buffer each.
    The parameters of the model become views of param, in bf16 if low_precision (then the fp32 weights are split between
    param and remainder), and so do their gradients of grad, p.main_grad: our kernels write there, and step() copies
    there what autograd has left in .grad. A parameter without a gradient stays as it is. Learning rate and step counts
    are on the device, so step() can be captured.
    """

    ALIGNMENT = 64  # elements; matmuls need their operands on 16-byte boundaries
    gradient_scale = 1.0  # by which step() multiplies the gradients

    def __init__(self, model, lr, low_precision=False, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.names, self.parameters = zip(*model.named_parameters(), strict=True)
        self.owners = [model.get_submodule(name.rpartition(".")[0])._parameters for name in self.names]
        self.constants = dict(BETA1=betas[0], BETA2=betas[1], EPS=eps, WEIGHT_DECAY=weight_decay)
        self.constants |= dict(GRADIENT_SCALE=self.gradient_scale, SPLIT=low_precision, BLOCK_SIZE=ADAMW_BLOCK)
        n_weights, n_state = self._place()
        device = self.parameters[0].device
        zeros = functools.partial(torch.zeros, dtype=torch.float32, device=device)
        self.param = zeros(n_weights, dtype=torch.bfloat16 if low_precision else torch.float32)
        self.grad, self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.param), zeros(n_state), zeros(n_state)
        self.remainder = zeros(n_state, dtype=torch.int16) if low_precision else None
        self.lr = torch.tensor(lr, dtype=torch.float32, device=device)
        self.betas = torch.tensor(betas, dtype=torch.float64, device=device)
        self.beta_powers = torch.ones(len(self.parameters), 2, dtype=torch.float64, device=device)
        self.cuts = set()  # the numbers of parameters that have seen more or fewer steps than the one before
        initial = [p.detach().float() for p in self.parameters]
        self.__setstate__({})
        self.reset(initial)

    def __setstate__(self, state):
        """Make the parameters views of the buffers; in a copy, by copy or pickle, they no longer are."""
        vars(self).update(state)
        for p, param_view, buffer in zip(self.parameters, self._views(self.param), self._views(self.grad), strict=True):
            p.data, p.main_grad = param_view, buffer
        self.versions = [p._version for p in self.parameters]

    def _place(self):
        """Set starts, where the parameters begin in the flat buffers. Returns the elements of weights and of state."""
        sizes = [cdiv(p.numel(), self.ALIGNMENT) * self.ALIGNMENT for p in self.parameters]
        *self.starts, end = itertools.accumulate(sizes, initial=0)
        return end, end

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
            for own, kept in self.slices(0, len(flat)):
                self.remainder[kept].copy_(remainder[own])
        for state in (self.exp_avg, self.exp_avg_sq):
            state.zero_()
        self.beta_powers.fill_(1.0)
        self.cuts.clear()

    def weights(self):
        """The fp32 weights, a list of tensors in the order of model.parameters()."""
        self.follow_model()
        return list(self._views(self.param if self.remainder is None else join_fp32(self.param, self.remainder)))

    def zero_grad(self):
        """Let the next backward pass overwrite the gradients."""
        for p in self.parameters:
            p.grad = None

    def collect_gradients(self, parameters):
        """Complete the flat gradients of these: zeros where there is no gradient, and what came from autograd."""
        for p in parameters:
            if p.grad is None:
                p.main_grad.zero_()
            elif p.grad is not p.main_grad:
                p.main_grad.copy_(p.grad)

    @torch.no_grad()
    def follow_model(self):
        """Take over what others have written into the weights; RuntimeError if the model has other weights by now."""
        begin, size = self.param.data_ptr(), self.param.element_size()
        for index, (p, start) in enumerate(zip(self.parameters, self.starts, strict=True)):
            name = self.names[index]
            if self.owners[index][name.rpartition(".")[2]] is not p or p.data_ptr() != begin + start * size:
                change = "was moved, converted or replaced, as by .half(), .to() or load_state_dict(assign=True)"
                raise RuntimeError(f"{name} {change}, so FlatAdamW would not update it: make a new optimizer")
            if p._version != self.versions[index]:
                self.versions[index] = p._version
                for _, kept in self.slices(start, start + p.numel()) if self.remainder is not None else ():
                    self.remainder[kept].zero_()

    def slices(self, start, end):
        """Yield what update() takes, of the elements from start to end: slices of param and grad, and of the others."""
        yield slice(start, end), slice(start, end)

    @torch.no_grad()
    def step(self):
        """Update the weights that have a gradient. Those that are updated together have seen the same steps."""
        self.follow_model()
        self.collect_gradients(self.parameters)
        ends, has_gradient = [*self.starts, len(self.param)], [p.grad is not None for p in self.parameters]
        self.cuts.update(i for i in range(1, len(has_gradient)) if has_gradient[i] != has_gradient[i - 1])
        for first, last in itertools.pairwise([0, *sorted(self.cuts), len(has_gradient)]):
            if has_gradient[first]:
                beta_powers = self.beta_powers[first:last].mul_(self.betas)[0]
                for own, kept in self.slices(ends[first], ends[last]):
                    self.update(beta_powers, own, kept)

    def update(self, beta_powers, own, kept):
        """Launch adamw_kernel on these slices of the flat buffers."""
        weights = self.param[own] if self.remainder is None else self.param[own].view(torch.int16)
        remainder = weights if self.remainder is None else self.remainder[kept]  # read only with SPLIT
        tensors = (weights, remainder, self.grad[own], self.exp_avg[kept], self.exp_avg_sq[kept], self.lr, beta_powers)
        launch(adamw_kernel, (cdiv(weights.numel(), ADAMW_BLOCK),), tensors, (weights.numel(),), self.constants)


class TorchAdamW(torch.optim.AdamW):
    """torch's fused AdamW with the same hyperparameters, for --impl torch and sdpa."""

    parameters = property(lambda optimizer: optimizer.param_groups[0]["params"])

    def __init__(self, model, lr):
        on_gpu = next(model.parameters()).is_cuda
        lr = torch.tensor(lr, dtype=torch.float32, device="cuda") if on_gpu else lr
        super().__init__(model.parameters(), lr=lr, weight_decay=0.01, fused=True, capturable=on_gpu)

    def follow_model(self):
        """Nothing, where FlatAdamW.follow_model does."""

    @torch.no_grad()
    def reset(self, weights):
        """As FlatAdamW.reset."""
        for p, weight in zip(self.parameters, weights, strict=True):
            p.copy_(weight)
        for value in itertools.chain(*(state.values() for state in self.state.values())):
            value.zero_()


# --- groups of layers: what TransformerBlock.forward computes (see below), for several layers in one Function


def stacked_view(tensors):
    """Views of one tensor, of one shape and evenly spaced, as one view (n, *shape); None if they are anything else."""
    first, starts = tensors[0], [t.storage_offset() for t in tensors]
    step = max(1, starts[-1] - starts[0]) // max(1, len(starts) - 1)
    evenly_spaced = starts == [starts[0] + index * step for index in range(len(starts))]
    if not evenly_spaced or first._base is None or any(t._base is not first._base for t in tensors):
        return None
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()))


class LayerGroup(nn.Module):
    """Consecutive TransformerBlocks of a model whose optimizer is FlatAdamW, computed as one autograd.Function.
    Autograd spends 30 to 40 us on the host for each Function and direction, more than most kernels of a small model
    run. And the weight gradients of a small model are too small to fill a device: a group computes those of one kind of
    weight as one batched product. Layers of which a module has a hook or was replaced are called one by one.
    """

    def __init__(self, first, layers, bugs=()):
        super().__init__()
        self.first, self.layers, self.bugs = first, list(layers), bugs  # first: the number of layers[0] in the model

    def forward(self, residual, branch, cos, sin):
        """As TransformerBlock.forward, of all layers in turn."""
        if all(layer.is_plain() for layer in self.layers):
            weights = itertools.chain(*(layer.weights() for layer in self.layers))
            return GroupFunction.apply(self, residual, branch, cos, sin, *weights)
        for layer in self.layers:
            residual, branch = layer(residual, branch, cos, sin)
        return residual, branch

    def forward_layer(self, index, residual, branch, seq_len, tables, weights, inputs):
        """residual, branch (rows, hidden) -> the same pair, one layer on, and 8 tensors to save. Fills the inputs."""
        norm1, qkv_weight, o_weight, norm2, gate_up_weight, down_weight = weights
        x1, o, x2, hidden, gate_up = inputs
        layer = self.layers[index]
        heads = layer.attention.num_heads, layer.attention.num_kv_heads
        residual1, _, rstd1 = rmsnorm_forward(residual, branch, norm1, layer.attention_norm.eps, y=x1)
        y, q, k, v, _, lse = attention_forward(x1, seq_len, qkv_weight, o_weight, *tables, *heads, self.bugs, o)
        residual2, _, rstd2 = rmsnorm_forward(residual1, y, norm2, layer.ffn_norm.eps, y=x2)
        y, _, _ = swiglu_forward(x2, gate_up_weight, down_weight, self.bugs, gate_up, hidden)
        return residual2, y, residual1, rstd1, q, k, v, lse, residual2, rstd2

    def backward_layer(self, index, residual_grad, next_y_grad, saved, tables, weights, inputs, grads):
        """residual_grad (rows, hidden) and y_grad, the first of grads -> the gradient of both inputs, in next_y_grad.
        Fills the other grads, and overwrites gate_up with its gradient.
        """
        norm1, qkv_weight, o_weight, norm2, gate_up_weight, down_weight = weights
        residual1, rstd1, q, k, v, lse, residual2, rstd2 = saved
        _, o, _, _, gate_up = inputs
        y_grad, branch_grad, qkv_grad, partial1, partial2 = grads
        x_grad = swiglu_backward(y_grad, gate_up_weight, down_weight, gate_up)
        rmsnorm_backward(x_grad, residual_grad, residual2, norm2, rstd2, branch_grad, partial2)
        o = o.view(q.shape)
        x_grad, _ = attention_backward(branch_grad, qkv_weight, o_weight, *tables, q, k, v, o, lse, qkv_grad)
        return rmsnorm_backward(x_grad, branch_grad, residual1, norm1, rstd1, next_y_grad, partial1)[0]

    def weight_gradients(self, ctx, weights, inputs, grads):
        """What backward() returns for the weights, given inputs and grads of all layers: (layers, rows, width) each."""
        x1, o, x2, hidden, gate_up_grad = inputs
        y_grad, branch_grad, qkv_grad, partial1, partial2 = grads
        kinds = [  # of weights: how their gradient is computed, and from what
            (column_sums, partial1), (weight_gradient, qkv_grad, x1), (weight_gradient, branch_grad, o),
            (column_sums, partial2), (weight_gradient, gate_up_grad, x2), (weight_gradient, y_grad, hidden),
        ]  # fmt: skip
        gradients, nodes = [None] * len(weights), [node for node, _ in ctx.next_functions[-len(weights) :]]
        for kind, (compute, *stacks) in enumerate(kinds):
            targets = [destination(node) for node in nodes[kind::6]]
            is_batch = len(targets) > 1 and None not in targets and "autograd" not in targets
            place = stacked_view([p.main_grad for p in targets]) if is_batch else None
            if place is not None and len({p.grad is None for p in targets}) == 1:
                compute(place, targets[0].grad is not None, *stacks)
                for p in targets:
                    p.grad = p.main_grad
            else:
                for i, own in zip(range(kind, len(weights), 6), zip(*stacks, strict=True), strict=True):
                    gradients[i] = parameter_gradient(ctx, i - len(weights), weights[i], compute, *own)
        return gradients


class GroupFunction(torch.autograd.Function):
    """See LayerGroup."""

    @staticmethod
    def forward(ctx, group, residual, branch, cos, sin, *weights):
        ctx.group, ctx.has_branch, shape = group, branch is not None, residual.shape
        residual, y = as_rows(residual), as_rows(branch) if ctx.has_branch else None
        (rows, hidden), (_, _, o_weight, _, gate_up_weight, down_weight) = residual.shape, weights[:6]
        widths = hidden, o_weight.shape[1], hidden, down_weight.shape[1], gate_up_weight.shape[0]
        inputs, saved = [residual.new_empty(len(weights) // 6, rows, width) for width in widths], []
        for index, own in enumerate(zip(*inputs, strict=True)):
            of_layer = weights[6 * index : 6 * index + 6]
            residual, y, *layer = group.forward_layer(index, residual, y, shape[1], (cos, sin), of_layer, own)
            saved += layer
        ctx.save_for_backward(cos, sin, *weights, *inputs, *saved)
        return residual.view(shape), y.view(shape)

    @staticmethod
    def backward(ctx, residual_grad, y_grad):
        cos, sin, *saved = begin_backward(ctx, y_grad, overwrites=True)
        group, grad = ctx.group, as_rows(residual_grad)
        count, (rows, hidden) = len(group.layers), grad.shape
        weights, inputs, saved = saved[: 6 * count], saved[6 * count : 6 * count + 5], saved[6 * count + 5 :]
        *_, programs = norm_tile(rows, hidden, True, grad.device.type)
        grads = [grad.new_empty(count, rows, width) for width in (hidden, hidden, len(weights[1]))]
        grads += [grad.new_empty(count, programs, hidden, dtype=torch.float32) for _ in range(2)]
        if count == 1:
            grads[0] = as_rows(y_grad)[None]
        else:
            grads[0][-1].copy_(as_rows(y_grad))
        layers = zip([None, *grads[0]], zip(*inputs, strict=True), zip(*grads, strict=True), strict=False)
        for index, (next_y_grad, own_inputs, own_grads) in reversed(list(enumerate(layers))):
            own = saved[8 * index : 8 * index + 8], (cos, sin), weights[6 * index : 6 * index + 6]
            grad = group.backward_layer(index, grad, next_y_grad, *own, own_inputs, own_grads)
        grad, weight_grads = grad.view(y_grad.shape), group.weight_gradients(ctx, weights, inputs, grads)
        return None, grad, grad if ctx.has_branch else None, None, None, *weight_grads


# ----------------------------------------------------------------------------------------------------------------------
# Model: modules hold parameters and call the operations of one implementation

OPERATION_NAMES = "embedding rmsnorm linear attention swiglu cross_entropy group"
Operations = collections.namedtuple("Operations", OPERATION_NAMES, defaults=(None,))  # without a class of groups
OPERATIONS = {
    "triton": Operations(triton_embedding, triton_rmsnorm, triton_linear, triton_attention, triton_swiglu,
        triton_cross_entropy, LayerGroup),
    "torch": Operations(F.embedding, torch_rmsnorm, F.linear, torch_attention, torch_swiglu, torch_cross_entropy),
    "sdpa": Operations(F.embedding, sdpa_rmsnorm, F.linear, sdpa_attention, torch_swiglu, torch_cross_entropy),
}  # fmt: skip


def select_operations(config, device):
    """Return (name, Operations) of what runs on the device for config.impl, with the mistakes that are asked for."""
    name = "torch" if config.impl == "triton" and triton_obstacle(device, config.use_amp) else config.impl
    operations = OPERATIONS[name]
    if config.fp8:
        operations = companion("fp8", "--fp8").with_fp8(operations, name, config.bugs)
    if name != "triton":
        return name, operations
    if config.compile:  # the compiler cannot look into kernels, and does not see where they write gradients
        operations = Operations(*map(torch.compiler.disable, operations[:-1]))
    if config.severed_autograd:  # BUG severed_autograd: no history, as if no autograd.Function wrapped the kernels
        rmsnorm, attention = map(torch.no_grad(), (operations.rmsnorm, operations.attention))
        operations = operations._replace(rmsnorm=rmsnorm, attention=attention, group=None)
    if config.bugs:
        attention, swiglu = (functools.partial(f, bugs=config.bugs) for f in (operations.attention, operations.swiglu))
        operations = operations._replace(attention=attention, swiglu=swiglu)
    return "triton", operations


def default_operations():
    """The operations of a module that is built by itself: Triton's where Triton runs."""
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
    """Causal self-attention with grouped queries; one matmul computes q, k and v."""

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
    """The feed-forward layer; one matmul computes gate and up."""

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
        self.attention_norm = TritonRMSNorm(config.hidden_dim, config.norm_eps, operations)
        self.attention = TritonAttention(config, operations)
        self.ffn_norm = TritonRMSNorm(config.hidden_dim, config.norm_eps, operations)
        self.feed_forward = TritonSwiGLU(config, operations)

    def forward(self, residual, branch, cos, sin):
        """The residual stream and what the block before adds to it (None at first) -> the same pair, one block on.
        Both (batch, seq, hidden). The addition is left to the next norm, whose kernel reads the residual anyway.
        """
        y, residual = self.attention_norm.add_norm(residual, branch)
        y, residual = self.ffn_norm.add_norm(residual, self.attention(y, cos, sin))
        return residual, self.feed_forward(y)

    def weights(self):
        """What LayerGroup computes with, in the order of parameters()."""
        attention, feed_forward = self.attention, self.feed_forward
        first = self.attention_norm.weight, attention.qkv_proj.weight, attention.o_proj.weight
        return *first, self.ffn_norm.weight, feed_forward.gate_up_proj.weight, feed_forward.down_proj.weight

    def is_plain(self):
        """Whether forward() does what is written here: no module that it calls has a hook, or another forward()."""
        parts = self, self.attention_norm, self.attention, self.ffn_norm, self.feed_forward
        kinds = TransformerBlock, TritonRMSNorm, TritonAttention, TritonRMSNorm, TritonSwiGLU
        hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "forward"
        return tuple(map(type, parts)) == kinds and not any(vars(part).get(hook) for part in parts for hook in hooks)


class TinyLlamaTriton(nn.Module):
    """LLaMA, by default with a head tied to the embedding. operations is the implementation, one of OPERATIONS."""

    def __init__(self, config, operations=None):
        super().__init__()
        if not isinstance(config, Config):
            raise TypeError(f"config is {config!r}: give a Config, as Config(hidden_dim=512)")
        self.operations = operations or default_operations()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.layers = nn.ModuleList(TransformerBlock(config, self.operations) for _ in range(config.num_layers))
        self.norm = TritonRMSNorm(config.hidden_dim, config.norm_eps, self.operations)
        self.lm_head = nn.Linear(config.hidden_dim, config.vocab_size, bias=False) if config.untied_head else None
        self.groups = None  # [LayerGroup], for forward() to call in place of the layers
        cos, sin = rope_tables(config.seq_len, config.head_dim, self.embed_tokens.weight.device, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        if not config.no_init:  # BUG no_init: leaves the embedding, and so the tied head, at N(0, 1)
            self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Matrices N(0, 0.02), but N(0, 0.02 / sqrt(2 * layers)) where they add to the residual stream; norms 1."""
        residual_std = 0.02 / math.sqrt(2 * len(self.layers))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=residual_std if is_residual else 0.02)

    def forward(self, tokens, targets=None):
        """tokens (batch, seq) -> logits (batch, seq, vocab), or the mean loss if targets (batch, seq) are given."""
        if tokens.shape[1] > len(self.cos):
            raise ValueError(f"there are {tokens.shape[1]} positions, and Config.seq_len is {len(self.cos)}: raise it")
        if self.groups and [layer for group in self.groups for layer in group.layers] != list(self.layers):
            raise RuntimeError("the layers are not those in model.groups: set model.groups = None")
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        residual, branch = self.operations.embedding(tokens, self.embed_tokens.weight), None
        for layer in self.groups or self.layers:
            residual, branch = layer(residual, branch, cos, sin)
        y, _ = self.norm.add_norm(residual, branch)
        logits = self.operations.linear(y, (self.lm_head or self.embed_tokens).weight)
        return logits if targets is None else self.operations.cross_entropy(logits, targets)


# ----------------------------------------------------------------------------------------------------------------------
# Data: made on the CPU, so that every device gets the same


def random_tokens(config):
    """Yield batches (tokens, targets: one position on), both (batch, seq), of uniform tokens: nothing can be learnt."""
    generator = torch.Generator().manual_seed(config.seed)
    while True:
        sequence = torch.randint(config.vocab_size, (config.batch_size, config.seq_len + 1), generator=generator)
        yield sequence[:, :-1], sequence[:, 1:]


def batches(config):
    """The batches of config.data, a generator as random_tokens()."""
    return random_tokens(config) if config.data == "random" else companion("data").batches(config)


def entropy(config):
    """The entropy of a token given those before, in nats, below which no loss can stay; None: of a file, not known."""
    return math.log(config.vocab_size) if config.data == "random" else companion("data").entropy(config)


# ----------------------------------------------------------------------------------------------------------------------
# Training step: three phases on fixed buffers, called one by one or captured in graphs


class TrainStep:
    """A training step of one model on fixed buffers: forward(), backward(), optimizer_step(), or run() for all three.
    Its subclass tiny_llama.distributed.Step overrides what is different with several processes.
    """

    rank, processes = 0, 1  # of this process, of all that train together
    capture_mode = "global"  # of torch.cuda.graph
    named_range = contextlib.nullcontext  # of a name: a range for profilers, where tiny_llama.profiler has put one

    @classmethod
    def select_device(cls, config):
        """Return the Device of a run; UsageError if it is not there or cannot do what is asked for."""
        device = select_device(config.device)
        validate_on_device(config, device)
        return device

    @classmethod
    def check(cls, config, device):
        """Whether loss and gradients are as close to those in higher precision as the Verdict's rule demands."""
        batch = next(batches(config))
        verdict, _ = check_batch(config, device, batch)
        print_verdict(verdict, "fp32" if config.use_amp else "fp64")
        return not verdict.failed

    def __init__(self, config, device):
        torch.manual_seed(config.seed)
        self.config, self.device = config, device
        self.implementation, operations = select_operations(config, device)
        with torch.device(device.type):
            self.model = TinyLlamaTriton(config, operations)
            self.tokens = torch.zeros(config.batch_size, config.seq_len, dtype=torch.int64)
            self.targets = torch.zeros_like(self.tokens)
        self.initial_weights = [p.detach().cpu().clone() for p in self.model.parameters()]
        self.loss, self.run_model = None, self.model
        self.optimizer = self.make_optimizer()
        if config.compile:
            self.run_model = torch.compile(self.run_model)

    def make_optimizer(self):
        """Return the optimizer, and prepare the model for it."""
        config = self.config
        if self.implementation != "triton":
            return TorchAdamW(self.model, config.learning_rate)
        optimizer = FlatAdamW(self.model, config.learning_rate, config.use_amp)
        if self.model.operations.group:
            self.make_groups([self.model.layers])
        return optimizer

    def make_groups(self, stretches):
        """Let the model compute its layers in groups, none of them beyond one of these lists of layers."""
        config, self.model.groups, first = self.config, [], 0
        width = 2 * config.hidden_dim + (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        layer_bytes = config.tokens_per_step * width * (2 if config.use_amp else 4)
        size = cdiv(config.num_layers, cdiv(config.num_layers, max(1, GROUP_BYTES // layer_bytes)))
        for layers in (stretch[i : i + size] for stretch in stretches for i in range(0, len(stretch), size)):
            self.model.groups.append(self.model.operations.group(first, layers, config.bugs))
            first += len(layers)

    def batches(self, seed):
        """The batches of this process, a generator."""
        return batches(dataclasses.replace(self.config, seed=seed))

    def load(self, tokens, targets):
        """Copy a batch, both (batch, seq), into the buffers of the step."""
        self.tokens.copy_(tokens)
        self.targets.copy_(targets)

    def call_model(self, *inputs):
        """The model's result in the precision of the run, of tensors on the device; also after capture()."""
        # Our kernels take bf16 weights as they are. The library needs autocast, whose cache a graph must not keep.
        needed = self.config.use_amp and self.implementation != "triton"
        with torch.autocast(self.device.type, torch.bfloat16, needed, cache_enabled=not self.config.graph):
            return self.run_model(*inputs)

    def forward(self):
        """Clear the gradients and set self.loss, with its autograd history."""
        self.optimizer.zero_grad()
        self.loss = self.call_model(self.tokens, self.targets)

    def backward(self):
        """Compute the gradients of self.loss."""
        with torch.autograd.set_multithreading_enabled(False):  # handing over to autograd's thread takes 0.5 ms a step
            self.loss.backward()

    def optimizer_step(self):
        """Update the weights."""
        self.optimizer.step()

    def run(self):
        """The whole step. Nothing is synchronized."""
        self.forward()
        self.backward()
        self.optimizer_step()

    def restart(self):
        """Return to the initial weights and an empty optimizer."""
        self.optimizer.reset([w.to(self.tokens.device) for w in self.initial_weights])

    def capture(self, one_graph=False):
        """Let the phases, or with one_graph run(), replay captured graphs from now on; a step must have run."""
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self.loss = None  # its autograd history belongs to the warm-up
        self.captured_state = self.graph_state()
        for name in ("run",) if one_graph else ("forward", "backward", "optimizer_step"):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=self.capture_mode):
                getattr(self, name)()
            setattr(self, name, functools.partial(self.replay, graph) if name in ("run", "forward") else graph.replay)

    def graph_state(self):
        """What graphs capture and a caller may change: where weights are, which are frozen, how matrices multiply."""
        self.optimizer.follow_model()
        return dot_precision(self.device), [(p.data_ptr(), p.requires_grad) for p in self.optimizer.parameters]

    def replay(self, graph):
        """Replay the graph with which a step begins; RuntimeError if another one would be captured by now."""
        if self.graph_state() != self.captured_state:
            change = "weights were frozen, thawed or moved, or the precision of matmuls was set"
            raise RuntimeError(f"since the step was captured, {change}: make a new TrainStep")
        graph.replay()

    def __getstate__(self):
        """A copy has no graphs, and no loss, whose history cannot be copied."""
        left_out = "forward", "backward", "optimizer_step", "run", "captured_state"
        return {name: value for name, value in vars(self).items() if name not in left_out} | {"loss": None}

    def synchronize(self, marks=()):
        """Wait for the GPU, if there is one; marks are those of a StepClock, which come one by one until then."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def collect_gradients(self):
        """After a step, make .grad of every parameter the gradient that the step used. It is, with one process."""

    def mean(self, values):
        """Average a list of numbers over the processes."""
        return values

    def must_stop(self):
        """Whether processes that got a signal agree to stop before this step. A single one is interrupted at once."""
        return False

    def report_processes(self, summary):
        """Print and return what several processes did together, given the summary of this one."""


def whole(tensor):
    """A tensor, gathered if --shard full distributes it; then all processes must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def count_weights(parameters):
    """The number of elements of all of these."""
    return sum(p.numel() for p in parameters)


# ----------------------------------------------------------------------------------------------------------------------
# Check: no figure counts before loss and gradients agree with PyTorch's

CHECK_BATCH = 2  # sequences; the reference keeps every score matrix in memory
CHECK_ATOL = {"fp32": 1e-5, "tf32": 2e-3, "bf16": 1e-2, "fp8": 1e-2}  # relative to the norm of the reference


class Verdict(NamedTuple):
    """The outcome of the rule: an error may be twice that of plain PyTorch in the same precision, plus a tolerance."""

    errors: dict  # {name: distance from the reference, relative to its norm}
    allowed: dict

    @property
    def failed(self):
        """The names of errors larger than allowed; a NaN is one."""
        return [name for name, error in self.errors.items() if not error <= self.allowed[name]]

    @property
    def worst(self):
        """The name of the error that is the largest in relation to what is allowed."""
        return max(self.failed or self.errors, key=lambda name: self.errors[name] / self.allowed[name])


def judge(errors, plain_errors, tolerance):
    """Return the Verdict on {name: error} beside those of plain PyTorch in the same precision."""
    return Verdict(errors, {name: 2 * error + tolerance for name, error in plain_errors.items()})


def relative_errors(results, exact, order=2):
    """{name: norm(result - exact) / norm(exact)} of {name: tensor}, by norms of this order; inf if a result is None."""
    norm = functools.partial(torch.linalg.vector_norm, ord=order)
    return {
        name: math.inf if results[name] is None else float(norm(results[name] - reference) / norm(reference))
        for name, reference in exact.items()
    }


def loss_and_gradients(config, device, batch, double=False, step_class=TrainStep):
    """{"loss" or parameter: the loss or its gradient} of a forward and backward pass from the initial weights."""
    step = step_class(config, device)
    if double:
        step.model.double()
    step.load(*batch)
    step.forward()
    step.backward()
    step.collect_gradients()
    gradients = {name: None if p.grad is None else whole(p.grad) for name, p in step.model.named_parameters()}
    return {"loss": step.loss.detach().double(), **gradients}


def exact_loss_and_gradients(config, device, batch):
    """Those of --impl torch in fp64, or in full fp32 for a bf16 run."""
    torch.set_float32_matmul_precision("highest")
    plain = dataclasses.replace(config, impl="torch", shard=None, use_amp=False, fp8=False)
    exact = loss_and_gradients(plain, device, batch, double=not config.use_amp)
    torch.set_float32_matmul_precision(config.matmul_precision)
    return exact


def check_batch(config, device, batch):
    """Return the Verdict on the loss and gradients of a batch, and their exact values."""
    plain = dataclasses.replace(config, impl="torch", shard=None, fp8_wide_margin=False)
    exact = exact_loss_and_gradients(config, device, batch)
    errors, plain_errors = (relative_errors(loss_and_gradients(c, device, batch), exact) for c in (config, plain))
    verdict = judge(errors, plain_errors, CHECK_ATOL[precision_name(config, device)])
    return companion("fp8").compare_with_bf16(verdict, exact, config, device, batch) if config.fp8 else verdict, exact


def print_verdict(verdict, reference):
    """Print the outcome of a check, and what failed."""
    errors, allowed, failed, worst = *verdict, verdict.failed, verdict.worst
    outcome = f"FAILED in {len(failed)} of {len(errors)}" if failed else "passed"
    print(f"Check against PyTorch in {reference}: {outcome} (loss and gradients of {len(errors) - 1} parameters)")
    print(f"    worst, {worst}: error {errors[worst]:.1e}, allowed {allowed[worst]:.1e}")
    for name in failed[:10]:
        reason = "no gradient" if errors[name] == math.inf else f"error {errors[name]:.1e}, allowed {allowed[name]:.1e}"
        print(f"    {name}: {reason}")


# ----------------------------------------------------------------------------------------------------------------------
# Training, and what is measured of it


class StepClock:
    """Times of the phases of a step, by events on a GPU and by the host's clock on a CPU."""

    def __init__(self, device, unsynced):
        # BUG unsynced_timing: the host's clock on a GPU times the launches, not the work.
        self.uses_events, self.marks = device.type == "cuda" and not unsynced, []

    def mark(self):
        """Record a point in time, the end of one phase and the beginning of the next."""
        self.marks.append(torch.cuda.Event(enable_timing=True) if self.uses_events else time.perf_counter())
        if self.uses_events:
            self.marks[-1].record()

    def intervals(self):
        """ms between the marks; the device must have been synchronized."""
        ms = torch.cuda.Event.elapsed_time if self.uses_events else lambda start, end: (end - start) * 1e3
        return [ms(start, end) for start, end in itertools.pairwise(self.marks)]


# What was measured of one step; times in ms, host_ms until the host had issued the whole step.
StepRecord = collections.namedtuple("StepRecord", "loss batch_ms host_ms phase_ms grad_norm")


def divergence(records):
    """The first loss or gradient norm that is not finite, as {"step", "quantity", "value"}, or None."""
    for number, record in enumerate(records, 1):
        for quantity, value in (("loss", record.loss), ("gradient norm", record.grad_norm)):
            if value is not None and not math.isfinite(value):
                return {"step": number, "quantity": quantity, "value": str(value)}
    return None


def gradient_norm(model):
    """The 2-norm of all gradients together."""
    return whole(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])).item()


def without_gradient(model):
    """The names of the parameters that are not frozen and have no gradient, or one of nothing but zeros."""
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [name for name, p in parameters if p.grad is None or not bool(whole(p.grad).any())]


def peak_memory_mib(device):
    """The most memory in use since the last reset: of the GPU's tensors, or on a CPU of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def warm_up(step):
    """Run the warm-up steps, restore the initial weights, capture if asked to. Returns the seconds it took."""
    config, start = step.config, time.perf_counter()
    data = step.batches((config.seed + 1) % 2**32)
    # What is captured must have been warmed up on another stream, which does not wait for the initial weights.
    step.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()) if config.graph else contextlib.nullcontext():
        for index in range(config.warmup_steps):
            step.load(*next(data))
            step.run()
            step.synchronize()
            print(f"warm-up {index + 1}/{config.warmup_steps} | {time.perf_counter() - start:.1f} s", flush=True)
    if config.warmup_steps:
        step.restart()
    if step.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if config.graph:
        step.capture(one_graph=config.timing == "step")
    step.synchronize()
    return time.perf_counter() - start


def train_in_phases(step, data, records):
    """Train for num_steps steps, or until the run diverges, and add a record of each. Synchronizes once a step."""
    for _ in range(step.config.num_steps):
        if step.must_stop():
            raise KeyboardInterrupt
        step.load(*next(data))
        step.synchronize()
        clock = StepClock(step.device, step.config.unsynced_timing)
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
            step.synchronize()
            # --------------- the training step ends: the rest is diagnostics ---------------
            wall_ms = (time.perf_counter() - start) * 1e3
        phase_ms = dict(zip(("forward", "backward", "optimizer"), clock.intervals(), strict=True))
        batch_ms = wall_ms if step.config.unsynced_timing else sum(phase_ms.values())
        step.collect_gradients()
        (loss,) = step.mean([step.loss.item()])
        if not add_record(step, records, StepRecord(loss, batch_ms, host_ms, phase_ms, gradient_norm(step.model))):
            return


def train_in_one_window(step, data, records):
    """As train_in_phases(), but the device is synchronized only once, after the last step."""
    config, losses, host_ms, interruption = step.config, [], [], None
    batches = [[t.to(step.tokens.device) for t in next(data)] for _ in range(config.num_steps)]
    clock = StepClock(step.device, config.unsynced_timing)
    step.synchronize()
    with step.named_range("steps"):
        clock.mark()
        try:
            for batch in batches:
                if step.must_stop():
                    raise KeyboardInterrupt
                start = time.perf_counter()
                step.load(*batch)
                with step.named_range("step"):
                    step.run()
                losses.append(step.loss.detach().clone())
                host_ms.append((time.perf_counter() - start) * 1e3)
                clock.mark()
        except KeyboardInterrupt as error:  # the steps done so far count
            interruption = error
        step.synchronize(clock.marks)
    step.collect_gradients()
    for loss, host, batch_ms in zip(step.mean([x.item() for x in losses]), host_ms, clock.intervals(), strict=False):
        # Whether gradients are finite shows in the next loss, except for those of the last step.
        norm = gradient_norm(step.model) if len(records) + 1 == config.num_steps else None
        if not add_record(step, records, StepRecord(loss, batch_ms, host, {}, norm)):
            break
    if interruption:
        raise interruption


def add_record(step, records, record):
    """Append the StepRecord, print its line, and return whether the run goes on: it has not diverged."""
    records.append(record)
    config, (loss, ms, _, _, grad_norm) = step.config, record
    norm = "" if grad_norm is None else f" | norm {grad_norm:.3f}"
    rate = f"{ms:.2f} ms | {config.tokens_per_step / ms * 1e3:,.0f} tok/s"
    print(f"step {len(records):4d}/{config.num_steps} | loss {loss:.4f}{norm} | {rate}", flush=True)
    return divergence([record]) is None


def summarize(step, records):
    """The measured figures of this process, a dict for print_summary() and the JSON file."""
    config, batch, hardware = step.config, [record.batch_ms for record in records], companion("hardware")
    mean_batch, (p20, p50, p80) = float(np.mean(batch)), np.percentile(batch, [20, 50, 80]).tolist()
    missing, named = without_gradient(step.model), dict(step.model.named_parameters())
    total, frozen = count_weights(named.values()), count_weights(p for p in named.values() if not p.requires_grad)
    tflops, peak = hardware.tflops_and_peak(config, step.device) if hardware else (None, None)
    return dict(
        steps=len(records), diverged=divergence(records), final_loss=records[-1].loss, first_loss=records[0].loss,
        entropy=entropy(config), samples_per_second=config.batch_size / mean_batch * 1e3,
        tokens_per_second=config.tokens_per_step / mean_batch * 1e3,
        batch_ms={"mean": mean_batch, "p20": p20, "p50": p50, "p80": p80},
        phase_ms={name: float(np.mean([r.phase_ms[name] for r in records])) for name in records[0].phase_ms},
        host_ms=float(np.median([record.host_ms for record in records])),
        peak_memory_mib=peak_memory_mib(step.device), parameters=total, parameters_frozen=frozen,
        parameters_with_gradient=total - frozen - count_weights(named[name] for name in missing),
        parameters_without_gradient=missing, tflops_per_second=tflops and tflops / (p50 / 1e3),
        mfu=peak and tflops / (p50 / 1e3) / peak,
    )  # fmt: skip


def print_summary(step, summary):
    """Print what summarize() returned, under labels that other programs read."""
    batch, phases, on_gpu = summary["batch_ms"], summary["phase_ms"], step.device.type == "cuda"
    print()
    if summary["diverged"]:
        where = "Step {step}: the {quantity} is {value}".format(**summary["diverged"])
        print(f"{where}: the run diverged, no later step counts; try a lower --learning-rate, or see what --check says")
    floor = dict(random="ln(vocab): random tokens cannot be learnt", markov="the data's entropy").get(step.config.data)
    floor = f"floor {summary['entropy']:.4f}, {floor}" if floor else f"guessing bytes: ln(256) = {math.log(256):.4f}"
    print(f"Final loss: {summary['final_loss']:.4f} (first {summary['first_loss']:.4f}; {floor})")
    print(f"Average training speed: {summary['samples_per_second']:.1f} samples/sec")
    print(f"Throughput: {summary['tokens_per_second']:,.0f} tokens/sec")
    print("Average batch time: {mean:.3f} ms (p20 {p20:.3f}, p50 {p50:.3f}, p80 {p80:.3f})".format(**batch))
    for name in ("forward", "backward", "optimizer"):
        print(f"Average {name} time: {f'{phases[name]:.3f} ms' if phases else 'not measured (--timing step)'}")
    if phases:
        together = sum(phases.values())
        print(f"Phases together: {together:.3f} ms, {100 * together / batch['mean']:.0f} % of the batch time")
    memory = summary["peak_memory_mib"]
    print(f"Peak memory usage: {f'{memory:.1f} MiB' if memory else 'unknown'}{'' if on_gpu else ' (whole process)'}")
    if on_gpu:
        launch_bound = "launch-bound" if summary["host_ms"] > 0.8 * batch["p50"] else "not launch-bound"
        print(f"Host time to issue a step: {summary['host_ms']:.3f} ms of {batch['p50']:.3f} ms ({launch_bound})")
        kernels = summary["kernels"]
        counted = "{kernels} in {launches} launches".format(**kernels) if isinstance(kernels, dict) else None
        print(f"Kernels a step: {counted or f'not counted, {kernels}'}")
    received, total, frozen = (summary[f"parameters{kind}"] for kind in ("_with_gradient", "", "_frozen"))
    apart = f", {frozen:,} frozen" if frozen else ""
    print(f"Parameters with a gradient: {received:,} of {total:,} ({100 * received / total:.1f} %){apart}")
    if summary["tflops_per_second"]:
        precision, mfu = precision_name(step.config, step.device), summary["mfu"]
        peak = f", {100 * mfu:.1f} % of the {precision} peak" if mfu else ""
        print(f"Model arithmetic: {summary['tflops_per_second']:.2f} TFLOP/s{peak}")
    print(f"Compilation and warm-up: {summary['warmup_seconds']:.1f} s, not counted above")
    if None not in summary["gpu"]["busy"].values():
        state = "{power_w:.0f} W, {clock_mhz:.0f} MHz, {temperature_c:.0f} degrees C".format(**summary["gpu"]["busy"])
        print(f"GPU after the last step: {state}")


# ----------------------------------------------------------------------------------------------------------------------
# A run, from the configuration to the JSON file


def print_configuration(step):
    """Print what runs where, read from the objects in use."""
    config, device, optimizer = step.config, step.device, type(step.optimizer).__name__
    versions = dict(PyTorch=torch.__version__, HIP=torch.version.hip, CUDA=torch.version.cuda)
    software = [f"{name} {version}" for name, version in versions.items() if version]
    software += [f"Triton {triton.__version__}" if triton else "no Triton"]
    processes = f" on each of {step.processes} processes" if step.processes > 1 else ""
    reason = triton_obstacle(device, config.use_amp) if config.impl == "triton" else None
    print(
        f"Device: {device.name} ({device.arch}); {', '.join(software)}\n"
        f"Model: hidden {config.hidden_dim}, {config.num_layers} layers, {config.num_heads} heads "
        f"({config.num_kv_heads} of K and V), ffn {config.ffn_dim}, vocab {config.vocab_size}: "
        f"{'untied head, ' * config.untied_head}{count_weights(step.model.parameters()):,} parameters\n"
        f"Training: batch {config.batch_size} x {config.seq_len} tokens{processes}, {config.num_steps} steps, "
        f"{precision_name(config, device)}, {config.data} data, seed {config.seed}\n"
        f"Implementation: {step.implementation}" + (f" (not triton: {reason})" if reason else "")
    )
    for name, operation in (operation_names(step.model) | {"optimizer": optimizer}).items():
        print(f"    {name:13} {operation}")
    notes = companion("notes")
    for line in notes.inert_flags(step) if notes else ():
        print(f"Note: {line}")
    print("Mistakes brought back: " + ", ".join(map(flag_of, config.bugs)) + "\n" if config.bugs else "", flush=True)


def operation_names(model):
    """{operation: the name of the function that the model calls}"""
    return {name: getattr(call, "func", call).__name__ for name, call in model.operations._asdict().items() if call}


def validate_on_device(config, device):
    """Raise UsageError for what this device cannot do, and for data that is not there."""
    if config.data != "random":
        companion("data", f"--data {config.data}").validate(config)
    if config.graph and device.type == "cpu":
        raise UsageError("--graph needs a GPU, and the device is a CPU: drop --graph (or --stage 8)")
    if config.graph and config.warmup_steps == 0:
        why = "--no-warmup" if config.no_warmup else "--warmup-steps 0"
        raise UsageError(f"--graph captures a step that has run before, and {why} forbids that: drop one of the two")
    if config.use_amp and device.arch == "sm_75":
        raise UsageError("--use-amp needs bf16, which sm_75 does not have: drop --use-amp")
    if config.fp8:
        companion("fp8", "--fp8").validate(config, device, select_operations(config, device)[0])
    if INTERPRETED and device.type == "cuda" and config.impl == "triton":
        raise UsageError("TRITON_INTERPRET=1 runs the kernels on the CPU: unset it, or give --device cpu")


def writable_folder(flag, name):
    """The folder as a Path; UsageError if no file can be written there. It is created when there is a result."""
    if not name:
        raise UsageError(f"{flag} '' names no folder: give one")
    folder = Path(os.path.abspath(name))
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    too_long = max(map(len, map(os.fsencode, folder.parts))) > 255  # bytes of a name, as on most file systems
    problem = errno.ENAMETOOLONG if too_long else 0 if existing.is_dir() else errno.ENOTDIR
    if problem or not os.access(existing, os.W_OK | os.X_OK):
        reason = os.strerror(problem or errno.EACCES)
        raise UsageError(f"{flag} {name} cannot be written to ({reason}): give another folder")
    return Path(name)


def write_new_json(folder, stem, result):
    """Write stem.json, or stem_1.json and so on, over no other file, whole or not at all. Returns its path."""
    result = json.loads(json.dumps(result), parse_constant=lambda name: None)  # JSON has no NaN: it becomes null
    endings = itertools.chain([""], map("_{}".format, itertools.count(1)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".", suffix=".tmp") as private:
            scratch = Path(private, "result.json")
            scratch.write_text(json.dumps(result, indent=1) + "\n")
            for path in (folder / f"{stem}{ending}.json" for ending in endings):
                try:
                    os.link(scratch, path)  # over no other file, unlike os.replace()
                except OSError:  # also where there are no hard links
                    if os.path.lexists(path):
                        continue
                    os.replace(scratch, path)
                return path
    except OSError as error:
        raise UsageError(f"{folder} cannot be written to ({error.strerror}): free space or give another") from error


def train_and_report(config, step_class=TrainStep):
    """Do what the configuration asks for, from the check to the profile. Returns the exit code."""
    device = step_class.select_device(config)
    output_folder = writable_folder("--output-dir", config.output_dir)
    profile_folder = None if config.profile is None else writable_folder("--profile", config.profile)
    hardware, profiler = companion("hardware"), companion("profiler", "--profile" if profile_folder else None)
    if hardware:
        hardware.require_host_memory(config, device)
    torch.set_float32_matmul_precision(config.matmul_precision)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the library is loaded
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # our kernels write all that they allocate
    small = dataclasses.replace(config, batch_size=min(config.batch_size, CHECK_BATCH), compile=False, graph=False)
    if config.check and not step_class.check(small, device):
        return 1
    gc.collect()  # the models of the check, whose Functions and gradients refer to each other
    step = step_class(config, device)
    data, records, exit_code = step.batches(config.seed), [], 0
    print_configuration(step)
    gpu_state = hardware.gpu_state if hardware else lambda device: {"power_w": None}
    gpu = {"idle": gpu_state(device)}
    try:
        warmup_seconds = warm_up(step)
        if profiler and profiler.attached_profiler():
            profiler.show_ranges(step)
        (train_in_phases if config.timing == "phases" else train_in_one_window)(step, data, records)
    except KeyboardInterrupt:
        print(f"\nInterrupted after {len(records)} of {config.num_steps} steps.")
        if not records:
            raise
        exit_code = 130
    gpu["busy"] = gpu_state(device)  # immediately after the measured steps
    summary = summarize(step, records) | {"warmup_seconds": warmup_seconds, "gpu": gpu}
    exit_code = exit_code or (1 if summary["diverged"] else 0)
    if summary["entropy"] is None and not exit_code:  # of a file
        try:
            summary |= companion("data").evaluate(step)
        except KeyboardInterrupt:  # the steps count
            exit_code = 130
    summary["kernels"] = "the run ended early" if exit_code else "tiny_llama/profiler.py is missing"
    if profiler and not exit_code:
        summary["kernels"] = profiler.count_kernels(step, summary["batch_ms"]["p50"])
    print_summary(step, summary)
    summary["world"] = step.report_processes(summary)
    result = dict(
        implementation=step.implementation, precision=precision_name(config, device),
        operations=operation_names(step.model), config=dataclasses.asdict(step.config),  # what ran: see capture()
        environment=hardware and hardware.environment(device), summary=summary,
        steps=[record._asdict() for record in records],
    )  # fmt: skip
    if step.rank == 0:
        stem = f"tiny_llama_v3_{step.implementation}_{time.strftime('%Y%m%d_%H%M%S')}"
        print(f"Results: {write_new_json(output_folder, stem, result)}")
    if profile_folder and exit_code == 0:
        profiler.write_profile(step, profile_folder)
    return exit_code


def main(argv=None, program=None):
    """Run a command line and return the exit code. What ends the run early takes one line, and no traceback."""
    argv, program = sys.argv[1:] if argv is None else argv, program or sys.argv[0]
    with contextlib.suppress(AttributeError, OSError):  # where tests have put another file in its place
        sys.stdout.reconfigure(errors="backslashreplace")  # prints a name that the locale cannot
    try:
        try:
            if os.environ.get("WORLD_SIZE", "1") != "1":  # torchrun has started several processes
                return companion("distributed", f"WORLD_SIZE={os.environ['WORLD_SIZE']}").main(argv, program)
            config, hardware = parse_config(argv, program), companion("hardware")
            return hardware.remedied(config, train_and_report) if hardware else train_and_report(config)
        finally:
            print(end="", flush=True)  # a closed pipe raises here, and not in the interpreter's last flush
    except KeyboardInterrupt:
        return 130
    except (UsageError, OSError) as error:
        if isinstance(error, OSError):
            if error.errno not in (errno.EPIPE, errno.ENOSPC):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for that last flush
            if error.errno == errno.EPIPE:
                return 141
        print(f"{Path(program).name}: error: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    exit_code = main()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # there is nothing left to interrupt
    sys.exit(exit_code)
