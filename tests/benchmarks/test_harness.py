"""What the benchmarks make of a clock's readings: units, turns, ratios, bytes and operations; and what has no time."""

import weakref
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from benchmarks import harness
from measure import timing
from measure.results import Unavailable
from measure.work import Work

CPU = torch.device("cpu")


class FakeStep:
    """A training step that takes some seconds on the ticking clock; its loss is the number of steps before it."""

    device = CPU

    def __init__(self, tick, *seconds):
        self.tick, self.seconds, self.count, self.loss = tick, seconds, 0, torch.tensor(0.0)

    def run(self):
        self.loss = torch.tensor(float(self.count))
        self.tick(self.seconds[min(self.count, len(self.seconds) - 1)])
        self.count += 1

    def restart(self):
        pass


def contender(tick, *seconds, **options):
    return harness.Contender(lambda: FakeStep(tick, *seconds), CPU, **options)


def test_a_contender_is_warmed_up_and_has_windows_of_ms_a_step(ticking):
    # The first step takes 3 s, the other three of the warm-up and all later ones 8 ms.
    made = contender(ticking, 3.0, 0.008)
    assert made.losses == [0.0, 1.0, 2.0, 3.0] and made.results["first_loss"] == 0.0
    assert made.steps == 32  # 0.25 s of 8 ms are 31.25 steps
    assert made.window() == pytest.approx(8.0) and made.window(3) == pytest.approx(8.0)
    assert [contender(ticking, seconds).steps for seconds in (0.2, 1e-5)] == [2, 1000]
    made.step.run = lambda: setattr(made.step, "loss", torch.tensor(float("inf")))
    with pytest.raises(Unavailable, match="the loss is inf"):
        made.window()
    with pytest.raises(Unavailable, match="needs a GPU"):
        contender(ticking, 1.0, graph=True)


def test_windows_take_turns():
    order = []

    def contender(name):
        return SimpleNamespace(window=lambda steps=None: order.append(name) or name * (steps or 2))

    assert harness.time_in_turns([contender("a"), contender("b")], 3) == [["aa"] * 3, ["bb"] * 3]
    assert "".join(order) == "ab" + "abba" * 2 + "abbaab"  # once each, four uncounted rounds, and three that count


def test_the_figures_of_a_row_by_hand():
    row = harness.summarize({"first_loss": 7.0}, [20.0, 10.0, 50.0], tokens=60, tflop=0.04, peak=4.0)
    assert row["first_loss"] == 7.0 and row["windows_ms"] == [20.0, 10.0, 50.0]
    assert row["ms"] == pytest.approx({"p20": 14.0, "median": 20.0, "p80": 38.0})
    assert row["tokens_per_second"] == pytest.approx(3000)
    assert row["tflops_per_second"] == pytest.approx(2.0) and row["mfu"] == pytest.approx(0.5)
    assert harness.summarize({}, [20.0], 60, 0.04, None)["mfu"] is None


def test_a_ratio_is_the_reference_s_time_over_the_row_s():
    row = harness.compare_windows("ours", [10.0, 30.0, 40.0], [20.0, 10.0, 80.0])
    assert row["reference"] == "ours" and row["reference_windows_ms"] == [10.0, 30.0, 40.0]
    # 0.5, 3 and 0.5: of neighbouring windows, which is not 30 / 20, the ratio of the medians.
    assert row["ratio"] == pytest.approx({"p20": 0.5, "median": 0.5, "p80": 2.0})


class Row(NamedTuple):
    field: str = "of the row"


def rows_of(run, times, names):
    """What measure_rows() records of rows whose windows take these ms, or raise this exception."""
    measured = {}

    def build(name):
        if isinstance(times[name], Exception):
            raise times[name]
        return SimpleNamespace(window=lambda steps=None: times[name])

    def figures(name, contender, windows):
        return {"windows": windows, "ms": {"median": 1.0}}

    rows = dict.fromkeys(names, Row())
    harness.measure_rows(run, measured, rows, "ours", build, figures, lambda device: None)
    assert all(row.pop("field") == "of the row" and row.pop("ms", 1) for row in measured.values())
    return measured


def test_rows_alternate_with_the_reference_which_has_all_its_windows(run):
    rows = rows_of(run, {"ours": 1.0, "a": 2.0, "b": 4.0}, ["ours", "a", "b"])
    assert list(rows) == ["a", "b", "ours"]
    assert rows["a"]["windows"] == [2.0] * 2 and rows["a"]["ratio"]["median"] == 0.5
    assert rows["b"]["reference"] == "ours" and rows["b"]["ratio"]["median"] == 0.25
    assert rows["ours"] == {"error": None, "windows": [1.0] * 4}
    assert rows_of(run, {"ours": 1.0}, ["ours"]) == {"ours": {"error": None, "windows": [1.0] * 2}}
    assert rows_of(run, {"a": 2.0}, ["a"]) == {"a": {"error": None, "windows": [2.0] * 2}}


def test_a_row_that_fails_has_its_reason_and_the_others_continue(run):
    times = {"ours": 1.0, "a": RuntimeError("no room:\n for this\nor that"), "b": ArithmeticError(), "c": 2.0}
    rows = rows_of(run, times, list(times))
    assert rows["a"] == {"error": "RuntimeError: no room: for this"} and rows["c"]["ratio"]["median"] == 0.5
    assert rows["b"] == {"error": "ArithmeticError"} and run.finish() == 1  # a wrong result
    run.any_wrong = False
    rows = rows_of(run, times | {"ours": Unavailable("needs a GPU")}, ["ours", "c"])
    assert rows["ours"] == {"error": "needs a GPU"} and rows["c"] == {"error": None, "windows": [2.0] * 2}
    run.options.time_limit = 0.0
    late = {"error": "not started within --time-limit 0"}
    assert rows_of(run, times, ["ours", "c"]) == {"ours": late, "c": late} and run.finish() == 0


def test_what_fails_is_not_kept_for_the_next_row(run):
    kept = []

    class NoRoom(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.clone())

        @staticmethod
        def backward(ctx, gradient):
            raise torch.OutOfMemoryError("no room")

    def measure():
        weight = torch.ones(3, requires_grad=True)
        activation = weight * 2
        kept.append(weakref.ref(activation))
        with torch.autograd.set_multithreading_enabled(False):  # as a training step has it
            (activation * activation + NoRoom.apply(weight)).sum().backward()

    assert run.attempt(measure)["error"] == "OutOfMemoryError: no room"
    harness.release_all(CPU)
    assert kept[0]() is None


@pytest.mark.parametrize("unit, amount", [("TB/s", 2e9), ("TFLOP/s", 6e9)])
def test_a_rate_is_the_work_over_the_time(run, unit, amount):
    bench = timing.Bench(CPU)
    bench.microseconds = lambda calls: calls[0]
    contenders = {"a": lambda: [50.0], "own": lambda: ([50.0], 4e9), "missing": lambda: [][0]}
    harness.measure_case(run, bench, "group", harness.Timed("case", "size", Work(2e9, 6e9), unit, contenders))
    (entry,) = run.result["cases"]
    rows = entry.pop("contenders")
    assert entry == {"group": "group", "case": "case, size", "amount": amount, "unit": unit}
    assert rows["a"] == {"error": None, "us": 50.0, "rate": pytest.approx(amount / 50e-6 / 1e12)}
    assert rows["own"]["rate"] == pytest.approx(80.0)  # of its own amount
    assert rows["missing"] == {"error": "IndexError: list index out of range"} and not run.any_wrong
