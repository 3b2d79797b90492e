"""Shapes of gathered index keys."""

import torch

from sparse_attn.layout import IndexFp8Layout, Layout


def allocate_keys(cache: torch.Tensor, capacity, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (keys [capacity, dim] in the cache's dtype, scales fp32 [capacity], or [0] for an unquantised layout)."""
    scaled = capacity if isinstance(layout, IndexFp8Layout) else 0
    return (
        torch.empty(capacity, layout.dim, dtype=cache.dtype, device=cache.device),
        torch.empty(scaled, dtype=torch.float32, device=cache.device),
    )
