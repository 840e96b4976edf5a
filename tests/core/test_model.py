"""The model as a whole: the implementations agree, it learns what can be learnt, and the check sees what is wrong."""

import contextlib
import dataclasses
import inspect
import itertools
import math
from types import SimpleNamespace

import pytest
import torch

import tiny_llama_v3 as llama
from tests.core.tiny import TINY, run_of

needs_triton = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")
IMPLEMENTATIONS = [pytest.param("triton", marks=needs_triton), "torch", "sdpa"]

TINIER = dataclasses.replace(TINY, hidden_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=24, seq_len=8)


def train(device, config=TINY, **changes):
    """(step, losses) of a whole run."""
    step, records = run_of(dataclasses.replace(config, **changes), device)
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
def test_training_follows_the_same_curve(make_step):
    curves = []
    for impl in ("triton", "torch"):
        step = make_step(TINIER, impl=impl, learning_rate=1e-2)
        batches = list(itertools.islice(step.batches(1), 2))
        losses = []
        for batch in batches * 4:
            step.load(*batch)
            step.run()
            losses.append(step.loss.detach().cpu())
        curves.append(torch.stack(losses))
    torch.testing.assert_close(*curves, rtol=3e-5, atol=0)
    assert curves[1][-1] < curves[1][0] - 0.2  # the curve is not a flat line


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_every_parameter_receives_a_gradient_and_moves(make_step, impl):
    step = make_step(impl=impl, learning_rate=1e-3)
    step.run()
    for (name, p), before in zip(step.model.named_parameters(), step.initial_weights, strict=True):
        assert p.grad.any(), name
        moved = (p.detach().cpu() - before).abs().mean().item()
        assert moved == pytest.approx(1e-3, rel=0.1), name  # AdamW's first step moves each weight by about lr


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
def test_logits_depend_on_the_tokens_up_to_theirs(make_step, impl):
    step = make_step(impl=impl)
    for first, last, least in ((9, 16, 1e-3), (0, 0, 0)):  # changed, each in turn; what comes after them looks back
        changed = step.tokens.clone()
        changed[:, first : last + 1] = (changed[:, first : last + 1] + 1) % TINY.vocab_size
        with torch.no_grad():
            change = (step.model(step.tokens) - step.model(changed)).abs().amax(-1)
        assert (change[:, :first] <= 1e-6).all() and (change[:, first:] > least).all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_head_is_tied_to_the_embedding(make_step, impl):
    step = make_step(impl=impl)
    step.tokens.fill_(3)  # the rows of other tokens have a gradient from the head alone
    gradients = loss_and_gradients(step)["embed_tokens.weight"].abs().amax(dim=1)
    assert (gradients > 0).all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_another_head_rotary_embedding_and_norm(make_step, impl):
    step = make_step(impl=impl, untied_head=True, rope_theta=50.0, norm_eps=0.1)
    verdict, _ = llama.check_batch(step.config, step.device, (step.tokens, step.targets))
    assert not verdict.failed and "lm_head.weight" in verdict.errors
    default, angles = (
        make_step(impl=impl, untied_head=True).model,
        torch.arange(17.0).outer(50.0 ** -torch.arange(0, 1, 0.25)),
    )
    with torch.no_grad():
        for parameter in (*default.parameters(), *step.model.parameters()):
            parameter.mul_(10)  # so that positions matter
        logits = step.model(step.tokens)
        default.cos.copy_(angles.cos()), default.sin.copy_(angles.sin())
        assert (default(step.tokens) - logits).abs().max() > 0.01  # by eps
        for norm in [module for module in default.modules() if isinstance(module, llama.TritonRMSNorm)]:
            norm.eps = 0.1
        torch.testing.assert_close(default(step.tokens), logits, rtol=1e-4, atol=1e-4)
    step.tokens.fill_(3)
    gradients = loss_and_gradients(step)
    assert gradients["embed_tokens.weight"].any(dim=1).nonzero().tolist() == [[3]]
    assert gradients["lm_head.weight"].any(dim=1).all()


def test_initial_weights(make_step):
    model = make_step(impl="torch", hidden_dim=128, num_heads=8, num_layers=8).model
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert (p == 1).all(), name
        else:
            wanted = 0.02 / 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            assert p.std().item() == pytest.approx(wanted, rel=0.1), name


@pytest.mark.parametrize("operations", [None, llama.OPERATIONS["torch"]], ids=["default", "torch"])
def test_modules_work_by_themselves(device, operations):
    torch.manual_seed(0)
    with torch.device(device):
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


# --- the data


@pytest.mark.parametrize("kind", ["random", "markov"])
def test_batches_are_reproducible(kind):
    def batches(seed):
        data = llama.batches(dataclasses.replace(TINY, data=kind, seed=seed))
        return list(itertools.islice(data, 2))

    (tokens, targets), (later_tokens, _) = batches(1)
    assert tokens.shape == targets.shape == (2, 17) and tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert 0 <= tokens.min() and tokens.max() < TINY.vocab_size
    again = batches(1)
    assert torch.equal(tokens, again[0][0]) and torch.equal(targets, again[0][1])
    assert torch.equal(later_tokens, again[1][0])
    assert not torch.equal(tokens, later_tokens)
    assert not torch.equal(tokens, batches(2)[0][0])


def test_the_largest_seed_has_a_warm_up(make_step):
    llama.warm_up(make_step(num_layers=1, seed=2**32 - 1, warmup_steps=1))


def test_random_tokens_are_uniform_and_independent():
    config = dataclasses.replace(TINY, vocab_size=5, batch_size=50, seq_len=2000)
    batch = torch.stack(next(llama.random_tokens(config)))
    pairs = torch.bincount(batch.mul(torch.tensor([5, 1])[:, None, None]).sum(0).flatten())
    assert pairs.shape == (25,)
    torch.testing.assert_close(pairs / pairs.sum(), torch.full((25,), 1 / 25), rtol=0, atol=0.003)
    assert llama.entropy(config) == pytest.approx(math.log(5))


@pytest.mark.parametrize("vocab_size", [4, 11])
def test_markov_chain_is_what_it_claims(vocab_size):
    config = dataclasses.replace(TINY, data="markov", vocab_size=vocab_size, batch_size=100, seq_len=2000)
    tokens, targets = (t.flatten() for t in next(llama.batches(config)))
    counts = torch.zeros(vocab_size, vocab_size).index_put_((tokens, targets), torch.tensor(1.0), accumulate=True)
    transitions = counts / counts.sum(dim=1, keepdim=True)
    claimed = torch.tensor([0.5, 0.25, 0.125, 0.125]).expand(vocab_size, 4)
    torch.testing.assert_close(transitions.sort(descending=True).values[:, :4], claimed, rtol=0, atol=0.02)
    frequencies = counts.sum(dim=1) / counts.sum()
    torch.testing.assert_close(frequencies, torch.full((vocab_size,), 1 / vocab_size), rtol=0, atol=0.01)
    entropy = (frequencies * torch.special.entr(transitions).sum(dim=1)).sum().item()
    assert llama.entropy(config) == pytest.approx(entropy, abs=0.01)
    assert llama.entropy(config) == pytest.approx(1.75 * math.log(2))


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
    assert llama.TrainStep.check(dataclasses.replace(TINY, **changes), llama.get_device(device))
    assert "passed" in capsys.readouterr().out


@needs_triton
@pytest.mark.parametrize("kernel, output", [
    ("rmsnorm_kernel", "y_ptr"), ("rmsnorm_backward_kernel", "x_grad_ptr"), ("column_sum_kernel", "sum_ptr"),
    ("rope_kernel", "x_ptr"), ("flash_attention_kernel", "o_ptr"), ("flash_attention_backward_kernel", "v_grad_ptr"),
    ("swiglu_activation_kernel", "hidden_ptr"), ("swiglu_activation_backward_kernel", "gate_up_ptr"),
    ("cross_entropy_kernel", "loss_ptr"), ("cross_entropy_kernel", "logits_ptr"),
    ("embedding_backward_kernel", "weight_grad_ptr"),
])  # fmt: skip
def test_check_sees_a_kernel_that_is_wrong_by_a_thousandth(device, monkeypatch, capsys, kernel, output):
    target = getattr(llama, kernel)
    position = list(inspect.signature(target.fn).parameters).index(output)
    launch = llama.launch

    def sabotaged(kernel, grid, tensors, *args, **kwargs):
        launch(kernel, grid, tensors, *args, **kwargs)
        if kernel is target:
            tensors[position].data.mul_(1.001)

    monkeypatch.setattr(llama, "launch", sabotaged)
    assert not llama.TrainStep.check(TINIER, llama.get_device(device))
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("operation", ["rmsnorm", "attention", "swiglu", "cross_entropy"])
def test_check_sees_a_wrong_operation(device, monkeypatch, operation):
    correct = llama.OPERATIONS["sdpa"]

    def scaled(*args):
        y = getattr(correct, operation)(*args)
        return (1.001 * y[0], *y[1:]) if isinstance(y, tuple) else 1.001 * y

    config, hardware = dataclasses.replace(TINIER, impl="sdpa"), llama.get_device(device)
    assert llama.TrainStep.check(config, hardware)
    monkeypatch.setitem(llama.OPERATIONS, "sdpa", correct._replace(**{operation: scaled}))
    assert not llama.TrainStep.check(config, hardware)


@needs_triton
def test_check_sees_severed_autograd(device, capsys):
    assert not llama.TrainStep.check(dataclasses.replace(TINIER, severed_autograd=True), llama.get_device(device))
    assert "layers.0.attention.qkv_proj.weight: no gradient" in capsys.readouterr().out


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("use_amp", [False, True])
@pytest.mark.parametrize("timing", ["phases", "step"], ids=["three graphs", "one graph"])
def test_graphs_give_the_same_bits(use_amp, timing):
    run = dict(use_amp=use_amp, timing=timing, num_steps=5, warmup_steps=2, learning_rate=1e-2)
    eager, eager_losses = train("cuda", **run)
    captured, captured_losses = train("cuda", graph=True, **run)
    assert list(captured.phases) == (["forward", "backward", "optimizer"] if timing == "phases" else ["step"])
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
@pytest.mark.parametrize("head_dim, group, seq_len", [
    (40, 1, 1), (80, 2, 17), (96, 4, 129), (64, 8, 300), (16, 8, 129), (128, 2, 300), (40, 8, 300), (96, 1, 17),
])  # fmt: skip
def test_bf16_check_passes(head_dim, group, seq_len):
    sizes = dict(hidden_dim=8 * head_dim, num_heads=8, num_kv_heads=8 // group, ffn_dim=200, seq_len=seq_len)
    config = dataclasses.replace(TINY, **sizes, use_amp=True)
    assert llama.TrainStep.check(config, llama.get_device("cuda"))


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
    gpu.step = llama.TrainStep.__new__(llama.TrainStep)  # which has yet to get its config
    gpu.step.device, gpu.step.tokens, gpu.step.loss = gpu.device, torch.zeros(1), torch.tensor(1.0)
    gpu.step.model = torch.nn.Linear(1, 1)
    for p in gpu.step.model.parameters():
        p.grad = torch.full_like(p, 3.0)
    for method in ("load", "forward", "backward", "optimizer_step", "restart", "capture"):
        setattr(gpu.step, method, does(method.removesuffix("_step")))
    gpu.step.phases = gpu.step.eager_phases()
    return gpu


STEP = ["forward", "backward", "optimizer"]


def run_on(gpu, **changes):
    gpu.step.config, records = dataclasses.replace(TINY, num_steps=2, **changes), []
    llama.train(gpu.step, gpu.step.batches(1), records)
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
    assert [(record.batch_ms, record.host_ms, record.phase_ms) for record in records] == 2 * [(15000, 14000, {})]


@pytest.mark.parametrize("timing", ["phases", "step"])
def test_a_loss_is_kept_before_the_next_step_overwrites_it(gpu, timing):
    """As a replayed graph does, which writes each loss into the same memory."""
    gpu.step.phases = {"forward": lambda: (gpu.step.forward(), gpu.step.loss.add_(1.0))}
    assert [record.loss for record in run_on(gpu, timing=timing)] == [2.0, 3.0]


@pytest.mark.parametrize("timing", ["phases", "step"])
@pytest.mark.parametrize("graph", [False, True])
def test_warm_up_ends_before_the_clock_starts(gpu, capsys, graph, timing):
    gpu.step.config = dataclasses.replace(TINY, warmup_steps=2, graph=graph, timing=timing)
    steps = 2 * ["load", *STEP, "sync"]
    if graph:
        steps = ["side stream", *steps, "main stream"]
    capture = [f"capture {timing == 'step'}"] * graph
    seconds = llama.warm_up(gpu.step)
    assert gpu.log == ["sync", *steps, "restart", "empty cache", "reset peak", *capture, "sync"]
    assert seconds == 16 + 2 * 31 + 16 and "warm-up 2/2 | 78.0 s" in capsys.readouterr().out


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("which", ["loss", "weight"])
@pytest.mark.parametrize("precision, changes, rounding", [
    ("fp32", {}, 1e-5), ("tf32", dict(matmul_precision="high"), 2e-3), ("bf16", dict(use_amp=True), 1e-2),
])  # fmt: skip
def test_check_allows_twice_the_error_of_plain_pytorch_and_a_rounding(
    monkeypatch, capsys, gpu, precision, changes, rounding, which, over
):
    plain_error = 0.3 * rounding
    allowed = 2 * plain_error + rounding
    errors = {"exact": 0, "plain": plain_error, "ours": allowed * (1.02 if over else 0.98)}
    asked = []

    def loss_and_gradients(config, device, batch, double=False):
        kind = ("exact", "ours", "plain")[len(asked)]
        asked.append((kind, config.impl, config.use_amp, double, torch.get_float32_matmul_precision()))
        exact = {"loss": torch.tensor(5.0).double(), "weight": torch.tensor([3.0, 4.0]).double()}
        return exact | {which: exact[which] * (1 + errors[kind])}

    monkeypatch.setattr(llama, "loss_and_gradients", loss_and_gradients)
    config = dataclasses.replace(TINY, **changes)
    assert llama.TrainStep.check(config, gpu.device) != over
    amp = precision == "bf16"
    assert asked == [
        ("exact", "torch", False, not amp, "highest"),
        ("ours", "triton", amp, False, config.matmul_precision),
        ("plain", "torch", amp, False, config.matmul_precision),
    ]
    out = capsys.readouterr().out
    assert f"worst, {which}: error {errors['ours']:.1e}, allowed {allowed:.1e}" in out
    assert ("FAILED in 1 of 2" in out) == over and (f"    {which}: " in out) == over


def test_a_run_checks_two_sequences_and_ends_if_that_fails(monkeypatch, gpu, tmp_path):
    checked = []

    class Step(llama.TrainStep):
        select_device = classmethod(lambda cls, config: gpu.device)
        check = classmethod(lambda cls, *what: checked.append(what))  # None: it fails

        def __init__(self, config, device):
            raise AssertionError("the run goes on")

    config = dataclasses.replace(TINY, batch_size=7, compile=True, graph=True, warmup_steps=1, check=True)
    assert llama.train_and_report(dataclasses.replace(config, output_dir=str(tmp_path / "new")), Step) == 1
    ((small, device),) = checked
    assert device == gpu.device and not any(tmp_path.iterdir())
    assert (small.batch_size, small.compile, small.graph, small.seq_len) == (2, False, False, TINY.seq_len)


def test_check_fails_where_there_is_no_gradient_or_no_number(monkeypatch, gpu):
    for spoilt in (None, torch.full((2,), math.nan)):
        calls = []

        def loss_and_gradients(*args, spoilt=spoilt, calls=calls, **kwargs):
            calls.append(args)  # exact, ours and plain, in turn
            return {"loss": torch.tensor(1.0), "weight": spoilt if len(calls) == 2 else torch.ones(2)}

        monkeypatch.setattr(llama, "loss_and_gradients", loss_and_gradients)
        assert not llama.TrainStep.check(TINY, gpu.device)
