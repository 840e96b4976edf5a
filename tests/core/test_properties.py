"""Every public function on shapes, memory layouts and types that hypothesis draws: as accurate as PyTorch, or refused.

The rule is that of test_kernels.py: errors against float64 at most twice those of plain PyTorch in the same precision,
plus a small atol. A layout is an order of the dimensions in memory, with gaps between rows and elements.
"""

import functools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import tiny_llama_v3 as llama
from nanogpt_triton.kernels import triton_add_layer_norm, triton_layer_norm
from tests.core import test_kernels
from tests.core.test_kernels import run
from tiny_llama import groups

pytestmark = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TYPES = st.sampled_from(test_kernels.ALL_DTYPES)
# Triton's interpreter multiplies the bit patterns of bf16 matrices: kernels with a tl.dot need a GPU for it.
DOT_TYPES = TYPES if ON_GPU else st.sampled_from([torch.float32, torch.float16])
LONG = 129 if ON_GPU else 65  # tokens, more than fit in two tiles
SIZES = st.one_of(st.integers(1, 9), st.sampled_from([31, 32, 33, 64, 65]))

fast = settings(
    max_examples=15, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.generate],  # to shrink a failure takes many minutes of the interpreter's time
)  # fmt: skip
slow = settings(fast, max_examples=6)  # the interpreter takes seconds for a pass of attention

# Where terms of about 1 cancel to nothing, as in attention to a single key, their rounding remains.
assert_as_accurate, assert_as_accurate_as_torch = (
    functools.partial(f, factor=2, floor=0.1)
    for f in (test_kernels.assert_as_accurate, test_kernels.assert_as_accurate_as_torch)
)


@st.composite
def laid_out(draw, shape, dtype, scale=1.0):
    """Random values of this shape, somehow in memory; whatever lies around them is NaN."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    values = (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)
    order = draw(st.permutations(range(len(shape))))
    gaps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in shape]
    padding = draw(st.sampled_from([0, 0, 1, 16]))
    holder_shape = [shape[dim] * gap for dim, gap in zip(order, gaps, strict=True)]
    holder_shape[-1] += padding
    holder = torch.full(holder_shape, float("nan"), dtype=dtype, device=DEVICE)
    view = holder[tuple(slice(0, shape[dim] * gap, gap) for dim, gap in zip(order, gaps, strict=True))]
    return view.permute([order.index(dim) for dim in range(len(shape))]).copy_(values)


@st.composite
def expanded(draw, shape, dtype):
    """The same, or one value for some of the dimensions, which then have the stride 0."""
    kept = [draw(st.booleans()) for _ in shape]
    source = draw(laid_out([n if keep else 1 for n, keep in zip(shape, kept, strict=True)], dtype))
    return source.expand(shape)


def in_one_or_two_launches(data):
    """A context in which sequences of any length have this backward pass of attention."""
    return mock.patch.object(llama, "FUSED_BACKWARD_SEQ_LEN", data.draw(st.sampled_from([0, 10**6])))


def draw_shape(data, cols=SIZES):
    """Up to three dimensions."""
    return [*data.draw(st.lists(st.integers(1, 5), max_size=2)), data.draw(cols)]


# --- tiny_llama_v3


@fast
@given(st.data(), TYPES, st.booleans())
def test_rmsnorm(data, dtype, with_branch):
    shape = draw_shape(data, st.integers(1, 300))
    inputs = [data.draw(laid_out(shape, dtype)), data.draw(laid_out(shape[-1:], dtype)).contiguous()]
    if with_branch:
        inputs.append(data.draw(expanded(shape, dtype)))
    upstream = [data.draw(expanded(shape, dtype)) for _ in range(2)]
    outputs = slice(None) if with_branch else slice(0, 1)  # without branch the residual is the input itself

    def with_norm(norm):
        return lambda x, weight, branch=None: norm(x, branch, weight, 1e-5)[outputs]

    ours, reference = map(with_norm, (llama.triton_rmsnorm, llama.torch_rmsnorm))
    assert_as_accurate_as_torch(ours, reference, inputs, upstream, dtype)


@fast
@given(st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_linear(data, dtype):
    *rows, inner = draw_shape(data)
    outer = data.draw(SIZES)
    inputs = [data.draw(expanded([*rows, inner], dtype)), data.draw(laid_out([outer, inner], dtype))]
    upstream = [data.draw(expanded([*rows, outer], dtype))]
    assert_as_accurate_as_torch(llama.triton_linear, F.linear, inputs, upstream, dtype)


@slow
@given(st.data(), DOT_TYPES)
def test_attention(data, dtype):
    batch, seq_len = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 2, 15, 33, 64, LONG]))
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    head_dim = 2 * data.draw(st.sampled_from([1, 3, 8, 10, 16, 33, 64]))
    heads, hidden = kv_heads * group, data.draw(st.integers(1, 20))
    naive = data.draw(st.booleans())
    inputs = [
        data.draw(laid_out([batch, seq_len, hidden], dtype)),
        data.draw(laid_out([(heads + 2 * kv_heads) * head_dim, hidden], dtype, hidden**-0.5)),
        data.draw(laid_out([hidden, heads * head_dim], dtype, (heads * head_dim) ** -0.5)),
    ]
    upstream = [data.draw(expanded([batch, seq_len, hidden], dtype))]
    tables = llama.rope_tables(seq_len, head_dim, DEVICE)
    bugs = ("noncontiguous_kv",) if naive else ()
    with in_one_or_two_launches(data):
        assert_as_accurate_as_torch(
            lambda *tensors: llama.triton_attention(*tensors, *tables, heads, kv_heads, bugs),
            lambda *tensors: llama.torch_attention(*tensors, *tables, heads, kv_heads), inputs, upstream, dtype,
        )  # fmt: skip


@slow
@given(st.data(), DOT_TYPES)
def test_flash_attention(data, dtype):
    """The kernels by themselves: every tensor, gradients included, in a layout of its own."""
    batch, seq_len = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 17, 32, 50, LONG]))
    kv_heads, group, head_dim = (data.draw(st.integers(*bounds)) for bounds in ((1, 2), (1, 3), (1, 20)))
    head_dim *= 2
    q_shape, k_shape = [batch, seq_len, kv_heads * group, head_dim], [batch, seq_len, kv_heads, head_dim]
    inputs = [data.draw(laid_out(shape, dtype)) for shape in (q_shape, k_shape, k_shape)]
    upstream = data.draw(laid_out(q_shape, dtype))
    places = [data.draw(laid_out(shape, dtype)) for shape in (q_shape, q_shape, k_shape, k_shape)]

    def reference(q, k, v):
        k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-2, -1) * head_dim**-0.5
        future = torch.ones(seq_len, seq_len, dtype=torch.bool, device=DEVICE).triu(1)
        return (scores.masked_fill(future, -torch.inf).softmax(-1) @ v).transpose(1, 2)

    plain, exact = (run(reference, inputs, [upstream], precision) for precision in (dtype, torch.float64))
    o, lse = llama.flash_attention_forward(*inputs)
    with in_one_or_two_launches(data):
        llama.flash_attention_backward(upstream, (*inputs, places[0].copy_(o), lse), places[1:])
    assert_as_accurate([o, *places[1:]], plain, exact, dtype)


@fast
@given(st.data(), TYPES, st.booleans())
def test_swiglu(data, dtype, naive_matmul):
    *rows, hidden = draw_shape(data)
    ffn = data.draw(st.integers(1, 40))
    shapes = [2 * ffn, hidden], [hidden, ffn]
    weights = [data.draw(laid_out(shape, dtype, shape[1] ** -0.5)) for shape in shapes]
    if naive_matmul:
        weights[0] = weights[0].contiguous()
    inputs = [data.draw(laid_out([*rows, hidden], dtype)), *weights]
    upstream = [data.draw(expanded([*rows, hidden], dtype))]
    bugs = ("triton_matmul_swiglu",) if naive_matmul else ()
    ours = lambda *tensors: llama.triton_swiglu(*tensors, bugs)  # noqa: E731
    assert_as_accurate_as_torch(ours, llama.torch_swiglu, inputs, upstream, dtype)


@slow
@given(st.data(), st.booleans(), st.booleans())
def test_group(data, low_precision, with_branch):
    """The streams and the gradients of both outputs in a layout of their own; weights lie in FlatAdamW's buffer."""
    dtype = torch.bfloat16 if low_precision and ON_GPU else torch.float32
    heads, seq_len, ffn = data.draw(st.sampled_from([(4, 2), (2, 1), (1, 1)])), data.draw(st.integers(1, 20)), 24
    config = llama.Config(hidden_dim=8 * heads[0], num_layers=2, num_heads=heads[0], num_kv_heads=heads[1], ffn_dim=ffn)
    shape = [data.draw(st.integers(1, 2)), seq_len, config.hidden_dim]
    tensors = [data.draw(laid_out(shape, dtype)) for _ in range(1 + with_branch)]
    upstream = [data.draw(expanded(shape, dtype)) for _ in range(2)]
    tables = llama.rope_tables(seq_len, config.head_dim, DEVICE)
    blocks = {name: torch.nn.ModuleList() for name in ("triton", "torch")}
    for _ in range(data.draw(st.integers(1, 2))):
        for name, layers in blocks.items():
            torch.manual_seed(len(layers))
            layers.append(llama.TransformerBlock(config, llama.OPERATIONS[name]).to(DEVICE))
    llama.FlatAdamW(blocks["triton"], lr=1e-3, low_precision=dtype == torch.bfloat16)
    group = groups.LayerGroup(torch.nn.ModuleList(blocks["triton"]), slice(None))

    def results(function, layers, dtype):
        """Both outputs, and the gradients of the streams and weights."""
        layers.zero_grad()
        leaves = [t.to(dtype).detach().requires_grad_() for t in tensors]
        outputs = function(leaves[0], leaves[1] if with_branch else None, *(t.to(dtype) for t in tables))
        torch.autograd.backward(outputs, [u.to(dtype) for u in upstream])
        return [t.detach().double() for t in (*outputs, *(x.grad for x in (*leaves, *layers.parameters())))]

    def reference(residual, branch, cos, sin):
        for layer in blocks["torch"]:
            residual, branch = layer(residual, branch, cos, sin)
        return residual, branch

    plain = results(reference, blocks["torch"].to(dtype), dtype)
    exact = results(reference, blocks["torch"].double(), torch.float64)
    assert_as_accurate(results(lambda *args: group(*args[:2], *tables), blocks["triton"], dtype), plain, exact, dtype)


@fast
@given(st.data(), TYPES, st.sampled_from([torch.int32, torch.int64]))
def test_cross_entropy(data, dtype, integers):
    shape = draw_shape(data, st.one_of(st.integers(1, 70), st.sampled_from([1000, 8192, 8193, 16384])))
    shape = shape if len(shape) > 1 else [1, *shape]
    logits = data.draw(st.one_of(laid_out(shape, dtype, 4.0), expanded(shape, dtype)))
    numbers = torch.arange(200, device=DEVICE) * 7919 % shape[-1]
    targets = numbers[: torch.Size(shape[:-1]).numel()]
    ignored = data.draw(st.sampled_from([index for index in (-100, -1, 0, 1) if index != targets[-1]]))
    targets[:-1:3] = ignored
    targets = targets.view(shape[:-1])
    layout = data.draw(st.sampled_from(["contiguous", "strided", "expanded"]))
    if layout == "strided":
        targets = torch.stack([targets, torch.full_like(targets, 10**6)], dim=-1)[..., 0]
    if layout == "expanded":
        targets = targets.flatten()[-1].expand(shape[:-1])
    upstream = [torch.tensor(data.draw(st.sampled_from([1.0, -2.5, 0.0])), device=DEVICE)]

    def reference(x):  # the loss in fp32 or better, as autocast has it
        return llama.torch_cross_entropy(x if x.dtype == torch.float64 else x.float(), targets, ignored)

    def ours(x):  # with a copy, in the same layout unless elements of it lie in one place
        place = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=DEVICE)
        copy = x.clone() if 0 in x.stride() else test_kernels.CopyInto.apply(x, place)
        return llama.triton_cross_entropy(copy, targets.to(integers), ignored)

    assert_as_accurate_as_torch(ours, reference, [logits], upstream, dtype)


@fast
@given(st.data(), TYPES, st.sampled_from([torch.int32, torch.int64]))
def test_embedding(data, dtype, integers):
    vocab, dim = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 70))
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    tokens = data.draw(expanded(shape, torch.float32)).nan_to_num().mul(1e3).long().remainder(vocab)
    tokens = torch.stack([tokens.to(integers).flip(0)] * 2, dim=-1)[..., 0]  # with a gap after each
    weight, upstream = data.draw(laid_out([vocab, dim], dtype)), data.draw(expanded([*shape, dim], dtype))
    ours, reference = (functools.partial(embedding, tokens) for embedding in (llama.triton_embedding, F.embedding))
    assert_as_accurate_as_torch(ours, reference, [weight], [upstream], dtype)


@settings(fast, max_examples=300)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
@example([*test_kernels.UNUSUAL, 0x00008000, 0x3F808000, 0xBF808000, 0x80000000])
def test_split(patterns):
    """Any bits: the upper half is the nearest bf16 number (halves away from zero), and both together the number."""
    bits = torch.tensor(patterns, dtype=torch.int64, device=DEVICE).to(torch.int32)
    weights = bits.view(torch.float32)
    rounded, remainder = llama.split_fp32(weights)
    joined, known = llama.join_fp32(rounded, remainder), ~weights.isnan()
    assert torch.equal(joined.view(torch.int32)[known], bits[known]) and joined[~known].isnan().all()
    nearest = torch.where(bits & 0xFFFF == 0x8000, (bits + 0x8000).view(torch.float32), weights).bfloat16()
    assert torch.equal(rounded[known], nearest[known]) and rounded[~known].isnan().all()


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


# --- nanogpt_triton.kernels


@fast
@given(st.data(), TYPES, st.booleans(), st.booleans())
@pytest.mark.filterwarnings("ignore:LayerNorm runs on PyTorch")
def test_layer_norm(data, dtype, with_bias, with_branch):
    shape = draw_shape(data, st.integers(2, 300))  # a single column is its own mean: rounding over sqrt(eps)
    inputs = [data.draw(expanded(shape, dtype))]
    inputs += [data.draw(laid_out(shape, dtype))] if with_branch else []
    inputs += [data.draw(laid_out(shape[-1:], dtype)) for _ in range(1 + with_bias)]
    upstream = [data.draw(expanded(shape, dtype)) for _ in range(1 + with_branch)]

    def torch_layer_norm(x, weight, bias=None):
        return F.layer_norm(x, weight.shape, weight, bias, 1e-5)

    def torch_add_layer_norm(x, branch, weight, bias=None):
        return x + branch, torch_layer_norm(x + branch, weight, bias)

    ours, reference = triton_layer_norm, torch_layer_norm
    if with_branch:
        ours, reference = triton_add_layer_norm, torch_add_layer_norm
    assert_as_accurate_as_torch(ours, reference, inputs, upstream, dtype)
