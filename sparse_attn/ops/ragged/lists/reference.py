"""The oracle: mask, count, prefix sum, scatter."""

from __future__ import annotations

import torch

from sparse_attn.framework import debug

MOST_ROWS = 2**31  # that int32 can name
NO_WINDOW = -(2**31)  # an offset that takes every position out of a matrix


def build_ragged_indices_from_dense(
    indices: torch.Tensor, lengths: torch.Tensor | None, row_offsets: torch.Tensor | None, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, width = indices.shape
    keep = indices >= 0
    if lengths is not None:
        keep = keep & (torch.arange(width, device=indices.device) < lengths.unsqueeze(1))
    mapped = indices.long()
    if row_offsets is not None:
        mapped = mapped + row_offsets.long().unsqueeze(1)
    keep = keep & (mapped >= 0) & (mapped < num_rows)
    return pack(mapped, keep)


def compute_global_topk_ragged_indices_and_indptr(
    topk: torch.Tensor, request_ids: torch.Tensor, block_table: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return pack(*slots_of(topk.long(), topk >= 0, request_ids, block_table, block_size, ring=False))


def window_indices(
    positions: torch.Tensor, request_ids: torch.Tensor, block_table: torch.Tensor, block_size: int, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return pack(*slots_of(*windows(positions, window), request_ids, block_table, block_size, ring=True))


def entry_indices(
    limits: torch.Tensor, request_ids: torch.Tensor, block_table: torch.Tensor, block_size: int, max_entries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    entries = torch.arange(max_entries, device=limits.device).expand(limits.shape[0], -1)
    return pack(*slots_of(entries, entries < limits.unsqueeze(1), request_ids, block_table, block_size, ring=False))


def combine_topk_swa_indices_ragged(
    topk: torch.Tensor | None,
    limits: torch.Tensor,
    positions: torch.Tensor,
    entry_offsets: torch.Tensor,
    window_offsets: torch.Tensor,
    window: int,
    max_entries: int,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    if topk is None:
        topk = torch.arange(max_entries, device=limits.device).expand(limits.shape[0], -1)
    visible = (topk >= 0) & (topk < limits.unsqueeze(1)) & (positions >= 0).unsqueeze(1)
    seen, inside = windows(positions, window)
    entries, keys = topk.long() + entry_offsets.long().unsqueeze(1), seen + window_offsets.long().unsqueeze(1)
    rows = torch.cat([entries, keys], dim=1)
    return pack(rows, torch.cat([visible, inside], dim=1) & (rows >= 0) & (rows < num_rows))


def windows(positions: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions [tokens, window] that each row sees, ascending and front-packed; which of them exist)."""
    first = (positions.long() - window + 1).clamp_min(0).unsqueeze(1)
    seen = first + torch.arange(window, device=positions.device)
    return seen, seen <= positions.unsqueeze(1)


def slots_of(
    local: torch.Tensor,
    keep: torch.Tensor,
    request_ids: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    *,
    ring: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cache slots of request-local places [tokens, width]; which of them are valid). A ring's blocks repeat.

    A slot beyond int32 is none: cut to 32 bits it would name another key's.
    """
    requests, max_blocks = block_table.shape
    if requests == 0 or max_blocks == 0:
        return local, torch.zeros_like(keep)
    known = (request_ids >= 0) & (request_ids < requests)
    block = torch.div(local, block_size, rounding_mode="floor")
    column = block % max_blocks if ring else block
    keep = keep & known.unsqueeze(1) & (column < max_blocks)
    row = request_ids.long().clamp(0, requests - 1).unsqueeze(1)
    block_id = block_table[row, column.clamp(0, max_blocks - 1)].long()
    slots = block_id * block_size + local - block * block_size
    return slots, keep & (block_id >= 0) & (slots < MOST_ROWS)


def pack(values: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged pair of values[keep], row by row, at capacity values.numel()."""
    tokens, width = values.shape
    counts = keep.sum(1, dtype=torch.int32)
    indptr = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    place = keep.flatten().cumsum(0) - 1
    spare = tokens * width  # dropped entries land behind the end
    place = torch.where(keep.flatten(), place, spare)
    packed = torch.full((tokens * width + 1,), -1, dtype=torch.int32, device=values.device)
    packed.scatter_(0, place, torch.where(keep, values, -1).flatten().to(torch.int32))
    return packed[:-1].clone(), indptr


# --- what debug mode asks of values


def rules_of_build_ragged_indices_from_dense(
    indices: torch.Tensor, lengths: torch.Tensor | None, row_offsets: torch.Tensor | None, num_rows: int
) -> None:
    width = indices.shape[1]
    looked_at = torch.ones_like(indices, dtype=torch.bool)
    if lengths is not None:
        debug.at_most("lengths", lengths, width, "the width of indices")
        looked_at = torch.arange(width, device=indices.device) < lengths.unsqueeze(1)
    offsets = 0 if row_offsets is None else row_offsets.long().unsqueeze(1)
    _shifted("indices", indices, looked_at, offsets, num_rows)


def rules_of_compute_global_topk_ragged_indices_and_indptr(
    topk: torch.Tensor, request_ids: torch.Tensor, block_table: torch.Tensor, block_size: int
) -> None:
    debug.places("request_ids", request_ids, block_table.shape[0], "requests")
    known = (request_ids >= 0).unsqueeze(1)
    room = block_table.shape[1] * block_size
    debug.places("topk", torch.where(known, topk, -1), room, "tokens that block_table has room for")
    column = torch.where(topk >= 0, topk.long() // block_size, -1)
    _blocks(block_table, request_ids.unsqueeze(1), column, block_size)


def rules_of_window_indices(
    positions: torch.Tensor, request_ids: torch.Tensor, block_table: torch.Tensor, block_size: int, window: int
) -> None:
    debug.at_least("positions", positions, -1, "-1 is none")
    debug.places("request_ids", request_ids, block_table.shape[0], "requests")
    seen = positions.long().unsqueeze(1) - torch.arange(window, device=positions.device)
    column = torch.where(seen >= 0, seen // block_size % max(block_table.shape[1], 1), -1)
    _blocks(block_table, request_ids.unsqueeze(1), column, block_size)


def rules_of_entry_indices(
    limits: torch.Tensor, request_ids: torch.Tensor, block_table: torch.Tensor, block_size: int, max_entries: int
) -> None:
    debug.at_most("limits", limits, max_entries, "max_entries")
    debug.places("request_ids", request_ids, block_table.shape[0], "requests")
    columns = block_table.shape[1]
    known = torch.where(request_ids >= 0, limits, 0)
    debug.at_most("limits", known, columns * block_size, "entries that block_table has room for")
    column = torch.arange(columns, device=limits.device)
    column = torch.where(column * block_size < limits.unsqueeze(1), column, -1)
    _blocks(block_table, request_ids.unsqueeze(1), column, block_size)


def rules_of_combine_topk_swa_indices_ragged(
    topk: torch.Tensor | None,
    limits: torch.Tensor,
    positions: torch.Tensor,
    entry_offsets: torch.Tensor,
    window_offsets: torch.Tensor,
    window: int,
    max_entries: int,
    num_rows: int,
) -> None:
    debug.at_least("positions", positions, -1, "-1 is none")
    if topk is None:
        debug.at_most("limits", torch.where(positions >= 0, limits, 0), max_entries, "max_entries")
        topk = torch.arange(max_entries, dtype=torch.int32, device=limits.device).expand(limits.shape[0], -1)
    visible = (topk < limits.unsqueeze(1)) & (positions >= 0).unsqueeze(1)
    _shifted("topk", topk, visible, entry_offsets.long().unsqueeze(1), num_rows)
    seen = positions.long().unsqueeze(1) - torch.arange(window, device=positions.device)
    windowed = (window_offsets > NO_WINDOW).unsqueeze(1)
    _shifted("position", seen.clamp_min(-1), (seen >= 0) & windowed, window_offsets.long().unsqueeze(1), num_rows)


def _shifted(
    name: str, indices: torch.Tensor, looked_at: torch.Tensor, offsets: torch.Tensor | int, num_rows: int
) -> None:
    """Entries that are looked at are -1, or lie within [0, num_rows) once their row's offset is added."""
    shifted = indices.long() + offsets
    wild = (indices < -1) | ((indices >= 0) & ((shifted < 0) | (shifted >= num_rows)))
    least = torch.zeros_like(shifted) - offsets
    debug.refuse(name, indices, looked_at & wild, f"-1, or {{}} and the {num_rows - 1} rows behind it", limit=least)


def _blocks(block_table: torch.Tensor, requests: torch.Tensor, columns: torch.Tensor, block_size: int) -> None:
    """Blocks that rows name are at least -1, and their slots fit int32."""
    used = debug.used_by(block_table, requests, columns)
    most = MOST_ROWS // block_size - 1
    wild = (block_table < -1) | (block_table > most)
    debug.refuse("block_table", block_table, used & wild, f"-1, or 0 to {most} (slots are int32)")
