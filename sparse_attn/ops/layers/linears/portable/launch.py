"""Launch of the portable product."""

from __future__ import annotations

from sparse_attn.device import pdl
from sparse_attn.framework.target import target_of
from sparse_attn.ops.layers.linears.plan import Plan, Product, product_format
from sparse_attn.ops.layers.linears.portable import kernels


def multiply(product: Product, plan: Plan) -> None:
    rows, ends, codes, scales, out, problem, first_row = product[:7]
    kernels.grouped_linear[(plan.tiles, -(-problem.outputs // plan.block_n))](
        rows,
        ends,
        codes,
        scales,
        out,
        problem.rows,
        problem.groups,
        problem.outputs,
        problem.columns,
        first_row,
        *rows.stride(),
        0 if ends is None else ends.stride(0),
        *codes.stride(),
        *((0, 0, 0) if scales is None else scales.stride()),
        GROUPS_PADDED=1 << problem.groups.bit_length(),
        **product_format(problem),
        SCALED_VALUES=plan.scaled_values,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **pdl.launched(target_of(rows.device)),
    )
