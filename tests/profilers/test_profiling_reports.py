"""The reports: hot spots, comparison, counters, pictures, the figures of a step, and the summary of a session."""

import json
import resource
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import tiny_llama_v3 as llama
from profilers import compare, counters, hotspots, plot, readers, summary, timeline
from profilers.readers import Unreadable, files, read_kernel_stats
from tests.fakes import records
from tests.fakes.machine import ALONE

RUN = records.make_run(steps=3)


def counted(number):
    """The run of a counting pass: it starts later than the others, and its kernels are slower."""
    run = RUN.later(10**9 * number)
    return run._replace(dispatches=[d._replace(end=d.end + 10**6) for d in run.dispatches])


def write_pass(folder, number, release, names):
    prefix = folder / f"pass_{number}" / "counters"
    run = counted(number)
    records.write_counters(Path(f"{prefix}_counter_collection.csv"), release, run.dispatches, names)
    records.write_markers(Path(f"{prefix}_marker_api_trace.csv"), release, run.ranges)


@pytest.fixture
def session(tmp_path):
    """What run_rocprof_triton.sh records with ROCm."""
    prefix = tmp_path / "basic"
    records.write_kernel_trace(Path(f"{prefix}_kernel_trace.csv"), (6, 4), RUN.dispatches)
    records.write_markers(Path(f"{prefix}_marker_api_trace.csv"), (6, 4), RUN.ranges)
    records.write_api_trace(Path(f"{prefix}_hip_api_trace.csv"), "HIP_RUNTIME_API", RUN.api_calls)
    for number, names in enumerate((["FETCH_SIZE"], ["WRITE_SIZE", "TCC_HIT_sum", "TCC_MISS_sum"], ["MfmaFlops"]), 1):
        write_pass(tmp_path, number, (6, 4), names)
    (tmp_path / "kernels_alone.json").write_text(json.dumps(ALONE))
    return tmp_path


# --- hot spots and comparison


def test_hotspots_writes_what_it_read(session, capsys):
    (session / "kernels_of_the_steps.csv").symlink_to(session / "mine.txt")
    assert hotspots.main([str(session), "--csv", str(session)]) == 0 and not (session / "mine.txt").exists()
    (session / "kernels_of_the_steps.csv").unlink()
    capsys.readouterr()
    assert hotspots.main([str(session), "--csv", str(session / "all.csv"), "--top", "2"]) == 0
    out = capsys.readouterr().out
    assert "and 4 more kernels" in out and "rmsnorm_kernel" not in out
    assert list(read_kernel_stats(session / "all.csv")["Calls"].sort_values()) == [6, 6, 6, 9, 12, 18]


@pytest.mark.parametrize("module", [hotspots, plot, counters])
def test_reports_of_nothing(module, tmp_path, capsys):
    assert module.main([str(tmp_path / "absent")]) == 2
    records.write_rocpd(tmp_path / "a_counters_results.db", records.Run([], [], [], []))
    assert module.main([str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 2 and "does not exist" in err and "holds no" in err


def table_of(**ns):
    rows = [[name, 2, 2 * t, t, 0.0, t, t, 0.0] for name, t in ns.items()]
    return pd.DataFrame(rows, columns=readers.COLUMNS)


def test_compare():
    before = table_of(rmsnorm_kernel=100_000, swiglu_kernel=900_000, rope_kernel=10_000, adamw_kernel=50_000)
    after = table_of(rmsnorm_kernel=200_000, swiglu_activation_kernel=20_000, rope_kernel=10_400, adamw_kernel=40_000)
    result = compare.compare(compare.of_calls(before, 2), compare.of_calls(after, 2))
    assert result["change"].to_dict() == {
        "swiglu_kernel": "vanished", "rmsnorm_kernel": "slower", "swiglu_activation_kernel": "appeared",
        "adamw_kernel": "faster", "rope_kernel": "same",
    }  # fmt: skip
    assert list(result.index)[:2] == ["swiglu_kernel", "rmsnorm_kernel"]
    columns = ["ms before", "ms after", "ratio", "calls after"]
    assert result.loc["rmsnorm_kernel", columns].tolist() == [0.1, 0.2, 2.0, 1.0]
    sums = compare.by_operation(result).set_index("operation")
    assert sums.loc["SwiGLU", "ms after"] == pytest.approx(0.02) and np.isnan(sums.loc["SwiGLU", "ratio"])


@pytest.mark.parametrize("after, spread, change", [  # noise: twice the spread, times 1 + 10 / 5
    (1.049, 0.0, "same"), (1.051, 0.0, "slower"), (0.953, 0.0, "same"), (0.951, 0.0, "faster"),
    (1.29, 0.05, "same"), (1.31, 0.05, "slower"), (0.71, 0.05, "same"), (0.69, 0.05, "faster"),
    (1.3, np.nan, "unknown"), (1.04, np.nan, "same"),
])  # fmt: skip
def test_what_counts_as_a_change_by_hand(after, spread, change):
    def side(ms, samples):
        return pd.DataFrame({"ms": [ms], "calls": [1.0], "spread": [spread], "samples": [samples]}, index=["k"])

    row = compare.compare(side(1.0, 5), side(after, 20)).loc["k"]
    assert row["change"] == change and row["ms noise"] == pytest.approx(6 * spread, nan_ok=True)


def test_spread_of_calls_by_hand():
    """8 calls in 2 steps, of 3 ms each and a standard deviation of 1 ms: four of them spread twice as far as one."""
    row = ["k", 8, 24e6, 3e6, 100.0, 0, 0, 1e6]
    side = compare.of_calls(pd.DataFrame([row], columns=readers.COLUMNS), 2).loc["k"]
    assert side.to_dict() == {"ms": 12.0, "calls": 4.0, "samples": 8.0, "spread": pytest.approx(2.698)}


# --- counters


def test_counters_of_several_passes(session):
    """Of the measured steps of each pass, though their warm-up was slow; the times are of the uncounted run's steps."""
    table, is_of_steps = readers.read_step_counters(session)
    assert is_of_steps and set(table) == {"FETCH_SIZE", "WRITE_SIZE", "TCC_HIT_sum", "TCC_MISS_sum", "MfmaFlops"}
    assert not {records.WARM_UP_KERNEL, records.DIAGNOSTIC} & set(table.index)
    norms = [d for d in counted(1).in_steps() if d.name == "rmsnorm_kernel"]
    fetched = np.mean([records.counter_value("FETCH_SIZE", d) for d in norms])
    assert table.loc["rmsnorm_kernel", "FETCH_SIZE"] == pytest.approx(fetched)
    ns = np.mean([d.duration for d in RUN.in_steps() if d.name == "rmsnorm_kernel"])
    derived = counters.derive(table, readers.read_step_stats(session)[0]).loc["rmsnorm_kernel"]
    assert derived["ns"] == pytest.approx(ns)


@pytest.mark.parametrize("release, marked, scope", [
    ((6, 4), True, "mean of the measured steps"),
    ((6, 4), False, "mean of the whole run, warm-up included"),
    ((6, 2), True, "mean of the whole run, warm-up included"),  # its counters have no times
])  # fmt: skip
def test_counters_say_what_they_cover(session, capsys, release, marked, scope):
    write_pass(session, 1, release, ["FETCH_SIZE"])
    if not marked:
        (session / "pass_1" / "counters_marker_api_trace.csv").unlink()
    assert counters.main([str(session)]) == 0
    out = capsys.readouterr().out
    assert f", {scope}; occupancy" in out
    assert (records.WARM_UP_KERNEL in out) == (scope != "mean of the measured steps")


def test_counters_outside_the_steps_are_of_the_whole_run(tmp_path):
    """As --kernel-iteration-range "[1-3]" leaves them: the first runs of a kernel are those of the warm-up."""
    records.write_counters(tmp_path / "a_counter_collection.csv", (7, 0), RUN.dispatches[:5], ["SQ_WAVES"])
    records.write_markers(tmp_path / "a_marker_api_trace.csv", (7, 0), RUN.ranges)
    table, is_of_steps = readers.read_step_counters(tmp_path)
    assert len(table) == len({d.name for d in RUN.dispatches[:5]}) and not is_of_steps


def test_counters_in_a_database(tmp_path):
    records.write_counters(tmp_path / "csv" / "counters_counter_collection.csv", (7, 0), RUN.dispatches, ["SQ_WAVES"])
    records.write_markers(tmp_path / "csv" / "counters_marker_api_trace.csv", (7, 0), RUN.ranges)
    records.write_rocpd(tmp_path / "db" / "pass_1" / "10470_results.db", RUN, ["SQ_WAVES"])
    records.write_rocpd(tmp_path / "db" / "kernels_results.db", RUN)
    from_csv, from_database = (readers.read_step_counters(tmp_path / kind) for kind in ("csv", "db"))
    assert from_csv[1] and from_database[1]
    pd.testing.assert_frame_equal(from_csv[0], from_database[0], check_names=False)


def test_ncu(tmp_path):
    lines = [
        '"ID","Kernel Name","Block Size","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum"',
        '"","","","byte","byte","nsecond"',
        '"0","rmsnorm_kernel","(128, 1, 1)","1,000,000","500,000","1,000"',
        '"1","rmsnorm_kernel","(128, 1, 1)","2,000,000","500,000","2,000"',
    ]
    (tmp_path / "ncu_raw.csv").write_text("\n".join(lines) + "\n")
    derived = counters.derive(readers.read_step_counters(tmp_path)[0]).loc["rmsnorm_kernel"]
    assert (derived["ns"], derived["bytes"]) == (1500, 2_000_000) and derived["GB/s"] == pytest.approx(2e6 / 1500)
    (tmp_path / "ncu_raw.csv").write_text("==ERROR== no kernels\n")
    with pytest.raises(Unreadable, match="ncu_raw.csv"):
        readers.read_step_counters(tmp_path)


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


# --- the figures of a step


def frame(*rows):
    return files.intervals(rows)


def test_busy_time_counts_what_overlaps_once():
    kernels = frame(("a", 0, 100), ("b", 50, 120), ("c", 60, 70), ("d", 200, 300))
    assert timeline.busy_ns(kernels) == 120 + 100
    assert timeline.busy_ns(frame(("long", 0, 100), ("short", 10, 20), ("another", 30, 40), ("after", 90, 130))) == 130
    assert timeline.busy_ns(frame()) == 0


def test_figures_of_a_step(tmp_path):
    rows = {
        "dispatches": [("warm", 0, 900), ("k", 1100, 1200), ("k", 1300, 1500)], "copies": [],
        "ranges": [("step", 1000, 2000), ("forward", 1000, 1400)],
        "api_calls": [("hipModuleLaunchKernel", 1050, 1060), ("hipLaunchKernel", 1070, 1100),
                      ("hipDeviceSynchronize", 1500, 2000), ("hipLaunchKernel", 100, 900)],
    }  # fmt: skip
    run = records.Run(**{part: [records.Record(*row) for row in of_part] for part, of_part in rows.items()})
    records.write_rocpd(tmp_path / "a.db", run)
    assert timeline.step_figures(tmp_path) == {
        "steps": 1, "step_us": 1.0, "kernels": 2, "kernel_us": 0.3, "busy": 0.3, "gap_us": 0.1, "launches": 2,
        "launch_us": pytest.approx(0.04), "mean_launch_us": pytest.approx(0.02),
    }  # fmt: skip


def test_figures_of_steps_whose_kernels_run_on_behind_them(tmp_path):
    """--timing step: the host is through with a step before the device is, and one window holds all of them."""
    run = records.make_run(steps=4, one_window=True)
    records.write_rocpd(tmp_path / "a.db", run)
    figures = timeline.step_figures(tmp_path)
    (window,) = [r for r in run.ranges if r.name == "steps"]
    held = run.in_steps()
    assert (figures["steps"], figures["kernels"], figures["launches"]) == (4, len(held) / 4, len(held) / 4)
    assert figures["step_us"] == pytest.approx(window.duration / 4 / 1e3)
    assert figures["kernel_us"] == pytest.approx(sum(d.duration for d in held) / 4 / 1e3)
    assert figures["busy"] == pytest.approx(sum(d.duration for d in held) / window.duration)


def test_the_typical_step_is_the_median():
    ranges = frame(("step", 0, 900), ("forward", 0, 10), ("step", 1000, 1100), ("step", 2000, 2300))
    assert timeline.typical_step(ranges) == (2000, 2300)
    assert timeline.typical_step(frame(("forward", 0, 1))) is None


# --- pictures


def texts(figure):
    labels = [label for axes in figure.axes for label in (*axes.texts, *axes.get_yticklabels())]
    labels += [text for legend in figure.legends for text in legend.get_texts()]
    return {label.get_text() for label in labels}


def test_pictures_of_a_profile(session):
    pictures = plot.pictures_of(session, "title")
    assert set(pictures) == {"kernels.png", "timeline.png"}
    kernels, step = pictures["kernels.png"].axes[0], pictures["timeline.png"].axes[0]
    widths = sorted(bar.get_width() for bar in kernels.patches)
    table, steps = readers.read_step_stats(session)
    np.testing.assert_allclose(widths, sorted(table["TotalDurationNs"] / 1e6 / steps))
    assert {"step", "forward", "backward", "matrix product", "RMSNorm"} <= texts(pictures["timeline.png"])
    assert sum(len(bars.get_paths()) for bars in step.collections) == 3 + 19  # step and phases; kernels
    assert plot.main([str(session), "--output", str(session / "new"), "--title", "not UTF-8: \udcff"]) == 0
    assert (session / "new" / "kernels.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("processes", [1, 2])
def test_no_timeline_of_what_is_not_one_step(tmp_path, capsys, processes):
    """The host's step ends before its kernels run."""
    for rank in range(processes):
        records.write_rocpd(tmp_path / f"rank_{rank}" / "a.db", records.make_run(3, one_window=True))
    assert plot.main([str(tmp_path)]) == 0
    assert (tmp_path / "kernels.png").exists() and not (tmp_path / "timeline.png").exists()
    assert "No timeline: it needs a recording whose ranges hold" in capsys.readouterr().out


def test_a_timeline_of_two_processes(tmp_path):
    """Their steps by one clock, and what they exchange apart from what they compute."""
    run = records.make_run(3)
    for rank, names in enumerate((["ReduceScatter_Sum_bf16_RING_LL", "AllGather_RING_LL"], ["AllGather_RING_LL"])):
        beside = [record for record in run.dispatches if record.name == "swiglu_activation_kernel"]  # two in a step
        collectives = [record._replace(name=f"ncclDevKernel_{name}") for record in beside for name in names]
        own = run._replace(dispatches=run.dispatches + collectives)
        records.write_rocpd(tmp_path / f"rank_{rank}" / "a.db", own)
    figure = plot.pictures_of(tmp_path, "title")["timeline.png"]
    assert [axes.get_ylabel() for axes in figure.axes] == ["process 0", "process 1"]
    (legend,) = figure.legends
    entries = {text.get_text() for text in legend.get_texts()}
    assert {"reduce-scatter", "all-gather", "matrix product"} <= entries and "collective" not in entries
    for axes, expected in zip(figure.axes, (4, 2), strict=True):
        bars = [path.get_extents().y0 for collection in axes.collections for path in collection.get_paths()]
        assert (bars.count(1), bars.count(0)) == (expected, 19)


def test_roofline(tmp_path, capsys):
    figure = plot.draw_roofline(ALONE)
    roof, *points = figure.axes[0].lines
    assert max(roof.get_ydata()) == 600 and len(points) == 2
    x, y = (point.item() for point in points[0].get_data())
    assert (x, y) == (pytest.approx(2.0), pytest.approx(4.0))  # 16 MFLOP on 8 MB in 4 us
    on_roof = np.interp(2.0, roof.get_xdata(), roof.get_ydata())
    assert on_roof == pytest.approx(8.0, rel=0.01)  # 2 FLOP a byte at 4 TB/s
    (tmp_path / "k_kernel_trace.csv").write_text("Kernel_Name,Start_Timestamp,End_Timestamp\nk,1,2\n")
    for other in ([1], ALONE | {"kernels": 5}, ALONE | {"ceilings": {"GB/s": "4", "TFLOP/s": 0}}):
        (tmp_path / "kernels_alone.json").write_text(json.dumps(other))
        assert plot.main([str(tmp_path / "kernels_alone.json")]) == 2
        assert summary.main([str(tmp_path), "--tool", "torch"]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == err.count("/kernels_alone.json is ") == 2
    with pytest.raises(Unreadable, match="no roofline"):
        plot.draw_roofline(ALONE | {"kernels": []})


# --- the summary of a session


def test_summary_is_computed_from_the_recordings(session):
    text = summary.summary(session, "rocprofv3")
    figures = timeline.step_figures(session)
    assert f"- {figures['kernels']:.6g} kernels a step, in 19 launches\n" in text
    assert "a launch call takes the host 3.50 us, 66 us a step" in text  # 19 of 3.5 us
    assert f"a kernel runs during {100 * figures['busy']:.1f} % of a step" in text
    assert "| RMSNorm | 8.00 | 0.00400 | 2,000 | 50.0 |" in text  # 8 MB in 4 us, of 4000 GB/s
    assert "which meet at 150 FLOP a byte" in text
    assert "| RMSNorm | 2.00 | 4.00 | memory | 50.0 |" in text
    assert "| attention | 1,000 | 100 | arithmetic | 16.7 |" in text
    assert "No GPU" not in text and text.count("| rmsnorm_kernel |") >= 2


def test_summary_says_that_its_counters_are_of_the_whole_run(session):
    assert "means of the whole run" not in summary.summary(session, "rocprofv3")
    for path in session.glob("pass_1/*_marker_api_trace.csv"):
        path.unlink()
    assert "counters are means of the whole run, warm-up included" in summary.summary(session, "rocprofv3")


def test_summary_says_what_was_not_counted(session):
    for path in session.glob("pass_*/*"):
        path.unlink()
    text = summary.summary(session, "torch")
    assert "Bytes in the training run were not counted" in text and "not counted (they need rocprofv3 or ncu)" in text
    (session / "kernels_alone.json").unlink()
    assert summary.main([str(session), "--tool", "torch"]) == 2


@pytest.mark.parametrize("total", [3 * 2**30, 0])
def test_reports_state_the_peak_of_memory_that_was_recorded(session, capsys, total):
    event = {"ph": "i", "name": "[memory]", "ts": 1, "args": {"Device Type": 1, "Total Allocated": total}}
    (session / "trace.json").write_text(json.dumps({"traceEvents": [event]}))
    assert hotspots.main([str(session)]) == 0
    for text in (capsys.readouterr().out, summary.summary(session, "rocprofv3")):
        assert ("Peak of allocated GPU memory: 3.000 GiB" in text) == (total > 0)
        assert total or "Peak" not in text
    (session / "a.db").write_bytes(b"SQLite format 3\0" + bytes(4096))
    assert hotspots.main([str(session)]) == 0


# --- Perfetto


@pytest.fixture(scope="module")
def trace_processor(tmp_path_factory):
    """Perfetto's own reader; its binary is downloaded by the perfetto package, once."""
    perfetto = pytest.importorskip("perfetto.trace_processor", reason="the perfetto package is not installed")
    valid = tmp_path_factory.mktemp("perfetto") / "empty.json"
    valid.write_text('{"traceEvents": []}')
    try:
        perfetto.TraceProcessor(trace=str(valid)).close()
    except Exception as error:  # of whatever kind: without the binary there is nothing to test
        pytest.skip(f"Perfetto's trace processor cannot be had here ({type(error).__name__})")
    return perfetto.TraceProcessor


def test_perfetto_finds_kernels_phases_and_layers(trace_processor, device, tmp_path, capsys):
    sizes = "--hidden-dim 64 --num-layers 2 --num-heads 2 --vocab-size 64 --batch-size 2 --seq-len 32 --num-steps 1"
    impl = "triton" if device == "cuda" else "torch"
    arguments = [*sizes.split(), "--impl", impl, "--output-dir", str(tmp_path), "--profile", str(tmp_path / "profile")]
    assert llama.main(arguments) == 0
    capsys.readouterr()
    processor = trace_processor(trace=str(tmp_path / "profile" / "trace.json"))
    try:
        rows = processor.query("SELECT name, count(*) AS count FROM slice GROUP BY name")
        names = {row.name: row.count for row in rows}
        lost = list(processor.query("SELECT sum(value) AS n FROM stats WHERE severity = 'data_loss'"))[0].n
    finally:
        processor.close()
    kernels = ("rmsnorm_kernel", "flash_attention_kernel") if device == "cuda" else ("aten::mm", "aten::silu")
    for name in ("step", "forward", "backward", "optimizer", "layers.0 forward", "layers.1 backward", *kernels):
        assert names.get(name, 0) >= 3, name
    assert not lost


def test_counters_are_printed_in_their_units(monkeypatch, capsys):
    """us, MB and GB/s of a kernel of 12 us that moves 4 MB."""
    columns = {"gpu__time_duration.sum": 12e3, "dram__bytes_read.sum": 3e6, "dram__bytes_write.sum": 1e6}
    monkeypatch.setattr(counters, "read_step_counters", lambda path: (pd.DataFrame(columns, index=["k"]), True))
    assert counters.main(["profile"]) == 0
    header, row = capsys.readouterr().out.split("\n\n")[1].splitlines()[:2]
    shown = dict(zip(header.replace("L2 hits", "L2").split(), row.split(), strict=True))
    assert (shown["us"], shown["MB"], shown["GB/s"]) == ("12.0", "4.0", "333.3")


def test_hotspots_by_hand():
    rows = [("rmsnorm_kernel", 6, 12e6, 2e6, 60.0), ("unheard_of", 3, 5e6, 5e6 / 3, 25.0), ("other", 3, 3e6, 1e6, 15.0)]
    table = pd.DataFrame(rows, columns=readers.COLUMNS[:5])
    spots = hotspots.hotspots(table, steps=3)
    first = spots.iloc[0][["ms", "calls", "us each", "share"]]
    assert first.tolist() == [4.0, 2.0, 2000.0, 60.0]
    sums = hotspots.by_operation(spots).values.tolist()
    assert sums == [[60.0, 4.0, 2.0, "RMSNorm"], [40.0, pytest.approx(8 / 3), 2.0, "other"]]


def test_counted_figures_of_the_summary_by_hand():
    """A kernel of 2 ms that moves 1 GB and computes 6 TFLOP, under ceilings of 2000 GB/s and 4000 TFLOP/s."""
    alone = ALONE | {"ceilings": {"GB/s": 2000.0, "TFLOP/s": 4000.0}}
    derived = pd.DataFrame({"ns": [2e6], "bytes": [1e9], "GB/s": [500.0], "flop": [6e12]}, index=["k"])
    alone["kernels"] = [{"name": "k", "bytes": 1e9, "flop": 1e9, "triton": {"ms": 2.0}}]
    assert "| k | other | 1,000 | 500 | 25.0 |" in summary.bandwidth_section(derived, alone)
    assert "| k | 6,000 | 3,000 |" in summary.roofline_section(derived, alone)


def test_no_ceiling_limits_what_is_interpreted():
    on_cpu = ALONE | {"environment": {"arch": "cpu"}, "ceilings": {"GB/s": 10.0, "TFLOP/s": 0.01}}
    text = summary.roofline_section(pd.DataFrame(), on_cpu)
    assert "interpreter" in text and "| RMSNorm | 2.00 |\n" in text
    assert "memory |" not in text and "arithmetic |" not in text
    text = summary.bandwidth_section(pd.DataFrame(), on_cpu)
    assert "interpreter" in text and "| RMSNorm | 8.00 |\n" in text and "ceiling |" not in text


def test_operators_of_two_threads_count_both(tmp_path):
    """On a CPU an operator within another of its thread is part of it, and one beside it in another thread is not."""
    rows = [("aten::linear", 1, 0, 10), ("aten::addmm", 1, 2, 5), ("aten::mm", 2, 3, 4), ("aten::add", 1, 10, 3)]
    events = [{"ph": "X", "cat": "cpu_op", "name": n, "tid": tid, "ts": ts, "dur": dur} for n, tid, ts, dur in rows]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert set(read_kernel_stats(tmp_path)["Name"]) == {"aten::linear", "aten::mm", "aten::add"}


@pytest.mark.parametrize("module, arguments, file", [
    (hotspots, "{0} --csv {0}/t.csv", "t.csv"),
    (plot, "{0} --output {0}/new", "new/kernels.png"), (summary, "{0} --tool torch", "triton_analysis_summary.md"),
])  # fmt: skip
def test_a_full_disk_leaves_no_half_file(session, capsys, module, arguments, file):
    before, limits = sorted(session.rglob("*.*")), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        assert module.main(arguments.format(session).split()) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    reason = "cannot be written (File too large): free space or give another path"
    assert capsys.readouterr().err.endswith(f"error: {session / file} {reason}\n")
    assert sorted(session.rglob("*.*")) == before
