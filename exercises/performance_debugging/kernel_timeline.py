"""Record when each kernel of a step of stages 5 and 8 runs, with the least overhead of a profiler.

    python -m exercises.performance_debugging.kernel_timeline --output-dir DIR      writes DIR/kernel_timeline.json

The options are those of tiny_llama_v3.py. Its --profile records the host as well, which doubles the host's time and
the gaps between kernels.
"""

import dataclasses
import sys

if not __package__:
    print("run it from the root as python -m exercises.performance_debugging.kernel_timeline", file=sys.stderr)
    sys.exit(2)
import torch

import tiny_llama_v3 as llama
from benchmarks.pages.replays import OPTIMIZED
from exercises.performance_debugging.measured import program_of
from measure.tables import number, percent
from tiny_llama import profiler

STAGES = (OPTIMIZED, 8)
STEPS = 5  # of which the one with the median length is used


def spans_of(timeline):
    """(start, length) of the kernels in us, in the order of their starts."""
    return sorted(zip(timeline["start_us"], timeline["length_us"], strict=True))


def busy_share(timeline):
    """The share of a step in which a kernel runs."""
    return profiler.covered((start, start + length) for start, length in spans_of(timeline)) / timeline["step_us"]


def record(config, device):
    """Returns {"step_us": from the first kernel to the end of the last, "start_us" and "length_us" of all kernels}."""
    step = llama.TrainStep(config, device)
    llama.warm_up(step)
    step.load(*next(step.batches(config.seed)))
    timelines = []
    for _ in range(STEPS):
        step.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
            step.run()
            step.synchronize()
        events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        kernels = sorted((event.time_range.start, event.time_range.end) for event in events)
        begin = kernels[0][0]
        starts = [round(start - begin, 3) for start, _ in kernels]
        lengths = [round(end - start, 3) for start, end in kernels]
        timelines.append({"step_us": max(end for _, end in kernels) - begin, "start_us": starts, "length_us": lengths})
    return sorted(timelines, key=lambda timeline: timeline["step_us"])[STEPS // 2]


def measure(config, device):
    """Returns {stage: see record} of STAGES, and prints each stage."""
    timelines = {}
    for stage in STAGES:
        staged = dataclasses.replace(config, **llama.stage_flags(stage))
        llama.validate_on_device(staged, device)
        timelines[stage] = timeline = record(staged, device)
        kernels, step_ms = len(timeline["start_us"]), timeline["step_us"] / 1e3
        print(f"stage {stage}: {kernels} kernels in {number(step_ms)} ms, one running {percent(busy_share(timeline))}")
    return timelines


main = program_of("kernel_timeline", measure)

if __name__ == "__main__":
    sys.exit(main())
