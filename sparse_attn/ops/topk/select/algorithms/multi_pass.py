"""Multi-pass: the steps of sampled.py for many long rows. Each step is a launch of its own, with CTAs that suit it.

1. ``bound_rows``: one CTA a row takes a sample and stores the row's bound.
2. ``collect_candidates``: one CTA a part of a row collects columns and scores above the bound. Parts append to the
   row's buffer in any order, in words of 32 slots. Rows are read from DRAM once.
3. ``select_candidates``: one CTA a row puts the parts back in order (``locate``) and selects k candidates as single_cta
   does. It streams the row where there are fewer than k candidates or too many.

A CTA that did all three steps would mostly wait: for its sample, for barriers, for a few candidates. Memory would be
busy only while it reads the row. Here each launch has many small CTAs, and some work while others wait.
"""

import triton
import triton.language as tl

from sparse_attn.device import histogram, pdl
from sparse_attn.ops.topk.select.algorithms.sampled import collect_span, locate, sampled_bound
from sparse_attn.ops.topk.select.algorithms.single_cta import search_and_mark
from sparse_attn.ops.topk.select.algorithms.streaming import select_streamed
from sparse_attn.ops.topk.select.primitives import compact, output, radix_select, tile


@triton.jit
def _row_of(
    logits, row_starts, row_ends, row, width, stride_logits_row, stride_starts_row, stride_ends_row,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """(pointer to column 0 of a row, start and end of the columns that compete)"""
    start, end = tile.row_range(row_starts, row_ends, row, width, stride_starts_row, stride_ends_row)
    return logits + row * stride_logits_row * (4 if ALIGNED else 1), start, end


@triton.jit(do_not_specialize=["width", "num_candidates", "stride_logits_row"])
def bound_rows(
    logits,  # fp32 [rows, width]
    row_starts,  # int32 [rows] or None
    row_ends,  # int32 [rows] or None
    bounds,  # fp32 [rows]: what about ``num_candidates`` scores exceed; nothing for rows of at most SLOTS
    taken,  # int32 [rows]: 0, words of 32 candidates
    emulated_smem,  # int32 [CTAs, words] in the interpreter, else None
    width,
    num_candidates,
    stride_logits_row,  # in fours when ALIGNED
    stride_starts_row,
    stride_ends_row,
    SLOTS: tl.constexpr,
    SAMPLES: tl.constexpr,
    RUN: tl.constexpr,
    ALIGNED: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    smem = histogram.claim_cleared(emulated_smem, 0, THREADS)
    pdl.wait(PDL)
    strides = stride_logits_row, stride_starts_row, stride_ends_row
    row_ptr, start, end = _row_of(logits, row_starts, row_ends, row, width, *strides, ALIGNED)
    # Words taken of the row's buffer, which collect_candidates counts up.
    tl.store(taken + row, 0)
    if end - start > SLOTS:
        _, limit, _ = sampled_bound(row_ptr + start, end - start, num_candidates, smem, SAMPLES, RUN, THREADS)
        tl.store(bounds + row, limit)


@triton.jit(do_not_specialize=["width", "stride_logits_row"])
def collect_candidates(
    logits,  # fp32 [rows, width]
    row_starts,  # int32 [rows] or None
    row_ends,  # int32 [rows] or None
    bounds,  # fp32 [rows]
    taken,  # int32 [rows]
    begins,  # int32 [rows, PARTS]: the first slot of each part's candidates
    counts,  # int32 [rows, PARTS]: how many it has
    columns,  # int32 [rows, SLOTS], relative to the row's start
    scores,  # fp32 [rows, SLOTS]
    emulated_smem,
    width,
    stride_logits_row,
    stride_starts_row,
    stride_ends_row,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,  # columns of a part
    PARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(0) % PARTS
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    smem = histogram.claim(emulated_smem, 0)
    pdl.wait(PDL)
    strides = stride_logits_row, stride_starts_row, stride_ends_row
    row_ptr, start, end = _row_of(logits, row_starts, row_ends, row, width, *strides, ALIGNED)
    # Parts begin at a multiple of 32 columns.
    first = (start // tile.WORD) * tile.WORD + part * SPAN
    if (end - start > SLOTS) & (first < end):
        begin, count = collect_span(
            columns + row * SLOTS, scores + row * SLOTS, taken + row, row_ptr, start, end, first, tl.load(bounds + row),
            smem, SLOTS, CHUNK, SPAN, ALIGNED,
        )  # fmt: skip
        tl.store(begins + row * PARTS + part, begin)
        tl.store(counts + row * PARTS + part, count)


@triton.jit(do_not_specialize=["width", "k", "stride_logits_row"])
def select_candidates(
    logits,  # fp32 [rows, width]
    row_starts,  # int32 [rows] or None
    row_ends,  # int32 [rows] or None
    out,  # int32 [rows, k]
    bounds,  # these as before
    begins,
    counts,
    columns,
    scores,
    emulated_smem,
    width,
    k,
    stride_logits_row,
    stride_starts_row,
    stride_ends_row,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    smem = histogram.claim_cleared(emulated_smem, SLOTS // 4, THREADS)
    pdl.wait(PDL)
    strides = stride_logits_row, stride_starts_row, stride_ends_row
    source, start, end = _row_of(logits, row_starts, row_ends, row, width, *strides, ALIGNED)
    source += start
    length = end - start
    output_map = output.MatrixRow(row, k)
    word = tl.arange(0, SLOTS // tile.WORD) * tile.WORD
    bit = tl.arange(0, tile.WORD)
    resident = tl.zeros([SLOTS // tile.WORD, tile.WORD], tl.float32)
    inside = word[:, None] + bit[None, :] < length
    whole = length <= SLOTS
    fits = whole
    # A short row comes as it is; of others the candidates, part by part.
    if whole:
        resident = tl.load(source + word[:, None] + bit[None, :], mask=inside)
    else:
        part = tl.arange(0, PARTS)
        valid = part * SPAN < end - (start // tile.WORD) * tile.WORD
        number = tl.load(counts + row * PARTS + part, mask=valid, other=0)
        begin = tl.load(begins + row * PARTS + part, mask=valid, other=0)
        position, inside, taken = locate(number, begin, PARTS, SLOTS)
        # Enough and not too many; a bound of -inf leaves out nothing.
        fits = (taken <= SLOTS) & ((tl.sum(number, 0) >= k) | (tl.load(bounds + row) == float("-inf")))
        word, inside = position, inside & fits
        resident = tl.load(scores + row * SLOTS + word[:, None] + bit[None, :], mask=inside, other=0.0)
    if fits:
        keys = tl.reshape(radix_select.descending_keys(resident, inside), [SLOTS])
        count, need = search_and_mark(smem, keys, k, 0, THREADS)
        compact.store_marked_coalesced(
            out, smem, need, word, count, output_map, SLOTS, THREADS, columns + row * SLOTS, whole
        )
    else:
        select_streamed(out, source, length, tl.full([], 0, tl.int64), smem, output_map, k, CHUNK, THREADS)
