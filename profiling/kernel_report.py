"""Compile every Triton kernel for AMD and NVIDIA GPUs that need not be there, check the outcome, and report it.

    python -m profiling.kernel_report                   write docs/compiled_kernels.md and its JSON
    python -m profiling.kernel_report --check           only check, in more configurations than the report shows
    python -m profiling.kernel_report --check --architectures gfx942 --cases medium --precisions bf16

Launches are recorded, not listed: the training step runs on tensors without memory, once for each architecture, and
every kernel is compiled with the configuration and the argument attributes that its launch would have had. A check
fails on what makes a kernel slow or impossible to launch: spilled registers, too much shared memory, too many threads,
matrix products without matrix instructions, narrow loads. Nothing is run: bounds are those of the datasheets.

Exit codes: 0 done, 1 a check failed, 2 the request cannot be met, 130 interrupted.
"""

import collections
import concurrent.futures
import contextlib
import importlib
import inspect
import json
import math
import multiprocessing
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # the interpreter would be in the compiler's place

import torch  # noqa: E402

import nanogpt_triton.kernels  # noqa: E402
import tiny_llama_v3 as llama  # noqa: E402
from measure import work  # noqa: E402
from measure.results import RESULTS, ROOT  # noqa: E402
from measure.tables import markdown_table, number  # noqa: E402
from measure.work import SIZES  # noqa: E402
from tiny_llama_v3 import exit_code_of  # noqa: E402

PAGE, RESULT = ROOT / "docs" / "compiled_kernels.md", RESULTS / "compiled_kernels.json"

# ----------------------------------------------------------------------------------------------------------------------
# The GPUs: one of each architecture, as PyTorch shows it (a die of an MI250X). Matrix peaks are in tiny_llama_v3.py.


class Chip(NamedTuple):
    name: str
    units: int  # compute units or multiprocessors
    terabytes_per_second: float
    shared_limit: int  # bytes of shared memory (LDS) that one program may have
    shared_total: int  # bytes of it in one unit


CHIPS = {
    "gfx90a": Chip("AMD Instinct MI250X", 110, 1.64, 64 * 1024, 64 * 1024),
    "gfx942": Chip("AMD Instinct MI300X", 304, 5.3, 64 * 1024, 64 * 1024),
    "gfx950": Chip("AMD Instinct MI355X", 256, 8.0, 160 * 1024, 160 * 1024),
    "sm_80": Chip("NVIDIA A100", 108, 2.04, 163 * 1024, 164 * 1024),
    "sm_90": Chip("NVIDIA H200", 132, 4.8, 227 * 1024, 228 * 1024),
}
MAX_THREADS = 1024  # of a program, on all of them


def is_amd(arch):
    return arch.startswith("gfx")


def wave_size(arch):
    return 64 if is_amd(arch) else 32


def device_of(arch):
    """The Device that tiny_llama_v3.py would find, but of type "meta": tensors on it have shapes and no memory."""
    chip = CHIPS[arch]
    return llama.Device("meta", chip.name, arch, chip.units, wave_size(arch))


# ----------------------------------------------------------------------------------------------------------------------
# Kernels: those of the training script and of nanogpt_triton/, found, not listed


def kernel_modules():
    names = (module.name for module in pkgutil.iter_modules(nanogpt_triton.kernels.__path__))
    return [llama, *(importlib.import_module(f"nanogpt_triton.kernels.{name}") for name in names)]


def find_kernels(modules):
    """{name: kernel} of the functions that Triton compiles and no other of them calls."""
    functions = {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if type(value).__name__ in ("JITFunction", "InterpretedFunction") and value.fn.__module__ == module.__name__
    }
    sources = {name: inspect.getsource(function.fn) for name, function in functions.items()}
    called = {
        name
        for name in functions
        for other, source in sources.items()
        if other != name and re.search(rf"\b{name}\(", source)
    }
    return {name: function for name, function in functions.items() if name not in called}


# ----------------------------------------------------------------------------------------------------------------------
# Launches, recorded from the real launchers


@dataclass(frozen=True)
class Tensor:
    """A kernel's argument, as far as the compiler looks at it."""

    dtype: torch.dtype
    shape: tuple
    address: int  # modulo 16
    storage_bytes: int

    def numel(self):
        return math.prod(self.shape)

    @property
    def nbytes(self):
        return self.numel() * self.dtype.itemsize

    def data_ptr(self):
        return self.address

    def ptr_range(self):
        return self.storage_bytes

    @property
    def compiled_as(self):
        return self.dtype, self.address, self.storage_bytes < 2**31

    def as_argument(self):
        return self


@dataclass(frozen=True)
class Descriptor(Tensor):
    """A descriptor of a tensor: blocks of it are what the kernel loads."""

    strides: tuple
    block: tuple

    @property
    def compiled_as(self):
        return self.dtype, self.block

    def as_argument(self):
        return llama.TensorDescriptor(self, list(self.shape), list(self.strides), list(self.block))


def seen_by_compiler(t):
    """What the compiler sees of a launcher's tensor, descriptor or None."""
    if t is None:
        return None
    tensor = getattr(t, "base", t)
    storage = tensor.untyped_storage().size()
    seen = tensor.dtype, tuple(tensor.shape), tensor.storage_offset() * tensor.element_size() % 16, storage
    return Tensor(*seen) if tensor is t else Descriptor(*seen, tuple(t.strides), tuple(t.block_shape))


@dataclass(frozen=True)
class Launch:
    kernel: str
    grid: tuple
    tensors: tuple
    scalars: tuple
    constants: tuple  # of (name, value)
    options: tuple  # of (name, value)

    @property
    def warps(self):
        return dict(self.options)["num_warps"]

    @property
    def numbers(self):
        """The scalars, those within tuples too."""
        return [n for s in self.scalars for n in (s if isinstance(s, tuple) else (s,))]

    @property
    def compiled_as(self):
        """What the compiled kernel depends on: launches with the same key share it."""
        tensors = (t and t.compiled_as for t in self.tensors)
        scalars = ((type(s), s == 1, s % 16 == 0, s < 2**31) if isinstance(s, int) else type(s) for s in self.numbers)
        return self.kernel, tuple(tensors), tuple(scalars), self.constants, self.options

    def arguments(self, kernel):
        """Parameter names, without _ptr, and their values; the constants among them."""
        names = (name.removesuffix("_ptr") for name in kernel.arg_names)
        values = [*self.tensors, *self.scalars]
        return SimpleNamespace(**dict(zip(names, values, strict=False)), **dict(self.constants), grid=self.grid)


@contextlib.contextmanager
def device_found(device, **replaced):
    """The launchers find this Device, and choose their tiles for it; replaced are other functions of their modules."""
    modules = kernel_modules()
    tiles = [f for module in modules for f in vars(module).values() if hasattr(f, "cache_clear")]
    with contextlib.ExitStack() as stack:
        for module in modules:
            there = {name: function for name, function in replaced.items() if hasattr(module, name)}
            stack.enter_context(mock.patch.multiple(module, get_device=lambda type: device, **there))
        for tile in tiles:
            stack.callback(tile.cache_clear)
            tile.cache_clear()
        yield


@contextlib.contextmanager
def recording(arch):
    """Yields a list that launch() appends to, the device being one of arch."""
    launches = []

    def record(kernel, grid, tensors, scalars, constants, num_warps=4, num_stages=2, **options):
        described = map(seen_by_compiler, tensors)
        options = dict(num_warps=num_warps, num_stages=num_stages, **options)
        items = (tuple(grid), tuple(described), tuple(scalars), tuple(constants.items()), tuple(options.items()))
        launches.append(Launch(kernel.fn.__name__, *items))

    with device_found(device_of(arch), launch=record, launch_described=record):
        yield launches


def record_step(config, arch):
    """The launches of a forward and a backward pass and an optimizer step."""
    precision = "tf32" if config.matmul_precision == "high" else "ieee"
    # Not this machine's library decides about the precision, but the case.
    with recording(arch) as launches, mock.patch.object(llama, "dot_precision", lambda device: precision):
        _, operations = llama.select_operations(config, device_of(arch))
        with torch.device("meta"):
            model = llama.TinyLlamaTriton(config, operations)
            tokens = torch.zeros(config.batch_size, config.seq_len, dtype=torch.int64)
        optimizer = llama.FlatAdamW(model, config.learning_rate, config.use_amp)
        model(tokens, tokens).backward()
        optimizer.step()
    return launches


def record_split_rows(config, arch):
    """RMSNorm with blocks shorter than a row, as the exercises sweep them."""
    with recording(arch) as launches:
        dtype = torch.bfloat16 if config.use_amp else torch.float32
        x = torch.empty(config.tokens_per_step, config.hidden_dim, dtype=dtype, device="meta")
        for block_size in (64, 256):
            llama.rmsnorm_forward(x, x, x[0], 1e-5, block_size)
    return launches


def record_far_strides(config, arch):
    """Attention where the offsets of positions take 64 bits, at a length for each form of the backward pass."""
    with recording(arch) as launches, torch.device("meta"):
        for seq_len in (llama.FUSED_BACKWARD_SEQ_LEN, 2 * llama.FUSED_BACKWARD_SEQ_LEN):
            q, k = (
                torch.empty_strided(
                    (config.batch_size, seq_len, heads, config.head_dim),
                    (2**40, 2**31, config.head_dim, 1),
                    dtype=torch.bfloat16 if config.use_amp else torch.float32,
                )
                for heads in (config.num_heads, config.num_kv_heads)
            )
            o, lse = llama.flash_attention_forward(q, k, k)
            llama.flash_attention_backward(o, q, k, k, o, lse, q, k, k)
    return launches


def record_layer_norm(config, arch):
    """The LayerNorms of a GPT under autocast: weights and the residual stream stay in fp32."""
    dtype = torch.bfloat16 if config.use_amp else torch.float32
    norm = nanogpt_triton.kernels.TritonLayerNorm.apply
    with recording(arch) as launches, torch.device("meta"):
        for width in (384, 768, 1600):
            weight, bias = (torch.empty(width, requires_grad=True) for _ in range(2))
            x = torch.empty(config.tokens_per_step, width, requires_grad=True)
            branch = torch.empty_like(x, dtype=dtype, requires_grad=True)
            outputs = norm(x, weight, bias, 1e-5, dtype), *norm(x, weight, bias, 1e-5, dtype, branch)
            torch.autograd.backward(outputs, [torch.empty_like(y) for y in outputs])
    return launches


PRECISIONS = {"bf16": dict(use_amp=True), "fp32": {}, "tf32": dict(matmul_precision="high")}


class Case(NamedTuple):
    sizes: dict  # of Config
    record: Callable = record_step
    reported: tuple = ()  # the precisions that the report has; the check has all
    wide_loads: bool = True
    precisions: dict = dict.fromkeys(CHIPS, tuple(PRECISIONS))  # on each architecture


SHORT, LONG = SIZES["small"] | dict(num_layers=1), SIZES["medium"] | dict(num_layers=1)
# Tiles depend on the vendor, on NVIDIA also on the architecture. Without tensor cores ptxas takes up to half a minute.
HEADS = {"gfx942": ("bf16", "fp32")}
# A head that is no power of two is padded, and its masks and offsets take scalar registers.
PADDED_HEADS = {arch: ("bf16", "fp32") for arch in CHIPS if is_amd(arch)} | {"gfx942": tuple(PRECISIONS)}
WIDE_HEADS = {"gfx942": tuple(PRECISIONS), "sm_80": ("bf16",), "sm_90": ("bf16",)}
BF16 = dict.fromkeys(CHIPS, ("bf16",))
AMD_BF16 = {arch: ("bf16",) for arch in CHIPS if is_amd(arch)}
CASES = {
    "small": Case(SIZES["small"], reported=("bf16",)),
    "medium": Case(SIZES["medium"], reported=tuple(PRECISIONS)),
    "large": Case(SIZES["large"], reported=("bf16",)),
    "heads-16": Case(LONG | dict(num_heads=64), precisions=HEADS),
    "heads-32": Case(LONG | dict(num_heads=32), precisions=HEADS),
    "heads-40": Case(LONG | dict(hidden_dim=1280, num_heads=32), precisions=PADDED_HEADS),
    "heads-80": Case(LONG | dict(hidden_dim=1280), precisions=PADDED_HEADS),
    "heads-128": Case(LONG | dict(num_heads=8), precisions=WIDE_HEADS),
    "short-heads-32": Case(SHORT | dict(num_heads=16), precisions=HEADS),
    "short-heads-40": Case(SHORT | dict(hidden_dim=640, num_heads=16), precisions=PADDED_HEADS),
    "short-heads-80": Case(SHORT | dict(hidden_dim=640), precisions=PADDED_HEADS),
    "odd-heads-40": Case(SHORT | dict(hidden_dim=320, seq_len=33), precisions=PADDED_HEADS),
    "short-heads-128": Case(SHORT | dict(num_heads=4), precisions=WIDE_HEADS),
    "vocabulary-32000": Case(SHORT | dict(vocab_size=32000), precisions=BF16),
    "layer-norm": Case(LONG, record=record_layer_norm, reported=("bf16",)),
    # What is slow on purpose must still compile.
    "far-strides": Case(
        SHORT, record=record_far_strides, precisions=AMD_BF16
    ),  # on NVIDIA it spills, and runs in tests
    "split-rows": Case(SHORT, record=record_split_rows, wide_loads=False, precisions=BF16),
    "mistakes": Case(SHORT | dict(noncontiguous_kv=True, triton_matmul_swiglu=True), wide_loads=False, precisions=BF16),
}


class Job(NamedTuple):
    arch: str
    case: str
    precision: str
    launch: Launch
    calls: int  # in a step


def jobs_for(architectures, selection):
    """A Job for each distinct launch of selection, {case: precisions}, as far as an architecture has them."""
    for arch in architectures:
        for name, precisions in selection.items():
            case = CASES[name]
            for precision in precisions:
                if precision == "tf32" and not llama.tf32_available(device_of(arch)):
                    continue
                if precision in case.precisions.get(arch, ()):
                    config = llama.Config(**case.sizes, **PRECISIONS[precision])
                    for launch, calls in collections.Counter(case.record(config, arch)).items():
                        yield Job(arch, name, precision, launch, calls)


# ----------------------------------------------------------------------------------------------------------------------
# Compiling, in worker processes, and reading what came out


class Driver:
    """Stands where Triton keeps the driver of the GPU at hand, and names another GPU."""

    def __init__(self, arch):
        from triton.backends.compiler import GPUTarget

        target = ("hip", arch, 64) if is_amd(arch) else ("cuda", int(arch.removeprefix("sm_")), 32)
        self.arch, self.target = arch, GPUTarget(*target)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.arch

    def get_current_stream(self, device):
        return 0


def compile_launch(arch, launch, read=None):
    """What the compiler made of a launch, a dict, or {"error": one line}; read(code of all levels) makes the dict."""
    import triton

    kernel = find_kernels(kernel_modules())[launch.kernel]
    warnings.simplefilter("ignore")  # Triton's own, about its defaults
    triton.runtime.driver.set_active(Driver(arch))
    try:
        arguments = *(t and t.as_argument() for t in launch.tensors), *launch.scalars
        compiled = kernel.warmup(*arguments, **dict(launch.constants), **dict(launch.options), grid=launch.grid)
    except Exception as error:  # of this launch alone
        return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}"}
    read = read or (read_amdgcn if is_amd(arch) else read_cubin)
    return {
        **read(compiled.asm),
        "shared_bytes": compiled.metadata.shared,
        "has_dot": bool(re.search(r"\btt\.dot\b", compiled.asm["ttir"])),
    }


AMD_WIDTHS = {
    "byte": 1, "ubyte": 1, "sbyte": 1, "short": 2, "ushort": 2, "sshort": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12,
    "dwordx4": 16,
}  # fmt: skip


def memory_access(name):
    """("load" or "store", bytes a lane) of AMD's instructions of global memory, None of others."""
    moved = re.fullmatch(r"(?:global|buffer|flat)_(load|store)_([us]?byte|[us]?short|dword(?:x\d)?)(?:_d16.*)?", name)
    return moved and (moved[1], AMD_WIDTHS[moved[2]])


def read_amdgcn(asm):
    text = asm["amdgcn"]

    def field(name):
        return int(re.search(rf"\.{name}:\s+(\d+)", text)[1])

    loads, instructions = collections.Counter(), collections.Counter()
    for name in re.findall(r"^\s+([a-z]\w+)", text, flags=re.M):
        access = memory_access(name)
        if access:
            kind, width = access
            instructions[f"{kind} {8 * width}"] += 1
            if kind == "load":
                loads[width] += 1
        elif name.startswith("v_mfma"):
            instructions[name] += 1
    return {
        "registers": field("vgpr_count"),  # of a thread; the accumulation registers are among them
        "scalar_registers": field("sgpr_count"),
        "vector_spills": field("vgpr_spill_count"),
        "scalar_spills": field("sgpr_spill_count"),
        "scratch_bytes": field("private_segment_fixed_size"),
        "wide_share": wide_share(loads),
        "matrix_instructions": sum(count for name, count in instructions.items() if name.startswith("v_mfma")),
        "instructions": dict(instructions),
        "compiler_occupancy": int(re.search(r"; Occupancy: (\d+)", text)[1]),
    }


def read_cubin(asm):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        tool = Path(importlib.import_module("triton").__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"\b{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL"))
    loads, instructions = collections.Counter(), collections.Counter()
    for line in asm["ptx"].splitlines():
        words = line.split()
        name = next((word for word in words if not word.startswith(("@", "{"))), "")
        moved = re.fullmatch(r"(ld|st)\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[a-z](\d+)", name)
        if moved:
            width = int(moved[2] or 1) * int(moved[3])
            instructions[f"{'load' if moved[1] == 'ld' else 'store'} {width}"] += 1
            if moved[1] == "ld":
                loads[width // 8] += 1
        elif name.startswith("cp.async.c") and ".shared.global" in name:
            width = int(re.search(r"\], (0x\w+|\d+)", line)[1], 0)
            instructions[f"async load {8 * width}"] += 1
            loads[width] += 1
        elif name.startswith(("wgmma.mma_async", "mma.sync")):
            instructions[re.sub(r"\.(sync|aligned|row|col)\b", "", name).replace("mma_async.", "")] += 1
    return {
        "registers": registers,
        "scalar_registers": None,
        "vector_spills": None,  # ptxas puts them into the scratch bytes
        "scalar_spills": None,
        "scratch_bytes": stack + local,
        "wide_share": wide_share(loads),
        "matrix_instructions": sum(count for name, count in instructions.items() if "mma" in name),
        "instructions": dict(instructions),
        "compiler_occupancy": None,
    }


def wide_share(loads):
    """The share of what {bytes a thread: instructions} load that comes in 8 bytes or more; None without loads."""
    total = sum(width * count for width, count in loads.items())
    return sum(width * count for width, count in loads.items() if width >= 8) / total if total else None


def compile_order(job):
    """The longest first: matrix products that have no matrix instructions."""
    return is_amd(job.arch), job.precision != "fp32", "attention" not in job.launch.kernel


def compile_jobs(jobs, processes, read=None):
    """What the compiler made of each distinct launch: {(arch, what it is compiled as): dict}; read as above."""
    distinct = {(job.arch, job.launch.compiled_as): job for job in jobs}
    distinct = dict(sorted(distinct.items(), key=lambda item: compile_order(item[1])))
    with concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = {key: pool.submit(compile_launch, job.arch, job.launch, read) for key, job in distinct.items()}
        return {key: future.result() for key, future in futures.items()}


# ----------------------------------------------------------------------------------------------------------------------
# Work of a launch, from the arguments of its kernel


def added(a):
    return (a.branch, a.residual) if a.HAS_BRANCH else ()


def residual_grad(a):
    return a.residual_grad if a.HAS_RESIDUAL_GRAD else None


def tables(a):
    return (a.cos, a.sin) if a.ROTARY else ()


WORK = {  # kernel: its arguments -> Work
    "rmsnorm_kernel": lambda a: work.rmsnorm(a.x, a.weight, a.y, a.rstd, *added(a)),
    "rmsnorm_backward_kernel": lambda a: work.rmsnorm_backward(
        a.y_grad, a.x, a.weight, a.rstd, a.x_grad, residual_grad(a), a.partial
    ),
    "column_sum_kernel": lambda a: work.column_sum(a.partial, a.sum),
    "flash_attention_kernel": lambda a: work.attention(a.q, a.k, a.v, a.o, a.lse),
    "flash_attention_backward_dq_kernel": lambda a: work.attention_backward_dq(
        a.q, a.k, a.v, a.o, a.o_grad, a.lse, a.delta, a.q_grad, *tables(a)
    ),
    "flash_attention_backward_dkdv_kernel": lambda a: work.attention_backward_dkdv(
        a.q, a.k, a.v, a.o_grad, a.lse, a.delta, a.k_grad, a.v_grad, *tables(a)
    ),
    "flash_attention_backward_kernel": lambda a: work.attention_backward_fused(
        a.q, a.k, a.v, a.o, a.o_grad, a.lse, a.q_grad, a.k_grad, a.v_grad, *tables(a)
    ),
    "rope_kernel": lambda a: work.rope(a.n_tokens * a.grid[1] * a.HEAD_DIM, a.x.dtype.itemsize, a.cos, a.sin),
    "swiglu_activation_kernel": lambda a: work.swiglu_activation(a.gate_up, a.hidden),
    "swiglu_activation_backward_kernel": lambda a: work.swiglu_activation_backward(a.hidden_grad, a.gate_up),
    "swiglu_kernel": lambda a: work.swiglu_matmul(a.x, a.weight, a.gate_up, a.hidden),
    "cross_entropy_kernel": lambda a: work.cross_entropy(a.logits, a.targets, a.loss),
    "scale_kernel": lambda a: work.scale(a.factor),
    "embedding_backward_kernel": lambda a: work.embedding_backward(a.tokens, a.out_grad, a.weight_grad),
    "adamw_kernel": lambda a: work.adamw(
        a.param, a.remainder if a.SPLIT else None, a.grad, a.exp_avg, a.exp_avg_sq
    ),
    "layer_norm_kernel": lambda a: work.layer_norm(
        a.x, a.weight, a.y, a.mean, a.rstd, a.bias if a.HAS_BIAS else None, *added(a)
    ),
    "layer_norm_backward_kernel": lambda a: work.layer_norm_backward(
        a.y_grad, a.x, a.weight, a.mean, a.rstd, a.x_grad, residual_grad(a),
        a.branch_grad if a.HAS_BRANCH_GRAD else None, a.partial, bias=a.HAS_BIAS, twice=a.READ_TWICE,
    ),
}  # fmt: skip


def bound(arch, precision, has_dot, nbytes, operations):
    """(microseconds, "memory" or "compute"): no launch can be faster on a GPU that keeps its datasheet's promises."""
    peak = llama.peak_tflops(device_of(arch), precision if has_dot else "fp32")
    memory_us = nbytes / CHIPS[arch].terabytes_per_second / 1e6
    compute_us = operations / peak / 1e6
    return max(memory_us, compute_us), "memory" if memory_us >= compute_us else "compute"


def round_up(value, step):
    return -(-value // step) * step


def occupancy(arch, registers, shared_bytes, warps):
    """{"warps" that fit in one unit, "share" of the most it takes, "limit": what keeps it from more}.

    A unit has four schedulers. AMD: 512 registers a lane, in steps of 8, and 8 waves each. NVIDIA: 16384 registers, in
    steps of 8 a thread, and 16 warps each; 1 KiB of shared memory a program belongs to the system.
    """
    most = 32 if is_amd(arch) else 64
    if is_amd(arch):
        by_registers = 4 * min(8, 512 // round_up(max(registers, 1), 8))
        most_programs = 16 if warps > 1 else 32
    else:
        by_registers = 4 * min(16, 16384 // (32 * round_up(max(registers, 1), 8)))
        shared_bytes += 1024
        most_programs = 32
    programs = {
        "registers": by_registers // warps,
        "shared memory": CHIPS[arch].shared_total // shared_bytes if shared_bytes else math.inf,
        "programs": min(most_programs, most // warps),
    }
    limit = min(reversed(programs), key=programs.get)
    resident = programs[limit] * warps
    return {"warps": resident, "share": resident / most, "limit": None if resident == most else limit}


# ----------------------------------------------------------------------------------------------------------------------
# The check

# Scratch bytes a thread that may stay. Hopper's tiles were chosen by time on an H200, not by what they spill; without
# TF32 an fp32 product has no matrix instruction there and unrolls into many. It may shrink, not grow.
SCRATCH = {
    ("sm_80", "rmsnorm_backward_kernel", "fp32"): 16,
    ("sm_80", "rmsnorm_backward_kernel", "tf32"): 16,
    ("sm_80", "flash_attention_backward_kernel", "bf16"): 8,
    ("sm_80", "flash_attention_backward_dkdv_kernel", "bf16"): 8,
    ("sm_90", "rmsnorm_backward_kernel", "bf16"): 40,
    ("sm_90", "rmsnorm_backward_kernel", "fp32"): 96,
    ("sm_90", "rmsnorm_backward_kernel", "tf32"): 96,
    ("sm_90", "flash_attention_backward_kernel", "bf16"): 352,
    ("sm_90", "flash_attention_backward_kernel", "fp32"): 424,
    ("sm_90", "flash_attention_kernel", "fp32"): 8,
    ("sm_90", "flash_attention_backward_dq_kernel", "fp32"): 232,
    ("sm_90", "flash_attention_backward_dkdv_kernel", "bf16"): 232,
    ("sm_90", "flash_attention_backward_dkdv_kernel", "fp32"): 848,
}
# AMD's scalar registers spill into lanes of a vector register, not into memory. Heads of 40 in one kernel for all
# gradients take 3 more on gfx90a, which has the fewest; without the hint of HEAD_ALIGNMENT they would be 15.
SCALAR_SPILLS = 8
MORE_SCALAR_SPILLS = {
    ("gfx90a", case, "flash_attention_backward_kernel", "bf16"): 11 for case in ("short-heads-40", "odd-heads-40")
}
WIDE_SHARE = 0.5


def violations(row):
    """What is wrong with a row, each a line that names the figure and its limit."""
    arch, launch = row["arch"], f"{row['kernel']} for {row['arch']} ({row['case']}, {row['precision']}, {row['tile']})"
    if row.get("error"):
        return [f"{launch}: does not compile: {row['error']}"]
    chip, threads = CHIPS[arch], row["warps"] * wave_size(arch)
    scratch = SCRATCH.get((arch, row["kernel"], row["precision"]), 0)
    scalar_spills = MORE_SCALAR_SPILLS.get((arch, row["case"], row["kernel"], row["precision"]), SCALAR_SPILLS)
    # NVIDIA's matrix instructions take fp32 only as TF32.
    needs_matrix = row["has_dot"] and (is_amd(arch) or row["precision"] != "fp32")
    limits = [
        (
            threads > MAX_THREADS,
            f"{row['warps']} warps are {threads} threads, limit {MAX_THREADS}",
        ),
        (
            row["shared_bytes"] > chip.shared_limit,
            f"{row['shared_bytes']} bytes of shared memory, limit {chip.shared_limit}",
        ),
        ((row["vector_spills"] or 0) > 0, f"{row['vector_spills']} vector registers spilled, limit 0"),
        (
            (row["scalar_spills"] or 0) > scalar_spills,
            f"{row['scalar_spills']} scalar registers spilled, limit {scalar_spills}",
        ),
        (row["scratch_bytes"] > scratch, f"{row['scratch_bytes']} bytes of scratch a thread, limit {scratch}"),
        (
            is_amd(arch) and not row["has_dot"] and row["registers"] > 256,
            f"{row['registers']} registers, limit 256: the rest are accumulation registers, reached by copies",
        ),
        (needs_matrix and not row["matrix_instructions"], "no matrix instruction for its products, at least 1 needed"),
        (
            row["wide_loads_expected"] and row["wide_share"] is not None and row["wide_share"] < WIDE_SHARE,
            f"{row['wide_share'] or 0:.0%} of its bytes in loads of 8 bytes or more, at least {WIDE_SHARE:.0%} needed",
        ),
    ]
    return [f"{launch}: {message}" for broken, message in limits if broken]


def missing_kernels(kernels, launches):
    """Kernels that nothing here launches, or whose work is not known."""
    launched = {launch.kernel for launch in launches}
    for name in kernels:
        if name not in launched:
            yield f"{name}: no case launches it; add one to CASES in profiling/kernel_report.py"
        if name not in WORK:
            yield f"{name}: its bytes and operations are not known; add them to WORK in profiling/kernel_report.py"


# ----------------------------------------------------------------------------------------------------------------------
# Report


def tile_of(launch):
    """The constants that are sizes of tiles, and what the compiler is told, in a few words."""
    constants, options = dict(launch.constants), dict(launch.options)
    sizes = {"BLOCK_M": "m", "BLOCK_N": "n", "BLOCK_ROWS": "rows", "BLOCK_TOKENS": "tokens", "BLOCK_COLS": "cols"}
    words = [f"{constants[name]} {word}" for name, word in sizes.items() if name in constants]
    words += [f"{constants['BLOCK_SIZE']} elements"] if "BLOCK_SIZE" in constants else []
    words += [f"head {constants['HEAD_DIM']}"] if "HEAD_DIM" in constants else []
    return ", ".join([*words, f"{options['num_warps']} warps"])


def variant_of(launch):
    """Which of a kernel's variants: its boolean constants that are true."""
    return " ".join(name.removeprefix("HAS_").lower() for name, value in launch.constants if value is True)


def make_row(job, compiled, kernels):
    launch = job.launch
    aligned = all(s % 16 == 0 for s in launch.numbers if isinstance(s, int) and s > 256)  # the compiler knows no better
    row = {
        "kernel": launch.kernel,
        "variant": variant_of(launch),
        "arch": job.arch,
        "case": job.case,
        "precision": job.precision,
        "calls": job.calls,
        "tile": tile_of(launch),
        "warps": launch.warps,
        "options": {name: value for name, value in launch.options if name != "num_warps"},
        "wide_loads_expected": CASES[job.case].wide_loads and aligned,
        **compiled,
    }
    if launch.kernel in WORK and not row.get("error"):
        row["bytes"], row["operations"] = WORK[launch.kernel](launch.arguments(kernels[launch.kernel]))
        row["bound_us"], row["bound_by"] = bound(
            job.arch, job.precision, row["has_dot"], row["bytes"], row["operations"]
        )
        row["occupancy"] = occupancy(job.arch, row["registers"], row["shared_bytes"], row["warps"])
    return row


def analyse(jobs, processes):
    """(rows, lines that say what is wrong with them)"""
    kernels = find_kernels(kernel_modules())
    compiled = compile_jobs(jobs, processes)
    rows = [make_row(job, compiled[job.arch, job.launch.compiled_as], kernels) for job in jobs]
    return rows, [line for row in rows for line in violations(row)]


HEADER = """# What the compiler makes of each kernel

<!-- Generated by `make kernel-report`; do not edit. -->

Every Triton kernel, compiled for five GPU architectures in the configurations that
[tiny_llama_v3.py](../tiny_llama_v3.py) chooses there. **Nothing on this page was run**: registers, shared memory and
instructions are the compiler's, bounds are arithmetic with datasheets. No AMD GPU has run these kernels yet; what they
do in emulation is counted in [emulated_counts.md](emulated_counts.md), times measured on an NVIDIA H200 are in
[README.md](../README.md).

- *registers* of a thread. AMD has 512 of them, accumulation registers included, NVIDIA 255.
- *shared*: KiB of shared memory (AMD: LDS) of a program.
- *occupancy*: the warps (AMD: waves) that fit in one multiprocessor (AMD: compute unit) at a time, as a share of the
  most that it takes, and what keeps it from more.
- *main instructions*: those of matrix products, and loads and stores of global memory by the bits that a thread moves.
- *calls* in a training step.
- *MB*, *MFLOP* of one launch: what must move at least, each tensor once, and the operations of its formula.
- *bound*: the longer of bytes / bandwidth and operations / peak. A launch costs some microseconds on top.
"""


def instruction_cell(row):
    """Matrix instructions first."""
    names = sorted(row["instructions"], key=lambda name: ("load" in name or "store" in name, name))
    return ", ".join(f"{row['instructions'][name]} {name}" for name in names)


def report_line(row):
    spilled = row["scratch_bytes"] or row["vector_spills"] or 0
    held_by = row["occupancy"]["limit"]
    return [
        f"`{row['kernel'].removesuffix('_kernel')}`" + (f" {row['variant']}" if row["variant"] else ""),
        row["tile"],
        f"{row['registers']}" + (f", spills {spilled} bytes" if spilled else ""),
        number(row["shared_bytes"] / 1024),
        f"{row['occupancy']['share']:.0%}" + (f", {held_by}" if held_by else ""),
        instruction_cell(row),
        f"{row['calls']}",
        number(row["bytes"] / 1e6),
        number(row["operations"] / 1e6),
        f"{number(row['bound_us'])} us, {row['bound_by']}",
    ]


COLUMNS = ["kernel", "tile", "registers", "shared", "occupancy", "main instructions", "calls", "MB", "MFLOP", "bound"]


def case_title(case):
    sizes = CASES[case].sizes
    return f"{case}: {sizes['batch_size']} x {sizes['seq_len']} tokens, hidden {sizes['hidden_dim']}"


def page(result):
    """The Markdown of a result; it shows bf16."""
    link = f"[{RESULT.name}](../benchmarks/results/{RESULT.name})"
    parts = [HEADER, f"Compiled by Triton {result['triton']}: `{result['command']}` ({link})"]
    rows = [row for row in result["rows"] if row["precision"] == "bf16"]
    for arch in dict.fromkeys(row["arch"] for row in rows):
        chip = CHIPS[arch]
        peak = llama.peak_tflops(device_of(arch), "bf16")
        parts.append(
            f"## {arch}\n\n{chip.name}: {chip.units} {'compute units' if is_amd(arch) else 'multiprocessors'}, "
            f"{peak:,.0f} TFLOP/s in bf16, {chip.terabytes_per_second} TB/s, "
            f"at most {chip.shared_limit // 1024} KiB of shared memory a program."
        )
        for case in dict.fromkeys(row["case"] for row in rows):
            lines = [report_line(row) for row in rows if (row["arch"], row["case"]) == (arch, case)]
            total = sum(row["calls"] * row["bound_us"] for row in rows if (row["arch"], row["case"]) == (arch, case))
            if lines:
                title = f"**{case_title(case)}** (together at least {number(total / 1e3)} ms a step)"
                parts.append(f"{title}\n\n{markdown_table(COLUMNS, lines)}")
    return "\n\n".join(parts) + "\n"


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def parse(argv):
    parser = llama.Parser("kernel_report.py", __doc__)
    parser.add_argument("--check", action="store_true", help="compile every case, check, and write nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="with --check: write what was compiled there")
    parser.add_argument("--architectures", nargs="+", choices=list(CHIPS), default=list(CHIPS), help="(default: all)")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), help="(default: those of the report, or all)")
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    parser.add_argument("--processes", type=int, default=min(os.cpu_count(), 8), help="(default: %(default)s)")
    return parser.parse_args(argv)


def check_request(options):
    if llama.triton is None:
        raise llama.UsageError("Triton is not installed: pip install triton, on Linux")
    if options.processes < 1:
        raise llama.UsageError(f"--processes {options.processes} compiles nothing: give 1 or more")


def run(argv):
    options = parse(argv)
    check_request(options)
    chosen = {name: CASES[name] for name in options.cases or CASES}
    if options.check:
        selection = dict.fromkeys(chosen, options.precisions)
    else:
        selection = {name: [p for p in options.precisions if p in case.reported] for name, case in chosen.items()}
    jobs = list(jobs_for(options.architectures, selection))
    rows, wrong = analyse(jobs, options.processes)
    if options.check and not options.cases:
        wrong += missing_kernels(find_kernels(kernel_modules()), (job.launch for job in jobs))
    summary = f"{len(rows)} launches for {', '.join(options.architectures)}: {len(wrong)} violations"
    print("\n".join([*wrong, summary]))
    command = shlex.join(["python", "-m", "profiling.kernel_report", *argv])
    result = {"command": command, "triton": llama.triton.__version__, "rows": rows}
    if not options.check:
        write_result(RESULT, result)
        PAGE.write_text(page(result))
        print(f"Written: {PAGE.relative_to(ROOT)}, {RESULT.relative_to(ROOT)}")
    elif options.json:
        write_result(options.json, result)
    return 1 if wrong else 0


def write_result(path, result):
    """A row a line, so that a difference between two results can be read."""
    rows = ",\n".join(json.dumps(row) for row in result["rows"])
    head = json.dumps(result | {"rows": []}, indent=1)
    path.write_text(head.replace("[]", f"[\n{rows}\n]") + "\n")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    return exit_code_of(lambda: run(argv), "kernel_report.py")


if __name__ == "__main__":
    sys.exit(main())
