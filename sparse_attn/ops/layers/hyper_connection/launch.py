"""The GPU implementation: one launch each."""

from __future__ import annotations

import torch
import triton

from sparse_attn.device import grid, pdl
from sparse_attn.framework.target import target_of
from sparse_attn.ops.layers.hyper_connection import config, kernels, shapes


def hyper_mix(
    streams: torch.Tensor,
    raw: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, count, hidden = streams.shape
    collapsed, post, comb = shapes.allocate_mix(streams)
    if tokens == 0:
        return collapsed, post, comb
    target = target_of(streams.device)
    launch = config.config(count, hidden, target)
    kernels.mix[(tokens,)](
        streams,
        raw,
        base,
        scale,
        collapsed,
        post,
        comb,
        hidden,
        iterations,
        eps,
        norm_eps,
        streams.stride(0),
        streams.stride(1),
        raw.stride(0),
        COUNT=count,
        PADDED=triton.next_power_of_2(count),
        COLUMNS=launch.mix_columns,
        num_warps=launch.num_warps,
        **pdl.launched(target),
    )
    return collapsed, post, comb


def hyper_merge(out: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    tokens, count, hidden = streams.shape
    merged = shapes.allocate_streams(streams)
    if tokens == 0:
        return merged
    target = target_of(streams.device)
    launch = config.config(count, hidden, target)
    grid.check("streams hidden", hidden, launch.merge_columns)
    kernels.merge[(tokens, triton.cdiv(hidden, launch.merge_columns))](
        out,
        streams,
        post,
        comb,
        merged,
        hidden,
        out.stride(0),
        streams.stride(0),
        streams.stride(1),
        COUNT=count,
        PADDED=triton.next_power_of_2(count),
        COLUMNS=launch.merge_columns,
        num_warps=launch.num_warps,
        **pdl.launched(target),
    )
    return merged
