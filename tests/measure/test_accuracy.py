"""The rule by which results are let in: twice plain PyTorch's error and a tolerance, nothing missing, no NaN."""

import contextlib
import math

import pytest
import torch

from measure import accuracy

EXACT = {"a": torch.tensor([3.0, 4.0]).double(), "b": torch.ones(4).double()}


def scaled(a=0.0, b=0.0):
    """The exact results, each off by so much of itself."""
    return {"a": EXACT["a"] * (1 + a), "b": EXACT["b"] * (1 + b)}


NAN = {"a": torch.tensor([3.0, math.nan])}


@pytest.mark.parametrize("ours, plain, wrong", [
    (scaled(b=0.00099), scaled(), None), (scaled(b=0.00101), scaled(), "b"),
    (scaled(b=0.02099), scaled(b=0.01), None), (scaled(b=0.02101), scaled(b=0.01), "b"),
    (scaled() | {"a": None}, scaled(), "a"), (scaled() | NAN, scaled(), "a"),
    (scaled() | {"a": torch.tensor([3.0, math.inf])}, scaled(), "a"), (scaled(), scaled() | NAN, "a"),
])  # fmt: skip
def test_twice_plain_s_error_and_the_tolerance(ours, plain, wrong):
    with pytest.raises(ArithmeticError, match=f"{wrong} is wrong") if wrong else contextlib.nullcontext():
        assert accuracy.require(ours, plain, EXACT, 1e-3).worst == "b"


def test_one_wrong_element_among_many():
    exact = {"x": torch.ones(10_000)}
    ours = {"x": exact["x"].clone()}
    ours["x"][17] = 1.05
    assert not accuracy.compare(ours, exact, exact, 1e-3).failed
    assert accuracy.compare(ours, exact, exact, 1e-3, order=math.inf).failed == ["x"]


def test_promoted_tensors_are_more_precise_and_require_gradients_as_before():
    types = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}
    for dtype, promoted in (types | {torch.int64: torch.int64}).items():
        tensor = torch.ones(2, dtype=dtype, requires_grad=dtype == torch.bfloat16)
        (copy,) = accuracy.promoted([tensor])
        assert copy.dtype == promoted and copy.requires_grad == tensor.requires_grad
