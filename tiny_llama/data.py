"""--data markov and --data FILE: tokens that can be learnt, and how well a model knows a text that it never saw.

The tokens of a file are its bytes; a FILE.bin has tokens of any vocabulary, as nanoGPT prepares them: little-endian
integers of 2 bytes, or of 4 for a vocabulary of more than 65,536. Training takes windows of the first nine tenths. Then
the loss is measured on windows of the last tenth, which is held out, and where tokens are bytes, the model continues
the beginning of it.
"""

import contextlib
import math
import os
import statistics
import textwrap

import numpy as np
import torch

from tiny_llama.files import open_input, printable
from tiny_llama.tokens import Tokens, Windows
from tiny_llama_v3 import UsageError, cdiv

MARKOV_PROBABILITIES = (0.5, 0.25, 0.125, 0.125)
HELD_OUT_BATCHES = 20  # at most; they take as long as seven training steps
PROMPT_BYTES, SAMPLE_BYTES = 32, 200


def validate(config):
    """Raise UsageError if the data is not there, or does not fit the vocabulary or the length of a sequence."""
    if config.data != "markov":
        read(config)
    elif config.vocab_size < len(MARKOV_PROBABILITIES):
        raise UsageError(f"--vocab-size {config.vocab_size} is too small for --data markov: give 4 or more")


def batches(config):
    """Return the batches of the Markov chain or of the file, as llama.random_tokens() does."""
    validate(config)
    return markov_tokens(config) if config.data == "markov" else file_tokens(config)


def entropy(config):
    """Return the entropy per token in nats, the floor of the loss; None for files, where it is unknown."""
    return -sum(p * math.log(p) for p in MARKOV_PROBABILITIES) if config.data == "markov" else None


def as_batch(sequences):
    """Return (tokens, targets: one position on), both (batch, seq), of an array (batch, seq + 1) of integers."""
    tokens = torch.from_numpy(np.ascontiguousarray(sequences, dtype=np.int64))
    return tokens[:, :-1], tokens[:, 1:]


def markov_tokens(config):
    """Yield batches of a Markov chain: each token has four successors, drawn with MARKOV_PROBABILITIES."""
    rng, successors = np.random.default_rng(config.seed), len(MARKOV_PROBABILITIES)
    order = rng.permutation(config.vocab_size)
    # Distinct shifts, so that the successors of a token are distinct.
    shifts = rng.choice(config.vocab_size, successors, replace=False)
    table = order[(np.arange(config.vocab_size)[:, None] + shifts) % config.vocab_size]
    while True:
        choices = rng.choice(successors, p=MARKOV_PROBABILITIES, size=(config.seq_len + 1, config.sequences_per_step))
        sequence = np.empty_like(choices)
        sequence[0] = rng.integers(config.vocab_size, size=config.sequences_per_step)
        for position in range(1, len(sequence)):
            sequence[position] = table[sequence[position - 1], choices[position]]
        yield as_batch(sequence.T)


class Text(Tokens):
    """A part of the file of --data: its bytes, or the tokens of a FILE.bin."""

    def __init__(self, config, *place):
        super().__init__(*place)
        self.config = config

    def __getitem__(self, part):
        """Return a slice as an array; UsageError if the file has become shorter, or has a token beyond the vocabulary.

        This looks at what is read, and not once at the whole file, which may have many GB.
        """
        with readable(self.config):
            tokens = super().__getitem__(part)
        if (largest := tokens.max(initial=0)) >= self.config.vocab_size:
            has = f"--data {self.config.data!r} has the token {largest}, of {self.dtype.itemsize} bytes"
            remedy = "give as many as its tokenizer has"
            raise UsageError(f"{has}, and --vocab-size is {self.config.vocab_size}: {remedy}")
        return tokens


@contextlib.contextmanager
def readable(config):
    """Raise UsageError for what keeps the file of --data from being read."""
    try:
        yield
    except (OSError, ValueError) as error:  # a name with a null byte
        raise UsageError(
            f"--data {config.data!r} cannot be read ({error}): give random, markov, a text file or tokens in a FILE.bin"
        ) from error


def has_bytes(config):
    """Return whether the tokens of a file are its bytes; those of FILE.bin have numbers of 2 or 4 bytes."""
    return not config.data.endswith(".bin")


def token_type(config):
    """Return the type of a file's tokens: in 2 bytes as in nanoGPT's files, or in 4 if there are more of them."""
    return np.dtype(np.uint8 if has_bytes(config) else "<u2" if config.vocab_size <= 2**16 else "<u4")


def read(config):
    """Return two Texts: the first nine tenths of the file's tokens, and the last tenth."""
    given, needed, dtype = f"--data {config.data!r}", 10 * config.seq_len + 1, token_type(config)
    with readable(config):
        file = open_input(config.data, math.inf)
        size, rest = divmod(file.seek(0, os.SEEK_END), dtype.itemsize)
        if rest:
            raise ValueError(f"it does not end with a whole token of {dtype.itemsize} bytes")
    if has_bytes(config) and config.vocab_size != 256:
        raise UsageError(
            f"--vocab-size {config.vocab_size} contradicts {given}, whose tokens are bytes: give 256, or a FILE.bin"
        )
    if size < needed:
        raise UsageError(
            f"{given} has {size} {'bytes' if has_bytes(config) else 'tokens'}, and --seq-len {config.seq_len} needs "
            f"{needed}: lower it, or give a longer file"
        )
    cut = size * 9 // 10
    return Text(config, file, dtype, 0, cut), Text(config, file, dtype, cut, size)


def windows_of(text, config):
    """Return all sequences of seq_len + 1 tokens of a text: as many as a batch and its targets need."""
    return Windows(text, config.seq_len + 1)


def file_tokens(config):
    """Yield batches of windows at random places of the first nine tenths of the file."""
    windows, generator = windows_of(read(config)[0], config), torch.Generator().manual_seed(config.seed)
    while True:
        starts = torch.randint(len(windows), (config.sequences_per_step,), generator=generator)
        yield as_batch(windows[starts.numpy()])


def held_out_batches(config):
    """Return [(tokens, targets)] of evenly spaced windows of the last tenth, which overlap only if it is short."""
    windows = windows_of(read(config)[1], config)
    # As many batches as fit side by side, but at least one.
    count = min(max(1, cdiv(len(windows), config.seq_len) // config.batch_size), HELD_OUT_BATCHES)
    starts = np.linspace(0, len(windows) - 1, count * config.batch_size).astype(np.int64)
    return [as_batch(windows[own]) for own in np.split(starts, count)]


@torch.no_grad()
def held_out_loss(step):
    """Return the mean loss, in nats per token, on held_out_batches(); all processes must call it."""
    batches = ((t.to(step.tokens.device) for t in batch) for batch in held_out_batches(step.config))
    return statistics.fmean(step.call_model(*batch).item() for batch in batches)


@torch.no_grad()
def sample(step):
    """Return the text, drawn by config.seed, with which the model continues the beginning of the last tenth."""
    config, seq_len = step.config, step.config.seq_len
    text = read(config)[1][:PROMPT_BYTES].tolist()
    generator = torch.Generator().manual_seed(config.seed)
    # FP8 multiplies multiples of 16 tokens, so the window is repeated.
    rows = 16 // math.gcd(16, seq_len) if config.fp8 else 1
    for _ in range(SAMPLE_BYTES):
        window = text[-seq_len:]
        # One shape, compiled once: what follows the window has no influence on it.
        tokens = torch.tensor([window + [0] * (seq_len - len(window))] * rows)
        logits = step.call_model(tokens.to(step.tokens.device))[0, len(window) - 1]
        text.append(torch.multinomial(logits.float().softmax(0).cpu(), 1, generator=generator).item())
    return bytes(text[-SAMPLE_BYTES:]).decode(errors="replace")


def evaluate(step):
    """Print and return what a run on a file adds to its summary, a dict; all processes must call it."""
    config, loss = step.config, held_out_loss(step)
    count = len(held_out_batches(config)) * config.batch_size
    unit = f"{loss / math.log(2):.2f} bits a byte" if has_bytes(config) else "nats a token"
    where = f"{count} windows of the last tenth of {printable(config.data)}"
    print(f"\nHeld-out loss: {loss:.4f} ({unit}, {where})", flush=True)
    if not has_bytes(config):  # which would need the tokenizer
        return {"held_out_loss": loss, "sample": None}
    # A model without a finite loss has no probabilities to draw from.
    text = sample(step) if math.isfinite(loss) else ""
    print(f"Sample: {SAMPLE_BYTES} bytes that continue the beginning of the last tenth, at temperature 1")
    print(textwrap.indent(printable(text), "    ", lambda line: True))
    return {"held_out_loss": loss, "sample": text}
