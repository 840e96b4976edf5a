"""Time how a step of nanogpt_triton's GPT-2 (124 million weights, bf16) scales over the GPUs of a host.

    torchrun --standalone --nproc_per_node=4 -m benchmarks.scaling
    torchrun --standalone --nproc_per_node=2 -m benchmarks.scaling --tiny    a small model, to see that it works

Every GPU has the same batch of 12 x 1024 tokens. A step of one process alone, of all side by side without a word to
each other, and of all with the exchange of gradients are timed in turns.

Exit codes: 0 done, 2 the request cannot be met, 130 interrupted.
"""

import gc
import os
import statistics
import sys
import time

import torch

import tiny_llama_v3 as llama
from benchmarks.gpt import Contender, Row, make_parser, prepare
from measure.results import ResultFile, describe, header
from tiny_llama_v3 import exit_code_of


def measure_scaling(options, config, batch, world, deadline, rows, save):
    """Fills rows: a step of the master alone, of all without exchange, and of all with it."""
    layer_norm = "triton" if world.device.type == "cuda" else "torch"
    for name, compiled in {"eager": False, "compile": True}.items():
        rows[name] = {"error": None}
        if world.any(time.monotonic() > deadline):
            rows[name]["error"] = "left out by --time-limit"
            continue
        row = Row(layer_norm, compile=compiled)
        try:
            single = Contender(row, config, batch, world.device)
            single.window(options.steps)
            exchanging = Contender(row, config, batch, world.device, world)
            exchanging.window(options.steps)
        except Exception as error:  # compilation fails everywhere alike
            rows[name]["error"] = describe(error)
            continue
        windows = {"alone": [], "side by side": [], "exchanging": []}
        for _ in range(options.windows):
            world.mean(torch.zeros(()))  # a barrier that keeps no GPU busy
            if world.is_master:
                windows["alone"].append(single.window(options.steps))
            world.mean(torch.zeros(()))
            windows["side by side"].append(single.window(options.steps))
            world.mean(torch.zeros(()))
            windows["exchanging"].append(exchanging.window(options.steps))
        world.mean(torch.zeros(()))
        if world.is_master:
            ms = {mode: statistics.median(values) for mode, values in windows.items()}
            efficiency = ms["alone"] / ms["exchanging"]
            tokens = batch[0].numel() * world.size / ms["exchanging"] * 1e3
            rows[name] |= {"windows_ms": windows, "ms": ms, "efficiency": efficiency, "tokens_per_second": tokens}
            columns = ", ".join(f"{mode} {value:.2f} ms" for mode, value in ms.items())
            print(
                f"{name:10} {columns}: {100 * efficiency:.1f} % of {world.size} times one, {tokens:,.0f} tokens/s",
                flush=True,
            )
            save()
        del single, exchanging
        gc.collect()


def run(argv):
    start = time.monotonic()
    options = make_parser("scaling.py", __doc__).parse_args(argv)
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        command = "torchrun --standalone --nproc_per_node=4 -m benchmarks.scaling"
        raise llama.UsageError(f"one process has nothing to exchange: start several, such as with {command}")
    folder = llama.writable_folder("--output-dir", options.output_dir)
    world, described, config, batch = prepare(options)
    device = llama.get_device(world.device.type)
    result = header("scaling", device, argv) | described | {"rows": {}}
    launcher = f"torchrun --standalone --nproc_per_node={world.size}"
    result["command"] = f"{launcher} {result['command'].removeprefix('python ')}"
    file = ResultFile(folder, result)
    if world.is_master:
        print(f"{device.name} ({device.arch}), PyTorch {torch.__version__}, {world.size} processes", flush=True)
    deadline = start + options.time_limit
    measure_scaling(options, config, batch, world, deadline, result["rows"], lambda: file.save(result))
    if world.is_master:
        file.save(result)
        print(f"\nResults: {file.path}")
    world.close()
    return 0


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    return exit_code_of(lambda: run(argv), "scaling.py")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    if code and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        os._exit(code)  # the others wait for this process: no tear-down that waits for them
    sys.exit(code)
