"""Ragged rows of random ids, wild ones among them."""

from __future__ import annotations

import torch
from support.extremes import INT_MAX, INT_MIN

from sparse_attn.types import Ragged

WILD = torch.tensor([-1, INT_MIN, INT_MAX, 10**6], dtype=torch.int32)


def ragged_rows(lengths, rows, seed=0, device="cpu", wild=True) -> Ragged:
    """Random row ids (a fifth of them wild) in rows of the given lengths, with a tail of garbage that must stay
    unread."""
    generator = torch.Generator().manual_seed(seed)
    indptr = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    total = int(indptr[-1])
    indices = torch.randint(0, max(rows, 1), (total + 7,), generator=generator, dtype=torch.int32)
    if wild:
        pick = torch.rand(indices.shape, generator=generator) < 0.2
        indices = torch.where(pick, WILD[torch.randint(0, 4, indices.shape, generator=generator)], indices)
    indices[total:] = 0
    return Ragged(indices.to(device), indptr.to(device))
