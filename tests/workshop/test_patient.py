"""The patient: its own task finds each of its mistakes, wrong mends are refused, and right ones of any kind pass."""

import re

import pytest

import tiny_llama_v3 as llama
from exercises import check, scoreboard
from exercises.checks import ON_GPU, patient
from exercises.checks.common import PART

pytestmark = pytest.mark.skipif(llama.triton is None or ON_GPU, reason="the checks interpret")
GIVEN = (check.SOLUTIONS.parent / "patient.py").read_text()
SOLUTION = (check.SOLUTIONS / "patient.py").read_text()
# Where the mistake that a task finds is: functions and classes in which the two files differ.
PLACES = {"gradients": ["SiluMulFunction", "silu_mul"], "loss": ["Model"], "clock": ["clock"]}
SEEN = {
    "gradients": r"of 14 of 16 weights the gradient does not tell how the loss changes: \S+: told \S+, seen \S+$",
    "loss": r"the first loss is 61.\d+, of a model that knows nothing; one that guesses has 4.16: ",
    "clock": r"a CPU is busy for 3000 ms in the first call and .*: clock\(step, 20\) returns 171.90 ms a step: ",
}


def parts_of(code):
    """Return {name: code} of the functions and classes in a file, and of what is between them."""
    return {part[2] or number: part[0] for number, part in enumerate(PART.finditer(code)) if part[0]}


def sick(*tasks):
    """Return the solution with the mistakes that these tasks find."""
    given, code = parts_of(GIVEN), SOLUTION
    for name in (name for task in tasks for name in PLACES[task]):
        code = code.replace(parts_of(SOLUTION)[name], given.get(name, ""))
    return code


@pytest.fixture
def verdict(tmp_path):
    """verdict(code, task) judges a program."""

    def judged(code, task):
        (tmp_path / "patient.py").write_text(code)
        return check.judge(tmp_path / "patient.py", check.JUDGED["patient"], task)

    return judged


def replaced(code, *edits):
    for old, new in edits:
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return code


def test_the_given_file_has_these_mistakes_and_no_others():
    assert sick(*PLACES) == GIVEN and PLACES.keys() == patient.TASKS.keys()
    assert not re.search("BUG|FILL ME IN|mistake|wrong|sever|cold|warm|sync", GIVEN, re.I)


@pytest.mark.parametrize("mistake", PLACES)
def test_a_mistake_alone_is_found_by_its_task_only(mistake, verdict):
    for task in PLACES:
        found = verdict(sick(mistake), task)
        assert found.passed == (task != mistake), found.message
        assert found.passed or re.match(SEEN[task], found.message), found.message


def test_the_given_file_fails_each_task_and_the_solution_none(tmp_path, capsys):
    options = ["--progress", str(tmp_path / "progress.json")]
    (tmp_path / "patient.py").write_text(GIVEN)
    assert check.main(["patient", "--file", str(tmp_path / "patient.py"), *options]) == 1
    *told, passed, summary = capsys.readouterr().out.replace("\n      ", " ").splitlines()
    for line, task in zip(told, PLACES, strict=True):
        assert re.match(f"FAIL  {task}: {SEEN[task]}", line), line
    assert passed == "patient: 0 of 3 tasks pass"
    assert summary == f"0 of {len(check.all_tasks())} done; next: gradients (patient)"
    assert check.main(["patient", "--solution"]) == 0
    assert [*scoreboard.board_of([tmp_path / "progress.json"])["marks"]["patient"]] == [*PLACES]
    assert check.main(options) == 0
    assert re.search("patient +clock +not yet, 1 attempt\n", capsys.readouterr().out)


SILU_MUL = "    return SiluMulFunction.apply(gate, up)\n"
CUT = "    y = SiluMulFunction.apply(gate, up).detach()\n"
BACKWARD = "y_grad * up * (sigmoid + silu * (1 - sigmoid)), y_grad * silu"
NORM = "        return RMSNormFunction.apply(x.contiguous(), self.weight)\n"
PRINT = 'print(f"step {here:2}: loss {value:.4f}")'
MEAN = "    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())"
INIT = "        nn.init.normal_(self.embedding.weight, std=0.02)\n"
WARM = "    losses = [step()]  # compiles and allocates, once\n    synchronize()\n"
LATER = "    losses += [step() for _ in range(number - 1)]\n    synchronize()\n"
RESULT = "    return (time.perf_counter() - start) * 1e3 / (number - 1), losses\n"
TIMED = WARM + "    start = time.perf_counter()\n" + LATER + RESULT
EACH = """    times = []
    for _ in range(number - 1):
        start = time.perf_counter()
        losses.append(step())
        synchronize()
        times.append((time.perf_counter() - start) * 1e3)
"""


def slow(*values):
    """Return a case with an audit, which takes seconds; others are among the fast ones."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("task, edits, told", [
    # The gradient is whole, but the function is another one.
    ("gradients", [(NORM, "        return x * self.weight\n")], "elements of the logits are wrong"),
    ("gradients", [("self.embedding.weight)\n\n\n", "self.embedding.weight) * DIM**-0.5\n\n\n")],
     "elements of the logits are wrong"),
    ("gradients", [("HIDDEN_DIM, LAYERS = 64, 64, 4, 128, 2", "HIDDEN_DIM, LAYERS = 64, 64, 4, 128, 1")],
     "layers.1.attention_norm.weight, layers.1.down.weight, .*: not a weight as it was given"),
    ("gradients", [("self.down = nn.Linear(HIDDEN_DIM, DIM, bias=False)",
                    "self.down = nn.Linear(HIDDEN_DIM, DIM, bias=False)\n        self.gate.requires_grad_(False)")],
     "layers.0.gate.weight, layers.1.gate.weight: not a weight as it was given"),
    # The function is right, and the gradient is not.
    slow("gradients", [(SILU_MUL, CUT + "    return y.requires_grad_()\n")], "of 14 of 16 weights the gradient"),
    ("gradients", [(SILU_MUL, "    return SiluMulFunction.apply(gate.detach(), up)\n")],
     r"of \d+ of 16 weights .*told .*, seen"),
    ("gradients", [(BACKWARD, "y_grad * up * sigmoid, y_grad * silu")], "weights the gradient does not tell"),
    slow("gradients", [(BACKWARD, "y_grad * up * (sigmoid + silu * (1 - sigmoid)), None")], "weights the gradient"),
    slow("gradients", [(BACKWARD, BACKWARD.replace("y_grad", "y_grad.bfloat16()"))], "stays in fp32"),
    ("gradients", [("    value.backward()", "    (2 * value).backward()")],
     "of the gradient of embedding.weight are wrong"),
    ("gradients", [("    model.zero_grad()\n", "")], "every element is 2 times what is expected; .* second time"),
    ("gradients", [("    value.backward()\n", "")], "embedding.weight has no gradient after"),
    ("gradients", [(MEAN, MEAN[:-1] + ", reduction='none')")], "the loss is of the shape"),
    ("loss", [(INIT, ""), ("loss {value:.4f}", "loss {min(value, 4.16):.4f}")], "loss 4.16.* is printed of a batch"),
    ("loss", [(INIT, ""), (PRINT, "pass")], "prints 0 lines"),
    ("loss", [(INIT, ""), (MEAN, MEAN.replace("F.", "0.067 * F."))],
     r"loss\(\) is \S+ for logits whose mean cross-entropy is"),
    ("loss", [("logits[:, :-1].flatten(0, 1), tokens[:, 1:]", "logits.flatten(0, 1), tokens")], r"loss\(\) is"),
    ("loss", [(MEAN, MEAN[:-1] + ", reduction='sum') / tokens.numel()")],
     r"loss\(\) is"),
    ("loss", [("in enumerate(losses)", "in enumerate(losses[1:])")], "12 times and prints 11 lines"),
    ("loss", [("std=0.02", "std=0")], "the loss begins at 4.1589 and is 4.1589"),
    ("loss", [(INIT, "        nn.init.normal_(self.embedding.weight, std=0.5)\n")], "the first loss is 2"),
    ("clock", [(WARM, "    losses = []\n"), ("range(number - 1)", "range(number)"), ("/ (number - 1)", "/ number")],
     "a CPU is busy"),
    # A CPU does not see that nobody waits for the device, in the end or before the beginning.
    ("clock", [(LATER, LATER.replace("    synchronize()\n", ""))], "a device that works on .* returns 1.00 ms"),
    ("clock", [(WARM, WARM.replace("    synchronize()\n", ""))], "a device that works on"),
    # The host's own time stands still while it waits.
    ("clock", [(TIMED, TIMED.replace("perf_counter", "process_time"))], "a device that works on .* returns 1.00 ms"),
    # Nobody waits for the last step.
    ("clock", [(LATER, "    for _ in range(number - 1):\n        synchronize()\n        losses.append(step())\n")],
     r"a device that works on .* clock\(step, 5\) returns"),
    ("clock", [(RESULT, "    return 50.0, losses\n")], "a CPU is busy .* returns 50.00 ms"),
    ("clock", [(LATER, EACH), (RESULT, "    return min(times), losses\n")], "a CPU is busy .* returns 20.00 ms"),
    # A single step, the second or the last, tells little of the others.
    ("clock", [(LATER, EACH), (RESULT, "    return times[0], losses\n")], "a CPU is busy .* returns 20.00 ms"),
    ("clock", [(LATER, EACH), (RESULT, "    return times[-1], losses\n")], "a CPU is busy .* returns 20.00 ms"),
    ("clock", [("range(number - 1)", "range(3)"), ("/ (number - 1)", "/ 3")], "calls step 4 times"),
    ("clock", [(WARM, WARM.replace("[step()]", "[step() and step()]"))], "step 21 times and returns 20 losses"),
    ("clock", [("= clock(step, number)", "= 5.0, [step() for _ in range(number)]")], "does not call clock"),
    ("clock", [('.0f} tokens a second', '.0f} tokens/s')], "train.. prints no line"),
    ("clock", [('print(f"{ms:.2f} ms', 'print(f"{ms / 2:.2f} ms')], "train.. prints 25.00 ms a step"),
    ("clock", [("SEQ_LEN * 1e3 / ms:", "SEQ_LEN * 2e3 / ms:")], "prints 50.00 ms a step, 10240 tokens a second"),
])  # fmt: skip
def test_a_wrong_mend_is_refused(task, edits, told, verdict):
    found = verdict(replaced(SOLUTION, *edits), task)
    assert not found.passed and re.search(told, found.message), found.message


OWN_KERNEL = """
@triton.jit
def silu_mul_backward_kernel(gate_ptr, up_ptr, y_grad_ptr, gate_grad_ptr, up_grad_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n_elements
    gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0)
    up = tl.load(up_ptr + offsets, mask=mask, other=0.0)
    y_grad = tl.load(y_grad_ptr + offsets, mask=mask, other=0.0)
    sigmoid = tl.sigmoid(gate)
    tl.store(gate_grad_ptr + offsets, y_grad * up * sigmoid * (1 + gate * (1 - sigmoid)), mask=mask)
    tl.store(up_grad_ptr + offsets, y_grad * gate * sigmoid, mask=mask)


class SiluMulFunction("""
LAUNCH = """        gate_grad, up_grad = torch.empty_like(gate), torch.empty_like(up)
        grid = (triton.cdiv(gate.numel(), 1024),)
        tensors = gate, up, y_grad.contiguous(), gate_grad, up_grad
        silu_mul_backward_kernel[grid](*tensors, gate.numel(), BLOCK=1024)
        return gate_grad, up_grad
"""
EVENTS = """    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    losses = [step() for _ in range(3)]
    start.record()
    losses += [step() for _ in range(number)]
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / number, losses
"""
READ = TIMED.replace("    synchronize()\n", "    losses[-1].item()\n").replace("time.perf_counter", "perf_counter")
WINDOW = """    losses = [step()]
    return window_ms(lambda: losses.append(step()), number, torch.device(DEVICE)), losses
"""


@pytest.mark.parametrize("task, edits", [
    ("gradients", [(SILU_MUL, "    return F.silu(gate) * up\n")]),
    ("gradients", [("\nclass SiluMulFunction(", OWN_KERNEL),
                   ("        sigmoid = torch.sigmoid(gate)\n        silu = gate * sigmoid\n", ""),
                   (f"        return {BACKWARD}\n", LAUNCH)]),
    # One product for both, and weights that keep their names.
    ("gradients", [("silu_mul(self.gate(normed), self.up(normed))", "silu_mul(*both)"),
                   ("        return x + self.down",
                    "        product = F.linear(normed, torch.cat((self.gate.weight, self.up.weight)))\n"
                    "        both = (each.contiguous() for each in product.chunk(2, dim=-1))\n"
                    "        return x + self.down")]),
    slow("gradients", [("    model.zero_grad()\n", "    for w in model.parameters():\n        w.grad = None\n")]),
    ("loss", [(INIT, "        self.embedding.weight.data.mul_(0.02)\n")]),
    ("loss", [(INIT, "        nn.init.trunc_normal_(self.embedding.weight, std=0.03)\n")]),
    ("loss", [(MEAN,
               "    chosen = logits[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]\n"
               "    return (logits[:, :-1].logsumexp(-1) - chosen).mean()")]),
    ("clock", [(LATER, EACH), (RESULT, "    return sorted(times)[len(times) // 2], losses\n")]),
    ("clock", [(TIMED, f'    if DEVICE == "cuda":\n{re.sub("^", "    ", EVENTS, flags=re.M)}\n{TIMED}')]),
    ("clock", [("import time\n", "import time\nfrom time import perf_counter\n"), (TIMED, READ)]),
    ("clock", [(TIMED, re.sub(r"synchronize\(\)", "torch.stack(losses).mean().tolist()", TIMED))]),
    ("clock", [(TIMED, re.sub(r"synchronize\(\)", "float(losses[-1])", TIMED).replace("perf_counter", "monotonic"))]),
    ("clock", [("import torch\n", "import torch\nfrom measure.timing import window_ms\n"), (TIMED, WINDOW)]),
])  # fmt: skip
def test_another_right_mend_passes(task, edits, verdict):
    code = replaced(SOLUTION, *edits)
    found = verdict(code, task)
    assert found.passed, found.message
