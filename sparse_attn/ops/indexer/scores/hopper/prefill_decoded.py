"""Index scores over contiguous MXFP4 keys on Hopper that decode_mxfp4.py has decoded: prefill.py's loop, of e5m2
operands. See mxfp4.py and README.md.

Two warps decode query blocks, one ahead of the consumers. Tiles whose groups lie further apart than operands hold get
scores that mean nothing; prefill_mxfp4.py overwrites them.

Floor and predicted bound: prefill.py's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sparse_attn.device.hopper import async_load, barrier, signal, wait
from sparse_attn.device.triton_private import aggregate, reinterpret
from sparse_attn.ops.indexer.scores.hopper.common import Q_STAGES, Scalar, allocate_barriers, products, ring
from sparse_attn.ops.indexer.scores.hopper.mxfp4 import CHUNK, decode, query_tables, weight_factor, words_layout
from sparse_attn.ops.indexer.scores.hopper.prefill import (
    Ranges,
    Shared,
    consumer,
    count_blocks,
    find_run,
    producer,
    tiles_of,
)

LINEAR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@aggregate
class Packed:
    """A query block as it came, in shared memory: codes of CHUNK columns at a time, scales, weights."""

    codes: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor


@aggregate
class Queries:
    """MXFP4 queries in global memory. codes: int32 words, a row's codes of all heads, then their scales."""

    codes: gl.tensor
    weights: gl.tensor
    stride_row: Scalar
    stride_weights_row: Scalar
    stride_weights_head: Scalar
    HEADS: gl.constexpr


@gluon.jit
def _places():
    """Head, group and word of CHUNK columns of codes, int32 [CHUNK, 4 groups, 4 words] in two warps."""
    WORDS: gl.constexpr = words_layout(CHUNK, True, True)
    head = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, WORDS)))
    return head, group, word


@gluon.jit
def _copy(packed, queries, first_row, rows):
    """Start to copy the query block that begins at ``first_row``; behind the last of ``rows`` that row again."""
    CHUNKS: gl.constexpr = packed.codes.shape[0]
    # CHUNK columns at a time, whose heads follow each other in a row.
    HEADS: gl.constexpr = queries.HEADS
    COLUMN: gl.constexpr = gl.BlockedLayout([CHUNKS * CHUNK // 64], [32], [2], [0])
    head, group, word = _places()
    place = gl.expand_dims(gl.expand_dims(head * 16, 1) + gl.expand_dims(group * 4, 0), 2)
    place = place + gl.expand_dims(gl.expand_dims(word, 0), 0)
    for n in range(CHUNKS):
        row = gl.minimum(first_row + n * CHUNK // HEADS, rows - 1).to(gl.int64)
        codes = queries.codes + row * queries.stride_row + n * CHUNK % HEADS * 16
        async_load(packed.codes.index(n), codes + place)
    # Scales and weights of all columns. Rows behind the last are read, but not stored.
    column = gl.arange(0, CHUNKS * CHUNK, layout=COLUMN)
    row, head = gl.minimum(first_row + column // HEADS, rows - 1).to(gl.int64), column % HEADS
    scales = queries.codes + row * queries.stride_row + HEADS * 16
    async_load(packed.scales, scales + head)
    weights = queries.weights + row * queries.stride_weights_row
    async_load(packed.weights, weights + head * queries.stride_weights_head)
    async_copy.commit_group()


@gluon.jit
def _decode(packed, operands, half_weights, far):
    """Write a query block's operands and weights, as prepare does, and 1 to ``far`` where some head does not fit."""
    CHUNKS: gl.constexpr = packed.codes.shape[0]
    OPERANDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    head, group, _ = _places()
    operands = reinterpret(operands, gl.int32, [CHUNKS, CHUNK, 32], OPERANDS)
    half_weights = reinterpret(half_weights, gl.float32, [CHUNKS, CHUNK], LINEAR)
    all_scales = reinterpret(packed.scales, gl.int32, [CHUNKS, CHUNK], LINEAR)
    all_weights = reinterpret(packed.weights, gl.float32, [CHUNKS, CHUNK], LINEAR)
    # CHUNK columns at a time: codes fit registers of two warps.
    for n in range(CHUNKS):
        words = packed.codes.index(n).load(words_layout(CHUNK, True, True))
        scales = all_scales.index(n).load(head.type.layout)
        low, high, highest, folded = query_tables(scales, group)
        # Operand, and half the weight times the head's highest scale.
        operands.index(n).store(decode(words, low, high))
        half_weights.index(n).store(0.5 * all_weights.index(n).load(head.type.layout) * weight_factor(highest))
        gl.store(far + head * 0, 1, mask=folded == 0)


@gluon.jit
def _preparer(shared, bars, packed, queries, far, ranges, run, BLOCK_Q: gl.constexpr):
    """Bring a query block, decoded."""
    # Each CTA has a word of its own, so that nobody has to clear it before.
    far += gl.program_id(0)
    gl.store(far, 0)
    done, blocks_done = 0, 0
    skip = run.skip
    for query_block in range(run.first, run.last):
        # As the producer counts: the same query blocks in the same stages.
        _, tiles = tiles_of(ranges, query_block, BLOCK_Q)
        own = gl.maximum(gl.minimum(tiles - skip, run.count - done), 0)
        if own > 0:
            # Copies are under way while consumers finish the query block that was here.
            _copy(packed, queries, query_block * BLOCK_Q, ranges.rows)
            q_stage, phase = ring(blocks_done, Q_STAGES)
            mbarrier.wait(bars.q_empty.index(q_stage), phase ^ 1)
            async_copy.wait_group(0)
            # Both warps' copies are there.
            barrier()
            _decode(packed, shared.queries.index(q_stage), shared.weights.index(q_stage), far)
            # The matrix unit reads what threads wrote.
            fence_async_shared()
            signal(bars.q_full.index(q_stage))
        done += own
        blocks_done += (own > 0).to(gl.int32)
        skip = 0


@gluon.jit(
    do_not_specialize=["rows", "keys", "stride_out_row"],
    do_not_specialize_on_alignment=["kv_start", "kv_end", "weights", "out", "far"],
)
def mqa_logits(
    q,  # int32 [rows, HEADS * 17]: a row's codes of all heads, then their scales
    k,  # e5m2 [keys, 128], boxes of BLOCK_KV
    k_scale,  # fp32 [1, keys], boxes of BLOCK_KV
    weights,  # fp32 [rows, HEADS]
    kv_start,  # int32 [rows]
    kv_end,  # int32 [rows]
    out,  # fp32 [rows, keys]
    far,  # int32 [CTAs]: whether a CTA's query blocks have heads that do not fit
    one,  # 1.0 that the compiler does not know: products of weights lie in any registers, 4 instructions less a tile
    rows,
    keys,
    stride_q_row,  # words
    stride_weights_row,
    stride_weights_head,
    stride_start_row,
    stride_end_row,
    stride_out_row,
    HEADS: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    STAGES: gl.constexpr,  # tiles in flight
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    COLUMNS: gl.constexpr = BLOCK_Q * HEADS
    CHUNKS: gl.constexpr = COLUMNS // CHUNK
    query_block, query_blocks = count_blocks(rows, BLOCK_Q)
    # Rings of tiles and of query blocks, and one query block as it comes.
    shared = Shared(
        keys=gl.allocate_shared_memory(k.dtype, [STAGES] + k.block_shape, k.layout),
        scales=gl.allocate_shared_memory(k_scale.dtype, [STAGES] + k_scale.block_shape, k_scale.layout),
        queries=gl.allocate_shared_memory(k.dtype, [Q_STAGES, COLUMNS, 128], k.layout),
        weights=gl.allocate_shared_memory(gl.float32, [Q_STAGES, COLUMNS], LINEAR),
    )
    packed = Packed(
        gl.allocate_shared_memory(gl.int32, [CHUNKS, CHUNK, 4, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])),
        gl.allocate_shared_memory(gl.int32, [COLUMNS], LINEAR),
        gl.allocate_shared_memory(gl.float32, [COLUMNS], LINEAR),
    )
    queries = Queries(q, weights, stride_q_row, stride_weights_row, stride_weights_head, HEADS)
    bars = allocate_barriers(STAGES, products(COLUMNS))
    ranges = Ranges(kv_start, kv_end, rows, keys, stride_start_row, stride_end_row)
    # Barriers are seen before any warp uses them. PDL: keys are the launch before's.
    fence_async_shared()
    wait()
    run = find_run(ranges, query_block, query_blocks, BLOCK_Q)
    barrier()
    gl.warp_specialize(
        [
            (consumer, (shared, bars, ranges, out, stride_out_row, run, 0, BLOCK_Q, one)),
            (consumer, (shared, bars, ranges, out, stride_out_row, run, 1, BLOCK_Q, one)),
            (consumer, (shared, bars, ranges, out, stride_out_row, run, 2, BLOCK_Q, one)),
            (consumer, (shared, bars, ranges, out, stride_out_row, run, 3, BLOCK_Q, one)),
            (producer, (shared, bars, k, k_scale, None, None, ranges, run, BLOCK_Q, True)),
            (_preparer, (shared, bars, packed, queries, far, ranges, run, BLOCK_Q)),
        ],
        [4, 4, 4, 1, 2],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
