"""Rules of debug mode for each argument."""

from __future__ import annotations

import torch

from sparse_attn.framework import debug


def biased_grouped_topk(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    num_groups: int,
    top_groups: int,
    renormalise: bool,
    routed_scale: float,
    score: str,
) -> None:
    debug.not_nan("logits", logits)
    debug.not_nan("bias", bias)


def hash_routed_experts(logits: torch.Tensor, tokens: torch.Tensor, table: torch.Tensor) -> None:
    debug.places("tokens", tokens, table.shape[0], "rows of table")
    named = debug.used_by(table, tokens.unsqueeze(1), torch.arange(table.shape[1], device=table.device))
    debug.places("table", torch.where(named, table, -1), logits.shape[1], "experts")
