"""What the launchers are given, and what they know of it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparse_attn.layout import LatentFp8Layout, PlanarFp8Layout


class Keys(NamedTuple):
    """A cache (or the rows of one block), its format, None for plain rows, and the indices into it."""

    cache: torch.Tensor
    layout: LatentFp8Layout | PlanarFp8Layout | None
    indices: torch.Tensor
    indptr: torch.Tensor


def are_apart(cache: torch.Tensor) -> bool:
    """Whether something lies between the last slot of a block and the first of the next one."""
    return cache.shape[0] > 1 and cache.stride(0) != cache.shape[1] * cache.stride(1)
