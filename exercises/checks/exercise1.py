"""Checks of exercise 1."""

import itertools

import tiny_llama_v3 as llama
from exercises.checks.common import (
    CAST,
    FP32,
    HALF,
    TOLERANCE,
    counting,
    expect_close,
    randn,
    task,
    tasks_of,
    unwritten,
)
from exercises.checks.memory import launch
from exercises.solutions import exercise1_triton_basics as solution

FORMULA = "y = x * rstd * weight, with rstd = 1 / sqrt(mean of x^2 over n_cols + eps): square_sum begins at 0.0"
ROW = "program p stores row p: y_ptr + row * n_cols + cols, cols < n_cols"


@task(  # n_rows, n_cols, the elements between two rows, BLOCK_SIZE, eps, dtype, the size of x
    (3, 10, 5, 4),  # small enough to be drawn
    (2, 200, 7, 64, 0.5),
    (2, 1200, 7, 2048),
    (8, 800, 7, 512, 1e-5, HALF, 500),  # whose squares overflow in fp16
    (2, 64, 0, 64, 1e-5, FP32, 0),  # of zeros, which only eps keeps from 0 / 0
)
def rmsnorm_kernel(exercise, n_rows, n_cols, gap, block_size, eps=1e-5, dtype=FP32, size=1):
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
    hint = FORMULA if dtype == FP32 else CAST
    # In fp32 twice: its operations round one after the other.
    expect_close(y, wanted, TOLERANCE[dtype] * (1 + (dtype == FP32)), hint)


memory_lines = counting(
    "memory_lines",
    solution,
    "write down where each element begins, in bytes, and in which line that is",
    (32, 4, 1),
    # block_size, itemsize, stride, and the length of a line, which is 128 by default
    *itertools.product((1, 2, 3, 7, 50), (4, 2, 8), (1, 3, 7, 16, 25, 33, 1000), (128, 64)),
)


bytes_moved = counting(
    "bytes_moved",
    solution,
    "x comes in once and y goes out once; separate kernels each read their inputs and write their result",
    *[(61, 97, 4), (31, 257, 2)],  # n_rows, n_cols, itemsize
)


TASKS = tasks_of(rmsnorm_kernel, memory_lines, bytes_moved)
COMPILED = {"rmsnorm_kernel"}
