"""The cases of what --fp8 saves and costs in a layer: its products, and rounding for them, for benchmarks.kernels.

A layer has four matrices, and each of them three products: forward, the gradient of the input and that of the weight.
Rounded are the inputs, the weights and the gradients of all four; the kernel computes two of them from SwiGLU's.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

import tiny_llama_v3 as llama
from benchmarks.harness import Timed
from measure import work
from measure.accuracy import require
from measure.timing import compile_apart
from tiny_llama import fp8

TOLERANCE = 1e-2  # beyond twice the error of plain PyTorch, relative to the norm: fast accumulation has 1e-3


def swiglu(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_gradient(gate_up, hidden_grad):
    gate, up = gate_up.chunk(2, dim=-1)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    return torch.cat((hidden_grad * up * (sigmoid + silu * (1 - sigmoid)), hidden_grad * silu), dim=-1)


class Matrix(NamedTuple):
    """What is rounded: values() of the tensors, as fp8.quantize() knows it by the source."""

    tensors: tuple
    source: object = fp8.MATRIX
    values: Callable = lambda x: x


def plain_quantize(values, dtype, *tensors):
    """Round like fp8.quantize(), in passes of plain PyTorch."""
    # Without fp8.scale_of(), which breaks a graph: the power of two above the largest value over the type's largest.
    x = values(*tensors)
    scale = (x.abs().amax().float() / torch.finfo(dtype).max).log2().ceil().exp2()
    data = (x / scale).to(dtype)
    return fp8.Scaled(data, data.t().contiguous(), scale)


def dequantized(scaled):
    """Return {name: what a Scaled stands for} of both copies, in fp32."""
    return {
        "data": scaled.data.float() * scaled.scale,
        "transposed": scaled.transposed.float().t() * scaled.scale,
    }


def rounding(bench, dtype, matrices):
    """Return the contenders that round all of these, the bytes, and the Scaled of each."""
    guesses = [torch.zeros((), device=bench.device.type) for _ in matrices]

    def ours():
        pairs = zip(matrices, guesses, strict=True)
        return [fp8.quantize(m.tensors[0], guess, dtype, m.source, *m.tensors[1:]) for m, guess in pairs]

    def plain(quantize=plain_quantize):
        return [quantize(m.values, dtype, *m.tensors) for m in matrices]

    def check():
        for matrix, found, other in zip(matrices, scaled, plain(), strict=True):
            exact = matrix.values(*(x.float() for x in matrix.tensors))
            require(*map(dequantized, (found, other)), {"data": exact, "transposed": exact}, TOLERANCE)
        return [ours]

    def compiled():
        return [functools.partial(plain, compile_apart(plain_quantize, dynamic=False, fullgraph=True))]

    scaled = ours()
    contenders = {"triton": check, "torch": lambda: [plain]} | ({"compile": compiled} if bench.on_gpu else {})
    moved = sum(work.moved(*matrix.tensors) for matrix in matrices)
    moved += sum(work.moved(each.data, each.transposed) for each in scaled)
    return contenders, moved, scaled


def three_products(multiply, x, weight, y_grad):
    """Return y = x @ weight^T and the products of its gradients; each matrix is (as it is, transposed)."""
    return {
        "y": multiply(x[0], weight[0]),
        # multiply(a, b) is a @ b^T: the library wants both factors row by row, so each gradient takes transposed ones.
        "x_grad": multiply(y_grad[0], weight[1]),
        "weight_grad": multiply(y_grad[1], x[1]),
    }


def plainly(*matrices):
    return three_products(lambda a, b: a @ b.t(), *((each, each.t()) for each in matrices))


def products(bench, layer):
    """Return the contenders of a layer, each (x, weight, gradient of y), Scaled."""
    plain = [[dequantized(each)["data"].to(bench.dtype) for each in matrices] for matrices in layer]

    def multiply(a, b):
        return fp8.product(*a, *b, bench.dtype)

    def in_fp8():
        pairs = ([((m.data, m.scale), (m.transposed, m.scale)) for m in matrices] for matrices in layer)
        return [three_products(multiply, *matrices) for matrices in pairs]

    def check():
        for found, matrices in zip(in_fp8(), plain, strict=True):
            require(found, plainly(*matrices), plainly(*(each.float() for each in matrices)), TOLERANCE)
        return [in_fp8]

    def in_bf16():
        # Of all digits, as in training: numbers that were rounded to FP8 would take less power.
        for each in sum(plain, []):
            each.normal_()
        return [lambda: [plainly(*matrices) for matrices in plain]]

    return {"fp8": check, "bf16": in_bf16}


def fp8_layer_cases(bench, tokens, hidden, ffn):
    formats = fp8.formats_of(llama.get_gpu(bench.device.type).arch)

    def of_shapes(*shapes):
        return [Matrix((bench.randn(*shape),)) for shape in shapes]

    # x, weight and gradient of y of: the projections to and from attention, SwiGLU's of gate and up, and of its result.
    gate_up, hidden_grad = bench.randn(tokens, 2 * ffn), bench.randn(tokens, ffn)
    inputs = [
        *of_shapes((tokens, hidden), (tokens, hidden), (tokens, hidden)),
        Matrix((gate_up,), fp8.SWIGLU, swiglu),
    ]
    weights = of_shapes((2 * hidden, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn))
    gradients = [
        *of_shapes((tokens, 2 * hidden), (tokens, hidden)),
        Matrix((gate_up, hidden_grad), fp8.SWIGLU_GRADIENT, swiglu_gradient),
        *of_shapes((tokens, hidden)),
    ]
    scaled = []
    for name, dtype, matrices in (
        ("inputs", formats.forward, inputs),
        ("weights", formats.forward, weights),
        ("gradients", formats.gradient, gradients),
    ):
        contenders, moved, found = rounding(bench, dtype, matrices)
        scaled.append(found)
        yield Timed(f"rounding the {name}", "", work.Work(moved, 0), "TB/s", contenders)
    # Three products, of two operations for each pair of a token and a weight.
    flop = sum(3 * 2 * tokens * weight.data.numel() for weight in scaled[1])
    contenders = products(bench, list(zip(*scaled, strict=True)))
    yield Timed("the twelve products", "", work.Work(0, flop), "TFLOP/s", contenders)
