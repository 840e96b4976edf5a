"""Puzzles: from a block that is copied to a product of tiles, one idea each."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(x_ptr, y_ptr, BLOCK_SIZE: tl.constexpr):
    """y = x, both (BLOCK_SIZE,). One program."""
    offsets = tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offsets)
    tl.store(y_ptr + offsets, x)


@triton.jit
def masked_copy_kernel(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    """y = x, both (n_elements,), with n_elements <= BLOCK_SIZE. One program."""
    offsets = tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(y_ptr + offsets, x, mask=mask)


@triton.jit
def grid_copy_kernel(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    """y = x, both (n_elements,). Grid: (blocks of BLOCK_SIZE elements, the last one perhaps not full)."""
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(y_ptr + offsets, x, mask=mask)


@triton.jit
def outer_sum_kernel(x_ptr, y_ptr, z_ptr, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """z[i, j] = x[i] + y[j]. One program.

    x (n_rows,), y (n_cols,), z (n_rows, n_cols) with one row right after the other; n_rows <= BLOCK_M and
    n_cols <= BLOCK_N.
    """
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + rows, mask=rows < n_rows)[:, None]
    y = tl.load(y_ptr + cols, mask=cols < n_cols)[None, :]
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    tl.store(z_ptr + rows[:, None] * n_cols + cols[None, :], x + y, mask=mask)


@triton.jit
def transpose_kernel(
    x_ptr, y_ptr, n_rows, n_cols, stride_row, stride_col, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """y[j, i] = x[i, j]. Grid: (blocks of rows, blocks of columns).

    x (n_rows, n_cols) has rows stride_row and columns stride_col elements apart; y (n_cols, n_rows) has one row right
    after the other.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_row + cols[None, :] * stride_col, mask=mask)
    tl.store(y_ptr + cols[None, :] * n_rows + rows[:, None], x, mask=mask)


@triton.jit
def row_sum_kernel(x_ptr, y_ptr, n_cols, stride_row, BLOCK_SIZE: tl.constexpr):
    """y[row] = the sum of x[row], kept in fp32. Grid: (n_rows,).

    x (n_rows, n_cols) is fp16 with rows stride_row elements apart, y (n_rows,) is fp32. A row may be longer than a
    block.
    """
    row = tl.program_id(0)
    total = 0.0
    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        x = tl.load(x_ptr + row * stride_row + cols, mask=cols < n_cols, other=0.0)
        total += tl.sum(x.to(tl.float32), axis=0)
    tl.store(y_ptr + row, total)


@triton.jit
def softmax_kernel(x_ptr, y_ptr, n_cols, BLOCK_SIZE: tl.constexpr):
    """y[row] = exp(x[row]) / sum(exp(x[row])). Grid: (n_rows,).

    x and y (n_rows, n_cols) are fp32 with one row right after the other; n_cols <= BLOCK_SIZE.
    """
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=float("-inf"))
    p = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * n_cols + cols, p / tl.sum(p, axis=0), mask=cols < n_cols)


@triton.jit
def row_max_kernel(x_ptr, y_ptr, n_cols, stride_row, BLOCK_SIZE: tl.constexpr):
    """y[row] = the largest element of x[row]. Grid: (n_rows,).

    x (n_rows, n_cols) is fp32 with rows stride_row elements apart, y (n_rows,). A row may be longer than a block.
    """
    row = tl.program_id(0)
    largest = float("-inf")
    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        x = tl.load(x_ptr + row * stride_row + cols, mask=cols < n_cols, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(x, axis=0))
    tl.store(y_ptr + row, largest)


@triton.jit
def matmul_kernel(
    x_ptr, y_ptr, z_ptr, n_rows, n_cols, n_inner, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """z = x @ y. Grid: (blocks of rows, blocks of columns).

    x (n_rows, n_inner), y (n_inner, n_cols), z (n_rows, n_cols), fp32, each with one row right after the other.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    z_mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    z = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, n_inner, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        x_mask = (rows < n_rows)[:, None] & (inner < n_inner)[None, :]
        y_mask = (inner < n_inner)[:, None] & (cols < n_cols)[None, :]
        x = tl.load(x_ptr + rows[:, None] * n_inner + inner[None, :], mask=x_mask, other=0.0)
        y = tl.load(y_ptr + inner[:, None] * n_cols + cols[None, :], mask=y_mask, other=0.0)
        z += tl.dot(x, y, input_precision="ieee")
    tl.store(z_ptr + rows[:, None] * n_cols + cols[None, :], z, mask=z_mask)
