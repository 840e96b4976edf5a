"""Causal attention of a packed projection, by the kernels of tiny_llama_v3.py, as operators of PyTorch.

The gradients of queries, keys and values are written side by side, as the projection's backward pass reads them: with
PyTorch's attention they are three tensors, which a copy puts together.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import tiny_llama_v3 as llama
from nanogpt_triton.kernels.operators import no_second_derivative, obstacle, say_why

# Opaque to torch.compile: the launchers take addresses, and on a Hopper choose other kernels.


@torch.library.custom_op("nanogpt_triton::attention", mutates_args=())
def attention_operator(qkv: Tensor, n_head: int) -> tuple[Tensor, Tensor]:
    """qkv (B, T, 3C), each token's queries, keys and values -> o (B, T, C) and lse (B, n_head, T) in fp32."""
    with torch.cuda.device_of(qkv):
        o, lse = llama.flash_attention_forward(*llama.split_heads(qkv, n_head, n_head))
    return o.flatten(2), lse


@torch.library.custom_op("nanogpt_triton::attention_backward", mutates_args=())
def attention_backward_operator(o_grad: Tensor, qkv: Tensor, o: Tensor, lse: Tensor) -> Tensor:
    """o_grad (B, T, C), and what forward had and returned -> qkv_grad (B, T, 3C)"""
    n_head = lse.shape[1]
    qkv_grad = qkv.new_empty(qkv.shape)
    q, k, v = llama.split_heads(qkv, n_head, n_head)
    with torch.cuda.device_of(qkv):
        saved = q, k, v, o.view(q.shape), lse
        llama.flash_attention_backward(o_grad.reshape(q.shape), saved, llama.split_heads(qkv_grad, n_head, n_head))
    return qkv_grad


@attention_operator.register_fake
def _(qkv, n_head):
    B, T, width = qkv.shape
    return qkv.new_empty(B, T, width // 3), qkv.new_empty(B, n_head, T, dtype=torch.float32)


def setup_context(ctx, inputs, output):
    """Keep in ctx what qkv_gradient() needs."""
    o, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(inputs[0], o, lse)


def qkv_gradient(ctx, o_grad, _):
    """Return the gradients of qkv and n_head."""
    return attention_backward_operator(o_grad, *ctx.saved_tensors), None


attention_operator.register_autograd(qkv_gradient, setup_context=setup_context)
attention_backward_operator.register_fake(lambda o_grad, qkv, o, lse: qkv.new_empty(qkv.shape))
attention_backward_operator.register_autograd(no_second_derivative("attention", "F.scaled_dot_product_attention"))


def torch_attention(qkv, n_head, dropout=0.0):
    """Return what triton_attention() does by F.scaled_dot_product_attention, which may drop a share of the weights."""
    # Heads are views of qkv, (B, n_head, T, C / n_head).
    q, k, v = (part.unflatten(2, (n_head, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
    o = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
    return o.transpose(1, 2).flatten(2)


def triton_attention(qkv, n_head):
    """Causal attention of qkv (B, T, 3C) with n_head heads each of queries, keys and values -> (B, T, C).

    What the kernels cannot take goes to torch_attention(). They are compiled for the strides of qkv, so for each T.
    """
    reason = obstacle(qkv) or shape_obstacle(*qkv.shape, n_head)
    if reason:
        say_why("attention", reason)
        return torch_attention(qkv, n_head)
    return attention_operator(qkv, n_head)[0]


def shape_obstacle(batch, seq_len, width, n_head):
    """Return in words why the kernels cannot take heads of this shape, or None if they can."""
    head_dim, rest = divmod(width, 3 * n_head)
    if rest:
        return f"{width} columns are not those of 3 x {n_head} heads"
    if head_dim % 2 or head_dim > 128:
        return f"heads have {head_dim} dimensions, and the kernels take even numbers up to 128"
    if batch * seq_len == 0 or seq_len * width > llama.LARGEST:
        return "sequences are empty, or longer than the kernels count"
    return None
