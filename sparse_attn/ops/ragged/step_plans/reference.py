"""The oracles: a search over query_start_loc, and arithmetic."""

from __future__ import annotations

import torch


def step_plan(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, slot_mapping: torch.Tensor, num_decodes: int, next_n: int
) -> tuple[torch.Tensor, ...]:
    device = slot_mapping.device
    decode_rows = num_decodes * next_n
    requests = seq_lens.shape[0]
    lengths = seq_lens.long()
    starts = query_start_loc.long()

    decode = torch.arange(decode_rows, device=device)
    decode_request = decode // next_n
    decode_position = lengths[decode_request] - next_n + decode % next_n

    rows = torch.arange(decode_rows, slot_mapping.shape[0], device=device)
    prefill_ends = starts[num_decodes + 1 :].contiguous()
    request = num_decodes + torch.searchsorted(prefill_ends, rows, right=True)
    inside = (request < requests) & (rows >= starts[num_decodes])
    last = max(requests - 1, 0)
    request = request.clamp(max=last)
    if requests:
        queries = starts[request + 1] - starts[request]
        position = lengths[request] - queries + rows - starts[request]
        alive = lengths[request] > 0
    else:
        position, alive = rows, torch.zeros_like(inside)
    counted = torch.where(starts[num_decodes + 1 :] > starts[num_decodes:-1], lengths[num_decodes:].clamp_min(0), 0)
    kv_indptr = torch.nn.functional.pad(counted.cumsum(0), (1, 0))

    request_ids = torch.cat([decode_request, torch.where(inside & alive, request, -1)])
    positions = torch.cat([decode_position, position])
    valid = (request_ids >= 0) & (positions >= 0) & (slot_mapping >= 0)
    request_ids = torch.where(valid, request_ids, -1)
    positions = torch.where(valid, positions, -1)
    limits = positions + 1
    prefill_request = request_ids[decode_rows:]
    kv_start = torch.where(prefill_request >= 0, kv_indptr[(prefill_request - num_decodes).clamp_min(0)], 0)
    kv_end = kv_start + limits[decode_rows:]
    request_ids, positions, limits, kv_indptr, kv_start, kv_end = (
        x.to(torch.int32) for x in (request_ids, positions, limits, kv_indptr, kv_start, kv_end)
    )
    return request_ids, positions, limits, torch.where(valid, slot_mapping, -1), kv_indptr, kv_start, kv_end


def compressed_plan(
    request_ids: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    kv_indptr: torch.Tensor,
    decode_rows: int,
    ratio: int,
    block_size: int,
) -> tuple[torch.Tensor, ...]:
    requests, max_blocks = block_table.shape
    valid = (positions >= 0) & (request_ids >= 0) & (request_ids < requests)
    limits = torch.where(valid, (positions + 1) // ratio, 0)
    entry = (limits - 1).long()  # the one that a completing row completes
    column = entry.clamp_min(0) // block_size
    complete = valid & ((positions + 1) % ratio == 0) & (column < max_blocks)
    slots = torch.full_like(entry, -1)
    if requests and max_blocks:
        block = block_table[request_ids.clamp(0, requests - 1).long(), column.clamp_max(max_blocks - 1)].long()
        slots = torch.where(complete & (block >= 0), block * block_size + entry % block_size, -1)
    entries = torch.nn.functional.pad((kv_indptr.diff() // ratio).cumsum(0, dtype=torch.int32), (1, 0))
    prefills = kv_indptr.shape[0] - 1
    place = request_ids[decode_rows:].long() - (requests - prefills)
    known = valid[decode_rows:] & (place >= 0) & (place < prefills)
    start = torch.where(known, entries[place.clamp(0, prefills)], 0)
    return limits, slots, entries, start, start + torch.where(known, limits[decode_rows:], 0)


def window_plan(
    request_ids: torch.Tensor,
    positions: torch.Tensor,
    kv_indptr: torch.Tensor,
    prefills: int,
    num_decodes: int,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(kv_indptr [prefills + 1], starts [prefills], offsets [rows]) of the prefill rows, int32."""
    place = request_ids.long() - num_decodes
    known = (positions >= 0) & (place >= 0) & (place < prefills)
    request = torch.arange(prefills, device=positions.device)
    lengths = kv_indptr[request + 1] - kv_indptr[request]  # of so many, where diff() would be of one fewer than bounds
    spare = torch.full((1,), 2**31 - 1, dtype=torch.int32, device=positions.device)
    first = torch.cat([lengths, spare])  # what belongs nowhere lands behind the end
    first = first.scatter_reduce(0, torch.where(known, place, prefills), positions.clamp_min(0), "amin")[:prefills]
    starts = torch.where(first < lengths, (first - window + 1).clamp_min(0), lengths)
    indptr = torch.nn.functional.pad((lengths - starts).cumsum(0, dtype=torch.int32), (1, 0))
    shift = torch.cat([indptr[:-1] - starts, torch.zeros_like(spare)])
    return indptr, starts, shift[torch.where(known, place, prefills)]
