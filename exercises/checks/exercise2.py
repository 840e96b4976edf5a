"""Checks of exercise 2."""

import torch
import torch.nn.functional as F

import tiny_llama_v3 as llama
from exercises.checks.common import (
    expect,
    expect_close,
    expect_number,
    expect_passed,
    expect_untouched,
    randn,
    unwritten,
)

ROWS, INNER, COLS, ITEMSIZE = SIZES = 1024, 512, 2048, 4


def check_naive_bytes(exercise):
    wanted = ROWS * COLS * 3 * (INNER + 1) * ITEMSIZE
    hint = "each program loads 3 * inner elements and stores 3"
    expect_number(f"naive_bytes{SIZES}", exercise.naive_bytes(*SIZES), wanted, hint)


def check_least_bytes(exercise):
    elements = ROWS * INNER, 2 * COLS * INNER, 2 * ROWS * COLS, ROWS * COLS
    hint = "x, the two weights, gate, up and hidden, once each"
    expect_number(f"least_bytes{SIZES}", exercise.least_bytes(*SIZES), sum(elements) * ITEMSIZE, hint)


def check_matmul_flop(exercise):
    wanted = 2 * 2 * ROWS * COLS * INNER
    hint = "two products; each element of each takes inner multiplications and additions"
    expect_number(f"matmul_flop{SIZES[:3]}", exercise.matmul_flop(*SIZES[:3]), wanted, hint)


def check_silu_mul_kernel(exercise):
    for n_elements, block_size, dtype in (
        (256, 64, torch.float32),
        (1000, 128, torch.float32),
        (77, 64, torch.float16),
    ):
        gate, up = randn(n_elements, dtype=dtype), randn(n_elements, dtype=dtype)
        out, behind = unwritten(n_elements, dtype=dtype)
        grid = (llama.cdiv(n_elements, block_size),)
        exercise.silu_mul_kernel[grid](gate, up, out, n_elements, BLOCK_SIZE=block_size)
        wanted = F.silu(gate.double()) * up.double()
        case = f"out for {n_elements} elements, BLOCK_SIZE {block_size}"
        expect_untouched(case, behind)
        expect_close(case, out, wanted, 1e-5 if dtype == torch.float32 else 2e-3, "silu(gate) * up")


def check_silu_mul_backward_kernel(exercise):
    gate, up, out_grad = (randn(5, 60) * 3 for _ in range(3))
    leaves = [t.double().requires_grad_() for t in (gate, up)]
    wanted = torch.autograd.grad(F.silu(leaves[0]) * leaves[1], leaves, out_grad.double())
    outputs = [unwritten(5, 60) for _ in leaves]
    got = [grad for grad, _ in outputs]
    exercise.silu_mul_backward_kernel[(llama.cdiv(300, 128),)](out_grad, gate, up, *got, 300, BLOCK_SIZE=128)
    for name, (ours, behind), theirs in zip(("gate_grad", "up_grad"), outputs, wanted, strict=True):
        expect_untouched(name, behind)
        expect_close(name, ours, theirs, 1e-4, "compare with the derivative in the docstring")


def check_hybrid_swiglu(exercise):
    for kernel in (check_silu_mul_kernel, check_silu_mul_backward_kernel):
        expect_passed(kernel, exercise, "not checked before both kernels pass")
    x, gate, up, down = randn(2, 3, 32), randn(48, 32), randn(48, 32), randn(32, 48)
    leaves = [t.clone().requires_grad_() for t in (x, gate, up, down)]
    out = exercise.hybrid_swiglu(*leaves)
    wanted = llama.torch_swiglu(x.double(), torch.cat((gate, up)).double(), down.double())
    expect_close("the output", out, wanted, 1e-3, "down(silu(x gate) * (x up))")
    out.sum().backward()
    for name, leaf in zip(("x", "gate_weight", "up_weight", "down_weight"), leaves, strict=True):
        expect(leaf.grad is not None and bool(leaf.grad.any()),
               f"{name} receives no gradient: go through SiluMul.apply, not through the kernel itself")  # fmt: skip


TASKS = {
    "naive_bytes": check_naive_bytes,
    "least_bytes": check_least_bytes,
    "matmul_flop": check_matmul_flop,
    "silu_mul_kernel": check_silu_mul_kernel,
    "silu_mul_backward_kernel": check_silu_mul_backward_kernel,
    "hybrid_swiglu": check_hybrid_swiglu,
}
