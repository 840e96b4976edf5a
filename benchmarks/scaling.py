"""Time how a training step scales over the GPUs of a host, compared with DistributedDataParallel and FSDP2.

    torchrun --standalone --nproc_per_node=2 -m benchmarks.scaling
    torchrun --standalone --nproc_per_node=4 -m benchmarks.scaling --sizes large
    torchrun --standalone --nproc_per_node=2 -m benchmarks.scaling --tiny     a model of seconds, also on a CPU

The program measures the model of tiny_llama_v3.py in three sizes, in bf16: our kernels with the sharded optimizer,
eager and as one captured graph, and DistributedDataParallel and FSDP2 on the compiled PyTorch model. With weak scaling
each process has the batch of a single one, with strong scaling the batch is divided. Before a row is timed, the losses
of its first steps are compared with those of one process at the batch of all. Timed in turns are steps of one process
alone, of all processes side by side without communication, of all processes with communication, and of "triton graph".
"gpt2" is nanogpt_triton's trainer (GPT-2, 124 million weights, 12 x 1024 tokens a process, bf16), measured in the same
three ways.

Exit codes: 0 done, 1 the losses of a row are wrong, 2 the request cannot be met, 130 interrupted.
"""

import contextlib
import dataclasses
import functools
import math
import statistics
import sys
import time
from types import SimpleNamespace
from typing import NamedTuple

import torch

if not __package__:
    print("run it from the root as python -m benchmarks.scaling", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from benchmarks import gpt
from benchmarks.steps import begin_measuring, release_all
from measure.accuracy import require_finite
from measure.command_line import Parser, positive, program, time_limit
from measure.results import RESULTS, ResultFile, Unavailable, describe, header
from measure.timing import compile_apart, in_turns, wall_seconds
from measure.work import SIZES
from tiny_llama import distributed

ROWS = {  # flags of tiny_llama_v3.py
    "triton graph": dict(impl="triton", graph=True),
    "triton": dict(impl="triton"),
    "DDP": dict(impl="sdpa", compile=True),
    "FSDP2": dict(impl="sdpa", compile=True, shard="full"),
}
REFERENCE = "triton graph"  # timed in turns with every other row
GPT2 = "gpt2"
SCALED = ("small", "medium", "large", GPT2)
MODES = ("weak", "strong")
WINDOW_SECONDS = 0.25
GPT_STEPS = 8  # in a window
# At 3e-4 the large model overshoots in its first steps, and the rounding of bf16 makes correct runs diverge.
LEARNING_RATE = 3e-5
GATE_STEPS = 5  # on one batch, so that the fall of the loss depends on the gradients of all processes
GATE_TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 2e-2}  # as a share of that fall
ALONE = distributed.World()
MESSAGE_BYTES = 2**30  # so large that the latency is negligible

# ----------------------------------------------------------------------------------------------------------------------
# tiny_llama_v3.py's model


class Contender:
    """A training step of a world, warmed up and captured; .losses are the mean losses of its first steps."""

    def __init__(self, config, device, world, steps=None):
        self.config, self.device, self.world = config, device, world
        on_gpu = device.type == "cuda"
        if config.graph and not on_gpu:
            raise Unavailable("needs a GPU")
        obstacle = llama.triton_obstacle(device, config.use_amp) if config.impl == "triton" else None
        if obstacle:
            raise Unavailable(obstacle)
        before = torch.cuda.memory_allocated() / 2**20 if on_gpu else 0.0
        self.step = (distributed.Step if world.size > 1 else llama.TrainStep)(config, device)
        if config.compile and world.size == 1:  # which would else reuse what was compiled for several processes
            self.step.run_model = compile_apart(self.step.model)
        self.step.load(*next(self.step.batches(config.seed)))
        self.step.synchronize()
        # A captured step must have been warmed up on another stream than the default one.
        with torch.cuda.stream(torch.cuda.Stream()) if config.graph else contextlib.nullcontext():
            losses = [self.next_loss() for _ in range(GATE_STEPS)]
        self.losses = world.mean(losses)
        begin_measuring(self.step, device, config.graph)
        self.window(1)
        self.steps = steps or max(2, min(1000, math.ceil(WINDOW_SECONDS * 1e3 / self.window(2))))
        self.peak_memory_mib = max(world.gather(llama.peak_memory_mib(device) - before)) if on_gpu else None

    def next_loss(self):
        self.step.run()
        return self.step.loss.item()

    def window(self, steps=None):
        """The ms of a step with a fixed batch, on the slowest process."""
        self.world.gather(None)  # so that all begin together
        milliseconds = wall_seconds([self.step.run], steps or self.steps, self.device) * 1e3
        require_finite(self.step.loss.item())
        return max(self.world.gather(milliseconds))


def phases_ms(config, device):
    """{phase: median ms} of a step of one process; on a GPU each phase is a captured graph."""
    step = llama.TrainStep(config, device)
    step.load(*next(step.batches(config.seed)))
    step.synchronize()
    on_gpu = device.type == "cuda"
    if on_gpu:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                step.run()
        step.capture()
    clocks = []
    for _ in range(20 if on_gpu else 1):
        clocks.append(llama.StepClock(device, unsynced=False))
        clocks[-1].mark()
        for phase in step.phases.values():
            phase()
            clocks[-1].mark()
    step.synchronize()
    medians = map(statistics.median, zip(*(clock.intervals() for clock in clocks), strict=True))
    return dict(zip(("forward", "backward", "optimizer"), medians, strict=True))


def measure_collectives(device, world, n_bytes):
    """Measures a reduce-scatter and an all-gather by themselves: bandwidth in GB/s out of a process, latency in us.

    On a GPU they are captured, as in the step, since the host takes longer for a launch than a short message does.
    """

    def ms(function, calls):
        def all_calls():
            for _ in range(calls):
                function()

        all_calls()
        if device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                all_calls()
            all_calls = graph.replay
        wall_seconds([all_calls], 1, device)
        world.gather(None)
        return max(world.gather(wall_seconds([all_calls], 3, device) * 1e3)) / calls

    def both_ms(n_bytes, calls):
        whole = torch.zeros(n_bytes // 2, dtype=torch.bfloat16, device=device.type)
        own = whole.chunk(world.size)[world.rank]
        scatter, gather = distributed.reduce_scatter, distributed.all_gather
        return ms(lambda: scatter(own, whole), calls), ms(lambda: gather(whole, own), calls)

    n_bytes -= n_bytes % (2 * world.size)
    milliseconds, short = both_ms(n_bytes, 5), both_ms(2 * world.size, 50)
    sent = 2 * n_bytes * (world.size - 1) / world.size
    return {
        "bytes": n_bytes,
        "reduce_scatter_ms": milliseconds[0],
        "all_gather_ms": milliseconds[1],
        "bandwidth": sent / sum(milliseconds) / 1e6,
        "latency_us": 1e3 * sum(short) / 2,
    }


class Setup(NamedTuple):
    """Settings that all measurements share."""

    device: llama.Device
    world: distributed.World
    options: SimpleNamespace  # of the command line
    deadline: float  # of time.monotonic(), after which no row begins
    alone_ms: dict  # {configuration: ms of a step of one process}, measured once for weak and strong, DDP and FSDP2

    def build(self, config, world=ALONE):
        """Builds a Contender on each process; if it fails on one, raises Unavailable on all.

        If a process fails within a collective, the others wait for it until the timeout of World.join() ends all.
        """
        contender = error = None
        try:
            contender = Contender(config, self.device, world, self.options.steps)
        except Exception as exception:  # the other rows can still be measured
            error = describe(exception)
        errors = [text for text in self.world.gather(error) if text]
        if errors:
            raise Unavailable(errors[0])
        return contender

    def configure(self, config, name):
        """The configuration of a row, without compilation on a CPU."""
        config = dataclasses.replace(config, **ROWS[name])
        return dataclasses.replace(config, compile=config.compile and self.device.type == "cuda")

    def windows(self, functions):
        """{mode: ms of each window} of {mode: function}, in turns."""
        return dict(zip(functions, in_turns(list(functions.values()), self.options.windows), strict=True))

    def alone(self, contender):
        """A window of the first process, while the others wait."""
        self.world.gather(None)
        return self.world.gather(contender.window() if self.world.rank == 0 else None)[0]

    def side_by_side(self, contender):
        """A window of all processes without communication; the slowest one counts."""
        self.world.gather(None)
        return max(self.world.gather(contender.window()))


def require_losses(losses, expected, precision):
    """ArithmeticError if the losses do not fall as expected."""
    allowed = GATE_TOLERANCE[precision] * (max(expected) - min(expected))
    error = max(abs(ours - theirs) for ours, theirs in zip(losses, expected, strict=True))
    if not error <= allowed:
        text, theirs = (", ".join(f"{loss:.4f}" for loss in values) for values in (losses, expected))
        raise ArithmeticError(f"wrong losses: {text} instead of {theirs}, {error:.1e} off, allowed {allowed:.1e}")


class Mode:
    """Weak or strong scaling of one model: a process has 1/factor of the batch of one process alone."""

    def __init__(self, setup, config, factor):
        self.setup, self.factor = setup, factor
        self.config = dataclasses.replace(config, batch_size=config.batch_size // factor)
        self.expected = None  # losses
        self.reference = None  # the Contender that is timed in turns with all others

    def expect(self):
        """The losses of one process at the batch of all, on plain PyTorch; computed on each process."""
        if self.expected is None:
            batch_size = self.setup.world.size * self.config.batch_size
            config = dataclasses.replace(self.config, impl="sdpa", batch_size=batch_size)
            self.expected = self.setup.build(config).losses
            release_all(self.setup.device)
        return self.expected

    def measure(self, name):
        """Measures a row of the result. Unavailable or ArithmeticError if it cannot be timed."""
        setup, world = self.setup, self.setup.world
        if any(world.gather(time.monotonic() > setup.deadline)):
            raise Unavailable(f"not started within --time-limit {setup.options.time_limit:g}")
        expected = self.expect()
        config = setup.configure(self.config, name)
        contender = setup.build(config, world)
        require_losses(contender.losses, expected, llama.precision_name(config, setup.device))
        functions = {"exchanging": contender.window}
        if self.reference:
            functions["reference"] = self.reference.window
        single = dataclasses.replace(config, shard=None, batch_size=self.factor * config.batch_size)
        if single not in setup.alone_ms:
            one = setup.build(single)
            functions["alone"] = functools.partial(setup.alone, one)
            functions["side by side"] = functools.partial(setup.side_by_side, one)
        windows = setup.windows(functions)
        if "alone" in windows:
            setup.alone_ms[single] = statistics.median(windows["alone"])
        if name == REFERENCE:
            self.reference = contender
        return self.figures(contender, windows, setup.alone_ms[single])

    def figures(self, contender, windows, alone_ms):
        """Computes the row from its windows; alone_ms is that of a step of one process."""
        ms = {mode: statistics.median(values) for mode, values in windows.items()}
        tokens = contender.world.size * contender.config.tokens_per_step
        row = {
            "error": None,
            "losses": contender.losses,
            "windows_ms": windows,
            "ms": {"alone": alone_ms, **ms},
            "tokens_per_second": tokens / ms["exchanging"] * 1e3,
            "efficiency": alone_ms / self.factor / ms["exchanging"],
            "peak_memory_mib": contender.peak_memory_mib,
        }
        if "reference" in windows:
            pairs = zip(windows["reference"], windows["exchanging"], strict=True)
            row["ratio"] = statistics.median(ours / theirs for ours, theirs in pairs)  # below 1 our step is faster
        return row


def measure_mode(setup, mode, config, result, save):
    """Fills the result of one size with weak or strong scaling, and calls save() after each row.

    Returns whether a row had wrong losses.
    """
    factor, any_wrong = setup.world.size if mode == "strong" else 1, False
    if config.batch_size % factor:
        print(f"    {config.batch_size} sequences cannot be divided among {factor} processes", flush=True)
        return any_wrong
    measured, rows = Mode(setup, config, factor), {}
    result[mode] = {"batch_size": measured.config.batch_size, "rows": rows}
    for name in setup.options.rows:
        try:
            rows[name] = row = measured.measure(name)
            times = ", ".join(f"{key} {value:.3f}" for key, value in row["ms"].items())
            line = f"{100 * row['efficiency']:5.1f} %, ms a step: {times}"
        except (Unavailable, ArithmeticError) as error:
            any_wrong |= isinstance(error, ArithmeticError)
            line = str(error)
            rows[name] = {"error": line}
        print(f"    {name:12} {line}", flush=True)
        release_all(setup.device)
        result[mode]["expected_losses"] = measured.expected
        save()
    return any_wrong


def measure_sizes(setup, names, result, save):
    """Fills the result, weak scaling of all sizes first. Returns whether a row had wrong losses."""
    device, world, any_wrong = setup.device, setup.world, False
    on_gpu = device.type == "cuda"
    torch.set_float32_matmul_precision("highest")  # the trainer has set another
    result["collectives"] = measure_collectives(device, world, MESSAGE_BYTES if on_gpu else 2**20)
    for mode in setup.options.modes:
        for name in names:
            print(f"\n{name}, {mode}", flush=True)
            config = llama.Config(**SIZES[name], use_amp=on_gpu, learning_rate=LEARNING_RATE)
            size = result["sizes"].setdefault(name, {"config": dataclasses.asdict(config)})
            size["precision"] = llama.precision_name(config, device)
            if REFERENCE in setup.options.rows and "phases_ms" not in size:
                size["phases_ms"] = phases_ms(config, device)
                release_all(device)
            any_wrong |= measure_mode(setup, mode, config, size, save)
    return any_wrong


# ----------------------------------------------------------------------------------------------------------------------
# nanogpt_triton's trainer


def measure_gpt(setup, result, save):
    """Fills the result with steps of the first process alone, of all side by side, and of all with communication."""
    world, device = setup.world, torch.device(setup.device.type, setup.world.local_rank)
    device = torch.device("cpu") if device.type == "cpu" else device
    described, config, batch = gpt.prepare(setup.options, world, device)
    result |= described | {"rows": {}}
    layer_norm = "triton" if device.type == "cuda" else "torch"
    steps = setup.options.steps or GPT_STEPS
    for name, compiled in {"eager": False, "compile": True}.items():
        result["rows"][name] = row = {"error": None}
        if world.any(time.monotonic() > setup.deadline):
            row["error"] = "left out by --time-limit"
            continue
        try:
            single = gpt.Contender(gpt.Row(layer_norm, compile=compiled), config, batch, device)
            single.window(steps)
            exchanging = gpt.Contender(single.row, config, batch, device, world)
            exchanging.window(steps)
        except Exception as error:  # compilation fails on all processes
            row["error"] = describe(error)
            continue
        windows = {"alone": [], "side by side": [], "exchanging": []}
        for _ in range(setup.options.windows):
            world.gather(None)  # a barrier on the hosts
            if world.rank == 0:
                windows["alone"].append(single.window(steps))
            world.gather(None)
            windows["side by side"].append(single.window(steps))
            world.gather(None)
            windows["exchanging"].append(exchanging.window(steps))
        world.gather(None)
        if world.rank == 0:
            ms = {mode: statistics.median(values) for mode, values in windows.items()}
            efficiency = ms["alone"] / ms["exchanging"]
            tokens = batch[0].numel() * world.size / ms["exchanging"] * 1e3
            row |= {"windows_ms": windows, "ms": ms, "efficiency": efficiency, "tokens_per_second": tokens}
            times = ", ".join(f"{mode} {value:.2f}" for mode, value in ms.items())
            print(f"    {name:10} {100 * efficiency:5.1f} %  ms: {times}", flush=True)
            save()
        del single, exchanging
        release_all(device)


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def parse(argv):
    parser = Parser("scaling.py", __doc__)
    parser.add_argument("--sizes", nargs="+", choices=SCALED, default=SCALED, help="what to measure (default: all)")
    parser.add_argument("--tiny", action="store_true", help="instead of each a model that takes seconds, also on a CPU")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="of scaling (default: both)")
    parser.add_argument("--windows", type=positive, default=7, metavar="N", help="of each row (default: 7)")
    default = f"{GPT_STEPS} of {GPT2}, {WINDOW_SECONDS} s of the others"
    parser.add_argument("--steps", type=positive, metavar="N", help=f"in a window (default: {default})")
    parser.add_argument("--time-limit", type=time_limit, default=400, metavar="S", help="for starting rows (400)")
    parser.add_argument("--output-dir", default=str(RESULTS), metavar="DIR", help="(default: benchmarks/results)")
    options = parser.parse_args(argv)
    if options.tiny:
        options.sizes = list(dict.fromkeys(name if name == GPT2 else "tiny" for name in options.sizes))
    options.rows = [name for name in ROWS if name in (options.rows or ROWS)]  # the reference first
    return options


def run(argv, world):
    start = time.monotonic()
    options = parse(argv)
    distributed.Step.world = world
    if world.size == 1:
        command = "torchrun --standalone --nproc_per_node=2 -m benchmarks.scaling"
        raise llama.UsageError(f"one process has nothing to exchange: start several, such as with {command}")
    device = world.select_device("auto")
    if not (device.type == "cuda" or options.tiny):
        raise llama.UsageError("the models that are measured need GPUs, and there is none: use --tiny")
    folder = llama.writable_folder("--output-dir", options.output_dir)
    result = header("scaling", device, argv) | {"processes": world.size, "sizes": {}}
    launcher = f"torchrun --standalone --nproc_per_node={world.size}"
    result["command"] = f"{launcher} {result['command'].removeprefix('python ')}"
    file = ResultFile(folder, result)
    setup = Setup(device, world, options, start + options.time_limit, {})

    def save():
        if world.rank == 0:
            result["seconds"] = round(time.monotonic() - start, 1)
            file.save(result)

    print(f"{device.name} ({device.arch}), PyTorch {torch.__version__}, {world.size} processes", flush=True)
    world.join(device, llama.Config().comm_timeout)
    if GPT2 in options.sizes:
        print(f"\n{GPT2}", flush=True)
        result[GPT2] = {}
        measure_gpt(setup, result[GPT2], save)
    sizes = [name for name in options.sizes if name != GPT2]
    any_wrong = bool(sizes) and measure_sizes(setup, sizes, result, save)
    save()
    print(f"\nResults: {file.path}")
    return int(any_wrong)


@program("scaling.py")
def main(argv):
    return distributed.run_together(lambda world: run(argv, world), "scaling.py")


if __name__ == "__main__":
    sys.exit(main())
