"""One program a row: count the row's entries, learn from the rows before it where to write, pack.

Row states live in the workspace's counters. The programs of up to ``resident`` rows all run at once and tell each other
their counts (device/packing.py).

More rows are handed out by a ticket. So a program only waits for programs that already run (decoupled look-back). A
state is 0 while it is unknown, 1 << 32 | count for this row's count, and 2 << 32 | total for the count of all rows up
to this one. A state is one word, so a reader needs nothing else to be visible. The last program to finish leaves every
counter zero.
"""

import triton
import triton.language as tl

from sparse_attn.device import packing, pdl
from sparse_attn.device.packing import COUNT, SPAN

TOTAL = tl.constexpr(2 << 32)
INT32_MAX = tl.constexpr(2**31 - 1)
EARLIER_QUARTERS, ALL_QUARTERS = tl.constexpr(0x0001000100010000), tl.constexpr(0x0001000100010001)


@triton.jit
def _entries(
    dense, first, length, limit, offset, known, table_row, columns, last_row, max_blocks, stride_column,
    BLOCK_SIZE: tl.constexpr, HAS_DENSE: tl.constexpr, HAS_TABLE: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """(values, keep) of one block of a run of entries. They are listed in a dense row, or count up from ``first``.

    limit: listed entries stay below it, unless it is None. A run that counts up is as long as it may be.
    """
    keep = columns < length
    if HAS_DENSE:  # the load that waits for no other
        local = tl.load(dense + columns.to(tl.int64) * stride_column, mask=keep, other=-1)
        keep = keep & (local >= 0)
        if limit is not None:
            keep = keep & (local < limit)
    else:
        local = first + columns
    # A row of no known request keeps nothing.
    keep = keep & known
    # Entries are positions of a request: find the cache slot of each.
    if HAS_TABLE:
        block = tl.where(keep, local, 0) // BLOCK_SIZE
        column = block % max_blocks if RING else block
        keep = keep & (column < max_blocks)
        block_id = tl.load(table_row + column, mask=keep, other=-1)
        keep = keep & (block_id >= 0)
        value = block_id.to(tl.int64) * BLOCK_SIZE + (local - block * BLOCK_SIZE)
        keep = keep & (value <= INT32_MAX)
    # Entries are rows: add the row's offset.
    else:
        value = local.to(tl.int64) + offset
        keep = keep & (value >= 0) & (value <= last_row)
    return value.to(tl.int32), keep


@triton.jit
def _quarters(keep, BLOCK: tl.constexpr):
    # A quarter's count is a field of 16 bits.
    """How many columns each quarter of a block keeps, 16 bits a quarter, so that one scan ranks them all. Given for
    each column of the quarters, and in all."""
    kept = tl.sum(tl.reshape(keep.to(tl.int64), [4, BLOCK // 4]) << (16 * tl.arange(0, 4))[:, None], 0)
    return kept, tl.sum(kept, 0)


@triton.jit
def _kept(quarters):
    # The product's highest field is the sum of all four.
    return ((quarters * ALL_QUARTERS) >> 48).to(tl.int32)


@triton.jit
def _rank(kept, quarters, BLOCK: tl.constexpr):
    """Place of each kept column among the kept columns of its block."""
    # Multiplying adds each quarter's count to the fields of later quarters.
    through = tl.cumsum(kept, 0) + quarters * EARLIER_QUARTERS
    rank = (through[None, :] >> (16 * tl.arange(0, 4))[:, None]).to(tl.int32) & 0xFFFF
    return tl.reshape(rank, [BLOCK]) - 1


@triton.jit
def _count_rest(
    count, dense, first, length, limit, offset, known, table_row, last_row, max_blocks, stride_column,
    BLOCK_SIZE: tl.constexpr, HAS_DENSE: tl.constexpr, HAS_TABLE: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # What lies behind the first block is loaded twice: here to be counted, later to be written.
    for start in range(BLOCK, length, BLOCK):
        value, keep = _entries(
            dense, first, length, limit, offset, known, table_row, start + tl.arange(0, BLOCK), last_row, max_blocks,
            stride_column, BLOCK_SIZE, HAS_DENSE, HAS_TABLE, RING,
        )  # fmt: skip
        kept, quarters = _quarters(keep, BLOCK)
        count += _kept(quarters)
    return count


@triton.jit
def _write_rest(
    indices, place, dense, first, length, limit, offset, known, table_row, last_row, max_blocks, stride_column,
    BLOCK_SIZE: tl.constexpr, HAS_DENSE: tl.constexpr, HAS_TABLE: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for start in range(BLOCK, length, BLOCK):
        value, keep = _entries(
            dense, first, length, limit, offset, known, table_row, start + tl.arange(0, BLOCK), last_row, max_blocks,
            stride_column, BLOCK_SIZE, HAS_DENSE, HAS_TABLE, RING,
        )  # fmt: skip
        kept, quarters = _quarters(keep, BLOCK)
        tl.store(indices + place + _rank(kept, quarters, BLOCK), value, mask=keep)
        place += _kept(quarters)


@triton.jit
def _rows_before(states, row, LOOKBACK: tl.constexpr):
    """Sum of the counts of rows [0, row), read from their states, nearest first."""
    total = tl.full([], 0, tl.int64)
    nearest = row - 1
    while nearest >= 0:
        # Look at LOOKBACK rows at once. An atomic addition of 0 reads past the L1.
        rows = nearest - tl.arange(0, LOOKBACK)
        real = rows >= 0
        state = tl.atomic_add(
            states + tl.where(real, rows, 0), tl.zeros([LOOKBACK], tl.int64), mask=real, sem="relaxed"
        )
        # 0: not known yet, 1: the row's own count, 2: the total up to it. Rows before the first count as totals.
        kind = tl.where(real, state >> 32, 2)
        while tl.min(kind, 0) == 0:
            state = tl.atomic_add(
                states + tl.where(real, rows, 0), tl.zeros([LOOKBACK], tl.int64), mask=real, sem="relaxed"
            )
            kind = tl.where(real, state >> 32, 2)
        # Sum own counts up to the nearest total, which covers all rows before it.
        stop = tl.min(tl.where(kind == 2, tl.arange(0, LOOKBACK), LOOKBACK), 0)
        counted = real & (tl.arange(0, LOOKBACK) <= stop)
        total += tl.sum(tl.where(counted, state & 0xFFFFFFFF, 0), 0)
        # No total among these: go on behind them.
        nearest = tl.where(stop < LOOKBACK, -1, nearest - LOOKBACK)
    return total


# A column stride that is not known to be 1 keeps loads one column wide, which stores are anyway: no layout is
# converted.
@triton.jit(
    do_not_specialize=[
        "resident", "tokens", "width", "window", "last_row", "requests", "next_n", "max_blocks",
        "stride_dense_column",
    ]
)  # fmt: skip
def pack_rows(
    dense,  # int32 [tokens, width] or None: 0, 1, 2, ...
    lengths,  # int32 [tokens] or None
    limits,  # int32 [tokens] or None; entries at or beyond are dropped
    row_offsets,  # int32 [tokens] or None
    positions,  # int32 [tokens] or None; behind the entries, positions of a window that ends here
    window_offsets,  # int32 [tokens] or None
    request_ids,  # int32 [tokens]; None: each request has next_n rows
    block_table,  # int32 [requests, max_blocks] or None
    indices,  # int32 [tokens * (width + window)]
    indptr,  # int32 [tokens + 1]
    counters,  # int64 [2 + tokens], zero before and after
    resident,  # programs that certainly run at once
    tokens,
    width,
    window,
    last_row,
    requests,
    next_n,
    max_blocks,
    stride_dense_token,
    stride_dense_column,
    stride_lengths_token,
    stride_limits_token,
    stride_offsets_token,
    stride_positions_token,
    stride_window_offsets_token,
    stride_requests_token,
    stride_table_request,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOKBACK: tl.constexpr,
    PDL: tl.constexpr,
):
    HAS_ENTRIES: tl.constexpr = dense is not None or limits is not None
    HAS_DENSE: tl.constexpr = dense is not None
    HAS_TABLE: tl.constexpr = block_table is not None
    states = counters + 2
    pdl.wait(PDL)
    row = tl.program_id(0)
    # More rows than run at once: a ticket, so that every row before has started.
    if tokens > resident:
        row = tl.atomic_add(counters, 1, sem="relaxed").to(tl.int32)
    row64 = row.to(tl.int64)

    # How many entries a row lists, and where they end.
    length = width
    limit = None
    if lengths is not None:
        length = tl.minimum(tl.load(lengths + row64 * stride_lengths_token), width)
    if limits is not None:
        limit = tl.load(limits + row64 * stride_limits_token)
        if dense is None:
            length = tl.minimum(limit, width)
    offset = tl.full([], 0, tl.int64)
    if row_offsets is not None:
        offset = tl.load(row_offsets + row64 * stride_offsets_token).to(tl.int64)
    # The request decides which table translates positions into slots.
    known = tl.full([], 1, tl.int1)
    table_row = block_table
    if block_table is not None:
        request = row // next_n
        if request_ids is not None:
            request = tl.load(request_ids + row64 * stride_requests_token)
        known = (request >= 0) & (request < requests)
        table_row = block_table + tl.where(known, request, 0).to(tl.int64) * stride_table_request
    first = tl.full([], 0, tl.int32)
    seen = tl.full([], 0, tl.int32)
    window_offset = tl.full([], 0, tl.int64)
    # The window: positions from ``first`` on, ``seen`` of them.
    if positions is not None:
        position = tl.load(positions + row64 * stride_positions_token)
        known = known & (position >= 0)
        first = tl.maximum(position - window + 1, 0)
        seen = tl.where(position >= 0, position - first + 1, 0)
    if window_offsets is not None:
        window_offset = tl.load(window_offsets + row64 * stride_window_offsets_token).to(tl.int64)
    source = dense
    if dense is not None:
        source = dense + row64 * stride_dense_token

    # The first BLOCK of the entries and of the window stay in registers, whatever lies behind is read twice.
    entries = tl.full([], 0, tl.int32)
    count = tl.full([], 0, tl.int32)
    if HAS_ENTRIES:
        value, keep = _entries(
            source, 0, length, limit, offset, known, table_row, tl.arange(0, BLOCK), last_row, max_blocks,
            stride_dense_column, BLOCK_SIZE, HAS_DENSE, HAS_TABLE, False,
        )  # fmt: skip
        kept, quarters = _quarters(keep, BLOCK)
        held = _kept(quarters)
        entries = _count_rest(
            held, source, 0, length, limit, offset, known, table_row, last_row, max_blocks, stride_dense_column,
            BLOCK_SIZE, HAS_DENSE, HAS_TABLE, False, BLOCK,
        )  # fmt: skip
        count = entries
    if positions is not None:
        key, inside = _entries(
            None, first, seen, None, window_offset, known, table_row, tl.arange(0, BLOCK), last_row, max_blocks, 0,
            BLOCK_SIZE, False, HAS_TABLE, True,
        )  # fmt: skip
        window_kept, window_quarters = _quarters(inside, BLOCK)
        window_held = _kept(window_quarters)
        count = entries + _count_rest(
            window_held, None, first, seen, None, window_offset, known, table_row, last_row, max_blocks, 0, BLOCK_SIZE,
            False, HAS_TABLE, True, BLOCK,
        )  # fmt: skip

    # Tell others this row's count as soon as it is known.
    if tokens > resident:
        tl.atomic_xchg(states + row, count.to(tl.int64) + COUNT, sem="relaxed")
    else:
        packing.tell_later_rows(states, row, tokens, count)
    if HAS_ENTRIES:  # while the rows before are on their way
        rank = _rank(kept, quarters, BLOCK)
    if positions is not None:
        window_rank = _rank(window_kept, window_quarters, BLOCK)
    # The total before this row, by which its place is known. With tickets later rows read the total up to it.
    if tokens > resident:
        before = _rows_before(states, row, LOOKBACK)
        tl.atomic_xchg(states + row, before + count + TOTAL, sem="relaxed")
    else:
        before = packing.told_by_rows_before(states, row)
    packing.store_bounds(indptr, row, tokens, before, count)

    # Entries first, from registers; then what lay behind the first block.
    if HAS_ENTRIES:
        tl.store(indices + before + rank, value, mask=keep)
        _write_rest(
            indices, before + held, source, 0, length, limit, offset, known, table_row, last_row, max_blocks,
            stride_dense_column, BLOCK_SIZE, HAS_DENSE, HAS_TABLE, False, BLOCK,
        )  # fmt: skip
    # The window goes behind all entries of the row.
    if positions is not None:
        place = before + entries
        tl.store(indices + place + window_rank, key, mask=inside)
        _write_rest(
            indices, place + window_held, None, first, seen, None, window_offset, known, table_row, last_row,
            max_blocks, 0, BLOCK_SIZE, False, HAS_TABLE, True, BLOCK,
        )  # fmt: skip

    packing.clear_unused(indices, row, tokens, before, count, width + window, BLOCK)

    # The last program to finish clears tickets and states.
    if tokens > resident:
        finished = tl.atomic_add(counters + 1, 1, sem="acq_rel")
        if finished == tokens - 1:
            for start in range(0, tokens + 2, SPAN):
                at = start + tl.arange(0, SPAN)
                tl.store(counters + at, tl.zeros([SPAN], tl.int64), mask=at < tokens + 2)
    else:
        packing.forget(states, row)
