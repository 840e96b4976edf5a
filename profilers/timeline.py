"""Figures of one step: the typical step, how busy the device is, and the host's time for a launch."""

import numpy as np

from profilers.readers import read_processes, read_ranges, within

LAUNCH = r"(?:cuda|cu|hip)\w*Launch"


def typical_step(ranges):
    """Return (start, end) in ns of the step with the median duration."""
    # The mean of few steps follows a slow one, the median does not; of an even number it is the longer of the two.
    steps = ranges[ranges["Name"] == "step"]
    order = (steps["End"] - steps["Start"]).sort_values().index
    return tuple(steps.loc[order[len(order) // 2], ["Start", "End"]])


def sum_us(rows):
    """Return the sum of all durations in us."""
    return (rows["End"] - rows["Start"]).sum() / 1e3


def busy_us(dispatches):
    """Return how long at least one kernel ran; dispatches are in the order of Start."""
    # Kernels may overlap: of each, only what runs after the end of all earlier ones adds to the time.
    reached = dispatches["End"].cummax().shift(fill_value=0)
    alone = dispatches.assign(Start=dispatches["Start"].clip(lower=reached))
    return sum_us(alone[alone["End"] > alone["Start"]])


def step_figures(path):
    """Return the figures of the steps of a process, as means of a step; None if its trace does not name steps.

    steps, step_us, kernels, kernel_us (their sum), busy_us (in which at least one ran), launches and launch_us (host
    time in launch calls, all of them together).
    """
    process = next(iter(read_processes(path)), None)
    if process is None or not process.steps:
        return None
    calls = read_ranges(path, "calls")
    launches = calls[calls["Name"].str.match(LAUNCH).astype(bool)]
    rows = []
    for start, end in process.windows:
        kernels, launched = (within(table, (start, end)) for table in (process.dispatches, launches))
        busy = busy_us(kernels)
        rows.append([(end - start) / 1e3, len(kernels), sum_us(kernels), busy, len(launched), sum_us(launched)])
    names = "step_us kernels kernel_us busy_us launches launch_us".split()
    return {"steps": process.steps} | dict(zip(names, np.sum(rows, axis=0) / process.steps, strict=True))
