"""What debug mode asks of values."""

from __future__ import annotations

import torch

from sparse_attn.framework import debug
from sparse_attn.ops.topk.ranks.shapes import ties_dtype


def count_digits(
    logits: torch.Tensor,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor | None,
    sums: torch.Tensor | None,
    state: torch.Tensor | None,
    k: int,
    level: int,
) -> None:
    _ranges(logits, row_starts, row_ends)
    if sums is not None:
        debug.at_least("sums", sums, 0, "a count")


def count_ties(
    logits: torch.Tensor,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor | None,
    sums: torch.Tensor,
    state: torch.Tensor,
    block_size: int,
) -> None:
    _ranges(logits, row_starts, row_ends)
    debug.at_least("sums", sums, 0, "a count")


def take_winners(
    logits: torch.Tensor,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor | None,
    ties: torch.Tensor,
    above: torch.Tensor,
    state: torch.Tensor,
    k: int,
    block_size: int,
    rank: int,
) -> None:
    _ranges(logits, row_starts, row_ends)
    for name, value in (("ties", ties), ("above", above)):
        debug.at_most(name, value.int(), block_size, "block_size")


def _ranges(logits: torch.Tensor, row_starts: torch.Tensor | None, row_ends: torch.Tensor | None) -> None:
    debug.ranges("row_starts", row_starts, "row_ends", row_ends, logits.shape[1], "the width of logits")


def pack_candidates(
    logits: torch.Tensor, columns: torch.Tensor, row_starts: torch.Tensor | None, block_size: int
) -> None:
    width = logits.shape[1]
    debug.at_least("columns", columns, -1, "no column")
    ends = columns if row_starts is None else columns + row_starts.clamp(0, width).unsqueeze(1)
    debug.at_most("columns", torch.where(columns < 0, -1, ends), width - 1, "the last column of logits")


def merge_candidates(candidates: torch.Tensor, columns: torch.Tensor, block_size: int, rank: int) -> None:
    counts = candidates[..., columns.shape[1] :].view(ties_dtype(block_size))
    debug.at_most("counts", counts.int(), block_size, "block_size")
    debug.at_least("columns", columns, -1, "no column")
