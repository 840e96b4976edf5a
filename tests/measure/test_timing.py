"""What is made of a clock's readings: units, calls, turns, flushed caches."""

import math
from unittest.mock import MagicMock

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

import tiny_llama_v3 as llama
from measure import timing

CPU = torch.device("cpu")


@pytest.fixture
def fake_gpu(monkeypatch):
    """A Bench on a device whose graph replays in 4 ms, ran or not."""
    anything = MagicMock()
    anything.elapsed_time.return_value = 4.0
    for name in ("Stream", "CUDAGraph", "graph", "Event", "stream", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, **kwargs: anything)
    return timing.Bench(llama.Gpu("cuda", "fake", "sm_90", 132, 32))


def test_a_replay_is_microseconds_a_call_and_goes_round_the_buffers(fake_gpu):
    called = []
    assert fake_gpu.microseconds([lambda: called.append(0), lambda: called.append(1)]) == 4000 / 8
    assert called == [0, 1] + [0, 1] * 4


def test_a_flushed_call_is_captured_alone_and_the_cache_flushed_before_each_replay(fake_gpu, monkeypatch):
    buffer, call = MagicMock(), MagicMock()
    monkeypatch.setattr(timing, "flush_buffer", lambda: buffer)
    assert fake_gpu.flushed_ms(call) == 4
    assert call.call_count == 2  # to compile it, and to capture it
    assert buffer.sum.call_count == 3 + 25  # of 4 ms in 0.1 s


@pytest.mark.gpu
def test_a_call_that_cannot_be_captured_does_not_harm_the_next():
    bench, before = timing.Bench(torch.device("cuda")), torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match="capturing"):
        bench.microseconds([lambda: bench.randn(4).sum().item()])
    assert torch.cuda.current_stream() == before and bench.randn(4).isfinite().all()


def test_units_of_the_host_s_clock(ticking):
    bench, order = timing.Bench(CPU), []
    calls = [lambda name=name: order.append(name) or ticking(0.003) for name in "ab"]
    measured = [bench.microseconds(calls), bench.flushed_ms(calls[0]), timing.wall_seconds(calls, 5, CPU)]
    assert [*measured, timing.window_ms(calls[1], 7, CPU)] == pytest.approx([3000, 3, 0.003, 3])
    assert "".join(order) == "a" + "a" + "ababa" + "b" * 7
    copies, n_bytes = timing.copy_calls(bench, 10)
    assert n_bytes == sum(t.nbytes for t in (*copies[0].args, copies[0].keywords["out"])) == 80


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


def test_ceilings_by_hand(monkeypatch):
    times = iter([2000.0, 1000.0, 3000.0, 600.0, 500.0, 800.0])  # us; the best of three counts
    monkeypatch.setattr(timing.Bench, "microseconds", lambda bench, calls: next(times))
    ceilings = timing.measure_ceilings(timing.Bench(torch.device("cpu")))
    assert ceilings["GB/s"] == pytest.approx(2 * 4 * 2**23 / 1e-3 / 1e9)
    assert ceilings["TFLOP/s"] == pytest.approx(2 * 1024**3 / 500e-6 / 1e12)
