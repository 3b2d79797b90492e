"""A layer's products with its weights, packed or plain, and those that it has in each of several groups."""

from __future__ import annotations

import torch

from sparse_attn.framework import checks
from sparse_attn.ops.layers.products import ACTIVATIONS, grouped_linear, linear
from sparse_attn.pipeline.select import num_decode_rows
from sparse_attn.types import StepPlan
from sparse_attn.weight_layout import PackedWeight, Weight


def activations_of(plan: StepPlan, prefill_activations: str) -> str:
    """What a step's rows are multiplied as: ``prefill_activations`` where it holds prefill rows, else "exact"."""
    checks.check_choice("prefill_activations", prefill_activations, ACTIVATIONS)
    if prefill_activations == "exact" or plan.positions.shape[0] == num_decode_rows(plan):
        return "exact"
    return prefill_activations


def product(
    x: torch.Tensor, weight: Weight, *, activations: str = "exact", batch_invariant: bool = False, impl: str
) -> torch.Tensor:
    """ops.layers.products.linear. activations: of a packed weight; by a plain one rows are multiplied as they are."""
    activations = activations if isinstance(weight, PackedWeight) else "exact"
    return linear(x, weight, activations=activations, batch_invariant=batch_invariant, impl=impl)


def by_groups(
    grouped: torch.Tensor, weight: Weight, *, activations: str = "exact", batch_invariant: bool, impl: str
) -> torch.Tensor:
    """grouped [groups, T, d] times weight [groups, n, d] -> [groups, T, n]. activations: of a packed weight.
    batch_invariant: see ops.layers.products.grouped_linear."""
    packed = isinstance(weight, PackedWeight)
    if not batch_invariant and not packed:
        return torch.bmm(grouped, weight.transpose(1, 2))
    groups, tokens = grouped.shape[:2]
    ends = torch.arange(1, groups + 1, dtype=torch.int32, device=grouped.device) * tokens
    out = grouped_linear(
        grouped.flatten(0, 1), ends, weight, activations=activations if packed else "exact",
        batch_invariant=batch_invariant, impl=impl,
    )  # fmt: skip
    return torch.unflatten(out, 0, (groups, tokens))
