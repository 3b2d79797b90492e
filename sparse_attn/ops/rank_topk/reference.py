"""The oracle: keys as 64-bit integers, counted by scatter."""

from __future__ import annotations

import torch

from sparse_attn.ops.rank_topk.shapes import BITS, LEVELS, SHIFTS, num_blocks, ties_dtype

SIGN = 1 << 31


def count_digits(
    logits: torch.Tensor,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor | None,
    sums: torch.Tensor | None,
    state: torch.Tensor | None,
    k: int,
    level: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = logits.shape[0]
    keys, _ = _keys(logits, row_starts, row_ends)
    if sums is None or state is None:
        prefix = torch.zeros(rows, dtype=torch.int64, device=logits.device)
        state = torch.stack([prefix, torch.full_like(prefix, k)], 1).to(torch.int32)
    else:
        state = _descend(sums, state, level - 1)
        prefix = state[:, 0].long()
    digits = 1 << BITS[level]
    counted = (keys > 0) & (keys >> (SHIFTS[level] + BITS[level]) == prefix.unsqueeze(1))
    counts = torch.zeros(rows, digits, dtype=torch.int32, device=logits.device)
    return counts.scatter_add_(1, keys >> SHIFTS[level] & (digits - 1), counted.to(torch.int32)), state


def count_ties(
    logits: torch.Tensor,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor | None,
    sums: torch.Tensor,
    state: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    keys, column = _keys(logits, row_starts, row_ends)
    state = _descend(sums, state, LEVELS - 1)
    shape = logits.shape[0], num_blocks(logits.shape[1], block_size)

    def by_block(counted: torch.Tensor) -> torch.Tensor:
        counts = torch.zeros(shape, dtype=torch.int32, device=logits.device)
        counts.scatter_add_(1, torch.where(counted, column // block_size, 0), counted.to(torch.int32))
        return counts.to(ties_dtype(block_size))

    return by_block(_tied(keys, state)), by_block(keys > _threshold(state)), state


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
) -> torch.Tensor:
    rows, width = logits.shape
    out = torch.full((rows, k), -1, dtype=torch.int32, device=logits.device)
    if width == 0:
        return out
    keys, column = _keys(logits, row_starts, row_ends)
    tied = _tied(keys, state)
    dealt = ties.permute(1, 2, 0).flatten(1).long()  # blocks in the order of the whole row
    before = (dealt.cumsum(1) - dealt)[:, rank :: ties.shape[0]]
    own = ties[rank].long()
    elsewhere = before - (own.cumsum(1) - own)  # ties of other ranks before a block
    place = tied.cumsum(1) - 1 + elsewhere.gather(1, torch.where(tied, column // block_size, 0))
    chosen = (keys > _threshold(state)) | (tied & (place < state[:, 1:].long()))
    ascending = torch.where(chosen, column, width).sort(1).values[:, :k]
    out[:, : ascending.shape[1]] = torch.where(ascending < width, ascending, -1)
    return out


def _keys(
    logits: torch.Tensor, row_starts: torch.Tensor | None, row_ends: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys, columns relative to the row's start) int64 [rows, width]. A key is in [0, 2^32) and ordered as the scores
    are; 0 is for what is never selected."""
    rows, width = logits.shape
    column = torch.arange(width, device=logits.device).expand(rows, width)
    start = 0 if row_starts is None else row_starts.long().clamp(0, width).unsqueeze(1)
    end = width if row_ends is None else row_ends.long().clamp(0, width).unsqueeze(1)
    bits = torch.where(logits == 0, 0.0, logits).view(torch.int32).long()
    keys = torch.where(bits < 0, bits ^ (SIGN - 1), bits) + SIGN
    selectable = (column >= start) & (column < end) & (logits > float("-inf"))
    return torch.where(selectable, keys, 0), column - start


def _threshold(state: torch.Tensor) -> torch.Tensor:
    return state[:, :1].long() + SIGN


def _tied(keys: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    return (keys == _threshold(state)) & (keys > 0)


def _descend(sums: torch.Tensor, state: torch.Tensor, level: int) -> torch.Tensor:
    """Append the highest digit at which ``need`` scores are reached, the lowest where none is, and take off those above
    it. Behind the last level the digits are a whole key, kept as a signed integer."""
    (prefix, need), sums = state.long().unbind(1), sums.long().clamp_min(0)
    reached = sums.flip(1).cumsum(1).flip(1)  # scores whose digit is at least this one
    place = torch.arange(sums.shape[1], device=sums.device)
    digit = torch.where(reached >= need.unsqueeze(1), place, 0).amax(1)
    above = torch.where(place > digit.unsqueeze(1), sums, 0).sum(1)
    prefix = prefix << BITS[level] | digit
    if level == LEVELS - 1:
        prefix = prefix - SIGN
    return torch.stack([prefix, need - above], 1).to(torch.int32)
