"""Checks of exercise 1."""

import torch
from torch.overrides import TorchFunctionMode

import tiny_llama_v3 as llama
from exercises.checks.common import DEVICE, POISON, expect_close, expect_number, randn, unwritten

GAP = 7  # elements between two rows


def rmsnorm_mistakes(memory, weights, n_rows, n_cols, block_size, eps, dtype):
    """What lies at x and at weight, in fp64, goes on beyond what the kernel may read."""
    padded, stride = llama.cdiv(n_cols, block_size) * block_size, n_cols + GAP

    def rows_of(distance, length=n_cols):
        return torch.stack([memory[row * distance : row * distance + length] for row in range(n_rows)])

    def normalised(square_sum, count=n_cols, x=None, weight=weights[:n_cols]):
        return (rows_of(stride) if x is None else x) * torch.rsqrt(square_sum[:, None] / count + eps) * weight

    x, weight = rows_of(stride), weights[:n_cols]
    square_sum = x.square().sum(dim=1)
    mean = square_sum[:, None] / n_cols
    if dtype == torch.float16:
        yield x * 0.0, "x * x overflows in fp16: .to(tl.float32) belongs behind the load"
    beyond = rows_of(stride, padded).square().sum(dim=1)
    yield normalised(beyond), "what lies beyond the end of a row is summed in: the first load needs mask=cols < n_cols"
    undefined = square_sum + (padded - n_cols) * POISON**2
    yield normalised(undefined), "the first load lacks other=0.0: without it, what the mask leaves out is undefined"
    yield normalised(square_sum, block_size), "the sum is divided by BLOCK_SIZE instead of n_cols"
    yield normalised(square_sum, padded), "the sum is divided by a multiple of BLOCK_SIZE instead of n_cols"
    yield normalised(square_sum, 1), "this is x / sqrt(sum(x^2) + eps): the sum is not divided by n_cols"
    yield x / mean.sqrt() * weight, "eps is missing"
    yield x / (mean.sqrt() + eps) * weight, "eps is outside the root: it is added to the mean"
    yield x * (1 / mean.sqrt() + eps) * weight, "eps is outside the root: it is added to the mean"
    yield normalised(square_sum, weight=1.0), "the weight is missing"
    yield normalised(x.abs().sum(dim=1)), "this takes the mean of |x|, not of x^2"
    yield normalised(x.sum(dim=1)), "this takes the mean of x, not of x^2"
    yield x * (mean + eps).sqrt() * weight, "x is multiplied with the root instead of divided by it"
    yield x / (mean + eps) * weight, "the root is missing"
    yield torch.rsqrt(mean + eps) * weight + x * 0, "x is missing from what is stored"
    last = x[:, padded - block_size :].square().sum(dim=1)
    yield normalised(last), "square_sum is that of the last block only: add to it with +="
    packed = rows_of(n_cols)
    words = "a row begins at row * n_cols instead of row * stride_row"
    yield normalised(packed.square().sum(dim=1), x=packed), words
    yield normalised(packed.square().sum(dim=1)), f"{words}, in the first loop"
    yield normalised(square_sum, x=packed), f"{words}, in the second loop"
    first = rows_of(0)
    yield normalised(first.square().sum(dim=1), x=first), "every program reads row 0"
    scattered = torch.full((n_rows * stride,), torch.nan).to(x)
    for row, values in enumerate(normalised(square_sum)):
        scattered[row * stride : row * stride + n_cols] = values
    words = "y is stored with x's stride: its rows are n_cols elements apart"
    yield scattered[: x.numel()].view_as(x), words
    weight_rows = torch.stack([weights[row * n_cols : (row + 1) * n_cols] for row in range(n_rows)])
    yield normalised(square_sum, weight=weight_rows), "weight has one row, which all rows of x share"


def check_rmsnorm_kernel(exercise):
    fp32, half, bf16 = torch.float32, torch.float16, torch.bfloat16
    # Half an eps is what rounding to the type costs.
    for n_rows, n_cols, block_size, eps, dtype, tolerance, hint in (
        (3, 128, 128, 1e-5, fp32, 1e-5, "compare with the formula in the docstring"),
        (2, 512, 64, 1e-5, fp32, 1e-5, "a row of several blocks: do both loops visit all of them?"),
        (2, 200, 64, 0.5, fp32, 1e-5, "the last block is not full: do all loads and the store have a mask?"),
        (1, 1, 64, 1e-5, fp32, 1e-5, "a row of one element"),
        (2, 96, 1024, 1e-5, fp32, 1e-5, "a block longer than the row: do all loads and the store have a mask?"),
        (2, 200, 64, 1e-5, half, 0.55 * 2**-10, "right in fp32: is .to(tl.float32) behind each load?"),
        (2, 200, 64, 1e-5, bf16, 0.55 * 2**-7, "right in fp32: is .to(tl.float32) behind each load?"),
    ):
        stride = n_cols + GAP
        # What lies between and behind the rows is not theirs to read. In fp16 the squares of such values overflow.
        memory = randn(n_rows * stride + 2048) * (500 if dtype == half else 1)
        memory, weights = memory.to(dtype), randn(n_rows * n_cols + 2048, dtype=dtype)
        x, weight = memory[: n_rows * stride].view(n_rows, stride)[:, :n_cols], weights[:n_cols]
        y, behind = unwritten(n_rows, n_cols, dtype=dtype)
        exercise.rmsnorm_kernel[(n_rows,)](x, weight, y, stride, n_cols, eps, BLOCK_SIZE=block_size)
        wanted, _ = llama.torch_rmsnorm(x.double(), None, weight.double(), eps)
        name = f"y for {n_rows} rows of {n_cols} in {str(dtype).removeprefix('torch.')}, BLOCK_SIZE {block_size}"
        mistakes = rmsnorm_mistakes(memory.double(), weights.double(), n_rows, n_cols, block_size, eps, dtype)
        expect_close(name, y, wanted, tolerance, hint, mistakes, behind)
    x, (y, _) = torch.zeros(1, 64, device=DEVICE), unwritten(1, 64)
    exercise.rmsnorm_kernel[(1,)](x, torch.ones(64, device=DEVICE), y, 64, 64, 1e-5, BLOCK_SIZE=64)
    expect_close("y for a row of zeros", y, x, 0, "eps, under the root, keeps it from dividing by zero")


def memory_lines_mistakes(block_size, itemsize, stride, line):
    elements = block_size * itemsize
    if stride == 1:
        yield elements // line, "a line that is touched in part counts as well"
    yield -(-elements // line), "the stride is missing: neighbours are stride elements apart"
    yield -(-block_size * stride // line), "itemsize is missing: an element is itemsize bytes long"
    yield (
        len({index * stride * itemsize // 128 for index in range(block_size)}),
        "a line has line bytes, not always 128",
    )
    words = "the lines between are not touched: count those in which an element begins"
    yield from ((count, words) for count in (block_size * stride * itemsize // line, -(-stride * elements // line)))
    yield ((block_size - 1) * stride * itemsize // line + 1), words
    yield block_size, "these are the elements: those that share a line touch it together"
    yield elements, "these are the bytes, not the lines"


def check_memory_lines(exercise):
    for block_size, itemsize, stride, line, lines, hint in (
        (32, 4, 1, 128, 1, "32 neighbours of 4 bytes lie in one line of 128"),
        (1024, 2, 1, 128, 16, "2048 bytes, one after the other"),
        (64, 4, 32, 128, 64, "each element lies in a line of its own"),
        (64, 4, 2, 128, 4, "every second element: half of what is fetched is thrown away"),
        (64, 4, 1000, 128, 64, "more than a line apart: no line is touched twice, and those between not at all"),
        (64, 4, 1, 64, 4, "AMD's caches have lines of 64 or 128 bytes"),
        (5, 4, 1, 128, 1, "20 bytes lie in one line"),
    ):
        other_line = {} if line == 128 else {"line": line}
        name = f"memory_lines({block_size}, {itemsize}, {stride}{'' if line == 128 else f', line={line}'})"
        mistakes = memory_lines_mistakes(block_size, itemsize, stride, line)
        expect_number(name, exercise.memory_lines(block_size, itemsize, stride, **other_line), lines, hint, mistakes)


class CountBytes(TorchFunctionMode):
    """Bytes of the matrices that PyTorch's operators read and write; rows and columns count as nothing."""

    def __init__(self, smallest):
        super().__init__()
        self.smallest, self.bytes = smallest, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [t for t in (*args, result) if isinstance(t, torch.Tensor)]
        self.bytes += sum(t.nbytes for t in tensors if t.numel() >= self.smallest)
        return result


def bytes_moved_mistakes(matrix, itemsize):
    """Pairs of what is counted and words, for either of the two numbers."""
    elements = matrix // itemsize
    fused = [
        (2 * elements, "these are elements: each is itemsize bytes long"),
        (matrix, "x comes in, and y goes out as well"),
        (3 * matrix, "the kernel needs x once: the second loop finds it in registers or in the cache"),
        (7 * matrix, "these are the bytes of the separate operators: the order is (fused, separate)"),
    ]
    separate = [
        (7 * elements, "these are elements: each is itemsize bytes long"),
        (8 * matrix, "the mean reads a matrix, and writes a column only"),
        (6 * matrix, "count what each operator reads and writes: pow 2, mean 1, and the two products"),
        (4 * matrix, "each of the three that write a matrix also reads one"),
        (3 * matrix, "what an operator reads counts as well as what it writes"),
        (2 * matrix, "between two operators a matrix goes to memory and comes back"),
    ]
    return fused, separate


def check_bytes_moved(exercise):
    for n_rows, n_cols, dtype in ((64, 96, torch.float32), (32, 256, torch.float16)):
        x, weight = randn(n_rows, n_cols, dtype=dtype), randn(n_cols, dtype=dtype)
        with CountBytes(smallest=n_rows * n_cols) as counted:
            llama.torch_rmsnorm(x, None, weight, 1e-5)
        fused, separate = exercise.bytes_moved(n_rows, n_cols, x.element_size())
        case = f"for {n_rows} rows of {n_cols} elements of {x.element_size()} bytes"
        mistakes = bytes_moved_mistakes(x.nbytes, x.element_size())
        expect_number(f"fused {case}", fused, 2 * x.nbytes, "x comes in once, y goes out once", mistakes[0])
        hint = "this is what PyTorch's operators were seen to move"
        expect_number(f"separate {case}", separate, counted.bytes, hint, mistakes[1])


TASKS = {
    "rmsnorm_kernel": check_rmsnorm_kernel,
    "memory_lines": check_memory_lines,
    "bytes_moved": check_bytes_moved,
}

COMPILED = {"rmsnorm_kernel"}
