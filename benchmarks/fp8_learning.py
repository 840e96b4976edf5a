"""Train with --fp8 and in bf16, from the same weights on the same batches, and record losses and times.

    python -m benchmarks.fp8_learning                                  medium and large, two data sets, three seeds
    python -m benchmarks.fp8_learning --sizes large --data text --seeds 1 --num-steps 1000
    python -m benchmarks.fp8_learning --tiny                           a model that takes seconds, also on a CPU

The runs follow each other in one process, and the result is saved after each of them. The data "text" are the sources
of Python's standard library without its tests, or the file of --text; its last tenth is held out.

Exit codes: 0 done, 2 the request cannot be met, 130 interrupted.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import sys
import sysconfig
import tempfile
import time
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
from tiny_llama import data, fp8

LEARNING_RATES = {"small": 3e-4, "medium": 3e-4, "large": 2e-4, "tiny": 3e-4}
DATA, PRECISIONS = ("text", "markov"), ("bf16", "fp8")
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


def write_text(source, path):
    """Copy the file source, or the library_text(), to path. Return what identifies it."""
    try:
        text = source.read_bytes() if source else library_text()
    except OSError as error:
        raise llama.UsageError(f"--text {source} cannot be read ({error.strerror}): give a text file") from error
    path.write_bytes(text)
    return {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}


# ----------------------------------------------------------------------------------------------------------------------
# A run


def train(config, device):
    """Return losses, final_loss, held_out_loss and ms of a run, and an error if a loss that is not finite ended it."""
    step, records = llama.TrainStep(config, device), []
    with contextlib.redirect_stdout(None):  # a line for each of thousands of steps
        llama.warm_up(step)
        llama.train(step, step.batches(config.seed), records)
    # A run that diverges has records up to the loss that is not finite.
    losses = [round(record.loss, 5) for record in records]
    run = {"final_loss": None, "held_out_loss": None, "losses": losses}
    run["ms"] = percentiles([record.batch_ms for record in records])
    if not math.isfinite(losses[-1]):
        return run | {"error": f"diverged: the loss of step {len(losses)} is {losses[-1]}"}
    held_out_loss = None if config.data == "markov" else data.held_out_loss(step)
    return run | {"final_loss": smoothed(losses)[-1], "held_out_loss": held_out_loss}


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def parse(argv):
    parser = make_parser("fp8_learning", __doc__, seconds=3600)
    sizes = ["medium", "large"]
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=sizes, help="(default: medium large)")
    parser.add_argument("--tiny", action="store_true", help="instead a model that takes seconds; the only one on a CPU")
    parser.add_argument("--data", nargs="+", choices=DATA, default=DATA, help="(default: both)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="(default: the sources of Python's library)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="N", help="(default: 1 2 3)")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="(default: both)")
    parser.add_argument("--num-steps", type=positive, metavar="N", help="of each run (default: 2000, with --tiny 20)")
    parser.add_argument("--learning-rate", type=float, metavar="X", help=f"(default: {LEARNING_RATES})")
    options = parser.parse_args(argv)
    if options.tiny:
        options.sizes = ["tiny"]
    return options


def configurations(options, device, text):
    """Return [(the fields that identify a run, its Config)], seed by seed; UsageError for what cannot be run."""
    on_gpu, runs = device.type == "cuda", []
    # Seeds first: if the time limit ends it early, all sizes have some seeds, and not some sizes all of them.
    each = itertools.product(options.seeds, options.sizes, options.data, options.precisions)
    for seed, size, kind, precision in each:
        rate, is_text = options.learning_rate, kind == "text"
        config = llama.Config(
            **SIZES[size] | ({"vocab_size": 256} if is_text else {}),
            data=str(text) if is_text else kind,
            seed=seed,
            use_amp=True,
            fp8=precision == "fp8",
            num_steps=options.num_steps or (20 if options.tiny else 2000),
            learning_rate=LEARNING_RATES[size] if rate is None else rate,
            impl="triton" if on_gpu else "torch",
            graph=on_gpu,
            timing="step",
        )
        llama.validate_on_device(config, device)
        identity = {"size": size, "data": kind, "seed": seed, "precision": precision}
        shown = dataclasses.asdict(config) | {"data": kind}  # instead of a path
        runs.append((identity | {"config": shown}, config))
    return runs


@program("fp8_learning.py")
def main(argv):
    options, device = parse(argv), llama.select_device("auto")
    if device.type == "cpu" and not options.tiny:
        raise llama.UsageError(f"--sizes {' '.join(options.sizes)} needs a GPU, and the device is a CPU: use --tiny")
    if "fp8" in options.precisions and not fp8.formats_of(device.arch):
        raise llama.UsageError(f"--precisions fp8 needs a GPU with FP8, and this is {device.arch}: give bf16 alone")
    # A copy, so that all runs have the same text, whatever happens to the file meanwhile.
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "text")
        text = write_text(options.text, path) if "text" in options.data else None
        configs = configurations(options, device, path)
        run = Run("fp8_learning", argv, options, device, text=text, missing=[], runs=[])
        for identity, config in configs:
            label = "{size} {data} seed {seed} {precision}".format(**identity)
            if run.is_late():
                run.result["missing"].append(label)
                print(f"{label}: left out by --time-limit {options.time_limit:g}", flush=True)
                continue
            began = time.monotonic()
            made = identity | run.attempt(functools.partial(train, config, device))
            run.result["runs"].append(made | {"seconds": time.monotonic() - began})
            line = made["error"] or "{final_loss:.4f} nats, {ms[median]:.2f} ms a step".format(**made)
            print(f"{label}: {line}", flush=True)
            run.save()
            release_all(device)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
