"""Results on disk: whole, never overwritten, and refused with a reason when they are damaged."""

import json
import math
import os
from unittest.mock import Mock

import pytest

import tiny_llama_v3 as llama
from measure import results


@pytest.mark.parametrize("hard_links", [True, False])
def test_results_are_whole_and_never_overwritten(tmp_path, monkeypatch, hard_links):
    if not hard_links:
        monkeypatch.setattr("os.link", Mock(side_effect=OSError))
    result = {"benchmark": "steps", "environment": {"device": "Some GPU (80 GB)"}, "number": 1}
    precious, stem = tmp_path.with_suffix(".precious"), "steps_some-gpu-80-gb_20260101_000000"
    precious.write_text("mine")
    (tmp_path / f".{stem}.{os.getpid()}.tmp").symlink_to(precious)
    (tmp_path / f"{stem}.json").symlink_to("nowhere")
    files = [results.ResultFile(tmp_path, result) for _ in range(2)]
    for file in files:
        file.stem = stem
        file.save(result)
    files[1].save(result | {"number": 2})
    with pytest.raises(TypeError):
        files[1].save({"number": object()})
    assert [json.loads(file.path.read_text())["number"] for file in files] == [1, 2]
    written = sorted(path.name for path in tmp_path.iterdir() if not path.is_symlink())
    assert written == [f"{stem}_1.json", f"{stem}_2.json"] and precious.read_text() == "mine"


def test_a_replaced_file_is_whole_or_as_before(tmp_path):
    path = tmp_path / "new" / "result.json"
    results.write_json(path, {"loss": [1.0, math.nan, math.inf, -math.inf]})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {"loss": [1.0, None, None, None]}
    for broken, error in (({"number": object()}, TypeError), ({"number": 10**5000}, ValueError)):
        with pytest.raises(error):
            results.write_json(path, broken)
    assert [p.name for p in path.parent.iterdir()] == ["result.json"] and "Infinity" not in path.read_text()
    results.write_json(path, {"number": 2})
    assert json.loads(path.read_text()) == {"number": 2}


def test_the_header_says_how_to_repeat_it_without_the_private_folder():
    arguments = ["--rows", "triton graph", "--output-dir", "/home/me/x"]
    header = results.header("steps", llama.get_device("cpu"), arguments)
    assert header["command"] == "python -m benchmarks.steps --rows 'triton graph'"
    assert header["benchmark"] == "steps" and header["environment"]["torch"]


@pytest.mark.parametrize("text, reason", [
    ("{", "cannot be read"), ("[" * 10**5, "cannot be read"), ("[1]", "is no result"), ('{"a": {}}', "has no speed"),
])  # fmt: skip
def test_a_damaged_result_is_named(tmp_path, text, reason):
    path = tmp_path / "steps.json"
    path.write_text(text)
    with pytest.raises(llama.UsageError, match=reason) as error:
        results.read_result(path)["a"]["speed"]
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("error, words", [
    (KeyError("us"), "--results x: a result of gpt is damaged .KeyError.'us'.*: measure again"),
    (llama.UsageError("x has no us"), "^x has no us$"),
])  # fmt: skip
def test_what_a_damaged_result_raises_is_told_once(error, words):
    with pytest.raises(llama.UsageError, match=words), results.damage_reported("x", "gpt"):
        raise error


def test_an_error_in_one_line():
    assert results.describe(results.Unavailable("needs a GPU")) == "needs a GPU"
    assert results.describe(RuntimeError("no room\nfor this")) == "RuntimeError: no room"
    assert results.describe(KeyError()) == "KeyError"
