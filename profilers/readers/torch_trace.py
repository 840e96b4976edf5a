"""Reads the trace of torch.profiler, which tiny_llama_v3.py --profile writes: Chrome's JSON, times in us."""

import functools
import json

from profilers.readers.files import TEXT, intervals

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CATEGORIES = {"markers": ("user_annotation",), "calls": ("cuda_runtime", "cuda_driver")}


def dispatches(path):
    """Return kernels and copies of the device; of a CPU, which has none, the outermost operators."""
    operators = [event for event in events_of(path) if event["name"].startswith("aten::")]
    on_device = ranges(path, ON_DEVICE)
    return in_ns(outermost(operators)) if on_device.empty else on_device


def ranges(path, categories):
    return in_ns([event for event in events_of(path) if event.get("cat") in categories])


def memory(path):
    """Return what PyTorch's tensors held on a GPU after each change, which profile_memory records."""
    memory = [event["args"] for event in events_of(path) if event["name"] == "[memory]"]
    return [now["Total Allocated"] for now in memory if now["Device Type"] == 1]


@functools.lru_cache(maxsize=1)  # a report reads a trace several times, and parsing may take seconds
def events_of(path):
    """Return the complete events, with a beginning and a duration, and the instants."""
    events = json.loads(path.read_text(**TEXT)).get("traceEvents", [])
    return [event for event in events if event.get("ph") in ("X", "i")]


def in_ns(events):
    return intervals([(e["name"], round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)) for e in events])


def outermost(events):
    """Return the events that are not inside another event of their thread."""
    found, ends = [], {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= ends.get(event["tid"], 0):
            ends[event["tid"]] = event["ts"] + event["dur"]
            found.append(event)
    return found
