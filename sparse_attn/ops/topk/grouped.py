"""Rows whose scores come with the highest one of every GROUP neighbours.

The k groups with the highest of those, of equal ones the first, hold the k highest scores, of equal ones the first: were one of
these in another group, each of the k groups would have a score before it. So a program searches what is an eighth as wide as
the row, then k groups, and reads nothing else.
"""

import triton
import triton.language as tl

from sparse_attn.device import chain
from sparse_attn.ops.topk import bits, destination, half_rows, halves, store, tiles
from sparse_attn.ops.topk import table as tables
from sparse_attn.ops.topk.rows import claim_table


@triton.jit
def _store_lined_up(out, table, words, count, source, target, SLOTS: tl.constexpr, THREADS: tl.constexpr):
    """store.lines_of_words, of a source of groups; ``count`` is less than there are words before their list."""
    place = store.places(words)
    begin = destination.begin(target)
    tl.debug_barrier()
    bits.line_up(table, words, place, tl.arange(0, SLOTS // 32) * 32, count)
    tl.debug_barrier()
    for line in range(0, count, 4 * THREADS):
        at = line + tl.arange(0, 4 * THREADS)
        slot = tables.load_one(table, tl.minimum(at, count - 1))
        value = destination.values(target, half_rows.columns_of(source, slot))
        tl.store(out + begin + at, value, mask=at < count)
    destination.finish(out, target, begin, count)


@triton.jit
def _list_highest(
    groups, table, chunks, tops, number, k, TOPS: tl.constexpr, CAPACITY: tl.constexpr, CHUNK: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """List which groups are searched of the ``number`` whose highest scores are given: (how many; where digits begin, and one that
    the k-th score's certainly comes before)."""
    least, last = half_rows.digits(chunks, k, True, THREADS)
    half, below, having = half_rows.search(table, chunks, least, last, number, k, True, CHUNK, THREADS)
    half_rows.mark(table, chunks, half, CHUNK)
    # Where there is room, all that share the k-th's half: which of them are the highest is to be looked for.
    need = tl.where(below + having <= CAPACITY, having, k - below)
    words = half_rows.marked_words(table, (tops,), last * 0, number, half, need, having, TOPS, True, THREADS)
    bits.line_up(groups, words, store.places(words), tl.arange(0, TOPS // 32) * 32, CAPACITY)
    return below + need, least, tl.minimum(halves.key(half) - least + 1, tables.BINS - 1)


@triton.jit(do_not_specialize=["rows", "width", "k", "next_n", "max_blocks", "stride_logits_row", "stride_maxima_row"])
def select_grouped_rows(
    logits,  # fp32 [rows, width]
    maxima,  # fp32 [rows, cdiv(width, GROUP)]
    row_ends,  # int32 [rows] or None
    out,  # int32 [rows, k], with a block table [rows * k]
    indptr,  # int32 [rows + 1] or None
    states,  # int64 [rows] or None, zero before and after
    block_table,  # int32 [requests, max_blocks] or None
    memory,  # None: the table of counters is in shared memory
    rows,
    width,
    k,
    next_n,
    max_blocks,
    stride_logits_row,  # in groups
    stride_maxima_row,  # in fours
    stride_ends_row,
    stride_table_request,
    BLOCK_SIZE: tl.constexpr,
    TOPS: tl.constexpr,  # as many as maxima, at least
    HELD: tl.constexpr,  # slots of groups, GROUP * k at least
    SLOTS: tl.constexpr,  # the same, a power of two
    CHUNK: tl.constexpr,  # slots read at once
    LIST: tl.constexpr,  # words behind the table
    THREADS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    table = claim_table(memory, LIST, THREADS)
    chain.wait(CHAINED)
    _, end = tiles.limits(None, row_ends, row, width, 0, stride_ends_row)
    target = destination.of_row(
        row, k, indptr, states, block_table, rows, next_n, max_blocks, stride_table_request, BLOCK_SIZE, THREADS
    )
    tops = maxima + row * stride_maxima_row * 4
    number = tl.cdiv(end, tiles.GROUP)
    zero = tl.full([], 0, tl.int32)
    # Read before it is known how many there are.
    chunks = half_rows.load(tops, zero, number, tl.cdiv(width, tiles.GROUP), TOPS, CHUNK, True)
    CAPACITY: tl.constexpr = HELD // tiles.GROUP
    groups = tables.behind(table, tables.LIST + SLOTS // 16 + THREADS)
    whole = end <= HELD  # all groups are searched
    if whole:
        place = tl.minimum(tl.arange(0, SLOTS // tiles.GROUP), CAPACITY - 1)
        tables.store_one(groups, place, place)
        listed, least, last = number, zero, zero + (tables.BINS - 1)
    else:
        listed, least, last = _list_highest(groups, table, chunks, tops, number, k, TOPS, CAPACITY, CHUNK, THREADS)
    half_rows.clear_marks(table, HELD, SLOTS)
    tl.debug_barrier()
    source = logits + row * stride_logits_row * tiles.GROUP, groups
    held = listed * tiles.GROUP
    chunks = half_rows.load_groups(source, held, HELD, CHUNK)
    if whole:
        least, last = half_rows.digits(chunks, k, True, THREADS)
    half, below, having = half_rows.search(table, chunks, least, last, held, k, True, CHUNK, THREADS)
    count = tl.minimum(below + having, k)
    destination.tell(target, count)
    half_rows.mark(table, chunks, half, CHUNK)
    words = half_rows.marked_words(table, source, zero, held, half, k - below, having, SLOTS, True, THREADS)
    _store_lined_up(out, table, words, count, source, target, SLOTS, THREADS)
