"""Every public function on shapes, memory layouts and types that hypothesis draws is as accurate as PyTorch.

The rule is that of test_kernels.py: errors against float64 at most twice those of plain PyTorch in the same precision,
plus a small atol. A layout is an order of the dimensions in memory, with gaps between rows and elements.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import tiny_llama_v3 as llama
from tests.core import test_kernels

pytestmark = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TYPES = st.sampled_from(test_kernels.ALL_DTYPES)
# Triton's interpreter multiplies the bit patterns of bf16 matrices: kernels with a tl.dot need a GPU for it.
DOT_TYPES = TYPES if ON_GPU else st.sampled_from([torch.float32, torch.float16])
LONG = 129 if ON_GPU else 65  # tokens, more than fit in two tiles
SIZES = st.integers(1, 9) | st.sampled_from([31, 32, 33, 64, 65])
VOCABULARIES = st.integers(1, 70) | st.sampled_from([1000, 8192, 8193, 16384])

fast = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.generate],  # to shrink a failure takes many minutes of the interpreter's time
)


@st.composite
def laid_out(draw, shape, dtype, scale=1.0):
    """Draw random values of this shape, somehow in memory; whatever lies around them is NaN."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    values = (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)
    order = draw(st.permutations(range(len(shape))))
    gaps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in shape]
    lengths = [shape[dim] * gap for dim, gap in zip(order, gaps, strict=True)]
    padding = draw(st.sampled_from([0, 0, 1, 16]))
    holder = torch.full([*lengths[:-1], lengths[-1] + padding], float("nan"), dtype=dtype, device=DEVICE)
    view = holder[tuple(slice(0, length, gap) for length, gap in zip(lengths, gaps, strict=True))]
    return view.permute([order.index(dim) for dim in range(len(shape))]).copy_(values)


@st.composite
def expanded(draw, shape, dtype):
    """Draw the same, or one value for some of the dimensions, which then have the stride 0."""
    source = draw(laid_out([n if draw(st.booleans()) else 1 for n in shape], dtype))
    return source.expand(shape)


def draw_shape(draw, cols=SIZES):
    """Draw up to three dimensions."""
    return [*draw(st.lists(st.integers(1, 5), max_size=2)), draw(cols)]


def draw_weight(draw, shape, dtype):
    """Draw a matrix whose products are as large as what it multiplies."""
    return draw(laid_out(shape, dtype, shape[1] ** -0.5))


# --- Each of these draws a call: what is called, its reference, their inputs, the gradients of the outputs, the type.


def rmsnorm(draw):
    dtype, shape, with_branch = draw(TYPES), draw_shape(draw, st.integers(1, 300)), draw(st.booleans())
    branch = draw(expanded(shape, dtype)) if with_branch else None
    outputs = slice(2 if with_branch else 1)  # without a branch the residual is the input itself

    def calling(norm):
        return lambda *tensors: norm(*tensors, 1e-5)[outputs]

    inputs = [draw(laid_out(shape, dtype)), branch, draw(laid_out(shape[-1:], dtype))]
    upstream = [draw(expanded(shape, dtype)) for _ in range(2)]
    return calling(llama.triton_rmsnorm), calling(llama.torch_rmsnorm), inputs, upstream, dtype


def linear(draw):
    dtype, (*rows, inner), outer = draw(TYPES), draw_shape(draw), draw(SIZES)
    inputs = [draw(expanded([*rows, inner], dtype)), draw(laid_out([outer, inner], dtype))]
    return llama.triton_linear, F.linear, inputs, [draw(expanded([*rows, outer], dtype))], dtype


def swiglu(draw):
    dtype, (*rows, hidden), ffn = draw(TYPES), draw_shape(draw), draw(st.integers(1, 40))
    weights = [draw_weight(draw, shape, dtype) for shape in ([2 * ffn, hidden], [hidden, ffn])]
    inputs = [draw(laid_out([*rows, hidden], dtype)), *weights]
    ours = functools.partial(llama.triton_swiglu, bugs=draw(st.sampled_from([(), ("triton_matmul_swiglu",)])))
    return ours, llama.torch_swiglu, inputs, [draw(expanded([*rows, hidden], dtype))], dtype


def attention(draw):
    dtype, batch, hidden = draw(DOT_TYPES), draw(st.integers(1, 2)), draw(st.integers(1, 20))
    seq_len = draw(st.sampled_from([1, 2, 15, 33, 64, LONG]))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    heads, head_dim = kv_heads * group, 2 * draw(st.sampled_from([1, 3, 8, 10, 16, 33, 64]))
    shapes = [(heads + 2 * kv_heads) * head_dim, hidden], [hidden, heads * head_dim]
    x = draw(laid_out([batch, seq_len, hidden], dtype))
    others = *llama.rope_tables(seq_len, head_dim, DEVICE), heads, kv_heads

    def calling(function, **bugs):
        return lambda *tensors: function(*tensors, *others, **bugs)

    ours = calling(llama.triton_attention, bugs=draw(st.sampled_from([(), ("noncontiguous_kv",)])))
    inputs = [x, *(draw_weight(draw, shape, dtype) for shape in shapes)]
    return ours, calling(llama.torch_attention), inputs, [draw(expanded(x.shape, dtype))], dtype


def cross_entropy(draw):
    dtype, shape = draw(TYPES), [draw(st.integers(1, 5)), *draw_shape(draw, VOCABULARIES)]
    logits = draw(laid_out(shape, dtype, 4.0) | expanded(shape, dtype))
    *rows, vocab = shape
    targets = (torch.arange(torch.Size(rows).numel(), device=DEVICE) * 7919 % vocab).view(rows)
    # What is ignored may be a token that exists, but for the last one.
    ignored = draw(st.sampled_from([index for index in (-100, -1, 0, 1) if index != targets.flatten()[-1]]))
    targets.flatten()[:-1:3] = ignored

    def reference(x):  # the loss in fp32 or better, as autocast has it
        return llama.torch_cross_entropy(x if x.dtype == torch.float64 else x.float(), targets, ignored)

    def ours(x):  # with a copy, in the same layout unless elements of it lie in one place
        place = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=DEVICE)
        copy = x.clone() if 0 in x.stride() else test_kernels.CopyInto.apply(x, place)
        return llama.triton_cross_entropy(copy, targets, ignored)

    return ours, reference, [logits], [torch.tensor(draw(st.sampled_from([1.0, -2.5, 0.0])), device=DEVICE)], dtype


def embedding(draw):
    dtype, vocab, dim = draw(TYPES), draw(st.integers(1, 30)), draw(st.integers(1, 70))
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    tokens = draw(laid_out(shape, torch.float32, 1e3)).long().remainder(vocab)
    tokens = tokens.to(draw(st.sampled_from([torch.int32, torch.int64])))
    tokens = torch.stack([tokens, tokens], dim=-1)[..., 0]  # with a gap after each
    ours, reference = (functools.partial(function, tokens) for function in (llama.triton_embedding, F.embedding))
    return ours, reference, [draw(laid_out([vocab, dim], dtype))], [draw(expanded([*shape, dim], dtype))], dtype


def assert_accurate(call):
    # Where terms of about 1 cancel to nothing, as in attention to a single key, their rounding remains.
    test_kernels.assert_as_accurate_as_torch(*call, factor=2, floor=0.1)


@pytest.mark.parametrize("operation", [rmsnorm, linear, swiglu, cross_entropy, embedding])
@fast
@given(data=st.data())
def test_operation(operation, data):
    assert_accurate(operation(data.draw))


@settings(fast, max_examples=6)  # the interpreter takes seconds for a pass of attention
@given(st.data())
def test_attention(data):
    with pytest.MonkeyPatch.context() as patch:  # the backward pass is one launch, or two
        patch.setattr(llama, "FUSED_BACKWARD_SEQ_LEN", data.draw(st.sampled_from([0, 10**6])))
        assert_accurate(attention(data.draw))


def test_split():
    """The upper half is the nearest bf16 number (halves away from zero), and both together are the number."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=DEVICE) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        bits = upper + lower
        weights = bits.view(torch.float32)
        rounded, remainder = llama.split_fp32(weights)
        joined, known = llama.join_fp32(rounded, remainder), ~weights.isnan()
        assert torch.equal(joined.view(torch.int32)[known], bits[known])
        nearest = ((bits + 0x8000).view(torch.float32) if lower == 0x8000 else weights).bfloat16()
        assert torch.equal(rounded[known], nearest[known])
        assert joined[~known].isnan().all() and rounded[~known].isnan().all()


@fast
@given(st.data(), st.booleans())
def test_adamw(data, low_precision):
    """As torch.optim.AdamW in float64, whatever the shapes, the learning rates and the scale of the gradients."""
    shapes = data.draw(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=2), min_size=1, max_size=5))
    values = [data.draw(laid_out(shape, torch.float32)).contiguous() for shape in shapes]
    ours, theirs = (torch.nn.ParameterList(v.to(dtype) for v in values) for dtype in (torch.float32, torch.float64))
    optimizer = llama.FlatAdamW(ours, lr=1e-2, low_precision=low_precision)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.01)
    for p in ours.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.reset(values)  # forgets the step
    for lr in data.draw(st.lists(st.sampled_from([1e-2, 5e-2]), min_size=1, max_size=5)):
        optimizer.lr.fill_(lr)
        reference.param_groups[0]["lr"] = lr
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad = q.grad = None
            if data.draw(st.integers(0, 3)):  # now and then it has none, and stays as it is
                p.grad = data.draw(laid_out(p.shape, p.dtype, data.draw(st.sampled_from([1e-6, 1.0, 1e4]))))
                q.grad = p.grad.double()
        optimizer.step()
        reference.step()
    for p, weight, q in zip(ours.parameters(), optimizer.weights(), theirs.parameters(), strict=True):
        torch.testing.assert_close(weight.double(), q.detach(), rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(p.detach().float(), weight, rtol=2**-8 if low_precision else 0, atol=0)
