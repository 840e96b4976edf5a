"""Checkpoints: replaced as a whole, loaded without running code from them, and read by nanoGPT as well."""

from pathlib import Path

import torch

from measure.command_line import UsageError, replacing
from nanogpt_triton.dataset import GPT2_VOCAB, reading
from nanogpt_triton.model import GPTConfig
from tiny_llama_v3 import cdiv

NAME = "ckpt.pt"
INTERRUPTED = "ckpt_interrupted.pt"  # the state at a signal, where ckpt.pt is that of the best validation loss


def save(path, state):
    """Write a checkpoint. Whenever the process dies, there is a complete one under this name."""
    with replacing(path) as partial, open(partial, "wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # behind which PyTorch hides the system's, such as a full disk
            raise (error.__context__ or error) from error


def find(folder, newest):
    """Return the path of a folder's checkpoint: the newest, to resume, or else that of the best validation loss."""
    for name in (INTERRUPTED, NAME) if newest else (NAME, INTERRUPTED):
        path = Path(folder, name)
        if path.is_file():  # and no FIFO
            return path
    raise UsageError(f"out_dir={folder}: there is no {NAME} in it: train first, or name the folder with --out_dir")


def load(path):
    """Return a checkpoint of ours or of nanoGPT, with its tensors on the CPU."""
    with reading(path, "give another out_dir"):
        # weights_only refuses a pickle that names functions, which could run code.
        state = torch.load(path, map_location="cpu", weights_only=True)
        # torch.compile's wrapper adds a prefix, and an old nanoGPT kept the causal mask as a buffer.
        state["model"] = {
            name.removeprefix("_orig_mod."): tensor
            for name, tensor in state["model"].items()
            if not name.endswith(".attn.bias")
        }
        state["model_args"] = GPTConfig(**state["model_args"])
        return state


def texts_of(state):
    """Return the texts of the tokens that a checkpoint of ours was made for; None for GPT-2's byte pairs."""
    texts = state["meta"].get("characters")
    return texts and list(texts)  # a string before tokens could be words


def check_tokens(state, texts):
    """Raise UsageError if weights were made for other tokens than those of a dataset; None: GPT-2's byte pairs."""
    vocab_size, count = state["model_args"].vocab_size, len(texts) if texts else GPT2_VOCAB
    # The vocabulary may be padded to a multiple of 64. nanoGPT's checkpoints do not say which tokens it is of.
    fits = vocab_size in (count, cdiv(count, 64) * 64)
    if not fits or "meta" in state and texts_of(state) != texts:
        raise UsageError("the weights were made for other tokens: give their dataset, and --data_dir if it was moved")
