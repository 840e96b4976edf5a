"""The comparison of two recordings: what differs by more than the noise of both is told, and nothing else."""

import pandas as pd
import pytest

from profilers import compare
from profilers.readers import read_step_stats
from tests.fakes import records
from tests.fakes.records import Record, Run


def write_recording(path, *steps, around=False):
    """A database of steps with a kernel each, in us; around: with one window, as --timing step records it."""
    run, now = Run([], []), 1000
    for us in steps:
        run.dispatches.append(Record("rmsnorm_kernel", now, now + 1000 * us))
        run.ranges.append(Record("step", now, now + 10**6))
        now += 10**7
    if around:
        run.ranges.append(Record("steps", 1000, now))
    records.write_rocpd(path / "a.db", run)
    return path


def side(path):
    table, steps = compare.side_of(path)
    return table.loc["rmsnorm_kernel"].to_dict(), steps


def test_a_side_is_the_median_step_and_its_noise_by_hand(tmp_path):
    """One slow step of five is an outlier, which a mean would tell as a change. Quartiles of 101 and 104 us."""
    path = write_recording(tmp_path / "five", 100, 101, 900, 103, 104)
    assert side(path) == ({"ms": 0.103, "calls": 1.0, "noise": pytest.approx(0.003 * 3)}, 5)
    three, _ = side(write_recording(tmp_path / "three", 100, 103, 104))  # quartiles of 101.5 and 103.5 us
    assert three == {"ms": 0.103, "calls": 1.0, "noise": pytest.approx(0.002 * 13 / 3)}
    once = "INSERT INTO kernels (name, start, [end]) VALUES ('once', 2000, 3000)"  # in the first step
    records.change(path / "a.db", [once])
    assert compare.side_of(path)[0].loc["once"].tolist() == [0.0, 0.2, 0.0]


@pytest.mark.parametrize("steps, around", [((100, 300), False), ((100, 300, 500, 500), True)])
def test_without_single_steps_times_are_means_and_the_noise_is_not_known(tmp_path, steps, around):
    path = write_recording(tmp_path / "steps", *steps, around=around)
    mean = sum(steps) / len(steps) / 1e3
    assert side(path) == ({"ms": pytest.approx(mean), "calls": 1.0, "noise": pytest.approx(float("nan"), nan_ok=True)},
                          len(steps))  # fmt: skip
    read_step_stats(path)[0].to_csv(tmp_path / "table.csv", index=False)  # which knows no step
    whole, count = side(tmp_path / "table.csv")
    assert count == 0 and whole["ms"] == pytest.approx(sum(steps) / 1e3) and whole["calls"] == len(steps)


def test_the_steps_of_all_processes_count(tmp_path):
    """The windows of one process hold kernels of the other, which are none of its steps'."""
    for rank, steps in enumerate(((100, 104), (102, 106))):
        write_recording(tmp_path / f"rank_{rank}", *steps)
    assert side(tmp_path) == ({"ms": 0.103, "calls": 1.0, "noise": pytest.approx(0.003 * 3.5)}, 4)


def write_processes(path, *processes):
    """A database of several processes with steps of 100 to 103 us, each process 1 us later than the last one."""
    for guid, pid in processes:
        starts = [10**9 + 10**6 * n + 1000 * pid for n in range(4)]
        kernels = [Record("rmsnorm_kernel", start, start + 1000 * (100 + n)) for n, start in enumerate(starts)]
        ranges = [Record("step", start, start + 900_000) for start in starts]
        records.write_rocpd(path / "a.db", Run(kernels, ranges), guid=guid, pid=pid)


@pytest.mark.parametrize("processes", [
    [("g", 1), ("h", 2)], [("g", 1), ("g", 2)], [("g", 1), ("h", 1)], [("g", 1), ("h", 2), ("i", 3)],
])  # fmt: skip
@pytest.mark.parametrize("named", [True, False])
def test_a_database_of_several_processes_is_compared_as_one_of_each(tmp_path, capsys, processes, named):
    """Also whole recordings, where the steps are not known."""
    write_processes(tmp_path / "one", ("g", 1))
    write_processes(tmp_path / "some", *processes)
    if not named:
        for path in tmp_path.glob("*/a.db"):
            records.change(path, ["DELETE FROM regions"])
    for sides in (("one", "some"), ("some", "one")):
        assert compare.main([str(tmp_path / side) for side in sides]) == 0
        out, err = capsys.readouterr()
        assert "(1.00 of the time)" in out and "Kernels: 1 same\n" in out and not err
        steps = [4 * len(processes) if side == "some" else 4 for side in sides] if named else [0, 0]
        assert f"in {steps[0]} and in {steps[1]} steps" in out


def test_kernels_that_each_step_has_others_of(tmp_path, capsys):
    """Of each the median is 0: there is no ratio of their sums."""
    steps = [Record("step", 10**6 * n, 10**6 * n + 900_000) for n in (1, 2, 3)]
    run = Run([Record(f"k{step.start}", step.start, step.start + 1000) for step in steps], steps)
    records.write_rocpd(tmp_path / "a.db", run)
    assert compare.main([str(tmp_path)] * 2) == 0
    out = capsys.readouterr().out
    assert "A step of each: 0.000 ms in 1 calls, then 0.000 ms in 1 calls\n" in out and "nan" not in out


def test_steps_of_processes_that_are_not_told_apart_have_means(tmp_path, capsys):
    """Each of the two would count in the steps of both."""
    write_processes(tmp_path / "two", ("g", 1), ("h", 2))
    statements = ([f"UPDATE {table} SET guid = 'g', pid = 1"] for table in ("kernels", "regions"))
    records.change(tmp_path / "two" / "a.db", *statements)
    whole = {"ms": pytest.approx(0.1015), "calls": 1.0, "noise": pytest.approx(float("nan"), nan_ok=True)}
    assert side(tmp_path / "two") == (whole, 8)
    assert capsys.readouterr().err.count("steps overlap") == 1


@pytest.mark.parametrize("after, noise, change", [
    (1.049, 0.0, "same"), (1.051, 0.0, "slower"), (0.953, 0.0, "same"), (0.951, 0.0, "faster"),
    (1.29, 0.15, "same"), (1.31, 0.15, "slower"), (0.71, 0.15, "same"), (0.69, 0.15, "faster"),
    (1.051, float("nan"), "slower"), (0.951, float("nan"), "faster"), (1.04, float("nan"), "same"),
])  # fmt: skip
def test_what_counts_as_a_change_by_hand(after, noise, change):
    before, after = (pd.DataFrame({"ms": [ms], "calls": 1.0, "noise": noise}, index=["k"]) for ms in (1.0, after))
    row = compare.compare(before, after).loc["k"]
    assert row["change"] == change and row["ms noise"] == pytest.approx(2 * noise, nan_ok=True)


def test_kernels_and_operations_in_the_order_of_their_change(tmp_path, capsys):
    """A step of 1060 us becomes one of 270; SwiGLU's kernel has another name after the change."""
    before = {"swiglu_kernel": 900, "rmsnorm_kernel": 100, "adamw_kernel": 50, "rope_kernel": 10}
    after = {"swiglu_activation_kernel": 20, "rmsnorm_kernel": 200, "adamw_kernel": 40, "rope_kernel": 10}
    for folder, kernels in (("before", before), ("after", after)):
        dispatches = [Record(name, start, start + 1000 * us) for start in (0, 10**7) for name, us in kernels.items()]
        ranges = [Record("step", start, start + 10**6) for start in (0, 10**7)]
        records.write_rocpd(tmp_path / folder / "a.db", Run(dispatches, ranges))
    sides = str(tmp_path / "before"), str(tmp_path / "after")
    assert compare.main([*sides, "--top", "4"]) == 0
    first, *lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert " ".join(first) == "A step of each: 1.060 ms in 4 calls, then 0.270 ms in 4 calls (0.25 of the time)"
    rows = [line for line in lines if line[0] in ("vanished", "slower", "appeared", "faster", "same")]
    assert [row[:5] + row[-1:] for row in rows] == [
        ["vanished", "0.900", "-", "-", "-", "swiglu_kernel"],
        ["slower", "0.100", "0.200", "-", "2.00", "rmsnorm_kernel"],
        ["appeared", "-", "0.020", "-", "-", "swiglu_activation_kernel"],
        ["faster", "0.050", "0.040", "-", "0.80", "adamw_kernel"],
    ]
    first, _, last = [line[:4] for line in lines[lines.index(["By", "operation:"]) + 2 :]][:3]
    assert first == ["0.900", "0.000", "0.00", "SwiGLU"] and last == ["0.000", "0.020", "-", "SwiGLU"]
    read_step_stats(tmp_path / "after")[0].to_csv(tmp_path / "after.csv", index=False)
    assert compare.main([sides[0], str(tmp_path / "after.csv")]) == 0
    told = "The whole recordings, as one of them does not name its steps: 2.120 ms in 8 calls, then 0.540 ms in 8 calls"
    assert told in capsys.readouterr().out
