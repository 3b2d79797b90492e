"""Rules of debug mode for each argument."""

from __future__ import annotations

import torch

from sparse_attn.framework import debug


def indexer_k_quant_and_cache(k: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, layout: str) -> None:
    debug.slots("slot_mapping", slot_mapping, cache)


def gather_indexer_k(
    cache: torch.Tensor, block_table: torch.Tensor, kv_indptr: torch.Tensor, capacity: int, layout: str
) -> None:
    debug.gathered(cache, block_table, kv_indptr, None, capacity)
