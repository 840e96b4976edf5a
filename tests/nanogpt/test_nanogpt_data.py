"""nanogpt_triton's settings and data: what is read, what is refused, and that files run no code."""

import dataclasses
import os
import pickle
import runpy
import sys
import sysconfig
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from measure.command_line import UsageError
from nanogpt_triton import dataset, sample, train
from nanogpt_triton.configurator import Count, Share, configure
from nanogpt_triton.data import preparing
from tests.nanogpt.test_nanogpt import printed

FOLDER = Path(dataset.__file__).parent
SHAKESPEARE = "Now is the winter of our discontent\nMade glorious summer by this sun of York;\n" * 30


def run_prepare(name, *arguments, code=0):
    """Run data/name/prepare.py in this process. Return what it prints."""
    path = str(FOLDER / "data" / name / "prepare.py")

    def main(arguments):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
            patch.setattr(sys, "argv", [path, *map(str, arguments)])
            patch.setattr(sys, "path", [*sys.path])
            runpy.run_path(path, run_name="__main__")
        return end.value.code or 0

    return printed(code, main, *arguments)


def tokens_in(folder, split):
    return np.fromfile(folder / f"{split}.bin", dataset.TOKEN)


@pytest.fixture
def folder(tmp_path):
    """A dataset of characters, of the text in a file beside it."""
    (tmp_path / "text.txt").write_text(SHAKESPEARE)
    run_prepare("shakespeare_char", "--input", tmp_path / "text.txt", "--output", tmp_path / "mine")
    return tmp_path / "mine"


# --- settings


def settings_of(*argv):
    return configure(train.Settings, argv, "")


def test_later_settings_win(tmp_path):
    config = tmp_path / "c.py"
    config.write_text('"""Mine."""\nbatch_size = 3\nmax_iters = 1_000  # many\ndataset = "mine"\nlearning_rate = 1\n')
    settings = settings_of("--batch_size=5", str(config), "--max_iters=7", "--compile=False", "--deterministic")
    assert (settings.batch_size, settings.max_iters, settings.dataset) == (3, 7, "mine")
    assert repr(settings.learning_rate) == "1.0" and (settings.compile, settings.deterministic) == (False, True)
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
    """They set settings only, for datasets that can be prepared; sample.py takes from them what it needs."""
    for kind in (train.Settings, sample.Settings):
        settings = configure(kind, [str(path)], "")
        assert {key for key in runpy.run_path(str(path)) if key[0] != "_"} <= vars(settings).keys()
        assert (FOLDER / "data" / settings.dataset / "prepare.py").exists()


@pytest.mark.parametrize("argument, words", [
    ("--batchsize=3", "batchsize: did you mean batch_size?"), 
    ("--zzz=3", "zzz: --help"), ("--batch_size=x", "batch_size = 'x' is no int"), ("--batch_size=2.5", "2.5 is no int"),
    ("--batch_size", "write --batch_size=VALUE, such as 12"), ("--batch_size=True", "True is no int"),
    ("--layer_norm", "write --layer_norm=VALUE"), ("--batch_size=0", "batch_size=0 is not from 1"),
    ("--max_iters=-1", "max_iters=-1 is not from 0"),
    ("--dropout=1.5", "dropout=1.5 is not from 0"), ("--learning_rate=-1", "-1.0 is not from 0"),
    ("--learning_rate=1e999", "inf is not from 0 to 1.79"), (f"--learning_rate=1{400 * '0'}", "give a smaller"),
    (f"--seed={2**63}", f"is not from 0 to {2**63 - 1}"), ("--seed=-1", "seed=-1 is not from 0"),
    (f"--warmup_iters=1{400 * '0'}", "is not from 0"), (f"--n_embd={2**31}", "is not from 1 to 2147483647"),
    ("--layer_norm=foo", "layer_norm=foo is none of auto, triton, torch"),
    ("-b=3", "--key=value"), ("missing.py", "looked for from the current folder"), ("/dev/zero", "not a regular file"),
    ("batchsize = 4", "batchsize: did you mean batch_size?"), ("dropout = float('nan')", "dropout=nan is not from 0"),
    ("batch_size = 1 // 0", "ZeroDivisionError"),
])  # fmt: skip
def test_a_mistake_is_named(tmp_path, argument, words):
    """Of an argument, or of a config file with this text."""
    if " = " in argument:
        (tmp_path / "c.py").write_text(argument)
        argument = str(tmp_path / "c.py")
    assert words in printed(2, train.main, argument)


@dataclasses.dataclass
class Numbers:
    """A setting of each kind that has limits."""

    share: Share = 0.5
    count: Count = 5
    whole: int = 5
    number: float = 0.5


@pytest.mark.parametrize("key, least, below, most, above", [
    ("share", "0", "-1e-9", "0.9999", "1"), ("count", "1", "0", str(2**31 - 1), str(2**31)),
    ("whole", "0", "-1", str(2**63 - 1), str(2**63)), ("number", "0", "-1e-300", "1.7976931348623157e308", "1e309"),
])  # fmt: skip
def test_the_ends_of_a_range_belong_to_it(key, least, below, most, above):
    """And what lies next to them does not: with dropout=1 nothing is left, and beta2=1 divides by zero."""
    for value in (least, most):
        assert getattr(configure(Numbers, [f"--{key}={value}"], ""), key) == type(getattr(Numbers, key))(value)
    for value in (below, above):
        with pytest.raises(UsageError, match=f"^{key}=.* is not from {least} to "):
            configure(Numbers, [f"--{key}={value}"], "")


def test_shares_are_refused_from_one_on():
    for key in ("dropout", "beta1", "beta2"):
        assert f"error: {key}=1.0 is not from 0 to 0.9999" in printed(2, train.main, f"--{key}=1")


@pytest.mark.parametrize("argument", [
    f"--seed={10**20}", "--seed=-1", "--num_samples=0", "--num_samples=-1", "--max_new_tokens=-1",
    f"--max_new_tokens={2**31}", "--temperature=-1", "--temperature=1e999", "--top_k=-1", "--top_k=2.5",
    f"--top_k={10**20}",
])  # fmt: skip
def test_a_number_out_of_range_is_refused_by_sample_as_well(argument):
    key, _, value = argument.removeprefix("--").partition("=")
    error = printed(2, sample.main, argument)
    assert f"error: {key}=" in error and "is not from" in error or f"{key} = {value} is no int" in error


def test_help_lists_every_key(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        configure(sample.Settings, ["--help"], None)  # as with python -OO
    text = capsys.readouterr().out
    assert all(f"--{key}=" in text for key in vars(sample.Settings()))


# --- preparing


def test_characters(folder):
    tokenizer = dataset.make_tokenizer(dataset.read_texts(folder))
    train, val = (tokens_in(folder, split) for split in dataset.SPLITS)
    assert tokenizer.decode([*train, *val]) == SHAKESPEARE and len(train) == len(SHAKESPEARE) * 9 // 10
    theirs = pickle.loads((folder / "meta.pkl").read_bytes())  # as nanoGPT reads it
    assert theirs["vocab_size"] == len(theirs["itos"]) == len(set(SHAKESPEARE))
    assert [theirs["stoi"][character] for character in "Now"] == train[:3].tolist()


def test_pysource(tmp_path, monkeypatch):
    """Every tenth file for validation, without tests and what is beyond ASCII."""
    library, texts = tmp_path / "lib", [f"x = {number}\n" for number in range(20)]
    (library / "test").mkdir(parents=True)
    (library / "test" / "t.py").write_text("@@@\n")
    for number, text in enumerate(texts):
        (library / f"m{number:02}.py").write_text(f"\xe9{text}")
    paths = sysconfig.get_paths
    monkeypatch.setattr(sysconfig, "get_paths", lambda *scheme: paths(*scheme) | {"stdlib": str(library)})
    run_prepare("pysource", "--output", tmp_path)
    decode = dataset.make_tokenizer(dataset.read_texts(tmp_path)).decode
    expected = "\n".join(texts[1:10] + texts[11:]), f"{texts[0]}\n{texts[10]}"
    assert tuple(decode(tokens_in(tmp_path, split)) for split in ("train", "val")) == expected


@pytest.fixture
def tiktoken(monkeypatch):
    """Bytes as tokens; stands in for tiktoken's, which need a network at first."""
    encoding = Mock()
    encoding.encode = lambda text, allowed_special: [*text.encode()]
    encoding.encode_ordinary_batch = lambda texts: [[*text.encode()] for text in texts]
    encoding.decode = lambda tokens: ["<|endoftext|>" if token == 50256 else chr(range(256)[token]) for token in tokens]
    monkeypatch.setitem(sys.modules, "tiktoken", Mock(get_encoding=lambda name: encoding))


def test_shakespeare_as_byte_pairs(folder, tiktoken, monkeypatch):
    """Also where the data was of characters before. What was downloaded is not fetched again."""
    monkeypatch.setattr(preparing, "SHAKESPEARE_URL", "http://127.0.0.1:9/input.txt")
    (folder / "input.txt").write_text(SHAKESPEARE)
    run_prepare("shakespeare", "--output", folder)
    assert len(tokens_in(folder, "train")) == len(SHAKESPEARE) * 9 // 10
    # Tokens that only pad the vocabulary end a text as well.
    tokenizer = dataset.make_tokenizer(dataset.read_texts(folder))
    assert tokenizer.decode([97, 50256, 50303]) == ["a", "<|endoftext|>", "<|endoftext|>"]


@pytest.mark.parametrize("downloaded", [False, True])
def test_documents_end_where_the_next_begins(tmp_path, tiktoken, monkeypatch, downloaded):
    """Files of one's own, or what the library datasets has. The first of 2000 is for validation."""
    files = [tmp_path / f"{number}.txt" for number in range(2002)]
    for file in files:
        file.write_text(file.stem)
    load = Mock(return_value=[{"text": file.stem} for file in files])
    monkeypatch.setitem(sys.modules, "datasets", Mock(load_dataset=load))
    run_prepare("openwebtext", *([] if downloaded else ["--input", *files]), "--output", tmp_path)
    documents = [[*file.stem.encode(), 50256] for file in files]
    assert tokens_in(tmp_path, "val").tolist() == documents.pop(0) + documents.pop(1999)
    assert tokens_in(tmp_path, "train").tolist() == sum(documents, [])


@pytest.mark.parametrize("name, library, failing, words", [
    ("openwebtext", "datasets", Mock(load_dataset=Mock(side_effect=RuntimeError("No\nmore"))), "(RuntimeError: No):"),
    ("shakespeare", "tiktoken", Mock(get_encoding=Mock(side_effect=ConnectionError("no"))), "TIKTOKEN_CACHE_DIR"),
    ("shakespeare_char", "tiktoken", None, "--input FILE"),
])  # fmt: skip
def test_without_library_or_network(tmp_path, tiktoken, monkeypatch, name, library, failing, words):
    monkeypatch.setattr(preparing, "SHAKESPEARE_URL", "http://127.0.0.1:9/input.txt")
    monkeypatch.setitem(sys.modules, library, failing)
    assert words in run_prepare(name, "--output", tmp_path, code=2)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xff", b"x", b"enough"])
def test_preparing_that_fails_keeps_the_old_data(folder, monkeypatch, content):
    """No file, no text, too little text, or a folder that cannot be written to."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    text = folder.parent / "text.txt"
    text.unlink() if content is None else text.write_bytes(content)
    monkeypatch.setattr("os.replace", Mock(side_effect=PermissionError(13, "Permission denied")))
    error = run_prepare("shakespeare_char", "--input", text, "--output", folder, code=2)
    assert ("Permission denied" in error) == (content == b"enough")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


# --- reading


def batches(folder, split="train", block_size=16, seed=1):
    return dataset.Batches(folder, split, 4, block_size, seed, 2**16)


def test_batches_are_windows_of_the_data(folder):
    inputs, targets = batches(folder)[3]
    assert inputs.shape == targets.shape == (4, 16) and inputs.dtype == np.int64
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    whole, val = (tokens_in(folder, split) for split in dataset.SPLITS)
    assert all(bytes(row.astype(dataset.TOKEN)) in bytes(whole) for row in inputs)
    # The last token can be drawn; a batch follows from number, seed and split.
    assert (batches(folder, "val", block_size=len(val) - 1)[0][1] == val[1:]).all()
    whole.tofile(folder / "val.bin")
    others = batches(folder)[4], batches(folder, seed=2)[3], batches(folder, "val")[3]
    assert [(batch[0] == inputs).all() for batch in (batches(folder)[3], *others)] == [True, False, False, False]


@pytest.mark.parametrize("name, content", [
    ("train.bin", None), ("train.bin", b""), ("train.bin", b"\0" * 32), ("train.bin", b"\0" * 99),
    ("train.bin", os.mkfifo),
])  # fmt: skip
def test_a_file_that_is_missing_or_damaged(tmp_path, name, content):
    """Or too short for a batch, or no file."""
    if content is not None:
        content(tmp_path / name) if callable(content) else (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match="cannot be used .*: prepare it, or give another dataset of") as error:
        batches(tmp_path)
    assert "\n" not in str(error.value)


def test_a_dataset_that_is_not_there(tmp_path, folder):
    """Its program is named if it has one, else the datasets beside it."""
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "prepare.py").touch()
    with pytest.raises(UsageError, match=f"cannot be used .*: run python {tmp_path}/new/prepare.py; "):
        batches(tmp_path / "new")
    with pytest.raises(UsageError, match=f"cannot be used .*: .* another dataset of {tmp_path}: mine, new$"):
        batches(tmp_path / "nope")


@pytest.mark.parametrize("content, texts", [
    ({"vocab_size": 3}, [None] * 3), ({"vocab_size": 3, "itos": {}, "stoi": {}}, [None] * 3),
    ({"itos": ["a", "b"]}, ["a", "b"]), ({"itos": ("a", b"\xff")}, ["a", "\udcff"]), ({"itos": "ab"}, ["a", "b"]),
    ({"itos": {0: "a", 2: "c"}}, ["a", None, "c"]), ({"vocab_size": 2, "stoi": {"a": 0, "b": 1}}, ["a", "b"]),
    ({"vocab_size": 4, "itos": {0: "a", 1: "b"}, "stoi": {}, "more": [1]}, ["a", "b", None, None]),
    ({"vocab_size": 1, "itos": {0: "a", 1: "b"}}, ["a"]), ({"vocab_size": 2, "itos": [None, "b"]}, [None, "b"]),
    *[({"vocab_size": size, "itos": "ab"}, "vocab_size") for size in (0, -1, 2**16 + 1, 10**30, float("nan"))],
    *[(wrong, "it needs vocab_size") for wrong in (
        {"vocab_size": "2"}, {"vocab_size": 2, "itos": {"0": "a"}}, {"vocab_size": 2, "itos": {"ab"}},
        {"vocab_size": 2, "itos": 5}, {"vocab_size": None}, {}, {"itos": {}}, [], None, "ab",
    )],
    *[({"vocab_size": 1, "itos": [wrong]}, "itos.0. is ") for wrong in (5, 0.5, ["a"], {})],
    ({"vocab_size": 1, "itos": ["\ud800"]}, "surrogates"), ({"vocab_size": np.int64(3)}, "could run code"),
], ids=str)  # fmt: skip
def test_the_meta_that_other_programs_write(tmp_path, content, texts):
    """As in nanoGPT, vocab_size counts. Without it there are as many tokens as texts."""
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(content))
    if isinstance(texts, list):
        assert dataset.read_texts(tmp_path) == texts
    else:
        with pytest.raises(UsageError, match=f"meta.pkl cannot be used .*{texts}") as error:
            dataset.read_texts(tmp_path)
        assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize("content", [b"", b"\x80", b"text", os.mkfifo])
def test_a_meta_that_is_damaged(tmp_path, content):
    content(tmp_path / "meta.pkl") if callable(content) else (tmp_path / "meta.pkl").write_bytes(content)
    with pytest.raises(UsageError, match="meta.pkl cannot be used .*: it needs vocab_size, and itos"):
        dataset.read_texts(tmp_path)


@pytest.mark.parametrize("texts, text, tokens", [
    ("abc", "cab", [2, 0, 1]), (["a", "ab", "abc", "b"], "abcabba", [2, 1, 3, 0]), (["", "a", None], "aa", [1, 1]),
    (["é", "\udcc3", "\udca9", "\udce2"], "é", [0]), (["\udcc3", "\udca9"], "é", [0, 1]),
    (["<|end|>", "<"], "<<|end|>", [1, 0]),
])  # fmt: skip
def test_words_and_bytes_are_found_and_written(texts, text, tokens):
    vocabulary = dataset.Vocabulary(texts)
    assert vocabulary.encode(text) == tokens and vocabulary.decode(tokens) == text
    with pytest.raises(UsageError, match="no token for 'zz'"):
        vocabulary.encode(text + "zz")


def test_a_token_without_a_text_is_shown():
    """One in a gap, and one that pads the vocabulary; a text may be empty."""
    assert dataset.Vocabulary(["a", None, ""]).decode([0, 1, 2, 3, 0]) == "a\ufffd\ufffda"
    assert dataset.Vocabulary(["\udcff", "a"]).decode([0, 1]) == "\ufffda"


def test_data_that_becomes_shorter_ends_a_run_in_a_line(folder):
    data = batches(folder)
    os.truncate(folder / "train.bin", 40)
    with pytest.raises(UsageError, match="train.bin cannot be used .*shorter while"):
        data[0]


class Payload:
    """What a pickle would do when it is loaded."""

    def __reduce__(self):
        return open, ("touched", "w")


@pytest.mark.parametrize("protocol", [0, 4])
@pytest.mark.parametrize("more", [None, Payload()])
def test_a_pickle_of_nanogpt_runs_no_code(tmp_path, monkeypatch, more, protocol):
    """GPT-2's tokens have none."""
    monkeypatch.chdir(tmp_path)
    assert dataset.read_texts(tmp_path) is None
    content = dict(vocab_size=3, itos={0: "\n", 1: "a", 2: "b"}, more=more)
    Path("meta.pkl").write_bytes(pickle.dumps(content, protocol))
    if more is None:
        assert dataset.read_texts(tmp_path) == ["\n", "a", "b"]
    else:
        with pytest.raises(UsageError, match=r"cannot be used \(UnpicklingError: it names "):
            dataset.read_texts(tmp_path)
    assert not Path("touched").exists()
