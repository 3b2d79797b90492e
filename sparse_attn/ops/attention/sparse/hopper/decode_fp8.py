"""Sparse decode over paged fp8 keys on Hopper, of one cache or two: the seesaw's consumers behind two producers.

A CTA takes 64 heads of a row and a range of its tiles: those of the first cache's keys, then those of the second. wg0
and wg1 are the consumers (seesaw.py), wg2 and wg3 dequantise K0 and K1 of every pair (dequant.py). Warps specialise
while the launch before still runs: each warpgroup waits for it and finds its tiles by itself, the consumers while their
queries are under way.

Floor, bytes: a record per valid key and block of heads. What bounds it: three of a pair's four half-tiles are freed
within 1300 cycles, and two producers hold two in registers. The third comes a store and a load's latency later, and
wg1's scores with it. README.md has the schedule, the barriers and the shared-memory map.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from sparse_attn.device.hopper import async_load, barrier, launch_dependents, signal, wait
from sparse_attn.device.triton_private import aggregate
from sparse_attn.ops.attention.sparse.hopper.common import (
    BLOCK_M,
    BLOCK_N,
    D_ROPE,
    D_V,
    KvCache,
    Record,
    RowBounds,
    Scalar,
)
from sparse_attn.ops.attention.sparse.hopper.dequant import dequantise, own_tiles
from sparse_attn.ops.attention.sparse.hopper.lazy_rescale import initial_max
from sparse_attn.ops.attention.sparse.hopper.seesaw import (
    K1L,
    OutputTile,
    allocate,
    qk0_half,
    qk1,
    release,
    store_output,
    wg0_pair,
    wg1_pair,
)

MMA_N = gl.constexpr(128)  # columns of a PV product: four warpgroups have too few registers for 256


@aggregate
class Strides:
    q_token: Scalar
    q_head: Scalar
    out_split: Scalar
    out_token: Scalar
    out_head: Scalar
    lse_split: Scalar
    lse_token: Scalar


@aggregate
class Operands:
    """What the consumers read and write in global memory, as the kernel's arguments of these names."""

    q: gl.tensor
    scale_log2: Scalar
    out: gl.tensor
    lse: gl.tensor
    scales: gl.tensor
    sink: gl.tensor
    strides: Strides
    INF_LSE: gl.constexpr


@gluon.jit
def _load_q(smem, source, stride_head, half: gl.constexpr):
    """Have this warpgroup's half of the queries copied, wg0's with the RoPE columns."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    head = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, WIDE))
    column = gl.arange(0, D_V // 2, layout=gl.SliceLayout(0, WIDE)) + half * (D_V // 2)
    into = smem.q.index(0).slice(half * (D_V // 2), D_V // 2, dim=1)
    async_load(into, source + gl.expand_dims(head * stride_head, 1) + gl.expand_dims(column, 0))
    if smem.HAS_ROPE and half == 0:
        NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        head_r = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, NARROW))
        column_r = gl.arange(0, D_ROPE, layout=gl.SliceLayout(0, NARROW)) + D_V
        async_load(smem.q_rope.index(0), source + gl.expand_dims(head_r * stride_head, 1) + gl.expand_dims(column_r, 0))
    async_copy.commit_group()


@gluon.jit
def _wait_q(bars):
    """This warpgroup's half, then the other one's."""
    # Own copies have landed; the fence shows them to the matrix unit.
    async_copy.wait_group(0)
    fence_async_shared()
    # q_full counts both warpgroups: each scores with all columns.
    signal(bars.q_full)
    mbarrier.wait(bars.q_full, 0)


@gluon.jit
def _wg0(smem, bars, pairs, scale_log2, to, split, HAS_SINK: gl.constexpr):
    """wg0 over the pairs of a row, whose queries are under way."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MMA_N, 16])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    KEYS: gl.constexpr = gl.SliceLayout(0, SCORES)
    _wait_q(bars)
    acc = gl.zeros([BLOCK_M, D_V // 2], gl.float32, ACC)
    m = gl.full([BLOCK_M], initial_max(scale_log2), gl.float32, ROW)
    l = gl.zeros([BLOCK_M], gl.float32, ROW)
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    # Scores of the first pair's K0.
    phase = 0
    pending = qk0_half(smem, bars, 0, phase, nothing, 0)
    pending = qk0_half(smem, bars, 0, phase, pending, 1)
    scores = warpgroup_mma_wait(0, deps=(pending,))
    for i in range(pairs):
        zero = i >> 20
        # The producer stores which keys are valid before it signals K0l.
        kv_valid = smem.kv_valid.index(0).load(KEYS) != 0
        pv1, m, l = wg0_pair(scores, kv_valid, acc, m, l, smem, bars, scale_log2, zero, phase, False, False)
        phase = phase ^ 1
        # The next pair's K0l is scored beside P1 V1l.
        if i + 1 < pairs:
            pending = qk0_half(smem, bars, zero, phase, nothing, 0)
            # Scores of K0l, and of RoPE columns, may be pending: P1 V1l is older, and done.
            acc = warpgroup_mma_wait(1 + smem.HAS_ROPE, deps=(pv1,))
            release(bars.k_empty[K1L], False)
            pending = qk0_half(smem, bars, zero, phase, pending, 1)
            scores = warpgroup_mma_wait(0, deps=(pending,))
        # The last pair: no producer waits for K1l any more.
        else:
            acc = warpgroup_mma_wait(0, deps=(pv1,))
            scores = nothing
    # Both sums are relative to the same maximum. wg1's came with its last p1_full.
    l = l + smem.row_sum.index(1).load(ROW)
    store_output(acc, l, m, scale_log2, to, 0, HAS_SINK, split)


@gluon.jit
def _wg1(smem, bars, pairs, scale_log2, to, split, HAS_SINK: gl.constexpr):
    """wg1 over the pairs of a row, whose queries are under way."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MMA_N, 16])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    KEYS: gl.constexpr = gl.SliceLayout(0, SCORES)
    _wait_q(bars)
    acc = gl.zeros([BLOCK_M, D_V // 2], gl.float32, ACC)
    m = gl.full([BLOCK_M], initial_max(scale_log2), gl.float32, ROW)
    l = gl.zeros([BLOCK_M], gl.float32, ROW)
    phase = 0
    for i in range(pairs):
        zero = i >> 20
        # kv_valid came with K1r, which qk1 has awaited.
        pending = qk1(smem, bars, zero, phase)
        kv_valid = smem.kv_valid.index(1).load(KEYS)
        scores = warpgroup_mma_wait(0, deps=(pending,))
        acc, m, l = wg1_pair(scores, kv_valid != 0, acc, m, l, m, smem, bars, scale_log2, zero, phase, False, False)
        phase = phase ^ 1
    # wg0's sum came with its last p0_full.
    l = l + smem.row_sum.index(0).load(ROW)
    store_output(acc, l, m, scale_log2, to, 1, HAS_SINK, split)


@gluon.jit
def _consume(
    rows, smem, bars, operands, launch_early, half: gl.constexpr, HAS_EXTRA_CACHE: gl.constexpr, HAS_SINK: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """The consumer of one half of the value's columns, wg0 or wg1."""
    head_blocks = rows.head_blocks
    strides = operands.strides
    token = (gl.program_id(0) // head_blocks).to(gl.int64)
    first_head = gl.program_id(0) % head_blocks * BLOCK_M
    # PDL: the launch before may still write the queries and indices.
    wait()
    if half == 0:
        if launch_early != 0:
            launch_dependents()
    _load_q(smem, operands.q + token * strides.q_token + first_head * strides.q_head, strides.q_head, half)
    tiles = own_tiles(rows, HAS_EXTRA_CACHE, SPLIT)
    # A step with a tail wave has one kernel for both parts: the grid says which this is.
    if SPLIT is None:
        is_split = gl.num_programs(1) > 1
    else:
        is_split: gl.constexpr = SPLIT
    # A CTA without tiles has one pair of masked keys, so that its partial is defined.
    pairs = gl.maximum((tiles.end - tiles.start + 1) // 2, 1)
    # Partials of a split lie one after the other; a whole row is split 0.
    split = gl.program_id(1).to(gl.int64)
    out = operands.out + split * strides.out_split + token * strides.out_token + first_head * strides.out_head
    head = split * strides.lse_split + token * strides.lse_token + first_head
    scales = operands.scales + 2 * head
    to = OutputTile(
        out, operands.lse + head, scales, operands.sink + first_head, strides.out_head, operands.INF_LSE
    )  # fmt: skip
    if half == 0:
        _wg0(smem, bars, pairs, operands.scale_log2, to, is_split, HAS_SINK)
    else:
        _wg1(smem, bars, pairs, operands.scale_log2, to, is_split, HAS_SINK)


@gluon.jit(
    do_not_specialize=[
        "num_slots", "block_size", "capacity", "extra_num_slots", "extra_block_size", "extra_capacity",
        "stride_cache_block", "stride_extra_block", "head_blocks", "launch_early",
    ],
    do_not_specialize_on_alignment=["indptr", "lengths", "extra_indptr", "extra_lengths"],  # of some rows of a step
)  # fmt: skip
def attend(
    q,  # bf16 [tokens, heads, D_V], interleaved: D_V + D_ROPE; heads a multiple of BLOCK_M
    cache,  # uint8 [num_blocks, block_size, row]
    indices,  # int32 [capacity]
    indptr,  # int32 [tokens + 1]
    lengths,  # int32 [tokens] or None: so many indices of a row count, the first ones
    extra_cache,  # the second cache, of the same layout, and its indices; anything without HAS_EXTRA_CACHE
    extra_indices,
    extra_indptr,
    extra_lengths,
    sink,  # fp32 [heads]; anything without HAS_SINK
    out,  # bf16 [tokens, heads, D_V]; fp16 partials [splits, tokens, heads, D_V] of split rows, by a bf16 pointer
    lse,  # fp32 [tokens, heads], natural log; [splits, tokens, heads], base 2
    scales,  # fp32 [splits, tokens, heads, 2], of both halves of the columns; anything where no rows are split
    num_slots,
    block_size,
    capacity,
    extra_num_slots,
    extra_block_size,
    extra_capacity,
    head_blocks,
    launch_early,  # whether the next launch may start while this one runs
    scale_log2,  # above 0: the largest product gives the largest score
    stride_q_token,
    stride_q_head,
    stride_cache_block,  # in LOAD_BYTES
    stride_extra_block,
    stride_out_split,
    stride_out_token,
    stride_out_head,
    stride_lse_split,
    stride_lse_token,
    LATENT: gl.constexpr,  # codes of a record
    GROUP: gl.constexpr,
    TOKEN: gl.constexpr,  # bytes from record to record
    SCALES: gl.constexpr,  # planar: bytes of a token's scales, behind a block's records; else 0
    ROPE_OFFSET: gl.constexpr,  # byte of a record where its bf16 values start
    PADDED_BLOCKS: gl.constexpr,  # slots do not follow each other through the whole cache
    HAS_EXTRA_CACHE: gl.constexpr,
    HAS_SINK: gl.constexpr,
    SPLIT: gl.constexpr,  # whether CTAs share a row; None: by the grid, for a step with a tail wave
    INF_LSE: gl.constexpr,  # as normalise takes it
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    PLANAR: gl.constexpr = SCALES > 0
    smem, bars = allocate(not PLANAR, False, False)
    # Full barriers count a signal, and copies of bf16 values where a half has them.
    for tile in gl.static_range(2):
        for half in gl.static_range(2):
            # A producer's signal, and where there are bf16 values each of its threads' copies.
            mbarrier.init(bars.k_full[2 * tile + half], count=129 if (half == 1) == PLANAR else 1)
    # Consumers signal by one thread: a barrier of their warpgroup stands before.
    for which in gl.static_range(4):
        mbarrier.init(bars.k_empty[which], count=1)
    mbarrier.init(bars.max0_full, count=1)
    mbarrier.init(bars.max1_full, count=1)
    mbarrier.init(bars.p0_full, count=1)
    mbarrier.init(bars.p1_full, count=1)
    mbarrier.init(bars.q_full, count=2)
    fence_async_shared()
    barrier()
    # No wait for the launch before: each warpgroup waits by itself.
    rows = RowBounds(indptr, extra_indptr, capacity, extra_capacity, head_blocks, lengths, extra_lengths)
    strides = Strides(
        stride_q_token,
        stride_q_head,
        stride_out_split,
        stride_out_token,
        stride_out_head,
        stride_lse_split,
        stride_lse_token,
    )
    operands = Operands(q, scale_log2, out, lse, scales, sink, strides, INF_LSE)
    kv = KvCache(cache, indices, num_slots, block_size, stride_cache_block)
    extra_kv = KvCache(extra_cache, extra_indices, extra_num_slots, extra_block_size, stride_extra_block)
    record = Record(LATENT, GROUP, TOKEN, SCALES, ROPE_OFFSET, PLANAR, PADDED_BLOCKS)
    # The default partition is wg0; its registers are what the others leave.
    gl.warp_specialize(
        [
            (_consume, (rows, smem, bars, operands, launch_early, 0, HAS_EXTRA_CACHE, HAS_SINK, SPLIT)),
            (_consume, (rows, smem, bars, operands, launch_early, 1, HAS_EXTRA_CACHE, HAS_SINK, SPLIT)),
            (dequantise, (rows, smem, bars, kv, extra_kv, record, 0, HAS_EXTRA_CACHE, SPLIT)),
            (dequantise, (rows, smem, bars, kv, extra_kv, record, 1, HAS_EXTRA_CACHE, SPLIT)),
        ],
        [4, 4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
