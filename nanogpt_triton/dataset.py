"""Prepared data in nanoGPT's files: train.bin and val.bin, tokens as little-endian uint16, and meta.pkl of characters.

Without a meta.pkl, the tokens are GPT-2's byte pairs. A meta.pkl cannot run code here.
"""

import contextlib
import importlib
import io
import itertools
import os
import pickle
import tempfile
from pathlib import Path

import numpy as np

from measure.command_line import UsageError
from tiny_llama.files import open_input

SPLITS = ("train", "val")
TOKEN = np.dtype("<u2")
GPT2_VOCAB = 50257
DATA = Path(__file__).resolve().parent / "data"


def library(name, purpose):
    """Import a library that only some users need."""
    with reading(purpose, f"pip install {name}"):
        return importlib.import_module(name)


@contextlib.contextmanager
def reading(path, remedy):
    """Raise UsageError for whatever a file with the wrong content leads to."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UsageError(f"{path} cannot be used ({reason}): {remedy}") from error


def read_text(path):
    with reading(path, "give a text file in UTF-8"), open_input(path) as file:
        return io.TextIOWrapper(file, encoding="utf-8").read()


# ----------------------------------------------------------------------------------------------------------------------
# Tokens


class Characters:
    """One token a character."""

    def __init__(self, characters):
        self.characters = characters
        self.numbers = {character: number for number, character in enumerate(characters)}

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
    characters = None

    def __init__(self):
        tiktoken = library("tiktoken", "GPT-2's vocabulary")
        with reading("GPT-2's vocabulary", "run this once with a network, or set TIKTOKEN_CACHE_DIR to a copy"):
            self.encoding = tiktoken.get_encoding("gpt2")

    def encode(self, text):
        return self.encoding.encode(text, allowed_special={"<|endoftext|>"})

    def encode_documents(self, texts):
        """Yield the tokens of each text, with end_of_text after it."""
        texts = iter(texts)
        while batch := list(itertools.islice(texts, 1000)):  # which tiktoken encodes in several threads
            for tokens in self.encoding.encode_ordinary_batch(batch):
                yield [*tokens, self.end_of_text]

    def decode(self, tokens):
        # Tokens that only pad a model's vocabulary end a text as well.
        return self.encoding.decode([min(token, self.end_of_text) for token in tokens])


class PlainUnpickler(pickle.Unpickler):
    """Read strings, numbers and containers only: a pickle runs code through the functions that it names."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it names {module}.{name}, and could run code")


def remedy(folder):
    return f"run python {folder / 'prepare.py'}; config/train_pysource.py needs no network"


def read_characters(folder):
    """Return the characters, in the order of their numbers, of a folder's data; None for GPT-2's byte pairs."""
    path = folder / "meta.pkl"
    if not path.exists():
        return None
    with reading(path, remedy(folder)), open_input(path) as file:
        content = PlainUnpickler(file).load()
        # nanoGPT trains without names of the tokens as well: then they are the first characters of Unicode.
        name = content["itos"].__getitem__ if "itos" in content else chr
        return "".join(map(name, range(content["vocab_size"])))


def make_tokenizer(characters):
    return Characters(characters) if characters else BytePairs()


# ----------------------------------------------------------------------------------------------------------------------
# Batches


class Batches:
    """Batches of a split: number n is the same in every run, whichever process asks for it and when."""

    def __init__(self, folder, split, batch_size, block_size, seed):
        path = folder / f"{split}.bin"
        with reading(path, remedy(folder)):
            # Not mapped: of a mapped file that becomes shorter, the system would end this process.
            self.file = open_input(path, 2**44)
            self.count = path.stat().st_size // TOKEN.itemsize
            if self.count <= block_size:
                raise ValueError(f"{self.count} tokens are too few for block_size={block_size}")
        self.path, self.batch_size, self.block_size = path, batch_size, block_size
        self.seed = [seed, SPLITS.index(split)]

    def __getitem__(self, number):
        """Return inputs and targets, (batch_size, block_size) int64. Targets are the tokens that follow the inputs."""
        generator = np.random.default_rng([*self.seed, number])
        size, windows = self.block_size + 1, []
        with reading(self.path, "it was changed while it was in use: prepare it again"):
            for offset in generator.integers(self.count - self.block_size, size=self.batch_size):
                self.file.seek(TOKEN.itemsize * offset)
                windows.append(np.frombuffer(self.file.read(TOKEN.itemsize * size), TOKEN).reshape(size))
        windows = np.stack(windows).astype(np.int64)
        return windows[:, :-1], windows[:, 1:]


# ----------------------------------------------------------------------------------------------------------------------
# Preparing


@contextlib.contextmanager
def write_dataset(folder, tokenizer):
    """Yield add(split, tokens). The files appear at the end, or not at all if something fails before."""
    folder.mkdir(parents=True, exist_ok=True)
    counts, characters = dict.fromkeys(SPLITS, 0), tokenizer.characters
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as scratch:

        def add(split, tokens):
            counts[split] += len(tokens)
            with open(Path(scratch, f"{split}.bin"), "ab") as file:
                file.write(np.asarray(tokens, TOKEN).tobytes())

        yield add
        if not all(counts.values()):
            raise UsageError(f"there would be no tokens in one of {counts}: give more text")
        if characters:
            itos = dict(enumerate(characters))
            content = {"vocab_size": len(characters), "stoi": tokenizer.numbers, "itos": itos}
            Path(scratch, "meta.pkl").write_bytes(pickle.dumps(content))
        for path in list(Path(scratch).iterdir()):
            os.replace(path, folder / path.name)
    if not characters:
        (folder / "meta.pkl").unlink(missing_ok=True)  # of what was here before
    for split, count in counts.items():
        print(f"{folder / split}.bin: {count:,} tokens")
