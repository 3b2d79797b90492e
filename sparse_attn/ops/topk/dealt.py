"""A long row in the registers of several programs, dealt out in sectors so that each has about as many of the highest scores.

Each program stores its highest scores, more than its share of what is wanted; the last one to arrive selects among those
of all. Where one program turns out to have had more of the selected scores than it stored, or ties fill it, the last one
searches the row itself: slower, equally exact. No sample is needed, and no order among the programs' scores: the selected
columns are put in order by a bit each.
"""

import triton
import triton.language as tl

from sparse_attn.device import chain
from sparse_attn.ops.topk import destination, lists, memory, radix, store, tiles
from sparse_attn.ops.topk import table as tables
from sparse_attn.ops.topk.rows import claim_table, search_and_select, select_row

SECTOR = tl.constexpr(8)  # columns that are dealt together: 32 bytes
NONE = tl.constexpr(0)  # a key that no score has: nothing was stored


@triton.jit
def _dealt(base, part, HELD: tl.constexpr, PROGRAMS: tl.constexpr):
    """The columns of a program, [HELD / SECTOR, SECTOR], ascending: of every PROGRAMS sectors one, in turns that no period of
    the scores follows."""
    round = tl.arange(0, HELD // SECTOR)
    turn = (part ^ round ^ (round >> 4) ^ (round >> 8)) & (PROGRAMS - 1)
    first = base + (round * PROGRAMS + turn) * SECTOR
    return first[:, None] + tl.arange(0, SECTOR)[None, :]


@triton.jit
def offer(
    mine, line, base, start, end, part, table, keep,
    MOST: tl.constexpr, HELD: tl.constexpr, PROGRAMS: tl.constexpr, WINDOW: tl.constexpr, ALIGNED: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """Store a program's keep .. MOST highest scores: at ``mine`` their columns from ``base`` on, then MOST keys, -1 where
    there is none, then the last key that was stored."""
    columns = _dealt(base, part, HELD, PROGRAMS)
    scores, inside = tiles.load(line, columns, start, end, ALIGNED)
    keys = tl.reshape(radix.falling_keys(scores, inside), [HELD // tiles.LANES, tiles.LANES])
    columns = tl.reshape(columns - base, [HELD // tiles.LANES, tiles.LANES])
    edge, number, _ = radix.search_windows(table, keys, keep, MOST, WINDOW, THREADS)
    fits = number <= MOST
    last = tl.where(fits, edge, NONE)
    place = store.places_up_to(keys, last)
    memory.scatter(mine, place, columns, keys, last)
    memory.scatter(mine + MOST, place, keys, keys, last)
    slot = tl.arange(0, MOST)
    tl.store(mine + MOST + slot, tl.full([MOST], -1, tl.int32), mask=slot >= tl.where(fits, number, 0))
    tl.store(mine + 2 * MOST, last)


@triton.jit
def choose(
    out, offered, stride, shift, table, target, k,
    MOST: tl.constexpr, HELD: tl.constexpr, PROGRAMS: tl.constexpr, WINDOW: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Select among what the programs offered, ``stride`` apart; columns move by ``shift``. Returns whether that was enough: if
    not, nothing is stored."""
    SLOTS: tl.constexpr = MOST * PROGRAMS
    WORDS: tl.constexpr = HELD * PROGRAMS // tiles.LANES
    place = tl.arange(0, WORDS)
    left = destination.values(target, place * tiles.LANES + shift)
    slot = tl.arange(0, SLOTS)
    source = offered + (slot // MOST) * stride + slot % MOST
    lasts = tl.load(offered + tl.arange(0, PROGRAMS) * stride + 2 * MOST, cache_modifier=".cg")
    keys = tl.load(source + MOST, cache_modifier=".cg")
    columns = tl.load(source, mask=keys != -1, other=0, cache_modifier=".cg")
    edge, at_key, below = radix.search_held(table, keys, k, SLOTS // 4, WINDOW, THREADS)
    bound = tl.min(lasts.to(tl.uint32, bitcast=True))
    enough = edge.to(tl.uint32, bitcast=True) <= bound
    if enough:
        destination.tell(target, tl.minimum(at_key, k))
        tl.debug_barrier()
        tables.store_one(table, tables.LIST + place, place * 0)
        tl.debug_barrier()
        if at_key > k:  # of the scores that equal the last one, those that come first
            lists.set_bits(table, columns, keys ^ edge, tl.full([], 0, tl.int32))
            tl.debug_barrier()
            equal = tables.load_one(table, tables.LIST + place).to(tl.uint32, bitcast=True)
            equal = store.first_ones(equal, k - below)
            tl.debug_barrier()
            tables.store_one(table, tables.LIST + place, equal.to(tl.int32, bitcast=True))
            tl.debug_barrier()
            edge -= 1
        lists.set_bits(table, columns, keys, edge)
        tl.debug_barrier()
        words = tables.load_one(table, tables.LIST + place).to(tl.uint32, bitcast=True)
        store.of_words(out, words, left, tl.minimum(at_key, k), target)
    return enough


@triton.jit(
    do_not_specialize=["rows", "width", "k", "keep", "next_n", "max_blocks", "stride_logits_row", "stride_offered"]
)
def select_dealt_rows(
    logits,  # fp32 [rows, width]
    row_starts,  # int32 [rows] or None
    row_ends,  # int32 [rows] or None
    out,  # int32 [rows, k], with a block table [rows * k]
    indptr,  # int32 [rows + 1] or None
    states,  # int64 [rows] or None, zero before and after
    block_table,  # int32 [requests, max_blocks] or None
    offered,  # int32 [rows * PROGRAMS, stride_offered], 2 * MOST + 1 at least
    arrivals,  # int64 [rows], zero before and after
    counters,  # None: the table of counters is in shared memory
    rows,
    width,
    k,
    keep,
    next_n,
    max_blocks,
    stride_logits_row,  # in fours when ALIGNED
    stride_starts_row,
    stride_ends_row,
    stride_table_request,
    stride_offered,
    BLOCK_SIZE: tl.constexpr,
    MOST: tl.constexpr,  # scores a program offers
    HELD: tl.constexpr,  # scores a program holds
    PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr,  # columns that are read at once where the row is searched itself
    WINDOW: tl.constexpr,
    LIST: tl.constexpr,  # words behind the table
    ALIGNED: tl.constexpr,
    THREADS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    UNIT: tl.constexpr = 4 if ALIGNED else 1
    SLOTS: tl.constexpr = MOST * PROGRAMS
    row = tl.program_id(0) // PROGRAMS
    part = tl.program_id(0) % PROGRAMS
    row64 = row.to(tl.int64)
    table = claim_table(counters, LIST, THREADS)
    chain.wait(CHAINED)
    start, end = tiles.limits(row_starts, row_ends, row64, width, stride_starts_row, stride_ends_row)
    line = logits + row64 * stride_logits_row * UNIT
    base = (start // tiles.LANES) * tiles.LANES
    target = destination.of_row(
        row64, k, indptr, states, block_table, rows, next_n, max_blocks, stride_table_request, BLOCK_SIZE, THREADS
    )
    if end - base <= SLOTS:
        if part == 0:
            select_row(out, line, base, start, end, table, target, k, SLOTS, ALIGNED, False, 0, 0, True, THREADS)
    else:
        first = offered + (row * PROGRAMS).to(tl.int64) * stride_offered
        offer(
            first + part * stride_offered, line, base, start, end, part, table, keep,
            MOST, HELD, PROGRAMS, WINDOW, ALIGNED, THREADS,
        )  # fmt: skip
        tl.debug_barrier()
        if tl.atomic_add(arrivals + row, 1, sem="acq_rel") == PROGRAMS - 1:
            tl.store(arrivals + row, 0)
            if not choose(
                out, first, stride_offered, base - start, table, target, k,
                MOST, HELD, PROGRAMS, WINDOW, THREADS,
            ):  # fmt: skip
                zero = tl.full([], 0, tl.int64)
                search_and_select(
                    out, line + start, end - start, zero, table, target, k, CHUNK, THREADS
                )
