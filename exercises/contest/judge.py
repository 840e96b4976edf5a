"""The judge: runs an entry three times, each in a process of its own on data of its own, and measures what it saved.

The code of the entry runs in that process alone. Of what it leaves, the judge reads a folder with a LLaMA, and computes
the loss itself, in fp32 with PyTorch's operations, on sequences that it draws once the entry has ended.
"""

import compileall
import contextlib
import ctypes
import hashlib
import importlib.util
import json
import math
import os
import secrets
import shutil
import signal
import site
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import tiny_llama_v3 as llama
from benchmarks.harness import processor
from exercises.contest import task
from exercises.contest.task import DIVISIONS, LENGTH
from measure.results import ROOT, header
from tiny_llama import checkpoint, hardware
from tiny_llama.data import MARKOV_PROBABILITIES
from tiny_llama.files import printable

SEEDS = 3
HELD_OUT = 2048  # sequences
ROWS = 64  # of them at a time
BLOCK = 2**14  # sequences that are drawn at a time: what this takes stays in a cache
LAYERS = 64  # at most: with more, even a narrow model would keep the judge busy
CHEAT = 0.02  # nats by which no honest model is better than the source: two of its losses differ by far less
ENDING = 20  # seconds, until processes that are killed have ended
SMALL_CARD = 24 * 2**30  # bytes
# What the judge and our kernels consist of; an entry that stands in this folder is no part of it.
PROJECT = (
    "tiny_llama_v3.py tiny_llama/*.py measure/*.py benchmarks/__init__.py benchmarks/harness.py exercises/__init__.py "
    "exercises/progress_file.py exercises/contest/__init__.py exercises/contest/__main__.py exercises/contest/board.py "
    "exercises/contest/judge.py exercises/contest/task.py"
).split()
MODULES = ".py", ".pyc", ".so", ".pth"  # the last run code as soon as Python starts
TRAIN = "import pathlib, sys; from exercises.contest import task; task.train(pathlib.Path(sys.argv[1]))"
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux


class Refused(Exception):
    """What an entry has left does not count; the message says why."""


class Missed(Exception):
    """The entry has not reached the target; the message says by what."""


# ----------------------------------------------------------------------------------------------------------------------
# The data


class Source:
    """A chain of second order: each pair of tokens has four successors, drawn with MARKOV_PROBABILITIES.

    The system seeds all that is drawn, so that nobody can know it before, or draw the same again. Pairs, because
    counting which token follows another needs no training: the loss that this reaches is far above every target.
    """

    def __init__(self, vocab_size):
        keys = np.random.default_rng().random((vocab_size,) * 3, dtype=np.float32)
        # The tokens with the least keys in their order, without sorting the others.
        count = len(MARKOV_PROBABILITIES)
        least = keys.argpartition(count, axis=-1)[..., :count]
        order = np.take_along_axis(keys, least, -1).argsort(-1)
        self.successors = np.take_along_axis(least, order, -1).astype(np.uint8)

    def draw(self, count):
        """Return sequences (count, LENGTH + 1)."""
        rng, size = np.random.default_rng(), len(self.successors)
        # A byte chooses by its last three bits, as the probabilities are whole eighths.
        table = self.successors.repeat(np.array(8 * np.array(MARKOV_PROBABILITIES), int), -1).ravel()
        sequences = torch.empty(count, LENGTH + 1, dtype=torch.uint8)
        for rows in sequences.split(BLOCK):
            tokens = np.empty((LENGTH + 1, len(rows)), np.uint8)
            tokens[:2] = rng.integers(size, size=(2, len(rows)))
            choices = np.frombuffer(rng.bytes(tokens[2:].size), np.uint8).reshape(-1, len(rows)) & 7
            for first, second, third, choice in zip(tokens, tokens[1:], tokens[2:], choices, strict=False):
                index = ((first * np.uint32(size) + second) << 3) + choice
                table.take(index, out=third, mode="clip")  # with the mode "raise" it would copy
            rows.copy_(torch.from_numpy(tokens).T)  # several times as fast as NumPy's
        return sequences.numpy()

    def loss(self, sequences):
        """Return the loss of the source itself, on all but the first two tokens of sequences."""
        first, second, third = sequences[:, :-2], sequences[:, 1:-1], sequences[:, 2:]
        ranks = (self.successors[first, second] == third[..., None]).argmax(-1)
        return -np.log(MARKOV_PROBABILITIES)[ranks].mean().item()


# ----------------------------------------------------------------------------------------------------------------------
# The process of an entry


def adopt_orphans():
    """Have Linux make this process the parent of what an entry starts and leaves behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


def descendants():
    """Return the ids of the processes below this one, which only Linux tells."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            stat = (folder / "stat").read_text(errors="replace")
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    found, below = set(), {os.getpid()}
    while below:
        below = {pid for pid, parent in parents.items() if parent in below} - found
        found |= below
    return found


def end(process, others):
    """Kill a process with its group and all descendants of this one but these others, and wait for their end.

    Refused if they do not end, as they start new ones faster than they are killed.
    """
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    latest = time.monotonic() + ENDING
    while left := descendants() - others:
        if time.monotonic() > latest:
            raise Refused("processes that it started could not be ended")
        for pid in left:
            with contextlib.suppress(OSError):  # another's child, or ended
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def run_apart(folder, seconds):
    """Train the entry in a folder, and end all that it has started.

    Return its exit code, or None if it did not end within the limit.
    """
    adopt_orphans()
    others = descendants()
    command = [sys.executable, "-c", TRAIN, folder]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)
    exit_code = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            exit_code = process.wait(seconds)
    finally:
        end(process, others)
    return exit_code


# ----------------------------------------------------------------------------------------------------------------------
# What it has left


def read_model(folder, limits, device):
    """Return the saved model, in fp32 on PyTorch's operations. Refused if it is none, or not within the limits."""
    expected = {checkpoint.CONFIG, checkpoint.MODEL, checkpoint.TRAINING}
    try:
        if folder.is_symlink() or not folder.is_dir():
            raise Refused("it saved no model")
        for path in folder.iterdir():
            if path.name not in expected or path.is_symlink() or not path.is_file():
                raise Refused(f"beside its model it saved {path.name!a}")
    except OSError as error:
        raise Refused(f"what it saved cannot be read ({error.strerror})") from error
    try:
        fields = checkpoint.model_fields(folder, "the model")
        config = llama.Config(**fields, seq_len=LENGTH)
        if config.vocab_size != limits.vocab_size:
            raise Refused(f"its model has {config.vocab_size} tokens, not {limits.vocab_size}")
        # Counted before anything is made in this size.
        parameters = hardware.count_matrix_weights(config) + config.untied_head * config.vocab_size * config.hidden_dim
        if parameters > limits.parameters:
            raise Refused(f"its model has {parameters:,} parameters, and {limits.parameters:,} are allowed")
        if config.num_layers > LAYERS:
            raise Refused(f"its model has {config.num_layers} layers, and {LAYERS} are allowed")
        with torch.device(device):
            model = llama.TinyLlamaTriton(config, llama.OPERATIONS["torch"])
        names = [name for name, _ in model.named_parameters()]
        model.load_state_dict(checkpoint.read_weights(folder, names, "the model"))
    except llama.UsageError as error:
        raise Refused(str(error).replace(f"{folder}/", "").replace(f" {folder}", "")) from error
    return model


@torch.no_grad()
def held_out_loss(model, sequences):
    """Return the mean loss of a model in nats per token, on all but the first two tokens of sequences."""
    torch.set_float32_matmul_precision("highest")
    losses = []
    for rows in np.split(sequences, len(sequences) // ROWS):
        tokens = torch.from_numpy(rows.astype(np.int64)).to(model.embed_tokens.weight.device)
        logits = model(tokens[:, :-1])[:, 1:]
        losses.append(F.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten()).item())
    return statistics.fmean(losses)


def check_loss(loss, floor, target):
    """Raise Refused or Missed for a loss that does not reach the target; floor is the loss of the source itself."""
    if not math.isfinite(loss):
        raise Refused("the loss of its model is not finite")
    if loss < floor - CHEAT:
        raise Refused(f"its loss {loss:.4f} is below that of the source, {floor:.4f}, which nobody can predict better")
    if loss > target:
        raise Missed(f"its loss {loss:.4f} is above the target {target:.2f}")


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def project_files():
    """Return the paths of PROJECT, in their order."""
    return sorted(path for pattern in PROJECT for path in ROOT.glob(pattern) if path.is_file())


def file_hashes():
    """Return {file: SHA-256} of PROJECT."""
    return {str(path.relative_to(ROOT)): sha256(path) for path in project_files()}


def importable():
    """Return {path: SHA-256 of the project's files, else None} of what Python imports from the folders that it uses.

    New ones matter as well: a package goes before a module of its name, and what is at the top before a library.
    """
    ours = project_files()
    folders = {path.parent for path in ours} | {ROOT, Path(site.getusersitepackages()), *map(Path, sys.path)}
    paths = {path for folder in folders for path in folder.glob("*") if path.name != "__pycache__"}
    found = {path: None for path in paths if path.suffix in MODULES or any(path.glob("__init__.*"))}
    compiled = filter(Path.is_file, (Path(importlib.util.cache_from_source(path)) for path in ours))
    return found | {path: sha256(path) for path in (*ours, *compiled)}


# ----------------------------------------------------------------------------------------------------------------------
# A run


@contextlib.contextmanager
def scratch_folder():
    """Yield the path of a new folder, and remove it as far as what an entry has made of it allows."""
    folder = tempfile.mkdtemp(prefix="contest_")
    try:
        yield folder
    finally:
        with contextlib.suppress(RecursionError):  # a thousand folders in one another
            shutil.rmtree(folder, ignore_errors=True)


def judge_once(entry, division, device):
    """Run an entry, the bytes of its file, on a new source. Return the fields of a seed in the result."""
    limits, seed = DIVISIONS[division], secrets.randbelow(2**32)
    for path in project_files():
        compileall.compile_file(path, quiet=2)  # else the entry would, which is no change that matters
    before = importable()
    source = Source(limits.vocab_size)
    fields = dict(seed=seed, outcome="reached", reason=None, seconds=None, loss=None, floor=None, joules=None)
    with scratch_folder() as scratch:
        sequences = source.draw(limits.sequences)
        deadline = time.monotonic() + limits.seconds
        told = dict(division=division, device=device.type, seed=seed, deadline=deadline)
        Path(scratch, task.ENTRY).write_bytes(entry)
        Path(scratch, task.FIELDS).write_text(json.dumps(told))
        np.save(Path(scratch, task.SEQUENCES), sequences)
        meter, start = hardware.meter_energy(device), time.monotonic()
        try:
            # The clock runs until the process has ended, with all that it has started.
            code = run_apart(scratch, limits.seconds)
            fields["seconds"] = time.monotonic() - start
            used = meter(llama.Config(num_steps=1), 1)  # all of it counts as one step
            fields["joules"] = used and used["step_j"]
            if changed := {path.name for path, _ in before.items() ^ importable().items()}:
                raise Refused(f"files of the project or of libraries changed while it ran: {checkpoint.some(changed)}")
            # By the clock as well: who stops the judge's process makes it wait longer.
            if code is None or fields["seconds"] > limits.seconds:
                raise Missed(f"it did not end within {limits.seconds} seconds")
            if code:
                raise Refused(f"it ended with exit code {code}")
            model = read_model(Path(scratch, "model"), limits, device)
            sequences = source.draw(HELD_OUT)
            fields["floor"] = source.loss(sequences)
            fields["loss"] = held_out_loss(model, sequences)
            check_loss(fields["loss"], fields["floor"], limits.target)
        except (Refused, Missed) as error:
            fields |= {"outcome": "refused" if isinstance(error, Refused) else "missed", "reason": str(error)}
    return fields


def choose_division(asked, device):
    """Return the name of the division of a device, or the one asked for; UsageError if the device does not suit it."""
    if device.type == "cpu":
        own = "laptop"
    else:
        own = "small" if torch.cuda.get_device_properties(device).total_memory <= SMALL_CARD else "large"
    # A small card may try what a large one does; a large one in the class of small ones would be unfair.
    if asked not in (None, own) and (own, asked) != ("small", "large"):
        name = llama.get_gpu(device.type).name
        raise llama.UsageError(f"--division {asked} is not for this device, {name}: give {own}, or nothing")
    return asked or own


def median_seconds(seeds):
    """Return the median of the seconds of seeds, or None if not each of them reached the target."""
    reached = len(seeds) == SEEDS and all(fields["outcome"] == "reached" for fields in seeds)
    return statistics.median(fields["seconds"] for fields in seeds) if reached else None


def show(name, fields):
    """Print the line of a seed."""
    seconds = "no end" if fields["seconds"] is None else f"{fields['seconds']:.1f} s"
    joules = "" if fields["joules"] is None else f", {fields['joules']:.0f} J"
    reason = fields["reason"] or f"loss {fields['loss']:.4f}, of the source itself {fields['floor']:.4f}"
    print(printable(f"{name}: {seconds}{joules}, {fields['outcome']}: {reason}"), flush=True)


def judge(path, entry, participant, division, device):
    """Run an entry, the bytes of the file at path, as often as the rules say. Return the result, a dict."""
    checkpoint.import_safetensors("the contest")  # before an entry runs, which could put another in its place
    limits = DIVISIONS[division]
    result = header("contest", device, ["run", path.name, "--division", division], part="exercises")
    result |= {
        "participant": participant,
        "division": division,
        "limits": limits._asdict(),
        "host": processor(),
        "threads": torch.get_num_threads(),
        "entry": {"file": path.name, "sha256": hashlib.sha256(entry).hexdigest()},
        "project": file_hashes(),
        "seeds": [],
    }
    print(
        f"{participant}, division {division}: loss {limits.target:.2f}, at most {limits.seconds} s a seed", flush=True
    )
    # The first run fills the caches of compilers and of the disk; it counts only if it is refused.
    for number in range(SEEDS + 1):
        fields = judge_once(entry, division, device)
        show(f"seed {number} of {SEEDS}" if number else "warm-up", fields)
        if number or fields["outcome"] == "refused":
            result["seeds"].append(fields)
        if fields["outcome"] == "refused":
            break
    result["median_seconds"] = median_seconds(result["seeds"])
    result["reached"] = result["median_seconds"] is not None
    return result
