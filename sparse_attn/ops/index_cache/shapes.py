"""Shapes of gathered index keys."""

import torch

from sparse_attn.layout import IndexFp8Layout, parse_layout


def allocate_keys(cache: torch.Tensor, capacity, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (keys [capacity, dim] in the cache's dtype, scales fp32 [capacity], [0] for a plain layout)."""
    kind = parse_layout(layout)
    scaled = capacity if isinstance(kind, IndexFp8Layout) else 0
    return (
        torch.empty(capacity, kind.dim, dtype=cache.dtype, device=cache.device),
        torch.empty(scaled, dtype=torch.float32, device=cache.device),
    )
