"""Rules of debug mode for each argument."""

from __future__ import annotations

import torch

from sparse_attn.framework import debug


def indexer_q_rope_quant(
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    start: int,
    interleaved: bool,
    hadamard: bool,
    weight_scale: float,
    layout: str,
) -> None:
    debug.places("positions", positions, cos_sin.shape[0], "rows of cos_sin")
