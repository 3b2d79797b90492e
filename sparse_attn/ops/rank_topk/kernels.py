"""A rank's steps of a selection over ranks, on every GPU.

Floors: bytes, rows * width * 4 a step. Four steps read the scores; a rank's scores of one layer stay in the L2 between
them where they fit. Digits are counted in registers by tl.histogram and added once a CTA, so equal scores do not queue
at one address. Integer sums do not depend on their order.
"""

import triton
import triton.language as tl

from sparse_attn.device import pdl
from sparse_attn.device.order import ordered_key

LOWEST = tl.constexpr(-2147483648)  # the key of what is never selected


@triton.jit
def _range(row, row_starts, row_ends, stride_starts, stride_ends, width):
    start, end = 0, width
    if row_starts is not None:
        start = tl.minimum(tl.maximum(tl.load(row_starts + row * stride_starts), 0), width)
    if row_ends is not None:
        end = tl.minimum(tl.maximum(tl.load(row_ends + row * stride_ends), 0), width)
    return start, end


@triton.jit
def _keys(logits, row, stride, column, end):
    values = tl.load(logits + row.to(tl.int64) * stride + column, column < end, float("-inf"))
    return ordered_key(values)


@triton.jit
def _descend(sums, state, row, stride_sums, stride_row, stride_value, DIGITS: tl.constexpr):
    """(digits above with one more, still to be taken); see the reference."""
    place = tl.arange(0, DIGITS)
    counts = tl.load(sums + row.to(tl.int64) * stride_sums + place).to(tl.int64)
    prefix = tl.load(state + row * stride_row)
    need = tl.load(state + row * stride_row + stride_value)
    reached = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    digit = tl.max(tl.where(reached >= need, place, 0), 0)
    above = tl.sum(tl.where(place > digit, counts, 0), 0)
    return prefix * DIGITS + digit, (need - above).to(tl.int32)


@triton.jit(do_not_specialize=["width", "k"])
def count_digits(
    logits,  # fp32 [rows, width]
    row_starts,  # int32 [rows] or None
    row_ends,
    sums,  # int32 [rows, UPPER], of the digit above, or None
    state,  # int32 [rows, 2] or None
    counts,  # int32 [rows, DIGITS], zeros
    new_state,  # int32 [rows, 2]
    width,
    k,
    stride_logits,
    stride_starts,
    stride_ends,
    stride_sums,
    stride_state,
    stride_state_value,
    SHIFT: tl.constexpr,
    DIGITS: tl.constexpr,
    UPPER: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    row, split = tl.program_id(0), tl.program_id(1)
    pdl.wait(PDL)
    start, end = _range(row, row_starts, row_ends, stride_starts, stride_ends, width)
    if sums is not None:
        prefix, need = _descend(sums, state, row, stride_sums, stride_state, stride_state_value, UPPER)
    else:
        prefix, need = 0, k
    if split == 0:
        tl.store(new_state + row * 2, prefix)
        tl.store(new_state + row * 2 + 1, need)
    found = tl.zeros([DIGITS], tl.int32)
    for first in range(start + split * COLUMNS, end, tl.num_programs(1) * COLUMNS):
        key = _keys(logits, row, stride_logits, first + tl.arange(0, COLUMNS), end)
        bits = (key ^ LOWEST).to(tl.uint32, bitcast=True)
        counted = key != LOWEST
        if sums is not None:
            counted &= ((bits >> SHIFT) // DIGITS).to(tl.int32) == prefix
        found += tl.histogram(((bits >> SHIFT) % DIGITS).to(tl.int32), DIGITS, mask=counted)
    place = tl.arange(0, DIGITS)
    tl.atomic_add(counts + row.to(tl.int64) * DIGITS + place, found, mask=found > 0, sem="relaxed")


@triton.jit(do_not_specialize=["width", "blocks"])
def count_ties(
    logits,
    row_starts,
    row_ends,
    sums,  # int32 [rows, UPPER]
    state,
    ties,  # uint8 or int32 [rows, blocks]
    new_state,
    width,
    blocks,
    stride_logits,
    stride_starts,
    stride_ends,
    stride_sums,
    stride_state,
    stride_state_value,
    BLOCK_SIZE: tl.constexpr,
    UPPER: tl.constexpr,
    COLUMNS: tl.constexpr,  # at least BLOCK_SIZE rounded up to a power of two
    PADDED: tl.constexpr,  # that
    PDL: tl.constexpr,
):
    row, split = tl.program_id(0), tl.program_id(1)
    pdl.wait(PDL)
    start, end = _range(row, row_starts, row_ends, stride_starts, stride_ends, width)
    prefix, need = _descend(sums, state, row, stride_sums, stride_state, stride_state_value, UPPER)
    threshold = prefix ^ LOWEST
    if split == 0:
        tl.store(new_state + row * 2, threshold)
        tl.store(new_state + row * 2 + 1, need)
    TOGETHER: tl.constexpr = COLUMNS // PADDED  # blocks
    inside = tl.arange(0, PADDED)
    for first in range(split * TOGETHER, blocks, tl.num_programs(1) * TOGETHER):
        block = first + tl.arange(0, TOGETHER)
        column = start + block[:, None] * BLOCK_SIZE + inside[None, :]
        column = tl.where(inside[None, :] < BLOCK_SIZE, column, end)
        key = _keys(logits, row, stride_logits, column, end)
        tied = tl.sum(((key == threshold) & (key != LOWEST)).to(tl.int32), 1)
        tl.store(ties + row.to(tl.int64) * blocks + block, tied.to(ties.dtype.element_ty), block < blocks)


@triton.jit(do_not_specialize=["width", "k", "blocks"])
def take_winners(
    logits,
    row_starts,
    row_ends,
    elsewhere,  # int32 [rows, blocks]: ties of other ranks before a block
    state,
    out,  # int32 [rows, k]
    width,
    k,
    blocks,
    stride_logits,
    stride_starts,
    stride_ends,
    stride_state,
    stride_state_value,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    pdl.wait(PDL)
    start, end = _range(row, row_starts, row_ends, stride_starts, stride_ends, width)
    threshold = tl.load(state + row * stride_state)
    need = tl.load(state + row * stride_state + stride_state_value)
    taken, seen = 0, 0  # winners; ties of this rank
    for first in range(start, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        key = _keys(logits, row, stride_logits, column, end)
        tied = ((key == threshold) & (key != LOWEST)).to(tl.int32)
        block = (column - start) // BLOCK_SIZE
        others = tl.load(elsewhere + row.to(tl.int64) * blocks + block, column < end, 0)
        place = seen + tl.cumsum(tied, 0) - 1 + others
        wins = ((key > threshold) | ((tied > 0) & (place < need))).to(tl.int32)
        at = taken + tl.cumsum(wins, 0) - 1
        tl.store(out + row.to(tl.int64) * k + at, column - start, (wins > 0) & (at < k))
        taken += tl.sum(wins, 0)
        seen += tl.sum(tied, 0)
    for first in range(taken, k, COLUMNS):
        at = first + tl.arange(0, COLUMNS)
        tl.store(out + row.to(tl.int64) * k + at, -1, at < k)
