"""What the processes of test_distributed.py run: python -m torch.distributed.run ... together.py FUNCTION ARGUMENTS."""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tiny_llama_v3 as llama  # noqa: E402

CONFIG = llama.Config(
    hidden_dim=16, num_layers=4, num_heads=2, num_kv_heads=1, ffn_dim=24, vocab_size=11, batch_size=2, seq_len=8,
    num_steps=40, warmup_steps=1, learning_rate=4e-3, data="markov", comm_timeout=60,
)  # fmt: skip
RUNS = {  # of CONFIG
    "sharded": {},
    "again": {},
    "one window": dict(timing="step"),
    "ddp": dict(impl="sdpa"),
    "full": dict(impl="sdpa", shard="full"),
    "kernels": dict(num_layers=2, num_steps=2, warmup_steps=0),
}
GPU_CONFIG = dataclasses.replace(
    CONFIG, device="cuda", hidden_dim=128, vocab_size=500, seq_len=64, num_steps=10, learning_rate=1e-3
)
GPU_RUNS = {
    "sharded": {},
    "again": {},
    "three graphs": dict(graph=True, warmup_steps=2),
    "one graph": dict(graph=True, warmup_steps=2, timing="step"),
    "ddp": dict(impl="sdpa"),
    "full": dict(impl="sdpa", shard="full"),
}


def train(config, world=llama.ALONE):
    """What is to be compared of a whole run."""
    device = llama.select_device(config.device, world.local_rank)
    step, records = llama.TrainStep(config, device, world), []
    llama.warm_up(step, config, device, world)
    llama.train(step, llama.DATA[config.data](config, world), config, device, records, world)
    weights = step.optimizer.weights() if step.implementation == "triton" else step.model.parameters()
    state = getattr(step.optimizer, "exp_avg", None)
    return {
        "losses": [record.loss for record in records],
        "norms": [record.grad_norm for record in records],
        "weights": [llama.whole(weight.detach()).cpu().clone() for weight in weights],
        "state": None if state is None else state.numel(),
        "sizes": [p.numel() for p in step.model.parameters()],
    }


def join(config):
    world = llama.launched()
    world.join(config, llama.select_device(config.device, world.local_rank))
    return world


def trainings(folder):
    """Each of RUNS; all but the last multiply in PyTorch, so that Triton's interpreter has AdamW only."""
    world = join(CONFIG)
    kernels = llama.OPERATIONS["triton"]
    for name, changes in RUNS.items():
        llama.OPERATIONS["triton"] = kernels if name == "kernels" else llama.OPERATIONS["torch"]
        results = train(dataclasses.replace(CONFIG, **changes), world)
        torch.save(results, Path(folder, f"{name} {world.rank}.pt"))
    world.leave()


def gpu_trainings(folder):
    """Each of GPU_RUNS, in fp32 and bf16."""
    world = join(GPU_CONFIG)
    for use_amp in (False, True):
        for name, changes in GPU_RUNS.items():
            results = train(dataclasses.replace(GPU_CONFIG, use_amp=use_amp, **changes), world)
            torch.save(results, Path(folder, f"{name} {use_amp} {world.rank}.pt"))
    world.leave()


def checks(folder):
    """{what is wrong: the outcome of the check}, on each process; what it prints goes to a file."""
    world = join(CONFIG)
    config = dataclasses.replace(CONFIG, num_layers=1, impl="sdpa")
    device = llama.select_device("cpu")
    correct, reduce = llama.OPERATIONS["sdpa"], llama.reduce_scatter
    wrong = correct._replace(linear=lambda x, weight: 1.001 * correct.linear(x, weight))
    llama.OPERATIONS["triton"] = llama.OPERATIONS["torch"]
    sys.stdout = open(Path(folder, f"out {world.rank}"), "w")
    outcomes = {"nothing": llama.check_gradients(config, device, world)}
    llama.OPERATIONS["sdpa"] = wrong if world.rank == 1 else correct
    outcomes["an operation on rank 1"] = llama.check_gradients(config, device, world)
    sharded = dataclasses.replace(config, impl="triton")
    outcomes["nothing, sharded"] = llama.check_gradients(sharded, device, world)
    llama.reduce_scatter = lambda own, everything, async_op: reduce(own, 1.001 * everything, async_op=async_op)
    outcomes["the reduction"] = llama.check_gradients(sharded, device, world)
    sys.stdout.close()
    Path(folder, f"outcomes {world.rank}.json").write_text(json.dumps(outcomes))
    world.leave()


def script(folder, *arguments):
    """The script itself, after a file with this process's number has appeared in the folder."""
    rank = os.environ["RANK"]
    Path(folder, rank).write_text(str(os.getpid()))
    sys.exit(run_script(arguments))


def script_of_another_mind(folder, *arguments):
    """As script, but rank 1 has flags of its own."""
    if os.environ["RANK"] == "1":
        arguments += ("--seq-len", "9", "--seed", "1")
    sys.exit(run_script(arguments))


def script_out_of_memory(folder, *arguments):
    """As script, but the second step of rank 1 does not fit."""
    calls, forward = [], llama.TrainStep.forward

    def too_large(step):
        calls.append(step)
        if os.environ["RANK"] == "1" and len(calls) == 4:
            time.sleep(0.5)  # what the others do meanwhile
            raise torch.OutOfMemoryError
        forward(step)

    llama.TrainStep.forward = too_large
    sys.exit(run_script(arguments))


def run_script(arguments):
    """As `python tiny_llama_v3.py` does."""
    sys.argv = ["tiny_llama_v3.py", *arguments]
    return llama.run_as_program()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
