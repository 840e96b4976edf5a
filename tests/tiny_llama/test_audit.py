"""The audit names wrong gradients and no others, changes nothing, and refuses by name what it cannot judge."""

import dataclasses
import random
import sys
import textwrap

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import tiny_llama_v3 as llama
from tests.core.tiny import SMALL
from tiny_llama import audit as audits
from tiny_llama.audit import audit


class Network(nn.Module):
    """Of random shape: an embedding, then layers that are gated, normed or plain, and a head, tied or not."""

    def __init__(self, seed):
        super().__init__()
        choose = random.Random(seed)
        torch.manual_seed(seed)
        width, words = choose.randint(16, 96), choose.randint(20, 90)
        self.embedding = nn.Embedding(words, width)
        nn.init.normal_(self.embedding.weight, std=choose.choice([0.02, 0.3]))
        kinds = [choose.choice(["gated", "attention", "relu", "tanh"]) for _ in range(choose.randint(1, 3))]
        self.kinds = kinds
        self.norms = nn.ModuleList(choose.choice([nn.LayerNorm, nn.RMSNorm])(width) for _ in kinds)
        self.first = nn.ModuleList(nn.Linear(width, 3 * width, bias=choose.random() < 0.5) for _ in kinds)
        self.second = nn.ModuleList(nn.Linear(width, width) for _ in kinds)
        self.dropout = nn.Dropout(choose.choice([0, 0.1]))
        self.head = nn.Linear(width, words, bias=False)
        if choose.random() < 0.5:
            self.head.weight = self.embedding.weight
        self.tokens = torch.randint(words, (2, 9))

    def branch(self, kind, x, first, second):
        q, k, v = first(x).chunk(3, dim=-1)
        if kind == "tanh":
            return second(torch.tanh(q + k) - v)
        if kind == "gated":
            return second(F.silu(q) * k + v)
        if kind == "relu":
            return second(F.relu(q) + k - v)
        return second(F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def forward(self):
        x = self.embedding(self.tokens[:, :-1])
        for kind, norm, first, second in zip(self.kinds, self.norms, self.first, self.second, strict=True):
            x = x + self.dropout(self.branch(kind, norm(x), first, second))
        return F.cross_entropy(self.head(x).flatten(0, 1), self.tokens[:, 1:].flatten())


def names(findings):
    return [finding.name for finding in findings]


def half_of_the_rows(gradient):
    spoiled = gradient.clone()
    spoiled[: (len(gradient) + 1) // 2] = 0
    return spoiled


FAULTS = {
    "5 % too large": lambda gradient: 1.05 * gradient,
    "5 % too small": lambda gradient: gradient / 1.05,
    "twice": lambda gradient: 2 * gradient,
    "half of the rows": half_of_the_rows,
    "severed": torch.zeros_like,
    "with the other sign": torch.neg,
}


def test_no_right_gradient_is_called_wrong():
    outcomes = [audit(model, model) for model in map(Network, range(40))]
    assert [names(findings.wrong) for findings in outcomes] == [[]] * 40
    number = sum(map(len, (weight for findings in outcomes for weight in findings)))
    assert number == sum(len(list(Network(seed).parameters())) for seed in range(40))
    assert sum(len(findings.right) for findings in outcomes) > 0.95 * number


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_gradient_is_named_and_no_other_one(fault):
    named = 0
    for seed in range(40):
        model = Network(seed)
        name, weight = random.Random(seed).choice(list(model.named_parameters()))
        weight.register_hook(FAULTS[fault])
        wrong = names(audit(model, model).wrong)
        named += wrong == [name]
        assert wrong in ([name], [])
    assert named >= 38  # 19 of 20


class Two(nn.Module):
    """A weight that counts, one that does not, a frozen one, and a buffer; by default with a right gradient."""

    def __init__(self, dtype=torch.float32, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.Parameter(torch.randn(7, 5).to(dtype))
        self.unused = nn.Parameter(torch.randn(3).to(dtype))
        self.frozen = nn.Parameter(torch.randn(5).to(dtype), requires_grad=False)
        self.register_buffer("steps", torch.zeros(()))
        self.x, self.factor = torch.randn(4, 7), factor

    def forward(self):
        self.steps += 1
        used = self.used if self.factor == 1 else self.used * self.factor + (1 - self.factor) * self.used.detach()
        # A buffer that counts the calls has to be put back before each.
        y = torch.tanh(self.x.to(used.dtype) @ used * self.frozen)
        return float(self.steps) * F.dropout(y, 0.2).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_gradients", [False, True])
def test_nothing_changes(dtype, has_gradients):
    model = Two(dtype)
    if has_gradients:
        model().backward()
        model.used.grad[0, 0] = 3.0
    expected = [(tensor.clone(), tensor.dtype, tensor.data_ptr()) for tensor in (*model.parameters(), model.steps)]
    gradient = model.used.grad
    value = gradient if gradient is None else gradient.clone()
    state = torch.get_rng_state()
    torch.set_float32_matmul_precision("high")
    findings = audit(model, model)
    assert torch.get_float32_matmul_precision() == "high" and torch.equal(torch.get_rng_state(), state)
    assert names(findings.right) == ["used", "unused"]
    for tensor, (before, kind, place) in zip((*model.parameters(), model.steps), expected, strict=True):
        assert (tensor.dtype, tensor.data_ptr()) == (kind, place) and torch.equal(tensor, before)
    assert model.used.grad is gradient and model.unused.grad is None
    assert gradient is None or torch.equal(gradient, value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_told_and_seen_are_the_slopes(dtype):
    """Of a gradient that is 0.6 of the right one, whatever the type."""
    (wrong,) = audit(model := Two(dtype, factor=0.6), model).wrong
    assert wrong.name == "used" and wrong.told / wrong.seen == pytest.approx(0.6, abs=0.01) and wrong.seen != 0


def test_weights_are_put_back_if_the_loss_fails_on_the_way():
    model, calls = Two(torch.bfloat16), []

    def loss():
        calls.append(model.used.dtype)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return model()

    before = model.used.clone()
    with pytest.raises(KeyboardInterrupt):
        audit(model, loss)
    assert calls == [torch.float32] * 4 and torch.equal(model.used, before) and model.used.dtype == torch.bfloat16
    assert model.steps == 0 and torch.get_float32_matmul_precision() == "highest"


def test_a_graph_that_others_keep_can_still_go_backward():
    model = Two()
    kept = model()
    audit(model, model)
    kept.backward()
    assert model.used.grad.any()


class Tied(nn.Module):
    """A weight that two places use, of which the gradient may lack one, as in stage 6."""

    def __init__(self, is_cut):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.is_cut = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False), is_cut
        self.head.weight = self.embedding.weight
        self.tokens = torch.randint(11, (2, 8))

    def forward(self):
        x = self.embedding(self.tokens)
        return F.cross_entropy(self.head(x.detach() if self.is_cut else x).flatten(0, 1), self.tokens.flatten())


@pytest.mark.parametrize("is_cut", [False, True])
def test_tied_weights_are_one_and_lack_a_part_where_one_use_is_cut(is_cut):
    right, wrong, unclear = audit(model := Tied(is_cut), model)
    assert names(wrong if is_cut else right) == ["embedding.weight"] and len(right + wrong + unclear) == 1


def test_zeros_and_sparse_gradients_are_audited_and_nan_is_wrong():
    torch.manual_seed(0)
    model = nn.ModuleDict({"embedding": nn.Embedding(9, 4, sparse=True), "bias": nn.Linear(4, 3)})
    nn.init.zeros_(model["bias"].bias)
    tokens = torch.randint(9, (6,))

    def loss():
        return model["bias"](model["embedding"](tokens)).square().mean()

    assert len(audit(model, loss).right) == 3
    spoil = model["bias"].bias.register_hook(lambda gradient: gradient * 1.2)
    assert names(audit(model, loss).wrong) == ["bias.bias"]
    spoil.remove()
    model["bias"].weight.register_hook(lambda gradient: gradient * float("nan"))
    assert names(audit(model, loss).wrong) == ["bias.weight"]


def test_a_loss_without_any_history_has_only_wrong_gradients():
    (finding,) = audit(model := Two(), torch.no_grad()(model.forward)).wrong
    assert finding.name == "used" and finding.told == 0 != finding.seen


@pytest.mark.parametrize("sign", [1, -1])
def test_a_weight_by_which_the_loss_hardly_changes_is_unclear_and_not_right(sign):
    """fp32 rounds 1 + 1e-9 to 1, and the gradient is wrong: nobody can see it. A loss may be negative."""

    class Faint(nn.Module):
        def __init__(self):
            super().__init__()
            self.faint, self.strong = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self):
            return sign * (1 + (self.strong.square().sum() + 1e-9 * self.faint.sum()))

    findings = audit(model := Faint(), model)
    assert (names(findings.right), names(findings.unclear)) == (["strong"], ["faint"])
    first, last = audits.report(findings)
    assert first.endswith("passed (2 weights)") and "unclear" in last and last.endswith(": faint")


class OneWeight(nn.Module):
    def __init__(self, weight, loss):
        super().__init__()
        self.weight, self.loss = nn.Parameter(weight), loss

    def forward(self):
        return self.loss(self.weight)


def test_a_kink_at_the_weight_makes_it_unclear_and_not_wrong():
    """Beside it the slope is 0 on one side and 1 on the other; PyTorch tells 0, and half is seen."""
    (finding,) = audit(model := OneWeight(torch.zeros(3), lambda w: F.relu(w).sum()), model).unclear
    assert finding.told == 0 and finding.seen != 0


def test_a_step_does_not_change_the_sign_of_a_weight():
    """By whose size the loss does not change, as by that of a norm's weight before another norm."""
    factors = torch.tensor([1.0, -2.0, 3.0, 0.5])
    (finding,) = audit(model := OneWeight(torch.ones(4), lambda w: (factors * w / w.abs()).sum()), model).right
    assert finding.seen == 0


@pytest.mark.parametrize("looks, verdict", [
    ("right wrong right", "right"),
    ("wrong unclear wrong", "wrong"),
    ("wrong wrong", "wrong"),
    ("unclear wrong right", "unclear"),
])  # fmt: skip
def test_two_of_three_directions_decide(monkeypatch, looks, verdict):
    seeds, outcomes = [], iter(looks.split())
    direction = audits.Probe.direction
    monkeypatch.setattr(audits.Probe, "direction", lambda *args: (seeds.append(args[-1]), direction(*args))[1])
    monkeypatch.setattr(audits.Probe, "look", lambda *args: (next(outcomes), 1.0, 2.0))
    findings = audit(model := OneWeight(torch.ones(4), torch.sum), model)
    assert getattr(findings, verdict) == [("weight", 1.0, 2.0)] and seeds == list(range(len(looks.split())))


# --- what is refused

SCALAR = "return a tensor with one element"
REFUSED = {
    "not deterministic": (lambda m: m() + next(m.noise), ["two evaluations of the loss differ", "fixed data"]),
    "not finite": (lambda m: m() * float("inf"), ["the loss is inf", "finite"]),
    "no scalar": (lambda m: m.used[0], ["of the shape (5,)", SCALAR]),
    "a number": (lambda m: 1.5, ["float", SCALAR]),
    "bf16": (lambda m: m().bfloat16(), ["torch.bfloat16", "fp32"]),
    "autocast": (lambda m: autocast(m, torch.bfloat16), ["computes in bfloat16", "autocast"]),
    "autocast in fp16": (lambda m: autocast(m, torch.float16), ["computes in float16", "autocast"]),
}


def autocast(model, dtype):
    with torch.autocast("cpu", dtype):
        return (model.x @ model.used).float().square().mean()


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_that_cannot_be_audited_is_refused(case):
    loss, words = REFUSED[case]
    model = Two()
    model.noise = iter([0.0, 0.1, 0.0, 0.1])
    with pytest.raises(llama.UsageError) as refused:
        audit(model, lambda: loss(model))
    assert all(word in str(refused.value) for word in words) and "\n" not in str(refused.value)


def test_weights_that_cannot_be_audited_are_refused():
    with pytest.raises(llama.UsageError, match="no weight that requires a gradient"):
        audit(Two().requires_grad_(False), None)
    model = Two()
    model.used = nn.Parameter(torch.randn(2, dtype=torch.complex64))
    with pytest.raises(llama.UsageError, match="the weight used is complex64"):
        audit(model, model)
    model = Two(torch.float16)

    def takes_fp16():
        raise TypeError(f"expected float16 and got {model.used.dtype}\nand more")

    reason = r"the float16 weights are audited in fp32.*\(expected float16 and got torch.float32\): give its inputs"
    with pytest.raises(llama.UsageError, match=reason):
        audit(model, takes_fp16)
    assert model.used.dtype == torch.float16
    model = Two()
    with pytest.raises(RuntimeError, match="mat1"):  # a mistake of the loss itself
        audit(model, lambda: (model.used @ model.used).sum())


# --- our own step, and --check


@pytest.mark.triton
@pytest.mark.parametrize("severed", [False, True])
def test_our_step_and_stage_6(device, severed):
    """Where the count of weights with a gradient has one right, the tied embedding, all are wrong."""
    step = llama.TrainStep(dataclasses.replace(SMALL, num_layers=1, severed_autograd=severed), device)
    step.load(*next(step.world.batches(step.config)))
    step.forward()
    step.backward()
    before = step.optimizer.grad.clone(), step.optimizer.param.clone()
    places = [p.grad for p in step.model.parameters()]
    findings = audit(step.model, lambda: step.call_model(step.tokens, step.targets))
    everything = [name for name, _ in step.model.named_parameters()]
    assert len(everything) == 8 and names(findings.wrong if severed else findings.right) == everything
    assert all(p.grad is place for p, place in zip(step.model.parameters(), places, strict=True))
    with_gradient = [p for p in step.model.parameters() if p.grad is not None]
    assert len(with_gradient) == (1 if severed else 8)
    for p in with_gradient:
        place = slice(p.main_grad.storage_offset(), p.main_grad.storage_offset() + p.numel())
        assert torch.equal(step.optimizer.grad[place], before[0][place])
    assert torch.equal(step.optimizer.param, before[1])
    amp = llama.TrainStep(dataclasses.replace(SMALL, num_layers=1, use_amp=True), device)
    if amp.implementation == "triton":
        with pytest.raises(llama.UsageError, match="without --use-amp"):
            audit(amp.model, lambda: amp.call_model(amp.tokens, amp.targets))


@pytest.mark.parametrize("num_layers, audited", [(1, 8), (2, 14), (3, 14)])
def test_the_step_of_a_run_is_audited_with_two_layers_at_most(num_layers, audited, capsys):
    config = llama.Config(hidden_dim=16, num_layers=num_layers, num_heads=2, vocab_size=11, batch_size=1, seq_len=9)
    config = dataclasses.replace(config, impl="torch")
    assert audits.check_step(config, torch.device("cpu"), next(llama.random_tokens(config)))
    assert capsys.readouterr().out == f"Audit of the gradients: passed ({audited} weights)\n"


CHECKED = (
    "--check --device cpu --impl torch --hidden-dim 16 --num-layers 3 --num-heads 2 --vocab-size 11 --batch-size 1 "
    "--seq-len 40 --num-steps 1 --warmup-steps 0"
).split()


@pytest.mark.parametrize("fault, outcome, code", [
    (None, "passed (14 weights)\n", 0),
    ("gradient", "FAILED in 2 of 14 weights\n    layers.0.feed_forward.down_proj.weight: told", 1),
    ("loss", "FAILED, as the loss is nan", 1),
])  # fmt: skip
def test_check_ends_with_an_audit(tmp_path, monkeypatch, capsys, fault, outcome, code):
    """A wrong gradient that the reference shares, so that only the audit finds it."""
    shapes, torch_operations = set(), llama.OPERATIONS["torch"]

    def spoiled_swiglu(x, gate_up, down):
        shapes.add(tuple(x.shape))
        down = down * 2 - down.detach() if fault == "gradient" else down
        return torch_operations.swiglu(x, gate_up, down * float("nan") if fault == "loss" else down)

    monkeypatch.setitem(llama.OPERATIONS, "torch", torch_operations._replace(swiglu=spoiled_swiglu))
    monkeypatch.chdir(tmp_path)
    assert llama.main(CHECKED, "tiny_llama_v3.py") == code
    out = capsys.readouterr().out
    assert f"Audit of the gradients: {outcome}" in out and ("Check against PyTorch in fp64: passed" in out) is (
        fault != "loss"
    )
    assert (1, 32, 16) in shapes and "a part of their gradient" not in out


# --- the command line

PROGRAM = """
    import torch
    from beside import data
    model = torch.nn.Linear(7, 3)
    def right():
        return model, lambda: model(data).square().mean()
    def wrong():
        model.bias.register_hook(lambda gradient: gradient * 1.5)
        return right()
    def none():
        return model
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    for place, program in ((tmp_path, "audited"), (tmp_path / "sub", "tiny_llama_v3")):
        (place / f"{program}.py").write_text(textwrap.dedent(PROGRAM))
        (place / "beside.py").write_text("import torch\ndata = torch.linspace(-1, 1, 28).view(4, 7)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [each for each in sys.path if each])
    yield tmp_path
    for name in ("audited", "beside", "audited_tiny_llama_v3"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("place", ["audited", "audited.py", "sub/tiny_llama_v3.py"])
def test_a_function_is_found_and_its_wrong_weights_set_the_exit_code(folder, capsys, place):
    assert audits.main([f"{place}:right"]) == 0
    assert capsys.readouterr().out == "Audit of the gradients: passed (2 weights)\n"
    assert audits.main([f"{place}:wrong"]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first == "Audit of the gradients: FAILED in 1 of 2 weights" and second.startswith("    bias: told ")
    assert sys.modules["tiny_llama_v3"] is llama


@pytest.mark.parametrize("arguments, words", [
    ([], ["nothing is given", "MODULE:FUNCTION"]),
    (["audited"], ["audited names no function"]),
    ([":right"], [":right names no function"]),
    (["audited:right", "again"], ["audited:right again", "one"]),
    (["nowhere.at_all:right"], ["no module nowhere.at_all"]),
    (["nowhere.py:right"], ["nowhere.py is no file"]),
    (["audited:left"], ["audited has no function left"]),
    (["audited:none"], ["returns Linear", "(model, loss)"]),
])  # fmt: skip
def test_a_wrong_command_line_takes_one_line(folder, capsys, arguments, words):
    assert audits.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("tiny_llama.audit: error: ") and err.count("\n") == 1
    assert all(word in err for word in words)


def test_an_import_that_fails_inside_a_module_is_told_by_python(folder):
    (folder / "lacking.py").write_text("import a_package_that_is_not_here\n")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_here"):
        audits.main(["lacking:right"])


def test_help_says_what_it_is_for(capsys):
    assert audits.main(["--help"]) == 0 and "MODULE:FUNCTION" in capsys.readouterr().out
