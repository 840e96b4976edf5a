"""Prepared data: train.bin and val.bin, tokens as little-endian uint16, and meta.json, which says what they are.

nanoGPT's own files are read as they are: characters with a meta.pkl, which cannot run code here, and byte pairs without
either.
"""

import contextlib
import json
import os
import pickle
from pathlib import Path

import numpy as np

from tiny_llama_v3 import UsageError

SPLITS = ("train", "val")
TOKEN = np.dtype("<u2")
GPT2_VOCAB = 50257
DATA = Path(__file__).resolve().parent / "data"


class Characters:
    """One token a character."""

    name = "characters"

    def __init__(self, characters):
        self.characters = characters
        self.vocab_size = len(characters)
        self.numbers = {character: number for number, character in enumerate(characters)}

    def encode(self, text):
        unknown = sorted(set(text) - set(self.characters))
        if unknown:
            raise UsageError(f"the data has no character {unknown[0]!r}: write the text with {self.characters!r}")
        return [self.numbers[character] for character in text]

    def decode(self, tokens):
        return "".join(self.characters[token] for token in tokens)


class BytePairs:
    """GPT-2's byte-pair encoding, by tiktoken."""

    name = "gpt2"
    vocab_size = GPT2_VOCAB
    end_of_text = GPT2_VOCAB - 1

    def __init__(self):
        try:
            import tiktoken
        except ImportError:
            raise UsageError("GPT-2's tokens need tiktoken: pip install tiktoken") from None
        try:
            self.encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:  # whatever its download raises
            remedy = "run this once with a network, or point TIKTOKEN_CACHE_DIR to a cache that has it"
            raise UsageError(f"tiktoken cannot fetch GPT-2's vocabulary ({type(error).__name__}): {remedy}") from error

    def encode(self, text):
        return self.encoding.encode(text, allowed_special={"<|endoftext|>"})

    def encode_documents(self, texts):
        """Tokens of each text, end_of_text after it."""
        for tokens in self.encoding.encode_ordinary_batch(texts):
            yield [*tokens, self.end_of_text]

    def decode(self, tokens):
        return self.encoding.decode([min(token, self.end_of_text) for token in tokens])


class PlainUnpickler(pickle.Unpickler):
    """Strings, numbers and containers only: a pickle can run code by the functions that it names."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it names {f'{module}.{name}'!r}, and could run code")


def read_meta(folder):
    """What the .bin files of a folder hold: meta.json's content, or what it would say of nanoGPT's own files."""
    for name, read in {"meta.json": read_json, "meta.pkl": read_pickle}.items():
        path = folder / name
        if path.exists():
            try:
                return read(path)
            except Exception as error:  # a damaged pickle leads anywhere
                raise UsageError(f"{path} is damaged ({describe(error)}): {remedy(folder)}") from error
    return {"tokenizer": BytePairs.name, "vocab_size": GPT2_VOCAB, "tokens": {}}


def read_json(path):
    meta = json.loads(path.read_text(encoding="utf-8"))
    check_description(meta)
    if any(type(meta["tokens"][split]) is not int for split in SPLITS):
        raise ValueError("its tokens are no numbers")
    return meta


def read_pickle(path):
    """nanoGPT's {vocab_size, itos, stoi}."""
    with open(path, "rb") as file:
        theirs = PlainUnpickler(file).load()
    characters = [theirs["itos"][number] for number in range(theirs["vocab_size"])]
    if any(len(character) != 1 for character in characters):
        raise ValueError("its tokens are not single characters")
    if theirs["stoi"] != {character: number for number, character in enumerate(characters)}:
        raise ValueError("its itos and stoi contradict each other")
    meta = {"tokenizer": Characters.name, "vocab_size": len(characters), "characters": "".join(characters)}
    check_description(meta)
    return meta | {"tokens": {}}


def describe(error):
    return f"it has no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__


def description(meta):
    """What a checkpoint keeps of meta: which tokens there are."""
    return {name: meta[name] for name in ("tokenizer", "vocab_size", "characters") if name in meta}


def check_description(meta):
    """ValueError if the fields are of wrong types or contradict each other."""
    tokenizer, vocab_size = meta["tokenizer"], meta["vocab_size"]
    characters = meta.get("characters")
    if type(vocab_size) is not int or vocab_size < 1:
        raise ValueError(f"its vocab_size is {vocab_size!r}")
    if tokenizer == Characters.name:
        if type(characters) is not str or not len(characters) == len(set(characters)) == vocab_size:
            raise ValueError(f"its characters are not {vocab_size} different ones")
    elif (tokenizer, vocab_size, characters) != (BytePairs.name, GPT2_VOCAB, None):
        raise ValueError(f"its tokenizer {tokenizer!r} is unknown, or has another vocabulary")


def fits(meta, vocab_size):
    """Whether weights for vocab_size tokens can be of this data: byte pairs are padded to a multiple of 64."""
    padding = vocab_size - meta["vocab_size"]
    return 0 <= padding < 64 if meta["tokenizer"] == BytePairs.name else padding == 0


def make_tokenizer(meta):
    return Characters(meta["characters"]) if meta["tokenizer"] == Characters.name else BytePairs()


def remedy(folder):
    script = folder / "prepare.py" if folder.parent != DATA else Path("data") / folder.name / "prepare.py"
    without_network = ", or start with config/train_pysource.py" if folder == DATA / "openwebtext" else ""
    return f"run python {script}{without_network}"


def dataset_folder(dataset, data_dir):
    folder = (Path(data_dir) if data_dir else DATA) / dataset
    if not folder.is_dir():
        known = sorted(path.parent.name for path in DATA.glob("*/prepare.py"))
        raise UsageError(f"dataset={dataset}: there is no folder {folder}; prepared by us: {', '.join(known)}")
    return folder


def open_tokens(folder, split, meta, block_size):
    """The tokens of a split, mapped into memory."""
    path = folder / f"{split}.bin"
    if not path.exists():
        raise UsageError(f"{path} does not exist: {remedy(folder)}")
    size, expected = path.stat().st_size, meta["tokens"].get(split)
    if size % TOKEN.itemsize or expected is not None and size != expected * TOKEN.itemsize:
        promised = f", and meta.json promises {expected * TOKEN.itemsize}" if expected is not None else ""
        raise UsageError(f"{path} is truncated or from elsewhere: {size} bytes{promised}: {remedy(folder)}")
    if size // TOKEN.itemsize <= block_size:
        tokens = f"{size // TOKEN.itemsize} tokens, too few for block_size={block_size}"
        raise UsageError(f"{path} holds {tokens}: give a smaller one")
    return np.memmap(path, TOKEN, "r")


class Batches:
    """Batches of a split: number n is the same in every run, whoever asks for it and when."""

    def __init__(self, folder, split, meta, batch_size, block_size, seed):
        self.path = folder / f"{split}.bin"
        self.tokens = open_tokens(folder, split, meta, block_size)
        self.vocab_size = meta["vocab_size"]
        self.shape = batch_size, block_size
        self.seed = [seed, SPLITS.index(split)]

    def __getitem__(self, number):
        """Inputs and targets, (batch_size, block_size) int64."""
        batch_size, block_size = self.shape
        offsets = np.random.default_rng([*self.seed, number]).integers(len(self.tokens) - block_size, size=batch_size)
        windows = np.stack([self.tokens[offset : offset + block_size + 1] for offset in offsets]).astype(np.int64)
        if windows.max() >= self.vocab_size:
            row, column = np.argwhere(windows >= self.vocab_size)[0]
            token = f"token {windows[row, column]} at position {offsets[row] + column}"
            beyond = f"is beyond the vocabulary of {self.vocab_size}"
            raise UsageError(f"{self.path}: {token} {beyond}: {remedy(self.path.parent)}")
        return windows[:, :-1], windows[:, 1:]


class Writer:
    """Writes a dataset's files; they appear at the end, together, and not at all if something fails before."""

    def __init__(self, folder):
        self.folder, self.files = folder, {}
        self.tokens = dict.fromkeys(SPLITS, 0)

    def __enter__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def path_of(self, name):
        """Where a file is until it is whole."""
        return self.folder / f".{name}.tmp"

    def write(self, name, content):
        if name not in self.files:
            try:
                self.files[name] = open(self.path_of(name), "xb")  # noqa: SIM115 (over no file, and through no link)
            except FileExistsError:
                reason = "another prepare.py writes there, or was killed: wait, or remove it"
                raise UsageError(f"{self.path_of(name)} exists, as {reason}") from None
        self.files[name].write(content)

    def add(self, split, tokens):
        self.write(f"{split}.bin", np.asarray(tokens, TOKEN).tobytes())
        self.tokens[split] += len(tokens)

    def finish(self, tokenizer, **about):
        """Gives the files their names. about: further facts for meta.json."""
        for split, number in self.tokens.items():
            if not number:
                raise UsageError(f"nothing would be left for {split}.bin: give more text")
        meta = {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size, "tokens": self.tokens, **about}
        if tokenizer.name == Characters.name:
            meta["characters"] = tokenizer.characters
            theirs = {"vocab_size": tokenizer.vocab_size, "stoi": tokenizer.numbers}  # for nanoGPT's own scripts
            theirs["itos"] = dict(enumerate(tokenizer.characters))
            self.write("meta.pkl", pickle.dumps(theirs))
        self.write("meta.json", f"{json.dumps(meta, indent=1)}\n".encode())
        for file in self.files.values():
            file.close()  # which may fail on a full disk
        for name in self.files:
            os.replace(self.path_of(name), self.folder / name)
        for split, number in self.tokens.items():
            print(f"{self.folder / split}.bin: {number:,} tokens of {tokenizer.vocab_size}")

    def __exit__(self, *exception):
        for name, file in self.files.items():
            with contextlib.suppress(OSError):
                file.close()
            self.path_of(name).unlink(missing_ok=True)
