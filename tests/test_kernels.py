"""Each kernel, forward and every gradient, against float64.

The rule: our error against float64 is at most twice that of plain PyTorch in the same precision, plus a small atol.
"""

import pytest
import torch

import tiny_llama_v3 as llama

pytestmark = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")

ON_GPU = torch.cuda.is_available()
ATOL = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# Triton's interpreter multiplies the bit patterns of bf16 matrices: kernels with a tl.dot need a GPU for it.
DOT_DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
ALL_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


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
    """Outputs and gradients of function(*inputs), in dtype, as float64. Integer inputs and None pass unchanged."""
    copies = [
        x.detach().clone().to(dtype).requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x
        for x in inputs
    ]
    outputs = function(*copies)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [u.to(o.dtype) for u, o in zip(upstream, outputs, strict=False)]
    torch.autograd.backward(outputs, upstream)
    grads = [x.grad for x in copies if torch.is_tensor(x) and x.is_floating_point()]
    return [t.detach().double() for t in (*outputs, *grads)]


def assert_as_accurate_as_torch(ours, reference, inputs, upstream, dtype):
    exact = run(reference, inputs, upstream, torch.float64)
    plain = run(reference, inputs, upstream, dtype)
    actual = run(ours, inputs, upstream, dtype)
    assert len(actual) == len(exact)
    for index, (a, p, e) in enumerate(zip(actual, plain, exact, strict=False)):
        assert a.shape == e.shape
        error, allowed = (a - e).abs().max(), 2 * (p - e).abs().max() + ATOL[dtype] * e.abs().max()
        assert error <= allowed, f"tensor {index}: error {error:.2e}, allowed {allowed:.2e}"


def strided_like(x):
    """The same values with every dimension strided."""
    holder = torch.zeros(*(2 * n for n in x.shape), dtype=x.dtype, device=x.device)
    view = holder[tuple(slice(None, None, 2) for _ in x.shape)]
    return view.copy_(x)


# --- RMSNorm


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 5, 96), (2, 7, 123), (65, 512), (9, 41), (3, 1, 2048), (2, 5000)])
@pytest.mark.parametrize("with_delta", [True, False])
def test_rmsnorm(randn, shape, dtype, with_delta):
    x, weight = randn(*shape), randn(shape[-1])
    delta = randn(*shape) if with_delta else None
    upstream = [randn(*shape), randn(*shape)]
    if not with_delta:  # the residual is the input itself

        def ours(x, delta, weight):
            return llama.triton_rmsnorm(x, delta, weight, 1e-5)[0]

        def reference(x, delta, weight):
            return llama.torch_rmsnorm(x, delta, weight, 1e-5)[0]
    else:

        def ours(x, delta, weight):
            return llama.triton_rmsnorm(x, delta, weight, 1e-5)

        def reference(x, delta, weight):
            return llama.torch_rmsnorm(x, delta, weight, 1e-5)

    assert_as_accurate_as_torch(ours, reference, [x, delta, weight], upstream, dtype)


def test_rmsnorm_strided(randn):
    x, delta, weight = strided_like(randn(4, 6, 40)), randn(4, 40, 6).transpose(1, 2), randn(40)
    upstream = [strided_like(randn(4, 6, 40)), randn(1, 1, 40).expand(4, 6, 40)]
    ours = lambda *inputs: llama.triton_rmsnorm(*inputs, 1e-5)  # noqa: E731
    expected = run(lambda *inputs: llama.torch_rmsnorm(*inputs, 1e-5), [x, delta, weight], upstream, torch.float64)
    inputs = [t.requires_grad_() for t in (x, delta, weight)]
    outputs = ours(*inputs)
    torch.autograd.backward(outputs, upstream)
    for actual, exact in zip((*outputs, *(t.grad for t in inputs)), expected, strict=False):
        torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_size", [64, 128, 256, 512, 1024])
def test_rmsnorm_block_smaller_than_the_row(randn, block_size):
    x, delta, weight = randn(5, 600), randn(5, 600), randn(600)
    residual, y, rstd = llama.rmsnorm_forward(x, delta, weight, 1e-5, block_size)
    expected, expected_residual = llama.torch_rmsnorm(x.double(), delta.double(), weight.double(), 1e-5)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(residual.double(), expected_residual, rtol=1e-5, atol=1e-5)


# --- attention


def attention_inputs(randn, batch, seq_len, heads, kv_heads, head_dim):
    """(qkv, upstream) and the other arguments of attention; projections that change nothing let qkv in and o out."""
    qkv = randn(batch, seq_len, (heads + 2 * kv_heads) * head_dim)
    projections = torch.eye(qkv.shape[-1], device=qkv.device), torch.eye(heads * head_dim, device=qkv.device)
    return (
        qkv,
        randn(batch, seq_len, heads * head_dim),
        (*projections, *llama.rope_tables(seq_len, head_dim, qkv.device), heads, kv_heads),
    )


def on_qkv(attention, arguments, **kwargs):
    def function(qkv):
        projections = [p.to(qkv.dtype) for p in arguments[:2]]
        return attention(qkv, *projections, *arguments[2:], **kwargs)

    return function


SHAPES = [  # batch, seq_len, heads, kv_heads, head_dim
    (1, 1, 1, 1, 16),
    (2, 37, 4, 4, 32),
    (1, 64, 4, 2, 64),
    (2, 33, 8, 2, 40),
    (1, 50, 8, 1, 16),
    (1, 48, 2, 1, 80),
    (1, 65, 2, 2, 96),
    (1, 96, 2, 1, 128),
    (1, 130, 2, 1, 32),  # longer than one tile of the backward pass, K rotated beforehand
    (1, 200, 4, 1, 24),
]
if ON_GPU:
    SHAPES += [(2, 128, 8, 4, 64), (2, 512, 8, 4, 64), (1, 1024, 8, 2, 128), (2, 1000, 4, 4, 80), (1, 2048, 4, 2, 64)]


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(randn, shape, dtype):
    qkv, upstream, arguments = attention_inputs(randn, *shape)
    ours, reference = on_qkv(llama.triton_attention, arguments), on_qkv(llama.torch_attention, arguments)
    assert_as_accurate_as_torch(ours, reference, [qkv], [upstream], dtype)


def test_attention_projections(randn):
    x, upstream = strided_like(randn(2, 20, 24)), strided_like(randn(2, 20, 24))
    weights = [randn(4 * 16, 24) * 24**-0.5, randn(24, 2 * 16) * 32**-0.5]
    tables = llama.rope_tables(20, 16, x.device)
    ours, reference = (
        lambda x, a, b, f=f: f(x, a, b, *tables, 2, 1) for f in (llama.triton_attention, llama.torch_attention)
    )
    assert_as_accurate_as_torch(ours, reference, [x, *weights], [upstream], torch.float32)


@pytest.mark.parametrize("seq_len", [40, 150])
def test_attention_with_badly_strided_kv(randn, seq_len):
    qkv, upstream, arguments = attention_inputs(randn, 2, seq_len, 4, 2, 16)
    ours = on_qkv(llama.triton_attention, arguments, noncontiguous_kv=True)
    assert_as_accurate_as_torch(ours, on_qkv(llama.torch_attention, arguments), [qkv], [upstream], torch.float32)


@pytest.mark.parametrize("seq_len", [20, 150])
def test_attention_with_every_argument_strided(randn, seq_len):
    q, k, v = (strided_like(randn(2, seq_len, heads, 16)) for heads in (4, 2, 2))
    o_grad = strided_like(randn(2, seq_len, 4, 16))
    o, lse = llama.flash_attention_forward(q, k, v)
    o = strided_like(o)
    grads = [strided_like(torch.full_like(t, float("nan"))) for t in (q, k, v)]
    llama.flash_attention_backward(o_grad, q, k, v, o, lse, *grads)

    exact = [t.double().requires_grad_() for t in (q, k, v)]
    packed = torch.cat([t.flatten(2) for t in exact], dim=-1)
    no_rotation = torch.ones(seq_len, 8, device=q.device), torch.zeros(seq_len, 8, device=q.device)
    no_projection = torch.eye(packed.shape[-1]).to(packed), torch.eye(64).to(packed)
    expected = llama.torch_attention(packed, *no_projection, *no_rotation, 4, 2)
    expected.backward(o_grad.double().flatten(2))
    for actual, wanted in zip((o.flatten(2), *grads), (expected, *(t.grad for t in exact)), strict=False):
        torch.testing.assert_close(actual.double(), wanted, rtol=1e-4, atol=1e-5)


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
    ours = lambda *args: llama.triton_swiglu(*args, naive_matmul=True)  # noqa: E731
    assert_as_accurate_as_torch(ours, llama.torch_swiglu, inputs, [randn(2, 3, 150)], torch.float32)


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
    with pytest.raises(RuntimeError, match="only once"):
        y.sum().backward()


# --- cross-entropy


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("rows, vocab", [(1, 2), (5, 1000), (3, 97), (2, 33000), (1, 70001)])
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


@pytest.mark.parametrize("target", [-1, 5])
def test_cross_entropy_target_out_of_range_gives_nan(device, target):
    assert llama.triton_cross_entropy(torch.zeros(1, 5, device=device), torch.tensor([target], device=device)).isnan()


# --- embedding


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("vocab, dim, shape", [(5, 16, (2, 30)), (300, 40, (1, 1)), (7, 1500, (3, 700))])
def test_embedding(randn, device, vocab, dim, shape, dtype):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab, shape, generator=generator).to(device)
    ours = lambda weight: llama.triton_embedding(tokens, weight)  # noqa: E731
    reference = lambda weight: torch.nn.functional.embedding(tokens, weight)  # noqa: E731
    assert_as_accurate_as_torch(ours, reference, [randn(vocab, dim)], [randn(*shape, dim)], dtype)


# --- reproducibility


def test_gradients_are_bitwise_reproducible(randn):
    qkv, upstream, arguments = attention_inputs(randn, 2, 150, 4, 2, 32)
    x, weight = randn(300, 200), randn(200)
    repeats = 20 if ON_GPU else 2

    def gradients():
        yield run(on_qkv(llama.triton_attention, arguments), [qkv], [upstream], torch.float32)
        yield run(lambda *t: llama.triton_rmsnorm(*t, 1e-5), [x, x, weight], [x, x], torch.float32)

    first = list(gradients())
    for _ in range(repeats):
        for expected, actual in zip(first, gradients(), strict=False):
            assert all(torch.equal(e, a) for e, a in zip(expected, actual, strict=False))


# --- AdamW


@pytest.mark.parametrize("low_precision", [False, True])
def test_adamw_equals_torch(device, low_precision):
    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(7, 11).to(device), torch.nn.Linear(7, 11).to(device).double()
    theirs.load_state_dict(ours.state_dict())
    optimizer = llama.FlatAdamW(ours, lr=1e-2, low_precision=low_precision)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.01)
    for step in range(5):
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.double()
        if step == 3:
            optimizer.lr.fill_(5e-2)
            reference.param_groups[0]["lr"] = 5e-2
        optimizer.step()
        reference.step()
    for p, weight, q in zip(ours.parameters(), optimizer.weights(), theirs.parameters(), strict=True):
        torch.testing.assert_close(weight.double(), q.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(p.detach().float(), weight, rtol=2**-8 if low_precision else 0, atol=0)


def test_split_weights_join_exactly(device):
    weights = torch.randn(1000, device=device) * torch.logspace(-30, 30, 1000, device=device)
    weights[:4] = torch.tensor([0.0, -0.0, 1.00390625, -1.00390625])  # the last two lie halfway between bf16 numbers
    rounded, remainder = llama.split_fp32(weights)
    assert torch.equal(llama.join_fp32(rounded, remainder), weights)
    torch.testing.assert_close(rounded.float(), weights, rtol=2**-8, atol=0)


def test_adamw_treats_a_missing_gradient_as_zero(device):
    model = torch.nn.Linear(4, 4, bias=False).to(device)
    optimizer = llama.FlatAdamW(model, lr=1e-2, weight_decay=0.0)
    before = model.weight.detach().clone()
    optimizer.grad.fill_(1.0)  # left over from a step before
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(model.weight, before)
