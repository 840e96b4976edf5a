"""What a caller does with the model between steps has the effect that it has in PyTorch, or is refused by name."""

import copy
import dataclasses
import functools
import io
import itertools
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import tiny_llama_v3 as llama
from tests.core.test_groups import SMALL
from tests.core.test_properties import DEVICE, fast

pytestmark = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")


def saved(step):
    """The step, by way of a file."""
    file = io.BytesIO()
    torch.save(step, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def scaled_state(step, factor):
    return {name: factor * weight.detach().clone() for name, weight in step.model.state_dict().items()}


class Trainee:
    """A step of an implementation, and what its caller does with it. What steps leave behind is in what()."""

    def __init__(self, impl, **changes):
        config = dataclasses.replace(SMALL, learning_rate=1e-3, impl=impl, **changes)
        self.step = llama.TrainStep(config, llama.get_device(DEVICE))
        self.data = self.step.batches(7)
        self.seen = []  # losses, and what hooks and torch.autograd.grad() have returned

    def batch(self, rows=None, length=None):
        return [t[:rows, :length].to(DEVICE) for t in next(self.data)]

    def parts(self):
        """What may be frozen."""
        model = self.step.model
        return [*model.modules(), *model.parameters()]

    def train(self, passes=1, length=None, ignored=0, clears=True):
        """A step of several backward passes, on a part of each sequence, with targets that do not count."""
        model, optimizer = self.step.model, self.step.optimizer
        if clears:
            optimizer.zero_grad()
        for _ in range(passes):
            tokens, targets = self.batch(length=length)
            targets = targets.clone()
            targets[:, :ignored] = -100
            loss = model(tokens, targets)
            self.seen.append(loss.detach())
            if loss.requires_grad:
                loss.backward()
        optimizer.step()

    def run(self):
        """A step as the script does it."""
        self.step.load(*self.batch())
        if any(p.requires_grad for p in self.step.model.parameters()):
            self.step.run()
            self.seen.append(self.step.loss.detach())

    def freeze(self, part, requires_grad=False):
        parts = self.parts()
        parts[part % len(parts)].requires_grad_(requires_grad)

    def thaw(self):
        self.step.model.requires_grad_(True)

    def freeze_before_backward(self, part):
        self.uncheckpoint()  # as PyTorch refuses to compute again with other weights frozen
        loss = self.step.model(*self.batch())
        self.freeze(part)
        if loss.requires_grad:
            loss.backward()
        self.step.optimizer.step()
        self.thaw()

    def copy(self, way):
        self.step = way(self.step)

    def load(self, factor):
        self.step.model.load_state_dict(scaled_state(self.step, factor))

    def write(self, part):
        """Clip the weights of a part, as some training loops do."""
        parts = self.parts()
        with torch.no_grad():
            for p in [*getattr(parts[part % len(parts)], "parameters", lambda: ())()]:
                p.clamp_(-0.01, 0.01)

    def evaluate(self, mode, length=None):
        with mode():
            self.seen.append(self.step.model(*self.batch(length=length)).clone())

    def checkpoint(self, layer, use_reentrant):
        layer = self.step.model.layers[layer]
        layer.forward = functools.partial(checkpoint, type(layer).forward, layer, use_reentrant=use_reentrant)

    def uncheckpoint(self):
        for layer in self.step.model.layers:
            vars(layer).pop("forward", None)

    def hook(self, kind):
        """The loss and all that a hook sees, which scales it."""
        layer = self.step.model.layers[1]
        p = layer.feed_forward.down_proj.weight.requires_grad_(True)  # PyTorch refuses hooks on frozen weights

        def see(*gradients):
            self.seen.append(gradients[-1] if torch.is_tensor(gradients[-1]) else gradients[-1][0])

        handle = {
            "tensor": lambda: p.register_hook(lambda gradient: (see(gradient), 2 * gradient)[1]),
            "accumulated": lambda: p.register_post_accumulate_grad_hook(lambda p: (see(p.grad), p.grad.mul_(2))[0]),
            "module": lambda: layer.register_full_backward_hook(see),
            "before module": lambda: layer.register_full_backward_pre_hook(see),
            "before forward": lambda: layer.feed_forward.register_forward_pre_hook(lambda module, args: 2 * args[0]),
            "forward": lambda: layer.feed_forward.register_forward_hook(lambda *args: 2 * args[-1]),
        }[kind]()
        self.train()
        handle.remove()

    def gradient_of_its_own(self, part):
        """A .grad that the caller has made."""
        self.step.optimizer.zero_grad()
        parts = [*self.step.model.parameters()]
        p = parts[part % len(parts)]
        p.grad = torch.full_like(p, 1e-3)
        self.train(clears=False)

    def start_over(self):
        self.step.restart()

    def default_dtype(self, dtype):
        torch.set_default_dtype(dtype)
        try:
            self.train()
            self.step = copy.deepcopy(self.step)
        finally:
            torch.set_default_dtype(torch.float32)


PARTS = st.integers(0, 200)
HOOKS = "tensor", "accumulated", "module", "before module", "forward", "before forward"
OPERATIONS = st.one_of(
    st.tuples(st.just("run")),
    st.tuples(st.just("train"), st.integers(1, 2), st.sampled_from([None, 2]), st.integers(0, 3)),
    st.tuples(st.just("freeze"), PARTS),
    st.tuples(st.just("freeze"), PARTS, st.just(True)),
    st.tuples(st.just("thaw")),
    st.tuples(st.just("freeze_before_backward"), PARTS),
    st.tuples(st.just("copy"), st.sampled_from([copy.deepcopy, saved])),
    st.tuples(st.just("load"), st.sampled_from([0.9, 1.1])),
    st.tuples(st.just("write"), PARTS),
    st.tuples(st.just("evaluate"), st.sampled_from([torch.no_grad, torch.inference_mode]), st.sampled_from([None, 2])),
    st.tuples(st.just("checkpoint"), st.integers(0, 1), st.booleans()),
    st.tuples(st.just("uncheckpoint")),
    st.tuples(st.just("hook"), st.sampled_from(HOOKS)),
    st.tuples(st.just("gradient_of_its_own"), PARTS),
    st.tuples(st.just("start_over")),
    st.tuples(st.just("default_dtype"), st.sampled_from([torch.float64, torch.bfloat16])),
)


def follow(operations):
    """After each of ten operations losses, weights and gradients are those of the same sequence in PyTorch."""
    ours, theirs = Trainee("triton"), Trainee("torch")
    assert ours.step.model.groups
    for name, *arguments in operations:
        for each in (ours, theirs):
            getattr(each, name)(*arguments)
        gradients = [[p.grad for p in each.step.model.parameters()] for each in (ours, theirs)]
        weights = [[p.detach() for p in each.step.model.parameters()] for each in (ours, theirs)]
        assert [g is None for g in gradients[0]] == [g is None for g in gradients[1]], name
        compare = functools.partial(torch.testing.assert_close, rtol=1e-3, equal_nan=True, msg=f"{name}: {{}}".format)
        compare(ours.seen, theirs.seen, atol=1e-6)
        compare(*([g for g in each if g is not None] for each in gradients), atol=1e-6)
        compare(*weights, atol=3e-4)  # of steps of 1e-3, which AdamW also takes where a gradient is mere rounding


SEQUENCES = given(st.lists(OPERATIONS, min_size=10, max_size=10))
KNOWN = [*(("hook", kind) for kind in HOOKS), ("start_over",), ("freeze", 2), ("run",), ("freeze", 2, True), ("run",)]
test_sequences = settings(fast, max_examples=8)(example(KNOWN)(SEQUENCES(follow)))


@pytest.mark.slow
@settings(fast, max_examples=50)
@SEQUENCES
def test_many_sequences(operations):
    follow(operations)


def assert_all_move(step):
    """The weights, and each by about the learning rate."""
    before = [w.clone() for w in step.optimizer.weights()]
    step.run()
    for weight, old in zip(step.optimizer.weights(), before, strict=True):
        assert 0.5 < (weight - old).abs().max() / step.optimizer.lr < 1.1


@pytest.mark.parametrize(
    "separate",
    [
        lambda model: model.half(),
        lambda model: model.double(),
        lambda model: model.to(torch.bfloat16),
        lambda model: model.load_state_dict({n: w.clone() for n, w in model.state_dict().items()}, assign=True),
        lambda model: setattr(model.norm, "weight", torch.nn.Parameter(torch.ones(16))),
        lambda model: setattr(model.norm.weight, "data", torch.ones(16)),
        lambda model: llama.FlatAdamW(model, 1e-3),
    ],
    ids=["half", "double", "to", "assign", "replaced", "data", "another optimizer"],
)  # fmt: skip
def test_weights_that_the_optimizer_would_not_update_are_refused(make_step, separate):
    """And so they are where a graph would be replayed."""
    step = make_step(SMALL)
    assert_all_move(step)
    state = step.graph_state()
    separate(step.model)
    for next_step in (step.optimizer.step, lambda: step.replay(None, state)):
        with pytest.raises(RuntimeError, match=r"weight was moved, converted or replaced.*: make a new optimizer"):
            next_step()


def test_a_graph_is_replayed_only_if_it_would_be_captured_in_the_same_way(make_step):
    step, replays = make_step(SMALL), []
    graph = SimpleNamespace(replay=lambda: replays.append(step))
    state = step.graph_state()
    step.replay(graph, state)
    step.model.layers[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match="since the step was captured, weights were frozen"):
        step.replay(graph, state)
    step.model.requires_grad_(True)
    step.replay(graph, state)
    assert len(replays) == 2


def test_a_second_optimizer_over_a_grouped_model(make_step):
    """Its buffers get the gradients of groups that were made for the first one."""
    step = make_step(SMALL)
    step.optimizer = llama.FlatAdamW(step.model, 1e-3)
    assert_all_move(step)
    assert all(p.grad is p.main_grad for p in step.model.parameters())


class Doubled(llama.TritonAttention):
    def forward(self, *inputs):
        return 2 * super().forward(*inputs)


def test_replaced_layers_are_computed_or_refused(make_step):
    """In a group, which computes with the weights of modules."""
    changed, plain = make_step(SMALL), make_step(SMALL)
    plain.model.groups = None
    for each in (changed, plain):
        each.model.layers[1].ffn_norm.eps = 0.1
    for kind in (llama.TritonAttention, Doubled):
        for each in (changed, plain):
            each.model.layers[0].attention.__class__ = kind
            each.forward()
        torch.testing.assert_close(changed.loss, plain.loss)
    step, plain = make_step(SMALL), make_step(SMALL)
    plain.model.groups = None
    for each in (step, plain):
        layer = each.model.layers[0]
        layer.attention.o_proj.weight = torch.nn.Parameter(2 * layer.attention.o_proj.weight.detach())
        layer.feed_forward = torch.nn.Sequential(layer.feed_forward, torch.nn.Identity())
    step.forward()
    plain.forward()
    torch.testing.assert_close(step.loss, plain.loss)
    for each in (step, plain):
        torch.manual_seed(1)
        each.model.layers[0] = llama.TransformerBlock(SMALL).to(DEVICE)
        each.model.layers.append(llama.TransformerBlock(SMALL).to(DEVICE))
        each.forward()
    torch.testing.assert_close(step.loss, plain.loss)


def test_the_share_with_a_gradient_tells_what_is_frozen_from_what_is_severed(make_step, capsys):
    step = make_step(SMALL, severed_autograd=True)
    step.model.layers[0].requires_grad_(False)
    step.run()
    record = llama.StepRecord(step.loss.item(), 1.0, 1.0, {}, None)
    summary = llama.summarize(step, [record]) | dict(warmup_seconds=0.0, kernels="", gpu={"busy": {"power_w": None}})
    embedding, frozen = 7 * 16, llama.count_weights(step.model.layers[0].parameters())
    llama.print_summary(step, summary)
    total = summary["parameters"]
    line = (
        f"Parameters with a gradient: {embedding:,} of {total:,} ({100 * embedding / total:.1f} %), {frozen:,} frozen"
    )
    assert line in capsys.readouterr().out
    assert summary["parameters_without_gradient"] == [
        name for name, _ in step.model.named_parameters() if not name.startswith(("embed", "layers.0"))
    ]


def test_autocast_is_refused(make_step):
    """Where PyTorch would compute in another type than that of the weights."""
    step = make_step(SMALL)
    step.forward()
    with torch.autocast(DEVICE, torch.bfloat16):
        with pytest.raises(TypeError, match="weight is torch.float32 and torch.autocast to torch.bfloat16 is on"):
            step.model(step.tokens)
        for refused in (lambda: llama.triton_linear(*torch.ones(2, 3, 3, device=DEVICE)), step.loss.backward):
            with pytest.raises(TypeError, match="torch.float32 and torch.autocast"):
                refused()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=False):
        step.run()


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="PyTorch before 2.9")
@pytest.mark.parametrize("setting", ["tf32", "ieee"])
def test_precision_by_its_new_name(setting):
    torch.backends.cuda.matmul.fp32_precision = setting
    assert llama.dot_precision(llama.Device("cuda", "", "sm_90", 132, 32)) == setting


def test_two_models_train_in_two_threads():
    def train(step, losses):
        for batch in itertools.islice(step.batches(7), 3):
            step.load(*batch)
            step.run()
            losses.append(step.loss.item())

    results = []
    for start in (threading.Thread.run, threading.Thread.start):  # one after the other, side by side
        steps = [Trainee("triton", seed=seed).step for seed in range(2)]
        results.append([[] for _ in steps])
        threads = [threading.Thread(target=train, args=each) for each in zip(steps, results[-1], strict=True)]
        for thread in threads:
            start(thread)
        for thread in threads if start is threading.Thread.start else ():
            thread.join()
    assert results[0] == results[1] and all(len(losses) == 3 for losses in results[1])


def test_a_kernel_without_a_gpu_or_the_interpreter(monkeypatch):
    monkeypatch.setattr(llama, "INTERPRETED", False)
    with pytest.raises(RuntimeError, match=r"kernels cannot run on cpu: there is no GPU \(TRITON_INTERPRET=1"):
        llama.triton_rmsnorm(torch.ones(2, 4), None, torch.ones(4), 1e-5)


def test_the_model_names_what_it_cannot_take():
    with pytest.raises(TypeError, match="config is 512: give a Config"):
        llama.TinyLlamaTriton(512)
    model = llama.TinyLlamaTriton(SMALL, llama.OPERATIONS["torch"])
    with pytest.raises(ValueError, match="there are 4 positions, and Config.seq_len is 3"):
        model(torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="Unexpected key.*lm_head.weight"):
        model.load_state_dict(model.state_dict() | {"lm_head.weight": model.embed_tokens.weight})


@pytest.mark.parametrize("value, reason", [
    ("0", "there is no GPU (TRITON_INTERPRET=1 interprets the kernels)"),
    ("true", "None"),  # as Triton reads it
])  # fmt: skip
def test_triton_decides_whether_it_interprets(value, reason):
    code = "import tiny_llama_v3 as llama; print(llama.triton_obstacle(llama.get_device('cpu')))"
    environment = os.environ | {"TRITON_INTERPRET": value, "PYTHONPATH": str(Path(llama.__file__).parent)}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout
    assert out == f"{reason}\n"


def test_what_other_code_may_import():
    assert all(getattr(llama, name).__doc__ for name in llama.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+", llama.__version__)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved])
def test_a_copied_model_trains_with_another_optimizer(make_step, copied):
    """And leaves the model alone from which it was copied."""
    step = make_step(SMALL)
    step.run()
    model, weights = copied(step.model), [w.clone() for w in step.optimizer.weights()]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(model(step.tokens, step.targets))
        losses[-1].backward()
        optimizer.step()
    assert losses[0] > losses[1] > losses[2]
    assert all(map(torch.equal, step.optimizer.weights(), weights))
