"""Fake implementations, and the outputs that the launcher allocates alike."""

import torch

from sparse_attn.layout import IndexFp8Layout, IndexMxfp4Layout, parse_layout


def allocate_keys(cache: torch.Tensor, capacity, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (keys [capacity, dim] in the cache's dtype, scales fp32 [capacity], [0] for a plain layout). MXFP4:
    (codes [capacity, dim / 2], ue8m0 bytes [capacity, dim / 32])."""
    kind = parse_layout(layout)
    if isinstance(kind, IndexMxfp4Layout):
        return (
            torch.empty(capacity, kind.code_bytes, dtype=torch.uint8, device=cache.device),
            torch.empty(capacity, kind.groups, dtype=torch.uint8, device=cache.device),
        )
    scaled = capacity if isinstance(kind, IndexFp8Layout) else 0
    return (
        torch.empty(capacity, kind.dim, dtype=cache.dtype, device=cache.device),
        torch.empty(scaled, dtype=torch.float32, device=cache.device),
    )


def indexer_k_quant_and_cache():
    return None


def gather_indexer_k(cache, capacity, layout):
    return allocate_keys(cache, capacity, layout)
