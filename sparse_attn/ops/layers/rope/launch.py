"""The GPU implementation: one launch without scratch."""

from __future__ import annotations

import torch

from sparse_attn.device import grid, pdl
from sparse_attn.framework.target import target_of
from sparse_attn.ops.layers.rope import kernels


def apply_rope(
    x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, start: int, interleaved: bool, inverse: bool
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    wide = x if x.dim() == 3 else x.unsqueeze(1)
    tokens, heads, dim = wide.shape
    target = target_of(x.device)
    block, padded = grid.block_of_heads(heads, dim)
    grid.check("x heads", heads, block)
    kernels.apply_rope[(tokens, -(-heads // block))](
        wide,
        positions,
        cos_sin,
        out,
        cos_sin.shape[0],
        wide.stride(0),
        wide.stride(1),
        wide.stride(2),
        positions.stride(0),
        cos_sin.stride(0),
        cos_sin.stride(1),
        HEADS=heads,
        DIM=dim,
        START=start,
        WIDTH=cos_sin.shape[1],
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        BLOCK_HEADS=block,
        DIM_PADDED=padded,
        num_warps=min(4, max(1, block * padded // 512)),
        enable_fp_fusion=False,
        **pdl.launched(target),
    )
    return out
