#!/usr/bin/env python3
"""Train a GPT, as nanoGPT does, with LayerNorm on Triton kernels.

    python data/pysource/prepare.py                              data that needs no network
    python train.py config/train_pysource.py                     on a GPU, or on a CPU
    python train.py config/train_shakespeare_char.py --compile=False --max_iters=100
    torchrun --standalone --nproc_per_node=4 train.py config/train_gpt2.py

Exit codes: 0 done, 1 the loss is no number or target_loss was not reached, 2 the request cannot be met (one line says
why), 130 interrupted by Ctrl-C or SIGTERM (the last whole iteration is saved: --init_from=resume goes on from there),
141 the pipe of the output was closed.
"""

import contextlib
import dataclasses
import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":  # not this folder, whose kernels would hide the library that transformers looks for
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from measure.command_line import program  # noqa: E402  (the repository must be on the path)
from nanogpt_triton import checkpoint  # noqa: E402
from nanogpt_triton.configurator import configure, setting  # noqa: E402
from nanogpt_triton.dataset import SPLITS, Batches, BytePairs, dataset_folder, describe, description, read_meta  # noqa: E402
from nanogpt_triton.model import GPT, GPT2_SIZES, GPTConfig  # noqa: E402
from tiny_llama.distributed import run_together  # noqa: E402
from tiny_llama.hardware import is_out_of_memory  # noqa: E402
from tiny_llama_v3 import UsageError  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Settings:
    # output
    out_dir: str = setting("out", "folder of the checkpoints")
    eval_interval: int = setting(2000, "iterations between evaluations; a checkpoint may follow each", at_least=1)
    log_interval: int = setting(1, "iterations between lines of the log", at_least=1)
    eval_iters: int = setting(200, "batches of each split that an evaluation takes", at_least=1)
    eval_only: bool = setting(False, "evaluate once, and end")
    always_save_checkpoint: bool = setting(True, "after every evaluation, not only at the best validation loss")
    init_from: str = setting("scratch", "where the weights come from", choices=("scratch", "resume", *GPT2_SIZES))
    target_loss: float = setting(0.0, "end at a validation loss this low, and fail if it is not reached; 0: no target")
    wandb_log: bool = setting(False, "report to Weights & Biases")
    wandb_project: str = setting("owt", "its project")
    wandb_run_name: str = setting("gpt2", "its name for the run")
    # data
    dataset: str = setting("openwebtext", "a folder of data/, prepared by its prepare.py")
    data_dir: str = setting("", "where the folders of datasets lie; default: data/ beside train.py")
    gradient_accumulation_steps: int = setting(40, "batches an iteration, those of all processes together", at_least=1)
    batch_size: int = setting(12, "sequences a batch", at_least=1)
    block_size: int = setting(1024, "tokens a sequence", at_least=1)
    # model
    n_layer: int = setting(12, "transformer blocks", at_least=1)
    n_head: int = setting(12, "attention heads", at_least=1)
    n_embd: int = setting(768, "width", at_least=1)
    dropout: float = setting(0.0, "share of activations dropped", at_least=0.0, at_most=0.99)
    bias: bool = setting(False, "biases in linear layers and norms")
    layer_norm: str = setting("auto", "whose code; auto: Triton's if it runs", choices=("auto", "triton", "torch"))
    # optimizer
    learning_rate: float = setting(6e-4, "of AdamW, at its highest", at_least=0.0)
    max_iters: int = setting(600000, "the last iteration, counted from 0", at_least=0)
    weight_decay: float = setting(1e-1, "of matrices and embeddings", at_least=0.0)
    beta1: float = setting(0.9, "of AdamW", at_least=0.0, at_most=0.9999)
    beta2: float = setting(0.95, "of AdamW", at_least=0.0, at_most=0.9999)
    grad_clip: float = setting(1.0, "largest norm of the gradient; 0: any", at_least=0.0)
    decay_lr: bool = setting(True, "warm up and decay the learning rate along a cosine")
    warmup_iters: int = setting(2000, "iterations of warm-up", at_least=0)
    lr_decay_iters: int = setting(600000, "iteration at which min_lr is reached", at_least=0)
    min_lr: float = setting(6e-5, "learning rate at the end", at_least=0.0)
    # system
    backend: str = setting("auto", "of torch.distributed; auto: nccl on GPUs", choices=("auto", "nccl", "gloo"))
    device: str = setting("auto", "cpu, cuda, cuda:1, ..., mps; auto: cuda if there is one, otherwise cpu")
    dtype: str = setting("auto", "of autocast; auto: bfloat16 or float16 on a GPU", choices=("auto", *DTYPES))
    comm_timeout: int = setting(600, "seconds that processes wait for each other, to write, for example", at_least=1)
    compile: bool = setting(True, "torch.compile the model")
    deterministic: bool = setting(False, "the same bits in every run on a GPU too, at some cost")
    seed: int = setting(1337, "of weights, batches and dropout", at_least=0, at_most=2**32 - 1)


class Diverged(Exception):
    """The loss is no number any more."""

    exit_code = 1


# ----------------------------------------------------------------------------------------------------------------------
# The processes that train together, and the device of this one


def join(world, settings):
    """Meets the other processes of a World. Returns the torch.device of this one; UsageError if it cannot be had."""
    device = select_device(settings.device, world.local_rank, world.size)
    backend = ("nccl" if device.type == "cuda" else "gloo") if settings.backend == "auto" else settings.backend
    if backend == "nccl" and device.type == "cpu" and world.size > 1:
        raise UsageError("backend=nccl needs GPUs, and the device is a CPU: use backend=gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world.join(device, settings.comm_timeout, backend)
    # Only rank 0 uses the name of the run, which may hold the time.
    world.require_same(dataclasses.replace(settings, wandb_run_name=""), flag_of=str)
    return device


def select_device(requested, local_rank, world_size):
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind, _, index = requested.partition(":")
    if requested == "auto":
        kind = "cuda" if available else "cpu"
    if kind == "cpu" and not index:
        return torch.device("cpu")
    if requested == "mps":
        if not torch.backends.mps.is_available() or world_size > 1:
            raise UsageError("device=mps is for one process on a Mac with an Apple GPU: use device=cpu")
        return torch.device("mps")
    if kind != "cuda" or index and not index.isdecimal():
        raise UsageError(f"device={requested} is unknown: use auto, cpu, cuda, cuda:N or mps")
    number = local_rank if world_size > 1 else int(index or 0)
    if number >= available:
        seen = f"PyTorch {torch.__version__} sees {available} GPUs here"
        raise UsageError(f"device={requested}: {seen}, and {number + 1} are needed")
    return torch.device("cuda", number)


def select_dtype(requested, device):
    if requested != "auto":
        return requested
    if device.type != "cuda":
        return "float32"
    return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"


def preferred_attention(device, deterministic):
    """On Hopper and later, cuDNN's attention before PyTorch's own: mostly faster, but not the same bits in each run."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (9, 0) or deterministic:
        return contextlib.nullcontext()
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


# ----------------------------------------------------------------------------------------------------------------------
# One iteration


def optimizer_step(model, optimizer, scaler, batches, count, autocast, grad_clip, stopped=lambda: False):
    """Forward and backward of `count` batches (inputs, targets), and the update. Returns their mean loss, not synced,
    or None without an update if stopped() says so between two batches.

    The next batch is fetched while the device works on the one before.
    """
    total = 0.0
    for index, (inputs, targets) in enumerate(batches):
        if index and stopped():
            optimizer.zero_grad(set_to_none=True)
            return None
        is_last = index == count - 1
        # Gradients are exchanged once an iteration.
        with contextlib.nullcontext() if is_last or not hasattr(model, "no_sync") else model.no_sync():
            with autocast():
                _, loss = model(inputs, targets)
            loss = loss / count
            scaler.scale(loss).backward()
        total = total + loss.detach()
    if grad_clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return total


def learning_rate(settings, iteration):
    """Linear warm-up, then half a cosine down to min_lr."""
    if not settings.decay_lr:
        return settings.learning_rate
    if iteration < settings.warmup_iters:
        return settings.learning_rate * (iteration + 1) / (settings.warmup_iters + 1)
    progress = (iteration - settings.warmup_iters) / max(1, settings.lr_decay_iters - settings.warmup_iters)
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return settings.min_lr + cosine * (settings.learning_rate - settings.min_lr)


def wrap_for_processes(model, device):
    """Gradients are averaged in large buckets: torch.compile cuts its graphs at their borders, so that the exchange
    overlaps the backward pass."""
    device_ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True, bucket_cap_mb=100)


class Trainer:
    """Model, optimizer and data, and what a checkpoint holds of them."""

    def __init__(self, settings, world, device):
        self.settings, self.world, self.device = settings, world, device
        if settings.gradient_accumulation_steps % world.size:
            steps = f"gradient_accumulation_steps={settings.gradient_accumulation_steps}"
            raise UsageError(f"{steps} is not divisible by {world.size} processes: give a multiple")
        self.count = settings.gradient_accumulation_steps // world.size
        self.dtype = select_dtype(settings.dtype, self.device)
        self.iteration = self.position = 0  # position: batches drawn, by all processes
        self.best_val_loss = math.inf
        torch.manual_seed(settings.seed)

        folder = dataset_folder(settings.dataset, settings.data_dir)
        meta = read_meta(folder)
        Batches(folder, "train", meta, 1, 1, settings.seed)  # UsageError before weights are downloaded
        state = None
        if settings.init_from == "resume":
            state = checkpoint.load(checkpoint.find(settings.out_dir, newest=True))
            checkpoint.check_data(state, settings.dataset, settings.data_dir, meta)
        self.raw_model = self.make_model(meta, state)
        self.description = description(meta)
        shape = settings.batch_size, self.raw_model.config.block_size
        self.train_batches = Batches(folder, "train", meta, *shape, settings.seed)
        self.eval_batches = {split: Batches(folder, split, meta, *shape, settings.seed + 1) for split in SPLITS}

        betas = settings.beta1, settings.beta2
        self.optimizer = self.raw_model.configure_optimizers(settings.weight_decay, settings.learning_rate, betas)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == "float16")
        torch.manual_seed(settings.seed + world.rank)  # dropout differs between processes
        if state:
            self.restore(state)
        self.model = self.raw_model
        if world.size > 1:
            self.model = wrap_for_processes(self.raw_model, self.device)
        if settings.compile:
            self.model = torch.compile(self.model)

    def make_model(self, meta, state):
        settings = self.settings
        where = dict(layer_norm=settings.layer_norm, device=self.device)
        if settings.init_from in GPT2_SIZES:
            if meta["tokenizer"] != BytePairs.name:
                raise UsageError(f"init_from={settings.init_from} needs GPT-2's tokens, such as dataset=shakespeare")
            model = GPT.from_pretrained(settings.init_from, dict(dropout=settings.dropout), **where)
            if settings.block_size < model.config.block_size:
                model.crop_block_size(settings.block_size)
            return model
        names = ("block_size", "n_layer", "n_head", "n_embd", "bias")
        if state is None:
            vocab_size = GPTConfig.vocab_size if meta["tokenizer"] == BytePairs.name else meta["vocab_size"]
            chosen = {name: getattr(settings, name) for name in names}
            return GPT(GPTConfig(vocab_size=vocab_size, dropout=settings.dropout, **chosen), **where)
        arguments = state["model_args"] | {"dropout": settings.dropout}
        changed = [f"{n}={arguments[n]}" for n in names if arguments[n] != getattr(settings, n)]
        if changed and self.world.rank == 0:
            print(f"the checkpoint decides: {', '.join(changed)}")
        return GPT(GPTConfig(**arguments), **where)

    def restore(self, state):
        try:
            self.raw_model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.check_optimizer()
            self.iteration, self.best_val_loss = state["iter_num"], float(state["best_val_loss"])
            if "rng" not in state:
                self.position = self.iteration * self.settings.gradient_accumulation_steps
                print("the checkpoint is of another trainer: random state and data position start anew")
                return
            self.position = state["position"]
            if state["scaler"]:  # it is empty except of a run in float16
                self.scaler.load_state_dict(state["scaler"])
            if len(state["rng"]) == self.world.size:
                self.set_rng(state["rng"][self.world.rank])
            else:
                print(f"the checkpoint is of {len(state['rng'])} processes: random states start anew")
        except Exception as error:  # fields of wrong types lead anywhere
            if is_out_of_memory(error):
                raise
            raise UsageError(f"the checkpoint does not fit ({describe(error).splitlines()[0]})") from error

    def check_optimizer(self):
        """load_state_dict compares no shapes, and takes a missing state for a new one. There is none at all while
        float16 skips its first updates."""
        for name, parameter in self.raw_model.named_parameters() if self.optimizer.state else ():
            state = self.optimizer.state.get(parameter, {})
            for key in ("exp_avg", "exp_avg_sq"):
                if state[key].shape != parameter.shape:
                    raise ValueError(f"the optimizer's {key} of {name} is of shape {tuple(state[key].shape)}")

    def rng(self):
        on_gpu = self.device.type == "cuda"
        return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state(self.device) if on_gpu else None}

    def set_rng(self, state):
        torch.set_rng_state(state["cpu"])
        if self.device.type == "cuda" and state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"], self.device)

    def save(self, name):
        """All processes call it; the master writes."""
        rng = self.world.gather(self.rng())
        if self.world.rank:
            return
        folder = Path(self.settings.out_dir)
        state = {
            "model": self.raw_model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "model_args": dataclasses.asdict(self.raw_model.config),
            "meta": self.description,
            "iter_num": self.iteration,
            "best_val_loss": self.best_val_loss,
            "position": self.position,
            "rng": rng,
            "config": dataclasses.asdict(self.settings),
        }
        checkpoint.save(folder / name, state)
        if name == checkpoint.NAME:
            (folder / checkpoint.INTERRUPTED).unlink(missing_ok=True)
        print(f"saved {folder / name}", flush=True)

    def autocast(self):
        return torch.autocast(self.device.type, DTYPES[self.dtype], enabled=self.dtype != "float32")

    def fetch(self, batches, number):
        inputs, targets = (torch.from_numpy(array).contiguous() for array in batches[number])
        if self.device.type != "cuda":
            return inputs.to(self.device), targets.to(self.device)
        return [t.pin_memory().to(self.device, non_blocking=True) for t in (inputs, targets)]

    def step(self, stopped=lambda: False):
        """One iteration. Returns the loss of this process's batches, not synced; None if it was stopped, and the state
        is that of before."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.settings, self.iteration)
        numbers = range(self.position + self.world.rank, self.position + self.count * self.world.size, self.world.size)
        batches = (self.fetch(self.train_batches, number) for number in numbers)
        trained = self.model, self.optimizer, self.scaler
        rng = self.rng()
        loss = optimizer_step(*trained, batches, self.count, self.autocast, self.settings.grad_clip, stopped)
        if loss is None:
            self.set_rng(rng)
            return None
        self.iteration += 1
        self.position += self.count * self.world.size
        return loss

    @torch.no_grad()
    def evaluate(self, stopped=lambda: False):
        """{split: mean loss} over the same batches every time, shared among the processes; None if it was stopped."""
        self.model.eval()
        losses = {split: self.mean_loss(batches, stopped) for split, batches in self.eval_batches.items()}
        self.model.train()
        return None if None in losses.values() else losses

    def synchronize(self):
        """Waits for the GPU; UsageError if another process keeps it waiting. NCCL itself would end with a core dump."""
        if self.world.size > 1 and self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self.world.wait_for(event)

    def mean_loss(self, batches, stopped):
        total = torch.zeros((), device=self.device)
        count, world = self.settings.eval_iters, self.world
        for first in range(0, count, world.size):  # all processes ask stopped() as often as each other
            if stopped():
                return None
            if first + world.rank < count:
                inputs, targets = self.fetch(batches, first + world.rank)
                with self.autocast():
                    _, loss = self.model(inputs, targets)
                total += loss
        return world.mean([total.item()])[0] * world.size / count


# ----------------------------------------------------------------------------------------------------------------------
# The run


@contextlib.contextmanager
def stop_on_signals(world):
    """Until its end, Ctrl-C and SIGTERM only ask for a stop, and a second one after two seconds ends the process.

    Yields a function that says whether a process was asked: all of them call it at the same places.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    world.handle_signals()
    try:
        yield lambda: world.any(world.stop_requested is not None)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Log:
    """The losses since the last line, read from the device only when a line is due."""

    def __init__(self, trainer, start):
        self.trainer, self.losses, self.start = trainer, [], time.perf_counter()
        self.saved_at = trainer.iteration if start == "resume" else None  # the iteration of the newest checkpoint
        self.mfu = -1.0  # of the last line

    def settle(self):
        """The last loss, the mean over the processes; raises Diverged if one of them all was no number."""
        if not self.losses:
            return None
        self.trainer.synchronize()
        losses = self.trainer.world.mean(torch.stack(self.losses).tolist())
        for offset, loss in enumerate(losses):
            if not math.isfinite(loss):
                number = self.trainer.iteration - len(losses) + offset
                saved = f"iteration {self.saved_at} is saved" if self.saved_at is not None else "none was saved"
                raise Diverged(f"the loss of iteration {number} is {loss}: of the checkpoints, {saved}")
        self.losses.clear()
        return losses[-1]

    def line(self):
        number = len(self.losses)
        loss = self.settle()
        trainer = self.trainer
        seconds = (time.perf_counter() - self.start) / number
        self.mfu = trainer.raw_model.estimate_mfu(trainer.settings.batch_size * trainer.count, seconds)
        if trainer.world.rank == 0:
            speed = f"time {seconds * 1e3:.2f}ms, mfu {100 * self.mfu:.2f}%"
            print(f"iter {trainer.iteration - 1}: loss {loss:.4f}, {speed}", flush=True)
        self.start = time.perf_counter()
        return loss


def start_wandb(settings):
    try:
        import wandb
    except ImportError:
        raise UsageError("wandb_log=True needs a library: pip install wandb, or give --wandb_log=False") from None
    try:
        wandb.init(project=settings.wandb_project, name=settings.wandb_run_name, config=dataclasses.asdict(settings))
    except wandb.Error as error:
        remedy = "set WANDB_MODE=offline in the environment, or give --wandb_log=False"
        raise UsageError(f"wandb_log=True: {' '.join(str(error).split())}: {remedy}") from error
    return wandb.log


def train(settings, world):
    """Returns the exit code of one of the processes of a World."""
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the library is loaded
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # our kernels write all that they allocate
    torch.set_float32_matmul_precision("high")
    device = join(world, settings)
    with contextlib.ExitStack() as stack:
        if world.rank == 0:
            tokens = settings.gradient_accumulation_steps * settings.batch_size * settings.block_size
            print(f"tokens per iteration will be: {tokens:,}")
            if not settings.eval_only:
                stack.enter_context(checkpoint.claimed(settings.out_dir))
        report = start_wandb(settings) if settings.wandb_log and world.rank == 0 else None
        trainer = Trainer(settings, world, device)
        stack.enter_context(preferred_attention(device, settings.deterministic))
        return run(trainer, stack.enter_context(stop_on_signals(world)), report)


def run(trainer, stopped, report):
    settings, world = trainer.settings, trainer.world
    log = Log(trainer, settings.init_from)
    while True:
        number = trainer.iteration
        if number % settings.eval_interval == 0 or number == settings.max_iters or settings.eval_only:
            log.settle()
            losses = trainer.evaluate(stopped)
            if losses is None:
                return interrupted(trainer, log)
            if world.rank == 0:
                found = f"train loss {losses['train']:.4f}, val loss {losses['val']:.4f}"
                print(f"step {trainer.iteration}: {found}", flush=True)
                if report:
                    rate = learning_rate(settings, trainer.iteration)
                    figures = {"iter": trainer.iteration, "lr": rate, "mfu": 100 * log.mfu}
                    report(figures | {f"{split}/loss": loss for split, loss in losses.items()})
            if not all(map(math.isfinite, losses.values())):
                log.losses = [torch.tensor(losses["train"] + losses["val"])]
                log.settle()
            improved = losses["val"] < trainer.best_val_loss
            trainer.best_val_loss = min(losses["val"], trainer.best_val_loss)
            # A run that was interrupted in its evaluation makes up for it when it is resumed.
            due = improved or settings.always_save_checkpoint and log.saved_at != trainer.iteration
            if due and trainer.iteration > 0 and not settings.eval_only:
                trainer.save(checkpoint.NAME)
                log.saved_at = trainer.iteration
            if settings.target_loss and losses["val"] <= settings.target_loss:
                break
            log.start = time.perf_counter()
        if settings.eval_only:
            break
        loss = trainer.step(stopped)
        if loss is not None:
            log.losses.append(loss)
            if (trainer.iteration - 1) % settings.log_interval == 0:
                log.line()
        if trainer.iteration > settings.max_iters:  # as nanoGPT, which leaves the last update unsaved as well
            log.settle()
            break
        if loss is None or stopped():
            return interrupted(trainer, log)
    if world.rank == 0:
        print(f"best validation loss {trainer.best_val_loss:.4f} in {trainer.iteration} iterations")
    if settings.target_loss and trainer.best_val_loss > settings.target_loss:
        if world.rank == 0:
            print(f"target_loss={settings.target_loss} was not reached", file=sys.stderr)
        return 1
    return 0


def interrupted(trainer, log):
    """Saves what is new since the last checkpoint. Returns the exit code."""
    log.settle()
    if trainer.iteration > (log.saved_at or 0):
        trainer.save(checkpoint.NAME if trainer.settings.always_save_checkpoint else checkpoint.INTERRUPTED)
        log.saved_at = trainer.iteration
    if trainer.world.rank == 0:
        if log.saved_at is None:
            text = "interrupted before the first iteration was done: nothing was saved"
        else:
            text = f"interrupted after iteration {trainer.iteration - 1}; --init_from=resume goes on from here"
        print(text, flush=True)
    return 130


@contextlib.contextmanager
def remedies(settings):
    """Raises UsageError where the memory does not suffice for the settings, or torch.compile fails."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            remedy = "halve batch_size and double gradient_accumulation_steps, or " if settings.batch_size > 1 else ""
            names = "batch_size", "block_size", "n_layer", "n_embd"
            given = ", ".join(f"{name}={getattr(settings, name)}" for name in names)
            message = f"out of memory with {given}: {remedy}give a smaller model"
        elif type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            message = f"torch.compile failed ({str(error).strip().splitlines()[0]}): --compile=False does without"
        else:
            raise
        raise UsageError(message) from error


def configure_and_train(argv, world):
    settings, given = configure(Settings, argv, __doc__)
    if given:
        print("overriding: " + ", ".join(f"{key} = {value!r}" for key, value in given.items()))
    with remedies(settings):
        return train(settings, world)


@program("train.py")
def main(argv):
    return run_together(lambda world: configure_and_train(argv, world), "train.py")


if __name__ == "__main__":
    sys.exit(main())
