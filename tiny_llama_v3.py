#!/usr/bin/env python3
"""Train a tiny LLaMA on Triton kernels, forward and backward, and report what a training step costs.

    python tiny_llama_v3.py --batch-size 8 --seq-len 128 --num-steps 20
    python tiny_llama_v3.py --use-amp --graph          bf16, the step captured in CUDA/HIP graphs
    python tiny_llama_v3.py --data markov              data that can be learnt, and the lowest loss possible
    python tiny_llama_v3.py --data README_WORKSHOP.md  the bytes of a text, of which it then continues a passage
    python tiny_llama_v3.py --impl sdpa --compile      the same model, weights and data on PyTorch alone
    python tiny_llama_v3.py --save FOLDER              keep the trained model: --resume FOLDER goes on from there
    python tiny_llama_v3.py --check --num-steps 1      compare loss and gradients with PyTorch in higher precision
    python tiny_llama_v3.py --stage 4                  a mistake of the workshop (--list-stages lists them)
    torchrun --standalone --nproc_per_node=4 tiny_llama_v3.py --use-amp --graph

A run prints a line per step, beyond the 50th every ten steps, and a summary. Both go to a JSON file, with every step,
whose path it prints last.
The file needs torch, triton and numpy, and runs without the rest of the project. The modules in tiny_llama/ add groups
of layers, which take the host less time, kernels for Hopper, and what only some runs need: data to learn, several
processes, FP8, saved models, profiles, an audit of gradients, peaks and sensors of GPUs, notes about flags.
Exit codes: 0 success; 1 a check failed, or the run diverged (a loss or gradient norm is not finite); 2 the request
cannot be met or a file cannot be written (one line gives the reason); 130 interrupted by Ctrl-C or SIGTERM (the steps
done so far are saved); 141 the reader of the output closed the pipe.

One training step, from the loop down:

    train()      for each batch:  tokens, targets
                      |
    forward      embedding -> [RMSNorm -> attention -> RMSNorm -> SwiGLU] -> RMSNorm -> head -> cross-entropy
                      |         times layers
    backward     the same operations from right to left; each gradient of a weight is written into one flat buffer
                      |
                      |         --accumulate N: forward and backward of N micro-batches, whose gradients add up there
    optimizer    one AdamW kernel reads that buffer and updates all weights
                                --clip NORM: it multiplies the gradients with a factor that a norm before it has set

Sections: 1 the loop, 2 the step, 3 the model; then what these call: 4 launching kernels, 5 linear, 6 RMSNorm,
7 attention, 8 SwiGLU, 9 embedding and loss, 10 AdamW; last 11 the check of the results, 12 the figures, 13 a run.

Words:

    phase       forward, backward or optimizer; with --graph each is a captured graph, and a replay repeats its kernels
                on the same memory
    operations  the functions that compute a model: our kernels (triton_*), or PyTorch's (torch_*, sdpa_*)
    library     PyTorch, and what multiplies matrices for it: cuBLAS, hipBLASLt
    branch      what attention or SwiGLU computes, to be added to the residual stream: the next norm adds it, whose
                kernel reads the stream anyway
    main_grad   a weight's part of the flat buffer of gradients
    micro-batch what one forward pass takes: batch-size sequences. A step has one of them, or --accumulate
    world       the processes that train together; OneProcess where there is one
    bucket      weights whose gradients several processes send in one message; one process has one bucket
    LayerStack  the layers as you read them, called one by one. By default a step has LayerGroups in its place, from
                tiny_llama/groups.py: the same kernels in the same order, several layers as one autograd.Function

The loss kernel already writes the gradient of the logits, over the logits, in the forward phase: it has the
probabilities at hand then.
"""

import argparse
import collections
import contextlib
import dataclasses
import errno
import functools
import gc
import importlib
import itertools
import json
import math
import os
import platform
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple


def refuse_to_start(reason):
    """End the program with a line that names the remedy."""
    print(f"{Path(sys.argv[0]).name}: error: {reason}", file=sys.stderr)
    sys.exit(2)


def require_current_folder():
    """End the program if its current folder has been deleted, where PyTorch's libraries end it without a word."""
    try:
        os.getcwd()
    except FileNotFoundError:
        refuse_to_start("the current folder has been deleted: change to one that exists, as with cd")


if __name__ == "__main__":
    require_current_folder()
try:
    import numpy as np
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
except ModuleNotFoundError as error:
    remedy = "load the module that has it, or make run, or pip install numpy torch"
    reason = f"tiny_llama_v3 needs numpy and torch, and {error.name} is missing: {remedy}"
    if __name__ == "__main__":
        refuse_to_start(reason)
    raise ModuleNotFoundError(reason) from None

# After Triton 3.9, the compiler fuses a product and a sum into one instruction only if asked to. Kernels without that
# have 3 to 8 % more instructions.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
try:
    import triton
    import triton.language as tl
except ImportError:  # macOS, Windows, a CPU-only PyTorch: the kernels remain plain functions that nothing calls
    triton = None
    tl = SimpleNamespace(constexpr=float)  # all of it that is used outside of kernels


def jit(kernel=None, **options):
    """Return triton.jit of a kernel, as a decorator with or without options; without Triton the function as it is."""
    if kernel is None:
        return functools.partial(jit, **options)
    return triton.jit(kernel, **options) if triton else kernel


__version__ = "3.0.0"
__all__ = (
    "Config TinyLlamaTriton TrainStep TransformerBlock TritonAttention TritonRMSNorm TritonSwiGLU UsageError "
    "main triton_attention triton_cross_entropy triton_embedding triton_linear triton_rmsnorm triton_swiglu"
).split()


class UsageError(Exception):
    """The request cannot be met. The message names the flag, the values and the remedy."""

    exit_code = 2


# ----------------------------------------------------------------------------------------------------------------------
# Configuration: a frozen dataclass, from whose fields the command line is generated

LARGEST = 2**31 - 1  # kernels count in 32 bits
FP32 = torch.finfo(torch.float32)  # the optimizer computes in fp32
LEAST_RATE = 0.1  # of --learning-rate, at the end of --schedule cosine
HELP_GROUPS = {  # the first field of each group of --help
    "hidden_dim": "model",
    "batch_size": "training",
    "init_from": "models in folders",
    "impl": "implementation",
    "shard": "several processes",
    "timing": "measuring",
    "stage": "mistakes, brought back",
}


def option(default, help, least=None, most=LARGEST, **keywords):
    """Describe a field of Config: the bounds of a number, and keywords of argparse's add_argument()."""
    return dataclasses.field(default=default, metadata=dict(help=help, least=least, most=most, keywords=keywords))


class Derived(int):
    """A size that Config has derived from other fields. dataclasses.replace() passes it on, and it is derived again."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What a run does. Raises UsageError for values of another type, out of range, or in contradiction to others.

    dataclasses.replace() derives the sizes anew that were not given; flags that --stage or --fp8 have set stay.
    """

    hidden_dim: int = option(512, "width of the residual stream", 1)
    num_layers: int = option(8, "number of transformer blocks", 1)
    num_heads: int = option(8, "query heads; each has hidden-dim / num-heads dimensions", 1)
    num_kv_heads: int | None = option(None, "key/value heads (grouped queries); default: half of --num-heads", 1)
    ffn_dim: int | None = option(None, "width of the feed-forward layer; default: 4 x hidden-dim", 1)
    vocab_size: int | None = option(None, "distinct tokens; default: 1000, or the 256 bytes of a file", 2)
    rope_theta: float = option(10000.0, "base of the rotary embedding's frequencies", 1.0, FP32.max)
    norm_eps: float = option(1e-5, "added to the mean square in norms", FP32.tiny, FP32.max)
    untied_head: bool = option(False, "give the head weights of its own instead of the embedding's")

    batch_size: int = option(8, "sequences per micro-batch and process", 1)
    accumulate: int = option(1, "micro-batches per step, whose gradients are averaged", 1)
    seq_len: int = option(256, "tokens per sequence", 1)
    num_steps: int = option(50, "training steps that are measured", 1)
    warmup_steps: int = option(3, "steps before the measured ones; weights and optimizer are restored after them", 0)
    learning_rate: float = option(3e-4, "AdamW's learning rate, at its highest", FP32.tiny, FP32.max)
    schedule: str = option(
        "constant", "learning rate: constant, or half a cosine down to a tenth", choices=("constant", "cosine")
    )
    warmup_fraction: float = option(0.0, "share of --num-steps in which the learning rate rises to it", 0.0, 1.0)
    clip: float | None = option(None, "largest norm of all gradients together", FP32.tiny, FP32.max, metavar="NORM")
    use_amp: bool = option(False, "compute in bf16, with fp32 master weights and optimizer state")
    fp8: bool = option(False, "like --use-amp, but multiply by the weights of the layers in FP8")
    data: str = option("random", "random tokens, a chain of known entropy, or a file", metavar="random|markov|FILE")
    seed: int = option(42, "seed of the weights and the data", 0, 2**32 - 1)

    init_from: str | None = option(None, "start from the weights of a LLaMA of transformers or ours", metavar="FOLDER")
    resume: str | None = option(None, "go on where a run with --save has ended, with its flags", metavar="FOLDER")
    save: str | None = option(None, "write the trained model, as transformers reads it", metavar="FOLDER")

    impl: str = option("triton", "our kernels; plain PyTorch; its fused attention", choices=("triton", "torch", "sdpa"))
    device: str = option("auto", "where to run (cuda is also the name of an AMD GPU)", choices=("auto", "cuda", "cpu"))
    moments: str = option("fp32", "type in which AdamW keeps its moments", choices=("fp32", "bf16"))
    recompute: bool = option(False, "save less for the backward pass: 0.87 of the memory, 1.02 of the time")
    compile: bool = option(False, "torch.compile the model")
    graph: bool = option(False, "capture the step in CUDA/HIP graphs and replay them")
    matmul_precision: str = option("highest", "fp32 matmuls in full fp32 or in TF32", choices=("highest", "high"))
    deterministic: bool = option(False, "ask PyTorch for deterministic algorithms (our kernels always are)")

    shard: str | None = option(None, "what processes share: optimizer state, or all", choices=("optimizer", "full"))
    comm_timeout: int = option(120, "how long processes wait for each other", 1, metavar="SECONDS")

    timing: str = option("phases", "time each phase, with a sync per step; or sync once", choices=("phases", "step"))
    check: bool = option(False, "first compare loss and gradients with PyTorch in higher precision")
    profile: str | None = option(None, "folder for a trace, a kernel table and a GPU's memory snapshot", metavar="DIR")
    output_dir: str = option("triton_profiles", "folder for the JSON file of the run", metavar="DIR")

    stage: int | None = option(
        None, "set the flags of a stage of the workshop (--list-stages)", choices=(1, 2, 3, 4, 5, 6, 7, 8)
    )
    no_init: bool = option(False, "PyTorch's default initialization under a tied head")
    noncontiguous_kv: bool = option(False, "K and V reach the attention kernel with a badly strided head dimension")
    unsynced_timing: bool = option(False, "host clocks without a device sync")
    triton_matmul_swiglu: bool = option(
        False, "one program per output element, each reducing over the hidden dimension"
    )
    severed_autograd: bool = option(False, "kernels called outside autograd")
    no_warmup: bool = option(False, "the first steps, kernel compilation included, are averaged in")

    def __post_init__(self):
        # Fields left at None follow from others. By default two query heads share a key/value head, if their number is
        # even.
        self.validate_types()
        sizes = {
            "num_kv_heads": self.num_heads // (2 if self.num_heads % 2 == 0 else 1),
            "ffn_dim": 4 * self.hidden_dim,
            "vocab_size": 1000 if self.data in ("random", "markov") else 256,  # bytes
        }
        not_given = [name for name in sizes if isinstance(getattr(self, name), Derived | None)]
        follows = {name: Derived(sizes[name]) for name in not_given}
        if self.fp8:
            follows["use_amp"] = True
        follows |= stage_flags(self.stage)
        if self.no_warmup or follows.get("no_warmup"):  # BUG no_warmup: nothing runs before the clock starts
            follows["warmup_steps"] = 0
        vars(self).update(follows)  # as setattr() refuses: the dataclass is frozen
        self.validate()

    def validate_types(self):
        """Raise UsageError for a value of another type, or for none of the choices."""
        if self.device == "mps":
            remedy = "give --device cpu, where plain PyTorch runs"
            raise UsageError(f"--device mps: Triton compiles no kernels for Apple's GPU: {remedy}")
        for field in dataclasses.fields(self):
            flag, value, kind = flag_of(field.name), getattr(self, field.name), field.type
            # Where a float is expected, an int will do. A bool is an int to Python, but no number of heads.
            expected_type = float | int if kind is float else kind
            if not isinstance(value, expected_type) or (isinstance(value, bool) and kind is not bool):
                expected = getattr(kind, "__name__", kind)
                raise UsageError(f"{flag} {value!r} is of the type {type(value).__name__}: give {expected}")
            choices = field.metadata["keywords"].get("choices")
            if choices and value not in (field.default, *choices):
                raise UsageError(f"{flag} {value} does not exist: choose one of {', '.join(map(str, choices))}")

    def validate(self):
        """Raise UsageError for a value that is out of range, or for heads that do not divide the width."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least, most = field.metadata["least"], field.metadata["most"]
            if least is not None and value is not None and not least <= value <= most:
                raise UsageError(f"{flag_of(field.name)} {value} is out of range: give {least} to {most}")
        hidden, heads, kv_heads = self.hidden_dim, self.num_heads, self.num_kv_heads
        if hidden % heads:
            remedy = f"try --hidden-dim {math.ceil(hidden / (2 * heads)) * 2 * heads}"
            raise UsageError(f"--hidden-dim {hidden} is not divisible by --num-heads {heads}: {remedy}")
        if heads % kv_heads:
            remedy = f"try --num-kv-heads {math.gcd(heads, kv_heads)}"
            raise UsageError(f"--num-heads {heads} is not divisible by --num-kv-heads {kv_heads}: {remedy}")
        if self.head_dim % 2 or self.head_dim > 128:  # pairs are rotated, and a program has a head in registers
            heads = f"--hidden-dim {hidden} / --num-heads {heads} gives {self.head_dim} dimensions a head"
            raise UsageError(f"{heads}: they must be even and at most 128; change one of the two")
        if self.init_from is not None and self.resume is not None:
            raise UsageError(f"--init-from {self.init_from} contradicts --resume {self.resume}: drop one of the two")

    @property
    def head_dim(self):
        """Return the dimensions of a head."""
        return self.hidden_dim // self.num_heads

    @property
    def tokens_per_micro_batch(self):
        """Return the number of tokens of a forward pass."""
        return self.batch_size * self.seq_len

    @property
    def sequences_per_step(self):
        """Return the number of sequences between two updates of the weights."""
        return self.accumulate * self.batch_size

    @property
    def tokens_per_step(self):
        """Return the number of tokens between two updates of the weights."""
        return self.sequences_per_step * self.seq_len

    def learning_rate_of(self, number):
        """Return the learning rate of step `number`, counted from 0."""
        warmup, is_cosine = round(self.warmup_fraction * self.num_steps), self.schedule == "cosine"
        least = self.learning_rate * (LEAST_RATE if is_cosine else 1)
        return cosine_rate(number, self.learning_rate, least, warmup, self.num_steps)

    @property
    def bugs(self):
        """Return the names of the mistakes that are asked for."""
        return tuple(name for name in BUGS if getattr(self, name))


def cosine_rate(number, peak, least, warmup, total):
    """Return the learning rate of step `number` of total: it rises in warmup steps to peak, and falls to least.

    The rise is linear, the fall half a cosine (Loshchilov and Hutter, arXiv:1608.03983).
    """
    if number < warmup:
        return peak * (number + 1) / (warmup + 1)
    progress = min((number - warmup) / max(1, total - warmup), 1.0)
    return least + 0.5 * (1 + math.cos(math.pi * progress)) * (peak - least)


def flag_of(field_name):
    """Convert num_steps to --num-steps."""
    return "--" + field_name.replace("_", "-")


# ----------------------------------------------------------------------------------------------------------------------
# The mistakes that flags bring back. The code of each is a few lines marked BUG; none is active by default.

# A stage brings back all mistakes that carry its number: stage 1 is the broken beginning, 5 has none left, and 6 to 8
# show what the first version of this workshop did not. A flag like --no-init brings back one by itself; Config says
# what it does.


class Bug(NamedTuple):
    """A mistake: the stages that have it, and the sign by which it shows."""

    stages: tuple
    sign: str


BUGS = {
    "no_init": Bug((1,), sign="the first loss is about the hidden size instead of ln(vocab)"),
    "noncontiguous_kv": Bug(
        (1, 2), sign="attention kernels slower at the same result, most in bf16 at a longer sequence"
    ),
    "unsynced_timing": Bug((1, 2, 3), sign="the phases sum to a fraction of the step"),
    "triton_matmul_swiglu": Bug((1, 2, 3, 4), sign="the SwiGLU kernel takes most of the device time"),
    "severed_autograd": Bug((6,), sign="backward is almost free, and only the tied embedding receives a gradient"),
    "no_warmup": Bug((7,), sign="the mean step is far above the median"),
}

STAGES = {
    1: "broken loss",
    2: "slow performance",
    3: "fake timing",
    4: "slow kernels",
    5: "optimized",
    6: "severed autograd",
    7: "cold start",
    8: "one graph launch instead of hundreds of kernel launches",
}


def stage_flags(stage):
    """Return the fields of Config that a stage sets, {field: value}."""
    flags = {name: True for name, bug in BUGS.items() if stage in bug.stages}
    return flags | ({"graph": True} if stage == 8 else {})


# ----------------------------------------------------------------------------------------------------------------------
# 1 The training loop

# What was measured of one step; times in ms, host_ms until the host had issued the whole step. phase_ms is {} where
# phases are not timed, and grad_norm None where it is not computed.
StepRecord = collections.namedtuple("StepRecord", "loss batch_ms host_ms phase_ms grad_norm")
PRINTED_STEPS = 50  # have a line each, and those beyond one in ten


class Stopped(KeyboardInterrupt):
    """The run was asked to stop, and does so between two steps."""


def train(step, data, records):
    """Train until num_steps steps are done, or the run diverges, and append a StepRecord of each to records.

    step is a TrainStep, data yields batches (tokens, targets).
    """
    loop = train_by_phase if step.config.timing == "phases" else train_in_one_go
    with step.world.deferring_signals(step.config.save is not None):
        loop(step, data, records)


def train_by_phase(step, data, records):
    """Time each phase of a step, and wait for the device after every step."""
    for number in range(step.first, step.config.num_steps):
        tokens, targets = (t.to(step.device) for t in next(data))
        if step.world.must_stop():
            raise Stopped
        clock = StepClock(step.device, step.config.unsynced_timing)
        with step.named_range("step"):
            step.load(tokens, targets)
            step.follow_schedule(number)
            step.synchronize()  # so that loading is not part of a phase
            clock.mark()
            start = time.perf_counter()
            # --------------- the training step begins: nothing but work and marks ---------------
            for phase in step.phases.values():  # forward, backward (of all micro-batches), optimizer
                phase()
                clock.mark()
            # --------------- the training step ends: the rest is diagnostics ---------------
            host_ms = ms_since(start)
            step.synchronize()
            synced_ms = ms_since(start)
        phase_ms = collections.Counter()
        for name, ms in zip(step.phases, clock.intervals(), strict=True):
            phase_ms[name.split()[0]] += ms  # "forward 2" is the second micro-batch's
        # BUG unsynced_timing: the phases are launch times, and only the whole step has waited for the device.
        batch_ms = synced_ms if step.config.unsynced_timing else sum(phase_ms.values())
        (loss,) = step.world.mean([step.loss.item()])
        step.world.collect_gradients(step.optimizer)  # of several processes, for the norm
        record = StepRecord(loss, batch_ms, host_ms, dict(phase_ms), step.gradient_norm())
        if not keep_record(record, records, step):
            return


def train_in_one_go(step, data, records):
    """Time whole steps, and wait for the device only after the last one: the host can run ahead of it."""
    # All batches go to the device before its clock starts: no copy from the host is timed.
    numbers = range(step.first, step.config.num_steps)
    batches = [[t.to(step.device) for t in next(data)] for _ in numbers]
    clock = StepClock(step.device, step.config.unsynced_timing)
    losses, host_ms, interruption = [], [], None
    step.synchronize()
    with step.named_range("steps"):
        clock.mark()
        try:
            for number, (tokens, targets) in zip(numbers, batches, strict=True):
                if step.config.save and step.world.must_stop():
                    raise Stopped
                step.load(tokens, targets)
                step.follow_schedule(number)
                start = time.perf_counter()
                # --------------- the training step begins: nothing but work and a mark ---------------
                step.run()
                clock.mark()
                # --------------- the training step ends: the rest is diagnostics ---------------
                host_ms.append(ms_since(start))
                losses.append(step.loss.detach().clone())  # a replay overwrites its loss
        except KeyboardInterrupt as error:  # the steps done so far count
            interruption = error
        step.synchronize()
    step.world.collect_gradients(step.optimizer)
    losses = step.world.mean([loss.item() for loss in losses])
    # An interruption may have left a mark or a host_ms without its loss.
    for loss, batch_ms, host in zip(losses, clock.intervals(), host_ms, strict=False):
        # Only the last step's gradients are still there. If another's were not finite, the loss after it was not.
        is_last = len(records) + 1 == len(numbers)
        record = StepRecord(loss, batch_ms, host, {}, step.gradient_norm() if is_last else None)
        if not keep_record(record, records, step):
            return
    if interruption:
        raise interruption


def keep_record(record, records, step):
    """Append a StepRecord, print its line where its step has one, and return whether it is finite."""
    records.append(record)
    config, number = step.config, step.first + len(records)
    is_finite = divergence([record]) is None
    if is_finite and number > PRINTED_STEPS and number % 10 and number < config.num_steps:
        return True
    norm = "" if record.grad_norm is None else f" | norm {record.grad_norm:.3f}"
    rate = f"{record.batch_ms:.2f} ms | {config.tokens_per_step / record.batch_ms * 1e3:,.0f} tok/s"
    print(f"step {number:4d}/{config.num_steps} | loss {record.loss:.4f}{norm} | {rate}", flush=True)
    return is_finite


def ms_since(start):
    """Return the ms since time.perf_counter() was start."""
    return (time.perf_counter() - start) * 1e3


class StepClock:
    """Times of the parts of a step, by events on a GPU and by the host's clock on a CPU."""

    def __init__(self, device, unsynced):
        # BUG unsynced_timing: the host's clock on a GPU times the launches, not the work.
        self.uses_events = device.type == "cuda" and not unsynced
        self.marks = []

    def mark(self):
        """Record a point in time, the end of one part and the beginning of the next."""
        if self.uses_events:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter() * 1e3)

    def intervals(self):
        """Return the ms between the marks; the device must have been synchronized."""
        pairs = itertools.pairwise(self.marks)
        return [start.elapsed_time(end) if self.uses_events else end - start for start, end in pairs]


# ----------------------------------------------------------------------------------------------------------------------
# 2 The training step: three phases on fixed buffers, called one by one or captured in graphs


class TrainStep:
    """A training step of a model of its own, on fixed buffers; config is a Config, device a torch.device or its name.

    Its phases are an ordered dict {"forward": f, "backward": b, "optimizer": o}: train() times them, capture() replaces
    them by replays, tiny_llama.profiler wraps them. With --accumulate 2 it has "forward 2" and "backward 2" as well.

    With our kernels the optimizer owns the weights, and a change of the model from outside is refused: see Owned. They
    come in and go out by load_state_dict() and state_dict(); freeze() freezes some.
    """

    first = 0  # the number of the first step to do: --resume has done some

    def __init__(self, config, device=None, world=None):
        self.world = world or OneProcess()
        self.config, self.device = config, torch.device(device or select_device(config.device))
        self.implementation, operations = select_operations(config, self.device)
        self.named_range = contextlib.nullcontext  # named_range(name): tiny_llama.profiler names parts for profilers
        torch.manual_seed(config.seed)
        with self.device:
            self.model = TinyLlamaTriton(config, operations)
            self.tokens = torch.zeros(config.sequences_per_step, config.seq_len, dtype=torch.int64)
            self.targets = torch.zeros_like(self.tokens)
        if config.resume or config.init_from:
            load_weights(self.model, config)
        # Warm-up steps train, and restart() returns to these weights. The host keeps them, which costs no device
        # memory.
        self.initial_weights = [p.detach().cpu().clone() for p in self.model.parameters()]
        self.loss = self.micro_loss = None
        # What forward() calls: the model, or what several processes or the compiler have put around it. This comes
        # before the optimizer, which lets nobody change the model.
        self.run_model = self.replica = self.world.parallelize(self)
        if config.compile:
            self.run_model = torch.compile(self.run_model)
        self.group_layers()
        self.optimizer = self.make_optimizer()
        self.is_captured = False
        self.phases = {"forward": self.forward, "backward": self.backward}
        for index in range(1, config.accumulate):
            self.phases[f"forward {index + 1}"] = functools.partial(self.forward, index)
            self.phases[f"backward {index + 1}"] = functools.partial(self.backward, index)
        self.phases["optimizer"] = self.optimizer_step

    def forward(self, index=0):
        """Compute the loss of a micro-batch, with its autograd history; self.loss is the mean of those so far.

        The first also clears the gradients.
        """
        count = self.config.accumulate
        if index == 0:
            self.optimizer.zero_grad()  # only marks the old gradients, which backward overwrites: see give_gradient()
        self.world.begin_forward(self, is_first=index == 0, is_last=index == count - 1)
        rows = slice(index * self.config.batch_size, (index + 1) * self.config.batch_size)
        self.micro_loss = self.in_precision(self.tokens[rows], self.targets[rows])
        if count == 1:
            self.loss = self.micro_loss
        else:
            share = self.micro_loss.detach() / count
            self.loss = self.loss + share if index else share

    def backward(self, index=0):
        """Compute the gradients of a micro-batch, and add them to those of the ones before it."""
        # FlatAdamW divides the sum by the number of micro-batches, for nothing.
        is_mean = self.config.accumulate > 1 and self.implementation != "triton"
        loss = self.micro_loss / self.config.accumulate if is_mean else self.micro_loss
        with torch.autograd.set_multithreading_enabled(False):  # handing over to autograd's thread takes 0.5 ms
            loss.backward()
        if index == self.config.accumulate - 1:
            self.world.finish_backward(self.optimizer)

    def optimizer_step(self):
        """Update the weights."""
        self.optimizer.step()

    def run(self):
        """Run the whole step. Nothing is synchronized."""
        with self.named_range("step"):
            for phase in self.phases.values():
                phase()

    def call_model(self, *inputs):
        """Run the model, whose weights have been updated, in the run's precision. Works after capture() too."""
        self.world.begin_forward(self)
        return self.in_precision(*inputs)

    def in_precision(self, *inputs):
        """Run the model on tensors of the device, in bf16 with --use-amp."""
        # Our kernels take bf16 weights as they are. The library needs autocast, which keeps converted weights until it
        # ends: a captured graph has to convert them in every replay.
        needed = self.config.use_amp and self.implementation != "triton"
        with torch.autocast(self.device.type, torch.bfloat16, needed, cache_enabled=not self.config.graph):
            return self.run_model(*inputs)

    def load(self, tokens, targets):
        """Copy a batch, both (sequences_per_step, seq), into the buffers of the step. ValueError for another shape."""
        for buffer, given in ((self.tokens, tokens), (self.targets, targets)):
            if given.shape != buffer.shape:  # copy_() would repeat a single sequence
                raise ValueError(f"the batch has the shape {tuple(given.shape)}, and {tuple(buffer.shape)} is needed")
            buffer.copy_(given)

    def follow_schedule(self, number):
        """Give the optimizer the learning rate of step `number`, which a captured step reads on the device."""
        if self.config.schedule != "constant" or self.config.warmup_fraction:
            self.optimizer.lr = self.config.learning_rate_of(number)

    def gradient_norm(self):
        """Return the norm of all gradients of the last step together, before they were clipped."""
        return gradient_norm(self.model) if self.config.clip is None else self.optimizer.norm.item()

    def group_layers(self):
        """Put tiny_llama.groups.LayerGroups in the place of the model's LayerStack, where it computes the same."""
        groups, config = companion("groups"), self.config  # None where the script is alone
        # A group calls the kernels itself. FP8 and --severed-autograd replace operations, --compile wants to see them.
        replaced = config.severed_autograd or config.fp8 or config.compile
        if groups and self.implementation == "triton" and not replaced:
            self.model.layers = groups.LayerGroups(self.model.layers, self.world.layers_by_bucket(self.model), config)

    def make_optimizer(self):
        """Return the optimizer. With our kernels it takes over the weights, with --use-amp in bf16."""
        if self.implementation != "triton":
            return TorchAdamW(self.model, self.config.learning_rate, self.config.clip)
        optimizer = self.world.make_flat_adamw(self.config)
        optimizer.own(self.model)  # from here on the weights are views of its buffer, with --use-amp in bf16
        return optimizer

    def restart(self):
        """Return to the initial weights and an empty optimizer."""
        self.world.reset(self.optimizer, (w.to(self.device) for w in self.initial_weights))

    def capture(self, one_graph=False):
        """Let the phases, or with one_graph all in one, replay captured graphs from now on; a step must have run."""
        # A capture records the kernels that work() launches, with the addresses of their tensors, and runs none of
        # them. What Python does meanwhile is not recorded. The tensors of all graphs lie in one pool and stay where
        # they are.
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self.loss = self.micro_loss = None  # its autograd history belongs to the warm-up
        replays = {}
        for name, work in ({"step": self.run} if one_graph else self.phases).items():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=self.world.capture_mode):
                work()
            replays[name] = graph.replay
        self.phases, self.is_captured = replays, True

    def synchronize(self):
        """Wait for the GPU, if there is one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def state_dict(self):
        """Return the fp32 weights, {name: tensor}, which TinyLlamaTriton.load_state_dict() takes as well.

        With several processes all must call it.
        """
        names = (name for name, _ in self.model.named_parameters())
        return {name: weight.clone() for name, weight in zip(names, self.optimizer.weights(), strict=True)}

    def load_state_dict(self, weights):
        """Start over from these weights, {name: tensor} as state_dict() returns them, with an empty optimizer.

        ValueError if names or shapes are not those of the model.
        """
        shapes = {name: p.shape for name, p in self.model.named_parameters()}
        differing = {n for n in shapes.keys() | weights.keys() if n not in weights or weights[n].shape != shapes.get(n)}
        if differing:
            raise ValueError(f"these weights are missing, unknown or of another shape: {', '.join(sorted(differing))}")
        self.initial_weights = [weights[name].detach().to("cpu", torch.float32, copy=True) for name in shapes]
        self.restart()

    def freeze(self, *names):
        """From now on, train all weights but those with these names of model.named_parameters(), which may be none.

        A frozen weight has no gradient, and is neither updated nor decayed. RuntimeError after capture() and under
        DistributedDataParallel or FSDP2, ValueError for a name that the model does not have.
        """
        if self.is_captured:
            raise RuntimeError("a captured step repeats what it was captured with: freeze() weights before capture()")
        if self.world.size > 1 and self.implementation != "triton":
            raise RuntimeError(f"what shares --impl {self.implementation} among processes expects all gradients")
        parameters = dict(self.model.named_parameters())
        unknown = set(names) - parameters.keys()
        if unknown:
            raise ValueError(f"the model has no weights {', '.join(sorted(unknown))}: see model.named_parameters()")
        for name, p in parameters.items():
            torch.Tensor.requires_grad_(p, name not in names)  # p.requires_grad_() is what an owned weight refuses


class OneProcess:
    """What a run and its steps ask of their process, which is alone: much of it has nothing to do.

    tiny_llama.distributed.World, one of several processes, does what the docstrings say.
    """

    rank, size = 0, 1  # the number of this process, and how many train together
    capture_mode = "global"  # torch.cuda.graph's capture_error_mode: no other thread may call the driver meanwhile

    def find_device(self, config):
        """Return the torch.device of a run; UsageError if it is not there or cannot do what is asked for."""
        device = select_device(config.device)
        validate_on_device(config, device)
        return device

    def check(self, config, device):
        """Return whether loss and gradients are close enough to those in higher precision, and fit each other."""
        batch, audit = next(batches(config)), companion("audit")
        verdict, _ = check_batch(config, device, batch)
        print_verdict(verdict, "fp32" if config.use_amp else "fp64")
        if audit is None:
            print("Audit of the gradients: not done, as tiny_llama/audit.py is missing")
            return not verdict.failed
        return audit.check_step(config, device, batch) and not verdict.failed

    def batches(self, config):
        """Return the batches of this process, a generator."""
        return batches(config)

    def parallelize(self, step):
        """Return what a TrainStep calls: its model, or something around it."""
        return step.model

    def layers_by_bucket(self, model):
        """Return lists of the layers whose gradients are sent together; one process sends none, and has one list."""
        return [list(model.layers)]

    def make_flat_adamw(self, config):
        """Return a FlatAdamW for a Config."""
        return FlatAdamW(**optimizer_options(config))

    def begin_forward(self, step, is_first=True, is_last=True):
        """Wait for weights that other processes have updated, if this is the first micro-batch of a step.

        Gradients are added up over the processes only in the backward pass of the last.
        """

    def finish_backward(self, optimizer):
        """Add up the gradients of all processes."""

    def collect_gradients(self, optimizer):
        """Fill .grad of every parameter with the mean gradient, over micro-batches and processes; once a step."""
        if getattr(optimizer, "gradient_count", 1) > 1:  # a FlatAdamW, which has the sum
            optimizer.average_gradients()

    def reset(self, optimizer, weights):
        """Start over from these weights, an iterable of tensors of the device."""
        optimizer.reset(weights)

    def load_state(self, optimizer, state):
        """Give an optimizer what another run's each_state() has yielded, {name: tensors}."""
        optimizer.load_state(state)

    def mean(self, values):
        """Average a list of numbers over the processes."""
        return values

    stop_requested = None  # the signal that did, of Ctrl-C and SIGTERM

    @contextlib.contextmanager
    def deferring_signals(self, is_needed):
        """Have Ctrl-C and SIGTERM stop all processes together. They end a single one at once, unless is_needed."""
        if not is_needed:
            yield
            return
        before = {number: signal.signal(number, self.request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def request_stop(self, number, frame):
        """Handle a signal: stop after this step, so that its weights can be saved. The second one does not wait."""
        if self.stop_requested:
            raise KeyboardInterrupt
        self.stop_requested = number

    def must_stop(self):
        """Return whether the processes are to stop together before the next step."""
        return self.stop_requested is not None

    def report(self, summary):
        """Print and return what several processes did together, given the summary of this one; None for one process."""


# ----------------------------------------------------------------------------------------------------------------------
# 3 The model: modules hold parameters and call the operations of one implementation. operations.attention, for example,
# is triton_attention with --impl triton, torch_attention with --impl torch: see OPERATIONS, after the last of them.


class TinyLlamaTriton(nn.Module):
    """LLaMA, by default with a head tied to the embedding. operations is the implementation, one of OPERATIONS."""

    def __init__(self, config, operations=None):
        super().__init__()
        if not isinstance(config, Config):
            raise TypeError(f"config is {config!r}: give a Config, as Config(hidden_dim=512)")
        self.operations = operations or default_operations()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.layers = LayerStack(TransformerBlock(config, self.operations) for _ in range(config.num_layers))
        self.norm = TritonRMSNorm(config.hidden_dim, config.norm_eps, self.operations)
        self.lm_head = nn.Linear(config.hidden_dim, config.vocab_size, bias=False) if config.untied_head else None
        cos, sin = rope_tables(config.seq_len, config.head_dim, self.embed_tokens.weight.device, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        if not config.no_init:  # BUG no_init: leaves the embedding, and so the tied head, at N(0, 1)
            self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Draw matrices from N(0, 0.02), those that add to the residual stream from N(0, 0.02 / sqrt(2 * layers))."""
        residual_std = 0.02 / math.sqrt(2 * len(self.layers))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # the weights of norms stay 1
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=residual_std if is_residual else 0.02)

    def forward(self, tokens, targets=None):
        """tokens (batch, seq) -> logits (batch, seq, vocab), or the mean loss if targets (batch, seq) are given."""
        if tokens.dim() != 2:
            raise ValueError(f"tokens have the shape {tuple(tokens.shape)}, and (batch, seq) is needed")
        seq_len = tokens.shape[1]
        if seq_len > len(self.cos):
            raise ValueError(f"there are {seq_len} positions, and Config.seq_len is {len(self.cos)}: raise it")
        # A shorter sequence takes the first angles.
        cos, sin = self.cos[:seq_len], self.sin[:seq_len]
        # residual is the stream (batch, seq, hidden) that runs through all layers, branch what a layer adds to it.
        residual, branch = self.operations.embedding(tokens, weight_of(self.embed_tokens)), None
        residual, branch = self.layers(residual, branch, cos, sin)
        y, _ = add_and_norm(self.norm, residual, branch)  # adds what the last layer has left to add
        # (batch, seq, hidden) -> (batch, seq, vocab); a tied head multiplies by the weight of the embedding.
        logits = self.operations.linear(y, weight_of(self.lm_head or self.embed_tokens))
        return logits if targets is None else self.operations.cross_entropy(logits, targets)


class LayerStack(nn.ModuleList):
    """The TransformerBlocks of a model. A TrainStep has tiny_llama.groups.LayerGroups, which computes the same."""

    named_range = contextlib.nullcontext  # named_range(name): tiny_llama.profiler names layers for profilers

    def forward(self, residual, branch, cos, sin):
        """Take and return the residual stream and what is to be added to it, as TransformerBlock.forward()."""
        for index, block in enumerate(self):
            with self.named_range(f"layers.{index} forward"):
                residual, branch = block(residual, branch, cos, sin)
        return residual, branch


class TransformerBlock(nn.Module):
    """Attention and feed-forward layer, each after a norm and each added to the residual stream."""

    def __init__(self, config, operations=None):
        super().__init__()
        self.attention_norm = TritonRMSNorm(config.hidden_dim, config.norm_eps, operations)
        self.attention = TritonAttention(config, operations)
        self.ffn_norm = TritonRMSNorm(config.hidden_dim, config.norm_eps, operations)
        self.feed_forward = TritonSwiGLU(config, operations)

    def forward(self, residual, branch, cos, sin):
        """Take the residual stream and what the block before adds to it (None at first); return both, one block on.

        All (batch, seq, hidden). The addition is left to the next norm, whose kernel reads the residual anyway.
        """
        y, residual = add_and_norm(self.attention_norm, residual, branch)
        branch = self.attention(y, cos, sin)
        y, residual = add_and_norm(self.ffn_norm, residual, branch)
        branch = self.feed_forward(y)
        return residual, branch


class TritonRMSNorm(nn.Module):
    """RMSNorm over the last dimension, dim. Like the other modules, it is called after the operations by default."""

    def __init__(self, dim, eps=1e-5, operations=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.operations = operations or default_operations()

    def forward(self, x, *branch):
        """x (..., dim) -> norm(x), of the same shape; with a branch, which may be None: norm(x + branch), x + branch"""
        y, residual = self.operations.rmsnorm(x, *branch or (None,), self.weight, self.eps)
        return (y, residual) if branch else y


class TritonAttention(nn.Module):
    """Causal self-attention with grouped queries; one matmul computes q, k and v."""

    def __init__(self, config, operations=None):
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, int(config.num_kv_heads)  # no Derived, to torch.compile
        # The rows of the weight: q of all heads, then k and v of the kv_heads. Grouped queries make k and v smaller.
        qkv_dim = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv_proj = nn.Linear(config.hidden_dim, qkv_dim, bias=False)
        self.o_proj = nn.Linear(config.hidden_dim, config.hidden_dim, bias=False)
        self.operations = operations or default_operations()

    def forward(self, x, cos, sin):
        """x (batch, seq, hidden), cos and sin (seq, head_dim / 2) -> (batch, seq, hidden)"""
        weights = weight_of(self.qkv_proj), weight_of(self.o_proj)
        return self.operations.attention(x, *weights, cos, sin, self.num_heads, self.num_kv_heads)


class TritonSwiGLU(nn.Module):
    """The feed-forward layer; one matmul computes gate and up."""

    def __init__(self, config, operations=None):
        super().__init__()
        # The rows of the weight: gate, then up.
        self.gate_up_proj = nn.Linear(config.hidden_dim, 2 * config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.hidden_dim, bias=False)
        self.operations = operations or default_operations()

    def forward(self, x):
        """x (batch, seq, hidden) -> the same shape"""
        return self.operations.swiglu(x, weight_of(self.gate_up_proj), weight_of(self.down_proj))


# Attributes of a module, where not empty, by which a call of it does more than the forward() of its class.
HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "forward"


def is_changed(module):
    """Return whether a module has a hook, or a forward() that its class does not have."""
    return any(map(vars(module).get, HOOKS))


def weight_of(module):
    """Return the weight of an nn.Linear or nn.Embedding, which operations take in place of calling the module.

    TypeError for a module that computes with more than its weight. Its hooks are not called, and a warning says so.
    """
    if type(module).forward is nn.Linear.forward:
        # Pruning, and norms of weights before parametrizations, compute a plain attribute in a hook.
        extras = module.bias, vars(module).get("weight") if module._forward_pre_hooks else None
    elif type(module).forward is nn.Embedding.forward:
        extras = module.padding_idx, module.max_norm, module.scale_grad_by_freq or None, module.sparse or None
    else:
        extras = (module,)
    if any(extra is not None for extra in extras):
        kind = f"{type(module).__module__}.{type(module).__name__}"
        problem = f"{kind} computes with more: give an nn.Linear without bias, or a plain nn.Embedding"
        raise TypeError(f"operations take only the weight of a projection, and {problem}")
    if is_changed(module):
        what = f"a hook or a forward() of its own of {module} is not called: operations take only the weight"
        warnings.warn(f"{what}; put it on the module that contains this one", stacklevel=3)
    return module.weight


def add_and_norm(norm, residual, branch):
    """Return norm(residual + branch) and residual + branch; branch may be None. A TritonRMSNorm adds in its kernel."""
    if type(norm).forward is TritonRMSNorm.forward:
        return norm(residual, branch)
    residual = residual if branch is None else residual + branch
    return norm(residual), residual


def select_operations(config, device):
    """Return (name, Operations) of what runs on the device for config.impl, with the mistakes that are asked for."""
    name = "torch" if config.impl == "triton" and triton_obstacle(device, config.use_amp) else config.impl
    operations = OPERATIONS[name]
    if config.fp8:
        operations = companion("fp8", "--fp8").with_fp8(operations, name)
    if name != "triton":
        return name, operations
    # The model stays as it is: a mistake is a wrapper around an operation, or an argument of it.
    if config.severed_autograd:  # BUG severed_autograd: no history, as if no autograd.Function wrapped the kernels
        severed = torch.no_grad()  # which decorates functions
        rmsnorm, attention = severed(operations.rmsnorm), severed(operations.attention)
        operations = operations._replace(rmsnorm=rmsnorm, attention=attention)
    if config.bugs:
        attention, swiglu = (functools.partial(f, bugs=config.bugs) for f in (operations.attention, operations.swiglu))
        operations = operations._replace(attention=attention, swiglu=swiglu)
    return "triton", operations


def default_operations():
    """Return the operations of a module that is built by itself: Triton's where Triton runs."""
    return OPERATIONS["torch" if triton_obstacle(select_device("auto")) else "triton"]


# ----------------------------------------------------------------------------------------------------------------------
# 4 The GPU, and how kernels are launched on it. A `device` is PyTorch's; a Gpu tells what that is in fact.


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What launch configurations and reports depend on. A CPU, which interprets kernels, has one as well."""

    type: str  # "cuda" (NVIDIA and AMD alike) or "cpu"
    name: str
    arch: str  # "sm_90", "gfx942", ... or "cpu"
    num_sms: int  # multiprocessors, or compute units
    warp_size: int

    @property
    def is_amd(self):
        """Return whether it is a GPU of AMD's."""
        return self.arch.startswith("gfx")

    @property
    def family(self):
        """Return the name of the GPUs that share the rows of ATTENTION_TILES."""
        if self.is_amd:  # Instinct has 512 registers a lane or more, Radeon 256
            return "cdna" if self.arch.startswith(("gfx9", "gfx125")) else "rdna"
        if self.type == "cpu":
            return "interpreter"
        return "hopper" if self.arch == "sm_90" else "nvidia"


@functools.cache
def get_gpu(type):
    """Return the Gpu behind the current device of type "cuda" or "cpu"; RuntimeError for another type."""
    if type not in ("cuda", "cpu"):
        raise RuntimeError(f"the Triton kernels cannot run on {type}: move the tensors to a GPU")
    if type == "cpu":
        # Of two multiprocessors: the interpreter takes long for each program, and one alone would have no partial sums.
        return Gpu("cpu", platform.processor() or platform.machine(), "cpu", num_sms=2, warp_size=32)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    # torch.version names the vendor. The capability does not: it is (9, 4) on an MI300.
    is_amd = torch.version.hip is not None
    arch = properties.gcnArchName.split(":")[0] if is_amd else f"sm_{properties.major}{properties.minor}"
    return Gpu("cuda", properties.name, arch, properties.multi_processor_count, getattr(properties, "warp_size", 32))


def select_device(requested):
    """Return the torch.device for --device; UsageError if there is none."""
    if requested == "cuda" and not torch.cuda.is_available():
        build = torch.version.hip or torch.version.cuda
        reason = f"PyTorch {torch.__version__} sees none" if build else f"PyTorch {torch.__version__} is a CPU build"
        raise UsageError(f"--device cuda: there is no GPU here ({reason}): use --device cpu, or install a GPU build")
    return torch.device("cpu" if requested == "cpu" or not torch.cuda.is_available() else "cuda")


def triton_obstacle(device, use_amp=False):
    """Return the reason why Triton kernels cannot run on the device, or None."""
    if triton is None:
        return "Triton is not installed"
    if device.type == "cpu" and not INTERPRETED:
        return "there is no GPU (TRITON_INTERPRET=1 interprets the kernels)"
    if device.type == "cpu" and use_amp:
        return "Triton's interpreter multiplies bf16 matrices wrongly"
    return None


def has_bf16(gpu):
    """Return whether a Gpu computes in bf16; NVIDIA's do from sm_80 on."""
    return not gpu.arch.startswith("sm_") or int(gpu.arch[3:]) >= 80


def tf32_available(gpu):
    """Return whether matrix units can round fp32 operands to TF32."""
    return gpu.arch == "gfx942" or gpu.arch.startswith("sm_") and has_bf16(gpu)


def dot_precision(gpu):
    """Return tl.dot's input_precision for fp32 operands, the same as that of the library's matmuls."""
    # The library is asked, because on AMD it keeps to fp32 unless HIPBLASLT_ALLOW_TF32=1.
    try:
        allowed = torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # from PyTorch 2.9 on, if it was set as fp32_precision
        allowed = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if allowed and tf32_available(gpu) else "ieee"


def precision_name(config, device):
    """Return the type in which matrices are multiplied, with the library's settings as they are now."""
    if config.use_amp:
        return "fp8" if config.fp8 else "bf16"
    return "tf32" if dot_precision(get_gpu(device.type)) == "tf32" else "fp32"


def cdiv(a, b):
    """Return ceil(a / b) of integers."""
    return -(-a // b)


def next_power_of_2(n):
    """Return the smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


COMPILED, COMPILED_LIMIT = {}, 4096  # Triton's CompiledKernels: what launch() has compiled, emptied at the limit
LAUNCH_LOCK = threading.Lock()  # Triton's interpreter has one state for all threads


def launch(kernel, grid, tensors, scalars, constants, num_warps=4, num_stages=2, **options):
    """Call kernel[grid](*tensors, *scalars, **constants), in the order of its parameters, in less of the host's time.

    Triton inspects every argument at every call, for 20 to 60 us, and kernels run for 5 us. The key below has all that
    Triton compiles for: constants, scalars with their types (as 2 equals 2.0), the tensors' types and alignments, and
    on AMD GPUs whether offsets in them fit in 31 bits. A kernel that was compiled for the same key is run directly,
    without the hooks of Triton's profiler and its look at where the tensors lie: all must be on the device of the
    first, which is the current one.
    """
    # The order of the arguments of every kernel: tensors, numbers that change between calls, constants.
    pointers = [t.data_ptr() for t in tensors]  # raw addresses spare the driver a lookup per pointer
    alignments = [p & 15 for p in pointers]
    large = [t.untyped_storage().nbytes() >> 31 > 0 for t in tensors] if torch.version.hip else ()
    device, values, types = tensors[0].get_device(), constants.values(), [t.dtype for t in tensors]
    numbers = *scalars, *map(type, scalars)
    key = (id(kernel), device, num_warps, num_stages, *numbers, *types, *alignments, *large, *values, *options.values())
    compiled = COMPILED.get(key)
    if compiled is not None:
        # PyTorch works on a current stream, and Triton must use the same one.
        stream = torch._C._cuda_getCurrentRawStream(device)
        grid_x, grid_y, grid_z = (*grid, 1, 1)[:3]
        no_hooks = None, None, None  # launch metadata, and what to call before and after a launch
        compiled.run(
            grid_x, grid_y, grid_z, stream, compiled.function, compiled.packed_metadata, *no_hooks,
            *pointers, *scalars, *values,
        )  # fmt: skip
        return
    # A new combination: Triton compiles it, or finds it in its cache on disk, and launches it.
    if len(COMPILED) >= COMPILED_LIMIT:
        COMPILED.clear()  # nothing is compiled again: Triton's own cache still has the kernels
    options |= dict(num_warps=num_warps, num_stages=num_stages)
    COMPILED[key] = launch_by_triton(kernel, grid, tensors, scalars, constants, **options)


def launch_by_triton(kernel, grid, tensors, scalars, constants, **options):
    """Launch through Triton's own, slower launcher. Return the compiled kernel, None if it is interpreted."""
    device = tensors[0].device
    get_gpu(device.type)  # RuntimeError where the type is no GPU's
    obstacle = triton_obstacle(device)
    if obstacle:
        raise RuntimeError(f"the Triton kernels cannot run on {device}: {obstacle}")
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        current = f"the current device is cuda:{torch.cuda.current_device()}"
        raise RuntimeError(f"the tensors are on {device} and {current}: call torch.cuda.set_device({device.index})")
    with LAUNCH_LOCK:
        return kernel[grid](*tensors, *scalars, **as_constants(constants), **options)


def as_constants(constants):
    """Return {name: value} with all that is in a tuple made a constant of the compiler."""

    def wrap(value):
        return value._make(map(wrap, value)) if hasattr(value, "_make") else tl.constexpr(value)

    return {n: wrap(v) if isinstance(v, tuple) else v for n, v in constants.items()}


# ----------------------------------------------------------------------------------------------------------------------
# Operations. Each section has a forward kernel, a backward kernel, their launchers, an autograd.Function, the function
# triton_* that the model calls, and a reference in plain PyTorch for --impl torch and the tests.
#
# Arithmetic is in fp32; results are rounded once, when they are stored. There are no float atomics and no locks: a
# gradient to which many programs add is first written as partial sums, which are then added in a fixed order, so it
# has the same bits in every run. Activations may have strides, parameters and tables are contiguous. The tensors of a
# call have one type of fp32, bf16 and fp16 unless stated. Sizes of tiles are "measured" (the fastest of those tried on
# an H200, in bf16) or "compiled" (chosen by what the compiler reports for a GPU that was not at hand).

LOG2_E = tl.constexpr(math.log2(math.e))  # exp(x) = exp2(x * LOG2_E), because exp2 is one instruction
KERNEL_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


@jit
def load(ptrs, mask, other=0.0):
    """Load values in fp32, `other` where the mask is not set."""
    return tl.load(ptrs, mask=mask, other=other).to(tl.float32)


@jit
def store(ptrs, x, mask):
    """Store x, rounded to the type that ptrs point to, where the mask is set."""
    tl.store(ptrs, x.to(ptrs.dtype.element_ty), mask=mask)


@jit
def tile_ptrs(ptr, rows, stride, cols):
    """Return pointers to a tile (rows, cols) of a matrix whose rows begin stride elements apart."""
    return ptr + rows[:, None] * stride + cols[None, :]


# With TRITON_INTERPRET=1 Triton runs kernels on the CPU, in Python; they are no JITFunctions then.
INTERPRETED = triton is not None and not isinstance(load, triton.JITFunction)


def outside_compiler(function):
    """Have torch.compile call a function as it is: it can neither trace launches by address nor see main_grad."""
    disabled = None

    @functools.wraps(function)
    def call(*inputs, **options):
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:  # which disable() would import, for seconds
            return function(*inputs, **options)
        disabled = disabled or torch.compiler.disable(function)
        return disabled(*inputs, **options)

    return call


def expect(**tensors):
    """Raise ValueError or TypeError for a tensor, {name: (tensor or None, its shape)}, that the kernels cannot take.

    All must be on the device of the first.
    """
    first_name = next(iter(tensors))
    first, _ = tensors[first_name]
    for name, (tensor, shape) in tensors.items():
        if tensor is None:
            continue
        if tensor.get_device() != first.get_device():  # the kernels get addresses, and would read another memory
            raise ValueError(f"{name} is on {tensor.device} and {first_name} on {first.device}: move one to the other")
        if tensor.shape != shape:
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, and {tuple(shape)} is needed")
        if tensor.dtype not in KERNEL_DTYPES:
            raise TypeError(f"{name} is {tensor.dtype}, and the kernels compute in fp32: give fp32, bf16 or fp16")
        refuse_autocast(name, tensor)


def refuse_autocast(name, tensor):
    """Raise TypeError where autocast would have a product compute in another type than the tensor's."""
    kind = "cuda" if tensor.is_cuda else "cpu"
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != tensor.dtype:
        types = f"{name} is {tensor.dtype} and torch.autocast to {torch.get_autocast_dtype(kind)} is on"
        raise TypeError(f"{types}: call the kernels outside it")


def as_rows(x):
    """View x (..., cols) as (rows, cols); copy it only if its columns are strided or its rows not evenly spaced."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def first_derivative_only(backward):
    """Let a backward() refuse to be differentiated itself.

    PyTorch's once_differentiable refuses only where a gradient flows into backward(), and is silent where none does.
    """

    def checked(ctx, *gradients):
        if torch.is_grad_enabled():  # only with create_graph=True, in a backward pass
            raise RuntimeError(f"{ctx.name()} has no second derivative: call backward() without create_graph=True")
        return backward(ctx, *gradients)

    return checked


# The library's fast products move 16 bytes at a time. Where rows, of an operand or of the result, are no multiple of 8
# elements, a product takes 2.5 to 7.3 times as long: measured on an H100, in bf16, with vocabularies such as 50,257.
# FlatAdamW therefore places rows of zeros behind such a weight, up to a multiple of 16, which takes 0.96 of the time of
# the next multiple of 8.
FAST_MULTIPLE, PADDED_MULTIPLE = 8, 16


def padded_length(length):
    """Return the number of rows or columns, at least length, that products of matrices are fast with."""
    return cdiv(length, PADDED_MULTIPLE) * PADDED_MULTIPLE if length % FAST_MULTIPLE else length


def padded_shape(parameter):
    """Return the shape that a parameter has in FlatAdamW's buffers: a matrix gets rows of zeros."""
    return (padded_length(len(parameter)), parameter.shape[1]) if parameter.dim() == 2 else parameter.shape


def padded(weight):
    """Return a weight with the rows of zeros that FlatAdamW has placed behind it, else the weight itself."""
    return weight.padded if isinstance(weight, OwnedParameter) else weight


def give_gradient(weight, is_needed, write, *inputs):
    """Return the gradient of a weight or, where FlatAdamW owns the weight, write it into its buffer and return None.

    write(place, accumulate, *inputs) computes the gradient into place or, with accumulate, adds it. The weight is the
    parameter itself; a frozen one needs none.
    """
    refuse_autocast("the gradient", weight)
    if not is_needed:
        return None
    if not isinstance(weight, OwnedParameter):
        gradient = weight.new_empty(weight.shape)
        write(gradient, False, *inputs)
        return gradient  # which autograd adds to .grad
    # As in Megatron, a weight has a main_grad. zero_grad() sets .grad to None: the first backward pass then overwrites
    # main_grad and makes it the .grad, and others add to it.
    if weight.grad is not None and weight.grad is not weight.main_grad:  # of another term of the loss
        weight.main_grad.copy_(weight.grad)
    write(weight.padded_grad, weight.grad is not None, *inputs)
    weight.grad = weight.main_grad
    return None


def write_product(place, accumulate, y_grad, x):
    """place (N, K) (+)= y_grad (rows, N)^T @ x (rows, K), for give_gradient().

    Groups of n layers have (n, N, K), (n, rows, N) and (n, rows, K). place may have more rows of padding, which stay,
    and x more columns: their product is left out.
    """
    place = place[..., : y_grad.shape[-1], :]
    if x.shape[-1] > place.shape[-1]:  # the product with all columns, and a copy, are faster than one with a part
        product = torch.matmul(y_grad.mT, x)[..., : place.shape[-1]]
        place.add_(product) if accumulate else place.copy_(product)
    else:
        multiply = torch.addmm if place.dim() == 2 else torch.baddbmm
        multiply(place, y_grad.mT, x, beta=int(accumulate), out=place)


# ----------------------------------------------------------------------------------------------------------------------
# 5 Linear: the projections of attention, and the head. The library multiplies. What is ours is where the gradient of a
# weight goes, and the padding.


class LinearFunction(torch.autograd.Function):
    """F.linear, whose weight's gradient is written to where the optimizer reads it. Products take padded weights."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight  # the parameter itself: autograd may give back a copy of what it has saved
        y = F.linear(x, padded(weight))
        if y.shape[-1] == len(weight):
            return y
        ctx.padded_y = y.view(-1, y.shape[-1])
        return y[..., : len(weight)].detach()  # to autograd no view, so that the loss may overwrite it

    @staticmethod
    @first_derivative_only
    def backward(ctx, y_grad):
        x, weight = ctx.saved_tensors
        y_grad = y_grad.reshape(-1, len(weight))
        matrix, padded_y = padded(ctx.weight), getattr(ctx, "padded_y", None)
        if len(matrix) > len(weight):
            # Columns of zeros meet the weight's rows of zeros. The loss kernel has overwritten y, which has them.
            in_place = padded_y is not None and padded_y.data_ptr() == y_grad.data_ptr()
            in_place = in_place and padded_y.stride() == y_grad.stride()
            y_grad = padded_y if in_place else F.pad(y_grad, (0, len(matrix) - len(weight)))
        # y = x W^T, so the gradient of x is y_grad W, and that of W is y_grad^T x, a sum over all rows.
        x_grad = torch.mm(y_grad, matrix).view_as(x) if ctx.needs_input_grad[0] else None
        rows = x.reshape(-1, x.shape[-1])
        return x_grad, give_gradient(ctx.weight, ctx.needs_input_grad[1], write_product, y_grad, rows)


@outside_compiler
def triton_linear(x, weight):
    """x (..., K) @ weight (N, K)^T -> (..., N), in their type; of other shapes PyTorch reports an error."""
    expect(x=(x, x.shape))  # of the type: shapes are the library's to check
    return LinearFunction.apply(x, weight)


# ----------------------------------------------------------------------------------------------------------------------
# 6 RMSNorm, fused with the addition to the residual stream before it (Zhang and Sennrich, arXiv:1910.07467)


@jit
def rmsnorm_kernel(
    x_ptr,  # (n_rows, N_COLS)
    branch_ptr,  # (n_rows, N_COLS), read if HAS_BRANCH
    weight_ptr,  # (N_COLS,)
    residual_ptr,  # out: (n_rows, N_COLS), written if HAS_BRANCH
    y_ptr,  # out: (n_rows, N_COLS)
    rstd_ptr,  # out: (n_rows,) in fp32, which the backward pass reads
    stride_x_row,
    stride_branch_row,
    n_rows,
    eps,
    N_COLS: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # columns that are processed at a time
):
    """residual = x + branch;  y = residual * rstd * weight,  rstd = 1 / sqrt(mean(residual^2) + eps).

    Grid: (blocks of rows,). A row longer than BLOCK_SIZE is read twice: once for its sum, once for y.
    """
    # A program has BLOCK_ROWS rows. Their numbers have 64 bits, because rows * stride may exceed 2^31.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = rows < n_rows
    square_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    x = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], tl.float32)  # Triton forgets what is first set within a loop
    for start in range(0, N_COLS, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        mask = row_mask[:, None] & (cols < N_COLS)[None, :]
        # x: a tile (BLOCK_ROWS, BLOCK_SIZE) in fp32
        x = load(tile_ptrs(x_ptr, rows, stride_x_row, cols), mask)
        if HAS_BRANCH:
            branch = load(tile_ptrs(branch_ptr, rows, stride_branch_row, cols), mask)
            residual = (x + branch).to(residual_ptr.dtype.element_ty)
            tl.store(tile_ptrs(residual_ptr, rows, N_COLS, cols), residual, mask=mask)
            # Normalize the rounded value, which the backward pass will read.
            x = residual.to(tl.float32)
        # Masked elements are 0 and add nothing: (BLOCK_ROWS, BLOCK_SIZE) -> (BLOCK_ROWS,).
        square_sum += tl.sum(x * x, axis=1)
    # One number per row; N_COLS and not BLOCK_SIZE counts the elements that are there.
    rstd = 1.0 / tl.sqrt(square_sum / N_COLS + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + rows, rstd, mask=row_mask)
    for start in range(0, N_COLS, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        mask = row_mask[:, None] & (cols < N_COLS)[None, :]
        # A row that fits into one tile is still in registers.
        if BLOCK_SIZE < N_COLS:
            if HAS_BRANCH:
                x = load(tile_ptrs(residual_ptr, rows, N_COLS, cols), mask)
            else:
                x = load(tile_ptrs(x_ptr, rows, stride_x_row, cols), mask)
        weight = load(weight_ptr + cols, cols < N_COLS)
        y = x * rstd[:, None] * weight[None, :]
        store(tile_ptrs(y_ptr, rows, N_COLS, cols), y, mask)


@jit
def rmsnorm_backward_kernel(
    y_grad_ptr,  # in: (n_rows, N_COLS); out, if RECOMPUTE: forward's y, in place
    residual_grad_ptr,  # (n_rows, N_COLS), the gradient of forward's residual, read if HAS_RESIDUAL_GRAD
    x_ptr,  # (n_rows, N_COLS), forward's residual
    weight_ptr,  # (N_COLS,)
    rstd_ptr,  # (n_rows,) in fp32
    x_grad_ptr,  # out: (n_rows, N_COLS)
    partial_ptr,  # out: (programs, N_COLS) in fp32, whose column sums are the weight's gradient
    stride_y_grad_row,
    stride_residual_grad_row,
    stride_x_row,
    n_rows,
    N_COLS: tl.constexpr,
    HAS_RESIDUAL_GRAD: tl.constexpr,
    RECOMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """With n = x * rstd and g = y_grad * weight:  x_grad = (g - n * mean(n * g)) * rstd + residual_grad.

    Each program walks over tiles of rows, num_programs apart, and writes its sum of y_grad * n to its row of partial.
    """
    cols = tl.arange(0, BLOCK_SIZE)
    col_mask = cols < N_COLS
    weight = load(weight_ptr + cols, col_mask)
    # Each element of the tile sums its own column in registers; rows are added up once, after the loop.
    weight_grad = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], tl.float32)
    # Program 0 takes tiles 0, n, 2n, ... of n programs, so that few rows of partial have to be added later.
    for tile in range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_ROWS), tl.num_programs(0)):
        rows = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        row_mask = rows < n_rows
        mask = row_mask[:, None] & col_mask[None, :]
        # All tiles are (BLOCK_ROWS, BLOCK_SIZE); a whole row is in one tile.
        x = load(tile_ptrs(x_ptr, rows, stride_x_row, cols), mask)
        y_grad_ptrs = tile_ptrs(y_grad_ptr, rows, stride_y_grad_row, cols)
        y_grad = load(y_grad_ptrs, mask)
        rstd = load(rstd_ptr + rows, row_mask)
        # Recomputed rather than stored by forward: a product costs less than reading a tensor.
        normalized = x * rstd[:, None]
        if RECOMPUTE:  # in the order of forward, and so with its bits
            store(y_grad_ptrs, normalized * weight[None, :], mask)
        weight_grad += y_grad * normalized
        scaled_grad = y_grad * weight[None, :]
        # rstd depends on the whole row: that is the part of the gradient that lies along the row itself.
        mean = tl.sum(normalized * scaled_grad, axis=1) / N_COLS
        x_grad = (scaled_grad - normalized * mean[:, None]) * rstd[:, None]
        if HAS_RESIDUAL_GRAD:
            x_grad += load(tile_ptrs(residual_grad_ptr, rows, stride_residual_grad_row, cols), mask)
        store(tile_ptrs(x_grad_ptr, rows, N_COLS, cols), x_grad, mask)
    tl.store(partial_ptr + tl.program_id(0) * N_COLS + cols, tl.sum(weight_grad, axis=0), mask=col_mask)


@jit
def column_sum_kernel(
    partial_ptr,  # (sums, n_rows, n_cols) in fp32
    sum_ptr,  # out: (sums, n_cols)
    stride_sum,
    n_rows,
    n_cols,
    ACCUMULATE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """sum[n, c] (+)= partial[n, 0, c] + partial[n, 1, c] + ..., in an order that does not depend on timing.

    Grid: (blocks of columns, sums). The library would need a launch for the sum and one to round it.
    """
    cols = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    sum_ptrs = sum_ptr + tl.program_id(1).to(tl.int64) * stride_sum + cols
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for start in range(0, n_rows, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        # (BLOCK_ROWS, BLOCK_COLS): element (r, c) adds the rows r, r + BLOCK_ROWS, ... of column c.
        total += load(tile_ptrs(partial_ptr + tl.program_id(1) * n_rows * n_cols, rows, n_cols, cols), mask)
    # The compiler adds the rows of a tile in one fixed order, a tree.
    sums = tl.sum(total, axis=0)
    if ACCUMULATE:
        sums += load(sum_ptrs, cols < n_cols)
    store(sum_ptrs, sums, cols < n_cols)


NormTile = collections.namedtuple("NormTile", "rows cols warps programs")
COLUMN_SUM_TILE = (128, 16, 8)  # rows, columns, warps; 32 or 64 columns leave too few programs: 1.2 times as long
# Elements that a program processes at a time, measured beside half and twice as many.
NORM_FORWARD_ELEMENTS = 4096  # 2048 to 8192 are within 2 %
NORM_BACKWARD_ELEMENTS = 8192  # half takes 1.3 times as long, twice 2.6 times


@functools.cache
def norm_tile(n_rows, n_cols, backward, device_type, block_size=None):
    """Return the NormTile for rows of n_cols: fewer rows than would fit where multiprocessors would be idle."""
    gpu = get_gpu(device_type)
    cols = block_size or next_power_of_2(n_cols)
    # With few rows, one program each keeps more multiprocessors busy than full tiles would.
    rows_per_sm = next_power_of_2(cdiv(n_rows, gpu.num_sms))
    elements = NORM_BACKWARD_ELEMENTS if backward else NORM_FORWARD_ELEMENTS
    rows = max(1, min(elements // cols, rows_per_sm))
    # A warp of Instinct has twice as many threads. Except there and on Hopper, backward needs twice as many warps, or
    # registers spill.
    if backward:
        warps = min(max(4, cols // 2048) * (2 if gpu.family in ("nvidia", "rdna") else 1), 16)
    else:
        warps = min(max(4, cols // 1024), 16) * 32 // gpu.warp_size
    # Each thread has an element of its own: of one that several have, a thread could read what another has overwritten.
    rows = max(rows, cdiv(warps * gpu.warp_size, cols))
    programs = cdiv(n_rows, rows)
    if backward:
        programs = min(programs, 2 * gpu.num_sms)  # each loops over several tiles
    return NormTile(rows, cols, warps, programs)


def rmsnorm_forward(x, branch, weight, eps, block_size=None, out=None):
    """Return residual, y (rows, cols) and rstd (rows,) in fp32; if branch is None, residual is x itself.

    x and branch (rows, cols) have contiguous rows, weight is (cols,). The kernel takes block_size columns at a time, by
    default the whole row. y is written to out if it is given.
    """
    assert weight.is_contiguous(), "the kernel reads weight as contiguous"
    n_rows, n_cols = x.shape
    # Triton wants a tensor for every pointer. One that the kernel does not touch gets a placeholder.
    has_branch = branch is not None
    tile = norm_tile(n_rows, n_cols, False, x.device.type, block_size)
    y = x.new_empty(n_rows, n_cols) if out is None else out
    rstd = x.new_empty(n_rows, dtype=torch.float32)
    residual = x.new_empty(n_rows, n_cols) if has_branch else x
    if not has_branch:
        branch = x  # a placeholder
    launch(
        rmsnorm_kernel,
        (tile.programs,),
        (x, branch, weight, residual, y, rstd),
        (x.stride(0), branch.stride(0), n_rows, eps),
        dict(N_COLS=n_cols, HAS_BRANCH=has_branch, BLOCK_ROWS=tile.rows, BLOCK_SIZE=tile.cols),
        num_warps=tile.warps,
    )
    return residual, y, rstd


def rmsnorm_backward(y_grad, residual_grad, x, weight, rstd, out=None, partial=None, recompute=False):
    """Return x_grad (rows, cols), residual_grad included, and partial (programs, cols): see the kernel.

    y_grad, residual_grad (or None) and x, forward's residual, are (rows, cols) with contiguous rows. x_grad and partial
    are written to out and partial if they are given. With recompute, y_grad is overwritten with forward's y.
    """
    n_rows, n_cols = x.shape
    tile = norm_tile(n_rows, n_cols, True, x.device.type)
    x_grad = x.new_empty(n_rows, n_cols) if out is None else out
    if partial is None:
        partial = x.new_empty(tile.programs, n_cols, dtype=torch.float32)
    has_residual_grad = residual_grad is not None
    if not has_residual_grad:
        residual_grad = y_grad  # a placeholder
    launch(
        rmsnorm_backward_kernel,
        (tile.programs,),
        (y_grad, residual_grad, x, weight, rstd, x_grad, partial),
        (y_grad.stride(0), residual_grad.stride(0), x.stride(0), n_rows),
        dict(
            N_COLS=n_cols,
            HAS_RESIDUAL_GRAD=has_residual_grad,
            RECOMPUTE=recompute,
            BLOCK_ROWS=tile.rows,
            BLOCK_SIZE=tile.cols,
        ),
        num_warps=tile.warps,
    )
    return x_grad, partial


def write_column_sums(place, accumulate, partial):
    """place (..., cols) (+)= the column sums of partial (..., rows, cols), for give_gradient()."""
    n_rows, n_cols = partial.shape[-2:]
    rows, cols, warps = COLUMN_SUM_TILE
    launch(
        column_sum_kernel,
        (cdiv(n_cols, cols), place.numel() // n_cols),
        (partial, place),
        (place.stride(0), n_rows, n_cols),
        dict(ACCUMULATE=accumulate, BLOCK_ROWS=rows, BLOCK_COLS=cols),
        num_warps=warps,
    )


class RMSNormFunction(torch.autograd.Function):
    """See triton_rmsnorm."""

    @staticmethod
    def forward(ctx, x, branch, weight, eps):
        ctx.has_branch = branch is not None
        ctx.weight = weight  # the parameter itself: torch.utils.checkpoint saves a copy of it
        residual, y, rstd = rmsnorm_forward(as_rows(x), as_rows(branch) if ctx.has_branch else None, weight, eps)
        # Saving the weight too lets autograd refuse a backward pass after the weight was changed.
        ctx.save_for_backward(residual, weight, rstd)
        ctx.set_materialize_grads(False)  # an output that nothing uses, as the last norm's residual, gets None
        return y.view_as(x), residual.view_as(x) if ctx.has_branch else x

    @staticmethod
    @first_derivative_only
    def backward(ctx, y_grad, residual_grad):
        if y_grad is None:  # only the residual was used
            return residual_grad, residual_grad if ctx.has_branch else None, None, None
        residual, weight, rstd = ctx.saved_tensors
        # The residual leaves this norm twice: into y, and on to the next one, whose gradient comes as residual_grad.
        residual_rows = None if residual_grad is None else as_rows(residual_grad)
        x_grad, partial = rmsnorm_backward(as_rows(y_grad), residual_rows, residual, weight, rstd)
        x_grad = x_grad.view_as(y_grad)
        weight_grad = give_gradient(ctx.weight, ctx.needs_input_grad[2], write_column_sums, partial)
        # residual = x + branch, so both have the same gradient. eps has none.
        return x_grad, x_grad if ctx.has_branch else None, weight_grad, None


@outside_compiler
def triton_rmsnorm(x, branch, weight, eps):
    """Return y and residual, both like x (..., cols): residual = x + branch, or x if branch is None; y its RMSNorm."""
    expect(x=(x, x.shape), branch=(branch, x.shape), weight=(weight, x.shape[-1:]))
    return RMSNormFunction.apply(x, branch, weight.contiguous(), eps)


def torch_rmsnorm(x, branch, weight, eps):
    """Compute triton_rmsnorm in PyTorch's operators."""
    residual = x if branch is None else x + branch
    return residual * torch.rsqrt(residual.pow(2).mean(-1, keepdim=True) + eps) * weight, residual


def sdpa_rmsnorm(x, branch, weight, eps):
    """Compute triton_rmsnorm by PyTorch's fused operator."""
    residual = x if branch is None else x + branch
    return F.rms_norm(residual, weight.shape, weight, eps), residual


# ----------------------------------------------------------------------------------------------------------------------
# 7 Attention: causal, with grouped queries and rotary embedding (Dao, FlashAttention-2, arXiv:2307.08691)
#
# forward      o = softmax(q k^T * scale) v, where a query sees the keys up to its own position
# backward     p = exp(q k^T * scale - lse), recomputed tile by tile from the log-sum-exp lse that forward has saved
#              v_grad = p^T o_grad,  s_grad = p * (o_grad v^T - delta),  delta = rowsum(o * o_grad)
#              q_grad = s_grad k * scale,  k_grad = s_grad^T q * scale
#
# Tensors are (batch, seq, heads, head_dim) with any strides. GROUP_SIZE query heads share one head of k and v. A tile
# has BLOCK_M queries or BLOCK_N keys as rows, and BLOCK_D >= HEAD_DIM dimensions of a head as columns. m_i and l_i are
# the running maximum and sum of a row's softmax. Scores, m_i and lse are in base 2: scaled by log2(e).

# The score matrix of a head, of which a program computes the rows of its block of queries (or the columns of its block
# of keys), in two parts, drawn for BLOCK_M = BLOCK_N:
#
#             keys 0   1   2   3        m  part 0, tiles on the diagonal, where the mask decides about each element
#  queries 0       m   .   .   .        x  part 1, tiles where each query sees each key: no mask
#          1       x   m   .   .        .  tiles of keys that come after all queries: not computed
#          2       x   x   m   .
#          3       x   x   x   m

# The strides of the tensors of an attention kernel; forward has the first four. They are constants: the compiler sees
# which addresses are aligned, and a tile's are one address plus constants.
Stride = collections.namedtuple("Stride", "batch seq head dim")
Strides = collections.namedtuple("Strides", "q k v o o_grad q_grad k_grad v_grad", defaults=(None,) * 4)


class AttentionConstants(NamedTuple):
    """What an attention kernel is compiled for. The kernels take it as one argument, C."""

    STRIDES: Strides
    HEAD_DIM: int
    BLOCK_D: int  # the head dimension, padded to a power of two
    GROUP_SIZE: int  # query heads per key/value head
    SHARE: int  # backward: query heads of a group for which one program adds up k_grad and v_grad
    BLOCK_M: int  # queries of a tile
    BLOCK_N: int  # keys of a tile
    EVEN: bool  # whether the sequence is a multiple of both blocks, so that no rows need a mask
    PRECISION: str  # tl.dot's input_precision
    ROUND_BY_HAND: bool  # see rounded_like()
    ROTARY: bool  # backward: whether to rotate the gradients of q and k back
    INT64_OFFSETS: bool  # whether to compute the offsets of loads in 64 bits, see key_value_gradient()


@jit
def head_ptr(ptr, strides, batch, head):
    """Return a pointer to the (seq, head_dim) matrix of one head; batch is in 64 bits."""
    return ptr + batch * strides.batch + head * strides.head


@jit
def head_columns(C):
    """Return the offsets and the mask of a tile's columns.

    The two rotary halves of a head are each padded to a power of two. A head of 40 has BLOCK_D = 64: columns 0 to 19
    are dimensions 0 to 19, columns 32 to 51 are dimensions 20 to 39, and the others are masked.
    """
    HALF: tl.constexpr = C.BLOCK_D // 2
    cols = tl.arange(0, C.BLOCK_D)
    offsets = cols
    if C.HEAD_DIM != C.BLOCK_D:
        offsets = cols % HALF + (cols // HALF) * (C.HEAD_DIM // 2)
    # Where a constant makes a mask true, as here and with `| EVEN` below, the compiler drops the mask.
    return offsets, (cols % HALF < C.HEAD_DIM // 2) | (C.HEAD_DIM == C.BLOCK_D)


@jit
def load_tile(ptr, strides, rows, n_rows, EVEN: tl.constexpr, C):
    """Load (rows, BLOCK_D) of the head at ptr, zero in padding columns and, unless EVEN, in rows from n_rows on."""
    cols, col_mask = head_columns(C)
    mask = ((rows < n_rows) | EVEN)[:, None] & col_mask[None, :]
    if C.INT64_OFFSETS:
        rows, cols = rows.to(tl.int64), cols.to(tl.int64)
    return tl.load(ptr + rows[:, None] * strides.seq + cols[None, :] * strides.dim, mask=mask, other=0.0)


@jit
def store_tile(ptr, strides, tile, rows, n_rows, C):
    """Store what load_tile would load, rounded to the type that ptr points to."""
    cols, col_mask = head_columns(C)
    ptrs = ptr + rows[:, None] * strides.seq + cols[None, :] * strides.dim
    store(ptrs, tile, (rows < n_rows)[:, None] & col_mask[None, :])


@jit
def rotate_back(x, cos_ptr, sin_ptr, rows, n_rows, ROWS: tl.constexpr, C):
    """Invert rope_kernel on x (ROWS, BLOCK_D), for the gradients of q and k before they are stored."""
    HALF: tl.constexpr = C.BLOCK_D // 2
    cols = tl.arange(0, HALF)
    mask = (rows < n_rows)[:, None] & (cols < C.HEAD_DIM // 2)[None, :]
    cos = load(tile_ptrs(cos_ptr, rows, C.HEAD_DIM // 2, cols), mask)
    sin = load(tile_ptrs(sin_ptr, rows, C.HEAD_DIM // 2, cols), mask)
    # Split a head into its halves, (ROWS, HALF) each, and join them again after the rotation.
    first, second = x.reshape(ROWS, 2, HALF).permute(0, 2, 1).split()
    rotated = tl.join(first * cos + second * sin, second * cos - first * sin)
    return rotated.permute(0, 2, 1).reshape(ROWS, C.BLOCK_D)


@jit
def rounded_like(x, other, C):
    """Round x, in fp32, to the type of other, by which it will be multiplied.

    AMD GPUs before gfx950 have no instruction to round to bf16. The compiler emits five per number, and vector
    instructions then limit the loops on gfx942. ROUND_BY_HAND is one addition to the bits, whose upper half is bf16. It
    differs in ties only, which go away from 0. A NaN remains one if its lower bits are 0, as those of loaded bf16 are.
    """
    if C.ROUND_BY_HAND:
        bits = x.to(tl.uint32, bitcast=True) + 0x8000
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(other.dtype)


@jit
def flash_attention_kernel(
    q_ptr,  # (batch, seq_len, num_heads, HEAD_DIM)
    k_ptr,  # (batch, seq_len, num_heads / GROUP_SIZE, HEAD_DIM)
    v_ptr,  # like k
    o_ptr,  # out: like q
    lse_ptr,  # out: (batch, num_heads, seq_len) in fp32
    num_heads,
    seq_len,
    qk_scale,  # scale * log2(e)
    C,
):
    """o = softmax(q k^T * scale) v under the causal mask. A new maximum of a row rescales its sums so far.

    Grid: (batch * num_heads, blocks of queries). The last queries, which have the most keys, start first.
    """
    batch_head = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    batch, head = (batch_head // num_heads).to(tl.int64), batch_head % num_heads
    # The positions of this block's queries in the sequence.
    rows = block * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
    k_ptr = head_ptr(k_ptr, C.STRIDES.k, batch, head // C.GROUP_SIZE)
    v_ptr = head_ptr(v_ptr, C.STRIDES.v, batch, head // C.GROUP_SIZE)
    # The tile of queries, (BLOCK_M, BLOCK_D), stays in registers; keys and values stream past it.
    q = load_tile(head_ptr(q_ptr, C.STRIDES.q, batch, head), C.STRIDES.q, rows, seq_len, C.EVEN, C)
    # Per query: the largest score so far, the sum of exp2(score - m_i), and the sum of those times v.
    m_i = tl.full([C.BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([C.BLOCK_M], tl.float32)
    acc = tl.zeros([C.BLOCK_M, C.BLOCK_D], tl.float32)
    # Every query of the block sees all keys before `diagonal`. First come the keys on the diagonal, under a mask, which
    # give each row a finite maximum; then those before it, without one.
    diagonal = block * C.BLOCK_M // C.BLOCK_N * C.BLOCK_N
    for part in tl.static_range(2):
        begin = diagonal if part == 0 else 0
        end = tl.minimum((block + 1) * C.BLOCK_M, seq_len) if part == 0 else diagonal
        for start in range(begin, end, C.BLOCK_N):
            keys = start + tl.arange(0, C.BLOCK_N)
            k = load_tile(k_ptr, C.STRIDES.k, keys, seq_len, C.EVEN or part == 1, C)
            # Scores: (BLOCK_M, BLOCK_D) x (BLOCK_D, BLOCK_N) -> (BLOCK_M, BLOCK_N)
            qk = tl.dot(q, tl.trans(k), input_precision=C.PRECISION)
            if part == 0:
                # Also hides keys past the end of the sequence, which no query comes after.
                qk = tl.where(keys[None, :] <= rows[:, None], qk, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(qk, axis=1) * qk_scale)
            # At most 1: no exponential overflows. Masked scores are -inf, and exp2(-inf) is 0.
            p = tl.exp2(qk * qk_scale - m_new[:, None])
            # What was summed under the old maximum shrinks to the new one.
            rescale = tl.exp2(m_i - m_new)
            l_i = l_i * rescale + tl.sum(p, axis=1)
            v = load_tile(v_ptr, C.STRIDES.v, keys, seq_len, C.EVEN or part == 1, C)
            # Output: (BLOCK_M, BLOCK_N) x (BLOCK_N, BLOCK_D) -> (BLOCK_M, BLOCK_D)
            acc = tl.dot(rounded_like(p, v, C), v, acc * rescale[:, None], input_precision=C.PRECISION)
            m_i = m_new
    # Only now are the rows divided by their sums, once instead of once a block.
    store_tile(head_ptr(o_ptr, C.STRIDES.o, batch, head), C.STRIDES.o, acc / l_i[:, None], rows, seq_len, C)
    # With lse, backward computes any p again without a maximum and a sum.
    tl.store(lse_ptr + (batch * num_heads + head) * seq_len + rows, m_i + tl.log2(l_i), mask=rows < seq_len)


@jit
def query_gradient(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    o_grad_ptr,
    lse_ptr,
    delta_ptr,
    q_grad_ptr,
    cos_ptr,
    sin_ptr,
    batch_head,
    block,
    num_heads,
    seq_len,
    scale,
    qk_scale,
    STORE_DELTA: tl.constexpr,
    C,
):
    """q_grad = s_grad k * scale of one block of queries, s_grad = p * (o_grad v^T - delta)."""
    batch, head = (batch_head // num_heads).to(tl.int64), batch_head % num_heads
    rows = block * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
    row_offsets, row_mask = (batch * num_heads + head) * seq_len + rows, (rows < seq_len) | C.EVEN
    k_ptr = head_ptr(k_ptr, C.STRIDES.k, batch, head // C.GROUP_SIZE)
    v_ptr = head_ptr(v_ptr, C.STRIDES.v, batch, head // C.GROUP_SIZE)
    # Tiles of queries, all (BLOCK_M, BLOCK_D), stay; keys and values stream past them.
    q = load_tile(head_ptr(q_ptr, C.STRIDES.q, batch, head), C.STRIDES.q, rows, seq_len, C.EVEN, C)
    o_grad_ptr = head_ptr(o_grad_ptr, C.STRIDES.o_grad, batch, head)
    o_grad = load_tile(o_grad_ptr, C.STRIDES.o_grad, rows, seq_len, C.EVEN, C)
    o = load_tile(head_ptr(o_ptr, C.STRIDES.o, batch, head), C.STRIDES.o, rows, seq_len, C.EVEN, C)
    # The softmax's own part of the gradient, one number a query: a row of p must go on adding up to 1.
    delta = tl.sum(o.to(tl.float32) * o_grad.to(tl.float32), axis=1)
    if STORE_DELTA:
        tl.store(delta_ptr + row_offsets, delta, mask=row_mask)
    lse = load(lse_ptr + row_offsets, row_mask)
    # The program owns these queries, and nobody else adds to their gradient.
    q_grad = tl.zeros([C.BLOCK_M, C.BLOCK_D], tl.float32)
    diagonal = block * C.BLOCK_M // C.BLOCK_N * C.BLOCK_N
    for part in tl.static_range(2):  # as forward: the keys on the diagonal, then those before it
        begin = diagonal if part == 0 else 0
        end = tl.minimum((block + 1) * C.BLOCK_M, seq_len) if part == 0 else diagonal
        for start in range(begin, end, C.BLOCK_N):
            keys = start + tl.arange(0, C.BLOCK_N)
            k = load_tile(k_ptr, C.STRIDES.k, keys, seq_len, C.EVEN or part == 1, C)
            v = load_tile(v_ptr, C.STRIDES.v, keys, seq_len, C.EVEN or part == 1, C)
            # p and its gradient: (BLOCK_M, BLOCK_D) x (BLOCK_D, BLOCK_N) -> (BLOCK_M, BLOCK_N)
            p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=C.PRECISION) * qk_scale - lse[:, None])
            if part == 0:
                p = tl.where(keys[None, :] <= rows[:, None], p, 0.0)
            s_grad = p * (tl.dot(o_grad, tl.trans(v), input_precision=C.PRECISION) - delta[:, None])
            # (BLOCK_M, BLOCK_N) x (BLOCK_N, BLOCK_D) -> (BLOCK_M, BLOCK_D)
            q_grad = tl.dot(rounded_like(s_grad, k, C), k, q_grad, input_precision=C.PRECISION)
    # The scores were q k^T * scale: so are their gradients.
    q_grad *= scale
    if C.ROTARY:
        q_grad = rotate_back(q_grad, cos_ptr, sin_ptr, rows, seq_len, C.BLOCK_M, C)
    store_tile(head_ptr(q_grad_ptr, C.STRIDES.q_grad, batch, head), C.STRIDES.q_grad, q_grad, rows, seq_len, C)


@jit
def key_value_gradient(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    o_grad_ptr,
    lse_ptr,
    delta_ptr,
    k_grad_ptr,
    v_grad_ptr,
    cos_ptr,
    sin_ptr,
    batch_share,
    block,
    num_shares,
    seq_len,
    scale,
    qk_scale,
    LOAD_DELTA: tl.constexpr,
    C,
):
    """v_grad = p^T o_grad and k_grad = s_grad^T q * scale of one block of keys, summed over SHARE heads that share it.

    The tiles of scores are transposed, so that p^T and s_grad^T stay in registers for the next product. Few registers
    remain for addresses, which are one address plus constants if INT64_OFFSETS lets the compiler prove that the sums do
    not overflow.
    """
    batch, share = (batch_share // num_shares).to(tl.int64), batch_share % num_shares
    head_kv = share * C.SHARE // C.GROUP_SIZE
    keys = block * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
    # Tiles of keys, all (BLOCK_N, BLOCK_D), stay; queries stream past them.
    k = load_tile(head_ptr(k_ptr, C.STRIDES.k, batch, head_kv), C.STRIDES.k, keys, seq_len, C.EVEN, C)
    v = load_tile(head_ptr(v_ptr, C.STRIDES.v, batch, head_kv), C.STRIDES.v, keys, seq_len, C.EVEN, C)
    # The program owns these keys, and adds over all queries that see them.
    k_grad = tl.zeros([C.BLOCK_N, C.BLOCK_D], tl.float32)
    v_grad = tl.zeros([C.BLOCK_N, C.BLOCK_D], tl.float32)
    # The score matrix read by columns: a block of keys is seen by the queries on the diagonal and below it. Queries
    # before `begin` see none of these keys, those from `end` on see them all.
    begin = block * C.BLOCK_N // C.BLOCK_M * C.BLOCK_M
    end = tl.minimum(tl.cdiv((block + 1) * C.BLOCK_N, C.BLOCK_M) * C.BLOCK_M, seq_len)
    # Query heads that share these keys, one after the other: their gradients add up without atomics.
    for head in range(share * C.SHARE, (share + 1) * C.SHARE):
        q_head_ptr = head_ptr(q_ptr, C.STRIDES.q, batch, head)
        o_head_ptr = head_ptr(o_ptr, C.STRIDES.o, batch, head)
        o_grad_head_ptr = head_ptr(o_grad_ptr, C.STRIDES.o_grad, batch, head)
        row_offset = (batch * num_shares * C.SHARE + head) * seq_len
        for part in tl.static_range(2):  # the queries on the diagonal, then those after it
            for start in range(begin if part == 0 else end, end if part == 0 else seq_len, C.BLOCK_M):
                rows = start + tl.arange(0, C.BLOCK_M)
                q = load_tile(q_head_ptr, C.STRIDES.q, rows, seq_len, C.EVEN, C)
                o_grad = load_tile(o_grad_head_ptr, C.STRIDES.o_grad, rows, seq_len, C.EVEN, C)
                # Rows past the end have q, o_grad and delta of 0: they add 0 to both gradients.
                row_mask = (rows < seq_len) | C.EVEN
                lse = load(lse_ptr + row_offset + rows, row_mask)
                if LOAD_DELTA:
                    delta = load(delta_ptr + row_offset + rows, row_mask)
                else:
                    o = load_tile(o_head_ptr, C.STRIDES.o, rows, seq_len, C.EVEN, C)
                    delta = tl.sum(o.to(tl.float32) * o_grad.to(tl.float32), axis=1)
                # Both products: (BLOCK_N, BLOCK_D) x (BLOCK_D, BLOCK_M) -> (BLOCK_N, BLOCK_M). In half precision the
                # second is issued right after the first, so that both are under way when p is needed. In fp32, two
                # tiles of scores at a time would spill registers.
                s = tl.dot(k, tl.trans(q), input_precision=C.PRECISION)
                # p_grad = o_grad v^T, transposed like s.
                if q.dtype != tl.float32:
                    p_grad = tl.dot(v, tl.trans(o_grad), input_precision=C.PRECISION)
                p = tl.exp2(s * qk_scale - lse[None, :])
                if part == 0:
                    p = tl.where(keys[:, None] <= rows[None, :], p, 0.0)
                # (BLOCK_N, BLOCK_M) x (BLOCK_M, BLOCK_D) -> (BLOCK_N, BLOCK_D)
                v_grad = tl.dot(rounded_like(p, o_grad, C), o_grad, v_grad, input_precision=C.PRECISION)
                if q.dtype == tl.float32:
                    p_grad = tl.dot(v, tl.trans(o_grad), input_precision=C.PRECISION)
                s_grad = p * (p_grad - delta[None, :])
                k_grad = tl.dot(rounded_like(s_grad, q, C), q, k_grad, input_precision=C.PRECISION)
    # As for q_grad. v was not scaled.
    k_grad *= scale
    if C.ROTARY:
        k_grad = rotate_back(k_grad, cos_ptr, sin_ptr, keys, seq_len, C.BLOCK_N, C)
    store_tile(head_ptr(k_grad_ptr, C.STRIDES.k_grad, batch, share), C.STRIDES.k_grad, k_grad, keys, seq_len, C)
    store_tile(head_ptr(v_grad_ptr, C.STRIDES.v_grad, batch, share), C.STRIDES.v_grad, v_grad, keys, seq_len, C)


def backward_kernel_name(specialization):
    """Return the name under which profilers show flash_attention_backward_kernel: that of its PART."""
    part = specialization.constants["PART"]
    return "flash_attention_backward_kernel" if part == "fused" else f"flash_attention_backward_{part}_kernel"


@jit(repr=backward_kernel_name)
def flash_attention_backward_kernel(
    q_ptr,  # (batch, seq_len, heads, HEAD_DIM)
    k_ptr,  # (batch, seq_len, heads / GROUP_SIZE, HEAD_DIM)
    v_ptr,  # like k
    o_ptr,  # like q
    o_grad_ptr,  # like q
    lse_ptr,  # (batch, heads, seq_len) in fp32
    delta_ptr,  # like lse: "dq" writes it, "dkdv" reads it
    q_grad_ptr,  # out: like q
    k_grad_ptr,  # out: (batch, seq_len, num_shares, HEAD_DIM)
    v_grad_ptr,  # out: like k_grad
    cos_ptr,  # (seq_len, HEAD_DIM / 2) in fp32, read if ROTARY
    sin_ptr,  # like cos
    num_shares,  # heads / SHARE
    batch_shares,  # batch * num_shares
    seq_len,
    scale,
    qk_scale,  # scale * log2(e)
    C,
    PART: tl.constexpr,
):
    """The gradients of q, k and v. PART "dq" writes q_grad and delta, "dkdv" reads delta and writes k_grad and v_grad.

    "fused" does both side by side and computes delta twice, for sequences so short that one does not fill the device.
    Grid: dq (batch * heads, blocks of queries), dkdv (batch_shares, blocks of keys), fused all of these on one axis,
    the keys first. What takes longest starts first: the last queries, the first keys.
    """
    # In a fused launch the first axis counts all programs: those of the keys, then those of the queries. They are
    # numbered along the heads first, so that the longest blocks of all heads start first.
    program, block = tl.program_id(0), tl.program_id(1)
    batch_head = program
    key_programs = batch_shares * tl.cdiv(seq_len, C.BLOCK_N)
    if PART == "dkdv" or (PART == "fused" and program < key_programs):
        if PART == "fused":
            batch_head, block = program % batch_shares, program // batch_shares
        key_value_gradient(
            q_ptr,
            k_ptr,
            v_ptr,
            o_ptr,
            o_grad_ptr,
            lse_ptr,
            delta_ptr,
            k_grad_ptr,
            v_grad_ptr,
            cos_ptr,
            sin_ptr,
            batch_head,
            block,
            num_shares,
            seq_len,
            scale,
            qk_scale,
            PART == "dkdv",
            C,
        )
    else:
        if PART == "fused":
            batch_heads = batch_shares * C.SHARE
            batch_head, block = (program - key_programs) % batch_heads, (program - key_programs) // batch_heads
        block = tl.cdiv(seq_len, C.BLOCK_M) - 1 - block  # the last queries first
        query_gradient(
            q_ptr,
            k_ptr,
            v_ptr,
            o_ptr,
            o_grad_ptr,
            lse_ptr,
            delta_ptr,
            q_grad_ptr,
            cos_ptr,
            sin_ptr,
            batch_head,
            block,
            num_shares * C.SHARE,
            seq_len,
            scale,
            qk_scale,
            PART == "dq",
            C,
        )


@jit
def rope_kernel(
    x_ptr,  # in and out: (n_tokens, heads * HEAD_DIM), a head being [first | second]
    cos_ptr,  # (seq_len, HEAD_DIM / 2) in fp32
    sin_ptr,  # like cos
    stride_token,
    n_tokens,
    seq_len,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Rotary embedding in place: (first, second) = (first * cos - second * sin, second * cos + first * sin).

    Grid: (blocks of tokens, heads).
    """
    # A rotation is its own kernel because every query block would have to repeat it for all keys that it reads.
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    cols = tl.arange(0, BLOCK_D // 2)
    mask = (tokens < n_tokens)[:, None] & (cols < HEAD_DIM // 2)[None, :]
    # All tiles are (BLOCK_TOKENS, BLOCK_D / 2).
    cos = load(tile_ptrs(cos_ptr, tokens % seq_len, HEAD_DIM // 2, cols), mask)
    sin = load(tile_ptrs(sin_ptr, tokens % seq_len, HEAD_DIM // 2, cols), mask)
    first_ptrs = tile_ptrs(x_ptr + tl.program_id(1) * HEAD_DIM, tokens.to(tl.int64), stride_token, cols)
    second_ptrs = first_ptrs + HEAD_DIM // 2
    first, second = load(first_ptrs, mask), load(second_ptrs, mask)
    store(first_ptrs, first * cos - second * sin, mask)
    store(second_ptrs, second * cos + first * sin, mask)


# What a launch of attention chooses: rows of both tiles, warps that share them, and num_stages, loads under way.
AttentionTile = collections.namedtuple("AttentionTile", "BLOCK_M BLOCK_N num_warps num_stages options", defaults=({},))
PASSES = ("forward", "dq", "dkdv", "fused")

# The first row that fits counts: a family, an architecture or how it begins; the operands of tl.dot (half: bf16 and
# fp16; tf32 and ieee: fp32 with and without TF32); the largest head dimension. It has for each of PASSES BLOCK_M,
# BLOCK_N, warps and stages.
# Larger tiles read less, until registers or shared memory (64 KiB on gfx90a and gfx942, 227 on sm_90) are used up.
ATTENTION_TILES = {
    # Compiled for gfx1250, where a wave has 32 lanes, and 16 rows of a product.
    ("gfx125", "half", 64): ((128, 64, 8, 1), (128, 64, 8, 1), (32, 128, 8, 1), (32, 64, 4, 1)),
    ("gfx125", "half", 128): ((128, 64, 8, 1), (128, 32, 8, 1), (32, 128, 8, 1), (32, 64, 4, 1)),
    # Compiled: 16 rows of a product for each wave where registers allow it. Above 256 registers one wave fills a SIMD.
    ("cdna", "half", 64): ((128, 64, 4, 1), (128, 32, 4, 1), (32, 128, 4, 1), (32, 64, 4, 1)),
    ("gfx950", "half", 128): ((128, 32, 4, 1), (128, 32, 4, 1), (32, 64, 4, 1), (32, 32, 4, 1)),
    ("cdna", "half", 128): ((128, 32, 4, 1), (128, 16, 4, 1), (32, 64, 4, 1), (32, 32, 4, 1)),
    ("cdna", "any", 64): ((64, 32, 4, 1), (64, 32, 4, 1), (16, 64, 4, 1), (32, 32, 4, 1)),
    ("cdna", "any", 128): ((64, 16, 4, 1), (64, 16, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1)),
    # Compiled for gfx1201, gfx1100 and gfx1151. Of a Radeon's 256 registers none may spill: 8 warps of 32 lanes do what
    # 4 of 64 do on Instinct. gfx11 holds operands twice: at 128 backward spills whatever the tile. fp32 has no matrix
    # instruction.
    ("gfx120", "half", 64): ((128, 32, 8, 1), (128, 32, 8, 1), (32, 128, 8, 1), (32, 32, 8, 1)),
    ("gfx120", "half", 128): ((128, 32, 8, 1), (128, 16, 8, 1), (16, 64, 8, 1), (16, 32, 8, 1)),
    ("rdna", "half", 64): ((128, 32, 8, 1), (64, 16, 8, 1), (16, 64, 8, 1), (16, 16, 4, 1)),
    ("rdna", "half", 128): ((128, 16, 8, 1), (64, 16, 8, 1), (16, 32, 8, 1), (16, 16, 8, 1)),
    ("rdna", "any", 64): ((32, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    ("rdna", "any", 128): ((16, 16, 8, 1), (16, 16, 16, 1), (16, 16, 8, 1), (16, 32, 16, 1)),
    # Measured. One wgmma instruction takes 64 rows. The fused pass is too short for its loads to fill a pipeline.
    ("hopper", "half", 64): ((64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 1)),
    ("hopper", "half", 128): ((64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 3), (64, 64, 4, 1)),
    # Measured. TF32 instructions take 64 rows. Full fp32 (ieee) has none: BLOCK_M = 32 took 0.7 of the time of 64.
    ("hopper", "tf32", 64): ((64, 32, 4, 1), (64, 32, 4, 1), (64, 32, 4, 1), (64, 32, 4, 1)),
    ("hopper", "ieee", 64): ((32, 32, 4, 1), (32, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
    ("hopper", "any", 128): ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    # Compiled for sm_75, whose programs have 64 KiB of shared memory, and no bf16.
    ("sm_75", "any", 64): ((32, 32, 8, 1), (32, 32, 8, 1), (16, 32, 8, 1), (16, 32, 8, 1)),
    ("sm_75", "any", 128): ((32, 32, 8, 1), (16, 16, 8, 1), (16, 32, 8, 1), (16, 32, 8, 1)),
    # Compiled for sm_100: 64 rows of queries would spill in dk and dv.
    ("sm_10", "half", 128): ((64, 64, 4, 2), (64, 64, 4, 2), (32, 64, 8, 2), (64, 64, 8, 1)),
    # Compiled for sm_80 and sm_86. 8 warps share rows that would spill with 4; at 128 one program fills the 100 KiB of
    # sm_86, sm_89 and sm_120.
    ("nvidia", "half", 64): ((64, 64, 4, 2), (64, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 1)),
    ("sm_80", "half", 128): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 64, 8, 1)),
    ("nvidia", "half", 128): ((64, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 1)),
    ("nvidia", "any", 128): ((32, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
    ("interpreter", "any", 128): ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
}
LACK_BF16_ROUNDING = ("gfx90a", "gfx942")  # see rounded_like()
FUSED_BACKWARD_SEQ_LEN = 128  # up to here the backward pass is one launch: a second one costs more than it saves
# See heads_per_program(). To add up the gradients of several programs takes 10 us on an H100, more than is won where a
# program has no more tiles of queries than SHORT_PROGRAM. In causal attention programs with the last keys are short:
# with three for each multiprocessor, 20/1 heads of 2 x 3,000 tokens took 0.6 of the time of one.
SHORT_PROGRAM, PROGRAMS_PER_SM = 32, 3
ROPE_BLOCK = 1024  # elements; within 1 % of the fastest; 2048 takes 1.2 times as long for 1,024 tokens


@functools.cache
def own_tiles(device_type):
    """Return {"operands head pass": tile} of the file that TINY_LLAMA_TILES names; UsageError if it is not right."""
    file = os.environ.get("TINY_LLAMA_TILES")
    return companion("tiles", f"TINY_LLAMA_TILES={file}").read(file, get_gpu(device_type)) if file else {}


@functools.cache
def attention_tile(pass_name, itemsize, block_d, precision, device_type):
    """Return the AttentionTile of one of PASSES, for elements of itemsize bytes and heads of block_d."""
    gpu = get_gpu(device_type)
    operands = "half" if itemsize == 2 else precision
    # With matrix instructions of 32 x 32, four waves would compute parts of small tiles twice.
    options = {"matrix_instr_nonkdim": 16} if gpu.is_amd else {}
    if own := own_tiles(device_type).get(f"{operands} {block_d} {pass_name}"):
        return AttentionTile(*own, options)
    # Else Triton 3.6 takes a few more than half of the registers, and one wave is left. More than two would not fit.
    is_large = block_d > 64 and pass_name != "fused" or block_d == 64 and pass_name == "dkdv" and operands == "half"
    if is_large and gpu.arch.startswith("gfx9"):
        options["waves_per_eu"] = 2
    for (row_gpu, row_operands, widest_head), tiles in ATTENTION_TILES.items():
        fits = row_operands in (operands, "any") and block_d <= widest_head
        if fits and (row_gpu == gpu.family or gpu.arch.startswith(row_gpu)):
            return AttentionTile(*tiles[PASSES.index(pass_name)], options)
    raise ValueError(f"there is no attention tile for heads of {block_d} dimensions: 128 is the most")


def padded_head(head_dim):
    """Return BLOCK_D, the columns of a tile."""
    return max(16, next_power_of_2(head_dim))  # tl.dot takes no fewer in bf16


@functools.lru_cache(maxsize=256)
def heads_per_program(pass_name, shape, num_kv_heads, itemsize, precision, device_type):
    """Return how many query heads of a group one program of the gradients of keys and values adds up.

    All of them, unless so few blocks of keys would leave multiprocessors idle, and the programs are long.
    """
    batch, seq_len, num_heads, head_dim = shape
    group_size, num_sms = num_heads // num_kv_heads, get_gpu(device_type).num_sms
    tile = attention_tile(pass_name, itemsize, padded_head(head_dim), precision, device_type)
    blocks = batch * num_heads * cdiv(seq_len, tile.BLOCK_N)  # of keys, of each query head
    if blocks // group_size >= num_sms or group_size * cdiv(seq_len, tile.BLOCK_M) <= SHORT_PROGRAM:
        return group_size
    shares = [n for n in range(1, group_size) if group_size % n == 0 and blocks // n >= PROGRAMS_PER_SM * num_sms]
    return max(shares, default=1)


@functools.lru_cache(maxsize=256)
def attention_launch(pass_name, shape, num_kv_heads, share, strides, dtype, precision, rotary, device_type):
    """Return the grid, the AttentionConstants and the compiler's options of one of PASSES; shape is that of q."""
    batch, seq_len, num_heads, head_dim = shape
    gpu = get_gpu(device_type)
    block_d = padded_head(head_dim)
    if head_dim < block_d == 32 and strides.k.dim != 1:
        block_d = 64  # with 32, what Triton 3.6 compiles for sm_90 reads past the end of shared memory
    tile = attention_tile(pass_name, dtype.itemsize, block_d, precision, device_type)
    require_32_bits(shape, strides)
    constants = AttentionConstants(
        STRIDES=strides,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        GROUP_SIZE=num_heads // num_kv_heads,
        SHARE=share,
        BLOCK_M=tile.BLOCK_M,
        BLOCK_N=tile.BLOCK_N,
        EVEN=seq_len % max(tile.BLOCK_M, tile.BLOCK_N) == 0,
        PRECISION=precision,
        ROUND_BY_HAND=dtype == torch.bfloat16 and gpu.arch in LACK_BF16_ROUNDING,
        ROTARY=rotary,
        INT64_OFFSETS=not gpu.is_amd,  # AMD's loads add 32-bit offsets by themselves
    )
    by_queries = batch * num_heads, cdiv(seq_len, tile.BLOCK_M)
    by_keys = batch * num_heads // share, cdiv(seq_len, tile.BLOCK_N)
    grids = {"dkdv": by_keys, "fused": (math.prod(by_queries) + math.prod(by_keys),)}
    options = dict(num_warps=tile.num_warps, num_stages=tile.num_stages, **tile.options)
    return grids.get(pass_name, by_queries), constants, options


def require_32_bits(shape, strides):
    """Raise ValueError where the attention kernels cannot count within a sequence of q's shape; strides may be None."""
    _, seq_len, num_heads, head_dim = shape
    if any(s.seq * seq_len + s.head * num_heads + s.dim * head_dim > LARGEST for s in strides if s):
        raise ValueError("the attention kernels count within a sequence in 32 bits: shorten it, or make it contiguous")


def attention_precision(q):
    """Return tl.dot's input_precision for q."""
    return dot_precision(get_gpu(q.device.type)) if q.dtype == torch.float32 else "ieee"


def launch_attention(kernel, pass_name, tensors, scalars, share=1, rotary=False, **constants):
    """Launch an attention kernel for one of PASSES, on tensors that begin with q and k."""
    q, k, *_ = tensors
    # The tensors with 4 dimensions come in the order of Strides; lse, delta, cos and sin have fewer.
    strides = Strides(*(Stride(*t.stride()) for t in tensors if t.dim() == 4))
    key = pass_name, q.shape, k.shape[2], share, strides, q.dtype, attention_precision(q), rotary, q.device.type
    grid, C, options = attention_launch(*key)
    launch(kernel, grid, tensors, scalars, dict(C=C, **constants), **options)


def flash_attention_forward(q, k, v, out=None):
    """Return o, like q (batch, seq, heads, head_dim), and lse (batch, heads, seq); k and v have kv_heads.

    o is written to out if it is given. ValueError or TypeError for tensors of other shapes or of several types.
    """
    batch, seq_len, num_heads, head_dim = q.shape
    o = q.new_empty(q.shape) if out is None else out
    kv_shape = batch, seq_len, k.shape[2], head_dim
    if not k.shape == v.shape == kv_shape or num_heads % k.shape[2] or o.shape != q.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v, o))
        raise ValueError(
            f"q, k, v and o have the shapes {shapes}: they may differ in heads, of which k and v have fewer"
        )
    one_device = q.get_device() == k.get_device() == v.get_device() == o.get_device()
    if not (q.dtype == k.dtype == v.dtype == o.dtype and one_device):
        types = ", ".join(f"{t.dtype} on {t.device}" for t in (q, k, v, o))
        raise TypeError(f"q, k, v and o are {types}: convert them to one type, on one device")
    lse = q.new_empty(batch, num_heads, seq_len, dtype=torch.float32)
    tensors = q, k, v, o, lse
    # On a Hopper, wide heads have a kernel of their own, which is faster.
    hopper = companion("attention_hopper")
    if not (hopper and hopper.launch_forward(*tensors)):
        # Scores are divided by sqrt(head_dim), whose inverse is folded with log2(e) into one factor.
        scalars = num_heads, seq_len, head_dim**-0.5 * math.log2(math.e)
        launch_attention(flash_attention_kernel, "forward", tensors, scalars)
    return o, lse


def flash_attention_backward(o_grad, saved, gradients, tables=None):
    """Fill gradients, those of q, k and v (batch, seq, heads or kv_heads, head_dim), with any strides.

    saved is q, k, v, o, lse as forward had them; o_grad and o are like q. tables are cos, sin (seq, head_dim / 2), in
    fp32: with them q and k must have been rotated by them, and their gradients are rotated back.
    """
    q, k, v, o, lse = saved
    q_grad, k_grad, v_grad = gradients
    batch, seq_len, num_heads, head_dim = q.shape
    num_kv_heads, scale = k.shape[2], head_dim**-0.5
    # dq needs delta only for its own queries, dkdv for all: dq stores it, and runs first.
    is_short = seq_len <= FUSED_BACKWARD_SEQ_LEN
    # lse stands in for tensors that a kernel does not use.
    delta = lse if is_short else torch.empty_like(lse)
    cos, sin = tables or (lse, lse)
    assert cos.is_contiguous() and sin.is_contiguous()
    # On a Hopper, heads of 64 and wider ones have kernels of their own, which are faster.
    hopper = companion("attention_hopper")
    if hopper and not is_short and hopper.launch_backward(o_grad, saved, gradients, delta, tables):
        return
    # Where few heads of k and v leave multiprocessors idle, several programs have a part of a group each.
    by_keys = "fused" if is_short else "dkdv"
    kind, precision = q.device.type, attention_precision(q)
    share = heads_per_program(by_keys, q.shape, num_kv_heads, q.dtype.itemsize, precision, kind)
    num_shares = num_heads // share
    is_split = num_shares > num_kv_heads
    partial = k_grad, v_grad
    if is_split:
        partial = q.new_empty(2, batch, seq_len, num_shares, head_dim, dtype=torch.float32)
    tensors = q, k, v, o, o_grad, lse, delta, q_grad, *partial, cos, sin
    scalars = num_shares, batch * num_shares, seq_len, scale, scale * math.log2(math.e)
    for part in ("fused",) if is_short else ("dq", "dkdv"):
        constants = dict(share=share, rotary=tables is not None, PART=part)
        launch_attention(flash_attention_backward_kernel, part, tensors, scalars, **constants)
    if is_split:
        sums = partial.unflatten(3, (num_kv_heads, -1)).sum(4)  # (2, batch, seq, kv_heads, head_dim), in a fixed order
        k_grad.copy_(sums[0])
        v_grad.copy_(sums[1])


def rope_(qkv, num_rotated_heads, head_dim, cos, sin):
    """Rotate the first heads of qkv (batch, seq, width) in place by cos, sin (seq, head_dim / 2), all contiguous."""
    assert qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    batch, seq_len, width = qkv.shape
    block_d = next_power_of_2(head_dim)
    block_tokens = max(1, ROPE_BLOCK // block_d)
    launch(
        rope_kernel,
        (cdiv(batch * seq_len, block_tokens), num_rotated_heads),
        (qkv, cos, sin),
        (width, batch * seq_len, seq_len),
        dict(HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_TOKENS=block_tokens),
    )


def split_heads(qkv, num_heads, num_kv_heads):
    """View (batch, seq, width) as q (batch, seq, num_heads, head_dim) and k, v (batch, seq, kv_heads, head_dim)."""
    # (batch, seq, heads + 2 kv_heads, head_dim): views, no copies. Kernels read the packed projection by strides.
    count = num_heads + 2 * num_kv_heads
    heads = qkv.view(*qkv.shape[:-1], count, qkv.shape[-1] // count)
    return heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=2)


def badly_strided(x):
    """BUG noncontiguous_kv: the same (batch, seq, heads, head_dim), with a stride of batch * heads in its last one."""
    return x.permute(1, 3, 0, 2).contiguous().permute(2, 0, 3, 1)


def attend(qkv, tables, num_heads, num_kv_heads, bugs=(), out=None):
    """Rotate q and k of qkv (batch, seq, width) in place; return q, k, v, o (batch, seq, heads, head_dim) and lse."""
    head_dim = qkv.shape[2] // (num_heads + 2 * num_kv_heads)
    rope_(qkv, num_heads + num_kv_heads, head_dim, *tables)
    q, k, v = split_heads(qkv, num_heads, num_kv_heads)
    if "noncontiguous_kv" in bugs:  # BUG noncontiguous_kv: right values, wrong layout
        k, v = badly_strided(k), badly_strided(v)
    return q, k, v, *flash_attention_forward(q, k, v, out)


class AttentionFunction(torch.autograd.Function):
    """Attention of qkv (batch, seq, (heads + 2 kv_heads) * head_dim), which is overwritten; see triton_attention."""

    @staticmethod
    def forward(ctx, qkv, cos, sin, num_heads, num_kv_heads, bugs):
        q, k, v, o, lse = attend(qkv, (cos, sin), num_heads, num_kv_heads, bugs)
        ctx.save_for_backward(cos, sin, q, k, v, o, lse)
        ctx.shape, ctx.heads = qkv.shape, (num_heads, num_kv_heads)
        return o.flatten(2)

    @staticmethod
    @first_derivative_only
    def backward(ctx, o_grad):
        cos, sin, *saved = ctx.saved_tensors
        q, *_ = saved
        # The three gradients are views of one tensor, which the projection's backward multiplies as a whole.
        qkv_grad = q.new_empty(ctx.shape)
        gradients = split_heads(qkv_grad, *ctx.heads)
        flash_attention_backward(o_grad.reshape(q.shape), saved, gradients, (cos, sin))
        return qkv_grad, *[None] * 5  # tables, sizes and bugs have no gradient


@outside_compiler
def triton_attention(x, qkv_weight, o_weight, cos, sin, num_heads, num_kv_heads, bugs=(), linear=triton_linear):
    """Return the causal attention of x (batch, seq, hidden), of the same shape.

    cos, sin (seq, head_dim / 2) are in fp32, qkv_weight is ((heads + 2 kv_heads) * head_dim, hidden), o_weight
    (hidden, heads * head_dim). linear multiplies by the two weights.
    """
    _, seq_len, hidden = x.shape
    if seq_len != cos.shape[0]:
        raise ValueError(f"x has {seq_len} positions, the rotary tables have {cos.shape[0]}: slice the tables")
    head_dim = 2 * cos.shape[1]
    if not sin.shape == cos.shape or not sin.get_device() == cos.get_device() == x.get_device():
        places = f"{tuple(cos.shape)} on {cos.device} and {tuple(sin.shape)} on {sin.device}"
        raise ValueError(f"cos and sin are {places}: both need one shape, and the device of x")
    expect(
        x=(x, x.shape),
        qkv_weight=(qkv_weight, ((num_heads + 2 * num_kv_heads) * head_dim, hidden)),
        o_weight=(o_weight, (o_weight.shape[0], num_heads * head_dim)),
    )
    qkv = linear(x, qkv_weight)
    o = AttentionFunction.apply(qkv, cos.contiguous(), sin.contiguous(), num_heads, num_kv_heads, bugs)
    return linear(o, o_weight)


def rope_tables(seq_len, head_dim, device, theta=10000.0):
    """Return cos, sin (seq_len, head_dim / 2) of the angles position * theta^(-2i / head_dim), in fp32."""
    # The first dimensions of a head turn fast from position to position, the last ones slowly.
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64, device=device), frequencies)
    return angles.cos().float(), angles.sin().float()


def torch_rope(x, cos, sin):
    """Rotate x (batch, seq, heads, head_dim): dimension i of the first half with dimension i of the second."""
    cos, sin = cos.to(x.dtype)[:, None, :], sin.to(x.dtype)[:, None, :]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def torch_heads(qkv, cos, sin, num_heads, num_kv_heads):
    """Split qkv (batch, seq, width) into q, k, both rotated, and v, each (batch, heads or kv_heads, seq, head_dim)."""
    q, k, v = split_heads(qkv, num_heads, num_kv_heads)
    return [t.transpose(1, 2) for t in (torch_rope(q, cos, sin), torch_rope(k, cos, sin), v)]


def torch_attention(x, qkv_weight, o_weight, cos, sin, num_heads, num_kv_heads, linear=F.linear):
    """Compute triton_attention with K and V repeated for each query head and the (seq, seq) scores in memory."""
    q, k, v = torch_heads(linear(x, qkv_weight), cos, sin, num_heads, num_kv_heads)
    # (batch, kv_heads, seq, head_dim) -> (batch, heads, seq, head_dim)
    k, v = (t.repeat_interleave(num_heads // num_kv_heads, dim=1) for t in (k, v))
    # (batch, heads, seq, seq): the tensor that the kernels never write.
    scores = q @ k.mT * q.shape[-1] ** -0.5
    # True above the diagonal: keys that come after the query.
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    probabilities = F.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
    return linear((probabilities @ v).transpose(1, 2).flatten(2), o_weight)


def sdpa_attention(x, qkv_weight, o_weight, cos, sin, num_heads, num_kv_heads, linear=F.linear):
    """Compute triton_attention by PyTorch's fused operator."""
    q, k, v = torch_heads(linear(x, qkv_weight), cos, sin, num_heads, num_kv_heads)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=num_heads != num_kv_heads)
    return linear(o.transpose(1, 2).flatten(2), o_weight)


# ----------------------------------------------------------------------------------------------------------------------
# 8 SwiGLU: (silu(x w_gate) * (x w_up)) w_down (Shazeer, arXiv:2002.05202), between the library's matmuls

SWIGLU_BLOCK = 1024  # 512 takes 1.1 to 1.2 times as long, 2048 as long, 4096 1.5 times for 1,024 tokens


@jit
def swiglu_activation_kernel(
    gate_up_ptr,  # (rows, stride_gate_up), each row [gate | up | padding]
    hidden_ptr,  # out: (rows, stride_hidden), each row [hidden | zeros]
    n_cols,
    stride_gate_up,  # at least 2 n_cols
    stride_hidden,  # at least n_cols
    BLOCK_SIZE: tl.constexpr,
):
    """hidden = silu(gate) * up, with silu(gate) = gate * sigmoid(gate).  Grid: (rows * blocks of hidden's columns,)."""
    blocks = tl.cdiv(stride_hidden, BLOCK_SIZE)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    gate_ptrs = gate_up_ptr + row * stride_gate_up + cols
    # Masked elements are 0, and so is their hidden.
    gate, up = load(gate_ptrs, mask), load(gate_ptrs + n_cols, mask)
    store(hidden_ptr + row * stride_hidden + cols, gate * tl.sigmoid(gate) * up, cols < stride_hidden)


@jit
def swiglu_activation_backward_kernel(
    hidden_grad_ptr,  # in: (rows, stride_hidden); out, if RECOMPUTE: forward's hidden, in place
    gate_up_ptr,  # in: as forward; out: the gradients of gate and up, in place
    n_cols,
    stride_gate_up,
    stride_hidden,
    RECOMPUTE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """up_grad = hidden_grad * silu(gate);  gate_grad = hidden_grad * up * silu'(gate).  Grid: as forward."""
    blocks = tl.cdiv(stride_hidden, BLOCK_SIZE)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    # Forward keeps gate and up, and neither sigmoid(gate) nor silu(gate): reading them would take longer.
    gate_ptrs = gate_up_ptr + row * stride_gate_up + cols
    gate, up = load(gate_ptrs, mask), load(gate_ptrs + n_cols, mask)
    hidden_ptrs = hidden_grad_ptr + row * stride_hidden + cols
    hidden_grad = load(hidden_ptrs, mask)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    # silu' = sigmoid + gate * sigmoid * (1 - sigmoid)
    gate_grad = hidden_grad * up * (sigmoid + silu * (1.0 - sigmoid))
    store(gate_ptrs, gate_grad, mask)
    store(gate_ptrs + n_cols, hidden_grad * silu, mask)
    if RECOMPUTE:  # in the order of forward, and so with its bits
        store(hidden_ptrs, silu * up, cols < stride_hidden)


@jit
def swiglu_kernel(
    x_ptr,  # (rows, K)
    weight_ptr,  # (2 n_cols, K) = [w_gate | w_up]
    gate_up_ptr,  # out: (rows, 2 n_cols)
    hidden_ptr,  # out: (rows, n_cols)
    K,
    n_cols,
    BLOCK_SIZE: tl.constexpr,
):
    """BUG triton_matmul_swiglu: one element of hidden per program, by two dot products.  Grid: (rows * n_cols,)."""
    row = (tl.program_id(0) // n_cols).to(tl.int64)
    col = (tl.program_id(0) % n_cols).to(tl.int64)
    gate = 0.0
    up = 0.0
    for start in range(0, K, BLOCK_SIZE):
        inner = start + tl.arange(0, BLOCK_SIZE)
        mask = inner < K
        # Every program reads a row of x and two of the weight again: nothing is shared between programs.
        x = load(x_ptr + row * K + inner, mask)
        gate += tl.sum(x * load(weight_ptr + col * K + inner, mask))
        up += tl.sum(x * load(weight_ptr + (n_cols + col) * K + inner, mask))
    store(gate_up_ptr + row * 2 * n_cols + col, gate, None)
    store(gate_up_ptr + row * 2 * n_cols + n_cols + col, up, None)
    store(hidden_ptr + row * n_cols + col, gate * tl.sigmoid(gate) * up, None)


def swiglu_activation(gate_up, ffn=None, width=None, out=None):
    """Return silu(gate) * up (rows, ffn) of gate_up (rows, 2 ffn), contiguous; it is written to out if that is given.

    gate_up may have columns of padding, if ffn is given, and the result gets columns of zeros up to width.
    """
    assert gate_up.is_contiguous(), "the kernel reads gate_up as contiguous"
    n_rows, stride = gate_up.shape
    n_cols = ffn or stride // 2
    # tiny_llama/groups.py passes out, here and in the other launchers, to have the tensors of all layers side by side.
    hidden = gate_up.new_empty(n_rows, width or n_cols) if out is None else out
    grid = (n_rows * cdiv(hidden.shape[1], SWIGLU_BLOCK),)
    scalars = n_cols, stride, hidden.shape[1]
    launch(swiglu_activation_kernel, grid, (gate_up, hidden), scalars, dict(BLOCK_SIZE=SWIGLU_BLOCK))
    return hidden


def swiglu_activation_backward_(hidden_grad, gate_up, ffn=None, recompute=False):
    """Overwrite gate_up (rows, 2 ffn) with its gradient; hidden_grad (rows, ffn); both contiguous.

    Both may have columns of padding, if ffn is given. With recompute, hidden_grad is overwritten with forward's result.
    """
    assert hidden_grad.is_contiguous() and gate_up.is_contiguous(), "the kernel reads both as contiguous"
    n_rows, width = hidden_grad.shape
    grid = (n_rows * cdiv(width, SWIGLU_BLOCK),)
    scalars = ffn or width, gate_up.shape[1], width
    constants = dict(RECOMPUTE=recompute, BLOCK_SIZE=SWIGLU_BLOCK)
    launch(swiglu_activation_backward_kernel, grid, (hidden_grad, gate_up), scalars, constants)


def swiglu_naive_matmul(x, gate_up_weight):
    """Return gate_up (rows, 2 n) and silu(gate) * up (rows, n) of x (rows, hidden), gate_up_weight (2 n, hidden)."""
    n_rows, n_cols = x.shape[0], gate_up_weight.shape[0] // 2
    gate_up = x.new_empty(n_rows, 2 * n_cols)
    hidden = x.new_empty(n_rows, n_cols)
    tensors = x.contiguous(), gate_up_weight.contiguous(), gate_up, hidden
    launch(swiglu_kernel, (n_rows * n_cols,), tensors, (x.shape[1], n_cols), dict(BLOCK_SIZE=128))
    return gate_up, hidden


def swiglu_forward(x, gate_up_weight, gate_up=None, hidden=None, ffn=None, width=None):
    """Return gate_up (rows, 2 ffn) and hidden = silu(gate) * up (rows, ffn) of x (rows, K), gate_up_weight (2 ffn, K).

    They are written to gate_up and hidden if these are given. See swiglu_activation() for padding.
    """
    n_rows, stride = len(x), len(gate_up_weight)
    gate_up = x.new_empty(n_rows, stride) if gate_up is None else gate_up
    hidden = x.new_empty(n_rows, width or ffn or stride // 2) if hidden is None else hidden
    # A Hopper has a kernel of its own, whose product knows what comes after it.
    hopper = companion("swiglu_hopper")
    if not (hopper and hopper.launch_forward(x, gate_up_weight, gate_up, hidden)):
        # (rows, K) x (K, 2 ffn): one product computes gate and up.
        torch.mm(x, gate_up_weight.t(), out=gate_up)
        swiglu_activation(gate_up, ffn, out=hidden)
    return gate_up, hidden


def swiglu_backward_(y_grad, down_weight, gate_up, ffn=None, again=None):
    """Overwrite gate_up (rows, 2 ffn) with its gradient, of y_grad (rows, K) and down_weight (K, ffn).

    With again (rows, ffn), forward's hidden is written there.
    """
    hopper = companion("swiglu_hopper")
    if again is not None or not (hopper and hopper.launch_backward(y_grad, down_weight, gate_up)):
        hidden_grad = torch.mm(y_grad, down_weight, out=again)
        swiglu_activation_backward_(hidden_grad, gate_up, ffn, again is not None)


class SwiGLUFunction(torch.autograd.Function):
    """hidden down_weight^T with hidden = silu(gate) * up of [gate | up] = x gate_up_weight^T; see triton_swiglu.

    The product that computes hidden's gradient is in here, so that it may be one with what follows it.
    """

    @staticmethod
    def forward(ctx, x, gate_up_weight, down_weight, bugs):
        ctx.weights = gate_up_weight, down_weight
        rows = as_rows(x)
        if "triton_matmul_swiglu" in bugs:  # BUG triton_matmul_swiglu: right values, multiplied without the library
            gate_up, hidden = swiglu_naive_matmul(rows, gate_up_weight)
        else:
            gate_up, hidden = swiglu_forward(rows, gate_up_weight)
        ctx.save_for_backward(rows, gate_up_weight, down_weight, gate_up, hidden)
        return torch.mm(hidden, down_weight.t()).view(x.shape)

    @staticmethod
    @first_derivative_only
    def backward(ctx, y_grad):
        x, gate_up_weight, down_weight, gate_up, hidden = ctx.saved_tensors
        shape, y_grad = y_grad.shape, as_rows(y_grad)
        down_gradient = give_gradient(ctx.weights[1], ctx.needs_input_grad[2], write_product, y_grad, hidden)
        if not any(ctx.needs_input_grad[:2]):
            return None, None, down_gradient, None
        swiglu_backward_(y_grad, down_weight, gate_up)
        torch.autograd.graph.increment_version(gate_up)  # lets autograd refuse a second run, as it is overwritten
        # gate_up has become its own gradient: (rows, 2 ffn) x (2 ffn, hidden).
        x_grad = torch.mm(gate_up, gate_up_weight).view(shape) if ctx.needs_input_grad[0] else None
        gate_up_gradient = give_gradient(ctx.weights[0], ctx.needs_input_grad[1], write_product, gate_up, x)
        return x_grad, gate_up_gradient, down_gradient, None


@outside_compiler
def triton_swiglu(x, gate_up_weight, down_weight, bugs=()):
    """x (..., hidden), gate_up_weight (2 ffn, hidden), down_weight (hidden, ffn) -> (..., hidden)"""
    hidden, ffn = down_weight.shape
    expect(
        x=(x, (*x.shape[:-1], hidden)),
        gate_up_weight=(gate_up_weight, (2 * ffn, hidden)),
        down_weight=(down_weight, down_weight.shape),
    )
    return SwiGLUFunction.apply(x, gate_up_weight, down_weight, bugs)


def torch_swiglu(x, gate_up_weight, down_weight, linear=F.linear):
    """Compute triton_swiglu in PyTorch's operators."""
    gate, up = linear(x, gate_up_weight).chunk(2, dim=-1)
    return linear(F.silu(gate) * up, down_weight)


# ----------------------------------------------------------------------------------------------------------------------
# 9 The ends of the model: embedding and cross-entropy


@jit
def token_order_kernel(
    tokens_ptr,  # (n_tokens,) of integers
    sorted_ptr,  # out: the same in ascending order
    order_ptr,  # out: like tokens, the place in tokens of each
    n_tokens,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OTHERS: tl.constexpr,
):
    """Sort tokens, equal ones by their places: the rank of each is the number of those that come before it.

    Grid: (blocks of tokens,). Each program compares its tokens with all.
    """
    places = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    mask = places < n_tokens
    tokens = tl.load(tokens_ptr + places, mask=mask, other=0).to(tl.int32)
    before = tl.zeros([BLOCK_TOKENS, BLOCK_OTHERS], tl.int32)
    for start in range(0, n_tokens, BLOCK_OTHERS):
        other_places = start + tl.arange(0, BLOCK_OTHERS)
        others = tl.load(tokens_ptr + other_places, mask=other_places < n_tokens, other=2**31 - 1).to(tl.int32)
        # (BLOCK_TOKENS, BLOCK_OTHERS): of the tokens in front also those that are equal come before.
        is_in_front = (other_places[None, :] < places[:, None]).to(tl.int32)
        before += (others[None, :] < tokens[:, None] + is_in_front).to(tl.int32)
    rank = tl.sum(before, axis=1)
    tl.store(sorted_ptr + rank, tokens, mask=mask)
    tl.store(order_ptr + rank, places, mask=mask)


@jit
def embedding_backward_kernel(
    tokens_ptr,  # (n_tokens,) of integers, in ascending order
    order_ptr,  # like tokens: the rows of out_grad in the same order
    out_grad_ptr,  # (n_tokens, n_cols)
    weight_grad_ptr,  # in and out: (vocabulary, n_cols)
    n_tokens,
    n_cols,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """weight_grad[v] += the sum of out_grad[t] over all tokens t equal to v, in a fixed order, without atomics.

    Grid: (n_tokens, blocks of columns). The program at the first of equal tokens adds up the rows of them all.
    """
    first = tl.program_id(0)
    token = tl.load(tokens_ptr + first)
    is_first = (first == 0) | (tl.load(tokens_ptr + first - 1, mask=first > 0, other=-1) != token)
    if is_first:
        cols = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        weight_grad_ptrs = weight_grad_ptr + token.to(tl.int64) * n_cols + cols
        total = load(weight_grad_ptrs, cols < n_cols)  # (BLOCK_SIZE,)
        start = first
        found = BLOCK_TOKENS
        while found == BLOCK_TOKENS:
            # BLOCK_TOKENS rows at a time, so that their loads overlap: a frequent token has thousands.
            places = start + tl.arange(0, BLOCK_TOKENS)
            # The first token is this one, and so all that are equal to it are in front.
            is_equal = tl.load(tokens_ptr + places, mask=places < n_tokens, other=-1) == token
            rows = tl.load(order_ptr + places, mask=is_equal, other=0).to(tl.int64)
            # (BLOCK_TOKENS, BLOCK_SIZE), whose rows are added in one fixed order, a tree.
            mask = is_equal[:, None] & (cols < n_cols)[None, :]
            total += tl.sum(load(tile_ptrs(out_grad_ptr, rows, n_cols, cols), mask), axis=0)
            found = tl.sum(is_equal.to(tl.int32), axis=0)
            start += BLOCK_TOKENS
        store(weight_grad_ptrs, total, cols < n_cols)


EMBEDDING_TILE = (8, 1024)  # rows added at a time, columns; with 4 or 16 rows frequent or rare tokens take longer
ORDER_TILE = (16, 256)  # tokens of a program, and those that it compares at a time; (64, 64) takes 1.6 times as long
ORDERED_BY_COMPARISON = 16384  # tokens at most; the library, which sorts more, takes 80 us for few as well


def sort_tokens(tokens):
    """Return tokens (n,) in ascending order, and the place of each in tokens; equal ones stay in their order."""
    n_tokens, (block_tokens, block_others) = len(tokens), ORDER_TILE
    if n_tokens > ORDERED_BY_COMPARISON:
        return tokens.sort(stable=True)
    in_order, order = torch.empty_like(tokens), torch.empty_like(tokens)
    constants = dict(BLOCK_TOKENS=block_tokens, BLOCK_OTHERS=block_others)
    launch(token_order_kernel, (cdiv(n_tokens, block_tokens),), (tokens, in_order, order), (n_tokens,), constants)
    return in_order, order


def embedding_gradient(place, accumulate, tokens, out_grad):
    """place (vocabulary, cols) (+)= the sums of out_grad (..., cols) over equal tokens, for give_gradient()."""
    if not accumulate:
        place.zero_()
    n_cols = place.shape[1]
    block_tokens, block_size = EMBEDDING_TILE[0], min(next_power_of_2(n_cols), EMBEDDING_TILE[1])
    tokens, order = sort_tokens(tokens.flatten())
    constants = dict(BLOCK_TOKENS=block_tokens, BLOCK_SIZE=block_size)
    grid = len(tokens), cdiv(n_cols, block_size)
    launch(embedding_backward_kernel, grid, (tokens, order, out_grad, place), (len(tokens), n_cols), constants)


class EmbeddingFunction(torch.autograd.Function):
    """See triton_embedding."""

    @staticmethod
    def forward(ctx, tokens, weight):
        ctx.weight = weight
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, weight)

    @staticmethod
    @first_derivative_only
    def backward(ctx, out_grad):
        (tokens,) = ctx.saved_tensors
        # Adds to the gradient of the tied head, which is there already: backward runs from the loss to the embedding.
        gradient = out_grad.contiguous()
        return None, give_gradient(ctx.weight, ctx.needs_input_grad[1], embedding_gradient, tokens, gradient)


@outside_compiler
def triton_embedding(tokens, weight):
    """weight (vocab, cols) at integer tokens (...) -> (..., cols). PyTorch reports a token that is out of range."""
    expect(weight=(weight, weight.shape))
    return EmbeddingFunction.apply(tokens.contiguous(), weight)


@jit
def cross_entropy_kernel(
    logits_ptr,  # in: (rows, N_COLS); out: their gradient, in place
    targets_ptr,  # (rows,) of integers
    loss_ptr,  # out: (2, rows) in fp32: the losses, and 1 where a row counts
    stride_row,
    gradient_scale,
    ignore_index,
    N_COLS: tl.constexpr,
    LOOP_COLS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    REST_SIZE: tl.constexpr,
):
    """loss = logsumexp(logits) - logits[target];  gradient = (softmax(logits) - onehot(target)) * gradient_scale.

    A row whose target is ignore_index does not count: its loss and gradient are 0. Any other target outside
    0..N_COLS-1 gives a NaN loss and a NaN gradient.  Grid: (rows,).
    """
    # Neighbors that share a running maximum. With one maximum for all columns, threads would wait for each other in
    # every block: measured on an H100, 1.2 times as long for 32,000 columns.
    LANES: tl.constexpr = 8
    # The logits of one token.
    row_ptr = logits_ptr + tl.program_id(0).to(tl.int64) * stride_row
    scale = tl.cast(gradient_scale, tl.float32)
    target = tl.load(targets_ptr + tl.program_id(0))
    in_range = (target >= 0) & (target < N_COLS)
    counts = target != ignore_index
    # 0 for an ignored row, NaN for a target that does not exist: wrong data must show.
    scale = tl.where(counts, tl.where(in_range, scale, float("nan")), 0.0)
    target_logit = load(row_ptr + target, in_range, float("nan"))
    # First pass: maximum and sum, of which each group of LANES columns keeps its own until the end.
    maxima = tl.full([BLOCK_SIZE // LANES], float("-inf"), tl.float32)
    totals = tl.zeros([BLOCK_SIZE // LANES], tl.float32)
    for start in range(0, LOOP_COLS, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        logits = load(row_ptr + cols, cols < LOOP_COLS, float("-inf")).reshape(BLOCK_SIZE // LANES, LANES)
        # A running maximum and sum for each group, as in attention.
        new_maxima = tl.maximum(maxima, tl.max(logits, axis=1))
        # A group of nothing but -inf has no maximum: -inf - -inf would be NaN.
        shift = tl.where(new_maxima == float("-inf"), 0.0, new_maxima)
        exponentials = tl.exp2((logits - shift[:, None]) * LOG2_E)
        totals = totals * tl.exp2((maxima - shift) * LOG2_E) + tl.sum(exponentials, axis=1)
        maxima = new_maxima
    # All groups are brought to the one maximum of the row, and added.
    maximum = tl.max(maxima, axis=0)
    if N_COLS > LOOP_COLS:  # the rest is read once and stays in registers, (REST_SIZE,)
        rest_cols = LOOP_COLS + tl.arange(0, REST_SIZE)
        rest_logits = load(row_ptr + rest_cols, rest_cols < N_COLS, float("-inf"))
        maximum = tl.maximum(maximum, tl.max(rest_logits, axis=0))
    total = tl.sum(totals * tl.exp2((maxima - maximum) * LOG2_E), axis=0)
    if N_COLS > LOOP_COLS:
        rest_exponentials = tl.exp2((rest_logits - maximum) * LOG2_E)
        total += tl.sum(rest_exponentials, axis=0)
    inverse_total = 1.0 / total
    # Second pass: the gradient, from the end of the row, which is still in the cache. In fp32, because p - 1 cancels in
    # bf16.
    if N_COLS > LOOP_COLS:
        rest_gradient = (rest_exponentials * inverse_total - tl.where(rest_cols == target, 1.0, 0.0)) * scale
        store(row_ptr + rest_cols, rest_gradient, rest_cols < N_COLS)
    LAST_START: tl.constexpr = (LOOP_COLS - 1) // BLOCK_SIZE * BLOCK_SIZE
    for start in range(0, LOOP_COLS, BLOCK_SIZE):
        cols = LAST_START - start + tl.arange(0, BLOCK_SIZE)
        mask = cols < LOOP_COLS
        # These are not read again soon, and must not evict what this loop has yet to read.
        logits = tl.load(row_ptr + cols, mask=mask, other=float("-inf"), eviction_policy="evict_first")
        # exp(logits - log_sum) would be shorter, but would inherit the rounding error of a large log_sum.
        probabilities = tl.exp2((logits.to(tl.float32) - maximum) * LOG2_E) * inverse_total
        gradient = (probabilities - tl.where(cols == target, 1.0, 0.0)) * scale
        gradient = gradient.to(logits_ptr.dtype.element_ty)
        tl.store(row_ptr + cols, gradient, mask=mask, eviction_policy="evict_first")
    # log(sum(exp(x))) = maximum + log(sum(exp(x - maximum))); log2(t) / log2(e) is ln(t).
    loss = tl.where(counts, maximum - target_logit + tl.log2(total) / LOG2_E, 0.0)
    tl.store(loss_ptr + tl.program_id(0), loss)
    tl.store(loss_ptr + tl.num_programs(0) + tl.program_id(0), counts.to(tl.float32))


@jit
def scale_kernel(
    x_ptr,  # in and out: (n_rows, n_cols) with contiguous rows
    factor_ptr,  # () in fp32
    counted_ptr,  # () in fp32
    stride_row,
    n_rows,
    n_cols,
    BLOCK_SIZE: tl.constexpr,
):
    """x *= factor * n_rows / counted.  Grid: (programs,), each of which takes every so-many-th block of a row.

    The loss kernel has divided by n_rows; this corrects for ignored targets, and for the factor of backward(). That is
    usually 1, and then x is not touched. Deciding on the device avoids a sync.
    """
    factor, counted = tl.load(factor_ptr), tl.load(counted_ptr)
    if counted != n_rows:
        factor *= n_rows / tl.maximum(counted, 1.0)  # if none counts, x is 0
    if factor != 1.0:
        blocks = tl.cdiv(n_cols, BLOCK_SIZE)
        for block in range(tl.program_id(0), n_rows * blocks, tl.num_programs(0)):
            cols = block % blocks * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
            ptrs = x_ptr + (block // blocks).to(tl.int64) * stride_row + cols
            store(ptrs, load(ptrs, cols < n_cols) * factor, cols < n_cols)


SCALE_BLOCK = 4096  # columns
SCALE_PROGRAMS = 8  # for each multiprocessor


@functools.cache
def cross_entropy_tiles(n_cols):
    """Return how a program divides a row: the columns of its loops, their block, the tile of the rest, and its threads.

    Measured on an H200: the longer a row, the larger its blocks. Columns that are masked take time too, and GPT-2's row
    would leave six sevenths of its last block empty. So a small rest is a tile of its own; a large one would take the
    registers of other programs. Loads of 16 bytes need a mask that is the same for 8 neighbors in bf16: the loops end
    at a multiple of 8.
    """
    size = next_power_of_2(n_cols)
    if size <= 4096 and n_cols % 8 == 0:
        return 0, 8, size, max(128, size // 16)
    block = min(max(8, size), max(4096, min(size // 8, 16384)))
    rest = n_cols % block
    if next_power_of_2(rest) > max(4096, block // 2):
        rest = n_cols % 8
    return n_cols - rest, block, next_power_of_2(max(1, rest)), max(128, min(block // 8, 1024))


def cross_entropy_(logits, targets, gradient_scale, ignore_index=-100):
    """Overwrite logits (rows, n) with their gradient; return losses, and 1 where a row counts, (2, rows)."""
    assert targets.is_contiguous(), "the kernel reads targets (rows,) as contiguous"
    # One program a row, however long: losses need no partial sums.
    n_rows, n_cols = logits.shape
    losses = logits.new_empty(2, n_rows, dtype=torch.float32)
    loop_cols, block_size, rest_size, threads = cross_entropy_tiles(n_cols)
    scalars = logits.stride(0), gradient_scale, ignore_index
    constants = dict(N_COLS=n_cols, LOOP_COLS=loop_cols, BLOCK_SIZE=block_size, REST_SIZE=rest_size)
    warps = threads // get_gpu(logits.device.type).warp_size
    launch(cross_entropy_kernel, (n_rows,), (logits, targets, losses), scalars, constants, num_warps=warps)
    return losses


class CrossEntropyFunction(torch.autograd.Function):
    """See triton_cross_entropy."""

    @staticmethod
    def forward(ctx, logits, targets, ignore_index):
        rows = as_rows(logits)
        if rows.stride(0) < rows.shape[1]:  # rows of an expanded tensor overlap: one's gradient would overwrite another
            rows = rows.contiguous()
        # The factor 1 / rows makes it the gradient of the mean; ignored rows are corrected for in backward().
        losses = cross_entropy_(rows, targets.reshape(-1).contiguous(), 1.0 / max(1, len(rows)), ignore_index)
        if not rows.is_inference():
            torch.autograd.graph.increment_version(rows)  # lets autograd detect another use of the overwritten logits
        # Two sums on the device: the losses, and how many rows count.
        total, counted = losses.sum(1)
        ctx.save_for_backward(rows.detach(), counted)
        ctx.shape = logits.shape
        return total / counted

    @staticmethod
    @first_derivative_only
    def backward(ctx, loss_grad):
        # The gradient was written by forward, with the factor 1 / rows: loss_grad is mostly 1, and nothing is to be
        # done.
        logits_grad, counted = ctx.saved_tensors
        n_rows, n_cols = logits_grad.shape
        block_size = min(next_power_of_2(n_cols), SCALE_BLOCK)
        # Few programs, as mostly nothing is to be done: one for each block of GPT-2's logits would take 0.1 ms.
        most = SCALE_PROGRAMS * get_gpu(logits_grad.device.type).num_sms
        programs = min(n_rows * cdiv(n_cols, block_size), most)
        scalars = logits_grad.stride(0), n_rows, n_cols
        launch(scale_kernel, (programs,), (logits_grad, loss_grad, counted), scalars, dict(BLOCK_SIZE=block_size))
        torch.autograd.graph.increment_version(logits_grad)  # a second run would scale it again: autograd refuses it
        return logits_grad.view(ctx.shape), None, None  # targets are integers


@outside_compiler
def triton_cross_entropy(logits, targets, ignore_index=-100):
    """Mean cross-entropy, in fp32, of logits (..., n) and integer targets (...) over the targets that are not ignored.

    NaN if none is left, as in PyTorch, and for any other target outside 0..n-1, where PyTorch reports an error. The
    logits are overwritten with their gradient, so they may not be a leaf that requires one (ValueError).
    """
    expect(logits=(logits, (*targets.shape, logits.shape[-1])))
    if targets.get_device() != logits.get_device():
        raise ValueError(f"targets are on {targets.device} and logits on {logits.device}: move one to the other")
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise TypeError(f"targets are {targets.dtype}: give the numbers of tokens as integers")
    if logits.is_leaf and logits.requires_grad:
        raise ValueError("logits is a leaf that requires a gradient, and would be overwritten: give logits.clone()")
    return CrossEntropyFunction.apply(logits, targets, ignore_index)


def torch_cross_entropy(logits, targets, ignore_index=-100):
    """Compute triton_cross_entropy in PyTorch's operators; the logits are kept."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=ignore_index)


Operations = collections.namedtuple("Operations", "embedding rmsnorm linear attention swiglu cross_entropy")
# The three implementations of the same six functions. select_operations() chooses one for a run.
OPERATIONS = {  # {implementation: what its modules call}
    "triton": Operations(
        embedding=triton_embedding,
        rmsnorm=triton_rmsnorm,
        linear=triton_linear,
        attention=triton_attention,
        swiglu=triton_swiglu,
        cross_entropy=triton_cross_entropy,
    ),
    "torch": Operations(F.embedding, torch_rmsnorm, F.linear, torch_attention, torch_swiglu, torch_cross_entropy),
    "sdpa": Operations(F.embedding, sdpa_rmsnorm, F.linear, sdpa_attention, torch_swiglu, torch_cross_entropy),
}


# ----------------------------------------------------------------------------------------------------------------------
# 10 AdamW over flat buffers (Loshchilov and Hutter, arXiv:1711.05101), one launch for all parameters
#
# All weights lie in one buffer of blocks, all gradients in another. For two parameters, of 1500 and 700 elements:
#
#     block        0              1               2
#     elements     0 to 1023      1024 to 1499    2048 to 2747
#     then         -              zeros           zeros
#     owner        parameter 0    parameter 0     parameter 1
#
# A matrix whose rows are no multiple of 8 has some of the zeros as further rows, or more of them: see padded(). Several
# processes share the work: the blocks are divided into buckets, whose gradients and weights travel in one message, and
# each process has moments for an equal part of each bucket, its own blocks. For two processes, a block of zeros would
# follow above, and the own blocks be [0, 1] and [2, 3]. One process has one bucket, and all blocks are its own.

ADAMW_BLOCK = 1024  # elements; 256 to 4096 are within 3 %


@jit
def load_moment(ptrs):
    """Load fp32 numbers, or the upper halves of some in int16."""
    x = tl.load(ptrs)
    if ptrs.dtype.element_ty == tl.int16:
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x


@jit
def store_moment(ptrs, x, addend):
    """Store what load_moment loads. addend, from 0 to 0xFFFF, decides how x is rounded to its upper half."""
    if ptrs.dtype.element_ty == tl.int16:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits + addend)  # one NaN: some would overflow
        tl.store(ptrs, (bits >> 16).to(tl.int16))
    else:
        tl.store(ptrs, x)


@jit
def random_halves(offsets, seed):
    """Return numbers from 0 to 0xFFFF that look random, but are the same for the same offsets and seed.

    Products with odd numbers and shifts mix the bits until each depends on all. The numbers are those of lowbias32
    (C. Wellons, hash prospector).
    """
    bits = offsets.to(tl.uint32) ^ seed
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return ((bits ^ (bits >> 16)) & 0xFFFF).to(tl.int32)


@jit
def adamw_kernel(
    param_ptr,  # in and out: (blocks, BLOCK_SIZE) in fp32 or, with SPLIT, the upper halves in int16
    remainder_ptr,  # in and out: (own blocks, BLOCK_SIZE) in int16, the lower halves, used with SPLIT
    grad_ptr,  # like param, in the model's type
    exp_avg_ptr,  # in and out: (own blocks, BLOCK_SIZE) in fp32, or in int16 the upper halves, which are bf16
    exp_avg_sq_ptr,  # like exp_avg
    beta_powers_ptr,  # (parameters, 2) in fp64: beta1^steps, beta2^steps
    lr_ptr,  # () in fp32
    scale_ptr,  # () in fp32
    weight_decay_ptr,  # (parameters,) in fp32
    blocks_ptr,  # (own blocks,) in int32: which of all blocks
    owners_ptr,  # (own blocks,) in int32: the number of the block's parameter, -1 if that has no gradient
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """torch.optim.AdamW's update with scale * grad. With SPLIT a weight is two int16 halves: see split_fp32.

    Each program updates one block of one parameter.  Grid: (own blocks,).
    """
    owner = tl.load(owners_ptr + tl.program_id(0))
    if owner >= 0:
        offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        all_offsets = tl.load(blocks_ptr + tl.program_id(0)).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        lr = tl.load(lr_ptr)
        # beta^steps is on the device, because a captured graph has no host. Each parameter has its own, because it may
        # have been frozen for some steps. It is in fp64, because 1 - beta2^steps cancels.
        power_ptrs = beta_powers_ptr + 2 * owner
        # The moments begin at 0 and are too small at first, by this factor.
        bias_correction1 = (1.0 - tl.load(power_ptrs)).to(tl.float32)
        bias_correction2 = (1.0 - tl.load(power_ptrs + 1)).to(tl.float32)
        # All tiles are (BLOCK_SIZE,).
        grad = tl.load(grad_ptr + all_offsets).to(tl.float32) * tl.load(scale_ptr)
        exp_avg = load_moment(exp_avg_ptr + offsets)
        exp_avg_sq = load_moment(exp_avg_sq_ptr + offsets)
        weights = tl.load(param_ptr + all_offsets)
        if SPLIT:
            remainder = tl.load(remainder_ptr + offsets).to(tl.int32)
            # Upper half and lower half, which has a sign: together the bits of an fp32 number.
            weights = ((weights.to(tl.int32) << 16) + remainder).to(tl.float32, bitcast=True)
        # Running means of the gradient and of its square.
        exp_avg += (grad - exp_avg) * (1.0 - BETA1)
        exp_avg_sq = exp_avg_sq * BETA2 + grad * grad * (1.0 - BETA2)
        denominator = tl.sqrt(exp_avg_sq) / tl.sqrt(bias_correction2) + EPS
        step = lr / bias_correction1 * exp_avg / denominator
        weight_decay = tl.load(weight_decay_ptr + owner)
        if weight_decay != 0.0:  # as a product with 1 - lr * weight_decay it would lose most digits of a small lr
            step += lr * weight_decay * weights
        weights -= step
        # In bf16, whose numbers lie a 256th apart, the mean of squares would never change: it does by a thousandth a
        # step. Rounded up as often as its lower half says, it is right on average. beta2^steps differs in each step.
        store_moment(exp_avg_ptr + offsets, exp_avg, 0x8000)
        seed = tl.load(power_ptrs + 1).to(tl.uint64, bitcast=True)
        seed = (seed ^ (seed >> 32)).to(tl.uint32)
        store_moment(exp_avg_sq_ptr + offsets, exp_avg_sq, random_halves(offsets, seed))
        if SPLIT:
            # Split the new weight again, as in split_fp32.
            bits = weights.to(tl.int32, bitcast=True)
            # One NaN for all: some would round to zero.
            bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)
            rounded = (bits + 0x8000) >> 16
            tl.store(param_ptr + all_offsets, rounded.to(tl.int16))
            tl.store(remainder_ptr + offsets, (bits - (rounded << 16)).to(tl.int16))
        else:
            tl.store(param_ptr + all_offsets, weights)


def split_fp32(weights):
    """Split fp32 weights into bf16, the weights rounded, and int16, the 16 bits lost by it. join_fp32 is exact.

    bf16 is the upper half of an fp32 number. The model computes with it, and the optimizer adds the lower half: a
    master weight and its copy in low precision take 4 bytes together instead of 6. Ties are rounded away from zero,
    else the lower half would not fit into 16 bits. A NaN is one in both, but not with the same payload.
    """
    # Adding half of what is cut off rounds to the nearest.
    bits = weights.view(torch.int32).masked_fill(weights.isnan(), 0x7FC00000)
    rounded = (bits + 0x8000) >> 16
    return rounded.to(torch.int16).view(torch.bfloat16), (bits - (rounded << 16)).to(torch.int16)


def join_fp32(rounded, remainder):
    """Invert split_fp32: bf16 and int16 -> fp32, of one shape."""
    return ((rounded.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def write_padded(place, values):
    """Write values (n, ...) to the first rows of place, or a number to (), and zeros to the rows of padding."""
    if values.dim() == 0:
        place.copy_(values)
    else:
        place[: len(values)].copy_(values)
        place[len(values) :].zero_()


def optimizer_options(config):
    """Return the keywords of a FlatAdamW for a Config."""
    moments_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config.moments]
    options = dict(lr=config.learning_rate, low_precision=config.use_amp, moments_dtype=moments_dtype)
    return options | dict(max_norm=config.clip, accumulate=config.accumulate)


def refuse_change(*_, **__):
    """Raise RuntimeError where the model of an optimizer is changed, which would not see it, nor a captured graph."""
    raise RuntimeError(
        "this model is a TrainStep's, whose optimizer would not see the change: give other weights to the step's "
        "load_state_dict(), and what is not to be trained to its freeze(); for anything else take a TinyLlamaTriton "
        "and an optimizer of torch.optim"
    )


class OwnedParameter(nn.Parameter):
    """A weight in the buffer of a FlatAdamW. It refuses to be written, frozen, moved, copied or given a hook.

    padded is the weight with the rows of zeros that follow it, padded_grad the place of its gradient with as many, and
    main_grad that without them.
    """

    requires_grad = property(torch.Tensor.requires_grad.__get__, refuse_change)
    data = property(torch.Tensor.data.__get__, refuse_change)
    register_hook = register_post_accumulate_grad_hook = __deepcopy__ = __reduce_ex__ = refuse_change
    __setitem__ = __iadd__ = __isub__ = __imul__ = __itruediv__ = refuse_change


for name in dir(torch.Tensor):
    if name.endswith("_") and not name.startswith("_"):  # copy_(), requires_grad_() and the others that write
        setattr(OwnedParameter, name, refuse_change)


class Owned:
    """What own() puts before the class of each module, as PyTorch's fully_shard() does: it refuses to be changed."""

    __delattr__ = __reduce_ex__ = _apply = load_state_dict = add_module = insert = refuse_change

    def __setattr__(self, name, value):
        if name not in ("training", "named_range"):
            refuse_change()
        super().__setattr__(name, value)


for name in dir(nn.Module):
    if name.startswith("register_"):  # hooks, weights and modules
        setattr(Owned, name, refuse_change)


@functools.cache
def owned_class(kind):
    """Return a class like this one of modules, and of the same name, that refuses changes."""
    return type(kind.__name__, (Owned, kind), {"__module__": kind.__module__})


MOMENTS = "exp_avg", "exp_avg_sq"  # names of the optimizers' tensors, PyTorch's too


class FlatAdamW:
    """AdamW whose parameters, gradients and moments are one flat buffer each, of blocks of ADAMW_BLOCK elements.

    param       the weights, of which the model's parameters become views in own(); in bf16 if low_precision
    remainder   with low_precision: the lower halves of the fp32 weights, whose upper halves are param
    grad        their gradients; p.main_grad is a view of it, into which backward passes write: see give_gradient()
    exp_avg, exp_avg_sq   the moments, in moments_dtype, fp32 or bf16

    A parameter without a gradient stays as it is, and so does its count of steps. Learning rate and counts are on the
    device, so that step() can be captured.

    grad is the sum of what accumulate backward passes have added. step() divides by that number and, with max_norm,
    scales the mean so that its norm is at most that; norm () is what it was. weight_decay may be a function of a
    parameter, gradient_dtype is the type of grad if it is not that of param.
    """

    def __init__(
        self,
        lr,
        low_precision=False,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.01,
        moments_dtype=torch.float32,
        max_norm=None,
        accumulate=1,
        gradient_dtype=None,
    ):
        self.initial_lr, self.low_precision, self.betas, self.moments_dtype = lr, low_precision, betas, moments_dtype
        self.decay_of = weight_decay if callable(weight_decay) else lambda parameter: weight_decay
        self.max_norm, self.accumulate, self.gradient_dtype = max_norm, accumulate, gradient_dtype
        self.constants = dict(BETA1=betas[0], BETA2=betas[1], EPS=eps, SPLIT=low_precision, BLOCK_SIZE=ADAMW_BLOCK)

    def own(self, model, buckets=None, share=(0, 1)):
        """Take over the weights of a model, which become views of param, in bf16 if low_precision.

        From then on the model refuses changes. With several processes, share is (rank, processes), and buckets are
        lists of the model's parameters.
        """
        self.parameters = list(model.parameters())
        own_blocks = self.place(buckets or [self.parameters], *share)
        zeros = functools.partial(torch.zeros, dtype=torch.float32, device=self.parameters[0].device)
        dtype = torch.bfloat16 if self.low_precision else torch.float32
        self.param = self.make_weights(len(self.owners) * ADAMW_BLOCK, dtype=dtype, device=self.parameters[0].device)
        self.grad = torch.zeros_like(self.param, dtype=self.gradient_dtype)
        n_state = len(own_blocks) * ADAMW_BLOCK
        self.remainder = zeros(n_state, dtype=torch.int16) if self.low_precision else None
        self.beta_powers = zeros(len(self.parameters), 2, dtype=torch.float64)
        self.rate = zeros(()).fill_(self.initial_lr)
        self.gradient_count = share[1] * self.accumulate  # how many gradients the sum has
        self.scale, self.norm = zeros(()).fill_(1 / self.gradient_count), zeros(())
        as_tensor = functools.partial(torch.tensor, device=self.param.device)
        self.own_blocks = as_tensor(own_blocks, dtype=torch.int32)
        self.own_owners = as_tensor([self.owners[block] for block in own_blocks], dtype=torch.int32)
        self.weight_decays = as_tensor([float(self.decay_of(p)) for p in self.parameters], dtype=torch.float32)
        self.has_gradient = self.decays = self.updated_owners = None  # see step()
        self.write(p.detach().float() for p in self.parameters)
        for p, weight, gradient in zip(
            self.parameters, self.padded_views(self.param), self.padded_views(self.grad), strict=True
        ):
            # p stays the same object, which the modules hold; only the memory behind it changes.
            p.data, p.main_grad = (matrix[: len(p)] if p.dim() else matrix for matrix in (weight, gradient))
            p.padded, p.padded_grad = weight, gradient
            p.__class__ = OwnedParameter
        for module in model.modules():
            module.__class__ = owned_class(type(module))
        # The parameters' former memory is free now, as much as a moment takes.
        self.exp_avg, self.exp_avg_sq = (zeros(n_state, dtype=self.moments_dtype) for _ in range(2))
        self.beta_powers.fill_(1.0)

    def make_weights(self, *size, **options):
        """Return the buffer of the weights, zeros."""
        return torch.zeros(*size, **options)

    @property
    def lr(self):
        """Return the learning rate, a tensor () on the device, which a captured step reads."""
        return self.rate

    @lr.setter
    def lr(self, value):
        """Write it there."""
        self.rate.fill_(value)

    def place(self, buckets, rank, processes):
        """Give each parameter blocks in the flat buffers, as drawn above; return the own blocks of this process."""
        self.starts = []  # for each parameter its first element
        self.owners = []  # for each block the number of its parameter
        self.bucket_slices = []  # for each bucket its elements
        self.own_ranges = []  # for each bucket the own blocks of this process
        for bucket in buckets:
            first = len(self.owners)
            for p in bucket:
                self.starts.append(len(self.owners) * ADAMW_BLOCK)
                self.owners += [len(self.starts) - 1] * cdiv(math.prod(padded_shape(p)), ADAMW_BLOCK)
            # Blocks of zeros, as many as make their number a multiple of processes.
            self.owners += [len(self.starts) - 1] * ((first - len(self.owners)) % processes)
            length = (len(self.owners) - first) // processes
            self.bucket_slices.append(slice(first * ADAMW_BLOCK, len(self.owners) * ADAMW_BLOCK))
            self.own_ranges.append(range(first + rank * length, first + (rank + 1) * length))
        return [*itertools.chain(*self.own_ranges)]

    def own_part(self, number):
        """Return which blocks of a parameter this process has, and their places among all that it has: two slices."""
        begin = self.starts[number] // ADAMW_BLOCK
        end = begin + cdiv(math.prod(padded_shape(self.parameters[number])), ADAMW_BLOCK)
        places = 0
        for own in self.own_ranges:
            first, last = max(begin, own.start), min(end, own.stop)
            if first < last:  # a parameter is in one bucket
                shift = places - own.start
                return slice(first - begin, last - begin), slice(first + shift, last + shift)
            places += len(own)
        return slice(0), slice(0)

    def padded_views(self, flat):
        """Yield the part of each parameter in a flat buffer with its rows of padding: see padded_shape()."""
        for p, start in zip(self.parameters, self.starts, strict=True):
            shape = padded_shape(p)
            yield flat[start : start + math.prod(shape)].view(shape)

    def views(self, flat):
        """Yield the part of each parameter in a flat buffer, in its shape."""
        for p, matrix in zip(self.parameters, self.padded_views(flat), strict=True):
            yield matrix[: len(p)] if p.dim() else matrix

    @torch.no_grad()
    def reset(self, weights):
        """Start over from these weights (an iterable of fp32 tensors)."""
        self.write(weights)
        self.exp_avg.zero_()
        self.exp_avg_sq.zero_()
        self.beta_powers.fill_(1.0)

    @torch.no_grad()
    def write(self, weights):
        """Write these weights (an iterable of fp32 tensors) one by one, as all at once may not fit into the memory."""
        for number, (place, weight) in enumerate(zip(self.padded_views(self.param), weights, strict=True)):
            if self.remainder is None:  # in fp32 the flat weights are the master weights
                write_padded(place, weight)
                continue
            upper, lower = split_fp32(weight)
            write_padded(place, upper)
            self.write_own(self.remainder, number, lower)

    def write_own(self, flat, number, values):
        """Write what belongs to a parameter, in its shape, to a flat buffer that has only this process's own blocks."""
        blocks, places = self.own_part(number)
        shape = padded_shape(self.parameters[number])
        whole = flat.new_zeros(cdiv(math.prod(shape), ADAMW_BLOCK), ADAMW_BLOCK)
        whole.view(-1)[: values.numel()] = values.flatten()
        flat.view(-1, ADAMW_BLOCK)[places] = whole[blocks]

    def gather(self, flat):
        """Return a flat buffer of all blocks, of one that has only the own blocks of each process: here all."""
        return flat

    def each_weight(self):
        """Yield the fp32 weights one by one, in the order of model.parameters()."""
        if self.remainder is None:
            yield from self.views(self.param)
            return
        yield from map(join_fp32, self.views(self.param), self.views(self.gather(self.remainder)))

    def weights(self):
        """Return the fp32 weights, a list of tensors in the order of model.parameters()."""
        return list(self.each_weight())

    def each_state(self):
        """Yield (name, tensors) of what else a run needs to go on, for each parameter one: moments and beta_powers."""
        for name in MOMENTS:
            yield name, self.views(self.gather(getattr(self, name)))
        yield "beta_powers", self.beta_powers

    @torch.no_grad()
    def load_state(self, state):
        """Write what each_state() yields, {name: tensors}; types may differ."""
        for name in MOMENTS:
            for number, values in enumerate(state[name]):
                self.write_own(getattr(self, name), number, values.to(self.param.device))
        self.beta_powers.copy_(torch.stack(list(state["beta_powers"])))

    def zero_grad(self):
        """Let the next backward pass overwrite the gradients."""
        for p in self.parameters:
            p.grad = None

    def average_gradients(self):
        """Make .grad of all parameters the mean in the place of the sum, once a step."""
        self.collect_gradients(self.parameters)
        self.grad.div_(self.gradient_count)

    def sum_norm(self):
        """Return the norm () of the sum of all gradients."""
        return total_norm([self.grad])

    def clip(self):
        """Set the scale by which step() multiplies gradients, so that the norm of their mean is at most max_norm."""
        self.norm.copy_(self.sum_norm() / self.gradient_count)
        # As torch.nn.utils.clip_grad_norm_(), all on the device.
        self.scale.copy_((self.max_norm / (self.norm + 1e-6)).clamp(max=1.0) / self.gradient_count)

    @torch.no_grad()
    def collect_gradients(self, parameters):
        """Copy the gradients of these parameters that came from autograd into the flat buffer."""
        others = [p for p in parameters if p.grad is not None and p.grad is not p.main_grad]
        if others:  # in few launches for all
            torch._foreach_copy_([p.main_grad for p in others], [p.grad for p in others])
        for p in others:
            p.grad = p.main_grad

    @torch.no_grad()
    def step(self):
        """Update the weights that have a gradient."""
        self.collect_gradients(self.parameters)
        # Severed kernels, frozen weights, unused modules: what has no gradient is not even decayed.
        has_gradient = [p.grad is not None for p in self.parameters]
        if has_gradient != self.has_gradient:  # in the first step, and after weights were frozen or thawed
            self.has_gradient = has_gradient
            is_updated = torch.tensor(has_gradient, device=self.lr.device)
            # What a step multiplies beta_powers with: the betas, or 1 where the count of steps stays.
            betas = torch.tensor(self.betas, dtype=torch.float64, device=self.lr.device)
            self.decays = torch.where(is_updated[:, None], betas, 1.0)
            self.updated_owners = torch.where(is_updated[self.own_owners.long()], self.own_owners, -1)
            for p in self.parameters:
                if p.grad is None:  # what another step has left there is not part of the norm
                    p.main_grad.zero_()
        if self.max_norm is not None:
            self.clip()
        # beta^steps of each parameter, one multiplication a step. The kernel must not write what all its threads read.
        self.beta_powers.mul_(self.decays)
        # The kernel takes and gives the upper halves as integers: bits, not numbers.
        is_split = self.remainder is not None
        weights = self.param.view(torch.int16) if is_split else self.param
        remainder = self.remainder if is_split else weights  # a placeholder
        moments, blocks = (self.exp_avg, self.exp_avg_sq), (self.own_blocks, self.updated_owners)
        if self.exp_avg.dtype == torch.bfloat16:
            moments = [moment.view(torch.int16) for moment in moments]
        numbers = self.beta_powers, self.lr, self.scale, self.weight_decays
        tensors = weights, remainder, self.grad, *moments, *numbers, *blocks
        launch(adamw_kernel, (len(self.own_blocks),), tensors, (), self.constants)


class TorchAdamW(torch.optim.AdamW):
    """torch's fused AdamW with the same hyperparameters, for --impl torch and sdpa; max_norm as in FlatAdamW."""

    parameters = property(lambda optimizer: optimizer.param_groups[0]["params"])

    def __init__(self, model, lr, max_norm=None):
        on_gpu = next(model.parameters()).is_cuda
        # On the device, so that a captured step reads it. On an H100, neither this nor capturable changes a bit.
        lr = torch.tensor(lr, device="cuda") if on_gpu else lr
        super().__init__(model.parameters(), lr=lr, weight_decay=0.01, fused=True, capturable=on_gpu)
        self.max_norm, self.norm = max_norm, None

    @property
    def lr(self):
        """Return the learning rate, on a GPU a tensor () on the device."""
        return self.param_groups[0]["lr"]

    @lr.setter
    def lr(self, value):
        """Write it there."""
        if torch.is_tensor(self.lr):
            self.lr.fill_(value)
        else:
            self.param_groups[0]["lr"] = value

    def step(self, closure=None):
        """Clip the gradients and update the weights."""
        if self.max_norm is not None:
            self.norm = whole(torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm))
        return super().step(closure)

    def weights(self):
        """Return the weights as FlatAdamW.weights(); with --shard full all processes must call it."""
        return list(self.each_weight())

    def each_weight(self):
        """Yield the weights as FlatAdamW.each_weight()."""
        for p in self.parameters:
            yield whole(p.detach())

    def each_state(self):
        """Yield (name, tensors) of moments and counts of steps, as FlatAdamW.each_state()."""
        for name in (*MOMENTS, "step"):
            yield name, (whole(self.state[p][name]) for p in self.parameters)

    @torch.no_grad()
    def load_state(self, state):
        """Write what each_state() yields, {name: tensors}."""
        for number, p in enumerate(self.parameters):
            if not self.state[p]:  # no step has run yet
                moments = {name: torch.zeros_like(p) for name in MOMENTS}
                self.state[p] |= moments | dict(step=torch.zeros((), device=p.device if p.is_cuda else "cpu"))
            for name, value in self.state[p].items():
                value.copy_(state[name][number])

    @torch.no_grad()
    def reset(self, weights):
        """Start over from these weights (a list of tensors)."""
        for p, weight in zip(self.parameters, weights, strict=True):
            p.copy_(weight)
        for value in itertools.chain(*(state.values() for state in self.state.values())):
            value.zero_()


# ----------------------------------------------------------------------------------------------------------------------
# 11 Check: no figure counts before loss and gradients agree with PyTorch's

CHECK_BATCH = 2  # sequences; the reference keeps every score matrix in memory
CHECK_ATOL = {"fp32": 1e-5, "tf32": 2e-3, "bf16": 1e-2, "fp8": 1e-2}  # relative to the norm of the reference


class Verdict(NamedTuple):
    """The outcome of the rule: an error may be twice that of plain PyTorch in the same precision, plus a tolerance."""

    errors: dict  # {name: distance from the reference, relative to its norm}
    allowed: dict

    @property
    def failed(self):
        """Return the names of errors larger than allowed; a NaN is one."""
        return [name for name, error in self.errors.items() if not error <= self.allowed[name]]

    @property
    def worst(self):
        """Return the name of the error that is the largest in relation to what is allowed."""
        return max(self.failed or self.errors, key=lambda name: self.errors[name] / self.allowed[name])


def judge(errors, plain_errors, tolerance):
    """Return the Verdict on {name: error} beside those of plain PyTorch in the same precision."""
    # Plain PyTorch in the same precision shows how large rounding errors are: kernels may have twice as large ones.
    return Verdict(errors, {name: 2 * error + tolerance for name, error in plain_errors.items()})


def relative_errors(results, exact, order=2):
    """Return {name: norm(result - exact) / norm(exact)} of {name: tensor}; inf if a result is None."""
    norm = functools.partial(torch.linalg.vector_norm, ord=order)
    return {
        name: math.inf if results[name] is None else float(norm(results[name] - reference) / norm(reference))
        for name, reference in exact.items()
    }


def loss_and_gradients(step, batch):
    """Return the loss and each gradient, {"loss" or parameter: tensor}, of a new step's first pass."""
    step.load(*batch)
    for name, phase in step.phases.items():
        if name != "optimizer":
            phase()
    step.world.collect_gradients(step.optimizer)
    # None, and not zeros: a gradient that never arrives must fail the check.
    gradients = {name: None if p.grad is None else whole(p.grad) for name, p in step.model.named_parameters()}
    return {"loss": step.loss.detach().double(), **gradients}


def exact_loss_and_gradients(config, device, batch):
    """Return those of --impl torch in fp64, or in full fp32 for a bf16 run."""
    torch.set_float32_matmul_precision("highest")
    step = TrainStep(dataclasses.replace(config, impl="torch", shard=None, use_amp=False, fp8=False), device)
    if not config.use_amp:
        step.model.double()
    exact = loss_and_gradients(step, batch)
    torch.set_float32_matmul_precision(config.matmul_precision)
    return exact


def check_batch(config, device, batch):
    """Return the Verdict on the loss and gradients of a batch, and their exact values."""
    plain = dataclasses.replace(config, impl="torch", shard=None)
    # The same initial weights and batch three times: exact, ours, and PyTorch in our precision.
    exact = exact_loss_and_gradients(config, device, batch)
    steps = (TrainStep(c, device) for c in (config, plain))
    errors, plain_errors = (relative_errors(loss_and_gradients(step, batch), exact) for step in steps)
    verdict = judge(errors, plain_errors, CHECK_ATOL[precision_name(config, device)])
    if config.fp8:
        verdict = companion("fp8").require_more(verdict, exact, config, device, batch)
    return verdict, exact


def print_verdict(verdict, reference):
    """Print the outcome of a check, and what failed."""
    errors, allowed, failed, worst = *verdict, verdict.failed, verdict.worst
    outcome = f"FAILED in {len(failed)} of {len(errors)}" if failed else "passed"
    parameters = sum("." in name for name in errors)  # unlike the loss, and what --fp8 adds
    print(f"Check against PyTorch in {reference}: {outcome} (loss and gradients of {parameters} parameters)")
    print(f"    worst, {worst}: error {errors[worst]:.1e}, allowed {allowed[worst]:.1e}")
    for name in failed[:10]:
        reason = "no gradient" if errors[name] == math.inf else f"error {errors[name]:.1e}, allowed {allowed[name]:.1e}"
        print(f"    {name}: {reason}")


# ----------------------------------------------------------------------------------------------------------------------
# 12 What is measured of a run, and its summary


def divergence(records, first=0):
    """Return the first loss or gradient norm that is not finite, {"step", "quantity", "value"}, or None.

    first: how many steps were done before the records.
    """
    for number, record in enumerate(records, first + 1):
        for quantity, value in (("loss", record.loss), ("gradient norm", record.grad_norm)):
            if value is not None and not math.isfinite(value):
                return {"step": number, "quantity": quantity, "value": str(value)}
    return None


def whole(tensor):
    """Return a tensor, gathered if --shard full distributes it; then all processes must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def count_weights(parameters):
    """Return the number of elements of all of these."""
    return sum(p.numel() for p in parameters)


def total_norm(tensors):
    """Return the 2-norm of all these together, () in fp32, of a CPU's tensors in fp64."""
    # On a CPU, PyTorch adds fp32 in one running sum, which loses 0.5 % of 67 million elements.
    dtype = torch.float32 if any(tensor.is_cuda for tensor in tensors) else torch.float64
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t, dtype=dtype) for t in tensors]))


def gradient_norm(model):
    """Return the 2-norm of all gradients together."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return whole(total_norm(gradients)).item() if gradients else 0.0


def without_gradient(model):
    """Return the names of the parameters that are not frozen and have no gradient, or one of nothing but zeros."""
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [name for name, p in parameters if p.grad is None or not bool(whole(p.grad).any())]


def peak_memory_mib(device):
    """Return the most memory in use since the last reset: of the GPU's tensors, or on a CPU of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def summarize(step, records):
    """Return the measured figures of this process, a dict for print_summary() and the JSON file."""
    config, hardware = step.config, companion("hardware")
    batch = [record.batch_ms for record in records]
    # Speeds follow from the mean, which has to pay for slow steps too; p50 is what a typical step takes.
    mean = float(np.mean(batch))
    p20, p50, p80 = np.percentile(batch, [20, 50, 80]).tolist()
    named = dict(step.model.named_parameters())
    missing = without_gradient(step.model)
    total = count_weights(named.values())
    frozen = count_weights(p for p in named.values() if not p.requires_grad)
    # Peaks and operations are known by tiny_llama/hardware.py.
    tflops, peak = hardware.tflops_and_peak(config, step.device) if hardware else (None, None)
    return dict(
        steps=len(records),
        steps_before=step.first,
        diverged=divergence(records, step.first),
        final_loss=records[-1].loss,
        first_loss=records[0].loss,
        entropy=entropy(config),
        samples_per_second=config.sequences_per_step / mean * 1e3,
        tokens_per_second=config.tokens_per_step / mean * 1e3,
        batch_ms={"mean": mean, "p20": p20, "p50": p50, "p80": p80},
        phase_ms={name: float(np.mean([r.phase_ms[name] for r in records])) for name in records[0].phase_ms},
        host_ms=float(np.median([record.host_ms for record in records])),
        peak_memory_mib=peak_memory_mib(step.device),
        parameters=total,
        parameters_frozen=frozen,
        parameters_with_gradient=total - frozen - count_weights(named[name] for name in missing),
        parameters_without_gradient=missing,
        tflops_per_second=tflops and tflops / (p50 / 1e3),
        mfu=peak and tflops / (p50 / 1e3) / peak,
    )


def print_summary(step, summary):
    """Print what summarize() returned, under labels that other programs read."""
    batch, phases, on_gpu = summary["batch_ms"], summary["phase_ms"], step.device.type == "cuda"
    print()
    if summary["diverged"]:
        where = "Step {step}: the {quantity} is {value}".format(**summary["diverged"])
        print(f"{where}: the run diverged, no later step counts; try a lower --learning-rate, or see what --check says")
    reason = dict(random="ln(vocab): random tokens cannot be learnt", markov="the data's entropy").get(step.config.data)
    words = step.config.vocab_size
    floor = f"floor {summary['entropy']:.4f}, {reason}" if reason else f"guessing: ln({words}) = {math.log(words):.4f}"
    print(f"Final loss: {summary['final_loss']:.4f} (first {summary['first_loss']:.4f}; {floor})")
    print(f"Average training speed: {summary['samples_per_second']:.1f} samples/sec")
    print(f"Throughput: {summary['tokens_per_second']:,.0f} tokens/sec")
    print("Average batch time: {mean:.3f} ms (p20 {p20:.3f}, p50 {p50:.3f}, p80 {p80:.3f})".format(**batch))
    for name in ("forward", "backward", "optimizer"):
        print(f"Average {name} time: {f'{phases[name]:.3f} ms' if phases else 'not measured (--timing step)'}")
    if phases:
        together = sum(phases.values())
        print(f"Phases together: {together:.3f} ms, {100 * together / batch['mean']:.0f} % of the batch time")
    memory = summary["peak_memory_mib"]
    print(f"Peak memory usage: {f'{memory:.1f} MiB' if memory else 'unknown'}{'' if on_gpu else ' (whole process)'}")
    if on_gpu:
        launch_bound = "launch-bound" if summary["host_ms"] > 0.8 * batch["p50"] else "not launch-bound"
        print(f"Host time to issue a step: {summary['host_ms']:.3f} ms of {batch['p50']:.3f} ms ({launch_bound})")
        kernels = summary["kernels"]
        is_counted = isinstance(kernels, dict)
        counted = "{kernels} in {launches} launches".format(**kernels) if is_counted else f"not counted, {kernels}"
        print(f"Kernels a step: {counted}")
    received, total, frozen = (summary[f"parameters{kind}"] for kind in ("_with_gradient", "", "_frozen"))
    apart = f", {frozen:,} frozen" if frozen else ""
    print(f"Parameters with a gradient: {received:,} of {total:,} ({100 * received / total:.1f} %){apart}")
    if 0 < received < total - frozen:  # as in stage 6 the tied embedding, without what comes through the layers
        print("    what these received may be a part of their gradient as well: --check tells")
    if summary["tflops_per_second"]:
        precision, mfu = precision_name(step.config, step.device), summary["mfu"]
        peak = f", {100 * mfu:.1f} % of the {precision} peak" if mfu else ""
        print(f"Model arithmetic: {summary['tflops_per_second']:.2f} TFLOP/s{peak}")
    print(f"Compilation and warm-up: {summary['warmup_seconds']:.1f} s, not counted above")
    if None not in summary["gpu"]["busy"].values():
        state = "{power_w:.0f} W, {clock_mhz:.0f} MHz, {temperature_c:.0f} degrees C".format(**summary["gpu"]["busy"])
        print(f"GPU after the last step: {state}")
    if energy := summary["energy"]:
        used = f"{energy['step_j']:.2f} J a step, {1e3 * energy['token_j']:.3f} mJ a token"
        print(f"Energy of the GPU: {used}, over {energy['seconds']:.1f} s")


# ----------------------------------------------------------------------------------------------------------------------
# 13 A run, from the command line to the JSON file


def random_tokens(config):
    """Yield batches (tokens, targets: one position on) of uniform tokens: nothing can be learnt.

    Both are (sequences_per_step, seq): a step's micro-batches one after the other.
    """
    generator = torch.Generator().manual_seed(config.seed)  # on the CPU, so that every device gets the same
    while True:
        shape = config.sequences_per_step, config.seq_len + 1
        sequence = torch.randint(config.vocab_size, shape, generator=generator)
        yield sequence[:, :-1], sequence[:, 1:]


def batches(config):
    """Return the batches of config.data, a generator like random_tokens()."""
    return random_tokens(config) if config.data == "random" else companion("data").batches(config)


def entropy(config):
    """Return the entropy per token in nats, the floor of the loss; None for files, where it is unknown."""
    return math.log(config.vocab_size) if config.data == "random" else companion("data").entropy(config)


def parse_config(argv, program):
    """Return the Config of a command line. A program called v3_stage3_anything.py implies --stage 3."""

    def refuse(message):  # where argparse would print the usage and exit
        raise UsageError(f"{message} (--help lists the options)")

    name, layout = Path(program).name, argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(name, description=__doc__, formatter_class=layout, allow_abbrev=False)
    parser.error = refuse
    for field in dataclasses.fields(Config):
        if field.name in HELP_GROUPS:
            group = parser.add_argument_group(HELP_GROUPS[field.name])
        # argparse converts by a type, and None is only ever a default.
        kind = {int | None: int, float | None: float, str | None: str}.get(field.type, field.type)
        keywords = field.metadata["keywords"] | (dict(action="store_true") if kind is bool else dict(type=kind))
        if choices := keywords.pop("choices", None):  # Config compares the value with them
            keywords["metavar"] = "|".join(map(str, choices))
        shown_default = "" if field.default in (None, False) else f" (default: {field.default})"
        help = field.metadata["help"].replace("%", "%%") + shown_default
        # What is not given is no attribute: Config has the defaults, or a folder something else.
        group.add_argument(flag_of(field.name), default=argparse.SUPPRESS, help=help, **keywords)
    group.add_argument("--list-stages", action="store_true", help="print the stages and their signs, and exit")
    args = vars(parser.parse_args(argv))
    if args.pop("list_stages"):
        companion("notes", "--list-stages").list_stages()
        parser.exit()
    link = re.match(r"v3_stage(\d+)_", name)
    if link:
        if args.get("stage") not in (None, int(link[1])):
            raise UsageError(f"--stage {args['stage']} contradicts the name {name}: drop one of the two")
        args["stage"] = int(link[1])
    return Config(**fields_of_folder(args) | args)


def fields_of_folder(args):
    """Return {field of Config: value} of the folder that a command line names, args; UsageError if args contradict it.

    --init-from has the sizes of a model, --resume all flags of the run that has saved it. Others than the sizes may be
    given again.
    """
    flag = "--resume" if "resume" in args else "--init-from"
    folder = args.get("resume", args.get("init_from"))
    if folder is None or "resume" in args and "init_from" in args:  # which Config refuses
        return {}
    fields = companion("checkpoint", flag).model_fields(folder, flag)
    for name, value in fields.items():
        if args.get(name, value) != value:
            given, has = f"{flag_of(name)} {args[name]}", f"{flag} {folder}, whose model has {value}"
            raise UsageError(f"{given} contradicts {has}: drop one of the two")
    return fields | (companion("checkpoint", flag).training_fields(folder, flag) if flag == "--resume" else {})


def validate_on_device(config, device):
    """Raise UsageError for what this device cannot do, and for data that is not there."""
    if config.data != "random":
        companion("data", f"--data {config.data}").validate(config)
    if config.graph and device.type == "cpu":
        raise UsageError("--graph needs a GPU, and the device is a CPU: drop --graph (or --stage 8)")
    if config.graph and config.warmup_steps == 0:
        why = "--no-warmup" if config.no_warmup else "--warmup-steps 0"
        raise UsageError(f"--graph captures a step that has run before, and {why} forbids that: drop one of the two")
    if config.use_amp and not has_bf16(gpu := get_gpu(device.type)):
        raise UsageError(f"--use-amp needs bf16, which {gpu.arch} does not have: drop --use-amp")
    if config.fp8:
        companion("fp8", "--fp8").validate(config, device, select_operations(config, device)[0])
    own_tiles(device.type)
    if INTERPRETED and device.type == "cuda" and config.impl == "triton":
        raise UsageError("TRITON_INTERPRET=1 runs the kernels on the CPU: unset it, or give --device cpu")


def load_weights(model, config):
    """Copy the weights of the folder of --init-from or --resume into a model; UsageError if they are of another."""
    flag = "--resume" if config.resume else "--init-from"
    folder, named = config.resume or config.init_from, dict(model.named_parameters())
    checkpoint = companion("checkpoint", flag)
    for name, value in checkpoint.model_fields(folder, flag).items():
        if getattr(config, name) != value:
            differing = f"{name} {value}, and the Config {getattr(config, name)}"
            raise UsageError(f"{flag} {folder} has {differing}: give it the sizes of the model")
    for name, weight in checkpoint.read_weights(folder, list(named), flag).items():
        named[name].data.copy_(weight)


def read_training(config):
    """Return (steps done, {name: tensor} of the optimizer) of --resume, or (0, None); UsageError if none is left."""
    if config.resume is None:
        return 0, None
    done, tensors = companion("checkpoint", "--resume").read_training(config.resume, "--resume")
    if done >= config.num_steps:
        raise UsageError(f"--num-steps {config.num_steps}: --resume {config.resume} has done {done}, so give more")
    return done, tensors


def resume(step, tensors):
    """Give the optimizer of a step the tensors of a folder, {"exp_avg.<parameter>": tensor, ...}."""
    names = [name for name, _ in step.model.named_parameters()]
    kinds = [kind for kind, _ in step.optimizer.each_state()]
    missing = [f"{kind}.{name}" for kind in kinds for name in names if f"{kind}.{name}" not in tensors]
    if missing:  # of the other kind of optimizer
        where = f"--resume {step.config.resume}: training.safetensors has no {missing[0]}"
        raise UsageError(f"{where}: give the --impl it was trained with, or --init-from for its weights alone")
    step.world.load_state(step.optimizer, {kind: [tensors[f"{kind}.{name}"] for name in names] for kind in kinds})


def save_model(step, number):
    """Write the weights after so many steps, and what a run needs to go on, to --save; all processes must call it."""
    names = [name for name, _ in step.model.named_parameters()]
    # One by one to the host, as the device may not have room for all.
    weights = [(name, weight.cpu()) for name, weight in zip(names, step.optimizer.each_weight(), strict=True)]
    tensors = {
        f"{kind}.{name}": tensor.cpu()
        for kind, of_parameters in step.optimizer.each_state()
        for name, tensor in zip(names, of_parameters, strict=True)
    }
    if step.world.rank == 0:
        companion("checkpoint", "--save").write(step.config.save, step.config, weights, number, tensors)


def keep_model(step, number, diverged, is_whole):
    """Save a model after so many steps, and say where it is; is_whole: unless the last was cut short.

    Return a UsageError if the folder has no room by now, else None.
    """
    folder = step.config.save
    if not is_whole or diverged and step.config.resume is not None:
        reason = "the run diverged" if is_whole else "a second signal has cut a step short"
        print(f"Not saved, as {reason}: {folder} stays as it was")
        return None
    try:
        save_model(step, number)
    except UsageError as error:  # that names another place, if there is one
        return error
    broken = ", but it diverged, and its weights are of no use" if diverged else ""
    print(f"\nModel after {number} step{'s' * (number > 1)}: {folder}{broken}", flush=True)


def print_configuration(step):
    """Print what runs where, read from the objects in use."""
    config, device, gpu = step.config, step.device, get_gpu(step.device.type)
    versions = dict(PyTorch=torch.__version__, HIP=torch.version.hip, CUDA=torch.version.cuda)
    software = [f"{name} {version}" for name, version in versions.items() if version]
    software += [f"Triton {triton.__version__}" if triton else "no Triton"]
    processes = f" on each of {step.world.size} processes" if step.world.size > 1 else ""
    micro_batches = f"{config.accumulate} micro-batches a step, each a " if config.accumulate > 1 else ""
    done = f" of which {step.first} are done" if step.first else ""
    reason = triton_obstacle(device, config.use_amp) if config.impl == "triton" else None
    print(
        f"Device: {gpu.name} ({gpu.arch}); {', '.join(software)}\n"
        f"Model: hidden {config.hidden_dim}, {config.num_layers} layers, {config.num_heads} heads "
        f"({config.num_kv_heads} of K and V), ffn {config.ffn_dim}, vocab {config.vocab_size}: "
        f"{'untied head, ' if config.untied_head else ''}{count_weights(step.model.parameters()):,} parameters\n"
        f"Training: {micro_batches}batch {config.batch_size} x {config.seq_len} tokens{processes}, "
        f"{config.num_steps} steps{done}, "
        f"{precision_name(config, device)}, {config.data} data, seed {config.seed}\n"
        f"Implementation: {step.implementation}" + (f" (not triton: {reason})" if reason else "")
    )
    in_use = operation_names(step.model)
    in_use |= {"layers": type(step.model.layers).__name__, "optimizer": type(step.optimizer).__name__}
    for name, operation in in_use.items():
        print(f"    {name:13} {operation}")
    if own_tiles(device.type) and step.implementation == "triton":
        print(companion("tiles").describe(device.type))
    notes = companion("notes")
    for line in notes.inert_flags(step) if notes else ():
        print(f"Note: {line}")
    if step.implementation == "triton" and companion("groups") is None:
        print(
            "Note: tiny_llama/groups.py is missing: layers are computed one by one, which takes longer in small models"
        )
    print("Mistakes brought back: " + ", ".join(map(flag_of, config.bugs)) + "\n" if config.bugs else "", flush=True)


def operation_names(model):
    """Return {operation: the name of the function that the model calls}, and what computes several layers at a time."""
    names = {name: getattr(call, "func", call).__name__ for name, call in model.operations._asdict().items()}
    return names | ({"group": "LayerGroup"} if hasattr(model.layers, "groups") else {})


def warm_up(step):
    """Run the warm-up steps, restore the initial weights, capture if asked to. Return the seconds it took."""
    config, start = step.config, time.perf_counter()
    data = step.world.batches(dataclasses.replace(config, seed=(config.seed + 1) % 2**32))

    def warm_up_once(number):
        step.load(*next(data))
        step.run()
        step.synchronize()
        print(f"warm-up {number}/{config.warmup_steps} | {time.perf_counter() - start:.1f} s", flush=True)

    step.synchronize()  # another stream would not wait for the initial weights
    make_ready(step, warm_up_once, config.warmup_steps, config.graph, one_graph=config.timing == "step")
    step.synchronize()
    return time.perf_counter() - start


def make_ready(step, warm_up_once, count, graph, one_graph):
    """Call warm_up_once(1) to warm_up_once(count), return to the initial weights, and capture the step if asked to."""
    # What is captured must have been warmed up on another stream than the default one.
    with torch.cuda.stream(torch.cuda.Stream()) if graph else contextlib.nullcontext():
        for number in range(1, count + 1):
            warm_up_once(number)
    if count:
        step.restart()
    if step.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if graph:
        step.capture(one_graph=one_graph)


@functools.cache
def companion(name, needed_for=None):
    """Import tiny_llama/<name>.py. If it is missing, return None or raise UsageError about what it is needed for."""
    # A companion imports this script by its name. As a program it is called __main__, and would be loaded again.
    sys.modules.setdefault("tiny_llama_v3", sys.modules[__name__])
    # Python does not always look into the script's own folder: not with PYTHONSAFEPATH, nor started by a profiler.
    folder = str(Path(__file__).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        return importlib.import_module(f"tiny_llama.{name}")
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] != "tiny_llama":
            raise
        if needed_for is None:
            return None
        raise UsageError(f"{needed_for} needs tiny_llama/{name}.py: copy tiny_llama/ beside the script") from error


def writable_folder(flag, name):
    """Make a folder where it is missing, and return it as a Path; UsageError if no file can be written there."""
    if not str(name):
        raise UsageError(f"{flag} '' names no folder: give one")
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
        # Only a written file shows that there is room: quotas, network and read-only file systems refuse late.
        with tempfile.NamedTemporaryFile(dir=name, prefix=".", suffix=".tmp") as file:
            file.write(b" ")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        reason = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise UsageError(f"{flag} {name} cannot be written to ({reason}): give another folder") from error
    return Path(name)


def write_new_json(folder, stem, result):
    """Write stem.json (or stem_1.json, ...) atomically, never overwriting a file. Return its path."""
    result = json.loads(json.dumps(result), parse_constant=lambda name: None)  # JSON has no NaN: it becomes null
    endings = itertools.chain([""], map("_{}".format, itertools.count(1)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Written under a hidden name in the same folder, and then linked to its own: readers see a whole file or none.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".", suffix=".tmp") as private:
            scratch = Path(private, "result.json")
            scratch.write_text(json.dumps(result, indent=1) + "\n")
            for path in (folder / f"{stem}{ending}.json" for ending in endings):
                try:
                    os.link(scratch, path)  # over no other file, unlike os.replace()
                except OSError:  # also where there are no hard links
                    if os.path.lexists(path):
                        continue
                    os.replace(scratch, path)
                return path
    except OSError as error:
        raise UsageError(f"{folder} cannot be written to ({error.strerror}): free space or give another") from error


def keep_json(folder, stem, result):
    """Write a result as write_new_json() does. If the folder is full by now, UsageError names another that has it."""
    try:
        return write_new_json(folder, stem, result)
    except UsageError as error:
        try:
            path = write_new_json(Path(tempfile.gettempdir()), stem, result)
        except (UsageError, OSError):  # that one is full as well
            raise error from None
        raise UsageError(f"{error}; the result of this run is {path}") from error


def set_precision(config):
    """Tell PyTorch how to multiply in fp32, and whether to be deterministic."""
    torch.set_float32_matmul_precision(config.matmul_precision)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the library is loaded
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # our kernels write all that they allocate


def train_and_report(config, world=None):
    """Do what the configuration asks for, from the check to the profile. Return the exit code."""
    world = world or OneProcess()
    device, hardware = world.find_device(config), companion("hardware")
    profiler = companion("profiler", None if config.profile is None else "--profile")
    if hardware:
        hardware.require_host_memory(config, device)
        hardware.require_gpu_memory(config, device)
    output_folder = writable_folder("--output-dir", config.output_dir)
    profile_folder = None if config.profile is None else writable_folder("--profile", config.profile)
    if config.save is not None:
        companion("checkpoint", "--save").require_free(config.save, "--save", config.resume)
    done, tensors = read_training(config)
    set_precision(config)
    # The check runs eagerly on few sequences: kernels, sizes and precision are those of the run.
    few = {name: min(getattr(config, name), CHECK_BATCH) for name in ("batch_size", "accumulate")}
    small = dataclasses.replace(config, **few, compile=False, graph=False)
    if config.check and not world.check(small, device):
        return 1
    gc.collect()  # frees the models of the check, whose Functions and gradients refer to each other
    step = TrainStep(config, device, world)
    step.first = done
    # From here on a run can be interrupted, and what it has measured is reported.
    data = itertools.islice(world.batches(config), done, None)  # after the batches of the steps that are done
    records, exit_code, is_whole = [], 0, True
    print_configuration(step)
    gpu_state = hardware.gpu_state if hardware else lambda device: {"power_w": None}
    gpu = {"idle": gpu_state(device)}
    try:
        warmup_seconds = warm_up(step)
        if tensors:
            resume(step, tensors)
        if profiler and profiler.attached_profiler():
            profiler.show_ranges(step)
        meter = hardware and hardware.meter_energy(device)
        train(step, data, records)
    except KeyboardInterrupt as error:
        if not records:
            raise
        print(f"\nInterrupted after {done + len(records)} of {config.num_steps} steps.")
        exit_code = 130
        if not isinstance(error, Stopped):
            step.run()  # of the one that was cut short, some weights have no gradient, and summarize() counts them
            is_whole = False
    must_save, unsaved = config.save is not None, None
    with world.deferring_signals(must_save):
        # Both immediately after the measured steps.
        energy = meter and meter(dataclasses.replace(config, num_steps=config.num_steps - done), len(records))
        gpu["busy"] = gpu_state(device)
        summary = summarize(step, records) | {"warmup_seconds": warmup_seconds, "gpu": gpu, "energy": energy}
        exit_code = exit_code or (1 if summary["diverged"] else 0)
        if must_save:
            unsaved = keep_model(step, done + len(records), summary["diverged"], is_whole)
            exit_code = exit_code or (130 if world.must_stop() else 0)
    if summary["entropy"] is None and not exit_code:  # of a file
        try:
            summary |= companion("data").evaluate(step)
        except KeyboardInterrupt:  # the steps count
            exit_code = 130
        except UsageError as error:  # and so they do if the text has gone; several processes end together
            if world.size > 1:
                raise
            print(f"Note: there is no held-out loss: {error}")
            exit_code = error.exit_code
    summary["kernels"] = "the run ended early" if exit_code else "tiny_llama/profiler.py is missing"
    if profiler and not exit_code:
        summary["kernels"] = profiler.count_kernels(step, summary["batch_ms"]["p50"])
    print_summary(step, summary)
    summary["world"] = world.report(summary)
    result = dict(
        implementation=step.implementation,
        precision=precision_name(config, device),
        operations=operation_names(step.model),
        config=dataclasses.asdict(step.config),
        environment=hardware and hardware.environment(device),
        summary=summary,
        steps=[record._asdict() for record in records],
    )
    if world.rank == 0:
        stem = f"tiny_llama_v3_{step.implementation}_{time.strftime('%Y%m%d_%H%M%S')}"
        print(f"Results: {keep_json(output_folder, stem, result)}")
    if unsaved:
        raise unsaved
    if profile_folder and not exit_code:
        profiler.write_profile(step, profile_folder)
    return exit_code


def run_command(argv, program):
    """Run a command line, as one of several processes where torchrun has started them. Return the exit code."""
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1":
        return companion("distributed", f"WORLD_SIZE={processes}").main(argv, program)
    config, hardware = parse_config(argv, program), companion("hardware")
    return hardware.remedied(config, train_and_report) if hardware else train_and_report(config)


def main(argv=None, program=None):
    """Run a command line and return the exit code. What ends the run early takes one line, and no traceback."""
    argv, program = sys.argv[1:] if argv is None else argv, program or sys.argv[0]
    with contextlib.suppress(AttributeError, OSError):  # where tests have put another file in its place
        sys.stdout.reconfigure(errors="backslashreplace")  # prints a name that the locale cannot
    try:
        try:
            return run_command(argv, program)
        finally:
            print(end="", flush=True)  # a closed pipe raises here, and not in the interpreter's last flush
    except KeyboardInterrupt:
        reason, exit_code = "interrupted", 130
    except UsageError as error:
        reason, exit_code = f"error: {error}", 2
    except OSError as error:
        reason, exit_code = output_is_closed(error)
    if reason:
        print(f"{Path(program).name}: {reason}", file=sys.stderr, flush=True)
    return exit_code


def output_is_closed(error):
    """Return (what to say, exit code) of the error of an output that takes no more; raise any other."""
    if error.errno not in (errno.EPIPE, errno.ENOSPC):
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's last flush
    return (None, 141) if error.errno == errno.EPIPE else (f"error: {error}", 2)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    exit_code = main()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # there is nothing left to interrupt
    sys.exit(exit_code)
