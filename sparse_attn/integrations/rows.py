"""Rows as operators take them: dense index rows as ragged ones, a request's length as one of each row."""

from __future__ import annotations

import functools

import torch

from sparse_attn.framework import checks
from sparse_attn.types import Ragged


def ragged_rows(name: str, indices: torch.Tensor) -> Ragged:
    """Rows of ``indices`` int32 [tokens, width]. Nothing is launched where they are contiguous: entries stay where they
    are, and where rows start is kept from call to call."""
    checks.check_dtype(name, indices, (torch.int32,))
    tokens, width = indices.shape
    checks.check_room(name, tokens, width)
    return Ragged(indices.reshape(-1), _starts(indices, tokens, width))


def row_lengths(lengths: torch.Tensor, next_n: int) -> torch.Tensor:
    """int32 [requests, next_n] from ``lengths`` int32 [requests], of a request's last row: one fewer for each row
    before. A length below 0 counts as 0: from the least int32 nothing could be taken off."""
    if next_n == 1:
        return lengths.unsqueeze(1)
    before = torch.arange(1 - next_n, 1, dtype=torch.int32, device=lengths.device)
    return lengths.clamp_min(0).unsqueeze(1) + before


def _starts(like: torch.Tensor, tokens: int, width: int) -> torch.Tensor:
    """int32 [tokens + 1]: 0, width, 2 * width, ..."""
    if torch.compiler.is_compiling() or type(like) is not torch.Tensor:  # a size may be a symbol, a tensor a fake
        return torch.arange(tokens + 1, dtype=torch.int32, device=like.device) * width
    return _kept_starts(width, (tokens + 1).bit_length(), like.device)[: tokens + 1]


@functools.cache
def _kept_starts(width: int, bits: int, device: torch.device) -> torch.Tensor:
    """The starts of 2**bits rows. They are never freed, because a captured graph may read them; all sizes of one width
    are together twice the largest. They come from the host, so that every stream sees them written."""
    with torch.inference_mode(False):
        starts = torch.arange(1 << bits, dtype=torch.int64, device="cpu") * width
        return starts.clamp_max_(checks.MAX_CAPACITY).to(torch.int32).to(device)
