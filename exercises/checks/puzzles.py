"""Checks of the puzzles. The first case of each is the one that its picture shows."""

import math

import torch
import torch.nn.functional as F

import tiny_llama_v3 as llama
from exercises.checks import DEVICE, ON_GPU
from exercises.checks.common import Task, Wrong, expect, expect_close, randn, task, tasks_of, unwritten
from exercises.checks.memory import BLOCKS, launch

cdiv = llama.cdiv


def padded(x, stride):
    """Return x with rows so many elements apart, and NaN between them: whoever ignores the stride sees it."""
    n_cols = x.shape[1]
    return F.pad(x, (0, stride - n_cols), value=math.nan)[:, :n_cols]


def spread(*shape, dtype=torch.float32):
    """Return random numbers around 0, most of them between -200 and 200, and a 0."""
    x = (100 * randn(*shape)).to(dtype)
    x.view(-1)[-2] = 0  # not the last, which another mistake leaves out
    return x


def expect_copy(kernel, n_elements, block_size, dtype=torch.float32):
    x, grid = spread(n_elements, dtype=dtype), (cdiv(n_elements, block_size),)
    sizes = [n_elements] * ("n_elements" in kernel.arg_names)
    y = launch(kernel, grid, x, unwritten(n_elements, dtype=dtype), *sizes, BLOCK_SIZE=block_size)
    expect_close(y, x, 0, "y[i] = x[i], and program p copies the elements from p * BLOCK_SIZE on")


@task((8, 8), (64, 64, torch.float16))  # n_elements, BLOCK_SIZE
def copy_kernel(puzzles, *case):
    expect_copy(puzzles.copy_kernel, *case)


@task((5, 8), (8, 8), (100, 128, torch.float16))
def masked_copy_kernel(puzzles, *case):
    expect_copy(puzzles.masked_copy_kernel, *case)


@task((10, 4), (64, 32), (100, 32, torch.float16))
def grid_copy_kernel(puzzles, *case):
    expect_copy(puzzles.grid_copy_kernel, *case)


@task((3, 5, 4, 8), (5, 3, 8, 4))  # n_rows, n_cols, BLOCK_M, BLOCK_N
def outer_sum_kernel(puzzles, n_rows, n_cols, block_m, block_n):
    x, y, z = spread(n_rows), spread(n_cols), unwritten(n_rows, n_cols)
    z = launch(puzzles.outer_sum_kernel, (1,), x, y, z, n_rows, n_cols, BLOCK_M=block_m, BLOCK_N=block_n)
    expect_close(z, x[:, None] + y, 1e-6, "z[i, j] = x[i] + y[j], and row i of z begins at element i * n_cols")


@task(  # n_rows, n_cols, stride_row, stride_col, BLOCK_M, BLOCK_N
    (3, 5, 7, 1, 2, 4),
    (3, 5, 5, 1, 2, 4),
    (5, 3, 1, 6, 4, 2),
    (20, 7, 8, 1, 4, 4, torch.float16),
)
def transpose_kernel(puzzles, n_rows, n_cols, stride_row, stride_col, block_m, block_n, dtype=torch.float32):
    x = spread(n_rows, n_cols, dtype=dtype)
    x = padded(x, stride_row) if stride_col == 1 else padded(x.T, stride_col).T
    y = launch(
        puzzles.transpose_kernel,
        (cdiv(n_rows, block_m), cdiv(n_cols, block_n)),
        x,
        unwritten(n_cols, n_rows, dtype=dtype),
        *(n_rows, n_cols, stride_row, stride_col),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
    )
    expect_close(y, x.T, 0, "y[j, i] = x[i, j], and the address in x takes both strides")


@task((3, 10, 12, 4), (2, 3000, 3000, 1024))  # n_rows, n_cols, stride_row, BLOCK_SIZE
def row_sum_kernel(puzzles, n_rows, n_cols, stride_row, block_size):
    # Of 3000 numbers near 1 a sum in fp16 would stop at 2048.
    x = padded((torch.rand(n_rows, n_cols, device=DEVICE) + 0.5).half(), stride_row)
    args = x, unwritten(n_rows), n_cols, stride_row
    y = launch(puzzles.row_sum_kernel, (n_rows,), *args, BLOCK_SIZE=block_size)
    expect_close(
        y,
        x.double().sum(1),
        1e-6,
        "y[row] is the sum in fp32 of x[row, cols] with cols < n_cols: total begins at 0.0 and adds each block once",
    )


LOWEST = torch.finfo(torch.float32).min
SOFTMAX = "y is p / tl.sum(p), p = exp(x - maximum of the row), of n_cols columns from row * n_cols on, and no others"


@task(  # scores, how much lower those of the second row are
    ((2.0, 1, 0, 1, -1), 0),
    ((-10.7, -10.1, -9.4), 0),
    ((1000.0, 999, -1000), 2000),
    ((LOWEST, LOWEST, LOWEST), 0),  # below what often stands in for minus infinity
)
def softmax_kernel(puzzles, scores, lower):
    x = torch.tensor(scores, device=DEVICE)
    x = torch.stack([x, x.flip(0) - lower])
    n_cols = len(scores)
    block_size = llama.triton.next_power_of_2(n_cols)
    y = launch(puzzles.softmax_kernel, (2,), x, unwritten(2, n_cols), n_cols, BLOCK_SIZE=block_size)
    expect_close(y, torch.softmax(x.double(), 1), 1e-5, SOFTMAX)


SCORES = [4.0, 8, 1, 6, 3, 2], [3.0, 1, 5, 2, 9, 7], [-6.0, -2, -4, -3, -8, -5]


@task((6, 0), (3, 0), (6, math.inf), (3, math.inf))  # n_cols, how much lower the scores are
def row_max_kernel(puzzles, n_cols, lower):
    x = padded(torch.tensor(SCORES, device=DEVICE)[:, :n_cols] - lower, 8)
    y = launch(puzzles.row_max_kernel, (3,), x, unwritten(3), n_cols, 8, BLOCK_SIZE=4)
    expect_close(
        y,
        x.amax(1),
        0,
        "print x in the loop, cols and the mask: which lanes are True, and what begins with float('-inf')?",
    )


SIDES = "BLOCK_M", "BLOCK_N", "BLOCK_K"


def expect_product(kernel, grid, sizes, hint, share=BLOCKS, **constants):
    """Expect that a kernel multiplies matrices of these sizes, and return what it stores."""
    n_rows, n_cols, n_inner = sizes
    x, y = randn(n_rows, n_inner), randn(n_inner, n_cols)
    z = launch(kernel, grid, x, y, unwritten(n_rows, n_cols), *sizes, share=share, **constants)
    expect_close(z, x.double() @ y.double(), 1e-4, hint)
    return z


# Rows of multiples of 16 bytes, so that tensor descriptors can take them.
@task((24, 20, 40, 16), (5, 36, 32, 16))  # n_rows, n_cols, n_inner, the block of all three
def multiply_tile(puzzles, n_rows, n_cols, n_inner, block):
    hint = "z[i, j] = sum of x[i, k] * y[k, j], elements i * n_inner + k of x and k * n_cols + j of y, over all inner"
    grid = cdiv(n_rows, block), cdiv(n_cols, block)
    expect_product(puzzles.matmul_kernel, grid, (n_rows, n_cols, n_inner), hint, **dict.fromkeys(SIDES, block))


GROUPS = (
    "a group has GROUP rows of tiles, the last one perhaps fewer, and so many programs times tiles_across; in a group "
    "column is its program // rows of the group, and row is its first row + its program % rows of the group"
)


def expect_order(programs, wanted, label):
    """Expect the program of each tile."""
    for row, col in (programs != wanted).nonzero().tolist()[:1]:
        program, right = programs[row, col].item(), wanted[row, col].item()
        fact = f"z is right, but program {program} computes tile ({row}, {col}), expected program {right}, in {label}"
        raise Wrong(fact, GROUPS, "the order", programs.double())


BLOCK = 16


@task((5, 3, 2), (3, 5, 8), (5, 3, 3), needs=(multiply_tile,))  # tiles down, tiles across, GROUP
def grouped_matmul_kernel(puzzles, tile_rows, tile_cols, group):
    sizes, constants = (
        (tile_rows * BLOCK - 3, tile_cols * BLOCK - 4, BLOCK),
        dict.fromkeys(SIDES, BLOCK) | {"GROUP": group},
    )
    z = expect_product(puzzles.grouped_matmul_kernel, (tile_rows * tile_cols,), sizes, GROUPS, GROUPS, **constants)
    if not ON_GPU:  # where nobody sees which program stores what
        bands = torch.arange(tile_rows * tile_cols).view(tile_rows, tile_cols).split(group)
        # In a band of rows, the programs go down one column after the other.
        wanted = torch.cat([band.reshape(-1, len(band)).T for band in bands])
        expect_order(z.owner[::BLOCK, ::BLOCK], wanted, z.label)


POWERS = [2**exponent for exponent in range(11)]
SHARED = 227 * 1024  # bytes of shared memory of an H100; other cards have less


def expect_to_run(config):
    """Expect of a triton.Config what Triton, tl.dot and a card can run."""
    names = *SIDES, "GROUP"
    m, n, k, group = (config.kwargs.get(name, 0) for name in names)
    # While a program multiplies two tiles, those of the next steps arrive.
    loaded = (m + n) * k * 4 * max(config.num_stages - 1, 1)
    for runs, hint in (
        ({*config.kwargs} == {*names}, f"its dict has {', '.join(names)}, and behind the dict stands num_warps"),
        ({m, n, k} <= {*POWERS[4:]}, "BLOCK_M, BLOCK_N and BLOCK_K are powers of 2, and at least 16 for tl.dot"),
        (config.num_warps in POWERS[:6], "num_warps is a power of 2, at most 32"),
        (min(group, config.num_stages) > 0, "GROUP and num_stages are at least 1"),
        (loaded <= SHARED, f"tiles of x and y take {loaded} bytes of shared memory; no card has more than {SHARED}"),
        (m * n <= 2**16, "the tile of z is kept in registers, which hold at most 256 x 256 numbers"),
    ):
        expect(runs, f"Config({config}) cannot run", hint)


HANDED_ON = "grouped_matmul_kernel passes: does this kernel hand each argument on, in its place?"


@task((40, 24, 36), (16, 72, 64), needs=(grouped_matmul_kernel,))  # M, N, K
def tuned_matmul_kernel(puzzles, *sizes):
    kernel = puzzles.tuned_matmul_kernel
    lacking = " or ".join(sorted({"M", "N", "K"}.difference(kernel.keys)))
    expect(not lacking, f"another {lacking} takes the tile of the last size", f"is {lacking} in key?")
    several = len({frozenset(config.all_kwargs().items()) for config in kernel.configs})
    hint = 'it needs at least two, none twice, of triton.Config({"BLOCK_M": 64, ...}, num_warps=4)'
    expect(several == len(kernel.configs) > 1, f"configs has {several} that differ, in {len(kernel.configs)}", hint)
    for config in kernel.configs:
        expect_to_run(config)
        tiles = cdiv(sizes[0], config.kwargs["BLOCK_M"]) * cdiv(sizes[1], config.kwargs["BLOCK_N"])
        # Without the tuner, which would time them: each has to be right.
        expect_product(kernel.fn, (tiles,), sizes, HANDED_ON, HANDED_ON, **config.all_kwargs())


def scaled(n_rows, n_inner):
    """Return bytes of e4m3, bytes of the scales of 32 each, and the numbers that they stand for in fp64."""
    numbers = randn(n_rows, n_inner, dtype=torch.float8_e4m3fn)
    scales = torch.randint(120, 130, (n_rows, n_inner // 32), device=DEVICE)
    exact = numbers.double() * (2.0 ** (scales - 127)).repeat_interleave(32, 1)
    return numbers.view(torch.uint8), scales.to(torch.uint8), exact


SCALED = (
    "x[i, k] is element i * n_inner + k and y[j, k] element j * n_inner + k; scales have a row of n_inner // 32 for "
    "each row of x and of y, and number k has scale k // 32"
)


@task((16, 16, 64, 64), (32, 48, 192, 64))  # n_rows, n_cols, n_inner, BLOCK_K
def scaled_matmul_kernel(puzzles, n_rows, n_cols, n_inner, block_k):
    (x, x_scale, exact_x), (y, y_scale, exact_y) = scaled(n_rows, n_inner), scaled(n_cols, n_inner)
    z = launch(
        puzzles.scaled_matmul_kernel,
        (n_rows // BLOCK, n_cols // BLOCK),
        *(x, x_scale, y, y_scale, unwritten(n_rows, n_cols), n_cols, n_inner),
        **dict(zip(SIDES, (BLOCK, BLOCK, block_k), strict=True)),
    )
    expect_close(z, exact_x @ exact_y.T, 1e-4, SCALED)


def expect_rotation(kernel, sign, hint, n_positions, half, block_size):
    """Expect that a kernel rotates pairs by their angles, or with a negative sign back."""
    x, angles = spread(n_positions, 2 * half), 3 * randn(n_positions, half)
    y = launch(kernel, (n_positions,), x, angles.cos(), angles.sin(), unwritten(*x.shape), half, BLOCK_SIZE=block_size)
    # As complex numbers: a factor of length 1 turns them.
    angles = sign * angles.double()
    points = torch.complex(*x.double().chunk(2, 1)) * torch.polar(torch.ones_like(angles), angles)
    expect_close(y, torch.cat([points.real, points.imag], 1), 1e-5, hint)


@task((3, 4, 4), (5, 3, 8))  # n_positions, half, BLOCK_SIZE
def rope_kernel(puzzles, *sizes):
    hint = "(x1, x2) becomes (x1 * cos - x2 * sin, x2 * cos + x1 * sin), and x2 is half elements behind x1"
    expect_rotation(puzzles.rope_kernel, 1, hint, *sizes)


@task((3, 4, 4), (5, 3, 8))
def rope_backward_kernel(puzzles, *sizes):
    hint = "y1 = x1 * cos - x2 * sin and y2 = x2 * cos + x1 * sin: which parts of both contain x1, and which x2?"
    expect_rotation(puzzles.rope_backward_kernel, -1, hint, *sizes)


TASKS = tasks_of(*(each for each in list(globals().values()) if isinstance(each, Task)))
