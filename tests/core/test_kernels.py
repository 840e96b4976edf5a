"""Each kernel, forward and every gradient, against float64.

The rule: our error against float64 is at most twice that of plain PyTorch in the same precision, plus a small atol.
"""

import collections
import contextlib
import functools
import itertools
import re
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import tiny_llama_v3 as llama
from tests.core.tiny import owner_of

pytestmark = pytest.mark.triton

ON_GPU = torch.cuda.is_available()
ATOL = {
    torch.float32: 2e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}
ALL_DTYPES = list(ATOL)
NAN = float("nan")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fresh memory is full of NaN, so that an element which no kernel writes is seen."""
    new_empty = torch.Tensor.new_empty

    def poisoned(*args, **kwargs):
        tensor = new_empty(*args, **kwargs)
        return tensor.fill_(NAN) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


@pytest.fixture
def randn(device):
    generator = torch.Generator(device).manual_seed(0)

    return functools.partial(torch.randn, generator=generator, device=device)


# --- the rule


def as_given(number, x):
    """Lay a tensor into memory of its own; number counts the inputs and then the upstream gradients."""
    return x.clone()


def run(function, inputs, upstream, dtype, place=as_given):
    """Outputs and gradients of function(*inputs), in dtype, as float64, with tensors as place() lays them.

    Integers and None keep their type.
    """

    def leaf(number, x):
        if x is None:
            return None
        is_real = x.is_floating_point()
        x = place(number, x.to(dtype) if is_real else x)
        return x.detach().requires_grad_(is_real)

    leaves = [leaf(number, x) for number, x in enumerate(inputs)]
    outputs = function(*leaves)
    if torch.is_tensor(outputs):
        outputs = (outputs,)
    pairs = zip(upstream, outputs, strict=False)
    typed = (u.to(output.dtype) for u, output in pairs)
    placed = [place(number, u) for number, u in enumerate(typed, len(inputs))]
    torch.autograd.backward(outputs, placed)
    gradients = [x.grad for x in leaves if x is not None and x.requires_grad]
    return [t.detach().double() for t in (*outputs, *gradients)]


def largest(x):
    return x.abs().max()


def assert_as_accurate_as_torch(ours, reference, inputs, upstream, dtype, place=as_given):
    runs = (ours, dtype), (reference, dtype), (reference, torch.float64)
    results = [run(function, inputs, upstream, kind, place) for function, kind in runs]
    for index, (actual, plain, exact) in enumerate(zip(*results, strict=True)):
        assert actual.shape == exact.shape
        error, plain_error = largest(actual - exact), largest(plain - exact)
        allowed = 2 * plain_error + ATOL[dtype] * largest(exact)
        assert error <= allowed, f"tensor {index}: error {error:.2e}, allowed {allowed:.2e}"


# --- the operations: each takes sizes, and returns itself, its reference, the inputs and the upstream gradients


def rmsnorm(randn, *shape, has_branch=True):
    def of(norm):  # without a branch the residual is the input itself
        return lambda *tensors: norm(*tensors, 0.5)[: 1 + has_branch]  # an eps that counts

    branch = randn(*shape) if has_branch else None
    inputs = [randn(*shape), branch, randn(shape[-1])]
    upstream = [randn(*shape), randn(*shape)]
    return of(llama.triton_rmsnorm), of(llama.torch_rmsnorm), inputs, upstream


def linear(randn, *sizes):
    *rows, inner, outer = sizes
    inputs = [randn(*rows, inner), randn(outer, inner)]
    return llama.triton_linear, F.linear, inputs, [randn(*rows, outer)]


def swiglu(randn, *sizes, bugs=()):
    *rows, hidden, ffn = sizes
    # Scaled, so that the gates are about 1: far from it silu is flat.
    gate_up = randn(2 * ffn, hidden) * hidden**-0.5
    inputs = [randn(*rows, hidden), gate_up, randn(hidden, ffn) * ffn**-0.5]
    ours = functools.partial(llama.triton_swiglu, bugs=bugs)
    return ours, llama.torch_swiglu, inputs, [randn(*rows, hidden)]


def embedding(randn, *sizes):
    *shape, vocab, dim = sizes
    tokens = (1e3 * randn(*shape)).long() % vocab
    inputs = [tokens, randn(vocab, dim)]
    return llama.triton_embedding, F.embedding, inputs, [randn(*shape, dim)]


def cross_entropy(randn, rows, vocab, factor=1.0, ignored=False):
    logits = randn(rows, vocab) * 4
    targets = torch.arange(rows, device=logits.device) * 7919 % vocab
    targets[-1] = vocab - 1
    if ignored:
        targets[1] = -100

    def ours(logits, targets):  # as it overwrites the logits, they may not be a leaf
        return llama.triton_cross_entropy(logits.view_as(logits), targets)

    def reference(logits, targets):  # the loss in fp32 or better, as autocast has it
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return llama.torch_cross_entropy(logits, targets)

    return ours, reference, [logits, targets], [logits.new_tensor(factor)]


def attention(randn, batch, seq_len, heads, kv_heads, head_dim, bugs=()):
    """Attention of q, k and v themselves: projections that change nothing let them in and the output out."""
    width = heads * head_dim
    qkv = randn(batch, seq_len, width + 2 * kv_heads * head_dim)
    tables = llama.rope_tables(seq_len, head_dim, qkv.device)

    def of(attention, **kwargs):
        def function(qkv):
            eyes = (torch.eye(n).to(qkv) for n in (qkv.shape[-1], width))
            return attention(qkv, *eyes, *tables, heads, kv_heads, **kwargs)

        return function

    functions = of(llama.triton_attention, bugs=bugs), of(llama.torch_attention)
    return *functions, [qkv], [randn(batch, seq_len, width)]


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
attention_badly_strided | 2x17x2x1x10
"""
_, *LINES = SIZES.strip().splitlines()
ROWS = [re.split(r" *\| *", line) for line in LINES]
MARKS = None, pytest.mark.slow, pytest.mark.gpu  # of the columns


def case(name, sizes, dtype, mark, is_first):
    marks = [mark] if mark else []
    if not (mark or is_first or dtype == torch.float32):
        marks = [pytest.mark.slow]
    if "attention" in name and dtype == torch.bfloat16:
        # Triton's interpreter multiplies the bit patterns of bf16 matrices: kernels with a tl.dot must be compiled.
        marks.append(pytest.mark.compiled)
    return pytest.param(name, sizes, dtype, marks=marks)


CASES = [
    case(name, sizes, dtype, mark, number == 0)
    for name, *columns in ROWS
    for column, mark in zip(columns, MARKS, strict=False)
    for number, sizes in enumerate(column.split())
    for dtype in ALL_DTYPES
]


def make(randn, name, sizes):
    """Return the operation's function, its reference, their inputs, and upstream gradients."""
    numbers = map(int, sizes.split("x"))
    return OPERATIONS[name](randn, *numbers)


@pytest.mark.parametrize("name, sizes, dtype", CASES)
def test_values_and_gradients(randn, name, sizes, dtype):
    assert_as_accurate_as_torch(*make(randn, name, sizes), dtype)


FIRST = [(name, sizes.split()[0]) for name, sizes, *_ in ROWS]
each_operation = pytest.mark.parametrize("name, sizes", FIRST)


# --- any layout
# Kernels read activations by their strides; one stride taken for another shows only where all differ.


def like_nan(x, shape):
    """A tensor of another shape, full of what must not be read."""
    return x.new_full(shape, NAN if x.is_floating_point() else -1)


def strided_like(x):
    """The same values with every dimension strided."""
    holder = like_nan(x, [2 * n for n in x.shape])
    every_second = (slice(None, None, 2),) * x.dim()
    return holder[every_second].copy_(x)


def in_memory_order(x, order, padding):
    """The same values, the dimensions lying in memory in this order, the innermost rows padded."""
    *outer, row = (x.shape[dim] for dim in order)
    holder = like_nan(x, [*outer, row + padding])
    inverse = [order.index(dim) for dim in range(x.dim())]
    return holder[..., :row].permute(inverse).copy_(x)


def padded(number, x):
    return in_memory_order(x, list(range(x.dim())), 1 + number)  # no two tensors have the same strides


def transposed(number, x):
    return in_memory_order(x, list(range(x.dim()))[::-1], 1 + number)


def strided(number, x):
    return strided_like(x)


def expanded(number, x):
    return x[:1].expand_as(x)


@pytest.mark.parametrize("place", [padded, transposed, strided, expanded])
@each_operation
def test_any_layout(randn, name, sizes, place):
    """Of floating-point inputs, of tokens and targets, and of the upstream gradients."""

    def placed(number, x):
        return place(number, x) if x.dim() else x

    assert_as_accurate_as_torch(*make(randn, name, sizes), torch.float32, placed)


# --- what every operation does
# A sum in an order that depends on timing shows as other bits; autograd must not use what a kernel has overwritten.


@each_operation
def test_same_bits_from_run_to_run(randn, name, sizes):
    ours, _, *tensors = make(randn, name, sizes)
    first = run(ours, *tensors, torch.float32)
    for _ in range(20 if ON_GPU else 1):
        again = run(ours, *tensors, torch.float32)
        assert all(map(torch.equal, first, again))


@each_operation
def test_a_second_derivative_is_refused(randn, name, sizes):
    ours, _, inputs, upstream = make(randn, name, sizes)
    leaf = inputs[name == "embedding"].requires_grad_()
    outputs = ours(*inputs)
    output = outputs if torch.is_tensor(outputs) else outputs[0]
    with pytest.raises(RuntimeError, match="FunctionBackward has no second derivative"):
        torch.autograd.grad(output, leaf, upstream[0], create_graph=True)


@each_operation
def test_an_input_alone_has_the_gradient_that_it_has_among_all(randn, name, sizes):
    """As where the other weights are frozen, or what goes into the first layer needs no gradient."""
    ours, _, inputs, upstream = make(randn, name, sizes)
    numbers = [number for number, x in enumerate(inputs) if x is not None and x.is_floating_point()]

    def gradients(*needed):
        leaves = [x if x is None else x.clone() for x in inputs]
        for number in needed:
            leaves[number].requires_grad_()
        outputs = ours(*leaves)
        outputs = (outputs,) if torch.is_tensor(outputs) else outputs
        return torch.autograd.grad(outputs, [leaves[number] for number in needed], upstream[: len(outputs)])

    for number, among_all in zip(numbers, gradients(*numbers), strict=True):
        (alone,) = gradients(number)
        assert torch.equal(alone, among_all), f"input {number}"


@pytest.mark.parametrize("name", ["swiglu", "cross_entropy_ignoring"])
def test_a_second_pass_over_what_was_overwritten_is_refused(randn, name):
    sizes = "4x11" if "cross" in name else "3x16x8"
    ours, _, (x, *others), upstream = make(randn, name, sizes)
    output = ours(x.requires_grad_() * 1, *others)
    output.backward(*upstream, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward(*upstream)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tokens_may_have_32_bits(randn, device, dtype):
    tokens = torch.tensor([3, 0, 2], device=device)
    weight = randn(4, 5)
    assert torch.equal(llama.triton_embedding(tokens.to(dtype), weight), weight[tokens])
    loss = llama.triton_cross_entropy(weight[1:].clone(), tokens.to(dtype))
    assert_close(loss, F.cross_entropy(weight[1:], tokens))


# --- what would be read wrongly is refused
# Kernels have no bounds: a wrong shape, type or layout would give numbers, and not an error.


def attend_to(x, rows=64, positions=3, layout=torch.clone):
    """Attention of two query heads of 16, which share one of k and v."""
    weights = x.new_ones(rows, 8), x.new_ones(8, 32)
    tables = map(layout, llama.rope_tables(positions, 16, x.device))
    return llama.triton_attention(x[None], *weights, *tables, 2, 1)


def attention_of(x, half=(), **changes):
    """Attention of four query heads of 16 to two, of which some tensors have another type, or another shape."""
    shapes = dict(q=(1, 5, 4, 16), k=(1, 5, 2, 16), v=(1, 5, 2, 16), out=(1, 5, 4, 16)) | changes
    return llama.flash_attention_forward(
        **{name: x.new_ones(shape, dtype=torch.float16 if name in half else None) for name, shape in shapes.items()}
    )


REFUSED = {  # what the message has: a call with x (3, 8), weights (12, 8) and tokens (3,)
    r"weight has .*\(7,\), and \(8,\)": lambda x, w, t: llama.triton_rmsnorm(x, None, w[0, :7], 1e-5),
    r"branch has .*\(1, 8\), and \(3, 8\)": lambda x, w, t: llama.triton_rmsnorm(x, x[:1], w[0], 1e-5),
    "x is torch.float64": lambda x, w, t: llama.triton_rmsnorm(x.double(), None, w[0], 1e-5),
    "weight as contiguous": lambda x, w, t: llama.rmsnorm_forward(x, None, strided_like(w[0]), 1e-5),
    "gate_up_weight has the shape": lambda x, w, t: llama.triton_swiglu(x, w[:11], w[:8, :6]),
    "gate_up as contiguous": lambda x, w, t: llama.swiglu_activation(strided_like(w)),
    "both as contiguous": lambda x, w, t: llama.swiglu_activation_backward_(strided_like(w), w),
    "both as contiguous$": lambda x, w, t: llama.swiglu_activation_backward_(w, strided_like(w)),
    "is a leaf": lambda x, w, t: llama.triton_cross_entropy(x.requires_grad_(), t),
    "logits has the shape": lambda x, w, t: llama.triton_cross_entropy(x, t[:2]),
    "targets are torch.float32": lambda x, w, t: llama.triton_cross_entropy(x, t.float()),
    "targets are torch.bool": lambda x, w, t: llama.triton_cross_entropy(x, t > 0),
    "qkv_weight has the shape": lambda x, w, t: attend_to(x, rows=63),
    "x has 3 positions, the rotary tables have 2": lambda x, w, t: attend_to(x, positions=2),
    r"cos and sin are \(3, 7\) on .* and \(3, 8\) on .*: both need one shape": lambda x, w, t: llama.triton_attention(
        x[None], w, w, x[:, :7], x, 1, 1
    ),
}
# A tensor of another type or shape than the others of a call of attention.
MIXED = [dict(half=name) for name in ("q", "k", "v", ["out"])]
UNLIKE = [
    dict(k=(1, 5, 3, 16)),
    dict(v=(1, 4, 2, 16)),
    dict(k=(2, 5, 2, 16)),
    dict(out=(1, 5, 4, 8)),
    dict(v=(1, 5, 1, 16)),
]


@pytest.mark.parametrize("changes", [*MIXED, *UNLIKE], ids=str)
def test_attention_of_unlike_tensors_is_refused(randn, changes):
    attention_of(randn(1))
    message = "are .*torch.float16.*: convert" if "half" in changes else r"have the shapes \(1, 5, 4, 16\), "
    with pytest.raises((ValueError, TypeError), match=message):
        attention_of(randn(1), **changes)


class Far(torch.Tensor):
    """A tensor on another device, as far as one can tell here."""

    def get_device(self):
        return 7


ELSEWHERE = {  # what the message begins with, the name of the tensor: a call with it
    "branch": lambda x, far: llama.triton_rmsnorm(x, far, x[0], 1e-5),
    "weight": lambda x, far: llama.triton_rmsnorm(x, None, far[0], 1e-5),
    "down_weight": lambda x, far: llama.triton_swiglu(x, x[:2], far[0, :, None]),
    "targets are": lambda x, far: llama.triton_cross_entropy(x.clone(), far[:, 0].long()),
    "o_weight": lambda x, far: llama.triton_attention(x[None], x.repeat(8, 1), far, x[:, :4], x[:, :4], 1, 1),
    "cos and sin are": lambda x, far: llama.triton_attention(x[None], x, x, x[:, :4], far[:, :4], 1, 1),
    "q, k, v and o are": lambda x, far: llama.flash_attention_forward(*[x[None, :, None]] * 2, far[None, :, None]),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_tensor_on_another_device_is_refused(randn, name):
    """The kernels get addresses, by which they would read another memory."""
    x = randn(3, 8)
    with pytest.raises((ValueError, TypeError), match=rf"^{name}.* on "):
        ELSEWHERE[name](x, x.as_subclass(Far))


@pytest.mark.parametrize("eps", [(2, 2.0), (2.0, 2)], ids=str)
def test_a_number_may_be_an_integer(randn, eps):
    """Of equal ones, a kernel that is compiled for one type takes no other."""
    x = randn(3, 8)
    first, second = (llama.triton_rmsnorm(x, None, x[0], number)[0] for number in eps)
    assert torch.equal(first, second)


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_be_read_wrongly_is_refused(randn, device, message):
    tensors = randn(3, 8), randn(12, 8), torch.arange(3, device=device)
    with pytest.raises((ValueError, TypeError, AssertionError), match=message):
        REFUSED[message](*tensors)


def test_strided_tables_are_copied_or_refused(randn):
    """Kernels read them, and a packed projection, as contiguous."""
    x, o = randn(3, 8), randn(1, 3, 1, 16)
    saved, apart = (o, o, o, o, o[..., 0]), strided_like(x)
    assert torch.equal(attend_to(x), attend_to(x, layout=strided_like))
    for tables in ((x, apart), (apart, x)):
        with pytest.raises(AssertionError):
            llama.rope_(x[None], 1, 8, *tables)
        with pytest.raises(AssertionError):
            llama.flash_attention_backward(o, saved, (o, o, o), tables)
    with pytest.raises(AssertionError):
        llama.rope_(apart[None], 1, 8, x, x)


# --- column sums and RMSNorm
# What the table above does not reach: several matrices, the value that is normalized, rows of several tiles.


@pytest.mark.parametrize("rows", [1, 127, 129, 300])
@pytest.mark.parametrize("accumulate", [False, True])
def test_column_sums(randn, rows, accumulate):
    """Of several matrices, as a group of layers has them; a tile is 128 x 16."""
    partial, sums = randn(2, rows, 37), padded(2, randn(2, 37))
    expected = partial.double().sum(1) + accumulate * sums.double()
    llama.write_column_sums(sums, accumulate, partial)
    assert_close(sums.double(), expected, rtol=1e-6, atol=1e-5)


# The interpreter does not round to bf16, it cuts off.
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.compiled)


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_rmsnorm_normalises_the_residual_that_it_stores(randn, dtype):
    x, branch = randn(2, 20, 256).to(dtype)
    weight = torch.ones_like(x[0])
    y, residual = llama.triton_rmsnorm(x, branch, weight, 1e-5)
    exact, _ = llama.torch_rmsnorm(residual.double(), None, weight.double(), 1e-5)
    # Rounded once: half a unit in the last place, and a little for fp32.
    half_a_unit = 0.51 * torch.finfo(dtype).eps
    assert_close(y.double(), exact, rtol=half_a_unit, atol=0)


@pytest.mark.parametrize("block_size", [64, 512, 1024])
@pytest.mark.parametrize("has_branch", [False, True])
def test_rmsnorm_block_smaller_than_the_row(randn, block_size, has_branch):
    x, weight = padded(0, randn(5, 600)), randn(600)
    branch = padded(1, x.flip(0)) if has_branch else None
    residual, y, rstd = llama.rmsnorm_forward(x, branch, weight, 1e-5, block_size)
    expected = llama.torch_rmsnorm(x, branch, weight, 1e-5)
    assert_close((y, residual), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_branch", [True, False])
def test_rmsnorm_of_which_only_the_residual_is_used(randn, has_branch):
    x, upstream, weight = randn(3, 8), randn(3, 8), randn(8)
    x, branch, weight = (t.clone().requires_grad_() for t in (x, x, weight))
    _, residual = llama.triton_rmsnorm(x * 1, branch if has_branch else None, weight, 1e-5)
    residual.backward(upstream)
    assert torch.equal(x.grad, upstream) and weight.grad is None
    assert torch.equal(branch.grad, upstream) if has_branch else branch.grad is None


# --- attention
# The launchers by themselves, where every tensor may lie anywhere and tiles are those of other GPUs.


@pytest.fixture(params=["40 in one", "40 in two", pytest.param("150 in two", marks=pytest.mark.slow)])
def seq_len(request, monkeypatch):
    """The length of a sequence for attention, whose backward pass is one launch or two."""
    length, _, launches = request.param.split()
    limit = 128 if launches == "one" else 0
    monkeypatch.setattr(llama, "FUSED_BACKWARD_SEQ_LEN", limit)
    return int(length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sizes", ["2x33x2x1x40", "1x64x3x1x16"])  # the latter fills its tiles
def test_attention_of_short_sequences_in_two_backward_passes(randn, monkeypatch, sizes, dtype):
    monkeypatch.setattr(llama, "FUSED_BACKWARD_SEQ_LEN", 0)
    assert_as_accurate_as_torch(*make(randn, "attention", sizes), dtype)


def exact_attention(q, k, v, o_grad):
    """o and the gradients of q, k, v in float64."""
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    heads = (t.transpose(1, 2) for t in exact)
    o = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    o = o.transpose(1, 2)
    gradients = torch.autograd.grad(o, exact, o_grad.double())
    return [o.detach(), *gradients]


def assert_attention_is_exact(randn, seq_len, place, batch=1, kv_heads=1, group_size=2):
    """Forward and backward of groups of query heads for each of k and v, every tensor where place() puts it."""

    def tensor(name):
        heads = kv_heads if name in "kv" else group_size * kv_heads
        return place(name, randn(batch, seq_len, heads, 16))

    q, k, v, o_grad = map(tensor, ("q", "k", "v", "o_grad"))
    o, lse = llama.flash_attention_forward(q, k, v)
    saved = q, k, v, place("o", o), lse
    gradients = [place(f"{name}_grad", torch.empty_like(t)) for name, t in zip("qkv", saved, strict=False)]
    llama.flash_attention_backward(o_grad, saved, gradients)
    actual = [t.double() for t in (o, *gradients)]
    assert_close(actual, exact_attention(q, k, v, o_grad), rtol=1e-4, atol=1e-5)


LAYOUTS = dict(  # the order of batch, sequence, head and dimension in memory, and the padding: all strides differ
    q="bshd 1",
    k="dbhs 2",
    v="hbsd 3",
    o="shbd 5",
    o_grad="bdsh 1",
    q_grad="sbdh 4",
    k_grad="hsbd 7",
    v_grad="bhds 6",
)


def in_own_order(name, t):
    order, padding = LAYOUTS[name].split()
    return in_memory_order(t, ["bshd".index(letter) for letter in order], int(padding))


@pytest.mark.parametrize("place, kv_heads", [(strided, 2), (in_own_order, 3)])
def test_attention_in_any_layout(randn, seq_len, place, kv_heads):
    assert_attention_is_exact(randn, seq_len, place, 2, kv_heads)


@pytest.mark.parametrize("share", [1, 2, 3, 6])
def test_attention_whose_groups_are_shared_out(randn, seq_len, monkeypatch, share):
    """Programs with a part of a group each write gradients of k and v that are added up."""
    monkeypatch.setattr(llama, "heads_per_program", lambda *key: share)
    assert_attention_is_exact(randn, seq_len, in_own_order, 2, kv_heads=2, group_size=6)
    # Each program rotates its part of the gradients back.
    assert_as_accurate_as_torch(*make(randn, "attention", f"2x{seq_len}x12x2x10"), torch.float32)


def test_parts_of_a_group_are_added_up_before_they_are_rounded(randn, seq_len, monkeypatch):
    """Of two heads whose gradients of v are hundreds of times as large as their sum."""
    monkeypatch.setattr(llama, "heads_per_program", lambda *key: 1)
    q, k, v = (randn(1, seq_len, 1, 16).half() for _ in range(3))
    q = q.expand(-1, -1, 2, -1)
    large = (500 * randn(1, seq_len, 1, 16)).clamp(-2000, 2000).round().half()
    o_grad = torch.cat((large, 1 - large), 2)  # whole numbers up to 2048, which half precision has
    saved = q, k, v, *llama.flash_attention_forward(q, k, v)
    *_, v_grad = gradients = [torch.empty_like(t) for t in (q.contiguous(), k, v)]
    llama.flash_attention_backward(o_grad, saved, gradients)
    *_, exact = exact_attention(q, k, v, o_grad)
    assert_close(v_grad.double(), exact, rtol=2**-9, atol=1e-4)


@pytest.mark.parametrize(
    "batch, kv_heads, blocks, share",
    [(1, 1, 16, 1), (2, 1, 16, 3), (1, 2, 16, 3), (3, 1, 16, 12), (1, 1, 2, 12), (1, 1, 3, 1), (5, 8, 3, 12)],
)
def test_a_group_is_shared_out_where_multiprocessors_would_be_idle(monkeypatch, batch, kv_heads, blocks, share):
    """Of 40, unless a program has so few of the 12 heads' tiles that adding up costs more."""
    gpu = llama.Gpu("cuda", "a GPU", "sm_90", num_sms=40, warp_size=32)
    monkeypatch.setattr(llama, "get_gpu", lambda kind: gpu)
    tile = llama.attention_tile.__wrapped__("dkdv", 2, 64, "ieee", "cuda")
    assert tile.BLOCK_M == tile.BLOCK_N
    shape = batch, blocks * tile.BLOCK_N, 12 * kv_heads, 64
    assert llama.heads_per_program.__wrapped__("dkdv", shape, kv_heads, 2, "ieee", "cuda") == share


def test_attention_to_strided_keys(randn, seq_len):
    """Of padded heads in half precision: with Triton 3.6, H100s read past the end of shared memory."""
    q, k, v = randn(3, 1, seq_len, 2, 18).half()
    o, _ = llama.flash_attention_forward(q, strided_like(k), v)
    exact, *_ = exact_attention(q, k, v, q)
    assert_close(o.double(), exact, rtol=0.01, atol=0.01)


def before_nan(name, t):
    """The same values; what lies behind each sequence is NaN."""
    batch, seq_len, *rest = t.shape
    return like_nan(t, (batch, seq_len + 64, *rest))[:, :seq_len].copy_(t)


# Tiles that are not square, and those of AMD's GPUs. Only the smaller of both blocks divides the fast lengths of the
# former, and none those of the latter, of one backward launch and of two.
UNEVEN = "16x32", "32x16", "16x64", "64x16"
TILES = {size: [(*map(int, size.split("x")), 4, 1)] * 4 for size in UNEVEN}
for (gpu, operands, widest_head), tiles in llama.ATTENTION_TILES.items():
    if gpu.startswith(("cdna", "rdna", "gfx")):
        TILES[f"{gpu} {operands} {widest_head}"] = tiles
FAST = """
16x32 48 128, 16x32 48 0, 32x16 48 128, 32x16 48 0, 16x64 80 128, 16x64 80 0, 64x16 80 128, 64x16 80 0,
cdna half 64 100 128, cdna half 64 150 128, cdna any 128 100 128, cdna any 128 150 128
"""
FAST = re.split(r",\s", FAST.strip())
LENGTHS = "40 128", "48 128", "48 0", "64 0", "80 128", "80 0", "100 128", "144 128", "150 128"
SLOW = {f"{name} {length}" for name in TILES for length in LENGTHS} - set(FAST)


@pytest.mark.parametrize("row", [*FAST, *(pytest.param(row, marks=pytest.mark.slow) for row in sorted(SLOW))])
def test_attention_with_other_tiles(randn, monkeypatch, row):
    name, seq_len, fused_seq_len = row.rsplit(maxsplit=2)
    monkeypatch.setattr(llama, "FUSED_BACKWARD_SEQ_LEN", int(fused_seq_len))

    def tile(pass_name, *key):
        return llama.AttentionTile(*TILES[name][llama.PASSES.index(pass_name)])

    monkeypatch.setattr(llama, "attention_tile", tile)
    for function in (llama.attention_launch, llama.heads_per_program):  # which remember other tiles
        monkeypatch.setattr(llama, function.__name__, function.__wrapped__)
    assert_attention_is_exact(randn, int(seq_len), before_nan)


@pytest.mark.parametrize("dimension", ["seq", "head", "dim"])
@pytest.mark.parametrize("far", llama.Strides._fields)
def test_attention_beyond_two_to_the_31_elements_is_refused(far, dimension):
    """Offsets within a sequence have 32 bits."""
    shape = dict(batch=1, seq=40, head=4, dim=16)
    packed = llama.Stride(0, 64, 16, 1)

    def launch(stride):
        strides = dict.fromkeys(llama.Strides._fields, packed)
        strides[far] = packed._replace(**{dimension: stride})
        key = 2, 1, llama.Strides(**strides), torch.float32, "ieee", False, "cpu"
        llama.attention_launch("dq", tuple(shape.values()), *key)

    too_far = 2**31 // shape[dimension]
    launch(too_far - 2**13)
    with pytest.raises(ValueError, match="count within a sequence in 32 bits"):
        launch(too_far)


tl, rounded_like = llama.tl, llama.rounded_like  # a kernel sees the names of its own module only
RoundingConstants = collections.namedtuple("RoundingConstants", "ROUND_BY_HAND")


@llama.jit
def rounding_kernel(x_ptr, y_ptr, C, BLOCK_SIZE: tl.constexpr):
    places = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + places)
    tl.store(y_ptr + places, rounded_like(x, x, C))


@pytest.mark.parametrize("between", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_bf16_is_rounded_to_nearest(device, between):
    """All bf16 values, infinities and what is no number among them, and what lies between each two neighbours."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device) << 16
    is_finite = values.view(torch.float32).isfinite()
    x = torch.where(is_finite, values + between, values).view(torch.float32)
    y = torch.zeros_like(x, dtype=torch.bfloat16)
    constants = dict(C=RoundingConstants(True), BLOCK_SIZE=4096)
    llama.launch(rounding_kernel, (16,), (x, y), (), constants)
    nearest = x
    if between == 0x8000:  # a tie: the one further from zero
        nearest = torch.where(is_finite, values + 2**16, values).view(torch.float32)
    assert_close(y, nearest.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_rotary_embedding(randn, device):
    """Dimension i of the first half and i of the second are a complex number, which is turned."""
    frequencies = torch.tensor([1.0, 50**-0.5], dtype=torch.float64, device=device)
    angles = torch.arange(200, device=device)[:, None] * frequencies
    tables = angles.cos(), angles.sin()
    actual = [table.double() for table in llama.rope_tables(200, 4, device, 50.0)]
    assert_close(actual, [*tables], rtol=0, atol=1e-6)
    x = randn(2, 200, 3, 4).double()
    turn = torch.polar(torch.ones_like(angles), angles)
    turned = torch.complex(*x.chunk(2, dim=-1)) * turn[:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    assert_close(llama.torch_rope(x, *tables), expected)


# --- SwiGLU and embedding
# Numbers whose exponential overflows, and a search that needs more than one tile.


def test_swiglu_activation_at_extreme_gates(device):
    gate = torch.tensor([[-1e4, -90.0, -1.0, 0.0, 1.0, 90.0, 1e4]], device=device)
    ones = torch.ones_like(gate)
    gate_up = torch.cat((gate, ones), dim=1)
    assert_close(llama.swiglu_activation(gate_up), F.silu(gate))
    llama.swiglu_activation_backward_(ones, gate_up)
    assert gate_up.isfinite().all()


def test_embedding_in_several_tiles(randn, monkeypatch):
    """Of tokens and of columns."""
    monkeypatch.setattr(llama, "EMBEDDING_TILE", (16, 32))
    assert_as_accurate_as_torch(*embedding(randn, 3, 15, 5, 40), torch.float32)


# --- cross-entropy
# What gives NaN, infinity, or a gradient to a target that does not count, if it is computed in the plain way.


def loss_and_gradient(cross_entropy, logits, targets, *ignored):
    logits = logits.detach().clone().requires_grad_()
    loss = cross_entropy(logits * 1, targets, *ignored)
    loss.backward()
    return loss.detach().double(), logits.grad.double()


@pytest.mark.parametrize("is_largest", [False, True])
@pytest.mark.parametrize("vocab", [5, 97, 5000, 6209, 8201, 16385, 33003, 46009])
def test_cross_entropy_of_the_last_columns(randn, vocab, is_largest):
    """Those that are a tile of their own. They have the largest logits, or all that are finite."""
    logits = randn(3, vocab)
    last = llama.cross_entropy_tiles(vocab)[0]
    logits[:, last:] += 30.0 if is_largest else 0.0
    if not is_largest:
        logits[:, :last] = float("-inf")
    targets = torch.tensor([last, vocab - 1, vocab - 1], device=logits.device)
    ours = loss_and_gradient(llama.triton_cross_entropy, logits, targets)
    exact = loss_and_gradient(llama.torch_cross_entropy, logits.double(), targets)
    assert_close([t.double() for t in ours], list(exact), rtol=1e-5, atol=1e-6)


def test_cross_entropy_tiles_take_each_column_once():
    for vocab in [*range(1, 200), 4095, 4096, 4097, 6144, 6145, 8192, 32000, 50257, 65536, 128256, 151936, 262144]:
        loop_cols, block, rest_size, threads = llama.cross_entropy_tiles(vocab)
        assert loop_cols % 8 == 0 and 0 <= vocab - loop_cols <= rest_size < 2 * max(1, vocab - loop_cols)
        assert block.bit_count() == rest_size.bit_count() == 1 and block >= 8 and 128 <= threads <= 1024
        if vocab > 4096:  # of masked columns there are few, and a rest leaves registers for the loops
            assert -loop_cols % block + rest_size - (vocab - loop_cols) <= block // 2
            assert rest_size <= max(4096, block // 2)


def test_cross_entropy_of_a_masked_stretch(randn, device):
    """Of more than a tile, which has no maximum."""
    logits, targets = randn(2, 20000), torch.tensor([9000, 19999], device=device)
    logits[:, :9000] = -float("inf")
    expected = loss_and_gradient(llama.torch_cross_entropy, logits.double(), targets)
    actual = loss_and_gradient(llama.triton_cross_entropy, logits, targets)
    assert_close(actual, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("vocab", [1000, 8193, 20000])
def test_cross_entropy_of_peaked_logits(randn, device, vocab):
    """As accurate as PyTorch's where the log-sum is large: its rounding must not reach the probabilities."""
    logits = 60 * randn(2, vocab)
    targets = torch.tensor([3, vocab - 1], device=device)
    ours = loss_and_gradient(llama.triton_cross_entropy, logits, targets)
    plain = loss_and_gradient(llama.torch_cross_entropy, logits, targets)
    exact = loss_and_gradient(llama.torch_cross_entropy, logits.double(), targets)
    for a, p, e in zip(ours, plain, exact, strict=True):
        assert (a - e).norm() <= 2 * (p - e).norm() + 1e-7 * e.norm()


@pytest.mark.parametrize("vocab", [5, 8192, 8200, 16384])
@pytest.mark.parametrize("beyond", [False, True])
def test_cross_entropy_target_out_of_range_gives_nan(device, vocab, beyond):
    targets = torch.tensor([1, vocab if beyond else -1], device=device)
    logits = torch.zeros(2, vocab, device=device)
    loss, (right, wrong) = loss_and_gradient(llama.triton_cross_entropy, logits, targets)
    assert loss.isnan() and wrong.isnan().all() and right.isfinite().all()


@pytest.mark.parametrize("vocab, ignored", [(5, -100), (8200, 2)])
def test_cross_entropy_of_ignored_targets_only(device, vocab, ignored):
    """As in PyTorch: the loss is NaN, the gradient 0, also of a token that exists."""
    targets = torch.full((3,), ignored, device=device)
    logits = torch.zeros(3, vocab, device=device)
    loss, gradient = loss_and_gradient(llama.triton_cross_entropy, logits, targets, ignored)
    assert loss.isnan() and not gradient.any()


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_cross_entropy_tells_who_kept_the_logits(randn, device, needs_gradient):
    """Whoever's gradient needs the logits, which are overwritten, also if they themselves need none."""
    x, targets = randn(4, 11).requires_grad_(), torch.arange(4, device=device)
    logits = x * 1 if needs_gradient else x.detach().clone()
    kept = (x * logits).sum()
    llama.triton_cross_entropy(logits, targets)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


# --- many elements, whose offsets have 64 bits
# A product of 32 bits wraps around beyond them, and reads and writes the memory of somebody else.


@pytest.fixture
def many(device):
    """(2^21 + 3, 1024) in bf16: more than 2^31 elements, of which the last rows are looked at."""
    return torch.empty(2**21 + 3, 1024, dtype=torch.bfloat16, device=device).normal_()


def assert_last_rows(actual, expected):
    assert_close(actual[-4:].float(), expected.float(), rtol=2e-2, atol=2e-2)


def many_norms(x):
    branch = x.detach()
    outputs = llama.triton_rmsnorm(x.requires_grad_(), branch, branch[0], 1e-5)
    return *outputs, *torch.autograd.grad(outputs, x, (branch, branch))


def many_activations(x):
    hidden = llama.swiglu_activation(x)
    llama.swiglu_activation_backward_(hidden, x)
    return hidden, x


def many_losses(x):
    rows = len(x)
    targets = torch.arange(rows, device=x.device).flip(0) % 1024
    loss = llama.triton_cross_entropy(x.requires_grad_() * 1, targets)
    return torch.autograd.grad(3.0 * rows * loss, x)


@pytest.mark.gpu
@pytest.mark.parametrize("function", [many_norms, many_activations, many_losses])
def test_more_than_two_to_the_31_elements(many, function):
    """The last rows have the results that they have by themselves."""
    few = torch.cat((many[:1], many[-4:]))
    for actual, expected in zip(function(many), function(few), strict=True):
        assert_last_rows(actual, expected[-4:])


@pytest.fixture
def far(tmp_path):
    """A function that lays a tensor (3, ...) with its rows 2^30 elements apart, where a wrong offset stays in bounds.

    The memory is a file, of which only the pages that are written take room.
    """
    if not llama.INTERPRETED:
        pytest.skip("a GPU has no such memory: see above")
    memory = torch.from_file(str(tmp_path / "memory"), shared=True, size=5 * 2**30 + 2**20)
    starts = itertools.count(2**31, 2**14)

    def place(number, x):
        if x.dtype != torch.float32 or x.dim() < 2:
            return x.clone()
        strides = 2**30, *x[0].contiguous().stride()
        return torch.empty(0).set_(memory.untyped_storage(), next(starts), x.shape, strides).copy_(x)

    return place


@pytest.mark.parametrize("name", ["rmsnorm", "rmsnorm_alone", "cross_entropy_ignoring"])
def test_rows_that_lie_far_apart(randn, far, name):
    assert_as_accurate_as_torch(*make(randn, name, "3x11"), torch.float32, far)


def test_column_sums_that_lie_far_apart(randn, far):
    """As a group of layers has them, whose weights all lie between."""
    partial, sums = randn(3, 5, 37), randn(3, 37)
    place = far(0, sums)
    llama.write_column_sums(place, True, partial)
    assert_close(place, sums + partial.sum(1), rtol=1e-6, atol=1e-5)


def test_sequences_that_lie_far_apart(randn, seq_len, far):
    assert_attention_is_exact(randn, seq_len, far, batch=3)


def test_rows_that_have_much_padding(randn, far):
    """Of SwiGLU's activation and the rotation, which take contiguous rows: these are 2^30 elements long."""

    def lengthened(x):
        x = far(0, x)
        return x.as_strided((3, 2**30), x.stride())

    gate_up, hidden_grad, tables = randn(3, 16), randn(3, 8), llama.rope_tables(3, 16, "cpu")
    long, qkv = lengthened(gate_up), lengthened(gate_up)
    assert torch.equal(llama.swiglu_activation(long, 8), llama.swiglu_activation(gate_up))
    llama.swiglu_activation_backward_(hidden_grad, long, 8)
    llama.rope_(qkv[None], 1, 16, *tables)
    expected, rotated = gate_up.clone(), gate_up.clone()
    llama.swiglu_activation_backward_(hidden_grad, expected)
    llama.rope_(rotated[None], 1, 16, *tables)
    assert torch.equal(long[:, :16], expected) and torch.equal(qkv[:, :16], rotated)


# --- AdamW
# Against float64, since PyTorch's own update in fp32 loses digits that ours keeps.


@pytest.mark.parametrize("low_precision", [False, True])
def test_adamw(randn, low_precision):
    """As torch.optim.AdamW in float64, with other rates, weights without a gradient and gradients of any scale."""
    values = [randn(3), randn(1500), randn(40, 60), randn(1)]
    ours = torch.nn.ParameterList(values)
    theirs = torch.nn.ParameterList(v.double() for v in values)
    optimizer = owner_of(ours, 1e-2, low_precision)
    reference = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.01)
    initial = [w.clone() for w in optimizer.weights()]
    for p in ours:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.reset(initial)  # forgets the step
    for number, lr in enumerate([1e-2, 5e-2, 1e-2, 5e-2, 5e-2]):
        optimizer.lr.fill_(lr)
        reference.param_groups[0]["lr"] = lr
        for index, (p, q) in enumerate(zip(ours, theirs, strict=True), number):
            p.grad = q.grad = None
            if index % 4:  # now and then it has none, and stays as it is
                scale = [1e-7, 1.0, 1e4][index % 3]
                p.grad = scale * randn(*p.shape).to(p)
                q.grad = p.grad.double()
        optimizer.step()
        reference.step()
    for p, weight, q in zip(ours, optimizer.weights(), theirs, strict=True):
        assert_close(weight.double(), q.detach(), rtol=1e-5, atol=2e-6)
        assert_close(p.float(), weight, rtol=2**-8 if low_precision else 0, atol=0)
    # In fp64, as 1 - 0.999 of fp32 is wrong in the fifth digit.
    exact = [[beta ** float(reference.state[q]["step"]) for beta in (0.9, 0.999)] for q in theirs]
    assert_close(optimizer.beta_powers.cpu(), torch.tensor(exact, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("lr", [1e-3, 1e-5])
def test_adamw_loses_no_digits_of_a_small_learning_rate(randn, lr):
    """1 - lr * weight_decay would: PyTorch's weights shrink by a tenth too much at 1e-5."""
    initial = randn(3000)
    ours = torch.nn.ParameterList([initial.clone()])
    theirs = torch.nn.ParameterList([initial.double()])
    optimizers = owner_of(ours, lr), torch.optim.AdamW(theirs, lr)
    for (weight,), optimizer in zip((ours, theirs), optimizers, strict=True):
        for _ in range(20):
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
    exact = theirs[0].detach()
    drift = (ours[0].detach() - exact) * initial.sign()
    assert drift.mean().abs() < 0.05 * (exact - initial).abs().mean()


@pytest.mark.parametrize("low_precision", [False, True])
def test_moments_in_bf16(device, low_precision):
    """The mean of squares grows and shrinks as in fp32, on average; rounded to the nearest it would never shrink.

    Two runs have the same bits, and weights follow those of fp32.
    """
    optimizers = []
    for kind in (torch.bfloat16, torch.bfloat16, torch.float32):
        model = torch.nn.ParameterList([torch.ones(5000, device=device)])
        optimizers.append(owner_of(model, 1e-3, low_precision, moments_dtype=kind))
    for gradient in [1.0] * 40 + [0.0] * 40:
        for optimizer in optimizers:
            (weight,) = optimizer.parameters
            weight.grad = torch.full_like(weight, gradient)
            optimizer.step()
    low, again, full = optimizers
    assert low.exp_avg_sq.dtype == low.exp_avg.dtype == torch.bfloat16
    for name in ("param", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(low, name), getattr(again, name))
    expected = (1 - 0.999**40) * 0.999**40
    assert_close(full.exp_avg_sq[:5000].mean(), torch.tensor(expected, device=device), rtol=1e-4, atol=0)
    moments = low.exp_avg_sq[:5000].float()
    assert_close(moments.mean(), torch.tensor(expected, device=device), rtol=2e-3, atol=0)
    assert moments.std() < 0.02 * expected and len(moments.unique()) > 3  # each has its own chance
    assert_close(low.exp_avg.float(), full.exp_avg, rtol=0.05, atol=1e-6)
    assert_close(low.weights()[0], full.weights()[0], rtol=0, atol=1e-3)


def test_moments_in_bf16_are_rounded_in_another_way_in_each_step(device):
    """Also after 10,000 steps, when 0.9^steps is 0."""
    optimizer = owner_of(torch.nn.ParameterList([torch.ones(5000, device=device)]), 1e-3, moments_dtype=torch.bfloat16)
    (weight,) = optimizer.parameters
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.beta_powers.copy_(torch.tensor([0.9, 0.999], dtype=torch.float64) ** 10_000)
    rounded = []
    for _ in range(3):
        optimizer.exp_avg_sq.fill_(1.0)  # 0.999 of it lies between two numbers of bf16
        optimizer.step()
        rounded.append(optimizer.exp_avg_sq.clone())
    assert not any(torch.equal(*pair) for pair in itertools.combinations(rounded, 2))


# Bit patterns: the NaN of a GPU, quiet and signalling ones, infinities, the largest and smallest numbers, and numbers
# that are rounded to bf16 up, down, away from zero, and not at all.
UNUSUAL = """
7FFFFFFF 7FC00000 7F800001 FFFFFFFF FFC00000 FF800001 7F800000 FF800000
7F7FFFFF FF7FFFFF 7F7F8000 7F7F7FFF FF7F7FFF 00000001 80000001 007FFFFF
3F807FFF 3F808001 3F80FFFF BF818000 3F818000 3F810000
"""


def floats(patterns, device):
    bits = np.array([int(word, 16) for word in patterns.split()], np.uint32)
    return torch.from_numpy(bits.view(np.float32)).to(device)


@pytest.mark.parametrize("moments_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("low_precision", [False, True])
def test_adamw_keeps_what_is_no_number(device, low_precision, moments_dtype):
    expected = floats(UNUSUAL, device)
    model = torch.nn.ParameterList([torch.zeros_like(expected)])
    optimizer = owner_of(model, 1e-3, low_precision, weight_decay=0.0, moments_dtype=moments_dtype)
    (weight,) = model
    in_use = expected.bfloat16() if low_precision else expected
    equal = functools.partial(assert_close, rtol=0, atol=0, equal_nan=True)
    optimizer.reset([expected])
    weight.grad = torch.zeros_like(weight)
    for _ in range(2):  # without a gradient nothing moves, whatever the weight
        equal(optimizer.weights()[0], expected)
        equal(weight.detach(), in_use)
        optimizer.step()

    def assert_that_a_step_gives_nan():
        optimizer.step()
        assert weight.isnan().all() and optimizer.weights()[0].isnan().all()
        optimizer.reset([torch.ones_like(expected)])

    optimizer.exp_avg.copy_(floats("7FFFFFFF", device))  # the NaN that a GPU makes
    assert_that_a_step_gives_nan()
    weight.grad = torch.full_like(weight, float("inf"))
    assert_that_a_step_gives_nan()


def test_threads_launch_one_after_the_other(device):
    """Triton's interpreter has one state for all. The first launch waits until the second could have begun."""
    inside, most, two = [], [], threading.Barrier(2)

    class Kernel:
        def __getitem__(self, grid):
            return self.launch

        def launch(self, *arguments):
            inside.append(arguments)
            with contextlib.suppress(threading.BrokenBarrierError):
                two.wait(0.3)  # both are here only if nothing keeps the second away
            most.append(len(inside))
            inside.pop()

    tensors = [torch.zeros(1, device=device)]
    threads = [
        threading.Thread(target=llama.launch_by_triton, args=(Kernel(), (1,), tensors, (), {})) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1]
