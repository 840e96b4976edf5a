"""The examples: weights of Hugging Face's format go in and come out, kernels are swapped, errors are one line."""

import inspect
import json
import os
import re
import sys
import tempfile
from types import ModuleType, SimpleNamespace

import pytest
import torch

import tiny_llama_v3 as llama
from benchmarks import steps
from examples import audited, hf_weights, swap_kernels
from tests import ROOT
from tiny_llama import hugging_face_weights
from tiny_llama.audit import audit

SIZES = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, initializer_range=0.2)
ROPE = dict(rope_type="default", rope_theta=500.0)


@pytest.fixture
def transformers():
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()  # which would be among the lines of errors
    return transformers


@pytest.fixture
def make_folder(transformers, tmp_path):
    """A folder with a LLaMA whose norms are not 1, beside a text."""

    def make(dtype=torch.float32, shard="1GB", **changes):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | changes))
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        model.to(dtype).save_pretrained(tmp_path / "model", max_shard_size=shard)
        (tmp_path / "text").write_text("to be or not to be " * 20)
        return tmp_path / "model"

    return make


def run(folder, *flags):
    flags = [folder, "--num-steps", 30, "--learning-rate", 1e-2, "--seq-len", 48, "--device", "cpu", *flags]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(llama, "INTERPRETED", False)  # it would take half a minute
        return hf_weights.main(list(map(str, flags)))


def error_of(capsys, folder, *flags):
    """Return the line that a run prints that cannot be done."""
    capsys.readouterr()  # the bar that transformers shows while the folder is written
    assert run(folder, *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hf_weights: error: ")
    return line


def write_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def add_tokenizer(folder, added=()):
    """Write a tokenizer of the characters of ASCII, with more tokens beyond them."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {chr(number): number - 32 for number in range(32, 127)} | {"?": 31}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(list(added))
    tokenizer.save(str(folder / "tokenizer.json"))
    # Without it, transformers 5.0 adds LLaMA's own tokens.
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


@pytest.mark.parametrize("changes", [
    dict(tie_word_embeddings=True),
    dict(tie_word_embeddings=False, rope_parameters=ROPE, rms_norm_eps=1e-2, dtype=torch.bfloat16, shard="20KB"),
], ids=["tied", "untied"])  # fmt: skip
def test_weights_come_in_learn_a_text_and_go_out(transformers, make_folder, tmp_path, capsys, monkeypatch, changes):
    folder, new, steps_made = make_folder(**changes), tmp_path / "new/model", []
    add_tokenizer(folder)
    make_step = hf_weights.make_step
    monkeypatch.setattr(hf_weights, "make_step", lambda *args: steps_made.append(make_step(*args)) or steps_made[-1])
    assert run(folder, "--text", tmp_path / "text", "--output", new) == 0
    losses = [float(loss) for loss in re.findall(r"\| loss (\S+)", capsys.readouterr().out)]
    assert len(losses) == 30 and losses[-1] < 0.5 * losses[0] and (new / "tokenizer.json").exists()
    (step,), tokens = steps_made, torch.arange(48)[None]
    saved = transformers.LlamaForCausalLM.from_pretrained(new)(tokens).logits
    torch.testing.assert_close(step.model(tokens), saved, rtol=1e-4, atol=1e-4)
    assert (step.model.lm_head is None) == changes["tie_word_embeddings"]
    assert "exists: give the name of a new folder" in error_of(capsys, folder, "--output", new)
    (tmp_path / "text").write_text("x" * 48)
    assert "48 tokens, and --seq-len 48 needs more" in error_of(capsys, folder, "--text", tmp_path / "text")
    assert "cannot be read (FileNotFoundError" in error_of(capsys, folder, "--text", tmp_path / "none")


BESIDE = """
added_tokens.json chat_template.jinja LICENSE merges.txt README.md special_tokens_map.json tokenizer.model
tokenizer_config.json vocab.json vocab.txt qwen.tiktoken tokenizer.model.v3 additional_chat_templates/tool.jinja
generation_config.json
""".split()
LEFT = """
model.safetensors.index.json pytorch_model.bin modeling_mine.py tokenization_mine.py optimizer.pt tokenizer/vocab.json
.gitattributes original/params.json
""".split()


def test_what_lies_beside_the_weights_comes_along(transformers, make_folder, tmp_path):
    """As files, also from links, whatever generation_config.json says; but no weights, no code."""
    folder, new, linked = make_folder(rope_parameters=ROPE), tmp_path / "new", tmp_path / "blob"
    for name in BESIDE + LEFT:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps({"name": name}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}, "metadata": {}}))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "do_sample": False}))
    (folder / "merges.txt").rename(linked)
    (folder / "merges.txt").symlink_to(linked)
    former = os.umask(0o027)
    try:
        assert run(folder, "--num-steps", 1, "--output", new) == 0
    finally:
        os.umask(former)
    files = {str(path.relative_to(new)) for path in new.rglob("*") if path.is_file()}
    assert files == {"config.json", "model.safetensors", *BESIDE}
    for name in BESIDE:
        assert (new / name).read_bytes() == (folder / name).read_bytes() and not (new / name).is_symlink()
    assert {(new / name).stat().st_mode & 0o777 for name in files} == {0o640}
    assert json.loads((new / "config.json").read_text())["rope_theta"] == 500.0  # for transformers 4
    again = transformers.LlamaConfig.from_pretrained(new)
    assert again.rope_parameters["rope_theta"] == 500.0


def test_a_token_that_the_model_does_not_have_is_named(make_folder, tmp_path, capsys):
    folder = make_folder()
    add_tokenizer(folder, ["<a>", "<b>", "<c>"])  # 95, 96 and 97
    (tmp_path / "text").write_text("<b>abc" * 20)
    assert run(folder, "--text", tmp_path / "text", "--num-steps", 1) == 0
    (tmp_path / "text").write_text("<b>abc<c>" * 20)
    assert "gives token 97, and its model has 97: resize" in error_of(capsys, folder, "--text", tmp_path / "text")


def test_what_cannot_be_read_is_named_before_training(make_folder, tmp_path, capsys):
    folder = make_folder()
    (folder / "vocab.json").symlink_to(tmp_path / "nowhere")
    assert "vocab.json cannot be read (FileNotFoundError" in error_of(capsys, folder, "--output", tmp_path / "new")
    (folder / "vocab.json").unlink()
    (folder / "additional_chat_templates").mkdir()
    os.mkfifo(folder / "additional_chat_templates/tool.jinja")
    assert "not a regular file" in error_of(capsys, folder, "--output", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_wrong_logits_end_the_program(make_folder, capsys, monkeypatch):
    hf_names = hugging_face_weights.hf_names
    monkeypatch.setattr(hugging_face_weights, "hf_names", lambda name: hf_names(name)[::-1])
    assert run(make_folder()) == 1
    out = capsys.readouterr().out
    assert "differ from those of transformers by" in out and "step" not in out


UNSUPPORTED = """
rope_parameters=dict(ROPE, rope_type="linear", factor=2.0) | rope_type is 'linear', and only 'default'
attention_bias=True        | attention_bias is True, and only False
mlp_bias=True              | mlp_bias is True, and only False
head_dim=16                | head_dim is 16, and only 8
hidden_act="gelu"          | hidden_act is 'gelu'
rms_norm_eps=float("nan")  | config.json cannot be read (UsageError: rms_norm_eps nan is out of range
num_key_value_heads=3      | num_attention_heads 4 is not divisible by num_key_value_heads 3
"""


@pytest.mark.parametrize("line", UNSUPPORTED.strip().splitlines())
def test_a_model_that_is_not_ours_is_named(make_folder, capsys, line):
    changes, words = line.split("|")
    assert words.strip() in error_of(capsys, make_folder(**eval(f"dict({changes})")))


def test_a_damaged_folder_is_named(make_folder, capsys):
    from safetensors.torch import load_file, save_file

    folder = make_folder()
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {"other": tensors["model.norm.weight"].clone()}, weights, {"format": "pt"})
    assert "unexpected_keys is {'other'}" in error_of(capsys, folder)
    del tensors["model.norm.weight"]
    save_file(tensors, weights, {"format": "pt"})
    assert "missing_keys is {'model.norm.weight'}" in error_of(capsys, folder)
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "cannot be read (SafetensorError" in error_of(capsys, folder)
    weights.rename(folder / "model.bin")
    assert "no file named model.safetensors" in error_of(capsys, folder)
    assert "is no folder" in error_of(capsys, folder / "elsewhere")
    for changes, words in (
        (dict(vocab_size=0), "vocab_size 0 is out of range"),
        (dict(num_hidden_layers=10**9), ", num_hidden_layers 1000000000, "),
        (dict(model_type="gpt2"), "model_type is 'gpt2'"),
    ):  # without building a model of it
        write_config(folder, **SIZES | changes)
        assert words in error_of(capsys, folder)


def test_a_tied_head_beside_another_in_the_file_is_refused(make_folder, capsys):
    folder = make_folder()
    write_config(folder, tie_word_embeddings=True)
    assert "tie_word_embeddings is true beside another lm_head.weight" in error_of(capsys, folder)


def test_pipes_are_refused(make_folder, tmp_path, capsys):
    folder, pipe = make_folder(), tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "not a regular file" in error_of(capsys, folder, "--text", pipe)
    pipe.rename(folder / "tokenizer.json")
    assert "tokenizer.json is no file" in error_of(capsys, folder)


@pytest.mark.parametrize("full", ["lost", "lost other", "lost other home here"])
def test_a_model_is_kept_if_it_cannot_be_saved_where_it_should(
    transformers, make_folder, tmp_path, capsys, monkeypatch, full
):
    """The temporary folder, the user's and this one are tried in turn."""
    folder, new, save = make_folder(), tmp_path / "lost/new", transformers.LlamaForCausalLM.save_pretrained
    flags = "--num-steps", 1, "--output", new
    assert "cannot be written to (Not a directory)" in error_of(capsys, folder, "--output", tmp_path / "text/new")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "other"))

    def save_but(model, path):
        save(model, path)
        if set(full.split()) & set(path.parts):
            raise OSError("No space left on device")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "save_pretrained", save_but)
    error = error_of(capsys, folder, *flags)
    kept = [str(path.parent) for path in tmp_path.glob("*/hf_weights_*/model.safetensors")]
    if "here" in full:
        assert error.count("No space left on device") == 4 and not kept
    else:
        (place,) = kept
        assert error.endswith(f"No space left on device): the trained model is in {place}")
        assert os.path.basename(os.path.dirname(place)) == ("home" if "other" in full else "other")
    assert not list(new.parent.iterdir())


AUTO = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": ["code.Tokenizer", None]}


def test_no_code_of_a_folder_is_run_and_no_network_asked(make_folder, tmp_path, monkeypatch):
    """Whatever is answered; nor that of a kernel in the hub which config.json names."""
    folder, asked = make_folder(), []
    write_config(folder, auto_map=AUTO, attn_implementation="somebody/kernels")
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": AUTO, "tokenizer_class": "Tokenizer"}))
    (folder / "code.py").write_text('import pathlib\npathlib.Path(__file__).with_name("executed").touch()')
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "y")
    monkeypatch.setattr("socket.getaddrinfo", lambda *host, **_: asked.append(host) or [])
    assert [run(folder), run(folder, "--text", tmp_path / "text")] == [0, 2]
    write_config(folder, model_type="unknown")
    assert run(folder) == 2
    assert asked == [] and not (folder / "executed").exists()


def test_a_missing_library_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "transformers is not installed" in error_of(capsys, tmp_path)


@pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")
def test_swapped_kernels_pass_the_gate(transformers, tmp_path, monkeypatch):
    small = dict(batch_size=1, seq_len=8, hidden_dim=16, num_layers=1, num_heads=2, vocab_size=16)
    monkeypatch.setitem(steps.SIZES, "tiny", small)
    monkeypatch.setattr(steps, "WARMUP_STEPS", 1)
    flags = ["--tiny", "--windows", "1", "--steps", "1", "--output-dir", str(tmp_path)]
    assert swap_kernels.main(flags) == 0
    (path,) = tmp_path.glob("steps_*.json")
    size = json.loads(path.read_text())["sizes"]["tiny"]
    assert list(size["rows"]) == ["hf", "hf liger", "hf triton"] and size["gate"]["hf triton"]["passed"]


# --- kernels of others, audited


@pytest.fixture
def packages(monkeypatch):
    """Stand-ins for the packages, of plain PyTorch."""

    def retention(q, k, v):
        scores = torch.einsum("bthd,bshd->bhts", q, k).tril() * 0.9
        return torch.einsum("bhts,bshd->bthd", scores, v), None

    names = {
        "liger_kernel.transformers.rms_norm": dict(LigerRMSNorm=torch.nn.RMSNorm),
        "liger_kernel.transformers.cross_entropy": dict(LigerCrossEntropyLoss=torch.nn.CrossEntropyLoss),
        "liger_kernel.ops.swiglu": dict(
            LigerSiLUMulFunction=SimpleNamespace(apply=lambda gate, up: torch.nn.functional.silu(gate) * up)
        ),
        "fla.modules.activations": dict(swiglu=lambda gate, up: torch.nn.functional.silu(gate) * up),
        "fla.ops.retention": dict(fused_recurrent_retention=retention),
        "fla.ops.gla": dict(fused_recurrent_gla=lambda q, k, v, g: retention(q, k * g, v)),
    }
    for name, contents in names.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)


AUDITED = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/audit.md").read_text(), flags=re.M)


@pytest.mark.parametrize("name", AUDITED)
def test_an_audited_model_is_right_with_plain_operations(name, packages):
    torch.manual_seed(0)
    findings = audit(*getattr(audited, name)())
    assert len(findings.right) >= 3 and not findings.wrong and not findings.unclear


def test_a_gradient_that_the_residual_shares_and_a_kernel_overwrites_is_found():
    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, dy):
            return dy.mul_(2)

    for apply, wrong in ((InPlace.apply, ["embedding.weight"]), (lambda x: 2 * x, [])):
        layer = torch.nn.Module()
        layer.forward = apply
        assert [finding.name for finding in audit(*audited.audited(layer)).wrong] == wrong


def test_the_page_has_a_row_for_each_audited_model():
    made_here = {name for name, each in vars(audited).items() if inspect.isfunction(each)} - {"audited"}
    assert made_here == {*AUDITED} and len(AUDITED) == 7
