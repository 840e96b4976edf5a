"""Groups of layers compute what the layers compute one by one, as one autograd.Function."""

import dataclasses
import functools
import itertools

import pytest
import torch
import torch.utils.checkpoint

import tiny_llama_v3 as llama
from tests.core import test_kernels
from tests.core.tiny import TINY
from tiny_llama import groups

pytestmark = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")
poisoned_memory = test_kernels.poisoned_memory

SMALL = dataclasses.replace(
    TINY, hidden_dim=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=24, vocab_size=7, batch_size=1, seq_len=3,
    learning_rate=1e-2,
)  # fmt: skip


@pytest.fixture
def grouped(make_step):
    """A function that returns a step whose layers are in groups of this size, or by themselves (None)."""

    def grouped(size, **changes):
        step = make_step(SMALL, **changes)
        layers, bugs = step.model.layers, step.config.bugs
        starts = range(0, len(layers), size or len(layers))
        step.model.groups = size and [groups.LayerGroup(layers, slice(i, i + size), bugs) for i in starts]
        return step

    return grouped


def gradients(model):
    """{name: gradient, copied}"""
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def pass_over(step, *batches):
    """The gradients after a forward and a backward pass for each batch, by default for that of the step."""
    for tokens, targets in batches or [(step.tokens, step.targets)]:
        step.model(tokens, targets).backward()
    return gradients(step.model)


def batches_of(step, count):
    return [[t.to(step.tokens.device) for t in batch] for batch in itertools.islice(step.batches(7), count)]


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(actual[name], expected[name])]


def assert_close(actual, expected):
    """The same but for the order in which a product of several matrices adds up."""
    assert actual.keys() == expected.keys()
    for name, e in expected.items():
        assert (actual[name] - e).norm() <= 1e-6 * e.norm(), name


MISTAKES = dict(noncontiguous_kv=True, triton_matmul_swiglu=True)


@pytest.mark.parametrize("mistakes", [{}, MISTAKES], ids=["correct", "mistakes"])
def test_a_group_of_one_layer_gives_the_same_bits(grouped, mistakes):
    """The weights after two steps of training are those of layers by themselves."""
    plain, step = grouped(None, **mistakes), grouped(1, **mistakes)
    for batch in batches_of(plain, 2):
        for each in (plain, step):
            each.load(*batch)
            each.run()
        assert torch.equal(step.loss, plain.loss)
    assert_same_bits(gradients(step.model), gradients(plain.model))
    assert all(map(torch.equal, step.optimizer.weights(), plain.optimizer.weights()))


@pytest.mark.parametrize("size", [2, 3])
def test_weight_gradients_of_a_group_are_one_product(grouped, monkeypatch, size):
    """Of each kind of weight, and one launch for each kind of norm; the gradients are those of layers one by one."""
    products, launches, product, launch = [], [], torch.baddbmm, llama.launch

    def count_products(place, *args, **kwargs):
        products.append(tuple(place.shape))
        return product(place, *args, **kwargs)

    def count_launches(kernel, grid, *args, **kwargs):
        launches.extend([grid[1:]] * (kernel is llama.column_sum_kernel))
        launch(kernel, grid, *args, **kwargs)

    monkeypatch.setattr(llama, "NORM_FORWARD_ELEMENTS", 16)  # more programs than in the backward pass
    llama.norm_tile.cache_clear()
    plain, step = grouped(None, num_layers=3), grouped(size, num_layers=3)
    expected = pass_over(plain)
    monkeypatch.setattr(torch, "baddbmm", count_products)
    monkeypatch.setattr(llama, "launch", count_launches)
    assert_close(pass_over(step), expected)
    assert products == [(size, *shape) for shape in [(32, 16), (16, 16), (48, 16), (16, 24)]]
    assert launches == [(1,), *[(1,), (1,)] * (3 - size), (size,), (size,)]
    with torch.no_grad():  # also for another shape
        assert torch.equal(step.model(step.tokens[:, :2]), plain.model(step.tokens[:, :2]))


@pytest.mark.parametrize("size", [None, 1, 2])
def test_backward_passes_add_up(grouped, size):
    """Also where the gradient of one layer's weight, or of all weights, came by another way, or is missing."""
    step = grouped(size)
    first, second = batches_of(step, 2)
    each = []
    for batch in (first, second):
        step.optimizer.zero_grad()
        each.append(pass_over(step, batch))
    total = {name: each[0][name] + each[1][name] for name in each[0]}
    weight, name = step.model.layers[1].attention.qkv_proj.weight, "layers.1.attention.qkv_proj.weight"

    step.optimizer.zero_grad()
    assert_close(pass_over(step, first, second), total)
    assert all(p.grad is p.main_grad for p in step.model.parameters())

    step.optimizer.zero_grad()
    weight.grad = torch.ones_like(weight)
    assert_close(pass_over(step, first, second), total | {name: total[name] + 1})
    assert weight.grad is weight.main_grad

    step.optimizer.zero_grad()
    for _ in range(2):  # between two gradients that are autograd's own
        sum(p.sum() for p in step.model.parameters()).backward()
        pass_over(step, first)
    assert_close(gradients(step.model), {name: 2 * each[0][name] + 2 for name in total})

    step.optimizer.zero_grad()
    pass_over(step, first)
    weight.grad = None
    assert_close(pass_over(step, second), total | {name: each[1][name]})
    step.optimizer.collect_gradients([weight])
    assert torch.equal(weight.main_grad, weight.grad)


@pytest.mark.parametrize("used", [0, 1], ids=["residual", "branch"])
def test_one_output_alone_gives_a_gradient(grouped, used):
    """The other one's is missing."""
    results = []
    for size in (None, 1):
        step = grouped(size, num_layers=1)
        (layer,) = step.model.groups or step.model.layers
        x = torch.linspace(-1, 1, 48, device=step.tokens.device).view(1, 3, 16).requires_grad_()
        layer(x, None, step.model.cos, step.model.sin)[used].square().sum().backward()
        step.optimizer.collect_gradients(list(step.model.parameters()))
        results.append({"x": x.grad} | {name: p.main_grad for name, p in step.model.named_parameters()})
    assert_same_bits(results[1], results[0])


def test_hooks_of_a_group_are_called(grouped):
    step, called = grouped(2, num_layers=3), []
    for group in step.model.groups:
        group.register_forward_hook(lambda group, inputs, outputs: called.append((group.place.start, outputs[0].shape)))
    step.forward()
    assert called == [(0, (1, 3, 16)), (2, (1, 3, 16))]


def test_weights_may_move_and_change_after_grouping(grouped):
    step, moved = grouped(2), grouped(2)
    for p in moved.model.parameters():
        p.data = p.detach().clone()
    assert_same_bits(pass_over(moved), pass_over(step))
    for each in (step, moved):
        each.optimizer.zero_grad()
        each.model.load_state_dict({name: 2 * p.detach() for name, p in each.model.named_parameters()})
    actual, expected = pass_over(moved), pass_over(step)
    assert_same_bits(actual, expected)
    fresh = grouped(2)
    assert not torch.equal(actual["embed_tokens.weight"], pass_over(fresh)["embed_tokens.weight"])


@pytest.mark.parametrize("parts", ["operations", "layers", "groups"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints(grouped, monkeypatch, parts, use_reentrant):
    """Recomputed in the backward pass, by either way of torch.utils.checkpoint, the gradients are the same."""

    def checkpointed(function):
        return functools.partial(torch.utils.checkpoint.checkpoint, function, use_reentrant=use_reentrant)

    size, operations = 2 if parts == "groups" else None, llama.OPERATIONS["triton"]
    expected = pass_over(grouped(size))
    if parts == "operations":
        names = ("rmsnorm", "linear", "attention", "swiglu")
        again = operations._replace(**{name: checkpointed(getattr(operations, name)) for name in names})
        monkeypatch.setitem(llama.OPERATIONS, "triton", again)
    recomputed = grouped(size)
    for part in recomputed.model.groups or recomputed.model.layers if parts != "operations" else ():
        part.forward = checkpointed(part.forward)
    assert_same_bits(pass_over(recomputed), expected)


def test_a_group_refuses_a_second_run_and_a_second_derivative(grouped):
    step = grouped(2)
    group, x = step.model.groups[0], torch.ones(1, 3, 16, device=step.tokens.device, requires_grad=True)
    residual, _ = group(x, None, step.model.cos, step.model.sin)
    with pytest.raises(RuntimeError, match="GroupFunctionBackward has no second derivative"):
        torch.autograd.grad(residual.sum(), x, create_graph=True)
    residual, _ = group(x, None, step.model.cos, step.model.sin)
    residual.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        residual.sum().backward()


def test_stacked_view():
    memory = torch.arange(40.0)
    parts = [memory[start : start + 6].view(2, 3) for start in (3, 13, 23)]
    stack = groups.stacked_view(parts)
    assert torch.equal(stack, torch.stack(parts)) and stack.data_ptr() == parts[0].data_ptr()
    copies = [t.clone().view(2, 3) for t in parts]
    for apart in (parts[::2] + parts[1:2], [*parts, memory[34:40].view(2, 3)], [*parts[:2], copies[2]], copies):
        assert groups.stacked_view(apart) is None


def test_a_group_of_layers_that_are_not_evenly_spaced(grouped):
    """Or that are partly frozen: each weight's gradient is a product of its own."""
    plain, step = grouped(None, num_layers=4), grouped(None, num_layers=4)
    layers = step.model.layers
    step.model.groups = [groups.LayerGroup(layers, slice(0, 1)), groups.LayerGroup(layers, slice(1, 4))]
    llama.FlatAdamW(layers[2], 1e-3)  # whose weights and gradients lie elsewhere from now on
    for each in (plain, step):
        each.model.layers[1].feed_forward.down_proj.requires_grad_(False)
        each.forward()
        each.backward()
    for (name, p), q in zip(step.model.named_parameters(), plain.model.parameters(), strict=True):
        assert p.grad is q.grad is None or (p.grad - q.grad).norm() <= 1e-6 * q.grad.norm(), name


@pytest.mark.parametrize(
    "fitting, stretches, sizes",
    [
        (0.5, [8], [1] * 8), (1, [8], [1] * 8), (3, [8], [3, 3, 2]), (5, [8], [4, 4]), (8, [8], [8]), (99, [8], [8]),
        (3, [4, 4], [3, 1, 3, 1]), (5, [2, 4, 2], [2, 4, 2]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("use_amp", [False, True])
def test_groups_are_even_and_within_what_fits(monkeypatch, use_amp, fitting, stretches, sizes):
    """fitting: how many layers have gradients of GROUP_BYTES; no group is longer or goes beyond its stretch."""
    config = dataclasses.replace(SMALL, num_layers=8, use_amp=use_amp, noncontiguous_kv=True)
    layer_bytes = 3 * (16 + 16 + 4 * 8) * (2 if use_amp else 4)  # of y_grad, branch_grad and qkv_grad
    monkeypatch.setattr(groups, "GROUP_BYTES", int(fitting * layer_bytes))
    layers, numbers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(8)), iter(range(8))
    made = groups.make_groups(layers, [list(itertools.islice(numbers, count)) for count in stretches], config)
    assert [len(group.layers()) for group in made] == sizes
    assert list(itertools.chain(*(group.layers() for group in made))) == list(layers)
    assert all(group.bugs == ("noncontiguous_kv",) for group in made)


@pytest.mark.parametrize(
    "changes, grouped",
    [({}, True), (dict(severed_autograd=True), False), (dict(impl="torch"), False), (dict(compile=True), False)],
)
def test_a_step_groups_its_layers(make_step, changes, grouped):
    model = make_step(SMALL, **changes).model
    assert (model.groups is not None) == grouped
    assert not grouped or [len(group.layers()) for group in model.groups] == [2]
    assert len(list(model.parameters())) == 2 + 6 * 2  # none twice


@pytest.mark.gpu
def test_groups_in_bf16(grouped):
    """As close to layers by themselves as the rounding allows, after three steps."""
    plain, step = grouped(None, use_amp=True), grouped(2, use_amp=True)
    for each in (plain, step):
        for batch in batches_of(plain, 3):
            each.load(*batch)
            each.run()
    torch.testing.assert_close(step.loss, plain.loss, rtol=1e-2, atol=0)
    for weight, expected in zip(step.optimizer.weights(), plain.optimizer.weights(), strict=True):
        assert (weight - expected).norm() <= 1e-2 * expected.norm()
