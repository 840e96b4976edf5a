"""nanogpt_triton's model and trainer: learning, resuming bit by bit, several processes, and how runs end."""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import math
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tiny_llama_v3 as llama
from measure.command_line import UsageError
from nanogpt_triton import checkpoint, flat_adamw, sample, train
from nanogpt_triton import model as gpt
from nanogpt_triton.configurator import configure
from nanogpt_triton.dataset import Batches, Vocabulary, write_dataset
from nanogpt_triton.model import GPT, GPTConfig
from tiny_llama.distributed import World

FOLDER = Path(train.__file__).parent
TINY = dict(n_layer=2, n_head=2, n_embd=32, block_size=16)
CONFIG = GPTConfig(vocab_size=27, bias=True, **TINY)
TOKENS = (torch.arange(32) ** 2 % 27).view(2, 16)
SETTINGS = TINY | dict(
    dataset="letters", batch_size=4, gradient_accumulation_steps=2, eval_iters=2, eval_interval=4, max_iters=12,
    warmup_iters=2, lr_decay_iters=12, learning_rate=1e-2, dropout=0.2, compile=False, device="cpu",
)  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyz\x1b"
interpreted = pytest.mark.skipif(not llama.INTERPRETED, reason="compiled kernels need a GPU")
ENVIRONMENT = os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER.parent)}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """A dataset of letters that come in alphabetical order, mostly."""
    folder = tmp_path_factory.mktemp("data")
    letters = np.where(np.arange(20000) ** 2 % 101 < 10, 5, 1).cumsum() % 27
    with write_dataset(folder / "letters", Vocabulary(LETTERS)) as add:
        add("train", letters[:18000])
        add("val", letters[18000:])
    return folder


@pytest.fixture(autouse=True, scope="module")
def signals():
    """They act as before after a run."""
    numbers = signal.SIGINT, signal.SIGTERM
    handlers = [*map(signal.getsignal, numbers)]
    yield
    [*map(signal.signal, numbers, handlers)]


def arguments(data_dir, out_dir, /, **settings):
    settings = SETTINGS | {"data_dir": data_dir, "out_dir": out_dir} | settings
    return [f"--{key}={value}" for key, value in settings.items()]


def printed(code, main, *arguments):
    """Return what a program prints, of an error its only line; the program must end with this code."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        assert main(arguments) == code, error.getvalue()
    assert error.getvalue().count("\n") == (code in (1, 2))
    return error.getvalue() or out.getvalue()


def run_in(data_dir, out_dir, /, code=0, **settings):
    return printed(code, train.main, *arguments(data_dir, out_dir, **settings))


@pytest.fixture
def run(data_dir, tmp_path):
    """run(code=0, **settings) runs train.py with its checkpoints in tmp_path, and returns what it prints."""
    return functools.partial(run_in, data_dir, tmp_path)


def draw(out_dir, *flags, code=0):
    """Return what sample.py prints for a few tokens on a CPU; later flags win."""
    usual = ["--start=ab", "--num_samples=1", "--max_new_tokens=5", "--top_k=1", "--device=cpu"]
    return printed(code, sample.main, f"--out_dir={out_dir}", *usual, *flags)


@pytest.fixture(scope="module")
def whole(data_dir, tmp_path_factory):
    """whole(**settings): the folder and the output of a run that was not interrupted."""

    @functools.cache
    def run_whole(**settings):
        folder = tmp_path_factory.mktemp("whole")
        return folder, run_in(data_dir, folder, **settings)

    return run_whole


@pytest.fixture
def long_run(whole):
    """The folder and the output of a run that has learned the alphabet."""
    return whole(max_iters=60, lr_decay_iters=60, eval_interval=20, dropout=0.0)


@pytest.fixture
def trained(long_run, tmp_path):
    """A copy of the long run's folder."""
    return shutil.copytree(long_run[0], tmp_path / "trained")


def saved(folder, newest=False):
    return checkpoint.load(checkpoint.find(folder, newest))


def as_nanogpt(folder, **fields):
    """Make a checkpoint one of nanoGPT's, which have no meta, and replace fields of it."""
    state = torch.load(folder / checkpoint.NAME, weights_only=True) | fields
    del state["meta"]
    torch.save(state, folder / checkpoint.NAME)


def assert_same_state(*folders):
    """Weights, optimizer and the rest of two checkpoints have the same bits."""
    states = [[s["model"], s["optimizer"]["state"], s["iter_num"], s["best_val_loss"]] for s in map(saved, folders)]
    torch.testing.assert_close(*states, rtol=0, atol=0)


def figures(text):
    """Return {("iter", iteration): loss, ("step", iteration): validation loss} of what a run prints."""
    found = re.findall(r"^(iter|step) (\d+): .*?loss ([\d.]+)(?:, val loss ([\d.]+))?", text, flags=re.M)
    return {(kind, int(number)): float(validation or loss) for kind, number, loss, validation in found}


# --- model


def make_model(layer_norm="torch", device="cpu", config=CONFIG, **choices):
    torch.manual_seed(0)
    return GPT(config, layer_norm, device, **choices)


def test_logits_and_loss_are_those_of_gpt2(monkeypatch):
    """As transformers computes them in float64. Targets of -1 are left out; without targets there are the last."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(n_embd=32, n_layer=2, n_head=2)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(activation_function="gelu", **sizes)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # far from their start, where norms and biases do little
            parameter.add_(0.3 * torch.randn_like(parameter))
    monkeypatch.setitem(gpt.GPT2_SIZES, "gpt2", sizes)
    monkeypatch.setattr(transformers.GPT2LMHeadModel, "from_pretrained", lambda name, local_files_only: theirs)
    ours = GPT.from_pretrained("gpt2", dict(dropout=0.3), "torch").eval()
    ours.crop_block_size(16)  # which is enough for the tokens
    targets = TOKENS.roll(-1, dims=1)
    targets[1, 3:] = -1
    logits, loss = ours(TOKENS, targets)
    expected = theirs.double()(TOKENS).logits
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours(TOKENS)[0], logits[:, -1:])
    counted = targets >= 0
    assert loss.item() == pytest.approx(F.cross_entropy(expected[counted], targets[counted]).item(), rel=1e-5)
    assert (ours.config.dropout, ours.config.block_size, len(ours.transformer.wpe.weight)) == (0.3, 16, 16)


@pytest.mark.parametrize("vocab, width", [(27, 32), (32, 32)])
def test_padded_logits_have_the_loss_and_gradients_of_plain_ones(vocab, width):
    """What follows the last token has the probability 0."""
    results = []
    for padded in (True, False):
        x, weight = (torch.randn(2, n, 8, generator=torch.Generator().manual_seed(n)) for n in (5, vocab))
        weight = weight[0]
        x.requires_grad_()
        weight.requires_grad_()
        logits = gpt.padded_logits(x, weight) if padded else F.linear(x, weight)
        assert logits.shape[2] == (width if padded else vocab)
        loss = F.cross_entropy(logits.flatten(0, 1), torch.arange(10) % vocab)
        loss.backward()
        results.append((logits[..., :vocab].detach(), loss.detach(), x.grad, weight.grad))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("place", ["drop", "h.1.attn", "h.1.attn.resid_dropout", "h.1.mlp.dropout"])
def test_dropout_acts_in_training_only(place):
    model = make_model()
    setattr(model.transformer.get_submodule(place), "dropout" if place.endswith("attn") else "p", 0.5)
    assert not torch.equal(model(TOKENS)[0], model(TOKENS)[0])
    model.eval()
    assert torch.equal(model(TOKENS)[0], model(TOKENS)[0])


ALL_OURS = dict(layer_norm="triton", attention="triton", gelu="triton", fused_loss=True)


@pytest.mark.triton
@pytest.mark.parametrize("choices, printed", [
    (dict(layer_norm="triton"), "using Triton-accelerated LayerNorm\nusing PyTorch's attention, GELU\n"),
    (dict(attention="triton"), "using Triton-accelerated attention\nusing PyTorch's LayerNorm, GELU\n"),
    (dict(gelu="triton"), "using Triton-accelerated GELU\nusing PyTorch's LayerNorm, attention\n"),
    (dict(fused_loss=True), "using PyTorch's LayerNorm, attention, GELU\n"),
    (ALL_OURS, "using Triton-accelerated LayerNorm, attention, GELU\n"),
])  # fmt: skip
def test_choices_change_neither_loss_nor_gradients(capsys, device, choices, printed):
    """Targets of -1 have no loss. The fused one has overwritten the logits."""
    results, targets = [], TOKENS.clone()
    targets[1, 3:] = -1
    for given in (dict.fromkeys(("layer_norm", "attention", "gelu"), "torch"), choices):
        model = make_model(**dict.fromkeys(("layer_norm", "attention", "gelu"), "torch") | given, device=device)
        logits, loss = model(TOKENS.to(device), targets.to(device))
        assert (logits is None) == model.fused_loss
        results.append([loss, *torch.autograd.grad(loss, [*model.parameters()])])
    assert printed in capsys.readouterr().out
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.triton
def test_attention_is_ours_in_training_alone(monkeypatch, device):
    """Kernels are compiled for each length, which grows while text is generated. They drop nothing."""
    calls = []
    monkeypatch.setattr(gpt, "triton_attention", lambda *given: calls.append(1) or gpt.torch_attention(*given))
    model = make_model(attention="triton", device=device)
    model(TOKENS.to(device))
    assert len(calls) == 2
    model.eval()(TOKENS.to(device))
    model.train()
    for block in model.transformer.h:
        block.attn.dropout = 0.5
    model(TOKENS.to(device))
    assert len(calls) == 2


@pytest.mark.triton
@pytest.mark.parametrize("choices, config, words", [
    (dict(attention="triton"), dict(dropout=0.1), "attention=triton: the kernels drop nothing, and dropout is 0.1"),
    (dict(attention="triton"), dict(n_embd=34), "attention=triton: heads have 17 dimensions"),
    (dict(attention="triton"), dict(n_embd=260), "even numbers up to 128: use attention=auto"),
    (dict(gelu="triton", device="meta"), {}, "gelu=triton: Triton cannot run here (device=meta): use gelu=auto"),
    (dict(fused_loss=True, device="meta"), {}, "fused_loss: Triton cannot run here (device=meta)"),
])  # fmt: skip
def test_choices_that_cannot_be_met(monkeypatch, choices, config, words):
    monkeypatch.setattr(gpt.llama, "INTERPRETED", "device" not in choices)
    with pytest.raises(UsageError, match=re.escape(words)):
        GPT(dataclasses.replace(CONFIG, **config), **choices)


@pytest.mark.parametrize("device, available, ours", [(None, True, 1), ("meta", True, 0), (None, False, 0)])
def test_the_layer_norm_of_a_device(monkeypatch, device, available, ours):
    """Scripts of nanoGPT's make a model without a device, and move it to the GPU then."""
    monkeypatch.setattr(gpt, "TRITON_AVAILABLE", available)
    assert (GPT(CONFIG, device=device).transformer.ln_f.add_layer_norm is gpt.triton_add_layer_norm) == ours


def test_gpt2_has_124_million_weights():
    model, attention = GPT(GPTConfig(vocab_size=50257), "torch", "meta"), 12 * 12 * 768 * 1024
    weights = model.get_num_params()
    assert weights == 124_439_808 - 1024 * 768 and model.get_num_params(non_embedding=False) == 124_439_808
    assert model.flops_per_token() == 6 * weights + attention / 2  # half of it masked
    assert model.estimate_mfu(5, dt=2.0) == pytest.approx(5 * 1024 * (6 * weights + attention) / 2 / 312e12)


@pytest.mark.parametrize("top_k, drawn", [(3, {24, 25, 26}), (0, {*range(27)}), (99, {*range(27)})])
def test_generation_draws_from_as_many_as_top_k_says(monkeypatch, top_k, drawn):
    rising = torch.arange(27.0) / 100
    monkeypatch.setattr(GPT, "forward", lambda self, tokens: (rising.expand(len(tokens), 1, -1), None))
    tokens = make_model().generate(torch.zeros(600, 1, dtype=torch.long), 1, top_k=top_k)
    assert {*tokens[:, 1].tolist()} == drawn


def test_without_a_network_the_weights_of_gpt2_are_asked_for_once(monkeypatch):
    load = Mock(side_effect=OSError("they are not in the cache"))
    monkeypatch.setitem(sys.modules, "transformers", Mock(GPT2LMHeadModel=Mock(from_pretrained=load)))
    monkeypatch.setattr("urllib.request.urlopen", Mock(side_effect=OSError("no network")))
    with pytest.raises(UsageError, match="no network.*HF_HOME"):
        GPT.from_pretrained("gpt2", device="meta")
    load.assert_called_once()


PROGRAM = """
import torch; from model import GPT, GPTConfig
batch_size, dropout = 3, 0.0
exec(open('configurator.py').read())
model = GPT(GPTConfig(vocab_size=27, n_layer=1, n_head=1, n_embd=4, block_size=8))
print(batch_size, dropout, model(idx=torch.zeros(2, 8, dtype=torch.long), targets=None)[0].shape)
"""


@pytest.mark.parametrize("command, words", [
    (("-c", PROGRAM, "{}/c.py", "--dropout=0.5"), "8 0.5 torch.Size([2, 1, 27])"),
    (("-c", PROGRAM, "--batchsize=4"), "there is no key batchsize: did you mean batch_size?"),
    (("sample.py", "--init_from=gpt2"), "(OSError: it has {}/kernels.py): pip install transformers"),
])  # fmt: skip
def test_scripts_in_this_folder(python, tmp_path, command, words):
    """nanoGPT's import the model and execute the configurator. transformers looks for another package kernels."""
    (tmp_path / "c.py").write_text("batch_size = 2 * 4\nmax_iters = 3  # of another script\n")
    (tmp_path / "kernels.py").touch()
    (tmp_path / "transformers.py").write_text("import kernels\nraise OSError(f'it has {kernels.__file__}')\n")
    command = [python, *(part.replace("{}", str(tmp_path)) for part in command)]
    environment = ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=300)
    expected = f"{words.format(tmp_path)}\n"
    assert done.stdout.endswith(expected) or done.stderr.endswith(expected)
    assert done.returncode == (2 if ":" in words else 0)


# --- one iteration


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_are_clipped_at_their_norm(scaled):
    """Also those of float16, which are kept times 65536 until they are clipped."""
    model, norms = make_model(), []
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: norms.append(llama.gradient_norm(model)))
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    train.optimizer_step(model, optimizer, scaler, [(TOKENS, TOKENS)], 1, contextlib.nullcontext, 0.01)
    assert norms == [pytest.approx(0.01, rel=1e-3)]


def train_steps(steps, is_flat, dtype=torch.float32, count=1, compiled=False, clip=0.1, **choices):
    """Return the losses of some steps of a new model, and its weights in fp32 and the optimizer's state after them."""
    model, device = make_model(**choices), torch.device("cpu")
    called = torch.compile(model, backend="aot_eager", disable=not compiled)  # inductor makes C++ of no interpreter
    optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95))
    batches = [(TOKENS.roll(number, 0), TOKENS.roll(-1 - number, 1)) for number in range(count)]
    if is_flat:
        optimizer = flat_adamw.GPTAdamW(model, optimizer, dtype == torch.bfloat16, clip, count)
        run_pass = functools.partial(train.add_gradients, called, optimizer)
        losses = [train.flat_step(run_pass, optimizer, batches) for _ in range(steps)]
        return torch.stack(losses), optimizer.model_state(model), optimizer.state_dict()["state"]
    autocast = functools.partial(torch.autocast, "cpu", dtype, enabled=dtype != torch.float32)
    rest = torch.amp.GradScaler(device.type, enabled=False), batches, count, autocast, clip
    losses = [train.optimizer_step(called, optimizer, *rest) for _ in range(steps)]
    return torch.stack(losses), model.state_dict(), optimizer.state_dict()["state"]


@interpreted
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("is_flat", [False, True])
def test_steps_are_those_of_pytorch(is_flat, count, compiled):
    """A vocabulary of 27 is padded. Gradients are clipped, and only matrices decay."""
    torch._dynamo.reset()
    *expected, state = train_steps(3, False, count=count)
    *ours, our_state = train_steps(3, is_flat, count=count, compiled=compiled, **ALL_OURS)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(our_state, state, rtol=1e-3, atol=1e-7)


@interpreted
@pytest.mark.parametrize("bias, dtype, compiled, calls", [
    (False, torch.float32, False, 2 * 4 + 1), (True, torch.float32, False, 1), (False, torch.float32, True, 1),
    (False, torch.bfloat16, False, 0),
])  # fmt: skip
def test_projections_write_their_gradients_where_the_optimizer_reads_them(monkeypatch, bias, dtype, compiled, calls):
    """Not with a bias, nor inside of compiled code, nor where bf16's add up in fp32. Odd widths are padded."""
    torch._dynamo.reset()
    linear, called = llama.triton_linear, []
    monkeypatch.setattr(llama, "triton_linear", lambda x, weight: called.append(weight) or linear(x, weight))
    choices = ALL_OURS | dict(attention="torch" if dtype == torch.bfloat16 else "triton")
    config = dataclasses.replace(CONFIG, bias=bias, n_embd=36)
    losses, weights, _ = train_steps(2, False, dtype, count=2, config=config)
    our_losses, our_weights, _ = train_steps(2, True, dtype, count=2, compiled=compiled, **choices, config=config)
    torch.testing.assert_close(our_losses, losses, rtol=1e-4 if dtype == torch.float32 else 0.02, atol=0)
    if dtype == torch.float32:
        torch.testing.assert_close(our_weights, weights, rtol=1e-4, atol=1e-4)
    assert len(called) == calls * 2 * 2  # of each batch of each step


@interpreted
@pytest.mark.parametrize("count", [1, 3])
def test_steps_in_bf16_learn_as_those_under_autocast(count):
    """The interpreter multiplies no bf16: attention is PyTorch's."""
    ours = train_steps(8, True, torch.bfloat16, count, clip=1.0, **ALL_OURS | dict(attention="torch"))
    torch.testing.assert_close(ours[0], train_steps(8, False, torch.bfloat16, count, clip=1.0)[0], rtol=0.02, atol=0)
    assert {weight.dtype for weight in ours[1].values()} == {torch.float32} and ours[0][-1] < ours[0][0] - 0.5


@interpreted
@pytest.mark.parametrize("fused_loss", [False, True])
def test_gradients_of_bf16_weights_add_up_in_fp32(fused_loss):
    """A large one leaves room for small ones, which bf16 would lose."""
    model = make_model(fused_loss=fused_loss)
    adamw = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95))
    optimizer = flat_adamw.GPTAdamW(model, adamw, low_precision=True, micro_batches=3)
    parameters, total = [*model.parameters()], 0.0
    optimizer.zero_grad()
    for factor in (300.0, 1.0, 1.0):
        gradients = torch.autograd.grad(factor * model(TOKENS, TOKENS)[1], parameters)
        total = [gradient.float() + before for gradient, before in zip(gradients, total or [0.0] * 99, strict=False)]
        (factor * model(TOKENS, TOKENS)[1]).backward()
    torch.testing.assert_close([p.main_grad for p in parameters], total, rtol=0, atol=0)


@pytest.fixture
def make_trainer(data_dir):
    """make_trainer(rank, size, **settings): the Trainer of one of size processes, without the others."""

    def make(rank=0, size=1, **changed):
        settings = train.Settings(**SETTINGS | {"data_dir": str(data_dir)} | changed)
        return train.Trainer(settings, World(rank, size), torch.device("cpu"))

    return make


def test_learning_rate_rises_and_falls():
    settings = train.Settings(learning_rate=1.0, min_lr=0.1, warmup_iters=10, lr_decay_iters=110)
    rates = {number: train.learning_rate(settings, number) for number in (0, 10, 60, 110, 199)}
    assert rates == pytest.approx({0: 1 / 11, 10: 1.0, 60: 0.55, 110: 0.1, 199: 0.1})
    assert train.learning_rate(train.Settings(decay_lr=False, learning_rate=0.3), 0) == 0.3


@pytest.mark.parametrize("dtype, used", [("auto", "float32"), ("float16", "float16")])
def test_autocast(make_trainer, dtype, used):
    """Products are computed in the type of the settings. The gradients of float16 are scaled."""
    trainer = make_trainer(dtype=dtype)
    with trainer.autocast():
        assert trainer.model(TOKENS)[0].dtype == getattr(torch, used)
    assert trainer.scaler.is_enabled() == (dtype == "float16")


def test_evaluation_is_the_mean_over_its_batches(make_trainer, data_dir):
    """Of either split, without dropout, on other batches than those of the training."""
    trainer = make_trainer(dropout=0.5, eval_iters=3)
    losses = trainer.evaluate()
    assert trainer.model.training
    model = trainer.raw_model.eval()
    for split in ("train", "val"):
        batches = Batches(data_dir / "letters", split, 4, 16, train.Settings.seed + 1, 27)
        expected = [model(*map(torch.tensor, batches[n]))[1].item() for n in range(3)]
        assert losses[split] == pytest.approx(sum(expected) / 3, rel=1e-6)


def test_processes_share_the_batches_and_draw_their_own_dropout(make_trainer, monkeypatch):
    drawn, seeds = [], set()
    monkeypatch.setattr(train, "DistributedDataParallel", lambda model, **options: model)
    monkeypatch.setattr(train.Trainer, "fetch", lambda self, batches, number: number)
    monkeypatch.setattr(train, "optimizer_step", lambda *given: drawn.append([*given[3]]))
    for trainer in [make_trainer(*place) for place in ((0, 1), (0, 2), (1, 2))] * 2:
        trainer.step()
        seeds.add(torch.initial_seed())
    assert drawn == [[0, 1], [0], [1], [2, 3], [2], [3]] and len(seeds) == 4  # of two iterations and two ranks
    with pytest.raises(UsageError, match="gradient_accumulation_steps=3 is not divisible by 2"):
        make_trainer(0, 2, gradient_accumulation_steps=3)


# --- runs


def test_a_run_learns_and_its_model_writes(long_run):
    folder, out = long_run
    assert [number for kind, number in figures(out) if kind == "iter"] == [*range(61)]  # as nanoGPT counts
    assert figures(out)["step", 0] == pytest.approx(math.log(27), abs=0.1) and figures(out)["step", 60] < 1.0
    assert "tokens per iteration will be: 128" in out
    *texts, end = draw(folder, "--start=abc", "--num_samples=2", "--max_new_tokens=30").split("---------------\n")
    assert [text.split("\n")[-2] for text in texts] == 2 * [r"abcdefghijklmnopqrstuvwxyz\x1babcdef"] and end == ""
    assert "no token for 'A': write --start with its own, 'a' 'b'" in draw(folder, "--start=A", code=2)
    assert "not a regular file" in draw(folder, "--start=FILE:/dev/zero", code=2)


def test_draws_follow_from_the_seed(trained, tmp_path):
    """And from the best weights, where a signal has left others beside them."""
    (trained / checkpoint.INTERRUPTED).touch()
    (tmp_path / "prompt").write_text("xyz")
    flags = f"--start=FILE:{tmp_path}/prompt", "--top_k=0", "--temperature=9", "--num_samples=2"
    one, same, other = (re.findall("^xyz.*", draw(trained, *flags, f"--seed={seed}"), re.M) for seed in (1, 1, 2))
    assert one == same and len({*one, *other}) == 4


def test_a_line_of_the_log_has_the_mean_time_since_the_last_one(run, monkeypatch, whole, ticking):
    """Iteration n takes n + 1 seconds here, and an evaluation 100, which count in no line. The loss is that of n."""
    step, evaluate = train.Trainer.step, train.Trainer.evaluate
    monkeypatch.setattr(train.Trainer, "step", lambda self: ticking(self.iteration + 1) or step(self))
    monkeypatch.setattr(train.Trainer, "evaluate", lambda self: ticking(100) or evaluate(self))
    monkeypatch.setattr(GPT, "estimate_mfu", lambda self, sequences, seconds: sequences / 16 / seconds)
    out = run(log_interval=3, eval_interval=5, max_iters=10)
    lines = re.findall(r"^iter (\d+): loss ([\d.]+), time ([\d.]+)ms, mfu ([\d.]+)%$", out, re.M)
    # The means of 1; of 2, 3, 4; of 6, 7 after the evaluation before iteration 5; of 8, 9, 10.
    means = {0: ("1000.00", "50.00"), 3: ("3000.00", "16.67"), 6: ("6500.00", "7.69"), 9: ("9000.00", "5.56")}
    losses = figures(whole()[1])  # of a run with a line for each iteration
    assert {int(n): (float(loss), *rest) for n, loss, *rest in lines} == {
        n: (losses["iter", n], *means[n]) for n in means
    }


def test_profilers_are_told_the_iterations(run, monkeypatch):
    """But for the first one of a run, which compiles. A step lasts until the device is done where the log waits.

    Without a profiler a run spends no time on ranges.
    """
    events = []

    @contextlib.contextmanager
    def named_range(name):
        events.append(f"({name}")
        yield
        events.append(")")

    def noting(name):
        called = getattr(train.Trainer, name)
        return lambda self, *given: events.append(name) or called(self, *given)

    monkeypatch.setattr(train, "named_range", named_range)
    run(max_iters=1)
    assert events == []
    monkeypatch.setenv("ROCP_TOOL_LIBRARIES", "tool.so")
    for name in ("step", "settle", "evaluate"):
        monkeypatch.setattr(train.Trainer, name, noting(name))
    run(max_iters=3, log_interval=2)
    expected = "evaluate settle (first step step settle ) (step step ) (step step settle ) evaluate settle (step step )"
    assert " ".join(events) == expected
    events.clear()
    run(max_iters=10, log_interval=100, init_from="resume", eval_interval=100)
    assert " ".join(events).startswith("(first step step ) (step step ")


def test_the_best_validation_loss_decides(run, tmp_path, monkeypatch):
    """Not the training loss, nor the last one; and a resumed run knows the best of before. All are reported."""
    losses = {0: (1.0, 9.0), 4: (5.0, 5.0), 8: (4.0, 5.0), 12: (6.0, 6.0)}

    def evaluate(trainer):
        if trainer.iteration == 12 and trainer.settings.init_from == "scratch":
            raise KeyboardInterrupt
        return dict(zip(("train", "val"), losses[trainer.iteration], strict=True))

    monkeypatch.setattr(train.Trainer, "evaluate", evaluate)
    monkeypatch.setitem(sys.modules, "wandb", wandb := Mock())
    run(code=130, always_save_checkpoint=False, wandb_log=True)
    out = run(always_save_checkpoint=False, init_from="resume")
    assert "best validation loss 5.0000 in 13 iterations" in out
    assert (saved(tmp_path)["iter_num"], saved(tmp_path)["best_val_loss"]) == (4, 5.0)
    reported = [call.args[0] for call in wandb.log.call_args_list if call.args[0]["mfu"] > 0]
    assert [(r["iter"], r["train/loss"], r["val/loss"]) for r in reported] == [(4, 5.0, 5.0), (8, 4.0, 5.0)]


@pytest.mark.parametrize("place, always_save_checkpoint", [
    (("training", 5, 11), True), (("training", 5, 11), False), (("evaluation", 8, 1), True),
])  # fmt: skip
def test_a_signal_ends_a_run_between_two_batches(run, tmp_path, monkeypatch, whole, place, always_save_checkpoint):
    """The iteration or evaluation that was begun leaves no trace in a run that is resumed.

    Where only the best is kept, the state goes beside it, and the resumed run takes it from there.
    """
    settings, done, fetch = dict(always_save_checkpoint=always_save_checkpoint), place[1], train.Trainer.fetch

    def fetching(self, batches, number):
        kind = "training" if batches is self.train_batches else "evaluation"
        if (kind, self.iteration, number) == place:
            os.kill(os.getpid(), signal.SIGTERM if always_save_checkpoint else signal.SIGINT)
        return fetch(self, batches, number)

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "fetch", fetching)
        interrupted = run(code=130, **settings)
    assert f"interrupted after iteration {done - 1}; --init_from=resume goes on" in interrupted
    assert [saved(tmp_path, newest)["iter_num"] for newest in (True, False)] == [
        done,
        done if always_save_checkpoint else 4,
    ]
    resumed, (folder, out) = run(**settings, init_from="resume"), whole(**settings)
    assert f"\niter {done - 1}:" not in resumed and figures(interrupted + resumed) == figures(out)
    assert_same_state(tmp_path, folder)
    assert not (tmp_path / checkpoint.INTERRUPTED).exists()


@pytest.mark.parametrize("wrong, noticed", [(9, 11), (11, 12)])  # by the line of iteration 10, by an evaluation
def test_a_loss_that_is_no_number_ends_the_run(run, tmp_path, monkeypatch, wrong, noticed):
    rate = train.learning_rate
    monkeypatch.setattr(train, "learning_rate", lambda settings, n: math.nan if n == wrong else rate(settings, n))
    error = run(code=1, log_interval=5)
    assert f"the loss after {noticed} iterations is no number" in error and saved(tmp_path)["iter_num"] == 8


def test_an_evaluation_alone_writes_nothing(run, trained, monkeypatch):
    """Nor does a run that is ended at once."""
    before = (trained / checkpoint.NAME).read_bytes()
    monkeypatch.setenv("FLUX_TASK_RANK", "0")
    monkeypatch.setenv("FLUX_JOB_SIZE", "2")
    out = run(out_dir=trained, init_from="resume", eval_only=True)
    assert [*figures(out)] == [("step", 60)] and "Note: FLUX_JOB_SIZE=2, but RANK is not set" in out
    monkeypatch.setattr(train.Trainer, "fetch", Mock(side_effect=KeyboardInterrupt))
    run(out_dir=trained, code=130)
    assert (trained / checkpoint.NAME).read_bytes() == before


def test_target_loss(run):
    out = run(target_loss=3.2, max_iters=1000)
    assert int(re.search(r"in (\d+) iterations", out)[1]) < 100
    assert "target_loss=0.1 was not reached" in run(code=1, target_loss=0.1, max_iters=4)


@pytest.mark.parametrize("settings, words", [
    (dict(init_from="resume"), "no ckpt.pt"),
    (dict(device="cuda:99"), "device=cuda:99"), (dict(n_head=5), "n_embd=32 is not divisible by n_head=5"),
    (dict(init_from="gpt2"), "made for other tokens"), (dict(wandb_log=True), "pip install wandb"),
    (dict(block_size=100000), "too few for block_size=100000"), (dict(out_dir="/dev/null"), "/dev/null"),
    (dict(out_dir="'a\\0b'"), "null byte"), (dict(device="meta"), "device=meta"),
    (dict(batch_size=2**31 - 1), "out of memory with batch_size=2147483647"),
    (dict(n_embd=2**30), "out of memory with"), (dict(n_layer=2**31 - 1), "n_layer=2147483647"),
])  # fmt: skip
def test_what_cannot_be_met_is_said_in_a_line(run, monkeypatch, settings, words):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert words in run(code=2, **settings)


# --- checkpoints


def test_a_write_that_fails_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    """It is on disk before it gets its name."""
    checkpoint.save(path := tmp_path / checkpoint.NAME, {"model": {}, "model_args": vars(CONFIG)})
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(UsageError, match="No space left on device"):
        checkpoint.save(path, {})
    hidden = RuntimeError("enforce fail")  # as PyTorch ends a file that could not be written
    hidden.__context__ = OSError(28, "No space left on device")
    monkeypatch.setattr(torch, "save", Mock(side_effect=hidden))
    with pytest.raises(UsageError, match="No space left on device"):
        checkpoint.save(path, {})
    assert saved(tmp_path)["model_args"] == CONFIG and [*tmp_path.iterdir()] == [path]


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


@pytest.mark.parametrize("content", [
    {"model": {}, "x": Evil()}, b"text", {"model": {}}, {"model": {}, "model_args": {"layers": 2}},
])  # fmt: skip
def test_what_is_no_checkpoint_is_refused(tmp_path, monkeypatch, content):
    """No code from it is executed."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / checkpoint.NAME
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(UsageError, match=f"{path} cannot be used") as error:
        checkpoint.load(path)
    assert "\n" not in str(error.value) and not (tmp_path / "evil").exists()


def test_checkpoints_of_nanogpt_and_for_it(run, trained):
    """Theirs have a prefix if compiled, the mask as a buffer, and less in them. Ours have all that theirs have."""
    state = torch.load(trained / checkpoint.NAME, weights_only=True)
    assert {"model", "optimizer", "model_args", "iter_num", "best_val_loss"} <= state.keys()
    assert state["model_args"] == dict(vars(CONFIG), bias=False) and state["config"]["dataset"] == "letters"
    model = {f"_orig_mod.{name}": tensor for name, tensor in state["model"].items()}
    model["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1)
    as_nanogpt(trained, model=model, best_val_loss=torch.tensor(9.0))
    # Their size stays as it is, and is told. All other settings are those of this run.
    out = run(out_dir=trained, init_from="resume", n_layer=3, max_iters=64, weight_decay=0.3, beta2=0.5)
    assert saved(trained)["iter_num"] == 64 and saved(trained)["model_args"].n_layer == 2
    assert "the weights decide: n_layer = 2" in out
    groups = saved(trained)["optimizer"]["param_groups"]
    assert [(group["weight_decay"], group["betas"]) for group in groups] == [(0.3, (0.9, 0.5)), (0.0, (0.9, 0.5))]


FLAT = dict(flat_adamw="on", fused_loss="on")


@interpreted
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flat_adamw_resumes_with_the_same_bits(run, tmp_path, dtype):
    settings = FLAT | dict(dtype=dtype)
    run(out_dir=tmp_path / "cut", **settings, max_iters=8)
    for name, start in ("cut", "resume"), ("whole", "scratch"):
        out = run(out_dir=tmp_path / name, **settings, init_from=start)
    assert "using FlatAdamW" in out and saved(tmp_path / "cut")["iter_num"] == 12
    assert_same_state(tmp_path / "whole", tmp_path / "cut")


@interpreted
@pytest.mark.parametrize("first, second", [("on", "off"), ("off", "on")])
def test_checkpoints_of_one_adamw_are_the_others(run, tmp_path, whole, first, second):
    """Weights, moments and steps, in the order of AdamW's groups, and alike in their form."""
    run(flat_adamw=first, max_iters=8)
    run(flat_adamw=second, init_from="resume")
    ours, theirs = saved(tmp_path), saved(whole()[0])
    torch.testing.assert_close(ours["model"], theirs["model"], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ours["optimizer"]["state"], theirs["optimizer"]["state"], rtol=1e-2, atol=1e-5)
    assert ours["optimizer"]["param_groups"] == theirs["optimizer"]["param_groups"]
    assert [*ours["model"]] == [*theirs["model"]]


@interpreted
def test_checkpoints_of_flat_adamw_hold_each_tensor_alone(run, tmp_path):
    """A part of a flat buffer would bring all of it into the file."""
    run(**FLAT, max_iters=4)
    state = torch.load(tmp_path / checkpoint.NAME, weights_only=True)
    tensors = [*state["model"].values(), *itertools.chain(*(s.values() for s in state["optimizer"]["state"].values()))]
    assert all(t.untyped_storage().nbytes() == t.nbytes and t.dtype == torch.float32 for t in tensors)


@interpreted
def test_optimizers_of_other_models_are_refused(run, tmp_path):
    run(**FLAT, max_iters=4)
    state = torch.load(tmp_path / checkpoint.NAME, weights_only=True)
    state["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3, 3)
    torch.save(state, tmp_path / checkpoint.NAME)
    assert "exp_avg 0 has another shape than the weight" in run(code=2, **FLAT, init_from="resume")
    state["optimizer"]["param_groups"][0]["params"].pop()
    torch.save(state, tmp_path / checkpoint.NAME)
    assert "not those of this model" in run(code=2, **FLAT, init_from="resume")


@interpreted
@pytest.mark.parametrize("settings, words", [
    (dict(flat_adamw="on", dtype="float16"), "flat_adamw=on: gradients in float16 have to be scaled: use flat_adamw="),
    (dict(fused_loss="on", dtype="float16"), "fused_loss=on: gradients of the logits are too small for float16"),
    (dict(attention="triton"), "attention=triton: the kernels drop nothing, and dropout is 0.2: use attention=auto"),
    (dict(flat_adamw="yes"), "flat_adamw=yes is none of auto, on, off"),
    (dict(graph="on"), "graph=on: it needs a GPU: use graph=auto"),
    (dict(compile=1), "compile=1 is none of auto, True, False"),
])  # fmt: skip
def test_settings_that_exclude_each_other(run, settings, words):
    assert words in run(code=2, **settings)


@interpreted
def test_flat_adamw_is_for_one_process(make_trainer, monkeypatch):
    with pytest.raises(UsageError, match="flat_adamw=on: DistributedDataParallel exchanges"):
        make_trainer(0, 2, flat_adamw="on")
    obstacle = functools.partial(flat_adamw.obstacle, torch.device("cpu"), torch.bfloat16, 1)
    assert (obstacle(2) is None) == flat_adamw.HAS_GRAD_DTYPE
    monkeypatch.setattr(flat_adamw, "HAS_GRAD_DTYPE", False)
    assert "in bfloat16 in float32" in obstacle(2) and obstacle(1) is None


# --- a captured graph, which a fake one stands for: it calls again what would have been captured


def replaying(work):
    """Do what train.capture() does, on a CPU. A graph has the addresses of the gradients that there were."""
    _, optimizer, *_ = work.args
    assert optimizer.accumulate == 1 or all(p.grad is p.main_grad for p in optimizer.parameters)
    result = work()
    return lambda: result.copy_(work()), result


@pytest.fixture
def graphs(monkeypatch):
    """Whatever is asked for can be captured, and nothing compiled."""
    monkeypatch.setattr(train, "capture", replaying)
    monkeypatch.setattr(train, "graph_obstacle", lambda settings, device, is_flat: None)
    monkeypatch.setattr(torch, "compile", None)


@interpreted
@pytest.mark.parametrize("dtype, count", [("float32", 1), ("bfloat16", 3)])
def test_a_captured_run_has_the_bits_of_an_eager_one(run, tmp_path, graphs, dtype, count):
    """Resumed too: what the warm-up leaves in the gradients counts nowhere, nor what it draws for dropout."""
    settings = FLAT | dict(dtype=dtype, gradient_accumulation_steps=count, max_iters=5, eval_interval=5)
    run(**settings, graph="off", out_dir=tmp_path / "eager")
    run(**settings | dict(max_iters=2), graph="on", out_dir=tmp_path / "cut")
    for name, start in ("cut", "resume"), ("whole", "scratch"):
        out = run(**settings, graph="on", compile="auto", out_dir=tmp_path / name, init_from=start)
        assert out.count("captured in a CUDA graph; not compiled\n") == 1
        assert_same_state(tmp_path / "eager", tmp_path / name)


@interpreted
def test_a_loss_outlives_the_next_replay(make_trainer, graphs):
    trainer = make_trainer(**FLAT, graph="on", dropout=0.0)
    trainer.capture()
    batches = [trainer.fetch(trainer.train_batches, number) for number in (0, 1)]
    losses = [trainer.run_pass(*batch) for batch in batches]
    eager = [train.add_gradients(trainer.raw_model, trainer.optimizer, *batch) for batch in batches]
    assert losses == eager and losses[0] != losses[1]


def test_a_capture_follows_a_warm_up_on_another_stream(monkeypatch):
    """With nothing else on the device, which does not wait for either."""
    log, calls = [], iter("abcd")

    @contextlib.contextmanager
    def noting(name, *given, **options):
        log.append(f"{name} begins")
        yield
        log.append(f"{name} ends")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("sync"))
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "stream", functools.partial(noting, "side stream"))
    monkeypatch.setattr(torch.cuda, "graph", functools.partial(noting, "graph"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Mock(replay="replay"))
    replay, result = train.capture(lambda: log.append("work") or next(calls))
    assert (replay, result) == ("replay", "d")
    side = ["side stream begins", *3 * ["work"], "side stream ends"]
    assert log == ["sync", *side, "sync", "graph begins", "work", "graph ends"]


@interpreted
def test_memory_may_end_in_a_capture(run, graphs, monkeypatch):
    """Whose end then fails as well, and hides why."""

    def fail(work):
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(train, "capture", fail)
    assert "out of memory with batch_size=4" in run(code=2, **FLAT, graph="on")


@interpreted
def test_an_evaluation_alone_is_not_captured(run, trained, graphs, monkeypatch):
    monkeypatch.setattr(train, "capture", None)
    run(out_dir=trained, init_from="resume", eval_only=True, **FLAT, graph="on")


@interpreted
@pytest.mark.parametrize("changed, captured", [
    ({}, True), (dict(graph="off"), False), (dict(dropout=0.1), False), (dict(dropout=0.1, graph="on"), True),
    (dict(layer_norm="torch"), False), (dict(fused_loss="off"), False), (dict(gelu="torch"), True),
    (dict(compile=True), False), (dict(flat_adamw="off"), False),
])  # fmt: skip
def test_what_is_captured(make_trainer, monkeypatch, changed, captured):
    """By default, what is all ours; the rest is compiled."""
    obstacle, is_on = train.graph_obstacle, train.is_on
    cuda = torch.device("cuda")
    monkeypatch.setattr(train, "graph_obstacle", lambda settings, device, is_flat: obstacle(settings, cuda, is_flat))
    monkeypatch.setattr(train, "is_on", lambda name, choice, reason, device: is_on(name, choice, reason, cuda))
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    compiled = []
    ours = dict(layer_norm="triton", attention="auto" if changed.get("dropout") else "triton", dropout=0.0)
    trainer = make_trainer(**ours | dict(compile="auto") | changed)
    assert trainer.is_captured == captured == (not compiled)


@pytest.mark.parametrize("settings, device, is_flat, words", [
    (dict(compile=True), "cuda", True, "captured or compiled, and compile=True"), ({}, "cpu", True, "needs a GPU"),
    ({}, "cuda", False, "FlatAdamW, which is not used"), (dict(compile=False), "cuda", True, None),
])  # fmt: skip
def test_why_nothing_is_captured(settings, device, is_flat, words):
    reason = train.graph_obstacle(train.Settings(**settings), torch.device(device), is_flat)
    assert reason is words or words in reason


@pytest.mark.parametrize("choice, reason, device, expected", [
    ("auto", None, "cuda", True), ("auto", None, "cpu", False), ("auto", "it cannot", "cuda", False),
    ("on", None, "cpu", True), ("off", None, "cuda", False),
])  # fmt: skip
def test_what_is_on(choice, reason, device, expected):
    assert train.is_on("flat_adamw", choice, reason, torch.device(device)) == expected


# --- tokens


def write_letters(folder, characters):
    """A dataset of these characters."""
    with write_dataset(folder, Vocabulary(characters)) as add:
        for split in ("train", "val"):
            add(split, [number % len(characters) for number in range(500)])


@pytest.mark.parametrize("vocab_size, theirs, ours, fits", [
    (27, "", [*LETTERS], True), (27, "", [*LETTERS[:20]], False), (26, "", [*LETTERS], False),
    (64, "", [*LETTERS], True), (128, "", [*LETTERS], False), (50256, "", None, False), (50257, "", None, True),
    (50304, None, None, True), (50305, "", None, False), (27, LETTERS, [*LETTERS], True),
    (64, [*LETTERS], [*LETTERS], True), (27, LETTERS[::-1], [*LETTERS], False), (64, None, [*LETTERS], False),
])  # fmt: skip
def test_weights_are_for_tokens(vocab_size, theirs, ours, fits):
    """Checkpoints of nanoGPT do not say for which. The vocabulary may have been padded to a multiple of 64."""
    state = {"model_args": GPTConfig(vocab_size=vocab_size)}
    if theirs != "":
        state["meta"] = {"characters": theirs}  # a string in older checkpoints
    with contextlib.nullcontext() if fits else pytest.raises(UsageError, match="made for other tokens"):
        checkpoint.check_tokens(state, ours)


def test_a_checkpoint_of_nanogpt_names_its_characters_by_their_folder(run, tmp_path, trained):
    """Ours has them, and goes on with no others. With theirs, --data_dir gives them."""
    write_letters(tmp_path / "theirs", LETTERS[::-1])
    settings = dict(out_dir=trained, data_dir=tmp_path, dataset="theirs", init_from="resume", max_iters=64)
    assert "made for other tokens" in run(code=2, **settings)
    as_nanogpt(trained, config={"dataset": "theirs"})
    assert "--data_dir" in draw(trained, code=2)
    write_letters(tmp_path / "theirs", LETTERS)
    assert "abcdefg\n" in draw(trained, f"--data_dir={tmp_path}")
    run(**settings)
    assert saved(trained)["iter_num"] == 64


WORDS = ["<pad>", "", "the ", "cat ", "sat ", "on ", "a ", "mat ", ".\n", "dog "]


def write_words(folder, meta, tokens=(2, 3, 4, 5, 6, 7, 8, 2, 9, 4, 5, 2, 7, 8)):
    """A dataset of another project, with this meta.pkl, or none."""
    folder.mkdir(exist_ok=True)
    for split in ("train", "val"):
        np.array(tokens * 200, np.uint16).tofile(folder / f"{split}.bin")
    if meta is not None:
        (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


@pytest.mark.parametrize("kind, padded", [(list, 0), (dict, 54), (bytes, 0)])
def test_tokens_may_be_words(run, tmp_path, kind, padded):
    """The embedding has a row for each of vocab_size, and no more. Also in a checkpoint of nanoGPT, with rows added."""
    texts = [word.encode() for word in WORDS] if kind is bytes else WORDS
    itos = dict(enumerate(texts)) if kind is dict else texts
    write_words(tmp_path / "words", {"vocab_size": 10, "itos": itos, "stoi": {}, "merges": [1]})
    settings = dict(data_dir=tmp_path, dataset="words", lr_decay_iters=60, eval_interval=60, dropout=0.0)
    run(**settings, max_iters=60)
    state = torch.load(tmp_path / checkpoint.NAME, weights_only=True)
    assert state["model_args"]["vocab_size"] == len(state["model"]["lm_head.weight"]) == 10
    if padded:
        for name in ("lm_head.weight", "transformer.wte.weight"):
            state["model"][name] = F.pad(state["model"][name], (0, 0, 0, padded))
        for moments in state["optimizer"]["state"].values():
            for name in ("exp_avg", "exp_avg_sq"):
                if moments[name].shape == (10, 32):
                    moments[name] = F.pad(moments[name], (0, 0, 0, padded))
        state["model_args"]["vocab_size"] += padded
        as_nanogpt(tmp_path, **state)
    run(**settings, init_from="resume", max_iters=62)
    out = draw(tmp_path, "--start=the cat ", "--max_new_tokens=6", f"--data_dir={tmp_path}")
    *_, first, second, _ = out.splitlines()
    assert first == "the cat sat on a mat ." and second in ("the ", "a ", "")
    assert "no token for 'bird ': write --start with its own" in draw(tmp_path, "--start=the bird ", code=2)
    assert "no token for '\\n'" in draw(tmp_path, "--start=", code=2)


def test_tokens_without_texts_can_be_trained_on_only(run, tmp_path):
    write_words(tmp_path / "numbers", {"vocab_size": 10})
    run(data_dir=tmp_path, dataset="numbers", max_iters=1, eval_interval=1)
    assert "its meta.pkl had no itos" in draw(tmp_path, code=2)


@pytest.mark.parametrize("meta, tokens, splits, settings, words", [
    (dict(vocab_size=4, itos="ACGT"), [0, 4, 5], ("train", "val"), {}, "token 5, and the model only those below 4"),
    (dict(vocab_size=4, itos="ACGT"), [4], ("val",), {}, "val.bin has token 4"),
    (dict(vocab_size=4, itos="ACGT"), [4], ("train",), {}, "train.bin has token 4"),
    (None, [5, 60000, 7], ("train", "val"), {}, "token 60000, and the model only those below 50304"),
    (None, [50257], ("val",), dict(init_from="gpt2"), "val.bin has token 50257"),
    (dict(vocab_size=27, itos=LETTERS), [27], ("val",), dict(init_from="resume"), "val.bin has token 27"),
])  # fmt: skip
def test_a_token_beyond_the_vocabulary_is_named(
    run, tmp_path, trained, monkeypatch, meta, tokens, splits, settings, words
):
    monkeypatch.setattr(GPT, "from_pretrained", lambda name, options, **where: GPT(
        GPTConfig(vocab_size=50257, **TINY), **where
    ))  # fmt: skip
    write_words(tmp_path / "odd", meta, [1, 2])
    for split in splits:
        np.array(tokens * 200, np.uint16).tofile(tmp_path / "odd" / f"{split}.bin")
    out_dir = trained if settings == dict(init_from="resume") else tmp_path
    assert words in run(code=2, data_dir=tmp_path, dataset="odd", out_dir=out_dir, **settings)


# --- nanoGPT itself


def test_losses_that_nanogpt_prints(make_trainer):
    """The same seed gives the same weights, and the same batches the same updates of them."""
    record = json.loads(Path(__file__).with_name("nanogpt_losses.json").read_text())
    settings = vars(configure(train.Settings, shlex.split(record["command"])[2:], ""))
    del settings["data_dir"]
    trainer, generator = make_trainer(**settings), torch.Generator()
    generator.set_state(torch.get_rng_state())

    def batch():
        tokens = (torch.randint(500 - 16, (4, 1), generator=generator) + torch.arange(17)) % 27
        return tokens[:, :-1], tokens[:, 1:]

    first, _, _, *later = (batch() for _ in range(43))  # two for the evaluation before iteration 0
    trainer.fetch, losses = lambda batches, number: [first, *later][number], []
    for _ in record["losses"]:
        trainer.step()
        losses.append(trainer.loss.item())
    assert losses == pytest.approx(record["losses"], abs=1e-3)


@pytest.mark.parametrize("init_from, block_size, expected", [
    ("scratch", 8, (50304, 8)), ("gpt2", 8, (27, 8)), ("gpt2", 32, (27, 16)),
])  # fmt: skip
def test_models_for_gpt2_s_tokens(monkeypatch, make_trainer, tmp_path, init_from, block_size, expected):
    """A new one, and one that is not larger than the settings say, nor than it was."""
    monkeypatch.setattr(GPT, "from_pretrained", lambda name, options, **where: make_model())
    for split in ("train", "val"):
        TOKENS.numpy().tofile(tmp_path / f"{split}.bin")
    trainer = make_trainer(data_dir=str(tmp_path), dataset="", init_from=init_from, block_size=block_size)
    assert (trainer.raw_model.config.vocab_size, trainer.raw_model.config.block_size) == expected


# --- several processes


@pytest.fixture
def start(data_dir, tmp_path, python):
    """start(out_dir, program, **settings) starts two processes of a program that takes the arguments of train.py."""

    def popen(out_dir, program, **settings):
        (tmp_path / "program.py").write_text(f"import os, sys; from nanogpt_triton import checkpoint, train\n{program}")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(tmp_path / "program.py")]
        command = [python, *launcher, *arguments(data_dir, out_dir, **settings)]
        return subprocess.Popen(command, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    return popen


def test_two_processes_compute_what_one_does(run, tmp_path, start):
    """The name of a run may hold the time, and differ. The share of a GPU's peak is that of one process."""
    program = "train.GPT.estimate_mfu = lambda self, sequences, seconds: sequences\n"
    program += "sys.exit(train.main([*sys.argv[1:], '--wandb_run_name=ft-' + os.environ['RANK']]))\n"
    settings = dict(dropout=0.0, eval_iters=3)
    process = start(tmp_path / "two", program, **settings)
    ours = run(**settings)
    theirs = process.communicate(timeout=600)[0]
    assert process.returncode == 0 and theirs.count("using PyTorch's LayerNorm") == 1, theirs
    assert figures(theirs) == pytest.approx(figures(ours), abs=2e-4)
    assert theirs.count(", mfu 400.00%\n") == 13, theirs
    one, two = saved(tmp_path), saved(tmp_path / "two")
    torch.testing.assert_close(two["model"], one["model"], rtol=1e-3, atol=1e-4)


def test_settings_are_compared_between_processes(tmp_path, start):
    other = "['--seed=3', '--max_iters=7'] * (os.environ['RANK'] == '1')"
    process = start(tmp_path, f"sys.exit(train.main(sys.argv[1:] + {other}))\n")
    out = process.communicate(timeout=600)[0]
    (line,) = [line for line in out.splitlines() if "train.py: error:" in line]
    assert "rank 1 was given max_iters 7 and not 12, seed 3 and not 1337" in line
    assert process.returncode != 0 and "iter 0:" not in out


def test_processes_end_together_between_two_batches(data_dir, tmp_path, start):
    """One of two is told to end, in an iteration; the other one has written when it ends: torchrun may end all then."""
    program = (
        "import signal, time\n"
        "fetch, save = train.Trainer.fetch, checkpoint.save\n"
        "def fetching(self, batches, number):\n"
        "    if self.world.rank == 1 and batches is self.train_batches and number == 6 * 6 + 1:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return fetch(self, batches, number)\n"
        "def slowly(path, state): assert os.environ['RANK'] == '0'; time.sleep(0.5); save(path, state)\n"
        "train.Trainer.fetch, checkpoint.save = fetching, slowly\n"
        "code = train.main()\n"
        "os.write(2, f'rank {os.environ[\"RANK\"]} ends with {code}\\n'.encode())  # a line at once\n"
        "os._exit(code)\n"
    )
    settings = dict(gradient_accumulation_steps=6, eval_interval=100, dropout=0.0)
    process = start(tmp_path / "cut", program, **settings)
    out = process.communicate(timeout=600)[0]
    assert out.index("saved ") < out.index("interrupted after iteration 5") < out.index(" ends with 130"), out
    assert saved(tmp_path / "cut")["iter_num"] == 6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, count, dropout", [
    ("bfloat16", 3, 0.0), ("bfloat16", 3, 0.1), ("bfloat16", 1, 0.1), ("bfloat16", 1, 0.0), ("float32", 3, 0.0),
])  # fmt: skip
def test_a_graph_has_the_losses_and_weights_of_an_eager_run(run, tmp_path, monkeypatch, dtype, count, dropout):
    """To the bit, of two runs and of one that was resumed. The seed of an iteration decides what a replay drops."""
    losses, settle = [], train.Trainer.settle

    def settling(self, *evaluated):
        losses.append(settle(self, *evaluated))
        return losses[-1]

    def losses_of(name, **changed):
        losses.clear()
        out = run(out_dir=tmp_path / name, **settings | changed)
        assert ("captured in a CUDA graph; not compiled" in out) == (changed["graph"] != "off")
        return [*losses]

    monkeypatch.setattr(train.Trainer, "settle", settling)
    settings = dict(device="cuda", dtype=dtype, dropout=dropout, deterministic=True, max_iters=5, eval_interval=5)
    settings |= dict(gradient_accumulation_steps=count, bias=False)
    expected, captured = losses_of("eager", graph="off"), dict(graph="on" if dropout else "auto")
    assert losses_of("one", **captured) == losses_of("two", **captured) == expected and len({*expected}) > 5
    losses_of("cut", **captured, max_iters=2, eval_interval=2)
    assert losses_of("cut", **captured, init_from="resume")[-3:] == expected[-3:]
    for name in ("one", "two", "cut"):
        assert_same_state(tmp_path / "eager", tmp_path / name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, count, dropout", [("bfloat16", 1, 0.0), ("bfloat16", 2, 0.2), ("float32", 2, 0.0)])
def test_a_gpu_learns_and_resumes_with_our_kernels_compiled(run, tmp_path, dtype, count, dropout):
    settings = dict(device="cuda", compile=True, dtype=dtype, lr_decay_iters=60, eval_interval=20, deterministic=True)
    settings |= dict(gradient_accumulation_steps=count, dropout=dropout)
    run(out_dir=tmp_path / "cut", **settings, max_iters=20)
    for name, start in ("cut", "resume"), ("whole", "scratch"):
        out = run(out_dir=tmp_path / name, **settings, max_iters=60, init_from=start)
    assert "using Triton-accelerated LayerNorm" in out and "using FlatAdamW" in out
    assert ("attention" in out.split("Triton-accelerated")[1].split("\n")[0]) == (not dropout)
    assert figures(out)["step", 60] < 1.0
    assert_same_state(tmp_path / "whole", tmp_path / "cut")
