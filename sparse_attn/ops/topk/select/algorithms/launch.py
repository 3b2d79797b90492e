"""A launcher for each algorithm."""

from __future__ import annotations

from collections.abc import Sequence

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
    rows, (next_n, max_blocks, stride_table) = selection.logits.shape[0], selection.paging
    threads, window_shift, chunk = _threads(plan), 0, 0
    if isinstance(plan, SingleCtaBf16):
        chunk = plan.chunk
    else:
        window_shift = plan.window_shift
    single_cta_kernels.select_single_cta[(rows,)](
        *selection.inputs,
        *selection.output_map,
        _emulated_smem(selection, rows, plan),
        *selection.sizes,
        next_n,
        max_blocks,
        *selection.strides,
        stride_table,
        BLOCK_SIZE=selection.block_size,
        SLOTS=plan.slots,
        ALIGNED=selection.aligned,
        COALESCED=plan.coalesced,
        WINDOW_SHIFT=window_shift,
        BF16_CHUNK=chunk,
        LATENCY_BOUND=plan.spread,
        SMEM_WORDS=plan.smem_words,
        THREADS=threads,
        REGISTERS=plan.max_registers or 0 if plan.spread and not interpreting() else 0,
        **_options(selection, plan, plan.max_registers),
    )


def group_maxima(selection: Selection, plan: GroupMaxima) -> None:
    """One CTA a row. The scratch holds the rows' maxima. Rows have no starts, begin at multiples of 32 bytes, and end
    with -inf up to a whole group."""
    logits, _, row_ends, out = selection.inputs
    (maxima,) = selection.views
    next_n, max_blocks, stride_table = selection.paging
    rows = selection.logits.shape[0]
    group_maxima_kernels.select_group_maxima[(rows,)](
        logits,
        maxima,
        row_ends,
        out,
        *selection.output_map,
        _emulated_smem(selection, rows, plan),
        *selection.sizes,
        next_n,
        max_blocks,
        selection.logits.stride(0) // fake.GROUP,
        maxima.stride(0) // 4,
        0 if row_ends is None else row_ends.stride(0),
        stride_table,
        BLOCK_SIZE=selection.block_size,
        TILE=plan.tile,
        HELD=plan.slots,
        SLOTS=power_of_two(plan.slots),
        CHUNK=plan.chunk,
        SMEM_WORDS=plan.smem_words,
        THREADS=_threads(plan),
        **_options(selection, plan, plan.max_registers),
    )


def cluster(selection: Selection, plan: Cluster) -> None:
    """A cluster a row."""
    next_n, max_blocks, stride_table = selection.paging
    hopper.select_cluster[(selection.logits.shape[0],)](
        *selection.inputs,
        *selection.output_map,
        *selection.sizes,
        next_n,
        max_blocks,
        *selection.strides,
        stride_table,
        BLOCK_SIZE=selection.block_size,
        SLOTS=plan.slots,
        ALIGNED=selection.aligned,
        WINDOW_SHIFT=plan.window_shift,
        CTAS=plan.ctas_per_row,
        THREADS=_threads(plan),
        num_warps=plan.num_warps,
        num_ctas=plan.ctas_per_row,
        launch_pdl=True,
    )


def multi_cta(selection: Selection, plan: MultiCta) -> None:
    """All CTAs of all rows at once."""
    offered, _ = selection.views
    next_n, max_blocks, stride_table = selection.paging
    ctas = plan.ctas(selection.logits.shape[0])
    multi_cta_kernels.select_multi_cta[(ctas,)](
        *selection.inputs,
        *selection.output_map,
        offered,
        selection.counters,
        _emulated_smem(selection, ctas, plan),
        *selection.sizes,
        plan.candidates,
        next_n,
        max_blocks,
        *selection.strides,
        stride_table,
        offered.stride(0),
        BLOCK_SIZE=selection.block_size,
        MOST=plan.slots // plan.ctas_per_row,
        RESIDENT=plan.resident,
        CTAS=plan.ctas_per_row,
        CHUNK=plan.chunk,
        WINDOW_SHIFT=WINDOW_SHIFT,
        SMEM_WORDS=plan.smem_words,
        ALIGNED=selection.aligned,
        THREADS=_threads(plan),
        **_options(selection, plan),
    )


def appended(selection: Selection, plan: Appended) -> None:
    """All CTAs of all rows at once. The last CTA of a row to arrive selects."""
    candidates, counts = selection.views
    rows, width, k = selection.sizes
    ctas = plan.ctas(rows)
    appended_kernels.select_appended[(ctas,)](
        *selection.inputs,
        candidates.view(torch.int64),
        counts,
        selection.counters,
        _emulated_smem(selection, ctas, plan),
        width,
        k,
        plan.bound.candidates,
        plan.slots,
        *selection.strides,
        SLOTS=plan.slots,
        WORDS=plan.words,
        TILE=plan.tile,
        CHUNK=plan.chunk,
        CTAS=plan.ctas_per_row,
        SAMPLES=plan.bound.samples,
        WINDOW_SHIFT=WINDOW_SHIFT,
        SMEM_WORDS=plan.smem_words,
        ALIGNED=selection.aligned,
        THREADS=_threads(plan),
        **_options(selection, plan),
    )


def sampled(selection: Selection, plan: Sampled) -> None:
    """One launch. The last CTA of a row to arrive selects."""
    bound, width = plan.bound, selection.logits.shape[1]
    sizes = bound.candidates, plan.capacity(width)
    constants = {"CTAS": plan.ctas_per_row, "SPAN": plan.span, "SAMPLES": bound.samples, "RUN": bound.run}
    _long_rows(selection, plan, selection.views, sizes, SAMPLED=True, **constants)


def streaming(selection: Selection, plan: Streaming) -> None:
    """One CTA a row, and no candidates."""
    out = selection.out
    _long_rows(selection, plan, (out, out), (0, 0), CTAS=1, SPAN=0, SAMPLED=False, SAMPLES=0, RUN=1)


def _long_rows(
    selection: Selection,
    plan: Sampled | Streaming,
    views: Sequence[torch.Tensor],
    of_candidates: tuple[int, int],
    **constants: int | bool,
) -> None:
    """views: candidates and counts. of_candidates: how many the bound is to leave, and room for those of a CTA."""
    ctas = plan.ctas(selection.logits.shape[0])
    sampled_kernels.select_sampled[(ctas,)](
        *selection.inputs,
        *views,
        selection.counters,
        _emulated_smem(selection, ctas, plan),
        *selection.sizes,
        *of_candidates,
        *selection.strides,
        SLOTS=plan.slots,
        CHUNK=plan.chunk,
        ALIGNED=selection.aligned,
        THREADS=_threads(plan),
        **constants,
        **_options(selection, plan, plan.max_registers),
    )


def multi_pass(selection: Selection, plan: MultiPass) -> None:
    """Bounds for plan.bounded_rows rows, then the other passes for at most plan.rows_in_flight of these at a time,
    evenly cut."""
    logits, row_starts, row_ends, out, views, _, _ = selection
    bounds, taken, begins, counts, columns, scores = views
    rows, width, k = selection.sizes
    threads, strides, slots = _threads(plan), selection.strides, plan.slots
    smem = _emulated_smem(selection, rows * plan.ctas_per_row, plan)
    options = {"SLOTS": slots, "ALIGNED": selection.aligned, **_options(selection, plan)}
    parts = {"CHUNK": plan.chunk, "SPAN": plan.span, "PARTS": plan.ctas_per_row, **options}
    sample = {"SAMPLES": plan.bound.samples, "RUN": plan.bound.run, "THREADS": threads, **options}
    collect = {"maxnreg": plan.collect_registers, **parts}
    select = {"THREADS": threads, "maxnreg": plan.max_registers, **parts}

    def inputs(some: slice) -> tuple[torch.Tensor | None, ...]:
        return logits[some], *(None if limit is None else limit[some] for limit in (row_starts, row_ends))

    for bounded in range(0, rows, plan.bounded_rows):
        end = min(bounded + plan.bounded_rows, rows)
        multi_pass_kernels.bound_rows[(end - bounded,)](
            *inputs(slice(bounded, end)), bounds, taken, smem, width, plan.bound.candidates, *strides, **sample
        )
        times = triton.cdiv(end - bounded, plan.rows_in_flight)
        step = min(triton.cdiv(end - bounded, 16 * times) * 16, plan.rows_in_flight)  # pointers stay aligned
        for first in range(bounded, end, step):
            some = slice(first, min(first + step, end))
            here = slice(first - bounded, some.stop - bounded)
            number = some.stop - first
            lists = begins, counts, columns, scores, smem, width
            multi_pass_kernels.collect_candidates[(number * plan.ctas_per_row,)](
                *inputs(some), bounds[here], taken[here], *lists, *strides, **collect
            )
            multi_pass_kernels.select_candidates[(number,)](
                *inputs(some), out[some], bounds[here], *lists, k, *strides, **select
            )


def _threads(plan: Plan) -> int:
    """Threads of a CTA that counts in shared memory, else 0."""
    return 32 * plan.num_warps if plan.search == RADIX else 0


def _options(selection: Selection, plan: Plan, max_registers: int | None = None) -> dict[str, int | bool]:
    options = {"num_warps": plan.num_warps, **pdl.launched(target_of(selection.logits.device))}
    return options if max_registers is None else {"maxnreg": max_registers, **options}


def _emulated_smem(selection: Selection, ctas: int, plan: Plan) -> torch.Tensor | None:
    """In the interpreter, the shared memory of all CTAs that count there."""
    if not _threads(plan) or not interpreting():
        return None
    return selection.logits.new_zeros((ctas, histogram.WORDS.value + plan.smem_words), dtype=torch.int32)
