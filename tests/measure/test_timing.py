"""What is made of a clock's readings: units, calls, turns, flushed caches."""

import math
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.testing import CompileCounter

import tiny_llama_v3 as llama
from measure import timing

CPU = llama.get_device("cpu")


@pytest.fixture
def fake_gpu(monkeypatch):
    """A device whose graph replays in 4 ms, ran or not."""

    anything = MagicMock()
    anything.elapsed_time.return_value = 4.0
    for name in ("Stream", "CUDAGraph", "graph", "Event", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, **kwargs: anything)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return timing.Bench(llama.Device("cuda", "fake", "sm_90", 132, 32))


def test_a_replay_is_microseconds_a_call_and_goes_round_the_buffers(fake_gpu):
    called = []
    calls = [lambda index=index: called.append(index) for index in range(3)]
    assert fake_gpu.microseconds(calls) == pytest.approx(4000 / timing.CALLS)
    assert called == [0, 1, 2] + [index % 3 for index in range(timing.CALLS)]


def test_a_failed_capture_has_the_reason_of_the_call(fake_gpu, monkeypatch):
    """torch.cuda.graph raises another error at its end."""
    graph = MagicMock()
    graph.__exit__.side_effect = [RuntimeError("failed due to a previous error"), None]
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **kwargs: graph)
    monkeypatch.setattr(torch, "zeros", MagicMock())
    call = MagicMock(side_effect=[None, RuntimeError("not permitted")])
    with pytest.raises(RuntimeError, match="not permitted"):
        fake_gpu.microseconds([call])
    assert torch.zeros.call_count == 1 and graph.__exit__.call_count == 2  # another capture, which ends well


@pytest.mark.gpu
def test_a_call_that_cannot_be_captured_does_not_harm_the_next():
    bench, before = timing.Bench(llama.get_device("cuda")), torch.cuda.current_stream()
    x = bench.randn(4)
    with pytest.raises(RuntimeError, match="capturing"):
        bench.microseconds([lambda: x.sum().item()])
    assert torch.cuda.current_stream() == before
    assert bench.randn(4).isfinite().all()


def test_a_flushed_call_is_captured_alone_and_the_cache_flushed_before_each_replay(fake_gpu, monkeypatch):
    buffer, called = MagicMock(), []
    monkeypatch.setattr(timing, "flush_buffer", lambda: buffer)
    assert fake_gpu.flushed_ms(lambda: called.append(1)) == pytest.approx(4.0)
    assert called == [1, 1]  # to compile it, and to capture it
    assert buffer.sum.call_count == 3 + math.ceil(timing.FLUSHED_SECONDS * 1e3 / 4)


def test_a_call_on_a_cpu_is_timed_once(ticking):
    bench = timing.Bench(CPU)
    assert bench.microseconds([lambda: ticking(3e-6), pytest.fail]) == pytest.approx(3.0)
    assert bench.flushed_ms(lambda: ticking(3e-3)) == pytest.approx(3.0)


def test_seconds_of_a_call_among_many_that_go_round(ticking):
    order = []
    calls = [lambda name=name: order.append(name) or ticking(2.0) for name in "ab"]
    assert timing.wall_seconds(calls, 5, CPU) == pytest.approx(2.0)
    assert "".join(order) == "ababa"


def test_the_ms_of_a_call_among_many(ticking):
    assert timing.window_ms(lambda: ticking(0.004), 7, CPU) == pytest.approx(4.0)


def test_percentiles():
    assert timing.percentiles([5.0, 1.0, 4.0, 2.0, 3.0]) == pytest.approx({"p20": 1.8, "median": 3.0, "p80": 4.2})


# --- two sets of times


@pytest.mark.parametrize("count, ranks", [
    (3, (1, 3)), (5, (1, 5)), (6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (11, (2, 10)), (17, (5, 13)), (20, (6, 15)),
])  # fmt: skip
def test_the_interval_of_a_median_is_the_binomial_s(count, ranks):
    """Ranks of Le Boudec's table for 95 %, of all fewer than 6; for 90 % those of 8 and 11 would be narrower."""
    assert timing.median_interval(range(count, 0, -1)) == ranks


TIMES = st.lists(st.floats(0.1, 100), min_size=4, max_size=15)


@given(TIMES, TIMES, st.floats(1, 2))
def test_a_ratio_and_its_inverse(times, others, between):
    ratio, inverse = (timing.ratio_of_medians(*pair, between) for pair in ((times, others), (others, times)))
    assert ratio.low <= ratio.value <= ratio.high
    assert tuple(inverse) == pytest.approx((1 / ratio.value, 1 / ratio.high, 1 / ratio.low))
    alone = timing.ratio_of_medians(times, others)
    assert (ratio.low, ratio.high) == pytest.approx((alone.low / between, alone.high * between))


def test_times_differ_beyond_their_spread_only():
    steps = [10.0, 10.1, 10.2, 10.3, 10.4, 10.5]
    twice = timing.ratio_of_medians([2 * ms for ms in steps], steps)
    assert tuple(twice) == pytest.approx((2, 20 / 10.5, 21 / 10)) and twice.differs
    restless = [8.0, 9.0, 13.0, 14.0, 15.0, 16.0]  # a median of 1.3 times as long, and some steps shorter
    ratio = timing.ratio_of_medians(restless, steps)
    assert ratio.value == pytest.approx(13.5 / 10.25) and not ratio.differs
    # How much another process takes for the same work widens the bounds.
    slow, fast = [1.3] * 20, [1.0] * 20
    assert tuple(timing.ratio_of_medians(slow, fast, between=1.25)) == pytest.approx((1.3, 1.04, 1.625))
    assert not timing.ratio_of_medians(slow, fast, between=1.4).differs
    assert timing.spread_of_medians([[3.0], [1.0, 2.0, 9.0], [5.0] * 3, [4.0]]) == 2.5
    assert timing.spread_of_medians([[4.0]]) == 1


def test_three_times_are_too_few_to_tell():
    assert not timing.ratio_of_medians([50.0] * 3, [1.0] * 20).differs
    assert timing.ratio_of_medians([50.0] * 4, [1.0] * 4).differs


@torch._dynamo.config.patch(fail_on_recompile_limit_hit=False)  # restores what is set meanwhile
def test_a_function_is_compiled_for_every_shape_or_fails_but_never_runs_eagerly(monkeypatch):
    counter, compile = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile(f, backend=counter, **options))
    xs = [torch.ones(size) for size in range(1, 13)]

    def double(x):
        return 2 * x

    for x in xs:
        timing.compile_apart(double, dynamic=False)(x)
    assert counter.frame_count == len(xs)
    with pytest.raises(FailOnRecompileLimitHit):
        list(map(timing.compile_apart(double, dynamic=False), xs))
