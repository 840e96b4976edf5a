"""Kernels of Flash Linear Attention. Sequences are (batch, tokens, heads, dim)."""

import torch
import torch.nn.functional as F

from offline.other_kernels import EPS, angles, first, plain_layer_norm, plain_rms_norm, registry, rotated, targets

CASES, case = registry()


def recurrence(q, k, v, decay=None, beta=None, bonus=None, a=None, b=None, scale=None):
    """Return what each query reads from a state (dim of keys, dim of values) to which each key adds its value.

    decay: logarithm of the factor of the state, (..., heads, dim or 1). beta: of the delta rule, (..., heads, 1).
    bonus: of the token itself (RWKV 6), (heads, dim). a, b: what the state is read with, and where that goes (RWKV 7).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    state, outputs = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]), []
    for t in range(q.shape[1]):
        reads = (x[:, t, :, None] for x in (q, k, v))
        query, key, value = (scale * next(reads)), next(reads), next(reads)
        if bonus is not None:
            outputs.append(query @ (state + bonus[..., None] * key.mT @ value))
        removed = 0 if a is None else b[:, t, ..., None] * (a[:, t, :, None] @ state)
        if decay is not None:
            state = state * decay[:, t, ..., None].exp()
        if beta is not None:
            value = beta[:, t, :, None] * (value - key @ state)
        state = state + removed + key.mT @ value
        if bonus is None:
            outputs.append(query @ state)
    return torch.cat(outputs, 2).transpose(1, 2)


def sequences(randn, count, *shape):
    """Return so many tensors, as small as a normalized key is."""
    return [randn(*shape) * shape[-1] ** -0.5 for _ in range(count)]


SHAPE = 1, 70, 2, 32  # one chunk of 64 tokens, and a part of another


@case("fla.ops.linear_attn:chunk_linear_attn")
@case("fla.ops.linear_attn:fused_chunk_linear_attn")
@case("fla.ops.linear_attn:fused_recurrent_linear_attn")
def linear_attention(kernel, randn):
    return first(kernel, normalize=False), recurrence, sequences(randn, 3, *SHAPE)


@case("fla.ops.retention:chunk_retention")
@case("fla.ops.retention:fused_chunk_retention")
@case("fla.ops.retention:fused_recurrent_retention")
@case("fla.ops.retention:parallel_retention")
def retention(kernel, randn):
    def plain(q, k, v):
        heads = torch.arange(q.shape[2], dtype=q.dtype)
        return recurrence(q, k, v, (1 - 2 ** (-5 - heads)).log()[:, None].expand(*q.shape[:3], 1))

    return first(kernel), plain, sequences(randn, 3, *SHAPE)


def slowly(randn, *shape):
    """Return logarithms of factors between about 0.7 and 1."""
    return -0.1 * randn(*shape).abs()


@case("fla.ops.gla:chunk_gla")
@case("fla.ops.gla:fused_recurrent_gla")
def gated_linear_attention(kernel, randn):
    return first(kernel), recurrence, [*sequences(randn, 3, *SHAPE), slowly(randn, *SHAPE)]


@case("fla.ops.simple_gla:chunk_simple_gla")
@case("fla.ops.simple_gla:fused_chunk_simple_gla")
@case("fla.ops.simple_gla:fused_recurrent_simple_gla")
@case("fla.ops.simple_gla:parallel_simple_gla")
def simple_gated_linear_attention(kernel, randn):
    def plain(q, k, v, decay):
        return recurrence(q, k, v, decay[..., None])

    return first(kernel), plain, [*sequences(randn, 3, *SHAPE), slowly(randn, *SHAPE[:3])]


@case("fla.ops.hgrn:chunk_hgrn")
@case("fla.ops.hgrn:fused_recurrent_hgrn")
def hgrn(kernel, randn):
    def plain(x, decay):
        state, states = 0, []
        for t in range(x.shape[1]):
            state = state * decay[:, t].exp() + x[:, t]
            states.append(state)
        return torch.stack(states, 1)

    return first(kernel), plain, [randn(2, 70, 33), slowly(randn, 2, 70, 33)]


@case("fla.ops.rwkv6:chunk_rwkv6")
@case("fla.ops.rwkv6:fused_recurrent_rwkv6")
def rwkv6(kernel, randn):
    def plain(q, k, v, decay, bonus):
        return recurrence(q, k, v, decay, bonus=bonus)

    inputs = [*sequences(randn, 3, *SHAPE), slowly(randn, *SHAPE), randn(*SHAPE[2:])]
    return first(kernel), plain, inputs


@case("fla.ops.rwkv7:chunk_rwkv7", torch.bfloat16)
@case("fla.ops.rwkv7:fused_recurrent_rwkv7", torch.bfloat16, has_backward=False)
def rwkv7(kernel, randn):
    def plain(r, decay, k, v, a, b):
        return recurrence(r, k, v, decay, a=a, b=b, scale=1)

    r, k, v, a, b = sequences(randn, 5, *SHAPE)
    return first(kernel, scale=1.0), plain, [r, slowly(randn, *SHAPE), k, v, a, b]


@case("fla.ops.delta_rule:chunk_delta_rule", torch.bfloat16)
@case("fla.ops.delta_rule:fused_recurrent_delta_rule")
def delta_rule(kernel, randn):
    def plain(q, k, v, beta):
        return recurrence(q, k, v, beta=beta[..., None])

    return first(kernel), plain, [*sequences(randn, 3, *SHAPE), randn(*SHAPE[:3]).sigmoid()]


@case("fla.ops.gated_delta_rule:chunk_gated_delta_rule", torch.bfloat16)
def gated_delta_rule(kernel, randn):
    def plain(q, k, v, decay, beta):
        return recurrence(q, k, v, decay[..., None], beta[..., None])

    inputs = [*sequences(randn, 3, *SHAPE), slowly(randn, *SHAPE[:3]), randn(*SHAPE[:3]).sigmoid()]
    return first(kernel), plain, inputs


@case("fla.ops.attn:parallel_attn", torch.bfloat16)
def softmax_attention(kernel, randn):
    def plain(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        future = torch.ones(70, 70, dtype=torch.bool).triu(1)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(future, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2)

    return kernel, plain, [randn(*SHAPE), randn(1, 70, 1, 32), randn(1, 70, 1, 32)]


@case("fla.ops.forgetting_attn:parallel_forgetting_attn")
def forgetting_attention(kernel, randn):
    def plain(q, k, v, decay):
        since = decay.cumsum(1).transpose(1, 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5 + since[..., None] - since[..., None, :]
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(future, float("-inf")).softmax(-1), v)

    return kernel, plain, [*(randn(*SHAPE) for _ in range(3)), slowly(randn, *SHAPE[:3])]


@case("fla.modules.layernorm:layer_norm")
def layer_norm(kernel, randn):
    return kernel, plain_layer_norm, [randn(5, 77), randn(77), randn(77)]


@case("fla.modules.layernorm:rms_norm")
def rms_norm_with_bias(kernel, randn):
    return kernel, lambda x, w, b: plain_rms_norm(x, w) + b, [randn(5, 77), randn(77), randn(77)]


@case("fla.modules.fused_norm_gate:rms_norm_gated")
def gated_rms_norm(kernel, randn):
    def plain(x, gate, weight):
        return plain_rms_norm(x, weight) * F.silu(gate)

    return lambda x, g, w: kernel(x, g, w, None, eps=EPS), plain, [randn(5, 77), randn(5, 77), randn(77)]


@case("fla.modules.l2norm:l2norm")
def l2_norm(kernel, randn):
    return kernel, lambda x: x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt(), [randn(5, 77)]


@case("fla.modules.rotary:rotary_embedding")
def rotary(kernel, randn):
    cos, sin = angles(randn, 70, 16)

    def plain(x):
        return rotated(x, cos[:, None], sin[:, None])

    return lambda x: kernel(x, cos, sin), plain, [randn(*SHAPE)]


@case("fla.modules.fused_cross_entropy:cross_entropy_loss")
def cross_entropy_of_tokens(kernel, randn):
    labels = targets(6, 301, ignored=True)
    return first(kernel, target=labels), lambda x: F.cross_entropy(x, labels, reduction="none"), [4 * randn(6, 301)]


@case("fla.modules.token_shift:token_shift")
def token_shift(kernel, randn):
    return kernel, lambda x: F.pad(x, (0, 0, 1, -1)) - x, [randn(2, 9, 77)]


@case("fla.modules.causal_conv1d:causal_conv1d")
def causal_convolution(kernel, randn):
    def plain(x, weight, bias):
        padded = F.pad(x.mT, (weight.shape[1] - 1, 0))
        return F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight)).mT)

    def ours(x, weight, bias):
        return kernel(x, weight, bias, activation="silu")[0]

    return ours, plain, [randn(2, 70, 33), randn(33, 4), randn(33)]


@case("fla.modules.activations:swiglu")
def silu_and_product(kernel, randn):
    return kernel, lambda x, y: F.silu(x) * y, [randn(5, 77), randn(5, 77)]


@case("fla.modules.activations:logsigmoid")
def log_sigmoid(kernel, randn):
    return kernel, F.logsigmoid, [randn(5, 77)]


@case("fla.ops.utils.pooling:mean_pooling")
def mean_pooling(kernel, randn):
    def plain(x):
        return torch.stack([part.mean(1) for part in x.split(32, 1)], 1)

    return lambda x: kernel(x, 32), plain, [randn(*SHAPE)]


@case("fla.ops.utils.cumsum:chunk_local_cumsum", has_backward=False)
def sums_of_chunks(kernel, randn):
    return lambda x: kernel(x, 64), lambda x: torch.cat([part.cumsum(1) for part in x.split(64, 1)], 1), [randn(*SHAPE)]


@case("fla.ops.utils.matmul:matmul", torch.bfloat16, has_backward=False)
def product(kernel, randn):
    return kernel, torch.matmul, [randn(45, 64), randn(64, 77)]
