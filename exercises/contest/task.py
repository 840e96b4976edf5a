"""What an entry gets and saves, and the divisions. The judge calls train(folder) in a process of its own.

PyTorch and ours are imported only where they are used: an import takes seconds, which the entry pays for.
"""

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

LENGTH = 64  # tokens that a sequence predicts
ENTRY, SEQUENCES, FIELDS = "entry.py", "sequences.npy", "task.json"  # what the judge writes into the folder


class Division(NamedTuple):
    """The size of a contest."""

    vocab_size: int
    seconds: int  # at most for a seed
    target: float  # loss in nats per token; the source itself has 1.213
    parameters: int  # at most
    sequences: int  # to train on


# Each pair of tokens has its own four successors, so vocab_size squared is what there is to learn. The laptop's target
# takes our entry about a third of the seconds on two cores. A large card of today needs few of its seconds, so that
# older ones have enough. The small division has not been measured on a card of its own.
DIVISIONS = {
    "laptop": Division(vocab_size=16, seconds=120, target=1.40, parameters=2_000_000, sequences=2**16),
    "small": Division(vocab_size=128, seconds=300, target=1.40, parameters=32_000_000, sequences=2**19),
    "large": Division(vocab_size=256, seconds=300, target=1.40, parameters=128_000_000, sequences=2**20),
}


class Task(NamedTuple):
    """What the train() of an entry gets."""

    folder: Path  # a new one, where the entry may write what it likes
    sequences: np.ndarray  # (division's sequences, LENGTH + 1) tokens as uint8
    division: str
    limits: Division
    device: str  # "cpu" or "cuda"
    seed: int  # of the weights, if the entry draws them
    deadline: float  # of time.monotonic()

    def seconds_left(self):
        """Return the seconds until the judge ends this process."""
        return self.deadline - time.monotonic()

    def batches(self, size):
        """Yield (tokens, targets) of random sequences, both int64 (size, LENGTH) on the device, for ever."""
        import torch

        sequences = torch.from_numpy(self.sequences).to(self.device)
        while True:
            batch = sequences[torch.randint(len(sequences), (size,), device=self.device)].long()
            yield batch[:, :-1], batch[:, 1:]

    def save(self, config, weights):
        """Save a LLaMA: a Config of tiny_llama_v3, and {name: tensor} of its weights as in TrainStep.state_dict()."""
        from tiny_llama import checkpoint

        on_host = ((name, weight.detach().float().cpu()) for name, weight in weights.items())
        checkpoint.write(self.folder / "model", config, on_host, 0, {})


def read(folder):
    """Return the Task in a folder."""
    fields = json.loads((folder / FIELDS).read_text())
    sequences = np.load(folder / SEQUENCES)
    return Task(folder, sequences, limits=DIVISIONS[fields["division"]], **fields)


def train(folder):
    """Call the train() of the entry in a folder."""
    spec = importlib.util.spec_from_file_location("entry", folder / ENTRY)
    entry = importlib.util.module_from_spec(spec)
    sys.modules["entry"] = entry  # where Triton and pickle look for what it defines
    spec.loader.exec_module(entry)
    entry.train(read(folder))
