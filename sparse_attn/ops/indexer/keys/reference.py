"""The oracle: the layout's own encode and decode at the valid slots."""

from __future__ import annotations

import torch

from sparse_attn.framework import debug
from sparse_attn.layout import IndexFp8Layout, IndexMxfp4Layout, parse_layout
from sparse_attn.ops.indexer.keys.fake import allocate_keys

INT32_MAX = 2**31 - 1


def indexer_k_quant_and_cache(k: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, layout: str) -> None:
    slot_mapping = slot_mapping.long()
    written = (slot_mapping >= 0) & (slot_mapping < cache.shape[0] * cache.shape[1])
    parse_layout(layout).encode(cache, slot_mapping[written], k[: slot_mapping.shape[0]][written])


def gather_indexer_k(
    cache: torch.Tensor, block_table: torch.Tensor, kv_indptr: torch.Tensor, capacity: int, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    kind = parse_layout(layout)
    slots, known = gathered_slots(cache, block_table, kv_indptr, capacity)
    keys, scales = (tensor.zero_() for tensor in allocate_keys(cache, capacity, layout))
    if isinstance(kind, (IndexFp8Layout, IndexMxfp4Layout)):
        keys[known], scales[known] = kind.decode_parts(cache, slots[known])
    else:
        keys[known] = kind.decode(cache, slots[known]).to(cache.dtype)
    return keys, scales


def gathered_slots(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_indptr: torch.Tensor,
    capacity: int,
    starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots int64 [capacity], known [capacity]) of the rows that kv_indptr lays out; with ``starts``, slots of
    rings."""
    requests, max_blocks = block_table.shape
    num_blocks, block_size, _ = cache.shape
    row = torch.arange(capacity, device=cache.device)
    if requests == 0 or max_blocks == 0:
        return row, torch.zeros_like(row, dtype=torch.bool)
    request = torch.searchsorted(kv_indptr[1:].long(), row, right=True)
    known = request < requests
    request = request.clamp(max=requests - 1)
    position = row - kv_indptr[request].long()
    known = known & (position >= 0)
    if starts is not None:
        position = position + starts[request].long()
    column = torch.div(position, block_size, rounding_mode="floor")
    if starts is not None:
        column = column % max_blocks
    known = known & (position >= 0) & (position <= INT32_MAX) & (column < max_blocks)
    block = block_table[request, column.clamp(0, max_blocks - 1)].long()
    known = known & (block >= 0) & (block < num_blocks)
    return block * block_size + position % block_size, known


# --- what debug mode asks of values


def rules_of_indexer_k_quant_and_cache(cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    debug.slots("slot_mapping", slot_mapping, cache)


def rules_of_gather_indexer_k(
    cache: torch.Tensor, block_table: torch.Tensor, kv_indptr: torch.Tensor, capacity: int
) -> None:
    debug.gathered(cache, block_table, kv_indptr, None, capacity)
