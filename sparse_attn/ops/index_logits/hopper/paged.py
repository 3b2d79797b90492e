"""Index scores over a paged fp8 cache on Hopper, blocks of 64 keys: see hopper.py.

Floor: bytes, a block's codes and scales once per unit and 4 bytes per row and key. All rows of a request, up to four,
are one unit, so the keys of a request are read once. Predicted bound: that, 490 clocks a block on 132 multiprocessors,
against 250 for 128 lanes in the matrix unit. Short contexts: the chain of lengths, block table, keys, one load after
the other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from sparse_attn.device.hopper import barrier, launch_dependents, signal, tma_load, wait
from sparse_attn.ops.index_logits.hopper.common import (
    CONSUMERS,
    QUERIES,
    TILE,
    allocate_rings,
    maxima_layout,
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

CHUNK = gl.constexpr(128)  # units whose tiles are counted at a time
STAYS = gl.constexpr(8 << 20)  # bytes of scores, up to which the L2 holds them beside the keys that stream through it
WINDOW = gl.constexpr(32)  # entries of a block table that the producer holds, one to a lane


@gluon.jit
def _lengths(lens, unit, stride_request, stride_row, ROWS: gl.constexpr, NEXT_N: gl.constexpr):
    """Positions that each row of a unit sees, as they are given, the last again for rows that do not exist: a tuple."""
    GROUPS: gl.constexpr = (NEXT_N + ROWS - 1) // ROWS
    first = unit % GROUPS * ROWS
    at = lens + (unit // GROUPS).to(gl.int64) * stride_request
    lengths = ()
    for n in gl.static_range(ROWS):
        lengths = lengths + (gl.load(at + gl.minimum(first + n, NEXT_N - 1) * stride_row),)
    return lengths


@gluon.jit
def _tiles(lengths, max_context):
    """Tiles of a unit."""
    longest = gl.maximum(lengths[0], 0)
    for n in gl.static_range(1, len(lengths)):
        longest = gl.maximum(longest, lengths[n])
    return (gl.minimum(longest, max_context) + TILE - 1) // TILE


@gluon.jit
def _chunk_lengths(lens, begin, units, stride_request, stride_row, ROWS: gl.constexpr, NEXT_N: gl.constexpr):
    """Lengths of CHUNK units, each by one thread; of the last unit behind it, for ptxas branches about every
    mbarrier.init behind a masked load."""
    unit = begin + gl.arange(0, CHUNK, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return _lengths(lens, gl.minimum(unit, units - 1), stride_request, stride_row, ROWS, NEXT_N)


@gluon.jit
def _chunk_tiles(lengths, begin, units, max_context):
    """Tiles of CHUNK units, in every warp. The lengths are waited for here: ptxas hoists arithmetic, but no shared
    memory."""
    EVERYWHERE: gl.constexpr = gl.BlockedLayout([CHUNK // 32], [32], [4], [0])
    copies = ()
    for n in gl.static_range(len(lengths)):
        copies = copies + (gl.convert_layout(lengths[n], EVERYWHERE),)
    there = begin + gl.arange(0, CHUNK, layout=EVERYWHERE) < units
    return gl.where(there, _tiles(copies, max_context), 0)


@gluon.jit
def _window(entry, column, max_blocks):
    """Entries of a block table, as they are; -1 behind its last."""
    return gl.load(entry + column, mask=column < max_blocks, other=-1)


@gluon.jit
def _fill(
    keys, scales, ends, queries, filled, freed, query_filled, query_freed, codes, factors, q, lens, table, units, num_blocks,
    max_context, max_blocks, stride_request, stride_row, stride_table, first, skip, last, count, HEADS: gl.constexpr,
    ROWS: gl.constexpr, NEXT_N: gl.constexpr,
):  # fmt: skip
    """The producer: a unit's queries, then its blocks, each with where its keys end at the latest: at 0 where the cache
    has no such block, which comes as zeros and is read nowhere."""
    TILES: gl.constexpr = keys.shape[0]
    GROUPS: gl.constexpr = (NEXT_N + ROWS - 1) // ROWS
    lane = gl.arange(0, WINDOW, layout=gl.BlockedLayout([1], [32], [1], [0]))
    done, turn = 0, 0
    for unit in range(first, last):
        request = unit // GROUPS
        entry = table + request.to(gl.int64) * stride_table
        after = _window(entry, skip + lane, max_blocks)  # on its way while lengths are
        there = _tiles(_lengths(lens, unit, stride_request, stride_row, ROWS, NEXT_N), max_context)
        some = gl.maximum(gl.minimum(there - skip, count - done), 0)
        if some > 0:
            place, phase = ring(turn, QUERIES)
            mbarrier.wait(query_freed.index(place), phase ^ 1)
            mbarrier.expect(query_filled.index(place), queries.shape[1] * queries.shape[2])
            row = request * NEXT_N + unit % GROUPS * ROWS
            tma_load(q, [row * HEADS, 0], query_filled.index(place), queries.index(place))
            for begin in range(0, some, WINDOW):
                window = after
                after = _window(entry, skip + begin + WINDOW + lane, max_blocks)
                for i in range(begin, gl.minimum(begin + WINDOW, some)):
                    slot, phase = ring(done + i, TILES)
                    block = gl.sum(gl.where(lane == i - begin, window, 0), 0)
                    known = (block >= 0) & (block < num_blocks)
                    block = gl.where(known, block, -1)
                    end = gl.where(known, 2**31 - 1, 0)
                    mbarrier.wait(freed.index(slot), phase ^ 1)
                    ends.index(slot).store(gl.full([1], end, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
                    mbarrier.expect(filled.index(slot), keys.shape[2] * keys.shape[3] + scales.shape[2] * 4)
                    tma_load(codes, [block, 0, 0], filled.index(slot), keys.index(slot))
                    tma_load(factors, [block, 0], filled.index(slot), scales.index(slot))
        done += some
        turn += (some > 0).to(gl.int32)
        skip = 0


@gluon.jit
def _clear(
    out, lens, units, max_context, stride_request, stride_row, stride_out, ROWS: gl.constexpr, NEXT_N: gl.constexpr,
):  # fmt: skip
    """-inf behind the last tile of every unit; programs share a unit where there are fewer units."""
    GROUPS: gl.constexpr = (NEXT_N + ROWS - 1) // ROWS
    WIDTH: gl.constexpr = 512
    column = gl.arange(0, WIDTH, layout=gl.BlockedLayout([1], [32], [4], [0]))
    nothing = gl.full([WIDTH], -float("inf"), gl.float32, gl.BlockedLayout([1], [32], [4], [0]))
    programs = gl.num_programs(0)
    part = gl.program_id(0) // units
    for unit in range(gl.program_id(0) % units, units, programs):
        parts = gl.maximum((programs - unit + units - 1) // units, 1)
        there = _tiles(_lengths(lens, unit, stride_request, stride_row, ROWS, NEXT_N), max_context)
        begin = there * TILE
        first_row = unit % GROUPS * ROWS
        to = out + ((unit // GROUPS).to(gl.int64) * NEXT_N + first_row) * stride_out + column
        for position in range(begin + part * WIDTH, max_context, parts * WIDTH):
            for n in gl.static_range(ROWS):
                inside = (position + column < max_context) & (first_row + n < NEXT_N)
                gl.store(to + n * stride_out + position, nothing, mask=inside)


@gluon.jit
def _store(to, values, mask, stay):
    """``stay``: in the L2 while it has anything else to evict. A write between reads costs DRAM more than its bytes."""
    if stay:
        gl.store(to, values, mask=mask, eviction_policy="evict_last")
    else:
        gl.store(to, values, mask=mask)


@gluon.jit
def _score(
    common, which: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr, NEXT_N: gl.constexpr, CLEAN: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """A consumer: of every tile of the program's share that is its turn LANES of the lanes, or all. common: to all
    consumers."""
    (
        keys, scales, ends, queries, filled, freed, query_filled, query_freed, weights, lens, out, maxima, units, max_context,
        stride_weights_row, stride_weights_head, stride_request, stride_row, stride_out, stride_maxima, first, skip, last, count,
        stay,
    ) = common  # fmt: skip
    TILES: gl.constexpr = keys.shape[0]
    GROUPS: gl.constexpr = (NEXT_N + ROWS - 1) // ROWS
    PARTS: gl.constexpr = products(queries.shape[1])
    SOME: gl.constexpr = ROWS // PARTS
    FROM: gl.constexpr = which % PARTS * SOME
    TURNS: gl.constexpr = CONSUMERS // PARTS
    LANE: gl.constexpr = gl.SliceLayout(0, product_layout(SOME * HEADS))
    SCORES: gl.constexpr = scores_layout(SOME)
    KEY: gl.constexpr = gl.SliceLayout(1, SCORES)
    key = gl.arange(0, TILE, layout=KEY)
    lane = gl.arange(0, SOME * HEADS, layout=LANE)
    own = FROM + gl.arange(0, SOME, layout=gl.SliceLayout(0, SCORES))
    gl.static_assert(GROUP == 1 or not CLEAN)  # what is written ends with a group
    if GROUP > 1:
        MAXIMA: gl.constexpr = maxima_layout(SOME, GROUP)
        group = gl.arange(0, TILE // GROUP, layout=gl.SliceLayout(1, MAXIMA))
        own_maxima = FROM + gl.arange(0, SOME, layout=gl.SliceLayout(0, MAXIMA))
    if CLEAN and which == 0:  # while the first keys are under way
        _clear(out, lens, units, max_context, stride_request, stride_row, stride_out, ROWS, NEXT_N)
    done, turn = 0, 0
    for nth in range(last - first):  # from 0, for units as wide as addresses take two registers
        unit = first + nth
        there = _tiles(_lengths(lens, unit, stride_request, stride_row, ROWS, NEXT_N), max_context)
        some = gl.maximum(gl.minimum(there - skip, count - done), 0)
        if some > 0:
            request = (unit // GROUPS).to(gl.int64)
            first_row = unit % GROUPS * ROWS
            present = NEXT_N - first_row
            to = gl.expand_dims(out + (request * NEXT_N + first_row + own) * stride_out, 0)
            limit = gl.load(
                lens + request * stride_request + (first_row + own) * stride_row, mask=own < present, other=0
            )
            limit = gl.expand_dims(gl.minimum(limit, max_context), 0)
            written = limit
            if CLEAN:
                written = gl.expand_dims(gl.where(own < present, max_context, 0), 0)
            if GROUP > 1:
                to_maxima = gl.expand_dims(maxima + (request * NEXT_N + first_row + own_maxima) * stride_maxima, 0)
                groups = gl.where(own_maxima < present, (max_context + GROUP - 1) // GROUP, 0)
                groups = gl.expand_dims(groups, 0)
                written = (limit + GROUP - 1) // GROUP * GROUP
            row = FROM + lane // HEADS
            heads = (
                weights + (request * NEXT_N + first_row + row) * stride_weights_row + lane % HEADS * stride_weights_head
            )
            halves = 0.5 * gl.load(heads, mask=row < present, other=0.0)
            place, phase = ring(turn, QUERIES)
            mbarrier.wait(query_filled.index(place), phase)
            for i in range(own_tile(which // PARTS, done, TURNS), some, TURNS):
                slot, phase = ring(done + i, TILES)
                tile = skip + i
                mbarrier.wait(filled.index(slot), phase)
                product = multiply(keys.index(slot), queries.index(place).slice(FROM * HEADS, SOME * HEADS, dim=0))
                product = warpgroup_mma_wait(0, deps=(product,))
                scale = scales.index(slot).reshape([TILE]).load(KEY)
                end = gl.expand_dims(ends.index(slot).load(KEY), 1)
                signal(freed.index(slot))
                scores = sums(product, halves, SOME) * gl.expand_dims(scale, 1)
                position = gl.expand_dims(tile * TILE + key, 1)
                scores = gl.where(position < gl.minimum(limit, end), scores, -float("inf"))
                _store(to + position, scores, position < written, stay)
                if GROUP > 1:
                    highest = gl.max(gl.reshape(scores, [TILE // GROUP, GROUP, SOME]), 1)
                    highest = gl.convert_layout(highest, MAXIMA, assert_trivial=True)
                    at = gl.expand_dims(tile * (TILE // GROUP) + group, 1)
                    _store(to_maxima + at, highest, at < groups, stay)
            signal(query_freed.index(place))
        done += some
        turn += (some > 0).to(gl.int32)
        skip = 0


@gluon.jit(
    do_not_specialize=[
        "units", "num_blocks", "max_context", "max_blocks", "soon", "stride_table_request", "stride_out_row", "stride_maxima_row"
    ],
    do_not_specialize_on_alignment=["context_lens", "block_table", "weights", "out", "maxima"],
)  # fmt: skip
def paged_mqa_logits(
    q,  # fp8 [requests * NEXT_N * HEADS, D], boxes of ROWS * HEADS
    codes,  # fp8 [num_blocks, TILE, D], boxes of a block
    factors,  # fp32 [num_blocks, TILE], boxes of a block
    weights,  # fp32 [requests * NEXT_N, HEADS]
    context_lens,  # int32 [requests, NEXT_N]
    block_table,  # int32 [requests, max_blocks]
    out,  # fp32 [requests * NEXT_N, max_context]
    maxima,  # fp32 [requests * NEXT_N, cdiv(max_context, GROUP)], where GROUP is not 1
    units,  # requests * cdiv(NEXT_N, ROWS)
    num_blocks,
    max_context,
    max_blocks,
    soon,  # tiles of all units that are so few that the next launch may start meanwhile
    stride_weights_row,
    stride_weights_head,
    stride_lens_request,
    stride_lens_row,
    stride_table_request,
    stride_out_row,
    stride_maxima_row,
    HEADS: gl.constexpr,
    ROWS: gl.constexpr,
    NEXT_N: gl.constexpr,
    CLEAN: gl.constexpr,
    GROUP: gl.constexpr,  # neighbours whose highest score goes to ``maxima``
    TILES: gl.constexpr,  # in flight
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    keys = gl.allocate_shared_memory(codes.dtype, [TILES] + codes.block_shape, codes.layout)
    scales = gl.allocate_shared_memory(factors.dtype, [TILES] + factors.block_shape, factors.layout)
    ends = gl.allocate_shared_memory(gl.int32, [TILES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    queries = gl.allocate_shared_memory(q.dtype, [QUERIES] + q.block_shape, q.layout)
    filled, freed, query_filled, query_freed = allocate_rings(TILES, products(queries.shape[1]))
    fence_async_shared()
    wait()
    lengths = _chunk_lengths(context_lens, 0, units, stride_lens_request, stride_lens_row, ROWS, NEXT_N)
    # Every warp looks for the program's share by itself.
    there = _chunk_tiles(lengths, 0, units, max_context)
    counted = gl.sum(there, 0)
    total = counted
    for chunk in range(CHUNK, units, CHUNK):
        others = _chunk_lengths(context_lens, chunk, units, stride_lens_request, stride_lens_row, ROWS, NEXT_N)
        total += gl.sum(_chunk_tiles(others, chunk, units, max_context), 0)
    if total <= soon:
        launch_dependents()
    begin, end = share(total)
    first, skipped, last = search(there, 0, begin, end, 0, 0, 0)
    for chunk in range(CHUNK, units, CHUNK):
        others = _chunk_lengths(context_lens, chunk, units, stride_lens_request, stride_lens_row, ROWS, NEXT_N)
        there = _chunk_tiles(others, chunk, units, max_context)
        first, skipped, last = search(there, counted, begin, end, first, skipped, last)
        counted += gl.sum(there, 0)
    last = gl.minimum(last + 1, units)
    count = end - begin
    stay = total <= STAYS // (TILE * ROWS * 4)
    skip = begin - skipped
    barrier()
    common = (
        keys, scales, ends, queries, filled, freed, query_filled, query_freed, weights, context_lens, out, maxima, units,
        max_context, stride_weights_row, stride_weights_head, stride_lens_request, stride_lens_row, stride_out_row,
        stride_maxima_row, first, skip, last, count, stay,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_score, (common, 0, HEADS, ROWS, NEXT_N, CLEAN, GROUP)),
            (_score, (common, 1, HEADS, ROWS, NEXT_N, CLEAN, GROUP)),
            (_score, (common, 2, HEADS, ROWS, NEXT_N, CLEAN, GROUP)),
            (_score, (common, 3, HEADS, ROWS, NEXT_N, CLEAN, GROUP)),
            (_fill, (keys, scales, ends, queries, filled, freed, query_filled, query_freed, codes, factors, q, context_lens,
                     block_table, units, num_blocks, max_context, max_blocks, stride_lens_request,
                     stride_lens_row, stride_table_request, first, skip, last, count, HEADS, ROWS, NEXT_N)),
        ],
        [4, 4, 4, 1],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
