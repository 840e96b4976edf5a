"""A kept step is the typical one of its run and opens as a trace; its picture points at what the step shows."""

import json

import matplotlib.pyplot as plt
import pytest

import tiny_llama_v3 as llama
from benchmarks.pages import traces
from profilers.readers import read_dispatches, step_windows

HOST, DEVICE, DRIVER = ("user_annotation", 77), ("kernel", 7), ("cuda_driver", 77)


def event(kind, name, ts, dur):
    category, thread = kind
    return {"ph": "X", "cat": category, "name": name, "pid": thread, "tid": thread, "ts": ts, "dur": dur, "args": {}}


def step_events(start, kernels):
    """A step of 1000 us whose launches take 2 us, one each 20 us; kernels: [(name, us)], back to back if they can."""
    phases = {"forward": 500, "backward": 400, "optimizer": 50}
    begin = [start + sum(list(phases.values())[:index]) for index in range(3)]
    events = [event(HOST, "step", start, 1000), event(("cpu_op", 77), "aten::mm", start + 1, 5)]
    events += [event(HOST, name, at, dur) for (name, dur), at in zip(phases.items(), begin, strict=True)]
    now = start
    for index, (name, us) in enumerate(kernels):
        launch = start + 10 + 20 * index
        events.append(event(DRIVER, "cuLaunchKernelEx", launch, 2))
        now = max(now, launch + 2)
        events.append(event(DEVICE, name, now, us))
        now += us
    return events


FAST = [("rmsnorm_kernel", 3.0)] * 8
SLOW = [("rmsnorm_kernel", 3.0), *[("swiglu_kernel", 100.0)] * 8, ("rmsnorm_kernel", 3.0)]


def trace(kernels):
    """Three steps of which the middle one, by time, is the second."""
    names = [{"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 5.0, "args": {}} for pid in (7, 77, 999)]
    steps = [step_events(1e6 + 5000 * index, kernels) for index in range(3)]
    steps[0][0]["dur"], steps[2][0]["dur"] = 900, 4000
    between = event(DEVICE, "between", 1e6 + 5000 - 20, 10)
    return {"traceEvents": [*names, *sum(steps, []), between]}


@pytest.fixture
def kept(tmp_path):
    """kept(name, kernels): the path of a result as a recording leaves it."""

    def keep(name, kernels):
        (tmp_path / "trace.json").write_text(json.dumps(trace(kernels)))
        events = traces.one_step(tmp_path / "trace.json")
        environment = {"device": "Some GPU", "torch": "2.11", "triton": "3.6"}
        result = {"date": "2030-01-02", "command": "a run", "environment": environment, "traceEvents": events}
        path = tmp_path / "results" / f"{name}_some-gpu.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result))
        return path

    return keep


def test_the_step_of_the_median_is_kept_and_nothing_else(kept):
    path = kept("trace_stage5", FAST)
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["name"] for e in events if e["ph"] == "M"} == {"process_name"}
    assert {e.get("cat") for e in events if e["ph"] == "X"} == {"kernel", "user_annotation", "cuda_driver"}
    assert min(e["ts"] for e in events) == 0 and max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") == 1000
    assert len(read_dispatches(path)) == 8 and step_windows(path)[1] == 1  # the project's readers open it


def texts_of(monkeypatch, path, name):
    """What the picture of a kept step says, in one string."""
    shown = []
    monkeypatch.setattr(plt, "close", lambda figure: shown.append(figure))
    traces.draw(path.parent, path.parent / "picture.png", name)
    (figure,) = shown
    return " ".join(text.get_text() for axes in figure.axes for text in [*axes.texts, axes._left_title, axes.title])


def test_the_pictures_say_what_the_step_shows(kept, monkeypatch):
    text = texts_of(monkeypatch, kept("trace_stage4", SLOW), "trace_stage4")
    assert "one kernel: swiglu_kernel, 99 % of all kernels' time" in text  # 800 of 806 us
    assert "at long kernel 2 of 8" in text  # launched at 10 to 192 us; the second ran from 132 on
    text = texts_of(monkeypatch, kept("trace_stage5", FAST), "trace_stage5")
    assert "a gap: 17 us in the median, beside 3.0 us of a kernel" in text
    assert "a kernel runs for 15 % of the step" in text  # 24 of the 155 us until the last one ends
    text = texts_of(monkeypatch, kept("trace_stage8", FAST), "trace_stage8")
    assert "8 launches for 8 kernels" in text


def test_without_a_recording_the_page_says_how_to_make_one(tmp_path):
    with pytest.raises(llama.UsageError, match="python -m benchmarks.pages.traces"):
        traces.draw(tmp_path, tmp_path / "picture.png", "trace_stage4")


def test_recording_runs_the_script_and_keeps_a_result_each(tmp_path, monkeypatch, capsys):
    commands = []

    def run(command, **options):
        commands.append(command)
        (folder,) = (word for before, word in zip(command, command[1:], strict=False) if before == "--profile")
        with open(f"{folder}/trace.json", "w") as file:
            json.dump(trace(FAST), file)

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
