"""Where a row of a ragged batch lies in a paged cache."""

import triton
import triton.language as tl


@triton.jit
def find_slot(
    row, kv_indptr, starts, block_table, requests, max_blocks, num_blocks, block_size, stride_table_request,
    RING: tl.constexpr,
):  # fmt: skip
    """(block int64, place in it, known) of rows [n] of keys gathered by ``kv_indptr`` [requests + 1].

    A request's first row is position 0; in a RING, whose blocks come round, position starts[b]. known is False beyond kv_indptr[-1], beyond the block table, and for a block outside [0, num_blocks).
    """
    low = tl.zeros_like(row)
    span = requests
    while span > 1:  # the last request that starts at or before the row; empty ones before it are passed over
        half = span // 2
        middle = low + half
        begin = tl.load(kv_indptr + tl.minimum(middle, requests - 1))
        low = tl.where((middle < requests) & (begin <= row), middle, low)
        span = span - half
    position = row - tl.load(kv_indptr + low)
    known = (position >= 0) & (row < tl.load(kv_indptr + requests))
    if RING:
        position += tl.load(starts + low)
        known = known & (position >= 0)
    turn = position // block_size
    column = turn % max_blocks if RING else turn
    known = known & (column < max_blocks)
    block = tl.load(block_table + low.to(tl.int64) * stride_table_request + column, mask=known, other=-1)
    known = known & (block >= 0) & (block < num_blocks)
    return block.to(tl.int64), position - turn * block_size, known
