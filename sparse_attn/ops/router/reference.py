"""The oracle: score, bias, group, drop, sort, gather."""

from __future__ import annotations

import torch

NEVER = float("-inf")


def biased_grouped_topk(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    num_groups: int,
    top_groups: int,
    renormalise: bool,
    routed_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.sigmoid(logits.float())
    biased = scores + bias
    biased = torch.where(torch.isnan(biased), NEVER, biased)
    if top_groups < num_groups:
        groups = biased.unflatten(1, (num_groups, -1))  # [tokens, groups, experts of a group]
        group_scores = groups.topk(2, dim=2).values.sum(2)
        group_scores = torch.where(torch.isnan(group_scores), NEVER, group_scores)
        kept = torch.zeros_like(group_scores, dtype=torch.bool)
        kept.scatter_(1, descending(group_scores)[:, :top_groups], True)
        biased = torch.where(kept.unsqueeze(2), groups, NEVER).flatten(1)
    ids = descending(biased)[:, :top_k]
    selectable = biased.gather(1, ids) > NEVER
    weights = torch.where(selectable, scores.gather(1, ids), 0.0)
    if renormalise:
        total = weights.sum(1, keepdim=True)
        weights = weights / torch.where(total == 0, 1.0, total)
    return weights * routed_scale, ids.to(torch.int32)


def descending(values: torch.Tensor) -> torch.Tensor:
    """Indices that sort each row from large to small, the lowest index first among equals (-0.0 equals +0.0)."""
    return (values + 0.0).sort(dim=1, descending=True, stable=True).indices
