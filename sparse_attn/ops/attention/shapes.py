"""Shapes of attention outputs."""

import torch

from sparse_attn.layout import parse_layout


def allocate_output(tokens, heads, d_v: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (out [tokens, heads, d_v] in the dtype of ``like``, lse fp32 [tokens, heads])."""
    return (
        torch.empty(tokens, heads, d_v, dtype=like.dtype, device=like.device),
        torch.empty(tokens, heads, dtype=torch.float32, device=like.device),
    )


def value_dim(layout: str) -> int:
    """Values of a cached row that are its value."""
    return parse_layout(layout).value_dim
