"""The oracle: a band of a group's weight is expanded at a time, and multiplied in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sparse_attn.fp8 import fp8_decode, fp8_quantise
from sparse_attn.weight_layout import (
    CODE_DTYPE,
    PackedWeight,
    Weight,
    dequantise,
    parse_weight_layout,
    weight_entry,
    weight_rows,
)  # fmt: skip

ROW_GROUP, ROW_FLOOR = 128, 448 * 2.0**-126  # columns under a scale; no scale is subnormal
BAND = 1 << 22  # values of a weight that are expanded at once


def grouped_linear(
    rows: torch.Tensor,
    ends: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    layout: str,
    batch_invariant: bool = False,
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
    batch_invariant: bool = False,
) -> torch.Tensor:
    return grouped_linear(quantised_rows(rows), ends, codes, scales, layout, batch_invariant).to(rows.dtype)


def quantised_rows(rows: torch.Tensor) -> torch.Tensor:
    """fp32 [n, columns]: what fp8 codes and a power of two for every 128 columns leave of rows; NaN for infinities."""
    n, columns = rows.shape
    blocks = F.pad(rows.float(), (0, -columns % ROW_GROUP)).view(n, -(-columns // ROW_GROUP), ROW_GROUP)
    codes, scales = fp8_quantise(blocks, "e4m3fn", "pow2", ROW_FLOOR)
    return (fp8_decode(codes, "e4m3fn") * scales.unsqueeze(-1)).flatten(1)[:, :columns]
