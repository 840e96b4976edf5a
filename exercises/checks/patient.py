"""Checks of the patient, a program with mistakes that nobody names: each says what is seen, and accepts any mend.

The model and its gradients are compared with a reference in fp64, and audited. What the program prints is compared with
what its model gave. Nothing is timed: the step that the program's clock measures takes simulated time.
"""

import contextlib
import inspect
import io
import itertools
import math
import re
import time
import timeit
from unittest import mock

import torch
import torch.nn.functional as F

from exercises.checks import DEVICE
from exercises.checks.common import Wrong, expect, expect_close, expect_several
from tiny_llama.audit import audit
from tiny_llama_v3 import UsageError

COMPILED = {"gradients"}  # on a GPU as well
VOCAB_SIZE, DIM, HEADS, HIDDEN_DIM, LAYERS, EPS = 64, 64, 4, 128, 2, 1e-5
BATCH_SIZE, SEQ_LEN = 8, 32
LAYER = {
    "attention_norm.weight": (DIM,),
    "ffn_norm.weight": (DIM,),
    "qkv.weight": (3 * DIM, DIM),
    "out.weight": (DIM, DIM),
    "gate.weight": (HIDDEN_DIM, DIM),
    "up.weight": (HIDDEN_DIM, DIM),
    "down.weight": (DIM, HIDDEN_DIM),
}
SHAPES = {f"layers.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in LAYER.items()}
SHAPES |= {"embedding.weight": (VOCAB_SIZE, DIM), "norm.weight": (DIM,)}


# ----------------------------------------------------------------------------------------------------------------------
# What is right


def normed(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def rotary(x):
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
    turn = torch.polar(torch.ones_like(angles), angles)
    turned = torch.complex(*x.chunk(2, dim=-1)) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


def reference(w, tokens):
    """Return the logits of the model for {name: weight}, in fp64 and on the CPU."""
    x = w["embedding.weight"][tokens.cpu()]
    future = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    for layer in (f"layers.{number}." for number in range(LAYERS)):
        qkv = normed(x, w[layer + "attention_norm.weight"]) @ w[layer + "qkv.weight"].T
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in qkv.chunk(3, dim=-1))
        scores = rotary(q) @ rotary(k).mT / math.sqrt(DIM // HEADS)
        attended = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        x = x + attended.transpose(1, 2).flatten(2) @ w[layer + "out.weight"].T
        y = normed(x, w[layer + "ffn_norm.weight"])
        gate, up = y @ w[layer + "gate.weight"].T, y @ w[layer + "up.weight"].T
        x = x + F.silu(gate) * up @ w[layer + "down.weight"].T
    return normed(x, w["norm.weight"]) @ w["embedding.weight"].T


def cross_entropy(logits, tokens):
    """Return the mean cross-entropy of the next tokens, a scalar in fp64."""
    log_p = logits.double().log_softmax(-1)[:, :-1]
    return -log_p.gather(2, tokens[:, 1:, None]).mean()


# ----------------------------------------------------------------------------------------------------------------------
# Tasks


def expect_weights(model):
    """Expect that a model has the weights of the given one, all of which can learn."""
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters() if weight.requires_grad}
    odd = sorted(name for name in shapes.keys() | SHAPES.keys() if shapes.get(name) != SHAPES.get(name))
    expect(not odd, f"{', '.join(odd[:3])}: not a weight as it was given", "names, shapes and number are to stay")


def gradients(program):
    """Expect the function of the docstring, and of each weight the gradient that the loss has."""
    torch.manual_seed(0)
    model, tokens = program.Model().to(DEVICE), torch.randint(VOCAB_SIZE, (2, 12), device=DEVICE)
    expect_weights(model)
    with torch.no_grad():
        for weight in model.parameters():
            random = torch.randn(weight.shape).to(weight)
            weight.copy_(1 + 0.3 * random if weight.ndim == 1 else random * weight.shape[1] ** -0.5)
    weights, logits = dict(model.named_parameters()), model(tokens)
    exact = {name: weight.detach().double().cpu().requires_grad_() for name, weight in weights.items()}
    wanted = reference(exact, tokens)
    expect_close(logits.detach().cpu(), wanted, 1e-3, "the model is to compute what its docstrings say", "the logits")
    try:
        findings = audit(model, lambda: program.loss(model(tokens), tokens))
    except UsageError as error:
        raise Wrong(str(error), "can the model and its loss be audited?") from error
    if findings.wrong:
        name, told, seen = findings.wrong[0]
        fact = f"of {len(findings.wrong)} of {len(SHAPES)} weights the gradient does not tell how the loss changes"
        raise Wrong(fact, f"{name}: told {told:+.3g}, seen {seen:+.3g}")
    # The audit sees errors of a few per cent. Those of rounding are smaller, and show beside the largest element.
    found = torch.autograd.grad(cross_entropy(logits, tokens), weights.values())
    right = torch.autograd.grad(cross_entropy(wanted, tokens.cpu()), exact.values())
    for name, grad, theirs in zip(weights, found, right, strict=True):
        size = theirs.abs().max().item()
        fact = f"the gradient of {name} as a share of its largest element"
        expect_close(grad / size, theirs / size, 1e-3, "all of the backward pass stays in fp32", fact)
    wanted = torch.autograd.grad(program.loss(model(tokens), tokens), weights.values())
    for _ in range(2):  # the first call leaves a gradient, to which the second one does not add
        program.gradients(model, tokens)
    for (name, weight), grad in zip(weights.items(), wanted, strict=True):
        expect(weight.grad is not None, f"{name} has no gradient after gradients()", "the audit finds one in the loss")
        hint = "the loss has another one; gradients() was called for the second time"
        expect_close(weight.grad, grad.double(), 1e-4, hint, f"the gradient of {name}")


def printed(program, number):
    """Train for so many steps, and return what is printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        program.train(number)
    return out.getvalue()


def loss(program):
    """Expect the loss of the docstring: of random logits, of a fresh model, and where it is printed."""
    torch.manual_seed(0)
    for size in (1, 40):
        logits, tokens = torch.randn(3, 7, VOCAB_SIZE) * size, torch.randint(VOCAB_SIZE, (3, 7))
        got, wanted = torch.as_tensor(program.loss(logits, tokens)).detach(), cross_entropy(logits, tokens).item()
        fact = f"loss() is {got.tolist()!s:.40} for logits whose mean cross-entropy is {wanted:.4f}"
        expect(got.numel() == 1 and math.isclose(got.item(), wanted, rel_tol=1e-4), fact, "compare with its docstring")
    true, create = [], program.Model

    def watched():
        model = create()
        model.register_forward_hook(lambda _, args, logits: true.append(cross_entropy(logits, args[0]).item()))
        return model

    with mock.patch.dict(vars(program), Model=watched):
        said = printed(program, 12)
    values = [float(value) for value in re.findall(r"^step +\d+: loss +(\S+)$", said, re.M)]
    fact = f"train(12) calls the model {len(true)} times and prints {len(values)} lines 'step 0: loss 1.2345'"
    expect(12 <= len(values) <= len(true), fact, "there is to be one for each step")
    for value, wanted in zip(values, true[-len(values) :], strict=True):
        fact = f"loss {value:.4f} is printed of a batch on which the model has {wanted:.4f}"
        expect(math.isclose(value, wanted, rel_tol=1e-3), fact, "what is printed is to be what loss() returns")
    first, last, guess = values[0], values[-1], math.log(VOCAB_SIZE)
    fact = f"the first loss is {first:.2f}, of a model that knows nothing; one that guesses has {guess:.2f}"
    expect(abs(first - guess) < 0.3, fact, "what are the logits of that one?")
    fact = f"the loss begins at {first:.4f} and is {last:.4f} after 12 steps"
    expect(last < first - 0.05, fact, "which weights still learn?")


class Machine:
    """A host and a device on a simulated clock, in ms. The device works on while the host goes on; a CPU is both."""

    DURATIONS = 22, 20, 24  # so that the second step, and the last of 5 and of 20, is shorter than their mean
    FIRST, LAUNCH = 3000, 1  # of the first call, for the host; of the others, if there is a device

    def __init__(self, has_device):
        self.has_device, self.calls, self.host, self.device = has_device, 0, 0.0, 0.0
        self.waited = 0.0  # of the host's time

    def step(self):
        """Do what a training step does to the clocks."""
        busy = self.DURATIONS[self.calls % 3]
        self.host += 0 if self.calls else self.FIRST
        self.calls += 1
        if not self.has_device:
            self.host += busy
            return torch.tensor(4.0)
        self.host += self.LAUNCH
        self.device = max(self.device, self.host) + (busy if self.calls > 1 else self.FIRST)
        return OnDevice(self)

    def wait(self, *_):
        self.wait_until(self.device)

    def wait_until(self, then):
        self.waited += max(then - self.host, 0)
        self.host = max(self.host, then)

    def seconds(self):
        return self.host / 1e3

    def nanoseconds(self):
        return round(self.host * 1e6)

    def busy_seconds(self):
        return (self.host - self.waited) / 1e3

    def busy_nanoseconds(self):
        return round((self.host - self.waited) * 1e6)

    @contextlib.contextmanager
    def replacing(self, program):
        """Within, this machine is that of a program, whatever clock and way to wait it takes."""
        names = "perf_counter", "monotonic", "time"
        ours = {name: self.seconds for name in names} | {f"{name}_ns": self.nanoseconds for name in names}
        # These two stand still while the host waits.
        for name in ("process_time", "thread_time"):
            ours |= {name: self.busy_seconds, f"{name}_ns": self.busy_nanoseconds}
        # A program may also have a clock under a name of its own, by `from time import ...`.
        clocks = {getattr(time, name): clock for name, clock in ours.items()}
        own = {name: clocks[each] for name, each in vars(program).items() if inspect.isbuiltin(each) and each in clocks}
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.multiple(time, **ours))
            stack.enter_context(mock.patch.object(timeit, "default_timer", self.seconds))
            if self.has_device:
                own["DEVICE"] = "cuda"
                stream = mock.Mock(synchronize=self.wait)
                stack.enter_context(mock.patch.multiple(
                    torch.cuda, synchronize=self.wait, is_available=lambda: True, current_stream=lambda *_: stream,
                    Event=lambda *_, **__: Event(self),
                ))  # fmt: skip
                stack.enter_context(mock.patch.object(torch.accelerator, "synchronize", self.wait))
            stack.enter_context(mock.patch.dict(vars(program), own))
            yield


class Event:
    """An event of a simulated device."""

    def __init__(self, machine):
        self.machine, self.at = machine, None

    def record(self, *_):
        self.at = max(self.machine.host, self.machine.device)

    def synchronize(self):
        self.machine.wait_until(self.at)

    def query(self):
        return self.machine.host >= self.at

    def elapsed_time(self, end):
        return end.at - self.at


class OnDevice(torch.Tensor):
    """A loss on a simulated device: whoever reads it waits."""

    READ = "item tolist cpu numpy to __float__ __bool__ __format__ __repr__".split()

    def __new__(cls, machine):
        self = torch.tensor(4.0).as_subclass(cls)
        self.machine = machine
        return self

    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda"))

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
        if function.__name__ in cls.READ:
            first.machine.wait()
        result = super().__torch_function__(function, types, args, kwargs)
        if isinstance(result, cls):
            result.machine = first.machine
        return result


def clock(program):
    """Expect the time that a step takes in the long run, and that it is what is printed."""
    # Of 20 steps one more or less hardly shows, of five it does. Whoever waits for each step adds its launch: 23 ms.
    for number, has_device in itertools.product((20, 5), (False, True)):
        machine = Machine(has_device)
        with machine.replacing(program):
            got = program.clock(machine.step, number)
        expect_several(got, "ms", "losses")
        fact = f"clock(step, {number}) calls step {machine.calls} times and returns {len(got[1])} losses"
        expect(machine.calls == len(got[1]) >= number, fact, "each call trains: train() needs the loss of all")
        who = "a device that works on when step() has returned" if has_device else "a CPU"
        busy = f"{who} is busy for {Machine.FIRST} ms in the first call and for 20 to 24 ms in each other one"
        fact = f"{busy}: clock(step, {number}) returns {float(got[0]):.2f} ms a step"
        expect(21 <= got[0] <= (23.5 if number == 20 else 24), fact, "of what is this the time?")
    calls = []

    def fixed(step, number):
        calls.append(number)
        return 50.0, [step(), step()]

    with mock.patch.dict(vars(program), clock=fixed):
        said = printed(program, 3)
    expect(calls, "train() does not call clock()", "what it prints is to be what clock() returns")
    line = re.search(r"(\S+) ms a step, (\S+) tokens a second", said)
    fact = f"where clock() returns 50 ms for a batch of {BATCH_SIZE} x {SEQ_LEN} tokens, train() prints "
    fact += line[0] if line else "no line '1.23 ms a step, 456 tokens a second'"
    wanted = 50.0, BATCH_SIZE * SEQ_LEN / 0.05
    numbers = [float(number.replace(",", "")) for number in line.groups()] if line else (0, 0)
    close = [math.isclose(number, right, rel_tol=1e-3) for number, right in zip(numbers, wanted, strict=True)]
    expect(all(close), fact, "both numbers are to follow from what clock() returns")


TASKS = {"gradients": gradients, "loss": loss, "clock": clock}
