#!/usr/bin/env python3
"""Train a GPT, as nanoGPT does, on Triton kernels.

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
import functools
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":  # not this folder, whose kernels would hide the library that transformers looks for
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import tiny_llama_v3 as llama  # noqa: E402  (the repository must be on the path)
from measure.command_line import UsageError, program  # noqa: E402
from nanogpt_triton import checkpoint, flat_adamw  # noqa: E402
from nanogpt_triton.configurator import Count, Share, configure  # noqa: E402
from nanogpt_triton.dataset import DATA, SPLITS, Batches, library, read_texts, reading  # noqa: E402
from nanogpt_triton.model import GPT, GPT2_SIZES, GPTConfig  # noqa: E402
from tiny_llama.distributed import run_together  # noqa: E402
from tiny_llama.hardware import host_memory_bytes, is_out_of_memory  # noqa: E402
from tiny_llama.notes import lone_process  # noqa: E402
from tiny_llama.profiler import attached_profiler, named_range  # noqa: E402

WARM_UP_PASSES = 3  # before a capture: the first compile kernels and initialize libraries
TIMEOUT = 600  # seconds that processes wait for each other, to write, for example


@dataclasses.dataclass(frozen=True)
class Settings:
    # output
    out_dir: str = "out"  # folder of the checkpoints
    eval_interval: Count = 2000  # iterations between evaluations; a checkpoint may follow each
    log_interval: Count = 1  # iterations between lines of the log
    eval_iters: Count = 200  # batches of each split that an evaluation takes
    eval_only: bool = False  # evaluate once, and end
    always_save_checkpoint: bool = True  # after every evaluation, not only at the best validation loss
    init_from: Literal[("scratch", "resume", *GPT2_SIZES)] = "scratch"  # or resume, gpt2, gpt2-medium, -large, -xl
    target_loss: float = 0.0  # end at a validation loss this low, and fail if it is not reached; 0: no target
    wandb_log: bool = False  # report to Weights & Biases
    wandb_project: str = "owt"
    wandb_run_name: str = "gpt2"
    # data
    dataset: str = "openwebtext"  # a folder of data/, prepared by its prepare.py
    data_dir: str = ""  # where the folders of datasets lie; default: data/ beside train.py
    gradient_accumulation_steps: Count = 40  # batches an iteration, those of all processes together
    batch_size: Count = 12  # sequences a batch
    block_size: Count = 1024  # tokens a sequence
    # model
    n_layer: Count = 12  # transformer blocks
    n_head: Count = 12  # attention heads
    n_embd: Count = 768  # width
    dropout: Share = 0.0  # of the activations
    bias: bool = False  # in linear layers and norms
    layer_norm: Literal["auto", "triton", "torch"] = "auto"  # triton, torch; auto: Triton's if it runs
    attention: Literal["auto", "triton", "torch"] = "auto"  # as layer_norm; with dropout PyTorch's
    gelu: Literal["auto", "triton", "torch"] = "auto"  # as layer_norm
    fused_loss: Literal["auto", "on", "off"] = "auto"  # by a kernel that overwrites the logits; not in float16
    # optimizer: AdamW
    flat_adamw: Literal["auto", "on", "off"] = "auto"  # in one launch; of one process, and not in float16
    learning_rate: float = 6e-4  # at its highest
    max_iters: int = 600000  # the last iteration, counted from 0
    weight_decay: float = 1e-1  # of matrices and embeddings
    beta1: Share = 0.9
    beta2: Share = 0.95
    grad_clip: float = 1.0  # largest norm of the gradient; 0: any
    decay_lr: bool = True  # warm up and decay the learning rate along a cosine
    warmup_iters: int = 2000  # iterations of warm-up
    lr_decay_iters: int = 600000  # iteration at which min_lr is reached
    min_lr: float = 6e-5  # learning rate at the end
    # system
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # nccl, gloo; auto: nccl on GPUs
    device: str = "auto"  # cpu, cuda, cuda:1, ...; auto: cuda if there is one, otherwise cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: by the GPU
    graph: Literal["auto", "on", "off"] = "auto"  # replay a CUDA graph; auto: if loss, norms, attention, AdamW are ours
    compile: Literal["auto", True, False] = "auto"  # torch.compile the model; auto: if it is not in a graph
    deterministic: bool = False  # the same bits in every run on a GPU too, at some cost
    seed: int = 1337  # of weights, batches and dropout


class Failed(Exception):
    """The loss is no number any more, or not as low as it should be."""

    exit_code = 1


# ----------------------------------------------------------------------------------------------------------------------
# The processes that train together, and the device of this one


def join(world, settings):
    """Connect to the other processes of a World, and return the torch.device of this one."""
    device = select_device(settings.device, world.local_rank, world.size)
    world.join(device, TIMEOUT, None if settings.backend == "auto" else settings.backend)
    # Only rank 0 uses the name of the run, which may hold the time.
    world.require_same(dataclasses.replace(settings, wandb_run_name=""), flag_of=str)
    return device


def select_device(requested, local_rank, world_size):
    """Return the torch.device that was asked for, of several processes each its own GPU; UsageError if it fails."""
    if requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    if requested.startswith("cuda") and world_size > 1:
        requested = f"cuda:{local_rank}"
    with reading(f"device={requested}", "give auto, cpu, cuda or cuda:N"):
        tensor = torch.zeros(1, device=requested)  # an error if there is no such device, whatever its kind
        tensor.item()  # or if it holds no numbers, as "meta"
    if tensor.device.type == "cuda":
        torch.cuda.set_device(tensor.device)
    return tensor.device


def select_dtype(requested, device):
    """Return the type of autocast. float16 has the fp32 accumulation of bfloat16, but needs a scaler."""
    if requested != "auto":
        return getattr(torch, requested)
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


@contextlib.contextmanager
def remedied(settings):
    """Raise UsageError where memory is not enough for a run."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # The end of a failed capture raises an error of its own.
        if not is_out_of_memory(error) and not is_out_of_memory(error.__context__):
            raise
        names = "batch_size", "block_size", "n_layer", "n_embd"
        given = ", ".join(f"{name}={getattr(settings, name)}" for name in names)
        remedy = "lower one of them; half the batch_size with twice the gradient_accumulation_steps trains the same"
        raise UsageError(f"out of memory with {given}: {remedy}") from error


def require_host_memory(config, batch_size):
    """Raise MemoryError if the weights, or an activation, are larger than the memory of this machine, which trains.

    The system may grant more than it has, and end the process when that is full.
    """
    weights = (12 * config.n_layer * config.n_embd + config.block_size) * config.n_embd
    if 4 * max(weights, batch_size * config.block_size * config.n_embd) > host_memory_bytes():  # in fp32
        raise MemoryError


def preferred_attention(device, deterministic):
    """Prefer cuDNN's attention on Hopper and later: it is mostly faster, but not the same bits in each run."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (9, 0) or deterministic:
        return contextlib.nullcontext()
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


# ----------------------------------------------------------------------------------------------------------------------
# One iteration


def add_gradients(model, optimizer, inputs, targets):
    """Run forward and backward of a batch for a GPTAdamW. Return its loss.

    Its gradients add to those of the other micro-batches, if there are any, else they are the gradients.
    """
    if optimizer.accumulate == 1:
        optimizer.zero_grad()
    _, loss = model(inputs, targets)
    with torch.autograd.set_multithreading_enabled(False):  # handing over to autograd's thread takes time
        loss.backward()
    optimizer.collect_gradients(optimizer.parameters)
    return loss.detach()


def capture(work):
    """Return a function that launches the kernels of work() again, and a result that each of its calls overwrites.

    work() returns a tensor, and runs some times before the kernels are captured in a CUDA graph.
    """
    torch.cuda.synchronize()  # the side stream does not wait for what the tensors contain
    with torch.cuda.stream(torch.cuda.Stream()):  # the default stream's work cannot be captured
        for _ in range(WARM_UP_PASSES):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        result = work()
    return graph.replay, result


class CapturedPass:
    """add_gradients() of a GPTAdamW's model and batches of one shape, replayed from a CUDA graph."""

    def __init__(self, model, optimizer, shape, device):
        self.inputs, self.targets = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2))
        optimizer.zero_grad()  # the graph adds to what is .grad now; the next iteration begins with zeros again
        self.replay, self.loss = capture(functools.partial(add_gradients, model, optimizer, self.inputs, self.targets))

    def __call__(self, inputs, targets):
        """Return the loss of a batch."""
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        self.replay()
        return self.loss.clone()


def flat_step(run_pass, optimizer, batches):
    """Call run_pass(inputs, targets) for the batches of a GPTAdamW's step, and update. Return the mean of its losses.

    run_pass is add_gradients() of a model and its optimizer, or a CapturedPass.
    """
    if optimizer.accumulate > 1:
        optimizer.zero_grad()
    total = 0.0
    for inputs, targets in batches:
        total = total + run_pass(inputs, targets)
    optimizer.step()
    return total / optimizer.accumulate


def optimizer_step(model, optimizer, scaler, batches, count, autocast, grad_clip):
    """Run forward and backward of `count` batches (inputs, targets), and the update. Return their mean loss.

    The next batch is fetched while the device works on the one before.
    """
    total = 0.0
    for index, (inputs, targets) in enumerate(batches):
        # DistributedDataParallel exchanges the gradients of an iteration once, in its last backward pass.
        is_last = index == count - 1
        with contextlib.nullcontext() if is_last or not hasattr(model, "no_sync") else model.no_sync():
            with autocast():
                _, loss = model(inputs, targets)
            loss = loss / count
            scaler.scale(loss).backward()
        total = total + loss.detach()
    if grad_clip:
        # float16's gradients are scaled up, the limit is not.
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return total


def learning_rate(settings, iteration):
    """Return the learning rate of an iteration: linear warm-up, then half a cosine down to min_lr."""
    if not settings.decay_lr:
        return settings.learning_rate
    limits = settings.learning_rate, settings.min_lr, settings.warmup_iters, settings.lr_decay_iters
    return llama.cosine_rate(iteration, *limits)


def is_on(name, choice, reason, device):
    """Return whether a setting "on", "off" or "auto", on a GPU, is on; UsageError if it was asked for in vain.

    reason: in words why it cannot be, or None.
    """
    if choice == "on" and reason:
        raise UsageError(f"{name}=on: {reason}: use {name}=auto")
    return choice == "on" or choice == "auto" and device.type == "cuda" and not reason


def graph_obstacle(settings, device, is_flat):
    """Return in words why forward and backward cannot be captured in a CUDA graph, or None if they can."""
    if device.type != "cuda":
        return "it needs a GPU"
    if not is_flat:
        return "it adds to gradients of FlatAdamW, which is not used"
    return "a model is captured or compiled, and compile=True" if settings.compile is True else None


class Trainer:
    """Model, optimizer and data, and what a checkpoint holds of them."""

    def __init__(self, settings, world, device):
        self.settings, self.world, self.device = settings, world, device
        self.count, rest = divmod(settings.gradient_accumulation_steps, world.size)
        if rest:
            steps = f"gradient_accumulation_steps={settings.gradient_accumulation_steps}"
            raise UsageError(f"{steps} is not divisible by {world.size} processes: give a multiple")
        self.dtype = select_dtype(settings.dtype, device)
        reason = flat_adamw.obstacle(device, self.dtype, world.size, self.count)
        self.is_flat = is_on("flat_adamw", settings.flat_adamw, reason, device)
        why_not = f": {reason}" if settings.flat_adamw == "auto" and reason else ""
        print("using FlatAdamW" if self.is_flat else f"using PyTorch's AdamW{why_not}")
        self.iteration, self.best_val_loss = 0, math.inf
        self.loss = 0.0  # of the last iteration, still on the device

        folder = Path(settings.data_dir or DATA, settings.dataset)
        self.texts, state = read_texts(folder), None
        if settings.init_from == "resume":
            path = checkpoint.find(settings.out_dir, newest=True)
            state = checkpoint.load(path)
            checkpoint.check_tokens(state, self.texts)
        torch.manual_seed(settings.seed)
        self.raw_model = self.make_model(state)
        for name, value in vars(self.raw_model.config).items():
            if getattr(settings, name, value) != value:
                print(f"the weights decide: {name} = {value!r}")

        def batches(split, seed):
            config = self.raw_model.config
            return Batches(folder, split, settings.batch_size, config.block_size, seed, config.vocab_size)

        self.train_batches = batches("train", settings.seed)
        self.eval_batches = {split: batches(split, settings.seed + 1) for split in SPLITS}

        if state:
            with reading(path, "give another out_dir"):
                self.raw_model.load_state_dict(state["model"])
        self.model = self.raw_model
        reason = graph_obstacle(settings, device, self.is_flat)
        # What is PyTorch's gains more from torch.compile.
        is_worth_it = self.raw_model.is_ours or settings.graph == "on"
        self.is_captured = is_on("graph", settings.graph, reason, device) and is_worth_it
        if self.is_captured:
            print("captured in a CUDA graph; not compiled")
        if world.size > 1:
            ids = [device.index] if device.type == "cuda" else None
            options = dict(device_ids=ids, gradient_as_bucket_view=True, bucket_cap_mb=100)
            self.model = DistributedDataParallel(self.raw_model, **options)
        # torch.compile cuts its graphs between the buckets of gradients, so that their exchange overlaps the backward
        # pass. Large buckets leave large graphs.
        if settings.compile and not self.is_captured:
            self.model = torch.compile(self.model)
        # After the wrappers: FlatAdamW lets nobody change the model.
        self.optimizer = self.make_optimizer()
        self.run_pass = functools.partial(add_gradients, self.model, self.optimizer)  # of a flat_step()
        # FlatAdamW has the weights in the type of the products.
        needs_autocast = self.dtype != torch.float32 and not self.is_flat
        self.autocast = functools.partial(torch.autocast, device.type, self.dtype, enabled=needs_autocast)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)
        if state:
            with reading(path, "give another out_dir"):
                self.restore(state)

    def make_model(self, state):
        """Return the model: a checkpoint's, one of OpenAI's, or a new one."""
        settings, where = self.settings, dict(device=self.device)
        where |= {name: getattr(settings, name) for name in ("layer_norm", "attention", "gelu")}
        reason = llama.triton_obstacle(self.device)
        if self.dtype == torch.float16:
            reason = reason or "gradients of the logits are too small for float16"
        where["fused_loss"] = is_on("fused_loss", settings.fused_loss, reason, self.device)
        if state:
            return GPT(dataclasses.replace(state["model_args"], dropout=settings.dropout), **where)
        if settings.init_from in GPT2_SIZES:
            checkpoint.check_tokens({"model_args": GPTConfig()}, self.texts)
            model = GPT.from_pretrained(settings.init_from, dict(dropout=settings.dropout), **where)
            model.crop_block_size(min(settings.block_size, model.config.block_size))
            return model
        names = "block_size", "n_layer", "n_head", "n_embd", "dropout", "bias"
        vocab_size = len(self.texts) if self.texts else GPTConfig.vocab_size
        config = GPTConfig(vocab_size=vocab_size, **{name: getattr(settings, name) for name in names})
        if self.device.type == "cpu":
            require_host_memory(config, settings.batch_size)
        return GPT(config, **where)

    def make_optimizer(self):
        """Return the optimizer: FlatAdamW, which takes over the model, or PyTorch's AdamW, with the same groups."""
        settings, betas = self.settings, (self.settings.beta1, self.settings.beta2)
        adamw = self.raw_model.configure_optimizers(settings.weight_decay, settings.learning_rate, betas)
        if not self.is_flat:
            return adamw
        low_precision = self.dtype == torch.bfloat16
        return flat_adamw.GPTAdamW(self.raw_model, adamw, low_precision, settings.grad_clip or None, self.count)

    def capture(self):
        """Let iterations replay a CUDA graph from now on, if they are to."""
        if self.is_captured:
            shape = self.settings.batch_size, self.raw_model.config.block_size
            self.run_pass = CapturedPass(self.model, self.optimizer, shape, self.device)

    def restore(self, state):
        """Continue where a checkpoint was saved, with the hyperparameters of these settings."""
        for group, own in zip(state["optimizer"]["param_groups"], self.optimizer.param_groups, strict=True):
            group.update(own, params=group["params"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.iteration, self.best_val_loss = state["iter_num"], float(state["best_val_loss"])

    def save(self, name):
        """Write the state after the last whole iteration; the first process does."""
        if self.world.rank:
            return
        folder = Path(self.settings.out_dir)
        state = {
            "model": (self.optimizer.model_state if self.is_flat else GPT.state_dict)(self.raw_model),
            "optimizer": self.optimizer.state_dict(),
            "model_args": dataclasses.asdict(self.raw_model.config),
            "meta": {"characters": self.texts},
            "iter_num": self.iteration,
            "best_val_loss": self.best_val_loss,
            "config": dataclasses.asdict(self.settings),
        }
        checkpoint.save(folder / name, state)
        if name == checkpoint.NAME:
            (folder / checkpoint.INTERRUPTED).unlink(missing_ok=True)
        print(f"saved {folder / name}", flush=True)

    def fetch(self, batches, number):
        """Return a batch on the device; KeyboardInterrupt if a process was asked to stop, in all at the same batch."""
        if self.world.must_stop():
            raise KeyboardInterrupt
        tensors = [torch.from_numpy(array).contiguous() for array in batches[number]]
        if self.device.type == "cuda":
            tensors = [tensor.pin_memory() for tensor in tensors]  # the copy goes on beside the kernels
        return [tensor.to(self.device, non_blocking=True) for tensor in tensors]

    def step(self):
        """Run one iteration."""
        settings, world = self.settings, self.world
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(settings, self.iteration)
        # Batches and dropout follow from the number of the iteration, so that a resumed run has them again. Each
        # process takes its share of the batches: together they compute what one would.
        torch.manual_seed(hash((settings.seed, self.iteration, world.rank)))  # numbers have the same hash everywhere
        first = self.iteration * settings.gradient_accumulation_steps
        numbers = range(first + world.rank, first + settings.gradient_accumulation_steps, world.size)
        batches = (self.fetch(self.train_batches, number) for number in numbers)
        if self.is_flat:
            self.loss = flat_step(self.run_pass, self.optimizer, batches)
        else:
            trained = self.model, self.optimizer, self.scaler
            self.loss = optimizer_step(*trained, batches, self.count, self.autocast, settings.grad_clip)
        self.iteration += 1

    @torch.no_grad()
    def evaluate(self):
        """Return {split: mean loss} over the same batches every time, shared among the processes."""
        count, world, means = self.settings.eval_iters, self.world, {}
        self.model.eval()
        for split, batches in self.eval_batches.items():
            total = 0.0
            for number in range(world.rank, count + world.rank, world.size):
                # All processes fetch as often as each other. What is beyond the count is left out.
                inputs, targets = self.fetch(batches, number)
                with self.autocast():
                    _, loss = self.model(inputs, targets)
                total += loss * (number < count)
            means[split] = world.mean([float(total)])[0] * world.size / count
        self.model.train()
        return means

    def settle(self, *evaluated):
        """Wait for the device. Return the loss of the last iteration, the mean over the processes.

        Failed if it, or what was evaluated after it, is no number: then the weights are none either.
        """
        (loss,) = self.world.mean([float(self.loss)])
        if not all(map(math.isfinite, (loss, *evaluated))):
            raise Failed(f"the loss after {self.iteration} iterations is no number: resume from the last checkpoint")
        return loss


# ----------------------------------------------------------------------------------------------------------------------
# The run


def train(argv, world):
    """Return the exit code of one of the processes of a World."""
    settings = configure(Settings, argv, __doc__)
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the library is loaded
        torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high")
    device = join(world, settings)
    with reading(f"out_dir={settings.out_dir}", "give another"):
        Path(settings.out_dir).mkdir(parents=True, exist_ok=True)
    report = None
    if settings.wandb_log and world.rank == 0:
        wandb = library("wandb", "wandb_log=True")
        wandb.init(project=settings.wandb_project, name=settings.wandb_run_name, config=dataclasses.asdict(settings))
        report = wandb.log
    for line in lone_process():
        print(f"Note: {line}")
    with remedied(settings):
        trainer = Trainer(settings, world, device)
    tokens = settings.gradient_accumulation_steps * settings.batch_size * trainer.raw_model.config.block_size
    print(f"tokens per iteration will be: {tokens:,}")
    start = trainer.iteration
    # From here on, Ctrl-C and SIGTERM only ask for the end, which comes before the next batch is fetched.
    world.handle_signals()
    try:
        with remedied(settings), preferred_attention(device, settings.deterministic):
            return run(trainer, report)
    except KeyboardInterrupt:
        trainer.settle()
        if trainer.iteration > start:
            trainer.save(checkpoint.NAME if settings.always_save_checkpoint else checkpoint.INTERRUPTED)
            print(f"interrupted after iteration {trainer.iteration - 1}; --init_from=resume goes on from here")
        return 130


def run(trainer, report):
    """Train as nanoGPT does, until max_iters or target_loss. Return the exit code."""
    settings, start, mfu = trainer.settings, time.perf_counter(), -1.0
    first, show_range = trainer.iteration, named_range if attached_profiler() else contextlib.nullcontext
    timed = 0  # iterations since start
    if not settings.eval_only:
        trainer.capture()
    while True:
        number = trainer.iteration
        if number % settings.eval_interval == 0 or number == settings.max_iters or settings.eval_only:
            means = trainer.evaluate()
            print(f"step {number}: train loss {means['train']:.4f}, val loss {means['val']:.4f}", flush=True)
            trainer.settle(*means.values())
            if report:
                losses = {f"{split}/loss": loss for split, loss in means.items()}
                report({"iter": number, "lr": learning_rate(settings, number), "mfu": 100 * mfu, **losses})
            # The untrained model of iteration 0 is worth no checkpoint.
            is_best = means["val"] < trainer.best_val_loss
            trainer.best_val_loss = min(means["val"], trainer.best_val_loss)
            if (is_best or settings.always_save_checkpoint) and number and not settings.eval_only:
                trainer.save(checkpoint.NAME)
            if settings.eval_only or means["val"] <= settings.target_loss:
                break
            start, timed = time.perf_counter(), 0
        is_logged = number % settings.log_interval == 0
        # For the reports of profilers, in which the first iteration, which compiles, is no step.
        with show_range("step" if number > first else "first step"):
            trainer.step()
            if is_logged:
                loss = trainer.settle()  # waits for the device
        timed += 1
        if is_logged:
            # The time of an iteration is the mean since the last line.
            seconds = (time.perf_counter() - start) / timed
            start, timed = time.perf_counter(), 0
            mfu = trainer.raw_model.estimate_mfu(settings.batch_size * trainer.count, seconds)
            print(f"iter {number}: loss {loss:.4f}, time {seconds * 1e3:.2f}ms, mfu {100 * mfu:.2f}%", flush=True)
        if trainer.iteration > settings.max_iters:  # as nanoGPT, which leaves the last update unsaved as well
            break
    print(f"best validation loss {trainer.best_val_loss:.4f} in {trainer.iteration} iterations")
    if trainer.best_val_loss > settings.target_loss > 0:
        raise Failed(f"target_loss={settings.target_loss} was not reached")
    return 0


@program("train.py")
def main(argv):
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: at once, until the training begins
    return run_together(lambda world: train(argv, world), "train.py")


if __name__ == "__main__":
    sys.exit(main())
