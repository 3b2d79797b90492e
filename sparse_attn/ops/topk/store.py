"""Number the chosen scores in column order and store their columns."""

import triton
import triton.language as tl

from sparse_attn.ops.topk import bits, destination, lists, memory
from sparse_attn.ops.topk import table as tables

LANES_OF_FOUR = tl.constexpr(8)


@triton.jit
def above_and_equal(out, above, equal, columns, need, above_before, equal_before, THREADS: tl.constexpr):
    """Store the columns of all scores ``above`` and of the first ``need`` of ``equal``; returns both counts.

    At most 32768 scores, and fewer of them above. THREADS: of the program where it may store from any of them, else 0.
    """
    marks = (above.to(tl.int32) << 16) | equal.to(tl.int32)
    in_line = tl.sum(marks, 1)
    rank = tl.cumsum(marks, 1) + (tl.cumsum(in_line, 0) - in_line)[:, None]
    equal_rank = (rank & 0xFFFF) + equal_before
    place = (rank >> 16) + above_before + tl.minimum(equal_rank, need) - 1
    chosen = above | (equal & (equal_rank <= need))
    if THREADS > 0:
        memory.scatter(out, place, columns, 1 - chosen.to(tl.int32), tl.full([], 0, tl.int32))
    else:
        tl.store(out + place, columns, mask=chosen)
    marks = tl.sum(in_line, 0)
    return marks >> 16, marks & 0xFFFF


@triton.jit
def ones_of(words):
    """How many bits are set."""
    words = words.to(tl.uint32, bitcast=True)
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return ((words * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def places_up_to(keys, edge):
    """The rank of every key (unsigned) at or below ``edge``, in order of columns; anything for others."""
    lines: tl.constexpr = keys.shape[0]
    # A line as eights of four, which a thread holds: three numbers come from its word of bits, four from a scan.
    chosen = keys.to(tl.uint32, bitcast=True) <= edge.to(tl.uint32, bitcast=True)
    marks = tl.reshape(chosen.to(tl.int32), [lines, LANES_OF_FOUR, 4])
    first = tl.arange(0, LANES_OF_FOUR) * 4
    fours = tl.sum(marks << tl.arange(0, 4)[None, None, :], 2)
    words = tl.sum(fours << first[None, :], 1)
    ones = ones_of(words)
    before = tl.cumsum(ones, 0) - ones
    below = ones_of(words[:, None] & ((1 << first) - 1)[None, :]) + before[:, None]
    place = below[:, :, None] + tl.cumsum(marks, 2) - 1
    return tl.reshape(place, [lines, LANES_OF_FOUR * 4])


@triton.jit
def _sum_and_last(sum_left, last_left, sum_right, last_right):
    return sum_left + sum_right, last_right


@triton.jit
def ranked(words):
    """(words, how many bits are set in those before each, the most that are set in one, all that are)."""
    ones = ones_of(words)
    rounds = tl.max(ones, 0)
    total = tl.sum(ones, 0)
    # The words pass through the scan unchanged, which leaves them one to a thread: a loop over them then moves no data.
    ones, words = tl.associative_scan((ones, words), 0, _sum_and_last)
    return words, ones - ones_of(words), rounds, total


@triton.jit
def places(words):
    """How many bits are set in the words before each: ranked, where only that is wanted and words are few."""
    ones = ones_of(words)
    return tl.cumsum(ones, 0) - ones


@triton.jit
def _first_bit(words):
    """(the number of the first bit that is set, the words without it)"""
    rest = words & (words - 1)
    return ((words ^ rest).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127, rest


@triton.jit
def unpack(out, words, place, rounds, left, most, source=None, values=None):
    """Store left[i] + the number of every bit that is set in words[i], at out[place[i] ..], none at ``most`` and beyond; with a
    ``source``, source[what is stored] into ``values``, too, at the same place.

    rounds: the most that are set in one.
    """
    for _ in range(rounds):
        bit, rest = _first_bit(words)
        wanted = (words != 0) & (place < most)
        tl.store(out + place, left + bit, mask=wanted)
        if source is not None:
            tl.store(values + place, tl.load(source + left + bit, mask=wanted), mask=wanted)
        place += 1
        words = rest


@triton.jit
def _nibbles(marks):
    """Truth of every column -> int32, four bits of every four."""
    marks = tl.reshape(marks.to(tl.int32), [marks.shape[0] // 4, 4])
    return tl.sum(marks << tl.arange(0, 4)[None, :], 1)


@triton.jit
def _line(low, high):
    """Eight bytes, of which the lower halves count -> a word, uint32."""
    low, high = low & 0x0F0F0F0F, high & 0x0F0F0F0F
    low, high = (low | (low >> 4)) & 0x00FF00FF, (high | (high >> 4)) & 0x00FF00FF
    low, high = (low | (low >> 8)) & 0xFFFF, (high | (high >> 8)) & 0xFFFF
    return (low | (high << 16)).to(tl.uint32, bitcast=True)


@triton.jit
def first_ones(words, need):
    """The first ``need`` of the bits that are set in ``words``, one behind the other; all where there are not so many."""
    ones = ones_of(words)
    wanted = tl.maximum(need - (tl.cumsum(ones, 0) - ones), 0)
    ends = tl.zeros_like(wanted)
    for step in tl.static_range(5):
        further = ends + (16 >> step)
        kept = words & ((tl.full([], 1, tl.uint32) << further.to(tl.uint32)) - 1)
        ends = tl.where(ones_of(kept) <= wanted, further, ends)
    kept = words & ((tl.full([], 1, tl.uint32) << ends.to(tl.uint32)) - 1)
    return tl.where(ones <= wanted, words, kept)


@triton.jit
def mark(table, keys, edge, need):
    """Mark all keys below ``edge``, unsigned, and apart from them those equal to it; together where need is 0."""
    tl.debug_barrier()
    mark_some(table, keys, 0, edge, need)
    tl.debug_barrier()


@triton.jit
def mark_some(table, keys, first, edge, need):
    """The same for keys from slot ``first`` on, a multiple of 4."""
    place = first // 4 + tl.arange(0, keys.shape[0] // 4)
    keys = keys.to(tl.uint32, bitcast=True)
    edge = edge.to(tl.uint32, bitcast=True)
    if need == 0:
        lists.store_marks(table, place, _nibbles(keys <= edge))
    else:
        lists.store_marks(table, place, _nibbles(keys < edge) | (_nibbles(keys == edge) << 4))


@triton.jit
def words_of_marks(table, SLOTS: tl.constexpr):
    """uint32 [SLOTS / 32], twice: what was marked below, and equal."""
    low, high = lists.load_marks(table, tl.arange(0, SLOTS // 32))
    return _line(low, high), _line(low >> 4, high >> 4)


@triton.jit
def _marked_words(table, need, SLOTS: tl.constexpr):
    """uint32 [SLOTS / 32]: what was marked below and the first ``need`` marked equal."""
    words, equal = words_of_marks(table, SLOTS)
    if need > 0:
        words |= first_ones(equal, need)
    return words


@triton.jit
def marked(out, table, need, left, count, target, SLOTS: tl.constexpr):
    """Store what was marked below and the first ``need`` marked equal, ``count`` in all; left: see of_words."""
    of_words(out, _marked_words(table, need, SLOTS), left, count, target)


@triton.jit
def marked_lines(out, table, need, left, count, target, SLOTS: tl.constexpr, THREADS: tl.constexpr, columns=None, whole=True):
    """The same by whole lines, of a table with a list of SLOTS / 4 keys, which is left as it may be. columns: int32, of which
    those at what would be stored are, unless ``whole``."""
    lines_of_words(out, table, _marked_words(table, need, SLOTS), left, count, target, SLOTS, THREADS, columns, whole)


@triton.jit
def lines_of_words(
    out, table, words, left, count, target, SLOTS: tl.constexpr, THREADS: tl.constexpr, columns=None, whole=True
):  # fmt: skip
    """of_words by whole lines, otherwise as marked_lines: threads store far from each other, as many places as a word has bits, so
    that goes to the table first."""
    ROOM: tl.constexpr = tables.LIST + SLOTS // 4
    words, place, _, _ = ranked(words)
    begin = destination.begin(target)
    for first in range(0, count, ROOM):
        here = tl.minimum(count - first, ROOM)
        tl.debug_barrier()
        bits.line_up(table, words, place - first, left, here)
        tl.debug_barrier()
        for line in range(0, here, 4 * THREADS):
            slot = line + tl.arange(0, 4 * THREADS)
            value = tables.load_one(table, tl.minimum(slot, ROOM - 1))
            if columns is not None:
                value = tl.where(whole, value, tl.load(columns + value, mask=(slot < here) & (whole == 0), other=0))
            tl.store(out + begin + first + slot, value, mask=slot < here)
    destination.finish(out, target, begin, count)


@triton.jit
def of_words(out, words, left, count, target):
    """Store the row's selection, the ``count`` bits that are set; left: what is stored for the first bit of each word."""
    words, place, _, _ = ranked(words)
    begin = destination.begin(target)
    bits.scatter(out + begin, words, place, left)
    destination.finish(out, target, begin, count)
