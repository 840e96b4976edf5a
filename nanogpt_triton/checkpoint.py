"""Checkpoints: written whole or not at all, checked before they are used, loaded without running code from them."""

import contextlib
import dataclasses
import os
import secrets
import zipfile
from pathlib import Path

import torch

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from nanogpt_triton.dataset import DATA, Characters, check_description, describe, description, fits, read_meta
from nanogpt_triton.model import GPTConfig
from tiny_llama_v3 import UsageError

NAME = "ckpt.pt"
INTERRUPTED = "ckpt_interrupted.pt"  # the state at a signal, where ckpt.pt is kept for the best validation loss
LOCK = ".lock"

# What nanoGPT's checkpoints hold too, and what only ours do.
REQUIRED = {"model": dict, "model_args": dict, "iter_num": int}
OPTIONAL = {"optimizer": dict, "config": dict, "meta": dict, "scaler": dict, "position": int, "rng": list}


@contextlib.contextmanager
def claimed(folder):
    """Makes the folder and keeps other runs from training into it. Reading needs no claim.

    The kernel gives the lock back however the process ends; the file that carries it stays.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "a")  # noqa: SIM115
    except OSError as error:
        raise UsageError(f"out_dir={folder} cannot be made or written to ({error.strerror})") from error
    with file:
        if lock(file, folder):
            for name in (NAME, INTERRUPTED):
                for leftover in folder.glob(f".{name}.{'[0-9a-f]' * 8}.tmp"):  # of a writer that was killed
                    leftover.unlink(missing_ok=True)
        yield


def lock(file, folder):
    """False where the system or the file system has no locks: then nobody looks after two runs in one folder."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"out_dir={folder}: another run trains into it: wait for its end, or give another") from None
    except OSError:
        return False
    return True


def save(path, state):
    """Replaces path at the last moment: whenever the process dies, there is a good file under that name."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    torch.serialization.set_crc32_options(True)  # what check_sums compares
    try:
        with open(partial, "xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:  # RuntimeError: torch.save on a full disk
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UsageError(f"{path} cannot be written ({reason}); an older one is untouched") from error
    finally:
        partial.unlink(missing_ok=True)


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
        with open(path, "rb") as file:  # opened once: what is checked is what is loaded, also if a run replaces it
            check_sums(file)
            file.seek(0)
            state = torch.load(file, map_location="cpu", weights_only=True)
        check_types(state, REQUIRED | {name: kind for name, kind in OPTIONAL.items() if name in state})
        state["model_args"] = model_args(state["model_args"])
        if "meta" in state:
            check_description(state["meta"])
            if not fits(state["meta"], state["model_args"]["vocab_size"]):
                raise ValueError("its meta has another vocab_size than its model_args")
        # nanoGPT's: what torch.compile wrapped has a prefix, and an old version kept the causal mask as a buffer.
        state["model"] = {
            name.removeprefix("_orig_mod."): tensor
            for name, tensor in state["model"].items()
            if not name.endswith(".attn.bias")
        }
        return state
    except Exception as error:  # a damaged file leads anywhere
        reason = describe(error).splitlines()[0]
        raise UsageError(f"{path} is not a checkpoint that can be loaded ({reason})") from error


def check_sums(file):
    """torch.save writes a zip file with a checksum of each part, which torch.load does not compare."""
    with zipfile.ZipFile(file) as parts:
        if not any(part.CRC for part in parts.infolist()):
            raise ValueError("it was saved without checksums, after torch.serialization.set_crc32_options(False)")
        damaged = parts.testzip()
    if damaged:
        raise ValueError(f"its part {damaged} is damaged: the checksum differs")


def check_types(state, types):
    for name, kind in types.items():
        if name not in state:
            raise ValueError(f"it has no {name}")
        if not isinstance(state[name], kind) or kind is int and isinstance(state[name], bool):
            raise ValueError(f"its {name} is a {type(state[name]).__name__}, not a {kind.__name__}")
        if kind is int and state[name] < 0:
            raise ValueError(f"its {name} is {state[name]}")


def model_args(given):
    """The fields of GPTConfig, in which all but dropout decide what the weights mean."""
    fields = {field.name: field.type for field in dataclasses.fields(GPTConfig) if field.name != "dropout"}
    check_types(given, fields)
    if not all(given[name] for name, kind in fields.items() if kind is int):
        raise ValueError(f"its model_args {given} hold a zero")
    return {name: given[name] for name in fields}


def check_data(state, dataset, data_dir, meta):
    """UsageError if the weights are of other tokens than the data."""
    vocab_size, remedy = state["model_args"]["vocab_size"], "give the dataset that they were made with"
    if not fits(meta, vocab_size):
        tokens = f"{meta['vocab_size']} tokens, and the weights are for {vocab_size}"
        raise UsageError(f"dataset={dataset} has {tokens}: {remedy}")
    if "meta" in state:
        if state["meta"] != description(meta):
            raise UsageError(f"dataset={dataset} has other characters than the weights were made with: {remedy}")
    elif meta["tokenizer"] == Characters.name and dataset != (theirs := str(state.get("config", {}).get("dataset"))):
        own = Path(data_dir or DATA) / theirs
        if not own.is_dir() or description(read_meta(own)) != description(meta):
            names = f"dataset={dataset}: the weights are of dataset={theirs}, and do not say which characters"
            raise UsageError(f"{names}; {own} does not hold the same ones: {remedy}")
