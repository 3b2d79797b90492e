"""Shapes of attention outputs."""

from __future__ import annotations

import torch

from sparse_attn.layout import IndexFp8Layout, KvLayout, parse_layout


def allocate_output(
    tokens: int | torch.SymInt, heads: int | torch.SymInt, d_v: int | torch.SymInt, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (out [tokens, heads, d_v] in the dtype of ``like``, lse fp32 [tokens, heads])."""
    return (
        torch.empty(tokens, heads, d_v, dtype=like.dtype, device=like.device),
        torch.empty(tokens, heads, dtype=torch.float32, device=like.device),
    )


def kv_layout(name: str) -> KvLayout:
    """The layout of that name; ValueError for one that holds no keys of attention."""
    layout = parse_layout(name)
    if isinstance(layout, IndexFp8Layout):
        raise ValueError(f"layout: got {name}, allowed: plain, latent_fp8 or planar_fp8")
    return layout


def value_dim(layout: str) -> int:
    """Values of a cached row that are its value."""
    return kv_layout(layout).value_dim
