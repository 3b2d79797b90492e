"""Attention over MLA latents: write caches -> index -> select -> ragged -> attend.

Decode rows read the paged caches in place; prefill rows read keys gathered from them, because many rows of one request
share those.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparse_attn.mesh import ALONE, Ranks
from sparse_attn.ops.attention.kv_cache import gather_kv_cache, write_kv_cache
from sparse_attn.ops.attention.sparse import sparse_attn_decode, sparse_attn_prefill
from sparse_attn.ops.indexer.keys import indexer_k_quant_and_cache
from sparse_attn.ops.ragged.lists import build_ragged_indices_from_dense, compute_global_topk_ragged_indices_and_indptr
from sparse_attn.ops.topk.fused import LOGITS_BYTES
from sparse_attn.pipeline.layouts import CacheLayouts
from sparse_attn.pipeline.options import Options
from sparse_attn.pipeline.parallel.ranks import merge_over_ranks, merge_own_rows
from sparse_attn.pipeline.parallel.rows import choose_sharded, shards_rows
from sparse_attn.pipeline.select import Search, choose_decode_slots, choose_over_ranks, choose_prefill, num_decode_rows
from sparse_attn.types import AttentionOutput, QuantisedQuery, Ragged, StepPlan


class Selection(NamedTuple):
    """What an index layer selected. Layers without an indexer attend by it too.

    None where the step has no such rows.

    Attributes:
        decode: slots of the paged cache, a row per decode row.
        prefill: rows of the gathered keys, a row per prefill row.
    """

    decode: Ragged | None
    prefill: Ragged | None


def write_index_keys(
    keys: torch.Tensor, cache: torch.Tensor, plan: StepPlan, *, layouts: CacheLayouts, impl: str = "auto"
) -> None:
    """Put the step's rotated index keys into a layer's index cache.

    Args:
        keys: bf16, fp16 or fp32 [tokens, dim].
        cache: the layer's index cache, written in place.
        plan: of the step.
        layouts: of the caches.
        impl: "auto", "reference" or "triton".

    Raises:
        TypeError, ValueError: what indexer_k_quant_and_cache refuses.
    """
    indexer_k_quant_and_cache(keys, cache, plan.slot_mapping, layouts.index, impl=impl)


def write_latents(
    latent: torch.Tensor,
    rope: torch.Tensor,
    cache: torch.Tensor,
    plan: StepPlan,
    *,
    layouts: CacheLayouts,
    impl: str = "auto",
) -> None:
    """Put the step's latents and rotated keys into a layer's KV cache.

    Args:
        latent: bf16, fp16 or fp32 [tokens, kv_lora].
        rope: same dtype [tokens, rope_dim].
        cache: the layer's KV cache, written in place.
        plan: of the step.
        layouts: of the caches.
        impl: "auto", "reference" or "triton".

    Raises:
        TypeError, ValueError: what write_kv_cache refuses.
    """
    write_kv_cache(latent, rope, cache, plan.slot_mapping, layouts.kv, impl=impl)


def index_select(
    query: QuantisedQuery,
    cache: torch.Tensor,
    plan: StepPlan,
    *,
    layouts: CacheLayouts,
    top_k: int,
    logits_bytes: int = LOGITS_BYTES,
    ranks: Ranks = ALONE,
    alike: Ranks = ALONE,
    impl: str = "auto",
) -> Selection:
    """Score every row's visible index keys, keep the ``top_k`` best, and say where they lie.

    Args:
        query: the step's index queries [tokens, heads, dim] and weights [tokens, heads].
        cache: the layer's index cache, into which this step's keys have been written.
        plan: of the step.
        layouts: of the caches.
        top_k: keys of a row.
        logits_bytes: bound on the scores held at a time.
        ranks: those that hold a part of the keys each; ``plan`` is this rank's, of pipeline.parallel.context, and so is
            the selection.
        alike: those that hold the same keys; they may share the rows (pipeline.parallel.rows), and all get the same
            selection.
        impl: "auto", "reference" or "triton".

    Returns:
        A Selection.

    Raises:
        TypeError, ValueError: what index_topk_prefill and index_topk_decode refuse; scores of ``ranks`` that exceed
            logits_bytes.
    """
    search = Search(query, cache, plan.block_table, plan, layouts.index, top_k, Options(impl, logits_bytes))
    rows = num_decode_rows(plan)
    decode = prefill = chosen = positions = None
    if shards_rows(plan, alike):
        positions, chosen = choose_sharded(search, ranks, alike)
    elif ranks.size > 1:
        positions, chosen = choose_over_ranks(search, ranks)
    else:
        if rows:
            decode = choose_decode_slots(search)
        if plan.kv_start.shape[0]:
            chosen = choose_prefill(search)
    if positions is not None:
        decode = compute_global_topk_ragged_indices_and_indptr(
            positions, plan.request_ids[:rows], plan.block_table, cache.shape[1], impl=impl
        )
    if chosen is not None:
        prefill = build_ragged_indices_from_dense(
            chosen, num_rows=plan.kv_capacity, row_offsets=plan.kv_start, impl=impl
        )
    return Selection(decode, prefill)


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    plan: StepPlan,
    selection: Selection,
    *,
    layouts: CacheLayouts,
    scale: float,
    d_v: int,
    sink: torch.Tensor | None = None,
    batch_invariant: bool = False,
    ranks: Ranks = ALONE,
    sharded: bool = False,
    impl: str = "auto",
) -> AttentionOutput:
    """Attend from absorbed queries [tokens, heads, kv_lora + rope_dim] to the selected rows of a layer's KV cache.

    Args:
        q: bf16, fp16 or fp32 [tokens, heads, kv_lora + rope_dim].
        cache: the layer's KV cache.
        plan: of the step.
        selection: may stem from an earlier layer: all layers' caches share the block table.
        layouts: of the caches.
        scale: what scores are multiplied by before the softmax.
        d_v: leading values of a row that are its value.
        sink: fp32 [>= heads] or None.
        batch_invariant: as sparse_attn_decode and sparse_attn_prefill take it. A row's bits then depend only on whether
            it is a decode or a prefill row. The other functions of this module need no such option: their rows never
            depend on each other.
        ranks: as index_select takes them. Each attends to its own of the selected keys; all get the merged output, or
            each that of its own rows (pipeline.parallel.ranks.own_rows) where they are ``sharded``.
        sharded: see ranks.
        impl: "auto", "reference" or "triton".

    Returns:
        AttentionOutput(out [tokens, heads, d_v], lse fp32 [tokens, heads]).

    Raises:
        TypeError, ValueError: what sparse_attn_decode, gather_kv_cache and sparse_attn_prefill refuse.
    """
    rows, requests = num_decode_rows(plan), plan.context_lens.shape[0]
    parts, own_sink = [], sink if ranks.size == 1 else None  # which counts once
    if selection.decode is not None:
        parts.append(
            sparse_attn_decode(
                q[:rows], cache, selection.decode, scale=scale, layout=layouts.kv, sink=own_sink,
                batch_invariant=batch_invariant, impl=impl,
            )
        )  # fmt: skip
    if selection.prefill is not None:
        kv = gather_kv_cache(
            cache, plan.block_table[requests:], plan.kv_indptr, plan.kv_capacity, layouts.kv, dtype=q.dtype, impl=impl
        )
        parts.append(
            sparse_attn_prefill(
                q[rows:],
                kv,
                selection.prefill,
                scale=scale,
                d_v=d_v,
                sink=own_sink,
                batch_invariant=batch_invariant,
                impl=impl,
            )
        )
    out = join(parts, q, d_v)
    if ranks.size == 1 or not parts:
        return out
    return (merge_own_rows if sharded else merge_over_ranks)(out, ranks, sink=sink, impl=impl)


def join(parts: list[AttentionOutput], q: torch.Tensor, d_v: int) -> AttentionOutput:
    """The outputs of a step's parts, concatenated. Without a part: outputs of no rows."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return AttentionOutput(q.new_empty(0, q.shape[1], d_v), q.new_empty(0, q.shape[1], dtype=torch.float32))
    return AttentionOutput(*(torch.cat(pieces) for pieces in zip(*parts)))
