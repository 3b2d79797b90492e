"""Where a row of a ragged batch lies in a paged cache."""

import triton
import triton.language as tl


@triton.jit
def find_slot(row, kv_indptr, starts, block_table, requests, max_blocks, num_blocks, block_size, stride_table_request):
    """(block int64, place in it, known) of rows [n] of keys gathered by ``kv_indptr`` [requests + 1].

    A request's first row is position 0; with ``starts``, position starts[b], in a ring whose blocks come round. known
    is False beyond kv_indptr[-1], beyond the block table, for a position outside int32, and for a block outside
    [0, num_blocks).
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
    if starts is not None:
        position += tl.load(starts + low)
        known = known & (position >= 0)
    turn = position // block_size
    column = turn if starts is None else turn % max_blocks
    known = known & (column < max_blocks)
    block = tl.load(block_table + low.to(tl.int64) * stride_table_request + column, mask=known, other=-1)
    known = known & (block >= 0) & (block < num_blocks)
    return block.to(tl.int64), position - turn * block_size, known
