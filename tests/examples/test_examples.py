"""The examples: weights of Hugging Face's format go in and come out, kernels are swapped, errors are one line."""

import json
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

import tiny_llama_v3 as llama
from benchmarks import steps
from examples import hf_weights, swap_kernels, tritonbench_rows

SIZES = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2)
ROPE = dict(rope_type="default", rope_theta=500.0)


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers")


@pytest.fixture
def make_folder(transformers, tmp_path):
    """A folder with a LLaMA whose norms are not 1."""

    def make(dtype=torch.float32, shard="1GB", **changes):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | changes))
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        model.to(dtype).save_pretrained(tmp_path / "model", max_shard_size=shard)
        return tmp_path / "model"

    return make


def run(folder, *flags):
    flags = [str(folder), "--num-steps", "2", "--seq-len", "48", "--device", "cpu", *map(str, flags)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(llama, "INTERPRETED", False)  # it would take half a minute
        return hf_weights.main(flags)


def write_config(folder, changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def error_of(capsys, folder, *flags):
    """What a run prints that cannot be done."""
    assert run(folder, *flags) == 2
    return capsys.readouterr().err.splitlines()[-1]


def logits_of(transformers, folder, tokens):
    with torch.no_grad():
        return transformers.LlamaForCausalLM.from_pretrained(folder).float()(tokens).logits


@pytest.mark.parametrize("changes", [
    dict(tie_word_embeddings=True),
    dict(tie_word_embeddings=False, rope_parameters=ROPE, rms_norm_eps=1e-2, dtype=torch.bfloat16, shard="20KB"),
], ids=["tied", "untied"])  # fmt: skip
def test_weights_come_in_learn_and_go_out(transformers, make_folder, tmp_path, capsys, monkeypatch, changes):
    folder, new, save, models = make_folder(**changes), tmp_path / "new/model", hf_weights.save, []

    def saving(step, *arguments):
        models.append(step.model)
        save(step, *arguments)

    monkeypatch.setattr(hf_weights, "save", saving)
    assert run(folder, "--output", new, "--learning-rate", "1e-2") == 0
    out = capsys.readouterr().out
    assert out.count("they differ from those of transformers by") == 2 and "no tokenizer" in out
    (trained,), tokens = models, torch.arange(48)[None]
    saved = logits_of(transformers, new, tokens)
    torch.testing.assert_close(trained(tokens), saved, rtol=1e-4, atol=1e-4)
    assert (saved - logits_of(transformers, folder, tokens)).abs().max() > 0.1
    assert (trained.lm_head is None) == changes["tie_word_embeddings"]
    assert "exists: give the name of a new folder" in error_of(capsys, folder, "--output", new)


def test_wrong_logits_end_the_program(make_folder, capsys, monkeypatch):
    monkeypatch.setattr(hf_weights, "hf_names", lambda name: steps.hf_names(name)[::-1])
    assert run(make_folder()) == 1
    out = capsys.readouterr().out
    assert "they differ from those of transformers by" in out and "step" not in out


def test_a_text_in_the_tokens_of_the_model(transformers, make_folder, tmp_path, capsys, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    folder, text, new = make_folder(), tmp_path / "text", tmp_path / "new"
    vocabulary = {chr(number): number - 32 for number in range(32, 127)} | {"?": 31}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    text.write_text("to be or not to be " * 20)
    assert run(folder, "--text", text, "--output", new, "--num-steps", "30", "--learning-rate", "1e-2") == 0
    losses = [float(loss) for loss in re.findall(r"\| loss (\S+)", capsys.readouterr().out)]
    assert len(losses) == 30 and losses[-1] < 0.5 * losses[0] and (new / "tokenizer.json").exists()
    text.write_text("too short")
    assert "more than --seq-len 48 of a vocabulary" in error_of(capsys, folder, "--text", text)
    assert "cannot be read (FileNotFoundError" in error_of(capsys, folder, "--text", tmp_path / "none")


def remove_norm(weights):
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = safetensors.load_file(weights)
    del tensors["model.norm.weight"]
    safetensors.save_file(tensors, weights, {"format": "pt"})


def pickled(weights):
    torch.save(pytest.importorskip("safetensors.torch").load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()


SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}


@pytest.mark.parametrize("damage, words", [
    (dict(rope_parameters=SCALED), "rope scaling is not supported, and config.json has {.*'linear'"),
    (dict(attention_bias=True), "attention_bias is True in config.json, and only False"),
    (dict(head_dim=16), "head_dim is 16 in config.json, and only 8"),
    (dict(hidden_act="gelu"), "hidden_act is 'gelu'"),
    (dict(max_position_embeddings=32), "--seq-len 48 is more than the model's 32 positions"),
    (dict(model_type="gpt2"), "cannot be read|model_type is 'gpt2'"),
    (dict(quantization_config=dict(quant_method="fp8")), "quantization_config is {.*'fp8'.*} in config.json"),
    (lambda weights: weights.write_bytes(weights.read_bytes()[:-100]), "cannot be read \\(SafetensorError"),
    (remove_norm, "does not hold the weights of a LLaMA, but .*'model.norm.weight'"),
    (pickled, "cannot be read"),
    (lambda weights: shutil.rmtree(weights.parent), "is no folder: give one"),
    (lambda weights: weights.with_name("adapter_config.json").touch(), "holds an adapter, whose model is elsewhere"),
])  # fmt: skip
def test_what_is_no_model_of_ours_is_named(make_folder, capsys, damage, words):
    folder = make_folder()
    if callable(damage):
        damage(folder / "model.safetensors")
    else:
        write_config(folder, damage)
    error = error_of(capsys, folder)
    assert error.startswith("hf_weights: error: ") and re.search(words, error), error


CODE = """
import pathlib, transformers
pathlib.Path(__file__).with_name("executed").touch()
class Config(transformers.LlamaConfig): pass
class Model(transformers.LlamaForCausalLM): config_class = Config
class Tokenizer(transformers.PreTrainedTokenizerFast): pass
"""
AUTO = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": ["code.Tokenizer", None]}


@pytest.mark.parametrize("changes", [
    {"auto_map": AUTO}, {"auto_map": AUTO, "model_type": "unknown"}, {"attn_implementation": "somebody/kernels"},
])  # fmt: skip
def test_no_code_of_a_folder_is_run_and_no_network_asked(make_folder, tmp_path, monkeypatch, changes):
    """Whatever is answered; nor that of a kernel in the hub which config.json names."""
    folder, asked = make_folder(), []
    write_config(folder, changes)
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": AUTO, "tokenizer_class": "Tokenizer"}))
    (folder / "code.py").write_text(CODE)
    (tmp_path / "text").write_text("a text")
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "y")
    monkeypatch.setattr("socket.getaddrinfo", lambda *host, **_: asked.append(host) or [])
    assert run(folder, "--output", tmp_path / "new") == (2 if "model_type" in changes else 0)
    assert run(folder, "--text", tmp_path / "text") == 2
    assert asked == [] and not (folder / "executed").exists()


def test_a_missing_library_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(hf_weights, "transformers", None)
    assert hf_weights.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == "hf_weights: error: hf_weights needs a library: pip install transformers\n"
    assert tritonbench_rows.main([]) == 2
    assert "is missing: PYTHONPATH must name a clone of tritonbench" in capsys.readouterr().err


@pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")
def test_swapped_kernels_pass_the_gate(transformers, tmp_path, capsys, monkeypatch):
    small = dict(batch_size=1, seq_len=8, hidden_dim=16, num_layers=1, num_heads=2, vocab_size=16)
    monkeypatch.setitem(steps.SIZES, "tiny", small)
    monkeypatch.setattr(steps, "WARMUP_STEPS", 1)
    flags = ["--tiny", "--windows", "1", "--steps", "1", "--output-dir", str(tmp_path)]
    assert swap_kernels.main(flags) == 0
    (path,) = tmp_path.glob("steps_*.json")
    size = json.loads(path.read_text())["sizes"]["tiny"]
    assert list(size["rows"]) == ["hf", "hf liger", "hf triton"]
    assert size["gate"]["hf triton"]["passed"] and size["strongest_peer"] == "hf"
    if not torch.cuda.is_available():
        monkeypatch.setattr(llama, "INTERPRETED", False)
        assert swap_kernels.main([]) == 2 and "our kernels cannot run: there is no GPU" in capsys.readouterr().err


def test_rows_of_tritonbench_compute_what_its_rows_do(transformers, monkeypatch, device):
    """Registered with a stand-in for it, and called as it does."""
    operators, registered = {}, []

    def register(name, row, fwd_only):
        registered.append((name, row, fwd_only))
        return lambda function: function

    def load(name):
        return operators.setdefault(name, type(name, (), {}))

    for name, module in (
        ("run", SimpleNamespace(run=registered.append)),
        ("tritonbench.operators", SimpleNamespace(load_opbench_by_name=load)),
        ("tritonbench.utils.triton_op", SimpleNamespace(register_benchmark=register)),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    assert tritonbench_rows.main(["--op", "rms_norm"]) == 0
    rows = [(name, "tiny_llama", name == "swiglu") for name in ("rms_norm", "layer_norm", "swiglu")]
    assert registered == [*rows, ["--op", "rms_norm"]]
    x, weight, bias = torch.randn(3, 32, device=device), torch.randn(32, device=device), torch.randn(32, device=device)
    norm, layer_norm, swiglu = (operators[name]() for name, *_ in rows)
    norm.eps = 1e-3
    swiglu.baseline_op = transformers.models.llama.modeling_llama.LlamaMLP(transformers.LlamaConfig(**SIZES)).to(device)
    functional = torch.nn.functional
    for row, expected in (
        (norm.tiny_llama(32, x), functional.rms_norm(x, (32,), eps=1e-3)),
        (layer_norm.tiny_llama(x, (32,), weight, bias, 1e-2), functional.layer_norm(x, (32,), weight, bias, 1e-2)),
        (swiglu.tiny_llama(x), swiglu.baseline_op(x)),
    ):
        torch.testing.assert_close(row(), expected, rtol=1e-4, atol=1e-5)
