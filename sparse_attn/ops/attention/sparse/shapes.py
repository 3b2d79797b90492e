"""Shapes of attention outputs."""

from __future__ import annotations

import torch

from sparse_attn.layout import parse_kv_layout


def allocate_output(
    tokens: int | torch.SymInt, heads: int | torch.SymInt, d_v: int | torch.SymInt, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (out [tokens, heads, d_v] in the dtype of ``like``, lse fp32 [tokens, heads])."""
    return (
        torch.empty(tokens, heads, d_v, dtype=like.dtype, device=like.device),
        torch.empty(tokens, heads, dtype=torch.float32, device=like.device),
    )


def value_dim(layout: str) -> int:
    """Values of a cached row that are its value."""
    return parse_kv_layout(layout).value_dim
