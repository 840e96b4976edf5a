"""Train with --fp8 and in bf16, from the same weights on the same batches, and record losses and times.

    python -m benchmarks.fp8_learning                                  medium and large, two data sets, three seeds
    python -m benchmarks.fp8_learning --sizes large --data text --seeds 1 --num-steps 1000
    python -m benchmarks.fp8_learning --tiny                           a model that takes seconds, also on a CPU

The runs follow each other in one process, and the result is saved after each of them. The data "text" are the sources
of Python's standard library without its tests, or the file of --text; its last tenth is held out.

Exit codes: 0 done, 2 the request cannot be met, 130 interrupted.
"""

import dataclasses
import hashlib
import itertools
import math
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

if not __package__:
    print("run it from the root as python -m benchmarks.fp8_learning", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from benchmarks.steps import release_all
from measure.command_line import Parser, positive, program, time_limit
from measure.heartbeat import Heartbeat
from measure.results import RESULTS, ResultFile, describe, header
from measure.timing import percentiles
from measure.work import SIZES
from tiny_llama import data, fp8, hardware

LEARNING_RATES = {"small": 3e-4, "medium": 3e-4, "large": 2e-4, "tiny": 3e-4}
DATA, PRECISIONS = ("text", "markov"), ("bf16", "fp8")
SMOOTHED = 50  # steps of a mean loss: the losses of single batches differ by more than those of the precisions do
WINDOW_STEPS = 10
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # folders of the standard library


def smoothed(losses):
    """The mean of the last SMOOTHED losses at each step that has so many; of all losses, if there are fewer."""
    return np.lib.stride_tricks.sliding_window_view(losses, min(SMOOTHED, len(losses))).mean(-1).tolist()


def library_text():
    """The sources of Python's standard library, as bytes, without its tests and what was installed beside it."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    return b"".join((root / path).read_bytes() for path in sorted(paths) if not LEFT_OUT & set(path.parts))


def write_text(source, path):
    """Copies the file source, or the library_text(), to path. Returns what identifies it."""
    try:
        text = source.read_bytes() if source else library_text()
    except OSError as error:
        raise llama.UsageError(f"--text {source} cannot be read ({error.strerror}): give a text file") from error
    path.write_bytes(text)
    return {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}


# ----------------------------------------------------------------------------------------------------------------------
# A run


def window(step, batches, losses):
    """[ms a step by the device's clock, by the host's] of these batches; adds the losses, which stay on the device."""
    batches = [[t.to(step.tokens.device) for t in batch] for batch in batches]
    clock = llama.StepClock(step.device, unsynced=False)
    step.synchronize()
    start = time.perf_counter()
    clock.mark()
    for batch in batches:
        step.load(*batch)
        step.run()
        losses.append(step.loss.detach().clone())
    clock.mark()
    step.synchronize()
    return [clock.intervals()[0] / len(batches), (time.perf_counter() - start) * 1e3 / len(batches)]


def train(config, device):
    """The fields of a run: losses, final_loss, held_out_loss, ms, wall_ms, error. A loss that is not finite ends it."""
    step, losses, windows = llama.TrainStep(config, device), [], []
    llama.warm_up(step)
    batches = itertools.islice(step.batches(config.seed), config.num_steps)
    while (some := list(itertools.islice(batches, WINDOW_STEPS))) and (not losses or losses[-1].isfinite()):
        windows.append(window(step, some, losses))
    losses = [round(loss, 5) for loss in torch.stack(losses).tolist()]
    ms, wall_ms = (percentiles(column) for column in zip(*windows, strict=True))
    run = {"error": None, "final_loss": None, "held_out_loss": None, "ms": ms, "wall_ms": wall_ms, "losses": losses}
    wrong = next((number for number, loss in enumerate(losses, 1) if not math.isfinite(loss)), None)
    if wrong:
        return run | {"losses": losses[:wrong], "error": f"diverged: the loss of step {wrong} is {losses[wrong - 1]}"}
    held_out_loss = None if config.data == "markov" else data.held_out_loss(step)
    return run | {"final_loss": smoothed(losses)[-1], "held_out_loss": held_out_loss}


def expected_seconds(runs, wanted):
    """What a run will take by those done: of its size and precision, else of its size, else of all; 0 without any."""
    runs = [run for run in runs if not run["error"]]
    same_size = [run for run in runs if run["size"] == wanted["size"]]
    alike = [run for run in same_size if run["precision"] == wanted["precision"]] or same_size or runs
    return max((run["seconds"] / run["tflop"] for run in alike), default=0.0) * wanted["tflop"]


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def parse(argv):
    parser = Parser("fp8_learning.py", __doc__)
    sizes = ["medium", "large"]
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=sizes, help="(default: medium large)")
    parser.add_argument("--tiny", action="store_true", help="instead a model that takes seconds; the only one on a CPU")
    parser.add_argument("--data", nargs="+", choices=DATA, default=DATA, help="(default: both)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="(default: the sources of Python's library)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="N", help="(default: 1 2 3)")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="(default: both)")
    parser.add_argument("--num-steps", type=positive, metavar="N", help="of each run (default: 2000, with --tiny 20)")
    parser.add_argument("--learning-rate", type=float, metavar="X", help=f"(default: {LEARNING_RATES})")
    help = "no run starts that would end later (default: 3600)"
    parser.add_argument("--time-limit", type=time_limit, default=3600, metavar="SECONDS", help=help)
    parser.add_argument("--output-dir", default=str(RESULTS), metavar="DIR", help="(default: benchmarks/results)")
    options = parser.parse_args(argv)
    if options.tiny:
        options.sizes = ["tiny"]
    return options


def configurations(options, device, text):
    """[(the fields that identify a run, its Config)], one seed after another; UsageError for what cannot be run."""
    on_gpu, runs = device.type == "cuda", []
    for seed, size, kind, precision in itertools.product(
        options.seeds, options.sizes, options.data, options.precisions
    ):
        config = llama.Config(
            **SIZES[size] | ({"vocab_size": 256} if kind == "text" else {}),
            data=str(text) if kind == "text" else kind, seed=seed,
            use_amp=True, fp8=precision == "fp8",
            num_steps=options.num_steps or (20 if options.tiny else 2000),
            learning_rate=LEARNING_RATES[size] if options.learning_rate is None else options.learning_rate,
            impl="triton" if on_gpu else "torch", graph=on_gpu, timing="step",
        )  # fmt: skip
        llama.validate_on_device(config, device)
        identity = {"size": size, "data": kind, "seed": seed, "precision": precision}
        shown = dataclasses.asdict(config) | {"data": kind}  # instead of a path
        runs.append((identity | {"config": shown, "tflop": hardware.model_tflops(config) * config.num_steps}, config))
    return runs


@program("fp8_learning.py")
def main(argv):
    start, options, device = time.monotonic(), parse(argv), llama.select_device("auto")
    if device.type == "cpu" and not options.tiny:
        raise llama.UsageError(f"--sizes {' '.join(options.sizes)} needs a GPU, and the device is a CPU: use --tiny")
    if "fp8" in options.precisions and not fp8.formats_of(device.arch):
        raise llama.UsageError(f"--precisions fp8 needs a GPU with FP8, and this is {device.arch}: give bf16 alone")
    folder = llama.writable_folder("--output-dir", options.output_dir)
    result = header("fp8_learning", device, argv) | {"text": None, "missing": [], "runs": []}
    file = ResultFile(folder, result)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "text")
        result["text"] = write_text(options.text, path) if "text" in options.data else None
        for identity, config in configurations(options, device, path):
            label, began = "{size} {data} seed {seed} {precision}".format(**identity), time.monotonic()
            if began + expected_seconds(result["runs"], identity) > start + options.time_limit:
                result["missing"].append(label)
                print(f"{label}: left out by --time-limit {options.time_limit:g}", flush=True)
            else:
                try:
                    with Heartbeat(label):
                        run = identity | train(config, device)
                except Exception as error:  # the other runs can still be made
                    run = identity | {"error": describe(error)}
                result["runs"].append(run | {"seconds": time.monotonic() - began})
                print(f"{label}: {run['error'] or '{final_loss:.4f} nats, {ms[median]:.2f} ms a step'.format(**run)}")
                release_all(device)
            file.save(result)
    print(f"\nResults: {file.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
