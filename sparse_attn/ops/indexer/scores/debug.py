"""What debug mode asks of values."""

from __future__ import annotations

import torch

from sparse_attn.framework import debug


def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    weights: torch.Tensor,
    kv_start: torch.Tensor,
    kv_end: torch.Tensor,
    flavour: str,
) -> None:
    debug.ranges("kv_start", kv_start, "kv_end", kv_end, k.shape[0], "keys")


def paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    layout: str,
) -> None:
    debug.paged(cache, context_lens, block_table, max_context_len)
