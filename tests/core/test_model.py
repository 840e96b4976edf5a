"""The model as a whole: the implementations agree, it learns what can be learnt, and the check sees what is wrong."""

import contextlib
import dataclasses
import functools
import inspect
import math
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tiny_llama_v3 as llama
from tests.core.tiny import TINY

needs_triton = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")
IMPLEMENTATIONS = [pytest.param("triton", marks=needs_triton), "torch", "sdpa"]
# A block as separate operations, not as the one that replaces them.
TRITON_PARTS = pytest.param(llama.OPERATIONS["triton"]._replace(blocks=None), marks=needs_triton)

TINIER = dataclasses.replace(TINY, hidden_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=24, seq_len=8)


def train(device, config=TINY, **changes):
    """(step, losses) of a whole run."""
    config = dataclasses.replace(config, **changes)
    step, records = llama.TrainStep(config, llama.get_device(device)), []
    llama.warm_up(step, config, step.device)
    llama.train(step, llama.DATA[config.data](config), config, step.device, records)
    return step, [record.loss for record in records]


def loss_and_gradients(step):
    step.forward()
    step.backward()
    return {"loss": step.loss.detach()} | {name: p.grad for name, p in step.model.named_parameters()}


# --- the implementations agree


@pytest.mark.parametrize("impl", [pytest.param("triton", marks=needs_triton), "sdpa"])
def test_loss_and_gradients(make_step, impl):
    """Errors against float64 at most twice those of plain PyTorch in fp32, plus 2e-6 of the largest element."""
    double = make_step(impl="torch")
    double.model.double()
    exact, plain, actual = map(loss_and_gradients, (double, make_step(impl="torch"), make_step(impl=impl)))
    assert actual.keys() == exact.keys() and len(exact) == 2 + 6 * TINY.num_layers + 1
    for name, e in exact.items():
        error, allowed = (actual[name] - e).abs().max(), 2 * (plain[name] - e).abs().max() + 2e-6 * e.abs().max()
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


@needs_triton
def test_one_seed_gives_all_implementations_the_same_weights(make_step):
    def weights(**changes):
        return torch.cat([w.flatten() for w in make_step(**changes).initial_weights])

    assert torch.equal(weights(impl="triton"), weights(impl="torch"))
    assert torch.equal(weights(impl="triton"), weights(impl="sdpa"))
    assert not torch.equal(weights(impl="torch"), weights(impl="torch", seed=7))


@needs_triton
def test_training_follows_the_same_curve(device):
    run = dataclasses.replace(TINIER, data="markov", vocab_size=8, num_steps=30, learning_rate=1e-2)
    _, ours = train(device, run, impl="triton")
    _, theirs = train(device, run, impl="torch")
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=3e-5, atol=0)
    assert sum(theirs[-5:]) / 5 < theirs[0] - 0.2  # the curve is not a flat line


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_every_parameter_receives_a_gradient_and_moves(make_step, impl):
    step = make_step(impl=impl, learning_rate=1e-3)
    step.run()
    for (name, p), before in zip(step.model.named_parameters(), step.initial_weights, strict=True):
        assert p.grad.any(), name
        moved = (p.detach().cpu() - before).abs().mean().item()
        assert moved == pytest.approx(1e-3, rel=0.1), name  # AdamW's first step moves each weight by about lr


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_restart_forgets_everything(device, impl):
    config = dataclasses.replace(TINIER, impl=impl)
    step = llama.TrainStep(config, llama.get_device(device if impl == "triton" else "cpu"))  # where bits are kept
    step.load(*llama.RandomTokens(config).next_batch())

    def two_steps():
        step.run()
        step.run()
        return [p.detach().clone() for p in step.model.parameters()]

    first = two_steps()
    step.restart()
    assert all(map(torch.equal, first, two_steps()))


@needs_triton
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_blocks(make_step, use_reentrant):
    """Recomputed in the backward pass, by either way of torch.utils.checkpoint, the gradients are the same."""
    plain, recomputed = make_step(), make_step()
    assert recomputed.model.operations.blocks
    recomputed.model.group_layers(1)
    for layer in recomputed.model.layers:
        layer.forward = functools.partial(torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=use_reentrant)
    expected, actual = loss_and_gradients(plain), loss_and_gradients(recomputed)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    plain.optimizer.step()
    recomputed.optimizer.step()
    assert all(map(torch.equal, plain.optimizer.weights(), recomputed.optimizer.weights()))


# --- layers in groups, and their launches on tapes


def grouped(make_step, size, tapes=False, **changes):
    step = make_step(dataclasses.replace(TINIER, num_layers=2), **changes)
    step.model.group_layers(size)
    if tapes:
        step.model.allow_tapes()
    return step


def batches(count):
    """On the device of the steps, for who calls the model itself."""
    data, device = llama.RandomTokens(dataclasses.replace(TINIER, seed=7)), llama.select_device("auto")
    return [[tokens.to(device.type) for tokens in data.next_batch()] for _ in range(count)]


@needs_triton
@pytest.mark.parametrize("size", [2, 3])
def test_weight_gradients_of_a_group_are_one_product(make_step, monkeypatch, size):
    """Of each kind of weight, and one launch for each kind of norm; the gradients are those of layers one by one."""
    products, launches, product, launch = [], [], torch.baddbmm, llama.launch

    def count_products(place, *args, **kwargs):
        products.append(tuple(place.shape))
        return product(place, *args, **kwargs)

    def count_launches(kernel, grid, *args, **kwargs):
        launches.extend([grid[1:]] * (kernel is llama.column_sum_kernel))
        launch(kernel, grid, *args, **kwargs)

    expected = loss_and_gradients(grouped(make_step, 1, num_layers=3))
    monkeypatch.setattr(torch, "baddbmm", count_products)
    monkeypatch.setattr(llama, "launch", count_launches)
    actual = loss_and_gradients(grouped(make_step, size, num_layers=3))
    shapes = [(32, 16), (16, 16), (48, 16), (16, 24)]
    assert products == [(size, *shape) for shape in shapes]
    assert launches == [(1,), *[(1,), (1,)] * (3 - size), (size,), (size,)]
    for name, e in expected.items():
        assert (actual[name] - e).norm() <= 1e-6 * e.norm(), name


@needs_triton
@pytest.mark.parametrize("size", [1, 2])
def test_backward_passes_of_a_group_add_up(make_step, size):
    """Also where a gradient came by another way, of one layer's weight only."""
    step, total = grouped(make_step, size), {}
    for batch in batches(2):
        step.load(*batch)
        for name, gradient in loss_and_gradients(step).items():
            total[name] = total.get(name, 0) + gradient.clone()
    foreign = step.model.layers[1].attention.qkv_proj.weight
    for other_way in (False, True):
        step.optimizer.zero_grad()
        if other_way:
            foreign.grad = torch.ones_like(foreign)
        for batch in batches(2):
            step.model(*batch).backward()
        for name, p in step.model.named_parameters():
            expected = total[name] + (1 if other_way and p is foreign else 0)
            assert (p.grad - expected).norm() <= 1e-5 * expected.norm(), name
            assert (p.grad is p.main_grad) == (not other_way or p is not foreign), name


@needs_triton
def test_tapes_give_the_same_bits(make_step, monkeypatch):
    """On other batches and weights, with a look at the logits in between, from the start again, for another shape."""
    plain, taped = grouped(make_step, 2), grouped(make_step, 2, tapes=True)
    repeated, launch = [], llama.launch
    monkeypatch.setattr(
        llama, "launch", lambda kernel, *args, **kwargs: (repeated.append(kernel), launch(kernel, *args, **kwargs))
    )
    counts = []
    for index, batch in enumerate(batches(6)):
        for step in (plain, taped):
            repeated.clear()
            if index == 4:
                step.restart()
            step.load(*batch)
            if index == 5:
                step.tokens, step.targets = step.tokens[:1, :5], step.targets[:1, :5]
            step.run()
        counts.append(len(repeated))
        assert torch.equal(plain.loss, taped.loss), index
        assert all(map(torch.equal, plain.optimizer.weights(), taped.optimizer.weights())), index
        with torch.no_grad():
            assert torch.equal(plain.model(plain.tokens), taped.model(plain.tokens))
    assert counts[0] == counts[1] == counts[5] > 10 > counts[2] == counts[3] == counts[4] > 0


@needs_triton
def test_tapes_wait_for_a_backward_pass(make_step):
    """A forward pass before the backward pass of another one leaves that one's memory alone."""
    plain, taped = grouped(make_step, 2), grouped(make_step, 2, tapes=True)
    for _ in range(2):
        taped.run()
    taped.restart()
    gradients = []
    for step in (plain, taped):
        step.optimizer.zero_grad()
        losses = [step.model(*batch) for batch in batches(2)]
        for loss in losses:
            loss.backward()
        gradients.append([p.grad for p in step.model.parameters()])
    assert all(map(torch.equal, *gradients))


@needs_triton
@pytest.mark.parametrize("way", [llama.launch, llama.launch_described])
def test_tapes_repeat_every_way_to_launch(way, device, monkeypatch):
    monkeypatch.setattr(llama.Tapes, "calls", [])
    x, factor = torch.ones(2, 8, device=device), torch.full((), 3.0, device=device)
    way(llama.scale_kernel, (2,), (x, factor), (x.stride(), 8), dict(BLOCK_SIZE=8))
    ((call, _),) = llama.Tapes.calls
    call()
    assert (x == 9.0).all()


# --- the model


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_logits(make_step, impl):
    """Of the right shape, the same as those under the loss, for sequences shorter than the longest as well."""
    step = make_step(impl=impl)
    with torch.no_grad():
        logits = step.model(step.tokens)
        loss = step.model(step.tokens, step.targets)
        short = step.model(step.tokens[:, :5].contiguous())
    assert logits.shape == (2, 17, 37)
    torch.testing.assert_close(llama.torch_cross_entropy(logits, step.targets), loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(short, logits[:, :5], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_logits_do_not_depend_on_later_tokens(make_step, impl):
    step = make_step(impl=impl)
    changed = step.tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % TINY.vocab_size
    with torch.no_grad():
        before, after = step.model(step.tokens), step.model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-6)
    assert ((before - after)[:, 9:].abs().amax(-1) > 1e-3).all()


def test_attention_looks_back(make_step):
    step = make_step(impl="torch")
    changed = step.tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % TINY.vocab_size
    with torch.no_grad():
        assert ((step.model(step.tokens) - step.model(changed)).abs().amax(-1) > 0).all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_head_is_tied_to_the_embedding(make_step, impl):
    step = make_step(impl=impl)
    kv = TINY.num_kv_heads * TINY.head_dim
    layer = 2 * 32 + 32 * (32 + 2 * kv) + 32 * 32 + 3 * 32 * 48
    assert sum(p.numel() for p in step.model.parameters()) == 37 * 32 + 2 * layer + 32
    step.tokens.fill_(3)  # the rows of other tokens have a gradient from the head alone
    gradients = loss_and_gradients(step)["embed_tokens.weight"].abs().amax(dim=1)
    assert (gradients > 0).all()


def test_initial_weights(make_step):
    model = make_step(impl="torch", hidden_dim=128, num_heads=8, num_layers=8).model
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert (p == 1).all(), name
        else:
            wanted = 0.02 / 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            assert p.std().item() == pytest.approx(wanted, rel=0.1), name


@pytest.mark.parametrize(
    "operations", [None, llama.OPERATIONS["torch"], TRITON_PARTS], ids=["default", "torch", "parts"]
)
def test_modules_work_by_themselves(device, operations):
    with torch.device(device):
        torch.manual_seed(0)
        x = torch.randn(2, 17, 32)
        cos, sin = llama.rope_tables(17, TINY.head_dim, x.device)
        norm = llama.TritonRMSNorm(32, operations=operations)
        attention, swiglu = llama.TritonAttention(TINY, operations), llama.TritonSwiGLU(TINY, operations)
        block, model = llama.TransformerBlock(TINY, operations), llama.TinyLlamaTriton(TINY, operations)

    def torch_attention(module, x):
        return llama.torch_attention(x, module.qkv_proj.weight, module.o_proj.weight, cos, sin, 4, 2)

    def torch_swiglu(module, x):
        return llama.torch_swiglu(x, module.gate_up_proj.weight, module.down_proj.weight)

    def torch_block(x, branch):
        residual = x + branch
        y = torch.nn.functional.rms_norm(residual, (32,), eps=1e-5)
        residual = residual + torch_attention(block.attention, y)
        return residual, torch_swiglu(block.feed_forward, torch.nn.functional.rms_norm(residual, (32,), eps=1e-5))

    def assert_close(actual, expected):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)

    assert_close(norm(x), torch.nn.functional.rms_norm(x, (32,), eps=1e-5))
    assert_close(attention(x, cos, sin), torch_attention(attention, x))
    assert_close(swiglu(x), torch_swiglu(swiglu, x))
    branch = x.flip(0)
    outputs = block(x, branch, cos, sin)
    assert_close(outputs, torch_block(x, branch))
    assert_close(block(x, None, cos, sin), torch_block(x, torch.zeros_like(x)))
    tokens = torch.arange(34, device=device).view(2, 17)
    assert model(tokens).shape == (2, 17, 37)

    (outputs[0] * outputs[1]).sum().backward()
    actual = [p.grad for p in block.parameters()]
    block.zero_grad(set_to_none=True)
    residual, y = torch_block(x, branch)
    (residual * y).sum().backward()
    for (name, p), a in zip(block.named_parameters(), actual, strict=True):
        assert a is not None and a.any(), name
        if not name.endswith("norm.weight"):  # torch_block takes the norms' weights, which are 1, as given
            torch.testing.assert_close(a, p.grad, rtol=1e-3, atol=1e-4)


def test_model_tflops_by_hand():
    config = llama.Config(
        hidden_dim=8, num_layers=3, num_heads=2, num_kv_heads=1, ffn_dim=10, vocab_size=6, batch_size=2, seq_len=5
    )
    # A layer: qkv 8 x 16, o 8 x 8, gate and up 8 x 20, down 10 x 8 = 432 weights; the head has 8 x 6; 6 FLOP each.
    # Attention, a token and layer: 2 products of 2 * 8 * 5 FLOP, three times with backward, half of it masked = 240.
    assert llama.model_tflops(config) * 1e12 == pytest.approx(10 * (6 * (3 * 432 + 48) + 3 * 240))


def test_model_tflops_against_what_torch_counts(make_step):
    step = make_step(impl="torch")
    with FlopCounterMode(display=False) as counter:
        step.forward()
        step.backward()
    masked = 6 * TINY.num_layers * TINY.hidden_dim * TINY.seq_len * TINY.tokens_per_step  # torch computes it as well
    assert llama.model_tflops(TINY) * 1e12 == pytest.approx(counter.get_total_flops() - masked)


# --- the data


@pytest.mark.parametrize("kind", ["random", "markov"])
def test_batches_are_reproducible(kind):
    def batches(seed):
        data = llama.DATA[kind](dataclasses.replace(TINY, seed=seed))
        return [data.next_batch() for _ in range(2)]

    (tokens, targets), (later_tokens, _) = batches(1)
    assert tokens.shape == targets.shape == (2, 17) and tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert 0 <= tokens.min() and tokens.max() < TINY.vocab_size
    again = batches(1)
    assert torch.equal(tokens, again[0][0]) and torch.equal(targets, again[0][1])
    assert torch.equal(later_tokens, again[1][0])
    assert not torch.equal(tokens, later_tokens)
    assert not torch.equal(tokens, batches(2)[0][0])


def test_random_tokens_are_uniform_and_independent():
    data = llama.RandomTokens(dataclasses.replace(TINY, vocab_size=5, batch_size=50, seq_len=2000))
    pairs = torch.bincount(torch.stack(data.next_batch()).mul(torch.tensor([5, 1])[:, None, None]).sum(0).flatten())
    assert pairs.shape == (25,)
    torch.testing.assert_close(pairs / pairs.sum(), torch.full((25,), 1 / 25), rtol=0, atol=0.003)
    assert data.entropy == pytest.approx(math.log(5))


@pytest.mark.parametrize("vocab_size", [4, 11])
def test_markov_chain_is_what_it_claims(vocab_size):
    data = llama.MarkovTokens(dataclasses.replace(TINY, vocab_size=vocab_size, batch_size=100, seq_len=2000))
    tokens, targets = (t.flatten() for t in data.next_batch())
    counts = torch.zeros(vocab_size, vocab_size).index_put_((tokens, targets), torch.tensor(1.0), accumulate=True)
    transitions = counts / counts.sum(dim=1, keepdim=True)
    claimed = torch.tensor([0.5, 0.25, 0.125, 0.125]).expand(vocab_size, 4)
    torch.testing.assert_close(transitions.sort(descending=True).values[:, :4], claimed, rtol=0, atol=0.02)
    frequencies = counts.sum(dim=1) / counts.sum()
    torch.testing.assert_close(frequencies, torch.full((vocab_size,), 1 / vocab_size), rtol=0, atol=0.01)
    entropy = (frequencies * torch.special.entr(transitions).sum(dim=1)).sum().item()
    assert data.entropy == pytest.approx(entropy, abs=0.01) and data.entropy == pytest.approx(1.75 * math.log(2))


def test_model_learns_the_chain_and_stays_above_its_entropy():
    run = dict(data="markov", vocab_size=12, batch_size=8, seq_len=32, num_steps=200, learning_rate=1e-2)
    _, losses = train("cpu", impl="torch", **run)
    final = sum(losses[-20:]) / 20
    entropy = 1.75 * math.log(2)
    assert losses[0] == pytest.approx(math.log(12), abs=0.1)
    assert entropy - 0.03 < final < entropy + 0.1  # 0.03 is four standard deviations of the mean of 20 x 256 tokens


# --- the check


@needs_triton
@pytest.mark.parametrize("changes", [{}, dict(num_kv_heads=4), dict(num_kv_heads=1, seq_len=1)], ids=str)
def test_check_passes(device, capsys, changes):
    assert llama.check_gradients(dataclasses.replace(TINY, **changes), llama.get_device(device))
    assert "passed" in capsys.readouterr().out


@needs_triton
@pytest.mark.parametrize(
    "kernel, output",
    [
        ("rmsnorm_kernel", "y_ptr"),
        ("rmsnorm_backward_kernel", "x_grad_ptr"),
        ("column_sum_kernel", "sum_ptr"),
        ("rope_kernel", "x_ptr"),
        ("flash_attention_kernel", "o_ptr"),
        ("flash_attention_backward_kernel", "v_grad_ptr"),
        ("swiglu_activation_kernel", "hidden_ptr"),
        ("swiglu_activation_backward_kernel", "gate_up_ptr"),
        ("cross_entropy_kernel", "loss_ptr"),
        ("cross_entropy_kernel", "logits_ptr"),
        ("embedding_backward_kernel", "weight_grad_ptr"),
    ],
)
def test_check_sees_a_kernel_that_is_wrong_by_a_thousandth(device, monkeypatch, capsys, kernel, output):
    target = getattr(llama, kernel)
    position = list(inspect.signature(target.fn).parameters).index(output)
    launch = llama.launch

    def sabotaged(kernel, grid, tensors, *args, **kwargs):
        launch(kernel, grid, tensors, *args, **kwargs)
        if kernel is target:
            tensors[position].data.mul_(1.001)

    monkeypatch.setattr(llama, "launch", sabotaged)
    assert not llama.check_gradients(TINIER, llama.get_device(device))
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("operation", ["rmsnorm", "attention", "swiglu", "cross_entropy"])
def test_check_sees_a_wrong_operation(device, monkeypatch, operation):
    correct = llama.OPERATIONS["sdpa"]

    def scaled(*args):
        y = getattr(correct, operation)(*args)
        return (1.001 * y[0], *y[1:]) if isinstance(y, tuple) else 1.001 * y

    config, hardware = dataclasses.replace(TINIER, impl="sdpa"), llama.get_device(device)
    assert llama.check_gradients(config, hardware)
    monkeypatch.setitem(llama.OPERATIONS, "sdpa", correct._replace(**{operation: scaled}))
    assert not llama.check_gradients(config, hardware)


@needs_triton
def test_check_sees_severed_autograd(device, capsys):
    assert not llama.check_gradients(dataclasses.replace(TINIER, severed_autograd=True), llama.get_device(device))
    assert "layers.0.attention.qkv_proj.weight: no gradient" in capsys.readouterr().out


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("use_amp", [False, True])
@pytest.mark.parametrize("timing", ["phases", "step"], ids=["three graphs", "one graph"])
def test_graphs_give_the_same_bits(use_amp, timing):
    run = dict(use_amp=use_amp, timing=timing, num_steps=5, warmup_steps=2, learning_rate=1e-2)
    eager, eager_losses = train("cuda", **run)
    captured, captured_losses = train("cuda", graph=True, **run)
    graphs = [name for name, method in vars(captured).items() if getattr(method, "__name__", "") == "replay"]
    assert graphs == (["forward", "backward", "optimizer_step"] if timing == "phases" else ["run"])
    assert len(set(eager_losses)) == 5  # they are losses of different batches
    assert eager_losses == captured_losses
    assert all(map(torch.equal, eager.optimizer.weights(), captured.optimizer.weights()))


@pytest.mark.gpu
@pytest.mark.parametrize("use_amp", [False, True])
def test_graphs_read_the_learning_rate_from_the_device(make_step, use_amp):
    step = make_step(use_amp=use_amp)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step.run()
    torch.cuda.synchronize()
    step.capture()

    def movement(lr):
        step.optimizer.lr.fill_(lr)
        before = [w.clone() for w in step.optimizer.weights()]
        step.run()
        return sum((w - b).abs().sum() for w, b in zip(step.optimizer.weights(), before, strict=True)).item()

    assert movement(0.0) == 0
    assert movement(1e-2) == pytest.approx(10 * movement(1e-3), rel=0.5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "head_dim, group, seq_len",
    [
        (40, 1, 1), (80, 2, 17), (96, 4, 129), (64, 8, 300), (16, 8, 129), (128, 2, 300), (40, 8, 300), (96, 1, 17)
    ],
)  # fmt: skip
def test_bf16_check_passes(head_dim, group, seq_len):
    config = dataclasses.replace(
        TINY, hidden_dim=8 * head_dim, num_heads=8, num_kv_heads=8 // group, ffn_dim=200, seq_len=seq_len, use_amp=True
    )
    assert llama.check_gradients(config, llama.get_device("cuda"))


@pytest.mark.gpu
def test_memory_of_attention_grows_linearly(device):
    def peak_growth(seq_len):
        x = torch.randn(1, seq_len, 128, device=device, requires_grad=True)
        weights = [torch.randn(n, 128, device=device) * 0.1 for n in (256, 128)]
        tables = llama.rope_tables(seq_len, 64, device)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        llama.triton_attention(x, *weights, *tables, 2, 1).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    peak_growth(2048)  # the library's workspace
    assert peak_growth(16384) < 5 * peak_growth(4096)  # a score matrix would make it 16 times as much


# --- the clock and the check's rule, without a GPU


@pytest.fixture
def gpu(monkeypatch):
    """A fake GPU: log has what was asked of it in order, and what costs time moves the clock by seconds."""
    seconds = {"load": 1, "forward": 2, "backward": 4, "optimizer": 8, "sync": 16}
    gpu = SimpleNamespace(log=[], now=0, device=llama.Device("cuda", "a GPU", "sm_90", num_sms=132, warp_size=32))

    def does(entry):
        def act(*args, **kwargs):
            gpu.log.append(" ".join([entry, *map(str, kwargs.values())]))
            gpu.now += seconds.get(entry, 0)

        return act

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing

        def record(self):
            gpu.log.append("mark")
            self.time = gpu.now

        def elapsed_time(self, end):
            assert gpu.log[-1] in ("sync", "elapsed")  # an event that has not come by has no time
            gpu.log.append("elapsed")
            return 1e3 * (end.time - self.time)

    @contextlib.contextmanager
    def stream(stream):
        gpu.log.append("side stream")
        yield
        gpu.log.append("main stream")

    for name, value in {
        "Event": Event, "synchronize": does("sync"), "stream": stream, "Stream": object,
        "empty_cache": does("empty cache"), "reset_peak_memory_stats": does("reset peak"),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(llama, "time", SimpleNamespace(perf_counter=lambda: gpu.now))
    model = torch.nn.Linear(1, 1)
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    gpu.step = SimpleNamespace(
        model=model, tokens=torch.zeros(1), loss=torch.tensor(1.0), named_range=lambda name: contextlib.nullcontext(),
        forward=does("forward"), backward=does("backward"), optimizer_step=does("optimizer"),
        load=does("load"), restart=does("restart"), capture=does("capture"),
    )  # fmt: skip
    gpu.step.run = lambda: llama.TrainStep.run(gpu.step)
    return gpu


STEP = ["forward", "backward", "optimizer"]


def run_on(gpu, **changes):
    config, records = dataclasses.replace(TINY, num_steps=2, **changes), []
    llama.train(gpu.step, llama.RandomTokens(config), config, gpu.device, records)
    return records


def test_phases_are_timed_between_synchronizations(gpu):
    records = run_on(gpu)
    marked = ["mark", "forward", "mark", "backward", "mark", "optimizer", "mark"]
    assert gpu.log == 2 * ["load", "sync", *marked, "sync", *3 * ["elapsed"]]
    for record in records:
        assert record.phase_ms == {"forward": 2000, "backward": 4000, "optimizer": 8000}
        assert record.batch_ms == record.host_ms == 14000  # neither the data nor the sync
        assert record.grad_norm == pytest.approx(18**0.5)


def test_unsynced_timing_leaves_out_what_runs_behind_the_host(gpu):
    records = run_on(gpu, unsynced_timing=True)
    assert gpu.log == 2 * ["load", "sync", *STEP, "sync"]
    assert [(record.batch_ms, sum(record.phase_ms.values())) for record in records] == 2 * [(30000, 14000)]


def test_window_is_timed_between_two_synchronizations(gpu):
    records = run_on(gpu, timing="step")
    assert gpu.log == ["sync", "mark", *2 * ["load", *STEP, "mark"], "sync", "elapsed", "elapsed"]
    assert [(record.batch_ms, record.host_ms, record.phase_ms) for record in records] == 2 * [(15000, 15000, {})]


@pytest.mark.parametrize("timing", ["phases", "step"])
@pytest.mark.parametrize("graph", [False, True])
def test_warm_up_ends_before_the_clock_starts(gpu, capsys, graph, timing):
    config = dataclasses.replace(TINY, warmup_steps=2, graph=graph, timing=timing)
    steps = 2 * ["load", *STEP, "sync"]
    if graph:
        steps = ["side stream", *steps, "main stream"]
    capture = [f"capture {timing == 'step'}"] * graph
    seconds = llama.warm_up(gpu.step, config, gpu.device)
    assert gpu.log == [*steps, "restart", "empty cache", "reset peak", *capture, "sync"]
    assert seconds == 2 * 31 + 16 and "warm-up 2/2 | 62.0 s" in capsys.readouterr().out


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("which", ["loss", "weight"])
@pytest.mark.parametrize(
    "precision, changes, rounding",
    [("fp32", {}, 1e-5), ("tf32", dict(matmul_precision="high"), 2e-3), ("bf16", dict(use_amp=True), 1e-2)],
)
def test_check_allows_twice_the_error_of_plain_pytorch_and_a_rounding(
    monkeypatch, capsys, gpu, precision, changes, rounding, which, over
):
    plain_error = 0.3 * rounding
    allowed = 2 * plain_error + rounding
    errors = {"exact": 0, "plain": plain_error, "ours": allowed * (1.02 if over else 0.98)}
    asked = []

    def loss_and_gradients(config, device, batch, double=False):
        kind = ("exact", "plain", "ours")[len(asked)]
        asked.append((kind, config.impl, config.use_amp, double, torch.get_float32_matmul_precision()))
        assert config.batch_size == len(batch[0]) == 2 and not config.compile and not config.graph
        exact = {"loss": torch.tensor(5.0).double(), "weight": torch.tensor([3.0, 4.0]).double()}
        values = exact | {which: exact[which] * (1 + errors[kind])}
        return values

    monkeypatch.setattr(llama, "loss_and_gradients", loss_and_gradients)
    config = dataclasses.replace(TINY, batch_size=7, compile=True, **changes)
    try:
        assert llama.check_gradients(config, gpu.device) != over
    finally:
        torch.set_float32_matmul_precision("highest")
    amp = precision == "bf16"
    assert asked == [
        ("exact", "torch", False, not amp, "highest"),
        ("plain", "torch", amp, False, config.matmul_precision),
        ("ours", "triton", amp, False, config.matmul_precision),
    ]
    out = capsys.readouterr().out
    assert f"worst, {which}: error {errors['ours']:.1e}, allowed {allowed:.1e}" in out
    assert ("FAILED in 1 of 2" in out) == over and (f"    {which}: " in out) == over


def test_check_fails_where_there_is_no_gradient_or_no_number(monkeypatch, gpu):
    for spoilt in (None, torch.full((2,), math.nan)):
        calls = []

        def loss_and_gradients(*args, spoilt=spoilt, calls=calls, **kwargs):
            calls.append(args)
            return {"loss": torch.tensor(1.0), "weight": spoilt if len(calls) == 3 else torch.ones(2)}

        monkeypatch.setattr(llama, "loss_and_gradients", loss_and_gradients)
        assert not llama.check_gradients(TINY, gpu.device)
