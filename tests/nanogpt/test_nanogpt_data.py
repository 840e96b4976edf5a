"""nanogpt_triton's settings and data: what is read, what is refused, and that files run no code."""

import pickle
import runpy
import sys
import types
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from nanogpt_triton import dataset, sample, train
from nanogpt_triton.configurator import configure
from nanogpt_triton.data import preparing
from tests.nanogpt.test_nanogpt import error_line
from tiny_llama_v3 import UsageError

FOLDER = Path(dataset.__file__).parent
SHAKESPEARE = "Now is the winter of our discontent\nMade glorious summer by this sun of York;\n" * 30


def run_prepare(name, *arguments):
    """Run data/name/prepare.py in this process. Return its exit code."""
    path = str(FOLDER / "data" / name / "prepare.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [path, *map(str, arguments)])
        patch.setattr(sys, "path", [*sys.path])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(path, run_name="__main__")
    return end.value.code or 0


def tokens_in(folder, split):
    return np.fromfile(folder / f"{split}.bin", dataset.TOKEN)


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
    return configure(train.Settings, argv, "")


def test_later_settings_win(tmp_path):
    config = tmp_path / "c.py"
    config.write_text('"""Mine."""\nbatch_size = 3\nmax_iters = 1_000  # many\ndataset = "mine"\nlearning_rate = 1\n')
    settings = settings_of("--batch_size=5", str(config), "--max_iters=7", "--compile=False", "--deterministic")
    assert (settings.batch_size, settings.max_iters, settings.dataset) == (3, 7, "mine")
    assert settings.learning_rate == 1.0 and isinstance(settings.learning_rate, float)
    assert settings.compile is False and settings.deterministic is True and settings.n_layer == 12
    assert settings_of("--out_dir='a b'").out_dir == settings_of("--out_dir=a b").out_dir == "a b"
    assert settings_of("--dropout=0").dropout == 0


def test_a_config_file_is_a_program(tmp_path, monkeypatch):
    """It sees the settings so far, and may have variables and functions of its own, as with nanoGPT."""
    monkeypatch.setattr("time.time", lambda: 1.5)
    (tmp_path / "c.py").write_text(
        "import time\n"
        "tokens = [2**n for n in range(4)]\n"
        "def half(n): return n // 2 + len(tokens)\n"
        "batch_size = half(batch_size)\n"
        "max_iters = lr_decay_iters = 10 * batch_size\n"
        "if block_size == 1024: wandb_run_name = 'ft-' + str(time.time())\n"
        "n_layers = 3; n_layer = n_layers\n"
    )
    settings = settings_of("--batch_size=20", str(tmp_path / "c.py"))
    assert (settings.batch_size, settings.max_iters, settings.lr_decay_iters) == (14, 140, 140)
    assert (settings.wandb_run_name, settings.n_layer) == ("ft-1.5", 3)


@pytest.mark.parametrize("path", sorted((FOLDER / "config").glob("*.py")), ids=lambda path: path.stem)
def test_our_config_files(path):
    """They set what they say, for datasets that can be prepared; sample.py takes from them what it needs."""
    executed = {key: value for key, value in runpy.run_path(str(path)).items() if not key.startswith("_")}
    settings = settings_of(str(path))
    assert executed and executed.items() <= vars(settings).items()
    assert (FOLDER / "data" / settings.dataset / "prepare.py").exists()
    configure(sample.Settings, [str(path)], "")


@pytest.mark.parametrize("argument, words", [
    ("--batchsize=3", "batchsize: did you mean batch_size?"), ("--batch-size=3", "did you mean batch_size?"),
    ("--zzz=3", "zzz: --help"), ("--batch_size=x", "batch_size = 'x' is no int"),
    ("--batch_size=2.5", "2.5 is no int"), ("--batch_size=True", "True is no int"), ("--batch_size", "True is no int"),
    ("--batch_size=0", "batch_size=0 is not from 1"), ("--batch_size=", "batch_size = '' is no int"),
    ("--batch_size={[]: 1}", "no int"), ("--max_iters=-1", "max_iters=-1 is not from 0"),
    ("--dropout=1.5", "dropout=1.5 is not from 0"), ("--compile=yes", "'yes' is no bool"),
    ("--learning_rate=fast", "'fast' is no float"), ("--learning_rate=-1", "-1.0 is not from 0"),
    ("--layer_norm=foo", "layer_norm=foo is none of auto, triton, torch"),
    ("--init_from=foo", "none of scratch, resume, gpt2"), ("--dtype=int8", "none of auto, float32, bfloat16, float16"),
    ("--dataset=3", "dataset = 3 is no str"), ("-b=3", "--key=value"), ("missing.py", "missing.py cannot be used"),
    ("batchsize = 4", "batchsize: did you mean batch_size?"), ("batch_size = '3'", "'3' is no int"),
    ("dropout = float('nan')", "dropout=nan is not from 0"), ("batch_size = 1 // 0", "ZeroDivisionError"),
    ("batch_size = ", "SyntaxError"), ("import nothing_of_this_name", "ModuleNotFoundError"),
])  # fmt: skip
def test_a_mistake_is_named(tmp_path, capsys, argument, words):
    """Of an argument, or of a config file with this text."""
    if " = " in argument or "import" in argument:
        (tmp_path / "c.py").write_text(argument)
        argument = str(tmp_path / "c.py")
    assert train.main([argument]) == 2 and words in error_line(capsys)


def test_help_lists_every_key(capsys):
    with pytest.raises(SystemExit) as exit:
        configure(sample.Settings, ["--help"], "What it does")
    text = capsys.readouterr().out
    assert exit.value.code == 0 and text.startswith("What it does")
    assert all(f"--{name}=" in text for name in sample.Settings.__dataclass_fields__)


# --- preparing


def test_characters(folder):
    tokenizer = dataset.make_tokenizer(dataset.read_characters(folder))
    train, val = (tokens_in(folder, split) for split in dataset.SPLITS)
    assert tokenizer.decode([*train, *val]) == SHAKESPEARE and len(train) == len(SHAKESPEARE) * 9 // 10
    assert {path.name for path in folder.iterdir()} == {"train.bin", "val.bin", "meta.pkl"}
    theirs = pickle.loads((folder / "meta.pkl").read_bytes())  # as nanoGPT reads it
    assert theirs["vocab_size"] == len(theirs["itos"]) == len(set(SHAKESPEARE))
    assert [theirs["stoi"][character] for character in "Now"] == tokenizer.encode("Now") == train[:3].tolist()


def test_pysource(tmp_path, monkeypatch):
    """Every tenth file for validation, without tests and what is beyond ASCII."""
    library = tmp_path / "lib"
    (library / "test").mkdir(parents=True)
    for number in range(20):
        (library / f"m{number:02}.py").write_text(f"x = {number}\xe9\n")
    (library / "test" / "t.py").write_text("@@@\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(library)})
    assert run_prepare("pysource", "--output", tmp_path) == 0
    decode = dataset.make_tokenizer(dataset.read_characters(tmp_path)).decode
    train, held_out = (decode(tokens_in(tmp_path, split)) for split in ("train", "val"))
    assert held_out == "x = 0\n\nx = 10\n"
    assert train == "\n".join(f"x = {number}\n" for number in range(20) if number % 10)


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


def test_shakespeare_as_byte_pairs(folder, text_file, tiktoken):
    """Also where the data was of characters before."""
    assert run_prepare("shakespeare", "--input", text_file, "--output", folder) == 0
    assert len(tokens_in(folder, "train")) == len(SHAKESPEARE) * 9 // 10
    # Tokens that only pad the vocabulary end a text as well.
    tokenizer = dataset.make_tokenizer(dataset.read_characters(folder))
    assert tokenizer.decode([97, 50256, 50303]) == "a" + 2 * "<|endoftext|>"


@pytest.mark.parametrize("downloaded", [False, True])
def test_documents_end_where_the_next_begins(tmp_path, tiktoken, monkeypatch, downloaded):
    """Files of one's own, or what the library datasets has. The first of 2000 is for validation."""
    texts = [f"{number}" for number in range(5 if not downloaded else 2002)]
    load = Mock(return_value=[{"text": text} for text in texts])
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    files = [] if downloaded else [tmp_path / f"{text}.txt" for text in texts]
    for file in files:
        file.write_text(file.stem)
    flags = ["--input", *files] if files else []
    assert run_prepare("openwebtext", *flags, "--output", tmp_path / "out") == 0
    written = [tokens_in(tmp_path / "out", split).tolist() for split in ("val", "train")]
    documents = [[*text.encode(), 50256] for text in texts]
    held_out = documents[::2000]
    del documents[::2000]
    assert written == [sum(held_out, []), sum(documents, [])]


@pytest.mark.parametrize("name, library, failing, words", [
    ("openwebtext", "datasets", Mock(load_dataset=Mock(side_effect=RuntimeError("No\nmore"))), "(RuntimeError: No):"),
    ("openwebtext", "datasets", None, "pip install datasets"),
    ("shakespeare", "tiktoken", None, "pip install tiktoken"),
    ("shakespeare", "tiktoken", Mock(get_encoding=Mock(side_effect=ConnectionError("no"))), "TIKTOKEN_CACHE_DIR"),
    ("shakespeare_char", "tiktoken", None, "--input FILE"),
])  # fmt: skip
def test_without_library_or_network(tmp_path, tiktoken, monkeypatch, capsys, name, library, failing, words):
    monkeypatch.setattr(preparing, "SHAKESPEARE_URL", "http://127.0.0.1:9/input.txt")
    monkeypatch.setitem(sys.modules, library, failing)
    assert run_prepare(name, "--output", tmp_path / "out") == 2 and words in error_line(capsys)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xff", b"x"])
def test_preparing_that_fails_keeps_the_old_data(folder, tmp_path, monkeypatch, capsys, content):
    """No file, no text, too little text, or a folder that cannot be written to."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    path = tmp_path / "in"
    if content:
        path.write_bytes(content)
    assert run_prepare("shakespeare_char", "--input", path, "--output", folder) == 2
    assert error_line(capsys)
    monkeypatch.setattr("os.replace", Mock(side_effect=PermissionError(13, "Permission denied")))
    assert run_prepare("shakespeare_char", "--input", tmp_path / "text.txt", "--output", folder) == 2
    assert "Permission denied" in error_line(capsys)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


# --- reading


def batches(folder, split="train", block_size=16, seed=1):
    return dataset.Batches(folder, split, 4, block_size, seed)


def test_batches_are_windows_of_the_data(folder):
    inputs, targets = batches(folder)[3]
    assert inputs.shape == targets.shape == (4, 16) and inputs.dtype == np.int64
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    whole = tokens_in(folder, "train").tobytes()
    assert all(row.astype(dataset.TOKEN).tobytes() in whole for row in inputs)
    # The last token can be drawn; a batch follows from number, seed and split.
    val = tokens_in(folder, "val")
    assert (batches(folder, "val", block_size=len(val) - 1)[0][1] == val[1:]).all()
    (folder / "val.bin").write_bytes(whole)
    others = batches(folder)[4], batches(folder, seed=2)[3], batches(folder, "val")[3]
    assert (batches(folder)[3][0] == inputs).all() and not any((other == inputs).all() for other, _ in others)


@pytest.mark.parametrize("name, content", [
    ("train.bin", None), ("train.bin", b"odd"), ("train.bin", b""), ("train.bin", b"\0" * 32),
    ("meta.pkl", b""), ("meta.pkl", b"\x80"), ("meta.pkl", pickle.dumps(3)), ("meta.pkl", pickle.dumps({"itos": {}})),
])  # fmt: skip
def test_a_file_that_is_missing_or_damaged(tmp_path, name, content):
    """Or too short for a batch."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match="cannot be used .*: run python .*prepare.py") as error:
        batches(tmp_path) if name == "train.bin" else dataset.read_characters(tmp_path)
    assert "\n" not in str(error.value)


NANOGPT = dict(vocab_size=3, itos={0: "\n", 1: "a", 2: "b"}, stoi={"\n": 0, "a": 1, "b": 2})


def test_data_of_nanogpt(tmp_path):
    """GPT-2's tokens have no meta.pkl."""
    assert dataset.read_characters(tmp_path) is None
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(NANOGPT, protocol))
        assert dataset.read_characters(tmp_path) == "\nab"


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
    with pytest.raises(UsageError, match=r"cannot be used \(UnpicklingError: it names "):
        dataset.read_characters(tmp_path)
    assert not Path("touched").exists()
