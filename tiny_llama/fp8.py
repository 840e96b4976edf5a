"""--fp8: the products of the layers' weights in FP8, forward and backward, with one scale a matrix.

Attention's own products, norms, embedding and head stay in bf16, the optimizer as it is. The kernel here rounds a
matrix to FP8, writes it and its transpose, and finds the scale; the products are the library's (torch._scaled_mm).
--impl torch computes the same in plain PyTorch, on any device: it rounds to FP8, and multiplies in bf16.
"""

import dataclasses
import re
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import tiny_llama_v3 as llama
from tiny_llama_v3 import UsageError, jit, load, store, tile_ptrs, tl

# ----------------------------------------------------------------------------------------------------------------------
# Types and scales


class Formats(NamedTuple):
    """The types of what the products of a device take."""

    forward: torch.dtype  # inputs and weights
    gradient: torch.dtype


OCP = Formats(torch.float8_e4m3fn, torch.float8_e5m2)  # largest 448 and 57,344
FNUZ = Formats(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)  # largest 240 and 57,344; neither -0 nor infinities
DIVISOR = 16  # of the rows and columns of every matrix that torch._scaled_mm multiplies


def formats_of(arch):
    """The Formats that the products of an architecture take, or None. A CPU emulates those of most."""
    if arch.startswith("sm_"):
        return OCP if int(arch[3:]) >= 89 else None
    return {"cpu": OCP, "gfx942": FNUZ, "gfx950": OCP}.get(arch, OCP if arch.startswith("gfx12") else None)


def validate(config, device, implementation):
    """Raise UsageError for what --fp8 cannot do in this run."""
    if implementation == "sdpa":
        raise UsageError("--fp8 is for --impl triton, and for --impl torch, which emulates it: drop --fp8")
    if config.triton_matmul_swiglu:
        raise UsageError("--triton-matmul-swiglu multiplies without FP8: drop it or --fp8")
    if implementation == "triton" and formats_of(device.arch) is None:
        raise UsageError(f"--fp8 needs products in FP8, which {device.arch} has not: drop it, or give --impl torch")
    widths = dict(hidden_dim=config.hidden_dim, ffn_dim=config.ffn_dim)
    widths |= {"seq_len": config.tokens_per_step, "num_kv_heads": 2 * config.num_kv_heads * config.head_dim}
    for name, width in widths.items():
        if width % DIVISOR:
            given = f"{llama.flag_of(name)} {getattr(config, name)}"
            raise UsageError(f"{given} makes a matrix of {width} rows or columns: --fp8 needs multiples of {DIVISOR}")


class Scaled(NamedTuple):
    """A matrix in FP8, which is data * scale. The products want either copy: both operands contiguous along the sum."""

    data: torch.Tensor  # (rows, cols)
    transposed: torch.Tensor  # (cols, rows)
    scale: torch.Tensor  # (), in fp32


def bits_of(number):
    """The bits of an fp32 number as an integer."""
    return int(np.float32(number).view(np.int32))


COARSER = 32  # e5m2 has 2 bits of mantissa, and bf16 has 7


def scale_of(maximum, largest):
    """The one rule: the least power of two by which maximum, () in fp32 and >= 0, can be divided to be <= largest.
    A power of two loses no digits. NaN if the maximum is not finite, so that the whole product is NaN and shows it.
    """
    exponents = maximum.view(torch.int32) - bits_of(largest) + 0x7FFFFF >> 23
    scale = (exponents.clamp(min=-126) + 127 << 23).view(torch.float32)
    return torch.where(maximum.isfinite(), scale, torch.nan)


# ----------------------------------------------------------------------------------------------------------------------
# Rounding to FP8: one kernel, for matrices as they are and for those that SwiGLU computes on the way

MATRIX, SWIGLU, SWIGLU_GRADIENT = map(tl.constexpr, range(3))  # what is rounded: see load_values()
# Rows and columns of a tile, warps, and at most so many programs for each multiprocessor: the fastest of some fifty
# combinations, measured on an H200 for 8,192 tokens and a hidden size of 2,048. The kernel waits for its loads, so many
# of them have to be under way. SwiGLU and its gradient hold more values in registers, so fewer of their programs fit.
TILES = {MATRIX.value: (64, 128, 4, 32), SWIGLU.value: (64, 64, 2, 8), SWIGLU_GRADIENT.value: (32, 128, 4, 4)}


@jit
def load_values(x_ptr, hidden_grad_ptr, stride_x, rows, cols, n_cols, mask, SOURCE: tl.constexpr):
    """Two tiles (rows, cols) in fp32, of which only SWIGLU_GRADIENT uses the second.
    MATRIX: x (rows, n_cols). SWIGLU: silu(gate) * up of x (rows, 2 n_cols) = [gate | up]. SWIGLU_GRADIENT: the
    gradients of gate and of up, given hidden_grad (rows, n_cols); see llama.swiglu_activation_backward_kernel.
    """
    rows = rows.to(tl.int64)
    ptrs = tile_ptrs(x_ptr, rows, stride_x, cols)
    first = load(ptrs, mask)
    second = first
    if SOURCE != MATRIX:
        gate = first
        up = load(ptrs + n_cols, mask)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        if SOURCE == SWIGLU:
            first = silu * up
        else:
            hidden_grad = load(tile_ptrs(hidden_grad_ptr, rows, n_cols, cols), mask)
            first = hidden_grad * up * (sigmoid + silu * (1.0 - sigmoid))
            second = hidden_grad * silu
    return first, second


@jit
def magnitude(x):
    """The bits of |x|, whose order as integers is that of the numbers, with NaN as the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def round_and_store(
    a, b, c, d, inverse, maximum, data_ptr, transposed_ptr, tile_row, cols, end, n_rows, width, one,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Store a, b, c, d (BLOCK_ROWS / 4, BLOCK_COLS), the rows 4i, 4i + 1, 4i + 2 and 4i + 3 of a tile, divided by the
    scale, where cols < end. Returns the larger of maximum, of the same shape, and of their magnitudes.
    """
    maximum = tl.maximum(maximum, tl.maximum(magnitude(a), magnitude(b)))
    maximum = tl.maximum(maximum, tl.maximum(magnitude(c), magnitude(d)))
    a, b, c, d = a * inverse, b * inverse, c * inverse, d * inverse
    rows = tile_row * BLOCK_ROWS + 4 * tl.arange(0, BLOCK_ROWS // 4)
    mask = (rows < n_rows)[:, None] & (cols < end)[None, :]
    ptrs = tile_ptrs(data_ptr, rows.to(tl.int64), width, cols)
    store(ptrs, a, mask)
    store(ptrs + width, b, mask)
    store(ptrs + 2 * width, c, mask)
    store(ptrs + 3 * width, d, mask)
    # A thread has four values below each other: in the transposed matrix they are one word of 32 bits, and words cross
    # shared memory faster than bytes. one is 1.0, which the compiler does not know: if it rounds once for both stores,
    # ptxas 12.8 (Triton 3.3 to 3.6) stores registers that were never written.
    four = tl.join(tl.join(a, c), tl.join(b, d)) * one  # (BLOCK_ROWS / 4, BLOCK_COLS, 2, 2), in the order of the rows
    four = tl.reshape(four, (BLOCK_ROWS // 4, BLOCK_COLS, 4)).to(transposed_ptr.dtype.element_ty)
    transposed = tl.reshape(tl.permute(four, (1, 0, 2)), (BLOCK_COLS, BLOCK_ROWS))
    rows = tile_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask = (cols < end)[:, None] & (rows < n_rows)[None, :]
    tl.store(tile_ptrs(transposed_ptr, cols.to(tl.int64), n_rows, rows), transposed, mask=mask)
    return maximum


@jit
def fp8_quantize_kernel(
    x_ptr, hidden_grad_ptr, data_ptr, transposed_ptr, scale_ptr, guess_ptr, found_ptr,
    stride_x, n_rows, n_cols, n_found, one,
    SOURCE: tl.constexpr, REPEAT: tl.constexpr, LARGEST_BITS: tl.constexpr, FOUND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """data (n_rows, width) = values / scale in FP8, and transposed (width, n_rows); width is n_cols or, if SOURCE is
    SWIGLU_GRADIENT, 2 n_cols. x, hidden_grad: see load_values(). scale, guess () in fp32.  Grid: (programs,).
    The scale depends on the largest value, which is known too late. So the first launch rounds with guess, the scale of
    the last call, and finds the largest value. The second, with REPEAT, computes the scale from it; only if that is not
    what all programs of the first have used, it rounds again. found (2, FOUND) in int32: the bits of the largest value
    that each of the n_found programs of the first launch met, and of the guess that it used.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    col_blocks = tl.cdiv(n_cols, BLOCK_COLS)
    tiles = tl.cdiv(n_rows, BLOCK_ROWS) * col_blocks
    width = n_cols * (2 if SOURCE == SWIGLU_GRADIENT else 1)
    if REPEAT:
        index = tl.arange(0, FOUND)
        largest = tl.max(tl.load(found_ptr + index, mask=index < n_found, other=0), axis=0)
        exponent = tl.maximum((largest - LARGEST_BITS + 0x7FFFFF) >> 23, -126)  # see scale_of()
        bits = tl.where(largest < 0x7F800000, (exponent + 127) << 23, 0x7FC00000)
        used = tl.load(found_ptr + FOUND + index, mask=index < n_found, other=0)
        others = tl.sum(tl.where((index < n_found) & (used != bits), 1, 0), axis=0)
        tiles = tl.where(others == 0, 0, tiles)
        tl.store(scale_ptr, bits.to(tl.float32, bitcast=True))
        tl.store(guess_ptr, bits.to(tl.float32, bitcast=True))
    else:
        bits = tl.load(guess_ptr).to(tl.int32, bitcast=True)
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)  # 1 / scale: its exponent is the negative
    maximum = tl.zeros([BLOCK_ROWS // 4, BLOCK_COLS], tl.int32)
    for tile in range(program, tiles, programs):
        tile_row = tile // col_blocks
        rows = tile_row * BLOCK_ROWS + 4 * tl.arange(0, BLOCK_ROWS // 4)  # n_rows is a multiple of 4
        cols = tile % col_blocks * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        a, a2 = load_values(x_ptr, hidden_grad_ptr, stride_x, rows, cols, n_cols, mask, SOURCE)
        b, b2 = load_values(x_ptr, hidden_grad_ptr, stride_x, rows + 1, cols, n_cols, mask, SOURCE)
        c, c2 = load_values(x_ptr, hidden_grad_ptr, stride_x, rows + 2, cols, n_cols, mask, SOURCE)
        d, d2 = load_values(x_ptr, hidden_grad_ptr, stride_x, rows + 3, cols, n_cols, mask, SOURCE)
        maximum = round_and_store(
            a, b, c, d, inverse, maximum, data_ptr, transposed_ptr, tile_row, cols, n_cols, n_rows, width, one,
            BLOCK_ROWS, BLOCK_COLS,
        )  # fmt: skip
        if SOURCE == SWIGLU_GRADIENT:
            maximum = round_and_store(
                a2, b2, c2, d2, inverse, maximum, data_ptr, transposed_ptr, tile_row, n_cols + cols, width, n_rows,
                width, one, BLOCK_ROWS, BLOCK_COLS,
            )  # fmt: skip
    if not REPEAT:
        tl.store(found_ptr + program, tl.max(tl.max(maximum, axis=1), axis=0))
        tl.store(found_ptr + FOUND + program, bits)


def quantize(x, guess, dtype, source=MATRIX, hidden_grad=None):
    """The Scaled of what source makes of x (rows, n), contiguous rows, and of hidden_grad: see load_values().
    guess is the scale of the last call, () in fp32, to be kept for the next; it costs time if wrong, and nothing else.
    """
    (n_rows, n_cols), (rows, cols, warps, programs_per_sm) = x.shape, TILES[source.value]
    n_cols, width = n_cols if source == MATRIX else n_cols // 2, n_cols // 2 if source == SWIGLU else n_cols
    if n_rows % DIVISOR or width % DIVISOR:
        raise ValueError(f"a matrix of shape ({n_rows}, {width}) has no products in FP8: give multiples of {DIVISOR}")
    data, transposed = (x.new_empty(shape, dtype=dtype) for shape in ((n_rows, width), (width, n_rows)))
    num_sms = llama.get_device(x.device.type).num_sms
    programs = min(llama.cdiv(n_rows, rows) * llama.cdiv(n_cols, cols), programs_per_sm * num_sms)
    n_found = llama.next_power_of_2(programs)
    scale, found = x.new_empty((), dtype=torch.float32), x.new_empty(2, n_found, dtype=torch.int32)
    tensors = x, x if hidden_grad is None else hidden_grad, data, transposed, scale, guess, found
    scalars = x.stride(0), n_rows, n_cols, programs, 1.0
    for repeat, grid in ((False, programs), (True, min(programs, num_sms))):
        constants = dict(SOURCE=source.value, REPEAT=repeat, LARGEST_BITS=bits_of(torch.finfo(dtype).max))
        constants |= dict(FOUND=n_found, BLOCK_ROWS=rows, BLOCK_COLS=cols)
        llama.launch(fp8_quantize_kernel, (grid,), tensors, scalars, constants, num_warps=warps)
    return Scaled(data, transposed, scale)


# ----------------------------------------------------------------------------------------------------------------------
# Products, and the operations that are made of them


def product(a, a_scale, b, b_scale, dtype, **options):
    """(a * a_scale) (M, K) @ (b * b_scale) (N, K)^T -> (M, N) in dtype"""
    return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=dtype, **options)


def write_product(place, accumulate, y_grad, x_transposed, x_scale):
    """place (N, K) (+)= y_grad (rows, N), Scaled, transposed @ x (rows, K), for llama.give_gradient()."""
    operands = y_grad.transposed, y_grad.scale, x_transposed, x_scale
    if accumulate:
        place += product(*operands, place.dtype)
    else:
        product(*operands, place.dtype, out=place)


class Projection(NamedTuple):
    """What the gradients of y = x @ weight^T are computed from."""

    guesses: torch.Tensor  # (3, 4): the first column has the last scales of x, weight and the gradient of y
    x_transposed: torch.Tensor  # (K, rows)
    x_scale: torch.Tensor
    weight_transposed: torch.Tensor  # (K, N)
    weight_scale: torch.Tensor

    def gradient(self, y_grad, **source):
        """Return y_grad (rows, N), or what source makes of it, as a Scaled."""
        dtype = formats_of(llama.get_device(y_grad.device.type).arch).gradient
        return quantize(y_grad, self.guesses[2, 0], dtype, **source)

    def x_gradient(self, y_grad, dtype):
        """Return y_grad, Scaled, @ weight, the gradient of x (rows, K)."""
        return product(y_grad.data, y_grad.scale, self.weight_transposed, self.weight_scale, dtype)

    def weight_gradient(self, ctx, index, weight, y_grad):
        """Return what backward() returns for the weight, number index of forward()'s arguments; y_grad is Scaled."""
        return llama.give_gradient(ctx, index, weight, write_product, y_grad, self.x_transposed, self.x_scale)


def project(x, weight, source=MATRIX):
    """Return y (rows, N) = x (rows, K), or what source makes of it, @ weight (N, K)^T, and its Projection."""
    if not hasattr(weight, "fp8_guesses"):
        weight.fp8_guesses = torch.zeros(3, 4, device=weight.device)  # four columns, so that addresses are aligned
    guesses, dtype = weight.fp8_guesses, formats_of(llama.get_device(x.device.type).arch).forward
    x8 = quantize(x, guesses[0, 0], dtype, source)
    weight8 = quantize(weight, guesses[1, 0], dtype)
    # Sums of lower precision are faster, and good enough forward.
    y = product(x8.data, x8.scale, weight8.data, weight8.scale, x.dtype, use_fast_accum=x.is_cuda)
    return y, Projection(guesses, x8.transposed, x8.scale, weight8.transposed, weight8.scale)


class LinearFunction(torch.autograd.Function):
    """llama.LinearFunction in FP8."""

    @staticmethod
    def forward(ctx, x, weight):
        y, projection = project(llama.as_rows(x), weight)
        ctx.weight = weight
        ctx.save_for_backward(*projection)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @llama.first_derivative_only
    def backward(ctx, y_grad):
        projection = Projection(*ctx.saved_tensors)
        y_grad8 = projection.gradient(llama.as_rows(y_grad))
        x_grad = projection.x_gradient(y_grad8, y_grad.dtype).view(*y_grad.shape[:-1], -1)
        return x_grad, projection.weight_gradient(ctx, 1, ctx.weight, y_grad8)


class SwiGLUFunction(torch.autograd.Function):
    """SwiGLU with its products in FP8. The activation and its gradient exist in FP8 only."""

    @staticmethod
    def forward(ctx, x, gate_up_weight, down_weight):
        gate_up, gate_up_projection = project(llama.as_rows(x), gate_up_weight)
        y, down_projection = project(gate_up, down_weight, SWIGLU)
        ctx.weights = gate_up_weight, down_weight
        ctx.save_for_backward(gate_up, *gate_up_projection, *down_projection)
        return y.view_as(x)

    @staticmethod
    @llama.first_derivative_only
    def backward(ctx, y_grad):
        gate_up, *tensors = ctx.saved_tensors
        gate_up_projection, down_projection = Projection(*tensors[:5]), Projection(*tensors[5:])
        gate_up_weight, down_weight = ctx.weights
        y_grad8 = down_projection.gradient(llama.as_rows(y_grad))
        hidden_grad = down_projection.x_gradient(y_grad8, y_grad.dtype)
        gate_up_grad8 = gate_up_projection.gradient(gate_up, source=SWIGLU_GRADIENT, hidden_grad=hidden_grad)
        x_grad = gate_up_projection.x_gradient(gate_up_grad8, y_grad.dtype).view_as(y_grad)
        gate_up_weight_grad = gate_up_projection.weight_gradient(ctx, 1, gate_up_weight, gate_up_grad8)
        return x_grad, gate_up_weight_grad, down_projection.weight_gradient(ctx, 2, down_weight, y_grad8)


def fp8_linear(x, weight):
    """x (..., K) @ weight (N, K)^T -> (..., N), both rounded to FP8, and so is the gradient in backward."""
    return LinearFunction.apply(x, weight)


def fp8_attention(*inputs, bugs=()):
    """Compute llama.triton_attention with its projections in FP8."""
    return llama.triton_attention(*inputs, bugs=bugs, linear=fp8_linear)


def fp8_swiglu(x, gate_up_weight, down_weight, bugs=()):
    """Compute llama.triton_swiglu with its products in FP8; validate() refuses what bugs may name."""
    return SwiGLUFunction.apply(x, gate_up_weight, down_weight)


# ----------------------------------------------------------------------------------------------------------------------
# The same in plain PyTorch: the reference of --check, and --impl torch


def rounded(x, dtype):
    """Round x to FP8 as quantize() does, in x's type if that is fp32, else in bf16, which holds it exactly."""
    values = x.float()
    scale = scale_of(values.abs().amax(), torch.finfo(dtype).max)
    return (values / scale).to(dtype).float().mul(scale).to(x.dtype)


class EmulatedLinearFunction(torch.autograd.Function):
    """See emulated_linear."""

    @staticmethod
    def forward(ctx, x, weight):
        formats, ctx.types = formats_of(llama.get_device(x.device.type).arch) or OCP, (x.dtype, weight.dtype)
        low = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        x, weight = (rounded(tensor.to(low), formats.forward) for tensor in (x, weight))
        ctx.save_for_backward(x, weight)
        ctx.gradient_format = formats.gradient
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, y_grad):
        x, weight = ctx.saved_tensors
        y_grad = rounded(y_grad, ctx.gradient_format)
        weight_grad = y_grad.flatten(0, -2).t() @ x.flatten(0, -2)
        return (y_grad @ weight).to(ctx.types[0]), weight_grad.to(ctx.types[1])


def emulated_linear(x, weight):
    """x (..., K) @ weight (N, K)^T of both, and of the gradient in backward, rounded to FP8."""
    return EmulatedLinearFunction.apply(x, weight)


def emulated_attention(*inputs):
    """Compute llama.torch_attention with its projections of matrices rounded to FP8."""
    return llama.torch_attention(*inputs, linear=emulated_linear)


def emulated_swiglu(*inputs):
    """Compute llama.torch_swiglu with its products of matrices rounded to FP8."""
    return llama.torch_swiglu(*inputs, linear=emulated_linear)


def with_fp8(operations, implementation):
    """Return the Operations with those replaced that multiply by the weights of a layer."""
    if implementation == "triton":
        return operations._replace(attention=fp8_attention, swiglu=fp8_swiglu)
    return operations._replace(attention=emulated_attention, swiglu=emulated_swiglu)


def compare_with_bf16(verdict, exact, config, device, batch):
    """Print the errors of a check beside those of bf16, the worst of all layers, and return the stricter Verdict.

    Plain PyTorch in FP8 would excuse the error of a type or a scale that is bad in itself. So none may be more than
    COARSER times that of bf16 plus the tolerance either.
    """
    bf16 = dataclasses.replace(config, fp8=False)
    bf16_errors = llama.relative_errors(llama.loss_and_gradients(bf16, device, batch), exact)
    print(f"    {'error of the loss or the gradient of':40} {'fp8':>8} {'bf16':>8}  (the worst of all layers)")
    kinds = {name: re.sub(r"^layers\.\d+\.", "", name) for name in bf16_errors}
    for kind in dict.fromkeys(kinds.values()):
        worst = [max(e[name] for name in kinds if kinds[name] == kind) for e in (verdict.errors, bf16_errors)]
        print("    {:40} {:8.1e} {:8.1e}".format(kind, *worst))
    most = {name: COARSER * error + llama.CHECK_ATOL["fp8"] for name, error in bf16_errors.items()}
    return verdict._replace(allowed={name: min(verdict.allowed[name], most[name]) for name in most})
