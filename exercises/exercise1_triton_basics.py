"""Exercise 1: a kernel that walks along a row, and what its loads cost.

Check with: python exercises/check.py exercise1
"""
# ruff: noqa: F401, F841 (the blanks will use what nothing uses yet)

import triton
import triton.language as tl


@triton.jit
def rmsnorm_kernel(x_ptr, weight_ptr, y_ptr, stride_row, n_cols, eps, BLOCK_SIZE: tl.constexpr):
    """y = x / sqrt(mean(x^2) + eps) * weight. Each program computes one row, BLOCK_SIZE columns at a time.

    The rows of x begin stride_row elements apart. Those of y have n_cols elements and follow each other without gaps.
    """
    row = tl.program_id(0)
    square_sum = 0.0
    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        # FILL ME IN (2 lines): load these columns of the row as fp32, and add their squares to square_sum.
    rstd = 1.0 / tl.sqrt(square_sum / n_cols + eps)
    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        # FILL ME IN (3 lines): load the columns again, load their weights, and store y.


def memory_lines(block_size, itemsize, stride, line=128):
    """The number of memory lines that a load of block_size elements touches.

    The elements are itemsize bytes long and begin stride elements apart, the first at the beginning of a line. Memory
    transfers whole lines of line bytes.
    """
    raise NotImplementedError("FILL ME IN (1 line)")


def bytes_moved(n_rows, n_cols, itemsize):
    """(fused, separate): bytes that an RMSNorm of (n_rows, n_cols) reads and writes, without single rows and columns.

    separate is the sum over the kernels of x.pow(2), .mean(-1), x * rstd and (...) * weight.
    """
    raise NotImplementedError("FILL ME IN (2 lines)")
