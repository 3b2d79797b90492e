"""Shapes of the quantised query."""

import torch

from sparse_attn.layout import parse_layout


def allocate_query(q: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (query [tokens, heads, dim] of the layout's dtype, weights fp32 [tokens, heads]), contiguous."""
    tokens, heads, dim = q.shape
    return (
        torch.empty(tokens, heads, dim, dtype=parse_layout(layout).dtype, device=q.device),
        torch.empty(tokens, heads, dtype=torch.float32, device=q.device),
    )
