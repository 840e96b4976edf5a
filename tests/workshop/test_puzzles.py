"""The puzzles: each usual mistake fails its own puzzle, with the hint that names it, and the pictures are true."""

import re
from pathlib import Path

import pytest

import tiny_llama_v3 as llama
from exercises import check
from exercises.checks import puzzles

SOLUTION = Path(check.__file__).parent / "solutions" / "puzzles.py"
pytestmark = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")

MISTAKES = {  # the puzzle: (a line of the solution, what a participant might write, words of the hint)
    "copy_kernel": [
        ("x = tl.load(x_ptr + offsets)", "x = tl.load(x_ptr)", "every element is x[0]"),
        ("tl.store(y_ptr + offsets, x)", "tl.store(y_ptr + offsets, offsets)", "these are the offsets"),
        ("tl.store(y_ptr + offsets, x)", "tl.store(y_ptr, tl.max(tl.where(offsets == 0, x, float('-inf')), axis=0))",
         "only the first is stored"),
        ("tl.arange(0, BLOCK_SIZE)", "tl.arange(0, 8)", "only the first 8 are stored"),
        ("tl.arange(0, BLOCK_SIZE)", "1 + tl.arange(0, BLOCK_SIZE)", "run from 0 to BLOCK_SIZE - 1"),
        ("tl.arange(0, BLOCK_SIZE)", "tl.arange(1, BLOCK_SIZE)", "power of 2"),
        ("tl.store(y_ptr + offsets, x)", "pass", "nothing is stored"),
    ],
    "masked_copy_kernel": [
        (", mask=mask", "", "line .. reads element 5 of x, .* 3 lanes of program 0: .* tl.load(..., mask=mask)"),
        (", x, mask=mask", ", x", "line .. writes element 5 of y, .* 3 lanes .* tl.store(..., mask=mask)"),
        ("x_ptr + offsets, mask=mask", "x_ptr + offsets", "reads element 5 of x"),
        ("offsets < n_elements", "offsets <= n_elements", "one too many; .* < or <=?"),
        ("offsets < n_elements", "offsets >= n_elements", "the wrong way round"),
        ("offsets < n_elements", "offsets < n_elements - 1", "1 of 5 elements"),
    ],
    "grid_copy_kernel": [
        ("tl.program_id(0) * BLOCK_SIZE + ", "", "only the first block is stored"),
        ("tl.program_id(0) * BLOCK_SIZE + ", "tl.program_id(0) + ", "the blocks overlap"),
        (", mask=mask", "", "element 10 of x, .* 2 lanes of program 2"),
        ("mask = offsets <", "mask = tl.arange(0, BLOCK_SIZE) <", "beyond the end"),
        ("tl.program_id(0)", "tl.program_id(1)", "only the first block is stored"),
    ],
    "outer_sum_kernel": [
        ("rows[:, None] * n_cols", "rows[:, None] * BLOCK_N", "row i of z begins at element i * n_cols"),
        ("mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]", "mask = (rows < n_rows)[:, None]",
         "needs cols < n_cols"),
        ("mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]", "mask = (cols < n_cols)[None, :]",
         "needs rows < n_rows"),
        ("x = tl.load(x_ptr + rows, mask=rows < n_rows)", "x = tl.load(x_ptr + rows)", "x has 3 elements"),
        ("(x_ptr + rows, mask=rows < n_rows)[:, None]", "(x_ptr + cols, mask=cols < n_cols)[None, :]",
         "which of rows and cols"),
        ("rows[:, None] * n_cols + cols[None, :], x", "cols[None, :] * n_cols + rows[:, None], x", "row i of z begins"),
        ("x + y, mask", "x + y * 0, mask", "y is not in it"),
        ("(rows < n_rows)[:, None] & (cols < n_cols)[None, :]", "(rows < n_rows) & (cols < n_cols)", "4 and 8"),
    ],
    "transpose_kernel": [
        (" * stride_col", "", "lie stride_col = 6 apart, not 1"),
        ("rows[:, None] * stride_row", "rows[:, None] * n_cols", "stride_row = 7 apart, not n_cols = 5"),
        ("cols[None, :] * n_rows + rows[:, None]", "rows[:, None] * n_cols + cols[None, :]", "this is x as it was"),
        ("cols[None, :] * n_rows", "cols[None, :] * n_cols", "y[j, i] is element j * n_rows + i"),
        ("x, mask=mask", "x", "y has rows of n_rows elements"),
    ],
    "row_sum_kernel": [
        (", mask=cols < n_cols, other=0.0", "", "the last block of a row is not full"),
        (", other=0.0)\n        total", ")\n        total", "give it a value with other=0.0"),
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
        ("row * n_cols + cols, p", "cols, p", "does each row of y add up to 1?"),
        ("p / tl.sum(p, axis=0), mask=cols < n_cols", "p / tl.sum(p, axis=0)", "the block is longer than the row"),
    ],
    "row_max_kernel": [
        ('cols < n_cols, other=float("-inf"))\n        largest', "cols < BLOCK_SIZE, other=0.0)\n        largest",
         "[8.0, 5.0, 0.0] .* wrong where the largest is not in the first block, or lies below zero"),
        ('cols < n_cols, other=float("-inf"))\n        largest', "cols < n_cols, other=0.0)\n        largest",
         "wrong where all lie below zero; 0 is not in that row"),
        ('cols < n_cols, other=float("-inf"))\n        largest',
         'cols < BLOCK_SIZE, other=float("-inf"))\n        largest',
         "wrong where the largest is not in the first block; print start and the mask"),
        (', other=float("-inf"))\n        largest', ")\n        largest", "infinite: .* is never the largest?"),
        ("mask=cols < n_cols, ", "", "`other` cannot be provided without `mask`"),
    ],
    "matmul_kernel": [
        ("z += tl.dot", "z = tl.dot", "the last two tiles only"),
        ("inner = start + ", "inner = ", "inner moves with start"),
        (", mask=x_mask, other=0.0", "", "its mask is rows < n_rows and inner < n_inner"),
        (", mask=y_mask, other=0.0", "", "its mask is inner < n_inner and cols < n_cols"),
        (", mask=x_mask, other=0.0", ", mask=x_mask", "give it a value with other=0.0"),
        ("inner[:, None] * n_cols + cols[None, :]", "inner[:, None] + cols[None, :] * n_inner",
         "as if its columns lay one after the other"),
        ("z += tl.dot(x, y, input_precision=\"ieee\")", "pass", "is 0, what it began with: add the product"),
    ],
}  # fmt: skip
CASES = [(task, *mistake) for task, mistakes in MISTAKES.items() for mistake in mistakes]


def kernel_source(code, name):
    """The part of the file that defines a kernel, from its decorator to the next one."""
    return re.search(rf"@triton\.jit\ndef {name}\(.*?(?=\n\n\n@|\Z)", code, flags=re.S)[0]


@pytest.mark.parametrize("task, right, wrong, hint", CASES, ids=[f"{task}: {wrong}" for task, _, wrong, _ in CASES])
def test_a_mistake_fails_its_puzzle_with_the_hint_that_names_it(task, right, wrong, hint, tmp_path):
    code = SOLUTION.read_text()
    kernel = kernel_source(code, task)
    assert right in kernel
    path = tmp_path / "puzzles.py"
    path.write_text(code.replace(kernel, kernel.replace(right, wrong)))
    reason = check.judge(path, puzzles, task).message
    assert reason and re.search(re.sub(r"[][()?+*]", r"\\\g<0>", hint).replace(r".\*", ".*"), reason), reason


def test_the_line_that_touches_what_no_tensor_holds_is_named(tmp_path):
    code = SOLUTION.read_text().replace("y_ptr + offsets, x, mask=mask", "y_ptr + offsets, x")
    (tmp_path / "puzzles.py").write_text(code)
    reason = check.judge(tmp_path / "puzzles.py", puzzles, "masked_copy_kernel").message
    line = int(re.match(r"line (\d+) writes element 5 of y, which is none of its 5, in 3 lanes", reason)[1])
    assert "tl.store(y_ptr + offsets, x)" in code.splitlines()[line - 1]


def test_every_puzzle_has_at_least_two_mistakes_planted():
    assert MISTAKES.keys() == puzzles.TASKS.keys()
    assert all(len(mistakes) >= 2 for mistakes in MISTAKES.values())
