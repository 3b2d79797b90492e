"""The oracle: the layout's own encode and decode at the valid slots."""

from __future__ import annotations

import torch

from sparse_attn.framework import debug
from sparse_attn.layout import parse_layout
from sparse_attn.ops.indexer.keys.reference import gathered_slots


def write_kv_cache(
    latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, layout: str
) -> None:
    slot_mapping = slot_mapping.long()
    written = (slot_mapping >= 0) & (slot_mapping < cache.shape[0] * cache.shape[1])
    rows = torch.cat([latent, rope], dim=1)[: slot_mapping.shape[0]][written]
    if len(rows):
        parse_layout(layout).encode(cache, slot_mapping[written], rows)


def gather_kv_cache(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_indptr: torch.Tensor,
    starts: torch.Tensor | None,
    capacity: int,
    layout: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    kind = parse_layout(layout)
    slots, known = gathered_slots(cache, block_table, kv_indptr, capacity, starts)
    rows = torch.zeros(capacity, kind.dim, dtype=dtype, device=cache.device)
    rows[known] = kind.decode(cache, slots[known]).to(dtype)
    return rows


# --- what debug mode asks of values


def rules_of_write_kv_cache(cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    debug.slots("slot_mapping", slot_mapping, cache)


def rules_of_gather_kv_cache(
    cache: torch.Tensor, block_table: torch.Tensor, kv_indptr: torch.Tensor, starts: torch.Tensor | None, capacity: int
) -> None:
    debug.gathered(cache, block_table, kv_indptr, starts, capacity)
