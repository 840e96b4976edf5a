"""Time whole training steps of nanogpt_triton: GPT-2 with 124 million weights, 12 x 1024 tokens, bf16.

    python -m benchmarks.gpt            our LayerNorm against PyTorch's, compiled and eager
    python -m benchmarks.gpt --tiny     a small model, to try everything

The step is that of the trainer: forward, backward, clipping, AdamW. "triton" computes the residual additions in the
norms; "triton, addition apart" leaves them to PyTorch. "flash" uses PyTorch's flash attention; the trainer prefers
cuDNN's, and nanoGPT leaves the choice to PyTorch. The windows of each row alternate with those of "torch", compiled or
eager as the row is. Gradients are compared with fp32 before anything is timed. Several GPUs: benchmarks.scaling.

Exit codes: 0 done, 1 gradients are wrong, 2 the request cannot be met, 130 interrupted.
"""

import contextlib
import dataclasses
import functools
import os
import sys
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

if not __package__:
    print("run it from the root as python -m benchmarks.gpt", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from benchmarks.harness import Contender, Run, make_parser, measure_rows, print_rows, summarize
from measure.accuracy import require
from measure.command_line import positive, program
from measure.timing import compile_apart, release
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


class Step:
    """The model of a row with its optimizer, and a training step of a fixed batch."""

    def __init__(self, row, config, batch, device, world=None):
        torch.manual_seed(0)
        self.row, self.batch, self.device, self.loss = row, batch, device, None
        with contextlib.redirect_stdout(None):
            self.raw_model = GPT(config, row.layer_norm, device)
        # The fused norm adds the branch to the residual stream; apart() leaves that to PyTorch.
        if not row.fused_addition:
            for module in self.raw_model.modules():
                if isinstance(module, LayerNorm):
                    module.add_layer_norm = apart
        # DistributedDataParallel splits what is compiled at its messages; a single process is compiled for itself.
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

    def run(self):
        """Set the loss, without synchronization."""
        with self.attention():
            self.loss = optimizer_step(
                self.model, self.optimizer, self.scaler, [self.batch], 1, self.autocast, self.grad_clip
            )

    def restart(self):
        """Nothing: warm-up steps have trained, and training goes on."""


def gradients(config, row, batch, device, autocast):
    step = Step(row, config, batch, device)
    with step.attention() if autocast else contextlib.nullcontext():
        with step.autocast() if autocast else contextlib.nullcontext():
            step.model(*batch)[1].backward()
    return {name: p.grad for name, p in step.raw_model.named_parameters()}


def check(config, batch, device):
    """Return the worst {name, error, allowed}; ArithmeticError if the error of a gradient of "triton" is too large."""
    # Two sequences suffice, and fp32 has room for them. TF32 would not be exact.
    batch = [t[:2] for t in batch]
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    exact = gradients(config, ROWS["torch"], batch, device, autocast=False)
    torch.set_float32_matmul_precision(precision)
    plain, ours = (gradients(config, ROWS[name], batch, device, autocast=True) for name in ("torch", "triton"))
    verdict = require(ours, plain, exact, llama.CHECK_ATOL["bf16"])
    worst = verdict.worst
    return {"name": worst, "error": verdict.errors[worst], "allowed": verdict.allowed[worst]}


def prepare(options, world, device):
    """Return the first fields of the result, the GPTConfig, and a batch of this process of a World."""
    if not (options.tiny or torch.cuda.is_available()):
        raise llama.UsageError("GPT-2 with 124 million weights needs a GPU, and there is none: use --tiny")
    torch.set_float32_matmul_precision("high")
    size = "tiny" if options.tiny else "gpt2"
    batch_size, config = SIZES[size]
    torch.manual_seed(world.rank)
    # Random tokens: the time of a step does not depend on them. The targets are the tokens that follow.
    tokens = torch.randint(config.vocab_size, (batch_size, config.block_size + 1), device=device)
    described = {
        "size": size,
        "batch_size": batch_size,
        "config": dataclasses.asdict(config),
        "precision": "bf16" if device.type == "cuda" else "fp32",
        "processes": world.size,
    }
    return described, config, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def measure(run, config, batch, device):
    """Fill the rows of the result. A row that fails or starts too late has an error; the others continue."""
    rows, peak = run.result["rows"], hardware.peak_tflops(run.device, "bf16")

    def build(name):
        return Contender(
            functools.partial(Step, ROWS[name], config, batch, device), run.device, False, run.options.steps
        )

    def figures(name, contender, windows):
        tokens = batch[0].numel()
        tflop = tokens * contender.step.raw_model.flops_per_token() / 1e12
        return summarize(contender.results, windows, tokens, tflop, peak)

    def record(name, measured):
        rows[name] = {**ROWS[name]._asdict(), **measured}
        if "ratio" in measured:
            rows[name]["speedup"] = {"peer": measured["reference"], "median": measured["ratio"]["median"]}
        print(f"    {name:32} {measured['error'] or '{:.2f} ms'.format(measured['ms']['median'])}", flush=True)
        run.save()

    for compiled in (False, True):
        # What is compiled stays, unlike in release_all(): the reference is.
        half = [name for name in run.options.rows if ROWS[name].compile == compiled]
        measure_rows(run, half, "torch" + " compile" * compiled, build, figures, record, release)
    run.result["rows"] = {name: rows[name] for name in run.options.rows}
    print_rows(run.result["rows"])


def parse(argv):
    parser = make_parser("gpt", __doc__, seconds=400)
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--windows", type=positive, default=7, metavar="N", help="of each row (default: 7)")
    parser.add_argument("--steps", type=positive, default=8, metavar="N", help="in a window (default: 8)")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    return parser.parse_args(argv)


@program("gpt.py")
def main(argv):
    options = parse(argv)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise llama.UsageError("rows are compared in one process: torchrun starts -m benchmarks.scaling")
    device = select_device("auto", local_rank=0, world_size=1)
    described, config, batch = prepare(options, distributed.World(), device)
    run = Run("gpt", argv, options, llama.get_device(device.type), **described, rows={})
    try:
        run.result["gate"] = worst = check(config, batch, device)
    except ArithmeticError as error:
        print(f"gpt.py: {error}: nothing is timed")
        return 1
    print(f"gradients: worst {worst['name']}, error {worst['error']:.1e}, allowed {worst['allowed']:.1e}", flush=True)
    measure(run, config, batch, device)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
