"""Shape of gathered rows."""

import torch

from sparse_attn.layout import parse_layout


def allocate_rows(cache: torch.Tensor, capacity, layout: str, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised [capacity, latent + rope]."""
    return torch.empty(capacity, parse_layout(layout).dim, dtype=dtype, device=cache.device)
