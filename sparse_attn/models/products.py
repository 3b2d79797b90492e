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
    packed = isinstance(weight, PackedWeight)
    if not options.batch_invariant and not packed:
        return torch.bmm(grouped, weight.transpose(1, 2))
    groups, tokens = grouped.shape[:2]
    ends = torch.arange(1, groups + 1, dtype=torch.int32, device=grouped.device) * tokens
    out = grouped_linear(
        grouped.flatten(0, 1),
        ends,
        weight,
        activations=options.activations if packed else "exact",
        batch_invariant=options.batch_invariant,
        impl=options.impl,
    )
    return torch.unflatten(out, 0, (groups, tokens))
