"""A rank's two steps of a selection over ranks by one gather, on every GPU: it packs its own k highest scores, and
finds its winners among all ranks'.

Candidates of a rank ascend by column. A rank also packs how many lie in each block, by which all ranks know where a tie
stands in the whole row. One CTA takes a row. Both kernels move few bytes and are bound by latency; merge_candidates by
its three searches for a digit. Where ties are looked up, words of bits take the place of the histogram in shared
memory.
"""

import triton
import triton.language as tl

from sparse_attn.device import histogram, pdl
from sparse_attn.device.bits import popcount
from sparse_attn.device.order import greater
from sparse_attn.ops.topk.ranks import fake
from sparse_attn.ops.topk.ranks.portable.digits import key_of, range_of

BITS, SHIFTS = tl.constexpr(fake.BITS), tl.constexpr(fake.SHIFTS)
MINUS_INF_BITS = tl.constexpr(-8388608)
WORDS_OF_TIES = tl.constexpr(fake.MOST_CANDIDATES // 32)  # a bit for each candidate


@triton.jit(do_not_specialize=["width", "k", "words", "stride_logits", "stride_columns"])
def pack_candidates(
    logits,  # fp32 [rows, width]
    columns,  # int32 [rows, k], ascending and packed
    row_starts,  # int32 [rows] or None
    out,  # int32 [rows, words]
    counts,  # the same as uint8 or int32
    width,
    k,
    words,
    stride_logits,
    stride_columns,
    stride_starts,
    BLOCK_SIZE: tl.constexpr,
    CANDIDATES: tl.constexpr,  # k rounded up to a power of two
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    start, _ = range_of(tl.program_id(0), row_starts, None, stride_starts, 0, width)
    # The candidates' columns, with the neighbours of each.
    place = tl.arange(0, CANDIDATES)
    at = columns + row * stride_columns + place
    column = tl.load(at, place < k, -1)
    earlier = tl.load(at - 1, (place > 0) & (place < k), -1)
    later = tl.load(at + 1, place < k - 1, -1)
    held = column >= 0
    score = tl.load(logits + row * stride_logits + start + column, held, float("-inf"))
    tl.store(out + row * words + place, score.to(tl.int32, bitcast=True), place < k)
    # All counts are zeroed. Then the last candidate of each block stores that block's.
    EACH: tl.constexpr = 32 // counts.dtype.element_ty.primitive_bitwidth
    counts += (row * words + k) * EACH
    for first in range(0, (words - k) * EACH, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        tl.store(counts + block, tl.zeros_like(block).to(counts.dtype.element_ty), block < (words - k) * EACH)
    tl.debug_barrier()
    # A candidate that begins a block, and how far behind it each lies.
    block = column // BLOCK_SIZE
    begins = (place == 0) | (earlier // BLOCK_SIZE != block)
    begin = tl.associative_scan(tl.where(begins, place, 0), 0, greater)
    ends = held & ((later < 0) | (later // BLOCK_SIZE != block))
    tl.store(counts + block, (place + 1 - begin).to(counts.dtype.element_ty), ends)


@triton.jit
def _next_digit(smem, key, prefix, need, LEVEL: tl.constexpr, THREADS: tl.constexpr):
    """(``prefix``, the digits above, with the next one; how many of the keys that begin so are still to be taken), of
    the keys that a CTA holds; see the reference. Bins are zero before and after."""
    SHIFT: tl.constexpr = SHIFTS[LEVEL]
    DIGITS: tl.constexpr = 1 << BITS[LEVEL]
    # Keys that begin as ``prefix`` does are counted by their next digit.
    place = tl.arange(0, DIGITS)
    base = (prefix * DIGITS << SHIFT).to(tl.int32)
    if THREADS > 0:
        histogram.count(smem, key, base, tl.full([], SHIFT, tl.int32))
        tl.debug_barrier()
        # Read all bins before they are cleared for the next digit.
        counts = histogram.load_one(smem, place)
        tl.debug_barrier()
        histogram.clear(smem, THREADS)
    else:
        digit = (key - base).to(tl.uint32, bitcast=True) >> SHIFT
        counts = tl.histogram((digit % DIGITS).to(tl.int32), DIGITS, mask=digit < DIGITS)
    counts = tl.where((place == 0) & (prefix == 0), 0, counts)  # no score has key 0
    # The highest digit at or above which ``need`` keys lie.
    at_most = tl.cumsum(counts, 0)
    total = tl.sum(counts, 0)
    digit = tl.maximum(tl.sum((total - at_most + counts >= need).to(tl.int32), 0) - 1, 0)
    return prefix * DIGITS + digit, need - tl.sum(tl.where(place > digit, counts, 0), 0)


@triton.jit
def _of_words(smem, words, first, index, THREADS: tl.constexpr):
    """words [RANKS, n] at ``index`` [RANKS, m]. With THREADS they lie in shared memory from word ``first`` on.
    tl.gather spills where its source is long, and does not compile where it is short (Triton 3.6)."""
    if THREADS > 0:
        rank = tl.arange(0, words.shape[0])[:, None]
        return histogram.load_one(smem, first + rank * words.shape[1] + index)
    else:
        place = tl.arange(0, words.shape[1])[None, None, :]
        return tl.sum(tl.where(index[:, :, None] == place, words[:, None, :], 0), 2)


@triton.jit
def _ties_before(smem, words, sums, held, THREADS: tl.constexpr):
    """How many of a rank's first ``held`` [RANKS, n] candidates tie. words: [RANKS, candidates / 32], a bit for each.
    sums: ties before each word."""
    last = tl.maximum(held - 1, 0)
    # The word's own bits up to the candidate, and all ties of the words before.
    some = _of_words(smem, words, 0, last >> 5, THREADS).to(tl.uint32, bitcast=True)
    mask = tl.full(held.shape, 0xFFFFFFFF, tl.uint32) >> (31 - (last & 31)).to(tl.uint32)
    return tl.where(held > 0, _of_words(smem, sums, WORDS_OF_TIES, last >> 5, THREADS) + popcount(some & mask), 0)


@triton.jit(do_not_specialize=["k", "rank", "ranks", "blocks", "stride_rank", "stride_row", "stride_columns"])
def merge_candidates(
    candidates,  # int32 [ranks, rows, words]
    counts,  # the same as uint8 or int32
    columns,  # int32 [rows, k]
    out,  # int32 [rows, k]
    emulated_smem,  # int32 [CTAs, words] in the interpreter, else None
    k,
    rank,
    ranks,
    each,  # counts of a word
    blocks,
    stride_rank,
    stride_row,
    stride_columns,
    RANKS: tl.constexpr,  # rounded up to a power of two
    CANDIDATES: tl.constexpr,  # of a rank, likewise
    BLOCKS: tl.constexpr,
    THREADS: tl.constexpr,  # of a CTA that counts in shared memory, else 0
    PDL: tl.constexpr,
):
    smem = histogram.claim_cleared(emulated_smem, 0, THREADS)
    pdl.wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    # Scores of all ranks, and this rank's once more with their columns.
    one, place = tl.arange(0, RANKS * CANDIDATES), tl.arange(0, CANDIDATES)
    of_row = candidates + row * stride_row
    at = (one // CANDIDATES).to(tl.int64) * stride_rank + one % CANDIDATES
    bits = tl.load(of_row + at, (one // CANDIDATES < ranks) & (one % CANDIDATES < k), MINUS_INF_BITS)
    own_bits = tl.load(of_row + rank.to(tl.int64) * stride_rank + place, place < k, MINUS_INF_BITS)
    column = tl.load(columns + row * stride_columns + place, place < k, -1)
    key = key_of(bits.to(tl.float32, bitcast=True))
    own = key_of(own_bits.to(tl.float32, bitcast=True))

    # Three digits give the k-th key of all ranks' candidates.
    prefix, need = _next_digit(smem, key, tl.full([], 0, tl.int32), k, 0, THREADS)
    prefix, need = _next_digit(smem, key, prefix, need, 1, THREADS)
    kth, need = _next_digit(smem, key, prefix, need, 2, THREADS)

    # More ties than are needed: those at lower positions win.
    tied = (key == kth) & (key != 0)
    limit = tl.full([], CANDIDATES, tl.int32)  # of this rank's ties, how many win: its first ones
    if tl.sum(tied.to(tl.int32), 0) > need:
        # A bit for each candidate that ties, and how many lie before each word.
        bit = tl.reshape(tied.to(tl.int32), [RANKS, CANDIDATES // 32, 32])
        words, ties = tl.sum(bit << tl.arange(0, 32)[None, None, :], 2), tl.sum(bit, 2)
        sums = tl.cumsum(ties, 1) - ties
        if THREADS > 0:  # where bins were
            word = tl.arange(0, RANKS)[:, None] * (CANDIDATES // 32) + tl.arange(0, CANDIDATES // 32)[None, :]
            histogram.store_one(smem, word, words)
            histogram.store_one(smem, WORDS_OF_TIES + word, sums)
            tl.debug_barrier()
        other = tl.arange(0, RANKS)[:, None]
        held = tl.zeros([RANKS], tl.int32)
        limit = tl.full([], 0, tl.int32)
        # Walk the blocks in order. held: how many candidates of each rank the blocks before have.
        for first in range(0, blocks, BLOCKS):
            block = first + tl.arange(0, BLOCKS)[None, :]
            count = counts + row * stride_row * each + other.to(tl.int64) * stride_rank * each + k * each + block
            count = tl.load(count, (other < ranks) & (block < blocks), 0).to(tl.int32)
            behind = held[:, None] + tl.cumsum(count, 1)
            # A block's ties of each rank lie between those before its first and behind its last candidate.
            before = _ties_before(smem, words, sums, behind - count, THREADS)
            behind = _ties_before(smem, words, sums, behind, THREADS)
            lower = tl.sum(tl.where(other < rank, behind, before), 0)  # at lower positions of the whole row
            inside = tl.sum(tl.where(other == rank, behind - before, 0), 0)
            # Of the ties inside this block as many win as are still needed.
            limit += tl.sum(tl.minimum(tl.maximum(need - lower, 0), inside), 0)
            held += tl.sum(count, 1)

    # Own candidates ascend by column: the first ``limit`` ties win.
    own_tied = (own == kth) & (own != 0)
    higher = own.to(tl.uint32, bitcast=True) > kth.to(tl.uint32, bitcast=True)
    wins = higher | (own_tied & (tl.cumsum(own_tied.to(tl.int32), 0) <= limit))
    # Winners keep their order; -1 behind them.
    at = tl.cumsum(wins.to(tl.int32), 0) - 1
    winners = tl.sum(wins.to(tl.int32), 0)
    tl.store(out + row * k + at, column, wins)
    tl.store(out + row * k + place, tl.full([CANDIDATES], -1, tl.int32), (place >= winners) & (place < k))
