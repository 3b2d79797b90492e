"""One row in one program: search what it holds, or read the row again and again; store what is selected.

Where a program can count in shared memory, the search goes by digits (radix.py), elsewhere by thresholds (thresholds.py).
"""

import triton
import triton.language as tl

from sparse_attn.ops.topk import destination, half_rows, memory, radix, store, thresholds, tiles
from sparse_attn.ops.topk import table as tables


@triton.jit
def claim_table(memory, LONGEST: tl.constexpr, THREADS: tl.constexpr):
    """The program's table of counters, zero; nothing where there is no search by digits."""
    if THREADS > 0:
        table = tables.claim(memory, LONGEST)
        radix.start(table, THREADS)
        return table
    else:
        return tl.full([], 0, tl.int32)


@triton.jit
def select_held(out, scores, inside, values, key2, key3, table, target, k, THREADS: tl.constexpr):
    """Select among the scores one program holds, those that are ``inside``; values: what is stored for each; key2, key3: where
    thresholds start."""
    if THREADS > 0:
        keys = radix.falling_keys(scores, inside)
        edge, at_key, below = radix.search(table, keys, k, k, THREADS)
        destination.tell(target, tl.minimum(at_key, k))
        if at_key <= k:
            place = store.places_up_to(keys, edge)
            begin = destination.begin(target)
            memory.scatter(out + begin, place, values, keys, edge)
        else:
            above = keys.to(tl.uint32, bitcast=True) < edge.to(tl.uint32, bitcast=True)
            begin = destination.begin(target)
            store.above_and_equal(out + begin, above, keys == edge, values, k - below, 0, 0, THREADS)
    else:
        scores = tl.where(inside, scores, float("-inf"))
        key, at_key, at_next = thresholds.search(scores, key2, key3, k, k)
        destination.tell(target, tl.minimum(at_key, k))
        need = tl.where(at_key <= k, k, k - at_next)
        limit = thresholds.score_of(key)
        begin = destination.begin(target)
        store.above_and_equal(out + begin, scores > limit, scores == limit, values, need, 0, 0, THREADS)
    destination.finish(out, target, begin, tl.minimum(at_key, k))


@triton.jit
def _keys(table, scores, start, end):
    """Of the scores a program holds, those in [start, end)."""
    tl.debug_barrier()
    # A zero that the compiler does not know: it would wait for some scores before it asks for the last.
    zero = tables.load_one(table, tl.full([], tables.ZERO, tl.int32)).to(tl.float32, bitcast=True)
    return radix.held_keys(scores, zero, tl.arange(0, scores.shape[0]), start, end)


@triton.jit
def search_and_mark(table, keys, k, WINDOW: tl.constexpr, THREADS: tl.constexpr):
    """Mark what is to be selected of the keys a program holds: how many are, and of how many the need is for the first that are
    marked equal (all: 0)."""
    if WINDOW > 0:
        edge, at_key, below = radix.search_held(table, keys, k, keys.shape[0] // 4, WINDOW, THREADS)
    else:
        edge, at_key, below = radix.search(table, keys, k, k, THREADS)
    need = tl.where(at_key <= k, 0, k - below)
    store.mark(table, keys, edge, need)
    return tl.minimum(at_key, k), need


@triton.jit
def select_row(
    out, line, base, start, end, table, target, k,
    SLOTS: tl.constexpr, ALIGNED: tl.constexpr, LINES: tl.constexpr, WINDOW: tl.constexpr, HALVES: tl.constexpr,
    FEW: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Select in a row that ends at most SLOTS columns behind ``base``. FEW: whether what a program waits for counts."""
    if HALVES > 0:
        half_rows.select_row(out, line, base, start, end, table, target, k, SLOTS, HALVES, ALIGNED, LINES, FEW, THREADS)
    elif LINES or WINDOW > 0:
        scores = tiles.load_held(line + base, end - base, SLOTS, ALIGNED)
        left = destination.values(target, base - start + tl.arange(0, SLOTS // tiles.LANES) * tiles.LANES)
        count, need = search_and_mark(table, _keys(table, scores, start - base, end - base), k, WINDOW, THREADS)
        destination.tell(target, count)
        if LINES:
            store.marked_lines(out, table, need, left, count, target, SLOTS, THREADS)
        else:
            store.marked(out, table, need, left, count, target, SLOTS)
    else:
        columns = base + tiles.of(SLOTS)
        scores, inside = tiles.load(line, columns, start, end, ALIGNED)
        values = destination.tile(target, base - start, SLOTS)
        zero = tl.full([], 0, tl.int64)
        select_held(out, scores, inside, values, zero, zero + 1, table, target, k, THREADS)


@triton.jit
def search_and_select(out, source, length, guess, table, target, k, CHUNK: tl.constexpr, THREADS: tl.constexpr):
    """Select by reading the whole row again and again; ``guess``: where thresholds start."""
    if THREADS > 0:
        edge, at_key, at_next = radix.search_row(table, source, length, k, CHUNK, THREADS)
        limit = radix.falling_score(edge)
    else:
        key, at_key, at_next = thresholds.search_row(source, length, guess, k, CHUNK)
        limit = thresholds.score_of(key)
    destination.tell(target, tl.minimum(at_key, k))
    need = tl.where(at_key <= k, k, k - at_next)
    begin = destination.begin(target)
    above_before = tl.full([], 0, tl.int32)
    equal_before = tl.full([], 0, tl.int32)
    for base in range(0, length, CHUNK):
        columns = base + tiles.of(CHUNK)
        scores = tl.load(source + columns, mask=columns < length, other=float("-inf"))
        above, equal = store.above_and_equal(
            out + begin, scores > limit, scores == limit, destination.tile(target, base, CHUNK), need, above_before,
            equal_before, THREADS,
        )  # fmt: skip
        above_before += above
        equal_before += equal
    destination.finish(out, target, begin, tl.minimum(at_key, k))
