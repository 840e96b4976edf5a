"""Exercise 1: a kernel that walks along a row, and what its loads cost."""

import triton
import triton.language as tl


@triton.jit
def rmsnorm_kernel(x_ptr, weight_ptr, y_ptr, stride_row, n_cols, eps, BLOCK_SIZE: tl.constexpr):
    row = tl.program_id(0)
    square_sum = 0.0
    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        x = tl.load(x_ptr + row * stride_row + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        # fp32 before the product: in fp16 x * x overflows from 256 on, in bf16 a sum loses digits.
        square_sum += tl.sum(x * x, axis=0)
    # n_cols, not BLOCK_SIZE: the lanes that the mask left out added 0.
    rstd = 1.0 / tl.sqrt(square_sum / n_cols + eps)
    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        x = tl.load(x_ptr + row * stride_row + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        # x again: a row may be longer than the block, and most of it is in the cache.
        weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * n_cols + cols, x * rstd * weight, mask=cols < n_cols)


def memory_lines(block_size, itemsize, stride, line=128):
    # A set counts a line once, however many elements share it.
    return len({index * stride * itemsize // line for index in range(block_size)})


def bytes_moved(n_rows, n_cols, itemsize):
    matrix = n_rows * n_cols * itemsize
    fused = 2 * matrix  # x in, y out
    separate = (2 + 1 + 2 + 2) * matrix  # the mean only reads
    return fused, separate
