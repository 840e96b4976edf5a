"""Checks of exercise 1."""

import itertools

import torch

import tiny_llama_v3 as llama
from exercises.checks.common import (
    expect_close,
    expect_number,
    expect_several,
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


@task(  # block_size, itemsize, stride, line
    *[(32, 4, 1, 128), (5, 4, 1, 128), (90, 4, 1, 128), (64, 4, 32, 128), (64, 4, 1000, 128)],
    *itertools.product((3, 1, 2, 7, 50), (4, 2, 8), (25, 1, 3, 7, 16, 33, 90), (128, 64)),
)
def memory_lines(exercise, block_size, itemsize, stride, line):
    sizes = block_size, itemsize, stride
    named = {} if line == 128 else {"line": line}  # else the default
    got, wanted = exercise.memory_lines(*sizes, **named), solution.memory_lines(*sizes, line)
    hint = "write down where each element begins, in bytes, and in which line that is"
    expect_number(f"memory_lines{(*sizes, line)}", got, wanted, hint)


@task((61, 97, 4), (31, 257, 2))
def bytes_moved(exercise, n_rows, n_cols, itemsize):
    got, wanted = exercise.bytes_moved(n_rows, n_cols, itemsize), solution.bytes_moved(n_rows, n_cols, itemsize)
    expect_several(got, "fused", "separate")
    case = f"for {n_rows} rows of {n_cols} elements of {itemsize} bytes"
    expect_number(f"fused {case}", got[0], wanted[0], "x comes in once, y goes out once, single rows are left out")
    hint = "each of the four kernels reads its inputs and writes its result; the mean writes a single column"
    expect_number(f"separate {case}", got[1], wanted[1], hint)


TASKS = tasks_of(rmsnorm_kernel, memory_lines, bytes_moved)
COMPILED = {"rmsnorm_kernel"}
