"""What rocprofv3 leaves behind: files with the columns of ROCm 6.4 to 10.1, filled with made-up records."""

import contextlib
import csv
import json
import random
import sqlite3
import statistics
from typing import NamedTuple

KERNELS = {  # a step's kernels: name, (dispatches a step, ns)
    "Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x128x64_MI16x16x1": (6, 180_000),
    "rmsnorm_kernel": (4, 9_000),
    "flash_attention_kernel": (2, 60_000),
    "flash_attention_backward_kernel": (2, 130_000),
    "swiglu_activation_kernel": (2, 15_000),
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, 1>(int, float)": (3, 4_000),
}
WARM_UP_KERNEL = "triton_poi_autotuned_0"  # before the first step
WARM_UP_SLOWNESS = 20  # of the kernels of the warm-up step: caches and clocks are cold
DIAGNOSTIC = "void at::native::lpnorm_cleanup<float>(float*)"  # between the steps, or after the last
LAUNCH = "hipModuleLaunchKernel"
START = 5_343_067_615_713


class Record(NamedTuple):
    name: str
    start: int
    end: int

    @property
    def duration(self):
        return self.end - self.start


class Run(NamedTuple):
    dispatches: list = ()
    ranges: list = ()
    api_calls: list = ()
    copies: list = ()

    def in_steps(self):
        """The dispatches of the measured steps, which is what the reports are to find."""
        windows = [r for r in self.ranges if r.name == "steps"] or [r for r in self.ranges if r.name == "step"]
        return [d for d in self.dispatches if any(w.start <= d.start <= w.end for w in windows)]

    def later(self, ns):
        return Run(*([r._replace(start=r.start + ns, end=r.end + ns) for r in part] for part in self))

    def renamed(self):
        """As --kernel-rename records it: a kernel carries the name of the innermost range around its launch."""
        launches = [call for call in self.api_calls if call.name == LAUNCH]
        names = []
        for dispatch, launch in zip(self.dispatches, launches, strict=True):
            around = [r for r in self.ranges if r.start <= launch.start < r.end]
            names.append(min(around, key=lambda r: r.duration).name if around else dispatch.name)
        dispatches = [d._replace(name=name) for d, name in zip(self.dispatches, names, strict=True)]
        return self._replace(dispatches=dispatches)


def make_run(steps, one_window=False):
    """A run of a few steps after a slow one of warm-up: kernels one after the other, 2 us apart.

    As with --timing phases, each step ends with a synchronization within its range, and a diagnostic kernel follows.
    With one_window, as with --timing step: the ranges "step" close before most of their kernels start, and a range
    "steps" lasts until the last of them has ended.
    """
    rng = random.Random(steps)
    run, now = Run([], [], [], []), START

    def dispatch(name, ns, launched=None):
        nonlocal now
        launched = now - 5_000 if launched is None else launched
        now = max(now, launched + 5_000)
        duration = round(ns * rng.uniform(0.95, 1.05))
        run.api_calls.append(Record(LAUNCH, launched, launched + 3_500))
        run.dispatches.append(Record(name, now, now + duration))
        now += duration + 2_000

    def dispatch_step(slowness=1):
        for name, (count, ns) in KERNELS.items():
            for _ in range(count):
                dispatch(name, slowness * ns)

    def launch_step(host):
        """Returns when the host has launched the kernels of a step, all of them before the second has run."""
        for name, (count, ns) in KERNELS.items():
            for _ in range(count):
                dispatch(name, ns, host)
                host += 4_000
        return host

    dispatch(WARM_UP_KERNEL, 50_000_000)
    dispatch_step(WARM_UP_SLOWNESS)
    host = window = now
    for _ in range(steps):
        if one_window:
            end = launch_step(host)
            run.ranges.append(Record("step", host, end))
            host = end + 1_000
        else:
            now += 40_000
            run.copies.append(Record("MEMORY_COPY_HOST_TO_DEVICE", now, now + 8_000))
            now += 20_000
            begin = now - 10_000
            dispatch_step()
            run.api_calls.append(Record("hipDeviceSynchronize", begin + 5_000, now))
            run.ranges.append(Record("step", begin, now))
            run.ranges.append(Record("forward", begin, (begin + now) // 2))
            run.ranges.append(Record("backward", (begin + now) // 2, now))
            now += 6_000
            dispatch(DIAGNOSTIC, 30_000)
    if one_window:
        run.ranges.append(Record("steps", window, now))
        now += 6_000
        dispatch(DIAGNOSTIC, 30_000)
    return run


def by_name(records):
    groups = {}
    for record in records:
        groups.setdefault(record.name, []).append(record.duration)
    return groups


def write_rows(path, header, rows):
    """Write rows, as dicts, with 0 in the columns that they lack."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        style = dict(restval=0, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
        writer = csv.DictWriter(file, header.split(","), **style)
        writer.writeheader()
        writer.writerows(rows)


def write_stats(path, records):
    """A _stats table; nothing without records, as rocprofv3 does."""
    total, rows = sum(record.duration for record in records), []
    for name, ns in sorted(by_name(records).items(), key=lambda item: -sum(item[1])):
        mean, spread = statistics.fmean(ns), statistics.stdev(ns) if len(ns) > 1 else 0.0
        rows.append([name, len(ns), sum(ns), mean, 100 * sum(ns) / total, min(ns), max(ns), spread])
    header = "Name,Calls,TotalDurationNs,AverageNs,Percentage,MinNs,MaxNs,StdDev"
    if rows:
        write_rows(path, header, [dict(zip(header.split(","), row, strict=True)) for row in rows])


# The columns of ROCm 6 and of newer releases.
RESOURCES = ",Workgroup_Size_X,Workgroup_Size_Y,Workgroup_Size_Z,Grid_Size_X,Grid_Size_Y,Grid_Size_Z"
KERNEL_TRACE = (
    "Kind,Agent_Id,Queue_Id,Thread_Id,Dispatch_Id,Kernel_Id,Kernel_Name,Correlation_Id,Start_Timestamp,End_Timestamp,"
    "Private_Segment_Size,Group_Segment_Size" + RESOURCES,
    "Kind,Agent_Id,Queue_Id,Stream_Id,Thread_Id,Dispatch_Id,Kernel_Id,Kernel_Name,Correlation_Id,Start_Timestamp,"
    "End_Timestamp,LDS_Block_Size,Scratch_Size,VGPR_Count,Accum_VGPR_Count,SGPR_Count" + RESOURCES,
)
API_TRACE = "Domain,Function,Process_Id,Thread_Id,Correlation_Id,Start_Timestamp,End_Timestamp"
COUNTER_COLLECTION = (
    "Correlation_Id,Dispatch_Id,Agent_Id,Queue_Id,Process_Id,Thread_Id,Grid_Size,Kernel_Id,Kernel_Name,Workgroup_Size,"
    "LDS_Block_Size,Scratch_Size,VGPR_Count,Accum_VGPR_Count,SGPR_Count,Counter_Name,Counter_Value,Start_Timestamp,"
    "End_Timestamp"
)


def times_of(record):
    return {"Start_Timestamp": record.start, "End_Timestamp": record.end}


def write_kernel_trace(path, release, dispatches, streams=()):
    """The kernels; streams: that of each, which ROCm 7 names."""
    rows = [{"Kind": "KERNEL_DISPATCH", "Kernel_Name": d.name} | times_of(d) for d in dispatches]
    for row, stream in zip(rows, streams, strict=False):
        row["Stream_Id"] = stream
    write_rows(path, KERNEL_TRACE[release >= (7, 0)], rows)


def write_api_trace(path, domain, records):
    """The calls of a domain, or the ranges of roctx by their labels."""
    write_rows(path, API_TRACE, [{"Domain": domain, "Function": r.name} | times_of(r) for r in records])


def write_markers(path, release, ranges):
    write_api_trace(path, "MARKER_CORE_API" if release < (7, 0) else "MARKER_CORE_RANGE_API", ranges)


def write_agent_info(path):
    write_rows(path, "Node_Id,Agent_Type,Name", [{"Agent_Type": "GPU", "Name": "gfx942"}])


def counter_value(counter, record):
    """Plausible and reproducible: percentages below 100, KiB and counts in proportion to the kernel's time."""
    if counter in ("VALUUtilization", "VALUBusy", "MfmaUtil", "OccupancyPercent"):
        return 60.0
    if counter == "MeanOccupancyPerCU":
        return 8.0
    factors = {"FETCH_SIZE": 0.5, "WRITE_SIZE": 0.25, "TCC_HIT_sum": 3.0, "TCC_MISS_sum": 1.0}
    return factors.get(counter, 2.0) * (record.duration // 100)


def write_counters(path, dispatches, counters):
    """A row for each counter of a dispatch."""
    rows = [
        {"Kernel_Name": d.name, "Counter_Name": counter, "Counter_Value": counter_value(counter, d)} | times_of(d)
        for d in dispatches
        for counter in counters
    ]
    write_rows(path, COUNTER_COLLECTION, rows)


# What the host's regions are called: a range of roctx by the function that opens it. Its label is in the data.
ROCTX_RANGE = "roctxThreadRangeA"


def write_rocpd(path, run, counters=(), streams=(), **process):
    """A database with the views of rocprofv3 7.0 as tables, and the columns that are read; one that exists grows.

    process: the guid and the pid of these rows, in columns that databases of several processes have.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    regions = [("MARKER_CORE_RANGE_API", ROCTX_RANGE, json.dumps({"message": r.name}), *r[1:]) for r in run.ranges]
    regions += [("HIP_RUNTIME_API_EXT", call.name, "{}", *call[1:]) for call in run.api_calls]
    kernels, labels = [(*d, d.duration) for d in run.dispatches], "".join(f", {name}" for name in process)
    if streams:
        kernels = [(*kernel, stream) for kernel, stream in zip(kernels, streams, strict=True)]
    values = [(d.name, name, counter_value(name, d), d.start) for d in run.dispatches for name in counters]
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        for table, columns, rows in (
            ("kernels", 'name, start, "end", duration' + ", stream_id" * bool(streams), kernels),
            ("regions", 'category, name, extdata, start, "end"', regions),
            ("counters_collection", "kernel_name, counter_name, value, start", values),
        ):
            connection.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns}{labels})")
            marks = ", ".join("?" for _ in f"{columns}{labels}".split(","))
            connection.executemany(f"INSERT INTO {table} VALUES ({marks})", [(*r, *process.values()) for r in rows])


def change(path, *statements):
    """Change a database by statements, each a list of SQL and its values."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        for statement, *values in statements:
            connection.execute(statement, values)


def write_results_json(path, *runs, streams=()):
    """rocprofv3's own JSON of processes, with the fields that are read. Records have numbers in the place of names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rocprofiler-sdk-tool": [process_of(run, streams) for run in runs]}))


def process_of(run, streams):
    kernels, ranges = (
        [{"start_timestamp": record.start, "end_timestamp": record.end} for record in part]
        for part in (run.dispatches, run.ranges)
    )
    for n, kernel in enumerate(kernels):
        kernel |= {"dispatch_info": {"kernel_id": n}} | ({"stream_id": {"handle": streams[n]}} if streams else {})
    symbols = [{"kernel_id": n, "formatted_kernel_name": d.name} for n, d in enumerate(run.dispatches)]
    return {
        "kernel_symbols": symbols[::-1],  # their place is not their number
        "strings": {"marker_api": [{"key": n, "value": each.name} for n, each in enumerate(run.ranges)]},
        "buffer_records": {
            "kernel_dispatch": kernels,
            "marker_api": [times | {"correlation_id": {"internal": n}} for n, times in enumerate(ranges)],
        },
    }


def chrome_trace(*rows):
    """The text of torch.profiler's trace, with events of these categories, names, times, durations, and threads."""
    keys = ("cat", "name", "ts", "dur", "tid")
    return json.dumps({"traceEvents": [{"ph": "X", "tid": 1} | dict(zip(keys, row, strict=False)) for row in rows]})
