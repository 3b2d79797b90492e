"""One row in one program: search what it holds, or read the row again and again; store what is selected.

Where a program can count in shared memory, the search goes by digits (radix.py), elsewhere by thresholds (thresholds.py).
"""

import triton
import triton.language as tl

from sparse_attn.ops.topk import radix, store, thresholds, tiles
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
def select_held(out, scores, inside, columns, key2, key3, table, k, THREADS: tl.constexpr):
    """Select among the scores one program holds, those that are ``inside``; key2, key3: where thresholds start."""
    if THREADS > 0:
        keys = radix.falling_keys(scores, inside)
        edge, at_key, below = radix.search(table, keys, k, k, THREADS)
        if at_key <= k:
            store.up_to(out, keys, edge, columns)
        else:
            above = keys.to(tl.uint32, bitcast=True) < edge.to(tl.uint32, bitcast=True)
            store.above_and_equal(out, above, keys == edge, columns, k - below, 0, 0, THREADS)
    else:
        scores = tl.where(inside, scores, float("-inf"))
        key, at_key, at_next = thresholds.search(scores, key2, key3, k, k)
        need = tl.where(at_key <= k, k, k - at_next)
        limit = thresholds.score_of(key)
        store.above_and_equal(out, scores > limit, scores == limit, columns, need, 0, 0, THREADS)
    store.none(out, tl.minimum(at_key, k), k)


@triton.jit
def _search_and_mark(table, scores, start, end, k, SLOTS: tl.constexpr, WINDOW: tl.constexpr, THREADS: tl.constexpr):
    """Mark what is to be selected of the SLOTS scores a program holds: how many are, and of how many the need is for the
    first that are marked equal (all: 0)."""
    tl.debug_barrier()
    # A zero that the compiler does not know: it would wait for some scores before it asks for the last.
    zero = tables.load_one(table, tl.full([], tables.ZERO, tl.int32)).to(tl.float32, bitcast=True)
    keys = radix.held_keys(scores, zero, tl.arange(0, SLOTS), start, end)
    edge, at_key, below = radix.search_held(table, keys, k, SLOTS // 4, WINDOW, THREADS)
    need = tl.where(at_key <= k, 0, k - below)
    store.mark(table, keys, edge, need)
    return tl.minimum(at_key, k), need


@triton.jit
def select_row(
    out, line, base, start, end, table, k,
    SLOTS: tl.constexpr, ALIGNED: tl.constexpr, WINDOW: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Select in a row that ends at most SLOTS columns behind ``base``."""
    if WINDOW > 0:
        scores = tiles.load_held(line + base, end - base, SLOTS, ALIGNED)
        number, need = _search_and_mark(table, scores, start - base, end - base, k, SLOTS, WINDOW, THREADS)
        store.marked(out, table, need, base - start, k, SLOTS)
        store.none(out, number, k)
    else:
        columns = base + tiles.of(SLOTS)
        scores, inside = tiles.load(line, columns, start, end, ALIGNED)
        zero = tl.full([], 0, tl.int64)
        select_held(out, scores, inside, columns - start, zero, zero + 1, table, k, THREADS)


@triton.jit
def search_and_select(out, source, length, guess, table, k, CHUNK: tl.constexpr, THREADS: tl.constexpr):
    """Select by reading the whole row again and again; ``guess``: where thresholds start."""
    if THREADS > 0:
        edge, at_key, at_next = radix.search_row(table, source, length, k, CHUNK, THREADS)
        limit = radix.falling_score(edge)
    else:
        key, at_key, at_next = thresholds.search_row(source, length, guess, k, CHUNK)
        limit = thresholds.score_of(key)
    need = tl.where(at_key <= k, k, k - at_next)
    above_before = tl.full([], 0, tl.int32)
    equal_before = tl.full([], 0, tl.int32)
    for base in range(0, length, CHUNK):
        columns = base + tiles.of(CHUNK)
        scores = tl.load(source + columns, mask=columns < length, other=float("-inf"))
        above, equal = store.above_and_equal(
            out, scores > limit, scores == limit, columns, need, above_before, equal_before, THREADS
        )
        above_before += above
        equal_before += equal
    store.none(out, tl.minimum(at_key, k), k)
