"""--data markov and --data FILE: the tokens, what is refused, the loss on what was held out, the sample."""

import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import tiny_llama_v3 as llama
from tiny_llama import data, distributed

# The first nine tenths are bytes below 128, the last tenth is bytes from 128 on, neighbours differ by one.
TRAINING, HELD_OUT = (bytes(first + i % 128 for i in range(n)) for first, n in ((0, 900), (128, 100)))
TINY = llama.Config(
    hidden_dim=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=16, batch_size=2, seq_len=8, impl="torch",
    num_steps=2, warmup_steps=1, device="cpu",
)  # fmt: skip


def flags_of(config):
    given = {name: value for name, value in dataclasses.asdict(config).items() if name not in ("vocab_size", "seed")}
    return [text for name, value in given.items() if value not in (None, False) for text in
            (llama.flag_of(name), *([] if value is True else [str(value)]))]  # fmt: skip


@pytest.fixture
def config(tmp_path):
    """Of a run on the two kinds of bytes."""
    (tmp_path / "text").write_bytes(TRAINING + HELD_OUT)
    return dataclasses.replace(TINY, data=str(tmp_path / "text"), vocab_size=256, output_dir=str(tmp_path / "results"))


@pytest.fixture
def run(capsys):
    """Runs a configuration with further flags: (exit code, output, errors, the result or None)."""

    def run(config, *flags):
        code = llama.main([*flags_of(config), *flags], "tiny_llama_v3.py")
        out, err = capsys.readouterr()
        path = re.search(r"^Results: (.*)$", out, re.M)
        return code, out, err, json.loads(open(path[1]).read()) if path else None

    return run


def step_of(config):
    return llama.TrainStep(config, llama.get_device("cpu"))


# --- tokens


@pytest.mark.parametrize("changes, digest", [
    (dict(vocab_size=11, batch_size=2, seq_len=17, seed=5), "eb2306743939790b"),
    (dict(vocab_size=1000, batch_size=3, seq_len=9, seed=42), "c6843877004b4741"),
])  # fmt: skip
def test_markov_tokens_are_those_of_published_results(changes, digest):
    batches = itertools.islice(llama.batches(dataclasses.replace(TINY, data="markov", **changes)), 3)
    tokens = b"".join(tensor.numpy().tobytes() for batch in batches for tensor in batch)
    assert hashlib.sha256(tokens).hexdigest().startswith(digest)


def test_training_takes_windows_from_all_of_the_first_nine_tenths(config):
    seen = set()
    for tokens, targets in itertools.islice(llama.batches(config), 1000):
        assert tokens.shape == targets.shape == (2, 8) and tokens.dtype == torch.int64
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        for window in torch.cat([tokens, targets[:, -1:]], dim=1).tolist():
            assert bytes(window) in TRAINING
            seen.add(window[0])
    assert len(seen) == 128


def test_the_first_and_the_last_window_are_trained_on(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(30)))
    config = dataclasses.replace(TINY, data=str(tmp_path / "text"), vocab_size=256, seq_len=2)
    windows = {row[0].item() for tokens, _ in itertools.islice(llama.batches(config), 300) for row in tokens}
    assert windows == set(range(25))  # the window that begins at 24 ends with byte 26, and byte 27 is held out


def test_batches_follow_the_seed_and_differ_among_processes(config):
    def first(seed, config=config):
        return torch.stack([tokens for tokens, _ in itertools.islice(step_of(config).batches(seed), 4)])

    assert torch.equal(first(1), first(1)) and not torch.equal(first(1), first(2))
    ranks = [next(distributed.own_rows(config, distributed.World(rank, 2))) for rank in range(2)]
    alone = next(llama.batches(dataclasses.replace(config, batch_size=4)))
    assert not torch.equal(ranks[0][0], ranks[1][0])
    for whole, *parts in zip(alone, *ranks, strict=True):
        assert torch.equal(whole, torch.cat(parts))


# --- what is refused


@pytest.mark.parametrize("content, changes, message", [
    (None, [], "cannot be read (No such file or directory): give random, markov or a text file"),
    ("folder", [], "cannot be read (it is no regular file): give"),
    ("pipe", [], "cannot be read (it is no regular file): give"),
    (b"", [], "has 0 bytes, with 0 held out, and --seq-len 8 needs 9: give a file of 81 bytes or more"),
    (b"a" * 80, [], "has 80 bytes, with 8 held out, and --seq-len 8 needs 9: lower --seq-len to 7, or give a file"),
    (b"a" * 90, ["--vocab-size", "37"], "--vocab-size 37 contradicts --data"),
    (b"a" * 90, ["--vocab-size", "1000"], "--vocab-size 1000 contradicts --data"),
], ids=["missing", "folder", "pipe", "empty", "short", "vocab", "default vocab"])  # fmt: skip
def test_what_cannot_be_trained_on_is_refused(tmp_path, run, monkeypatch, content, changes, message):
    path = tmp_path / "text"
    if content == "folder":
        path.mkdir()
    elif content == "pipe":
        os.mkfifo(path)
    elif content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(llama, "TinyLlamaTriton", Mock(side_effect=AssertionError("a model was built")))
    code, out, err, _ = run(dataclasses.replace(TINY, data=str(path), vocab_size=256), *changes)
    assert (code, out) == (2, "") and err.count("\n") == 1 and message in err and repr(str(path)) in err


def test_a_file_that_may_not_be_read_is_refused(config, run, monkeypatch):
    """Root may read any, so the system's answer is given here."""
    monkeypatch.setattr(data.np, "memmap", Mock(side_effect=PermissionError(13, "Permission denied")))
    code, _, err, _ = run(config)
    assert code == 2 and err.count("\n") == 1 and f"--data {config.data!r} cannot be read (Permission denied)" in err


def test_the_least_file_trains(tmp_path, run):
    (tmp_path / "text").write_bytes(b"a" * 81)
    config = dataclasses.replace(TINY, data=str(tmp_path / "text"), vocab_size=256, output_dir=str(tmp_path))
    code, out, _, _ = run(config)
    assert code == 0 and "2 windows of the last tenth" in out  # which overlap


# --- the loss on what was held out, and the sample


def plain_loss(step, starts):
    """The mean over windows of the held-out bytes, one by one."""
    config, losses = step.config, []
    for start in starts:
        window = torch.tensor(list(HELD_OUT[start : start + config.seq_len + 1]))[None]
        logits = step.model(window[:, :-1])
        losses.append(-logits.log_softmax(-1)[0, torch.arange(config.seq_len), window[0, 1:]].mean())
    return torch.stack(losses).mean().item()


def test_held_out_loss_is_that_of_evenly_spaced_windows(config, monkeypatch):
    step = step_of(config)
    step.load(*next(step.batches(1)))
    step.run()
    even = [91 * i // 11 for i in range(12)]  # 12 windows of 8 and a last target are in 100 bytes, the last at 91
    assert [len(tokens) for tokens, _ in data.held_out_batches(config)] == [2] * 6
    assert data.held_out_loss(step) == pytest.approx(plain_loss(step, even), rel=1e-5)
    assert data.held_out_loss(step) != pytest.approx(plain_loss(step, even[:-1]), rel=1e-5)
    monkeypatch.setattr(data, "HELD_OUT_BATCHES", 2)
    assert data.held_out_loss(step) == pytest.approx(plain_loss(step, [0, 30, 60, 91]), rel=1e-5)


@pytest.mark.parametrize("changes", [
    pytest.param(dict(impl="triton"), marks=pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")),
    dict(impl="sdpa", use_amp=True), dict(impl="torch", fp8=True, seq_len=12, batch_size=4, num_kv_heads=2),
], ids=str)  # fmt: skip
def test_evaluation_changes_nothing(config, monkeypatch, changes):
    """Neither the weights, nor the next step, nor the next evaluation."""
    monkeypatch.setattr(data, "SAMPLE_BYTES", 4)
    monkeypatch.setattr(data, "HELD_OUT_BATCHES", 1)
    losses = []
    for evaluates in (False, True):
        step = step_of(dataclasses.replace(config, **changes))
        batches = step.batches(1)
        for _ in range(2):
            step.load(*next(batches))
            step.run()
            before = [p.detach().clone() for p in step.model.parameters()]
            summary = data.evaluate(step) if evaluates else None
            assert all(map(torch.equal, before, step.model.parameters()))
            losses.append(step.loss.item())
    assert losses[:2] == losses[2:]
    assert data.evaluate(step) == summary and 0 < len(summary["sample"]) <= 4 and 5 < summary["held_out_loss"] < 6


@pytest.mark.parametrize("seq_len, fp8, rows", [(8, False, 1), (60, False, 1), (12, True, 4)])
def test_a_sample_is_drawn_from_what_the_model_says_of_the_last_bytes(tmp_path, seq_len, fp8, rows):
    (tmp_path / "text").write_bytes(bytes(32 + i % 64 for i in range(1000)))
    config = dataclasses.replace(TINY, data=str(tmp_path / "text"), vocab_size=256, seq_len=seq_len, fp8=fp8)
    calls = []

    def call_model(tokens):
        """The next byte is one more than the last, or seven more with a share of 12 %, of 64 in a circle."""
        calls.append(tokens)
        logits = torch.full((*tokens.shape, 256), -math.inf)
        for shift, value in ((1, 2.0), (7, 0.0)):
            logits.scatter_(2, (32 + (tokens - 32 + shift) % 64)[..., None], value)
        return logits

    step = SimpleNamespace(config=config, tokens=torch.zeros(1), call_model=call_model)
    sample, prompt = data.sample(step), bytes(32 + i % 64 for i in range(900, 932))
    text = prompt + sample.encode()
    shifts = [(after - before) % 64 for before, after in itertools.pairwise(text[31:])]
    assert len(shifts) == 200 and set(shifts) == {1, 7} and 8 < shifts.count(7) < 48  # 24, within 3.5 deviations
    assert len(calls) == 200 and {call.shape for call in calls} == {(rows, seq_len)}
    assert calls[-1].tolist() == [list(text[-seq_len - 1 : -1])] * rows
    assert calls[0][0, : min(32, seq_len)].tolist() == list(prompt[-seq_len:])
    step.config = dataclasses.replace(config, seed=config.seed + 1)
    assert data.sample(step) != sample


def printed_sample(out):
    """The sample that a run has printed."""
    lines = out.partition("Sample: 200 bytes")[2].partition("\n\nFinal loss")[0].splitlines()[1:]
    assert all(line.startswith("    ") for line in lines)
    return "\n".join(line[4:] for line in lines)


def test_a_run_learns_a_phrase_and_continues_it(tmp_path, run):
    phrase = "the quick brown fox\njumps over\tthe lazy dog. "
    (tmp_path / "text").write_text(phrase * 50)
    config = dataclasses.replace(
        TINY, data=str(tmp_path / "text"), vocab_size=256, hidden_dim=32, ffn_dim=64, seq_len=32, batch_size=8,
        num_steps=150, learning_rate=1e-2, output_dir=str(tmp_path),
    )  # fmt: skip
    code, out, err, result = run(config)
    assert (code, err) == (0, "") and result["config"]["vocab_size"] == 256
    summary = result["summary"]
    assert summary["first_loss"] == pytest.approx(math.log(256), abs=0.2) and summary["entropy"] is None
    assert summary["held_out_loss"] < 0.5 and len(summary["sample"]) == 200
    assert summary["sample"].count("quick brown") >= 2
    line = f"Held-out loss: {summary['held_out_loss']:.4f} ({summary['held_out_loss'] / math.log(2):.2f} bits a byte, "
    assert f"{line}8 windows of the last tenth of {config.data})\n" in out
    shown = printed_sample(out)
    assert shown == summary["sample"].replace("\t", "\\t") and "\\t" in shown
    assert f"(first {summary['first_loss']:.4f}; guessing bytes: ln(256) = 5.5452)\n" in out and "floor" not in out


def test_bytes_that_are_no_text_are_shown(config, capsys, monkeypatch):
    monkeypatch.setattr(data, "sample", lambda step: bytes([27, 91, 255, 10, 65]).decode(errors="replace"))
    data.evaluate(step_of(config))
    assert capsys.readouterr().out.endswith("\n    \\x1b[\N{REPLACEMENT CHARACTER}\n    A\n")


def test_check_takes_the_first_batch_of_the_file(config, run, monkeypatch):
    checked = Mock(side_effect=llama.check_batch)
    monkeypatch.setattr(llama, "check_batch", checked)
    code, out, _, _ = run(config, "--check")
    assert code == 0 and "Check against PyTorch in fp64: passed" in out
    assert torch.equal(checked.call_args[0][2][0], next(llama.batches(config))[0])


@pytest.mark.parametrize("method", ["held_out_loss", "sample"])
def test_a_run_that_is_interrupted_while_it_evaluates_keeps_its_steps(config, run, monkeypatch, method):
    monkeypatch.setattr(data, method, Mock(side_effect=KeyboardInterrupt))
    code, out, _, result = run(config)
    assert code == 130 and len(result["steps"]) == 2 and "held_out_loss" not in result["summary"]


def test_a_run_that_diverges_is_not_evaluated(config, run):
    code, out, _, result = run(config, "--learning-rate", "1e30", "--num-steps", "5")
    assert code == 1 and "Held-out" not in out and "held_out_loss" not in result["summary"]


def test_a_model_without_a_finite_loss_has_no_sample(config, capsys):
    step = step_of(config)
    torch.nn.init.constant_(step.model.norm.weight, math.nan)
    assert data.evaluate(step)["sample"] == "" and "Held-out loss: nan" in capsys.readouterr().out
