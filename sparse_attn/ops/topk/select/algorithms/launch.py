"""A launcher for each algorithm."""

from __future__ import annotations

import torch
import triton

from sparse_attn.device import histogram, pdl
from sparse_attn.framework.target import interpreting, target_of
from sparse_attn.ops.topk.select import fake
from sparse_attn.ops.topk.select.algorithms import appended as appended_kernels
from sparse_attn.ops.topk.select.algorithms import group_maxima as group_maxima_kernels
from sparse_attn.ops.topk.select.algorithms import multi_cta as multi_cta_kernels
from sparse_attn.ops.topk.select.algorithms import multi_pass as multi_pass_kernels
from sparse_attn.ops.topk.select.algorithms import sampled as sampled_kernels
from sparse_attn.ops.topk.select.algorithms import single_cta as single_cta_kernels
from sparse_attn.ops.topk.select.hopper import kernels as hopper
from sparse_attn.ops.topk.select.plan import (
    RADIX,
    WINDOW_SHIFT,
    Appended,
    Cluster,
    GroupMaxima,
    MultiCta,
    MultiPass,
    Plan,
    Sampled,
    Selection,
    SingleCta,
    SingleCtaBf16,
    Streaming,
    power_of_two,
)


def single_cta(selection: Selection, plan: SingleCta | SingleCtaBf16) -> None:
    """One CTA a row."""
    logits, k, aligned = selection.logits, selection.k, selection.aligned
    rows, width = logits.shape
    next_n, max_blocks, stride_table, block_size = selection.paging
    if isinstance(plan, SingleCtaBf16):
        threads, window_shift, chunk = 32 * plan.num_warps, 0, plan.chunk
    else:
        threads, window_shift, chunk = _threads(plan), plan.window_shift, 0
    registers = plan.max_registers or 0
    single_cta_kernels.select_single_cta[(rows,)](
        logits, selection.row_starts, selection.row_ends, selection.out, *selection.output_map,
        _emulated_smem(logits, rows, plan, threads), rows, width, k, next_n, max_blocks, *selection.strides(aligned),
        stride_table,
        BLOCK_SIZE=block_size, SLOTS=plan.slots, ALIGNED=aligned, COALESCED=plan.coalesced, WINDOW_SHIFT=window_shift,
        BF16_CHUNK=chunk, LATENCY_BOUND=plan.spread, SMEM_WORDS=plan.smem_words, THREADS=threads,
        REGISTERS=registers if plan.spread and not interpreting() else 0,
        **_options(plan.num_warps, plan.max_registers, logits.device),
    )  # fmt: skip


def group_maxima(selection: Selection, plan: GroupMaxima) -> None:
    """One CTA a row. The scratch holds the rows' maxima. Rows have no starts, begin at multiples of 32 bytes, and end
    with -inf up to a whole group."""
    logits, row_ends, k = selection.logits, selection.row_ends, selection.k
    rows, width = logits.shape
    (maxima,) = selection.views
    next_n, max_blocks, stride_table, block_size = selection.paging
    threads = 32 * plan.num_warps
    group_maxima_kernels.select_group_maxima[(rows,)](
        logits, maxima, row_ends, selection.out, *selection.output_map, _emulated_smem(logits, rows, plan, threads),
        rows, width, k, next_n, max_blocks, logits.stride(0) // fake.GROUP, maxima.stride(0) // 4,
        0 if row_ends is None else row_ends.stride(0), stride_table,
        BLOCK_SIZE=block_size, TILE=plan.tile, HELD=plan.slots, SLOTS=power_of_two(plan.slots), CHUNK=plan.chunk,
        SMEM_WORDS=plan.smem_words, THREADS=threads, **_options(plan.num_warps, plan.max_registers, logits.device),
    )  # fmt: skip


def cluster(selection: Selection, plan: Cluster) -> None:
    """A cluster a row."""
    logits, aligned = selection.logits, selection.aligned
    rows, width = logits.shape
    next_n, max_blocks, stride_table, block_size = selection.paging
    hopper.select_cluster[(rows,)](
        logits, selection.row_starts, selection.row_ends, selection.out, *selection.output_map, rows, width,
        selection.k, next_n, max_blocks, *selection.strides(aligned), stride_table,
        BLOCK_SIZE=block_size, SLOTS=plan.slots, ALIGNED=aligned, WINDOW_SHIFT=plan.window_shift,
        CTAS=plan.ctas_per_row, THREADS=32 * plan.num_warps, num_warps=plan.num_warps, num_ctas=plan.ctas_per_row,
        launch_pdl=True,
    )  # fmt: skip


def multi_cta(selection: Selection, plan: MultiCta) -> None:
    """All CTAs of all rows at once."""
    logits, aligned = selection.logits, selection.aligned
    rows, width = logits.shape
    offered, _ = selection.views
    next_n, max_blocks, stride_table, block_size = selection.paging
    ctas, threads = plan.ctas(rows), 32 * plan.num_warps
    multi_cta_kernels.select_multi_cta[(ctas,)](
        logits, selection.row_starts, selection.row_ends, selection.out, *selection.output_map, offered,
        selection.counters, _emulated_smem(logits, ctas, plan, threads), rows, width, selection.k,
        plan.candidates, next_n, max_blocks, *selection.strides(aligned), stride_table, offered.stride(0),
        BLOCK_SIZE=block_size, MOST=plan.slots // plan.ctas_per_row, RESIDENT=plan.resident, CTAS=plan.ctas_per_row,
        CHUNK=plan.chunk, WINDOW_SHIFT=WINDOW_SHIFT, SMEM_WORDS=plan.smem_words, ALIGNED=aligned,
        THREADS=threads,
        **_options(plan.num_warps, None, logits.device),
    )  # fmt: skip


def sampled(selection: Selection, plan: Sampled) -> None:
    """One launch. The last CTA of a row to arrive selects."""
    candidates, counts = selection.views
    bound, width = plan.bound, selection.logits.shape[1]
    _long_rows(
        selection, plan, candidates, counts, plan.ctas_per_row, bound.candidates, plan.capacity(width),
        SPAN=plan.span, SAMPLED=True, SAMPLES=bound.samples, RUN=bound.run,
    )  # fmt: skip


def appended(selection: Selection, plan: Appended) -> None:
    """All CTAs of all rows at once. The last CTA of a row to arrive selects."""
    logits, aligned = selection.logits, selection.aligned
    candidates, counts = selection.views
    ctas, threads = plan.ctas(logits.shape[0]), 32 * plan.num_warps
    appended_kernels.select_appended[(ctas,)](
        logits, selection.row_starts, selection.row_ends, selection.out, candidates.view(torch.int64), counts,
        selection.counters, _emulated_smem(logits, ctas, plan, threads), logits.shape[1], selection.k,
        plan.bound.candidates, plan.slots, *selection.strides(aligned),
        SLOTS=plan.slots, WORDS=plan.words, TILE=plan.tile, CHUNK=plan.chunk, CTAS=plan.ctas_per_row,
        SAMPLES=plan.bound.samples, WINDOW_SHIFT=WINDOW_SHIFT,
        SMEM_WORDS=plan.smem_words, ALIGNED=aligned, THREADS=threads,
        **_options(plan.num_warps, None, logits.device),
    )  # fmt: skip


def streaming(selection: Selection, plan: Streaming) -> None:
    """One CTA a row, and no candidates."""
    out = selection.out
    _long_rows(selection, plan, out, out, 1, 0, 0, SPAN=0, SAMPLED=False, SAMPLES=0, RUN=1)


def _long_rows(
    selection: Selection,
    plan: Sampled | Streaming,
    candidates: torch.Tensor,
    counts: torch.Tensor,
    ctas_per_row: int,
    num_candidates: int,
    capacity: int,
    **constants: int | bool,
) -> None:
    logits, aligned = selection.logits, selection.aligned
    rows, width = logits.shape
    ctas, threads = plan.ctas(rows), _threads(plan)
    sampled_kernels.select_sampled[(ctas,)](
        logits, selection.row_starts, selection.row_ends, selection.out, candidates, counts, selection.counters,
        _emulated_smem(logits, ctas, plan, threads), rows, width, selection.k, num_candidates, capacity,
        *selection.strides(aligned),
        SLOTS=plan.slots, CHUNK=plan.chunk, CTAS=ctas_per_row, ALIGNED=aligned, THREADS=threads, **constants,
        **_options(plan.num_warps, plan.max_registers, logits.device),
    )  # fmt: skip


def multi_pass(selection: Selection, plan: MultiPass) -> None:
    """Bounds for plan.bounded_rows rows, then the other passes for at most plan.rows_in_flight of these at a time,
    evenly cut."""
    logits, row_starts, row_ends, out, views, _, _ = selection
    bounds, taken, begins, counts, columns, scores = views
    rows, width = logits.shape
    aligned, threads = selection.aligned, 32 * plan.num_warps
    smem = _emulated_smem(logits, rows * plan.ctas_per_row, plan, threads)
    strides = selection.strides(aligned)
    options = {"ALIGNED": aligned, **_options(plan.num_warps, None, logits.device)}
    parts = {"SLOTS": plan.slots, "CHUNK": plan.chunk, "SPAN": plan.span, "PARTS": plan.ctas_per_row}

    def inputs(some: slice) -> tuple[torch.Tensor | None, ...]:
        return logits[some], *(None if limit is None else limit[some] for limit in (row_starts, row_ends))

    for bounded in range(0, rows, plan.bounded_rows):
        end = min(bounded + plan.bounded_rows, rows)
        multi_pass_kernels.bound_rows[(end - bounded,)](
            *inputs(slice(bounded, end)), bounds, taken, smem, width, plan.bound.candidates, *strides,
            SLOTS=plan.slots, SAMPLES=plan.bound.samples, RUN=plan.bound.run, THREADS=threads, **options,
        )  # fmt: skip
        times = triton.cdiv(end - bounded, plan.rows_in_flight)
        step = min(triton.cdiv(end - bounded, 16 * times) * 16, plan.rows_in_flight)  # pointers stay aligned
        for first in range(bounded, end, step):
            some = slice(first, min(first + step, end))
            here = slice(first - bounded, some.stop - bounded)
            number = some.stop - first
            multi_pass_kernels.collect_candidates[(number * plan.ctas_per_row,)](
                *inputs(some), bounds[here], taken[here], begins, counts, columns, scores, smem, width, *strides,
                maxnreg=plan.collect_registers, **parts, **options,
            )  # fmt: skip
            multi_pass_kernels.select_candidates[(number,)](
                *inputs(some), out[some], bounds[here], begins, counts, columns, scores, smem, width, out.shape[1],
                *strides, THREADS=threads, maxnreg=plan.max_registers, **parts, **options,
            )  # fmt: skip


def _threads(plan: SingleCta | Sampled | Streaming) -> int:
    """Threads of a CTA that counts in shared memory, else 0."""
    return 32 * plan.num_warps if plan.search == RADIX else 0


def _options(num_warps: int, max_registers: int | None, device: torch.device) -> dict[str, int | bool]:
    options = {"num_warps": num_warps, **pdl.launched(target_of(device))}
    return options if max_registers is None else {"maxnreg": max_registers, **options}


def _emulated_smem(logits: torch.Tensor, ctas: int, plan: Plan, threads: int) -> torch.Tensor | None:
    """In the interpreter, the shared memory of all CTAs that count there."""
    if not threads or not interpreting():
        return None
    return logits.new_zeros((ctas, histogram.WORDS.value + plan.smem_words), dtype=torch.int32)
