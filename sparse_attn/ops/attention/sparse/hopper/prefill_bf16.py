"""Sparse attention over bf16 rows on Hopper: persistent CTAs, one an SM, draw work tiles (a row, 64 heads).

wg0 and wg1 are the seesaw's consumers (seesaw.py). wg2 is the producer: it gathers keys, and draws work tiles from a
counter in global memory, because rows differ in length. It loads a work tile's queries and first keys while the
consumers finish the one before. They store their accumulators from registers, so that nothing of a work tile stays in
the way of the next. The last rows come first: of a prompt they see the most keys, and few CTAs are busy while the last
work tiles are attended.

Floors as in portable/kernels.py. What bounds it: every CTA pulls its own keys through the L2, and wg0's chain of a
pair. README.md has the schedule, the barriers and the shared-memory map. What was measured stands in
scripts/results/notes/attention-prefill.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from sparse_attn.device.hopper import barrier, launch_dependents, signal, wait
from sparse_attn.device.triton_private import aggregate
from sparse_attn.ops.attention.sparse.hopper.common import BLOCK_M, BLOCK_N, D_ROPE, D_V, Scalar, gather, row_range
from sparse_attn.ops.attention.sparse.hopper.lazy_rescale import initial_max
from sparse_attn.ops.attention.sparse.hopper.seesaw import (
    K0L,
    K0R,
    K1L,
    K1R,
    OutputTile,
    allocate,
    half_of,
    largest_product,
    qk0_half,
    qk0_left,
    qk1,
    release,
    store_output,
    wait_k,
    wg0_pair,
    wg1_pair,
)


@aggregate
class WorkTile:
    """64 heads of a row, and where the row's indices lie. token -1: there is no work left."""

    token: Scalar
    first_head: Scalar
    begin: Scalar
    count: Scalar


@aggregate
class Outputs:
    """What the consumers read and write in global memory, as the kernel's arguments of these names."""

    indices: gl.tensor
    num_rows: Scalar
    scale_log2: Scalar
    out: gl.tensor
    lse: gl.tensor
    sink: gl.tensor
    stride_out_token: Scalar
    stride_out_head: Scalar
    stride_lse_token: Scalar
    max_logits: Scalar  # None without smem.HAS_MAX
    INF_LSE: gl.constexpr


@aggregate
class Inputs:
    """What the producer reads in global memory, as the kernel's arguments of these names."""

    q: gl.tensor
    indices: gl.tensor
    indptr: gl.tensor
    tile_counter: gl.tensor
    kv: gl.tensor
    num_rows: Scalar
    capacity: Scalar
    num_work_tiles: Scalar
    head_blocks: Scalar
    stride_q_token: Scalar
    stride_q_head: Scalar
    stride_kv_row: Scalar
    lengths: Scalar


@gluon.jit
def _load_slots(indices, first, count, key):
    """Indices of a tile's keys from ``first`` on, of which ``count`` are the row's; -1 for others."""
    return gl.load(indices + (first + key), mask=key < count, other=-1)


@gluon.jit
def _in_rows(slot, num_rows):
    return (slot >= 0) & (slot < num_rows)


@gluon.jit
def _wait_work_tile(smem, bars, phase):
    """The WorkTile whose queries the producer has loaded."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    # q_full covers work_tile and the queries, which the matrix unit reads.
    mbarrier.wait(bars.q_full, phase)
    fence_async_shared()
    token = gl.max(smem.work_tile.index(0).load(ONE), 0)
    first_head = gl.max(smem.work_tile.index(1).load(ONE), 0)
    begin = gl.max(smem.work_tile.index(2).load(ONE), 0)
    return WorkTile(token, first_head, begin, gl.max(smem.work_tile.index(3).load(ONE), 0))


@gluon.jit
def _publish_work_tile(smem, token, first_head, begin, count):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    smem.work_tile.index(0).store(gl.full([1], token, gl.int32, ONE))
    smem.work_tile.index(1).store(gl.full([1], first_head, gl.int32, ONE))
    smem.work_tile.index(2).store(gl.full([1], begin, gl.int32, ONE))
    smem.work_tile.index(3).store(gl.full([1], count, gl.int32, ONE))


@gluon.jit
def _wg0(smem, bars, outputs, HAS_SINK: gl.constexpr):
    """wg0 over work tiles. The next one's first scores are under way while this one is stored."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    indices = outputs.indices
    num_rows = outputs.num_rows
    scale_log2 = outputs.scale_log2
    key = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    # Phases of half-tiles flip with every pair, those of queries with every work tile.
    phase = 0
    q_phase = 0
    work = _wait_work_tile(smem, bars, q_phase)
    # A zero that the compiler does not know: see seesaw.py.
    zero = work.count >> 31
    # Scores of the first pair's K0; later ones begin at the end of the pair before.
    pending = qk0_half(smem, bars, zero, phase, nothing, 0)
    pending = qk0_half(smem, bars, zero, phase, pending, 1)
    slot = _load_slots(indices + work.begin, 0, work.count, key)
    scores = warpgroup_mma_wait(0, deps=(pending,))
    while work.token >= 0:
        # A row without keys has one pair, all masked: barriers are served alike.
        pairs = gl.maximum((work.count + 2 * BLOCK_N - 1) // (2 * BLOCK_N), 1)
        acc = gl.zeros([BLOCK_M, D_V // 2], gl.float32, ACC)
        m = gl.full([BLOCK_M], initial_max(scale_log2), gl.float32, ROW)
        l = gl.zeros([BLOCK_M], gl.float32, ROW)
        if smem.HAS_MAX:
            largest = gl.full([BLOCK_M], -float("inf"), gl.float32, ROW)
        for i in range(pairs):
            zero = i >> 20
            last = i + 1 == pairs
            # Keys of K0: indices that name no row are masked.
            kv_valid = _in_rows(slot, num_rows)
            if smem.HAS_MAX:
                largest = largest_product(largest, scores, kv_valid)
            # From here on P1 V1l is under way; the pair's softmax and other products are done.
            pv1, m, l = wg0_pair(scores, kv_valid, acc, m, l, smem, bars, scale_log2, zero, phase, last, True)
            phase = phase ^ 1
            if i + 1 < pairs:
                # The next pair's K0l is scored beside P1 V1l.
                pending = qk0_half(smem, bars, zero, phase, nothing, 0)
                # Scores of K0l, and of RoPE columns, may be pending: P1 V1l is older, and done.
                acc = warpgroup_mma_wait(1 + smem.HAS_ROPE, deps=(pv1,))
                release(bars.k_empty[K1L], True)
                pending = qk0_half(smem, bars, zero, phase, pending, 1)
                first = (i + 1) * (2 * BLOCK_N)
                slot = _load_slots(indices + work.begin, first, work.count - first, key)
                scores = warpgroup_mma_wait(0, deps=(pending,))
            else:
                # The last pair: nothing more to score, so that acc is final.
                acc = warpgroup_mma_wait(0, deps=(pv1,))
                release(bars.k_empty[K1L], True)
                scores = nothing
        # wg1 has stored its sum before the last p1_full, which wg0_pair awaited.
        l = l + smem.row_sum.index(1).load(ROW)
        token = work.token.to(gl.int64)
        out = outputs.out + token * outputs.stride_out_token + work.first_head * outputs.stride_out_head
        lse = outputs.lse + token * outputs.stride_lse_token + work.first_head
        to = OutputTile(out, lse, None, outputs.sink + work.first_head, outputs.stride_out_head, outputs.INF_LSE)
        # wg0 stores rows' largest products for both: those of wg1 came with its sum.
        if smem.HAS_MAX:
            largest = gl.maximum(largest, smem.row_largest.load(ROW)) * (scale_log2 * 0.6931471805599453)
            max_at = outputs.max_logits + token * outputs.stride_lse_token + work.first_head
            gl.store(max_at + gl.arange(0, BLOCK_M, layout=ROW), largest)
        q_phase = q_phase ^ 1
        work = _wait_work_tile(smem, bars, q_phase)
        zero = work.count >> 31
        # Its first scores run on the matrix unit while this row's output is stored.
        if work.token >= 0:
            wait_k(bars, K0L, phase)
        pending = qk0_left(smem, zero, nothing)  # of stale memory after the last work tile
        store_output(acc, l, m, scale_log2, to, 0, HAS_SINK, False)
        # The rest of its first scores, as before the loop.
        if work.token >= 0:
            pending = qk0_half(smem, bars, zero, phase, pending, 1)
            slot = _load_slots(indices + work.begin, 0, work.count, key)
            scores = warpgroup_mma_wait(0, deps=(pending,))
        else:
            scores = warpgroup_mma_wait(0, deps=(pending,))


@gluon.jit
def _wg1(smem, bars, outputs, HAS_SINK: gl.constexpr):
    """wg1 over work tiles."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    scale_log2 = outputs.scale_log2
    key = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    phase = 0
    q_phase = 0
    work = _wait_work_tile(smem, bars, q_phase)
    while work.token >= 0:
        pairs = gl.maximum((work.count + 2 * BLOCK_N - 1) // (2 * BLOCK_N), 1)
        acc = gl.zeros([BLOCK_M, D_V // 2], gl.float32, ACC)
        m = gl.full([BLOCK_M], initial_max(scale_log2), gl.float32, ROW)
        l = gl.zeros([BLOCK_M], gl.float32, ROW)
        largest = m
        if smem.HAS_MAX:
            largest = gl.full([BLOCK_M], -float("inf"), gl.float32, ROW)
        for i in range(pairs):
            first = i * (2 * BLOCK_N) + BLOCK_N
            zero = i >> 20
            last = i + 1 == pairs
            # Score K1, and load its indices meanwhile.
            pending = qk1(smem, bars, zero, phase)
            slot = _load_slots(outputs.indices, work.begin + first, work.count - first, key)
            scores = warpgroup_mma_wait(0, deps=(pending,))
            kv_valid = _in_rows(slot, outputs.num_rows)
            if smem.HAS_MAX:
                largest = largest_product(largest, scores, kv_valid)
            acc, m, l = wg1_pair(scores, kv_valid, acc, m, l, largest, smem, bars, scale_log2, zero, phase, last, True)
            phase = phase ^ 1
        # wg0 has stored its sum before the last p0_full.
        l = l + smem.row_sum.index(0).load(ROW)
        token = work.token.to(gl.int64)
        out = outputs.out + token * outputs.stride_out_token + work.first_head * outputs.stride_out_head
        to = OutputTile(out, None, None, outputs.sink + work.first_head, outputs.stride_out_head, outputs.INF_LSE)
        store_output(acc, l, m, scale_log2, to, 1, HAS_SINK, False)
        q_phase = q_phase ^ 1
        work = _wait_work_tile(smem, bars, q_phase)


@gluon.jit
def _next_work_tile(inputs):
    """The tile scheduler: the next work tile that no CTA has drawn. Every CTA draws once in vain; who draws last leaves
    a zero behind."""
    # The first tickets go to tiles behind those that CTAs begin with, one each.
    ticket = gl.atomic_add(inputs.tile_counter, 1, sem="relaxed").to(gl.int32)
    # Every work tile leads to one draw, so that the last ticket is known.
    if ticket == inputs.num_work_tiles - 1:
        gl.store(inputs.tile_counter, 0)
    return ticket + gl.num_programs(0)


@gluon.jit
def _row_and_heads(inputs, work_tile):
    """(token, first head) of a work tile, both from the last to the first."""
    # The last rows first: with a causal mask they have the most keys.
    reverse = inputs.num_work_tiles - 1 - work_tile
    token = reverse // inputs.head_blocks
    return token, (reverse - token * inputs.head_blocks) * BLOCK_M


@gluon.jit
def _load(smem, bars, inputs):
    """The producer: of each work tile the queries, then the keys of pair after pair. A work tile is drawn a pair before
    the last of the one before, and indices are read one pair ahead, so that no wait for keys is one for anything
    else."""
    # Eight threads copy a row, 16 bytes each at a time; a warp has four rows.
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    indices = inputs.indices
    num_work_tiles = inputs.num_work_tiles
    key = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, ROWS))
    all_heads = key >= 0
    work_tile = gl.program_id(0)
    token, first_head = _row_and_heads(inputs, work_tile)
    begin, count = row_range(inputs.indptr, inputs.lengths, token, inputs.capacity)
    # Waits for phase 1 pass at first: every buffer starts empty.
    phase = 1
    q_phase = 1
    slot0 = _load_slots(indices, begin, count, key)
    slot1 = gl.load(indices + (begin + BLOCK_N + key), mask=BLOCK_N + key < count, other=-1)
    while work_tile < num_work_tiles:
        token, first_head = _row_and_heads(inputs, work_tile)
        # Consumers have scored the work tile before: Q and work_tile may be overwritten.
        mbarrier.wait(bars.q_empty, q_phase)
        q_phase = q_phase ^ 1
        zero = count >> 31
        _publish_work_tile(smem, token, first_head, begin, count)
        heads = inputs.q + token.to(gl.int64) * inputs.stride_q_token + (first_head + key) * inputs.stride_q_head
        gather(half_of(smem.q.index(zero), 0), heads, all_heads, 0, D_V // 2, ROWS)
        gather(half_of(smem.q.index(zero), 1), heads, all_heads, D_V // 2, D_V // 2, ROWS)
        if smem.HAS_ROPE:
            gather(smem.q_rope.index(zero), heads, all_heads, D_V, D_ROPE, ROWS)
        # Each thread arrives once its copies have landed, and one signals that work_tile is stored.
        async_copy.mbarrier_arrive(bars.q_full, increment_count=False)
        signal(bars.q_full)
        pairs = gl.maximum((count + 2 * BLOCK_N - 1) // (2 * BLOCK_N), 1)
        next_work_tile = work_tile
        next_begin = begin
        next_count = count
        for i in range(pairs):
            # Addresses of this pair, from indices that were loaded during the one before.
            kv_valid0 = _in_rows(slot0, inputs.num_rows)
            kv_valid1 = _in_rows(slot1, inputs.num_rows)
            rows0 = inputs.kv + slot0.to(gl.int64) * inputs.stride_kv_row
            rows1 = inputs.kv + slot1.to(gl.int64) * inputs.stride_kv_row
            # Draw a pair before the last, so that the counter's latency is hidden.
            if i == gl.maximum(pairs - 2, 0):
                next_work_tile = _next_work_tile(inputs)
                # The drawn tile may not exist: its range is then read at the last one's place, and counted as empty.
                next_token, _ = _row_and_heads(inputs, gl.minimum(next_work_tile, num_work_tiles - 1))
                next_begin, next_count = row_range(inputs.indptr, inputs.lengths, next_token, inputs.capacity)
                next_count = gl.where(next_work_tile < num_work_tiles, next_count, 0)
            # The next pair's indices, or with the last pair those of the next work tile's first.
            last = i + 1 == pairs
            ahead = gl.where(last, next_begin, begin + (i + 1) * (2 * BLOCK_N)) + key
            left = gl.where(last, next_count, count - (i + 1) * (2 * BLOCK_N))
            slot0 = gl.load(indices + ahead, mask=key < left, other=-1)
            slot1 = gl.load(indices + (ahead + BLOCK_N), mask=BLOCK_N + key < left, other=-1)

            # Half-tiles in the order in which consumers free them. K0's RoPE columns are full with K0l.
            mbarrier.wait(bars.k_empty[K0L], phase)
            gather(half_of(smem.k.index(0), 0), rows0, kv_valid0, 0, D_V // 2, ROWS)
            if smem.HAS_ROPE:
                gather(smem.k_rope.index(0), rows0, kv_valid0, D_V, D_ROPE, ROWS)
            async_copy.mbarrier_arrive(bars.k_full[K0L], increment_count=False)
            # K1r: wg1 scores it first.
            mbarrier.wait(bars.k_empty[K1R], phase)
            gather(half_of(smem.k.index(1), 1), rows1, kv_valid1, D_V // 2, D_V // 2, ROWS)
            async_copy.mbarrier_arrive(bars.k_full[K1R], increment_count=False)
            # K0r's end is also P0's, which lies where K1's RoPE columns go.
            mbarrier.wait(bars.k_empty[K0R], phase)
            gather(half_of(smem.k.index(0), 1), rows0, kv_valid0, D_V // 2, D_V // 2, ROWS)
            async_copy.mbarrier_arrive(bars.k_full[K0R], increment_count=False)
            if smem.HAS_ROPE:  # P0 was read there; full with the left half
                gather(smem.k_rope.index(1), rows1, kv_valid1, D_V, D_ROPE, ROWS)
            # K1l comes last: wg0 frees it after P1 V1l.
            mbarrier.wait(bars.k_empty[K1L], phase)
            gather(half_of(smem.k.index(1), 0), rows1, kv_valid1, 0, D_V // 2, ROWS)
            async_copy.mbarrier_arrive(bars.k_full[K1L], increment_count=False)
            phase = phase ^ 1
        work_tile = next_work_tile
        begin = next_begin
        count = next_count
    # A work tile of token -1 ends the consumers.
    mbarrier.wait(bars.q_empty, q_phase)
    _publish_work_tile(smem, -1, 0, 0, 0)
    async_copy.mbarrier_arrive(bars.q_full, increment_count=False)
    signal(bars.q_full)


@gluon.jit(do_not_specialize=["num_rows", "capacity", "num_work_tiles", "head_blocks", "launch_early"])
def attend(
    q,  # bf16 [tokens, heads, D_V (+ D_ROPE)], heads a multiple of BLOCK_M
    kv,  # bf16 [num_rows, D_V (+ D_ROPE)]
    indices,  # int32 [capacity]
    indptr,  # int32 [tokens + 1]
    lengths,  # int32 [tokens] or None: so many indices of a row count, the first ones
    sink,  # fp32 [heads]; anything without HAS_SINK
    out,  # bf16 [tokens, heads, D_V]
    lse,  # fp32 [tokens, heads], natural log
    max_logits,  # None, or as lse: a row's largest scaled score
    tile_counter,  # int64 [1], zero before and after
    num_rows,
    capacity,
    num_work_tiles,  # tokens * head_blocks, at least as many as CTAs
    head_blocks,
    launch_early,  # whether the next launch may start while this one runs
    scale_log2,  # above 0: the largest product gives the largest score
    stride_q_token,
    stride_q_head,
    stride_kv_row,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    HAS_ROPE: gl.constexpr,
    HAS_SINK: gl.constexpr,
    INF_LSE: gl.constexpr,  # as normalise takes it
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    smem, bars = allocate(HAS_ROPE, True, max_logits is not None)
    # k_full counts threads of wg2, k_empty those of the consumer that frees.
    for which in gl.static_range(4):  # every thread of the producer, or of a consumer
        mbarrier.init(bars.k_full[which], count=128)
    for which in gl.static_range(4):
        mbarrier.init(bars.k_empty[which], count=128)
    # Signals between the consumers are of one thread each.
    mbarrier.init(bars.max0_full, count=1)
    mbarrier.init(bars.max1_full, count=1)
    mbarrier.init(bars.p0_full, count=1)
    mbarrier.init(bars.p1_full, count=1)
    mbarrier.init(bars.q_full, count=129)  # every thread of the producer, and its signal
    mbarrier.init(bars.q_empty, count=256)  # every thread of both consumers
    fence_async_shared()
    # PDL: global memory of the launch before may be read from here on.
    wait()
    if launch_early != 0:
        launch_dependents()
    barrier()
    outputs = Outputs(
        indices, num_rows, scale_log2, out, lse, sink, stride_out_token, stride_out_head, stride_lse_token, max_logits,
        INF_LSE,
    )  # fmt: skip
    inputs = Inputs(
        q, indices, indptr, tile_counter, kv, num_rows, capacity, num_work_tiles, head_blocks, stride_q_token,
        stride_q_head, stride_kv_row, lengths,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_wg0, (smem, bars, outputs, HAS_SINK)),
            (_wg1, (smem, bars, outputs, HAS_SINK)),
            (_load, (smem, bars, inputs)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
