"""Exercise 1: a kernel that walks along a row, and what its loads cost.

Check with: python exercises/check.py exercise1
"""
# ruff: noqa: F401, F841 (the blanks will use what nothing uses yet)

import triton
import triton.language as tl


@triton.jit
def rmsnorm_kernel(x_ptr, weight_ptr, y_ptr, stride_row, n_cols, eps, BLOCK_SIZE: tl.constexpr):
    """y = x / sqrt(mean(x^2) + eps) * weight of one row a program, BLOCK_SIZE columns at a time.

    x has rows stride_row elements apart; y has rows of n_cols elements, one right after the other.
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
    """Lines of memory that a load of block_size elements touches.

    The elements are itemsize bytes long and begin stride elements apart, the first at the beginning of a line. A line
    of line bytes is what the memory hands out at once.
    """
    raise NotImplementedError("FILL ME IN (1 line)")


def bytes_moved(n_rows, n_cols, itemsize):
    """(fused, separate): bytes read and written for an RMSNorm of (n_rows, n_cols), single rows and columns left out.

    separate is the sum over the kernels of x.pow(2), .mean(-1), x * rstd and (...) * weight.
    """
    raise NotImplementedError("FILL ME IN (2 lines)")
