"""The oracle: a stable descending sort, a few rows at a time; and what debug mode asks of values."""

from __future__ import annotations

import torch

from sparse_attn.framework import debug

SORTED_AT_ONCE = 1 << 22  # elements


def top_k_per_row(
    logits: torch.Tensor, row_starts: torch.Tensor | None, row_ends: torch.Tensor | None, k: int
) -> torch.Tensor:
    rows, width = logits.shape
    out = torch.full((rows, k), -1, dtype=torch.int32, device=logits.device)
    if width == 0:
        return out
    step = max(1, SORTED_AT_ONCE // width)
    for first in range(0, rows, step):
        some = slice(first, min(first + step, rows))
        start = _clamped(row_starts, some, 0, logits)
        end = _clamped(row_ends, some, width, logits)
        columns = _select(logits[some], start, end, k)
        out[some, : columns.shape[1]] = columns
    return out


def rules_of_top_k_per_row(
    logits: torch.Tensor, row_starts: torch.Tensor | None, row_ends: torch.Tensor | None
) -> None:
    debug.ranges("row_starts", row_starts, "row_ends", row_ends, logits.shape[1], "the width of logits")


def _clamped(limits: torch.Tensor | None, some: slice, default: int, logits: torch.Tensor) -> torch.Tensor:
    if limits is None:
        return torch.full((some.stop - some.start, 1), default, dtype=torch.int64, device=logits.device)
    return limits[some].long().clamp(0, logits.shape[1]).unsqueeze(1)


def _select(scores: torch.Tensor, start: torch.Tensor, end: torch.Tensor, k: int) -> torch.Tensor:
    width = scores.shape[1]
    column = torch.arange(width, device=scores.device)
    selectable = (column >= start) & (column < end) & (scores > float("-inf"))
    scores = torch.where(selectable, scores + 0.0, float("-inf"))  # + 0.0 turns -0.0 into +0.0
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    chosen = selectable.gather(1, best)
    ascending = torch.where(chosen, best, width).sort(1).values
    return torch.where(ascending < width, ascending - start, -1).to(torch.int32)
