"""Group maxima: each row of scores comes with the maximum of every GROUP neighbours. Most scores are never read.

Why this is exact: take the k groups with the highest maxima, the first ones among equals. They hold the k highest
scores, the first ones among equals. A score outside of them has k scores before it, one in each of these groups.

1. Load the row's maxima as bf16; there are an eighth as many as scores. Select k groups as single_cta_bf16 selects
   columns. Where more groups share the bf16 of the k-th and all of them fit, all are taken, and none is read as fp32.
2. Load the scores of these groups as bf16, and select k of them the same way. Step 1 has already given the histogram's
   window.
3. Compact: stage a bitmask of the groups' slots in shared memory, map slots to columns or cache slots, and store whole
   lines.

A row no wider than what step 2 holds skips step 1. The kernel reads width / 8 + 8 * k scores of a row. It is bound by
the barriers of two searches, one after the other.
"""

import triton
import triton.language as tl

from sparse_attn.device import histogram, pdl
from sparse_attn.ops.topk.select.primitives import bf16_keys, bf16_select, compact, output, set_bits, tile


@triton.jit
def _store_coalesced(out, smem, bitmask, count, source, output_map, SLOTS: tl.constexpr, THREADS: tl.constexpr):
    """compact.store_bitmask_coalesced for slots of groups. ``count`` is less than the words of shared memory before the
    list of groups."""
    position = compact.set_bits_before(bitmask)
    begin = output.begin(output_map)
    tl.debug_barrier()
    set_bits.stage(smem, bitmask, position, tl.arange(0, SLOTS // 32) * 32, count)
    tl.debug_barrier()
    # Threads side by side store values side by side.
    for first in range(0, count, 4 * THREADS):
        at = first + tl.arange(0, 4 * THREADS)
        slot = histogram.load_one(smem, tl.minimum(at, count - 1))
        value = output.values(output_map, bf16_select.columns_of(source, slot))
        tl.store(out + begin + at, value, mask=at < count)
    output.finish(out, output_map, begin, count)


@triton.jit
def _list_groups(
    groups, smem, chunks, row_maxima, number, k, TILE: tl.constexpr, CAPACITY: tl.constexpr, CHUNK: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """List the groups to search among ``number``. Returns (how many; the first digit of a window; a digit that
    certainly lies behind the k-th score's)."""
    least, last = bf16_select.first_window(chunks, k, True, THREADS)
    bf16, below, in_bin = bf16_select.search(smem, chunks, least, last, number, k, True, CHUNK, THREADS)
    bf16_select.mark(smem, chunks, bf16, CHUNK)
    # All that share the k-th's bf16 where they fit, so that none is told apart.
    need = tl.where(below + in_bin <= CAPACITY, in_bin, k - below)
    bitmask = bf16_select.marked_bitmask(
        smem, (row_maxima,), last * 0, number, bf16, need, in_bin, TILE, True, THREADS
    )  # fmt: skip
    set_bits.stage(groups, bitmask, compact.set_bits_before(bitmask), tl.arange(0, TILE // 32) * 32, CAPACITY)
    return below + need, least, tl.minimum(bf16_keys.key_of(bf16) - least + 1, histogram.BINS - 1)


@triton.jit(do_not_specialize=["rows", "width", "k", "next_n", "max_blocks", "stride_logits_row", "stride_maxima_row"])
def select_group_maxima(
    logits,  # fp32 [rows, width]
    maxima,  # fp32 [rows, cdiv(width, GROUP)]
    row_ends,  # int32 [rows] or None
    out,  # int32 [rows, k], with a block table [rows * k]
    indptr,  # int32 [rows + 1] or None
    states,  # int64 [rows] or None, zero before and after
    block_table,  # int32 [requests, max_blocks] or None
    emulated_smem,  # int32 [CTAs, words] in the interpreter, else None
    rows,
    width,
    k,
    next_n,
    max_blocks,
    stride_logits_row,  # in groups
    stride_maxima_row,  # in fours
    stride_ends_row,
    stride_table_request,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,  # maxima held, a power of two
    HELD: tl.constexpr,  # scores of groups held, GROUP * k at least
    SLOTS: tl.constexpr,  # HELD, rounded up to a power of two
    CHUNK: tl.constexpr,  # scores read at once
    SMEM_WORDS: tl.constexpr,  # behind the histogram
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    smem = histogram.claim_cleared(emulated_smem, SMEM_WORDS, THREADS)
    pdl.wait(PDL)
    _, end = tile.row_range(None, row_ends, row, width, 0, stride_ends_row)
    output_map = output.of_row(
        row, k, indptr, states, block_table, rows, next_n, max_blocks, stride_table_request, BLOCK_SIZE, THREADS
    )
    row_maxima = maxima + row * stride_maxima_row * 4
    number = tl.cdiv(end, tile.GROUP)
    zero = tl.full([], 0, tl.int32)
    # As many as the widest row has: the loads need not wait for the row's end.
    chunks = bf16_select.load(row_maxima, zero, number, tl.cdiv(width, tile.GROUP), TILE, CHUNK, True)
    CAPACITY: tl.constexpr = HELD // tile.GROUP
    groups = histogram.after(smem, histogram.WORDS + SLOTS // 16 + THREADS)
    # A narrow row: every group is listed, in its place.
    whole = end <= HELD  # all groups are searched
    if whole:
        position = tl.minimum(tl.arange(0, SLOTS // tile.GROUP), CAPACITY - 1)
        histogram.store_one(groups, position, position)
        listed, least, last = number, zero, zero + (histogram.BINS - 1)
    else:
        listed, least, last = _list_groups(groups, smem, chunks, row_maxima, number, k, TILE, CAPACITY, CHUNK, THREADS)
    # Marks of slots that no chunk covers.
    bf16_select.clear_marks(smem, HELD, SLOTS)
    tl.debug_barrier()
    # From here on the row is the listed groups' scores, GROUP slots each.
    source = logits + row * stride_logits_row * tile.GROUP, groups
    length = listed * tile.GROUP
    chunks = bf16_select.load_groups(source, length, HELD, CHUNK)
    if whole:
        least, last = bf16_select.first_window(chunks, k, True, THREADS)
    bitmask, count = bf16_select.select(
        smem, source, chunks, zero, length, least, last, k, output_map, SLOTS, True, CHUNK, True, THREADS
    )
    _store_coalesced(out, smem, bitmask, count, source, output_map, SLOTS, THREADS)
