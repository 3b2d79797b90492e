"""The GPU implementation: a launch a step."""

from __future__ import annotations

import torch

from sparse_attn.device import pdl
from sparse_attn.ops.rank_topk import config, kernels, shapes
from sparse_attn.ops.rank_topk.shapes import BITS, LEVELS, SHIFTS
from sparse_attn.target import target_of


def count_digits(
    logits: torch.Tensor,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor | None,
    sums: torch.Tensor | None,
    state: torch.Tensor | None,
    k: int,
    level: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = logits.shape
    counts, new_state = shapes.allocate_counts(logits, level), shapes.allocate_state(logits)
    if rows:
        target = target_of(logits.device)
        plan = config.config(rows, width, target)
        kernels.count_digits[(rows, plan.splits)](
            logits, row_starts, row_ends, sums, state, counts, new_state, width, k,
            logits.stride(0), _stride(row_starts), _stride(row_ends), _stride(sums), _stride(state), _stride(state, 1),
            SHIFT=SHIFTS[level], DIGITS=1 << BITS[level], UPPER=1 << BITS[max(level - 1, 0)], COLUMNS=plan.columns,
            num_warps=plan.num_warps, **pdl.launched(target),
        )  # fmt: skip
    return counts, new_state


def count_ties(
    logits: torch.Tensor,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor | None,
    sums: torch.Tensor,
    state: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = logits.shape
    ties, new_state = shapes.allocate_ties(logits, block_size), shapes.allocate_state(logits)
    if rows:
        target = target_of(logits.device)
        plan = config.config(rows, width, target)
        padded = 1 << (block_size - 1).bit_length()
        kernels.count_ties[(rows, plan.splits)](
            logits, row_starts, row_ends, sums, state, ties, new_state, width, ties.shape[1],
            logits.stride(0), _stride(row_starts), _stride(row_ends), _stride(sums), _stride(state), _stride(state, 1),
            BLOCK_SIZE=block_size, UPPER=1 << BITS[LEVELS - 1], COLUMNS=max(plan.columns, padded), PADDED=padded,
            num_warps=plan.num_warps, **pdl.launched(target),
        )  # fmt: skip
    return ties, new_state


def take_winners(
    logits: torch.Tensor,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor | None,
    ties: torch.Tensor,
    state: torch.Tensor,
    k: int,
    block_size: int,
    rank: int,
) -> torch.Tensor:
    rows, width = logits.shape
    out = shapes.allocate_winners(logits, k)
    if rows == 0 or width == 0:
        return out.fill_(-1)
    target = target_of(logits.device)
    plan = config.config(rows, width, target)
    elsewhere = _elsewhere(ties, rank)
    kernels.take_winners[(rows,)](
        logits, row_starts, row_ends, elsewhere, state, out, width, k, elsewhere.shape[1],
        logits.stride(0), _stride(row_starts), _stride(row_ends), _stride(state), _stride(state, 1),
        BLOCK_SIZE=block_size, COLUMNS=plan.columns, num_warps=plan.num_warps, **pdl.launched(target),
    )  # fmt: skip
    return out


def _elsewhere(ties: torch.Tensor, rank: int) -> torch.Tensor:
    """int32 [rows, blocks]: ties of other ranks before each block of ``rank``."""
    others = ties.to(torch.int32, copy=True)
    others[rank].zero_()
    dealt = others.permute(1, 2, 0)
    ordered = dealt.flatten(1)
    before = ordered.cumsum(1, dtype=torch.int32) - ordered
    return before[:, rank :: ties.shape[0]].contiguous()


def _stride(tensor: torch.Tensor | None, dim: int = 0) -> int:
    return 0 if tensor is None else tensor.stride(dim)
