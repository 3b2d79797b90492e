"""The oracle: a band of a group's weight is expanded at a time, and multiplied in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sparse_attn.weight_layout import (
    CODE_DTYPE,
    PackedWeight,
    Weight,
    dequantise,
    parse_weight_layout,
    weight_entry,
    weight_rows,
)  # fmt: skip

BAND = 1 << 22  # values of a weight that are expanded at once


def grouped_linear(
    rows: torch.Tensor, ends: torch.Tensor | None, codes: torch.Tensor, scales: torch.Tensor | None, layout: str
) -> torch.Tensor:
    n, outputs = rows.shape[0], codes.shape[1]
    weight: Weight = codes
    if scales is not None:
        weight = PackedWeight(codes.view(CODE_DTYPE[parse_weight_layout(layout).codes]), scales, layout)
    out = torch.zeros(n, outputs, dtype=rows.dtype, device=rows.device)
    start = 0
    for group, end in enumerate([n] if ends is None else ends.clamp(0, n).tolist()):
        if end > start:
            out[start:end] = _product(rows[start:end], weight_entry(weight, group), outputs)
            start = end
    return out


def _product(rows: torch.Tensor, weight: Weight, outputs: int) -> torch.Tensor:
    wide, step = rows.float(), max(1, BAND // max(1, rows.shape[1]))
    bands = [
        F.linear(wide, dequantise(weight_rows(weight, first, min(first + step, outputs))))
        for first in range(0, outputs, step)
    ]
    return torch.cat(bands, dim=1).to(rows.dtype) if bands else rows.new_empty(rows.shape[0], 0)
