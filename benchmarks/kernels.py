"""Time each kernel alone against PyTorch and libraries of kernels, on the device's clock.

    python -m benchmarks.kernels                        bf16
    python -m benchmarks.kernels --only attention
    python -m benchmarks.kernels --only layer-norm      nanogpt_triton's LayerNorm, fp32 and bf16, widths 256 to 16384
    python -m benchmarks.kernels --only fp8-layer       what --fp8 saves and costs in a layer of the large model
    python -m benchmarks.kernels --only heads-128 heads-128     with and without Hopper's kernel, in two rounds

Several calls are captured in one graph, and the time is that of the median replay, without launches. Buffers exceed the
L2 cache, except for attention, which has the sizes of models. Bandwidth counts the least bytes that must be moved; the
first row is the ceiling. Before a contender is timed, its results are compared with those in higher precision, by the
rule of tiny_llama_v3.py --check.

The peers are eager PyTorch; torch.compile of the same function ("compile"); two backends of PyTorch's attention
("flash", which is AOTriton on AMD, and "cudnn"); Liger-Kernel, QuACK and FlashAttention 4 ("liger", "quack", "fa4");
and on AMD the attention of AMD's own library ("aiter"). "plain triton" is ours without the kernel for Hopper.

Exit codes: 0 done, 1 a result is wrong, 2 the request cannot be met, 130 interrupted.
"""

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

if not __package__:
    print("run it from the root as python -m benchmarks.kernels", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from benchmarks.fp8_layer import fp8_layer_cases, swiglu
from benchmarks.harness import Run, Timed, make_parser, measure_case
from measure import work
from measure.accuracy import KERNEL_TOLERANCE, promoted, require
from measure.command_line import program
from measure.device import kernel_device
from measure.results import import_library, versions
from measure.timing import Bench, compile_apart, copy_calls, gradient_call
from nanogpt_triton.kernels import triton_layer_norm
from tiny_llama import fp8, hardware

OURS, EPS = "triton", 1e-5

# ----------------------------------------------------------------------------------------------------------------------
# Libraries: functions with the same arguments as one in plain PyTorch


class Library(NamedTuple):
    """A library of kernels."""

    package: str
    archs: tuple  # of the devices that it is for, how they begin
    functions: dict  # {operation: function of the imported package and the inputs}

    def load(self, operation):
        """Return the function of the inputs alone."""
        return functools.partial(self.functions[operation], import_library(self.package))


def aiter_attention(aiter, q, k, v):
    # It refuses inputs that require gradients unless it returns the log-sum-exp; its deterministic default is slower.
    return aiter.flash_attn_func(q, k, v, causal=True, deterministic=False, return_lse=True)[0]


def quack_cross_entropy(quack, logits, targets):
    # The module, not the function of its name: with autograd that has two kernels, and reads the logits twice.
    return import_library("quack.cross_entropy").cross_entropy_fwd(logits.detach(), targets, return_dx=True)


LIBRARIES = {
    # Liger's cross-entropy is not here: it waits for the host, and cannot be captured.
    "liger": Library(
        "liger_kernel.ops",
        ("sm_", "gfx"),
        {
            "norm": lambda ops, x, weight: ops.LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False),
            "add_norm": lambda ops, *inputs: ops.LigerFusedAddRMSNormFunction.apply(*inputs, EPS),
            "activation": lambda ops, gate_up: ops.LigerFusedGateUpSiLUMulFunction.apply(gate_up),
        },
    ),
    "quack": Library(
        "quack",
        ("sm_",),
        {
            "norm": lambda quack, x, weight: quack.rmsnorm(x, weight, eps=EPS),
            "add_norm": lambda quack, x, b, weight: quack.rmsnorm(x, weight, residual=b, eps=EPS, prenorm=True),
            "cross_entropy": quack_cross_entropy,
        },
    ),
    "fa4": Library(
        "flash_attn.cute",
        ("sm_90", "sm_10"),
        {"attention": lambda fa4, q, k, v: fa4.flash_attn_func(q, k, v, causal=True)[0]},
    ),
    "aiter": Library("aiter", ("gfx",), {"attention": aiter_attention}),
}

# ----------------------------------------------------------------------------------------------------------------------
# What is compared


def gradients(function, number):
    """Return the backward pass of function: it takes a number of inputs, and the gradients of the outputs."""

    def backward(*arguments):
        # New leaves: autograd keeps the stream on which a leaf was first used, and captured ones need their own.
        inputs = [x.detach().requires_grad_() for x in arguments[:number]]
        return torch.autograd.grad(function(*inputs), inputs, arguments[number:])

    return backward


def named(outputs):
    """Return {name: tensor} of the outputs of a function."""
    outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
    return {f"output {number}": x.detach() for number, x in enumerate(outputs, 1)}


@dataclasses.dataclass
class Case:
    """A Timed of one direction of an operation, whose contenders must all give what plain PyTorch gives."""

    bench: Bench
    name: str
    size: str
    work: work.Work
    unit: str
    function: Callable  # in plain PyTorch
    inputs: list  # tuples, which calls use in rotation
    upstreams: list  # the gradients of the outputs for each of these; empty forward
    ours: list  # calls that return what the function, or its backward pass, returns; empty: ours is one of the peers
    peers: dict  # {name: function that returns a function with the arguments of the plain one}

    def whole(self, function):
        """Return the function, or its backward pass."""
        return gradients(function, len(self.inputs[0])) if self.upstreams else function

    def outputs(self, name):
        """Return the results of a contender for the first inputs."""
        if name == OURS and self.ours:
            return self.ours[0]()
        # A copy, as a library may overwrite its inputs.
        copies = [x.detach().clone().requires_grad_(x.requires_grad) for x in self.inputs[0]]
        return self.whole(self.peers[name]())(*copies, *sum(self.upstreams[:1], ()))

    def evidence(self, outputs):
        """Return what accuracy.compare() takes, of outputs for the first inputs."""
        # As tiny_llama_v3.py --check does: beside plain PyTorch in the same precision, whose error shows what rounding
        # costs, and in higher precision.
        arguments, plain = (*self.inputs[0], *sum(self.upstreams[:1], ())), self.whole(self.function)
        results = map(named, (outputs, plain(*arguments), plain(*promoted(arguments))))
        return *results, KERNEL_TOLERANCE[arguments[0].dtype]

    def calls(self, name):
        """Return the calls of a contender, of its direction alone."""
        if name == OURS and self.ours:
            return self.ours
        function = self.peers[name]()
        # Forward without no_grad(), as saving tensors for the backward pass is part of the forward pass.
        if not self.upstreams:
            return [functools.partial(function, *each) for each in self.inputs]
        with self.bench.on_stream():
            return [gradient_call(function, *pair) for pair in zip(self.inputs, self.upstreams, strict=True)]

    def build(self, name):
        # Checked at the first call: kernels that work in place read their own results from the second on.
        require(*self.evidence(self.outputs(name)))
        return self.calls(name)

    @property
    def contenders(self):
        names = [OURS] * bool(self.ours) + list(self.peers)
        return {name: functools.partial(self.build, name) for name in names}


def library_peers(bench, operation):
    """Return {library: function that loads its own} of the libraries that have an operation on this device."""
    return {
        name: functools.partial(library.load, operation)
        for name, library in LIBRARIES.items()
        if operation in library.functions and llama.get_gpu(bench.device.type).arch.startswith(library.archs)
    }


def compiled_peer(bench, function):
    if not bench.on_gpu:
        return {}
    return {"compile": functools.cache(lambda: compile_apart(function, True, dynamic=False, fullgraph=True))}


def directions(bench, operation, name, size, unit, function, inputs, upstreams, works, peers, ours=([], [])):
    """Yield the Cases of forward and backward; works, ours: a pair."""
    peers = peers | library_peers(bench, operation)
    for title, cost, ups, own in zip((name, f"{name} backward"), works, ([], upstreams), ours, strict=True):
        yield Case(bench, title, size, cost, unit, function, inputs, ups, own, peers)


def plain_peers(bench, function):
    return {"torch": lambda: function} | compiled_peer(bench, function)


def with_plain_triton(case, calls):
    """Return a case as a Timed with another contender: calls of ours that leave out the kernels for Hopper."""
    plain = dataclasses.replace(case, ours=calls)
    contenders = case.contenders | {"plain triton": plain.contenders[OURS]}
    return Timed(case.name, case.size, case.work, case.unit, contenders)


# ----------------------------------------------------------------------------------------------------------------------
# Cases


def copy_cases(bench, elements):
    calls, amount = copy_calls(bench, elements)
    yield Timed("read and write (negation)", "", work.Work(amount, 0), "TB/s", {"torch": lambda: calls})


def torch_norm(x, weight):
    return F.rms_norm(x, weight.shape, weight, EPS)


def torch_add_norm(x, branch, weight):
    residual = x + branch
    return F.rms_norm(residual, weight.shape, weight, EPS), residual


def triton_norm(x, weight):
    return llama.triton_rmsnorm(x, None, weight, EPS)[0]


def triton_add_norm(x, branch, weight):
    return llama.triton_rmsnorm(x, branch, weight, EPS)


def leaves(bench, number, *shapes, dtype=None):
    """Return a number of tuples of random tensors that require gradients."""
    return [tuple(bench.randn(*shape, dtype=dtype).requires_grad_() for shape in shapes) for _ in range(number)]


def rmsnorm_cases(bench, n_rows, n_cols, added=False):
    rows = [(n_rows, n_cols)] * (2 if added else 1)  # x and the branch; or y and residual, of the gradients
    operation, name, function, ours = "norm", "RMSNorm", torch_norm, triton_norm
    if added:
        operation, name, function, ours = "add_norm", "add + RMSNorm", torch_add_norm, triton_add_norm
    inputs = leaves(bench, 2, *rows, (n_cols,))
    upstreams = leaves(bench, 2, *rows)
    x, *branch, weight = inputs[0]
    rstd = torch.empty(n_rows, device="meta")
    works = (
        work.rmsnorm(x, weight, x, rstd, *branch * 2),  # y and the sum are like x and the branch
        work.rmsnorm_backward(x, x, weight, rstd, x, *branch),
    )
    peers = {OURS: lambda: ours} | plain_peers(bench, function)
    names = operation, name, f"N = {n_cols}", "TB/s", function
    yield from directions(bench, *names, inputs, upstreams, works, peers)


def torch_layer_norm(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight, bias)


def layer_norm_cases(bench, n_rows, n_cols, dtype):
    shape = n_rows, n_cols
    # Eight sets of buffers, as those of a small shape would stay in the cache.
    inputs = leaves(bench, 8, shape, (n_cols,), (n_cols,), dtype=dtype)
    (x, weight, bias), statistic = inputs[0], torch.empty(n_rows, device="meta")
    works = (
        work.layer_norm(x, weight, x, statistic, statistic, bias),
        work.layer_norm_backward(x, x, weight, statistic, statistic, x),
    )
    peers = {OURS: lambda: triton_layer_norm} | plain_peers(bench, torch_layer_norm)
    size = f"{str(dtype).removeprefix('torch.')}, {n_rows:,} x {n_cols:,}"
    names = "layer_norm", "LayerNorm", size, "TB/s", torch_layer_norm
    yield from directions(bench, *names, inputs, leaves(bench, 8, shape, dtype=dtype), works, peers)


def swiglu_cases(bench, n_rows, n_cols):
    inputs = leaves(bench, 2, (n_rows, 2 * n_cols))
    upstreams = leaves(bench, 2, (n_rows, n_cols))

    def ours_backward(hidden_grad, overwritten):
        llama.swiglu_activation_backward_(hidden_grad, overwritten)
        return overwritten  # a second call reads a gradient, which takes the same time

    forward = [functools.partial(llama.swiglu_activation, x.detach()) for (x,) in inputs]
    pairs = zip(upstreams, inputs, strict=True)
    backward = [functools.partial(ours_backward, grad.detach(), x.detach().clone()) for (grad,), (x,) in pairs]
    (x,), (grad,) = inputs[0], upstreams[0]
    works = (
        work.swiglu_activation(x, grad),
        work.swiglu_activation_backward(grad, x),
    )
    names = "activation", "SwiGLU", f"F = {n_cols}", "TB/s", swiglu
    peers = plain_peers(bench, swiglu)
    yield from directions(bench, *names, inputs, upstreams, works, peers, (forward, backward))


def torch_hidden(x, gate_up_weight):
    """Return the input of the down projection (rows, ffn) of x (rows, K) and gate_up_weight (2 ffn, K)."""
    return swiglu(F.linear(x, gate_up_weight))


def torch_gate_up_gradient(y_grad, down_weight, gate_up):
    """Return the gradient of gate_up (rows, 2 ffn), of y_grad (rows, K) and down_weight (K, ffn)."""
    gate, up = gate_up.chunk(2, dim=-1)
    hidden_grad, sigmoid = y_grad @ down_weight, gate.sigmoid()
    gate_grad = hidden_grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((gate_grad, hidden_grad * gate * sigmoid), dim=-1)


def swiglu_product_cases(bench, n_rows, n_inner, ffn):
    """Yield SwiGLU with the product that it is computed from, in both directions."""
    x, y_grad = bench.randn(n_rows, n_inner), bench.randn(n_rows, n_inner)
    gate_up_weight, down_weight = (bench.randn(*s) * n_inner**-0.5 for s in ((2 * ffn, n_inner), (n_inner, ffn)))
    gate_up, hidden = llama.swiglu_forward(x, gate_up_weight)

    def forward():
        return llama.swiglu_forward(x, gate_up_weight)[1]

    def backward(overwritten):
        llama.swiglu_backward_(y_grad, down_weight, overwritten)
        return overwritten  # a second call reads a gradient, which takes the same time

    product = 2 * n_rows * n_inner * ffn
    # Each contender overwrites a tensor of its own.
    backwards = [functools.partial(backward, gate_up.clone()) for _ in range(2)]
    cases = [
        ("SwiGLU", torch_hidden, (x, gate_up_weight), (gate_up, hidden), 2 * product, [forward] * 2),
        ("SwiGLU backward", torch_gate_up_gradient, (y_grad, down_weight, gate_up), (gate_up,), product, backwards),
    ]
    for title, function, inputs, outputs, flop, (ours, plain) in cases:
        cost = work.Work(sum(tensor.nbytes for tensor in inputs + outputs), flop)
        names = f"{title} and its product", f"{n_rows:,} x {n_inner:,}, F = {ffn:,}", cost, "TFLOP/s", function
        case = Case(bench, *names, [inputs], [], [ours], plain_peers(bench, function))
        # On other GPUs, both are the same.
        patch = mock.patch.object(llama.companion("swiglu_hopper"), "launch_product", lambda *tensors: False)
        yield with_plain_triton(case, [patch(plain)])


def torch_losses_and_gradient(logits, targets, cross_entropy=F.cross_entropy):
    """Return the loss of each row, and the gradient of their sum."""
    # A new leaf: autograd keeps the stream on which a leaf was first used, and a captured one needs its own.
    logits = logits.detach().requires_grad_()
    losses = cross_entropy(logits, targets, reduction="none")
    return losses, *torch.autograd.grad(losses.sum(), logits)


def cross_entropy_cases(bench, n_rows, vocab):
    logits = bench.randn(n_rows, vocab).requires_grad_()
    targets = torch.randint(vocab, (n_rows,), device=bench.device.type)
    overwritten = logits.detach().clone()

    def ours():
        losses = llama.cross_entropy_(overwritten, targets, 1.0)
        return losses[0], overwritten

    peers = {"torch": lambda: torch_losses_and_gradient}
    for name, build in compiled_peer(bench, F.cross_entropy).items():
        peers[name] = lambda b=build: functools.partial(torch_losses_and_gradient, cross_entropy=b())
    peers |= library_peers(bench, "cross_entropy")
    moved = work.cross_entropy(logits, targets, torch.empty(2, n_rows, device="meta"))  # losses and counts
    names = "cross-entropy", f"V = {vocab}", moved, "TB/s", torch_losses_and_gradient
    yield Case(bench, *names, [(logits, targets)], [], [ours], peers)


def adamw_cases(bench, width, count):
    def make_model(dtype=torch.float32):
        with torch.device(bench.device.type):
            return nn.ParameterList(torch.randn(width, width, dtype=dtype) for _ in range(count))

    ours = llama.FlatAdamW(3e-4, low_precision=bench.on_gpu)
    ours.own(make_model())
    theirs, exact = (llama.TorchAdamW(make_model(dtype), 3e-4) for dtype in (torch.float32, torch.float64))
    initial = [w.clone() for w in ours.weights()]
    ours.grad.normal_()
    for mine in ours.parameters:
        mine.grad = mine.main_grad
    for other in (theirs, exact):
        other.reset(initial)
        for mine, parameter in zip(ours.parameters, other.parameters, strict=True):
            parameter.grad = mine.main_grad.to(parameter.dtype)

    def check():
        with bench.on_stream():
            for optimizer in (ours, theirs, exact) * 3:
                optimizer.step()
        weights = ours.weights(), theirs.parameters, exact.parameters
        changes = ([w.detach() - i for w, i in zip(each, initial, strict=True)] for each in weights)
        require(*map(named, changes), KERNEL_TOLERANCE[torch.float32])
        return [ours.step]

    # Our kernel reads bf16 gradients and splits weights into halves; PyTorch's moves all in fp32.
    fp32 = ours.exp_avg  # as large as each of torch's tensors: weights, gradient and two moments
    own_bytes = work.adamw(fp32, None, fp32, fp32, fp32).bytes
    cost = work.adamw(ours.param, ours.remainder, ours.grad, ours.exp_avg, ours.exp_avg_sq)
    contenders = {"triton": check, "torch": lambda: ([theirs.step], own_bytes)}
    yield Timed("AdamW", f"{ours.param.numel() / 1e6:.0f} M parameters", cost, "TB/s", contenders)


def sdpa(q, k, v, backend=None):
    """Return PyTorch's causal attention of q, k, v (batch, seq, heads, head_dim), the layout of our kernels."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend) if backend else contextlib.nullcontext():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


# Plain PyTorch is always the attention that keeps its scores.
torch_attention = functools.partial(sdpa, backend=SDPBackend.MATH)


def attention_cases(bench, batch, seq_len, heads, kv_heads, head_dim):
    shapes = [(batch, seq_len, number, head_dim) for number in (heads, kv_heads, kv_heads)]
    # Inputs require gradients, as in training, so that the log-sum-exp is stored.
    inputs, ((o_grad,),) = leaves(bench, 1, *shapes), leaves(bench, 1, shapes[0])
    q, k, v = (x.detach() for x in inputs[0])
    # The backward pass alone is timed: its forward pass has run once, and what it saved is kept.
    o, lse = llama.flash_attention_forward(q, k, v)
    grads = [torch.empty_like(x) for x in (q, k, v)]

    def backward():
        llama.flash_attention_backward(o_grad.detach(), (q, k, v, o, lse), grads)
        return grads

    peers = {"torch": lambda: sdpa}  # with the backend of PyTorch's choice
    if bench.on_gpu:
        peers["flash"] = lambda: functools.partial(sdpa, backend=SDPBackend.FLASH_ATTENTION)
        peers["cudnn"] = lambda: functools.partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION)
    works = (
        work.attention(q, k, v, o, lse),
        work.attention_backward(q, k, v, o, o_grad, lse, *grads),
    )
    ours = [lambda: llama.flash_attention_forward(q, k, v)[0]], [backward]
    names = "attention", "attention", f"({batch}, {seq_len}, {heads}/{kv_heads}, {head_dim})", "TFLOP/s"
    yield from directions(bench, *names, torch_attention, inputs, [(o_grad,)], works, peers, ours)


def heads_128_cases(bench, *shape):
    """Yield attention with another contender: the kernels that all GPUs have."""
    # No sequence is long enough for the kernels for Hopper.
    patch = mock.patch.object(llama.companion("attention_hopper"), "SHORTEST", math.inf)
    for case in attention_cases(bench, *shape):
        yield with_plain_triton(case, [*map(patch, case.ours)])


class Group(NamedTuple):
    """Cases of one operation: their generator, and its arguments on a GPU and in the interpreter."""

    cases: Callable
    on_gpu: list
    interpreted: list


ELEMENTS = 2**26  # 128 MiB in bf16, more than an L2 cache holds
GROUPS = {
    "copy": Group(copy_cases, [(4 * ELEMENTS,)], [(2**13,)]),
    "rmsnorm": Group(
        rmsnorm_cases,
        [(ELEMENTS // n, n, added) for n in (512, 2048, 8192) for added in (False, True)],
        [(32, 64, False), (32, 64, True)],
    ),
    "swiglu": Group(swiglu_cases, [(ELEMENTS // n, n) for n in (2048, 8192)], [(32, 64)]),
    "cross-entropy": Group(cross_entropy_cases, [(8192, vocab) for vocab in (32000, 128256)], [(8, 100)]),
    "adamw": Group(adamw_cases, [(4096, 12)], [(16, 2)]),
    "attention": Group(
        attention_cases,
        [  # batch, seq, heads, kv_heads, head_dim
            (8, 128, 8, 4, 64),
            (16, 512, 16, 8, 64),
            (4, 2048, 32, 16, 64),
            (1, 1000, 32, 1, 64),  # fewer blocks of keys than multiprocessors
        ],
        [(1, 32, 2, 1, 16)],
    ),
    "layer-norm": Group(
        layer_norm_cases,
        [
            (n_rows, n_cols, dtype)
            for dtype in (torch.float32, torch.bfloat16)
            for n_rows, n_cols in [(12 * 1024, 768), *((ELEMENTS // n, n) for n in (256, 1024, 4096, 16384))]
        ],
        [(8, 16, torch.float32)],
    ),
    "fp8-layer": Group(fp8_layer_cases, [(8192, 2048, 8192)], [(32, 16, 48)]),  # of the large model
    "heads-128": Group(
        heads_128_cases,
        [(batch, 8192 // batch, 16, 4, 128) for batch in (4, 2, 1)],
        [(1, 32, 2, 1, 16)],
    ),
    "swiglu-product": Group(  # of the medium and the large model
        swiglu_product_cases, [(8192, 1024, 4096), (8192, 2048, 8192)], [(8, 16, 32)]
    ),
}
APART = "layer-norm", "fp8-layer", "heads-128", "swiglu-product"  # with tables of their own

# ----------------------------------------------------------------------------------------------------------------------
# Measuring


def measure_group(run, bench, group):
    """Append the entries of a group to the result."""
    # A generator, so that the buffers of one shape are freed before those of the next are made.
    cases, on_gpu, interpreted = GROUPS[group]
    for shape in on_gpu if bench.on_gpu else interpreted:
        for case in cases(bench, *shape):
            measure_case(run, bench, group, case)
    return {}


def parse(argv):
    parser = make_parser("kernels", __doc__)
    usual = [name for name in GROUPS if name not in APART]
    help = f"groups (default: all but {', '.join(APART)})"
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=usual, help=help)
    return parser.parse_args(argv)


@program("kernels.py")
def main(argv):
    options, device = parse(argv), kernel_device()
    gpu = llama.get_gpu(device.type)
    if "fp8-layer" in options.only and (device.type == "cpu" or not fp8.formats_of(gpu.arch)):
        raise llama.UsageError(f"--only fp8-layer needs a GPU with products in FP8, and this is {gpu.arch}")
    torch.manual_seed(0)
    bench = Bench(device)
    fields = {
        "peers": versions(*(library.package.split(".")[0] for library in LIBRARIES.values())),
        "dtype": str(bench.dtype).removeprefix("torch."),
        "peaks": [hardware.peak_tflops(gpu, precision) for precision in ("fp8", "bf16")],
    }
    run = Run("kernels", argv, options, device, **fields, cases=[])
    for group in options.only:
        failed = run.attempt(functools.partial(measure_group, run, bench, group))
        if failed["error"]:  # the other groups can still be measured
            run.result["cases"].append({"group": group, "case": group, **failed})
            print(f"{group:45} {failed['error']}", flush=True)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
