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
    there = (ids >= 0) & (ids < experts)
    ordered, order = torch.sort(torch.where(there, ids, experts).flatten(), stable=True)
    ends = torch.searchsorted(ordered, torch.arange(experts, device=ids.device, dtype=ids.dtype), right=True)
    ends = ends.to(torch.int32)
    inner = gated(product(x[order // max(k, 1)], ends, *gate_up), clamp)
    out = product(inner, ends, *down)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    terms = out[place].view(tokens, k, x.shape[1]).float() * weights.unsqueeze(-1)
    return torch.where(there.unsqueeze(-1), terms, 0.0).sum(1).to(x.dtype)


def gated(gate_up: torch.Tensor, clamp: float | None) -> torch.Tensor:
    """silu(gate) * up of [..., 2I], gate first, in fp32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return (F.silu(gate) * up).to(gate_up.dtype)
