"""Sparse attention with few heads or few rows on Hopper: swap-AB. A CTA serves at most 32 heads of a row and a range of
its tiles.

The matrix unit takes 64 rows of its first operand at least. Here they are keys (S^T = K Q^T, 64 by 16 or 32) and value
columns (O^T = V^T P^T, 512 by 16 or 32), and heads are the narrow side. wg0 consumes tiles of 64 keys, which two or
three producers fill (swap_ab_load, swap_ab_planar):

    wait k_full | S^T | P relative to the lagged maximum -> smem, each warp's largest P -> smem | barrier
    if a P exceeds MAX_P, and in the first tile: maximum across warps, P anew, rescale | O^T += V^T P^T, next S^T

Sums over keys stay with the threads that hold them until the end. All that crosses warps in every tile is whether one
exceeds MAX_P (lazy_rescale). As in decode_fp8, warps specialise while the launch before still runs.

Floor, bytes: every valid record once. What bounds it over fp8 records: memory, 39 cycles a key, and shared memory, 38,
of the 59 that a key takes. Out of shared memory the matrix unit reads 2 * (d_qk + d_v) bytes a key, whatever the number
of heads, which is about 20 cycles; the producers store and read there, too. README.md has the schedule, the barriers
and the shared-memory map.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparse_attn.device.hopper import async_load, barrier, here, launch_dependents, signal, wait
from sparse_attn.device.triton_private import VERSION, aggregate
from sparse_attn.ops.attention.sparse.hopper.common import (
    BLOCK_N,
    D_ROPE,
    D_V,
    WORD_BYTES,
    Record,
    RowBounds,
    Scalar,
    normalise,
)
from sparse_attn.ops.attention.sparse.hopper.lazy_rescale import (
    MAX_P,
    denominator,
    far_max,
    in_log2,
    initial_max,
    origin,
)
from sparse_attn.ops.attention.sparse.hopper.swap_ab_load import (
    CODE_WORDS,
    STAGES,
    Barriers,
    Inputs,
    LatentCodes,
    Shared,
    dequant_latents,
    load_latents,
    load_rows,
    own_tiles,
)
from sparse_attn.ops.attention.sparse.hopper.swap_ab_planar import PlanarCodes, dequant_planar, load_planar

WARPS = gl.constexpr(4)
# A tile's scores are so many products of as many columns. Triton 3.9 computes all descriptors of a product ahead of it:
# 64 do not fit in uniform registers, 32 do.
QK_PARTS = gl.constexpr(2 if VERSION >= (3, 9) else 1)


@aggregate
class Operands:
    """What the consumer reads and writes in global memory, as the kernel's arguments of these names."""

    q: gl.tensor
    heads: Scalar
    launch_early: Scalar
    scale_log2: Scalar
    out: gl.tensor
    lse: gl.tensor
    sink: gl.tensor
    stride_q_token: Scalar
    stride_q_head: Scalar
    stride_out_split: Scalar
    stride_out_token: Scalar
    stride_out_head: Scalar
    stride_lse_split: Scalar
    stride_lse_token: Scalar
    max_logits: Scalar
    INF_LSE: gl.constexpr


@gluon.jit
def _load_q(smem, source, heads, stride_head, BLOCK_M: gl.constexpr):
    """Have the queries copied, zeros for heads that do not exist."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    head = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, WIDE))
    column = gl.arange(0, D_V, layout=gl.SliceLayout(0, WIDE))
    pointers = source + gl.expand_dims(head * stride_head, 1) + gl.expand_dims(column, 0)
    async_load(smem.q.index(0), pointers, mask=gl.expand_dims(head < heads, 1))
    if smem.HAS_ROPE:
        NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        head_r = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, NARROW))
        column_r = gl.arange(0, D_ROPE, layout=gl.SliceLayout(0, NARROW)) + D_V
        pointers_r = source + gl.expand_dims(head_r * stride_head, 1) + gl.expand_dims(column_r, 0)
        async_load(smem.q_rope.index(0), pointers_r, mask=gl.expand_dims(head_r < heads, 1))
    async_copy.commit_group()


@gluon.jit
def _transposed(k, q, scores, ADD: gl.constexpr):
    return warpgroup_mma(k, q.permute((1, 0)), scores, use_acc=ADD, is_async=True)


@gluon.jit
def _qk(smem, nothing, zero, stage):
    """S^T of the tile in ``stage``, not awaited."""
    WIDTH: gl.constexpr = D_V // QK_PARTS
    scores = nothing
    for part in gl.static_range(QK_PARTS):
        k = smem.k.index(here(stage)).slice(part * WIDTH, WIDTH, dim=1)
        q = smem.q.index(here(zero)).slice(part * WIDTH, WIDTH, dim=1)
        scores = _transposed(k, q, scores, part > 0)
    if smem.HAS_ROPE:
        scores = _transposed(smem.k_rope.index(here(stage)), smem.q_rope.index(here(zero)), scores, True)
    return scores


@gluon.jit
def _wait_k(bars, tile):
    mbarrier.wait(bars.k_full.index(tile % STAGES), tile // STAGES & 1)
    fence_async_shared()


@gluon.jit
def _max_of_heads(z, warp_max, BLOCK_M: gl.constexpr):
    """A tile's largest product of every head: every warp's own, exchanged through shared memory."""
    # Every thread reads all warps' maxima of its heads: bases of zero repeat them.
    COLUMNS: gl.constexpr = [[0, 1], [0, 8]] if BLOCK_M == 16 else [[0, 1], [0, 8], [0, 16]]
    ALL: gl.constexpr = gl.DistributedLinearLayout(
        COLUMNS + [[1, 0], [2, 0]], [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [WARPS, BLOCK_M]
    )
    # Keys of a warp are 16 rows of the tile, so the first maximum stays inside it.
    own = gl.max(gl.reshape(z, [WARPS, BLOCK_N // WARPS, BLOCK_M]), 1)
    warp_max.store(own)
    # Between a store to this memory and a load from it the compiler puts a barrier.
    return gl.max(warp_max.load(ALL), 0)


@gluon.jit
def _consume(
    rows, smem, bars, operands, BLOCK_M: gl.constexpr, HEAD_BLOCKS: gl.constexpr, HAS_EXTRA_CACHE: gl.constexpr,
    HAS_SINK: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """wg0: all tiles of a CTA."""
    # Of scores, too: rows are keys or value columns.
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    HEAD: gl.constexpr = gl.SliceLayout(0, ACC)
    EVERYWHERE: gl.constexpr = gl.DistributedLinearLayout([[1], [2]], [[0]] * 5, [[0]] * 2, [], [WARPS])
    # Blocks of heads are the grid's third dimension; the last may be short.
    first_head = gl.program_id(2) * BLOCK_M if HEAD_BLOCKS else 0
    heads = operands.heads - first_head
    scale_log2 = operands.scale_log2
    # PDL: the launch before may still write queries and indices.
    wait()
    if operands.launch_early != 0:
        launch_dependents()
    token = gl.program_id(0).to(gl.int64)
    split = gl.program_id(1).to(gl.int64)
    q = operands.q + first_head * operands.stride_q_head
    _load_q(smem, q + token * operands.stride_q_token, heads, operands.stride_q_head, BLOCK_M)
    tiles = own_tiles(rows, HAS_EXTRA_CACHE, SPLIT).all_tiles
    out = operands.out + first_head * operands.stride_out_head
    out += split * operands.stride_out_split + token * operands.stride_out_token
    lse = operands.lse + first_head
    lse += split * operands.stride_lse_split + token * operands.stride_lse_token
    # Q is complete, and the matrix unit sees it.
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    # O^T, S^T and sums by key, all [rows, heads].
    acc = gl.zeros([D_V, BLOCK_M], gl.float32, ACC)
    nothing = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
    scale, base = origin(gl.full([BLOCK_M], initial_max(scale_log2), gl.float32, HEAD), scale_log2)
    l = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
    if operands.max_logits is not None:
        largest = gl.full([BLOCK_N, BLOCK_M], -float("inf"), gl.float32, ACC)
    # Scores of the first tile; later ones begin beside the PV before.
    _wait_k(bars, 0)
    pending = _qk(smem, nothing, 0, 0)
    scores = warpgroup_mma_wait(0, deps=(pending,))
    for tile in range(tiles):
        zero = tile >> 20
        stage = tile % STAGES
        # Masked keys score -inf: their P is 0. kv_valid came with the stage.
        kv_valid = smem.kv_valid.index(stage).load(gl.SliceLayout(1, ACC)) != 0
        z = gl.where(gl.expand_dims(kv_valid, 1), scores, -float("inf"))
        if operands.max_logits is not None:
            largest = gl.maximum(largest, z)
        p = z
        # P relative to the lagged maximum, without waiting for other warps. The first tile has none yet.
        if tile > 0:
            p = gl.exp2(z * gl.expand_dims(scale, 0) - gl.expand_dims(base, 0))
            smem.p.index(zero).store(p.to(gl.bfloat16))
            # The largest P of each warp tells whether the maximum has to move.
            smem.p_max.index(zero).store(gl.max(gl.reshape(p, [WARPS, BLOCK_N // WARPS * BLOCK_M]), 1))
            fence_async_shared()
        # All warps have stored P and their largest.
        barrier()
        # The same for all warps: they read the same four numbers.
        if (tile == 0) | (gl.max(smem.p_max.index(zero).load(EVERYWHERE), 0) > MAX_P):
            # The maximum of each head, across warps.
            tile_max = gl.convert_layout(_max_of_heads(z, smem.warp_max.index(zero), BLOCK_M), HEAD)
            # Recover the maximum's product and score from its origin (lazy_rescale).
            far = scale != scale_log2
            m = far_max(base, scale_log2)
            m_log2 = gl.where(far, in_log2(m, scale_log2), base)
            tile_max_log2 = in_log2(tile_max, scale_log2)
            # A maximum moves up only. Far ones are compared as products, which are not rounded.
            moves = gl.where(far, tile_max > m, tile_max_log2 > m_log2)
            new_scale, new_base = origin(tile_max, scale_log2)
            factor = gl.where(new_scale != scale_log2, 0.0, gl.exp2(m_log2 - tile_max_log2))
            # What sums relative to the old maximum have to be multiplied by.
            rescale = gl.expand_dims(gl.where(moves, factor, 1.0), 0)
            scale = gl.where(moves, new_scale, scale)
            base = gl.where(moves, new_base, base)
            # P anew, over what was stored; the barrier ends the exchange.
            p = gl.exp2(z * gl.expand_dims(scale, 0) - gl.expand_dims(base, 0))
            smem.p.index(zero).store(p.to(gl.bfloat16))
            fence_async_shared()
            barrier()
            l = l * rescale
            acc = acc * rescale
        # A thread sums its own keys: nothing crosses threads until the end.
        l = l + p
        pv = warpgroup_mma(smem.k.index(here(stage)).permute((1, 0)), smem.p.index(here(zero)), acc, is_async=True)
        if tile + 1 < tiles:
            _wait_k(bars, tile + 1)
            pending = _qk(smem, nothing, zero, 1 - stage)
            # Products of scores may be pending: PV is older, and done.
            acc = warpgroup_mma_wait(QK_PARTS + smem.HAS_ROPE, deps=(pv,))
            signal(bars.k_empty.index(stage))
            scores = warpgroup_mma_wait(0, deps=(pending,))
        else:
            acc = warpgroup_mma_wait(0, deps=(pv,))
            scores = nothing
            barrier()  # as in signal: else the compiler puts one into every turn
    # Sums over keys cross threads once, here.
    head = gl.arange(0, BLOCK_M, layout=HEAD)
    sink = gl.load(operands.sink + first_head + head, mask=head < heads, other=0.0) if HAS_SINK else 0.0
    m_log2 = gl.where(scale != scale_log2, in_log2(far_max(base, scale_log2), scale_log2), base)
    factor, row_lse = normalise(m_log2, denominator(m_log2, gl.sum(l, 0)), sink, HAS_SINK, SPLIT, operands.INF_LSE)
    gl.store(lse + head, row_lse, mask=head < heads)
    if operands.max_logits is not None:
        max_at = operands.max_logits + first_head
        max_at += split * operands.stride_lse_split + token * operands.stride_lse_token
        gl.store(max_at + head, gl.max(largest, 0) * (scale_log2 * 0.6931471805599453), mask=head < heads)
    values = acc * gl.expand_dims(factor, 0)
    # Partials stay fp32, straight from registers.
    if SPLIT:
        column = gl.arange(0, D_V, layout=gl.SliceLayout(1, ACC))
        pointers = out + gl.expand_dims(head * operands.stride_out_head, 0) + gl.expand_dims(column, 1)
        gl.store(pointers, values, mask=gl.expand_dims(head < heads, 0))
    else:
        # Through Q's memory, transposed, so that a warp stores a head's row.
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
        barrier()  # nobody scores any more
        smem.q.index(0).permute((1, 0)).store(values.to(gl.bfloat16))
        barrier()
        head_o = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, WIDE))
        column_o = gl.arange(0, D_V, layout=gl.SliceLayout(0, WIDE))
        pointers_o = out + gl.expand_dims(head_o * operands.stride_out_head, 1) + gl.expand_dims(column_o, 0)
        gl.store(pointers_o, smem.q.index(0).load(WIDE), mask=gl.expand_dims(head_o < heads, 1))


@gluon.jit(
    do_not_specialize=[
        "num_slots", "block_size", "capacity", "extra_num_slots", "extra_block_size", "extra_capacity", "heads",
        "stride_cache", "stride_extra", "launch_early",
    ],
    do_not_specialize_on_alignment=[
        "indptr", "lengths", "extra_indptr", "extra_lengths", "lse", "max_logits",
    ],  # of some rows of a step
)  # fmt: skip
def attend(
    q,  # bf16 [tokens, heads, D_V (+ D_ROPE)]
    cache,  # bf16 [num_slots, D_V (+ D_ROPE)], or uint8 [num_blocks, block_size, row], interleaved or planar
    indices,  # int32 [capacity]
    indptr,  # int32 [tokens + 1]
    lengths,  # int32 [tokens] or None: so many indices of a row count, the first ones
    extra_cache,  # HAS_EXTRA_CACHE: a second one of this form, with its own indices; else anything
    extra_indices,
    extra_indptr,
    extra_lengths,
    sink,  # fp32 [heads]; anything without HAS_SINK
    out,  # bf16 [tokens, heads, D_V]; SPLIT: fp32 partials [splits, tokens, heads, D_V]
    lse,  # fp32 [tokens, heads], natural log; SPLIT: [splits, tokens, heads], base 2
    max_logits,  # None, or as lse: a row's largest scaled score, natural
    heads,
    num_slots,
    block_size,
    capacity,
    extra_num_slots,
    extra_block_size,
    extra_capacity,
    launch_early,  # as in decode_fp8.attend
    scale_log2,  # above 0: the largest product gives the largest score
    stride_q_token,
    stride_q_head,
    stride_cache,  # of a row or block, in LOAD_BYTES
    stride_extra,
    stride_out_split,
    stride_out_token,
    stride_out_head,
    stride_lse_split,
    stride_lse_token,
    BLOCK_M: gl.constexpr,  # 16 or 32: heads of a CTA, padded
    HEAD_BLOCKS: gl.constexpr,  # whether there are more, for the third dimension of the grid
    HAS_ROPE: gl.constexpr,
    GROUP: gl.constexpr,  # these of fp8 caches, as in decode_fp8.attend; all 0 for bf16 rows
    TOKEN: gl.constexpr,
    SCALES: gl.constexpr,
    ROPE_OFFSET: gl.constexpr,
    PADDED_BLOCKS: gl.constexpr,
    HAS_EXTRA_CACHE: gl.constexpr,
    HAS_SINK: gl.constexpr,
    SPLIT: gl.constexpr,
    INF_LSE: gl.constexpr,  # as normalise takes it
    PRODUCER_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,  # of fp8 caches
):
    # Rows of P^T and Q are as narrow as the heads are few.
    TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * BLOCK_M, element_bitwidth=16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    BLOCKS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    FP8: gl.constexpr = TOKEN > 0
    PLANAR: gl.constexpr = SCALES > 0
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_M, D_V], TILES)
    k = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, D_V], TILES)
    p = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_N, BLOCK_M], NARROW)
    kv_valid = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N], FLAT)
    warp_max = gl.allocate_shared_memory(gl.float32, [1, WARPS, BLOCK_M], PLAIN)
    # Codes on their way from the loader to the dequant warpgroups.
    if PLANAR:
        left = gl.allocate_shared_memory(gl.int32, [4, BLOCK_N, CODE_WORDS], BLOCKS)
        right = gl.allocate_shared_memory(gl.int32, [2, BLOCK_N, CODE_WORDS], BLOCKS)
        last = gl.allocate_shared_memory(gl.int32, [1, BLOCK_N, CODE_WORDS], BLOCKS)
        scales = gl.allocate_shared_memory(gl.int32, [BLOCK_N, SCALES // WORD_BYTES], PLAIN)
    elif FP8:
        halves = gl.allocate_shared_memory(gl.int32, [2, 4, BLOCK_N, CODE_WORDS], BLOCKS)
        scales = gl.allocate_shared_memory(gl.int32, [BLOCK_N, D_V // GROUP], PLAIN)
    p_max = gl.allocate_shared_memory(gl.float32, [1, WARPS], FLAT)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    if FP8:  # else the compiler would give its memory to others, which must not touch an mbarrier's
        codes_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        codes_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    else:
        codes_full: gl.constexpr = None
        codes_empty: gl.constexpr = None
    if HAS_ROPE:
        q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_M, D_ROPE], TILES)
        k_rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, D_ROPE], TILES)
    else:
        q_rope: gl.constexpr = None
        k_rope: gl.constexpr = None
    for which in gl.static_range(2):
        # A signal of each producer, and every thread's copies: of the loader, or of both over bf16 rows.
        mbarrier.init(k_full.index(which), count=2 + 1 + 128 if FP8 else 2 + 256)
        mbarrier.init(k_empty.index(which), count=1)
        if FP8:
            # Every thread of the loader arrives with its copies; each dequant warpgroup signals.
            mbarrier.init(codes_full.index(which), count=128)
            mbarrier.init(codes_empty.index(which), count=2)
    fence_async_shared()
    barrier()
    # 1: blocks of heads are the grid's third dimension, and a program's first number is its row.
    rows = RowBounds(indptr, extra_indptr, capacity, extra_capacity, 1, lengths, extra_lengths)
    smem = Shared(q_tile, q_rope, k, k_rope, kv_valid, p, warp_max, p_max, HAS_ROPE)
    bars = Barriers(k_full, k_empty, codes_full, codes_empty)
    inputs = Inputs(
        indices, cache, num_slots, block_size, stride_cache, extra_indices, extra_cache, extra_num_slots,
        extra_block_size, stride_extra,
    )  # fmt: skip
    record = Record(D_V, GROUP, TOKEN, SCALES, ROPE_OFFSET, PLANAR, PADDED_BLOCKS)
    operands = Operands(
        q, heads, launch_early, scale_log2, out, lse, sink, stride_q_token, stride_q_head, stride_out_split,
        stride_out_token, stride_out_head, stride_lse_split, stride_lse_token, max_logits, INF_LSE,
    )  # fmt: skip
    # wg0 consumes in all three forms; what fills its stages differs.
    if PLANAR:
        codes = PlanarCodes(left, right, last, scales)
        gl.warp_specialize(
            [
                (_consume, (rows, smem, bars, operands, BLOCK_M, HEAD_BLOCKS, HAS_EXTRA_CACHE, HAS_SINK, SPLIT)),
                (dequant_planar, (rows, smem, codes, bars, 0, record, HAS_EXTRA_CACHE, SPLIT)),
                (dequant_planar, (rows, smem, codes, bars, 1, record, HAS_EXTRA_CACHE, SPLIT)),
                (load_planar, (rows, smem, codes, bars, inputs, record, HAS_EXTRA_CACHE, SPLIT)),
            ],
            [4, 4, 4],
            [PRODUCER_REGISTERS, PRODUCER_REGISTERS, LOADER_REGISTERS],
        )
    elif FP8:
        codes = LatentCodes(halves, scales)
        gl.warp_specialize(
            [
                (_consume, (rows, smem, bars, operands, BLOCK_M, HEAD_BLOCKS, HAS_EXTRA_CACHE, HAS_SINK, SPLIT)),
                (dequant_latents, (rows, smem, codes, bars, 0, record, SPLIT)),
                (dequant_latents, (rows, smem, codes, bars, 1, record, SPLIT)),
                (load_latents, (rows, smem, codes, bars, inputs, record, SPLIT)),
            ],
            [4, 4, 4],
            [PRODUCER_REGISTERS, PRODUCER_REGISTERS, LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (rows, smem, bars, operands, BLOCK_M, HEAD_BLOCKS, HAS_EXTRA_CACHE, HAS_SINK, SPLIT)),
                (load_rows, (rows, smem, bars, 0, inputs, SPLIT)),
                (load_rows, (rows, smem, bars, 1, inputs, SPLIT)),
            ],
            [4, 4],
            [PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )
