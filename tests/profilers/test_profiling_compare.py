"""The comparison of two recordings: what differs by more than the noise of both is told, and nothing else."""

import json
import random

import pytest

from profilers import compare
from profilers.kernel_names import operation_of
from profilers.readers import read_step_stats
from tests.fakes import records

KERNELS = [f"kernel_{number}" for number in range(40)]
SLOWED = KERNELS[7]


def write_recording(path, seed, jitter, steps=3, slowed=1.0, ranges=("step",)):
    """A database of steps of 40 kernels, each of about 100 us times its jitter; SLOWED takes so many times as long."""
    rng, now, run = random.Random(seed), 10**9, records.Run([], [], [], [])
    begin_all = now
    for _ in range(steps):
        begin = now
        for name in KERNELS:
            duration = round(100_000 * rng.uniform(1 - jitter, 1 + jitter) * (slowed if name == SLOWED else 1))
            run.dispatches.append(records.Record(name, now, now + duration))
            now += duration + 1000
        run.ranges.append(records.Record("step", begin, now))
    run.ranges.extend(records.Record(name, begin_all, now) for name in ranges if name != "step")
    records.write_rocpd(path / "a.db", run)
    return path


def changes(capsys, *paths):
    """{kernel: its change}, and what was printed."""
    assert compare.main([*map(str, paths), "--top", "100"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.split("By operation")[0].splitlines() if "kernel_" in line]
    return {row[-1]: row[0] for row in rows}, out


RECORDED = pytest.mark.parametrize("steps, ranges", [(3, ["step"]), (20, ["step", "steps"])])


@RECORDED
def test_equal_runs_with_jitter_are_the_same(tmp_path, capsys, steps, ranges):
    paths = [write_recording(tmp_path / str(seed), seed, 0.3, steps, ranges=ranges) for seed in (1, 2)]
    found, out = changes(capsys, *paths)
    assert found == dict.fromkeys(KERNELS, "same")
    assert "Kernels: 40 same\n" in out and "ms noise" in out


@RECORDED
def test_a_change_beyond_the_noise_is_found(tmp_path, capsys, steps, ranges):
    before = write_recording(tmp_path / "before", 1, 0.01, steps, ranges=ranges)
    after = write_recording(tmp_path / "after", 2, 0.01, steps, slowed=1.2, ranges=ranges)
    assert changes(capsys, before, after)[0] == dict.fromkeys(KERNELS, "same") | {SLOWED: "slower"}
    assert changes(capsys, after, before)[0] == dict.fromkeys(KERNELS, "same") | {SLOWED: "faster"}


def test_the_noise_is_named(tmp_path, capsys):
    three, nine = (write_recording(tmp_path / str(steps), steps, 0.1, steps) for steps in (3, 9))
    _, out = changes(capsys, three, nine)
    assert "\nNoise: the interquartile ranges of a kernel's time in 3 and in 9 steps, added, times 1 + 10 / 3" in out
    read_step_stats(three)[0].to_csv(tmp_path / "three.csv", index=False)  # which knows no single step
    _, out = changes(capsys, tmp_path / "three.csv", nine)
    assert "\nNoise: from the standard deviation of a kernel's calls" in out


def test_kernels_of_a_trace_of_the_profiler_are_compared_by_steps(tmp_path, capsys):
    """One slow step of five is an outlier, which a mean would tell as a change."""

    def write(folder, slow):
        events = []
        for number in range(5):
            us = slow if number == 2 else 100 + number
            common = {"ph": "X", "pid": 1, "ts": 1000 * number}
            events.append(common | {"cat": "user_annotation", "name": "step", "tid": 1, "dur": 990})
            events.append(common | {"cat": "kernel", "name": "kernel_0", "tid": 7, "dur": us})
        folder.mkdir()
        (folder / "trace.json").write_text(json.dumps({"traceEvents": events}))
        return folder

    found, out = changes(capsys, write(tmp_path / "calm", 102), write(tmp_path / "disturbed", 900))
    assert found == {"kernel_0": "same"} and "A step of each: 0.102 ms in 1 calls, then 0.103 ms" in out


def test_processes_of_one_folder_are_compared_by_means(tmp_path, capsys):
    """The windows of one process hold kernels of the other, which are none of its steps'."""
    for name in ("before", "after"):
        for rank in range(2):
            write_recording(tmp_path / name / f"rank_{rank}", seed=rank, jitter=0.01)
    told, out = changes(capsys, tmp_path / "before", tmp_path / "after")
    assert set(told.values()) == {"same"} and "A step of each: 4." in out and "in 40 calls" in out


def test_a_layer_that_names_its_kernels(tmp_path):
    """rocprofv3 --kernel-rename calls kernels after the range around their launch."""
    names = {"layers.0 forward": "layer", "layers.11 backward": "layer backward", "optimizer": "optimizer"}
    assert {name: operation_of(name) for name in names} == names
