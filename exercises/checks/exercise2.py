"""Checks of exercise 2."""

from unittest import mock

import torch
import torch.nn.functional as F

import tiny_llama_v3 as llama
from exercises.checks.common import (
    expect,
    expect_close,
    expect_number,
    expect_passed,
    randn,
    recorded_launches,
    unchanged,
    unwritten,
)  # fmt: skip
from exercises.checks.memory import launch

SIZES = (1031, 509, 2053, 4), (7, 13, 5, 2)  # rows, inner, cols, itemsize: primes, so that no product is another one
BYTES = "these are elements: each is itemsize bytes long"
FIXED = "an element has itemsize bytes, not always 4"


def check_naive_bytes(exercise):
    for rows, inner, cols, itemsize in SIZES:
        programs = rows * cols

        def of(elements, programs=programs, itemsize=itemsize):
            return programs * elements * itemsize

        wanted = of(3 * inner + 3)
        mistakes = [
            (wanted // itemsize, BYTES),
            (wanted // itemsize * 4, FIXED),
            (of(2 * inner + 3), "a program loads two rows of weight, that of gate and that of up, beside one of x"),
            (of(3 * inner), "a program stores three elements as well: gate, up and hidden"),
            (of(3 * inner + 1), "a program stores three elements: gate and up, for the backward pass, and hidden"),
            (of(3), "the rows that a program loads are missing"),
            (of(3 * inner + 3, 1), "these are the bytes of one program, of rows * cols"),
            (of(3 * inner + 3, 2 * programs), "a program computes gate and up: there are rows * cols programs"),
            (of(3 * cols + 3), "a row of x and of weight has inner elements"),
            (of(3 * cols + 3, rows * inner), "inner and cols are exchanged: a row has inner elements"),
        ]
        hint = "each program loads 3 * inner elements and stores 3"
        expect_number(f"naive_bytes{rows, inner, cols, itemsize}", exercise.naive_bytes(rows, inner, cols, itemsize),
                      wanted, hint, mistakes)  # fmt: skip


def check_least_bytes(exercise):
    for rows, inner, cols, itemsize in SIZES:
        x, weight, hidden = (elements * itemsize for elements in (rows * inner, 2 * cols * inner, rows * cols))
        wanted = x + weight + 3 * hidden
        mistakes = [
            (wanted // itemsize, BYTES),
            (wanted // itemsize * 4, FIXED),
            (wanted - weight // 2, "weight has 2 * cols rows: those of gate and those of up"),
            *((wanted - weight + i * hidden, "weight has 2 * cols rows of inner elements") for i in (1, 2)),
            (wanted - weight, "the weight is loaded as well"),
            (wanted - 2 * hidden, "gate_up is stored as well"),
            (wanted - hidden, "gate_up has 2 * cols columns, and hidden is stored as well"),
            (wanted - 3 * hidden, "what is stored moves as well: gate_up and hidden"),
            (wanted - x, "x is loaded as well"),
            (wanted + x, "x is loaded once, for gate and up together"),
            (rows * cols * (3 * inner + 3) * itemsize,
             "these are the bytes that the naive kernel asks for, not those that must move"),
        ]  # fmt: skip
        hint = "x, the two weights, gate, up and hidden, once each"
        expect_number(f"least_bytes{rows, inner, cols, itemsize}", exercise.least_bytes(rows, inner, cols, itemsize),
                      wanted, hint, mistakes)  # fmt: skip


def check_matmul_flop(exercise):
    for rows, inner, cols, itemsize in SIZES:
        wanted = 2 * 2 * rows * cols * inner
        mistakes = [
            *((wanted // i, "there are two products, and a multiplication and an addition are two operations")
              for i in (2, 4)),
            (wanted * 3 // 2, "the third product, with down, is not the kernel's"),
            (wanted * inner, "inner counts twice: each element takes inner multiplications and additions"),
            (wanted * itemsize, "FLOP are no bytes: an element's size has no part in them"),
        ]  # fmt: skip
        hint = "two products; each element of each takes inner multiplications and additions"
        name = f"matmul_flop{rows, inner, cols}"
        expect_number(name, exercise.matmul_flop(rows, inner, cols), wanted, hint, mistakes)


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
    yield F.silu(gate) * gate, "gate is loaded twice: up is missing"
    yield F.silu(up) * up, "up is loaded twice: gate is missing"
    yield gate * up.sigmoid() * up, "gate and up are swapped: it is gate that goes through silu"
    yield F.silu(gate * up), "silu is for gate alone, before it is multiplied with up"


def explain(fault):
    """What silu_mul_kernel and its backward kernel touch outside of their tensors."""
    if fault.element == fault.size and len(fault.lanes[0]) == 1:
        return f"one too many; the last element is {fault.size - 1}, so is it < or <=?"
    how = "tl.load" if fault.verb == "reads" else "tl.store"
    return f"leave out what lies beyond the end: {how}(..., mask=mask)"


def check_silu_mul_kernel(exercise):
    for n_elements, block_size, dtype, tolerance, hint in (
        (256, 64, torch.float32, 1e-5, "out = silu(gate) * up"),
        (1000, 128, torch.float32, 1e-5, "right where the block divides the size: what about the last block?"),
        (1500, 2048, torch.float32, 1e-5, "a block has BLOCK_SIZE elements, whatever that is"),
        (77, 64, torch.float16, 0.55 * 2**-10, "right in fp32: is .to(tl.float32) behind each load?"),
        (77, 64, torch.bfloat16, 1.05 * 2**-7, "right in fp32: is .to(tl.float32) behind each load?"),
    ):
        gate, up = randn(n_elements, dtype=dtype), randn(n_elements, dtype=dtype)
        out, behind = unwritten(n_elements, dtype=dtype)
        grid = (llama.cdiv(n_elements, block_size),)
        launch(exercise.silu_mul_kernel, grid, gate, up, out, n_elements, BLOCK_SIZE=block_size, explain=explain)
        exact = gate.double(), up.double()
        name = f"out for {n_elements} elements in {str(dtype).removeprefix('torch.')}, BLOCK_SIZE {block_size}"
        expect_close(name, out, F.silu(exact[0]) * exact[1], tolerance, hint, activation_mistakes(*exact), behind)


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
        (out_grad * up * (s + gate * (1 - s)), "s is missing from the derivative's second term: gate * s * (1 - s)"),
        (out_grad * slope, "up is missing: the gradient of gate is out_grad * up * silu'(gate)"),
        (up * slope, "out_grad is missing"),
        (out_grad * up * (s + gate * s * (1 + s)), "the derivative of silu is s + gate * s * (1 - s), not (1 + s)"),
        (out_grad * up * (s + gate * s) * (1 - s), "s is added, not multiplied with (1 - s): s + gate * s * (1 - s)"),
        (out_grad * up * (up.sigmoid() * (1 + gate * (1 - up.sigmoid()))), "s is sigmoid(gate), not sigmoid(up)"),
    ], [
        (of_gate, swapped),
        (out_grad * s, "sigmoid instead of silu: the gradient of up is out_grad * silu(gate)"),
        (out_grad * gate, "the sigmoid is missing: the gradient of up is out_grad * silu(gate)"),
        (out_grad * slope, "this takes the derivative of silu: the gradient of up is out_grad * silu(gate)"),
        (out_grad * up * s * gate, "the gradient of up has no up in it: it is out_grad * silu(gate)"),
        (gate * s, "out_grad is missing"),
    ]  # fmt: skip


def check_silu_mul_backward_kernel(exercise):
    for shape, block_size in (((5, 60), 128), ((3, 500), 2048)):
        out_grad, gate, up = (randn(*shape) * 3 for _ in range(3))
        leaves = [t.double().requires_grad_() for t in (gate, up)]
        wanted = torch.autograd.grad((F.silu(leaves[0]) * leaves[1] * out_grad).sum(), leaves)
        outputs = [unwritten(*shape) for _ in leaves]
        n_elements = gate.numel()
        launch(exercise.silu_mul_backward_kernel, (llama.cdiv(n_elements, block_size),), out_grad, gate, up,
               *(grad for grad, _ in outputs), n_elements, BLOCK_SIZE=block_size, explain=explain)  # fmt: skip
        usual = gradient_mistakes(*(t.double() for t in (out_grad, gate, up)))
        names = "gate_grad", "up_grad"
        for name, (ours, behind), theirs, mistakes in zip(names, outputs, wanted, usual, strict=True):
            expect_close(name, ours, theirs, 1e-4, "compare with the derivative in the docstring", mistakes, behind)


def swiglu(x, gate, up, down, activation=lambda gate, up: F.silu(gate) * up):
    return F.linear(activation(F.linear(x, gate), F.linear(x, up)), down)


def hybrid_mistakes(x, gate, up, down):
    yield swiglu(x, up, gate, down), "gate_weight and up_weight are swapped"
    yield swiglu(x, gate, gate, down), "gate_weight is used twice, up_weight is not"
    yield swiglu(x, up, up, down), "up_weight is used twice, gate_weight is not"
    yield swiglu(x, gate, up, down, lambda gate, up: gate * up), "the activation is missing"
    yield x + swiglu(x, gate, up, down), "x is added to it: the layer returns the product with down_weight alone"
    twice = swiglu(x, gate, up, down, lambda gate, up: F.silu(F.silu(gate)) * up)
    yield twice, "gate goes through silu twice: SiluMul does it"
    yield F.silu(swiglu(x, gate, up, down)), "silu comes before the product with down_weight, and nothing behind it"


def check_hybrid_swiglu(exercise):
    for kernel in (check_silu_mul_kernel, check_silu_mul_backward_kernel):
        expect_passed(kernel, exercise, "not checked before both kernels pass")
    for shape, inner in (((2, 3, 32), 48), ((5, 24), 40)):
        check_hybrid_of(exercise, shape, inner)


def check_hybrid_of(exercise, shape, inner):
    hidden = shape[-1]
    names = "x", "gate_weight", "up_weight", "down_weight"
    leaves = [randn(*sizes).requires_grad_() for sizes in (shape, (inner, hidden), (inner, hidden), (hidden, inner))]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    applied = mock.patch.object(exercise.SiluMul, "apply", wraps=exercise.SiluMul.apply)
    with recorded_launches(exercise.silu_mul_kernel) as forward, applied as apply, \
         unchanged(**dict(zip(names, leaves, strict=True))):  # fmt: skip
        out = exercise.hybrid_swiglu(*leaves)
    for call in forward:
        strides = [tensor.stride() for tensor in call.args if torch.is_tensor(tensor) and not tensor.is_contiguous()]
        expect(not strides, f"a tensor of strides {[*strides, ()][0]} reaches silu_mul_kernel, which takes contiguous "
               "ones: .chunk(2, dim=-1) and slices are views of a wider matrix. Add .contiguous() behind them, or take "
               "two products")  # fmt: skip
    wanted = swiglu(*exact)
    name = f"the output for x of {shape}"
    expect_close(name, out, wanted, 1e-3, "down(silu(x gate) * (x up))", hybrid_mistakes(*exact))
    hint = "SiluMul.apply(gate, up) launches it, where F.silu(gate) * up is PyTorch's"
    expect(forward, f"the output is right, but silu_mul_kernel was not launched: {hint}")
    unreached = "receives no gradient: " + (
        "SiluMul.apply is called, so the way is cut by .detach(), .data, torch.tensor() or torch.no_grad()"
        if apply.called else "go through SiluMul.apply, not through the kernel or SiluMul.forward"
    )  # fmt: skip
    expect(out.requires_grad, f"x {unreached}")
    out_grad = randn(*out.shape)
    with recorded_launches(exercise.silu_mul_backward_kernel) as backward:
        (out * out_grad).sum().backward()
    (wanted * out_grad).sum().backward()
    for name, leaf in zip(names, leaves, strict=True):
        expect(leaf.grad is not None, f"{name} {unreached}")
    for name, leaf, theirs in zip(names, leaves, exact, strict=True):
        expect_close(f"the gradient of {name}", leaf.grad, theirs.grad, 1e-3, "is anything detached on the way?")
    expect(backward, f"the gradients are right, but silu_mul_backward_kernel was not launched: {hint}")


def show_silu_mul_kernel(exercise):
    launch(exercise.silu_mul_kernel, (3,), randn(10), randn(10), unwritten(10)[0], 10, BLOCK_SIZE=4)


SHOWN = {"silu_mul_kernel": show_silu_mul_kernel}  # small enough to be drawn
CHECKS = (
    check_naive_bytes, check_least_bytes, check_matmul_flop, check_silu_mul_kernel, check_silu_mul_backward_kernel,
    check_hybrid_swiglu,
)  # fmt: skip
TASKS = {check.__name__.removeprefix("check_"): check for check in CHECKS}
COMPILED = {"silu_mul_kernel", "silu_mul_backward_kernel", "hybrid_swiglu"}
