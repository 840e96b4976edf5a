"""Checks of exercise 2."""

import torch
import torch.nn.functional as F

import tiny_llama_v3 as llama
from exercises.checks.common import (
    counted_launches,
    expect,
    expect_close,
    expect_number,
    expect_passed,
    randn,
    unwritten,
)

ROWS, INNER, COLS, ITEMSIZE = SIZES = 1024, 512, 2048, 4
BYTES = "these are elements: each is itemsize bytes long"


def check_naive_bytes(exercise):
    def of(elements, programs=ROWS * COLS):
        return programs * elements * ITEMSIZE

    wanted = of(3 * INNER + 3)
    mistakes = [
        (wanted // ITEMSIZE, BYTES),
        (of(2 * INNER + 3), "a program loads two rows of weight, that of gate and that of up, beside one of x"),
        (of(2 * INNER + 1), "a program loads two rows of weight beside one of x, and stores three elements"),
        (of(3 * INNER), "a program stores three elements as well: gate, up and hidden"),
        (of(3 * INNER + 1), "a program stores three elements: gate and up, for the backward pass, and hidden"),
        (of(3), "the rows that a program loads are missing"),
        (of(3 * INNER + 3, 1), "these are the bytes of one program, of rows * cols"),
        (of(3 * INNER + 3, 2 * ROWS * COLS), "a program computes gate and up: there are rows * cols programs"),
        (of(3 * COLS + 3), "a row of x and of weight has inner elements"),
    ]
    hint = "each program loads 3 * inner elements and stores 3"
    expect_number(f"naive_bytes{SIZES}", exercise.naive_bytes(*SIZES), wanted, hint, mistakes)


def check_least_bytes(exercise):
    x, weight, gate_up, hidden = ROWS * INNER, 2 * COLS * INNER, 2 * ROWS * COLS, ROWS * COLS
    wanted = (x + weight + gate_up + hidden) * ITEMSIZE
    mistakes = [
        (wanted // ITEMSIZE, BYTES),
        (wanted - weight // 2 * ITEMSIZE, "weight has 2 * cols rows: those of gate and those of up"),
        (wanted - gate_up * ITEMSIZE, "gate_up is stored as well"),
        (wanted - gate_up // 2 * ITEMSIZE, "gate_up has 2 * cols columns"),
        (wanted - hidden * ITEMSIZE, "hidden is stored as well"),
        (wanted - (gate_up + hidden) * ITEMSIZE, "what is stored moves as well: gate_up and hidden"),
        (wanted - x * ITEMSIZE, "x is loaded as well"),
        (
            ROWS * COLS * (3 * INNER + 3) * ITEMSIZE,
            "these are the bytes that the naive kernel asks for, not those that must move",
        ),
    ]
    hint = "x, the two weights, gate, up and hidden, once each"
    expect_number(f"least_bytes{SIZES}", exercise.least_bytes(*SIZES), wanted, hint, mistakes)


def check_matmul_flop(exercise):
    wanted = 2 * 2 * ROWS * COLS * INNER
    mistakes = [
        (wanted // 2, "there are two products, and a multiplication and an addition are two operations"),
        (wanted // 4, "there are two products, and a multiplication and an addition are two operations"),
        (wanted * 3 // 2, "the third product, with down, is not the kernel's"),
        (wanted * ITEMSIZE, "FLOP are no bytes: an element's size has no part in them"),
    ]
    hint = "two products; each element of each takes inner multiplications and additions"
    expect_number(f"matmul_flop{SIZES[:3]}", exercise.matmul_flop(*SIZES[:3]), wanted, hint, mistakes)


def activation_mistakes(gate, up):
    """What might stand in the place of silu(gate) * up, of fp64."""
    yield F.silu(up) * gate, "gate and up are swapped: it is gate that goes through silu"
    yield gate.sigmoid() * up, "this is sigmoid(gate) * up: silu(x) = x * sigmoid(x)"
    yield F.silu(gate), "up is missing"
    yield gate * up, "this is gate * up: the sigmoid is missing"
    yield F.relu(gate) * up, "this is relu(gate) * up"
    yield gate.tanh() * gate * up, "this takes tanh for the sigmoid"
    yield gate / (1 + gate.exp()) * up, "the exponent lacks its minus: sigmoid(x) = 1 / (1 + exp(-x))"
    yield F.silu(gate) * F.silu(up), "silu is for gate alone"
    yield F.silu(gate) + up, "silu(gate) is multiplied with up, not added to it"
    yield F.silu(gate * up), "silu is for gate alone, before it is multiplied with up"


def first_programs_only(wanted, block_size):
    """Results of which only a part is stored, as wrong offsets leave them."""
    unstored = torch.full_like(wanted.flatten(), torch.nan)
    first = "every program works on the first block: tl.program_id(0) * BLOCK_SIZE is missing from the offsets"
    programs = llama.cdiv(wanted.numel(), block_size)
    missing = "a program's block begins at tl.program_id(0) * BLOCK_SIZE: BLOCK_SIZE is missing"
    for stored, words in ((block_size, first), (block_size + programs - 1, missing)):
        partial = unstored.clone()
        partial[:stored] = wanted.flatten()[:stored]
        yield partial.view(wanted.shape), words


def check_silu_mul_kernel(exercise):
    for n_elements, block_size, dtype, tolerance, hint in (
        (256, 64, torch.float32, 1e-5, "out = silu(gate) * up"),
        (1000, 128, torch.float32, 1e-5, "right where the block divides the size: what about the last block?"),
        (77, 64, torch.float16, 0.55 * 2**-10, "right in fp32: is .to(tl.float32) behind each load?"),
        (77, 64, torch.bfloat16, 0.55 * 2**-7, "right in fp32: is .to(tl.float32) behind each load?"),
    ):
        gate, up = randn(n_elements, dtype=dtype), randn(n_elements, dtype=dtype)
        out, behind = unwritten(n_elements, dtype=dtype)
        grid = (llama.cdiv(n_elements, block_size),)
        exercise.silu_mul_kernel[grid](gate, up, out, n_elements, BLOCK_SIZE=block_size)
        exact = gate.double(), up.double()
        wanted = F.silu(exact[0]) * exact[1]
        name = f"out for {n_elements} elements in {str(dtype).removeprefix('torch.')}, BLOCK_SIZE {block_size}"
        mistakes = (*first_programs_only(wanted, block_size), *activation_mistakes(*exact))
        expect_close(name, out, wanted, tolerance, hint, mistakes, behind)


def gradient_mistakes(out_grad, gate, up):
    """Of (gate_grad, up_grad), each a list, in fp64."""
    s = gate.sigmoid()
    slope = s + gate * s * (1 - s)
    of_gate, of_up = out_grad * up * slope, out_grad * gate * s
    swapped = "gate_grad and up_grad are swapped"
    return [
        (of_up, swapped),
        (out_grad * up * s, "this derivative of silu lacks its second term: s + gate * s * (1 - s)"),
        (out_grad * up * gate * s * (1 - s), "this derivative of silu lacks its first term: s + gate * s * (1 - s)"),
        (out_grad * up * s * (1 - s), "this is the derivative of the sigmoid: that of silu is s + gate * s * (1 - s)"),
        (out_grad * up * (s - gate * s * (1 - s)), "the derivative of silu is s + gate * s * (1 - s), with a plus"),
        (out_grad * up * (s + s * (1 - s)), "gate is missing from the derivative's second term: gate * s * (1 - s)"),
        (out_grad * up * gate * s, "this takes silu for its derivative"),
        (out_grad * slope, "up is missing: the gradient of gate is out_grad * up * silu'(gate)"),
        (up * slope, "out_grad is missing"),
    ], [
        (of_gate, swapped),
        (out_grad * s, "sigmoid instead of silu: the gradient of up is out_grad * silu(gate)"),
        (out_grad * gate, "the sigmoid is missing: the gradient of up is out_grad * silu(gate)"),
        (out_grad * slope, "this takes the derivative of silu: the gradient of up is out_grad * silu(gate)"),
        (out_grad * up * s * gate, "the gradient of up has no up in it: it is out_grad * silu(gate)"),
        (gate * s, "out_grad is missing"),
    ]  # fmt: skip


def check_silu_mul_backward_kernel(exercise):
    out_grad, gate, up = (randn(5, 60) * 3 for _ in range(3))
    leaves = [t.double().requires_grad_() for t in (gate, up)]
    wanted = torch.autograd.grad((F.silu(leaves[0]) * leaves[1] * out_grad).sum(), leaves)
    outputs = [unwritten(5, 60) for _ in leaves]
    got = [grad for grad, _ in outputs]
    exercise.silu_mul_backward_kernel[(llama.cdiv(300, 128),)](out_grad, gate, up, *got, 300, BLOCK_SIZE=128)
    usual = gradient_mistakes(*(t.double() for t in (out_grad, gate, up)))
    for name, (ours, behind), theirs, mistakes in zip(("gate_grad", "up_grad"), outputs, wanted, usual, strict=True):
        mistakes = (*first_programs_only(theirs, 128), *mistakes)
        expect_close(name, ours, theirs, 1e-4, "compare with the derivative in the docstring", mistakes, behind)


def swiglu(x, gate, up, down, activation=lambda gate, up: F.silu(gate) * up):
    return F.linear(activation(F.linear(x, gate), F.linear(x, up)), down)


def hybrid_mistakes(x, gate, up, down):
    yield swiglu(x, up, gate, down), "gate_weight and up_weight are swapped"
    yield swiglu(x, gate, gate, down), "gate_weight is used twice, up_weight is not"
    yield swiglu(x, up, up, down), "up_weight is used twice, gate_weight is not"
    yield swiglu(x, gate, up, down, lambda gate, up: gate * up), "the activation is missing"
    yield (
        F.silu(swiglu(x, gate, up, down)),
        "silu(gate) * up comes before the product with down_weight, and nothing after",
    )


def check_hybrid_swiglu(exercise):
    for kernel in (check_silu_mul_kernel, check_silu_mul_backward_kernel):
        expect_passed(kernel, exercise, "not checked before both kernels pass")
    names = "x", "gate_weight", "up_weight", "down_weight"
    leaves = [t.requires_grad_() for t in (randn(2, 3, 32), randn(48, 32), randn(48, 32), randn(32, 48))]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    with counted_launches(exercise.silu_mul_kernel) as forward:
        out = exercise.hybrid_swiglu(*leaves)
    wanted = swiglu(*exact)
    expect_close("the output", out, wanted, 1e-3, "down(silu(x gate) * (x up))", hybrid_mistakes(*exact))
    hint = "SiluMul.apply(gate, up) launches it, where F.silu(gate) * up is PyTorch's"
    expect(forward[0] > 0, f"the output is right, but silu_mul_kernel was not launched: {hint}")
    out_grad = randn(*out.shape)
    unreached = "receives no gradient: go through SiluMul.apply, not through the kernel or SiluMul.forward"
    expect(out.requires_grad, f"x {unreached}")
    with counted_launches(exercise.silu_mul_backward_kernel) as backward:
        (out * out_grad).sum().backward()
    (wanted * out_grad).sum().backward()
    for name, leaf in zip(names, leaves, strict=True):
        expect(leaf.grad is not None, f"{name} {unreached}")
    for name, leaf, theirs in zip(names, leaves, exact, strict=True):
        expect_close(f"the gradient of {name}", leaf.grad, theirs.grad, 1e-3, "is anything detached on the way?")
    expect(backward[0] > 0, f"the gradients are right, but silu_mul_backward_kernel was not launched: {hint}")


TASKS = {
    "naive_bytes": check_naive_bytes,
    "least_bytes": check_least_bytes,
    "matmul_flop": check_matmul_flop,
    "silu_mul_kernel": check_silu_mul_kernel,
    "silu_mul_backward_kernel": check_silu_mul_backward_kernel,
    "hybrid_swiglu": check_hybrid_swiglu,
}

COMPILED = {"silu_mul_kernel", "silu_mul_backward_kernel", "hybrid_swiglu"}
