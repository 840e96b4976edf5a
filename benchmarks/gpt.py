"""Time whole training steps of nanogpt_triton: GPT-2 with 124 million weights, 12 x 1024 tokens, bf16.

    python -m benchmarks.gpt                                       our LayerNorm against PyTorch's, compiled and not
    torchrun --standalone --nproc_per_node=4 -m benchmarks.gpt    how it scales, at the same batch a GPU
    python -m benchmarks.gpt --tiny                                a small model, to see that everything works

A step is the trainer's own: forward, backward, clipping, AdamW. "triton" does the residual additions inside the norms;
"triton, addition apart" leaves them to PyTorch. "flash" uses PyTorch's attention, as nanoGPT does, where the trainer
prefers cuDNN's: "torch flash compile" is what nanoGPT computes. Windows of steps alternate between the rows, in one
process. Gradients are compared with fp32 before anything is timed.

Exit codes: 0 done, 1 gradients are wrong, 2 the request cannot be met, 130 interrupted.
"""

import argparse
import contextlib
import dataclasses
import gc
import os
import statistics
import sys
import time
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import tiny_llama_v3 as llama
from measure.results import RESULTS, ResultFile, describe, header, require_finite, time_limit
from nanogpt_triton.configurator import UsageError
from nanogpt_triton.kernels import triton_layer_norm
from nanogpt_triton.model import GPT, GPTConfig, LayerNorm
from nanogpt_triton.train import Settings, World, optimizer_step, preferred_attention, wrap_for_processes
from tiny_llama_v3 import exit_code_of

SIZES = {
    "gpt2": (12, GPTConfig(bias=False)),
    "tiny": (2, GPTConfig(block_size=32, vocab_size=96, n_layer=2, n_head=2, n_embd=64, bias=False)),
}
SLACK = 1e-2  # of a gradient's norm, beyond twice the error of PyTorch's LayerNorm in the same precision


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


def apart(x, delta, weight, bias):
    x = x if delta is None else x + delta
    return x, triton_layer_norm(x, weight, bias)


def compile_apart(model):
    """torch.compile with a code object of its own: compiled code belongs to one, and not all that differs between two
    rows (the attention chosen, an exchange of gradients) is among what decides about its reuse."""

    def forward(*args):
        return model(*args)

    forward.__code__ = forward.__code__.replace(co_name=f"forward_{id(model)}")
    return torch.compile(forward)


class Contender:
    """A row's model with its optimizer, and a step of it."""

    def __init__(self, row, config, batch, device, world=None):
        torch.manual_seed(0)
        self.row, self.batch, self.device = row, batch, device
        with contextlib.redirect_stdout(None):
            self.raw_model = GPT(config, row.layer_norm, device)
        if not row.fused_addition:
            for module in self.raw_model.modules():
                if isinstance(module, LayerNorm):
                    module.add_layer_norm = apart
        self.model = wrap_for_processes(self.raw_model, world) if world else self.raw_model
        if row.compile:
            self.model = torch.compile(self.model) if world else compile_apart(self.model)
        settings = Settings()
        betas = settings.beta1, settings.beta2
        self.optimizer = self.raw_model.make_optimizer(settings.weight_decay, settings.learning_rate, betas)
        self.scaler = torch.amp.GradScaler(device.type, enabled=False)
        self.grad_clip = settings.grad_clip

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def attention(self):
        return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if self.row.flash else preferred_attention(self.device, False)

    def step(self):
        """The loss, not synced."""
        return optimizer_step(self.model, self.optimizer, self.scaler, [self.batch], 1, self.autocast, self.grad_clip)

    def window(self, steps):
        """Milliseconds a step."""
        with self.attention():
            synchronize(self.device)
            start = time.perf_counter()
            for _ in range(steps):
                loss = self.step()
            synchronize(self.device)
            milliseconds = (time.perf_counter() - start) / steps * 1e3
            require_finite(loss.item())
            return milliseconds


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gradients(config, row, batch, device, autocast):
    contender = Contender(row, config, batch, device)
    with contender.attention() if autocast else contextlib.nullcontext():
        with contender.autocast() if autocast else contextlib.nullcontext():
            contender.model(*batch)[1].backward()
    return {name: p.grad for name, p in contender.raw_model.named_parameters()}


def check(config, batch, device):
    """The worst {name, error, allowed}; ArithmeticError if a gradient of "triton" is beyond what is allowed."""
    batch = [t[:2] for t in batch]
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    exact = gradients(config, ROWS["torch"], batch, device, autocast=False)
    torch.set_float32_matmul_precision(precision)
    plain, ours = (gradients(config, ROWS[name], batch, device, autocast=True) for name in ("torch", "triton"))
    worst = None
    for name, reference in exact.items():
        norm = torch.linalg.vector_norm(reference)
        error, allowed = (float(torch.linalg.vector_norm(grads[name] - reference) / norm) for grads in (ours, plain))
        allowed = 2 * allowed + SLACK
        if worst is None or not error / allowed <= worst["error"] / worst["allowed"]:
            worst = {"name": name, "error": error, "allowed": allowed}
    if not worst["error"] <= worst["allowed"]:
        raise ArithmeticError(
            f"gradient of {worst['name']}: error {worst['error']:.1e}, allowed {worst['allowed']:.1e}"
        )
    return worst


def figures(windows_ms, tokens, raw_model, device):
    p20, median, p80 = np.percentile(windows_ms, [20, 50, 80]).tolist()
    tokens_per_second = tokens / median * 1e3
    peak = llama.peak_tflops(llama.get_device(device.type), "bf16")
    return {
        "windows_ms": windows_ms,
        "ms": {"p20": p20, "median": median, "p80": p80},
        "tokens_per_second": tokens_per_second,
        "mfu": tokens_per_second * raw_model.flops_per_token() / peak / 1e12 if peak else None,
    }


def measure_rows(options, config, batch, device, deadline, rows, save):
    """Fills rows: {name: figures or error}. Rows that fail or come too late say why, and the others go on."""
    contenders = {}
    for name in options.rows:
        row = ROWS[name]
        rows[name] = {**row._asdict(), "error": None}
        try:
            if time.monotonic() > deadline:
                raise TimeoutError("left out by --time-limit")
            on_gpu = device.type == "cuda"
            if on_gpu:
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            contender = Contender(row, config, batch, device)
            with contender.attention():
                rows[name]["first_loss"] = float(contender.step())
                rows[name]["first_step_seconds"] = time.perf_counter() - start
                contender.step()
            synchronize(device)
            contender.window(options.steps)
            rows[name]["peak_memory_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20 if on_gpu else None
            contenders[name] = contender
            print(f"{name:32} ready after {rows[name]['first_step_seconds']:.1f} s", flush=True)
        except Exception as error:  # of this row alone
            rows[name]["error"] = describe(error)
            print(f"{name:32} {rows[name]['error']}", flush=True)
        save()
    windows = {name: [] for name in contenders}
    for _ in range(options.windows):
        for name, contender in contenders.items():
            windows[name].append(contender.window(options.steps))
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


def parse(argv):
    parser = llama.Parser(
        prog="gpt.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW", help=", ".join(ROWS)
    )
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--windows", type=int, default=15, metavar="N", help="of each row (default: 15)")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="in a window (default: 8)")
    parser.add_argument(
        "--time-limit", type=time_limit, default=400, metavar="S", help="start no row later (default: 400)"
    )
    parser.add_argument("--output-dir", default=str(RESULTS), metavar="DIR", help="(default: benchmarks/results)")
    options = parser.parse_args(argv)
    for name in ("windows", "steps"):
        if getattr(options, name) < 1:
            raise llama.UsageError(f"--{name} {getattr(options, name)} is not positive: give 1 or more")
    return options


def run(argv):
    start = time.monotonic()
    options = parse(argv)
    if not (options.tiny or torch.cuda.is_available()):
        raise llama.UsageError("GPT-2 with 124 million weights needs a GPU, and there is none: use --tiny")
    folder = llama.writable_folder("--output-dir", options.output_dir)
    torch.set_float32_matmul_precision("high")
    try:
        world = World(Settings())
    except UsageError as error:
        raise llama.UsageError(str(error)) from error
    device = world.device
    size = "tiny" if options.tiny else "gpt2"
    batch_size, config = SIZES[size]
    torch.manual_seed(world.rank)
    tokens = torch.randint(config.vocab_size, (batch_size, config.block_size + 1), device=device)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    described = llama.get_device(device.type)
    result = header("gpt", described, argv) | {
        "size": size,
        "batch_size": batch_size,
        "config": dataclasses.asdict(config),
        "precision": "bf16" if device.type == "cuda" else "fp32",
        "processes": world.size,
        "rows": {},
    }
    if world.size > 1:
        result["benchmark"] = "scaling"
        result["command"] = (
            f"torchrun --standalone --nproc_per_node={world.size} {result['command'].removeprefix('python ')}"
        )
    file = ResultFile(folder, result)
    deadline = start + options.time_limit

    def save():
        file.save(result)

    if world.is_master:
        print(f"{described.name} ({described.arch}), PyTorch {torch.__version__}, {world.size} processes", flush=True)
    if world.size > 1:
        measure_scaling(options, config, batch, world, deadline, result["rows"], save)
    else:
        try:
            result["gate"] = check(config, batch, device)
        except ArithmeticError as error:
            print(f"gpt.py: {error}: nothing is timed")
            return 1
        worst = result["gate"]
        print(
            f"gradients: worst {worst['name']}, error {worst['error']:.1e}, allowed {worst['allowed']:.1e}", flush=True
        )
        measure_rows(options, config, batch, device, deadline, result["rows"], save)
        print_rows(result["rows"])
    if world.is_master:
        save()
        print(f"\nResults: {file.path}")
    world.close()
    return 0


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    return exit_code_of(lambda: run(argv), "gpt.py")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    if code and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        os._exit(code)
    sys.exit(code)
