"""The oracle: keys as 64-bit integers, counted by scatter; and what debug mode asks of values."""

from __future__ import annotations

import torch

from sparse_attn.framework import debug
from sparse_attn.ops.topk.ranks.fake import BITS, LEVELS, SHIFTS, count_words, num_blocks, ties_dtype

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


def pack_candidates(
    logits: torch.Tensor, columns: torch.Tensor, row_starts: torch.Tensor | None, block_size: int
) -> torch.Tensor:
    (rows, width), k = logits.shape, columns.shape[1]
    out = torch.zeros(rows, k + count_words(width, block_size), dtype=torch.int32, device=logits.device)
    if width == 0:
        out[:, :k] = torch.full((), float("-inf"), dtype=torch.float32, device=logits.device).view(torch.int32)
        return out
    start = 0 if row_starts is None else row_starts.long().clamp(0, width).unsqueeze(1)
    held, column = columns >= 0, columns.long().clamp_min(0)
    scores = torch.where(held, logits.gather(1, (column + start).clamp_max(width - 1)), float("-inf"))
    counts = torch.zeros(rows, num_blocks(width, block_size), dtype=torch.int32, device=logits.device)
    block = (column // block_size).clamp_max(counts.shape[1] - 1)  # of columns that no score has: any
    counts.scatter_add_(1, torch.where(held, block, 0), held.to(torch.int32))
    out[:, :k] = scores.view(torch.int32)
    dtype = ties_dtype(block_size)
    out[:, k:].view(dtype)[:, : counts.shape[1]] = counts.to(dtype)
    return out


def merge_candidates(candidates: torch.Tensor, columns: torch.Tensor, block_size: int, rank: int) -> torch.Tensor:
    (ranks, rows, _), k = candidates.shape, columns.shape[1]
    if rows == 0:
        return torch.empty_like(columns)
    scores = candidates[..., :k].contiguous().view(torch.float32)
    keys, _ = _keys(scores.transpose(0, 1).flatten(1), None, None)
    least = keys.sort(1, descending=True).values[:, k - 1 : k]  # the k-th, or 0
    own = keys[:, rank * k : (rank + 1) * k]
    need = k - (keys > least).sum(1, keepdim=True)
    tied = (keys == least) & (keys > 0)
    # The block of each candidate of the whole row: ties before it are those of lower blocks, and its rank's own.
    counts = candidates[..., k:].contiguous().view(ties_dtype(block_size)).long()
    place = torch.arange(k, device=columns.device).expand(ranks, rows, k).contiguous()
    block = torch.searchsorted(counts.cumsum(2), place, right=True)
    dealt = block * ranks + torch.arange(ranks, device=columns.device).view(-1, 1, 1)
    order = (dealt * k + place).transpose(0, 1).flatten(1).argsort(1)
    before = tied.gather(1, order).long()
    before = torch.empty_like(before).scatter_(1, order, before.cumsum(1) - before)[:, rank * k : (rank + 1) * k]
    chosen = (own > least) | (tied[:, rank * k : (rank + 1) * k] & (before < need))
    most = torch.iinfo(torch.int32).max
    ascending = torch.where(chosen, columns, most).sort(1).values
    return torch.where(ascending < most, ascending, -1)


def rules_of_count_digits(
    logits: torch.Tensor, row_starts: torch.Tensor | None, row_ends: torch.Tensor | None, sums: torch.Tensor | None
) -> None:
    _rules_of_ranges(logits, row_starts, row_ends)
    if sums is not None:
        debug.at_least("sums", sums, 0, "a count")


def rules_of_take_winners(
    logits: torch.Tensor,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor | None,
    ties: torch.Tensor,
    above: torch.Tensor,
    block_size: int,
) -> None:
    _rules_of_ranges(logits, row_starts, row_ends)
    for name, value in (("ties", ties), ("above", above)):
        debug.at_most(name, value.int(), block_size, "block_size")


def _rules_of_ranges(logits: torch.Tensor, row_starts: torch.Tensor | None, row_ends: torch.Tensor | None) -> None:
    debug.ranges("row_starts", row_starts, "row_ends", row_ends, logits.shape[1], "the width of logits")


def rules_of_pack_candidates(logits: torch.Tensor, columns: torch.Tensor, row_starts: torch.Tensor | None) -> None:
    width = logits.shape[1]
    debug.at_least("columns", columns, -1, "no column")
    ends = columns if row_starts is None else columns + row_starts.clamp(0, width).unsqueeze(1)
    debug.at_most("columns", torch.where(columns < 0, -1, ends), width - 1, "the last column of logits")


def rules_of_merge_candidates(candidates: torch.Tensor, columns: torch.Tensor, block_size: int) -> None:
    counts = candidates[..., columns.shape[1] :].view(ties_dtype(block_size))
    debug.at_most("counts", counts.int(), block_size, "block_size")
    debug.at_least("columns", columns, -1, "no column")
