"""Sparse attention over bf16 rows on Hopper: a program per multiprocessor takes item (row, 64 heads) after item.

The consumers are seesaw's. A third warpgroup gathers the keys. It also draws the items, from a counter, because
rows differ in length, and fetches an item's queries and first keys while the consumers finish the one before; they
store their sums from registers, so that nothing of an item stays in the way of the next. The last rows come first: of a
prompt they see the most keys, and few programs are busy while the last items are attended.

Floors as in kernels.attend. What bounds it: every program pulls its own keys through the L2, and ``left``'s chain of a
pair. Structure and layouts that Hopper likes were found in a study of Triton's Gluon; what is measured stands in
scripts/results/notes/attention-prefill.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from sparse_attn.device.hopper import barrier, launch_dependents, signal, wait
from sparse_attn.ops.attention.hopper.common import gather, row_range
from sparse_attn.ops.attention.hopper.lazy_rescale import initial_max
from sparse_attn.ops.attention.hopper.seesaw import (
    FILLED,
    FREED,
    HALF,
    HEADS,
    LEFT_MAX,
    PAIR,
    QUERY,
    QUERY_FREED,
    REST,
    TILE,
    VALUE,
    allocate_barriers,
    await_keys,
    finish,
    left_pair,
    name_keys,
    release,
    right_pair,
    score_even,
    score_left,
)


@gluon.jit
def _await_row(work, bars, turn):
    """(token, first head, begin and count of its indices) of the row whose queries the producer brought; token -1:
    none."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(bars[QUERY], turn)
    fence_async_shared()
    token = gl.max(work.index(0).load(ONE), 0)
    first_head = gl.max(work.index(1).load(ONE), 0)
    begin = gl.max(work.index(2).load(ONE), 0)
    return token, first_head, begin, gl.max(work.index(3).load(ONE), 0)


@gluon.jit
def _left_rows(
    query, query_rest, keys, keys_rest, right_p, left_p, maxima, sums, work, bars, indices, num_rows, scale_log2,
    out, lse, sink, stride_out_token, stride_out_head, stride_lse_token, HAS_REST: gl.constexpr, HAS_SINK: gl.constexpr,
):  # fmt: skip
    """The left-hand consumer of row after row. The next row's first scores are under way while this one is stored."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    place = gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([HEADS, TILE], gl.float32, SCORES)
    phase = 0
    turn = 0
    token, first_head, begin, count = _await_row(work, bars, turn)
    zero = count >> 31
    pending = score_even(query, query_rest, keys, keys_rest, bars, zero, phase, nothing, 0, HAS_REST)
    pending = score_even(query, query_rest, keys, keys_rest, bars, zero, phase, pending, 1, HAS_REST)
    slot = name_keys(indices + begin, 0, 0, count, place, True)
    scores = warpgroup_mma_wait(0, deps=(pending,))
    while token >= 0:
        pairs = gl.maximum((count + PAIR - 1) // PAIR, 1)
        acc = gl.zeros([HEADS, HALF], gl.float32, ACC)
        m = gl.full([HEADS], initial_max(scale_log2), gl.float32, ROW)
        l = gl.zeros([HEADS], gl.float32, ROW)
        for i in range(pairs):
            zero = i >> 20
            product, m, l = left_pair(
                scores, slot, acc, m, l, keys, right_p, left_p, maxima, sums, bars, num_rows, scale_log2, zero, phase,
                i + 1 == pairs, HAS_REST, True,
            )  # fmt: skip
            phase = phase ^ 1
            if i + 1 < pairs:
                pending = score_even(query, query_rest, keys, keys_rest, bars, zero, phase, nothing, 0, HAS_REST)
                acc = warpgroup_mma_wait(1 + HAS_REST, deps=(product,))
                release(bars[FREED + 2], True)
                pending = score_even(query, query_rest, keys, keys_rest, bars, zero, phase, pending, 1, HAS_REST)
                ahead = (i + 1) * PAIR
                slot = name_keys(indices + begin, 0, ahead, count - ahead, place, True)
                scores = warpgroup_mma_wait(0, deps=(pending,))
            else:
                acc = warpgroup_mma_wait(0, deps=(product,))
                release(bars[FREED + 2], True)
                scores = nothing
        l = l + sums.index(1).load(ROW)
        wide = token.to(gl.int64)
        target = out + wide * stride_out_token + first_head * stride_out_head
        sums_to = lse + wide * stride_lse_token + first_head
        drain = sink + first_head
        turn = turn ^ 1
        token, first_head, begin, count = _await_row(work, bars, turn)
        zero = count >> 31
        if token >= 0:
            await_keys(bars, 0, phase)
        # Of stale memory after the last row.
        pending = score_left(query, query_rest, keys, keys_rest, zero, nothing, HAS_REST)
        finish(acc, l, m, scale_log2, 0, target, sums_to, None, drain, stride_out_head, HAS_SINK, False, ACC)
        if token >= 0:
            pending = score_even(query, query_rest, keys, keys_rest, bars, zero, phase, pending, 1, HAS_REST)
            slot = name_keys(indices + begin, 0, 0, count, place, True)
            scores = warpgroup_mma_wait(0, deps=(pending,))
        else:
            scores = warpgroup_mma_wait(0, deps=(pending,))


@gluon.jit
def _right_rows(
    query, query_rest, keys, keys_rest, right_p, left_p, maxima, sums, work, bars, indices, num_rows, scale_log2,
    out, sink, stride_out_token, stride_out_head, HAS_REST: gl.constexpr, HAS_SINK: gl.constexpr,
):  # fmt: skip
    """The right-hand consumer of row after row."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    place = gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
    phase = 0
    turn = 0
    token, first_head, begin, count = _await_row(work, bars, turn)
    while token >= 0:
        pairs = gl.maximum((count + PAIR - 1) // PAIR, 1)
        acc = gl.zeros([HEADS, HALF], gl.float32, ACC)
        m = gl.full([HEADS], initial_max(scale_log2), gl.float32, ROW)
        l = gl.zeros([HEADS], gl.float32, ROW)
        for i in range(pairs):
            before = i * PAIR + TILE
            acc, m, l = right_pair(
                indices, begin + before, count - before, place, acc, m, l, query, query_rest, keys, keys_rest, right_p,
                left_p, maxima, sums, bars, num_rows, scale_log2, i >> 20, phase, i + 1 == pairs, HAS_REST, True,
            )  # fmt: skip
            phase = phase ^ 1
        l = l + sums.index(0).load(ROW)
        wide = token.to(gl.int64)
        target = out + wide * stride_out_token + first_head * stride_out_head
        finish(acc, l, m, scale_log2, 1, target, None, None, sink + first_head, stride_out_head, HAS_SINK, False, ACC)
        turn = turn ^ 1
        token, first_head, begin, count = _await_row(work, bars, turn)


@gluon.jit
def _offer_row(work, token, first_head, begin, count):
    """Tell the consumers what they attend next; token -1: nothing."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    work.index(0).store(gl.full([1], token, gl.int32, ONE))
    work.index(1).store(gl.full([1], first_head, gl.int32, ONE))
    work.index(2).store(gl.full([1], begin, gl.int32, ONE))
    work.index(3).store(gl.full([1], count, gl.int32, ONE))


@gluon.jit
def _claim(items, handed_out):
    """The next item that no program has taken. Every program comes once in vain; who comes last leaves a zero
    behind."""
    ticket = gl.atomic_add(handed_out, 1, sem="relaxed").to(gl.int32)
    if ticket == items - 1:
        gl.store(handed_out, 0)
    return ticket + gl.num_programs(0)


@gluon.jit
def _row_and_heads(item, items, head_blocks):
    """(token, first head) of an item, both from the last to the first."""
    behind = items - 1 - item
    token = behind // head_blocks
    return token, (behind - token * head_blocks) * HEADS


@gluon.jit
def _supply(
    query, query_rest, keys, keys_rest, work, bars, q, indices, indptr, handed_out, kv, num_rows, capacity, items,
    head_blocks, stride_q_token, stride_q_head, stride_kv, HAS_REST: gl.constexpr,
):  # fmt: skip
    """The producer: of item after item the queries, then the keys of pair after pair. An item is claimed a pair before
    the last of the one before, and indices are read one pair ahead, so that no wait for keys is one for anything
    else."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    place = gl.arange(0, TILE, layout=gl.SliceLayout(1, LANES))
    everyone = place >= 0
    item = gl.program_id(0)
    token, first_head = _row_and_heads(item, items, head_blocks)
    begin, count = row_range(indptr, token, capacity)
    phase = 1
    turn = 1
    even = gl.load(indices + (begin + place), mask=place < count, other=-1)
    odd = gl.load(indices + (begin + TILE + place), mask=TILE + place < count, other=-1)
    while item < items:
        token, first_head = _row_and_heads(item, items, head_blocks)
        mbarrier.wait(bars[QUERY_FREED], turn)
        turn = turn ^ 1
        zero = count >> 31
        _offer_row(work, token, first_head, begin, count)
        heads = q + token.to(gl.int64) * stride_q_token + (first_head + place) * stride_q_head
        gather(query.index(zero).slice(0, HALF, dim=1), heads, everyone, 0, HALF, LANES)
        gather(query.index(zero).slice(HALF, HALF, dim=1), heads, everyone, HALF, HALF, LANES)
        if HAS_REST:
            gather(query_rest.index(zero), heads, everyone, VALUE, REST, LANES)
        async_copy.mbarrier_arrive(bars[QUERY], increment_count=False)
        signal(bars[QUERY])
        pairs = gl.maximum((count + PAIR - 1) // PAIR, 1)
        next_item = item
        next_begin = begin
        next_count = count
        for i in range(pairs):
            even_valid = (even >= 0) & (even < num_rows)
            odd_valid = (odd >= 0) & (odd < num_rows)
            even_rows = kv + even.to(gl.int64) * stride_kv
            odd_rows = kv + odd.to(gl.int64) * stride_kv
            if i == gl.maximum(pairs - 2, 0):
                next_item = _claim(items, handed_out)
                next_token, _ = _row_and_heads(gl.minimum(next_item, items - 1), items, head_blocks)
                next_begin, next_count = row_range(indptr, next_token, capacity)
                next_count = gl.where(next_item < items, next_count, 0)
            last = i + 1 == pairs
            ahead = gl.where(last, next_begin, begin + (i + 1) * PAIR) + place
            left_over = gl.where(last, next_count, count - (i + 1) * PAIR)
            even = gl.load(indices + ahead, mask=place < left_over, other=-1)
            odd = gl.load(indices + (ahead + TILE), mask=TILE + place < left_over, other=-1)

            mbarrier.wait(bars[FREED], phase)
            gather(keys.index(0).slice(0, HALF, dim=1), even_rows, even_valid, 0, HALF, LANES)
            if HAS_REST:
                gather(keys_rest.index(0), even_rows, even_valid, VALUE, REST, LANES)
            async_copy.mbarrier_arrive(bars[FILLED], increment_count=False)
            mbarrier.wait(bars[FREED + 3], phase)
            gather(keys.index(1).slice(HALF, HALF, dim=1), odd_rows, odd_valid, HALF, HALF, LANES)
            async_copy.mbarrier_arrive(bars[FILLED + 3], increment_count=False)
            mbarrier.wait(bars[FREED + 1], phase)
            gather(keys.index(0).slice(HALF, HALF, dim=1), even_rows, even_valid, HALF, HALF, LANES)
            async_copy.mbarrier_arrive(bars[FILLED + 1], increment_count=False)
            if HAS_REST:  # left's probabilities were read there; told of with the left half
                gather(keys_rest.index(1), odd_rows, odd_valid, VALUE, REST, LANES)
            mbarrier.wait(bars[FREED + 2], phase)
            gather(keys.index(1).slice(0, HALF, dim=1), odd_rows, odd_valid, 0, HALF, LANES)
            async_copy.mbarrier_arrive(bars[FILLED + 2], increment_count=False)
            phase = phase ^ 1
        item = next_item
        begin = next_begin
        count = next_count
    mbarrier.wait(bars[QUERY_FREED], turn)
    _offer_row(work, -1, 0, 0, 0)
    async_copy.mbarrier_arrive(bars[QUERY], increment_count=False)
    signal(bars[QUERY])


@gluon.jit(do_not_specialize=["num_rows", "capacity", "items", "head_blocks", "early"])
def attend(
    q,  # bf16 [tokens, heads, VALUE (+ REST)], heads a multiple of 64
    kv,  # bf16 [num_rows, VALUE (+ REST)]
    indices,  # int32 [capacity]
    indptr,  # int32 [tokens + 1]
    sink,  # fp32 [heads]; anything without HAS_SINK
    out,  # bf16 [tokens, heads, VALUE]
    lse,  # fp32 [tokens, heads], natural log
    handed_out,  # int64 [1], zero before and after
    num_rows,
    capacity,
    items,  # tokens * head_blocks, at least as many as programs
    head_blocks,
    early,  # whether the next launch may start while this one runs
    scale_log2,  # above 0: the largest product gives the largest score
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
    query = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, VALUE], TILES)
    keys = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, VALUE], TILES)
    right_p = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, TILE], TILES)
    maxima = gl.allocate_shared_memory(gl.float32, [HEADS], FLAT)
    sums = gl.allocate_shared_memory(gl.float32, [2, HEADS], FLAT)
    work = gl.allocate_shared_memory(gl.int32, [4, 1], FLAT)
    bars = allocate_barriers()
    if HAS_REST:
        query_rest = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, REST], TILES)
        keys_rest = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, REST], TILES)
        left_p = keys_rest  # the odd tile's rest is free once it was scored
    else:
        left_p = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, TILE], TILES)
        query_rest = query
        keys_rest = keys
    for which in gl.static_range(FILLED, LEFT_MAX):
        mbarrier.init(bars[which], count=128)  # every thread of the producer, or of a consumer
    for which in gl.static_range(LEFT_MAX, QUERY):
        mbarrier.init(bars[which], count=1)
    mbarrier.init(bars[QUERY], count=129)  # and one for what it says of them
    mbarrier.init(bars[QUERY_FREED], count=256)
    fence_async_shared()
    wait()
    if early != 0:
        launch_dependents()
    barrier()
    gl.warp_specialize(
        [
            (_left_rows, (query, query_rest, keys, keys_rest, right_p, left_p, maxima, sums, work, bars, indices, num_rows,
                          scale_log2, out, lse, sink, stride_out_token, stride_out_head, stride_lse_token, HAS_REST,
                          HAS_SINK)),
            (_right_rows, (query, query_rest, keys, keys_rest, right_p, left_p, maxima, sums, work, bars, indices, num_rows,
                           scale_log2, out, sink, stride_out_token, stride_out_head, HAS_REST, HAS_SINK)),
            (_supply, (query, query_rest, keys, keys_rest, work, bars, q, indices, indptr, handed_out, kv, num_rows, capacity,
                       items, head_blocks, stride_q_token, stride_q_head, stride_kv_row, HAS_REST)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
