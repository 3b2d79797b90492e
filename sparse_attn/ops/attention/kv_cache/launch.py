"""The GPU implementation: one launch each."""

from __future__ import annotations

import torch
import triton

from sparse_attn.device import pdl
from sparse_attn.fp8 import FP8_MAX
from sparse_attn.framework.target import target_of
from sparse_attn.layout import KvLayout, LatentFp8Layout, PlainLayout, PlanarFp8Layout, parse_kv_layout, row_stride
from sparse_attn.ops.attention.kv_cache import fake, kernels

GATHERED = {"ROWS": 8, "num_warps": 4}  # rows of a gathering program; a writing program takes one token


def write_kv_cache(
    latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, layout: str
) -> None:
    kind = parse_kv_layout(layout)
    plain = isinstance(kind, PlainLayout)
    tokens = slot_mapping.shape[0]
    if tokens == 0 or cache.shape[0] == 0:
        return
    kernels.write_rows[(tokens,)](
        latent,
        rope,
        cache,
        slot_mapping,
        cache.shape[0] * cache.shape[1],
        cache.shape[1],
        latent.stride(0),
        rope.stride(0),
        slot_mapping.stride(0),
        cache.stride(0),
        **_record(kind, row_stride(cache, kind)),
        POW2=not plain and kind.scale_rule == "pow2",
        FP8_MAX=0.0 if plain else FP8_MAX[kind.flavour],
        AMAX_FLOOR=0.0 if plain else kind.amax_floor,
        num_warps=4,
        enable_fp_fusion=False,
        **pdl.launched(target_of(cache.device)),
    )


def gather_kv_cache(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_indptr: torch.Tensor,
    starts: torch.Tensor | None,
    capacity: int,
    layout: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    kind = parse_kv_layout(layout)
    rows = fake.allocate_rows(cache, capacity, layout, dtype)
    if capacity == 0:
        return rows
    if block_table.numel() == 0:
        return rows.zero_()
    kernels.gather_rows[(triton.cdiv(capacity, GATHERED["ROWS"]),)](
        cache,
        block_table,
        kv_indptr,
        starts,
        rows,
        capacity,
        block_table.shape[0],
        block_table.shape[1],
        cache.shape[0],
        cache.shape[1],
        cache.stride(0),
        block_table.stride(0),
        **_record(kind, row_stride(cache, kind)),
        **GATHERED,
        **pdl.launched(target_of(cache.device)),
    )
    return rows


def _record(kind: KvLayout, row: int) -> dict[str, int | bool]:
    """How a token's record is laid out, as the kernels take it. row: elements from one record to the next."""
    plain = isinstance(kind, PlainLayout)
    groups, group = (1, kind.latent) if plain else (kind.groups, kind.group)
    return dict(
        RECORD=row,
        GROUPS=groups,
        PAD_GROUPS=triton.next_power_of_2(groups),
        GROUP=group,
        PAD_GROUP=max(1, triton.next_power_of_2(group)),
        ROPE=kind.rope,
        PAD_ROPE=max(1, triton.next_power_of_2(kind.rope)),
        SCALE_AT=kind.scale_offset if isinstance(kind, LatentFp8Layout) else 0,
        SCALE_BYTES=kind.scale_bytes if isinstance(kind, PlanarFp8Layout) else 0,
        ROPE_AT=kind.latent if plain else kind.rope_offset,
        FP8=not plain,
        PLANAR=isinstance(kind, PlanarFp8Layout),
        FNUZ=not plain and kind.flavour == "e4m3fnuz",
    )
