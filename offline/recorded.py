"""Find the kernels, and record their launches in the configurations that are compiled.

The training step runs on tensors without memory, once for each architecture, and its launchers are recorded.
"""

import collections
import contextlib
import importlib
import inspect
import itertools
import math
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch

import nanogpt_triton.kernels
import tiny_llama_v3 as llama
from measure.work import SIZES
from offline.architectures import CHIPS, gpu_of, is_amd
from tiny_llama import fp8

# ----------------------------------------------------------------------------------------------------------------------
# Kernels of the training script and its companions, and of nanogpt_triton/


def kernel_modules():
    return [*launcher_modules(), fp8]


def launcher_modules():
    """Those whose launchers depend on the device."""
    names = (module.name for module in pkgutil.iter_modules(nanogpt_triton.kernels.__path__))
    return [llama, *(importlib.import_module(f"nanogpt_triton.kernels.{name}") for name in names)]


def find_kernels(modules):
    """Return {name: kernel} of the functions that Triton compiles and that no other such function calls."""
    functions = {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if type(value).__name__ in ("JITFunction", "InterpretedFunction") and value.fn.__module__ == module.__name__
    }
    sources = "".join(inspect.getsource(function.fn) for function in functions.values())
    # One that another calls occurs twice: where it is defined, and where it is called.
    return {name: function for name, function in functions.items() if len(re.findall(rf"\b{name}\(", sources)) == 1}


# ----------------------------------------------------------------------------------------------------------------------
# Launches


@dataclass(frozen=True)
class Tensor:
    """The properties of a kernel's argument that the compiler uses."""

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


def shown_name(kernel, constants):
    """Return the name of a kernel in profiles, which may depend on its constants."""
    name_of = getattr(kernel, "repr", None) or kernel.rewriter.kwargs.get("repr")  # with TRITON_INTERPRET=1
    name = name_of(SimpleNamespace(constants=constants)) if name_of else kernel.fn.__name__
    return name.rpartition(".")[2]  # Triton 3.6 puts the module before the name


def seen_by_compiler(t):
    """Return the Tensor of a launcher's tensor."""
    storage = t.untyped_storage().size()
    return Tensor(t.dtype, tuple(t.shape), t.storage_offset() * t.element_size() % 16, storage)


@dataclass(frozen=True)
class Launch:
    function: str  # the name of the kernel's function
    kernel: str  # the name that profilers show
    grid: tuple
    tensors: tuple
    scalars: tuple
    constants: tuple  # of (name, value)
    options: tuple  # of (name, value)

    @property
    def warps(self):
        return dict(self.options)["num_warps"]

    @property
    def named_constants(self):
        """Return {name: value} of the constants; a named tuple of them has its fields among the others."""
        items = (value._asdict() if isinstance(value, tuple) else {name: value} for name, value in self.constants)
        return {name: value for fields in items for name, value in fields.items()}

    @property
    def compiled_as(self):
        """What the compiled kernel depends on: launches with the same key share one."""
        tensors = (t and t.compiled_as for t in self.tensors)
        scalars = ((type(s), s == 1, s % 16 == 0, s < 2**31) if isinstance(s, int) else type(s) for s in self.scalars)
        return self.function, tuple(tensors), tuple(scalars), self.constants, self.options

    def arguments(self, kernel):
        """Return a namespace of the parameters, without _ptr in their names, and the constants."""
        names = (name.removesuffix("_ptr") for name in kernel.arg_names)
        values = [*self.tensors, *self.scalars]
        return SimpleNamespace(**dict(zip(names, values, strict=False)), **self.named_constants, grid=self.grid)


@contextlib.contextmanager
def gpu_found(gpu, **replaced):
    """Launchers find this Gpu and choose their tiles for it; replaced: other functions of their modules."""
    modules = launcher_modules()
    tiles = [f for module in modules for f in vars(module).values() if hasattr(f, "cache_clear")]
    with contextlib.ExitStack() as stack:
        replaced["get_gpu"] = lambda type: gpu
        for module, (name, function) in itertools.product(modules, replaced.items()):
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, function))
        for tile in tiles:
            stack.callback(tile.cache_clear)
            tile.cache_clear()
        yield


@contextlib.contextmanager
def recording(gpu):
    """Yield a list to which launch() appends; the launchers find this Gpu, and no tiles but those of the table."""
    launches = []

    def record(kernel, grid, tensors, scalars, constants, num_warps=4, num_stages=2, **options):
        described = map(seen_by_compiler, tensors)
        options = dict(num_warps=num_warps, num_stages=num_stages, **options)
        items = (tuple(grid), tuple(described), tuple(scalars), tuple(constants.items()), tuple(options.items()))
        launches.append(Launch(kernel.fn.__name__, shown_name(kernel, constants), *items))

    with gpu_found(gpu, launch=record, launch_by_triton=record, own_tiles=lambda device_type: {}):
        yield launches


def record_step(config, arch):
    """Return the launches of a forward and a backward pass and an optimizer step."""
    precision = "tf32" if config.matmul_precision == "high" else "ieee"
    # The case decides the precision, not the library of this machine.
    with recording(gpu_of(arch)) as launches, mock.patch.object(llama, "dot_precision", lambda gpu: precision):
        _, operations = llama.select_operations(config, torch.device("meta"))
        with torch.device("meta"):
            model = llama.TinyLlamaTriton(config, operations)
            tokens = torch.zeros(config.batch_size, config.seq_len, dtype=torch.int64)
        optimizer = llama.FlatAdamW(config.learning_rate, config.use_amp)
        optimizer.own(model)
        model(tokens, tokens).backward()
        optimizer.step()
    return launches


def record_fp8(config, arch):
    """Record like record_step(); the library's products in FP8 cannot write to a tensor without memory."""

    def product(a, a_scale, b, b_scale, dtype, **options):
        return a.new_empty(len(a), len(b), dtype=dtype)

    with mock.patch.object(fp8, "product", product):
        return record_step(config, arch)


def dtype_of(config):
    """Return the type of a config's activations."""
    return torch.bfloat16 if config.use_amp else torch.float32


def record_split_rows(config, arch):
    """RMSNorm with blocks shorter than a row, which the exercises sweep."""
    with recording(gpu_of(arch)) as launches:
        x = torch.empty(config.tokens_per_micro_batch, config.hidden_dim, dtype=dtype_of(config), device="meta")
        for block_size in (64, 256):
            llama.rmsnorm_forward(x, x, x[0], 1e-5, block_size)
    return launches


def record_layer_norm(config, arch):
    """Record the LayerNorms of a GPT under autocast: weights and the residual stream stay in fp32."""
    dtype = dtype_of(config)
    norm = nanogpt_triton.kernels.layer_norm.layer_norm_operator
    with recording(gpu_of(arch)) as launches:  # not on meta tensors, for which operators only allocate
        for width in (384, 768, 1600):
            weight, bias = (torch.empty(width, requires_grad=True) for _ in range(2))
            x = torch.empty(config.tokens_per_micro_batch, width, requires_grad=True)
            branch = torch.empty_like(x, dtype=dtype, requires_grad=True)
            _, y, _, _ = norm(x, None, weight, bias, 1e-5, dtype)
            outputs = y, *norm(x, branch, weight, bias, 1e-5, dtype)[:2]
            torch.autograd.backward(outputs, [torch.empty_like(y) for y in outputs])
    return launches


def record_gpt_attention(config, arch):
    """Record the attention of a GPT, whose heads are not rotated."""
    precision = "tf32" if config.matmul_precision == "high" else "ieee"
    attention = nanogpt_triton.kernels.attention.attention_operator
    with recording(gpu_of(arch)) as launches, mock.patch.object(llama, "dot_precision", lambda gpu: precision):
        # Not on meta tensors, for which operators only allocate.
        qkv = torch.empty(config.batch_size, config.seq_len, 3 * config.hidden_dim, dtype=dtype_of(config))
        o, _ = attention(qkv.requires_grad_(), config.num_heads)
        o.backward(torch.empty_like(o))
    return launches


def record_gelu(config, arch):
    """Record the GELU of a GPT."""
    with recording(gpu_of(arch)) as launches:
        hidden = torch.empty(
            config.tokens_per_micro_batch, 4 * config.hidden_dim, dtype=dtype_of(config), requires_grad=True
        )
        y = nanogpt_triton.kernels.gelu.gelu_operator(hidden)
        y.backward(torch.empty_like(y))
    return launches


PRECISIONS = {"bf16": dict(use_amp=True), "fp32": {}, "tf32": dict(matmul_precision="high")}


# These have the tiles, and almost the code, of another, so they are compiled in fewer cases.
RELATED = {"gfx1151": "gfx1100", "sm_89": "sm_86", "sm_120": "sm_86"}


def supported(arch):
    """Return the precisions in which an architecture's kernels are compiled."""
    if not llama.has_bf16(gpu_of(arch)):
        return ("fp32",)  # --use-amp is refused there
    # Without tensor cores ptxas takes up to half a minute: full fp32 is compiled for A100 and H200 alone.
    return ("bf16", "tf32") if not is_amd(arch) and arch not in ("sm_80", "sm_90") else tuple(PRECISIONS)


SUPPORTED = {arch: supported(arch) for arch in CHIPS}
MAIN = {arch: precisions for arch, precisions in SUPPORTED.items() if arch not in RELATED}


class Case(NamedTuple):
    sizes: dict  # of Config
    record: Callable = record_step
    reported: tuple = ()  # the precisions in the report; the check has all of them
    wide_loads: bool = True
    precisions: dict = MAIN  # on each architecture


SHORT, LONG = SIZES["small"] | dict(num_layers=1), SIZES["medium"] | dict(num_layers=1)
# Tiles depend on the family, and some on the architecture: of other heads one is compiled.
HEADS = {"gfx942": ("bf16", "fp32")}
# Heads whose size is not a power of two are padded; their masks and offsets need scalar registers.
PADDED_HEADS = {arch: ("bf16", "fp32") for arch in MAIN if is_amd(arch)} | {"gfx942": tuple(PRECISIONS)}
WIDE_HEADS = SUPPORTED | {arch: ("bf16",) for arch in CHIPS if not is_amd(arch) and "bf16" in SUPPORTED[arch]}
FP8 = {arch: ("bf16",) for arch in MAIN if fp8.formats_of(arch)}
BF16 = {arch: ("bf16",) for arch in MAIN if "bf16" in MAIN[arch]}
# nanogpt_triton rounds fp32 operands to TF32 where the GPU has it.
FAST = {
    arch: tuple(p for p in precisions if p != "fp32" or not llama.tf32_available(gpu_of(arch)))
    for arch, precisions in MAIN.items()
}
CASES = {
    "small": Case(SIZES["small"], reported=("bf16", "fp32"), precisions=SUPPORTED),
    "medium": Case(SIZES["medium"], reported=tuple(PRECISIONS), precisions=SUPPORTED),
    "large": Case(SIZES["large"], reported=("bf16",)),
    "heads-16": Case(LONG | dict(num_heads=64), precisions=HEADS),
    "heads-32": Case(LONG | dict(num_heads=32), precisions=HEADS),
    "heads-40": Case(LONG | dict(hidden_dim=1280, num_heads=32), precisions=PADDED_HEADS),
    "heads-80": Case(LONG | dict(hidden_dim=1280), precisions=PADDED_HEADS),
    "heads-128": Case(LONG | dict(num_heads=8), reported=("bf16", "fp32"), precisions=WIDE_HEADS),
    "short-heads-32": Case(SHORT | dict(num_heads=16), precisions=HEADS),
    "short-heads-40": Case(SHORT | dict(hidden_dim=640, num_heads=16), precisions=PADDED_HEADS),
    "short-heads-80": Case(SHORT | dict(hidden_dim=640), precisions=PADDED_HEADS),
    "odd-heads-40": Case(SHORT | dict(hidden_dim=320, seq_len=33), precisions=PADDED_HEADS),
    "short-heads-128": Case(SHORT | dict(num_heads=4), reported=("bf16", "fp32"), precisions=WIDE_HEADS),
    "vocabulary-32000": Case(SHORT | dict(vocab_size=32000), precisions=BF16),
    "layer-norm": Case(LONG, record=record_layer_norm, reported=("bf16",)),
    "gelu": Case(LONG, record=record_gelu, reported=("bf16",), precisions=FAST),
    # Without tables, less than half of what gradients of keys load on a gfx1100 lies in rows.
    "gpt-attention": Case(LONG, record=record_gpt_attention, reported=("bf16",), wide_loads=False, precisions=FAST),
    "fp8": Case(LONG | dict(fp8=True), record=record_fp8, precisions=FP8),
    # Configurations that are slow on purpose must still compile.
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
    """Yield a Job for each distinct launch of selection, {case: precisions}, that an architecture supports."""
    for arch in architectures:
        for name, precisions in selection.items():
            case = CASES[name]
            for precision in precisions:
                if precision == "tf32" and not llama.tf32_available(gpu_of(arch)):
                    continue
                if precision in case.precisions.get(arch, ()):
                    config = llama.Config(**case.sizes, **PRECISIONS[precision])
                    for launch, calls in collections.Counter(case.record(config, arch)).items():
                        yield Job(arch, name, precision, launch, calls)
