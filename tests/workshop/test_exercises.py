"""The exercises: solutions pass, stubs fail with a reason for every task, and whatever code does is told."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import tiny_llama_v3 as llama
from exercises import check, progress_file
from exercises.checks import ON_GPU, common, exercise3, memory
from exercises.jupyter import CELLS

FOLDER = Path(__file__).resolve().parents[2] / "exercises"
pytestmark = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")
NAMES = list(check.EXERCISES)
TOTAL = len(check.all_tasks())


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """mine(exercise, code, *options) checks a participant's file, in a folder with its own progress."""

    def checked(name, code, *options):
        (tmp_path / check.EXERCISES[name].file).write_text(code)
        return check.main([name, *options])

    monkeypatch.setattr(check, "HERE", tmp_path)
    return checked


def solution_of(name):
    return (check.SOLUTIONS / check.EXERCISES[name].file).read_text()


def said(capsys):
    """What was printed, the lines joined that were wrapped."""
    printed = capsys.readouterr().out
    assert all(len(line) <= 100 for line in printed.splitlines())
    return printed.replace("\n      ", " ")


CHEAT = "import torch\ntorch.isclose = torch.equal = torch.Tensor.any = lambda *args, **kwargs: torch.zeros(1) > 0\n"


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_passes_and_the_stub_is_not_written_yet(name, mine, capsys):
    tasks = list(check.EXERCISES[name].checks.TASKS)
    assert check.main([name, "--solution"]) == 0
    passed = f"{name}: {len(tasks)} of {len(tasks)} tasks pass in the solution"
    assert said(capsys).splitlines() == [*(f"PASS  {task}" for task in tasks), passed]
    assert mine(name, (FOLDER / check.EXERCISES[name].file).read_text() + CHEAT) == 1  # what judges is put back
    *lines, passed, summary = said(capsys).splitlines()
    assert [line[: 6 + len(task)] for line, task in zip(lines, tasks, strict=True)] == [f"FAIL  {t}" for t in tasks]
    assert all(re.search("not written yet, FILL ME IN|not checked before", line) for line in lines)
    assert passed == f"{name}: 0 of {len(lines)} tasks pass"
    assert summary == f"0 of {TOTAL} done; next: {progress_file.steps_of(name)[0][1]} ({name})"


def lines_of(code):
    """The lines of a module as Python sees them, without docstrings and blanks."""
    code = re.sub(r'""".*?"""', '""', re.sub(".*FILL ME IN.*\n", "", code), flags=re.S)
    return [line for line in ast.unparse(ast.parse(code)).splitlines() if '""' not in line]


@pytest.mark.parametrize("name", NAMES)
def test_stub_and_solution_differ_in_the_blanks_only(name):
    stub, solution = (FOLDER / check.EXERCISES[name].file).read_text(), solution_of(name)
    # Of row_max_kernel a line is to be corrected.
    kept = [line for line in lines_of(stub) if "cols < BLOCK_SIZE, other=0.0" not in line]
    assert {*kept} <= {*lines_of(solution)} and "FILL ME IN" not in solution


def test_fold_gives_a_softmax():
    scores, values = torch.randn(3, 20), torch.randn(20, 2)
    state = torch.full((3,), -torch.inf), torch.zeros(3), torch.zeros(3, 2)
    for tile in torch.arange(20).split(7):
        _, l, acc = state = exercise3.solution.fold(*state, scores[:, tile], values[tile])
    torch.testing.assert_close(acc / l[:, None], scores.softmax(1) @ values)


@pytest.mark.parametrize("function, arguments, wanted", [
    # 35 programs, each of 3 * 13 elements that it loads and 3 that it stores, of 2 bytes
    ("naive_bytes", (7, 13, 5, 2), 35 * 42 * 2),
    ("least_bytes", (7, 13, 5, 2), (91 + 130 + 105) * 2),
    ("matmul_flop", (7, 13, 5), 1820),
    ("bytes_moved", (5, 3, 2), (60, 210)),  # 30 bytes of x: in and out; of four kernels the mean only reads
    ("memory_lines", (3, 4, 25), 2),  # at bytes 0, 100, 200
    ("memory_lines", (3, 4, 25, 64), 3),
    ("memory_lines", (64, 4, 1, 64), 4),
    ("key_blocks", (3, 64, 32, 200), (6, 1)),  # queries 192 to 199: keys 0 to 191 in full, the last eight in part
    ("key_blocks", (1, 5, 3, 100), (2, 2)),  # queries 5 to 9: blocks from 0 and 3 in full, from 6 and 9 in part
])  # fmt: skip
def test_what_the_checks_take_for_right_is(function, arguments, wanted):
    (name,) = (name for name, exercise in check.EXERCISES.items() if function in exercise.checks.TASKS)
    solution = check.load(check.SOLUTIONS / check.EXERCISES[name].file)
    assert getattr(solution, function)(*arguments) == wanted


# --- comparing


def told(got, wanted=None, tolerance=1e-3):
    """What is Wrong with a tensor."""
    with pytest.raises(common.Wrong) as raised:
        common.expect_close(got, torch.ones(4) if wanted is None else wanted, tolerance, "hint", "y")
    return raised.value


def test_nan_of_a_computation_is_told_from_what_was_never_stored():
    got = torch.tensor([1.0, torch.nan, torch.nan, 1])
    got.stored = torch.tensor([True, False, True, True])
    wrong = "2 of 4 elements of y are wrong: at (1,) it is never stored, expected 1"
    assert str(told(got)) == f"{wrong}: only these elements are right: 0, 3; hint"
    got.stored[1] = True
    assert "at (1,) it is NaN, of a computation (0 / 0" in str(told(got))


ROWS = torch.tensor([[1.25, 2.5, 3.25], [5.5, 8.25, 13.5]])
BOTH_WAYS = torch.tensor([[1.0, -2.0, 1.0], [-3.0, 2.0, -4.0]]).double()


@pytest.mark.parametrize("got, symptom", [
    (ROWS * 0, "it is all zeros"),
    (ROWS * 1.5, "every element is 1.5 times"),
    (ROWS[:1].expand(2, 3), "all rows are the same"),
    (ROWS + 1e-3 * BOTH_WAYS, "computed or stored in fp16 or bf16"),
    (ROWS + 1e-7 * BOTH_WAYS, "fp32, where the inputs are fp64"),
    (ROWS.flatten()[[0, 2, 1, 3, 5, 4]].view(2, 3), "in another order"),
    (ROWS + torch.tensor([[0.0, 0.0, 0.0], [1.0, 7.0, 2.0]]), "only these rows are right: 0;"),
    (torch.arange(20.0) * (torch.arange(20) % 3 != 1), "right: 0, 2-3, 5-6, 8-9, 11-12, 14-15, ...;"),
])  # fmt: skip
def test_the_symptom_is_told(got, symptom):
    wanted = ROWS if got.ndim > 1 else torch.arange(20.0)
    assert symptom in told(got.double(), wanted.double(), 1e-9).hint


def test_half_precision_is_rounded_once():
    # Of large numbers, beside which the absolute tolerance is nothing.
    gate, up = (100 * common.randn(1000, dtype=common.HALF) for _ in range(2))
    exact, tolerance = gate.double().sin() * up.double(), common.TOLERANCE[common.HALF]
    common.expect_close(exact.half(), exact, tolerance, "", "y")
    told(gate.double().sin().half() * up, exact, tolerance)


def test_what_only_program_0_computes_is_told():
    got, wanted = torch.tensor([1.0, 1, 7, 1, 1, 8]), torch.ones(6)
    got.owner = torch.tensor([0, 0, 1, 1, 2, 2])
    assert "only what program 0 stores is right: which address" in str(told(got, wanted))
    got.owner = torch.tensor([0, 0, 1, 1, 1, 2])
    assert "only what program 0" in str(told(got, wanted))
    got.owner = torch.tensor([0, 0, 1, 2, 2, 3])  # that of program 2 is right
    assert "only these elements are right: 0-1, 3-4" in str(told(got, wanted))


def test_wrong_results_are_alike_within_the_tolerance():
    got = torch.tensor([1.0, 3.0, 1.0, 0.0])
    for other, alike in ((got + 2e-3, True), (got + 5e-3, False)):  # of 1e-3 + 1e-3 * 3 there
        assert told(got, tolerance=2e-3).is_like(told(other, tolerance=2e-3), 1) == alike
    one, moved, other = (common.Wrong(f"line {at} of x", "hint") for at in ("3 reads 5", "40 reads 5", "3 reads 6"))
    assert one.is_like(moved, 1) and not one.is_like(other, 1)


def test_a_store_beyond_the_end_is_seen_on_a_gpu(monkeypatch):
    class Kernel:
        arg_names = ["y_ptr"]

        def __getitem__(self, grid):
            return lambda y: (y.fill_(1), behind.fill_(1))

    y, behind = common.unwritten(3), torch.zeros(1)
    monkeypatch.setattr(memory, "ON_GPU", True)
    assert memory.launch(Kernel(), (1,), y).stored.all()
    behind = y.behind[7:8]
    with pytest.raises(common.Wrong, match="beyond the end of y"):
        memory.launch(Kernel(), (1,), y)


# --- code that ends otherwise than with a result


@pytest.mark.parametrize("code, told", [
    ("import (", "SyntaxError in line 1"),
    ("raise RuntimeError('half done')", "RuntimeError in line 1 of .*: half done"),
    ("raise SystemExit('bye')", "SystemExit in line 1 of .*: bye"),
])  # fmt: skip
def test_a_file_that_cannot_be_imported_is_told_once(code, told, mine, tmp_path, capsys):
    assert mine("exercise1", code) == 1
    (line,) = said(capsys).splitlines()
    assert "cannot be imported" in line and re.search(told, line)
    assert not (tmp_path / "progress.json").exists()


def test_a_file_that_is_missing_is_refused_with_the_remedy(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check, "HERE", tmp_path)
    assert check.main(["puzzles"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert f"there is no {tmp_path / 'puzzles.py'}: restore it with git" in captured.err


def test_cells_are_to_be_run_in_a_notebook_only(tmp_path):
    for name, remedy in ((CELLS, "run its cell first"), ("mine.py", "the line that defines it has to be as it was")):
        path = tmp_path / name
        path.write_text("import torch\n")
        verdict = check.judge(path, check.EXERCISES["puzzles"], "copy_kernel")
        assert verdict.message == f"there is no copy_kernel in {name}: {remedy}" and not verdict.begun


@pytest.mark.parametrize("task, old, new", [
    ("copy_kernel", "@triton.jit\n", "@triton.jitt\n"),
    ("copy_kernel", "tl.constexpr", "tl.constant"),
    ("tuned_matmul_kernel", "triton.Config(", "triton.Configuration("),
    ("tuned_matmul_kernel", "@triton.autotune(", "@triton.jit\n@triton.autotune("),
])  # fmt: skip
def test_a_definition_that_raises_is_told_with_its_line(task, old, new, tmp_path):
    path = tmp_path / "puzzles.py"
    begin, kernel, end = solution_of("puzzles").partition(f"def {task}")
    begin = begin[: begin.rindex("\n\n\n")], begin[begin.rindex("\n\n\n") :]
    code = begin[0] + "".join([begin[1], kernel, end]).replace(old, new, 1)
    path.write_text(code)
    verdict = check.judge(path, check.EXERCISES["puzzles"], task)
    line = code.split(new)[0].count("\n") + 1
    assert re.match(f"(Attribute|Type)Error in line {line} of puzzles.py: ", verdict.message)
    # What comes next is defined.
    assert check.judge(path, check.EXERCISES["puzzles"], "scaled_matmul_kernel").passed


def numbers(body):
    """A file of exercise 1 in which memory_lines, in line 3, does body."""
    return f"import os, sys, time\ndef memory_lines(*args, line=0):\n    {body}\n"


@pytest.mark.parametrize("body, told", [
    ("return 1 // 0", "ZeroDivisionError in line 3 of exercise1_triton_basics.py: integer division"),
    ("os.kill(os.getpid(), 9)", "killed by SIGKILL: was there too little memory"),
    ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV in line 3 of .*: a load or store went outside"),
    ("raise ValueError('x ' * 10**6)", "ValueError in line 3 of .*: [x ]{900,1000}\n"),
    ("raise ValueError('\\0\\x1b[31m')", r"ValueError in line 3 of .*: \\x00\\x1b\[31m"),
    ("os.remove(__file__); 1 // 0", "ZeroDivisionError in line 3 of .*: integer division"),
    ("os._exit(0)", "ended with exit code 0 before it was judged: what ends the process"),
    ("sys.exit()", "SystemExit in line 3 of exercise1_triton_basics.py"),
    ("import bdb; raise bdb.BdbQuit", "BdbQuit in line 3 of .*; breakpoint.. was reached: --debug"),
])  # fmt: skip
def test_whatever_the_code_does_is_told_with_its_line(body, told, mine, capsys):
    assert mine("exercise1", numbers(body), "--task", "memory_lines") == 1
    assert re.search(f"FAIL  memory_lines: {told}", said(capsys))


def test_lists_are_told_from_their_lengths(mine, capsys):
    assert mine("exercise3", "def key_blocks(*sizes):\n    return [], [0, 1, 2]\n", "--task", "key_blocks") == 1
    assert "lists are returned, where their lengths are asked for" in said(capsys)


@pytest.mark.parametrize("body, reason", [
    ("time.sleep(60)", "did not end within 1.5 s in line 3 of exercise1_triton_basics.py: is there an endless loop?"),
    ("return (1,", "SyntaxError in line 3 of exercise1_triton_basics.py: '(' was never closed"),
])  # fmt: skip
def test_a_task_fails_alone(body, reason, mine, monkeypatch, capsys):
    monkeypatch.setattr(check, "LIMIT", 1.5)
    assert mine("exercise1", numbers(body) + "\n\ndef bytes_moved(*args):\n    raise ValueError\n") == 1
    lines = said(capsys).splitlines()
    assert lines[0].startswith("FAIL  rmsnorm_kernel: there is no rmsnorm_kernel in exercise1_triton_basics.py")
    assert lines[1].startswith(f"FAIL  memory_lines: {reason}") and "FAIL  bytes_moved: ValueError" in lines[2]


@pytest.mark.parametrize("old, new, told", [
    ("        weight.copy_(before)\n", "        weight.add_(step * direction)\n",
     "weight is another one afterwards: clone it before the first step"),
    ("    return (forth", "    loss().backward()\n    return (forth", "weight has a gradient afterwards"),
    ("    return (forth", "    weight.requires_grad_(False)\n    return (forth",
     "weight.requires_grad is False afterwards"),
])  # fmt: skip
def test_a_slope_leaves_the_weight_as_it_was(old, new, told, mine, capsys):
    code = solution_of("exercise2")
    assert code.count(old) == 1 and mine("exercise2", code.replace(old, new), "--task", "slope") == 1
    assert said(capsys).startswith(f"FAIL  slope: {told}")


@pytest.mark.skipif(ON_GPU, reason="a kernel on a GPU crashes, the compiler's error is another one")
@pytest.mark.parametrize("old, new, told", [
    ("tl.store(y_ptr + row", "tl.store(y_ptr + 2**40 + row", "line LINE writes offset"),
    ("stride_row + cols, mask=cols < n_cols, other=0.0)", "stride_row + cols)",
     "line LINE reads offset 10 of x, where x has no element, in 2 of 4 lanes of program 0"),
    ("weight_ptr + cols, mask=cols < n", "weight_ptr + cols, mask=cols <= n",
     "line LINE reads offset 10 of weight, .* in 1 of 3 lanes .*: one too many; the last element is 9"),
    ("weight_ptr + cols, mask=cols < n", "weight_ptr + 5 * row + 5 + tl.arange(0, BLOCK_SIZE), mask=cols < n",
     "line LINE reads offset 10 of weight, .* of program 1: no program touches offset 0 of weight: all begin too far"),
    ("y_ptr + row * n_cols", "y_ptr + row * 0", "line LINE stores in y for program 1 what program 0 has stored there"),
    # Of the elements from 1 to 4, those of the first block are stored.
    ("weight, mask=cols < n_cols)",
     "weight, mask=cols < n_cols); tl.load(y_ptr + row * n_cols + cols + 1, mask=cols + 1 < n_cols)",
     "line LINE loads from y before anything is stored there"),
    ("square_sum += tl", "undefined += tl", "UnboundLocalError in line LINE of exercise1_triton_basics.py"),
])  # fmt: skip
def test_a_wrong_kernel_is_told_with_its_line(old, new, told, mine, capsys):
    code = solution_of("exercise1").replace(old, new)
    assert mine("exercise1", code, "--task", "rms") == 1
    assert re.match(
        f"FAIL  rmsnorm_kernel: {told}".replace("LINE", str(code.split(new)[0].count("\n") + 1)), said(capsys)
    )


@pytest.mark.skipif(ON_GPU, reason="undefined values and mistakes are looked for in the interpreter")
@pytest.mark.parametrize("old, new, told", [
    # What is left out is not stored, so that the mistake is the same as with other=.
    ("tl.sigmoid(gate) * up", "tl.sigmoid(gate)", "up is missing"),
    ("tl.sigmoid(gate)", "(tl.exp(gate) / (1 + tl.exp(gate)))", "exp(gate) overflows for large gates"),
    ("* up, mask=mask)", "* up + tl.sum(gate), mask=mask)", "what the mask in line 28 leaves out may be anything"),
    # What is infinite may become 0.
    ("* up, mask=mask)", "* up / tl.sum(gate), mask=mask)", "what the mask in line 28 leaves out may be anything"),
])  # fmt: skip
def test_other_is_missed_only_where_the_result_depends_on_it(old, new, told, mine, capsys):
    code = solution_of("exercise2").replace(", mask=mask, other=0.0)", ", mask=mask)")
    assert old in code and mine("exercise2", code.replace(old, new, 1), "--task", "silu_mul_kernel") == 1
    assert told in said(capsys)


@pytest.mark.skipif(ON_GPU, reason="what two programs store is looked for in the interpreter")
def test_a_store_that_reaches_into_another_row_is_told_beside_the_one_that_is_right(mine, capsys):
    code = solution_of("puzzles").replace("x2 * cos + x1 * sin, mask=mask)", "x2 * cos + x1 * sin)")
    first, second = (code[: code.index(each)].count("\n") + 1 for each in ("x1 * cos - x2", "x1 * sin)"))
    assert mine("puzzles", code, "--task", "rope_kernel") == 1
    told = f"line {first} stores in y for program 1 what program 0 has stored there by line {second}, but an element"
    assert told in said(capsys)


@pytest.mark.skipif(ON_GPU, reason="the compiler's error is another one")
def test_a_mask_without_parentheses_is_told(mine, capsys):
    right, wrong = "(rows < n_rows)[:, None]", "rows < n_rows[:, None]"
    assert mine("puzzles", solution_of("puzzles").replace(right, wrong), "--task", "outer") == 1
    assert "a number has no [:, None]: put parentheses around each comparison" in said(capsys)


def test_a_compiler_s_error_is_told_with_its_line_and_a_gpu_s_by_what_it_says_first(tmp_path):
    from triton.compiler.errors import CompilationError

    path = tmp_path / "kernels.py"
    code = "import triton\n\n\n@triton.jit\ndef kernel(x):\n    y = x\n    z = undefined + y\n"
    path.write_text(code)
    source = code[code.index("def kernel") :]  # its lines count from the kernel's first
    error = CompilationError(source, ast.parse(source).body[0].body[1].value, "NameError('undefined')")
    assert check.describe(error, path) == "CompilationError in line 7 of kernels.py: NameError('undefined')"
    first = "CUDA error: an illegal memory access was encountered"
    assert check.describe(RuntimeError(f"{first}\nCompile with"), path) == f"RuntimeError: {first}; {check.OUTSIDE}"


@pytest.mark.skipif(ON_GPU, reason="--debug needs the interpreter")
def test_debug_runs_in_this_process_where_breakpoint_has_the_terminal(mine, monkeypatch, capsys):
    processes = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: processes.append(os.getpid()))
    assert mine("exercise1", numbers("breakpoint(); return 1"), "--task", "mem", "--debug") == 1
    assert "FAIL  memory_lines: memory_lines" in said(capsys) and set(processes) == {os.getpid()}


def test_ctrl_c_leaves_no_process_and_no_traceback(tmp_path):
    (tmp_path / "mine.py").write_text(numbers("print('begun', flush=True); time.sleep(600)"))
    options = ["--task", "memory_lines", "--file", tmp_path / "mine.py", "--progress", tmp_path / "progress.json"]
    command = [sys.executable, FOLDER / "check.py", "exercise1", *options]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, start_new_session=True, **pipes)
    assert process.stdout.readline() == "begun\n"
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches the task's process as well
    assert process.communicate(timeout=60) == ("", "") and process.returncode == 130  # the task has the pipes as well


@pytest.mark.parametrize("passes, extra, asked", [
    (True, None, ["forkserver None 1", "spawn None 1"]), (True, "show", ["forkserver show 1", "spawn None 1"]),
    (True, "time", ["forkserver None 1", "spawn time 5"]), (False, "show", ["forkserver show 1"]),
])  # fmt: skip
def test_what_passes_interpreted_is_compiled_where_there_is_a_gpu(passes, extra, asked, monkeypatch):
    def judge_apart(context, path, exercise, task, limit, extra=None):
        method = context.get_start_method()
        seen.append(f"{method} {extra} {limit // check.LIMIT}")
        return check.Verdict(method == "forkserver" and passes, method)

    seen = []
    monkeypatch.setattr(check, "judge_apart", judge_apart)
    monkeypatch.setattr(check.multiprocessing.forkserver, "ensure_running", lambda: None)
    monkeypatch.setattr(check, "ON_GPU", True)
    verdict = check.judge_everywhere(FOLDER, "exercise1", "rmsnorm_kernel", extra)
    assert verdict.message == ("right in the interpreter, but: spawn" if passes else "forkserver") and seen == asked
    # There is nothing to compile.
    assert check.judge_everywhere(FOLDER, "exercise1", "bytes_moved").message == "forkserver"


# --- choosing tasks, and what is remembered


@pytest.mark.parametrize("arguments, told", [
    ("exercise1 --task nothing", "nothing is none of the tasks: memory_lines, bytes_moved, rms"),
    ("exercise2 --task silu", "--task silu fits more than one of the tasks: silu_mul_kernel, silu"),
    ("--task fold", "name an exercise: puzzles, exercise1"),
    ("exercise1 --debug", "put TRITON_INTERPRET=1 before the command"),  # on a GPU
    ("puzzles --task 4 --time", "time outer_sum_kernel: choose one of grid_copy_kernel, transpose_kernel, multiply_"),
    ("exercise1 --show --debug", "--debug: not allowed with argument --show"),
    ("exercise1 --file .", "--file . is no Python file"),
    (f"exercise1 --file {__file__} --solution", "--solution: not allowed with argument --file"),
    (f"exercise1 --name {'n' * 101}", "--name: 'nnnnnnnnnnnnnnnnnnnn' is no name: give 1 to 100 printable"),
    ("exercise1 --name a\ud800", "--name: 'a\\ud800' is no name"),
    ("exercise1 --progress .", "--progress . is no progress file ("),
    ("exercise1 --progress /dev/null/x", "--progress /dev/null cannot be written to"),
])  # fmt: skip
def test_a_request_that_cannot_be_met_ends_in_one_line(arguments, told, monkeypatch, capsys):
    monkeypatch.setattr(check, "ON_GPU", True)
    assert check.main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and told in captured.err and captured.err.count("\n") == 1


WRONG = numbers("return 7")
RIGHT = numbers("return len({i * args[2] * args[1] // [*args, 128][3] for i in range(args[0])})")
BLANK = numbers("raise NotImplementedError('FILL ME IN')")


def test_the_way_through_the_workshop_has_each_task_once_in_the_order_of_the_pages():
    table = (FOLDER.parent / "README_WORKSHOP.md").read_text().split("## Key concepts")[0]
    rows = re.findall(
        r"^\| \d+ \|.*?(?:exercises/|check.py )(before|examination|puzzles|exercise\d|patient)", table, re.M
    )
    assert rows == [name for name, _ in progress_file.WAY]
    for name, exercise in check.JUDGED.items():
        tasks = [task for _, task in progress_file.steps_of(name)]
        assert sorted(tasks) == sorted(exercise.checks.TASKS)
        if name in NAMES:
            page = (FOLDER / exercise.file).with_suffix(".md").read_text()
            asked = re.findall(r"\*\*(?:Write|Mend)\*\*(.*?)\n\n", page, flags=re.S)
            named = [task for words in asked for task in re.findall(r"`(\w+)`", words) if task in tasks]
            assert list(dict.fromkeys(named)) == tasks


def test_what_comes_next_is_what_the_workshop_has_next(tmp_path, capsys):
    """First the test before, then all tasks, and the examination once all are done."""
    progress = progress_file.Progress(tmp_path / "progress.json")
    assert check.summary(progress) == f"0 of {TOTAL} done; next: python exercises/check.py before"
    progress.record("before", "A", False, None, begun=False)  # checked while its answers are empty
    assert check.summary(progress).endswith("next: python exercises/check.py before")
    assert check.summary(progress, "exercise1").endswith("next: memory_lines (exercise1)")
    progress.record("before", "A", False, None)
    told = [check.summary(progress)]
    for name, task in check.all_tasks():
        progress.record(name, task, True, None)
        told.append(check.summary(progress))
    nexts = [f"{task} ({name})" for name, task in check.all_tasks()] + ["python exercises/check.py examination"]
    assert told == [f"{done} of {TOTAL} done; next: {after}" for done, after in enumerate(nexts)]
    assert nexts[8:10] == ["multiply_tile (puzzles)", "memory_lines (exercise1)"]
    progress.record("examination", "copy_bandwidth", False, None)
    assert check.summary(progress) == f"{TOTAL} of {TOTAL} done"


def test_checks_at_the_same_time_keep_what_each_finds(tmp_path):
    """Each has read the file before the others write it."""
    path, tasks = tmp_path / "progress.json", list(check.all_tasks())
    each = [progress_file.Progress(path, "ada") for _ in tasks]
    with ThreadPoolExecutor(len(tasks)) as pool:
        list(pool.map(lambda progress, task: progress.record(*task, True, None), each, tasks))
    assert check.summary(progress_file.Progress(path)).startswith(f"{TOTAL} of {TOTAL} done")
    assert list(tmp_path.iterdir()) == [path]


def test_a_task_is_called_by_its_number_on_the_page(capsys):
    assert check.task_called("puzzles", "1") == "copy_kernel"
    assert check.task_called("puzzles", "14") == "rope_backward_kernel"
    assert check.main(["puzzles", "--solution", "--task", "2"]) == 0
    assert said(capsys) == "PASS  masked_copy_kernel\n"
    for number in ("0", "15"):
        assert check.main(["puzzles", "--task", number]) == 2
        assert f"--task {number} is none of the tasks: copy_kernel," in capsys.readouterr().err


def test_progress_is_remembered(mine, tmp_path, capsys):
    # What is checked, and then: does it pass, after how many attempts, and what is said of it?
    for code, passed, attempts, message in (
        (BLANK, False, 0, "not written yet, FILL ME IN"),
        (WRONG, False, 1, "is 7, expected 1"),
        (WRONG, False, 2, "is 7, expected 1"),
        (RIGHT, True, 3, None),
        (RIGHT, True, 3, None),
        (BLANK, True, 3, None),  # a notebook that is opened anew
        (WRONG, False, 3, "is 7, expected 1"),
    ):
        assert mine("exercise1", code, "--task", "mem", "--name", "Ada") == (code != RIGHT)
        state = json.loads((tmp_path / "progress.json").read_text())["exercises"]["exercise1"]["memory_lines"]
        assert (state["passed"], state["attempts"]) == (passed, attempts)
        assert state["message"] is message or message in state["message"]
    mine("exercise2", solution_of("exercise2"), "--task", "silu_mul_kernel")  # with which another begins
    assert said(capsys).endswith(f"PASS  silu_mul_kernel\n1 of {TOTAL} done; next: naive_bytes (exercise2)\n")
    assert check.main([]) == 0
    overview = said(capsys)
    assert "Of Ada, in" in overview and re.search("exercise2 +silu_mul_kernel +done, 1 attempt\n", overview)
    assert re.search("exercise1 +memory_lines +not yet, 3 attempts\n +exercise1 +bytes_moved +not begun\n", overview)
    assert overview.splitlines()[-1] == f"1 of {TOTAL} done; next: copy_kernel (puzzles)"
    (tmp_path / "progress.json").write_text("{half")
    assert mine("exercise1", RIGHT, "--task", "mem") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "is no progress file" in error
    assert (tmp_path / "progress.json").read_text() == "{half"


SCRIPT = Path(llama.__file__).read_text()
FUNCTIONS = {
    node.name: ast.get_source_segment(SCRIPT, node)
    for node in ast.parse(SCRIPT).body
    if isinstance(node, ast.FunctionDef)
}


def sections_that_name_a_function():
    """Yield (page, section, functions of the script that it names, what else it may quote) of the exercises' pages."""
    for page in sorted(FOLDER.glob("*.md")):
        text = page.read_text()
        files = (FOLDER / folder / f"{page.stem}.py" for folder in (".", "solutions"))
        own = [file.read_text() for file in files if file.exists()] + re.findall("```python\n(.*?)```", text, re.S)
        for section in re.split("^(?=## )", re.sub("```.*?```", "", text, flags=re.S), flags=re.M):
            if named := set(re.findall(r"`(\w+)`", section)) & FUNCTIONS.keys():
                yield page.name, section, named, own


def test_a_line_of_a_kernel_that_a_page_quotes_is_in_a_kernel_that_it_names():
    """Or in the reader's own file, its solution or a block of the page; dots stand for anything."""
    quoted, missing = 0, []
    for page, section, named, own in sections_that_name_a_function():
        source = "".join("\n".join([*own, *(FUNCTIONS[name] for name in named)]).split())
        for code in re.findall("`([^`]+)`", section):
            if re.search(r"\btl\.\w+\(|_ptr\b|\bptr\b|\[None|None\]|\.to\(", code):
                pattern = re.escape("".join(code.split())).replace(re.escape("..."), ".*?")
                quoted += 1
                missing += [] if re.search(pattern, source) else [f"{page}: {code}"]
    assert missing == [] and quoted > 15
