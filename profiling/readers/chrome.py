"""The trace of torch.profiler, which tiny_llama_v3.py --profile writes: JSON in Chrome's format, times in us."""

import functools
import gzip
import json

from profiling.readers.files import intervals, reported

TRACES = ("trace.json", "trace.json.gz")
PATTERNS = {"dispatches": TRACES, "markers": TRACES, "calls": TRACES}
RECORDS_WARM_UP = False  # the script profiles nothing but measured steps

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CATEGORIES = {"markers": ("user_annotation",), "calls": ("cuda_runtime", "cuda_driver")}


def recognizes(path, content):
    return path.suffix not in (".csv", ".db")


def beside(path, content):
    return path


def dispatches(path):
    """Kernels and copies of the device; where there are none, on a CPU, the operators that no other holds."""
    on_device = [event for event in events_of(path) if event.get("cat") in ON_DEVICE]
    operators = [event for event in events_of(path) if event["name"].startswith("aten::")]
    yield in_ns(on_device or outermost(operators))


def ranges(path, content):
    yield in_ns([event for event in events_of(path) if event.get("cat") in CATEGORIES[content]])


@functools.lru_cache(maxsize=1)  # a report asks for kernels and ranges of one trace, which may take seconds to parse
def events_of(path):
    """The complete events, those with a beginning and a duration."""
    with reported(path), gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
        events = json.load(file).get("traceEvents", [])
    return [event for event in events if event.get("ph") == "X"]


def in_ns(events):
    return intervals([(e["name"], round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)) for e in events])


def outermost(events):
    """The events that no other of their thread holds."""
    found, ends = [], {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= ends.get(event["tid"], 0):
            ends[event["tid"]] = event["ts"] + event["dur"]
            found.append(event)
    return found
