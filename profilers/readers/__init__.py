"""Readers of recordings: the reports get the same tables from every profiler.

Each format has a module of its own:

    ncu          hardware counters of NVIDIA Nsight Compute, CSV
    rocprofv3    CSV files of ROCm 6 and 7
    rocpd        databases of ROCm 7, and the CSV that `rocpd summary` makes of them
    torch_trace  the trace of torch.profiler

The keys of PATTERNS are the contents that a format can have, the values are patterns of file names. recognizes(path,
content) returns whether a file of any name has the format. For each key there is a function that takes the path of one
file and raises Unreadable:

    "kernels"             kernel_table(path)       statistics made by the profiler: a table of COLUMNS
    "dispatches"          dispatches(path)         every kernel run: a table of Name, Start and End (ns)
    "markers", "calls"    ranges(path, content)    ranges on the host: a table of Name, Start and End (ns)
    "counters"            counters(path)           every kernel run: a table of Name, Counter, Value and, where it was
                                                   recorded, Start (ns)
    "memory"              memory(path)             the bytes that are allocated on GPUs, after each change

A file belongs to one process; beside(path, content) is the file with other content of the same process.
RECORDS_WARM_UP is whether the recording has kernels outside the measured steps. kernel_benchmark is no such module: it
reads the JSON of run_triton_profiling.py, which is not the profile of a run.
"""

import re
from pathlib import Path

import pandas as pd

from profilers.readers import ncu, rocpd, rocprofv3, torch_trace
from profilers.readers.files import Unreadable, intervals, reported, within, within_any
from profilers.readers.kernel_statistics import COLUMNS, merge, statistics_of

__all__ = ["COLUMNS", "Unreadable", "within", "within_any"]  # beside the functions below

# A folder may have several formats: the first one with the requested content is read.
FORMATS = (ncu, rocprofv3, rocpd, torch_trace)
FAILED = r"\.failed/"
COUNTING_PASS = r"(^|/)(pmc|pass)_\d+/"  # runs with counters, which are slower


def read_kernel_stats(path):
    """Read the kernels of a file, or of all processes of a folder: a DataFrame of COLUMNS, the largest total first.

    Times are in ns, Percentage is the share of all kernels' time (0 to 100), StdDev that of a sample. Without kernels
    the table is empty. Raises Unreadable if there is no profile, or if it is damaged.
    """
    reader, files = find(path, "kernels")
    if files:  # tables are preferred to traces
        return merge([table_of(file, reader.kernel_table) for file in files])
    return statistics_of(read_dispatches(path))


def read_step_stats(path):
    """Return (read_kernel_stats of the measured steps, the number of steps), or (of the whole run, 0)."""
    table, steps, _ = read_processes(path)
    return table, steps


def read_processes(path):
    """Return (table and number of steps as in read_step_stats, the number of processes in them).

    Each process has its own steps. A process without steps is left out if another one has them.
    """
    reader, files = find(path, "dispatches")
    found = [(file, *windows_beside(reader, file)) for file in files]
    in_steps = [(file, windows) for file, windows, steps in found if steps]
    steps = sum(steps for *_, steps in found)
    if not in_steps or not reader.RECORDS_WARM_UP:
        _, tables = find(path, "kernels")
        return read_kernel_stats(path), steps, len(in_steps or tables or files)
    kernels = [within_any(table_of(file, reader.dispatches), windows) for file, windows in in_steps]
    return statistics_of(pd.concat(kernels)), steps, len(in_steps)


def read_dispatches(path):
    """Read every kernel run: a DataFrame of Name, Start and End (ns), in the order of Start. Raises Unreadable."""
    reader, files = find(path, "dispatches")
    if not files:
        wanted = [kind.PATTERNS[content] for content in ("kernels", "dispatches") for kind in FORMATS[1:3]]
        raise Unreadable(f"{path} holds no kernel statistics: neither {', '.join(wanted)} nor trace.json")
    return in_order([table_of(file, reader.dispatches) for file in files])


def read_ranges(path, kind="markers"):
    """Read ranges on the host: Name, Start and End (ns), in the order of Start; empty if none were recorded.

    Of the kinds, "markers" are ranges of the program (roctx, NVTX, record_function), "calls" those of HIP or CUDA.
    Raises Unreadable.
    """
    reader, files = find(path, kind)
    return in_order([table_of(file, reader.ranges, kind) for file in files])


def read_processes_apart(path):
    """Return [(read_dispatches(), read_ranges())] of each process that names its steps.

    They have the same clock if they ran on one machine. Raises Unreadable.
    """
    reader, files = find(path, "dispatches")
    in_steps = [file for file in files if windows_beside(reader, file)[1]]
    return [(read_dispatches(file), read_ranges(reader.beside(file, "markers"))) for file in in_steps]


def steps_of(ranges):
    """Return Start and End (ns) of the measured steps among the ranges, which tiny_llama_v3.py names "step"."""
    return ranges[ranges["Name"] == "step"].reset_index(drop=True)


def step_windows(path):
    """Return ([(start, end), ...] in ns, the windows in which a process ran its measured steps; the number of steps).

    ([], 0) if the recording does not name them. With --timing step the ranges "step" end on the host before their
    kernels run, and the window is the range "steps" around all of them. Otherwise each step is a window, and what runs
    between steps is left out. Raises Unreadable.
    """
    return windows_of(read_ranges(path))


def read_step_counters(path):
    """Return (a DataFrame with a row for each kernel and a column for each counter, whether of the steps only).

    Values are means of a run. Each pass and each process is limited to its own steps. If one of them names no steps or
    has no times, or if nothing was counted in the steps, all values are of the whole run. The table is empty if nothing
    was counted. The units are those of the profiler: FETCH_SIZE and WRITE_SIZE in KiB, those of ncu in base units.
    Raises Unreadable.
    """
    reader, files = find(path, "counters")
    whole, limited = [], []
    for file in files:
        windows, _ = windows_beside(reader, file)
        table = table_of(file, reader.counters)
        if len(table):
            whole.append(table)
            limited += [within_any(table, windows)] if windows and "Start" in table else []
    if not whole:
        return pd.DataFrame(), False
    is_limited = len(limited) == len(whole) and any(map(len, limited))
    rows = pd.concat(limited if is_limited else whole)
    # The same counter in several files (processes, passes) adds measurements, not columns.
    means = rows.groupby(["Name", "Counter"])["Value"].mean().unstack("Counter")
    return means, is_limited or not reader.RECORDS_WARM_UP


def read_peak_memory(path):
    """Return the most bytes that a process had allocated on GPUs at a time, warm-up included; 0 if unknown."""
    reader, files = find(path, "memory")
    try:
        return max((max(table_of(file, reader.memory), default=0) for file in files), default=0)
    except Unreadable:  # such as a damaged database beside the tables of a report
        return 0


# ----------------------------------------------------------------------------------------------------------------------
# Files


def find(path, content):
    """Return (the module of the format, the files with this content): the path itself, or files below it.

    (None, []) if there is none. Raises Unreadable if the path does not exist.
    """
    path = Path(path)
    if not path.exists():
        raise Unreadable(f"{path} does not exist")
    for reader in FORMATS:
        if content not in reader.PATTERNS:
            continue
        if path.is_file():
            files = [path] if reader.recognizes(path, content) else []
        else:
            pattern = reader.PATTERNS[content]
            found = sorted(path.rglob(pattern)) or sorted(path.rglob(f"{pattern}.gz"))
            left_out = re.compile(FAILED if content == "counters" else f"{FAILED}|{COUNTING_PASS}")
            files = [file for file in found if not left_out.search(str(file.relative_to(path)))]
        if files:
            return reader, files
    return None, []


def table_of(file, read, *content):
    """Return what a function of a reader reads from a file; Unreadable if the file has other contents."""
    with reported(file):
        return read(file, *content)


def in_order(tables):
    rows = pd.concat([intervals(), *map(intervals, tables)], ignore_index=True)
    return rows.sort_values("Start", ignore_index=True, kind="stable")


def windows_beside(reader, file):
    """Return step_windows() of the process of this file."""
    markers = reader.beside(file, "markers")
    found = [table_of(markers, reader.ranges, "markers")] if markers and markers.exists() else []
    return windows_of(in_order(found))


def windows_of(ranges):
    steps = steps_of(ranges)
    around = ranges[ranges["Name"] == "steps"]
    held = steps if around.empty else around
    windows = list(zip(held["Start"], held["End"], strict=True))
    count = len(within_any(steps, windows))
    return (windows, count) if count else ([], 0)
