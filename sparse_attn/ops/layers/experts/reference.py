"""The oracle: rows sorted by expert, two grouped products of the reference."""

from __future__ import annotations

import functools

import torch

from sparse_attn.ops.layers.experts.shapes import by_expert
from sparse_attn.ops.layers.linears.reference import grouped_linear, grouped_linear_fp8


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
) -> torch.Tensor:
    first, second = (gate_up, gate_up_scales, gate_up_layout), (down, down_scales, down_layout)
    product = grouped_linear if activations == "exact" else grouped_linear_fp8
    product = functools.partial(product, batch_invariant=batch_invariant)
    return by_expert(x, weights, ids, first, second, clamp, product)
