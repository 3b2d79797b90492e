"""Shape of gathered rows."""

import torch

from sparse_attn.layout import Layout


def allocate_rows(cache: torch.Tensor, capacity, layout: Layout, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised [capacity, latent + rope]."""
    return torch.empty(capacity, layout.dim, dtype=dtype, device=cache.device)
