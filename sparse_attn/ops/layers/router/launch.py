"""The GPU implementation: one launch."""

from __future__ import annotations

import torch

from sparse_attn.device import pdl
from sparse_attn.framework.target import target_of
from sparse_attn.ops.layers.router import config, kernels, shapes


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
    tokens, experts = logits.shape
    weights, ids = shapes.allocate_routes(logits, top_k)
    if tokens == 0:
        return weights, ids
    target = target_of(logits.device)
    launch = config.config(experts, num_groups, target)
    kernels.biased_grouped_topk[(-(-tokens // launch.rows),)](
        logits,
        bias,
        weights,
        ids,
        tokens,
        routed_scale,
        logits.stride(0),
        logits.stride(1),
        bias.stride(0),
        NUM_GROUPS=num_groups,
        SIZE=experts // num_groups,
        TOP_GROUPS=top_groups,
        TOP_K=top_k,
        RENORMALISE=renormalise,
        SOFTPLUS=score == "sqrtsoftplus",
        ROWS=launch.rows,
        GROUPS_PADDED=launch.groups,
        SIZE_PADDED=launch.group_size,
        TOP_K_PADDED=config.next_power(top_k),
        num_warps=launch.num_warps,
        **pdl.launched(target),
    )
    return weights, ids
