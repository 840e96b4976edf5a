"""nanogpt_triton's kernels against float64, by the rule of test_kernels.py, and under torch.compile."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import tiny_llama_v3 as llama
from nanogpt_triton.kernels import (
    TritonLayerNorm,
    attention,
    gelu,
    operators,
    torch_add_layer_norm,
    torch_attention,
    triton_add_layer_norm,
    triton_attention,
    triton_gelu,
    triton_layer_norm,
)
from nanogpt_triton.kernels import layer_norm as module
from tests.core import test_kernels

pytestmark = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")

ON_GPU = torch.cuda.is_available()
BACKEND = "inductor" if ON_GPU else "aot_eager"  # Triton's interpreter is no C++
randn = test_kernels.randn


SHAPES = [(64,), (1, 64), (3, 5, 96), (2, 7, 123), (37, 768), (3, 1, 2048), (2, 4100), (2, 3)]
CASES = [((1, 20000 if ON_GPU else 8200), torch.float32), *itertools.product(SHAPES, test_kernels.ALL_DTYPES)]
FLAGS = list(itertools.product([True, False], repeat=2)) * len(CASES)  # each case has the next combination


def assert_as_accurate_as_torch(inputs, upstream, dtype, unused=0, place=test_kernels.as_given):
    """Without a branch the residual is the input itself, and not used."""
    used = slice(unused or inputs[1] is None, None)
    functions = ((lambda *given, f=f: f(*given)[used]) for f in (triton_add_layer_norm, torch_add_layer_norm))
    test_kernels.assert_as_accurate_as_torch(*functions, inputs, upstream[used], dtype, place)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_layer_norm(randn, number):
    """Fresh memory is full of NaN in tests, so that an element which no kernel writes is seen."""
    (shape, dtype), (with_branch, with_bias) = CASES[number], FLAGS[number]
    x, branch, *upstream = (randn(*shape) for _ in range(4))
    weight, bias = randn(shape[-1]), randn(shape[-1])
    inputs = [x, branch if with_branch else None, weight, bias if with_bias else None]
    assert_as_accurate_as_torch(inputs, upstream, dtype)


def test_mean_far_from_zero(randn):
    inputs = [randn(8, 300) + 1000, None, randn(300), randn(300)]
    assert_as_accurate_as_torch(inputs, [None, randn(8, 300)], torch.float32)


def test_a_program_walks_over_several_tiles(randn, monkeypatch):
    tile = module.backward_tile
    monkeypatch.setattr(module, "backward_tile", lambda *given: tile(*given)._replace(programs=2))
    x, branch, *upstream = (randn(37, 40) for _ in range(4))
    assert_as_accurate_as_torch([x, branch, randn(40), randn(40)], upstream, torch.float32)


PLACES = [test_kernels.padded, test_kernels.transposed, test_kernels.strided, test_kernels.expanded]


@pytest.mark.parametrize("place", PLACES)
def test_any_layout(randn, place):
    """Of inputs, parameters and upstream gradients. Rows that are padded are read as they lie."""
    x, branch, *upstream = (randn(4, 6, 40) for _ in range(4))
    assert_as_accurate_as_torch([x, branch, randn(40), randn(40)], upstream, torch.float32, place=place)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("x_dtype, branch_dtype", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_mixed_types_under_autocast(randn, device, x_dtype, branch_dtype, compiled):
    """y is exact to the last bit of bf16, the sum to that of fp32, and each gradient to that of its tensor."""
    inputs = [randn(13, 96, dtype=x_dtype), randn(13, 96, dtype=branch_dtype), randn(96), randn(96).bfloat16()]
    upstream = [randn(13, 96), randn(13, 96).bfloat16()]
    exact = test_kernels.run(torch_add_layer_norm, inputs, upstream, torch.float64)
    function = torch.compile(triton_add_layer_norm, fullgraph=True, backend=BACKEND, disable=not compiled)
    with torch.autocast(device, torch.bfloat16):
        outputs = function(*(t.requires_grad_() for t in inputs))
    assert [t.dtype for t in outputs] == [torch.float32, torch.bfloat16]
    for actual, expected in zip((*outputs, *torch.autograd.grad(outputs, inputs, upstream)), exact, strict=True):
        rtol = 2**-8 if actual.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=rtol * expected.abs().max().item())


@pytest.mark.parametrize("x_dtype, branch_dtype", [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_mixed_types_are_promoted(randn, x_dtype, branch_dtype):
    """As PyTorch promotes them: the norm of a sum in fp32 is not rounded to the smaller type of one of its terms."""
    inputs = [randn(13, 96, dtype=x_dtype), randn(13, 96, dtype=branch_dtype), randn(96), randn(96)]
    torch.testing.assert_close(triton_add_layer_norm(*inputs), torch_add_layer_norm(*inputs, 1e-5))


def test_one_of_both_gradients(randn):
    """What comes after the norm may be unused, and so may the sum."""
    upstream, *inputs = (t.requires_grad_() for t in (randn(3, 48), randn(3, 48), randn(3, 48), randn(48), randn(48)))
    residual, _ = triton_add_layer_norm(*inputs)
    grads = torch.autograd.grad(residual, inputs, upstream, materialize_grads=True)
    torch.testing.assert_close(grads, (upstream, upstream, torch.zeros(48), torch.zeros(48)), check_device=False)
    assert_as_accurate_as_torch(inputs, [None, upstream.detach()], torch.float32, unused=1)


def test_compiled_without_a_graph_break(randn):
    """One compilation serves all numbers of rows."""
    torch._dynamo.reset()

    def model(x, branch, weight, bias):
        residual, y = triton_add_layer_norm(torch.sin(x), branch, weight, bias)
        return triton_add_layer_norm(residual, torch.cos(triton_layer_norm(y, weight)), weight)

    backend, compilations = CompileCounterWithBackend(BACKEND), set()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    for rows in (5, 8, 11):
        x, branch, *upstream = (randn(rows, 2, 48) for _ in range(4))
        results = [
            test_kernels.run(f, [x, branch, x[0, 0], x[0, 1]], upstream, torch.float32) for f in (model, compiled)
        ]
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
        compilations.add(backend.frame_count)
    assert len(compilations) == 1


@pytest.mark.parametrize("with_branch", [False, True])
def test_operator_is_registered_as_pytorch_expects(randn, with_branch):
    """Its schema (no output is an input), its shapes without numbers, its gradients in a graph that is traced."""
    x, weight, bias = (t.requires_grad_() for t in (randn(3, 5, 32), randn(32), randn(32)))
    branch = randn(3, 5, 32).bfloat16().requires_grad_() if with_branch else None
    inputs = x, branch, weight, bias if with_branch else None, 1e-5, torch.bfloat16
    torch.library.opcheck(module.layer_norm_operator, inputs)


@pytest.mark.parametrize("compiled", [False, True])
def test_no_second_derivative(randn, compiled):
    """Refused also where the gradient of y is constant, and nothing but saved tensors depends on the input."""
    x = randn(32).requires_grad_()
    function = torch.compile(triton_layer_norm, fullgraph=True, backend=BACKEND, disable=not compiled)
    (grad,) = torch.autograd.grad(function(x, x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward" if compiled else "no second derivative"):
        grad.sum().backward()


def test_derivatives_in_forward_mode_are_pytorchs(randn):
    """An operator without them would return zeros."""
    x, tangent, weight = randn(3, 32), randn(3, 32), randn(32)
    functions = (lambda x: triton_layer_norm(x, weight)), (lambda x: F.layer_norm(x, (32,), weight))
    torch.testing.assert_close(*(torch.func.jvp(f, (x,), (tangent,)) for f in functions))


def test_the_function_takes_the_arguments_of_layer_norm(randn):
    x, *parameters = randn(3, 32), randn(32), randn(32), 0.5
    torch.testing.assert_close(TritonLayerNorm.apply(x, *parameters), F.layer_norm(x, (32,), *parameters))


@pytest.mark.parametrize("shape, branch, dtype", [
    ((0, 32), None, torch.float32), ((1, 2**20 + 1), None, torch.float32), ((3, 32), None, torch.float64),
    ((3, 32), (32,), torch.float32),
])  # fmt: skip
def test_falls_back_and_says_so_once(device, shape, branch, dtype):
    """Too little, too wide, in another type, or what PyTorch has to broadcast."""
    operators.say_once.cache_clear()
    x, branch = (s and torch.ones(s, dtype=dtype, device=device).cumsum(-1) for s in (shape, branch))
    inputs = x, branch, x.new_ones(shape[-1])
    with pytest.warns(UserWarning, match="PyTorch instead of Triton") as warnings:
        outputs = [triton_add_layer_norm(*inputs) for _ in range(2)]
    assert len(warnings) == 1
    torch.testing.assert_close(outputs, [torch_add_layer_norm(*inputs, None)] * 2, rtol=0, atol=0)
    torch.compile(triton_add_layer_norm, fullgraph=True, backend="eager")(*inputs)


@pytest.mark.parametrize("shapes", [[(3, 4), (5,)], [(3, 4), (4,), (3,)]])
def test_shapes_that_do_not_fit(device, shapes):
    with pytest.raises(RuntimeError):
        triton_layer_norm(*(torch.ones(shape, device=device) for shape in shapes))


def test_tensors_on_a_cpu_need_the_interpreter(monkeypatch):
    monkeypatch.setattr(operators, "INTERPRETED", False)
    assert module.obstacle(*[torch.ones(4)] * 4) == "the tensors are on cpu"


# --- GELU


@pytest.mark.parametrize("dtype", test_kernels.ALL_DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 3, 1024), (5, 411)])
def test_gelu(randn, shape, dtype):
    test_kernels.assert_as_accurate_as_torch(triton_gelu, F.gelu, [3 * randn(*shape)], [randn(*shape)], dtype)


def test_gelu_far_from_zero(device):
    """Where 1 + erf(x) has lost all digits, or a square overflows; each element is compared by itself."""
    x = torch.tensor([-1e30, -9.0, -6.0, -4.0, -1e-3, 0.0, 1e-30, 1e-3, 4.0, 9.0, 1e30], device=device)
    y, x_grad = test_kernels.run(triton_gelu, [x], [torch.ones_like(x)], torch.float32)
    x = x.double()
    integral = torch.special.erfc(-x / 2**0.5) / 2
    density = torch.exp(-(x**2) / 2) / (2 * torch.pi) ** 0.5
    torch.testing.assert_close(y, x * integral, rtol=2e-2, atol=1e-14)
    torch.testing.assert_close(x_grad, integral + x * density, rtol=2e-2, atol=1e-7)
    near = x.abs() <= 4
    torch.testing.assert_close(y[near], (x * integral)[near], rtol=5e-4, atol=1e-9)


@pytest.mark.parametrize("place", PLACES)
def test_gelu_of_any_layout(randn, place):
    inputs, upstream = [randn(4, 6, 40)], [randn(4, 6, 40)]
    test_kernels.assert_as_accurate_as_torch(triton_gelu, F.gelu, inputs, upstream, torch.float32, place)


# --- attention


@pytest.mark.parametrize("dtype", [
    torch.float32, torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.compiled),  # the interpreter multiplies no bf16
])  # fmt: skip
@pytest.mark.parametrize("batch, seq_len, n_head, head_dim", [(2, 16, 2, 16), (1, 33, 3, 10), (2, 70, 1, 64)])
def test_attention(randn, batch, seq_len, n_head, head_dim, dtype):
    """Every gradient of the packed projection has its place."""
    width = n_head * head_dim
    inputs, upstream = [randn(batch, seq_len, 3 * width)], [randn(batch, seq_len, width)]
    functions = (lambda qkv, f=f: f(qkv, n_head) for f in (triton_attention, torch_attention))
    test_kernels.assert_as_accurate_as_torch(*functions, inputs, upstream, dtype)


@pytest.mark.parametrize("place", PLACES)
def test_attention_of_any_layout(randn, place):
    inputs, upstream = [randn(2, 9, 3 * 24)], [randn(2, 9, 24)]
    functions = (lambda qkv, f=f: f(qkv, 2) for f in (triton_attention, torch_attention))
    test_kernels.assert_as_accurate_as_torch(*functions, inputs, upstream, torch.float32, place)


@pytest.mark.parametrize("head_dim, dtype, reason", [
    (9, torch.float32, "9 dimensions"), (136, torch.float32, "136 dimensions"), (8, torch.float64, "fp32"),
])  # fmt: skip
def test_attention_of_other_heads_is_pytorchs(randn, head_dim, dtype, reason):
    operators.say_once.cache_clear()
    qkv = randn(1, 5, 3 * 2 * head_dim).to(dtype)
    with pytest.warns(UserWarning, match=f"attention runs on PyTorch instead of Triton.*{reason}"):
        outputs = triton_attention(qkv, 2)
    torch.testing.assert_close(outputs, torch_attention(qkv, 2), rtol=0, atol=0)


def test_shapes_of_attention_that_the_kernels_do_not_count():
    assert "not those of 3 x 2 heads" in attention.shape_obstacle(1, 5, 16, 2)
    assert "empty" in attention.shape_obstacle(1, 0, 48, 2)
    assert "longer" in attention.shape_obstacle(1, 2**20, 2304, 12)
    assert attention.shape_obstacle(12, 1024, 2304, 12) is None


# --- both under torch.compile


def elementwise_and_attention(x):
    return triton_attention(triton_gelu(torch.sin(x)), 2).cos()


def test_gelu_and_attention_compiled_without_a_graph_break(randn):
    torch._dynamo.reset()
    compiled = torch.compile(elementwise_and_attention, fullgraph=True, backend=BACKEND)
    inputs, upstream = [randn(2, 8, 48)], [randn(2, 8, 16)]
    results = [test_kernels.run(f, inputs, upstream, torch.float32) for f in (elementwise_and_attention, compiled)]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("operator, inputs", [
    (gelu.gelu_operator, ((3, 40),)), (attention.attention_operator, ((2, 8, 48), 2)),
])  # fmt: skip
def test_other_operators_are_registered_as_pytorch_expects(randn, operator, inputs):
    shape, *others = inputs
    torch.library.opcheck(operator, (randn(*shape).requires_grad_(), *others))


@pytest.mark.parametrize("function", [triton_gelu, elementwise_and_attention])
def test_other_second_derivatives_are_refused(randn, function):
    x = randn(1, 4, 12).requires_grad_()
    (grad,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()
