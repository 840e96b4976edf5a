"""nanogpt_triton's model and trainer: learning, resuming bit by bit, several processes, and how runs end."""

import contextlib
import io
import json
import math
import multiprocessing
import os
import pickle
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import tiny_llama_v3 as llama
from nanogpt_triton import bench, checkpoint, sample, train
from nanogpt_triton import model as gpt
from nanogpt_triton.configurator import configure
from nanogpt_triton.dataset import Batches, Characters, Writer, read_meta
from nanogpt_triton.model import GPT, GPTConfig, from_hugging_face
from tiny_llama.distributed import World
from tiny_llama_v3 import UsageError

FOLDER = Path(train.__file__).parent
TINY = dict(n_layer=2, n_head=2, n_embd=32, block_size=16)
CONFIG = GPTConfig(vocab_size=27, bias=True, **TINY)
SETTINGS = TINY | dict(
    dataset="letters", batch_size=4, gradient_accumulation_steps=2, eval_iters=2, eval_interval=4, max_iters=12,
    warmup_iters=2, lr_decay_iters=12, learning_rate=1e-2, log_interval=1, compile=False, device="cpu",
)  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyz "
START = dict(WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="{port}")
STATE = {"model": {}, "model_args": vars(CONFIG), "iter_num": 1}  # the least that a checkpoint holds
LIKE_NANOGPT = dict.fromkeys(("meta", "scaler", "position", "rng"))  # what its checkpoints do not have
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER.parent)}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """A dataset of letters that come in alphabetical order, mostly."""
    folder = tmp_path_factory.mktemp("data")
    generator = torch.Generator().manual_seed(0)
    steps = torch.where(torch.rand(20000, generator=generator) < 0.9, 1, 5)
    letters = (steps.cumsum(0) % 27).tolist()
    with Writer(folder / "letters") as writer:
        writer.add("train", letters[:18000])
        writer.add("val", letters[18000:])
        writer.finish(Characters(LETTERS))
    return folder


@pytest.fixture(autouse=True)
def one_thread():
    """Sums in the same order here and in other processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def arguments(data_dir, out_dir, /, **settings):
    settings = SETTINGS | {"data_dir": data_dir, "out_dir": out_dir} | settings
    return [f"--{key}={value}" for key, value in settings.items()]


def run(data_dir, out_dir, /, **settings):
    return train.main(arguments(data_dir, out_dir, **settings))


def draw(out_dir, *flags):
    """What sample.py returns for a few tokens on a CPU; later flags win."""
    usual = ["--start=ab", "--num_samples=1", "--max_new_tokens=5", "--top_k=1", "--device=cpu"]
    return sample.main([f"--out_dir={out_dir}", *usual, *flags])


def saved(out_dir):
    return checkpoint.load(out_dir / checkpoint.NAME)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def assert_same_state(*out_dirs):
    """Two checkpoints have the same bits, but for the settings."""
    one, two = ({name: value for name, value in saved(folder).items() if name != "config"} for folder in out_dirs)
    assert one.keys() == two.keys() and [name for name in one if not same(one[name], two[name])] == []


def evaluations(text):
    """The (training loss, validation loss) of every evaluation."""
    losses = re.findall(r"^step \d+: train loss ([\d.]+), val loss ([\d.]+)", text, flags=re.M)
    return [(float(training), float(validation)) for training, validation in losses]


@pytest.fixture
def start(data_dir, tmp_path, python):
    """start(out_dir, processes, program, **settings) starts train.py, or a program that takes the same arguments."""

    def popen(out_dir, processes=1, program=None, **settings):
        script, launcher = FOLDER / "train.py", []
        if processes > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        if program:
            script = tmp_path / "program.py"
            script.write_text(program)
        command = [python, *launcher, str(script), *arguments(data_dir, out_dir, **settings)]
        return subprocess.Popen(command, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    return popen


@pytest.fixture
def trained(data_dir, tmp_path):
    """The checkpoint of a run of 4 iterations into tmp_path."""
    assert run(data_dir, tmp_path, max_iters=4) == 0
    return tmp_path / checkpoint.NAME


def error_line(capsys):
    """What was printed as an error, which must be one line."""
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


# --- model


def make_model(layer_norm="torch", config=CONFIG):
    torch.manual_seed(0)
    return GPT(config, layer_norm, "cuda" if torch.cuda.is_available() else "cpu")


def tokens_for(model, rows=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(27, (rows, 16), generator=generator).to(model.lm_head.weight.device)


def test_last_logits_alone_are_those_of_all():
    model = make_model().eval()
    tokens = tokens_for(model)
    last, loss = model(tokens)
    assert loss is None and last.shape == (2, 1, 27)
    torch.testing.assert_close(last[:, 0], model(tokens, tokens)[0][:, -1])


def test_ignored_targets_count_nothing():
    model = make_model()
    tokens = tokens_for(model)
    targets = tokens.clone()
    targets[1] = -1
    torch.testing.assert_close(model(tokens, targets)[1], model(tokens[:1], tokens[:1])[1])


def reference_logits(state, tokens, n_layer=2, n_head=2):
    """GPT-2 from its formulas, in float64."""
    state = {name: tensor.double() for name, tensor in state.items()}

    def linear(x, name):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(x, name):
        x = x - x.mean(-1, keepdim=True)
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * state[f"{name}.weight"] + state[f"{name}.bias"]

    T = tokens.shape[1]
    future = torch.ones(T, T, dtype=torch.bool, device=tokens.device).triu(1)
    x = state["transformer.wte.weight"][tokens] + state["transformer.wpe.weight"][:T]
    for layer in (f"transformer.h.{number}" for number in range(n_layer)):
        heads = []
        q, k, v = linear(norm(x, f"{layer}.ln_1"), f"{layer}.attn.c_attn").chunk(3, -1)
        for qh, kh, vh in zip(*(part.chunk(n_head, -1) for part in (q, k, v)), strict=True):
            scores = (qh @ kh.mT / qh.shape[-1] ** 0.5).masked_fill(future, -math.inf)
            heads.append(scores.softmax(-1) @ vh)
        x = x + linear(torch.cat(heads, -1), f"{layer}.attn.c_proj")
        h = linear(norm(x, f"{layer}.ln_2"), f"{layer}.mlp.c_fc")
        x = x + linear(h * (1 + torch.erf(h / 2**0.5)) / 2, f"{layer}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ state["transformer.wte.weight"].T


def test_logits_are_those_of_the_formulas():
    model = make_model().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # far from their start, where norms and biases do little
            parameter.add_(0.3 * torch.randn_like(parameter))
        tokens = tokens_for(model)[:, :11]
        logits, loss = model(tokens, tokens.roll(-1, dims=1))
    expected = reference_logits(model.state_dict(), tokens)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)
    chosen = expected.log_softmax(-1).gather(-1, tokens.roll(-1, dims=1)[..., None])
    assert loss.item() == pytest.approx(-chosen.mean().item(), rel=1e-5)


@pytest.mark.parametrize("place", ["drop", "h.1.attn", "h.1.attn.resid_dropout", "h.1.mlp.dropout"])
def test_dropout_acts_in_training_only(place):
    model = make_model()
    module = model.transformer.get_submodule(place)
    setattr(module, "dropout" if place.endswith("attn") else "p", 0.5)
    tokens = tokens_for(model)
    assert not torch.equal(model(tokens)[0], model(tokens)[0])
    model.eval()
    assert torch.equal(model(tokens)[0], model(tokens)[0])


@pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_changes_neither_loss_nor_gradients(capsys, bias):
    config = GPTConfig(vocab_size=27, bias=bias, **TINY)
    results = []
    for layer_norm in ("torch", "triton"):
        model = make_model(layer_norm, config)
        tokens = tokens_for(model)
        loss = model(tokens, tokens.roll(1, dims=1))[1]
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert "using Triton-accelerated LayerNorm" in capsys.readouterr().out
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")
def test_model_compiles_without_a_graph_break():
    model = make_model("triton")
    tokens = tokens_for(model)
    backend = "inductor" if torch.cuda.is_available() else "aot_eager"
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(tokens, tokens)[1], model(tokens, tokens)[1], rtol=1e-4, atol=1e-5)


def test_every_weight_gets_a_gradient_and_matrices_decay():
    model = make_model()
    model(*[tokens_for(model)] * 2)[1].backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    decayed, others = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu").param_groups
    assert {p.dim() for p in decayed["params"]} == {2} and {p.dim() for p in others["params"]} == {1}
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))
    assert all(group["lr"] == 1e-3 and group["betas"] == (0.9, 0.95) for group in (decayed, others))


def test_gpt2_has_124_million_weights():
    model = GPT(GPTConfig(vocab_size=50257), "torch", "meta")
    assert sum(p.numel() for p in model.parameters()) == 124_439_808
    weights = model.get_num_params()
    assert weights == 124_439_808 - 1024 * 768 and model.get_num_params(non_embedding=False) == 124_439_808
    assert model.flops_per_token() == 6 * weights + 12 * 12 * 768 * 1024 / 2  # half of it masked
    flops = 5 * 1024 * (6 * weights + 12 * 12 * 768 * 1024)
    assert model.estimate_mfu(fwdbwd_per_iter=5, dt=2.0) == pytest.approx(flops / 2 / 312e12)


def test_cropped_positions_leave_the_rest_alone():
    model = make_model().eval()
    tokens = tokens_for(model)[:, :8]
    before = model(tokens, tokens)[0]
    model.crop_block_size(8)
    torch.testing.assert_close(model(tokens, tokens)[0], before)
    with pytest.raises(ValueError, match="9 tokens"):
        model(torch.zeros(1, 9, dtype=torch.long, device=tokens.device))
    with pytest.raises(ValueError, match="block_size=9 is more than the model's 8"):
        model.crop_block_size(9)


def test_weights_of_hugging_face():
    """The same logits as GPT2LMHeadModel's."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=27, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(activation_function="gelu", **sizes)).eval()
    ours = GPT(CONFIG, "torch").eval()
    ours.load_state_dict(from_hugging_face(theirs.state_dict()))
    tokens = tokens_for(ours)
    torch.testing.assert_close(ours(tokens, tokens)[0], theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_pretrained_weights(monkeypatch):
    monkeypatch.setitem(gpt.GPT2_SIZES, "gpt2", dict(n_layer=1, n_head=1, n_embd=4))
    source = GPT(GPTConfig(vocab_size=50257, n_layer=1, n_head=1, n_embd=4), "torch")
    library = Mock()
    fetch = library.GPT2LMHeadModel.from_pretrained
    fetch.return_value.state_dict.return_value = from_hugging_face(source.state_dict())  # transposed, as theirs
    monkeypatch.setitem(sys.modules, "transformers", library)
    model = GPT.from_pretrained("gpt2", dict(dropout=0.3))
    assert same(dict(model.state_dict()), dict(source.state_dict())) and model.config.dropout == 0.3
    for given in (["gpt3"], ["gpt2", dict(bias=False)]):
        with pytest.raises(UsageError, match="give one of gpt2, gpt2-medium, .* only dropout"):
            GPT.from_pretrained(*given)
    fetch.side_effect = OSError("no connection\nCheck it")
    unreached = r"init_from=gpt2: .*\(no connection\): .* HF_HOME"
    for found, words in ((library, unreached), (None, "pip install transformers")):
        monkeypatch.setitem(sys.modules, "transformers", found)
        with pytest.raises(UsageError, match=words):
            GPT.from_pretrained("gpt2")


def test_this_folder_hides_no_library(python, tmp_path):
    """transformers looks for a package that is called kernels."""
    (tmp_path / "kernels.py").touch()
    (tmp_path / "transformers.py").write_text("import kernels\nraise OSError(f'it has {kernels.__file__}')\n")
    command, environment = [python, "sample.py", "--init_from=gpt2"], ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stderr == f"sample.py: error: it has {tmp_path / 'kernels.py'}\n"


def test_a_model_made_without_a_device_decides_by_its_tensors(monkeypatch):
    """Scripts of nanoGPT's make it first and move it then."""
    for name in ("triton", "torch"):
        monkeypatch.setattr(gpt, f"{name}_add_layer_norm", lambda *tensors, name=name: name)
    monkeypatch.setattr(gpt, "TRITON_AVAILABLE", True)
    assert [gpt.auto_add_layer_norm(Mock(is_cuda=on), None, None, None) for on in (True, False)] == ["triton", "torch"]
    assert GPT(CONFIG).layer_norm == "auto" and GPT(CONFIG, device="cpu").layer_norm == "torch"


@pytest.mark.parametrize(
    "flag, words", [("c.py", "8 0.5 torch.Size([2, 1, 27])\n"), ("--batchsize=4", "batch_size?\n")]
)
def test_a_script_in_this_folder_has_model_and_settings(python, tmp_path, flag, words):
    """As nanoGPT's scripts import one and execute the other."""
    program = (
        "import torch; from model import GPT, GPTConfig\n"
        "batch_size, dropout = 3, 0.0\n"
        "exec(open('configurator.py').read())\n"
        "model = GPT(GPTConfig(vocab_size=27, n_layer=1, n_head=1, n_embd=4, block_size=8))\n"
        "print(batch_size, dropout, model(idx=torch.zeros(2, 8, dtype=torch.long), targets=None)[0].shape)\n"
    )
    (tmp_path / "c.py").write_text("batch_size = 2 * 4\nmax_iters = 3  # of another script\n")
    command = [python, "-c", program, flag.replace("c.py", str(tmp_path / "c.py")), "--dropout=0.5"]
    environment = ENVIRONMENT | {"PYTHONPATH": ""}
    done = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.stdout + done.stderr).endswith(words) and done.returncode == (2 if "?" in words else 0)


def test_generation_draws_likely_tokens_only():
    model = make_model().eval()
    tokens = tokens_for(model, rows=1)
    torch.manual_seed(0)
    greedy = model.generate(tokens, 20, top_k=1)
    assert greedy.shape == (1, 36) and torch.equal(greedy[:, :16], tokens)
    for end in range(16, 36):
        assert greedy[0, end] == model(greedy[:, max(0, end - 16) : end])[0][0, -1].argmax()
    assert torch.equal(model.generate(tokens, 5, temperature=1e-3), greedy[:, :21])


@pytest.mark.parametrize("top_k, drawn", [(3, {24, 25, 26}), (1, {26}), (0, set(range(27))), (99, set(range(27)))])
def test_generation_draws_from_the_most_likely(top_k, drawn):
    """As many as top_k says; the model sees as many tokens as it has positions."""
    model, seen = make_model(), []

    def forward(tokens):
        seen.append(tokens.shape[1])
        return torch.arange(27.0, device=tokens.device).expand(len(tokens), 1, 27) * 1e-3, None

    torch.manual_seed(0)
    tokens = model.generate(tokens_for(model, rows=100)[:, :8], 12, top_k=top_k, forward=forward)
    assert set(tokens[:, 8:].unique().tolist()) == drawn
    assert seen == [*range(8, 17), 16, 16, 16]


# --- training


def test_learning_rate_rises_and_falls():
    settings = train.Settings(learning_rate=1.0, min_lr=0.1, warmup_iters=10, lr_decay_iters=110)
    rates = [train.learning_rate(settings, i) for i in range(200)]
    assert rates[0] == pytest.approx(1 / 11) and rates[10] == 1.0 == max(rates)
    assert rates[60] == pytest.approx(0.55) and rates[110] == rates[199] == pytest.approx(0.1)
    assert train.learning_rate(train.Settings(decay_lr=False, learning_rate=0.3), 0) == 0.3


def update(model, batches, grad_clip=0.0, scaled=False, stopped=lambda: False):
    """(the result of optimizer_step, what was subtracted from each weight) of gradient descent at a rate of 1."""
    groups = model.configure_optimizers(0.0, 1.0, (0.9, 0.95)).param_groups
    optimizer = torch.optim.SGD([{"params": group["params"]} for group in groups], lr=1.0)
    scaler = torch.amp.GradScaler(model.lm_head.weight.device.type, enabled=scaled)
    before = [p.detach().clone() for p in model.parameters()]
    given = model, optimizer, scaler, batches, len(batches), contextlib.nullcontext, grad_clip, stopped
    loss = train.optimizer_step(*given)
    return loss, [b - p for b, p in zip(before, model.parameters(), strict=True)]


def test_accumulated_batches_are_one_large_batch():
    batches = [(tokens_for(make_model()), tokens_for(make_model()).roll(i + 1)) for i in range(2)]
    whole = [torch.cat(parts) for parts in zip(*batches, strict=True)]
    gradients = [update(make_model(), given)[1] for given in (batches, [whole])]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_an_update_that_is_stopped_does_nothing():
    """Its loss is None, weights and gradients are as before; one that is not stopped says the mean loss."""
    model = make_model()
    tokens = tokens_for(model)
    batches = [(tokens, tokens.roll(number, dims=1)) for number in (1, 2, 3)]
    answers = iter([False, True])
    loss, changes = update(model, batches, stopped=lambda: next(answers))
    assert loss is None and not any(change.any() for change in changes)
    assert all(p.grad is None for p in model.parameters())
    losses = [model(*batch)[1].item() for batch in batches]
    assert update(model, batches)[0].item() == pytest.approx(sum(losses) / 3)


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_are_clipped_at_their_norm(scaled):
    """Also those of float16, which are kept times 65536 until they are clipped."""
    model = make_model()
    _, changes = update(model, [(tokens_for(model), tokens_for(model))], grad_clip=0.01, scaled=scaled)
    moved = torch.stack([change.norm() for change in changes]).norm()
    assert moved.item() == pytest.approx(0.01, rel=1e-3)


def test_every_iteration_has_its_learning_rate(data_dir, tmp_path, monkeypatch):
    update, rates = torch.optim.AdamW.step, []

    def recording(self, *arguments):
        rates.append({group["lr"] for group in self.param_groups})
        return update(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", recording)
    assert run(data_dir, tmp_path) == 0
    settings = train.Settings(**SETTINGS)
    assert rates == [{train.learning_rate(settings, number)} for number in range(13)]
    assert len({rate for (rate,) in rates}) == 13


def make_trainer(data_dir, tmp_path, rank=0, size=1, monkeypatch=None, **changed):
    """Of one of size processes, without the others."""
    settings = train.Settings(**SETTINGS | dict(data_dir=str(data_dir), out_dir=str(tmp_path)) | changed)
    if size > 1:
        monkeypatch.setattr(train, "wrap_for_processes", lambda model, device: model)
    return train.Trainer(settings, World(rank, size), torch.device("cpu"))


def test_evaluation_is_the_mean_over_its_batches(data_dir, tmp_path):
    """Of either split, without dropout, on other batches than those of the training."""
    trainer = make_trainer(data_dir, tmp_path, dropout=0.5, eval_iters=3)
    losses = trainer.evaluate()
    assert trainer.model.training
    model = trainer.raw_model.eval()
    for split in ("train", "val"):
        batches = Batches(data_dir / "letters", split, read_meta(data_dir / "letters"), 4, 16, train.Settings.seed + 1)
        expected = [model(*map(torch.from_numpy, map(np.ascontiguousarray, batches[n])))[1].item() for n in range(3)]
        assert losses[split] == pytest.approx(sum(expected) / 3, rel=1e-6)
    assert losses["train"] != losses["val"]


def test_processes_draw_their_own_dropout(data_dir, tmp_path, monkeypatch, trained):
    """They start with the same weights; random states differ, and a resumed process gets its own back."""
    trainers, states = [], []
    for rank in range(2):
        trainers.append(make_trainer(data_dir, tmp_path, rank, 2, monkeypatch))
        states.append(trainers[-1].rng())
    assert same(*(trainer.raw_model.state_dict() for trainer in trainers))
    assert not torch.equal(states[0]["cpu"], states[1]["cpu"])
    change(trained, rng=states)
    torch.manual_seed(0)
    for rank in range(2):
        trainer = make_trainer(data_dir, tmp_path, rank, 2, monkeypatch, init_from="resume")
        assert torch.equal(trainer.rng()["cpu"], states[rank]["cpu"])


def test_the_best_validation_loss_decides(data_dir, tmp_path, monkeypatch, capsys):
    """Not the training loss, nor the last one; and a resumed run knows the best of before."""
    losses = {0: (1, 9), 4: (5, 5), 8: (4, 7), 12: (6, 6)}
    evaluated = {number: dict(train=float(a), val=float(b)) for number, (a, b) in losses.items()}
    monkeypatch.setattr(train.Trainer, "evaluate", lambda self, stopped: evaluated[self.iteration])
    assert run(data_dir, tmp_path, always_save_checkpoint=False) == 0
    assert "best validation loss 5.0000 in 13 iterations" in capsys.readouterr().out
    assert saved(tmp_path)["iter_num"] == 4
    assert run(data_dir, tmp_path, always_save_checkpoint=False, init_from="resume") == 0
    state = saved(tmp_path)
    assert (state["iter_num"], state["best_val_loss"]) == (4, 5.0)


def test_a_run_learns_and_its_model_writes(data_dir, tmp_path, capsys):
    assert run(data_dir, tmp_path, max_iters=60, lr_decay_iters=60, eval_interval=20) == 0
    out = capsys.readouterr().out
    val = [validation for _, validation in evaluations(out)]
    assert len(val) == 4 and val[0] == pytest.approx(math.log(27), abs=0.1) and val[-1] < 1.0
    lines = re.findall(r"^iter (\d+): loss [\d.]+, time [\d.]+ms, mfu [\d.]+%$", out, flags=re.M)
    assert [int(number) for number in lines] == list(range(61))  # as nanoGPT counts
    assert "using PyTorch's LayerNorm" in out and "tokens per iteration will be: 128" in out
    assert draw(tmp_path, "--start=abc", "--num_samples=2", "--max_new_tokens=30") == 0
    texts = capsys.readouterr().out.split("---------------\n")
    assert texts[0].endswith("abcdefghijklmnopqrstuvwxyz abcdef\n") and len(texts) == 3
    assert draw(tmp_path, "--start=A") == 2 and "no character 'A'" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_resumed_runs_have_the_same_bits(data_dir, tmp_path, dtype):
    settings = dict(dropout=0.2, dtype=dtype, always_save_checkpoint=True)
    assert run(data_dir, tmp_path / "whole", **settings) == 0
    assert run(data_dir, tmp_path / "parts", **settings, max_iters=8) == 0
    assert run(data_dir, tmp_path / "parts", **settings, init_from="resume") == 0
    assert_same_state(tmp_path / "whole", tmp_path / "parts")
    state = saved(tmp_path / "parts")
    assert state["position"] == 24 and bool(state["scaler"]) == (dtype == "float16")


def signal_at(monkeypatch, batches_of, number, which=signal.SIGTERM):
    """A signal comes while this batch is worked on. Returns the list of all that are fetched."""
    fetch, fetched = train.Trainer.fetch, []

    def fetching(self, batches, n):
        fetched.append(("training" if batches is self.train_batches else "evaluation", self.iteration, n))
        if fetched[-1] == (batches_of, *number):
            os.kill(os.getpid(), which)
        return fetch(self, batches, n)

    monkeypatch.setattr(train.Trainer, "fetch", fetching)
    return fetched


@pytest.mark.parametrize("dtype, count, at, done", [("float32", 4, 22, 5), ("float16", 4, 22, 5), ("float32", 1, 5, 6)])
def test_a_run_ends_between_two_batches(data_dir, tmp_path, capfd, monkeypatch, dtype, count, at, done):
    """The iteration that was begun leaves no trace: neither in gradients nor in random state or position.

    One that has a single batch is finished.
    """
    settings = dict(dropout=0.2, gradient_accumulation_steps=count, dtype=dtype)
    assert run(data_dir, tmp_path / "whole", **settings) == 0
    fetched = signal_at(monkeypatch, "training", (5, at))
    capfd.readouterr()
    assert run(data_dir, tmp_path / "cut", **settings) == 130
    out, error = capfd.readouterr()
    assert fetched[-1][2] == at and f"iter {done - 1}:" in out and f"iter {done}:" not in out
    assert error == ""
    assert f"interrupted after iteration {done - 1}; --init_from=resume goes on" in out
    monkeypatch.undo()
    state = saved(tmp_path / "cut")
    assert (state["iter_num"], state["position"]) == (done, done * count)
    assert run(data_dir, tmp_path / "cut", **settings, init_from="resume") == 0
    assert_same_state(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("always_save_checkpoint, which", [(True, signal.SIGTERM), (False, signal.SIGINT)])
def test_a_run_ends_in_its_evaluation(data_dir, tmp_path, capsys, monkeypatch, always_save_checkpoint, which):
    """No loss is reported; the resumed run evaluates anew, and keeps the best as if nothing had happened.

    Where only the best is kept, the state goes beside it, and the resumed run takes it from there.
    """
    settings = dict(always_save_checkpoint=always_save_checkpoint, eval_iters=4)
    assert run(data_dir, tmp_path / "whole", **settings) == 0
    losses = evaluations(capsys.readouterr().out)
    handler = signal.getsignal(which)
    fetched = signal_at(monkeypatch, "evaluation", (8, 1), which)
    assert run(data_dir, tmp_path / "cut", **settings) == 130
    assert signal.getsignal(which) is handler
    out = capsys.readouterr().out
    assert evaluations(out) == losses[:2] and "interrupted after iteration 7" in out
    assert fetched[-1] == ("evaluation", 8, 1)
    monkeypatch.undo()
    assert saved(tmp_path / "cut")["iter_num"] == (8 if always_save_checkpoint else 4)
    newest = checkpoint.find(tmp_path / "cut", newest=True)
    assert newest.name == (checkpoint.NAME if always_save_checkpoint else checkpoint.INTERRUPTED)
    assert checkpoint.load(newest)["iter_num"] == 8
    assert run(data_dir, tmp_path / "cut", **settings | {"max_iters": 9, "eval_interval": 8}, init_from="resume") == 0
    assert not (tmp_path / "cut" / checkpoint.INTERRUPTED).exists()
    assert evaluations(capsys.readouterr().out)[0] == losses[2]
    alone = (tmp_path / "cut" / checkpoint.NAME).rename(tmp_path / "cut" / checkpoint.INTERRUPTED)
    assert checkpoint.find(tmp_path / "cut", newest=False) == alone


def test_an_interrupted_evaluation_s_best_is_kept(data_dir, tmp_path, monkeypatch):
    """A run that is resumed where the evaluation was cut off writes the checkpoint that this would have written."""
    settings = dict(always_save_checkpoint=False, max_iters=8)
    signal_at(monkeypatch, "evaluation", (8, 1))
    assert run(data_dir, tmp_path, **settings) == 130
    monkeypatch.undo()
    assert run(data_dir, tmp_path, **settings, init_from="resume") == 0
    assert saved(tmp_path)["iter_num"] == 8
    change(tmp_path / checkpoint.NAME, best_val_loss=99.0)
    before = (tmp_path / checkpoint.NAME).stat().st_mtime_ns
    assert run(data_dir, tmp_path, **settings, init_from="resume", eval_only=True) == 0
    assert (tmp_path / checkpoint.NAME).stat().st_mtime_ns == before
    change(tmp_path / checkpoint.NAME, best_val_loss=0.0)
    before = (tmp_path / checkpoint.NAME).stat().st_mtime_ns
    for always in (False, True):
        assert run(data_dir, tmp_path, **settings | {"always_save_checkpoint": always}, init_from="resume") == 0
    assert (tmp_path / checkpoint.NAME).stat().st_mtime_ns == before  # nothing new, nothing written


@pytest.mark.parametrize("eval_only", [False, True])
def test_an_interruption_in_the_first_evaluation(data_dir, tmp_path, capsys, monkeypatch, eval_only, trained):
    before = trained.read_bytes()
    signal_at(monkeypatch, "evaluation", (0, 0))
    assert run(data_dir, tmp_path, eval_only=eval_only) == 130
    assert "nothing was saved" in capsys.readouterr().out
    assert trained.read_bytes() == before


def test_a_loss_that_is_no_number_ends_the_run(data_dir, tmp_path, capsys, monkeypatch):
    step = train.Trainer.step

    def poisoned(self, stopped):
        if self.iteration == 9:
            self.raw_model.lm_head.weight.data.fill_(math.nan)
        return step(self, stopped)

    monkeypatch.setattr(train.Trainer, "step", poisoned)
    assert run(data_dir, tmp_path, log_interval=7) == 1
    error = error_line(capsys)
    assert "loss of iteration 9 is nan" in error and "iteration 8 is saved" in error
    assert saved(tmp_path)["iter_num"] == 8


def test_an_evaluation_alone_is_done_wherever_the_checkpoint_stands(data_dir, tmp_path, capsys):
    assert run(data_dir, tmp_path, max_iters=3) == 0
    assert run(data_dir, tmp_path, max_iters=9, init_from="resume", eval_only=True) == 0
    assert capsys.readouterr().out.count("step 3: train loss") == 2


def test_target_loss(data_dir, tmp_path, capsys):
    assert run(data_dir, tmp_path, target_loss=3.2, max_iters=1000) == 0
    assert int(re.search(r"in (\d+) iterations", capsys.readouterr().out)[1]) < 100
    assert run(data_dir, tmp_path, target_loss=0.1, max_iters=4) == 1
    assert "target_loss=0.1 was not reached" in capsys.readouterr().err


@pytest.mark.parametrize("settings, words", [
    (dict(init_from="resume"), "no ckpt.pt"), (dict(dataset="nothing"), "dataset=nothing"),
    (dict(device="cuda:99"), "device=cuda:99"), (dict(device="tpu"), "device=tpu is unknown"),
    (dict(device="mps"), "device=mps is for one process on a Mac"),
    (dict(n_head=5), "n_embd=32 is not divisible by n_head=5"), (dict(init_from="gpt2"), "needs GPT-2's tokens"),
    (dict(wandb_log=True), "pip install wandb"), (dict(block_size=100000), "too few for block_size=100000"),
    (dict(out_dir="/dev/null"), "/dev/null cannot be made or written to"),
])  # fmt: skip
def test_what_cannot_be_met_is_said_in_a_line(data_dir, tmp_path, capsys, monkeypatch, settings, words):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert run(data_dir, tmp_path, **settings) == 2 and words in error_line(capsys)


def test_a_mac_s_gpu(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    device = train.select_device("mps", 0, 1)
    assert device.type == "mps" and train.select_dtype("auto", device) == "float32"
    with pytest.raises(UsageError, match="one process"):
        train.select_device("mps", 1, 2)


def test_reports_to_wandb(data_dir, tmp_path, capsys, monkeypatch):
    wandb = Mock(Error=RuntimeError)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert run(data_dir, tmp_path, wandb_log=True) == 0
    reported = [call.args[0] for call in wandb.log.call_args_list]
    assert [values["iter"] for values in reported if values["mfu"] > 0] == [4, 8, 12]
    wandb.init.side_effect = RuntimeError("No API key configured.\nUse `wandb login`")
    assert run(data_dir, tmp_path, wandb_log=True) == 2
    assert "configured. Use `wandb login`: set WANDB_MODE=offline" in error_line(capsys)


@pytest.mark.parametrize("flags", [["--dataset=letters"], ["--real_data=False", "--n_embd=4"]])
def test_bench_times_and_records(data_dir, tmp_path, capsys, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    small = "--n_layer=1 --n_head=1 --n_embd=8 --block_size=8 --batch_size=2 --compile=False --device=cpu"
    flags = [f"--data_dir={data_dir}", *small.split(), *flags]
    assert bench.main(flags) == 0
    out = capsys.readouterr().out
    assert re.search(r"^time per iteration: [\d.]+ms, MFU: [\d.]+%\n\Z", out, flags=re.M)
    numbers = re.findall(r"^(\d+/\d+) loss: [\d.]+$", out, flags=re.M)
    assert numbers == [f"{k}/10" for k in range(10)] + [f"{k}/20" for k in range(20)]
    assert bench.main([*flags, "--profile=True"]) == 0 and len(list(tmp_path.glob("bench_log/*.pt.trace.json"))) == 1
    monkeypatch.setattr(train.Trainer, "step", FULL["a CPU"])
    assert bench.main(flags) == 2 and "out of memory with batch_size=2" in error_line(capsys)


FULL = {
    "a CPU": lambda *_: torch.empty(2**60, dtype=torch.uint8),
    "a size that overflows": lambda *_: torch.nn.Linear(2**40, 2**40),
    "NumPy": lambda *_: np.empty(2**60, np.uint8),
    "a GPU": Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")),
}


@pytest.mark.parametrize("full", FULL)
@pytest.mark.parametrize("batch_size, words", [(4, "halve batch_size and double"), (1, "n_embd=32: give a smaller")])
def test_out_of_memory_names_the_remedy(data_dir, tmp_path, capsys, monkeypatch, full, batch_size, words):
    monkeypatch.setattr(train.Trainer, "step", FULL[full])
    assert run(data_dir, tmp_path, batch_size=batch_size) == 2 and words in error_line(capsys)


def test_other_errors_are_not_taken_for_a_lack_of_memory(data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(train.Trainer, "step", Mock(side_effect=RuntimeError("something else")))
    with pytest.raises(RuntimeError, match="something else"):
        run(data_dir, tmp_path)


@pytest.mark.parametrize("variables, words", [
    (dict(RANK="abc"), "RANK=abc in the environment is no number"),
    (START | dict(RANK="0"), "rank 0 at MASTER_ADDR=localhost MASTER_PORT={port}, over gloo: Timed out"),
    (START | dict(RANK="1"), "rank 1 at MASTER_ADDR=localhost MASTER_PORT={port}, over gloo: [Errno "),
    (START | dict(RANK="0", MASTER_ADDR="nowhere.invalid"), "rank 0 at MASTER_ADDR=nowhere.invalid MASTER_PORT="),
    (START | dict(RANK="1", MASTER_PORT="65536"), "rank 1 at MASTER_ADDR=localhost MASTER_PORT=65536, over gloo"),
])  # fmt: skip
def test_a_half_set_environment_of_torchrun(data_dir, tmp_path, capfd, monkeypatch, variables, words):
    """Or one in which processes are missing."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]  # free from here on
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(port=port))
    assert run(data_dir, tmp_path, comm_timeout=1) == 2
    error = error_line(capfd)
    assert words.format(port=port) in error and "torchrun" in error


# --- checkpoints


def test_a_write_that_fails_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / checkpoint.NAME
    checkpoint.save(path, STATE)

    def full_disk(state, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(UsageError, match="No space left on device"):
        checkpoint.save(path, {})
    monkeypatch.undo()
    assert checkpoint.load(path)["iter_num"] == 1
    assert list(tmp_path.iterdir()) == [path]


def killed_while_it_writes(path):
    torch.save = lambda state, file: (file.write(b"half"), file.flush(), os.kill(os.getpid(), signal.SIGKILL))
    with checkpoint.claimed(path.parent):
        checkpoint.save(path, {})


def test_a_killed_writer_leaves_the_old_checkpoint(tmp_path):
    path = tmp_path / checkpoint.NAME
    checkpoint.save(path, STATE)
    writer = multiprocessing.get_context("fork").Process(target=killed_while_it_writes, args=(path,))
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    assert checkpoint.load(path)["iter_num"] == 1
    assert len(list(tmp_path.iterdir())) == 3  # the checkpoint, the lock, and what the writer left
    mine = {".ckpt_mine.tmp", ".ckpt.pt.mine.tmp"}
    for name in mine | {f".{checkpoint.INTERRUPTED}.0123abcd.tmp"}:
        (tmp_path / name).touch()
    with checkpoint.claimed(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {checkpoint.NAME, checkpoint.LOCK} | mine


def test_two_runs_do_not_share_a_folder(data_dir, tmp_path, capsys, trained):
    before = trained.read_bytes()
    with checkpoint.claimed(tmp_path):
        assert run(data_dir, tmp_path) == 2
        assert f"out_dir={tmp_path}: another run trains into it" in error_line(capsys)
        assert run(data_dir, tmp_path, eval_only=True, init_from="resume") == 0
        assert draw(tmp_path) == 0
    assert trained.read_bytes() == before
    assert (tmp_path / checkpoint.LOCK).exists()
    assert run(data_dir, tmp_path, max_iters=4) == 0  # a lock that nobody holds keeps nobody out


def test_a_file_system_without_locks(data_dir, tmp_path, monkeypatch):
    """Runs go on there, and leave alone what another may be writing."""
    leftover = tmp_path / ".ckpt.pt.12345678.tmp"
    leftover.touch()
    monkeypatch.setattr(checkpoint.fcntl, "flock", Mock(side_effect=OSError(38, "Function not implemented")))
    assert run(data_dir, tmp_path, max_iters=4) == 0
    monkeypatch.setattr(checkpoint, "fcntl", None)
    assert run(data_dir, tmp_path, max_iters=4) == 0
    assert leftover.exists()


def test_a_flipped_byte_is_noticed(tmp_path):
    """Any byte of the file: what is loaded is what was saved, or nothing is."""
    path = tmp_path / checkpoint.NAME
    torch.serialization.set_crc32_options(False)  # as another part of the process may have left it
    weight = torch.arange(64.0)
    checkpoint.save(path, STATE | {"model": {"weight": weight}, "config": {"dataset": "letters"}})
    good, whole = path.read_bytes(), checkpoint.load(path)
    within = good.index(weight.numpy().tobytes())
    refused = 0
    for place in sorted({*range(0, len(good), 7), within, within + 255}):
        damaged = bytearray(good)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        try:
            assert same(checkpoint.load(path), whole), place
        except UsageError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 50
    path.write_bytes(good[:within] + b"\xff" + good[within + 1 :])
    with pytest.raises(UsageError, match="data/0 is damaged: the checksum differs"):
        checkpoint.load(path)


def test_what_is_checked_is_what_is_loaded(tmp_path, monkeypatch):
    """Also if a run that goes on replaces the file in between."""
    path = tmp_path / checkpoint.NAME
    checkpoint.save(path, STATE)
    check_sums = checkpoint.check_sums

    def checking(file):
        check_sums(file)
        checkpoint.save(path, STATE | {"iter_num": 2})

    monkeypatch.setattr(checkpoint, "check_sums", checking)
    assert checkpoint.load(path)["iter_num"] == 1


def test_a_checkpoint_is_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, call=call: calls.append(name) or call(*given))
    checkpoint.save(tmp_path / checkpoint.NAME, STATE)
    assert calls == ["fsync", "replace"]


def test_a_file_without_checksums_is_refused(tmp_path):
    path = tmp_path / checkpoint.NAME
    torch.serialization.set_crc32_options(False)
    torch.save(STATE, path)
    torch.serialization.set_crc32_options(True)
    with pytest.raises(UsageError, match="saved without checksums"):
        checkpoint.load(path)


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


@pytest.mark.parametrize("content", [
    {"model": {}, "x": Evil()}, b"", b"text", {"model": {}}, [1, 2], STATE | {"model": [1]},
    STATE | {"model": {1: torch.ones(1)}}, STATE | {"iter_num": "3"}, STATE | {"iter_num": -1},
    STATE | {"position": 1.5}, STATE | {"optimizer": None}, STATE | {"config": "letters"},
    STATE | {"model_args": {"n_layer": 2}}, STATE | {"model_args": vars(CONFIG) | {"n_head": "2"}},
    STATE | {"model_args": vars(CONFIG) | {"n_head": 0}}, STATE | {"model_args": vars(CONFIG) | {"n_head": True}},
    STATE | {"meta": {"tokenizer": "characters", "vocab_size": 2, "characters": "ab"}}, STATE | {"meta": {}},
    STATE | {"meta": {"tokenizer": "characters", "vocab_size": 3, "characters": "aab"}},
])  # fmt: skip
def test_what_is_no_checkpoint_is_refused(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / checkpoint.NAME
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(UsageError, match="not a checkpoint") as error:
        checkpoint.load(path)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "evil").exists()


def test_checkpoints_of_nanogpt(data_dir, tmp_path, capsys, trained):
    """Compiled models' prefix, the mask as a buffer, and nothing of ours: random state, scaler, data position."""
    model = {f"_orig_mod.{name}": tensor for name, tensor in saved(tmp_path)["model"].items()}
    model["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    change(trained, **LIKE_NANOGPT, model=model)
    assert run(data_dir, tmp_path, init_from="resume", n_layer=3) == 0
    out = capsys.readouterr().out
    assert "start anew" in out and "the checkpoint decides: n_layer=2" in out
    state = saved(tmp_path)
    assert (state["iter_num"], state["position"]) == (12, 24)


def change(path, **fields):
    """Replaces fields of a checkpoint, or leaves them out where None is given."""
    state = torch.load(path, weights_only=True) | fields
    torch.save({name: value for name, value in state.items() if value is not None}, path)


@pytest.mark.parametrize("fields, words", [
    (dict(best_val_loss=None), "it has no 'best_val_loss'"), (dict(best_val_loss="low"), "could not convert"),
    (dict(optimizer=None), "it has no 'optimizer'"), (dict(optimizer={"state": {}}), "param_groups"),
    (dict(scaler=None), "it has no 'scaler'"), (dict(rng=[3]), "not subscriptable"),
    (dict(rng=[{"cpu": torch.ones(3), "cuda": None}]), "RNG"),
    (dict(model={"weight": torch.ones(3)}), "Error(s) in loading"),
])  # fmt: skip
def test_a_resume_from_fields_of_wrong_types(data_dir, tmp_path, capsys, fields, words, trained):
    change(trained, **fields)
    assert run(data_dir, tmp_path, init_from="resume") == 2
    error = error_line(capsys)
    assert "the checkpoint does not fit" in error and words in error


@pytest.mark.parametrize("damage", ["shape", "missing"])
def test_an_optimizer_s_state_must_be_of_this_model(data_dir, tmp_path, capsys, damage, trained):
    optimizer = torch.load(trained, weights_only=True)["optimizer"]
    if damage == "shape":
        optimizer["state"][1]["exp_avg_sq"] = torch.ones(3)
    else:
        del optimizer["state"][1]["exp_avg"]
    change(trained, optimizer=optimizer)
    assert run(data_dir, tmp_path, init_from="resume") == 2 and "exp_avg" in error_line(capsys)


def test_a_run_in_float16_may_go_on_from_float32(data_dir, tmp_path, trained):
    """The scaler of the first has no state; and float16 may have skipped all updates: then the optimizer has none."""
    assert run(data_dir, tmp_path, max_iters=8, init_from="resume", dtype="float16") == 0
    optimizer = torch.load(trained, weights_only=True)["optimizer"]
    change(trained, optimizer=optimizer | {"state": {}})
    assert run(data_dir, tmp_path, init_from="resume", dtype="float16") == 0


# --- tokens


def write_letters(folder, characters, pickled=False):
    """A dataset of these characters; with nanoGPT's own meta.pkl if pickled."""
    with Writer(folder) as writer:
        for split in ("train", "val"):
            writer.add(split, [number % len(characters) for number in range(500)])
        writer.finish(Characters(characters))
    if pickled:
        (folder / "meta.json").unlink()
        stoi = {character: number for number, character in enumerate(characters)}
        itos = dict(enumerate(characters))
        (folder / "meta.pkl").write_bytes(pickle.dumps(dict(vocab_size=len(characters), itos=itos, stoi=stoi)))


@pytest.mark.parametrize("characters, words", [
    (LETTERS[:-1], "has 26 tokens, and the weights are for 27"),
    (LETTERS + "!", "has 28 tokens, and the weights are for 27"),
    (LETTERS.upper(), "has other characters than the weights were made with"),
    (LETTERS[::-1], "has other characters than the weights were made with"),
])  # fmt: skip
def test_a_resume_with_other_characters_is_refused(tmp_path, capsys, characters, words, trained):
    write_letters(tmp_path / "data" / "letters", characters)
    before = trained.read_bytes()
    assert run(tmp_path / "data", tmp_path, init_from="resume") == 2
    assert "dataset=letters " + words in error_line(capsys)
    assert trained.read_bytes() == before
    write_letters(tmp_path / "data" / "renamed", LETTERS, pickled=True)
    assert run(tmp_path / "data", tmp_path, dataset="renamed", init_from="resume") == 0


def test_a_checkpoint_that_does_not_say_its_characters(data_dir, tmp_path, capsys, trained):
    """It is resumed with its own dataset, or with one that has the same characters if its own is at hand."""
    change(trained, meta=None)
    write_letters(tmp_path / "data" / "others", LETTERS)
    assert run(tmp_path / "data", tmp_path, dataset="others", init_from="resume") == 2
    assert "the weights are of dataset=letters, and do not say which characters" in error_line(capsys)
    for characters, code in ((LETTERS[::-1], 2), (LETTERS, 0)):
        write_letters(tmp_path / "data" / "letters", characters, pickled=True)
        assert run(tmp_path / "data", tmp_path, dataset="others", init_from="resume") == code
    assert checkpoint.load(trained)["meta"]["characters"] == LETTERS


def test_a_checkpoint_writes_without_its_data(tmp_path, capsys):
    """The characters are in it; a data_dir that is given must agree with them."""
    write_letters(tmp_path / "data" / "letters", LETTERS)
    assert run(tmp_path / "data", tmp_path, max_iters=60, lr_decay_iters=60, always_save_checkpoint=True) == 0
    (tmp_path / "data").rename(tmp_path / "moved")
    capsys.readouterr()
    assert draw(tmp_path) == 0 and "abcdefg\n" in capsys.readouterr().out
    assert draw(tmp_path, f"--data_dir={tmp_path / 'moved'}") == 0
    write_letters(tmp_path / "moved" / "letters", LETTERS.upper())
    assert draw(tmp_path, f"--data_dir={tmp_path / 'moved'}") == 2
    assert "has other characters" in capsys.readouterr().err


def test_characters_of_nanogpt(tmp_path, capsys):
    """Its data trains, its checkpoint writes: with --data_dir, and not by GPT-2's tokens."""
    write_letters(tmp_path / "data" / "theirs", LETTERS, pickled=True)
    settings = dict(dataset="theirs", max_iters=60, lr_decay_iters=60)
    assert run(tmp_path / "data", tmp_path, **settings) == 0
    change(tmp_path / checkpoint.NAME, **LIKE_NANOGPT, config={"dataset": "theirs"})
    capsys.readouterr()
    assert draw(tmp_path) == 2
    error = error_line(capsys)
    assert "is for 27 tokens" in error and "give --data_dir" in error
    assert draw(tmp_path, f"--data_dir={tmp_path / 'data'}") == 0
    assert "abcdefg\n" in capsys.readouterr().out
    assert run(tmp_path / "data", tmp_path, **settings | {"max_iters": 64}, init_from="resume") == 0
    write_letters(tmp_path / "data" / "theirs", LETTERS[:20], pickled=True)
    assert draw(tmp_path, f"--data_dir={tmp_path / 'data'}") == 2


@pytest.mark.parametrize("vocab_size, code", [(50256, 2), (50257, 0), (50304, 0), (50321, 2)])
def test_weights_for_gpt2_s_tokens(tmp_path, capsys, monkeypatch, vocab_size, code):
    monkeypatch.setattr(sample, "make_tokenizer", lambda meta: Characters("".join(map(chr, range(meta["vocab_size"])))))
    arguments = dict(vocab_size=vocab_size, block_size=8, n_layer=1, n_head=1, n_embd=4, bias=False)
    model = GPT(GPTConfig(**arguments), "torch")
    state = {"model": model.state_dict(), "model_args": arguments, "iter_num": 1, "config": {"dataset": "web"}}
    torch.save(state, tmp_path / checkpoint.NAME)
    assert draw(tmp_path) == code
    assert (f"is for {vocab_size} tokens" in capsys.readouterr().err) == bool(code)


def test_a_token_beyond_the_vocabulary_is_not_continued():
    model = make_model().eval()
    for token in (27, -1):
        with pytest.raises(ValueError, match="beyond the vocabulary of 27"):
            model.generate(torch.full((1, 3), token, device=model.lm_head.weight.device), 1)
    assert model.generate(torch.full((1, 3), 26, device=model.lm_head.weight.device), 1).shape == (1, 4)


def test_draws_follow_from_the_seed(tmp_path, capsys, trained):
    texts = []
    for seed in (1, 1, 2):
        capsys.readouterr()
        assert draw(tmp_path, "--max_new_tokens=20", "--top_k=0", f"--seed={seed}") == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_sampling_from_weights_that_are_no_numbers(tmp_path, capsys, trained):
    change(trained, model={name: weight * math.nan for name, weight in saved(tmp_path)["model"].items()})
    assert draw(tmp_path) == 2
    assert "logits are not finite: give another checkpoint" in error_line(capsys)


def test_a_folder_that_the_output_cannot_name(data_dir, tmp_path, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert run(data_dir, tmp_path / "J\u00fcrgen", max_iters=1) == 0
    assert b"rgen/ckpt.pt\n" in out.buffer.getvalue() and saved(tmp_path / "J\u00fcrgen")


def test_sampling_without_memory(tmp_path, capsys, monkeypatch, trained):
    monkeypatch.setattr(GPT, "generate", FULL["a CPU"])
    capsys.readouterr()
    assert draw(tmp_path) == 2 and "out of memory on device=cpu" in error_line(capsys)


# --- nanoGPT itself


RECORD = json.loads(Path(__file__).with_name("nanogpt_losses.json").read_text())
RECORDED = configure(train.Settings, shlex.split(RECORD["command"])[2:], "")[0]


def test_losses_that_nanogpt_prints():
    """The same seed gives the same weights, and our optimizer and learning rates make the same updates of them."""
    torch.manual_seed(RECORDED.seed)
    model = GPT(GPTConfig(vocab_size=27, bias=RECORDED.bias, **TINY))
    optimizer = model.configure_optimizers(RECORDED.weight_decay, 0.0, (RECORDED.beta1, RECORDED.beta2), "cpu")
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def batch():
        tokens = [torch.arange(start, start + 17) % 27 for start in torch.randint(500 - 16, (RECORDED.batch_size,))]
        return torch.stack(tokens)[:, :-1], torch.stack(tokens)[:, 1:]

    drawn, _ = batch(), [batch(), batch()]  # the others for the evaluation before iteration 0
    losses = []
    for number in range(RECORDED.max_iters + 1):
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate(RECORDED, number)
        given = model, optimizer, scaler, [drawn], 1, contextlib.nullcontext, RECORDED.grad_clip
        losses.append(train.optimizer_step(*given).item())
        drawn = batch()
    assert losses == pytest.approx(RECORD["losses"], abs=1e-3)


@pytest.fixture
def nanogpt(tmp_path):
    """nanoGPT's files in a new folder, with the dataset of the record."""
    if not os.environ.get("NANOGPT"):
        pytest.skip("the variable NANOGPT does not name a folder of nanoGPT (github.com/karpathy/nanoGPT, 3adf61e)")
    shutil.copytree(os.environ["NANOGPT"], tmp_path / "nanoGPT", ignore=shutil.ignore_patterns(".git", "*.bin", "out*"))
    write_letters(tmp_path / "nanoGPT" / "data" / "letters", LETTERS, pickled=True)
    return tmp_path / "nanoGPT"


def losses_in(folder, *flags, script="train.py"):
    command = [sys.executable, str(script), *shlex.split(RECORD["command"])[2:], *flags]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return list(losses_of(done.stdout).values())


def test_nanogpt_s_train_py_with_our_model_and_configurator(nanogpt):
    theirs = losses_in(nanogpt)
    assert theirs == pytest.approx(RECORD["losses"], abs=1e-3)
    for name in ("model.py", "configurator.py"):
        (nanogpt / name).unlink()
        (nanogpt / name).symlink_to(FOLDER / name)
    assert losses_in(nanogpt) == theirs


def test_either_trainer_goes_on_from_the_other_s_checkpoint(nanogpt):
    flags = f"--data_dir={nanogpt / 'data'}", "--init_from=resume"
    losses_in(nanogpt)
    ours = losses_in(nanogpt, *flags, "--max_iters=80", script=FOLDER / "train.py")
    theirs = losses_in(nanogpt, flags[1], "--max_iters=120")
    assert len(ours) == len(theirs) == 41 and max(ours + theirs) < RECORD["losses"][-10]


def test_nanogpt_s_config_files_set_what_they_set_there(nanogpt):
    files = sorted((nanogpt / "config").glob("*.py"))
    assert len(files) == 7
    for file in files:
        executed = runpy.run_path(str(file))
        settings = configure(train.Settings, [str(file)], "")[0]
        named = vars(settings).keys() & executed.keys() - {"wandb_run_name"}  # which may hold the time
        assert named and all(getattr(settings, name) == executed[name] for name in named), file


# --- several processes


def losses_of(text):
    return {int(n): float(loss) for n, loss in re.findall(r"^iter (\d+): loss ([\d.]+)", text, flags=re.M)}


def test_two_processes_compute_what_one_does(data_dir, tmp_path, capsys, start):
    program = (  # the name of a run may hold the time, and differ
        "import os, sys; from nanogpt_triton import train\n"
        "sys.exit(train.main([*sys.argv[1:], '--wandb_run_name=ft-' + os.environ['RANK']]))\n"
    )
    process = start(tmp_path / "two", processes=2, program=program)
    assert run(data_dir, tmp_path / "one") == 0
    ours = capsys.readouterr().out
    theirs = process.communicate(timeout=600)[0]
    assert process.returncode == 0, theirs
    assert losses_of(theirs) == pytest.approx(losses_of(ours), abs=2e-4) and len(losses_of(ours)) == 13
    assert theirs.count("using PyTorch's LayerNorm") == 1
    one, two = saved(tmp_path / "one"), saved(tmp_path / "two")
    torch.testing.assert_close(two["model"], one["model"], rtol=1e-3, atol=1e-4)
    assert len(two["rng"]) == 2


@pytest.mark.parametrize("event, flags, message", [
    ("raise train.UsageError('it fails')", [], "rank 1: it fails"),
    ("raise OSError(28, 'The disk is full')", [], "rank 1: [Errno 28] The disk is full"),
    ("os.kill(os.getpid(), signal.SIGKILL)", [], "rank 0: another process has ended, or does not answer"),
    pytest.param("time.sleep(30); os._exit(3)", [], "rank 0: another process has", marks=pytest.mark.slow),
    ("pass", ["--seed=3", "--max_iters=7"], "rank 1 was given max_iters 7 and not 100000, seed 3 and not 1337"),
], ids=["usage", "system", "killed", "silent", "settings"])  # fmt: skip
def test_one_process_s_failure_ends_all(tmp_path, start, event, flags, message):
    """In one line, of the first that fails or notices."""
    program = (
        "import os, signal, sys, time; from nanogpt_triton import train\n"
        "step = train.Trainer.step\n"
        "def failing(self, stopped):\n"
        f"    if self.world.rank == 1 and self.iteration == 3: {event}\n"
        "    return step(self, stopped)\n"
        "train.Trainer.step = failing\n"
        f"sys.exit(train.main(sys.argv[1:] + {flags} * (os.environ['RANK'] == '1')))\n"
    )
    settings = dict(max_iters=100000, eval_interval=100000, comm_timeout=10 if "sleep" in event else 100)
    process = start(tmp_path, processes=2, program=program, **settings)
    out = process.communicate(timeout=600)[0]
    (line,) = [line for line in out.splitlines() if "train.py: error:" in line]
    assert process.returncode != 0 and message in line and ", in failing" not in out
    assert ("iter 2:" in out) is (not flags) and "iter 50:" not in out


def test_processes_end_together_between_two_batches(data_dir, tmp_path, capsys, start):
    """One of two is told to end, in an iteration; the other one has written when it ends: torchrun may end all then."""
    program = (
        "import os, signal, sys, time; from nanogpt_triton import checkpoint, train\n"
        "fetch, save = train.Trainer.fetch, checkpoint.save\n"
        "def fetching(self, batches, number):\n"
        "    if self.world.rank == 1 and batches is self.train_batches and number == 6 * 6 + 1:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return fetch(self, batches, number)\n"
        "def slowly(path, state): time.sleep(1); save(path, state)\n"
        "train.Trainer.fetch, checkpoint.save = fetching, slowly\n"
        "code = train.main()\n"
        "os.write(2, f'rank {os.environ[\"RANK\"]} ends with {code}\\n'.encode())  # a line at once\n"
        "os._exit(code)\n"
    )
    settings = dict(gradient_accumulation_steps=6, eval_interval=100, eval_iters=3)
    process = start(tmp_path / "cut", processes=2, program=program, **settings)
    assert run(data_dir, tmp_path / "whole", **settings) == 0
    ours = capsys.readouterr().out
    out = process.communicate(timeout=600)[0]
    assert out.index("saved ") < out.index("interrupted after iteration 5") < out.index(" ends with 130"), out
    assert evaluations(out)[0] == pytest.approx(evaluations(ours)[0], abs=2e-4)
    state = saved(tmp_path / "cut")
    assert (state["iter_num"], state["position"]) == (6, 36)
    assert run(data_dir, tmp_path / "cut", **settings, init_from="resume") == 0
    whole, cut = (saved(tmp_path / name)["model"] for name in ("whole", "cut"))
    torch.testing.assert_close(cut, whole, rtol=1e-3, atol=1e-4)


def test_accumulation_must_divide_among_processes(data_dir, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="gradient_accumulation_steps=3 is not divisible by 2"):
        make_trainer(data_dir, tmp_path, 0, 2, monkeypatch, gradient_accumulation_steps=3)


@pytest.mark.gpu
def test_deterministic_runs_on_a_gpu_have_the_same_bits(tmp_path, start):
    settings = dict(device="cuda", dropout=0.2, deterministic=True)
    for name, changes in (("whole", {}), ("parts", {"max_iters": 8}), ("parts", {"init_from": "resume"})):
        process = start(tmp_path / name, **settings | changes)  # the libraries' settings are read at their start
        out = process.communicate(timeout=600)[0]
        assert process.returncode == 0, out
    assert same(saved(tmp_path / "whole")["model"], saved(tmp_path / "parts")["model"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_gpu_learns_with_our_layer_norm_compiled(data_dir, tmp_path, capsys, dtype):
    settings = dict(device="cuda", compile=True, dtype=dtype, max_iters=60, lr_decay_iters=60, eval_interval=60)
    assert run(data_dir, tmp_path, **settings) == 0
    out = capsys.readouterr().out
    assert "using Triton-accelerated LayerNorm" in out
    assert float(re.findall(r"val loss ([\d.]+)", out)[-1]) < 1.0


@pytest.mark.parametrize("script", ["train.py", pytest.param("sample.py", marks=pytest.mark.slow)])
def test_the_reader_of_the_output_leaves(data_dir, tmp_path, script):
    """As in `| head -1`: no traceback, and the exit code of a broken pipe."""
    assert run(data_dir, tmp_path, max_iters=1) == 0
    flags = [f"--out_dir={tmp_path}", "--device=cpu", "--start=a"]
    if script == "train.py":
        flags = arguments(data_dir, tmp_path, max_iters=1000000, eval_interval=1000000)
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, str(FOLDER / script), *flags]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    with process:
        try:
            err = process.stderr.read()
            process.wait(timeout=600)
        finally:
            process.kill()
    assert process.returncode == 141 and err == ""
