"""What the processes of test_distributed.py run: torchrun ... distributed_program.py FUNCTION ARGUMENTS."""

import contextlib
import dataclasses
import functools
import json
import os
import signal
import sys
import threading
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tiny_llama_v3 as llama  # noqa: E402
from tests.core.tiny import run_of, without_groups  # noqa: E402
from tiny_llama import distributed  # noqa: E402

CONFIG = llama.Config(
    hidden_dim=16,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    ffn_dim=24,
    vocab_size=11,
    batch_size=2,
    seq_len=8,
    num_steps=4,
    warmup_steps=1,
    learning_rate=1e-2,
    data="markov",
    comm_timeout=60,
)
MICRO_BATCHES = dict(batch_size=1, accumulate=2, clip=0.5, schedule="cosine", warmup_fraction=0.3)
RUNS = {  # of CONFIG
    "sharded": {},
    "one window": dict(timing="step", warmup_steps=0),
    "untied": dict(untied_head=True, warmup_steps=0),
    "frozen": dict(batch_size=1, seq_len=4),
    "ddp": dict(impl="sdpa"),
    "full": dict(impl="sdpa", shard="full"),
    "kernels": dict(batch_size=1, seq_len=4, num_steps=2, warmup_steps=0),
    "micro-batches": MICRO_BATCHES,
    "ddp, micro-batches": MICRO_BATCHES | dict(impl="sdpa"),
    "full, micro-batches": MICRO_BATCHES | dict(impl="sdpa", shard="full"),
}
INTERPRETED = "frozen", "kernels"
ON_GPUS = torch.cuda.device_count() > 1
if ON_GPUS:
    CONFIG = dataclasses.replace(CONFIG, hidden_dim=128, vocab_size=500, seq_len=64, num_steps=10, learning_rate=1e-3)
    RUNS |= {
        "bf16": dict(use_amp=True),
        "graphs": dict(graph=True, warmup_steps=2),
        "one graph": dict(graph=True, warmup_steps=2, timing="step"),
        "graphs, micro-batches": MICRO_BATCHES | dict(graph=True, warmup_steps=2),
    }


@contextlib.contextmanager
def operations_of(name):
    """Have one of RUNS compute its layers one by one and in PyTorch, unless Triton's interpreter is to do more of it
    than AdamW.
    """
    if ON_GPUS or name in INTERPRETED:
        yield
        return
    with mock.patch.dict(llama.OPERATIONS, triton=llama.OPERATIONS["torch"]), without_groups():
        yield


class PartlyFrozen(llama.TrainStep):
    """A TrainStep with parts of its model frozen, others in each step."""

    loads = 0

    def load(self, tokens, targets):
        super().load(tokens, targets)
        self.loads += 1
        frozen = f"layers.{self.loads % 4}.", *["embed_tokens."] * (self.loads % 3 == 0)
        self.freeze(*(name for name, _ in self.model.named_parameters() if name.startswith(frozen)))


def train(config, world=None, frozen=False):
    """Return what is to be compared of a whole run."""
    device = (world or llama).select_device(config.device)
    step, records = run_of(config, device, PartlyFrozen if frozen else llama.TrainStep, world)
    return {
        "losses": [record.loss for record in records],
        "norms": [record.grad_norm for record in records],
        "weights": [weight.cpu() for weight in step.state_dict().values()],
        "state": len(getattr(step.optimizer, "exp_avg", ())),
    }


def join(config):
    """Return the World of this process, connected to the others."""
    world = distributed.launched()
    world.find()
    world.join(world.select_device(config.device), config.comm_timeout)
    return world


def trainings(folder):
    """Train each of RUNS, and try checks and weights; one start of the processes for all."""
    world = join(CONFIG)
    for name, changes in RUNS.items():
        with operations_of(name):
            results = train(dataclasses.replace(CONFIG, **changes), world, name == "frozen")
        torch.save(results, Path(folder, f"{name} {world.rank}.pt"))
    with operations_of("checks"):
        outcomes = checks(world) | {"weights come back": restores_weights(world)}
    Path(folder, f"outcomes {world.rank}.json").write_text(json.dumps(outcomes))
    world.leave()


def restores_weights(world):
    """Return whether weights that the processes share in halves, in bf16 and remainders, come back as they were.

    The boundary of the halves lies within a weight, of which each process has several blocks.
    """
    config = dataclasses.replace(CONFIG, hidden_dim=64, ffn_dim=llama.ADAMW_BLOCK // 8)
    model = llama.TinyLlamaTriton(config, llama.OPERATIONS["torch"]).to(world.select_device(config.device).type)
    given = [torch.randn_like(p) for p in model.parameters()]
    optimizer = distributed.ShardedAdamW(1e-3, low_precision=True, world=world)
    optimizer.own(model)
    optimizer.reset(given)
    return all(map(torch.equal, optimizer.weights(), given))


def checks(world):
    """Return {what is wrong: the outcome of the check}."""
    config = dataclasses.replace(CONFIG, num_layers=1, impl="sdpa")
    sharded = dataclasses.replace(config, impl="triton", batch_size=1, accumulate=2)
    correct, reduce = llama.OPERATIONS["sdpa"], distributed.reduce_scatter
    wrong = correct._replace(linear=lambda x, weight: 1.001 * correct.linear(x, weight))
    check = functools.partial(world.check, device=world.select_device(config.device))
    outcomes = {"nothing": check(config)}
    llama.OPERATIONS["sdpa"] = wrong if world.rank == 1 else correct
    outcomes |= {"an operation on rank 1": check(config), "nothing, sharded": check(sharded)}
    distributed.reduce_scatter = lambda own, all, async_op: reduce(own, 1.001 * all, async_op=async_op)
    return outcomes | {"the reduction": check(sharded)}


def script(folder, *arguments):
    """Run the script; a file called by the rank has this process's number."""
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    run_script(arguments)


def script_stopped(folder, *arguments):
    """Run the script, and stop it after a second."""
    threading.Timer(1, os.kill, [os.getpid(), signal.SIGTERM]).start()
    run_script(arguments)


def script_of_another_mind(folder, *arguments):
    """Run the script, with flags of its own on rank 1."""
    run_script(arguments + ("--seq-len", "9", "--seed", "1") * (os.environ["RANK"] == "1"))


def script_out_of_memory(folder, *arguments):
    """Run the script, whose steps do not fit on rank 1."""
    if os.environ["RANK"] == "1":
        llama.TrainStep.forward = mock.Mock(side_effect=torch.OutOfMemoryError)
    run_script(arguments)


def script_lost_once(folder, *arguments):
    """Run the script, whose rank 1 is killed after a step of torchrun's first attempt."""
    step = llama.TrainStep.optimizer_step

    def last_step(self):
        step(self)
        os.kill(os.getpid(), signal.SIGKILL)

    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        llama.TrainStep.optimizer_step = last_step
    run_script(arguments)


def run_script(arguments):
    """Do as `python tiny_llama_v3.py` does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(llama.main(arguments, "tiny_llama_v3.py"))


if __name__ == "__main__":
    distributed.FEWEST_ELEMENTS = 0  # small models then send several messages
    globals()[sys.argv[1]](*sys.argv[2:])
