"""Record when each kernel of a step of stages 5 and 8 ran, with as little slowing down as a profiler can do with.

    python -m exercises.performance_debugging.kernel_timeline --output-dir DIR      writes DIR/kernel_timeline.json

The options are those of tiny_llama_v3.py. Its own --profile records the host as well, which doubles the time that the
host needs, and so the gaps between kernels that wait for it.
"""

import dataclasses
import sys

import torch

import tiny_llama_v3 as llama
from benchmarks.stages import OPTIMIZED
from exercises.performance_debugging import measurement
from measure.tables import number, percent

STAGES = (OPTIMIZED, 8)
STEPS = 5  # of which the one of median length counts


def spans_of(timeline):
    """(start, length) of its kernels in us, in the order of their starts."""
    return sorted(zip(timeline["start_us"], timeline["length_us"], strict=True))


def busy_share(timeline):
    """How much of a step some kernel ran."""
    return llama.covered((start, start + length) for start, length in spans_of(timeline)) / timeline["step_us"]


def record(config, device):
    """{"step_us": from the first kernel to the end of the last, "start_us" and "length_us" of every kernel}."""
    step = llama.TrainStep(config, device)
    data = llama.DATA[config.data](config, llama.ALONE)
    llama.warm_up(step, config, device)
    step.load(*data.next_batch())
    timelines = []
    for _ in range(STEPS):
        llama.synchronize(device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
            step.run()
            llama.synchronize(device)
        kernels = sorted(
            (event.time_range.start, event.time_range.end)
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        )
        begin, end = kernels[0][0], max(end for _, end in kernels)
        timelines.append(
            {
                "step_us": end - begin,
                "start_us": [round(start - begin, 3) for start, _ in kernels],
                "length_us": [round(end - start, 3) for start, end in kernels],
            }
        )
    return sorted(timelines, key=lambda timeline: timeline["step_us"])[STEPS // 2]


def measure(config, device):
    """{stage: see record} of STAGES, printed a stage at a time."""
    timelines = {}
    for stage in STAGES:
        staged = dataclasses.replace(config, **llama.stage_flags(stage))
        llama.validate_on_device(staged, device)
        timelines[stage] = timeline = record(staged, device)
        kernels, step_ms = len(timeline["start_us"]), timeline["step_us"] / 1e3
        print(f"stage {stage}: {kernels} kernels in {number(step_ms)} ms, one running {percent(busy_share(timeline))}")
    return timelines


def main(argv=None):
    return measurement.main("kernel_timeline", measure, True, argv)


if __name__ == "__main__":
    sys.exit(main())
