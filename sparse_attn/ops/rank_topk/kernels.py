"""A rank's steps of a selection over ranks, on every GPU.

Floors: bytes, rows * width * 4 a step. Five steps read the scores; a rank's scores of one layer stay in the L2 between
them where they fit. So every step is bound by latency, and its loads are under way together: the first tile of scores
while the digit above is found, the ties of all ranks beside it. A CTA has a part of a row, or all of it. Digits are
counted in shared memory, where equal digits of a warp meet in one addition; on other GPUs than NVIDIA's by
tl.histogram. Integer sums do not depend on their order.

A rank's ties that win are its first ones, because positions of a rank ascend as those of all ranks do. So one number a
row says which: take_winners finds it from the ties of all ranks, and one running count of a tile places its winners.
What count_ties counted of the blocks before says where a CTA begins, so CTAs wait for none.
"""

import triton
import triton.language as tl

from sparse_attn.device import histogram, pdl, ptx_io

SIGN = tl.constexpr(-2147483648)
MINUS_INF = tl.constexpr(-2139095041)  # as a signed ordered integer
TIE = tl.constexpr(16)  # bits of a count of scores above the k-th; a count of ties stands above them
HIGHER = tl.constexpr((1 << 16) - 1)  # those bits
FILL = tl.constexpr(2048)  # places behind the winners that are filled together


@triton.jit
def _range(row, row_starts, row_ends, stride_starts, stride_ends, width):
    start, end = 0, width
    if row_starts is not None:
        start = tl.minimum(tl.maximum(tl.load(row_starts + row * stride_starts), 0), width)
    if row_ends is not None:
        end = tl.minimum(tl.maximum(tl.load(row_ends + row * stride_ends), 0), width)
    return start, end


@triton.jit
def _row(logits, row, stride, ALIGNED: tl.constexpr):
    """A row's column 0. stride: in fours where ALIGNED."""
    return logits + row.to(tl.int64) * stride * (4 if ALIGNED else 1)


@triton.jit
def _below(column, end):
    """Compared unsigned: a column past the last int32 is not below ``end``."""
    return column.to(tl.uint32, bitcast=True) < end.to(tl.uint32, bitcast=True)


@triton.jit
def _load(scores, column, end, ALIGNED: tl.constexpr):
    """Scores of a row; from ``end`` on any value. ALIGNED: four columns are one load; see rows.is_aligned."""
    if ALIGNED:
        return tl.load(scores + column, _below(column, (end + 3) // 4 * 4), float("-inf"))
    else:
        return tl.load(scores + column, _below(column, end), float("-inf"))


@triton.jit
def _inside(values, column, end):
    return tl.where(_below(column, end), values, float("-inf"))


@triton.jit
def _keys(values, column, end):
    """int32 whose unsigned order is that of scores, 0 for what is never selected."""
    values = _inside(values, column, end)
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return tl.where(values > float("-inf"), bits ^ ((bits >> 31) | SIGN), 0)


@triton.jit
def _compared(values, key):
    """(which scores are higher than the one of a signed ordered integer, which equal it)."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    score = tl.where(key <= MINUS_INF, float("-inf"), bits.to(tl.float32, bitcast=True))
    return values > score, (values == score) & (score > float("-inf"))


@triton.jit
def _descend(sums, state, row, stride_sums, stride_row, stride_value, DIGITS: tl.constexpr):
    """(digits above with one more, still to be taken); see the reference."""
    QUADS: tl.constexpr = DIGITS // 4  # from the highest digits down; each is one load
    place = (QUADS - 1 - tl.arange(0, QUADS))[:, None] * 4 + tl.arange(0, 4)[None, :]
    counts = tl.maximum(tl.load(sums + row.to(tl.int64) * stride_sums + place), 0).to(tl.int64)
    prefix = tl.load(state + row * stride_row)
    need = tl.load(state + row * stride_row + stride_value)
    quads = tl.sum(counts, 1)
    reached = tl.cumsum(quads, 0)[:, None] - tl.cumsum(counts, 1) + counts
    passed = (reached < need) & (place > 0)
    # Of the last digit passed, how many scores are reached and how many digits are passed, in one number.
    last = tl.max(tl.max(tl.where(passed, (reached << 12) + (DIGITS - place), 0), 1), 0)
    digit = DIGITS - 1 - (last & 4095).to(tl.int32)
    return prefix * DIGITS + digit, need - (last >> 12).to(tl.int32)


@triton.jit
def _add(counts, place, found, ATOMIC: tl.constexpr):
    """Add ``found`` to counts that are zero at first, or store it where a row has one CTA."""
    if ATOMIC:
        tl.atomic_add(counts + place, found, mask=found > 0, sem="relaxed")
    else:
        tl.store(counts + place, found)


@triton.jit(do_not_specialize=["width", "k", "splits", "stride_logits"])
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
    stride_logits,  # in fours where ALIGNED
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
    ALIGNED: tl.constexpr,  # see _load; row_starts is None
    THREADS: tl.constexpr,  # of a CTA that counts in shared memory, else 0
    PDL: tl.constexpr,
):
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    smem = histogram.claim_cleared(emulated_smem, 0, THREADS)
    pdl.wait(PDL)
    start, end = _range(row, row_starts, row_ends, stride_starts, stride_ends, width)
    scores, column, step = _row(logits, row, stride_logits, ALIGNED), tl.arange(0, COLUMNS), splits * COLUMNS
    begin = start + split * COLUMNS
    values = _load(scores, begin + column, end, ALIGNED)
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
        for first in range(begin, end, step):
            key = _keys(values, first + column, end)
            values = _load(scores, first + step + column, end, ALIGNED)
            histogram.count(smem, key, base, shift)
        tl.debug_barrier()
        QUADS: tl.constexpr = min(DIGITS // 4, THREADS)
        for quad in tl.static_range(DIGITS // (4 * QUADS)):
            place = (quad * QUADS + tl.arange(0, QUADS)) * 4
            a, b, c, d = histogram.load_four(smem, place)
            # No score has key 0: that is what is not selectable.
            a = tl.where((place == 0) & (prefix == 0), 0, a)
            _add(counts, place, a, ATOMIC)
            _add(counts, place + 1, b, ATOMIC)
            _add(counts, place + 2, c, ATOMIC)
            _add(counts, place + 3, d, ATOMIC)
    else:
        found = tl.zeros([DIGITS], tl.int32)
        for first in range(begin, end, step):
            key = _keys(values, first + column, end)
            values = _load(scores, first + step + column, end, ALIGNED)
            bits, counted = key.to(tl.uint32, bitcast=True), key != 0
            if sums is not None:
                counted &= ((bits >> SHIFT) // DIGITS).to(tl.int32) == prefix
            found += tl.histogram(((bits >> SHIFT) % DIGITS).to(tl.int32), DIGITS, mask=counted)
        _add(counts, tl.arange(0, DIGITS), found, ATOMIC)


@triton.jit
def _columns(block, start, end, BLOCK_SIZE: tl.constexpr, PADDED: tl.constexpr):
    """[blocks, PADDED], ``end`` where a block has no such column."""
    inside = tl.arange(0, PADDED)[None, :]
    column = start + block[:, None] * BLOCK_SIZE + inside
    if PADDED != BLOCK_SIZE:
        column = tl.where(inside < BLOCK_SIZE, column, end)
    return column


@triton.jit(do_not_specialize=["width", "blocks", "splits", "stride_logits"])
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
    ALIGNED: tl.constexpr,
    SAME_SMEM: tl.constexpr,  # whether as much shared memory is claimed as by count_digits; see config.py
    PDL: tl.constexpr,
):
    if SAME_SMEM:
        histogram.claim(None, 0)
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    pdl.wait(PDL)
    start, end = _range(row, row_starts, row_ends, stride_starts, stride_ends, width)
    scores, step = _row(logits, row, stride_logits, ALIGNED), splits * TOGETHER
    some = tl.arange(0, TOGETHER)
    column = _columns(split * TOGETHER + some, start, end, BLOCK_SIZE, PADDED)
    values = _load(scores, column, end, ALIGNED)
    prefix, need = _descend(sums, state, row, stride_sums, stride_state, stride_state_value, UPPER)
    threshold = prefix ^ SIGN
    if split == 0:
        tl.store(new_state + row * 2, threshold)
        tl.store(new_state + row * 2 + 1, need)
    for first in range(split * TOGETHER, blocks, step):
        higher, tied = _compared(_inside(values, column, end), threshold)
        higher, tied = higher.to(tl.int32), tied.to(tl.int32)
        column = _columns(first + step + some, start, end, BLOCK_SIZE, PADDED)
        values = _load(scores, column, end, ALIGNED)
        at = row.to(tl.int64) * blocks + first + some
        if PADDED <= HIGHER:
            both = tl.sum(higher + (tied << TIE), 1)
            num_tied, num_higher = both >> TIE, both & HIGHER
        else:
            num_tied, num_higher = tl.sum(tied, 1), tl.sum(higher, 1)
        tl.store(ties + at, num_tied.to(ties.dtype.element_ty), first + some < blocks)
        tl.store(above + at, num_higher.to(above.dtype.element_ty), first + some < blocks)


@triton.jit
def _ties_of_ranks(
    ties, row, rank, block, blocks, stride_rank, stride_row, stride_block, RANKS: tl.constexpr,
):  # fmt: skip
    """Of each block: (this rank's ties, those of the ranks before it, those of all)."""
    at = ties + row.to(tl.int64) * stride_row + block.to(tl.int64) * stride_block
    own, lower, whole = tl.zeros_like(block), tl.zeros_like(block), tl.zeros_like(block)
    for other in tl.static_range(RANKS):
        tied = tl.load(at + other * stride_rank.to(tl.int64), block < blocks, 0).to(tl.int32)
        own += tl.where(other == rank, tied, 0)
        lower += tl.where(other < rank, tied, 0)
        whole += tied
    return own, lower, whole


@triton.jit(do_not_specialize=["width", "k", "blocks", "rank", "splits", "stride_logits", "stride_ties_rank"])
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
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,  # at most half of HIGHER
    CHUNK: tl.constexpr,  # blocks looked through together
    SPLIT: tl.constexpr,  # whether a row has several CTAs
    ALIGNED: tl.constexpr,
    SAME_SMEM: tl.constexpr,  # whether as much shared memory is claimed as by count_digits; see config.py
    SCATTER: tl.constexpr,  # whether PTX stores winners: Triton's store would move them between threads first
    PDL: tl.constexpr,
):
    if SAME_SMEM:
        histogram.claim(None, 0)
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    pdl.wait(PDL)
    start, end = _range(row, row_starts, row_ends, stride_starts, stride_ends, width)
    threshold = tl.load(state + row * stride_state)
    need = tl.maximum(tl.load(state + row * stride_state + stride_state_value), 0)
    share = tl.cdiv(blocks, splits)
    mine, last = tl.minimum(split * share, blocks), tl.minimum((split + 1) * share, blocks)
    scores, column = _row(logits, row, stride_logits, ALIGNED), tl.arange(0, COLUMNS)
    begin, stop = start + mine * BLOCK_SIZE, end
    if SPLIT:
        stop = tl.minimum(end, start + last * BLOCK_SIZE)
    values = _load(scores, begin + column, stop, ALIGNED)

    seen, taken = 0, tl.zeros([CHUNK], tl.int32)  # ties of all ranks before a chunk; own ties that win
    before_mine = tl.zeros([CHUNK], tl.int64)  # scores above the k-th, and above 32 bits own ties
    for first in range(0, blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        own, lower, whole = _ties_of_ranks(
            ties, row, rank, block, blocks, stride_ties_rank, stride_ties_row, stride_ties_block, RANKS
        )
        if SPLIT:
            higher = tl.load(above + row.to(tl.int64) * blocks + block, block < mine, 0)
            before_mine += (tl.where(block < mine, own, 0).to(tl.int64) << 32) + higher.to(tl.int64)
        before = seen + tl.cumsum(whole, 0) - whole + lower
        taken += tl.minimum(tl.maximum(need - before, 0), own)
        if first + CHUNK < blocks:
            seen += tl.sum(whole, 0)
    limit, tied_at, above_at = tl.sum(taken, 0), 0, 0
    if SPLIT:
        begins = tl.sum(before_mine, 0)
        tied_at, above_at = (begins >> 32).to(tl.int32), begins.to(tl.int32)

    out += row.to(tl.int64) * k
    for first in range(begin, stop, COLUMNS):
        higher, tied = _compared(_inside(values, first + column, stop), threshold)
        values = _load(scores, first + COLUMNS + column, stop, ALIGNED)
        both = higher.to(tl.int32) + (tied.to(tl.int32) << TIE)
        upto = tl.cumsum(both, 0) - both
        ties_before = tied_at + (upto >> TIE)
        wins = higher | (tied & (ties_before < limit))
        place = above_at + (upto & HIGHER) + tl.minimum(ties_before, limit)
        chosen = tl.where(wins, place, -1)
        if SCATTER:
            ptx_io.scatter(out, place, first + column - start, chosen, k - 1)
        else:
            tl.store(out + place, first + column - start, _below(chosen, k))
        found = tl.sum(both, 0)
        tied_at += found >> TIE
        above_at += found & HIGHER
    if last == blocks and (mine < blocks or split == 0):
        for first in range(tl.maximum(above_at + tl.minimum(tied_at, limit), 0), k, FILL):
            place = first + tl.arange(0, FILL)
            tl.store(out + place, -1, _below(place, k))
