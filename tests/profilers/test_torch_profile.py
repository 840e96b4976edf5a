"""A program under torch.profiler: it runs as if by itself, and its trace and table are those of its whole run."""

import os
import subprocess
import sys

import pytest

from profilers import hotspots
from profilers.readers import read_kernels, read_ranges
from tests import ROOT

PROGRAM = """
import os, sys
print(sys.argv[1:], os.getcwd(), os.environ.get("PYTHONPATH"), sys.path, "triton" in sys.modules)
import torch
from beside import number  # sums of 8 numbers
from tiny_llama_v3 import MINE
def multiply(count):
    for _ in range(count):
        torch.ones(4, 4) @ torch.ones(4, 4)
multiply(3)
if number == 1:
    for _ in range(2):
        with torch.profiler.record_function("step"):
            multiply(5)
multiply(4)
sys.exit(MINE + number)
"""


def profile(tmp_path, number):
    """Record the program, started in another folder; return (what it printed, its exit code)."""
    program = tmp_path / "own" / "program.py"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    (program.parent / "beside.py").write_text(f"number = {number}\n")
    (program.parent / "tiny_llama_v3.py").write_text("MINE = 4\n")  # and not the project's
    (tmp_path / "here").mkdir()
    command = [sys.executable, ROOT / "profilers" / "torch_profile.py", tmp_path, "../own/program.py", "--help", "a 'b"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path / "here", env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout, done.returncode


@pytest.mark.parametrize("number, steps, products", [(1, 2, 10), (2, 0, 7)])
def test_a_recorded_program_is_on_its_own_and_its_steps_are_found(tmp_path, capsys, number, steps, products):
    """It has its arguments, folder, modules and exit code; Triton is not imported before it chooses its interpreter."""
    out, code = profile(tmp_path, number)
    show = [sys.executable, "-c", "import sys; print([sys.argv[1], *sys.path[1:]])", tmp_path / "own"]
    paths = subprocess.run(show, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""}).stdout.strip()
    assert out == f"""['--help', "a 'b"] {tmp_path}/here None {paths} False\n""" and code == 4 + number
    table, found, processes = read_kernels(tmp_path)
    calls = dict(zip(table["Name"], table["Calls"], strict=True))
    # Of a whole run the table is torch.profiler's, of the operators inside others too.
    product = "aten::matmul" if steps else "aten::mm"
    assert (found, processes, calls[product], calls["aten::ones"]) == (steps, 1, products, 2 * products)
    (around,) = read_ranges(tmp_path).query("Name == 'program'").itertuples()
    assert (read_ranges(tmp_path, "dispatches")["Start"].between(around.Start, around.End)).all()
    assert hotspots.main([str(tmp_path), "--program", "program.py"]) == 0
    assert ("program.py marks no steps: times are of the whole run" in capsys.readouterr().out) == (not steps)


def test_an_error_of_the_program_is_a_traceback(python, tmp_path):
    (tmp_path / "program.py").write_text("import torch\ntorch.ones(1) + 1\nopen('absent')\n")
    command = [python, ROOT / "profilers" / "torch_profile.py", tmp_path, tmp_path / "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "open('absent')" in done.stderr
    assert "aten::add" in (tmp_path / "kernel_stats.csv").read_text()


@pytest.mark.gpu
def test_on_a_gpu_the_kernels_are_recorded_and_no_operators(tmp_path):
    (tmp_path / "program.py").write_text(
        "import torch\nfor _ in range(3):\n    torch.rand(2, 9, device='cuda').softmax(1)\n"
    )
    command = [sys.executable, ROOT / "profilers" / "torch_profile.py", tmp_path, tmp_path / "program.py"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, timeout=100)
    table, _, _ = read_kernels(tmp_path)
    calls = {
        name: calls for name, calls in zip(table["Name"], table["Calls"], strict=True) if "softmax" in name.lower()
    }
    assert list(calls.values()) == [3] and not any(name.startswith("aten::") for name in table["Name"])
    assert len(read_ranges(tmp_path, "dispatches")) == sum(table["Calls"])
