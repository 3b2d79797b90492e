"""What debug mode asks of values."""

from __future__ import annotations

import torch

from sparse_attn.framework import debug


def grouped_linear(
    rows: torch.Tensor,
    ends: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    layout: str,
    batch_invariant: bool,
) -> None:
    if ends is None:
        return
    debug.at_least("ends", ends, 0, "the first row")
    debug.at_most("ends", ends, rows.shape[0], "rows")
    before = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    debug.refuse("ends", ends, ends < before, "ascending ends, at least {}", limit=before)


def grouped_linear_fp8(
    rows: torch.Tensor,
    ends: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    layout: str,
    batch_invariant: bool,
) -> None:
    grouped_linear(rows, ends, codes, scales, layout, batch_invariant)
