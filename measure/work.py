"""Bytes and operations of each kernel, counted once, and the sizes of the models that are measured.

A kernel's function takes the tensors that it reads and writes (anything with nbytes and numel(), on any device) and
returns its Work. Bytes are those that must move at least: each tensor once, twice where it is updated in place, however
often the kernel reads it again from a cache. Operations are those of the kernel's source in fp32 arithmetic: an
addition, multiplication, division, maximum, exponential or root is one each, a sigmoid three (exponential, addition,
division), a product of matrices two for each pair that is multiplied. What happens once a row is left out.

The operations of a whole step are those of its matrix products: tiny_llama.hardware.model_tflops.
"""

import functools
from typing import NamedTuple

SIZES = {  # of tiny_llama_v3.Config
    "small": dict(batch_size=8, seq_len=128, hidden_dim=512, num_layers=8, num_heads=8),
    "medium": dict(batch_size=16, seq_len=512, hidden_dim=1024, num_layers=12, num_heads=16),
    "large": dict(batch_size=4, seq_len=2048, hidden_dim=2048, num_layers=16, num_heads=32),
    "large-128": dict(batch_size=4, seq_len=2048, hidden_dim=2048, num_layers=16, num_heads=16, num_kv_heads=4),
    "tiny": dict(batch_size=2, seq_len=8, hidden_dim=32, num_layers=2, num_heads=4, vocab_size=32),
}


def shape(hidden, layers, heads, kv_heads, ffn, vocab, seq_len=1024, **others):
    """Return the sizes of a model that sees 8 sequences a step, of tiny_llama_v3.Config."""
    return dict(
        batch_size=8,
        seq_len=seq_len,
        hidden_dim=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_dim=ffn,
        vocab_size=vocab,
        **others,
    )


# Of models that people train, and what kernels like least: heads that fill no tile, and sizes that are no multiples of
# 8. The time of a step does not depend on rope_theta and norm_eps, which are ours.
SHAPES = {
    "SmolLM-135M": shape(576, 30, 9, 3, 1536, 49152),
    "SmolLM-360M": shape(960, 32, 15, 5, 2560, 49152),
    "Qwen2.5-0.5B": shape(896, 24, 14, 2, 4864, 151936),  # whose biases ours does not have
    "TinyLlama-1.1B": shape(2048, 22, 32, 4, 5632, 32000, untied_head=True),
    "Llama-3.2-1B": shape(2048, 16, 32, 8, 8192, 128256),
    "GPT-2 as a LLaMA": shape(768, 12, 12, 12, 3072, 50257),
    "heads of 80": shape(1280, 8, 16, 8, 3456, 32000),
    "heads of 96": shape(768, 12, 8, 4, 2048, 32001),
    "1,023 tokens": shape(768, 12, 12, 4, 2048, 32000, seq_len=1023),
    "ffn 1,365": shape(512, 8, 8, 4, 1365, 32000),
}

# {what grows, or "shapes": {size: of tiny_llama_v3.Config}}. With four layers and one sequence, plain PyTorch's score
# matrices of 8,192 tokens fit into 64 GB, so that the rows can be checked against it.
SWEEPS = {
    "length": {
        f"{seq_len:,} tokens": SIZES["medium"] | dict(num_layers=4, batch_size=8192 // seq_len, seq_len=seq_len)
        for seq_len in (128, 512, 2048, 8192)
    },
    "width": {
        f"hidden {hidden:,}": SIZES["small"] | dict(seq_len=512, hidden_dim=hidden, num_heads=hidden // 64)
        for hidden in (256, 512, 1024, 2048)
    },
    "vocab": {f"vocab {n:,}": SIZES["large"] | dict(num_layers=4, vocab_size=n) for n in (1000, 32000, 128256)},
    "shapes": SHAPES,
    "micro-batches": {f"{n} to a step": SIZES["large"] | dict(accumulate=n) for n in (1, 4, 16)},
}


class Work(NamedTuple):
    bytes: float
    flop: float


def moved(*tensors):
    """Bytes of the tensors that there are: None counts nothing."""
    return sum(t.nbytes for t in tensors if t is not None)


# ----------------------------------------------------------------------------------------------------------------------
# Normalisation. x has shape (rows, cols); without an addition there is no branch, and no residual is written.


def rmsnorm(x, weight, y, rstd, branch=None, residual=None):
    added = branch is not None
    # The square and its sum, two products with rstd and weight; the addition.
    return Work(moved(x, branch, residual, weight, y, rstd), (4 + added) * x.numel())


def rmsnorm_backward(y_grad, x, weight, rstd, x_grad, residual_grad=None, partial=None):
    # x * rstd; its product with y_grad, added to the weight's; y_grad * weight; its product with x * rstd, and the sum;
    # the mean's product, a subtraction and a product with rstd; the addition of the residual's gradient.
    flop = (9 + (residual_grad is not None)) * x.numel()
    return Work(moved(y_grad, residual_grad, x, weight, rstd, x_grad, partial), flop)


def column_sum(partial, total):
    return Work(moved(partial, total), partial.numel())


def layer_norm(x, weight, y, mean, rstd, bias=None, branch=None, residual=None):
    # The sum; x - mean; its square and their sum; the products with rstd and weight; two additions that may be missing.
    flop = (6 + (bias is not None) + (branch is not None)) * x.numel()
    return Work(moved(x, branch, residual, weight, bias, y, mean, rstd), flop)


def layer_norm_backward(
    y_grad, x, weight, mean, rstd, x_grad, residual_grad=None, branch_grad=None, partial=None, bias=True, twice=False
):
    # (x - mean) * rstd; y_grad * weight and its sum; their product and its sum; y_grad's product and its sum for the
    # weight; two subtractions, the mean's product and rstd's. Rows that are read twice make the first three again.
    flop = (12 + 3 * twice + bias + (residual_grad is not None)) * x.numel()
    return Work(moved(y_grad, residual_grad, x, weight, mean, rstd, x_grad, branch_grad, partial), flop)


# ----------------------------------------------------------------------------------------------------------------------
# Attention: q, o (batch, seq, heads, head_dim), k, v with kv_heads. Softmax is little beside the products.


def products(number, q, *others):
    """Return the Work of so many products with the (seq, seq) scores, on tensors of which the first is q."""
    batch, seq_len, heads, head_dim = q.shape
    # Of the scores the mask leaves half.
    return Work(moved(q, *others), number * batch * heads * seq_len**2 * head_dim)


# Of q, k, v, o, lse: q k^T and p v.
attention = functools.partial(products, 2)
# Of q, k, v, o, o_grad, lse, q_grad, k_grad, v_grad: what the gradient takes at least, by which implementations are
# rated against each other. The scores again, o_grad v^T, and one for each of the three gradients.
attention_backward = functools.partial(products, 5)
# Of q, k, v, o, o_grad, lse, delta, q_grad and tables: scores, o_grad v^T, q_grad.
attention_backward_dq = functools.partial(products, 3)
# Of q, k, v, o_grad, lse, delta, k_grad, v_grad and tables: scores and o_grad v^T once more, for two gradients. o is
# not read: delta stands for it.
attention_backward_dkdv = functools.partial(products, 4)
# Of q, k, v, o, o_grad, lse, q_grad, k_grad, v_grad and tables: both of the above in one launch, side by side, each
# with its own scores and o_grad v^T: 3 + 4 products.
attention_backward_fused = functools.partial(products, 7)


def rope(n_rotated, itemsize, cos, sin):
    # Of a pair of elements: four products, a subtraction and an addition.
    return Work(2 * n_rotated * itemsize + moved(cos, sin), 3 * n_rotated)


# ----------------------------------------------------------------------------------------------------------------------
# The rest


def swiglu_activation(gate_up, hidden):
    return Work(moved(gate_up, hidden), 5 * hidden.numel())  # a sigmoid and two products


def swiglu_activation_backward(hidden_grad, gate_up):
    # A sigmoid, silu; hidden_grad * up; 1 - sigmoid, its product with silu, the sum; the two gradients' products.
    return Work(moved(hidden_grad, gate_up, gate_up), 10 * hidden_grad.numel())


def swiglu_matmul(x, weight, gate_up, hidden):
    # Two products of matrices, and the activation. gate_up is written for the backward pass.
    return Work(moved(x, weight, gate_up, hidden), (4 * x.shape[1] + 5) * hidden.numel())


def gelu(x, y):
    # Phi: t in 4, the exponential in 3, the polynomial's 10, two at the end; its product with x.
    return Work(moved(x, y), 20 * x.numel())


def gelu_backward(y_grad, x, x_grad):
    # Phi; the density's product with x and its factor, a sum, the product with y_grad.
    return Work(moved(y_grad, x, x_grad), 23 * x.numel())


def cross_entropy(logits, targets, losses):
    """Loss and gradient, which overwrites the logits (rows, vocabulary)."""
    # The maximum; the difference from it, in the base 2, its exponential and their sum: 5. The quotient, minus one at
    # the target, times the scale: 3. A row that does not stay in registers is exponentiated again from its logits.
    again = 3 if logits.shape[1] > 8192 else 0
    return Work(moved(logits, logits, targets, losses), (8 + again) * logits.numel())


def scale(factor):
    return Work(moved(factor), 0)  # the usual factor of 1 leaves the tensor alone


def token_order(tokens, order):
    # Each pair is compared twice, and counted.
    return Work(2 * moved(tokens) + moved(order), 3 * tokens.numel() ** 2)


def embedding_backward(tokens, order, out_grad, weight_grad):
    # Of the weight only the rows of the tokens that occur: as if as many differ as can.
    rows = min(tokens.numel() / weight_grad.shape[0], 1)
    return Work(moved(tokens, order, out_grad) + 2 * rows * weight_grad.nbytes, out_grad.numel())


def adamw(param, remainder, grad, exp_avg, exp_avg_sq):
    # The first moment: 3, the second: 4. Its root, corrected, plus eps: 3. The step's product and quotient, the
    # weight's decay, their sum, what is left: 5. Splitting the weight into halves is done in integers.
    return Work(2 * moved(param, remainder, exp_avg, exp_avg_sq) + moved(grad), 15 * param.numel())
