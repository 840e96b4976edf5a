"""Likely mistakes in the exercises: each fails its own task, with the hint that names it."""

import ast
import functools
import re
from typing import NamedTuple

import pytest

import tiny_llama_v3 as llama
from exercises import check
from exercises.checks import ON_GPU

pytestmark = [
    pytest.mark.skipif(llama.triton is None, reason="Triton is not installed"),
    pytest.mark.skipif(ON_GPU, reason="mistakes are looked for in the interpreter; a test of check.py compiles some"),
]


class Mistake(NamedTuple):
    """A small edit of the solution."""

    task: str
    old: str
    new: str
    told: str  # a pattern of the words that name it


LOAD = "x = tl.load(x_ptr + row * stride_row + cols, mask=cols < n_cols, other=0.0).to(tl.float32)"
SUM, FIRST = "square_sum += tl.sum(x * x, axis=0)", LOAD + "\n        square_sum"
SECOND = LOAD + "\n        weight"
STORED = "tl.store(y_ptr + row * n_cols + cols, x * rstd * weight, mask=cols < n_cols)"
ROOT = "rstd = 1.0 / tl.sqrt(square_sum / n_cols + eps)"


def edit(lines, old, new):
    """Lines of the solution as they are, and with an edit within them."""
    return lines, lines.replace(old, new)


RMSNORM = {
    "no mask on the first load": (*edit(FIRST, ", mask=cols < n_cols, other=0.0", ""), "its mask is cols < n_cols"),
    "no other": (*edit(FIRST, ", other=0.0", ""), r"lacks other=0\.0"),
    "no mask on the second load": (*edit(SECOND, ", mask=cols < n_cols, other=0.0", ""), "line 18 reads offset"),
    "no mask on the weight": ("weight_ptr + cols, mask=cols < n_cols, other=0.0", "weight_ptr + cols", "of weight,"),
    "no mask on the store": (STORED, STORED.replace(", mask=cols < n_cols", ""), "cols, cols < n_cols"),
    "no fp32": (LOAD, LOAD.replace(".to(tl.float32)", ""), r"overflows in fp16: \.to\(tl\.float32\)"),
    "divided by the block": (ROOT, ROOT.replace("n_cols", "BLOCK_SIZE"), "divided by BLOCK_SIZE, or a mult"),
    "not divided": (ROOT, ROOT.replace(" / n_cols", ""), "the sum is not divided by n_cols"),
    "eps outside the root": (ROOT, "rstd = 1.0 / (tl.sqrt(square_sum / n_cols) + eps)", "eps is outside the root"),
    "eps added at last": (ROOT, "rstd = 1.0 / tl.sqrt(square_sum / n_cols) + eps", "eps is outside the root"),
    "no eps": (ROOT, ROOT.replace(" + eps", ""), "eps is missing"),
    "no weight": (STORED, STORED.replace(" * weight", ""), "the weight is missing"),
    "mean of |x|": (SUM, "square_sum += tl.sum(tl.abs(x), axis=0)", r"the mean of \|x\|"),
    "mean of x": (SUM, "square_sum += tl.sum(x, axis=0)", "the mean of x, not of"),
    "multiplied with the root": (ROOT, ROOT.replace("1.0 / ", ""), "multiplied with the root"),
    "no root": (ROOT, "rstd = 1.0 / (square_sum / n_cols + eps)", "the root is missing"),
    "no x": (STORED, STORED.replace("x * rstd", "rstd"), "x is missing"),
    "only the last block": (SUM, SUM.replace("+=", "="), r"the last block only: add to it with \+="),
    "row stride": (LOAD, LOAD.replace("stride_row", "n_cols"), r"rows of x begin stride_row elements apart"),
    "row stride in the first loop": (*edit(FIRST, "stride_row", "n_cols"), "line 13 .*rows of x begin stride_row"),
    "row stride in the second loop": (*edit(SECOND, "stride_row", "n_cols"), "line 18 .*rows of x begin stride_row"),
    "x's stride for y": (STORED, STORED.replace("row * n_cols", "row * stride_row"), "y is stored with x's stride"),
    "only row 0": (LOAD, LOAD.replace("row * stride_row + ", ""), "every program reads row 0"),
    "a weight for each row": ("weight_ptr + cols", "weight_ptr + row * n_cols + cols", "weight has one row"),
    "nothing stored": (STORED, "pass", "nothing is stored in y"),
    "square of the sum": (SUM, "square_sum += tl.sum(x, axis=0) * tl.sum(x, axis=0)", "this is the square of the sum"),
    "divided twice": (SUM, SUM + " / n_cols", "divided by n_cols twice"),
    "other=1": (*edit(FIRST, "other=0.0", "other=1.0"), "counts as 1"),
    "not scaled": (STORED, STORED.replace(" * rstd", ""), "not divided by the root"),
    "weight of the row": ("weight_ptr + cols, mask=cols < n_cols, other=0.0", "weight_ptr + row", "a weight for each"),
    "row 0 in the second loop": (*edit(SECOND, "row * stride_row + ", ""), "the second load reads row 0"),
    "x not loaded again": (SECOND, "weight", "the last block of the first loop"),
    "first block only": (*edit(FIRST, "cols < n_cols", "cols < BLOCK_SIZE"), "the first block only"),
    "a root of the negative": (ROOT, "rstd = 1.0 / tl.sqrt(-square_sum)", "NaN, of a computation"),
}  # fmt: skip
LINES = {
    "block or ceil": ("len({index * stride * itemsize // line for index in range(block_size)})",
                      "min(block_size, -(-block_size * stride * itemsize // line))", "nothing behind it is touched"),
    "no stride": ("index * stride * itemsize", "index * itemsize", "the stride is missing"),
    "no itemsize": ("index * stride * itemsize", "index * stride", "itemsize is missing"),
    "always 128": ("itemsize // line", "itemsize // 128", "not always 128"),
    "all lines between": ("len({index * stride * itemsize // line for index in range(block_size)})",
                          "-(-block_size * stride * itemsize // line)", "the lines between are not touched"),
    "rounded down": ("len({index * stride * itemsize // line for index in range(block_size)})",
                     "min(block_size, block_size * itemsize // line * stride)", "touched in part counts"),
}  # fmt: skip
MOVED = {
    "the mean writes a matrix": ("2 + 1 + 2 + 2", "2 + 2 + 2 + 2", "the mean reads a matrix, and writes a column"),
    "elements": ("n_rows * n_cols * itemsize", "n_rows * n_cols", "these are elements"),
    "x only": ("2 * matrix  #", "matrix  #", "y goes out as well"),
    "x twice": ("2 * matrix  #", "3 * matrix  #", "needs x once"),
    "swapped": ("return fused, separate", "return separate, fused", r"the order is \(fused, separate\)"),
    "what is read only": ("2 + 1 + 2 + 2", "1 + 1 + 1 + 1", "each of the three that write a matrix also reads one"),
}
COUNTS = {
    "naive_bytes": {
        "one row of weight": ("(3 * inner + 3) * itemsize", "(2 * inner + 3) * itemsize", "two rows of weight"),
        "no stores": ("(3 * inner + 3) * itemsize", "3 * inner * itemsize", "stores three elements as well"),
        "one program": ("rows * cols * (3", "(3", "the bytes of one program"),
        "elements": ("(3 * inner + 3) * itemsize", "(3 * inner + 3)", "these are elements"),
    },
    "least_bytes": {
        "a coincidence": ("2 * cols * inner +", "2 * rows * cols +", "weight has 2 . cols rows of inner"),
        "a constant": ("(rows * inner + 2 * cols * inner + 3 * rows * cols) * itemsize", "35858648", "is 35858648"),
        "rows in the weight": ("2 * cols * inner +", "2 * cols * rows +", "weight has 2 . cols rows of inner"),
        "one weight": ("2 * cols * inner + 3", "cols * inner + 3", "weight has 2 . cols rows"),
        "hidden alone": ("3 * rows * cols) * itemsize", "rows * cols) * itemsize", "gate_up is stored as well"),
        "nothing stored": (" + 3 * rows * cols)", ")", "what is stored moves as well"),
    },
    "matmul_flop": {
        "one product": ("2 * rows * inner * 2 * cols", "2 * rows * inner * cols", "there are two products"),
        "rows for inner": ("rows * inner * 2", "rows * rows * 2", "each element of each takes inner"),
        "three products": ("2 * rows * inner * 2 * cols", "2 * rows * inner * 3 * cols", "the third product"),
    },
}
SILU = "tl.store(out_ptr + offsets, gate * tl.sigmoid(gate) * up, mask=mask)"
OFFSETS = "offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)"
FORWARD_LOADS = """tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out"""


def silu(new):
    return SILU, SILU.replace("gate * tl.sigmoid(gate) * up", new)


SILU_MUL = {
    "unmasked store": (SILU, SILU.replace(", mask=mask", ""), "leave out what lies beyond the end: tl.store"),
    "sigmoid": (*silu("tl.sigmoid(gate) * up"), r"this is sigmoid\(gate\) \* up"),
    "gate and up swapped": (*silu("up * tl.sigmoid(up) * gate"), "gate and up are swapped"),
    "no up": (*silu("gate * tl.sigmoid(gate)"), "up is missing"),
    "no activation": (*silu("gate * up"), "the sigmoid is missing"),
    "relu": (*silu("tl.maximum(gate, 0.0) * up"), "this is relu"),
    "no minus": (*silu("gate / (1.0 + tl.exp(gate)) * up"), "the exponent lacks its minus"),
    "no program": (OFFSETS, OFFSETS.replace("tl.program_id(0) * BLOCK_SIZE + ", ""), "block begins at tl.program_id"),
    "no block size": (OFFSETS, OFFSETS.replace("tl.program_id(0) * BLOCK_SIZE", "tl.program_id(0)"),
                      r"block begins at tl.program_id\(0\) \* BLOCK_SIZE"),
    "no fp32": (FORWARD_LOADS, FORWARD_LOADS.replace(".to(tl.float32)", ""),
                r"ValueError in line \d+ of .*is \.to\(tl\.float32\) missing"),
    "block of 1024": (OFFSETS, OFFSETS.replace("BLOCK_SIZE", "1024"), "begins at tl.program_id"),
    "loads without a mask": (", mask=mask, other=0.0).to", ").to", "beyond the end: tl.load"),
    "block at one address": (SILU, SILU.replace("out_ptr + offsets", "out_ptr"), "a block is stored at one address"),
    "in fp16": (*silu("(gate.to(tl.float16) * tl.sigmoid(gate).to(tl.float16)).to(tl.float32) * up"),
                "elements of out for 256 elements in float32"),
}  # fmt: skip
SLOPE, OF_UP = "(s + gate * s * (1.0 - s))", "out_grad * gate * s, mask"
BACKWARD = {
    "no second term": (SLOPE, "s", "lacks its second term"),
    "no first term": (SLOPE, "(gate * s * (1.0 - s))", "lacks its first term"),
    "slope of the sigmoid": (SLOPE, "(s * (1.0 - s))", "the derivative of the sigmoid"),
    "minus": (SLOPE, "(s - gate * s * (1.0 - s))", "with a plus"),
    "no gate": (SLOPE, "(s + s * (1.0 - s))", "gate is missing from the derivative"),
    "no s": (SLOPE, "(s + gate * (1.0 - s))", "s is missing from the derivative"),
    "no up": ("out_grad * up * " + SLOPE, "out_grad * " + SLOPE, "up is missing"),
    "no out_grad": ("out_grad * up * " + SLOPE, "up * " + SLOPE, "out_grad is missing"),
    "sigmoid for silu": (OF_UP, "out_grad * s, mask", "sigmoid instead of silu"),
    "up in the gradient of up": (OF_UP, "out_grad * up * gate * s, mask", "has no up in it"),
    "added to what is there": (OF_UP, "tl.load(up_grad_ptr + offsets, mask=mask) + " + OF_UP, "before anything is"),
    "one pointer": ("tl.store(up_grad_ptr", "tl.store(gate_grad_ptr", "nothing is stored in up_grad, and lines"),
    "loads without a mask": (", mask=mask, other=0.0).to", ").to", "beyond the end: tl.load"),
    "unmasked store": (OF_UP + "=mask", "out_grad * gate * s", "of up_grad.*leave out what lies beyond the end"),
    "up_grad never stored": ("tl.store(up_grad_ptr + offsets, out_grad * gate * s, mask=mask)", "pass",
                             "nothing is stored in up_grad"),
}  # fmt: skip
HYBRID_LINE = "return F.linear(SiluMul.apply(F.linear(x, gate_weight), F.linear(x, up_weight)), down_weight)"


def hybrid(activation):
    return HYBRID_LINE, f"gate, up = F.linear(x, gate_weight), F.linear(x, up_weight)\n    {activation}"


NO_CONTEXT = """class NoContext:
        save_for_backward = lambda *tensors: None
    return F.linear(SiluMul.forward(NoContext, gate, up), down_weight)"""
HYBRID = {
    "no kernel": (*hybrid("return F.linear(F.silu(gate) * up, down_weight)"), "silu_mul_kernel was not launched"),
    "kernel without a Function": (*hybrid(NO_CONTEXT), "x receives no gradient: go through SiluMul.apply"),
    "swapped": (*hybrid("return F.linear(SiluMul.apply(up, gate), down_weight)"), "gate_weight and .* are swapped"),
    "one shape": (*hybrid("return F.linear(SiluMul.apply(gate, up), down_weight).reshape(2, 3, 32)"), "has several"),
    "chunks": (HYBRID_LINE, "gate, up = F.linear(x, torch.cat([gate_weight, up_weight])).chunk(2, dim=-1)\n"
               "    return F.linear(SiluMul.apply(gate, up), down_weight)", "are views of a wider matrix"),
    "residual": (*hybrid("return x + F.linear(SiluMul.apply(gate, up), down_weight)"), "x is added to it"),
    "gate twice": (*hybrid("return F.linear(SiluMul.apply(gate, gate), down_weight)"), "gate_weight is used twice"),
    "detached": (*hybrid("return F.linear(SiluMul.apply(gate.detach(), up), down_weight)"), "gate_weight receives no"),
    "nothing returned": (*hybrid("F.linear(SiluMul.apply(gate, up), down_weight)"), "is it returned"),
    "launched, not used": (*hybrid("SiluMul.apply(gate, up)\n    return F.linear(F.silu(gate) * up, down_weight)"),
                           "silu_mul_backward_kernel was not launched"),
}  # fmt: skip
FOLD_LINE = "return m_new, l * rescale + p.sum(dim=1), acc * rescale[:, None] + p @ values"
FOLD = {
    "l not rescaled": ("l * rescale + p.sum", "l + p.sum", "l after 17 keys.*was not rescaled"),
    "acc not rescaled": ("acc * rescale[:, None] + p @", "acc + p @", "acc after 17 keys.*was not rescaled"),
    "inverted": ("torch.exp(m - m_new)", "torch.exp(m_new - m)", "not exp.m_new - m"),
    "tile's own maximum": ("torch.maximum(m, scores.max(dim=1).values)", "scores.max(dim=1).values",
                           "the largest score of the tile"),
    "old maximum": ("torch.exp(scores - m_new[:, None])", "torch.exp(scores - m.clamp(min=-1e3)[:, None])",
                    "old maximum"),
    "tile alone in l": ("l * rescale + p.sum(dim=1)", "p.sum(dim=1)", "l after 17 keys.*the tile alone"),
    "tile alone in acc": ("acc * rescale[:, None] + p @ values", "p @ values", "acc after 17 keys.*the tile alone"),
    "divided by l": (FOLD_LINE, "l = l * rescale + p.sum(dim=1)\n"
                     "    return m_new, l, (acc * rescale[:, None] + p @ values) / l[:, None]", "comes last of all"),
    "old m returned": ("return m_new, l", "return m, l", "m is the old maximum"),
    "no maximum subtracted": ("torch.exp(scores - m_new[:, None])", "torch.exp(scores)", "maximum is not subtracted"),
    "wrong shape": ("p.sum(dim=1)", "p.sum(dim=1, keepdim=True)", "l after 16 keys has the shape"),
}  # fmt: skip
BLOCKS = {
    "swapped": ("return full, visited - full", "return visited - full, full", r"the order is \(full, masked\)"),
    "all masked": ("return full, visited - full", "return 0, visited", "count them as full"),
    "visited for masked": ("return full, visited - full", "return full, visited", "less the full ones"),
    "last for first": ("(first + 1) // block_n", "(last + 1) // block_n", "which sees the fewest keys"),
    "beyond the end": ("min((block + 1) * block_m, seq_len) - 1", "(block + 1) * block_m - 1", "ends? .*at seq_len"),
    "one too few": ("last // block_n + 1", "last // block_n", "that makes one more"),
    "not causal": ("last // block_n + 1", "-(-seq_len // block_n)", "blocks that no query sees are not visited"),
}
SEES = "keys[None, :] <= rows[:, None]"
ATTENTION = {
    "no mask": (f'tl.where({SEES}, scores, float("-inf"))', "scores", "attention without the causal mask"),
    "not itself": (SEES, SEES.replace("<=", "<"), "a query does not see itself"),
    "its successor": (SEES, SEES + " + 1", "a query sees its successor"),
    "mask upside down": (SEES, SEES.replace("<=", ">="), "the wrong way round"),
    "head 0": ("head // GROUP_SIZE", "0", "every head reads head 0"),
    "head h": ("head // GROUP_SIZE", "head", r"k has 2 heads: this program's is head // GROUP_SIZE"),
    "head % group": ("head // GROUP_SIZE", "head % GROUP_SIZE", "head % GROUP_SIZE, instead"),
    "l not rescaled": ("l = l * rescale +", "l = l +", "; l was not rescaled"),
    "acc not rescaled": ("acc = acc * rescale[:, None] +", "acc = acc +", "; acc was not rescaled"),
    "m kept": ("        m = m_new\n", "", "m keeps its first value"),
    "own scale": ('input_precision="ieee") * scale', 'input_precision="ieee") * HEAD_DIM**-0.5', "not always HEAD_DIM"),
    "fp16 in acc": ("        m = m_new\n", "        m = m_new\n        acc = acc.to(tl.float16).to(tl.float32)\n",
                    "in fp16 or bf16"),
    "p in bf16": ("p.to(v.dtype), v", "p.to(tl.bfloat16), v.to(tl.bfloat16)", "in fp16 or bf16"),
    "finite mask": ('scores, float("-inf"))', "scores, -1e4)", "has a finite score|needs the score"),
    "TF32": ('v, input_precision="ieee")', "v)", "few right digits"),
    "places in the block": (SEES, "tl.arange(0, BLOCK_N)[None, :] <= tl.arange(0, BLOCK_M)[:, None]", "the sequence"),
    "inverted": ("rescale = tl.exp(m - m_new)", "rescale = tl.exp(m_new - m)", "before the first tile m is -inf"),
    "acc overwritten": ("acc * rescale[:, None] + tl.dot", "tl.dot", "the last tile only"),
    "scale twice": ("scores = tl.where", "scores = scores * scale\n        scores = tl.where", "applied twice"),
    "no scale": (', input_precision="ieee") * scale', ', input_precision="ieee")', "the scale is missing"),
    "exp2": ("p = tl.exp(scores - m_new[:, None])\n        rescale = tl.exp(",
             "p = tl.exp2(scores - m_new[:, None])\n        rescale = tl.exp2(", "exp2 is a power of 2"),
    "k for v": ("tl.dot(p.to(v.dtype), v,", "tl.dot(p.to(v.dtype), k,", "multiplied with k instead of v"),
    "no maximum": ("m_new = tl.maximum(m, tl.max(scores, axis=1))", "m_new = tl.zeros_like(m)",
                   "exp overflows unless"),
    "not divided": ("acc / l[:, None], mask", "acc, mask", "acc is not divided by l"),
    "unmasked store": ("acc / l[:, None], mask=(rows < seq_len)[:, None])", "acc / l[:, None])",
                       r"writes .* of o.*is its mask \(rows < seq_len\)"),
    "axis": ("tl.max(scores, axis=1)", "tl.max(scores, axis=0)", r"in line 46 .*rows\[:, None\] is a column"),
}  # fmt: skip
AUTOGRAD = """    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    with torch.enable_grad():
        hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        out = torch.softmax((q @ k.T * scale).masked_fill(hidden, -torch.inf), 1) @ v
    return torch.autograd.grad(out, (q, k, v), o_grad)
"""
GRADIENTS = {
    "no mask": (".masked_fill(future, 0.0)", "", "v_grad.*the causal mask is missing"),
    "no lse": (" - lse[:, None]", "", "p is not normalised by lse"),
    "max for lse": ("scale - lse[:, None]", "scale - (q @ k.T * scale).amax(dim=1, keepdim=True)", "exp.score - max"),
    "lse of the keys": ("lse[:, None]", "lse[None, :]", r"lse\[:, None\], not lse\[None, :\]"),
    "no scale in the scores": ("q @ k.T * scale", "q @ k.T", "the scale is missing from the scores"),
    "no delta": (" - delta[:, None]", "", "delta is missing"),
    "delta of o_grad": ("(o * o_grad).sum(dim=1)", "o_grad.sum(dim=1)", "not of o_grad"),
    "delta added": ("o_grad @ v.T - delta", "o_grad @ v.T + delta", "delta is subtracted"),
    "no p": ("p * (o_grad @ v.T", "(o_grad @ v.T", "p is missing from score_grad"),
    "q_grad without scale": ("score_grad @ k * scale", "score_grad @ k", "q_grad lacks the scale"),
    "k_grad without scale": ("score_grad.T @ q * scale", "score_grad.T @ q", "k_grad lacks the scale"),
    "own scale": ("* scale", "* q.shape[1] ** -0.5", "the scale is an argument"),
    "in fp32": ("torch.exp(q @ k.T * scale - lse[:, None])",
                "torch.exp((q @ k.T * scale - lse[:, None]).float()).double()", "in fp32, where the inputs are fp64"),
    "not transposed": ("p.T @ o_grad", "p @ o_grad", "v_grad.*transpose p and score_grad"),
    "score_grad for p": ("p.T @ o_grad", "score_grad.T @ o_grad", "v_grad comes from p"),
    "another order": ("return score_grad @ k * scale, score_grad.T @ q * scale, p.T @ o_grad",
                      "return p.T @ o_grad, score_grad @ k * scale, score_grad.T @ q * scale", "the order is"),
    "softmax again": ("torch.exp(q @ k.T * scale - lse[:, None])",
                      "torch.softmax((q @ k.T * scale).masked_fill(future, -torch.inf), 1)", "lse is not used"),
    "autograd": ("    future = ", AUTOGRAD + "    future = ", "they are PyTorch's autograd's"),
    "nothing returned": ("return score_grad @ k", "result = score_grad @ k", "what its docstring says"),
}  # fmt: skip
ADDED = 'score_grad.to(q.dtype)), q, input_precision="ieee") * scale'
KEYS_AND_VALUES = {
    "no mask": ("tl.where(keys[None, :] <= rows[:, None], tl.exp(scores - lse[:, None]), 0.0)",
                "tl.exp(scores - lse[:, None])", "the causal mask is missing"),
    "lse of the keys": ("lse[:, None]", "lse[None, :]", "lse belongs to the queries|is a column"),
    "no delta": (" - delta[:, None]", "", "k_grad.*delta is missing"),
    "no scale": (ADDED, ADDED.removesuffix(" * scale"), "k_grad lacks the scale"),
    "scale of the scores": ('tl.trans(k), input_precision="ieee") * scale', 'tl.trans(k), input_precision="ieee")',
                            "the scale is missing from the scores"),
    "the last block": ("v_grad += tl.dot", "v_grad = tl.dot", "the last block of queries adds"),
    "score_grad for p": ("tl.trans(p.to", "tl.trans((p * p).to", "v_grad adds p.T o_grad"),
    "p for score_grad": ("score_grad = p * (p_grad - delta[:, None])", "score_grad = p_grad - delta[:, None]",
                         "p is missing from score_grad"),
    "k for v": ("tl.dot(o_grad, tl.trans(v)", "tl.dot(o_grad, tl.trans(k)", "v_grad is right, so p is"),
    "not transposed": ("tl.dot(tl.trans(p.to(q.dtype)), o_grad", "tl.dot(p.to(q.dtype), o_grad", "need tl.trans"),
    "swapped": ("tl.store(k_grad_ptr + k_offsets, k_grad", "tl.store(k_grad_ptr + k_offsets, v_grad",
                "k_grad and v_grad are swapped"),
    "unmasked store": ("v_grad, mask=k_mask", "v_grad", "writes .* of v_grad"),
}  # fmt: skip
BY_TASK = {
    "rmsnorm_kernel": RMSNORM, "memory_lines": LINES, "bytes_moved": MOVED, **COUNTS, "silu_mul_kernel": SILU_MUL,
    "silu_mul_backward_kernel": BACKWARD, "hybrid_swiglu": HYBRID, "fold": FOLD, "key_blocks": BLOCKS,
    "attention_kernel": ATTENTION, "attention_gradients": GRADIENTS, "key_value_gradient_kernel": KEYS_AND_VALUES,
}  # fmt: skip
MISTAKES = {f"{task}: {name}": Mistake(task, *edit) for task, usual in BY_TASK.items() for name, edit in usual.items()}

# The mistakes of these tasks take longer than the others; one of each is among the fast tests.
FAST = ("hybrid_swiglu: swapped", "attention_kernel: acc not rescaled", "attention_gradients: no delta")
COSTLY = {MISTAKES[name].task for name in FAST}
CASES = [
    pytest.param(name, marks=[pytest.mark.slow] * (mistake.task in COSTLY and name not in FAST))
    for name, mistake in MISTAKES.items()
]


@functools.cache
def solution_of(task):
    """(exercise, path of its solution)"""
    (exercise,) = (exercise for exercise in check.EXERCISES.values() if task in exercise.checks.TASKS)
    return exercise, check.HERE / exercise.solution


def mistaken(mistake, folder):
    """A file with the mistake, which is in its task's function and nowhere else."""
    _, solution = solution_of(mistake.task)
    code = solution.read_text()
    (node,) = (node for node in ast.parse(code).body if getattr(node, "name", None) == mistake.task)
    right = ast.get_source_segment(code, node)
    assert mistake.old in right and mistake.old != mistake.new
    path = folder / solution.name
    path.write_text(code.replace(right, right.replace(mistake.old, mistake.new)))
    return path


def test_there_are_many_and_of_every_task():
    tasks = {task for name in ("exercise1", "exercise2", "exercise3") for task in check.EXERCISES[name].checks.TASKS}
    assert len(MISTAKES) > 100 and {mistake.task for mistake in MISTAKES.values()} == tasks


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_fails_its_task_and_is_named(name, tmp_path):
    mistake = MISTAKES[name]
    exercise, _ = solution_of(mistake.task)
    verdict = check.judge(mistaken(mistake, tmp_path), exercise.checks, mistake.task)
    assert not verdict.passed and verdict.begun and not verdict.obstacle
    assert re.search(mistake.told, verdict.message), verdict.message
