"""Index scores over a paged MXFP4 cache on Hopper, blocks of 64 keys: see mxfp4.py, common.py and README.md.

As paged.py, but keys come packed, 68 bytes each, and are decoded in the consumers' registers, from where the matrix
unit takes them. Floor: bytes, a block's codes and scales once per query block and 4 bytes per row and key: 4,608 a
block and row, against 8,704 of fp8 keys.
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
from sparse_attn.ops.indexer.scores.hopper.requests import (
    ENTRIES,
    Lengths,
    Output,
    blocks_of,
    clear,
    entries_of,
    find_run,
    lengths_of,
    own_rows,
    places,
    tiles_of,
    write,
)


@gluon.jit
def _producer(
    shared, bars, codes, scales, lengths, block_table, num_blocks, max_blocks, stride_table, run
):  # fmt: skip
    """Load tiles, each with where its keys end at the latest: at 0 where the cache has no such block, which comes as
    zeros and is read nowhere."""
    STAGES: gl.constexpr = shared.codes.shape[0]
    BLOCKS: gl.constexpr = blocks_of(lengths.NEXT_N, lengths.BLOCK_Q)
    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    # A block table is read 32 entries at a time, one to a lane.
    lane = gl.arange(0, ENTRIES, layout=WARP)
    done = 0
    skip = run.skip
    for query_block in range(run.first, run.last):
        request = query_block // BLOCKS
        table = block_table + request.to(gl.int64) * stride_table
        next_entries = entries_of(table, skip + lane, max_blocks)  # on its way while lengths are
        # How many of the query block's tiles are this CTA's.
        tiles = tiles_of(lengths, query_block)
        own = gl.maximum(gl.minimum(tiles - skip, run.count - done), 0)
        for begin in range(0, own, ENTRIES):
            entries = next_entries
            next_entries = entries_of(table, skip + begin + ENTRIES + lane, max_blocks)
            for i in range(begin, gl.minimum(begin + ENTRIES, own)):
                stage, phase = ring(done + i, STAGES)
                # Broadcast the entry of one lane.
                block = gl.sum(gl.where(lane == i - begin, entries, 0), 0)
                kv_valid = (block >= 0) & (block < num_blocks)
                # An entry that is no block: the copy is out of bounds and brings zeros, and no position counts.
                block = gl.where(kv_valid, block, -1)
                end = gl.where(kv_valid, 2**31 - 1, 0)
                # The consumer of the tile that was here has it in registers.
                mbarrier.wait(bars.empty.index(stage), phase ^ 1)
                shared.ends.index(stage).store(gl.full([1], end, gl.int32, WARP))
                # The bytes of codes and scales complete full.
                full = bars.full.index(stage)
                mbarrier.expect(full, (shared.codes.shape[2] * shared.codes.shape[3] + shared.scales.shape[2]) * 4)
                tma_load(codes, [block, 0, 0], full, shared.codes.index(stage))
                tma_load(scales, [block, 0], full, shared.scales.index(stage))
        done += own
        skip = 0


@gluon.jit
def _scaler(shared, bars, lengths, run):
    """Turn the scales of every tile of the run into steps and factors."""
    STAGES: gl.constexpr = shared.codes.shape[0]
    key = gl.arange(0, BLOCK_KV, layout=KEYS_OF_A_WARP)
    done = 0
    skip = run.skip
    for query_block in range(run.first, run.last):
        # Rows of a query block see different lengths: the longest counts.
        rows = lengths_of(lengths, query_block)
        longest = gl.minimum(gl.maximum(rows[0], 0), lengths.max_context)
        for n in gl.static_range(1, len(rows)):
            longest = gl.maximum(longest, gl.minimum(rows[n], lengths.max_context))
        own = gl.maximum(gl.minimum((longest + BLOCK_KV - 1) // BLOCK_KV - skip, run.count - done), 0)
        for i in range(own):
            stage, phase = ring(done + i, STAGES)
            # Keys behind the longest row may hold anything, and must not send the tile the long way.
            mbarrier.wait(bars.full.index(stage), phase)
            seen = (skip + i) * BLOCK_KV + key < longest
            turn_scales(shared, bars, stage, seen)
        done += own
        skip = 0


@gluon.jit
def _consumer(
    shared, bars, q, stride_q_request, stride_q_row, lengths, output, run, keep_in_l2, which: gl.constexpr,
    HEADS: gl.constexpr,
):  # fmt: skip
    """Score every tile of the CTA's run whose turn it is: decode it once, and multiply COLUMNS columns at a time."""
    NEXT_N: gl.constexpr = lengths.NEXT_N
    BLOCK_Q: gl.constexpr = lengths.BLOCK_Q
    STAGES: gl.constexpr = shared.codes.shape[0]
    BLOCKS: gl.constexpr = blocks_of(NEXT_N, BLOCK_Q)
    # One consumer takes a whole tile, decodes it once and multiplies it PRODUCTS times.
    PRODUCTS: gl.constexpr = products(BLOCK_Q * HEADS)
    ROWS: gl.constexpr = BLOCK_Q // PRODUCTS
    N: gl.constexpr = ROWS * HEADS
    HELD: gl.constexpr = N * PRODUCTS <= 64  # weights in registers, beside a product and a tile's operand
    KEY: gl.constexpr = gl.SliceLayout(1, scores_layout(ROWS))
    ANY: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if output.CLEAR and which == 0:  # while the first keys are under way
        clear(lengths, output)
    key = gl.arange(0, BLOCK_KV, layout=KEY)
    group = own_rows(0, ROWS, output.GROUP)[1]
    done, blocks_done = 0, 0
    skip = run.skip
    for nth in range(run.last - run.first):  # from 0, for query blocks as wide as addresses take two registers
        query_block = run.first + nth
        # As the producer counts: the same tiles in the same stages.
        tiles = tiles_of(lengths, query_block)
        own = gl.maximum(gl.minimum(tiles - skip, run.count - done), 0)
        if own > 0:
            first_row = query_block % BLOCKS * BLOCK_Q
            request = (query_block // BLOCKS).to(gl.int64)
            block = QueryBlock(
                q + request * stride_q_request + first_row * stride_q_row,
                output.weights + (request * NEXT_N + first_row) * output.stride_weights_row,
                NEXT_N - first_row, stride_q_row, output.stride_weights_row, output.stride_weights_head, HEADS,
            )  # fmt: skip
            # Who is here has passed q_ready of the block before: all consumers are done with the one before that.
            q_stage, phase = ring(blocks_done, Q_STAGES)
            queries, weights = shared.queries.index(q_stage), shared.weights.index(q_stage)
            prepare(block, queries, weights, shared.fit.index(q_stage), BLOCK_Q * HEADS // CONSUMERS, which, HELD)
            # The matrix unit reads what threads wrote; q_ready awaits all consumers' parts.
            fence_async_shared()
            signal(bars.q_ready.index(q_stage))
            # Where scores go, while others finish their parts.
            own_places = ()
            for p in gl.static_range(PRODUCTS):
                rows_of = own_rows(p * ROWS, ROWS, output.GROUP)
                own_places = own_places + (places(lengths, output, query_block, rows_of[0], rows_of[2]),)
            mbarrier.wait(bars.q_ready.index(q_stage), phase)
            # All consumers read the same, and choose alike.
            all_fit = gl.min(shared.fit.index(q_stage).load(gl.BlockedLayout([4], [32], [4], [0])), 0)
            half_weights = weights_of(weights.slice(0, N), HELD)
            # Every CONSUMERS-th tile, whichever query block it is of.
            for i in range(own_tile(which, done, CONSUMERS), own, CONSUMERS):
                stage, phase = ring(done + i, STAGES)
                mbarrier.wait(bars.full.index(stage), phase)
                # Codes are read before the scales are ready.
                words = words_of(shared.codes.index(stage))
                mbarrier.wait(bars.ready.index(stage), phase)
                # The scaler's results: steps below a key's highest scale, and that scale.
                steps = shared.steps.index(stage).load(gl.SliceLayout(1, gl.SliceLayout(2, KEY_WORDS)))
                factor = shared.factors.index(stage).load(KEY)
                end = gl.expand_dims(shared.ends.index(stage).load(KEY), 1)
                apart = gl.sum(shared.apart.index(stage).load(ANY), 0)
                # The common case: operands are exact. All of the tile is in registers, so the stage is free.
                if (apart == 0) & (all_fit != 0):
                    signal(bars.empty.index(stage))
                    for p in gl.static_range(PRODUCTS):
                        some = queries.slice(p * N, N, dim=0)
                        product = warpgroup_mma_wait(0, deps=(multiply_codes(words, steps, some),))
                        if not HELD:
                            half_weights = weights_of(weights.slice(p * N, N), False)
                        scores = weighed_sums(product, half_weights, ROWS) * gl.expand_dims(factor, 1)
                        write(scores, skip + i, end, own_places[p], output, keep_in_l2, key, group)
                # Groups too far apart: one after the other. Scales are read in shared memory to the end.
                else:
                    key_scales = shared.scales.index(stage).reshape([BLOCK_KV])
                    here = within_loop(block, i)
                    # Keys whose highest scale is NaN.
                    known = gl.expand_dims(gl.where(factor == factor, 1.0, float("nan")), 1)
                    for p in gl.static_range(PRODUCTS):
                        scores = scores_of_groups(words, key_scales, queries, here, p * N, ROWS) * known
                        write(scores, skip + i, end, own_places[p], output, keep_in_l2, key, group)
                    signal(bars.empty.index(stage))
        done += own
        blocks_done += (own > 0).to(gl.int32)
        skip = 0


@gluon.jit(
    do_not_specialize=[
        "query_blocks", "num_blocks", "max_context", "max_blocks", "pdl_tiles", "stride_table_request",
        "stride_out_row", "stride_maxima_row",
    ],
    do_not_specialize_on_alignment=["context_lens", "block_table", "weights", "out", "maxima"],
)  # fmt: skip
def paged_mqa_logits(
    q,  # int32 [requests, NEXT_N, HEADS * ROW_WORDS]: a row's codes of all heads, then their scales
    codes,  # int32 [num_blocks, BLOCK_KV, 16], boxes of a block
    scales,  # int32 [num_blocks, BLOCK_KV], boxes of a block
    weights,  # fp32 [requests * NEXT_N, HEADS]
    context_lens,  # int32 [requests, NEXT_N]
    block_table,  # int32 [requests, max_blocks]
    out,  # fp32 [requests * NEXT_N, max_context]
    maxima,  # fp32 [requests * NEXT_N, cdiv(max_context, GROUP)], where GROUP is not 1
    query_blocks,  # requests * cdiv(NEXT_N, BLOCK_Q)
    num_blocks,
    max_context,
    max_blocks,
    pdl_tiles,  # of all query blocks, up to which dependent launches may start meanwhile
    stride_q_request,  # words
    stride_q_row,
    stride_weights_row,
    stride_weights_head,
    stride_lens_request,
    stride_lens_row,
    stride_table_request,
    stride_out_row,
    stride_maxima_row,
    HEADS: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    NEXT_N: gl.constexpr,
    CLEAR: gl.constexpr,  # write -inf behind a row's last score; otherwise leave it undefined
    GROUP: gl.constexpr,  # neighbours whose highest score goes to ``maxima``
    STAGES: gl.constexpr,  # tiles in flight
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    shared, bars = allocate(codes, scales, STAGES, BLOCK_Q * HEADS)
    lengths = Lengths(context_lens, query_blocks, max_context, stride_lens_request, stride_lens_row, BLOCK_Q, NEXT_N)
    # Barriers are seen before any warp uses them. PDL: lengths may be the launch before's.
    fence_async_shared()
    wait()
    run, keep_in_l2 = find_run(lengths, pdl_tiles)
    output = Output(
        weights, out, maxima, stride_weights_row, stride_weights_head, stride_out_row, stride_maxima_row, CLEAR, GROUP
    )
    barrier()
    gl.warp_specialize(
        [
            (_consumer, (shared, bars, q, stride_q_request, stride_q_row, lengths, output, run, keep_in_l2, 0, HEADS)),
            (_consumer, (shared, bars, q, stride_q_request, stride_q_row, lengths, output, run, keep_in_l2, 1, HEADS)),
            (_consumer, (shared, bars, q, stride_q_request, stride_q_row, lengths, output, run, keep_in_l2, 2, HEADS)),
            (_consumer, (shared, bars, q, stride_q_request, stride_q_row, lengths, output, run, keep_in_l2, 3, HEADS)),
            (_producer, (shared, bars, codes, scales, lengths, block_table, num_blocks, max_blocks,
                         stride_table_request, run)),
            (_scaler, (shared, bars, lengths, run)),
        ],
        [4, 4, 4, 1, 1],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
