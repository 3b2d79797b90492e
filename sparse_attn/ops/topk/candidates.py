"""The candidates of a long row: columns whose scores exceed a bound that a sample gives, in order."""

import triton
import triton.language as tl

from sparse_attn.ops.topk import radix, store, thresholds, tiles
from sparse_attn.ops.topk import table as tables
from sparse_attn.ops.topk.tiles import LANES


@triton.jit
def sampled_bound(source, length, keep, table, SAMPLES: tl.constexpr, RUN: tl.constexpr, THREADS: tl.constexpr):
    """What about ``keep`` scores of the row exceed, as far as a sample tells, as a key of thresholds.py (where the search
    goes by those) and as a score, and whether that is all there are."""
    sample = tiles.of(SAMPLES)
    run = sample // RUN
    stride = length // (SAMPLES // RUN)
    jitter = (((run * 1103515245 + 12345) >> 16) & 0x7FFF) % (stride - RUN + 1)
    scores = tl.load(source + run * stride + jitter + sample % RUN)
    share = (SAMPLES * keep.to(tl.int64) // length).to(tl.int32)
    share = tl.maximum(share, 4)
    zero = tl.full([], 0, tl.int64)
    if THREADS > 0:
        edge, at_key, below = radix.search(table, radix.falling_keys(scores, True), share, share + share // 4, THREADS)
        limit = radix.falling_score(edge + (at_key <= share + share // 4).to(tl.int32))
        limit = tl.where(edge == radix.LAST, float("-inf"), limit)
        return zero, limit, edge == radix.LAST
    else:
        key, at_key, at_next = thresholds.search(scores, zero, zero + 1, share, share + share // 4)
        key = tl.where(key == -1, 0, key)  # -1 is the key of -0.0, which compares as 0.0
        key = tl.where(at_key <= share, tl.where(key == thresholds.LOWEST, thresholds.LOWEST - 1, key), key)
        return key, thresholds.score_of(key), key < thresholds.LOWEST


@triton.jit
def _words(line, base, start, end, limit, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):
    """uint32 [CHUNK / 32]: a bit for each column from ``base`` on, set where its score exceeds ``limit``."""
    lane = tl.arange(0, LANES)
    zero = tl.full([1, LANES], 0, tl.uint32)
    column = tl.multiple_of(base, LANES) + tiles.of(CHUNK)
    if (base >= start) & (base + CHUNK <= end):
        scores = tl.load(line + column)
    else:
        scores, inside = tiles.load(line, column, start, end, ALIGNED)
        scores = tl.where(inside, scores, float("-inf"))
    return tl.sum(tl.where(scores > limit, (zero + 1) << lane[None, :].to(tl.uint32), zero), 1)


@triton.jit
def _span(table, line, start, end, first, last, limit, CHUNK: tl.constexpr, SPAN: tl.constexpr, ALIGNED: tl.constexpr):
    """_words of the columns in [first, last), SPAN at most, put together in the table: a scan of them costs more than reading a
    chunk."""
    for base in range(first, last, CHUNK):
        words = _words(line, base, start, end, limit, CHUNK, ALIGNED)
        place = (base - first) // LANES + tl.arange(0, CHUNK // LANES)
        tables.store_one(table, place, words.to(tl.int32, bitcast=True))
    tl.debug_barrier()
    word = tl.arange(0, SPAN // LANES)
    words = tl.where(first + word * LANES < last, tables.load_one(table, word), 0)
    return words.to(tl.uint32, bitcast=True)


@triton.jit
def collect(
    candidates, line, start, end, first, last, limit, capacity, table,
    CHUNK: tl.constexpr, SPAN: tl.constexpr, ALIGNED: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Store the columns (relative to start) of scores above ``limit`` in [first, last), in order; returns their number,
    stored or not. first is a multiple of 32.

    A table, where there is one, is zero before and after.
    """
    found = tl.full([], 0, tl.int32)
    word = tl.arange(0, SPAN // LANES)
    for begin in range(first, last, SPAN):
        if THREADS > 0:
            words = _span(table, line, start, end, begin, tl.minimum(begin + SPAN, last), limit, CHUNK, SPAN, ALIGNED)
            tl.debug_barrier()
        else:
            words = _words(line, begin, start, end, limit, SPAN, ALIGNED)
        left = begin - start + word * LANES
        words, place, rounds, total = store.ranked(words)
        store.unpack(candidates, words, found + place, rounds, left, capacity)
        found += total
    if THREADS > 0:
        radix.start(table, THREADS)
    return found


@triton.jit
def collect_part(
    columns, scores, taken, line, start, end, first, limit, table,
    SLOTS: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Store the columns (relative to start) of scores above ``limit`` in [first, first + SPAN), in order, and these scores, from
    the first of SLOTS on that ``taken``, lines of a row that are, leaves. Returns (that slot, how many, stored or not)."""
    words = _span(table, line, start, end, first, tl.minimum(first + SPAN, end), limit, CHUNK, SPAN, ALIGNED)
    words, place, rounds, total = store.ranked(words)
    begin = tl.atomic_add(taken, tl.cdiv(total, LANES), sem="relaxed") * LANES
    left = first - start + tl.arange(0, SPAN // LANES) * LANES
    store.unpack(columns + begin, words, place, rounds, left, SLOTS - begin, line + start, scores + begin)
    return begin, total


@triton.jit
def locate(number, begins, PROGRAMS: tl.constexpr, SLOTS: tl.constexpr):
    """Where the candidates of a row lie, number[p] of them from begins[p] on, each program's from a new line on.

    Returns (place of every line's first slot, whether there is a candidate in each slot, slots taken).
    """
    lines = tl.cdiv(number, LANES)
    before = tl.cumsum(lines, 0) - lines
    line = tl.arange(0, SLOTS // LANES)
    owner = tl.zeros([SLOTS // LANES], tl.int32)
    step: tl.constexpr = PROGRAMS // 2
    jump = tl.full([], step, tl.int32)
    while jump > 0:
        owner = tl.where(tl.gather(before, owner + jump, 0) <= line, owner + jump, owner)
        jump = jump // 2
    skipped = (line - tl.gather(before, owner, 0)) * LANES
    place = tl.gather(begins, owner, 0) + skipped
    there = tl.arange(0, LANES)[None, :] < (tl.gather(number, owner, 0) - skipped)[:, None]
    return place, there, tl.sum(lines, 0) * LANES
