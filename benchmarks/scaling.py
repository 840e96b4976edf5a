"""Time how a training step scales over the GPUs of a host, compared with DistributedDataParallel and FSDP2.

    torchrun --standalone --nproc_per_node=2 -m benchmarks.scaling
    torchrun --standalone --nproc_per_node=4 -m benchmarks.scaling --sizes large
    torchrun --standalone --nproc_per_node=2 -m benchmarks.scaling --tiny     a model of seconds, also on a CPU

The program measures the model of tiny_llama_v3.py in three sizes, in bf16: our kernels with the sharded optimizer,
eager and as one captured graph, and DistributedDataParallel and FSDP2 on the compiled PyTorch model. With weak scaling
each process has the batch of a single one, with strong scaling the batch is divided. Before a row is timed, the losses
of its first steps are compared with those of one process that has the batches of all.

Exit codes: 0 done, 1 the losses of a row are wrong, 2 the request cannot be met, 130 interrupted.
"""

import dataclasses
import functools
import statistics
import sys

if not __package__:
    print("run it from the root as python -m benchmarks.scaling", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from benchmarks import harness
from measure.command_line import positive, program
from measure.results import Unavailable, describe
from measure.timing import compile_apart, in_turns, percentiles
from measure.work import SIZES
from tiny_llama import distributed, profiler

ROWS = {  # flags of tiny_llama_v3.py
    "triton graph": dict(impl="triton", graph=True),
    "triton": dict(impl="triton"),
    "DDP": dict(impl="sdpa", compile=True),
    "FSDP2": dict(impl="sdpa", compile=True, shard="full"),
}
SCALED = ("small", "medium", "large")
MODES = ("weak", "strong")
# At 3e-4 the large model overshoots in its first steps, and the rounding of bf16 makes correct runs diverge.
LEARNING_RATE = 3e-5
GATE_STEPS = 5  # on one batch, so that the fall of the loss depends on the gradients of all processes
GATE_TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 2e-2}  # as a share of that fall
ALONE = distributed.World()


class Contender(harness.Contender):
    """A training step of a world; .losses are the mean losses of its first steps."""

    def __init__(self, build, device, world, graph, steps):
        self.world = world
        super().__init__(build, device, graph, steps, warmup=GATE_STEPS)
        self.losses = world.mean(self.losses)

    def window(self, steps=None):
        """Return the ms of a step on the slowest process."""
        self.world.gather(None)  # so that all begin together
        return max(self.world.gather(super().window(steps)))


def make_step(config, device, world):
    """Return the training step of a llama.Config in a world, with a batch."""
    obstacle = llama.triton_obstacle(device, config.use_amp) if config.impl == "triton" else None
    if obstacle:
        raise Unavailable(obstacle)
    step = llama.TrainStep(config, device, world if world.size > 1 else None)
    if config.compile and world.size == 1:  # which would else reuse what was compiled for several processes
        step.run_model = compile_apart(step.model)
    step.load(*next(step.world.batches(config)))
    return step


def require_losses(losses, expected, precision):
    """Raise ArithmeticError if the losses do not fall as expected."""
    allowed = GATE_TOLERANCE[precision] * (max(expected) - min(expected))
    # One by one, as max() passes over NaN.
    if not all(abs(ours - theirs) <= allowed for ours, theirs in zip(losses, expected, strict=True)):
        raise ArithmeticError(f"wrong losses: {losses} instead of {expected}, allowed are {allowed:.1e}")


class Run(harness.WorldRun):
    """A run that builds and times the contenders of all processes."""

    def __init__(self, world, argv, options, device):
        super().__init__(world, "scaling", argv, options, device, sizes={})
        self.alone_ms = {}  # {Config: ms of a step of one process}, measured once for weak and strong, DDP and FSDP2

    def is_late(self):
        return any(self.world.gather(super().is_late()))

    def build(self, config, world=ALONE):
        """Return a Contender on each process; if it cannot be built on one, raise Unavailable on all.

        If a process fails within a collective, the others wait for it until the timeout of World.join() ends all.
        """
        contender = error = None
        make = functools.partial(make_step, config, self.device, world)
        try:
            contender = Contender(make, self.device, world, config.graph, self.options.steps)
        except Exception as exception:  # the other rows can still be measured
            error = describe(exception)
        errors = [text for text in self.world.gather(error) if text]
        if errors:
            raise Unavailable(errors[0])
        return contender

    def alone(self, contender):
        """Time a window of the first process, while the others wait."""
        self.world.gather(None)
        return self.world.gather(contender.window() if self.world.rank == 0 else None)[0]

    def waiting_ms(self, contender, ms):
        """Return how long the processes wait for messages in a step: {"waiting least": ..., "waiting most": ...}.

        Those that compute faster also wait for the others. Empty where it is not known.
        """
        counts = profiler.count_kernels(contender.step, ms)  # on a CPU the text of a reason
        exposed = self.world.gather(counts["exposed_communication_ms"] if isinstance(counts, dict) else None)
        return {} if None in exposed else {"waiting least": min(exposed), "waiting most": max(exposed)}

    def time(self, contender, config, factor):
        """Return the fields of a row: a contender of all processes, beside one process with factor times its batch."""
        # The same work in one process: all of the batch that strong scaling divides.
        single = dataclasses.replace(config, shard=None, batch_size=factor * config.batch_size)
        # Both in turns, so that they see the same state of the machine.
        functions = {"exchanging": contender.window}
        if single not in self.alone_ms:
            functions["alone"] = functools.partial(self.alone, self.build(single))
        windows = dict(zip(functions, in_turns(list(functions.values()), self.options.windows), strict=True))
        ms = percentiles(windows["exchanging"])
        exchanging_ms = ms.pop("median")
        if "alone" in windows:
            self.alone_ms[single] = statistics.median(windows["alone"])
        waiting = self.waiting_ms(contender, exchanging_ms)
        memory = self.world.gather(contender.results["peak_memory_mib"])
        return {
            "losses": contender.losses,
            "windows_ms": windows,
            "ms": {"alone": self.alone_ms[single], "exchanging": exchanging_ms, **ms, **waiting},
            "tokens_per_second": self.world.size * config.tokens_per_step / exchanging_ms * 1e3,
            "efficiency": self.alone_ms[single] / factor / exchanging_ms,
            "peak_memory_mib": max(memory) if all(memory) else None,
        }

    def record(self, rows, name, measure):
        """Put the fields that measure() returns, or why there are none, into rows, print a line and save."""
        # Any other error would leave the processes at different places.
        row = self.attempt(lambda: self.require_time() or measure(), (Unavailable, ArithmeticError))
        rows[name] = row
        line = row["error"]
        if not line:
            times = ", ".join(f"{key} {value:.3f}" for key, value in row["ms"].items())
            line = f"{row['efficiency']:6.1%}, ms a step: {times}"
        print(f"    {name:12} {line}", flush=True)
        self.save()
        harness.release_all(self.device)


def measure_mode(run, mode, config, result):
    """Fill the result of one size with weak or strong scaling, in which the batch of one process is divided."""
    factor = run.world.size if mode == "strong" else 1
    if config.batch_size % factor:
        print(f"    {config.batch_size} sequences cannot be divided among {factor} processes", flush=True)
        return
    config = dataclasses.replace(config, batch_size=config.batch_size // factor)
    result[mode] = measured = {"batch_size": config.batch_size, "rows": {}}

    def measure(name):
        if "expected_losses" not in measured:
            # Those of one process at the batch of all, on plain PyTorch; computed on each process.
            whole = dataclasses.replace(config, impl="sdpa", batch_size=run.world.size * config.batch_size)
            measured["expected_losses"] = run.build(whole).losses
            harness.release_all(run.device)
        own = dataclasses.replace(config, **ROWS[name])
        own = dataclasses.replace(own, compile=own.compile and run.on_gpu)
        contender = run.build(own, run.world)
        require_losses(contender.losses, measured["expected_losses"], llama.precision_name(own, run.device))
        return run.time(contender, own, factor)

    for name in ROWS:
        if name in run.options.rows:
            run.record(measured["rows"], name, functools.partial(measure, name))


def measure_sizes(run):
    """Fill the result, weak scaling of all sizes first."""
    for mode in run.options.modes:
        for name in ["tiny"] if run.options.tiny else run.options.sizes:
            print(f"\n{name}, {mode}", flush=True)
            config = llama.Config(**SIZES[name], use_amp=run.on_gpu, learning_rate=LEARNING_RATE)
            size = run.result["sizes"].setdefault(name, {"config": dataclasses.asdict(config)})
            size["precision"] = llama.precision_name(config, run.device)
            measure_mode(run, mode, config, size)


def parse(argv):
    parser = harness.make_parser("scaling", __doc__, seconds=400)
    parser.add_argument("--sizes", nargs="+", choices=SCALED, default=SCALED, help="what to measure (default: all)")
    parser.add_argument("--tiny", action="store_true", help="instead of each a model that takes seconds, also on a CPU")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="(default: all)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="of scaling (default: both)")
    parser.add_argument("--windows", type=positive, default=7, metavar="N", help="of each row (default: 7)")
    parser.add_argument("--steps", type=positive, metavar="N", help="in a window (default: 0.25 s of them)")
    return parser.parse_args(argv)


def measure(argv, world):
    options = parse(argv)
    if world.size == 1:
        command = "torchrun --standalone --nproc_per_node=2 -m benchmarks.scaling"
        raise llama.UsageError(f"one process has nothing to exchange: start several, such as with {command}")
    device = world.select_device("auto")
    if not (device.type == "cuda" or options.tiny):
        raise llama.UsageError("the models that are measured need GPUs, and there is none: use --tiny")
    run = Run(world, argv, options, device)
    world.join(device, llama.Config().comm_timeout)
    measure_sizes(run)
    return run.finish()


@program("scaling.py")
def main(argv):
    return distributed.run_together(lambda world: measure(argv, world), "scaling.py")


if __name__ == "__main__":
    sys.exit(main())
