"""Puzzles: from a block that is copied to a product in 8 bits, one idea each."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(x_ptr, y_ptr, BLOCK_SIZE: tl.constexpr):
    offsets = tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offsets)
    tl.store(y_ptr + offsets, x)


@triton.jit
def masked_copy_kernel(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.arange(0, BLOCK_SIZE)
    # False where the block is longer than the tensor: nothing is touched there.
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(y_ptr + offsets, x, mask=mask)


@triton.jit
def grid_copy_kernel(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(y_ptr + offsets, x, mask=mask)


@triton.jit
def outer_sum_kernel(x_ptr, y_ptr, z_ptr, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    # A column and a row broadcast to a tile, as in NumPy.
    x = tl.load(x_ptr + rows, mask=rows < n_rows)[:, None]
    y = tl.load(y_ptr + cols, mask=cols < n_cols)[None, :]
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    tl.store(z_ptr + rows[:, None] * n_cols + cols[None, :], x + y, mask=mask)


@triton.jit
def transpose_kernel(
    x_ptr, y_ptr, n_rows, n_cols, stride_row, stride_col, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_row + cols[None, :] * stride_col, mask=mask)
    # The same tile, at the addresses of its transpose.
    tl.store(y_ptr + cols[None, :] * n_rows + rows[:, None], x, mask=mask)


@triton.jit
def row_sum_kernel(x_ptr, y_ptr, n_cols, stride_row, BLOCK_SIZE: tl.constexpr):
    row = tl.program_id(0)
    total = 0.0
    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        x = tl.load(x_ptr + row * stride_row + cols, mask=cols < n_cols, other=0.0)
        # fp32: in fp16, adding 1 to 2048 changes nothing.
        total += tl.sum(x.to(tl.float32), axis=0)
    tl.store(y_ptr + row, total)


@triton.jit
def softmax_kernel(x_ptr, y_ptr, n_cols, BLOCK_SIZE: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=float("-inf"))
    # -inf is never the largest, and exp(-inf) adds 0 to the sum.
    p = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * n_cols + cols, p / tl.sum(p, axis=0), mask=cols < n_cols)


@triton.jit
def row_max_kernel(x_ptr, y_ptr, n_cols, stride_row, BLOCK_SIZE: tl.constexpr):
    row = tl.program_id(0)
    largest = float("-inf")
    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        x = tl.load(x_ptr + row * stride_row + cols, mask=cols < n_cols, other=float("-inf"))
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
    rows = tile_row * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_col * BLOCK_N + tl.arange(0, BLOCK_N)
    z_mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    z = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, n_inner, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        x_mask = (rows < n_rows)[:, None] & (inner < n_inner)[None, :]
        y_mask = (inner < n_inner)[:, None] & (cols < n_cols)[None, :]
        x = tl.load(x_ptr + rows[:, None] * n_inner + inner[None, :], mask=x_mask, other=0.0)
        y = tl.load(y_ptr + inner[:, None] * n_cols + cols[None, :], mask=y_mask, other=0.0)
        # Each dimension has its mask: zeros add nothing to the product.
        z += tl.dot(x, y, input_precision="ieee")
    tl.store(z_ptr + rows[:, None] * n_cols + cols[None, :], z, mask=z_mask)


@triton.jit
def matmul_kernel(x_ptr, y_ptr, z_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
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
    program, tiles_down, tiles_across = tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    # A full group has GROUP * tiles_across programs.
    first_row = program // (GROUP * tiles_across) * GROUP
    # The last group may have fewer rows.
    rows_here = min(tiles_down - first_row, GROUP)
    tile_row = first_row + program % (GROUP * tiles_across) % rows_here
    tile_col = program % (GROUP * tiles_across) // rows_here
    multiply_tile(x_ptr, y_ptr, z_ptr, tile_row, tile_col, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K)


@triton.autotune(
    configs=[
        triton.Config({"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP": 8}, num_warps=4),
        triton.Config({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP": 8}, num_warps=4),
    ],
    key=["M", "N", "K"],
)
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
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    z = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, n_inner, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        scales = start // 32 + tl.arange(0, BLOCK_K // 32)
        x = tl.load(x_ptr + rows[:, None] * n_inner + inner[None, :])
        y = tl.load(y_ptr + cols[None, :] * n_inner + inner[:, None])
        x_scale = tl.load(x_scale_ptr + rows[:, None] * (n_inner // 32) + scales[None, :])
        y_scale = tl.load(y_scale_ptr + cols[:, None] * (n_inner // 32) + scales[None, :])
        # Scales are not transposed: a row of them for each row of x, and for each column of z.
        z = tl.dot_scaled(x, x_scale, "e4m3", y, y_scale, "e4m3", z)
    tl.store(z_ptr + rows[:, None] * n_cols + cols[None, :], z)


@triton.jit
def rope_kernel(x_ptr, cos_ptr, sin_ptr, y_ptr, half, BLOCK_SIZE: tl.constexpr):
    row, pair = tl.program_id(0), tl.arange(0, BLOCK_SIZE)
    mask = pair < half
    first = row * 2 * half + pair
    x1 = tl.load(x_ptr + first, mask=mask)
    x2 = tl.load(x_ptr + first + half, mask=mask)
    cos = tl.load(cos_ptr + row * half + pair, mask=mask)
    sin = tl.load(sin_ptr + row * half + pair, mask=mask)
    tl.store(y_ptr + first, x1 * cos - x2 * sin, mask=mask)
    tl.store(y_ptr + first + half, x2 * cos + x1 * sin, mask=mask)


@triton.jit
def rope_backward_kernel(y_grad_ptr, cos_ptr, sin_ptr, x_grad_ptr, half, BLOCK_SIZE: tl.constexpr):
    row, pair = tl.program_id(0), tl.arange(0, BLOCK_SIZE)
    mask = pair < half
    first = row * 2 * half + pair
    g1 = tl.load(y_grad_ptr + first, mask=mask)
    g2 = tl.load(y_grad_ptr + first + half, mask=mask)
    cos = tl.load(cos_ptr + row * half + pair, mask=mask)
    sin = tl.load(sin_ptr + row * half + pair, mask=mask)
    # The rotation back, by the same angle: the transposed matrix has the other sign of the sine.
    tl.store(x_grad_ptr + first, g1 * cos + g2 * sin, mask=mask)
    tl.store(x_grad_ptr + first + half, g2 * cos - g1 * sin, mask=mask)
