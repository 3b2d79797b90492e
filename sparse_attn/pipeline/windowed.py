"""Attention over a window of raw keys and over compressed entries: write -> choose -> indices -> attend.

Rows that attend in place read both caches where they lie, in one pass. Decode rows always do. The other rows read keys
that are gathered into one matrix, entries first, because many rows of one request share them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparse_attn.layout import KvLayout
from sparse_attn.mesh import ALONE, Ranks
from sparse_attn.ops.attention.kv_cache import gather_kv_cache, write_kv_cache
from sparse_attn.ops.attention.sparse import sparse_attn_decode, sparse_attn_prefill
from sparse_attn.ops.ragged.lists import (
    combine_topk_swa_indices_ragged,
    compute_global_topk_ragged_indices_and_indptr,
    entry_indices,
    window_indices,
)
from sparse_attn.ops.ragged.lists.reference import NO_WINDOW
from sparse_attn.ops.ragged.step_plans import build_compressed_plan, build_window_plan
from sparse_attn.ops.topk.fused import LOGITS_BYTES
from sparse_attn.pipeline.latent import join
from sparse_attn.pipeline.layouts import CacheLayouts
from sparse_attn.pipeline.options import Options
from sparse_attn.pipeline.parallel.context import counts_window, own_entries
from sparse_attn.pipeline.parallel.ranks import merge_over_ranks, merge_own_rows, own_rows
from sparse_attn.pipeline.parallel.rows import choose_sharded, shards_rows
from sparse_attn.pipeline.select import (
    Search,
    choose_decode,
    choose_decode_slots,
    choose_over_ranks,
    choose_prefill,
    num_decode_rows,
)
from sparse_attn.types import AttentionOutput, CompressedPlan, QuantisedQuery, Ragged, StepPlan, WindowPlan


class Entries(NamedTuple):
    """Entries that rows attend to beside their window; None where there are no such rows, or no entries.

    Attributes:
        in_place: slots of the compressed cache, for each row that attends in place.
        gathered: rows of the gathered matrix, window keys included, for each other row.
    """

    in_place: Ragged | None
    gathered: Ragged | None


class WindowStep(NamedTuple):
    """What a step's rows see, the same in every layer.

    Attributes:
        in_place: rows at the front that attend in place.
        window: slots of their window keys.
        gather: how the window keys of the other rows are gathered.
        compressed: the plan of the entries, by ratio; of the rank's own, where ranks hold a part of them each.
        counted: bool [tokens], the rows whose window this rank counts beside its entries; None: all.
        counted_window: as window, of those rows.
    """

    in_place: int
    window: Ragged | None
    gather: WindowPlan | None
    compressed: dict[int, CompressedPlan]
    counted: torch.Tensor | None = None
    counted_window: Ragged | None = None


def rings_of(plan: StepPlan) -> torch.Tensor:
    """The blocks of each request's rings, which a plan of windows has.

    Args:
        plan: of the step.

    Returns:
        int32 [requests, ring blocks].

    Raises:
        ValueError: a plan without rings.
    """
    if plan.ring_table is None:
        raise ValueError("plan.ring_table: got None, allowed: int32 [requests, ring blocks]")
    return plan.ring_table


def plan_windows(
    plan: StepPlan,
    *,
    window: int,
    ring: int,
    entries_per_block: dict[int, int],
    prefill_in_place: bool = False,
    ranks: Ranks = ALONE,
    impl: str = "auto",
) -> WindowStep:
    """Find the window of every row of ``plan``, and the entries it may see.

    Args:
        plan: of the whole step, and with ``ranks``, too.
        window: keys that a row sees, its own included.
        ring: tokens a ring block holds.
        entries_per_block: by ratio, entries a block of that compressed cache holds.
        prefill_in_place: let prefill rows attend in place too; cheaper where few rows would gather many keys.
        ranks: those that hold a part of the entries each, and all of the rings.
        impl: "auto", "reference" or "triton".

    Returns:
        A WindowStep.

    Raises:
        TypeError, ValueError: a plan without rings; what window_indices, build_window_plan and build_compressed_plan
            refuse.
    """
    in_place = plan.positions.shape[0] if prefill_in_place else num_decode_rows(plan)
    seen = gather = counted = counted_seen = None
    if ranks.size > 1 and entries_per_block:
        counted = counts_window(plan, ranks)
    if in_place:
        positions, where = plan.positions[:in_place], (plan.request_ids[:in_place], rings_of(plan), ring, window)
        seen = window_indices(positions, *where, impl=impl)
        if counted is not None:
            counted_seen = window_indices(torch.where(counted[:in_place], positions, -1), *where, impl=impl)
    if plan.positions.shape[0] - in_place:
        gather = build_window_plan(plan, window=window, impl=impl)
    compressed = {}
    for ratio, block_size in entries_per_block.items():
        entries = build_compressed_plan(plan, ratio=ratio, block_size=block_size * ranks.size, impl=impl)
        compressed[ratio] = own_entries(entries, plan, ranks, block_size=block_size)
    return WindowStep(in_place, seen, gather, compressed, counted, counted_seen)


def write_window_keys(
    keys: torch.Tensor, cache: torch.Tensor, plan: StepPlan, *, layouts: CacheLayouts, impl: str = "auto"
) -> None:
    """Put the step's rotated keys into a layer's rings.

    Args:
        keys: bf16, fp16 or fp32 [tokens, dim].
        cache: the layer's rings, written in place.
        plan: of the step.
        layouts: of the caches.
        impl: "auto", "reference" or "triton".

    Raises:
        TypeError, ValueError: what write_kv_cache refuses.
    """
    latent, rope = keys.split([layouts.kv.latent, layouts.kv.rope], dim=-1)
    write_kv_cache(latent, rope, cache, plan.slot_mapping, layouts.kv, impl=impl)


def no_entries(plan: StepPlan, step: WindowStep, *, window: int, impl: str = "auto") -> Entries:
    """For layers that attend only to their window.

    Args:
        plan: of the step.
        step: what plan_windows gives.
        window: keys that a row sees, its own included.
        impl: "auto", "reference" or "triton".

    Returns:
        Entries, none of them of a compressed cache.

    Raises:
        TypeError, ValueError: what combine_topk_swa_indices_ragged refuses.
    """
    return Entries(None, _gathered(None, plan, step, None, window, impl))


def all_entries(
    plan: StepPlan, step: WindowStep, *, ratio: int, window: int, block_size: int, impl: str = "auto"
) -> Entries:
    """Every entry of ``ratio`` that a row may see.

    Args:
        plan: of the step.
        step: what plan_windows gives.
        ratio: tokens of an entry.
        window: keys that a row sees, its own included.
        block_size: entries a block holds.
        impl: "auto", "reference" or "triton".

    Returns:
        Entries.

    Raises:
        KeyError: a ratio that ``step`` has no plan of.
        TypeError, ValueError: what entry_indices and combine_topk_swa_indices_ragged refuse.
    """
    entries, rows = step.compressed[ratio], step.in_place
    in_place = None
    if rows:
        in_place = entry_indices(
            entries.limits[:rows], plan.request_ids[:rows], plan.block_table, block_size, entries.max_context, impl=impl
        )
    return Entries(in_place, _gathered(None, plan, step, entries, window, impl))


def select_entries(
    query: QuantisedQuery,
    cache: torch.Tensor,
    plan: StepPlan,
    step: WindowStep,
    *,
    ratio: int,
    window: int,
    layouts: CacheLayouts,
    top_k: int,
    logits_bytes: int = LOGITS_BYTES,
    ranks: Ranks = ALONE,
    alike: Ranks = ALONE,
    impl: str = "auto",
) -> Entries:
    """The ``top_k`` best entries of ``ratio`` of every row, by the index keys in ``cache``; of ``ranks``, this one's
    own among them.

    Args:
        query: see pipeline.latent.index_select.
        cache: the layer's cache of index keys of entries, this step's included.
        plan: of the step.
        step: what plan_windows gives.
        ratio: tokens of an entry.
        window: keys that a row sees, its own included.
        layouts: of the caches.
        top_k: entries of a row.
        logits_bytes: see pipeline.latent.index_select.
        ranks: see pipeline.latent.index_select.
        alike: see pipeline.latent.index_select.
        impl: "auto", "reference" or "triton".

    Returns:
        Entries.

    Raises:
        KeyError: a ratio that ``step`` has no plan of.
        TypeError, ValueError: what pipeline.latent.index_select refuses.
    """
    entries = step.compressed[ratio]
    search = Search(query, cache, plan.block_table, entries, layouts.index, top_k, Options(impl, logits_bytes))
    rows = num_decode_rows(plan)
    prefill = in_place = chosen = None
    if shards_rows(entries, alike):
        chosen, prefill = choose_sharded(search, ranks, alike)
    elif ranks.size > 1:
        chosen, prefill = choose_over_ranks(search, ranks)
    elif entries.kv_start.shape[0]:
        prefill = choose_prefill(search)
    if prefill is not None and step.in_place > rows:
        if rows:
            chosen = torch.cat([choose_decode(search) if chosen is None else chosen, prefill])
        else:
            chosen = prefill
    elif rows and chosen is None:
        in_place = choose_decode_slots(search)
    if chosen is not None:
        in_place = compute_global_topk_ragged_indices_and_indptr(
            chosen, plan.request_ids[: step.in_place], plan.block_table, cache.shape[1], impl=impl
        )
    return Entries(in_place, _gathered(prefill, plan, step, entries, window, impl))


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    compressed: torch.Tensor | None,
    plan: StepPlan,
    step: WindowStep,
    entries: Entries,
    *,
    ratio: int,
    layouts: CacheLayouts,
    scale: float,
    sink: torch.Tensor | None = None,
    batch_invariant: bool = False,
    ranks: Ranks = ALONE,
    sharded: bool = False,
    impl: str = "auto",
) -> AttentionOutput:
    """Attend from queries [tokens, heads, dim] to each row's window in ``cache`` and its ``entries`` in ``compressed``.

    Args:
        q: bf16, fp16 or fp32 [tokens, heads, dim].
        cache: the layer's rings.
        compressed: the layer's cache of entries, or None.
        plan: of the step.
        step: what plan_windows gives.
        entries: what no_entries, all_entries or select_entries gives.
        ratio: that of ``compressed``; ignored where that is None.
        layouts: of the caches.
        scale: what scores are multiplied by before the softmax.
        sink: fp32 [>= heads] or None.
        batch_invariant: see pipeline.latent.attend.
        ranks: each attends to its own entries, one of them to a row's window; all get the merged output. Without
            entries each attends for itself.
        sharded: see pipeline.latent.attend.
        impl: "auto", "reference" or "triton".

    Returns:
        AttentionOutput(out [tokens, heads, dim], lse fp32 [tokens, heads]).

    Raises:
        TypeError, ValueError: what sparse_attn_decode, gather_kv_cache and sparse_attn_prefill refuse.
    """
    rows, parts, layout = step.in_place, [], layouts.kv
    window, merged, whole_sink = step.window, ranks.size > 1 and compressed is not None, sink
    if merged:
        window, sink = step.counted_window, None  # which counts once
    if window is not None:
        parts.append(
            sparse_attn_decode(
                q[:rows], cache, window, scale=scale, layout=layout, extra_cache=compressed,
                extra_ragged=entries.in_place, extra_layout=None if compressed is None else layout, sink=sink,
                batch_invariant=batch_invariant, impl=impl,
            )
        )  # fmt: skip
    if step.gather is not None:
        assert entries.gathered is not None
        kv = _gather(cache, compressed, plan, step, step.gather, ratio, layout, q.dtype, impl)
        parts.append(
            sparse_attn_prefill(
                q[rows:], kv, entries.gathered, scale=scale, d_v=layout.value_dim, sink=sink,
                batch_invariant=batch_invariant, impl=impl,
            )
        )  # fmt: skip
    out = join(parts, q, layout.value_dim)
    if merged and parts:
        return (merge_own_rows if sharded else merge_over_ranks)(out, ranks, sink=whole_sink, impl=impl)
    return AttentionOutput(*(own_rows(value, ranks) for value in out)) if sharded else out


def _gathered(
    chosen: torch.Tensor | None,
    plan: StepPlan,
    step: WindowStep,
    entries: CompressedPlan | None,
    window: int,
    impl: str,
) -> Ragged | None:
    """Rows of the gathered matrix (entries, then window keys) that the gathered rows see."""
    if step.gather is None:
        return None
    rows, gather = step.in_place, step.gather
    if entries is None:
        zero = torch.zeros_like(gather.offsets)
        limits, entry_offsets, window_offsets = zero, zero, gather.offsets
        most, num_rows = 0, gather.capacity
    else:
        limits, entry_offsets = entries.limits[rows:], entries.kv_start
        window_offsets = gather.offsets + entries.kv_capacity
        if step.counted is not None:
            window_offsets = torch.where(step.counted[rows:], window_offsets, NO_WINDOW)
        most, num_rows = entries.max_context, entries.kv_capacity + gather.capacity
    return combine_topk_swa_indices_ragged(
        chosen, limits, plan.positions[rows:], entry_offsets, window_offsets,
        window=window, max_entries=most, num_rows=num_rows, impl=impl,
    )  # fmt: skip


def _gather(
    cache: torch.Tensor,
    compressed: torch.Tensor | None,
    plan: StepPlan,
    step: WindowStep,
    gather: WindowPlan,
    ratio: int,
    layout: KvLayout,
    dtype: torch.dtype,
    impl: str,
) -> torch.Tensor:
    requests = plan.context_lens.shape[0]
    raw = gather_kv_cache(
        cache, rings_of(plan)[requests:], gather.kv_indptr, gather.capacity, layout,
        starts=gather.starts, dtype=dtype, impl=impl,
    )  # fmt: skip
    if compressed is None:
        return raw
    entries = step.compressed[ratio]
    pooled = gather_kv_cache(
        compressed, plan.block_table[requests:], entries.kv_indptr, entries.kv_capacity, layout, dtype=dtype, impl=impl
    )
    return torch.cat([pooled, raw])
