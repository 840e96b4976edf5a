"""Reads the trace of torch.profiler, which tiny_llama_v3.py --profile writes: Chrome's JSON, times in us."""

import functools
import json

import pandas as pd

from profilers.readers.files import TEXT, intervals

CATEGORIES = {
    "dispatches": ("kernel", "gpu_memcpy", "gpu_memset"),
    "markers": ("user_annotation",),
    "calls": ("cuda_runtime", "cuda_driver"),
}
PATTERNS = dict.fromkeys((*CATEGORIES, "memory"), "trace.json")


def read(path, content):
    """Return events of one kind. Of a CPU, which has no kernels, dispatches are the outermost operators."""
    events = events_of(path)
    if content == "memory":  # what PyTorch's tensors held after each change, on a GPU
        changes = [event["args"] for event in events if event["name"] == "[memory]"]
        totals = [now["Total Allocated"] for now in changes if now["Device Type"] == 1]
        return pd.DataFrame({"Total": totals})
    chosen = [event for event in events if event.get("cat") in CATEGORIES[content]]
    if content == "dispatches" and not chosen:
        chosen = outermost([event for event in events if event["name"].startswith("aten::")])
    # From us to ns.
    return intervals([(e["name"], round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)) for e in chosen])


@functools.lru_cache(maxsize=1)  # a report reads a trace several times, and parsing may take seconds
def events_of(path):
    """Return the complete events, with a beginning and a duration, and the instants."""
    events = json.loads(path.read_text(**TEXT)).get("traceEvents", [])
    return [event for event in events if event.get("ph") in ("X", "i")]


def outermost(events):
    """Return the events that are not inside another event of their thread."""
    # aten::linear calls aten::addmm: the time of the inner one is in that of the outer one already.
    found, ends = [], {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= ends.get(event["tid"], 0):
            ends[event["tid"]] = event["ts"] + event["dur"]
            found.append(event)
    return found
