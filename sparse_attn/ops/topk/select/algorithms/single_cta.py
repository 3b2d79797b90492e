"""Single CTA: one CTA holds a row of at most 32768 scores in registers.

1. Load the row and turn its scores into keys: unsigned integers that ascend as scores fall.
2. Radix select: count digits in a histogram in shared memory, find the bin of the k-th key, and count the next digit of
   the keys in it. On other GPUs search by thresholds: count the scores at or above three keys at a time.
3. Compact: number the selected columns in order and store them, or their cache slots. Selected are the keys above the
   cutoff, and the first of those equal to it.

The row is read once. Counting takes an atomic in shared memory for each score. So the kernel is bound by registers,
which limit the CTAs on an SM, and by barriers.

With bf16 keys (BF16_CHUNK) the CTA holds the row as bf16, two scores to a register. Only scores that share the bf16 of
the k-th are read again.

1. Load the row and truncate it to bf16.
2. Find the row's highest score. Count 2048 digits from there on in a histogram in shared memory, and find the k-th's
   bin. Where the k-th lies behind all of them, count again, in two digits.
3. Mark the slots above that bf16, and those equal to it.
4. Where more slots are equal to it than are needed, read their scores again. Up to one a thread are listed and ranked
   against each other. More are searched by further digits.
5. Compact: marks to a bitmask, a scan of popcounts, then columns or cache slots to the output.

This takes half the registers and a third of the instructions. It is bound by the barriers between steps and, for many
rows, by the stores of step 5.
"""

import triton
import triton.language as tl

from sparse_attn.device import histogram, pdl, ptx_io
from sparse_attn.ops.topk.select.primitives import bf16_select, compact, output, radix_select, threshold_select, tile

BRANCHED = tl.constexpr(16384)  # slots from which on a far shorter row has code of its own


@triton.jit
def select_resident(out, scores, inside, values, key2, key3, smem, output_map, k, THREADS: tl.constexpr):
    """Select among the scores a CTA holds, of which those ``inside`` count. values: what is stored for each score.
    key2, key3: where a search by thresholds starts."""
    if THREADS > 0:
        keys = radix_select.descending_keys(scores, inside)
        cutoff, at_cutoff, below = radix_select.search(smem, keys, k, k, THREADS)
        output.announce(output_map, tl.minimum(at_cutoff, k))
        # All keys up to the cutoff are taken: a key's rank is its place.
        if at_cutoff <= k:
            position = compact.ranks_up_to(keys, cutoff)
            begin = output.begin(output_map)
            ptx_io.scatter(out + begin, position, values, keys, cutoff)
        # Of the keys equal to the cutoff the first ones are taken.
        else:
            above = keys.to(tl.uint32, bitcast=True) < cutoff.to(tl.uint32, bitcast=True)
            begin = output.begin(output_map)
            compact.store_above_and_equal(out + begin, above, keys == cutoff, values, k - below, 0, 0, THREADS)
    else:
        # Without shared memory: by thresholds.
        scores = tl.where(inside, scores, float("-inf"))
        key, at_cutoff, at_next = threshold_select.search(scores, key2, key3, k, k)
        output.announce(output_map, tl.minimum(at_cutoff, k))
        need = tl.where(at_cutoff <= k, k, k - at_next)
        limit = threshold_select.score_of(key)
        begin = output.begin(output_map)
        compact.store_above_and_equal(out + begin, scores > limit, scores == limit, values, need, 0, 0, THREADS)
    output.finish(out, output_map, begin, tl.minimum(at_cutoff, k))


@triton.jit
def search_and_mark(smem, keys, k, WINDOW_SHIFT: tl.constexpr, THREADS: tl.constexpr):
    """Mark the keys to select among those a CTA holds. Returns (how many are selected; how many of the keys marked
    equal are, the first ones; 0 where all are)."""
    if WINDOW_SHIFT > 0:
        cutoff, at_cutoff, below = radix_select.search_resident(
            smem, keys, k, keys.shape[0] // 4, WINDOW_SHIFT, THREADS
        )
    else:
        cutoff, at_cutoff, below = radix_select.search(smem, keys, k, k, THREADS)
    need = tl.where(at_cutoff <= k, 0, k - below)
    compact.mark(smem, keys, cutoff, need)
    return tl.minimum(at_cutoff, k), need


@triton.jit
def _select_row_bf16(
    out, row_ptr, base, start, end, smem, output_map, k,
    SLOTS: tl.constexpr, CHUNK: tl.constexpr, ALIGNED: tl.constexpr, COALESCED: tl.constexpr,
    LATENCY_BOUND: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """select_row for a row held as bf16, of which CHUNK columns are read at once."""
    first, length = start - base, end - base
    chunks = bf16_select.load(row_ptr + base, first, length, length, SLOTS, CHUNK, ALIGNED)
    least, last = bf16_select.first_window(chunks, k, LATENCY_BOUND, THREADS)
    bitmask, count = bf16_select.select(
        smem, (row_ptr + base,), chunks, first, length, least, last, k, output_map,
        SLOTS, LATENCY_BOUND, CHUNK, ALIGNED, THREADS,
    )  # fmt: skip
    word_base = output.values(output_map, base - start + tl.arange(0, SLOTS // 32) * 32)
    if COALESCED:
        compact.store_bitmask_coalesced(out, smem, bitmask, word_base, count, output_map, SLOTS, THREADS)
    else:
        compact.store_bitmask(out, bitmask, word_base, count, output_map)


@triton.jit
def select_row(
    out, row_ptr, base, start, end, smem, output_map, k,
    SLOTS: tl.constexpr, ALIGNED: tl.constexpr, COALESCED: tl.constexpr, WINDOW_SHIFT: tl.constexpr,
    BF16_CHUNK: tl.constexpr, LATENCY_BOUND: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Select in a row that ends at most SLOTS columns behind ``base``. select_single_cta describes the constants."""
    if BF16_CHUNK > 0:
        _select_row_bf16(
            out, row_ptr, base, start, end, smem, output_map, k,
            SLOTS, BF16_CHUNK, ALIGNED, COALESCED, LATENCY_BOUND, THREADS,
        )  # fmt: skip
    elif COALESCED or WINDOW_SHIFT > 0:
        # As fp32, by marks in shared memory.
        scores = tile.load_resident(row_ptr + base, end - base, SLOTS, ALIGNED)
        word_base = output.values(output_map, base - start + tl.arange(0, SLOTS // tile.WORD) * tile.WORD)
        keys = radix_select.loaded_keys(smem, scores, tl.arange(0, SLOTS), start - base, end - base)
        count, need = search_and_mark(smem, keys, k, WINDOW_SHIFT, THREADS)
        output.announce(output_map, count)
        if COALESCED:
            compact.store_marked_coalesced(out, smem, need, word_base, count, output_map, SLOTS, THREADS)
        else:
            compact.store_marked(out, smem, need, word_base, count, output_map, SLOTS)
    else:
        # As fp32, columns in registers beside the keys.
        columns = base + tile.positions(SLOTS)
        scores, inside = tile.load(row_ptr, columns, start, end, ALIGNED)
        values = output.tile_values(output_map, base - start, SLOTS)
        zero = tl.full([], 0, tl.int64)
        select_resident(out, scores, inside, values, zero, zero + 1, smem, output_map, k, THREADS)


@triton.jit(do_not_specialize=["rows", "width", "k", "next_n", "max_blocks", "stride_logits_row"])
def select_single_cta(
    logits,  # fp32 [rows, width]
    row_starts,  # int32 [rows] or None
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
    stride_logits_row,  # in fours when ALIGNED
    stride_starts_row,
    stride_ends_row,
    stride_table_request,
    BLOCK_SIZE: tl.constexpr,
    SLOTS: tl.constexpr,  # at least width
    ALIGNED: tl.constexpr,
    COALESCED: tl.constexpr,  # whether columns are staged in shared memory and stored by whole lines
    WINDOW_SHIFT: tl.constexpr,  # bits behind digits that begin with the highest score; 0: the leading digit first
    BF16_CHUNK: tl.constexpr,  # columns read at once where scores are held as bf16; 0: as fp32
    LATENCY_BOUND: tl.constexpr,  # whether rows are so few that what a CTA waits for counts, not what it issues
    SMEM_WORDS: tl.constexpr,  # behind the histogram
    THREADS: tl.constexpr,  # of the CTA where the search goes by radix digits, by thresholds 0
    REGISTERS: tl.constexpr,  # to claim, or 0: see pdl.claim_registers
    PDL: tl.constexpr,
):
    UNIT: tl.constexpr = 4 if ALIGNED else 1
    row = tl.program_id(0).to(tl.int64)
    if REGISTERS > 0:
        pdl.claim_registers(REGISTERS)
    smem = histogram.claim_cleared(emulated_smem, SMEM_WORDS, THREADS)
    pdl.wait(PDL)
    start, end = tile.row_range(row_starts, row_ends, row, width, stride_starts_row, stride_ends_row)
    row_ptr = logits + row * stride_logits_row * UNIT
    # Aligned loads begin at a multiple of UNIT, before the row's start.
    base = (start // UNIT) * UNIT
    output_map = output.of_row(
        row, k, indptr, states, block_table, rows, next_n, max_blocks, stride_table_request, BLOCK_SIZE, THREADS
    )
    # A row that fits a quarter of the slots is selected by code for a quarter.
    BRANCH: tl.constexpr = SLOTS // 4 if SLOTS >= BRANCHED else 0
    if BRANCH > 0:
        if end - base <= BRANCH:
            select_row(
                out, row_ptr, base, start, end, smem, output_map, k,
                BRANCH, ALIGNED, False, 0, 0, LATENCY_BOUND, THREADS,
            )  # fmt: skip
        else:
            select_row(
                out, row_ptr, base, start, end, smem, output_map, k,
                SLOTS, ALIGNED, COALESCED, WINDOW_SHIFT, BF16_CHUNK, LATENCY_BOUND, THREADS,
            )  # fmt: skip
    else:
        select_row(
            out, row_ptr, base, start, end, smem, output_map, k,
            SLOTS, ALIGNED, COALESCED, WINDOW_SHIFT, BF16_CHUNK, LATENCY_BOUND, THREADS,
        )  # fmt: skip
