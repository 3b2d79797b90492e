"""Shape of the experts' result, and the way by rows that are sorted by expert."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, str], torch.Tensor]


def allocate_sums(x: torch.Tensor) -> torch.Tensor:
    """Uninitialised [tokens, hidden] as ``x``, contiguous."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def by_expert(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor, str],
    down: tuple[torch.Tensor, torch.Tensor, str],
    clamp: float | None,
    product: Product,
) -> torch.Tensor:
    """gate_up, down: codes, scales, layout. product: a grouped product of rows, ends and these."""
    experts, (tokens, k) = gate_up[0].shape[0], ids.shape
    order, place, ends = sorted_by_expert(ids, experts)
    inner = gated(product(x[order // max(k, 1)], ends, *gate_up), clamp)
    terms = product(inner, ends, *down)[place].view(tokens, k, x.shape[1]).float() * weights.unsqueeze(-1)
    there = ((ids >= 0) & (ids < experts)).unsqueeze(-1)
    return torch.where(there, terms, 0.0).sum(1).to(x.dtype)


def sorted_by_expert(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids' places in the order of experts int64 [n], the inverse int64 [n], ends of the experts' rows int32 [experts])
    of int32 ids of n elements. Those of no expert come last, behind all ends."""
    there = (ids >= 0) & (ids < experts)
    ordered, order = torch.sort(torch.where(there, ids, experts).flatten(), stable=True)
    numbers = torch.arange(experts, device=ids.device, dtype=ids.dtype)
    ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    rows = torch.arange(order.shape[0], device=order.device)
    return order, torch.empty_like(order).scatter_(0, order, rows), ends


def gated(gate_up: torch.Tensor, clamp: float | None) -> torch.Tensor:
    """silu(gate) * up of [..., 2I], gate first, in fp32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return (F.silu(gate) * up).to(gate_up.dtype)
