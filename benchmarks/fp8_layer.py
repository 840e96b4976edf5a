"""Time what --fp8 saves and what it costs in a layer of the large model: its products, and rounding for them.

    python -m benchmarks.fp8_layer

A layer has four matrices, and each of them three products: forward, the gradient of the input and that of the weight.
Products in FP8 are timed beside those in bf16. Rounding is timed beside plain PyTorch, eager and compiled: the inputs,
the weights and the gradients of all four, two of which the kernel computes from SwiGLU's. Before a part is timed, its
results are compared with those in higher precision, by the rule of tiny_llama_v3.py --check.

Exit codes: 0 done, 1 a result is wrong, 2 the request cannot be met, 130 interrupted.
"""

import functools
import sys

import torch
import torch.nn.functional as F

if not __package__:
    print("run it from the root as python -m benchmarks.fp8_layer", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from benchmarks.harness import Run, make_parser, measure_calls, print_calls
from measure import work
from measure.accuracy import require
from measure.command_line import program
from measure.device import kernel_device
from measure.timing import Bench, compile_apart, copy_calls
from tiny_llama import fp8, hardware

SHAPE = dict(tokens=8192, hidden=2048, ffn=8192)  # of the large model
SOURCES = fp8.MATRIX, fp8.SWIGLU, fp8.SWIGLU_GRADIENT
# As numbers here: torch.compile cannot compare the above.
MATRIX, SWIGLU, SWIGLU_GRADIENT = range(3)
TOLERANCE = 1e-2  # beyond twice the error of plain PyTorch, relative to the norm: fast accumulation has 1e-3


def plain_values(x, source=MATRIX, hidden_grad=None):
    """Return what fp8.quantize() rounds, in plain PyTorch."""
    if source == MATRIX:
        return x
    gate, up = x.chunk(2, dim=-1)
    if source == SWIGLU:
        return F.silu(gate) * up
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    return torch.cat((hidden_grad * up * (sigmoid + silu * (1 - sigmoid)), hidden_grad * silu), dim=-1)


def plain_quantize(dtype, **matrix):
    """Round like fp8.quantize(), in passes of plain PyTorch."""
    # Without fp8.scale_of(), which breaks a graph: the power of two above the largest value over the type's largest.
    values = plain_values(**matrix)
    scale = (values.abs().amax().float() / torch.finfo(dtype).max).log2().ceil().exp2()
    data = (values / scale).to(dtype)
    return fp8.Scaled(data, data.t().contiguous(), scale)


def dequantized(scaled):
    """Return {name: what a Scaled stands for} of both copies, in fp32."""
    transposed = scaled.transposed.float().t()
    return {
        "data": scaled.data.float() * scaled.scale,
        "transposed": transposed * scaled.scale,
    }


def exact(matrix):
    """Return the values of a matrix in fp32, twice, as dequantized() has them."""
    in_fp32 = {name: x.float() if torch.is_tensor(x) else x for name, x in matrix.items()}
    values = plain_values(**in_fp32)
    return {"data": values, "transposed": values}


def quantize(guess, dtype, source=MATRIX, **tensors):
    return fp8.quantize(guess=guess, dtype=dtype, source=SOURCES[source], **tensors)


def rounding(bench, dtype, matrices):
    """Return how to build the contenders that round all of these, the bytes, and the Scaled of each.

    A matrix is a dict of quantize()'s arguments.
    """
    plain = functools.partial(plain_quantize, dtype)
    guesses = [torch.zeros((), device=bench.device.type) for _ in matrices]
    ours = [functools.partial(quantize, guess, dtype) for guess in guesses]

    def call(functions):
        return [function(**matrix) for function, matrix in zip(functions, matrices, strict=True)]

    def check():
        for matrix, found in zip(matrices, scaled, strict=True):
            require(dequantized(found), dequantized(plain(**matrix)), exact(matrix), TOLERANCE)
        return [functools.partial(call, ours)]

    def compiled():
        function = compile_apart(plain, dynamic=False, fullgraph=True)
        return [functools.partial(call, [function] * len(matrices))]

    scaled = call(ours)
    contenders = {"triton": check, "torch": lambda: [functools.partial(call, [plain] * len(matrices))]}
    contenders |= {"compile": compiled} if bench.on_gpu else {}
    amount = sum(work.moved(*filter(torch.is_tensor, matrix.values())) for matrix in matrices)
    amount += sum(work.moved(found.data, found.transposed) for found in scaled)
    return contenders, amount, scaled


def bf16_products(x, weight, y_grad):
    """Return the product y = x @ weight^T, and those of its gradients."""
    return {
        "y": x @ weight.t(),
        "x_grad": y_grad @ weight,
        "weight_grad": y_grad.t() @ x,
    }


def fp8_products(x, weight, y_grad, dtype):
    """Return the same products of three Scaled, as tiny_llama.fp8 computes them."""
    # Fast accumulation, with fewer bits, in the forward pass only. The library wants both factors row by row, so that
    # each gradient takes a transposed copy.
    y = fp8.product(x.data, x.scale, weight.data, weight.scale, dtype, use_fast_accum=x.data.is_cuda)
    x_grad = fp8.product(y_grad.data, y_grad.scale, weight.transposed, weight.scale, dtype)
    weight_grad = fp8.product(y_grad.transposed, y_grad.scale, x.transposed, x.scale, dtype)
    return dict(y=y, x_grad=x_grad, weight_grad=weight_grad)


def products(bench, scaled):
    """Return how to build the contenders of these (x, weight, gradient of y), Scaled each, and the operations."""
    plain = [[dequantized(matrix)["data"].to(bench.dtype) for matrix in matrices] for matrices in scaled]

    def check():
        for own, matrices in zip(scaled, plain, strict=True):
            precise = bf16_products(*(matrix.float() for matrix in matrices))
            require(fp8_products(*own, bench.dtype), bf16_products(*matrices), precise, TOLERANCE)
        return [lambda: [fp8_products(*own, bench.dtype) for own in scaled]]

    def in_bf16():
        # Of all digits, as in training: numbers that were rounded to FP8 would take less power.
        for matrix in sum(plain, []):
            matrix.normal_()
        return [lambda: [bf16_products(*matrices) for matrices in plain]]

    # Three products, of two operations for each pair of a token and a weight.
    amount = sum(3 * 2 * len(x.data) * weight.data.numel() for x, weight, _ in scaled)
    return {"fp8": check, "bf16": in_bf16}, amount


def parts(bench, formats, tokens, hidden, ffn):
    """Yield (part, amount of work of one call, its unit, {contender: how to build its calls})."""
    calls, amount = copy_calls(bench, tokens * ffn)
    yield "read and write (negation)", amount, "TB/s", {"torch": lambda: calls}

    def tensors(*shapes):
        return [dict(x=bench.randn(*shape)) for shape in shapes]

    # x, weight and gradient of y of: the projections to and from attention, SwiGLU's of gate and up, and of its result.
    gate_up, hidden_grad = bench.randn(tokens, 2 * ffn), bench.randn(tokens, ffn)
    inputs = [*tensors(*[(tokens, hidden)] * 3), dict(x=gate_up, source=SWIGLU)]
    weights = tensors((2 * hidden, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn))
    swiglu_gradient = dict(x=gate_up, hidden_grad=hidden_grad, source=SWIGLU_GRADIENT)
    gradients = [*tensors((tokens, 2 * hidden), (tokens, hidden)), swiglu_gradient, *tensors((tokens, hidden))]
    scaled = []
    for part, dtype, matrices in (
        ("inputs", formats.forward, inputs),
        ("weights", formats.forward, weights),
        ("gradients", formats.gradient, gradients),
    ):
        contenders, amount, found = rounding(bench, dtype, matrices)
        yield f"rounding the {part}", amount, "TB/s", contenders
        scaled.append(found)
    contenders, amount = products(bench, list(zip(*scaled, strict=True)))
    yield "the twelve products", amount, "TFLOP/s", contenders


def parse(argv):
    return make_parser("fp8_layer", __doc__).parse_args(argv)


@program("fp8_layer.py")
def main(argv):
    options, device = parse(argv), kernel_device()
    formats = fp8.formats_of(device.arch)
    if device.type == "cpu" or formats is None:
        raise llama.UsageError(f"the device, {device.arch}, has no products in FP8: use a GPU that has them")
    torch.manual_seed(0)
    peaks = [hardware.peak_tflops(device, precision) for precision in ("fp8", "bf16")]
    run, bench = Run("fp8_layer", argv, options, device, shape=SHAPE, peaks=peaks, parts=[]), Bench(device)
    for part, amount, unit, contenders in parts(bench, formats, **SHAPE):
        measured = measure_calls(run, bench, amount, contenders)
        run.result["parts"].append({"part": part, "amount": amount, "unit": unit, "contenders": measured})
        print_calls(part, unit, measured)
        run.save()
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
