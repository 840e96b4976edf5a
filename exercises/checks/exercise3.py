"""Checks of exercise 3."""

import math

import torch

import tiny_llama_v3 as llama
from exercises.checks.common import (
    FP32,
    HALF,
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

FOLDED = {
    "m": "the larger of the old m and the largest score of the tile, for each row",
    "l": "the old l times exp(m - m_new), plus the row's sum of exp(score - m_new)",
    "acc": "the old acc times exp(m - m_new), plus exp(score - m_new) @ values",
}
FIRST = "; this is the first tile, before which m is -inf, and l and acc are 0"


LARGE = "right for small scores: exp(score) and exp(m) overflow, or are 0, and only exp of a difference is in range; "


@task((5, 8), (3, 2), (3, 2, 2000.0))  # rows, d, how large the scores are
def fold(exercise, rows, d, size=0.0):
    scores, values = randn(rows, 48).double() * 3, randn(48, d).double()
    scores[0, 17] = 90.0  # where the maximum changes, and a sum that is not rescaled cannot be overlooked
    scores[0] += size
    scores[1] -= size
    tiles = [(scores[:, begin:end], values[begin:end]) for begin, end in ((0, 16), (16, 17), (17, 48))]
    states = [(scores.new_full((rows,), -math.inf), scores.new_zeros(rows), scores.new_zeros(rows, d))]
    for tile in tiles:
        states.append(solution.fold(*states[-1], *tile))
    names = "m", "l", "acc", "scores", "values"
    # The last tile first: before the first one m is infinite, and mistakes look alike.
    for number in (2, 1, 0):
        given = dict(zip(names, states[number] + tiles[number], strict=True))
        with unchanged(**given):
            got = exercise.fold(**given)
        expect_several(got, *names[:3])
        for name, ours, theirs in zip(names, got, states[number + 1], strict=False):
            hint = LARGE * (size > 0) + FOLDED[name] + FIRST * (number == 0)
            expect_close(ours, theirs, 1e-9, hint, f"{name} after {number + 1} tiles")


key_blocks = counting(
    "key_blocks",
    solution,
    "the first query of the block sees the fewest keys, the last one the most",
    *(
        (block, block_m, block_n, seq_len)
        for block_m, block_n, seq_len in (
            (128, 48, 256),
            (64, 32, 200),
            (16, 32, 64),  # block 3 has full blocks of more keys than it has queries
            (16, 16, 5),
            (3, 2, 17),
            (7, 5, 41),
        )
        for block in range(llama.cdiv(seq_len, block_m))
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


KEPT = "right in fp32: does p have the type of v, and everything else stay in fp32 up to the store?"


@task(  # seq_len, heads, kv_heads, BLOCK_M, BLOCK_N, the size of q and of v, hint, dtype, the mean of v
    (64, 1, 1, 16, 32, 2, 1, "keys up to the row itself take part; l sums their p, acc p @ v"),
    (37, 6, 2, 16, 32, 2, 1, "right for one head and full tiles: what of heads, and of the last tiles?"),
    (50, 2, 2, 32, 16, 2, 1, "right for tiles of more keys than queries: what of those of more queries?"),
    (32, 1, 1, 16, 16, 200, 1, "right for small scores: exp overflows unless the largest score is subtracted first"),
    (32, 1, 1, 16, 16, 1e36, 1, "right for small scores: what the mask hides needs the score float('-inf')"),
    (32, 1, 1, 16, 16, 2, 1e5, "right for small values: is acc kept in fp16, whose largest number is 65504?"),
    (37, 4, 2, 16, 32, 2, 1, KEPT, HALF),
    # Sums of many values on one side of 0, in which the rounding of each block adds up, and that of p does not.
    (256, 2, 1, 16, 16, 1, 0.3, KEPT, HALF, 7),
)
def attention_kernel(exercise, seq_len, heads, kv_heads, block_m, block_n, q_size, v_size, hint, dtype=FP32, mean=0):
    q = randn(seq_len, heads, HEAD_DIM, dtype=dtype) * q_size
    k, v = (randn(seq_len, kv_heads, HEAD_DIM, dtype=dtype) * size for size in (1, v_size))
    v += mean
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
    tolerance = (2e-3 if dtype == HALF else 1e-4) * v_size
    expect_close(o, attention(q.double(), k.double(), v.double()), tolerance, hint)


def forward_and_gradients(seq_len, d, scale, dtype=torch.float64):
    """Return random inputs of a head, what its forward pass stores, and the gradients by PyTorch, all in fp64."""
    q, k, v, o_grad = (randn(seq_len, d, dtype=dtype).double() for _ in range(4))
    o, backward = torch.func.vjp(lambda q, k, v: torch.softmax(causal_scores(q, k, scale), dim=1) @ v, q, k, v)
    lse = torch.logsumexp(causal_scores(q, k, scale), dim=1)
    return dict(q=q, k=k, v=v, o=o, lse=lse, o_grad=o_grad), backward(o_grad)


HIDDEN = "right for small scores: is exp of a score that the mask hides infinite, and infinity times 0 NaN?"


@task((20, 8, 0.3), (13, 5, 500.0))  # seq_len, d, scale
def attention_gradients(exercise, seq_len, d, scale):
    given, (q_grad, k_grad, v_grad) = forward_and_gradients(seq_len, d, scale)
    with unchanged(**given):
        got = exercise.attention_gradients(**given, scale=scale)
    expect_several(got, "q_grad", "k_grad", "v_grad")
    hint = HIDDEN if scale > 1 else "v_grad needs p only: exp(score - lse), 0 where a key comes after its query"
    expect_close(got[2], v_grad, 1e-9, hint, "v_grad")
    hint = "v_grad is right, so p is; score_grad needs delta, and q_grad the scale"
    expect_close(got[0], q_grad, 1e-9, hint, "q_grad")
    expect_close(got[1], k_grad, 1e-9, "q_grad is right; k_grad is score_grad^T q * scale", "k_grad")
    # With another lse every p is e times smaller: whoever sums the row again does not see it.
    other = exercise.attention_gradients(**given | {"lse": given["lse"] + 1.0}, scale=scale)
    hint = "lse is not used: p is exp(score - lse), without another sum over the row, as softmax takes it"
    expect_close(other[2], v_grad / math.e, 1e-9, hint, "v_grad for lse + 1")


@task(  # seq_len, d, scale, BLOCK_M, BLOCK_N, dtype, tolerance
    (37, 32, 0.7, 16, 32),
    (50, 16, 0.2, 32, 16),
    (37, 32, 0.7, 16, 32, HALF, 3e-3),
    (200, 32, 0.1, 16, 32, HALF, 7e-4),  # of many blocks, whose rounding adds up
    (37, 32, 30.0, 16, 32, FP32, 1e-2),
)
def key_value_gradient_kernel(exercise, seq_len, d, scale, block_m, block_n, dtype=FP32, tolerance=1e-4):
    given, (_, k_grad, v_grad) = forward_and_gradients(seq_len, d, scale, dtype)
    delta = (given["o"] * given["o_grad"]).sum(dim=1)
    # The kernel's own rounding is all that is left between it and fp64.
    inputs = [given[name].to(dtype) for name in ("q", "k", "v", "o_grad")]
    got = launch(
        exercise.key_value_gradient_kernel,
        (llama.cdiv(seq_len, block_n),),
        *inputs,
        given["lse"].float(),
        delta.float(),
        unwritten(seq_len, d, dtype=dtype),
        unwritten(seq_len, d, dtype=dtype),
        seq_len,
        scale,
        HEAD_DIM=d,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        share="a program stores the gradients of its block of keys",
    )
    hint = HIDDEN if scale > 1 else "v_grad adds p^T o_grad of each block of queries, with p = exp(score - lse)"
    expect_close(got[1], v_grad, tolerance, hint)
    hint = "v_grad is right, so p is; k_grad adds score_grad^T q * scale of each block of queries"
    expect_close(got[0], k_grad, tolerance, hint)


TASKS = tasks_of(fold, key_blocks, attention_kernel, attention_gradients, key_value_gradient_kernel)
COMPILED = {"attention_kernel", "key_value_gradient_kernel"}
