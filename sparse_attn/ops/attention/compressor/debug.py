"""Rules of debug mode for each argument."""

from __future__ import annotations

import torch

from sparse_attn.framework import debug


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
