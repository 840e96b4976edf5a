"""The readers: one table from the files of either ROCm release, a rocpd database, or torch.profiler."""

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
from profilers.readers import COLUMNS, Unreadable, files, kernel_statistics, read_kernel_stats, rocpd, torch_trace
from tests.fakes import records

RUN = records.make_run(steps=3)


def expected(dispatches):
    """The table from its definition, in plain Python."""
    total = sum(d.duration for d in dispatches)
    rows = []
    for name, ns in records.by_name(dispatches).items():
        spread = statistics.stdev(ns) if len(ns) > 1 else 0.0
        rows.append((name, len(ns), sum(ns), statistics.fmean(ns), 100 * sum(ns) / total, min(ns), max(ns), spread))
    return pd.DataFrame(sorted(rows, key=lambda row: -row[2]), columns=COLUMNS)


def assert_equal(table, dispatches):
    reference = expected(dispatches)
    assert list(table.columns) == COLUMNS and list(table["Name"]) == list(reference["Name"])
    for column in COLUMNS[1:]:
        np.testing.assert_allclose(table[column].astype(float), reference[column].astype(float), 1e-9, err_msg=column)


def write_recording(prefix, kind, run, release=(7, 0)):
    """Kernels and ranges of a process, as rocprofv3 leaves them in CSV files or in a database."""
    if kind == "db":
        records.write_rocpd(Path(f"{prefix}_results.db"), run)
        return
    records.write_kernel_trace(Path(f"{prefix}_kernel_trace.csv"), release, run.dispatches)
    if kind == "csv":
        records.write_stats(Path(f"{prefix}_kernel_stats.csv"), run.dispatches)
    if run.ranges:
        records.write_markers(Path(f"{prefix}_marker_api_trace.csv"), release, run.ranges)


@pytest.mark.parametrize("kind, release", [("csv", (6, 4)), ("csv", (7, 0)), ("trace", (6, 4)), ("db", (7, 0))])
def test_every_kind_of_file_gives_the_same_tables(tmp_path, kind, release):
    """Below the host's name, under the process id, as rocprofv3 leaves them without -o."""
    write_recording(tmp_path / "node01" / "10470", kind, RUN, release)
    assert_equal(read_kernel_stats(tmp_path), RUN.dispatches)
    table, steps = readers.read_step_stats(tmp_path)
    assert steps == 3 and not {records.WARM_UP_KERNEL, records.DIAGNOSTIC} & set(table["Name"])
    assert_equal(table, RUN.in_steps())
    assert readers.step_windows(tmp_path) == ([(r.start, r.end) for r in RUN.ranges if r.name == "step"], 3)
    dispatches = readers.read_dispatches(tmp_path)
    assert list(dispatches.itertuples(index=False, name=None)) == list(map(tuple, RUN.dispatches))


def test_statistics_by_hand():
    """Two calls of 10 and 30 ns and one of 60 of a kernel, one of 99 ns of another."""
    dispatches = files.intervals([("a", 0, 10), ("b", 5, 104), ("a", 20, 50), ("a", 100, 160)])
    table = kernel_statistics.statistics_of(dispatches)
    assert table.values.tolist() == [["a", 3, 100, 100 / 3, 10000 / 199, 10, 60, pytest.approx(25.16611478)],
                                     ["b", 1, 99, 99.0, 9900 / 199, 99, 99, 0.0]]  # fmt: skip
    parts = [kernel_statistics.statistics_of(part) for part in (dispatches[:3], dispatches[3:])]
    pd.testing.assert_frame_equal(kernel_statistics.merge(parts), table)


@pytest.mark.parametrize("kind", ["csv", "db"])
def test_one_window_around_all_steps(tmp_path, kind):
    """With --timing step the host has closed the ranges "step" before their kernels start."""
    run = records.make_run(steps=4, one_window=True)
    write_recording(tmp_path / "1", kind, run)
    (steps,) = [(r.start, r.end) for r in run.ranges if r.name == "steps"]
    assert readers.step_windows(tmp_path) == ([steps], 4)
    table, steps = readers.read_step_stats(tmp_path)
    assert steps == 4 and len(run.in_steps()) == 4 * 19
    assert_equal(table, run.in_steps())


@pytest.mark.parametrize("kind", ["csv", "db"])
def test_each_process_has_its_own_steps(tmp_path, kind):
    """The second starts while the first is in its steps, and is then in its slow warm-up; the third has no steps."""
    runs = RUN, records.make_run(steps=2).later(60_000_000), RUN._replace(ranges=[]).later(10_000)
    for rank, run in enumerate(runs):
        write_recording(tmp_path / f"rank_{rank}" / "hotspots", kind, run)
    write_recording(tmp_path / "rank_0.failed" / "hotspots", kind, RUN)
    table, steps, processes = readers.read_processes(tmp_path)
    assert (steps, processes) == (5, 2)
    assert_equal(table, [d for run in runs[:2] for d in run.in_steps()])


def test_processes_in_one_folder_are_told_apart(tmp_path):
    """Without -o, or with %pid% in it, their files lie side by side; a file has the steps of its process."""
    second = records.make_run(steps=2).later(60_000_000)
    for pid, run in ((10470, RUN), (10471, second)):
        write_recording(tmp_path / str(pid), "csv", run)
    table, steps, processes = readers.read_processes(tmp_path)
    assert (steps, processes) == (5, 2)
    assert_equal(table, RUN.in_steps() + second.in_steps())
    assert_equal(read_kernel_stats(tmp_path), RUN.dispatches + second.dispatches)
    table, steps = readers.read_step_stats(tmp_path / "10470_kernel_trace.csv")
    assert steps == 3
    assert_equal(table, RUN.in_steps())
    table, steps = readers.read_step_stats(tmp_path / "10470_kernel_stats.csv")
    assert steps == 0  # statistics of the whole run
    assert_equal(table, RUN.dispatches)


def test_without_steps_the_whole_run_counts(tmp_path):
    write_recording(tmp_path / "1", "csv", RUN._replace(ranges=[records.Record("steps", 0, 10**18)]))
    write_recording(tmp_path / "2", "csv", RUN._replace(ranges=[]))
    table, steps, processes = readers.read_processes(tmp_path)
    assert (steps, processes) == (0, 2)
    assert_equal(table, 2 * RUN.dispatches)


def change(path, *statements):
    """Change a database."""
    connection = rocpd.sqlite3.connect(path)
    with connection:
        for statement, *values in statements:
            connection.execute(statement, values)
    connection.close()


@pytest.mark.parametrize("data", [None, "", "[]", '{"message": null}', '{"message"', '{"other": "step"}'])
def test_a_range_without_a_label_keeps_its_name(tmp_path, data):
    records.write_rocpd(tmp_path / "a.db", RUN)
    event = "rocpd_event_00000000_0000_0000_0000_000000000001"
    change(
        tmp_path / "a.db", [f"CREATE TABLE copy AS SELECT * FROM {event}"],  # without NOT NULL
        ["UPDATE copy SET extdata = ? WHERE extdata LIKE '%step%'", data], ["DROP VIEW rocpd_event"],
        ["CREATE VIEW rocpd_event AS SELECT * FROM copy"],
    )  # fmt: skip
    assert list(readers.read_ranges(tmp_path)["Name"]) == 3 * [records.ROCTX_RANGE, "forward", "backward"]
    assert set(readers.read_ranges(tmp_path, "calls")["Name"]) == {records.LAUNCH, "hipDeviceSynchronize"}


def test_passes_of_counters_are_no_timings(tmp_path):
    slowed = [d._replace(end=d.end + 10**6) for d in RUN.dispatches]
    records.write_kernel_trace(tmp_path / "k_kernel_trace.csv", (7, 0), RUN.dispatches)
    records.write_kernel_trace(tmp_path / "pass_1" / "k_kernel_trace.csv", (7, 0), slowed)
    assert_equal(read_kernel_stats(tmp_path), RUN.dispatches)
    assert_equal(read_kernel_stats(tmp_path / "pass_1"), slowed)


def test_summary_of_rocpd(tmp_path):
    table = expected(RUN.dispatches).rename(columns={new: old for old, new in rocpd.SUMMARY.items()})
    table.loc[table["Calls"] == 1, "STD_DEV"] = None  # SQL divides by zero
    table.to_csv(tmp_path / "out_kernels_summary.csv", index=False)
    assert_equal(read_kernel_stats(tmp_path), RUN.dispatches)


def test_files_of_torch_profiler(tmp_path, capsys):
    flags = "--impl torch --device cpu --hidden-dim 32 --num-layers 1 --num-heads 2 --vocab-size 32 --batch-size 2"
    flags = [*flags.split(), "--seq-len", "8", "--num-steps", "1", "--output-dir", str(tmp_path / "json")]
    assert llama.main([*flags, "--profile", str(tmp_path / "p")]) == 0
    capsys.readouterr()
    table, written = read_kernel_stats(tmp_path / "p"), pd.read_csv(tmp_path / "p" / "kernel_stats.csv")
    pd.testing.assert_frame_equal(table, written, check_dtype=False, atol=1e-6)
    # Not which comes first: a process that is interrupted inside a view makes that one the longest.
    assert {"matrix product", "optimizer", "softmax", "elementwise"} <= set(table["Name"].map(operation_of))
    windows, steps = readers.step_windows(tmp_path / "p")
    dispatches = readers.within_any(readers.read_dispatches(tmp_path / "p"), windows)
    assert steps == 3 and "aten::mm" in set(dispatches["Name"])
    assert (dispatches["Start"].to_numpy()[1:] >= dispatches["End"].to_numpy()[:-1]).all()  # never two at once


def chrome_trace(*rows, tid=1):
    """The text of a trace with events of these categories, names, times and durations."""
    keys = ("ph", "tid", "cat", "name", "ts", "dur")
    return json.dumps({"traceEvents": [dict(zip(keys, ("X", tid, *row), strict=True)) for row in rows]})


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_gpu_trace_counts_kernels_and_copies_only(tmp_path, name):
    """In ns; and those that outlive the range of their step count, as torch.profiler records nothing but steps."""
    text = chrome_trace(
        ("kernel", "rmsnorm_kernel", 10.5, 2.25), ("gpu_memcpy", "Memcpy HtoD", 20, 1), ("gpu_memset", "Memset", 40, 2),
        ("gpu_user_annotation", "step", 10, 20), ("user_annotation", "step", 9, 30), ("cpu_op", "aten::mm", 9, 5),
    )  # fmt: skip
    (gzip.open if name.endswith("gz") else open)(tmp_path / name, "wt").write(text)
    for path in (tmp_path, tmp_path / name):
        table, steps = readers.read_step_stats(path)
        rows = [("rmsnorm_kernel", 2250), ("Memset", 2000), ("Memcpy HtoD", 1000)]
        assert steps == 1 and list(table[["Name", "TotalDurationNs"]].itertuples(index=False, name=None)) == rows
    assert readers.step_windows(tmp_path) == ([(9000, 39000)], 1)


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


def write_one(path):
    """A good file of this name."""
    if path.suffix == ".json":
        path.write_text(chrome_trace(*(("kernel", d.name, d.start, 1) for d in RUN.dispatches)))
    elif path.suffix == ".db":
        records.write_rocpd(path, RUN)
    elif "stats" in path.name:
        records.write_stats(path, RUN.dispatches)
    else:
        records.write_kernel_trace(path, (7, 0), RUN.dispatches)


@pytest.mark.parametrize("cut", [1, 70, None])
@pytest.mark.parametrize("name", ["a_kernel_stats.csv", "a_kernel_trace.csv", "trace.json", "a_results.db"])
def test_truncated_file(tmp_path, name, cut):
    path = tmp_path / name
    write_one(path)
    path.write_bytes(path.read_bytes()[: cut and -cut * (100 if name.endswith("db") else 1)] if cut else b"")
    with pytest.raises(Unreadable, match=f"{name} .*profile"):
        read_kernel_stats(path)


def test_a_table_without_kernels_is_empty(tmp_path):
    records.write_rows(tmp_path / "a_kernel_stats.csv", COLUMNS, [])
    records.write_kernel_trace(tmp_path / "b_kernel_trace.csv", (6, 4), [])
    records.write_rocpd(tmp_path / "c.db", records.Run([], [], [], []))
    for name in ("a_kernel_stats.csv", "b_kernel_trace.csv", "c.db"):
        table = read_kernel_stats(tmp_path / name)
        assert list(table.columns) == COLUMNS and len(table) == 0


@pytest.mark.parametrize("line", [
    "x,y", '"k",1,2', '"ope', '"k","many",2,3,4,5,6,7', "\xff\xfe", '"k",1,2,3,4,5,6,7,8', "k,1,2,3,4,5,6,7,8",
])  # fmt: skip
@pytest.mark.parametrize("at", [1, 3])
def test_damaged_line(tmp_path, line, at):
    """It swallows no row."""
    path = tmp_path / "a_kernel_stats.csv"
    write_one(path)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:at], line.encode("latin1"), *lines[at:]]) + b"\n")
    with pytest.raises(Unreadable, match="a_kernel_stats.csv is damaged"):
        read_kernel_stats(path)


def test_a_trace_of_other_contents(tmp_path):
    texts = ["[{}]", '{"traceEvents": 1}', '{"traceEvents": [[]]}', "[" * 10**5, '{"a":' * 10**5]
    for text in texts + [chrome_trace(("kernel", "k", ts, 2)) for ts in ("1", None, 1e999, 10**30)]:
        torch_trace.events_of.cache_clear()
        (tmp_path / "trace.json").write_text(text)
        with pytest.raises(Unreadable, match="^[^\n]*trace.json is damaged or incomplete [^\n]*$"):
            read_kernel_stats(tmp_path)


def test_a_table_without_its_numbers(tmp_path):
    header = "Name,Calls,TotalDurationNs"
    (tmp_path / "a_kernel_stats.csv").write_text(f"{header}\nk,1,2\n")
    with pytest.raises(Unreadable, match="has no column AverageNs"):
        read_kernel_stats(tmp_path)
    (tmp_path / "a_kernel_stats.csv").write_text(f"{','.join(COLUMNS)}\nk,2,2,1,100,1,1,inf\n")
    with pytest.raises(Unreadable, match="rows without all their numbers"):
        read_kernel_stats(tmp_path)


# --- names as compilers make them

NAMES = ['f<"a">(int)', 'f<"a", 3>(int, float)', 'a","b', '"', "nan", "NULL", "NA", "", "größe", "7"]


def write_raw(path, header, rows, encoding="utf-8"):
    """A CSV file as rocprofv3 writes it: words within quotation marks, and nothing escaped."""
    lines = [",".join(f'"{cell}"' if isinstance(cell, str) else str(cell) for cell in row) for row in [header, *rows]]
    path.write_bytes(("\n".join(lines) + "\n").encode(encoding))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_read_as_it_is(tmp_path, name):
    names = ["first", name, name, "last"]
    trace = "Kind,Agent_Id,Queue_Id,Kernel_Name,Correlation_Id,Start_Timestamp,End_Timestamp,Grid_Size_X".split(",")
    rows = [["KERNEL_DISPATCH", "Agent 1", 1, name, i, 100 * i, 100 * i + 7, 64] for i, name in enumerate(names)]
    write_raw(tmp_path / "a_kernel_trace.csv", trace, rows)
    dispatches = readers.read_dispatches(tmp_path)
    assert list(dispatches.itertuples(index=False, name=None)) == [(r[3], r[5], r[6]) for r in rows]
    counted = "Dispatch_Id,Kernel_Name,Grid_Size,Counter_Name,Counter_Value,Start_Timestamp,End_Timestamp".split(",")
    counts = [[i, name, 64, "SQ_WAVES", 2.5, 100 * i, 100 * i + 7] for i, name in enumerate(names)]
    write_raw(tmp_path / "a_counter_collection.csv", counted, counts)
    assert readers.read_step_counters(tmp_path)[0]["SQ_WAVES"].to_dict() == dict.fromkeys(names, 2.5)
    write_raw(tmp_path / "a_kernel_stats.csv", COLUMNS, [[name, 2, 14, 7.0, 1e-05, 7, 7, 0.0]])
    assert list(read_kernel_stats(tmp_path)["Name"]) == [name]
    read_kernel_stats(tmp_path).to_csv(tmp_path / "b.csv", index=False)  # which escapes
    assert list(read_kernel_stats(tmp_path / "b.csv")["Name"]) == [name]
    records.write_rocpd(tmp_path / "a.db", RUN._replace(dispatches=[records.Record(name, 1, 2)]))
    assert list(readers.read_dispatches(tmp_path / "a.db")["Name"]) == [name]
    text = f'"ID","Kernel Name","a__b.sum"\n"","","ns"\n"0","{name.replace(chr(34), 2 * chr(34))}","5"\n'
    (tmp_path / "ncu_raw.csv").write_text(text)
    assert readers.read_step_counters(tmp_path / "ncu_raw.csv")[0].index.to_list() == [name]


def test_names_that_are_not_utf_8(tmp_path):
    """They are read, with a mark in the place of each byte that is none, the same in every format."""
    header = ["Kernel_Name", "Start_Timestamp", "End_Timestamp"]
    write_raw(tmp_path / "a_kernel_trace.csv", header, [["gr\xf6\xdfe", 1, 2], ["ok", 3, 4]], encoding="latin-1")
    records.write_rocpd(tmp_path / "a.db", RUN._replace(dispatches=[records.Record("x", 1, 2), RUN.dispatches[0]]))
    symbols = "rocpd_info_kernel_symbol_00000000_0000_0000_0000_000000000001"
    set_name = f"UPDATE {symbols} SET display_name = CAST(x'6772f6df65' AS TEXT) WHERE display_name = 'x'"
    change(tmp_path / "a.db", [set_name])
    (tmp_path / "trace.json").write_bytes(chrome_trace(("kernel", "@", 1, 2)).encode().replace(b"@", b"gr\xf6\xdfe"))
    for name in ("a_kernel_trace.csv", "a.db", "trace.json"):
        assert readers.read_dispatches(tmp_path / name)["Name"][0] == "gr\ufffd\ufffde"


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
    with pytest.raises(Unreadable, match="a.db has rocpd's schema_version 5.2.0, .*--output-format csv$") as raised:
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
