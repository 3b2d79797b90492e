"""Cluster: the CTAs of a cluster hold a long row in registers and search it together, in Gluon for Hopper.

1. Each CTA loads its share of the row, neighbouring columns. So CTAs are in order of columns.
2. Each finds its highest score and sends the key that its window begins with, a multiple of four bins, to all.
3. Each counts its keys in a histogram of its own, while the others' first keys arrive. The row's window is the one that
   begins first; a CTA's own begins some bins further on.
4. All histograms are added up: each CTA gets a part of every other's, and sends the sums to all (reduce-scatter and
   all-gather). Then each CTA finds the k-th score's bin as if it were alone.
   Where the k-th score lies behind the window, a second window follows, then the leading digit. Where more than
   MOST_TIES scores share its bin, the next digit does.
5. Each sends the scores that share the bin to all, and how many lie above it. Each ranks them all, the first columns
   among equals. More than MOST_TIES are equal in all bits, and the first ones win.
6. Each stores its columns, or their slots, behind those of the CTAs before it.

A row is read once. The kernel is bound by latency: four trips to the other CTAs, the first of them beside the counting.
README.md has the trips, barriers, shared memory and registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_attn.device import cluster, histogram, packing, ptx_io
from sparse_attn.device.bits import popcount
from sparse_attn.device.hopper import barrier, launch_dependents, wait
from sparse_attn.ops.topk.select.hopper import ties
from sparse_attn.ops.topk.select.hopper.search import (
    ANCHORED,
    BINS,
    GATHERED,
    HEARD,
    MINUS_INF_KEY,
    MOST_TIES,
    NEWS,
    OWN_COUNTS,
    SCATTERED,
    TIED,
    add,
    clear,
    search,
    words,
)
from sparse_attn.ops.topk.select.primitives import radix_select, set_bits

EAGER_SLOTS = gl.constexpr(4096)  # a CTA's columns up to which it reads those behind the row's end rather than wait
COUNT = gl.constexpr(packing.COUNT.value)


# --- device/packing.py for a cluster a row: each CTA waits for the rows before, CTA 0 stores the bounds


@gluon.jit
def slots_of(blocks, columns, max_blocks, BLOCK_SIZE: gl.constexpr):
    """The cache slots of ``columns``. Columns beyond the block table give any value."""
    block_id = ptx_io.look_up(blocks, columns // BLOCK_SIZE, max_blocks)
    return block_id * BLOCK_SIZE + columns % BLOCK_SIZE


@gluon.jit
def tell_later_rows(states, row, rows, count, LINE: gl.constexpr):
    """As packing.tell_later_rows, of at most as many rows as threads; the compiler keeps what CTA 0 adds."""
    later = row + 1 + gl.arange(0, 32, LINE)
    told = count.to(gl.int64) + COUNT
    gl.atomic_add(states + later, told + later.to(gl.int64) * 0, mask=later < rows, sem="relaxed")


@gluon.jit
def told_by_rows_before(states, row):
    """As packing.told_by_rows_before."""
    state = row * 0
    while (state >> 32) < row:
        state = gl.load(states + row, volatile=True)
    return state & 0xFFFFFFFF


@gluon.jit
def store_bounds(indptr, row, rows, begin, count):
    gl.store(indptr + row, begin.to(gl.int32))
    if row == rows - 1:
        gl.store(indptr + rows, (begin + count).to(gl.int32))


@gluon.jit
def unused(row, rows, begin, count, most):
    """Behind all rows, the first of the places that this row leaves of its ``most``."""
    return (rows.to(gl.int64) - row) * most + begin - (most - count)


@gluon.jit
def clear_places(out, first, end, LINE: gl.constexpr):
    """-1 at out[first : end]."""
    for at in range(first, end, 256):
        place = at + gl.arange(0, 256, LINE)
        gl.store(out + place, place * 0 - 1, mask=place < end)


# --- the kernel


@gluon.jit(do_not_specialize=["rows", "width", "k", "next_n", "max_blocks", "stride_logits_row"])
def select_cluster(
    logits,  # fp32 [rows, width]
    row_starts,  # int32 [rows] or None
    row_ends,  # int32 [rows] or None
    out,  # int32 [rows, k], with a block table [rows * k]
    indptr,  # int32 [rows + 1] or None
    states,  # int64 [rows] or None, zero before and after
    block_table,  # int32 [requests, max_blocks] or None
    rows,
    width,
    k,
    next_n,
    max_blocks,
    stride_logits_row,  # in fours when ALIGNED
    stride_starts_row,
    stride_ends_row,
    stride_table_request,
    BLOCK_SIZE: gl.constexpr,
    SLOTS: gl.constexpr,  # columns of a CTA
    ALIGNED: gl.constexpr,
    WINDOW_SHIFT: gl.constexpr,  # bits behind a digit
    CTAS: gl.constexpr,
    THREADS: gl.constexpr,
):
    gl.static_assert(CTAS * MOST_TIES % THREADS == 0)  # of all CTAs' ties a thread has as many as any other
    UNIT: gl.constexpr = 4 if ALIGNED else 1
    ROUNDS: gl.constexpr = SLOTS // (4 * THREADS)
    FOURS: gl.constexpr = cluster.plane([1, 4], [1, 32], [1, THREADS // 32], CTAS)
    LINE: gl.constexpr = cluster.line(THREADS, CTAS)
    row, rank = gl.program_id(0).to(gl.int64), cluster.rank()
    thread = gl.arange(0, THREADS, LINE)
    # Bins are zero, HIGHEST is the last key, counts are zero.
    smem = histogram.claim(None, words(SLOTS))
    clear(smem, THREADS, LINE)
    histogram.store_one(smem, thread * 0 + histogram.HIGHEST, thread * 0 - 1)
    histogram.store_one(smem, OWN_COUNTS + thread % 4, thread * 0)
    # One phase of each mbarrier brings so many bytes. TIED has to wait until it is known how many ties are sent.
    for number in gl.static_range(5):
        cluster.init(smem, ANCHORED + 2 * number)
    cluster.expect(smem, ANCHORED, 4 * CTAS)
    cluster.expect(smem, SCATTERED, 4 * BINS)
    cluster.expect(smem, GATHERED, 4 * BINS)
    cluster.expect(smem, HEARD, 4 * CTAS)
    cluster.arrive()
    barrier()
    # PDL: scores are the launch before's.
    wait()
    launch_dependents()

    start = rank * 0
    end = start + width
    if row_starts is not None:
        start = gl.minimum(gl.maximum(gl.load(row_starts + row * stride_starts_row), 0), width)
    if row_ends is not None:
        end = gl.minimum(gl.maximum(gl.load(row_ends + row * stride_ends_row), 0), width)
    # Aligned loads begin at a multiple of UNIT, before the row's start.
    base = start // UNIT * UNIT
    # A thread has four columns of each round, and a CTA neighbouring columns.
    first = gl.arange(0, ROUNDS, gl.SliceLayout(1, FOURS))[:, None] * (4 * THREADS)
    column = rank * SLOTS + first + gl.arange(0, 4 * THREADS, gl.SliceLayout(0, FOURS))[None, :]
    source = logits + row * stride_logits_row * UNIT + base
    length = end - base
    readable = length
    if SLOTS <= EAGER_SLOTS and row_starts is None:
        readable = width  # known before ``end``, which is on its way
    if ALIGNED:
        scores = gl.load(source + column, mask=column < (readable + 3) // 4 * 4)
    else:
        scores = gl.load(source + column, mask=column < readable)
    # Columns outside the row get the last key.
    keys = radix_select.descending_keys(scores, (column >= start - base) & (column < length))
    value = base - start + rank * SLOTS + thread * (4 * ROUNDS)  # what is stored for a thread's first column
    if block_table is not None:
        value = slots_of(block_table + row // next_n * stride_table_request, value, max_blocks, BLOCK_SIZE)

    # Steps 2 to 4: the k-th score's bin.
    at, shift, below, in_bin = search(smem, keys, k, rank, WINDOW_SHIFT, CTAS, THREADS)
    count = gl.minimum(below + in_bin, k)
    if block_table is not None:
        tell_later_rows(states, row.to(gl.int32), rows, count, LINE)
    # Either all up to the bin are taken, or those that share it are told apart.
    all = below + in_bin <= k
    least = gl.where(at == -1, MINUS_INF_KEY, at + gl.where(all, 1 << shift, 0))
    span = gl.where(all, 0, 1 << shift)
    listed = (all == 0) & (in_bin <= MOST_TIES)
    need = k - below
    cluster.expect(smem, TIED, CTAS * (8 + gl.where(listed, 8 * MOST_TIES, 0)))
    # Step 5: counts go to all CTAs, and ties where they are few.
    numbers = ties.mark(smem, keys, column, rank * SLOTS, least, span, listed)
    ties.send_counts(smem, rank, numbers, CTAS, THREADS)
    if listed:
        ties.send_ties(smem, rank, CTAS, THREADS)
    cluster.await_bytes(smem, TIED, rank * 0)
    # How many of the CTAs before are taken.
    position, tied = ties.counts_before(smem, rank, CTAS)
    if listed:
        position += ties.rank_ties(smem, in_bin, need, rank, SLOTS, CTAS, THREADS)

    # This thread's columns as bits, in order.
    bits, equal = ties.marks_of(smem, thread, ROUNDS)
    # Ties that are equal in all bits: the first ``need`` of the row.
    if (all | listed) == 0:
        each = popcount(equal)
        earlier = tied + gl.associative_scan(each, 0, add) - each
        bits |= ties.first_bits(equal, need - earlier)
        position += gl.minimum(tied, need)
    # Step 6: behind the columns of threads before.
    each = popcount(bits)
    position += gl.associative_scan(each, 0, add) - each
    if block_table is None:
        begin = row * k
    else:
        # Rows are packed: the place is known once all rows before have told their counts.
        begin = told_by_rows_before(states, row)
        barrier()  # all warps know
        cluster.send(smem, NEWS + rank + thread * 0, HEARD, thread * 0, (thread == 0).to(gl.int32), thread)
    set_bits.store(out + begin, bits, position, value)
    if rank == 0:
        if block_table is None:
            clear_places(out + begin, count, k, LINE)
        else:
            store_bounds(indptr, row, rows, begin, count)
            clear_places(out + unused(row, rows, begin, count, k), 0, k - count, LINE)
            # Only when every CTA has read the state may it be zeroed.
            cluster.await_bytes(smem, HEARD, rank * 0)
            gl.store(states + row, row * 0)
