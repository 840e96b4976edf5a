"""--fp8: the products of the layers' weights in FP8, forward and backward, with one scale a matrix.

Attention's own products, norms, embedding and head stay in bf16, the optimizer as it is. The kernel here rounds a
matrix to FP8, writes it and its transpose, and finds the scale; the products are the library's (torch._scaled_mm).
--impl torch computes the same in plain PyTorch, on any device: it rounds to FP8, and multiplies in bf16.
"""

import dataclasses
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
    """Return the Formats that the products of an architecture take, or None. A CPU emulates those of most."""
    if arch.startswith("sm_"):
        return OCP if int(arch[3:]) >= 89 else None
    return {"cpu": OCP, "gfx942": FNUZ, "gfx950": OCP}.get(arch, OCP if arch.startswith("gfx12") else None)


def formats_for(x):
    """Return the Formats of the device of a tensor."""
    return formats_of(llama.get_gpu(x.device.type).arch)


def validate(config, device, implementation):
    """Raise UsageError for what --fp8 cannot do in this run."""
    if implementation == "sdpa":
        raise UsageError("--fp8 is for --impl triton, and for --impl torch, which emulates it: drop --fp8")
    if config.triton_matmul_swiglu:
        raise UsageError("--triton-matmul-swiglu multiplies without FP8: drop it or --fp8")
    arch = llama.get_gpu(device.type).arch
    if implementation == "triton" and formats_of(arch) is None:
        raise UsageError(f"--fp8 needs products in FP8, which {arch} has not: drop it, or give --impl torch")
    widths = {  # of what follows from a flag
        "hidden_dim": config.hidden_dim,
        "ffn_dim": config.ffn_dim,
        "seq_len": config.tokens_per_micro_batch,
        "num_kv_heads": 2 * config.num_kv_heads * config.head_dim,
    }
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
    """Return the bits of an fp32 number as an integer."""
    return int(np.float32(number).view(np.int32))


COARSER = 32  # e5m2 has 2 bits of mantissa, and bf16 has 7
BIAS = "sums of positive numbers"  # among the errors of a check
ROWS, SUMMED = 1024, 4096  # of what it adds: with fewer rows, a library can divide the sums among multiprocessors


def scale_of(maximum, largest):
    """Return the least power of two by which maximum, () in fp32 and >= 0, can be divided to be <= largest.

    A power of two loses no digits. NaN if the maximum is not finite, so that the whole product is NaN and shows it.
    """
    # Exponents in units of the last bit of the mantissa: 0x7FFFFF rounds their difference up.
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
def load_values(
    x_ptr,  # (rows, n_cols) or, but for MATRIX, (rows, 2 n_cols) = [gate | up]
    hidden_grad_ptr,  # (rows, n_cols)
    stride_x,
    rows,
    cols,
    n_cols,
    mask,
    SOURCE: tl.constexpr,
):
    """Return two tiles (rows, cols) in fp32, of which only SWIGLU_GRADIENT uses the second.

    MATRIX: x itself. SWIGLU: silu(gate) * up. SWIGLU_GRADIENT: the gradients of gate and of up, given hidden_grad; see
    llama.swiglu_activation_backward_kernel.
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
    """Return the bits of |x|, whose order as integers is that of the numbers, with NaN as the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def round_and_store(
    a,
    b,
    c,
    d,
    inverse,
    maximum,
    data_ptr,
    transposed_ptr,
    tile_row,
    cols,
    end,
    n_rows,
    width,
    one,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Store a, b, c, d, each (BLOCK_ROWS / 4, BLOCK_COLS), divided by the scale, in the columns below end.

    They are the rows 4i, 4i + 1, 4i + 2 and 4i + 3 of a tile. Return the larger of maximum, of the same shape, and of
    their magnitudes.
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
    x_ptr,  # see load_values()
    hidden_grad_ptr,  # see load_values()
    data_ptr,  # out: (n_rows, width) in FP8
    transposed_ptr,  # out: (width, n_rows) in FP8
    scale_ptr,  # out, with REPEAT: () in fp32
    guess_ptr,  # in; out, with REPEAT: () in fp32
    found_ptr,  # out; in, with REPEAT: (2, FOUND) in int32
    stride_x,
    n_rows,
    n_cols,
    n_found,
    one,  # 1.0, see round_and_store()
    SOURCE: tl.constexpr,
    REPEAT: tl.constexpr,
    LARGEST_BITS: tl.constexpr,
    FOUND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """data = values / scale in FP8, and its transpose; width is n_cols or, if SOURCE is SWIGLU_GRADIENT, 2 n_cols.

    The scale depends on the largest value, which is known too late. So the first launch rounds with guess, the scale of
    the last call, and finds the largest value. The second, with REPEAT, computes the scale from it; only if that is not
    what all programs of the first have used, it rounds again. found has the bits of the largest value that each of the
    n_found programs of the first launch met, and of the guess that it used.  Grid: (programs,).
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    col_blocks = tl.cdiv(n_cols, BLOCK_COLS)
    tiles = tl.cdiv(n_rows, BLOCK_ROWS) * col_blocks
    width = n_cols * (2 if SOURCE == SWIGLU_GRADIENT else 1)
    if REPEAT:
        # The largest value of all programs, and the scale that follows from it.
        index = tl.arange(0, FOUND)
        largest = tl.max(tl.load(found_ptr + index, mask=index < n_found, other=0), axis=0)
        exponent = tl.maximum((largest - LARGEST_BITS + 0x7FFFFF) >> 23, -126)  # see scale_of()
        bits = tl.where(largest < 0x7F800000, (exponent + 127) << 23, 0x7FC00000)
        # How many programs have rounded with another scale.
        used = tl.load(found_ptr + FOUND + index, mask=index < n_found, other=0)
        others = tl.sum(tl.where((index < n_found) & (used != bits), 1, 0), axis=0)
        tiles = tl.where(others == 0, 0, tiles)
        tl.store(scale_ptr, bits.to(tl.float32, bitcast=True))
        tl.store(guess_ptr, bits.to(tl.float32, bitcast=True))
    else:
        bits = tl.load(guess_ptr).to(tl.int32, bitcast=True)
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)  # 1 / scale: its exponent is the negative
    maximum = tl.zeros([BLOCK_ROWS // 4, BLOCK_COLS], tl.int32)
    # A program takes every so-many-th tile, four rows for each thread: see round_and_store().
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
            a,
            b,
            c,
            d,
            inverse,
            maximum,
            data_ptr,
            transposed_ptr,
            tile_row,
            cols,
            n_cols,
            n_rows,
            width,
            one,
            BLOCK_ROWS,
            BLOCK_COLS,
        )
        if SOURCE == SWIGLU_GRADIENT:
            # The gradient of up is the right half of the columns.
            maximum = round_and_store(
                a2,
                b2,
                c2,
                d2,
                inverse,
                maximum,
                data_ptr,
                transposed_ptr,
                tile_row,
                n_cols + cols,
                width,
                n_rows,
                width,
                one,
                BLOCK_ROWS,
                BLOCK_COLS,
            )
    if not REPEAT:
        tl.store(found_ptr + program, tl.max(tl.max(maximum, axis=1), axis=0))
        tl.store(found_ptr + FOUND + program, bits)


def quantize(x, guess, dtype, source=MATRIX, hidden_grad=None):
    """Return the Scaled of what source makes of x (rows, n), contiguous rows, and of hidden_grad: see load_values().

    guess is the scale of the last call, () in fp32, to be kept for the next; it costs time if wrong, and nothing else.
    """
    (n_rows, n_cols), (rows, cols, warps, programs_per_sm) = x.shape, TILES[source.value]
    # SwiGLU halves the columns, and its gradient doubles them again.
    n_cols, width = n_cols if source == MATRIX else n_cols // 2, n_cols // 2 if source == SWIGLU else n_cols
    assert n_rows % DIVISOR == width % DIVISOR == 0, "the products take multiples of 16"
    data, transposed = (x.new_empty(shape, dtype=dtype) for shape in ((n_rows, width), (width, n_rows)))
    num_sms = llama.get_gpu(x.device.type).num_sms
    programs = min(llama.cdiv(n_rows, rows) * llama.cdiv(n_cols, cols), programs_per_sm * num_sms)
    n_found = llama.next_power_of_2(programs)
    scale, found = x.new_empty((), dtype=torch.float32), x.new_empty(2, n_found, dtype=torch.int32)
    tensors = x, x if hidden_grad is None else hidden_grad, data, transposed, scale, guess, found
    scalars = x.stride(0), n_rows, n_cols, programs, 1.0
    for grid, repeat in ((programs, False), (min(programs, num_sms), True)):
        constants = dict(
            SOURCE=source.value,
            REPEAT=repeat,
            LARGEST_BITS=bits_of(torch.finfo(dtype).max),
            FOUND=n_found,
            BLOCK_ROWS=rows,
            BLOCK_COLS=cols,
        )
        llama.launch(fp8_quantize_kernel, (grid,), tensors, scalars, constants, num_warps=warps)
    return Scaled(data, transposed, scale)


# ----------------------------------------------------------------------------------------------------------------------
# Products, and the operations that are made of them


def product(a, a_scale, b, b_scale, dtype, out=None):
    """(a * a_scale) (M, K) @ (b * b_scale) (N, K)^T -> (M, N) in dtype"""
    return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=dtype, out=out)


def write_product(place, accumulate, y_grad, x_transposed, x_scale):
    """place (N, K) (+)= y_grad (rows, N), Scaled, transposed @ x (rows, K), for llama.give_gradient()."""
    operands = y_grad.transposed, y_grad.scale, x_transposed, x_scale
    if accumulate:
        place += product(*operands, place.dtype)
    else:
        product(*operands, place.dtype, out=place)


def project(x, weight, source=MATRIX):
    """Return y (rows, N) = x (rows, K), or what source makes of it, @ weight (N, K)^T, and what backward needs.

    That is guesses (3, 4), whose first column has the last scales of x, weight and the gradient of y; then x (K, rows)
    and weight (K, N), both transposed in FP8, each with its scale after it.
    """
    if not hasattr(weight, "fp8_guesses"):
        weight.fp8_guesses = torch.zeros(3, 4, device=weight.device)  # four columns, so that addresses are aligned
    guesses, dtype = weight.fp8_guesses, formats_for(x).forward
    x8 = quantize(x, guesses[0, 0], dtype, source)
    weight8 = quantize(weight, guesses[1, 0], dtype)
    # Not with use_fast_accum: docs/fp8.md has what it saves and what it costs.
    y = product(x8.data, x8.scale, weight8.data, weight8.scale, x.dtype)
    return y, (guesses, x8.transposed, x8.scale, weight8.transposed, weight8.scale)


class ProjectionFunction(torch.autograd.Function):
    """x W^T or, of two weights, swiglu(x W1^T) W2^T. The activation and its gradient exist in FP8 only."""

    @staticmethod
    def forward(ctx, x, *weights):
        outputs, projections = [llama.as_rows(x)], []
        for weight, source in zip(weights, (MATRIX, SWIGLU), strict=False):
            y, saved = project(outputs[-1], weight, source)
            outputs.append(y)
            projections += saved
        ctx.weights = weights
        # Of two weights also what the first has given: [gate | up].
        ctx.save_for_backward(*projections, *outputs[1:-1])
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @llama.first_derivative_only
    def backward(ctx, y_grad):
        tensors, dtype = ctx.saved_tensors, formats_for(y_grad).gradient
        weight_grads = [None] * len(ctx.weights)
        rounded_rows, source, x_grad = llama.as_rows(y_grad), MATRIX, None
        for index in reversed(range(len(ctx.weights))):
            guesses, *x8, weight_transposed, weight_scale = tensors[5 * index :][:5]
            y_grad8 = quantize(rounded_rows, guesses[2, 0], dtype, source, x_grad)
            x_grad = product(y_grad8.data, y_grad8.scale, weight_transposed, weight_scale, y_grad.dtype)
            weight = ctx.weights[index]
            weight_grads[index] = llama.give_gradient(
                weight, ctx.needs_input_grad[1 + index], write_product, y_grad8, *x8
            )
            # Before the second weight comes swiglu, whose gradient is computed while it is rounded.
            rounded_rows, source = tensors[-1], SWIGLU_GRADIENT
        return x_grad.view(*y_grad.shape[:-1], -1), *weight_grads


fp8_linear = ProjectionFunction.apply  # x (..., K), weight (N, K) -> (..., N)


def fp8_attention(*inputs, bugs=()):
    """Compute llama.triton_attention with its projections in FP8."""
    return llama.triton_attention(*inputs, bugs=bugs, linear=fp8_linear)


def fp8_swiglu(x, gate_up_weight, down_weight, bugs=()):
    """Compute llama.triton_swiglu with its products in FP8; validate() refuses what bugs may name."""
    return ProjectionFunction.apply(x, gate_up_weight, down_weight)


# ----------------------------------------------------------------------------------------------------------------------
# The same in plain PyTorch: the reference of --check, and --impl torch


def rounded(x, dtype):
    """Round x to FP8 as quantize() does, in x's type if that is fp32, else in bf16, which holds it exactly."""
    values = x.float()
    scale = scale_of(values.abs().amax(), torch.finfo(dtype).max)
    return (values / scale).to(dtype).float().mul(scale).to(x.dtype)


class RoundingFunction(torch.autograd.Function):
    """Round a tensor to one type forward, and its gradient to another backward. None: leave it as it is."""

    @staticmethod
    def forward(ctx, x, dtype, gradient_dtype):
        ctx.gradient_dtype = gradient_dtype
        return x if dtype is None else rounded(x, dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad if ctx.gradient_dtype is None else rounded(grad, ctx.gradient_dtype), None, None


def emulated_formats(x):
    """Return the Formats of the device of a tensor, or on a GPU without FP8 those of most others."""
    return formats_for(x) or OCP


def emulated_linear(x, weight):
    """x (..., K) @ weight (N, K)^T of both, and of the gradient in backward, rounded to FP8."""
    formats, kind = emulated_formats(x), x.device.type
    low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    x, weight = (RoundingFunction.apply(tensor.to(low), formats.forward, None) for tensor in (x, weight))
    return RoundingFunction.apply(F.linear(x, weight), None, formats.gradient)


def emulated_attention(*inputs):
    """Compute llama.torch_attention with its projections of matrices rounded to FP8."""
    return llama.torch_attention(*inputs, linear=emulated_linear)


def emulated_swiglu(*inputs):
    """Compute llama.torch_swiglu with its products of matrices rounded to FP8."""
    return llama.torch_swiglu(*inputs, linear=emulated_linear)


def with_fp8(operations, implementation):
    """Return the Operations with those replaced that multiply by the weights of a layer."""
    ours, emulated = (fp8_attention, fp8_swiglu), (emulated_attention, emulated_swiglu)
    attention, swiglu = ours if implementation == "triton" else emulated
    return operations._replace(attention=attention, swiglu=swiglu)


def relative_bias(multiply, device):
    """Return the mean error of x @ weight^T of positive numbers by multiply(x, weight), divided by its mean.

    Errors of rounding cancel out. Those of an accumulator with too few bits do not: it drops the same side of each
    addend, the more the larger the sum is. x and weight: (ROWS, SUMMED), in bf16.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.rand(2, ROWS, SUMMED, generator=generator).to(device, torch.bfloat16)
    x8, weight8 = (rounded(tensor, emulated_formats(x).forward).double() for tensor in (x, weight))
    exact = x8 @ weight8.t()
    return float(((multiply(x, weight).double() - exact).mean() / exact.mean()).abs())


def require_more(verdict, exact, config, device, batch):
    """Return the stricter Verdict of a check, given the exact loss and gradients of the batch.

    Plain PyTorch in FP8 would excuse the error of a type or a scale that is bad in itself. So none may be more than
    COARSER times that of bf16 plus the tolerance either. And sums of positive numbers must have no bias, which a model
    at its start does not show: its sums have addends of both signs.
    """
    bf16 = dataclasses.replace(config, fp8=False)
    bf16_errors = llama.relative_errors(llama.loss_and_gradients(llama.TrainStep(bf16, device), batch), exact)
    most = {name: COARSER * error + llama.CHECK_ATOL["fp8"] for name, error in bf16_errors.items()}
    is_ours = llama.select_operations(config, device)[0] == "triton"
    bias = relative_bias((lambda x, weight: project(x, weight)[0]) if is_ours else emulated_linear, device)
    return llama.Verdict(
        verdict.errors | {BIAS: bias},
        {name: min(verdict.allowed[name], most[name]) for name in most} | {BIAS: llama.CHECK_ATOL["fp8"]},
    )
