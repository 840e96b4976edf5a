"""Readers of what the profilers leave: the reports get the same tables, whichever of them recorded the run.

Each format has a module here that holds everything particular to it:

    ncu          hardware counters of NVIDIA Nsight Compute, CSV
    rocprofv3    CSV files of ROCm 6 and 7
    rocpd        databases of ROCm 7, and the CSV that `rocpd summary` makes of them
    chrome       the trace of torch.profiler

What a format can hold are its keys of PATTERNS; the values are the names of files, the first pattern that finds any
counts. recognizes(path, content) says whether a file that was given by its own name is one. For each key there is a
function, which takes the path of one file and raises Unreadable:

    "kernels"             kernel_tables(path)      statistics made by the profiler: yields tables of COLUMNS
    "dispatches"          dispatches(path)         every kernel run: yields tables of Name, Start and End (ns)
    "markers", "calls"    ranges(path, content)    ranges on the host: yields tables of Name, Start and End (ns)
    "counters"            counters(path)           a table with a row a kernel, a column a counter, the mean of a run

Tables are yielded in pieces of at most files.CHUNK_ROWS rows, as a trace may be larger than the memory. RECORDS_WARM_UP
says whether there are kernels beside those of the measured steps. kernels_alone stands apart: it reads the JSON of
run_triton_profiling.py, which is no profile of a run.
"""

import re
from pathlib import Path

import pandas as pd

from profiling.readers import chrome, ncu, rocpd, rocprofv3
from profiling.readers.files import Unreadable, intervals, within
from profiling.readers.statistics import COLUMNS, merge, statistics_of

__all__ = [
    "COLUMNS",
    "Unreadable",
    "read_counters",
    "read_dispatches",
    "read_kernel_stats",
    "read_ranges",
    "read_step_stats",
    "step_window",
    "steps_of",
    "within",
]

FORMATS = (ncu, rocprofv3, rocpd, chrome)  # a folder may hold several: the first that has what is asked for is read
COUNTING_PASS = re.compile(r"(^|/)(pmc|pass)_\d+/")  # a run that counting has slowed down


def read_kernel_stats(path, window=None):
    """The kernels of a file, or of all processes of a folder: a DataFrame of COLUMNS, the largest total first.

    Times are in ns, Percentage is the share of all kernels' time (0 to 100), StdDev that of a sample. With a window,
    (start, end) in the trace's ns, only kernels that start within it count. No kernels at all: an empty table. Raises
    Unreadable if there is no profile, or if it is damaged.
    """
    reader, files = find(path, "kernels")
    if files and window is None:  # a table before the trace that it was made from
        return merge([table for file in files for table in reader.kernel_tables(file)])
    return merge([statistics_of(chunk) for chunk in dispatch_chunks(path, window)])


def read_step_stats(path):
    """(the kernels of the measured steps as read_kernel_stats gives them, how many steps), or (of the whole run, 0)."""
    window, steps = step_window(path)
    reader, _ = find(path, "dispatches")
    return read_kernel_stats(path, window if reader and reader.RECORDS_WARM_UP else None), steps


def read_dispatches(path, window=None):
    """Every kernel run: a DataFrame of Name (categorical), Start and End (ns), in the order of Start.

    With a window, (start, end) in ns, those that start within it. Raises Unreadable.
    """
    chunks = [chunk.astype({"Name": "category"}) for chunk in dispatch_chunks(path, window) if len(chunk)]
    if not chunks:
        return intervals()
    names = pd.api.types.union_categoricals([chunk["Name"] for chunk in chunks])
    dispatches = pd.concat(chunks, ignore_index=True).assign(Name=names)
    return dispatches.sort_values("Start", ignore_index=True, kind="stable")


def read_ranges(path, kind="markers"):
    """Ranges on the host: Name, Start and End (ns), in the order of Start; empty if none were recorded.

    Kind "markers" are those that the program named (roctx, NVTX, record_function), "calls" the HIP or CUDA API's.
    Raises Unreadable.
    """
    reader, files = find(path, kind)
    parts = [chunk for file in files for chunk in reader.ranges(file, kind)]
    return pd.concat([intervals(), *parts], ignore_index=True).sort_values("Start", ignore_index=True, kind="stable")


def steps_of(ranges):
    """Start and End (ns) of the measured steps among the ranges: tiny_llama_v3.py calls them "step"."""
    return ranges[ranges["Name"] == "step"].reset_index(drop=True)


def step_window(path):
    """((start, end) of the measured steps in ns, how many they are), or (None, 0) if the trace does not name them."""
    steps = steps_of(read_ranges(path))
    return ((steps["Start"].min(), steps["End"].max()), len(steps)) if len(steps) else (None, 0)


def read_counters(path):
    """A DataFrame with a row a kernel and a column a counter, the mean of a run; empty if nothing was counted.

    The units are the profiler's: FETCH_SIZE and WRITE_SIZE in KiB, ncu's in its base units. Raises Unreadable.
    """
    reader, files = find(path, "counters")
    if not files:
        return pd.DataFrame()
    # The same counter in several files (processes, passes) is one measurement more, not another column.
    return pd.concat([reader.counters(file) for file in files]).groupby(level=0).mean()


# ----------------------------------------------------------------------------------------------------------------------
# Files


def find(path, content):
    """(the module of the format, its files) for what holds this content: the path itself, or files below it.

    (None, []) if there is none. Raises Unreadable if the path does not exist.
    """
    path = Path(path)
    if not path.exists():
        raise Unreadable(f"{path} does not exist")
    for reader in FORMATS:
        if content in reader.PATTERNS:
            files = files_below(path, reader.PATTERNS[content], content == "counters")
            if path.is_file() and reader.recognizes(path, content):
                files = [path]
            if files:
                return reader, files
    return None, []


def files_below(folder, patterns, in_passes):
    """Those that the first pattern finds; in_passes: also in the folders of the runs that counted."""
    for pattern in patterns:
        found = sorted(folder.rglob(pattern))
        if files := [p for p in found if in_passes or not COUNTING_PASS.search(str(p.relative_to(folder)))]:
            return files
    return []


def dispatch_chunks(path, window):
    reader, files = find(path, "dispatches")
    if not files:
        kinds = [kind.PATTERNS.get(content, ()) for content in ("kernels", "dispatches") for kind in FORMATS]
        raise Unreadable(f"{path} holds no kernel statistics: neither {', '.join(sum(kinds, ()))}")
    for file in files:
        yield from (within(chunk, window) for chunk in reader.dispatches(file))
