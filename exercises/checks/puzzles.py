"""Checks of the puzzles. The first case of each is the one that its picture shows."""

import math

import torch

import tiny_llama_v3 as llama
from exercises.checks import DEVICE, ON_GPU
from exercises.checks.common import expect, expect_close, randn, task, tasks_of, unwritten
from exercises.checks.memory import launch

cdiv = llama.cdiv


def padded(x, stride_row, stride_col=1):
    """Return x with rows and columns so many elements apart, and NaN between them."""
    n_rows, n_cols = x.shape
    # Whoever ignores the strides loads NaN, and sees it in the result.
    n_elements = (n_rows - 1) * stride_row + (n_cols - 1) * stride_col + 1
    memory = torch.full((n_elements,), math.nan, dtype=x.dtype, device=x.device)
    return memory.as_strided(x.shape, (stride_row, stride_col)).copy_(x)


@task((8,), (64,))  # BLOCK_SIZE
def copy_kernel(puzzles, block_size):
    x = randn(block_size)
    y = launch(puzzles.copy_kernel, (1,), x, unwritten(block_size), BLOCK_SIZE=block_size)
    hint = "element i of y is element i of x: y_ptr + offsets and x_ptr + offsets are blocks of BLOCK_SIZE addresses"
    expect_close(y, x, 0, hint)


@task((5, 8), (8, 8), (100, 128))  # n_elements, BLOCK_SIZE
def masked_copy_kernel(puzzles, n_elements, block_size):
    x = randn(n_elements)
    y = launch(puzzles.masked_copy_kernel, (1,), x, unwritten(n_elements), n_elements, BLOCK_SIZE=block_size)
    expect_close(y, x, 0, "where the mask is True, y[i] = x[i]")


@task((10, 4), (64, 32), (100, 32), (3, 8))  # n_elements, BLOCK_SIZE
def grid_copy_kernel(puzzles, n_elements, block_size):
    x, grid = randn(n_elements), (cdiv(n_elements, block_size),)
    y = launch(puzzles.grid_copy_kernel, grid, x, unwritten(n_elements), n_elements, BLOCK_SIZE=block_size)
    expect_close(y, x, 0, "program p copies the elements from p * BLOCK_SIZE on")


@task((3, 5, 4, 8), (5, 3, 8, 4), (4, 4, 4, 4), (1, 13, 2, 16))  # n_rows, n_cols, BLOCK_M, BLOCK_N
def outer_sum_kernel(puzzles, n_rows, n_cols, block_m, block_n):
    x, y, z = randn(n_rows), randn(n_cols), unwritten(n_rows, n_cols)
    z = launch(puzzles.outer_sum_kernel, (1,), x, y, z, n_rows, n_cols, BLOCK_M=block_m, BLOCK_N=block_n)
    hint = "z[i, j] = x[i] + y[j], and row i of z begins at element i * n_cols"
    expect_close(z, x[:, None] + y, 1e-6, hint)


TILE = "a program's tile begins at row tl.program_id(0) * BLOCK_M and column tl.program_id(1) * BLOCK_N"


@task(  # n_rows, n_cols, stride_row, stride_col, BLOCK_M, BLOCK_N
    (3, 5, 7, 1, 2, 4),
    (3, 5, 5, 1, 2, 4),
    (5, 3, 1, 6, 4, 2),
    (16, 16, 16, 1, 16, 16),
    (20, 7, 8, 1, 4, 4),
)
def transpose_kernel(puzzles, n_rows, n_cols, stride_row, stride_col, block_m, block_n):
    x = padded(randn(n_rows, n_cols), stride_row, stride_col)
    y = launch(
        puzzles.transpose_kernel,
        (cdiv(n_rows, block_m), cdiv(n_cols, block_n)),
        x,
        unwritten(n_cols, n_rows),
        n_rows,
        n_cols,
        stride_row,
        stride_col,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        share=f"y[j, i] is element j * n_rows + i, and {TILE}",
    )
    expect_close(y, x.T, 0, "y[j, i] = x[i, j], and the address in x takes both strides")


ROW = "program p works on row p: y_ptr + row"


@task((3, 10, 12, 4), (2, 3000, 3000, 1024), (2, 5, 9, 16))  # n_rows, n_cols, stride_row, BLOCK_SIZE
def row_sum_kernel(puzzles, n_rows, n_cols, stride_row, block_size):
    # Of 3000 numbers near 1 a sum in fp16 would stop at 2048.
    x = padded((torch.rand(n_rows, n_cols, device=DEVICE) + 0.5).half(), stride_row)
    args = x, unwritten(n_rows), n_cols, stride_row
    y = launch(puzzles.row_sum_kernel, (n_rows,), *args, BLOCK_SIZE=block_size, share=ROW)
    expect_close(y, x.double().sum(1), 1e-6, "is every block of the row added once?")


LOW = (-3 * 10**10,) * 3  # below what often stands in for minus infinity
SOFTMAX = ((2, 1, 0, 1, -1), 8), ((-11, -10, -9), 4), ((1000, 999, 0, -1000), 4), (LOW, 4)  # scores, BLOCK_SIZE


@task(*(((scores, scores[::-1]), block_size) for scores, block_size in SOFTMAX))
def softmax_kernel(puzzles, rows, block_size):
    x = torch.as_tensor(rows, device=DEVICE, dtype=torch.float32)
    n_rows, n_cols = x.shape
    args = x, unwritten(*x.shape), n_cols
    y = launch(puzzles.softmax_kernel, (n_rows,), *args, BLOCK_SIZE=block_size, share=ROW)
    expect_close(y, torch.softmax(x.double(), 1), 1e-5, "does each row of y add up to 1?")


MAXIMA = (4, 8, 1, 6, 3, 2), (3, 1, 5, 2, 9, 7), (-6, -2, -4, -3, -8, -5)
FAR_BELOW = tuple(tuple((score - 10) * 1e11 for score in row) for row in MAXIMA)


@task((MAXIMA, 6, 8, 4), (MAXIMA, 3, 8, 4), (FAR_BELOW, 6, 8, 4), (FAR_BELOW, 3, 8, 4))
def row_max_kernel(puzzles, rows, n_cols, stride_row, block_size):
    x = padded(torch.as_tensor(rows, device=DEVICE, dtype=torch.float32)[:, :n_cols], stride_row)
    args = x, unwritten(len(x)), n_cols, stride_row
    y = launch(puzzles.row_max_kernel, (len(x),), *args, BLOCK_SIZE=block_size, share=ROW)
    expect_close(y, x.amax(1), 0, "print x in the loop, and cols and the mask: which lanes are True?")


def square(block):
    """Return the constants of a kernel whose tiles have three equal sides."""
    return dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_K"), block)


@task((24, 20, 40, 16), (16, 16, 16, 16), (5, 33, 17, 16))  # n_rows, n_cols, n_inner, the block of all three
def multiply_tile(puzzles, n_rows, n_cols, n_inner, block):
    x, y = randn(n_rows, n_inner), randn(n_inner, n_cols)
    z = launch(
        puzzles.matmul_kernel,
        (cdiv(n_rows, block), cdiv(n_cols, block)),
        x,
        y,
        unwritten(n_rows, n_cols),
        n_rows,
        n_cols,
        n_inner,
        **square(block),
        share=TILE,
    )
    hint = "z[i, j] = sum of x[i, k] * y[k, j], and x[i, k] is element i * n_inner + k of x"
    expect_close(z, x.double() @ y.double(), 1e-4, hint)


GROUPS = (
    "a group has GROUP rows of tiles, the last one perhaps fewer, and so many programs times tiles_across; in a group "
    "column is its program // rows of the group, and row is its first row + its program % rows of the group"
)


def order_of_programs(tile_rows, tile_cols, group):
    """Return the number of the program that computes each tile, in groups of so many rows of tiles."""
    # In a band of rows, the programs go down one column after the other.
    bands = torch.arange(tile_rows * tile_cols).view(tile_rows, tile_cols).split(group)
    return torch.cat([band.flatten().view(-1, len(band)).T for band in bands])


BLOCK = 16


@task((5, 3, 2), (4, 4, 4), (3, 5, 8), (5, 3, 3), needs=(multiply_tile,))  # tiles down, tiles across, GROUP
def grouped_matmul_kernel(puzzles, tile_rows, tile_cols, group):
    x, y = randn(tile_rows * BLOCK - 3, BLOCK), randn(BLOCK, tile_cols * BLOCK - 5)
    z = unwritten(len(x), y.shape[1])
    z = launch(
        puzzles.grouped_matmul_kernel,
        (tile_rows * tile_cols,),
        x,
        y,
        z,
        *z.shape,
        BLOCK,
        **square(BLOCK),
        GROUP=group,
        share=GROUPS,
    )
    expect_close(z, x.double() @ y.double(), 1e-4, GROUPS)
    if not ON_GPU:  # where nobody sees which program stores what
        wanted = order_of_programs(tile_rows, tile_cols, group)
        expect_close(z.owner[::BLOCK, ::BLOCK], wanted, 0, GROUPS, f"the program of each tile of {z.label}")


@task((), needs=(grouped_matmul_kernel,))
def tuned_matmul_kernel(puzzles):
    kernel = puzzles.tuned_matmul_kernel
    expect(kernel.keys, "key is empty", "the fastest tile depends on the sizes")
    for size in ("M", "N", "K"):
        expect(size in kernel.keys, f"another {size} takes the tile of the last size", f"is {size} in key?")
    wanted = 'two of triton.Config({"BLOCK_M": 64, ...}, num_warps=4)'
    expect(len(kernel.configs) > 1, f"configs has {len(kernel.configs)}", f"it needs at least {wanted}")
    x, y = randn(40, 33), randn(33, 24)
    # Without the tuner, which would time them: each has to be right.
    for config in kernel.configs:
        tile, z = config.kwargs, unwritten(40, 24)
        grid = (cdiv(40, tile["BLOCK_M"]) * cdiv(24, tile["BLOCK_N"]),)
        kernel.fn[grid](x, y, z, 40, 24, 33, **tile)
        expect_close(z, x.double() @ y.double(), 1e-4, "are these names of constants?", f"z with {config}")


TASKS = tasks_of(
    *(copy_kernel, masked_copy_kernel, grid_copy_kernel, outer_sum_kernel, transpose_kernel, row_sum_kernel),
    *(softmax_kernel, row_max_kernel, multiply_tile, grouped_matmul_kernel, tuned_matmul_kernel),
)
