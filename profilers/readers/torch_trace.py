"""Reads the trace of torch.profiler, which tiny_llama_v3.py --profile writes: Chrome's JSON, times in us."""

import re

import pandas as pd

from profilers.readers.files import OtherFormat, note, read_json, usable
from tiny_llama.spans import OPERATOR

CATEGORIES = {
    "dispatches": ("kernel", "gpu_memcpy", "gpu_memset"),
    "markers": ("user_annotation",),
    "calls": ("cuda_runtime", "cuda_driver"),
}
PATTERNS = dict.fromkeys((*CATEGORIES, "memory"), "*trace.json")  # also PyTorch's own <worker>.<time>.pt.trace.json
ON_GPU = 1, 6  # torch's numbers of the device types CUDA and HIP


def read(path, content):
    """Return events of one kind. Of a CPU, which has no kernels, dispatches are the outermost operators."""
    if "traceEvents" not in read_json(path):
        raise OtherFormat(f"{path} is no trace of torch.profiler (JSON of rocprofv3 is named *_results.json)")
    events = read_json(path)["traceEvents"]
    if content == "memory":  # what PyTorch's tensors held after each change, on a GPU
        changes = [event["args"] for event in events if event.get("name") == "[memory]"]
        totals = [now["Total Allocated"] for now in changes if now["Device Type"] in ON_GPU]
        return pd.DataFrame({"Total": totals})
    events = [event for event in events if event.get("ph") == "X"]
    chosen = [event for event in events if event.get("cat") in CATEGORIES[content]]
    if content == "dispatches" and not chosen:
        note_what_is_missing(path, events)
        return outermost(usable(path, spans([event for event in events if re.match(OPERATOR, event["name"])])))
    # The "process" of a kernel is its GPU, and its "thread" is the stream.
    return spans(chosen) if content == "dispatches" else spans(chosen).rename(columns={"Agent": "Pid"})


def note_what_is_missing(path, events):
    """Note it if code that torch.compile generated for a CPU, whose loops have events on demand only, has none."""
    names = [event["name"] for event in events]
    if any("CompiledFxGraph" in name for name in names) and not any("cpp_fused_" in name for name in names):
        remedy = "record with TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE=1"
        note(f"{path}: the time of what torch.compile generated is missing, as it has no events: {remedy}")


def spans(events):
    """Return a table of events that begin and end."""
    table = pd.DataFrame(events, columns=["name", "ts", "dur"])
    start, duration = (1e3 * pd.to_numeric(table[field], errors="coerce") for field in ("ts", "dur"))  # from us to ns
    agents, streams = ([event.get(field, "") for event in events] for field in ("pid", "tid"))
    times = {"Start": start.round(), "End": (start + duration).round()}
    return pd.DataFrame({"Name": table["name"], "Agent": agents, "Stream": streams, **times})


def outermost(rows):
    """Return the rows that are not inside another one of their thread."""
    # aten::linear calls aten::addmm: the time of the inner one is in that of the outer one already.
    found, ends = [], {}
    for row in rows.sort_values(["Start", "End"], ascending=[True, False]).itertuples():
        thread = row.Agent, row.Stream
        if row.Start >= ends.get(thread, 0):
            ends[thread] = row.End
            found.append(row.Index)
    return rows.loc[found]
