"""The readers: one table from the files of either ROCm release, a rocpd database, or torch.profiler."""

import csv
import gzip
import json
import statistics
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import tiny_llama_v3 as llama
from profilers import readers
from profilers.kernel_names import operation_of, short_name
from profilers.readers import COLUMNS, Unreadable, files, read_kernel_stats, rocpd, torch_trace
from tests.fakes import records

RUN = records.make_run(steps=3)
RELEASES = [(6, 4), (7, 0)]


def expected(dispatches):
    """The table from its definition, in plain Python."""
    total = sum(d.duration for d in dispatches)
    rows = [
        (name, len(ns), sum(ns), sum(ns) / len(ns), 100 * sum(ns) / total, min(ns), max(ns), statistics.stdev(ns))
        if len(ns) > 1
        else (name, 1, ns[0], ns[0], 100 * ns[0] / total, ns[0], ns[0], 0.0)
        for name, ns in records.by_name(dispatches).items()
    ]
    return pd.DataFrame(sorted(rows, key=lambda row: -row[2]), columns=COLUMNS)


def assert_equal(table, reference, rtol=1e-9):
    assert list(table.columns) == COLUMNS and list(table["Name"]) == list(reference["Name"])
    for column in COLUMNS[1:]:
        np.testing.assert_allclose(table[column].astype(float), reference[column].astype(float), rtol, err_msg=column)


@pytest.fixture(params=["6.4 table", "7.0 table", "6.4 trace", "7.0 trace", "rocpd"])
def profile(request, tmp_path):
    """A folder as rocprofv3 leaves it without -o: below the host's name, under the process id."""
    release, _, kind = request.param.partition(" ")
    prefix = tmp_path / "node01" / "10470"
    version = tuple(map(int, release.split("."))) if kind else (7, 0)
    if kind == "table":
        records.write_stats(Path(f"{prefix}_kernel_stats.csv"), RUN.dispatches)
    if kind:
        records.write_kernel_trace(Path(f"{prefix}_kernel_trace.csv"), version, RUN.dispatches)
        records.write_stats(Path(f"{prefix}_hip_api_stats.csv"), RUN.api_calls)
        records.write_markers(Path(f"{prefix}_marker_api_trace.csv"), version, RUN.ranges)
        records.write_agent_info(Path(f"{prefix}_agent_info.csv"))
    else:
        records.write_rocpd(Path(f"{prefix}_results.db"), RUN)
    return tmp_path


def test_every_kind_of_file_gives_the_same_table(profile, monkeypatch):
    assert_equal(read_kernel_stats(profile), expected(RUN.dispatches))
    monkeypatch.setattr(files, "CHUNK_ROWS", 7)
    assert_equal(read_kernel_stats(profile), expected(RUN.dispatches))


def test_steps_alone(profile):
    assert readers.step_windows(profile) == ([(r.start, r.end) for r in RUN.ranges if r.name == "step"], 3)
    table, steps = readers.read_step_stats(profile)
    assert steps == 3 and len(RUN.in_steps()) == 3 * 19
    assert_equal(table, expected(RUN.in_steps()))
    assert not {records.WARM_UP_KERNEL, records.DIAGNOSTIC} & set(table["Name"])


def write_recording(prefix, kind, run):
    """Kernels and ranges of a process, as rocprofv3 leaves them in CSV files or in a database."""
    if kind == "csv":
        records.write_kernel_trace(Path(f"{prefix}_kernel_trace.csv"), (7, 0), run.dispatches)
        records.write_stats(Path(f"{prefix}_kernel_stats.csv"), run.dispatches)
        if run.ranges:
            records.write_markers(Path(f"{prefix}_marker_api_trace.csv"), (7, 0), run.ranges)
    else:
        records.write_rocpd(Path(f"{prefix}_results.db"), run)


@pytest.mark.parametrize("kind", ["csv", "db"])
def test_one_window_around_all_steps(tmp_path, kind):
    """With --timing step the host has closed the ranges "step" before their kernels start."""
    run = records.make_run(steps=4, one_window=True)
    write_recording(tmp_path / "1", kind, run)
    (steps,) = [(r.start, r.end) for r in run.ranges if r.name == "steps"]
    assert readers.step_windows(tmp_path) == ([steps], 4)
    table, steps = readers.read_step_stats(tmp_path)
    assert steps == 4 and len(run.in_steps()) == 4 * 19
    assert_equal(table, expected(run.in_steps()))


@pytest.mark.parametrize("kind", ["csv", "db"])
def test_each_process_has_its_own_steps(tmp_path, kind):
    """The second starts while the first is in its steps, and is then in its slow warm-up; the third has no steps."""
    runs = RUN, records.make_run(steps=2).later(60_000_000), RUN._replace(ranges=[]).later(10_000)
    for rank, run in enumerate(runs):
        write_recording(tmp_path / f"rank_{rank}" / "hotspots", kind, run)
    write_recording(tmp_path / "rank_0.failed" / "hotspots", kind, RUN)
    table, steps, processes = readers.read_processes(tmp_path)
    assert (steps, processes) == (5, 2)
    assert_equal(table, expected([d for run in runs[:2] for d in run.in_steps()]))


def test_processes_in_one_folder_are_told_apart(tmp_path):
    """Without -o, or with %pid% in it, their files lie side by side."""
    second = records.make_run(steps=2).later(60_000_000)
    write_recording(tmp_path / "10470", "csv", RUN)
    write_recording(tmp_path / "10471", "csv", second)
    table, steps, processes = readers.read_processes(tmp_path)
    assert (steps, processes) == (5, 2)
    assert_equal(table, expected(RUN.in_steps() + second.in_steps()))


def test_a_single_file_has_the_steps_of_its_process(tmp_path):
    write_recording(tmp_path / "10470", "csv", RUN)
    write_recording(tmp_path / "10471", "csv", RUN.later(10**9))
    table, steps = readers.read_step_stats(tmp_path / "10470_kernel_trace.csv")
    assert steps == 3
    assert_equal(table, expected(RUN.in_steps()))
    table, steps = readers.read_step_stats(tmp_path / "10470_kernel_stats.csv")
    assert steps == 0  # statistics of the whole run
    assert_equal(table, expected(RUN.dispatches))


def test_without_steps_the_whole_run_counts(tmp_path):
    write_recording(tmp_path / "1", "csv", RUN._replace(ranges=[records.Record("steps", 0, 10**18)]))
    write_recording(tmp_path / "2", "csv", RUN._replace(ranges=[]))
    table, steps, processes = readers.read_processes(tmp_path)
    assert (steps, processes) == (0, 2)
    assert_equal(table, expected(2 * RUN.dispatches))


@pytest.mark.parametrize("data", [None, "", "{}", "[]", '{"message": null}', '{"message"', '{"other": "step"}'])
def test_a_range_without_a_label_keeps_its_name(tmp_path, data):
    records.write_rocpd(tmp_path / "a.db", RUN)
    connection = rocpd.sqlite3.connect(tmp_path / "a.db")
    (table,) = connection.execute("SELECT name FROM sqlite_master WHERE name LIKE 'rocpd_event_%'").fetchone()
    with connection:
        connection.execute(f"CREATE TABLE copy AS SELECT * FROM {table}")  # without NOT NULL
        connection.execute("UPDATE copy SET extdata = ? WHERE extdata LIKE '%step%'", (data,))
        connection.execute("DROP VIEW rocpd_event")
        connection.execute("CREATE VIEW rocpd_event AS SELECT * FROM copy")
    connection.close()
    ranges = readers.read_ranges(tmp_path)
    assert list(ranges["Name"]) == 3 * [records.ROCTX_RANGE, "forward", "backward"]
    assert set(readers.read_ranges(tmp_path, "calls")["Name"]) == {records.LAUNCH, "hipDeviceSynchronize"}


def test_dispatches_come_in_order(profile, monkeypatch):
    monkeypatch.setattr(files, "CHUNK_ROWS", 11)
    dispatches = readers.read_dispatches(profile)
    rows = dispatches.astype({"Name": str}).itertuples(index=False, name=None)
    assert list(rows) == list(map(tuple, RUN.dispatches))


def test_processes_of_one_run_are_added_up(tmp_path):
    second = [records.Record(d.name, d.start, d.end + 1000 * i) for i, d in enumerate(RUN.dispatches)]
    records.write_stats(tmp_path / "1_kernel_stats.csv", RUN.dispatches)
    records.write_stats(tmp_path / "2_kernel_stats.csv", second)
    assert_equal(read_kernel_stats(tmp_path), expected(RUN.dispatches + second))


def test_passes_of_counters_are_no_timings(tmp_path):
    slowed = [records.Record(d.name, d.start, d.end + 10**6) for d in RUN.dispatches]
    records.write_kernel_trace(tmp_path / "k_kernel_trace.csv", (7, 0), RUN.dispatches)
    records.write_kernel_trace(tmp_path / "pass_1" / "k_kernel_trace.csv", (7, 0), slowed)
    assert_equal(read_kernel_stats(tmp_path), expected(RUN.dispatches))
    assert_equal(read_kernel_stats(tmp_path / "pass_1"), expected(slowed))


def test_summary_of_rocpd(tmp_path):
    reference = expected(RUN.dispatches)
    table = reference.rename(columns={new: old for old, new in rocpd.SUMMARY.items()})
    table.loc[table["Calls"] == 1, "STD_DEV"] = None  # SQL divides by zero
    table.to_csv(tmp_path / "out_kernels_summary.csv", index=False)
    assert_equal(read_kernel_stats(tmp_path), reference)


def test_durations_agree_with_the_view_in_microseconds(tmp_path):
    records.write_rocpd(tmp_path / "a.db", RUN)
    sql = "SELECT name, total_duration FROM top_kernels LIMIT 1"
    top = pd.concat(rocpd.query(tmp_path / "a.db", sql, ["name", "us"])).iloc[0]
    row = read_kernel_stats(tmp_path / "a.db").iloc[0]
    assert row["Name"] == top["name"] and row["TotalDurationNs"] == pytest.approx(1000 * top["us"])


def test_files_of_torch_profiler(tmp_path, capsys):
    flags = "--impl torch --device cpu --hidden-dim 32 --num-layers 1 --num-heads 2 --vocab-size 32 --batch-size 2"
    flags = [*flags.split(), "--seq-len", "8", "--num-steps", "1", "--output-dir", str(tmp_path / "json")]
    assert llama.main([*flags, "--profile", str(tmp_path / "p")]) == 0
    capsys.readouterr()
    with open(tmp_path / "p" / "kernel_stats.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    table = read_kernel_stats(tmp_path / "p")
    assert list(table["Name"]) == [row["Name"] for row in rows]
    assert list(table["Calls"]) == [int(row["Calls"]) for row in rows]
    np.testing.assert_allclose(table["StdDev"], [float(row["StdDev"]) for row in rows], rtol=1e-6, atol=1e-6)
    # Not which comes first: a process that is interrupted inside a view makes that one the longest.
    assert {"matrix product", "optimizer", "softmax", "elementwise"} <= set(table["Name"].map(operation_of))
    windows, steps = readers.step_windows(tmp_path / "p")
    dispatches = readers.within_any(readers.read_dispatches(tmp_path / "p"), windows)
    assert steps == 3 and "aten::mm" in set(dispatches["Name"])
    assert (dispatches["Start"].to_numpy()[1:] >= dispatches["End"].to_numpy()[:-1]).all()  # never two at once


def chrome_trace(*rows):
    """The text of a trace with events of these categories, names, times and durations."""
    keys = ("ph", "tid", "cat", "name", "ts", "dur")
    return json.dumps({"traceEvents": [dict(zip(keys, ("X", 1, *row), strict=True)) for row in rows]})


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_gpu_trace_counts_kernels_and_copies_only(tmp_path, name):
    text = chrome_trace(
        ("kernel", "rmsnorm_kernel", 10.5, 2.25), ("gpu_memcpy", "Memcpy HtoD", 20, 1), ("gpu_memset", "Memset", 22, 2),
        ("gpu_user_annotation", "step", 10, 20), ("user_annotation", "step", 9, 30), ("cpu_op", "aten::mm", 9, 5),
    )  # fmt: skip
    (gzip.open if name.endswith("gz") else open)(tmp_path / name, "wt").write(text)
    table = read_kernel_stats(tmp_path).set_index("Name")["TotalDurationNs"]
    assert list(table.items()) == [("rmsnorm_kernel", 2250), ("Memset", 2000), ("Memcpy HtoD", 1000)]
    assert readers.step_windows(tmp_path) == ([(9000, 39000)], 1)


def test_the_last_kernels_of_a_step_that_outlive_its_range_count(tmp_path):
    """torch.profiler records nothing but steps: no kernel of its trace is left out, of the folder or of the file."""
    rows = [("user_annotation", "step", 0, 10), ("kernel", "early", 2, 3), ("kernel", "late", 11, 3)]
    (tmp_path / "trace.json").write_text(chrome_trace(*rows))
    for path in (tmp_path, tmp_path / "trace.json"):
        table, steps = readers.read_step_stats(path)
        assert steps == 1 and set(table["Name"]) == {"early", "late"}


def test_a_kernel_belongs_to_the_step_in_which_it_starts():
    dispatches = files.intervals([("before", 80, 120), ("inside", 110, 130), ("beyond", 190, 230), ("later", 210, 220)])
    assert list(readers.within(dispatches, (100, 200))["Name"]) == ["inside", "beyond"]
    assert list(readers.within_any(dispatches, [(100, 150), (205, 300)])["Name"]) == ["inside", "later"]


# --- files that are not as they should be


def test_folder_without_a_profile(tmp_path):
    with pytest.raises(Unreadable, match="holds no kernel statistics"):
        read_kernel_stats(tmp_path)
    with pytest.raises(Unreadable, match="does not exist"):
        read_kernel_stats(tmp_path / "absent")


@pytest.mark.parametrize("name", ["a_kernel_stats.csv", "a_kernel_trace.csv", "a_results.db", "trace.json"])
def test_empty_file(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(Unreadable, match=f"{name} .*profile|{name} is empty"):
        read_kernel_stats(tmp_path)


def test_a_table_without_kernels_is_empty(tmp_path):
    records.write_rows(tmp_path / "a_kernel_stats.csv", COLUMNS, [])
    records.write_kernel_trace(tmp_path / "b_kernel_trace.csv", (6, 4), [])
    records.write_rocpd(tmp_path / "c.db", records.Run([], [], [], []))
    for name in ("a_kernel_stats.csv", "b_kernel_trace.csv", "c.db"):
        table = read_kernel_stats(tmp_path / name)
        assert list(table.columns) == COLUMNS and len(table) == 0
    assert len(readers.read_dispatches(tmp_path / "c.db")) == 0


@pytest.mark.parametrize("cut", [1, 5, 30, 70, 200])
@pytest.mark.parametrize("name", ["a_kernel_stats.csv", "a_kernel_trace.csv", "trace.json", "a_results.db"])
def test_truncated_file(tmp_path, name, cut):
    path = tmp_path / name
    if name == "trace.json":
        path.write_text(chrome_trace(*(("kernel", d.name, d.start, 1) for d in RUN.dispatches)))
    elif name.endswith(".db"):
        records.write_rocpd(path, RUN)
        cut *= 100
    else:
        records.write_stats(tmp_path / "a_kernel_stats.csv", RUN.dispatches)
        records.write_kernel_trace(tmp_path / "a_kernel_trace.csv", (7, 0), RUN.dispatches)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(Unreadable, match=name):
        read_kernel_stats(path)


@pytest.mark.parametrize("line", ["x,y", '"k",1,2', '"k","many",2,3,4,5,6,7', "\xff\xfe"])
def test_damaged_line(tmp_path, line):
    records.write_stats(tmp_path / "a_kernel_stats.csv", RUN.dispatches)
    with open(tmp_path / "a_kernel_stats.csv", "ab") as file:
        file.write(line.encode("latin1") + b"\n")
    with pytest.raises(Unreadable, match="a_kernel_stats.csv"):
        read_kernel_stats(tmp_path)


def test_a_trace_of_other_contents(tmp_path):
    texts = ["[{}]", '{"traceEvents": 1}', '{"traceEvents": [[]]}', "[" * 10**5, '{"a":' * 10**5]
    for text in texts + [chrome_trace(("kernel", "k", ts, 2)) for ts in ("1", None, 1e999, 10**30)]:
        torch_trace.events_of.cache_clear()
        (tmp_path / "trace.json").write_text(text)
        with pytest.raises(Unreadable, match="^[^\n]*trace.json is damaged or incomplete [^\n]*$"):
            read_kernel_stats(tmp_path)


def test_a_name_without_quotation_marks_is_a_word_too(tmp_path):
    (tmp_path / "k_kernel_trace.csv").write_text("Kernel_Name,Start_Timestamp,End_Timestamp\n7,1,2\n,3,4\n")
    (tmp_path / "trace.json").write_text(chrome_trace(("user_annotation", 7, 1, 2)))
    assert list(read_kernel_stats(tmp_path)["Name"]) == ["7", ""]
    assert list(readers.read_ranges(tmp_path)["Name"]) == ["7"]


def test_another_table_under_the_name(tmp_path):
    records.write_agent_info(tmp_path / "a_kernel_stats.csv")
    with pytest.raises(Unreadable, match="no column"):
        read_kernel_stats(tmp_path)
    (tmp_path / "b.db").write_bytes(b"SQLite format 3\0" + bytes(4096))
    with pytest.raises(Unreadable, match="b.db"):
        read_kernel_stats(tmp_path / "b.db")


@pytest.mark.parametrize("kind", ["csv", "db"])
def test_many_dispatches(tmp_path, kind, monkeypatch):
    """In bounded memory: no more than a chunk at a time."""
    monkeypatch.setattr(files, "CHUNK_ROWS", 20_000)
    sizes = []
    statistics_of = readers.statistics_of
    monkeypatch.setattr(readers, "statistics_of", lambda chunk: sizes.append(len(chunk)) or statistics_of(chunk))
    dispatches = [dispatch for i in range(20) for dispatch in RUN.later(10**9 * i).dispatches]
    copies = 100_000 // len(dispatches) + 1
    if kind == "csv":
        path = tmp_path / "a_kernel_trace.csv"
        records.write_kernel_trace(path, (7, 0), dispatches)
        header, _, body = path.read_text().partition("\n")
        with open(path, "w") as file:
            file.write(header + "\n")
            for _ in range(copies):
                file.write(body)
    else:
        path = tmp_path / "a.db"
        records.write_rocpd(path, RUN._replace(dispatches=dispatches))
        connection = rocpd.sqlite3.connect(path)
        tables = "SELECT name FROM sqlite_master WHERE name LIKE 'rocpd_kernel_dispatch_%'"
        (table,) = connection.execute(tables).fetchone()
        columns = 'guid, pid, tid, agent_id, kernel_id, dispatch_id, start, "end", region_name_id, event_id'
        with connection:
            connection.execute(
                f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {copies - 1}) "
                f"INSERT INTO {table} ({columns}) SELECT {columns} FROM {table}, n"
            )
        connection.close()
    table = read_kernel_stats(path)
    reference = expected(dispatches)
    assert table["Calls"].sum() == copies * len(dispatches) >= 100_000
    assert list(table["Calls"]) == list(reference["Calls"] * copies)
    assert list(table["TotalDurationNs"]) == list(reference["TotalDurationNs"] * copies)
    assert len(sizes) >= 5 and max(sizes) <= files.CHUNK_ROWS


# --- names as compilers make them

NAMES = [
    'f<"a">(int)', 'f<"a", 3>(int, float)', 'a","b', '"', 'two\nlines "of it"', "nan", "NULL", "NA", "", "größe", "7",
]  # fmt: skip


def write_raw(path, header, rows, encoding="utf-8"):
    """A CSV file as rocprofv3 writes it: words within quotation marks, and nothing escaped."""
    path.parent.mkdir(exist_ok=True)
    lines = [",".join(f'"{cell}"' if isinstance(cell, str) else str(cell) for cell in row) for row in [header, *rows]]
    path.write_bytes(("\n".join(lines) + "\n").encode(encoding))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_read_as_it_is(tmp_path, name, monkeypatch):
    monkeypatch.setattr(files, "CHUNK_ROWS", 2)
    names = ["first", name, name, "last"]
    trace = "Kind,Agent_Id,Queue_Id,Kernel_Name,Correlation_Id,Start_Timestamp,End_Timestamp,Grid_Size_X".split(",")
    rows = [["KERNEL_DISPATCH", "Agent 1", 1, name, i, 100 * i, 100 * i + 7, 64] for i, name in enumerate(names)]
    write_raw(tmp_path / "a_kernel_trace.csv", trace, rows)
    dispatches = readers.read_dispatches(tmp_path)
    assert list(dispatches.itertuples(index=False, name=None)) == [(r[3], r[5], r[6]) for r in rows]
    counted = "Dispatch_Id,Kernel_Name,Grid_Size,Counter_Name,Counter_Value,Start_Timestamp,End_Timestamp".split(",")
    counts = [[i, name, 64, "SQ_WAVES", 2.5, 100 * i, 100 * i + 7] for i, name in enumerate(names)]
    write_raw(tmp_path / "a_counter_collection.csv", counted, counts)
    assert readers.read_counters(tmp_path)["SQ_WAVES"].to_dict() == dict.fromkeys(names, 2.5)
    write_raw(tmp_path / "a_kernel_stats.csv", COLUMNS, [[name, 2, 14, 7.0, 1e-05, 7, 7, 0.0]])
    assert list(read_kernel_stats(tmp_path)["Name"]) == [name]
    ranges = "Domain,Function,Process_Id,Thread_Id,Correlation_Id,Start_Timestamp,End_Timestamp".split(",")
    write_raw(tmp_path / "a_marker_api_trace.csv", ranges, [["MARKER", name, 1, 1, 1, 5, 9]])
    assert list(readers.read_ranges(tmp_path)["Name"]) == [name]
    read_kernel_stats(tmp_path).to_csv(tmp_path / "b.csv", index=False)  # which escapes
    assert list(read_kernel_stats(tmp_path / "b.csv")["Name"]) == [name]
    records.write_rocpd(tmp_path / "a.db", RUN._replace(dispatches=[records.Record(name, 1, 2)]))
    assert list(readers.read_dispatches(tmp_path / "a.db")["Name"]) == [name]
    text = f'"ID","Kernel Name","a__b.sum"\n"","","ns"\n"0","{name.replace(chr(34), 2 * chr(34))}","5"\n'
    (tmp_path / "ncu_raw.csv").write_text(text)
    assert readers.read_counters(tmp_path / "ncu_raw.csv").index.to_list() == [name]


def test_names_that_are_not_utf_8(tmp_path):
    """They are read, with a mark in the place of each byte that is none, the same in every format."""
    header = ["Kernel_Name", "Start_Timestamp", "End_Timestamp"]
    write_raw(tmp_path / "a_kernel_trace.csv", header, [["gr\xf6\xdfe", 1, 2], ["ok", 3, 4]], encoding="latin-1")
    records.write_rocpd(tmp_path / "a.db", RUN._replace(dispatches=[records.Record("x", 1, 2), RUN.dispatches[0]]))
    connection = rocpd.sqlite3.connect(tmp_path / "a.db")
    (table,) = connection.execute(
        "SELECT name FROM sqlite_master WHERE name LIKE 'rocpd_info_kernel_symbol_%'"
    ).fetchone()
    with connection:
        connection.execute(f"UPDATE {table} SET display_name = CAST(x'6772f6df65' AS TEXT) WHERE display_name = 'x'")
    connection.close()
    (tmp_path / "trace.json").write_bytes(chrome_trace(("kernel", "@", 1, 2)).encode().replace(b"@", b"gr\xf6\xdfe"))
    for name in ("a_kernel_trace.csv", "a.db", "trace.json"):
        assert readers.read_dispatches(tmp_path / name)["Name"][0] == "gr\ufffd\ufffde"


@pytest.mark.parametrize("line", ['"k",1,2', '"ope', "1,2", '"k",1,2,3,4,5,6,7,8'])
def test_a_damaged_line_swallows_no_row(tmp_path, line):
    records.write_stats(tmp_path / "a_kernel_stats.csv", RUN.dispatches)
    header, *rows = (tmp_path / "a_kernel_stats.csv").read_text().splitlines()
    (tmp_path / "a_kernel_stats.csv").write_text("\n".join([header, rows[0], line, *rows[1:]]) + "\n")
    with pytest.raises(Unreadable, match="a_kernel_stats.csv is damaged"):
        read_kernel_stats(tmp_path)


# --- schemas of databases


def write_database(path, schema, script):
    connection = rocpd.sqlite3.connect(path)
    connection.execute("CREATE TABLE rocpd_metadata (tag, value)")
    connection.execute("INSERT INTO rocpd_metadata VALUES ('schema_version', ?)", (schema,))
    connection.executescript(script)
    connection.close()


def test_a_database_of_schema_4(tmp_path):
    """It has a row for each instance of a counter."""
    write_database(tmp_path / "a.db", "4.1.0", """
        CREATE TABLE kernels (id, guid, name, start, "end");
        INSERT INTO kernels VALUES (1, 'g', 'k', 100, 150), (2, 'g', 'k', 200, 250), (3, 'g', 'k', 900, 950);
        CREATE TABLE regions (category, name, extdata, start, "end");
        INSERT INTO regions VALUES ('MARKER_CORE_RANGE_API', 'roctxThreadRangeA', '{"message": "step"}', 90, 300);
        CREATE TABLE kernel_pmc_events (id, guid, name, start, "end", pmc_name, pmc_value);
        INSERT INTO kernel_pmc_events VALUES (1, 'g', 'k', 100, 150, 'SQ_WAVES', 3.0),
            (1, 'g', 'k', 100, 150, 'SQ_WAVES', 4.0), (2, 'g', 'k', 200, 250, 'SQ_WAVES', 9.0),
            (3, 'g', 'k', 900, 950, 'SQ_WAVES', 100.0);
    """)  # fmt: skip
    table, steps = readers.read_step_stats(tmp_path)
    assert steps == 1 and table[["Name", "Calls", "TotalDurationNs"]].values.tolist() == [["k", 2, 100]]
    counters, is_of_steps = readers.read_step_counters(tmp_path)
    assert is_of_steps and counters.loc["k", "SQ_WAVES"] == 8.0


@pytest.mark.parametrize("kernels", ["", "CREATE TABLE kernels (name, begin, finish);"])
def test_a_database_of_an_unknown_schema_is_refused_by_name(tmp_path, kernels):
    write_database(tmp_path / "a.db", "5.2.0", kernels)
    with pytest.raises(Unreadable, match="a.db has rocpd's schema_version 5.2.0 .*--output-format csv$") as raised:
        read_kernel_stats(tmp_path)
    assert "damaged" not in str(raised.value)


# --- memory


def test_the_peak_of_memory_is_the_most_at_a_time(tmp_path):
    events = [{"ph": "i", "name": "[memory]", "ts": ts, "args": {"Device Type": kind, "Total Allocated": total}}
              for ts, kind, total in ((1, 1, 400), (2, 1, 1000), (3, 0, 9999), (4, 1, 600))]  # fmt: skip
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert readers.read_peak_memory(tmp_path) == 1000
    records.write_rocpd(tmp_path / "a.db", RUN)
    assert readers.read_peak_memory(tmp_path / "a.db") == 0
    connection = rocpd.sqlite3.connect(tmp_path / "a.db")
    with connection:
        connection.execute("CREATE TABLE memory_allocations (type, level, agent_type, address, size, start)")
        connection.executemany("INSERT INTO memory_allocations VALUES (?, ?, ?, ?, ?, ?)", [
            ("ALLOC", "REAL", "GPU", 16, 500, 1), ("ALLOC", "REAL", "CPU", 64, 9000, 2),
            ("FREE", "REAL", None, 16, 0, 3), ("ALLOC", "REAL", "GPU", 16, 300, 4),
            ("ALLOC", "SCRATCH", "GPU", 16, 7000, 5), ("FREE", "REAL", None, 64, 0, 6),
            ("ALLOC", "VIRTUAL", "GPU", 128, 400, 7), ("FREE", "REAL", None, 16, 0, 8),
        ])  # fmt: skip
    connection.close()
    assert readers.read_peak_memory(tmp_path / "a.db") == 700


# --- names


def test_every_kernel_of_the_script_belongs_to_an_operation():
    source = Path(llama.__file__).read_text()
    kernels = [line.split("(")[0][4:] for line in source.splitlines() if line.startswith("def ") and "_kernel(" in line]
    assert len(kernels) > 10
    assert not [name for name in kernels if operation_of(name) == "other"]


@pytest.mark.parametrize("name, operation", [
    ("rmsnorm_backward_kernel", "RMSNorm backward"), ("flash_attention_kernel", "attention"),
    ("flash_attention_backward_dkdv_kernel", "attention backward"), ("swiglu_activation_kernel", "SwiGLU"),
    ("swiglu_kernel", "SwiGLU matrix product, naive"), ("Cijk_Alik_Bljk_SB_MT64x64x32_MI16x16x4", "matrix product"),
    ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "matrix product"),
    ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1_execute", "matrix product"),
    ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>(cutlass::Params)", "matrix product"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::Params)", "matrix product"),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>(pytorch_flash::Flash_fwd_params)", "attention"),
    ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<x>(y)", "attention backward"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_bf16_knob_6_64x128x64", "attention"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_bf16_knob_26_128x128", "attention backward"),
    ("triton_red_fused_add_mul_rsqrt_3", "fused by torch.compile"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, "
     "1>>(int, at::native::FillFunctor<float>, std::array<char*, 1>)", "copy or fill"),
    ("void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<float>>(int)", "elementwise"),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, MeanOps<float>>>(x)", "reduction"),
    ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 7, false, false>(float*)", "softmax"),
    ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, "
     "FusedAdamMathFunctor<float, 4, (ADAM_MODE)1, false>>(x)", "optimizer"),
    ("Memcpy DtoD (Device -> Device)", "copy or fill"), ("__amd_rocclr_fillBufferAligned", "copy or fill"),
    ("aten::mm", "matrix product"), ("my_own_thing", "other"),
])  # fmt: skip
def test_operation_of(name, operation):
    assert operation_of(name) == operation


def test_short_name():
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, 1>(int, float)"
    assert short_name(name) == "vectorized_elementwise_kernel<4, FillFunctor<float>, 1>"
    # Two of cuBLAS's that differ in their layouts and tiles, far from either end.
    ends = "sm80_xmma_gemm_f32f32_f32f32_f32_", "_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute_kernel__5x_cublas"
    for own in ("tn_n_tilesize64x256x8", "nt_n_tilesize128x64x8"):
        assert short_name(own.join(ends), 44) == f"sm80_xmma_gemm_f32_{own}"
    assert short_name(own.join(ends).replace("_kernel", "_split_k_kernel")) == f"sm80_xmma_gemm_f32_{own}_split_k"
    simt = "cutlass_80_simt_sgemm_256x128_8x4_nn_align1"
    assert short_name(f"void cutlass::Kernel2<{simt}>({simt}::Params)") == simt
    assert short_name("rmsnorm_kernel") == "rmsnorm_kernel"
    assert len(short_name("k" * 200, 30)) == 30
