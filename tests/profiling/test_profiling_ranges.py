"""The ranges that name the step, its phases and its layers in a trace: there for a profiler, absent in a normal run."""

import functools
import json
import re
from decimal import Decimal

import pytest
import torch

import tiny_llama_v3 as llama

TINY = (
    "--hidden-dim 32 --num-layers 2 --num-heads 2 --ffn-dim 32 --vocab-size 37 --batch-size 1 --seq-len 16 "
    "--num-steps 2 --warmup-steps 1"
).split()
ONE_STEP = (
    "(step (forward (layers.0 forward) (layers.1 forward)) (backward (layers.1 backward) (layers.0 backward)) "
    "(optimizer))"
)
TWO_STEPS = " ".join([ONE_STEP] * 2)
OUTERMOST = "(step (forward) (backward) (optimizer))"


@pytest.fixture
def run(tmp_path, capsys):
    def run(*flags):
        assert llama.main([*TINY, "--output-dir", str(tmp_path), *flags], "tiny_llama_v3.py") == 0
        capsys.readouterr()
        path = max(tmp_path.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        return [step["loss"] for step in json.loads(path.read_text())["steps"]]

    return run


@pytest.fixture
def markers(monkeypatch):
    """What reaches NVTX, as nested parentheses."""
    calls = []
    if torch.cuda.is_available():
        torch.cuda.init()
    else:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: calls.append(f"({name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append(")"))
    monkeypatch.setattr(torch.cuda.nvtx, "mark", calls.append)
    for name in ("LD_PRELOAD", "ROCP_TOOL_LIBRARIES", "NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH"):
        monkeypatch.delenv(name, raising=False)
    return lambda: " ".join(calls).replace(" )", ")")


def nested(events):
    """Ranges of a Chrome trace in the notation of ONE_STEP; fails if two overlap without one holding the other."""
    text, ends = "", []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
            text += ")"
        end = event["ts"] + event["dur"]
        assert not ends or end <= ends[-1], f"{event['name']} leaves the range around it"
        text += f" ({event['name']}"
        ends.append(end)
    return (text + ")" * len(ends)).strip()


def read_trace(folder):
    text = (folder / "trace.json").read_text()
    return json.loads(text, parse_float=Decimal)["traceEvents"]  # of a float's 53 bits a time of weeks, in ns, takes 52


ROUNDING = Decimal("0.001")  # us: a trace is written in ns


def overlapping(events):
    """Pairs of complete slices of one thread that overlap although neither holds the other: viewers drop them."""
    pairs, around = [], {}
    for event in sorted((e for e in events if e.get("ph") == "X"), key=lambda event: (event["ts"], -event["dur"])):
        end, ends = event["ts"] + event["dur"], around.setdefault((event["pid"], event["tid"]), [])
        while ends and ends[-1][0] <= event["ts"] + ROUNDING:
            ends.pop()
        if ends and end > ends[-1][0] + ROUNDING:
            pairs.append((ends[-1][1], event["name"]))
        ends.append((end, event["name"]))
    return pairs


def test_overlapping_slices_are_found():
    def slices(*rows):
        return [dict(ph="X", pid=1, tid=tid, name=name, ts=ts, dur=end - ts) for name, tid, ts, end in rows]

    nested = slices(("a", 1, 0, 10), ("b", 1, 0, 4), ("c", 1, 4, 10 + ROUNDING), ("d", 2, 5, 15), ("e", 1, 10, 11))
    assert overlapping(nested) == []
    assert overlapping([*nested, *slices(("f", 2, 14, 15 + 2 * ROUNDING))]) == [("d", "f")]
    assert overlapping(slices(("a", 1, 0, 9), ("b", 1, 1, 2), ("c", 1, 3, 10))) == [("a", "c")]


@pytest.mark.parametrize("impl", ["torch", "sdpa"])
def test_trace_names_step_phases_and_layers(run, tmp_path, impl):
    run("--device", "cpu", "--impl", impl, "--profile", str(tmp_path / "profile"))
    trace = read_trace(tmp_path / "profile")
    wanted = ("step", "forward", "backward", "optimizer", "layers.")
    ranges = [e for e in trace if e.get("cat") == "user_annotation" and e["name"].startswith(wanted)]
    assert nested(ranges) == " ".join([ONE_STEP] * 3)
    assert overlapping(trace) == []


def test_layers_of_the_backward_pass_have_a_row_of_their_own(run, tmp_path):
    """Each begins in one of autograd's nodes and ends in another, which no slice of that thread may do."""
    run("--device", "cpu", "--impl", "torch", "--profile", str(tmp_path / "profile"))
    trace = read_trace(tmp_path / "profile")
    rows = {(e["pid"], e["tid"]) for e in trace if re.fullmatch(r"layers\.\d+ backward", e["name"])}
    (row,) = rows
    assert [e["args"]["name"] for e in trace if e["name"] == "thread_name" and (e["pid"], e["tid"]) == row] == [
        "layers, backward"
    ]
    assert {e["name"][-8:] for e in trace if e.get("ph") == "X" and (e["pid"], e["tid"]) == row} == {"backward"}


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [[], ["--graph"], ["--impl", "torch"]])
def test_slices_of_the_gpu_nest_too(run, tmp_path, flags):
    """Kernels, launches, and the copies of the ranges that the profiler draws above the kernels."""
    run("--device", "cuda", *flags, "--profile", str(tmp_path / "profile"))
    trace = read_trace(tmp_path / "profile")
    assert {"kernel", "gpu_user_annotation"} <= {event.get("cat") for event in trace}
    assert overlapping(trace) == []


@pytest.mark.parametrize("variable", ["ROCP_TOOL_LIBRARIES", "NV_NSIGHT_INJECTION_PORT_BASE", "LD_PRELOAD"])
@pytest.mark.parametrize("timing, expected", [("phases", TWO_STEPS), ("step", f"(steps {TWO_STEPS})")])
def test_an_attached_profiler_sees_the_measured_steps(run, markers, monkeypatch, variable, timing, expected):
    quiet = run("--device", "cpu", "--impl", "torch", "--timing", timing)
    assert markers() == ""
    monkeypatch.setenv(variable, "/opt/rocm/lib/librocprofiler-sdk-tool.so")
    assert run("--device", "cpu", "--impl", "torch", "--timing", timing) == quiet
    assert markers() == expected


def test_the_window_of_the_steps_holds_all_their_work_and_no_other(run, markers, monkeypatch):
    """A range "step" is over before its kernels have run; the diagnostics after the last one are no part of it."""
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "tool.so")
    monkeypatch.setattr(llama, "show_layers", lambda model: None)

    def noted(name, original, *arguments):
        torch.cuda.nvtx.mark(name)
        return original(*arguments)

    for name in ("synchronize", "gradient_norm"):
        monkeypatch.setattr(llama, name, functools.partial(noted, name, getattr(llama, name)))
    run("--device", "cpu", "--impl", "torch", "--timing", "step")
    before, window, after = re.split(r" ?(\(steps .*\)) ?", markers())
    assert before.endswith("synchronize") and after.split().count("gradient_norm") == 1
    assert window == f"(steps {OUTERMOST} {OUTERMOST} synchronize)"


def test_another_preloaded_library_is_no_profiler(run, markers, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so")
    run("--device", "cpu", "--impl", "torch")
    assert markers() == ""


@pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")
@pytest.mark.parametrize("flags, expected", [([], ONE_STEP), (["--severed-autograd"], None)])
def test_ranges_of_the_triton_kernels(run, markers, monkeypatch, flags, expected):
    flags = [*flags, "--num-steps", "1"]
    quiet = run(*flags)
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "tool.so")
    assert run(*flags) == quiet
    # Without autograd's history no layer has a backward pass.
    assert markers() == (expected or ONE_STEP.replace(" (layers.1 backward) (layers.0 backward)", ""))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "timing, expected",
    [("phases", f"{OUTERMOST} {OUTERMOST}"), ("step", "(steps (step (graph)) (step (graph)))")],
)
def test_a_captured_step_keeps_its_outer_ranges(run, markers, monkeypatch, timing, expected):
    quiet = run("--graph", "--timing", timing)
    assert markers() == ""
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "tool.so")
    assert run("--graph", "--timing", timing) == quiet
    assert markers() == expected
