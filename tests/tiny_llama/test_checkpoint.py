"""A model in a folder: it comes back bit by bit, transformers reads it, and what does not fit is refused by name."""

import dataclasses
import errno
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import tiny_llama_v3 as llama
from tiny_llama import checkpoint
from tiny_llama.hugging_face_weights import to_hugging_face

safetensors = pytest.importorskip("safetensors.torch")
CONFIG = llama.Config(
    hidden_dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_dim=48,
    vocab_size=97,
    norm_eps=1e-3,
    batch_size=2,
    seq_len=16,
    impl="torch",
    device="cpu",
)
OTHERS = dict(untied_head=True, num_kv_heads=1, rope_theta=500.0)
TENSORS = {"exp_avg/norm.weight": torch.rand(32), "beta_powers": torch.rand(3, 2, dtype=torch.float64)}


def make_model(config):
    """A model whose norms are not 1 and whose logits are far apart."""
    torch.manual_seed(config.seed)
    model = llama.TinyLlamaTriton(config, llama.OPERATIONS["torch"])
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter.data, -0.2, 0.5)
    return model


def save(folder, config=CONFIG, number=7):
    """Write a model to a folder and return its weights."""
    weights = {name: p.data for name, p in make_model(config).named_parameters()}
    checkpoint.write(folder, config, weights.items(), number, TENSORS)
    return weights


def read(folder, config=CONFIG):
    names = [name for name, _ in make_model(config).named_parameters()]
    return checkpoint.read_weights(folder, names, "--init-from")


def are_equal(some, others):
    """Whether two {name: tensor} have the same names, in this order, types and bits."""
    same = [a.dtype == b.dtype and a.equal(b) for a, b in zip(some.values(), others.values(), strict=True)]
    return list(some) == list(others) and all(same)


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def change_config(folder, **changes):
    path = Path(folder, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder, **changes):
    """Replace, add or remove (None) weights in model.safetensors."""
    path = Path(folder, "model.safetensors")
    weights = {name: tensor.clone() for name, tensor in safetensors.load_file(path).items()}
    weights |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    safetensors.save_file({name: t for name, t in weights.items() if t is not None}, path, {"format": "pt"})


def refused(function, *arguments):
    """Return the message of a UsageError, which is one line."""
    with pytest.raises(llama.UsageError) as raised:
        function(*arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# --- what was written comes back


@pytest.mark.parametrize("changes", [{}, OTHERS], ids=["tied", "untied"])
def test_a_model_comes_back_bit_by_bit(tmp_path, changes):
    looked_at = dict(check=True, profile="a folder")
    config = dataclasses.replace(CONFIG, **changes, **looked_at, init_from="elsewhere", save="before it was moved")
    (tmp_path / "notes.txt").write_text("of a person")
    former = os.umask(0o027)
    try:
        weights = save(tmp_path, config)
    finally:
        os.umask(former)
    assert are_equal(weights, read(tmp_path, config))
    fields = checkpoint.model_fields(tmp_path, "--init-from")
    assert all(getattr(config, name) == value for name, value in fields.items())
    assert fields.keys() == {*checkpoint.HF_SIZES, "rope_theta", "untied_head"}
    saved = llama.Config(**checkpoint.training_fields(tmp_path, "--resume"))
    assert saved == dataclasses.replace(config, save=str(tmp_path), init_from=None, check=False, profile=None)
    number, tensors = checkpoint.read_training(tmp_path, "--resume")
    assert number == 7 and are_equal(dict(sorted(TENSORS.items())), dict(sorted(tensors.items())))
    files = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert files.pop("notes.txt") and files == dict.fromkeys(
        ["config.json", checkpoint.MODEL, checkpoint.TRAINING], 0o640
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_any_float_type_become_fp32(tmp_path, dtype):
    weights = save(tmp_path)
    theirs = dict(to_hugging_face(weights.items(), CONFIG))
    change_weights(tmp_path, **{name.replace(".", "__"): t.to(dtype) for name, t in theirs.items()})
    assert are_equal({name: weight.to(dtype).float() for name, weight in weights.items()}, read(tmp_path))


def test_weights_do_not_change_with_the_file(tmp_path):
    weights = save(tmp_path)
    found, tensors = read(tmp_path), checkpoint.read_training(tmp_path, "--resume")[1]
    for name in (checkpoint.MODEL, checkpoint.TRAINING):
        with open(tmp_path / name, "r+b") as file:
            file.write(bytes((tmp_path / name).stat().st_size))
    assert are_equal(weights, found) and tensors["beta_powers"].equal(TENSORS["beta_powers"])


# --- transformers


@pytest.fixture
def transformers():
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    return transformers


@pytest.mark.parametrize("changes", [{}, OTHERS], ids=["tied", "untied"])
def test_transformers_loads_it_and_has_the_same_logits(tmp_path, transformers, changes, capsys):
    config, tokens = dataclasses.replace(CONFIG, **changes), torch.arange(32).view(2, 16)
    save(tmp_path, config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert capsys.readouterr().err == ""  # no warning
    assert type(theirs) is transformers.LlamaForCausalLM and theirs.dtype == torch.float32
    assert theirs.config.max_position_embeddings == 16 and theirs.config.eos_token_id is None
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_theta"] == config.rope_theta  # where transformers 4 looks for it
    torch.testing.assert_close(make_model(config)(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("size", ["20KB", "1GB"])
def test_what_transformers_has_written_is_read(tmp_path, transformers, tied, size):
    sizes = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    rope = dict(rope_type="default", rope_theta=500.0)
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, initializer_range=0.2, rope_parameters=rope, tie_word_embeddings=tied)
    )
    theirs.save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / checkpoint.INDEX).exists() == (size == "20KB")
    fields = checkpoint.model_fields(tmp_path, "--init-from")
    assert (fields["num_kv_heads"], fields["norm_eps"], fields["untied_head"]) == (4, 1e-6, not tied)
    config, tokens = dataclasses.replace(CONFIG, **fields), torch.arange(32).view(2, 16)
    model = make_model(config)
    model.load_state_dict(read(tmp_path, config))
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_what_config_json_does_not_say_is_as_in_transformers(tmp_path, transformers):
    theirs = transformers.LlamaConfig()
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_key_value_heads": null}')
    fields = checkpoint.model_fields(tmp_path, "--init-from")
    assert {fields.pop("rope_theta"), not fields.pop("untied_head")} == {
        theirs.rope_parameters["rope_theta"], theirs.tie_word_embeddings
    }  # fmt: skip
    assert fields == {ours: getattr(theirs, name) for ours, name in checkpoint.HF_SIZES.items()}


@pytest.mark.parametrize("changes, theta", [
    (dict(rope_theta=5e5, rope_parameters=None, rope_scaling=None), 5e5),
    (dict(rope_theta=1.0, rope_parameters=dict(rope_type="default", rope_theta=5e5)), 5e5),
    (dict(rope_theta=5e5, rope_parameters=None, rope_scaling=dict(type="default")), 5e5),
], ids=["version 4", "version 5", "in both"])  # fmt: skip
def test_the_base_of_rotary_embedding_is_found(tmp_path, changes, theta):
    save(tmp_path)
    change_config(tmp_path, **changes)
    assert checkpoint.model_fields(tmp_path, "--init-from")["rope_theta"] == theta


# --- what is refused

UNSUPPORTED = """
model_type="gpt2"                                          | model_type is 'gpt2', and only 'llama'
model_type=None                                            | model_type is None, and only 'llama'
hidden_act="gelu"                                          | hidden_act is 'gelu', and only 'silu'
attention_bias=True                                        | attention_bias is True, and only False
mlp_bias=True                                              | mlp_bias is True, and only False
is_causal=False                                            | is_causal is False, and only True
quantization_config=dict(bits=4)                           | quantization_config is {'bits': 4}, and only None
head_dim=16                                                | head_dim is 16, and only 8
rope_parameters=dict(rope_type="llama3", factor=2.0)       | rope_type is 'llama3', and only 'default'
rope_scaling=dict(rope_type="yarn", factor=2.0)            | rope_type is 'yarn', and only 'default'
rope_scaling=dict(type="linear", factor=2.0)               | type is 'linear', and only 'default'
rope_parameters=dict(full_attention=dict(rope_theta=1.0))  | rope_parameters is {'full_attention':
rope_parameters="default"                                  | rope_parameters is 'default'
partial_rotary_factor=0.5                                  | partial_rotary_factor is 0.5, and only 1.0
rms_norm_eps=float("nan")                                  | config.json: rms_norm_eps nan is out of range
rope_theta=-1.0, rope_parameters=None                      | config.json: rope_theta -1.0 is out of range
num_key_value_heads=3                                      | num_attention_heads 4 is not divisible by num_key_value
num_attention_heads=0                                      | num_attention_heads 0 is out of range
num_attention_heads="4"                                    | num_attention_heads '4' is of the type str
hidden_size=36, head_dim=None                              | gives 9 dimensions a head
tie_word_embeddings="no"                                   | tie_word_embeddings is 'no': give true or false
""".strip().splitlines()


@pytest.mark.parametrize("line", UNSUPPORTED)
def test_a_model_that_ours_cannot_compute_is_named(tmp_path, line):
    changes, words = line.split("|")
    save(tmp_path)
    change_config(tmp_path, **eval(f"dict({changes})"))
    message = refused(checkpoint.model_fields, tmp_path, "--init-from")
    assert words.strip() in message and message.startswith(f"--init-from {tmp_path}")


WRONG_WEIGHTS = """
model__norm__weight=None                         | lacks model.norm.weight: give
model__norm__weight=None, model__embed_tokens__weight=None | lacks model.embed_tokens.weight and 1 more
other=torch.zeros(1)                             | has, beside the model's, other: give
lm_head__weight=torch.zeros(97, 32)              | tie_word_embeddings is true beside another lm_head.weight
model__norm__weight=torch.zeros(16)              | model.norm.weight has the shape [16], and config.json says [32]
model__norm__weight=torch.zeros(32).int()        | model.norm.weight is of the type torch.int32
model__norm__weight=torch.full((32,), torch.nan) | model.norm.weight holds weights that are not finite
model__norm__weight=torch.full((32,), 1e39, dtype=torch.float64) | model.norm.weight holds weights that are not finite
""".strip().splitlines()


@pytest.mark.parametrize("line", WRONG_WEIGHTS)
def test_weights_that_do_not_fit_are_named(tmp_path, line):
    changes, words = line.split("|")
    save(tmp_path)
    change_weights(tmp_path, **eval(f"dict({changes})"))
    message = refused(read, tmp_path)
    assert words.strip() in message and message.startswith(f"--init-from {tmp_path}")


def test_a_shift_of_rows_between_stacked_weights_is_found(tmp_path):
    """Stacked, they would have the right shape."""
    save(tmp_path)
    name = "model__layers__1__self_attn__{}_proj__weight"
    change_weights(tmp_path, **{name.format("q"): torch.zeros(30, 32), name.format("k"): torch.zeros(18, 32)})
    assert "q_proj.weight has the shape [30, 32]" in refused(read, tmp_path)


def test_a_tied_head_and_old_buffers_may_be_among_the_weights(tmp_path):
    weights = save(tmp_path)
    buffers = {"model__layers__0__self_attn__rotary_emb__inv_freq": torch.rand(4)}
    change_weights(tmp_path, lm_head__weight=weights["embed_tokens.weight"].clone(), **buffers)
    assert are_equal(weights, read(tmp_path))


@pytest.mark.parametrize("name, spoil, words", [
    ("config.json", os.remove, "config.json cannot be read (No such file"),
    ("config.json", lambda path: path.write_text("[1]"), "it holds no object"),
    ("config.json", lambda path: path.write_text("[" * 10**5), "RecursionError"),
    ("config.json", lambda path: path.write_bytes(b'{"model_type": "\xff"}'), "UnicodeDecodeError"),
    ("config.json", lambda path: path.unlink() or os.mkfifo(path), "not a regular file"),
    ("model.safetensors", os.remove, "model.safetensors cannot be read (No such file"),
    ("model.safetensors", lambda path: path.unlink() or os.mkfifo(path), "not a regular file"),
    ("model.safetensors", lambda path: path.unlink() or path.symlink_to("/dev/zero"), "not a regular file"),
    ("model.safetensors", lambda path: os.truncate(path, 1000), "SafetensorError"),
    ("model.safetensors", lambda path: os.remove(path) or write_index(path.parent, 1), "has no weight_map of names"),
    ("model.safetensors", lambda path: os.remove(path) or write_index(path.parent, {"a": 1}), "has no weight_map"),
    ("model.safetensors", lambda path: os.remove(path) or write_index(path.parent, {"a": "../x"}), "names '../x'"),
    ("model.safetensors", lambda path: os.remove(path) or write_index(path.parent, {"a": "/x"}), "names '/x'"),
    ("model.safetensors", lambda path: os.remove(path) or write_index(path.parent, {"a": "x"}), "x cannot be read (No"),
])  # fmt: skip
def test_a_folder_that_cannot_be_read_is_one_line(tmp_path, name, spoil, words):
    save(tmp_path)
    spoil(tmp_path / name)
    message = refused(read, tmp_path)
    assert words in message and message.startswith(f"--init-from {tmp_path}")
    assert message.endswith(": mend it" if "names " in words else ": give another folder")


def write_index(folder, weight_map):
    (folder / checkpoint.INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "safetensors.torch")
    for call in (checkpoint.require_free, checkpoint.model_fields, checkpoint.training_fields):
        assert "--flag needs the library safetensors" in refused(call, tmp_path / "new", "--flag")
    assert not (tmp_path / "new").exists()


# --- saves that fail, and saves that do not belong together


@pytest.fixture
def spare(tmp_path, monkeypatch):
    """Folders to which a model can go if its own is full: the temporary one, the user's and this one."""
    for name in ("temporary", "home", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


@pytest.mark.parametrize("full", ["run", "run temporary", "run temporary home here"])
@pytest.mark.parametrize("spoiled", ["model", "training"])
def test_a_full_disk_leaves_the_former_save_and_the_model_is_kept_elsewhere(spare, monkeypatch, full, spoiled):
    save(spare / "run", number=1)
    before, save_file = contents(spare / "run"), safetensors.save_file

    def save_unless_full(tensors, path, metadata):
        save_file(tensors, path, metadata)
        if set(full.split()) & set(path.parts) and path.stem == spoiled:
            os.truncate(path, 100)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(safetensors, "save_file", save_unless_full)
    message = refused(save, spare / "run")
    assert message.startswith(f"--save {spare / 'run'} cannot be written (No space left on device)")
    assert contents(spare / "run") == before
    kept = [path.parent for path in spare.glob("*/tiny_llama_*/training.safetensors")]
    if "here" in full:
        assert not kept and not list(spare.glob("*/tiny_llama_*"))
    else:
        assert message.endswith(f"the trained model is in {kept[0]}") and read(kept[0]) and len(kept) == 1
        assert kept[0].parent == spare / ("home" if "temporary" in full else "temporary")
        assert list(spare.glob("*/tiny_llama_*")) == kept


def test_a_model_that_another_run_has_saved_meanwhile_stays(spare):
    folder = spare / "run"
    config = dataclasses.replace(CONFIG, save=str(folder))
    save(folder, config)
    before = contents(folder)
    message = refused(save, folder, config)
    (kept,) = spare.glob("*/tiny_llama_*")
    remedy = f"give another folder, or --resume {folder}"
    assert message == f"--save {folder} holds a model already: {remedy}; the trained model is in {kept}"
    assert contents(folder) == before and read(kept)
    save(folder, dataclasses.replace(config, resume=str(folder)), number=8)  # the run that goes on with it
    assert contents(folder) != before


class Killed(BaseException):
    """SIGKILL: nothing of ours runs after it."""


@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_a_process_that_is_killed_leaves_one_save_or_a_mixture_that_is_refused(tmp_path, monkeypatch, renamed):
    """One after the other, config.json, model.safetensors and training.safetensors get their names."""
    former = save(tmp_path, number=1)
    rename, done, config = os.replace, [], dataclasses.replace(CONFIG, seed=1)

    def rename_or_die(written, target):
        if len(done) == renamed:
            raise Killed
        rename(written, target)
        done.append(target.name)

    monkeypatch.setattr(os, "replace", rename_or_die)
    with pytest.raises(Killed):
        save(tmp_path, config, number=2)
    assert done == ["config.json", "model.safetensors"][:renamed]
    if renamed < 2:  # config.json is the same in both
        assert are_equal(former, read(tmp_path)) and checkpoint.read_training(tmp_path, "--resume")[0] == 1
    else:
        assert not are_equal(former, read(tmp_path))
        for call in (checkpoint.training_fields, checkpoint.read_training):
            message = refused(call, tmp_path, "--resume")
            assert f"are not of one --save: --init-from {tmp_path}" in message


def test_saves_of_two_runs_in_one_folder_are_refused(tmp_path):
    save(tmp_path / "one")
    save(tmp_path / "two", dataclasses.replace(CONFIG, rope_theta=500.0))
    for name in ("config.json", "model.safetensors", "training.safetensors"):
        mixed = shutil.copytree(tmp_path / "one", tmp_path / name)
        shutil.copy(tmp_path / "two" / name, mixed)
        assert "are not of one --save" in refused(checkpoint.read_training, mixed, "--resume")


def test_training_that_cannot_go_on_is_named(tmp_path):
    save(tmp_path)
    path = tmp_path / "training.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()

    def message(**changes):
        safetensors.save_file(TENSORS, path, metadata | changes)
        return refused(checkpoint.training_fields, tmp_path, "--resume")

    assert "is of another version, with future_field:" in message(config='{"future_field": 1}')
    assert "training.safetensors cannot be read (ValueError" in message(steps="many")
    assert "training.safetensors cannot be read (JSONDecodeError" in message(config="{")
    assert "training.safetensors cannot be read (ValueError" in message(config="1")
    os.truncate(path, 100)
    assert "SafetensorError" in refused(checkpoint.read_training, tmp_path, "--resume")
    path.unlink()
    message = refused(checkpoint.read_training, tmp_path, "--resume")
    assert f"has no training.safetensors: --init-from {tmp_path} starts from the weights alone" in message


def test_a_folder_that_holds_a_model_is_free_only_for_the_run_that_goes_on_with_it(tmp_path, monkeypatch):
    folder, other = tmp_path / "run", tmp_path / "other"
    checkpoint.require_free(folder, "--save")
    assert folder.is_dir()
    (folder / "notes.txt").write_text("of a person")
    checkpoint.require_free(folder, "--save", other)
    save(other)
    for name in ("config.json", "model-00001-of-00002.safetensors", "training.safetensors"):
        (folder / name).touch()
        for resumed in (None, other, tmp_path / "none"):
            message = refused(checkpoint.require_free, folder, "--save", resumed)
            assert message == f"--save {folder} holds a model already: give another folder, or --resume {folder}"
        checkpoint.require_free(folder, "--save", tmp_path / "other/../run")
        (folder / name).unlink()
    monkeypatch.chdir(folder)
    assert "--save '' names no folder" in refused(checkpoint.require_free, "", "--save")
    (tmp_path / "file").touch()
    assert "--save" in refused(checkpoint.require_free, tmp_path / "file", "--save")
