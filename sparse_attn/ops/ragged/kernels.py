"""One program per row: count the row, learn from the rows before it where to write (decoupled look-back), pack.

Row states live in the workspace's counters: 0 = unknown, 1 << 32 | count = this row's count,
2 << 32 | total = count of all rows up to this one. Rows are handed out by a ticket, so a program only ever waits for
programs that already run; the last program to finish leaves every counter zero.
"""

import triton
import triton.language as tl

COUNT = tl.constexpr(1 << 32)
TOTAL = tl.constexpr(2 << 32)
NO_LIMIT = tl.constexpr(2**31 - 1)


@triton.jit
def _entries(
    dense, first, length, limit, offset, known, table_row, columns, num_rows, max_blocks, block_size, stride_column,
    HAS_DENSE: tl.constexpr, HAS_TABLE: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """(values int64, keep) of one block of a run of entries: listed in a dense row, or counting up from ``first``.

    limit: None, or what listed entries stay below; a run that counts is as long as it may be.
    """
    keep = columns < length
    if HAS_DENSE:
        local = tl.load(dense + columns.to(tl.int64) * stride_column, mask=keep, other=-1)
        keep = keep & (local >= 0)
        if limit is not None:
            keep = keep & (local < limit)
    else:
        local = first + columns
    if HAS_TABLE:
        block = tl.where(keep, local, 0) // block_size
        column = block % max_blocks if RING else block
        keep = keep & known & (column < max_blocks)
        block_id = tl.load(table_row + column, mask=keep, other=-1)
        keep = keep & (block_id >= 0)
        value = block_id.to(tl.int64) * block_size + (local - block * block_size)
        keep = keep & (value < NO_LIMIT)
    else:
        value = local.to(tl.int64) + offset
        keep = keep & (value >= 0) & (value < num_rows)
    return value, keep


@triton.jit
def _count(
    count, dense, first, length, limit, offset, known, table_row, num_rows, max_blocks, block_size, stride_column,
    HAS_DENSE: tl.constexpr, HAS_TABLE: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for start in range(0, length, BLOCK):
        value, keep = _entries(
            dense, first, length, limit, offset, known, table_row, start + tl.arange(0, BLOCK), num_rows, max_blocks,
            block_size, stride_column, HAS_DENSE, HAS_TABLE, RING,
        )  # fmt: skip
        count += tl.sum(keep.to(tl.int32), 0)
    return count


@triton.jit
def _write(
    indices, place, dense, first, length, limit, offset, known, table_row, num_rows, max_blocks, block_size,
    stride_column, HAS_DENSE: tl.constexpr, HAS_TABLE: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for start in range(0, length, BLOCK):
        value, keep = _entries(
            dense, first, length, limit, offset, known, table_row, start + tl.arange(0, BLOCK), num_rows, max_blocks,
            block_size, stride_column, HAS_DENSE, HAS_TABLE, RING,
        )  # fmt: skip
        rank = tl.cumsum(keep.to(tl.int32), 0)
        tl.store(indices + place + rank - 1, value.to(tl.int32), mask=keep)
        place += tl.max(rank, 0)
    return place


@triton.jit
def _rows_before(states, row, LOOKBACK: tl.constexpr):
    """Sum of the counts of rows [0, row), read from their states, nearest first."""
    total = tl.full([], 0, tl.int64)
    nearest = row - 1
    while nearest >= 0:
        rows = nearest - tl.arange(0, LOOKBACK)
        real = rows >= 0
        state = tl.atomic_add(states + tl.where(real, rows, 0), tl.zeros([LOOKBACK], tl.int64), mask=real, sem="acquire")
        kind = tl.where(real, state >> 32, 2)
        while tl.min(kind, 0) == 0:
            state = tl.atomic_add(
                states + tl.where(real, rows, 0), tl.zeros([LOOKBACK], tl.int64), mask=real, sem="acquire"
            )
            kind = tl.where(real, state >> 32, 2)
        stop = tl.min(tl.where(kind == 2, tl.arange(0, LOOKBACK), LOOKBACK), 0)
        counted = real & (tl.arange(0, LOOKBACK) <= stop)
        total += tl.sum(tl.where(counted, state & 0xFFFFFFFF, 0), 0)
        nearest = tl.where(stop < LOOKBACK, -1, nearest - LOOKBACK)
    return total


@triton.jit(do_not_specialize=["tokens", "width", "window", "num_rows", "requests", "max_blocks"])
def pack_rows(
    dense,  # int32 [tokens, width] or None: 0, 1, 2, ...
    lengths,  # int32 [tokens] or None
    limits,  # int32 [tokens] or None; entries at or beyond are dropped
    row_offsets,  # int32 [tokens] or None
    positions,  # int32 [tokens] or None; behind the entries, positions of a window that ends here
    window_offsets,  # int32 [tokens] or None
    request_ids,  # int32 [tokens] or None
    block_table,  # int32 [requests, max_blocks] or None
    indices,  # int32 [tokens * (width + window)]
    indptr,  # int32 [tokens + 1]
    counters,  # int64 [2 + tokens], zero before and after
    tokens,
    width,
    window,
    num_rows,
    requests,
    max_blocks,
    block_size,
    stride_dense_token,
    stride_dense_column,
    stride_lengths_token,
    stride_limits_token,
    stride_offsets_token,
    stride_positions_token,
    stride_window_offsets_token,
    stride_requests_token,
    stride_table_request,
    BLOCK: tl.constexpr,
    LOOKBACK: tl.constexpr,
):
    HAS_DENSE: tl.constexpr = dense is not None
    HAS_TABLE: tl.constexpr = block_table is not None
    row = tl.atomic_add(counters, 1, sem="relaxed").to(tl.int32)
    states = counters + 2
    row64 = row.to(tl.int64)

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
    first = tl.full([], 0, tl.int32)
    seen = tl.full([], 0, tl.int32)
    window_offset = tl.full([], 0, tl.int64)
    if positions is not None:
        position = tl.load(positions + row64 * stride_positions_token)
        first = tl.maximum(position - window + 1, 0)
        seen = tl.where(position >= 0, position - first + 1, 0)
        length = tl.where(position >= 0, length, 0)
    if window_offsets is not None:
        window_offset = tl.load(window_offsets + row64 * stride_window_offsets_token).to(tl.int64)
    known = True
    table_row = block_table
    if block_table is not None:
        request = tl.load(request_ids + row64 * stride_requests_token)
        known = (request >= 0) & (request < requests)
        table_row = block_table + tl.where(known, request, 0).to(tl.int64) * stride_table_request
        length = tl.where(known, length, 0)
        seen = tl.where(known, seen, 0)
    source = dense
    if dense is not None:
        source = dense + row64 * stride_dense_token

    count = tl.full([], 0, tl.int32)
    count = _count(
        count, source, 0, length, limit, offset, known, table_row, num_rows, max_blocks, block_size,
        stride_dense_column, HAS_DENSE, HAS_TABLE, False, BLOCK,
    )  # fmt: skip
    if positions is not None:
        count = _count(
            count, None, first, seen, None, window_offset, known, table_row, num_rows, max_blocks, block_size, 0,
            False, HAS_TABLE, True, BLOCK,
        )  # fmt: skip

    tl.atomic_xchg(states + row, count.to(tl.int64) + COUNT, sem="release")
    before = _rows_before(states, row, LOOKBACK)
    after = before + count
    tl.atomic_xchg(states + row, after + TOTAL, sem="release")
    tl.store(indptr + row, before.to(tl.int32))
    if row == tokens - 1:
        tl.store(indptr + tokens, after.to(tl.int32))

    place = _write(
        indices, before, source, 0, length, limit, offset, known, table_row, num_rows, max_blocks, block_size,
        stride_dense_column, HAS_DENSE, HAS_TABLE, False, BLOCK,
    )  # fmt: skip
    if positions is not None:
        _write(
            indices, place, None, first, seen, None, window_offset, known, table_row, num_rows, max_blocks,
            block_size, 0, False, HAS_TABLE, True, BLOCK,
        )  # fmt: skip

    # The rows leave capacity - indptr[-1] places; row t clears as many as it left unused, counted from the end.
    whole = width + window
    end = (tokens.to(tl.int64) * whole) - (row64 * whole - before)
    for start in range(0, whole - count, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tl.store(indices + end - 1 - column, tl.full([BLOCK], -1, tl.int32), mask=column < whole - count)

    finished = tl.atomic_add(counters + 1, 1, sem="acq_rel")
    if finished == tokens - 1:
        for start in range(0, tokens + 2, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(counters + at, tl.zeros([BLOCK], tl.int64), mask=at < tokens + 2)
