"""Checks of exercise 3."""

import math

import torch
import torch.nn.functional as F

import tiny_llama_v3 as llama
from exercises.checks.common import DEVICE, expect_close, expect_number, expect_untouched, randn, unwritten


def check_fold(exercise):
    scores, values = randn(5, 48).double() * 30, randn(48, 8).double()
    m, l, acc = torch.full((5,), -math.inf).to(scores), torch.zeros(5).to(scores), torch.zeros(5, 8).to(scores)
    for begin, end in ((0, 16), (16, 17), (17, 48)):
        m, l, acc = exercise.fold(m, l, acc, scores[:, begin:end], values[begin:end])
        expect_close(f"m after {end} keys", m, scores[:, :end].max(dim=1).values, 1e-12, "the largest score so far")
        hint = "what was summed under the old maximum must be rescaled to the new one"
        wanted = torch.exp(scores[:, :end] - m[:, None])
        expect_close(f"l after {end} keys", l, wanted.sum(dim=1), 1e-9, hint)
        expect_close(f"acc after {end} keys", acc, wanted @ values[:end], 1e-9, hint)


def check_key_blocks(exercise):
    for block_m, block_n, seq_len in ((64, 64, 256), (64, 32, 200), (32, 64, 200), (16, 16, 5)):
        seen = torch.ones(seq_len, seq_len).tril().bool()
        for block in range(llama.cdiv(seq_len, block_m)):
            rows = seen[block * block_m : (block + 1) * block_m]
            tiles = [rows[:, start : start + block_n] for start in range(0, seq_len, block_n)]
            full = sum(bool(tile.all()) and tile.shape[1] == block_n for tile in tiles)
            masked = sum(bool(tile.any()) for tile in tiles) - full
            name = f"key_blocks({block}, {block_m}, {block_n}, {seq_len})"
            expect_number(name, tuple(exercise.key_blocks(block, block_m, block_n, seq_len)), (full, masked),
                          "the first query of the block sees the fewest keys, the last one the most")  # fmt: skip


def reference_attention(q, k, v):
    """Of (seq, heads, head_dim) in fp64."""
    q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(len(q) // len(t), dim=0) for t in (k, v))
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0].transpose(0, 1)


def check_attention_kernel(exercise):
    for seq_len, heads, kv_heads, block_m, block_n in ((32, 1, 1, 16, 16), (50, 2, 2, 32, 16), (37, 4, 2, 16, 32)):
        q, k, v = randn(seq_len, heads, 16) * 3, randn(seq_len, kv_heads, 16), randn(seq_len, kv_heads, 16)
        o, behind = unwritten(seq_len, heads, 16)
        exercise.attention_kernel[(heads, llama.cdiv(seq_len, block_m))](
            q, k, v, o, *q.stride()[:2], *k.stride()[:2], seq_len, 16**-0.5,
            GROUP_SIZE=heads // kv_heads, HEAD_DIM=16, BLOCK_M=block_m, BLOCK_N=block_n,
        )  # fmt: skip
        case = f"o for {seq_len} tokens, {heads} heads on {kv_heads}, tiles {block_m} x {block_n}"
        expect_untouched(case, behind)
        hint = "try without the mask, then with it; with several heads, which k and v does a head read?"
        expect_close(case, o, reference_attention(q, k, v), 1e-4, hint)


def check_attention_gradients(exercise):
    q, k, v, o_grad = (randn(20, 8).double() for _ in range(4))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    scores = leaves[0] @ leaves[1].T * 8**-0.5
    scores = scores.masked_fill(torch.ones(20, 20, device=DEVICE).triu(1).bool(), -math.inf)
    o = F.softmax(scores, dim=-1) @ leaves[2]
    wanted = torch.autograd.grad(o, leaves, o_grad)
    lse = torch.logsumexp(scores, dim=1)
    got = exercise.attention_gradients(q, k, v, o.detach(), lse.detach(), o_grad, 8**-0.5)
    for name, ours, theirs in zip(
        ("v_grad", "q_grad", "k_grad"), (got[2], *got[:2]), (wanted[2], *wanted[:2]), strict=True
    ):
        expect_close(name, ours, theirs, 1e-9, "v_grad needs p only; the others need delta and the scale as well")


TASKS = {
    "fold": check_fold,
    "key_blocks": check_key_blocks,
    "attention_kernel": check_attention_kernel,
    "attention_gradients": check_attention_gradients,
}
