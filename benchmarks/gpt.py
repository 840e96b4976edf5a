"""Time whole training steps of nanogpt_triton: GPT-2 with 124 million weights, 12 x 1024 tokens, bf16.

    python -m benchmarks.gpt            our LayerNorm against PyTorch's, compiled and eager
    python -m benchmarks.gpt --tiny     a small model, to try everything

The step is that of the trainer: forward, backward, clipping, AdamW. "triton" computes the residual additions in the
norms; "triton, addition apart" leaves them to PyTorch. "flash" uses PyTorch's flash attention; the trainer prefers
cuDNN's, and nanoGPT leaves the choice to PyTorch. Windows of steps alternate between the rows, in one process.
Gradients are compared with fp32 before anything is timed. benchmarks.scaling measures several GPUs.

Exit codes: 0 done, 1 gradients are wrong, 2 the request cannot be met, 130 interrupted.
"""

import collections
import contextlib
import dataclasses
import functools
import os
import statistics
import sys
import time
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

if not __package__:
    print("run it from the root as python -m benchmarks.gpt", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from measure.accuracy import require, require_finite
from measure.command_line import Parser, positive, program, time_limit
from measure.results import RESULTS, ResultFile, describe, header
from measure.timing import compile_apart, in_turns, percentiles, release, wall_seconds
from nanogpt_triton.kernels import triton_layer_norm
from nanogpt_triton.model import GPT, GPTConfig, LayerNorm
from nanogpt_triton.train import Settings, optimizer_step, preferred_attention, select_device, wrap_for_processes
from tiny_llama import distributed, hardware

SIZES = {
    "gpt2": (12, GPTConfig(bias=False)),
    "tiny": (2, GPTConfig(block_size=32, vocab_size=96, n_layer=2, n_head=2, n_embd=64, bias=False)),
}


class Row(NamedTuple):
    layer_norm: str
    fused_addition: bool = True
    flash: bool = False
    compile: bool = False


ROWS = {
    "torch": Row("torch"),
    "triton": Row("triton"),
    "triton, addition apart": Row("triton", fused_addition=False),
    "torch flash": Row("torch", flash=True),
    "triton flash": Row("triton", flash=True),
}
ROWS |= {f"{name} compile": row._replace(compile=True) for name, row in ROWS.items()}


def apart(x, branch, weight, bias):
    x = x if branch is None else x + branch
    return x, triton_layer_norm(x, weight, bias)


class Contender:
    """The model of a row with its optimizer and its training step."""

    def __init__(self, row, config, batch, device, world=None):
        torch.manual_seed(0)
        self.row, self.batch, self.device = row, batch, device
        with contextlib.redirect_stdout(None):
            self.raw_model = GPT(config, row.layer_norm, device)
        if not row.fused_addition:
            for module in self.raw_model.modules():
                if isinstance(module, LayerNorm):
                    module.add_layer_norm = apart
        self.model = wrap_for_processes(self.raw_model, device) if world else self.raw_model
        if row.compile:
            self.model = torch.compile(self.model) if world else compile_apart(self.model)
        settings = Settings()
        betas = settings.beta1, settings.beta2
        self.optimizer = self.raw_model.configure_optimizers(settings.weight_decay, settings.learning_rate, betas)
        self.scaler = torch.amp.GradScaler(device.type, enabled=False)
        self.grad_clip = settings.grad_clip

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def attention(self):
        return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if self.row.flash else preferred_attention(self.device, False)

    def step(self):
        """Returns the loss without synchronization."""
        return optimizer_step(self.model, self.optimizer, self.scaler, [self.batch], 1, self.autocast, self.grad_clip)

    def window(self, steps):
        """The milliseconds of a step in a window."""
        losses = collections.deque(maxlen=1)
        with self.attention():
            milliseconds = wall_seconds([lambda: losses.append(self.step())], steps, self.device) * 1e3
        require_finite(losses[0].item())
        return milliseconds


def gradients(config, row, batch, device, autocast):
    contender = Contender(row, config, batch, device)
    with contender.attention() if autocast else contextlib.nullcontext():
        with contender.autocast() if autocast else contextlib.nullcontext():
            contender.model(*batch)[1].backward()
    return {name: p.grad for name, p in contender.raw_model.named_parameters()}


def check(config, batch, device):
    """Returns the worst {name, error, allowed}; ArithmeticError if the error of a gradient of "triton" is too large."""
    batch = [t[:2] for t in batch]
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    exact = gradients(config, ROWS["torch"], batch, device, autocast=False)
    torch.set_float32_matmul_precision(precision)
    plain, ours = (gradients(config, ROWS[name], batch, device, autocast=True) for name in ("torch", "triton"))
    verdict = require(ours, plain, exact, llama.CHECK_ATOL["bf16"])
    worst = verdict.worst
    return {"name": worst, "error": verdict.errors[worst], "allowed": verdict.allowed[worst]}


def figures(windows_ms, tokens, raw_model, device):
    ms = percentiles(windows_ms)
    tokens_per_second = tokens / ms["median"] * 1e3
    peak = hardware.peak_tflops(llama.get_device(device.type), "bf16")
    return {
        "windows_ms": windows_ms,
        "ms": ms,
        "tokens_per_second": tokens_per_second,
        "mfu": tokens_per_second * raw_model.flops_per_token() / peak / 1e12 if peak else None,
    }


def measure_rows(options, config, batch, device, deadline, rows, save):
    """Fills rows: {name: figures or error}. A row that fails or starts too late has an error; the others continue."""
    contenders = {}
    for name in options.rows:
        row = ROWS[name]
        rows[name] = {**row._asdict(), "error": None}
        try:
            if time.monotonic() > deadline:
                raise TimeoutError("left out by --time-limit")
            on_gpu = device.type == "cuda"
            release(device)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            contender = Contender(row, config, batch, device)
            with contender.attention():
                rows[name]["first_loss"] = float(contender.step())
                rows[name]["first_step_seconds"] = time.perf_counter() - start
                contender.step()
            contender.window(options.steps)
            rows[name]["peak_memory_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20 if on_gpu else None
            contenders[name] = contender
            print(f"{name:32} ready after {rows[name]['first_step_seconds']:.1f} s", flush=True)
        except Exception as error:  # the other rows can still be measured
            rows[name]["error"] = describe(error)
            print(f"{name:32} {rows[name]['error']}", flush=True)
        save()
    functions = [functools.partial(contender.window, options.steps) for contender in contenders.values()]
    windows = dict(zip(contenders, in_turns(functions, options.windows), strict=True))
    tokens = batch[0].numel()
    for name, contender in contenders.items():
        rows[name] |= figures(windows[name], tokens, contender.raw_model, device)
        peer = "torch compile" if ROWS[name].compile else "torch"
        if peer in windows and name != peer:
            ratios = [theirs / ours for theirs, ours in zip(windows[peer], windows[name], strict=True)]
            rows[name]["speedup"] = {"peer": peer, "median": statistics.median(ratios)}
    save()


def print_rows(rows):
    for name, row in rows.items():
        if row["error"]:
            print(f"{name:32} {row['error']}")
            continue
        ms, memory, speedup = row["ms"], row["peak_memory_mib"], row.get("speedup")
        print(
            f"{name:32} {ms['median']:8.2f} ms ({ms['p20']:.2f} - {ms['p80']:.2f}) "
            + f"{row['tokens_per_second']:10,.0f} tokens/s"
            + (f" mfu {100 * row['mfu']:.1f} %" if row["mfu"] else "")
            + (f" {memory:,.0f} MiB" if memory else "")
            + (f" {speedup['median']:.3f} x {speedup['peer']}" if speedup else "")
        )


def parse(argv):
    parser = Parser("gpt.py", __doc__)
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--windows", type=positive, default=15, metavar="N", help="of each row (default: 15)")
    parser.add_argument("--steps", type=positive, default=8, metavar="N", help="in a window (default: 8)")
    parser.add_argument("--time-limit", type=time_limit, default=400, metavar="S", help="for starting rows (400)")
    parser.add_argument("--output-dir", default=str(RESULTS), metavar="DIR", help="(default: benchmarks/results)")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    return parser.parse_args(argv)


def prepare(options, world, device):
    """(the first fields of the result, GPTConfig, a batch of this process of a World on a torch.device)"""
    if not (options.tiny or torch.cuda.is_available()):
        raise llama.UsageError("GPT-2 with 124 million weights needs a GPU, and there is none: use --tiny")
    torch.set_float32_matmul_precision("high")
    size = "tiny" if options.tiny else "gpt2"
    batch_size, config = SIZES[size]
    torch.manual_seed(world.rank)
    tokens = torch.randint(config.vocab_size, (batch_size, config.block_size + 1), device=device)
    described = {
        "size": size,
        "batch_size": batch_size,
        "config": dataclasses.asdict(config),
        "precision": "bf16" if device.type == "cuda" else "fp32",
        "processes": world.size,
    }
    return described, config, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


@program("gpt.py")
def main(argv):
    start = time.monotonic()
    options = parse(argv)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise llama.UsageError("rows are compared in one process: torchrun starts -m benchmarks.scaling")
    folder = llama.writable_folder("--output-dir", options.output_dir)
    device = select_device("auto", local_rank=0, world_size=1)
    described, config, batch = prepare(options, distributed.World(), device)
    hardware_device = llama.get_device(device.type)
    result = header("gpt", hardware_device, argv) | described | {"rows": {}}
    file = ResultFile(folder, result)
    print(f"{hardware_device.name} ({hardware_device.arch}), PyTorch {torch.__version__}", flush=True)
    try:
        result["gate"] = worst = check(config, batch, device)
    except ArithmeticError as error:
        print(f"gpt.py: {error}: nothing is timed")
        return 1
    print(f"gradients: worst {worst['name']}, error {worst['error']:.1e}, allowed {worst['allowed']:.1e}", flush=True)
    deadline = start + options.time_limit
    measure_rows(options, config, batch, device, deadline, result["rows"], lambda: file.save(result))
    print_rows(result["rows"])
    print(f"\nResults: {file.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
