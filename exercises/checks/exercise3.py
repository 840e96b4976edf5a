"""Checks of exercise 3."""

import math

import torch
import torch.nn.functional as F

import tiny_llama_v3 as llama
from exercises.checks.common import DEVICE, expect_close, expect_number, randn, unwritten

# ----------------------------------------------------------------------------------------------------------------------
# One tile of keys


def fold_mistakes(m, l, acc, scores, values):
    """What may become of m, l and acc, right before this tile, in fp64: a list of pairs for each."""
    tile_max = scores.max(dim=1).values
    m_new = torch.maximum(m, tile_max)
    p, rescale = torch.exp(scores - m_new[:, None]), torch.exp(m - m_new)
    old_p, tile_p = torch.exp(scores - m[:, None]), torch.exp(scores - tile_max[:, None])
    not_rescaled = "the sum under the old maximum was not rescaled: exp(m - m_new) times the old one"
    inverted = "the factor of the old sum is exp(m - m_new), not exp(m_new - m)"
    old = "exp(score - m) is taken with the old maximum: the new one belongs there"
    own = "exp(score - max) is taken with the tile's own maximum: the larger of it and m belongs there"
    only = "this is the tile alone: what came before is missing"
    twice = "the tile's own sum is not to be rescaled: it is under the new maximum already"

    def pairs(before, sum_of):
        factor = rescale[:, None] if before.ndim == 2 else rescale
        return [
            (before + sum_of(p), not_rescaled),
            (sum_of(p), only),
            (before / factor + sum_of(p), inverted),
            (before * factor + sum_of(old_p), old),
            (before + sum_of(old_p), old),
            (before * factor + sum_of(tile_p), own),
            ((before + sum_of(p)) * factor, twice),
            (before * factor, "the tile itself is missing"),
            (before * factor + sum_of(scores.exp()), "the maximum is not subtracted from the scores"),
        ]

    of_m = [(tile_max, "this is the largest score of the tile: the larger of it and m"), (m, "m is the old maximum")]
    l_new = l * rescale + p.sum(dim=1)
    of_acc = pairs(acc, lambda p: p @ values)
    of_acc += [((acc * rescale[:, None] + p @ values) / l_new[:, None], "acc is divided by l: that comes last of all")]
    return of_m, pairs(l, lambda p: p.sum(dim=1)), of_acc


def check_fold(exercise):
    scores, values = randn(5, 48).double() * 3, randn(48, 8).double()
    m, l, acc = torch.full((5,), -math.inf).to(scores), torch.zeros(5).to(scores), torch.zeros(5, 8).to(scores)
    scores[0, 17] = 90.0  # where the maximum changes, and a sum that is not rescaled cannot be overlooked
    for begin, end in ((0, 16), (16, 17), (17, 48)):
        usual = fold_mistakes(m, l, acc, scores[:, begin:end], values[begin:end])
        m, l, acc = exercise.fold(m, l, acc, scores[:, begin:end], values[begin:end])
        expect_close(f"m after {end} keys", m, scores[:, :end].max(dim=1).values, 1e-12, "the largest score so far",
                     usual[0])  # fmt: skip
        hint = "what was summed under the old maximum must be rescaled to the new one"
        wanted = torch.exp(scores[:, :end] - m[:, None])
        expect_close(f"l after {end} keys", l, wanted.sum(dim=1), 1e-9, hint, usual[1])
        expect_close(f"acc after {end} keys", acc, wanted @ values[:end], 1e-9, hint, usual[2])


# ----------------------------------------------------------------------------------------------------------------------
# Blocks of keys


def key_blocks_mistakes(block, block_m, block_n, seq_len, full, masked):
    last = min((block + 1) * block_m, seq_len) - 1
    visited, untrimmed = full + masked, ((block + 1) * block_m - 1) // block_n + 1
    yield (masked, full), "the order is (full, masked)"
    yield (full, visited), "masked ones are those that are visited, less the full ones"
    yield (0, visited), "blocks that all queries see need no mask: count them as full"
    ends = (last + 1) // block_n
    yield (ends, visited - ends), "full blocks are seen by the first query of the block, which sees the fewest keys"
    yield (visited, 0), "blocks that some queries see only in part need a mask"
    yield (full, untrimmed - full), "the last block of queries may end before its size does: at seq_len"
    short = last // block_n
    yield (
        (full, short - full),
        "the last key that is seen, of number i, lies in block i // block_n: that makes one more",
    )
    yield (full, -(-last // block_n) - full), "query i sees i + 1 keys: blocks of keys are rounded up from that"
    every = llama.cdiv(seq_len, block_n)
    yield (full, every - full), "blocks that no query sees are not visited"


def check_key_blocks(exercise):
    for block_m, block_n, seq_len in ((64, 32, 200), (64, 64, 256), (32, 64, 200), (16, 16, 5)):
        seen = torch.ones(seq_len, seq_len).tril().bool()
        for block in reversed(range(llama.cdiv(seq_len, block_m))):  # the last ones tell more mistakes apart
            rows = seen[block * block_m : (block + 1) * block_m]
            tiles = [rows[:, start : start + block_n] for start in range(0, seq_len, block_n)]
            full = sum(bool(tile.all()) and tile.shape[1] == block_n for tile in tiles)
            masked = sum(bool(tile.any()) for tile in tiles) - full
            name = f"key_blocks({block}, {block_m}, {block_n}, {seq_len})"
            expect_number(name, tuple(exercise.key_blocks(block, block_m, block_n, seq_len)), (full, masked),
                          "the first query of the block sees the fewest keys, the last one the most",
                          key_blocks_mistakes(block, block_m, block_n, seq_len, full, masked))  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# The kernel


def reference_attention(q, k, v):
    """Of (seq, heads, head_dim) in fp64."""
    q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(len(q) // len(t), dim=0) for t in (k, v))
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0].transpose(0, 1)


def kernel_like(
    q, k_memory, v_memory, kv_heads, block_m, block_n, scale,
    sees=lambda key, row: key <= row, kv_head=lambda head, group: head // group, rescale_l=True, rescale_acc=True,
    keep_m=True, keep_acc=True, normalised=True, base=math.e, values_are_keys=False,
):  # fmt: skip
    """What attention_kernel stores, tile by tile in fp64, right unless told otherwise.

    q (seq, heads, d). k_memory and v_memory are flat and go on behind their (seq, kv_heads, d), where a program that
    takes the wrong head reads. A tile beyond the end of the sequence holds zeros, as the kernel's loads give them.
    """
    seq_len, heads, d = q.shape
    o = torch.zeros_like(q)
    for head in range(heads):
        begin = kv_head(head, heads // kv_heads) * d
        rows = torch.arange(seq_len, device=q.device)
        for start_m in range(0, seq_len, block_m):
            block = rows[start_m : start_m + block_m]
            m = torch.full((len(block),), -math.inf).to(q)
            l, acc = torch.zeros_like(m), torch.zeros(len(block), d).to(q)
            for start in range(0, start_m + block_m, block_n):
                keys = torch.arange(start, start + block_n, device=q.device)
                offsets = begin + keys[:, None] * kv_heads * d + torch.arange(d, device=q.device)
                exists = (keys < seq_len)[:, None]
                k, v = (torch.where(exists, memory[offsets * exists], 0.0) for memory in (k_memory, v_memory))
                scores = q[block, head] @ k.T * scale
                scores = scores.masked_fill(~sees(keys[None, :], block[:, None]), -math.inf)
                m_new = torch.maximum(m, scores.max(dim=1).values)
                p, rescale = base ** (scores - m_new[:, None]), base ** (m - m_new)
                l = (l * rescale if rescale_l else l) + p.sum(dim=1)
                before = acc * rescale[:, None] if rescale_acc else acc
                acc = (before if keep_acc else 0.0) + p @ (k if values_are_keys else v)
                m = m_new if keep_m else m
            o[block, head] = acc / l[:, None] if normalised else acc
    return o


def everywhere(key, row):
    return (key >= 0) & (row >= 0)


UNRESCALED = "was not rescaled when the maximum changed: exp(m - m_new) times what came before"
KERNEL_MISTAKES = {  # words: what of kernel_like they change
    "this is attention without the causal mask": dict(sees=everywhere),
    "the mask is off by one: a query does not see itself": dict(sees=lambda key, row: key < row),
    "the mask is off by one: a query sees its successor": dict(sees=lambda key, row: key <= row + 1),
    "the mask is the wrong way round: a query sees the keys up to itself": dict(sees=lambda key, row: key >= row),
    "every head reads head 0 of k and v, instead of head // GROUP_SIZE": dict(kv_head=lambda head, group: 0),
    "this takes k and v of head h instead of head h // GROUP_SIZE": dict(kv_head=lambda head, group: head),
    "this takes k and v of head % GROUP_SIZE, instead of //": dict(kv_head=lambda head, group: head % group),
    f"neither acc nor l {UNRESCALED}": dict(rescale_l=False, rescale_acc=False),
    f"l {UNRESCALED}": dict(rescale_l=False),
    f"acc {UNRESCALED}": dict(rescale_acc=False),
    "m keeps its first value: m = m_new belongs at the end of the loop": dict(keep_m=False),
    "acc holds the last tile only: add to what came before": dict(keep_acc=False),
    "acc is not divided by l": dict(normalised=False),
    "tl.exp2 is a power of 2: use tl.exp, or multiply the scores by 1 / ln(2)": dict(base=2.0),
    "p is multiplied with k instead of v": dict(values_are_keys=True),
}  # fmt: skip
SCALE_MISTAKES = {
    "the scale is applied twice: it is in the scores already": 2,
    "the scale is missing: the scores are q k^T * scale": 0,
}


def kernel_mistakes(q, k_memory, v_memory, kv_heads, block_m, block_n):
    scale = q.shape[-1] ** -0.5
    for words, power in SCALE_MISTAKES.items():
        yield kernel_like(q, k_memory, v_memory, kv_heads, block_m, block_n, scale**power), words
    for words, changes in KERNEL_MISTAKES.items():
        yield kernel_like(q, k_memory, v_memory, kv_heads, block_m, block_n, scale, **changes), words


def check_attention_kernel(exercise):
    d = 16
    for seq_len, heads, kv_heads, block_m, block_n, size, hint in (
        (32, 1, 1, 16, 16, 3, "try without the mask, then with it"),
        (37, 4, 2, 16, 32, 3, "right for one head and full tiles: what of heads, and of the last tiles?"),
        (50, 2, 2, 32, 16, 3, "right for tiles of more keys than queries: what of those of more queries?"),
        (32, 1, 1, 16, 16, 300, "right for small scores: exp overflows unless the largest score is subtracted first"),
    ):
        q = randn(seq_len, heads, d) * size
        # What lies behind k and v is there, but not the kernel's to read.
        memories = [randn((seq_len + 8) * kv_heads * d) for _ in range(2)]
        k, v = (memory[: seq_len * kv_heads * d].view(seq_len, kv_heads, d) for memory in memories)
        o, behind = unwritten(seq_len, heads, d)
        exercise.attention_kernel[(heads, llama.cdiv(seq_len, block_m))](
            q, k, v, o, *q.stride()[:2], *k.stride()[:2], seq_len, d**-0.5,
            GROUP_SIZE=heads // kv_heads, HEAD_DIM=d, BLOCK_M=block_m, BLOCK_N=block_n,
        )  # fmt: skip
        name = f"o for {seq_len} tokens, {heads} heads on {kv_heads}, tiles {block_m} x {block_n}"
        mistakes = kernel_mistakes(q.double(), *(memory.double() for memory in memories), kv_heads, block_m, block_n)
        expect_close(name, o, reference_attention(q, k, v), 1e-4, hint, mistakes, behind)


# ----------------------------------------------------------------------------------------------------------------------
# Gradients


def gradients_like(
    q, k, v, o, lse, o_grad, scale,
    causal=True, normaliser=lambda scores, lse: lse, score_scale=1, delta=lambda o, o_grad: (o * o_grad).sum(dim=1),
    q_scale=1, k_scale=1, from_p=True, transposed=True, with_p=True,
):  # fmt: skip
    """What attention_gradients returns, right unless told otherwise; *_scale are exponents of the scale."""
    scores = q @ k.T * scale**score_scale
    p = torch.exp(scores - normaliser(scores, lse))
    if causal:
        p = p.tril()
    score_grad = (p if with_p else 1.0) * (o_grad @ v.T - delta(o, o_grad)[..., None])
    of_v = p if from_p else score_grad
    if transposed:
        return score_grad @ k * scale**q_scale, score_grad.T @ q * scale**k_scale, of_v.T @ o_grad
    return score_grad @ k * scale**q_scale, score_grad @ q * scale**k_scale, of_v @ o_grad


GRADIENT_MISTAKES = {  # words: what of gradients_like they change
    "the causal mask is missing: p is 0 where a key comes after its query": dict(causal=False),
    "p is not normalised by lse: exp(score - lse)":
        dict(normaliser=lambda scores, lse: 0.0),
    "p is not normalised by lse: this is exp(score - max)":
        dict(normaliser=lambda scores, lse: scores.max(dim=1, keepdim=True).values),
    "lse belongs to the queries: lse[:, None], not lse[None, :]": dict(normaliser=lambda scores, lse: lse.T),
    "the scale is missing from the scores": dict(score_scale=0),
    "delta is missing": dict(delta=lambda o, o_grad: torch.zeros(len(o)).to(o)),
    "delta is the sum of o * o_grad, not of o_grad": dict(delta=lambda o, o_grad: o_grad.sum(dim=1)),
    "delta is a sum over the dimensions of a row: sum(dim=1)": dict(delta=lambda o, o_grad: (o * o_grad).sum()[None]),
    "delta is subtracted": dict(delta=lambda o, o_grad: -(o * o_grad).sum(dim=1)),
    "p is missing from score_grad": dict(with_p=False),
    "q_grad lacks the scale": dict(q_scale=0),
    "k_grad lacks the scale": dict(k_scale=0),
    "the scale is applied twice": dict(q_scale=2, k_scale=2),
    "v_grad comes from p, not from score_grad": dict(from_p=False),
    "the gradients of k and v sum over the queries: transpose p and score_grad": dict(transposed=False),
}  # fmt: skip


def gradient_mistakes(index, arguments, wanted):
    """Of the gradient of number index."""
    for words, changes in GRADIENT_MISTAKES.items():
        lse = arguments[4][:, None]
        yield gradients_like(*arguments[:4], lse, *arguments[5:], **changes)[index], words
    yield from ((other, "the order is (q_grad, k_grad, v_grad)") for other in wanted)


def check_attention_gradients(exercise):
    q, k, v, o_grad = (randn(20, 8).double() for _ in range(4))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    scores = leaves[0] @ leaves[1].T * 8**-0.5
    scores = scores.masked_fill(torch.ones(20, 20, device=DEVICE).triu(1).bool(), -math.inf)
    o = F.softmax(scores, dim=-1) @ leaves[2]
    wanted = torch.autograd.grad((o * o_grad).sum(), leaves)
    arguments = q, k, v, o.detach(), torch.logsumexp(scores, dim=1).detach(), o_grad, 8**-0.5
    got = exercise.attention_gradients(*arguments)
    for index, name, hint in (
        (2, "v_grad", "v_grad needs p only: exp(score - lse), 0 where a key comes after its query"),
        (0, "q_grad", "v_grad is right, so p is; score_grad needs delta, and q_grad the scale"),
        (1, "k_grad", "q_grad is right; k_grad is score_grad^T q * scale"),
    ):
        expect_close(name, got[index], wanted[index], 1e-9, hint, gradient_mistakes(index, arguments, wanted))


TASKS = {
    "fold": check_fold,
    "key_blocks": check_key_blocks,
    "attention_kernel": check_attention_kernel,
    "attention_gradients": check_attention_gradients,
}

COMPILED = {"attention_kernel"}
