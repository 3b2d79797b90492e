"""Index scores over contiguous fp8 keys on Hopper: see hopper.py.

Floor: operations, 2 * heads * D per row and key. A unit's rows share its tiles, from the first key that one of them
sees to the last. Predicted bound: the matrix unit, 512 clocks a tile of 64 keys and 256 lanes, against 330 for what is
issued to sum it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from sparse_attn.device.hopper import barrier, signal, tma_load, wait
from sparse_attn.ops.index_logits.hopper.common import (
    CONSUMERS,
    LANES,
    QUERIES,
    TILE,
    allocate_rings,
    multiply,
    own_tile,
    product_layout,
    products,
    ring,
    scores_layout,
    search,
    share,
    sums,
)

CHUNK = gl.constexpr(1024)  # units whose tiles are counted at a time


@gluon.jit
def _range(kv_start, kv_end, row, rows, keys, stride_start, stride_end):
    """[start, end) of the keys that ``row`` sees; empty, of a row that does not exist."""
    start = gl.load(kv_start + row.to(gl.int64) * stride_start, mask=row < rows, other=0)
    end = gl.load(kv_end + row.to(gl.int64) * stride_end, mask=row < rows, other=0)
    return gl.minimum(gl.maximum(start, 0), keys), gl.minimum(gl.maximum(end, 0), keys)


@gluon.jit
def _span(kv_start, kv_end, unit, rows, keys, stride_start, stride_end, ROWS: gl.constexpr):
    """(first tile, tiles) that some row of a unit sees."""
    low, high = _range(kv_start, kv_end, unit * ROWS, rows, keys, stride_start, stride_end)
    empty = low >= high
    low, high = gl.where(empty, keys, low), gl.where(empty, 0, high)
    for n in gl.static_range(1, ROWS):
        start, end = _range(kv_start, kv_end, unit * ROWS + n, rows, keys, stride_start, stride_end)
        low = gl.minimum(low, gl.where(start < end, start, keys))
        high = gl.maximum(high, gl.where(start < end, end, 0))
    first = low // TILE
    return first, gl.maximum((high + TILE - 1) // TILE - first, 0)


@gluon.jit
def _fill(
    tiles, scales, queries, weights, filled, freed, query_filled, query_freed, k, k_scale, q, weight, kv_start, kv_end, rows,
    keys, stride_start, stride_end, first, skip, last, count, ROWS: gl.constexpr,
):  # fmt: skip
    """The producer: a unit's queries and weights, then its tiles; zeros behind the last key and the last row."""
    TILES: gl.constexpr = tiles.shape[0]
    done, turn = 0, 0
    for unit in range(first, last):
        begin, there = _span(kv_start, kv_end, unit, rows, keys, stride_start, stride_end, ROWS)
        some = gl.maximum(gl.minimum(there - skip, count - done), 0)
        if some > 0:
            place, phase = ring(turn, QUERIES)
            mbarrier.wait(query_freed.index(place), phase ^ 1)
            ready = query_filled.index(place)
            mbarrier.expect(ready, queries.shape[1] * queries.shape[2] + weights.shape[1] * weights.shape[2] * 4)
            tma_load(q, [unit * queries.shape[1], 0], ready, queries.index(place))
            tma_load(weight, [unit * ROWS, 0], ready, weights.index(place))
            for i in range(some):
                slot, phase = ring(done + i, TILES)
                at = (begin + skip + i) * TILE
                mbarrier.wait(freed.index(slot), phase ^ 1)
                mbarrier.expect(filled.index(slot), tiles.shape[1] * tiles.shape[2] + scales.shape[2] * 4)
                tma_load(k, [at, 0], filled.index(slot), tiles.index(slot))
                tma_load(k_scale, [0, at], filled.index(slot), scales.index(slot))
        done += some
        turn += (some > 0).to(gl.int32)
        skip = 0


@gluon.jit
def _score(common, which: gl.constexpr, ROWS: gl.constexpr):
    """A consumer: of every tile of the program's share that is its turn LANES of the lanes. common: to all
    consumers."""
    (
        tiles, scales, queries, weights, filled, freed, query_filled, query_freed, kv_start, kv_end, out, rows, keys,
        stride_start, stride_end, stride_out, first, skip, last, count,
    ) = common  # fmt: skip
    TILES: gl.constexpr = tiles.shape[0]
    PARTS: gl.constexpr = products(queries.shape[1])
    TURNS: gl.constexpr = CONSUMERS // PARTS
    SOME: gl.constexpr = ROWS // PARTS
    PART: gl.constexpr = which % PARTS
    LANE: gl.constexpr = gl.SliceLayout(0, product_layout(LANES))
    SCORES: gl.constexpr = scores_layout(SOME)
    KEY: gl.constexpr = gl.SliceLayout(1, SCORES)
    key = gl.arange(0, TILE, layout=KEY)
    row = PART * SOME + gl.arange(0, SOME, layout=gl.SliceLayout(0, SCORES))
    done, turn = 0, 0
    for nth in range(last - first):  # from 0, for units as wide as addresses take two registers
        unit = first + nth
        begin, there = _span(kv_start, kv_end, unit, rows, keys, stride_start, stride_end, ROWS)
        some = gl.maximum(gl.minimum(there - skip, count - done), 0)
        if some > 0:
            start, end = _range(kv_start, kv_end, unit * ROWS + row, rows, keys, stride_start, stride_end)
            to = gl.expand_dims(out + ((unit * ROWS + row).to(gl.int64) * stride_out + start), 0)
            length = gl.expand_dims(gl.maximum(end - start, 0), 0).to(gl.uint32)
            ahead = gl.expand_dims((begin + skip) * TILE + key, 1) - gl.expand_dims(start, 0)
            place, phase = ring(turn, QUERIES)
            mbarrier.wait(query_filled.index(place), phase)
            halves = 0.5 * weights.index(place).reshape([PARTS * LANES]).slice(PART * LANES, LANES).load(LANE)
            for i in range(own_tile(which // PARTS, done, TURNS), some, TURNS):
                slot, phase = ring(done + i, TILES)
                mbarrier.wait(filled.index(slot), phase)
                product = multiply(tiles.index(slot), queries.index(place).slice(PART * LANES, LANES, dim=0))
                scale = scales.index(slot).reshape([TILE]).load(KEY)
                product = warpgroup_mma_wait(0, deps=(product,))
                signal(freed.index(slot))
                scores = sums(product, halves, SOME) * gl.expand_dims(scale, 1)
                at = ahead + i * TILE
                gl.store(to + at, scores, mask=at.to(gl.uint32) < length)
            signal(query_freed.index(place))
        done += some
        turn += (some > 0).to(gl.int32)
        skip = 0


@gluon.jit(
    do_not_specialize=["rows", "keys", "stride_out_row"],
    do_not_specialize_on_alignment=["kv_start", "kv_end", "out"],
)
def mqa_logits(
    q,  # fp8 [rows * heads, D], boxes of ROWS * heads
    k,  # fp8 [keys, D], boxes of TILE
    k_scale,  # fp32 [1, keys], boxes of TILE
    weights,  # fp32 [rows, heads], boxes of ROWS
    kv_start,  # int32 [rows]
    kv_end,  # int32 [rows]
    out,  # fp32 [rows, keys]
    rows,
    keys,
    stride_start_row,
    stride_end_row,
    stride_out_row,
    TILES: gl.constexpr,  # in flight
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    ROWS: gl.constexpr = weights.block_shape[0]
    unit = gl.arange(0, CHUNK, layout=gl.BlockedLayout([1], [32], [4], [0]))
    units = (rows + ROWS - 1) // ROWS
    tiles = gl.allocate_shared_memory(k.dtype, [TILES] + k.block_shape, k.layout)
    scales = gl.allocate_shared_memory(k_scale.dtype, [TILES] + k_scale.block_shape, k_scale.layout)
    queries = gl.allocate_shared_memory(q.dtype, [QUERIES] + q.block_shape, q.layout)
    weighing = gl.allocate_shared_memory(weights.dtype, [QUERIES] + weights.block_shape, weights.layout)
    filled, freed, query_filled, query_freed = allocate_rings(TILES, products(queries.shape[1]))
    fence_async_shared()
    wait()
    _, there = _span(kv_start, kv_end, unit, rows, keys, stride_start_row, stride_end_row, ROWS)

    counted = gl.sum(there, 0)
    total = counted
    for chunk in range(CHUNK, units, CHUNK):
        _, others = _span(kv_start, kv_end, chunk + unit, rows, keys, stride_start_row, stride_end_row, ROWS)
        total += gl.sum(others, 0)
    begin, end = share(total)
    first, skipped, last = search(there, 0, begin, end, 0, 0, 0)
    for chunk in range(CHUNK, units, CHUNK):
        _, others = _span(kv_start, kv_end, chunk + unit, rows, keys, stride_start_row, stride_end_row, ROWS)
        first, skipped, last = search(others, counted, begin, end, first, skipped, last)
        counted += gl.sum(others, 0)
    last = gl.minimum(last + 1, units)
    count = end - begin
    skip = begin - skipped
    barrier()
    common = (
        tiles, scales, queries, weighing, filled, freed, query_filled, query_freed, kv_start, kv_end, out, rows, keys,
        stride_start_row, stride_end_row, stride_out_row, first, skip, last, count,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_score, (common, 0, ROWS)),
            (_score, (common, 1, ROWS)),
            (_score, (common, 2, ROWS)),
            (_score, (common, 3, ROWS)),
            (_fill, (tiles, scales, queries, weighing, filled, freed, query_filled, query_freed, k, k_scale, q, weights,
                     kv_start, kv_end, rows, keys, stride_start_row, stride_end_row, first, skip, last, count, ROWS)),
        ],
        [4, 4, 4, 1],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
