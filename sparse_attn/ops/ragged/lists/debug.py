"""What debug mode asks of values."""

from __future__ import annotations

import torch

from sparse_attn.framework import debug
from sparse_attn.ops.ragged.lists.reference import MOST_ROWS, NO_WINDOW


def build_ragged_indices_from_dense(
    indices: torch.Tensor, lengths: torch.Tensor | None, row_offsets: torch.Tensor | None, num_rows: int
) -> None:
    width = indices.shape[1]
    looked_at = torch.ones_like(indices, dtype=torch.bool)
    if lengths is not None:
        debug.at_most("lengths", lengths, width, "the width of indices")
        looked_at = torch.arange(width, device=indices.device) < lengths.unsqueeze(1)
    offsets = 0 if row_offsets is None else row_offsets.long().unsqueeze(1)
    _shifted("indices", indices, looked_at, offsets, num_rows)


def compute_global_topk_ragged_indices_and_indptr(
    topk: torch.Tensor, request_ids: torch.Tensor, block_table: torch.Tensor, block_size: int
) -> None:
    debug.places("request_ids", request_ids, block_table.shape[0], "requests")
    known = (request_ids >= 0).unsqueeze(1)
    room = block_table.shape[1] * block_size
    debug.places("topk", torch.where(known, topk, -1), room, "tokens that block_table has room for")
    column = torch.where(topk >= 0, topk.long() // block_size, -1)
    _blocks(block_table, request_ids.unsqueeze(1), column, block_size)


def window_indices(
    positions: torch.Tensor, request_ids: torch.Tensor, block_table: torch.Tensor, block_size: int, window: int
) -> None:
    debug.at_least("positions", positions, -1, "-1 is none")
    debug.places("request_ids", request_ids, block_table.shape[0], "requests")
    seen = positions.long().unsqueeze(1) - torch.arange(window, device=positions.device)
    column = torch.where(seen >= 0, seen // block_size % max(block_table.shape[1], 1), -1)
    _blocks(block_table, request_ids.unsqueeze(1), column, block_size)


def entry_indices(
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


def combine_topk_swa_indices_ragged(
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
