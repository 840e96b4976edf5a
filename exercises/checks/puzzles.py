"""Checks of the puzzles. The first case of each is the one that its picture shows."""

import contextlib
import functools
import math
from unittest import mock

import torch

import tiny_llama_v3 as llama
from exercises.checks import ON_GPU
from exercises.checks.common import (
    DEVICE,
    NothingStored,
    Wrong,
    differs,
    expect,
    expect_close,
    expect_passed,
    has_scaled_products,
    randn,
    unwritten,
)  # fmt: skip
from exercises.checks.memory import Watch, launch

# ----------------------------------------------------------------------------------------------------------------------
# What a result looks like


def for_each(cases):
    """Turns the check of a case into one of all of them."""
    cases = tuple(cases)

    def all_cases(check):
        @functools.wraps(check)
        def check_all(puzzles):
            for case in cases:
                check(puzzles, *case)

        return check_all

    return all_cases


POISON = math.inf  # even 0 times it is seen
MINUS_INFINITY = 'any number may be larger than a score; nothing is smaller than float("-inf")'
EXP2 = "tl.exp2 is a power of 2: use tl.exp, or multiply the exponent by log2(e)"
MAY_BE_ANYTHING = "what the mask leaves out may be anything, here infinity"


def padded(x, stride_row, stride_col=1):
    """x with rows and columns so many elements apart, and NaN between them."""
    n_rows, n_cols = x.shape
    n_elements = (n_rows - 1) * stride_row + (n_cols - 1) * stride_col + 1
    memory = torch.full((n_elements,), math.nan, dtype=x.dtype, device=x.device)
    return memory.as_strided(x.shape, (stride_row, stride_col)).copy_(x)


# ----------------------------------------------------------------------------------------------------------------------
# The checks, each with its cases

COPY = [(8,), (64,)]  # BLOCK_SIZE


@for_each(COPY)
def check_copy_kernel(puzzles, block_size):
    x, (y, behind) = randn(block_size), unwritten(block_size)
    launch(puzzles.copy_kernel, (1,), x, y, BLOCK_SIZE=block_size, explain=lambda fault: "the offsets of a block run "
           "from 0 to BLOCK_SIZE - 1, and count elements, not bytes")  # fmt: skip
    case = f"y of {block_size}"
    mistakes = [
        (x[:1].expand_as(x), "every element is x[0]: x_ptr is one address, x_ptr + offsets is a block of them"),
        (torch.arange(block_size, device=DEVICE), "these are the offsets: load what lies there, and store that"),
    ]
    hint = "element i of y is element i of x: y_ptr + offsets and x_ptr + offsets are blocks of BLOCK_SIZE addresses"
    expect_close(case, y, x, 0, hint, mistakes, behind)


def beyond_the_end(fault):
    if fault.element == fault.size and len(fault.lanes[0]) == 1:
        return f"one too many; the last element is {fault.size - 1}, so is it < or <=?"
    if fault.verb == "reads":
        return "leave out what lies beyond the end: tl.load(..., mask=mask), and then the same in the store"
    return "leave out what lies beyond the end: tl.store(..., mask=mask)"


MASKED_COPY = [(5, 8), (8, 8), (100, 128)]  # n_elements, BLOCK_SIZE


@for_each(MASKED_COPY)
def check_masked_copy_kernel(puzzles, n_elements, block_size):
    def explain(fault):
        inverted = not y.isfinite().any()
        return "the mask is the wrong way round: True is what exists" if inverted else beyond_the_end(fault)

    x, (y, behind) = randn(n_elements), unwritten(n_elements)
    launch(puzzles.masked_copy_kernel, (1,), x, y, n_elements, BLOCK_SIZE=block_size, explain=explain)
    case = f"y of {n_elements} in a block of {block_size}"
    expect_close(case, y, x, 0, "where the mask is True, y[i] = x[i]", behind=behind)


GRID_COPY = [(10, 4), (64, 32), (100, 32), (3, 8)]  # n_elements, BLOCK_SIZE


@for_each(GRID_COPY)
def check_grid_copy_kernel(puzzles, n_elements, block_size):
    x, (y, behind) = randn(n_elements), unwritten(n_elements)
    programs = llama.cdiv(n_elements, block_size)
    launch(puzzles.grid_copy_kernel, (programs,), x, y, n_elements, BLOCK_SIZE=block_size, explain=beyond_the_end)
    case = f"y of {n_elements} in {programs} blocks of {block_size}"
    mistakes = [(x[:block_size].repeat(programs)[:n_elements], "every program loads the first block")]
    expect_close(case, y, x, 0, "program p copies the elements from p * BLOCK_SIZE on", mistakes, behind)


def missing_lanes(fault, n_rows, n_cols):
    """Which of rows and cols do not exist in all lanes of a fault in a tile; "" where something else is at fault."""
    if len(fault.lanes) < 2:
        return ""
    rows, cols = fault.lanes[0] >= n_rows, fault.lanes[1] >= n_cols
    return "cols" if cols.all() else "rows" if rows.all() else "rows and cols" if (rows | cols).all() else ""


OUTER_SUM = [(3, 5, 4, 8), (5, 3, 8, 4), (4, 4, 4, 4), (1, 13, 2, 16)]  # n_rows, n_cols, BLOCK_M, BLOCK_N


@for_each(OUTER_SUM)
def check_outer_sum_kernel(puzzles, n_rows, n_cols, block_m, block_n):
    def explain(fault):
        if fault.tensor != "z":
            return f"{fault.tensor} has {fault.size} elements: which of rows and cols belongs to it, under which mask?"
        if missing := missing_lanes(fault, n_rows, n_cols):
            return f"{missing} of the block that do not exist are stored: the store needs a mask of both, combined by &"
        return "row i of z begins at element i * n_cols, whatever the size of the block"

    x, y, (z, behind) = randn(n_rows), randn(n_cols), unwritten(n_rows, n_cols)
    launch(puzzles.outer_sum_kernel, (1,), x, y, z, n_rows, n_cols, BLOCK_M=block_m, BLOCK_N=block_n, explain=explain)
    case = f"z of {n_rows} x {n_cols} in a block of {block_m} x {block_n}"
    wanted = x[:, None] + y[None, :]
    mistakes = [
        (x[:, None].expand_as(z), "y is not in it"),
        (y.expand_as(z), "x is not in it"),
        (x[:, None] * y, "this is the product of x and y, not their sum"),
        (x[:, None] - y, "this is x - y"),
        (y[:n_rows, None] + y if n_cols >= n_rows else z, "y is loaded twice: x_ptr belongs in the first load"),
    ]
    if n_rows == n_cols:
        mistakes += [(wanted.T, "rows and columns are exchanged: x is the column, [:, None], and y the row, [None, :]")]
    hint = "z[i, j] = x[i] + y[j], and row i of z begins at element i * n_cols"
    expect_close(case, z, wanted, 1e-6, hint, mistakes, behind)


TILE = "a program's tile begins at row tl.program_id(0) * BLOCK_M and column tl.program_id(1) * BLOCK_N"
# n_rows, n_cols, stride_row, stride_col, BLOCK_M, BLOCK_N
TRANSPOSE = [(3, 5, 7, 1, 2, 4), (3, 5, 5, 1, 2, 4), (5, 3, 1, 6, 4, 2), (16, 16, 16, 1, 16, 16), (20, 7, 8, 1, 4, 4)]


@for_each(TRANSPOSE)
def check_transpose_kernel(puzzles, n_rows, n_cols, stride_row, stride_col, block_m, block_n):
    def explain(fault):
        first_row, first_col = fault.program[0] * block_m, fault.program[1] * block_n
        if missing := missing_lanes(fault, n_rows - first_row, n_cols - first_col):
            return f"{missing} of the tile do not exist: is there mask=mask?"
        if fault.tensor == "y":
            return "y has rows of n_rows elements: y[j, i] is element j * n_rows + i"
        if stride_col != 1:
            return f"the neighbours of a row lie stride_col = {stride_col} apart, not 1"
        return f"rows begin stride_row = {stride_row} apart, not n_cols = {n_cols}: what lies between is not x"

    plain = randn(n_rows, n_cols)
    x, (y, behind) = padded(plain, stride_row, stride_col), unwritten(n_cols, n_rows)
    grid = llama.cdiv(n_rows, block_m), llama.cdiv(n_cols, block_n)
    launch(puzzles.transpose_kernel, grid, x, y, n_rows, n_cols, stride_row, stride_col, BLOCK_M=block_m,
           BLOCK_N=block_n, explain=explain,
           share=f"y[j, i] is element j * n_rows + i, and {TILE}")  # fmt: skip
    case = f"y for x of {n_rows} x {n_cols} with strides {stride_row} and {stride_col}"
    mistakes = [(plain.reshape(y.shape), "this is x as it was: x[i, j] goes to row j and column i of y")]
    expect_close(case, y, plain.T, 0, "y[j, i] = x[i, j], and the address in x takes both strides", mistakes, behind)


ROW = "program p works on row p: y_ptr + row"
ROW_SUM = [(3, 10, 12, 4), (2, 3000, 3000, 1024), (2, 5, 9, 16)]  # n_rows, n_cols, stride_row, BLOCK_SIZE


@for_each(ROW_SUM)
def check_row_sum_kernel(puzzles, n_rows, n_cols, stride_row, block_size):
    def explain(fault):
        if n_cols % block_size and (fault.lanes[0] >= n_cols % block_size).all():
            return "the last block of a row is not full: mask=cols < n_cols"
        return "rows begin stride_row elements apart, and what lies between them is not x"

    x = padded((torch.rand(n_rows, n_cols, device=DEVICE) + 0.5).half(), stride_row)
    y, behind = unwritten(n_rows)
    launch(puzzles.row_sum_kernel, (n_rows,), x, y, n_cols, stride_row, BLOCK_SIZE=block_size, explain=explain,
           share=ROW)  # fmt: skip
    case = f"y for rows of {n_cols}, BLOCK_SIZE {block_size}"
    if not y.any():
        raise NothingStored(f"{case} is 0, what total began with: add the sum of the block to it")
    blocks = [block.float().sum(1) for block in x.split(block_size, dim=1)]
    wanted, missing = x.double().sum(1), -n_cols % block_size
    mistakes = [
        (torch.full_like(y, math.inf), f"infinite: {MAY_BE_ANYTHING}, give it a value with other=0.0"),
        (blocks[-1], "this is the sum of the last block only: total += ..., not ="),
        *(
            (
                sum(x[:, : len(b)].float().sum(1) for b in part),
                "this is the sum of the first block, again and again: cols moves with start",
            )
            for part in (x[0].split(block_size), [x[0, :block_size]] * len(blocks))
        ),
        (blocks[0], "this is the sum of the first block only: the mask of the others is cols < n_cols"),
        (sum(block.float().amax(1) for block in x.split(block_size, dim=1)), "tl.max for tl.sum: the sum adds all"),
        (wanted + missing, f"{missing} too many: what the mask leaves out counts as 1"),
        (wanted / n_cols, "this is the mean, not the sum"),
        (wanted - blocks[-1], "the last block is missing: range(0, n_cols, BLOCK_SIZE) visits all"),
    ]
    if 1e-6 < ((y - wanted) / wanted).abs().max() < 5e-3:
        raise Wrong(f"{case}: nearly right, with the few digits of fp16: .to(tl.float32) comes before tl.sum")
    expect_close(case, y, wanted, 1e-6, "is every block of the row added once?", mistakes, behind)


LOW = (-3 * 10**10,) * 3  # below what often stands in for minus infinity
SOFTMAX = [((2, 1, 0, 1, -1), 8), ((-11, -10, -9), 4), ((1000, 999, 0, -1000), 4), (LOW, 4)]  # scores, BLOCK_SIZE


@for_each(SOFTMAX)
def check_softmax_kernel(puzzles, scores, block_size):
    def explain(fault):
        if (fault.lanes[0] < n_cols).all():
            return "row r begins at element r * n_cols"
        return "the block is longer than the row: mask=cols < n_cols"

    x = torch.tensor([scores, scores[::-1]], device=DEVICE, dtype=torch.float32)
    (n_rows, n_cols), (y, behind) = x.shape, unwritten(*x.shape)
    undefined = launch(puzzles.softmax_kernel, (n_rows,), x, y, n_cols, BLOCK_SIZE=block_size, explain=explain,
                       share=ROW)  # fmt: skip
    case = f"y for the scores {', '.join(map(str, scores))}"
    largest, padding = x.max(1, keepdim=True).values, block_size - n_cols
    with_zeros, zero = torch.exp(x - largest.clamp(min=0)), torch.exp(-largest.clamp(min=0))
    mistakes = [
        (x * 0.0 if scores is LOW else x, f"lanes that do not exist take part: {MINUS_INFINITY}"),
        (torch.exp(x) / torch.exp(x).sum(1, keepdim=True),
         "exp overflows, and inf / inf is not a number: subtract the row's maximum first"),
        (with_zeros / (with_zeros.sum(1, keepdim=True) + padding * zero),
         f"rows do not add up to 1: {padding} lanes that do not exist take part, as scores of 0; other=float('-inf')"),
        (torch.exp(x - largest), "not divided by the sum of the row"),
        (2 ** (x - largest) / (2 ** (x - largest)).sum(1, keepdim=True), EXP2),
        (torch.log_softmax(x, 1), "this is the logarithm of the softmax"),
        ((torch.exp(x) - largest) / ((torch.exp(x) - largest).sum(1, keepdim=True) - padding * largest),
         "the maximum is subtracted before exp, not after it"),
        (torch.exp(x - largest) / torch.exp(x).sum(1, keepdim=True), "the sum lacks the maximum: it adds p"),
        (x * 0.0, "the sum is infinite: it adds p = exp(x - max), not x and not exp(max - x)"),
    ]  # fmt: skip
    if padding and not differs(y / y.sum(1, keepdim=True), torch.softmax(x, 1), 1e-5).any():
        mistakes += [(y, f"the sum of a row is too large: the {padding} lanes that do not exist take part; "
                      'other=float("-inf")')]  # fmt: skip
    words = f'{MAY_BE_ANYTHING}, give it a value with other=float("-inf")'
    if not undefined:
        words = "0 / 0 or inf / inf, because what is subtracted from the scores is not the largest of their row"
    mistakes += [(torch.full_like(x, math.nan), f"not a number: {words}")]
    expect_close(case, y, torch.softmax(x.double(), 1), 1e-5, "does each row of y add up to 1?", mistakes, behind)


ROWS_WITH_MAXIMA = (4, 8, 1, 6, 3, 2), (3, 1, 5, 2, 9, 7), (-6, -2, -4, -3, -8, -5)
ROW_MAX = [(6, 8, 4), (3, 8, 4)]  # n_cols, stride_row, BLOCK_SIZE


@for_each(ROW_MAX)
def check_row_max_kernel(puzzles, n_cols, stride_row, block_size):
    rows = torch.tensor(ROWS_WITH_MAXIMA, device=DEVICE, dtype=torch.float32)[:, :n_cols]
    case = f"y for rows of {n_cols}"
    for x, kind in ((rows, ""), ((rows - 10) * 1e11, ", all far below zero")):
        x, (y, behind) = padded(x, stride_row), unwritten(len(x))
        undefined = launch(puzzles.row_max_kernel, (len(x),), x, y, n_cols, stride_row, BLOCK_SIZE=block_size,
                           share=ROW, explain=lambda fault: "print cols and the mask: which lanes are True that "
                           "should not be?")  # fmt: skip
        wanted, blocks = x.max(1).values, [block.max(1).values for block in x.split(block_size, dim=1)]
        look = "print start and the mask in the loop: which columns does the second block load?"
        if not kind and y.tolist() == blocks[0].clamp(min=0).tolist() != wanted.tolist():
            look = f"wrong where the largest is not in the first block, or lies below zero; {look}"
            raise NothingStored(f"{case} is {y.tolist()}, expected {wanted.tolist()}: {look}")
        mistakes = [
            (blocks[0], f"wrong where the largest is not in the first block; {look}"),
            (blocks[-1], "this is the largest of the last block: compare it with the largest so far, tl.maximum"),
            (wanted.clamp(min=0),
             "wrong where all lie below zero; 0 is not in that row: print x in the loop, where does it come from?"),
            (y.expand_as(y) if kind and (y > wanted).all() else wanted, MINUS_INFINITY),
            (torch.full_like(y, -math.inf), "this is minus infinity: tl.maximum takes the larger one, not tl.minimum"),
            (wanted[:1].expand_as(y), "every program reads row 0: row * stride_row is missing"),
            (torch.full_like(y, math.inf), f"infinite: {MAY_BE_ANYTHING}; which value is never the largest?"
             if undefined else "infinite: what becomes of the -inf of the lanes that the mask leaves out?"),
        ]  # fmt: skip
        expect_close(case + kind, y, wanted, 0, "print x in the loop", mistakes, behind)


def tiled(x, y, block, product):
    """The sum over a product of square tiles of x and y, which zeros fill up."""
    shape = len(x), y.shape[1]
    x, y = (torch.nn.functional.pad(t, (0, -t.shape[1] % block, 0, -t.shape[0] % block)) for t in (x, y))
    x, y = (t.unflatten(1, (-1, block)).unflatten(0, (-1, block)).transpose(1, 2) for t in (x, y))
    z = product(x[:, :, None], y[None]).sum(dim=1)  # (blocks of rows, blocks of columns, block, block)
    return z.transpose(1, 2).flatten(2).flatten(0, 1)[: shape[0], : shape[1]]


MATMUL = [(24, 20, 40, 16), (16, 16, 16, 16), (5, 33, 17, 16)]  # n_rows, n_cols, n_inner, the block of all three


@for_each(MATMUL)
def check_multiply_tile(puzzles, n_rows, n_cols, n_inner, block):
    def explain(fault):
        rows, cols = {"x": ("rows", "inner"), "y": ("inner", "cols"), "z": ("rows", "cols")}[fault.tensor]
        return f"its mask is {rows} < n_{rows} and {cols} < n_{cols}, and its rows have n_{cols} elements"

    x, y, (z, behind) = randn(n_rows, n_inner), randn(n_inner, n_cols), unwritten(n_rows, n_cols)
    grid = llama.cdiv(n_rows, block), llama.cdiv(n_cols, block)
    undefined = launch(puzzles.matmul_kernel, grid, x, y, z, n_rows, n_cols, n_inner, BLOCK_M=block, BLOCK_N=block,
                       BLOCK_K=block, explain=explain, share=TILE)  # fmt: skip
    case = f"z of {n_rows} x {n_cols}, each of {n_inner} products"
    if not z.any():
        raise NothingStored(f"{case}, is 0, what it began with: add the product of the tiles to it")
    steps, last = llama.cdiv(n_inner, block), (n_inner - 1) // block * block
    mistakes = [
        (tiled(x, y, block, lambda x, y: y @ x), "tl.dot(x, y) is x @ y, in this order"),
        (tiled(x, y, block, lambda x, y: x @ y.mT), "the tile of y is transposed"),
        (tiled(x, y, block, lambda x, y: x * y), "x * y multiplies element by element: tl.dot multiplies matrices"),
        (x[:, last:] @ y[last:], "this is the product of the last two tiles only: z += ..., not ="),
        (steps * (x[:, :block] @ y[:block]),
         "this is the product of the first two tiles, again and again: inner moves with start"),
        (x @ y.reshape(n_cols, n_inner).T,
         "y is read as if its columns lay one after the other: y[k, j] is element k * n_cols + j"),
    ]  # fmt: skip
    tiles = [(x[:, i : i + block], y[i : i + block]) for i in range(0, last + 1, block)]
    stuck = "the tile of {} is the first one, again and again: inner moves with start"
    mistakes += [(sum(tiles[0][0][:, : len(b)] @ b for _, b in tiles), stuck.format("x")),
                 (sum(a @ tiles[0][1][: a.shape[1]] for a, _ in tiles), stuck.format("y"))]  # fmt: skip
    if undefined and not z.isfinite().all():
        mistakes += [(z, f"not a finite number: {MAY_BE_ANYTHING}, give it a value with other=0.0")]
    hint = "z[i, j] = sum of x[i, k] * y[k, j], and x[i, k] is element i * n_inner + k of x"
    expect_close(case, z, x.double() @ y.double(), 1e-4, hint, mistakes, behind)


GROUPS = (
    "a group has GROUP rows of tiles, the last one perhaps fewer, and so many programs times tiles_across; in a group "
    "column is its program // rows of the group, and row is its first row + its program % rows of the group"
)


def order_of_programs(tile_rows, tile_cols, group):
    """The number of the program that computes each tile, in groups of so many rows of tiles."""
    bands = torch.arange(tile_rows * tile_cols).view(tile_rows, tile_cols).split(group)
    return torch.cat([band.flatten().view(-1, len(band)).T for band in bands])


GROUPED = [(5, 3, 2), (4, 4, 4), (3, 5, 8), (5, 3, 3)]  # tiles down, tiles across, GROUP


@for_each(GROUPED)
def check_grouped_matmul_kernel(puzzles, tile_rows, tile_cols, group, block=16):
    expect_passed(check_multiply_tile, puzzles, "not checked before multiply_tile passes")
    x, y = randn(tile_rows * block - 3, 2 * block), randn(2 * block, tile_cols * block - 5)
    z, behind = unwritten(len(x), y.shape[1])
    with mock.patch.object(Watch, "kept", []) as kept:
        launch(puzzles.grouped_matmul_kernel, (tile_rows * tile_cols,), x, y, z, *z.shape, 2 * block, BLOCK_M=block,
               BLOCK_N=block, BLOCK_K=block, GROUP=group, share=GROUPS)  # fmt: skip
    case = f"z of {tile_rows} x {tile_cols} tiles, GROUP {group}"
    expect_close(case, z, x.double() @ y.double(), 1e-4, GROUPS, behind=behind)
    for watch in kept:  # none on a GPU
        tiles = torch.from_numpy(watch.owners("z")[::block, ::block])
        if torch.equal(tiles, order_of_programs(tile_rows, tile_cols, 1)):
            raise NothingStored(f"{case}: programs go row after row, as without groups: {GROUPS}")
        wanted = order_of_programs(tile_rows, tile_cols, group)
        at = (tiles != wanted).nonzero().tolist()
        if at:
            row, col = at[0]
            raise Wrong(f"{case}: program {tiles[row, col]} computes tile {row, col}, expected program "
                        f"{wanted[row, col]}; {GROUPS}")  # fmt: skip


def check_tuned_matmul_kernel(puzzles):
    expect_passed(check_grouped_matmul_kernel, puzzles, "not checked before grouped_matmul_kernel passes")
    kernel, chosen, tried = puzzles.tuned_matmul_kernel, [], []
    if not kernel.keys:
        raise NothingStored("key is empty: the fastest tile depends on the sizes")
    expect(len(kernel.configs) > 1, 'configs has fewer than two of triton.Config({"BLOCK_M": 64, ...}, num_warps=4)')

    def check_sizes(M, K, N):
        x, y, (z, behind) = randn(M, K), randn(K, N), unwritten(M, N)
        kernel[lambda tile: (llama.cdiv(M, tile["BLOCK_M"]) * llama.cdiv(N, tile["BLOCK_N"]),)](x, y, z, M, N, K)
        case = f"z of {M} x {N} with {kernel.best_config}"
        expect_close(case, z, x.double() @ y.double(), 1e-4, "are these names of constants?", behind=behind)

    def bench(tuner, *args, config, **rest):
        tried.append(config)
        return [float(config is not chosen[0])]

    with contextlib.nullcontext() if ON_GPU else mock.patch.object(type(kernel), "_bench", bench):
        for config in kernel.configs:
            chosen[:] = [config]
            kernel.cache.clear()
            check_sizes(40, 33, 24)
        for name, sizes in (("M", (41, 33, 24)), ("K", (40, 32, 24)), ("N", (40, 33, 25))):
            tried.clear()
            check_sizes(*sizes)
            expect(ON_GPU or tried, f"another {name} takes the tile of the last size: is {name} in key?")


def quantised(x):
    """(bytes of e4m3, bytes of the scales of 32 each, the numbers that they stand for in fp64)"""
    blocks = x.unflatten(1, (-1, 32))
    exponents = torch.ceil(torch.log2(blocks.abs().amax(2) / 448))
    numbers = (blocks * 2.0 ** -exponents[:, :, None]).to(torch.float8_e4m3fn)
    exact = numbers.double() * 2.0 ** exponents[:, :, None].double()
    return numbers.flatten(1).view(torch.uint8), (exponents + 127).to(torch.uint8), exact.flatten(1)


SCALED = [(16, 16, 64, 64), (32, 16, 192, 64), (16, 48, 128, 32)]  # n_rows, n_cols, n_inner, BLOCK_K


@for_each(SCALED)
def check_scaled_matmul_kernel(puzzles, n_rows, n_cols, n_inner, block_k):
    spread = torch.logspace(-2, 2, n_inner, base=2, device=DEVICE)
    (x, x_scale, exact_x), (y, y_scale, exact_y) = (quantised(randn(n, n_inner) * spread) for n in (n_rows, n_cols))
    z, behind = unwritten(n_rows, n_cols)
    launch(puzzles.scaled_matmul_kernel, (n_rows // 16, n_cols // 16), x, x_scale, y, y_scale, z, n_cols, n_inner,
           BLOCK_M=16, BLOCK_N=16, BLOCK_K=block_k, share=TILE,
           explain=lambda fault: "a row has n_inner bytes, and n_inner // 32 scales")  # fmt: skip
    case = f"z of {n_rows} x {n_cols}, each of {n_inner} products"
    if not z.any():
        raise NothingStored(f"{case}, is 0, what it began with: add the product of the tiles to it")
    plain_x, plain_y = (t.view(torch.float8_e4m3fn).double() for t in (x, y))
    last = n_inner - block_k
    mistakes = [
        (plain_x @ plain_y.T, "neither operand is scaled"),
        (exact_x @ plain_y.T, "y is not scaled: y_scale is the fifth argument of tl.dot_scaled"),
        (plain_x @ exact_y.T, "x is not scaled: x_scale is the second argument of tl.dot_scaled"),
        (exact_x[:, last:] @ exact_y[:, last:].T, "this is the last tile only: z is tl.dot_scaled's last argument"),
        (x.view(torch.float8_e5m2).double() @ y.view(torch.float8_e5m2).double().T, "the format is e4m3, not e5m2"),
    ]
    hint = 'z = tl.dot_scaled(x, x_scale, "e4m3", y, y_scale, "e4m3", z), and scales are 2^(byte - 127) of 32 numbers'
    expect_close(case, z, exact_x @ exact_y.T, 1e-4, hint, mistakes, behind)


CHECKS = (
    check_copy_kernel, check_masked_copy_kernel, check_grid_copy_kernel, check_outer_sum_kernel, check_transpose_kernel,
    check_row_sum_kernel, check_softmax_kernel, check_row_max_kernel, check_multiply_tile, check_grouped_matmul_kernel,
    check_tuned_matmul_kernel, *[check_scaled_matmul_kernel] * (ON_GPU or has_scaled_products()),
)  # fmt: skip
TASKS = {check.__name__.removeprefix("check_"): check for check in CHECKS}
