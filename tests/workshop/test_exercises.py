"""The exercises: solutions pass, stubs fail with a reason for every task, and whatever code does is told."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch

import tiny_llama_v3 as llama
from exercises import check
from exercises.checks import ON_GPU, common

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
    return (FOLDER / check.EXERCISES[name].solution).read_text()


def said(capsys):
    """What was printed, the lines joined that were wrapped."""
    printed = capsys.readouterr().out
    assert all(len(line) <= 100 for line in printed.splitlines())
    return printed.replace("\n      ", " ")


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_passes(name, capsys):
    assert check.main([name, "--solution"]) == 0
    lines = said(capsys).splitlines()
    assert [line[:4] for line in lines[:-1]] == ["PASS"] * len(check.EXERCISES[name].checks.TASKS)


@pytest.mark.parametrize("name", NAMES)
def test_every_task_of_the_stub_is_said_to_be_not_written_yet(name, mine, capsys):
    code = (FOLDER / check.EXERCISES[name].file).read_text()
    assert mine(name, code) == 1
    *lines, passed, summary = said(capsys).splitlines()
    assert [line[:4] for line in lines] == ["FAIL"] * len(check.EXERCISES[name].checks.TASKS)
    assert all(re.search("not written yet, FILL ME IN|not checked before", line) for line in lines)
    assert passed == f"{name}: 0 of {len(lines)} tasks pass"
    first = next(iter(check.EXERCISES[name].checks.TASKS))
    assert summary == f"0 of {TOTAL} done; next: {first} ({name})"


def functions_of(code):
    """{name: (arguments of a function, its lines without the docstring)} of what stands at the top of a module."""
    found = {}
    for node in ast.parse(code).body:
        if hasattr(node, "name"):
            docstring = ast.get_docstring(node, clean=False) or "no docstring"
            lines = ast.get_source_segment(code, node).replace(f'"""{docstring}"""', "").splitlines()
            found[node.name] = ast.unparse(getattr(node, "args", [])), [line for line in lines if line.strip()]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_stub_and_solution_differ_in_the_blanks_only(name):
    stub, solution = (FOLDER / check.EXERCISES[name].file).read_text(), solution_of(name)
    given, solved = functions_of(stub), functions_of(solution)
    assert given.keys() == solved.keys() and stub.count("FILL ME IN") >= 3 and "FILL ME IN" not in solution
    for function, (arguments, lines) in given.items():
        assert arguments == solved[function][0]
        kept = [line for line in lines if "FILL ME IN" not in line]
        if function != "row_max_kernel":  # whose lines are to be corrected
            assert [line for line in kept if line not in solved[function][1]] == [], function


EQUAL = """
import builtins, math, numpy, torch
import exercises.checks.common as common
def equal(*arguments, **options): return torch.ones(1, dtype=torch.bool)
"""
WITHIN = """
solved = memory_lines
def memory_lines(*sizes, **line):
    {}
    return solved(*sizes, **line)
"""


@pytest.mark.parametrize("name", [
    "torch.isclose", "torch.Tensor.any", "torch.Tensor.T", "numpy.isin", "math.prod", "builtins.any", "common.differs",
    "common.llama.next_power_of_2",
])  # fmt: skip
def test_code_that_replaces_a_judge_does_not_pass(name, mine, capsys):
    """Neither on import, with the blanks as given, nor in a task; and the others are judged as they should be."""
    told, statement = f"your code replaces .*{name.split('.')[-1]}: the checks use it", f"{name} = equal"
    stub = (FOLDER / "exercise1_triton_basics.py").read_text()
    assert mine("exercise1", f"{stub}{EQUAL}{statement}\n") == 1
    assert re.match(f"FAIL  exercise1_triton_basics.py: {told}", said(capsys))
    assert mine("exercise1", solution_of("exercise1") + EQUAL + WITHIN.format(statement)) == 1
    assert re.search(f"^FAIL  memory_lines: {told}.*\n(PASS  .*\n)+exercise1: ", said(capsys), flags=re.M)


def test_a_list_of_checks_or_cases_that_is_changed_changes_nothing(mine, capsys):
    change = "import exercises.checks.{} as checks\nfor t in checks.TASKS: checks.TASKS[t] = lambda module: None\n"
    change += "for value in vars(checks).values():\n    if isinstance(value, list): value.clear()\n"
    for name in NAMES:
        assert mine(name, (FOLDER / check.EXERCISES[name].file).read_text() + change.format(name)) == 1
        assert "PASS" not in said(capsys)


def test_what_was_replaced_is_put_back_after_an_error_too():
    original = torch.allclose
    with pytest.raises(ZeroDivisionError), common.judges_kept():
        setattr(torch, "allclose", len) or 1 / 0
    assert torch.allclose is original


def test_what_pytorch_itself_replaces_is_no_judge_replaced(mine, capsys):
    """torch.compile, optimizers, checkpoint and others import what wraps torch.manual_seed."""
    change = "import torch\ntorch.manual_seed = torch._disable_dynamo(torch.manual_seed)\n"
    assert mine("exercise2", change + solution_of("exercise2")) == 0


# --- comparing


def told(got, wanted=None, tolerance=1e-3):
    """What is Wrong with a tensor."""
    with pytest.raises(common.Wrong) as raised:
        common.expect_close(got, torch.ones(4) if wanted is None else wanted, tolerance, "hint", "y")
    return raised.value


@pytest.mark.parametrize("dtype", common.UNWRITTEN)
def test_nan_of_a_computation_is_told_from_what_was_never_stored(dtype):
    got = common.unwritten(4, dtype=dtype)
    assert told(got).is_empty() and "nothing is stored in y" in str(told(got))
    got[0] = 1
    wrong = "3 of 4 elements of y are wrong: at (1,) it is never stored, expected 1"
    assert str(told(got)) == f"{wrong}: only these elements are right: 0; hint" and not told(got).is_empty()
    got[1] = torch.zeros((), dtype=dtype) / 0
    assert "at (1,) it is NaN, of a computation (0 / 0" in str(told(got))
    got[1:] = 1
    common.expect_close(got, torch.ones(4), 0, "hint", "y")
    common.expect_untouched("y", got)
    got.behind[7] = torch.nan  # a NaN of a computation, too
    with pytest.raises(common.Wrong, match="beyond the end of y"):
        common.expect_untouched("y", got)


ROWS = torch.tensor([[1.25, 2.5, 3.25], [5.5, 8.25, 13.5]])


@pytest.mark.parametrize("got, symptom", [
    (ROWS * 0, "it is all zeros"),
    (ROWS.trunc(), "the fractions are cut off"),
    (ROWS * 1.5, "every element is 1.5 times"),
    (ROWS + 0.25, "every element is +0.25 away"),
    (ROWS[:1].expand(2, 3), "all rows are the same"),
    (ROWS * torch.tensor([[2.0], [3.0]]), "each row is off by a factor of its own"),
    (ROWS + 1e-3 * torch.tensor([[1.0, -2.0, 1.0], [-3.0, 2.0, -4.0]]), "computed or stored in fp16 or bf16"),
    (ROWS + 1e-7 * torch.tensor([[1.0, -2.0, 1.0], [-3.0, 2.0, -4.0]]).double(), "fp32, where the inputs are fp64"),
    (ROWS.flip(1), "in reverse order"),
    (ROWS.flatten()[[0, 2, 1, 3, 5, 4]].view(2, 3), "in another order"),
    (ROWS + torch.tensor([[0.0, 0.0, 0.0], [1.0, 7.0, 2.0]]), "only these rows are right: 0;"),
])  # fmt: skip
def test_the_symptom_is_told(got, symptom):
    assert symptom in told(got.double(), ROWS.double(), 1e-9).hint


def test_ranges_of_indices():
    right = torch.tensor([True, True, False, True, False, True, True, False, True])
    assert common.ranges(right) == "0 to 1, 3, 5 to 6, ..."


def test_wrong_results_are_alike_within_the_tolerance_and_of_one_kind():
    got = torch.tensor([1.0, 3.0, 1.0, 1.0])
    for other, alike in ((got + 2e-3, True), (got + 5e-3, False)):  # of 1e-3 + 1e-3 * 3 there
        assert told(got, tolerance=2e-3).is_like(told(other, tolerance=2e-3)) == alike
    result = got.clone()
    result.undefined = 7  # the line of a load without `other`
    assert not told(got).is_like(told(result))
    fault = "line {} reads offset {} of x"
    assert common.Wrong(fault.format(3, 5), "a").is_like(common.Wrong(fault.format(40, 5), "b"))
    assert not common.Wrong(fault.format(3, 5), "a").is_like(common.Wrong(fault.format(3, 6), "a"))


# --- code that ends otherwise than with a result


@pytest.mark.parametrize("code, told", [
    ("def x(:", "line 1: invalid syntax|SyntaxError in line 1"),
    ("raise RuntimeError('half done')", "RuntimeError in line 1 of .*: half done"),
    ("raise SystemExit('bye')", "SystemExit in line 1 of .*: bye"),
    ("raise KeyboardInterrupt", "KeyboardInterrupt in line 1 of "),
    ("class Odd(BaseException):\n    __str__ = None\nraise Odd", "Odd in line 3 of .*: <.*"),
])  # fmt: skip
def test_a_file_that_cannot_be_imported_is_told_once(code, told, mine, tmp_path, capsys):
    assert mine("exercise1", code) == 1
    (line,) = said(capsys).splitlines()
    assert "cannot be imported" in line and re.search(told, line)
    assert not (tmp_path / "progress.json").exists()


def numbers(body):
    """A file of exercise 1 in which memory_lines, in line 3, does body."""
    return f"import os, sys, time\ndef memory_lines(*args, line=0):\n    {body}\n"


@pytest.mark.parametrize("body, told", [
    ("return 1 // 0", "ZeroDivisionError in line 3 of exercise1_triton_basics.py: integer division"),
    ("os.kill(os.getpid(), 9)", "killed by SIGKILL: was there too little memory"),
    ("raise ValueError('\\ud800')", r"ValueError in line 3 of .*: \\ud800"),
    ("raise type('Odd', (BaseException,), {'__str__': None})", "Odd in line 3 of .*: <"),
    ("raise ValueError('x ' * 10**6)", "ValueError in line 3 of .*: [x ]{900,1000}\n"),
    ("os._exit(0)", "ended with exit code 0 before it was judged: what ends the process"),
    ("sys.exit()", "SystemExit in line 3 of exercise1_triton_basics.py"),
    ("import bdb; raise bdb.BdbQuit", "breakpoint.. was reached: --debug gives it the terminal"),
    ("return int(None)", "TypeError in line 3 .*NoneType.*; does the function return"),
])  # fmt: skip
def test_whatever_the_code_does_is_told_with_its_line(body, told, mine, capsys):
    assert mine("exercise1", numbers(body), "--task", "memory_lines") == 1
    assert re.search(f"FAIL  memory_lines: {told}", said(capsys))


def test_an_endless_loop_ends_its_task_alone(mine, capsys):
    code = numbers("time.sleep(60)") + "def bytes_moved(*args):\n    return 1, 1\n"
    assert mine("exercise1", code, "--limit", "1.5") == 1
    lines = said(capsys).splitlines()
    assert lines[0].startswith("FAIL  rmsnorm_kernel: there is no rmsnorm_kernel in exercise1_triton_basics.py")
    reason = "did not end within 1.5 s in line 3 of exercise1_triton_basics.py: is there an endless loop?"
    assert lines[1] == f"FAIL  memory_lines: {reason} (--limit gives it more)"
    assert "FAIL  bytes_moved: fused for" in lines[2]


def line_with(code, words):
    return code[: code.index(words)].count("\n") + 1


@pytest.mark.skipif(ON_GPU, reason="a kernel on a GPU crashes otherwise")
def test_a_wild_store_ends_its_task_alone_and_is_told_with_its_line(mine, capsys):
    code = solution_of("exercise1").replace("tl.store(y_ptr + row", "tl.store(y_ptr + 2**40 + row")
    assert mine("exercise1", code) == 1
    lines = said(capsys).splitlines()
    assert lines[0].startswith(f"FAIL  rmsnorm_kernel: line {line_with(code, 'tl.store')} writes offset")
    assert lines[1:3] == ["PASS  memory_lines", "PASS  bytes_moved"]


@pytest.mark.skipif(ON_GPU, reason="the compiler's error is another one")
def test_an_error_in_a_kernel_is_told_with_its_line_and_cause(mine, capsys):
    code = solution_of("exercise3").replace("l = l * rescale", "l = l * undefined")
    mine("exercise3", code, "--task", "attention_kernel")
    where = f"in line {line_with(code, 'undefined')} of exercise3_flash_attention.py"
    assert f"FAIL  attention_kernel: NameError {where}: name 'undefined' is not defined" in said(capsys)


def test_a_compiler_s_error_is_told_with_its_line(tmp_path):
    """It counts from the kernel's first line."""
    from triton.compiler.errors import CompilationError

    path = tmp_path / "kernels.py"
    code = "import triton\n\n\n@triton.jit\ndef kernel(x):\n    y = x\n    z = undefined + y\n"
    path.write_text(code)
    source = code[code.index("def kernel") :]
    node = ast.parse(source).body[0].body[1].value
    error = CompilationError(source, node, "NameError('undefined is not defined')")
    told = "CompilationError in line 7 of kernels.py: NameError('undefined is not defined')"
    assert check.describe(error, path) == told


@pytest.mark.skipif(ON_GPU, reason="--debug needs the interpreter")
def test_debug_runs_in_this_process_where_breakpoint_has_the_terminal(mine, monkeypatch, capsys):
    processes = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: processes.append(os.getpid()))
    assert mine("exercise1", numbers("breakpoint(); return 1"), "--task", "mem", "--debug") == 1
    assert "FAIL  memory_lines: memory_lines" in said(capsys) and set(processes) == {os.getpid()}


def test_debug_on_a_gpu_asks_for_the_interpreter(monkeypatch, capsys):
    monkeypatch.setattr(check, "ON_GPU", True)
    assert check.main(["exercise1", "--debug"]) == 2
    assert "put TRITON_INTERPRET=1 before the command" in capsys.readouterr().err


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The exercises in a folder of their own."""
    copy = tmp_path_factory.mktemp("project") / "exercises"
    shutil.copytree(FOLDER, copy, symlinks=True, ignore=shutil.ignore_patterns("progress.json*", "results"))
    for name in ("tiny_llama_v3.py", "tiny_llama", "measure"):
        (copy.parent / name).symlink_to(FOLDER.parent / name)
    return copy


@pytest.mark.parametrize("sent, code", [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_check_that_is_ended_leaves_no_process_and_no_traceback(sent, code, copy):
    (copy / "exercise1_triton_basics.py").write_text(numbers("print('begun', flush=True); time.sleep(600)"))
    command = [sys.executable, copy / "check.py", "exercise1", "--task", "memory_lines"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, start_new_session=True, **pipes)
    assert process.stdout.readline() == "begun\n"
    (os.killpg if sent == signal.SIGINT else os.kill)(process.pid, sent)  # Ctrl-C reaches the task's process as well
    assert process.communicate(timeout=60) == ("", "") and process.returncode == code  # the task has the pipes as well


def test_a_file_of_the_project_that_is_missing_is_named(copy):
    (copy / "checks" / "exercise2.py").unlink()
    done = subprocess.run([sys.executable, copy / "check.py"], capture_output=True, text=True)
    assert done.returncode == 2 and re.fullmatch("check.py: error: .*exercise2.*: restore the .*\n", done.stderr)


def test_programs_started_by_their_path_or_in_a_deleted_folder_say_what_to_do(tmp_path):
    gone, environment = "error: the current folder was deleted: change to another one\n", {"PYTHONPATH": FOLDER.parent}
    programs = [path for path in FOLDER.rglob("*.py") if "\nif __name__" in path.read_text() and not path.is_symlink()]
    for path in programs:
        module = ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts)
        by_path = gone if path.name == "check.py" else f"run it from the root as python -m {module}\n"
        for started, told in (["-m", module], gone), ([path], by_path):
            command = ["sh", "-c", 'mkdir x; cd x; rmdir ../x; exec "$@"', "sh", sys.executable, *started]
            done = subprocess.run(command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True)
            assert (done.returncode, done.stderr) == (2, told)


def test_a_gpu_s_error_is_told_by_what_it_says_first(tmp_path):
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")
    assert check.describe(error, tmp_path) == f"RuntimeError: {str(error).splitlines()[0]}; {check.OUTSIDE}"


@pytest.mark.skipif(ON_GPU, reason="a GPU does without it")
def test_an_interpreter_that_fails_is_told_from_a_kernel_that_does(mine, monkeypatch, capsys):
    code = solution_of("exercise2").replace("2 * rows", "2 / 0 * rows")
    monkeypatch.setattr("triton.language.sigmoid", None)  # the solution fails as well
    assert mine("exercise2", code, "--task", "silu_mul_kernel") == 2
    assert capsys.readouterr().err == f"check.py: error: {check.INTERPRETER_FAILS}\n"
    assert mine("exercise2", code, "--task", "matmul_flop") == 1
    assert "ZeroDivisionError in line" in said(capsys)  # it has no part in this one
    assert mine("exercise2", code, "--task", "hybrid") == 2  # but in a task that builds on another
    monkeypatch.delitem(check.puzzles.TASKS, "tuned_matmul_kernel")  # where an operation is not interpreted
    assert check.judge(check.HERE / "puzzles.py", check.EXERCISES["puzzles"], "tuned_matmul_kernel").obstacle


@pytest.mark.parametrize("interpreted", [check.Verdict(True), check.Verdict(False, obstacle="interpreter")])
def test_what_passes_interpreted_is_compiled_where_there_is_a_gpu(interpreted, monkeypatch):
    asked = []

    def judge_apart(context, path, exercise, task, limit, extra=None):
        asked.append((context.get_start_method(), task))
        forked = context.get_start_method() == "forkserver"
        return interpreted if forked else check.Verdict(False, "out of registers")

    monkeypatch.setattr(check, "judge_apart", judge_apart)
    monkeypatch.setattr(check.multiprocessing.forkserver, "ensure_running", lambda: None)
    monkeypatch.setattr(check, "ON_GPU", True)
    verdict = check.judge_everywhere(FOLDER, "exercise1", "rmsnorm_kernel", 1)
    before = "right in the interpreter, but: " * interpreted.passed
    assert not verdict.passed and verdict.message == f"{before}out of registers"
    shown = check.judge_everywhere(FOLDER, "exercise1", "rmsnorm_kernel", 1, "show").report[0]
    assert [*shown] == [f"nothing is drawn: {check.INTERPRETER_FAILS}"] * (not interpreted.passed)
    del asked[2:]
    assert check.judge_everywhere(FOLDER, "exercise1", "bytes_moved", 1) == interpreted  # there is nothing to compile
    assert asked == [("forkserver", "rmsnorm_kernel"), ("spawn", "rmsnorm_kernel"), ("forkserver", "bytes_moved")]


def test_the_check_interprets_by_itself_without_a_gpu():
    command = [sys.executable, FOLDER / "check.py", "exercise2", "--solution"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "6 of 6" in done.stdout, done.stderr


# --- choosing tasks, and what is remembered


@pytest.mark.parametrize("arguments, told", [
    (["exercise1", "--task", "nothing"], "nothing is none of the tasks: rmsnorm_kernel, memory_lines, bytes"),
    (["exercise2", "--task", "silu"], "--task silu fits more than one of the tasks: silu_mul_kernel, silu"),
    (["--task", "fold"], "--task needs an exercise"),
    (["--solution"], "--solution needs an exercise"),
    (["exercise1", "--solution", "--progress", "x"], "--progress is not for --solution"),
    (["exercise1", "--limit", "0"], "--limit 0 is no time"),
    (["exercise1", "--limit", "1e18"], "--limit 1e+18 is no time: give seconds, more than 0 and at most 86400"),
    (["exercise1", "--name", "n" * 101], "--name: 'nnnnnnnnnnnnnnnnnnnn' is no name: give 1 to 100 printable"),
    (["exercise1", "--name", "a\ud800"], "--name: 'a\\ud800' is no name"),
    (["exercise1", "--file", "n" * 5000], "--file nnn"),
    (["exercise1", "--progress", "n" * 5000], "--progress nnn"),
    (["exercise1", "--progress", "."], "--progress . is a folder"),
    (["exercise1", "--progress", "/dev/null/x"], "--progress /dev/null cannot be written to"),
])  # fmt: skip
def test_a_request_that_cannot_be_met_ends_in_one_line(arguments, told, capsys):
    assert check.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and told in captured.err and captured.err.count("\n") == 1


def test_one_task_by_the_beginning_of_its_name(mine, capsys):
    assert mine("exercise1", solution_of("exercise1"), "--task", "mem") == 0
    assert said(capsys).splitlines() == ["PASS  memory_lines", f"1 of {TOTAL} done; next: rmsnorm_kernel (exercise1)"]
    assert mine("exercise2", solution_of("exercise2"), "--task", "silu_mul_kernel") == 0  # another begins with it


def test_progress_is_remembered(mine, tmp_path, capsys):
    file = tmp_path / "progress.json"
    wrong = numbers("return 7")
    right = numbers("return len({i * args[2] * args[1] // (line or 128) for i in range(args[0])})")

    def state():
        return json.loads(file.read_text())["exercises"]["exercise1"]["memory_lines"]

    mine("exercise1", numbers("raise NotImplementedError('FILL ME IN')"), "--task", "mem", "--name", "Ada")
    assert state() == {"passed": False, "attempts": 0, "passed_at": None, "message": "not written yet, FILL ME IN"}
    mine("exercise1", wrong, "--task", "mem")
    assert state()["attempts"] == 1 and "is 7, expected 1" in state()["message"]
    assert mine("exercise1", right, "--task", "mem") == 0
    passed = state()
    assert passed == {"passed": True, "attempts": 2, "passed_at": passed["passed_at"], "message": None}
    assert abs(datetime.now() - datetime.fromisoformat(passed["passed_at"])) < timedelta(minutes=2)
    assert mine("exercise1", right, "--task", "mem") == 0 and state() == passed
    assert mine("exercise1", numbers("raise NotImplementedError"), "--task", "mem") == 1 and state() == passed
    mine("exercise1", wrong, "--task", "mem")
    assert state()["attempts"] == 2 and state()["passed_at"] is None
    mine("exercise1", right, "--task", "mem")
    mine("exercise3", solution_of("exercise3"), "--task", "fold")
    content = json.loads(file.read_text())
    assert content["participant"] == "Ada" and set(content["exercises"]) == {"exercise1", "exercise3"}
    capsys.readouterr()
    assert check.main([]) == 0
    overview = said(capsys)
    assert "Of Ada, in" in overview and re.search("exercise1 +memory_lines +done, 3 attempts", overview)
    assert re.search("exercise3 +fold +done, 1 attempt\n", overview)
    assert "bytes_moved                not begun" in overview
    exercise, task = check.all_tasks()[0]
    assert overview.splitlines()[-1] == f"2 of {TOTAL} done; next: {task} ({exercise})"
    before = file.read_text()
    shutil.copytree(FOLDER / "solutions", tmp_path / "solutions")
    assert check.main(["exercise1", "--solution"]) == 0 and file.read_text() == before


def test_another_file_of_progress(mine, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it if stdout is closed
    mine("exercise1", solution_of("exercise1"), "--task", "mem", "--progress", str(tmp_path / "new" / "ada.json"))
    assert json.loads((tmp_path / "new" / "ada.json").read_text())["exercises"]["exercise1"]["memory_lines"]["passed"]
    assert not (tmp_path / "progress.json").exists()


@pytest.mark.parametrize("content", ["{half", "[]", '{"participant": "Ada", "date": "", "exercises": {"exercise1": 1}}',
                                     '{"participant": "Ada", "date": "", "exercises": {"a": {"b": {"passed": 1}}}}',
                                     "\udcff", "[" * 100_000], ids=range(6))  # fmt: skip
def test_progress_that_cannot_be_read_is_put_aside(content, mine, tmp_path, capsys):
    for _ in range(2):  # in one second: neither takes the other's name
        (tmp_path / "progress.json").write_text(content, errors="surrogateescape")
        assert mine("exercise1", solution_of("exercise1"), "--task", "mem") == 0
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "is no progress file" in error and "kept as progress.json." in error
    kept = [path.read_text(errors="surrogateescape") for path in tmp_path.glob("progress.json.*")]
    assert kept == [content] * 2
    assert json.loads((tmp_path / "progress.json").read_text())["exercises"]["exercise1"]["memory_lines"]["passed"]


def test_git_does_not_see_the_progress():
    files = ["exercises/progress.json", "exercises/progress.json.20260101_000000"]
    done = subprocess.run(["git", "check-ignore", *files], cwd=FOLDER.parent, capture_output=True, text=True)
    assert done.stdout.split() == files or "not a git repository" in done.stderr
