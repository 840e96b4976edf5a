"""Find the longest sequence whose training step fits into a card's memory, with our kernels and with others.

    python -m benchmarks.longest                              in 24 and 80 GiB, on one card that has more
    python -m benchmarks.longest --memory 16 --rows triton    in 16 GiB, with our kernels alone

The model is that of SmolLM-135M, trained with one sequence a step, in bf16. PyTorch's allocator is limited to the
memory of the smaller card less 1 GiB, which the driver takes. A length fits if two steps do, as the first one makes the
gradients and the moments. Lengths are multiples of 1,024. README.md in this folder explains the result.

Exit codes: 0 done, 2 the request cannot be met, 130 interrupted.
"""

import functools
import sys

import torch

if not __package__:
    print("run it from the root as python -m benchmarks.longest", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from benchmarks import harness
from benchmarks.steps import OURS, Row, make_step, rows_of
from measure.command_line import positive, program
from measure.device import synchronize
from measure.results import Unavailable, versions
from measure.work import SHAPES

MODEL = "SmolLM-135M"
ROWS = [OURS, "sdpa compile", "sdpa", "hf"]
MEMORY = [24, 80]  # GiB
DRIVER = 2**30  # bytes, of the context, the libraries' code and what they take for themselves
UNIT = 1024  # tokens
GUESSED_FROM = 4, 8  # units


def longest(fits, guess):
    """Return the largest number for which fits(number) is true; what is larger than one that does not fit does not.

    It begins at a guess, moves away from it in growing steps, and halves what is left. 0 if not even 1 fits.
    """
    low, high, step, number = 0, None, max(1, guess // 32), guess
    while high is None or high - low > 1:
        if fits(number):
            low = number
        else:
            high = number
        if high is None:
            number += step
        elif low == 0 and number > step:
            number -= step
        else:
            number = (low + high) // 2
        step *= 2
    return low


def peak_memory(row, units, device):
    """Return what PyTorch's allocator reserves for steps of a Row, in bytes at most; None if it cannot."""
    shape = SHAPES[MODEL] | dict(batch_size=1, seq_len=units * UNIT)
    torch.cuda.reset_peak_memory_stats()
    try:
        step = make_step(row, llama.Config(**shape, use_amp=True), device)
        for _ in range(2):
            step.run()
        synchronize(device)
        return torch.cuda.max_memory_reserved()
    except torch.OutOfMemoryError:
        return None


def measure(row, gibibytes, device, peaks, guess=None):
    """Return the fields of a Row in a memory of so many GiB.

    peaks: {units: bytes} that is known of it, which grows; guess: the units that are tried first, or None for a guess
    from two short lengths.
    """
    limit, total = gibibytes * 2**30 - DRIVER, torch.cuda.get_device_properties(device).total_memory
    if limit > total:
        raise Unavailable(f"needs a card of {gibibytes} GiB")
    torch.cuda.set_per_process_memory_fraction(limit / total)

    def fits(units):
        if peaks.get(units, limit + 1) > limit:  # unknown, or more than it would have to be
            peak = peak_memory(row, units, device)
            harness.release_all(device)
            print(f"    {row.name}: {units * UNIT:,} tokens {'do not fit' if peak is None else 'fit'}", flush=True)
            if peak is None:
                return False
            peaks[units] = peak
        return True

    # Memory grows linearly with the length where attention keeps no matrix: two short ones tell about where it ends.
    first, second = GUESSED_FROM
    if not guess and fits(first) and fits(second):
        guess = second + int((limit - peaks[second]) / ((peaks[second] - peaks[first]) / (second - first)))
    most = longest(fits, guess or first)
    return {"tokens": most * UNIT, "reserved_mib": peaks[most] / 2**20 if most else None}


def parse(argv):
    parser = harness.make_parser("longest", __doc__)
    parser.add_argument("--memory", nargs="+", type=positive, default=MEMORY, metavar="GIB", help="(default: 24 80)")
    parser.add_argument("--rows", nargs="+", type=rows_of, default=[ROWS], metavar="ROW", help="as in benchmarks.steps")
    parser.add_argument(
        "--guess", type=positive, metavar="TOKENS", help="what is tried first; a peer compiles for each that is tried"
    )
    return parser.parse_args(argv)


@program("longest.py")
def main(argv):
    options, device = parse(argv), llama.select_device("auto")
    if device.type == "cpu":
        raise llama.UsageError("the memory of a GPU is measured, and the device is a CPU: use a machine with a GPU")
    torch.set_float32_matmul_precision("highest")
    shape = SHAPES[MODEL] | {"batch_size": 1}
    fields = dict(peers=versions("transformers"), model=MODEL, shape=shape)
    run = harness.Run("longest", argv, options, device, **fields)
    guess = options.guess and -(-options.guess // UNIT)
    run.result["memory"] = {str(gibibytes): {} for gibibytes in options.memory}
    for row in map(Row.named, sum(options.rows, [])):
        peaks = {}
        for gibibytes in options.memory:
            outcome = run.attempt(functools.partial(measure, row, gibibytes, device, peaks, guess))
            run.result["memory"][str(gibibytes)][row.name] = row._asdict() | outcome
            print(f"{gibibytes} GiB {row.name:18} {outcome['error'] or format(outcome['tokens'], ',')}", flush=True)
            run.save()
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
