"""Kernel statistics of a run as one table, whichever profiler recorded them, and the operation a kernel belongs to.

Understood are rocprofv3's kernel_stats and kernel_trace CSV files (ROCm 6 and 7), its rocpd databases (ROCm 7), the
summary that `rocpd summary` makes of them, and the files of tiny_llama_v3.py --profile, which come from torch.profiler.
"""

import contextlib
import functools
import gzip
import json
import re
import sqlite3
from pathlib import Path

import numpy as np
import pandas as pd

COLUMNS = ["Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage", "MinNs", "MaxNs", "StdDev"]
CHUNK_ROWS = 200_000  # of a trace that are in memory at a time

# The files of a folder that count, the first pattern that matches anything: a table before the trace it was made from.
STATISTICS = ("*kernel_stats.csv", "*kernels_summary.csv")
TRACES = ("*kernel_trace.csv", "*.db", "trace.json", "trace.json.gz")
# Of ranges on the host: CSV files, the category in a database, the categories in torch.profiler's trace.
HOST_RANGES = {
    "markers": ("*marker_api_trace.csv", "MARKER%", ("user_annotation",)),
    "calls": ("*hip_api_trace.csv", "HIP%", ("cuda_runtime", "cuda_driver")),
}

ROCPD_SUMMARY = {
    "DURATION (nsec)": "TotalDurationNs",
    "AVERAGE (nsec)": "AverageNs",
    "PERCENT (INC)": "Percentage",
    "MIN (nsec)": "MinNs",
    "MAX (nsec)": "MaxNs",
    "STD_DEV": "StdDev",
}
KERNEL_TRACE = {"Kernel_Name": "Name", "Start_Timestamp": "Start", "End_Timestamp": "End"}
API_TRACE = {"Function": "Name", "Start_Timestamp": "Start", "End_Timestamp": "End"}


class Unreadable(Exception):
    """A profile that cannot be read; the message names the file, what is wrong with it and what to do."""


def read_kernel_stats(path, window=None):
    """The kernels of a file, or of all processes of a folder: a DataFrame of COLUMNS, the largest total first.

    Times are in ns, Percentage is the share of all kernels' time (0 to 100), StdDev that of a sample. With a window,
    (start, end) in the trace's ns, only kernels that start within it count. No kernels at all: an empty table.
    """
    files = [] if window else files_of(path, STATISTICS)
    parts = [read_statistics(file) for file in files]
    if not files:
        chunks = (chunk for file in files_of(path, TRACES, needed=True) for chunk in dispatch_chunks(file))
        parts = [statistics_of(within(chunk, window)) for chunk in chunks]
    return merge(parts)


def read_dispatches(path, window=None):
    """Every kernel run: a DataFrame of Name (categorical), Start and End (ns), in the order of Start."""
    chunks = (within(chunk, window) for file in files_of(path, TRACES, needed=True) for chunk in dispatch_chunks(file))
    chunks = [chunk.astype({"Name": "category"}) for chunk in chunks if len(chunk)]
    if not chunks:
        return frame([])
    names = pd.api.types.union_categoricals([chunk["Name"] for chunk in chunks])
    dispatches = pd.concat(chunks, ignore_index=True).assign(Name=names)
    return dispatches.sort_values("Start", ignore_index=True, kind="stable")


def read_ranges(path, kind="markers"):
    """Ranges on the host: Name, Start and End (ns), in the order of Start; empty if none were recorded.

    Kind "markers" are those that the program named (roctx, NVTX, record_function), "calls" the HIP or CUDA API's.
    """
    parts = [ranges_of(file, kind) for file in files_of(path, (HOST_RANGES[kind][0], *TRACES[1:]))]
    return pd.concat([frame([]), *parts], ignore_index=True).sort_values("Start", ignore_index=True, kind="stable")


def step_window(path):
    """((start, end) of the measured steps in ns, how many they are), or (None, 0) if the trace does not name them."""
    ranges = read_ranges(path)
    steps = ranges[ranges["Name"] == "step"]
    return ((steps["Start"].min(), steps["End"].max()), len(steps)) if len(steps) else (None, 0)


def read_step_stats(path):
    """(the table of the kernels of the measured steps, how many steps), or (that of the whole run, 0)."""
    window, steps = step_window(path)
    has_warm_up = bool(files_of(path, ("*kernel_trace.csv", "*.db")))  # torch.profiler recorded nothing but the steps
    return read_kernel_stats(path, window if has_warm_up else None), steps


# ----------------------------------------------------------------------------------------------------------------------
# Files


def files_of(path, patterns, needed=False):
    """The path itself if it is a file of one of these kinds, or the files below it that the first pattern finds.

    Of a folder with counters, the passes (pmc_N, pass_N) are left out: counting slows kernels down.
    """
    path = Path(path)
    if not path.exists():
        raise Unreadable(f"{path} does not exist")
    if path.is_file() and patterns is STATISTICS:  # a table may have any name, and so may a trace
        return [path] if path.suffix == ".csv" and "Calls" in csv_header(path) else []
    if path.is_file():
        return [path] if needed or path.suffix != ".csv" or "Function" in csv_header(path) else []
    for pattern in patterns:
        found = [
            p for p in sorted(path.rglob(pattern)) if not re.search(r"(^|/)(pmc|pass)_\d+/", f"{p.relative_to(path)}")
        ]
        if found:
            return found
    if needed:
        raise Unreadable(f"{path} holds no kernel statistics: neither {', '.join((*STATISTICS, *patterns))}")
    return []


@contextlib.contextmanager
def reported(path):
    """Turns what the parsers complain of into Unreadable."""
    try:
        yield
    except (ValueError, sqlite3.Error, EOFError, OSError) as error:  # UnicodeDecodeError and pandas' are ValueErrors
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise Unreadable(f"{path} is damaged or incomplete ({lines[0]}): profile again") from error


def csv_header(path):
    """The columns of a CSV file. The profilers end every line, so a last one without its end was cut off."""
    with reported(path), open(path, "rb") as file:
        if file.seek(0, 2) == 0:
            raise Unreadable(f"{path} is empty: the program ended before the profiler wrote it")
        file.seek(-1, 2)
        if file.read() != b"\n":
            raise Unreadable(f"{path} is cut off in its last line: profile again")
        return list(pd.read_csv(path, nrows=0).columns)


def csv_chunks(path, columns, words=("Name",)):
    """Tables of the wanted columns under new names, CHUNK_ROWS at a time, at least one; all but words are numbers."""
    header = csv_header(path)
    missing = [name for name in columns if name not in header]
    if missing:
        raise Unreadable(f"{path} has no column {missing[0]}: it is not what its name says")
    with reported(path), pd.read_csv(path, usecols=list(columns), chunksize=CHUNK_ROWS) as reader:
        for chunk in reader:
            yield require_numbers(chunk.rename(columns=columns), path, words)


def require_numbers(table, path, words):
    """Refuses gaps, and words where numbers belong; SQL has no deviation of a single call."""
    if "StdDev" in table:
        table.loc[table["Calls"] == 1, "StdDev"] = 0.0
    numbers = table.drop(columns=list(words))
    if len(table) and (
        numbers.isna().any(axis=None) or not all(pd.api.types.is_numeric_dtype(kind) for kind in numbers.dtypes)
    ):
        raise Unreadable(f"{path} has rows without all their numbers: profile again")
    return table


def frame(rows):
    return pd.DataFrame(rows, columns=["Name", "Start", "End"]).astype(
        {"Name": object, "Start": "int64", "End": "int64"}
    )


def read_statistics(path):
    """A table of COLUMNS from a kernel_stats or `rocpd summary` CSV."""
    renamed = ROCPD_SUMMARY if "DURATION (nsec)" in csv_header(path) else {name: name for name in COLUMNS}
    return pd.concat(csv_chunks(path, {"Name": "Name", "Calls": "Calls", **renamed}))[COLUMNS]


def dispatch_chunks(path):
    """Name, Start and End of the kernels of one trace, CHUNK_ROWS at a time."""
    if path.suffix == ".db":
        yield from map(frame, query(path, 'SELECT name, start, "end" FROM kernels'))
    elif path.suffix == ".csv":
        yield from csv_chunks(path, KERNEL_TRACE)
    else:
        events = chrome_events(path)
        on_device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        yield chrome_frame(on_device or outermost([e for e in events if e["name"].startswith("aten::")]))


def ranges_of(path, kind):
    """Name, Start and End of the ranges of one trace."""
    _, category, chrome_categories = HOST_RANGES[kind]
    if path.suffix == ".db":
        sql = f"""SELECT name, start, "end" FROM regions WHERE category LIKE '{category}'"""
        return pd.concat(map(frame, query(path, sql)))
    if path.suffix == ".csv":
        return pd.concat(csv_chunks(path, API_TRACE))
    return chrome_frame([e for e in chrome_events(path) if e.get("cat") in chrome_categories])


def query(path, sql, columns=("Name", "Start", "End")):
    """The rows of a rocpd database, CHUNK_ROWS at a time, at least one table."""
    with (
        reported(path),
        contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection,
    ):
        ((size,),) = connection.execute("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size")
        if path.stat().st_size < size:
            raise Unreadable(f"{path} is cut off: {path.stat().st_size} of {size} bytes; profile again")
        cursor = connection.execute(sql)
        while rows := cursor.fetchmany(CHUNK_ROWS):
            yield pd.DataFrame(rows, columns=columns)
        yield pd.DataFrame([], columns=columns)


@functools.lru_cache(maxsize=1)
def chrome_events(path):
    """The complete events of a trace in Chrome's format."""
    with reported(path), gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
        events = json.load(file).get("traceEvents", [])
    return [event for event in events if event.get("ph") == "X"]


def chrome_frame(events):
    return frame([(e["name"], round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)) for e in events])


def outermost(events):
    """The events that no other of their thread holds."""
    found, ends = [], {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= ends.get(event["tid"], 0):
            ends[event["tid"]] = event["ts"] + event["dur"]
            found.append(event)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Statistics


def within(dispatches, window):
    return dispatches if window is None else dispatches[dispatches["Start"].between(*window)]


def statistics_of(dispatches):
    """A table of COLUMNS from Name, Start and End."""
    durations = (dispatches["End"] - dispatches["Start"]).groupby(dispatches["Name"].astype(object), sort=False)
    table = durations.agg(Calls="count", TotalDurationNs="sum", MinNs="min", MaxNs="max", StdDev="std")
    table["AverageNs"] = table["TotalDurationNs"] / table["Calls"]
    table["StdDev"] = table["StdDev"].fillna(0.0)  # of a single call
    return with_percentage(table.reset_index())


def merge(parts):
    """One table from those of several chunks, files or processes."""
    rows = pd.concat([pd.DataFrame(columns=COLUMNS), *parts]) if not parts else pd.concat(parts, ignore_index=True)
    table = rows.groupby("Name", sort=False).agg(
        Calls=("Calls", "sum"),
        TotalDurationNs=("TotalDurationNs", "sum"),
        MinNs=("MinNs", "min"),
        MaxNs=("MaxNs", "max"),
    )
    table["AverageNs"] = table["TotalDurationNs"] / table["Calls"]
    # Squared deviations from the common average: those within each part, and those of the parts' averages.
    squares = rows["StdDev"] ** 2 * (rows["Calls"] - 1)
    squares += rows["Calls"] * (rows["AverageNs"] - rows["Name"].map(table["AverageNs"]).astype(float)) ** 2
    table["StdDev"] = np.sqrt(squares.groupby(rows["Name"]).sum() / (table["Calls"] - 1).clip(lower=1))
    return with_percentage(table.reset_index())


def with_percentage(table):
    table["Percentage"] = 100 * table["TotalDurationNs"] / max(table["TotalDurationNs"].sum(), 1)
    return table.sort_values("TotalDurationNs", ascending=False, ignore_index=True, kind="stable")[COLUMNS]


# ----------------------------------------------------------------------------------------------------------------------
# Names

# The first pattern found in a kernel's name decides. Triton kernels keep the names of their functions; a matrix product
# is known by the library that made it, and which layer wanted it is not in its name.
OPERATIONS = {
    # tiny_llama_v3.py and nanogpt_triton
    r"^rmsnorm_kernel": "RMSNorm",
    r"^(rmsnorm_backward|column_sum)_kernel": "RMSNorm backward",
    r"^layer_?norm\w*backward|^_?layer_?norm_bwd": "LayerNorm backward",
    r"^_?layer_?norm": "LayerNorm",
    r"^flash_attention_backward": "attention backward",
    r"^flash_attention_kernel": "attention",
    r"^rope_kernel": "rotary embedding",
    r"^swiglu_kernel": "SwiGLU matrix product, naive",
    r"^swiglu_activation_backward_kernel": "SwiGLU backward",
    r"^swiglu_activation_kernel": "SwiGLU",
    r"^(cross_entropy|scale)_kernel": "cross-entropy",
    r"^embedding_backward_kernel": "embedding backward",
    r"^adamw_kernel": "optimizer",
    # PyTorch's fused attention: flash, cuDNN, memory-efficient, AOTriton
    r"(flash|fmha|sdpa|attention|attn|_efficient_).*(bwd|backward|bprop)|^bwd_(kernel|pre)": "attention backward",
    r"flash_fwd|fmha|sdpa|scaled_dot_product|flash_attention|attn_fwd": "attention",
    # libraries' matrix products: rocBLAS and hipBLASLt (Tensile), cuBLAS, CUTLASS
    r"^Cijk_|rocblas|hipblas|cublas|cutlass|nvjet|gemm|gemv|splitK|xmma|wgmma|aten::(mm|bmm|addmm|matmul|linear)$": (
        "matrix product"
    ),
    # what torch.compile generates
    r"^triton_(poi|per|red|tem|for)_": "fused by torch.compile",
    # PyTorch's own kernels, and on a CPU its operators
    r"(multi_tensor|foreach|[Ff]used).*([Aa]dam|addc)|aten::_(fused_adam|foreach_)": "optimizer",
    r"lpnorm|LpNorm|linalg_vector_norm|NormTwo": "gradient norm",
    r"nll_loss|log_softmax|LogSoftMax|cross_entropy": "cross-entropy",
    r"[Ss]oft_?[Mm]ax": "softmax",
    r"embedding_(dense_)?backward|embedding.*[Gg]rad|compute_grad_weight": "embedding backward",
    r"embedding|index_?select|indexSelect|gather": "embedding",
    r"(layer|rms)_?norm.*([Bb]ackward|[Gg]rad|[Bb]wd)|GammaBeta": "norm backward",
    r"(layer|rms)_?norm|RowwiseMoments": "norm",
    r"Mem(cpy|set)|copy|Fill|fill|zero_|__amd_rocclr|CatArray|aten::(cat|clone|contiguous)": "copy or fill",
    r"distribution|philox|random": "random numbers",
    r"reduce|aten::(sum|mean|max|norm)": "reduction",
    r"elementwise|aten::(add|mul|div|sub|pow|rsqrt|sqrt|silu|sigmoid|neg|exp|addcmul|addcdiv|lerp)\w*$": "elementwise",
}
OPERATION_PATTERNS = [(re.compile(pattern), operation) for pattern, operation in OPERATIONS.items()]


@functools.cache
def operation_of(kernel_name):
    """The operation of the model that a kernel computes, or "other"."""
    return next((operation for pattern, operation in OPERATION_PATTERNS if pattern.search(kernel_name)), "other")


def short_name(kernel_name, width=60):
    """A kernel's name without the decoration of C++ and cuBLAS, cut in its middle to the width."""
    name = re.sub(r"^void |\(anonymous namespace\)::|\bat::native::|\bat::", "", kernel_name)
    name = re.sub(r"\((?!anonymous)[^()]*\)( \[clone[^]]*\])?$", "", name)
    name = re.sub(r"^cutlass::Kernel2<(\w+)>$", r"\1", name)
    name = re.sub(r"(b?f\d+)(_?\1)+(?=_)", r"\1", name)  # cuBLAS names the type of each operand
    name = re.sub(r"(tilesize\w+?)_stage\d\w+_execute((_split_k)?)_kernel__5x_cublas$", r"\1\2", name)
    if len(name) <= width:
        return name
    head = (width - 1) * 2 // 3
    return f"{name[:head]}…{name[len(name) - (width - 1 - head) :]}"
