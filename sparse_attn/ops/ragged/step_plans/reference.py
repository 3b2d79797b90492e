"""The oracles: a search over query_start_loc, and arithmetic."""

from __future__ import annotations

import torch

from sparse_attn.framework import debug


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


# --- what debug mode asks of values


def rules_of_step_plan(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, slot_mapping: torch.Tensor, num_decodes: int, next_n: int
) -> None:
    debug.at_least("slot_mapping", slot_mapping, -1, "-1 is none")
    if seq_lens.shape[0] == num_decodes:
        return
    decode_rows = num_decodes * next_n
    debug.indptr("query_start_loc", query_start_loc, slot_mapping.shape[0], "rows of the step", first=num_decodes)
    starts = query_start_loc[:-1].long()
    rows = query_start_loc[1:] - starts
    prefill = torch.arange(seq_lens.shape[0], device=seq_lens.device) >= num_decodes
    debug.refuse(
        "query_start_loc", query_start_loc[:-1], prefill & (rows > 0) & (starts < decode_rows),
        f"at least {decode_rows} (behind the decode rows)",
    )  # fmt: skip
    debug.refuse(
        "seq_lens", seq_lens, prefill & (seq_lens > 0) & (seq_lens < rows),
        "at least {} (the rows of this step count among them)", limit=rows,
    )  # fmt: skip


def rules_of_build_step_plan(
    seq_lens: torch.Tensor,
    request_ids: torch.Tensor,
    limits: torch.Tensor,
    kv_indptr: torch.Tensor,
    max_context: int,
    kv_capacity: int,
) -> None:
    """Of the host, by what step_plan gives. A request may be longer than its last row that is no padding."""
    if bool((far := limits > max_context).any()):
        request = int(request_ids[far][0])
        got = f"seq_lens[{request}]: got {int(seq_lens[request])}"
        raise ValueError(f"{got}, allowed: at most {max_context} (max_context)")
    if (keys := int(kv_indptr[-1])) > kv_capacity:
        raise ValueError(f"kv_capacity: got {kv_capacity}, allowed: at least {keys} (seq_lens of prefill requests)")


def rules_of_compressed_plan(
    request_ids: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    kv_indptr: torch.Tensor,
    ratio: int,
    block_size: int,
) -> None:
    requests, columns = block_table.shape
    room = columns * block_size * ratio
    debug.places("request_ids", request_ids, requests, "requests")
    debug.places("positions", positions, room, "tokens whose entries block_table has room for")
    debug.indptr("kv_indptr", kv_indptr, debug.INT32_MAX, "int32")
    complete = (positions >= 0) & ((positions + 1) % ratio == 0)
    column = torch.where(complete, positions.long() // ratio // block_size, -1)
    debug.blocks(block_table, debug.used_by(block_table, request_ids, column), None)


def rules_of_window_plan(
    request_ids: torch.Tensor, positions: torch.Tensor, kv_indptr: torch.Tensor, num_decodes: int
) -> None:
    """Of prefill rows."""
    debug.indptr("kv_indptr", kv_indptr, debug.INT32_MAX, "int32")
    debug.at_least("positions", positions, -1, "-1 is none")
    prefills = kv_indptr.shape[0] - 1
    place = request_ids.long() - num_decodes
    debug.refuse(
        "request_ids", request_ids, (request_ids != -1) & ((place < 0) | (place >= prefills)),
        f"-1, or {num_decodes} to {num_decodes + prefills - 1} (prefill requests)",
    )  # fmt: skip
