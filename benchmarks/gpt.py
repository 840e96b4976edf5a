"""Time whole training steps of nanogpt_triton: GPT-2 with 124 million weights, 12 x 1024 tokens, bf16.

    python -m benchmarks.gpt            our LayerNorm against PyTorch's, compiled and eager
    python -m benchmarks.gpt --tiny     a small model, to try everything

The step is that of the trainer: forward, backward, clipping, AdamW. "triton" computes the residual additions in the
norms; "triton, addition apart" leaves them to PyTorch. The windows of each row alternate with those of "torch",
compiled or eager as the row is. Gradients are compared with fp32 before anything is timed.

Exit codes: 0 done, 1 gradients are wrong, 2 the request cannot be met, 130 interrupted.
"""

import contextlib
import dataclasses
import functools
import sys
from typing import NamedTuple

import torch

if not __package__:
    print("run it from the root as python -m benchmarks.gpt", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from benchmarks.harness import Contender, Run, make_parser, measure_rows, summarize
from measure.accuracy import require
from measure.command_line import positive, program
from measure.timing import compile_apart, release
from nanogpt_triton.kernels import triton_layer_norm
from nanogpt_triton.model import GPT, GPTConfig, LayerNorm
from nanogpt_triton.train import Settings, optimizer_step, preferred_attention
from tiny_llama import hardware

SIZES = {
    "gpt2": (12, GPTConfig(bias=False)),
    "tiny": (2, GPTConfig(block_size=32, vocab_size=96, n_layer=2, n_head=2, n_embd=64, bias=False)),
}


class Row(NamedTuple):
    layer_norm: str
    fused_addition: bool = True
    compile: bool = False


ROWS = {
    "torch": Row("torch"),
    "triton": Row("triton"),
    "triton, addition apart": Row("triton", fused_addition=False),
}
ROWS |= {f"{name} compile": row._replace(compile=True) for name, row in ROWS.items()}


def apart(x, branch, weight, bias):
    """Leave the addition to PyTorch, which the fused norm does itself."""
    x = x if branch is None else x + branch
    return x, triton_layer_norm(x, weight, bias)


class Step:
    """The model of a row with its optimizer, and a training step of a fixed batch."""

    def __init__(self, row, config, batch):
        torch.manual_seed(0)
        self.batch, self.device, self.settings, self.loss = batch, batch[0].device, Settings(), None
        with contextlib.redirect_stdout(None):
            self.raw_model = GPT(config, row.layer_norm, self.device)
        for module in self.raw_model.modules():
            if isinstance(module, LayerNorm) and not row.fused_addition:
                module.add_layer_norm = apart
        self.model = compile_apart(self.raw_model) if row.compile else self.raw_model
        self.model.parameters = self.raw_model.parameters  # which optimizer_step() clips
        betas, rate = (self.settings.beta1, self.settings.beta2), self.settings.learning_rate
        self.optimizer = self.raw_model.configure_optimizers(self.settings.weight_decay, rate, betas)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=False)

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def run(self):
        """Set the loss, without synchronization."""
        arguments = self.model, self.optimizer, self.scaler, [self.batch], 1, self.autocast, self.settings.grad_clip
        with preferred_attention(self.device, False):
            self.loss = optimizer_step(*arguments)

    def restart(self):
        """Nothing: warm-up steps have trained, and training goes on."""


def gradients(config, row, batch, in_bf16):
    step = Step(row, config, batch)
    with step.autocast() if in_bf16 else contextlib.nullcontext():
        step.model(*batch)[1].backward()
    return {name: p.grad for name, p in step.raw_model.named_parameters()}


def check(config, batch):
    """Return the worst {name, error, allowed}; ArithmeticError if the error of a gradient of "triton" is too large."""
    # Two sequences suffice, and fp32 has room for them. TF32 would not be exact.
    batch = [t[:2] for t in batch]
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    exact = gradients(config, ROWS["torch"], batch, in_bf16=False)
    torch.set_float32_matmul_precision(precision)
    plain, ours = (gradients(config, ROWS[name], batch, in_bf16=True) for name in ("torch", "triton"))
    verdict = require(ours, plain, exact, llama.CHECK_ATOL["bf16"])
    worst = verdict.worst
    return {"name": worst, "error": verdict.errors[worst], "allowed": verdict.allowed[worst]}


def measure(run, config, batch):
    """Fill the rows of the result. A row that fails or starts too late has an error; the others continue."""
    peak, tokens = hardware.peak_tflops(llama.get_gpu(run.device.type), "bf16"), batch[0].numel()

    def build(name):
        make = functools.partial(Step, ROWS[name], config, batch)
        return Contender(make, run.device, steps=run.options.steps)

    def figures(name, contender, windows):
        tflop = tokens * contender.step.raw_model.flops_per_token() / 1e12
        return summarize(contender.results, windows, tokens, tflop, peak)

    for compiled in (False, True):
        half = {name: row for name, row in ROWS.items() if row.compile == compiled}
        # What is compiled stays, unlike in release_all(): the reference is.
        measure_rows(run, run.result["rows"], half, "torch" + " compile" * compiled, build, figures, release)
    run.result["rows"] = {name: run.result["rows"][name] for name in ROWS}


def parse(argv):
    parser = make_parser("gpt", __doc__, seconds=400)
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--windows", type=positive, default=7, metavar="N", help="of each row (default: 7)")
    parser.add_argument("--steps", type=positive, default=8, metavar="N", help="in a window (default: 8)")
    return parser.parse_args(argv)


@program("gpt.py")
def main(argv):
    options, device = parse(argv), llama.select_device("auto")
    if device.type == "cpu" and not options.tiny:
        raise llama.UsageError("GPT-2 with 124 million weights needs a GPU, and there is none: use --tiny")
    torch.set_float32_matmul_precision("high")
    size = "tiny" if options.tiny else "gpt2"
    batch_size, config = SIZES[size]
    # Random tokens: the time of a step does not depend on them. The targets are the tokens that follow.
    tokens = torch.randint(config.vocab_size, (batch_size, config.block_size + 1), device=device.type)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    precision = "bf16" if device.type == "cuda" else "fp32"
    fields = dict(size=size, batch_size=batch_size, config=dataclasses.asdict(config), precision=precision, rows={})
    run = Run("gpt", argv, options, device, **fields)
    try:
        run.result["gate"] = worst = check(config, batch)
    except ArithmeticError as error:
        print(f"gpt.py: {error}: nothing is timed")
        return 1
    print(f"gradients: worst {worst['name']}, error {worst['error']:.1e}, allowed {worst['allowed']:.1e}", flush=True)
    measure(run, config, batch)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
