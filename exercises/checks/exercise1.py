"""Checks of exercise 1."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tiny_llama_v3 as llama
from exercises.checks.common import DEVICE, expect_close, expect_number, expect_untouched, randn, unwritten


def check_rmsnorm_kernel(exercise):
    for n_rows, n_cols, block_size in ((3, 128, 128), (2, 512, 64), (2, 200, 64), (1, 1, 64), (2, 96, 1024)):
        padded, _ = unwritten(n_rows, n_cols + 7)  # what lies between and behind the rows is not theirs to read
        padded[:, :n_cols] = randn(n_rows, n_cols)
        x, weight = padded[:, :n_cols], randn(n_cols)
        y, behind = unwritten(n_rows, n_cols)
        exercise.rmsnorm_kernel[(n_rows,)](x, weight, y, x.stride(0), n_cols, 1e-5, BLOCK_SIZE=block_size)
        wanted, _ = llama.torch_rmsnorm(x.double(), None, weight.double(), 1e-5)
        case = f"y for rows of {n_cols}, BLOCK_SIZE {block_size}"
        expect_untouched(case, behind)
        expect_close(case, y, wanted, 1e-5, "are the mask, the row's stride and both loops right?")
    x, (y, _) = torch.zeros(1, 64, device=DEVICE), unwritten(1, 64)
    exercise.rmsnorm_kernel[(1,)](x, torch.ones(64, device=DEVICE), y, 64, 64, 1e-5, BLOCK_SIZE=64)
    expect_close("y for a row of zeros", y, x, 0, "eps keeps it from dividing by zero")


def check_memory_lines(exercise):
    for block_size, itemsize, stride, lines, hint in (
        (32, 4, 1, 1, "32 neighbours of 4 bytes lie in one line of 128"),
        (1024, 2, 1, 16, "2048 bytes, one after the other"),
        (64, 4, 32, 64, "each element lies in a line of its own"),
        (64, 4, 2, 4, "every second element: half of what is fetched is thrown away"),
        (64, 4, 1000, 64, "more than a line apart: no line is touched twice, and those between not at all"),
    ):
        name = f"memory_lines({block_size}, {itemsize}, {stride})"
        expect_number(name, exercise.memory_lines(block_size, itemsize, stride), lines, hint)
    name = "memory_lines(64, 4, 1, line=64)"
    expect_number(name, exercise.memory_lines(64, 4, 1, line=64), 4, "AMD's caches have lines of 64 or 128 bytes")


class CountBytes(TorchDispatchMode):
    """Bytes of the matrices that PyTorch's operators read and write; rows and columns count as nothing."""

    def __init__(self, smallest):
        super().__init__()
        self.smallest, self.bytes = smallest, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [t for t in (*args, result) if isinstance(t, torch.Tensor)]
        self.bytes += sum(t.nbytes for t in tensors if t.numel() >= self.smallest)
        return result


def check_bytes_moved(exercise):
    for n_rows, n_cols, dtype in ((64, 96, torch.float32), (32, 256, torch.float16)):
        x, weight = randn(n_rows, n_cols, dtype=dtype), randn(n_cols, dtype=dtype)
        with CountBytes(smallest=n_rows * n_cols) as counted:
            llama.torch_rmsnorm(x, None, weight, 1e-5)
        fused, separate = exercise.bytes_moved(n_rows, n_cols, x.element_size())
        case = f"for {n_rows} rows of {n_cols} elements of {x.element_size()} bytes"
        expect_number(f"fused {case}", fused, 2 * x.nbytes, "x comes in once, y goes out once")
        expect_number(f"separate {case}", separate, counted.bytes, "this is what PyTorch's operators were seen to move")


TASKS = {
    "rmsnorm_kernel": check_rmsnorm_kernel,
    "memory_lines": check_memory_lines,
    "bytes_moved": check_bytes_moved,
}
