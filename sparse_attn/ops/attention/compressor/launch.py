"""The GPU implementation: pool, then keep. It takes two launches, because entries are pooled from rows that keeping
overwrites."""

from __future__ import annotations

import torch
import triton

from sparse_attn.device import grid, pdl
from sparse_attn.fp8 import FP8_MAX
from sparse_attn.framework.target import target_of
from sparse_attn.layout import (
    INDEX_AMAX_FLOOR,
    PLANAR_AMAX_FLOOR,
    SCALE_BYTES,
    IndexFp8Layout,
    IndexMxfp4Layout,
    Layout,
    PlanarFp8Layout,
    parse_layout,
)
from sparse_attn.ops.attention.compressor import kernels

KEPT_COLUMNS = 1024  # values of a row that a keeping program writes


def choose(dim: int, span: int) -> tuple[int, int]:
    """(tokens that a program pools at a time, its warps), for entries that pool ``span`` tokens. A CTA takes 4096
    values of kv and as many of gate at a time, 16 of each a thread."""
    padded = triton.next_power_of_2(dim)
    rows = max(1, min(triton.next_power_of_2(span), 4096 // padded))
    return rows, max(1, min(8, rows * padded // 512))


def compress_and_cache(
    kv: torch.Tensor,
    gate: torch.Tensor,
    position_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    positions: torch.Tensor,
    request_ids: torch.Tensor,
    state: torch.Tensor,
    state_table: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin: torch.Tensor,
    ratio: int,
    overlap: bool,
    eps: float,
    rope_start: int,
    hadamard: bool,
    layout: str,
) -> None:
    kind, (tokens, width) = parse_layout(layout), kv.shape
    if tokens == 0 or state_table.shape[0] == 0:
        return
    span = 2 * ratio if overlap else ratio
    target = target_of(kv.device)
    rows, num_warps = choose(kind.dim, span)
    grid.check("kv width", width, KEPT_COLUMNS)
    row_strides = kv.stride(0), gate.stride(0), position_bias.stride(0)
    common = positions, request_ids, state, state_table
    sizes = state_table.shape[0], state_table.shape[1], state.shape[0], state.shape[1]
    strides = positions.stride(0), request_ids.stride(0), state.stride(0), state_table.stride(0)
    if cache.shape[0]:
        padded = triton.next_power_of_2(kind.dim)
        kernels.pool[(tokens,)](
            kv,
            gate,
            position_bias,
            *common,
            norm_weight,
            cos_sin,
            cache,
            slot_mapping,
            *sizes,
            cache.shape[0] * cache.shape[1],
            cache.shape[1],
            cos_sin.shape[0],
            eps,
            *row_strides,
            *strides,
            slot_mapping.stride(0),
            cache.stride(0),
            cos_sin.stride(0),
            DIM=kind.dim,
            PADDED=padded,
            RATIO=ratio,
            SPAN=span,
            OVERLAP=overlap,
            ROPE_START=rope_start,
            ROPE_WIDTH=cos_sin.shape[1],
            HADAMARD=hadamard,
            STAGES=padded.bit_length() - 1,
            **_record(kind, padded),
            ROWS=rows,
            num_warps=num_warps,
            enable_fp_fusion=False,
            **pdl.launched(target),
        )
    kernels.keep[(tokens, triton.cdiv(width, KEPT_COLUMNS))](
        kv,
        gate,
        position_bias,
        *common,
        tokens,
        *sizes,
        *row_strides,
        *strides,
        WIDTH=width,
        RATIO=ratio,
        COLUMNS=KEPT_COLUMNS,
        num_warps=4,
        **pdl.launched(target),
    )


def _record(kind: Layout, padded: int) -> dict[str, int | float | bool]:
    """How an entry is stored."""
    fp8 = isinstance(kind, (PlanarFp8Layout, IndexFp8Layout))
    codes, group, record, scale_bytes = kind.dim, padded, kind.dim, SCALE_BYTES
    if isinstance(kind, PlanarFp8Layout):
        codes, group, record, scale_bytes = kind.latent, min(kind.group, padded), kind.token_bytes, kind.scale_bytes
    elif isinstance(kind, IndexMxfp4Layout):
        record, scale_bytes = kind.code_bytes, kind.groups
    return dict(
        FP8=fp8,
        MXFP4=isinstance(kind, IndexMxfp4Layout),
        CODES=codes,
        GROUP=group,
        RECORD=record,
        SCALE_BYTES=scale_bytes,
        EXPONENT=isinstance(kind, PlanarFp8Layout),
        FNUZ=fp8 and kind.flavour == "e4m3fnuz",
        POW2=fp8 and kind.scale_rule == "pow2",
        FP8_MAX=FP8_MAX[kind.flavour] if fp8 else 0.0,
        AMAX_FLOOR=PLANAR_AMAX_FLOOR if isinstance(kind, PlanarFp8Layout) else INDEX_AMAX_FLOOR,
    )
