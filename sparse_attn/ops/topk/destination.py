"""Where a row's selection goes: its columns to a row of a matrix, or its cache slots behind those of the rows before it.

A destination is (row, k) for the former, else (row, k, indptr, states, rows, blocks, max_blocks, BLOCK_SIZE, THREADS),
see device/packing.py; ``blocks`` are those of the row's request. How many are selected is told as soon as it is known, and
where they go is asked for as late as can be.
"""

import triton
import triton.language as tl

from sparse_attn.device import packing
from sparse_attn.ops.topk import memory, tiles
from sparse_attn.ops.topk.tiles import LANES


@triton.jit
def of_row(
    row, k, indptr, states, block_table, rows, next_n, max_blocks, stride_table_request, BLOCK_SIZE: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """A row's destination; without a block table one of the matrix. row: int64; a request has ``next_n`` rows. THREADS: of the
    program where it may load by any of them, else 0."""
    if block_table is None:
        return row, k
    else:
        blocks = block_table + row // next_n * stride_table_request
        return row, k, indptr, states, rows, blocks, max_blocks, BLOCK_SIZE, THREADS


@triton.jit
def values(target, columns):
    """What is stored for ``columns``; anything for those beyond the block table."""
    if len(target) == 2:
        return columns
    else:
        row, k, indptr, states, rows, blocks, max_blocks, BLOCK_SIZE, THREADS = target
        block = columns // BLOCK_SIZE
        if THREADS > 0:  # a load of the language's would move what it loads between threads, in a loop of stores every time
            block_id = memory.look_up(blocks, block, max_blocks)
        else:
            block_id = tl.load(blocks + block, mask=block < max_blocks, other=0)
        return block_id * BLOCK_SIZE + columns % BLOCK_SIZE


@triton.jit
def tile(target, first, SIZE: tl.constexpr):
    """What is stored for SIZE columns from ``first`` on, as a tile, each line of which lies in one block."""
    if len(target) == 2:
        return first + tiles.of(SIZE)
    else:
        return values(target, first + tl.arange(0, SIZE // LANES) * LANES)[:, None] + tl.arange(0, LANES)[None, :]


@triton.jit
def tell(target, count):
    if len(target) != 2:
        row, k, indptr, states, rows, blocks, max_blocks, BLOCK_SIZE, THREADS = target
        packing.tell_later_rows(states, row.to(tl.int32), rows, count)


@triton.jit
def begin(target):
    """Where in the output the row begins; it waits for what the rows before tell."""
    if len(target) == 2:
        return target[0] * target[1]
    else:
        row, k, indptr, states, rows, blocks, max_blocks, BLOCK_SIZE, THREADS = target
        return packing.told_by_rows_before(states, row)


@triton.jit
def finish(out, target, begin, count):
    """Behind the row's ``count`` values: -1; and its bounds."""
    if len(target) == 2:
        row, k = target
        for first in range(count, k, 1024):
            at = first + tl.arange(0, 1024)
            tl.store(out + (begin + at), tl.full([1024], -1, tl.int32), mask=at < k)
    else:
        row, k, indptr, states, rows, blocks, max_blocks, BLOCK_SIZE, THREADS = target
        packing.store_bounds(indptr, row, rows, begin, count)
        packing.clear_unused(out, row, rows, begin, count, k, 1024)
        packing.forget(states, row)
