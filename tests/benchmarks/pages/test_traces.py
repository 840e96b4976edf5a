"""A kept step is the typical one of its run and opens as a trace."""

import json
import re
import shutil
from pathlib import Path

import pytest

import tiny_llama_v3 as llama
from benchmarks.pages import traces
from profilers.readers import read_processes

TRACES = Path(__file__).parent


@pytest.fixture
def kept(tmp_path):
    """Return a function that writes a result as a recording leaves it, of a trace beside this file.

    Both traces have three steps, of which the second is the median, 1000 us long, and a kernel between two steps. A
    launch of 2 us begins each 20 us from 10 us on; kernels run at once or when the one before ends. In fast_trace.json
    eight take 3 us each; in slow_trace.json eight take 100 us, and the first and the last 3 us.
    """

    def keep(name, trace):
        events = traces.one_step(TRACES / trace)
        environment = {"device": "Some GPU", "torch": "2.11", "triton": "3.6"}
        result = {"date": "2030-01-02", "command": "a run", "environment": environment, "traceEvents": events}
        path = tmp_path / "results" / f"{name}_some-gpu.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result))
        return path

    return keep


def test_the_step_of_the_median_is_kept_and_nothing_else(kept):
    path = kept("trace_stage5", "fast_trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["name"] for e in events if e["ph"] == "M"} == {"process_name"}
    assert {e.get("cat") for e in events if e["ph"] == "X"} == {"kernel", "user_annotation", "cuda_driver"}
    assert min(e["ts"] for e in events) == 0 and max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") == 1000
    (process,) = read_processes(path)  # the project's readers open it
    assert len(process.dispatches) == 8 and process.steps == 1


def test_what_ends_after_the_step_is_left_out(tmp_path):
    path, trace = tmp_path / "trace.json", json.loads((TRACES / "fast_trace.json").read_text())
    _, end = traces.typical_step(traces.read_ranges(TRACES / "fast_trace.json"))  # in ns
    kernel = next(event for event in trace["traceEvents"] if event.get("cat") == "kernel")
    trace["traceEvents"] += [kernel | {"name": f"{us} us", "ts": end / 1e3 - 2, "dur": us} for us in (2, 3)]
    path.write_text(json.dumps(trace))
    names = {event["name"] for event in traces.one_step(path)}
    assert "2 us" in names and "3 us" not in names


@pytest.mark.parametrize("trace, issued, title", [
    # Launched from 10 us on, each 20 us, for 2 us; the kernels run for 24 of 155 us, and for 806 of 835 us.
    ("fast_trace.json", 0.152, "8 launches until 0.152 ms .*, 8 kernels until 0.155 ms, which run for 15 %"),
    ("slow_trace.json", 0.192, "10 launches until 0.192 ms .*, 10 kernels until 0.835 ms, which run for 97 %"),
])  # fmt: skip
def test_a_picture_says_what_the_step_shows(kept, monkeypatch, trace, issued, title):
    shown = []
    monkeypatch.setattr(traces, "save_png", lambda figure, path, dpi: shown.append(figure))
    path = kept("trace_stage4", trace)
    traces.draw(path.parent, None, "trace_stage4")
    whole, part = shown[0].axes
    assert re.search(title, whole.get_title("left")) and whole.lines[0].get_xdata()[0] == pytest.approx(issued)
    assert part.get_xlim()[0] > whole.get_xlim()[0] and part.get_xlim()[1] <= whole.get_xlim()[1]


def test_twelve_kernels_are_drawn_apart(kept, monkeypatch):
    shown = []
    monkeypatch.setattr(traces, "save_png", lambda figure, path, dpi: shown.append(figure))
    path = kept("trace_stage4", "fast_trace.json")
    result = json.loads(path.read_text())
    kernels = [event for event in result["traceEvents"] if event.get("cat") == "kernel"]
    for number in (1, 2, 3):  # four times eight kernels, of 3 us each
        result["traceEvents"] += [kernel | {"ts": kernel["ts"] + 200 * number} for kernel in kernels]
    path.write_text(json.dumps(result))
    traces.draw(path.parent, None, "trace_stage4")
    starts = sorted(event["ts"] for event in result["traceEvents"] if event.get("cat") == "kernel")
    # From the end of the first quarter on: the ninth to the twentieth.
    assert shown[0].axes[1].get_xlim() == pytest.approx((starts[8] / 1e3, (starts[19] + 3) / 1e3))


def test_without_a_recording_the_page_says_how_to_make_one(tmp_path):
    with pytest.raises(llama.UsageError, match="python -m benchmarks.pages.traces"):
        traces.draw(tmp_path, tmp_path / "picture.png", "trace_stage4")


def test_recording_runs_the_script_and_keeps_a_result_each(tmp_path, monkeypatch, capsys):
    commands = []

    def run(command, **options):
        commands.append(command)
        (folder,) = (word for before, word in zip(command, command[1:], strict=False) if before == "--profile")
        shutil.copy(TRACES / "fast_trace.json", f"{folder}/trace.json")

    device = llama.Device("cuda", "Some GPU", "sm_90", num_sms=1, warp_size=32)
    monkeypatch.setattr(traces.subprocess, "run", run)
    monkeypatch.setattr(llama, "select_device", lambda name: device)
    monkeypatch.setattr(traces, "header", lambda *rest: {"environment": {"device": device.name}})
    assert traces.main(["--output-dir", str(tmp_path)]) == 0
    results = {json.loads(path.read_text())["benchmark"]: path for path in tmp_path.glob("*.json")}
    assert results.keys() == traces.RECORDED.keys() == traces.PICTURES.keys()
    for command in commands:  # the script understands what it is asked for
        assert llama.parse_config(command[2:], command[1]).seq_len == 128


@pytest.mark.skipif(llama.torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_record(capsys):
    assert traces.main([]) == 2 and "there is no GPU" in capsys.readouterr().err
