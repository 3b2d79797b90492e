"""Sparse attention with few heads on Hopper: a program serves all heads of a row and a share of its keys, products
swapped.

The matrix unit takes 64 rows of its first operand at least. Here they are keys (S^T = K Q^T, 64 by 16 or 32) and value
columns (O^T = V^T P^T, 512 by 16 or 32), and the heads are the narrow side. One warpgroup consumes tiles of 64 keys,
which two or three produce (swap_ab_load, swap_ab_planar). Sums over keys stay with the threads that hold them
until the end, and weights are relative to the maximum of some tiles ago (lazy_rescale): what crosses warps in every
tile is whether one exceeds MAX_P. Then the tile is weighed anew, as the first one is. As in decode_fp8, warps specialise
while the launch before still runs.

Floor, bytes: every named record once. What bounds it over fp8 records: shared memory, out of which the matrix unit
reads a key's 2 * (d_qk + d_v) bytes whatever the number of heads, about 20 cycles, beside what producers store and read
there (38 in all), and memory (39), of 59.
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

from sparse_attn.device.hopper import async_load, barrier, launch_dependents, signal, wait
from sparse_attn.ops.attention.hopper.common import normalise
from sparse_attn.ops.attention.hopper.lazy_rescale import MAX_P, denominator, far_max, in_log2, initial_max, origin
from sparse_attn.ops.attention.hopper.seesaw import REST, TILE, VALUE, WORD
from sparse_attn.ops.attention.hopper.swap_ab_load import (
    BLOCK,
    BUFFERS,
    EMPTY,
    FULL,
    KINDS,
    READY,
    SPENT,
    ask_latents,
    fill_rows,
    own_keys,
    put_latents,
)
from sparse_attn.ops.attention.hopper.swap_ab_planar import ask_planar, put_planar

WARPS = gl.constexpr(4)


@gluon.jit
def _ask_queries(query, query_rest, source, heads, stride_head, N: gl.constexpr, HAS_REST: gl.constexpr):
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    head = gl.arange(0, N, layout=gl.SliceLayout(1, WIDE))
    column = gl.arange(0, VALUE, layout=gl.SliceLayout(0, WIDE))
    pointers = source + gl.expand_dims(head * stride_head, 1) + gl.expand_dims(column, 0)
    async_load(query.index(0), pointers, mask=gl.expand_dims(head < heads, 1))
    if HAS_REST:
        NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        head_r = gl.arange(0, N, layout=gl.SliceLayout(1, NARROW))
        column_r = gl.arange(0, REST, layout=gl.SliceLayout(0, NARROW)) + VALUE
        pointers_r = source + gl.expand_dims(head_r * stride_head, 1) + gl.expand_dims(column_r, 0)
        async_load(query_rest.index(0), pointers_r, mask=gl.expand_dims(head_r < heads, 1))
    async_copy.commit_group()


@gluon.jit
def _score(query, query_rest, keys, keys_rest, nothing, zero, buffer, HAS_REST: gl.constexpr):
    """S^T of the tile in ``buffer``, not awaited."""
    scores = warpgroup_mma(keys.index(buffer), query.index(zero).permute((1, 0)), nothing, use_acc=False, is_async=True)
    if HAS_REST:
        scores = warpgroup_mma(keys_rest.index(buffer), query_rest.index(zero).permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _await_keys(bars, tile):
    mbarrier.wait(bars[FULL].index(tile % BUFFERS), tile // BUFFERS & 1)
    fence_async_shared()


@gluon.jit
def _column_maxima(z, maxima, N: gl.constexpr):
    """The largest of a tile's scores of every head: every warp's own, exchanged through shared memory."""
    COLUMNS: gl.constexpr = [[0, 1], [0, 8]] if N == 16 else [[0, 1], [0, 8], [0, 16]]
    ALL: gl.constexpr = gl.DistributedLinearLayout(
        COLUMNS + [[1, 0], [2, 0]], [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [WARPS, N]
    )
    own = gl.max(gl.reshape(z, [WARPS, TILE // WARPS, N]), 1)
    maxima.store(own)
    return gl.max(maxima.load(ALL), 0)


@gluon.jit
def _consume(
    consumer, N: gl.constexpr, HAS_REST: gl.constexpr, TWO: gl.constexpr, HAS_SINK: gl.constexpr, SPLIT: gl.constexpr
):
    (row, query, query_rest, keys, keys_rest, known, weights, maxima, largest, bars, q, heads, early, scale_log2, out, lse, sink,
     stride_q_token, stride_q_head, stride_out_split, stride_out_token, stride_out_head, stride_lse_split,
     stride_lse_token) = consumer  # fmt: skip
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, N, 16]
    )  # of scores too: rows are keys or columns
    HEAD: gl.constexpr = gl.SliceLayout(0, SUMS)
    EVERYWHERE: gl.constexpr = gl.DistributedLinearLayout([[1], [2]], [[0]] * 5, [[0]] * 2, [], [WARPS])
    wait()
    if early != 0:
        launch_dependents()
    token = gl.program_id(0).to(gl.int64)
    split = gl.program_id(1).to(gl.int64)
    _ask_queries(query, query_rest, q + token * stride_q_token, heads, stride_q_head, N, HAS_REST)
    _, _, _, _, _, tiles = own_keys(row, TWO, SPLIT)
    out += split * stride_out_split + token * stride_out_token
    lse += split * stride_lse_split + token * stride_lse_token
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    acc = gl.zeros([VALUE, N], gl.float32, SUMS)
    nothing = gl.zeros([TILE, N], gl.float32, SUMS)
    scale, base = origin(gl.full([N], initial_max(scale_log2), gl.float32, HEAD), scale_log2)
    l = gl.zeros([TILE, N], gl.float32, SUMS)
    _await_keys(bars, 0)
    pending = _score(query, query_rest, keys, keys_rest, nothing, 0, 0, HAS_REST)
    scores = warpgroup_mma_wait(0, deps=(pending,))
    for tile in range(tiles):
        zero = tile >> 20
        buffer = tile % BUFFERS
        exists = known.index(buffer).load(gl.SliceLayout(1, SUMS)) != 0
        z = gl.where(gl.expand_dims(exists, 1), scores, -float("inf"))
        p = z
        if tile > 0:
            p = gl.exp2(z * gl.expand_dims(scale, 0) - gl.expand_dims(base, 0))
            weights.index(zero).store(p.to(gl.bfloat16))
            largest.index(zero).store(gl.max(gl.reshape(p, [WARPS, TILE // WARPS * N]), 1))
            fence_async_shared()
        barrier()
        if (tile == 0) | (gl.max(largest.index(zero).load(EVERYWHERE), 0) > MAX_P):
            seen = gl.convert_layout(_column_maxima(z, maxima.index(zero), N), HEAD)
            far = scale != scale_log2
            top = far_max(base, scale_log2)
            before = gl.where(far, in_log2(top, scale_log2), base)
            now = in_log2(seen, scale_log2)
            moves = gl.where(far, seen > top, now > before)
            seen_scale, seen_base = origin(seen, scale_log2)
            factor = gl.where(seen_scale != scale_log2, 0.0, gl.exp2(before - now))
            rescale = gl.expand_dims(gl.where(moves, factor, 1.0), 0)
            scale = gl.where(moves, seen_scale, scale)
            base = gl.where(moves, seen_base, base)
            p = gl.exp2(z * gl.expand_dims(scale, 0) - gl.expand_dims(base, 0))
            weights.index(zero).store(p.to(gl.bfloat16))
            fence_async_shared()
            barrier()
            l = l * rescale
            acc = acc * rescale
        l = l + p
        product = warpgroup_mma(keys.index(buffer).permute((1, 0)), weights.index(zero), acc, is_async=True)
        if tile + 1 < tiles:
            _await_keys(bars, tile + 1)
            pending = _score(query, query_rest, keys, keys_rest, nothing, zero, 1 - buffer, HAS_REST)
            if HAS_REST:
                acc = warpgroup_mma_wait(2, deps=(product,))
            else:
                acc = warpgroup_mma_wait(1, deps=(product,))
            signal(bars[SPENT].index(buffer))
            scores = warpgroup_mma_wait(0, deps=(pending,))
        else:
            acc = warpgroup_mma_wait(0, deps=(product,))
            scores = nothing
            barrier()  # as in signal: else the compiler puts one into every turn
    head = gl.arange(0, N, layout=HEAD)
    drain = gl.load(sink + head, mask=head < heads, other=0.0) if HAS_SINK else 0.0
    top = gl.where(scale != scale_log2, in_log2(far_max(base, scale_log2), scale_log2), base)
    factor, logarithm = normalise(top, denominator(top, gl.sum(l, 0)), drain, HAS_SINK, SPLIT)
    gl.store(lse + head, logarithm, mask=head < heads)
    values = acc * gl.expand_dims(factor, 0)
    if SPLIT:
        column = gl.arange(0, VALUE, layout=gl.SliceLayout(1, SUMS))
        pointers = out + gl.expand_dims(head * stride_out_head, 0) + gl.expand_dims(column, 1)
        gl.store(pointers, values, mask=gl.expand_dims(head < heads, 0))
    else:
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
        barrier()  # nobody scores any more
        query.index(0).permute((1, 0)).store(values.to(gl.bfloat16))
        barrier()
        head_o = gl.arange(0, N, layout=gl.SliceLayout(1, WIDE))
        column_o = gl.arange(0, VALUE, layout=gl.SliceLayout(0, WIDE))
        pointers_o = out + gl.expand_dims(head_o * stride_out_head, 1) + gl.expand_dims(column_o, 0)
        gl.store(pointers_o, query.index(0).load(WIDE), mask=gl.expand_dims(head_o < heads, 1))


@gluon.jit(
    do_not_specialize=[
        "num_slots", "block_size", "capacity", "extra_num_slots", "extra_block_size", "extra_capacity", "heads",
        "stride_cache", "stride_extra", "early",
    ],
    do_not_specialize_on_alignment=["indptr", "extra_indptr", "lse"],  # of some rows of a step
)  # fmt: skip
def attend(
    q,  # bf16 [tokens, heads, VALUE (+ REST)], heads at most N
    cache,  # bf16 [num_slots, VALUE (+ REST)], or uint8 [num_blocks, block_size, row], interleaved or planar
    indices,  # int32 [capacity]
    indptr,  # int32 [tokens + 1]
    extra_cache,  # TWO: a second one of this form, with its own indices; else anything
    extra_indices,
    extra_indptr,
    sink,  # fp32 [heads]; anything without HAS_SINK
    out,  # bf16 [tokens, heads, VALUE]; SPLIT: fp32 [splits, tokens, heads, VALUE]
    lse,  # fp32 [tokens, heads], natural log; SPLIT: [splits, tokens, heads], base 2
    heads,
    num_slots,
    block_size,
    capacity,
    extra_num_slots,
    extra_block_size,
    extra_capacity,
    early,  # as in decode_fp8.attend
    scale_log2,  # above 0: the largest product gives the largest score
    stride_q_token,
    stride_q_head,
    stride_cache,  # of a row or block, in UNITs
    stride_extra,
    stride_out_split,
    stride_out_token,
    stride_out_head,
    stride_lse_split,
    stride_lse_token,
    N: gl.constexpr,  # 16 or 32: heads, padded
    HAS_REST: gl.constexpr,
    GROUP: gl.constexpr,  # these of fp8 caches, as in decode_fp8.attend; all 0 for bf16 rows
    TOKEN: gl.constexpr,
    SCALES: gl.constexpr,
    REST_AT: gl.constexpr,
    PAGED: gl.constexpr,
    TWO: gl.constexpr,
    HAS_SINK: gl.constexpr,
    SPLIT: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    ASKER_REGISTERS: gl.constexpr,  # of fp8 caches
):
    TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * N, element_bitwidth=16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FP8: gl.constexpr = TOKEN > 0
    PLANAR: gl.constexpr = SCALES > 0
    query = gl.allocate_shared_memory(gl.bfloat16, [1, N, VALUE], TILES)
    keys = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, TILE, VALUE], TILES)
    weights = gl.allocate_shared_memory(gl.bfloat16, [1, TILE, N], NARROW)
    known = gl.allocate_shared_memory(gl.int32, [BUFFERS, TILE], FLAT)
    maxima = gl.allocate_shared_memory(gl.float32, [1, WARPS, N], PLAIN)
    BLOCKS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    if PLANAR:
        four = gl.allocate_shared_memory(gl.int32, [4, TILE, BLOCK], BLOCKS)  # groups
        two = gl.allocate_shared_memory(gl.int32, [2, TILE, BLOCK], BLOCKS)
        one = gl.allocate_shared_memory(gl.int32, [1, TILE, BLOCK], BLOCKS)
        scales = gl.allocate_shared_memory(gl.int32, [TILE, SCALES // WORD], PLAIN)
    elif FP8:
        halves = gl.allocate_shared_memory(gl.int32, [2, 4, TILE, BLOCK], BLOCKS)
        scales = gl.allocate_shared_memory(gl.int32, [TILE, VALUE // GROUP], PLAIN)
    largest = gl.allocate_shared_memory(gl.float32, [1, WARPS], FLAT)
    bars = ()  # none that is not used: the compiler would give its memory to others, which must not touch an mbarrier's
    for _ in gl.static_range(KINDS if FP8 else READY):
        bars = bars + (gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),)
    if HAS_REST:
        query_rest = gl.allocate_shared_memory(gl.bfloat16, [1, N, REST], TILES)
        keys_rest = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, TILE, REST], TILES)
    else:
        query_rest = query
        keys_rest = keys
    for which in gl.static_range(2):
        # A warpgroup says so once, and each of its threads of its copies.
        mbarrier.init(bars[FULL].index(which), count=2 + 1 + 128 if FP8 else 2 + 256)
        mbarrier.init(bars[SPENT].index(which), count=1)
        if FP8:
            mbarrier.init(bars[READY].index(which), count=128)
            mbarrier.init(bars[EMPTY].index(which), count=2)
    fence_async_shared()
    barrier()
    row = (indptr, extra_indptr, capacity, extra_capacity)
    consumer = (
        row,
        query,
        query_rest,
        keys,
        keys_rest,
        known,
        weights,
        maxima,
        largest,
        bars,
        q,
        heads,
        early,
        scale_log2,
        out,
        lse,
        sink,
        stride_q_token,
        stride_q_head,
        stride_out_split,
        stride_out_token,
        stride_out_head,
        stride_lse_split,
        stride_lse_token,
    )
    if PLANAR:
        gl.warp_specialize(
            [
                (_consume, (consumer, N, HAS_REST, TWO, HAS_SINK, SPLIT)),
                (put_planar, (row, keys, four, two, one, scales, bars, 0, GROUP, TWO, SPLIT)),
                (put_planar, (row, keys, four, two, one, scales, bars, 1, GROUP, TWO, SPLIT)),
                (ask_planar, (row, keys, four, two, one, scales, known, bars, indices, cache, num_slots, block_size,
                              stride_cache, extra_indices, extra_cache, extra_num_slots, extra_block_size, stride_extra,
                              TOKEN, SCALES, TWO, SPLIT)),
            ],
            [4, 4, 4],
            [PRODUCER_REGISTERS, PRODUCER_REGISTERS, ASKER_REGISTERS],
        )  # fmt: skip
    elif FP8:
        gl.warp_specialize(
            [
                (_consume, (consumer, N, HAS_REST, TWO, HAS_SINK, SPLIT)),
                (put_latents, (row, keys, halves, scales, bars, 0, GROUP, SPLIT)),
                (put_latents, (row, keys, halves, scales, bars, 1, GROUP, SPLIT)),
                (ask_latents, (row, keys_rest, halves, scales, known, bars, indices, cache, num_slots, block_size,
                               stride_cache, TOKEN, REST_AT, PAGED, SPLIT)),
            ],
            [4, 4, 4],
            [PRODUCER_REGISTERS, PRODUCER_REGISTERS, ASKER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (consumer, N, HAS_REST, TWO, HAS_SINK, SPLIT)),
                (fill_rows, (row, keys, keys_rest, known, bars, 0, indices, cache, num_slots, stride_cache, HAS_REST, SPLIT)),
                (fill_rows, (row, keys, keys_rest, known, bars, 1, indices, cache, num_slots, stride_cache, HAS_REST, SPLIT)),
            ],
            [4, 4],
            [PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
