"""The puzzles: each usual mistake fails its own puzzle, with the hint that names it, and the pictures are true."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import tiny_llama_v3 as llama
from exercises import check, drawings
from exercises.checks import ON_GPU, puzzles

ROOT = Path(__file__).resolve().parents[2]
SOLUTION = ROOT / "exercises" / "solutions" / "puzzles.py"
pytestmark = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")

MISTAKES = {  # the puzzle: (a line of the solution, what a participant might write, words of the hint)
    "copy_kernel": [
        ("x = tl.load(x_ptr + offsets)", "x = tl.load(x_ptr)", "every element is x[0]"),
        ("tl.store(y_ptr + offsets, x)", "tl.store(y_ptr + offsets, offsets)", "these are the offsets"),
        ("tl.store(y_ptr + offsets, x)", "tl.store(y_ptr, tl.max(tl.where(offsets == 0, x, float('-inf')), axis=0))",
         "only these elements are right: 0"),
        ("tl.arange(0, BLOCK_SIZE)", "tl.arange(0, 8)", "only these elements are right: 0 to 7"),
        ("tl.arange(0, BLOCK_SIZE)", "1 + tl.arange(0, BLOCK_SIZE)", "run from 0 to BLOCK_SIZE - 1"),
        ("tl.arange(0, BLOCK_SIZE)", "tl.arange(1, BLOCK_SIZE)", "power of 2"),
        ("tl.store(y_ptr + offsets, x)", "tl.store(y_ptr + offsets * 1000000000, x)", "offset 1000000000 of y"),
        ("tl.store(y_ptr + offsets, x)", "pass", "nothing is stored"),
        ("tl.load(x_ptr + offsets)", "x_ptr[offsets]", "a pointer is one address"),
        ("tl.load(x_ptr + offsets)\n    tl.store(y_ptr", "tl.load(y_ptr + offsets)\n    tl.store(x_ptr",
         "loads from y before anything is stored there: it is a result"),
        ("tl.store(y_ptr + offsets, x)", "for i in range(BLOCK_SIZE): tl.store(y_ptr + i, tl.load(x_ptr + i))",
         "loads one element at a time, in a loop"),
    ],
    "masked_copy_kernel": [
        (", mask=mask", "", "line .. reads offset 5 of x, .* 3 lanes of program 0: .* tl.load(..., mask=mask)"),
        (", x, mask=mask", ", x", "line .. writes offset 5 of y, .* 3 lanes .* tl.store(..., mask=mask)"),
        ("x_ptr + offsets, mask=mask", "x_ptr + offsets", "reads offset 5 of x"),
        ("offsets < n_elements", "offsets <= n_elements", "one too many; .* < or <=?"),
        ("offsets < n_elements", "offsets >= n_elements", "the wrong way round"),
        ("offsets < n_elements", "offsets < n_elements - 1", "1 of 5 elements"),
    ],
    "grid_copy_kernel": [
        ("tl.program_id(0) * BLOCK_SIZE + ", "", "block begins at tl.program_id(0) * BLOCK_SIZE"),
        ("tl.program_id(0) * BLOCK_SIZE + ", "tl.program_id(0) + ", "block begins at tl.program_id(0) * BLOCK_SIZE"),
        ("offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)", "offsets = tl.arange(0, 64)",
         "program 1 stores what program 0 has stored in y"),
        (", mask=mask", "", "offset 10 of x, .* 2 lanes of program 2"),
        ("mask = offsets <", "mask = tl.arange(0, BLOCK_SIZE) <", "beyond the end"),
        ("offsets < n_elements", "offsets < BLOCK_SIZE", "elements are left out: is its mask right"),
        ("tl.program_id(0)", "tl.program_id(1)", "block begins at tl.program_id(0) * BLOCK_SIZE"),
    ],
    "outer_sum_kernel": [
        ("rows[:, None] * n_cols", "rows[:, None] * BLOCK_N", "row i of z begins at element i * n_cols"),
        ("mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]", "mask = (rows < n_rows)[:, None]",
         "cols of the block that do not exist are stored"),
        ("mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]", "mask = (cols < n_cols)[None, :]",
         "rows of the block that do not exist are stored"),
        ("x = tl.load(x_ptr + rows, mask=rows < n_rows)", "x = tl.load(x_ptr + rows)", "x has 3 elements"),
        ("(x_ptr + rows, mask=rows < n_rows)[:, None]", "(x_ptr + cols, mask=cols < n_cols)[None, :]",
         "which of rows and cols"),
        ("rows[:, None] * n_cols + cols[None, :], x", "cols[None, :] * n_cols + rows[:, None], x", "row i of z begins"),
        ("x + y, mask", "x + y * 0, mask", "y is not in it"),
        ("(rows < n_rows)[:, None] & (cols < n_cols)[None, :]", "(rows < n_rows) & (cols < n_cols)", "4 and 8"),
        ("(rows < n_rows)[:, None] & (cols < n_cols)[None, :]", "rows[:, None] < n_rows & cols[None, :] < n_cols",
         "needs parentheses around each comparison"),
        ("(rows < n_rows)[:, None] & (cols", "(rows < n_rows)[:, None] and (cols", "combine masks by & and |"),
    ],
    "transpose_kernel": [
        (" * stride_col", "", "lie stride_col = 6 apart, not 1"),
        ("rows[:, None] * stride_row", "rows[:, None] * n_cols", "stride_row = 7 apart, not n_cols = 5"),
        ("cols[None, :] * n_rows + rows[:, None]", "rows[:, None] * n_cols + cols[None, :]", "this is x as it was"),
        ("cols[None, :] * n_rows", "cols[None, :] * n_cols", "y[j, i] is element j * n_rows + i"),
        ("x, mask=mask", "x", "is there mask=mask?"),
    ],
    "row_sum_kernel": [
        (", mask=cols < n_cols, other=0.0", "", "the last block of a row is not full"),
        (", other=0.0)\n        total", ")\n        total", "give it a value with other=0.0"),
        ("tl.sum(x.to", "tl.max(x.to", "tl.max for tl.sum"),
        ("cols < n_cols", "cols < BLOCK_SIZE", "the first block only"),
        ("tl.sum(x.to(tl.float32), axis=0)", "x.to(tl.float32)", "a block is stored at one address"),
        ("other=0.0)\n        total", "other=1.0)\n        total", "2 too many: what the mask leaves out counts as 1"),
        ("total += tl.sum", "total = tl.sum", "the last block only"),
        ("cols = start + tl.arange(0, BLOCK_SIZE)", "cols = tl.arange(0, BLOCK_SIZE)", "cols moves with start"),
        ("x.to(tl.float32)", "x", "the few digits of fp16"),
        ("row * stride_row", "row * n_cols", "rows begin stride_row elements apart"),
        ("total += tl.sum(x.to(tl.float32), axis=0)", "pass", "is 0, what total began with: add the sum"),
    ],
    "softmax_kernel": [
        ("tl.exp(x - tl.max(x, axis=0))", "tl.exp(x)", "exp overflows"),
        ('other=float("-inf"))\n    p', "other=0.0)\n    p", "3 lanes that do not exist take part, as scores of 0"),
        (', other=float("-inf"))\n    p', ")\n    p", "give it a value with other=float"),
        ("p / tl.sum(p, axis=0)", "p", "not divided by the sum"),
        ('float("-inf")', "-1e4", "nothing is smaller than float"),
        ('float("-inf")', "-1.0", "the 3 lanes that do not exist take part"),
        ("tl.max(x", "tl.min(x", "what is subtracted from the scores is not the largest"),
        ("tl.exp(", "tl.exp2(", "tl.exp2 is a power of 2"),
        ("tl.sum(p, axis=0)", "tl.sum(tl.exp(x), axis=0)", "the sum lacks the maximum"),
        ("tl.exp(x - tl.max(x, axis=0))", "tl.exp(x) - tl.max(x, axis=0)", "subtracted before exp"),
        ("row * n_cols + cols, p", "cols, p", "program p works on row p: y_ptr + row"),
        ("p / tl.sum(p, axis=0), mask=cols < n_cols", "p / tl.sum(p, axis=0)", "the block is longer than the row"),
    ],
    "row_max_kernel": [
        ('cols < n_cols, other=float("-inf"))\n        largest', "cols < BLOCK_SIZE, other=0.0)\n        largest",
         "[8.0, 5.0, 0.0], expected .*: wrong where the largest is not in the first block, or lies below zero"),
        ('cols < n_cols, other=float("-inf"))\n        largest', "cols < n_cols, other=0.0)\n        largest",
         "wrong where all lie below zero; 0 is not in that row"),
        ('cols < n_cols, other=float("-inf"))\n        largest',
         'cols < BLOCK_SIZE, other=float("-inf"))\n        largest',
         "wrong where the largest is not in the first block; print start and the mask"),
        (', other=float("-inf"))\n        largest', ")\n        largest", "infinite: .* is never the largest?"),
        ("mask=cols < n_cols, ", "", "`other` cannot be provided without `mask`"),
    ],
    "multiply_tile": [
        ("z += tl.dot", "z = tl.dot", "the last two tiles only"),
        ("inner = start + ", "inner = ", "inner moves with start"),
        (", mask=x_mask, other=0.0", "", "its mask is rows < n_rows and inner < n_inner"),
        (", mask=y_mask, other=0.0", "", "its mask is inner < n_inner and cols < n_cols"),
        (", mask=x_mask, other=0.0", ", mask=x_mask", "give it a value with other=0.0"),
        ("inner[:, None] * n_cols + cols[None, :]", "inner[:, None] + cols[None, :] * n_inner",
         "as if its columns lay one after the other"),
        ("z += tl.dot(x, y, input_precision=\"ieee\")", "pass", "is 0, what it began with: add the product"),
        ("rows[:, None] * n_inner + inner", "rows[:, None] * n_inner + tl.arange(0, BLOCK_K)", "the tile of x is the"),
        (', input_precision="ieee"', "", "few right digits: .* on NVIDIA GPUs unless input_precision"),
    ],
    "grouped_matmul_kernel": [
        ("min(tiles_down - first_row, GROUP)", "GROUP", "the last one perhaps fewer"),
        ("program % (GROUP * tiles_across) % rows_here", "program % rows_here", "expected program"),
        ("% rows_here", "// tiles_across", "the last one perhaps fewer"),
        ("program // (GROUP * tiles_across) * GROUP", "program // (GROUP * tiles_across)", "the last one perhaps"),
        ("first_row + program % (GROUP * tiles_across) % rows_here", "program // tiles_across\n"
         "    rows_here = 1\n    program = program % tiles_across", "row after row, as without groups"),
    ],
    "tuned_matmul_kernel": [
        ('"M", "N", "K"', '"M", "N"', "is K in key?"),
        ('key=["M", "N", "K"]', "key=[]", "key is empty"),
        (', "GROUP": 8', "", "GROUP"),
    ],
    "scaled_matmul_kernel": [
        ("x_scale, \"e4m3\", y, y_scale", "x_scale, \"e4m3\", y, x_scale", "elements of z of 16 x 16"),
        ("x_scale, \"e4m3\", y, y_scale", "x_scale, \"e4m3\", y, None", "y is not scaled"),
        ("x, x_scale, \"e4m3\"", "x, None, \"e4m3\"", "x is not scaled"),
        ('"e4m3", z)', '"e4m3")', "this is the last tile only"),
        ("cols[None, :] * n_inner + inner[:, None]", "cols[:, None] * n_inner + inner[None, :]", ""),
        ("rows[:, None] * (n_inner // 32)", "rows[:, None] * n_inner", "n_inner // 32 scales"),
    ],
}  # fmt: skip
CASES = [(task, *mistake) for task, mistakes in MISTAKES.items() for mistake in mistakes]


def kernel_source(code, name):
    """The part of the file that defines a kernel, from its decorators to the next one."""
    return next(part for part in re.split(r"\n\n\n(?=@)", code) if f"def {name}(" in part)


@pytest.mark.skipif(ON_GPU, reason="what a kernel touches is seen in the interpreter")
@pytest.mark.parametrize("task, right, wrong, hint", CASES, ids=[f"{task}: {wrong}" for task, _, wrong, _ in CASES])
def test_a_mistake_fails_its_puzzle_with_the_hint_that_names_it(task, right, wrong, hint, tmp_path):
    code = SOLUTION.read_text()
    kernel = kernel_source(code, task)
    assert right in kernel
    path = tmp_path / "puzzles.py"
    path.write_text(code.replace(kernel, kernel.replace(right, wrong)))
    reason = check.judge(path, puzzles, task).message
    assert reason and re.search(re.sub(r"[][()?+*]", r"\\\g<0>", hint).replace(r".\*", ".*"), reason), reason


@pytest.mark.skipif(ON_GPU, reason="what a kernel touches is seen in the interpreter")
def test_the_line_that_touches_what_no_tensor_holds_is_named(tmp_path):
    code = SOLUTION.read_text().replace("y_ptr + offsets, x, mask=mask", "y_ptr + offsets, x")
    (tmp_path / "puzzles.py").write_text(code)
    reason = check.judge(tmp_path / "puzzles.py", puzzles, "masked_copy_kernel").message
    line = int(re.match(r"line (\d+) writes offset 5 of y, where y has no element, in 3 lanes", reason)[1])
    assert "tl.store(y_ptr + offsets, x)" in code.splitlines()[line - 1]


def test_another_file_is_checked_in_its_place(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(SOLUTION.read_text())
    options = ["puzzles", "--task", "copy", "--progress", str(tmp_path / "progress.json")]
    assert check.main([*options, "--file", str(tmp_path / "mine.py")]) == 0
    assert "PASS  copy_kernel" in capsys.readouterr().out
    for wrong, told in (([str(tmp_path)], "is no file"), ([str(tmp_path / "mine.py"), "--solution"], "exclude")):
        assert check.main(["puzzles", "--file", *wrong]) == 2 and told in capsys.readouterr().err


def test_every_puzzle_has_at_least_two_mistakes_planted():
    assert MISTAKES.keys() == puzzles.TASKS.keys()
    assert all(len(mistakes) >= 2 for mistakes in MISTAKES.values())


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


# --- pictures


@pytest.mark.skipif(ON_GPU, reason="what a kernel touches is seen in the interpreter")
@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_a_picture_is_drawn_from_its_check_and_fits(name):
    picture = drawings.DRAWINGS[name]()
    assert (ROOT / "exercises" / "pictures" / f"{name}.svg").read_text() == picture, "python -m exercises.generate"
    root = ElementTree.fromstring(picture)
    assert root.find("{*}title").text and root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    assert "prefers-color-scheme: dark" in picture
    right, bottom = int(root.get("width")), int(root.get("height"))
    for shape in root.findall(".//{*}path"):
        places = [float(number) for number in re.findall(r"-?[\d.]+", shape.get("d"))]
        assert all(0 <= x <= right for x in places[::2]) and all(0 <= y <= bottom for y in places[1::2])
    for text in root.findall(".//{*}text"):
        assert 0 <= float(text.get("x")) <= right and 16 <= float(text.get("y")) <= bottom - 2


def test_every_picture_stands_on_a_page_with_words_for_those_who_do_not_see_it():
    pages = "".join(page.read_text() for page in ROOT.glob("[de]*/*.md"))
    shown = dict((name, words) for words, name in re.findall(r"!\[(.+?)\]\(\S*pictures/(\w+)\.svg\)", pages))
    assert shown.keys() == drawings.DRAWINGS.keys() and all(len(words) > 20 for words in shown.values())


def test_the_online_softmax_s_last_frame_is_the_whole_softmax():
    scores, values = (torch.tensor(row, dtype=torch.float64) for row in (drawings.SCORES, drawings.VALUES))
    wanted = (torch.softmax(scores, 0) @ values).item()
    assert f"acc / l = {wanted:.3f}," in drawings.online_softmax()
    assert drawings.online_softmax().count("old sums x e^(") == 4
