"""Checks of exercise 2."""

from unittest import mock

import torch
import torch.nn.functional as F

import tiny_llama_v3 as llama
from exercises.checks.common import (
    counting,
    expect,
    expect_close,
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


@task(  # n_elements, BLOCK_SIZE, dtype, tolerance
    (10, 4, torch.float32, 1e-5),  # small enough to be drawn
    (1000, 128, torch.float32, 1e-5),
    (1500, 2048, torch.float32, 1e-5),
    (77, 64, torch.float16, 0.55 * 2**-10),
    (77, 64, torch.bfloat16, 1.05 * 2**-7),
)
def silu_mul_kernel(exercise, n_elements, block_size, dtype, tolerance):
    gate, up = randn(n_elements, dtype=dtype), randn(n_elements, dtype=dtype)
    grid = (llama.cdiv(n_elements, block_size),)
    out = launch(
        exercise.silu_mul_kernel,
        grid,
        gate,
        up,
        unwritten(n_elements, dtype=dtype),
        n_elements,
        BLOCK_SIZE=block_size,
    )
    hint = "out = silu(gate) * up, computed in fp32: is .to(tl.float32) behind each load?"
    expect_close(out, F.silu(gate.double()) * up.double(), tolerance, hint)


@task(((5, 60), 128), ((3, 500), 2048))  # shape, BLOCK_SIZE
def silu_mul_backward_kernel(exercise, shape, block_size, dtype=torch.float32):
    out_grad, gate, up = (randn(*shape, dtype=dtype) * 3 for _ in range(3))
    # Autograd derives what the kernel has to compute.
    leaves = [t.double().requires_grad_() for t in (gate, up)]
    wanted = torch.autograd.grad((F.silu(leaves[0]) * leaves[1] * out_grad).sum(), leaves)
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
    for ours, theirs in zip(got, wanted, strict=True):
        expect_close(ours, theirs, 1e-4, "compare with the derivative in the docstring")


@task(((2, 3, 32), 48), ((5, 24), 40), needs=(silu_mul_kernel, silu_mul_backward_kernel))  # shape of x, inner
def hybrid_swiglu(exercise, shape, inner):
    hidden = shape[-1]
    # The same leaves in fp64, for PyTorch's own operators and autograd.
    names = "x", "gate_weight", "up_weight", "down_weight"
    leaves = [randn(*sizes).requires_grad_() for sizes in (shape, (inner, hidden), (inner, hidden), (hidden, inner))]
    exact = x, gate, up, down = [t.detach().double().requires_grad_() for t in leaves]
    applied = mock.patch.object(exercise.SiluMul, "apply", wraps=exercise.SiluMul.apply)
    with applied as used, unchanged(**dict(zip(names, leaves, strict=True))):
        out = exercise.hybrid_swiglu(*leaves)
    wanted = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    expect_close(out, wanted, 1e-3, "down(silu(x gate) * (x up))", f"the output for x of {shape}")
    expect(used.called, "the output is right, but SiluMul.apply was not called", "it launches your kernels")
    cut = "SiluMul.apply is called, so the way is cut by .detach(), .data, torch.tensor() or torch.no_grad()"
    expect(out.requires_grad, "x receives no gradient", cut)
    # A sum alone would give every element the same gradient.
    out_grad = randn(*out.shape)
    (out * out_grad).sum().backward()
    (wanted * out_grad).sum().backward()
    for name, leaf in zip(names, leaves, strict=True):
        expect(leaf.grad is not None, f"{name} receives no gradient", cut)
    for name, leaf, theirs in zip(names, leaves, exact, strict=True):
        expect_close(leaf.grad, theirs.grad, 1e-3, "is anything detached on the way?", f"the gradient of {name}")


TASKS = tasks_of(
    naive_bytes, least_bytes, matmul_flop, silu_mul_kernel, silu_mul_backward_kernel, hybrid_swiglu
)  # fmt: skip
COMPILED = {"silu_mul_kernel", "silu_mul_backward_kernel", "hybrid_swiglu"}
