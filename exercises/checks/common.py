"""What the checks of all exercises share: tasks, comparing, and memory that shows what was stored."""

import contextlib
import math
import re
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch

from exercises.checks import DEVICE


class Wrong(Exception):
    """What is wrong with a result, and a hint where to look.

    got: the result in fp64, if it is a tensor. of: what it is of, so that only the same are compared; without it, the
    fact. case: what the check was given beside the module, in a check.
    """

    case = None

    def __init__(self, fact, hint, of=None, got=None, tolerance=0.0):
        super().__init__(fact, hint)
        self.fact, self.hint, self.got, self.tolerance = fact, hint, got, tolerance
        self.of = of or LINES.sub("", fact)

    def __str__(self):
        return f"{self.fact}: {self.hint}"

    def is_like(self, other, share):
        """Tell whether the other one is wrong in the same way, within a share of the tolerance."""
        if self.got is None or other.got is None:
            return self.of == other.of and LINES.sub("", self.fact) == LINES.sub("", other.fact)
        same_kind = self.of == other.of and self.got.shape == other.got.shape
        return same_kind and not differs(self.got, other.got, self.tolerance * share).any()

    def is_empty(self):
        """Tell whether the result is that of a kernel which is not written yet: nothing, or zeros."""
        return self.got is not None and not (self.got.isfinite() & (self.got != 0)).any()


LINES = re.compile(r"\blines? [\d, and]+")  # of the participant's file: an edited solution has others


class NotYet(Exception):
    """A task that cannot be judged before another one passes."""


class Task(NamedTuple):
    """A task of an exercise: its name is that of the function which it asks for."""

    check: Callable  # check(module, *case) raises Wrong
    cases: tuple
    needs: tuple = ()  # the tasks that come first

    def __call__(self, module):
        """Check the function of a module in all cases; Wrong has the `case` that fails first."""
        for need in self.needs:
            try:
                need(module)
            except Exception as error:  # whatever the code under test does
                raise NotYet(f"not checked before {need.check.__name__} passes") from error
        for case in self.cases:
            try:
                self.run(module, case)
            except Wrong as wrong:
                wrong.case = case
                raise

    def run(self, module, case):
        """Check one case, always with the same inputs, so that a mistake in the solution gives the same result."""
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # from numpy, for unfinished kernels in the interpreter
            self.check(module, *case)


def task(*cases, needs=()):
    """Turn the check of a case into the Task of these cases."""
    return lambda check: Task(check, cases, needs)


def tasks_of(*tasks):
    return {each.check.__name__: each for each in tasks}


def kind_of(found, right):
    """Say how computed numbers differ from the right ones, in all cases alike; "" if nothing stands out."""
    if found[0] is None:
        return "is it returned?"
    if not isinstance(found[0], (int, float, tuple)):
        return f"a {type(found[0]).__name__} is returned"
    if isinstance(found[0], tuple) and any(isinstance(each, list | tuple) for each in found[0]):
        return "lists are returned, where their lengths are asked for"
    if isinstance(right[0], int) and not isinstance(found[0], tuple):
        ratios = [got / wanted for got, wanted in zip(found, right, strict=True)]
        if max(ratios) - min(ratios) < 1e-9 * abs(max(ratios)):
            return f"always {ratios[0]:.4g} times what is expected"
    return ""


def counting(name, solution, hint, *cases):
    """Return the Task to compute the numbers that the solution computes."""

    def check(exercise):
        found, right = ([getattr(module, name)(*sizes) for sizes in cases] for module in (exercise, solution))
        found = [tuple(got) if isinstance(got, list) else got for got in found]
        for sizes, got, wanted in zip(cases, found, right, strict=True):
            if got != wanted:
                # All of them, as in one case two mistakes may count the same.
                said = "; ".join(filter(None, (kind_of(found, right), hint)))
                raise Wrong(f"{name}{sizes} is {got!r}, expected {wanted!r}", said, of=repr(found))

    check.__name__ = name
    return task(())(check)


# ----------------------------------------------------------------------------------------------------------------------
# Comparing


CAST = "right in fp32: is .to(tl.float32) behind each load, and does all stay in fp32 up to the store?"


def expect(condition, fact, hint):
    if not condition:
        raise Wrong(fact, hint)


def expect_several(got, *names):
    """Expect a tuple with an element for each of the names."""
    right = isinstance(got, tuple | list) and len(got) == len(names)
    expect(right, f"{str(got)[:200]} is returned", f"expected ({', '.join(names)})")


def differs(got, wanted, tolerance):
    """Tell which elements of fp64 tensors are further apart than tolerance, relative and absolute; NaN is like NaN."""
    return ~torch.isclose(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


def expect_close(result, wanted, tolerance, hint, name=None):
    """Compare tensors in fp64. The fact names the first element that differs, the hint begins with the symptom.

    name: of the result; one that launch() returned has a name.
    """
    name = name or result.label
    expect(isinstance(result, torch.Tensor), f"{name} is {result!r}, not a tensor", "is it returned?")
    got, wanted = result.detach().double().cpu(), wanted.detach().double().cpu()
    shapes = f"{name} has the shape {tuple(got.shape)}, expected {tuple(wanted.shape)}"
    expect(got.shape == wanted.shape, shapes, hint)
    bad = differs(got, wanted, tolerance)
    # launch() leaves this where it may say more than the numbers.
    stored = getattr(result, "stored", torch.ones_like(bad))
    bad |= ~stored
    if not bad.any():
        return
    undefined = getattr(result, "undefined", lambda: None)()
    where = tuple(bad.nonzero()[0].tolist())
    value, good = got[where].item(), wanted[where].item()
    digits = 5 if f"{value:.5g}" != f"{good:.5g}" else 12
    described = f"{value:.{digits}g}"
    if not stored[where]:
        described = "never stored"
    elif math.isnan(value):
        described = "NaN, of a computation (0 / 0, inf - inf, the root of a negative number)"
    if not stored.any():
        symptom = f"nothing is stored in {name}: is there a tl.store, and does its mask let any lane through?"
    elif undefined:
        symptom = (
            f"what the mask in line {undefined} leaves out may be anything, here infinity: give it a value, other="
        )
    elif torch.equal(bad, ~stored):
        whole = stored.flatten(1).all(dim=1) if stored.ndim > 1 else stored
        shown = f"only {ranges(whole) or 'parts of rows'} is stored, and right"
        symptom = f"{shown}: the mask leaves out the rest, or no program's block has it"
    else:
        symptom = symptom_of(got, wanted, bad)
        if not symptom or symptom.startswith("only these"):
            symptom = of_programs(getattr(result, "owner", None), bad) or symptom
    count = f"{int(bad.sum())} of {bad.numel()} elements of {name} {'is' if bad.sum() == 1 else 'are'} wrong"
    fact = f"{count}: at {where} it is {described}, expected {good:.{digits}g}"
    hint = "; ".join(filter(None, (symptom, hint)))
    raise Wrong(fact, hint, (name, got.shape, bool(stored.all()), bool(undefined)), got, tolerance)


def symptom_of(got, wanted, bad):
    """Say how got differs from wanted, both fp64, in words that hold for any cause; "" if nothing stands out."""

    def same(one, other):
        return not differs(one, other, 1e-4).any()

    kind, error, ratio = "rows" if got.ndim > 1 else "elements", got - wanted, got / wanted
    off = error.abs().max() / wanted.abs().max()
    if got.isfinite().all() and wanted.isfinite().all():
        if not got.any():
            return "it is all zeros"
        middle = ratio.median()
        if abs(middle - 1) > 1e-3 and ((ratio - middle).abs() <= 0.02 * (middle - 1).abs()).all():
            return f"every element is {middle:.4g} times what is expected"
        if off > 0.01 and len(got) > 1 and same(got, got[:1].expand_as(got)):
            return f"all {kind} are the same: is each computed from its own inputs?"
        if off > 0.01 and same(got.abs(), wanted.abs()):
            return "right but for the sign"
        if off > 0.01 and got.numel() > 1 and same(error, error.flatten()[:1].expand_as(error)):
            return f"every element is {error.abs().max():.4g} too {'large' if error.max() > 0 else 'small'}"
        # Rounding errs to both sides.
        if off < 0.01 and 0.1 < (error[bad] > 0).double().mean() < 0.9:
            precision = "fp32, where the inputs are fp64" if off < 1e-6 else "fp16 or bf16"
            return f"right but for the last digits: is something computed or stored in {precision}?"
        if off > 0.01 and same(got.flatten().sort().values, wanted.flatten().sort().values):
            return "the values are right, but in another order: look at the offsets of loads and stores"
    right = ~bad.flatten(1).any(dim=1) if bad.ndim > 1 else ~bad
    return f"only these {kind} are right: {ranges(right)}" if right.double().mean() > 0.1 else ""


def of_programs(owner, bad):
    """Say so if only program 0 computes what is right; owner: the number of the program that stored each element."""
    if owner is None or bad[owner == 0].any() or not owner[bad].unique().tolist() == list(range(1, owner.max() + 1)):
        return ""
    return "only what program 0 stores is right: which address of the others does not move with tl.program_id?"


def ranges(flags):
    """Return where flags are set as text: 0-3, 8, 10-11; with ... after the sixth range."""
    runs = re.finditer("1+", "".join(str(int(flag)) for flag in flags))
    shown = [re.sub(r"\b(\d+)-\1\b", r"\1", f"{run.start()}-{run.end() - 1}") for run in runs]
    return ", ".join([*shown[:6], "..."] if len(shown) > 6 else shown)


@contextlib.contextmanager
def unchanged(**inputs):
    """Raise Wrong if the code within changes one of these tensors."""
    before = {name: tensor.detach().clone() for name, tensor in inputs.items()}
    yield
    for name, tensor in inputs.items():
        expect(
            torch.equal(tensor, before[name]),
            f"{name} is an input, and was changed in place",
            "by +=, *=, a method whose name ends with _, or a store; make a new tensor instead",
        )


def expect_from(call, module, name, result):
    """Expect that the result of a call comes from a kernel of the module: it is another one if the kernel does nothing.

    name: of the kernel.
    """
    kernel = getattr(module, name)
    expect(hasattr(kernel, "run"), f"{name} is no kernel", "@triton.jit stands above it")
    run = kernel.run

    def spoiled(*args, **kwargs):
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
        before = [tensor.clone() for tensor in tensors]
        run(*args, **kwargs)
        for tensor, old in zip(tensors, before, strict=True):
            if not torch.equal(tensor, old):
                tensor.copy_(tensor * 2 + 1)

    with mock.patch.object(kernel, "run", mock.Mock(side_effect=spoiled)) as launched:
        other = call()
    expect(launched.called, f"{name} was not launched", "it is the kernel that is asked for: launch it for the result")
    expect(
        not torch.equal(other, result),
        f"{name} was launched, but the result does not come from it",
        "return what the kernel has stored",
    )


# ----------------------------------------------------------------------------------------------------------------------
# Memory that shows what was stored

FP32, HALF = torch.float32, torch.float16
TOLERANCE = {FP32: 1e-5, HALF: 0.55 * 2**-10}  # half an eps is what rounding to the type costs
GUARD = 4096  # elements behind a result that a store without a mask may hit on a GPU


def randn(*shape, dtype=FP32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def unwritten(*shape, dtype=FP32):
    """Return a tensor of NaN in which nothing is stored yet; its `behind` is the memory behind it."""
    buffer = torch.full((math.prod(shape) + GUARD,), math.nan, device=DEVICE, dtype=dtype)
    tensor = buffer[:-GUARD].view(shape)
    tensor.behind = buffer[-GUARD:]
    return tensor


# The imports, and then each function or class with its decorators.
PART = re.compile(r"((?:^@[\s\S]*?)?^(?:def|class) +(\w+))?[\s\S]*?(?=^@|^def |^class |\Z)", re.M)
METHODS = {*vars(torch.Tensor)}  # without those of its base class


def load(path):
    """Return the module in a file. Whoever asks for a function that cannot be defined gets its error; others are there.

    What the code replaces in libraries and in the checks is put back, so that it is not judged by its own functions.
    """
    module, errors = ModuleType(path.stem), {}
    module.__file__ = str(path)

    def missing(name):
        if name in errors:  # perhaps an AttributeError, which hasattr() would take for no function at all
            raise ImportError(f"{name} cannot be defined") from errors[name]
        raise AttributeError(name)

    module.__getattr__ = missing
    checks = (each for name, each in sys.modules.items() if name.startswith("exercises."))
    with contextlib.ExitStack() as put_back:
        for judge in (torch, torch.nn.functional, np, math, *checks):
            put_back.enter_context(mock.patch.dict(vars(judge)))
        code = path.read_text(encoding="utf-8-sig")
        for part in PART.finditer(code):
            try:
                # The empty lines before it keep the numbers of its lines.
                exec(compile("\n" * code.count("\n", 0, part.start()) + part[0], path, "exec"), vars(module))
            except (Exception, SystemExit) as error:
                if not part[2]:
                    raise
                errors[part[2]] = error
    for name in vars(torch.Tensor).keys() - METHODS:
        delattr(torch.Tensor, name)
    return module
