"""The puzzles: what their page says about debugging is so, solutions compile, and pictures are shown."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_llama_v3 as llama
from exercises import check
from exercises.checks import puzzles

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "exercises" / "pictures"
pytestmark = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")


COMPILE = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from exercises.solutions import puzzles

TARGETS = GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)


@triton.jit
def printing(x_ptr, BLOCK_SIZE: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK_SIZE))
    if tl.program_id(0) == 2:
        tl.device_print("x", x)
    print("x", x)
    tl.static_print(x)


@triton.jit
def printing_without_a_string(x_ptr, BLOCK_SIZE: tl.constexpr):
    print(tl.load(x_ptr + tl.arange(0, BLOCK_SIZE)))


@triton.jit
def stopping(x_ptr, BLOCK_SIZE: tl.constexpr):
    breakpoint()


kernels = {name: kernel for name, kernel in vars(puzzles).items() if name.endswith("_kernel")}
kernels["tuned_matmul_kernel"] = kernels["tuned_matmul_kernel"].fn  # without the autotuner
for kernel in (*kernels.values(), printing, printing_without_a_string, stopping):
    scaled = "x_scale_ptr" in kernel.arg_names
    blocks = {name: 64 if scaled else 16 for name in kernel.arg_names if name.startswith(("BLOCK", "GROUP"))}
    pointer = {name: "*u8" if scaled and name != "z_ptr" else "*fp32" for name in kernel.arg_names}
    signature = {name: "constexpr" if name in blocks else pointer[name] if name.endswith("_ptr") else "i32"
                 for name in kernel.arg_names}
    for target in TARGETS:
        try:
            triton.compile(ASTSource(kernel, signature=signature, constexprs=blocks), target=target)
            print("compiled", kernel.__name__, target.arch)
        except triton.CompilationError as error:
            print("refused", kernel.__name__, target.arch)
"""


@pytest.mark.slow
def test_the_solutions_compile_for_gpus_and_debugging_is_as_the_page_says(tmp_path):
    (tmp_path / "compile.py").write_text(COMPILE)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    environment["TRITON_CACHE_DIR"] = str(tmp_path)  # what is found there is not compiled, and prints nothing
    done = subprocess.run([sys.executable, tmp_path / "compile.py"], env=environment, capture_output=True, text=True)
    for kernel in (*(puzzles.TASKS.keys() - {"multiply_tile"}), "matmul_kernel", "printing"):
        assert f"compiled {kernel} 90\ncompiled {kernel} gfx942\n" in done.stdout.replace("fp32[constexpr[16]]\n", "")
    assert done.stdout.count("refused printing_without_a_string") == done.stdout.count("refused stopping") == 2
    assert "fp32[constexpr[16]]" in done.stdout  # of tl.static_print


DEBUGGED = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch, triton, triton.language as tl

@triton.jit
def kernel(x_ptr, n, BLOCK_SIZE: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + cols, mask=cols < n, other=0.0)
    if tl.program_id(0) == 1:
        print(x)
        tl.device_print("x", x)
        tl.static_print(cols)
        breakpoint()
    tl.store(x_ptr + cols, x, mask=cols < n)

kernel[(3,)](torch.arange(10.0), 10, BLOCK_SIZE=4)
"""


def test_the_interpreter_prints_and_stops_as_the_page_says(tmp_path, python):
    (tmp_path / "debugged.py").write_text(DEBUGGED)
    typed = "p x\np x * 2\nn\nc\n"
    done = subprocess.run([python, tmp_path / "debugged.py"], input=typed, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[4. 5. 6. 7.]\n(1, 0, 0) ")
    assert "x:  [4. 5. 6. 7.]\n[4 5 6 7]\n" in done.stdout
    assert "array([4., 5., 6., 7.]" in done.stdout and "array([ 8., 10., 12., 14.]" in done.stdout


REPLACED = """pass


import torch
torch.isclose = lambda *rest, **more: torch.ones(1) > 0
"""


@pytest.mark.parametrize("old, new, task, told", [
    ("copy_kernel(x_ptr,", "copy_kernel(x_ptr", "copy_kernel", "SyntaxError in line 8 of puzzles.py"),
    ("def matmul_kernel(", "def matmul_kernel x(", "multiply_tile", "SyntaxError in line 117 of puzzles.py"),
    ('"K"]', '"k"]', "tuned_matmul_kernel", " key"),
    ("@triton.jit\ndef copy", "def copy", "copy_kernel", "is @triton.jit above the kernel?"),
    ("x = tl.load(x_ptr + offsets)\n", "assert BLOCK_SIZE == 4\n", "copy_kernel", "puzzles.py: assert BLOCK_SIZE == 4"),
    ("tl.store(y_ptr + offsets, x)\n", REPLACED, "copy_kernel", "are wrong: at (0,) it is never stored"),
])  # fmt: skip
def test_an_error_in_one_puzzle_is_told_there_and_leaves_the_others(old, new, task, told, tmp_path):
    path, puzzle = tmp_path / "puzzles.py", check.EXERCISES["puzzles"]
    path.write_text((check.SOLUTIONS / path.name).read_text().replace(old, new, 1))
    assert told in check.judge(path, puzzle, task).message
    assert check.judge(path, puzzle, "row_sum_kernel").passed


def test_every_picture_stands_on_a_page_with_words_for_those_who_do_not_see_it():
    pages = "".join(page.read_text() for page in ROOT.glob("[de]*/*.md"))
    shown = {name: words for words, name in re.findall(r"!\[(.+?)\]\(\S*pictures/(\w+)\.svg\)", pages)}
    assert shown.keys() == {path.stem for path in PICTURES.iterdir()} and min(map(len, shown.values())) > 20
