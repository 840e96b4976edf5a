"""What all benchmarks share: the run with its result file, kernels on the device's clock, steps in alternating windows.

A benchmark is a list of rows or cases, and how to build the contenders of each. What cannot be built, or is wrong, has
an error in the place of a time, and the others continue. How to add a peer: docs/design.md.
"""

import contextlib
import functools
import math
import re
import time
from pathlib import Path
from typing import NamedTuple

import torch

import tiny_llama_v3 as llama
from measure.accuracy import require_finite
from measure.command_line import Parser, time_limit
from measure.device import synchronize
from measure.results import RESULTS, ResultFile, Unavailable, describe, header
from measure.timing import in_turns, percentiles, release, window_ms
from measure.work import Work
from tiny_llama import tiles

WARMUP_STEPS = 4
WINDOW_SECONDS = 0.25
UNCOUNTED = 4  # windows, until clock and power are those of steady work


def make_parser(name, description, seconds=None):
    """Return the Parser of a benchmark with the options that all have; seconds: the default of --time-limit."""
    parser = Parser(f"{name}.py", description)
    parser.add_argument("--output-dir", default=str(RESULTS), metavar="DIR", help="(default: benchmarks/results)")
    if seconds:
        help = f"nothing starts later (default: {seconds})"
        parser.add_argument("--time-limit", type=time_limit, default=seconds, metavar="SECONDS", help=help)
    return parser


def processor():
    """Return the name of the host's processor, for which eager steps of a small model wait; None where unknown."""
    path = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", path.read_text()) if path.exists() else None
    return found and found[1]


class Run:
    """A run of a benchmark: its result, which is saved again and again, and whether something in it is wrong."""

    def __init__(self, name, argv, options, device, **fields):
        self.options, self.device, self.start = options, device, time.monotonic()
        folder = llama.writable_folder("--output-dir", options.output_dir)
        self.result = header(name, device, argv) | {"host": processor()} | fields
        self.file = ResultFile(folder, self.result)
        self.any_wrong = False
        gpu = llama.get_gpu(device.type)
        print(f"{gpu.name} ({gpu.arch}), PyTorch {torch.__version__}", flush=True)
        if llama.own_tiles(device.type):
            print(tiles.describe(device.type), flush=True)

    def save(self):
        """Write the result, whole or not at all."""
        self.result["seconds"] = round(time.monotonic() - self.start, 1)
        self.file.save(self.result)

    def finish(self):
        """Save, and return the exit code."""
        self.save()
        print(f"\nResults: {self.file.path}")
        return int(self.any_wrong)

    def is_late(self):
        return time.monotonic() - self.start > self.options.time_limit

    def require_time(self):
        """Raise Unavailable after the time limit."""
        if self.is_late():
            raise Unavailable(f"not started within --time-limit {self.options.time_limit:g}")

    def attempt(self, measure, errors=Exception):
        """Return {"error": None} and the fields that measure() returns, or {"error": why there are none}."""
        try:
            # A capture that fails does not restore the current stream.
            with torch.cuda.stream(torch.cuda.current_stream()) if self.on_gpu else contextlib.nullcontext():
                return {"error": None, **measure()}
        except errors as error:  # of this one alone, even if it is a compiler's: the others can still be measured
            self.any_wrong |= isinstance(error, ArithmeticError)
            return {"error": describe(error)}

    @property
    def on_gpu(self):
        return self.device.type == "cuda"


class WorldRun(Run):
    """A run on all processes of a distributed.World, of which the first one saves."""

    def __init__(self, world, name, argv, options, device, **fields):
        super().__init__(name, argv, options, device, processes=world.size, **fields)
        self.world = world
        if world.size > 1:
            launcher = f"torchrun --standalone --nproc_per_node={world.size}"
            self.result["command"] = f"{launcher} {self.result['command'].removeprefix('python ')}"

    def save(self):
        if self.world.rank == 0:
            super().save()


# ----------------------------------------------------------------------------------------------------------------------
# Kernels: each call on the device's clock


class Timed(NamedTuple):
    """A case: the work of a call, and what is timed.

    contenders: {name: function that checks the results, and returns the calls to time or (calls, their own amount)}.
    """

    name: str
    size: str
    work: Work
    unit: str  # "TB/s" of its bytes, or "TFLOP/s"
    contenders: dict


def measure_case(run, bench, group, case):
    """Put the time of each contender of a case, and its rate in 10^12 of the amount a second, into the result."""
    label = ", ".join(filter(None, (case.name, case.size)))
    amount = case.work.bytes if case.unit == "TB/s" else case.work.flop

    def measure(build):
        built = build()
        calls, own_amount = built if isinstance(built, tuple) else (built, amount)
        us = bench.microseconds(calls)
        return {"us": us, "rate": own_amount / us / 1e6}

    measured = {}
    print(f"{label:45}", end="")
    # Each is built, timed and freed before the next, so that none has less memory than another.
    for name, build in case.contenders.items():
        measured[name] = row = run.attempt(functools.partial(measure, build))
        release(bench.device)
        shown = row["error"] or f"{row['us']:.1f} us {row['rate']:.2f} {case.unit}"
        print(f" | {name} {shown[:60]}", end="", flush=True)
    print()
    entry = {"group": group, "case": label, "amount": amount, "unit": case.unit, "contenders": measured}
    run.result["cases"].append(entry)
    run.save()


# ----------------------------------------------------------------------------------------------------------------------
# Training steps: windows of many steps


def release_all(device):
    """Like timing.release(), and frees compiled code and cuBLAS workspaces, so that each contender has its own."""
    # What a failed backward pass has kept stays queued in this thread until there is another one.
    torch.zeros((), requires_grad=True).backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
    torch.compiler.reset()
    release(device)


class Contender:
    """A training step that is built, warmed up and captured; .results are the fields that are known by then.

    build() returns an object with a device, a loss, run(), restart() and, for a graph, capture(), as llama.TrainStep.
    """

    def __init__(self, build, device, graph=False, steps=None, warmup=WARMUP_STEPS):
        self.device = device
        on_gpu = device.type == "cuda"
        if graph and not on_gpu:
            raise Unavailable("needs a GPU")
        before = torch.cuda.memory_allocated() / 2**20 if on_gpu else 0.0
        self.step = build()
        synchronize(device)
        self.losses = []

        def warm_up_once(number):
            self.step.run()
            self.losses.append(self.step.loss.item())

        llama.make_ready(self.step, warm_up_once, warmup, graph, one_graph=True)
        self.window(1)
        self.steps = steps or max(2, min(1000, math.ceil(WINDOW_SECONDS * 1e3 / self.window(2))))
        self.results = {
            "first_loss": self.losses[0],
            "peak_memory_mib": llama.peak_memory_mib(device) - before if on_gpu else None,
            "steps_per_window": self.steps,
        }

    def window(self, steps=None):
        """Return the ms of a step, of many with the same batch."""
        steps = steps or self.steps
        milliseconds = window_ms(self.step.run, steps, self.device)
        require_finite(self.step.loss.item())
        return milliseconds


def time_in_turns(contenders, num_windows):
    """Return the windows of each contender, which are timed in turns."""
    # A first window allocates the memory that release_all() freed.
    for contender in contenders:
        contender.window(1)
    windows = [contender.window for contender in contenders]
    in_turns(windows, UNCOUNTED)
    return in_turns(windows, num_windows)


def summarize(results, windows, tokens, tflop, peak):
    """Return the fields of a row: tokens and tflop are those of a step, peak is in TFLOP/s or None."""
    ms = percentiles(windows)
    seconds = ms["median"] / 1e3
    return {
        **results,
        "windows_ms": windows,
        "ms": ms,
        "tokens_per_second": tokens / seconds,
        "tflops_per_second": tflop / seconds,
        "mfu": tflop / seconds / peak if peak else None,
    }


def compare_windows(reference, reference_windows, windows):
    """Return what a row says of its reference; ratio is the reference's time divided by the row's, for each window."""
    ratios = [ours / theirs for ours, theirs in zip(reference_windows, windows, strict=True)]
    return {"reference": reference, "reference_windows_ms": reference_windows, "ratio": percentiles(ratios)}


def measure_rows(run, measured, rows, reference, build, figures, clean=release_all):
    """Time rows {name: NamedTuple} in windows that alternate with those of a reference; put the results in measured.

    build(name) returns a Contender, and figures(name, contender, windows) the fields of its row. The reference is built
    first, if it is one of the rows, and recorded last, with all of its windows. clean: what to do after each row.
    """
    # Two contenders at most are in memory at a time: the reference, and the row that is timed beside it.
    own = []  # the reference's Contender
    own_windows = []

    def start(name):
        run.require_time()
        return build(name)

    def measure(name):
        contender = start(name)
        *own_times, windows = time_in_turns([*own, contender], run.options.windows)
        fields = figures(name, contender, windows)
        if own:
            own_windows.extend(own_times[0])
            fields |= compare_windows(reference, own_times[0], windows)
        return fields

    def measure_reference():
        windows = own_windows or time_in_turns(own, run.options.windows)[0]  # if no other row was measured
        return figures(reference, own[0], windows)

    def record(name, fields):
        measured[name] = {**rows[name]._asdict(), **fields}
        line = fields["error"] or f"{fields['ms']['median']:.3f} ms"
        if "ratio" in fields:
            line += f"; {reference} takes {fields['ratio']['median']:.3f} of it"
        print(f"    {name:32} {line}", flush=True)
        run.save()

    started = run.attempt(lambda: own.append(start(reference)) or {}) if reference in rows else None
    for name in rows:
        if name != reference:
            record(name, run.attempt(functools.partial(measure, name)))
            clean(run.device)
    if started:
        record(reference, run.attempt(measure_reference) if own else started)
        own.clear()
        clean(run.device)
