"""Each kernel, forward and every gradient, against float64.

The rule: our error against float64 is at most twice that of plain PyTorch in the same precision, plus a small atol.
"""

import collections
import copy
import functools
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

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


# --- the rule


def run(function, inputs, upstream, dtype, place=lambda number, x: x.clone()):
    """Outputs and gradients of function(*inputs), in dtype, as float64. Integers and None keep their type.

    place(number, x) lays each tensor into memory; number counts inputs and upstream gradients.
    """

    def leaf(number, x):
        is_real = x.is_floating_point()
        x = place(number, x.to(dtype) if is_real else x)
        return x.detach().requires_grad_(is_real)

    leaves = [x if x is None else leaf(number, x) for number, x in enumerate(inputs)]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    pairs = enumerate(zip(upstream, outputs, strict=False), len(inputs))
    torch.autograd.backward(outputs, [place(number, u.to(o.dtype)) for number, (u, o) in pairs])
    grads = [x.grad for x in leaves if x is not None and x.requires_grad]
    return [t.detach().double() for t in (*outputs, *grads)]


def assert_as_accurate(actual, plain, exact, dtype, factor=1, floor=0.0):
    """The rule, with an atol that may be larger by a factor, and that counts the largest element as floor more."""
    for index, (a, p, e) in enumerate(zip(actual, plain, exact, strict=True)):
        assert a.shape == e.shape
        atol = factor * ATOL[dtype] * (e.abs().max() + floor)
        error, allowed = (a - e).abs().max(), 2 * (p - e).abs().max() + atol
        assert error <= allowed, f"tensor {index}: error {error:.2e}, allowed {allowed:.2e}"


def assert_as_accurate_as_torch(ours, reference, inputs, upstream, dtype, *place, **allowance):
    runs = (ours, dtype), (reference, dtype), (reference, torch.float64)
    results = (run(function, inputs, upstream, d, *place) for function, d in runs)
    assert_as_accurate(*results, dtype, **allowance)


# --- the operations: each takes its sizes, and returns itself, its reference, the inputs and the upstream gradients


def rmsnorm(randn, *shape, has_branch=True):
    def of(norm):  # without a branch the residual is the input itself
        return lambda *tensors: norm(*tensors, 0.5)[: 1 + has_branch]  # an eps that counts

    branch = randn(*shape) if has_branch else None
    inputs = [randn(*shape), branch, randn(shape[-1])]
    upstream = [randn(*shape), randn(*shape)]
    return of(llama.triton_rmsnorm), of(llama.torch_rmsnorm), inputs, upstream


def linear(randn, *sizes):
    *rows, inner, outer = sizes
    return llama.triton_linear, F.linear, [randn(*rows, inner), randn(outer, inner)], [randn(*rows, outer)]


def swiglu(randn, *sizes, bugs=()):
    *rows, hidden, ffn = sizes
    # Scaled, so that the gates are about 1: far from it silu is flat.
    inputs = [randn(*rows, hidden), randn(2 * ffn, hidden) * hidden**-0.5, randn(hidden, ffn) * ffn**-0.5]
    ours = functools.partial(llama.triton_swiglu, bugs=bugs)
    return ours, llama.torch_swiglu, inputs, [randn(*rows, hidden)]


def embedding(randn, *sizes):
    *shape, vocab, dim = sizes
    tokens = (1e3 * randn(*shape)).long() % vocab
    return llama.triton_embedding, F.embedding, [tokens, randn(vocab, dim)], [randn(*shape, dim)]


def cross_entropy(randn, rows, vocab, factor=1.0, ignored=False):
    logits = randn(rows, vocab) * 4
    targets = torch.arange(rows, device=logits.device) * 7919 % vocab
    targets[-1] = vocab - 1
    if ignored:
        targets[1] = -100

    def ours(logits, targets):  # as it overwrites the logits, they may not be a leaf
        return llama.triton_cross_entropy(logits.view_as(logits), targets)

    def reference(logits, targets):  # the loss in fp32 or better, as autocast has it
        return llama.torch_cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets)

    return ours, reference, [logits, targets], [torch.tensor(factor, device=logits.device)]


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


def attention(randn, *sizes, **kwargs):
    """sizes: batch, seq_len, heads, kv_heads, head_dim"""
    qkv, upstream, arguments = attention_inputs(randn, *sizes)
    ours = on_qkv(llama.triton_attention, arguments, **kwargs)
    return ours, on_qkv(llama.torch_attention, arguments), [qkv], [upstream]


OPERATIONS = dict(
    linear=linear,
    rmsnorm=rmsnorm,
    rmsnorm_alone=functools.partial(rmsnorm, has_branch=False),
    swiglu=swiglu,
    swiglu_naive=functools.partial(swiglu, bugs=["triton_matmul_swiglu"]),
    embedding=embedding,
    cross_entropy=cross_entropy,
    cross_entropy_ignoring=functools.partial(cross_entropy, factor=-2.5, ignored=True),
    attention=attention,
    attention_badly_strided=functools.partial(attention, bugs=["noncontiguous_kv"]),
)
# Odd widths, one row, more rows than a tile has, rows of several tiles; tokens that repeat, and that do not occur;
# grouped queries, heads that are no power of two, sequences of one token, of more than a tile and of two launches.
SIZES = """
# operation            | sizes, the first in every type and layout            | slow, in every type    | on a GPU
linear                 | 3x5x33x40 1x1x1
rmsnorm                | 9x41 1x64 2x7x123 65x512 3x1x2048 2x5000             | 300x200
rmsnorm_alone          | 3x5x96 1x5000
swiglu                 | 2x3x20x50 1x16x24 3x32x1030
swiglu_naive           | 2x3x150x7
embedding              | 2x3x5x5x16 1x70x40 3x9x30x70                         | 3x700x7x1500
cross_entropy          | 3x97 1x2 5x1000 2x16384 2x33000 1x70001
cross_entropy_ignoring | 4x11 3x8200 2x81920
attention              | 1x37x2x1x16 1x1x1x1x16 2x15x3x1x6 1x64x4x2x64 1x65x2x2x96 1x40x2x1x40 1x48x2x1x80 \
    1x96x2x1x128 | 2x37x4x4x32 2x33x8x2x40 1x50x8x1x16 1x130x2x1x32 1x200x4x1x24 \
    | 2x128x8x4x64 2x512x8x4x64 1x1024x8x2x128 2x1000x4x4x80 1x2048x4x2x64 2x1000x4x2x128
attention_badly_strided | 2x33x4x2x10
"""
ROWS = [line.split("|") for line in SIZES.strip().splitlines()[1:]]
FIRST = [(name.strip(), columns[0].split()[0]) for name, *columns in ROWS]


def all_cases():
    """An operation's name, its sizes and a type, with marks."""
    for name, *columns in ROWS:
        for column, mark in zip(columns, (None, pytest.mark.slow, pytest.mark.gpu), strict=False):
            for number, sizes in enumerate(column.split()):
                yield from (case(name.strip(), sizes, dtype, mark, number == 0) for dtype in ALL_DTYPES)


def case(name, sizes, dtype, mark, is_first):
    is_slow = mark is None and not is_first and dtype != torch.float32
    marks = [mark] if mark else [pytest.mark.slow] if is_slow else []
    if "attention" in name and dtype == torch.bfloat16:
        # Triton's interpreter multiplies the bit patterns of bf16 matrices: kernels with a tl.dot must be compiled.
        marks.append(pytest.mark.compiled)
    return pytest.param(name, sizes, dtype, marks=marks)


def make(randn, name, sizes):
    """Return the operation's function, its reference, their inputs, and upstream gradients."""
    return OPERATIONS[name](randn, *map(int, sizes.split("x")))


@pytest.mark.parametrize("name, sizes, dtype", [*all_cases()])
def test_values_and_gradients(randn, name, sizes, dtype):
    assert_as_accurate_as_torch(*make(randn, name, sizes), dtype)


each_operation = pytest.mark.parametrize("name, sizes", FIRST)


# --- any layout


def strided_like(x):
    """The same values with every dimension strided; what lies between them is NaN."""
    holder = x.new_full([2 * n for n in x.shape], float("nan") if x.is_floating_point() else -1)
    view = holder[tuple(slice(None, None, 2) for _ in x.shape)]
    return view.copy_(x)


def in_memory_order(x, order, padding):
    """The same values, the dimensions lying in memory in this order, the innermost rows padded."""
    shape = [x.shape[dim] for dim in order]
    holder = x.new_full((*shape[:-1], shape[-1] + padding), float("nan") if x.is_floating_point() else -1)
    inverse = [order.index(dim) for dim in range(x.dim())]
    return holder[..., : shape[-1]].permute(inverse).copy_(x)


PLACES = {  # no two tensors have the same strides
    "padded": lambda number, x: in_memory_order(x, [*range(x.dim())], 1 + number),
    "transposed": lambda number, x: in_memory_order(x, [*reversed(range(x.dim()))], 1 + number),
    "strided": lambda number, x: strided_like(x),
    "expanded": lambda number, x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@each_operation
def test_any_layout(randn, name, sizes, place):
    """Of floating-point inputs, of tokens and targets, and of the upstream gradients."""

    def placed(number, x):
        return place(number, x) if x.dim() else x

    assert_as_accurate_as_torch(*make(randn, name, sizes), torch.float32, placed, factor=2, floor=0.1)


# --- what every operation does


@each_operation
def test_same_bits_from_run_to_run(randn, name, sizes):
    ours, _, inputs, upstream = make(randn, name, sizes)
    first = run(ours, inputs, upstream, torch.float32)
    for _ in range(20 if ON_GPU else 1):
        assert all(map(torch.equal, first, run(ours, inputs, upstream, torch.float32)))


@each_operation
def test_a_second_derivative_is_refused(randn, name, sizes):
    ours, _, inputs, (upstream, *_) = make(randn, name, sizes)
    leaf = inputs[name == "embedding"].requires_grad_()
    outputs = ours(*inputs)
    output = outputs if torch.is_tensor(outputs) else outputs[0]
    with pytest.raises(RuntimeError, match="FunctionBackward has no second derivative"):
        torch.autograd.grad(output, leaf, upstream, create_graph=True)


@pytest.mark.parametrize("name, sizes", [("swiglu", "3x16x8"), ("cross_entropy_ignoring", "4x11")])
def test_a_second_pass_over_what_was_overwritten_is_refused(randn, name, sizes):
    ours, _, (x, *others), (upstream,) = make(randn, name, sizes)
    output = ours(x.requires_grad_() * 1, *others)
    output.backward(upstream, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward(upstream)


def test_tokens_may_have_32_bits(randn, device):
    tokens, weight = torch.tensor([3, 0, 3], device=device), randn(3, 5)
    for integers in (tokens, tokens.int()):
        assert torch.equal(llama.triton_embedding(integers // 2, weight), weight[tokens // 2])
        loss = llama.triton_cross_entropy(weight.clone(), integers)
        torch.testing.assert_close(loss, F.cross_entropy(weight, tokens))


def attend_to(x, rows=64, positions=3, layout=torch.clone):
    """Attention of two query heads of 16, which share one of k and v."""
    weights = x.new_ones(rows, 8), x.new_ones(8, 32)
    tables = map(layout, llama.rope_tables(positions, 16, x.device))
    return llama.triton_attention(x[None], *weights, *tables, 2, 1)


REFUSED = {  # what the message has: a call with x (3, 8) and weights (12, 8)
    r"weight has .*\(7,\), and \(8,\)": lambda x, w: llama.triton_rmsnorm(x, None, w[0, :7], 1e-5),
    r"branch has .*\(1, 8\), and \(3, 8\)": lambda x, w: llama.triton_rmsnorm(x, x[:1], w[0], 1e-5),
    "x is torch.float64": lambda x, w: llama.triton_rmsnorm(x.double(), None, w[0], 1e-5),
    "weight as contiguous": lambda x, w: llama.rmsnorm_forward(x, None, strided_like(w[0]), 1e-5),
    "gate_up_weight has the shape": lambda x, w: llama.triton_swiglu(x, w[:11], w[:8, :6]),
    "gate_up as contiguous": lambda x, w: llama.swiglu_activation(strided_like(w)),
    "both as contiguous": lambda x, w: llama.swiglu_activation_backward_(strided_like(w), w),
    "both as contiguous$": lambda x, w: llama.swiglu_activation_backward_(w, strided_like(w)),
    "is a leaf": lambda x, w: llama.triton_cross_entropy(x.requires_grad_(), x[:, 0].long()),
    "logits has the shape": lambda x, w: llama.triton_cross_entropy(x, x[:2, 0].long()),
    "targets are torch.float32": lambda x, w: llama.triton_cross_entropy(x, x[:, 0]),
    "targets are torch.bool": lambda x, w: llama.triton_cross_entropy(x, x[:, 0] > 0),
    "qkv_weight has the shape": lambda x, w: attend_to(x, rows=63),
    "x has 3 positions, the rotary tables have 2": lambda x, w: attend_to(x, positions=2),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_be_read_wrongly_is_refused(randn, message):
    with pytest.raises((ValueError, TypeError, AssertionError)) as raised:
        REFUSED[message](randn(3, 8), randn(12, 8))
    assert re.search(message, str(raised.value))


def test_strided_tables_are_copied_or_refused(randn):
    """Kernels read them and a packed projection as contiguous."""
    x, o = randn(3, 8), randn(1, 3, 1, 16)
    strided = strided_like(x)
    assert torch.equal(attend_to(x), attend_to(x, layout=strided_like))
    for refusal in (
        lambda: llama.rope_(strided[None], 1, 8, x, x),
        lambda: llama.rope_(x[None], 1, 8, strided, x),
        lambda: llama.rope_(x[None], 1, 8, x, strided),
        lambda: llama.flash_attention_backward(o, (o, o, o, o, o[..., 0]), (o, o, o), (strided, x)),
        lambda: llama.flash_attention_backward(o, (o, o, o, o, o[..., 0]), (o, o, o), (x, strided)),
    ):
        with pytest.raises(AssertionError):
            refusal()


# --- column sums and RMSNorm


@pytest.mark.parametrize("rows", [1, 127, 129, 300])
@pytest.mark.parametrize("accumulate", [False, True])
def test_column_sums(randn, rows, accumulate):
    """Of several matrices, as a group of layers has them; a tile is 128 x 16."""
    partial, sums = randn(2, rows, 37), in_memory_order(randn(2, 37), [0, 1], 3)
    expected = partial.double().sum(1) + (sums.double() if accumulate else 0)
    llama.write_column_sums(sums, accumulate, partial)
    torch.testing.assert_close(sums.double(), expected, rtol=1e-6, atol=1e-5)


# The interpreter does not round to bf16, it cuts off.
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.compiled)])
def test_rmsnorm_normalises_the_residual_that_it_stores(randn, dtype):
    x, branch, weight = (t.to(dtype) for t in (randn(20, 256), randn(20, 256), torch.ones_like(randn(256))))
    y, residual = llama.triton_rmsnorm(x, branch, weight, 1e-5)
    exact, _ = llama.torch_rmsnorm(residual.double(), None, weight.double(), 1e-5)
    # Rounded once: half a unit in the last place, and a little for fp32.
    torch.testing.assert_close(y.double(), exact, rtol=0.51 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("block_size", [64, 512, 1024])
@pytest.mark.parametrize("has_branch", [False, True])
def test_rmsnorm_block_smaller_than_the_row(randn, block_size, has_branch):
    x, branch, weight = randn(5, 600), randn(5, 600) if has_branch else None, randn(600)
    residual, y, rstd = llama.rmsnorm_forward(x, branch, weight, 1e-5, block_size)
    exact = [t if t is None else t.double() for t in (x, branch, weight)]
    torch.testing.assert_close((y.double(), residual.double()), llama.torch_rmsnorm(*exact, 1e-5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_branch", [True, False])
def test_rmsnorm_of_which_only_the_residual_is_used(randn, with_branch):
    x, branch, weight = (t.requires_grad_() for t in (randn(3, 8), randn(3, 8), randn(8)))
    upstream = randn(3, 8)
    _, residual = llama.triton_rmsnorm(x * 1, branch if with_branch else None, weight, 1e-5)
    residual.backward(upstream)
    assert torch.equal(x.grad, upstream) and weight.grad is None
    assert torch.equal(branch.grad, upstream) if with_branch else branch.grad is None


# --- attention


LAYOUTS = {  # the order of (batch, seq, head, head_dim) in memory and the padding: no two tensors have the same strides
    "q": ([0, 1, 2, 3], 1), "k": ([3, 0, 2, 1], 2), "v": ([2, 0, 1, 3], 3), "o": ([1, 2, 0, 3], 5),
    "o_grad": ([0, 3, 1, 2], 1), "q_grad": ([1, 0, 3, 2], 4), "k_grad": ([2, 1, 0, 3], 7), "v_grad": ([0, 2, 3, 1], 6),
}  # fmt: skip


@pytest.fixture(params=[(40, 128), (40, 0), slow_if(True, (150, 128))], ids=["40 in one", "40 in two", "150 in two"])
def seq_len(request, monkeypatch):
    """The length of a sequence for attention, whose backward pass is one launch or two."""
    length, limit = request.param
    monkeypatch.setattr(llama, "FUSED_BACKWARD_SEQ_LEN", limit)
    return length


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sizes", [(2, 33, 2, 1, 40), (1, 64, 3, 1, 16)], ids=str)  # the latter fills its tiles
def test_attention_of_short_sequences_in_two_backward_passes(randn, monkeypatch, sizes, dtype):
    monkeypatch.setattr(llama, "FUSED_BACKWARD_SEQ_LEN", 0)
    assert_as_accurate_as_torch(*attention(randn, *sizes), dtype)


def exact_attention(q, k, v, o_grad):
    """o and the gradients of q, k, v in float64."""
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    heads = [t.transpose(1, 2) for t in exact]
    o = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)
    return [o.detach(), *torch.autograd.grad(o, exact, o_grad.double())]


def assert_attention_is_exact(randn, seq_len, place, batch=1, kv_heads=1):
    """Forward and backward of two query heads for each of k and v, every tensor where place() puts it."""
    shapes = ((batch, seq_len, heads * kv_heads, 16) for heads in (2, 1, 1, 2))
    q, k, v, o_grad = (
        place(name, randn(*shape)) for name, shape in zip(("q", "k", "v", "o_grad"), shapes, strict=True)
    )
    o, lse = llama.flash_attention_forward(q, k, v)
    grads = [place(f"{name}_grad", torch.empty_like(t)) for name, t in (("q", q), ("k", k), ("v", v))]
    llama.flash_attention_backward(o_grad, (q, k, v, place("o", o), lse), grads)
    for actual, expected in zip((o, *grads), exact_attention(q, k, v, o_grad), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


def test_attention_in_any_layout(randn, seq_len):
    """Every argument strided, and a different layout for each."""
    assert_attention_is_exact(randn, seq_len, lambda name, t: strided_like(t), batch=2, kv_heads=2)
    place = lambda name, t: in_memory_order(t, *LAYOUTS[name])  # noqa: E731
    assert_attention_is_exact(randn, seq_len, place, batch=2, kv_heads=3)


def test_attention_to_strided_keys(randn, seq_len):
    """Of padded heads in half precision: with Triton 3.6, H100s read past the end of shared memory."""
    q, k, v = randn(3, 1, seq_len, 2, 18).half()
    o, _ = llama.flash_attention_forward(q, strided_like(k), v)
    torch.testing.assert_close(o.double(), exact_attention(q, k, v, q)[0], rtol=0.01, atol=0.01)


@pytest.fixture
def use_tile(monkeypatch):
    """A function that sets the function of a pass that gives its tile, and no longer after the test."""

    def use(tile_of):
        monkeypatch.setattr(llama, "attention_tile", lambda name, *key: llama.AttentionTile(*tile_of(name)))
        llama.attention_launch.cache_clear()

    yield use
    llama.attention_launch.cache_clear()


def before_nan(name, t):
    """The same values; what lies behind each sequence is NaN."""
    holder = t.new_full((t.shape[0], t.shape[1] + 64, *t.shape[2:]), float("nan"))
    return holder[:, : t.shape[1]].copy_(t)


@pytest.mark.parametrize("m, n, seq_len, fused_seq_len", [  # only the smaller of both blocks divides 48
    slow_if(seq_len != {32: 48, 64: 64}[max(m, n)], m, n, seq_len, fused_seq_len)
    for m, n in [(16, 32), (32, 16), (16, 64), (64, 16)] for seq_len in (40, 48, 64, 100, 144, 150)
    for fused_seq_len in ([128, 0] if seq_len <= 128 else [128])
])  # fmt: skip
def test_attention_with_tiles_that_are_not_square(randn, monkeypatch, use_tile, m, n, seq_len, fused_seq_len):
    monkeypatch.setattr(llama, "FUSED_BACKWARD_SEQ_LEN", fused_seq_len)
    use_tile(lambda name: (m, n, 4, 1))
    assert_attention_is_exact(randn, seq_len, before_nan)


@pytest.mark.parametrize("key, seq_len", [  # one backward kernel, and two; neither length is a multiple of a tile
    slow_if(key not in (("amd", "half", 64), ("amd", "any", 128)), key, seq_len)
    for key in llama.ATTENTION_TILES if key[0] == "amd" for seq_len in (100, 150)
])  # fmt: skip
def test_attention_with_the_tiles_of_amd(randn, use_tile, key, seq_len):
    use_tile(lambda name: llama.ATTENTION_TILES[key][llama.PASSES.index(name)])
    assert_attention_is_exact(randn, seq_len, before_nan)


@pytest.mark.parametrize("dimension", ["seq", "head", "dim"])
@pytest.mark.parametrize("far", llama.Strides._fields)
def test_attention_beyond_two_to_the_31_elements_is_refused(far, dimension):
    """Offsets within a sequence have 32 bits."""
    shape = dict(batch=1, seq=40, head=4, dim=16)
    packed = llama.Stride(0, 64, 16, 1)

    def launch(stride):
        strides = llama.Strides(*[packed] * 8)._replace(**{far: packed._replace(**{dimension: stride})})
        key = tuple(shape.values()), 2, strides, torch.float32, "ieee", False, "cpu"
        llama.attention_launch("dq", *key)

    most = 2**31 // shape[dimension]
    launch(most - 2**13)
    with pytest.raises(ValueError, match="count within a sequence in 32 bits"):
        launch(most)


tl, rounded_like = llama.tl, llama.rounded_like  # a kernel sees the names of its own module only
RoundingConstants = collections.namedtuple("RoundingConstants", "ROUND_BY_HAND")


@llama.jit
def rounding_kernel(x_ptr, y_ptr, C, BLOCK_SIZE: tl.constexpr):
    places = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + places)
    tl.store(y_ptr + places, rounded_like(x, x, C))


def test_bf16_is_rounded_to_nearest(device):
    """All bf16 values, infinities and what is no number among them, and what lies between each two neighbours."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device) << 16
    is_finite = values.view(torch.float32).isfinite()
    for between in (0, 1, 2**15 - 1, 2**15, 2**15 + 1, 2**16 - 1):
        x = torch.where(is_finite, values + between, values).view(torch.float32)
        y = torch.zeros_like(x, dtype=torch.bfloat16)
        constants = dict(C=RoundingConstants(True), BLOCK_SIZE=4096)
        llama.launch(rounding_kernel, (16,), (x, y), (), constants)
        # Of ties, the one further from zero.
        nearest = torch.where(is_finite, values + 2**16, values).view(torch.float32) if between == 2**15 else x
        torch.testing.assert_close(y, nearest.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_rotary_embedding(randn, device):
    """Dimension i of the first half and i of the second are a complex number, which is turned."""
    cos, sin = llama.rope_tables(200, 4, device, 50.0)
    frequencies = torch.tensor([1.0, 50**-0.5], dtype=torch.float64, device=device)
    angles = torch.arange(200, dtype=torch.float64, device=device)[:, None] * frequencies
    torch.testing.assert_close((cos.double(), sin.double()), (angles.cos(), angles.sin()), rtol=0, atol=1e-6)
    x = randn(2, 200, 3, 4).double()
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    rotated = llama.torch_rope(x, angles.cos(), angles.sin())
    torch.testing.assert_close(rotated, torch.cat((turned.real, turned.imag), dim=-1))


# --- SwiGLU and embedding


def test_swiglu_activation_at_extreme_gates(device):
    gate = torch.tensor([[-1e4, -90.0, -1.0, 0.0, 1.0, 90.0, 1e4]], device=device)
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=1)
    torch.testing.assert_close(llama.swiglu_activation(gate_up), F.silu(gate))
    llama.swiglu_activation_backward_(torch.ones_like(gate), gate_up)
    assert gate_up.isfinite().all()


def test_embedding_in_several_tiles(randn, monkeypatch):
    """Of tokens and of columns."""
    monkeypatch.setattr(llama, "EMBEDDING_TILE", (16, 32))
    assert_as_accurate_as_torch(*embedding(randn, 3, 15, 5, 40), torch.float32)


# --- cross-entropy


def assert_loss_and_gradient(logits, targets, **tolerance):
    """The loss and the gradient of float64."""
    logits, exact = logits.requires_grad_(), logits.detach().double().requires_grad_()
    expected = llama.torch_cross_entropy(exact, targets)
    loss = llama.triton_cross_entropy(logits * 1, targets)
    grads = [torch.autograd.grad(y, x)[0].double() for y, x in ((loss, logits), (expected, exact))]
    torch.testing.assert_close((loss.detach().double(), grads[0]), (expected.detach(), grads[1]), **tolerance)


def test_cross_entropy_of_large_logits_is_finite(device):
    logits = torch.tensor([[3e4, -3e4, 0.0], [-3e4, -3e4, -3e4]], device=device)
    assert_loss_and_gradient(logits, torch.tensor([1, 2], device=device), rtol=1e-6, atol=1e-7)


def test_cross_entropy_of_a_masked_stretch(randn, device):
    """Of more than a tile, which has no maximum."""
    logits = randn(2, 20000).index_fill(1, torch.arange(9000, device=device), -float("inf"))
    assert_loss_and_gradient(logits, torch.tensor([9000, 19999], device=device), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("vocab", [1000, 8193, 20000])
def test_cross_entropy_of_peaked_logits(randn, device, vocab):
    """As accurate as PyTorch's where the log-sum is large: its rounding must not reach the probabilities."""
    ours, reference, (logits, _), one = cross_entropy(randn, 2, vocab)
    inputs = [15 * logits, torch.tensor([3, vocab - 1], device=device)]
    exact, plain = (run(reference, inputs, one, dtype) for dtype in (torch.float64, torch.float32))
    for a, p, e in zip(run(ours, inputs, one, torch.float32), plain, exact, strict=True):
        assert (a - e).norm() <= 2 * (p - e).norm() + 1e-7 * e.norm()


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


def test_cross_entropy_tells_who_kept_the_logits(randn, device):
    """Whoever's gradient needs the logits, which are overwritten; the others themselves need no gradient."""
    x, targets = randn(4, 11).requires_grad_(), torch.arange(4, device=device)
    for logits, kept in ((x * 1, torch.square), (randn(4, 11), x.__mul__)):
        kept = kept(logits).sum()
        llama.triton_cross_entropy(logits, targets)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()


# --- many elements, whose offsets have 64 bits


@pytest.fixture
def many(device):
    """(2^21 + 3, 1024) in bf16: more than 2^31 elements, of which the last rows are looked at."""
    return torch.empty(2**21 + 3, 1024, dtype=torch.bfloat16, device=device).normal_()


def assert_last_rows(actual, expected, scale=1.0):
    torch.testing.assert_close(actual[-4:].float() * scale, expected.float(), rtol=2e-2, atol=2e-2)


def many_norms(x):
    branch = x.detach()
    outputs = llama.triton_rmsnorm(x.requires_grad_(), branch, x.detach()[0], 1e-5)
    return *outputs, *torch.autograd.grad(outputs, x, (branch, branch))


def many_activations(x):
    hidden = llama.swiglu_activation(x)
    llama.swiglu_activation_backward_(hidden, x)
    return hidden, x


def many_losses(x):
    targets = torch.arange(len(x), device=x.device).flip(0) % 1024
    loss = llama.triton_cross_entropy(x.requires_grad_() * 1, targets)
    return torch.autograd.grad(loss * 3.0 * len(x), x)


@pytest.mark.gpu
@pytest.mark.parametrize("function", [many_norms, many_activations, many_losses])
def test_more_than_two_to_the_31_elements(many, function):
    """The last rows have the results that they have by themselves."""
    few = torch.cat((many[:1], many[-4:]))
    for actual, expected in zip(function(many), function(few), strict=True):
        assert_last_rows(actual, expected[-4:])


# --- AdamW


@pytest.mark.parametrize("low_precision", [False, True])
def test_adamw(randn, low_precision):
    """As torch.optim.AdamW in float64, with other rates, weights without a gradient and gradients of any scale."""
    values = [randn(*shape) for shape in [(3,), (1500,), (40, 60), (1,)]]
    ours, theirs = torch.nn.ParameterList(values), torch.nn.ParameterList(v.double() for v in values)
    optimizer = llama.FlatAdamW(ours, 1e-2, low_precision)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.01)
    initial = [w.clone() for w in optimizer.weights()]
    for p in ours.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.reset(initial)  # forgets the step
    for number, lr in enumerate([1e-2, 5e-2, 1e-2, 5e-2, 5e-2]):
        optimizer.lr.fill_(lr)
        reference.param_groups[0]["lr"] = lr
        for index, (p, q) in enumerate(zip(ours.parameters(), theirs.parameters(), strict=True)):
            p.grad = q.grad = None
            if (number + index) % 4:  # now and then it has none, and stays as it is
                p.grad = randn(*p.shape, dtype=p.dtype) * [1e-7, 1.0, 1e4][(number + index) % 3]
                q.grad = p.grad.double()
        optimizer.step()
        reference.step()
    for p, weight, q in zip(ours.parameters(), optimizer.weights(), theirs.parameters(), strict=True):
        torch.testing.assert_close(weight.double(), q.detach(), rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(p.detach().float(), weight, rtol=2**-8 if low_precision else 0, atol=0)


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


UNUSUAL = (  # bit patterns: the NaN of a GPU, quiet and signalling ones, infinities, the largest and smallest numbers
    0x7FFFFFFF, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0xFFC00000, 0xFF800001, 0x7F800000, 0xFF800000,
    0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0xFF7F7FFF, 0x00000001, 0x80000001, 0x007FFFFF, 0x3F807FFF,
    0x3F808001, 0x3F80FFFF, 0xBF818000,
)  # fmt: skip


def floats(patterns, device):
    return torch.from_numpy(np.array(patterns, np.uint32).view(np.float32)).to(device)


@pytest.mark.parametrize("low_precision", [False, True])
def test_adamw_keeps_what_is_no_number(device, low_precision):
    model = torch.nn.Linear(len(UNUSUAL), 1, bias=False).to(device)
    optimizer = llama.FlatAdamW(model, lr=1e-3, low_precision=low_precision, weight_decay=0.0)
    expected = floats(UNUSUAL, device)[None]
    optimizer.reset([expected])
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()  # without a gradient nothing moves, whatever the weight
    in_use = expected.bfloat16() if low_precision else expected
    for actual, wanted in ((optimizer.weights()[0], expected), (model.weight.detach(), in_use)):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)

    def assert_that_a_step_gives_nan():
        optimizer.step()
        assert model.weight.isnan().all() and optimizer.weights()[0].isnan().all()
        optimizer.reset([torch.ones(1, len(UNUSUAL), device=device)])

    optimizer.exp_avg.copy_(floats([0x7FFFFFFF], device))  # the NaN that a GPU makes
    assert_that_a_step_gives_nan()
    for not_a_number in (float("nan"), float("inf")):
        model.weight.grad = torch.full_like(model.weight, not_a_number)
        assert_that_a_step_gives_nan()


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
