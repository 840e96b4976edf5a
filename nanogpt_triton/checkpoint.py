"""Checkpoints: written whole or not at all, loaded without running code from them."""

import os
from pathlib import Path

import torch

from nanogpt_triton.configurator import UsageError

NAME = "ckpt.pt"
INTERRUPTED = "ckpt_interrupted.pt"  # the state at a signal, where ckpt.pt is kept for the best validation loss


def save(path, state):
    """Replaces path at the last moment: whenever the process dies, there is a good file under that name."""
    partial = path.with_name(f".{path.name}.tmp")
    try:
        with open(partial, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written ({error.strerror or error}); an older one is untouched") from error
    except RuntimeError as error:  # torch.save on a full disk
        partial.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written ({error}); an older one is untouched") from error


def find(folder, newest):
    """The checkpoint of a folder: the newest for resuming, otherwise rather the one of the best validation loss."""
    names = (INTERRUPTED, NAME) if newest else (NAME, INTERRUPTED)
    for name in names:
        if (Path(folder) / name).exists():
            return Path(folder) / name
    raise UsageError(f"out_dir={folder}: there is no {NAME} in it: train first, or name the folder with --out_dir")


def load(path):
    """The state, with its tensors on the CPU."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        # nanoGPT's: what torch.compile wrapped has a prefix, and an old version kept the causal mask as a buffer.
        state["model"] = {
            name.removeprefix("_orig_mod."): tensor
            for name, tensor in state["model"].items()
            if not name.endswith(".attn.bias")
        }
        state["model_args"], state["iter_num"]
        return state
    except Exception as error:  # a damaged file leads anywhere
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"{path} is not a checkpoint that can be loaded ({reason})") from error
