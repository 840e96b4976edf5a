"""Readers of recordings: the reports get the same tables from every profiler.

Each format has a module of its own:

    ncu          hardware counters of NVIDIA Nsight Compute, CSV
    rocprofv3    CSV files of ROCm 6 and 7
    rocpd        databases of ROCm 7, and the CSV that `rocpd summary` makes of them
    torch_trace  the trace of torch.profiler

The keys of PATTERNS are the contents that a format can have, the values are patterns of file names, of which the first
that matches any file is used. recognizes(path, content) returns whether a file has the format. For each key there is a
function that takes the path of one file and raises Unreadable:

    "kernels"             kernel_tables(path)      statistics made by the profiler: yields tables of COLUMNS
    "dispatches"          dispatches(path)         every kernel run: yields tables of Name, Start and End (ns)
    "markers", "calls"    ranges(path, content)    ranges on the host: yields tables of Name, Start and End (ns)
    "counters"            counters(path)           every kernel run: yields tables of Name, Counter, Value and, where it
                                                   was recorded, Start (ns)
    "memory"              memory(path)             yields the bytes that are allocated on GPUs, after each change

Tables are yielded in pieces of at most files.CHUNK_ROWS rows, as a trace may be larger than the memory. A file belongs
to one process; beside(path, content) is the file with other content of the same process. RECORDS_WARM_UP is whether the
recording has kernels outside the measured steps. kernel_benchmark is no such module: it reads the JSON of
run_triton_profiling.py, which is not the profile of a run.
"""

import re
from pathlib import Path

import pandas as pd

from profilers.readers import ncu, rocpd, rocprofv3, torch_trace
from profilers.readers.files import Unreadable, intervals, reported, within, within_any
from profilers.readers.kernel_statistics import COLUMNS, counter_means, counter_sums, merge, statistics_of

__all__ = [
    "COLUMNS",
    "Unreadable",
    "read_counters",
    "read_dispatches",
    "read_kernel_stats",
    "read_peak_memory",
    "read_processes",
    "read_processes_apart",
    "read_ranges",
    "read_step_counters",
    "read_step_stats",
    "step_windows",
    "steps_of",
    "within",
    "within_any",
]

# A folder may have several formats: the first one with the requested content is read.
FORMATS = (ncu, rocprofv3, rocpd, torch_trace)
COUNTING_PASS = re.compile(r"(^|/)(pmc|pass)_\d+/")  # runs with counters, which are slower


def read_kernel_stats(path):
    """Reads the kernels of a file, or of all processes of a folder: a DataFrame of COLUMNS, the largest total first.

    Times are in ns, Percentage is the share of all kernels' time (0 to 100), StdDev that of a sample. Without kernels
    the table is empty. Raises Unreadable if there is no profile, or if it is damaged.
    """
    reader, files = find(path, "kernels")
    if files:  # tables are preferred to traces
        return merge([table for file in files for table in tables_of(file, reader.kernel_tables)])
    return merge([statistics_of(chunk) for chunk in dispatch_chunks(path)])


def read_step_stats(path):
    """(read_kernel_stats of the measured steps, the number of steps), or (of the whole run, 0)."""
    table, steps, _ = read_processes(path)
    return table, steps


def read_processes(path):
    """(table and number of steps as in read_step_stats, the number of processes in them).

    Each process has its own steps. A process without steps is left out if another one has them.
    """
    reader, files = find(path, "dispatches")
    found = [(file, *windows_beside(reader, file)) for file in files]
    in_steps = [(file, windows) for file, windows, steps in found if steps]
    steps = sum(steps for *_, steps in found)
    if not in_steps or not reader.RECORDS_WARM_UP:
        _, tables = find(path, "kernels")
        return read_kernel_stats(path), steps, len(in_steps or tables or files)
    chunks = (within_any(chunk, windows) for file, windows in in_steps for chunk in tables_of(file, reader.dispatches))
    return merge([statistics_of(chunk) for chunk in chunks]), steps, len(in_steps)


def read_dispatches(path):
    """Reads every kernel run: a DataFrame of Name (categorical), Start and End (ns), in the order of Start.

    Raises Unreadable.
    """
    chunks = [chunk.astype({"Name": "category"}) for chunk in dispatch_chunks(path) if len(chunk)]
    if not chunks:
        return intervals()
    names = pd.api.types.union_categoricals([chunk["Name"] for chunk in chunks])
    dispatches = pd.concat(chunks, ignore_index=True).assign(Name=names)
    return dispatches.sort_values("Start", ignore_index=True, kind="stable")


def read_ranges(path, kind="markers"):
    """Reads ranges on the host: Name, Start and End (ns), in the order of Start; empty if none were recorded.

    Of the kinds, "markers" are ranges of the program (roctx, NVTX, record_function), "calls" those of HIP or CUDA.
    Raises Unreadable.
    """
    reader, files = find(path, kind)
    return in_order(chunk for file in files for chunk in tables_of(file, reader.ranges, kind))


def read_processes_apart(path):
    """[(read_dispatches(), read_ranges())] of each process that names its steps.

    They have the same clock if they ran on one machine. Raises Unreadable.
    """
    reader, files = find(path, "dispatches")
    in_steps = [file for file in files if windows_beside(reader, file)[1]]
    return [(read_dispatches(file), read_ranges(reader.beside(file, "markers"))) for file in in_steps]


def steps_of(ranges):
    """Start and End (ns) of the measured steps among the ranges, which tiny_llama_v3.py names "step"."""
    return ranges[ranges["Name"] == "step"].reset_index(drop=True)


def step_windows(path):
    """([(start, end), ...] in ns, the windows of a process in which its measured steps ran; the number of steps).

    ([], 0) if the recording does not name them. With --timing step the ranges "step" end on the host before their
    kernels run, and the window is the range "steps" around all of them. Otherwise each step is a window, and what runs
    between steps is left out. Raises Unreadable.
    """
    return windows_of(read_ranges(path))


def read_step_counters(path):
    """(a DataFrame with a row for each kernel and a column for each counter, means of a run; whether of steps only).

    Each pass and each process is limited to its own steps. If one of them names no steps or has no times, or if nothing
    was counted in the steps, all values are of the whole run. The table is empty if nothing was counted. The units are
    those of the profiler: FETCH_SIZE and WRITE_SIZE in KiB, those of ncu in base units. Raises Unreadable.
    """
    reader, files = find(path, "counters")
    if not files:
        return pd.DataFrame(), False
    whole, limited = [], []
    for file in files:
        windows, _ = windows_beside(reader, file)
        for chunk in filter(len, tables_of(file, reader.counters)):
            whole.append(counter_sums(chunk))
            if windows and "Start" in chunk:
                limited.append(counter_sums(within_any(chunk, windows)))
    is_limited = len(limited) == len(whole) and any(map(len, limited))
    # The same counter in several files (processes, passes) adds measurements, not columns.
    return counter_means(limited if is_limited else whole), is_limited or not reader.RECORDS_WARM_UP


def read_counters(path):
    """The table of read_step_counters."""
    table, _ = read_step_counters(path)
    return table


def read_peak_memory(path):
    """The most bytes that a process had allocated on GPUs at a time, warm-up included; 0 if no recording has it."""
    reader, files = find(path, "memory")
    try:
        return max((size for file in files for size in tables_of(file, reader.memory)), default=0)
    except Unreadable:  # such as a damaged database beside the tables of a report
        return 0


# ----------------------------------------------------------------------------------------------------------------------
# Files


def find(path, content):
    """(the module of the format, the files with this content): the path itself, or files below it.

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
    """The files of the first pattern that matches any, except in failed runs; in_passes: also in counting passes."""
    for pattern in patterns:
        found = [(path, str(path.relative_to(folder))) for path in sorted(folder.rglob(pattern))]
        found = [(path, name) for path, name in found if ".failed/" not in name]
        if files := [path for path, name in found if in_passes or not COUNTING_PASS.search(name)]:
            return files
    return []


def tables_of(file, read, *content):
    """The tables that a function of a reader yields for a file; Unreadable if the file has other contents."""
    with reported(file):
        yield from read(file, *content)


def dispatch_chunks(path):
    reader, files = find(path, "dispatches")
    if not files:
        kinds = [kind.PATTERNS.get(content, ()) for content in ("kernels", "dispatches") for kind in FORMATS]
        raise Unreadable(f"{path} holds no kernel statistics: neither {', '.join(sum(kinds, ()))}")
    for file in files:
        yield from tables_of(file, reader.dispatches)


def in_order(chunks):
    return pd.concat([intervals(), *chunks], ignore_index=True).sort_values("Start", ignore_index=True, kind="stable")


def windows_beside(reader, file):
    """step_windows() of the process of this file."""
    markers = reader.beside(file, "markers")
    found = markers and markers.exists()
    return windows_of(in_order(tables_of(markers, reader.ranges, "markers")) if found else intervals())


def windows_of(ranges):
    steps = steps_of(ranges)
    around = ranges[ranges["Name"] == "steps"]
    held = steps if around.empty else around
    windows = list(zip(held["Start"], held["End"], strict=True))
    count = len(within_any(steps, windows))
    return (windows, count) if count else ([], 0)
