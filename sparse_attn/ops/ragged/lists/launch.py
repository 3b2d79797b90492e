"""The GPU implementation: one launch counts, scans across rows, writes indptr and packs."""

from __future__ import annotations

from typing import Any

import torch

from sparse_attn import workspace
from sparse_attn.device import pdl
from sparse_attn.framework.target import target_of
from sparse_attn.ops.ragged.lists import config, fake, kernels


def build_ragged_indices_from_dense(
    indices: torch.Tensor, lengths: torch.Tensor | None, row_offsets: torch.Tensor | None, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _pack(
        "build_ragged_indices_from_dense", indices, indices.shape[1], 0,
        dense=indices, lengths=lengths, row_offsets=row_offsets, last_row=num_rows - 1,
    )  # fmt: skip


def compute_global_topk_ragged_indices_and_indptr(
    topk: torch.Tensor, request_ids: torch.Tensor, block_table: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _pack(
        "compute_global_topk_ragged_indices_and_indptr", topk, topk.shape[1], 0,
        dense=topk, request_ids=request_ids, block_table=block_table, block_size=block_size,
    )  # fmt: skip


def window_indices(
    positions: torch.Tensor, request_ids: torch.Tensor, block_table: torch.Tensor, block_size: int, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _pack(
        "window_indices", positions, 0, window,
        positions=positions, request_ids=request_ids, block_table=block_table, block_size=block_size,
    )  # fmt: skip


def entry_indices(
    limits: torch.Tensor, request_ids: torch.Tensor, block_table: torch.Tensor, block_size: int, max_entries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _pack(
        "entry_indices", limits, max_entries, 0,
        limits=limits, request_ids=request_ids, block_table=block_table, block_size=block_size,
    )  # fmt: skip


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
    return _pack(
        "combine_topk_swa_indices_ragged", positions, max_entries if topk is None else topk.shape[1], window,
        dense=topk, limits=limits, row_offsets=entry_offsets, positions=positions, window_offsets=window_offsets,
        last_row=num_rows - 1,
    )  # fmt: skip


def _pack(who: str, rows: torch.Tensor, width: int, window: int, **entries: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """One output row for each row of ``rows``: at most ``width`` entries, then a window of positions."""
    tokens = rows.shape[0]
    indices, indptr = fake.allocate_ragged(rows, width + window)
    table = entries.get("block_table")
    if tokens == 0 or width + window == 0 or (table is not None and table.numel() == 0):
        return indices.fill_(-1), indptr.zero_()
    target = target_of(rows.device)
    plan = config.config(tokens, max(width, window), target)
    _, counters = workspace.take(who, config.scratch(tokens, target), rows.device)
    pack_rows(indices, indptr, counters, plan, width, window, **entries)
    return indices, indptr


def pack_rows(
    indices: torch.Tensor,
    indptr: torch.Tensor,
    counters: torch.Tensor,
    plan: config.RaggedConfig,
    width: int,
    window: int,
    *,
    dense: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    limits: torch.Tensor | None = None,
    row_offsets: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    window_offsets: torch.Tensor | None = None,
    request_ids: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    block_size: int = 1,
    next_n: int = 1,
    last_row: int = kernels.INT32_MAX.value,
) -> None:
    """Pack rows of at most ``width`` entries, then ``window`` positions, into a ragged pair.

    counters: what config.scratch asks for.
    """
    tokens = indptr.shape[0] - 1
    strided = (lengths, limits, row_offsets, positions, window_offsets, request_ids, block_table)
    requests, max_blocks = (0, 0) if block_table is None else block_table.shape
    kernels.pack_rows[(tokens,)](
        dense, lengths, limits, row_offsets, positions, window_offsets, request_ids, block_table,
        indices, indptr, counters, plan.resident, tokens, width, window, last_row, requests, next_n, max_blocks,
        *((0, 0) if dense is None else dense.stride()),
        *(0 if value is None else value.stride(0) for value in strided),
        BLOCK_SIZE=block_size, BLOCK=plan.block, LOOKBACK=32, num_warps=plan.num_warps,
        **pdl.launched(target_of(indptr.device)),
    )  # fmt: skip
