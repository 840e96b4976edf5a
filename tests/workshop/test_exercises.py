"""The exercises: solutions pass, stubs fail with a reason for every task, and likely mistakes are told apart."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_llama_v3 as llama
from exercises import check, sweep_swiglu

FOLDER = Path(__file__).resolve().parents[2] / "exercises"


pytestmark = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")
NAMES = list(check.EXERCISES)


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_passes(name, capsys):
    assert check.main([name, "--solution"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:4] for line in lines[:-1]] == ["PASS"] * len(check.EXERCISES[name].checks.TASKS)


@pytest.mark.parametrize("name", NAMES)
def test_every_task_of_the_stub_fails_with_a_reason(name, capsys):
    assert check.main([name]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line[:4] for line in lines] == ["FAIL"] * len(check.EXERCISES[name].checks.TASKS)
    reasons = "not written yet|is anything stored|not checked before both kernels pass"
    assert all(re.search(reasons, line) for line in lines)
    assert last == f"{name}: 0 of {len(lines)} tasks pass"


@pytest.mark.parametrize("name", NAMES)
def test_stub_and_solution_differ_in_the_blanks_only(name):
    (stub,), (solution,) = FOLDER.glob(f"{name}_*.py"), (FOLDER / "solutions").glob(f"{name}_*.py")
    signature = re.compile(r'^(?:def|class) .*?"""(?:.*?)"""', flags=re.M | re.S)
    assert signature.findall(stub.read_text()) == signature.findall(solution.read_text())
    blanks = stub.read_text().count("FILL ME IN")
    assert blanks >= 3 and "FILL ME IN" not in solution.read_text()


MISTAKES = {  # a line of the solution, what a learner might write, the task that must fail, a word of its reason
    "row stride": ("exercise1", "row * stride_row", "row * n_cols", "rmsnorm_kernel", "nan|wrong"),
    "no mask on the load": ("exercise1", ", mask=cols < n_cols, other=0.0).to(tl.float32)\n        square_sum",
                            ").to(tl.float32)\n        square_sum", "rmsnorm_kernel", "mask"),
    "no eps": ("exercise1", "square_sum / n_cols + eps", "square_sum / n_cols", "rmsnorm_kernel", "row of zeros"),
    "lines without stride": ("exercise1", "index * stride * itemsize", "index * itemsize", "memory_lines", "own"),
    "mean writes a matrix": ("exercise1", "2 + 1 + 2 + 2", "2 + 2 + 2 + 2", "bytes_moved", "were seen to move"),
    "one weight": ("exercise2", "2 * cols * inner + 3", "cols * inner + 3", "least_bytes", "once each"),
    "unmasked store": ("exercise2", "gate * tl.sigmoid(gate) * up, mask=mask)", "gate * tl.sigmoid(gate) * up)",
                       "silu_mul_kernel", "beyond the end"),
    "derivative of silu": ("exercise2", "(s + gate * s * (1.0 - s))", "s", "silu_mul_backward_kernel", "gate_grad"),
    "kernel without a Function": ("exercise2", "SiluMul.apply(", "SiluMul.forward(NoContext, ", "hybrid_swiglu",
                                  "x receives no gradient"),
    "no rescaling": ("exercise3", "l * rescale + p.sum(dim=1)", "l + p.sum(dim=1)", "fold", "l after 17 keys"),
    "no causal mask": ("exercise3", "tl.where(keys[None, :] <= rows[:, None], scores, float(\"-inf\"))", "scores",
                       "attention_kernel", "mask"),
    "no groups": ("exercise3", "head // GROUP_SIZE", "0", "attention_kernel", "2 heads on 2"),
    "no delta": ("exercise3", " - delta[:, None]", "", "attention_gradients", "q_grad"),
    "all blocks masked": ("exercise3", "return full, visited - full", "return 0, visited", "key_blocks", "expected"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_likely_mistake_fails_its_task_and_no_other(mistake, tmp_path, monkeypatch, capsys):
    name, right, wrong, task, reason = MISTAKES[mistake]
    (solution,) = (FOLDER / "solutions").glob(f"{name}_*.py")
    code = solution.read_text()
    assert right in code
    code = code.replace(right, wrong).replace("import torch\n", "import torch\nfrom types import SimpleNamespace\n", 1)
    no_context = "NoContext = SimpleNamespace(save_for_backward=lambda *tensors: None)\n"
    (tmp_path / solution.name).write_text(code + no_context * ("NoContext" in code))
    monkeypatch.setattr(check, "HERE", tmp_path)
    assert check.main([name]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert failed[0].startswith(f"FAIL  {task}"), failed
    assert all("not checked before both kernels pass" in line for line in failed[1:])
    assert re.search(reason, failed[0]), failed[0]


@pytest.mark.parametrize("code, told", [("def x(:", "line 1"), ("raise RuntimeError('half done')", "half done")])
def test_a_file_that_cannot_be_imported_is_told(code, told, tmp_path, monkeypatch, capsys):
    (tmp_path / "exercise1_triton_basics.py").write_text(code)
    monkeypatch.setattr(check, "HERE", tmp_path)
    assert check.main(["exercise1"]) == 1
    assert told in capsys.readouterr().out


def test_an_error_in_a_task_names_the_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "exercise1_triton_basics.py").write_text("def memory_lines(*args, line=0):\n    return 1 // 0\n")
    monkeypatch.setattr(check, "HERE", tmp_path)
    check.main(["exercise1"])
    said = capsys.readouterr().out
    assert "ZeroDivisionError in line 2 of exercise1_triton_basics.py" in said
    assert "FAIL  rmsnorm_kernel: AttributeError" in said


def test_the_check_interprets_by_itself_without_a_gpu():
    command = [sys.executable, FOLDER / "check.py", "exercise2", "--solution"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "6 of 6" in done.stdout, done.stderr


def test_the_sweep_checks_every_block_size(capsys):
    assert sweep_swiglu.main([]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == len(sweep_swiglu.NAIVE_BLOCKS) + 1 + len(sweep_swiglu.ACTIVATION_BLOCKS)
    assert all((" us " if sweep_swiglu.ON_GPU else "right") in line for line in lines)


def test_the_sweep_refuses_a_wrong_result(monkeypatch, capsys):
    monkeypatch.setattr(sweep_swiglu.F, "silu", lambda x: x)
    assert sweep_swiglu.main([]) == 1
    assert "WRONG" in capsys.readouterr().out
