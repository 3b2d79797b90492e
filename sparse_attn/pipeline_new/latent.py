"""The composition of a layer's sparse attention: write caches -> index -> select -> ragged -> attend.

A step holds decode rows first, then prefill rows; either part may be empty. Each part computes into tensors of its own,
which are concatenated at the end, so no row is ever written by both. Decode rows read the paged caches in place;
prefill rows read keys gathered from them, because many rows of one request share those.

Nothing here looks at a value on the device: which part is empty is known from shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sparse_attn import checks, workspace
from sparse_attn.layout import IndexFp8Layout, LatentFp8Layout, PlainLayout
from sparse_attn.ops.attention import config as attention_config
from sparse_attn.ops.attention import sparse_attn_decode, sparse_attn_prefill
from sparse_attn.ops.index_cache import gather_indexer_k, indexer_k_quant_and_cache
from sparse_attn.ops.index_topk import LOGITS_BYTES, index_topk_decode, index_topk_prefill
from sparse_attn.ops.index_topk import config as index_topk_config
from sparse_attn.ops.kv_cache import gather_kv_cache, write_kv_cache
from sparse_attn.ops.ragged import build_ragged_indices_from_dense, compute_global_topk_ragged_indices_and_indptr
from sparse_attn.ops.ragged import config as ragged_config
from sparse_attn.spec import Spec
from sparse_attn.target import Target
from sparse_attn.types import AttentionOutput, QuantisedQuery, Ragged, StepPlan
from sparse_attn.workspace import Scratch, WorkspaceSize

CACHE_KINDS = ("fp8", "bf16", "fp32")


@dataclass(frozen=True)
class CacheLayouts:
    """What the bytes of a model's two kinds of cache mean."""

    kv: LatentFp8Layout | PlainLayout
    index: IndexFp8Layout | PlainLayout


class Selection(NamedTuple):
    """What an index layer chose; layers without an indexer attend by it too.

    decode: slots of the paged cache, a row per decode row. prefill: rows of the gathered keys, a row per prefill row.
    None where the step has no such rows.
    """

    decode: Ragged | None
    prefill: Ragged | None


def cache_layouts(spec: Spec, kind: str) -> CacheLayouts:
    """The layouts of ``spec``'s caches: "fp8" (the field's quantised formats), "bf16" or "fp32" (unquantised)."""
    if kind not in CACHE_KINDS:
        raise ValueError(f"kind: got {kind!r}, allowed: {', '.join(CACHE_KINDS)}")
    if kind == "fp8":
        group = 128 if spec.kv_lora % 128 == 0 else spec.kv_lora
        return CacheLayouts(
            LatentFp8Layout(spec.kv_lora, spec.rope_dim, group=group), IndexFp8Layout(spec.index.head_dim)
        )
    return CacheLayouts(PlainLayout(kind, spec.kv_lora, spec.rope_dim), PlainLayout(kind, spec.index.head_dim))


def cache_bytes(spec: Spec, layouts: CacheLayouts, num_blocks: int, block_size: int) -> int:
    """Bytes of all layers' caches together."""
    kv = layouts.kv.row * layouts.kv.dtype.itemsize * spec.num_layers
    index = layouts.index.row * layouts.index.dtype.itemsize * spec.num_index_layers
    return (kv + index) * num_blocks * block_size


def num_decode_rows(plan: StepPlan) -> int:
    """Rows at the front of the step that read the paged caches in place."""
    return plan.context_lens.shape[0] * plan.context_lens.shape[1]


def write_index_keys(
    keys: torch.Tensor, cache: torch.Tensor, plan: StepPlan, *, layouts: CacheLayouts, impl: str = "auto"
) -> None:
    """Put the step's rotated index keys [tokens, dim] into a layer's index cache."""
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
    """Put the step's latents [tokens, kv_lora] and rotated keys [tokens, rope_dim] into a layer's KV cache."""
    write_kv_cache(latent, rope, cache, plan.slot_mapping, layouts.kv, impl=impl)


def index_select(
    query: QuantisedQuery,
    cache: torch.Tensor,
    plan: StepPlan,
    *,
    layouts: CacheLayouts,
    top_k: int,
    logits_bytes: int = LOGITS_BYTES,
    impl: str = "auto",
) -> Selection:
    """Score every row's visible index keys, keep the ``top_k`` best, and say where they lie.

    query: the step's index queries [tokens, heads, dim] and weights [tokens, heads]. cache: the layer's index cache,
    into which this step's keys have been written. logits_bytes: bound on the scores held at a time.
    """
    rows, requests = num_decode_rows(plan), plan.context_lens.shape[0]
    decode = prefill = None
    if rows:
        next_n = plan.context_lens.shape[1]
        chosen = index_topk_decode(
            query.query[:rows].unflatten(0, (requests, next_n)),
            query.weights[:rows],
            cache,
            plan.context_lens,
            plan.block_table[:requests],
            top_k,
            plan.max_context,
            layouts.index,
            logits_bytes=logits_bytes,
            impl=impl,
        )
        decode = compute_global_topk_ragged_indices_and_indptr(
            chosen, plan.request_ids[:rows], plan.block_table, cache.shape[1], impl=impl
        )
    if plan.kv_start.shape[0]:
        keys = gather_indexer_k(
            cache, plan.block_table[requests:], plan.kv_indptr, plan.kv_capacity, layouts.index, impl=impl
        )
        chosen = index_topk_prefill(
            query.query[rows:],
            query.weights[rows:],
            keys.keys,
            keys.scales,
            plan.kv_start,
            plan.kv_end,
            top_k,
            flavour=layouts.index.flavour if isinstance(layouts.index, IndexFp8Layout) else "none",
            logits_bytes=logits_bytes,
            impl=impl,
        )
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
    impl: str = "auto",
) -> AttentionOutput:
    """Attend from absorbed queries [tokens, heads, kv_lora + rope_dim] to the selected rows of a layer's KV cache.

    ``selection`` may stem from an earlier layer: all layers' caches share the block table. Returns out [tokens, heads,
    d_v] and lse fp32 [tokens, heads].
    """
    rows, requests = num_decode_rows(plan), plan.context_lens.shape[0]
    parts = []
    if selection.decode is not None:
        parts.append(
            sparse_attn_decode(
                q[:rows], cache, selection.decode, scale=scale, layout=layouts.kv, sink=sink, impl=impl
            )
        )
    if selection.prefill is not None:
        kv = gather_kv_cache(
            cache, plan.block_table[requests:], plan.kv_indptr, plan.kv_capacity, layouts.kv, dtype=q.dtype, impl=impl
        )
        parts.append(
            sparse_attn_prefill(q[rows:], kv, selection.prefill, scale=scale, d_v=d_v, sink=sink, impl=impl)
        )
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return AttentionOutput(q.new_empty(0, q.shape[1], d_v), q.new_empty(0, q.shape[1], dtype=torch.float32))
    return AttentionOutput(*(torch.cat(pieces) for pieces in zip(*parts)))


@dataclass(frozen=True)
class Bounds:
    """What no step exceeds. max_batch: decode requests, of next_n rows each (0: no decodes). max_batched_tokens:
    prefill rows (0: no prefills). max_model_len: tokens of a request. kv_rows: keys gathered for a step's prefill
    requests, the plan's kv_capacity; None: max_model_len. logits_bytes: the budget given to the forward. dtype: the
    model's.
    """

    max_batch: int
    max_batched_tokens: int
    max_model_len: int
    next_n: int = 1
    block_size: int = 64
    kv_rows: int | None = None
    logits_bytes: int = LOGITS_BYTES
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self):
        for name, least in (("max_batch", 0), ("max_batched_tokens", 0), ("max_model_len", 1), ("next_n", 1),
                            ("block_size", 1), ("logits_bytes", 0)):  # fmt: skip
            checks.check_at_least(name, getattr(self, name), least)
        if self.kv_rows is not None:
            checks.check_at_least("kv_rows", self.kv_rows, 0)

    @property
    def num_blocks(self) -> int:
        """Blocks that hold max_batch requests of max_model_len tokens."""
        return self.max_batch * -(-self.max_model_len // self.block_size)


def workspace_size(spec: Spec, bounds: Bounds, target: Target, layouts: CacheLayouts | None = None) -> WorkspaceSize:
    """The scratch that any step within ``bounds`` takes on ``target``, exactly: what the largest op takes at its
    largest.

    layouts: the caches'; None: fp8. A pure function: nothing is run or measured. The reference takes none.
    """
    if target.vendor == "cpu" and not target.interpreted:
        return WorkspaceSize(0, 0)
    layouts = layouts or cache_layouts(spec, "fp8")
    return workspace.largest(workspace.size_of(scratch) for scratch in _scratches(spec, bounds, target, layouts))


def _scratches(spec: Spec, bounds: Bounds, target: Target, layouts: CacheLayouts) -> Iterator[Scratch]:
    """What the ops ask for, at every row count: few rows are split over more programs, so the most rows need not be
    most."""
    kv_rows = bounds.max_model_len if bounds.kv_rows is None else bounds.kv_rows
    fp8 = isinstance(layouts.kv, LatentFp8Layout)
    for most, group, width, decode in (
        (bounds.max_batch * bounds.next_n, bounds.next_n, bounds.max_model_len, True),
        (bounds.max_batched_tokens, 1, kv_rows, False),
    ):
        for rows in range(group, most + 1, group):
            yield ragged_config.scratch(rows, target)
            yield _attention_scratch(spec, rows, bounds.dtype, fp8 and decode, target)
            yield index_topk_config.scratch(rows, width, spec.index.top_k, bounds.logits_bytes, target, group)
        # A narrower call fits more rows into the budget, and so may leave less of it unused.
        for rows in range(group, most + 1, group):
            narrow = bounds.logits_bytes // (4 * rows) // 64 * 64
            if 0 < narrow < width:
                yield index_topk_config.scratch(most, narrow, spec.index.top_k, bounds.logits_bytes, target, group)


def _attention_scratch(spec: Spec, rows: int, dtype: torch.dtype, fp8: bool, target: Target) -> Scratch:
    launch = attention_config.config(
        rows, spec.num_heads, spec.latent_dim, rows * spec.index.top_k, dtype.itemsize, fp8, target
    )
    return attention_config.scratch(rows, spec.num_heads, spec.kv_lora, launch.splits)
