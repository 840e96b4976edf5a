"""nanogpt_triton's settings and data: what is read, what is refused, and in which words."""

import io
import itertools
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from nanogpt_triton import bench, dataset, sample, train
from nanogpt_triton.configurator import configure
from nanogpt_triton.data import preparing
from tiny_llama_v3 import UsageError

FOLDER = Path(dataset.__file__).parent
SHAKESPEARE = "Now is the winter of our discontent\nMade glorious summer by this sun of York;\n" * 30


def run_prepare(name, *arguments):
    """Runs data/name/prepare.py in this process, and returns its exit code."""
    path = FOLDER / "data" / name / "prepare.py"
    module = types.ModuleType(f"prepare_{name}")
    module.__file__ = str(path)
    exec(compile(path.read_text(), path, "exec"), module.__dict__)
    return preparing.run(module.__file__, module.__doc__, module.prepare, [str(a) for a in arguments])


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(SHAKESPEARE)
    return path


@pytest.fixture
def folder(tmp_path, text_file):
    """A dataset of characters."""
    folder = tmp_path / "data" / "mine"
    assert run_prepare("shakespeare_char", "--input", text_file, "--output", folder) == 0
    return folder


# --- settings


def settings_of(*argv):
    return configure(train.Settings, argv, "")[0]


def test_later_settings_win(tmp_path):
    config = tmp_path / "c.py"
    config.write_text('"""Mine."""\nbatch_size = 3\nmax_iters = 1_000  # many\ndataset = "mine"\nlearning_rate = 1\n')
    settings = settings_of("--batch_size=5", str(config), "--max_iters=7", "--compile=False", "--deterministic")
    assert (settings.batch_size, settings.max_iters, settings.dataset) == (3, 7, "mine")
    assert settings.learning_rate == 1.0 and isinstance(settings.learning_rate, float)
    assert settings.compile is False and settings.deterministic is True
    assert settings_of("--dataset=3", "--out_dir='a b'").dataset == "3"
    assert settings_of("--out_dir='a b'").out_dir == "a b"


@pytest.mark.parametrize("path", sorted((FOLDER / "config").glob("*.py")), ids=lambda path: path.stem)
def test_our_config_files(path):
    """They name prepared datasets; sample.py takes from them what it needs."""
    assert (FOLDER / "data" / settings_of(str(path)).dataset / "prepare.py").exists()
    given = configure(sample.Settings, [str(path)], "", train.Settings.__dataclass_fields__)[1]
    assert given.keys() <= {"out_dir", "init_from", "compile"} and given


@pytest.mark.parametrize("argument, words", [
    ("--batchsize=3", ["batchsize", "did you mean batch_size?"]), ("--batch-size=3", ["did you mean batch_size?"]),
    ("--zzz=3", ["zzz", "--help"]), ("--batch_size=x", ["--batch_size=x", "not an integer"]),
    ("--batch_size=2.5", ["2.5", "not an integer"]), ("--batch_size=True", ["not an integer"]),
    ("--batch_size=0", ["below 1"]), ("--batch_size=", ["--batch_size=", "not an integer"]),
    ("--dropout=1.5", ["above 0.99"]), ("--compile=yes", ["not True or False"]),
    ("--learning_rate=fast", ["not a number"]), ("--learning_rate=float('nan')", ["not a number"]),
    ("--layer_norm=tritn", ["none of auto, triton, torch", "triton?"]),
    ("--layer_norm=foo", ["'foo' is none of auto, triton, torch"]),
    ("--init_from=foo", ["none of scratch, resume, gpt2"]),
    ("--dtype=int8", ["none of auto, float32, bfloat16, float16"]), ("--backend=mpi", ["none of auto, nccl, gloo"]),
    ("--learning_rate=1e999", ["not a number"]), (f"--learning_rate=1{'0' * 400}", ["not a number"]),
    ("--n_embd=2147483648", ["above 2147483647"]), ("--batch_size={[]: 1}", ["not an integer"]),
    (f"--batch_size={'-' * 100_000}1", ["not an integer"]),
    ("--out_dir=", ["--out_dir=: there are 0 characters: give 1 to 1000"]), ("--dataset=", ["give 1 to 1000"]),
    (f"--out_dir={'x' * 20_000}", ["--out_dir=xxx", "there are 20000 characters: give 1 to 1000"]),
    (f"--batch_size={'x' * 20_000}", ["--batch_size=xxx", "not an integer"]),
    ("--batch_size", ["lacks a value", "--batch_size=12"]), ("-b=3", ["--key=value"]),
    ("missing.py", ["missing.py cannot be read"]),
])  # fmt: skip
def test_a_wrong_argument_is_named(argument, words):
    with pytest.raises(UsageError) as error:
        settings_of(argument)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


def test_the_ends_of_ranges_are_possible():
    settings = settings_of("--batch_size=1", "--dropout=0.99", "--learning_rate=0", f"--seed={2**32 - 1}")
    assert (settings.batch_size, settings.dropout, settings.seed) == (1, 0.99, 2**32 - 1)
    assert settings_of("--dropout=0.0", "--max_iters=0", f"--max_iters={2**31 - 1}").max_iters == 2**31 - 1
    with pytest.raises(UsageError, match="above 4294967295"):
        settings_of(f"--seed={2**32}")


@pytest.mark.parametrize("text, words", [
    ("batch_size = 3\nbatchsize = 4\n", [":2:", "did you mean batch_size?"]),
    ("batch_size = 3 * seed\n", [":1:", "3 * seed cannot be computed from literals", "write the value"]),
    ("batch_size = 3 ** 9999\n", ["cannot be computed"]), ("batch_size = (2 ** 64) * 2\n", ["cannot be computed"]),
    ("batch_size = 1 // 0\n", ["cannot be computed"]), ("out_dir = 'a' * 3\n", ["cannot be computed"]),
    ("wandb_run_name = str(time.sleep(9))\n", ["cannot be computed"]),
    ("import settings\n", [":1:", "none is executed: take this one out"]),
    ("from time import *\n", [":1:", "none is executed"]),
    ("batch_size = open('touched', 'w')\n", ["cannot be computed"]),
    ("batch_size = block_size = 3\n", ["key = literal"]), ("batch_size = \n", [":1:", "not Python"]),
    ("batch_size = {[]: 1}\n", [":1:", "cannot be computed"]), (f"batch_size = {'-' * 100_000}1\n", ["not Python"]),
    ("batch_size = '3'\n", ["'3'", "not an integer"]),
])  # fmt: skip
def test_a_config_file_is_not_executed(tmp_path, monkeypatch, text, words):
    monkeypatch.chdir(tmp_path)
    Path("c.py").write_text(text)
    with pytest.raises(UsageError) as error:
        settings_of("c.py")
    assert all(word in str(error.value) for word in ["c.py", *words])
    assert not Path("touched").exists()


def test_arithmetic_and_the_time_in_a_config_file(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1.5)
    text = "import time, os\nbatch_size = 5 * 8 + 2 ** 3 // 3 - -1\nlearning_rate = (7 % 4) / 10\n"
    (tmp_path / "c.py").write_text(text + "wandb_run_name = 'ft' + '-' + str(time.time())\n")
    given = dict(batch_size=43, learning_rate=0.3, wandb_run_name="ft-1.5")
    assert configure(train.Settings, [str(tmp_path / "c.py")], "")[1] == given


def test_a_config_file_from_another_folder_or_project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UsageError, match=f"cannot be read .*: change to the folder {FOLDER}"):
        settings_of("config/train_gpt2.py")
    with pytest.raises(UsageError, match="config.json:1: only lines key = literal are read"):
        settings_of("config.json")


def test_help_lists_every_key(capsys):
    with pytest.raises(SystemExit) as exit:
        configure(train.Settings, ["--help"], train.__doc__)
    text = capsys.readouterr().out
    assert exit.value.code == 0
    assert all(f"--{name}=" in text for name in train.Settings.__dataclass_fields__)


# --- preparing


def test_characters(folder):
    meta = dataset.read_meta(folder)
    tokenizer = dataset.make_tokenizer(meta)
    tokens = {split: np.fromfile(folder / f"{split}.bin", dataset.TOKEN) for split in dataset.SPLITS}
    assert tokenizer.decode(np.concatenate([tokens["train"], tokens["val"]])) == SHAKESPEARE
    assert len(tokens["train"]) == len(SHAKESPEARE) * 9 // 10
    assert {split: len(numbers) for split, numbers in tokens.items()} == meta["tokens"]
    assert tokenizer.decode(tokenizer.encode("winter")) == "winter"
    with pytest.raises(UsageError, match="'!'"):
        tokenizer.encode("winter!")
    assert {path.name for path in folder.iterdir()} == {"train.bin", "val.bin", "meta.json", "meta.pkl"}
    (folder / "meta.json").unlink()  # meta.pkl is for nanoGPT's scripts
    assert dataset.description(dataset.read_meta(folder)) == dataset.description(meta)


def test_pysource(tmp_path, monkeypatch):
    library = tmp_path / "lib"
    (library / "test").mkdir(parents=True)
    for number in range(20):
        (library / f"m{number:02}.py").write_text(f"x = {number}\n")
    (library / "latin.py").write_bytes(b"# \xe9\n")
    (library / "test" / "t.py").write_text("@@@\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(library)})
    out = tmp_path / "out"
    assert run_prepare("pysource", "--output", out) == 0
    meta = dataset.read_meta(out)
    decode = dataset.make_tokenizer(meta).decode
    train, held_out = (decode(np.fromfile(out / f"{split}.bin", dataset.TOKEN)) for split in ("train", "val"))
    assert held_out == "x = 0\n\nx = 10\n"
    assert train.split() == " ".join(f"x = {number}" for number in range(20) if number % 10).split()
    assert "@" not in meta["characters"] and meta["source"].startswith("Python 3")


class FakeEncoding:
    """Bytes as tokens; stands in for tiktoken's, which needs a network at first."""

    def encode(self, text, allowed_special):
        return list(text.encode())

    def encode_ordinary_batch(self, texts):
        return [list(text.encode()) for text in texts]

    def decode(self, tokens):
        return "".join({50256: "<|endoftext|>"}.get(token) or chr(range(256)[token]) for token in tokens)


@pytest.fixture
def tiktoken(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", types.SimpleNamespace(get_encoding=lambda name: FakeEncoding()))


def test_shakespeare_as_byte_pairs(tmp_path, text_file, tiktoken):
    assert run_prepare("shakespeare", "--input", text_file, "--output", tmp_path) == 0
    assert dataset.read_meta(tmp_path)["vocab_size"] == 50257
    assert len(np.fromfile(tmp_path / "train.bin", dataset.TOKEN)) == len(SHAKESPEARE) * 9 // 10


def test_tokens_that_only_pad_the_vocabulary_end_a_text(tiktoken):
    assert dataset.BytePairs().decode([97, 50256, 98, 50303]) == "a<|endoftext|>b<|endoftext|>"


def test_documents_end_where_the_next_begins(tmp_path, tiktoken):
    files = [tmp_path / f"{number}.txt" for number in range(5)]
    for file in files:
        file.write_text(f"text {file.stem}")
    assert run_prepare("openwebtext", "--input", *files, "--output", tmp_path / "out") == 0
    tokens = {split: np.fromfile(tmp_path / "out" / f"{split}.bin", dataset.TOKEN).tolist() for split in dataset.SPLITS}
    assert tokens["val"] == [*b"text 4", 50256]
    assert tokens["train"] == sum(([*f"text {n}".encode(), 50256] for n in range(4)), [])


def test_openwebtext(tmp_path, tiktoken, monkeypatch, capsys):
    """By the library datasets, with progress; what keeps it from loading is said in a line."""
    documents = [{"text": f"text {number}"} for number in range(5)]
    load, shown = Mock(return_value=documents), Mock(side_effect=lambda rows, unit: rows)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=shown))
    assert run_prepare("openwebtext", "--output", tmp_path) == 0
    assert dataset.read_meta(tmp_path)["tokens"] == {"train": 28, "val": 7} and shown.call_args.args == (documents,)
    load.side_effect = RuntimeError("Dataset scripts are no longer supported,\nbut found x.py")
    for words in ("(Dataset scripts are no longer supported, but found x.py): give --input", "pip install datasets"):
        assert run_prepare("openwebtext", "--output", tmp_path) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
        monkeypatch.setitem(sys.modules, "datasets", None)


def test_without_tiktoken(tmp_path, text_file, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert run_prepare("shakespeare", "--input", text_file, "--output", tmp_path) == 2
    assert "pip install tiktoken" in capsys.readouterr().err
    no_network = Mock(side_effect=ConnectionError("no route"))
    monkeypatch.setitem(sys.modules, "tiktoken", types.SimpleNamespace(get_encoding=no_network))
    assert run_prepare("shakespeare", "--input", text_file, "--output", tmp_path) == 2
    error = capsys.readouterr().err
    assert "TIKTOKEN_CACHE_DIR" in error and error.count("\n") == 1


class Response(io.BytesIO):
    headers = {"Content-Length": "1000"}


@pytest.mark.parametrize(
    "name", [".train.bin.tmp", ".meta.json.tmp", ".meta.pkl.tmp", "train.bin", "input.txt", ".input.txt.tmp"]
)
def test_nothing_is_written_through_a_link(tmp_path, text_file, monkeypatch, capsys, name):
    out, precious = tmp_path / "out", tmp_path / "precious"
    out.mkdir()
    precious.write_text("mine")
    (out / name).symlink_to(precious)
    code = run_prepare("shakespeare_char", "--input", text_file, "--output", out)
    assert code == (2 if name.startswith((".train", ".meta")) else 0)
    assert code == 0 or [path.name for path in out.iterdir()] == [name]
    assert "exists, as another prepare.py writes there, or was killed" in capsys.readouterr().err or code == 0
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: Response(bytes(1000)))
    preparing.download("http://example.org/x", out / "input.txt")
    assert precious.read_text() == "mine"


def test_a_failed_download_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(preparing, "SHAKESPEARE_URL", "http://127.0.0.1:9/input.txt")
    assert run_prepare("shakespeare_char", "--output", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "--input FILE" in error and error.count("\n") == 1
    assert not list((tmp_path / "out").iterdir())


def test_a_truncated_download_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: Response(b"half"))
    with pytest.raises(UsageError, match="4 of 1000 bytes"):
        preparing.download("http://example.org/x", tmp_path / "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xff"])
def test_input_that_is_no_text(tmp_path, capsys, content):
    path = tmp_path / "in"
    if content:
        path.write_bytes(content)
    assert run_prepare("shakespeare_char", "--input", path, "--output", tmp_path / "out") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out" / "train.bin").exists()


def test_more_characters_than_a_token_can_number(tmp_path):
    text = "".join(map(chr, range(0x10000, 0x20000)))
    preparing.write_characters(tmp_path, {"train": text, "val": text})
    assert dataset.read_meta(tmp_path)["vocab_size"] == 65536
    with pytest.raises(UsageError, match="65537 characters"):
        preparing.write_characters(tmp_path, {"train": text, "val": "a"})


@pytest.mark.parametrize("name", ["shakespeare_char/prepare.py", "pysource/prepare.py"])
def test_an_end_by_sigterm_leaves_nothing(tmp_path, text_file, name):
    """Another checkout on PYTHONPATH does not run in the place of this one."""
    (tmp_path / "tiny_llama_v3.py").write_text("raise SystemExit('another checkout')")
    program = (
        "import os, runpy, signal, sys; from unittest import mock\n"
        "sys.argv.pop(0)\n"
        "with mock.patch('os.replace', lambda *paths: os.kill(os.getpid(), signal.SIGTERM)):\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    given = ["--input", text_file] if name.startswith("shake") else []
    command = [sys.executable, "-c", program, FOLDER / "data" / name, *given, "--output", tmp_path / "out"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr, list((tmp_path / "out").iterdir())) == (130, "", [])


def test_preparing_that_fails_keeps_the_old_data(folder, tmp_path, text_file, monkeypatch, capsys):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr("os.replace", Mock(side_effect=OSError(28, "No space left on device")))
    assert run_prepare("shakespeare_char", "--input", text_file, "--output", folder) == 2
    assert "No space left on device" in capsys.readouterr().err
    empty = tmp_path / "empty.txt"
    empty.write_text("x")
    assert run_prepare("shakespeare_char", "--input", empty, "--output", folder) == 2
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


# --- reading


def batches(folder, split="train", block_size=16, seed=1):
    return dataset.Batches(folder, split, dataset.read_meta(folder), 4, block_size, seed)


def test_batches_are_windows_of_the_data(folder):
    first, again = batches(folder), batches(folder)
    inputs, targets = first[3]
    assert inputs.shape == targets.shape == (4, 16) and inputs.dtype == np.int64
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    whole = np.fromfile(folder / "train.bin", dataset.TOKEN).tobytes()
    assert all(row.astype(dataset.TOKEN).tobytes() in whole for row in inputs)
    assert (again[3][0] == inputs).all()
    assert not (first[4][0] == inputs).all() and not (batches(folder, seed=2)[3][0] == inputs).all()


def test_splits_draw_apart(tmp_path):
    for split in dataset.SPLITS:
        np.arange(1000, dtype=dataset.TOKEN).tofile(tmp_path / f"{split}.bin")
    assert not (batches(tmp_path, "train")[0][0] == batches(tmp_path, "val")[0][0]).all()


def test_every_window_can_be_drawn(folder):
    size = dataset.read_meta(folder)["tokens"]["val"]
    last = batches(folder, "val", block_size=size - 1)[0]
    assert (last[1][0] == np.fromfile(folder / "val.bin", dataset.TOKEN)[1:]).all()


def test_damaged_data_is_refused(folder):
    path = folder / "train.bin"
    good = path.read_bytes()
    for bad in (good[:-1], good[:-2], good + b"\0\0"):
        path.write_bytes(bad)
        with pytest.raises(UsageError, match="train.bin is truncated or from elsewhere.*prepare.py"):
            batches(folder)
    path.write_bytes(b"\xff" * len(good))
    with pytest.raises(UsageError, match="token 65535 at position .* beyond the vocabulary"):
        batches(folder)[0]
    vocab_size = dataset.read_meta(folder)["vocab_size"]
    np.full(len(good) // 2, vocab_size, dataset.TOKEN).tofile(path)
    with pytest.raises(UsageError, match=f"token {vocab_size} at position .* beyond the vocabulary of {vocab_size}"):
        batches(folder)[0]
    np.full(len(good) // 2, vocab_size - 1, dataset.TOKEN).tofile(path)
    assert (batches(folder)[0][1] == vocab_size - 1).all()
    path.write_bytes(good)
    with pytest.raises(UsageError, match="too few for block_size=10000"):
        batches(folder, block_size=10000)
    path.unlink()
    with pytest.raises(UsageError, match="train.bin does not exist: run python .*prepare.py"):
        batches(folder)


@pytest.mark.parametrize("text", ["", "{}", "[]", "3", "[" * 100_000])
def test_damaged_meta_is_refused(folder, text):
    (folder / "meta.json").write_text(text)
    with pytest.raises(UsageError, match="meta.json is damaged") as error:
        dataset.read_meta(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("fields", [
    dict(tokens=None), dict(tokens={"train": 9}), dict(tokens={"train": "9", "val": "9"}), dict(tokens=[9, 9]),
    dict(vocab_size="3"), dict(vocab_size=0, characters=""), dict(vocab_size=2), dict(vocab_size=4),
    dict(vocab_size=3.0), dict(characters=None), dict(characters="aab"), dict(characters=["a", "b", "c"]),
    dict(tokenizer="words"), dict(tokenizer=3), dict(tokenizer="gpt2"), dict(tokenizer="gpt2", characters=None),
])  # fmt: skip
def test_fields_of_meta_that_are_wrong(tmp_path, fields):
    meta = dict(tokenizer="characters", vocab_size=3, characters="abc", tokens={"train": 9, "val": 9})
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    assert dataset.read_meta(tmp_path) == meta
    meta = {name: value for name, value in (meta | fields).items() if value is not None}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UsageError, match="meta.json is damaged .*: run python .*prepare.py"):
        dataset.read_meta(tmp_path)


def test_data_of_nanogpt(tmp_path):
    """Without meta.json: GPT-2's tokens; with its pickle: its characters."""
    np.arange(100, dtype=dataset.TOKEN).tofile(tmp_path / "train.bin")
    assert batches(tmp_path)[0][0].max() < 100
    (tmp_path / "train.bin").write_bytes(b"odd")
    with pytest.raises(UsageError, match="truncated"):
        batches(tmp_path)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(NANOGPT, protocol))
        meta = dataset.read_meta(tmp_path)
        assert meta == dict(tokenizer="characters", vocab_size=3, characters="\nab", tokens={})
    assert dataset.make_tokenizer(meta).decode([1, 2, 0]) == "ab\n"
    np.arange(100, dtype=dataset.TOKEN).tofile(tmp_path / "train.bin")
    with pytest.raises(UsageError, match="beyond the vocabulary of 3"):
        batches(tmp_path)[0]


NANOGPT = dict(vocab_size=3, itos={0: "\n", 1: "a", 2: "b"}, stoi={"\n": 0, "a": 1, "b": 2})


class Payload:
    """What a pickle would do when it is loaded."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("payload", [Payload(open, "touched", "w"), Payload(eval, "open('touched', 'w')"), Path("x")])
def test_a_pickle_runs_no_code(tmp_path, monkeypatch, payload, protocol):
    monkeypatch.chdir(tmp_path)
    Path("meta.pkl").write_bytes(pickle.dumps(NANOGPT | {"more": payload}, protocol))
    with pytest.raises(UsageError, match=r"meta.pkl is damaged \(it names '.*', and could run code\)") as error:
        dataset.read_meta(tmp_path)
    assert "\n" not in str(error.value) and not Path("touched").exists()


@pytest.mark.parametrize("content", [
    b"", b"text", pickle.dumps(NANOGPT)[:-5], pickle.dumps(3), pickle.dumps(NANOGPT | {"vocab_size": 4}),
    pickle.dumps(NANOGPT | {"vocab_size": 0}), pickle.dumps(NANOGPT | {"vocab_size": "3"}),
    pickle.dumps({"vocab_size": 3}), pickle.dumps(NANOGPT | {"itos": ["a", "b", "a"]}),
    pickle.dumps(NANOGPT | {"stoi": {"a": 0, "\n": 1, "b": 2}}), pickle.dumps(NANOGPT | {"itos": ["a", "b", "cd"]}),
    pickle.dumps(NANOGPT | {"itos": ["a", "b", 3]}),
], ids=itertools.count())  # fmt: skip
def test_a_damaged_pickle_is_refused(tmp_path, content):
    (tmp_path / "meta.pkl").write_bytes(content)
    with pytest.raises(UsageError, match="meta.pkl is damaged") as error:
        dataset.read_meta(tmp_path)
    assert "\n" not in str(error.value)


def test_unknown_dataset_lists_ours():
    assert dataset.remedy(dataset.DATA / "openwebtext").endswith("prepare.py, or start with config/train_pysource.py")
    with pytest.raises(UsageError, match="openwebtext, pysource, shakespeare, shakespeare_char"):
        dataset.dataset_folder("nothing", "")


# --- documentation


def documented_commands():
    programs = [FOLDER / f"{name}.py" for name in ("train", "sample", "bench")]
    pages = [FOLDER / "README.md", *programs, *(FOLDER / "config").glob("*.py")]
    for page in pages:
        for line in page.read_text().splitlines():
            if match := re.match(r"\s*((?:python|torchrun) .*?\.py.*?)(?:  .*)?$", line):
                yield page.name, match[1]


@pytest.mark.parametrize("page, command", list(documented_commands()))
def test_documented_commands_are_understood(page, command):
    words = shlex.split(command)
    script = next(word for word in words if word.endswith(".py"))
    assert (FOLDER / script).exists()
    arguments = [str(FOLDER / word) if word.endswith(".py") else word for word in words[words.index(script) + 1 :]]
    if program := {"train.py": train, "sample.py": sample, "bench.py": bench}.get(script):
        configure(program.Settings, arguments, "")


def test_keys_named_in_the_readme_exist():
    text = (FOLDER / "README.md").read_text()
    rows = re.search(r"\| key \| meaning \|\n(.*?)\n\n", text, flags=re.S)[1]
    named = set(re.findall(r"^\| `(\w+)` \|", rows, flags=re.M))
    assert len(named) > 3 and named <= set(train.Settings.__dataclass_fields__)
