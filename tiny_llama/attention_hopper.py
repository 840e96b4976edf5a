"""Causal attention for NVIDIA Hopper in Gluon: heads of 72 to 128, backward also those of 64.

The warps of a program have roles. One warp, the producer, has the TMA fill a ring in shared memory. Two
warpgroups, the consumers, each own 64 queries: they start two products at a time on the tensor cores, and compute the
softmax of one while the other runs. Step t of a consumer, forward:

    scores of t:   q k_t^T       started first, needed first
    output of t-1: p_{t-1} v     runs while the softmax turns the scores of t into p_t

The design is that of FlashAttention 3 (Shah et al., arXiv:2407.08608). docs/hopper.md tells how each step pays.
"""

import math

import torch

import tiny_llama_v3 as llama
from tiny_llama.hopper import (
    count_tiles,
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    is_readable,
    launch,
    load_tile,
    make_barriers,
    make_tiles,
    mbarrier,
    reinterpret,
    serves,
    store_tile,
    tile_of,
    tma,
    wait_until_empty,
    wait_until_full,
    warpgroup_mma,
    warpgroup_mma_wait,
)

HEAD_DIM = gl.constexpr(128)  # columns of a tile; of narrower heads the TMA fills up the tile with zeros
NARROWEST = 72  # narrower heads fit into tiles of 64, with which plain Triton is as fast forward
BLOCK = gl.constexpr(128)  # queries of a tile, and keys of a step; with 64 keys it takes 1.15 times as long
HALF = gl.constexpr(64)  # queries of each of the two consumers, and rows of one wgmma instruction
RING = gl.constexpr(2)  # slots of each ring: one is read while the other is filled; together 192 KiB of shared memory
SHORTEST = 512  # tokens of a sequence; of shorter ones a tile is all beginning and end
# A tile of scores or outputs in registers: each of the four warps of a consumer has 16 rows.
TILE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
ROWS = gl.constexpr(gl.SliceLayout(1, TILE.value))
COLS = gl.constexpr(gl.SliceLayout(0, TILE.value))
FIRST, SECOND = gl.constexpr(0), gl.constexpr(1)  # the consumers
REGISTERS = gl.constexpr([240, 24])  # of a thread, beside the first consumer: 24 for the producer leave 240 for both
# Backward: scores are in tiles of 64 x 64, all that is read from memory in tiles of 64 x 128.
SLOTS = gl.constexpr(4)  # of the ring, two tiles each; with what a program owns and its results 226 KiB
SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OPERAND = gl.constexpr(gl.DotOperandLayout(0, SQUARE.value, 2))  # of a tile that is multiplied from registers
SQUARE_ROWS = gl.constexpr(gl.SliceLayout(1, SQUARE.value))
SQUARE_COLS = gl.constexpr(gl.SliceLayout(0, SQUARE.value))
BY_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # 16 bytes for each thread

# ----------------------------------------------------------------------------------------------------------------------
# Tiles and their products


@gluon.jit
def as_matrix(tile):
    """Return a tile of a head in shared memory, which has the descriptor's dimensions, as (rows, columns)."""
    if len(tile.shape) == 4:
        return tile.reshape([tile.shape[1], HEAD_DIM])
    elif len(tile.shape) == 5:  # (1, 1 or 2, 64, 1, 64): halves of a head, one behind the other as products take them
        return reinterpret(tile, tile.dtype, [HALF, tile.shape[1] * HALF], gl.NVMMASharedLayout(128, 16, 2))
    else:
        return tile


@gluon.jit
def bring(descs, tiles, full, empty, use, place, COUNT: gl.constexpr, HALVES: gl.constexpr, MORE: gl.constexpr):
    """Fill one of COUNT slots with 64 rows of each tensor, or with 128 as two HALVES. MORE bytes will follow."""
    before, row, behind = place
    TILES: gl.constexpr = len(descs) * HALVES
    BYTES: gl.constexpr = TILES * descs[0].block_type.nbytes + MORE
    wait_until_empty(empty, use, COUNT)
    mbarrier.expect(full.index(use % COUNT), BYTES)
    for n in gl.static_range(TILES):
        corner = before + (row + n % HALVES * HALF,) + behind
        load_tile(descs[n // HALVES], corner, full.index(use % COUNT), tiles.index(use % COUNT * TILES + n))


@gluon.jit
def start_scores(a, b):
    """Start a b^T, scores of 64 rows: b comes from shared memory, a from there or from registers."""
    b = as_matrix(b)
    COUNT: gl.constexpr = b.shape[0]
    zeros = gl.zeros([HALF, COUNT], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COUNT, 16]))
    return warpgroup_mma(as_matrix(a), b.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def as_operand(x, dtype: gl.constexpr):
    """Round x, and lay it out as the product takes it: each thread keeps its own elements."""
    # After the wait for all products: while one runs, no operand's registers may be written, or the compiler waits
    # after every instruction.
    return gl.convert_layout(x.to(dtype), OPERAND)


@gluon.jit
def store_half(desc, tile, x, corner):
    """Store x (64, columns) by the TMA, which leaves out rows past the sequence and columns past the head."""
    tma.store_wait(0)  # what was there before has left shared memory
    as_matrix(tile).store(x.to(desc.dtype))
    fence_async_shared()
    store_tile(desc, corner, tile)


# ----------------------------------------------------------------------------------------------------------------------
# Forward


@gluon.jit
def produce(descs, tiles, barriers, sizes):
    """Fill the ring with what each step of the consumers multiplies: the keys of t and the values of t - 1."""
    q_desc, k_desc, v_desc = descs
    q_tiles, k_tiles, v_tiles, _ = tiles
    q_full, q_empty, full, empty = barriers
    num_heads, group_size, batch_heads, num_blocks, _ = sizes
    step = gl.to_tensor(0)
    # The first step has no values before it: it loads the first ones, on which no result depends.
    v_batch, v_row, v_head = step, step, step
    turns = count_tiles(num_blocks * batch_heads)
    for turn in range(turns):
        block, batch_head = tile_of(turn, num_blocks, batch_heads)
        batch, head = batch_head // num_heads, batch_head % num_heads
        bring((q_desc,), q_tiles, q_full, q_empty, turn, ((batch,), block * BLOCK, (head, 0)), RING, 2, 0)
        # From the diagonal down to the first keys, so that only a tile's first step needs a mask.
        for before in range(block + 1):
            row, kv_head = (block - before) * BLOCK, head // group_size
            stage = step % RING
            wait_until_empty(empty, step, RING)
            mbarrier.expect(full.index(stage), 2 * k_desc.block_type.nbytes)
            load_tile(k_desc, [batch, row, kv_head, 0], full.index(stage), k_tiles.index(stage))
            load_tile(v_desc, [v_batch, v_row, v_head, 0], full.index(stage), v_tiles.index(stage))
            v_batch, v_row, v_head = batch, row, kv_head
            step += 1
    wait_until_empty(empty, step, RING)
    mbarrier.expect(full.index(step % RING), v_desc.block_type.nbytes)
    load_tile(v_desc, [v_batch, v_row, v_head, 0], full.index(step % RING), v_tiles.index(step % RING))
    # Of the tile after the last one.
    wait_until_empty(q_empty, turns, RING)
    mbarrier.arrive(q_full.index(turns % RING))


@gluon.jit
def mask(scores, own_rows):
    """Hide the keys of a tile's diagonal block that come after the rows' queries."""
    # Queries and keys begin at the same place of the sequence.
    return gl.where(gl.arange(0, BLOCK, COLS)[None, :] <= own_rows[:, None], scores, float("-inf"))


@gluon.jit
def softmax(scores, m, qk_scale):
    """Return the new maximum of each row, the probabilities in fp32, and eight sums of each row of these."""
    m = gl.maximum(m, gl.max(scores, 1) * qk_scale)
    p = gl.exp2(scores * qk_scale - m[:, None])
    # Each is of every eighth element, which one thread has: threads add up theirs at the end of a tile only.
    return m, p, gl.convert_layout(gl.sum(p.reshape([HALF, 16, 8]), 1), TILE)


@gluon.jit
def store_output(o_desc, o_tiles, lse_ptr, acc, m, l, batch_head, block, num_heads, seq_len, PART: gl.constexpr):
    """Store a finished half of a tile, and its lse."""
    row, l = block * BLOCK + PART * HALF, gl.sum(l, 1)
    acc *= (1 / l)[:, None]
    store_half(o_desc, o_tiles.index(PART), acc, (batch_head // num_heads, row, batch_head % num_heads, 0))
    rows = row + gl.arange(0, HALF, ROWS)
    gl.store(lse_ptr + batch_head.to(gl.int64) * seq_len + rows, m + gl.log2(l), rows < seq_len)


@gluon.jit
def consume(given, PART: gl.constexpr):
    """Compute one half of each of the program's tiles."""
    o_desc, lse_ptr, tiles, barriers, sizes, qk_scale = given
    q_tiles, k_tiles, v_tiles, o_tiles = tiles
    q_full, q_empty, full, empty = barriers
    num_heads, _, batch_heads, num_blocks, seq_len = sizes
    own_rows = PART * HALF + gl.arange(0, HALF, ROWS)
    unknown = gl.full([HALF], float("-inf"), gl.float32, ROWS)
    # The first step of the first tile has scores only.
    wait_until_full(q_full, 0, RING)
    wait_until_full(full, 0, RING)
    scores = warpgroup_mma_wait(0, [start_scores(q_tiles.index(PART), k_tiles.index(0))])
    mbarrier.arrive(empty.index(0))
    m, p, l = softmax(mask(scores, own_rows), unknown, qk_scale)
    p, step = as_operand(p, o_desc.dtype), gl.to_tensor(1)
    zeros = gl.zeros([HALF, HEAD_DIM], gl.float32, TILE)
    acc = zeros
    for turn in range(count_tiles(num_blocks * batch_heads)):
        block, batch_head = tile_of(turn, num_blocks, batch_heads)
        q = q_tiles.index(turn % RING * 2 + PART)
        for _ in range(block):
            stage = step % RING
            wait_until_full(full, step, RING)
            scores_token = start_scores(q, k_tiles.index(stage))
            acc_token = warpgroup_mma(p, as_matrix(v_tiles.index(stage)), acc, is_async=True)
            m_new, p_new, total = softmax(warpgroup_mma_wait(1, [scores_token]), m, qk_scale)
            # Over already: this wait keeps the compiler from moving the softmax behind the second product.
            wait_until_full(full, step, RING)
            acc = warpgroup_mma_wait(0, [acc_token])
            mbarrier.arrive(empty.index(stage))
            # What was summed under the old maximum shrinks to the new one.
            rescale = gl.exp2(m - m_new)
            acc, l = acc * rescale[:, None], l * rescale[:, None] + total
            m, p = m_new, as_operand(p_new, o_desc.dtype)
            step += 1
        # The last product of this tile, beside the first scores of the next one. After the last tile there is none:
        # its scores are of whatever lies in shared memory, and nobody uses them.
        stage = step % RING
        mbarrier.arrive(q_empty.index(turn % RING))
        wait_until_full(q_full, turn + 1, RING)
        wait_until_full(full, step, RING)
        scores_token = start_scores(q_tiles.index((turn + 1) % RING * 2 + PART), k_tiles.index(stage))
        acc_token = warpgroup_mma(p, as_matrix(v_tiles.index(stage)), acc, is_async=True)
        m_new, p_new, total = softmax(mask(warpgroup_mma_wait(1, [scores_token]), own_rows), unknown, qk_scale)
        wait_until_full(full, step, RING)
        acc = warpgroup_mma_wait(0, [acc_token])
        mbarrier.arrive(empty.index(stage))
        store_output(o_desc, o_tiles, lse_ptr, acc, m, l, batch_head, block, num_heads, seq_len, PART)
        acc, m, l, p = zeros, m_new, total, as_operand(p_new, o_desc.dtype)
        step += 1
    tma.store_wait(0)


@gluon.jit
def flash_attention_hopper_kernel(
    q_desc,  # (batch, seq_len, num_heads, head_dim), read in tiles of 64 rows and 128 columns
    k_desc,  # (batch, seq_len, num_heads / group_size, head_dim), in tiles of BLOCK rows
    v_desc,  # like k
    o_desc,  # out: like q
    lse_ptr,  # out: (batch, num_heads, seq_len) in fp32, with log2
    num_heads,
    group_size,
    batch_heads,
    seq_len,
    qk_scale,  # scale * log2(e)
):
    """o = softmax(q k^T * scale) v under the causal mask. Grid: a program for each multiprocessor."""
    tiles = make_tiles(q_desc, 4), make_tiles(k_desc, RING), make_tiles(v_desc, RING), make_tiles(o_desc, 2)
    # A slot is full when the TMA has brought its bytes, and empty when both consumers have arrived.
    barriers = make_barriers(RING, 1), make_barriers(RING, 2), make_barriers(RING, 1), make_barriers(RING, 2)
    sizes = num_heads, group_size, batch_heads, gl.cdiv(seq_len, BLOCK), seq_len
    given = o_desc, lse_ptr, tiles, barriers, sizes, qk_scale
    brought = (q_desc, k_desc, v_desc), tiles, barriers, sizes
    gl.warp_specialize([(consume, (given, FIRST)), (consume, (given, SECOND)), (produce, brought)], [4, 1], REGISTERS)


# ----------------------------------------------------------------------------------------------------------------------
# Backward: programs of dq own 128 queries, those of dkdv 128 keys. Nobody adds to what another one owns: all sums have
# one order. Again two consumers have 64 of the rows each. p = exp2(scores - lse), p_grad = o_grad v^T, and
# s_grad = p * (p_grad - delta), where delta is a row's sum of o * o_grad. Step t starts these products, in this order:
#
#     dq                                 dkdv, transposed: p and s_grad stay in registers
#     scores of t:    q k_t^T            scores of t:    k q_t^T
#     q_grad of t-1:  s_grad_{t-1} k     v_grad of t-1:  p_{t-1} o_grad, while the scores become p
#     p_grad of t:    o_grad v_t^T       k_grad of t-1:  s_grad_{t-1} q
#                                        p_grad of t:    v o_grad_t^T, when p_{t-1} has left room for it
#
# Each step waits for all that it started: were a product under way where a loop begins again, the compiler would wait
# after each. A head of 64 is one part of 64 columns. Of others the halves are parts, a dimension of descriptors, filled
# up with zeros to 64 columns each: so columns c and c + 64 of a tile are always a pair of the rotation.


@gluon.jit
def store_rotated_back(desc, tile, x, corner, tables, seq_len, PAIRS: gl.constexpr):
    """Store x (64, columns), rotated back if there are PAIRS: a column of each half, which one thread has."""
    if PAIRS:
        COLUMNS: gl.constexpr = x.shape[1]
        first, second = x.reshape([HALF, 2, COLUMNS // 2]).permute((0, 2, 1)).split()
        rows = corner[2] + gl.arange(0, HALF, gl.SliceLayout(1, first.type.layout))[:, None]
        cols = gl.arange(0, COLUMNS // 2, gl.SliceLayout(0, first.type.layout))[None, :]
        offsets, mask = rows * PAIRS + cols, (rows < seq_len) & (cols < PAIRS)
        cos, sin = gl.load(tables[0] + offsets, mask, 0.0), gl.load(tables[1] + offsets, mask, 0.0)
        x = gl.join(first * cos + second * sin, second * cos - first * sin).permute((0, 2, 1)).reshape([HALF, COLUMNS])
    store_half(desc, tile, x, corner)


@gluon.jit
def own_tiles(own, PART: gl.constexpr):
    """Return the two tiles that a consumer multiplies in each step."""
    first, second = as_matrix(own.index(PART)), as_matrix(own.index(2 + PART))
    # Products of 64 columns read shared memory as fast as that is. Their narrow results leave registers for the first
    # factor, and then it is read half as much.
    if first.shape[1] == HALF:
        return first.load(OPERAND), second.load(OPERAND)
    else:
        return first, second


@gluon.jit
def no_gradient(own):
    """Return zeros of 64 rows and the columns of a tile."""
    COLUMNS: gl.constexpr = own.shape[2] * HALF
    return gl.zeros([HALF, COLUMNS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))


@gluon.jit
def prepare(q_desc, k_desc):
    """Return the sizes; tiles for what a program owns, for the ring and for results; and barriers of the first two."""
    tiles = make_tiles(q_desc, 4), make_tiles(q_desc, 2 * SLOTS), make_tiles(q_desc, 2)
    barriers = make_barriers(1, 1), make_barriers(1, 2), make_barriers(SLOTS, 1), make_barriers(SLOTS, 2)
    fence_async_shared()
    batches, _, seq_len, num_heads, _ = q_desc.shape
    return (num_heads, k_desc.shape[3], batches, gl.cdiv(seq_len, BLOCK), seq_len) + tiles + barriers


@gluon.jit
def produce_dq(descs, shared):
    """Bring a tile's queries and gradients of the output, then the output, and keys from the diagonal down."""
    q_desc, o_grad_desc, o_desc, k_desc, v_desc = descs
    num_heads, num_kv_heads, batches, num_blocks, _, own, ring, _, own_full, own_empty, full, empty = shared
    step = gl.to_tensor(0)
    for turn in range(count_tiles(num_blocks * batches * num_heads)):
        block, batch_head = tile_of(turn, num_blocks, batches * num_heads)
        batch, head = batch_head // num_heads, batch_head % num_heads
        place = (batch, 0), block * BLOCK, (head, 0)
        bring((q_desc, o_grad_desc), own, own_full, own_empty, turn, place, 1, 2, 0)
        bring((o_desc,), ring, full, empty, step, place, SLOTS, 2, 0)
        step += 1
        for before in range(2 * block + 2):
            place = (batch, 0), (2 * block + 1 - before) * HALF, (head // (num_heads // num_kv_heads), 0)
            bring((k_desc, v_desc), ring, full, empty, step, place, SLOTS, 1, 0)
            step += 1


@gluon.jit
def consume_dq(given, PAIRS: gl.constexpr, PART: gl.constexpr):
    """Compute q_grad and delta of one half of each of the program's tiles."""
    q_grad_desc, lse_ptr, delta_ptr, tables, scale, qk_scale, shared = given
    num_heads, _, batches, num_blocks, seq_len, own, ring, results, own_full, own_empty, full, empty = shared
    step = gl.to_tensor(0)
    for turn in range(count_tiles(num_blocks * batches * num_heads)):
        block, batch_head = tile_of(turn, num_blocks, batches * num_heads)
        row = block * BLOCK + PART * HALF
        rows = row + gl.arange(0, HALF, SQUARE_ROWS)
        offsets = batch_head.to(gl.int64) * seq_len + rows
        lse = gl.load(lse_ptr + offsets, rows < seq_len, 0.0)
        wait_until_full(own_full, turn, 1)
        wait_until_full(full, step, SLOTS)
        o, o_grad = as_matrix(ring.index(step % SLOTS * 2 + PART)), as_matrix(own.index(2 + PART))
        delta = gl.sum(o.load(BY_ROWS).to(gl.float32) * o_grad.load(BY_ROWS).to(gl.float32), 1)
        delta = gl.convert_layout(delta, SQUARE_ROWS)
        gl.store(delta_ptr + offsets, delta, rows < seq_len)
        mbarrier.arrive(empty.index(step % SLOTS))
        step += 1
        if PART == FIRST:  # the last 64 keys come after its queries
            wait_until_full(full, step, SLOTS)
            mbarrier.arrive(empty.index(step % SLOTS))
            step += 1
        q, o_grad = own_tiles(own, PART)
        q_grad = no_gradient(own)
        s_grad = gl.zeros([HALF, HALF], ring.dtype, OPERAND)  # before the first step
        for part in gl.static_range(2):  # the keys on the diagonal, under a mask, then those before it
            for _ in range(part, 2 * block + PART + 1 if part == 1 else 1):
                slot = step % SLOTS
                last = (step + SLOTS - 1) % SLOTS if part == 1 else slot
                wait_until_full(full, step, SLOTS)
                scores_token = start_scores(q, ring.index(2 * slot))
                q_grad_token = warpgroup_mma(s_grad, as_matrix(ring.index(2 * last)), q_grad, is_async=True)
                p_grad_token = start_scores(o_grad, ring.index(2 * slot + 1))
                p = gl.exp2(warpgroup_mma_wait(2, [scores_token]) * qk_scale - lse[:, None])
                if part == 0:
                    keys, queries = gl.arange(0, HALF, SQUARE_COLS), gl.arange(0, HALF, SQUARE_ROWS)
                    p = gl.where(keys[None, :] <= queries[:, None], p, 0.0)
                # Over already: this wait keeps the compiler from moving the exponentials behind the next one.
                wait_until_full(full, step, SLOTS)
                q_grad = warpgroup_mma_wait(1, [q_grad_token])
                mbarrier.arrive(empty.index(last), pred=part == 1)
                p_grad = warpgroup_mma_wait(0, [p_grad_token])
                s_grad = as_operand(p * (p_grad - delta[:, None]), ring.dtype)
                step += 1
        last = (step + SLOTS - 1) % SLOTS
        q_grad_token = warpgroup_mma(s_grad, as_matrix(ring.index(2 * last)), q_grad, is_async=True)
        q_grad = warpgroup_mma_wait(0, [q_grad_token]) * scale
        mbarrier.arrive(empty.index(last))
        mbarrier.arrive(own_empty.index(0))
        corner = batch_head // num_heads, 0, row, batch_head % num_heads, 0
        store_rotated_back(q_grad_desc, results.index(PART), q_grad, corner, tables, seq_len, PAIRS)
    tma.store_wait(0)


@gluon.jit
def flash_attention_backward_dq_hopper_kernel(
    q, k, v, o, o_grad, q_grad, lse_ptr, delta_ptr, cos_ptr, sin_ptr, scale, qk_scale, PAIRS: gl.constexpr
):
    """q_grad = s_grad k * scale, and delta, the sum of o * o_grad of each row. Grid: a program for each multiprocessor.

    The first six are descriptors of (batch, parts, seq_len, heads, head_dim / parts), in tiles of 64 rows. lse, with
    log2, and delta are (batch, heads, seq_len), cos and sin (seq_len, head_dim / 2), all in fp32. PAIRS are the columns
    of cos and sin if these are to rotate the gradient back, or 0.
    """
    shared = prepare(q, k)
    given = q_grad, lse_ptr, delta_ptr, (cos_ptr, sin_ptr), scale, qk_scale, shared
    brought = (q, o_grad, o, k, v), shared
    gl.warp_specialize(
        [(consume_dq, (given, PAIRS, FIRST)), (consume_dq, (given, PAIRS, SECOND)), (produce_dq, brought)],
        [4, 1],
        REGISTERS,
    )


@gluon.jit
def produce_dkdv(descs, vectors, shared):
    """Bring a tile's keys and values, then all that belongs to its queries from the diagonal on, head by head."""
    k_desc, v_desc, q_desc, o_grad_desc, lse_desc, delta_desc = descs
    num_heads, num_kv_heads, batches, num_blocks, _, own, ring, _, own_full, own_empty, full, empty = shared
    step = gl.to_tensor(0)
    for turn in range(count_tiles(num_blocks * batches * num_kv_heads)):
        # Blocks of queries come after that of the keys: of the first keys the most.
        after, batch_head = tile_of(turn, num_blocks, batches * num_kv_heads)
        batch, block, kv_head = batch_head // num_kv_heads, num_blocks - 1 - after, batch_head % num_kv_heads
        bring((k_desc, v_desc), own, own_full, own_empty, turn, ((batch, 0), block * BLOCK, (kv_head, 0)), 1, 2, 0)
        for member in range(num_heads // num_kv_heads):
            head = kv_head * (num_heads // num_kv_heads) + member
            for row in range(block * BLOCK, num_blocks * BLOCK, HALF):
                place = (batch, 0), row, (head, 0)
                bring((q_desc, o_grad_desc), ring, full, empty, step, place, SLOTS, 1, 2 * lse_desc.block_type.nbytes)
                slot, corner = step % SLOTS, (batch * num_heads + head, row)
                load_tile(lse_desc, corner, full.index(slot), vectors.index(2 * slot))
                load_tile(delta_desc, corner, full.index(slot), vectors.index(2 * slot + 1))
                step += 1


@gluon.jit
def consume_dkdv(given, PAIRS: gl.constexpr, PART: gl.constexpr):
    """Compute k_grad and v_grad of one half of each of the program's tiles."""
    k_grad_desc, v_grad_desc, tables, scale, qk_scale, vectors, shared = given
    num_heads, num_kv_heads, batches, num_blocks, seq_len, own, ring, results, own_full, own_empty, full, empty = shared
    result = results.index(PART)
    step = gl.to_tensor(0)
    for turn in range(count_tiles(num_blocks * batches * num_kv_heads)):
        after, batch_head = tile_of(turn, num_blocks, batches * num_kv_heads)
        batch, block, kv_head = batch_head // num_kv_heads, num_blocks - 1 - after, batch_head % num_kv_heads
        wait_until_full(own_full, turn, 1)
        k, v = own_tiles(own, PART)
        k_grad, v_grad = no_gradient(own), no_gradient(own)
        p_operand = gl.zeros([HALF, HALF], ring.dtype, OPERAND)
        s_grad = p_operand
        for member in range(num_heads // num_kv_heads):
            # The queries on the diagonal, under a mask, then those after it. Of the former, the second consumer sees
            # none in the first step; but were that step left out, the compiler would wait after each product.
            for part in gl.static_range(2):
                for number in range(2 * part, 2 * after + 2 if part == 1 else 2):
                    slot = step % SLOTS
                    # The slot of t - 1, but of a tile's first step its own, times zeros.
                    has_last = part == 1 or member + number > 0
                    last = (step + gl.where(has_last, SLOTS - 1, 0)) % SLOTS
                    wait_until_full(full, step, SLOTS)
                    scores_token = start_scores(k, ring.index(2 * slot))
                    v_grad_token = warpgroup_mma(p_operand, as_matrix(ring.index(2 * last + 1)), v_grad, is_async=True)
                    k_grad_token = warpgroup_mma(s_grad, as_matrix(ring.index(2 * last)), k_grad, is_async=True)
                    lse = vectors.index(2 * slot).reshape([HALF]).load(SQUARE_COLS)
                    p = gl.exp2(warpgroup_mma_wait(2, [scores_token]) * qk_scale - lse[None, :])
                    if part == 0:
                        keys = PART * HALF + gl.arange(0, HALF, SQUARE_ROWS)
                        queries = number * HALF + gl.arange(0, HALF, SQUARE_COLS)
                        p = gl.where(keys[:, None] <= queries[None, :], p, 0.0)
                    wait_until_full(full, step, SLOTS)  # over already, as in consume_dq
                    v_grad = warpgroup_mma_wait(1, [v_grad_token])
                    p_grad_token = start_scores(v, ring.index(2 * slot + 1))
                    k_grad = warpgroup_mma_wait(1, [k_grad_token])
                    mbarrier.arrive(empty.index(last), pred=has_last)
                    # Only now, when s_grad of t - 1 has left its registers.
                    delta = vectors.index(2 * slot + 1).reshape([HALF]).load(SQUARE_COLS)
                    p_grad = warpgroup_mma_wait(0, [p_grad_token])
                    p_operand = as_operand(p, ring.dtype)
                    s_grad = as_operand(p * (p_grad - delta[None, :]), ring.dtype)
                    step += 1
        last = (step + SLOTS - 1) % SLOTS
        v_grad_token = warpgroup_mma(p_operand, as_matrix(ring.index(2 * last + 1)), v_grad, is_async=True)
        k_grad_token = warpgroup_mma(s_grad, as_matrix(ring.index(2 * last)), k_grad, is_async=True)
        v_grad, k_grad = warpgroup_mma_wait(0, [v_grad_token, k_grad_token])
        mbarrier.arrive(empty.index(last))
        mbarrier.arrive(own_empty.index(0))
        corner = batch, 0, block * BLOCK + PART * HALF, kv_head, 0
        store_half(v_grad_desc, result, v_grad, corner)
        store_rotated_back(k_grad_desc, result, k_grad * scale, corner, tables, seq_len, PAIRS)
    tma.store_wait(0)


@gluon.jit
def flash_attention_backward_dkdv_hopper_kernel(
    q, k, v, o_grad, k_grad, v_grad, lse, delta, cos_ptr, sin_ptr, scale, qk_scale, PAIRS: gl.constexpr
):
    """v_grad = p^T o_grad and k_grad = s_grad^T q * scale, added up over the heads of a group. Grid: as for dq.

    Arguments: as for dq, but lse and delta are descriptors of (batch * heads, seq_len), in tiles of 64 columns.
    """
    shared, vectors = prepare(q, k), make_tiles(lse, 2 * SLOTS)
    given = k_grad, v_grad, (cos_ptr, sin_ptr), scale, qk_scale, vectors, shared
    brought = (k, v, q, o_grad, lse, delta), vectors, shared
    gl.warp_specialize(
        [(consume_dkdv, (given, PAIRS, FIRST)), (consume_dkdv, (given, PAIRS, SECOND)), (produce_dkdv, brought)],
        [4, 1],
        REGISTERS,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Launch


def launch_forward(q, k, v, o, lse):
    """Fill o and lse as flash_attention_kernel does. Return False if it is the one to do so, and nothing is done."""
    batch, seq_len, num_heads, head_dim = q.shape
    batch_heads = batch * num_heads
    fits = seq_len >= SHORTEST and NARROWEST <= head_dim <= HEAD_DIM.value and head_dim % 8 == 0
    # With fewer tiles than multiprocessors, plain Triton's tiles of half the size are faster.
    if not (fits and serves(llama.cdiv(seq_len, BLOCK.value) * batch_heads, q, k, v, o)):
        return False
    # Descriptors count in 64 bits, plain Triton's backward pass does not: it would refuse such tensors late.
    llama.require_32_bits(q.shape, [llama.Stride(*t.stride()) for t in (q, k, v, o)])
    rows_of_tiles = (q, HALF), (k, BLOCK), (v, BLOCK), (o, HALF)
    descs = [descriptor(t, 1, rows.value, 1, HEAD_DIM.value) for t, rows in rows_of_tiles]
    scalars = num_heads, num_heads // k.shape[2], batch_heads, seq_len, head_dim**-0.5 * math.log2(math.e)
    launch(flash_attention_hopper_kernel, llama.get_gpu("cuda").num_sms, (*descs, lse, *scalars))
    return True


def launch_backward(o_grad, saved, gradients, delta, tables):
    """Fill gradients, and delta, as flash_attention_backward_kernel does. Return False as launch_forward does."""
    heads, lse = (*saved[:4], o_grad, *gradients), saved[4]
    batch, seq_len, num_kv_heads, head_dim = saved[1].shape
    # The TMA reads halves of heads, and rows of lse, at multiples of 16 bytes.
    parts = 1 if head_dim == HALF.value else 2
    fits = seq_len >= SHORTEST and (parts == 1 or NARROWEST <= head_dim <= HEAD_DIM.value and head_dim % 16 == 0)
    fits = fits and all(t.dtype == torch.float32 and t.is_contiguous() and is_readable(t) for t in (lse, delta))
    # Tiles of keys; of queries there are no fewer. With 64 for 132 multiprocessors, plain Triton is as fast.
    if not (fits and serves(llama.cdiv(seq_len, BLOCK.value) * batch * num_kv_heads, *heads)):
        return False
    views = [t.view(*t.shape[:3], parts, -1).permute(0, 3, 1, 2, 4) for t in heads]
    q, k, v, o, o_grad, q_grad, k_grad, v_grad = [descriptor(t, 1, parts, HALF.value, 1, HALF.value) for t in views]
    rows = [descriptor(t.view(-1, seq_len), 1, HALF.value) for t in (lse, delta)]
    dq, dkdv = (q, k, v, o, o_grad, q_grad, lse, delta), (q, k, v, o_grad, k_grad, v_grad, *rows)
    rest = *(tables or (lse, lse)), head_dim**-0.5, head_dim**-0.5 * math.log2(math.e)
    programs, options = llama.get_gpu("cuda").num_sms, dict(constants=(head_dim // 2 if tables else 0,), maxnreg=168)
    launch(flash_attention_backward_dq_hopper_kernel, programs, (*dq, *rest), **options)
    launch(flash_attention_backward_dkdv_hopper_kernel, programs, (*dkdv, *rest), **options)
    return True
