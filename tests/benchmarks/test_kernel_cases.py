"""benchmarks.kernels: the work of each case, and that what is wrong or missing has a reason in the place of a time."""

import json
import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import tiny_llama_v3 as llama
from benchmarks import kernels
from measure.timing import Bench
from tiny_llama import fp8

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(torch.cuda.is_available(), reason="takes minutes on a GPU, where the script itself is run"),
]
PLAIN = {
    "norm": kernels.torch_norm, "add_norm": kernels.torch_add_norm, "activation": kernels.swiglu,
    "cross_entropy": kernels.torch_losses_and_gradient, "attention": kernels.torch_attention,
}  # fmt: skip


def test_the_work_of_each_case_by_hand():
    bench, work = Bench(torch.device("cpu")), {}
    for name, group in kernels.GROUPS.items():
        for case in (case for shape in group.interpreted for case in group.cases(bench, *shape)):
            work[name, case.name] = case.work.bytes if case.unit == "TB/s" else case.work.flop
    n = 32 * 64 * 4  # bytes of a tensor, in fp32
    row = 4 * 64 + 4 * 32  # a weight, and a statistic of each row
    product = 2 * 1 * 2 * 32 * 32 * 16 / 2  # two operations a pair of queries and keys and dimension, half masked
    tokens, hidden, ffn = 32, 16, 48
    weights = hidden * (2 * hidden + hidden + 2 * ffn + ffn)
    assert (
        work.items()
        >= {
            ("copy", "read and write (negation)"): 2 * 4 * 2**13,
            ("rmsnorm", "RMSNorm"): 2 * n + row,  # x, y
            ("rmsnorm", "RMSNorm backward"): 3 * n + row,  # y_grad, x, x_grad
            ("rmsnorm", "add + RMSNorm"): 4 * n + row,  # x, branch, their sum, y
            ("rmsnorm", "add + RMSNorm backward"): 4 * n + row,  # both gradients, the sum, x_grad
            ("swiglu", "SwiGLU"): 3 * n,
            ("swiglu", "SwiGLU backward"): 5 * n,
            ("swiglu-product", "SwiGLU and its product"): 2 * 8 * 16 * 2 * 32,
            ("swiglu-product", "SwiGLU backward and its product"): 2 * 8 * 16 * 32,
            ("cross-entropy", "cross-entropy"): 2 * 8 * 100 * 4 + 8 * (8 + 8),  # targets, losses and counts
            ("adamw", "AdamW"): 28 * 2 * llama.ADAMW_BLOCK,  # a matrix of 16 x 16 has a block to itself
            ("attention", "attention"): 2 * product,
            ("attention", "attention backward"): 5 * product,
            ("layer-norm", "LayerNorm"): 2 * 8 * 16 * 4 + 2 * 8 * 4 + 2 * 16 * 4,  # weight and bias
            ("layer-norm", "LayerNorm backward"): 3 * 8 * 16 * 4 + 2 * 8 * 4 + 16 * 4,
            # Read in fp32, written twice in a byte; SwiGLU reads two and its gradient three numbers for each of ffn.
            ("fp8-layer", "rounding the inputs"): tokens * (3 * hidden * 6 + ffn * (2 * 4 + 2)),
            ("fp8-layer", "rounding the weights"): 6 * weights,
            ("fp8-layer", "rounding the gradients"): tokens * (4 * hidden * 6 + ffn * (3 * 4 + 2 * 2)),
            ("fp8-layer", "the twelve products"): 3 * 2 * tokens * weights,
        }.items()
    )


def scaled(outputs, factor):
    return tuple(factor * x for x in outputs) if isinstance(outputs, tuple) else factor * outputs


def run_kernels(monkeypatch, folder, library, *groups):
    """(exit code, cases) with one library, "fake", whose functions are those of PLAIN times its factor."""
    functions = {name: lambda module, *xs, f=f: scaled(f(*xs), module.factor) for name, f in PLAIN.items()}
    fake = kernels.Library("fake_library", ("cpu",), functions)
    monkeypatch.setattr(kernels, "LIBRARIES", {"fake": fake, "other": fake._replace(archs=("sm_90",))})
    monkeypatch.setitem(sys.modules, "fake_library", library)
    code = kernels.main(["--only", *groups, "--output-dir", str(folder)])
    return code, json.loads(next(folder.glob("kernels_*.json")).read_text())["cases"]


@pytest.mark.parametrize("library, expected, reason", [
    (SimpleNamespace(factor=1.0), 0, "None"),
    (SimpleNamespace(factor=1.01), 1, "ArithmeticError: output [123] is wrong: error 1.0e-02, allowed"),
    (SimpleNamespace(), 0, "AttributeError: .* has no attribute"),
    (None, 0, "fake_library is not installed"),
])  # fmt: skip
def test_a_library_has_rows_if_it_is_right(monkeypatch, tmp_path, library, expected, reason):
    groups = ["rmsnorm", "swiglu", "cross-entropy", "attention"]
    code, cases = run_kernels(monkeypatch, tmp_path, library, *groups)
    assert code == expected and {case["group"] for case in cases} == set(groups)
    for case in cases:
        contenders = case["contenders"]
        assert set(contenders) == {"triton", "torch", "fake"}, case["case"]
        row = contenders.pop("fake")
        assert re.match(reason, str(row["error"])) and ("us" in row) == (row["error"] is None)
        assert all(row["us"] > 0 for row in contenders.values())


@pytest.mark.parametrize("owner, name, wrong, group", [
    (llama, "swiglu_activation", lambda x: 1.001 * kernels.swiglu(x), "swiglu"),
    (llama, "cross_entropy_", lambda logits, targets, scale: torch.zeros(2, len(targets)), "cross-entropy"),
    (llama.FlatAdamW, "step", lambda self: None, "adamw"),
    (kernels, "triton_layer_norm", lambda *xs: kernels.torch_layer_norm(*xs).mul(1.001), "layer-norm"),
    (kernels, "triton_norm", lambda x, weight: kernels.torch_norm(x, weight.detach().add(1e-3)), "rmsnorm"),
])  # fmt: skip
def test_a_wrong_kernel_of_ours_gets_no_time_and_its_peers_do(monkeypatch, tmp_path, owner, name, wrong, group):
    monkeypatch.setattr(owner, name, wrong)
    code, (copy, first, *others) = run_kernels(monkeypatch, tmp_path, None, "copy", group)
    assert code == 1 and re.match(r"ArithmeticError: output \d is wrong", first["contenders"].pop("triton")["error"])
    assert first["contenders"]["torch"]["us"] > 0 and copy["contenders"]["torch"]["us"] > 0


def test_a_group_that_fails_has_its_reason_and_the_others_continue(monkeypatch, tmp_path):
    monkeypatch.delattr(llama, "swiglu_activation")
    code, (failed, *others) = run_kernels(monkeypatch, tmp_path, None, "swiglu", "layer-norm")
    assert failed["case"] == "swiglu" and failed["error"].startswith("AttributeError: ")
    assert code == 0 and [case["case"] for case in others] == [
        "LayerNorm, float32, 8 x 16", "LayerNorm backward, float32, 8 x 16"
    ]  # fmt: skip


def test_plain_triton_is_ours_without_the_kernel_for_hopper(monkeypatch):
    hopper, seen = llama.companion("attention_hopper"), []
    if hopper is None:
        pytest.skip("Triton is older than 3.6")
    monkeypatch.setattr(hopper, "launch_forward", lambda *tensors: seen.append(hopper.SHORTEST))
    forward, _ = kernels.heads_128_cases(Bench(torch.device("cpu")), 1, 16, 2, 1, 16)
    for name, shortest in (("triton", hopper.SHORTEST), ("plain triton", math.inf), ("triton", hopper.SHORTEST)):
        seen.clear()
        (call,) = forward.contenders[name]()
        call()
        assert seen == [shortest] * 2, "when it is checked, and when it is timed"


def test_plain_triton_multiplies_by_the_library_on_a_hopper_too(monkeypatch):
    hopper, seen = llama.companion("swiglu_hopper"), []
    if hopper is None:
        pytest.skip("Triton is older than 3.6")
    monkeypatch.setattr(hopper, "launch_product", lambda *tensors: seen.append(len(tensors)))
    cases = kernels.swiglu_product_cases(Bench(torch.device("cpu")), 8, 16, 32)
    for case, tensors in zip(cases, (4, 3), strict=True):
        for name, launches in (("triton", [tensors] * 2), ("plain triton", [])):
            seen.clear()
            (call,) = case.contenders[name]()
            call()
            assert seen == launches, "when it is checked, and when it is timed"


# --- a layer in FP8


@pytest.fixture
def layer(monkeypatch, right_fp8_rounding):
    """A function that returns {case: its contenders}; compiled ones are traced only."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile(f, backend=CompileCounter(), **options))
    bench = Bench(torch.device("cpu"))
    bench.on_gpu = True  # compiles
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False):  # restores what is set meanwhile
        yield lambda: {case.name: case.contenders for case in kernels.fp8_layer_cases(bench, 32, 16, 48)}


ROUNDING = ["rounding the inputs", "rounding the weights", "rounding the gradients"]


@pytest.mark.parametrize("fault, found", [
    (None, None), ("a transposed copy", ROUNDING), ("SwiGLU", ROUNDING[:1]), ("a product", []),
])  # fmt: skip
def test_what_is_wrong_in_a_layer_is_not_timed(layer, monkeypatch, fault, found):
    quantize, product = fp8.quantize, fp8.product

    def wrong_quantize(x, guess, dtype, source=fp8.MATRIX, *others):
        scaled = quantize(x, guess, dtype, source, *others)
        is_swiglu = source.value == fp8.SWIGLU.value
        is_wrong = fault == "a transposed copy" or fault == "SwiGLU" and is_swiglu
        return scaled._replace(transposed=scaled.transposed.flip(0)) if is_wrong else scaled

    monkeypatch.setattr(fp8, "quantize", wrong_quantize)
    if fault == "a product":
        monkeypatch.setattr(fp8, "product", lambda *args, **options: 1.1 * product(*args, **options))
    wrong = []
    for name, contenders in layer().items():
        for contender, build in contenders.items():
            try:
                assert all(call() for call in build())
            except ArithmeticError:
                wrong.append(name)
                assert contender in ("triton", "fp8")
        assert {*contenders} == ({"fp8", "bf16"} if "products" in name else {"triton", "torch", "compile"})
    assert wrong == ([*found, "the twelve products"] if fault else [])  # which multiply what was rounded


def test_a_device_without_fp8_is_refused(capsys):
    assert kernels.main(["--only", "fp8-layer"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--only fp8-layer needs a GPU" in error
