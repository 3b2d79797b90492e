"""What the launchers are given, and what they know of it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparse_attn.layout import LatentFp8Layout, PlanarFp8Layout

INVARIANT_TOKENS = 32  # rows of the step as which every batch-invariant one is launched


class Keys(NamedTuple):
    """A cache (or the rows of one block), its format, None for plain rows, and the indices into it."""

    cache: torch.Tensor
    layout: LatentFp8Layout | PlanarFp8Layout | None
    indices: torch.Tensor
    indptr: torch.Tensor


class Step(NamedTuple):
    """What a launch is chosen for: rows, and how many indices all of them may hold, of two caches together. invariant: how
    many rows there are instead, launched as those would be in one part; None where bits may depend on it."""

    tokens: int
    capacity: int
    invariant: int | None = None


def step_of(q: torch.Tensor, keys: Keys, extra: Keys | None, batch_invariant: bool) -> Step:
    """This step, or what stands for every one with rows that may hold as many indices."""
    tokens = q.shape[0]
    capacity = keys.indices.numel() + (0 if extra is None else extra.indices.numel())
    if batch_invariant and tokens:
        return Step(INVARIANT_TOKENS, INVARIANT_TOKENS * -(-capacity // tokens), tokens)
    return Step(tokens, capacity)


def are_apart(cache: torch.Tensor) -> bool:
    """Whether something lies between the last slot of a block and the first of the next one."""
    return cache.shape[0] > 1 and cache.stride(0) != cache.shape[1] * cache.stride(1)
