"""What rocprofv3 leaves behind: CSV headers and rocpd schema of ROCm 6.4 and 7.0, filled with made-up records."""

import csv
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


def make_run(steps):
    """A run of a few steps: kernels one after the other, 2 us apart, each launched 5 us before it starts."""
    rng = random.Random(steps)
    run, now = Run([], [], [], []), START

    def dispatch(name, ns):
        nonlocal now
        duration = round(ns * rng.uniform(0.95, 1.05))
        run.api_calls.append(Record("hipModuleLaunchKernel", now - 5_000, now - 1_500))
        run.dispatches.append(Record(name, now, now + duration))
        now += duration + 2_000

    dispatch(WARM_UP_KERNEL, 50_000_000)
    for _ in range(steps):
        now += 40_000
        run.copies.append(Record("MEMORY_COPY_HOST_TO_DEVICE", now, now + 8_000))
        now += 20_000
        begin = now - 10_000
        for name, (count, ns) in KERNELS.items():
            for _ in range(count):
                dispatch(name, ns)
        run.api_calls.append(Record("hipDeviceSynchronize", begin + 5_000, now))
        run.ranges.append(Record("step", begin, now))
        run.ranges.append(Record("forward", begin, (begin + now) // 2))
        run.ranges.append(Record("backward", (begin + now) // 2, now))
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
        header = (
            f"Kind,Agent_Id,Queue_Id,Thread_Id,Dispatch_Id,Kernel_Id,{times},Private_Segment_Size,Group_Segment_Size"
        )
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


def write_copies(path, release, copies):
    stream = ["Stream_Id"] if release >= (7, 0) else []
    header = ["Kind", "Direction", *stream, "Source_Agent_Id", "Destination_Agent_Id", "Correlation_Id"]
    agents = ["Agent 0", "Agent 1"] if stream else [0, 1]
    rows = [["MEMORY_COPY", c.name, *[0] * len(stream), *agents, i, c.start, c.end] for i, c in enumerate(copies, 1)]
    write_rows(path, [*header, "Start_Timestamp", "End_Timestamp"], rows)


def write_agent_info(path):
    header = "Node_Id,Logical_Node_Id,Agent_Type,Wave_Front_Size,Cu_Count,Name,Product_Name".split(",")
    write_rows(path, header, [[0, 0, "CPU", 0, 0, "AMD EPYC", "AMD EPYC"], [1, 1, "GPU", 64, 304, "gfx942", "MI300X"]])


def counter_value(counter, record):
    """Plausible and reproducible: percentages below 100, KiB and counts in proportion to the kernel's time."""
    if counter in ("VALUUtilization", "VALUBusy", "MfmaUtil", "OccupancyPercent"):
        return 60.0
    if counter == "MeanOccupancyPerCU":
        return 8.0
    return {"FETCH_SIZE": 0.5, "WRITE_SIZE": 0.25, "TCC_HIT_sum": 3.0, "TCC_MISS_sum": 1.0}.get(counter, 2.0) * (
        record.duration // 100
    )


def write_counters(path, release, dispatches, counters):
    header = "Correlation_Id,Dispatch_Id,Agent_Id,Queue_Id,Process_Id,Thread_Id,Grid_Size,Kernel_Id,Kernel_Name,"
    header += "Workgroup_Size,LDS_Block_Size,Scratch_Size,VGPR_Count,Accum_VGPR_Count,SGPR_Count,"
    header += "Counter_Name,Counter_Value,Start_Timestamp,End_Timestamp"
    agent = 1 if release < (7, 0) else "Agent 1"
    rows = []
    for i, d in enumerate(dispatches, 1):
        fixed = [i, i, agent, 1, 10470, 10470, 262144, 13, d.name, 256, 8192, 0, 64, 0, 48]
        rows += [[*fixed, counter, counter_value(counter, d), d.start, d.end] for counter in counters]
    write_rows(path, header.split(","), rows)


# Columns of the tables that hold data; the others of the schema stay empty.
ROCPD_TABLES = {
    "metadata": "id INTEGER PRIMARY KEY, tag TEXT, value TEXT",
    "string": "id INTEGER PRIMARY KEY, guid TEXT, string TEXT",
    "info_agent": "id INTEGER PRIMARY KEY, guid TEXT, type TEXT, absolute_index INTEGER, name TEXT",
    "info_process": "id INTEGER PRIMARY KEY, guid TEXT, pid INTEGER",
    "info_kernel_symbol": "id INTEGER PRIMARY KEY, guid TEXT, kernel_name TEXT, display_name TEXT",
    "info_pmc": "id INTEGER PRIMARY KEY, guid TEXT, agent_id INTEGER, name TEXT, symbol TEXT",
    "event": "id INTEGER PRIMARY KEY, guid TEXT, category_id INTEGER",
    "pmc_event": "id INTEGER PRIMARY KEY, guid TEXT, event_id INTEGER, pmc_id INTEGER, value REAL",
    "region": (
        'id INTEGER PRIMARY KEY, guid TEXT, pid INTEGER, start BIGINT, "end" BIGINT, name_id INTEGER, event_id INTEGER'
    ),
    "kernel_dispatch": (
        "id INTEGER PRIMARY KEY, guid TEXT, pid INTEGER, agent_id INTEGER, kernel_id INTEGER, dispatch_id INTEGER, "
        'start BIGINT, "end" BIGINT, event_id INTEGER'
    ),
    "memory_copy": 'id INTEGER PRIMARY KEY, guid TEXT, start BIGINT, "end" BIGINT, name_id INTEGER',
}
ROCPD_VIEWS = """
CREATE VIEW kernels AS
    SELECT k.id, k.guid, s.display_name AS name, k.pid, a.absolute_index AS agent_abs_index, k.dispatch_id, k.start,
        k."end", k."end" - k.start AS duration
    FROM rocpd_kernel_dispatch k
    JOIN rocpd_info_agent a ON a.id = k.agent_id AND a.guid = k.guid
    JOIN rocpd_info_kernel_symbol s ON s.id = k.kernel_id AND s.guid = k.guid;
CREATE VIEW regions AS
    SELECT r.id, r.guid, c.string AS category, n.string AS name, r.pid, r.start, r."end", r."end" - r.start AS duration
    FROM rocpd_region r
    JOIN rocpd_event e ON e.id = r.event_id AND e.guid = r.guid
    JOIN rocpd_string c ON c.id = e.category_id AND c.guid = e.guid
    JOIN rocpd_string n ON n.id = r.name_id AND n.guid = r.guid;
CREATE VIEW memory_copies AS
    SELECT m.id, m.guid, n.string AS name, m.start, m."end", m."end" - m.start AS duration
    FROM rocpd_memory_copy m JOIN rocpd_string n ON n.id = m.name_id AND n.guid = m.guid;
CREATE VIEW counters_collection AS
    SELECT min(p.id) AS id, p.guid, k.dispatch_id, s.display_name AS kernel_name, i.name AS counter_name,
        sum(p.value) AS value, k.start, k."end", k."end" - k.start AS duration
    FROM rocpd_pmc_event p
    JOIN rocpd_info_pmc i ON i.id = p.pmc_id AND i.guid = p.guid
    JOIN rocpd_kernel_dispatch k ON k.event_id = p.event_id AND k.guid = p.guid
    JOIN rocpd_info_kernel_symbol s ON s.id = k.kernel_id AND s.guid = k.guid
    GROUP BY p.guid, k.dispatch_id, i.name, k.agent_id;
CREATE VIEW top_kernels AS -- microseconds, unlike every other view
    SELECT name, count(*) AS total_calls, sum(duration) / 1000.0 AS total_duration,
        sum(duration) / count(*) / 1000.0 AS average,
        sum(duration) * 100.0 / (SELECT sum(duration) FROM kernels) AS percentage
    FROM kernels GROUP BY name ORDER BY total_duration DESC;
"""


def write_rocpd(path, run, counters=()):
    """A database as rocprofv3 7.0 writes it: tables that carry the guid in their names, views without it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    guid = str(uuid.UUID(int=1))
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
        strings = ["KERNEL_DISPATCH", "MARKER_CORE_RANGE_API", "HIP_RUNTIME_API", "MEMORY_COPY"]
        strings = {name: i for i, name in enumerate(dict.fromkeys(strings + [r.name for part in run for r in part]), 1)}
        insert("metadata", [(1, "schema_version", "3"), (2, "uuid", f"_{suffix}"), (3, "guid", guid)])
        insert("string", [(i, guid, name) for name, i in strings.items()])
        insert("info_agent", [(1, guid, "CPU", 0, "AMD EPYC"), (2, guid, "GPU", 1, "gfx942")])
        insert("info_process", [(1, guid, 10470)])
        symbols = {name: i for i, name in enumerate(by_name(run.dispatches), 1)}
        insert("info_kernel_symbol", [(i, guid, f"{name}.kd", name) for name, i in symbols.items()])
        insert("info_pmc", [(i, guid, 2, name, name) for i, name in enumerate(counters, 1)])
        events = ["KERNEL_DISPATCH"] * len(run.dispatches) + ["MARKER_CORE_RANGE_API"] * len(run.ranges)
        events += ["HIP_RUNTIME_API"] * len(run.api_calls)
        insert("event", [(i, guid, strings[category]) for i, category in enumerate(events, 1)])
        insert(
            "kernel_dispatch",
            [(i, guid, 1, 2, symbols[d.name], i, d.start, d.end, i) for i, d in enumerate(run.dispatches, 1)],
        )
        first = len(run.dispatches) + 1
        regions = enumerate([*run.ranges, *run.api_calls], first)
        insert("region", [(i, guid, 1, r.start, r.end, strings[r.name], i) for i, r in regions])
        insert("memory_copy", [(i, guid, c.start, c.end, strings[c.name]) for i, c in enumerate(run.copies, 1)])
        values = [
            (i, pmc, counter_value(c, d)) for i, d in enumerate(run.dispatches, 1) for pmc, c in enumerate(counters, 1)
        ]
        insert("pmc_event", [(i, guid, event, pmc, value) for i, (event, pmc, value) in enumerate(values, 1)])
    connection.close()
