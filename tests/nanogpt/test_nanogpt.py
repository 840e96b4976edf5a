"""nanogpt_triton's model and trainer: learning, resuming bit by bit, several processes, and how runs end."""

import contextlib
import functools
import io
import json
import math
import os
import re
import runpy
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

import tiny_llama_v3 as llama
from measure.command_line import Failure
from nanogpt_triton import checkpoint, sample, train
from nanogpt_triton import model as gpt
from nanogpt_triton.configurator import configure
from nanogpt_triton.dataset import Batches, Characters, write_dataset
from nanogpt_triton.model import GPT, GPTConfig
from tiny_llama.distributed import World
from tiny_llama_v3 import UsageError

FOLDER = Path(train.__file__).parent
TINY = dict(n_layer=2, n_head=2, n_embd=32, block_size=16)
CONFIG = GPTConfig(vocab_size=27, bias=True, **TINY)
SETTINGS = TINY | dict(
    dataset="letters", batch_size=4, gradient_accumulation_steps=2, eval_iters=2, eval_interval=4, max_iters=12,
    warmup_iters=2, lr_decay_iters=12, learning_rate=1e-2, dropout=0.2, compile=False, device="cpu",
)  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyz "
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER.parent)}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """A dataset of letters that come in alphabetical order, mostly."""
    folder = tmp_path_factory.mktemp("data")
    steps = np.random.default_rng(0).choice([1, 5], 20000, p=[0.9, 0.1])
    letters = steps.cumsum() % 27
    with write_dataset(folder / "letters", Characters(LETTERS)) as add:
        add("train", letters[:18000])
        add("val", letters[18000:])
    return folder


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Sums are added in the same order here and in other processes, and signals act as before after a run."""
    threads, numbers = torch.get_num_threads(), (signal.SIGINT, signal.SIGTERM)
    handlers = [*map(signal.getsignal, numbers)]
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    [*map(signal.signal, numbers, handlers)]


def arguments(data_dir, out_dir, /, **settings):
    settings = SETTINGS | {"data_dir": data_dir, "out_dir": out_dir} | settings
    return [f"--{key}={value}" for key, value in settings.items()]


def run(data_dir, out_dir, /, **settings):
    return train.main(arguments(data_dir, out_dir, **settings))


def draw(out_dir, *flags):
    """Return the exit code of sample.py for a few tokens on a CPU; later flags win."""
    usual = ["--start=ab", "--num_samples=1", "--max_new_tokens=5", "--top_k=1", "--device=cpu"]
    return sample.main([f"--out_dir={out_dir}", *usual, *flags])


@pytest.fixture(scope="module")
def whole(data_dir, tmp_path_factory):
    """whole(**settings): the folder and the output of a run that was not interrupted."""

    @functools.cache
    def run_whole(**settings):
        folder, out = tmp_path_factory.mktemp("whole"), io.StringIO()
        with contextlib.redirect_stdout(out):
            assert run(data_dir, folder, **settings) == 0
        return folder, out.getvalue()

    return run_whole


@pytest.fixture
def long_run(whole):
    """The folder and the output of a run that has learned the alphabet."""
    return whole(max_iters=60, lr_decay_iters=60, eval_interval=20, dropout=0.0)


@pytest.fixture
def trained(long_run, tmp_path):
    """A copy of the long run's folder."""
    return shutil.copytree(long_run[0], tmp_path / "trained")


def saved(folder):
    return checkpoint.load(folder / checkpoint.NAME)


def as_nanogpt(folder, **fields):
    """Make a checkpoint one of nanoGPT's, which have no meta, and replace fields of it."""
    state = torch.load(folder / checkpoint.NAME, weights_only=True) | fields
    del state["meta"]
    torch.save(state, folder / checkpoint.NAME)


def assert_same_state(*folders):
    """Weights, optimizer and the rest of two checkpoints have the same bits."""
    states = [saved(folder) for folder in folders]
    for state in states:
        state["optimizer"] = state["optimizer"]["state"]
        state["model_args"] = vars(state["model_args"])
        del state["config"], state["meta"]
    torch.testing.assert_close(*states, rtol=0, atol=0)


def evaluations(text):
    """Return {iteration: (training loss, validation loss)}."""
    found = re.findall(r"^step (\d+): train loss ([\d.]+), val loss ([\d.]+)", text, flags=re.M)
    return {int(number): (float(training), float(validation)) for number, training, validation in found}


def losses_of(text):
    return {int(n): float(loss) for n, loss in re.findall(r"^iter (\d+): loss ([\d.]+)", text, flags=re.M)}


def error_line(capsys):
    """Return what was printed as an error, which must be one line."""
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


def test_logits_and_loss_are_those_of_gpt2(monkeypatch):
    """As transformers computes them in float64. Targets of -1 are left out; without targets there are the last."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(n_embd=32, n_layer=2, n_head=2)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(activation_function="gelu", **sizes)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # far from their start, where norms and biases do little
            parameter.add_(0.3 * torch.randn_like(parameter))
    library = Mock()
    library.GPT2LMHeadModel.from_pretrained.return_value = theirs
    monkeypatch.setitem(gpt.GPT2_SIZES, "gpt2", sizes)
    monkeypatch.setitem(sys.modules, "transformers", library)
    ours = GPT.from_pretrained("gpt2", dict(dropout=0.3), "torch").eval()
    tokens = tokens_for(ours)[:, :11]
    targets = tokens.roll(-1, dims=1)
    targets[1, 3:] = -1
    logits, loss = ours(tokens, targets)
    expected = theirs.double()(tokens).logits
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours(tokens)[0], logits[:, -1:])
    likely = expected.log_softmax(-1).gather(-1, targets.clamp(0)[..., None])[..., 0]
    chosen = torch.cat([likely[0], likely[1, :3]])
    assert loss.item() == pytest.approx(-chosen.mean().item(), rel=1e-5) and ours.config.dropout == 0.3


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
    results = []
    for layer_norm in ("torch", "triton"):
        model = make_model(layer_norm, GPTConfig(vocab_size=27, bias=bias, **TINY))
        tokens = tokens_for(model)
        loss = model(tokens, tokens.roll(1, dims=1))[1]
        results.append([loss, *torch.autograd.grad(loss, [*model.parameters()])])
    assert "using Triton-accelerated LayerNorm" in capsys.readouterr().out
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device, available, ours", [
    (None, True, True), ("meta", True, False), (None, False, False),
])  # fmt: skip
def test_the_layer_norm_of_a_device(monkeypatch, device, available, ours):
    """Scripts of nanoGPT's make a model without a device, and move it to the GPU then."""
    monkeypatch.setattr(gpt, "TRITON_AVAILABLE", available)
    assert (GPT(CONFIG, device=device).transformer.ln_f.add_layer_norm is gpt.triton_add_layer_norm) == ours


def test_every_weight_gets_a_gradient_and_matrices_decay():
    model = make_model()
    model(*[tokens_for(model)] * 2)[1].backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())
    decayed, others = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu").param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0)
    assert decayed["lr"] == 1e-3 and decayed["betas"] == (0.9, 0.95)
    for group, dims in (decayed, 2), (others, 1):
        assert {*group["params"]} == {p for p in model.parameters() if p.dim() == dims}


def test_gpt2_has_124_million_weights():
    model = GPT(GPTConfig(vocab_size=50257), "torch", "meta")
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
    assert model.config.block_size == 8 and CONFIG.block_size == 16


def test_generation_draws_likely_tokens():
    model = make_model().eval()
    tokens = tokens_for(model, rows=1)
    greedy = model.generate(tokens, 20, top_k=1)
    assert greedy.shape == (1, 36) and torch.equal(greedy[:, :16], tokens)
    # The model sees as many tokens as it has positions.
    for end in range(16, 36):
        assert greedy[0, end] == model(greedy[:, end - 16 : end])[0][0, -1].argmax()
    assert torch.equal(model.generate(tokens, 5, temperature=0), greedy[:, :21])


@pytest.mark.parametrize("top_k, drawn", [(3, {24, 25, 26}), (0, set(range(27))), (99, set(range(27)))])
def test_generation_draws_from_as_many_as_top_k_says(monkeypatch, top_k, drawn):
    model = make_model()
    rising = torch.arange(27.0, device=model.lm_head.weight.device) * 1e-3
    monkeypatch.setattr(model, "forward", lambda tokens: (rising.repeat(len(tokens), 1, 1), None))
    tokens = model.generate(tokens_for(model, rows=200)[:, :8], 3, top_k=top_k)
    assert set(tokens[:, 8:].unique().tolist()) == drawn


def in_this_folder(command, path):
    """Return what Python prints in the folder of the trainer, with another folder on its path."""
    environment = ENVIRONMENT | {"PYTHONPATH": str(path)}
    done = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def test_this_folder_hides_no_library(python, tmp_path):
    """transformers looks for a package that is called kernels."""
    (tmp_path / "kernels.py").touch()
    (tmp_path / "transformers.py").write_text("import kernels\nraise OSError(f'it has {kernels.__file__}')\n")
    _, printed = in_this_folder([python, "sample.py", "--init_from=gpt2"], tmp_path)
    assert printed.endswith(f"sample.py: error: it has {tmp_path / 'kernels.py'}\n")


@pytest.mark.parametrize("flag, words", [("c.py", "8 0.5 torch.Size([2, 1, 27])"), ("--batchsize=4", "batch_size?")])
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
    flag = flag.replace("c.py", str(tmp_path / "c.py"))
    code, printed = in_this_folder([python, "-c", program, flag, "--dropout=0.5"], "")
    assert printed.endswith(f"{words}\n") and code == (2 if "?" in words else 0)


# --- one iteration


def test_learning_rate_rises_and_falls(data_dir, tmp_path, monkeypatch):
    settings = train.Settings(learning_rate=1.0, min_lr=0.1, warmup_iters=10, lr_decay_iters=110)
    rates = {number: train.learning_rate(settings, number) for number in (0, 10, 60, 110, 199)}
    assert rates == pytest.approx({0: 1 / 11, 10: 1.0, 60: 0.55, 110: 0.1, 199: 0.1})
    assert train.learning_rate(train.Settings(decay_lr=False, learning_rate=0.3), 0) == 0.3
    # Each iteration of a run has its own, for all weights.
    trainer = make_trainer(data_dir, tmp_path)
    for number in range(3):
        trainer.step()
        rate = train.learning_rate(trainer.settings, number)
        assert [group["lr"] for group in trainer.optimizer.param_groups] == [rate, rate]


def update(model, batches, grad_clip=0.0, scaled=False):
    """Return the loss of optimizer_step, and what gradient descent at a rate of 1 subtracted from each weight."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler(model.lm_head.weight.device.type, enabled=scaled)
    before = [p.detach().clone() for p in model.parameters()]
    given = model, optimizer, scaler, batches, len(batches), contextlib.nullcontext, grad_clip
    loss = train.optimizer_step(*given).item()
    assert all(p.grad is None for p in model.parameters())
    return loss, [b - p for b, p in zip(before, model.parameters(), strict=True)]


def test_accumulated_batches_are_one_large_batch():
    tokens = tokens_for(make_model())
    batches = [(tokens, tokens.roll(number + 1)) for number in range(3)]
    whole = [torch.cat(parts) for parts in zip(*batches, strict=True)]
    (loss, changes), (expected, exact) = (update(make_model(), given) for given in (batches, [whole]))
    torch.testing.assert_close(changes, exact, rtol=1e-4, atol=1e-6)
    assert loss == pytest.approx(expected)


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_are_clipped_at_their_norm(scaled):
    """Also those of float16, which are kept times 65536 until they are clipped."""
    model = make_model()
    _, changes = update(model, [(tokens_for(model), tokens_for(model))], grad_clip=0.01, scaled=scaled)
    moved = torch.stack([change.norm() for change in changes]).norm()
    assert moved.item() == pytest.approx(0.01, rel=1e-3)


def make_trainer(data_dir, tmp_path, rank=0, size=1, **changed):
    """Return the Trainer of one of size processes, without the others."""
    settings = train.Settings(**SETTINGS | dict(data_dir=str(data_dir), out_dir=str(tmp_path)) | changed)
    return train.Trainer(settings, World(rank, size), torch.device("cpu"))


@pytest.mark.parametrize("dtype, used, scaled", [
    ("auto", torch.float32, False), ("bfloat16", torch.bfloat16, False), ("float16", torch.float16, True),
])  # fmt: skip
def test_autocast(data_dir, tmp_path, dtype, used, scaled):
    """Products are computed in the type of the settings. The gradients of float16 are scaled."""
    trainer = make_trainer(data_dir, tmp_path, dtype=dtype)
    with trainer.autocast():
        logits, _ = trainer.model(torch.zeros(1, 16, dtype=torch.long))
    assert logits.dtype == used and trainer.scaler.is_enabled() == scaled
    trainer.step()
    assert math.isfinite(trainer.settle())


def test_evaluation_is_the_mean_over_its_batches(data_dir, tmp_path):
    """Of either split, without dropout, on other batches than those of the training."""
    trainer = make_trainer(data_dir, tmp_path, dropout=0.5, eval_iters=3)
    losses = trainer.evaluate()
    assert trainer.model.training
    model = trainer.raw_model.eval()
    for split in ("train", "val"):
        batches = Batches(data_dir / "letters", split, 4, 16, train.Settings.seed + 1)
        expected = [model(*(torch.tensor(array) for array in batches[n]))[1].item() for n in range(3)]
        assert losses[split] == pytest.approx(sum(expected) / 3, rel=1e-6)


def test_processes_share_the_batches_and_draw_their_own_dropout(data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "DistributedDataParallel", lambda model, **options: model)
    trainers = [make_trainer(data_dir, tmp_path, *place) for place in ((0, 1), (0, 2), (1, 2))]
    weights = [trainer.raw_model.state_dict() for trainer in trainers]
    torch.testing.assert_close(weights[1:], weights[:-1], rtol=0, atol=0)
    monkeypatch.setattr(train.Trainer, "fetch", lambda self, batches, number: number)
    drawn = []
    monkeypatch.setattr(train, "optimizer_step", lambda *given: drawn.append(([*given[3]], torch.initial_seed())))
    for trainer in trainers * 2:
        trainer.step()
    assert [numbers for numbers, _ in drawn] == [[0, 1], [0], [1], [2, 3], [2], [3]]
    assert len({seed for _, seed in drawn}) == 4  # of two iterations and two ranks
    with pytest.raises(UsageError, match="gradient_accumulation_steps=3 is not divisible by 2"):
        make_trainer(data_dir, tmp_path, 0, 2, gradient_accumulation_steps=3)


# --- runs


def test_a_run_learns_and_its_model_writes(long_run, capsys):
    folder, out = long_run
    val = [validation for _, validation in evaluations(out).values()]
    assert len(val) == 4 and val[0] == pytest.approx(math.log(27), abs=0.1) and val[-1] < 1.0
    assert list(losses_of(out)) == list(range(61))  # as nanoGPT counts
    assert "using PyTorch's LayerNorm" in out and "tokens per iteration will be: 128" in out
    assert draw(folder, "--start=abc", "--num_samples=2", "--max_new_tokens=30") == 0
    *texts, end = capsys.readouterr().out.split("---------------\n")
    assert [text.split("\n")[-2] for text in texts] == 2 * ["abcdefghijklmnopqrstuvwxyz abcdef"] and end == ""
    assert draw(folder, "--start=A") == 2 and "no character 'A'" in error_line(capsys)


def test_draws_follow_from_the_seed(long_run, capsys):
    texts = []
    for seed in (1, 1, 2):
        assert draw(long_run[0], "--max_new_tokens=20", "--top_k=0", "--temperature=9", f"--seed={seed}") == 0
        texts.append(capsys.readouterr().out.splitlines()[-2])
    assert texts[0] == texts[1] != texts[2]


def test_a_line_of_the_log_has_the_mean_time_since_the_last_one(
    data_dir, tmp_path, capsys, monkeypatch, whole, ticking
):
    """Iteration n takes n + 1 seconds here, and an evaluation 100, which count in no line. The loss is that of n."""
    step, evaluate = train.Trainer.step, train.Trainer.evaluate
    monkeypatch.setattr(train.Trainer, "step", lambda self: ticking(self.iteration + 1) or step(self))
    monkeypatch.setattr(train.Trainer, "evaluate", lambda self: ticking(100) or evaluate(self))
    monkeypatch.setattr(GPT, "estimate_mfu", lambda self, sequences, seconds: sequences / 16 / seconds)
    assert run(data_dir, tmp_path, log_interval=3, eval_interval=5, max_iters=10) == 0
    lines = re.findall(r"^iter (\d+): loss ([\d.]+), time ([\d.]+)ms, mfu ([\d.]+)%$", capsys.readouterr().out, re.M)
    # The means of 1; of 2, 3, 4; of 6, 7 after the evaluation before iteration 5; of 8, 9, 10.
    means = {0: ("1000.00", "50.00"), 3: ("3000.00", "16.67"), 6: ("6500.00", "7.69"), 9: ("9000.00", "5.56")}
    losses = losses_of(whole()[1])  # of a run with a line for each iteration
    assert [(int(n), float(loss), *rest) for n, loss, *rest in lines] == [(n, losses[n], *means[n]) for n in means]


def test_the_best_validation_loss_decides(data_dir, tmp_path, monkeypatch, capsys):
    """Not the training loss, nor the last one; and a resumed run knows the best of before."""
    losses = {0: (1, 9), 4: (5, 5), 8: (4, 7), 12: (6, 6)}
    evaluated = {number: dict(train=float(a), val=float(b)) for number, (a, b) in losses.items()}
    monkeypatch.setattr(train.Trainer, "evaluate", lambda self: evaluated[self.iteration])
    for start in ("scratch", "resume"):
        assert run(data_dir, tmp_path, always_save_checkpoint=False, init_from=start) == 0
        assert "best validation loss 5.0000 in 13 iterations" in capsys.readouterr().out
        assert (saved(tmp_path)["iter_num"], saved(tmp_path)["best_val_loss"]) == (4, 5.0)


def test_resumed_runs_have_the_same_bits(data_dir, tmp_path, whole):
    for settings in (dict(max_iters=8), dict(init_from="resume")):
        assert run(data_dir, tmp_path, **settings) == 0
    assert_same_state(tmp_path, whole()[0])


@pytest.mark.parametrize("place, always_save_checkpoint, which", [
    (("training", 5, 11), True, signal.SIGTERM), (("training", 5, 11), False, signal.SIGINT),
    (("evaluation", 8, 1), True, signal.SIGINT),
])  # fmt: skip
def test_a_signal_ends_a_run_between_two_batches(
    data_dir, tmp_path, capsys, monkeypatch, whole, place, always_save_checkpoint, which
):
    """The iteration or evaluation that was begun leaves no trace in a run that is resumed.

    Where only the best is kept, the state goes beside it, and the resumed run takes it from there.
    """
    settings = dict(always_save_checkpoint=always_save_checkpoint)
    folder, out = whole(**settings)
    fetch, done = train.Trainer.fetch, place[1]

    def fetching(self, batches, number):
        kind = "training" if batches is self.train_batches else "evaluation"
        if (kind, self.iteration, number) == place:
            os.kill(os.getpid(), which)
        return fetch(self, batches, number)

    monkeypatch.setattr(train.Trainer, "fetch", fetching)
    assert run(data_dir, tmp_path, **settings) == 130
    monkeypatch.undo()
    interrupted, error = capsys.readouterr()
    assert f"interrupted after iteration {done - 1}; --init_from=resume goes on" in interrupted and not error
    assert list(losses_of(interrupted)) == list(range(done)) and done not in evaluations(interrupted)
    newest = checkpoint.find(tmp_path, newest=True)
    assert newest.name == (checkpoint.NAME if always_save_checkpoint else checkpoint.INTERRUPTED)
    assert checkpoint.load(newest)["iter_num"] == done
    assert always_save_checkpoint or checkpoint.load(checkpoint.find(tmp_path, newest=False))["iter_num"] == 4
    assert run(data_dir, tmp_path, **settings, init_from="resume") == 0
    assert losses_of(interrupted) | losses_of(capsys.readouterr().out) == losses_of(out)
    assert_same_state(tmp_path, folder)
    assert not (tmp_path / checkpoint.INTERRUPTED).exists()


def test_a_loss_that_is_no_number_ends_the_run(data_dir, tmp_path, capsys, monkeypatch):
    step = train.Trainer.step

    def poisoned(self):
        if self.iteration == 9:
            self.raw_model.lm_head.weight.data.fill_(math.nan)
        return step(self)

    monkeypatch.setattr(train.Trainer, "step", poisoned)
    for interval in (7, 5):  # noticed by the evaluation before iteration 12, or by the line of iteration 10
        assert run(data_dir, tmp_path, log_interval=interval) == 1
        assert f"the loss after {dict([(7, 12), (5, 11)])[interval]} iterations is no number" in error_line(capsys)
    assert saved(tmp_path)["iter_num"] == 8


def test_an_evaluation_alone_writes_nothing(data_dir, trained, capsys):
    before = (trained / checkpoint.NAME).read_bytes()
    assert run(data_dir, trained, init_from="resume", eval_only=True) == 0
    assert list(evaluations(capsys.readouterr().out)) == [60]
    assert (trained / checkpoint.NAME).read_bytes() == before


def test_target_loss(data_dir, tmp_path, capsys):
    assert run(data_dir, tmp_path, target_loss=3.2, max_iters=1000) == 0
    assert int(re.search(r"in (\d+) iterations", capsys.readouterr().out)[1]) < 100
    assert run(data_dir, tmp_path, target_loss=0.1, max_iters=4) == 1
    assert "target_loss=0.1 was not reached" in error_line(capsys)


@pytest.mark.parametrize("settings, words", [
    (dict(init_from="resume"), "no ckpt.pt"), (dict(dataset="nothing"), "nothing/prepare.py"),
    (dict(device="cuda:99"), "device=cuda:99"), (dict(device="tpu"), "device=tpu"),
    (dict(n_head=5), "n_embd=32 is not divisible by n_head=5"), (dict(init_from="gpt2"), "made for other tokens"),
    (dict(wandb_log=True), "pip install wandb"), (dict(block_size=100000), "too few for block_size=100000"),
    (dict(out_dir="/dev/null"), "/dev/null"),
])  # fmt: skip
def test_what_cannot_be_met_is_said_in_a_line(data_dir, tmp_path, capsys, monkeypatch, settings, words):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert run(data_dir, tmp_path, **settings) == 2 and words in error_line(capsys)


def test_reports_to_wandb(data_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", wandb := Mock())
    assert run(data_dir, tmp_path, wandb_log=True) == 0
    reported = [call.args[0] for call in wandb.log.call_args_list]
    assert [values["iter"] for values in reported if values["mfu"] > 0 and values["val/loss"] > 0] == [4, 8, 12]


# --- checkpoints


def test_a_write_that_fails_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    """It is on disk before it gets its name."""
    path = tmp_path / checkpoint.NAME
    checkpoint.save(path, {"model": {}, "model_args": vars(CONFIG), "iter_num": 1})
    for function in ("fsync", "replace"):
        monkeypatch.setattr(os, function, Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(Failure, match="No space left on device"):
            checkpoint.save(path, {})
        assert checkpoint.load(path)["iter_num"] == 1 and list(tmp_path.iterdir()) == [path]
        monkeypatch.undo()


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


@pytest.mark.parametrize("content", [
    {"model": {}, "x": Evil()}, b"", b"text", [1, 2], {"model": {}}, {"model": {1: torch.ones(1)}},
    {"model": {}, "model_args": {"layers": 2}},
])  # fmt: skip
def test_what_is_no_checkpoint_is_refused(tmp_path, monkeypatch, content):
    """No code from it is executed."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / checkpoint.NAME
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(UsageError, match=f"{path} cannot be used") as error:
        checkpoint.load(path)
    assert "\n" not in str(error.value) and not (tmp_path / "evil").exists()


def test_checkpoints_of_nanogpt_and_for_it(data_dir, trained):
    """Theirs have a prefix if compiled, the mask as a buffer, and less in them. Ours have all that theirs have."""
    state = torch.load(trained / checkpoint.NAME, weights_only=True)
    assert {"model", "optimizer", "model_args", "iter_num", "best_val_loss", "config"} <= state.keys()
    assert state["model_args"] == dict(vars(CONFIG), bias=False) and state["config"]["dataset"] == "letters"
    model = {f"_orig_mod.{name}": tensor for name, tensor in state["model"].items()}
    model["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    as_nanogpt(trained, model=model, best_val_loss=torch.tensor(9.0))
    assert run(data_dir, trained, init_from="resume", n_layer=3, max_iters=64) == 0
    assert saved(trained)["iter_num"] == 64 and saved(trained)["model_args"].n_layer == 2


# --- tokens


def write_letters(folder, characters):
    """A dataset of these characters."""
    with write_dataset(folder, Characters(characters)) as add:
        for split in ("train", "val"):
            add(split, [number % len(characters) for number in range(500)])


@pytest.mark.parametrize("characters", [LETTERS[:-1], LETTERS + "!", LETTERS.upper(), LETTERS[::-1]])
def test_a_resume_with_other_characters_is_refused(tmp_path, trained, capsys, characters):
    write_letters(tmp_path / "letters", characters)
    before = (trained / checkpoint.NAME).read_bytes()
    assert run(tmp_path, trained, init_from="resume") == 2
    assert "made for other tokens" in error_line(capsys)
    assert (trained / checkpoint.NAME).read_bytes() == before
    write_letters(tmp_path / "renamed", LETTERS)
    assert run(tmp_path, trained, dataset="renamed", init_from="resume", max_iters=61) == 0


def test_a_checkpoint_of_nanogpt_names_its_characters_by_their_folder(tmp_path, trained, capsys):
    """Ours has them. With theirs, --data_dir gives them, and GPT-2's tokens are not taken for them."""
    as_nanogpt(trained, config={"dataset": "theirs"})
    for characters, code in ("", 2), (LETTERS, 0), (LETTERS[:20], 2):
        if characters:
            write_letters(tmp_path / "theirs", characters)
        assert draw(trained, f"--data_dir={tmp_path}") == code
        out, error = capsys.readouterr()
        assert ("--data_dir" in error) == bool(code) and ("abcdefg\n" in out) != bool(code)


@pytest.mark.parametrize("vocab_size, fits", [(50256, False), (50257, True), (50304, True), (50321, False)])
def test_weights_for_gpt2_s_tokens(vocab_size, fits):
    """Their number may have been padded to a multiple of 64."""
    with contextlib.nullcontext() if fits else pytest.raises(UsageError, match="made for other tokens"):
        checkpoint.check_tokens({"model_args": GPTConfig(vocab_size=vocab_size)}, None)


# --- nanoGPT itself


RECORD = json.loads(Path(__file__).with_name("nanogpt_losses.json").read_text())
RECORDED = configure(train.Settings, shlex.split(RECORD["command"])[2:], "")


def test_losses_that_nanogpt_prints():
    """The same seed gives the same weights, and our optimizer and learning rates make the same updates of them."""
    torch.manual_seed(RECORDED.seed)
    model = GPT(GPTConfig(vocab_size=27, bias=RECORDED.bias, **TINY), "torch")
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
    write_letters(tmp_path / "nanoGPT" / "data" / "letters", LETTERS)
    return tmp_path / "nanoGPT"


def losses_in(folder, *flags, script="train.py"):
    command = [sys.executable, str(script), *shlex.split(RECORD["command"])[2:], *flags]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return list(losses_of(done.stdout).values())


def test_either_trainer_goes_on_from_the_other_s_checkpoint(nanogpt):
    """And theirs prints the same losses with our model and configurator."""
    theirs = losses_in(nanogpt)
    flags = f"--data_dir={nanogpt / 'data'}", "--init_from=resume"
    ours = losses_in(nanogpt, *flags, "--max_iters=80", script=FOLDER / "train.py")
    further = losses_in(nanogpt, flags[1], "--max_iters=120")
    assert len(ours) == len(further) == 41 and max(ours + further) < RECORD["losses"][-10]
    for name in ("model.py", "configurator.py"):
        (nanogpt / name).unlink()
        (nanogpt / name).symlink_to(FOLDER / name)
    assert losses_in(nanogpt) == theirs == pytest.approx(RECORD["losses"], abs=1e-3)


def test_nanogpt_s_config_files_set_what_they_set_there(nanogpt):
    files = sorted((nanogpt / "config").glob("*.py"))
    assert len(files) == 7
    for file in files:
        executed = runpy.run_path(str(file))
        settings = configure(train.Settings, [str(file)], "")
        named = vars(settings).keys() & executed.keys() - {"wandb_run_name"}  # which may hold the time
        assert named and all(getattr(settings, name) == executed[name] for name in named), file


# --- several processes


@pytest.fixture
def start(data_dir, tmp_path, python):
    """start(out_dir, program, **settings) starts two processes of a program that takes the arguments of train.py."""

    def popen(out_dir, program, **settings):
        (tmp_path / "program.py").write_text(program)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(tmp_path / "program.py")]
        command = [python, *launcher, *arguments(data_dir, out_dir, **settings)]
        return subprocess.Popen(command, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    return popen


def test_two_processes_compute_what_one_does(data_dir, tmp_path, capsys, start):
    program = (  # the name of a run may hold the time, and differ
        "import os, sys; from nanogpt_triton import train\n"
        "sys.exit(train.main([*sys.argv[1:], '--wandb_run_name=ft-' + os.environ['RANK']]))\n"
    )
    settings = dict(dropout=0.0, eval_iters=3)
    process = start(tmp_path / "two", program, **settings)
    assert run(data_dir, tmp_path / "one", **settings) == 0
    ours = capsys.readouterr().out
    theirs = process.communicate(timeout=600)[0]
    assert process.returncode == 0, theirs
    assert losses_of(theirs) == pytest.approx(losses_of(ours), abs=2e-4) and len(losses_of(ours)) == 13
    for number, losses in evaluations(ours).items():
        assert evaluations(theirs)[number] == pytest.approx(losses, abs=2e-4)
    assert theirs.count("using PyTorch's LayerNorm") == 1
    one, two = saved(tmp_path / "one"), saved(tmp_path / "two")
    torch.testing.assert_close(two["model"], one["model"], rtol=1e-3, atol=1e-4)


def test_settings_are_compared_between_processes(tmp_path, start):
    program = (
        "import os, sys; from nanogpt_triton import train\n"
        "sys.exit(train.main(sys.argv[1:] + ['--seed=3', '--max_iters=7'] * (os.environ['RANK'] == '1')))\n"
    )
    process = start(tmp_path, program)
    out = process.communicate(timeout=600)[0]
    (line,) = [line for line in out.splitlines() if "train.py: error:" in line]
    assert "rank 1 was given max_iters 7 and not 12, seed 3 and not 1337" in line
    assert process.returncode != 0 and "iter 0:" not in out


def test_processes_end_together_between_two_batches(data_dir, tmp_path, start):
    """One of two is told to end, in an iteration; the other one has written when it ends: torchrun may end all then."""
    program = (
        "import os, signal, sys, time; from nanogpt_triton import checkpoint, train\n"
        "fetch, save = train.Trainer.fetch, checkpoint.save\n"
        "def fetching(self, batches, number):\n"
        "    if self.world.rank == 1 and batches is self.train_batches and number == 6 * 6 + 1:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return fetch(self, batches, number)\n"
        "def slowly(path, state): time.sleep(0.5); save(path, state)\n"
        "train.Trainer.fetch, checkpoint.save = fetching, slowly\n"
        "code = train.main()\n"
        "os.write(2, f'rank {os.environ[\"RANK\"]} ends with {code}\\n'.encode())  # a line at once\n"
        "os._exit(code)\n"
    )
    settings = dict(gradient_accumulation_steps=6, eval_interval=100, dropout=0.0)
    process = start(tmp_path / "cut", program, **settings)
    assert run(data_dir, tmp_path / "whole", **settings) == 0
    out = process.communicate(timeout=600)[0]
    assert out.index("saved ") < out.index("interrupted after iteration 5") < out.index(" ends with 130"), out
    assert saved(tmp_path / "cut")["iter_num"] == 6
    assert run(data_dir, tmp_path / "cut", **settings, init_from="resume") == 0
    whole, cut = (saved(tmp_path / name)["model"] for name in ("whole", "cut"))
    torch.testing.assert_close(cut, whole, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_gpu_learns_and_resumes_with_our_layer_norm_compiled(data_dir, tmp_path, capsys, dtype):
    settings = dict(device="cuda", compile=True, dtype=dtype, lr_decay_iters=60, eval_interval=20, deterministic=True)
    for name, changes in (("whole", {}), ("cut", dict(max_iters=20)), ("cut", dict(init_from="resume"))):
        assert run(data_dir, tmp_path / name, **settings | dict(max_iters=60) | changes) == 0
    out = capsys.readouterr().out
    assert "using Triton-accelerated LayerNorm" in out and evaluations(out)[60][1] < 1.0
    assert_same_state(tmp_path / "whole", tmp_path / "cut")
