"""A rank's steps of a selection over ranks that counts digits, on every GPU. That by one gather: one_gather.py.

Floors: bytes, rows * width * 4 a step. Five steps read the scores; a rank's scores of one layer stay in the L2 between
them where they fit. So every step is bound by latency and by instructions. All but the first load their first tile of
scores before they wait for the launch in front of them: the first one waits before it lets others start, so the scores
are there (see device/pdl.py). What else a step needs is loaded together. A CTA has a part of a row, or all of it.
Digits are counted in shared memory, where equal digits of a warp meet in one addition; on other GPUs than NVIDIA's by
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
PLACE_BITS = tl.constexpr(12)  # of a digit's place
PLACES = tl.constexpr((1 << 12) - 1)
NARROW = tl.constexpr(1 << 19)  # scores still to be taken: of fewer, sums and a place behind them fit in 31 bits
FILL = tl.constexpr(512)  # places behind the winners that are filled together


@triton.jit
def range_of(row, row_starts, row_ends, stride_starts, stride_ends, width):
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
def _keys(values, first, column, end, COLUMNS: tl.constexpr):
    """int32 whose unsigned order is that of scores, 0 for what is never selected. Of COLUMNS from ``first`` on."""
    if end - first < COLUMNS:
        values = _inside(values, first + column, end)
    return key_of(values)


@triton.jit
def key_of(values):
    """As _keys, of scores that are all inside."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return tl.where(values > float("-inf"), bits ^ ((bits >> 31) | SIGN), 0)


@triton.jit
def _compared(values, key):
    """(which scores are higher than the one of a signed ordered integer, which equal it)."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    score = tl.where(key <= MINUS_INF, float("-inf"), bits.to(tl.float32, bitcast=True))
    return values > score, (values == score) & (score > float("-inf"))


@triton.jit
def _descend(sums, state, row, stride_sums, stride_row, stride_value, smem, DIGITS: tl.constexpr, SHARED: tl.constexpr):
    """(digits above with one more, still to be taken); see the reference. SHARED: whether ``smem`` is the CTA's, whose
    word HIGHEST is 0."""
    QUADS: tl.constexpr = DIGITS // 4  # from the highest digits down; each is one load
    # Four digits a thread, the highest ones first, so that a sum from the front is one from above.
    place = (QUADS - 1 - tl.arange(0, QUADS))[:, None] * 4 + tl.arange(0, 4)[None, :]
    counts = tl.maximum(tl.load(sums + row.to(tl.int64) * stride_sums + place), 0)
    # State of the digit above: what all keys still in question begin with, and how many of them win.
    prefix = tl.load(state + row * stride_row)
    need = tl.load(state + row * stride_row + stride_value)
    if need < NARROW:  # more scores of a digit than are needed are as good as so many
        passed = _passed(tl.minimum(counts, tl.maximum(need, 0)), need, place, DIGITS)
        if SHARED:
            last = histogram.highest(smem, passed).to(tl.int64)
        else:
            last = tl.max(passed, 0).to(tl.int64)
    else:
        last = tl.max(_passed(counts.to(tl.int64), need, place, DIGITS), 0)
    # Digits passed lead to the one that the need is reached in.
    digit = DIGITS - 1 - (last & PLACES).to(tl.int32)
    return prefix * DIGITS + digit, need - (last >> PLACE_BITS).to(tl.int32)


@triton.jit
def _passed(counts, need, place, DIGITS: tl.constexpr):
    """From the highest digit down, while ``need`` is not reached: (scores passed << PLACE_BITS) + digits passed, of the
    last one in each quad."""
    # Sums of fours go through one scan; within a four the later digits are taken off again.
    quads = tl.sum(counts, 1)
    reached = tl.cumsum(quads, 0)[:, None] - tl.cumsum(counts, 1) + counts
    passed = (reached < need) & (place > 0)
    return tl.max(tl.where(passed, (reached << PLACE_BITS) + (DIGITS - place), 0), 1)


@triton.jit
def _add(counts, place, found, ATOMIC: tl.constexpr):
    """Add ``found`` to counts that are zero at first, or store it where a row has one CTA."""
    if ATOMIC:
        tl.atomic_add(counts + place, found, mask=found > 0, sem="relaxed")
    else:
        tl.store(counts + place, found)


@triton.jit
def _count(smem, key, base, shift, LEADING: tl.constexpr):
    if LEADING:
        histogram.count_leading(smem, key)
    else:
        histogram.count(smem, key, base, shift)


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
    ONE: tl.constexpr,  # whether a CTA has a tile at most
    THREADS: tl.constexpr,  # of a CTA that counts in shared memory, else 0
    PDL: tl.constexpr,
):
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    smem = histogram.claim_cleared(emulated_smem, 0, THREADS)
    if sums is None:
        pdl.wait(PDL)  # before others start, which read the scores early
    start, end = range_of(row, row_starts, row_ends, stride_starts, stride_ends, width)
    # CTAs of a row take its tiles by turns.
    scores, column, step = _row(logits, row, stride_logits, ALIGNED), tl.arange(0, COLUMNS), splits * COLUMNS
    begin = start + split * COLUMNS
    values, key = tl.full([COLUMNS], float("-inf"), tl.float32), tl.zeros([COLUMNS], tl.int32)
    # The scores come before the wait: see the module's docstring.
    if not ONE:
        values = _load(scores, begin + column, end, ALIGNED)
    elif begin < end:  # a branch, or the compiler looks at scores behind the wait
        key = _keys(_load(scores, begin + column, end, ALIGNED), begin, column, end, COLUMNS)
    # Behind the wait: the sums of all ranks, by which the digit above is known.
    if sums is not None:
        pdl.wait_last(PDL)
        prefix, need = _descend(
            sums, state, row, stride_sums, stride_state, stride_state_value, smem, UPPER, THREADS > 0
        )
    else:
        prefix, need = tl.full([], 0, tl.int32), k
    # The new state is the same on all CTAs of a row: the first stores it.
    if split == 0:
        tl.store(new_state + row * 2, prefix)
        tl.store(new_state + row * 2 + 1, need)
    counts += row.to(tl.int64) * DIGITS
    # Count this digit of the keys that begin as the k-th does; others fall into no bin.
    if THREADS > 0:
        shift = tl.full([], SHIFT, tl.int32)
        base = (prefix * DIGITS << SHIFT).to(tl.int32)
        if ONE:
            _count(smem, key, base, shift, sums is None)
        else:
            # One tile is on its way while the one before is counted.
            for first in range(begin, end, step):
                key = _keys(values, first, column, end, COLUMNS)
                values = _load(scores, first + step + column, end, ALIGNED)
                _count(smem, key, base, shift, sums is None)
        # All counts of the CTA are there: store or add them four at a time.
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
        # Without shared memory: a histogram of each tile, of the digits that count.
        found = tl.zeros([DIGITS], tl.int32)
        for first in range(begin, end, step):
            key = _keys(values, first, column, end, COLUMNS)
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
    # Places behind a block's end are those behind the row's.
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
    ONE: tl.constexpr,
    SAME_SMEM: tl.constexpr,  # whether as much shared memory is claimed as by count_digits; see config.py
    PDL: tl.constexpr,
):
    # As much shared memory as the passes around claim, or an SM divides its memory anew.
    smem = tl.full([], 0, tl.int32)
    if SAME_SMEM:
        smem = histogram.claim(None, 0)
        histogram.store_one(smem, histogram.HIGHEST, 0)
        tl.debug_barrier()
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    start, end = range_of(row, row_starts, row_ends, stride_starts, stride_ends, width)
    scores, step = _row(logits, row, stride_logits, ALIGNED), splits * TOGETHER
    # Whole blocks of the row, TOGETHER at a time.
    some = tl.arange(0, TOGETHER)
    column = _columns(split * TOGETHER + some, start, end, BLOCK_SIZE, PADDED)
    values = tl.full([TOGETHER, PADDED], float("-inf"), tl.float32)
    if start < end:  # a branch, or the compiler looks at scores behind the wait
        values = _inside(_load(scores, column, end, ALIGNED), column, end)
    # The last digit: from here on the k-th score is known in full.
    pdl.wait_last(PDL)
    prefix, need = _descend(sums, state, row, stride_sums, stride_state, stride_state_value, smem, UPPER, SAME_SMEM)
    threshold = prefix ^ SIGN
    if split == 0:
        tl.store(new_state + row * 2, threshold)
        tl.store(new_state + row * 2 + 1, need)
    if ONE:
        _store_counts(values, threshold, ties, above, row, split * TOGETHER + some, blocks, PADDED)
    else:
        # The next blocks are on their way while these are compared.
        for first in range(split * TOGETHER, blocks, step):
            column = _columns(first + step + some, start, end, BLOCK_SIZE, PADDED)
            later = _load(scores, column, end, ALIGNED)
            _store_counts(values, threshold, ties, above, row, first + some, blocks, PADDED)
            values = _inside(later, column, end)


@triton.jit
def _store_counts(values, threshold, ties, above, row, block, blocks, PADDED: tl.constexpr):
    higher, tied = _compared(values, threshold)
    higher, tied = higher.to(tl.int32), tied.to(tl.int32)
    if PADDED <= HIGHER // 2:  # a count of ties has no sign bit
        both = tl.sum(higher + (tied << TIE), 1)
        num_tied, num_higher = both >> TIE, both & HIGHER
    else:
        num_tied, num_higher = tl.sum(tied, 1), tl.sum(higher, 1)
    # One count for each block, of ties and of scores above.
    at = row.to(tl.int64) * blocks + block
    tl.store(ties + at, num_tied.to(ties.dtype.element_ty), block < blocks)
    tl.store(above + at, num_higher.to(above.dtype.element_ty), block < blocks)


@triton.jit
def _ties_of_ranks(
    ties, row, rank, block, blocks, stride_rank, stride_row, stride_block, RANKS: tl.constexpr,
):  # fmt: skip
    """Of each block: (this rank's ties, those of the ranks before it, those of all)."""
    # Counts lie rank by rank: this rank's, and the sums of those before it and of all.
    at = ties + row.to(tl.int64) * stride_row + block.to(tl.int64) * stride_block
    own = tl.load(at + rank * stride_rank.to(tl.int64), block < blocks, 0).to(tl.int32)
    lower, whole = tl.zeros_like(block), tl.zeros_like(block)
    for other in tl.static_range(RANKS):
        tied = tl.load(at + other * stride_rank.to(tl.int64), block < blocks, 0).to(tl.int32)
        lower += tl.where(other < rank, tied, 0)
        whole += tied
    return own, lower, whole


@triton.jit
def _counted(
    ties, above, need, seen, row, rank, mine, first, blocks, stride_rank, stride_row, stride_block, RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Of CHUNK blocks from ``first`` on, before which all ranks have ``seen`` ties: (own ties that win; scores
    above the k-th; both before block ``mine``, whether ties win or not; ties of all ranks)."""
    block = first + tl.arange(0, CHUNK)
    higher = tl.load(above + row.to(tl.int64) * blocks + block, block < blocks, 0).to(tl.int32)
    # Ties count in the order of the whole row: block by block, and in a block rank by rank.
    own, lower, whole = _ties_of_ranks(ties, row, rank, block, blocks, stride_rank, stride_row, stride_block, RANKS)
    before = seen + tl.cumsum(whole, 0) - whole + lower
    taken = tl.minimum(tl.maximum(need - before, 0), own)
    return taken, higher, tl.where(block < mine, own, 0), tl.where(block < mine, higher, 0), whole


@triton.jit
def _add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add_four(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _place(out, values, threshold, first, limit, tied_at, above_at, k, QUADS: tl.constexpr, PTX: tl.constexpr):
    # Eight bits of a four: which columns are above and which tie; counts of both behind them.
    """Store the winners of a tile, whose first column is ``first``. Behind ``tied_at`` ties and ``above_at`` scores
    above the k-th of this rank. Returns how many of both the tile has, one above TIE bits of the other."""
    higher, tied = _compared(values, threshold)
    bit = 8 >> tl.arange(0, 4)[None, :]  # the first column has the highest one
    found = tl.sum(tl.where(higher, bit + (1 << 8), 0) + tl.where(tied, (bit << 4) + (1 << 12), 0), 1)
    # Where the four's first winner goes: behind all above, and behind ties that win.
    both = (found >> 8 & 15) + (found >> 12 << TIE)
    upto = tl.cumsum(both, 0) - both
    ties_before = tied_at + (upto >> TIE)
    place = above_at + (upto & HIGHER) + tl.minimum(ties_before, limit)
    ptx_io.scatter_bits(out, place, first + 4 * tl.arange(0, QUADS), found, limit - ties_before, k, PTX)
    return both


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
    CHUNKS: tl.constexpr,  # whether there are several such
    SPLIT: tl.constexpr,  # whether a row has several CTAs
    ALIGNED: tl.constexpr,
    ONE: tl.constexpr,
    SAME_SMEM: tl.constexpr,  # whether as much shared memory is claimed as by count_digits; see config.py
    PTX: tl.constexpr,  # whether it stores winners: Triton's store would take an instruction of every column
    PDL: tl.constexpr,
):
    if SAME_SMEM:
        histogram.claim(None, 0)
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    # A CTA has a run of the row's blocks, and all of the row's counts.
    start, end = range_of(row, row_starts, row_ends, stride_starts, stride_ends, width)
    share = tl.cdiv(blocks, splits)
    mine, last = tl.minimum(split * share, blocks), tl.minimum((split + 1) * share, blocks)
    scores = _row(logits, row, stride_logits, ALIGNED)
    QUADS: tl.constexpr = COLUMNS // 4
    column = tl.arange(0, QUADS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    begin, stop = start + mine * BLOCK_SIZE, end
    if SPLIT:
        stop = tl.minimum(end, start + last * BLOCK_SIZE)
    # The scores come before the wait: see the module's docstring.
    values = tl.full([QUADS, 4], float("-inf"), tl.float32)
    if begin < stop:  # a branch, or the compiler looks at scores behind the wait
        values = _inside(_load(scores, begin + column, stop, ALIGNED), begin + column, stop)
    pdl.wait_last(PDL)

    # The k-th score, and how many of its ties win over all ranks.
    threshold = tl.load(state + row * stride_state)
    need = tl.maximum(tl.load(state + row * stride_state + stride_state_value), 0)
    taken, higher, tied_before, higher_before, whole = _counted(
        ties, above, need, 0, row, rank, mine, 0, blocks, stride_ties_rank, stride_ties_row, stride_ties_block,
        RANKS, CHUNK,
    )  # fmt: skip
    # Blocks beyond CHUNK: ties seen so far go on from chunk to chunk.
    if CHUNKS:
        seen = 0
        for first in range(CHUNK, blocks, CHUNK):
            seen += tl.sum(whole, 0)
            more_taken, more, more_tied, more_higher, whole = _counted(
                ties, above, need, seen, row, rank, mine, first, blocks, stride_ties_rank, stride_ties_row,
                stride_ties_block, RANKS, CHUNK,
            )  # fmt: skip
            taken, higher = taken + more_taken, higher + more
            tied_before, higher_before = tied_before + more_tied, higher_before + more_higher
    # Sum up both kinds of counts over blocks.
    if CHUNKS or ties.dtype.element_ty != tl.uint8:
        limit, highers, tied_at, above_at = tl.reduce((taken, higher, tied_before, higher_before), 0, _add_four)
        winners = tl.maximum(highers + limit, 0)
    else:  # sums of CHUNK counts of 8 bits have 16
        tl.static_assert(CHUNK * 255 <= HIGHER)
        every, before = tl.reduce((taken + (higher << TIE), tied_before + (higher_before << TIE)), 0, _add_two)
        limit, tied_at, above_at = every & HIGHER, before & HIGHER, before >> TIE & HIGHER
        winners = (every >> TIE & HIGHER) + limit

    # -1 behind the winners, shared by the row's CTAs.
    out += row.to(tl.int64) * k
    for first in range(winners + split * FILL, k, splits * FILL):
        place = first + tl.arange(0, FILL)
        tl.store(out + place, -1, _below(place, k))
    if ONE:
        _place(out, values, threshold, begin - start, limit, tied_at, above_at, k, QUADS, PTX)
    else:
        # The next tile is on its way while this one's winners are stored.
        for first in range(begin, stop, COLUMNS):
            next_column = first + COLUMNS + column
            later = _load(scores, next_column, stop, ALIGNED)
            both = _place(out, values, threshold, first - start, limit, tied_at, above_at, k, QUADS, PTX)
            # Counts before the next tile.
            found = tl.sum(both, 0)
            tied_at += found >> TIE
            above_at += found & HIGHER
            values = _inside(later, next_column, stop)
