"""Results on disk: whole, never overwritten, and refused with a reason when they are damaged."""

import json
import math

import pytest
import torch

import tiny_llama_v3 as llama
from measure import results
from tiny_llama.distributed import World, summarize_processes


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


@pytest.mark.parametrize("private", [
    ["--output-dir", "/home/me/x"], ["--output-dir=/home/my files/x"], ["--save", "/home/me/x"],
])  # fmt: skip
def test_the_header_says_how_to_repeat_it_without_the_private_folder(private):
    header = results.header("steps", torch.device("cpu"), ["--rows", "triton graph", *private, "--tiny"])
    assert header["command"] == "python -m benchmarks.steps --rows 'triton graph' --tiny"
    assert header["benchmark"] == "steps" and header["environment"]["torch"]


@pytest.mark.parametrize("text, reason", [
    (None, "is not there: name a result or a folder of results"),
    ("{", "cannot be read"), ("[" * 10**5, "cannot be read"), ("[1]", "is no result"), ('{"a": {}}', "has no speed"),
    *((f'{{"a": {{{field}}}}}', "which cannot be: measure again") for field in (
        '"ms": null', '"batch_ms": "1"', '"phase_ms": {"x": [0]}', '"us": 1e999',
        '"loss": -1', '"losses": [1, NaN]', f'"loss": 1{400 * "0"}')),
])  # fmt: skip
def test_a_missing_or_damaged_result_is_named(tmp_path, text, reason):
    path = tmp_path / "steps.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(llama.UsageError, match=rf"^{path}.* ?{reason}.*$"):
        results.read_result(path)["a"]["speed"]


@pytest.mark.parametrize("exposed_ms", ["there is no GPU", None, 0.0, 2.0, 9.5])
@pytest.mark.parametrize("memory", [None, 7.0])
def test_what_processes_did_together_can_be_read(tmp_path, exposed_ms, memory):
    """All communication may be hidden, or in a profiled step, which is slower, take longer than a step of 9 ms."""
    is_known = isinstance(exposed_ms, float)
    kernels = exposed_ms if isinstance(exposed_ms, str) else {"kernels": 9, "exposed_communication_ms": exposed_ms}
    summary = dict(batch_ms={"p50": 9.0}, tokens_per_second=3.0, peak_memory_mib=memory, kernels=kernels, energy=None)
    world = World(0, 2)
    world.gather = lambda own: [own, own]
    results.write_json(tmp_path / "run.json", {"world": summarize_processes(world, summary)})
    world = results.read_result(tmp_path / "run.json")["world"]
    assert world["exposed_communication_ms"] == (exposed_ms if is_known else None)
    assert world["slowest"] == ({"rank": 0, "behind_ms": 0.0} if is_known else None)
    assert world["processes"][1]["own_ms"] == (9.0 - exposed_ms if is_known else None)


@pytest.mark.parametrize("field", ['"own_ms": "1"', '"behind_ms": 1e999', '"exposed_communication_ms": NaN'])
def test_a_difference_of_times_that_cannot_be(tmp_path, field):
    path = tmp_path / "run.json"
    path.write_text(f'{{"a": {{{field}}}}}')
    with pytest.raises(llama.UsageError, match=f"^{path} has .*, which cannot be: measure again$"):
        results.read_result(path)
