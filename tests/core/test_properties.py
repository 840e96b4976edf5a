"""On shapes, memory layouts and types that hypothesis draws, operations and optimizer are as accurate as PyTorch.

Norm and loss have tests of each layout in test_kernels.py. Its rule is this one as well: errors against float64 are at
most twice those of plain PyTorch in the same precision, plus a small atol. A layout is an order of the dimensions in
memory, with gaps between rows and elements.
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
    values = torch.randn(shape, generator=generator) * scale
    dims = range(len(shape))
    order = draw(st.permutations(dims))  # of the dimensions in memory
    gaps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in dims]
    lengths = [shape[dim] * gap for dim, gap in zip(order, gaps, strict=True)]
    *outer, row = lengths
    row += draw(st.sampled_from([0, 0, 1, 16]))  # padded
    holder = torch.full([*outer, row], torch.nan, dtype=dtype, device=DEVICE)
    places = [slice(0, length, gap) for length, gap in zip(lengths, gaps, strict=True)]
    view = holder[tuple(places)].permute([order.index(dim) for dim in dims])
    return view.copy_(values.to(dtype))


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


# --- Each of these draws a call: what is called, its reference, the inputs of both, and the gradient of the output.


def linear(draw, dtype):
    *rows, inner = draw_shape(draw)
    outer = draw(SIZES)
    x = draw(expanded([*rows, inner], dtype))
    weight = draw(laid_out([outer, inner], dtype))
    return llama.triton_linear, F.linear, [x, weight], draw(expanded([*rows, outer], dtype))


def swiglu(draw, dtype):
    *rows, hidden = draw_shape(draw)
    ffn = draw(st.integers(1, 40))
    x = draw(laid_out([*rows, hidden], dtype))
    gate_up = draw_weight(draw, [2 * ffn, hidden], dtype)
    down = draw_weight(draw, [hidden, ffn], dtype)
    bugs = draw(st.sampled_from([(), ("triton_matmul_swiglu",)]))
    ours = functools.partial(llama.triton_swiglu, bugs=bugs)
    return ours, llama.torch_swiglu, [x, gate_up, down], draw(expanded(x.shape, dtype))


def embedding(draw, dtype):
    vocab, dim = draw(st.integers(1, 30)), draw(st.integers(1, 70))
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    tokens = draw(laid_out(shape, torch.float32, 1e3)).long().remainder(vocab)
    tokens = tokens.to(draw(st.sampled_from([torch.int32, torch.int64])))
    tokens = torch.stack([tokens, tokens], dim=-1)[..., 0]  # with a gap after each
    weight = draw(laid_out([vocab, dim], dtype))
    functions = (functools.partial(f, tokens) for f in (llama.triton_embedding, F.embedding))
    return *functions, [weight], draw(expanded([*shape, dim], dtype))


def attention(draw, dtype):
    hidden = draw(st.integers(1, 20))
    seq_len = draw(st.sampled_from([1, 2, 15, 33, 64, LONG]))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    heads, head_dim = kv_heads * group, 2 * draw(st.sampled_from([1, 3, 8, 10, 16, 33, 64]))
    x = draw(laid_out([draw(st.integers(1, 2)), seq_len, hidden], dtype))
    qkv_weight = draw_weight(draw, [(heads + 2 * kv_heads) * head_dim, hidden], dtype)
    o_weight = draw_weight(draw, [hidden, heads * head_dim], dtype)
    bugs = draw(st.sampled_from([(), ("noncontiguous_kv",)]))
    others = *llama.rope_tables(seq_len, head_dim, DEVICE), heads, kv_heads
    return (
        lambda *tensors: llama.triton_attention(*tensors, *others, bugs),
        lambda *tensors: llama.torch_attention(*tensors, *others),
        [x, qkv_weight, o_weight],
        draw(expanded(x.shape, dtype)),
    )


def assert_accurate(operation, draw, dtype):
    ours, reference, inputs, upstream = operation(draw, dtype)
    # Where terms of about 1 cancel to nothing, as in attention to a single key, their rounding remains.
    allowance = dict(factor=2, floor=0.1)
    test_kernels.assert_as_accurate_as_torch(ours, reference, inputs, [upstream], dtype, **allowance)


@pytest.mark.parametrize("operation", [linear, swiglu, embedding])
@fast
@given(data=st.data(), dtype=TYPES)
def test_operation(operation, data, dtype):
    assert_accurate(operation, data.draw, dtype)


@settings(fast, max_examples=6)  # the interpreter takes seconds for a pass of attention
@given(st.data(), DOT_TYPES, st.sampled_from([0, 10**6]))
def test_attention(data, dtype, limit):
    with pytest.MonkeyPatch.context() as patch:  # the backward pass is one launch, or two
        patch.setattr(llama, "FUSED_BACKWARD_SEQ_LEN", limit)
        assert_accurate(attention, data.draw, dtype)


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


RATES = st.lists(st.sampled_from([1e-2, 5e-2]), min_size=1, max_size=5)
SHAPES = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=2), min_size=1, max_size=5)


@fast
@given(st.data(), SHAPES, RATES, st.booleans())
def test_adamw(data, shapes, rates, low_precision):
    """As torch.optim.AdamW in float64, whatever the shapes, the learning rates and the scale of the gradients."""
    values = [data.draw(laid_out(shape, torch.float32)).contiguous() for shape in shapes]
    ours, theirs = torch.nn.ParameterList(values), torch.nn.ParameterList(v.double() for v in values)
    optimizer = llama.FlatAdamW(ours, lr=1e-2, low_precision=low_precision)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.01)
    initial = [w.clone() for w in optimizer.weights()]
    for p in ours.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.reset(initial)  # forgets the step
    for lr in rates:
        optimizer.lr.fill_(lr)
        reference.param_groups[0]["lr"] = lr
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad = q.grad = None
            if data.draw(st.integers(0, 3)):  # now and then it has none, and stays as it is
                scale = data.draw(st.sampled_from([1e-6, 1.0, 1e4]))
                p.grad = data.draw(laid_out(p.shape, p.dtype, scale))
                q.grad = p.grad.double()
        optimizer.step()
        reference.step()
    for p, weight, q in zip(ours.parameters(), optimizer.weights(), theirs.parameters(), strict=True):
        torch.testing.assert_close(weight.double(), q.detach(), rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(p.detach().float(), weight, rtol=2**-8 if low_precision else 0, atol=0)
