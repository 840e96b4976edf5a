"""Time each kernel alone against PyTorch, on the device's clock.

    python -m benchmarks.kernels                        bf16, against eager PyTorch
    python -m benchmarks.kernels --compile-baselines    and against torch.compile of the same function
    python -m benchmarks.kernels --only attention

Several calls are captured in one graph, and the median replay counts: launches are left out. Buffers exceed the L2
cache, except for attention, which has the sizes of models. Bandwidth is that of the bytes that must be moved at least;
the first row is the ceiling. Results are checked against PyTorch's before anything is timed.

Exit codes: 0 done, 1 a result is wrong, 2 the request cannot be met, 130 interrupted.
"""

import argparse
import contextlib
import functools
import gc
import math
import statistics
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tiny_llama_v3 as llama
from measure.results import RESULTS, ResultFile, describe, header
from tiny_llama_v3 import exit_code_of

EPS = 1e-5
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-3}  # relative to the norm of PyTorch's result
CALLS = 8  # in one graph
REPLAY_SECONDS = 0.15

ATTENTION_SHAPES = (  # batch, seq, heads, kv_heads, head_dim
    (8, 128, 8, 4, 64),
    (16, 512, 16, 8, 64),
    (4, 2048, 32, 16, 64),
    (4, 2048, 16, 4, 128),
    (1, 8192, 16, 4, 128),
)
SDPA_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}


class Bench:
    """The device, the sizes that suit it, and how a call is timed on it."""

    def __init__(self, device, compile_baselines):
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32  # the interpreter multiplies bf16 wrongly
        self.compile_baselines = compile_baselines
        self.stream = torch.cuda.Stream() if self.on_gpu else None
        self.elements = 2**26 if self.on_gpu else 2**11  # of a tensor: 128 MiB in bf16

    def randn(self, *shape, dtype=None):
        return torch.randn(*shape, device=self.device.type, dtype=dtype or self.dtype)

    @contextlib.contextmanager
    def on_stream(self):
        """Autograd runs a backward pass on the stream of its forward pass: both must be on the one that is captured."""
        if not self.on_gpu:
            yield
            return
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.synchronize()

    def microseconds(self, calls):
        """Device time of one call, the median of replays of a graph that goes round the list."""
        if not self.on_gpu:
            start = time.perf_counter()
            calls[0]()
            return (time.perf_counter() - start) * 1e6
        with self.on_stream():
            for call in calls:  # compiles, and initialises the libraries
                call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for index in range(CALLS):
                calls[index % len(calls)]()

        def replay():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return start.elapsed_time(end)

        replay()
        milliseconds = replay()
        num_replays = max(5, min(50, math.ceil(REPLAY_SECONDS * 1e3 / milliseconds)))
        return statistics.median(replay() for _ in range(num_replays)) * 1e3 / CALLS


def check(name, ours, theirs, dtype):
    """The largest relative distance of corresponding tensors; refuses one that is beyond bf16's rounding."""
    distances = []
    for a, b in zip(ours, theirs, strict=True):
        a, b = a.detach().float(), b.detach().float()
        distances.append(float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b)))
    if not max(distances) <= TOLERANCE[dtype]:
        raise ArithmeticError(f"{name} differs from PyTorch by {max(distances):.1e}, allowed {TOLERANCE[dtype]:.0e}")
    return max(distances)


def gradient_call(function, inputs, upstream):
    """A call of the backward pass alone of function(*inputs); the graph behind it is kept."""
    outputs = function(*inputs)
    needed = [x for x in inputs if x.requires_grad]
    return functools.partial(torch.autograd.grad, outputs, needed, upstream, retain_graph=True)


def baselines(bench, function):
    yield "torch", function
    if bench.compile_baselines:
        yield "compile", torch.compile(function, dynamic=False)


# ----------------------------------------------------------------------------------------------------------------------
# Cases: each generator yields (case, amount of work of one call, unit, {contender: calls}), the first contender ours. A
# contender may bring its own amount of work.


def copy_cases(bench):
    sets = [(bench.randn(4 * bench.elements), bench.randn(4 * bench.elements)) for _ in range(2)]
    # A kernel that reads and writes: a plain copy inside a graph goes to the copy engine, which is slower.
    calls = {"torch": [functools.partial(torch.neg, x, out=y) for x, y in sets]}
    yield "read and write (negation)", 2 * sets[0][0].nbytes, "TB/s", calls


def torch_norm(x, weight):
    return F.rms_norm(x, weight.shape, weight, EPS)


def torch_add_norm(x, delta, weight):
    residual = x + delta
    return F.rms_norm(residual, weight.shape, weight, EPS), residual


def rmsnorm_cases(bench):
    widths = (512, 1024, 2048, 4096, 8192) if bench.on_gpu else (64,)
    for n_cols in widths:
        shape = (bench.elements // n_cols, n_cols)
        size = bench.elements * bench.dtype.itemsize
        weight = bench.randn(n_cols).requires_grad_()
        sets = [[bench.randn(*shape) for _ in range(4)] for _ in range(2)]  # x, delta, y_grad, residual_grad
        for x, delta, *_ in sets:
            x.requires_grad_(), delta.requires_grad_()
        for with_delta in (False, True):
            function = torch_add_norm if with_delta else torch_norm
            inputs = [(x, delta, weight) if with_delta else (x, weight) for x, delta, *_ in sets]
            upstreams = [(y_grad, residual_grad) if with_delta else (y_grad,) for *_, y_grad, residual_grad in sets]
            forward, backward, saved = [], [], []
            for x, delta, y_grad, residual_grad in sets:
                x, delta = x.detach(), delta.detach() if with_delta else None
                forward.append(functools.partial(llama.rmsnorm_forward, x, delta, weight.detach(), EPS))
                residual, y, rstd = forward[-1]()
                saved.append((y, residual))
                arguments = y_grad, residual_grad if with_delta else None, residual, weight.detach(), rstd
                backward.append(functools.partial(llama.rmsnorm_backward, *arguments))

            plain = function(*inputs[0])
            plain = plain if with_delta else (plain,)
            check("RMSNorm", saved[0][: len(plain)], plain, bench.dtype)
            plain_grads = torch.autograd.grad(plain, inputs[0], upstreams[0])
            check("RMSNorm's gradient", backward[0](), (plain_grads[0], plain_grads[-1]), bench.dtype)
            del plain, plain_grads

            note = "add + " * with_delta
            calls = {"triton": forward}
            for name, baseline in baselines(bench, function):
                # Without no_grad(): what backward needs is part of the forward pass.
                calls[name] = [functools.partial(baseline, *x) for x in inputs]
            yield f"{note}rmsnorm forward, N = {n_cols}", (8 if with_delta else 4) * size // 2, "TB/s", calls
            calls = {"triton": backward}
            for name, baseline in baselines(bench, function):
                with bench.on_stream():
                    calls[name] = [gradient_call(baseline, x, u) for x, u in zip(inputs, upstreams, strict=True)]
            yield f"{note}rmsnorm backward, N = {n_cols}", (8 if with_delta else 6) * size // 2, "TB/s", calls


def torch_activation(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_cases(bench):
    for n_cols in (2048, 8192) if bench.on_gpu else (64,):
        n_rows = bench.elements // n_cols
        sets = [(bench.randn(n_rows, 2 * n_cols).requires_grad_(), bench.randn(n_rows, n_cols)) for _ in range(2)]
        gate_up, hidden_grad = sets[0]
        plain = torch_activation(gate_up)
        check("SwiGLU", (llama.swiglu_activation(gate_up.detach()),), (plain,), bench.dtype)
        grad = gate_up.detach().clone()
        llama.swiglu_activation_backward_(hidden_grad, grad)
        check("SwiGLU's gradient", (grad,), torch.autograd.grad(plain, gate_up, hidden_grad), bench.dtype)
        del plain, grad

        calls = {"triton": [functools.partial(llama.swiglu_activation, x.detach()) for x, _ in sets]}
        for name, baseline in baselines(bench, torch_activation):
            calls[name] = [functools.partial(baseline, x) for x, _ in sets]
        size = bench.elements * bench.dtype.itemsize
        yield f"swiglu forward, F = {n_cols}", 3 * size, "TB/s", calls
        # In place: what a second call reads is a gradient, which takes as long.
        copies = [(grad, x.detach().clone()) for x, grad in sets]
        calls = {"triton": [functools.partial(llama.swiglu_activation_backward_, *pair) for pair in copies]}
        for name, baseline in baselines(bench, torch_activation):
            with bench.on_stream():
                calls[name] = [gradient_call(baseline, (x,), (grad,)) for x, grad in sets]
        yield f"swiglu backward, F = {n_cols}", 5 * size, "TB/s", calls


def torch_loss_and_gradient(logits, targets, cross_entropy=F.cross_entropy):
    return torch.autograd.grad(cross_entropy(logits, targets), logits)


def cross_entropy_cases(bench):
    n_rows = 8192 if bench.on_gpu else 8
    for vocab in (32000, 128256) if bench.on_gpu else (100,):
        logits = bench.randn(n_rows, vocab).requires_grad_()
        targets = torch.randint(vocab, (n_rows,), device=bench.device.type)
        grad = logits.detach().clone()
        llama.cross_entropy_(grad, targets, 1.0 / n_rows)
        check("cross-entropy's gradient", (grad,), torch_loss_and_gradient(logits, targets), bench.dtype)
        calls = {"triton": [functools.partial(llama.cross_entropy_, grad, targets, 1.0 / n_rows)]}
        calls["torch"] = [functools.partial(torch_loss_and_gradient, logits, targets)]
        if bench.compile_baselines:
            compiled = torch.compile(F.cross_entropy, dynamic=False)
            calls["compile"] = [functools.partial(torch_loss_and_gradient, logits, targets, compiled)]
        yield f"cross-entropy, loss and gradient, V = {vocab}", 2 * logits.nbytes, "TB/s", calls


def adamw_cases(bench):
    width, count = (4096, 12) if bench.on_gpu else (16, 2)

    def make_model():
        with torch.device(bench.device.type):
            return nn.ParameterList(torch.randn(width, width) for _ in range(count))

    ours = llama.FlatAdamW(make_model(), 3e-4, low_precision=bench.on_gpu)
    theirs = llama.TorchAdamW(make_model(), 3e-4)
    initial = [w.clone() for w in ours.weights()]
    theirs.reset(initial)
    ours.grad.normal_()
    for mine, other in zip(ours.parameters, theirs.parameters, strict=True):
        mine.grad = mine.grad_buffer
        other.grad = mine.grad_buffer.float()
    with bench.on_stream():
        for _ in range(3):
            ours.step()
            theirs.step()
    updated = ours.weights(), [p.detach() for p in theirs.parameters]
    changes = [torch._foreach_sub(weights, initial) for weights in updated]
    check("AdamW", *changes, torch.float32)
    del initial, updated, changes
    number = ours.param.numel()
    # Ours: both halves of the weight twice, a bf16 gradient, the moments twice; torch's: the same in fp32.
    amount = (26 if bench.on_gpu else 28) * number
    calls = {"triton": [ours.step], "torch": ([theirs.step], 28 * number)}
    yield f"AdamW, {number / 1e6:.0f} M parameters", amount, "TB/s", calls


def torch_attention(q, k, v, backend):
    """q, k, v (batch, seq, heads, head_dim) as our kernels take them."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPA_BACKENDS[backend]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def torch_attention_gradients(q, k, v, o_grad, backend):
    # Fresh leaves: autograd ties a leaf to the stream that it was first used on, and a captured one must be its own.
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o = torch_attention(q, k, v, backend)
    return o, *torch.autograd.grad(o, (q, k, v), o_grad)


def triton_attention_gradients(q, k, v, o_grad):
    o, lse = llama.flash_attention_forward(q, k, v)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    llama.flash_attention_backward(o_grad, q, k, v, o, lse, *grads)
    return o, *grads


def attention_cases(bench):
    for batch, seq_len, heads, kv_heads, head_dim in ATTENTION_SHAPES if bench.on_gpu else ((1, 32, 2, 1, 16),):
        q, o_grad = (bench.randn(batch, seq_len, heads, head_dim) for _ in range(2))
        k, v = (bench.randn(batch, seq_len, kv_heads, head_dim) for _ in range(2))
        ours = triton_attention_gradients(q, k, v, o_grad)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        forward = {"triton": [functools.partial(llama.flash_attention_forward, q, k, v)]}
        both = {"triton": [functools.partial(triton_attention_gradients, q, k, v, o_grad)]}
        for backend in ("flash", "cudnn") if bench.on_gpu else ("math",):
            try:
                theirs = torch_attention_gradients(*leaves, o_grad, backend)
            except RuntimeError as error:  # a backend that this build or device lacks
                forward[backend] = both[backend] = error
                continue
            check(f"attention (against {backend})", ours, theirs, bench.dtype)
            # With gradients required, as in training: the log-sum-exp is stored.
            forward[backend] = [functools.partial(torch_attention, *leaves, backend)]
            both[backend] = [functools.partial(torch_attention_gradients, *leaves, o_grad, backend)]
        case = f"({batch}, {seq_len}, {heads}/{kv_heads}, {head_dim})"
        flop = 2 * batch * heads * seq_len**2 * head_dim  # two products, half of each masked
        yield f"attention forward {case}", flop, "TFLOP/s", forward
        yield f"attention forward + backward {case}", 3.5 * flop, "TFLOP/s", both


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
    try:
        if isinstance(calls, Exception):
            raise calls
        calls, amount = calls if isinstance(calls, tuple) else (calls, amount)
        us = bench.microseconds(calls)
        return {"us": us, "rate": amount / us / 1e6, "error": None}
    except Exception as error:  # of this contender alone
        return {"error": describe(error)}


def format_contender(name, measured, unit, ours):
    if measured["error"]:
        return f"{name} {measured['error'][:60]}"
    times = f" ({measured['us'] / ours['us']:.2f}x)" if name != "triton" and ours.get("us") else ""
    return f"{name} {measured['us']:.1f} us {measured['rate']:.2f} {unit}{times}"


def measure_group(bench, name, entries):
    """Append the entries of one group of cases; False if a result was wrong."""
    try:
        for case, amount, unit, contenders in CASES[name](bench):
            measured = {contender: measure(bench, calls, amount) for contender, calls in contenders.items()}
            entries.append({"group": name, "case": case, "amount": amount, "unit": unit, "contenders": measured})
            ours = measured.get("triton", {})
            columns = [format_contender(contender, row, unit, ours) for contender, row in measured.items()]
            print(f"{case:45} {' | '.join(columns)}", flush=True)
            contenders.clear()
    except Exception as error:  # the other groups can still be measured
        entries.append({"group": name, "case": name, "error": describe(error)})
        print(f"{name:45} {describe(error)}", flush=True)
        return not isinstance(error, ArithmeticError)
    finally:
        gc.collect()
        if bench.on_gpu:
            torch.cuda.empty_cache()
        if bench.compile_baselines:
            torch.compiler.reset()
    return True


def parse(argv):
    parser = llama.Parser(
        prog="kernels.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="groups (default: all)")
    parser.add_argument("--compile-baselines", action="store_true", help="time torch.compile of the baselines too")
    parser.add_argument("--output-dir", default=str(RESULTS), metavar="DIR", help="(default: benchmarks/results)")
    return parser.parse_args(argv)


def run(argv):
    options = parse(argv)
    device = llama.select_device("auto")
    obstacle = llama.triton_obstacle(device)
    if obstacle:
        raise llama.UsageError(f"the kernels need a GPU: {obstacle}")
    folder = llama.writable_folder("--output-dir", options.output_dir)
    if options.compile_baselines:
        from torch._functorch import config as functorch_config

        functorch_config.donated_buffer = False  # a backward pass is repeated on the same saved tensors
    torch.manual_seed(0)
    bench = Bench(device, options.compile_baselines)
    result = header("kernels", device, argv) | {"dtype": str(bench.dtype).removeprefix("torch."), "cases": []}
    file = ResultFile(folder, result)
    print(f"{device.name} ({device.arch}), PyTorch {torch.__version__}, {result['dtype']}", flush=True)
    all_right = True
    for name in options.only:
        all_right &= measure_group(bench, name, result["cases"])
        file.save(result)
    print(f"\nResults: {file.path}")
    return 0 if all_right else 1


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    return exit_code_of(lambda: run(argv), "kernels.py")


if __name__ == "__main__":
    sys.exit(main())
