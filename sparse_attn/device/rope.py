"""Rotation and Hadamard transform in Triton.

Both give the bits of the plain-torch references when the kernel is launched with ``enable_fp_fusion=False``, which
keeps the compiler from contracting a product and a sum into one fma.
"""

import triton
import triton.language as tl


@triton.jit
def pair_of(column, START: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr):
    """(rotated, partner, frequency, is_first) of each column, when the slice [START, START + WIDTH) is rotated."""
    # Interleaved pairs are neighbours; else the first half pairs with the second.
    place = column - START
    rotated = (place >= 0) & (place < WIDTH)
    if INTERLEAVED:
        is_first = place % 2 == 0
        frequency = place // 2
        partner = tl.where(is_first, column + 1, column - 1)
    else:
        is_first = place < WIDTH // 2
        frequency = tl.where(is_first, place, place - WIDTH // 2)
        partner = tl.where(is_first, column + WIDTH // 2, column - WIDTH // 2)
    return rotated, partner, frequency, is_first


@triton.jit
def look_up(
    cos_sin,  # fp32 [rows, WIDTH]
    position,  # int64
    rows,
    rotated,
    frequency,
    stride_row,
    stride_column,
    WIDTH: tl.constexpr,
):
    """(cos, sin, live): of each column, 0 where it is not rotated; whether the table has the position. Nothing is read
    where it has not."""
    live = (position >= 0) & (position < rows)
    turns = rotated & live
    position = tl.where(live, position, 0)
    table = cos_sin + position * stride_row + frequency * stride_column
    cos = tl.load(table, mask=turns, other=0.0)
    return cos, tl.load(table + WIDTH // 2 * stride_column, mask=turns, other=0.0), live


@triton.jit
def swap_neighbours(values, ROWS: tl.constexpr, DIM: tl.constexpr):
    """[ROWS, DIM] with columns 2i and 2i + 1 exchanged: the partners where an interleaved slice starts evenly."""
    a, b = tl.split(tl.reshape(values, [ROWS, DIM // 2, 2]))
    return tl.reshape(tl.join(b, a), [ROWS, DIM])


@triton.jit
def rotate(values, partners, cos, sin, rotated, is_first):
    """a * cos - b * sin for the first of a pair, b * cos + a * sin for the second; other columns as they are."""
    along, across = values * cos, partners * sin
    turned = tl.where(is_first, along - across, along + across)  # Triton's -x is 0 - x: it would lose a zero's sign
    return tl.where(rotated, turned, values)


@triton.jit
def hadamard(values, ROWS: tl.constexpr, DIM: tl.constexpr, STAGES: tl.constexpr):
    """Orthonormal Hadamard transform of [ROWS, DIM], DIM = 2**STAGES: each stage turns neighbours into sum and
    difference and deals them to the two halves, which after STAGES stages is the natural order again."""
    for _ in tl.static_range(STAGES):
        a, b = tl.split(tl.reshape(values, [ROWS, DIM // 2, 2]))
        values = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [ROWS, DIM])
    return values * (DIM**-0.5)
