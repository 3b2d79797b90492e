"""The GPU implementation: one launch counts, scans across rows, writes indptr and packs."""

from __future__ import annotations

import torch

from sparse_attn import workspace
from sparse_attn.ops.ragged import config, kernels, shapes
from sparse_attn.target import target_of


def build_ragged_indices_from_dense(
    indices: torch.Tensor, lengths: torch.Tensor | None, row_offsets: torch.Tensor | None, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _build("build_ragged_indices_from_dense", indices, lengths, row_offsets, None, None, 1, num_rows)


def compute_global_topk_ragged_indices_and_indptr(
    topk: torch.Tensor, request_ids: torch.Tensor, block_table: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _build(
        "compute_global_topk_ragged_indices_and_indptr", topk, None, None, request_ids, block_table, block_size, 0
    )


def _build(who, dense, lengths, row_offsets, request_ids, block_table, block_size, num_rows):
    tokens, width = dense.shape
    indices, indptr = shapes.allocate_ragged(dense)
    if tokens == 0 or width == 0:
        return indices, indptr.zero_()
    target = target_of(dense.device)
    launch = config.config(width, target)
    _, counters = workspace.take(who, config.scratch(tokens, target), dense.device)
    kernels.pack_rows[(tokens,)](
        dense,
        lengths,
        row_offsets,
        request_ids,
        block_table,
        indices,
        indptr,
        counters,
        tokens,
        width,
        num_rows,
        0 if block_table is None else block_table.shape[0],
        0 if block_table is None else block_table.shape[1],
        block_size,
        dense.stride(0),
        dense.stride(1),
        0 if lengths is None else lengths.stride(0),
        0 if row_offsets is None else row_offsets.stride(0),
        0 if request_ids is None else request_ids.stride(0),
        0 if block_table is None else block_table.stride(0),
        BLOCK=launch.block,
        LOOKBACK=32,
        num_warps=launch.num_warps,
    )
    return indices, indptr
