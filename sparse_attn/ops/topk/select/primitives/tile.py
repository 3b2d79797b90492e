"""A row of scores: a tile of its columns, its range, its load.

A tile is [SIZE / WORD, WORD]: a line of it is a word of a bitmask. ``row_ptr`` points to a row's column 0.
"""

import triton
import triton.language as tl

from sparse_attn.ops.topk.select import fake

WORD = tl.constexpr(fake.WORD)
GROUP = tl.constexpr(fake.GROUP)


@triton.jit
def positions(SIZE: tl.constexpr):
    """0 .. SIZE - 1 as [SIZE / WORD, WORD]."""
    return tl.arange(0, SIZE // WORD)[:, None] * WORD + tl.arange(0, WORD)[None, :]


@triton.jit
def row_range(row_starts, row_ends, row, width, stride_starts_row, stride_ends_row):
    """(start, end) of the columns that compete, clamped to the row."""
    start = tl.full([], 0, tl.int32)
    end = start + width
    if row_starts is not None:
        start = tl.minimum(tl.maximum(tl.load(row_starts + row * stride_starts_row), 0), width)
    if row_ends is not None:
        end = tl.minimum(tl.maximum(tl.load(row_ends + row * stride_ends_row), 0), width)
    return start, tl.maximum(end, start)


@triton.jit
def load(row_ptr, columns, start, end, ALIGNED: tl.constexpr):
    """(scores at ``columns`` of a row; which columns lie inside). Scores outside [start, end) have any value.

    ALIGNED: the row starts at a multiple of 16 bytes and can be read up to the next multiple of 4 columns. Then four
    columns are one load.
    """
    # Unsigned: one comparison for both ends.
    inside = (columns - start).to(tl.uint32, bitcast=True) < (end - start).to(tl.uint32)
    if ALIGNED:
        whole = (columns >= (start // 4) * 4) & (columns < ((end + 3) // 4) * 4)
        return tl.load(row_ptr + columns, mask=whole), inside
    else:
        return tl.load(row_ptr + columns, mask=inside), inside


@triton.jit
def load_resident(source, end, SLOTS: tl.constexpr, ALIGNED: tl.constexpr):
    """SLOTS scores from ``source`` on. Scores from ``end`` on have any value. Where ALIGNED, source is a multiple of 16
    bytes."""
    slots = tl.arange(0, SLOTS)
    if ALIGNED:
        return tl.load(source + slots, mask=slots < ((end + 3) // 4) * 4)
    else:
        return tl.load(source + slots, mask=slots < end)
