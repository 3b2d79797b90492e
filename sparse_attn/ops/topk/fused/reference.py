"""The oracle: logits of some rows, then a sort, then the next rows; and what debug mode asks of values."""

from __future__ import annotations

import torch

from sparse_attn.framework import debug
from sparse_attn.ops.indexer.scores import reference as logits
from sparse_attn.ops.ragged.lists import reference as ragged
from sparse_attn.ops.topk.fused.fake import rows_at_once
from sparse_attn.ops.topk.select import reference as selection


def index_topk_prefill(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    kv_start: torch.Tensor,
    kv_end: torch.Tensor,
    top_k: int,
    flavour: str,
    logits_bytes: int,
) -> torch.Tensor:
    rows, keys = q.shape[0], k.shape[0]
    step = rows_at_once(rows, keys, logits_bytes)
    chosen = []
    for first in range(0, rows, max(step, 1)):
        some = slice(first, first + step)
        scores = logits.mqa_logits(q[some], k, k_scale, weights[some], kv_start[some], kv_end[some], flavour)
        chosen.append(selection.top_k_per_row(scores, kv_start[some], kv_end[some], top_k))
    return _stack(chosen, top_k, q.device)


def index_topk_decode(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    top_k: int,
    max_context_len: int,
    layout: str,
    logits_bytes: int,
) -> torch.Tensor:
    requests, next_n = q.shape[:2]
    step = rows_at_once(requests * next_n, max_context_len, logits_bytes, max(next_n, 1)) // max(next_n, 1)
    chosen = []
    for first in range(0, requests, max(step, 1)):
        some = slice(first, first + step)
        rows = slice(first * next_n, (first + step) * next_n)
        scores = logits.paged_mqa_logits(
            q[some], cache, weights[rows], context_lens[some], block_table[some], max_context_len, layout
        )
        chosen.append(selection.top_k_per_row(scores, None, context_lens[some].reshape(-1), top_k))
    return _stack(chosen, top_k, q.device)


def index_topk_decode_slots(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    top_k: int,
    max_context_len: int,
    layout: str,
    logits_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = (q, weights, cache, context_lens, block_table, top_k, max_context_len, layout, logits_bytes)
    request_ids = torch.arange(q.shape[0], device=q.device).repeat_interleave(q.shape[1])
    columns = index_topk_decode(*arguments)
    return ragged.compute_global_topk_ragged_indices_and_indptr(columns, request_ids, block_table, cache.shape[1])


def rules_of_index_topk_prefill(k: torch.Tensor, kv_start: torch.Tensor, kv_end: torch.Tensor) -> None:
    debug.ranges("kv_start", kv_start, "kv_end", kv_end, k.shape[0], "keys")


def rules_of_index_topk_decode(
    cache: torch.Tensor, context_lens: torch.Tensor, block_table: torch.Tensor, max_context_len: int
) -> None:
    debug.paged(cache, context_lens, block_table, max_context_len)


def _stack(chosen: list[torch.Tensor], top_k: int, device: torch.device) -> torch.Tensor:
    if not chosen:
        return torch.empty((0, top_k), dtype=torch.int32, device=device)
    return torch.cat(chosen)
