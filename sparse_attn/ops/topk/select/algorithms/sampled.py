"""Sampled: a sample gives a bound for a long row, and only scores above the bound are searched.

1. Load a sample of the row: runs of neighbours at jittered places. Find a score that about ``num_candidates`` scores of
   the row exceed. That is more than k, and fewer than a CTA holds.
2. The CTAs that share the row each read a part of it. They collect the columns above the bound, in order.
3. The last CTA to arrive reads the candidates' scores again and selects k of them, as single_cta does.
4. Where there are fewer than k candidates or too many, it streams the row instead (streaming.py): the bound was off, or
   ties fill the row. That is slower and equally exact.

The row is read once, at memory speed, in step 2. The cost is in steps 1 and 3, in which a CTA mostly waits. With
SAMPLED off the kernel is that of streaming.py.
"""

import triton
import triton.language as tl

from sparse_attn.device import histogram, pdl
from sparse_attn.ops.topk.select.algorithms.single_cta import select_resident
from sparse_attn.ops.topk.select.algorithms.streaming import select_streamed
from sparse_attn.ops.topk.select.primitives import compact, output, radix_select, threshold_select, tile
from sparse_attn.ops.topk.select.primitives.tile import WORD

LEAST_SHARE = tl.constexpr(4)  # of fewer sampled scores a bound says little


@triton.jit
def jitter(number, places):
    """int32 in [0, places) for every ``number``, so that scores with a period are not sampled at the same phase. Of
    more than 32768 places the first are taken."""
    return (((number * 1103515245 + 12345) >> 16) & 0x7FFF) % places


@triton.jit
def share_of(samples, wanted, length):
    """(how many of ``samples`` scores of the row exceed the bound; the most that may, so that the search ends early)"""
    share = tl.maximum((samples * wanted.to(tl.int64) // length).to(tl.int32), LEAST_SHARE)
    return share, share + share // 4


@triton.jit
def bound_by(smem, keys, samples, wanted, length, THREADS: tl.constexpr):
    """The bound by ``samples`` scores of the row, given by their descending keys.

    Returns (the bound, whether the sample holds too few scores: then it is -inf)."""
    share, most = share_of(samples, wanted, length)
    cutoff, at_cutoff, _ = radix_select.search(smem, keys, share, most, THREADS)
    limit = radix_select.score_of(cutoff + (at_cutoff <= most).to(tl.int32))
    everything = cutoff == radix_select.LAST_KEY
    return tl.where(everything, float("-inf"), limit), everything


@triton.jit
def sampled_bound(
    source, length, num_candidates, smem, SAMPLES: tl.constexpr, RUN: tl.constexpr, THREADS: tl.constexpr
):
    """A bound that about ``num_candidates`` scores of the row exceed, estimated from a sample. Returns (the bound as a
    key of threshold_select, where the search goes by those; the bound as a score; whether the sample holds all
    scores there are)."""
    # A run of neighbours from each stretch of the row.
    position = tile.positions(SAMPLES)
    run = position // RUN
    stride = length // (SAMPLES // RUN)
    scores = tl.load(source + run * stride + jitter(run, stride - RUN + 1) + position % RUN)
    zero = tl.full([], 0, tl.int64)
    if THREADS > 0:
        keys = radix_select.descending_keys(scores, True)
        limit, everything = bound_by(smem, keys, SAMPLES, num_candidates, length, THREADS)
        return zero, limit, everything
    else:
        # By thresholds the bound is a key as well, where the search of candidates begins.
        share, most = share_of(SAMPLES, num_candidates, length)
        key, at_cutoff, at_next = threshold_select.search(scores, zero, zero + 1, share, most)
        key = tl.where(key == -1, 0, key)  # -1 is the key of -0.0, which compares as 0.0
        LOWEST: tl.constexpr = threshold_select.LOWEST
        key = tl.where(at_cutoff <= share, tl.where(key == LOWEST, LOWEST - 1, key), key)
        return key, threshold_select.score_of(key), key < threshold_select.LOWEST


@triton.jit
def _chunk_bitmask(row_ptr, base, start, end, limit, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):
    """uint32 [CHUNK / 32]: a bit for each column from ``base`` on, set where its score exceeds ``limit``."""
    bit = tl.arange(0, WORD)
    zero = tl.full([1, WORD], 0, tl.uint32)
    column = tl.multiple_of(base, WORD) + tile.positions(CHUNK)
    # A chunk inside the row needs no mask.
    if (base >= start) & (base + CHUNK <= end):
        scores = tl.load(row_ptr + column)
    else:
        scores, inside = tile.load(row_ptr, column, start, end, ALIGNED)
        scores = tl.where(inside, scores, float("-inf"))
    return tl.sum(tl.where(scores > limit, (zero + 1) << bit[None, :].to(tl.uint32), zero), 1)


@triton.jit
def _span_bitmask(
    smem, row_ptr, start, end, first, last, limit, CHUNK: tl.constexpr, SPAN: tl.constexpr, ALIGNED: tl.constexpr
):
    """_chunk_bitmask of the columns in [first, last), at most SPAN of them. It is put together in shared memory: one
    scan of a span costs less than a scan of each chunk."""
    for base in range(first, last, CHUNK):
        bitmask = _chunk_bitmask(row_ptr, base, start, end, limit, CHUNK, ALIGNED)
        position = (base - first) // WORD + tl.arange(0, CHUNK // WORD)
        histogram.store_one(smem, position, bitmask.to(tl.int32, bitcast=True))
    tl.debug_barrier()
    word = tl.arange(0, SPAN // WORD)
    bitmask = tl.where(first + word * WORD < last, histogram.load_one(smem, word), 0)
    return bitmask.to(tl.uint32, bitcast=True)


@triton.jit
def _collect(
    candidates, row_ptr, start, end, first, last, limit, capacity, smem,
    CHUNK: tl.constexpr, SPAN: tl.constexpr, ALIGNED: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Store the columns in [first, last) whose scores exceed ``limit``, relative to start and in order. Returns their
    number, stored or not. first is a multiple of 32. The histogram, where there is one, is zero before and after."""
    found = tl.full([], 0, tl.int32)
    word = tl.arange(0, SPAN // WORD)
    # A span at a time: its bits first, then columns in order.
    for begin in range(first, last, SPAN):
        if THREADS > 0:
            bitmask = _span_bitmask(
                smem, row_ptr, start, end, begin, tl.minimum(begin + SPAN, last), limit, CHUNK, SPAN, ALIGNED
            )
            tl.debug_barrier()
        else:
            bitmask = _chunk_bitmask(row_ptr, begin, start, end, limit, SPAN, ALIGNED)
        word_base = begin - start + word * WORD
        bitmask, position, rounds, total = compact.scan_bitmask(bitmask)
        compact.store_by_rounds(candidates, bitmask, found + position, rounds, word_base, capacity)
        found += total
    if THREADS > 0:
        histogram.clear(smem, THREADS)
    return found


@triton.jit
def collect_span(
    columns, scores, taken, row_ptr, start, end, first, limit, smem,
    SLOTS: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Store the columns in [first, first + SPAN) whose scores exceed ``limit``, relative to start and in order, and
    these scores. They go to the next free ones of SLOTS slots; ``taken`` counts words of 32 slots. Returns (the
    first slot of this span, its number of candidates, stored or not)."""
    bitmask = _span_bitmask(
        smem, row_ptr, start, end, first, tl.minimum(first + SPAN, end), limit, CHUNK, SPAN, ALIGNED
    )
    bitmask, position, rounds, total = compact.scan_bitmask(bitmask)
    # Room in whole words of 32 slots, as ``locate`` counts.
    begin = tl.atomic_add(taken, tl.cdiv(total, WORD), sem="relaxed") * WORD
    word_base = first - start + tl.arange(0, SPAN // WORD) * WORD
    compact.store_by_rounds(
        columns + begin, bitmask, position, rounds, word_base, SLOTS - begin, row_ptr + start, scores + begin
    )
    return begin, total


@triton.jit
def locate(number, begins, CTAS: tl.constexpr, SLOTS: tl.constexpr):
    """Where a row's candidates lie, in order. CTA c has number[c] candidates from slot begins[c] on, in whole words of
    32 slots.

    Returns (the first slot of each word, whether each slot holds a candidate, slots taken).
    """
    # Parts follow each other in whole words.
    words = tl.cdiv(number, WORD)
    before = tl.cumsum(words, 0) - words
    word = tl.arange(0, SLOTS // WORD)
    # Binary search for the part that each word belongs to.
    owner = tl.zeros([SLOTS // WORD], tl.int32)
    step: tl.constexpr = CTAS // 2
    jump = tl.full([], step, tl.int32)
    while jump > 0:
        owner = tl.where(tl.gather(before, owner + jump, 0) <= word, owner + jump, owner)
        jump = jump // 2
    skipped = (word - tl.gather(before, owner, 0)) * WORD
    position = tl.gather(begins, owner, 0) + skipped
    valid = tl.arange(0, WORD)[None, :] < (tl.gather(number, owner, 0) - skipped)[:, None]
    return position, valid, tl.sum(words, 0) * WORD


@triton.jit(do_not_specialize=["rows", "width", "k", "num_candidates", "capacity", "stride_logits_row"])
def select_sampled(
    logits,  # fp32 [rows, width]
    row_starts,  # int32 [rows] or None
    row_ends,  # int32 [rows] or None
    out,  # int32 [rows, k]
    candidates,  # int32 [rows in flight * CTAS, capacity]
    counts,  # int32 [rows in flight * CTAS]
    arrivals,  # int64 [rows in flight], zero before and after
    emulated_smem,  # int32 [CTAs, words] in the interpreter, else None
    rows,
    width,
    k,
    num_candidates,
    capacity,
    stride_logits_row,  # in fours when ALIGNED
    stride_starts_row,
    stride_ends_row,
    SLOTS: tl.constexpr,  # candidates that are searched at most
    CHUNK: tl.constexpr,  # columns read at once
    SPAN: tl.constexpr,  # columns whose bits are put in order at once
    CTAS: tl.constexpr,  # that share a row
    SAMPLED: tl.constexpr,  # whether rows of more than SLOTS scores are cut down to candidates
    SAMPLES: tl.constexpr,
    RUN: tl.constexpr,  # samples side by side
    ALIGNED: tl.constexpr,
    THREADS: tl.constexpr,  # of the CTA where the search goes by radix digits, by thresholds 0
    PDL: tl.constexpr,
):
    UNIT: tl.constexpr = 4 if ALIGNED else 1
    cta = tl.program_id(0)
    group = cta // CTAS
    part = cta % CTAS
    slot = tile.positions(SLOTS)
    smem = histogram.claim_cleared(emulated_smem, 0, THREADS)
    pdl.wait(PDL)
    # CTAS CTAs share a row; such groups take rows by turns.
    for row in range(group, rows, tl.num_programs(0) // CTAS):
        row64 = tl.full([], 0, tl.int64) + row
        start, end = tile.row_range(row_starts, row_ends, row64, width, stride_starts_row, stride_ends_row)
        length = end - start
        row_ptr = logits + row64 * stride_logits_row * UNIT
        output_map = output.MatrixRow(row64, k)
        # A row of at most SLOTS scores is its own list of candidates.
        columns = slot
        inside = slot < length
        key2 = tl.full([], 0, tl.int64)
        key3 = tl.full([], 1, tl.int64)
        resident = (length <= SLOTS) & (part == 0)
        streamed = (length > SLOTS) & (part == 0)
        if SAMPLED:
            streamed = streamed & False
            # Parts are whole chunks, and begin at a multiple of 32 columns.
            base = (start // tile.WORD) * tile.WORD
            chunks = tl.cdiv(end - base, CHUNK)
            each = tl.maximum(tl.cdiv(chunks, CTAS), 1)
            # Every CTA of the row finds the same bound, from the same sample.
            if (length > SLOTS) & (part * each < chunks):
                bound, limit, everything = sampled_bound(
                    row_ptr + start, length, num_candidates, smem, SAMPLES, RUN, THREADS
                )
                mine = candidates + cta.to(tl.int64) * capacity
                first = base + part * each * CHUNK
                last = tl.minimum(first + each * CHUNK, end)
                found = _collect(
                    mine, row_ptr, start, end, first, last, limit, capacity, smem, CHUNK, SPAN, ALIGNED, THREADS
                )
                complete = True
                # The last CTA of the row has all candidates: acq_rel orders their stores before its loads.
                if CTAS > 1:
                    tl.store(counts + cta, found)
                    tl.debug_barrier()
                    complete = tl.atomic_add(arrivals + group, 1, sem="acq_rel") == tl.cdiv(chunks, each) - 1
                else:
                    tl.debug_barrier()
                if complete:
                    position = slot
                    inside = slot < found
                    taken = found
                    if CTAS > 1:
                        tl.store(arrivals + group, 0)
                        # Put the parts in order; .cg, since other CTAs wrote them.
                        mate = tl.arange(0, CTAS)
                        number = tl.load(
                            counts + group * CTAS + mate, mask=mate * each < chunks, other=0, cache_modifier=".cg"
                        )
                        found = tl.sum(number, 0)
                        words, inside, taken = locate(number, mate * capacity, CTAS, SLOTS)
                        position = words[:, None] + tl.arange(0, tile.WORD)[None, :]
                        mine = candidates + (group * CTAS).to(tl.int64) * capacity
                    # Enough candidates and not too many, or the row is streamed.
                    resident = (taken <= SLOTS) & ((found >= k) | everything)
                    streamed = resident == 0
                    columns = tl.load(mine + position, mask=inside & resident, other=0, cache_modifier=".cg")
                    key2 = tl.where(everything, 0, bound)
                    above = tl.minimum(key2 + threshold_select.OCTAVE, threshold_select.BEYOND)
                    key3 = tl.where(streamed, key2 + 1, above)
        if resident:
            scores = tl.load(row_ptr + start + columns, mask=inside)
            select_resident(out, scores, inside, columns, key2, key3, smem, output_map, k, THREADS)
        if streamed:
            select_streamed(out, row_ptr + start, length, key2, smem, output_map, k, CHUNK, THREADS)
