"""Checks of exercise 1."""

import itertools

import torch

import tiny_llama_v3 as llama
from exercises.checks.common import (
    counting,
    expect_close,
    randn,
    task,
    tasks_of,
    unwritten,
)
from exercises.checks.memory import launch
from exercises.solutions import exercise1_triton_basics as solution

FP32, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
ROW = "program p stores row p: y_ptr + row * n_cols + cols, cols < n_cols"


@task(  # n_rows, n_cols, the elements between two rows, BLOCK_SIZE, eps, dtype, tolerance
    (3, 10, 5, 4, 1e-5, FP32, 1e-5),  # small enough to be drawn
    (2, 512, 7, 64, 1e-5, FP32, 1e-5),
    (2, 200, 7, 64, 0.5, FP32, 1e-5),
    (1, 1, 7, 64, 1e-5, FP32, 1e-5),
    (2, 1200, 7, 2048, 1e-5, FP32, 1e-5),
    # Half an eps is what rounding to the type costs; the interpreter cuts bf16 off, which costs a whole one.
    (2, 200, 7, 64, 1e-5, HALF, 0.55 * 2**-10),
    (2, 200, 7, 64, 1e-5, BF16, 1.05 * 2**-7),
    (2, 64, 0, 64, 1e-5, FP32, 1e-5, 0.0),  # of zeros, which only eps keeps from 0 / 0
)
def rmsnorm_kernel(exercise, n_rows, n_cols, gap, block_size, eps, dtype, tolerance, size=None):
    # In fp16 the squares of such values overflow.
    size = size if size is not None else 500 if dtype == HALF else 1
    # What lies between and behind the rows is not theirs to read.
    x, weight = (randn(n_rows, n_cols + gap) * size).to(dtype)[:, :n_cols], randn(n_cols, dtype=dtype)
    y = launch(
        exercise.rmsnorm_kernel,
        (n_rows,),
        x,
        weight,
        unwritten(n_rows, n_cols, dtype=dtype),
        n_cols + gap,
        n_cols,
        eps,
        BLOCK_SIZE=block_size,
        share=ROW,
    )
    wanted, _ = llama.torch_rmsnorm(x.double(), None, weight.double(), eps)
    hint = "compare with the formula in the docstring"
    if dtype != FP32:
        hint = "right in fp32: is .to(tl.float32) behind each load?"
    expect_close(y, wanted, tolerance, hint)


memory_lines = counting(
    "memory_lines",
    solution,
    "write down where each element begins, in bytes, and in which line that is",
    # block_size, itemsize, stride, and the length of a line, which is 128 by default
    *[(32, 4, 1), (5, 4, 1), (90, 4, 1), (64, 4, 32), (64, 4, 1000)],
    *itertools.product((3, 1, 2, 7, 50), (4, 2, 8), (25, 1, 3, 7, 16, 33, 90), (128, 64)),
)


bytes_moved = counting(
    "bytes_moved",
    solution,
    "x comes in once and y goes out once; separate kernels each read their inputs and write their result",
    *[(61, 97, 4), (31, 257, 2)],  # n_rows, n_cols, itemsize
)


TASKS = tasks_of(rmsnorm_kernel, memory_lines, bytes_moved)
COMPILED = {"rmsnorm_kernel"}
