"""Launch of the product of rows that are quantised to fp8."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sparse_attn.device import pdl
from sparse_attn.framework.target import Target, target_of
from sparse_attn.ops.layers.linears.fp8 import kernels
from sparse_attn.ops.layers.linears.fp8.config import GROUP
from sparse_attn.ops.layers.linears.plan import Plan, Product, product_format

QUANTISED = 8, 4  # rows, groups of columns, of a CTA


def quantise(rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, target: Target) -> None:
    """codes: uint8 [rows, columns padded to GROUP], contiguous; scales: fp32 [rows, groups of columns], any strides."""
    n, groups = scales.shape
    count, most = QUANTISED
    together = min(most, 1 << (groups - 1).bit_length())
    kernels.quantise[(-(-n // count), -(-groups // together))](
        rows, codes, scales, n, rows.shape[1], groups, *rows.stride(), *scales.stride(), GROUP=GROUP, ROWS=count,
        GROUPS=together, FP8_CAST=target.fp8_cast, num_warps=4,
        **pdl.launched(target),
    )  # fmt: skip


def multiply_by_torch(product: Product, plan: Plan) -> torch.Tensor:
    """As ``multiply``, by torch's scaled_mm, which allocates its output."""
    rows, _, codes, scales, _, problem, _, (x, x_scales, *widened), _ = product
    assert scales is not None
    x_scales = x_scales.t()
    scales = widened[0].copy_(scales[0].view(torch.float8_e8m0fnu)) if widened else scales[0].contiguous()
    quantise(rows, x, x_scales[: problem.rows], target_of(rows.device))
    by_row, by_block = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    out = F.scaled_mm(
        x.view(torch.float8_e4m3fn), codes[0].view(torch.float8_e4m3fn).t(), x_scales, by_row, scales.t(), by_block,
        output_dtype=problem.dtype,
    )  # fmt: skip
    return out[: problem.rows]


def multiply(product: Product, plan: Plan) -> None:
    rows, ends, codes, scales, out, problem, first_row, (x, x_scales), _ = product
    assert scales is not None
    target = target_of(rows.device)
    launched = pdl.launched(target)
    quantise(rows, x, x_scales, target)
    codes = codes if codes.stride(-1) == 1 else codes.contiguous()
    if target.fp8_dot:  # a cast in the loop would bring operands through registers
        x = x.view(torch.float8_e4m3fn)
        codes = codes.view(torch.float8_e4m3fn) if problem.codes == "e4m3" else codes
    kernels.multiply[(plan.tiles, -(-(first_row + problem.outputs) // plan.block_n))](  # with those that were cut
        x,
        x_scales,
        ends,
        codes,
        scales,
        out,
        problem.rows,
        problem.groups,
        problem.outputs,
        problem.columns,
        first_row,
        0 if ends is None else ends.stride(0),
        *codes.stride()[:2],
        *scales.stride(),
        GROUPS_PADDED=1 << problem.groups.bit_length(),
        **product_format(problem),
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        GROUP=GROUP,
        FP8_DOT=target.fp8_dot,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **launched,
    )
