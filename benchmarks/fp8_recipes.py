"""Compare recipes for FP8 by the errors of the gradients that they lead to, in plain PyTorch, on any device.

    python -m benchmarks.fp8_recipes                   small, medium and large
    python -m benchmarks.fp8_recipes --sizes small

Loss and gradients of the first batch of a text, at the initial weights, are compared with those in fp32. Each recipe
differs from --fp8 in one thing. The products are emulated, so that their speed says nothing.

Exit codes: 0 done, 2 the request cannot be met, 130 interrupted.
"""

import contextlib
import dataclasses
import functools
import sys
import tempfile
from pathlib import Path
from statistics import median
from unittest import mock

import torch

if not __package__:
    print("run it from the root as python -m benchmarks.fp8_recipes", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from benchmarks.fp8_learning import write_text
from benchmarks.steps import release_all
from measure.command_line import Parser, program
from measure.heartbeat import Heartbeat
from measure.results import RESULTS, ResultFile, header
from measure.work import SIZES
from tiny_llama import fp8


def rounded(find_scale, x, dtype):
    """As fp8.rounded(), divided by find_scale(magnitudes, largest number of dtype); what is too large is cut off."""
    values, largest = x.float(), torch.finfo(dtype).max
    scale = find_scale(values.abs(), largest)
    return (values / scale).clamp(-largest, largest).to(dtype).float().mul(scale).to(x.dtype)


def row_scale(magnitudes, largest):
    return magnitudes.amax(-1, keepdim=True).clamp(min=1e-30) / largest


class InnerLayersStep(llama.TrainStep):
    """Multiplies in bf16 in the first and in the last layer."""

    def __init__(self, config, device):
        super().__init__(config, device)
        for layer in (self.model.layers[0], self.model.layers[-1]):
            layer.attention.operations = layer.feed_forward.operations = llama.OPERATIONS["torch"]


E4M3, E5M2 = fp8.OCP
SCALES = {
    "a scale a row": row_scale,
    "a scale that is no power of two": lambda magnitudes, largest: magnitudes.amax() / largest,
    "half the scale": lambda magnitudes, largest: fp8.scale_of(magnitudes.amax(), largest) / 2,
    "no scale": lambda magnitudes, largest: 1.0,
}
RECIPES = {  # what they replace in tiny_llama.fp8
    "--fp8": {},
    "e4m3 gradients": {"formats_of": lambda arch: fp8.Formats(E4M3, E4M3)},
    "e5m2 inputs and weights": {"formats_of": lambda arch: fp8.Formats(E5M2, E5M2)},
    **{name: {"rounded": functools.partial(rounded, scale)} for name, scale in SCALES.items()},
    "first and last layer in bf16": {},
    "bf16": {},
}


def errors_of(recipe, config, device, batch, exact):
    """{"loss", and of all gradients "median", "worst"}: errors relative to the norms of the exact ones."""
    config = dataclasses.replace(config, fp8=recipe != "bf16")
    step_class = InnerLayersStep if recipe.startswith("first") else llama.TrainStep
    replaced = RECIPES[recipe]
    with mock.patch.multiple(fp8, **replaced) if replaced else contextlib.nullcontext():
        results = llama.loss_and_gradients(config, device, batch, step_class=step_class)
    errors = llama.relative_errors(results, exact)
    loss = errors.pop("loss")
    return {"loss": loss, "median": median(errors.values()), "worst": max(errors.values())}


def compare(config, device):
    """{recipe: its errors_of()} with the first sequences of the first batch."""
    config = dataclasses.replace(config, batch_size=min(config.batch_size, llama.CHECK_BATCH))
    batch = next(llama.batches(config))
    exact = llama.exact_loss_and_gradients(config, device, batch)
    found = {}
    for recipe in RECIPES:
        found[recipe] = errors_of(recipe, config, device, batch, exact)
        print(f"    {recipe:32} {found[recipe]['median']:8.4f} {found[recipe]['worst']:8.4f}", flush=True)
        release_all(device)
    return found


def parse(argv):
    parser = Parser("fp8_recipes.py", __doc__)
    sizes = ["small", "medium", "large"]
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=sizes, help="(default: small medium large)")
    parser.add_argument("--output-dir", default=str(RESULTS), metavar="DIR", help="(default: benchmarks/results)")
    return parser.parse_args(argv)


@program("fp8_recipes.py")
def main(argv):
    options, device = parse(argv), llama.select_device("auto")
    folder = llama.writable_folder("--output-dir", options.output_dir)
    result = header("fp8_recipes", device, argv) | {"sizes": {}}
    file = ResultFile(folder, result)
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch, "text")
        result["text"] = write_text(None, text)
        for size in options.sizes:
            print(f"{size}: error of the gradients, the median and the worst")
            config = llama.Config(**SIZES[size] | {"vocab_size": 256}, data=str(text), impl="torch", use_amp=True)
            with Heartbeat(f"comparing {size}"):
                result["sizes"][size] = compare(config, device)
            file.save(result)
    print(f"\nResults: {file.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
