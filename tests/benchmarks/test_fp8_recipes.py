"""benchmarks.fp8_recipes: each recipe changes what its name says, and is undone afterwards."""

import json

import pytest
import torch

from benchmarks import fp8_recipes
from tiny_llama import fp8


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    folder, before = tmp_path_factory.mktemp("results"), dict(vars(fp8))
    assert fp8_recipes.main(["--sizes", "tiny", "--output-dir", str(folder)]) == 0
    assert vars(fp8) == before
    (path,) = folder.glob("fp8_recipes_*.json")
    return json.loads(path.read_text())["sizes"]["tiny"]


def test_every_recipe_has_errors_of_its_own(errors):
    assert set(errors) == set(fp8_recipes.RECIPES)
    # The model has two layers, the first and the last.
    assert errors.pop("first and last layer in bf16") == errors["bf16"]
    medians = [error["median"] for error in errors.values()]
    assert len(set(medians)) == len(medians) and errors["bf16"]["median"] == min(medians)
    assert all(0 < error["median"] < error["worst"] < 1 for error in errors.values())


def test_fewer_digits_have_larger_errors(errors):
    plain = errors["--fp8"]["median"]
    assert errors["e4m3 gradients"]["median"] < plain < errors["e5m2 inputs and weights"]["median"]


def test_scales_are_those_of_the_name():
    x = torch.tensor([[1.0, 3.0], [96.0, 336.0]])
    rows, exact, half = (
        fp8_recipes.SCALES[name](x, 448.0)
        for name in ("a scale a row", "a scale that is no power of two", "half the scale")
    )
    assert (x / rows).amax(1).tolist() == [448.0, 448.0] and (x / exact).amax() == 448 and half == 0.5
    cut = fp8_recipes.rounded(fp8_recipes.SCALES["half the scale"], x, torch.float8_e4m3fn)
    assert cut.tolist() == [[1.0, 3.0], [96.0, 224.0]]
