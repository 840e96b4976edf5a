"""SwiGLU inside its matrix products for NVIDIA Hopper, in Gluon: two kernels in one.

    forward:  [gate | up] = x gate_up_weight^T            and from it  hidden = silu(gate) * up
    backward: hidden_grad = y_grad down_weight            and from it  the gradients of gate and up, over gate and up

A library's product cannot know what comes after it. This one does, and has gate, up and hidden_grad in registers:
forward need not read gate and up again, and hidden_grad is never in memory.

A product is computed in tiles of 128 rows and 256 columns, in forward 128 of gate and the same 128 of up. The roles are
those of attention_hopper.py: a producer fills a ring with steps of 64 along the inner dimension, two consumers multiply
64 rows each, and in backward a second producer brings gate and up. What follows a tile's products is put off: the
finished tile stays in registers, as bf16, and is turned into results beside the products of the next tile, a piece of
32 columns at a time. So the tensor cores do not wait for it:

    tensor cores    | tile t: steps 0 1 | 2 3       | 4 5       | 6 7       | ...
    other units     | piece 0 of t - 1  | piece 1   | piece 2   | piece 3   | ...

docs/hopper.md tells how each step pays.
"""

import torch

import tiny_llama_v3 as llama
from tiny_llama.hopper import (
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    launch,
    load_tile,
    make_barriers,
    make_tiles,
    mbarrier,
    serves,
    store_tile,
    tma,
    wait_until_empty,
    wait_until_full,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = gl.constexpr(128)  # of a tile
HALF = gl.constexpr(64)  # rows of each of the two consumers, and of one wgmma instruction
COLS = gl.constexpr(256)  # columns of a tile, the most that one wgmma instruction has
STEP = gl.constexpr(64)  # along the inner dimension
RING = gl.constexpr(4)  # slots of the ring of steps, 48 KiB each
WIDTH = gl.constexpr(32)  # columns of a piece; with 64 the code spills registers
BUFFERS = gl.constexpr(2)  # of each consumer, for gate and up of a piece in backward
GROUP = gl.constexpr(8)  # blocks of rows whose tiles are computed side by side, so that they share what the cache holds
TILE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
PIECE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))


@gluon.jit
def count_tiles(num_m, num_n):
    """Return how many of the tiles the program has."""
    return (num_m * num_n - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def tile_of(turn, num_m, num_n):
    """Return the block of rows and the block of columns of the program's tile.

    Of turn -1 the rows are past the end: there the TMA reads zeros, and writes nothing. To write where a
    coordinate is negative stops the kernel.
    """
    tile = gl.program_id(0) + gl.maximum(turn, 0) * gl.num_programs(0)
    group = tile // (GROUP * num_n)
    height = gl.minimum(num_m - group * GROUP, GROUP)
    within = tile - group * GROUP * num_n
    return gl.where(turn < 0, num_m, group * GROUP + within % height), within // height


# ----------------------------------------------------------------------------------------------------------------------
# The producers


@gluon.jit
def produce(a_desc, b_desc, tiles, barriers, sizes, FORWARD: gl.constexpr):
    """Fill the ring with (ROWS, STEP) of a and (COLS, STEP) or, in backward, (STEP, COLS) of b."""
    a_tiles, b_tiles, _, _ = tiles
    full, empty, _, _ = barriers
    num_m, num_n, steps = sizes
    step = gl.to_tensor(0)
    for turn in range(count_tiles(num_m, num_n)):
        m, n = tile_of(turn, num_m, num_n)
        for k in range(steps):
            slot = step % RING
            wait_until_empty(empty, step, RING)
            mbarrier.expect(full.index(slot), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            load_tile(a_desc, [m * ROWS, k * STEP], full.index(slot), a_tiles.index(slot))
            if FORWARD:
                load_tile(b_desc, [0, n * (COLS // 2), k * STEP], full.index(slot), b_tiles.index(slot))
            else:
                load_tile(b_desc, [k * STEP, n * COLS], full.index(slot), b_tiles.index(slot))
            step += 1


@gluon.jit
def produce_pieces(gate_up_desc, tiles, barriers, sizes, PIECES: gl.constexpr):
    """Backward: bring gate and up of each tile to both consumers, piece by piece."""
    _, _, gate_up_tiles, _ = tiles
    _, _, full, empty = barriers
    num_m, num_n, _ = sizes
    use = gl.to_tensor(0)
    for turn in range(count_tiles(num_m, num_n) + 1):
        m, n = tile_of(turn - 1, num_m, num_n)
        for piece in range(PIECES):
            for part in gl.static_range(2):
                slot = part * BUFFERS + use % BUFFERS
                mbarrier.wait(empty.index(slot), use // BUFFERS & 1 ^ 1)
                mbarrier.expect(full.index(slot), gate_up_desc.block_type.nbytes)
                place = [0, m * ROWS + part * HALF, n * COLS + piece * WIDTH]
                load_tile(gate_up_desc, place, full.index(slot), gate_up_tiles.index(slot))
            use += 1


# ----------------------------------------------------------------------------------------------------------------------
# Pieces of a finished tile


@gluon.jit
def widen(x):
    """Return bf16 as fp32: two instructions for two elements, where the compiler takes three."""
    code: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return gl.inline_asm_elementwise(code, "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def sigmoid_of(x):
    """Return tl.sigmoid(x), 1 / (1 + exp(-x)), to the bit for every bf16 number: five instructions for thirteen."""
    power = x * -1.4426950408889634  # -log2(e)
    power = gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [power], gl.float32, is_pure=True, pack=1)
    # The reciprocal of a quarter of the sum: that of a large sum would be subnormal, and the instruction makes it zero.
    quarter = power * 0.25 + 0.25
    inverse = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [quarter], gl.float32, is_pure=True, pack=1
    )
    return inverse * 0.25


@gluon.jit
def cut(x, COUNT: gl.constexpr):
    """Return the columns of x in so many pieces, as a tuple. Each thread keeps its own elements."""
    if COUNT == 1:
        return (x,)
    else:
        HALF_WIDTH: gl.constexpr = x.shape[1] // 2
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_WIDTH, 16])
        left, right = x.reshape([HALF, 2, HALF_WIDTH]).permute((0, 2, 1)).split()
        left = gl.convert_layout(left, layout, assert_trivial=True)
        right = gl.convert_layout(right, layout, assert_trivial=True)
        return cut(left, COUNT // 2) + cut(right, COUNT // 2)


@gluon.jit
def finish_forward(gate_bits, up_bits, m, col, descs, tiles, PART: gl.constexpr):
    """Store a piece of gate and up, and hidden, by the TMA."""
    gate_up_desc, hidden_desc = descs
    _, _, gate_up_tiles, hidden_tiles = tiles
    gate, up = widen(gate_bits), widen(up_bits)
    hidden = gate * sigmoid_of(gate) * up
    tma.store_wait(0)  # the piece before has left shared memory
    gate_up = gate_up_tiles.index(PART).reshape([2 * HALF, WIDTH])
    gate_up.slice(0, HALF).store(gate_bits)
    gate_up.slice(HALF, HALF).store(up_bits)
    hidden_tiles.index(PART).store(hidden.to(hidden_desc.dtype))
    fence_async_shared()
    row = m * ROWS + PART * HALF
    store_tile(gate_up_desc, [0, row, col], gate_up_tiles.index(PART))
    store_tile(hidden_desc, [row, col], hidden_tiles.index(PART))


@gluon.jit
def finish_backward(grad_bits, use, m, col, descs, tiles, barriers, PART: gl.constexpr):
    """Turn a piece of gate and up into their gradients, and store these by the TMA."""
    gate_up_desc, _ = descs
    _, _, gate_up_tiles, _ = tiles
    _, _, full, _ = barriers
    slot = PART * BUFFERS + use % BUFFERS
    grad = widen(grad_bits)
    mbarrier.wait(full.index(slot), use // BUFFERS & 1)
    gate_up = gate_up_tiles.index(slot).reshape([2 * HALF, WIDTH])
    gate, up = widen(gate_up.slice(0, HALF).load(PIECE)), widen(gate_up.slice(HALF, HALF).load(PIECE))
    sigmoid = sigmoid_of(gate)
    silu = gate * sigmoid
    gate_grad = grad * up * (sigmoid + silu * (1.0 - sigmoid))
    gate_up.slice(0, HALF).store(gate_grad.to(gate_up_desc.dtype))
    gate_up.slice(HALF, HALF).store((grad * silu).to(gate_up_desc.dtype))
    fence_async_shared()
    store_tile(gate_up_desc, [0, m * ROWS + PART * HALF, col], gate_up_tiles.index(slot))


@gluon.jit
def finish(old, turn, piece, num_m, num_n, descs, tiles, barriers, PART: gl.constexpr, FORWARD: gl.constexpr):
    """Finish the first of the pieces that an old tile still has, beside the products of this turn."""
    m, n = tile_of(turn - 1, num_m, num_n)
    if FORWARD:
        col = n * (COLS // 2) + piece * WIDTH
        finish_forward(old[0], old[len(old) // 2], m, col, descs, tiles, PART)
    else:
        use = turn * (COLS // WIDTH) + piece
        finish_backward(old[0], use, m, n * COLS + piece * WIDTH, descs, tiles, barriers, PART)


@gluon.jit
def hand_back(turn, piece, barriers, PART: gl.constexpr, FORWARD: gl.constexpr):
    """Backward: let the buffer of a piece be filled again, once its gradients have left."""
    if not FORWARD:
        _, _, _, empty = barriers
        tma.store_wait(0)
        mbarrier.arrive(empty.index(PART * BUFFERS + (turn * (COLS // WIDTH) + piece) % BUFFERS))


# ----------------------------------------------------------------------------------------------------------------------
# The consumers


@gluon.jit
def start_product(tiles, barriers, step, acc, use_acc, PART: gl.constexpr, FORWARD: gl.constexpr):
    """Start acc + a b of a step, as soon as the ring has it: (HALF, STEP) x (STEP, COLS), both from shared memory."""
    a_tiles, b_tiles, _, _ = tiles
    full, _, _, _ = barriers
    wait_until_full(full, step, RING)
    a = a_tiles.index(step % RING).slice(PART * HALF, HALF)
    if FORWARD:
        b = b_tiles.index(step % RING).reshape([COLS, STEP]).permute((1, 0))
    else:
        b = b_tiles.index(step % RING)
    return warpgroup_mma(a, b, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def end_product(barriers, step, token):
    """Wait for a step's product, and hand back its slot of the ring. Return acc."""
    # No product may be under way at a loop's end, or the compiler waits after each one.
    _, empty, _, _ = barriers
    acc = warpgroup_mma_wait(0, [token])
    mbarrier.arrive(empty.index(step % RING))
    return acc


@gluon.jit
def multiply(tiles, barriers, step, count, acc, PART: gl.constexpr, FORWARD: gl.constexpr):
    """Return the number of the step after count steps, and acc with their products added."""
    for _ in range(count):
        acc = end_product(barriers, step, start_product(tiles, barriers, step, acc, True, PART, FORWARD))
        step += 1
    return step, acc


@gluon.jit
def consume(descs, tiles, barriers, sizes, PART: gl.constexpr, FORWARD: gl.constexpr, PIECES: gl.constexpr):
    """Compute one half of each of the program's tiles."""
    # Forward's four pieces are unrolled. Backward's eight would be too many instructions for their cache.
    UNROLLED: gl.constexpr = PIECES if FORWARD else 1
    num_m, num_n, steps = sizes
    step = gl.to_tensor(0)
    acc = gl.zeros([HALF, COLS], gl.float32, TILE)
    old = cut(acc.to(gl.bfloat16), 8)
    turns = count_tiles(num_m, num_n)
    for turn in range(turns):
        for first in range(0, PIECES, UNROLLED):
            for number in gl.static_range(UNROLLED):
                piece = first + number
                # One product beside a piece: two would hold two slots of the ring for as long as it takes.
                token = start_product(tiles, barriers, step, acc, piece > 0, PART, FORWARD)
                finish(old, turn, piece, num_m, num_n, descs, tiles, barriers, PART, FORWARD)
                # Registers have no index: the pieces move up by one. Unrolled, only their names do.
                old = old[1:] + old[:1]
                acc = end_product(barriers, step, token)
                hand_back(turn, piece, barriers, PART, FORWARD)
                step, acc = multiply(tiles, barriers, step + 1, steps // PIECES - 1, acc, PART, FORWARD)
        step, acc = multiply(tiles, barriers, step, steps % PIECES, acc, PART, FORWARD)
        old = cut(acc.to(gl.bfloat16), 8)
    for piece in range(PIECES):
        finish(old, turns, piece, num_m, num_n, descs, tiles, barriers, PART, FORWARD)
        old = old[1:] + old[:1]
        hand_back(turns, piece, barriers, PART, FORWARD)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_m", "num_n", "steps"])  # one binary serves all shapes
def swiglu_hopper_kernel(
    a_desc,  # x or y_grad (rows, hidden), read in tiles of (ROWS, STEP)
    b_desc,  # gate_up_weight as (2, ffn, hidden), in (2, COLS / 2, STEP); or down_weight (hidden, ffn), in (STEP, COLS)
    gate_up_desc,  # as (2, rows, ffn) in tiles of (2, HALF, WIDTH), out; in backward in and out
    hidden_desc,  # out: (rows, ffn) in tiles of (HALF, WIDTH); in backward not used
    num_m,  # blocks of rows
    num_n,  # blocks of columns
    steps,  # along the inner dimension: beyond the end the TMA reads zeros
    FORWARD: gl.constexpr,
):
    """Compute what the head of this file says. Grid: a program for each multiprocessor."""
    PIECES: gl.constexpr = COLS // WIDTH // (2 if FORWARD else 1)
    buffers = make_tiles(gate_up_desc, 2 if FORWARD else 2 * BUFFERS)
    hidden_tiles = make_tiles(hidden_desc, 2) if FORWARD else buffers
    tiles = make_tiles(a_desc, RING), make_tiles(b_desc, RING), buffers, hidden_tiles
    # A slot is full when the TMA has brought its bytes. One of the ring is empty when both consumers have
    # arrived, a buffer of pieces when its own has.
    pieces_full, pieces_empty = make_barriers(2 * BUFFERS, 1), make_barriers(2 * BUFFERS, 1)
    barriers = make_barriers(RING, 1), make_barriers(RING, 2), pieces_full, pieces_empty
    descs, sizes = (gate_up_desc, hidden_desc), (num_m, num_n, steps)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    fence_async_shared()
    # Registers of a thread: 24 for a producer leave 240 for the consumers.
    if FORWARD:
        gl.warp_specialize(
            [
                (consume, (descs, tiles, barriers, sizes, FIRST, FORWARD, PIECES)),
                (consume, (descs, tiles, barriers, sizes, SECOND, FORWARD, PIECES)),
                (produce, (a_desc, b_desc, tiles, barriers, sizes, FORWARD)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (descs, tiles, barriers, sizes, FIRST, FORWARD, PIECES)),
                (consume, (descs, tiles, barriers, sizes, SECOND, FORWARD, PIECES)),
                (produce, (a_desc, b_desc, tiles, barriers, sizes, FORWARD)),
                (produce_pieces, (gate_up_desc, tiles, barriers, sizes, PIECES)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )


# ----------------------------------------------------------------------------------------------------------------------
# Launch


def launch_forward(x, gate_up_weight, gate_up, hidden):
    """Fill gate_up (rows, 2 ffn) and hidden (rows, ffn) of x (rows, inner) and gate_up_weight (2 ffn, inner).

    Return False if the library and swiglu_activation_kernel are to do so, and nothing is done.
    """
    return launch_product(x, gate_up_weight, gate_up, hidden)


def launch_backward(y_grad, down_weight, gate_up):
    """Overwrite gate_up (rows, 2 ffn) with its gradient, of y_grad (rows, inner) and down_weight (inner, ffn).

    Return False if the library and swiglu_activation_backward_kernel are to do so, and nothing is done.
    """
    return launch_product(y_grad, down_weight, gate_up)


def launch_product(a, b, gate_up, hidden=None):
    """Launch the kernel forward, with hidden, or backward. Return False if it is not the one to do so."""
    (rows, inner), ffn, forward = a.shape, gate_up.shape[1] // 2, hidden is not None
    tensors = a, b, gate_up, *([hidden] if forward else [])
    shapes = (rows, inner), (2 * ffn, inner) if forward else (inner, ffn), (rows, 2 * ffn), (rows, ffn)
    if any(t.shape != shape or t.dtype != torch.bfloat16 for t, shape in zip(tensors, shapes, strict=False)):
        return False  # padded, or of another type
    num_m, num_n = llama.cdiv(rows, ROWS.value), llama.cdiv(ffn, COLS.value // 2 if forward else COLS.value)
    steps, pieces = llama.cdiv(inner, STEP.value), COLS.value // WIDTH.value // (2 if forward else 1)
    # With fewer tiles than multiprocessors, or steps than pieces, there is nothing to finish a tile beside.
    if not (steps >= pieces and ffn % 8 == 0 and serves(num_m * num_n, *tensors)):
        return False
    # gate_up as (2, rows, ffn): with gate and up apart, the TMA leaves out columns past the end of each.
    halves = gate_up.view(rows, 2, ffn).transpose(0, 1)
    weight = (b.view(2, ffn, inner), 2, COLS.value // 2, STEP.value) if forward else (b, STEP.value, COLS.value)
    descs = [
        descriptor(a, ROWS.value, STEP.value),
        descriptor(*weight),
        descriptor(halves, 2, HALF.value, WIDTH.value),
        descriptor(hidden if forward else gate_up, HALF.value, WIDTH.value),
    ]
    launch(swiglu_hopper_kernel, llama.get_gpu("cuda").num_sms, (*descs, num_m, num_n, steps), (forward,), maxnreg=168)
    return True
