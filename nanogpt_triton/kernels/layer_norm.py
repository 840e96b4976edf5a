"""LayerNorm as Triton kernels, forward and backward, with the addition before it fused in.

Mean, variance and all sums are in fp32; results are rounded once, on the store. A gradient of weight or bias goes
through partial sums and one reduction in a fixed order: no atomics, no locks, the same bits in every run.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanogpt_triton.kernels import operators
from nanogpt_triton.kernels.operators import launch, make_operator, no_second_derivative, say_why, wrap_triton
from tiny_llama_v3 import (
    COLUMN_SUM_TILE,
    as_rows,
    cdiv,
    column_sum_kernel,
    get_gpu,
    jit,
    load,
    next_power_of_2,
    norm_tile,
    store,
    tile_ptrs,
    tl,
)

MAX_COLS = 2**20  # a row is one tile, and Triton's tiles end there

# ----------------------------------------------------------------------------------------------------------------------
# Kernels


@jit
def layer_norm_kernel(
    x_ptr, branch_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr, mean_ptr, rstd_ptr,
    stride_x_row, stride_branch_row, n_rows,
    N_COLS: tl.constexpr, EPS: tl.constexpr, HAS_BRANCH: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """residual = x + branch;  y = (residual - mean) * rstd * weight + bias,  rstd = 1 / sqrt(variance + EPS)."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_SIZE)
    row_mask, col_mask = rows < n_rows, cols < N_COLS
    mask = row_mask[:, None] & col_mask[None, :]
    x = load(tile_ptrs(x_ptr, rows, stride_x_row, cols), mask)
    if HAS_BRANCH:
        residual = x + load(tile_ptrs(branch_ptr, rows, stride_branch_row, cols), mask)
        residual = residual.to(residual_ptr.dtype.element_ty)
        store(tile_ptrs(residual_ptr, rows, N_COLS, cols), residual, mask)
        x = residual.to(tl.float32)  # normalise what is stored: the backward pass will read that
    # Two passes over registers. Columns beyond the row are zero, which a mean subtracted would undo: hence the mask.
    mean = tl.sum(x, axis=1) / N_COLS
    centered = tl.where(mask, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centered * centered, axis=1) / N_COLS + EPS)
    # The backward pass computes n again from x, which takes two numbers a row instead of a tensor.
    store(mean_ptr + rows, mean, row_mask)
    store(rstd_ptr + rows, rstd, row_mask)
    y = centered * rstd[:, None] * load(weight_ptr + cols, col_mask)[None, :]
    if HAS_BIAS:
        y += load(bias_ptr + cols, col_mask)[None, :]
    store(tile_ptrs(y_ptr, rows, N_COLS, cols), y, mask)


@jit
def layer_norm_backward_kernel(
    y_grad_ptr, residual_grad_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, x_grad_ptr, branch_grad_ptr, partial_ptr,
    stride_y_grad_row, stride_residual_grad_row, stride_x_row, n_rows,
    N_COLS: tl.constexpr, HAS_RESIDUAL_GRAD: tl.constexpr, HAS_BRANCH_GRAD: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, STAGES: tl.constexpr, READ_TWICE: tl.constexpr,
):  # fmt: skip
    """With n = (x - mean) * rstd and g = y_grad * weight:

        x_grad = (g - mean(g) - n * mean(n * g)) * rstd + residual_grad

    and branch_grad is the same in another type. Each program walks over row tiles, num_programs apart, and leaves its
    sums of y_grad * n and of y_grad in its row of partial. Rows too wide to wait in registers for the means are
    READ_TWICE, the second time from the cache; so is the weight, unless the rows leave it room.
    """
    KEEP_WEIGHT: tl.constexpr = not READ_TWICE or x_ptr.dtype.element_ty != tl.float32
    cols = tl.arange(0, BLOCK_SIZE)
    col_mask = cols < N_COLS
    weight = load(weight_ptr + cols, col_mask)
    # Sums over all rows of this program, in registers: one store at the end instead of atomics for each tile.
    weight_grad = tl.zeros([BLOCK_SIZE], tl.float32)
    bias_grad = tl.zeros([BLOCK_SIZE], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        row_mask = rows < n_rows
        mask = row_mask[:, None] & col_mask[None, :]
        x_ptrs = tile_ptrs(x_ptr, rows, stride_x_row, cols)
        x = load(x_ptrs, mask)
        y_grad_ptrs = tile_ptrs(y_grad_ptr, rows, stride_y_grad_row, cols)
        y_grad = load(y_grad_ptrs, mask)
        mean = load(mean_ptr + rows, row_mask)
        rstd = load(rstd_ptr + rows, row_mask)
        if not KEEP_WEIGHT:
            weight = load(weight_ptr + cols, col_mask)
        normalized = (x - mean[:, None]) * rstd[:, None]
        scaled_grad = y_grad * weight[None, :]
        # What mean and rstd pass on: each element of a row changes them, and they all others.
        mean_grad = tl.sum(scaled_grad, axis=1) / N_COLS
        mean_product = tl.sum(normalized * scaled_grad, axis=1) / N_COLS
        if READ_TWICE:  # another eviction policy, or the compiler would keep what it has read
            x = tl.load(x_ptrs, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            y_grad = tl.load(y_grad_ptrs, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            if not KEEP_WEIGHT:
                weight_ptrs = weight_ptr + cols
                weight = tl.load(weight_ptrs, mask=col_mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            normalized = (x - mean[:, None]) * rstd[:, None]
            scaled_grad = y_grad * weight[None, :]
        weight_grad += tl.sum(y_grad * normalized, axis=0)  # within a thread: a row takes all of them
        if HAS_BIAS:
            bias_grad += tl.sum(y_grad, axis=0)
        x_grad = (scaled_grad - mean_grad[:, None] - normalized * mean_product[:, None]) * rstd[:, None]
        # The stream also goes around the norm, and its gradient from there is added here.
        if HAS_RESIDUAL_GRAD:
            x_grad += load(tile_ptrs(residual_grad_ptr, rows, stride_residual_grad_row, cols), mask)
        offsets = rows[:, None] * N_COLS + cols[None, :]
        store(x_grad_ptr + offsets, x_grad, mask)
        if HAS_BRANCH_GRAD:
            store(branch_grad_ptr + offsets, x_grad, mask)
    partial_ptr += tl.program_id(0) * (2 * N_COLS if HAS_BIAS else N_COLS)
    store(partial_ptr + cols, weight_grad, col_mask)
    if HAS_BIAS:
        store(partial_ptr + N_COLS + cols, bias_grad, col_mask)


class BackwardTile(NamedTuple):
    rows: int
    cols: int
    warps: int
    stages: int
    programs: int
    read_twice: bool


@functools.cache
def backward_tile(n_rows, n_cols, itemsize, device_type):
    """A row takes all threads of a program, 8 columns each where possible: sums over rows stay within a thread.

    The narrower the rows, the more programs a multiprocessor has.
    """
    gpu = get_gpu(device_type)
    cols = next_power_of_2(n_cols)
    rows, stages, threads = 4 if cols <= 4096 else 1, 1, min(max(cols // 8, gpu.warp_size), 512)
    if cols == 8192 and itemsize == 2 and gpu.family == "hopper":  # two rows in flight hide the memory's latency
        rows, stages, threads = 2, 2, 256
    elif cols > 8192:  # few threads, many registers each: the sums alone need 2 a column
        threads = min(cols // 64, 1024)
    programs = min(cdiv(n_rows, rows), gpu.num_sms * max(1, min(512 // threads, 8 if cols <= 8192 else 1)))
    return BackwardTile(rows, cols, threads // gpu.warp_size, stages, programs, cols > 8192)


# ----------------------------------------------------------------------------------------------------------------------
# Operators


def known_size(n_rows):
    """A number of rows that torch.compile leaves open counts as many."""
    return n_rows if isinstance(n_rows, int) else 2**20


def forward_outputs(x, branch, weight, bias, eps, dtype):
    """Allocate what layer_norm_operator() returns. An output may not be an input: residual is empty without branch."""
    empty = functools.partial(torch.empty, dtype=torch.float32, device=x.device)
    residual_dtype = x.dtype if branch is None else torch.promote_types(x.dtype, branch.dtype)
    residual = empty(0 if branch is None else x.shape, dtype=residual_dtype)
    return residual, empty(x.shape, dtype=dtype), empty(x.shape[:-1]), empty(x.shape[:-1])


@make_operator("nanogpt_triton::layer_norm", mutates_args=())
def layer_norm_operator(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, branch (..., cols) -> residual (empty without branch), y in dtype, mean and rstd (...,) in fp32."""
    residual, y, mean, rstd = forward_outputs(x, branch, weight, bias, eps, dtype)
    weight = weight.contiguous()  # the kernel knows no stride of it
    x_rows = as_rows(x)
    branch_rows = x_rows if branch is None else as_rows(branch)
    n_rows, n_cols = x_rows.shape[0], int(x_rows.shape[1])
    tile = norm_tile(known_size(n_rows), n_cols, False, x.device.type)
    launch(
        wrap_triton(layer_norm_kernel),
        (cdiv(n_rows, tile.rows),),
        (x_rows, branch_rows, weight, weight if bias is None else bias.contiguous(), residual, y, mean, rstd),
        (x_rows.stride(0), branch_rows.stride(0), n_rows),
        dict(
            N_COLS=n_cols, EPS=eps, HAS_BRANCH=branch is not None, HAS_BIAS=bias is not None,
            BLOCK_ROWS=tile.rows, BLOCK_SIZE=tile.cols,
        ),
        num_warps=tile.warps,
    )  # fmt: skip
    return residual, y, mean, rstd


def backward_outputs(y_grad, residual_grad, x, weight, mean, rstd, has_bias, branch_dtype):
    """Allocate what layer_norm_backward_operator() returns."""
    empty = functools.partial(torch.empty, device=x.device)
    x_grad = empty(x.shape, dtype=x.dtype)
    branch_grad = empty(x.shape if branch_dtype else 0, dtype=branch_dtype or x.dtype)
    return x_grad, branch_grad, empty(1 + has_bias, x.shape[-1], dtype=weight.dtype)


@make_operator("nanogpt_triton::layer_norm_backward", mutates_args=())
def layer_norm_backward_operator(
    y_grad: Tensor,
    residual_grad: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    has_bias: bool,
    branch_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of x, which was normalised, the same in branch_dtype (empty if that is None), and those of
    weight and bias (1 or 2, cols)."""
    outputs = backward_outputs(y_grad, residual_grad, x, weight, mean, rstd, has_bias, branch_dtype)
    x_grad, branch_grad, parameter_grads = outputs
    x_rows, y_grad_rows = as_rows(x), as_rows(y_grad)
    residual_grad_rows = y_grad_rows if residual_grad is None else as_rows(residual_grad)
    n_rows, n_cols = x_rows.shape[0], int(x_rows.shape[1])
    tile = backward_tile(known_size(n_rows), n_cols, x.element_size(), x.device.type)
    partial = torch.empty(tile.programs, 1 + has_bias, n_cols, device=x.device, dtype=torch.float32)
    launch(
        wrap_triton(layer_norm_backward_kernel),
        (tile.programs,),
        (y_grad_rows, residual_grad_rows, x_rows, weight.contiguous(), mean, rstd, x_grad, branch_grad, partial),
        (y_grad_rows.stride(0), residual_grad_rows.stride(0), x_rows.stride(0), n_rows),
        dict(
            N_COLS=n_cols, HAS_RESIDUAL_GRAD=residual_grad is not None, HAS_BRANCH_GRAD=branch_dtype is not None,
            HAS_BIAS=has_bias, BLOCK_ROWS=tile.rows, BLOCK_SIZE=tile.cols, STAGES=tile.stages,
            READ_TWICE=tile.read_twice,
        ),
        num_warps=tile.warps,
    )  # fmt: skip
    # Rows of partial lie one after the other: weight and bias are added up as the columns of one matrix.
    n_sums = (1 + has_bias) * n_cols
    _, block_cols, num_warps = COLUMN_SUM_TILE
    launch(
        wrap_triton(column_sum_kernel),
        (cdiv(n_sums, block_cols),), (partial, parameter_grads), (n_sums, tile.programs, n_sums),
        dict(ACCUMULATE=False, BLOCK_ROWS=min(max(next_power_of_2(tile.programs), 16), 512), BLOCK_COLS=block_cols),
        num_warps=num_warps,
    )  # fmt: skip
    return outputs


def setup_context(ctx, inputs, output):
    """Keep in ctx what input_gradients() needs."""
    x, branch, weight, bias, _, _ = inputs
    residual, _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x if branch is None else residual, weight, mean, rstd)
    ctx.has_bias, ctx.branch_dtype = bias is not None, None if branch is None else branch.dtype
    ctx.set_materialize_grads(False)  # the last norm's residual is not used: its gradient is None, not zeros


def input_gradients(ctx, residual_grad, y_grad, *_):
    """Return the gradients of x, branch, weight, bias and the two constants; None for what there is not."""
    x, weight, mean, rstd = ctx.saved_tensors
    if ctx.branch_dtype is None:
        residual_grad = None
    if y_grad is None:
        if residual_grad is None:
            return (None,) * 6
        y_grad = torch.zeros_like(x)
    # The gradient of the sum is that of both its terms. It is written twice only if the branch has another type; if x
    # has, which happens in no model, autograd converts it.
    other_dtype = None if ctx.branch_dtype == x.dtype else ctx.branch_dtype
    x_grad, branch_grad, parameter_grads = layer_norm_backward_operator(
        y_grad, residual_grad, x, weight, mean, rstd, ctx.has_bias, other_dtype
    )
    if other_dtype is None:
        branch_grad = None if ctx.branch_dtype is None else x_grad
    return x_grad, branch_grad, parameter_grads[0], parameter_grads[1] if ctx.has_bias else None, None, None


layer_norm_operator.register_fake(forward_outputs)
layer_norm_operator.register_autograd(input_gradients, setup_context=setup_context)
layer_norm_backward_operator.register_fake(backward_outputs)
layer_norm_backward_operator.register_autograd(no_second_derivative("LayerNorm", "F.layer_norm"))


# ----------------------------------------------------------------------------------------------------------------------
# Functions for models


def torch_add_layer_norm(x, branch, weight, bias, eps=1e-5):
    """Return what triton_add_layer_norm() does, by PyTorch's operators."""
    residual = x if branch is None else x + branch
    return residual, F.layer_norm(residual, residual.shape[-1:], weight, bias, eps)


def triton_layer_norm(x, weight, bias=None, eps=1e-5):
    """LayerNorm over the last dimension: x (..., cols), weight and bias (cols,) -> y like x.

    Under autocast y has the type of autocast, which is what the next matrix product would round it to (PyTorch's own
    layer_norm returns fp32 there). Statistics are fp32 throughout.
    """
    return triton_add_layer_norm(x, None, weight, bias, eps)[1]


class TritonLayerNorm:
    """Another name of triton_layer_norm, for programs that call it as an autograd Function."""

    apply = staticmethod(triton_layer_norm)


def triton_add_layer_norm(x, branch, weight, bias=None, eps=1e-5):
    """(x + branch, LayerNorm of it) in one pass, as triton_layer_norm() otherwise. branch may be None."""
    reason = obstacle(x, branch, weight, bias)
    if reason:
        say_why("LayerNorm", reason)
        return torch_add_layer_norm(x, branch, weight, bias, eps)
    dtype = x.dtype if branch is None else torch.promote_types(x.dtype, branch.dtype)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    residual, y, _, _ = layer_norm_operator(x, branch, weight, bias, eps, dtype)
    return x if branch is None else residual, y


def obstacle(x, branch, weight, bias):
    """Return in words why the kernels cannot take these tensors, or None if they can."""
    reason = operators.obstacle(x, branch, weight, bias)
    if reason:
        return reason
    if x.numel() == 0 or x.shape[-1] > MAX_COLS:
        return "rows are empty, or longer than the kernels take"
    expected = (branch, x.shape), (weight, x.shape[-1:]), (bias, x.shape[-1:])
    if any(t is not None and (t.shape != shape or t.device != x.device) for t, shape in expected):
        return "shapes or devices differ"  # PyTorch extends some shapes, and refuses the rest
    return None
