"""Rows, ends, and what a product of packed weights may be off by."""

from __future__ import annotations

import torch

from sparse_attn.weight_layout import PackedWeight, dequantise

NAN = float("nan")
EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def rows_of(n, columns, dtype, device="cpu", seed=0):
    """Rows in a view whose rows and columns lie apart, NaN between them."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((n, 3 * columns + 5), NAN, dtype=dtype, device=device)
    wide[:, 1 : 1 + 2 * columns : 2] = torch.randn(n, columns, generator=generator).to(dtype).to(device)
    return wide[:, 1 : 1 + 2 * columns : 2]


def exact(rows, ends, weight):
    """(fp64 products, fp64 sums of their terms' magnitudes), on the CPU; 0 for rows behind the last end."""
    values = (dequantise(weight) if isinstance(weight, PackedWeight) else weight).cpu().double()
    rows = rows.cpu().double()
    out = rows.new_zeros(rows.shape[0], values.shape[1])
    size, start = out.clone(), 0
    for group, end in enumerate([rows.shape[0]] if ends is None else ends):
        out[start:end] = rows[start:end] @ values[group].t()
        size[start:end] = rows[start:end].abs() @ values[group].abs().t()
        start = end
    return out, size


def check(got, rows, ends, weight):
    """Each term is exact up to its scale's product, and sums in fp32 lose at most 2**-24 of their terms a step; on a
    GPU matrix units may drop bits of fp32 below 2**-22 of the largest term."""
    want, size = exact(rows, ends, weight)
    steps = rows.shape[1] + 4
    allowed = size * (steps * 2.0**-24 + 2.0**-21) + want.abs() * EPSILON[got.dtype]
    assert got.dtype == rows.dtype and got.shape == want.shape and got.is_contiguous()
    off = (got.cpu().double() - want).abs() - allowed
    assert off.max().item() <= 0 if off.numel() else True, f"{off.max()} beyond the bound of {allowed.max()}"


def tensor_of(ends, device="cpu"):
    """Ends that lie apart, wild ones between them."""
    wild = torch.full((2 * len(ends),), 2**31 - 1, dtype=torch.int32, device=device)
    wild[::2] = torch.tensor(ends, dtype=torch.int32, device=device)
    return wild[::2]
