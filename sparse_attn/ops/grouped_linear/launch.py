"""The GPU implementation: one launch."""

from __future__ import annotations

import torch

from sparse_attn.device import pdl
from sparse_attn.ops.grouped_linear import config, kernels, shapes
from sparse_attn.target import target_of
from sparse_attn.weight_layout import parse_weight_layout


def grouped_linear(
    rows: torch.Tensor, ends: torch.Tensor | None, codes: torch.Tensor, scales: torch.Tensor | None, layout: str
) -> torch.Tensor:
    n, columns = rows.shape
    groups, outputs = codes.shape[:2]
    out = shapes.allocate_product(rows, codes)
    if n == 0 or outputs == 0:
        return out
    packed = None if layout == shapes.PLAIN else parse_weight_layout(layout)
    target = target_of(rows.device)
    launch = config.config(n, groups, None if packed is None else packed.block[1], rows.element_size(), target)
    if packed is None or scales is None:
        form, block, first_row, scale_strides = "plain", (1, launch.block_k), 0, (0, 0, 0)
    else:
        form, block, first_row, scale_strides = packed.codes, packed.block, packed.first_row, scales.stride()
    kernels.grouped_linear[(launch.tiles(n, groups), -(-outputs // launch.block_n))](
        rows,
        ends,
        codes,
        scales,
        out,
        n,
        outputs,
        columns,
        first_row,
        *rows.stride(),
        0 if ends is None else ends.stride(0),
        *codes.stride(),
        *scale_strides,
        GROUPS=groups,
        GROUPS_PADDED=1 << groups.bit_length(),
        FORM=form,
        E8M0=packed is not None and packed.scale == "e8m0",
        BLOCK_ROWS=block[0],
        BLOCK_COLUMNS=block[1],
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **pdl.launched(target),
    )
    return out
