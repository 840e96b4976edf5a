"""What rocprofv3 leaves behind: CSV headers and rocpd schema of ROCm 6.2 to 10.1, filled with made-up records."""

import csv
import json
import random
import sqlite3
import statistics
import uuid
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
    dispatches: list
    ranges: list
    api_calls: list
    copies: list

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
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def write_stats(path, records):
    """A _stats table; nothing without records, as rocprofv3 does."""
    if not records:
        return
    total = sum(record.duration for record in records)
    rows = []
    for name, ns in sorted(by_name(records).items(), key=lambda item: -sum(item[1])):
        spread = statistics.stdev(ns) if len(ns) > 1 else 0.0
        rows.append([name, len(ns), sum(ns), statistics.fmean(ns), 100 * sum(ns) / total, min(ns), max(ns), spread])
    header = "Name,Calls,TotalDurationNs,AverageNs,Percentage,MinNs,MaxNs,StdDev".split(",")
    write_rows(path, header, rows)


SIZES = "Workgroup_Size_X,Workgroup_Size_Y,Workgroup_Size_Z,Grid_Size_X,Grid_Size_Y,Grid_Size_Z".split(",")


def write_kernel_trace(path, release, dispatches):
    times = "Kernel_Name,Correlation_Id,Start_Timestamp,End_Timestamp"
    if release < (7, 0):
        header = f"Kind,Agent_Id,Queue_Id,Thread_Id,Dispatch_Id,Kernel_Id,{times},"
        header += "Private_Segment_Size,Group_Segment_Size"
        middle, agent, resources = [1, 10470], 1, [0, 8192]
    else:
        header = f"Kind,Agent_Id,Queue_Id,Stream_Id,Thread_Id,Dispatch_Id,Kernel_Id,{times},"
        header += "LDS_Block_Size,Scratch_Size,VGPR_Count,Accum_VGPR_Count,SGPR_Count"
        middle, agent, resources = [1, 0, 10470], "Agent 1", [8192, 0, 64, 0, 48]
    rows = [
        ["KERNEL_DISPATCH", agent, *middle, i, 13, d.name, i, d.start, d.end, *resources, 256, 1, 1, 262144, 1, 1]
        for i, d in enumerate(dispatches, 1)
    ]
    write_rows(path, header.split(",") + SIZES, rows)


def write_api_trace(path, domain, records):
    header = "Domain,Function,Process_Id,Thread_Id,Correlation_Id,Start_Timestamp,End_Timestamp".split(",")
    write_rows(path, header, [[domain, r.name, 10470, 10470, i, r.start, r.end] for i, r in enumerate(records, 1)])


def write_markers(path, release, ranges):
    """The ranges of roctx, by their labels."""
    write_api_trace(path, "MARKER_CORE_API" if release < (7, 0) else "MARKER_CORE_RANGE_API", ranges)


def write_agent_info(path, arch="gfx942"):
    write_rows(path, ["Node_Id", "Agent_Type", "Name"], [[0, "CPU", "AMD EPYC"], [1, "GPU", arch]])


def counter_value(counter, record):
    """Plausible and reproducible: percentages below 100, KiB and counts in proportion to the kernel's time."""
    if counter in ("VALUUtilization", "VALUBusy", "MfmaUtil", "OccupancyPercent"):
        return 60.0
    if counter == "MeanOccupancyPerCU":
        return 8.0
    factors = {"FETCH_SIZE": 0.5, "WRITE_SIZE": 0.25, "TCC_HIT_sum": 3.0, "TCC_MISS_sum": 1.0}
    return factors.get(counter, 2.0) * (record.duration // 100)


def write_counters(path, release, dispatches, counters):
    header = "Correlation_Id,Dispatch_Id,Agent_Id,Queue_Id,Process_Id,Thread_Id,Grid_Size,Kernel_Id,Kernel_Name,"
    header += "Workgroup_Size,LDS_Block_Size,Scratch_Size,VGPR_Count,"
    header += "Accum_VGPR_Count,SGPR_Count," if release >= (6, 4) else "SGPR_Count,"
    header += "Counter_Name,Counter_Value" + (",Start_Timestamp,End_Timestamp" if release >= (6, 3) else "")
    agent = 1 if release < (7, 0) else "Agent 1"
    registers = [64, 0, 48] if release >= (6, 4) else [64, 48]
    rows = []
    for i, d in enumerate(dispatches, 1):
        fixed = [i, i, agent, 1, 10470, 10470, 262144, 13, d.name, 256, 8192, 0, *registers]
        times = [d.start, d.end] if release >= (6, 3) else []
        rows += [[*fixed, counter, counter_value(counter, d), *times] for counter in counters]
    write_rows(path, header.split(","), rows)


# Columns of the tables that hold data; the others of the schema stay empty.
ROCPD_TABLES = {
    "metadata": "id INTEGER PRIMARY KEY, tag TEXT, value TEXT",
    "string": "id INTEGER PRIMARY KEY, guid TEXT, string TEXT UNIQUE",
    "info_agent": "id INTEGER PRIMARY KEY, guid TEXT, type TEXT, absolute_index INTEGER, name TEXT",
    "info_process": "id INTEGER PRIMARY KEY, guid TEXT, pid INTEGER, command TEXT",
    "info_thread": "id INTEGER PRIMARY KEY, guid TEXT, pid INTEGER, tid INTEGER, name TEXT",
    "info_kernel_symbol": "id INTEGER PRIMARY KEY, guid TEXT, kernel_name TEXT, display_name TEXT",
    "info_pmc": "id INTEGER PRIMARY KEY, guid TEXT, agent_id INTEGER, name TEXT, symbol TEXT",
    "event": "id INTEGER PRIMARY KEY, guid TEXT, category_id INTEGER, extdata JSONB DEFAULT '{}' NOT NULL",
    "pmc_event": "id INTEGER PRIMARY KEY, guid TEXT, event_id INTEGER, pmc_id INTEGER, value REAL",
    "region": "id INTEGER PRIMARY KEY, guid TEXT, pid INTEGER, tid INTEGER, start BIGINT, "
              '"end" BIGINT, name_id INTEGER, event_id INTEGER',
    "kernel_dispatch": "id INTEGER PRIMARY KEY, guid TEXT, pid INTEGER, tid INTEGER, agent_id INTEGER, "
                       'kernel_id INTEGER, dispatch_id INTEGER, start BIGINT, "end" BIGINT, '
                       "region_name_id INTEGER, event_id INTEGER",
}  # fmt: skip
ROCPD_VIEWS = """
CREATE VIEW kernels AS
    SELECT k.id, k.guid, t.tid, c.string AS category, r.string AS region, s.display_name AS name, p.pid,
        a.absolute_index AS agent_abs_index, k.kernel_id, k.dispatch_id, k.start, k."end",
        k."end" - k.start AS duration
    FROM rocpd_kernel_dispatch k
    JOIN rocpd_info_agent a ON a.id = k.agent_id AND a.guid = k.guid
    JOIN rocpd_event e ON e.id = k.event_id AND e.guid = k.guid
    LEFT JOIN rocpd_string c ON c.id = e.category_id AND c.guid = e.guid
    JOIN rocpd_string r ON r.id = k.region_name_id AND r.guid = k.guid
    JOIN rocpd_info_kernel_symbol s ON s.id = k.kernel_id AND s.guid = k.guid
    JOIN rocpd_info_process p ON p.id = k.pid AND p.guid = k.guid
    JOIN rocpd_info_thread t ON t.id = k.tid AND t.guid = k.guid;
CREATE VIEW regions AS
    SELECT r.id, r.guid, c.string AS category, n.string AS name, p.pid, t.tid, r.start, r."end",
        r."end" - r.start AS duration, r.event_id, e.extdata
    FROM rocpd_region r
    JOIN rocpd_event e ON e.id = r.event_id AND e.guid = r.guid
    LEFT JOIN rocpd_string c ON c.id = e.category_id AND c.guid = e.guid
    JOIN rocpd_string n ON n.id = r.name_id AND n.guid = r.guid
    JOIN rocpd_info_process p ON p.id = r.pid AND p.guid = r.guid
    JOIN rocpd_info_thread t ON t.id = r.tid AND t.guid = r.guid;
CREATE VIEW counters_collection AS
    SELECT min(p.id) AS id, p.guid, k.dispatch_id, k.kernel_id, e.id AS event_id, o.pid, s.display_name AS kernel_name,
        i.name AS counter_name, i.symbol AS counter_symbol, sum(p.value) AS value, k.start, k."end",
        k."end" - k.start AS duration, e.extdata
    FROM rocpd_pmc_event p
    JOIN rocpd_info_pmc i ON i.id = p.pmc_id AND i.guid = p.guid
    JOIN rocpd_event e ON e.id = p.event_id AND e.guid = p.guid
    JOIN rocpd_kernel_dispatch k ON k.event_id = p.event_id AND k.guid = p.guid
    JOIN rocpd_info_kernel_symbol s ON s.id = k.kernel_id AND s.guid = k.guid
    JOIN rocpd_info_process o ON o.id = k.pid AND o.guid = k.guid
    GROUP BY p.guid, k.dispatch_id, i.name, k.agent_id;
"""
# What the host's regions are called: a range of roctx by the function that opens it. Its label is in the event.
ROCTX_RANGE = "roctxThreadRangeA"
CATEGORIES = ("KERNEL_DISPATCH", "MARKER_CORE_RANGE_API", "HIP_RUNTIME_API_EXT", "MEMORY_COPY")  # of the parts of a Run


def write_rocpd(path, run, counters=()):
    """A database as rocprofv3 7.0 writes it: tables that carry the guid in their names, views without it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    guid, pid = str(uuid.UUID(int=1)), 10470
    suffix = guid.replace("-", "_")
    connection = sqlite3.connect(path)

    def insert(table, rows):
        rows = list(rows)
        if rows:
            marks = ", ".join("?" * len(rows[0]))
            connection.executemany(f"INSERT INTO rocpd_{table}_{suffix} VALUES ({marks})", rows)

    with connection:
        for table, columns in ROCPD_TABLES.items():
            connection.execute(f"CREATE TABLE rocpd_{table}_{suffix} ({columns})")
            connection.execute(f"CREATE VIEW rocpd_{table} AS SELECT * FROM rocpd_{table}_{suffix}")
        connection.executescript(ROCPD_VIEWS)
        names = ["", *CATEGORIES, ROCTX_RANGE, *(record.name for part in run for record in part)]
        strings = {name: i for i, name in enumerate(dict.fromkeys(names), 1)}
        insert("metadata", [(1, "schema_version", "3"), (2, "uuid", f"_{suffix}"), (3, "guid", guid)])
        insert("string", [(i, guid, name) for name, i in strings.items()])
        insert("info_agent", [(1, guid, "CPU", 0, "AMD EPYC"), (2, guid, "GPU", 1, "gfx942")])
        insert("info_process", [(pid, guid, pid, "python3 tiny_llama_v3.py")])
        insert("info_thread", [(pid, guid, pid, pid, "python3")])
        symbols = {name: i for i, name in enumerate(by_name(run.dispatches), 1)}
        insert("info_kernel_symbol", [(i, guid, f"{name}.kd", name) for name, i in symbols.items()])
        insert("info_pmc", [(i, guid, 2, name, name) for i, name in enumerate(counters, 1)])
        events = [
            (strings[category], json.dumps({"message": record.name}) if part is run.ranges else "{}")
            for category, part in zip(CATEGORIES, run, strict=True)
            for record in part
        ]
        insert("event", [(i, guid, *event) for i, event in enumerate(events, 1)])
        insert("kernel_dispatch", (
            (i, guid, pid, pid, 2, symbols[d.name], i, d.start, d.end, strings[""], i)
            for i, d in enumerate(run.dispatches, 1)
        ))  # fmt: skip
        regions = [(r, ROCTX_RANGE) for r in run.ranges] + [(call, call.name) for call in run.api_calls]
        insert("region", (
            (i, guid, pid, pid, r.start, r.end, strings[name], i)
            for i, (r, name) in enumerate(regions, len(run.dispatches) + 1)
        ))  # fmt: skip
        values = [
            (i, pmc, counter_value(c, d)) for i, d in enumerate(run.dispatches, 1) for pmc, c in enumerate(counters, 1)
        ]
        insert("pmc_event", [(i, guid, event, pmc, value) for i, (event, pmc, value) in enumerate(values, 1)])
    connection.close()
