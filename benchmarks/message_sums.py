"""Compute how accurate sums of gradients are that processes add in bf16 and in fp32, and time NCCL's sums.

    python -m benchmarks.message_sums                                             by simulation, also on a CPU
    torchrun --standalone --nproc_per_node=2 -m benchmarks.message_sums           and as NCCL adds on these GPUs

In a ring each partial sum goes from process to process: each adds its own gradient, and rounds the sum to the type of
the message. The gradients of all processes are bf16, as with --use-amp, and the exact sum is theirs in fp64. They are
normal numbers of mean 0, as where batches disagree, or of mean and deviation 1. README.md in this folder explains the
result.

Exit codes: 0 done, 2 the request cannot be met, 130 interrupted.
"""

import functools
import statistics
import sys

import torch
import torch.distributed as dist

if not __package__:
    print("run it from the root as python -m benchmarks.message_sums", file=sys.stderr)
    sys.exit(2)

from benchmarks import harness
from measure.command_line import positive, program
from measure.device import synchronize
from measure.timing import in_turns, window_ms
from tiny_llama import distributed

RINGS = 4, 64  # processes that are simulated
MEANS = 0.0, 1.0  # of gradients of deviation 1
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # of the messages
ELEMENTS = 2**18  # of a gradient whose sum is compared
TIMED = 2**27  # of one that is timed: 256 MiB in bf16
STEPS = 10  # in a window


def gradient(rank, mean, device):
    """Return the gradient of a process, bf16 (ELEMENTS,)."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(ELEMENTS, generator=generator) + mean).bfloat16().to(device)


def exact_sum(processes, mean, device):
    """Return the sum of the processes' gradients, fp64 (ELEMENTS,)."""
    return sum(gradient(rank, mean, device).double() for rank in range(processes))


def ring_sum(processes, mean, dtype, device):
    """Return the sum as a ring adds it in messages of dtype: in the order of the ranks, and rounded after each."""
    partial = gradient(0, mean, device).to(dtype)
    for rank in range(1, processes):
        # Both parts have fewer bits than fp32, which adds them and rounds; then the message rounds.
        partial = (partial.float() + gradient(rank, mean, device).float()).to(dtype)
    return partial


def nccl_sum(mean, dtype, device):
    """Return the sum of this world's processes by an all-reduce, dtype (ELEMENTS,)."""
    total = gradient(dist.get_rank(), mean, device).to(dtype)
    dist.all_reduce(total)
    return total


def errors(total, exact):
    """Return the error of a sum, root of its mean square, and its bias, both divided by those of the exact sum."""
    difference = total.double() - exact
    rms = (difference.square().mean() / exact.square().mean()).sqrt()
    return {"relative_error": rms.item(), "relative_bias": (difference.mean() / exact.abs().mean()).item()}


def compare(run, how, processes, add):
    """Put the errors of the sums that add(mean, dtype, device) returns into the result, for each mean and type."""
    for mean in MEANS:
        exact = exact_sum(processes, mean, run.device)
        for name, dtype in TYPES.items():
            fields = {"how": how, "processes": processes, "mean": mean, "message": name}
            row = fields | errors(add(mean, dtype, run.device), exact)
            run.result["sums"].append(row)
            print(
                f"{how:10} {processes:3} processes, mean {mean:g}, {name}: error {row['relative_error']:.1e}, bias "
                f"{row['relative_bias']:+.1e}",
                flush=True,
            )


def time_messages(run, windows):
    """Put the ms of an all-reduce of TIMED elements in each type into the result."""
    tensors = {name: torch.zeros(TIMED, dtype=dtype, device=run.device) for name, dtype in TYPES.items()}
    calls = [functools.partial(dist.all_reduce, tensor) for tensor in tensors.values()]
    timed = [functools.partial(window_ms, call, STEPS, run.device) for call in calls]
    in_turns(timed, harness.UNCOUNTED)
    for name, values in zip(TYPES, in_turns(timed, windows), strict=True):
        run.result["ms"][name] = statistics.median(values)
        print(f"all-reduce of {TIMED:,} elements in {name}: {run.result['ms'][name]:.3f} ms", flush=True)


def parse(argv):
    parser = harness.make_parser("message_sums", __doc__)
    parser.add_argument("--windows", type=positive, default=7, metavar="N", help="of each message (default: 7)")
    return parser.parse_args(argv)


def measure(argv, world):
    options, device = parse(argv), world.select_device("auto")
    run = harness.WorldRun(world, "message_sums", argv, options, device, sums=[], ms={})
    if world.rank == 0:
        for processes in RINGS:
            compare(run, "ring", processes, functools.partial(ring_sum, processes))
    if world.size > 1:
        world.join(device, timeout=300)
        compare(run, world.backend, world.size, nccl_sum)
        if run.on_gpu:
            time_messages(run, options.windows)
        synchronize(device)
    return run.finish()


@program("message_sums.py")
def main(argv):
    return distributed.run_together(lambda world: measure(argv, world), "message_sums.py")


if __name__ == "__main__":
    sys.exit(main())
