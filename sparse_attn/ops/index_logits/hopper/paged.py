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

from sparse_attn.device.hopper import barrier, launch_dependents, signal, tma_load, wait
from sparse_attn.device.triton_private import aggregate
from sparse_attn.ops.index_logits.hopper.common import (
    BLOCK_KV,
    CONSUMERS,
    Q_STAGES,
    Run,
    Scalar,
    allocate_barriers,
    maxima_layout,
    multiply,
    own_tile,
    product_layout,
    products,
    ring,
    scores_layout,
    search,
    share,
    weighed_sums,
)

CHUNK = gl.constexpr(128)  # query blocks whose tiles are counted at a time
L2_BYTES = gl.constexpr(8 << 20)  # of scores, up to which the L2 holds them beside the keys that stream through it
ENTRIES = gl.constexpr(32)  # of a block table that the producer holds, one to a lane


@aggregate
class Shared:
    """Rings in shared memory: tiles of keys, their scales, where they end, and query blocks."""

    keys: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    ends: gl.shared_memory_descriptor
    queries: gl.shared_memory_descriptor


@aggregate
class Lengths:
    """Positions that each row sees: ``lens`` [requests, NEXT_N], at most ``max_context``; BLOCK_Q rows of a request are
    a query block."""

    lens: gl.tensor
    query_blocks: Scalar
    max_context: Scalar
    stride_request: Scalar
    stride_row: Scalar
    BLOCK_Q: gl.constexpr
    NEXT_N: gl.constexpr


@aggregate
class Output:
    """weights: of the heads, and where scores and the highest of each GROUP neighbours go."""

    weights: gl.tensor
    out: gl.tensor
    maxima: gl.tensor
    stride_weights_row: Scalar
    stride_weights_head: Scalar
    stride_out: Scalar
    stride_maxima: Scalar
    CLEAR: gl.constexpr
    GROUP: gl.constexpr


@gluon.constexpr_function
def blocks_of(next_n, block_q):
    """Query blocks of a request."""
    return -(-next_n // block_q)


@gluon.jit
def _lengths(lengths, query_block):
    """Positions that each row of a query block sees, as they are given, the last again for rows that do not exist: a
    tuple."""
    BLOCKS: gl.constexpr = blocks_of(lengths.NEXT_N, lengths.BLOCK_Q)
    first = query_block % BLOCKS * lengths.BLOCK_Q
    at = lengths.lens + (query_block // BLOCKS).to(gl.int64) * lengths.stride_request
    found = ()
    for n in gl.static_range(lengths.BLOCK_Q):
        found = found + (gl.load(at + gl.minimum(first + n, lengths.NEXT_N - 1) * lengths.stride_row),)
    return found


@gluon.jit
def _tiles_of(rows, max_context):
    """Tiles of a query block, from the lengths of its rows."""
    longest = gl.maximum(rows[0], 0)
    for n in gl.static_range(1, len(rows)):
        longest = gl.maximum(longest, rows[n])
    return (gl.minimum(longest, max_context) + BLOCK_KV - 1) // BLOCK_KV


@gluon.jit
def _tiles(lengths, query_block):
    """Tiles of a query block."""
    return _tiles_of(_lengths(lengths, query_block), lengths.max_context)


@gluon.jit
def _chunk_lengths(lengths, begin):
    """Lengths of CHUNK query blocks, each by one thread; of the last one behind it, for ptxas branches about every
    mbarrier.init behind a masked load."""
    query_block = begin + gl.arange(0, CHUNK, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return _lengths(lengths, gl.minimum(query_block, lengths.query_blocks - 1))


@gluon.jit
def _chunk_tiles(rows, lengths, begin):
    """Tiles of CHUNK query blocks, in every warp. The lengths are waited for here: ptxas hoists arithmetic, but no
    shared memory."""
    EVERYWHERE: gl.constexpr = gl.BlockedLayout([CHUNK // 32], [32], [4], [0])
    copies = ()
    for n in gl.static_range(len(rows)):
        copies = copies + (gl.convert_layout(rows[n], EVERYWHERE),)
    exists = begin + gl.arange(0, CHUNK, layout=EVERYWHERE) < lengths.query_blocks
    return gl.where(exists, _tiles_of(copies, lengths.max_context), 0)


@gluon.jit
def _entries(table, column, max_blocks):
    """Of a block table, as they are; -1 behind its last."""
    return gl.load(table + column, mask=column < max_blocks, other=-1)


@gluon.jit
def _producer(
    shared, bars, codes, scales, q, lengths, block_table, num_blocks, max_blocks, stride_table, run,
    HEADS: gl.constexpr,
):  # fmt: skip
    """Load a query block, then its tiles, each with where its keys end at the latest: at 0 where the cache has no such
    block, which comes as zeros and is read nowhere."""
    STAGES: gl.constexpr = shared.keys.shape[0]
    BLOCKS: gl.constexpr = blocks_of(lengths.NEXT_N, lengths.BLOCK_Q)
    lane = gl.arange(0, ENTRIES, layout=gl.BlockedLayout([1], [32], [1], [0]))
    done, blocks_done = 0, 0
    skip = run.skip
    for query_block in range(run.first, run.last):
        request = query_block // BLOCKS
        table = block_table + request.to(gl.int64) * stride_table
        next_entries = _entries(table, skip + lane, max_blocks)  # on its way while lengths are
        tiles = _tiles(lengths, query_block)
        own = gl.maximum(gl.minimum(tiles - skip, run.count - done), 0)
        if own > 0:
            q_stage, phase = ring(blocks_done, Q_STAGES)
            mbarrier.wait(bars.q_empty.index(q_stage), phase ^ 1)
            q_full = bars.q_full.index(q_stage)
            mbarrier.expect(q_full, shared.queries.shape[1] * shared.queries.shape[2])
            row = request * lengths.NEXT_N + query_block % BLOCKS * lengths.BLOCK_Q
            tma_load(q, [row * HEADS, 0], q_full, shared.queries.index(q_stage))
            for begin in range(0, own, ENTRIES):
                entries = next_entries
                next_entries = _entries(table, skip + begin + ENTRIES + lane, max_blocks)
                for i in range(begin, gl.minimum(begin + ENTRIES, own)):
                    stage, phase = ring(done + i, STAGES)
                    block = gl.sum(gl.where(lane == i - begin, entries, 0), 0)
                    kv_valid = (block >= 0) & (block < num_blocks)
                    block = gl.where(kv_valid, block, -1)
                    end = gl.where(kv_valid, 2**31 - 1, 0)
                    mbarrier.wait(bars.empty.index(stage), phase ^ 1)
                    shared.ends.index(stage).store(gl.full([1], end, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
                    full = bars.full.index(stage)
                    mbarrier.expect(full, shared.keys.shape[2] * shared.keys.shape[3] + shared.scales.shape[2] * 4)
                    tma_load(codes, [block, 0, 0], full, shared.keys.index(stage))
                    tma_load(scales, [block, 0], full, shared.scales.index(stage))
        done += own
        blocks_done += (own > 0).to(gl.int32)
        skip = 0


@gluon.jit
def _clear(lengths, output):
    """-inf behind the last tile of every query block; CTAs share one where there are fewer of them."""
    NEXT_N: gl.constexpr = lengths.NEXT_N
    BLOCK_Q: gl.constexpr = lengths.BLOCK_Q
    BLOCKS: gl.constexpr = blocks_of(NEXT_N, BLOCK_Q)
    WIDTH: gl.constexpr = 512
    column = gl.arange(0, WIDTH, layout=gl.BlockedLayout([1], [32], [4], [0]))
    nothing = gl.full([WIDTH], -float("inf"), gl.float32, gl.BlockedLayout([1], [32], [4], [0]))
    ctas, query_blocks = gl.num_programs(0), lengths.query_blocks
    part = gl.program_id(0) // query_blocks
    for query_block in range(gl.program_id(0) % query_blocks, query_blocks, ctas):
        parts = gl.maximum((ctas - query_block + query_blocks - 1) // query_blocks, 1)
        begin = _tiles(lengths, query_block) * BLOCK_KV
        first_row = query_block % BLOCKS * BLOCK_Q
        to = output.out + ((query_block // BLOCKS).to(gl.int64) * NEXT_N + first_row) * output.stride_out + column
        for position in range(begin + part * WIDTH, lengths.max_context, parts * WIDTH):
            for n in gl.static_range(BLOCK_Q):
                inside = (position + column < lengths.max_context) & (first_row + n < NEXT_N)
                gl.store(to + n * output.stride_out + position, nothing, mask=inside)


@gluon.jit
def _store(to, values, mask, keep_in_l2):
    """``keep_in_l2``: while it has anything else to evict. A write between reads costs DRAM more than its bytes."""
    if keep_in_l2:
        gl.store(to, values, mask=mask, eviction_policy="evict_last")
    else:
        gl.store(to, values, mask=mask)


@gluon.jit
def _consumer(shared, bars, lengths, output, run, keep_in_l2, which: gl.constexpr, HEADS: gl.constexpr):
    """Score every tile of the CTA's run whose turn it is, and COLUMNS of a query block's columns, or all of them."""
    NEXT_N: gl.constexpr = lengths.NEXT_N
    BLOCK_Q: gl.constexpr = lengths.BLOCK_Q
    CLEAR: gl.constexpr = output.CLEAR
    GROUP: gl.constexpr = output.GROUP
    STAGES: gl.constexpr = shared.keys.shape[0]
    BLOCKS: gl.constexpr = blocks_of(NEXT_N, BLOCK_Q)
    PRODUCTS: gl.constexpr = products(shared.queries.shape[1])
    ROWS: gl.constexpr = BLOCK_Q // PRODUCTS
    FIRST_ROW: gl.constexpr = which % PRODUCTS * ROWS  # of its own product, of a tile
    TURN: gl.constexpr = which // PRODUCTS
    TURNS: gl.constexpr = CONSUMERS // PRODUCTS
    COLUMN: gl.constexpr = gl.SliceLayout(0, product_layout(ROWS * HEADS))
    SCORES: gl.constexpr = scores_layout(ROWS)
    KEY: gl.constexpr = gl.SliceLayout(1, SCORES)
    key = gl.arange(0, BLOCK_KV, layout=KEY)
    column = gl.arange(0, ROWS * HEADS, layout=COLUMN)
    own_row = FIRST_ROW + gl.arange(0, ROWS, layout=gl.SliceLayout(0, SCORES))
    gl.static_assert(GROUP == 1 or not CLEAR)  # what is written ends with a group
    if GROUP > 1:
        MAXIMA: gl.constexpr = maxima_layout(ROWS, GROUP)
        group = gl.arange(0, BLOCK_KV // GROUP, layout=gl.SliceLayout(1, MAXIMA))
        maxima_row = FIRST_ROW + gl.arange(0, ROWS, layout=gl.SliceLayout(0, MAXIMA))
    if CLEAR and which == 0:  # while the first keys are under way
        _clear(lengths, output)
    done, blocks_done = 0, 0
    skip = run.skip
    for nth in range(run.last - run.first):  # from 0, for query blocks as wide as addresses take two registers
        query_block = run.first + nth
        tiles = _tiles(lengths, query_block)
        own = gl.maximum(gl.minimum(tiles - skip, run.count - done), 0)
        if own > 0:
            request = (query_block // BLOCKS).to(gl.int64)
            first_row = query_block % BLOCKS * BLOCK_Q
            present = NEXT_N - first_row
            to = gl.expand_dims(output.out + (request * NEXT_N + first_row + own_row) * output.stride_out, 0)
            lens = lengths.lens + request * lengths.stride_request
            limit = gl.load(lens + (first_row + own_row) * lengths.stride_row, mask=own_row < present, other=0)
            limit = gl.expand_dims(gl.minimum(limit, lengths.max_context), 0)
            written = limit
            if CLEAR:
                written = gl.expand_dims(gl.where(own_row < present, lengths.max_context, 0), 0)
            if GROUP > 1:
                maxima = output.maxima + (request * NEXT_N + first_row + maxima_row) * output.stride_maxima
                to_maxima = gl.expand_dims(maxima, 0)
                groups = gl.where(maxima_row < present, (lengths.max_context + GROUP - 1) // GROUP, 0)
                groups = gl.expand_dims(groups, 0)
                written = (limit + GROUP - 1) // GROUP * GROUP
            row = FIRST_ROW + column // HEADS
            weights = output.weights + (request * NEXT_N + first_row + row) * output.stride_weights_row
            weights = weights + column % HEADS * output.stride_weights_head
            half_weights = 0.5 * gl.load(weights, mask=row < present, other=0.0)
            q_stage, phase = ring(blocks_done, Q_STAGES)
            mbarrier.wait(bars.q_full.index(q_stage), phase)
            for i in range(own_tile(TURN, done, TURNS), own, TURNS):
                stage, phase = ring(done + i, STAGES)
                tile = skip + i
                mbarrier.wait(bars.full.index(stage), phase)
                q = shared.queries.index(q_stage).slice(FIRST_ROW * HEADS, ROWS * HEADS, dim=0)
                product = multiply(shared.keys.index(stage), q)
                product = warpgroup_mma_wait(0, deps=(product,))
                scale = shared.scales.index(stage).reshape([BLOCK_KV]).load(KEY)
                end = gl.expand_dims(shared.ends.index(stage).load(KEY), 1)
                signal(bars.empty.index(stage))
                scores = weighed_sums(product, half_weights, ROWS) * gl.expand_dims(scale, 1)
                position = gl.expand_dims(tile * BLOCK_KV + key, 1)
                scores = gl.where(position < gl.minimum(limit, end), scores, -float("inf"))
                _store(to + position, scores, position < written, keep_in_l2)
                if GROUP > 1:
                    highest = gl.max(gl.reshape(scores, [BLOCK_KV // GROUP, GROUP, ROWS]), 1)
                    highest = gl.convert_layout(highest, MAXIMA, assert_trivial=True)
                    at = gl.expand_dims(tile * (BLOCK_KV // GROUP) + group, 1)
                    _store(to_maxima + at, highest, at < groups, keep_in_l2)
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
    shared = Shared(
        keys=gl.allocate_shared_memory(codes.dtype, [STAGES] + codes.block_shape, codes.layout),
        scales=gl.allocate_shared_memory(scales.dtype, [STAGES] + scales.block_shape, scales.layout),
        ends=gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        queries=gl.allocate_shared_memory(q.dtype, [Q_STAGES] + q.block_shape, q.layout),
    )
    bars = allocate_barriers(STAGES, products(shared.queries.shape[1]))
    lengths = Lengths(context_lens, query_blocks, max_context, stride_lens_request, stride_lens_row, BLOCK_Q, NEXT_N)
    fence_async_shared()
    wait()
    rows = _chunk_lengths(lengths, 0)
    # Every warp looks for the CTA's run by itself.
    tiles = _chunk_tiles(rows, lengths, 0)
    counted = gl.sum(tiles, 0)
    total = counted
    for chunk in range(CHUNK, query_blocks, CHUNK):
        total += gl.sum(_chunk_tiles(_chunk_lengths(lengths, chunk), lengths, chunk), 0)
    if total <= pdl_tiles:
        launch_dependents()
    begin, end = share(total)
    first, skipped, last = search(tiles, 0, begin, end, 0, 0, 0)
    for chunk in range(CHUNK, query_blocks, CHUNK):
        tiles = _chunk_tiles(_chunk_lengths(lengths, chunk), lengths, chunk)
        first, skipped, last = search(tiles, counted, begin, end, first, skipped, last)
        counted += gl.sum(tiles, 0)
    last = gl.minimum(last + 1, query_blocks)
    count = end - begin
    keep_in_l2 = total <= L2_BYTES // (BLOCK_KV * BLOCK_Q * 4)
    run = Run(first, begin - skipped, last, count)
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
