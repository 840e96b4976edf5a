"""Checks of exercise 3."""

import math
from unittest import mock

import torch
import torch.nn.functional as F

import tiny_llama_v3 as llama
from exercises.checks.common import (
    DEVICE,
    NothingStored,
    expect,
    expect_close,
    expect_number,
    randn,
    unchanged,
    unwritten,
)
from exercises.checks.memory import launch

# ----------------------------------------------------------------------------------------------------------------------
# One tile of keys


EXP2 = "exp2 is a power of 2: use exp, or multiply the exponent by log2(e)"


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
            *((before * old + sum_of(p), EXP2) for old in (factor.log().exp2(), factor)),
            *((before * old + sum_of(p.log().exp2()), EXP2) for old in (factor.log().exp2(), factor)),
            (before * factor + sum_of(torch.softmax(scores, dim=1)), "this is the softmax of the tile by itself: p is "
             "exp(score - m_new), and the division by l comes last of all"),
        ]  # fmt: skip

    of_m = [
        (tile_max, "this is the largest score of the tile: the larger of it and m"),
        (m, "m is the old maximum: torch.maximum takes the larger one of it and the tile's"),
        (torch.maximum(m, scores.max()), "each row has a maximum of its own: scores.max(dim=1).values"),
        (l * rescale + p.sum(dim=1), "this is l: the order is (m, l, acc)"),
    ]
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
        tile = dict(m=m, l=l, acc=acc, scores=scores[:, begin:end], values=values[begin:end])
        with unchanged(**tile):
            got = exercise.fold(**tile)
        expect(isinstance(got, tuple | list) and len(got) == 3, "three tensors are to be returned: m, l and acc")
        m, l, acc = got
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
    yield (full, short - full), "the last key that is seen, i, lies in block i // block_n: that makes one more"
    short = block * block_m // block_n
    yield (short, visited - short), "query i sees i + 1 keys, so (first + 1) // block_n blocks are full"
    yield (block, visited - block), "a block of keys has block_n, one of queries block_m: they are not of one size"
    yield (full, 1), "more than one block may need a mask: those visited, less the full ones"
    yield (full, max(1, block_m // block_n)), "count the blocks that are visited, and take the full ones away"
    yield (full, -(-last // block_n) - full), "query i sees i + 1 keys: blocks of keys are rounded up from that"
    every = llama.cdiv(seq_len, block_n)
    yield (full, every - full), "blocks that no query sees are not visited"


def check_key_blocks(exercise):
    for block_m, block_n, seq_len in ((64, 32, 200), (64, 64, 256), (32, 64, 200), (16, 16, 5), (3, 2, 17), (7, 5, 41)):
        seen = torch.ones(seq_len, seq_len).tril().bool()
        for block in reversed(range(llama.cdiv(seq_len, block_m))):  # the last ones tell more mistakes apart
            rows = seen[block * block_m : (block + 1) * block_m]
            tiles = [rows[:, start : start + block_n] for start in range(0, seq_len, block_n)]
            full = sum(bool(tile.all()) and tile.shape[1] == block_n for tile in tiles)
            masked = sum(bool(tile.any()) for tile in tiles) - full
            name = f"key_blocks({block}, {block_m}, {block_n}, {seq_len})"
            got = exercise.key_blocks(block, block_m, block_n, seq_len)
            expect(isinstance(got, tuple | list) and len(got) == 2, f"{name} is {got!r}, expected (full, masked)")
            expect_number(name, tuple(got), (full, masked),
                          "the first query of the block sees the fewest keys, the last one the most",
                          key_blocks_mistakes(block, block_m, block_n, seq_len, full, masked))  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# The kernel


def kernel_like(
    q, k, v, block_m, block_n, scale,
    sees=lambda key, row, start_m: key <= row, kv_head=lambda head, group: head // group, rescale_l=True,
    rescale_acc=True, keep_m=True, keep_acc=True, normalised=True, base=math.e, rescale_base=None, hidden=-math.inf,
    values_are_keys=False, larger=torch.maximum, largest=torch.amax, divide_each=False,
):  # fmt: skip
    """What attention_kernel stores, tile by tile in fp64, right unless told otherwise.

    q (seq, heads, d), k and v (seq, kv_heads, d). A tile beyond the end of the sequence holds zeros, as the kernel's
    loads give them.
    """
    seq_len, heads, d = q.shape
    o, rows, group = torch.zeros_like(q), torch.arange(seq_len, device=q.device), heads // k.shape[1]
    k, v = (F.pad(t, (0, 0, 0, 0, 0, block_m + block_n)) for t in (k, v))
    for head in range(heads):
        own = kv_head(head, group)
        for start_m in range(0, seq_len, block_m):
            block = rows[start_m : start_m + block_m]
            m = torch.full((len(block),), -math.inf).to(q)
            l, acc = torch.zeros_like(m), torch.zeros(len(block), d).to(q)
            for start in range(0, start_m + block_m, block_n):
                keys = torch.arange(start, start + block_n, device=q.device)
                scores = q[block, head] @ k[keys, own].T * scale
                scores = scores.masked_fill(~sees(keys[None, :], block[:, None], start_m), hidden)
                m_new = larger(m, largest(scores, dim=1))
                p, rescale = base ** (scores - m_new[:, None]), (rescale_base or base) ** (m - m_new)
                l = (l * rescale if rescale_l else l) + p.sum(dim=1)
                before = acc * rescale[:, None] if rescale_acc else acc
                acc = (before if keep_acc else 0.0) + p @ (k if values_are_keys else v)[keys, own]
                m = m_new if keep_m else m
                acc = acc / l[:, None] if divide_each else acc
            o[block, head] = acc / l[:, None] if normalised else acc
    return o


def everywhere(key, row, start_m):
    return (key >= 0) & (row >= 0)


UNRESCALED = "was not rescaled when the maximum changed: exp(m - m_new) times what came before"
KERNEL_MISTAKES = {  # words: what of kernel_like they change
    "this is attention without the causal mask": dict(sees=everywhere),
    "the mask is off by one: a query does not see itself": dict(sees=lambda key, row, start_m: key < row),
    "the mask is off by one: a query sees its successor": dict(sees=lambda key, row, start_m: key <= row + 1),
    "the mask is the wrong way round: a query sees the keys up to itself":
        dict(sees=lambda key, row, start_m: key >= row),
    "every head reads head 0 of k and v, instead of head // GROUP_SIZE": dict(kv_head=lambda head, group: 0),
    "the head is divided by GROUP_SIZE, which is not always 2": dict(kv_head=lambda head, group: head // 2),
    "rows and keys count from the beginning of the sequence: tl.arange alone counts within the block":
        dict(sees=lambda key, row, start_m: key <= row - start_m),
    "the positions of rows and keys are those in the sequence, rows and keys, not tl.arange alone":
        dict(sees=lambda key, row, start_m: key % 32 <= row - start_m),
    "every query of the block sees up to its last one: compare with rows[:, None]":
        dict(sees=lambda key, row, start_m: key <= start_m + 15),
    "what the mask hides has a finite score, and takes part where others are lower: give it float('-inf')":
        dict(hidden=-1e6),
    "what the mask hides has a score of 0, and takes part: give it float('-inf')": dict(hidden=0.0),
    "the factor of what came before takes exp2, and p exp: use tl.exp in both": dict(rescale_base=2.0),
    "the factor of what came before is exp(m - m_new), not exp(m_new - m)": dict(rescale_base=1 / math.e),
    "p takes exp2, and the factor of what came before exp: use tl.exp in both": dict(base=2.0, rescale_base=math.e),
    "m_new is the largest score of the tile alone: the larger of it and m": dict(larger=lambda m, own: own),
    "tl.min takes the smallest score: m is the largest": dict(largest=torch.amin),
    "acc is divided by l in each round: that comes once, behind the loop": dict(divide_each=True),
    "this takes k and v of head % GROUP_SIZE, instead of //": dict(kv_head=lambda head, group: head % group),
    f"neither acc nor l {UNRESCALED.replace(' not', '')}": dict(rescale_l=False, rescale_acc=False),
    f"l {UNRESCALED}": dict(rescale_l=False),
    f"acc {UNRESCALED}": dict(rescale_acc=False),
    "m keeps its first value: m = m_new belongs at the end of the loop": dict(keep_m=False),
    "acc holds the last tile only: add to what came before": dict(keep_acc=False),
    "acc is not divided by l": dict(normalised=False),
    "tl.exp2 is a power of 2: use tl.exp, or multiply the scores by 1 / ln(2)": dict(base=2.0),
    "p is multiplied with k instead of v": dict(values_are_keys=True),
}  # fmt: skip
D, SCALE = 64, 0.3  # of heads, in all cases; the scale is not D**-0.5
SCALE_MISTAKES = {  # words: the power of the scale
    "the scale is applied twice: it is in the scores already": 2,
    "the scale is missing: the scores are q k^T * scale": 0,
    "the scale is an argument, not always HEAD_DIM**-0.5": math.log(D**-0.5, SCALE),
}


def kernel_mistakes(q, k, v, block_m, block_n, scale):
    for words, power in SCALE_MISTAKES.items():
        yield kernel_like(q, k, v, block_m, block_n, scale**power), words
    for words, changes in KERNEL_MISTAKES.items():
        # A head that is not there is told by what is read outside of k.
        if q.shape[1] > k.shape[1] or "kv_head" not in changes:
            found = kernel_like(q, k, v, block_m, block_n, scale, **changes)
            if not found.isnan().all():  # as of anything that overflows
                yield found, words


def check_attention_kernel(exercise):
    d, scale = D, SCALE
    for seq_len, heads, kv_heads, block_m, block_n, size, v_size, hint in (
        (64, 1, 1, 16, 32, 2, 1, "try without the mask, then with it"),
        (37, 4, 2, 16, 32, 2, 1, "right for one head and full tiles: what of heads, and of the last tiles?"),
        (21, 6, 2, 16, 16, 2, 1, "right for groups of two heads: what of those of three?"),
        (50, 2, 2, 32, 16, 2, 1, "right for tiles of more keys than queries: what of those of more queries?"),
        (32, 1, 1, 16, 16, 200, 1,
         "right for small scores: exp overflows unless the largest score is subtracted first"),
        (32, 1, 1, 16, 16, 3e7, 1, "right for small scores: what the mask hides needs the score float('-inf')"),
        (32, 1, 1, 16, 16, 2, 1e5, "right for small values: is acc kept in fp16, whose largest number is 65504?"),
    ):  # fmt: skip

        def explain(fault, kv_heads=kv_heads, left=seq_len % block_n):
            if fault.tensor in "kv" and fault.lanes[0].min() < left:
                return f"{fault.tensor} has {kv_heads} heads: this program's is head // GROUP_SIZE"
            return "is its mask (rows < seq_len)[:, None], or for k and v (keys < seq_len)[:, None]?"

        q = randn(seq_len, heads, d) * size
        k, v = (randn(seq_len, kv_heads, d) for _ in range(2))
        v, (o, behind) = v * v_size, unwritten(seq_len, heads, d)
        launch(
            exercise.attention_kernel, (heads, llama.cdiv(seq_len, block_m)),
            q, k, v, o, *q.stride()[:2], *k.stride()[:2], seq_len, scale,
            GROUP_SIZE=heads // kv_heads, HEAD_DIM=d, BLOCK_M=block_m, BLOCK_N=block_n, explain=explain,
            share="a program stores the queries of its block, rows, for its head",
        )  # fmt: skip
        name = f"o for {seq_len} tokens, {heads} heads on {kv_heads}, tiles {block_m} x {block_n}"
        exact = [t.double() for t in (q, k, v)]
        mistakes = kernel_mistakes(*exact, block_m, block_n, scale)
        if o.isnan().all() and size == 2:
            hint = "before the first tile m is -inf: exp(m - m_new) is then 0, and exp(m_new - m) infinite"
        expect_close(name, o, kernel_like(*exact, block_m, block_n, scale), 1e-4 * v_size, hint, mistakes, behind)


# ----------------------------------------------------------------------------------------------------------------------
# Gradients


def gradients_like(
    q, k, v, o, lse, o_grad, scale,
    hidden=1, normaliser=lambda scores, lse: lse, score_scale=1, delta=lambda o, o_grad: (o * o_grad).sum(dim=1),
    q_scale=1, k_scale=1, v_scale=0, from_p=True, transposed=True, with_p=True, earlier=False, base=math.e,
    columns=(slice(None), None), rows=slice(None), visited=True,
):  # fmt: skip
    """What attention_gradients returns, right unless told otherwise; *_scale are exponents of the scale.

    Keys from `hidden` behind the query on have no part, nor have queries other than rows and what is not visited.
    """
    scores = q @ k.T * scale**score_scale
    p = base ** (scores - normaliser(scores, lse[:, None]))
    p = p.triu() if earlier else p.tril(hidden - 1)
    p = p * visited
    score_grad = (p if with_p else visited) * (o_grad @ v.T - delta(o, o_grad)[columns])
    of_v = p if from_p else score_grad
    score_grad, of_v, q, o_grad = [t[rows] for t in (score_grad, of_v, q, o_grad)]
    if transposed:
        of_k, of_v = score_grad.T @ q, of_v.T @ o_grad
    else:
        of_k, of_v = score_grad @ q, of_v @ o_grad
    return score_grad @ k * scale**q_scale, of_k * scale**k_scale, of_v * scale**v_scale


GRADIENT_MISTAKES = {  # words: what of gradients_like they change
    "the causal mask is missing: p is 0 where a key comes after its query": dict(hidden=10**6),
    "the mask is off by one, and a query does not see itself: .triu(1)": dict(hidden=0),
    "the mask is off by one, and a query sees its successor: .triu(1)": dict(hidden=2),
    "the mask is the wrong way round: p is 0 where a key comes after its query": dict(earlier=True),
    "p is not normalised by lse: exp(score - lse)":
        dict(normaliser=lambda scores, lse: 0.0),
    "p is not normalised by lse: this is exp(score - max)":
        dict(normaliser=lambda scores, lse: scores.max(dim=1, keepdim=True).values),
    "lse belongs to the queries: lse[:, None], not lse[None, :]": dict(normaliser=lambda scores, lse: lse.T),
    EXP2: dict(base=2.0),
    "the scale is missing from the scores": dict(score_scale=0),
    "delta is missing": dict(delta=lambda o, o_grad: torch.zeros(len(o)).to(o)),
    "delta is the sum of o * o_grad, not of o_grad": dict(delta=lambda o, o_grad: o_grad.sum(dim=1)),
    "delta is a sum over the dimensions of a row: sum(dim=1)":
        dict(delta=lambda o, o_grad: (o * o_grad).sum().expand(len(o))),
    "delta is a sum, not a mean": dict(delta=lambda o, o_grad: (o * o_grad).mean(dim=1)),
    "delta is subtracted": dict(delta=lambda o, o_grad: -(o * o_grad).sum(dim=1)),
    "delta belongs to the queries: delta[:, None], not delta[None, :]": dict(columns=None),
    "p is missing from score_grad": dict(with_p=False),
    "q_grad lacks the scale": dict(q_scale=0),
    "k_grad lacks the scale": dict(k_scale=0),
    "the scale is applied twice": dict(q_scale=2, k_scale=2),
    "v_grad has no scale in it: p^T o_grad": dict(v_scale=1),
    "v_grad comes from p, not from score_grad": dict(from_p=False),
    "the gradients of k and v sum over the queries: transpose p and score_grad": dict(transposed=False),
}  # fmt: skip


def gradient_mistakes(index, arguments, wanted, visited=True):
    """Of the gradient of number index; visited: see gradients_like."""
    q, k, v, o, lse, o_grad, scale = arguments
    for words, changes in GRADIENT_MISTAKES.items():
        yield gradients_like(*arguments, **changes, visited=visited)[index], words
    yield from ((other, "the order is (q_grad, k_grad, v_grad)") for other in wanted)
    yield gradients_like(*arguments[:-1], q.shape[1] ** -0.5)[index], "the scale is an argument, not always d**-0.5"
    yield gradients_like(q, k, v, v, lse, o_grad, scale)[index], "delta is the sum of o * o_grad, not of v * o_grad"
    p = torch.exp(q @ k.T * scale - lse[:, None]).tril()
    score_grad = p * (o_grad @ v.T - (o * o_grad).sum(dim=1)[:, None])
    yield score_grad @ q * scale, "q_grad multiplies score_grad with k, not with q"
    yield score_grad.T @ k * scale, "k_grad multiplies score_grad^T with q, not with k"
    yield p.T @ o, "v_grad multiplies p^T with o_grad, not with o"


def check_attention_gradients(exercise):
    for seq_len, d, scale in ((20, 8, 0.3), (13, 5, 0.7)):
        q, k, v, o_grad = (randn(seq_len, d).double() for _ in range(4))
        scores = (q @ k.T * scale).masked_fill(torch.ones(seq_len, seq_len, device=DEVICE).triu(1).bool(), -math.inf)
        o, lse = torch.softmax(scores, dim=1) @ v, torch.logsumexp(scores, dim=1)
        given = dict(q=q, k=k, v=v, o=o, lse=lse, o_grad=o_grad)
        with mock.patch.object(torch.autograd, "grad", wraps=torch.autograd.grad) as grad, unchanged(**given), \
             mock.patch.object(torch.autograd, "backward", wraps=torch.autograd.backward) as backward:  # fmt: skip
            got = exercise.attention_gradients(**given, scale=scale)
            other_lse = exercise.attention_gradients(**given | {"lse": lse + 1.0}, scale=scale)
        arguments = (*given.values(), scale)
        wanted = gradients_like(*arguments)
        for index, name, hint in (
            (2, "v_grad", "v_grad needs p only: exp(score - lse), 0 where a key comes after its query"),
            (0, "q_grad", "v_grad is right, so p is; score_grad needs delta, and q_grad the scale"),
            (1, "k_grad", "q_grad is right; k_grad is score_grad^T q * scale"),
        ):
            expect_close(name, got[index], wanted[index], 1e-9, hint, gradient_mistakes(index, arguments, wanted))
        expect(not grad.called and not backward.called, "the gradients are right, but they are PyTorch's autograd's: "
               "write the five products yourself, with p from lse")  # fmt: skip
        expect_close("v_grad for lse + 1", other_lse[2], wanted[2] / math.e, 1e-9, "lse is not used: p is exp(score - "
                     "lse), without another sum over the row, as softmax and autograd take it")  # fmt: skip


def check_key_value_gradient_kernel(exercise):
    for seq_len, d, scale, block_m, block_n in ((37, 32, 0.7, 16, 32), (40, 16, 0.3, 16, 16), (50, 16, 0.2, 32, 16)):
        q, k, v, o_grad = (randn(seq_len, d) for _ in range(4))
        *exact, exact_o_grad = (t.double() for t in (q, k, v, o_grad))
        scores = (exact[0] @ exact[1].T * scale).masked_fill(torch.ones_like(q @ k.T).triu(1).bool(), -math.inf)
        o, lse = torch.softmax(scores, dim=1) @ exact[2], torch.logsumexp(scores, dim=1)
        delta, outputs = (o * exact_o_grad).sum(dim=1), [unwritten(seq_len, d) for _ in range(2)]
        launch(exercise.key_value_gradient_kernel, (llama.cdiv(seq_len, block_n),), q, k, v, o_grad, lse.float(),
               delta.float(), *(grad for grad, _ in outputs), seq_len, scale, HEAD_DIM=d, BLOCK_M=block_m,
               BLOCK_N=block_n, share="a program stores the gradients of its block of keys")  # fmt: skip
        if not outputs[0][0].any() and not outputs[1][0].any():
            raise NothingStored("k_grad and v_grad are 0, what they began with")
        arguments = (*exact, o, lse, exact_o_grad, scale)
        wanted, numbers = gradients_like(*arguments), torch.arange(seq_len, device=DEVICE)
        visited = numbers[:, None] >= numbers[None, :] // block_n * block_n // block_m * block_m
        for index, name, hint in (
            (2, "v_grad", "v_grad adds p^T o_grad of each block of queries"),
            (1, "k_grad", "v_grad is right, so p is; k_grad adds score_grad^T q * scale of each block of queries"),
        ):
            case, (got, behind) = f"{name} for {seq_len} tokens, tiles {block_m} x {block_n}", outputs[index - 1]
            mistakes = [(wanted[3 - index], "k_grad and v_grad are swapped")]
            mistakes += gradient_mistakes(index, arguments, wanted, visited)
            last = (seq_len - 1) // block_m * block_m
            part = gradients_like(*arguments, rows=slice(last, None))[index]
            mistakes += [(part, "this is what the last block of queries adds: +=, not =")]
            expect_close(case, got, wanted[index], 1e-4, hint, mistakes, behind)


CHECKS = (
    check_fold,
    check_key_blocks,
    check_attention_kernel,
    check_attention_gradients,
    check_key_value_gradient_kernel,
)
TASKS = {check.__name__.removeprefix("check_"): check for check in CHECKS}
COMPILED = {"attention_kernel", "key_value_gradient_kernel"}
