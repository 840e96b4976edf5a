"""Puzzles: from a block that is copied to a product in 8 bits, one idea each.

Check with: python exercises/check.py puzzles
"""
# ruff: noqa: F401, F841 (the blanks will use what nothing uses yet)

import triton
import triton.language as tl


@triton.jit
def copy_kernel(x_ptr, y_ptr, BLOCK_SIZE: tl.constexpr):
    """y = x, both (BLOCK_SIZE,). One program."""
    # FILL ME IN (3 lines): the offsets of a block, one load, one store.


@triton.jit
def masked_copy_kernel(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    """y = x, both (n_elements,), with n_elements <= BLOCK_SIZE. One program."""
    # FILL ME IN (4 lines): as before, and a mask of the elements that exist.


@triton.jit
def grid_copy_kernel(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    """y = x, both (n_elements,). Grid: (blocks of BLOCK_SIZE elements,); the last block may not be full."""
    # FILL ME IN (4 lines): as before, but each program has a block of its own.


@triton.jit
def outer_sum_kernel(x_ptr, y_ptr, z_ptr, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """z[i, j] = x[i] + y[j]. One program.

    x (n_rows,), y (n_cols,), z (n_rows, n_cols) without gaps between rows; n_rows <= BLOCK_M and
    n_cols <= BLOCK_N.
    """
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    # FILL ME IN (4 lines): load x as a column and y as a row, make a mask of both, and store their sum.


@triton.jit
def transpose_kernel(
    x_ptr, y_ptr, n_rows, n_cols, stride_row, stride_col, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """y[j, i] = x[i, j]. Grid: (blocks of rows, blocks of columns).

    x (n_rows, n_cols) has rows stride_row and columns stride_col elements apart; y (n_cols, n_rows) has no gaps
    between rows.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    # FILL ME IN (2 lines): the load and the store.


@triton.jit
def row_sum_kernel(x_ptr, y_ptr, n_cols, stride_row, BLOCK_SIZE: tl.constexpr):
    """y[row] = the sum of x[row], accumulated in fp32. Grid: (n_rows,).

    x (n_rows, n_cols) is fp16 with rows stride_row elements apart, y (n_rows,) is fp32. A row may be longer than a
    block.
    """
    row = tl.program_id(0)
    total = 0.0
    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        # FILL ME IN (2 lines): load these columns of the row, and add their sum to total.
    tl.store(y_ptr + row, total)


@triton.jit
def softmax_kernel(x_ptr, y_ptr, n_cols, BLOCK_SIZE: tl.constexpr):
    """y[row] = exp(x[row]) / sum(exp(x[row])). Grid: (n_rows,).

    x and y (n_rows, n_cols) are fp32 without gaps between rows; n_cols <= BLOCK_SIZE.
    """
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_SIZE)
    # FILL ME IN (4 lines): load the row, subtract its maximum, exponentiate, divide by the sum as you store.


@triton.jit
def row_max_kernel(x_ptr, y_ptr, n_cols, stride_row, BLOCK_SIZE: tl.constexpr):
    """y[row] = the largest element of x[row]. Grid: (n_rows,).

    x (n_rows, n_cols) is fp32 with rows stride_row elements apart, y (n_rows,). A row may be longer than a block.
    """
    # FILL ME IN (2 corrections): no line is missing, but two places are wrong.
    row = tl.program_id(0)
    largest = float("-inf")
    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        x = tl.load(x_ptr + row * stride_row + cols, mask=cols < BLOCK_SIZE, other=0.0)
        largest = tl.maximum(largest, tl.max(x, axis=0))
    tl.store(y_ptr + row, largest)


@triton.jit
def multiply_tile(
    x_ptr,
    y_ptr,
    z_ptr,
    tile_row,
    tile_col,
    n_rows,
    n_cols,
    n_inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Stores one tile of z = x @ y, the tile_row-th from the top and the tile_col-th from the left.

    x (n_rows, n_inner), y (n_inner, n_cols), z (n_rows, n_cols), fp32, each without gaps between rows.
    """
    rows = tile_row * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_col * BLOCK_N + tl.arange(0, BLOCK_N)
    z_mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    z = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, n_inner, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        # FILL ME IN (5 lines): load a tile of x and one of y, each with its mask, and add their product to z.
    tl.store(z_ptr + rows[:, None] * n_cols + cols[None, :], z, mask=z_mask)


@triton.jit
def matmul_kernel(x_ptr, y_ptr, z_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """z (M, N) = x (M, K) @ y (K, N). Grid: (tiles down, tiles across)."""
    multiply_tile(x_ptr, y_ptr, z_ptr, tl.program_id(0), tl.program_id(1), M, N, K, BLOCK_M, BLOCK_N, BLOCK_K)


@triton.jit
def grouped_matmul_kernel(
    x_ptr,
    y_ptr,
    z_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """z = x @ y, with programs in an order in which neighbors share tiles of x and y. Grid: (tiles of z,).

    GROUP rows of tiles are a group; the last group may have fewer. The programs take one group after the other, and in
    a group one column of tiles after the other, each from top to bottom.
    """
    program, tiles_down, tiles_across = tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile_row, tile_col = program // tiles_across, program % tiles_across  # FILL ME IN (4 lines): this is row after row
    multiply_tile(x_ptr, y_ptr, z_ptr, tile_row, tile_col, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K)


@triton.autotune(configs=[], key=[])  # FILL ME IN (4 lines): at least two of triton.Config({...}), and the sizes
@triton.jit
def tuned_matmul_kernel(
    x_ptr,
    y_ptr,
    z_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """As grouped_matmul_kernel, with the fastest of several tiles: Triton times them for each new size."""
    grouped_matmul_kernel(x_ptr, y_ptr, z_ptr, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP)


@triton.jit
def scaled_matmul_kernel(
    x_ptr,
    x_scale_ptr,
    y_ptr,
    y_scale_ptr,
    z_ptr,
    n_cols,
    n_inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """z = x @ y^T of numbers in 8 bits (e4m3), 32 of which share a scale. Grid: (blocks of rows, blocks of columns).

    x (n_rows, n_inner), y (n_cols, n_inner); x_scale (n_rows, n_inner / 32), y_scale (n_cols, n_inner / 32), each a
    byte that stands for 2^(byte - 127); z (n_rows, n_cols), fp32. All sizes are multiples of the blocks.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    z = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, n_inner, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        scales = start // 32 + tl.arange(0, BLOCK_K // 32)
        # FILL ME IN (5 lines): load both tiles, y's transposed, and their scales; add tl.dot_scaled to z.
    tl.store(z_ptr + rows[:, None] * n_cols + cols[None, :], z)


@triton.jit
def rope_kernel(x_ptr, cos_ptr, sin_ptr, y_ptr, half, BLOCK_SIZE: tl.constexpr):
    """Rotates the pairs of each row of x (n_positions, 2 * half); y like x. Grid: (n_positions,).

    Elements i and i + half of a row are the two coordinates of a point. It turns around 0 by the angle whose cosine and
    sine are element i of this row of cos and sin, (n_positions, half). BLOCK_SIZE is at least half.
    """
    # FILL ME IN (10 lines)


@triton.jit
def rope_backward_kernel(y_grad_ptr, cos_ptr, sin_ptr, x_grad_ptr, half, BLOCK_SIZE: tl.constexpr):
    """The gradient of x, of that of y: both (n_positions, 2 * half). Grid: (n_positions,)."""
    # FILL ME IN (10 lines)
