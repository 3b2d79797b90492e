"""Shape of a product, and what a packed weight's tensors have to be."""

from __future__ import annotations

import torch

from sparse_attn.weight_layout import packed_weight, parse_weight_layout

PLAIN = "plain"  # the layout of a weight without scales, in the dtype of the rows


def fits(codes: torch.Tensor, scales: torch.Tensor, layout: str) -> None:
    """TypeError or ValueError where codes and scales are not of ``layout``."""
    packed_weight(codes, scales, parse_weight_layout(layout))


def allocate_product(rows: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Uninitialised [n, outputs] in the dtype of ``rows`` [n, columns], for codes [groups, outputs, ...]."""
    return torch.empty(rows.shape[0], codes.shape[1], dtype=rows.dtype, device=rows.device)
