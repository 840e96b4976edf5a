"""Clocks, and what is made of their readings: events in order, known durations, units, turns, flushed caches."""

import contextlib
import functools
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

from measure import timing

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

# --- a GPU's clock, on a fake one: what is timed shows in the order of events


class FakeGpu:
    """A GPU that works off what the host issues, in that order, and tells when, in ms. It stands for torch.cuda.

    Its cache is as large as any GPU's, and holds what a call reads until more than that is read.
    """

    LAUNCH = 0.25  # of the host's time, for each thing that it issues
    CACHE = 256 * 2**20

    def __init__(self):
        self.host = self.device = 0.0  # how far each is
        self.is_cold, self.capturing, self.current, self.log = True, None, "default stream", []
        self.pace = itertools.cycle([1, 1, 20, 1, 0.5])  # of a graph's replays: the median is 1

    def issue(self, what, ms=0.0):
        self.log.append(what)
        self.host += self.LAUNCH
        self.device = max(self.device, self.host) + ms

    def call(self, name, *ms, cold=0.0):
        """Return a call that takes these times in turn, and longer from a cold cache."""
        times = itertools.cycle(ms)

        def duration():
            was_cold, self.is_cold = self.is_cold, False
            return next(times) + cold * was_cold

        def call():
            if self.capturing:
                self.capturing.captured.append((name, self.current, duration))
            else:
                self.issue(f"{name} on the {self.current}", duration())

        return call

    def read(self, n_bytes):
        self.issue(f"read {n_bytes / 2**20:g} MiB", 7.0)
        self.is_cold |= n_bytes > self.CACHE

    # --- what stands in torch.cuda, and torch.empty()

    def synchronize(self):
        self.log.append("wait")
        self.host = max(self.host, self.device)

    def empty(self, size, dtype, device):
        assert device == "cuda"
        return SimpleNamespace(sum=lambda: self.read(size * dtype.itemsize))

    def current_stream(self):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def graph(self, graph, stream):
        with self.stream(stream):
            self.capturing = graph
            yield
            self.capturing = None

    def new_graph(self):
        def replay():
            pace = next(self.pace)
            self.issue("replay", sum(pace * duration() for _, _, duration in graph.captured))

        graph = SimpleNamespace(captured=[], replay=replay)
        return graph

    def new_event(self, enable_timing):
        assert enable_timing

        def record():
            self.issue("record")
            event.time = self.device

        def synchronize():
            self.log.append("wait")
            self.host = max(self.host, event.time)

        def elapsed_time(end):
            assert self.host >= end.time, "an event that has not come by has no time"
            return end.time - event.time

        event = SimpleNamespace(record=record, synchronize=synchronize, elapsed_time=elapsed_time)
        return event


REPLAY = ["record", "replay", "record", "wait"]


@pytest.fixture
def gpu(monkeypatch):
    gpu = FakeGpu()
    for name in ("synchronize", "current_stream", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "own stream")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", gpu.new_graph)
    monkeypatch.setattr(torch.cuda, "Event", gpu.new_event)
    monkeypatch.setattr(torch, "empty", gpu.empty)
    monkeypatch.setattr("time.perf_counter", lambda: gpu.host / 1e3)
    timing.flush_buffer.cache_clear()
    yield gpu
    timing.flush_buffer.cache_clear()


def test_a_replay_is_timed_from_its_start_to_its_end(gpu):
    """And not what is called before it, though the GPU is still busy with that."""
    graph = timing.Bench(CUDA).capture([gpu.call("a", 3.0)], 2)
    gpu.log.clear()
    assert timing.replay_ms(graph, lambda: gpu.issue("before", 100.0)) == 6.0
    assert gpu.log == ["before", *REPLAY] and gpu.host == gpu.device > 106.0


def test_calls_are_captured_on_the_stream_that_they_were_compiled_on(gpu):
    """Once each outside the graph, then as many as are asked for, round the list."""
    graph = timing.Bench(CUDA).capture([gpu.call("a", 3.0), gpu.call("b", 5.0)], 5)
    assert gpu.log == ["wait", "a on the own stream", "b on the own stream", "wait"]
    assert [f"{name} on the {stream}" for name, stream, _ in graph.captured] == [
        f"{name} on the own stream" for name in "ababa"
    ]
    assert gpu.current == "default stream" and gpu.capturing is None


def test_a_call_takes_the_median_of_replays_that_the_host_is_ahead_of(gpu):
    """Of four calls of 3 ms and four of 5 ms; a launch to an idle GPU would be timed."""
    bench, calls = timing.Bench(CUDA), [gpu.call("a", 3.0), gpu.call("b", 5.0)]
    assert bench.microseconds(calls) == 4000.0
    assert gpu.log[4:] == ["replay", *REPLAY] * (3 + 5)  # three tell how many take 0.15 s, which is five at least


def test_a_flushed_call_finds_nothing_in_the_cache(gpu):
    """The buffer is read, before each replay and untimed; a call alone is captured."""
    assert timing.Bench(CUDA).flushed_ms(gpu.call("a", 1.0, cold=3.0)) == 4.0
    assert gpu.log[3:] == ["read 512 MiB", *REPLAY] * (3 + 25)  # of 4 ms in 0.1 s


@pytest.mark.parametrize("ms, replays, flushed", [
    (50.0, 5, 10), (1.5, 13, 67), (1.25, 15, 80), (0.0625, 50, 100),  # 0.15 s of eight calls each, 0.1 s of one
])  # fmt: skip
def test_a_replay_is_repeated_for_some_time_and_some_times(gpu, ms, replays, flushed):
    gpu.pace, gpu.LAUNCH = itertools.repeat(1), 0.0
    for measure, number in ((lambda bench, call: bench.microseconds([call]), replays),
                            (timing.Bench.flushed_ms, flushed)):  # fmt: skip
        gpu.log.clear()
        measure(timing.Bench(CUDA), gpu.call("a", ms))
        assert gpu.log.count("record") == 2 * (3 + number)


def test_a_window_has_nothing_of_what_was_issued_before_it(gpu):
    """By the GPU's clock or the host's, which waits for the GPU before and afterwards; the first launch is timed."""
    calls = ["a on the default stream"] * 6
    for measure, unit, begin, end in (
        (lambda call: timing.window_ms(call, 6, CUDA), 1, ["wait", "record"], ["record", "wait"]),
        (lambda call: timing.wall_seconds([call], 6, CUDA), 1e-3, ["wait"], ["wait"]),
    ):
        gpu.issue("before", 100.0)
        gpu.log.clear()
        assert measure(gpu.call("a", 3.0, 4.0)) == pytest.approx((21.0 + gpu.LAUNCH) / 6 * unit)
        assert gpu.log == [*begin, *calls, *end]


@pytest.mark.gpu
def test_a_call_that_cannot_be_captured_does_not_harm_the_next():
    bench, before = timing.Bench(torch.device("cuda")), torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match="capturing"):
        bench.microseconds([lambda: bench.randn(4).sum().item()])
    assert torch.cuda.current_stream() == before and bench.randn(4).isfinite().all()


# --- a GPU's clock, beside known durations: the only times that are asserted


def direct_ms(call, number):
    """Return the ms of a call, by two events around so many of them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()  # the host gets ahead
    start.record()
    for _ in range(number):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / number


def sleeping(cycles):
    """Return a call after which the GPU does nothing for so many cycles."""
    return functools.partial(torch.cuda._sleep, round(cycles))


def agree_once(compare):
    """Call compare() until it passes, five times at most: others may use the GPU, whose own clock rises and falls."""
    for _ in range(4):
        with contextlib.suppress(AssertionError):
            return compare()
    return compare()


@pytest.mark.gpu
def test_the_clocks_agree_with_known_durations():
    """Each with events around many calls just before, of two lengths and of both in turns. A wrong clock never does."""
    bench = timing.Bench(CUDA)
    calls = [sleeping(1e6), sleeping(5e6)]  # about half a millisecond, and five times as long
    direct_ms(calls[0], 2000)  # until the rate of the GPU's clock is steady
    clocks = {
        "microseconds": lambda call: bench.microseconds([call]) / 1e3,
        "flushed_ms": bench.flushed_ms,
        "window_ms": lambda call: timing.window_ms(call, 100, CUDA),
        "wall_seconds": lambda call: timing.wall_seconds([call], 100, CUDA) * 1e3,
    }

    def compare(clock):
        expected = [direct_ms(call, 100) for call in calls]
        measured = [clock(call) for call in calls]
        assert measured == pytest.approx(expected, rel=0.1)
        assert measured[1] / measured[0] == pytest.approx(5, rel=0.1)

    for clock in clocks.values():
        agree_once(functools.partial(compare, clock))

    def compare_both():
        expected = sum(direct_ms(call, 100) for call in calls) / 2
        assert bench.microseconds(calls) / 1e3 == pytest.approx(expected, rel=0.1)

    agree_once(compare_both)


@pytest.mark.gpu
def test_no_copy_is_faster_than_the_memory():
    """None moves 10 TB/s, and each a hundredth of that; what fits into a cache is not faster after a flush."""
    bench = timing.Bench(CUDA)
    calls, moved = timing.copy_calls(bench, 2**28)  # of half a GiB each
    least_us = moved / 10e12 * 1e6
    for us in (bench.microseconds(calls), bench.flushed_ms(calls[0]) * 1e3):
        assert least_us < us < 100 * least_us
    small, _ = timing.copy_calls(bench, 2**20)

    def compare():
        assert bench.flushed_ms(small[0]) * 1e3 > 0.95 * bench.microseconds(small[:1])

    agree_once(compare)


# --- the host's clock, moved by the calls alone


def test_units_of_the_host_s_clock(ticking):
    """And which calls are timed; time passes before and afterwards as well."""
    bench, order = timing.Bench(CPU), []
    calls = [lambda n=name, s=seconds: order.append(n) or ticking(s) for name, seconds in (("a", 0.003), ("b", 0.005))]
    for measure, expected, called in (
        (lambda: bench.microseconds(calls), 3000, "a"),
        (lambda: bench.microseconds(calls[1:]), 5000, "b"),
        (lambda: bench.flushed_ms(calls[1]), 5, "b"),
        (lambda: timing.wall_seconds(calls, 5, CPU), (3 * 0.003 + 2 * 0.005) / 5, "ababa"),
        (lambda: timing.window_ms(calls[1], 7, CPU), 5, "b" * 7),
    ):
        order.clear()
        ticking(1.0)
        assert measure() == pytest.approx(expected)
        assert "".join(order) == called


def test_a_copy_reads_and_writes_other_memory_at_each_call():
    calls, n_bytes = timing.copy_calls(timing.Bench(CPU), 10)
    tensors = [t for call in calls for t in (*call.args, call.keywords["out"])]
    assert n_bytes == sum(t.nbytes for t in tensors[:2]) == sum(t.nbytes for t in tensors[2:]) == 80
    assert len({t.data_ptr() for t in tensors}) == len(tensors) == 4
    for call, x, y in zip(calls, tensors[::2], tensors[1::2], strict=True):
        y.zero_()
        call()
        assert y.equal(-x)


# --- two sets of times


def test_the_interval_of_a_median_is_the_binomial_s():
    """Ranks of Le Boudec's table for 95 %, of all fewer than 6; for 90 % those of 8, 11 and 14 would be narrower."""
    table = {3: (1, 3), 6: (1, 6), 8: (1, 8), 9: (2, 8), 11: (2, 10), 14: (3, 12), 17: (5, 13), 20: (6, 15)}
    assert {count: timing.median_interval(range(count, 0, -1)) for count in table} == table


@pytest.mark.parametrize("times, others, expected", [
    # Some steps are shorter.
    ([8.0, 9.0, 13.0, 14.0, 15.0, 16.0], [10.0, 10.1, 10.2, 10.3, 10.4, 10.5], (13.5 / 10.25, 8 / 10.5, 1.6)),
    ([50.0] * 3, [1.0] * 20, (50, 0, math.inf)),  # three are too few to tell
])  # fmt: skip
def test_times_differ_beyond_their_spread_only(times, others, expected):
    """benchmarks/test_diff.py has those that differ, and several processes."""
    ratio = timing.ratio_of_medians(times, others)
    assert tuple(ratio) == pytest.approx(expected) and not ratio.differs


@pytest.mark.parametrize("between, low, high, differs", [
    (1.0, 1.125, 2.0, True), (1.1, 1.125 / 1.1, 2.2, True), (1.2, 1.125 / 1.2, 2.4, False),
])  # fmt: skip
def test_the_noise_between_processes_widens_both_bounds(between, low, high, differs):
    """Whichever side takes longer; the ratio itself stays."""
    slow, fast = [9.0, 12.0, 12.5, 14.0], [8.0, 7.5, 8.0, 7.0]
    ratio, inverse = timing.ratio_of_medians(slow, fast, between), timing.ratio_of_medians(fast, slow, between)
    assert tuple(ratio) == pytest.approx((12.25 / 7.75, low, high)) and ratio.differs == differs
    assert tuple(inverse) == pytest.approx((7.75 / 12.25, 1 / high, 1 / low)) and inverse.differs == differs


def test_the_spread_of_the_same_work():
    assert timing.spread_of_medians([[3.0], [1.0, 2.0, 9.0], [5.0] * 3, [4.0]]) == 2.5


@torch._dynamo.config.patch(fail_on_recompile_limit_hit=False)  # restores what is set meanwhile
def test_a_function_is_compiled_for_every_shape_or_fails_but_never_runs_eagerly():
    def compiled():
        return timing.compile_apart(lambda x: 2 * x, backend="eager", dynamic=False)

    xs = [torch.ones(size) for size in range(1, 13)]
    assert all(compiled()(x).equal(2 * x) for x in xs)
    with pytest.raises(FailOnRecompileLimitHit):
        list(map(compiled(), xs))


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_ceilings_by_hand(monkeypatch, dtype):
    """The best of three, of a copy of 32 MiB and of a product of 1024 x 1024 in the type that is asked for."""
    times = {"neg": iter([2000.0, 1000.0, 3000.0]), "mm": iter([600.0, 500.0, 800.0])}  # us

    def microseconds(bench, calls):
        name, a = calls[0].func.__name__, calls[0].args[0]
        assert len(calls) == {"neg": 2, "mm": 1}[name] and a.numel() == {"neg": 2**23, "mm": 2**20}[name]
        assert a.dtype == (torch.float32 if name == "neg" else dtype or torch.float32)
        return next(times[name])

    monkeypatch.setattr(timing.Bench, "microseconds", microseconds)
    ceilings = timing.measure_ceilings(timing.Bench(CPU), dtype)
    assert ceilings == pytest.approx({"GB/s": 2 * 4 * 2**23 / 1e-3 / 1e9, "TFLOP/s": 2 * 1024**3 / 500e-6 / 1e12})
    assert [list(left) for left in times.values()] == [[], []]
