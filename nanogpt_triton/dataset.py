"""Prepared data: train.bin and val.bin, tokens as little-endian uint16, and meta.json, which says what they are.

nanoGPT's own files are read as they are: characters with a meta.pkl, which cannot run code here, and byte pairs without
either.
"""

import contextlib
import importlib
import json
import os
import pickle
import tempfile
from pathlib import Path

import numpy as np

from tiny_llama_v3 import UsageError

SPLITS = ("train", "val")
TOKEN = np.dtype("<u2")
GPT2_VOCAB = 50257
DATA = Path(__file__).resolve().parent / "data"


def library(name, purpose):
    """Import a library that only some users need."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UsageError(f"{purpose} needs a library: pip install {name}") from None


@contextlib.contextmanager
def reading(path, remedy):
    """Raise UsageError for whatever a file with the wrong content leads to."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UsageError(f"{path} cannot be used ({reason}): {remedy}") from error


# ----------------------------------------------------------------------------------------------------------------------
# Tokens


class Characters:
    """One token a character."""

    def __init__(self, characters):
        self.characters = characters
        self.numbers = {character: number for number, character in enumerate(characters)}
        self.meta = {"tokenizer": "characters", "vocab_size": len(characters), "characters": characters}

    def encode(self, text):
        unknown = set(text) - self.numbers.keys()
        if unknown:
            raise UsageError(f"the data has no character {min(unknown)!r}: write the text with {self.characters!r}")
        return [self.numbers[character] for character in text]

    def decode(self, tokens):
        return "".join(self.characters[token] for token in tokens)


class BytePairs:
    """GPT-2's byte-pair encoding, by tiktoken."""

    end_of_text = GPT2_VOCAB - 1
    meta = {"tokenizer": "gpt2", "vocab_size": GPT2_VOCAB}

    def __init__(self):
        tiktoken = library("tiktoken", "GPT-2's vocabulary")
        with reading("GPT-2's vocabulary", "run this once with a network, or set TIKTOKEN_CACHE_DIR to a copy"):
            self.encoding = tiktoken.get_encoding("gpt2")

    def encode(self, text):
        return self.encoding.encode(text, allowed_special={"<|endoftext|>"})

    def encode_documents(self, texts):
        """Yield the tokens of each text, with end_of_text after it."""
        for tokens in self.encoding.encode_ordinary_batch(texts):
            yield [*tokens, self.end_of_text]

    def decode(self, tokens):
        # Tokens that only pad a model's vocabulary end a text as well.
        return self.encoding.decode([min(token, self.end_of_text) for token in tokens])


class PlainUnpickler(pickle.Unpickler):
    """Read strings, numbers and containers only: a pickle runs code through the functions that it names."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it names {module}.{name}, and could run code")


def read_meta(folder):
    """Return what the .bin files of a folder hold: {tokenizer, vocab_size} and, of characters, which they are."""
    ours, theirs = folder / "meta.json", folder / "meta.pkl"
    with reading(folder, remedy(folder)):
        if ours.exists():
            return json.loads(ours.read_text(encoding="utf-8"))
        # nanoGPT describes characters by a pickle, and GPT-2's tokens not at all.
        if theirs.exists():
            with open(theirs, "rb") as file:
                content = PlainUnpickler(file).load()
            return Characters("".join(content["itos"][number] for number in range(content["vocab_size"]))).meta
    return BytePairs.meta


def make_tokenizer(meta):
    return Characters(meta["characters"]) if "characters" in meta else BytePairs()


# ----------------------------------------------------------------------------------------------------------------------
# Batches


def remedy(folder):
    return f"run python {folder / 'prepare.py'}; config/train_pysource.py needs no network"


def dataset_folder(dataset, data_dir):
    """Return the folder of a dataset; UsageError if it holds none."""
    folder = Path(data_dir or DATA, dataset)
    if not (folder / "train.bin").exists():
        known = ", ".join(sorted(path.parent.name for path in DATA.glob("*/prepare.py")))
        raise UsageError(f"dataset={dataset}: there is no {folder}/train.bin: {remedy(folder)} (there are {known})")
    return folder


class Batches:
    """Batches of a split: number n is the same in every run, whichever process asks for it and when."""

    def __init__(self, folder, split, batch_size, block_size, seed):
        path = folder / f"{split}.bin"
        with reading(path, remedy(folder)):
            self.tokens = np.memmap(path, TOKEN, "r")
            if len(self.tokens) <= block_size:
                raise ValueError(f"{len(self.tokens)} tokens are too few for block_size={block_size}")
        self.batch_size, self.block_size = batch_size, block_size
        self.seed = [seed, SPLITS.index(split)]

    def __getitem__(self, number):
        """Return inputs and targets, (batch_size, block_size) int64. Targets are the tokens that follow the inputs."""
        generator = np.random.default_rng([*self.seed, number])
        offsets = generator.integers(len(self.tokens) - self.block_size, size=self.batch_size)
        windows = np.stack([self.tokens[offset : offset + self.block_size + 1] for offset in offsets]).astype(np.int64)
        return windows[:, :-1], windows[:, 1:]


# ----------------------------------------------------------------------------------------------------------------------
# Preparing


@contextlib.contextmanager
def write_dataset(folder, tokenizer, **about):
    """Yield add(split, tokens). The files appear at the end, or not at all if something fails before.

    about: further facts for meta.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as scratch:
        paths = {split: Path(scratch, f"{split}.bin") for split in SPLITS}

        def add(split, tokens):
            with open(paths[split], "ab") as file:
                file.write(np.asarray(tokens, TOKEN).tobytes())

        yield add
        counts = {split: path.stat().st_size // TOKEN.itemsize for split, path in paths.items()}
        if not all(counts.values()):
            raise UsageError(f"there would be no tokens in one of {counts}: give more text")
        meta = {**tokenizer.meta, "tokens": counts, **about}
        if "characters" in meta:  # for nanoGPT's own scripts
            itos = dict(enumerate(tokenizer.characters))
            content = {"vocab_size": meta["vocab_size"], "stoi": tokenizer.numbers, "itos": itos}
            Path(scratch, "meta.pkl").write_bytes(pickle.dumps(content))
        Path(scratch, "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
        for path in list(Path(scratch).iterdir()):
            os.replace(path, folder / path.name)
    for split, count in counts.items():
        print(f"{folder / split}.bin: {count:,} tokens of {meta['vocab_size']}")
