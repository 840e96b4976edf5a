"""--fp8: rounding bit for bit, the operations and their gradients beside the same in PyTorch, and what is refused."""

import contextlib
import dataclasses
import functools
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tiny_llama_v3 as llama
from tests.offline.selection import EMULATED, needs_fp8
from tests.tiny_llama.conftest import TINY
from tiny_llama import fp8

TYPES = [*fp8.OCP, *fp8.FNUZ]
CONFIG = llama.Config(
    hidden_dim=32, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=48, vocab_size=37, batch_size=2, seq_len=24
)
pytestmark = [pytest.mark.usefixtures("right_fp8_rounding"), needs_fp8]
interpreted = pytest.mark.skipif(not llama.INTERPRETED, reason="compiled kernels need a GPU")
needs_triton = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")


@pytest.fixture(params=TYPES, ids=str)
def dtype(request, device):
    if (device == "cuda" or EMULATED) and request.param not in (formats(device) or ()):
        pytest.skip(f"this GPU has no {request.param}")
    return request.param


@pytest.fixture
def guess(device):
    return torch.zeros((), device=device)


def formats(device):
    return fp8.formats_of(llama.get_gpu(device).arch)


def codes(x):
    return x.view(torch.uint8)


def assert_rounded(scaled, expected, dtype):
    """That both copies hold these values (rows, cols), in fp32, as PyTorch rounds them."""
    scale = fp8.scale_of(expected.abs().amax(), torch.finfo(dtype).max)
    assert torch.equal(scaled.scale, scale)
    assert torch.equal(codes(scaled.data), codes((expected / scale).to(dtype)))
    assert torch.equal(codes(scaled.transposed), codes(scaled.data).t())


# --- scales and rounding


@pytest.mark.parametrize("largest", [torch.finfo(dtype).max for dtype in TYPES])
def test_the_scale_is_the_least_power_of_two_that_fits(largest):
    above = float(np.nextafter(np.float32(largest), np.float32(3e38)))
    for maximum in map(torch.tensor, (1.0, 3.0, largest, above, largest / 2, 1e-30, 3e38)):
        scale = fp8.scale_of(maximum, largest)
        assert scale.frexp().mantissa == 0.5
        assert maximum.double() / scale <= largest < maximum.double() / (scale.double() / 2)
    for tiny in (0.0, 2.0**-149 * 3):  # with a smaller scale it would not be a normal number
        assert fp8.scale_of(torch.tensor(tiny), largest) == 2.0**-126
    assert all(fp8.scale_of(torch.tensor(value), largest).isnan() for value in (torch.inf, torch.nan))


@needs_triton
def test_rounding_is_that_of_pytorch(dtype, device, guess):
    """Of every finite code, and of strided rows, as they are in a projection of several parts."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = every[every.isfinite()]  # e5m2 has infinities, and all types have NaN
    exact = torch.stack([finite[:240], finite[-240:]]).repeat(8, 1).to(device)  # -0 as well, where there is one
    inputs = [exact, exact * 2.0**-20, exact * 2.0**90, torch.nextafter(exact, 2 * exact)]
    for factor, rows, cols in ((1e4, 16, 16), (1.0, 80, 48), (1e-4, 144, 208)):
        inputs.append(torch.randn(rows, cols + 32, device=device)[:, 16:-16] * factor)
    for x in inputs:
        assert_rounded(fp8.quantize(x, guess, dtype), x, dtype)


def swiglu(gate, up, hidden_grad):
    return gate * gate.sigmoid() * up


def swiglu_gradient(gate, up, hidden_grad):
    inputs = gate.requires_grad_(), up.requires_grad_()
    return torch.cat(torch.autograd.grad(swiglu(*inputs, None), inputs, hidden_grad.double()), dim=1)


@needs_triton
@pytest.mark.parametrize("source, exact", [(fp8.SWIGLU, swiglu), (fp8.SWIGLU_GRADIENT, swiglu_gradient)])
def test_swiglu_is_rounded_as_it_is_computed(source, exact, dtype, device, guess):
    """To within half a unit in the last place of what is exact, and of a subnormal number."""
    digits = 2.0**-4 if "e4m3" in str(dtype) else 2.0**-3
    for rows, cols, factor in ((16, 16, 100.0), (144, 208, 1.0)):
        x, hidden_grad = torch.randn(rows, 2 * cols, device=device) * factor, torch.randn(rows, cols, device=device)
        scaled = fp8.quantize(x, guess, dtype, source, hidden_grad)
        expected = exact(*x.double().chunk(2, dim=1), hidden_grad).float()
        error, least = (scaled.data.float() * scaled.scale - expected).abs(), torch.finfo(dtype).smallest_normal
        assert bool((error <= 1.001 * digits * torch.maximum(expected.abs(), least * scaled.scale)).all())
        assert torch.equal(codes(scaled.transposed), codes(scaled.data).t())
        assert 0.499 < expected.abs().amax() / scaled.scale / torch.finfo(dtype).max < 1.001


@needs_triton
def test_a_wrong_guess_costs_a_second_round_and_nothing_else(device, guess):
    """Of one row that is not finite the scale is NaN, which shows in the whole product."""
    x, dtype = torch.randn(48, 80, device=device), formats(device).forward
    for factor in (1.0, 1.0, 1e4, 1e-9, 0.0, -torch.nan, 1.0, torch.inf, 1.0):
        values, is_finite = x * factor, abs(factor) < torch.inf
        if not is_finite:
            values[:-1] = x[:-1]
        scaled = fp8.quantize(values, guess, dtype)
        if is_finite:
            assert_rounded(scaled, values, dtype)
        assert torch.equal(guess, scaled.scale) if is_finite else guess.isnan() and scaled.scale.isnan()


@needs_triton
def test_one_program_with_another_guess_is_enough_to_round_again(device, monkeypatch, guess):
    x, dtype, launch = torch.randn(96, 160, device=device), formats(device).forward, llama.launch
    fp8.quantize(x, guess, dtype)

    def launch_disturbed(kernel, grid, tensors, scalars, constants, **options):
        if constants["REPEAT"]:  # as if another stream had changed the guess while the first launch ran
            _, _, data, _, _, _, found = tensors
            data.zero_()
            found[1, 2 * is_disturbed] += is_disturbed
        launch(kernel, grid, tensors, scalars, constants, **options)

    monkeypatch.setattr(llama, "launch", launch_disturbed)
    is_disturbed = False
    assert not codes(fp8.quantize(x, guess, dtype).data).any()  # otherwise nothing is rounded twice
    is_disturbed = True
    assert_rounded(fp8.quantize(x, guess, dtype), x, dtype)


# --- operations


def block(implementation, device, fp8=fp8):
    """A TransformerBlock in fp32 whose operations multiply in FP8."""
    torch.manual_seed(3)
    operations = llama.OPERATIONS[implementation]
    with torch.device(device):
        return llama.TransformerBlock(CONFIG, fp8.with_fp8(operations, implementation) if fp8 else operations)


def pass_through(layer, device, passes=1):
    """{name: output, gradient of an input or weight} of forward and backward passes."""
    torch.manual_seed(4)
    tables, shape = llama.rope_tables(CONFIG.seq_len, CONFIG.head_dim, device), (2, CONFIG.seq_len, CONFIG.hidden_dim)
    for _ in range(passes):
        residual, branch = (torch.randn(shape, device=device, requires_grad=True) for _ in range(2))
        outputs = layer(residual, branch, *tables)
        torch.autograd.backward(outputs, [torch.randn(shape, device=device) * 1e-5 for _ in outputs])
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    return dict(y=outputs[1].detach(), residual=residual.grad, branch=branch.grad) | gradients


@needs_triton
@pytest.mark.parametrize("passes", [1, 2])
def test_a_block_computes_what_pytorch_does_with_rounded_operands(passes, device):
    """Without an optimizer, and with its flat buffer and a frozen weight; each matrix has a guess of its own."""
    if formats(device) is None:
        pytest.skip("this GPU has no FP8")
    layer = block("triton", device)
    ours, reference = pass_through(layer, device, passes), pass_through(block("torch", device), device, passes)
    # Far below the error of FP8, which is 0.1. It is not 0, because a difference in the last digit of fp32 can round to
    # another number in FP8.
    assert max(llama.relative_errors(ours, reference).values()) < 0.01
    for weight in (p for p in layer.parameters() if p.dim() == 2):
        x, own, gradient = weight.fp8_guesses[:, 0].tolist()
        assert own == fp8.scale_of(weight.detach().abs().amax(), torch.finfo(formats(device).forward).max)
        assert gradient < own < x  # of 1e-5, of 0.1 and of 1
    layer = block("triton", device)
    frozen = layer.feed_forward.down_proj.weight.requires_grad_(False)
    optimizer = llama.FlatAdamW(1e-3)
    optimizer.own(layer)
    for name, result in pass_through(layer, device, passes).items():
        assert result is None if name == "feed_forward.down_proj.weight" else torch.equal(result, ours[name]), name
    assert all(p.grad is p.main_grad for p in optimizer.parameters if p is not frozen)


def test_rounding_is_the_only_difference_of_the_reference(device, monkeypatch):
    exact = pass_through(block("torch", device, fp8=None), device)
    errors = llama.relative_errors(pass_through(block("torch", device), device), exact)
    assert all(0.005 < error < 0.2 for error in errors.values())
    monkeypatch.setattr(fp8, "rounded", lambda x, dtype: x)
    errors = llama.relative_errors(pass_through(block("torch", device), device), exact)
    assert max(errors.values()) < 1e-5


# --- the command line


def test_a_run_has_kernels_on_an_emulated_gpu_and_none_on_a_cpu(run):
    flags = "--fp8", "--impl", "triton", "--check"
    result = run(*flags)
    assert "passed" in result.out and ("fp8_attention" if EMULATED else "emulated_attention") in result.out
    assert result.result["precision"] == "fp8" and result.result["config"]["use_amp"]
    assert result.losses == run(*flags).losses  # the same bits
    bf16 = run("--use-amp", "--impl", "torch")
    assert result.losses != bf16.losses and result.losses == pytest.approx(bf16.losses, abs=0.05)


def add_with_few_bits(x, weight):
    """Return x @ weight^T of which each sum is cut off to 10 bits after 32 addends: some 3 % of it are missing."""
    total = torch.zeros(*x.shape[:-1], len(weight), device=x.device)
    for a, b in zip(x.float().split(32, dim=-1), weight.float().split(32, dim=-1), strict=True):
        total = ((total + a @ b.t()).view(torch.int32) & -(2**14)).view(torch.float32)
    y = F.linear(x, weight)
    return y + (total.to(y.dtype) - y).detach()  # whose gradient is that of y


@pytest.mark.gpu
def test_the_check_finds_that_a_gpu_adds_with_few_bits(tmp_path, monkeypatch):
    """Hopper does so with use_fast_accum: 6.6 % of a sum of 4,096 positive numbers are missing."""
    if llama.get_gpu("cuda").arch != "sm_90":
        pytest.skip("other GPUs may add with all bits")
    monkeypatch.chdir(tmp_path)
    flags, multiply = [*TINY, *"--fp8 --check --impl triton --device cuda".split()], torch._scaled_mm
    assert llama.main(flags, "tiny_llama_v3.py") == 0
    monkeypatch.setattr(torch, "_scaled_mm", functools.partial(multiply, use_fast_accum=True))
    assert llama.main(flags, "tiny_llama_v3.py") == 1
    assert fp8.relative_bias(lambda x, weight: fp8.project(x, weight)[0], torch.device("cuda")) > 0.05


FAULTS = None, "the rounding", "the sums", pytest.param("our operations", marks=interpreted)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_finds_a_fault(tmp_path, monkeypatch, capsys, fault):
    """Of the rounding itself, which PyTorch's FP8 shares, of sums, and of our operations alone."""
    monkeypatch.chdir(tmp_path)
    flags, scale_of = [*TINY, "--fp8", "--check"], fp8.scale_of
    if fault == "the rounding":
        monkeypatch.setattr(fp8, "scale_of", lambda maximum, largest: scale_of(maximum, largest / 2**14))
    elif fault == "the sums":
        monkeypatch.setattr(fp8, "F", types.SimpleNamespace(linear=add_with_few_bits))
        flags += ["--impl", "torch"]
    elif fault:
        monkeypatch.setitem(llama.OPERATIONS, "triton", llama.OPERATIONS["torch"])
        monkeypatch.setattr(llama, "triton_obstacle", lambda *arguments: None)
        monkeypatch.setattr(fp8, "fp8_attention", fp8.emulated_attention)
        monkeypatch.setattr(fp8, "fp8_swiglu", lambda *inputs: fp8.emulated_swiglu(*inputs) * 1.5)
        flags += ["--impl", "triton"]
    assert llama.main(flags, "tiny_llama_v3.py") == bool(fault)
    printed = capsys.readouterr().out
    assert (f"    {fp8.BIAS}: error" in printed) == (fault == "the sums")


@pytest.mark.parametrize("flags", [
    "--impl sdpa", "--triton-matmul-swiglu", "--hidden-dim 24", "--ffn-dim 40", "--seq-len 9",
])  # fmt: skip
def test_what_fp8_cannot_do_takes_one_line(flags, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert llama.main([*TINY, "--fp8", *flags.split()], "tiny_llama_v3.py") == 2
    error = capsys.readouterr().err
    assert "--fp8" in error and error.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("largest, architectures", [
    (None, "gfx90a sm_80"), ([240, 57344], "gfx942"), ([448, 57344], "gfx950 gfx1201 sm_89 sm_90 sm_120"),
])  # fmt: skip
def test_the_types_of_an_architecture(monkeypatch, largest, architectures):
    config = dataclasses.replace(CONFIG, fp8=True, seq_len=32)
    for arch in architectures.split():
        monkeypatch.setattr(llama, "get_gpu", lambda kind, arch=arch: llama.Gpu(kind, "Some GPU", arch, 100, 32))
        device = torch.device("cuda")
        fp8.validate(config, device, "torch")
        if largest:
            assert [torch.finfo(dtype).max for dtype in fp8.formats_of(arch)] == largest
        with contextlib.nullcontext() if largest else pytest.raises(llama.UsageError, match=arch):
            fp8.validate(config, device, "triton")
