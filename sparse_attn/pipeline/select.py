"""Score index keys and keep the best, for the decode and the prefill rows of a step."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from sparse_attn.layout import IndexFp8Layout, IndexLayout, IndexMxfp4Layout
from sparse_attn.mesh import Ranks
from sparse_attn.mxfp4 import MXFP4
from sparse_attn.ops.indexer.keys import gather_indexer_k
from sparse_attn.ops.indexer.scores import (
    bf16_mqa_logits,
    bf16_paged_mqa_logits,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    mxfp4_mqa_logits,
    mxfp4_paged_mqa_logits,
)
from sparse_attn.ops.topk.fused import index_topk_decode, index_topk_decode_slots, index_topk_prefill
from sparse_attn.pipeline.options import Options
from sparse_attn.pipeline.parallel.ranks import RowScores, top_k_over_ranks
from sparse_attn.types import CompressedPlan, IndexKeys, QuantisedQuery, Ragged, StepPlan

FP32_BYTES = 4


def num_decode_rows(plan: StepPlan | CompressedPlan) -> int:
    """Rows at the front of the step that read the paged caches in place."""
    return plan.context_lens.shape[0] * plan.context_lens.shape[1]


class Search(NamedTuple):
    """The selection a step asks for: its index queries, and the keys each of them chooses ``top_k`` of.

    query: the step's index queries, as indexer_q_rope_quant gives them, and weights [tokens, heads]. cache: index keys
    in blocks of ``layout``, this step's included. block_table: of all requests, decodes first. plan: how many keys each
    row sees, and where the keys of prefill requests lie once gathered; keys of tokens (StepPlan) or of entries
    (CompressedPlan).
    """

    query: QuantisedQuery
    cache: torch.Tensor
    block_table: torch.Tensor
    plan: StepPlan | CompressedPlan
    layout: IndexLayout
    top_k: int
    options: Options


def choose_decode(search: Search) -> torch.Tensor:
    """The best index keys of every decode row among those it may see, int32 [rows, top_k], counted within the row's
    request."""
    options = search.options
    return index_topk_decode(*_decode_rows(search), logits_bytes=options.logits_bytes, impl=options.impl)


def choose_decode_slots(search: Search) -> Ragged:
    """As choose_decode, but slots of the paged caches."""
    options = search.options
    return index_topk_decode_slots(*_decode_rows(search), logits_bytes=options.logits_bytes, impl=options.impl)


def _decode_rows(search: Search) -> tuple[Any, ...]:
    """The arguments of the operators over decode rows."""
    query, cache, block_table, plan, layout, top_k, _ = search
    requests, next_n = plan.context_lens.shape
    rows = requests * next_n
    return (
        torch.unflatten(query.query[:rows], 0, (requests, next_n)), query.weights[:rows], cache, plan.context_lens,
        block_table[:requests], top_k, plan.max_context, layout,
    )  # fmt: skip


def choose_prefill(search: Search) -> torch.Tensor:
    """As choose_decode, for every prefill row: int32 [rows, top_k], counted within the row's request."""
    query, plan, options = search.query, search.plan, search.options
    gathered, rows = _gather(search), num_decode_rows(plan)
    return index_topk_prefill(
        query.query[rows:],
        query.weights[rows:],
        gathered.keys,
        gathered.scales,
        plan.kv_start,
        plan.kv_end,
        search.top_k,
        flavour=_flavour(search.layout),
        logits_bytes=options.logits_bytes,
        impl=options.impl,
    )


def choose_over_ranks(search: Search, ranks: Ranks) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What this rank holds of the best index keys of every decode and of every prefill row: int32 [rows, top_k] each,
    counted among the keys of the row's request that it holds. None where the step has no such rows.

    Cache and plan are this rank's, the plan of pipeline.parallel.context. Scores of all rows are held at once, so that
    a layer takes one collective or four (top_k_over_ranks): ValueError where that takes more than options.logits_bytes.
    """
    plan, options = search.plan, search.options
    decode, prefill = num_decode_rows(plan), plan.kv_start.shape[0]
    check_scores(decode, plan.max_context, prefill, plan.kv_capacity, options.logits_bytes)
    parts = []
    if decode:
        parts.append(RowScores(_decode_scores(search), None, plan.context_lens.reshape(-1)))
    if prefill:
        parts.append(RowScores(_prefill_scores(search), plan.kv_start, plan.kv_end))
    chosen = top_k_over_ranks(parts, search.top_k, ranks, block_size=search.cache.shape[1], impl=options.impl)
    return chosen[0] if decode else None, chosen[-1] if prefill else None


def check_scores(decode: int, decode_keys: int, prefill: int, prefill_keys: int, logits_bytes: int) -> None:
    """ValueError unless the scores of so many rows, each against so many keys of a rank, fit the budget."""
    held = FP32_BYTES * (decode * decode_keys + prefill * prefill_keys)
    if held > logits_bytes:
        raise ValueError(
            f"logits_bytes: got {logits_bytes}, allowed: at least the {held} bytes of {decode} decode rows against "
            f"{decode_keys} keys of a rank and {prefill} prefill rows against {prefill_keys}: ranks select all rows of "
            "a step together"
        )


def _decode_scores(search: Search) -> torch.Tensor:
    layout = search.layout
    score: Any = fp8_paged_mqa_logits if isinstance(layout, IndexFp8Layout) else bf16_paged_mqa_logits
    if isinstance(layout, IndexMxfp4Layout):
        score = mxfp4_paged_mqa_logits
    query, weights, cache, lens, table, _, max_context, _ = _decode_rows(search)
    return score(query, cache, weights, lens, table, max_context, layout, impl=search.options.impl)


def _prefill_scores(search: Search) -> torch.Tensor:
    query, plan, layout = search.query, search.plan, search.layout
    gathered, rows = _gather(search), num_decode_rows(plan)
    keys = [gathered.keys] if gathered.scales is None else [gathered.keys, gathered.scales]
    score: Any = bf16_mqa_logits if gathered.scales is None else mxfp4_mqa_logits
    if isinstance(layout, IndexFp8Layout):
        score = partial(fp8_mqa_logits, flavour=_flavour(layout))
    return score(query.query[rows:], *keys, query.weights[rows:], plan.kv_start, plan.kv_end, impl=search.options.impl)


def _gather(search: Search) -> IndexKeys:
    """The index keys of prefill requests."""
    plan = search.plan
    table = search.block_table[plan.context_lens.shape[0] :]
    return gather_indexer_k(
        search.cache, table, plan.kv_indptr, plan.kv_capacity, search.layout, impl=search.options.impl
    )


def _flavour(layout: IndexLayout) -> str:
    """Of the codes of gathered keys."""
    if isinstance(layout, IndexMxfp4Layout):
        return MXFP4
    return layout.flavour if isinstance(layout, IndexFp8Layout) else "none"
