"""The GPU implementation: one launch each, without scratch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from sparse_attn.device import grid, pdl
from sparse_attn.framework.target import target_of
from sparse_attn.ops.layers.hyper_connection import fake, kernels


class Config(NamedTuple):
    """Columns of all streams that a program holds at a time: of the mix, which walks a token's, and of the merge, which
    takes one such block."""

    mix_columns: int
    merge_columns: int
    num_warps: int


def choose(count: int, hidden: int) -> Config:
    """8192 values of all streams together in a mix, 4096 in a merge."""
    padded, widest = triton.next_power_of_2(count), triton.next_power_of_2(hidden)
    return Config(min(widest, 8192 // padded), min(widest, 4096 // padded), 8)


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
    collapsed, post, comb = fake.allocate_mix(streams)
    if tokens == 0:
        return collapsed, post, comb
    target = target_of(streams.device)
    launch = choose(count, hidden)
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
    merged = fake.allocate_streams(streams)
    if tokens == 0:
        return merged
    target = target_of(streams.device)
    launch = choose(count, hidden)
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
