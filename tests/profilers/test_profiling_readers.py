"""The readers: one table from the files of either ROCm release, a rocpd database, or torch.profiler."""

import gzip
import json
import math
import os
import re
from pathlib import Path

import pandas as pd
import pytest

import tiny_llama_v3 as llama
from measure.command_line import UsageError
from profilers import readers
from profilers.kernel_names import operation_of, short_name
from profilers.readers import COLUMNS, Unreadable, files, read_kernels, rocpd
from tests.fakes import records
from tests.fakes.records import Record, Run, change, chrome_trace

RUN = Run(
    # Of a, 10, 30 and 60 ns in two steps, and of b, 99; the warm-up and what runs between the steps are slower.
    dispatches=[Record("a", 100, 900), Record("a", 1000, 1010), Record("b", 1020, 1119), Record("a", 1200, 1230),
                Record("between", 1400, 1500), Record("a", 1600, 1660)],
    ranges=[Record("step", 990, 1300), Record("forward", 990, 1100), Record("step", 1590, 1700)],
    api_calls=[Record("hipLaunchKernel", 995, 997)],
)  # fmt: skip
NAN = math.nan
# Calls, total, average, percentage, least, most, deviation.
OF_THE_STEPS = [["a", 3, 100, 100 / 3, 10000 / 199, 10, 60, pytest.approx(25.16611478)],
                ["b", 1, 99, 99.0, 9900 / 199, 99, 99, 0.0]]  # fmt: skip
OF_THE_RUN = {"a": (4, 900), "between": (1, 100), "b": (1, 99)}


def write_recording(prefix, kind, run=RUN, release=(7, 0), streams=(), **process):
    """Kernels and ranges of a process, as rocprofv3 leaves them, or torch.profiler, which records only steps.

    streams: that of each kernel; process: the guid and pid that a database knows.
    """
    if kind == "db":
        records.write_rocpd(Path(f"{prefix}_results.db"), run, streams=streams, **process)
    elif kind == "json":
        kernels = run.in_steps() if run.ranges else run.dispatches
        rows = [("user_annotation", r.name, r.start / 1e3, r.duration / 1e3) for r in run.ranges]
        rows += [("kernel", d.name, d.start / 1e3, d.duration / 1e3, stream)
                 for d, stream in zip(kernels, streams or [1] * len(kernels), strict=True)]  # fmt: skip
        Path(prefix).mkdir(parents=True)
        Path(prefix, "trace.json").write_text(chrome_trace(*rows))
    elif kind == "results.json":
        records.write_results_json(Path(f"{prefix}_results.json"), run, streams=streams)
    else:
        records.write_kernel_trace(Path(f"{prefix}_kernel_trace.csv"), release, run.dispatches, streams)
        if run.ranges:
            records.write_markers(Path(f"{prefix}_marker_api_trace.csv"), release, run.ranges)


def sums_of(table):
    return {row.Name: (row.Calls, row.TotalDurationNs) for row in table.itertuples()}


@pytest.mark.parametrize("kind, release", [
    ("csv", (6, 4)), ("csv", (7, 0)), ("db", (7, 0)), ("json", None), ("results.json", None),
])  # fmt: skip
def test_every_kind_of_file_gives_the_same_tables(tmp_path, kind, release):
    """Below the host's name, under the process id, as rocprofv3 leaves them without -o."""
    write_recording(tmp_path / "node01" / "10470", kind, RUN, release)
    table, steps, processes = read_kernels(tmp_path)
    assert table.values.tolist() == OF_THE_STEPS and list(table) == COLUMNS and (steps, processes) == (2, 1)
    (process,) = readers.read_processes(tmp_path)
    assert process.windows == [(990, 1300), (1590, 1700)]
    assert list(readers.read_ranges(tmp_path).itertuples(index=False, name=None)) == RUN.ranges
    expected = RUN.in_steps() if kind == "json" else RUN.dispatches
    assert list(readers.read_dispatches(tmp_path).itertuples(index=False, name=None)) == expected


@pytest.mark.parametrize("kind", ["csv", "db"])
def test_each_process_has_its_own_steps(tmp_path, kind):
    """The second is in its warm-up while the first is in a step; the third has no steps, the fourth failed."""
    for folder, run in (("0", RUN), ("1", RUN.later(900)), ("2", RUN._replace(ranges=[])), ("3.failed", RUN)):
        write_recording(tmp_path / f"rank_{folder}" / "hotspots", kind, run)
    table, steps, processes = read_kernels(tmp_path)
    assert (steps, processes) == (4, 2) and sums_of(table) == {"a": (6, 200), "b": (2, 198)}


def test_processes_in_one_folder_are_told_apart(tmp_path):
    """Without -o, or with %pid% in it, their files lie side by side; a file has the steps of its process."""
    write_recording(tmp_path / "10470", "csv")
    write_recording(tmp_path / "10471", "csv", RUN.later(900))
    records.write_stats(tmp_path / "10470_kernel_stats.csv", RUN.dispatches)
    assert read_kernels(tmp_path)[1:] == (4, 2)
    table, *counts = read_kernels(tmp_path / "10471_kernel_trace.csv")
    assert counts == [2, 1] and table.values.tolist() == OF_THE_STEPS
    table, *counts = read_kernels(tmp_path / "10470_kernel_stats.csv")
    assert counts == [0, 1] and sums_of(table) == OF_THE_RUN


def test_without_steps_the_whole_run_counts(tmp_path):
    write_recording(tmp_path / "1", "csv", RUN._replace(ranges=[Record("steps", 0, 1)]))
    write_recording(tmp_path / "2", "csv", RUN._replace(ranges=[]))
    table, *counts = read_kernels(tmp_path)
    assert counts == [0, 2] and sums_of(table) == {name: (2 * n, 2 * ns) for name, (n, ns) in OF_THE_RUN.items()}


def test_tables_of_processes_are_merged(tmp_path):
    for number, kernels in enumerate((RUN.dispatches[:4], RUN.dispatches[4:])):
        records.write_stats(tmp_path / f"{number}_kernel_stats.csv", kernels)
    table, *counts = read_kernels(tmp_path)
    assert counts == [0, 2] and sums_of(table) == OF_THE_RUN
    assert table.iloc[0, 1:7].tolist() == [4, 900, 225.0, pytest.approx(90000 / 1099), 10, 800]


def test_passes_of_counters_are_no_timings(tmp_path):
    for folder, part in (("", RUN.dispatches[:3]), ("pass_1/", RUN.dispatches[3:]), ("pass_12/", RUN.dispatches[4:])):
        records.write_kernel_trace(tmp_path / f"{folder}k_kernel_trace.csv", (7, 0), part)
    assert len(readers.read_dispatches(tmp_path)) == len(readers.read_dispatches(tmp_path / "pass_1")) == 3


def test_a_database_names_ranges_and_calls(tmp_path):
    records.write_rocpd(tmp_path / "a.db", RUN)
    assert list(readers.read_ranges(tmp_path, "calls")["Name"]) == ["hipLaunchKernel"]
    for data in (None, "", "[]", '{"message": null}', '{"message"', '{"other": "step"}'):
        change(tmp_path / "a.db", ["UPDATE regions SET extdata = ? WHERE start = 1590", data])
        assert list(readers.read_ranges(tmp_path)["Name"]) == ["step", "forward", records.ROCTX_RANGE], data


# --- several queues and processes


KINDS = ["csv", "db", "json", "results.json"]
STEPS = [Record("step", 10**6 * n, 10**6 * n + 900_000) for n in (2, 3, 4)]


def kernels_of(step, *spans):
    """Dispatches at these times after the beginning of a step, in us: a, then b, and so on."""
    return [Record("abcdefg"[n], step.start + 1000 * s, step.start + 1000 * e) for n, (s, e) in enumerate(spans)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spans, us, noted, streams", [
    # The end of a comes 1.6 s late, over b, c and all later steps; or 20 us after b has begun.
    ([(50, 1.6e6), (130, 200), (210, 280)], {"a": 80, "b": 70, "c": 70}, "3 of 9 kernels last beyond .* 1599.870 ms",
     [7] * 9),
    ([(50, 150), (130, 200), (210, 280)], {"a": 80, "b": 70, "c": 70}, "3 of 9 .* 0.020 ms the most", [7] * 9),
    # c began too early, before b; of two with the same stamps the time counts once.
    ([(50, 120), (130, 200), (60, 280)], {"a": 10, "b": 70, "c": 70}, "6 of 9", [7] * 9),
    ([(50, 120), (50, 120), (210, 280)], {"a": 0, "b": 70, "c": 70}, "3 of 9", [7] * 9),
    ([(50, 120), (120, 200), (200, 280)], {"a": 70, "b": 80, "c": 80}, "", [7] * 9),  # one after the other
    ([(50, 120.02), (120, 200), (210, 280)], {"a": 70, "b": 80, "c": 70}, "", [7] * 9),  # AMD's clocks: 20 ns
    ([(50, 120), (90, 90), (210, 280)], {"a": 70, "b": 0, "c": 70}, "3 of 9 kernels last 0 ns", [7] * 9),
    ([(50, 800), (130, 200), (210, 280)], {"a": 750, "b": 70, "c": 70}, "", [1, 2, 2] * 3),  # which may overlap
])  # fmt: skip
def test_a_kernel_has_no_time_of_the_next_one_of_its_stream(tmp_path, capsys, kind, spans, us, noted, streams):
    run = Run([kernel for step in STEPS for kernel in kernels_of(step, *spans)], STEPS)
    write_recording(tmp_path / "k", kind, run, streams=streams)
    table, steps, _ = read_kernels(tmp_path)
    assert steps == 3 and sums_of(table) == {name: (3, 3000 * us) for name, us in us.items()}
    assert readers.read_dispatches(tmp_path)["End"].max() < 5 * 10**6  # nor in pictures and figures of a step
    told = capsys.readouterr().err
    assert re.search(noted, told) and told.count("\n") == bool(noted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_that_lasts_longer_than_a_step_is_named(tmp_path, capsys, kind):
    """No later kernel tells where the last one of a stream ended."""
    run = Run(kernels_of(STEPS[0], (50, 120), (130, 1.6e6)), STEPS)
    write_recording(tmp_path / "k", kind, run)
    assert readers.read_kernels(tmp_path)[1] == 3
    told = capsys.readouterr().err
    assert "1 kernels last longer than any step, b 1599.870 ms of 0.900: " in told and told.count("\n") == 1


@pytest.mark.parametrize("us, noted", [(449, ""), (451, ": kernels add up to 0.902 ms a step of 0.900: several ")])
def test_kernels_that_add_up_to_more_than_a_step_are_noted(tmp_path, capsys, us, noted):
    """The database knows no streams: that two overlap is no fault in itself."""
    spans = (0, us), (100, 100 + us)
    run = Run([kernel for step in STEPS for kernel in kernels_of(step, *spans)], STEPS)
    write_recording(tmp_path / "k", "db", run)
    assert readers.read_kernels(tmp_path)[0]["TotalDurationNs"].sum() == 3000 * us * len(spans)
    told = capsys.readouterr().err
    assert noted in told and bool(told) == bool(noted)


def test_a_file_has_no_content_of_other_formats(tmp_path):
    """Only a name that no profiler gives may be that of a trace: rocprofv3's JSON has no calls."""
    write_recording(tmp_path / "k", "results.json")
    assert readers.read_ranges(tmp_path / "k_results.json", "calls").empty
    (process,) = readers.read_processes(tmp_path)
    assert process.calls().empty
    write_recording(tmp_path / "t", "json")
    os.rename(tmp_path / "t" / "trace.json", tmp_path / "mine.json")
    assert read_kernels(tmp_path / "mine.json")[1] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_what_starts_at_0_has_no_stamp(tmp_path, capsys, kind):
    """Neither a kernel nor a range; but a trace may begin at 0."""
    later = 5 * 10**9
    ranges = [Record("step", later, later + 10**6), Record("step", 0, later + 10**6)]
    run = Run([Record("a", 0, later), Record("b", later + 20, later + 30)], ranges)
    write_recording(tmp_path / "k", kind, run)
    assert sums_of(read_kernels(tmp_path)[0]) == {"b": (1, 10)} and read_kernels(tmp_path)[1] == 1
    told = capsys.readouterr().err
    for name in "a", "step":
        assert f"1 of 2 rows have figures that cannot be, the first of {name}: Start 0" in told
    write_recording(tmp_path / "early" / "k", kind, Run([Record("a", 0, 10**6)]))
    assert sums_of(read_kernels(tmp_path / "early")[0]) == {"a": (1, 10**6)}


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_without_times_are_refused(tmp_path, kind):
    write_recording(tmp_path / "k", kind, Run([Record("a", 50, 50), Record("b", 60, 60)]))
    with pytest.raises(Unreadable, match="all 2 kernels last 0 ns"):
        read_kernels(tmp_path)


@pytest.mark.parametrize("kind", ["csv", "db", "results.json"])
@pytest.mark.parametrize("ranges, told", [
    ([Record("step", 10**12, 10**12 + 900)], "none of its 6 kernels starts within one of its 1 steps"),
    ([Record("step", 1000, 1000), Record("step", 1600, 1600)], ""),  # marks at the beginning of steps
])  # fmt: skip
def test_steps_that_hold_no_kernels_are_none(tmp_path, capsys, kind, ranges, told):
    write_recording(tmp_path / "k", kind, RUN._replace(ranges=ranges))
    table, steps, _ = read_kernels(tmp_path)
    assert steps == 0 and sums_of(table) == OF_THE_RUN and re.search(told, capsys.readouterr().err)


def test_the_kernels_of_a_profilers_table_are_not_preferred(tmp_path):
    """Its own sums have the stamps that cannot be."""
    kernels = [Record("a", 100, 10**9), Record("b", 200, 300)]
    write_recording(tmp_path / "k", "csv", Run(kernels))
    records.write_stats(tmp_path / "k_kernel_stats.csv", kernels)
    assert sums_of(read_kernels(tmp_path)[0]) == {"a": (1, 100), "b": (1, 100)}
    with open(tmp_path / "k_kernel_stats.csv", "a") as file:
        file.write('"c",0,0,0,0,0,0,0\n"d",1,5,5,0,9,9,0\n')
    assert set(read_kernels(tmp_path / "k_kernel_stats.csv")[0]["Name"]) == {"a", "b"}


def write_merged(path, runs, kind):
    """One file of several processes, as rocpd merges and converts them, or rocprofv3's JSON lists them."""
    if kind == "results.json":
        records.write_results_json(path / "0_results.json", *runs)
    elif kind == "db":
        for number, run in enumerate(runs):
            records.write_rocpd(path / "0_results.db", run, guid=f"g{number}", pid=100 + number)
    else:
        for number, run in enumerate(runs):
            write_recording(path / f"{number}", kind, run)
        for ending in ("kernel_trace.csv", "marker_api_trace.csv"):
            files_of = sorted(path.glob(f"*_{ending}"))
            tables = [pd.read_csv(file).assign(Guid=f"g{number}") for number, file in enumerate(files_of)]
            pd.concat(tables).to_csv(path / f"0_{ending}", index=False)
            for file in files_of[1:]:
                file.unlink()


@pytest.mark.parametrize("kind", ["csv", "db", "results.json"])
@pytest.mark.parametrize("later", [0, 5, 900])  # 900: the other's warm-up lies in this one's step
def test_processes_in_one_file_are_told_apart(tmp_path, capsys, kind, later):
    write_merged(tmp_path, [RUN, RUN.later(later)], kind)
    table, steps, processes = read_kernels(tmp_path)
    assert (steps, processes) == (4, 2) and sums_of(table) == {"a": (6, 200), "b": (2, 198)}
    windows = [process.windows for process in readers.read_processes(tmp_path)]
    assert windows == [[(990, 1300), (1590, 1700)], [(990 + later, 1300 + later), (1590 + later, 1700 + later)]]
    assert not capsys.readouterr().err


@pytest.mark.parametrize("kind", ["csv", "db"])
def test_without_steps_processes_in_one_file_are_counted(tmp_path, kind):
    write_merged(tmp_path, [RUN._replace(ranges=[])] * 3 if kind == "db" else [RUN] * 3, kind)
    for file in tmp_path.glob("*marker_api_trace.csv"):
        file.unlink()
    assert read_kernels(tmp_path)[1:] == (0, 3)


def test_a_process_that_was_merged_and_lies_beside_counts_once(tmp_path, capsys):
    write_merged(tmp_path / "merged", [RUN, RUN.later(5)], "db")
    write_recording(tmp_path / "rank_0", "db", guid="g0", pid=100)
    assert read_kernels(tmp_path)[1:] == (4, 2)
    assert capsys.readouterr().err.count("it counts once") == 1


def test_steps_of_processes_that_cannot_be_told_apart(tmp_path, capsys):
    """Somebody merged two traces of torch.profiler: their kernels have the same GPU and stream, and overlap."""
    events = []
    for pid, run in ((11, RUN), (12, RUN.later(20))):
        trace = chrome_trace(*(("user_annotation", r.name, r.start, r.duration) for r in run.ranges),
                             *(("kernel", d.name, d.start, d.duration) for d in run.in_steps()))  # fmt: skip
        events += [e | {"pid": 0 if e["cat"] == "kernel" else pid} for e in json.loads(trace)["traceEvents"]]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    table, steps, _ = read_kernels(tmp_path)
    assert steps == 4 and sums_of(table) == {"a": (6, 200_000), "b": (2, 198_000)}
    (process,) = readers.read_processes(tmp_path)
    assert process.windows == [(990_000, 1_320_000), (1_590_000, 1_720_000)]
    assert "steps overlap, as of several processes or threads" in capsys.readouterr().err


def test_a_merged_table_whose_kernels_do_not_name_their_process(tmp_path, capsys):
    """Those of ROCm do not: all have the numbers 0 of their queue and stream."""
    dispatches, markers = tmp_path / "k_kernel_trace.csv", tmp_path / "k_marker_api_trace.csv"
    records.write_kernel_trace(dispatches, (7, 0), [*RUN.dispatches, *RUN.later(5).dispatches])
    records.write_markers(markers, (7, 0), [*RUN.ranges, *RUN.later(5).ranges])
    pd.read_csv(markers).assign(Process_Id=[1] * 3 + [2] * 3).to_csv(markers, index=False)
    table, steps, _ = read_kernels(tmp_path)
    assert steps == 4 and sums_of(table) == {"a": (6, 200), "b": (2, 198)}
    assert capsys.readouterr().err.count("steps overlap") == 1


def test_the_memory_of_two_processes_is_not_added(tmp_path):
    records.write_rocpd(tmp_path / "a.db", RUN)
    columns = "guid, pid, type, level, agent_type, address, size, start"
    change(
        tmp_path / "a.db", [f"CREATE TABLE memory_allocations ({columns})"],
        ["""INSERT INTO memory_allocations VALUES ('g', 1, 'ALLOC', 'REAL', 'GPU', 16, 500, 1),
            ('h', 2, 'ALLOC', 'REAL', 'GPU', 16, 700, 2), ('g', 1, 'FREE', 'REAL', NULL, 16, 0, 3)"""],
    )  # fmt: skip
    assert readers.read_peak_memory(tmp_path / "a.db") == 700


# --- torch.profiler


def test_files_of_torch_profiler(tmp_path, capsys):
    flags = "--impl torch --device cpu --hidden-dim 32 --num-layers 1 --num-heads 2 --vocab-size 32 --batch-size 2"
    flags = [*flags.split(), "--seq-len", "8", "--num-steps", "1", "--output-dir", str(tmp_path / "json")]
    assert llama.main([*flags, "--profile", str(tmp_path / "p")]) == 0
    capsys.readouterr()
    (table, steps, _), written = read_kernels(tmp_path / "p"), pd.read_csv(tmp_path / "p" / "kernel_stats.csv")
    pd.testing.assert_frame_equal(table[COLUMNS[:-1]], written[COLUMNS[:-1]], check_dtype=False, atol=1e-6)
    # Not which comes first: a process that is interrupted inside a view makes that one the longest.
    assert steps == 3 and {"matrix product", "optimizer", "softmax"} <= set(table["Name"].map(operation_of))
    names = {"step", "forward", "backward", "optimizer", "layers.0 forward"}
    assert names <= set(readers.read_ranges(tmp_path / "p")["Name"])


@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_gpu_trace_counts_kernels_and_copies_only(tmp_path, is_compressed):
    """Also those that outlive the range of their step, as torch.profiler records nothing but steps."""
    text = chrome_trace(
        ("kernel", "rmsnorm_kernel", 10.5, 2.25), ("gpu_memcpy", "Memcpy HtoD", 20, 1), ("gpu_memset", "Memset", 40, 2),
        ("gpu_user_annotation", "step", 10, 20), ("user_annotation", "step", 9, 30), ("cpu_op", "aten::mm", 9, 5),
    )  # fmt: skip
    name, data = ("trace.json.gz", gzip.compress(text.encode())) if is_compressed else ("trace.json", text.encode())
    (tmp_path / name).write_bytes(data)
    table, steps, _ = read_kernels(tmp_path)
    assert steps == 1
    assert sums_of(table) == {"rmsnorm_kernel": (1, 2250), "Memset": (1, 2000), "Memcpy HtoD": (1, 1000)}


def test_operators_of_two_threads_count_both(tmp_path):
    """On a CPU an operator within another of its thread is part of it, and one beside it in another thread is not."""
    rows = [("aten::t", 0, 1), ("aten::linear", 0, 10), ("aten::addmm", 2, 5), ("aten::mm", 3, 4, 2),
            ("aten::add", 10, 3)]  # fmt: skip
    (tmp_path / "trace.json").write_text(chrome_trace(*(("cpu_op", *row) for row in rows)))
    assert set(read_kernels(tmp_path)[0]["Name"]) == {"aten::linear", "aten::mm", "aten::add"}


@pytest.mark.parametrize("named", [True, False])
def test_what_torch_compile_generates_for_a_cpu(tmp_path, capsys, named):
    """Its loops in C++ have events if Inductor was told so; else their time is missing, which is said."""
    rows = [("## Call CompiledFxGraph f1 ##", 0, 100), ("aten::mm", 10, 20), ("graph_0_cpp_fused_add_mm_1", 40, 30)]
    events = [("cpu_op", *row) for row in (rows if named else rows[:2])]
    (tmp_path / "trace.json").write_text(chrome_trace(*events))
    expected = {"aten::mm": (1, 20_000)} | ({"graph_0_cpp_fused_add_mm_1": (1, 30_000)} if named else {})
    assert sums_of(read_kernels(tmp_path)[0]) == expected
    told = "what torch.compile generated is missing, as it has no events: record with TORCHINDUCTOR_CPP_ENABLE_KERNEL"
    assert (told in capsys.readouterr().err) != named


@pytest.mark.parametrize("second", [(10, 50), (10, 150)])
def test_the_window_of_steps_that_overlap_ends_with_the_last(tmp_path, second):
    """Also where the second lies within the first."""
    steps = [Record("step", 0, 100), Record("step", *second)]
    kernels = [Record("k", at, at + 5) for at in (20, 70, second[1] - 5, 160)]
    records.write_rocpd(tmp_path / "a.db", Run(kernels, steps))
    (process,) = readers.read_processes(tmp_path)
    assert process.windows == [(0, max(100, second[1]))] and len(process.measured) == 3


def test_a_kernel_belongs_to_the_step_in_which_it_starts():
    dispatches = files.intervals([("before", 80, 120), ("inside", 110, 130), ("beyond", 190, 230), ("later", 210, 220)])
    assert list(readers.within(dispatches, (100, 200))["Name"]) == ["inside", "beyond"]
    assert list(readers.within(dispatches, (100, 150), (205, 300))["Name"]) == ["inside", "later"]


# --- counters


def test_counters_are_means_over_the_steps_of_all_passes(tmp_path):
    """Each pass has steps at other times. A file of kernels beside them counts nothing."""
    records.write_rocpd(tmp_path / "kernels_results.db", RUN)
    for number, names in enumerate((["FETCH_SIZE"], ["WRITE_SIZE", "FETCH_SIZE"])):
        slowed = RUN._replace(dispatches=[d._replace(end=d.end + 1000 * (number + 1)) for d in RUN.dispatches])
        records.write_rocpd(tmp_path / f"pass_{number}" / "a_results.db", slowed.later(10_000 * number), names)
    table, is_of_steps = readers.read_step_counters(tmp_path)
    assert is_of_steps and list(table.index) == ["a", "b"]
    # FETCH_SIZE is half a KiB for each 100 ns: 10, 10 and 10 of a's calls in one pass, 20, 20, 20 in the other.
    assert table.loc["a"].to_dict() == {"FETCH_SIZE": 7.5, "WRITE_SIZE": 5.0}


@pytest.mark.parametrize("ranges", [[], [Record("step", 2000, 3000)]])
def test_counters_without_steps_or_outside_of_them_are_of_the_whole_run(tmp_path, ranges):
    records.write_counters(tmp_path / "a_counter_collection.csv", RUN.dispatches, ["SQ_WAVES", "FETCH_SIZE"])
    records.write_markers(tmp_path / "a_marker_api_trace.csv", (7, 0), ranges)
    table, is_of_steps = readers.read_step_counters(tmp_path)
    assert not is_of_steps and table.loc["a", "SQ_WAVES"] == 16 / 4  # 800 ns alone are counted
    assert ranges or sums_of(read_kernels(tmp_path)[0]) == OF_THE_RUN  # though the file has a row for each counter


def test_ncu(tmp_path):
    lines = [
        '"ID","Kernel Name","Block Size","dram__bytes_read.sum","name__x"',
        '"","","","byte",""',
        '"0","rmsnorm_kernel","(128, 1, 1)","1,000,000","word"',
        '"1","rmsnorm_kernel","(128, 1, 1)","2,000,000","word"',
    ]
    (tmp_path / "ncu_raw.csv").write_text("\n".join(lines) + "\n")
    table, is_of_steps = readers.read_step_counters(tmp_path)
    assert is_of_steps and table.to_dict() == {"dram__bytes_read.sum": {"rmsnorm_kernel": 1_500_000}}
    (tmp_path / "ncu_raw.csv").write_text("==ERROR== no kernels\n")
    with pytest.raises(Unreadable, match="ncu_raw.csv"):
        readers.read_step_counters(tmp_path)


@pytest.mark.parametrize("kind", ["csv", "db"])
@pytest.mark.parametrize("folder", ["pmc_{}", "pass_{}", "pass_{}/node01"])
def test_passes_by_themselves(tmp_path, capsys, kind, folder):
    """As rocprofv3 writes them for several --pmc, or for a file: the times are those of the first pass, and noted."""
    for number, names in enumerate((["SQ_WAVES"], ["FETCH_SIZE"]), 1):
        prefix = tmp_path / folder.format(number) / "c"
        slowed = RUN._replace(dispatches=[d._replace(end=d.start + 10 * number) for d in RUN.dispatches])
        if kind == "db":
            records.write_rocpd(Path(f"{prefix}_results.db"), slowed, names)
        else:
            records.write_counters(Path(f"{prefix}_counter_collection.csv"), slowed.dispatches, names)
            records.write_markers(Path(f"{prefix}_marker_api_trace.csv"), (7, 0), slowed.ranges)
    table, is_of_steps = readers.read_step_counters(tmp_path)
    assert is_of_steps and set(table) == {"SQ_WAVES", "FETCH_SIZE"} and table.notna().all(axis=None)
    table, *counts = read_kernels(tmp_path)
    assert counts == [2, 1] and sums_of(table) == {"a": (3, 30), "b": (1, 10)}
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "times are those of kernels while they were counted, which slows them" in told


@pytest.mark.parametrize("names", [[], ["SQ_WAVES"]])
def test_a_database_tells_whether_its_kernels_were_counted(tmp_path, capsys, names):
    records.write_rocpd(tmp_path / "c_results.db", RUN, names)
    assert sums_of(read_kernels(tmp_path)[0]) == {"a": (3, 100), "b": (1, 99)}
    assert ("while they were counted" in capsys.readouterr().err) == bool(names)


def test_kernels_that_the_passes_do_not_share(tmp_path, capsys):
    """They are told, with how often the first of them ran; those that all passes ran alike are not."""
    for number, (names, part) in enumerate(((["SQ_WAVES"], [0, 2]), (["FETCH_SIZE", "WRITE_SIZE"], [0, 3, 4])), 1):
        dispatches = [RUN.dispatches[index] for index in part]  # a and b, then a, a and between
        records.write_counters(tmp_path / f"pass_{number}" / "c_counter_collection.csv", dispatches, names)
    table, _ = readers.read_step_counters(tmp_path)
    assert table.loc["b"].isna().to_dict() == {"SQ_WAVES": False, "FETCH_SIZE": True, "WRITE_SIZE": True}
    told = "3 of 3 kernels ran more often in one pass than in another, such as a (1 in pass_1, 2 in pass_2): "
    assert told in capsys.readouterr().err


def test_a_database_of_schema_4(tmp_path):
    """It has a row for each instance of a counter."""
    records.write_rocpd(tmp_path / "a.db", RUN)
    change(
        tmp_path / "a.db", ["CREATE TABLE kernel_pmc_events (id, guid, name, start, pmc_name, pmc_value)"],
        ["""INSERT INTO kernel_pmc_events VALUES (1, 'g', 'a', 1000, 'SQ_WAVES', 3.0),
            (1, 'g', 'a', 1000, 'SQ_WAVES', 4.0), (2, 'g', 'a', 1200, 'SQ_WAVES', 9.0),
            (3, 'g', 'a', 1400, 'SQ_WAVES', 100.0)"""],
    )  # fmt: skip
    table, is_of_steps = readers.read_step_counters(tmp_path)
    assert is_of_steps and table.loc["a", "SQ_WAVES"] == 8.0
    # Of two processes in a file, each counts its kernels from 1 on.
    change(tmp_path / "a.db", ["INSERT INTO kernel_pmc_events VALUES (1, 'h', 'a', 1000, 'SQ_WAVES', 5.0)"])
    assert sorted(rocpd.read(tmp_path / "a.db", "counters")["Value"]) == [5.0, 7.0, 9.0, 100.0]


@pytest.mark.parametrize("gpu", [1, 6])  # PyTorch's numbers of CUDA and of HIP
def test_the_peak_of_memory_is_the_most_at_a_time(tmp_path, gpu):
    events = [{"ph": "i", "name": "[memory]", "ts": ts, "args": {"Device Type": kind, "Total Allocated": total}}
              for ts, kind, total in ((1, 1, 400), (2, gpu, 1000), (3, 0, 9999), (4, 1, 600))]  # fmt: skip
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert readers.read_peak_memory(tmp_path) == 1000
    records.write_rocpd(tmp_path / "a.db", RUN)
    assert readers.read_peak_memory(tmp_path / "a.db") == 0
    change(
        tmp_path / "a.db", ["CREATE TABLE memory_allocations (type, level, agent_type, address, size, start)"],
        ["""INSERT INTO memory_allocations VALUES ('ALLOC', 'REAL', 'GPU', 16, 500, 1),
            ('ALLOC', 'REAL', 'CPU', 64, 9000, 2), ('FREE', 'REAL', NULL, 16, 0, 3),
            ('ALLOC', 'REAL', 'GPU', 16, 300, 4), ('ALLOC', 'SCRATCH', 'GPU', 16, 7000, 5),
            ('FREE', 'REAL', NULL, 64, 0, 6), ('ALLOC', 'VIRTUAL', 'GPU', 128, 400, 7),
            ('FREE', 'REAL', NULL, 16, 0, 8)"""],
    )  # fmt: skip
    assert readers.read_peak_memory(tmp_path / "a.db") == 700


# --- files that are not as they should be


@pytest.mark.parametrize("name, told", [
    ("", "holds no kernels that a profiler recorded, in one of .*trace.json"), ("absent", "does not exist"),
    ("README.md", "README.md holds no kernels that a profiler recorded"),
])  # fmt: skip
def test_what_is_no_profile(tmp_path, name, told):
    (tmp_path / "README.md").write_text("# Title\n")
    with pytest.raises(Unreadable, match=told):
        read_kernels(tmp_path / name)


def write_one(path):
    """A good file of this name."""
    if ".json" in path.suffixes:
        path.write_text(chrome_trace(*(("kernel", d.name, d.start, 1) for d in RUN.dispatches)))
    elif path.suffix == ".db":
        records.write_rocpd(path, RUN)
    elif "stats" in path.name:
        records.write_stats(path, RUN.dispatches)
    else:
        records.write_kernel_trace(path, (7, 0), RUN.dispatches)


NAMES = ["a_kernel_stats.csv", "a_kernel_trace.csv", "trace.json", "a_results.db"]


@pytest.mark.parametrize("cut", [1, 70])
@pytest.mark.parametrize("name", [*NAMES, "trace.json.gz"])
def test_truncated_file(tmp_path, name, cut):
    path = tmp_path / name
    write_one(path)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(path.read_bytes()))
    path.write_bytes(path.read_bytes()[: -cut * (100 if name.endswith("db") else 1)])
    with pytest.raises(Unreadable, match=f"{name} is damaged.*profile again"):
        read_kernels(path)


@pytest.mark.parametrize("name", [*NAMES, "ncu_raw.csv"])
def test_empty_file(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(Unreadable, match=f"{name} is empty, as where a profiler was ended .*: profile again$"):
        (readers.read_step_counters if "ncu" in name else read_kernels)(tmp_path)


@pytest.mark.parametrize("name", ["1_kernel_trace.csv", "host_7.1700000000.pt.trace.json", "k_results.json"])
def test_compressed_files(tmp_path, name):
    """Their windows and calls too, in a folder as by themselves; PyTorch itself writes traces of this name."""
    kind = "csv" if name.endswith("csv") else "json" if "trace.json" in name else "results.json"
    write_recording(tmp_path / ("k" if kind == "results.json" else "1"), kind)
    if kind == "json":
        os.rename(tmp_path / "1" / "trace.json", tmp_path / name)
    assert read_kernels(tmp_path)[1:] == (2, 1)
    for file in filter(Path.is_file, list(tmp_path.iterdir())):
        (tmp_path / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    for path in tmp_path, tmp_path / f"{name}.gz":
        table, *counts = read_kernels(path)
        assert counts == [2, 1] and table.values.tolist() == OF_THE_STEPS
    os.rename(tmp_path / f"{name}.gz", tmp_path / "mine.json.gz")
    assert kind != "json" or read_kernels(tmp_path / "mine.json.gz")[1] == 2


def test_what_sqlite_cannot_read_compressed(tmp_path):
    (tmp_path / "a_results.db.gz").write_bytes(gzip.compress(b"SQLite"))
    with pytest.raises(Unreadable, match=r"a_results.db.gz is compressed, .*: gunzip it$"):
        read_kernels(tmp_path)


@pytest.mark.parametrize("name, shown", [
    ('say "hi"', 'say "hi"'), ('{"device": "cpu"}(12): run', '{"device": "cpu"}(12): run'), ('"', '"'),
    (r"torch\cuda", r"torch\cuda"), (r"a \"quoted\" name", 'a "quoted" name'),
])  # fmt: skip
@pytest.mark.parametrize("between", [", ", ",\n    "])
def test_quotes_in_names(tmp_path, name, shown, between):
    """PyTorch escapes those of operators, and none in the name of a range."""
    event = ['{"ph": "X", "cat": "kernel", "name": "%s"', '"pid": 0', '"tid": 7', '"ts": %d', '"dur": 5}']
    event = between.join(event)
    (tmp_path / "trace.json").write_text(f'{{"traceEvents": [{event % (name, 10)},\n{event % ("b", 20)}]}}')
    assert sums_of(read_kernels(tmp_path)[0]) == {shown: (1, 5000), "b": (1, 5000)}


def test_json_that_is_none_though_it_is_whole(tmp_path):
    """To profile again would write the same."""
    (tmp_path / "trace.json").write_text(chrome_trace(("kernel", "k", 1, 2))[:-2] + ",]}")
    with pytest.raises(
        Unreadable, match=r"whole, but no JSON \(.*column \d+ .* would change nothing: mend this place$"
    ):
        read_kernels(tmp_path)


@pytest.mark.parametrize("name, told", [
    ("results.csv", "is of rocprof v1: record with rocprofv3"), ("r.stats.csv", "is of rocprof v1: record with rocpr"),
    ("a.pftrace", "is for Perfetto alone: record with --output-format csv"), ("b.proto", "is for Perfetto alone: rec"),
    ("MI300X_A1/pmc_perf.csv", "is of rocprof-compute: rocprof-compute analyze -p FOLDER"),
])  # fmt: skip
def test_a_folder_with_files_of_others_names_one(tmp_path, name, told):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("something")
    with pytest.raises(Unreadable, match=f"holds no kernels .*trace.json; {path} {told}"):
        read_kernels(tmp_path)


def test_a_table_of_rocprofv3_s_calls_is_not_taken_for_one_of_rocprof_v1(tmp_path):
    records.write_stats(tmp_path / "a_hip_api_stats.csv", RUN.api_calls)
    with pytest.raises(Unreadable, match="holds no kernels .*trace.json$"):
        read_kernels(tmp_path)


def test_a_table_without_kernels_is_empty(tmp_path):
    records.write_rows(tmp_path / "a_kernel_stats.csv", ",".join(COLUMNS), [])
    records.write_kernel_trace(tmp_path / "b_kernel_trace.csv", (6, 4), [])
    records.write_rocpd(tmp_path / "c.db", Run())
    for name in ("a_kernel_stats.csv", "b_kernel_trace.csv", "c.db"):
        table, *_ = read_kernels(tmp_path / name)
        assert list(table.columns) == COLUMNS and len(table) == 0


@pytest.mark.parametrize("line", [
    '"f<"a", 3>(int)",1,2,3,4,5,6,7', '"k",1,2,3,4,5,6,7,8',
])  # fmt: skip
@pytest.mark.parametrize("at", [1, 3])
def test_damaged_line(tmp_path, line, at):
    """It swallows no row."""
    path = tmp_path / "a_kernel_stats.csv"
    write_one(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:at], line, *lines[at:]]) + "\n")
    with pytest.raises(Unreadable, match="a_kernel_stats.csv is damaged"):
        read_kernels(path)


@pytest.mark.parametrize("start, end", [(9, 8), (9, 2.0**64), (-9, 5), (NAN, 5), (5, math.inf), (1e30, 1e31)])
@pytest.mark.parametrize("kind", ["csv", "db", "json", "results.json"])
def test_a_kernel_whose_times_cannot_be_is_left_out(tmp_path, capsys, kind, start, end):
    """It is counted, and the digits of the others stay."""
    now = 2**50 + 1 if kind in ("db", "json") else 2**60 + 1
    kernels = [Record("a", now, now + 10), Record("a", now + 20, now + 30), Record("b", start, end)]
    write_recording(tmp_path / "k", kind, Run(kernels))
    assert sums_of(read_kernels(tmp_path)[0]) == {"a": (2, 20)}
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and ": 1 of 3 rows have figures that cannot be, the first of b: Start " in err


def test_counters_that_are_no_numbers(tmp_path, capsys):
    """As a mean of nothing; where there are no others, nothing was counted, and the file is not damaged."""
    path = tmp_path / "a_counter_collection.csv"
    records.write_counters(path, RUN.dispatches[:1], ["MfmaUtil"])
    path.write_text(path.read_text().replace(",60.0,", ",nan,"))
    assert readers.read_step_counters(tmp_path)[0].empty
    told = f"note: {path}: 1 of 1 rows have figures that cannot be, the first of a, MfmaUtil: Start 100, End 900, Value"
    assert capsys.readouterr().err == f"{told} nan: left out\n"


def test_counters_without_times(tmp_path):
    """As ROCm 6.2 wrote them."""
    path = tmp_path / "a_counter_collection.csv"
    records.write_counters(path, RUN.dispatches, ["SQ_WAVES"])
    pd.read_csv(path).drop(columns=["Start_Timestamp", "End_Timestamp"]).to_csv(path, index=False)
    with pytest.raises(Unreadable, match="since ROCm 6.3, whose counters have times: record with ROCm 6.4 or newer$"):
        readers.read_step_counters(tmp_path)


def test_figures_of_a_profiler_that_cannot_be(tmp_path, capsys):
    """A counter that divided by 0, and percentages of which a row is missing; a note is told once."""
    stats, counted = tmp_path / "a_kernel_stats.csv", tmp_path / "a_counter_collection.csv"
    write_one(stats)
    stats.write_text("".join(stats.read_text().splitlines(True)[:2]))  # of the longest kernel alone
    records.write_counters(counted, RUN.dispatches, ["SQ_WAVES"])
    counted.write_text(counted.read_text().replace('"SQ_WAVES",16.0', '"SQ_WAVES",inf'))
    for _ in range(2):
        assert readers.read_step_counters(tmp_path)[0].loc["a", "SQ_WAVES"] == 0.0
        assert sums_of(read_kernels(stats)[0]) == {"a": (4, 900)}
    assert re.fullmatch(
        f"note: {counted}: 1 of 6 rows have .*: left out\nnote: {stats}: its percentages add up to 81.9, .*\n",
        capsys.readouterr().err,
    )


def test_a_pipe_is_not_read(tmp_path):
    for name in ("a_kernel_trace.csv", "trace.json", "a_results.json", "a.db"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(UsageError, match=f"{name} is no file: give a file"):
            read_kernels(tmp_path / name)


def test_a_table_without_its_columns(tmp_path):
    (tmp_path / "a_kernel_stats.csv").write_text("Name,Calls,Percentage,MinNs,MaxNs\nk,1,100,2,3\n")
    with pytest.raises(Unreadable, match="has no column TotalDurationNs: it is no such file of rocprofv3$"):
        read_kernels(tmp_path)
    (tmp_path / "results.stats.csv").write_text("Name,Calls,TotalDurationNs,AverageNs,Percentage\nk,1,2,2,100\n")
    with pytest.raises(Unreadable, match="no column MaxNs: .* but of rocprof v1: record with rocprofv3"):
        read_kernels(tmp_path / "results.stats.csv")
    (tmp_path / "results.csv").write_text("Index,KernelName,BeginNs,EndNs\n0,k,1,2\n")
    with pytest.raises(Unreadable, match="no column Calls: .* but of rocprof v1: record with rocprofv3"):
        read_kernels(tmp_path / "results.csv")
    (tmp_path / "pmc_perf.csv").write_text("Dispatch_ID,Kernel_Name,SQ_WAVES\n0,k,1\n")
    with pytest.raises(
        Unreadable, match="no column Calls: .* but of rocprof-compute: rocprof-compute analyze -p FOLDER"
    ):
        read_kernels(tmp_path / "pmc_perf.csv")


def test_a_trace_of_other_contents(tmp_path):
    bad = chrome_trace(("kernel", "k", "a", 2))
    for text in ("1", '{"traceEvents": 1}', '{"traceEvents": [[]]}', "[" * 10**5, bad):
        files.read_json.cache_clear()
        (tmp_path / "trace.json").write_text(text)
        with pytest.raises(Unreadable, match="^[^\n]*trace.json is damaged or incomplete [^\n]*$"):
            read_kernels(tmp_path)


def test_a_database_of_an_unknown_schema_is_refused(tmp_path, capsys):
    records.write_rocpd(tmp_path / "a.db", RUN)
    change(tmp_path / "results.db", ["CREATE TABLE A (KernelName, BeginNs, EndNs)"])
    assert sums_of(read_kernels(tmp_path)[0]) == {"a": (3, 100), "b": (1, 99)}
    told = f"{tmp_path}/results.db is no database of rocprofv3, but perhaps of rocprof v1: record with rocprofv3"
    assert capsys.readouterr().err == f"note: {told}\n"
    with pytest.raises(Unreadable, match=f"^{told}$"):
        read_kernels(tmp_path / "results.db")
    change(tmp_path / "a.db", ["ALTER TABLE kernels RENAME COLUMN start TO begin"])
    with pytest.raises(Unreadable, match="other than 3.0 and 4.1 .*no such column: start.*--output-format csv$"):
        read_kernels(tmp_path)


@pytest.mark.parametrize("name", ["f<4, 3>(int, float)", "nan", "", "größe", "7", "a\x1b[31mb\0"])
def test_every_name_is_read_as_it_is(tmp_path, name):
    """But for what a terminal obeys, which is escaped."""
    kernels = [Record("first", 1, 2), Record(name, 3, 5)]
    records.write_kernel_trace(tmp_path / "a_kernel_trace.csv", (7, 0), kernels)
    records.write_counters(tmp_path / "a_counter_collection.csv", kernels, ["SQ_WAVES"])
    records.write_stats(tmp_path / "a_kernel_stats.csv", kernels)
    records.write_rocpd(tmp_path / "a.db", Run(kernels))
    records.write_results_json(tmp_path / "b_results.json", Run(kernels))
    shown = name.replace("\x1b", r"\x1b").replace("\0", r"\x00")
    for file in ("a_kernel_trace.csv", "a_kernel_stats.csv", "a.db", "b_results.json"):
        assert sums_of(read_kernels(tmp_path / file)[0]) == {shown: (1, 2), "first": (1, 1)}
    read_kernels(tmp_path)[0].to_csv(tmp_path / "b.csv", index=False)
    assert list(readers.read_kernel_stats(tmp_path / "b.csv")["Name"]) == [shown, "first"]
    assert set(readers.read_step_counters(tmp_path)[0].index) == {shown, "first"}
    (tmp_path / "ncu_raw.csv").write_text(f'"ID","Kernel Name","a__b.sum"\n"","","ns"\n"0","{name}","5"\n')
    assert readers.read_step_counters(tmp_path / "ncu_raw.csv")[0].index.to_list() == [shown]


def test_names_that_are_not_utf_8(tmp_path):
    """They are read, with a mark in the place of each byte that is none, the same in every format."""
    for name in ("a_kernel_trace.csv", "trace.json"):
        write_one(tmp_path / name)
        text = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(text.replace(b'"a"', b'"gr\xf6\xdfe"'))
    records.write_rocpd(tmp_path / "a.db", RUN)
    change(tmp_path / "a.db", ["UPDATE kernels SET name = CAST(x'6772f6df65' AS TEXT) WHERE name = 'a'"])
    for name in ("a_kernel_trace.csv", "a.db", "trace.json"):
        assert readers.read_dispatches(tmp_path / name)["Name"][0] == "gr\ufffd\ufffde"


# --- names


def test_every_kernel_of_the_script_belongs_to_an_operation():
    source = Path(llama.__file__).read_text()
    kernels = [line.split("(")[0][4:] for line in source.splitlines() if line.startswith("def ") and "_kernel(" in line]
    assert len(kernels) > 10
    assert not [name for name in kernels if operation_of(name) == "other"]


OPERATIONS = {  # name of a kernel: operation
    "rmsnorm_backward_kernel": "RMSNorm backward", "flash_attention_kernel": "attention",
    "flash_attention_backward_dkdv_kernel": "attention backward", "swiglu_activation_kernel": "SwiGLU",
    "swiglu_hopper_kernel": "SwiGLU and its product",
    "swiglu_kernel": "SwiGLU matrix product, naive", "Cijk_Alik_Bljk_SB_MT64x64x32_MI16x16x4": "matrix product",
    "layers.0 forward": "layer", "layers.11 backward": "layer backward", "optimizer": "optimizer",
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT": "matrix product",
    "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1_execute": "matrix product",
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>(cutlass::Params)": "matrix product",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::Params)": "matrix product",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>(pytorch_flash::Flash_fwd_params)": "attenti"
    "on",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<x>(y)": "attention backward",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_bf16_knob_6_64x128x64": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_bf16_knob_26_128x128": "attention backward",
    "triton_red_fused_add_mul_rsqrt_3": "fused by torch.compile",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1>>(int, "
    "at::native::FillFunctor<float>, std::array<char*, 1>)": "copy or fill",
    "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<float>>(int)": "elementwise",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, MeanOps<float>>>(x)": "reduction",
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 7, false, false>(float*)": "softmax",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor"
    "<float, 4, (ADAM_MODE)1, false>>(x)": "optimizer",
    "Memcpy PtoP (Device -> Device)": "copy between GPUs",
    "Memcpy DtoD (Device -> Device)": "copy or fill", "__amd_rocclr_fillBufferAligned": "copy or fill",
    "aten::mm": "matrix product", "my_own_thing": "other",
    "Custom_Cijk_Ailk_Bljk_BBS_BH_MT64x64x32_MI16x16x1": "matrix product", "_matmul_ogs_128x256": "matrix product",
    "bmm_Bfloat16_E4m3_128x16": "matrix product", "triton_tem_fused_addmm_relu_3": "fused by torch.compile",
    "triton_poi_fused__scaled_dot_product_flash_attention_cat_view_2": "fused by torch.compile",
    "triton_red_fused_add_native_layer_norm_backward_7": "fused by torch.compile",
    "graph_0_cpp_fused__scaled_dot_product_flash_attention_2": "fused by torch.compile",
    "triton_tem_fused_flex_attention_1": "attention", "triton_tem_fused_flex_attention_backward_2": "attention back"
    "ward",
    "void ck_tile::kentry<2, ck_tile::FmhaFwdKernel<ck_tile::BlockFmhaPipelineQRKSVS<x>>>(y)": "attention",
    "_ZN7ck_tile6kentryILi1ENS_20FmhaBatchPrefillKernelIxEEEEvy": "attention",
    "void ck_tile::kentry<1, ck_tile::FmhaBwdDQDKDVKernel<x>>(y)": "attention backward",
    "void paged_attention_reduce_kernel<__hip_bfloat16, 128>(float const*)": "attention",
    "void memcpy128<float>(float*, float const*)": "copy or fill", "prefill_positions": "other",
    "void multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)": "collective",
    "void rotary_embedding_kernel<c10::BFloat16, true>(long const*)": "rotary embedding",
    "MIOpenBatchNormFwdTrainSpatial": "norm", "MIOpenBatchNormBwdSpatial": "norm backward",
    "_ZN7ck_tile6kentryILi1ENS_12Rmsnorm2dFwdIxEEEEvy": "norm",
}  # fmt: skip


@pytest.mark.parametrize("name, operation", list(OPERATIONS.items()))
def test_operation_of(name, operation):
    assert operation_of(name) == operation


# Two of cuBLAS's that differ in their layouts and tiles, far from either end.
CUBLAS = "sm80_xmma_gemm_f32f32_f32f32_f32_{}_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute{}_kernel__5x_cublas"


@pytest.mark.parametrize("name, width, shown", [
    ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, 1>(int, float)", 60,
     "vectorized_elementwise_kernel<4, FillFunctor<float>, 1>"),
    (CUBLAS.format("tn_n_tilesize64x256x8", ""), 44, "sm80_xmma_gemm_f32_tn_n_tilesize64x256x8"),
    (CUBLAS.format("nt_n_tilesize128x64x8", "_split_k"), 60, "sm80_xmma_gemm_f32_nt_n_tilesize128x64x8_split_k"),
    ("void cutlass::Kernel2<cutlass_80_simt>(cutlass_80_simt::Params)", 60, "cutlass_80_simt"),
    ("rmsnorm_kernel", 60, "rmsnorm_kernel"), ("abcdefghij" * 3, 10, "abcdef…hij"),
])  # fmt: skip
def test_short_name(name, width, shown):
    assert short_name(name, width) == shown
