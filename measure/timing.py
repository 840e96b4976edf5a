"""Clocks. What is compared is measured in one process, by the same clock, in turns."""

import contextlib
import functools
import gc
import itertools
import math
import statistics
import time
from typing import NamedTuple

import numpy as np
import torch

from measure.device import synchronize
from tiny_llama_v3 import StepClock

CALLS = 8  # in one graph
REPLAY_SECONDS = 0.15
FLUSHED_BYTES = 512 * 2**20  # more than any cache holds, MI300's 256 MiB included
FLUSHED_SECONDS = 0.1
NUMBERS = itertools.count()  # of code objects


# ----------------------------------------------------------------------------------------------------------------------
# One call, on the device's clock


class Bench:
    """A device, the type that suits it, and how calls are timed on it. On a CPU a call is timed once, by the host."""

    def __init__(self, device):
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32  # the interpreter multiplies bf16 wrongly
        self.stream = torch.cuda.Stream() if self.on_gpu else None

    def randn(self, *shape, dtype=None):
        return torch.randn(*shape, device=self.device.type, dtype=dtype or self.dtype)

    @contextlib.contextmanager
    def on_stream(self):
        """Autograd runs a backward pass on the stream of its forward pass: both must be on the one that is captured."""
        if not self.on_gpu:
            yield
            return
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.synchronize()

    def capture(self, calls, number):
        """A graph of so many calls, which goes round the list."""
        with self.on_stream():
            for call in calls:  # compiles, and initialises the libraries
                call()
        graph = torch.cuda.CUDAGraph()
        try:
            # The current stream is not restored by a capture that fails.
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, stream=self.stream):
                for call in itertools.islice(itertools.cycle(calls), number):
                    call()
        except Exception as error:  # of the end of the capture; the one before it tells why
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self.stream):
                torch.zeros(1, device="cuda")  # until a capture ends well, the random generator refuses to work
            raise (error.__context__ or error) from None
        return graph

    def microseconds(self, calls):
        """Device time of one call, the median of replays of a graph that goes round the list."""
        if not self.on_gpu:
            return wall_seconds(calls, 1, self.device) * 1e6
        graph = self.capture(calls, CALLS)
        # A replay before the timed one gives the host the time to be ahead, so that the launch is not timed.
        return median_replay_ms(graph, REPLAY_SECONDS, at_least=5, at_most=50, before=graph.replay) * 1e3 / CALLS

    def flushed_ms(self, call):
        """Device time of one call, the median of those that each find the cache flushed."""
        if not self.on_gpu:
            return wall_seconds([call], 1, self.device) * 1e3
        graph = self.capture([call], 1)
        # Reading, as the write-back of what was written would be timed. It also gives the host the time to be ahead.
        return median_replay_ms(graph, FLUSHED_SECONDS, at_least=10, at_most=100, before=flush_buffer().sum)


@functools.cache
def flush_buffer():
    return torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")


def replay_ms(graph, before=lambda: None):
    """The time of one replay of a graph on the device, after a call of before()."""
    before()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def median_replay_ms(graph, seconds, at_least, at_most, before=lambda: None):
    """The median time of a graph's replay, of as many as take so many seconds, each after a call of before()."""
    first = min(replay_ms(graph, before) for _ in range(3))
    count = max(at_least, min(at_most, math.ceil(seconds * 1e3 / first)))
    return statistics.median(replay_ms(graph, before) for _ in range(count))


def copy_calls(bench, elements):
    """(calls, bytes of one) of a kernel that reads and writes, the ceiling of all bandwidth.

    A plain copy inside a graph goes to the copy engine, which is slower.
    """
    sets = [(bench.randn(elements), bench.randn(elements)) for _ in range(2)]
    return [functools.partial(torch.neg, x, out=y) for x, y in sets], 2 * sets[0][0].nbytes


def measure_ceilings(bench, dtype=None):
    """Return {"GB/s", "TFLOP/s"} of a copy and of a large product in a dtype: the best of three measurements."""
    copies, moved = copy_calls(bench, 2**28 if bench.on_gpu else 2**23)  # more than any cache holds
    size = 8192 if bench.on_gpu else 1024
    product = functools.partial(torch.mm, *(bench.randn(size, size, dtype=dtype) for _ in range(2)))
    copy_us, product_us = (min(bench.microseconds(calls) for _ in range(3)) for calls in (copies, [product]))
    return {
        "GB/s": moved / copy_us / 1e3,
        "TFLOP/s": 2 * size**3 / product_us / 1e6,
    }


# ----------------------------------------------------------------------------------------------------------------------
# Many calls, on the host's clock


def wall_seconds(calls, number, device):
    """Seconds of a call when so many follow each other, round the list, the host's part included."""
    synchronize(device)
    start = time.perf_counter()
    for call in itertools.islice(itertools.cycle(calls), number):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / number


def window_ms(call, number, device):
    """Return the ms of a call when so many follow each other, by the device's clock, or by the host's on a CPU."""
    clock = StepClock(device, unsynced=False)
    synchronize(device)
    clock.mark()
    for _ in range(number):
        call()
    clock.mark()
    synchronize(device)
    return clock.intervals()[0] / number


def in_turns(windows, number):
    """For each of the functions, its results: each is called once before any is called again, in alternating order."""
    results = [[] for _ in windows]
    pairs = list(zip(windows, results, strict=True))
    for _ in range(number):
        for window, own in pairs:
            own.append(window())
        pairs.reverse()
    return results


def percentiles(values):
    return dict(zip(("p20", "median", "p80"), np.percentile(values, [20, 50, 80]).tolist(), strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# Two sets of times: is there a difference?

LEAST_TIMES = 4  # with three each, all of one set are by chance above all of the other in one case of ten


def median_interval(times):
    """(low, high): where the median of what was sampled lies in 95 of 100 cases, whatever its distribution.

    The times between which the binomial distribution puts it (Le Boudec, Performance Evaluation of Computer and
    Communication Systems, theorem 2.1), as Hoefler and Belli advise for times of programs (Scientific Benchmarking of
    Parallel Computing Systems, SC15, section 3.1.3). Fewer than six have no narrower one than all that was seen.
    """
    ordered, count = sorted(times), len(times)
    below, outside = 0.0, 0
    while True:
        below += math.comb(count, outside) / 2**count
        if below > 0.025:
            break
        outside += 1
    return ordered[max(outside - 1, 0)], ordered[min(count - outside, count - 1)]


class Ratio(NamedTuple):
    """How many times as long one set of times is as another, by their medians, and between which bounds."""

    value: float
    low: float
    high: float

    @property
    def differs(self):
        """Whether the bounds exclude that both take as long."""
        return not self.low <= 1 <= self.high


def ratio_of_medians(times, others, between=1.0):
    """The Ratio of times to others: the one rule by which a difference is called one.

    between: how many times as long the same work took in another process, beside which a step's own spread is small.
    Sets of fewer than LEAST_TIMES have no bounds, and differ in nothing.
    """
    value = statistics.median(times) / statistics.median(others)
    if min(len(times), len(others)) < LEAST_TIMES:
        return Ratio(value, 0.0, math.inf)
    (low, high), (other_low, other_high) = median_interval(times), median_interval(others)
    return Ratio(value, low / other_high / between, high / other_low * between)


def spread_of_medians(sets):
    """How many times as long the same work took in one of these sets of times as in another; 1 if there is only one."""
    medians = [statistics.median(times) for times in sets]
    return max(medians) / min(medians)


# ----------------------------------------------------------------------------------------------------------------------
# Between two measurements


def release(device):
    """Give the memory of what is no longer referenced back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def gradient_call(function, inputs, upstream):
    """A call of the backward pass alone of function(*inputs); the graph behind it is kept."""
    outputs = function(*inputs)
    needed = [x for x in inputs if x.requires_grad]
    return functools.partial(torch.autograd.grad, outputs, needed, upstream, retain_graph=True)


def compile_apart(function, repeatable=False, **options):
    """Calls torch.compile with a code object of its own.

    Compiled code is reused for the same code object, and the checks before its reuse do not cover all differences
    between rows, such as the attention or the exchange of gradients. Of one code object, eight versions are compiled,
    and others would run eagerly: that is an error here. repeatable: its backward pass, and any that is compiled later,
    can run again on the same saved tensors, which takes memory.
    """

    def apart(*args, **keywords):
        return function(*args, **keywords)

    apart.__code__ = apart.__code__.replace(co_name=f"apart_{next(NUMBERS)}")
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._functorch.config.donated_buffer &= not repeatable
    return torch.compile(apart, **options)
