"""The GPU implementation: one launch without scratch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from sparse_attn.device import pdl
from sparse_attn.framework.target import Target, target_of
from sparse_attn.ops.layers.router import fake, kernels


class Config(NamedTuple):
    """rows: tokens per program; groups, group_size: padded to powers of two."""

    rows: int
    groups: int
    group_size: int
    num_warps: int


def choose(experts: int, num_groups: int, target: Target) -> Config:
    """A warp per 512 padded experts. Several rows a CTA would leave SMs idle at decode sizes."""
    groups = triton.next_power_of_2(num_groups)
    group_size = triton.next_power_of_2(experts // num_groups)
    padded = groups * group_size
    rows = 8 if target.interpreted else max(1, 256 // padded)
    return Config(rows, groups, group_size, min(4, max(1, rows * padded // 512)))


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
    weights, ids = fake.allocate_routes(logits, top_k)
    if tokens == 0:
        return weights, ids
    target = target_of(logits.device)
    launch = choose(experts, num_groups, target)
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
        TOP_K_PADDED=triton.next_power_of_2(top_k),
        num_warps=launch.num_warps,
        **pdl.launched(target),
    )
    return weights, ids
