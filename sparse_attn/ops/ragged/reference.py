"""The oracle: mask, count, prefix sum, scatter."""

from __future__ import annotations

import torch


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
    requests, max_blocks = block_table.shape
    known = (request_ids >= 0) & (request_ids < requests)
    block = torch.div(topk.long(), block_size, rounding_mode="floor")
    keep = known.unsqueeze(1) & (topk >= 0) & (block < max_blocks)
    if requests == 0 or max_blocks == 0:
        return pack(topk.long(), torch.zeros_like(keep))
    row = request_ids.long().clamp(0, requests - 1).unsqueeze(1)
    block_id = block_table[row, block.clamp(0, max_blocks - 1)].long()
    keep = keep & (block_id >= 0)
    return pack(block_id * block_size + topk.long() % block_size, keep)


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
