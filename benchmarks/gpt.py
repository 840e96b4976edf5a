"""Time whole training steps of nanogpt_triton: GPT-2 with 124 million weights, 12 x 1024 tokens, bf16.

    python -m benchmarks.gpt                      ours, captured in a graph, against PyTorch's operations, compiled
    python -m benchmarks.gpt --nanogpt FOLDER     and against the model of nanoGPT itself, of a checkout in FOLDER
    python -m benchmarks.gpt --tiny               a small model, to try everything

The step is that of the trainer: forward, backward, clipping, AdamW. "triton" has all that is ours, with forward and
backward in a CUDA graph. A row "without" something has PyTorch's in its place: of the graph torch.compile, as without
FlatAdamW, which it needs. The windows of each row alternate with those of "torch compile" or of "nanoGPT compile",
nanoGPT's own model and optimizer. Gradients are compared with fp32 before anything is timed, and so are the losses of
some steps with those of nanoGPT.

Exit codes: 0 done, 1 gradients are wrong, 2 the request cannot be met, 130 interrupted.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import statistics
import sys
from pathlib import Path
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
from nanogpt_triton.dataset import reading
from nanogpt_triton.flat_adamw import GPTAdamW
from nanogpt_triton.model import GPT, GPTConfig
from nanogpt_triton.train import (
    CapturedPass,
    Settings,
    add_gradients,
    flat_step,
    learning_rate,
    optimizer_step,
    preferred_attention,
)
from tiny_llama import hardware

SIZES = {
    "gpt2": (12, GPTConfig(bias=False)),
    "tiny": (2, GPTConfig(block_size=32, vocab_size=96, n_layer=2, n_head=2, n_embd=64, bias=False)),
}


class Row(NamedTuple):
    layer_norm: str
    attention: str
    gelu: str
    fused_loss: bool
    flat_adamw: bool
    compile: bool = False
    graph: bool = False
    nanogpt: bool = False  # nanoGPT's own model and optimizer


PLAIN = Row("torch", "torch", "torch", False, False)
OURS = Row("triton", "triton", "triton", True, True, graph=True)
COMPILED = OURS._replace(graph=False, compile=True)
ROWS = {
    "triton": OURS,
    "torch compile": PLAIN._replace(compile=True),
    "torch": PLAIN,
    "without attention": OURS._replace(attention="torch"),
    "without gelu": OURS._replace(gelu="torch"),
    "without layer_norm": OURS._replace(layer_norm="torch"),
    "without fused_loss": OURS._replace(fused_loss=False),
    "without flat_adamw": COMPILED._replace(flat_adamw=False),
    "without graph": COMPILED,
    "eager": OURS._replace(graph=False),
}
NANOGPT = "nanoGPT compile"
THEIRS = {NANOGPT: PLAIN._replace(compile=True, nanogpt=True)}
COMPARED_STEPS = 60
COMPARED_TOKENS = 1000  # of the vocabulary: few, so that the losses fall far


class Step:
    """The model of a row with its optimizer, and a training step of a fixed batch.

    nanogpt is the module of nanoGPT's model, for the row that needs it. The initial weights are those given, if any.
    """

    def __init__(self, row, config, batch, nanogpt=None, in_bf16=None, weights=None):
        torch.manual_seed(0)
        self.row, self.batch, self.device, self.loss = row, batch, batch[0].device, None
        self.in_bf16 = self.device.type == "cuda" if in_bf16 is None else in_bf16
        settings = Settings()
        self.betas, self.grad_clip = (settings.beta1, settings.beta2), settings.grad_clip
        with contextlib.redirect_stdout(None):
            self.raw_model = self.make_model(config, nanogpt)
            if weights:
                self.raw_model.load_state_dict(weights)
            self.model = compile_apart(self.raw_model) if row.compile else self.raw_model
            rates = settings.weight_decay, settings.learning_rate, self.betas
            self.optimizer = self.raw_model.configure_optimizers(*rates, self.device.type)
        if row.flat_adamw:
            self.optimizer = GPTAdamW(self.raw_model, self.optimizer, self.in_bf16, settings.grad_clip)
            self.run_pass = functools.partial(add_gradients, self.model, self.optimizer)
        else:
            self.model.parameters = self.raw_model.parameters  # which optimizer_step() clips
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=False)

    def make_model(self, config, nanogpt):
        """Return nanoGPT's model, or ours."""
        if self.row.nanogpt:
            return nanogpt.GPT(nanogpt.GPTConfig(**dataclasses.asdict(config))).to(self.device)
        names = "layer_norm", "attention", "gelu", "fused_loss"
        return GPT(config, device=self.device, **{name: getattr(self.row, name) for name in names})

    def autocast(self):
        """Return the context of a forward pass. FlatAdamW has the weights in bf16."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.in_bf16 and not self.row.flat_adamw)

    def attention_order(self):
        """Return the context in which the trainer calls PyTorch's attention, but for nanoGPT."""
        return contextlib.nullcontext() if self.row.nanogpt else preferred_attention(self.device, False)

    def capture(self, one_graph=True):
        """Replay forward and backward from now on, as the trainer does; the update stays as it is."""
        with self.attention_order():
            self.run_pass = CapturedPass(self.model, self.optimizer, self.batch[0].shape, self.device)

    def run(self):
        """Set the loss, without synchronization."""
        with self.attention_order():
            if self.row.flat_adamw:
                self.loss = flat_step(self.run_pass, self.optimizer, [self.batch])
            else:
                scaled = self.model, self.optimizer, self.scaler
                self.loss = optimizer_step(*scaled, [self.batch], 1, self.autocast, self.grad_clip)

    def restart(self):
        """Nothing: warm-up steps have trained, and training goes on."""


def load_nanogpt(folder):
    """Return the module of a checkout's model; UsageError if there is none."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(folder, "model.py"))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # torch.compile looks for it there
    with reading(f"--nanogpt {folder}", "give a checkout of karpathy/nanoGPT"):
        spec.loader.exec_module(module)
    return module


def captured(step):
    """Return a Step, which has captured its graph if its row has one and there is a GPU."""
    if step.row.graph and step.device.type == "cuda":
        step.capture()
    return step


def gradients(config, row, batch, in_bf16):
    """Return {name: gradient} of a row."""
    step = captured(Step(row, config, batch, in_bf16=in_bf16))
    if row.flat_adamw:
        step.run_pass(*batch)
    else:
        with step.autocast():
            step.model(*batch)[1].backward()
    return {name: p.grad for name, p in step.raw_model.named_parameters()}


def check(config, batch):
    """Return the worst {name, error, allowed}; ArithmeticError if the error of a gradient of ours is too large.

    Captured and compiled.
    """
    # Two sequences suffice, and fp32 has room for them. TF32 would not be exact.
    batch, on_gpu = [t[:2] for t in batch], batch[0].is_cuda
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    exact = gradients(config, ROWS["torch"], batch, in_bf16=False)
    torch.set_float32_matmul_precision(precision)
    plain, found = gradients(config, ROWS["torch"], batch, in_bf16=on_gpu), []
    for name in ("triton", "without graph"):
        verdict = require(gradients(config, ROWS[name], batch, on_gpu), plain, exact, llama.CHECK_ATOL["bf16"])
        worst = verdict.worst
        found.append({"name": worst, "error": verdict.errors[worst], "allowed": verdict.allowed[worst]})
    return max(found, key=lambda worst: worst["error"] / worst["allowed"])


def compare_losses(config, batch, nanogpt):
    """Return the losses of nanoGPT and of ours, from the same weights and batches, and how far they are apart.

    The learning rate rises as in nanoGPT's warm-up: at its full height from the first step, rounding would grow.
    """
    theirs = Step(THEIRS[NANOGPT], config, batch, nanogpt)
    weights = {name: weight.clone() for name, weight in theirs.raw_model.state_dict().items()}
    steps = {"nanogpt": theirs, "ours": captured(Step(OURS, config, batch, weights=weights))}
    losses = {name: [] for name in steps}
    batch_size, seq_len = batch[0].shape
    sizes = dict(batch_size=batch_size, seq_len=seq_len, vocab_size=min(config.vocab_size, COMPARED_TOKENS))
    batches, settings = llama.batches(llama.Config(data="markov", **sizes)), Settings(warmup_iters=COMPARED_STEPS)
    for number in range(COMPARED_STEPS):
        tokens = [t.to(theirs.device).contiguous() for t in next(batches)]
        for name, step in steps.items():
            for group in step.optimizer.param_groups:
                group["lr"] = learning_rate(settings, number)
            step.batch = tokens
            step.run()
            losses[name].append(step.loss.item())
    differences = [abs(b - a) / a for a, b in zip(losses["nanogpt"], losses["ours"], strict=True)]
    spread = dict(largest_relative_difference=max(differences), mean_relative_difference=statistics.mean(differences))
    return {**spread, **losses}


def measure(run, config, batch, nanogpt):
    """Fill the rows of the result. A row that fails or starts too late has an error; the others continue."""
    peak, tokens = hardware.peak_tflops(llama.get_gpu(run.device.type), "bf16"), batch[0].numel()
    rows = (THEIRS if nanogpt else {}) | ROWS
    with torch.device("meta"), contextlib.redirect_stdout(None):
        tflop = tokens * GPT(config, "torch", "meta", "torch", "torch").flops_per_token() / 1e12

    def build(name):
        make = functools.partial(Step, rows[name], config, batch, nanogpt)
        return Contender(make, run.device, rows[name].graph, run.options.steps)

    def figures(name, contender, windows):
        return summarize(contender.results, windows, tokens, tflop, peak)

    # What is compiled stays, unlike in release_all(): the reference is.
    reference = NANOGPT if nanogpt else "torch compile"
    measure_rows(run, run.result["rows"], rows, reference, build, figures, release)
    run.result["rows"] = {name: run.result["rows"][name] for name in rows}


def parse(argv):
    parser = make_parser("gpt", __doc__, seconds=300)
    parser.add_argument("--tiny", action="store_true", help="a small model")
    help = "a checkout of karpathy/nanoGPT, whose model is executed and timed as well"
    parser.add_argument("--nanogpt", metavar="FOLDER", help=help)
    parser.add_argument("--windows", type=positive, default=7, metavar="N", help="of each row (default: 7)")
    parser.add_argument("--steps", type=positive, default=8, metavar="N", help="in a window (default: 8)")
    return parser.parse_args(argv)


@program("gpt.py")
def main(argv):
    options, device = parse(argv), llama.select_device("auto")
    if device.type == "cpu" and not options.tiny:
        raise llama.UsageError("GPT-2 with 124 million weights needs a GPU, and there is none: use --tiny")
    nanogpt = load_nanogpt(options.nanogpt) if options.nanogpt else None
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
    if nanogpt:
        run.result["losses"] = losses = run.attempt(functools.partial(compare_losses, config, batch, nanogpt))
        text = losses["error"]
        if text is None:
            largest, mean = losses["largest_relative_difference"], losses["mean_relative_difference"]
            text = f"differ by {mean:.1e} on average and {largest:.1e} at most"
        print(f"losses of nanoGPT and of ours in {COMPARED_STEPS} steps: {text}", flush=True)
        release(device)
    measure(run, config, batch, nanogpt)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
