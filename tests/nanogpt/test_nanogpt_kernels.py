"""nanogpt_triton's LayerNorm against float64, by the rule of test_kernels.py, and under torch.compile."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import tiny_llama_v3 as llama
from nanogpt_triton.kernels import TritonLayerNorm, torch_add_layer_norm, triton_add_layer_norm, triton_layer_norm
from nanogpt_triton.kernels import layer_norm as module
from tests.core import test_kernels

pytestmark = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")

ON_GPU = torch.cuda.is_available()
BACKEND = "inductor" if ON_GPU else "aot_eager"  # Triton's interpreter is no C++
randn, many = test_kernels.randn, test_kernels.many


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fresh memory is full of NaN, so that an element which no kernel writes is seen."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(many):
    weight, bias = torch.rand(2, 1024, device=many.device)
    x, rows = many.requires_grad_(), many.detach()[-4:].float().requires_grad_()
    y, expected = triton_layer_norm(x, weight, bias), F.layer_norm(rows, (1024,), weight, bias)
    test_kernels.assert_last_rows(y, expected)
    (x_grad,) = torch.autograd.grad(y, x, many.detach())
    test_kernels.assert_last_rows(x_grad, torch.autograd.grad(expected, rows, many.detach()[-4:].float())[0])


def normalized(function):
    return lambda *inputs: function(*inputs)[1]


SHAPES = [(64,), (1, 64), (3, 5, 96), (2, 7, 123), (37, 768), (9, 41), (3, 1, 2048), (2, 4100), (2, 3)]
FLAGS = [(True, True), (False, True), (True, False), (False, False)]  # with_branch, with_bias


def layer_norm_cases():
    """All combinations, and one wide row. The fast ones have one of FLAGS for each shape and type, each in turn."""
    yield (1, 20000 if ON_GPU else 8200), torch.float32, True, False
    for number, (shape, dtype) in enumerate(itertools.product(SHAPES, test_kernels.ALL_DTYPES)):
        for index, flags in enumerate(FLAGS):
            yield pytest.param(shape, dtype, *flags, marks=() if index == number % 4 else pytest.mark.slow)


@pytest.mark.parametrize("shape, dtype, with_branch, with_bias", [*layer_norm_cases()])
def test_layer_norm(randn, shape, dtype, with_bias, with_branch):
    width = shape[-1]
    inputs = [randn(*shape), randn(*shape) if with_branch else None, randn(width), randn(width) if with_bias else None]
    ours, theirs = triton_add_layer_norm, torch_add_layer_norm
    upstream = [randn(*shape), randn(*shape)]
    if not with_branch:  # the residual is the input itself
        ours, theirs, upstream = normalized(ours), normalized(theirs), upstream[1:]
    test_kernels.assert_as_accurate_as_torch(ours, theirs, inputs, upstream, dtype)


def test_mean_far_from_zero(randn):
    inputs, upstream = [randn(8, 300) + 1000, None, randn(300), randn(300)], [randn(8, 300)]
    ours, theirs = normalized(triton_add_layer_norm), normalized(torch_add_layer_norm)
    test_kernels.assert_as_accurate_as_torch(ours, theirs, inputs, upstream, torch.float32)


def assert_close_to_exact(inputs, upstream, function=triton_add_layer_norm):
    """Outputs and gradients are exact to the last bits of their types, with the layouts as they are given."""
    exact = test_kernels.run(torch_add_layer_norm, inputs, upstream, torch.float64)
    leaves = [t.detach().requires_grad_() for t in inputs]
    outputs = function(*leaves)
    torch.autograd.backward(outputs, upstream)
    for actual, expected in zip((*outputs, *(t.grad for t in leaves)), exact, strict=True):
        rtol = 2**-8 if actual.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=rtol * expected.abs().max().item())
    return outputs


@pytest.mark.parametrize("padded", [False, True])
def test_strided_input_and_gradient(randn, padded):
    """Rows that are padded are read as they lie; each tensor has a padding of its own."""
    x, branch, weight, bias = map(test_kernels.strided_like, (randn(4, 6, 40), randn(4, 6, 40), randn(40), randn(40)))
    upstream = [branch.transpose(1, 2).contiguous().transpose(1, 2), randn(1, 1, 40).expand(4, 6, 40)]
    if padded:
        x, branch, *upstream = (randn(4, 6, width)[..., :40] for width in (41, 43, 47, 53))
    assert_close_to_exact([x, branch, weight, bias], upstream)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("x_dtype, branch_dtype", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_mixed_types_under_autocast(randn, device, x_dtype, branch_dtype, compiled):
    """y is exact to the last bit of bf16, the sum to that of fp32, and each gradient to that of its tensor."""
    inputs = [randn(13, 96, dtype=x_dtype), randn(13, 96, dtype=branch_dtype), randn(96), randn(96).bfloat16()]
    function = triton_add_layer_norm
    if compiled:
        function = torch.compile(function, fullgraph=True, backend=BACKEND)

    def under_autocast(*tensors):
        with torch.autocast(device, torch.bfloat16):
            return function(*tensors)

    outputs = assert_close_to_exact(inputs, [randn(13, 96), randn(13, 96).bfloat16()], under_autocast)
    assert [t.dtype for t in outputs] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_both_gradients(randn, used):
    """What comes after the norm may be unused, and so may the sum."""
    inputs, upstream = [randn(3, 48), randn(3, 48), randn(48), randn(48)], randn(3, 48)

    def gradients(function, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        return torch.autograd.grad(function(*leaves)[used], leaves, upstream.to(dtype), materialize_grads=True)

    ours, exact = gradients(triton_add_layer_norm, torch.float32), gradients(torch_add_layer_norm, torch.float64)
    torch.testing.assert_close([t.double() for t in ours], [*exact], rtol=1e-5, atol=1e-5)


def test_gradients_are_the_same_bits_every_time(randn):
    inputs = [t.requires_grad_() for t in (randn(301 if ON_GPU else 37, 200), randn(200), randn(200))]
    grads = [torch.autograd.grad(triton_layer_norm(*inputs), inputs, inputs[0].sin()) for _ in range(3)]
    torch.testing.assert_close(grads[1:], grads[:-1], rtol=0, atol=0)


@pytest.mark.parametrize("dynamic, with_branch", [(True, False), (False, True)])
def test_compiled_without_a_graph_break(randn, dynamic, with_branch):
    """One compilation serves all numbers of rows where they are dynamic."""
    torch._dynamo.reset()

    def model(x, branch, weight, bias):
        residual, y = triton_add_layer_norm(torch.sin(x), branch, weight, bias)
        return triton_add_layer_norm(residual, torch.cos(y), weight, None)

    backend = CompileCounterWithBackend(BACKEND)
    compiled, compilations = torch.compile(model, fullgraph=True, backend=backend, dynamic=dynamic), set()
    for rows in (5, 8, 11) if dynamic else (5,):
        inputs = [randn(rows, 2, 48), randn(rows, 2, 48) if with_branch else None, randn(48), randn(48)]
        upstream = [randn(rows, 2, 48), randn(rows, 2, 48)]
        eager, traced = (test_kernels.run(f, inputs, upstream, torch.float32) for f in (model, compiled))
        torch.testing.assert_close(traced, eager, rtol=1e-5, atol=1e-5)
        compilations.add(backend.frame_count)
    assert len(compilations) == 1


def test_operator_keeps_pytorch_s_rules(randn):
    inputs = [t.requires_grad_() for t in (randn(5, 48), randn(5, 48), randn(48), randn(48))]
    torch.library.opcheck(module.layer_norm_operator, (*inputs, 1e-5, torch.float32))
    torch.library.opcheck(module.layer_norm_operator, (inputs[0], None, inputs[2], None, 1e-5, torch.bfloat16))


def test_no_second_derivative(randn):
    x, weight = randn(3, 32).requires_grad_(), randn(32).requires_grad_()
    (grad,) = torch.autograd.grad(triton_layer_norm(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_the_function_takes_the_arguments_of_layer_norm(randn, eps):
    x, weight, bias = randn(3, 32), randn(32), randn(32)
    expected = F.layer_norm(x, (32,), weight, bias, eps)
    torch.testing.assert_close(TritonLayerNorm.apply(x, weight, bias, eps), expected)


def test_falls_back_and_says_so_once(monkeypatch):
    monkeypatch.setattr(module, "INTERPRETED", False)
    module.say_once.cache_clear()
    x, weight = torch.randn(3, 32, dtype=torch.float64), torch.ones(32, dtype=torch.float64)
    with pytest.warns(UserWarning, match="PyTorch instead of Triton") as warnings:
        first, _ = triton_layer_norm(x, weight), triton_layer_norm(x, weight)
    assert len(warnings) == 1 and torch.equal(first, F.layer_norm(x, (32,), weight))
    torch.compile(triton_layer_norm, fullgraph=True, backend="eager")(x, weight)


@pytest.mark.parametrize("shape", [(0, 32), (3, 0, 32), (1, 2**20 + 1)])
def test_too_little_or_too_wide_for_the_kernels(device, shape):
    x, weight = torch.ones(shape, device=device), torch.ones(shape[-1:], device=device, requires_grad=True)
    y = triton_layer_norm(x, weight)
    y.sum().backward()
    assert y.shape == shape and torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("weight, bias", [((5,), None), ((4,), (3,)), ((1,), None), ((3, 4), None)])
def test_shapes_that_do_not_fit(device, weight, bias):
    """PyTorch refuses them, but a branch may be broadcast."""
    weight, bias = (None if shape is None else torch.ones(shape, device=device) for shape in (weight, bias))
    x = torch.arange(12.0, device=device).view(3, 4)
    with pytest.raises(RuntimeError):
        triton_layer_norm(x, weight, bias)
    residual, _ = triton_add_layer_norm(x, x[:1], x[0])
    assert torch.equal(residual, x + x[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("width", [256, 768, 4096, 16384])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows(randn, width, dtype):
    """More rows than all programs take at once: each walks over several tiles."""
    rows = 2**24 // width + 3
    inputs = [randn(rows, width), randn(rows, width), randn(width), randn(width)]
    upstream = [randn(rows, width), randn(rows, width)]
    test_kernels.assert_as_accurate_as_torch(triton_add_layer_norm, torch_add_layer_norm, inputs, upstream, dtype)
