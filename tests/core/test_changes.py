"""Modules and operations by themselves are PyTorch's: what a caller does with a model works, or is refused by name.

The model of a TrainStep refuses to be changed.
"""

import contextlib
import copy
import dataclasses
import functools
import pickle
import random
import runpy

import pytest
import torch
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import tiny_llama_v3 as llama
from tests.core.tiny import SMALL, without_groups
from tests.fakes.machine import first_fast

pytestmark = pytest.mark.triton
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_model(impl="triton", **changes):
    """Return a model by itself with the operations of an implementation, and always the same weights."""
    torch.manual_seed(0)
    return llama.TinyLlamaTriton(dataclasses.replace(SMALL, **changes), llama.OPERATIONS[impl]).to(DEVICE)


def batch_of(number=0):
    """Return tokens and targets, (1, 3) each."""
    tokens, targets = next(llama.random_tokens(dataclasses.replace(SMALL, seed=number)))
    return tokens.to(DEVICE), targets.to(DEVICE)


def pass_over(model, number=0):
    """Return the loss of a batch after a backward pass."""
    loss = model(*batch_of(number))
    loss.backward()
    return loss.detach()


def saved(things):
    """Return things, by way of a file."""
    return pickle.loads(pickle.dumps(things))


class Trainee:
    """A model of an implementation, an optimizer of PyTorch, and what their owner does with them."""

    def __init__(self, impl):
        self.model = make_model(impl)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.data = llama.random_tokens(dataclasses.replace(SMALL, seed=7))
        self.seen = []  # losses, logits, and what hooks were given

    def batch(self, length=None):
        return [t[:, :length].to(DEVICE) for t in next(self.data)]

    def part(self, number):
        """Return a module or a weight, of which this number stands for one."""
        parts = [*self.model.modules(), *self.model.parameters()]
        return parts[number % len(parts)]

    def train(self, passes=1, length=None, ignored=0, clears=True):
        """Take a step of several backward passes, on a part of each sequence, with targets that do not count."""
        if clears:
            self.optimizer.zero_grad()
        for _ in range(passes):
            tokens, targets = self.batch(length)
            targets = targets.clone()
            targets[:, :ignored] = -100
            loss = self.model(tokens, targets)
            self.seen.append(loss.detach())
            if loss.requires_grad:
                loss.backward()
        self.optimizer.step()

    def freeze(self, number, requires_grad=False):
        self.part(number).requires_grad_(requires_grad)

    def freeze_before_backward(self, number):
        self.uncheckpoint()  # as PyTorch refuses to compute again with other weights frozen
        loss = self.model(*self.batch())
        self.freeze(number)
        if loss.requires_grad:
            loss.backward()
        self.optimizer.step()
        self.model.requires_grad_(True)

    def copy(self, way):
        self.model, self.optimizer = way((self.model, self.optimizer))

    def load(self, factor):
        state = self.model.state_dict()
        self.model.load_state_dict({name: factor * weight.clone() for name, weight in state.items()})

    def evaluate(self, mode, length):
        with mode():
            self.seen.append(self.model(*self.batch(length)).clone())

    def checkpoint(self, layer, use_reentrant):
        layer = self.model.layers[layer]
        layer.forward = functools.partial(checkpoint, type(layer).forward, layer, use_reentrant=use_reentrant)

    def uncheckpoint(self):
        for layer in self.model.layers:
            vars(layer).pop("forward", None)

    def hook(self, kind, part="feed_forward"):
        """Train with a hook, which keeps what it is given, and doubles the gradient of a weight."""
        layer = self.model.layers[1]
        feed_forward, module = layer.feed_forward, getattr(layer, part)
        p = feed_forward.down_proj.weight.requires_grad_(True)  # PyTorch refuses hooks on frozen weights

        def see(*given):
            last = given[-1] if torch.is_tensor(given[-1]) else given[-1][0]
            self.seen.append(last.detach().clone())

        def double(gradient):
            see(gradient)
            return 2 * gradient

        def double_own(p):
            see(p.grad)
            p.grad.mul_(2)

        of_weights = {"hook": double, "post_accumulate_grad_hook": double_own}
        is_whole = "backward" in kind and part == "feed_forward"
        owner = p if kind in of_weights else layer if is_whole else module
        handle = getattr(owner, f"register_{kind}")(of_weights.get(kind, see))
        self.train()
        handle.remove()

    def gradient_by_itself(self, number):
        """Ask autograd for the gradient of a weight, which leaves the .grad of all as they are."""
        self.uncheckpoint()  # which PyTorch refuses together with this, if it is reentrant
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if parameters:
            loss = self.model(*self.batch())
            self.seen += torch.autograd.grad(loss, parameters[number % len(parameters)])

    def gradient_of_an_input(self):
        """Ask autograd for the gradient of what goes into the layers."""
        self.uncheckpoint()
        x = torch.linspace(-1, 1, 48, device=DEVICE).view(1, 3, 16).requires_grad_()
        residual, branch = self.model.layers(x, None, self.model.cos, self.model.sin)
        self.seen += torch.autograd.grad((residual + branch).square().sum(), x)

    def backward_for(self, *numbers):
        """Add to the .grad of some weights only, and update these."""
        self.uncheckpoint()
        self.optimizer.zero_grad()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if parameters:
            inputs = [parameters[number % len(parameters)] for number in numbers]
            self.model(*self.batch()).backward(inputs=inputs)
        self.optimizer.step()

    def gradient_of_its_own(self, number):
        """Train from a .grad that the caller has made."""
        self.optimizer.zero_grad()
        parameters = [*self.model.parameters()]
        p = parameters[number % len(parameters)]
        p.grad = torch.full_like(p, 1e-3)
        self.train(clears=False)


HOOKS = "hook post_accumulate_grad_hook full_backward_hook full_backward_pre_hook forward_hook forward_pre_hook".split()
# Methods of a Trainee with their arguments. Part 0 is the model, and part 2 the module of all layers.
WAYS = [
    *(("hook", kind) for kind in HOOKS),
    *(("hook", kind, part) for kind in HOOKS[2:] for part in ("ffn_norm", "attention")),
    ("gradient_by_itself", 3),
    ("gradient_of_an_input",),
    ("backward_for", 0, 4),
    ("gradient_by_itself", 0),
    ("freeze", 2),
    ("train",),
    ("freeze", 2, True),
    ("train", 2, 2, 1),
    ("gradient_of_its_own", 3),
    ("freeze_before_backward", 5),
    ("checkpoint", 0, True),
    ("checkpoint", 1, False),
    ("train",),
    ("copy", copy.deepcopy),
    ("train",),
    ("copy", saved),
    ("load", 1.1),
    ("evaluate", torch.inference_mode, 2),
    ("train",),
    ("uncheckpoint",),
    ("freeze", 40),
    ("evaluate", torch.no_grad, None),
    ("train", 1, None, 3),
    ("freeze", 0, True),
]


def follow(operations):
    """After each operation losses, gradients and weights are those of the same sequence in PyTorch."""
    each = Trainee("triton"), Trainee("torch")
    for name, *arguments in operations:
        for trainee in each:
            getattr(trainee, name)(*arguments)
        compare = functools.partial(torch.testing.assert_close, rtol=1e-3, equal_nan=True, msg=f"{name}: {{}}".format)
        compare(*(trainee.seen for trainee in each), atol=1e-6)
        weights = [list(trainee.model.parameters()) for trainee in each]
        compare(*([w.grad for w in own] for own in weights), atol=1e-6)
        # Of steps of 1e-3, which AdamW also takes where a gradient is mere rounding.
        compare(*([w.detach() for w in own] for own in weights), atol=3e-4)


def test_each_way_once():
    follow(WAYS)


@pytest.mark.parametrize("seed", first_fast(*range(50)))
def test_many_sequences(seed):
    follow(random.Random(seed).choices(WAYS, k=10))


def test_layers_that_share_weights():
    """Their gradients add up, as in PyTorch."""
    gradients = []
    for impl in ("triton", "torch"):
        model = make_model(impl)
        model.layers[1] = model.layers[0]
        pass_over(model)
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


class Adapted(torch.nn.Linear):
    """As some adapters are made: forward() adds something to the product."""

    def forward(self, x):
        return super().forward(x) + 1


OTHER_PROJECTIONS = {
    "Adapted": lambda: Adapted(16, 16, bias=False),
    "Sequential": lambda: torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False)),
    "Linear": lambda: torch.nn.Linear(16, 16),
    "Embedding": lambda: torch.nn.Embedding(7, 16, padding_idx=0),
    "Embedding ": lambda: torch.nn.Embedding(7, 16, max_norm=1),
}


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("message", OTHER_PROJECTIONS)
def test_a_projection_that_computes_more_is_refused(impl, message):
    """The operations take only its weight, so that an adapter would do nothing."""
    model, module = make_model(impl), OTHER_PROJECTIONS[message]().to(DEVICE)
    if isinstance(module, torch.nn.Embedding):
        model.embed_tokens = module
    else:
        model.layers[1].attention.o_proj = module
    with pytest.raises(TypeError, match=rf"only the weight of a projection, and \S*\.{message}"):
        model(*batch_of())


@pytest.mark.parametrize(
    "change", [torch.nn.utils.weight_norm, lambda part: prune.random_unstructured(part, "weight", 1)]
)
def test_a_weight_that_a_hook_computes_is_refused(change):
    model = make_model()
    change(model.layers[1].feed_forward.down_proj)
    with pytest.raises(TypeError, match="only the weight of a projection, and .*Linear computes with more"):
        model(*batch_of())


class Double(llama.TritonRMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


NORMS = [lambda: torch.nn.LayerNorm(16), lambda: torch.nn.RMSNorm(16, 0.1), torch.nn.Identity, lambda: Double(16)]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("place", ["norm", "layers.0.attention_norm", "layers.1.ffn_norm"])
def test_another_norm_takes_the_place_of_ours(norm, place):
    """It is given the sum, by either implementation."""
    results = []
    for impl in ("triton", "torch"):
        model = make_model(impl)
        *names, name = place.split(".")
        setattr(model.get_submodule(".".join(names)), name, norm().to(DEVICE))
        results.append([pass_over(model), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-6)
    assert results[0][0] != pass_over(make_model())


@pytest.mark.parametrize("name, kind", [
    ("layers.0.attention.qkv_proj", "forward_hook"), ("layers.1.feed_forward.down_proj", "full_backward_hook"),
    ("layers.1.attention.o_proj", "full_backward_pre_hook"), ("embed_tokens", "forward_pre_hook"),
    ("layers.0.feed_forward.down_proj", "forward"),
])  # fmt: skip
def test_a_hook_that_is_not_called_is_named(name, kind):
    model = make_model()
    module = model.get_submodule(name)
    if kind == "forward":
        module.forward = lambda x: x
    else:
        getattr(module, f"register_{kind}")(lambda *given: None)
    with pytest.warns(UserWarning, match="a hook .* is not called: operations take only the weight; put it on"):
        model(*batch_of())


def test_a_parametrized_projection_learns():
    """Its weight is computed each time that it is asked for."""
    results = []
    for impl in ("triton", "torch"):
        model = make_model(impl)
        torch.nn.utils.parametrizations.weight_norm(model.layers[0].attention.qkv_proj)
        results.append([pass_over(model), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", HOOKS[2:])
def test_hooks_for_all_modules_see_each_layer(kind):
    """Each module is called but projections and the embedding, which give their weights."""
    model = make_model()
    names, seen = {part: name for name, part in model.named_modules()}, []
    register = getattr(torch.nn.modules.module, f"register_module_{kind}")
    handle = register(lambda part, *given: seen.append(names[part]) if part in names else None)
    try:
        pass_over(model)
    finally:
        handle.remove()
    parts = "", ".attention_norm", ".attention", ".ffn_norm", ".feed_forward"
    called = ["layers", "norm", *(f"layers.{number}{part}" for number in range(2) for part in parts)]
    assert sorted(seen) == sorted(["", *called])


# --- the model of a step


def test_a_step_keeps_its_model_to_itself(make_step):
    """Each change is refused where it is made, by what to do instead, and the step trains on."""
    step, untouched = make_step(SMALL), make_step(SMALL)
    model, layer, p = step.model, step.model.layers[1], step.model.norm.weight
    new_layer = make_model().layers[0]
    changes = [
        lambda: p.requires_grad_(False),
        lambda: setattr(p, "requires_grad", False),
        lambda: model.requires_grad_(False),
        lambda: setattr(p, "data", torch.ones(16)),
        lambda: p.register_hook(lambda gradient: 2 * gradient),
        lambda: p.register_post_accumulate_grad_hook(lambda p: None),
        lambda: torch.nn.init.normal_(p),
        lambda: p.detach_(),
        lambda: model.half(),
        lambda: model.to("meta"),
        lambda: model.load_state_dict(model.state_dict()),
        lambda: setattr(model.norm, "weight", torch.nn.Parameter(torch.ones(16))),
        lambda: setattr(layer, "attention", new_layer.attention),
        lambda: setattr(layer, "forward", print),
        lambda: setattr(layer.ffn_norm, "eps", 0.1),
        lambda: delattr(layer, "attention"),
        lambda: model.layers.__setitem__(0, new_layer),
        lambda: model.layers.append(new_layer),
        lambda: model.layers.insert(0, new_layer),
        lambda: model.layers.pop(0),
        lambda: model.register_module("adapter", new_layer),
        lambda: model.add_module("adapter", new_layer),
        lambda: model.register_buffer("table", torch.ones(1)),
        lambda: layer.register_forward_hook(print),
        lambda: layer.register_full_backward_hook(print),
        lambda: prune.random_unstructured(layer.attention.o_proj, "weight", 1),
        lambda: layer.compile(backend="eager"),
        lambda: llama.FlatAdamW(1e-3).own(model),
        lambda: copy.deepcopy(model),
        lambda: copy.deepcopy(p),
        lambda: copy.deepcopy(step),
        lambda: pickle.dumps(step),
    ]
    with torch.no_grad():
        changes += [lambda: p.copy_(torch.zeros(16)), lambda: p.__setitem__(0, 1.0), lambda: p.__iadd__(1)]
        for change in changes:
            with pytest.raises(RuntimeError, match=r"this model is a TrainStep's.*freeze\(\).*take a TinyLlamaTriton"):
                change()
    for each in (step, untouched):
        each.model.eval()  # which changes nothing here
        each.run()
    assert torch.equal(step.loss, untouched.loss)
    assert all(map(torch.equal, step.optimizer.weights(), untouched.optimizer.weights()))


def test_another_optimizer_cannot_have_the_weights_of_a_step(make_step):
    step = make_step(SMALL)
    step.run()
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        with pytest.raises(RuntimeError, match="this model is a TrainStep's"):
            kind(step.model.parameters(), 0.1).step()


@pytest.mark.parametrize("is_grouped", [True, False])
def test_a_run_names_what_its_layers_are(make_step, capsys, is_grouped):
    with contextlib.nullcontext() if is_grouped else without_groups():
        llama.print_configuration(make_step(SMALL))
    assert f"\n    layers        {'LayerGroups' if is_grouped else 'LayerStack'}\n" in capsys.readouterr().out


@pytest.mark.parametrize("use_amp", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_weights_go_out_and_in(make_step, use_amp):
    """Exactly, whatever type the model computes in; the optimizer starts over, and restart() returns to them."""
    step, other = (make_step(SMALL, use_amp=use_amp, seed=seed) for seed in (1, 2))
    step.run()
    weights = step.state_dict()
    assert weights["norm.weight"].dtype == torch.float32
    other.run()
    for given in (weights, {name: weights[name].clone() for name in reversed(weights)}):  # by names, in any order
        other.load_state_dict(given)
        assert all(torch.equal(weight, weights[name]) for name, weight in other.state_dict().items())
        assert not other.optimizer.exp_avg.any() and (other.optimizer.beta_powers == 1).all()
        other.run()
    assert not torch.equal(other.state_dict()["norm.weight"], weights["norm.weight"])  # which is no view
    for weight in given.values():
        weight.zero_()  # it is the caller's, who goes on with it
    other.restart()
    plain = make_model("torch")
    plain.load_state_dict(other.state_dict())
    assert torch.equal(plain.norm.weight, weights["norm.weight"])
    wrong = {**weights, "head": weights["norm.weight"], "norm.weight": torch.ones(7)}
    del wrong["layers.1.ffn_norm.weight"]
    with pytest.raises(ValueError, match=r"of another shape: head, layers\.1\.ffn_norm\.weight, norm\.weight$"):
        other.load_state_dict(wrong)


def test_a_frozen_weight_stays_as_it_is(make_step):
    """And the others learn as in PyTorch; thawed, it learns again."""
    step, plain = make_step(SMALL, learning_rate=1e-3), make_step(SMALL, learning_rate=1e-3, impl="torch")
    frozen = "norm.weight", "layers.0.attention.o_proj.weight", "embed_tokens.weight"
    for names in ((), frozen, frozen[1:], ()):
        before = step.state_dict()
        for each in (step, plain):
            each.freeze(*names)
            each.run()
        after = step.state_dict()
        assert {name for name in before if torch.equal(before[name], after[name])} == set(names)
        assert {name for name, p in step.model.named_parameters() if p.grad is None} == set(names)
        torch.testing.assert_close(after, plain.state_dict(), rtol=1e-3, atol=3e-4)
    with pytest.raises(ValueError, match="no weights lm_head.weight"):
        step.freeze("norm.weight", "lm_head.weight")
    step.is_captured = True
    with pytest.raises(RuntimeError, match=r"freeze\(\) weights before capture\(\)"):
        step.freeze()


@pytest.mark.parametrize("is_grouped", [True, False])
@pytest.mark.parametrize(
    "order", ["sum", "penalty loss", "loss penalty", "penalty loss loss", "penalty", "part loss", "part sum loss"]
)
def test_another_term_of_the_loss_adds_to_the_gradients(make_step, order, is_grouped):
    """Whether autograd has computed its gradient before our kernels have theirs or later, of all weights or some."""
    gradients = []
    for impl in ("triton", "torch"):
        with contextlib.nullcontext() if is_grouped else without_groups():
            step = make_step(SMALL, impl=impl)
        step.run()  # leaves gradients in the buffer, which do not count any more
        step.optimizer.zero_grad()
        parameters = list(step.model.parameters())
        terms = {
            "loss": lambda step=step: step.call_model(step.tokens, step.targets),
            "penalty": lambda weights=parameters: sum(p.square().sum() for p in weights),
            "part": lambda weights=parameters[1::2]: sum(p.square().sum() for p in weights),
        }
        terms["sum"] = lambda terms=terms: terms["loss"]() + terms["penalty"]()
        for term in order.split():
            terms[term]().backward()
        if impl == "triton":
            step.optimizer.collect_gradients(parameters)  # as its step() does
            assert all(p.grad is p.main_grad for p in parameters)
        gradients.append([p.grad for p in parameters])
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def assert_all_move(step):
    """Assert that each weight moves by about the learning rate."""
    before = step.state_dict()
    step.run()
    for name, weight in step.state_dict().items():
        assert 0.5 < (weight - before[name]).abs().max() / step.optimizer.lr < 1.1


def test_the_learning_rate_is_set_on_the_device(make_step):
    """Where a captured step reads it."""
    step = make_step(SMALL)
    place = step.optimizer.lr
    step.optimizer.lr = 0.5
    assert step.optimizer.lr is place and place == 0.5
    assert_all_move(step)


def summary_of(step, host_ms, phases):
    """Print the summary of a step of 4 ms as on a GPU, and return it."""
    summary = llama.summarize(step, [llama.StepRecord(1.0, 4.0, host_ms, phases, None)])
    summary |= dict(warmup_seconds=0.0, kernels=dict(kernels=7, launches=2), gpu={"busy": {"power_w": None}})
    summary["energy"] = None
    step.device = torch.device("cuda")
    llama.print_summary(step, summary)
    return summary


def test_the_share_with_a_gradient_tells_what_is_frozen_from_what_is_severed(make_step, capsys, monkeypatch):
    step = make_step(SMALL, severed_autograd=True)
    step.freeze(*(name for name, _ in step.model.named_parameters() if name.startswith("layers.0.")))
    step.run()
    step.model.norm.weight.grad = torch.zeros_like(step.model.norm.weight)  # as good as none
    monkeypatch.setattr(llama, "get_gpu", lambda kind: llama.Gpu("cuda", "", "sm_90", 132, 32))
    summary = summary_of(step, 3.0, dict(forward=0.5, backward=0.25, optimizer=0.25))
    out = capsys.readouterr().out
    assert "Phases together: 1.000 ms, 25 % of the batch time\n" in out
    # 7 tokens; a layer has 2 norms of 16, and matrices of 32, 16, 48 and 24 rows or columns; the last norm.
    layer, embedding = 2 * 16 + (32 + 16 + 48 + 24) * 16, 7 * 16
    assert summary["parameters"] == embedding + 2 * layer + 16
    shares = "Parameters with a gradient: 112 of 4,032 (2.8 %), 1,952 frozen\n"
    assert f"{shares}    what these received may be a part of their gradient as well: --check tells\n" in out
    missing = summary["parameters_without_gradient"]
    assert len(missing) == 7 and all(name.startswith(("layers.1.", "norm.")) for name in missing)


@pytest.mark.parametrize("host_ms, verdict", [(3.1, "not launch-bound"), (3.3, "launch-bound")])
def test_a_step_is_launch_bound_if_the_host_takes_four_fifths_of_it(make_step, capsys, monkeypatch, host_ms, verdict):
    step = make_step(SMALL, impl="torch")
    step.run()
    monkeypatch.setattr(llama, "get_gpu", lambda kind: llama.Gpu("cuda", "", "sm_90", 132, 32))
    summary_of(step, host_ms, {})
    out = capsys.readouterr().out
    assert f"issue a step: {host_ms}00 ms of 4.000 ms ({verdict})\nKernels a step: 7 in 2 launches\n" in out


def test_autocast_is_refused(make_step):
    """Where PyTorch would compute in another type than that of the weights."""
    step = make_step(SMALL)
    step.forward()
    ones = torch.ones(3, 3, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        for refused in (
            lambda: step.model(step.tokens),
            lambda: llama.triton_linear(ones, ones),
            step.loss.backward,
        ):
            with pytest.raises(TypeError, match="is torch.float32 and torch.autocast to torch.bfloat16 is on"):
                refused()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=False):
        step.run()


def test_autocast_to_the_type_of_the_weights_changes_nothing():
    """Though the tables of angles are in fp32."""
    model, (tokens, _), results = make_model().bfloat16(), batch_of(), []
    model.cos, model.sin = model.cos.float(), model.sin.float()
    for enabled in (False, True):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            results.append(model(tokens))
    assert results[0].dtype == torch.bfloat16 and torch.equal(*results)


COMPILED = {
    "the model": lambda model: torch.compile(model, backend="eager"),
    "a layer in place": lambda model: model.layers[1].compile(backend="eager") or model,
    "a layer that is wrapped": lambda model: (
        model.layers.__setitem__(0, torch.compile(model.layers[0], backend="eager")) or model
    ),
}


@pytest.mark.parametrize("compiled", COMPILED.values(), ids=COMPILED)
def test_what_is_compiled_calls_our_operations_as_they_are(compiled):
    model, plain = make_model(), make_model()
    model = compiled(model)
    compare = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    compare(pass_over(model), pass_over(plain))
    compare(*([p.grad for p in each.parameters()] for each in (model, plain)))
    with torch.no_grad():  # also for another shape
        tokens, _ = batch_of()
        compare(model(tokens[:, :2]), plain(tokens[:, :2]))


def test_a_step_that_is_compiled_computes_the_same(make_step):
    """Its weights are its optimizer's all the same."""
    step, plain = make_step(SMALL, compile=True), make_step(SMALL)
    for each in (step, plain):
        each.run()
    torch.testing.assert_close(step.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="PyTorch before 2.9")
@pytest.mark.parametrize("setting", ["tf32", "ieee"])
def test_precision_by_its_new_name(setting):
    torch.backends.cuda.matmul.fp32_precision = setting
    assert llama.dot_precision(llama.Gpu("cuda", "", "sm_90", 132, 32)) == setting


def test_triton_decides_whether_it_interprets(monkeypatch):
    """ "true" is what Triton takes for true, and only Triton knows."""
    monkeypatch.setenv("TRITON_INTERPRET", "true")
    script = runpy.run_path(llama.__file__)
    assert script["triton_obstacle"](torch.device("cpu")) is None


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
    with pytest.raises(ValueError, match=r"tokens have the shape \(3,\), and \(batch, seq\) is needed"):
        model(torch.zeros(3, dtype=torch.int64))
    model = llama.TinyLlamaTriton(SMALL, llama.OPERATIONS["triton"]).to("meta")
    with pytest.raises(RuntimeError, match="the Triton kernels cannot run on meta: move the tensors to a GPU"):
        model(torch.zeros(1, 3, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("impl, is_grouped", [("triton", True), ("triton", False), ("torch", False)])
def test_a_batch_of_no_sequences(make_step, impl, is_grouped):
    """The mean of no losses is NaN, and gradients are 0."""
    with contextlib.nullcontext() if is_grouped else without_groups():
        step = make_step(SMALL, impl=impl)
    empty = step.tokens[:0]
    step.optimizer.zero_grad()
    assert step.model(empty).shape == (0, 3, 7)
    loss = step.model(empty, empty)
    loss.backward()
    assert loss.isnan() and not any(p.grad.any() for p in step.model.parameters())
