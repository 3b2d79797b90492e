"""What debug mode asks of values."""

from __future__ import annotations

import torch

from sparse_attn.framework import debug


def top_k_per_row(logits: torch.Tensor, row_starts: torch.Tensor | None, row_ends: torch.Tensor | None, k: int) -> None:
    debug.ranges("row_starts", row_starts, "row_ends", row_ends, logits.shape[1], "the width of logits")
