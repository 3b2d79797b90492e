"""Appended: sampled.py for few rows. Candidates are appended to lists in any order, as they come by.

1. Load a sample of the row: a sector of neighbours at a jittered place in each of many strata. Find a score that about
   ``num_candidates`` scores of the row exceed. Meanwhile the CTA's first two tiles are on their way.
2. The CTAs that share the row each read a part of it, a tile ahead of what they append. The scores above the bound and
   their columns go to a list of the CTA. A warp claims places for all its candidates by one atomic.
3. The last CTA to arrive loads the lists and selects k of the candidates. A bit for each selected column puts the
   columns in order.
4. Where there are fewer than k candidates or too many, it streams the row instead (streaming.py): the bound was off, or
   ties fill the row. That is slower and equally exact.

The row is read once. No barrier stands between two tiles.

A candidate is an int64: its column in the lower half, its score's bits in the upper half. The length of a CTA's list is
the word LENGTH of its shared memory. It counts candidates that found no room, too.
"""

import triton
import triton.language as tl

from sparse_attn.device import histogram, pdl
from sparse_attn.device.histogram import LENGTH
from sparse_attn.ops.topk.select.algorithms.sampled import bound_by, jitter
from sparse_attn.ops.topk.select.algorithms.single_cta import select_row
from sparse_attn.ops.topk.select.algorithms.streaming import select_streamed
from sparse_attn.ops.topk.select.primitives import compact, output, radix_select, tile

SECTOR = tl.constexpr(8)  # samples side by side: 32 bytes
PACK = tl.constexpr(16)  # scores of a thread that are appended at once


def _appending() -> str:
    """PTX for a thread's 16 scores. The threads of a warp count theirs, add the counts up, and one of them claims
    places for all."""
    pack = PACK.value
    out, scores, columns, limit, smem, capacity = (pack * operand for operand in range(1, 7))
    compare = " ".join(
        f"setp.gt.f32 p{i}, ${scores + i}, ${limit};  @p{i} add.s32 n{i % 4}, n{i % 4}, 1;" for i in range(pack)
    )
    scan = " ".join(f"shfl.sync.up.b32 up|q, at, {step}, 0, -1;  @q add.s32 at, at, up;" for step in (1, 2, 4, 8, 16))
    store = " ".join(
        f"""mad.wide.u32 to, at, 8, ${out};  @p{i} st.global.v2.b32 [to], {{${columns + i}, ${scores + i}}};
        @p{i} add.s32 at, at, 1;"""
        for i in range(pack)
    )
    predicates = ", ".join(f"p{i}" for i in range(pack))
    results = " ".join(f"mov.u32 ${i}, 0;" for i in range(pack))
    return f"""{{ .reg .pred {predicates}, q; .reg .b32 n0, n1, n2, n3, at, up, total, begin; .reg .b64 to;
    mov.b32 n0, 0; mov.b32 n1, 0; mov.b32 n2, 0; mov.b32 n3, 0;  {compare}
    add.s32 n0, n0, n1;  add.s32 n2, n2, n3;  add.s32 n0, n0, n2;
    mov.b32 at, n0;  {scan}
    shfl.sync.idx.b32 total, at, 31, 31, -1;  setp.eq.s32 q, total, 0;  @q bra DONE;
    mov.u32 begin, %laneid;  setp.eq.u32 q, begin, 0;
    @q atom.shared.add.u32 begin, [${smem} + {4 * LENGTH.value}], total;
    shfl.sync.idx.b32 begin, begin, 0, 31, -1;
    add.s32 total, total, begin;  setp.gt.u32 q, total, ${capacity};  @q bra DONE;
    sub.s32 at, at, n0;  add.s32 at, at, begin;
    {store}
    DONE: {results} }}"""


APPEND = tl.constexpr(_appending())
CONSTRAINTS = tl.constexpr(",".join(["=r"] * PACK.value + ["l"] * PACK.value + ["r"] * (5 * PACK.value)))


@triton.jit
def _append(smem, out, scores, columns, limit, capacity):
    """Append the scores above ``limit`` to the list at ``out``, which has room for ``capacity``. NaN and -inf never lie
    above. Each thread holds a multiple of PACK scores, none of them twice."""
    bits = scores.to(tl.int32, bitcast=True)
    if smem.dtype.is_ptr():
        wanted = scores > limit
        at = tl.atomic_add(smem + LENGTH + tl.zeros_like(columns), 1, mask=wanted)
        candidate = (bits.to(tl.int64) << 32) | columns.to(tl.int64)
        tl.store(out + at, candidate, mask=wanted & (at < capacity))
    else:
        operands = [out, bits, columns, limit.to(tl.int32, bitcast=True), smem, capacity]
        tl.inline_asm_elementwise(APPEND, CONSTRAINTS, operands, dtype=tl.int32, is_pure=False, pack=PACK)


@triton.jit
def _locate(counts, capacity, CTAS: tl.constexpr, SLOTS: tl.constexpr):
    """Where the candidates of a row's CTAS lists lie. The lists are ``capacity`` apart and hold ``counts`` candidates
    each. Returns (the position of each slot's candidate, number of candidates, whether all of them are stored)."""
    slot = tl.arange(0, SLOTS)
    position = slot
    total = tl.full([], 0, tl.int32)
    fits = total == 0
    # Slots run through the lists without gaps, in order of CTAs.
    for cta in tl.static_range(CTAS):
        number = tl.load(counts + cta, cache_modifier=".cg")
        fits = fits & (number <= capacity)
        total += number
        if cta + 1 < CTAS:
            position = tl.where(slot >= total, slot - total + (cta + 1) * capacity, position)
    return position, total, fits


@triton.jit
def _load_candidates(lists, position, number):
    """(keys, columns) of the first ``number`` candidates. Slots beyond have the last key."""
    inside = tl.arange(0, position.shape[0]) < number
    candidate = tl.load(lists + position, mask=inside, other=0, cache_modifier=".cg")
    scores = (candidate >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return radix_select.descending_keys(scores, inside), candidate.to(tl.int32)


@triton.jit
def _load_sample(row_ptr, base, start, end, SAMPLES: tl.constexpr):
    """(SAMPLES scores of the row; 0 where they compete, else 1). The sectors from ``base`` on are cut into strata. Of
    each stratum one sector is taken."""
    # Strata of nearly as many sectors each.
    stratum = tl.arange(0, SAMPLES // SECTOR)
    sectors = (end - base) // SECTOR
    first = stratum * sectors // (SAMPLES // SECTOR)
    last = (stratum + 1) * sectors // (SAMPLES // SECTOR)
    sector = first + jitter(stratum, tl.maximum(last - first, 1))
    columns = (base + sector * SECTOR)[:, None] + tl.arange(0, SECTOR)[None, :]
    return tl.load(row_ptr + columns), (columns < start).to(tl.int32)


@triton.jit
def _load_tile(row_ptr, begin, last, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    """[TILE / 4, 4] scores from ``begin`` on. Scores from ``last`` on have any value. Without a mask: ptxas would wait
    for a load under a mask before it asks for the next."""
    four = begin + tl.arange(0, TILE // 4) * 4
    if ALIGNED:
        four = tl.multiple_of(tl.minimum(four, (last - 1) // 4 * 4), 4)
        return tl.load(row_ptr + (four[:, None] + tl.arange(0, 4)[None, :]))
    else:
        return tl.load(row_ptr + tl.minimum(four[:, None] + tl.arange(0, 4)[None, :], last - 1))


@triton.jit
def _append_tile(smem, out, scores, base, start, begin, last, limit, capacity, TILE: tl.constexpr):
    """Append the candidates of a tile that ends at ``last`` or before."""
    columns = begin + (tl.arange(0, TILE // 4) * 4)[:, None] + tl.arange(0, 4)[None, :]
    if (begin < start) | (begin + TILE > last):
        scores = tl.where((columns >= start) & (columns < last), scores, float("-inf"))
    _append(smem, out, scores, columns - base, limit, capacity)


@triton.jit
def _append_part(
    smem, out, even, odd, row_ptr, base, start, first, last, limit, capacity, TILE: tl.constexpr, ALIGNED: tl.constexpr
):
    """Append the candidates in [first, last), relative to ``base``. even, odd: scores of the first two tiles. One of
    two tiles is always on its way."""
    for begin in range(first, last, 2 * TILE):
        _append_tile(smem, out, even, base, start, begin, last, limit, capacity, TILE)
        even = _load_tile(row_ptr, begin + 2 * TILE, last, TILE, ALIGNED)
        _append_tile(smem, out, odd, base, start, begin + TILE, last, limit, capacity, TILE)
        odd = _load_tile(row_ptr, begin + 3 * TILE, last, TILE, ALIGNED)


@triton.jit
def _bound(
    smem, row_ptr, base, start, end, first, last, num_candidates,
    TILE: tl.constexpr, SAMPLES: tl.constexpr, ALIGNED: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """(the bound; whether it is -inf, as the sample holds too few scores; scores of the first two tiles of [first,
    last))"""
    # The first two tiles are on their way while the sample is searched.
    scores, outside = _load_sample(row_ptr, base, start, end, SAMPLES)
    even = _load_tile(row_ptr, first, last, TILE, ALIGNED)
    odd = _load_tile(row_ptr, first + TILE, last, TILE, ALIGNED)
    keys = radix_select.loaded_keys(smem, scores, outside, 0, 1)
    limit, everything = bound_by(smem, keys, SAMPLES, num_candidates, end - start, THREADS)
    return limit, everything, even, odd


@triton.jit
def _select(
    out, smem, lists, position, number, shift, output_map, k, SLOTS: tl.constexpr, WORDS: tl.constexpr,
    WINDOW_SHIFT: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Select among ``number`` candidates. ``shift`` is added to columns."""
    keys, columns = _load_candidates(lists, position, number)
    cutoff, at_cutoff, below = radix_select.search_resident(smem, keys, k, SLOTS // 4, WINDOW_SHIFT, THREADS)
    word_base = tl.arange(0, WORDS) * tile.WORD + shift
    compact.store_unordered(out, smem, columns, keys, cutoff, at_cutoff, below, k, word_base, output_map)


@triton.jit(do_not_specialize=["width", "k", "num_candidates", "capacity", "stride_logits_row"])
def select_appended(
    logits,  # fp32 [rows, width]
    row_starts,  # int32 [rows] or None
    row_ends,  # int32 [rows] or None
    out,  # int32 [rows, k]
    lists,  # int64 [rows * CTAS, capacity]
    counts,  # int32 [rows * CTAS]
    arrivals,  # int64 [rows], zero before and after
    emulated_smem,  # int32 [CTAs, words] in the interpreter, else None
    width,
    k,
    num_candidates,
    capacity,
    stride_logits_row,  # in fours when ALIGNED
    stride_starts_row,
    stride_ends_row,
    SLOTS: tl.constexpr,  # candidates that are searched at most
    WORDS: tl.constexpr,  # of a bitmask of the row, a power of two
    TILE: tl.constexpr,  # columns read at once
    CHUNK: tl.constexpr,  # columns read at once where the row is streamed
    CTAS: tl.constexpr,  # that share a row
    SAMPLES: tl.constexpr,
    WINDOW_SHIFT: tl.constexpr,
    SMEM_WORDS: tl.constexpr,  # behind the histogram
    ALIGNED: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    UNIT: tl.constexpr = 4 if ALIGNED else 1
    row = tl.program_id(0) // CTAS
    part = tl.program_id(0) % CTAS
    row64 = row.to(tl.int64)
    smem = histogram.claim_cleared(emulated_smem, SMEM_WORDS, THREADS)
    pdl.wait(PDL)
    start, end = tile.row_range(row_starts, row_ends, row64, width, stride_starts_row, stride_ends_row)
    row_ptr = logits + row64 * stride_logits_row * UNIT
    base = (start // tile.WORD) * tile.WORD
    output_map = output.MatrixRow(row64, k)
    # A row that one CTA holds needs no candidates.
    if end - base <= SLOTS:
        if part == 0:
            select_row(out, row_ptr, base, start, end, smem, output_map, k, SLOTS, ALIGNED, False, 0, 0, True, THREADS)
    else:
        # Parts are whole words of 32 columns.
        each = tl.cdiv(tl.cdiv(end - base, CTAS), tile.WORD) * tile.WORD
        first = base + part * each
        last = tl.minimum(first + each, end)
        limit, everything, even, odd = _bound(
            smem, row_ptr, base, start, end, first, last, num_candidates,
            TILE, SAMPLES, ALIGNED, THREADS,
        )  # fmt: skip
        mine = lists + tl.program_id(0).to(tl.int64) * capacity
        _append_part(smem, mine, even, odd, row_ptr, base, start, first, last, limit, capacity, TILE, ALIGNED)
        # All warps have appended.
        tl.debug_barrier()
        found = histogram.load_one(smem, tl.full([], histogram.LENGTH, tl.int32))
        if CTAS > 1:
            tl.store(counts + tl.program_id(0), found)
        tl.debug_barrier()  # the search starts a list of its own in the same word
        # The last CTA of the row has all lists: acq_rel orders their stores before its loads.
        complete = True
        if CTAS > 1:
            complete = tl.atomic_add(arrivals + row, 1, sem="acq_rel") == CTAS - 1
        if complete:
            position = tl.arange(0, SLOTS)
            fits = found <= capacity
            if CTAS > 1:
                tl.store(arrivals + row, 0)
                mine = lists + row64 * CTAS * capacity
                position, found, fits = _locate(counts + row * CTAS, capacity, CTAS, SLOTS)
            # Enough candidates and not too many, or the row is streamed.
            if fits & (found <= SLOTS) & ((found >= k) | everything):
                _select(
                    out, smem, mine, position, found, base - start, output_map, k, SLOTS, WORDS, WINDOW_SHIFT, THREADS
                )
            else:
                zero = tl.full([], 0, tl.int64)
                select_streamed(out, row_ptr + start, end - start, zero, smem, output_map, k, CHUNK, THREADS)
