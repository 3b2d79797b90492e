"""Many long rows: bounds for all, then the candidates of all, then the selection of all, each as programs that suit it.

A program that does all three for a row waits most of its time: for a sample, for barriers, for a few candidates; only while
it reads its row is memory busy. Here a stage's programs are many and small, and others of the same stage fill its waits.
Candidates are stored with their scores, so that rows are read from DRAM once. Programs that collect the parts of a row take
lines of its room as they come; ``locate`` puts them in order again.
"""

import triton
import triton.language as tl

from sparse_attn.device import chain
from sparse_attn.ops.topk import radix, store, tiles
from sparse_attn.ops.topk import table as tables
from sparse_attn.ops.topk.candidates import collect_part, locate, sampled_bound
from sparse_attn.ops.topk.rows import claim_table, search_and_mark, search_and_select


@triton.jit
def _row_of(
    logits, row_starts, row_ends, row, width, stride_logits_row, stride_starts_row, stride_ends_row, ALIGNED: tl.constexpr
):
    """(column 0 of a row, where what counts of it starts, where that ends)"""
    start, end = tiles.limits(row_starts, row_ends, row, width, stride_starts_row, stride_ends_row)
    return logits + row * stride_logits_row * (4 if ALIGNED else 1), start, end


@triton.jit(do_not_specialize=["width", "keep", "stride_logits_row"])
def bound_rows(
    logits,  # fp32 [rows, width]
    row_starts,  # int32 [rows] or None
    row_ends,  # int32 [rows] or None
    bounds,  # fp32 [rows]: what about ``keep`` scores exceed; nothing for rows of at most SLOTS
    taken,  # int32 [rows]: 0, lines of candidates
    memory,  # None: the table of counters is in shared memory
    width,
    keep,
    stride_logits_row,  # in fours when ALIGNED
    stride_starts_row,
    stride_ends_row,
    SLOTS: tl.constexpr,
    SAMPLES: tl.constexpr,
    RUN: tl.constexpr,
    ALIGNED: tl.constexpr,
    THREADS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    table = claim_table(memory, 0, THREADS)
    chain.wait(CHAINED)
    strides = stride_logits_row, stride_starts_row, stride_ends_row
    line, start, end = _row_of(logits, row_starts, row_ends, row, width, *strides, ALIGNED)
    tl.store(taken + row, 0)
    if end - start > SLOTS:
        _, limit, _ = sampled_bound(line + start, end - start, keep, table, SAMPLES, RUN, THREADS)
        tl.store(bounds + row, limit)


@triton.jit(do_not_specialize=["width", "stride_logits_row"])
def collect_parts(
    logits,  # fp32 [rows, width]
    row_starts,  # int32 [rows] or None
    row_ends,  # int32 [rows] or None
    bounds,  # fp32 [rows]
    taken,  # int32 [rows]
    begins,  # int32 [rows, PARTS]: the first slot of each part's candidates
    counts,  # int32 [rows, PARTS]: how many it has
    columns,  # int32 [rows, SLOTS], relative to the row's start
    scores,  # fp32 [rows, SLOTS]
    memory,
    width,
    stride_logits_row,
    stride_starts_row,
    stride_ends_row,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,  # columns of a part
    PARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    part = tl.program_id(0) % PARTS
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    table = tables.claim(memory, 0)
    chain.wait(CHAINED)
    strides = stride_logits_row, stride_starts_row, stride_ends_row
    line, start, end = _row_of(logits, row_starts, row_ends, row, width, *strides, ALIGNED)
    first = (start // tiles.LANES) * tiles.LANES + part * SPAN
    if (end - start > SLOTS) & (first < end):
        begin, count = collect_part(
            columns + row * SLOTS, scores + row * SLOTS, taken + row, line, start, end, first, tl.load(bounds + row), table,
            SLOTS, CHUNK, SPAN, ALIGNED,
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
    memory,
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
    CHAINED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    table = claim_table(memory, SLOTS // 4, THREADS)
    chain.wait(CHAINED)
    strides = stride_logits_row, stride_starts_row, stride_ends_row
    source, start, end = _row_of(logits, row_starts, row_ends, row, width, *strides, ALIGNED)
    source += start
    length = end - start
    target = row, k
    line = tl.arange(0, SLOTS // tiles.LANES) * tiles.LANES
    lane = tl.arange(0, tiles.LANES)
    held = tl.zeros([SLOTS // tiles.LANES, tiles.LANES], tl.float32)
    inside = line[:, None] + lane[None, :] < length
    whole = length <= SLOTS
    hold = whole
    if whole:
        held = tl.load(source + line[:, None] + lane[None, :], mask=inside)
    else:
        part = tl.arange(0, PARTS)
        there = part * SPAN < end - (start // tiles.LANES) * tiles.LANES
        number = tl.load(counts + row * PARTS + part, mask=there, other=0)
        begin = tl.load(begins + row * PARTS + part, mask=there, other=0)
        place, inside, taken = locate(number, begin, PARTS, SLOTS)
        hold = (taken <= SLOTS) & ((tl.sum(number, 0) >= k) | (tl.load(bounds + row) == float("-inf")))
        line, inside = place, inside & hold
        held = tl.load(scores + row * SLOTS + line[:, None] + lane[None, :], mask=inside, other=0.0)
    if hold:
        keys = tl.reshape(radix.falling_keys(held, inside), [SLOTS])
        count, need = search_and_mark(table, keys, k, 0, THREADS)
        store.marked_lines(out, table, need, line, count, target, SLOTS, THREADS, columns + row * SLOTS, whole)
    else:
        search_and_select(out, source, length, tl.full([], 0, tl.int64), table, target, k, CHUNK, THREADS)


def launch_stages(logits, row_starts, row_ends, out, memory, launch, views, strides, threads, options) -> None:
    """As kernels.launch_top_k: the bounds of launch.reserve rows, then of these at most launch.groups at a time, each time about
    as many. options: of every launch."""
    bounds, taken, begins, counts, columns, scores = views
    rows, width = logits.shape
    parts = {"CHUNK": launch.chunk, "SPAN": launch.span, "PARTS": launch.programs, "SLOTS": launch.slots}

    def inputs(some):
        return logits[some], *(None if limit is None else limit[some] for limit in (row_starts, row_ends))

    for bounded in range(0, rows, launch.reserve):
        end = min(bounded + launch.reserve, rows)
        bound_rows[(end - bounded,)](
            *inputs(slice(bounded, end)), bounds, taken, memory, width, launch.keep, *strides,
            SLOTS=launch.slots, SAMPLES=launch.samples, RUN=launch.run, THREADS=threads, **options,
        )  # fmt: skip
        times = triton.cdiv(end - bounded, launch.groups)
        step = min(triton.cdiv(end - bounded, 16 * times) * 16, launch.groups)  # pointers stay aligned
        for first in range(bounded, end, step):
            some = slice(first, min(first + step, end))
            here = slice(first - bounded, some.stop - bounded)
            number = some.stop - first
            collect_parts[(number * launch.programs,)](
                *inputs(some), bounds[here], taken[here], begins, counts, columns, scores, memory, width, *strides,
                maxnreg=launch.collect_registers, **parts, **options,
            )  # fmt: skip
            select_candidates[(number,)](
                *inputs(some), out[some], bounds[here], begins, counts, columns, scores, memory, width, out.shape[1], *strides,
                THREADS=threads, maxnreg=launch.max_registers, **parts, **options,
            )  # fmt: skip
