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
from measure import work
from measure.accuracy import require
from measure.command_line import Parser, program
from measure.device import kernel_device
from measure.heartbeat import Heartbeat
from measure.results import RESULTS, ResultFile, header
from measure.timing import Bench, compile_apart, copy_calls
from tiny_llama import fp8, hardware

SHAPE = dict(tokens=8192, hidden=2048, ffn=8192)  # of the large model
SOURCES = fp8.MATRIX, fp8.SWIGLU, fp8.SWIGLU_GRADIENT  # as numbers here: torch.compile cannot compare these
MATRIX, SWIGLU, SWIGLU_GRADIENT = range(3)
TOLERANCE = 1e-2  # beyond twice the error of plain PyTorch, relative to the norm: fast accumulation has 1e-3


def plain_values(x, source=MATRIX, hidden_grad=None):
    """What fp8.quantize() rounds, in plain PyTorch."""
    if source == MATRIX:
        return x
    gate, up = x.chunk(2, dim=-1)
    if source == SWIGLU:
        return F.silu(gate) * up
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    return torch.cat((hidden_grad * up * (sigmoid + silu * (1 - sigmoid)), hidden_grad * silu), dim=-1)


def plain_quantize(dtype, **matrix):
    """As fp8.quantize() of the same, in passes of plain PyTorch, without fp8.scale_of(), which breaks a graph."""
    values = plain_values(**matrix)
    scale = (values.abs().amax().float() / torch.finfo(dtype).max).log2().ceil().exp2()
    data = (values / scale).to(dtype)
    return fp8.Scaled(data, data.t().contiguous(), scale)


def dequantized(scaled):
    """{name: what a Scaled stands for} of both copies, in fp32."""
    return {"data": scaled.data.float() * scaled.scale, "transposed": scaled.transposed.float().t() * scaled.scale}


def exact(matrix):
    """The values of a matrix in fp32, twice, as dequantized() has them."""
    values = plain_values(**{name: x.float() if torch.is_tensor(x) else x for name, x in matrix.items()})
    return {"data": values, "transposed": values}


def quantize(guess, dtype, source=MATRIX, **tensors):
    return fp8.quantize(guess=guess, dtype=dtype, source=SOURCES[source], **tensors)


def rounding(bench, dtype, matrices):
    """(calls, bytes, the Scaled of each) of rounding all of these, a dict each of quantize()'s arguments."""
    plain = functools.partial(plain_quantize, dtype)
    guesses = [torch.zeros((), device=bench.device.type) for _ in matrices]
    functions = {"triton": [functools.partial(quantize, guess, dtype) for guess in guesses]}
    functions |= {"torch": [plain] * len(matrices)}
    if bench.on_gpu:
        functions["compile"] = [compile_apart(plain, dynamic=False, fullgraph=True)] * len(matrices)

    def call(own):
        return [function(**matrix) for function, matrix in zip(own, matrices, strict=True)]

    scaled = call(functions["triton"])
    for matrix, found in zip(matrices, scaled, strict=True):
        require(dequantized(found), dequantized(plain(**matrix)), exact(matrix), TOLERANCE)
    amount = sum(work.moved(*filter(torch.is_tensor, matrix.values())) for matrix in matrices)
    amount += sum(work.moved(found.data, found.transposed) for found in scaled)
    return {name: [functools.partial(call, own)] for name, own in functions.items()}, amount, scaled


def bf16_products(x, weight, y_grad):
    """The products of y = x @ weight^T, and those of its gradients."""
    return dict(y=x @ weight.t(), x_grad=y_grad @ weight, weight_grad=y_grad.t() @ x)


def fp8_products(x, weight, y_grad, dtype):
    """As bf16_products() of three Scaled, as tiny_llama.fp8 computes them."""
    y = fp8.product(x.data, x.scale, weight.data, weight.scale, dtype, use_fast_accum=x.data.is_cuda)
    x_grad = fp8.product(y_grad.data, y_grad.scale, weight.transposed, weight.scale, dtype)
    weight_grad = fp8.product(y_grad.transposed, y_grad.scale, x.transposed, x.scale, dtype)
    return dict(y=y, x_grad=x_grad, weight_grad=weight_grad)


def products(bench, scaled):
    """(calls, operations) of the products of these (x, weight, gradient of y), Scaled each."""
    plain = [[dequantized(matrix)["data"].to(bench.dtype) for matrix in matrices] for matrices in scaled]
    for own, matrices in zip(scaled, plain, strict=True):
        precise = bf16_products(*(matrix.float() for matrix in matrices))
        require(fp8_products(*own, bench.dtype), bf16_products(*matrices), precise, TOLERANCE)
        del precise
        for matrix in matrices:  # of all digits, as in training: fewer would take less power
            matrix.normal_()
    calls = {
        "fp8": [lambda: [fp8_products(*own, bench.dtype) for own in scaled]],
        "bf16": [lambda: [bf16_products(*matrices) for matrices in plain]],
    }
    return calls, sum(6 * len(x.data) * weight.data.numel() for x, weight, _ in scaled)


def parts(bench, formats, tokens, hidden, ffn):
    """Yields (part, amount of work of one call, its unit, {contender: calls})."""
    calls, amount = copy_calls(bench, tokens * ffn)
    yield "read and write (negation)", amount, "TB/s", {"torch": calls}

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
        calls, amount, found = rounding(bench, dtype, matrices)
        yield f"rounding the {part}", amount, "TB/s", calls
        scaled.append(found)
    calls, amount = products(bench, list(zip(*scaled, strict=True)))
    yield "the twelve products", amount, "TFLOP/s", calls


def parse(argv):
    parser = Parser("fp8_layer.py", __doc__)
    parser.add_argument("--output-dir", default=str(RESULTS), metavar="DIR", help="(default: benchmarks/results)")
    return parser.parse_args(argv)


@program("fp8_layer.py")
def main(argv):
    options, device = parse(argv), kernel_device()
    formats = fp8.formats_of(device.arch)
    if device.type == "cpu" or formats is None:
        raise llama.UsageError(f"the device, {device.arch}, has no products in FP8: use a GPU that has them")
    folder = llama.writable_folder("--output-dir", options.output_dir)
    torch.manual_seed(0)
    bench, result = Bench(device), header("fp8_layer", device, argv) | {"shape": SHAPE, "parts": []}
    result["peaks"] = [hardware.peak_tflops(device, precision) for precision in ("fp8", "bf16")]
    with Heartbeat("measuring a layer"):
        try:
            for part, amount, unit, contenders in parts(bench, formats, **SHAPE):
                measured = {name: bench.rate(calls, amount) for name, calls in contenders.items()}
                result["parts"].append({"part": part, "amount": amount, "unit": unit, "contenders": measured})
                rows = (f"{n} {r['error'] or '{us:.1f} us {rate:.2f}'.format(**r)}" for n, r in measured.items())
                print(f"{part:30} {' | '.join(rows)} {unit}", flush=True)
        except ArithmeticError as error:
            print(f"a result is wrong, and nothing is saved: {error}", file=sys.stderr)
            return 1
    file = ResultFile(folder, result)
    file.save(result)
    print(f"\nResults: {file.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
