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


class Step(NamedTuple):
    """What a launch is chosen for: rows, and how many indices all of them may hold, of two caches together. invariant:
    how many rows there are instead, launched as those would be in one part; None where bits may depend on it."""

    tokens: int
    capacity: int
    invariant: int | None = None


def step_of(q: torch.Tensor, keys: Keys, extra: Keys | None, stand_in: int | None) -> Step:
    """This step, or one of ``stand_in`` rows that may hold as many indices each, which stands for it."""
    tokens = q.shape[0]
    capacity = keys.indices.numel() + (0 if extra is None else extra.indices.numel())
    if stand_in and tokens:
        return Step(stand_in, stand_in * -(-capacity // tokens), tokens)
    return Step(tokens, capacity)


def are_apart(cache: torch.Tensor) -> bool:
    """Whether something lies between the last slot of a block and the first of the next one."""
    return cache.shape[0] > 1 and cache.stride(0) != cache.shape[1] * cache.stride(1)
