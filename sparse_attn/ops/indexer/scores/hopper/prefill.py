"""Index scores over contiguous fp8 keys on Hopper: see common.py and README.md.

The rows of a query block share its tiles, from the first key that one of them sees to the last. Floor: operations, 2 *
heads * D per row and key. Predicted bound: the matrix unit, 512 clocks a tile of 64 keys and 256 columns, against 330
for the instructions that sum it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from sparse_attn.device.hopper import barrier, signal, tma_load, uniform, wait
from sparse_attn.device.triton_private import aggregate
from sparse_attn.ops.indexer.scores.hopper.common import (
    BLOCK_KV,
    COLUMNS,
    CONSUMERS,
    Q_STAGES,
    Run,
    Scalar,
    allocate_barriers,
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

CHUNK = gl.constexpr(1024)  # query blocks whose tiles are counted at a time


@aggregate
class Shared:
    """Rings in shared memory: tiles of keys and their scales, query blocks and their weights."""

    keys: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    queries: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor


@aggregate
class Ranges:
    """The keys that each of ``rows`` rows sees, of ``keys``."""

    start: gl.tensor
    end: gl.tensor
    rows: Scalar
    keys: Scalar
    stride_start: Scalar
    stride_end: Scalar


@gluon.jit
def range_of(ranges, row):
    """[start, end) of the keys that ``row`` sees; empty, of a row that does not exist."""
    # Clip to the keys that exist; a row behind the last has none.
    exists = row < ranges.rows
    start = gl.load(ranges.start + row.to(gl.int64) * ranges.stride_start, mask=exists, other=0)
    end = gl.load(ranges.end + row.to(gl.int64) * ranges.stride_end, mask=exists, other=0)
    return gl.minimum(gl.maximum(start, 0), ranges.keys), gl.minimum(gl.maximum(end, 0), ranges.keys)


@gluon.jit
def tiles_of(ranges, query_block, BLOCK_Q: gl.constexpr):
    """(first tile, tiles) that some row of a query block sees."""
    # From the lowest start to the highest end of rows that see any key.
    low, high = range_of(ranges, query_block * BLOCK_Q)
    empty = low >= high
    low, high = gl.where(empty, ranges.keys, low), gl.where(empty, 0, high)
    for n in gl.static_range(1, BLOCK_Q):
        start, end = range_of(ranges, query_block * BLOCK_Q + n)
        low = gl.minimum(low, gl.where(start < end, start, ranges.keys))
        high = gl.maximum(high, gl.where(start < end, end, 0))
    first = low // BLOCK_KV
    return first, gl.maximum((high + BLOCK_KV - 1) // BLOCK_KV - first, 0)


@gluon.jit
def count_blocks(rows, BLOCK_Q: gl.constexpr):
    """(the first CHUNK query blocks, how many there are)."""
    return gl.arange(0, CHUNK, layout=gl.BlockedLayout([1], [32], [4], [0])), (rows + BLOCK_Q - 1) // BLOCK_Q


@gluon.jit
def find_run(ranges, query_block, query_blocks, BLOCK_Q: gl.constexpr):
    """The CTA's run. query_block, query_blocks: as count_blocks gives them."""
    # First pass: tiles of all query blocks, CHUNK at a time.
    _, tiles = tiles_of(ranges, query_block, BLOCK_Q)

    counted = gl.sum(tiles, 0)
    total = counted
    for chunk in range(CHUNK, query_blocks, CHUNK):
        _, others = tiles_of(ranges, chunk + query_block, BLOCK_Q)
        total += gl.sum(others, 0)
    # Second pass: which query blocks the CTA's tiles begin and end in. The first chunk is still in registers.
    begin, end = share(total)
    first, skipped, last = search(tiles, 0, begin, end, 0, 0, 0)
    for chunk in range(CHUNK, query_blocks, CHUNK):
        _, others = tiles_of(ranges, chunk + query_block, BLOCK_Q)
        first, skipped, last = search(others, counted, begin, end, first, skipped, last)
        counted += gl.sum(others, 0)
    last = gl.minimum(last + 1, query_blocks)
    return Run(uniform(first), uniform(begin - skipped), uniform(last), uniform(end - begin))


@gluon.jit
def producer(
    shared, bars, k, k_scale, q, weights, ranges, run, BLOCK_Q: gl.constexpr, PREPARED: gl.constexpr = False,
):  # fmt: skip
    """Load a query block and its weights, then its tiles; zeros behind the last key and the last row. PREPARED: other
    warps bring query blocks."""
    STAGES: gl.constexpr = shared.keys.shape[0]
    MMA_COLUMNS: gl.constexpr = shared.queries.shape[1]
    done, blocks_done = 0, 0
    skip = run.skip
    for query_block in range(run.first, run.last):
        # How many of the query block's tiles are this CTA's.
        begin, tiles = tiles_of(ranges, query_block, BLOCK_Q)
        own = gl.maximum(gl.minimum(tiles - skip, run.count - done), 0)
        if own > 0:
            if not PREPARED:
                # All consumers are done with the query block that was here.
                q_stage, phase = ring(blocks_done, Q_STAGES)
                mbarrier.wait(bars.q_empty.index(q_stage), phase ^ 1)
                q_full = bars.q_full.index(q_stage)
                mbarrier.expect(
                    q_full,
                    MMA_COLUMNS * shared.queries.shape[2] + shared.weights.shape[1] * shared.weights.shape[2] * 4,
                )
                tma_load(q, [query_block * MMA_COLUMNS, 0], q_full, shared.queries.index(q_stage))
                tma_load(weights, [query_block * BLOCK_Q, 0], q_full, shared.weights.index(q_stage))
            # Tiles, as far ahead as the ring allows.
            for i in range(own):
                stage, phase = ring(done + i, STAGES)
                key = (begin + skip + i) * BLOCK_KV
                mbarrier.wait(bars.empty.index(stage), phase ^ 1)
                # The bytes of codes and scales complete full.
                full = bars.full.index(stage)
                mbarrier.expect(full, shared.keys.shape[1] * shared.keys.shape[2] + shared.scales.shape[2] * 4)
                tma_load(k, [key, 0], full, shared.keys.index(stage))
                tma_load(k_scale, [0, key], full, shared.scales.index(stage))
        # The ring goes on over query blocks, so the number of tiles is carried.
        done += own
        blocks_done += (own > 0).to(gl.int32)
        skip = 0


@gluon.jit
def consumer(
    shared, bars, ranges, out, stride_out, run, which: gl.constexpr, BLOCK_Q: gl.constexpr, half=0.5
):  # fmt: skip
    """Score every tile of the CTA's run whose turn it is, and COLUMNS of a query block's columns. half: makes
    ``half_weights`` of the weights in shared memory."""
    # A tile has one product or two, of COLUMNS columns each. TURN: which tiles are this consumer's.
    STAGES: gl.constexpr = shared.keys.shape[0]
    PRODUCTS: gl.constexpr = products(shared.queries.shape[1])
    PRODUCT: gl.constexpr = which % PRODUCTS  # its own, of a tile
    TURN: gl.constexpr = which // PRODUCTS
    TURNS: gl.constexpr = CONSUMERS // PRODUCTS
    ROWS: gl.constexpr = BLOCK_Q // PRODUCTS
    COLUMN: gl.constexpr = gl.SliceLayout(0, product_layout(COLUMNS))
    SCORES: gl.constexpr = scores_layout(ROWS)
    KEY: gl.constexpr = gl.SliceLayout(1, SCORES)
    key = gl.arange(0, BLOCK_KV, layout=KEY)
    row = PRODUCT * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, SCORES))
    done, blocks_done = 0, 0
    skip = run.skip
    for nth in range(run.last - run.first):  # from 0, for query blocks as wide as addresses take two registers
        query_block = run.first + nth
        # As the producer counts: the same tiles in the same stages.
        begin, tiles = tiles_of(ranges, query_block, BLOCK_Q)
        own = gl.maximum(gl.minimum(tiles - skip, run.count - done), 0)
        if own > 0:
            # A row's scores begin with its first key: offsets are relative to ``start``.
            start, end = range_of(ranges, query_block * BLOCK_Q + row)
            to = gl.expand_dims(out + ((query_block * BLOCK_Q + row).to(gl.int64) * stride_out + start), 0)
            length = gl.expand_dims(gl.maximum(end - start, 0), 0).to(gl.uint32)
            offset = gl.expand_dims((begin + skip) * BLOCK_KV + key, 1) - gl.expand_dims(start, 0)
            # Weights come with the query block.
            q_stage, phase = ring(blocks_done, Q_STAGES)
            mbarrier.wait(bars.q_full.index(q_stage), phase)
            weights = shared.weights.index(q_stage).reshape([PRODUCTS * COLUMNS])
            half_weights = half * weights.slice(PRODUCT * COLUMNS, COLUMNS).load(COLUMN)
            # Every TURNS-th tile, whichever query block it is of.
            for i in range(own_tile(TURN, done, TURNS), own, TURNS):
                stage, phase = ring(done + i, STAGES)
                mbarrier.wait(bars.full.index(stage), phase)
                q = shared.queries.index(q_stage).slice(PRODUCT * COLUMNS, COLUMNS, dim=0)
                product = multiply(shared.keys.index(stage), q)
                # The scale is read beside the product; then the stage is free.
                scale = shared.scales.index(stage).reshape([BLOCK_KV]).load(KEY)
                product = warpgroup_mma_wait(0, deps=(product,))
                signal(bars.empty.index(stage))
                scores = weighed_sums(product, half_weights, ROWS) * gl.expand_dims(scale, 1)
                # Unsigned, so that one comparison leaves out keys before a row's first, too.
                at = offset + i * BLOCK_KV
                gl.store(to + at, scores, mask=at.to(gl.uint32) < length)
            signal(bars.q_empty.index(q_stage))
        done += own
        blocks_done += (own > 0).to(gl.int32)
        skip = 0


@gluon.jit(
    do_not_specialize=["rows", "keys", "stride_out_row"],
    do_not_specialize_on_alignment=["kv_start", "kv_end", "out"],
)
def mqa_logits(
    q,  # fp8 [rows * heads, D], boxes of BLOCK_Q * heads
    k,  # fp8 [keys, D], boxes of BLOCK_KV
    k_scale,  # fp32 [1, keys], boxes of BLOCK_KV
    weights,  # fp32 [rows, heads], boxes of BLOCK_Q
    kv_start,  # int32 [rows]
    kv_end,  # int32 [rows]
    out,  # fp32 [rows, keys]
    rows,
    keys,
    stride_start_row,
    stride_end_row,
    stride_out_row,
    STAGES: gl.constexpr,  # tiles in flight
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    # Rings of tiles and of query blocks.
    BLOCK_Q: gl.constexpr = weights.block_shape[0]
    query_block, query_blocks = count_blocks(rows, BLOCK_Q)
    shared = Shared(
        keys=gl.allocate_shared_memory(k.dtype, [STAGES] + k.block_shape, k.layout),
        scales=gl.allocate_shared_memory(k_scale.dtype, [STAGES] + k_scale.block_shape, k_scale.layout),
        queries=gl.allocate_shared_memory(q.dtype, [Q_STAGES] + q.block_shape, q.layout),
        weights=gl.allocate_shared_memory(weights.dtype, [Q_STAGES] + weights.block_shape, weights.layout),
    )
    bars = allocate_barriers(STAGES, products(shared.queries.shape[1]))
    ranges = Ranges(kv_start, kv_end, rows, keys, stride_start_row, stride_end_row)
    # Barriers are seen before any warp uses them. PDL: ranges may be the launch before's.
    fence_async_shared()
    wait()
    run = find_run(ranges, query_block, query_blocks, BLOCK_Q)
    barrier()
    gl.warp_specialize(
        [
            (consumer, (shared, bars, ranges, out, stride_out_row, run, 0, BLOCK_Q)),
            (consumer, (shared, bars, ranges, out, stride_out_row, run, 1, BLOCK_Q)),
            (consumer, (shared, bars, ranges, out, stride_out_row, run, 2, BLOCK_Q)),
            (consumer, (shared, bars, ranges, out, stride_out_row, run, 3, BLOCK_Q)),
            (producer, (shared, bars, k, k_scale, q, weights, ranges, run, BLOCK_Q)),
        ],
        [4, 4, 4, 1],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
