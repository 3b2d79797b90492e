"""What the training forwards of both architectures share: no caches, every step differentiable, [batch, length] tokens.

The arithmetic is that of the functional forward in sparse_attn.models, with the same weights by the same names.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from sparse_attn.models.moe import gated, gated_mlp
from sparse_attn.ops.layers.rope.reference import rotate
from sparse_attn.ops.layers.router import reference as router
from sparse_attn.spec import MoeSpec

Params = dict[str, torch.Tensor]


class Trace(NamedTuple):
    """What a forward leaves beside its logits. index_loss: KL of every indexer from the attention it stands for. loads:
    share of the tokens each expert took, by the name of its layer's bias."""

    index_loss: list[torch.Tensor]
    loads: dict[str, torch.Tensor]


class Output(NamedTuple):
    """logits: fp32 [B, L, vocab]. hidden: what they come from, as the forward of the library keeps it: [B, L, D], or
    streams [B * L, streams, D]."""

    logits: torch.Tensor
    trace: Trace
    hidden: torch.Tensor


def turn(x: torch.Tensor, table: torch.Tensor, start: int, interleaved: bool, inverse: bool = False) -> torch.Tensor:
    """Rope as ops.layers.rope has it: x [B, L, heads, dim], row l rotated by row l of ``table`` [L, R]."""
    cos, sin = table.unsqueeze(1).chunk(2, dim=-1)
    width = table.shape[1]
    rotated = rotate(x[..., start : start + width].float(), cos, -sin if inverse else sin, interleaved).to(x.dtype)
    return torch.cat([x[..., :start], rotated, x[..., start + width :]], dim=-1)


def one_hot(ids: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """[..., count]; unlike torch's, it never looks at a value."""
    return (ids.unsqueeze(-1) == torch.arange(count, device=ids.device)).to(dtype)


def embed(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of ``table``, by a product whose backward is another: no sort, nothing a CUDA graph could not hold."""
    return one_hot(tokens, table.shape[0], table.dtype) @ table


def moe(
    x: torch.Tensor, params: Params, prefix: str, spec: MoeSpec, tokens: torch.Tensor | None, trace: Trace
) -> torch.Tensor:
    """x [T, D] -> [T, D]; every expert sees every token, weighted by zero where it was not chosen."""
    logits = F.linear(x.float(), params[prefix + "gate"])
    if tokens is not None:
        weights, ids = router.hash_route(
            logits, tokens, params[prefix + "table"], spec.renormalise, spec.routed_scale, spec.score
        )
    else:
        weights, ids = router.biased_grouped_topk(
            logits, params[prefix + "bias"].detach(), spec.experts_per_token, spec.num_groups, spec.top_groups,
            spec.renormalise, spec.routed_scale, spec.score,
        )  # fmt: skip
    chosen = one_hot(ids, spec.num_experts, torch.float32)  # [T, K, E]
    share = (weights.unsqueeze(-1) * chosen).sum(1)  # [T, E]
    if tokens is None:
        trace.loads[prefix + "bias"] = chosen.sum(1).mean(0)
    inner = F.linear(x, params[prefix + "gate_up"].flatten(0, 1)).unflatten(1, (spec.num_experts, -1))
    inner = gated(inner, spec.clamp) * share.to(x.dtype).unsqueeze(2)
    out = F.linear(inner.flatten(1), params[prefix + "down"].permute(1, 0, 2).flatten(1))
    if spec.num_shared:
        out = out + gated_mlp(x, params[prefix + "shared_gate_up"], params[prefix + "shared_down"], spec.clamp)
    return out


def index_scores(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """fp32 [B, R, N]: sum over heads of weight * relu(q . k). queries [B, R, H, D], weights fp32 [B, R, H], keys [B, N,
    D]."""
    across = keys.float().transpose(1, 2)
    scores = 0.0
    for head in range(queries.shape[2]):
        scores = scores + weights[:, :, head, None] * torch.relu(queries[:, :, head].float() @ across)
    return scores


def best(scores: torch.Tensor, visible: torch.Tensor, top_k: int, stable: bool) -> torch.Tensor:
    """Which of the visible [R, N] have one of the ``top_k`` best scores [B, R, N]: bool [B, R, N]. stable: the lowest
    index first among equals, as ops.topk has it."""
    if top_k >= scores.shape[2]:
        return visible.expand_as(scores)
    scores = scores.masked_fill(~visible, float("-inf"))
    if stable:
        chosen = (scores + 0.0).sort(dim=2, descending=True, stable=True).indices[..., :top_k]
    else:
        chosen = scores.topk(top_k, dim=2, sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(2, chosen, True) & visible


def divergence(scores: torch.Tensor, attention: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Mean KL of softmax(scores) from ``attention``, both over what is ``kept``; all [B, R, N]. Rows that keep nothing,
    or less than two, do not count."""
    target = attention.float().masked_fill(~kept, 0.0)
    total = target.sum(-1, keepdim=True)
    target = target / total.clamp_min(1e-20)
    rows = ((kept.sum(-1) > 1) & (total.squeeze(-1) > 1e-6)).float()
    logs = torch.log_softmax(scores.masked_fill(~kept, -1e9), dim=-1)
    loss = (torch.xlogy(target, target) - target * logs).sum(-1)
    return (loss * rows).sum() / rows.sum().clamp_min(1.0)
