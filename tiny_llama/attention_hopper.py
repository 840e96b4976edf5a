"""Causal attention forward for NVIDIA Hopper, heads of 72 to 128, in Gluon: Triton's language for what tiles hide.

The warps of a program have roles. One warp, the producer, has the copy engine (TMA) fill a ring in shared memory. Two
warpgroups, the consumers, each own 64 queries: they start two products at a time on the tensor cores, and compute the
softmax of one while the other runs. Step t of a consumer:

    scores of t:   q k_t^T       started first, needed first
    output of t-1: p_{t-1} v     runs while the softmax turns the scores of t into p_t

The design is that of FlashAttention 3 (Shah et al., arXiv:2407.08608). docs/hopper.md tells how each step pays.
"""

import math

import tiny_llama_v3 as llama
from tiny_llama.hopper import (
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
    store_tile,
    tma,
    wait_until_empty,
    wait_until_full,
    warpgroup_mma,
    warpgroup_mma_wait,
)

HEAD_DIM = gl.constexpr(128)  # columns of a tile; of narrower heads the copy engine fills up the tile with zeros
NARROWEST = 72  # narrower heads fit into tiles of 64, with which plain Triton is as fast
BLOCK = gl.constexpr(128)  # queries of a tile, and keys of a step; with 64 keys it takes 1.15 times as long
HALF = gl.constexpr(64)  # queries of each of the two consumers, and rows of one wgmma instruction
RING = gl.constexpr(2)  # slots of each ring: one is read while the other is filled; together 192 KiB of shared memory
SHORTEST = 512  # tokens of a sequence; of shorter ones a tile is all beginning and end
# A tile of scores or outputs in registers: each of the four warps of a consumer has 16 rows.
TILE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
ROWS = gl.constexpr(gl.SliceLayout(1, TILE.value))
COLS = gl.constexpr(gl.SliceLayout(0, TILE.value))
OPERAND = gl.constexpr(gl.DotOperandLayout(0, TILE.value, 2))  # of a tile that is multiplied from registers

# ----------------------------------------------------------------------------------------------------------------------
# Which program computes which tiles


@gluon.jit
def dealt(turn):
    """Return the number of the tile that a program gets at its turn; it may be beyond the last one.

    There is one program for each multiprocessor. Tiles are dealt as cards are: the longest first, which are the last
    blocks of queries, and every second round backwards, so that who got a longer one gets a shorter one next.
    """
    program, programs = gl.program_id(0), gl.num_programs(0)
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)


@gluon.jit
def tile_of(turn, num_blocks, batch_heads):
    """Return the block of queries and the head of the program's tile."""
    return num_blocks - 1 - dealt(turn) // batch_heads, dealt(turn) % batch_heads


@gluon.jit
def count_tiles(num_blocks, batch_heads):
    """Return how many tiles the program has: in all rounds but perhaps the last one, everybody has one."""
    num_tiles = num_blocks * batch_heads
    rounds = num_tiles // gl.num_programs(0)
    return rounds + (dealt(rounds) < num_tiles)


# ----------------------------------------------------------------------------------------------------------------------
# The producer


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
    turns = count_tiles(num_blocks, batch_heads)
    for turn in range(turns):
        block, batch_head = tile_of(turn, num_blocks, batch_heads)
        batch, head = batch_head // num_heads, batch_head % num_heads
        wait_until_empty(q_empty, turn, RING)
        q_ready = q_full.index(turn % RING)
        mbarrier.expect(q_ready, 2 * q_desc.block_type.nbytes)
        for half in gl.static_range(2):
            row = block * BLOCK + half * HALF
            load_tile(q_desc, [batch, row, head, 0], q_ready, q_tiles.index(turn % RING * 2 + half))
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


# ----------------------------------------------------------------------------------------------------------------------
# The consumers


@gluon.jit
def start_scores(q, k):
    """Start q k^T: (64, 128) x (128, BLOCK), both from shared memory."""
    zeros = gl.zeros([HALF, BLOCK], gl.float32, TILE)
    q, k = q.reshape([HALF, HEAD_DIM]), k.reshape([BLOCK, HEAD_DIM])
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def start_output(p, v, acc):
    """Start acc + p v: (64, BLOCK) from registers x (BLOCK, 128) from shared memory."""
    return warpgroup_mma(p, v.reshape([BLOCK, HEAD_DIM]), acc, is_async=True)


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
def as_operand(p, dtype: gl.constexpr):
    """Round p, and lay it out as the product takes it: each thread keeps its own elements."""
    # After the wait for all products: while one runs, no operand's registers may be written, or the compiler waits
    # after every instruction.
    return gl.convert_layout(p.to(dtype), OPERAND)


@gluon.jit
def store_output(o_desc, o_tiles, lse_ptr, acc, m, l, batch_head, block, num_heads, seq_len, PART: gl.constexpr):
    """Store a finished half of a tile, by the copy engine, and its lse."""
    o_tile, row, l = o_tiles.index(PART), block * BLOCK + PART * HALF, gl.sum(l, 1)
    tma.store_wait(0)  # the tile before has left shared memory
    o_tile.reshape([HALF, HEAD_DIM]).store((acc * (1 / l)[:, None]).to(o_desc.dtype))
    fence_async_shared()
    # It leaves out rows past the end of the sequence, and columns past that of the head.
    store_tile(o_desc, [batch_head // num_heads, row, batch_head % num_heads, 0], o_tile)
    rows = row + gl.arange(0, HALF, ROWS)
    gl.store(lse_ptr + batch_head.to(gl.int64) * seq_len + rows, m + gl.log2(l), rows < seq_len)


@gluon.jit
def consume(o_desc, lse_ptr, tiles, barriers, sizes, qk_scale, PART: gl.constexpr):
    """Compute one half of each of the program's tiles."""
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
    for turn in range(count_tiles(num_blocks, batch_heads)):
        block, batch_head = tile_of(turn, num_blocks, batch_heads)
        q = q_tiles.index(turn % RING * 2 + PART)
        for _ in range(block):
            stage = step % RING
            wait_until_full(full, step, RING)
            scores_token = start_scores(q, k_tiles.index(stage))
            acc_token = start_output(p, v_tiles.index(stage), acc)
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
        acc_token = start_output(p, v_tiles.index(stage), acc)
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
    # A slot is full when the copy engine has brought its bytes, and empty when both consumers have arrived.
    barriers = make_barriers(RING, 1), make_barriers(RING, 2), make_barriers(RING, 1), make_barriers(RING, 2)
    sizes = num_heads, group_size, batch_heads, gl.cdiv(seq_len, BLOCK), seq_len
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    # Registers of a thread: 24 for the producer leave 240 for the consumers.
    gl.warp_specialize(
        [
            (consume, (o_desc, lse_ptr, tiles, barriers, sizes, qk_scale, FIRST)),
            (consume, (o_desc, lse_ptr, tiles, barriers, sizes, qk_scale, SECOND)),
            (produce, ((q_desc, k_desc, v_desc), tiles, barriers, sizes)),
        ],
        [4, 1],
        [240, 24],
    )


# ----------------------------------------------------------------------------------------------------------------------
# Launch


def launch_forward(q, k, v, o, lse):
    """Fill o and lse as flash_attention_kernel does. Return False if it is the one to do so, and nothing is done."""
    batch, seq_len, num_heads, head_dim = q.shape
    if not (q.is_cuda and q.dtype.itemsize == 2 and seq_len >= SHORTEST):
        return False
    if not (NARROWEST <= head_dim <= HEAD_DIM.value and head_dim % 8 == 0):
        return False
    if not q.dtype == k.dtype == v.dtype == o.dtype:
        return False
    device, batch_heads = llama.get_device("cuda"), batch * num_heads
    # With fewer tiles than multiprocessors, plain Triton's tiles of half the size are faster.
    enough = llama.cdiv(seq_len, BLOCK.value) * batch_heads >= device.num_sms
    if device.arch != "sm_90" or not enough or not all(map(is_readable, (q, k, v, o))):
        return False
    # Descriptors count in 64 bits, the backward pass does not: it would refuse such tensors late.
    llama.require_32_bits(q.shape, [llama.Stride(*t.stride()) for t in (q, k, v, o)])
    rows_of_tiles = (q, HALF), (k, BLOCK), (v, BLOCK), (o, HALF)
    descs = [descriptor(t, 1, rows.value, 1, HEAD_DIM.value) for t, rows in rows_of_tiles]
    scalars = num_heads, num_heads // k.shape[2], batch_heads, seq_len, head_dim**-0.5 * math.log2(math.e)
    launch(flash_attention_hopper_kernel, device.num_sms, (*descs, lse, *scalars))
    return True
