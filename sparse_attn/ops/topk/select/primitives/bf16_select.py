# pyright: reportOperatorIssue=false
"""Select by the bf16 of scores, which takes half the registers and a third of the instructions of fp32. Scores that
share the bf16 of the k-th are read again and compared as fp32.

A ``source`` says where a row's scores lie. (its first,): they lie side by side. (its column 0, groups): GROUP slots
each stand for GROUP neighbours; ``groups`` lists the groups, in shared memory.
"""

import triton
import triton.language as tl

from sparse_attn.device import histogram, ptx_io
from sparse_attn.device.triton_private import ASSEMBLY_HOLDS_LAYOUTS
from sparse_attn.ops.topk.select.primitives import bf16_keys, compact, output, radix_select, set_bits, smem_list, tile

OPEN_BITS = tl.constexpr(17)  # of a score, that zero as bf16 leaves open; others leave 16
TWO_MINUS_INF_SCORES = tl.constexpr(-0x7FFFFF00800000)
OF_ZERO, OF_OTHERS = tl.constexpr(1 << 17), tl.constexpr(1 << 16)  # scores that share a bf16


@triton.jit
def columns_of(source, slots):
    """The columns of a source's slots. Slots behind the last give any value."""
    if len(source) == 1:
        return slots
    else:
        return histogram.load_one(source[1], slots // tile.GROUP) * tile.GROUP + slots % tile.GROUP


@triton.jit
def _two(both):
    """A word of two scores."""
    one, other = both.to(tl.int32), (both >> 32).to(tl.int32)
    return bf16_keys.round_two(one.to(tl.float32, bitcast=True), other.to(tl.float32, bitcast=True))


@triton.jit
def load_groups(source, end, SLOTS: tl.constexpr, CHUNK: tl.constexpr):
    """The scores of a source of groups, in the form that load returns. Of SLOTS slots those below ``end`` count."""
    PAIRS: tl.constexpr = tile.GROUP // 2
    # Two neighbouring scores are one load of 64 bits. All loads are issued before any is waited for.
    pairs = source[0].to(tl.pointer_type(tl.int64))
    chunks = ()
    for chunk in tl.static_range(SLOTS // CHUNK):
        position = chunk * (CHUNK // tile.GROUP) + tl.arange(0, CHUNK // tile.GROUP)
        pair = histogram.load_one(source[1], position)[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
        both = tl.load(pairs + pair, mask=(position * tile.GROUP < end)[:, None], other=TWO_MINUS_INF_SCORES)
        chunks = chunks + (both,)
    words = ()
    for chunk in tl.static_range(SLOTS // CHUNK):
        words = words + (tl.reshape(_two(chunks[chunk]), [CHUNK // 2]),)
    return words


@triton.jit
def load(scores, first, end, readable, SLOTS: tl.constexpr, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):
    """SLOTS scores as a tuple of chunks, int32 [CHUNK / 2]. Scores outside [first, end) are -inf; first is below 4.
    readable: how many may be read, which is ``end`` or what is known before it. ALIGNED: see tile.load."""
    loaded = ()  # all loads are issued before any is waited for
    for chunk in tl.static_range(SLOTS // CHUNK):
        pair = chunk * (CHUNK // 2) + tl.arange(0, CHUNK // 2)
        if ALIGNED:
            words = _two(tl.load(scores.to(tl.pointer_type(tl.int64)) + pair, mask=pair < ((readable + 3) // 4) * 2))
        else:
            one = tl.load(scores + 2 * pair, mask=2 * pair < readable)
            other = tl.load(scores + 2 * pair + 1, mask=2 * pair + 1 < readable)
            words = bf16_keys.round_two(one, other)
        loaded = loaded + (words,)
    chunks = ()
    for chunk in tl.static_range(SLOTS // CHUNK):
        words = loaded[chunk]
        column = chunk * CHUNK + 2 * tl.arange(0, CHUNK // 2)
        # Scores from ``end`` on become -inf, in the chunks that reach it.
        if (chunk + 1) * CHUNK > end:
            words = tl.where(
                column + 1 < end,
                words,
                tl.where(column < end, (words & 0xFFFF) | (bf16_keys.TWO_MINUS_INF & -65536), bf16_keys.TWO_MINUS_INF),
            )
        # Scores before ``first``, which only the first chunk has.
        if chunk == 0:
            if first > 0:
                words = tl.where(
                    column >= first,
                    words,
                    tl.where(column + 1 >= first, (words & -65536) | bf16_keys.MINUS_INF, bf16_keys.TWO_MINUS_INF),
                )
        chunks = chunks + (words,)
    return chunks


@triton.jit
def first_window(chunks, k, LATENCY_BOUND: tl.constexpr, THREADS: tl.constexpr):
    """(least, last): the first digit of a window, and a digit that probably lies behind the k-th score's, or the last
    digit.

    Digits count from ``least``. That is the key of the highest score, or a key such that only the last digit holds what
    is not to be selected. It costs nothing that many scores share a bin. So where a row is LATENCY_BOUND, all scores
    below the lowest of the threads' maxima count in one bin, ``last``. That bin nearly always lies below the k-th
    score. A thread holds k / THREADS of the k highest on average; while that is at most 4, it hardly ever happens that
    every thread holds one.
    """
    # The highest score of each word's place, over all chunks.
    greatest = tl.full(chunks[0].shape, bf16_keys.TWO_MINUS_INF, tl.int32)
    for chunk in tl.static_range(len(chunks)):
        greatest = bf16_keys.maximum(chunks[chunk], greatest)
    highest = tl.maximum(bf16_keys.lower(greatest), bf16_keys.upper(greatest))
    last = tl.full([], histogram.BINS - 1, tl.int32)
    if LATENCY_BOUND:
        # Each thread's maximum, of pairs of words side by side; then the least and greatest key in one reduction.
        highest = tl.max(tl.max(tl.reshape(highest, [highest.shape[0] // (2 * THREADS), THREADS, 2]), 2), 0)
        keys = bf16_keys.key_of((highest.to(tl.int32, bitcast=True) >> 16) & 0xFFFF)
        least, minus_most = tl.split(tl.min(tl.join(keys, -keys), 0))
    else:
        least = bf16_keys.key_of((tl.max(highest, 0).to(tl.int32, bitcast=True) >> 16) & 0xFFFF)
    # Near the last key the window begins earlier, such that its last digit is that of -inf.
    least = tl.minimum(least, bf16_keys.MINUS_INF - (histogram.BINS - 1))
    if LATENCY_BOUND:
        last = tl.where(k <= 4 * THREADS, tl.minimum(1 - minus_most - least, last), last)
    return least, last


@triton.jit
def _search_all(smem, chunks, least, end, k, CHUNK: tl.constexpr, THREADS: tl.constexpr):
    """search over all 16 bits in two digits. The same code counts both."""
    zero = tl.full([], 0, tl.int32)
    base = zero
    shift = tl.full([], 16 - histogram.DIGIT_BITS, tl.int32)
    spare = tl.full([], radix_select.SPARE, tl.int32)
    below = zero
    in_bin = zero
    going = spare > 0
    while going:
        # The first turn counts the upper bits of all keys, the second the rest of those in the k-th's bin.
        for chunk in tl.static_range(len(chunks)):
            if chunk * CHUNK < end:
                bf16_keys.count_from(smem, chunks[chunk], least, zero + bf16_keys.MINUS_INF - least, base, shift)
        digit, more, in_bin = radix_select.find_bin(smem, k - below, spare, THREADS)
        # Fewer than k: the result is the key of -inf.
        few = digit == histogram.BINS - 1
        base = tl.where(few, zero + bf16_keys.MINUS_INF - least, base + (digit << shift))
        below += more
        in_bin = tl.where(few, 0, in_bin)
        going = (few == 0) & (shift > 0)
        shift = zero
        spare = zero
    return base, below, in_bin


@triton.jit
def _search_from(smem, chunks, least, last, end, k, CHUNK: tl.constexpr, THREADS: tl.constexpr):
    """(the k-th's digit, how many scores have a lesser digit, how many have it)."""
    for chunk in tl.static_range(len(chunks)):
        if chunk * CHUNK < end:
            bf16_keys.count(smem, chunks[chunk], least, last)
    return radix_select.find_bin(smem, k, radix_select.SPARE, THREADS)


@triton.jit
def search(smem, chunks, least, last, end, k, LATENCY_BOUND: tl.constexpr, CHUNK: tl.constexpr, THREADS: tl.constexpr):
    """(the k-th score as bf16, how many scores are higher, how many equal it), or (-inf, all, 0) where there are fewer
    than k. least, last, LATENCY_BOUND: see first_window."""
    if LATENCY_BOUND:
        # The k-th in bin ``last``, where scores were counted together: once more with bins apart.
        digit, below, in_bin = least, least, least
        going = k >= 0
        while going:
            digit, below, in_bin = _search_from(smem, chunks, least, last, end, k, CHUNK, THREADS)
            going = (digit == last) & (last < histogram.BINS - 1)
            last = tl.full([], histogram.BINS - 1, tl.int32)
    else:
        digit, below, in_bin = _search_from(smem, chunks, least, last, end, k, CHUNK, THREADS)
    # The k-th lies behind the window, so it may have any key.
    if digit == histogram.BINS - 1:
        digit, below, in_bin = _search_all(smem, chunks, least, end, k, CHUNK, THREADS)
    return bf16_keys.key_of(least + digit), below, in_bin


@triton.jit
def clear_marks(smem, FIRST: tl.constexpr, SLOTS: tl.constexpr):
    """Clear the marks of the slots from FIRST on, a multiple of 64. ``mark`` does not touch them."""
    if FIRST < SLOTS:
        at = tl.arange(0, SLOTS // 64) * 4
        zero = at * 0
        histogram.store_four(smem, histogram.WORDS + at, zero, zero, zero, zero, (at * 16 >= FIRST).to(tl.int32))


@triton.jit
def mark(smem, chunks, bf16, CHUNK: tl.constexpr):
    """Mark scores higher than ``bf16`` as above, and scores that equal it as equal."""
    tl.debug_barrier()
    for chunk in tl.static_range(len(chunks)):
        marks = bf16_keys.marks(chunks[chunk], bf16)
        # Marks of two words make a byte, that of four columns.
        marks = tl.sum(tl.reshape(marks, [CHUNK // 4, 2]) << (2 * tl.arange(0, 2))[None, :], 1)
        smem_list.store_marks(smem, chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4), marks | (marks >> 16))
    tl.debug_barrier()


@triton.jit
def _keys_of_scores(source, first, end, begin, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):
    """The descending keys of CHUNK slots from ``begin`` on, from fp32 scores that are read again. Slots outside [first,
    end) do not count."""
    slot = tl.arange(0, CHUNK)
    if len(source) == 1:
        scores = tile.load_resident(source[0] + begin, end - begin, CHUNK, ALIGNED)
    else:
        if ASSEMBLY_HOLDS_LAYOUTS:  # else the addresses of all slots would move between threads
            group = histogram.load_one(source[1], begin // tile.GROUP + tl.arange(0, CHUNK // tile.GROUP))
            place = tl.arange(0, CHUNK // tile.GROUP)[:, None] * tile.GROUP + tl.arange(0, tile.GROUP)[None, :]
            columns = group[:, None] * tile.GROUP + tl.arange(0, tile.GROUP)[None, :]
            scores = tl.reshape(tl.load(source[0] + columns, mask=place < end - begin), [CHUNK])
        else:
            scores = tl.load(source[0] + columns_of(source, begin + slot), mask=slot < end - begin)
    return radix_select.descending_keys(scores, (slot >= first - begin) & (slot < end - begin))


@triton.jit
def _marked_by_scores(
    smem, source, first, end, bf16, need, above, equal,
    SLOTS: tl.constexpr, ALIGNED: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """marked_bitmask where more than THREADS scores share the bf16. Unless all of them are equal, their fp32 scores are
    searched and marked."""
    CHUNK: tl.constexpr = min(16 * THREADS, SLOTS)
    # Scores of one bf16 have fp32 keys side by side, from ``base`` on.
    base = bf16_keys.key_of(bf16) << 16
    shift = tl.full([], OPEN_BITS - histogram.DIGIT_BITS, tl.int32)
    span = tl.where(bf16 == 0, OF_ZERO, OF_OTHERS).to(tl.uint32, bitcast=True)
    least = tl.full([CHUNK], OF_ZERO, tl.int32)
    greatest = tl.full([CHUNK], -1, tl.int32)
    # Count their next digit, and see whether any differ.
    for begin in range(0, end, CHUNK):
        keys = _keys_of_scores(source, first, end, begin, CHUNK, ALIGNED)
        histogram.count(smem, keys, base, shift)
        distance = keys - base
        valid = distance.to(tl.uint32, bitcast=True) < span
        least = tl.where(valid, tl.minimum(least, distance), least)
        greatest = tl.where(valid, tl.maximum(greatest, distance), greatest)
    # They differ: find the cutoff among fp32 keys, and mark by it anew.
    if tl.min(least, 0) < tl.max(greatest, 0):
        digit, below, in_bin = radix_select.find_bin(smem, need, 0, THREADS)
        base += digit << shift
        if below + in_bin > need:
            shift = tl.full([], 0, tl.int32)
            for begin in range(0, end, CHUNK):
                histogram.count(smem, _keys_of_scores(source, first, end, begin, CHUNK, ALIGNED), base, shift)
            base, below, in_bin = radix_select.next_digit(smem, base, shift, below, need, THREADS)
        cutoff, at_most = radix_select.cutoff_of(base, shift, below, in_bin)
        need = tl.where(at_most <= need, 0, need - below)
        for begin in range(0, end, CHUNK):
            compact.mark_from(smem, _keys_of_scores(source, first, end, begin, CHUNK, ALIGNED), begin, cutoff, need)
        tl.debug_barrier()
        above, equal = compact.bitmasks_of_marks(smem, SLOTS)
    # All are equal: bf16 has marked them, and the first ones win.
    else:
        histogram.clear(smem, THREADS)
    if need > 0:
        above |= compact.first_set_bits(equal, need)
    return above


@triton.jit
def _mark_first(smem, LISTED: tl.constexpr, in_bin, need, PARTS: tl.constexpr, THREADS: tl.constexpr):
    """Of the ``in_bin`` keys in the list from word LISTED on, mark the slots of the ``need`` least. A key's last 15
    bits are its slot. PARTS: threads for a key, each of which compares it with a part of the list."""
    # Each part of the list gives a part of a key's rank.
    KEYS: tl.constexpr = THREADS // PARTS
    thread = tl.arange(0, THREADS)
    each = tl.cdiv(in_bin, 4 * PARTS) * 4
    keys = histogram.load_one(smem, LISTED + thread % KEYS)
    ranks = smem_list.count_below(smem, keys, LISTED + thread // KEYS * each, each)
    if PARTS > 1:
        ranks = tl.sum(tl.reshape(ranks, [PARTS, KEYS]), 0)
        keys = histogram.load_one(smem, LISTED + tl.arange(0, KEYS))
    smem_list.set_marks(smem, keys & 0x7FFF, ((keys != -1) & (ranks < need)).to(tl.int32))


@triton.jit
def _mark_listed(smem, source, bf16, need, in_bin, equal, SLOTS: tl.constexpr, THREADS: tl.constexpr):
    """Mark as above the ``need`` highest of the ``in_bin`` scores that share a bf16, at most THREADS of them. Their
    scores are read again and listed as keys of the bits that bf16 leaves open. Ties go in order of slots."""
    LISTED: tl.constexpr = histogram.WORDS + SLOTS // 16
    tl.static_assert(SLOTS <= 1 << 15 and SLOTS // 32 >= THREADS)
    # Slots that share the bf16, in any order.
    set_bits.append(smem, equal, tl.arange(0, SLOTS // 32) * 32, LISTED)
    tl.debug_barrier()
    position = tl.arange(0, THREADS)
    valid = position < in_bin
    slot = histogram.load_one(smem, LISTED + position)
    column = tl.where(valid, columns_of(source, tl.where(valid, slot, 0)), 1 << 30)
    score = ptx_io.look_up(source[0].to(tl.pointer_type(tl.int32)), column, 1 << 29)
    # The 17 bits that a bf16 leaves open, and the slot.
    distance = radix_select.descending_keys(score.to(tl.float32, bitcast=True), valid) - (bf16_keys.key_of(bf16) << 16)
    keys = tl.where(valid, (distance << 15) | slot, -1)
    histogram.store_one(smem, LISTED + position, keys)
    tl.debug_barrier()
    # A rank takes so many comparisons a thread: with fewer keys more threads share one.
    if in_bin <= THREADS // 4:
        _mark_first(smem, LISTED, in_bin, need, 4, THREADS)
    elif in_bin <= THREADS // 2:
        _mark_first(smem, LISTED, in_bin, need, 2, THREADS)
    else:
        _mark_first(smem, LISTED, in_bin, need, 1, THREADS)
    # The list is empty again.
    histogram.store_one(smem, tl.full([], histogram.LENGTH, tl.int32), tl.full([], 0, tl.int32))
    tl.debug_barrier()


@triton.jit
def marked_bitmask(
    smem, source, first, end, bf16, need, in_bin, SLOTS: tl.constexpr, ALIGNED: tl.constexpr, THREADS: tl.constexpr
):
    """uint32 [SLOTS / 32]: a bit for each slot marked as above, and for the ``need`` highest of the ``in_bin`` slots
    that share a bf16, the first ones among equals. Of the source's scores those in [first, end) count."""
    above, equal = compact.bitmasks_of_marks(smem, SLOTS)
    # All, or few enough to rank, or more than that.
    if in_bin <= need:
        above |= tl.where(in_bin > 0, equal, 0)
    elif in_bin <= THREADS:
        _mark_listed(smem, source, bf16, need, in_bin, equal, SLOTS, THREADS)
        above, equal = compact.bitmasks_of_marks(smem, SLOTS)
    else:
        above = _marked_by_scores(smem, source, first, end, bf16, need, above, equal, SLOTS, ALIGNED, THREADS)
    return above


@triton.jit
def select(
    smem, source, chunks, first, end, least, last, k, output_map,
    SLOTS: tl.constexpr, LATENCY_BOUND: tl.constexpr, CHUNK: tl.constexpr, ALIGNED: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """(uint32 [SLOTS / 32]: a bit for each slot selected; how many are, which is announced). Of the source's scores,
    which ``chunks`` hold as bf16, those in [first, end) count. least, last, LATENCY_BOUND: see first_window."""
    bf16, below, in_bin = search(smem, chunks, least, last, end, k, LATENCY_BOUND, CHUNK, THREADS)
    count = tl.minimum(below + in_bin, k)
    output.announce(output_map, count)
    mark(smem, chunks, bf16, CHUNK)
    bitmask = marked_bitmask(smem, source, first, end, bf16, k - below, in_bin, SLOTS, ALIGNED, THREADS)
    return bitmask, count
