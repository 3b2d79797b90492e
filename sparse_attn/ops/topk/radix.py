"""Search by digits: count the scores of every leading digit, find the digit of the k-th, count what shares it, and so on.

Keys here ascend as scores fall, as unsigned integers (held in int32): what is searched is the least key with at least k
keys at or below it, and counters are added up from the first.
"""

import triton
import triton.language as tl

from sparse_attn.device.cast import INTERPRETED
from sparse_attn.ops.topk import lists
from sparse_attn.ops.topk import table as tables

LAST = tl.constexpr(-8388609)  # 0xff7fffff, the key of the lowest finite score
ALL = tl.constexpr(2047)  # the leading digit of what is not to be selected; LAST's is 2043
SPARE = tl.constexpr(1 << 30)  # keys that are taken to lie behind all that were counted
LEADING = tl.constexpr(21)  # bits behind the leading digit
FEW = tl.constexpr(128)  # keys that are sooner compared with each other than counted by another digit
# Left to itself, the compiler makes nine instructions of it.
KEY = tl.constexpr(
    """{ .reg .f32 x; .reg .b32 key, sign; .reg .pred p;
    add.f32 x, $1, $2;  setp.lt.s32 p, $3, $4;  setp.gt.and.f32 p, x, 0fFF800000, p;
    mov.b32 key, x;  shr.s32 sign, key, 31;  lop3.b32 key, key, sign, 0x7fffffff, 0xd2;  selp.b32 $0, key, -1, p; }"""
)


@triton.jit
def falling_keys(scores, inside):
    """fp32 -> int32: unsigned, they ascend as scores fall; -0.0 equals 0.0; NaN, -inf and what is not ``inside`` come last,
    beyond LAST."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return tl.where(inside & (scores > float("-inf")), bits ^ (~(bits >> 31) & 0x7FFFFFFF), -1)


@triton.jit
def held_keys(scores, zero, slots, start, end):
    """falling_keys of a row's scores, those in [start, end), start below 4; zero: 0.0."""
    slots = tl.where(slots >= (start & 3), slots, 1 << 30)
    if INTERPRETED:
        return falling_keys(scores, slots < end)
    else:
        return tl.inline_asm_elementwise(KEY, "=r,r,r,r,r", [scores, zero, slots, end], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def falling_score(key):
    return (key ^ (~(key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def start(table, THREADS: tl.constexpr):
    """Zero the table. THREADS: of the program; each has four counters at least."""
    tl.static_assert(4 * THREADS <= tables.BINS)
    thread = tl.arange(0, THREADS)
    zero = tl.zeros([THREADS], tl.int32)
    for quad in tl.static_range(tables.BINS // (4 * THREADS)):
        tables.store(table, (quad * THREADS + thread) * 4, zero, zero, zero, zero, zero + 1)
    tables.store(table, tables.BINS + 4 * thread, zero, zero, zero, zero, (thread == 0).to(tl.int32))
    tl.debug_barrier()


@triton.jit
def first_digit(table, wanted, spare, THREADS: tl.constexpr):
    """The first digit with at least ``wanted`` keys at or below it, how many lie below it, how many have it.

    ``spare`` keys are taken to have the last digit beside those counted: with them there must be as many as wanted.
    Leaves the table zero. THREADS: of the program, each of which looks through some digits.
    """
    tl.debug_barrier()
    thread = tl.arange(0, THREADS)
    quads: tl.constexpr = tables.BINS // (4 * THREADS)
    first = thread * (4 * quads)
    mass = tl.where(thread == THREADS - 1, spare, 0)
    for quad in tl.static_range(quads):
        a, b, c, d = tables.load(table, first + 4 * quad)
        mass += (a + b) + (c + d)
    total = tl.cumsum(mass, 0)
    below = total - mass
    here = (below < wanted) & (total >= wanted)
    # Of the thread's digits, the four that hold it; of these, the two; of these, the one.
    word = first
    total = below
    for quad in tl.static_range(quads - 1):
        a, b, c, d = tables.load(table, first + 4 * quad)
        total += (a + b) + (c + d)
        further = total < wanted
        word = tl.where(further, first + 4 * (quad + 1), word)
        below = tl.where(further, total, below)
    a, b, c, d = tables.load(table, word)
    d = tl.where(word == tables.BINS - 4, d + spare, d)
    further = below + a + b < wanted
    below = tl.where(further, below + a + b, below)
    a, b = tl.where(further, c, a), tl.where(further, d, b)
    word += tl.where(further, 2, 0)
    further = below + a < wanted
    below = tl.where(further, below + a, below)
    word += tl.where(further, 1, 0)
    zero = tl.zeros([THREADS], tl.int32)
    for quad in tl.static_range(quads):
        tables.store(table, first + 4 * quad, zero, zero, zero, zero, zero + 1)
    tables.store(table, tables.NOTE + zero, word, below, tl.where(further, b, a), zero, here.to(tl.int32))
    tl.debug_barrier()
    digit, below, having, _ = tables.load(table, tl.full([], tables.NOTE, tl.int32))
    return digit, below, having


@triton.jit
def _leading(table, k, THREADS: tl.constexpr):
    """From the counters of leading digits: (least key with that digit, keys below it, keys with it), where there are fewer
    than k (-1, all keys, 0)."""
    digit, below, having = first_digit(table, k, SPARE, THREADS)
    few = digit == ALL
    return tl.where(few, -1, digit << LEADING), below, tl.where(few, 0, having)


@triton.jit
def next_digit(table, base, shift, below, k, THREADS: tl.constexpr):
    """The same from the counters of the digits at ``shift`` of keys from ``base`` on."""
    digit, more, having = first_digit(table, k - below, 0, THREADS)
    return base + (digit << shift), below + more, having


@triton.jit
def edge_of(base, shift, below, having):
    """(the last key that starts as base does, keys at or below it); LAST where there are too few."""
    return tl.where(base == -1, LAST, base + ((1 << shift) - 1)), below + having


@triton.jit
def _before(key, other):
    return key.to(tl.uint32, bitcast=True) < other.to(tl.uint32, bitcast=True)


@triton.jit
def _narrow(table, keys, k, enough, few, WINDOW: tl.constexpr, THREADS: tl.constexpr):
    """(base, shift, below, having): of the k-th key all bits but the last ``shift``, how many keys lie below those, and how many
    share them; until there are no more than ``enough`` in all, or ``few`` that share them. Where there are fewer than k: base
    -1, all of them, none.

    WINDOW: bits behind the digits to begin with, which start with the least key, then once more with the last of those; where
    the k-th is in neither, the leading digit comes first. All are counted by the same code, which is as long as a thread has
    keys.
    """
    reach = tl.full([], -8388608 - (2048 << WINDOW), tl.int32)  # a window from there ends with LAST
    least = tl.min(keys.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)
    base = tl.where(_before(least, reach), least, reach)
    shift = tl.full([], WINDOW, tl.int32)
    windows = tl.full([], 2, tl.int32)
    below = tl.full([], 0, tl.int32)
    having = tl.full([], 0, tl.int32)
    spare = tl.full([], SPARE, tl.int32)  # taken to lie behind all digits, until the first is found
    going = spare > 0
    while going:
        tables.count(table, keys, base, shift)
        digit, more, having = first_digit(table, k - below, spare, THREADS)
        missed = having >= SPARE
        windows -= 1
        at = base + (digit << shift)
        leading = missed & (shift != LEADING) & ((windows <= 0) | (_before(at, reach) == 0))
        all_below = missed & (shift == LEADING)
        below = tl.where(leading, 0, below + more)
        base = tl.where(leading, 0, tl.where(all_below, -1, at))
        having = tl.where(all_below, 0, having)
        spare = tl.where(missed, spare, 0)
        finer = (missed == 0) & (below + having > enough) & (having > few) & (shift > 0)
        going = finer | (missed & (all_below == 0))
        shift = tl.where(leading, LEADING, tl.where(finer, tl.maximum(shift - tables.BITS, 0), shift))
    return base, shift, below, having


@triton.jit
def search(table, keys, k, enough, THREADS: tl.constexpr):
    """A key with k .. enough keys at or below it, or the k-th least key, or LAST where there are fewer than k.

    Returns (key, keys at or below it, keys below it: only where there are more than ``enough`` at or below it).
    """
    shift = tl.full([], LEADING, tl.int32)
    tables.count_leading(table, keys)
    base, below, having = _leading(table, k, THREADS)
    while (below + having > enough) & (shift > 0):
        shift = tl.maximum(shift - tables.BITS, 0)
        tables.count(table, keys, base, shift)
        base, below, having = next_digit(table, base, shift, below, k, THREADS)
    edge, at_most = edge_of(base, shift, below, having)
    return edge, at_most, below


@triton.jit
def search_windows(table, keys, k, enough, WINDOW: tl.constexpr, THREADS: tl.constexpr):
    """The same, by windows first: see _narrow."""
    base, shift, below, having = _narrow(table, keys, k, enough, 0, WINDOW, THREADS)
    edge, at_most = edge_of(base, shift, below, having)
    return edge, at_most, below


@triton.jit
def _pick(table, listed, wanted, THREADS: tl.constexpr):
    """Of the list's ``listed`` keys, no more than threads: (the wanted-th least, keys below it, keys equal to it). A thread
    compares one with all."""
    place = tl.arange(0, THREADS)
    key = tables.load_one(table, tables.LIST + tl.minimum(place, listed - 1))
    mine = key.to(tl.uint32, bitcast=True)
    marks = tl.zeros([THREADS], tl.int32)
    for first in range(0, listed, 8):
        for four in tl.static_range(2):
            at = first + 4 * four
            a, b, c, d = tables.load(table, tables.LIST + at)
            marks += _compared(a, mine, at < listed) + _compared(b, mine, at + 1 < listed)
            marks += _compared(c, mine, at + 2 < listed) + _compared(d, mine, at + 3 < listed)
    below, equal = marks & 0xFFFF, marks >> 16
    here = (place < listed) & (below < wanted) & (below + equal >= wanted)
    tables.store(table, tables.NOTE + place * 0, key, below, equal, place * 0, here.to(tl.int32))
    tl.debug_barrier()
    key, below, equal, _ = tables.load(table, tl.full([], tables.NOTE, tl.int32))
    return key, below, equal


@triton.jit
def _compared(theirs, mine, there):
    """1 where theirs is below mine, 1 << 16 where they are equal."""
    theirs = theirs.to(tl.uint32, bitcast=True)
    return tl.where(there & (theirs <= mine), tl.where(theirs == mine, 1 << 16, 1), 0)


@triton.jit
def search_held(table, keys, k, LONGEST: tl.constexpr, WINDOW: tl.constexpr, THREADS: tl.constexpr):
    """search among keys that are cheap to look through once, not often; enough is k. LONGEST: of the list of a table.

    Scores of a row share a few octaves: 2048 digits that begin with the highest score mostly leave few keys that share the
    k-th's, and those go to the list.
    """
    tl.static_assert(keys.shape[0] >= 4 * THREADS)
    tables.store_one(table, tl.full([], tables.LENGTH, tl.int32), tl.full([], 0, tl.int32))
    base, shift, below, having = _narrow(table, keys, k, k, LONGEST, WINDOW, THREADS)
    if (below + having > k) & (shift > 0):
        lists.push(table, keys, base, tl.full([], 1, tl.int32) << shift)
        tl.debug_barrier()
        listed = having
        if (listed <= FEW) & (listed <= THREADS):
            base, more, having = _pick(table, listed, k - below, THREADS)
            below += more
            shift = tl.full([], 0, tl.int32)
        while (below + having > k) & (shift > 0):
            shift = tl.maximum(shift - tables.BITS, 0)
            for first in range(0, listed, 2 * THREADS):
                place = first + tl.arange(0, 2 * THREADS)
                some = tl.where(place < listed, tables.load_one(table, tables.LIST + tl.minimum(place, listed - 1)), -1)
                tables.count(table, some, base, shift)
            base, below, having = next_digit(table, base, shift, below, k, THREADS)
    edge, at_most = edge_of(base, shift, below, having)
    return edge, at_most, below


@triton.jit
def _row_keys(source, length, first, CHUNK: tl.constexpr):
    inside = tl.arange(0, CHUNK) < length - first
    return falling_keys(tl.load(source + first + tl.arange(0, CHUNK), mask=inside), inside)


@triton.jit
def search_row(table, source, length, k, CHUNK: tl.constexpr, THREADS: tl.constexpr):
    """search over a whole row, read again for every digit; enough is k."""
    shift = tl.full([], LEADING, tl.int32)
    for first in range(0, length, CHUNK):
        tables.count_leading(table, _row_keys(source, length, first, CHUNK))
    base, below, having = _leading(table, k, THREADS)
    while (below + having > k) & (shift > 0):
        shift = tl.maximum(shift - tables.BITS, 0)
        for first in range(0, length, CHUNK):
            tables.count(table, _row_keys(source, length, first, CHUNK), base, shift)
        base, below, having = next_digit(table, base, shift, below, k, THREADS)
    edge, at_most = edge_of(base, shift, below, having)
    return edge, at_most, below
