"""Prepared data in nanoGPT's files: train.bin and val.bin, tokens as little-endian uint16, and meta.pkl of their texts.

Without a meta.pkl, the tokens are GPT-2's byte pairs. A meta.pkl cannot run code here.
"""

import contextlib
import importlib
import io
import itertools
import math
import os
import pickle
import tempfile
from pathlib import Path

import numpy as np

from measure.command_line import UsageError
from tiny_llama.files import open_input
from tiny_llama.tokens import Tokens, Windows

SPLITS = ("train", "val")
TOKEN = np.dtype("<u2")
MOST_TOKENS = 2**16  # that a TOKEN can tell apart
GPT2_VOCAB = 50257
ESCAPED = "utf-8", "surrogateescape"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()
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
    wanted = "give a text file in UTF-8, of at most 1 GiB"
    if not os.path.exists(path):
        wanted = "name a file that is there; a relative name is looked for from the current folder"
    with reading(path, wanted), open_input(path) as file:
        return io.TextIOWrapper(file, encoding="utf-8").read()


# ----------------------------------------------------------------------------------------------------------------------
# Tokens


class Vocabulary:
    """Tokens with texts of their own: characters, words or bytes.

    texts: the text of each token, in the order of their numbers; None for a number that only pads the vocabulary. Bytes
    that are no UTF-8 by themselves are surrogates, as of errors="surrogateescape".
    """

    def __init__(self, texts):
        self.texts = list(texts)
        # In bytes, of which several tokens may make a character. An empty text would be found everywhere.
        self.encoded = {number: text.encode(*ESCAPED) for number, text in enumerate(self.texts) if text is not None}
        self.numbers = {text: number for number, text in self.encoded.items() if text}

    def encode(self, text):
        """Return the numbers of a text's tokens. From the left, each is the longest that fits."""
        text, tokens, place = text.encode(*ESCAPED), [], 0
        longest = max(map(len, self.numbers), default=0)
        while place < len(text):
            parts = (text[place : place + length] for length in range(longest, 0, -1))
            token = next((self.numbers[part] for part in parts if part in self.numbers), None)
            if token is None:
                beginning = text[place : place + 20].decode(errors="replace")
                known = " ".join(map(repr, filter(None, self.texts[:100]))) or "none: its meta.pkl had no itos"
                raise UsageError(f"the data has no token for {beginning!r}: write --start with its own, {known}")
            tokens.append(token)
            place += len(self.encoded[token])
        return tokens

    def decode(self, tokens):
        """Return the text of tokens, with a replacement character for one that has none."""
        return b"".join(self.encoded.get(token, REPLACEMENT) for token in tokens).decode(errors="replace")


class BytePairs:
    """GPT-2's byte-pair encoding, by tiktoken."""

    end_of_text = GPT2_VOCAB - 1
    texts = None

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
    if (program := folder / "prepare.py").exists():
        return f"run python {program}; config/train_pysource.py needs no network"
    found = {path.parent.name for name in ("prepare.py", "train.bin") for path in folder.parent.glob(f"*/{name}")}
    names = ", ".join(sorted(found - {folder.name})) or "none there; config/train_pysource.py needs no network"
    return f"prepare it, or give another dataset of {folder.parent}: {names}"


def read_texts(folder):
    """Return the texts of a folder's tokens, as Vocabulary takes them; None for GPT-2's byte pairs.

    As in nanoGPT, vocab_size counts, and itos may lack texts: a model can be trained without any.
    """
    path = folder / "meta.pkl"
    if not path.exists():
        return None
    needed = "it needs vocab_size, and itos with the text of each number, as plain strings or bytes"
    with reading(path, needed), open_input(path) as file:
        content = PlainUnpickler(file).load()
        itos = content.get("itos") or {number: text for text, number in content.get("stoi", {}).items()}
        itos = dict(enumerate(itos) if isinstance(itos, list | tuple | str) else itos)
        vocab_size = content.get("vocab_size", max(itos, default=-1) + 1)
        if not 1 <= vocab_size <= MOST_TOKENS:
            raise ValueError(f"vocab_size={vocab_size} is not from 1 to {MOST_TOKENS}")
        return Vocabulary(as_text(number, itos.get(number)) for number in range(vocab_size)).texts


def as_text(number, text):
    """Return the text of a token as a string, or None."""
    if isinstance(text, bytes):
        return text.decode(*ESCAPED)
    if isinstance(text, str | None):
        return text
    raise ValueError(f"itos[{number}] is {text!r:.40}, neither a string nor bytes")


def make_tokenizer(texts):
    return Vocabulary(texts) if texts else BytePairs()


# ----------------------------------------------------------------------------------------------------------------------
# Batches


class Batches:
    """Batches of a split: number n is the same in every run, whichever process asks for it and when."""

    def __init__(self, folder, split, batch_size, block_size, seed, vocab_size):
        path = folder / f"{split}.bin"
        with reading(path, remedy(folder)):
            file = open_input(path, math.inf)
            count, rest = divmod(path.stat().st_size, TOKEN.itemsize)
            if rest:
                raise ValueError(f"an odd number of bytes, and a token has {TOKEN.itemsize}")
            if count <= block_size:
                raise ValueError(f"{count} tokens are too few for block_size={block_size}")
        self.windows = Windows(Tokens(file, TOKEN, 0, count), block_size + 1)
        self.path, self.batch_size, self.vocab_size = path, batch_size, vocab_size
        self.seed = [seed, SPLITS.index(split)]

    def __getitem__(self, number):
        """Return inputs and targets, (batch_size, block_size) int64. Targets are the tokens that follow the inputs.

        UsageError for a token that the model does not have: a GPU would go on with whatever lies in its memory there.
        """
        generator = np.random.default_rng([*self.seed, number])
        with reading(self.path, "prepare it again"):
            windows = self.windows[generator.integers(len(self.windows), size=self.batch_size)].astype(np.int64)
        # Here, and not once for the whole file, which may have many GB.
        if (largest := windows.max()) >= self.vocab_size:
            raise UsageError(
                f"{self.path} has token {largest}, and the model only those below {self.vocab_size}: prepare it again, "
                "or mend vocab_size in its meta.pkl (without meta.pkl tokens are GPT-2's)"
            )
        return windows[:, :-1], windows[:, 1:]


# ----------------------------------------------------------------------------------------------------------------------
# Preparing


@contextlib.contextmanager
def write_dataset(folder, tokenizer):
    """Yield add(split, tokens). The files appear at the end, or not at all if something fails before."""
    folder.mkdir(parents=True, exist_ok=True)
    counts, texts = dict.fromkeys(SPLITS, 0), tokenizer.texts
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as scratch:

        def add(split, tokens):
            counts[split] += len(tokens)
            with open(Path(scratch, f"{split}.bin"), "ab") as file:
                file.write(np.asarray(tokens, TOKEN).tobytes())

        yield add
        if not all(counts.values()):
            raise UsageError(f"there would be no tokens in one of {counts}: give more text")
        if texts:
            itos = dict(enumerate(texts))
            content = {"vocab_size": len(itos), "stoi": {text: number for number, text in itos.items()}, "itos": itos}
            Path(scratch, "meta.pkl").write_bytes(pickle.dumps(content))
        for path in list(Path(scratch).iterdir()):
            os.replace(path, folder / path.name)
    if not texts:
        (folder / "meta.pkl").unlink(missing_ok=True)  # of what was here before
    for split, count in counts.items():
        print(f"{folder / split}.bin: {count:,} tokens")
