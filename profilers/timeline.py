"""Figures of one step: the typical step, how busy the device is, and the host's time for a launch."""

import numpy as np

from profilers.readers import read_processes, within
from tiny_llama.spans import LAUNCH, covered


def typical_step(ranges):
    """Return (start, end) in ns of the step with the median duration."""
    # The mean of few steps follows a slow one, the median does not; of an even number it is the longer of the two.
    steps = ranges[ranges["Name"] == "step"]
    order = (steps["End"] - steps["Start"]).sort_values().index
    return tuple(steps.loc[order[len(order) // 2], ["Start", "End"]])


def busy_us(rows, start, end):
    """Return how many us of a window, (start, end) in ns, at least one row lasted; rows are in the order of Start."""
    inside = rows[(rows["End"] > start) & (rows["Start"] < end)]
    return covered(zip(inside["Start"].clip(lower=start), inside["End"].clip(upper=end), strict=True)) / 1e3


def step_figures(path):
    """Return the figures of the steps of a process, as means of a step; None if its trace does not name steps.

    steps, step_us, kernels, kernel_us (their sum), busy_us (in which at least one ran), launches and launch_us (in
    which the host was in a launch call). busy_us and launch_us are of what lies within the steps.
    """
    process = next(iter(read_processes(path)), None)
    if process is None or not process.steps:
        return None
    calls = process.calls()
    launches = calls[calls["Name"].str.match(LAUNCH).astype(bool)]
    rows = []
    for window in process.windows:
        kernels, launched = (within(table, window) for table in (process.dispatches, launches))
        busy, launching = (busy_us(table, *window) for table in (process.dispatches, launches))
        length = (window[1] - window[0]) / 1e3
        kernel_us = (kernels["End"] - kernels["Start"]).sum() / 1e3
        rows.append([length, len(kernels), kernel_us, busy, len(launched), launching])
    names = "step_us kernels kernel_us busy_us launches launch_us".split()
    return {"steps": process.steps} | dict(zip(names, np.sum(rows, axis=0) / process.steps, strict=True))
