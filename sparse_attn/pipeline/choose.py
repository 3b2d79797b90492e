"""Score index keys and keep the best, for the decode and the prefill rows of a step."""

from __future__ import annotations

from typing import Any

import torch

from sparse_attn.layout import IndexFp8Layout, IndexLayout, IndexMxfp4Layout
from sparse_attn.mxfp4 import MXFP4
from sparse_attn.ops.index_cache import gather_indexer_k
from sparse_attn.ops.index_topk import LOGITS_BYTES, index_topk_decode, index_topk_decode_slots, index_topk_prefill
from sparse_attn.types import CompressedPlan, QuantisedQuery, Ragged, StepPlan


def num_decode_rows(plan: StepPlan | CompressedPlan) -> int:
    """Rows at the front of the step that read the paged caches in place."""
    return plan.context_lens.shape[0] * plan.context_lens.shape[1]


def choose_decode(
    query: QuantisedQuery,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    plan: StepPlan | CompressedPlan,
    *,
    layout: IndexLayout,
    top_k: int,
    logits_bytes: int = LOGITS_BYTES,
    impl: str = "auto",
) -> torch.Tensor:
    """The ``top_k`` best index keys of every decode row among those it may see, int32 [rows, top_k], counted within the
    row's request.

    query: the step's index queries, as indexer_q_rope_quant gives them, and weights [tokens, heads]. cache: index keys,
    this step's included. plan: how many keys each row sees, and where the keys of prefill requests lie once gathered;
    keys of tokens (StepPlan) or of entries (CompressedPlan). logits_bytes: bound on the scores held at a time.
    """
    arguments = _decode_rows(query, cache, block_table, plan, layout, top_k)
    return index_topk_decode(*arguments, logits_bytes=logits_bytes, impl=impl)


def choose_decode_slots(
    query: QuantisedQuery,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    plan: StepPlan | CompressedPlan,
    *,
    layout: IndexLayout,
    top_k: int,
    logits_bytes: int = LOGITS_BYTES,
    impl: str = "auto",
) -> Ragged:
    """As choose_decode, but slots of the paged caches."""
    arguments = _decode_rows(query, cache, block_table, plan, layout, top_k)
    return index_topk_decode_slots(*arguments, logits_bytes=logits_bytes, impl=impl)


def _decode_rows(query, cache, block_table, plan, layout, top_k) -> tuple[Any, ...]:
    """The arguments of the operators over decode rows."""
    requests, next_n = plan.context_lens.shape
    rows = requests * next_n
    return (
        torch.unflatten(query.query[:rows], 0, (requests, next_n)), query.weights[:rows], cache, plan.context_lens,
        block_table[:requests], top_k, plan.max_context, layout,
    )  # fmt: skip


def choose_prefill(
    query: QuantisedQuery,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    plan: StepPlan | CompressedPlan,
    *,
    layout: IndexLayout,
    top_k: int,
    logits_bytes: int = LOGITS_BYTES,
    impl: str = "auto",
) -> torch.Tensor:
    """As choose_decode, for every prefill row: int32 [rows, top_k], counted within the row's request."""
    requests, rows = plan.context_lens.shape[0], num_decode_rows(plan)
    gathered = gather_indexer_k(cache, block_table[requests:], plan.kv_indptr, plan.kv_capacity, layout, impl=impl)
    return index_topk_prefill(
        query.query[rows:],
        query.weights[rows:],
        gathered.keys,
        gathered.scales,
        plan.kv_start,
        plan.kv_end,
        top_k,
        flavour=_flavour(layout),
        logits_bytes=logits_bytes,
        impl=impl,
    )


def _flavour(layout: IndexLayout) -> str:
    """Of the codes of gathered keys."""
    if isinstance(layout, IndexMxfp4Layout):
        return MXFP4
    return layout.flavour if isinstance(layout, IndexFp8Layout) else "none"
