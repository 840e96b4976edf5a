"""Checks of the tests at both ends of the workshop: an answer in a word, and what a mended piece does on a CPU.

Nothing is timed: what a GPU and its host would do is counted.
"""

import functools
import itertools
import math
import re
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch

from exercises.checks.common import NotYet, expect, expect_close, expect_from, randn, task, tasks_of, unchanged
from exercises.checks.memory import EXISTING, addresses
from exercises.checks.mutants import mistakes_of, with_mistake
from exercises.own_kernels import LINE, CountOperators, Counts
from exercises.probe import Observer, observed_by
from exercises.solutions import before
from exercises.solutions import examination as solution

COMPILED = ()  # on a GPU as well


def given():
    """Return the file that a participant begins with: the solution without answers, with the mistakes of the pieces."""
    path = Path(solution.__file__)
    code = re.sub(r'^(    "\w+": )"\w+"', r'\1""', path.read_text(), flags=re.M)
    for name, (mistake, *_) in mistakes_of(path).items():
        code = with_mistake(code, mistake, name)
    return code


WORDS = sorted({*solution.ANSWERS.values()})


def expect_answer(answer, wanted, module, hint):
    """Expect the word that says what is wrong with a piece; another text is no answer yet."""
    word = str(answer or "").strip().lower()
    if not word:
        raise NotYet(f"not begun: say in one word what is wrong with it, in {Path(module.__file__).name}")
    if word not in WORDS:
        raise NotYet(f"not begun: {answer!r} is none of the words {', '.join(WORDS[:-1])} and {WORDS[-1]}")
    expect(word == wanted, f"what is wrong is not {word!r}", hint)


def question(name):
    """Return the Task of the test before the workshop with this name, a letter."""

    def check(exercise):
        expect_answer(getattr(exercise, name), getattr(before, name), exercise, "the first answer counts")

    check.__name__ = name
    return task(())(check)


BEFORE = SimpleNamespace(TASKS=tasks_of(*map(question, "ABCDEF")), COMPILED=COMPILED)


def piece(hint):
    """Return the decorator that makes the Task to name a mistake and to mend it.

    results_of(module) yields {name: result}, or raises Wrong; what it checks behind the yield, it checks of right
    results. hint: what the results should be.
    """

    def task_of(results_of):
        @functools.wraps(results_of)
        def check(exercise):
            # The answer comes first, as what is said of a wrong mend would give it away.
            name = results_of.__name__
            asked = "which of the other words is it?"
            expect_answer(exercise.ANSWERS.get(name), solution.ANSWERS[name], exercise, asked)
            results = results_of(exercise)
            got = next(results)
            torch.manual_seed(0)  # for the same inputs
            for label, wanted in next(results_of(solution)).items():
                expect_close(got[label], wanted, 1e-4, hint, label)
            next(results, None)

        return task(())(check)

    return task_of


class Races(Observer):
    """Find out what a program does first with what another one has stored, or has changed by an atomic operation."""

    def __init__(self):
        self.found, self.owners = None, {}  # found: "loads" or "stores"
        self.stale, self.changed = False, {}  # stale: whether a program loads or replaces what another one changes

    def meets(self, owners, access):
        whose = map(owners.get, access.addresses[access.mask].tolist())
        return not {*whose} <= {None, access.program}

    def load(self, access):
        if self.meets(self.owners, access):
            self.found = self.found or "loads"
        self.stale |= self.meets(self.changed, access)

    def store(self, access):
        if self.meets(self.owners, access):
            self.found = self.found or "stores"
        self.owners |= dict.fromkeys(access.addresses[access.mask].tolist(), access.program)

    def atomic(self, access, loads):
        self.stale |= not loads and self.meets(self.changed, access)
        for address in access.addresses[access.mask].tolist():
            first = self.changed.setdefault(address, access.program)
            self.changed[address] = first if first == access.program else "several"


class Outside(Observer):
    """Leave out of loads and stores what lies outside of the kernel's tensors, and find out which comes first."""

    def __init__(self):
        self.found = None  # "loads" or "stores"

    def launch(self, kernel, tensors):
        self.known = np.concatenate([addresses(tensor) for tensor in tensors])

    def keep_inside(self, access, verb):
        inside = np.isin(access.addresses, self.known)
        if (access.mask & ~inside).any():
            self.found = self.found or verb
        access.mask = access.mask & inside

    def load(self, access):
        self.keep_inside(access, "loads")

    def store(self, access):
        self.keep_inside(access, "stores")

    def atomic(self, access, loads):
        self.keep_inside(access, "stores")


def nan_like(tensor, **kwargs):
    """Stand in for torch.empty_like: what nobody stores is NaN."""
    return torch.full_like(tensor, math.nan, **kwargs)


def result_of(call, name, *observers):
    """Return what a call gives, whose kernel of this name may not leave its tensors."""
    with observed_by(outside := Outside(), *observers):
        result = call()
    expect(not outside.found, f"{name} {outside.found} outside of its tensors", EXISTING)
    return result


@piece("each token adds 1 to the count of its expert, in whatever block it is; lanes beyond the end add nothing")
def count_tokens_kernel(module):
    # The last experts are chosen once by a block, or never.
    chosen, races = (8 * torch.rand(300) ** 3).long(), Races()
    call = functools.partial(module.tokens_per_expert, chosen, 8)
    with unchanged(chosen=chosen):
        counts = result_of(call, "count_tokens_kernel", races)
    told = f"a program {races.found} what another one has stored"
    expect(not races.found, told, "which of them comes first?")
    yield {"the number of tokens": counts}
    told = "a program loads or replaces what another one changes by an atomic operation"
    expect(not races.stale, told, "what if that happens between the load and the store?")
    expect_from(call, module, "count_tokens_kernel", counts)


@piece(
    "the output is that of F.linear with weight / (left @ weight @ right), in which only left and right are constants"
)
def spectral_linear(module):
    x, weight, left = randn(3, 6), randn(4, 6).requires_grad_(), randn(4)
    with unchanged(x=x, weight=weight, left=left):
        out, better = module.spectral_linear(x, weight, left)
    expect(out.requires_grad, "the weight receives no gradient", CUT)
    (out * randn(*out.shape)).sum().backward()
    expect(weight.grad is not None, "the weight receives no gradient", CUT)
    yield {"the output": out, "left": better, "the gradient of weight": weight.grad}


CUT = "where does the way from the weight to the output end?"


@piece(
    "only previous tokens change, each once: a positive score is divided by the penalty, another one multiplied by it"
)
def penalize_repetition(module):
    results, calls, sizes = {}, [], ((2, 3), (2, 9), (5, 3))
    for size in sizes:
        logits, previous = randn(size[0], 20), torch.randint(0, 20, size)
        with unchanged(logits=logits), CountOperators() as operators:
            results[f"the result for {size} tokens"] = module.penalize_repetition(logits, previous, 1.5)
        calls.append(operators.calls)
        kind = getattr(results[f"the result for {size} tokens"], "dtype", logits.dtype)
        expect(kind == logits.dtype, f"the result is of {kind}, the logits are of {logits.dtype}", "keep their type")
    told = f"it calls {calls} operators for {sizes} tokens"
    expect(len({*calls}) == 1, told, "their number should not depend on the sizes: is there a loop, or a list?")
    yield results


IN_ORDER = (
    "synchronize, clock, copy, copy, copy, synchronize, clock",
    "record, copy, copy, copy, record, synchronize, elapsed_time",  # of events
)
# By the last part of its name, what a call of the host does; others change nothing.
DOES = {name: name for name in ("copy", "clock", "synchronize", "record", "elapsed_time")}
DOES |= {"record_event": "record", "query": "synchronize"}  # an event is asked until the device is there


@piece("the bytes of all calls, divided by the seconds that they take and by 1e9")
def copy_bandwidth(module):
    # What the host asks of a GPU, and when. The clock shows seconds, and an event milliseconds: 4 s, as 1 s would not
    # tell a product from a quotient. 3 calls, as 2 would not be told from the two times that a copy moves each byte.
    host = mock.MagicMock()
    host.clock.side_effect = itertools.count(step=4)
    host.cuda.Event.return_value.elapsed_time.return_value = 4000
    names = "perf_counter", "monotonic", "time"
    clocks = {name: host.clock for name in names} | {f"{name}_ns": lambda: host.clock() * 10**9 for name in names}
    with mock.patch.multiple(torch, cuda=host.cuda, accelerator=host.accelerator), mock.patch.multiple(time, **clocks):
        told = module.copy_bandwidth(host.copy, 1e9, 3)
    order = ", ".join(DOES[name] for name in (call[0].split(".")[-1] for call in host.mock_calls) if name in DOES)
    expect(
        order.endswith(IN_ORDER),
        f"for 3 calls the host calls {order}",
        f"what does the device do when the clock is read? Expected at the end: {', or '.join(IN_ORDER)}",
    )
    begin, reads = order.split(", "), {"clock", "record"}
    warm = "copy" in itertools.takewhile(lambda call: call not in reads, begin)
    expect(warm, f"for 3 calls the host calls {order}", "the first call also compiles: one comes before the clock")
    yield {"the bandwidth for 1 GB and 3 calls in 4 s": torch.tensor(told)}


@piece("y[i, j] = x[i, j] / factor[j], of all rows and columns: has each block a program in the grid?")
def divide_columns_kernel(module):
    x, factor, counts = randn(45, 96), torch.rand(96) + 0.5, Counts()
    call = functools.partial(module.divide_columns, x, factor)
    # The last block of 256 is not full.
    with mock.patch.object(torch, "empty_like", nan_like):
        y = result_of(call, "divide_columns_kernel", counts)
    y.stored = ~y.isnan()
    # Those of x and y once, and as many again for what straddles two and for the factors.
    fact = f"it touches {counts.lines:,} cache lines, for {2 * x.nbytes // LINE} of x and y"
    expect(counts.lines < 4 * x.nbytes / LINE, fact, "which elements do the lanes of a wave load together?")
    yield {"the result": y}
    expect_from(call, module, "divide_columns_kernel", y)


@piece(
    "the loss is the sum of those of all tokens, divided by the number of all targets but -100; every batch adds to it"
)
def accumulate_gradients(module):
    model = torch.nn.Embedding(11, 11)
    batches = [torch.randint(0, 11, (2, *size)).unbind() for size in ((2, 9), (1, 4), (3, 2))]
    batches[0][1][:, 5:] = -100
    model.weight.grad = randn(11, 11) / 10  # of batches before these
    loss = module.accumulate_gradients(model, batches)
    expect(model.weight.grad is not None, "the weights receive no gradient", "where does the way to the loss end?")
    yield {"the gradient": model.weight.grad, "the loss": torch.as_tensor(loss)}
    graph = "the returned loss still has its graph"
    expect(not getattr(loss, "requires_grad", False), graph, "it keeps memory of all batches: .item() or .detach()")


TASKS = tasks_of(
    count_tokens_kernel,
    spectral_linear,
    penalize_repetition,
    copy_bandwidth,
    divide_columns_kernel,
    accumulate_gradients,
)
