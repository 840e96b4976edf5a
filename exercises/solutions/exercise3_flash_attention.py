"""Exercise 3: attention without the matrix of scores."""

import torch
import triton
import triton.language as tl


def fold(m, l, acc, scores, values):
    # The maximum may only rise: what was summed under the old one shrinks by exp(m - m_new).
    m_new = torch.maximum(m, scores.max(dim=1).values)
    p = torch.exp(scores - m_new[:, None])
    rescale = torch.exp(m - m_new)
    return m_new, l * rescale + p.sum(dim=1), acc * rescale[:, None] + p @ values


def key_blocks(block, block_m, block_n, seq_len):
    first, last = block * block_m, min((block + 1) * block_m, seq_len) - 1
    # The first query sees keys 0 to first, the last one keys 0 to last.
    full = (first + 1) // block_n
    visited = last // block_n + 1
    return full, visited - full


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    stride_qs,
    stride_qh,
    stride_ks,
    stride_kh,
    seq_len,
    scale,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    head = tl.program_id(0)
    block = tl.program_id(1)
    # GROUP_SIZE heads of q share one of k and v: nothing is copied.
    kv_head = head // GROUP_SIZE
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    q_offsets, q_mask = head * stride_qh + rows[:, None] * stride_qs + dims[None, :], (rows < seq_len)[:, None]
    q = tl.load(q_ptr + q_offsets, mask=q_mask, other=0.0)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    # Later keys are seen by no query of this block: half of the work is skipped.
    for start in range(0, (block + 1) * BLOCK_M, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k_offsets, k_mask = kv_head * stride_kh + keys[:, None] * stride_ks + dims[None, :], (keys < seq_len)[:, None]
        k = tl.load(k_ptr + k_offsets, mask=k_mask, other=0.0)
        v = tl.load(v_ptr + k_offsets, mask=k_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        # -inf and not a large negative number: exp(-inf - m) is 0 for every m.
        scores = tl.where(keys[None, :] <= rows[:, None], scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        p = tl.exp(scores - m_new[:, None])
        # Before the first tile m is -inf, and exp(m - m_new) is 0: nothing is there to rescale.
        rescale = tl.exp(m - m_new)
        l = l * rescale + tl.sum(p, axis=1)
        acc = acc * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        # From here on the sums are under the new maximum.
        m = m_new
    tl.store(o_ptr + q_offsets, acc / l[:, None], mask=q_mask)


def attention_gradients(q, k, v, o, lse, o_grad, scale):
    future = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
    # lse holds maximum and sum: the probabilities come back without another pass over the row.
    p = torch.exp(q @ k.T * scale - lse[:, None]).masked_fill(future, 0.0)
    delta = (o * o_grad).sum(dim=1)
    # The derivative of softmax: each row of p_grad less its mean under p, which is delta.
    score_grad = p * (o_grad @ v.T - delta[:, None])
    return score_grad @ k * scale, score_grad.T @ q * scale, p.T @ o_grad


@triton.jit
def key_value_gradient_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_grad_ptr,
    lse_ptr,
    delta_ptr,
    k_grad_ptr,
    v_grad_ptr,
    seq_len,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    keys, dims = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, HEAD_DIM)
    k_offsets, k_mask = keys[:, None] * HEAD_DIM + dims[None, :], (keys < seq_len)[:, None]
    k = tl.load(k_ptr + k_offsets, mask=k_mask, other=0.0)
    v = tl.load(v_ptr + k_offsets, mask=k_mask, other=0.0)
    k_grad, v_grad = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32), tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    first = tl.program_id(0) * BLOCK_N // BLOCK_M * BLOCK_M  # no query before these sees one of the keys
    for start in range(first, seq_len, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        q_offsets, q_mask = rows[:, None] * HEAD_DIM + dims[None, :], (rows < seq_len)[:, None]
        q = tl.load(q_ptr + q_offsets, mask=q_mask, other=0.0)
        o_grad = tl.load(o_grad_ptr + q_offsets, mask=q_mask, other=0.0)
        lse = tl.load(lse_ptr + rows, mask=rows < seq_len, other=0.0)
        delta = tl.load(delta_ptr + rows, mask=rows < seq_len, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        p = tl.where(keys[None, :] <= rows[:, None], tl.exp(scores - lse[:, None]), 0.0)
        # A program owns its keys and walks over the queries: no two add to the same gradient.
        v_grad += tl.dot(tl.trans(p.to(q.dtype)), o_grad, input_precision="ieee")
        p_grad = tl.dot(o_grad, tl.trans(v), input_precision="ieee")
        score_grad = p * (p_grad - delta[:, None])
        k_grad += tl.dot(tl.trans(score_grad.to(q.dtype)), q, input_precision="ieee") * scale
    tl.store(k_grad_ptr + k_offsets, k_grad, mask=k_mask)
    tl.store(v_grad_ptr + k_offsets, v_grad, mask=k_mask)
