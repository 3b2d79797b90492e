"""Two lists of rows a token as one list, in torch."""

from __future__ import annotations

import torch

from sparse_attn.types import Ragged


def join_lists(first: Ragged, second: Ragged, rows: int, more_rows: int) -> Ragged:
    """What each token names of two matrices, as ids of the rows of both behind each other: ``rows``, then
    ``more_rows``. Ids outside of their own matrix are -1. Made on the device, without asking it anything."""
    capacity = first.indices.numel() + second.indices.numel()
    starts, counts, known = zip(_spans(first, rows), _spans(second, more_rows))
    ends = (counts[0] + counts[1]).cumsum(0)
    indptr = torch.cat([ends.new_zeros(1), ends])
    at = torch.arange(capacity, device=ends.device)
    token = torch.searchsorted(ends, at, right=True)  # behind the last one for places that no token has
    starts, counts = ([torch.cat([one, one.new_zeros(1)]) for one in pair] for pair in (starts, counts))
    place = at - indptr[token]
    later = place - counts[0][token]
    of_first = known[0][(starts[0][token] + place).clamp(0, known[0].numel() - 1)]
    of_second = known[1][(starts[1][token] + later).clamp(0, known[1].numel() - 1)]
    ids = torch.where(later < 0, of_first, torch.where(of_second < 0, -1, of_second + rows))
    return Ragged(torch.where(token < ends.numel(), ids, -1), indptr.int())


def _spans(one: Ragged, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(where each token's indices begin, how many they are, all indices and a -1, those outside of the matrix -1)."""
    bounds = one.indptr.long().clamp(0, one.indices.numel())
    known = torch.where((one.indices >= 0) & (one.indices < rows), one.indices, -1)
    return bounds[:-1], bounds.diff().clamp_min(0), torch.cat([known, known.new_full((1,), -1)])
