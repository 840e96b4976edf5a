"""The rule by which results are let in: twice plain PyTorch's error and a tolerance, nothing missing, no NaN."""

import contextlib
import math

import pytest
import torch

from measure import accuracy

EXACT = {"a": torch.tensor([3.0, 4.0]).double(), "b": torch.ones(4).double()}
TOLERANCE = 1e-3


def scaled(a=0.0, b=0.0):
    """The exact results, each off by so much of itself."""
    return {"a": EXACT["a"] * (1 + a), "b": EXACT["b"] * (1 + b)}


@pytest.mark.parametrize("plain_error", [0.0, 0.01])
@pytest.mark.parametrize("share, passes", [(0.99, True), (1.01, False)])
def test_twice_plain_s_error_and_the_tolerance(plain_error, share, passes):
    ours = scaled(b=share * (2 * plain_error + TOLERANCE))
    verdict = accuracy.compare(ours, scaled(b=plain_error), EXACT, TOLERANCE)
    with contextlib.nullcontext() if passes else pytest.raises(ArithmeticError, match="b is wrong"):
        assert accuracy.require(ours, scaled(b=plain_error), EXACT, TOLERANCE) == verdict
    assert verdict.failed == ([] if passes else ["b"])
    assert verdict.worst == "b" and verdict.allowed["b"] == pytest.approx(2 * plain_error + TOLERANCE)


@pytest.mark.parametrize("spoilt", [None, torch.tensor([3.0, math.nan]), torch.tensor([3.0, math.inf])])
def test_what_is_missing_or_no_number_fails(spoilt):
    verdict = accuracy.compare(scaled() | {"a": spoilt}, scaled(), EXACT, TOLERANCE)
    assert verdict.failed == ["a"] == [verdict.worst]
    with pytest.raises(ArithmeticError, match="a is wrong"):
        accuracy.require(scaled() | {"a": spoilt}, scaled(), EXACT, TOLERANCE)


def test_plain_pytorch_that_is_no_number_lets_nothing_in():
    spoilt = scaled() | {"a": torch.tensor([math.nan, 4.0])}
    assert accuracy.compare(scaled(), spoilt, EXACT, TOLERANCE).failed == ["a"]


def test_one_wrong_element_among_many():
    exact = {"x": torch.ones(10_000)}
    ours = {"x": exact["x"].clone()}
    ours["x"][17] = 1.05
    assert not accuracy.compare(ours, exact, exact, TOLERANCE).failed
    assert accuracy.compare(ours, exact, exact, TOLERANCE, order=math.inf).failed == ["x"]


def test_promoted_tensors_are_more_precise_and_require_gradients_as_before():
    tensors = [torch.ones(2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64)]
    tensors[1].requires_grad_()
    promoted = accuracy.promoted(tensors)
    assert [t.dtype for t in promoted] == [torch.float64, torch.float32, torch.float32, torch.int64]
    assert [t.requires_grad for t in promoted] == [False, True, False, False]
