"""Compaction: number the selected scores in column order, and store their columns.

A row's selection is marks in shared memory at first (see smem_list.py), then a bitmask in registers, uint32 [SLOTS /
32]. A scan of the bitmask's popcounts says where each word's columns go.
"""

import triton
import triton.language as tl

from sparse_attn.device import histogram, ptx_io
from sparse_attn.device.bits import popcount
from sparse_attn.ops.topk.select.primitives import output, set_bits, smem_list

FOURS_OF_WORD = tl.constexpr(8)


@triton.jit
def store_above_and_equal(out, above, equal, columns, need, above_before, equal_before, THREADS: tl.constexpr):
    """Store the columns of all scores ``above``, and of the first ``need`` of ``equal``. Returns both counts.

    At most 32768 scores, and fewer of them above. THREADS: the CTA's threads where any of them may store, else 0.
    """
    # Two counts in the halves of a word go through one scan.
    marks = (above.to(tl.int32) << 16) | equal.to(tl.int32)
    in_line = tl.sum(marks, 1)
    rank = tl.cumsum(marks, 1) + (tl.cumsum(in_line, 0) - in_line)[:, None]
    equal_rank = (rank & 0xFFFF) + equal_before
    # Behind all above, and behind those equal ones before it that are taken.
    position = (rank >> 16) + above_before + tl.minimum(equal_rank, need) - 1
    chosen = above | (equal & (equal_rank <= need))
    if THREADS > 0:
        ptx_io.scatter(out, position, columns, 1 - chosen.to(tl.int32), tl.full([], 0, tl.int32))
    else:
        tl.store(out + position, columns, mask=chosen)
    marks = tl.sum(in_line, 0)
    return marks >> 16, marks & 0xFFFF


@triton.jit
def ranks_up_to(keys, cutoff):
    """The rank of every key (unsigned) at or below ``cutoff``, in order of columns. Other keys give any value."""
    lines: tl.constexpr = keys.shape[0]
    # A thread holds four keys of a line: what lies before them comes from the line's word of bits, the rest from a
    # scan of four.
    chosen = keys.to(tl.uint32, bitcast=True) <= cutoff.to(tl.uint32, bitcast=True)
    marks = tl.reshape(chosen.to(tl.int32), [lines, FOURS_OF_WORD, 4])
    first = tl.arange(0, FOURS_OF_WORD) * 4
    fours = tl.sum(marks << tl.arange(0, 4)[None, None, :], 2)
    bitmask = tl.sum(fours << first[None, :], 1)
    counts = popcount(bitmask)
    before = tl.cumsum(counts, 0) - counts
    below = popcount(bitmask[:, None] & ((1 << first) - 1)[None, :]) + before[:, None]
    position = below[:, :, None] + tl.cumsum(marks, 2) - 1
    return tl.reshape(position, [lines, FOURS_OF_WORD * 4])


@triton.jit
def _sum_and_last(sum_left, last_left, sum_right, last_right):
    return sum_left + sum_right, last_right


@triton.jit
def scan_bitmask(bitmask):
    """(bitmask, bits set in the words before each word, the most bits set in one word, all bits set)."""
    counts = popcount(bitmask)
    rounds = tl.max(counts, 0)
    total = tl.sum(counts, 0)
    # The bitmask passes through the scan unchanged, which leaves a word to a thread: a loop over its bits then moves
    # no data.
    counts, bitmask = tl.associative_scan((counts, bitmask), 0, _sum_and_last)
    return bitmask, counts - popcount(bitmask), rounds, total


@triton.jit
def set_bits_before(bitmask):
    """Bits set in the words before each word. It is scan_bitmask for few words, where nothing else is wanted."""
    counts = popcount(bitmask)
    return tl.cumsum(counts, 0) - counts


@triton.jit
def _first_bit(bitmask):
    """(the number of the first bit that is set in each word, the words without it)"""
    rest = bitmask & (bitmask - 1)
    return ((bitmask ^ rest).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127, rest


@triton.jit
def store_by_rounds(out, bitmask, position, rounds, word_base, most, source=None, values=None):
    """For every bit that is set in bitmask[i] store word_base[i] + the bit's number, at out[position[i]] and on.
    Nothing is stored at ``most`` and beyond. With a ``source``, source[what is stored] goes into ``values`` at the
    same position.

    rounds: the most bits that are set in one word. Each round stores one bit of every word.
    """
    for _ in range(rounds):
        bit, rest = _first_bit(bitmask)
        wanted = (bitmask != 0) & (position < most)
        tl.store(out + position, word_base + bit, mask=wanted)
        if source is not None:
            tl.store(values + position, tl.load(source + word_base + bit, mask=wanted), mask=wanted)
        position += 1
        bitmask = rest


@triton.jit
def _nibbles(marks):
    """bool of every column -> int32, four bits for every four columns."""
    marks = tl.reshape(marks.to(tl.int32), [marks.shape[0] // 4, 4])
    return tl.sum(marks << tl.arange(0, 4)[None, :], 1)


@triton.jit
def _word_of_marks(low, high):
    """Eight bytes -> a word, uint32. The lower half of each byte counts."""
    # Eight halves of bytes move together, by steps of 4 and 8 bits.
    low, high = low & 0x0F0F0F0F, high & 0x0F0F0F0F
    low, high = (low | (low >> 4)) & 0x00FF00FF, (high | (high >> 4)) & 0x00FF00FF
    low, high = (low | (low >> 8)) & 0xFFFF, (high | (high >> 8)) & 0xFFFF
    return (low | (high << 16)).to(tl.uint32, bitcast=True)


@triton.jit
def first_set_bits(bitmask, need):
    """The first ``need`` of the set bits of ``bitmask``, or all where there are fewer."""
    # Each word's share of ``need``; then the bit up to which the word has that many.
    counts = popcount(bitmask)
    wanted = tl.maximum(need - (tl.cumsum(counts, 0) - counts), 0)
    ends = tl.zeros_like(wanted)
    for step in tl.static_range(5):
        further = ends + (16 >> step)
        kept = bitmask & ((tl.full([], 1, tl.uint32) << further.to(tl.uint32)) - 1)
        ends = tl.where(popcount(kept) <= wanted, further, ends)
    kept = bitmask & ((tl.full([], 1, tl.uint32) << ends.to(tl.uint32)) - 1)
    return tl.where(counts <= wanted, bitmask, kept)


@triton.jit
def mark(smem, keys, cutoff, need):
    """Mark the keys below ``cutoff``, unsigned, as above, and those equal to it as equal. Where need is 0, both are
    marked as above."""
    tl.debug_barrier()
    mark_from(smem, keys, 0, cutoff, need)
    tl.debug_barrier()


@triton.jit
def mark_from(smem, keys, first, cutoff, need):
    """The same for keys from slot ``first`` on, a multiple of 4."""
    position = first // 4 + tl.arange(0, keys.shape[0] // 4)
    keys = keys.to(tl.uint32, bitcast=True)
    cutoff = cutoff.to(tl.uint32, bitcast=True)
    if need == 0:
        smem_list.store_marks(smem, position, _nibbles(keys <= cutoff))
    else:
        smem_list.store_marks(smem, position, _nibbles(keys < cutoff) | (_nibbles(keys == cutoff) << 4))


@triton.jit
def bitmasks_of_marks(smem, SLOTS: tl.constexpr):
    """Two bitmasks, uint32 [SLOTS / 32]: slots marked above, and slots marked equal."""
    low, high = smem_list.load_marks(smem, tl.arange(0, SLOTS // 32))
    return _word_of_marks(low, high), _word_of_marks(low >> 4, high >> 4)


@triton.jit
def _marked_bitmask(smem, need, SLOTS: tl.constexpr):
    """uint32 [SLOTS / 32]: the slots marked above, and the first ``need`` of those marked equal."""
    bitmask, equal = bitmasks_of_marks(smem, SLOTS)
    if need > 0:
        bitmask |= first_set_bits(equal, need)
    return bitmask


@triton.jit
def store_marked(out, smem, need, word_base, count, output_map, SLOTS: tl.constexpr):
    """Store the slots marked above and the first ``need`` of those marked equal, ``count`` in all. word_base: see
    store_bitmask."""
    store_bitmask(out, _marked_bitmask(smem, need, SLOTS), word_base, count, output_map)


@triton.jit
def store_marked_coalesced(
    out, smem, need, word_base, count, output_map, SLOTS: tl.constexpr, THREADS: tl.constexpr, columns=None, whole=True
):  # fmt: skip
    """store_marked by coalesced stores: see store_bitmask_coalesced."""
    bitmask = _marked_bitmask(smem, need, SLOTS)
    store_bitmask_coalesced(out, smem, bitmask, word_base, count, output_map, SLOTS, THREADS, columns, whole)


@triton.jit
def store_bitmask_coalesced(
    out, smem, bitmask, word_base, count, output_map, SLOTS: tl.constexpr, THREADS: tl.constexpr, columns=None,
    whole=True,
):  # fmt: skip
    """store_bitmask, staged in shared memory; histogram and list are overwritten. Without staging a thread would store
    the set bits of its own word, far from its neighbours'. columns: int32; unless ``whole``, the columns are found
    there, at what the bitmask stands for."""
    STAGED: tl.constexpr = histogram.WORDS + SLOTS // 4
    bitmask, position, _, _ = scan_bitmask(bitmask)
    begin = output.begin(output_map)
    # As much at a time as shared memory holds.
    for first in range(0, count, STAGED):
        here = tl.minimum(count - first, STAGED)
        tl.debug_barrier()
        set_bits.stage(smem, bitmask, position - first, word_base, here)
        tl.debug_barrier()
        # Threads side by side store values side by side.
        for at in range(0, here, 4 * THREADS):
            slot = at + tl.arange(0, 4 * THREADS)
            value = histogram.load_one(smem, tl.minimum(slot, STAGED - 1))
            if columns is not None:
                value = tl.where(whole, value, tl.load(columns + value, mask=(slot < here) & (whole == 0), other=0))
            tl.store(out + begin + first + slot, value, mask=slot < here)
    output.finish(out, output_map, begin, count)


@triton.jit
def store_bitmask(out, bitmask, word_base, count, output_map):
    """Store the row's selection, the ``count`` bits that are set. word_base: what is stored for the first bit of each
    word."""
    bitmask, position, _, _ = scan_bitmask(bitmask)
    begin = output.begin(output_map)
    set_bits.store(out + begin, bitmask, position, word_base)
    output.finish(out, output_map, begin, count)


@triton.jit
def store_unordered(out, smem, columns, keys, cutoff, at_cutoff, below, k, word_base, output_map):
    """Store those of ``columns``, which come in any order, whose keys are at or below ``cutoff``: ``at_cutoff`` keys.
    Where they are more than k, ``below`` keys lie below it, and of those equal to it the first are stored, k in all. A
    bit a column puts them in order. word_base: what is stored for the first bit of each word."""
    # One bit a column, all zero.
    word = tl.arange(0, word_base.shape[0])
    tl.debug_barrier()
    histogram.store_one(smem, histogram.WORDS + word, word * 0)
    tl.debug_barrier()
    # More equal the cutoff than are needed: set their bits, and keep the first.
    if at_cutoff > k:
        smem_list.set_bits(smem, columns, keys ^ cutoff, tl.full([], 0, tl.int32))
        tl.debug_barrier()
        equal = histogram.load_one(smem, histogram.WORDS + word).to(tl.uint32, bitcast=True)
        equal = first_set_bits(equal, k - below)
        tl.debug_barrier()
        histogram.store_one(smem, histogram.WORDS + word, equal.to(tl.int32, bitcast=True))
        tl.debug_barrier()
        # What is left to add lies below the cutoff.
        cutoff -= 1
    smem_list.set_bits(smem, columns, keys, cutoff)
    tl.debug_barrier()
    bitmask = histogram.load_one(smem, histogram.WORDS + word).to(tl.uint32, bitcast=True)
    store_bitmask(out, bitmask, word_base, tl.minimum(at_cutoff, k), output_map)
