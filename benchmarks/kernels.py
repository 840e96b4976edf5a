"""Time each kernel alone against PyTorch and libraries of kernels, on the device's clock.

    python -m benchmarks.kernels                        bf16
    python -m benchmarks.kernels --only attention

Several calls are captured in one graph, and the time is that of the median replay, without launches. Buffers exceed the
L2 cache, except for attention, which has the sizes of models. Bandwidth counts the least bytes that must be moved; the
first row is the ceiling. Before a kernel is timed, its results are compared with those in higher precision, by the rule
of tiny_llama_v3.py --check. A peer is not timed either if its results are wrong.

The peers are eager PyTorch; torch.compile of the same function ("compile"), also with mode="max-autotune-no-cudagraphs"
("max-autotune"); the backends of PyTorch's attention ("flash" is AOTriton on AMD); Liger-Kernel, QuACK and
FlashAttention 4 ("liger", "quack", "fa4"); and on AMD AMD's own library ("aiter"), whose RMSNorm and SwiGLU have no
backward pass.

Exit codes: 0 done, 1 a result is wrong, 2 the request cannot be met, 130 interrupted.
"""

import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

if not __package__:
    print("run it from the root as python -m benchmarks.kernels", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from measure import work
from measure.accuracy import KERNEL_TOLERANCE, promoted, require
from measure.command_line import Parser, program
from measure.device import kernel_device
from measure.heartbeat import Heartbeat
from measure.results import RESULTS, ResultFile, describe, header, import_library, versions
from measure.timing import Bench, compile_apart, copy_calls, gradient_call, release

EPS = 1e-5

ATTENTION_SHAPES = (  # batch, seq, heads, kv_heads, head_dim
    (8, 128, 8, 4, 64),
    (16, 512, 16, 8, 64),
    (4, 2048, 32, 16, 64),
    (4, 2048, 16, 4, 128),
    (1, 8192, 16, 4, 128),
)
SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip


class KernelBench(Bench):
    """A Bench with the size of a tensor: 128 MiB in bf16, more than an L2 cache holds; small for the interpreter."""

    def __init__(self, device):
        super().__init__(device)
        self.elements = 2**26 if self.on_gpu else 2**11


def check(name, function, inputs, ours):
    """ArithmeticError unless our results are as accurate as those of function(*inputs) in plain PyTorch."""

    def named(outputs):
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return {f"output {number} of {name}": x.detach() for number, x in enumerate(outputs, 1)}

    plain, exact = function(*inputs), function(*promoted(inputs))
    require(named(ours), named(plain), named(exact), KERNEL_TOLERANCE[inputs[0].dtype])


def gradients(function, number=1):
    """Returns the backward pass of function: it takes a number of inputs, and the gradients of the outputs."""

    def backward(*arguments):
        inputs = [x.detach().requires_grad_() for x in arguments[:number]]
        return torch.autograd.grad(function(*inputs), inputs, arguments[number:])

    return backward


# ----------------------------------------------------------------------------------------------------------------------
# Peers: functions with the same arguments as one in plain PyTorch


def aiter_norm(aiter, x, weight):
    return aiter.rms_norm(x.detach(), weight.detach(), EPS)


def aiter_add_norm(aiter, x, branch, weight):
    y, residual = torch.empty_like(x), torch.empty_like(x)
    aiter.rmsnorm2d_fwd_with_add(y, x.detach(), branch.detach(), residual, weight.detach(), EPS)
    return y, residual


def aiter_activation(aiter, gate_up):
    hidden = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    aiter.silu_and_mul(hidden, gate_up.detach())
    return hidden


def aiter_attention(aiter, q, k, v):
    # It refuses inputs that require gradients unless it returns the log-sum-exp; its deterministic default is slower.
    return aiter.flash_attn_func(q, k, v, causal=True, deterministic=False, return_lse=True)[0]


def liger_norm(ops, x, weight):
    return ops.LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)


def liger_add_norm(ops, x, branch, weight):
    return ops.LigerFusedAddRMSNormFunction.apply(x, branch, weight, EPS)


def liger_activation(ops, gate_up):
    return ops.LigerFusedGateUpSiLUMulFunction.apply(gate_up)


def liger_cross_entropy(ops, logits, targets):
    def losses(logits, targets, reduction):
        # It overwrites its input with the gradient, so that a second call reads that, which takes the same time.
        return ops.LigerCrossEntropyFunction.apply(logits, targets, None, -100, 0.0, 0.0, reduction)[0]

    return torch_losses_and_gradient(logits, targets, losses)


def fa4_attention(fa4, q, k, v):
    return fa4.flash_attn_func(q, k, v, causal=True)[0]


def quack_norm(quack, x, weight):
    return quack.rmsnorm(x, weight, eps=EPS)


def quack_add_norm(quack, x, branch, weight):
    return quack.rmsnorm(x, weight, residual=branch, eps=EPS, prenorm=True)


def quack_cross_entropy(quack, logits, targets):
    # The module, not the function of its name: with autograd that has two kernels, and reads the logits twice.
    return import_library("quack.cross_entropy").cross_entropy_fwd(logits.detach(), targets, return_dx=True)


class Library(NamedTuple):
    package: str
    arch: str | tuple  # of the devices that it is for, how it begins
    norm: Callable | None = None
    add_norm: Callable | None = None
    activation: Callable | None = None
    cross_entropy: Callable | None = None
    attention: Callable | None = None
    forward_only: tuple = ()  # the functions that have no backward pass


LIBRARIES = {
    "liger": Library("liger_kernel.ops", ("sm_", "gfx"), liger_norm, liger_add_norm, liger_activation,
        liger_cross_entropy),
    "quack": Library("quack", "sm_", quack_norm, quack_add_norm, cross_entropy=quack_cross_entropy),
    "fa4": Library("flash_attn.cute", ("sm_90", "sm_10"), attention=fa4_attention),
    "aiter": Library("aiter", "gfx", aiter_norm, aiter_add_norm, aiter_activation, attention=aiter_attention,
        forward_only=("norm", "add_norm", "activation")),
}  # fmt: skip
COMPILED = {"compile": None, "max-autotune": "max-autotune-no-cudagraphs"}  # modes of torch.compile


def library_functions(bench, operation, plain, inputs, upstream=None):
    """{library: its function for a field of Library, or the exception that prevents it}, compared with plain PyTorch.

    inputs are those of plain(*inputs). With the gradients of the outputs, upstream, gradients are compared as well, and
    what has none is left out.
    """
    found = {}
    for name, library in LIBRARIES.items():
        function = getattr(library, operation)
        is_forward = not (upstream and operation in library.forward_only)
        if function is None or not is_forward or not bench.device.arch.startswith(library.arch):
            continue
        try:
            call = functools.partial(function, import_library(library.package))
            copies = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
            check(f"{name}'s {operation}", plain, inputs, call(*copies))
            if upstream:
                arguments, backward = (*inputs, *upstream), functools.partial(gradients, number=len(inputs))
                check(f"{name}'s gradient of {operation}", backward(plain), arguments, backward(call)(*arguments))
            found[name] = call
        except Exception as error:  # of its compiler, too
            found[name] = error
    return found


def compiled_functions(bench, function):
    """{contender: torch.compile of the function} on a GPU."""
    modes = COMPILED if bench.on_gpu else {}
    return {n: compile_apart(function, True, dynamic=False, fullgraph=True, mode=m) for n, m in modes.items()}


def calls_of(functions, make_call, sets):
    """{contender: calls of its function, make_call(function, *arguments) for each of the sets, or its exception}"""
    return {
        name: function if isinstance(function, Exception) else [make_call(function, *arguments) for arguments in sets]
        for name, function in functions.items()
    }


# ----------------------------------------------------------------------------------------------------------------------
# Cases: each generator yields (case, amount of work of one call, unit, {contender: calls}), with ours as the first
# contender. A contender may have an amount of work of its own.


def copy_cases(bench):
    calls, amount = copy_calls(bench, 4 * bench.elements)
    yield "read and write (negation)", amount, "TB/s", {"torch": calls}


def torch_norm(x, weight):
    return F.rms_norm(x, weight.shape, weight, EPS)


def torch_add_norm(x, branch, weight):
    residual = x + branch
    return F.rms_norm(residual, weight.shape, weight, EPS), residual


def rmsnorm_cases(bench):
    for n_cols in (512, 2048, 8192) if bench.on_gpu else (64,):
        shape = (bench.elements // n_cols, n_cols)
        weight = bench.randn(n_cols)
        sets = [[bench.randn(*shape) for _ in range(4)] for _ in range(2)]  # x, branch, y_grad, residual_grad
        plain_sets = [(x, None, y, None) for x, _, y, _ in sets]
        yield from rmsnorm_directions(bench, "", "norm", torch_norm, weight, plain_sets)
        yield from rmsnorm_directions(bench, "add + ", "add_norm", torch_add_norm, weight, sets)


def rmsnorm_backward(y_grad, residual_grad, x, weight, rstd):
    """(x_grad, weight_grad)"""
    x_grad, partial = llama.rmsnorm_backward(y_grad, residual_grad, x, weight, rstd)
    weight_grad = weight.new_empty(weight.shape)
    llama.write_column_sums(weight_grad, False, partial)
    return x_grad, weight_grad


def rmsnorm_directions(bench, note, operation, function, weight, sets):
    """Yields forward and backward; the function does not take a branch and a residual_grad that are None."""
    forward = [functools.partial(llama.rmsnorm_forward, x, branch, weight, EPS) for x, branch, *_ in sets]
    backward = []
    for call, (_, _, y_grad, residual_grad) in zip(forward, sets, strict=True):
        residual, _, rstd = call()
        backward.append(functools.partial(rmsnorm_backward, y_grad, residual_grad, residual, weight, rstd))

    x, branch, y_grad, residual_grad = sets[0]
    inputs = [[t.detach().requires_grad_() for t in (*s[:2], weight) if t is not None] for s in sets]
    upstreams = [[t for t in s[2:] if t is not None] for s in sets]
    (residual, y, rstd), (x_grad, weight_grad) = forward[0](), backward[0]()
    added = branch is not None
    check("RMSNorm", function, inputs[0], (y, residual) if added else y)
    ours = (x_grad, x_grad, weight_grad) if added else (x_grad, weight_grad)
    check("RMSNorm's gradient", gradients(function, len(inputs[0])), (*inputs[0], *upstreams[0]), ours)

    plain = {"torch": function} | compiled_functions(bench, function)
    # Without no_grad(), as saving tensors for the backward pass is part of the forward pass.
    functions = plain | library_functions(bench, operation, function, inputs[0])
    calls = {"triton": forward} | calls_of(functions, functools.partial, inputs)
    amount = work.rmsnorm(x, weight, y, rstd, branch, residual if added else None).bytes
    yield f"{note}rmsnorm forward, N = {len(weight)}", amount, "TB/s", calls
    functions = plain | library_functions(bench, operation, function, inputs[0], upstreams[0])
    with bench.on_stream():
        calls = {"triton": backward} | calls_of(functions, gradient_call, list(zip(inputs, upstreams, strict=True)))
    amount = work.rmsnorm_backward(y_grad, x, weight, rstd, x_grad, residual_grad).bytes
    yield f"{note}rmsnorm backward, N = {len(weight)}", amount, "TB/s", calls


def torch_activation(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_cases(bench):
    for n_cols in (2048, 8192) if bench.on_gpu else (64,):
        n_rows = bench.elements // n_cols
        sets = [(bench.randn(n_rows, 2 * n_cols).requires_grad_(), bench.randn(n_rows, n_cols)) for _ in range(2)]
        gate_up, hidden_grad = sets[0]
        check("SwiGLU", torch_activation, (gate_up,), (llama.swiglu_activation(gate_up.detach()),))
        grad = gate_up.detach().clone()
        llama.swiglu_activation_backward_(hidden_grad, grad)
        check("SwiGLU's gradient", gradients(torch_activation), (gate_up, hidden_grad), (grad,))
        del grad

        plain = {"torch": torch_activation} | compiled_functions(bench, torch_activation)
        functions = plain | library_functions(bench, "activation", torch_activation, (gate_up,))
        calls = {"triton": [functools.partial(llama.swiglu_activation, x.detach()) for x, _ in sets]}
        calls |= calls_of(functions, functools.partial, [(x,) for x, _ in sets])
        yield f"swiglu forward, F = {n_cols}", work.swiglu_activation(gate_up, hidden_grad).bytes, "TB/s", calls
        # In place: a second call reads a gradient, which takes the same time.
        copies = [(grad, x.detach().clone()) for x, grad in sets]
        calls = {"triton": [functools.partial(llama.swiglu_activation_backward_, *pair) for pair in copies]}
        functions = plain | library_functions(bench, "activation", torch_activation, (gate_up,), (hidden_grad,))
        with bench.on_stream():
            calls |= calls_of(functions, gradient_call, [((x,), (grad,)) for x, grad in sets])
        amount = work.swiglu_activation_backward(hidden_grad, gate_up).bytes
        yield f"swiglu backward, F = {n_cols}", amount, "TB/s", calls


def torch_losses_and_gradient(logits, targets, cross_entropy=F.cross_entropy):
    """The loss of each row, and the gradient of their sum."""
    losses = cross_entropy(logits, targets, reduction="none")
    return losses, *torch.autograd.grad(losses.sum(), logits)


def cross_entropy_cases(bench):
    n_rows = 8192 if bench.on_gpu else 8
    for vocab in (32000, 128256) if bench.on_gpu else (100,):
        logits = bench.randn(n_rows, vocab).requires_grad_()
        targets = torch.randint(vocab, (n_rows,), device=bench.device.type)
        grad = logits.detach().clone()
        losses = llama.cross_entropy_(grad, targets, 1.0)
        check("cross-entropy", torch_losses_and_gradient, (logits, targets), (losses[0], grad))
        calls = {"triton": [functools.partial(llama.cross_entropy_, grad, targets, 1.0)]}
        functions = {"torch": torch_losses_and_gradient} | {
            name: functools.partial(torch_losses_and_gradient, cross_entropy=function)
            for name, function in compiled_functions(bench, F.cross_entropy).items()
        }
        functions |= library_functions(bench, "cross_entropy", torch_losses_and_gradient, (logits, targets))
        calls |= calls_of(functions, functools.partial, [(logits, targets)])
        amount = work.cross_entropy(logits, targets, losses).bytes
        yield f"cross-entropy, losses and gradient, V = {vocab}", amount, "TB/s", calls


def adamw_cases(bench):
    width, count = (4096, 12) if bench.on_gpu else (16, 2)

    def make_model(dtype=torch.float32):
        with torch.device(bench.device.type):
            return nn.ParameterList(torch.randn(width, width, dtype=dtype) for _ in range(count))

    ours = llama.FlatAdamW(make_model(), 3e-4, low_precision=bench.on_gpu)
    theirs = llama.TorchAdamW(make_model(), 3e-4)
    exact = llama.TorchAdamW(make_model(torch.float64), 3e-4)
    initial = [w.clone() for w in ours.weights()]
    ours.grad.normal_()
    for mine in ours.parameters:
        mine.grad = mine.main_grad
    for other in (theirs, exact):
        other.reset(initial)
        for mine, parameter in zip(ours.parameters, other.parameters, strict=True):
            parameter.grad = mine.main_grad.to(parameter.dtype)
    with bench.on_stream():
        for _ in range(3):
            ours.step()
            theirs.step()
            exact.step()
    changes = (
        {f"AdamW's change of weight {n}": w.detach() - i for n, (w, i) in enumerate(zip(weights, initial, strict=True))}
        for weights in (ours.weights(), theirs.parameters, exact.parameters)
    )
    require(*changes, KERNEL_TOLERANCE[torch.float32])
    del initial, exact, changes
    amount = work.adamw(ours.param, ours.remainder, ours.grad, ours.exp_avg, ours.exp_avg_sq).bytes
    fp32 = ours.exp_avg  # as large as each of torch's tensors: weights, gradient and two moments
    calls = {"triton": [ours.step], "torch": ([theirs.step], work.adamw(fp32, None, fp32, fp32, fp32).bytes)}
    yield f"AdamW, {ours.param.numel() / 1e6:.0f} M parameters", amount, "TB/s", calls


def torch_attention(q, k, v, backend):
    """q, k, v (batch, seq, heads, head_dim), the layout of our kernels."""
    if backend == "efficient":  # it takes no fewer heads of K and V
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPA_BACKENDS[backend]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def attention_gradients(attention, q, k, v, o_grad):
    # New leaves: autograd keeps the stream on which a leaf was first used, and captured ones need their own.
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o = attention(q, k, v)
    return o, *torch.autograd.grad(o, (q, k, v), o_grad)


def triton_attention_gradients(q, k, v, o_grad):
    o, lse = llama.flash_attention_forward(q, k, v)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    llama.flash_attention_backward(o_grad, (q, k, v, o, lse), grads)
    return o, *grads


def attention_cases(bench):
    for batch, seq_len, heads, kv_heads, head_dim in ATTENTION_SHAPES if bench.on_gpu else ((1, 32, 2, 1, 16),):
        q, o_grad = (bench.randn(batch, seq_len, heads, head_dim) for _ in range(2))
        k, v = (bench.randn(batch, seq_len, kv_heads, head_dim) for _ in range(2))
        # Plain PyTorch is always the attention that keeps its scores.
        plain_forward = functools.partial(torch_attention, backend="math")
        plain = functools.partial(attention_gradients, plain_forward)
        check("attention", plain, (q, k, v, o_grad), triton_attention_gradients(q, k, v, o_grad))
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        forward = {"triton": [functools.partial(llama.flash_attention_forward, q, k, v)]}
        both = {"triton": [functools.partial(triton_attention_gradients, q, k, v, o_grad)]}
        backends = ("flash", "efficient") if bench.device.family == "amd" else ("flash", "cudnn", "efficient")
        for backend in backends if bench.on_gpu else ("math",):
            # Gradients are required, as in training, so that the log-sum-exp is stored.
            attention = functools.partial(torch_attention, backend=backend)
            try:
                attention_gradients(attention, *leaves, o_grad)
            except RuntimeError as error:  # this build or device lacks the backend
                forward[backend] = both[backend] = error
                continue
            forward[backend] = [functools.partial(attention, *leaves)]
            both[backend] = [functools.partial(attention_gradients, attention, *leaves, o_grad)]
        functions = library_functions(bench, "attention", plain_forward, leaves, (o_grad,))
        forward |= calls_of(functions, functools.partial, [leaves])
        both |= calls_of(functions, functools.partial(functools.partial, attention_gradients), [(*leaves, o_grad)])
        case = f"({batch}, {seq_len}, {heads}/{kv_heads}, {head_dim})"
        flop = work.attention(q, k, v, q, None).flop
        gradient = work.attention_backward(q, k, v, q, o_grad, None, q, k, v).flop
        yield f"attention forward {case}", flop, "TFLOP/s", forward
        yield f"attention forward + backward {case}", flop + gradient, "TFLOP/s", both


CASES = {
    "copy": copy_cases,
    "rmsnorm": rmsnorm_cases,
    "swiglu": swiglu_cases,
    "cross-entropy": cross_entropy_cases,
    "adamw": adamw_cases,
    "attention": attention_cases,
}


# ----------------------------------------------------------------------------------------------------------------------
# Measuring and report


def measure(bench, calls, amount):
    """{"us", "rate" in TB/s or TFLOP/s} of one contender, or {"error"}."""
    return bench.rate(*calls) if isinstance(calls, tuple) else bench.rate(calls, amount)


def format_contender(name, measured, unit, ours):
    if measured["error"]:
        return f"{name} {measured['error'][:60]}"
    times = f" ({measured['us'] / ours['us']:.2f}x)" if name != "triton" and ours.get("us") else ""
    return f"{name} {measured['us']:.1f} us {measured['rate']:.2f} {unit}{times}"


def measure_group(bench, name, entries):
    """Appends the entries of one group of cases. Returns False if a result was wrong."""
    all_right = True
    try:
        for case, amount, unit, contenders in CASES[name](bench):
            measured = {contender: measure(bench, calls, amount) for contender, calls in contenders.items()}
            all_right &= not any(isinstance(calls, ArithmeticError) for calls in contenders.values())
            entries.append({"group": name, "case": case, "amount": amount, "unit": unit, "contenders": measured})
            ours = measured.get("triton", {})
            columns = [format_contender(contender, row, unit, ours) for contender, row in measured.items()]
            print(f"{case:45} {' | '.join(columns)}", flush=True)
            contenders.clear()
    except Exception as error:  # the other groups can still be measured
        entries.append({"group": name, "case": name, "error": describe(error)})
        print(f"{name:45} {describe(error)}", flush=True)
        all_right &= not isinstance(error, ArithmeticError)
    finally:
        release(bench.device)
    return all_right


def parse(argv):
    parser = Parser("kernels.py", __doc__)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="groups (default: all)")
    parser.add_argument("--output-dir", default=str(RESULTS), metavar="DIR", help="(default: benchmarks/results)")
    return parser.parse_args(argv)


@program("kernels.py")
def main(argv):
    options = parse(argv)
    device = kernel_device()
    folder = llama.writable_folder("--output-dir", options.output_dir)
    torch.manual_seed(0)
    bench = KernelBench(device)
    result = header("kernels", device, argv)
    result["peers"] = versions(*(library.package.split(".")[0] for library in LIBRARIES.values()))
    result |= {"dtype": str(bench.dtype).removeprefix("torch."), "cases": []}
    file = ResultFile(folder, result)
    print(f"{device.name} ({device.arch}), PyTorch {torch.__version__}, {result['dtype']}", flush=True)
    all_right = True
    for name in options.only:
        with Heartbeat(f"measuring {name}"):
            all_right &= measure_group(bench, name, result["cases"])
        file.save(result)
    print(f"\nResults: {file.path}")
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
