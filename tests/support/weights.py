"""Random packed weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sparse_attn.weight_layout import PackedWeight, WeightLayout, packed_weight


def bytes_of(*shape: int, seed: int, among: Iterable[int] = range(256)) -> torch.Tensor:
    values = torch.tensor(list(among), dtype=torch.uint8)
    return values[torch.randint(len(values), shape, generator=torch.Generator().manual_seed(seed))]


def random_weight(layout: WeightLayout, *shape: int, seed: int = 0, moderate: bool = False) -> PackedWeight:
    """Every code but NaN; scales of every size that fp32 holds beside it, or 2**-11 to 2**-6 where ``moderate``."""
    *leading, rows, columns = shape
    grid = (*leading, *layout.grid(rows, columns))
    if layout.codes == "e4m3":
        finite = [code for code in range(256) if code & 127 != 127]
        codes = bytes_of(*shape, seed=seed, among=finite).view(torch.float8_e4m3fn)
    else:
        codes = bytes_of(*leading, rows, columns // 2, seed=seed)
    if layout.scale == "fp32":
        scales = torch.rand(grid, generator=torch.Generator().manual_seed(seed + 1)) + 0.01
        scales *= 2.0**-6 if moderate else 1.0
    else:
        scales = bytes_of(*grid, seed=seed + 1, among=range(116, 122) if moderate else range(40, 200))
    return packed_weight(codes, scales, layout)
