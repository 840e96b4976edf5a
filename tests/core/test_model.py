"""The model as a whole: the implementations agree, it learns what can be learnt, and the check sees what is wrong."""

import contextlib
import dataclasses
import inspect
import itertools
import json
import math
import pickle
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import tiny_llama_v3 as llama
from tests.core.tiny import SMALL, TINY, run_of

needs_triton = pytest.mark.triton
IMPLEMENTATIONS = [pytest.param("triton", marks=needs_triton), "torch", "sdpa"]

TINIER = dataclasses.replace(SMALL, num_layers=1, vocab_size=37, batch_size=2, seq_len=8)


STEP = ["forward", "backward", "optimizer"]


def train(device, config=TINY, **changes):
    """(step, losses) of a whole run."""
    step, records = run_of(dataclasses.replace(config, **changes), device)
    return step, [record.loss for record in records]


# --- the model
# Written twice: here once more, in float64 and from other functions, so that a wrong wire shows in every gradient.


def llama_again(model, config, tokens):
    """The logits, from PyTorch's functions alone, and in the order of a textbook."""
    positions = torch.arange(tokens.shape[1], dtype=torch.float64, device=tokens.device)
    dims = torch.arange(0, config.head_dim, 2, device=tokens.device)
    angles = positions.outer(config.rope_theta ** (-dims / config.head_dim))
    heads, kv_heads = config.num_heads, config.num_kv_heads

    def norm(x, module):
        return F.rms_norm(x, x.shape[-1:], module.weight, config.norm_eps)

    def rotated(x):  # (batch, seq, heads, head_dim)
        first, second = x.chunk(2, dim=-1)
        turn = torch.polar(torch.ones_like(angles), angles)
        turned = torch.complex(first, second) * turn[:, None]
        return torch.cat((turned.real, turned.imag), dim=-1)

    def multiplied(x, module):
        return F.linear(x, module.weight)

    x = F.embedding(tokens, model.embed_tokens.weight)
    for layer in model.layers:
        qkv = multiplied(norm(x, layer.attention_norm), layer.attention.qkv_proj)
        qkv = qkv.unflatten(-1, (-1, config.head_dim))
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
        q, k, v = (t.transpose(1, 2) for t in (rotated(q), rotated(k), v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        o = o.transpose(1, 2).flatten(2)
        x = x + multiplied(o, layer.attention.o_proj)
        gate_up = multiplied(norm(x, layer.ffn_norm), layer.feed_forward.gate_up_proj)
        gate, up = gate_up.chunk(2, dim=-1)
        x = x + multiplied(F.silu(gate) * up, layer.feed_forward.down_proj)
    return multiplied(norm(x, model.norm), model.lm_head if config.untied_head else model.embed_tokens)


OTHER = dict(untied_head=True, rope_theta=50.0, norm_eps=0.1, num_kv_heads=4)


@pytest.mark.parametrize("changes", [{}, OTHER], ids=["default", "other"])
@pytest.mark.parametrize("impl", [*IMPLEMENTATIONS, None])
def test_logits_loss_and_gradients(make_step, device, impl, changes):
    """In fp32 as in float64. Without an implementation, the model is built by itself."""
    step = make_step(impl=impl or "torch", **changes)
    config, targets = step.config, step.targets
    model = step.model if impl else llama.TinyLlamaTriton(config).to(device)
    assert model.operations is llama.OPERATIONS[impl or ("triton" if llama.triton else "torch")]
    exact = llama.TinyLlamaTriton(config, llama.OPERATIONS["torch"]).to(device)
    with torch.no_grad():
        for p in exact.parameters():
            # So large that positions and eps matter, and no norm's weight is 1.
            p.mul_(10) if p.dim() == 2 else p.uniform_(0.5, 1.5)
    (step if impl else model).load_state_dict(exact.state_dict())
    exact.double()
    expected = llama_again(exact, config, step.tokens)
    with torch.no_grad():
        logits = model(step.tokens)
        short = model(step.tokens[:, :5].contiguous())
    assert_close(logits.double(), expected.detach(), rtol=1e-4, atol=1e-4)
    assert_close(short, logits[:, :5], rtol=1e-4, atol=1e-4)
    expected_loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten())
    loss = model(step.tokens, targets)
    assert_close(loss.detach().double(), expected_loss.detach(), rtol=1e-5, atol=0)
    loss.backward()
    expected_loss.backward()
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        error, norm = (p.grad - q.grad).norm(), q.grad.norm()
        assert norm > 0 and error < 2e-5 * norm, name


WRONG = """
device='gpu'        | --device gpu does not exist: choose one of auto, cuda, cpu
timing='setp'       | --timing setp does not exist: choose one of phases, step
impl='Triton'       | --impl Triton does not exist: choose one of triton, torch, sdpa
matmul_precision='' | --matmul-precision  does not exist: choose one of highest, high
shard='none'        | --shard none does not exist: choose one of optimizer, full
stage=9             | --stage 9 does not exist: choose one of 1, 2, 3, 4, 5, 6, 7, 8
stage=True          | --stage True is of the type bool: give int | None
num_layers=2.0      | --num-layers 2.0 is of the type float: give int
num_heads='4'       | --num-heads '4' is of the type str: give int
seed=True           | --seed True is of the type bool: give int
seq_len=None        | --seq-len None is of the type NoneType: give int
learning_rate='1'   | --learning-rate '1' is of the type str: give float
norm_eps=True       | --norm-eps True is of the type bool: give float
graph='no'          | --graph 'no' is of the type str: give bool
compile=1           | --compile 1 is of the type int: give bool
data=None           | --data None is of the type NoneType: give str
""".strip().splitlines()


@pytest.mark.parametrize("row", WRONG)
def test_a_configuration_has_the_types_and_choices_of_the_command_line(row):
    given, message = map(str.strip, row.split(" | ", 1))
    with pytest.raises(llama.UsageError) as error:
        eval(f"llama.Config({given})")
    assert str(error.value) == message


def test_sizes_that_follow_from_others_are_derived_again():
    """By dataclasses.replace(); what was given stays, also if it is what would be derived."""
    replace = dataclasses.replace
    config = llama.Config()
    sizes = "num_kv_heads ffn_dim vocab_size".split()

    def derived(config):
        return [getattr(config, name) for name in sizes]

    assert derived(config) == [4, 2048, 1000]
    assert derived(replace(config, num_heads=16, hidden_dim=1024, data="a file")) == [8, 4096, 256]
    assert derived(replace(replace(config, seed=7), hidden_dim=64, num_heads=1)) == [1, 256, 1000]
    given = llama.Config(num_kv_heads=4, ffn_dim=2048, vocab_size=1000)
    assert given == config
    assert derived(replace(given, num_heads=16, hidden_dim=1024, data="a file")) == [4, 2048, 1000]
    assert derived(replace(config, num_heads=16, num_kv_heads=4)) == [4, 2048, 1000]
    assert derived(pickle.loads(pickle.dumps(config))) == derived(llama.Config(**dataclasses.asdict(config)))
    assert json.loads(json.dumps(dataclasses.asdict(config)))["ffn_dim"] == 2048


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_large_gradients(dtype):
    """PyTorch's own norm of these on a CPU is too low by a hundredth."""
    model = torch.nn.Linear(2**13, 2**12, dtype=dtype)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1.1)
    exact = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
    assert llama.gradient_norm(model) == pytest.approx(exact, rel=1e-9)


def test_a_norm_by_itself(device):
    """Of numbers so small that the default of eps counts."""
    x = torch.linspace(-1e-3, 1e-3, 64, device=device).view(2, 32)
    expected = F.rms_norm(x, (32,), eps=1e-5)
    assert_close(llama.TritonRMSNorm(32).to(device)(x), expected, rtol=1e-5, atol=1e-6)


def test_initial_weights(make_step):
    model = make_step(impl="torch", hidden_dim=128, num_heads=8, num_layers=8).model
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert (p == 1).all(), name
        else:
            wanted = 0.02 / 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            assert p.std().item() == pytest.approx(wanted, rel=0.1), name
    first, other = (make_step(impl="torch", seed=seed).initial_weights[0] for seed in (1, 2))
    assert not torch.equal(first, other)


# --- the data
# Published losses hold for these tokens, whatever the device.


@pytest.mark.parametrize("kind", ["random", "markov"])
def test_batches_are_reproducible(kind):
    def batches(seed):
        data = llama.batches(dataclasses.replace(TINY, data=kind, seed=seed))
        return torch.stack([torch.stack(batch) for batch in itertools.islice(data, 2)])

    (tokens, targets), (later_tokens, _) = batches(1)
    assert tokens.shape == targets.shape == (2, 17) and tokens.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(batches(1), batches(1))
    assert not torch.equal(tokens, later_tokens) and not torch.equal(batches(1), batches(2))


def test_random_tokens_are_uniform_and_independent():
    config = dataclasses.replace(TINY, vocab_size=5, batch_size=50, seq_len=2000)
    tokens, targets = next(llama.random_tokens(config))
    pairs = torch.bincount((5 * tokens + targets).flatten())
    assert_close(pairs / pairs.sum(), torch.full((25,), 1 / 25), rtol=0, atol=0.003)


def test_model_learns_the_chain_and_stays_above_its_entropy():
    run = dict(data="markov", vocab_size=12, batch_size=8, seq_len=32, num_steps=200, learning_rate=1e-2)
    _, losses = train("cpu", impl="torch", **run)
    final = sum(losses[-20:]) / 20
    entropy = 1.75 * math.log(2)
    assert losses[0] == pytest.approx(math.log(12), abs=0.1)
    assert entropy - 0.03 < final < entropy + 0.1  # 0.03 is four standard deviations of the mean of 20 x 256 tokens


# --- the check
# It is what makes a figure count: it must see a kernel that is wrong by a thousandth, and let rounding pass.


@needs_triton
@pytest.mark.parametrize("changes", [{}, dict(num_kv_heads=4), dict(num_kv_heads=1, seq_len=1)], ids=str)
def test_check_passes(device, changes):
    assert llama.OneProcess().check(dataclasses.replace(TINY, **changes), torch.device(device))


OUTPUTS = """
rmsnorm_kernel.y_ptr rmsnorm_backward_kernel.x_grad_ptr column_sum_kernel.sum_ptr rope_kernel.x_ptr
flash_attention_kernel.o_ptr flash_attention_backward_kernel.v_grad_ptr swiglu_activation_kernel.hidden_ptr
swiglu_activation_backward_kernel.gate_up_ptr cross_entropy_kernel.loss_ptr cross_entropy_kernel.logits_ptr
embedding_backward_kernel.weight_grad_ptr
""".split()


@needs_triton
@pytest.mark.parametrize("output", OUTPUTS)
def test_check_sees_a_kernel_that_is_wrong_by_a_thousandth(device, monkeypatch, output):
    name, argument = output.split(".")
    target = getattr(llama, name)
    position = list(inspect.signature(target.fn).parameters).index(argument)
    launch = llama.launch

    def sabotaged(kernel, grid, tensors, *args, **kwargs):
        launch(kernel, grid, tensors, *args, **kwargs)
        if kernel is target:
            tensors[position].data.mul_(1.001)

    monkeypatch.setattr(llama, "launch", sabotaged)
    assert not llama.OneProcess().check(TINIER, torch.device(device))


@needs_triton
def test_check_sees_severed_autograd(device, capsys):
    assert not llama.OneProcess().check(dataclasses.replace(TINIER, severed_autograd=True), torch.device(device))
    assert "layers.0.attention.qkv_proj.weight: no gradient" in capsys.readouterr().out


@pytest.mark.parametrize("graph", [False, True])
def test_a_captured_step_converts_its_weights_each_time(graph):
    """What autocast had converted once would be the weights of the first step in every replay."""
    step = llama.TrainStep(dataclasses.replace(TINIER, impl="torch", use_amp=True, graph=graph), "cpu")
    model, keeps = step.run_model, []

    def run_model(*inputs):
        keeps.append(torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled())
        return model(*inputs)

    step.run_model = run_model
    step.run()
    assert keeps == [not graph]


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_capture_has_the_mode_of_its_world(monkeypatch, mode):
    """With NCCL, whose thread may call the driver meanwhile, it is another one."""
    modes = []

    def graph(graph, capture_error_mode="default", **options):
        modes.append(capture_error_mode)
        return contextlib.nullcontext()

    for name in ("graph_pool_handle", "Stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, Mock())
    monkeypatch.setattr(torch.cuda, "graph", graph)
    step = llama.TrainStep(dataclasses.replace(TINIER, impl="torch"), "cpu")
    step.world.capture_mode = mode
    step.capture()
    assert modes == [mode] * 3


def test_an_error_that_is_no_number_fails():
    nan = float("nan")
    errors = {"small": 0.1, "large": 0.3, "nan": nan, "missing": math.inf, "beside nan": 0.1}
    plain = dict.fromkeys(errors, 0.1) | {"beside nan": nan}
    assert llama.judge(errors, plain, 0.05).failed == ["large", "nan", "missing", "beside nan"]


# --- on a GPU
# Only a GPU captures graphs, and multiplies in bf16.


@pytest.mark.gpu
@pytest.mark.parametrize("use_amp", [False, True])
@pytest.mark.parametrize("timing", ["phases", "step"], ids=["three graphs", "one graph"])
def test_graphs_give_the_same_bits(use_amp, timing):
    run = dict(use_amp=use_amp, timing=timing, num_steps=5, warmup_steps=2, learning_rate=1e-2)
    eager, eager_losses = train("cuda", **run)
    captured, captured_losses = train("cuda", graph=True, **run)
    assert list(captured.phases) == (STEP if timing == "phases" else ["step"])
    assert len(set(eager_losses)) == 5  # they are losses of different batches
    assert eager_losses == captured_losses
    assert all(map(torch.equal, eager.optimizer.weights(), captured.optimizer.weights()))


@pytest.mark.gpu
def test_a_graph_reads_the_learning_rate_from_the_device(make_step):
    step = make_step()
    with torch.cuda.stream(torch.cuda.Stream()):
        step.run()
    torch.cuda.synchronize()
    step.capture()
    step.optimizer.lr.fill_(0.0)
    before = [w.clone() for w in step.optimizer.weights()]
    step.run()
    assert all(map(torch.equal, step.optimizer.weights(), before))


HEADS = "40/1/1 80/2/17 96/4/129 64/8/300 16/8/129 128/2/300 40/8/300 96/1/17"


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS.split())
def test_bf16_check_passes(heads):
    """Of heads of so many dimensions, query heads for each of k and v, and positions."""
    head_dim, group, seq_len = map(int, heads.split("/"))
    sizes = dict(hidden_dim=8 * head_dim, num_heads=8, num_kv_heads=8 // group, ffn_dim=200)
    config = dataclasses.replace(TINY, **sizes, seq_len=seq_len, use_amp=True)
    assert llama.OneProcess().check(config, torch.device("cuda"))


# --- the clock and the check's rule, without a GPU
# What is timed shows in the order of marks and waits, which a fake GPU keeps.


@pytest.fixture
def gpu(monkeypatch):
    """A fake GPU: log has what was asked of it in order, and what costs time moves the clock by seconds."""
    seconds = {"load": 1, "forward": 2, "backward": 4, "optimizer": 8, "sync": 16}
    gpu = SimpleNamespace(log=[], now=0, device=torch.device("cuda"))
    monkeypatch.setattr(llama, "get_gpu", lambda kind: llama.Gpu(kind, "a GPU", "sm_90", num_sms=132, warp_size=32))

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

    fakes = dict(Event=Event, synchronize=does("sync"), stream=stream, Stream=object)
    fakes |= dict(empty_cache=does("empty cache"), reset_peak_memory_stats=does("reset peak"))
    for name, value in fakes.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor)
    monkeypatch.setattr(llama, "time", SimpleNamespace(perf_counter=lambda: gpu.now))
    gpu.step = llama.TrainStep.__new__(llama.TrainStep)  # which has yet to get its config
    gpu.step.device, gpu.step.world = gpu.device, llama.OneProcess()
    gpu.step.named_range, gpu.step.optimizer = contextlib.nullcontext, None
    gpu.step.loss = torch.tensor(1.0)
    gpu.step.model = torch.nn.Linear(1, 1)
    for p in gpu.step.model.parameters():
        p.grad = torch.full_like(p, 3.0)
    for method in ("load", "forward", "backward", "optimizer_step", "restart", "capture"):
        setattr(gpu.step, method, does(method.removesuffix("_step")))
    gpu.step.phases = {name: getattr(gpu.step, name) for name in ("forward", "backward")}
    gpu.step.phases["optimizer"] = gpu.step.optimizer_step
    return gpu


def run_on(gpu, **changes):
    gpu.step.config, records = dataclasses.replace(TINY, num_steps=2, **changes), []
    llama.train(gpu.step, llama.batches(gpu.step.config), records)
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
    for record in records:
        assert (record.batch_ms, sum(record.phase_ms.values())) == (30000, 14000)


def test_window_is_timed_between_two_synchronizations(gpu):
    records = run_on(gpu, timing="step")
    assert gpu.log == ["sync", "mark", *2 * ["load", *STEP, "mark"], "sync", "elapsed", "elapsed"]
    for record in records:
        assert (record.batch_ms, record.host_ms, record.phase_ms) == (15000, 14000, {})


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


RULES = [
    ("fp32", {}, 1e-5),
    ("tf32", dict(matmul_precision="high"), 2e-3),
    ("bf16", dict(use_amp=True), 1e-2),
]


@pytest.mark.parametrize("which", ["loss", "weight"])
@pytest.mark.parametrize("precision, changes, rounding", RULES)
def test_check_allows_twice_the_error_of_plain_pytorch_and_a_rounding(
    monkeypatch, capsys, gpu, precision, changes, rounding, which
):
    config, amp = dataclasses.replace(TINY, **changes), precision == "bf16"
    plain, allowed = 0.3 * rounding, 1.6 * rounding
    passes = []  # of the model: its implementation, how it computes, its error
    steps = []  # of which double() was called

    class Step:
        def __init__(self, config, device):
            self.config, self.model = config, SimpleNamespace(double=lambda: steps.append(self))

    for ours in (0.98 * allowed, 1.02 * allowed):
        passes += [
            ("torch", False, not amp, "highest", 0),
            ("triton", amp, False, config.matmul_precision, ours),
            ("torch", amp, False, config.matmul_precision, plain),
        ]

    def loss_and_gradients(step, batch):
        *expected, error = passes.pop(0)
        config, precision = step.config, torch.get_float32_matmul_precision()
        assert expected == [config.impl, config.use_amp, step in steps, precision]
        exact = {"loss": torch.tensor(5.0).double(), "weight": torch.tensor([3.0, 4.0]).double()}
        return exact | {which: exact[which] * (1 + error)}

    monkeypatch.setattr(llama, "TrainStep", Step)
    monkeypatch.setattr(llama, "loss_and_gradients", loss_and_gradients)
    monkeypatch.setattr("tiny_llama.audit.check_step", lambda *args: True)  # which has tests of its own
    for ours, outcome in ((0.98 * allowed, "passed"), (1.02 * allowed, "FAILED in 1 of 2")):
        assert llama.OneProcess().check(config, gpu.device) == (outcome == "passed")
        out = capsys.readouterr().out
        assert outcome in out and f"worst, {which}: error {ours:.1e}, allowed {allowed:.1e}" in out


def test_a_run_checks_two_sequences_and_ends_if_that_fails(monkeypatch, gpu, tmp_path):
    checked = []

    class World(llama.OneProcess):
        def find_device(self, config):
            return gpu.device

        def check(self, *what):
            checked.append(what)  # and returns None: it fails

    config = dataclasses.replace(TINY, check=True, warmup_steps=1, output_dir=str(tmp_path / "new"))
    asked = dataclasses.replace(config, batch_size=7, compile=True, graph=True)
    assert llama.train_and_report(asked, World()) == 1
    assert not any((tmp_path / "new").iterdir())
    assert checked == [(dataclasses.replace(config, batch_size=2), gpu.device)]
