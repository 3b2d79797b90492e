"""Multi-CTA: several CTAs hold one long row in registers, interleaved by sectors.

1. Each CTA loads every CTAS-th sector of the row. So each holds about the same number of the highest scores. It
   radix-selects its own highest scores and offers them: their columns, their keys, and the last key it offered.
2. The last CTA to arrive loads all offers and selects k of them. The cutoff is exact where no CTA could have offered
   more at or above it.
3. It sets a bit for each selected column in a bitmask in shared memory, which puts the columns in order. It stores what
   the set bits stand for.
4. Where a CTA held more of the selected scores than it offered, or where ties fill its offer, the last CTA streams the
   row instead (streaming.py). That is slower and equally exact.

The row is read once, and no sample is taken first. The cost is the trip through L2 between steps 1 and 2, and one CTA's
search of the offers.
"""

import triton
import triton.language as tl

from sparse_attn.device import histogram, pdl, ptx_io
from sparse_attn.ops.topk.select.algorithms.single_cta import select_row
from sparse_attn.ops.topk.select.algorithms.streaming import select_streamed
from sparse_attn.ops.topk.select.primitives import compact, output, radix_select, tile

SECTOR = tl.constexpr(8)  # columns that stay together: 32 bytes
NOTHING = tl.constexpr(0)  # a key that no score has: nothing was offered


@triton.jit
def _interleaved(base, part, RESIDENT: tl.constexpr, CTAS: tl.constexpr):
    """The columns of a CTA, ascending, [RESIDENT / SECTOR, SECTOR]. The CTA takes one of every CTAS sectors. Which one
    changes from round to round, so that scores with a period do not all go to one CTA."""
    # A round has CTAS sectors, one for each CTA, whose order differs from round to round.
    round = tl.arange(0, RESIDENT // SECTOR)
    turn = (part ^ round ^ (round >> 4) ^ (round >> 8)) & (CTAS - 1)
    first = base + (round * CTAS + turn) * SECTOR
    return first[:, None] + tl.arange(0, SECTOR)[None, :]


@triton.jit
def _offer(
    mine, row_ptr, base, start, end, part, smem, least,
    MOST: tl.constexpr, RESIDENT: tl.constexpr, CTAS: tl.constexpr, WINDOW_SHIFT: tl.constexpr, ALIGNED: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """Store a CTA's highest scores, at least ``least`` and at most MOST of them. ``mine`` receives their columns
    relative to ``base``, then MOST keys (-1 where there is none), then the last key that was stored."""
    columns = _interleaved(base, part, RESIDENT, CTAS)
    scores, inside = tile.load(row_ptr, columns, start, end, ALIGNED)
    keys = tl.reshape(radix_select.descending_keys(scores, inside), [RESIDENT // tile.WORD, tile.WORD])
    columns = tl.reshape(columns - base, [RESIDENT // tile.WORD, tile.WORD])
    # From ``least`` to MOST of this CTA's highest.
    cutoff, number, _ = radix_select.search_windowed(smem, keys, least, MOST, WINDOW_SHIFT, THREADS)
    # Ties beyond MOST: nothing is offered, and the row will be streamed.
    fits = number <= MOST
    last = tl.where(fits, cutoff, NOTHING)
    position = compact.ranks_up_to(keys, last)
    ptx_io.scatter(mine, position, columns, keys, last)
    ptx_io.scatter(mine + MOST, position, keys, keys, last)
    # Places behind the offer have the last key.
    slot = tl.arange(0, MOST)
    tl.store(mine + MOST + slot, tl.full([MOST], -1, tl.int32), mask=slot >= tl.where(fits, number, 0))
    tl.store(mine + 2 * MOST, last)


@triton.jit
def _select_offered(
    out, offered, stride, shift, smem, output_map, k,
    MOST: tl.constexpr, RESIDENT: tl.constexpr, CTAS: tl.constexpr, WINDOW_SHIFT: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Select among the CTAs' offers, which lie ``stride`` apart; ``shift`` is added to columns. Returns whether the
    offers were enough. If not, nothing is stored."""
    SLOTS: tl.constexpr = MOST * CTAS
    WORDS: tl.constexpr = RESIDENT * CTAS // tile.WORD
    word = tl.arange(0, WORDS)
    word_base = output.values(output_map, word * tile.WORD + shift)
    slot = tl.arange(0, SLOTS)
    source = offered + (slot // MOST) * stride + slot % MOST
    # .cg: other CTAs wrote the offers.
    lasts = tl.load(offered + tl.arange(0, CTAS) * stride + 2 * MOST, cache_modifier=".cg")
    keys = tl.load(source + MOST, cache_modifier=".cg")
    columns = tl.load(source, mask=keys != -1, other=0, cache_modifier=".cg")
    cutoff, at_cutoff, below = radix_select.search_resident(smem, keys, k, SLOTS // 4, WINDOW_SHIFT, THREADS)
    # No CTA has kept back a key at or below the cutoff.
    bound = tl.min(lasts.to(tl.uint32, bitcast=True))
    enough = cutoff.to(tl.uint32, bitcast=True) <= bound
    if enough:
        output.announce(output_map, tl.minimum(at_cutoff, k))
        compact.store_unordered(out, smem, columns, keys, cutoff, at_cutoff, below, k, word_base, output_map)
    return enough


@triton.jit(
    do_not_specialize=["rows", "width", "k", "least", "next_n", "max_blocks", "stride_logits_row", "stride_offered"]
)
def select_multi_cta(
    logits,  # fp32 [rows, width]
    row_starts,  # int32 [rows] or None
    row_ends,  # int32 [rows] or None
    out,  # int32 [rows, k], with a block table [rows * k]
    indptr,  # int32 [rows + 1] or None
    states,  # int64 [rows] or None, zero before and after
    block_table,  # int32 [requests, max_blocks] or None
    offered,  # int32 [rows * CTAS, stride_offered], 2 * MOST + 1 at least
    arrivals,  # int64 [rows], zero before and after
    emulated_smem,  # int32 [CTAs, words] in the interpreter, else None
    rows,
    width,
    k,
    least,  # scores a CTA offers
    next_n,
    max_blocks,
    stride_logits_row,  # in fours when ALIGNED
    stride_starts_row,
    stride_ends_row,
    stride_table_request,
    stride_offered,
    BLOCK_SIZE: tl.constexpr,
    MOST: tl.constexpr,  # scores a CTA offers
    RESIDENT: tl.constexpr,  # scores a CTA holds
    CTAS: tl.constexpr,  # that share a row
    CHUNK: tl.constexpr,  # columns read at once where the row is streamed
    WINDOW_SHIFT: tl.constexpr,
    SMEM_WORDS: tl.constexpr,  # behind the histogram
    ALIGNED: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    UNIT: tl.constexpr = 4 if ALIGNED else 1
    SLOTS: tl.constexpr = MOST * CTAS
    row = tl.program_id(0) // CTAS
    part = tl.program_id(0) % CTAS
    row64 = row.to(tl.int64)
    smem = histogram.claim_cleared(emulated_smem, SMEM_WORDS, THREADS)
    pdl.wait(PDL)
    start, end = tile.row_range(row_starts, row_ends, row64, width, stride_starts_row, stride_ends_row)
    row_ptr = logits + row64 * stride_logits_row * UNIT
    base = (start // tile.WORD) * tile.WORD
    output_map = output.of_row(
        row64, k, indptr, states, block_table, rows, next_n, max_blocks, stride_table_request, BLOCK_SIZE, THREADS
    )
    # A row that one CTA holds needs no offers.
    if end - base <= SLOTS:
        if part == 0:
            select_row(out, row_ptr, base, start, end, smem, output_map, k, SLOTS, ALIGNED, False, 0, 0, True, THREADS)
    else:
        first = offered + (row * CTAS).to(tl.int64) * stride_offered
        _offer(
            first + part * stride_offered, row_ptr, base, start, end, part, smem, least,
            MOST, RESIDENT, CTAS, WINDOW_SHIFT, ALIGNED, THREADS,
        )  # fmt: skip
        # All of this CTA's offer is stored before it says so.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + row, 1, sem="acq_rel") == CTAS - 1:
            tl.store(arrivals + row, 0)
            if not _select_offered(
                out, first, stride_offered, base - start, smem, output_map, k,
                MOST, RESIDENT, CTAS, WINDOW_SHIFT, THREADS,
            ):  # fmt: skip
                zero = tl.full([], 0, tl.int64)
                select_streamed(out, row_ptr + start, end - start, zero, smem, output_map, k, CHUNK, THREADS)
