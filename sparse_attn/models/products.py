"""A layer's products with its weights, packed or plain, and those that it has in each of several groups."""

from __future__ import annotations

import torch

from sparse_attn.ops.layers.products import grouped_linear, linear
from sparse_attn.pipeline.options import Options
from sparse_attn.weight_layout import PackedWeight, Weight


def product(x: torch.Tensor, weight: Weight, options: Options) -> torch.Tensor:
    """ops.layers.products.linear; rows are multiplied by a plain weight as they are."""
    activations = options.activations if isinstance(weight, PackedWeight) else "exact"
    return linear(x, weight, activations=activations, batch_invariant=options.batch_invariant, impl=options.impl)


def by_groups(grouped: torch.Tensor, weight: Weight, options: Options) -> torch.Tensor:
    """grouped [groups, T, d] times weight [groups, n, d] -> [groups, T, n], as ``product`` of each group."""
    if not options.batch_invariant and not isinstance(weight, PackedWeight):
        return torch.bmm(grouped, weight.transpose(1, 2))
    groups, tokens = grouped.shape[:2]
    ends = torch.arange(1, groups + 1, dtype=torch.int32, device=grouped.device) * tokens
    return torch.unflatten(by_ends(grouped.flatten(0, 1), ends, weight, options), 0, (groups, tokens))


def by_ends(rows: torch.Tensor, ends: torch.Tensor, weight: Weight, options: Options) -> torch.Tensor:
    """ops.layers.products.grouped_linear, as ``product`` of each group."""
    return grouped_linear(
        rows,
        ends,
        weight,
        activations=options.activations if isinstance(weight, PackedWeight) else "exact",
        batch_invariant=options.batch_invariant,
        impl=options.impl,
    )
