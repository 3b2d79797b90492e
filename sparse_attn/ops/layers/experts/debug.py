"""Rules of debug mode for each argument."""

from __future__ import annotations

import torch

from sparse_attn.framework import debug


def packed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor,
    gate_up_layout: str,
    down: torch.Tensor,
    down_scales: torch.Tensor,
    down_layout: str,
    clamp: float | None,
    num_experts: int,
    activations: str,
    batch_invariant: bool,
) -> None:
    debug.not_nan("weights", weights)
