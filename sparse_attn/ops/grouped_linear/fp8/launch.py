"""Launch of the product of rows that are quantised to fp8."""

from __future__ import annotations

from sparse_attn.device import pdl
from sparse_attn.ops.grouped_linear.fp8 import kernels
from sparse_attn.ops.grouped_linear.fp8.config import GROUP
from sparse_attn.ops.grouped_linear.launch import Product
from sparse_attn.ops.grouped_linear.plan import Plan
from sparse_attn.target import target_of


def multiply(product: Product, plan: Plan) -> None:
    rows, ends, codes, scales, out, problem, first_row, (x, x_scales), _ = product
    assert scales is not None
    target = target_of(rows.device)
    launched = pdl.launched(target)
    kernels.quantise[tuple(x_scales.shape)](
        rows, x, x_scales, problem.columns, *rows.stride(), GROUP=GROUP, num_warps=1, **launched
    )  # fmt: skip
    codes = codes if codes.stride(-1) == 1 else codes.contiguous()
    kernels.multiply[(plan.tiles, -(-problem.outputs // plan.block_n))](
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
        CODES=problem.codes,
        E8M0=problem.scale == "e8m0",
        BLOCK_ROWS=problem.block[0],
        BLOCK_COLUMNS=problem.block[1],
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        GROUP=GROUP,
        FP8_DOT=target.fp8_dot,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **launched,
    )
