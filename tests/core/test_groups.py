"""Groups of layers compute what the layers compute one by one, as one autograd.Function."""

import dataclasses
import itertools
from unittest import mock

import pytest
import torch

import tiny_llama_v3 as llama
from tests.core import test_kernels
from tests.core.tiny import SMALL, without_groups
from tiny_llama import groups

pytestmark = pytest.mark.triton
poisoned_memory = test_kernels.poisoned_memory


@pytest.fixture
def grouped(make_step):
    """Return a function that makes a step whose layers are in groups of this size, or by themselves (None)."""

    def grouped(size, **changes):
        fitting = mock.patch.object(groups, "GROUP_BYTES", (size or 0) * layer_bytes(SMALL))
        with fitting if size else without_groups():
            return make_step(SMALL, **changes)

    return grouped


def layer_bytes(config):
    """Return what GROUP_BYTES counts of a layer: its y_grad, branch_grad and qkv_grad."""
    width = 2 * config.hidden_dim + (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return config.tokens_per_step * width * (2 if config.use_amp else 4)


def pass_over(step, tokens, targets):
    """Return the gradients, copied, after a forward and a backward pass."""
    step.model(tokens, targets).backward()
    return {name: p.grad.clone() for name, p in step.model.named_parameters()}


def assert_close(actual, expected):
    """The same but for the order in which a product of several matrices adds up."""
    assert actual.keys() == expected.keys()
    for name, e in expected.items():
        assert (actual[name] - e).norm() <= 1e-6 * e.norm(), name


def test_a_group_of_one_layer_gives_the_same_bits(grouped):
    """The weights after two steps of training are those of layers by themselves."""
    plain, step = grouped(None), grouped(1)
    for batch in itertools.islice(llama.batches(SMALL), 2):
        for each in (plain, step):
            each.load(*batch)
            each.run()
        assert torch.equal(step.loss, plain.loss)
    for p, q in zip(step.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(p, q) and torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("size", [2, 3])
def test_weight_gradients_of_a_group_are_one_product(grouped, monkeypatch, size):
    """There is one for each kind of weight, and the gradients are those of layers one by one."""
    products, product = [], torch.baddbmm

    def count_products(place, *args, **kwargs):
        products.append(tuple(place.shape))
        return product(place, *args, **kwargs)

    monkeypatch.setattr(torch, "baddbmm", count_products)
    monkeypatch.setattr(llama, "NORM_FORWARD_ELEMENTS", 16)  # more programs than in the backward pass
    llama.norm_tile.cache_clear()
    plain, step = grouped(None, num_layers=3), grouped(size, num_layers=3)
    batch = step.tokens, step.targets
    assert_close(pass_over(step, *batch), pass_over(plain, *batch))
    assert products == [(size, *shape) for shape in [(16, 24), (48, 16), (32, 16), (16, 16)]]
    with torch.no_grad():  # also for another shape
        assert torch.equal(step.model(step.tokens[:, :2]), plain.model(step.tokens[:, :2]))


@pytest.mark.parametrize("used", [0, 1], ids=["residual", "branch"])
def test_one_output_alone_gives_a_gradient(grouped, used):
    """The gradient of the other one is missing; that of this one is expanded."""
    results = []
    for size in (None, 1):
        step = grouped(size, num_layers=1)
        x = torch.linspace(-1, 1, 48, device=step.tokens.device)
        x = x.view(1, 3, 16).requires_grad_()
        output = step.model.layers(x, None, step.model.cos, step.model.sin)[used]
        upstream = x.detach()[:, :, :1].expand_as(x)
        output.backward(upstream)
        step.optimizer.collect_gradients(step.optimizer.parameters)
        results.append([x.grad, *(p.main_grad for p in step.optimizer.parameters)])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5)  # a GPU's library adds in another order


def test_a_group_refuses_a_second_run_and_a_second_derivative(grouped):
    step = grouped(2)
    x = torch.ones(1, 3, 16, device=step.tokens.device, requires_grad=True)

    def residual():
        return step.model.layers(x, None, step.model.cos, step.model.sin)[0].sum()

    with pytest.raises(RuntimeError, match="GroupFunctionBackward has no second derivative"):
        torch.autograd.grad(residual(), x, create_graph=True)
    output = residual()
    output.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_only_evenly_spaced_parts_of_one_tensor_are_a_stack():
    memory = torch.arange(40.0)
    a, b, c, d = (memory[start : start + 6].view(2, 3) for start in (3, 13, 23, 34))
    stack = groups.stacked_view([a, b, c])
    assert torch.equal(stack, torch.stack([a, b, c]))
    assert stack.data_ptr() == a.data_ptr()
    # As far from the beginning of its memory as c.
    elsewhere = memory.clone()[23:29].view(2, 3)
    for parts in ([c, b, a], [a, b, c, d], [a, b, elsewhere], [a]):
        assert groups.stacked_view(parts) is None


SIZES = """
# layers that fit, layers of each bucket, layers in each group
0.5 | 8     | 1 1 1 1 1 1 1 1
3   | 8     | 3 3 2
5   | 8     | 4 4
8   | 8     | 8
99  | 8     | 8
3   | 4 4   | 3 1 3 1
5   | 2 4 2 | 2 4 2
"""


@pytest.mark.parametrize("use_amp", [False, True])
@pytest.mark.parametrize("row", SIZES.strip().splitlines()[1:])
def test_groups_are_even_and_within_what_fits(monkeypatch, use_amp, row):
    """A layer fits if its gradients do in GROUP_BYTES; no group is longer or goes beyond its bucket."""
    fitting, buckets, sizes = ([*map(float, column.split())] for column in row.split("|"))
    config = dataclasses.replace(SMALL, num_layers=8, use_amp=use_amp, noncontiguous_kv=True)
    monkeypatch.setattr(groups, "GROUP_BYTES", int(fitting[0] * layer_bytes(config)))
    layers = [torch.nn.Identity() for _ in range(8)]
    remaining = iter(layers)
    made = groups.LayerGroups(layers, [[*itertools.islice(remaining, int(count))] for count in buckets], config).groups
    assert [len(group.layers) for group in made] == sizes
    assert list(itertools.chain(*(group.layers for group in made))) == layers
    assert [group.first for group in made] == [0, *itertools.accumulate(map(int, sizes))][:-1]
    assert all(group.bugs == ("noncontiguous_kv",) for group in made)
