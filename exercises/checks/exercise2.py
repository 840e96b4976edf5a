"""Checks of exercise 2."""

from unittest import mock

import torch
import torch.nn.functional as F

import tiny_llama_v3 as llama
from exercises.checks.common import (
    CAST,
    FP32,
    HALF,
    TOLERANCE,
    counting,
    expect,
    expect_close,
    expect_from,
    randn,
    task,
    tasks_of,
    unchanged,
    unwritten,
)
from exercises.checks.memory import launch
from exercises.solutions import exercise2_swiglu_optimization as solution

SIZES = (1031, 509, 2053, 4), (7, 13, 5, 2)  # rows, inner, cols, itemsize: primes, so that no product is another one


naive_bytes = counting("naive_bytes", solution, "each program loads 3 * inner elements and stores 3", *SIZES)
least_bytes = counting("least_bytes", solution, "x, the two weights, gate, up and hidden, once each", *SIZES)
matmul_flop = counting(
    "matmul_flop",
    solution,
    "two products; each element of each takes inner multiplications and additions",
    *(sizes[:3] for sizes in SIZES),
)


LARGE = "right for small gates: is a large exp divided by another, or by infinity?"


@task(  # n_elements, BLOCK_SIZE, dtype, the size of gate
    (10, 4),  # small enough to be drawn
    (1500, 2048),
    (1500, 512, HALF, 3),
    (77, 64, FP32, 100),
)
def silu_mul_kernel(exercise, n_elements, block_size, dtype=FP32, size=1):
    gate, up = randn(n_elements, dtype=dtype) * size, randn(n_elements, dtype=dtype) * min(size, 3)
    gate[1] = up[2] = 0  # stored like any other
    out = launch(
        exercise.silu_mul_kernel,
        (llama.cdiv(n_elements, block_size),),
        gate,
        up,
        unwritten(n_elements, dtype=dtype),
        n_elements,
        BLOCK_SIZE=block_size,
    )
    hint = "out = silu(gate) * up, computed in fp32" if dtype == FP32 else CAST
    expect_close(out, F.silu(gate.double()) * up.double(), TOLERANCE[dtype], LARGE if size > 3 else hint)


@task(  # shape, BLOCK_SIZE, dtype, the size of gate
    ((5, 60), 128),
    ((3, 500), 2048, HALF),
    ((5, 60), 128, FP32, 100),
)
def silu_mul_backward_kernel(exercise, shape, block_size, dtype=FP32, size=3):
    out_grad, gate, up = (randn(*shape, dtype=dtype) * times for times in (3, size, 3))
    exact = out_grad.double()
    wanted = torch.ops.aten.silu_backward(exact * up, gate.double()), exact * F.silu(gate.double())
    n_elements = gate.numel()
    got = launch(
        exercise.silu_mul_backward_kernel,
        (llama.cdiv(n_elements, block_size),),
        out_grad,
        gate,
        up,
        unwritten(*shape, dtype=dtype),
        unwritten(*shape, dtype=dtype),
        n_elements,
        BLOCK_SIZE=block_size,
    )
    hint = "compare with the derivative in the docstring" if dtype == FP32 else CAST
    for ours, theirs in zip(got, wanted, strict=True):
        expect_close(ours, theirs, TOLERANCE[dtype], LARGE if size > 3 else hint)


def gradient(out, x, out_grad):
    return torch.autograd.grad(out, x, out_grad, retain_graph=True)[0]


@task(  # shape of x, inner, dtype
    ((2, 3, 32), 48),
    ((5, 24), 40),
    ((5, 24), 40, HALF),
    needs=(silu_mul_kernel, silu_mul_backward_kernel),
)
def hybrid_swiglu(exercise, shape, inner, dtype=FP32):
    hidden, tolerance = shape[-1], 50 * TOLERANCE[dtype]
    sizes = dict(x=shape, gate_weight=(inner, hidden), up_weight=(inner, hidden), down_weight=(hidden, inner))
    leaves = {name: (randn(*size) / 2).to(dtype).requires_grad_() for name, size in sizes.items()}
    # The same in fp64, for PyTorch's own operators and autograd.
    exact = x, gate, up, down = [t.detach().double().requires_grad_() for t in leaves.values()]
    applied = mock.patch.object(exercise.SiluMul, "apply", wraps=exercise.SiluMul.apply)
    with applied as used, unchanged(**leaves):
        out = exercise.hybrid_swiglu(*leaves.values())
    wanted = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    expect_close(
        out,
        wanted,
        tolerance,
        "F.linear(hidden, down_weight), with hidden of SiluMul.apply(gate, up), gate and up by F.linear of x",
        f"the output for x of {shape}",
    )
    expect(used.called, "the output is right, but SiluMul.apply was not called", "it launches your kernels")
    cut = "SiluMul.apply is called, so the way is cut by .detach(), .data, torch.tensor() or torch.no_grad()"
    # A sum alone would give every element the same gradient.
    out_grad = randn(*out.shape, dtype=dtype)
    expect(out.requires_grad, "x receives no gradient", cut)
    expect_from(lambda: exercise.hybrid_swiglu(*leaves.values()), exercise, "silu_mul_kernel", out)
    out.backward(out_grad, retain_graph=True)
    wanted.backward(out_grad)
    for name, leaf in leaves.items():
        expect(leaf.grad is not None, f"{name} receives no gradient", cut)
    for (name, leaf), theirs in zip(leaves.items(), exact, strict=True):
        expect_close(leaf.grad, theirs.grad, tolerance, "is anything detached on the way?", f"the gradient of {name}")
    expect_from(lambda: gradient(out, leaves["x"], out_grad), exercise, "silu_mul_backward_kernel", leaves["x"].grad)


CALLS = "loss() was called {} times, expected once at weight + step * direction and once at weight - step * direction"
LOSSES = "both losses are the right ones: (that of the step forth - that of the step back) / (2 * step)"


# The shape of weight, step: large, so that a formula shows; the sign of the slope.
@task((3, 5, 0.5), (4, 1, 0.25, -1))
def slope(exercise, rows, cols, step, sign=1):
    weight = (randn(rows, cols).double() / 3).requires_grad_()
    start, direction, factor = weight.detach().clone(), sign * randn(rows, cols).double(), randn(rows, cols).double()
    called = []

    def loss():
        value = (factor * weight.exp()).sum()
        called.append(value.item())
        return value

    got = exercise.slope(loss, weight, direction, step)
    expect(isinstance(got, float), f"slope returns {str(got)[:100]}", "expected a number, as .item() gives it")
    forth, back = ((factor * (start + way * direction).exp()).sum() for way in (step, -step))
    expect_close(
        torch.tensor([got], dtype=torch.float64, device=weight.device),
        ((forth - back) / (2 * step))[None],
        1e-9,
        LOSSES if called == [forth.item(), back.item()] else CALLS.format(len(called)),
        f"the slope with a step of {step}",
    )
    kept = "clone it before the first step, and copy it back at the end: to subtract what was added rounds"
    expect(torch.equal(weight, start), "weight is another one afterwards", kept)
    expect(weight.grad is None, "weight has a gradient afterwards", "the losses alone tell the slope")
    frozen = "weight.requires_grad is False afterwards"
    expect(weight.requires_grad, frozen, "it would learn no more: with torch.no_grad() writes to it without that")


TASKS = tasks_of(
    naive_bytes, least_bytes, matmul_flop, silu_mul_kernel, silu_mul_backward_kernel, hybrid_swiglu, slope
)  # fmt: skip
COMPILED = {"silu_mul_kernel", "silu_mul_backward_kernel", "hybrid_swiglu"}
