"""Exercise 3: attention without the matrix of scores.

Check with: python exercises/check.py exercise3
"""
# ruff: noqa: F401, F841 (the blanks will use what nothing uses yet)

import torch
import triton
import triton.language as tl


def fold(m, l, acc, scores, values):
    """Adds one more tile of keys to the running softmax of a block of queries, and returns the new m, l and acc.

    m (rows,) is the largest score so far, -inf before the first tile; l (rows,) is the sum of exp(score - m), and
    acc (rows, d) that of exp(score - m) * value. scores (rows, keys), values (keys, d). In the end, the output is
    acc / l.
    """
    raise NotImplementedError("FILL ME IN (4 lines)")


def key_blocks(block, block_m, block_n, seq_len):
    """(full, masked): the numbers of blocks of block_n keys that block number `block` of block_m queries visits.

    Every query of the block sees all keys of a full block. Of a masked block, some queries see only a part or nothing.
    Blocks that no query sees are not visited.
    """
    raise NotImplementedError("FILL ME IN (4 lines)")


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
    """o = softmax(q k^T * scale) v under the causal mask.  Grid: (heads, blocks of queries).

    q and o (seq, heads, HEAD_DIM) share their strides, k and v (seq, heads / GROUP_SIZE, HEAD_DIM) theirs; the last
    dimension is contiguous.
    """
    head = tl.program_id(0)
    block = tl.program_id(1)
    kv_head = 0  # FILL ME IN: the head of k and v that this head of q shares with GROUP_SIZE - 1 others
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    q_offsets, q_mask = head * stride_qh + rows[:, None] * stride_qs + dims[None, :], (rows < seq_len)[:, None]
    q = tl.load(q_ptr + q_offsets, mask=q_mask, other=0.0)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for start in range(0, (block + 1) * BLOCK_M, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k_offsets, k_mask = kv_head * stride_kh + keys[:, None] * stride_ks + dims[None, :], (keys < seq_len)[:, None]
        k = tl.load(k_ptr + k_offsets, mask=k_mask, other=0.0)
        v = tl.load(v_ptr + k_offsets, mask=k_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        # FILL ME IN (7 lines): the causal mask, then what fold does, with m, l, acc, scores and v.
    tl.store(o_ptr + q_offsets, acc / l[:, None], mask=q_mask)


def attention_gradients(q, k, v, o, lse, o_grad, scale):
    """(q_grad, k_grad, v_grad) of one head, all (seq, d), without stored probabilities.

    lse (seq,) is what the forward pass stored instead: for each row, the natural log of the sum of exp(score).
    """
    raise NotImplementedError("FILL ME IN (5 lines)")


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
    """k_grad and v_grad of one head under the causal mask. Grid: (blocks of BLOCK_N keys,).

    lse, delta (seq,), with delta = rowsum(o * o_grad). The others are (seq, HEAD_DIM), without gaps between rows.
    """
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
        # FILL ME IN (6 lines): scores, p under the causal mask, and what they add to v_grad and k_grad.
    tl.store(k_grad_ptr + k_offsets, k_grad, mask=k_mask)
    tl.store(v_grad_ptr + k_offsets, v_grad, mask=k_mask)
