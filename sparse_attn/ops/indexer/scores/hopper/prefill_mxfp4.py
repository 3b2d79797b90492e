"""Index scores over contiguous MXFP4 keys on Hopper: see mxfp4.py, prefill.py and README.md.

Floor: operations, as of fp8 keys. Predicted bound: what is issued, 187 instructions a product of 128 columns as of fp8
keys, and 90 more for each tile that is decoded. So a consumer multiplies a tile by all columns of a query block.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from sparse_attn.device.hopper import barrier, signal, tma_load, wait
from sparse_attn.ops.indexer.scores.hopper.common import (
    BLOCK_KV,
    CONSUMERS,
    Q_STAGES,
    own_tile,
    products,
    ring,
    scores_layout,
    weighed_sums,
)
from sparse_attn.ops.indexer.scores.hopper.mxfp4 import (
    KEY_WORDS,
    KEYS_OF_A_WARP,
    QueryBlock,
    allocate,
    multiply_codes,
    prepare,
    scores_of_groups,
    turn_scales,
    weights_of,
    within_loop,
    words_of,
)
from sparse_attn.ops.indexer.scores.hopper.prefill import CHUNK, Ranges, count_blocks, find_run, range_of, tiles_of


@gluon.jit
def _producer(shared, bars, k, k_scale, ranges, run, BLOCK_Q: gl.constexpr):
    """Load tiles; zeros behind the last key."""
    STAGES: gl.constexpr = shared.codes.shape[0]
    done = 0
    skip = run.skip
    for query_block in range(run.first, run.last):
        # How many of the query block's tiles are this CTA's.
        begin, tiles = tiles_of(ranges, query_block, BLOCK_Q)
        own = gl.maximum(gl.minimum(tiles - skip, run.count - done), 0)
        for i in range(own):
            stage, phase = ring(done + i, STAGES)
            key = (begin + skip + i) * BLOCK_KV
            # The consumer of the tile that was here has it in registers.
            mbarrier.wait(bars.empty.index(stage), phase ^ 1)
            full = bars.full.index(stage)
            mbarrier.expect(full, (shared.codes.shape[1] * shared.codes.shape[2] + shared.scales.shape[2]) * 4)
            tma_load(k, [key, 0], full, shared.codes.index(stage))
            tma_load(k_scale, [0, key], full, shared.scales.index(stage))
        done += own
        skip = 0


@gluon.jit
def _scaler(shared, bars, ranges, run, BLOCK_Q: gl.constexpr):
    """Turn the scales of every tile of the run into steps and factors."""
    STAGES: gl.constexpr = shared.codes.shape[0]
    key = gl.arange(0, BLOCK_KV, layout=KEYS_OF_A_WARP)
    done = 0
    skip = run.skip
    for query_block in range(run.first, run.last):
        # As the producer counts: the same tiles in the same stages.
        begin, tiles = tiles_of(ranges, query_block, BLOCK_Q)
        own = gl.maximum(gl.minimum(tiles - skip, run.count - done), 0)
        for i in range(own):
            stage, phase = ring(done + i, STAGES)
            mbarrier.wait(bars.full.index(stage), phase)
            # Behind the last key are zeros, which no row sees.
            turn_scales(shared, bars, stage, (begin + skip + i) * BLOCK_KV + key < ranges.keys)
        done += own
        skip = 0


@gluon.jit
def _place(ranges, out, stride_out, first_key, first_row, ROWS: gl.constexpr):
    """(where the scores of ``ROWS`` rows go; how far a tile's keys, from ``first_key`` on, lie behind a row's first;
    how many keys a row sees)."""
    SCORES: gl.constexpr = scores_layout(ROWS)
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, SCORES))
    key = first_key + gl.arange(0, BLOCK_KV, layout=gl.SliceLayout(1, SCORES))
    start, end = range_of(ranges, row)
    to = gl.expand_dims(out + (row.to(gl.int64) * stride_out + start), 0)
    length = gl.expand_dims(gl.maximum(end - start, 0), 0).to(gl.uint32)
    return to, gl.expand_dims(key, 1) - gl.expand_dims(start, 0), length


@gluon.jit
def _store(scores, place, tile):
    to, offset, length = place
    # Unsigned, so that one comparison leaves out keys before a row's first, too.
    at = offset + tile * BLOCK_KV
    gl.store(to + at, scores, mask=at.to(gl.uint32) < length)


@gluon.jit
def _consumer(
    shared, bars, q, weights, strides, ranges, out, stride_out, run, which: gl.constexpr, HEADS: gl.constexpr,
    BLOCK_Q: gl.constexpr, FAR: gl.constexpr,
):  # fmt: skip
    """Score every tile of the CTA's run whose turn it is: decode it once, and multiply COLUMNS columns at a time.
    FAR: leave out tiles whose groups are near."""
    STAGES: gl.constexpr = shared.codes.shape[0]
    # One consumer takes a whole tile, decodes it once and multiplies it PRODUCTS times.
    PRODUCTS: gl.constexpr = products(BLOCK_Q * HEADS)
    ROWS: gl.constexpr = BLOCK_Q // PRODUCTS
    N: gl.constexpr = ROWS * HEADS
    KEY: gl.constexpr = gl.SliceLayout(1, scores_layout(ROWS))
    ANY: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    stride_q_row, stride_weights_row, stride_weights_head = strides
    done, blocks_done = 0, 0
    skip = run.skip
    for nth in range(run.last - run.first):  # from 0, for query blocks as wide as addresses take two registers
        query_block = run.first + nth
        # As the producer counts: the same tiles in the same stages.
        begin, tiles = tiles_of(ranges, query_block, BLOCK_Q)
        own = gl.maximum(gl.minimum(tiles - skip, run.count - done), 0)
        if own > 0:
            row = (query_block * BLOCK_Q).to(gl.int64)
            block = QueryBlock(
                q + row * stride_q_row, weights + row * stride_weights_row,
                ranges.rows - query_block * BLOCK_Q, stride_q_row, stride_weights_row, stride_weights_head, HEADS,
            )  # fmt: skip
            # Who is here has passed q_ready of the block before: all consumers are done with the one before that.
            q_stage, phase = ring(blocks_done, Q_STAGES)
            queries, half = shared.queries.index(q_stage), shared.weights.index(q_stage)
            prepare(block, queries, half, shared.fit.index(q_stage), BLOCK_Q * HEADS // CONSUMERS, which, False)
            # The matrix unit reads what threads wrote; q_ready awaits all consumers' parts.
            fence_async_shared()
            signal(bars.q_ready.index(q_stage))
            # Where scores go, while others finish their parts.
            first_key = (begin + skip) * BLOCK_KV
            places = ()
            for p in gl.static_range(PRODUCTS):
                first_row = query_block * BLOCK_Q + p * ROWS
                places = places + (_place(ranges, out, stride_out, first_key, first_row, ROWS),)
            mbarrier.wait(bars.q_ready.index(q_stage), phase)
            # All consumers read the same, and choose alike.
            all_fit = gl.min(shared.fit.index(q_stage).load(gl.BlockedLayout([4], [32], [4], [0])), 0)
            for i in range(own_tile(which, done, CONSUMERS), own, CONSUMERS):
                stage, phase = ring(done + i, STAGES)
                mbarrier.wait(bars.full.index(stage), phase)
                # Codes are read before the scales are ready.
                words = words_of(shared.codes.index(stage))
                mbarrier.wait(bars.ready.index(stage), phase)
                steps = shared.steps.index(stage).load(gl.SliceLayout(1, gl.SliceLayout(2, KEY_WORDS)))
                factor = shared.factors.index(stage).load(KEY)
                apart = gl.sum(shared.apart.index(stage).load(ANY), 0)
                # The common case: operands are exact. All of the tile is in registers, so the stage is free.
                if (apart == 0) & (all_fit != 0):
                    signal(bars.empty.index(stage))
                    for p in gl.static_range(0 if FAR else PRODUCTS):
                        some = queries.slice(p * N, N, dim=0)
                        product = warpgroup_mma_wait(0, deps=(multiply_codes(words, steps, some),))
                        half_weights = weights_of(half.slice(p * N, N), False)
                        scores = weighed_sums(product, half_weights, ROWS) * gl.expand_dims(factor, 1)
                        _store(scores, places[p], i)
                # Groups too far apart: one after the other. Scales are read in shared memory to the end.
                else:
                    key_scales = shared.scales.index(stage).reshape([BLOCK_KV])
                    here = within_loop(block, i)
                    known = gl.expand_dims(gl.where(factor == factor, 1.0, float("nan")), 1)
                    for far in range(PRODUCTS):
                        scores = scores_of_groups(words, key_scales, queries, here, far * N, ROWS) * known
                        # Places are computed anew: this branch is rare, and holds no registers.
                        far_row = query_block * BLOCK_Q + far * ROWS
                        _store(scores, _place(ranges, out, stride_out, first_key, far_row, ROWS), i)
                    signal(bars.empty.index(stage))
        done += own
        blocks_done += (own > 0).to(gl.int32)
        skip = 0


@gluon.jit
def _any(words, count):
    """Whether some of ``count`` words in global memory is not zero."""
    # The first chunk by one load, others in turn.
    place = gl.arange(0, CHUNK, layout=gl.BlockedLayout([1], [32], [4], [0]))
    found = gl.load(words + place, mask=place < count, other=0)
    for chunk in range(CHUNK, count, CHUNK):
        found |= gl.load(words + (chunk + place), mask=chunk + place < count, other=0)
    return gl.max(found, 0) != 0


@gluon.jit(
    do_not_specialize=["rows", "keys", "stride_out_row", "far_count"],
    do_not_specialize_on_alignment=["kv_start", "kv_end", "weights", "out"],
)
def mqa_logits(
    q,  # int32 [rows, HEADS * 17]: a row's codes of all heads, then their scales
    k,  # int32 [keys, 16], boxes of BLOCK_KV
    k_scale,  # int32 [1, keys], boxes of BLOCK_KV
    weights,  # fp32 [rows, HEADS]
    kv_start,  # int32 [rows]
    kv_end,  # int32 [rows]
    out,  # fp32 [rows, keys]
    rows,
    keys,
    stride_q_row,  # words
    stride_weights_row,
    stride_weights_head,
    stride_start_row,
    stride_end_row,
    stride_out_row,
    far,  # None, or int32 [far_count]: where all are 0 nothing is scored; otherwise tiles whose groups are far apart
    far_count,
    HEADS: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    STAGES: gl.constexpr,  # tiles in flight
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    shared, bars = allocate(k, k_scale, STAGES, BLOCK_Q * HEADS)
    ranges = Ranges(kv_start, kv_end, rows, keys, stride_start_row, stride_end_row)
    fence_async_shared()
    wait()
    # A second launch, behind prefill_decoded: no rows where nothing is far.
    if far is not None:
        rows = gl.where(_any(far, far_count), rows, 0)
        ranges = Ranges(kv_start, kv_end, rows, keys, stride_start_row, stride_end_row)
    run = find_run(ranges, *count_blocks(rows, BLOCK_Q), BLOCK_Q)
    barrier()
    FAR: gl.constexpr = far is not None
    strides = stride_q_row, stride_weights_row, stride_weights_head
    gl.warp_specialize(
        [
            (_consumer, (shared, bars, q, weights, strides, ranges, out, stride_out_row, run, 0, HEADS, BLOCK_Q, FAR)),
            (_consumer, (shared, bars, q, weights, strides, ranges, out, stride_out_row, run, 1, HEADS, BLOCK_Q, FAR)),
            (_consumer, (shared, bars, q, weights, strides, ranges, out, stride_out_row, run, 2, HEADS, BLOCK_Q, FAR)),
            (_consumer, (shared, bars, q, weights, strides, ranges, out, stride_out_row, run, 3, HEADS, BLOCK_Q, FAR)),
            (_producer, (shared, bars, k, k_scale, ranges, run, BLOCK_Q)),
            (_scaler, (shared, bars, ranges, run, BLOCK_Q)),
        ],
        [4, 4, 4, 1, 1],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
