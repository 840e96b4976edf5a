"""A kept step is the typical one of its run and opens as a trace."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import tiny_llama_v3 as llama
from benchmarks.pages import traces
from profilers.readers import read_processes

TRACES = Path(__file__).parent


@pytest.fixture
def kept(tmp_path):
    """kept(trace): a result as a recording leaves it, of a trace beside this file.

    Both traces have three steps, of which the second is the median, 1000 us long, and a kernel between two steps. A
    launch of 2 us begins each 20 us from 10 us on; kernels run at once or when the one before ends. In fast_trace.json
    eight take 3 us each; in slow_trace.json eight take 100 us, and the first and the last 3 us. Here a kernel also
    begins in the step, and ends after it.
    """

    def keep(trace):
        path, content = tmp_path / "trace.json", json.loads((TRACES / trace).read_text())
        _, end = traces.typical_step(traces.read_ranges(TRACES / trace))  # in ns
        kernel = next(event for event in content["traceEvents"] if event.get("cat") == "kernel")
        content["traceEvents"].append(kernel | {"ts": end / 1e3 - 2, "dur": 3})
        path.write_text(json.dumps(content))
        environment = {"device": "Some GPU", "torch": "2.11", "triton": "3.6"}
        result = {"date": "2030-01-02", "command": "a run", "environment": environment}
        path = tmp_path / "trace_stage4_some-gpu.json"
        path.write_text(json.dumps(result | {"traceEvents": traces.one_step(tmp_path / "trace.json")}))
        return path

    return keep


@pytest.mark.parametrize("ts, dur", [(370949316.174, 21695.077), (110251580969.639, 1369.748)])
def test_a_step_keeps_its_own_range_however_its_times_are_rounded(tmp_path, ts, dur):
    step = {"ph": "X", "cat": "user_annotation", "name": "step", "pid": 1, "tid": 1, "ts": ts, "dur": dur}
    (path := tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [step]}))
    assert len(traces.one_step(path)) == 1


def test_the_step_of_the_median_is_kept_and_nothing_else(kept):
    path = kept("fast_trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["name"] for e in events if e["ph"] == "M"} == {"process_name"}
    assert {e.get("cat") for e in events if e["ph"] == "X"} == {"kernel", "user_annotation", "cuda_driver"}
    assert min(e["ts"] for e in events) == 0 and max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") == 1000
    (process,) = read_processes(path)  # the project's readers open it
    assert len(process.dispatches) == 8 and process.steps == 1


def drawn(path, monkeypatch):
    """Return the panels of the picture of a result."""
    shown = []
    monkeypatch.setattr(traces, "save_png", lambda figure, path, dpi: shown.append(figure))
    traces.draw(path.parent, None, "trace_stage4")
    return shown[0].axes


@pytest.mark.parametrize("trace, issued, title", [
    # Launched from 10 us on, each 20 us, for 2 us; the kernels run for 24 of 155 us, and for 806 of 835 us.
    ("fast_trace.json", 0.152, "8 launches until 0.152 ms .*, 8 kernels until\\n0.155 ms, which run for 15 %"),
    ("slow_trace.json", 0.192, "10 launches until 0.192 ms .*, 10 kernels until\\n0.835 ms, which run for 97 %"),
])  # fmt: skip
def test_a_picture_says_what_the_step_shows(kept, monkeypatch, trace, issued, title):
    whole, _ = drawn(kept(trace), monkeypatch)
    assert re.search(title, whole.get_title("left")) and whole.lines[0].get_xdata()[0] == pytest.approx(issued)


def test_without_a_recording_the_page_says_how_to_make_one(tmp_path):
    with pytest.raises(llama.UsageError, match="python -m benchmarks.pages.traces"):
        traces.draw(tmp_path, tmp_path / "picture.png", "trace_stage4")


def test_recording_runs_the_script_and_keeps_a_result_each(tmp_path, monkeypatch, capsys):
    def run(command, **options):
        # The script understands what it is asked for.
        config = llama.parse_config(command[2:], command[1])
        assert config.seq_len == 128
        shutil.copy(TRACES / "fast_trace.json", f"{config.profile}/trace.json")

    monkeypatch.setattr(traces.subprocess, "run", run)
    monkeypatch.setattr(llama, "select_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(traces, "header", lambda *rest: {"environment": {"device": "Some GPU"}})
    assert traces.main(["--output-dir", str(tmp_path)]) == 0
    kept = {json.loads(path.read_text())["benchmark"] for path in tmp_path.glob("*.json")}
    assert kept == traces.RECORDED.keys() == traces.PICTURES.keys()
    monkeypatch.setattr(llama, "select_device", lambda name: torch.device("cpu"))
    assert traces.main([]) == 2 and "there is no GPU" in capsys.readouterr().err
