"""What a caller does with the model between steps has the effect that it has in PyTorch, or is refused by name."""

import copy
import dataclasses
import functools
import pickle
import random
import runpy
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import tiny_llama_v3 as llama
from tests.core.tiny import SMALL
from tests.fakes.machine import first_fast

pytestmark = pytest.mark.triton
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def saved(step):
    """Return the step, by way of a file."""
    return pickle.loads(pickle.dumps(step))


class Trainee:
    """A step of an implementation, and what its caller does with it."""

    def __init__(self, impl):
        config = dataclasses.replace(SMALL, learning_rate=1e-3, impl=impl)
        self.step = llama.TrainStep(config, llama.get_device(DEVICE))
        self.data = self.step.batches(7)
        self.seen = []  # losses, logits, and what hooks were given

    def batch(self, length=None):
        return [t[:, :length].to(DEVICE) for t in next(self.data)]

    def part(self, number):
        """Return a module or a weight, of which this number stands for one."""
        parts = [*self.step.model.modules(), *self.step.model.parameters()]
        return parts[number % len(parts)]

    def train(self, passes=1, length=None, ignored=0, clears=True):
        """Take a step of several backward passes, on a part of each sequence, with targets that do not count."""
        if clears:
            self.step.optimizer.zero_grad()
        for _ in range(passes):
            tokens, targets = self.batch(length)
            targets = targets.clone()
            targets[:, :ignored] = -100
            loss = self.step.model(tokens, targets)
            self.seen.append(loss.detach())
            if loss.requires_grad:
                loss.backward()
        self.step.optimizer.step()

    def run(self):
        """Take a step as the script does it."""
        self.step.load(*self.batch())
        if any(p.requires_grad for p in self.step.model.parameters()):
            self.step.run()
            self.seen.append(self.step.loss.detach())

    def freeze(self, number, requires_grad=False):
        self.part(number).requires_grad_(requires_grad)

    def freeze_before_backward(self, number):
        self.uncheckpoint()  # as PyTorch refuses to compute again with other weights frozen
        loss = self.step.model(*self.batch())
        self.freeze(number)
        if loss.requires_grad:
            loss.backward()
        self.step.optimizer.step()
        self.step.model.requires_grad_(True)

    def copy(self, way):
        self.step = way(self.step)

    def load(self, factor):
        state = self.step.model.state_dict()
        self.step.model.load_state_dict({name: factor * weight.clone() for name, weight in state.items()})

    def evaluate(self, mode, length):
        with mode():
            self.seen.append(self.step.model(*self.batch(length)).clone())

    def checkpoint(self, layer, use_reentrant):
        layer = self.step.model.layers[layer]
        layer.forward = functools.partial(checkpoint, type(layer).forward, layer, use_reentrant=use_reentrant)

    def uncheckpoint(self):
        for layer in self.step.model.layers:
            vars(layer).pop("forward", None)

    def hook(self, kind, part="feed_forward"):
        """Train with a hook, which keeps what it is given, and doubles the gradient of a weight."""
        layer = self.step.model.layers[1]
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
        parameters = [p for p in self.step.model.parameters() if p.requires_grad]
        if parameters:
            loss = self.step.model(*self.batch())
            self.seen += torch.autograd.grad(loss, parameters[number % len(parameters)])

    def gradient_of_an_input(self):
        """Ask autograd for the gradient of what goes into the layers."""
        self.uncheckpoint()
        model = self.step.model
        x = torch.linspace(-1, 1, 48, device=DEVICE).view(1, 3, 16).requires_grad_()
        residual, branch = x, None
        for layer in model.groups or model.layers:
            residual, branch = layer(residual, branch, model.cos, model.sin)
        self.seen += torch.autograd.grad((residual + branch).square().sum(), x)

    def backward_for(self, *numbers):
        """Add to the .grad of some weights only, and update these."""
        self.uncheckpoint()
        self.step.optimizer.zero_grad()
        parameters = [p for p in self.step.model.parameters() if p.requires_grad]
        if parameters:
            inputs = [parameters[number % len(parameters)] for number in numbers]
            self.step.model(*self.batch()).backward(inputs=inputs)
        self.step.optimizer.step()

    def gradient_of_its_own(self, number):
        """Train from a .grad that the caller has made."""
        self.step.optimizer.zero_grad()
        parameters = [*self.step.model.parameters()]
        p = parameters[number % len(parameters)]
        p.grad = torch.full_like(p, 1e-3)
        self.train(clears=False)

    def start_over(self):
        self.step.restart()


HOOKS = "hook post_accumulate_grad_hook full_backward_hook full_backward_pre_hook forward_hook forward_pre_hook".split()
# Methods of a Trainee with their arguments. Part 0 is the model, and part 2 the module of all layers.
WAYS = [
    *(("hook", kind) for kind in HOOKS),
    *(("hook", kind, part) for kind in HOOKS[2:] for part in ("ffn_norm", "attention")),
    ("gradient_by_itself", 3),
    ("gradient_of_an_input",),
    ("backward_for", 0, 4),
    ("gradient_by_itself", 0),
    ("start_over",),
    ("freeze", 2),
    ("run",),
    ("freeze", 2, True),
    ("run",),
    ("train", 2, 2, 1),
    ("gradient_of_its_own", 3),
    ("freeze_before_backward", 5),
    ("checkpoint", 0, True),
    ("checkpoint", 1, False),
    ("run",),
    ("copy", copy.deepcopy),
    ("run",),
    ("copy", saved),
    ("load", 1.1),
    ("evaluate", torch.inference_mode, 2),
    ("run",),
    ("uncheckpoint",),
    ("freeze", 40),
    ("evaluate", torch.no_grad, None),
    ("train", 1, None, 3),
    ("freeze", 0, True),
]


def follow(operations):
    """After each operation losses, gradients and weights are those of the same sequence in PyTorch."""
    each = ours, _ = Trainee("triton"), Trainee("torch")
    assert ours.step.model.groups
    for name, *arguments in operations:
        for trainee in each:
            getattr(trainee, name)(*arguments)
        compare = functools.partial(torch.testing.assert_close, rtol=1e-3, equal_nan=True, msg=f"{name}: {{}}".format)
        compare(*(trainee.seen for trainee in each), atol=1e-6)
        weights = [list(trainee.step.model.parameters()) for trainee in each]
        compare(*([w.grad for w in own] for own in weights), atol=1e-6)
        # Of steps of 1e-3, which AdamW also takes where a gradient is mere rounding.
        compare(*([w.detach() for w in own] for own in weights), atol=3e-4)


def test_each_way_once():
    follow(WAYS)


@pytest.mark.parametrize("seed", first_fast(*range(50)))
def test_many_sequences(seed):
    follow(random.Random(seed).choices(WAYS, k=10))


def assert_all_move(step):
    """The weights, and each by about the learning rate."""
    before = [w.clone() for w in step.optimizer.weights()]
    step.run()
    for weight, old in zip(step.optimizer.weights(), before, strict=True):
        assert 0.5 < (weight - old).abs().max() / step.optimizer.lr < 1.1


def new_layer():
    return llama.TransformerBlock(SMALL).to(DEVICE)


SEPARATE = {
    "half": lambda model: model.half(),
    "assign": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
    "replaced": lambda model: setattr(model.norm, "weight", torch.nn.Parameter(torch.ones(16))),
    "data": lambda model: setattr(model.norm.weight, "data", torch.ones(16)),
    "another optimizer": lambda model: llama.FlatAdamW(model, 1e-3),
    "the same memory": lambda model: setattr(model.norm, "weight", torch.nn.Parameter(model.norm.weight.data)),
    "a layer": lambda model: model.layers.__setitem__(0, new_layer()),
    "a part of a layer": lambda model: setattr(model.layers[1], "attention", new_layer().attention),
    "all layers": lambda model: setattr(model, "layers", torch.nn.ModuleList([new_layer(), new_layer()])),
    "one more": lambda model: model.layers.append(new_layer()),
    "a head": lambda model: setattr(model, "lm_head", torch.nn.Linear(16, 7, bias=False, device=DEVICE)),
    "an adapter": lambda model: model.register_module("adapter", torch.nn.Linear(2, 2, device=DEVICE)),
}


@pytest.mark.parametrize("separate", SEPARATE.values(), ids=SEPARATE)
def test_weights_that_the_optimizer_would_not_update_are_refused(make_step, separate):
    """And so they are where a graph would be replayed; a new optimizer updates them."""
    step = make_step(SMALL)
    state = step.graph_state()
    separate(step.model)
    for next_step in (step.forward, step.optimizer.step, lambda: step.replay(None, state)):
        with pytest.raises(RuntimeError, match=r"weight was moved, converted or replaced.*: make a new optimizer"):
            next_step()
    vars(step.model)["_modules"].pop("adapter", None)  # which nothing calls
    step.model.float()
    step.model.groups = step.group_layers([step.model.layers])
    step.optimizer = llama.FlatAdamW(step.model, 1e-3)
    assert_all_move(step)


REARRANGED = {
    "one less": lambda layers: layers.pop(0),
    "the other order": lambda layers: layers.__init__(list(layers)[::-1]),
    "one twice": lambda layers: layers.__setitem__(1, layers[0]),
}


@pytest.mark.parametrize("rearrange", REARRANGED.values(), ids=REARRANGED)
def test_layers_that_are_rearranged_train_on(make_step, rearrange):
    """As in PyTorch: what the model no longer has stays as it is."""
    results = []
    for impl in ("triton", "torch"):
        step = make_step(SMALL, impl=impl)
        step.run()
        rearrange(step.model.layers)
        step.run()
        results.append([step.loss.detach(), *step.model.parameters()])
    torch.testing.assert_close(*results, rtol=1e-3, atol=3e-4)


class Wrapped(torch.nn.Module):
    """As torch.compile or a sharding library wrap a layer: with its weights."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.calls = layer, 0

    def forward(self, *inputs):
        self.calls += 1
        return self.layer(*inputs)


def test_a_layer_that_is_wrapped_trains_on(make_step):
    step = make_step(SMALL)
    step.run()
    step.model.layers[1] = Wrapped(step.model.layers[1])
    assert_all_move(step)
    assert step.model.layers[1].calls == 1
    step.model.layers[1] = step.model.layers[1].layer
    assert_all_move(step)


def test_layers_that_share_weights(make_step):
    """Their gradients add up, as in PyTorch."""
    gradients = []
    for impl in ("triton", "torch"):
        step = make_step(SMALL, impl=impl)
        step.model.layers[1] = step.model.layers[0]
        step.optimizer = step.make_optimizer()
        step.forward()
        step.backward()
        gradients.append([p.grad for p in step.model.parameters()])
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
@pytest.mark.parametrize("is_grouped", [True, False])
@pytest.mark.parametrize("message", OTHER_PROJECTIONS)
def test_a_projection_that_computes_more_is_refused(make_step, impl, is_grouped, message):
    """The operations take only its weight, so that an adapter would do nothing."""
    step, module = make_step(SMALL, impl=impl), OTHER_PROJECTIONS[message]().to(DEVICE)
    if not is_grouped:
        step.model.groups = None
    if isinstance(module, torch.nn.Embedding):
        step.model.embed_tokens = module
    else:
        step.model.layers[1].attention.o_proj = module
    with pytest.raises(TypeError, match=rf"only the weight of a projection, and \S*\.{message}"):
        step.model(step.tokens)


@pytest.mark.parametrize(
    "change", [torch.nn.utils.weight_norm, lambda part: prune.random_unstructured(part, "weight", 1)]
)
def test_a_weight_that_a_hook_computes_is_refused(make_step, change):
    step = make_step(SMALL)
    change(step.model.layers[1].feed_forward.down_proj)
    with pytest.raises(TypeError, match="only the weight of a projection, and .*Linear computes with more"):
        step.model(step.tokens)


class Double(llama.TritonRMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


NORMS = [lambda: torch.nn.LayerNorm(16), lambda: torch.nn.RMSNorm(16, 0.1), torch.nn.Identity, lambda: Double(16)]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("place", ["norm", "layers.0.attention_norm", "layers.1.ffn_norm"])
def test_another_norm_takes_the_place_of_ours(make_step, norm, place):
    """It is given the sum, by either implementation."""
    results = []
    for impl in ("triton", "torch"):
        step = make_step(SMALL, impl=impl)
        *names, name = place.split(".")
        setattr(step.model.get_submodule(".".join(names)), name, norm().to(DEVICE))
        step.optimizer = step.make_optimizer()
        step.run()
        results.append([step.loss.detach(), *(p.grad for p in step.model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-6)
    assert results[0][0] != make_step(SMALL).call_model(step.tokens, step.targets)


def test_the_learning_rate_is_set_on_the_device(make_step):
    """Where a captured step reads it."""
    step = make_step(SMALL)
    place = step.optimizer.lr
    step.optimizer.lr = 0.5
    assert step.optimizer.lr is place and place == 0.5
    assert_all_move(step)


def test_an_optimizer_takes_the_model():
    with pytest.raises(
        TypeError, match="takes the model and not its parameters: give an nn.Module, no <class 'generator'>"
    ):
        llama.FlatAdamW(torch.nn.Linear(2, 2).parameters(), 1e-3)


@pytest.mark.parametrize("is_grouped", [True, False])
@pytest.mark.parametrize("name", ["layers.0.attention.qkv_proj", "layers.1.feed_forward.down_proj", "embed_tokens"])
def test_a_hook_that_is_not_called_is_named(make_step, is_grouped, name):
    step = make_step(SMALL)
    if not is_grouped:
        step.model.groups = None
    step.model.get_submodule(name).register_forward_hook(lambda *given: None)
    with pytest.warns(UserWarning, match="a hook .* is not called: operations take only the weight; put it on"):
        step.model(step.tokens)


def test_a_parametrized_projection_learns(make_step):
    """Its weight is computed each time that it is asked for."""
    results = []
    for impl in ("triton", "torch"):
        step = make_step(SMALL, impl=impl)
        torch.nn.utils.parametrizations.weight_norm(step.model.layers[0].attention.qkv_proj)
        step.optimizer = step.make_optimizer()
        step.run()
        results.append([step.loss.detach(), *(p.grad for p in step.model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", HOOKS[2:])
def test_hooks_for_all_modules_see_each_layer(make_step, monkeypatch, kind):
    """Groups are not used, and each module is called but projections and the embedding, which give their weights."""
    step = make_step(SMALL)
    names, seen = {part: name for name, part in step.model.named_modules()}, []
    monkeypatch.setattr("tiny_llama.groups.GroupFunction", None)
    register = getattr(torch.nn.modules.module, f"register_module_{kind}")
    handle = register(lambda part, *given: seen.append(names[part]) if part in names else None)
    try:
        step.model(step.tokens, step.targets).backward()
    finally:
        handle.remove()
    parts = "", ".attention_norm", ".attention", ".ffn_norm", ".feed_forward"
    called = ["norm", *(f"layers.{number}{part}" for number in range(2) for part in parts)]
    assert sorted(seen) == sorted(["", *called])


def test_a_graph_is_replayed_only_if_it_would_be_captured_in_the_same_way(make_step):
    step, replays = make_step(SMALL), []
    graph, state = SimpleNamespace(replay=lambda: replays.append(step)), step.graph_state()
    step.replay(graph, state)
    step.model.layers[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match="since the step was captured, weights were frozen"):
        step.replay(graph, state)
    step.model.requires_grad_(True)
    step.replay(graph, state)
    assert len(replays) == 2


class Doubled(llama.TritonAttention):
    def forward(self, *inputs):
        return 2 * super().forward(*inputs)


def test_replaced_layers_are_computed(make_step):
    """In a group, which computes with the weights of modules."""

    def new_weight(layers):
        layers[0].attention.o_proj.weight = torch.nn.Parameter(2 * layers[0].attention.o_proj.weight.detach())

    def new_layers(layers):
        torch.manual_seed(1)
        layers[0] = llama.TransformerBlock(SMALL).to(DEVICE)
        layers.append(llama.TransformerBlock(SMALL).to(DEVICE))

    step, plain = make_step(SMALL), make_step(SMALL)
    plain.model.groups = None
    losses = []
    for change in (
        lambda layers: setattr(layers[1].ffn_norm, "eps", 0.1),
        new_weight,
        lambda layers: setattr(layers[0].attention, "__class__", Doubled),
        new_layers,
    ):
        for each in (step, plain):
            change(each.model.layers)
            each.loss = each.call_model(each.tokens, each.targets)  # forward() refuses other weights
        torch.testing.assert_close(step.loss, plain.loss)
        losses.append(step.loss.item())
    assert len(set(losses)) == 4


def summary_of(step, host_ms, phases):
    """Print the summary of a step of 4 ms as on a GPU, and return it."""
    summary = llama.summarize(step, [llama.StepRecord(1.0, 4.0, host_ms, phases, None)])
    summary |= dict(warmup_seconds=0.0, kernels=dict(kernels=7, launches=2), gpu={"busy": {"power_w": None}})
    step.device = llama.Device("cuda", "", "sm_90", 132, 32)
    llama.print_summary(step, summary)
    return summary


def test_the_share_with_a_gradient_tells_what_is_frozen_from_what_is_severed(make_step, capsys):
    step = make_step(SMALL, severed_autograd=True)
    step.model.layers[0].requires_grad_(False)
    step.run()
    step.model.norm.weight.grad = torch.zeros_like(step.model.norm.weight)  # as good as none
    summary = summary_of(step, 3.0, dict(forward=0.5, backward=0.25, optimizer=0.25))
    out = capsys.readouterr().out
    assert "Phases together: 1.000 ms, 25 % of the batch time\n" in out
    # 7 tokens; a layer has 2 norms of 16, and matrices of 32, 16, 48 and 24 rows or columns; the last norm.
    layer, embedding = 2 * 16 + (32 + 16 + 48 + 24) * 16, 7 * 16
    assert summary["parameters"] == embedding + 2 * layer + 16
    assert "Parameters with a gradient: 112 of 4,032 (2.8 %), 1,952 frozen\n" in out
    missing = summary["parameters_without_gradient"]
    assert len(missing) == 7 and all(name.startswith(("layers.1.", "norm.")) for name in missing)


@pytest.mark.parametrize("host_ms, verdict", [(3.1, "not launch-bound"), (3.3, "launch-bound")])
def test_a_step_is_launch_bound_if_the_host_takes_four_fifths_of_it(make_step, capsys, host_ms, verdict):
    step = make_step(SMALL, impl="torch")
    step.run()
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
    model = llama.TinyLlamaTriton(SMALL, llama.OPERATIONS["triton"]).to(DEVICE)
    llama.FlatAdamW(model, 1e-3, low_precision=True)
    tokens, results = torch.arange(3, device=DEVICE)[None], []
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


@pytest.mark.parametrize("is_grouped", [True, False])
@pytest.mark.parametrize("compiled", COMPILED.values(), ids=COMPILED)
def test_what_is_compiled_calls_our_operations_as_they_are(make_step, compiled, is_grouped):
    step, plain = make_step(SMALL), make_step(SMALL)
    if not is_grouped:
        step.model.groups = None
    step.run_model = compiled(step.model)
    for each in (step, plain):
        each.run()
    compare = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    compare(step.loss, plain.loss)
    compare(*([p.grad for p in each.model.parameters()] for each in (step, plain)))
    with torch.no_grad():  # also for another shape
        compare(step.run_model(step.tokens[:, :2]), plain.model(step.tokens[:, :2]))


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="PyTorch before 2.9")
@pytest.mark.parametrize("setting", ["tf32", "ieee"])
def test_precision_by_its_new_name(setting):
    torch.backends.cuda.matmul.fp32_precision = setting
    assert llama.dot_precision(llama.Device("cuda", "", "sm_90", 132, 32)) == setting


def test_triton_decides_whether_it_interprets(monkeypatch):
    """ "true" is what Triton takes for true, and only Triton knows."""
    monkeypatch.setenv("TRITON_INTERPRET", "true")
    script = runpy.run_path(llama.__file__)
    assert script["triton_obstacle"](script["get_device"]("cpu")) is None


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


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_a_batch_of_no_sequences(make_step, impl):
    """The mean of no losses is NaN, and gradients are 0."""
    step = make_step(SMALL, impl=impl)
    empty = step.tokens[:0]
    for groups in (step.model.groups, None):
        step.model.groups = groups
        step.optimizer.zero_grad()
        assert step.model(empty).shape == (0, 3, 7)
        loss = step.model(empty, empty)
        loss.backward()
        assert loss.isnan() and not any(p.grad.any() for p in step.model.parameters())


@pytest.mark.parametrize("copied", [copy.deepcopy, saved])
def test_a_copied_model_trains_with_another_optimizer(make_step, copied):
    """And leaves the model alone from which it was copied."""
    step = make_step(SMALL)
    model, weights = copied(step.model), [w.clone() for w in step.optimizer.weights()]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(model(step.tokens, step.targets))
        losses[-1].backward()
        optimizer.step()
    assert losses[0] > losses[1]
    assert all(map(torch.equal, step.optimizer.weights(), weights))
