"""benchmarks.fp8_layer on a CPU: what is compared before it is timed, and what is counted."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import tiny_llama_v3 as llama
from benchmarks import fp8_layer
from measure.timing import Bench
from tiny_llama import fp8

pytestmark = [
    pytest.mark.usefixtures("right_fp8_rounding"),
    pytest.mark.skipif(llama.triton is None, reason="Triton is not installed"),
]
TOKENS, HIDDEN, FFN = 32, 16, 48


@pytest.fixture(autouse=True)
def counter(monkeypatch):
    """Counts the graphs of torch.compile."""
    counter, compile = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile(f, backend=counter, **options))
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False):  # restores what is set meanwhile
        yield counter


def parts():
    torch.manual_seed(0)
    bench = Bench(llama.get_device("cpu"))
    bench.on_gpu = True  # compiles
    return {part: rest for part, *rest in fp8_layer.parts(bench, fp8.OCP, TOKENS, HIDDEN, FFN)}


def test_work_is_counted_once():
    found = {part: (amount, unit) for part, (amount, unit, _) in parts().items()}
    weights = HIDDEN * (2 * HIDDEN + HIDDEN + 2 * FFN + FFN)
    assert found == {
        "read and write (negation)": (2 * 4 * TOKENS * FFN, "TB/s"),
        "rounding the inputs": (TOKENS * (3 * HIDDEN * 6 + FFN * (2 * 4 + 2)), "TB/s"),
        "rounding the weights": (6 * weights, "TB/s"),
        "rounding the gradients": (TOKENS * (4 * HIDDEN * 6 + FFN * (3 * 4 + 2 * 2)), "TB/s"),
        "the twelve products": (3 * 2 * TOKENS * weights, "TFLOP/s"),
    }


def test_every_contender_runs_and_no_graph_is_broken(counter):
    for part, (_, _, contenders) in parts().items():
        assert set(contenders) == {"read and write (negation)": {"torch"}, "the twelve products": {"fp8", "bf16"}}.get(
            part, {"triton", "torch", "compile"}
        )
        assert all(call() is not None for build in contenders.values() for call in build())
    assert counter.frame_count == 2 + 4 + 3  # sizes of inputs, weights and gradients


@pytest.mark.parametrize("fault", ["a transposed copy", "SwiGLU", "a product"])
def test_what_is_wrong_is_not_timed(fault, monkeypatch):
    quantize, product = fp8.quantize, fp8.product

    def wrong_quantize(x, guess, dtype, source=fp8.MATRIX, hidden_grad=None):
        scaled = quantize(x, guess, dtype, source, hidden_grad)
        is_swiglu = source.value == fp8.SWIGLU.value
        if fault == "a transposed copy" or fault == "SwiGLU" and is_swiglu:
            scaled = scaled._replace(transposed=scaled.transposed.flip(0))
        return scaled

    monkeypatch.setattr(fp8, "quantize", wrong_quantize)
    if fault == "a product":
        monkeypatch.setattr(fp8, "product", lambda *args, **options: 1.1 * product(*args, **options))
    wrong = []
    for part, (_, _, contenders) in parts().items():
        try:
            contenders.get("triton", contenders.get("fp8", list))()
        except ArithmeticError as error:
            wrong.append(part)
            assert "is wrong: error" in str(error)
    rounded = [part for part in wrong if part.startswith("rounding")]
    expected = {"SwiGLU": ["rounding the inputs"], "a product": []}
    assert rounded == expected.get(fault, [f"rounding the {each}" for each in ("inputs", "weights", "gradients")])
    assert wrong[-1] == "the twelve products"  # which multiply what was rounded


def test_a_device_without_fp8_is_refused(capsys, monkeypatch):
    assert fp8_layer.main([]) == 2 and capsys.readouterr().err.count("\n") == 1
