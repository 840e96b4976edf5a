"""Checks of exercise 3."""

import math

import torch

import tiny_llama_v3 as llama
from exercises.checks.common import (
    counting,
    expect_close,
    expect_several,
    randn,
    task,
    tasks_of,
    unchanged,
    unwritten,
)
from exercises.checks.memory import launch
from exercises.solutions import exercise3_flash_attention as solution


@task(())
def fold(exercise):
    scores, values = randn(5, 48).double() * 3, randn(48, 8).double()
    m, l, acc = torch.full((5,), -math.inf).to(scores), torch.zeros(5).to(scores), torch.zeros(5, 8).to(scores)
    scores[0, 17] = 90.0  # where the maximum changes, and a sum that is not rescaled cannot be overlooked
    for begin, end in ((0, 16), (16, 17), (17, 48)):
        tile = dict(m=m, l=l, acc=acc, scores=scores[:, begin:end], values=values[begin:end])
        with unchanged(**tile):
            got = exercise.fold(**tile)
        expect_several(got, "m", "l", "acc")
        # Computed anew from all scores so far, where fold only knows the last tile.
        largest = scores[:, :end].max(dim=1).values
        p = torch.exp(scores[:, :end] - largest[:, None])
        hint = "what was summed under the old maximum must be rescaled to the new one"
        expect_close(got[0], largest, 1e-12, "the largest score so far", f"m after {end} keys")
        expect_close(got[1], p.sum(dim=1), 1e-9, hint, f"l after {end} keys")
        expect_close(got[2], p @ values[:end], 1e-9, hint, f"acc after {end} keys")
        m, l, acc = got


SHAPES = (128, 48, 256), (64, 32, 200), (64, 64, 256), (32, 64, 200), (16, 16, 5), (3, 2, 17), (7, 5, 41)
key_blocks = counting(
    "key_blocks",
    solution,
    "the first query of the block sees the fewest keys, the last one the most",
    *(
        (block, block_m, block_n, seq_len)
        for block_m, block_n, seq_len in SHAPES
        for block in reversed(range(llama.cdiv(seq_len, block_m)))  # the last ones tell more mistakes apart
    ),
)


def causal_scores(q, k, scale):
    """Return q k^T * scale, and -inf where a key comes after its query; the last dimensions are (seq, d)."""
    scores = q @ k.transpose(-1, -2) * scale
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, -math.inf)


HEAD_DIM, SCALE = 64, 0.3  # which is not HEAD_DIM**-0.5


def attention(q, k, v):
    """Return the output for q (seq, heads, d), k and v (seq, kv_heads, d), by PyTorch's operators."""
    # Heads of a group see the same k and v.
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1).transpose(0, 1) for t in (k, v))
    p = torch.softmax(causal_scores(q.transpose(0, 1), k, SCALE), dim=-1)
    return (p @ v).transpose(0, 1)


@task(  # seq_len, heads, kv_heads, BLOCK_M, BLOCK_N, the size of q and of v, hint
    (64, 1, 1, 16, 32, 2, 1, "try without the mask, then with it"),
    (37, 4, 2, 16, 32, 2, 1, "right for one head and full tiles: what of heads, and of the last tiles?"),
    (21, 6, 2, 16, 16, 2, 1, "right for groups of two heads: what of those of three?"),
    (50, 2, 2, 32, 16, 2, 1, "right for tiles of more keys than queries: what of those of more queries?"),
    (32, 1, 1, 16, 16, 200, 1, "right for small scores: exp overflows unless the largest score is subtracted first"),
    (32, 1, 1, 16, 16, 3e7, 1, "right for small scores: what the mask hides needs the score float('-inf')"),
    (32, 1, 1, 16, 16, 2, 1e5, "right for small values: is acc kept in fp16, whose largest number is 65504?"),
)
def attention_kernel(exercise, seq_len, heads, kv_heads, block_m, block_n, q_size, v_size, hint, dtype=torch.float32):
    q = randn(seq_len, heads, HEAD_DIM, dtype=dtype) * q_size
    k, v = (randn(seq_len, kv_heads, HEAD_DIM, dtype=dtype) * size for size in (1, v_size))
    o = launch(
        exercise.attention_kernel,
        (heads, llama.cdiv(seq_len, block_m)),
        q,
        k,
        v,
        unwritten(*q.shape, dtype=dtype),
        *q.stride()[:2],
        *k.stride()[:2],
        seq_len,
        SCALE,
        GROUP_SIZE=heads // kv_heads,
        HEAD_DIM=HEAD_DIM,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        share="a program stores the queries of its block, rows, for its head",
    )
    expect_close(o, attention(q.double(), k.double(), v.double()), 1e-4 * v_size, hint)


def forward_and_gradients(seq_len, d, scale):
    """Return random inputs of a head, what its forward pass stores, and the gradients by PyTorch, all in fp64."""
    q, k, v, o_grad = (randn(seq_len, d).double().requires_grad_() for _ in range(4))
    scores = causal_scores(q, k, scale)
    o, lse = torch.softmax(scores, dim=1) @ v, torch.logsumexp(scores, dim=1)
    wanted = torch.autograd.grad(o, (q, k, v), o_grad)
    given = dict(q=q, k=k, v=v, o=o, lse=lse, o_grad=o_grad)
    return {name: tensor.detach() for name, tensor in given.items()}, wanted


@task((20, 8, 0.3), (13, 5, 0.7))  # seq_len, d, scale
def attention_gradients(exercise, seq_len, d, scale):
    given, (q_grad, k_grad, v_grad) = forward_and_gradients(seq_len, d, scale)
    with unchanged(**given):
        got = exercise.attention_gradients(**given, scale=scale)
    expect_several(got, "q_grad", "k_grad", "v_grad")
    hint = "v_grad needs p only: exp(score - lse), 0 where a key comes after its query"
    expect_close(got[2], v_grad, 1e-9, hint, "v_grad")
    hint = "v_grad is right, so p is; score_grad needs delta, and q_grad the scale"
    expect_close(got[0], q_grad, 1e-9, hint, "q_grad")
    expect_close(got[1], k_grad, 1e-9, "q_grad is right; k_grad is score_grad^T q * scale", "k_grad")
    # With another lse every p is e times smaller: whoever sums the row again does not see it.
    other = exercise.attention_gradients(**given | {"lse": given["lse"] + 1.0}, scale=scale)
    hint = "lse is not used: p is exp(score - lse), without another sum over the row, as softmax takes it"
    expect_close(other[2], v_grad / math.e, 1e-9, hint, "v_grad for lse + 1")


@task((37, 32, 0.7, 16, 32), (40, 16, 0.3, 16, 16), (50, 16, 0.2, 32, 16))  # seq_len, d, scale, BLOCK_M, BLOCK_N
def key_value_gradient_kernel(exercise, seq_len, d, scale, block_m, block_n):
    given, (_, k_grad, v_grad) = forward_and_gradients(seq_len, d, scale)
    delta = (given["o"] * given["o_grad"]).sum(dim=1)
    # The kernel's own rounding is all that is left between it and fp64.
    inputs = [t.float() for t in (given["q"], given["k"], given["v"], given["o_grad"], given["lse"], delta)]
    got = launch(
        exercise.key_value_gradient_kernel,
        (llama.cdiv(seq_len, block_n),),
        *inputs,
        unwritten(seq_len, d),
        unwritten(seq_len, d),
        seq_len,
        scale,
        HEAD_DIM=d,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        share="a program stores the gradients of its block of keys",
    )
    hint = "v_grad adds p^T o_grad of each block of queries"
    expect_close(got[1], v_grad, 1e-4, hint)
    hint = "v_grad is right, so p is; k_grad adds score_grad^T q * scale of each block of queries"
    expect_close(got[0], k_grad, 1e-4, hint)


TASKS = tasks_of(fold, key_blocks, attention_kernel, attention_gradients, key_value_gradient_kernel)
COMPILED = {"attention_kernel", "key_value_gradient_kernel"}
