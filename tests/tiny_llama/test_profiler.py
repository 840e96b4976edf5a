"""Profiles: the ranges that name the step, its phases and its layers, the kernels of a step, and the GPU's memory."""

import itertools
import json
import pickle
import re
import sys
from decimal import Decimal
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

import tiny_llama_v3 as llama
from tiny_llama import profiler
from tiny_llama.kernel_table import kernel_table

LAYERS = "(forward (layers.0 forward) (layers.1 forward)) (backward (layers.1 backward) (layers.0 backward))"
ONE_STEP = f"(step {LAYERS} (optimizer))"
NO_BACKWARD = ONE_STEP.replace(" (layers.1 backward) (layers.0 backward)", "")
TWO_STEPS = f"{NO_BACKWARD} {NO_BACKWARD}"
OUTERMOST = "(step (forward) (backward) (optimizer))"
needs_triton = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")


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


ROUNDING = Decimal("0.001")  # us: a trace is written in ns


def nested(events):
    """Slices of a row in the notation of ONE_STEP; fails if two overlap without one holding the other."""
    text, ends = "", []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while ends and ends[-1] <= event["ts"] + ROUNDING:
            ends.pop()
            text += ")"
        ends.append(event["ts"] + event["dur"])
        assert ends[-1] <= min(ends) + ROUNDING, f"{event['name']} leaves the slice around it"
        text += f" ({event['name']}"
    return (text + ")" * len(ends)).strip()


def read_trace(folder):
    """The events of a trace, whose rows must nest: viewers drop slices that do not."""
    # Of a float's 53 bits a time of weeks, in ns, takes 52.
    trace = json.loads((folder / "trace.json").read_text(), parse_float=Decimal)["traceEvents"]
    slices = sorted((e for e in trace if e.get("ph") == "X"), key=lambda e: (str(e["pid"]), str(e["tid"])))
    for _, row in itertools.groupby(slices, lambda e: (e["pid"], e["tid"])):
        nested(row)
    return trace


TOOL = "/opt/rocm/lib/librocprofiler-sdk-tool.so"


@pytest.mark.parametrize("impl, attached", [
    ("torch", ""), ("torch", TOOL), pytest.param("triton", "", marks=needs_triton),
])  # fmt: skip
def test_trace_names_step_phases_and_layers(run, tmp_path, monkeypatch, impl, attached):
    """Once. In a group the backward of a layer is within one of autograd's nodes."""
    monkeypatch.setenv("ROCP_TOOL_LIBRARIES", attached)
    monkeypatch.setitem(sys.modules, "pandas", None)  # as where only torch, triton and numpy are installed
    run("--impl", impl, "--device", "auto", "--profile", "profile")
    ranges = [e for e in read_trace(tmp_path / "profile") if e.get("cat") == "user_annotation"]
    ranges = [e for e in ranges if e["name"].startswith(("step", "forward", "backward", "optimizer", "layers."))]
    assert nested(ranges) == " ".join([ONE_STEP if impl == "triton" else NO_BACKWARD] * 3)


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [[], ["--graph"], ["--impl", "torch"]])
def test_a_profile_of_a_gpu(run, tmp_path, flags):
    """Kernels, launches, and the copies of the ranges that the profiler draws above the kernels nest too."""
    run("--impl", "triton", "--device", "cuda", *flags, "--profile", "profile")
    assert {"kernel", "gpu_user_annotation"} <= {event.get("cat") for event in read_trace(tmp_path / "profile")}
    snapshot = pickle.loads((tmp_path / "profile" / "memory_snapshot.pickle").read_bytes())
    # A replayed graph allocates nothing.
    assert flags == ["--graph"] or any(event["action"] == "alloc" for event in sum(snapshot["device_traces"], []))


COLUMNS = ("Calls", "TotalDurationNs", "AverageNs", "Percentage", "MinNs", "MaxNs", "StdDev")


@pytest.mark.parametrize("variable, value, timing, expected", [
    ("ROCP_TOOL_LIBRARIES", TOOL, "phases", TWO_STEPS), ("NV_NSIGHT_INJECTION_PORT_BASE", "1", "phases", TWO_STEPS),
    ("LD_PRELOAD", TOOL, "step", f"(steps {TWO_STEPS})"), ("LD_PRELOAD", "/usr/lib/libjemalloc.so", "phases", ""),
])  # fmt: skip
def test_an_attached_profiler_sees_the_measured_steps(run, markers, monkeypatch, variable, value, timing, expected):
    quiet = run("--timing", timing).losses
    assert markers() == ""
    monkeypatch.setenv(variable, value)
    assert run("--timing", timing).losses == quiet
    assert markers() == expected


def test_a_run_within_torch_profiler_shows_its_measured_steps(run, markers):
    """As where a whole program is profiled; and does not ask for a second profiler."""
    with torch.autograd.profiler.profile():
        run()
        assert profiler.attached_profiler() == "torch.profiler"
    assert markers() == TWO_STEPS


def note(monkeypatch, owner, name):
    """Let a function leave a mark of its name."""
    called = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *arguments: torch.cuda.nvtx.mark(name) or called(*arguments))


def test_a_profiled_step_lasts_until_its_kernels_have_ended(run, markers, monkeypatch):
    note(monkeypatch, llama.TrainStep, "synchronize")
    run("--profile", "profile")
    assert markers().count("(optimizer) synchronize)") == profiler.PROFILED_STEPS


def test_the_window_of_the_steps_holds_all_their_work_and_no_other(run, markers, monkeypatch):
    """A range "step" is over before its kernels have run; the diagnostics after the last one are no part of it."""
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "tool.so")
    note(monkeypatch, llama.TrainStep, "synchronize")
    note(monkeypatch, llama, "gradient_norm")
    run("--timing", "step")
    before, window, after = re.split(r" ?(\(steps .*\)) ?", markers())
    assert before.endswith("synchronize") and after.split().count("gradient_norm") == 1
    assert window == f"(steps {TWO_STEPS} synchronize)"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "timing, expected", [("phases", f"{OUTERMOST} {OUTERMOST}"), ("step", "(steps (step (graph)) (step (graph)))")]
)
def test_a_captured_step_keeps_its_outer_ranges(run, markers, monkeypatch, timing, expected):
    flags = ["--impl", "triton", "--device", "cuda", "--graph", "--timing", timing]
    quiet = run(*flags).losses
    assert markers() == ""
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "tool.so")
    assert run(*flags).losses == quiet
    assert markers() == expected


def test_the_kernel_table_by_hand():
    """Of a CPU's operators and Inductor's code; what took no time, and what is neither, is not in it."""
    times = dict(aten__mm=(3, 1), aten__add=(2.5,), aten__view=(0,), step=(9,), graph_0_cpp_fused_add_1=(1.5,))
    events = [(name.replace("__", "::"), us) for name, calls in times.items() for us in calls]
    events = [SimpleNamespace(name=name, self_cpu_time_total=us) for name, us in events]
    table = kernel_table(events, on_gpu=False)
    assert table == [
        ["Name", *COLUMNS],
        ["aten::mm", 2, 4000, 2000, 50, 1000, 3000, 1414.213562],
        ["aten::add", 1, 2500, 2500, 31.25, 2500, 2500, 0],
        ["graph_0_cpp_fused_add_1", 1, 1500, 1500, 18.75, 1500, 1500, 0],
    ]


def test_exposed_communication_is_what_no_work_covers():
    assert profiler.covered([]) == 0
    assert profiler.covered([(0, 2), (1, 3), (5, 9), (6, 7), (8, 10)]) == 8  # overlapping, and within another


@pytest.mark.parametrize("processes, batch_ms, exposed_ms", [(1, 9, "no such key"), (2, 9, 0.5), (2, 3, None)])
def test_what_a_step_launched_is_counted(monkeypatch, processes, batch_ms, exposed_ms):
    """Messages that no work hides are told only if the profiled step, of 4 ms, was not slowed down."""

    def event(name, start=0, end=0, type=DeviceType.CUDA):
        times = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, device_type=type, is_user_annotation=name == "step", time_range=times)

    def profiled(step, steps):
        assert steps == processes
        calls = "cudaLaunchKernel", "cuLaunchKernelEx", "hipModuleLaunchKernel", "cudaMemcpyAsync", "aten::mm"
        events = [event(name, type=DeviceType.CPU) for name in calls] * steps
        for at in range(0, 10_000 * steps, 10_000):
            received = 4000 if at else 6000  # the first step waits for the other process's profiler
            messages = ("nccl:reduce_scatter", 1000, 3700), ("Memcpy PtoP", 3600, received)
            spans = ("matmul", 0, 3500), ("norm", 2000, 3000), ("Memset", 0, 4000), ("step", 0, 4000), *messages
            events += [event(name, at + start, at + end) for name, start, end in spans]
        return SimpleNamespace(events=lambda: events)

    monkeypatch.setattr(profiler, "attached_profiler", lambda: None)
    monkeypatch.setattr(profiler, "profiled", profiled)
    step = SimpleNamespace(device=torch.device("cuda"), world=SimpleNamespace(size=processes))
    counts = profiler.count_kernels(step, batch_ms)
    assert counts.pop("exposed_communication_ms", "no such key") == exposed_ms
    assert counts == {"kernels": 3, "launches": 3}
