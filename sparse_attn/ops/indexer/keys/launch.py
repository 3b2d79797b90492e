"""The GPU implementation: one launch each."""

from __future__ import annotations

import torch
import triton

from sparse_attn.device import pdl
from sparse_attn.fp8 import FP8_MAX
from sparse_attn.framework.target import target_of
from sparse_attn.layout import INDEX_AMAX_FLOOR, IndexFp8Layout, IndexMxfp4Layout, parse_layout, row_stride
from sparse_attn.ops.indexer.keys import kernels
from sparse_attn.ops.indexer.keys.fake import allocate_keys

WRITE_TOKENS, GATHER_ROWS = 4, 32  # of a program
NUM_WARPS = 4


def indexer_k_quant_and_cache(k: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, layout: str) -> None:
    kind = parse_layout(layout)
    fp8 = isinstance(kind, IndexFp8Layout)
    tokens = slot_mapping.shape[0]
    if tokens == 0 or cache.shape[0] == 0:
        return
    kernels.insert_keys[(triton.cdiv(tokens, WRITE_TOKENS),)](
        k,
        cache,
        slot_mapping,
        tokens,
        cache.shape[0] * cache.shape[1],
        cache.shape[1],
        k.stride(0),
        slot_mapping.stride(0),
        cache.stride(0),
        D=kind.dim,
        RECORD=row_stride(cache, kind),
        PAD_D=triton.next_power_of_2(kind.dim),
        FP8=fp8,
        MXFP4=isinstance(kind, IndexMxfp4Layout),
        FNUZ=fp8 and kind.flavour == "e4m3fnuz",
        POW2=fp8 and kind.scale_rule == "pow2",
        FP8_MAX=FP8_MAX[kind.flavour] if fp8 else 0.0,
        AMAX_FLOOR=INDEX_AMAX_FLOOR,
        TOKENS=WRITE_TOKENS,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
        **pdl.launched(target_of(k.device)),
    )


def gather_indexer_k(
    cache: torch.Tensor, block_table: torch.Tensor, kv_indptr: torch.Tensor, capacity: int, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    kind = parse_layout(layout)
    keys, scales = allocate_keys(cache, capacity, layout)
    if capacity == 0:
        return keys, scales
    if block_table.shape[0] == 0:
        return keys.zero_(), scales.zero_()
    kernels.gather_keys[(triton.cdiv(capacity, GATHER_ROWS),)](
        cache,
        block_table,
        kv_indptr,
        keys,
        scales,
        capacity,
        block_table.shape[0],
        block_table.shape[1],
        cache.shape[0],
        cache.shape[1],
        cache.stride(0),
        block_table.stride(0),
        D=keys.shape[1],
        RECORD=row_stride(cache, kind),
        PAD_D=triton.next_power_of_2(keys.shape[1]),
        FP8=isinstance(kind, IndexFp8Layout),
        SCALES=kind.groups if isinstance(kind, IndexMxfp4Layout) else 0,
        ROWS=GATHER_ROWS,
        num_warps=NUM_WARPS,
        **pdl.launched(target_of(cache.device)),
    )
    return keys, scales
