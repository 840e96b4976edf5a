"""Figures of one step: the typical step, how busy the device is, and the host's time for a launch."""

import pandas as pd

from profilers.readers import read_dispatches, read_ranges, step_windows, steps_of, within

LAUNCH = r"(?:cuda|cu|hip)\w*Launch"


def typical_step(ranges):
    """(start, end) in ns of the step with the median duration, or None."""
    steps = steps_of(ranges)
    if steps.empty:
        return None
    order = (steps["End"] - steps["Start"]).sort_values().index
    return tuple(steps.loc[order[len(order) // 2], ["Start", "End"]])


def busy_ns(dispatches):
    """The time in ns in which at least one kernel ran; dispatches are in the order of Start."""
    reached = dispatches["End"].cummax().shift(fill_value=0)  # by all earlier kernels
    begin = dispatches["Start"].where(dispatches["Start"] > reached, reached)
    return int((dispatches["End"] - begin).clip(lower=0).sum())


def figures_of(window, kernels, launches):
    """Sums over the kernels and launch calls of a window, (start, end) in ns; times in us."""
    start, end = window
    busy = busy_ns(kernels)
    span = kernels["End"].max() - kernels["Start"].min() if len(kernels) else 0
    return {
        "step_us": (end - start) / 1e3,
        "kernels": len(kernels),
        "kernel_us": (kernels["End"] - kernels["Start"]).sum() / 1e3,
        "busy_us": busy / 1e3,
        "gaps": max(len(kernels) - 1, 0),
        "gaps_us": (span - busy) / 1e3,
        "launches": len(launches),
        "launch_us": (launches["End"] - launches["Start"]).sum() / 1e3,
    }


def step_figures(path):
    """The figures of the steps of a trace, as means of a step; None if the trace does not name steps.

    steps, step_us, kernels, kernel_us (their sum), busy (share of the step in which a kernel ran), launches, launch_us
    (host time in launch calls, all of them together), mean_launch_us and gap_us (mean pause between two kernels).
    """
    windows, steps = step_windows(path)
    if not steps:
        return None
    dispatches, calls = read_dispatches(path), read_ranges(path, "calls")
    launches = calls[calls["Name"].str.match(LAUNCH)] if len(calls) else calls
    rows = [figures_of(window, within(dispatches, window), within(launches, window)) for window in windows]
    figures = (pd.DataFrame(rows).sum() / steps).to_dict()
    figures["busy"] = figures.pop("busy_us") / figures["step_us"]
    gaps, gaps_us = figures.pop("gaps"), figures.pop("gaps_us")
    figures["gap_us"] = gaps_us / gaps if gaps else 0.0
    figures["mean_launch_us"] = figures["launch_us"] / figures["launches"] if figures["launches"] else None
    return {"steps": steps} | figures
