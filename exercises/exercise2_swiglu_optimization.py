"""Exercise 2: from one program an output element to the library's product and a kernel for the rest.

Check with: python exercises/check.py exercise2
"""
# ruff: noqa: F401, F841 (the blanks will use what nothing uses yet)

import torch
import torch.nn.functional as F
import triton
import triton.language as tl


def naive_bytes(rows, inner, cols, itemsize):
    """Bytes that swiglu_kernel of tiny_llama_v3.py loads and stores.

    Each of its rows * cols programs loads a row of x (rows, inner) and two of weight (2 cols, inner), and stores three
    elements.
    """
    raise NotImplementedError("FILL ME IN (1 line)")


def least_bytes(rows, inner, cols, itemsize):
    """Bytes that must move if every element of x, weight, gate_up (rows, 2 cols) and hidden (rows, cols) moves once."""
    raise NotImplementedError("FILL ME IN (1 line)")


def matmul_flop(rows, inner, cols):
    """FLOP of the two matrix products. An addition and a multiplication count as two."""
    raise NotImplementedError("FILL ME IN (1 line)")


@triton.jit
def silu_mul_kernel(gate_ptr, up_ptr, out_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    """out = silu(gate) * up, computed in fp32; silu(x) = x * sigmoid(x)."""
    # FILL ME IN (5 lines): offsets, mask, two loads, one store.


@triton.jit
def silu_mul_backward_kernel(
    out_grad_ptr, gate_ptr, up_ptr, gate_grad_ptr, up_grad_ptr, n_elements, BLOCK_SIZE: tl.constexpr
):
    """The gradients of gate and up. With s = sigmoid(gate), the derivative of silu is s + gate * s * (1 - s)."""
    # FILL ME IN (8 lines).


class SiluMul(torch.autograd.Function):
    """The two kernels as one differentiable operation of contiguous gate and up."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        silu_mul_kernel[(triton.cdiv(gate.numel(), 1024),)](gate, up, out, gate.numel(), BLOCK_SIZE=1024)
        return out

    @staticmethod
    def backward(ctx, out_grad):
        gate, up = ctx.saved_tensors
        gate_grad, up_grad = torch.empty_like(gate), torch.empty_like(up)
        silu_mul_backward_kernel[(triton.cdiv(gate.numel(), 1024),)](
            out_grad.contiguous(), gate, up, gate_grad, up_grad, gate.numel(), BLOCK_SIZE=1024
        )
        return gate_grad, up_grad


def hybrid_swiglu(x, gate_weight, up_weight, down_weight):
    """The feed-forward layer: the library multiplies the matrices (F.linear), SiluMul does the rest."""
    raise NotImplementedError("FILL ME IN (1 to 3 lines)")


def slope(loss, weight, direction, step):
    """How fast loss() changes while weight, an fp64 parameter, moves along direction: a number.

    It is the difference of the losses at a step forth and a step back, divided by the way between them. Afterwards
    weight is what it was, to the bit, and has no gradient.
    """
    raise NotImplementedError("FILL ME IN (7 lines)")
