"""GELU as Triton kernels, forward and backward: x * Phi(x), where Phi is the normal distribution's integral.

Arithmetic is in fp32; results are rounded once, on the store. The backward pass computes Phi again from x.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanogpt_triton.kernels.operators import (
    launch,
    make_operator,
    no_second_derivative,
    obstacle,
    say_why,
    wrap_triton,
)
from tiny_llama_v3 import LOG2_E, cdiv, get_gpu, jit, load, store, tl

BLOCK = 1024  # elements of a program
PER_THREAD, BACKWARD_PER_THREAD = 16, 8  # of them; in bf16 a load has 8. Measured on an H200

# ----------------------------------------------------------------------------------------------------------------------
# Kernels


@jit
def normal_integral(x):
    """Return Phi(x) = (1 + erf(x / sqrt(2))) / 2, and exp(-x^2 / 2), which is in it and in the derivative.

    Hastings' approximation, 7.1.26 in Abramowitz and Stegun's Handbook of Mathematical Functions, with the factor 1/2
    in its coefficients: Phi(-|x|) is a polynomial in t, times the exponential. The error of Phi is at most 7e-8, about
    that of rounding to fp32. With erf() of the GPU's library the kernels have 1.4 times as many instructions, more than
    the memory leaves time for; and 1 + erf(x) cancels for negative x, where this keeps its digits.
    """
    t = 1.0 / (1.0 + 0.23164189 * tl.abs(x))  # 0.3275911 / sqrt(2)
    exponential = tl.exp2(x * x * (-0.5 * LOG2_E))
    tail = 0.5307027145 * t - 0.7265760135
    tail = tail * t + 0.7107068705
    tail = tail * t - 0.142248368
    tail = tail * t + 0.127414796
    tail = tail * t * exponential
    return tl.where(x > 0.0, 1.0 - tail, tail), exponential


@jit
def gelu_kernel(
    x_ptr,  # (n_elements,)
    y_ptr,  # out: (n_elements,)
    n_elements,
    BLOCK_SIZE: tl.constexpr,
):
    """y = x * Phi(x).  All tiles are (BLOCK_SIZE,).  Grid: (blocks of elements,)."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = load(x_ptr + offsets, mask)
    integral, _ = normal_integral(x)
    store(y_ptr + offsets, x * integral, mask)


@jit
def gelu_backward_kernel(
    y_grad_ptr,  # (n_elements,)
    x_ptr,  # (n_elements,)
    x_grad_ptr,  # out: (n_elements,)
    n_elements,
    BLOCK_SIZE: tl.constexpr,
):
    """x_grad = y_grad * (Phi(x) + x * density(x)),  density(x) = exp(-x^2 / 2) / sqrt(2 pi).  Grid: as forward."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x, y_grad = load(x_ptr + offsets, mask), load(y_grad_ptr + offsets, mask)
    integral, exponential = normal_integral(x)
    store(x_grad_ptr + offsets, y_grad * (integral + x * exponential * 0.3989422804), mask)


# ----------------------------------------------------------------------------------------------------------------------
# Operators


def launch_elementwise(kernel, tensors, per_thread):
    """Launch a kernel on contiguous tensors with as many elements each."""
    n_elements, threads = tensors[0].numel(), BLOCK // per_thread
    warps = threads // get_gpu(tensors[0].device.type).warp_size
    launch(kernel, (cdiv(n_elements, BLOCK),), tensors, (n_elements,), dict(BLOCK_SIZE=BLOCK), num_warps=warps)


def like(x, *_):
    """Allocate a result of an operator: contiguous, in the shape and type of x."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@make_operator("nanogpt_triton::gelu", mutates_args=())
def gelu_operator(x: Tensor) -> Tensor:
    """x (...) -> y (...)"""
    y = like(x)
    launch_elementwise(wrap_triton(gelu_kernel), (x.contiguous(), y), PER_THREAD)
    return y


@make_operator("nanogpt_triton::gelu_backward", mutates_args=())
def gelu_backward_operator(y_grad: Tensor, x: Tensor) -> Tensor:
    """y_grad, x (...) -> x_grad (...)"""
    x_grad = like(x)
    tensors = y_grad.contiguous(), x.contiguous(), x_grad
    launch_elementwise(wrap_triton(gelu_backward_kernel), tensors, BACKWARD_PER_THREAD)
    return x_grad


gelu_operator.register_fake(like)
gelu_operator.register_autograd(
    lambda ctx, y_grad: gelu_backward_operator(y_grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
gelu_backward_operator.register_fake(lambda y_grad, x: like(x))
gelu_backward_operator.register_autograd(no_second_derivative("GELU", "F.gelu"))


def triton_gelu(x):
    """GELU of x (...), as F.gelu without an approximation; what the kernels cannot take goes to F.gelu."""
    reason = obstacle(x) or ("there are no elements" if x.numel() == 0 else None)
    if reason:
        say_why("GELU", reason)
        return F.gelu(x)
    return gelu_operator(x)
