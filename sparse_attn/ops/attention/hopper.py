"""Sparse attention over bf16 rows on Hopper: one program per (row, 64 heads), warp-specialised.

Two consumer warpgroups share the work of a pair of 64-key tiles: ``left`` scores the even tile and owns the first 256
output columns, ``right`` scores the odd tile and owns the last 256; each multiplies its own probabilities out of registers
and the other's out of shared memory, and the two agree on a running maximum per pair. A third warpgroup gathers the keys,
half a tile at a time, in the order in which the consumers free the halves.

Floors as in kernels.attend. What bounds it: every program pulls its own keys through the L2, and between the two
products of a pair ``left`` is one chain (scores, maximum, exponentials, rescaling). Structure and layouts that Hopper
likes were found in a study of Triton's Gluon; what is measured stands in scripts/results/NOTES.md.

Shared memory is indexed by an opaque zero made in the loop, because otherwise every matrix descriptor is hoisted out of it
and spilled. ``mbarrier.arrive`` is one thread and waits for nobody: a barrier of the warpgroup stands before each.
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

barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # triton 3.6, and later

HEADS = gl.constexpr(64)  # of a program
TILE = gl.constexpr(64)  # keys
PAIR = gl.constexpr(128)
HALF = gl.constexpr(256)  # columns of half a value
NARROW = gl.constexpr(128)  # columns of a product beside two producers: four warpgroups have too few registers for HALF
VALUE = gl.constexpr(512)
REST = gl.constexpr(64)  # columns behind the value that only score

UNIT = gl.constexpr(16)  # bytes of a load, in which strides of fp8 caches are counted
WORD = gl.constexpr(4)  # bytes, or codes

# mbarriers. The four halves of a pair, 2 * tile + half: filled by the producer, freed by the consumer that read it last.
FILLED = gl.constexpr(0)
FREED = gl.constexpr(4)
LEFT_MAX = gl.constexpr(8)
RIGHT_MAX = gl.constexpr(9)
LEFT_P = gl.constexpr(10)
RIGHT_P = gl.constexpr(11)
LEFT_SUM = gl.constexpr(12)
RIGHT_SUM = gl.constexpr(13)
QUERY = gl.constexpr(14)
BARRIERS = gl.constexpr(15)

LOWEST = gl.constexpr(-1e30)  # a finite "nothing yet"


@gluon.jit
def signal(bars, which: gl.constexpr):
    """Everything this warpgroup did so far is done: say so."""
    barrier()
    mbarrier.arrive(bars.index(which), count=1)


@gluon.jit
def await_keys(bars, which: gl.constexpr, phase):
    mbarrier.wait(bars.index(FILLED + which), phase)
    fence_async_shared()


@gluon.jit
def _load_query(query, rest, source, stride_head, bars, half: gl.constexpr, HAS_REST: gl.constexpr):
    """This warpgroup's half of the queries, then wait for the other half."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, WIDE))
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, WIDE)) + half * HALF
    part = query.index(0).slice(half * HALF, HALF, dim=1)
    async_copy.async_copy_global_to_shared(part, source + gl.expand_dims(head * stride_head, 1) + gl.expand_dims(column, 0))
    if HAS_REST and half == 0:
        NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        head_r = gl.arange(0, HEADS, layout=gl.SliceLayout(1, NARROW))
        column_r = gl.arange(0, REST, layout=gl.SliceLayout(0, NARROW)) + VALUE
        async_copy.async_copy_global_to_shared(
            rest.index(0), source + gl.expand_dims(head_r * stride_head, 1) + gl.expand_dims(column_r, 0)
        )
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    signal(bars, QUERY)
    mbarrier.wait(bars.index(QUERY), 0)


@gluon.jit
def _score_half(query, keys, scores, half: gl.constexpr, first: gl.constexpr):
    """scores (+)= queries times one half of a tile, not awaited."""
    a = query.slice(half * HALF, HALF, dim=1)
    b = keys.slice(half * HALF, HALF, dim=1).permute((1, 0))
    return warpgroup_mma(a, b, scores, use_acc=not first, is_async=True)


@gluon.jit
def _masked(scores, named, tile: gl.constexpr, first, count, num_rows, scale_log2, place, FLAGS: gl.constexpr):
    """Base-2 scores of a tile, -inf where an index names no row. named: the row's indices, the tile's from ``first`` on;
    FLAGS: what the producers say of either tile's keys, in shared memory."""
    if FLAGS:
        valid = named.index(tile).load(place.type.layout) != 0
    else:
        at = first + place
        slot = gl.load(named + at, mask=at < count, other=-1)
        valid = (slot >= 0) & (slot < num_rows)
    return gl.where(gl.expand_dims(valid, 0), scores * scale_log2, -float("inf"))


@gluon.jit
def _finish(
    acc, l, m, query, half: gl.constexpr, out, lse, sink, stride_head, HAS_SINK: gl.constexpr, SPLIT: gl.constexpr
):
    """Divide by the denominator (a sink adds to it, not to lse) and store this warpgroup's half of the columns; a SPLIT
    row's share stays fp32, its lse in base 2."""
    ROW_P: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
    ACC: gl.constexpr = acc.type.layout
    head = gl.arange(0, HEADS, layout=ROW_P)
    empty = l == 0.0
    lse2 = m + gl.log2(gl.where(empty, 1.0, l))
    factor = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, l))
    if HAS_SINK:
        drained = gl.load(sink + head) * 1.4426950408889634 - gl.where(empty, 0.0, lse2)
        factor = factor / (1.0 + gl.exp2(drained))
    if half == 0:
        NATURAL: gl.constexpr = 1.0 if SPLIT else 0.6931471805599453
        gl.store(lse + head, gl.where(empty, -float("inf"), lse2 * NATURAL))
    values = acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, ACC)), 1)
    if SPLIT:
        head_a = gl.arange(0, HEADS, layout=gl.SliceLayout(1, ACC))
        column_a = gl.arange(0, HALF, layout=gl.SliceLayout(0, ACC)) + half * HALF
        gl.store(out + gl.expand_dims(head_a * stride_head, 1) + gl.expand_dims(column_a, 0), values)
    else:
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
        staged = query.index(0).slice(half * HALF, HALF, dim=1)  # nobody scores any more
        staged.store(values.to(gl.bfloat16))
        barrier()
        head_o = gl.arange(0, HEADS, layout=gl.SliceLayout(1, WIDE))
        column = gl.arange(0, HALF, layout=gl.SliceLayout(0, WIDE)) + half * HALF
        gl.store(out + gl.expand_dims(head_o * stride_head, 1) + gl.expand_dims(column, 0), staged.load(WIDE))


@gluon.jit
def left(
    query, query_rest, keys, keys_rest, right_p, left_p, maxima, sums, bars, source, named, count, num_rows, scale_log2,
    out, lse, sink, stride_q_head, stride_out_head, HAS_REST: gl.constexpr, HAS_SINK: gl.constexpr,
    SPLIT: gl.constexpr, FLAGS: gl.constexpr,
):  # fmt: skip
    COLUMNS: gl.constexpr = NARROW if FLAGS else HALF
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    ROW_ACC: gl.constexpr = gl.SliceLayout(1, ACC)
    place = gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
    _load_query(query, query_rest, source, stride_q_head, bars, 0, HAS_REST)
    pairs = gl.maximum((count + PAIR - 1) // PAIR, 1)
    acc = gl.zeros([HEADS, HALF], gl.float32, ACC)
    m = gl.full([HEADS], LOWEST, gl.float32, ROW)
    l = gl.zeros([HEADS], gl.float32, ROW)
    nothing = gl.zeros([HEADS, TILE], gl.float32, SCORES)
    phase = 0
    await_keys(bars, 0, phase)
    pending = _score_half(query.index(0), keys.index(0), nothing, 0, True)
    await_keys(bars, 1, phase)
    pending = _score_half(query.index(0), keys.index(0), pending, 1, False)
    if HAS_REST:
        pending = warpgroup_mma(query_rest.index(0), keys_rest.index(0).permute((1, 0)), pending, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(pending,))
    for i in range(pairs):
        zero = i >> 20
        z = _masked(scores, named, 0, i * PAIR, count, num_rows, scale_log2, place, FLAGS)
        top = gl.maximum(m, gl.max(z, 1))
        rescale = gl.exp2(m - top)
        p = gl.exp2(z - gl.expand_dims(top, 1))
        l = l * rescale + gl.sum(p, 1)
        m = top
        maxima.store(top)
        signal(bars, LEFT_MAX)
        acc = acc * gl.expand_dims(gl.convert_layout(rescale, ROW_ACC), 1)
        own = gl.convert_layout(p.to(gl.bfloat16), OPERAND)
        product = warpgroup_mma(own, keys.index(zero).slice(0, HALF, dim=1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(product,))
        signal(bars, FREED)

        mbarrier.wait(bars.index(RIGHT_MAX), phase)
        top = maxima.load(ROW)
        rescale = gl.exp2(m - top)
        m = top
        l = l * rescale
        left_p.index(zero).store((p * gl.expand_dims(rescale, 1)).to(gl.bfloat16))
        fence_async_shared()
        signal(bars, LEFT_P)
        acc = acc * gl.expand_dims(gl.convert_layout(rescale, ROW_ACC), 1)
        mbarrier.wait(bars.index(RIGHT_P), phase)
        product = warpgroup_mma(right_p.index(zero), keys.index(zero + 1).slice(0, HALF, dim=1), acc, is_async=True)
        phase = phase ^ 1
        if i + 1 < pairs:
            await_keys(bars, 0, phase)
            pending = _score_half(query.index(zero), keys.index(zero), nothing, 0, True)
            acc = warpgroup_mma_wait(1, deps=(product,))
            signal(bars, FREED + 2)
            await_keys(bars, 1, phase)
            pending = _score_half(query.index(zero), keys.index(zero), pending, 1, False)
            if HAS_REST:
                pending = warpgroup_mma(
                    query_rest.index(zero), keys_rest.index(zero).permute((1, 0)), pending, is_async=True
                )
            scores = warpgroup_mma_wait(0, deps=(pending,))
        else:
            acc = warpgroup_mma_wait(0, deps=(product,))
            scores = nothing
    sums.index(0).store(l)
    signal(bars, LEFT_SUM)
    mbarrier.wait(bars.index(RIGHT_SUM), 0)
    l = l + sums.index(1).load(ROW)
    _finish(acc, l, m, query, 0, out, lse, sink, stride_out_head, HAS_SINK, SPLIT)


@gluon.jit
def right(
    query, query_rest, keys, keys_rest, right_p, left_p, maxima, sums, bars, source, named, count, num_rows, scale_log2,
    out, lse, sink, stride_q_head, stride_out_head, HAS_REST: gl.constexpr, HAS_SINK: gl.constexpr,
    SPLIT: gl.constexpr, FLAGS: gl.constexpr,
):  # fmt: skip
    COLUMNS: gl.constexpr = NARROW if FLAGS else HALF
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    ROW_ACC: gl.constexpr = gl.SliceLayout(1, ACC)
    place = gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
    _load_query(query, query_rest, source, stride_q_head, bars, 1, HAS_REST)
    pairs = gl.maximum((count + PAIR - 1) // PAIR, 1)
    acc = gl.zeros([HEADS, HALF], gl.float32, ACC)
    m = gl.full([HEADS], LOWEST, gl.float32, ROW)
    l = gl.zeros([HEADS], gl.float32, ROW)
    nothing = gl.zeros([HEADS, TILE], gl.float32, SCORES)
    phase = 0
    for i in range(pairs):
        zero = i >> 20
        await_keys(bars, 3, phase)
        pending = _score_half(query.index(zero), keys.index(zero + 1), nothing, 1, True)
        if HAS_REST:
            pending = warpgroup_mma(
                query_rest.index(zero), keys_rest.index(zero + 1).permute((1, 0)), pending, is_async=True
            )
        await_keys(bars, 2, phase)
        pending = _score_half(query.index(zero), keys.index(zero + 1), pending, 0, False)
        scores = warpgroup_mma_wait(0, deps=(pending,))
        z = _masked(scores, named, 1, i * PAIR + TILE, count, num_rows, scale_log2, place, FLAGS)
        top = gl.max(z, 1)
        mbarrier.wait(bars.index(LEFT_MAX), phase)
        top = gl.maximum(maxima.load(ROW), top)
        maxima.store(top)
        signal(bars, RIGHT_MAX)
        rescale = gl.exp2(m - top)
        m = top
        p = gl.exp2(z - gl.expand_dims(top, 1))
        l = l * rescale + gl.sum(p, 1)
        acc = acc * gl.expand_dims(gl.convert_layout(rescale, ROW_ACC), 1)
        rounded = p.to(gl.bfloat16)
        own = gl.convert_layout(rounded, OPERAND)
        product = warpgroup_mma(own, keys.index(zero + 1).slice(HALF, HALF, dim=1), acc, is_async=True)
        right_p.index(zero).store(rounded)
        fence_async_shared()
        signal(bars, RIGHT_P)
        mbarrier.wait(bars.index(LEFT_P), phase)
        product = warpgroup_mma(left_p.index(zero), keys.index(zero).slice(HALF, HALF, dim=1), product, is_async=True)
        product = warpgroup_mma_wait(1, deps=(product,))
        signal(bars, FREED + 3)
        acc = warpgroup_mma_wait(0, deps=(product,))
        signal(bars, FREED + 1)
        phase = phase ^ 1
    sums.index(1).store(l)
    signal(bars, RIGHT_SUM)
    mbarrier.wait(bars.index(LEFT_SUM), 0)
    l = l + sums.index(0).load(ROW)
    _finish(acc, l, m, query, 1, out, lse, sink, stride_out_head, HAS_SINK, SPLIT)


@gluon.jit
def row_range(indptr, token, capacity):
    """(begin, count) of a row's indices, inside [0, capacity]."""
    begin = gl.maximum(gl.load(indptr + token), 0)
    return begin, gl.maximum(gl.minimum(gl.load(indptr + token + 1), capacity) - begin, 0)


@gluon.jit
def gather(into, rows, valid, first: gl.constexpr, width: gl.constexpr, LAYOUT: gl.constexpr):
    """Columns [first, first + width) of a tile's rows, zero where a row is not valid; not awaited."""
    column = gl.arange(0, width, layout=gl.SliceLayout(0, LAYOUT)) + first
    pointers = gl.expand_dims(rows, 1) + gl.expand_dims(column, 0)
    async_copy.async_copy_global_to_shared(into, pointers, mask=gl.expand_dims(valid, 1))


@gluon.jit
def _fill(keys, keys_rest, bars, indices, count, kv, num_rows, stride_kv, HAS_REST: gl.constexpr):
    """The producer: keys of pair after pair, indices read one pair ahead."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    place = gl.arange(0, TILE, layout=gl.SliceLayout(1, LANES))
    pairs = gl.maximum((count + PAIR - 1) // PAIR, 1)
    phase = 1
    even = gl.load(indices + place, mask=place < count, other=-1)
    odd = gl.load(indices + TILE + place, mask=TILE + place < count, other=-1)
    for i in range(pairs):
        even_valid = (even >= 0) & (even < num_rows)
        odd_valid = (odd >= 0) & (odd < num_rows)
        even_rows = kv + even.to(gl.int64) * stride_kv
        odd_rows = kv + odd.to(gl.int64) * stride_kv
        ahead = (i + 1) * PAIR + place
        even = gl.load(indices + ahead, mask=ahead < count, other=-1)
        odd = gl.load(indices + TILE + ahead, mask=TILE + ahead < count, other=-1)

        mbarrier.wait(bars.index(FREED), phase)
        gather(keys.index(0).slice(0, HALF, dim=1), even_rows, even_valid, 0, HALF, LANES)
        async_copy.mbarrier_arrive(bars.index(FILLED), increment_count=False)
        mbarrier.wait(bars.index(FREED + 3), phase)
        gather(keys.index(1).slice(HALF, HALF, dim=1), odd_rows, odd_valid, HALF, HALF, LANES)
        if HAS_REST:
            gather(keys_rest.index(1), odd_rows, odd_valid, VALUE, REST, LANES)
        async_copy.mbarrier_arrive(bars.index(FILLED + 3), increment_count=False)
        mbarrier.wait(bars.index(FREED + 1), phase)
        gather(keys.index(0).slice(HALF, HALF, dim=1), even_rows, even_valid, HALF, HALF, LANES)
        if HAS_REST:
            gather(keys_rest.index(0), even_rows, even_valid, VALUE, REST, LANES)
        async_copy.mbarrier_arrive(bars.index(FILLED + 1), increment_count=False)
        mbarrier.wait(bars.index(FREED + 2), phase)
        gather(keys.index(1).slice(0, HALF, dim=1), odd_rows, odd_valid, 0, HALF, LANES)
        async_copy.mbarrier_arrive(bars.index(FILLED + 2), increment_count=False)
        phase = phase ^ 1


@gluon.jit(do_not_specialize=["num_rows", "capacity"])
def attend(
    q,  # bf16 [tokens, heads, VALUE (+ REST)], heads a multiple of 64
    kv,  # bf16 [num_rows, VALUE (+ REST)]
    indices,  # int32 [capacity]
    indptr,  # int32 [tokens + 1]
    sink,  # fp32 [heads]; anything without HAS_SINK
    out,  # bf16 [tokens, heads, VALUE]
    lse,  # fp32 [tokens, heads], natural log
    num_rows,
    capacity,
    head_blocks,
    scale_log2,
    stride_q_token,
    stride_q_head,
    stride_kv_row,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    HAS_REST: gl.constexpr,
    HAS_SINK: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    token = gl.program_id(0) // head_blocks
    first_head = gl.program_id(0) % head_blocks * HEADS
    query = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, VALUE], TILES)
    keys = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, VALUE], TILES)
    right_p = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, TILE], TILES)
    maxima = gl.allocate_shared_memory(gl.float32, [HEADS], FLAT)
    sums = gl.allocate_shared_memory(gl.float32, [2, HEADS], FLAT)
    bars = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    if HAS_REST:
        query_rest = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, REST], TILES)
        keys_rest = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, REST], TILES)
        left_p = keys_rest  # the even tile's rest is free once it was scored
    else:
        left_p = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, TILE], TILES)
        query_rest = query
        keys_rest = keys
    for which in gl.static_range(FILLED, FREED):
        mbarrier.init(bars.index(which), count=128)  # every thread of the producer
    for which in gl.static_range(FREED, QUERY):
        mbarrier.init(bars.index(which), count=1)
    mbarrier.init(bars.index(QUERY), count=2)
    fence_async_shared()
    barrier()

    begin, count = row_range(indptr, token, capacity)
    wide = token.to(gl.int64)
    row = indices + begin
    source = q + wide * stride_q_token + first_head * stride_q_head
    target = out + wide * stride_out_token + first_head * stride_out_head
    sums_to = lse + wide * stride_lse_token + first_head
    drain = sink + first_head
    gl.warp_specialize(
        [
            (left, (query, query_rest, keys, keys_rest, right_p, left_p, maxima, sums, bars, source, row, count, num_rows,
                     scale_log2, target, sums_to, drain, stride_q_head, stride_out_head, HAS_REST, HAS_SINK, False, False)),
            (right, (query, query_rest, keys, keys_rest, right_p, left_p, maxima, sums, bars, source, row, count, num_rows,
                      scale_log2, target, sums_to, drain, stride_q_head, stride_out_head, HAS_REST, HAS_SINK, False, False)),
            (_fill, (keys, keys_rest, bars, row, count, kv, num_rows, stride_kv_row, HAS_REST)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
