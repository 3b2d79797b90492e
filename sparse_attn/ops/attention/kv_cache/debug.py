"""Rules of debug mode for each argument."""

from __future__ import annotations

import torch

from sparse_attn.framework import debug


def write_kv_cache(
    latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, layout: str
) -> None:
    debug.slots("slot_mapping", slot_mapping, cache)


def gather_kv_cache(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_indptr: torch.Tensor,
    starts: torch.Tensor | None,
    capacity: int,
    layout: str,
    dtype: torch.dtype,
) -> None:
    debug.gathered(cache, block_table, kv_indptr, starts, capacity)
