"""What a training adds to a step: micro-batches, clipping, a schedule, and models that come from and go to folders."""

import dataclasses
import functools
import itertools
import math
import os
import signal
from unittest.mock import Mock

import pytest
import torch
from torch.testing import assert_close

import tiny_llama_v3 as llama
from tests.core.tiny import SMALL, TINY, owner_of, run_of, without_groups
from tiny_llama import checkpoint

IMPLEMENTATIONS = [pytest.param("triton", marks=pytest.mark.triton), "torch", "sdpa"]
FOUR_IN_TWO = dict(batch_size=2, accumulate=2)
COSINE = dict(schedule="cosine", warmup_fraction=0.3)


def trained_in_fp64(config, steps):
    """Return (losses, norms, weights) of PyTorch's own clipping, schedulers and AdamW, in float64, on whole batches."""
    whole = dataclasses.replace(config, batch_size=config.sequences_per_step, accumulate=1, impl="torch")
    step = llama.TrainStep(whole, "cpu")
    model = step.model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.01)
    warmup = round(config.warmup_fraction * config.num_steps)
    rise = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / (warmup + 1)))
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, config.num_steps - warmup, eta_min=config.learning_rate / 10
    )
    losses, norms = [], []
    for number, (tokens, targets) in enumerate(itertools.islice(llama.batches(whole), steps)):
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)))
        optimizer.step()
        if number < warmup:
            rise.step()
        elif config.schedule == "cosine":
            fall.step()
        losses.append(loss.item())
    return losses, norms, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("changes", [
    FOUR_IN_TWO, dict(clip=0.5), COSINE, dict(warmup_fraction=0.6), FOUR_IN_TWO | COSINE | dict(clip=0.9),
], ids=["micro-batches", "clip", "cosine", "warm-up", "all"])  # fmt: skip
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_training_is_that_of_pytorch_in_float64(device, impl, changes):
    config = dataclasses.replace(SMALL, impl=impl, data="markov", num_steps=7, **changes)
    losses, norms, weights = trained_in_fp64(config, 7)
    step, records = run_of(config, torch.device(device))
    assert [record.loss for record in records] == pytest.approx(losses, rel=2e-5)
    assert [record.grad_norm for record in records] == pytest.approx(norms, rel=2e-4)
    if config.clip:
        assert max(norms) > 1.1 * config.clip
    for (name, weight), exact in zip(step.state_dict().items(), weights, strict=True):
        assert_close(weight.cpu().double(), exact, rtol=0, atol=2e-4, msg=name)


@pytest.mark.triton
@pytest.mark.parametrize("grouped", [True, False])
def test_micro_batches_have_the_gradients_of_the_whole_batch(make_step, grouped):
    """With a frozen weight, and of a padded vocabulary; the second step overwrites what the first has added up."""
    with without_groups() if not grouped else pytest.MonkeyPatch.context():
        few, whole = make_step(batch_size=1, accumulate=3), make_step(batch_size=3)
    for step in (few, whole):
        step.freeze("layers.0.ffn_norm.weight")
        batches = llama.batches(step.config)
        for _ in range(2):
            step.load(*next(batches))
            step.run()
            step.world.collect_gradients(step.optimizer)
    assert few.loss.item() == pytest.approx(whole.loss.item(), rel=1e-6)
    for (name, p), q in zip(few.model.named_parameters(), whole.model.parameters(), strict=True):
        if "layers.0.ffn_norm" in name:
            assert p.grad is q.grad is None
            continue
        assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4 * q.grad.abs().max().item(), msg=name)


def test_a_batch_of_another_shape_is_refused(make_step):
    """One sequence would be repeated, and train as if the batch had many of it."""
    step = make_step()
    tokens, targets = step.tokens.clone(), step.targets.clone()
    assert len(tokens) > 1
    for batch in ((tokens[:1], targets), (tokens, targets[:1]), (tokens[:, :1], targets)):
        with pytest.raises(ValueError, match=r"the batch has the shape \(.*\), and \(.*\) is needed"):
            step.load(*batch)


def test_phases_of_micro_batches_are_timed_where_they_are(make_step):
    step = make_step(dataclasses.replace(SMALL, impl="torch", accumulate=3))
    assert list(step.phases) == "forward,backward,forward 2,backward 2,forward 3,backward 3,optimizer".split(",")
    records = []
    llama.train(step, llama.batches(step.config), records)
    for record in records:
        assert list(record.phase_ms) == ["forward", "backward", "optimizer"]
        assert sum(record.phase_ms.values()) == pytest.approx(record.batch_ms)
    summary = llama.summarize(step, records)
    seconds = summary["batch_ms"]["mean"] / 1e3
    assert summary["samples_per_second"] * seconds == pytest.approx(3)
    assert summary["tokens_per_second"] * seconds == pytest.approx(3 * SMALL.seq_len)


@pytest.mark.triton
@pytest.mark.parametrize("low_precision", [False, True])
def test_flat_adamw_clips_and_decays_as_asked(device, low_precision):
    """The norm is that of the mean of what was added up, without the gradients of weights that have none any more."""
    randn = functools.partial(torch.randn, device=device, generator=torch.Generator(device).manual_seed(0))
    values = [randn(40, 60), randn(1500), randn(70)]
    ours, theirs = torch.nn.ParameterList(values), torch.nn.ParameterList(v.double() for v in values)
    options = dict(weight_decay=lambda p: 0.5 if p.dim() == 2 else 0.0, max_norm=2.0, accumulate=4)
    optimizer = owner_of(ours, 1e-2, low_precision, **options)
    groups = [dict(params=[theirs[0]], weight_decay=0.5), dict(params=[*theirs[1:]], weight_decay=0.0)]
    reference = torch.optim.AdamW(groups, lr=1e-2)
    for number, scale in enumerate([0.01, 30.0, 1.0, 0.01]):
        for index, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad = q.grad = None
            if index < 2 or number < 2:  # the third has none from the third step on
                p.grad = (scale * randn(*p.shape)).to(p)
                q.grad = p.grad.double() / 4
        norm = torch.nn.utils.clip_grad_norm_(theirs, 2.0)
        optimizer.step()
        reference.step()
        assert optimizer.norm.item() == pytest.approx(norm.item(), rel=1e-5)
    for weight, q in zip(optimizer.weights(), theirs, strict=True):
        assert_close(weight.double(), q.detach(), rtol=1e-5, atol=2e-6)
    ours[0].grad = torch.full_like(ours[0], 8.0)  # a sum that no step has seen
    optimizer.average_gradients()
    assert ours[0].grad.eq(2.0).all() and ours[0].main_grad.eq(2.0).all()


def test_a_schedule_rises_from_the_first_step_and_ends_at_a_tenth():
    rate = functools.partial(llama.cosine_rate, peak=8.0, least=2.0, warmup=3, total=7)
    assert [rate(number) for number in range(9)] == pytest.approx(
        [2.0, 4.0, 6.0, 8.0, 8.0 - 3 * (1 - 0.5**0.5), 5.0, 2.0 + 3 * (1 - 0.5**0.5), 2.0, 2.0]
    )
    config = dataclasses.replace(SMALL, num_steps=7, **COSINE)
    assert config.learning_rate_of(7) == pytest.approx(config.learning_rate / 10)


# --- models in folders


@pytest.fixture
def cli(capsys, tmp_path):
    """cli(*flags) runs the script; returns (exit code, lines of steps without their times, all that was printed)."""
    tiny = {field.name: getattr(SMALL, field.name) for field in dataclasses.fields(llama.Config)}
    names = "hidden_dim num_layers num_heads num_kv_heads ffn_dim vocab_size batch_size seq_len learning_rate".split()
    sizes = [str(part) for name in names for part in (llama.flag_of(name), tiny[name])]

    def run(*flags):
        own = [] if "--resume" in flags else [*sizes, "--num-steps", "6", "--warmup-steps", "1", "--data", "markov"]
        flags = [*own, *map(str, flags), "--output-dir", str(tmp_path / "results")]
        code = llama.main(flags, "tiny_llama_v3.py")
        out, err = capsys.readouterr()
        steps = [line.split(" | ")[:-2] for line in out.splitlines() if line.startswith("step ")]
        losses = {line[0]: line[1:] for line in (each[:3] for each in steps)}
        return code, losses, out + err

    return run


def stop_after(monkeypatch, number):
    """Have the run be asked to stop in its step of this number, as by SIGTERM, warm-up included."""
    count, step = itertools.count(1), llama.TrainStep.optimizer_step

    def optimizer_step(self):
        step(self)
        if next(count) == number:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(llama.TrainStep, "optimizer_step", optimizer_step)


@pytest.fixture(autouse=True)
def own_signals():
    """A program that calls the script, such as a notebook, has its own handlers back, however the run has ended."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    after = {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


RUNS = {
    "ours": ["--moments", "bf16", "--clip", "0.7", "--schedule", "cosine", "--warmup-fraction", "0.5"],
    "whole steps": ["--timing", "step", "--untied-head", "--accumulate", "2", "--schedule", "cosine"],
    "sdpa": ["--impl", "sdpa", "--clip", "0.7", "--schedule", "cosine"],
}


@pytest.mark.parametrize("name", [pytest.param("ours", marks=pytest.mark.triton),
                                  pytest.param("whole steps", marks=pytest.mark.triton), "sdpa"])  # fmt: skip
def test_a_resumed_run_has_the_same_bits(cli, monkeypatch, tmp_path, name):
    """Stopped by a signal within a step, which is finished first, and then by --num-steps."""
    code, all_losses, _ = cli(*RUNS[name], "--save", tmp_path / "whole")
    assert code == 0 and len(all_losses) == 6
    folder = tmp_path / "parts"
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        code, first, out = cli(*RUNS[name], "--save", folder)
    assert code == 130 and "Interrupted after 2 of 6 steps." in out and f"Model after 2 steps: {folder}" in out
    code, rest, out = cli("--resume", folder)
    assert code == 0 and "6 steps of which 2 are done" in out
    assert first | rest == all_losses and len(first) == 2 and len(rest) == 4
    expected, actual = (checkpoint.read_training(tmp_path / part, "--resume") for part in ("whole", "parts"))
    assert actual[0] == expected[0] == 6 and actual[1].keys() == expected[1].keys()
    assert all(torch.equal(actual[1][key], value) for key, value in expected[1].items())
    weights = [weights_of(tmp_path / part, "resume") for part in ("whole", "parts")]
    assert all(map(torch.equal, *(each.values() for each in weights)))


def weights_of(folder, field):
    """Return what a TrainStep starts from that is given a folder as this field of Config."""
    fields = checkpoint.model_fields(folder, llama.flag_of(field)) | {field: str(folder), "seq_len": SMALL.seq_len}
    return llama.TrainStep(llama.Config(**fields), "cpu").state_dict()


def test_flags_of_a_resumed_run(cli, tmp_path):
    """All are those of the saved run but --check; what is given again holds, but not the sizes of the model."""
    folder = tmp_path / "model"
    _, _, out = cli("--impl", "sdpa", "--num-steps", 2, "--seed", 7, "--check", "--save", folder)
    assert "Check against PyTorch" in out
    code, losses, out = cli("--resume", folder, "--num-steps", 3, "--learning-rate", 0.5)
    assert code == 0 and list(losses) == ["step    3/3"] and "markov data, seed 7" in out
    assert "Check against PyTorch" not in out
    for flags, words in [
        ([], "--num-steps 3: --resume"),
        (["--hidden-dim", 32], "--hidden-dim 32 contradicts --resume"),
        (["--num-steps", 9, "--impl", "triton"], "give the --impl it was trained with"),
        (["--num-steps", 9, "--init-from", folder], "--init-from"),
    ]:
        code, losses, out = cli("--resume", folder, *flags)
        assert code == 2 and not losses and words in out


def test_a_run_starts_from_the_weights_of_a_folder(cli, tmp_path):
    cli("--impl", "sdpa", "--num-steps", 4, "--save", tmp_path / "first")
    given = ["--impl", "sdpa", "--init-from", tmp_path / "first", "--check", "--seed", 42]
    code, losses, out = cli(*given, "--save", tmp_path / "second")
    assert code == 0 and len(losses) == 6 and "passed" in out
    initial = weights_of(tmp_path / "first", "init_from")
    expected = checkpoint.read_weights(tmp_path / "first", list(initial), "--init-from")
    assert all(torch.equal(weight, expected[name]) for name, weight in initial.items())
    with pytest.raises(llama.UsageError, match="--init-from .* has hidden_dim 16, and the Config 512"):
        llama.TrainStep(llama.Config(init_from=str(tmp_path / "first")), "cpu")


@pytest.mark.parametrize("timing", ["phases", "step"])
def test_a_diverged_run_replaces_no_model(cli, tmp_path, timing):
    """It is saved where none is, to be looked at; nobody goes on from it by mistake."""
    folder, given = tmp_path / "model", ["--impl", "sdpa", "--timing", timing]
    code, _, out = cli(*given, "--learning-rate", 1e30, "--save", folder)
    assert code == 1 and "its weights are of no use" in out and (folder / "model.safetensors").exists()
    code, _, out = cli(*given, "--init-from", folder)
    assert code == 2 and "not finite" in out
    good = tmp_path / "good"
    cli(*given, "--num-steps", 2, "--save", good)
    before = (good / "model.safetensors").read_bytes()
    code, _, out = cli("--resume", good, "--num-steps", 9, "--learning-rate", 1e30)
    assert code == 1 and "Not saved, as the run diverged" in out
    assert (good / "model.safetensors").read_bytes() == before


def test_a_signal_waits_for_the_model_to_be_saved(cli, monkeypatch, tmp_path):
    """And ends the run then, which is not evaluated any more."""
    write = checkpoint.write

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        write(*arguments)

    monkeypatch.setattr(checkpoint, "write", interrupted)
    code, losses, out = cli("--impl", "sdpa", "--save", tmp_path / "model")
    assert code == 130 and len(losses) == 6 and "Results: " in out
    assert checkpoint.read_training(tmp_path / "model", "--resume")[0] == 6


def test_a_second_signal_ends_a_step_at_once(cli, monkeypatch, tmp_path):
    """What it leaves is half a step, and is not saved."""
    count, backward = itertools.count(1), llama.TrainStep.backward

    def interrupted(self, *args):
        if next(count) == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        backward(self, *args)

    monkeypatch.setattr(llama.TrainStep, "backward", interrupted)
    code, losses, out = cli("--impl", "sdpa", "--save", tmp_path / "model")
    assert code == 130 and len(losses) == 2 and "Not saved, as a second signal has cut a step short" in out
    assert not (tmp_path / "model" / "model.safetensors").exists()


def test_what_cannot_be_saved_is_said_before_the_training_or_kept_elsewhere(cli, monkeypatch, tmp_path):
    folder = tmp_path / "model"
    cli("--impl", "sdpa", "--save", folder)
    code, losses, out = cli("--impl", "sdpa", "--save", folder)
    assert code == 2 and not losses and "holds a model already" in out
    monkeypatch.setattr(checkpoint, "write", Mock(side_effect=llama.UsageError("--save X: full")))
    code, losses, out = cli("--impl", "sdpa", "--save", tmp_path / "other")
    assert code == 2 and len(losses) == 6 and "Results: " in out and "--save X: full" in out


@pytest.mark.parametrize("flags, words", [
    (["--accumulate", "0"], "--accumulate 0 is out of range"),
    (["--clip", "0"], "--clip 0.0 is out of range"),
    (["--warmup-fraction", "1.5"], "--warmup-fraction 1.5 is out of range"),
    (["--schedule", "linear"], "--schedule linear does not exist: choose one of constant, cosine"),
    (["--resume", "nowhere"], "--resume nowhere"),
    (["--init-from", "nowhere"], "--init-from nowhere"),
    (["--init-from", "a", "--resume", "b"], "--init-from a contradicts --resume b"),
])  # fmt: skip
def test_flags_out_of_range(cli, flags, words):
    code, losses, out = cli(*flags)
    assert code == 2 and not losses and words in out and out.count("\n") == 1


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [
    dict(use_amp=True, graph=True), dict(use_amp=True, graph=True, timing="step", moments="bf16", accumulate=2),
    dict(fp8=True, graph=True, hidden_dim=128, ffn_dim=256, seq_len=16, vocab_size=64),
], ids=["graph", "one graph", "fp8"])  # fmt: skip
def test_captured_runs_follow_the_schedule_and_resume_to_the_bit(cli, tmp_path, changes):
    flags = dict(clip=0.5, schedule="cosine", warmup_fraction=0.4, warmup_steps=2) | changes
    flags = [
        part for name, value in flags.items() for part in [llama.flag_of(name), value][: 1 if value is True else 2]
    ]
    eager = [flag for flag in flags if flag != "--graph"]
    code, all_losses, out = cli(*flags, "--save", tmp_path / "whole")
    assert code == 0, out
    assert cli(*eager)[1] == all_losses
    cli(*flags, "--num-steps", 6, "--save", tmp_path / "parts")
    assert all_losses  # stopped at a step of the same schedule: by a signal
    (tmp_path / "stopped").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        count, replayed = itertools.count(1), llama.TrainStep.follow_schedule

        def follow_schedule(self, number):
            replayed(self, number)
            if next(count) == 3:
                os.kill(os.getpid(), signal.SIGTERM)

        patch.setattr(llama.TrainStep, "follow_schedule", follow_schedule)
        code, first, out = cli(*flags, "--save", tmp_path / "stopped")
    assert code == 130, out
    code, rest, out = cli("--resume", tmp_path / "stopped")
    assert code == 0, out
    assert len(first) == 3 and {**first, **rest} == all_losses


@pytest.mark.gpu
def test_flags_that_are_off_launch_nothing(make_step):
    """A step with --clip launches more; one without launches what it did."""
    counts = []
    for changes in ({}, dict(clip=1.0)):
        step = make_step(TINY, use_amp=True, **changes)
        for _ in range(2):
            step.run()
        with torch.profiler.profile() as profiler:
            step.optimizer_step()
            torch.cuda.synchronize()
        events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        counts.append(len(events))
    assert counts[0] == 2 < counts[1]  # the product of beta_powers, and AdamW
