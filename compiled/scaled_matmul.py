"""A matrix product in the MX formats (MXFP8, MXFP4), which shows what the compiler makes of tl.dot_scaled."""

import torch

import tiny_llama_v3 as llama
from tiny_llama_v3 import tl, triton

SCALED = 32  # elements that share a scale
FORMATS = {"e4m3": 1, "e5m2": 1, "e2m1": 2}  # elements in a byte


@triton.jit
def scaled_matmul_kernel(
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr, out_ptr, n_cols, row_bytes,
    FORMAT: tl.constexpr, PACKED: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out (rows, cols) = x (rows, inner) @ weight (cols, inner)^T, whose sizes are multiples of the blocks.

    A byte has PACKED elements of FORMAT, the first in the lower bits; row_bytes is inner / PACKED, and BLOCK_K counts
    bytes. The scales (rows or cols, inner / SCALED) are bytes that stand for 2^(byte - 127).
    Grid: (rows / BLOCK_M, cols / BLOCK_N).
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_scales = row_bytes * PACKED // SCALED
    block, scales = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K * PACKED // SCALED)
    out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, row_bytes, BLOCK_K):
        start_scales = start * PACKED // SCALED
        x = tl.load(x_ptr + rows[:, None] * row_bytes + start + block)
        weight = tl.load(weight_ptr + cols[None, :] * row_bytes + start + block[:, None])
        x_scale = tl.load(x_scale_ptr + rows[:, None] * row_scales + start_scales + scales)
        weight_scale = tl.load(weight_scale_ptr + cols[:, None] * row_scales + start_scales + scales)
        out = tl.dot_scaled(x, x_scale, FORMAT, weight, weight_scale, FORMAT, out)
    tl.store(out_ptr + rows[:, None] * n_cols + cols, out)


def scaled_matmul(x, x_scale, weight, weight_scale, format, block=128):
    """x @ weight^T of bytes (rows, inner) and (cols, inner) in one of FORMATS, with their scales, in fp32."""
    out = torch.empty(len(x), len(weight), device=x.device)
    constants = dict(FORMAT=format, PACKED=FORMATS[format], SCALED=SCALED)
    llama.launch(
        scaled_matmul_kernel, (len(x) // block, len(weight) // block), (x, x_scale, weight, weight_scale, out),
        weight.shape, constants | dict(BLOCK_M=block, BLOCK_N=block, BLOCK_K=block),
    )  # fmt: skip
    return out
