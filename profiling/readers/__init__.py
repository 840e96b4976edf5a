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
    "counters"            counters(path)           every kernel run: yields tables of Name, Counter, Value and, where it
                                                   was recorded, Start (ns)

Tables are yielded in pieces of at most files.CHUNK_ROWS rows, as a trace may be larger than the memory. A file is that
of one process; beside(path, content) is where the profiler puts other content of the same one. RECORDS_WARM_UP says
whether there are kernels beside those of the measured steps. kernels_alone stands apart: it reads the JSON of
run_triton_profiling.py, which is no profile of a run.
"""

import re
from pathlib import Path

import pandas as pd

from profiling.readers import chrome, ncu, rocpd, rocprofv3
from profiling.readers.files import Unreadable, intervals, within, within_any
from profiling.readers.statistics import COLUMNS, counter_means, counter_sums, merge, statistics_of

__all__ = [
    "COLUMNS",
    "Unreadable",
    "read_counters",
    "read_dispatches",
    "read_kernel_stats",
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

FORMATS = (ncu, rocprofv3, rocpd, chrome)  # a folder may hold several: the first that has what is asked for is read
COUNTING_PASS = re.compile(r"(^|/)(pmc|pass)_\d+/")  # a run that counting has slowed down


def read_kernel_stats(path):
    """The kernels of a file, or of all processes of a folder: a DataFrame of COLUMNS, the largest total first.

    Times are in ns, Percentage is the share of all kernels' time (0 to 100), StdDev that of a sample. No kernels at
    all: an empty table. Raises Unreadable if there is no profile, or if it is damaged.
    """
    reader, files = find(path, "kernels")
    if files:  # a table before the trace that it was made from
        return merge([table for file in files for table in reader.kernel_tables(file)])
    return merge([statistics_of(chunk) for chunk in dispatch_chunks(path)])


def read_step_stats(path):
    """(the kernels of the measured steps as read_kernel_stats gives them, how many steps), or (of the whole run, 0)."""
    table, steps, _ = read_processes(path)
    return table, steps


def read_processes(path):
    """(the table and the number of steps that read_step_stats gives, the number of processes that they are of).

    Each process has its own steps. One that names none is left out if another does: it took no part in them.
    """
    reader, files = find(path, "dispatches")
    found = [(file, *windows_beside(reader, file)) for file in files]
    in_steps = [(file, windows) for file, windows, steps in found if steps]
    steps = sum(steps for *_, steps in found)
    if not in_steps or not reader.RECORDS_WARM_UP:
        _, tables = find(path, "kernels")
        return read_kernel_stats(path), steps, len(in_steps or tables or files)
    chunks = (within_any(chunk, windows) for file, windows in in_steps for chunk in reader.dispatches(file))
    return merge([statistics_of(chunk) for chunk in chunks]), steps, len(in_steps)


def read_dispatches(path):
    """Every kernel run: a DataFrame of Name (categorical), Start and End (ns), in the order of Start.

    Raises Unreadable.
    """
    chunks = [chunk.astype({"Name": "category"}) for chunk in dispatch_chunks(path) if len(chunk)]
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
    return in_order(chunk for file in files for chunk in reader.ranges(file, kind))


def read_processes_apart(path):
    """[(dispatches, ranges)] of each process that names its steps, as read_dispatches and read_ranges give them.

    By one clock, if they ran on one machine. Raises Unreadable.
    """
    reader, files = find(path, "dispatches")
    in_steps = [file for file in files if windows_beside(reader, file)[1]]
    return [(read_dispatches(file), read_ranges(reader.beside(file, "markers"))) for file in in_steps]


def steps_of(ranges):
    """Start and End (ns) of the measured steps among the ranges: tiny_llama_v3.py calls them "step"."""
    return ranges[ranges["Name"] == "step"].reset_index(drop=True)


def step_windows(path):
    """(the windows of a process in which its measured steps ran, [(start, end), ...] in ns; how many steps these are).

    ([], 0) if the recording does not name them. With --timing step the ranges "step" close on the host before their
    kernels run, and one range "steps" holds all of them: it is the window. Otherwise each step is one, and what runs
    between them does not count. Raises Unreadable.
    """
    return windows_of(read_ranges(path))


def read_step_counters(path):
    """(a DataFrame with a row a kernel and a column a counter, the mean of a run; whether it is of the steps alone).

    Each pass, and each process, is limited to its own steps. If one of them names none or has no times, or if nothing
    was counted within them, all are of the whole run. Empty if nothing was counted at all. The units are the
    profiler's: FETCH_SIZE and WRITE_SIZE in KiB, ncu's in its base units. Raises Unreadable.
    """
    reader, files = find(path, "counters")
    if not files:
        return pd.DataFrame(), False
    whole, limited = [], []
    for file in files:
        windows, _ = windows_beside(reader, file)
        for chunk in filter(len, reader.counters(file)):
            whole.append(counter_sums(chunk))
            if windows and "Start" in chunk:
                limited.append(counter_sums(within_any(chunk, windows)))
    is_limited = len(limited) == len(whole) and any(map(len, limited))
    # The same counter in several files (processes, passes) is one measurement more, not another column.
    return counter_means(limited if is_limited else whole), is_limited or not reader.RECORDS_WARM_UP


def read_counters(path):
    """The table of read_step_counters."""
    table, _ = read_step_counters(path)
    return table


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
    """Those that the first pattern finds, but in what failed; in_passes: also in the folders of runs that counted."""
    for pattern in patterns:
        found = [(path, str(path.relative_to(folder))) for path in sorted(folder.rglob(pattern))]
        found = [(path, name) for path, name in found if ".failed/" not in name]
        if files := [path for path, name in found if in_passes or not COUNTING_PASS.search(name)]:
            return files
    return []


def dispatch_chunks(path):
    reader, files = find(path, "dispatches")
    if not files:
        kinds = [kind.PATTERNS.get(content, ()) for content in ("kernels", "dispatches") for kind in FORMATS]
        raise Unreadable(f"{path} holds no kernel statistics: neither {', '.join(sum(kinds, ()))}")
    for file in files:
        yield from reader.dispatches(file)


def in_order(chunks):
    return pd.concat([intervals(), *chunks], ignore_index=True).sort_values("Start", ignore_index=True, kind="stable")


def windows_beside(reader, file):
    """What step_windows gives, of the process that this file is of."""
    markers = reader.beside(file, "markers")
    return windows_of(in_order(reader.ranges(markers, "markers")) if markers and markers.exists() else intervals())


def windows_of(ranges):
    steps = steps_of(ranges)
    around = ranges[ranges["Name"] == "steps"]
    held = steps if around.empty else around
    windows = list(zip(held["Start"], held["End"], strict=True))
    count = len(within_any(steps, windows))
    return (windows, count) if count else ([], 0)
