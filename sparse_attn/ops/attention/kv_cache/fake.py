"""Fake implementations, and the allocation of outputs that the real ones share."""

import torch

from sparse_attn.layout import parse_layout


def write_kv_cache():
    return None


def gather_kv_cache(cache, capacity, layout, dtype):
    return allocate_rows(cache, capacity, layout, dtype)


def allocate_rows(cache: torch.Tensor, capacity, layout: str, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised [capacity, latent + rope]."""
    return torch.empty(capacity, parse_layout(layout).dim, dtype=dtype, device=cache.device)
