"""Readers of recordings: the reports get the same tables from every profiler.

Each format has a module of its own:

    ncu             hardware counters of NVIDIA Nsight Compute, CSV
    rocprofv3       CSV files of rocprofv3
    rocprofv3_json  its JSON
    rocpd           its databases, since ROCm 7
    torch_trace     traces of torch.profiler

Its PATTERNS are {content: pattern of the names of files with it, to which gzip adds .gz}, and its read(path, content)
returns a table:

    dispatches, counted    every kernel run: Name, Start and End (ns); counted, slower, while counters were read
    markers, calls         ranges of the program (roctx, NVTX, record_function), calls of HIP or CUDA: the same columns
    statistics             made by the profiler, of the whole run: Name, Calls, TotalDurationNs, MinNs and MaxNs
    counters               every kernel run: Name, Counter, Value and, but for ncu, Start (ns)
    memory                 Total, the bytes that are allocated on GPUs after each change

Tables also have those of files.LABELS that the format knows: the process, the GPU, the queue and the stream of a row.
What is read of any format passes files.usable(), which leaves out rows whose figures cannot be and makes names
printable, and kernels pass files.one_at_a_time().
"""

import fnmatch
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from profilers.kernel_names import short_name
from profilers.readers import ncu, rocpd, rocprofv3, rocprofv3_json, torch_trace
from profilers.readers.files import (
    PROCESS,
    OtherFormat,
    Unreadable,
    intervals,
    name_of,
    note,
    note_slowed,
    one_at_a_time,
    reported,
    usable,
    within,
)
from tiny_llama.spans import OPERATOR

# As in rocprofv3. Times are in ns, Percentage is the share of all kernels' time (0 to 100), StdDev that of a sample.
COLUMNS = ["Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage", "MinNs", "MaxNs", "StdDev"]

# A folder may have several formats: the first one with the requested content is read.
FORMATS = (ncu, rocprofv3, rocpd, rocprofv3_json, torch_trace)
NAMED_BY_A_PERSON = {"*trace.json": "*.json", "*kernel_stats.csv": "*.csv"}  # a single file may have such a name
OTHERS = {  # files that are not read, and the remedy
    "results.csv": "is of rocprof v1: record with rocprofv3",
    "*.stats.csv": "is of rocprof v1: record with rocprofv3",
    "*.pftrace": "is for Perfetto alone: record with --output-format csv",
    "*.proto": "is for Perfetto alone: record with --output-format csv",
    "*pmc_perf*.csv": "is of rocprof-compute: rocprof-compute analyze -p FOLDER",
}
FAILED = r"\.failed/"
COUNTING_PASS = r"(?:^|/)((?:pmc|pass)_\d+)/"  # runs with counters, which are slower


class Process(NamedTuple):
    """What a process recorded."""

    dispatches: pd.DataFrame
    ranges: pd.DataFrame
    windows: list  # [(start, end), ...] in ns, of the measured steps
    steps: int
    measured: pd.DataFrame  # the dispatches of the measured steps, or all if these are not known
    calls: Callable  # which returns the process's calls of HIP or CUDA, the same columns


def read_processes(path):
    """Read the processes that name their measured steps, or all if none does: a list of Process. Raises Unreadable.

    With --timing step the ranges "step" end on the host before their kernels run, and the window is the range "steps"
    around all of them. Otherwise each step is a window, and what runs between steps is left out.
    """
    found, files = [], {}  # {the recording of a process: its file}
    for file, table in read_all(path, "dispatches") or read_counted(path):
        for labels, rows, ranges in of_each_process(file, table):
            # Of a database that rocpd has merged, the original may lie in the same folder.
            recording = tuple(rows[[label for label in PROCESS if label in rows]].head(1).to_numpy().flat)
            if "Guid" in rows and any(recording) and files.setdefault(recording, file) != file:
                note(f"{file}: process {recording[-1]} is in {files[recording]} too: it counts once")
                continue
            found.append(process_of(file, labels, in_order([rows]), in_order([ranges])))
    return [process for process in found if process.steps] or found


def read_counted(path):
    """Return read_all() of kernels that ran while counters were read, and note it."""
    tables = read_all(path, "counted")
    if tables:
        note_slowed(tables[0][0])
    return tables


def process_of(file, labels, dispatches, ranges):
    """Return the Process of a file whose rows have these labels."""
    windows, steps = steps_of(file, ranges)
    measured = dispatches
    if steps and not records_only_steps(file, ranges):
        measured = within(dispatches, *windows)
        if measured.empty and len(dispatches):
            reason = f"none of its {len(dispatches)} kernels starts within one of its {steps} steps"
            note(f"{file}: {reason}, as if by another clock: the whole recording counts")
            windows, steps, measured = [], 0, dispatches
    if windows:
        note_what_exceeds(file, measured, windows, steps)
    return Process(dispatches, ranges, windows, steps, measured, functools.partial(calls_of, file, labels))


def note_what_exceeds(file, measured, windows, steps):
    """Note it if a kernel lasts longer than any of the windows, or all together longer than all windows."""
    took, lengths = measured["End"] - measured["Start"], [end - start for start, end in windows]
    if took.max() > max(lengths):
        name = measured["Name"][took.idxmax()]
        told = f"{(took > max(lengths)).sum()} kernels last longer than any step, {name} {took.max() / 1e6:.3f} ms of "
        note(f"{file}: {told}{max(lengths) / 1e6:.3f}: a stamp is wrong, or steps do not wait for their kernels")
    elif took.sum() > sum(lengths):
        told = f"kernels add up to {took.sum() / steps / 1e6:.3f} ms a step of {sum(lengths) / steps / 1e6:.3f}"
        note(f"{file}: {told}: several streams or GPUs, or wrong stamps, or steps do not wait for their kernels")


def calls_of(file, labels):
    """Return the calls of HIP or CUDA of the process of a file whose rows have these labels."""
    tables = [rows for _, rows in read_beside(file, "hip_api_trace", "calls")]
    return in_order([rows[has_labels(rows, labels)] for rows in tables])


def read_kernels(path):
    """Return (a table of COLUMNS, the number of steps in it, the number of processes in it). Raises Unreadable.

    The table has the kernels of the measured steps, the largest total first. With 0 steps, an unknown number, it is of
    the whole run. Without kernels it is empty.
    """
    path, processes = Path(path), read_processes(path)
    steps = sum(process.steps for process in processes)
    # A profiler's own table knows neither steps nor stamps that cannot be. But of a CPU, torch.profiler's has the time
    # of each operator without those inside it.
    are_operators = all(process.dispatches["Name"].str.match(OPERATOR).all() for process in processes)
    is_whole = path.is_dir() and all(process.measured is process.dispatches for process in processes)
    tables = read_all(path, "statistics") if not processes or is_whole and are_operators else []
    if tables:
        kernels = pd.concat([table for _, table in tables]).groupby("Name", sort=False)
        sums = {"Calls": "sum", "TotalDurationNs": "sum", "MinNs": "min", "MaxNs": "max"}
        return completed(kernels.agg(sums)), steps, len(processes or tables)
    if not processes:
        names = "*kernel_trace.csv, *kernel_stats.csv, *.db, *_results.json, *trace.json"
        raise Unreadable(f"{path} holds no kernels that a profiler recorded, in one of {names}{others_in(path)}")
    return statistics_of(pd.concat([process.measured for process in processes])), steps, len(processes)


def others_in(path):
    """Return what a profile has in the place of what was asked for, and the remedy; "" if that is not known."""
    named = ((file, remedy) for file in files_of(path) for pattern, remedy in OTHERS.items() if is_named(file, pattern))
    return next((f"; {file} {remedy}" for file, remedy in named), "")


def read_kernel_stats(path):
    """Return the table of read_kernels() alone."""
    return read_kernels(path)[0]


def read_step_stats(path):
    """Return the table of read_kernels() and the number of steps."""
    return read_kernels(path)[:2]


def read_ranges(path, content="markers"):
    """Read "markers", "calls" or "dispatches": Name, Start and End (ns), in the order of Start. Raises Unreadable."""
    return in_order([rows for _, rows in read_all(path, content)])


read_dispatches = functools.partial(read_ranges, content="dispatches")


def read_step_counters(path):
    """Return (a DataFrame with a row for each kernel and a column for each counter, whether of the steps only).

    Values are means of a run. Each pass and each process is limited to its own steps. If one of them names no steps, or
    if nothing was counted in the steps, all values are of the whole run. The table is empty if nothing was counted. The
    units are those of the profiler: FETCH_SIZE and WRITE_SIZE in KiB, those of ncu in base units. Raises Unreadable.
    """
    whole, limited = [], []
    for file, table in read_all(path, "counters"):
        for _, rows, ranges in of_each_process(file, table):
            windows, _ = steps_of(file, ranges)
            if len(rows):
                rows = rows.assign(Pass=pass_of(file))
                whole.append(rows)
                limited.append(rows if records_only_steps(file, ranges) else within(rows, *windows))
    if not whole:
        return pd.DataFrame(), False
    is_limited = all(map(len, limited))
    rows = pd.concat(limited if is_limited else whole)
    runs = rows.groupby(["Name", "Pass", "Counter"]).size().groupby(["Name", "Pass"]).max().unstack(fill_value=0)
    uneven = runs[runs.min(axis="columns") < runs.max(axis="columns")]
    if len(uneven):
        told = ", ".join(f"{count} in {name}" for name, count in uneven.iloc[0].items())
        note(
            f"{path}: {len(uneven)} of {len(runs)} kernels ran more often in one pass than in another, such as "
            f"{short_name(uneven.index[0])} ({told}): what stands side by side is of different runs, or missing"
        )
    # The same counter in several files (processes, passes) adds measurements, not columns.
    return rows.groupby(["Name", "Counter"])["Value"].mean().unstack("Counter"), is_limited


def read_peak_memory(path):
    """Return the most bytes that a process had allocated on GPUs at a time, warm-up included; 0 if unknown."""
    try:
        return max((table["Total"].max() for _, table in read_all(path, "memory") if len(table)), default=0)
    except Unreadable:  # such as a damaged database beside the tables of a report
        return 0


# ----------------------------------------------------------------------------------------------------------------------
# Files


def files_of(path):
    """Return the files below a folder in the order of their paths, or a file itself."""
    return sorted(file for file in path.rglob("*") if not file.is_dir()) if path.is_dir() else [path]


def is_named(file, pattern):
    """Return whether a file has such a name, or had it before gzip."""
    return fnmatch.fnmatchcase(name_of(file), pattern)


def pass_of(file):
    """Return the name of the pass that wrote a file, as pass_1; "" if a run had only one."""
    return "".join(re.findall(COUNTING_PASS, str(file))[-1:])


def read_all(path, content):
    """Return [(file, what its reader returns)] of the files with this content: the path itself, or files below it."""
    path = Path(path)
    if not path.exists():
        raise Unreadable(f"{path} does not exist")
    left_out = re.compile(FAILED if content in ("counters", "counted") else f"{FAILED}|{COUNTING_PASS}")
    files = [file for file in files_of(path) if file == path or not left_out.search(str(file.relative_to(path)))]
    patterns = [pattern for kind in FORMATS for pattern in kind.PATTERNS.values()]
    has_own_name = any(is_named(path, pattern) for pattern in patterns)
    named_by_a_person = {} if has_own_name or path.is_dir() else NAMED_BY_A_PERSON
    found = []
    for kind in FORMATS:
        if found or content not in kind.PATTERNS:
            continue
        pattern = named_by_a_person.get(kind.PATTERNS[content], kind.PATTERNS[content])
        of_kind = [file for file in files if is_named(file, pattern)]
        if content == "counted":  # each pass runs all kernels again
            of_kind = [file for file in of_kind if pass_of(file) == pass_of(of_kind[0])]
        for file in of_kind:
            try:
                with reported(file):
                    rows = usable(file, kind.read(file, content))
                    if content in ("dispatches", "counted") and tell_processes(rows, ranges_beside(file)):
                        rows = one_at_a_time(file, rows)
                    found.append((file, rows))
            except OtherFormat as error:  # in a folder it may lie beside good files
                if file == path:
                    raise
                note(error)
    return found


def read_beside(file, name, content):
    """Return read_all() of the file with other content of the same recording."""
    # The CSV files of a process have the same prefix; other files have all content.
    beside = Path(re.sub(r"(kernel_trace|counter_collection)(?=\.csv(\.gz)?$)", name, str(file)))
    return read_all(beside, content) if beside.exists() else []


def ranges_beside(file):
    """Return the ranges of all processes in a file."""
    return pd.concat([intervals(), *(rows for _, rows in read_beside(file, "marker_api_trace", "markers"))])


def tell_processes(rows, ranges):
    """Return whether rows say of which process they are, if there are several. Else their queues may be alike."""
    telling = [label for label in PROCESS if label in ranges and ranges[label].nunique() > 1]
    return not telling or any(label in rows for label in telling)


def of_each_process(file, table):
    """Yield (labels, its rows of a table, its ranges) of each process in a file, in the order of their first rows.

    Rows and ranges belong together by the labels that both have. If these tell no processes apart, the file is of one.
    """
    ranges = ranges_beside(file)
    shared = [label for label in PROCESS if label in table and (label in ranges or ranges.empty)]
    if not shared or len(pd.concat([table[shared], ranges.reindex(columns=shared)]).drop_duplicates()) < 2:
        yield {}, table, ranges
        return
    for values in table[shared].drop_duplicates().itertuples(index=False):
        labels = dict(zip(shared, values, strict=True))
        yield labels, table[has_labels(table, labels)], ranges[has_labels(ranges, labels)]


def has_labels(rows, labels):
    """Return for each row whether it has these labels, as far as the table has them."""
    known = {label: value for label, value in labels.items() if label in rows}
    return (rows[list(known)] == list(known.values())).all(axis="columns")


def steps_of(file, ranges):
    """Return (windows, the number of steps) of a process: see Process."""
    ranges = ranges[ranges["Start"] < ranges["End"]]  # a mark at the beginning of a step is none
    steps, around = (ranges[ranges["Name"] == name] for name in ("step", "steps"))  # as tiny_llama_v3.py names them
    held = around if len(steps) and len(around) else steps
    windows = []
    for start, end in sorted(zip(held["Start"], held["End"], strict=True)):
        if windows and start < windows[-1][1]:
            note(f"{file}: steps overlap, as of several processes or threads: figures are means over all of them")
            windows[-1] = windows[-1][0], max(end, windows[-1][1])
        else:
            windows.append((start, end))
    return windows, len(steps)


def records_only_steps(file, ranges):
    """Return whether a file has no warm-up: the script profiles measured steps only, and ncu counts within "step".

    The whole run of another program has a range "program" around it.
    """
    is_trace = is_named(file, "*.json") and not is_named(file, rocprofv3_json.FILES)
    return is_named(file, "ncu_raw.csv") or is_trace and not (ranges["Name"] == "program").any()


def in_order(tables):
    """Return the rows of all these tables, in the order of Start."""
    rows = pd.concat([intervals(), *map(intervals, tables)], ignore_index=True)
    return rows.sort_values("Start", ignore_index=True, kind="stable")


# ----------------------------------------------------------------------------------------------------------------------
# Statistics


def statistics_of(dispatches):
    """Compute a table of COLUMNS from Name, Start and End (ns)."""
    durations = (dispatches["End"] - dispatches["Start"]).groupby(dispatches["Name"], sort=False)
    table = durations.agg(Calls="count", TotalDurationNs="sum", MinNs="min", MaxNs="max", StdDev="std")
    return completed(table.fillna(0.0))  # the deviation of a single call


def completed(table):
    """Add the columns that follow from the others, the largest total first. Tables of a profiler have no StdDev."""
    total = table["TotalDurationNs"]
    table = table.assign(AverageNs=total / table["Calls"], Percentage=100 * total / max(total.sum(), 1))
    table = table.sort_values("TotalDurationNs", ascending=False, kind="stable")
    return table.rename_axis("Name").reset_index().reindex(columns=COLUMNS)
