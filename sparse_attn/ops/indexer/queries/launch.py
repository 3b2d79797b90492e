"""The GPU implementation: one launch."""

from __future__ import annotations

import torch

from sparse_attn.device import grid, pdl
from sparse_attn.fp8 import FP8_MAX
from sparse_attn.framework.target import target_of
from sparse_attn.layout import INDEX_AMAX_FLOOR, IndexFp8Layout, IndexMxfp4Layout, parse_layout
from sparse_attn.ops.indexer.queries import kernels
from sparse_attn.ops.indexer.queries.fake import allocate_query


def indexer_q_rope_quant(
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    start: int,
    interleaved: bool,
    hadamard: bool,
    weight_scale: float,
    layout: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, dim = q.shape
    query, folded = allocate_query(q, layout)
    if tokens == 0 or heads == 0:
        return query, folded
    form = parse_layout(layout)
    quantise = isinstance(form, IndexFp8Layout)
    target = target_of(q.device)
    block, padded = grid.block_of_heads(heads, dim)
    grid.check("q heads", heads, block)
    kernels.indexer_q_rope_quant[(tokens, -(-heads // block))](
        q,
        weights,
        positions,
        cos_sin,
        query,
        folded,
        cos_sin.shape[0],
        weight_scale,
        INDEX_AMAX_FLOOR,
        FP8_MAX[form.flavour] if quantise else 1.0,
        q.stride(0),
        q.stride(1),
        q.stride(2),
        weights.stride(0),
        weights.stride(1),
        positions.stride(0),
        cos_sin.stride(0),
        cos_sin.stride(1),
        HEADS=heads,
        DIM=dim,
        START=start,
        WIDTH=cos_sin.shape[1],
        INTERLEAVED=interleaved,
        HADAMARD=hadamard,
        QUANTISE=quantise,
        MXFP4=isinstance(form, IndexMxfp4Layout),
        POW2=quantise and form.scale_rule == "pow2",
        FNUZ=quantise and form.flavour == "e4m3fnuz",
        BLOCK_HEADS=block,
        DIM_PADDED=padded,
        STAGES=padded.bit_length() - 1,
        num_warps=4,
        enable_fp_fusion=False,
        **pdl.launched(target),
    )
    return query, folded
