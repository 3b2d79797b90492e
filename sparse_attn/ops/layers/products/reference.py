"""The oracles, and what debug mode asks of values. A band of a group's weight is expanded at a time, and multiplied in
fp32. Experts are two such products of rows that are sorted by expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sparse_attn.fp8 import fp8_decode, fp8_quantise
from sparse_attn.framework import debug
from sparse_attn.weight_layout import (
    CODE_DTYPE,
    PackedWeight,
    Weight,
    dequantise,
    parse_weight_layout,
    weight_entry,
    weight_rows,
)

ROW_GROUP, ROW_FLOOR = 128, 448 * 2.0**-126  # columns under a scale; no scale is subnormal
BAND = 1 << 22  # values of a weight that are expanded at once


def grouped_linear(
    rows: torch.Tensor,
    ends: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    layout: str,
    batch_invariant: bool,
) -> torch.Tensor:
    n, outputs = rows.shape[0], codes.shape[1]
    weight: Weight = codes
    if scales is not None:
        weight = PackedWeight(codes.view(CODE_DTYPE[parse_weight_layout(layout).codes]), scales, layout)
    out = torch.zeros(n, outputs, dtype=rows.dtype, device=rows.device)
    start = 0
    for group, end in enumerate([n] if ends is None else ends.clamp(0, n).tolist()):
        if end > start:
            out[start:end] = _product(rows[start:end], weight_entry(weight, group), outputs, batch_invariant)
            start = end
    return out


def _product(rows: torch.Tensor, weight: Weight, outputs: int, alone: bool) -> torch.Tensor:
    """alone: each row on its own, so that its sums are the same whatever rows there are."""
    wide, step = rows.float(), max(1, BAND // max(1, rows.shape[1]))
    bands = []
    for first in range(0, outputs, step):
        band = dequantise(weight_rows(weight, first, min(first + step, outputs)))
        bands.append(torch.cat([F.linear(row, band) for row in wide.split(1)]) if alone else F.linear(wide, band))
    return torch.cat(bands, dim=1).to(rows.dtype) if bands else rows.new_empty(rows.shape[0], 0)


def grouped_linear_fp8(
    rows: torch.Tensor,
    ends: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    layout: str,
    batch_invariant: bool,
) -> torch.Tensor:
    return grouped_linear(quantised_rows(rows), ends, codes, scales, layout, batch_invariant).to(rows.dtype)


def quantised_rows(rows: torch.Tensor) -> torch.Tensor:
    """fp32 [n, columns]: what fp8 codes and a power of two for every 128 columns leave of rows; NaN for infinities."""
    n, columns = rows.shape
    blocks = F.pad(rows.float(), (0, -columns % ROW_GROUP)).view(n, -(-columns // ROW_GROUP), ROW_GROUP)
    codes, scales = fp8_quantise(blocks, "e4m3fn", "pow2", ROW_FLOOR)
    return (fp8_decode(codes, "e4m3fn") * scales.unsqueeze(-1)).flatten(1)[:, :columns]


def packed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor,
    gate_up_layout: str,
    down: torch.Tensor,
    down_scales: torch.Tensor,
    down_layout: str,
    clamp: float | None,
    activations: str,
    batch_invariant: bool,
) -> torch.Tensor:
    product = grouped_linear if activations == "exact" else grouped_linear_fp8
    experts, (tokens, k) = gate_up.shape[0], ids.shape
    order, place, ends = _sorted_by_expert(ids, experts)
    both = product(x[order // max(k, 1)], ends, gate_up, gate_up_scales, gate_up_layout, batch_invariant)
    terms = product(_gated(both, clamp), ends, down, down_scales, down_layout, batch_invariant)[place]
    terms = terms.view(tokens, k, x.shape[1]).float() * weights.unsqueeze(-1)
    there = ((ids >= 0) & (ids < experts)).unsqueeze(-1)
    return torch.where(there, terms, 0.0).sum(1).to(x.dtype)


def _sorted_by_expert(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids' places in the order of experts int64 [n], the inverse int64 [n], ends of the experts' rows int32 [experts])
    of int32 ids of n elements. Those of no expert come last, behind all ends."""
    there = (ids >= 0) & (ids < experts)
    ordered, order = torch.sort(torch.where(there, ids, experts).flatten(), stable=True)
    numbers = torch.arange(experts, device=ids.device, dtype=ids.dtype)
    ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    rows = torch.arange(order.shape[0], device=order.device)
    return order, torch.empty_like(order).scatter_(0, order, rows), ends


def _gated(gate_up: torch.Tensor, clamp: float | None) -> torch.Tensor:
    """silu(gate) * up of [..., 2I], gate first, in fp32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return (F.silu(gate) * up).to(gate_up.dtype)


def rules_of_grouped_linear(rows: torch.Tensor, ends: torch.Tensor | None) -> None:
    if ends is None:
        return
    debug.at_least("ends", ends, 0, "the first row")
    debug.at_most("ends", ends, rows.shape[0], "rows")
    before = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    debug.refuse("ends", ends, ends < before, "ascending ends, at least {}", limit=before)


def rules_of_packed_experts(weights: torch.Tensor) -> None:
    debug.not_nan("weights", weights)
