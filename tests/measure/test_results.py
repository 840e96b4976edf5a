"""Results on disk: whole, never overwritten, and refused with a reason when they are damaged."""

import json
import math

import pytest

import tiny_llama_v3 as llama
from measure import results


def test_results_are_whole_and_never_overwritten(tmp_path):
    result = {"benchmark": "steps", "environment": {"device": "Some GPU (80 GB)"}, "number": 1}
    files = [results.ResultFile(tmp_path, result) for _ in range(2)]
    for file in files:
        file.stem = files[0].stem  # the clock may have gone on
        file.save(result)
    files[1].save(result | {"number": 2})
    with pytest.raises(TypeError):
        files[1].save({"number": object()})
    assert [json.loads(file.path.read_text())["number"] for file in files] == [1, 2]
    assert len(list(tmp_path.glob("steps_some-gpu-80-gb_2*.json"))) == len(list(tmp_path.iterdir())) == 2


def test_json_has_no_nan(tmp_path):
    path = tmp_path / "new" / "result.json"
    results.write_json(path, {"loss": [1.0, math.nan, math.inf, -math.inf]})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {"loss": [1.0, None, None, None]}


@pytest.mark.parametrize("private", [["--output-dir", "/home/me/x"], ["--output-dir=/home/my files/x"]])
def test_the_header_says_how_to_repeat_it_without_the_private_folder(private):
    header = results.header("steps", llama.get_device("cpu"), ["--rows", "triton graph", *private, "--tiny"])
    assert header["command"] == "python -m benchmarks.steps --rows 'triton graph' --tiny"
    assert header["benchmark"] == "steps" and header["environment"]["torch"]


@pytest.mark.parametrize("text, reason", [
    ("{", "cannot be read"), ("[" * 10**5, "cannot be read"), ("[1]", "is no result"), ('{"a": {}}', "has no speed"),
    *((f'{{"a": {{{field}}}}}', "which cannot be: measure again") for field in (
        '"ms": null', '"batch_ms": "1"', '"phase_ms": {"x": [0]}', '"us": 1e999',
        '"loss": -1', '"losses": [1, NaN]', f'"loss": 1{400 * "0"}')),
])  # fmt: skip
def test_a_damaged_result_is_named(tmp_path, text, reason):
    path = tmp_path / "steps.json"
    path.write_text(text)
    with pytest.raises(llama.UsageError, match=rf"^{path}.* ?{reason}.*$"):
        results.read_result(path)["a"]["speed"]
