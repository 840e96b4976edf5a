"""Check gradients without a reference: they have to tell how the loss changes when a weight does.

    python -m tiny_llama.audit MODULE:FUNCTION     a module that is found from the current folder
    python -m tiny_llama.audit PATH.py:FUNCTION    a file

FUNCTION takes no argument and returns (model, loss): an nn.Module, and a function without arguments that computes the
loss of always the same data. audit() is the same check as an import.

Each weight by itself is moved a little along a direction and back. The gradient along the direction is what is told,
the difference of the two losses, divided by the way between them, what is seen. A finite difference is wrong as well:
by rounding where the step is short, by curvature and the kinks of a ReLU where it is long. So the step is chosen by the
rounding of the loss, and a gradient is wrong only if it tells what is seen at neither end of the way nor in the middle.

It cannot see a gradient that is less than about 5 % wrong, an error that is by chance orthogonal to the directions, or
one in a weight by which the loss hardly changes. The last it names.

Exit codes: 0 no gradient is wrong, 1 one is, 2 the request cannot be met, 130 interrupted by Ctrl-C.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch

import tiny_llama_v3 as llama

DIRECTIONS = 3  # of a weight; two that agree decide
# These were chosen with 100 small models, half of them with ReLU, which suffer from longer steps.
STEP = 1e-5  # part of the loss by which a step changes it: 80 times what fp32 rounds
LARGEST_STEP = 0.1  # of the root mean square of a weight, where the loss hardly changes
TOLERANCE = 0.015  # between told and seen; rounding of the loss alone makes 0.004
ROUNDING = 2  # unit in the last place of the loss, in the difference of two
LEAST_SEEN = 0.05  # an error that has to stand out of the rounding, else the weight is unclear
AUDITED_LAYERS, AUDITED_TOKENS = 2, 32  # of a training step: others run the same code
HALF = torch.float16, torch.bfloat16


class Finding(NamedTuple):
    """A weight, and along the last of its directions what its gradient tells and what is seen of the loss."""

    name: str
    told: float
    seen: float


class Findings(NamedTuple):
    """The outcome of an audit: lists of a Finding for each weight."""

    right: list
    wrong: list
    unclear: list


def audit(model, loss):
    """Return the Findings on the gradients of a model, an nn.Module, by a loss, a function without arguments.

    loss() computes a scalar tensor in fp32 or fp64, always of the same data. Weights in bf16 and fp16 are audited as
    fp32 copies. Afterwards weights, gradients, buffers and the states of the random generators are what they were; each
    evaluation begins with the same states, so that dropout drops the same. Weights that several modules share are one.

    UsageError for a model without trainable weights, for weights of other types or distributed ones, and for a loss
    that is no scalar, not finite, computed in less than fp32, or another one when it is evaluated again.
    """
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not weights:
        raise llama.UsageError("the model has no weight that requires a gradient: there is nothing to audit")
    for name, p in weights.items():
        if p.dtype not in (torch.float32, torch.float64, *HALF) or hasattr(p, "full_tensor"):
            kind = "distributed" if hasattr(p, "full_tensor") else str(p.dtype).removeprefix("torch.")
            raise llama.UsageError(f"the weight {name} is {kind}: audit a model in fp32, bf16 or fp16 on one device")
    halves = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.dtype in HALF})
    findings = Findings([], [], [])
    with unchanged(model) as reset:
        try:
            probe = Probe(weights, loss, reset)
        except (RuntimeError, TypeError, ValueError) as error:
            if not halves:
                raise
            reason = f"the {halves[0]} weights are audited in fp32, and with them the loss fails ({first_line(error)})"
            raise llama.UsageError(f"{reason}: give its inputs in fp32 as well") from error
        for name in weights:
            verdict, *figures = probe.judge(name)
            getattr(findings, verdict).append(Finding(name, *figures))
    return findings


@contextlib.contextmanager
def unchanged(model):
    """Yield reset(), which puts back the buffers. At the end, what a loss and its gradient change is as before.

    Within, gradients are None, and weights and buffers in half precision have fp32 copies in their place.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    tensors = parameters | buffers
    data = {name: tensor.data for name, tensor in tensors.items()}
    gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in parameters.values()]
    values = {name: buffer.data.clone() for name, buffer in buffers.items()}

    def reset():
        for name, value in values.items():
            buffers[name].data.copy_(value)

    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")  # TF32 would round more than a step changes
        for p in parameters.values():
            p.grad = None
        for name, tensor in tensors.items():
            if tensor.dtype in HALF:
                try:
                    tensor.data = tensor.data.float()
                except RuntimeError as error:  # of the optimizer that owns the weight
                    remedy = "audit a step without --use-amp"
                    raise llama.UsageError(f"the weight {name} cannot be given in fp32: {remedy}") from error
        yield reset
    finally:
        torch.set_float32_matmul_precision(precision)
        for p in parameters.values():
            p.grad = None
        for name, tensor in tensors.items():
            if tensor.dtype != data[name].dtype:
                tensor.data = data[name]
        reset()
        for p, gradient, value in gradients:
            if gradient is not None:
                gradient.data.copy_(value)  # a kernel may write into the same memory, as ours do into main_grad
                p.grad = gradient


class Probe:
    """A loss and the gradients of its weights, {name: parameter}, evaluated under the same circumstances each time."""

    def __init__(self, weights, loss, reset):
        self.weights, self.loss, self.reset = weights, loss, reset
        self.gpus = sorted({p.get_device() for p in weights.values() if p.is_cuda})
        with torch.autograd.graph.saved_tensors_hooks(refuse_low_precision, lambda tensor: tensor):
            first = self.evaluate()
        self.gradients = {name: None if p.grad is None else p.grad.to_dense().clone() for name, p in weights.items()}
        self.value = float(first)
        self.eps = torch.finfo(first.dtype).eps
        again = float(self.evaluate(backward=False))
        if again != self.value:
            remedy = "give it fixed data and seeds, and deterministic operations"
            raise llama.UsageError(f"two evaluations of the loss differ, {self.value!r} and {again!r}: {remedy}")

    def evaluate(self, backward=True):
        """Return the loss, a tensor (); with backward, gradients are in .grad of the weights."""
        self.reset()
        for p in self.weights.values():
            p.grad = None
        with torch.random.fork_rng(self.gpus), torch.enable_grad():
            loss = self.loss()
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                what = f"of the shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
                raise llama.UsageError(f"the loss is {what}: return a tensor with one element")
            if loss.dtype not in (torch.float32, torch.float64):
                raise llama.UsageError(f"the loss is {loss.dtype}, which rounds more than a step changes: return fp32")
            if backward and not math.isfinite(loss.detach()):
                raise llama.UsageError(f"the loss is {float(loss.detach())}: audit at weights where it is finite")
            if backward and loss.requires_grad:
                loss.sum().backward()
        return loss.detach()

    def judge(self, name):
        """Return ("right", "wrong" or "unclear", told, seen) of a weight."""
        weight = self.weights[name].data  # to write into .data does not end graphs that others keep
        before = weight.clone()
        gradient = self.gradients[name]
        gradient = torch.zeros_like(weight) if gradient is None else gradient
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        size = float(before.double().square().mean().sqrt()) or 0.1  # of what begins as zeros, like a bias
        step = LARGEST_STEP * size
        if 0 < norm < math.inf:
            step = min(step, STEP * (abs(self.value) or 1.0) / norm)
        seen_of = []
        try:
            for seed in range(DIRECTIONS):
                direction = self.direction(gradient, norm, seed)
                verdict, told, seen = self.look(name, weight, before, gradient, direction, step)
                seen_of.append(verdict)
                if seen_of.count(verdict) == 2:
                    return verdict, told, seen
        finally:
            weight.copy_(before)
        return "unclear", told, seen

    def direction(self, gradient, norm, seed):
        """Return a random direction, its elements of size 1, which is not orthogonal to the gradient."""
        # From the CPU, so that every device gets the same.
        random = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(seed)).to(gradient)
        if not 0 < norm < math.inf:
            return random
        along = gradient / norm
        return random + along * (1 if float((random * along).sum()) >= 0 else -1)

    def look(self, name, weight, before, gradient, direction, step):
        """Return ("right", "wrong" or "unclear", told, seen) of a weight along a direction."""

        def move(way):
            weight.copy_(before + way * direction)

        told = slope(gradient, direction)
        losses = []
        for way in (step, -step):
            move(way)
            losses.append(float(self.evaluate(backward=False)))
        seen = (losses[0] - losses[1]) / (2 * step)
        rounding = ROUNDING * self.eps * max(map(abs, losses)) / step
        scale = max(abs(told), abs(seen))
        if not math.isfinite(told):
            return "wrong", told, seen
        if not math.isfinite(seen):
            return "unclear", told, seen
        if abs(told - seen) <= max(TOLERANCE * scale, rounding):
            is_visible = rounding <= LEAST_SEEN * scale or told == 0
            return "right" if is_visible else "unclear", told, seen
        # Somewhere on the way the slope is what is seen. Where it changes, the gradients at the ends differ.
        tells = [told]
        for way in (step, -step):
            move(way)
            self.evaluate()
            tells.append(slope(self.weights[name].grad, direction))
        slack = max(TOLERANCE * scale, rounding)
        is_between = min(tells) - slack <= seen <= max(tells) + slack
        return "unclear" if is_between else "wrong", told, seen


def refuse_low_precision(tensor):
    """Return a tensor that autograd saves for the backward pass; UsageError if it has fewer digits than fp32."""
    if tensor.is_floating_point() and tensor.element_size() < 4:
        kind = str(tensor.dtype).removeprefix("torch.")
        remedy = "leave out autocast, and give its inputs in fp32"
        raise llama.UsageError(f"the loss computes in {kind}, which rounds more than a step changes: {remedy}")
    return tensor


def first_line(error):
    """Return the first line of the message of an exception."""
    return str(error).partition("\n")[0]


def slope(gradient, direction):
    """Return a gradient, or 0 for None, along a direction."""
    return 0.0 if gradient is None else float(torch.sum(gradient.to_dense() * direction, dtype=torch.float64))


def report(findings):
    """Return the lines that tell Findings."""
    right, wrong, unclear = findings
    number = sum(map(len, findings))
    outcome = f"FAILED in {len(wrong)} of {number} weights" if wrong else f"passed ({number} weights)"
    lines = [f"Audit of the gradients: {outcome}"]
    lines += [f"    {name}: told {told:+.3g}, seen {seen:+.3g}" for name, told, seen in wrong]
    if unclear:
        lines.append(f"    unclear, not told from rounding or kinks: {', '.join(each.name for each in unclear)}")
    return lines


def check_step(config, device, batch):
    """Print the audit of a Config's training step and return whether no gradient is wrong.

    Kernels and sizes are those of the run, in full fp32, with at most 2 layers and the first 32 tokens of a batch.
    """
    tokens, targets = (tensor[:1, :AUDITED_TOKENS] for tensor in batch)
    sizes = dict(batch_size=1, accumulate=1, seq_len=tokens.shape[1], num_layers=min(config.num_layers, AUDITED_LAYERS))
    sizes |= dict(init_from=None, resume=None)  # whose model may have more layers
    step = llama.TrainStep(dataclasses.replace(config, use_amp=False, fp8=False, **sizes), device)
    step.load(tokens, targets)
    try:
        findings = audit(step.model, lambda: step.call_model(step.tokens, step.targets))
    except llama.UsageError as reason:  # the loss is not finite, for example
        print(f"Audit of the gradients: FAILED, as {reason}")
        return False
    print("\n".join(report(findings)))
    return not findings.wrong


def load(place):
    """Return the function that MODULE:FUNCTION or PATH.py:FUNCTION names; UsageError if there is none."""
    source, colon, function = place.rpartition(":")
    if not (source and function):
        raise llama.UsageError(f"{place} names no function: give MODULE:FUNCTION or PATH.py:FUNCTION")
    path = Path(source).resolve()
    is_file = source.endswith(".py")
    sys.path.insert(0, str(path.parent if is_file else Path.cwd()))  # where the file's own imports are found
    if is_file:
        if not path.is_file():
            raise llama.UsageError(f"{source} is no file: give MODULE:FUNCTION or PATH.py:FUNCTION")
        name = f"audited_{path.stem}"  # the script's own name would be taken
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(source)
        except ModuleNotFoundError as error:
            if error.name not in (source, source.partition(".")[0]):
                raise
            raise llama.UsageError(f"there is no module {source} here: give its name or PATH.py:FUNCTION") from error
    if not callable(getattr(module, function, None)):
        raise llama.UsageError(f"{source} has no function {function}: give one that returns (model, loss)")
    return getattr(module, function)


def run(argv):
    """Audit what a command line names. Return the exit code; UsageError for what cannot be audited."""
    if argv in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    if len(argv) != 1 or argv[0].startswith("-"):
        given = " ".join(argv) or "nothing"
        raise llama.UsageError(f"{given} is given: give one MODULE:FUNCTION or PATH.py:FUNCTION (--help says more)")
    pair = load(argv[0])()
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and callable(pair[1])):
        raise llama.UsageError(f"{argv[0]} returns {type(pair).__name__}: return (model, loss), loss a function")
    findings = audit(*pair)
    print("\n".join(report(findings)))
    return int(bool(findings.wrong))


def main(argv=None):
    """Run a command line and return the exit code. What cannot be audited takes one line."""
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return 130
    except llama.UsageError as error:
        print(f"tiny_llama.audit: error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
