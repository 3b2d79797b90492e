"""Rules of debug mode for each argument."""

from __future__ import annotations

import torch

from sparse_attn.framework import debug


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
) -> None:
    debug.ranges("kv_start", kv_start, "kv_end", kv_end, k.shape[0], "keys")


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
) -> None:
    debug.paged(cache, context_lens, block_table, max_context_len)


index_topk_decode_slots = index_topk_decode
