"""Profiles of a few training steps: traces, kernel tables, memory snapshots, ranges for profilers, kernels a step."""

import contextlib
import ctypes
import os
import re

import torch
from torch.autograd import DeviceType

import tiny_llama_v3 as llama
from tiny_llama.kernel_table import is_work, write_kernel_table
from tiny_llama.spans import LAUNCH, covered

PROFILED_STEPS = 3
SLOWED_DOWN = 1.25  # a profiled step that takes so many times as long is not the step that was measured


@contextlib.contextmanager
def named_range(name):
    """Name a range in the traces of torch.profiler and of an attached profiler (NVTX, or roctx on ROCm)."""
    for_attached = torch.cuda.nvtx.range(name) if torch.cuda.is_initialized() else contextlib.nullcontext()
    with torch.profiler.record_function(name), for_attached:
        yield


def show_ranges(step):
    """From now on, name the step, its phases and (unless compiled or captured) its layers to profilers.

    With --timing step, kernels of a "step" may run after it; the range "steps" lasts until the last one has ended.
    """
    if step.named_range is named_range:
        return  # done already
    step.named_range = named_range
    if os.environ.get("ROCPROF_SELECTED_REGIONS"):  # rocprofv3 --selected-regions records nothing before this call
        ctypes.CDLL(None).roctxProfilerResume(0)  # of the library that rocprofv3 preloads for the ranges
    for name, phase in step.phases.items():
        # What is called a step here is the graph of a whole one.
        step.phases[name] = named_range("graph" if name == "step" else name)(phase)
    if not step.config.compile:
        # Of blocks that are called one by one only forward: their backward begins in one of autograd's nodes and ends
        # in another, and viewers drop slices that do not nest.
        layers = step.model.layers
        for part in getattr(layers, "groups", [layers]):
            part.named_range = named_range


def attached_profiler():
    """Return what tells that another profiler is at work here, an environment variable or torch.profiler, or None."""
    if torch.autograd._profiler_enabled():  # as around the whole program: a second one would be refused
        return "torch.profiler"
    names = (
        "ROCP_TOOL_LIBRARIES ROCPROFILER_REGISTER HSA_TOOLS_LIB NSYS_PROFILING_SESSION_ID CUDA_INJECTION64_PATH "
        "NVTX_INJECTION64_PATH NV_NSIGHT_INJECTION_PORT_BASE"  # the last is ncu's
    )
    if "rocprof" in os.environ.get("LD_PRELOAD", ""):  # rocprofv3 and rocprof-sys
        return "LD_PRELOAD"
    return next((name for name in names.split() if os.environ.get(name)), None)


def profiled(step, steps):
    """Return torch.profiler after so many more steps."""
    with torch.profiler.profile(acc_events=True) as profiler:  # of the CPU, and of a GPU if there is one
        for _ in range(steps):
            step.run()
        step.synchronize()
    return profiler


def count_kernels(step, batch_ms):
    """Return {"kernels": ..., "launches": ...} of one more step, or the reason why they were not counted, as a text.

    With several processes also "exposed_communication_ms", during which the GPU ran nothing but messages; None if the
    profiled step took much longer than batch_ms, a step's time: then it mostly waited for the slowed-down hosts.
    """
    if step.device.type == "cpu":
        return "there is no GPU"
    if attached_profiler():
        return f"another profiler is attached ({attached_profiler()})"
    steps = 1 if step.world.size == 1 else 2  # the first of two also waits for the other processes' profilers
    events = profiled(step, steps).events()
    gpu_events = [event for event in events if is_work(event) and not event.name.startswith("Memset")]
    kernels = [event for event in gpu_events if not event.name.startswith("Memcpy")]
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    calls = [event for event in on_host if re.match(LAUNCH, event.name)]
    counts = {"kernels": len(kernels) // steps, "launches": len(calls) // steps}
    if steps > 1:
        spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in gpu_events)
        spans = spans[len(spans) // steps :]  # the second step
        # Messages are NCCL's kernels, and RCCL's, or copies.
        work = [span for span in spans if not span[2].startswith(("nccl", "Memcpy"))]
        step_ms = (max(end for _, end, _ in spans) - spans[0][0]) / 1e3
        exposed_ms = (covered(spans) - covered(work)) / 1e3
        counts["exposed_communication_ms"] = exposed_ms if step_ms <= SLOWED_DOWN * batch_ms else None
    return counts


def record_memory(step, path):
    """Write what the GPU's allocator does in a few more steps, which recording slows, for PyTorch's viewer."""
    torch.cuda.memory._record_memory_history(stacks="python")
    for _ in range(PROFILED_STEPS):
        step.run()
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


def write_profile(step, folder):
    """Write trace.json for Perfetto, kernel_stats.csv with rocprofv3's columns and, on a GPU, memory_snapshot.pickle.

    Several processes have a folder each in it. UsageError if a file cannot be written.
    """
    folder = folder / f"rank_{step.world.rank}" if step.world.size > 1 else folder
    on_gpu, steps = step.device.type == "cuda", PROFILED_STEPS
    trace, table, memory = (folder / name for name in ("trace.json", "kernel_stats.csv", "memory_snapshot.pickle"))
    show_ranges(step)
    step.phases["wait"] = step.synchronize  # so that the range of a step lasts until its kernels have ended
    profiler = profiled(step, steps)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
        write_kernel_table(table, profiler.events(), on_gpu)
        if on_gpu:
            record_memory(step, memory)
    except OSError as error:
        raise llama.UsageError(
            f"{folder} cannot be written to ({error.strerror}): free space or give another folder"
        ) from error
    print(f"Profile of {steps} more steps: {trace} (open in https://ui.perfetto.dev) and {table}")
    if on_gpu:
        print(f"Memory of {steps} more: {memory} (open in https://pytorch.org/memory_viz)")
