"""Products that a layer has in each of several groups: heads, or groups of heads."""

from __future__ import annotations

import torch

from sparse_attn.ops.grouped_linear import grouped_linear
from sparse_attn.weight_layout import PackedWeight, Weight


def by_groups(grouped: torch.Tensor, weight: Weight, *, batch_invariant: bool, impl: str) -> torch.Tensor:
    """grouped [groups, T, d] times weight [groups, n, d] -> [groups, T, n]. batch_invariant: see
    ops.grouped_linear.grouped_linear."""
    if not batch_invariant and not isinstance(weight, PackedWeight):
        return torch.bmm(grouped, weight.transpose(1, 2))
    groups, tokens = grouped.shape[:2]
    ends = torch.arange(1, groups + 1, dtype=torch.int32, device=grouped.device) * tokens
    out = grouped_linear(grouped.flatten(0, 1), ends, weight, batch_invariant=batch_invariant, impl=impl)
    return torch.unflatten(out, 0, (groups, tokens))
