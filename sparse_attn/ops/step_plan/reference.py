"""The oracle: a search over query_start_loc, and arithmetic."""

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
