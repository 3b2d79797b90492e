"""The oracle: for every completed entry, look up the tokens it pools; then keep the step's tokens."""

from __future__ import annotations

import torch

from sparse_attn.framework import debug
from sparse_attn.layout import PlainLayout, parse_layout
from sparse_attn.ops.indexer.queries.reference import hadamard_transform
from sparse_attn.ops.layers.rope.reference import apply_rope


def compress_and_cache(
    kv: torch.Tensor,
    gate: torch.Tensor,
    position_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    positions: torch.Tensor,
    request_ids: torch.Tensor,
    state: torch.Tensor,
    state_table: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin: torch.Tensor,
    ratio: int,
    overlap: bool,
    eps: float,
    rope_start: int,
    hadamard: bool,
    layout: str,
) -> None:
    kind, tokens = parse_layout(layout), kv.shape[0]
    valid = (positions >= 0) & (request_ids >= 0) & (request_ids < state_table.shape[0])
    biased = gate + position_bias[positions.clamp_min(0).long() % ratio]
    inside = (slot_mapping >= 0) & (slot_mapping < cache.shape[0] * cache.shape[1])
    rows = torch.arange(tokens, device=kv.device)[valid & inside & ((positions + 1) % ratio == 0)]
    if len(rows):
        pooled_kv, pooled_gate = _pooled(
            rows, kv, biased, positions.long(), request_ids.long(), state, state_table, ratio, overlap
        )
        entries = (torch.softmax(pooled_gate, dim=1) * pooled_kv).sum(1)
        entries = entries * torch.rsqrt(entries.pow(2).mean(1, keepdim=True) + eps) * norm_weight.float()
        first = positions[rows] + 1 - ratio
        entries = apply_rope(entries, first, cos_sin, start=rope_start, interleaved=True, inverse=False)
        if hadamard:
            entries = hadamard_transform(entries)
        if not isinstance(kind, PlainLayout):
            entries = entries.to(torch.bfloat16).float()
        kind.encode(cache, slot_mapping[rows], entries)
    _keep(torch.cat([kv, biased], dim=1), valid, positions.long(), request_ids.long(), state, state_table)


def _pooled(
    rows: torch.Tensor,
    kv: torch.Tensor,
    biased: torch.Tensor,
    positions: torch.Tensor,
    request_ids: torch.Tensor,
    state: torch.Tensor,
    state_table: torch.Tensor,
    ratio: int,
    overlap: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(kv, gate) [entries, pooled tokens, dim] of the entries that ``rows`` complete; gate -inf for what is missing."""
    span = 2 * ratio if overlap else ratio
    back = torch.arange(span - 1, -1, -1, device=kv.device)
    position, row = positions[rows, None] - back, rows[:, None] - back  # [entries, span]
    request = request_ids[rows, None]
    at = row.clamp_min(0)
    here = (row >= 0) & (position >= 0) & (request_ids[at] == request) & (positions[at] == position)
    slot = _state_slots(request, position.clamp_min(0), state, state_table)
    stored = (position >= 0) & ~here & (slot >= 0)
    values = torch.where(here.unsqueeze(2), kv[at], 0.0)
    gates = torch.where(here.unsqueeze(2), biased[at], -torch.inf)
    size = state.shape[1]
    values[stored], gates[stored] = state[slot[stored] // size, slot[stored] % size].chunk(2, dim=1)
    if not overlap:
        return values, gates
    before = (torch.arange(span, device=kv.device) < ratio).unsqueeze(1)
    dim = kv.shape[1] // 2

    def half_of(both: torch.Tensor) -> torch.Tensor:
        return torch.where(before, both[..., :dim], both[..., dim:])

    return half_of(values), half_of(gates)


def _keep(
    kept: torch.Tensor,
    valid: torch.Tensor,
    positions: torch.Tensor,
    request_ids: torch.Tensor,
    state: torch.Tensor,
    state_table: torch.Tensor,
) -> None:
    """Write the step's rows into their rings, the last one where several fall on the same place."""
    tokens, ring = kept.shape[0], state_table.shape[1] * state.shape[1]
    later = torch.arange(tokens, device=kept.device) + ring
    at = later.clamp_max(tokens - 1)
    replaced = (later < tokens) & (request_ids[at] == request_ids) & (positions[at] == positions + ring)
    known = valid & ~replaced
    slot = _state_slots(request_ids[known], positions[known], state, state_table)
    written = slot >= 0
    block, within = slot[written] // state.shape[1], slot[written] % state.shape[1]
    state[block, within] = kept[known][written]


def _state_slots(
    requests: torch.Tensor, positions: torch.Tensor, state: torch.Tensor, state_table: torch.Tensor
) -> torch.Tensor:
    """Rows of the state, -1 where the block is outside it."""
    num_blocks, block_size = state.shape[:2]
    block = state_table[requests, positions // block_size % state_table.shape[1]].long()
    return torch.where((block >= 0) & (block < num_blocks), block * block_size + positions % block_size, -1)


# --- what debug mode asks of values


def rules_of_compress_and_cache(
    kv: torch.Tensor,
    positions: torch.Tensor,
    request_ids: torch.Tensor,
    state: torch.Tensor,
    state_table: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin: torch.Tensor,
    ratio: int,
    overlap: bool,
) -> None:
    debug.at_least("positions", positions, -1, "-1 is none")
    debug.places("request_ids", request_ids, state_table.shape[0], "requests")
    valid = (positions >= 0) & (request_ids >= 0)
    _in_order(positions, request_ids, valid)
    complete = valid & ((positions + 1) % ratio == 0)
    debug.slots("slot_mapping", torch.where(complete, slot_mapping, -1), cache)
    rotated = torch.where(complete & (slot_mapping >= 0), positions, -1)
    debug.places("positions", rotated, cos_sin.shape[0] + ratio - 1, "entries begin within the rows of cos_sin")
    # An entry may pool from the state what lies before the step, and every row goes there.
    span = 2 * ratio if overlap else ratio
    seen = torch.where(valid, positions, -1).long().unsqueeze(1) - torch.arange(span, device=kv.device)
    seen = torch.where(complete.unsqueeze(1), seen, seen[:, :1].expand_as(seen))
    column = torch.where(seen >= 0, seen // state.shape[1] % state_table.shape[1], -1)
    used = debug.used_by(state_table, request_ids.unsqueeze(1), column)
    debug.blocks(state_table, used, state.shape[0], "state_table")


def _in_order(positions: torch.Tensor, request_ids: torch.Tensor, valid: torch.Tensor) -> None:
    """The rows of a request stand together and rise by one."""
    follows = (request_ids == request_ids.roll(1)) & (positions == positions.roll(1) + 1) & valid & valid.roll(1)
    follows[:1] = False
    begins = valid & ~follows
    order = torch.where(begins, request_ids, -1).argsort(stable=True)
    order = order[begins[order]]
    again = torch.zeros_like(valid)
    again[order[1:]] = request_ids[order[1:]] == request_ids[order[:-1]]
    debug.refuse("positions", positions, again, "one more than in the row before, the rows of a request together")
