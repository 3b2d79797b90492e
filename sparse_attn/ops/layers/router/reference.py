"""The oracle: score, bias, group, drop, sort, gather."""

from __future__ import annotations

import torch

from sparse_attn.framework import debug
from sparse_attn.framework.lanes import by_rows

NEVER = float("-inf")
SCORES = ("sigmoid", "sqrtsoftplus")


def biased_grouped_topk(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    num_groups: int,
    top_groups: int,
    renormalise: bool,
    routed_scale: float,
    score: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = score_of(logits, score)
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
    return weigh(torch.where(selectable, scores.gather(1, ids), 0.0), ids, renormalise, routed_scale)


def hash_route(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    table: torch.Tensor,
    renormalise: bool,
    routed_scale: float,
    score: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    vocabulary, experts = table.shape[0], logits.shape[1]
    known = (tokens >= 0) & (tokens < vocabulary)
    ids = table[tokens.clamp(0, vocabulary - 1).long()].long()
    valid = known.unsqueeze(1) & (ids >= 0) & (ids < experts)
    ids = torch.where(valid, ids, 0)
    chosen = torch.where(valid, score_of(logits, score).gather(1, ids), 0.0)
    return weigh(chosen, ids, renormalise, routed_scale)


def score_of(logits: torch.Tensor, score: str) -> torch.Tensor:
    """fp32 scores of gate logits."""
    logits = logits.float()
    if score == "sigmoid":
        return by_rows(torch.sigmoid, logits)
    return by_rows(torch.nn.functional.softplus, logits).sqrt()


def weigh(
    scores: torch.Tensor, ids: torch.Tensor, renormalise: bool, routed_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, int32 ids) [tokens, top_k] of chosen experts, contiguous whatever the logits or a table were."""
    if renormalise:
        total = scores.sum(1, keepdim=True)
        scores = scores / torch.where(total == 0, 1.0, total)
    return (scores * routed_scale).contiguous(), ids.to(torch.int32).contiguous()


def descending(values: torch.Tensor) -> torch.Tensor:
    """Indices that sort each row from large to small, the lowest index first among equals (-0.0 equals +0.0)."""
    return (values + 0.0).sort(dim=1, descending=True, stable=True).indices


# --- what debug mode asks of values


def rules_of_biased_grouped_topk(logits: torch.Tensor, bias: torch.Tensor) -> None:
    debug.not_nan("logits", logits)
    debug.not_nan("bias", bias)


def rules_of_hash_routed_experts(logits: torch.Tensor, tokens: torch.Tensor, table: torch.Tensor) -> None:
    debug.places("tokens", tokens, table.shape[0], "rows of table")
    named = debug.used_by(table, tokens.unsqueeze(1), torch.arange(table.shape[1], device=table.device))
    debug.places("table", torch.where(named, table, -1), logits.shape[1], "experts")
