"""Checks of exercise 1."""

import itertools

import torch
import torch.nn.functional as F

import tiny_llama_v3 as llama
from exercises.checks.common import DEVICE, POISON, CountBytes, expect, expect_close, expect_number, randn, unwritten
from exercises.checks.memory import launch

GAP = 7  # elements between two rows


def rmsnorm_mistakes(x, weight, block_size, eps, undefined):
    """x (n_rows, n_cols) and weight in fp64. undefined: the line of the first load that lacks `other`, or None."""
    n_cols = x.shape[1]
    padded = llama.cdiv(n_cols, block_size) * block_size

    def normalised(square_sum, count=n_cols, weight=weight):
        return x * torch.rsqrt(square_sum[:, None] / count + eps) * weight

    square_sum = x.square().sum(dim=1)
    mean = square_sum[:, None] / n_cols
    if undefined:
        words = f"the load in line {undefined} lacks other=0.0: without it, what the mask leaves out is undefined"
        yield normalised(square_sum + (padded - n_cols) * POISON**2), words
    for count in (block_size, padded):
        yield normalised(square_sum, count), "the sum is divided by BLOCK_SIZE, or a multiple of it, instead of n_cols"
    yield normalised(square_sum, 1), "this is x / sqrt(sum(x^2) + eps): the sum is not divided by n_cols"
    yield x / mean.sqrt() * weight, "eps is missing, or not the argument"
    yield x * torch.rsqrt(mean + eps / n_cols) * weight, "eps is added before the division by n_cols: it comes after"
    yield x / (mean.sqrt() + eps) * weight, "eps is outside the root: it is added to the mean"
    yield x * (1 / mean.sqrt() + eps) * weight, "eps is outside the root: it is added to the mean"
    yield normalised(square_sum, weight=1.0), "the weight is missing"
    yield normalised(square_sum, weight=1.0 + weight), "x is multiplied with 1 + weight instead of weight"
    yield normalised(square_sum, weight=1.0) + weight, "the weight is added: x is multiplied with it"
    yield normalised(square_sum, weight=weight[:1]), "all of a row is multiplied with weight[0]: weight_ptr + cols"
    yield normalised(x.abs().sum(dim=1)), "this takes the mean of |x|, not of x^2"
    yield normalised(x.sum(dim=1)), "this takes the mean of x, not of x^2"
    yield normalised(x.sum(dim=1).square()), "this is the square of the sum: the sum adds squares, x * x"
    yield normalised(square_sum / n_cols), "the sum is divided by n_cols twice: that comes behind the loop"
    yield normalised(square_sum + padded - n_cols), "what the mask leaves out counts as 1: other=0.0"
    yield x * weight, "x is not divided by the root: times rstd"
    if len(x) <= n_cols:
        yield normalised(square_sum, weight=weight[: len(x), None]), "a weight for each row: weight_ptr + cols"
    yield x[:1] * torch.rsqrt(mean + eps) * weight, "the second load reads row 0: row * stride_row + cols"
    blocks = F.pad(x, (0, padded - n_cols)).unflatten(1, (-1, block_size))
    again = blocks[:, -1:].expand_as(blocks).flatten(1)[:, :n_cols]
    yield again * torch.rsqrt(mean + eps) * weight, "x is still the last block of the first loop: load it again"
    yield normalised(blocks[:, 0].square().sum(dim=1)), "square_sum is that of the first block only: cols < n_cols"
    yield normalised(x.square().amax(dim=1)), "this takes the largest square: tl.sum adds them"
    yield x * (mean + eps).sqrt() * weight, "x is multiplied with the root instead of divided by it"
    yield x / (mean + eps) * weight, "the root is missing"
    yield torch.rsqrt(mean + eps) * weight + x * 0, "x is missing from what is stored"
    last = x[:, padded - block_size :].square().sum(dim=1)
    yield normalised(last), "square_sum is that of the last block only: add to it with +="
    yield normalised(square_sum[:1])[:1].expand_as(x), "every program reads row 0"


def check_rmsnorm_kernel(exercise):
    fp32, half, bf16 = torch.float32, torch.float16, torch.bfloat16
    # Half an eps is what rounding to the type costs; the interpreter cuts bf16 off, which costs a whole one.
    for n_rows, n_cols, block_size, eps, dtype, tolerance, hint in (
        (3, 128, 128, 1e-5, fp32, 1e-5, "compare with the formula in the docstring"),
        (2, 512, 64, 1e-5, fp32, 1e-5, "a row of several blocks: do both loops visit all of them?"),
        (2, 200, 64, 0.5, fp32, 1e-5, "the last block is not full: do all loads and the store have a mask?"),
        (1, 1, 64, 1e-5, fp32, 1e-5, "a row of one element"),
        (2, 96, 1024, 1e-5, fp32, 1e-5, "a block longer than the row: do all loads and the store have a mask?"),
        (2, 1200, 2048, 1e-5, fp32, 1e-5, "a block has BLOCK_SIZE elements, whatever that is"),
        (2, 200, 64, 1e-5, half, 0.55 * 2**-10, "right in fp32: is .to(tl.float32) behind each load?"),
        (2, 200, 64, 1e-5, bf16, 1.05 * 2**-7, "right in fp32: is .to(tl.float32) behind each load?"),
    ):

        def explain(fault, n_cols=n_cols, block_size=block_size):
            left = n_cols % block_size
            if left and (fault.lanes[0] == left).all():
                return "one too many; the last column is n_cols - 1, so is it < or <=?"
            if left and (fault.lanes[0] >= left).all():
                return "the last block of a row is not full: its mask is cols < n_cols"
            return {
                "x": "rows of x begin stride_row elements apart, and what lies between them is not x",
                "weight": "weight has one row, which all rows of x share: weight_ptr + cols, with mask=cols < n_cols",
            }.get(fault.tensor, "y is stored with x's stride, but its rows are n_cols elements apart")

        stride = n_cols + GAP
        # What lies between and behind the rows is not theirs to read. In fp16 the squares of such values overflow.
        x = (randn(n_rows, stride) * (500 if dtype == half else 1)).to(dtype)[:, :n_cols]
        weight, (y, behind) = randn(n_cols, dtype=dtype), unwritten(n_rows, n_cols, dtype=dtype)
        undefined = launch(exercise.rmsnorm_kernel, (n_rows,), x, weight, y, stride, n_cols, eps, BLOCK_SIZE=block_size,
                           explain=explain,
                           share="program p stores row p: y_ptr + row * n_cols + cols, cols < n_cols")  # fmt: skip
        wanted, _ = llama.torch_rmsnorm(x.double(), None, weight.double(), eps)
        name = f"y for {n_rows} rows of {n_cols} in {str(dtype).removeprefix('torch.')}, BLOCK_SIZE {block_size}"
        mistakes = [*rmsnorm_mistakes(x.double(), weight.double(), block_size, eps, undefined)]
        if dtype == half:
            mistakes += [(wanted * 0.0, "x * x overflows in fp16: .to(tl.float32) belongs behind the load")]
        expect_close(name, y, wanted, tolerance, hint, mistakes, behind)
    x, (y, _) = torch.zeros(1, 64, device=DEVICE), unwritten(1, 64)
    launch(exercise.rmsnorm_kernel, (1,), x, torch.ones(64, device=DEVICE), y, 64, 64, 1e-5, BLOCK_SIZE=64)
    expect_close("y for a row of zeros", y, x, 0, "eps, under the root, keeps it from dividing by zero")


def lines_touched(block_size, itemsize, stride, line):
    return len({index * stride * itemsize // line for index in range(block_size)})


def memory_lines_mistakes(block_size, itemsize, stride, line):
    elements = block_size * itemsize
    if elements * stride % line:
        down = "a line that is touched in part counts as well: do not round down"
        yield from ((max(least, elements * stride // line), down) for least in (0, 1))
    yield -(-elements // line), "the stride is missing: neighbours are stride elements apart"
    yield -(-block_size * stride // line), "itemsize is missing: an element is itemsize bytes long"
    yield lines_touched(block_size, itemsize, stride, 128), "a line has line bytes, not always 128"
    yield lines_touched(block_size, 4, stride, line), "an element has itemsize bytes, not always 4"
    between = "the lines between are not touched: count those in which an element begins"
    behind = "the last element begins (block_size - 1) * stride elements behind the first: nothing behind it is touched"
    words = between if stride * itemsize > line else behind
    yield from ((count, words) for count in (elements * stride // line, -(-stride * elements // line)))
    yield (block_size - 1) * stride * itemsize // line + 1, between
    yield lines_touched(block_size + 1, itemsize, stride, line), behind
    yield block_size, "these are the elements: those that share a line touch it together"
    yield elements, "these are the bytes, not the lines"


def check_memory_lines(exercise):
    cases = [
        (32, 4, 1, 128, "32 neighbours of 4 bytes lie in one line of 128"),
        (1024, 2, 1, 128, "2048 bytes, one after the other"),
        (64, 4, 32, 128, "each element lies in a line of its own"),
        (64, 4, 2, 128, "every second element: half of what is fetched is thrown away"),
        (64, 4, 1000, 128, "more than a line apart: no line is touched twice, and those between not at all"),
        (64, 4, 1, 64, "AMD's caches have lines of 64 or 128 bytes"),
        (5, 4, 1, 128, "20 bytes lie in one line"),
    ]
    for sizes in itertools.product((3, 1, 2, 7, 50), (4, 2, 8), (25, 1, 3, 7, 16, 33, 90), (128, 64)):
        cases.append((*sizes, "write down where each element begins, in bytes, and in which line that is"))
    for *sizes, line, hint in cases:
        other_line = {} if line == 128 else {"line": line}
        name = f"memory_lines({', '.join(map(str, sizes))}{'' if line == 128 else f', line={line}'})"
        expect_number(name, exercise.memory_lines(*sizes, **other_line), lines_touched(*sizes, line), hint,
                      memory_lines_mistakes(*sizes, line))  # fmt: skip


def bytes_moved_mistakes(matrix, row, itemsize):
    """Pairs of what is counted and words, for either of the two numbers."""
    elements = matrix // itemsize
    fused = [
        (2 * elements, "these are elements: each is itemsize bytes long"),
        (matrix, "x comes in, and y goes out as well"),
        (3 * matrix, "the kernel needs x once: the second loop finds it in registers or in the cache"),
        (2 * matrix + row, "a single row is left out, as that of the weight"),
        (7 * matrix, "these are the bytes of the separate operators: the order is (fused, separate)"),
    ]
    separate = [
        (7 * elements, "these are elements: each is itemsize bytes long"),
        (7 * matrix + row, "a single row is left out, as that of the weight"),
        (8 * matrix, "the mean reads a matrix, and writes a column only"),
        (6 * matrix, "count what each operator reads and writes: pow 2, mean 1, and the two products"),
        (4 * matrix, "each of the three that write a matrix also reads one"),
        (3 * matrix, "what an operator reads counts as well as what it writes"),
        (2 * matrix, "between two operators a matrix goes to memory and comes back"),
    ]
    return fused, separate


def check_bytes_moved(exercise):
    for n_rows, n_cols, dtype in ((61, 97, torch.float32), (31, 257, torch.float16)):
        x, weight = randn(n_rows, n_cols, dtype=dtype), randn(n_cols, dtype=dtype)
        with CountBytes(smallest=n_rows * n_cols) as counted:
            llama.torch_rmsnorm(x, None, weight, 1e-5)
        got = exercise.bytes_moved(n_rows, n_cols, x.element_size())
        expect(isinstance(got, tuple | list) and len(got) == 2, f"it returns {got!r}, expected (fused, separate)")
        fused, separate = got
        case = f"for {n_rows} rows of {n_cols} elements of {x.element_size()} bytes"
        mistakes = bytes_moved_mistakes(x.nbytes, weight.nbytes, x.element_size())
        expect_number(f"fused {case}", fused, 2 * x.nbytes, "x comes in once, y goes out once", mistakes[0])
        hint = "this is what PyTorch's operators were seen to move"
        expect_number(f"separate {case}", separate, counted.bytes, hint, mistakes[1])


def show_rmsnorm_kernel(exercise):
    x, weight, (y, _) = randn(3, 14)[:, :10], randn(10), unwritten(3, 10)
    launch(exercise.rmsnorm_kernel, (3,), x, weight, y, 14, 10, 1e-5, BLOCK_SIZE=4)


SHOWN = {"rmsnorm_kernel": show_rmsnorm_kernel}  # small enough to be drawn
CHECKS = check_rmsnorm_kernel, check_memory_lines, check_bytes_moved
TASKS = {check.__name__.removeprefix("check_"): check for check in CHECKS}
COMPILED = {"rmsnorm_kernel"}
