"""--fp8: rounding bit for bit, the operations and their gradients beside the same in PyTorch, and what is refused."""

import contextlib
import dataclasses

import pytest
import torch

import tiny_llama_v3 as llama
from tests.offline.selection import EMULATED, needs_fp8
from tests.tiny_llama.conftest import TINY
from tiny_llama import fp8

TYPES = [*fp8.OCP, *fp8.FNUZ]
CONFIG = llama.Config(
    hidden_dim=32, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=48, vocab_size=37, batch_size=2, seq_len=24
)
pytestmark = [pytest.mark.usefixtures("right_fp8_rounding"), needs_fp8]
needs_triton = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")


def supported(dtype, device):
    if (device == "cuda" or EMULATED) and dtype not in (fp8.formats_of(llama.get_device(device).arch) or ()):
        pytest.skip(f"this GPU has no {dtype}")


@pytest.fixture
def quantize(device):
    """quantize(x) rounds to the device's forward type, from one guess to the next."""
    guess, dtype = torch.zeros((), device=device), fp8.formats_of(llama.get_device(device).arch).forward

    def quantize(x):
        return fp8.quantize(x, guess, dtype)

    quantize.guess, quantize.dtype = guess, dtype
    return quantize


def codes(x):
    return x.view(torch.uint8)


def assert_rounded(scaled, expected, dtype):
    """That both copies hold these values (rows, cols), in fp32, as PyTorch rounds them."""
    scale = fp8.scale_of(expected.abs().amax(), torch.finfo(dtype).max)
    assert torch.equal(scaled.scale, scale)
    assert torch.equal(codes(scaled.data), codes((expected / scale).to(dtype)))
    assert torch.equal(codes(scaled.transposed), codes(scaled.data).t())


# --- scales and rounding


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_scale_is_the_least_power_of_two_that_fits(dtype):
    largest = torch.finfo(dtype).max
    for maximum in (1.0, 3.0, largest, largest * (1 + 2**-23), largest / 2, 1e-30, 3e38):
        maximum = torch.tensor(maximum)
        scale = fp8.scale_of(maximum, largest)
        assert scale.frexp().mantissa == 0.5
        assert maximum.double() / scale <= largest < maximum.double() / (scale.double() / 2)
    for tiny in (0.0, 2.0**-149 * 3):  # with a smaller scale it would not be a normal number
        assert fp8.scale_of(torch.tensor(tiny), largest) == 2.0**-126
    assert all(fp8.scale_of(torch.tensor(value), largest).isnan() for value in (torch.inf, torch.nan))


@needs_triton
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rounding_is_that_of_pytorch(dtype, device):
    """Of every finite code, and of strided rows, as they are in a projection of several parts."""
    supported(dtype, device)
    torch.manual_seed(0)
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = every[every.isfinite()]  # e5m2 has infinities, and all types have NaN
    exact = torch.stack([finite[:240], finite[-240:]]).repeat(8, 1).to(device)  # -0 as well, where there is one
    inputs = [exact * factor for factor in (1.0, 2.0**-20, 2.0**90)]
    for exponent, (rows, cols) in zip((4, 0, -4), [(16, 16), (80, 48), (144, 208)], strict=True):
        inputs.append(torch.randn(rows, cols + 32, device=device)[:, 16:-16] * 10.0**exponent)
    guess = torch.zeros((), device=device)
    for x in inputs:
        assert_rounded(fp8.quantize(x, guess, dtype), x, dtype)


def swiglu(gate, up, hidden_grad):
    return gate * gate.sigmoid() * up


def swiglu_gradient(gate, up, hidden_grad):
    inputs = gate.requires_grad_(), up.requires_grad_()
    return torch.cat(torch.autograd.grad(swiglu(*inputs, None), inputs, hidden_grad.double()), dim=1)


@needs_triton
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("source, exact", [(fp8.SWIGLU, swiglu), (fp8.SWIGLU_GRADIENT, swiglu_gradient)])
def test_swiglu_is_rounded_as_it_is_computed(source, exact, dtype, device):
    """To within half a unit in the last place of what is exact, and of a subnormal number."""
    supported(dtype, device)
    digits = 2.0**-4 if "e4m3" in str(dtype) else 2.0**-3
    for rows, cols, factor in ((16, 16, 100.0), (144, 208, 1.0)):
        x, hidden_grad = torch.randn(rows, 2 * cols, device=device) * factor, torch.randn(rows, cols, device=device)
        scaled = fp8.quantize(x, torch.zeros((), device=device), dtype, source, hidden_grad)
        expected = exact(*x.double().chunk(2, dim=1), hidden_grad).float()
        error, least = (scaled.data.float() * scaled.scale - expected).abs(), torch.finfo(dtype).smallest_normal
        assert bool((error <= 1.001 * digits * torch.maximum(expected.abs(), least * scaled.scale)).all())
        assert torch.equal(codes(scaled.transposed), codes(scaled.data).t())
        assert 0.499 < expected.abs().amax() / scaled.scale / torch.finfo(dtype).max < 1.001


@needs_triton
def test_a_wrong_guess_costs_a_second_round_and_nothing_else(device, quantize):
    """Of one value that is not finite the scale is NaN, which shows in the whole product."""
    x = torch.randn(48, 80, device=device)
    for factor, last in (
        (1.0, 1),
        (1.0, 1),
        (1e4, 1),
        (1e-9, 1),
        (0, 1),
        (1.0, -torch.nan),
        (1.0, 1),
        (1.0, torch.inf),
    ):
        values = x * factor
        values[-1, -1] *= last
        scaled = quantize(values)
        if last == 1:
            assert_rounded(scaled, values, quantize.dtype)
        assert torch.equal(quantize.guess, scaled.scale) if last == 1 else scaled.scale.isnan()


@needs_triton
def test_one_program_with_another_guess_is_enough_to_round_again(device, monkeypatch, quantize):
    x, launch = torch.randn(96, 160, device=device), llama.launch
    quantize(x)

    def launch_disturbed(kernel, grid, tensors, scalars, constants, **options):
        if constants["REPEAT"]:  # as if another stream had changed the guess while the first launch ran
            _, _, data, _, _, _, found = tensors
            data.zero_()
            found[1, 2 * is_disturbed] += is_disturbed
        launch(kernel, grid, tensors, scalars, constants, **options)

    monkeypatch.setattr(llama, "launch", launch_disturbed)
    is_disturbed = False
    assert not codes(quantize(x).data).any()  # otherwise nothing is rounded twice
    is_disturbed = True
    assert_rounded(quantize(x), x, quantize.dtype)


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
    formats = fp8.formats_of(llama.get_device(device).arch)
    if formats is None:
        pytest.skip("this GPU has no FP8")
    layer = block("triton", device)
    ours, reference = pass_through(layer, device, passes), pass_through(block("torch", device), device, passes)
    # Far below the error of FP8, which is 0.1. It is not 0, because a difference in the last digit of fp32 can round to
    # another number in FP8.
    assert max(llama.relative_errors(ours, reference).values()) < 0.01
    for weight in (p for p in layer.parameters() if p.dim() == 2):
        x, own, gradient = weight.fp8_guesses[:, 0].tolist()
        assert own == fp8.scale_of(weight.detach().abs().amax(), torch.finfo(formats.forward).max)
        assert gradient < own < x  # of 1e-5, of 0.1 and of 1
    layer = block("triton", device)
    optimizer = llama.FlatAdamW(layer, 1e-3)
    frozen = layer.feed_forward.down_proj.weight.requires_grad_(False)
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


@pytest.mark.parametrize("fault", [None, "scale", "forward", "backward"])
def test_the_check_finds_a_fault(tmp_path, monkeypatch, fault):
    """Of the rounding itself, which PyTorch's FP8 shares, and of our operations alone."""
    monkeypatch.chdir(tmp_path)
    flags, scale_of = [*TINY, "--fp8", "--check"], fp8.scale_of

    def linear(x, weight):
        y = fp8.emulated_linear(x, weight)
        return y * 2 if fault == "forward" else y.detach()

    if fault == "scale":
        monkeypatch.setattr(fp8, "scale_of", lambda maximum, largest: scale_of(maximum, largest / 2**14))
    elif fault:
        monkeypatch.setitem(llama.OPERATIONS, "triton", llama.OPERATIONS["torch"])
        monkeypatch.setattr(llama, "triton_obstacle", lambda *arguments: None)
        monkeypatch.setattr(fp8, "fp8_attention", lambda *inputs: llama.torch_attention(*inputs, linear=linear))
        monkeypatch.setattr(fp8, "fp8_swiglu", fp8.emulated_swiglu)
        flags += ["--impl", "triton"]
    assert llama.main(flags, "tiny_llama_v3.py") == bool(fault)


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
def test_the_types_of_an_architecture(largest, architectures):
    config = dataclasses.replace(CONFIG, fp8=True, seq_len=32)
    for arch in architectures.split():
        device = llama.Device("cuda", "Some GPU", arch, 100, 32)
        fp8.validate(config, device, "torch")
        if largest:
            assert [torch.finfo(dtype).max for dtype in fp8.formats_of(arch)] == largest
        with contextlib.nullcontext() if largest else pytest.raises(llama.UsageError, match=arch):
            fp8.validate(config, device, "triton")
