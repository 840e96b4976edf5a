"""Each kernel, forward and every gradient, against float64.

The rule: our error against float64 is at most twice that of plain PyTorch in the same precision, plus a small atol.
"""

import collections
import copy

import numpy as np
import pytest
import torch

import tiny_llama_v3 as llama

pytestmark = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")

ON_GPU = torch.cuda.is_available()
ATOL = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
ALL_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def slow_if(condition, *case, marks=()):
    """A case of parametrize() that is left out of the fast tests if the condition holds."""
    return pytest.param(*case, marks=[*marks, *[pytest.mark.slow] * bool(condition)])


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fresh memory is full of NaN, so that an element which no kernel writes is seen."""
    new_empty = torch.Tensor.new_empty

    def poisoned(*args, **kwargs):
        tensor = new_empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


@pytest.fixture
def randn(device):
    generator = torch.Generator(device).manual_seed(0)
    return lambda *shape, dtype=torch.float32: torch.randn(*shape, generator=generator, device=device).to(dtype)


def run(function, inputs, upstream, dtype):
    """Outputs and gradients of function(*inputs), in dtype, as float64. Inputs that have this type keep their layout;
    integers and None pass unchanged.
    """
    differentiable = [torch.is_tensor(x) and x.is_floating_point() for x in inputs]
    leaves = [x.detach().to(dtype).requires_grad_() if d else x for x, d in zip(inputs, differentiable, strict=True)]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [u.to(o.dtype) for u, o in zip(upstream, outputs, strict=False)])
    grads = [x.grad for x, d in zip(leaves, differentiable, strict=True) if d]
    return [t.detach().double() for t in (*outputs, *grads)]


def assert_as_accurate(actual, plain, exact, dtype, factor=1, floor=0.0):
    """The rule, with an atol that may be larger by a factor, and that counts the largest element as floor more."""
    for index, (a, p, e) in enumerate(zip(actual, plain, exact, strict=True)):
        assert a.shape == e.shape
        atol = factor * ATOL[dtype] * (e.abs().max() + floor)
        error, allowed = (a - e).abs().max(), 2 * (p - e).abs().max() + atol
        assert error <= allowed, f"tensor {index}: error {error:.2e}, allowed {allowed:.2e}"


def assert_as_accurate_as_torch(ours, reference, inputs, upstream, dtype, **allowance):
    runs = (ours, dtype), (reference, dtype), (reference, torch.float64)
    assert_as_accurate(*(run(function, inputs, upstream, d) for function, d in runs), dtype, **allowance)


def strided_like(x):
    """The same values with every dimension strided."""
    holder = torch.zeros(*(2 * n for n in x.shape), dtype=x.dtype, device=x.device)
    view = holder[tuple(slice(None, None, 2) for _ in x.shape)]
    return view.copy_(x)


def in_memory_order(x, order, padding):
    """The same values, the dimensions lying in memory in this order, the innermost rows padded."""
    shape = [x.shape[dim] for dim in order]
    holder = torch.full((*shape[:-1], shape[-1] + padding), float("nan"), dtype=x.dtype, device=x.device)
    inverse = [order.index(dim) for dim in range(x.dim())]
    return holder[..., : shape[-1]].permute(inverse).copy_(x)


@pytest.fixture(params=[(40, 128), (40, 0), slow_if(True, (150, 128))], ids=["40 in one", "40 in two", "150 in two"])
def seq_len(request, monkeypatch):
    """The length of a sequence for attention, whose backward pass is one launch or two."""
    length, limit = request.param
    monkeypatch.setattr(llama, "FUSED_BACKWARD_SEQ_LEN", limit)
    return length


def test_a_second_derivative_is_refused(randn):
    weight = randn(16, 16).requires_grad_()
    outputs = [
        llama.triton_rmsnorm(weight, None, weight[0], 1e-5)[0],
        llama.triton_linear(weight, weight),
        llama.triton_swiglu(weight, weight, weight[:, :8].contiguous()),
        llama.triton_embedding(torch.arange(3, device=weight.device), weight),
        llama.triton_cross_entropy(weight * 1, torch.arange(16, device=weight.device)),
    ]
    for output in outputs:
        with pytest.raises(RuntimeError, match="FunctionBackward has no second derivative"):
            torch.autograd.grad(output.sum(), weight, create_graph=True)


# --- column sums


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("accumulate", [False, True])
def test_column_sums(randn, rows, accumulate):
    partial, sums = randn(rows, 37), randn(37)
    expected = partial.double().sum(0) + (sums.double() if accumulate else 0)
    constants = dict(ACCUMULATE=accumulate, BLOCK_ROWS=128, BLOCK_COLS=16)
    llama.launch(llama.column_sum_kernel, (3,), (partial, sums), (37, rows, 37), constants)
    torch.testing.assert_close(sums.double(), expected, rtol=1e-6, atol=1e-5)


# --- RMSNorm


@pytest.mark.parametrize("shape, dtype, with_branch", [
    slow_if(shape[-1] > 500 and (dtype != torch.float32 or not with_branch), shape, dtype, with_branch)
    for shape in [(1, 64), (3, 5, 96), (2, 7, 123), (65, 512), (9, 41), (3, 1, 2048), (2, 5000)]
    for dtype in ALL_DTYPES for with_branch in (True, False)
], ids=str)  # fmt: skip
def test_rmsnorm(randn, shape, dtype, with_branch):
    x, weight = randn(*shape), randn(shape[-1])
    branch = randn(*shape) if with_branch else None
    upstream = [randn(*shape), randn(*shape)]
    outputs = slice(2 if with_branch else 1)  # without a branch the residual is the input itself
    norms = llama.triton_rmsnorm, llama.torch_rmsnorm
    ours, reference = (lambda *t, norm=norm: norm(*t, 1e-5)[outputs] for norm in norms)
    assert_as_accurate_as_torch(ours, reference, [x, branch, weight], upstream, dtype)


def assert_rmsnorm_is_exact(inputs, upstream):
    actual = run(lambda *t: llama.triton_rmsnorm(*t, 1e-5), inputs, upstream, torch.float32)
    exact = run(lambda *t: llama.torch_rmsnorm(*t, 1e-5), inputs, upstream, torch.float64)
    torch.testing.assert_close(actual, exact, rtol=1e-5, atol=1e-5)


def test_rmsnorm_in_any_layout(randn):
    """Strided, expanded, and with a different padding for each argument."""
    inputs = [strided_like(randn(4, 6, 40)), randn(4, 40, 6).transpose(1, 2), randn(40)]
    assert_rmsnorm_is_exact(inputs, [strided_like(randn(4, 6, 40)), randn(1, 1, 40).expand(4, 6, 40)])
    x, branch, *upstream = (in_memory_order(randn(7, 40), [0, 1], padding) for padding in (3, 5, 8, 9))
    assert_rmsnorm_is_exact([x, branch, randn(40)], upstream)


# The interpreter does not round to bf16, it cuts off.
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.compiled)])
def test_rmsnorm_normalises_the_residual_that_it_stores(randn, dtype):
    x, branch, weight = randn(20, 256).to(dtype), randn(20, 256).to(dtype), torch.ones(256, device=randn(1).device)
    y, residual = llama.triton_rmsnorm(x, branch, weight.to(dtype), 1e-5)
    exact, _ = llama.torch_rmsnorm(residual.double(), None, weight.double(), 1e-5)
    # Rounded once: half a unit in the last place, and a little for fp32.
    torch.testing.assert_close(y.double(), exact, rtol=0.51 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("block_size", [64, 128, 256, 512, 1024])
def test_rmsnorm_block_smaller_than_the_row(randn, block_size):
    x, branch, weight = randn(5, 600), randn(5, 600), randn(600)
    residual, y, rstd = llama.rmsnorm_forward(x, branch, weight, 1e-5, block_size)
    expected, expected_residual = llama.torch_rmsnorm(x.double(), branch.double(), weight.double(), 1e-5)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(residual.double(), expected_residual, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_branch", [True, False])
def test_rmsnorm_of_which_only_the_residual_is_used(randn, with_branch):
    x, branch, weight = (t.requires_grad_() for t in (randn(3, 8), randn(3, 8), randn(8)))
    upstream = randn(3, 8)
    _, residual = llama.triton_rmsnorm(x * 1, branch if with_branch else None, weight, 1e-5)
    residual.backward(upstream)
    assert torch.equal(x.grad, upstream) and weight.grad is None
    assert torch.equal(branch.grad, upstream) if with_branch else branch.grad is None


def test_rmsnorm_adds_eps_to_the_mean_square(device):
    x = torch.full((1, 8), 1e-3, device=device)  # a mean square of 1e-6, beside which eps counts
    for norm in (llama.TritonRMSNorm(8), llama.TritonRMSNorm(8, operations=llama.OPERATIONS["torch"])):
        y = norm.to(device)(x)
        torch.testing.assert_close(y, torch.full_like(y, 1e-3 / (1e-6 + 1e-5) ** 0.5))
    y = llama.triton_rmsnorm(x, None, torch.ones(8, device=device), 1e-2)[0]
    torch.testing.assert_close(y, torch.full_like(y, 1e-3 / (1e-6 + 1e-2) ** 0.5))


def test_rmsnorm_refuses_what_it_would_read_wrongly(randn):
    x, weight = randn(3, 8), randn(8)
    outputs = [llama.triton_rmsnorm(x, None, w, 1e-5) for w in (strided_like(weight), weight)]
    for strided, plain in zip(*outputs, strict=True):
        assert torch.equal(strided, plain)
    with pytest.raises(AssertionError, match="weight as contiguous"):
        llama.rmsnorm_forward(x, None, strided_like(weight), 1e-5)
    with pytest.raises(ValueError, match=r"weight has the shape \(7,\), and \(8,\) is needed"):
        llama.triton_rmsnorm(x, None, weight[:7], 1e-5)
    with pytest.raises(ValueError, match=r"branch has the shape \(1, 8\), and \(3, 8\) is needed"):
        llama.triton_rmsnorm(x, x[:1], weight, 1e-5)
    with pytest.raises(TypeError, match="x is torch.float64, and the kernels compute in fp32"):
        llama.triton_rmsnorm(x.double(), None, weight, 1e-5)


# --- attention


def attention_inputs(randn, batch, seq_len, heads, kv_heads, head_dim):
    """(qkv, upstream) and the other arguments of attention; projections that change nothing let qkv in and o out."""
    qkv = randn(batch, seq_len, (heads + 2 * kv_heads) * head_dim)
    projections = torch.eye(qkv.shape[-1], device=qkv.device), torch.eye(heads * head_dim, device=qkv.device)
    others = (*projections, *llama.rope_tables(seq_len, head_dim, qkv.device), heads, kv_heads)
    return qkv, randn(batch, seq_len, heads * head_dim), others


def on_qkv(attention, arguments, **kwargs):
    def function(qkv):
        projections = [p.to(qkv.dtype) for p in arguments[:2]]
        return attention(qkv, *projections, *arguments[2:], **kwargs)

    return function


SHAPES = [  # batch, seq_len, heads, kv_heads, head_dim
    (1, 1, 1, 1, 16), (2, 37, 4, 4, 32), (1, 64, 4, 2, 64), (2, 33, 8, 2, 40), (1, 50, 8, 1, 16), (1, 48, 2, 1, 80),
    (1, 65, 2, 2, 96), (1, 96, 2, 1, 128),
    (1, 130, 2, 1, 32),  # whose backward pass is two launches
    (1, 200, 4, 1, 24),
]  # fmt: skip
FAST_SHAPES = [(shape, torch.float32) for shape in SHAPES[:3] + SHAPES[5:8]]
FAST_SHAPES += [(shape, torch.float16) for shape in (SHAPES[2], SHAPES[5])]
if ON_GPU:
    SHAPES += [(2, 128, 8, 4, 64), (2, 512, 8, 4, 64), (1, 1024, 8, 2, 128), (2, 1000, 4, 4, 80), (1, 2048, 4, 2, 64)]
    SHAPES += [(2, 1000, 4, 2, 128)]  # the copy engine's edge
# Triton's interpreter multiplies the bit patterns of bf16 matrices: kernels with a tl.dot must be compiled for it.
ATTENTION_CASES = [
    slow_if((shape, dtype) not in FAST_SHAPES, shape, dtype, marks=[pytest.mark.compiled] * (dtype == torch.bfloat16))
    for shape in SHAPES
    for dtype in ALL_DTYPES
]


@pytest.mark.parametrize("shape, dtype", ATTENTION_CASES, ids=str)
def test_attention(randn, shape, dtype):
    qkv, upstream, arguments = attention_inputs(randn, *shape)
    ours, reference = on_qkv(llama.triton_attention, arguments), on_qkv(llama.torch_attention, arguments)
    assert_as_accurate_as_torch(ours, reference, [qkv], [upstream], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(2, 33, 2, 1, 40), (1, 64, 3, 1, 16)], ids=str)  # the latter fills its tiles
def test_attention_of_short_sequences_in_two_backward_passes(randn, monkeypatch, shape, dtype):
    monkeypatch.setattr(llama, "FUSED_BACKWARD_SEQ_LEN", 0)
    test_attention(randn, shape, dtype)


LAYOUTS = {  # the order of (batch, seq, head, head_dim) in memory and the padding: no two tensors have the same strides
    "q": ([0, 1, 2, 3], 1), "k": ([3, 0, 2, 1], 2), "v": ([2, 0, 1, 3], 3), "o": ([1, 2, 0, 3], 5),
    "o_grad": ([0, 3, 1, 2], 1), "q_grad": ([1, 0, 3, 2], 4), "k_grad": ([2, 1, 0, 3], 7), "v_grad": ([0, 2, 3, 1], 6),
}  # fmt: skip


def exact_attention(q, k, v, o_grad):
    """o and the gradients of q, k, v in float64."""
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    group = q.shape[2] // k.shape[2]
    heads = [t.transpose(1, 2) for t in exact]
    repeated = [heads[0], *(t.repeat_interleave(group, dim=1) for t in heads[1:])]
    o = torch.nn.functional.scaled_dot_product_attention(*repeated, is_causal=True).transpose(1, 2)
    return [o.detach(), *torch.autograd.grad(o, exact, o_grad.double())]


def assert_attention_is_exact(q, k, v, o_grad, place=lambda name, tensor: tensor):
    """Forward and backward, every tensor where place() puts it."""
    q, k, v, o_grad = (place(name, t) for name, t in (("q", q), ("k", k), ("v", v), ("o_grad", o_grad)))
    o, lse = llama.flash_attention_forward(q, k, v)
    grads = [place(f"{name}_grad", torch.empty_like(t)) for name, t in (("q", q), ("k", k), ("v", v))]
    llama.flash_attention_backward(o_grad, (q, k, v, place("o", o), lse), grads)
    for actual, expected in zip((o, *grads), exact_attention(q, k, v, o_grad), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


def test_attention_in_any_layout(randn, seq_len):
    """Every argument strided, and a different layout for each."""
    inputs = [randn(2, seq_len, heads, 16) for heads in (4, 2, 2, 4)]
    assert_attention_is_exact(*inputs, place=lambda name, t: strided_like(t))
    inputs = [randn(2, seq_len, heads, 16) for heads in (6, 3, 3, 6)]
    assert_attention_is_exact(*inputs, place=lambda name, t: in_memory_order(t, *LAYOUTS[name]))


def test_attention_to_strided_keys(randn, seq_len):
    """Of padded heads in half precision: with Triton 3.6, H100s read past the end of shared memory."""
    q, k, v = randn(3, 1, seq_len, 2, 18).half()
    o, _ = llama.flash_attention_forward(q, strided_like(k), v)
    torch.testing.assert_close(o.double(), exact_attention(q, k, v, q)[0], rtol=0.01, atol=0.01)


@pytest.fixture
def use_tile(monkeypatch):
    """A function that sets the function of a pass that gives its tile, and no longer after the test."""

    def use(tile_of):
        monkeypatch.setattr(llama, "attention_tile", lambda name, *key: tile_of(name))
        llama.attention_launch.cache_clear()

    yield use
    llama.attention_launch.cache_clear()


@pytest.mark.parametrize("m, n, seq_len, fused_seq_len", [
    slow_if(seq_len != {32: 48, 64: 64}[max(m, n)], m, n, seq_len, fused_seq_len)
    for m, n in [(16, 32), (32, 16), (16, 64), (64, 16)] for seq_len in (40, 48, 64, 100, 144, 150)
    for fused_seq_len in ([128, 0] if seq_len <= 128 else [128])
])  # fmt: skip
def test_attention_with_tiles_that_are_not_square(randn, monkeypatch, use_tile, m, n, seq_len, fused_seq_len):
    monkeypatch.setattr(llama, "FUSED_BACKWARD_SEQ_LEN", fused_seq_len)
    use_tile(lambda name: llama.AttentionTile(m, n, 4, 1))
    assert_attention_is_exact(*(randn(1, seq_len, heads, 16) for heads in (2, 1, 1, 2)))


@pytest.mark.parametrize("m, n, fused_seq_len", [(16, 32, 128), (16, 32, 0), (32, 16, 128), (32, 16, 0)])
def test_attention_reads_nothing_beyond_a_sequence(randn, monkeypatch, use_tile, m, n, fused_seq_len):
    """Of a length that only the smaller of both blocks divides; what lies behind each tensor is NaN."""
    monkeypatch.setattr(llama, "FUSED_BACKWARD_SEQ_LEN", fused_seq_len)
    use_tile(lambda name: llama.AttentionTile(m, n, 4, 1))

    def place(name, t):
        holder = t.new_full((t.shape[0], t.shape[1] + 32, *t.shape[2:]), float("nan"))
        return holder[:, : t.shape[1]].copy_(t)

    assert_attention_is_exact(*(randn(1, 48, heads, 16) for heads in (2, 1, 1, 2)), place)


AMD_TILES = [key for key in llama.ATTENTION_TILES if key[0] == "amd"]


@pytest.mark.parametrize("key, seq_len", [  # one backward kernel, and two; neither length is a multiple of a tile
    slow_if(key not in (("amd", "half", 64), ("amd", "any", 128)), key, seq_len)
    for key in AMD_TILES for seq_len in (100, 150)
])  # fmt: skip
def test_attention_with_the_tiles_of_amd(randn, use_tile, key, seq_len):
    use_tile(lambda name: llama.AttentionTile(*llama.ATTENTION_TILES[key][llama.PASSES.index(name)]))
    assert_attention_is_exact(*(randn(1, seq_len, heads, 16) for heads in (2, 1, 1, 2)))


@pytest.mark.parametrize("dimension", ["seq", "head", "head_dim"])
@pytest.mark.parametrize("far", LAYOUTS)
def test_attention_beyond_two_to_the_31_elements_is_refused(monkeypatch, seq_len, far, dimension):
    """Offsets within a sequence have 32 bits."""
    cpu = llama.get_device("cpu")
    monkeypatch.setattr(llama, "get_device", lambda type: cpu)
    shapes = [(1, seq_len, 2 if name[0] in "kv" else 4, 16) for name in LAYOUTS]
    tensors = dict(zip(LAYOUTS, (torch.empty(shape, device="meta") for shape in shapes), strict=True))
    sizes = {"seq": 1, "head": 2, "head_dim": 3}
    strides = [1] * 4
    strides[sizes[dimension]] = 2**31 // (tensors[far].shape[sizes[dimension]] - 1) + 64
    tensors[far] = torch.empty_strided(tensors[far].shape, strides, device="meta")
    q, k, v, o, o_grad, *gradients = tensors.values()
    lse = torch.empty(1, 4, seq_len, device="meta")
    with pytest.raises(ValueError, match="count within a sequence in 32 bits"):
        if far in "qkv":
            llama.flash_attention_forward(q, k, v)
        llama.flash_attention_backward(o_grad, (q, k, v, o, lse), gradients)


tl, rounded_like = llama.tl, llama.rounded_like  # a kernel sees the names of its own module only
RoundingConstants = collections.namedtuple("RoundingConstants", "ROUND_BY_HAND")


@llama.jit
def rounding_kernel(x_ptr, y_ptr, C, BLOCK_SIZE: tl.constexpr):
    places = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + places)
    tl.store(y_ptr + places, rounded_like(x, x, C))


def test_bf16_is_rounded_to_nearest(device):
    """All bf16 values, infinities and what is no number among them, and what lies between each two neighbours."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(torch.bfloat16).float()
    for between in (0, 1, 2**15 - 1, 2**15, 2**15 + 1, 2**16 - 1):
        x = (values.view(torch.int32) + between).view(torch.float32)
        x = torch.where(values.isfinite(), x, values)
        y = torch.zeros_like(x, dtype=torch.bfloat16)
        llama.launch(rounding_kernel, (16,), (x, y), (), dict(C=RoundingConstants(True), BLOCK_SIZE=4096))
        away = (values.view(torch.int32) + 2**16).view(torch.float32)  # the next one further from zero
        expected = torch.where(values.isfinite(), away, values) if between == 2**15 else x
        torch.testing.assert_close(y, expected.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_attention_refuses_what_it_would_read_wrongly(randn):
    qkv, upstream, (*weights, cos, sin, heads, kv_heads) = attention_inputs(randn, 1, 8, 2, 1, 16)
    expected = llama.triton_attention(qkv, *weights, cos, sin, heads, kv_heads)
    for tables in ((cos.t().contiguous().t(), sin), (cos, strided_like(sin))):
        assert torch.equal(llama.triton_attention(qkv, *weights, *tables, heads, kv_heads), expected)
    with pytest.raises(ValueError, match="qkv_weight has the shape"):
        llama.triton_attention(qkv, weights[0][:48], weights[1], cos, sin, heads, kv_heads)
    with pytest.raises(ValueError, match="8 positions, the rotary tables have 7"):
        llama.triton_attention(qkv, *weights, cos[:7], sin[:7], heads, kv_heads)
    q, k, v = llama.split_heads(qkv, heads, kv_heads)
    o, lse = llama.flash_attention_forward(q, k, v)
    with pytest.raises(AssertionError):
        llama.flash_attention_backward(upstream.view(o.shape), (q, k, v, o, lse), (q, k, v), (strided_like(cos), sin))
    with pytest.raises(AssertionError):
        llama.rope_(strided_like(qkv), 3, 16, cos, sin)


def test_rotary_angles(device):
    cos, sin = llama.rope_tables(200, 4, device)
    angles = torch.tensor([[p * 1.0, p * 0.01] for p in range(200)], dtype=torch.float64, device=device)
    torch.testing.assert_close(cos.double(), angles.cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin.double(), angles.sin(), rtol=0, atol=1e-6)


def test_rotation_preserves_norms_and_depends_on_distance_only(device):
    cos, sin = llama.rope_tables(64, 32, device)
    x = torch.randn(1, 1, 1, 32, device=device)
    rotated = llama.torch_rope(x.expand(1, 64, 1, 32), cos, sin)[0, :, 0]
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm().expand(64), rtol=1e-5, atol=1e-5)
    products = rotated @ rotated.T
    torch.testing.assert_close(products[5, 2], products[60, 57], rtol=1e-4, atol=1e-4)


# --- SwiGLU


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("shape", [(1, 16, 24), (3, 32, 1030), (2, 3, 20, 50)])
def test_swiglu(randn, shape, dtype):
    *rows, hidden, ffn = shape
    inputs = [randn(*rows, hidden), randn(2 * ffn, hidden) * hidden**-0.5, randn(hidden, ffn) * ffn**-0.5]
    assert_as_accurate_as_torch(llama.triton_swiglu, llama.torch_swiglu, inputs, [randn(*rows, hidden)], dtype)


def test_swiglu_naive_matmul(randn):
    inputs = [randn(2, 3, 150), randn(2 * 7, 150) * 0.1, randn(150, 7)]
    ours = lambda *args: llama.triton_swiglu(*args, bugs=("triton_matmul_swiglu",))  # noqa: E731
    assert_as_accurate_as_torch(ours, llama.torch_swiglu, inputs, [randn(2, 3, 150)], torch.float32)


def test_swiglu_refuses_what_it_would_read_wrongly(randn):
    x, gate_up, down = randn(3, 8), randn(12, 8), randn(8, 6)
    bugs = ("triton_matmul_swiglu",)
    strided, plain = (llama.triton_swiglu(x, weight, down, bugs=bugs) for weight in (strided_like(gate_up), gate_up))
    assert torch.equal(strided, plain)
    with pytest.raises(ValueError, match="gate_up_weight has the shape"):
        llama.triton_swiglu(x, gate_up[:11], down)
    with pytest.raises(AssertionError, match="gate_up as contiguous"):
        llama.swiglu_activation(strided_like(gate_up))
    with pytest.raises(AssertionError, match="both as contiguous"):
        llama.swiglu_activation_backward_(strided_like(randn(12, 4)), gate_up)
    with pytest.raises(AssertionError, match="both as contiguous"):
        llama.swiglu_activation_backward_(randn(12, 4), strided_like(gate_up))


@pytest.mark.gpu
def test_naive_swiglu_with_a_weight_of_more_than_two_to_the_31_elements(device):
    inner, ffn = 2**20, 1030
    weight = torch.empty(2 * ffn, inner, dtype=torch.bfloat16, device=device).normal_(std=inner**-0.5)
    x = torch.randn(1, inner, device=device, dtype=torch.bfloat16)
    gate_up, hidden = llama.swiglu_naive_matmul(x, weight)
    expected = torch.nn.functional.linear(x, weight).float()
    torch.testing.assert_close(gate_up.float(), expected, rtol=2e-2, atol=2e-2)
    gate, up = expected.chunk(2, dim=1)
    torch.testing.assert_close(hidden.float(), torch.nn.functional.silu(gate) * up, rtol=5e-2, atol=5e-2)


def test_swiglu_activation_at_extreme_gates(device):
    gate = torch.tensor([[-1e4, -90.0, -1.0, 0.0, 1.0, 90.0, 1e4]], device=device)
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=1)
    torch.testing.assert_close(llama.swiglu_activation(gate_up), torch.nn.functional.silu(gate))
    llama.swiglu_activation_backward_(torch.ones_like(gate), gate_up)
    assert gate_up.isfinite().all()


def test_swiglu_backward_refuses_to_run_twice(randn):
    x = randn(3, 16).requires_grad_()
    y = llama.triton_swiglu(x, randn(16, 16), randn(16, 8))
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# --- cross-entropy


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("rows, vocab", [(1, 2), (5, 1000), (3, 97), (2, 16384), (2, 33000), (1, 70001), (1, 81920)])
def test_cross_entropy(randn, rows, vocab, dtype):
    logits = randn(rows, vocab) * 4
    targets = torch.arange(rows, device=logits.device) * 7919 % vocab
    targets[-1] = vocab - 1

    def reference(x):  # the loss in fp32 or better, as autocast has it
        return llama.torch_cross_entropy(x if x.dtype == torch.float64 else x.float(), targets)

    ours = lambda x: llama.triton_cross_entropy(x.clone(), targets)  # noqa: E731  (it consumes the logits)
    upstream = [torch.tensor(1.0, device=logits.device)]
    assert_as_accurate_as_torch(ours, reference, [logits], upstream, dtype)
    assert_as_accurate_as_torch(ours, reference, [logits], [upstream[0] * -2.5], dtype)


def test_cross_entropy_of_large_logits_is_finite(device):
    logits = torch.tensor([[3e4, -3e4, 0.0], [-3e4, -3e4, -3e4]], device=device, requires_grad=True)
    loss = llama.triton_cross_entropy(logits.clone(), torch.tensor([1, 2], device=device))
    loss.backward()
    torch.testing.assert_close(loss.item(), (6e4 + torch.tensor(3.0).log().item()) / 2)
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("vocab", [5, 8192, 8200, 16384])
@pytest.mark.parametrize("beyond", [False, True])
def test_cross_entropy_target_out_of_range_gives_nan(device, vocab, beyond):
    logits = torch.zeros(2, vocab, device=device, requires_grad=True)
    targets = torch.tensor([1, vocab if beyond else -1], device=device)
    loss = llama.triton_cross_entropy(logits * 1, targets)
    loss.backward()
    assert loss.isnan() and logits.grad[1].isnan().all() and logits.grad[0].isfinite().all()


@pytest.mark.parametrize("vocab, ignored", [(5, -100), (8200, 2)])
def test_cross_entropy_of_ignored_targets_only(device, vocab, ignored):
    """As in PyTorch: the loss is NaN, the gradient 0, also of a token that exists."""
    logits = torch.zeros(3, vocab, device=device, requires_grad=True)
    loss = llama.triton_cross_entropy(logits * 1, torch.full((3,), ignored, device=device), ignored)
    loss.backward()
    assert loss.isnan() and not logits.grad.any()


@pytest.mark.parametrize("vocab", [1000, 8193, 20000])
def test_cross_entropy_of_peaked_logits(randn, vocab):
    """As accurate as PyTorch's where the log-sum is large: its rounding must not reach the probabilities."""
    logits, targets = randn(2, vocab) * 60, torch.tensor([3, vocab - 1], device=randn(1).device)
    one = [torch.tensor(1.0, device=logits.device)]
    exact, plain = (
        run(lambda x: llama.torch_cross_entropy(x, targets), [logits], one, dtype)
        for dtype in (torch.float64, torch.float32)
    )
    actual = run(lambda x: llama.triton_cross_entropy(x * 1, targets), [logits], one, torch.float32)
    for a, p, e in zip(actual, plain, exact, strict=True):
        assert (a - e).norm() <= 2 * (p - e).norm() + 1e-7 * e.norm()


def cross_entropy_and_gradient(logits, targets, factor=1.0):
    """In float64, the loss and the gradient of factor * loss."""
    exact = logits.detach().double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(exact.flatten(0, -2), targets.flatten())
    return loss.detach(), torch.autograd.grad(loss * factor, exact)[0]


def test_cross_entropy_of_strided_and_expanded_targets(randn, device):
    logits, numbers = randn(6, 11), torch.arange(12, device=device) % 11
    for targets in (numbers[::2], numbers[3].expand(6), numbers.view(6, 2)[:, 1:], numbers[:6].int()):
        shaped = logits.view(*targets.shape, 11)
        loss = llama.triton_cross_entropy(shaped.clone(), targets)
        torch.testing.assert_close(loss.double(), cross_entropy_and_gradient(shaped, targets.long())[0])


@pytest.mark.parametrize("data", ["random", "markov"])
def test_cross_entropy_of_batches_of_one_token(randn, device, data):
    config = llama.Config(vocab_size=11, seq_len=1, batch_size=5, data=data)
    targets = next(llama.batches(config))[1].to(device)
    logits = randn(5, 1, 11)
    expected = cross_entropy_and_gradient(logits, targets)[0]
    torch.testing.assert_close(llama.triton_cross_entropy(logits.clone(), targets).double(), expected)


@pytest.mark.parametrize("vocab", [11, 5000])
def test_cross_entropy_of_padded_rows(randn, device, vocab):
    padded = torch.full((4, vocab + 5), 7.0, device=device)
    logits = padded[:, :vocab].copy_(randn(4, vocab))
    targets = torch.arange(4, device=device)
    loss, gradient = cross_entropy_and_gradient(logits, targets, -2.5)
    source = logits.clone().requires_grad_()
    view = torch.empty_like(padded).fill_(7.0)[:, :vocab]
    actual = llama.triton_cross_entropy(CopyInto.apply(source, view), targets)
    (actual * -2.5).backward()
    torch.testing.assert_close(actual.double(), loss)
    torch.testing.assert_close(source.grad.double(), gradient, rtol=1e-5, atol=1e-7)
    assert (view._base[:, vocab:] == 7.0).all()


class CopyInto(torch.autograd.Function):
    """source, laid into the memory of place."""

    @staticmethod
    def forward(ctx, source, place):
        return place.copy_(source)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def test_cross_entropy_of_expanded_logits(randn, device):
    row, targets = randn(11).requires_grad_(), torch.arange(4, device=device)
    loss, gradient = cross_entropy_and_gradient(row.expand(4, 11), targets)
    actual = llama.triton_cross_entropy(row.expand(4, 11), targets)
    actual.backward()
    torch.testing.assert_close(actual.double(), loss)
    torch.testing.assert_close(row.grad.double(), gradient.sum(0), rtol=1e-5, atol=1e-7)


def test_cross_entropy_tells_who_kept_the_logits(randn, device):
    x, targets = randn(4, 11).requires_grad_(), torch.arange(4, device=device)
    logits = x * 1
    kept = logits.square()  # whose gradient needs the logits that are overwritten
    loss = llama.triton_cross_entropy(logits, targets)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + kept.sum()).backward()
    logits = randn(4, 11)  # which themselves need no gradient
    kept = x * logits
    llama.triton_cross_entropy(logits, targets)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_cross_entropy_of_a_masked_stretch(randn):
    logits = randn(2, 20000).index_fill(1, torch.arange(9000, device=randn(1).device), -float("inf")).requires_grad_()
    targets = torch.tensor([9000, 19999], device=logits.device)
    loss, gradient = cross_entropy_and_gradient(logits, targets)
    actual = llama.triton_cross_entropy(logits * 1, targets)
    actual.backward()
    torch.testing.assert_close(actual.double(), loss)
    torch.testing.assert_close(logits.grad.double(), gradient, rtol=1e-5, atol=1e-7)


def test_cross_entropy_refuses_what_would_be_wrong(randn, device):
    logits, targets = randn(4, 11), torch.arange(4, device=device)
    with pytest.raises(ValueError, match="leaf"):
        llama.triton_cross_entropy(logits.clone().requires_grad_(), targets)
    with pytest.raises(ValueError, match="logits has the shape"):
        llama.triton_cross_entropy(logits, targets[:3])
    with pytest.raises(TypeError, match="targets are torch.float32"):
        llama.triton_cross_entropy(logits, targets.float())
    with pytest.raises(TypeError, match="logits is torch.float64"):
        llama.triton_cross_entropy(logits.double(), targets)
    loss = llama.triton_cross_entropy(logits.requires_grad_() * 1, targets)
    loss.backward(torch.tensor(2.0, device=device), retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward(torch.tensor(2.0, device=device))


# --- embedding


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("vocab, dim, shape, tile", [
    (5, 16, (2, 30), llama.EMBEDDING_TILE), (70, 40, (1, 1), llama.EMBEDDING_TILE),
    (5, 40, (3, 15), (16, 32)),  # several tiles of tokens and of columns
    slow_if(True, 7, 1500, (3, 700), llama.EMBEDDING_TILE),
])  # fmt: skip
def test_embedding(randn, device, monkeypatch, vocab, dim, shape, tile, dtype):
    monkeypatch.setattr(llama, "EMBEDDING_TILE", tile)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab, shape, generator=generator).to(device)
    ours = lambda weight: llama.triton_embedding(tokens, weight)  # noqa: E731
    reference = lambda weight: torch.nn.functional.embedding(tokens, weight)  # noqa: E731
    assert_as_accurate_as_torch(ours, reference, [randn(vocab, dim)], [randn(*shape, dim)], dtype)


# --- many elements


@pytest.fixture
def many(device):
    """(2^21 + 3, 1024) in bf16: more than 2^31 elements, of which the last rows are looked at."""
    return torch.empty(2**21 + 3, 1024, dtype=torch.bfloat16, device=device).normal_()


def assert_last_rows(actual, expected, scale=1.0):
    torch.testing.assert_close(actual[-4:].float() * scale, expected.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_rmsnorm_of_more_than_two_to_the_31_elements(many, randn):
    weight = randn(1024, dtype=torch.bfloat16)
    x, rows = many.requires_grad_(), many.detach()[-4:].float().requires_grad_()
    y, residual = llama.triton_rmsnorm(x, many.detach(), weight, 1e-5)
    expected, expected_residual = llama.torch_rmsnorm(rows, rows.detach(), weight.float(), 1e-5)
    assert_last_rows(y, expected)
    assert_last_rows(residual, expected_residual)
    (x_grad,) = torch.autograd.grad((y, residual), x, (many.detach(), many.detach()))
    last = many.detach()[-4:].float()
    assert_last_rows(x_grad, torch.autograd.grad((expected, expected_residual), rows, (last, last))[0])


@pytest.mark.gpu
def test_swiglu_activation_of_more_than_two_to_the_31_elements(many):
    gate, up = many[-4:].float().requires_grad_().chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    hidden = llama.swiglu_activation(many)
    assert_last_rows(hidden, expected)
    gradients = torch.autograd.grad(expected, (gate, up), hidden[-4:].float())
    llama.swiglu_activation_backward_(hidden, many)
    assert_last_rows(many, torch.cat(gradients, dim=1))


@pytest.mark.gpu
def test_cross_entropy_of_more_than_two_to_the_31_elements(many):
    targets = torch.arange(len(many), device=many.device) % 1024
    logits, rows = many.requires_grad_(), many.detach()[-4:].float().requires_grad_()
    torch.nn.functional.cross_entropy(rows, targets[-4:], reduction="sum").backward()
    (llama.triton_cross_entropy(logits * 1, targets) * 3.0 * len(many)).backward()
    assert_last_rows(logits.grad, rows.grad * 3.0)


# --- reproducibility


def test_gradients_are_bitwise_reproducible(randn):
    qkv, upstream, arguments = attention_inputs(randn, *((2, 150, 4, 2, 32) if ON_GPU else (1, 70, 2, 1, 16)))
    x, weight = (randn(300, 200), randn(200)) if ON_GPU else (randn(70, 40), randn(40))
    repeats = 20 if ON_GPU else 1

    def gradients():
        yield run(on_qkv(llama.triton_attention, arguments), [qkv], [upstream], torch.float32)
        yield run(lambda *t: llama.triton_rmsnorm(*t, 1e-5), [x, x, weight], [x, x], torch.float32)

    first = list(gradients())
    for _ in range(repeats):
        for expected, actual in zip(first, gradients(), strict=False):
            assert all(torch.equal(e, a) for e, a in zip(expected, actual, strict=False))


# --- AdamW


UNUSUAL = (  # bit patterns: the NaN of a GPU, quiet and signalling ones, infinities, the largest and smallest numbers
    0x7FFFFFFF, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0xFFC00000, 0xFF800001, 0x7F800000, 0xFF800000,
    0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0xFF7F7FFF, 0x00000001, 0x80000001, 0x007FFFFF, 0x3F807FFF,
)  # fmt: skip


def floats(patterns, device):
    return torch.from_numpy(np.array(patterns, np.uint32).view(np.float32)).to(device)


@pytest.mark.parametrize("low_precision", [False, True])
def test_adamw_keeps_what_is_no_number(device, low_precision):
    model = torch.nn.Linear(len(UNUSUAL), 1, bias=False).to(device)
    optimizer = llama.FlatAdamW(model, lr=1e-3, low_precision=low_precision, weight_decay=0.0)
    optimizer.reset([floats(UNUSUAL, device)[None]])
    expected = optimizer.weights()[0].clone()
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()  # without a gradient nothing moves, whatever the weight
    in_use = expected.bfloat16() if low_precision else expected
    for actual, wanted in ((optimizer.weights()[0], expected), (model.weight.detach(), in_use)):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)
    optimizer.exp_avg.copy_(floats([0x7FFFFFFF], device))  # the NaN that a GPU makes
    optimizer.step()
    assert model.weight.isnan().all() and optimizer.weights()[0].isnan().all()
    optimizer.reset([torch.ones(1, len(UNUSUAL), device=device)])
    for not_a_number in (float("nan"), float("inf")):
        model.weight.grad = torch.full_like(model.weight, not_a_number)
        optimizer.step()
        assert model.weight.isnan().all() and optimizer.weights()[0].isnan().all()
        optimizer.reset([torch.ones(1, len(UNUSUAL), device=device)])


@pytest.mark.parametrize("lr", [1e-3, 1e-5])
def test_adamw_loses_no_digits_of_a_small_learning_rate(randn, lr):
    """1 - lr * weight_decay would: PyTorch's weights shrink by a tenth too much at 1e-5."""
    initial, weights = randn(3000), []
    for kind, dtype in ((llama.FlatAdamW, torch.float32), (torch.optim.AdamW, torch.float64)):
        model = torch.nn.ParameterList([initial.to(dtype)])
        optimizer = kind(model if kind is llama.FlatAdamW else model.parameters(), lr)
        for _ in range(20):
            model[0].grad = torch.zeros_like(model[0])
            optimizer.step()
        weights.append(model[0].detach().double())
    drift = ((weights[0] - weights[1]) * initial.sign()).mean() / (weights[1] - initial).abs().mean()
    assert drift.abs() < 0.05


@pytest.mark.parametrize("low_precision", [False, True])
def test_weights_that_are_written_are_those_that_are_updated(device, low_precision):
    """In bf16 the lower halves of the old weights must not be added to new ones."""
    model = torch.nn.Linear(3, 50, bias=False).to(device)
    optimizer = llama.FlatAdamW(model, lr=1e-3, low_precision=low_precision)
    for write in (lambda w: model.load_state_dict({"weight": w}), model.weight.detach().copy_):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        written = torch.linspace(-1, 1, 150, device=device).view(50, 3).bfloat16().float()
        assert torch.equal(copy.deepcopy(optimizer).weights()[0], optimizer.weights()[0])
        write(written)
        assert torch.equal(optimizer.weights()[0], written)
