"""The output map: where a row's selection goes, and what is stored for a column.

Columns go to a row of a matrix. Cache slots go behind those of the rows before. Rows are packed in three steps
(device/packing.py). ``announce`` tells how many slots the row has, as soon as that is known. ``begin`` waits for the
rows before, as late as possible. ``finish`` ends the row.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sparse_attn.device import packing, ptx_io
from sparse_attn.ops.topk.select.primitives import tile
from sparse_attn.ops.topk.select.primitives.tile import WORD


class MatrixRow(NamedTuple):
    """The output map of a row of a matrix, within a kernel."""

    row: Any  # int64
    k: Any


class PackedRow(NamedTuple):
    """The output map of a row that is packed behind others, within a kernel."""

    row: Any  # int64
    k: Any
    indptr: Any
    states: Any
    rows: Any
    blocks: Any  # the block table of the row's request
    max_blocks: Any
    BLOCK_SIZE: Any
    THREADS: Any  # the CTA's threads where any of them may load, else 0


MATRIX_FIELDS = tl.constexpr(len(MatrixRow._fields))  # by which a kernel tells the two apart


@triton.jit
def of_row(
    row, k, indptr, states, block_table, rows, next_n, max_blocks, stride_table_request, BLOCK_SIZE: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """A row's output map. Without a block table it is a MatrixRow. A request has ``next_n`` rows."""
    if block_table is None:
        return MatrixRow(row, k)
    else:
        blocks = block_table + row // next_n * stride_table_request
        return PackedRow(row, k, indptr, states, rows, blocks, max_blocks, BLOCK_SIZE, THREADS)


@triton.jit
def values(output_map, columns):
    """What is stored for ``columns``. Columns beyond the block table give any value."""
    if len(output_map) == MATRIX_FIELDS:
        return columns
    else:
        block = columns // output_map.BLOCK_SIZE
        if output_map.THREADS > 0:  # Triton's load would move what it loads between threads, in a loop of stores
            block_id = ptx_io.look_up(output_map.blocks, block, output_map.max_blocks)
        else:
            block_id = tl.load(output_map.blocks + block, mask=block < output_map.max_blocks, other=0)
        return block_id * output_map.BLOCK_SIZE + columns % output_map.BLOCK_SIZE


@triton.jit
def tile_values(output_map, first, SIZE: tl.constexpr):
    """What is stored for SIZE columns from ``first`` on, as a tile. Each line of it lies in one block."""
    if len(output_map) == MATRIX_FIELDS:
        return first + tile.positions(SIZE)
    else:
        return values(output_map, first + tl.arange(0, SIZE // WORD) * WORD)[:, None] + tl.arange(0, WORD)[None, :]


@triton.jit
def announce(output_map, count):
    """Tell later rows how many slots this one has."""
    if len(output_map) != MATRIX_FIELDS:
        packing.tell_later_rows(output_map.states, output_map.row.to(tl.int32), output_map.rows, count)


@triton.jit
def begin(output_map):
    """Where the row begins in the output. Waits until all rows before have announced."""
    if len(output_map) == MATRIX_FIELDS:
        return output_map.row * output_map.k
    else:
        return packing.told_by_rows_before(output_map.states, output_map.row)


@triton.jit
def finish(out, output_map, begin, count):
    """Store -1 behind the row's ``count`` values, and the row's bounds."""
    if len(output_map) == MATRIX_FIELDS:
        for first in range(count, output_map.k, 1024):
            at = first + tl.arange(0, 1024)
            tl.store(out + (begin + at), tl.full([1024], -1, tl.int32), mask=at < output_map.k)
    else:
        packing.store_bounds(output_map.indptr, output_map.row, output_map.rows, begin, count)
        packing.clear_unused(out, output_map.row, output_map.rows, begin, count, output_map.k, 1024)
        packing.forget(output_map.states, output_map.row)
