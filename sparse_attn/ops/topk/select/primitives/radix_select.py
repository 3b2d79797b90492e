"""Radix select: count all keys by their leading digit in a histogram, find the digit of the k-th key, count the keys
that share it by their next digit, and so on.

Keys ascend as scores fall. They are unsigned integers held in int32. The cutoff is the least key with at least k keys
at or below it. Bins are summed from the first.
"""

import triton
import triton.language as tl

from sparse_attn.device import histogram
from sparse_attn.device.cast import INTERPRETED
from sparse_attn.ops.topk.select.primitives import smem_list

LAST_KEY = tl.constexpr(-8388609)  # 0xff7fffff, the key of the lowest finite score
UNSELECTABLE = tl.constexpr(2047)  # the leading digit of what is not to be selected; LAST_KEY's is 2043
SPARE = tl.constexpr(1 << 30)  # keys that are taken to lie behind all that were counted
LEADING_SHIFT = tl.constexpr(21)  # bits behind the leading digit
FEW_KEYS = tl.constexpr(128)  # keys that are sooner compared with each other than counted by another digit
# Seven instructions, of which the compiler makes nine.
KEY_PTX = tl.constexpr(
    """{ .reg .f32 x; .reg .b32 key, sign; .reg .pred p;
    add.f32 x, $1, $2;  setp.lt.s32 p, $3, $4;  setp.gt.and.f32 p, x, 0fFF800000, p;
    mov.b32 key, x;  shr.s32 sign, key, 31;  lop3.b32 key, key, sign, 0x7fffffff, 0xd2;  selp.b32 $0, key, -1, p; }"""
)


@triton.jit
def descending_keys(scores, inside):
    """fp32 -> int32. As unsigned integers the keys ascend as scores fall. -0.0 equals 0.0. NaN, -inf and what is not
    ``inside`` come last, beyond LAST_KEY."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return tl.where(inside & (scores > float("-inf")), bits ^ (~(bits >> 31) & 0x7FFFFFFF), -1)


@triton.jit
def loaded_keys(smem, scores, slots, start, end):
    """descending_keys of scores that were just loaded, of which those whose ``slots`` lie in [start, end) count; start
    is below 4. All loads are issued before any is waited for."""
    tl.debug_barrier()
    # A zero that the compiler does not know: it would wait for some scores before it asks for the last.
    zero = histogram.load_one(smem, tl.full([], histogram.ZERO, tl.int32)).to(tl.float32, bitcast=True)
    slots = tl.where(slots >= (start & 3), slots, 1 << 30)
    if INTERPRETED:
        return descending_keys(scores, slots < end)
    else:
        operands = [scores, zero, slots, end]
        return tl.inline_asm_elementwise(KEY_PTX, "=r,r,r,r,r", operands, dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def score_of(key):
    """The score of a descending key."""
    return (key ^ (~(key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def find_bin(smem, wanted, spare, THREADS: tl.constexpr):
    """(the first bin with at least ``wanted`` keys in it and before it, keys before it, keys in it).

    ``spare`` keys count as if they lay in the last bin; with them there must be as many as wanted. The histogram is
    zero afterwards. THREADS: of the CTA; each looks through some bins.
    """
    tl.debug_barrier()
    # Keys in each thread's bins, and in those before them.
    thread = tl.arange(0, THREADS)
    quads: tl.constexpr = histogram.BINS // (4 * THREADS)
    first = thread * (4 * quads)
    mass = tl.where(thread == THREADS - 1, spare, 0)
    for quad in tl.static_range(quads):
        a, b, c, d = histogram.load_four(smem, first + 4 * quad)
        mass += (a + b) + (c + d)
    total = tl.cumsum(mass, 0)
    below = total - mass
    here = (below < wanted) & (total >= wanted)
    # Of the thread's bins, the four that hold it; of these, the two; of these, the one.
    word = first
    total = below
    for quad in tl.static_range(quads - 1):
        a, b, c, d = histogram.load_four(smem, first + 4 * quad)
        total += (a + b) + (c + d)
        further = total < wanted
        word = tl.where(further, first + 4 * (quad + 1), word)
        below = tl.where(further, total, below)
    a, b, c, d = histogram.load_four(smem, word)
    d = tl.where(word == histogram.BINS - 4, d + spare, d)
    further = below + a + b < wanted
    below = tl.where(further, below + a + b, below)
    a, b = tl.where(further, c, a), tl.where(further, d, b)
    word += tl.where(further, 2, 0)
    further = below + a < wanted
    below = tl.where(further, below + a, below)
    word += tl.where(further, 1, 0)
    zero = tl.zeros([THREADS], tl.int32)
    # Zero for the next count; then the thread that has the bin tells all others.
    for quad in tl.static_range(quads):
        histogram.store_four(smem, first + 4 * quad, zero, zero, zero, zero, zero + 1)
    histogram.store_four(smem, histogram.NOTE + zero, word, below, tl.where(further, b, a), zero, here.to(tl.int32))
    tl.debug_barrier()
    digit, below, in_bin, _ = histogram.load_four(smem, tl.full([], histogram.NOTE, tl.int32))
    return digit, below, in_bin


@triton.jit
def _leading(smem, k, THREADS: tl.constexpr):
    """From the histogram of leading digits: (the least key with the k-th's digit, keys below it, keys with that digit),
    or (-1, all keys, 0) where there are fewer than k."""
    digit, below, in_bin = find_bin(smem, k, SPARE, THREADS)
    few = digit == UNSELECTABLE
    return tl.where(few, -1, digit << LEADING_SHIFT), below, tl.where(few, 0, in_bin)


@triton.jit
def next_digit(smem, base, shift, below, k, THREADS: tl.constexpr):
    """_leading for the histogram of the digits at ``shift`` of the keys from ``base`` on."""
    digit, more, in_bin = find_bin(smem, k - below, 0, THREADS)
    return base + (digit << shift), below + more, in_bin


@triton.jit
def cutoff_of(base, shift, below, in_bin):
    """(the last key that starts as base does, keys at or below it), or LAST_KEY where there are too few keys."""
    return tl.where(base == -1, LAST_KEY, base + ((1 << shift) - 1)), below + in_bin


@triton.jit
def _before(key, other):
    """Whether a key is less than another, unsigned."""
    return key.to(tl.uint32, bitcast=True) < other.to(tl.uint32, bitcast=True)


@triton.jit
def _narrow(smem, keys, k, enough, few, WINDOW_SHIFT: tl.constexpr, THREADS: tl.constexpr):
    """(base, shift, below, in_bin): all bits of the k-th key but the last ``shift``, how many keys lie below those
    bits, and how many share them. It ends where there are at most ``enough`` in all, or at most ``few`` that share
    them. Where there are fewer than k: base -1, all keys, none.

    WINDOW_SHIFT: bits behind the first digits that are counted. They start at the least key, then once more at the last
    of those digits. Where the k-th lies in neither window, the leading digit comes first. One loop counts all of these,
    because its code is as long as a thread has keys.
    """
    reach = tl.full([], -8388608 - (2048 << WINDOW_SHIFT), tl.int32)  # a window from there ends with LAST_KEY
    least = tl.min(keys.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)
    base = tl.where(_before(least, reach), least, reach)
    shift = tl.full([], WINDOW_SHIFT, tl.int32)
    windows = tl.full([], 2, tl.int32)
    below = tl.full([], 0, tl.int32)
    in_bin = tl.full([], 0, tl.int32)
    spare = tl.full([], SPARE, tl.int32)  # until the first digit is found
    going = spare > 0
    while going:
        histogram.count(smem, keys, base, shift)
        digit, more, in_bin = find_bin(smem, k - below, spare, THREADS)
        # ``spare`` lies in the last bin: found there, the k-th lies behind the window.
        missed = in_bin >= SPARE
        windows -= 1
        at = base + (digit << shift)
        # A second window where there may be one, else the leading digit of all keys.
        leading = missed & (shift != LEADING_SHIFT) & ((windows <= 0) | (_before(at, reach) == 0))
        all_below = missed & (shift == LEADING_SHIFT)
        below = tl.where(leading, 0, below + more)
        base = tl.where(leading, 0, tl.where(all_below, -1, at))
        in_bin = tl.where(all_below, 0, in_bin)
        spare = tl.where(missed, spare, 0)
        # Found: a finer digit while the bin has more keys than it may.
        finer = (missed == 0) & (below + in_bin > enough) & (in_bin > few) & (shift > 0)
        going = finer | (missed & (all_below == 0))
        shift = tl.where(leading, LEADING_SHIFT, tl.where(finer, tl.maximum(shift - histogram.DIGIT_BITS, 0), shift))
    return base, shift, below, in_bin


@triton.jit
def search(smem, keys, k, enough, THREADS: tl.constexpr):
    """A key with k to ``enough`` keys at or below it, or the k-th least key, or LAST_KEY where there are fewer than k.

    Returns (key, keys at or below it, keys below it, which is set only where more than ``enough`` are at or below it).
    """
    shift = tl.full([], LEADING_SHIFT, tl.int32)
    # The leading digit of all keys, then finer ones of those that share the k-th's bin.
    histogram.count_leading(smem, keys)
    base, below, in_bin = _leading(smem, k, THREADS)
    while (below + in_bin > enough) & (shift > 0):
        shift = tl.maximum(shift - histogram.DIGIT_BITS, 0)
        histogram.count(smem, keys, base, shift)
        base, below, in_bin = next_digit(smem, base, shift, below, k, THREADS)
    cutoff, at_most = cutoff_of(base, shift, below, in_bin)
    return cutoff, at_most, below


@triton.jit
def search_windowed(smem, keys, k, enough, WINDOW_SHIFT: tl.constexpr, THREADS: tl.constexpr):
    """search, by windows first: see _narrow."""
    base, shift, below, in_bin = _narrow(smem, keys, k, enough, 0, WINDOW_SHIFT, THREADS)
    cutoff, at_most = cutoff_of(base, shift, below, in_bin)
    return cutoff, at_most, below


@triton.jit
def _pick(smem, listed, wanted, THREADS: tl.constexpr):
    """Of the ``listed`` keys in the list, at most one a thread: (the wanted-th least, keys below it, keys equal to it).
    A thread compares its key with all others."""
    # A thread has a key, and counts those below it and equal to it.
    position = tl.arange(0, THREADS)
    key = histogram.load_one(smem, histogram.WORDS + tl.minimum(position, listed - 1))
    mine = key.to(tl.uint32, bitcast=True)
    marks = tl.zeros([THREADS], tl.int32)
    for first in range(0, listed, 8):
        for four in tl.static_range(2):
            at = first + 4 * four
            a, b, c, d = histogram.load_four(smem, histogram.WORDS + at)
            marks += _compared(a, mine, at < listed) + _compared(b, mine, at + 1 < listed)
            marks += _compared(c, mine, at + 2 < listed) + _compared(d, mine, at + 3 < listed)
    below, equal = marks & 0xFFFF, marks >> 16
    # Only the wanted key, or several equal ones, have the rank in between; any of them tells.
    here = (position < listed) & (below < wanted) & (below + equal >= wanted)
    histogram.store_four(smem, histogram.NOTE + position * 0, key, below, equal, position * 0, here.to(tl.int32))
    tl.debug_barrier()
    key, below, equal, _ = histogram.load_four(smem, tl.full([], histogram.NOTE, tl.int32))
    return key, below, equal


@triton.jit
def _compared(theirs, mine, valid):
    """1 where theirs is below mine, 1 << 16 where they are equal."""
    theirs = theirs.to(tl.uint32, bitcast=True)
    return tl.where(valid & (theirs <= mine), tl.where(theirs == mine, 1 << 16, 1), 0)


@triton.jit
def search_resident(smem, keys, k, LIST: tl.constexpr, WINDOW_SHIFT: tl.constexpr, THREADS: tl.constexpr):
    """search for exactly k, among keys in registers. Counting those again costs more than listing them. LIST: words of
    the smem list.

    1. Count 2048 digits from the row's highest score on. Scores of a row share a few octaves, so few keys share the
       k-th's digit.
    2. Append those keys to the list.
    3. Compare them with each other where they are few. Else count their further digits from the list.
    """
    tl.static_assert(keys.shape[0] >= 4 * THREADS)
    # The list is empty. All threads see it behind a barrier of the search.
    histogram.store_one(smem, tl.full([], histogram.LENGTH, tl.int32), tl.full([], 0, tl.int32))
    base, shift, below, in_bin = _narrow(smem, keys, k, k, LIST, WINDOW_SHIFT, THREADS)
    if (below + in_bin > k) & (shift > 0):
        smem_list.append_in_range(smem, keys, base, tl.full([], 1, tl.int32) << shift)
        tl.debug_barrier()
        listed = in_bin
        if (listed <= FEW_KEYS) & (listed <= THREADS):
            base, more, in_bin = _pick(smem, listed, k - below, THREADS)
            below += more
            shift = tl.full([], 0, tl.int32)
        # Still too many: further digits, out of the list.
        while (below + in_bin > k) & (shift > 0):
            shift = tl.maximum(shift - histogram.DIGIT_BITS, 0)
            for first in range(0, listed, 2 * THREADS):
                position = first + tl.arange(0, 2 * THREADS)
                some = histogram.load_one(smem, histogram.WORDS + tl.minimum(position, listed - 1))
                some = tl.where(position < listed, some, -1)
                histogram.count(smem, some, base, shift)
            base, below, in_bin = next_digit(smem, base, shift, below, k, THREADS)
    cutoff, at_most = cutoff_of(base, shift, below, in_bin)
    return cutoff, at_most, below


@triton.jit
def _row_keys(source, length, first, CHUNK: tl.constexpr):
    """The keys of CHUNK columns from ``first`` on."""
    inside = tl.arange(0, CHUNK) < length - first
    return descending_keys(tl.load(source + first + tl.arange(0, CHUNK), mask=inside), inside)


@triton.jit
def search_streamed(smem, source, length, k, CHUNK: tl.constexpr, THREADS: tl.constexpr):
    """search for exactly k, over a whole row in memory. The row is read again for every digit."""
    shift = tl.full([], LEADING_SHIFT, tl.int32)
    for first in range(0, length, CHUNK):
        histogram.count_leading(smem, _row_keys(source, length, first, CHUNK))
    base, below, in_bin = _leading(smem, k, THREADS)
    while (below + in_bin > k) & (shift > 0):
        shift = tl.maximum(shift - histogram.DIGIT_BITS, 0)
        for first in range(0, length, CHUNK):
            histogram.count(smem, _row_keys(source, length, first, CHUNK), base, shift)
        base, below, in_bin = next_digit(smem, base, shift, below, k, THREADS)
    cutoff, at_most = cutoff_of(base, shift, below, in_bin)
    return cutoff, at_most, below
