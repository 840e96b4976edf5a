"""Sizes that are no multiples of 8: FlatAdamW and groups pad what the products multiply, and nobody sees it."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import tiny_llama_v3 as llama
from tests.core import test_kernels
from tests.core.tiny import TINY, owner_of

pytestmark = pytest.mark.triton
poisoned_memory, randn = test_kernels.poisoned_memory, test_kernels.randn
ON_GPU = [32001, 50257] if torch.cuda.is_available() else []


class Head(nn.Module):
    """A head, whose embedding is tied to it."""

    def __init__(self, vocab, device):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(vocab, 16, device=device))

    def forward(self, tokens):
        return llama.triton_linear(torch.tanh(llama.triton_embedding(tokens, self.weight)), self.weight)


def exact_gradient(weight, tokens, targets):
    """Return the loss and the gradient of Head's weight in fp64."""
    weight = weight.detach().double().requires_grad_()
    loss = F.cross_entropy(torch.tanh(weight[tokens]) @ weight.T, targets)
    loss.backward()
    return loss, weight.grad


def data(vocab, device, rows=9):
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(vocab, (rows,), generator=generator).to(device) for _ in range(2))


@pytest.mark.parametrize("vocab", [1, 2, 7, 8, 1001, *ON_GPU])
def test_loss_and_gradient_of_a_vocabulary_of_any_size(device, vocab):
    """They are right in the first pass, and twice the gradient after a second one. The logits' rows are padded."""
    model = Head(vocab, device)
    optimizer = owner_of(model, 1e-3)
    tokens, targets = data(vocab, device)
    exact_loss, exact = exact_gradient(model.weight, tokens, targets)
    for times in (1, 2):
        logits = model(tokens)
        assert logits.shape == (9, vocab) and logits.stride(0) == llama.padded_length(vocab)
        loss = llama.triton_cross_entropy(logits, targets)
        loss.backward()
        torch.testing.assert_close(loss.double(), exact_loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model.weight.grad.double(), times * exact, rtol=1e-4, atol=1e-6)
        assert model.weight.grad.shape == (vocab, 16) and model.weight.grad is model.weight.main_grad
    before = model.weight.detach().clone()
    optimizer.step()
    update = 2 * exact / (2 * exact.abs() + 1e-8) + 0.01 * before  # AdamW's first one
    torch.testing.assert_close(model.weight.detach(), before - 1e-3 * update.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("length, padded", [(1, 16), (7, 16), (8, 8), (1000, 1000), (1001, 1008), (50257, 50272)])
def test_padded_lengths(length, padded):
    assert llama.padded_length(length) == padded


@pytest.mark.parametrize(
    "flags", [{}, {"untied_head": True}, {"recompute": True}, {"triton_matmul_swiglu": True}], ids=str
)
@pytest.mark.parametrize("vocab, ffn", [(2, 5), (7, 27), (33, 1), (48, 30)])
@pytest.mark.usefixtures("poisoned_memory")
def test_a_model_of_odd_sizes_passes_the_check(device, vocab, ffn, flags):
    sizes = dict(vocab_size=vocab, ffn_dim=ffn, hidden_dim=30, num_heads=3, num_kv_heads=1)
    config = llama.Config(**sizes, num_layers=3, batch_size=2, seq_len=5, **flags)
    verdict, _ = llama.check_batch(config, torch.device(device), next(llama.batches(config)))
    assert not verdict.failed
    assert llama.without_gradient(llama.TrainStep(config, torch.device(device)).model)  # before a pass: all


@pytest.mark.parametrize("precision", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["fp32", "bf16"])
def test_padding_stays_zero_and_out_of_sight(make_step, precision):
    """Of weights, gradients and moments, in training and after a restart. State dict and counts are those of V."""
    step = make_step(vocab_size=37, ffn_dim=27, use_amp=precision)
    for _ in range(3):
        step.run()
    optimizer, model = step.optimizer, step.model
    for restarted in (False, True):
        is_padding = torch.zeros_like(optimizer.param, dtype=torch.bool)
        for whole, own in zip(optimizer.padded_views(is_padding), optimizer.views(is_padding), strict=True):
            whole.fill_(True)
            own.fill_(False)
        assert is_padding.sum() > 11 * 32  # the rows of the vocabulary alone
        state = optimizer.param, optimizer.grad, optimizer.exp_avg, optimizer.exp_avg_sq
        for flat in state if not precision else (*state, optimizer.remainder):
            assert not flat[is_padding].any()
            assert flat.any() or restarted
        optimizer.param[is_padding] = float("nan")  # of a run that diverged
        step.restart()
    assert model.state_dict()["embed_tokens.weight"].shape == (37, 32)
    assert llama.count_weights(optimizer.weights()) == llama.count_weights(model.parameters())
    torch.testing.assert_close(optimizer.weights()[0].cpu(), step.initial_weights[0], rtol=8e-3, atol=0)


def other_loss(logits, targets):
    return F.cross_entropy(logits.float(), targets)


def changed_in_place(logits, targets):
    return llama.triton_cross_entropy(logits.mul_(1.0), targets)


def of_a_part(logits, targets):
    return llama.triton_cross_entropy(logits[:4], targets[:4]) * 4 / 9 + other_loss(logits[4:], targets[4:]) * 5 / 9


def ignored(logits, targets):
    """The mean over the rows that count is that over all, if one that does not count is added."""
    return llama.triton_cross_entropy(torch.cat((logits, logits[:1])), F.pad(targets, (0, 1), value=-100))


def laid_alike(logits, targets):
    """The gradient lies in memory of its own, with as much padding as the logits have."""
    vocab, missing = logits.shape[1], logits.stride(0) - logits.shape[1]
    logits.register_hook(lambda grad: F.pad(grad, (0, missing), value=9.0)[:, :vocab])
    return other_loss(logits, targets)


@pytest.mark.parametrize("loss", [other_loss, changed_in_place, of_a_part, ignored, laid_alike])
def test_the_gradient_may_come_from_anywhere(device, loss):
    """Only the loss kernel's lies in the logits' own memory, with zeros behind each row."""
    model = Head(7, device)
    owner_of(model, 1e-3)
    tokens, targets = data(7, device)
    _, exact = exact_gradient(model.weight, tokens, targets)
    loss(model(tokens), targets).backward()
    torch.testing.assert_close(model.weight.grad.double(), exact, rtol=1e-4, atol=1e-6)


def test_gradients_that_are_asked_for_have_the_shape_of_the_weight(device):
    """Of autograd.grad() and of a hook. Of a weight that an optimizer owns there is none to be had."""
    model, owned = Head(7, device), Head(7, device)
    owner_of(owned, 1e-3)
    tokens, targets = data(7, device)
    _, exact = exact_gradient(model.weight, tokens, targets)
    seen = []
    found = torch.autograd.grad(llama.triton_cross_entropy(model(tokens), targets), model.weight)
    model.weight.register_hook(lambda grad: seen.append(grad.clone()))
    llama.triton_cross_entropy(model(tokens), targets).backward()
    for grad in (*found, *seen, model.weight.grad):
        torch.testing.assert_close(grad.double(), exact, rtol=1e-4, atol=1e-6)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(llama.triton_cross_entropy(owned(tokens), targets), owned.weight)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_what_backward_computes_again_has_the_bits_of_forward(device, dtype):
    """SwiGLU's output for all gates of bf16, with padding of zeros; a norm's for rows of any scale."""
    bits = torch.arange(-(2**15), 2**15, 1 if dtype == torch.bfloat16 else 977, dtype=torch.int16)
    gate = bits.view(torch.bfloat16).to(device, dtype)
    gate = gate[gate.isfinite()][None]
    ffn = gate.shape[1]
    up = torch.randn(gate.shape, device=device, generator=torch.Generator(device).manual_seed(0)).to(dtype)
    gate_up = F.pad(torch.cat((gate, up), 1), (0, 5), value=9.0)
    forward = llama.swiglu_activation(gate_up, ffn, ffn + 3)
    hidden_grad = torch.ones_like(forward)
    plain_grad, plain_gate_up = torch.ones_like(gate), torch.cat((gate, up), 1)
    llama.swiglu_activation_backward_(hidden_grad, gate_up, ffn, recompute=True)
    llama.swiglu_activation_backward_(plain_grad, plain_gate_up)
    assert torch.equal(hidden_grad.nan_to_num(7.0), forward.nan_to_num(7.0)) and not forward[:, ffn:].any()
    assert torch.equal(gate_up[:, : 2 * ffn].nan_to_num(7.0), plain_gate_up.nan_to_num(7.0))
    assert (plain_grad == 1).all() and (gate_up[:, 2 * ffn :] == 9).all()

    x = torch.linspace(-3, 3, 6 * 100, device=device).view(6, 100).to(dtype) ** 3
    weight, upstream = x[0] + 1, x.flip(0) + 0.5
    residual, y, rstd = llama.rmsnorm_forward(x, upstream, weight, 1e-5)
    results = []
    for recompute in (False, True):
        y_grad = upstream.clone()
        results.append(llama.rmsnorm_backward(y_grad, x, residual, weight, rstd, recompute=recompute))
        assert torch.equal(y_grad, y if recompute else upstream)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("ffn", [27, 64])
def test_a_second_pass_adds_to_the_gradients_of_all_weights(make_step, ffn):
    """Also where the feed-forward width is padded: twice the gradients of one pass."""
    step = make_step(ffn_dim=ffn)
    step.forward()
    step.backward()
    once = [p.grad.clone() for p in step.model.parameters()]
    step.call_model(step.tokens, step.targets).backward()
    for (name, p), grad in zip(step.model.named_parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * grad, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
        assert grad.any(), name


@pytest.mark.parametrize("recompute", [False, True])
def test_groups_save_no_more_than_backward_needs(make_step, recompute):
    """For each layer o, gate_up, q, k, v and two residuals, (tokens, width), beside lse and rstd; without --recompute
    also the outputs of both norms and of SwiGLU.
    """
    step, sizes = make_step(ffn_dim=64, recompute=recompute), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append((t.data_ptr(), t.numel())) or t, lambda t: t):
        residual = torch.zeros(2, 17, 32, device=step.tokens.device, requires_grad=True)
        step.model.layers.groups[0](residual, None, step.model.cos, step.model.sin)
    rows, layers, config = 2 * 17, TINY.num_layers, step.config
    weights = {p.data_ptr() for p in step.model.parameters()} | {step.model.cos.data_ptr(), step.model.sin.data_ptr()}
    activations = sum(size for place, size in dict(sizes).items() if place not in weights)
    widths = 32 + 2 * 64 + (4 + 2 * 2) * config.head_dim + 2 * 32 + (0 if recompute else 2 * 32 + 64)
    assert activations == layers * rows * (widths + config.num_heads + 2)


@pytest.mark.parametrize("precision", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ffn", [27, 64])
def test_recomputed_equals_stored(make_step, precision, ffn):
    """Weights, gradients and loss have the same bits after steps of training.

    Not so in rows of no more elements than a warp has threads: with fused multiply-add, each then adds up the squares
    of a row in an order of its own.
    """
    changes = dict(hidden_dim=128, ffn_dim=ffn, use_amp=precision)
    steps = [make_step(**changes, recompute=recompute) for recompute in (False, True)]
    for _ in range(2):
        for step in steps:
            step.run()
    stored, recomputed = steps
    assert torch.equal(stored.loss, recomputed.loss)
    assert torch.equal(stored.optimizer.param, recomputed.optimizer.param)
    assert torch.equal(stored.optimizer.grad, recomputed.optimizer.grad)


@pytest.mark.parametrize("tokens", [[3] * 40, [*range(8)] * 5, [0, 7, 0, 7, 7], [5]])
@pytest.mark.parametrize("by_comparison", [False, True])
def test_frequent_tokens(randn, device, monkeypatch, tokens, by_comparison):
    """Of one token there may be more than are added at a time. Rows of tokens that do not occur stay."""
    monkeypatch.setattr(llama, "ORDERED_BY_COMPARISON", 100 * by_comparison)
    tokens = torch.tensor(tokens, device=device)
    place, out_grad = randn(8, 24), randn(len(tokens), 24)
    expected = place.double().index_add(0, tokens, out_grad.double())
    again, untouched = place.clone(), place.clone()
    for each in (place, again):
        llama.embedding_gradient(each, True, tokens, out_grad)
    torch.testing.assert_close(place.double(), expected, rtol=1e-5, atol=1e-5)
    is_absent = torch.ones(8, dtype=torch.bool, device=device).index_fill(0, tokens, False)
    assert torch.equal(place, again) and torch.equal(place[is_absent], untouched[is_absent])
    llama.embedding_gradient(place, False, tokens, out_grad)
    torch.testing.assert_close(place.double(), expected - untouched, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("number, most", [(1, 5), (31, 3), (300, 2**31 - 1), (515, 40)])
def test_order_of_tokens(device, number, most, dtype):
    tokens = torch.randint(most, (number,), generator=torch.Generator().manual_seed(number)).to(device, dtype)
    tokens[0] = most - 1
    for ours, theirs in zip(llama.sort_tokens(tokens), tokens.sort(stable=True), strict=True):
        assert torch.equal(ours.long(), theirs.long())
