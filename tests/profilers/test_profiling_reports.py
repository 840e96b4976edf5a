"""The reports: hot spots, counters, the figures of a step, and the summary of a session."""

import json
import math

import pandas as pd
import pytest

from measure.kernels_alone import rates
from profilers import compare, counters, hotspots, plot, readers, summary, timeline
from tests.fakes import records
from tests.fakes.machine import ALONE
from tests.fakes.records import Record, Run

RUN = records.make_run(steps=3)
PASSES = (["FETCH_SIZE"], ["WRITE_SIZE", "TCC_HIT_sum", "TCC_MISS_sum"], ["MfmaFlops"])


@pytest.fixture
def session(tmp_path):
    """What run_rocprof_triton.sh records with ROCm; each pass at another time."""
    records.write_kernel_trace(tmp_path / "basic_kernel_trace.csv", (6, 4), RUN.dispatches)
    records.write_markers(tmp_path / "basic_marker_api_trace.csv", (6, 4), RUN.ranges)
    records.write_api_trace(tmp_path / "basic_hip_api_trace.csv", "HIP_RUNTIME_API", RUN.api_calls)
    for number, names in enumerate(PASSES, 1):
        counted = RUN.later(10**9 * number)
        records.write_counters(tmp_path / f"pass_{number}" / "k_counter_collection.csv", counted.dispatches, names)
        records.write_markers(tmp_path / f"pass_{number}" / "k_marker_api_trace.csv", (6, 4), counted.ranges)
    (tmp_path / "kernels_alone.json").write_text(json.dumps(ALONE))
    return tmp_path


# --- hot spots


def test_hotspots_by_hand(tmp_path, capsys):
    """Of 20 ms in 3 steps: 12 in 6 calls, 5 and 3 in 3 calls each, all of them and the first two."""
    kernels = {"rmsnorm_kernel": (6, 2), "unheard_of": (3, 5 / 3), "other": (3, 1)}
    ranges = [Record("step", start, start + 10**7) for start in (0, 10**8, 2 * 10**8)]
    dispatches = [Record(name, r.start, r.start + round(ms * 1e6)) for name, (calls, ms) in kernels.items()
                  for r in ranges * (calls // 3)]  # fmt: skip
    records.write_rocpd(tmp_path / "a.db", Run(dispatches, ranges))
    assert hotspots.main([str(tmp_path), "--top", "2", "--csv", str(tmp_path / "all.csv")]) == 0
    out = capsys.readouterr().out
    assert "Kernels of 3 steps, ms and calls a step: 6.667 ms in 4 calls of 3 kernels\n" in out
    rows = [line.split() for line in out.splitlines() if "%" in line]
    assert rows == [
        "60.0 % 4.000 2 2000.0 RMSNorm rmsnorm_kernel".split(), "25.0 % 1.667 1 1666.7 other unheard_of".split(),
        "and 1 more kernels: 15.0 %, 1.000 ms".split(),
        "60.0 % 4.000 2 RMSNorm".split(), "40.0 % 2.667 2 other".split(),
    ]  # fmt: skip
    assert list(readers.read_kernel_stats(tmp_path / "all.csv")["Calls"]) == [6, 3, 3]
    assert hotspots.main([str(tmp_path), "--top", "3"]) == 0 and "more kernels" not in capsys.readouterr().out


def test_a_table_in_a_folder_is_named_after_what_it_covers(session):
    (session / "kernels_of_the_steps.csv").symlink_to(session / "mine.txt")
    assert hotspots.main([str(session), "--csv", str(session)]) == 0 and not (session / "mine.txt").exists()
    (session / "basic_marker_api_trace.csv").unlink()
    assert hotspots.main([str(session), "--csv", str(session)]) == 0
    calls = [readers.read_kernel_stats(session / f"{name}.csv")["Calls"].sum() for name in
             ("kernels_of_the_steps", "kernels")]  # fmt: skip
    assert calls == [3 * 19, len(RUN.dispatches)]


@pytest.mark.parametrize("module", [hotspots, plot, compare])
def test_reports_of_kernels_without_times(module, tmp_path, capsys):
    """Those of the steps have none, and one before them has."""
    kernels = [Record("warm", 10, 90), Record("k", 150, 150), Record("k", 160, 160)]
    records.write_rocpd(tmp_path / "a.db", Run(kernels, [Record("step", 100, 200)]))
    assert module.main([str(tmp_path)] * (1 + (module is compare))) == 1
    assert "a.db: 2 of 3 kernels last 0 ns" in (err := capsys.readouterr().err) and "holds no kernels that took" in err


@pytest.mark.parametrize("module", [hotspots, plot, counters, compare])
def test_reports_of_nothing(module, tmp_path, capsys):
    two = 1 + (module is compare)
    assert module.main([str(tmp_path / "absent")] * two) == 2
    records.write_rocpd(tmp_path / "a_counters_results.db", Run())
    assert module.main([str(tmp_path)] * two) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 2 and "does not exist" in err and "holds no" in err


# --- counters


def test_counters_of_another_program_are_named(tmp_path, capsys):
    (tmp_path / "pmc_perf.csv").write_text("Dispatch_ID,Kernel_Name,SQ_WAVES\n0,k,1\n")
    assert counters.main([str(tmp_path)]) == 1
    assert f"; {tmp_path}/pmc_perf.csv is of rocprof-compute: rocprof-compute analyze" in capsys.readouterr().err


def test_a_recording_without_counters_is_told_how_to_count(session, capsys):
    """Also one with a trace for Perfetto, in the place of which CSV files would hold no counters either."""
    for path in session.glob("pass_*/*"):
        path.unlink()
    (session / "a_results.pftrace").touch()
    assert counters.main([str(session)]) == 1
    assert ", *ncu_raw.csv: record with ./get_counters.sh --pmc" in capsys.readouterr().err


@pytest.mark.parametrize("marked, scope", [
    (True, "mean of the measured steps"), (False, "mean of the whole run, warm-up included"),
])  # fmt: skip
def test_counters_say_what_they_cover(session, capsys, marked, scope):
    if not marked:
        (session / "pass_1" / "k_marker_api_trace.csv").unlink()
    assert counters.main([str(session)]) == 0
    out = capsys.readouterr().out
    assert f", {scope}; occupancy" in out and (records.WARM_UP_KERNEL in out) == (not marked)


@pytest.mark.parametrize("counted, expected", [
    ({"FETCH_SIZE": 3.0, "WRITE_SIZE": 1.0, "TCC_HIT_sum": 9.0, "TCC_MISS_sum": 3.0, "MeanOccupancyPerCU": 7.0,
      "VALUBusy": 11.0, "MfmaUtil": 13.0, "MfmaFlops": 17.0, "OccupancyPercent": 19.0},
     {"ns": 512.0, "bytes": 4096.0, "GB/s": 8.0, "L2 hits": 75.0, "waves a CU": 7.0, "compute": 11.0, "matrix": 13.0,
      "flop": 17.0, "occupancy": 19.0}),
    ({"dram__bytes_read.sum": 30.0, "dram__bytes_write.sum": 10.0, "lts__t_sector_hit_rate.pct": 5.0,
      "sm__throughput.avg.pct_of_peak_sustained_elapsed": 6.0, "gpu__time_duration.sum": 4.0,
      "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": 8.0,
      "sm__warps_active.avg.pct_of_peak_sustained_active": 9.0},
     {"ns": 4.0, "bytes": 40.0, "GB/s": 10.0, "L2 hits": 5.0, "compute": 6.0, "memory": 8.0, "occupancy": 9.0}),
])  # fmt: skip
def test_figures_that_follow_from_counters_by_hand(counted, expected):
    stats = pd.DataFrame({"Name": ["k"], "AverageNs": [512.0]}) if "FETCH_SIZE" in counted else None
    derived = counters.derive(pd.DataFrame(counted, index=["k"]), stats).loc["k"]
    assert derived.dropna().to_dict() == expected


@pytest.mark.parametrize("more, flop", [
    ({}, {"bf16": 7.0, "copy": 0.0}),
    ({"SQ_INSTS_VALU_MFMA_MOPS_F8": [0, 3, 0], "SQ_INSTS_VALU_MFMA_MOPS_XF32": [math.nan, 2, 0]},
     {"bf16": 7.0, "fp8": 2560.0, "copy": 0.0}),
])  # fmt: skip
def test_matrix_products_that_mfmaflops_does_not_count(capsys, more, flop):
    """Of FP8 it counts none: such a kernel has no FLOP that are known, unlike one that leaves the units idle."""
    counted = {"MfmaFlops": [7.0, 0, 0], "MfmaUtil": [5.0, 9.0, 0]} | more
    derived = counters.derive(pd.DataFrame(counted, index=["bf16", "fp8", "copy"]))
    assert derived["flop"].dropna().to_dict() == flop
    assert ("so the FLOP of fp8 are not known: count those of SQ_" in capsys.readouterr().err) == (not more)


def test_counters_are_printed_in_their_units(monkeypatch, capsys):
    """us, MB and GB/s of a kernel of 12 us that moves 4 MB."""
    columns = {"gpu__time_duration.sum": 12e3, "dram__bytes_read.sum": 3e6, "dram__bytes_write.sum": 1e6}
    monkeypatch.setattr(counters, "read_step_counters", lambda path: (pd.DataFrame(columns, index=["k"]), True))
    assert counters.main(["profile"]) == 0
    header, row = capsys.readouterr().out.split("\n\n")[1].splitlines()[:2]
    shown = dict(zip(header.replace("L2 hits", "L2").split(), row.split(), strict=True))
    assert (shown["us"], shown["MB"], shown["GB/s"]) == ("12.0", "4.0", "333.3")
    counted = pd.DataFrame({"MfmaUtil": [5.0]}, index=["k"])  # a kernel whose times were not recorded
    monkeypatch.setattr(counters, "read_step_counters", lambda path: (counted, False))
    monkeypatch.setattr(counters, "read_step_stats", lambda path: (pd.DataFrame({"Name": ["a"], "AverageNs": 1.0}), 0))
    assert counters.main(["profile"]) == 0 and "\n  -     5.0     other      k\n" in capsys.readouterr().out


# --- the figures of a step


STEP = Run(
    dispatches=[Record("warm", 0, 900), Record("k", 1100, 1200), Record("k", 1300, 1500), Record("k", 1350, 1450)],
    ranges=[Record("step", 1000, 1020), Record("step", 1020, 1040), Record("steps", 1000, 2000)],
    api_calls=[Record("hipModuleLaunchKernel", 1050, 1060), Record("hipLaunchKernel", 1070, 1100),
               Record("hipDeviceSynchronize", 1500, 2000), Record("hipLaunchKernel", 100, 900)],
)  # fmt: skip


def test_figures_are_means_of_a_step(tmp_path):
    """Of two steps of 500 ns, whose kernels run on behind them: 300 ns of kernels, 100 of them beside another."""
    records.write_rocpd(tmp_path / "a.db", STEP)
    assert timeline.step_figures(tmp_path) == pytest.approx({
        "steps": 2, "step_us": 0.5, "kernels": 1.5, "kernel_us": 0.2, "busy_us": 0.15, "launches": 1,
        "launch_us": 0.02,
    })  # fmt: skip
    records.write_rocpd(tmp_path / "b" / "b.db", STEP._replace(ranges=[]))
    assert timeline.step_figures(tmp_path / "b") is None


def test_launches_by_either_api_of_a_trace_count(tmp_path):
    """PyTorch's own kernels go through the runtime's API, Triton's through the driver's."""
    calls = "cuda_runtime cudaLaunchKernel", "cuda_driver cuLaunchKernelEx", "cuda_driver cuCtxGetCurrent"
    events = [("user_annotation", "step", 1, 9), ("kernel", "k", 4, 2)]
    events += [(*call.split(), 2 + i, 1) for i, call in enumerate(calls)]
    (tmp_path / "trace.json").write_text(records.chrome_trace(*events))
    found = timeline.step_figures(tmp_path)
    assert (found["steps"], found["launches"], found["launch_us"]) == (1, 2, 2.0)


@pytest.mark.parametrize("kernels, calls, busy_us, launch_us", [
    # What lies beyond the ends of a step, of a kernel or a call whose end was stamped late, is not of the step.
    ([(1100, 9000)], [(1050, 9000)], 0.9, 0.95), ([(900, 1300), (1200, 1400)], [], 0.4, 0.0),
    # A call within another one, and calls of two threads: the host is busy once.
    ([(1100, 1200)], [(1050, 1150), (1060, 1100), (1140, 1200)], 0.1, 0.15),
])  # fmt: skip
def test_no_more_of_a_step_is_busy_than_there_is(tmp_path, kernels, calls, busy_us, launch_us):
    run = Run([Record("k", *k) for k in kernels], [Record("step", 1000, 2000)],
              [Record("hipLaunchKernel", *c) for c in calls], [])  # fmt: skip
    records.write_rocpd(tmp_path / "a.db", run)
    found = timeline.step_figures(tmp_path)
    assert (found["busy_us"], found["launch_us"]) == (busy_us, launch_us)


@pytest.mark.parametrize("kind", ["csv", "db"])
def test_the_launches_of_a_step_are_those_of_its_process(tmp_path, kind):
    """Of processes side by side, or in one database."""
    for rank in range(2):
        prefix = tmp_path / f"rank_{rank}"
        if kind == "db":
            records.write_rocpd(tmp_path / "0.db", STEP, pid=rank + 1)
        else:
            records.write_kernel_trace(tmp_path / f"{prefix}_kernel_trace.csv", (7, 0), STEP.dispatches[:3])
            records.write_markers(tmp_path / f"{prefix}_marker_api_trace.csv", (7, 0), STEP.ranges)
            records.write_api_trace(tmp_path / f"{prefix}_hip_api_trace.csv", "HIP_RUNTIME_API", STEP.api_calls)
    found = timeline.step_figures(tmp_path / "0.db" if kind == "db" else tmp_path)
    assert (found["steps"], found["launches"], found["launch_us"]) == (2, 1, 0.02)


# --- the summary of a session


def test_rates_by_hand():
    """A kernel of 2 ms that moves 1 GB and computes 6 TFLOP, and one with little arithmetic."""
    kernels = pd.DataFrame({"kernel": ["k", "m"], "bytes": [1e9, 4e9], "flop": [6e12, 4e9], "ns": [2e6, 4e6]})
    table = rates(kernels, {"GB/s": 2000.0, "TFLOP/s": 4000.0})
    assert table.iloc[0].tolist() == ["k", 1e3, 2.0, 500.0, 25.0, 6000.0, 3000.0, "arithmetic", 75.0]
    assert table.iloc[1].tolist() == ["m", 4e3, 4.0, 1000.0, 50.0, 1.0, 1.0, "memory", 50.0]


def test_what_is_said_of_a_step_by_hand():
    """A third of the kernels' time is beside others, and a launch has one kernel and a half."""
    figures = {"steps": 4, "step_us": 1000.0, "kernels": 30.0, "kernel_us": 900.0, "busy_us": 600.0}
    figures |= {"launches": 20.0, "launch_us": 50.0}
    assert summary.busy_line(figures) == (
        "- a kernel runs during 60 % of a step (600 us of 1000 us, means of 4 steps, profiling included)"
    )
    assert summary.launch_section(figures).splitlines()[:3] == [
        "- 30 kernels a step, in 20 launches",
        "- a launch call takes the host 2.50 us, 50 us a step: 5.0 % of the step, profiling included",
        "- no kernel runs for 400 us a step",
    ]


def test_the_share_of_the_recordings_counts_kernels_side_by_side_once(session):
    """100 and 50 ns of two steps of 500 ns are 15 % of a step, and their kernels take 40 %."""
    for path in session.glob("*_trace.csv"):
        path.unlink()
    records.write_rocpd(session / "a.db", STEP._replace(dispatches=[
        Record("k", 1100, 1200), Record("k", 1110, 1190), Record("k", 1120, 1190), Record("k", 1700, 1750),
        Record("k", 1700, 1750), Record("k", 1710, 1740), Record("k", 1720, 1740),
    ]))  # fmt: skip
    text = summary.summary(session, "rocprofv3")
    assert "- a kernel runs during 15 % of a step (0 us of 0 us, means of 2 steps, profiling included)\n" in text


def test_summary_is_computed_from_the_recordings(session):
    text = summary.summary(session, "rocprofv3")
    assert "- 19 kernels a step, in 19 launches\n" in text
    assert "a launch call takes the host 3.50 us, 66 us a step: 4.2 % of the step" in text  # 19 of 3.5 us
    assert "- a kernel runs during " in text and "of a step (" in text
    assert "| RMSNorm | 8.00 | 0.00400 | 2,000 | 50.0 |" in text  # 8 MB in 4 us, of 4000 GB/s
    assert "4,000 GB/s and 600 TFLOP/s, which meet at 150 FLOP a byte" in text
    assert "| RMSNorm | 2.00 | 4.00 | memory | 50.0 |" in text
    # Half and a quarter of a KiB for each 100 ns, and 2 FLOP, three hits to one miss.
    assert "| flash_attention_kernel | 0.467 | 0.0608 | 7.67 | 0.192 |" in text
    assert "| flash_attention_kernel | 0.00260 |" in text and "| flash_attention_kernel | 75.0 |" in text
    assert "No GPU" not in text and "whole run" not in text and "not counted" not in text.lower()


def test_summary_names_what_the_roofline_leaves_out(session):
    """Of 4 passes, one counts no FLOP of a kernel that another one found in the matrix units."""
    counted = session / "pass_3" / "k_counter_collection.csv"
    table = pd.read_csv(counted)
    table["Counter_Value"] = table["Counter_Value"].where(table["Kernel_Name"] != "rmsnorm_kernel", 0)
    table.to_csv(counted, index=False)
    told = "Not in the table, as MfmaFlops has no FP8, XF32, FP6 or FP4: `rmsnorm_kernel`.\n"
    assert told not in summary.summary(session, "rocprofv3")
    records.write_counters(session / "pass_4" / "k_counter_collection.csv", RUN.dispatches, ["MfmaUtil"])
    records.write_markers(session / "pass_4" / "k_marker_api_trace.csv", (7, 0), RUN.ranges)
    assert told in summary.summary(session, "rocprofv3")
    table.assign(Counter_Value=0).to_csv(counted, index=False)  # as where all products are in FP8
    assert "\nNot in the table, as MfmaFlops has no FP8, XF32, FP6 or FP4: `" in summary.summary(session, "rocprofv3")
    counted.unlink()  # a pass that failed says nothing of a precision
    assert "Not in the table" not in summary.summary(session, "rocprofv3")


def test_summary_says_what_it_lacks(session):
    (session / "pass_1" / "k_marker_api_trace.csv").unlink()
    assert "counters are means of the whole run, warm-up included" in summary.summary(session, "rocprofv3")
    for path in session.glob("*_trace.csv"):
        path.unlink()
    records.write_kernel_trace(session / "a_kernel_trace.csv", (7, 0), RUN.dispatches)
    assert "launches cannot be assigned to one" in summary.summary(session, "rocprofv3")
    records.write_markers(session / "a_marker_api_trace.csv", (7, 0), RUN.ranges)
    for path in session.glob("pass_*/*"):
        path.unlink()
    (session / "kernels_alone.json").write_text(json.dumps(ALONE | {
        "environment": ALONE["environment"] | {"arch": "cpu"},
    }))  # fmt: skip
    text = summary.summary(session, "torch")
    assert text.count("Not counted in the training run") == 3 and "holds no launch calls" in text
    assert "interpreter" in text and "| RMSNorm | 8.00 |\n" in text and "| RMSNorm | 2.00 |\n" in text


@pytest.mark.parametrize("other", [
    None, [1], ALONE | {"kernels": 5}, ALONE | {"ceilings": {"GB/s": "4"}},
    ALONE | {"ceilings": {"GB/s": math.nan, "TFLOP/s": 1.0}}, ALONE | {"ceilings": {"GB/s": 4.0, "TFLOP/s": 600.0}},
    *(ALONE | {"kernels": [ALONE["kernels"][0] | {"triton": {"ms": ms}}]} for ms in (None, "1", 0, -1, math.inf)),
])  # fmt: skip
def test_a_wrong_file_of_kernels_alone_is_named(session, capsys, other):
    file = session / "kernels_alone.json"
    file.unlink() if other is None else file.write_text(json.dumps(other))
    assert summary.main([str(session), "--tool", "torch"]) == plot.main([str(file)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == err.count("/kernels_alone.json ") == 2 or other is None


@pytest.mark.parametrize("total", [3 * 2**30, 0])
def test_reports_state_the_peak_of_memory_that_was_recorded(session, capsys, total):
    event = {"ph": "i", "name": "[memory]", "ts": 1, "args": {"Device Type": 1, "Total Allocated": total}}
    (session / "trace.json").write_text(json.dumps({"traceEvents": [event]}))
    assert hotspots.main([str(session)]) == 0
    for text in (capsys.readouterr().out, summary.summary(session, "rocprofv3")):
        assert ("Peak of allocated GPU memory: 3.000 GiB" in text) == (total > 0) == ("Peak" in text)
    (session / "a.db").write_bytes(b"SQLite format 3\0" + bytes(4096))
    assert hotspots.main([str(session)]) == 0
