"""--data markov and --data FILE: the tokens, what is refused, the loss on what was held out, the sample."""

import dataclasses
import hashlib
import itertools
import math
import os
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tiny_llama_v3 as llama
from tests.tiny_llama.conftest import TINY as FLAGS
from tiny_llama import data

# The first nine tenths are bytes below 128, the last tenth is bytes from 128 on, neighbours differ by one.
TRAINING, HELD_OUT = (bytes(first + i % 128 for i in range(n)) for first, n in ((0, 900), (128, 100)))
TINY = llama.Config(
    hidden_dim=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    ffn_dim=16,
    batch_size=2,
    seq_len=8,
    impl="torch",
    device="cpu",
)


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A text of the two kinds of bytes, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_bytes(TRAINING + HELD_OUT)
    return tmp_path / "text"


@pytest.fixture
def config(text):
    return dataclasses.replace(TINY, data=str(text), vocab_size=256)


def step_of(config):
    return llama.TrainStep(config, torch.device("cpu"))


def first_batches(config, count):
    return itertools.islice(llama.batches(config), count)


# --- tokens


@pytest.mark.parametrize("changes, digest", [
    (dict(vocab_size=11, batch_size=2, seq_len=17, seed=5), "eb2306743939790b"),
    (dict(vocab_size=1000, batch_size=3, seq_len=9, seed=42), "c6843877004b4741"),
])  # fmt: skip
def test_markov_tokens_are_those_of_published_results(changes, digest):
    batches = first_batches(dataclasses.replace(TINY, data="markov", **changes), 3)
    tokens = b"".join(tensor.numpy().tobytes() for batch in batches for tensor in batch)
    assert hashlib.sha256(tokens).hexdigest().startswith(digest)


def test_training_takes_all_windows_of_the_first_nine_tenths(config, text):
    text.write_bytes(bytes(range(30)))
    config, seen = dataclasses.replace(config, seq_len=2, accumulate=3), set()
    for tokens, targets in first_batches(config, 100):
        assert tokens.shape == (6, 2) and tokens.dtype == torch.int64 and torch.equal(tokens[:, 1:], targets[:, :-1])
        seen.update(map(tuple, torch.cat([tokens, targets[:, -1:]], dim=1).tolist()))
    # The last window ends with byte 26, and byte 27 is held out.
    assert seen == {(first, first + 1, first + 2) for first in range(25)}


def test_a_text_may_be_larger_than_the_memory(config, text):
    """Nothing of it is read but the windows. Here it is 64 GiB, mostly holes."""
    size, cut = 2**36, 2**36 * 9 // 10
    marks = {2**35: b"middle...", cut - 9: b"training!", cut: b"held out!", size - 9: b"the end.."}
    with open(text, "wb") as file:
        for place, mark in marks.items():
            file.seek(place)
            file.write(mark)
    training, held_out = (data.windows_of(part, config) for part in data.read(config))
    assert (len(training), len(held_out)) == (cut - 8, size - cut - 8)
    for windows, start in ((training, 0), (held_out, cut)):
        own = [place for place in marks if start <= place < start + len(windows)]
        assert [bytes(window) for window in windows[np.array(own) - start]] == [marks[place] for place in own]
    assert next(llama.batches(config))[0].shape == (2, 8)
    tokens, targets = data.held_out_batches(config)[-1]
    assert bytes([*tokens[-1], targets[-1, -1]]) == b"the end.."


def test_a_text_that_becomes_shorter_ends_the_run_in_a_line(config, text):
    """The system would end the process if it were mapped."""
    text.write_bytes(bytes(10**6))  # more than Python reads at once
    batches = llama.batches(config)
    next(batches)
    os.truncate(text, 8)
    with pytest.raises(llama.UsageError, match=f"--data '{text}' cannot be read .*shorter while it was in use"):
        next(batches)


def test_batches_follow_the_seed(config):
    first, again, other = (next(llama.batches(dataclasses.replace(config, seed=seed)))[0] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


# --- tokens of a tokenizer


def write_tokens(path, tokens, dtype="<u2"):
    path.write_bytes(np.asarray(tokens, dtype).tobytes())


@pytest.mark.parametrize("vocab_size, dtype", [(2**16, "<u2"), (2**16 + 1, "<u4")])
def test_tokens_of_a_file_have_two_bytes_or_four_if_there_are_many(config, text, vocab_size, dtype):
    """Each byte of a token counts, and the last tenth of the tokens, not of the bytes, is held out."""
    tokens = np.arange(vocab_size - 200, vocab_size)
    write_tokens(text.with_suffix(".bin"), tokens, dtype)
    config = dataclasses.replace(config, data=str(text.with_suffix(".bin")), vocab_size=vocab_size)
    training, held_out = (part[:] for part in data.read(config))
    assert np.array_equal(training, tokens[:180]) and np.array_equal(held_out, tokens[180:])
    for inputs, targets in first_batches(config, 20):
        assert inputs.dtype == torch.int64 and targets.equal(inputs + 1) and targets.max() < vocab_size - 20
    ((inputs, targets), *_) = data.held_out_batches(config)
    assert targets.equal(inputs + 1) and inputs.min() >= vocab_size - 20


def test_a_token_beyond_the_vocabulary_is_named_where_it_is_read(run, text, capsys):
    """Not before: the file may be large."""
    path, flags = text.with_suffix(".bin"), [*FLAGS, "--vocab-size", "300", "--seq-len", "8", "--data"]
    write_tokens(path, [299] * 180 + [300] * 20)
    training, held_out = data.read(llama.Config(data=str(path), vocab_size=300, seq_len=8))
    assert training[:].tolist() == [299] * 180
    with pytest.raises(llama.UsageError, match="has the token 300, of 2 bytes, and --vocab-size is 300: give as many"):
        held_out[:1]
    assert llama.main([*flags, str(path)], "tiny_llama_v3.py") == 2
    assert "has the token 300" in capsys.readouterr().out  # after the steps, which count
    write_tokens(path, [300] * 200)
    capsys.readouterr()
    assert llama.main([*flags, str(path)], "tiny_llama_v3.py") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"--data '{path}' has the token 300" in error


@pytest.mark.parametrize("size, words", [
    (401, "does not end with a whole token of 2 bytes"), (160, "has 80 tokens, and --seq-len 8 needs 81"),
])  # fmt: skip
def test_a_file_of_tokens_that_is_too_short_or_cut_is_refused(config, text, size, words):
    text.with_suffix(".bin").write_bytes(bytes(size))
    config = dataclasses.replace(config, data=str(text.with_suffix(".bin")))
    with pytest.raises(llama.UsageError, match=words):
        data.validate(config)


def test_a_run_learns_tokens_and_has_no_sample_of_them(run, text):
    write_tokens(text.with_suffix(".bin"), [256, 299, 5, 280] * 100)
    sizes = "--vocab-size 300 --seq-len 8 --batch-size 8 --num-steps 60 --learning-rate 1e-2 --data text.bin"
    done = run(*sizes.split())
    summary = done.result["summary"]
    assert summary["first_loss"] == pytest.approx(math.log(300), abs=0.2) and summary["entropy"] is None
    assert summary["held_out_loss"] < 1 and summary["sample"] is None
    assert "; guessing: ln(300) = 5.7038)" in done.out
    line = f"Held-out loss: {summary['held_out_loss']:.4f} (nats a token, 8 windows of the last tenth of text.bin)"
    assert line in done.out and "Sample" not in done.out and "a byte" not in done.out


# --- what is refused


@pytest.mark.parametrize("content, flags, named", [
    (None, [], "No such file"), (None, ["--vocab-size", "37"], "No such file"), ("folder", [], "Is a directory"),
    (b"", [], "has 0 bytes"),
    ("/dev/zero", [], "not a regular file"),
    (b"a" * 80, [], "has 80 bytes, and --seq-len 8 needs 81"), (b"a" * 90, ["--vocab-size", "37"], "give 256"),
], ids=str)  # fmt: skip
def test_what_cannot_be_trained_on_is_refused(tmp_path, capsys, monkeypatch, content, flags, named):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "text"
    if content is not None:
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.mkdir() if content == "folder" else path.symlink_to(content)
    monkeypatch.setattr(llama, "TinyLlamaTriton", Mock(side_effect=AssertionError("a model was built")))
    flags = [*FLAGS, "--vocab-size", "256", "--seq-len", "8", "--data", str(path), *flags]
    assert llama.main(flags, "tiny_llama_v3.py") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and named in err and repr(str(path)) in err


def test_the_least_file_has_a_window_to_hold_out(config, text):
    text.write_bytes(b"a" * 81)
    data.validate(config)
    ((tokens, _),) = data.held_out_batches(config)
    assert len(tokens) == 2  # which overlap


# --- the loss on what was held out, and the sample


def test_held_out_loss_is_that_of_evenly_spaced_windows(config, monkeypatch):
    """12 windows of 8 bytes and a last target are in 100 bytes, the last one at 91."""
    step = step_of(config)
    step.load(*next(llama.batches(config)))
    step.run()
    for most, starts in ((20, [91 * i // 11 for i in range(12)]), (2, [0, 30, 60, 91])):
        monkeypatch.setattr(data, "HELD_OUT_BATCHES", most)
        windows = torch.tensor([list(HELD_OUT[start : start + 9]) for start in starts])
        logits = step.model(windows[:, :-1])
        expected = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()
        assert data.held_out_loss(step) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("changes", [
    dict(impl="sdpa", use_amp=True), dict(impl="torch", fp8=True, seq_len=12, batch_size=4, num_kv_heads=2),
], ids=str)  # fmt: skip
def test_evaluation_changes_nothing(config, monkeypatch, changes):
    """Neither the weights, nor the next step, nor the next evaluation."""
    monkeypatch.setattr(data, "SAMPLE_BYTES", 4)
    steps = [step_of(dataclasses.replace(config, **changes)) for _ in range(2)]
    evaluated, other = steps
    for batch in itertools.islice(llama.batches(other.config), 2):
        for step in steps:
            step.load(*batch)
            step.run()
        summary = data.evaluate(evaluated)
        assert all(map(torch.equal, evaluated.model.parameters(), other.model.parameters()))
    assert data.evaluate(evaluated) == summary and len(summary["sample"]) <= 4 and 5 < summary["held_out_loss"] < 6


@pytest.mark.parametrize("seq_len, fp8, rows", [(8, False, 1), (60, False, 1), (12, True, 4)])
def test_a_sample_is_drawn_from_what_the_model_says_of_the_last_bytes(config, seq_len, fp8, rows):
    calls = []

    def call_model(tokens):
        """The next byte is one more than the last, or seven more with a share of 12 %, in a circle."""
        calls.append(tokens)
        return sum(F.one_hot((tokens + shift) % 128, 256) * value for shift, value in ((1, 42.0), (7, 40.0)))

    config = dataclasses.replace(config, seq_len=seq_len, fp8=fp8)
    written = data.sample(SimpleNamespace(config=config, tokens=torch.zeros(1), call_model=call_model)).encode()
    written = [*HELD_OUT[:32], *written]
    shifts = [(after - before) % 128 for before, after in itertools.pairwise(written[31:])]
    assert set(shifts) == {1, 7} and 8 < shifts.count(7) < 48  # 24, within 3.5 deviations
    assert len(calls) == len(shifts) == 200 and calls[-1].tolist() == [written[-seq_len - 1 : -1]] * rows
    assert calls[0].shape == (rows, seq_len) and calls[0][0, : min(32, seq_len)].tolist() == written[:32][-seq_len:]


def test_a_run_learns_a_phrase_and_continues_it(run, text):
    text.write_text("the quick brown fox\njumps over\tthe lazy dog. " * 50)
    sizes = "--ffn-dim 64 --vocab-size 256 --seq-len 32 --batch-size 8 --num-steps 150 --learning-rate 1e-2 --check"
    done = run("--data", str(text), *sizes.split())
    summary = done.result["summary"]
    assert summary["first_loss"] == pytest.approx(math.log(256), abs=0.2) and summary["entropy"] is None
    loss, sample = summary["held_out_loss"], summary["sample"]
    assert "; guessing: ln(256) = 5.5452)" in done.out
    assert loss < 0.5 and len(sample) == 200 and sample.count("quick brown") >= 2
    assert f"Held-out loss: {loss:.4f} ({loss / math.log(2):.2f} bits a byte, 8 windows" in done.out
    printed = done.out.partition("Sample: 200 bytes")[2].partition("\n\nFinal loss")[0].splitlines()[1:]
    assert printed == ["    " + line.replace("\t", "\\t") for line in sample.split("\n")]


@pytest.mark.parametrize("learning_rate, fault, exit_code", [
    ("1e-3", KeyboardInterrupt, 130), ("1e30", None, 1), ("1e-3", llama.UsageError("the text is gone"), 2),
])  # fmt: skip
def test_a_run_that_is_interrupted_or_diverges_or_loses_its_text_keeps_its_steps_alone(
    text, monkeypatch, learning_rate, fault, exit_code
):
    write = Mock(return_value="a file")
    monkeypatch.setattr(data, "held_out_loss", Mock(side_effect=fault or AssertionError("evaluated")))
    monkeypatch.setattr(llama, "write_new_json", write)
    flags = "--vocab-size 256 --seq-len 8 --data text --num-steps 3 --learning-rate"
    assert llama.main([*FLAGS, *flags.split(), learning_rate], "tiny_llama_v3.py") == exit_code
    *_, result = write.call_args[0]
    assert result["steps"] and "held_out_loss" not in result["summary"]
