"""A row of scores: its tile, its range, its load."""

import triton
import triton.language as tl

from sparse_attn.ops.topk import shapes

LANES = tl.constexpr(32)  # columns of a tile's line: a tile is read line by line
GROUP = tl.constexpr(shapes.GROUP)


@triton.jit
def of(SIZE: tl.constexpr):
    """0 .. SIZE - 1 as [SIZE / LANES, LANES]."""
    return tl.arange(0, SIZE // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def limits(row_starts, row_ends, row, width, stride_starts_row, stride_ends_row):
    start = tl.full([], 0, tl.int32)
    end = start + width
    if row_starts is not None:
        start = tl.minimum(tl.maximum(tl.load(row_starts + row * stride_starts_row), 0), width)
    if row_ends is not None:
        end = tl.minimum(tl.maximum(tl.load(row_ends + row * stride_ends_row), 0), width)
    return start, tl.maximum(end, start)


@triton.jit
def load(line, columns, start, end, ALIGNED: tl.constexpr):
    """Scores at ``columns`` of a row, anything outside [start, end), and which lie inside.

    ALIGNED: the row starts at a multiple of 16 bytes and can be read up to the next multiple of 4 columns, so that four
    columns are one load.
    """
    inside = (columns - start).to(tl.uint32, bitcast=True) < (end - start).to(tl.uint32)
    if ALIGNED:
        whole = (columns >= (start // 4) * 4) & (columns < ((end + 3) // 4) * 4)
        return tl.load(line + columns, mask=whole), inside
    else:
        return tl.load(line + columns, mask=inside), inside


@triton.jit
def load_held(source, end, SLOTS: tl.constexpr, ALIGNED: tl.constexpr):
    """SLOTS scores from ``source`` on, anything from ``end`` on; where ALIGNED, source is a multiple of 16 bytes."""
    slots = tl.arange(0, SLOTS)
    if ALIGNED:
        return tl.load(source + slots, mask=slots < ((end + 3) // 4) * 4)
    else:
        return tl.load(source + slots, mask=slots < end)
