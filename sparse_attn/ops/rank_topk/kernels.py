"""A rank's steps of a selection over ranks, on every GPU.

Floors: bytes, rows * width * 4 a step. Five steps read the scores; a rank's scores of one layer stay in the L2 between
them where they fit. A CTA has a part of a row. Digits are counted in shared memory, where equal digits of a warp meet
in one addition; on other GPUs than NVIDIA's by tl.histogram. Integer sums do not depend on their order.

What count_ties counts of each block says where the block's winners go, so the CTAs of take_winners wait for none.
"""

import triton
import triton.language as tl

from sparse_attn.device import histogram, pdl
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


@triton.jit
def _add(counts, place, found, ATOMIC: tl.constexpr):
    """Add ``found`` to counts that are zero at first, or store it where a row has one CTA."""
    if ATOMIC:
        tl.atomic_add(counts + place, found, mask=found > 0, sem="relaxed")
    else:
        tl.store(counts + place, found)


@triton.jit(do_not_specialize=["width", "k", "splits"])
def count_digits(
    logits,  # fp32 [rows, width]
    row_starts,  # int32 [rows] or None
    row_ends,
    sums,  # int32 [rows, UPPER], of the digit above, or None
    state,  # int32 [rows, 2] or None
    counts,  # int32 [rows, DIGITS], zeros where ATOMIC
    new_state,  # int32 [rows, 2]
    emulated_smem,  # int32 [CTAs, words] in the interpreter, else None
    width,
    k,
    splits,  # CTAs of a row
    stride_logits,
    stride_starts,
    stride_ends,
    stride_sums,
    stride_state,
    stride_state_value,
    SHIFT: tl.constexpr,
    DIGITS: tl.constexpr,
    UPPER: tl.constexpr,
    COLUMNS: tl.constexpr,  # at least THREADS
    ATOMIC: tl.constexpr,  # whether a row has several CTAs
    THREADS: tl.constexpr,  # of a CTA that counts in shared memory, else 0
    PDL: tl.constexpr,
):
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    smem = histogram.claim_cleared(emulated_smem, 0, THREADS)
    pdl.wait(PDL)
    start, end = _range(row, row_starts, row_ends, stride_starts, stride_ends, width)
    if sums is not None:
        prefix, need = _descend(sums, state, row, stride_sums, stride_state, stride_state_value, UPPER)
    else:
        prefix, need = tl.full([], 0, tl.int32), k
    if split == 0:
        tl.store(new_state + row * 2, prefix)
        tl.store(new_state + row * 2 + 1, need)
    counts += row.to(tl.int64) * DIGITS
    if THREADS > 0:
        shift = tl.full([], SHIFT, tl.int32)
        base = (prefix * DIGITS << SHIFT).to(tl.int32)
        for first in range(start + split * COLUMNS, end, splits * COLUMNS):
            key = _keys(logits, row, stride_logits, first + tl.arange(0, COLUMNS), end)
            histogram.count(smem, key ^ LOWEST, base, shift)
        tl.debug_barrier()
        QUADS: tl.constexpr = DIGITS // (4 * THREADS)  # to a thread
        for quad in tl.static_range(QUADS):
            place = (quad * THREADS + tl.arange(0, THREADS)) * 4
            a, b, c, d = histogram.load_four(smem, place)
            # No score has key 0: that is what is not selectable.
            a = tl.where((place == 0) & (prefix == 0), 0, a)
            _add(counts, place, a, ATOMIC)
            _add(counts, place + 1, b, ATOMIC)
            _add(counts, place + 2, c, ATOMIC)
            _add(counts, place + 3, d, ATOMIC)
    else:
        found = tl.zeros([DIGITS], tl.int32)
        for first in range(start + split * COLUMNS, end, splits * COLUMNS):
            key = _keys(logits, row, stride_logits, first + tl.arange(0, COLUMNS), end)
            bits = (key ^ LOWEST).to(tl.uint32, bitcast=True)
            counted = key != LOWEST
            if sums is not None:
                counted &= ((bits >> SHIFT) // DIGITS).to(tl.int32) == prefix
            found += tl.histogram(((bits >> SHIFT) % DIGITS).to(tl.int32), DIGITS, mask=counted)
        _add(counts, tl.arange(0, DIGITS), found, ATOMIC)


@triton.jit(do_not_specialize=["width", "blocks", "splits"])
def count_ties(
    logits,
    row_starts,
    row_ends,
    sums,  # int32 [rows, UPPER]
    state,
    ties,  # uint8 or int32 [rows, blocks]
    above,  # as ties
    new_state,
    width,
    blocks,
    splits,
    stride_logits,
    stride_starts,
    stride_ends,
    stride_sums,
    stride_state,
    stride_state_value,
    BLOCK_SIZE: tl.constexpr,
    UPPER: tl.constexpr,
    TOGETHER: tl.constexpr,  # blocks
    PADDED: tl.constexpr,  # BLOCK_SIZE rounded up to a power of two
    PDL: tl.constexpr,
):
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    pdl.wait(PDL)
    start, end = _range(row, row_starts, row_ends, stride_starts, stride_ends, width)
    prefix, need = _descend(sums, state, row, stride_sums, stride_state, stride_state_value, UPPER)
    threshold = prefix ^ LOWEST
    if split == 0:
        tl.store(new_state + row * 2, threshold)
        tl.store(new_state + row * 2 + 1, need)
    for first in range(split * TOGETHER, blocks, splits * TOGETHER):
        block = first + tl.arange(0, TOGETHER)
        column = _columns(block, start, end, BLOCK_SIZE, PADDED)
        key = _keys(logits, row, stride_logits, column, end)
        at = row.to(tl.int64) * blocks + block
        tied = tl.sum(((key == threshold) & (key != LOWEST)).to(tl.int32), 1)
        tl.store(ties + at, tied.to(ties.dtype.element_ty), block < blocks)
        higher = tl.sum((key > threshold).to(tl.int32), 1)
        tl.store(above + at, higher.to(above.dtype.element_ty), block < blocks)


@triton.jit
def _columns(block, start, end, BLOCK_SIZE: tl.constexpr, PADDED: tl.constexpr):
    """[blocks, PADDED], ``end`` where a block has no such column."""
    inside = tl.arange(0, PADDED)
    column = start + block[:, None] * BLOCK_SIZE + inside[None, :]
    return tl.where(inside[None, :] < BLOCK_SIZE, column, end)


@triton.jit
def _won(
    ties, above, row, rank, block, limit, blocks, stride_rank, stride_row, stride_block, need, seen,
    RANKS: tl.constexpr, RANKS_PADDED: tl.constexpr,
):  # fmt: skip
    """Of each block below ``limit``: (ties that win, which are its first ones; winners; ties of all ranks). seen: ties
    of all ranks before the first of these blocks, in the order of the whole row."""
    other = tl.arange(0, RANKS_PADDED)[:, None]
    at = other.to(tl.int64) * stride_rank + row.to(tl.int64) * stride_row + block[None, :].to(tl.int64) * stride_block
    tied = tl.load(ties + at, (other < RANKS) & (block < limit)[None, :], 0).to(tl.int32)
    whole = tl.sum(tied, 0)
    lower = tl.sum(tl.where(other < rank, tied, 0), 0)
    own = tl.sum(tl.where(other == rank, tied, 0), 0)
    before = seen + tl.cumsum(whole, 0) - whole + lower
    taken = tl.minimum(tl.maximum(need - before, 0), own)
    higher = tl.load(above + row.to(tl.int64) * blocks + block, block < limit, 0).to(tl.int32)
    return taken, taken + higher, whole


@triton.jit(do_not_specialize=["width", "k", "blocks", "rank", "splits"])
def take_winners(
    logits,
    row_starts,
    row_ends,
    ties,  # [RANKS, rows, blocks] of every rank
    above,  # [rows, blocks], contiguous
    state,
    out,  # int32 [rows, k]
    width,
    k,
    blocks,
    rank,
    splits,
    stride_logits,
    stride_starts,
    stride_ends,
    stride_ties_rank,
    stride_ties_row,
    stride_ties_block,
    stride_state,
    stride_state_value,
    RANKS: tl.constexpr,
    RANKS_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOGETHER: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,  # blocks looked through together
    PDL: tl.constexpr,
):
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    pdl.wait(PDL)
    start, end = _range(row, row_starts, row_ends, stride_starts, stride_ends, width)
    threshold = tl.load(state + row * stride_state)
    need = tl.load(state + row * stride_state + stride_state_value)
    share = tl.cdiv(tl.cdiv(blocks, TOGETHER), splits) * TOGETHER
    mine, last = tl.minimum(split * share, blocks), tl.minimum((split + 1) * share, blocks)
    seen, at = 0, 0  # ties of all ranks, and winners of this one, before ``mine``
    for first in range(0, mine, CHUNK):
        block = first + tl.arange(0, CHUNK)
        _, winners, whole = _won(
            ties, above, row, rank, block, mine, blocks, stride_ties_rank, stride_ties_row, stride_ties_block, need,
            seen, RANKS, RANKS_PADDED,
        )  # fmt: skip
        seen += tl.sum(whole, 0)
        at += tl.sum(winners, 0)
    out += row.to(tl.int64) * k
    for first in range(mine, last, TOGETHER):
        block = first + tl.arange(0, TOGETHER)
        taken, winners, whole = _won(
            ties, above, row, rank, block, blocks, blocks, stride_ties_rank, stride_ties_row, stride_ties_block, need,
            seen, RANKS, RANKS_PADDED,
        )  # fmt: skip
        column = _columns(block, start, end, BLOCK_SIZE, PADDED)
        key = _keys(logits, row, stride_logits, column, end)
        tied = ((key == threshold) & (key != LOWEST)).to(tl.int32)
        wins = ((key > threshold) | ((tied > 0) & (tl.cumsum(tied, 1) <= taken[:, None]))).to(tl.int32)
        place = (at + tl.cumsum(winners, 0) - winners)[:, None] + tl.cumsum(wins, 1) - 1
        tl.store(out + place, column - start, (wins > 0) & (place < k))
        seen += tl.sum(whole, 0)
        at += tl.sum(winners, 0)
    if last == blocks and (mine < blocks or split == 0):
        for first in range(at, k, 1024):
            place = first + tl.arange(0, 1024)
            tl.store(out + place, -1, place < k)
