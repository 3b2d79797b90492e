"""Exact selection without sorting: find a key with exactly k scores at or above it (or the k-th key, when ties straddle
it), then number the chosen scores in column order and store their columns.

A short row is held by one program: its scores or, in half the registers, what bf16 keeps of them (half_rows.py).

A row that no program holds is cut down first. Where the highest scores of its groups came with it, k groups are left
(grouped.py). Where the programs that share it hold it together, each offers its highest scores (dealt.py). Else a sample gives
a bound that about ``keep`` scores exceed, programs that share the row collect the columns above it in order, and the last one
to arrive searches those. If the bound was off, or ties fill the row, that program searches the row itself: slower, equally
exact. Of many rows, these are launches one behind the other (staged.py).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparse_attn.device import chain
from sparse_attn.ops.topk import dealt, destination, grouped, staged, thresholds, tiles
from sparse_attn.ops.topk import table as tables
from sparse_attn.ops.topk.candidates import collect, locate, sampled_bound
from sparse_attn.ops.topk.rows import claim_table, search_and_select, select_held, select_row
from sparse_attn.target import interpreting, target_of

BRANCHED = tl.constexpr(16384)  # slots from which on a far shorter row has code of its own


@triton.jit(do_not_specialize=["rows", "width", "k", "next_n", "max_blocks", "stride_logits_row"])
def select_short_rows(
    logits,  # fp32 [rows, width]
    row_starts,  # int32 [rows] or None
    row_ends,  # int32 [rows] or None
    out,  # int32 [rows, k], with a block table [rows * k]
    indptr,  # int32 [rows + 1] or None
    states,  # int64 [rows] or None, zero before and after
    block_table,  # int32 [requests, max_blocks] or None
    memory,  # None: the table of counters is in shared memory
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
    LINES: tl.constexpr,  # whether what is selected is stored by whole lines
    WINDOW: tl.constexpr,  # bits behind digits that begin with the row's highest score; 0: the leading digit comes first
    HALVES: tl.constexpr,  # columns read at once of which the upper halves are held; 0: whole scores are
    FEW: tl.constexpr,  # whether rows are so few that what a program waits for counts, not what it issues
    LIST: tl.constexpr,  # words behind the table
    THREADS: tl.constexpr,  # of the program, where the search goes by digits, else 0
    REGISTERS: tl.constexpr,  # to claim, or 0: see chain.claim_registers
    CHAINED: tl.constexpr,
):
    UNIT: tl.constexpr = 4 if ALIGNED else 1
    row = tl.program_id(0).to(tl.int64)
    if REGISTERS > 0:
        chain.claim_registers(REGISTERS)
    table = claim_table(memory, LIST, THREADS)
    chain.wait(CHAINED)
    start, end = tiles.limits(row_starts, row_ends, row, width, stride_starts_row, stride_ends_row)
    line = logits + row * stride_logits_row * UNIT
    base = (start // UNIT) * UNIT
    target = destination.of_row(
        row, k, indptr, states, block_table, rows, next_n, max_blocks, stride_table_request, BLOCK_SIZE, THREADS
    )
    BRANCH: tl.constexpr = SLOTS // 4 if SLOTS >= BRANCHED else 0
    if BRANCH > 0:
        if end - base <= BRANCH:
            select_row(out, line, base, start, end, table, target, k, BRANCH, ALIGNED, False, 0, 0, FEW, THREADS)
        else:
            select_row(out, line, base, start, end, table, target, k, SLOTS, ALIGNED, LINES, WINDOW, HALVES, FEW, THREADS)
    else:
        select_row(out, line, base, start, end, table, target, k, SLOTS, ALIGNED, LINES, WINDOW, HALVES, FEW, THREADS)


@triton.jit(do_not_specialize=["rows", "width", "k", "keep", "capacity", "stride_logits_row"])
def select_long_rows(
    logits,  # fp32 [rows, width]
    row_starts,  # int32 [rows] or None
    row_ends,  # int32 [rows] or None
    out,  # int32 [rows, k]
    candidates,  # int32 [groups * PROGRAMS, capacity]
    counts,  # int32 [groups * PROGRAMS]
    arrivals,  # int64 [groups], zero before and after
    memory,  # None: the table of counters is in shared memory
    rows,
    width,
    k,
    keep,
    capacity,
    stride_logits_row,  # in fours when ALIGNED
    stride_starts_row,
    stride_ends_row,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SAMPLED: tl.constexpr,
    SAMPLES: tl.constexpr,
    RUN: tl.constexpr,
    ALIGNED: tl.constexpr,
    THREADS: tl.constexpr,  # of the program, where the search goes by digits, else 0
    CHAINED: tl.constexpr,
):
    UNIT: tl.constexpr = 4 if ALIGNED else 1
    program = tl.program_id(0)
    group = program // PROGRAMS
    part = program % PROGRAMS
    slot = tiles.of(SLOTS)
    table = claim_table(memory, 0, THREADS)
    chain.wait(CHAINED)
    for row in range(group, rows, tl.num_programs(0) // PROGRAMS):
        row64 = tl.full([], 0, tl.int64) + row
        start, end = tiles.limits(row_starts, row_ends, row64, width, stride_starts_row, stride_ends_row)
        length = end - start
        line = logits + row64 * stride_logits_row * UNIT
        target = row64, k
        columns = slot
        inside = slot < length
        key2 = tl.full([], 0, tl.int64)
        key3 = tl.full([], 1, tl.int64)
        hold = (length <= SLOTS) & (part == 0)
        again = (length > SLOTS) & (part == 0)
        if SAMPLED:
            again = again & False
            base = (start // tiles.LANES) * tiles.LANES
            chunks = tl.cdiv(end - base, CHUNK)
            each = tl.maximum(tl.cdiv(chunks, PROGRAMS), 1)
            if (length > SLOTS) & (part * each < chunks):
                bound, limit, everything = sampled_bound(line + start, length, keep, table, SAMPLES, RUN, THREADS)
                mine = candidates + program.to(tl.int64) * capacity
                first = base + part * each * CHUNK
                last = tl.minimum(first + each * CHUNK, end)
                held = collect(
                    mine, line, start, end, first, last, limit, capacity, table, CHUNK, SPAN, ALIGNED, THREADS
                )
                complete = True
                if PROGRAMS > 1:
                    tl.store(counts + program, held)
                    tl.debug_barrier()
                    complete = tl.atomic_add(arrivals + group, 1, sem="acq_rel") == tl.cdiv(chunks, each) - 1
                else:
                    tl.debug_barrier()
                if complete:
                    place = slot
                    inside = slot < held
                    taken = held
                    if PROGRAMS > 1:
                        tl.store(arrivals + group, 0)
                        mate = tl.arange(0, PROGRAMS)
                        number = tl.load(
                            counts + group * PROGRAMS + mate, mask=mate * each < chunks, other=0, cache_modifier=".cg"
                        )
                        held = tl.sum(number, 0)
                        lines, inside, taken = locate(number, mate * capacity, PROGRAMS, SLOTS)
                        place = lines[:, None] + tl.arange(0, tiles.LANES)[None, :]
                        mine = candidates + (group * PROGRAMS).to(tl.int64) * capacity
                    hold = (taken <= SLOTS) & ((held >= k) | everything)
                    again = hold == 0
                    columns = tl.load(mine + place, mask=inside & hold, other=0, cache_modifier=".cg")
                    key2 = tl.where(everything, 0, bound)
                    key3 = tl.where(again, key2 + 1, tl.minimum(key2 + thresholds.OCTAVE, thresholds.BEYOND))
        if hold:
            scores = tl.load(line + start + columns, mask=inside)
            select_held(out, scores, inside, columns, key2, key3, table, target, k, THREADS)
        if again:
            search_and_select(out, line + start, length, key2, table, target, k, CHUNK, THREADS)


class Slots(NamedTuple):
    """Where the selected keys lie: what turns a selection into cache slots, packed row by row.

    indptr: int32 [rows + 1], written. states: int64 [rows], zero before and after. block_table: int32 [requests,
    max_blocks], last dimension contiguous. block_size: a multiple of a tile's line. next_n: rows of a request.
    """

    indptr: torch.Tensor
    states: torch.Tensor
    block_table: torch.Tensor
    block_size: int
    next_n: int


def launch_top_k(logits, row_starts, row_ends, out, launch, views, counters, slots: Slots | None = None) -> None:
    """Select k of every row of ``logits``, in one launch or in stages: columns into out [rows, k], or with ``slots``, then without
    row_starts, into out [rows * k].

    launch: a TopkConfig, with ``slots`` one that packs; views, counters: what its scratch asks for. Where it has ``tops``, the
    view holds the highest scores of groups, without row_starts; a row begins at a multiple of 32 bytes and ends, for the row's
    last group, with -inf.
    """
    rows, width = logits.shape
    k = out.numel() // rows
    stride = logits.stride(0)
    stride_starts = 0 if row_starts is None else row_starts.stride(0)
    stride_ends = 0 if row_ends is None else row_ends.stride(0)
    readable = logits.untyped_storage().nbytes() // 4 - logits.storage_offset() - (rows - 1) * stride
    aligned = stride % 4 == 0 and logits.data_ptr() % 16 == 0 and -(-width // 4) * 4 <= readable
    strides = (stride // 4 if aligned else stride, stride_starts, stride_ends)
    target = target_of(logits.device)
    chained = {"num_warps": launch.num_warps, **chain.chained(target)}
    threads = 32 * launch.num_warps if launch.digits else 0
    programs = (rows if launch.short or launch.tops or launch.staged else launch.groups) * launch.programs
    words = tables.LIST.value + launch.listed
    memory = logits.new_zeros((programs, words), dtype=torch.int32) if threads and interpreting() else None
    if launch.max_registers is not None and not launch.staged:
        chained["maxnreg"] = launch.max_registers
    options = {"ALIGNED": aligned, **chained}
    ragged, sizes, block_size = (None, None, None), (1, 0, 0), 1
    if slots is not None:
        ragged, table, block_size = (slots.indptr, slots.states, slots.block_table), slots.block_table, slots.block_size
        sizes = (slots.next_n, table.shape[1], table.stride(0))
    next_n, max_blocks, stride_table = sizes
    if launch.tops:
        (maxima,) = views
        grouped.select_grouped_rows[(programs,)](
            logits, maxima, row_ends, out, *ragged, memory, rows, width, k, next_n, max_blocks, stride // tiles.GROUP,
            maxima.stride(0) // 4, stride_ends, stride_table,
            BLOCK_SIZE=block_size, TOPS=launch.tops, HELD=launch.slots, SLOTS=triton.next_power_of_2(launch.slots),
            CHUNK=launch.halves, LIST=launch.listed, THREADS=threads, **chained,
        )  # fmt: skip
    elif launch.short:
        select_short_rows[(programs,)](
            logits, row_starts, row_ends, out, *ragged, memory, rows, width, k, next_n, max_blocks, *strides, stride_table,
            BLOCK_SIZE=block_size, SLOTS=launch.slots, LINES=launch.lines, WINDOW=launch.window, HALVES=launch.halves,
            FEW=launch.spread, LIST=launch.listed, THREADS=threads,
            REGISTERS=0 if interpreting() else launch.claimed_registers, **options,
        )  # fmt: skip
    elif launch.held:
        offered, _ = views
        dealt.select_dealt_rows[(programs,)](
            logits, row_starts, row_ends, out, *ragged, offered, counters, memory, rows, width, k, launch.keep, next_n,
            max_blocks, *strides, stride_table, offered.stride(0),
            BLOCK_SIZE=block_size, MOST=launch.slots // launch.programs, HELD=launch.held, PROGRAMS=launch.programs,
            CHUNK=launch.chunk, WINDOW=launch.window, LIST=launch.listed, THREADS=threads, **options,
        )  # fmt: skip
    elif launch.staged:
        staged.launch_stages(logits, row_starts, row_ends, out, memory, launch, views, strides, threads, options)
    else:
        candidates, counts = views if launch.sampled else (out, out)
        select_long_rows[(programs,)](
            logits, row_starts, row_ends, out, candidates, counts, counters, memory, rows, width, k, launch.keep,
            launch.capacity(width), *strides,
            SLOTS=launch.slots, CHUNK=launch.chunk, SPAN=launch.span, PROGRAMS=launch.programs, SAMPLED=launch.sampled,
            SAMPLES=launch.samples, RUN=launch.run, THREADS=threads, **options,
        )  # fmt: skip
