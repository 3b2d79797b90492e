"""The output map: where a row's selection goes, and what is stored for a column.

Columns go to a row of a matrix; the map is (row, k). Cache slots go behind those of the rows before; the map is (row,
k, indptr, states, rows, blocks, max_blocks, BLOCK_SIZE, THREADS), and ``blocks`` is the block table of the row's
request. Rows are packed in three steps (device/packing.py). ``announce`` tells how many slots the row has, as soon as
that is known. ``begin`` waits for the rows before, as late as possible. ``finish`` ends the row.
"""

import triton
import triton.language as tl

from sparse_attn.device import packing
from sparse_attn.ops.topk.primitives import ptx_io, tile
from sparse_attn.ops.topk.primitives.tile import WORD


@triton.jit
def of_row(
    row, k, indptr, states, block_table, rows, next_n, max_blocks, stride_table_request, BLOCK_SIZE: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """A row's output map. Without a block table it is a row of a matrix. row: int64; a request has ``next_n`` rows.
    THREADS: the CTA's threads where any of them may load, else 0."""
    if block_table is None:
        return row, k
    else:
        blocks = block_table + row // next_n * stride_table_request
        return row, k, indptr, states, rows, blocks, max_blocks, BLOCK_SIZE, THREADS


@triton.jit
def values(output_map, columns):
    """What is stored for ``columns``. Columns beyond the block table give any value."""
    if len(output_map) == 2:
        return columns
    else:
        row, k, indptr, states, rows, blocks, max_blocks, BLOCK_SIZE, THREADS = output_map
        block = columns // BLOCK_SIZE
        if THREADS > 0:  # Triton's load would move what it loads between threads, in a loop of stores every time
            block_id = ptx_io.look_up(blocks, block, max_blocks)
        else:
            block_id = tl.load(blocks + block, mask=block < max_blocks, other=0)
        return block_id * BLOCK_SIZE + columns % BLOCK_SIZE


@triton.jit
def tile_values(output_map, first, SIZE: tl.constexpr):
    """What is stored for SIZE columns from ``first`` on, as a tile. Each line of it lies in one block."""
    if len(output_map) == 2:
        return first + tile.positions(SIZE)
    else:
        return values(output_map, first + tl.arange(0, SIZE // WORD) * WORD)[:, None] + tl.arange(0, WORD)[None, :]


@triton.jit
def announce(output_map, count):
    """Tell later rows how many slots this one has."""
    if len(output_map) != 2:
        row, k, indptr, states, rows, blocks, max_blocks, BLOCK_SIZE, THREADS = output_map
        packing.tell_later_rows(states, row.to(tl.int32), rows, count)


@triton.jit
def begin(output_map):
    """Where the row begins in the output. Waits until all rows before have announced."""
    if len(output_map) == 2:
        return output_map[0] * output_map[1]
    else:
        row, k, indptr, states, rows, blocks, max_blocks, BLOCK_SIZE, THREADS = output_map
        return packing.told_by_rows_before(states, row)


@triton.jit
def finish(out, output_map, begin, count):
    """Store -1 behind the row's ``count`` values, and the row's bounds."""
    if len(output_map) == 2:
        row, k = output_map
        for first in range(count, k, 1024):
            at = first + tl.arange(0, 1024)
            tl.store(out + (begin + at), tl.full([1024], -1, tl.int32), mask=at < k)
    else:
        row, k, indptr, states, rows, blocks, max_blocks, BLOCK_SIZE, THREADS = output_map
        packing.store_bounds(indptr, row, rows, begin, count)
        packing.clear_unused(out, row, rows, begin, count, k, 1024)
        packing.forget(states, row)
