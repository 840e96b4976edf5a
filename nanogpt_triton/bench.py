#!/usr/bin/env python3
"""Time the training step of GPT-2 with 124 million weights: 10 iterations, then 20 that are timed.

    python bench.py                                              batches of data/openwebtext
    python bench.py --real_data=False --layer_norm=torch         random tokens, PyTorch's LayerNorm
    python bench.py --real_data=False --profile=True             a trace in bench_log/

It takes the keys of train.py as well. `python -m benchmarks.gpt`, in the project's folder, also checks the results.
"""

import dataclasses
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.profiler import profile, schedule, tensorboard_trace_handler

if __name__ == "__main__":  # not this folder, whose kernels would hide the library that transformers looks for
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from measure.command_line import program  # noqa: E402  (the repository must be on the path)
from nanogpt_triton import train  # noqa: E402
from nanogpt_triton.configurator import Count, configure  # noqa: E402
from nanogpt_triton.dataset import GPT2_VOCAB, SPLITS, TOKEN  # noqa: E402
from tiny_llama.distributed import World  # noqa: E402


@dataclass(frozen=True)
class Settings(train.Settings):
    real_data: bool = True  # batches of the dataset; otherwise random tokens of GPT-2's vocabulary
    profile: bool = False  # record 5 iterations into bench_log/ with PyTorch's profiler, instead of timing
    gradient_accumulation_steps: Count = 1  # batches an iteration
    grad_clip: float = 0.0  # largest norm of the gradient; 0: any


def run(trainer, count, after=lambda: None):
    """Run so many iterations and print their losses. Return the seconds of one."""
    start = time.perf_counter()
    for number in range(count):
        print(f"{number}/{count} loss: {trainer.step().item():.4f}", flush=True)
        after()
    return (time.perf_counter() - start) / count


@program("bench.py")
def main(argv):
    settings = configure(Settings, argv, __doc__)
    torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory() as folder:
        if not settings.real_data:
            settings = dataclasses.replace(settings, data_dir=folder, dataset="")
            tokens = np.random.default_rng(settings.seed).integers(GPT2_VOCAB, size=8 * settings.block_size)
            for split in SPLITS:
                tokens.astype(TOKEN).tofile(f"{folder}/{split}.bin")
        trainer = train.Trainer(settings, World(), train.join(World(), settings))
        with train.preferred_attention(trainer.device, settings.deterministic):
            if settings.profile:
                plan, handler = schedule(wait=5, warmup=5, active=5, repeat=1), tensorboard_trace_handler("bench_log")
                with profile(schedule=plan, on_trace_ready=handler, with_flops=True) as profiler:
                    run(trainer, 15, profiler.step)
                print("the trace is in bench_log/: open it with TensorBoard or https://ui.perfetto.dev")
                return 0
            # The first iterations compile kernels, and fill the caches of memory and of tuning.
            run(trainer, 10)
            seconds = run(trainer, 20)
    mfu = trainer.raw_model.estimate_mfu(settings.batch_size * trainer.count, seconds)
    print(f"time per iteration: {seconds * 1e3:.4f}ms, MFU: {100 * mfu:.2f}%")
    return 0


if __name__ == "__main__":
    sys.exit(main())
