"""Index scores over a paged fp8 cache on Hopper, blocks of 64 keys: see hopper.py.

Floor: bytes, a block's codes and scales once per unit and 4 bytes per row and key. All rows of a request, up to four, are
one unit, so the keys of a request are read once. Predicted bound: that, 490 clocks a block on 132 multiprocessors, against
250 for 128 lanes in the matrix unit. Short contexts: the chain of lengths, block table, keys, one load after the other.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparse_attn.device.hopper import barrier, signal, start_next, wait
from sparse_attn.ops.index_logits.hopper import (
    CONSUMERS,
    LANES,
    PRODUCTS,
    QUERIES,
    TILE,
    allocate_rings,
    multiply,
    ring,
    search,
    share,
    sums,
)

CHUNK = gl.constexpr(128)  # units whose tiles are counted at a time
SOON = 8  # stages of a program, during which the next launch may start
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
def _stages(lengths, max_context, BLOCKS: gl.constexpr):
    """Stages of a unit, BLOCKS blocks each."""
    SPAN: gl.constexpr = BLOCKS * TILE
    longest = gl.maximum(lengths[0], 0)
    for n in gl.static_range(1, len(lengths)):
        longest = gl.maximum(longest, lengths[n])
    return (gl.minimum(longest, max_context) + SPAN - 1) // SPAN


@gluon.jit
def _chunk_lengths(lens, begin, units, stride_request, stride_row, ROWS: gl.constexpr, NEXT_N: gl.constexpr):
    """Lengths of CHUNK units, each by one thread; of the last unit behind it, for ptxas branches about every mbarrier.init
    behind a masked load."""
    unit = begin + gl.arange(0, CHUNK, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return _lengths(lens, gl.minimum(unit, units - 1), stride_request, stride_row, ROWS, NEXT_N)


@gluon.jit
def _chunk_stages(lengths, begin, units, max_context, BLOCKS: gl.constexpr):
    """Stages of CHUNK units, in every warp. The lengths are waited for here: ptxas hoists arithmetic, but no shared memory."""
    EVERYWHERE: gl.constexpr = gl.BlockedLayout([CHUNK // 32], [32], [4], [0])
    copies = ()
    for n in gl.static_range(len(lengths)):
        copies = copies + (gl.convert_layout(lengths[n], EVERYWHERE),)
    there = begin + gl.arange(0, CHUNK, layout=EVERYWHERE) < units
    return gl.where(there, _stages(copies, max_context, BLOCKS), 0)


@gluon.jit
def _limits(lens, first_row, max_context, stride_row, ROWS: gl.constexpr, NEXT_N: gl.constexpr):
    """Positions that each row of a unit sees; none, of a row that does not exist."""
    limits = ()
    for n in gl.static_range(ROWS):
        row = first_row + n
        limit = gl.load(lens + row * stride_row, mask=row < NEXT_N, other=0)
        limits = limits + (gl.minimum(limit, max_context),)
    return limits


@gluon.jit
def _blocks(entry, stage, num_blocks, max_blocks, BLOCKS: gl.constexpr):
    """The blocks of a stage, -1 where there is none: a tuple of PRODUCTS."""
    blocks = ()
    for which in gl.static_range(PRODUCTS):
        at = stage * BLOCKS + which * BLOCKS // PRODUCTS
        block = gl.load(entry + at, mask=at < max_blocks, other=-1)
        blocks = blocks + (gl.where((block >= 0) & (block < num_blocks), block, -1),)
    return blocks


@gluon.jit
def _window(entry, column, max_blocks):
    """Entries of a block table, as they are; -1 behind its last."""
    return gl.load(entry + column, mask=column < max_blocks, other=-1)


@gluon.jit
def _fill(
    keys, scales, queries, filled, freed, query_filled, query_freed, codes, factors, q, lens, table, units, num_blocks,
    max_context, max_blocks, stride_request, stride_row, stride_table, first, skip, last, count, HEADS: gl.constexpr,
    ROWS: gl.constexpr, NEXT_N: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """The producer: a unit's queries, then its blocks. What lies outside the cache comes as zeros and is read nowhere."""
    STAGES: gl.constexpr = keys.shape[0] // BLOCKS
    GROUPS: gl.constexpr = (NEXT_N + ROWS - 1) // ROWS
    PER: gl.constexpr = WINDOW // BLOCKS
    lane = gl.arange(0, WINDOW, layout=gl.BlockedLayout([1], [32], [1], [0]))
    done, turn = 0, 0
    for unit in range(first, last):
        stages = _stages(_lengths(lens, unit, stride_request, stride_row, ROWS, NEXT_N), max_context, BLOCKS)
        some = gl.maximum(gl.minimum(stages - skip, count - done), 0)
        if some > 0:
            request = unit // GROUPS
            entry = table + request.to(gl.int64) * stride_table
            after = _window(entry, skip * BLOCKS + lane, max_blocks)
            place, phase = ring(turn, QUERIES)
            mbarrier.wait(query_freed.index(place), phase ^ 1)
            mbarrier.expect(query_filled.index(place), queries.shape[1] * queries.shape[2])
            row = request * NEXT_N + unit % GROUPS * ROWS
            tma.async_copy_global_to_shared(q, [row * HEADS, 0], query_filled.index(place), queries.index(place))
            for begin in range(0, some, PER):
                window = after
                after = _window(entry, (skip + begin + PER) * BLOCKS + lane, max_blocks)
                for i in range(begin, gl.minimum(begin + PER, some)):
                    slot, phase = ring(done + i, STAGES)
                    mbarrier.wait(freed.index(slot), phase ^ 1)
                    mbarrier.expect(filled.index(slot), BLOCKS * (keys.shape[2] * keys.shape[3] + scales.shape[2] * 4))
                    for n in gl.static_range(BLOCKS):
                        block = gl.sum(gl.where(lane == (i - begin) * BLOCKS + n, window, 0), 0)
                        block = gl.where((block >= 0) & (block < num_blocks), block, -1)
                        at = slot * BLOCKS + n
                        tma.async_copy_global_to_shared(codes, [block, 0, 0], filled.index(slot), keys.index(at))
                        tma.async_copy_global_to_shared(factors, [block, 0], filled.index(slot), scales.index(at))
        done += some
        turn += (some > 0).to(gl.int32)
        skip = 0


@gluon.jit
def _write(
    product, weight, scale, tile, known, limits, to, present, max_context, stride_out, FROM: gl.constexpr, SOME: gl.constexpr,
    CLEAN: gl.constexpr,
):  # fmt: skip
    """A product's scores, of SOME of the unit's rows."""
    position = tile * TILE + gl.arange(0, TILE, layout=scale.type.layout)
    scores = sums(product, weight, SOME)
    for n in gl.static_range(SOME):
        limit = limits[FROM + n]
        score = gl.where(position < gl.where(known, limit, 0), scores[n] * scale, -float("inf"))
        if CLEAN:
            written = (position < max_context) & (FROM + n < present)
        else:
            written = position < limit
        gl.store(to + (FROM + n) * stride_out + position, score, mask=written)


@gluon.jit
def _clear(
    out, lens, units, max_context, stride_request, stride_row, stride_out, ROWS: gl.constexpr, NEXT_N: gl.constexpr,
    BLOCKS: gl.constexpr,
):  # fmt: skip
    """-inf behind the last stage of every unit; programs share a unit where there are fewer units."""
    GROUPS: gl.constexpr = (NEXT_N + ROWS - 1) // ROWS
    WIDTH: gl.constexpr = 512
    column = gl.arange(0, WIDTH, layout=gl.BlockedLayout([1], [32], [4], [0]))
    nothing = gl.full([WIDTH], -float("inf"), gl.float32, gl.BlockedLayout([1], [32], [4], [0]))
    programs = gl.num_programs(0)
    part = gl.program_id(0) // units
    for unit in range(gl.program_id(0) % units, units, programs):
        parts = gl.maximum((programs - unit + units - 1) // units, 1)
        stages = _stages(_lengths(lens, unit, stride_request, stride_row, ROWS, NEXT_N), max_context, BLOCKS)
        begin = stages * (BLOCKS * TILE)
        first_row = unit % GROUPS * ROWS
        to = out + ((unit // GROUPS).to(gl.int64) * NEXT_N + first_row) * stride_out + column
        for position in range(begin + part * WIDTH, max_context, parts * WIDTH):
            for n in gl.static_range(ROWS):
                inside = (position + column < max_context) & (first_row + n < NEXT_N)
                gl.store(to + n * stride_out + position, nothing, mask=inside)


@gluon.jit
def _score(
    keys, scales, queries, filled, freed, query_filled, query_freed, weights, lens, table, out, units, num_blocks,
    max_context, max_blocks, stride_weights_row, stride_weights_head, stride_request, stride_row, stride_table, stride_out,
    first, skip, last, count, which: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr, NEXT_N: gl.constexpr,
    BLOCKS: gl.constexpr, CLEAN: gl.constexpr,
):  # fmt: skip
    """A consumer: every second stage of the program's share."""
    STAGES: gl.constexpr = keys.shape[0] // BLOCKS
    GROUPS: gl.constexpr = (NEXT_N + ROWS - 1) // ROWS
    HALVES: gl.constexpr = PRODUCTS // BLOCKS
    SOME: gl.constexpr = ROWS // HALVES
    LANE: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SOME * HEADS, 32]))
    KEY: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
    lane = gl.arange(0, SOME * HEADS, layout=LANE)
    if CLEAN and which == 0:  # while the first keys are under way
        _clear(out, lens, units, max_context, stride_request, stride_row, stride_out, ROWS, NEXT_N, BLOCKS)
    done, turn = 0, 0
    for unit in range(first, last):
        stages = _stages(_lengths(lens, unit, stride_request, stride_row, ROWS, NEXT_N), max_context, BLOCKS)
        some = gl.maximum(gl.minimum(stages - skip, count - done), 0)
        if some > 0:
            request = (unit // GROUPS).to(gl.int64)
            first_row = unit % GROUPS * ROWS
            present = NEXT_N - first_row
            entry = table + request * stride_table
            to = out + (request * NEXT_N + first_row) * stride_out
            limits = _limits(lens + request * stride_request, first_row, max_context, stride_row, ROWS, NEXT_N)
            row = lane // HEADS
            heads = weights + (request * NEXT_N + first_row + row) * stride_weights_row + lane % HEADS * stride_weights_head
            front_weight = gl.load(heads, mask=row < present, other=0.0)
            back_weight = front_weight
            if HALVES == PRODUCTS:
                back_weight = gl.load(heads + SOME * stride_weights_row, mask=SOME + row < present, other=0.0)
            place, phase = ring(turn, QUERIES)
            mbarrier.wait(query_filled.index(place), phase)
            own = (which + done) % CONSUMERS
            slot, phase = ring(done + own, STAGES)
            mbarrier.wait(filled.index(slot), phase, pred=own < some)
            front = multiply(keys, slot, queries, place, 0, HALVES)
            for i in range(own, some, CONSUMERS):
                slot, phase = ring(done + i, STAGES)
                blocks = _blocks(entry, skip + i, num_blocks, max_blocks, BLOCKS)
                product = warpgroup_mma_wait(0, deps=(front,))
                back = multiply(keys, slot, queries, place, 1, HALVES)
                scale = scales.index(slot * BLOCKS).reshape([TILE]).load(KEY)
                back_scale = scales.index(slot * BLOCKS + BLOCKS - 1).reshape([TILE]).load(KEY)
                tile = (skip + i) * BLOCKS
                _write(product, front_weight, scale, tile, blocks[0] >= 0, limits, to, present, max_context, stride_out, 0,
                       SOME, CLEAN)  # fmt: skip
                after, phase = ring(done + i + CONSUMERS, STAGES)
                product = warpgroup_mma_wait(0, deps=(back,))
                signal(freed.index(slot))
                mbarrier.wait(filled.index(after), phase, pred=i + CONSUMERS < some)
                front = multiply(keys, after, queries, place, 0, HALVES)
                _write(product, back_weight, back_scale, tile + BLOCKS - 1, blocks[1] >= 0, limits, to, present, max_context,
                       stride_out, SOME * (HALVES - 1), SOME, CLEAN)  # fmt: skip
            warpgroup_mma_wait(0, deps=(front,))
            signal(query_freed.index(place))
        done += some
        turn += (some > 0).to(gl.int32)
        skip = 0


@gluon.jit(
    do_not_specialize=["units", "num_blocks", "max_context", "max_blocks", "soon", "stride_table_request", "stride_out_row"],
    do_not_specialize_on_alignment=["context_lens", "block_table", "weights", "out"],
)
def paged_mqa_logits(
    q,  # fp8 [requests * NEXT_N * HEADS, D], boxes of ROWS * HEADS
    codes,  # fp8 [num_blocks, TILE, D], boxes of a block
    factors,  # fp32 [num_blocks, TILE], boxes of a block
    weights,  # fp32 [requests * NEXT_N, HEADS]
    context_lens,  # int32 [requests, NEXT_N]
    block_table,  # int32 [requests, max_blocks]
    out,  # fp32 [requests * NEXT_N, max_context]
    units,  # requests * cdiv(NEXT_N, ROWS)
    num_blocks,
    max_context,
    max_blocks,
    soon,  # stages of all units that are so few that the next launch may start meanwhile
    stride_weights_row,
    stride_weights_head,
    stride_lens_request,
    stride_lens_row,
    stride_table_request,
    stride_out_row,
    HEADS: gl.constexpr,
    ROWS: gl.constexpr,
    NEXT_N: gl.constexpr,
    CLEAN: gl.constexpr,
    TILES: gl.constexpr,  # in flight
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    BLOCKS: gl.constexpr = PRODUCTS if ROWS * HEADS <= LANES else 1
    STAGES: gl.constexpr = TILES // BLOCKS
    keys = gl.allocate_shared_memory(codes.dtype, [TILES] + codes.block_shape, codes.layout)
    scales = gl.allocate_shared_memory(factors.dtype, [TILES] + factors.block_shape, factors.layout)
    queries = gl.allocate_shared_memory(q.dtype, [QUERIES] + q.block_shape, q.layout)
    filled, freed, query_filled, query_freed = allocate_rings(STAGES)
    fence_async_shared()
    wait()
    lengths = _chunk_lengths(context_lens, 0, units, stride_lens_request, stride_lens_row, ROWS, NEXT_N)
    # Every warp looks for the program's share by itself.
    stages = _chunk_stages(lengths, 0, units, max_context, BLOCKS)
    counted = gl.sum(stages, 0)
    total = counted
    for chunk in range(CHUNK, units, CHUNK):
        others = _chunk_lengths(context_lens, chunk, units, stride_lens_request, stride_lens_row, ROWS, NEXT_N)
        total += gl.sum(_chunk_stages(others, chunk, units, max_context, BLOCKS), 0)
    if total <= soon:
        start_next()
    begin, end = share(total)
    first, skipped, last = search(stages, 0, begin, end, 0, 0, 0)
    for chunk in range(CHUNK, units, CHUNK):
        others = _chunk_lengths(context_lens, chunk, units, stride_lens_request, stride_lens_row, ROWS, NEXT_N)
        stages = _chunk_stages(others, chunk, units, max_context, BLOCKS)
        first, skipped, last = search(stages, counted, begin, end, first, skipped, last)
        counted += gl.sum(stages, 0)
    last = gl.minimum(last + 1, units)
    count = end - begin
    skip = begin - skipped
    barrier()
    gl.warp_specialize(
        [
            (_score, (keys, scales, queries, filled, freed, query_filled, query_freed, weights, context_lens, block_table,
                      out, units, num_blocks, max_context, max_blocks, stride_weights_row, stride_weights_head,
                      stride_lens_request, stride_lens_row, stride_table_request, stride_out_row, first, skip, last, count,
                      0, HEADS, ROWS, NEXT_N, BLOCKS, CLEAN)),
            (_score, (keys, scales, queries, filled, freed, query_filled, query_freed, weights, context_lens, block_table,
                      out, units, num_blocks, max_context, max_blocks, stride_weights_row, stride_weights_head,
                      stride_lens_request, stride_lens_row, stride_table_request, stride_out_row, first, skip, last, count,
                      1, HEADS, ROWS, NEXT_N, BLOCKS, CLEAN)),
            (_fill, (keys, scales, queries, filled, freed, query_filled, query_freed, codes, factors, q, context_lens,
                     block_table, units, num_blocks, max_context, max_blocks, stride_lens_request,
                     stride_lens_row, stride_table_request, first, skip, last, count, HEADS, ROWS, NEXT_N, BLOCKS)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def fits(q, cache) -> bool:
    """Whether TMA can copy the queries, and a block as one tile."""
    block = cache.shape[1] * cache.shape[2]
    whole = cache.shape[0] > 0 and cache.shape[1] == TILE.value and cache.stride(0) % 16 == 0 and cache.stride(0) >= block
    return whole and cache.data_ptr() % 16 == 0 and q.is_contiguous() and q.data_ptr() % 16 == 0


def launch(q, cache, weights, context_lens, block_table, max_context_len, out, chosen, *, clean, early=False):
    """As kernels.launch_paged_mqa_logits, where ``fits``."""
    requests, next_n, heads, dim = q.shape
    num_blocks, block_size, row = cache.shape
    rows = chosen.lanes // heads
    fp8, planes = torch.float8_e4m3fn, (num_blocks, block_size, dim)
    codes = torch.as_strided(cache, planes, (cache.stride(0), dim, 1)).view(fp8)
    at = cache.storage_offset() + block_size * dim
    factors = torch.as_strided(cache, (num_blocks, block_size * (row - dim)), (cache.stride(0), 1), at).view(torch.float32)
    tiles = gl.NVMMASharedLayout(swizzle_byte_width=dim, element_bitwidth=8, rank=3)
    units = requests * triton.cdiv(next_n, rows)
    paged_mqa_logits[(chosen.programs,)](
        TensorDescriptor.from_tensor(
            q.view(fp8).flatten(0, 2), [chosen.lanes, dim], gl.NVMMASharedLayout(dim, element_bitwidth=8, rank=2)
        ),
        TensorDescriptor.from_tensor(codes, [1, block_size, dim], tiles),
        TensorDescriptor.from_tensor(
            factors, [1, block_size], gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
        ),
        weights,
        context_lens,
        block_table,
        out,
        units,
        num_blocks,
        max_context_len,
        block_table.shape[1],
        2**31 - 1 if early else SOON * chosen.programs,
        *weights.stride(),
        *context_lens.stride(),
        block_table.stride(0),
        out.stride(0),
        HEADS=heads,
        ROWS=rows,
        NEXT_N=next_n,
        CLEAN=clean,
        TILES=chosen.tiles,
        CONSUMER_REGISTERS=chosen.consumer_registers,
        PRODUCER_REGISTERS=chosen.producer_registers,
        num_warps=4,
        launch_pdl=True,
    )
