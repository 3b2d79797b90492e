"""Tiles of outputs, and their scales, in kernels that multiply a product by its scales.

ONE_SCALE: scale blocks are whole tiles high. Then tiles begin where blocks do, so that a tile has one scale for a step.
first_row: rows of the first scale block that lie before the weight.
"""

import triton
import triton.language as tl


@triton.jit
def first_output(tile, first_row, ONE_SCALE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first output of a tile, negative where it begins before the weight."""
    return tile * BLOCK_N - (first_row if ONE_SCALE else 0)


@triton.jit
def scale_row_of(first, own, first_row, ONE_SCALE: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """int64 rows of scales: of the tile that begins at output ``first``, or of each of the outputs ``own``."""
    if ONE_SCALE:
        return ((first + first_row) // BLOCK_ROWS).to(tl.int64)
    else:
        return (own + first_row) // BLOCK_ROWS
