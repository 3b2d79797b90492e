"""Index scores over a paged fp8 cache on Hopper, blocks of 64 keys: see common.py and README.md.

All rows of a request, up to four, are one query block, so the keys of a request are read once. Floor: bytes, a block's
codes and scales once per query block and 4 bytes per row and key. Predicted bound: that, 490 clocks a block on 132 SMs,
against 250 for 128 columns in the matrix unit. Short contexts: lengths, block table, keys, one load after the other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from sparse_attn.device.hopper import barrier, signal, tma_load, wait
from sparse_attn.device.triton_private import aggregate
from sparse_attn.ops.indexer.scores.hopper.common import (
    BLOCK_KV,
    CONSUMERS,
    Q_STAGES,
    allocate_barriers,
    multiply,
    own_tile,
    product_layout,
    products,
    ring,
    scores_layout,
    weighed_sums,
)
from sparse_attn.ops.indexer.scores.hopper.requests import (
    ENTRIES,
    Lengths,
    Output,
    blocks_of,
    clear,
    entries_of,
    find_run,
    own_rows,
    places,
    tiles_of,
    write,
)


@aggregate
class Shared:
    """Rings in shared memory: tiles of keys, their scales, where they end, and query blocks."""

    keys: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    ends: gl.shared_memory_descriptor
    queries: gl.shared_memory_descriptor


@gluon.jit
def _producer(
    shared, bars, codes, scales, q, lengths, block_table, num_blocks, max_blocks, stride_table, run,
    HEADS: gl.constexpr,
):  # fmt: skip
    """Load a query block, then its tiles, each with where its keys end at the latest: at 0 where the cache has no such
    block, which comes as zeros and is read nowhere."""
    STAGES: gl.constexpr = shared.keys.shape[0]
    BLOCKS: gl.constexpr = blocks_of(lengths.NEXT_N, lengths.BLOCK_Q)
    # A block table is read 32 entries at a time, one to a lane.
    lane = gl.arange(0, ENTRIES, layout=gl.BlockedLayout([1], [32], [1], [0]))
    done, blocks_done = 0, 0
    skip = run.skip
    for query_block in range(run.first, run.last):
        request = query_block // BLOCKS
        table = block_table + request.to(gl.int64) * stride_table
        next_entries = entries_of(table, skip + lane, max_blocks)  # on its way while lengths are
        # How many of the query block's tiles are this CTA's.
        tiles = tiles_of(lengths, query_block)
        own = gl.maximum(gl.minimum(tiles - skip, run.count - done), 0)
        if own > 0:
            # All consumers are done with the query block that was here.
            q_stage, phase = ring(blocks_done, Q_STAGES)
            mbarrier.wait(bars.q_empty.index(q_stage), phase ^ 1)
            q_full = bars.q_full.index(q_stage)
            mbarrier.expect(q_full, shared.queries.shape[1] * shared.queries.shape[2])
            row = request * lengths.NEXT_N + query_block % BLOCKS * lengths.BLOCK_Q
            tma_load(q, [row * HEADS, 0], q_full, shared.queries.index(q_stage))
            # A turn of the inner loop is a tile. The next entries are loaded before this turn's are used.
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
                    # The products of the tile that was here are done.
                    mbarrier.wait(bars.empty.index(stage), phase ^ 1)
                    shared.ends.index(stage).store(gl.full([1], end, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
                    # The bytes of codes and scales complete full.
                    full = bars.full.index(stage)
                    mbarrier.expect(full, shared.keys.shape[2] * shared.keys.shape[3] + shared.scales.shape[2] * 4)
                    tma_load(codes, [block, 0, 0], full, shared.keys.index(stage))
                    tma_load(scales, [block, 0], full, shared.scales.index(stage))
        # The ring goes on over query blocks, so the number of tiles is carried.
        done += own
        blocks_done += (own > 0).to(gl.int32)
        skip = 0


@gluon.jit
def _consumer(shared, bars, lengths, output, run, keep_in_l2, which: gl.constexpr, HEADS: gl.constexpr):
    """Score every tile of the CTA's run whose turn it is, and COLUMNS of a query block's columns, or all of them."""
    # A tile has one product or two, of COLUMNS columns at most. TURN: which tiles are this consumer's.
    NEXT_N: gl.constexpr = lengths.NEXT_N
    BLOCK_Q: gl.constexpr = lengths.BLOCK_Q
    STAGES: gl.constexpr = shared.keys.shape[0]
    BLOCKS: gl.constexpr = blocks_of(NEXT_N, BLOCK_Q)
    PRODUCTS: gl.constexpr = products(shared.queries.shape[1])
    ROWS: gl.constexpr = BLOCK_Q // PRODUCTS
    FIRST_ROW: gl.constexpr = which % PRODUCTS * ROWS  # of its own product, of a tile
    TURN: gl.constexpr = which // PRODUCTS
    TURNS: gl.constexpr = CONSUMERS // PRODUCTS
    COLUMN: gl.constexpr = gl.SliceLayout(0, product_layout(ROWS * HEADS))
    KEY: gl.constexpr = gl.SliceLayout(1, scores_layout(ROWS))
    key = gl.arange(0, BLOCK_KV, layout=KEY)
    column = gl.arange(0, ROWS * HEADS, layout=COLUMN)
    own_row, group, maxima_row = own_rows(FIRST_ROW, ROWS, output.GROUP)
    if output.CLEAR and which == 0:  # while the first keys are under way
        clear(lengths, output)
    done, blocks_done = 0, 0
    skip = run.skip
    for nth in range(run.last - run.first):  # from 0, for query blocks as wide as addresses take two registers
        # As the producer counts: the same tiles in the same stages.
        query_block = run.first + nth
        tiles = tiles_of(lengths, query_block)
        own = gl.maximum(gl.minimum(tiles - skip, run.count - done), 0)
        if own > 0:
            # While the queries are under way: where scores go, and the weights of this consumer's columns.
            place = places(lengths, output, query_block, own_row, maxima_row)
            first_row = query_block % BLOCKS * BLOCK_Q
            row = FIRST_ROW + column // HEADS
            weights_row = (query_block // BLOCKS).to(gl.int64) * NEXT_N + first_row + row
            weights = output.weights + weights_row * output.stride_weights_row
            weights = weights + column % HEADS * output.stride_weights_head
            half_weights = 0.5 * gl.load(weights, mask=row < NEXT_N - first_row, other=0.0)
            q_stage, phase = ring(blocks_done, Q_STAGES)
            mbarrier.wait(bars.q_full.index(q_stage), phase)
            # Every TURNS-th tile, whichever query block it is of.
            for i in range(own_tile(TURN, done, TURNS), own, TURNS):
                stage, phase = ring(done + i, STAGES)
                tile = skip + i
                mbarrier.wait(bars.full.index(stage), phase)
                # Multiply; other consumers sum theirs meanwhile.
                q = shared.queries.index(q_stage).slice(FIRST_ROW * HEADS, ROWS * HEADS, dim=0)
                product = multiply(shared.keys.index(stage), q)
                product = warpgroup_mma_wait(0, deps=(product,))
                # Everything is in registers before the stage is freed.
                scale = shared.scales.index(stage).reshape([BLOCK_KV]).load(KEY)
                end = gl.expand_dims(shared.ends.index(stage).load(KEY), 1)
                signal(bars.empty.index(stage))
                # Sum over heads, times the key's scale.
                scores = weighed_sums(product, half_weights, ROWS) * gl.expand_dims(scale, 1)
                write(scores, tile, end, place, output, keep_in_l2, key, group)
            # The last tile of the query block that is this consumer's.
            signal(bars.q_empty.index(q_stage))
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
    q,  # fp8 [requests * NEXT_N * HEADS, D], boxes of BLOCK_Q * HEADS
    codes,  # fp8 [num_blocks, BLOCK_KV, D], boxes of a block
    scales,  # fp32 [num_blocks, BLOCK_KV], boxes of a block
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
    # Rings of tiles and of query blocks.
    shared = Shared(
        keys=gl.allocate_shared_memory(codes.dtype, [STAGES] + codes.block_shape, codes.layout),
        scales=gl.allocate_shared_memory(scales.dtype, [STAGES] + scales.block_shape, scales.layout),
        ends=gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        queries=gl.allocate_shared_memory(q.dtype, [Q_STAGES] + q.block_shape, q.layout),
    )
    bars = allocate_barriers(STAGES, products(shared.queries.shape[1]))
    lengths = Lengths(context_lens, query_blocks, max_context, stride_lens_request, stride_lens_row, BLOCK_Q, NEXT_N)
    # Barriers are seen before any warp uses them. PDL: lengths may be the launch before's.
    fence_async_shared()
    wait()
    # Every CTA counts all tiles and takes its share.
    run, keep_in_l2 = find_run(lengths, pdl_tiles)
    output = Output(
        weights, out, maxima, stride_weights_row, stride_weights_head, stride_out_row, stride_maxima_row, CLEAR, GROUP
    )
    barrier()
    # What is carried to the consumers is packed in this order; a bit in front would leave the rest unaligned.
    gl.warp_specialize(
        [
            (_consumer, (shared, bars, lengths, output, run, keep_in_l2, 0, HEADS)),
            (_consumer, (shared, bars, lengths, output, run, keep_in_l2, 1, HEADS)),
            (_consumer, (shared, bars, lengths, output, run, keep_in_l2, 2, HEADS)),
            (_consumer, (shared, bars, lengths, output, run, keep_in_l2, 3, HEADS)),
            (_producer, (shared, bars, codes, scales, q, lengths, block_table, num_blocks, max_blocks,
                         stride_table_request, run, HEADS)),
        ],
        [4, 4, 4, 1],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
