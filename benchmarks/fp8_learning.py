"""Train with --fp8 and in bf16, from the same weights on the same batches, and record losses and times.

    python -m benchmarks.fp8_learning                                  medium and large, two data sets, three seeds
    python -m benchmarks.fp8_learning --sizes large --data text --seeds 1 --num-steps 1000
    python -m benchmarks.fp8_learning --tiny                           a model that takes seconds, also on a CPU

The runs follow each other in one process, and the result is saved after each of them. The data "text" are the sources
of Python's standard library without its tests.

Exit codes: 0 done, 2 the request cannot be met, 130 interrupted.
"""

import contextlib
import functools
import itertools
import math
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np

if not __package__:
    print("run it from the root as python -m benchmarks.fp8_learning", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from benchmarks.harness import Run, make_parser, release_all
from measure.command_line import positive, program
from measure.timing import percentiles
from measure.work import SIZES
from tiny_llama import fp8, hardware

DATA = ("text", "markov")
SMOOTHED = 50  # steps of a mean loss: the losses of single batches differ by more than those of the precisions do
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # folders of the standard library


def smoothed(losses):
    """Return the mean of the last SMOOTHED losses at each step that has so many; of all losses, if there are fewer."""
    return np.lib.stride_tricks.sliding_window_view(losses, min(SMOOTHED, len(losses))).mean(-1).tolist()


def library_text():
    """Return the sources of Python's standard library, as bytes, without its tests and what was installed beside it."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    return b"".join((root / path).read_bytes() for path in sorted(paths) if not LEFT_OUT & set(path.parts))


def config_of(options, on_gpu, text, seed, size, data, precision):
    """Return the Config of a run; the text is a file."""
    source = {"data": str(text), "vocab_size": 256} if data == "text" else {"data": data}
    return llama.Config(
        **SIZES[size] | source,
        seed=seed,
        use_amp=True,
        fp8=precision == "fp8",
        num_steps=options.num_steps or (20 if options.tiny else 2000),
        learning_rate=2e-4 if size == "large" else 3e-4,
        impl="triton" if on_gpu else "torch",
        graph=on_gpu,
        timing="step",
    )


def train(run, config):
    """Return losses, final_loss and ms of a training run, and an error if a loss that is not finite ended it."""
    run.require_time()
    step, records = llama.TrainStep(config, run.device), []
    with contextlib.redirect_stdout(None):  # a line for each of thousands of steps
        llama.warm_up(step)
        llama.train(step, step.batches(config.seed), records)
    # A run that diverges has records up to the loss that is not finite.
    losses = [round(record.loss, 5) for record in records]
    trained = {"losses": losses, "final_loss": smoothed(losses)[-1], "tflop": hardware.model_tflops(config)}
    trained["ms"] = percentiles([record.batch_ms for record in records])
    if not math.isfinite(losses[-1]):
        trained |= {"final_loss": None, "error": f"diverged: the loss of step {len(losses)} is {losses[-1]}"}
    return trained


def parse(argv):
    parser = make_parser("fp8_learning", __doc__, seconds=3600)
    sizes = ["medium", "large"]
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=sizes, help="(default: medium large)")
    parser.add_argument("--tiny", action="store_true", help="instead a model that takes seconds; the only one on a CPU")
    parser.add_argument("--data", nargs="+", choices=DATA, default=DATA, help="(default: both)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="N", help="(default: 1 2 3)")
    parser.add_argument("--num-steps", type=positive, metavar="N", help="of each run (default: 2000, with --tiny 20)")
    return parser.parse_args(argv)


@program("fp8_learning.py")
def main(argv):
    options, device = parse(argv), llama.select_device("auto")
    if device.type == "cpu" and not options.tiny:
        raise llama.UsageError(f"--sizes {' '.join(options.sizes)} needs a GPU, and the device is a CPU: use --tiny")
    if not fp8.formats_of(device.arch):
        raise llama.UsageError(f"FP8 needs a GPU that has it, and this is {device.arch}")
    sizes = ["tiny"] if options.tiny else options.sizes
    # Seeds first: if the time limit ends it early, all sizes have some seeds, and not some sizes all of them.
    runs = list(itertools.product(options.seeds, sizes, options.data, ("bf16", "fp8")))
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch, "text")
        text.write_bytes(library_text())
        configs = [config_of(options, device.type == "cuda", text, *each) for each in runs]
        run = Run("fp8_learning", argv, options, device, runs=[])
        for (seed, size, data, precision), config in zip(runs, configs, strict=True):
            made = {"size": size, "data": data, "seed": seed, "precision": precision}
            made |= run.attempt(functools.partial(train, run, config))
            run.result["runs"].append(made)
            line = made["error"] or "{final_loss:.4f} nats, {ms[median]:.2f} ms a step".format(**made)
            print(f"{size} {data} seed {seed} {precision}: {line}", flush=True)
            run.save()
            release_all(device)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
