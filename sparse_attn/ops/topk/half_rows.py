"""Search a row by the upper halves of its scores: half the registers and a third of the instructions of whole ones. What shares
the k-th's half is told apart by its scores, read again.

A ``source`` says where a row's scores lie: (its first,) where they lie side by side; (its line, groups) where GROUP slots each
stand for as many neighbours, ``groups`` a list of whose in the program's memory.
"""

import triton
import triton.language as tl

from sparse_attn.ops.topk import bits, destination, halves, lists, memory, radix, store, tiles
from sparse_attn.ops.topk import table as tables

OPEN = tl.constexpr(17)  # bits that zero's half leaves open; others leave 16
NOTHING_TWICE = tl.constexpr(-0x7FFFFF00800000)  # two scores of -inf
OF_ZERO, OF_OTHERS = tl.constexpr(1 << 17), tl.constexpr(1 << 16)  # keys that share a half


@triton.jit
def columns_of(source, slots):
    """Columns of a source's line; anything for slots behind its last."""
    if len(source) == 1:
        return slots
    else:
        return tables.load_one(source[1], slots // tiles.GROUP) * tiles.GROUP + slots % tiles.GROUP


@triton.jit
def _two(both):
    """A word of the halves of two scores."""
    one, other = both.to(tl.int32), (both >> 32).to(tl.int32)
    return halves.round_two(one.to(tl.float32, bitcast=True), other.to(tl.float32, bitcast=True))


@triton.jit
def load_groups(source, end, SLOTS: tl.constexpr, CHUNK: tl.constexpr):
    """The scores of a source of groups of SLOTS, those of slots below ``end``, as load does."""
    PAIRS: tl.constexpr = tiles.GROUP // 2
    pairs = source[0].to(tl.pointer_type(tl.int64))
    chunks = ()
    for chunk in tl.static_range(SLOTS // CHUNK):
        place = chunk * (CHUNK // tiles.GROUP) + tl.arange(0, CHUNK // tiles.GROUP)
        pair = tables.load_one(source[1], place)[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
        both = tl.load(pairs + pair, mask=(place * tiles.GROUP < end)[:, None], other=NOTHING_TWICE)
        chunks = chunks + (both,)
    words = ()
    for chunk in tl.static_range(SLOTS // CHUNK):
        words = words + (tl.reshape(_two(chunks[chunk]), [CHUNK // 2]),)
    return words


@triton.jit
def load(line, first, end, there, SLOTS: tl.constexpr, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):
    """The scores in [first, end) of a line of SLOTS, first below 4, as a tuple of chunks: int32 [CHUNK / 2], -inf beside them.
    there: how many may be read, ``end`` or what is known before it. ALIGNED: see tiles.load."""
    loaded = ()  # all of them, before any is looked at
    for chunk in tl.static_range(SLOTS // CHUNK):
        pair = chunk * (CHUNK // 2) + tl.arange(0, CHUNK // 2)
        if ALIGNED:
            words = _two(tl.load(line.to(tl.pointer_type(tl.int64)) + pair, mask=pair < ((there + 3) // 4) * 2))
        else:
            one = tl.load(line + 2 * pair, mask=2 * pair < there)
            other = tl.load(line + 2 * pair + 1, mask=2 * pair + 1 < there)
            words = halves.round_two(one, other)
        loaded = loaded + (words,)
    chunks = ()
    for chunk in tl.static_range(SLOTS // CHUNK):
        words = loaded[chunk]
        column = chunk * CHUNK + 2 * tl.arange(0, CHUNK // 2)
        if (chunk + 1) * CHUNK > end:
            words = tl.where(
                column + 1 < end,
                words,
                tl.where(column < end, (words & 0xFFFF) | (halves.NO_TWO & -65536), halves.NO_TWO),
            )
        if chunk == 0:
            if first > 0:
                words = tl.where(
                    column >= first,
                    words,
                    tl.where(column + 1 >= first, (words & -65536) | halves.NOTHING, halves.NO_TWO),
                )
        chunks = chunks + (words,)
    return chunks


@triton.jit
def digits(chunks, k, FEW: tl.constexpr, THREADS: tl.constexpr):
    """(where digits begin, one that the k-th score probably comes before, or the last one).

    They begin with the highest score's key, or so that what is not to be selected lies behind all but the last. Counting scores
    that share a digit costs nothing. So where rows are FEW, and a program waits for that, all scores behind the least of its
    threads' highest ones do: of the k highest a thread has k / THREADS in the mean, and while that is at most 4 hardly ever does
    every thread have one.
    """
    greatest = tl.full(chunks[0].shape, halves.NO_TWO, tl.int32)
    for chunk in tl.static_range(len(chunks)):
        greatest = halves.greater(chunks[chunk], greatest)
    highest = tl.maximum(halves.lower(greatest), halves.upper(greatest))
    last = tl.full([], tables.BINS - 1, tl.int32)
    if FEW:
        # Of each thread, which has words side by side in pairs; then least and greatest keys in one reduction.
        highest = tl.max(tl.max(tl.reshape(highest, [highest.shape[0] // (2 * THREADS), THREADS, 2]), 2), 0)
        keys = halves.key((highest.to(tl.int32, bitcast=True) >> 16) & 0xFFFF)
        least, minus_most = tl.split(tl.min(tl.join(keys, -keys), 0))
    else:
        least = halves.key((tl.max(highest, 0).to(tl.int32, bitcast=True) >> 16) & 0xFFFF)
    least = tl.minimum(least, halves.NOTHING - (tables.BINS - 1))
    if FEW:
        last = tl.where(k <= 4 * THREADS, tl.minimum(1 - minus_most - least, last), last)
    return least, last


@triton.jit
def _search_all(table, chunks, least, end, k, CHUNK: tl.constexpr, THREADS: tl.constexpr):
    """As search, in two digits, which the same code counts."""
    zero = tl.full([], 0, tl.int32)
    base = zero
    shift = tl.full([], 16 - tables.BITS, tl.int32)
    spare = tl.full([], radix.SPARE, tl.int32)
    below = zero
    having = zero
    going = spare > 0
    while going:
        for chunk in tl.static_range(len(chunks)):
            if chunk * CHUNK < end:
                halves.count_from(table, chunks[chunk], least, zero + halves.NOTHING - least, base, shift)
        digit, more, having = radix.first_digit(table, k - below, spare, THREADS)
        few = digit == tables.BINS - 1
        base = tl.where(few, zero + halves.NOTHING - least, base + (digit << shift))
        below += more
        having = tl.where(few, 0, having)
        going = (few == 0) & (shift > 0)
        shift = zero
        spare = zero
    return base, below, having


@triton.jit
def _search_from(table, chunks, least, last, end, k, CHUNK: tl.constexpr, THREADS: tl.constexpr):
    """(the k-th's digit, how many scores have a lesser one, how many have it)."""
    for chunk in tl.static_range(len(chunks)):
        if chunk * CHUNK < end:
            halves.count(table, chunks[chunk], least, last)
    return radix.first_digit(table, k, radix.SPARE, THREADS)


@triton.jit
def search(table, chunks, least, last, end, k, FEW: tl.constexpr, CHUNK: tl.constexpr, THREADS: tl.constexpr):
    """(the k-th's half, how many scores have a higher one, how many have it); where there are fewer than k (-inf's, all, 0).
    least, last, FEW: see digits."""
    if FEW:
        behind, below, having = least, least, least
        going = k >= 0
        while going:
            behind, below, having = _search_from(table, chunks, least, last, end, k, CHUNK, THREADS)
            going = (behind == last) & (last < tables.BINS - 1)
            last = tl.full([], tables.BINS - 1, tl.int32)
    else:
        behind, below, having = _search_from(table, chunks, least, last, end, k, CHUNK, THREADS)
    if behind == tables.BINS - 1:
        behind, below, having = _search_all(table, chunks, least, end, k, CHUNK, THREADS)
    return halves.key(least + behind), below, having


@triton.jit
def clear_marks(table, HELD: tl.constexpr, SLOTS: tl.constexpr):
    """Mark none of the slots from HELD on, a multiple of 64, which ``mark`` leaves alone."""
    if HELD < SLOTS:
        at = tl.arange(0, SLOTS // 64) * 4
        zero = at * 0
        tables.store(table, tables.LIST + at, zero, zero, zero, zero, (at * 16 >= HELD).to(tl.int32))


@triton.jit
def mark(table, chunks, half, CHUNK: tl.constexpr):
    """Mark what has a higher half, and apart from that what has this one."""
    tl.debug_barrier()
    for chunk in tl.static_range(len(chunks)):
        marks = halves.marks(chunks[chunk], half)
        marks = tl.sum(tl.reshape(marks, [CHUNK // 4, 2]) << (2 * tl.arange(0, 2))[None, :], 1)
        lists.store_marks(table, chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4), marks | (marks >> 16))
    tl.debug_barrier()


@triton.jit
def _keys_again(source, first, end, begin, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):
    """The falling keys of CHUNK slots from ``begin`` on, of those in [first, end)."""
    slot = tl.arange(0, CHUNK)
    if len(source) == 1:
        scores = tiles.load_held(source[0] + begin, end - begin, CHUNK, ALIGNED)
    else:
        scores = tl.load(source[0] + columns_of(source, begin + slot), mask=slot < end - begin)
    return radix.falling_keys(scores, (slot >= first - begin) & (slot < end - begin))


@triton.jit
def _marked_again(
    table, source, first, end, half, need, above, equal, SLOTS: tl.constexpr, ALIGNED: tl.constexpr, THREADS: tl.constexpr
):
    """marked_words where many share the half: they may all be equal; else whole scores are searched and marked."""
    CHUNK: tl.constexpr = min(16 * THREADS, SLOTS)
    base = halves.key(half) << 16
    shift = tl.full([], OPEN - tables.BITS, tl.int32)
    span = tl.where(half == 0, OF_ZERO, OF_OTHERS).to(tl.uint32, bitcast=True)
    least = tl.full([CHUNK], OF_ZERO, tl.int32)
    greatest = tl.full([CHUNK], -1, tl.int32)
    for begin in range(0, end, CHUNK):
        keys = _keys_again(source, first, end, begin, CHUNK, ALIGNED)
        tables.count(table, keys, base, shift)
        behind = keys - base
        there = behind.to(tl.uint32, bitcast=True) < span
        least = tl.where(there, tl.minimum(least, behind), least)
        greatest = tl.where(there, tl.maximum(greatest, behind), greatest)
    if tl.min(least, 0) < tl.max(greatest, 0):
        digit, below, having = radix.first_digit(table, need, 0, THREADS)
        base += digit << shift
        if below + having > need:
            shift = tl.full([], 0, tl.int32)
            for begin in range(0, end, CHUNK):
                tables.count(table, _keys_again(source, first, end, begin, CHUNK, ALIGNED), base, shift)
            base, below, having = radix.next_digit(table, base, shift, below, need, THREADS)
        edge, at_most = radix.edge_of(base, shift, below, having)
        need = tl.where(at_most <= need, 0, need - below)
        for begin in range(0, end, CHUNK):
            store.mark_some(table, _keys_again(source, first, end, begin, CHUNK, ALIGNED), begin, edge, need)
        tl.debug_barrier()
        above, equal = store.words_of_marks(table, SLOTS)
    else:
        radix.start(table, THREADS)
    if need > 0:
        above |= store.first_ones(equal, need)
    return above


@triton.jit
def _mark_first(table, LISTED: tl.constexpr, having, need, PARTS: tl.constexpr, THREADS: tl.constexpr):
    """Mark the slots, their last 15 bits, of the ``need`` first of the ``having`` keys in the list from word LISTED on. PARTS:
    threads to a key, of which each compares it with a part of the list."""
    KEYS: tl.constexpr = THREADS // PARTS
    thread = tl.arange(0, THREADS)
    each = tl.cdiv(having, 4 * PARTS) * 4
    keys = tables.load_one(table, LISTED + thread % KEYS)
    ranks = lists.rank(table, keys, LISTED + thread // KEYS * each, each)
    if PARTS > 1:
        ranks = tl.sum(tl.reshape(ranks, [PARTS, KEYS]), 0)
        keys = tables.load_one(table, LISTED + tl.arange(0, KEYS))
    lists.set_marks(table, keys & 0x7FFF, ((keys != -1) & (ranks < need)).to(tl.int32))


@triton.jit
def _mark_few(table, source, half, need, having, equal, SLOTS: tl.constexpr, THREADS: tl.constexpr):
    """Mark the highest ``need`` of the ``having``, at most THREADS, that share a half as if theirs were higher."""
    LISTED: tl.constexpr = tables.LIST + SLOTS // 16
    tl.static_assert(SLOTS <= 1 << 15 and SLOTS // 32 >= THREADS)
    bits.append(table, equal, tl.arange(0, SLOTS // 32) * 32, LISTED)
    tl.debug_barrier()
    place = tl.arange(0, THREADS)
    there = place < having
    slot = tables.load_one(table, LISTED + place)
    column = tl.where(there, columns_of(source, tl.where(there, slot, 0)), 1 << 30)
    score = memory.look_up(source[0].to(tl.pointer_type(tl.int32)), column, 1 << 29)
    # 17 bits that a half leaves open, and the slot.
    behind = radix.falling_keys(score.to(tl.float32, bitcast=True), there) - (halves.key(half) << 16)
    keys = tl.where(there, (behind << 15) | slot, -1)
    tables.store_one(table, LISTED + place, keys)
    tl.debug_barrier()
    if having <= THREADS // 4:
        _mark_first(table, LISTED, having, need, 4, THREADS)
    elif having <= THREADS // 2:
        _mark_first(table, LISTED, having, need, 2, THREADS)
    else:
        _mark_first(table, LISTED, having, need, 1, THREADS)
    tables.store_one(table, tl.full([], tables.LENGTH, tl.int32), tl.full([], 0, tl.int32))
    tl.debug_barrier()


@triton.jit
def marked_words(
    table, source, first, end, half, need, having, SLOTS: tl.constexpr, ALIGNED: tl.constexpr, THREADS: tl.constexpr
):
    """uint32 [SLOTS / 32]: a bit for all that is marked as higher and for the highest ``need`` of the ``having`` that share a
    half, of equal ones the first. Of the source's scores those in [first, end) count."""
    above, equal = store.words_of_marks(table, SLOTS)
    if having <= need:
        above |= tl.where(having > 0, equal, 0)
    elif having <= THREADS:
        _mark_few(table, source, half, need, having, equal, SLOTS, THREADS)
        above, equal = store.words_of_marks(table, SLOTS)
    else:
        above = _marked_again(table, source, first, end, half, need, above, equal, SLOTS, ALIGNED, THREADS)
    return above


@triton.jit
def select_row(
    out, line, base, start, end, table, target, k,
    SLOTS: tl.constexpr, CHUNK: tl.constexpr, ALIGNED: tl.constexpr, LINES: tl.constexpr, FEW: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """As rows.select_row, CHUNK columns read at once."""
    source, first, length = (line + base,), start - base, end - base
    chunks = load(line + base, first, length, length, SLOTS, CHUNK, ALIGNED)
    least, last = digits(chunks, k, FEW, THREADS)
    half, below, having = search(table, chunks, least, last, length, k, FEW, CHUNK, THREADS)
    count = tl.minimum(below + having, k)
    destination.tell(target, count)
    mark(table, chunks, half, CHUNK)
    words = marked_words(table, source, first, length, half, k - below, having, SLOTS, ALIGNED, THREADS)
    left = destination.values(target, base - start + tl.arange(0, SLOTS // 32) * 32)
    if LINES:
        store.lines_of_words(out, table, words, left, count, target, SLOTS, THREADS)
    else:
        store.of_words(out, words, left, count, target)
